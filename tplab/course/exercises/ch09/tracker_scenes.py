"""The scenes for the check of exercise 9.3, which are programs that use a learner's tracker and draw masks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tplab.course.checks import Case, Claim, Observed, called_as
from tplab.runtime import device

REPLICATED, SHARDED, OUTSIDE = "masks of 'replicated'", "masks of 'sharded'", "numbers drawn outside"
COMES_OUT = "the exception comes out of the fork"
SAME_NAME, SAME_SEED = "a second state of the same name is refused", "a second state with the same seed is refused"
STILL_TAKEN = "a seed stays taken after its state was used"
NOTHING_LEFT = "what was refused leaves nothing behind"
PLACES = 256  # elements of a mask, so independent masks are equal with a probability of 2**-256


def mask() -> Tensor:
    return F.dropout(torch.ones(PLACES, device=device()), 0.5).cpu()


class Script:
    """A learner's tracker with two states, and the masks drawn so far."""

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
    leave_by(script, KeyError("an exception within the fork"))


def interrupt(script: Script) -> None:
    leave_by(script, KeyboardInterrupt("an interrupt within the fork"))


def leave_by(script: Script, raised: BaseException) -> None:
    said = "nothing was raised"
    script.outside()
    try:
        with script.tracker.fork("sharded"):
            script.draw("sharded")
            raise raised
    except type(raised):
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
    later = script.tracker.state_dict()  # loading the first state must not change this one
    script.tracker.load_state_dict(state)
    script.tracker.load_state_dict(later)
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
    script.claims[NOTHING_LEFT] = Claim("")
    for name, value in (("another", seed + 2000), ("a third", seed + 1000)):
        try:
            script.tracker.add(name, value)
        except ValueError as error:
            script.claims[NOTHING_LEFT] = Claim(f"add({name!r}, {value}) raises ValueError: {error}"[:100])
    script.fork("sharded")
    try:
        script.tracker.add("a fourth", seed)
    except ValueError:
        script.claims[STILL_TAKEN] = Claim("")
    else:
        script.claims[STILL_TAKEN] = Claim(f"add('a fourth', {seed}) raises no ValueError after fork('sharded')")
    script.outside()


@dataclass(frozen=True, kw_only=True)
class Scene(Case):
    """A program that uses the tracker. `order` says which draws of their state the masks in each list must equal."""

    title: str
    program: Callable[[Script], None]
    order: Mapping[str, Sequence[int]]

    def describe(self, name: str) -> str:
        return self.title


SCENES = (
    Scene(
        title="forks in turn", program=in_turn,
        order={REPLICATED: [0, 1, 2], SHARDED: [0, 1, 2], OUTSIDE: [0, 1, 2]},
    ),
    Scene(title="fork() without a name", program=default_name, order={SHARDED: [0, 1]}),
    Scene(title="several draws in one fork", program=several_draws, order={SHARDED: [0, 1, 2, 3], OUTSIDE: [0, 1]}),
    Scene(title="a fork in which nothing is drawn", program=nothing_drawn, order={SHARDED: [0, 1], OUTSIDE: [0]}),
    Scene(
        title="an exception within the fork", program=exception,
        order={REPLICATED: [0], SHARDED: [0, 1], OUTSIDE: [0, 1]},
    ),
    Scene(
        title="an interrupt within the fork", program=interrupt,
        order={REPLICATED: [0], SHARDED: [0, 1], OUTSIDE: [0, 1]},
    ),
    Scene(
        title="a fork within a fork of another name", program=nested,
        order={REPLICATED: [0, 1, 2], SHARDED: [0, 1], OUTSIDE: [0]},
    ),
    Scene(
        title="states saved and loaded", program=saved,
        order={REPLICATED: [0, *[1, 2] * 4, 3], SHARDED: [0, *[1, 2] * 4, 3], OUTSIDE: [0]},
    ),
    Scene(title="names and seeds that are taken", program=refused, order={SHARDED: [0], OUTSIDE: [0]}),
)  # fmt: skip
