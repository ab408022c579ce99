"""The checks of exercises 11.1, the order of a backward pass, 11.3, the time of a layer, and 11.4, its smallest width.

None of them starts any ranks. In 11.1, a clock plays the learner's order. The FLOPs of 11.3 are those that torch counts
while a plain layer runs on meta tensors, which have shapes but no elements. The width of 11.4 is found by bisection.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from tplab.collectives.links import Link
from tplab.cost.backward import NEEDS, mlp_backward
from tplab.cost.clock import OrderError, Timing, play
from tplab.course.checks.forms.alone import Alone, Call, one
from tplab.course.checks.observation import Claim, NotRun, Observed, Seen
from tplab.course.checks.run_answer import called_as
from tplab.course.checks.trials import exercise

# 11.1: the order of a backward pass. The message can start after two matmuls of 5 ms, and two more take longer than it

COMPLETE = "the list contains each of the six steps once"
RECEIVED = "nobody reads dX while it's still on the wire"
POSSIBLE = "each step comes after whatever it needs"
STARTED, WAITED, TOTAL = "ms until the message starts", "ms of waiting", "ms in total"
DRAWN = "drawn"
FASTEST = {STARTED: 10.0, WAITED: 0.0, TOTAL: 20.0}


def steps(order: Any) -> str:
    """Return what's wrong with the list of steps, or ""."""
    if not isinstance(order, (list, tuple)) or not all(isinstance(name, str) for name in order):
        return f"backward_order returned {order!r}"
    if unknown := [name for name in order if name not in NEEDS]:
        return f"{unknown[0]!r} isn't one of the steps"
    if twice := [name for name in NEEDS if order.count(name) > 1]:
        return f"{twice[0]!r} is in it {order.count(twice[0])} times"
    missing = [name for name in NEEDS if name not in order and name != "wait"]
    return f"{missing[0]!r} is missing" if missing else ""


def run_order(backward_order: Any, call: Call) -> Seen:
    with called_as("backward_order()"):
        order = backward_order()
    if problem := steps(order):
        seen: Observed = {COMPLETE: Claim(problem)}
    elif "wait" not in order:
        seen = {RECEIVED: Claim("without 'wait', the layer before this one reads it too early")}
    else:
        seen = {COMPLETE: Claim(""), RECEIVED: Claim("")}
    if any(seen.values()):
        return one(seen | dict.fromkeys((POSSIBLE, *FASTEST), NotRun("something above is wrong")))
    try:
        timing = play(mlp_backward(order))
    except OrderError as error:
        needed = {"message": "start"}.get(str(error.missing), error.missing)
        seen[POSSIBLE] = Claim(f"{error.operation!r} comes before {needed!r}")
        return one(seen | dict.fromkeys(FASTEST, NotRun("the order is impossible")))
    waited = sum(wait.end - wait.start for wait in timing.waits())
    seen |= {POSSIBLE: Claim(""), STARTED: timing.spans["start"].start, WAITED: waited, TOTAL: timing.total}
    return one(seen | {DRAWN: drawing(timing)})


def drawing(timing: Timing[str]) -> str:
    """Draw the learner's order with a character per half millisecond."""
    return "\n".join(f"{lane:<9}{_lane(timing, lane)}" for lane in ("compute", "wire"))


def _lane(timing: Timing[str], lane: str) -> str:
    waits = [("waits", wait.start, wait.end) for wait in timing.waits()] if lane == "compute" else []
    boxes = [(span.operation.name, span.start, span.end) for span in timing.lanes.get((0, lane), [])]
    text = ""
    for name, start, end in sorted(boxes + waits, key=lambda box: box[1]):
        if end > start:
            edges = "··" if name == "waits" else "[]"
            width = round(2 * (end - start)) - 2
            fill = "·" if name == "waits" else " "
            text = f"{text:<{round(2 * start)}}{edges[0]}{name:{fill}^{width}}{edges[1]}"
    return text


exercise(
    "11.1", "Put the backward pass in order", takes=["backward_order"],
    trials=[
        Alone(
            calls=lambda generator: [
                Call(None, "matmuls of 5 ms and a message of 8 ms", shows=lambda seen: seen[0].get(DRAWN, ""))
            ],
            run=run_order, right=lambda call: one({**FASTEST}),
        )
    ],
    passed="20 ms: your rank computes all the time, although the message takes longer than any of its matmuls.",
)  # fmt: skip

# 11.3: the time of a layer


class Layer(NamedTuple):
    """The arguments of layer_seconds."""

    b: int
    s: int
    h: int
    p: int
    rate: float
    link: Link
    recompute: bool
    bytes_per_number: int


HEADS = 4


def flops(b: int, s: int, h: int, recompute: bool) -> int:
    """Return the FLOPs of a layer, forward and backward, as torch counts them."""

    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, device="meta", requires_grad=True)

    def forward() -> Tensor:
        q, k, v = ((x @ meta(h, h)).view(b, s, HEADS, -1).transpose(1, 2) for _ in range(3))  # [b, a, s, h/a]
        weights = (q @ k.transpose(2, 3)).softmax(-1)  # [b, a, s, s]
        y = (weights @ v).transpose(1, 2).reshape(b, s, h) @ meta(h, h)
        return F.gelu(y @ meta(h, 4 * h)) @ meta(4 * h, h)  # [b, s, h]

    x = meta(b, s, h)
    with FlopCounterMode(display=False) as counter:
        if recompute:
            forward()
        y = forward()
        y.backward(torch.empty_like(y))
    return counter.get_total_flops()


def layers(generator: torch.Generator) -> Iterator[Call]:
    for p in (8, 4, 1, 2):
        for recompute, width in ((False, 2), (True, 4)):
            draw = torch.rand(6, generator=generator, dtype=torch.float64).tolist()
            b, s, h = 3 + int(5 * draw[0]), 512 + 128 * int(8 * draw[1]), 1024 + 256 * int(12 * draw[2])
            link = Link(2e-6 * 10 ** draw[4], 2e-12 * 50 ** draw[5])
            layer = Layer(b, s, h, p, 3e13 * 20 ** draw[3], link, recompute, width)
            yield Call(layer, f"in microseconds, for b={b}, s={s}, h={h}, {recompute=}, bytes_per_number={width}", p=p)


def microseconds(value: Any) -> Any:
    """Return a number of seconds in microseconds, which are easier to read. Other values stay as they are."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return 1e6 * float(value) if is_number or (isinstance(value, Tensor) and value.numel() == 1) else value


def run_layer(layer_seconds: Any, call: Call) -> Seen:
    layer = call.given
    options = {"recompute": layer.recompute, "bytes_per_number": layer.bytes_per_number}
    text = ", ".join(f"{name}={value}" for name, value in options.items())
    with called_as(f"layer_seconds({layer.b}, {layer.s}, {layer.h}, {layer.p}, {layer.rate:.3g}, Link(...), {text})"):
        said = layer_seconds(*layer[:6], **options)
    pair = isinstance(said, (tuple, list)) and len(said) == 2
    return one(dict(zip(("compute", "communicate"), map(microseconds, said if pair else (said, said)), strict=True)))


def right_layer(call: Call) -> Seen:
    b, s, h, p, rate, link, recompute, width = call.given
    message = 2 * (p - 1) * (link.alpha + link.beta * width * b * s * h / p)  # a ring
    sent = (6 if recompute else 4) * message
    return one({"compute": 1e6 * flops(b, s, h, recompute) / (p * rate), "communicate": 1e6 * sent})


exercise(
    "11.3", "The time of a layer", takes=["layer_seconds"],
    trials=[Alone(calls=layers, run=run_layer, right=right_layer, tol=1e-7)],
    passed="Your FLOPs are those that torch counts. With more ranks, each of them computes less, but the messages "
    "stay as large as they were.",
)  # fmt: skip

# 11.4: the smallest width


class Width(NamedTuple):
    """The arguments of smallest_width. Without an efficiency, it's the default one."""

    p: int
    rate: float
    bandwidth: float
    efficiency: float | None

    def share(self, h: float) -> float:
        """Return the share of its time that a rank computes, from one token's FLOPs and bytes in a ring."""
        compute = 3 * 24 * h**2 / (self.p * self.rate)
        send = 4 * 2 * (self.p - 1) * (2 * h / self.p) / self.bandwidth
        return compute / (compute + send)


def widths(generator: torch.Generator) -> Iterator[Call]:
    for p, efficiency in ((12, None), (4, 0.9), (72, 0.5), (2, 0.75), (16, 0.6)):  # 12, since a byte has 8 bits
        draw = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        width = Width(p, 1e14 * 20 ** draw[0], 2e10 * 30 ** draw[1], efficiency)
        target = "" if efficiency is None else f", {efficiency=}"
        yield Call(width, f"smallest_width(p={p}, rate={width.rate:.3g}, bandwidth={width.bandwidth:.3g}{target})", p=p)


def smallest(width: Width) -> float:
    """Return the smallest h with this efficiency, by bisection."""
    target = 0.8 if width.efficiency is None else width.efficiency
    low, high = 1e-6, 1e12
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if width.share(middle) >= target else (middle, high)
    return high


def run_width(smallest_width: Any, call: Call) -> Seen:
    width = call.given
    with called_as(call.note):
        said = smallest_width(*width[:3], **({} if width.efficiency is None else {"efficiency": width.efficiency}))
    right = smallest(width)
    if isinstance(said, Tensor) and said.numel() == 1:
        said = said.item()
    if isinstance(said, (int, float)) and said == math.ceil(right):  # the next whole number is fine
        said = right
    return one({"h": float(said) if isinstance(said, int) and not isinstance(said, bool) else said})


exercise(
    "11.4", "How wide is wide enough?", takes=["smallest_width"],
    trials=[
        Alone(
            calls=widths, run=run_width, tol=1e-9,
            right=lambda call: one({"h": smallest(call.given)}),
        )
    ],
    passed="Neither b nor s is in your formula: only wider layers, faster links or fewer ranks help.",
)  # fmt: skip
