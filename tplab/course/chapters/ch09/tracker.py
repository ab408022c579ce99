"""The check of exercise 9.3: random states with names, and `fork`.

Every scene draws dropout masks and compares them, place by place, with those that plain torch draws after
`torch.manual_seed` with the seed of the name. Outside the forks torch must draw as if there were no tracker.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tplab.course.chapters.ch09.tracker_questions import (
    AGAIN,
    CRASHES,
    CURRENT,
    CURRENT_AGAIN,
    OTHER_STREAM,
    OUTSIDE,
    REPLICATED,
    SHARDED,
    questions,
)
from tplab.course.chapters.ch09.tracker_scenes import SCENES, Script, in_turn, mask
from tplab.course.checks import WORLD_SIZES, Verdict, by_name, exercise, fresh_generator, run_cases, verify


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
