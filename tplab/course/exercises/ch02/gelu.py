"""The check for exercise 2.3, which asks how much it matters whether GELU comes before or after a row split's sum.

Two of the inputs are variants of the first input. These variants have the same values, either in float32 or in a
different memory layout.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu

from tplab.course import checks

IN = 8  # divisible by every p


def gap(x: Tensor, a: Tensor, p: int, activation: Callable[[Tensor], Tensor] = gelu) -> Tensor:
    """Return the GELU of the sum of the p terms, minus the sum of the terms' GELUs, as signed differences [b, out]."""
    products = [x_part @ a_part for x_part, a_part in zip(x.chunk(p, -1), a.chunk(p, 0), strict=True)]
    return activation(torch.stack(products).sum(0)) - torch.stack([activation(part) for part in products]).sum(0)


_SIGNED = "the largest signed difference, which ignores the negative ones"
_SIGNED_OTHER = "the largest signed difference with the two sides swapped, which ignores the negative ones"
_MEAN = "the mean of the absolute differences"
_TOTAL = "the sum of the absolute differences"
_TWO = "the gap for p = 2"
_TANH = "the gap of the tanh approximation of GELU"

_GAP_QUESTIONS = (
    checks.Question(
        lambda d: d.p == 1 and "gelu_gap" in d.names and not d.malformed,
        "With p = 1, there's only one term, so the gap should be 0. Does your code use `world_size`?",
    ),
    checks.Question(
        checks.kind_is("gelu_gap", _SIGNED, _SIGNED_OTHER),
        "Some of the differences are positive and some are negative. Does your code take absolute values before it "
        "looks for the largest difference?",
    ),
    checks.Question(
        checks.kind_is("gelu_gap", _MEAN, _TOTAL),
        "You summed or averaged the differences over all entries. Which one difference does the exercise ask for?",
    ),
    checks.Question(
        checks.kind_is("gelu_gap", _TWO),
        "Your code always splits the matrices into two shards. How many shards should there be for this `world_size`?",
    ),
    checks.Question(
        checks.kind_is("gelu_gap", _TANH),
        "You used the tanh approximation of GELU. What does `torch.nn.functional.gelu` compute by default?",
    ),
    checks.Question(
        checks.kind_is("gelu_gap", "zeros"),
        "Your function found no gap, but the GELU of the sum and the sum of the GELUs should differ. Does your "
        "code apply GELU to each term before it computes the sum of the GELUs? Did you split A by rows? "
        "With a column split, the two results would always be equal.",
    ),
    checks.Question(
        lambda d: "gelu_gap" in d.names and not d.malformed,
        "For p = 2, the gap is the difference between `GELU(X_0 A_0 + X_1 A_1)` and `GELU(X_0 A_0) + GELU(X_1 A_1)`. "
        "Which lines of your code compute these two expressions?",
    ),
)

Gap = Callable[[Tensor, Tensor, int], float]
Example = Callable[[], tuple[Tensor, Tensor]]


@checks.exercise("2.3", "Where GELU goes wrong, and where you wouldn't notice")
def gelu_and_the_row_split(gelu_gap: Gap, counter: Example, lucky: Example) -> checks.Verdict:
    for p in (2, 4, 1):  # p = 2 reveals the most about a mistake, and at p = 1, there should be no gap
        generator = checks.fresh_generator()
        large = (
            checks.random_tensor(generator, 5, IN) * 2,
            checks.random_tensor(generator, IN, 3),
        )  # most of the signed differences are negative
        small = (
            checks.random_tensor(generator, 4, IN).abs() * 0.1,
            checks.random_tensor(generator, IN, 6).abs() * 0.1,
        )  # all of the signed differences are positive
        in_float32 = (large[0].float(), large[1].float())
        transposed = (large[0].T.contiguous().T, large[1].T.contiguous().T)
        for x, a in (large, small, in_float32, transposed):
            twin = checks.Twin.STRIDED if x is transposed[0] else checks.Twin.FLOAT32 if x is in_float32[0] else None
            right = gap(x, a, p)
            before = checks.Snapshot(x=x, a=a)
            call = f"gelu_gap(x {list(x.shape)}, a {list(a.shape)}, world_size={p})"
            with checks.twins.calling(twin, call):
                found = gelu_gap(x, a, p)
            is_number = isinstance(found, (int, float, Tensor))
            size = torch.as_tensor(found, dtype=torch.float64).detach() if is_number else found
            alike = {
                _SIGNED: [right.max()],
                _SIGNED_OTHER: [(-right).max()],
                _MEAN: [right.abs().mean()],
                _TOTAL: [right.abs().sum()],
                _TWO: [gap(x, a, 2).abs().max()],
                _TANH: [gap(x, a, p, lambda t: gelu(t, approximate="tanh")).abs().max()],
            }
            checks.verify(
                "2.3",
                p,
                [{"gelu_gap": size, "inputs unchanged": before.changed()}],
                [{"gelu_gap": right.abs().max().double()}],
                questions=[*checks.twins.asked_first(twin), *_GAP_QUESTIONS],
                lookalikes={"gelu_gap": alike} if p > 1 else {},
                note=f"x {list(x.shape)}, a {list(a.shape)} {checks.twins.note(twin)}".strip(),
                tol=1e-5 if x is in_float32[0] else 1e-9,
                alone=True,
            )
    _check_example("counter_example", counter)
    x, a = _check_example("lucky_example", lucky)
    smallest = min(float(x.abs().min()), float(a.abs().min()))
    if smallest < 0.1 - 1e-6:
        checks.fail(
            "2.3",
            f"lucky_example has an element of magnitude {smallest:.3g}, which is less than 0.1.",
            "If the elements are zero or tiny, GELU returns about 0 anyway. In which other range is GELU practically "
            "linear?",
        )
    return checks.Verdict(
        "Your counterexample exposes the mistake, because its gap is at least 1. Your lucky example hides the mistake."
    )


def _check_example(name: str, example: Example) -> tuple[Tensor, Tensor]:
    """Check that an example's two tensors have the right form and the right gap at p = 2, and return the tensors."""
    with checks.calling(f"{name}()"):
        pair = example()
    form = "x [b, in] and a [in, out], two floating-point tensors with two dimensions each, where `in` is even"
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(t, Tensor) and t.dim() == 2 for t in pair)):
        checks.fail("2.3", f"{name}() should return {form}.", "What shapes do your two tensors have?")
    x, a = pair
    shapes = f"{list(x.shape)} and {list(a.shape)}"
    if x.shape[1] != a.shape[0] or x.shape[1] % 2 or not x.numel() or not a.numel() or not x.is_floating_point():
        checks.fail(
            "2.3",
            f"{name}() returned {shapes}; it should return {form}.",
            "Which of these requirements do your two tensors violate?",
        )
    size = float(gap(x.double(), a.double(), 2).abs().max())
    if name == "counter_example" and not size >= 1:
        checks.fail(
            "2.3",
            f"the gap of counter_example is only {size:.3g}, which is less than 1.",
            "GELU treats positive and negative values very differently. How large is the gap if two terms cancel each "
            "other?",
        )
    if name == "lucky_example" and not size < 1e-6:
        checks.fail(
            "2.3",
            f"the gap of lucky_example is {size:.3g}, not below 1e-6.",
            "The gap vanishes if GELU is linear on an interval that contains all the terms and their sum. In which "
            "range is GELU practically linear?",
        )
    return x, a
