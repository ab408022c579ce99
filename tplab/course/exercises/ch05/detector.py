"""The check for exercise 5.3, in which the learner writes a detector for replicated parameters that drift apart.

A scenario describes how a model's parameters differ between ranks. The check runs the detector in every scenario.
"""

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
NOT_FINITE = "nan or inf"  # the check records this text if the drift is NaN or infinite
SHARDED_NUMEL = 77  # no other parameter has this many elements, so the check can recognize a collective on a shard
CANCEL = "the differences cancel in the sum"
CANCEL_IN_COLUMN = "the differences cancel within a column"
FROZEN = "one element of a frozen parameter differs"
AGAIN = "the same module was measured before, when another element differed"
FINE = "one element differs in its ninth digit"
SECOND = "the second parameter differs more than the first"
LONG = "one element differs by a number with many digits"


class Part(nn.Module):
    """A module with two replicated parameters and one sharded parameter."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(5, dtype=dtype, device=device()))
        self.second = nn.Parameter(torch.zeros(3, 4, dtype=dtype, device=device()))
        self.shard = nn.Parameter(torch.zeros(SHARDED_NUMEL, dtype=dtype, device=device()))
        self.shard.tensor_parallel = Sharding(0)  # type: ignore[attr-defined]


DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
Offsets = dict[str, Sequence[float]]  # {parameter: offsets of its last element on each rank in the group}

SCENARIOS: dict[str, Offsets] = {
    "equal replicas": {},
    "only the shards differ": {"shard": (0, 1, 2, 3)},
    "one element differs on the last rank": {"second": (0, 0, 0, 0.5)},
    "one element differs on rank 1": {"second": (0, -0.5, 0, 0)},
    "the first parameter differs more than the second": {"first": (0, 2, 0, 2), "second": (0, 0.25, 0, 0)},
    SECOND: {"first": (0, 0.25, 0, 0), "second": (0, 2, 0, 2)},
    "ranks 1 and 2 are furthest apart": {"first": (0, 1, -1, 0.5)},
    "the values climb from rank to rank": {"first": (0, 0.5, 1, 1.5)},
    CANCEL: {"second": (0.5, -0.5, 0.5, -0.5)},  # the first element gets the opposite offsets
    CANCEL_IN_COLUMN: {"second": (0.5, -0.5, 0.5, -0.5)},  # the column's first element gets the opposite offsets
    "inside a module": {"inner.second": (0, 0, 0, 4)},
    FROZEN: {"second": (0, 0.5, 0, 0)},
    FINE: {"first": (0, 0, 2.0**-24, 0)},
    LONG: {"second": (0, 0, 2.0**10 + 2.0**-20, 0)},
    "the parameters are float32, and one element differs": {"second": (0, 0, 0.5, 0)},
    "the parameters are bfloat16, and one element differs": {"second": (0, 0, 0.5, 0)},
    AGAIN: {"second": (0, 0, 0.25, 0)},
    "one element is NaN on rank 1": {"second": (0, math.nan, 0, 0)},
    "one element is NaN on every rank": {"second": (math.nan,) * 4},
}


def offsets_on(scenario: Offsets, q: int) -> Offsets:
    """Select the offsets for a group of q ranks from a scenario, which lists the parameters' offsets on four ranks.

    If the last rank in the group would have no offset, use the offset of the fourth rank.
    """
    return {name: [*values[: q - 1], values[q - 1] or values[3]] for name, values in scenario.items()}


def right_drift(scenario: Offsets) -> float | str:
    """Return the drift, a float or NOT_FINITE, that the detector should report for the offsets in `scenario`."""
    replicated = [values for name, values in scenario.items() if "shard" not in name]
    if any(math.isnan(value) for values in replicated for value in values):
        return NOT_FINITE
    return float(max((max(values) - min(values) for values in replicated), default=0.0))


def watch(detect: Callable[..., Any], groups: Sequence[Sequence[int]] | None, seed: int) -> list[checks.Observed]:
    """On every rank, run the detector on a model for each scenario, and observe what the detector reports."""
    group = checks.make_group(groups)
    rank, q = dist.get_rank(group), dist.get_world_size(group)
    seen = []
    for note, scenario in SCENARIOS.items():
        dtype = next((dtype for name, dtype in DTYPES.items() if name in note), torch.float64)
        model = Part(dtype)
        model.add_module("inner", Part(dtype))
        generator = torch.Generator().manual_seed(seed)  # draws the same values on every rank
        params = dict(model.named_parameters())
        params["second"].requires_grad_(note != FROZEN)
        with torch.no_grad():
            for param in params.values():
                start = torch.randint(-64, 65, param.shape, generator=generator).double() / 8
                start += 16 * (note == FINE)  # so that no element is near zero
                param.copy_(start + (dist.get_rank() % 2 if groups else 0))  # the two groups have different values
            if note == AGAIN:
                params["first"].data[0] += rank
                detect(model, group)
                params["first"].data[0] -= rank
            for name, offsets in offsets_on(scenario, q).items():
                params[name].view(-1)[-1] += offsets[rank]
                if note in (CANCEL, CANCEL_IN_COLUMN):
                    params[name].view(-1)[0 if note == CANCEL else 3] -= offsets[rank]
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
    """On every rank, run the detector on a module whose only parameter is sharded."""
    model = nn.Module()
    model.shard = Part().shard
    with checks.called_as("replica_drift(module without replicated parameters)"):
        return {"drift": detect(model)}


EMPTY = (
    "A module might have no replicated parameters at all. In that case, nothing can drift, so the result should be "
    "0.0. Which line of your code fails if there are no replicated parameters?"
)


@checks.exercise("5.3", "A detector for drifting replicas")
def detector(detect: Callable[..., Any]) -> checks.Verdict:
    runs = []
    for p in checks.WORLD_SIZES:
        for groups in (None, checks.GROUPS) if p == 4 else (None,):
            seed = int(torch.randint(10**6, (), generator=checks.fresh_generator()))
            whose, note = (checks.ask_about_group(WHOSE_GROUP), checks.IN_GROUPS) if groups else (None, "")
            seen = checks.run_ranks(watch, p, detect, groups, seed, question=whose, stuck=whose, note=note)
            runs.append((p, groups, seen))
    for nan in (
        False,
        True,
    ):  # check the scenarios without NaN first, because every detector must handle these scenarios
        for p, groups, seen in runs:
            q = len(checks.member_of(p, groups)[0][1])
            for i, (note, scenario) in enumerate(SCENARIOS.items()):
                if ("NaN" in note) == nan:
                    right = {"drift": right_drift(offsets_on(scenario, q))}
                    observed = [mine[i] for mine in seen]
                    questions = [CHANGED, checks.group_question(WHOSE_GROUP)] if groups else [CHANGED]
                    questions += detector_questions(note, [mine["drift"] for mine in observed], right["drift"])
                    where = f"{note}, {checks.IN_GROUPS}" if groups else note
                    checks.verify("5.3", p, observed, [right] * p, questions=questions, note=where)
    note = "a module without any replicated parameter"
    empty = checks.run_ranks(watch_nothing, 2, detect, question=EMPTY, note=note)
    checks.verify(
        "5.3", 2, list(empty), [{"drift": 0.0}] * 2, questions=[checks.Question(lambda d: True, EMPTY)], note=note
    )
    return checks.Verdict(
        "Your detector catches a single wrong element on a single rank, even if that element is a NaN. The "
        "detector ignores shards, because shards are supposed to differ."
    )


def detector_questions(note: str, drifts: list[Any], right: float | str) -> list[checks.Question]:
    """Return the questions about a wrong drift. They depend on the scenario and on all the drifts."""
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
    "A detector must not change what it measures. Remember that `dist.all_reduce` writes into the tensor you pass to "
    "it. Which tensor does your code pass to `dist.all_reduce`?",
)
WHOSE_GROUP = (
    "Which of your calls doesn't pass `group`, and therefore uses the default group of all ranks? Check the "
    "`group` argument of your collectives and of the calls that query a rank or a world size."
)
_NAN = (
    "A NaN isn't equal to any number, not even to another NaN. There are two places where your code might drop a "
    "NaN. If one rank has a NaN and another rank has a number, an all-reduce with MAX or MIN may return "
    "the number. And what does Python's `max(0.0, float('nan'))` return?"
)
DETECTOR_ASKS = {
    "one element is NaN on rank 1": _NAN,
    "one element is NaN on every rank": _NAN,
    "only the shards differ": (
        "Each rank's shard is a different part of the weight, so shards are supposed to differ. Don't send any "
        "shards to other ranks, because shards are large. How can you tell whether a parameter is a shard?"
    ),
    "the sign": (
        "The result has the wrong sign. Drift is a distance, so it can't be negative. Does your code subtract in the "
        "wrong order, or is it missing an absolute value?"
    ),
    "type": ("The result should be a plain float. Which method converts a one-element tensor to a Python number?"),
    "not the same on every rank": (
        "Every rank should return the same number, because otherwise only some of the ranks would report the "
        "drift. What information do the other ranks need to compute this number?"
    ),
    "equal replicas": (
        "The replicas are equal here, so the drift should be 0.0. Which values does your code compare? What's the "
        "initial value of your result?"
    ),
    "ranks 1 and 2 are furthest apart": (
        "Here, rank 0's value lies between the values on ranks 1 and 2. Which ranks does your code compare? Given p "
        "values, how do you find the largest difference between any two of them?"
    ),
    "the values climb from rank to rank": (
        "Neighboring ranks differ only slightly here, but the first and the last rank differ a lot. Which pairs of "
        "ranks does your code compare?"
    ),
    AGAIN: (
        "A training loop calls your detector repeatedly, on the same module each time. Here, your detector was "
        "called on this module before, when a different element had drifted further. Which variable in "
        "your code keeps its value between calls?"
    ),
    FROZEN: (
        "A parameter that isn't trained can still differ between ranks, for example because it was loaded incorrectly. "
        "Which parameters does your loop skip?"
    ),
    FINE: (
        "The parameters are float64, and their values are so close that they would round to the same float32. "
        "Which line converts the parameters to a different dtype?"
    ),
    LONG: (
        "The parameters are float64, so their drift is a float64, too, but your result was rounded to float32. Which "
        "line creates a tensor without specifying its dtype? Note that `torch.tensor` turns Python floats into a "
        "float32 tensor."
    ),
    CANCEL: (
        "Here, one element is too large, and another element is too small by exactly the same amount. Do positive and "
        "negative differences cancel in your code?"
    ),
    "the first parameter differs more than the second": (
        "Two parameters differ here, each by a different amount. Which of these two differences does your function "
        "return?"
    ),
    SECOND: (
        "Two parameters differ here, and the first one differs less than the second. Does your code keep checking "
        "the remaining parameters after it finds a difference?"
    ),
    "inside a module": (
        "The parameter that differs belongs to a nested module. Does your loop reach the parameters of nested modules?"
    ),
    "else": (
        "A single element differs on a single rank. Which line of your code ignores this difference or averages it "
        "away?"
    ),
}
