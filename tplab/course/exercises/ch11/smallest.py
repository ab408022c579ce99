"""The check for exercise 11.4, the smallest hidden size that keeps p ranks busy. It starts no ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tplab.course.checks import Question, Verdict, calling, exercise, fresh_generator, verify

Seconds = Callable[[int, int], float]  # time of a layer, given its hidden size and the number of ranks

_NAME = "hidden size"


@dataclass(frozen=True)
class Case:
    """A layer whose matmuls take time h²/p. On several ranks, communication takes another `sent`·h + `fixed`.

    Whatever p is, the parts of the layer that aren't sharded also take `norms`·h on every rank.
    """

    p: int
    efficiency: float
    step: int
    sent: float
    fixed: float = 0.0
    norms: float = 0.0
    most: int = 2**17
    defaults: bool = False  # whether the call leaves out the options, which have their default values

    def seconds(self, h: int, p: int) -> float:
        return h * h / p + self.norms * h + (self.sent * h + self.fixed if p > 1 else 0.0)

    def reaches(self, h: int, p: int, target: float) -> bool:
        return self.seconds(h, 1) / (p * self.seconds(h, p)) >= target

    def first(self, reaches: Callable[[int], bool], step: int | None = None) -> int | None:
        """Return the first multiple of `step` up to `most` that satisfies `reaches`, or None."""
        sizes = range(step or self.step, self.most + 1, step or self.step)
        return next((h for h in sizes if reaches(h)), None)

    def right(self) -> int | None:
        return self.first(lambda h: self.reaches(h, self.p, self.efficiency))

    def wrong(self) -> list[tuple[int | None, str]]:
        """Return the sizes that common mistakes would produce, each with the question to ask."""
        right, step = self.right(), self.step

        def above(h: int) -> bool:
            return self.seconds(h, 1) / (self.p * self.seconds(h, self.p)) > self.efficiency

        def speedup(h: int) -> bool:
            return self.seconds(h, 1) / self.seconds(h, self.p) >= self.efficiency

        def squared(h: int) -> bool:
            one = self.seconds(step, 1) * (h / step) ** 2
            return one / (self.p * self.seconds(h, self.p)) >= self.efficiency

        power = 1 << (right - 1).bit_length() if right else None
        return [
            (self.first(above), _EXACTLY),
            (None if right is None else right - step, _STEP_BEFORE),
            (None if right is None else right + step, _STEP_BEYOND),
            (self.first(speedup), _SPEEDUP),
            (self.first(lambda h: self.reaches(h, 8, self.efficiency)), _EIGHT),
            (self.first(lambda h: self.reaches(h, self.p, 0.8)), _EIGHTY),
            (power, _POWER),
            (self.first(squared), _SQUARED),
            (self.first(lambda h: self.reaches(h, self.p, self.efficiency), 1), _MULTIPLE),
            (self.most - self.most % step, _LARGEST),
            (step, _FIRST),
        ]

    def note(self) -> str:
        options = f", efficiency={self.efficiency:.3g}, step={self.step}, most={self.most}"
        options = "" if self.defaults else options
        return f"smallest_hidden(seconds, {self.p}{options})"


_EXACTLY = "A size that keeps exactly the efficiency that is asked for is good enough. What do you compare, > or >=?"
_STEP_BEFORE = (
    "That is the last size that falls short. Which one do you return, the last that fails or the first that does not?"
)
_STEP_BEYOND = (
    "That one is large enough, and so is the one before it. Where does your search begin, or which size does it leave "
    "out?"
)
_SPEEDUP = (
    "That is where p ranks are about as fast as one. Efficiency is how much of p ranks is used: by what do you divide "
    "the speedup?"
)
_EIGHT = "That is the size for 8 ranks. How many are there here, and which argument says so?"
_EIGHTY = "That is the size for 80 %. Which argument says what is asked for here?"
_POWER = (
    "That is a power of two. Sizes are multiples of `step`, and smaller ones than this may do: which sizes do you try?"
)
_SQUARED = (
    "That's the result if the time on one rank is always proportional to h². But `seconds` may be any formula, or even "
    "a measurement. For which h do you call seconds(h, 1)?"
)
_TOO_LARGE = (
    "This size reaches the efficiency, but a smaller multiple of `step` reaches it too. At which size does your search "
    "start, and which multiples of `step` does it leave out?"
)
_MULTIPLE = "That is no multiple of `step`. Which sizes may a layer have here?"
_LARGEST = "That is the largest size that may be tried. Where does your search stop?"
_FIRST = "That is the smallest size of all. For which efficiency did you ask there, of how many ranks?"
_NONE = "Here no size up to `most` is good enough. What do you return then?"
_SOME = "There is a size that is good enough. Why does your search not come to it?"
_ANY = (
    "Write down the efficiency of one size: the time on one rank, divided by p times the time on p ranks. Then try the "
    "multiples of `step` from the smallest on. Which part of that does your search do in another way?"
)
_TYPE = "A whole number is wanted, a hidden size, or None. What does your last line return?"


def cases(generator: torch.Generator) -> list[Case]:
    """Return borderline cases, and cases whose sizes are drawn so that different mistakes produce different results."""
    draw = torch.rand(6, generator=generator, dtype=torch.float64).tolist()
    return [
        Case(p=8, efficiency=0.8, step=96, sent=111 + 20 * draw[0], fixed=1e5 * draw[1]),
        Case(p=4, efficiency=0.6 + 0.04 * draw[2], step=160, sent=411 + 90 * draw[3], fixed=1e5),
        Case(p=4, efficiency=0.75, step=256, sent=256.0),  # h / (h + 4·256) is exactly 3/4 at 3072
        Case(p=16, efficiency=0.9, step=224, sent=31 + 5 * draw[4], fixed=1e4 * draw[5]),
        Case(p=2, efficiency=0.5, step=1024, sent=3.0),
        Case(p=8, efficiency=0.9, step=512, sent=1000.0, most=65536),
        Case(p=4, efficiency=0.75, step=256, sent=256.0, most=3072),  # the largest size that may be tried is the answer
        Case(p=4, efficiency=0.75, step=256, sent=256.0, most=3071),  # here, the answer is just out of reach
        Case(p=2, efficiency=0.5, step=4096, sent=3.0, most=4095),  # there's no size that may be tried
        Case(p=8, efficiency=0.75, step=8, sent=5.0),  # the answer is 120, with fewer than 128 columns per rank
        Case(p=8, efficiency=0.8, step=64, sent=50.0, norms=100.0),
        Case(p=8, efficiency=0.8, step=1024, sent=333.0, defaults=True),
        Case(p=8, efficiency=0.8, step=1024, sent=5000.0, defaults=True),  # reached only beyond 2**17
    ]


@exercise("11.4", "The smallest layer worth p ranks")
def smallest_hidden(function: Callable[..., Any]) -> Verdict:
    for case in cases(fresh_generator()):
        with calling(case.note()):
            options = {} if case.defaults else {"efficiency": case.efficiency, "step": case.step, "most": case.most}
            said = function(case.seconds, case.p, **options)
        right = case.right()
        verify(
            "11.4",
            case.p,
            [{_NAME: said}],
            [{_NAME: right}],
            questions=[Question(lambda d: True, _question(case, said, right))],
            note=case.note(),
            alone=True,
        )
    return Verdict("Larger layers need less communication for each operation.")


def _question(case: Case, said: Any, right: int | None) -> str:
    if said == right:
        return _ANY
    if said is None:
        return _SOME
    if isinstance(said, bool) or not isinstance(said, int):
        return _TYPE
    if right is None:
        return _NONE
    too_large = said > right and said % case.step == 0 and not case.defaults
    return next((ask for value, ask in case.wrong() if value == said), _TOO_LARGE if too_large else _ANY)
