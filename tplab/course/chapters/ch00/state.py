"""The check for exercise 0.2: bytes of weights, gradients and optimizer state, against real tensors after a step."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from tplab.course.chapters.ch00.amounts import Suspect, expect, pick
from tplab.course.checks import Verdict, calling, exercise, fail, fresh_generator
from tplab.memory.meter import gradient_bytes, parameter_bytes, tensor_bytes

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
}
PARTS = ("weights", "gradients", "optimizer")
_COPY = "The optimizer's copy of the weights is in float32. How many bytes has a number?"
_AVERAGES = "Is what the optimizer remembers in 16 bits or in float32? Section 2 measures it."
_GONE = (
    "That is as much as all three entries together, or as the optimizer with float32 gradients. But those are gone "
    "after the step, and this entry is one of three. What does the optimizer keep?"
)
_ONE_DICT = (
    "It was right when it was returned, and a later call has overwritten it. Which dict do your calls have in common? "
    "Make a new one in each call."
)
_RAISED = 'The second argument is "sgd", "momentum" or "adam", the third True or False. What does that line expect?'


@exercise("0.2", "The bytes of the training state")
def state(state_bytes: Callable[[int, str, bool], Mapping[str, int]]) -> Verdict:
    generator = fresh_generator()
    earlier: list[tuple[str, Mapping[str, int], dict[str, int]]] = []  # the call, what it returned, and a copy of that
    for mixed in (False, True):
        for optimizer in OPTIMIZERS:
            rows, columns = pick(generator, 3, 40), pick(generator, 3, 40)
            measured = measure(rows, columns, optimizer, mixed)
            n = rows * columns + columns
            call = f'state_bytes({n}, "{optimizer}", mixed_precision={mixed})'
            with calling(call, _RAISED):
                said = state_bytes(n, optimizer, mixed)
            if not isinstance(said, Mapping) or set(said) != set(PARTS):
                got = f"a dict with {sorted(map(str, said))}" if isinstance(said, Mapping) else type(said).__name__
                fail("0.2", f"{call} returned {got}.", f"It should return a dict with the keys {', '.join(PARTS)}.")
            for part in PARTS:
                kind = f"bytes of {part}" if part != "optimizer" else "bytes of the optimizer state"
                asks = _suspects(part, n, optimizer, mixed, measured)
                expect("0.2", call, kind, said[part], measured[part], asks, _otherwise(part, n, mixed))
            earlier.append((call, said, dict(said)))
    if overwritten := [call for call, said, copy in earlier if dict(said) != copy]:
        fail("0.2", f"What {overwritten[0]} returned has changed since.", _ONE_DICT)
    return Verdict(
        "As many bytes as real tensors take after a real step. Adam in mixed precision: 16 for each parameter."
    )


def measure(rows: int, columns: int, optimizer: str, mixed: bool) -> dict[str, int]:
    """Measure the tensors of a linear layer in bytes after one real step, without the optimizer's step counters."""
    layer = nn.Linear(rows, columns, dtype=torch.bfloat16 if mixed else torch.float32)
    trained = [parameter.detach().float().requires_grad_() for parameter in layer.parameters()]
    stepper = OPTIMIZERS[optimizer](trained if mixed else list(layer.parameters()))
    layer(torch.ones(2, rows, dtype=layer.weight.dtype)).sum().backward()
    if mixed:
        for copy, parameter in zip(trained, layer.parameters(), strict=True):
            copy.grad = None if parameter.grad is None else parameter.grad.float()
    stepper.step()
    remembered = [
        value
        for state in stepper.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
    return {
        "weights": parameter_bytes(layer),
        "gradients": gradient_bytes(layer),
        "optimizer": tensor_bytes([*remembered, *trained] if mixed else remembered),
    }


def _otherwise(part: str, n: int, mixed: bool) -> str:
    numbers = "16 bits" if mixed else "32 bits"
    if part == "optimizer":
        return "Which numbers does this optimizer remember for each parameter, and how many bytes has each?"
    return f"One number of {numbers} for each of {n} parameters. How many bytes are that?"


def _suspects(part: str, n: int, optimizer: str, mixed: bool, measured: Mapping[str, int]) -> list[Suspect]:
    right = measured[part]
    total = sum(measured.values())
    suspects: list[Suspect] = [(n, "Count bytes, not numbers.")] if right != n else []
    if part == "optimizer" and mixed:
        suspects.append((total, _GONE))  # also the amount with float32 gradients
    else:
        suspects.append((total, "That is all three together. This entry is one of them."))
    if part != "optimizer":
        bits = "In mixed precision weights and gradients are 16-bit numbers. How many bytes has one?"
        suspects += [
            (4 * n, bits) if mixed else (2 * n, "Here everything is float32. How many bytes has a number?"),
            (6 * n, "The float32 copy of the weights belongs to the optimizer here. Which entry is that?"),
            (0, "Every parameter has a weight and, after the backward pass, a gradient."),
        ]
        return suspects
    if mixed:
        suspects += [
            (right - 4 * n, "In mixed precision the optimizer keeps one thing more, whatever it is: see section 2."),
            (right - 2 * n, _COPY if optimizer == "sgd" else _AVERAGES),
            (right // 2, _COPY if optimizer == "sgd" else _AVERAGES),
            (right - 4 * n, _AVERAGES),
        ]
    if optimizer == "sgd":
        suspects.append((right + 4 * n, "What does plain SGD remember from one step to the next?"))
        suspects.append((right + 8 * n, "What does plain SGD remember from one step to the next?"))
    if optimizer == "momentum":
        suspects.append((right + 4 * n, "Momentum is one running average. How many numbers for each parameter?"))
        suspects.append((right - 4 * n, "What does SGD remember when it has momentum?"))
    if optimizer == "adam":
        suspects.append((right - 4 * n, "Adam keeps two running averages: of the gradients, and of their squares."))
        suspects.append((right - 8 * n, "Adam remembers something of earlier gradients. What?"))
        suspects.append((right + 4 * n, "In float32 there is no copy of the weights. What does Adam keep of its own?"))
    return suspects
