"""Helpers for the checks of exercises 6.2 and 6.4, which compare a parallel attention layer with plain PyTorch.

The layer loads its weights from an unsharded checkpoint, and the `Sharding` of each parameter determines which slice a
rank loads. An observation is a named result that a check records on each rank, such as the output or a gradient. Below,
n is the number of Q heads on a rank, m is the number of K and V heads on a rank, and d is the width of a head.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tplab.course import checks
from tplab.runtime import device
from tplab.tensor.full_state import load_full_state_dict
from tplab.tensor.sharding import Sharding

HEADS, DIM = 8, 4
HIDDEN = HEADS * DIM
PARTS = ("q", "k", "v")
GRADIENTS = ("dWq", "dWk", "dWv", "dWo", "dbq", "dbk", "dbv", "dbo")

NO_MASK = "what comes out without the causal mask"
PARTIAL = "this rank's summand plus the bias: not added up over the ranks"
BIAS_P_TIMES = "the right one with the last bias added p times"
OWN_QUERIES = "the part that comes from this rank's own queries"
WHOLE_GROUP = "the sum over all ranks, also over those that hold another head"
MEAN = "the mean over the copies, not the sum"
K_V_AGAIN = "the right one with the part through K and V counted once for every copy"

Local = Callable[[Tensor, int, int, bool], Tensor]  # y [b, s, (n + 2m)·d], n, m, causal -> [b, s, n·d]


@dataclass(frozen=True)
class Attention(checks.Case):
    """One way to build and run an attention layer with `kv_heads` K and V heads. Each exercise has its own subclass.

    weight, fused_bias: the parameter names of the fused weight [Wq; Wk; Wv] and of its bias
    mistakes:           functions that compute the output of a rank's heads from its columns of q, k, and v, each with
                        a common mistake
    """

    kv_heads: int = HEADS
    causal: bool = False
    bias: bool = True
    leading: tuple[int, int] = (3, 5)  # b, s
    transposed: bool = False
    weight: ClassVar[str]
    fused_bias: ClassVar[str]
    mistakes: ClassVar[Mapping[str, Local]]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The positional arguments of the constructor."""
        raise NotImplementedError

    @property
    def sharding(self) -> Sharding:
        """The sharding that the fused weight must declare."""
        raise NotImplementedError

    @property
    def options(self) -> dict[str, Any]:
        return ({"causal": True} if self.causal else {}) | ({} if self.bias else {"bias": False})

    def describe(self, name: str) -> str:
        arguments = [*self.sizes, *(f"{option}={value}" for option, value in self.options.items())]
        arguments += ["group=group"] * bool(self.groups)
        return f"{name}({', '.join(map(str, arguments))})" + " on a non-contiguous x" * self.transposed

    def crash(self, ask: str) -> str:
        """Return the question to ask if the learner's layer raises an error. `ask` is the exercise's own question."""
        no_bias = "Here the attention was built with bias=False. Which line needs a bias that is None?"
        return ask if self.bias else f"{no_bias} If it is not about that: {ask}"


def split(y: Tensor, head_dim: int = DIM) -> Tensor:
    return y.unflatten(-1, (-1, head_dim)).transpose(1, 2)  # [b, s, n·d] -> [b, n, s, d]


def merge(y: Tensor) -> Tensor:
    return y.transpose(1, 2).flatten(2)  # [b, n, s, d] -> [b, s, n·d]


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


class Problem(NamedTuple):
    """The input, the unsharded weights, and the results of single-process attention."""

    x: Tensor  # [b, s, h]
    full: dict[str, Tensor]  # Wq, Wk, Wv, and Wo, plus bq, bk, bv, and bo if there's a bias
    dy: Tensor  # [b, s, h]
    out: Tensor  # [b, s, h]
    gradients: dict[str, Tensor]  # gradients of x and the weights, keyed by name


def draw(case: Attention, generator: torch.Generator, size: int) -> Problem:
    rows = {"q": HIDDEN, "k": case.kv_heads * DIM, "v": case.kv_heads * DIM, "o": HIDDEN}
    full = {f"W{part}": checks.random_tensor(generator, count, HIDDEN) / 3 for part, count in rows.items()}
    if case.bias:
        full |= {f"b{part}": checks.random_tensor(generator, count) for part, count in rows.items()}
    x = checks.random_tensor(generator, *case.leading, HIDDEN)
    if case.transposed:
        x = checks.random_tensor(generator, HIDDEN, *reversed(case.leading)).permute(2, 1, 0)
    dy = checks.random_tensor(generator, *case.leading, HIDDEN)
    leaves = {name: value.clone().requires_grad_() for name, value in {"x": x, **full}.items()}
    q, k, v = (split(F.linear(leaves["x"], leaves[f"W{part}"], leaves.get(f"b{part}"))) for part in PARTS)
    k, v = (torch.stack([t[:, head * case.kv_heads // HEADS] for head in range(HEADS)], 1) for t in (k, v))
    out = F.linear(merge(attend(q, k, v, case.causal)), leaves["Wo"], leaves.get("bo"))
    out.backward(dy)
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return Problem(x, full, dy, out.detach(), gradients)


def give(case: Attention, problem: Problem, place: checks.Place) -> dict[str, Any]:
    rows = [len(mine) for mine in rows_of(case, place.index, place.size).values()]
    full = named(case, problem.full)
    return {"x": problem.x, "dy": problem.dy, "full": full, "rows": rows, "built": built(case, problem, place)}


def run(attention_class: Any, case: Attention, given: dict[str, Any], group: Any) -> checks.Observed:
    attention = attention_class(*case.sizes, **case.options, group=group, device=device(), dtype=case.dtype)
    params = dict(attention.named_parameters())
    sharding = str(getattr(params.get(case.weight), "tensor_parallel", None))
    seen: checks.Observed = {"parameters": shapes(params), f"sharding of {case.weight}": sharding}
    if seen != given["built"]:
        names = ("out", "dx", *GRADIENTS, "forward traffic", "backward traffic")
        return seen | dict.fromkeys(names, checks.NotRun("the parameters are others"))
    load_full_state_dict(attention, {name: value.to(device()) for name, value in given["full"].items()}, group)
    names_of = {"W": case.weight, "b": case.fused_bias, "Wo": "out.weight", "bo": "out.bias"}
    watched = {letters: params.get(name) for letters, name in names_of.items()}
    noted = checks.observe(
        attention,
        given["dy"].to(device()),
        inputs={"x": given["x"].to(device())},
        parameters=watched,
        any_size=1,
    )
    for letter in ("W", "b"):
        fused = noted.pop(f"d{letter}")
        parts = fused.split(given["rows"]) if isinstance(fused, Tensor) else [fused] * 3
        noted |= {f"d{letter}{part}": gradient for part, gradient in zip(PARTS, parts, strict=True)}
    return seen | noted


def expect(case: Attention, problem: Problem, place: checks.Place) -> checks.Expected:
    gradients = held_by(case, problem.gradients, place.index, place.size)
    sent = backward_traffic(case, problem, place)
    right: checks.Observed = {
        **built(case, problem, place),
        "out": problem.out,
        "dx": problem.gradients["x"],
        **{name: gradients.get(name[1:]) for name in GRADIENTS},
        "forward traffic": place.traffic(("all_reduce", problem.out.numel())),
        "backward traffic": in_the_same_calls(case, sent, place.observed[place.index]["backward traffic"]),
    }
    if case.twin is checks.Twin.BFLOAT16:  # the terms of dbk cancel, so in bfloat16 it's only rounding error
        del right["dbk"]
    return checks.Expected(right, lookalikes(case, problem, place))


def built(case: Attention, problem: Problem, place: checks.Place) -> checks.Observed:
    """Return what must be observed before the layer runs: the parameter shapes and the fused weight's sharding."""
    held = named(case, held_by(case, problem.full, place.index, place.size))
    return {"parameters": shapes(held), f"sharding of {case.weight}": str(case.sharding)}


def shapes(params: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {list(value.shape)}" for name, value in sorted(params.items()))


def rows_of(case: Attention, index: int, size: int) -> dict[str, list[int]]:
    """Return the rows of Wq, Wk, and Wv that belong to the heads of rank `index` out of `size` ranks."""
    mine = range(index * HEADS // size, (index + 1) * HEADS // size)
    groups = sorted({head * case.kv_heads // HEADS for head in mine})
    heads = {"q": [*mine], "k": groups, "v": groups}
    return {part: [head * DIM + i for head in heads[part] for i in range(DIM)] for part in PARTS}


def held_by(case: Attention, full: Mapping[str, Tensor], index: int, size: int) -> dict[str, Tensor]:
    """Return the shards of the full weights, or of their gradients, that rank `index` out of `size` ranks must hold."""
    rows = rows_of(case, index, size)
    held = {name: value[rows[name[1:]]] if name[1:] in rows else value for name, value in full.items()}
    return held | {"Wo": full["Wo"][:, rows["q"]]}


def named(case: Attention, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights keyed by the learner's parameter names, with those of q, k, and v fused."""
    names = {case.weight: torch.cat([held[f"W{part}"] for part in PARTS]), "out.weight": held["Wo"]}
    if "bo" in held:
        names |= {case.fused_bias: torch.cat([held[f"b{part}"] for part in PARTS]), "out.bias": held["bo"]}
    return names


def backward_traffic(case: Attention, problem: Problem, place: checks.Place) -> checks.Traffic:
    """Return the expected all-reduces of the backward pass.

    The operator f sums dx over the group. If K and V heads are replicated, f also sums the gradients of their rows over
    the copies.
    """
    copies = max(1, place.size // case.kv_heads)
    neighbors = place.ranks[place.index // copies * copies :][:copies]
    sizes = [2 * DIM * HIDDEN, 2 * DIM] if case.bias else [2 * DIM * HIDDEN]
    of_copies = checks.Traffic.expected(place.world_size, *(("all_reduce", size) for size in sizes), group=neighbors)
    return checks.Traffic([*place.traffic(("all_reduce", problem.x.numel())), *of_copies])


def in_the_same_calls(case: Attention, right: checks.Traffic, seen: Any) -> checks.Traffic:
    """Return the observed calls if they send as many elements in each group as those in `right`. Otherwise, return
    `right`.

    An answer may sum the gradients of K, V, and their biases over the copies one at a time or together.
    """

    def totals(traffic: checks.Traffic) -> dict[Any, int]:
        sums: dict[Any, int] = {}
        for call in traffic:
            key = (call.kind, call.dtype, call.group)
            sums[key] = sums.get(key, 0) + call.numel
        return sums

    waited = isinstance(seen, checks.Traffic) and all(call.waited for call in seen)
    wanted = checks.twins.expected(case.twin, {"traffic": right})["traffic"]
    return seen if waited and totals(seen) == totals(wanted) else right


def right_local(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
    """Compute the output of a rank's heads [b, s, n·d] from the rank's columns of q, k, and v [b, s, (n + 2m)·d]."""
    q, k, v = (split(part) for part in y.split([n * DIM, m * DIM, m * DIM], -1))
    k, v = (part.repeat_interleave(n // m, 1) for part in (k, v))
    return merge(attend(q, k, v, causal))


def unmasked(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
    return right_local(y, n, m, causal=False)


def summand(case: Attention, local: Local, x: Tensor, held: Mapping[str, Tensor]) -> Tensor:
    """Compute the term that one rank adds to the output [b, s, h], without the final bias."""
    n, m = (held[f"W{part}"].shape[0] // DIM for part in "qk")
    weight = torch.cat([held[f"W{part}"] for part in PARTS])
    bias = torch.cat([held[f"b{part}"] for part in PARTS]) if "bq" in held else None
    return F.linear(local(F.linear(x, weight, bias), n, m, case.causal), held["Wo"])


def lookalikes(case: Attention, problem: Problem, place: checks.Place) -> dict[str, dict[str, Any]]:
    """Return the values that common mistakes would produce on this rank, keyed by observation."""
    index, size = place.index, place.size
    held = [held_by(case, problem.full, i, size) for i in range(size)]
    bias = problem.full.get("bo", torch.zeros(HIDDEN, dtype=torch.float64))
    out: dict[str, Tensor] = {}
    for label, mistake in {**({NO_MASK: unmasked} if case.causal else {}), **case.mistakes}.items():
        out[label] = sum(summand(case, mistake, problem.x, mine) for mine in held) + bias
    if size == 1:
        return {"out": out}
    out[PARTIAL] = summand(case, right_local, problem.x, held[index]) + bias
    if case.bias:
        out[BIAS_P_TIMES] = problem.out + (size - 1) * bias
    copies = max(1, size // case.kv_heads)
    alike: dict[str, dict[str, Any]] = {"out": out}
    own = [gradients_of_summand(case, problem, mine) for mine in held]
    right = held_by(case, problem.gradients, index, size)
    for name in ["Wk", "Wv", *(["bk", "bv"] if case.bias else [])]:
        mistakes = {OWN_QUERIES: own[index][name], MEAN: right[name] / copies} if copies > 1 else {}
        if copies < size:
            mistakes[WHOLE_GROUP] = torch.stack([gradients[name] for gradients in own]).sum(0)
        alike[f"d{name}"] = mistakes
    if copies > 1:
        alike["dx"] = {K_V_AGAIN: problem.gradients["x"] + (copies - 1) * through_k_and_v(case, problem)}
    return alike


def gradients_of_summand(case: Attention, problem: Problem, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of the term that one rank adds to the output, with respect to that rank's weights."""
    leaves = {name: value.clone().requires_grad_() for name, value in held.items()}
    summand(case, right_local, problem.x, leaves).backward(problem.dy)
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def through_k_and_v(case: Attention, problem: Problem) -> Tensor:
    """Return the part of dx that flows through K and V. The rest flows through Q."""
    x, w = problem.x.clone().requires_grad_(), problem.full
    q = F.linear(problem.x, w["Wq"], w.get("bq"))
    k, v = (F.linear(x, w[f"W{part}"], w.get(f"b{part}")) for part in "kv")
    y = right_local(torch.cat([q, k, v], -1), HEADS, case.kv_heads, case.causal)
    (gradient,) = torch.autograd.grad(F.linear(y, w["Wo"]), x, problem.dy)
    return gradient


COMMON_QUESTIONS = (
    checks.Question(
        checks.has_kind("out", NO_MASK),
        "Here the attention was built with causal=True. Which line knows about `self.causal`?",
    ),
    checks.INPUTS_QUESTION,
    checks.Question(
        checks.has_kind("out", "none", "type", "structure"),
        "What does forward return? One tensor [b, s, h], the sum over all ranks with its bias.",
    ),
    checks.Question(
        checks.has_kind("out", PARTIAL),
        "Each rank has one summand, that of its own heads. Which layer adds them up, and is it that layer you use for "
        "`out`?",
    ),
    checks.Question(
        lambda d: checks.has_kind("out", "p times")(d) and "forward traffic" in d.names,
        "The output is summed over the ranks more than once. `self.out` adds up already, by its g. Which line of yours "
        "adds up again?",
    ),
    checks.Question(checks.has_kind("out", BIAS_P_TIMES), "How many times is the last bias added?"),
    checks.Question(
        lambda d: "out" in d.names and checks.has_no_gradient("dWo")(d),
        "The weight of `out` gets no gradient. Which line calls `self.out`, and is its result what you return?",
    ),
    checks.Question(
        checks.has_no_gradient(*GRADIENTS),
        "A parameter gets no gradient. Which line does autograd not know about?",
    ),
    checks.Question(
        lambda d: (
            "dx" in d.names and checks.has_kind("backward traffic", "no traffic", "traffic")(d) and "out" not in d.names
        ),
        "dx must be the sum over all ranks, taken once: that is f. Does it stand in front of the fused product, and "
        "nowhere else?",
    ),
    checks.Question(
        lambda d: bool(d.names) and all("traffic" in name for name in d.names),
        "The numbers are right, the communication is not. Which call gathers, scatters or sums what could stay "
        "where it is? One f stands in front of q, k and v together.",
    ),
    checks.Question(
        lambda d: "out" not in d.names and bool({"dx", *GRADIENTS} & d.names),
        "The output is right, a gradient is not. Which part of the forward pass is cut off from autograd, or summed "
        "over the wrong ranks?",
    ),
    checks.Question(
        lambda d: "out" in d.names and not checks.has_kind("out", "zeros")(d),
        "Q, K and V of this rank's heads; attend; merge; the row-parallel layer; nothing before it and nothing after "
        "it. Where does your order of steps differ? Try p = 1 by hand first.",
    ),
)

REFUSED = "heads that can't be shared out evenly are refused"


def refuses(attention_class: Any, sizes: Sequence[tuple[int, ...]]) -> list[checks.Observed]:
    """Build attention layers whose heads can't be divided evenly, which must raise ValueError. Runs on every rank."""
    seen: list[checks.Observed] = []
    for each in sizes:
        try:
            attention_class(*each)
        except ValueError:
            seen.append({REFUSED: checks.Claim("")})
        except AssertionError:
            seen.append({REFUSED: checks.Claim("an AssertionError was raised, not a ValueError")})
        else:
            seen.append({REFUSED: checks.Claim("the attention was built, without a ValueError")})
    return seen


def check_refusal(number: str, attention_class: Any, p: int, asks: Mapping[tuple[int, ...], str]) -> None:
    """Check that p ranks reject all sizes in `asks`, which maps sizes to the question to ask if they're accepted."""
    name = getattr(attention_class, "__name__", "attention")
    notes = [f"{name}({', '.join(map(str, sizes))})" for sizes in asks]
    runs = checks.run_ranks(refuses, p, attention_class, list(asks), note=" and ".join(notes))
    for i, (note, ask) in enumerate(zip(notes, asks.values(), strict=True)):
        seen = [run[i] for run in runs]
        checks.verify(number, p, seen, [{}] * p, questions=[checks.Question(lambda d: True, ask)], note=note)
