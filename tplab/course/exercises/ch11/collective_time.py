"""The check for exercise 11.1, the time that three collectives take in a ring. It starts no ranks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tplab.collectives.links import Link
from tplab.course.checks import Question, Verdict, calling, exercise, fresh_generator, kind_is, verify

KINDS = ("all_reduce", "all_gather", "reduce_scatter")

_WHOLE = "the time with whole tensors of `size` bytes in each step"
_ALPHA_ONCE = "the time with alpha paid only once"
_NO_ALPHA = "the time without alpha"
_P_STEPS = "the time with one step too many each way"
_ONE_STEP = "the time of a single step"
_BANDWIDTH = "the time with the bandwidth, 1 / beta, in place of beta"
_HALF = "half of the right one: one way only"
_TWICE = "twice the right one: an all-reduce"
_OTHER_LINK = "the time on the link of the call before"
_PART = "the time where `size` is taken for one rank's part"

_QUESTIONS = (
    Question(lambda d: d.malformed, "A number of seconds is wanted. What does your last line return?"),
    Question(
        lambda d: all(d.kind(kind) == "zeros" for kind in KINDS),
        "An empty message still takes its latency, in every step. What does link.seconds(0) return?",
    ),
    Question(
        lambda d: _OTHER_LINK in d.kinds(),
        "Your function was called before with the same kind, size and p, but with a different link, and it returned "
        "that link's time again. Which of your variables keeps a result from an earlier call?",
    ),
    Question(lambda d: d.p == 1, "With one rank nothing is sent. How many steps does your formula count?"),
    Question(
        kind_is("all_reduce", _HALF),
        "That is one way round the ring. What is still missing, once each rank has its part of the sum?",
    ),
    Question(
        lambda d: _TWICE in d.kinds() and "all_reduce" not in d.names,
        "An all-reduce is a reduce-scatter and an all-gather, one after the other. How many steps has each of them?",
    ),
    Question(lambda d: _WHOLE in d.kinds(), "In a ring each message is one part. How many bytes has a p-th of `size`?"),
    Question(
        lambda d: _PART in d.kinds(),
        "`size` is the whole, gathered tensor, for every one of the three. How many bytes go over a link in one step?",
    ),
    Question(
        lambda d: _ALPHA_ONCE in d.kinds(),
        "Every step is a message of its own, and each pays alpha. How many steps are there?",
    ),
    Question(lambda d: _NO_ALPHA in d.kinds(), "Even an empty message takes a while. Where is alpha in your formula?"),
    Question(lambda d: _ONE_STEP in d.kinds(), "That is one step. How many follow one another?"),
    Question(
        lambda d: _P_STEPS in d.kinds(),
        "A part has p - 1 links to go until every rank has had it. Which step is one too many?",
    ),
    Question(
        lambda d: _BANDWIDTH in d.kinds(),
        "link.beta is seconds for each byte, already. By what do you multiply or divide it?",
    ),
    Question(
        lambda d: True,
        "Count the steps that follow one another, 2(p-1) or p-1, and the bytes of the message in each. A message of m "
        "bytes takes link.seconds(m).",
    ),
)


def ring(kind: str, size: float, p: int, alpha: float, beta: float) -> tuple[float, dict[str, float]]:
    """Return the right time of a collective in seconds, and the times that common mistakes would produce."""
    ways = 2 if kind == "all_reduce" else 1
    steps, part, whole = ways * (p - 1), alpha + beta * size / p, alpha + beta * size
    mistakes = {
        _WHOLE if kind == "all_reduce" else _PART: steps * whole,
        _ALPHA_ONCE: alpha + steps * beta * size / p,
        _NO_ALPHA: steps * beta * size / p,
        _P_STEPS: (steps + ways) * part,
        _ONE_STEP: part,
        _BANDWIDTH: steps * (alpha + size / p / beta),
        _HALF: steps * part / 2,
        _TWICE: steps * part * 2,
    }
    return steps * part, mistakes


def in_microseconds(seconds: Any) -> Any:
    """Convert seconds to a float64 tensor in microseconds. Anything that isn't a number is returned unchanged."""
    if isinstance(seconds, bool):
        return seconds
    if isinstance(seconds, (int, float)) or (isinstance(seconds, Tensor) and seconds.numel() == 1):
        return torch.as_tensor(seconds, dtype=torch.float64).detach().reshape(()) * 1e6
    return seconds


def lookalikes(rows: Mapping[str, tuple[float, dict[str, float]]]) -> dict[str, dict[str, list[Any]]]:
    """Return the times that common mistakes would produce for each collective, in the form that `verify` expects."""
    return {
        kind: {label: [in_microseconds(value)] for label, value in wrong.items()} for kind, (_, wrong) in rows.items()
    }


@exercise("11.1", "The time of a collective")
def collective_seconds(function: Callable[..., Any]) -> Verdict:
    for p in (8, 5, 3, 64, 2, 1):
        size, before = 0, None
        for bytes_are in ("some", "the same", "none"):
            draw = torch.rand(3, generator=fresh_generator(), dtype=torch.float64).tolist()
            link = Link(2e-6 * 10 ** draw[0], 2e-12 * 50 ** draw[1])
            size = {"some": round(2.0 ** (12 + 14 * draw[2])), "the same": size, "none": 0}[bytes_are]
            rows = {kind: ring(kind, size, p, link.alpha, link.beta) for kind in KINDS}
            if before and bytes_are == "the same":
                for kind, (_, mistakes) in rows.items():
                    mistakes[_OTHER_LINK] = ring(kind, size, p, before.alpha, before.beta)[0]
            seen = {}
            for kind in KINDS:
                with calling(f'collective_seconds("{kind}", {size}, {p}, Link(..))'):
                    seen[kind] = in_microseconds(function(kind, size, p, link))
            verify(
                "11.1",
                p,
                [seen],
                [{kind: in_microseconds(right) for kind, (right, _) in rows.items()}],
                questions=_QUESTIONS,
                lookalikes=lookalikes(rows) if p > 1 else {},
                tol=1e-7,
                note=f"microseconds for size = {size}, {link.alpha * 1e6:.1f} µs, {link.bandwidth / 1e9:.1f} GB/s",
                alone=True,
            )
            before = link
    return Verdict("An all-reduce is a reduce-scatter and an all-gather, in time as well.")
