"""The check for exercise 11.2, the compute and communication times of a tensor-parallel layer. It starts no ranks."""

from collections.abc import Callable
from typing import Any

import torch

from tplab.collectives.links import Link
from tplab.course.checks import Differences, Question, Verdict, calling, exercise, fresh_generator, verify
from tplab.course.exercises.ch11.collective_time import in_microseconds

_NO_SCORES = "the time without the scores, 4·b·s²·h"
_ONLY_SCORES_HALF = "the time with QKᵀ or PV, not both"
_FORWARD = "the time of the forward pass alone"
_TWICE = "twice the time of the forward pass"
_MACS = "half of the right one: a multiplication and an addition counted as one"
_NOT_SPLIT = "the time on a single rank"
_NO_RECOMPUTE = "the time without recomputation"
_RECOMPUTE = "the time with recomputation"
_MLP_ONLY = "the time of the MLP's products and the scores"
_ALL_TWICE = "the time where the whole layer, and not its forward pass, is done a second time"

_TWO = "the time of two all-reduces"
_EIGHT = "the time of eight all-reduces"
_FOUR = "the time of four all-reduces"
_SIX = "the time of six all-reduces"
_NUMBERS = "the time with one byte a number"
_ALWAYS_TWO = "the time with two bytes a number"
_ALWAYS_FOUR = "the time with four bytes a number"
_SHARD = "the time with messages of b·s·h/p numbers"
_INNER = "the time with messages of b·s·4h numbers"
_NOT_RING = "the time of messages from one rank to another"


def _kind(*kinds: str) -> Callable[[Differences], bool]:
    return lambda d: bool({d.kind("compute"), d.kind("communicate")} & set(kinds))


_QUESTIONS = (
    Question(
        lambda d: d.malformed or "structure" in d.kinds(),
        "Two numbers of seconds are wanted, compute and communicate, in this order. What does your last line return?",
    ),
    Question(
        _kind(_MACS), "A multiplication and an addition are two operations. How many has a product [m, k] times [k, n]?"
    ),
    Question(
        _kind(_FORWARD),
        "That is the forward pass. The backward pass has two products, for dX and for dW, where "
        "the forward pass has one. What is that together?",
    ),
    Question(
        _kind(_TWICE),
        "That is twice the forward pass. Y = X A is one product; how many as large as this one has "
        "the backward pass, and how many are that together?",
    ),
    Question(_kind(_NOT_SPLIT), "That is all the work of the layer. How much of it has one of p ranks?"),
    Question(
        _kind(_NO_SCORES), "Q Kᵀ and P V are products as well, though they have no weights. Where are they in your sum?"
    ),
    Question(
        _kind(_ONLY_SCORES_HALF),
        "Q Kᵀ makes [s, s] from [s, h] for each sequence, and P V makes [s, h] from [s, s]. Are both in your sum?",
    ),
    Question(_kind(_MLP_ONLY), "The MLP has 16·b·s·h². What do the products of Q, K, V and of attention's output add?"),
    Question(
        _kind(_ALL_TWICE),
        "What is done a second time when activations are recomputed: all of the layer, or only its forward pass?",
    ),
    Question(
        lambda d: d.kind("compute") == _NO_RECOMPUTE or d.kind("communicate") == _FOUR,
        "Here the activations are recomputed: before its backward pass the layer's forward pass runs once more, its "
        "all-reduces with it. Where does your formula say so?",
    ),
    Question(
        lambda d: d.kind("compute") == _RECOMPUTE or d.kind("communicate") == _SIX,
        "Here nothing is recomputed. Which term belongs to `recompute` only?",
    ),
    Question(
        lambda d: d.p == 1 and "communicate" in d.names,
        "With one rank f and g do nothing. What does your formula say for p = 1?",
    ),
    Question(
        _kind(_TWO, _EIGHT),
        "Attention has f at its input and g at its output, and so has the MLP. g all-reduces "
        "forward, f backward. How many all-reduces are that?",
    ),
    Question(_kind(_NUMBERS), "That is how many numbers the messages hold. How many bytes has each of them?"),
    Question(_kind(_ALWAYS_TWO, _ALWAYS_FOUR), "How many bytes has a number here, and which argument says so?"),
    Question(
        _kind(_SHARD),
        "f and g sum whole tensors [b, s, h], whatever p is. Where is the p-th of it taken: here, "
        "or inside of all_reduce?",
    ),
    Question(
        _kind(_INNER),
        "Which tensors do f and g all-reduce: the inner ones [b, s, 4h/p], or those at the ends of the two blocks?",
    ),
    Question(
        _kind(_NOT_RING),
        "That is a message from one rank to another for each of them. What does an all-reduce over p ranks cost, by "
        "`all_reduce(link, size, p)`?",
    ),
    Question(
        lambda d: "compute" in d.names,
        "Write the products of the forward pass one below the other: Q, K and V, scores, values, output, up, down. "
        "A product [m, k] times [k, n] has 2·m·k·n operations. Which one differs from your sum?",
    ),
    Question(
        lambda d: True,
        "The layer's compute time is right, its communication is not. How many all-reduces, of how many bytes each?",
    ),
)


def compute_times(b: int, s: int, h: int, p: int, rate: float, recompute: bool) -> tuple[float, dict[str, float]]:
    """Return the right time in seconds for the layer's matmuls, and the times that common mistakes would produce."""
    tokens = b * s
    attention = 2 * tokens * h * 3 * h + 2 * tokens * h * h
    mlp = 2 * tokens * h * 4 * h * 2
    scores = 2 * (2 * b * s * s * h)
    forward, passes = attention + mlp + scores, 4 if recompute else 3

    def at(work: float) -> float:
        return work / (p * rate)

    return at(passes * forward), {
        _MACS: at(passes * forward / 2),
        _NO_SCORES: at(passes * (forward - scores)),
        _ONLY_SCORES_HALF: at(passes * (forward - scores / 2)),
        _MLP_ONLY: at(passes * (mlp + scores)),
        _FORWARD: at(forward),
        _TWICE: at(2 * forward),
        (_NO_RECOMPUTE if recompute else _RECOMPUTE): at((3 if recompute else 4) * forward),
        _ALL_TWICE: at(6 * forward),
        _NOT_SPLIT: p * at(passes * forward),
    }


def communication_times(
    b: int, s: int, h: int, p: int, link: Link, recompute: bool, width: int
) -> tuple[float, dict[str, float]]:
    """Return the right communication time in seconds, and the times that common mistakes would produce.

    The messages have `width` bytes per element.
    """

    def ring(size: float) -> float:
        return 2 * (p - 1) * (link.alpha + link.beta * size / p)

    count, size = 6 if recompute else 4, width * b * s * h
    return count * ring(size), {
        _TWO: 2 * ring(size),
        _EIGHT: 8 * ring(size),
        (_FOUR if recompute else _SIX): (4 if recompute else 6) * ring(size),
        _NUMBERS: count * ring(size / width),
        (_ALWAYS_TWO if width == 4 else _ALWAYS_FOUR): count * ring(size / 2 if width == 4 else 2 * size),
        _SHARD: count * ring(size / p),
        _INNER: count * ring(4 * size),
        _NOT_RING: count * (link.alpha + link.beta * size),
    }


@exercise("11.2", "The time of a layer")
def layer_seconds(function: Callable[..., Any]) -> Verdict:
    for p in (8, 4, 1, 2):
        for recompute, width in ((False, 2), (True, 4)):
            draw = torch.rand(6, generator=fresh_generator(), dtype=torch.float64).tolist()
            b, s, h = 3 + int(5 * draw[0]), 512 + 128 * int(8 * draw[1]), 1024 + 256 * int(12 * draw[2])
            rate = 3e13 * 20 ** draw[3]
            link = Link(2e-6 * 10 ** draw[4], 2e-12 * 50 ** draw[5])
            right, wrong = compute_times(b, s, h, p, rate, recompute)
            sent, missent = communication_times(b, s, h, p, link, recompute, width)
            options = {"recompute": recompute, "bytes_per_number": width}
            asked = ", ".join(f"{name}={value}" for name, value in options.items())
            with calling(f"layer_seconds({b}, {s}, {h}, {p}, {rate:.3g}, Link(..), {asked})"):
                said = function(b, s, h, p, rate, link, **options)
            pair = isinstance(said, (tuple, list)) and len(said) == 2
            one, two = said if pair else (said, said)
            alike = {"compute": wrong, "communicate": missent if p > 1 else {}}
            verify(
                "11.2",
                p,
                [
                    {
                        "compute": in_microseconds(one) if pair else one,
                        "communicate": in_microseconds(two) if pair else two,
                    }
                ],
                [{"compute": in_microseconds(right), "communicate": in_microseconds(sent)}],
                questions=_QUESTIONS,
                lookalikes={
                    name: {label: [in_microseconds(value)] for label, value in values.items()}
                    for name, values in alike.items()
                },
                tol=1e-7,
                note=f"microseconds for b = {b}, s = {s}, h = {h}, {asked}",
                alone=True,
            )
    return Verdict("Compute shrinks with p. The messages do not.")
