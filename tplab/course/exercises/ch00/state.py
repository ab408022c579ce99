"""The check for exercise 0.1, which compares the learner's byte counts with the sizes of real tensors.

The tensors are the weights, the gradients and the optimizer state after one training step.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from tplab.course.checks import Verdict, calling, exercise, fail, fresh_generator
from tplab.course.exercises.ch00.amounts import Suspect, expect, pick
from tplab.memory.meter import gradient_bytes, parameter_bytes, tensor_bytes

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}
PARTS = ("weights", "gradients", "optimizer")
LARGE = 418_541, 418_549  # a matrix with more elements than float32 can count exactly
_COPY = (
    "The optimizer's copy of the weights is in float32. How many bytes does each element of this float32 copy take up?"
)
_HALF = "You seem to store the running averages in 16 bits. In mixed precision, these averages are stored in float32."
_GONE = (
    "Your value is either the sum of all three entries, or it includes float32 gradients. Float32 gradients are "
    "freed after the step. Which values does the optimizer still need in the next step?"
)
_TOTAL = "This value is the sum of the weights, the gradients, and the optimizer state."
_EXACT = (
    "Your results are correct for small matrices but not for this large one. Python's integers are exact at any "
    "size, so which line of your code converts an integer to a less precise type?"
)
_ONE_DICT = (
    "The dict was correct when you returned it, but a later call has overwritten it. Do all calls share the same dict? "
    "Create a new dict in each call."
)
_RAISED = (
    'The first argument is a shape (n, m). The second argument is "sgd", "momentum", "adam", "amsgrad", or '
    '"adafactor". The third argument is True or False. What does the failing line expect instead?'
)


def remembered(rows: int, columns: int, optimizer: str) -> int:
    """Return how many elements an optimizer has to carry over to the next step for a [rows, columns] matrix."""
    n = rows * columns
    return {"sgd": 0, "momentum": n, "adam": 2 * n, "amsgrad": 3 * n, "adafactor": rows + columns}[optimizer]


@exercise("0.1", "What an optimizer has to remember")
def state(state_bytes: Callable[[tuple[int, int], str, bool], Mapping[str, int]]) -> Verdict:
    generator = fresh_generator()
    # each call as text, the dict that it returned, and a copy of that dict
    earlier: list[tuple[str, Mapping[str, int], dict[str, int]]] = []
    for mixed in (False, True):
        for optimizer in OPTIMIZERS:
            small = pick(generator, 3, 40), pick(generator, 41, 80)
            for shape in (small, small[::-1], LARGE):
                call = f'state_bytes({shape}, "{optimizer}", mixed_precision={mixed})'
                with calling(call, _RAISED):
                    said = state_bytes(shape, optimizer, mixed)
                if not isinstance(said, Mapping) or set(said) != set(PARTS):
                    got = f"a dict with {sorted(map(str, said))}" if isinstance(said, Mapping) else type(said).__name__
                    fail("0.1", f"{call} returned {got}.", f"It should return a dict with the keys {', '.join(PARTS)}.")
                right = computed(shape, optimizer, mixed) if shape == LARGE else measure(*shape, optimizer, mixed)
                for part in PARTS:
                    kind = f"bytes of {part}" if part != "optimizer" else "bytes of the optimizer state"
                    asks = [] if shape == LARGE else _suspects(part, shape, optimizer, mixed, right)
                    otherwise = _EXACT if shape == LARGE else _otherwise(part, shape, mixed)
                    expect("0.1", call, kind, said[part], right[part], asks, otherwise)
                earlier.append((call, said, dict(said)))
    if overwritten := [call for call, said, copy in earlier if dict(said) != copy]:
        fail("0.1", f"the dict that {overwritten[0]} returned has changed since then.", _ONE_DICT)
    return Verdict("Your results match the actual tensor sizes after a step of torch.optim, down to the byte.")


def measure(rows: int, columns: int, optimizer: str, mixed: bool) -> dict[str, int]:
    """Train a single matrix for one real step, and return the bytes of its weights, gradients and optimizer state.

    The optimizer's step counter isn't included.
    """
    layer = nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16 if mixed else torch.float32)
    trained = [parameter.detach().float().requires_grad_() for parameter in layer.parameters()]
    stepper = OPTIMIZERS[optimizer](trained if mixed else list(layer.parameters()))
    layer(torch.ones(2, columns, dtype=layer.weight.dtype)).sum().backward()
    if mixed:
        for copy, parameter in zip(trained, layer.parameters(), strict=True):
            copy.grad = None if parameter.grad is None else parameter.grad.float()
    stepper.step()
    kept = [
        value
        for state in stepper.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
    return {
        "weights": parameter_bytes(layer),
        "gradients": gradient_bytes(layer),
        "optimizer": tensor_bytes([*kept, *trained] if mixed else kept),
    }


def computed(shape: tuple[int, int], optimizer: str, mixed: bool) -> dict[str, int]:
    """Calculate the bytes that `measure` would return, for a matrix that's too large to measure."""
    n = shape[0] * shape[1]
    each = (2 if mixed else 4) * n
    return {
        "weights": each, "gradients": each, "optimizer": 4 * remembered(*shape, optimizer) + (4 * n if mixed else 0),
    }  # fmt: skip


def _otherwise(part: str, shape: tuple[int, int], mixed: bool) -> str:
    if part == "optimizer":
        return (
            "Go through the update rule. Which variables does the next step read before it overwrites them? The "
            "optimizer has to store each of these variables until the next step. The shape of a variable "
            "tells you how many elements it has."
        )
    bits = 16 if mixed else 32
    return f"There's one {bits}-bit value for each element of a {list(shape)} matrix. How many bytes is that in total?"


def _suspects(
    part: str, shape: tuple[int, int], optimizer: str, mixed: bool, measured: Mapping[str, int]
) -> list[Suspect]:
    right, n = measured[part], shape[0] * shape[1]
    total = sum(measured.values())
    total_question = f'{_TOTAL} Which of the three belongs in the entry "{part}"?'
    if part != "optimizer":
        bits = "In mixed precision, weights and gradients are stored in 16 bits. How many bytes is that per element?"
        return [
            (n, "This is the number of elements. How many bytes does each element take?"),
            (total, total_question),
            (4 * n, bits)
            if mixed
            else (
                2 * n,
                "With mixed_precision=False, everything is stored in float32. How many bytes is that per element?",
            ),
            (
                6 * n,
                "You included the float32 copy of the weights, but the copy belongs in a different entry. Which "
                "entry should include the copy?",
            ),
            (
                0,
                "After the backward pass, every element of the matrix has both a value and a gradient, so neither "
                "the weights nor the gradients can take 0 bytes.",
            ),
        ]
    suspects: list[Suspect] = [(total, _GONE if mixed else total_question)]
    own = remembered(*shape, optimizer)
    if mixed:
        suspects += [
            (
                right - 4 * n,
                "In mixed precision, every optimizer, even plain SGD, keeps an extra tensor for each weight. What's "
                "in that tensor?",
            ),
            (right - 2 * n, _COPY),
            (right - 2 * own, _HALF),
            (right // 2, f"{_COPY} How many bytes does each element of the running averages take up?"),
            (right + 4 * n, _GONE),
        ]
    elif right:
        suspects.append((own, "This is the number of elements. How many bytes does each element take?"))
    plain = 4 * n if mixed else 0
    if optimizer == "sgd":
        suspects += [
            (
                plain + 4 * k * n,
                "Does a step of plain SGD read anything from the previous step, apart from the weights?",
            )
            for k in (1, 2)
        ]
    if optimizer == "momentum":
        suspects.append(
            (plain, "With momentum, the next update needs the previous m. Which entry should include the previous m?")
        )
        suspects.append(
            (plain + 8 * n, "In the momentum rule, only m carries over to the next step. What else did you count?")
        )
    if optimizer == "adam":
        suspects.append(
            (
                plain + 4 * n,
                "Adam's next step needs two running averages, but you counted only one. Which average is missing?",
            )
        )
        suspects.append(
            (plain, "Adam's next step needs the old m and the old v. Where are m and v stored between two steps?")
        )
    if optimizer == "amsgrad":
        suspects.append(
            (
                plain + 8 * n,
                "Your result is the size of Adam's optimizer state. Does the next step of AMSGrad also read the "
                "previous value of u?",
            )
        )
    if optimizer == "adafactor":
        suspects += [
            (
                plain + 4 * n,
                "The variables r and c aren't matrices. How many elements do you get if you take the mean of each row?",
            ),
            (
                plain + 8 * n,
                "The variables r and c aren't matrices. How many elements do you get if you take the mean of each row?",
            ),
            (plain + 4 * shape[0], "You counted one mean per row. What about the means of the columns?"),
            (plain + 4 * shape[1], "You counted one mean per column. What about the means of the rows?"),
        ]
    return [(value, ask) for value, ask in suspects if value != right]
