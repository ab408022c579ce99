"""The check of exercise 9.3, a tracker of named random states.

Each case is a scene, which is a short program that draws dropout masks with the learner's tracker. The right masks are
those that plain PyTorch draws on the same device after `torch.manual_seed` with the seed of the same name. Outside the
forks, torch must draw as if there were no tracker.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tplab.course.checks.cases import Case, Place
from tplab.course.checks.observation import Claim, Observed
from tplab.course.checks.run_answer import called_as
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.checks.twins import Twin
from tplab.runtime import device

REPLICATED, SHARDED, OUTSIDE = "masks of 'replicated'", "masks of 'sharded'", "masks drawn outside"
COMES_OUT = "the exception comes out of the fork"
SAME_NAME, SAME_SEED = "a second stream of the same name is refused", "a second stream with the same seed is refused"
STILL_TAKEN = "a seed stays taken after its stream was used"
TAKEN_AFTER_LOAD = "a seed stays taken after load_state_dict"
NOTHING_LEFT = "what was refused leaves nothing behind"
UNKNOWN = "a name that wasn't added raises an error"
SIZE = 256  # elements of a mask, so independent masks are equal with a probability of 2**-256
PLAIN = "plain "  # what torch itself draws from a stream, for `right`


def mask() -> Tensor:
    return F.dropout(torch.ones(SIZE, device=device()), 0.5).cpu()


class Script:
    """A learner's tracker with two streams, and the masks drawn so far."""

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

    def fork(self, *names: str) -> None:
        for name in names:
            with called_as(f"`with tracker.fork({name!r})`"), self.tracker.fork(name):
                self.draw(name)

    def claim(self, says: str, problem: str) -> None:
        self.claims[says] = Claim(problem)

    def refuses(self, says: str, name: str, value: int) -> None:
        try:
            self.tracker.add(name, value)
        except ValueError:
            self.claim(says, "")
        else:
            self.claim(says, f"add({name!r}, {value}) raises no ValueError")


def in_turn(script: Script) -> None:
    for _ in range(3):
        script.outside()
        script.fork("replicated", "sharded")


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
    except type(raised) as error:
        said = "" if error is raised else f"another {type(error).__name__} came out instead"
    except Exception as error:
        said = f"{type(error).__name__} came out instead"
    script.claim(COMES_OUT, said)
    script.outside()
    script.fork("sharded", "replicated")


def nested(script: Script) -> None:
    with script.tracker.fork("replicated"):
        script.draw("replicated")
        script.fork("sharded")
        script.draw("replicated")
    script.outside()
    script.fork("sharded", "replicated")


def unknown(script: Script) -> None:
    script.outside()
    try:
        with script.tracker.fork("another"):
            mask()
    except Exception:
        script.claim(UNKNOWN, "")
    else:
        script.claim(UNKNOWN, "fork('another') draws numbers, although nobody added such a stream")
    script.outside()
    script.fork("sharded")


def saved(script: Script) -> None:
    script.fork("sharded", "replicated")
    with called_as("state_dict()"):
        state = script.tracker.state_dict()
    for _ in range(2):
        script.fork("sharded", "replicated")
    other = script.tracker_class()
    for name, value in script.seeds.items():
        other.add(name, value + 1000)
    for tracker in (script.tracker, other, script.tracker):
        script.tracker = tracker
        with called_as("load_state_dict(state), with what state_dict() returned"):
            tracker.load_state_dict(state)
        for _ in range(2):
            script.fork("sharded", "replicated")
    later = script.tracker.state_dict()  # loading the first state must not change this one
    script.tracker.load_state_dict(state)
    script.tracker.load_state_dict(later)
    script.fork("sharded", "replicated")
    script.outside()


def refused(script: Script) -> None:
    seed = script.seeds["sharded"]
    script.refuses(SAME_NAME, "sharded", seed + 1000)
    script.refuses(SAME_SEED, "another", seed)
    script.claim(NOTHING_LEFT, "")
    for name, value in (("another", seed + 2000), ("a third", seed + 1000)):
        try:
            script.tracker.add(name, value)
        except ValueError as error:
            script.claim(NOTHING_LEFT, f"add({name!r}, {value}) raises ValueError: {error}"[:100])
    script.fork("sharded")
    script.refuses(STILL_TAKEN, "a fourth", seed)
    script.outside()


def taken_after_load(script: Script) -> None:
    script.fork("sharded")
    script.tracker.load_state_dict(script.tracker.state_dict())
    script.refuses(TAKEN_AFTER_LOAD, "another", script.seeds["sharded"])
    script.fork("sharded")


@dataclass(frozen=True)
class Scene(Case):
    """A program that uses the tracker. `order` says which draws of their stream the masks in each list must equal."""

    title: str
    program: Callable[[Script], None]
    order: Mapping[str, Sequence[int]]

    def describe(self, name: str) -> str:
        return self.title


BOTH_ONCE = {REPLICATED: [0], SHARDED: [0, 1], OUTSIDE: [0, 1]}
SCENES = (
    Scene("forks in turn", in_turn, {REPLICATED: [0, 1, 2], SHARDED: [0, 1, 2], OUTSIDE: [0, 1, 2]}),
    Scene("fork() without a name", default_name, {SHARDED: [0, 1]}),
    Scene("several draws in one fork", several_draws, {SHARDED: [0, 1, 2, 3], OUTSIDE: [0, 1]}),
    Scene("a fork in which nothing is drawn", nothing_drawn, {SHARDED: [0, 1], OUTSIDE: [0]}),
    Scene("an exception in the fork", exception, BOTH_ONCE),
    Scene("an interrupt in the fork", interrupt, BOTH_ONCE),
    Scene("a fork in a fork of another name", nested, {REPLICATED: [0, 1, 2], SHARDED: [0, 1], OUTSIDE: [0]}),
    Scene("a name that wasn't added", unknown, {SHARDED: [0], OUTSIDE: [0, 1]}),
    Scene(
        "states that are saved and loaded", saved,
        {REPLICATED: [0, *[1, 2] * 4, 3], SHARDED: [0, *[1, 2] * 4, 3], OUTSIDE: [0]},
    ),
    Scene("names and seeds that are taken", refused, {SHARDED: [0], OUTSIDE: [0]}),
    Scene("a seed that's taken, after load_state_dict", taken_after_load, {SHARDED: [0, 1]}),
)  # fmt: skip


def run(tracker_class: Any, case: Scene, seed: int, group: Any) -> Observed:
    script = Script(tracker_class, seed)
    case.program(script)
    seen = {name: torch.stack(masks) for name, masks in script.drawn.items() if masks} | script.claims
    seeds = {OUTSIDE: seed, REPLICATED: script.seeds["replicated"], SHARDED: script.seeds["sharded"]}
    return seen | {PLAIN + name: plain(value) for name, value in seeds.items()}


def plain(seed: int) -> Tensor:
    """Return the first nine masks that torch draws after this seed."""
    torch.manual_seed(seed)
    return torch.stack([mask() for _ in range(9)])


def right(case: Scene, seed: int, place: Place) -> Observed:
    mine = place.observed[place.index]
    return {name: mine[PLAIN + name][list(draws)] for name, draws in case.order.items()}


exercise(
    "9.3", "A tracker of random states", takes=["RNGTracker"],
    trials=[
        OnRanks(
            cases=SCENES, run=run, right=right, values_on_cpu=True, world_sizes=(2, 1),
            draw=lambda case, generator, size: int(torch.randint(10**6, (), generator=generator)),
            without=[twin for twin in Twin if twin is not Twin.AGAIN],
        )
    ],
    passed="Every stream goes on where it stopped, even after an exception, and torch's own state never notices.",
)  # fmt: skip
