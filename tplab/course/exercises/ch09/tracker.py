"""The check for exercise 9.3, a tracker of named random states with a `fork` method.

Each case is a scene, which is a short program that draws dropout masks with the learner's tracker. The check compares
these masks element by element with those that plain PyTorch draws after `torch.manual_seed` with the seed of the same
name. Outside the forks, torch must draw as if there were no tracker.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tplab.course import checks
from tplab.course.exercises.ch09.tracker_scenes import (
    COMES_OUT,
    NOTHING_LEFT,
    OUTSIDE,
    REPLICATED,
    SAME_NAME,
    SAME_SEED,
    SCENES,
    SHARDED,
    STILL_TAKEN,
    Scene,
    Script,
    in_turn,
    mask,
)

CURRENT = "what torch's current state draws"
CURRENT_AGAIN = "what torch's current state draws, put back after each fork"
AGAIN = "the same mask every time"
OTHER_STREAM = "what the other state draws"
STREAMS, IDLE = "what plain torch draws", "what a tracker draws that does nothing"


class Idle:
    """A tracker that does nothing, so all draws in its forks come from torch's current state."""

    gives = CURRENT

    def add(self, name: str, seed: int) -> None:
        """Ignore the name and the seed."""

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        yield


class IdleAndBack(Idle):
    """A tracker that restores the current state after each fork, but never switches to another state."""

    gives = CURRENT_AGAIN

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        with torch.random.fork_rng():
            yield


def draw(case: Scene, generator: torch.Generator, size: int) -> int:
    """Draw a seed for torch's current state. The seeds of the named states are close to this seed."""
    return int(torch.randint(1000, 10**6, (), generator=generator))


def run(tracker_class: Any, case: Scene, seed: int, group: Any) -> checks.Observed:
    script = Script(tracker_class, seed)
    case.program(script)
    seen = {name: torch.stack(masks) for name, masks in script.drawn.items() if masks} | script.claims
    seeds = {OUTSIDE: seed, REPLICATED: script.seeds["replicated"], SHARDED: script.seeds["sharded"]}
    streams = {name: plain(value) for name, value in seeds.items()}
    idle: dict[str, dict[str, list[Tensor]]] = {}
    for kind in (Idle, IdleAndBack) if case.program is in_turn else ():
        mistaken = Script(kind, seed)
        case.program(mistaken)
        idle[kind.gives] = mistaken.drawn
    return {**seen, STREAMS: streams, IDLE: idle}


def plain(seed: int) -> list[Tensor]:
    """Return the first nine masks that torch draws after it's seeded with this value."""
    torch.manual_seed(seed)
    return [mask() for _ in range(9)]


def expect(case: Scene, seed: int, place: checks.Place) -> checks.Expected:
    mine = place.observed[place.index]
    streams, idle = mine[STREAMS], mine[IDLE]
    right, mistakes = {}, {}
    for name, draws in case.order.items():
        right[name] = torch.stack([streams[name][index] for index in draws])
        other = streams[SHARDED if name == REPLICATED else REPLICATED]
        mistakes[name] = {
            AGAIN: torch.stack([streams[name][0]] * len(draws)),
            OTHER_STREAM: torch.stack(other[: len(draws)]),
            **{gives: torch.stack(masks[name]) for gives, masks in idle.items()},
        }
    return checks.Expected(right, mistakes)


@checks.exercise("9.3", "A tracker of random states")
def tracker(tracker_class: Any) -> checks.Verdict:
    checks.check_cases(
        "9.3", tracker_class, SCENES, values_on_cpu=True, draw=draw, run=run, expect=expect,
        questions=lambda case, observed: [*SPECIAL_QUESTIONS.get(case.title, ()), *QUESTIONS],
        crash=lambda case: CRASHES.get(case.title),
    )  # fmt: skip
    return checks.Verdict(
        "Every state goes on where it was left, also after an exception, and torch's own is untouched."
    )


CRASHES = {
    "an exception within the fork": "The block within `fork` raises here, as it may. What of yours still has to run, "
    "and which statement makes sure that it does?",
    "states saved and loaded": "`state_dict()` returns a dictionary from names to states, and `load_state_dict(state)` "
    "takes it back, also in a second tracker that has states under the same names. What do yours return and take, and "
    "what belongs to a tracker, what to its class?",
    "fork() without a name": 'fork(name="sharded"): the name has a default.',
    "names and seeds that are taken": "What does `add` raise for a name or a seed that is there already? ValueError.",
}
MASKS = (REPLICATED, SHARDED)


def drawn(*kinds: str) -> Callable[[checks.Differences], bool]:
    return lambda d: any(checks.has_kind(name, *kinds)(d) for name in MASKS)


SPECIAL_QUESTIONS: dict[str, tuple[checks.Question, ...]] = {
    "an exception within the fork": (
        checks.Question(
            lambda d: COMES_OUT in d.names,
            "The exception belongs to the caller, who has to see it. Which line of yours swallows or replaces it?",
        ),
        checks.Question(
            lambda d: OUTSIDE in d.names,
            "After an exception torch still draws from the state of the fork. Which lines are skipped when the "
            "block raises, and which statement runs them all the same?",
        ),
        checks.Question(
            lambda d: SHARDED in d.names,
            "Before the exception a mask was drawn, and the next fork draws it again. When do you keep where the "
            "state has got to: at the end of a block that went well, or always?",
        ),
    ),
    "an interrupt within the fork": (
        checks.Question(
            lambda d: True,
            "If someone interrupts a cell, Python raises KeyboardInterrupt, which isn't an Exception. Your fork ends "
            "correctly after an Exception, but not after this. An `except Exception` doesn't catch it: which statement "
            "runs in both cases?",
        ),
    ),
    "a fork within a fork of another name": (
        checks.Question(
            lambda d: bool(d.names & {*MASKS, OUTSIDE}),
            "A fork stands within another one, and when the inner one ends, torch has to draw from the outer one's "
            "state again. Where do you keep what has to come back: in the tracker, where the inner fork overwrites "
            "it, or in a local variable of this fork?",
        ),
    ),
    "states saved and loaded": (
        checks.Question(
            lambda d: bool(d.names & {*MASKS}),
            "What was saved once can be loaded again and again, in any tracker. Does a later draw change the "
            "dictionary that `state_dict` has returned, or the one that `load_state_dict` was given? Whose "
            "dictionary is it, and whose are the tensors in it, if a load writes into them?",
        ),
    ),
    "names and seeds that are taken": (
        checks.Question(
            lambda d: SAME_NAME in d.names,
            "A second `add` with a name that is there would start its state anew. What should it raise?",
        ),
        checks.Question(
            lambda d: SAME_SEED in d.names,
            "Two names with one seed draw the same numbers. What does `add` have to remember?",
        ),
        checks.Question(
            lambda d: STILL_TAKEN in d.names,
            "Once a fork has drawn numbers, the state of its name has moved on. A second stream with the same seed "
            "would still draw those same numbers again. How does your `add` find out whether a seed is taken? What "
            "should it compare instead of the current states?",
        ),
        checks.Question(
            lambda d: NOTHING_LEFT in d.names,
            "Either the name was taken or the seed, not both, and the other one is still free: another state may "
            "have it. Do you look at both before you keep anything?",
        ),
    ),
    "fork() without a name": (
        checks.Question(
            lambda d: SHARDED in d.names,
            '`fork()` without a name draws other places than "sharded" would. Which name is the default?',
        ),
    ),
    "a fork in which nothing is drawn": (
        checks.Question(
            lambda d: bool(d.names & {*MASKS}),
            "Nothing was drawn in this fork, so the state must be where it was. Who draws, or seeds, within your "
            "`fork`?",
        ),
    ),
}
QUESTIONS = (
    checks.Question(
        drawn(AGAIN),
        "Every fork draws the same mask as the first, so each training step would drop the same places. When the "
        "block ends, where has the state got to, and who keeps that?",
    ),
    checks.Question(
        drawn(CURRENT, CURRENT_AGAIN),
        "Within the fork torch still draws from its own current state. Which call puts the state of the name into "
        "torch's generator?",
    ),
    checks.Question(
        drawn(OTHER_STREAM),
        "One name draws what belongs to another. Under which key do you keep a state, and under which do you look "
        "it up?",
    ),
    checks.Question(
        lambda d: OUTSIDE in d.names and not d.names & {*MASKS},
        "The masks are right, but what torch draws outside is not what it draws without a tracker. Is the state "
        "from before put back when a fork ends? And what does `torch.manual_seed` within `add` do to it?",
    ),
    checks.Question(
        lambda d: bool(d.names & {*MASKS}),
        "A state has to go on exactly where its last fork left it. Follow the state of one name through two forks: "
        "where is it before, within, between and after them?",
    ),
)
