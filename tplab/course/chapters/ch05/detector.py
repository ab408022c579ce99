"""The check for exercise 5.4: a detector for replicated parameters that drift apart."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tplab.course import checks
from tplab.runtime import device, record
from tplab.tensor.sharding import Sharding

NO_SHARD_SENT = "no shard is sent"
NOT_FINITE = "nan or inf"  # reported for either
SHARDED_NUMEL = 77  # no other parameter has as many elements, so its collectives can be recognized
CANCEL = "the differences cancel in the sum"
FROZEN = "one element of a frozen parameter differs"
FINE = "one element differs in its ninth digit"


class Part(nn.Module):
    """A module with two replicated parameters and one sharded parameter."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(5, dtype=dtype, device=device()))
        self.second = nn.Parameter(torch.zeros(3, 4, dtype=dtype, device=device()))
        self.shard = nn.Parameter(torch.zeros(SHARDED_NUMEL, dtype=dtype, device=device()))
        self.shard.tensor_parallel = Sharding(0)  # type: ignore[attr-defined]


Offsets = dict[str, Sequence[float]]  # parameter -> offset of its last element, per rank in the group

SCENES: dict[str, Offsets] = {
    "equal replicas": {},
    "only the shards differ": {"shard": (0, 1, 2, 3)},
    "one element differs on the last rank": {"second": (0, 0, 0, 0.5)},
    "one element differs on rank 1": {"second": (0, -0.5, 0, 0)},
    "the first parameter differs more than the second": {"first": (0, 2, 0, 2), "second": (0, 0.25, 0, 0)},
    "ranks 1 and 2 are furthest apart": {"first": (0, 1, -1, 0.5)},
    "the values climb from rank to rank": {"first": (0, 0.5, 1, 1.5)},
    CANCEL: {"second": (0.5, -0.5, 0.5, -0.5)},  # and the opposite on its first element
    "inside a module": {"inner.second": (0, 0, 0, 4)},
    FROZEN: {"second": (0, 0.5, 0, 0)},
    FINE: {"first": (0, 0, 2.0**-24, 0)},
    "the parameters are float32, and one element differs": {"second": (0, 0, 0.5, 0)},
    "one element is NaN on rank 1": {"second": (0, math.nan, 0, 0)},
    "one element is NaN on every rank": {"second": (math.nan,) * 4},
}


def offsets_on(scene: Offsets, q: int) -> Offsets:
    """Reduce a scene from four ranks to q. If the last rank then has no offset, it gets the fourth rank's."""
    return {name: [*values[: q - 1], values[q - 1] or values[3]] for name, values in scene.items()}


def right_drift(scene: Offsets) -> float | str:
    """Return the drift that the detector should report in a scene from `offsets_on`: a float, or NOT_FINITE."""
    replicated = [values for name, values in scene.items() if "shard" not in name]
    if any(math.isnan(value) for values in replicated for value in values):
        return NOT_FINITE
    return float(max((max(values) - min(values) for values in replicated), default=0.0))


def watch(detect: Callable[..., Any], groups: Sequence[Sequence[int]] | None, seed: int) -> list[checks.Observed]:
    """Run the detector in every scene and observe what it reports. Runs on every rank."""
    group = checks.make_group(groups)
    rank, q = dist.get_rank(group), dist.get_world_size(group)
    seen = []
    for note, scene in SCENES.items():
        dtype = torch.float32 if "float32" in note else torch.float64
        model = Part(dtype)
        model.add_module("inner", Part(dtype))
        generator = torch.Generator().manual_seed(seed)  # same values within a group, different values in the other
        params = dict(model.named_parameters())
        params["second"].requires_grad_(note != FROZEN)
        with torch.no_grad():
            for param in params.values():
                start = torch.randint(-64, 65, param.shape, generator=generator).double() / 8
                start += 16 * (note == FINE)  # so that no element is near zero
                param.copy_(start + (dist.get_rank() % 2 if groups else 0))
            for name, offsets in offsets_on(scene, q).items():
                params[name].view(-1)[-1] += offsets[rank]
                if note == CANCEL:
                    params[name].view(-1)[0] -= offsets[rank]
        snapshot = checks.Snapshot(**params)
        with (
            record() as section,
            checks.DefaultDevice() as watch,
            checks.called_as(f"replica_drift(module, group), where {note}"),
        ):
            drift = detect(model, group)
        if type(drift) is float and not math.isfinite(drift):
            drift = NOT_FINITE
        sent = any(call.numel % SHARDED_NUMEL == 0 for call in checks.traffic(section) if call.numel)
        claim = checks.Claim("a collective is as large as a sharded parameter" if sent else "")
        seen.append({"drift": drift, NO_SHARD_SENT: claim, "inputs unchanged": snapshot.changed()} | watch.claims({}))
    return seen


def watch_nothing(detect: Callable[..., Any]) -> checks.Observed:
    """Run the detector on a module whose only parameter is sharded. Runs on every rank."""
    model = nn.Module()
    model.shard = Part().shard
    with checks.called_as("replica_drift(module without replicated parameters)"):
        return {"drift": detect(model)}


EMPTY = (
    "A module may have no replicated parameter at all. Then nothing can drift, and the drift is 0. Which line needs at "
    "least one?"
)


@checks.exercise("5.4", "A detector for drifting replicas")
def detector(detect: Callable[..., Any]) -> checks.Verdict:
    runs = []
    for p in checks.WORLD_SIZES:
        for groups in (None, checks.GROUPS) if p == 4 else (None,):
            seed = int(torch.randint(10**6, (), generator=checks.fresh_generator()))
            whose, note = (checks.ask_about_group(WHOSE_GROUP), checks.IN_GROUPS) if groups else (None, "")
            seen = checks.run_ranks(watch, p, detect, groups, seed, question=whose, stuck=whose, note=note)
            runs.append((p, groups, seen))
    for nan in (False, True):  # first the drifts that every detector must see
        for p, groups, seen in runs:
            q = len(checks.member_of(p, groups)[0][1])
            for i, (note, scene) in enumerate(SCENES.items()):
                if ("NaN" in note) == nan:
                    right = {"drift": right_drift(offsets_on(scene, q))}
                    observed = [mine[i] for mine in seen]
                    questions = [CHANGED, checks.group_question(WHOSE_GROUP)] if groups else [CHANGED]
                    questions += detector_questions(note, [mine["drift"] for mine in observed], right["drift"])
                    where = f"{note}, {checks.IN_GROUPS}" if groups else note
                    checks.verify("5.4", p, observed, [right] * p, questions=questions, note=where)
    note = "a module without any replicated parameter"
    empty = checks.run_ranks(watch_nothing, 2, detect, question=EMPTY, note=note)
    checks.verify(
        "5.4", 2, list(empty), [{"drift": 0.0}] * 2, questions=[checks.Question(lambda d: True, EMPTY)], note=note
    )
    return checks.Verdict("It sees one wrong element on one rank, also a NaN, and does not mind that shards differ.")


def detector_questions(note: str, drifts: list[Any], right: float | str) -> list[checks.Question]:
    """Return the questions about a wrong drift in one scene, depending on what the ranks returned."""
    rules = [
        (lambda d: NO_SHARD_SENT in d.names, DETECTOR_ASKS["only the shards differ"]),
        (lambda d: any(type(drift) is not float and drift != NOT_FINITE for drift in drifts), DETECTOR_ASKS["type"]),
        (lambda d: type(right) is float and drifts == [-right] * len(drifts), DETECTOR_ASKS["the sign"]),
        (lambda d: len(set(drifts)) > 1, DETECTOR_ASKS["not the same on every rank"]),
        (lambda d: True, DETECTOR_ASKS.get(note, DETECTOR_ASKS["else"])),
    ]
    return [checks.Question(when, ask) for when, ask in rules]


CHANGED = checks.Question(
    checks.changed,
    "A detector must not repair what it measures. `dist.all_reduce` writes into the tensor it gets: into which one "
    "does yours write?",
)
WHOSE_GROUP = (
    "Which collective, or which call for a rank or a size, was not given `group` and so used the default group of all "
    "ranks?"
)
_NAN = (
    "A NaN differs from every number, also from another NaN. Two places may swallow it: of a NaN and a number, MAX and "
    "MIN over the ranks keep now the one, now the other; and what is Python's max(0.0, float('nan'))?"
)
DETECTOR_ASKS = {
    "one element is NaN on rank 1": _NAN,
    "one element is NaN on every rank": _NAN,
    "only the shards differ": "Each rank's shard is another part of the weight: it is meant to differ, and it is "
    "large. How does a parameter say that it is a shard?",
    "the sign": "The size is right and the sign is not: a drift is a distance, so it's never negative. Which of the "
    "largest and the smallest do you subtract from which, or where is an absolute value missing?",
    "type": "The result is a plain float. What turns a tensor with one element into a number?",
    "not the same on every rank": "Every rank must return the same number, or only one of them raises the alarm. "
    "What do the others still need to know?",
    "equal replicas": "The replicas are equal here. Which numbers did you compare, or where does your result start?",
    "ranks 1 and 2 are furthest apart": "Rank 0 lies between ranks 1 and 2 here. Which two ranks do you compare? For "
    "one element, what is the largest difference between any two of p numbers?",
    "the values climb from rank to rank": "From rank to rank the step is small, from the first to the last it is not. "
    "Which two ranks do you compare?",
    FROZEN: "A parameter that isn't trained can still differ between ranks, for example after a wrong load. Which "
    "parameters does your loop leave out?",
    FINE: "The parameters are float64, and the difference is smaller than float32 can tell at these values. Which line "
    "converts them?",
    CANCEL: "Here one element is too large by exactly as much as another one is too small. Does your measure let "
    "positive and negative differences cancel?",
    "the first parameter differs more than the second": "Two parameters differ. Which of the numbers do you return?",
    "inside a module": "The difference is in a parameter of a module inside the module. How far does your loop look?",
    "else": "One single element on one single rank differs. Where in your code does it get lost, or averaged away?",
}
