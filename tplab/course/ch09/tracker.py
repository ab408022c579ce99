"""The check of exercise 9.3: random states with names, and `fork`.

Every scene draws dropout masks and compares them, place by place, with those that plain torch draws after
`torch.manual_seed` with the seed of the name. Outside the forks torch must draw as if there were no tracker.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tplab.course.ch09.tracker_questions import (
    AGAIN,
    COMES_OUT,
    CRASHES,
    CURRENT,
    CURRENT_AGAIN,
    OTHER_STREAM,
    OUTSIDE,
    REPLICATED,
    SAME_NAME,
    SAME_SEED,
    SHARDED,
    questions,
)
from tplab.course.checking import (
    WORLD_SIZES,
    Claim,
    Observed,
    Verdict,
    called_as,
    exercise,
    fresh_generator,
    run_cases,
    verify,
)
from tplab.course.scenes import by_name
from tplab.runtime import device

PLACES = 256  # two masks that are not meant to be equal are so once in 2**256


def mask() -> Tensor:
    return F.dropout(torch.ones(PLACES, device=device()), 0.5).cpu()


class Script:
    """A learner's tracker with two states, and what was drawn so far."""

    def __init__(self, tracker_class: Any, seed: int) -> None:
        self.seeds = {"replicated": seed + 100, "sharded": seed + 200 + dist.get_rank()}
        torch.manual_seed(seed)
        self.tracker_class, self.tracker = tracker_class, tracker_class()
        self.drawn: dict[str, list[Tensor]] = {REPLICATED: [], SHARDED: [], OUTSIDE: []}
        self.claims: Observed = {}
        for name, value in self.seeds.items():
            with called_as(f"add({name!r}, {value})"):
                self.tracker.add(name, value)

    def outside(self) -> None:
        self.drawn[OUTSIDE].append(mask())

    def draw(self, name: str) -> None:
        self.drawn[f"masks of {name!r}"].append(mask())

    def fork(self, name: str) -> None:
        with called_as(f"`with tracker.fork({name!r})`"), self.tracker.fork(name):
            self.draw(name)


def in_turn(script: Script) -> None:
    for _ in range(3):
        script.outside()
        script.fork("replicated")
        script.fork("sharded")


def default_name(script: Script) -> None:
    with called_as("`with tracker.fork()`"), script.tracker.fork():
        script.draw("sharded")
    script.fork("sharded")


def nothing_drawn(script: Script) -> None:
    script.fork("sharded")
    with script.tracker.fork("sharded"):
        pass
    script.fork("sharded")
    script.outside()


def several_draws(script: Script) -> None:
    for _ in range(2):
        with script.tracker.fork("sharded"):
            script.draw("sharded")
            script.draw("sharded")
        script.outside()


def exception(script: Script) -> None:
    said = "nothing was raised"
    script.outside()
    try:
        with script.tracker.fork("sharded"):
            script.draw("sharded")
            raise KeyError("an exception within the fork")
    except KeyError:
        said = ""
    except Exception as error:
        said = f"{type(error).__name__} came out in its place"
    script.claims[COMES_OUT] = Claim(said)
    script.outside()
    script.fork("sharded")
    script.fork("replicated")


def nested(script: Script) -> None:
    with script.tracker.fork("replicated"):
        script.draw("replicated")
        script.fork("sharded")
        script.draw("replicated")
    script.outside()
    script.fork("sharded")
    script.fork("replicated")


def saved(script: Script) -> None:
    script.fork("sharded")
    script.fork("replicated")
    with called_as("state_dict()"):
        state = script.tracker.state_dict()
    for _ in range(2):
        script.fork("sharded")
        script.fork("replicated")
    other = script.tracker_class()
    for name, value in script.seeds.items():
        other.add(name, value + 1000)
    for tracker in (script.tracker, other, script.tracker):
        script.tracker = tracker
        with called_as("load_state_dict(state), with what state_dict() returned"):
            tracker.load_state_dict(state)
        for _ in range(2):
            script.fork("sharded")
            script.fork("replicated")
    script.outside()


def refused(script: Script) -> None:
    seed = script.seeds["sharded"]
    for claim, name, value in ((SAME_NAME, "sharded", seed + 1000), (SAME_SEED, "another", seed)):
        try:
            script.tracker.add(name, value)
        except ValueError:
            script.claims[claim] = Claim("")
        else:
            script.claims[claim] = Claim(f"add({name!r}, {value}) raises no ValueError")
    script.fork("sharded")
    script.outside()


Scene = tuple[Callable[[Script], None], dict[str, list[int]]]
SCENES: dict[str, Scene] = {  # and which draw of its stream each mask has to be
    "forks in turn": (in_turn, {REPLICATED: [0, 1, 2], SHARDED: [0, 1, 2], OUTSIDE: [0, 1, 2]}),
    "fork() without a name": (default_name, {SHARDED: [0, 1]}),
    "several draws in one fork": (several_draws, {SHARDED: [0, 1, 2, 3], OUTSIDE: [0, 1]}),
    "a fork in which nothing is drawn": (nothing_drawn, {SHARDED: [0, 1], OUTSIDE: [0]}),
    "an exception within the fork": (exception, {REPLICATED: [0], SHARDED: [0, 1], OUTSIDE: [0, 1]}),
    "a fork within a fork of another name": (nested, {REPLICATED: [0, 1, 2], SHARDED: [0, 1], OUTSIDE: [0]}),
    "states saved and loaded": (saved, {REPLICATED: [0, *[1, 2] * 4], SHARDED: [0, *[1, 2] * 4], OUTSIDE: [0]}),
    "names and seeds that are taken": (refused, {SHARDED: [0], OUTSIDE: [0]}),
}


def run_scenes(tracker_class: Any, scenes: Sequence[str], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """On a rank: what each scene drew, what is right, and what known mistakes draw."""
    return [run_scene(tracker_class, *pair) for pair in zip(scenes, seeds, strict=True)]


def run_scene(tracker_class: Any, scene: str, seed: int) -> dict[str, Any]:
    program, order = SCENES[scene]
    script = Script(tracker_class, seed)
    program(script)
    seen = {name: torch.stack(masks) for name, masks in script.drawn.items() if masks}
    streams = {
        OUTSIDE: plain(seed),
        REPLICATED: plain(script.seeds["replicated"]),
        SHARDED: plain(script.seeds["sharded"]),
    }
    right = {name: torch.stack([streams[name][index] for index in draws]) for name, draws in order.items()}
    alike: dict[str, dict[str, Tensor]] = {
        name: {
            AGAIN: torch.stack([streams[name][0]] * len(draws)),
            OTHER_STREAM: torch.stack(streams[SHARDED if name == REPLICATED else REPLICATED][: len(draws)]),
        }
        for name, draws in order.items()
    }
    if program is in_turn:
        for idle in (Idle, IdleAndBack):
            mistaken = Script(idle, seed)
            program(mistaken)
            for name in order:
                alike[name][idle.gives] = torch.stack(mistaken.drawn[name])
    return {"seen": seen | script.claims, "right": right, "alike": alike}


class Idle:
    """A tracker that does nothing: what is drawn in its forks comes from torch's current state."""

    gives = CURRENT

    def add(self, name: str, seed: int) -> None:
        """Make no state."""

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        yield


class IdleAndBack(Idle):
    """One that puts the current state back, but never another one in its place."""

    gives = CURRENT_AGAIN

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        with torch.random.fork_rng():
            yield


def plain(seed: int) -> list[Tensor]:
    """The first masks that torch draws after a seed."""
    torch.manual_seed(seed)
    return [mask() for _ in range(9)]


@exercise("9.3", "A tracker of random states")
def tracker(tracker_class: Any) -> Verdict:
    scenes = list(SCENES)
    for p in WORLD_SIZES:
        generator = fresh_generator()
        seeds = [int(torch.randint(1000, 10**6, (), generator=generator)) for _ in scenes]
        for batch in (slice(0, 1), slice(1, None)):  # the plain scene first: its message is the clearest
            runs = run_cases(
                run_scenes,
                p,
                tracker_class,
                scenes[batch],
                seeds[batch],
                note=lambda scene: scene,
                question=lambda scene: CRASHES.get(scene),
            )
            for scene, ranks in zip(scenes[batch], runs, strict=True):
                verify(
                    "9.3",
                    p,
                    [rank["seen"] for rank in ranks],
                    [rank["right"] for rank in ranks],
                    questions=questions(scene),
                    lookalikes=by_name([rank["alike"] for rank in ranks]),
                    note=scene,
                )
    return Verdict("Every state goes on where it was left, also after an exception, and torch's own is untouched.")
