"""The check for exercise 13.3, the peak of live micro-batches and the bubble, both computed from the lists."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch

from tplab.course import checks
from tplab.course.exercises.ch13.lists import Lists, actions, idle_share, in_turn, peak, random_lists, total_time

SIZES = ((2, 3), (1, 4), (4, 6), (3, 2), (4, 9), (2, 16), (2, 40))  # (p, m)
LONG = 64  # so many micro-batches that they take many more rounds than there are ranks
CIRCLE: Lists = ([("F", 0), ("B", 0), ("F", 1), ("B", 1)], [("F", 0), ("F", 1), ("B", 0), ("B", 1)])
TOLERANCE = 1e-6  # float32 is precise enough
DEEP = 400  # so many micro-batches that the chain of dependencies is longer than Python's call stack
SECONDS = 1.0  # CPU time that's allowed for a check that needs a hundredth of it

_LEFT = "the live micro-batches at the end of the list"
_ALL = "the number of all micro-batches"
_BEFORE_B = "what is live where the first backward begins"
_OF_ALL = "the idle time over the whole time, working and idle"
_RULE = "(p-1)/m"
_TIME = "the time until the last action ends"
_ALIKE = "what comes when a backward takes as long as a forward"
_NO_WAIT = "what comes when nobody waits for a neighbour"
_SWAPPED = "what comes with the times of forward and backward changed over"
_SUM = "the idle time of all ranks, not divided by anything"

_QUESTIONS = (
    checks.Question(
        lambda d: "changed" in d.kinds(),
        "The caller goes on using the lists. Which line takes actions out of them, or puts some in?",
    ),
    checks.Question(
        checks.has_kind("peak", _LEFT, "zeros"),
        "At the end everything has gone backward, so nothing is live. At which moment is most of it live?",
    ),
    checks.Question(
        checks.has_kind("peak", _ALL),
        "A micro-batch is live from its F to its B, not for ever. What does a B do to your count?",
    ),
    checks.Question(
        checks.has_kind("peak", _BEFORE_B),
        "A rank may go backward and then forward again, further than before. Where do you stop to count?",
    ),
    checks.Question(
        lambda d: "peak" in d.names,
        "Go through one list by hand and write the count after each action: one more after an F, one less after a B. "
        "Which of these numbers is asked for?",
    ),
    checks.Question(
        checks.has_kind("bubble", _OF_ALL),
        "Idle over what? The bubble is the idle time over the time that the ranks *work*.",
    ),
    checks.Question(
        checks.has_kind("bubble", _RULE),
        "That is the formula for GPipe and 1F1B. These lists are in an order of their own: play them.",
    ),
    checks.Question(
        checks.has_kind("bubble", _TIME, _SUM),
        "That is a time. The bubble is a share: idle time over working time.",
    ),
    checks.Question(
        checks.has_kind("bubble", _ALIKE, _SWAPPED),
        "A forward lasts `forward`, a backward `backward`. Where do you use which?",
    ),
    checks.Question(
        checks.has_kind("bubble", _NO_WAIT, "zeros"),
        "An F needs the F of the same micro-batch on the rank before; a B needs the B on the next rank. Does an "
        "action in your program start only when what it needs has ended?",
    ),
    checks.Question(
        checks.has_kind("bubble", "none", "type"),
        "One number is asked for, a float. What does your function give back?",
    ),
    checks.Question(
        lambda d: True,
        "Take p = 2, m = 1 by hand: F0 from 0 to 1 on rank 0, F0 from 1 to 2 on rank 1, B0 from 2 to 4 there, B0 from "
        "4 to 6 on rank 0. Both ranks work 3 of 6 units: the bubble is 6/6 = 1. Where does your program differ?",
    ),
)
_REFUSED = (
    "These lists can be played to their end. If the error is your own refusal: by what does your loop know that no "
    "rank can go on? A rank may wait for another one for several rounds. If it isn't: which action does that line "
    "look for?"
)
_TOO_DEEP = (
    "These lists can be played to their end, but a chain of actions that wait for one another is longer than 1,000 "
    "here. Python allows about 1,000 calls inside one another and then raises RecursionError. Does your function call "
    "itself?"
)
_TOO_EARLY: Lists = ([("B", 0), ("F", 0)],)
_TOO_EARLY_ASKS = "Here a rank has B0 before its own F0. Does a B in your program wait for the F of the same rank?"
_CIRCLE_ASKS = (
    "In these lists rank 0 waits for B0 of rank 1, which comes after F1 of rank 1, which needs F1 of rank 0, which "
    "comes after its B0. How does your loop notice that no rank can go on while some are not done?"
)


@checks.exercise("13.3", "What can be read off the lists")
def reading(peak_live: Callable[..., Any], bubble: Callable[..., Any]) -> checks.Verdict:
    generator = checks.fresh_generator()
    drawn = [(*_telling_lists(p, m, generator), "an order by chance") for p, m in SIZES]
    slow: Lists = [[(kind, k) for k in range(LONG) for kind in "FB"] for _ in range(3)]
    given = [(in_turn(2, LONG), 1.0, 2.0, "1F1B's order"), (slow, 1.0, 2.0, "an order of one micro-batch at a time")]
    for lists, forward, backward, order in [*drawn, *given]:
        p, m = len(lists), len(lists[0]) // 2
        said = _ask(peak_live, bubble, lists, forward, backward)
        right = {"peak": _all([peak(row) for row in lists]), "bubble": _scalar(idle_share(lists, forward, backward))}
        note = f"m = {m}, forward = {forward:g}, backward = {backward:g}, lists in {order}"
        alike = _lookalikes(lists, forward, backward)
        checks.verify(
            "13.3", p, [said], [right], questions=_QUESTIONS, lookalikes=alike, tol=TOLERANCE, note=note, alone=True
        )
    deep: Lists = [[(kind, k) for k in range(DEEP) for kind in "FB"] for _ in range(2)]
    what = f"bubble(lists of {DEEP} micro-batches on 2 ranks)"
    with no_endless_loop(what, _TOO_DEEP, 20 * SECONDS), checks.calling(what, _TOO_DEEP):
        share = _scalar(bubble(actions(deep)))
    right = {"bubble": _scalar(idle_share(deep, 1.0, 2.0))}
    checks.verify("13.3", 2, [{"bubble": share}], [right], questions=_QUESTIONS, tol=TOLERANCE, note=what, alone=True)
    what = "bubble(lists in which ranks 0 and 1 wait for each other)"
    with no_endless_loop(what, _CIRCLE_ASKS):
        checks.must_refuse("13.3", lambda: bubble(actions(CIRCLE)), _CIRCLE_ASKS, what=what)
    what = "bubble([[B0, F0]])"
    with no_endless_loop(what, _TOO_EARLY_ASKS):
        checks.must_refuse("13.3", lambda: bubble(actions(_TOO_EARLY)), _TOO_EARLY_ASKS, what=what)
    return checks.Verdict("For lists in any order, and lists that never end are refused.")


def _ask(
    peak_live: Callable[..., Any], bubble: Callable[..., Any], lists: Lists, forward: float, backward: float
) -> checks.Observed:
    """Call the learner's functions with these lists and record their results."""
    rows, others = actions(lists), actions(lists)
    with no_endless_loop("peak_live(a list of actions)", "Does every loop of yours come to its end?"):
        with checks.calling("peak_live(a list of actions)"):
            peaks = [peak_live(row) for row in rows]
    call = f"bubble({len(lists)} lists of actions, {forward:g}, {backward:g})"
    with no_endless_loop(call, "These lists can be played to their end. Does your loop move on in each round?"):
        with checks.calling(call, _REFUSED):
            share = bubble(others, forward, backward)
    return {
        "peak": _all(peaks),
        "bubble": _scalar(share),
        "inputs unchanged": checks.Changed(["the lists"] * (not rows == others == actions(lists))),
    }


def _scalar(value: Any) -> Any:
    """Convert a number to a tensor, so that it's compared with a tolerance. Anything else is returned unchanged."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return torch.tensor(float(value), dtype=torch.float64) if plain else value


def _all(values: Sequence[Any]) -> Any:
    """Stack the ranks' numbers into one tensor, or return them unchanged if one of them isn't a number."""
    scalars = [_scalar(value) for value in values]
    plain = all(isinstance(value, torch.Tensor) for value in scalars)
    return torch.stack(scalars) if plain else list(values)


def _telling_lists(p: int, m: int, generator: torch.Generator) -> tuple[Lists, float, float]:
    """Draw lists and times of F and B for which every common mistake produces a different bubble (except at p = 1)."""
    while True:
        lists = random_lists(p, m, generator)
        forward, backward = (int(torch.randint(low, low + 100, (), generator=generator)) / 100 for low in (100, 250))
        bubbles = [idle_share(lists, forward, backward), *_mistaken(lists, forward, backward).values()]
        if p == 1 or all(abs(a - b) > 1e-6 for a, b in combinations(bubbles, 2)):
            return lists, forward, backward


def _mistaken(lists: Lists, forward: float, backward: float) -> dict[str, float]:
    p, m, share = len(lists), len(lists[0]) // 2, idle_share(lists, forward, backward)
    total = total_time(lists, forward, backward)
    return {
        _RULE: (p - 1) / m,
        _OF_ALL: share / (1 + share),
        _ALIKE: idle_share(lists, 1, 1),
        _SWAPPED: idle_share(lists, backward, forward),
        _TIME: total,
        _SUM: p * (total - m * (forward + backward)),
        _NO_WAIT: 0.0,
    }


def _lookalikes(lists: Lists, forward: float, backward: float) -> dict[str, dict[str, Sequence[Any]]]:
    """Return the values that common mistakes would produce, except for those that happen to be right."""
    p, m, share = len(lists), len(lists[0]) // 2, idle_share(lists, forward, backward)
    first = [next(place for place, (kind, _) in enumerate(row) if kind == "B") for row in lists]
    peaks = {_LEFT: [0] * p, _BEFORE_B: first, _ALL: [m] * p}
    right = [peak(row) for row in lists]
    mistaken = _mistaken(lists, forward, backward)
    return {
        "bubble": {label: [_scalar(value)] for label, value in mistaken.items() if abs(value - share) > 1e-9},
        "peak": {label: [_all(values)] for label, values in peaks.items() if values != right},
    }


class _Endless(BaseException):
    """Raised in the learner's code when it has been computing for too long."""


@contextmanager
def no_endless_loop(what: str, question: str, seconds: float = SECONDS) -> Iterator[None]:
    """Context manager that fails the check if the code inside uses too much CPU time. Works only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise _Endless

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    except _Endless:
        checks.fail("13.3", f"{what} does not come back.", question)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
