"""The check of exercise 13.2: 1F1B as lists of actions."""

from collections.abc import Callable, Sequence
from typing import Any

from tplab.course.chapters.ch13.lists import ENDS, ONCE, expected, items, observed, peak
from tplab.course.checks import Differences, Question, Verdict, calling, exercise, verify

SIZES = ((2, 3), (4, 8), (1, 3), (4, 4), (4, 2), (3, 1), (8, 11))  # (p, m)
_PEAK = "peak of live micro-batches"


def _questions(peaks: Sequence[int], p: int, m: int) -> list[Question]:
    """What to ask about lists whose ranks hold `peaks` micro-batches at most."""
    right = [min(m, p - rank) for rank in range(p)]

    def holds(*wanted: Sequence[int]) -> Callable[[Differences], bool]:
        return lambda d: _PEAK in d.names and any(list(peaks) == list(values) for values in wanted)

    return [
        Question(
            lambda d: ONCE in d.names and m < p,
            f"Here are fewer micro-batches than stages: {m} of them. How many forwards can a rank do before its first "
            "backward, if there are only m?",
        ),
        Question(
            lambda d: ONCE in d.names,
            "Every micro-batch goes forward once and backward once on every rank. How many forwards are left after "
            "the warm-up, and how many backwards are left when the forwards have run out?",
        ),
        Question(
            lambda d: ENDS in d.names,
            "Go round the circle: each of these actions waits for the next one. How many forwards must a rank give to "
            "the ranks after it before the first gradient can come back? Which rank needs most of them, the first or "
            "the last?",
        ),
        Question(
            holds([m] * p),
            "Every rank holds all m micro-batches: that is GPipe. When can a rank do its first backward?",
        ),
        Question(
            holds([value + 1 for value in right], [min(m, value + 1) for value in right]),
            "Every rank holds one micro-batch more than it has to. After the warm-up comes a forward, then a backward: "
            "is that forward in your warm-up already?",
        ),
        Question(
            holds([min(m, p)] * p),
            "Every rank holds as many as the first has to. The last stage can turn each micro-batch round at once. How "
            "many stages come after rank r?",
        ),
        Question(
            lambda d: _PEAK in d.names and all(mine <= wanted for mine, wanted in zip(peaks, right, strict=True)),
            "Fewer micro-batches are live than may be, and the step takes longer: a rank waits for a gradient where it "
            "could go forward. How many stages come after rank r, and how many forwards is its warm-up?",
        ),
        Question(
            lambda d: _PEAK in d.names,
            "Draw your lists for p = 2 and m = 3. How many micro-batches are between their F and their B on each rank "
            "after each action? p - r is right for rank r, and m if there are fewer.",
        ),
        Question(
            lambda d: "units of time" in d.names,
            "Each rank holds as few as it should, but ranks wait longer than they have to. Does every rank do one "
            "forward and one backward in turn, in the order of the micro-batches?",
        ),
    ]


@exercise("13.2", "1F1B as lists of actions")
def one_f_one_b_lists(one_f_one_b: Callable[..., Any]) -> Verdict:
    for p, m in SIZES:
        call = f"one_f_one_b({p}, {m})"
        with calling(call):
            rows = one_f_one_b(p, m)
        lists = items("13.2", call, rows, p)
        right = expected(p, m, [min(m, p - rank) for rank in range(p)])
        questions = _questions([peak(row) for row in lists], p, m)
        verify("13.2", p, observed(lists, m, p), right, questions=questions, note=f"m = {m}")
    return Verdict("As quick as GPipe, with at most p - r live micro-batches on rank r, whatever m is.")
