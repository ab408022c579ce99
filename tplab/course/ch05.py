"""What chapter 05 asks: its checks (those of the two MLPs are in ch05_layers.py), its predictions, its symptoms."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tplab.course.ch04_layers import GROUP_QUESTION, GROUPS, make_group, member_of
from tplab.course.ch05_layers import parallel_mlp, parallel_swiglu
from tplab.course.checking import (
    WORLD_SIZES,
    Question,
    Snapshot,
    Verdict,
    exercise,
    fresh_generator,
    run_ranks,
    traffic,
    verify,
)
from tplab.course.observing import Observed
from tplab.course.predictions import Prediction
from tplab.course.symptoms import Symptom
from tplab.linear import ColumnParallelLinear, RowParallelLinear
from tplab.mlp import ParallelMLP
from tplab.runtime import device, record
from tplab.sharding import Sharding

__all__ = ["PREDICTIONS", "SYMPTOMS", "bytes_of_an_mlp", "detector", "parallel_mlp", "parallel_swiglu"]

# 5.2: the bytes of an MLP


def measure(b: int, s: int, h: int, m: int, dtype: torch.dtype) -> dict[str, int]:
    """On a rank: the bytes that the course's MLP and the naive one put into collectives."""
    mlp = ParallelMLP(h, m, device=device(), dtype=dtype)
    first = ColumnParallelLinear(h, m, gather_output=True, device=device(), dtype=dtype)
    second = RowParallelLinear(m, h, input_is_parallel=False, device=device(), dtype=dtype)

    def naive(x: torch.Tensor) -> torch.Tensor:
        return second(F.gelu(first(x)))

    sizes = {}
    for name, run in (("ParallelMLP", mlp), ("naive", naive)):
        x = torch.randn(b, s, h, device=device(), dtype=dtype, requires_grad=True)
        with record() as forward:
            out = run(x)
        with record() as backward:
            out.backward(torch.randn_like(out))
        for direction, section in (("forward", forward), ("backward", backward)):
            sizes[f"{name}, {direction}"] = sum(c.bytes for c in section if len(c.group) > 1)
    return sizes


def answers(formula: Callable[..., Any], b: int, s: int, h: int, m: int, p: int, size: int) -> dict[str, Any]:
    """What the learner's formula says, under the names of `measure`."""
    said = {"ParallelMLP": formula(b, s, h, m, p, bytes_per_number=size)}
    said["naive"] = formula(b, s, h, m, p, bytes_per_number=size, naive=True)
    return {
        f"{name}, {direction}": value[direction] if isinstance(value, dict) and direction in value else "no such entry"
        for name, value in said.items()
        for direction in ("forward", "backward")
    }


@exercise("5.2", "The bytes of an MLP")
def bytes_of_an_mlp(formula: Callable[..., Any]) -> Verdict:
    generator = fresh_generator()

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    for p in (1, 4, 2):  # 4 before 2, where a factor of two could be p or two directions
        for size, dtype in ((4, torch.float32), (8, torch.float64)):
            b, s, h, m = pick(2, 3), pick(5, 7), 4 * pick(2, 3), 4 * pick(5, 9)
            m += 4 * (m % h == 0)  # where m is 2h or p·h, different mistakes give the same number
            said = answers(formula, b, s, h, m, p, size)
            measured = run_ranks(measure, p, b, s, h, m, dtype)[0]
            note = f"b = {b}, s = {s}, h = {h}, m = {m}, {size} bytes a number"
            questions = bytes_questions(said, measured, b * s * h * size, b * s * m * size, p, size)
            verify("5.2", p, [said] * p, [measured] * p, questions=questions, note=note)
    return Verdict("The messages of an MLP do not depend on p, once p is more than 1.")


def bytes_questions(
    said: dict[str, Any], measured: dict[str, int], outer: int, inner: int, p: int, size: int
) -> list[Question]:
    """Questions about numbers: `outer` and `inner` are the bytes of [b, s, h] and of [b, s, m]."""

    def says(name: str, *values: float) -> bool:
        return said[name] != measured[name] and any(said[name] == value for value in values)

    plain, naive = "ParallelMLP, forward", "naive, forward"
    rules = [
        (
            "no such entry" in said.values(),
            'The result is a dictionary with two numbers: {"forward": bytes, "backward": bytes}.',
        ),
        (p == 1, "With one rank there is nobody to send anything to. What do f and g do then?"),
        (
            all(said[name] == value / size for name, value in measured.items()),
            "That is how many numbers the messages hold. How many bytes has each?",
        ),
        (
            all(said[name] == value * 4 / size for name, value in measured.items()),
            "Right for float32. How many bytes has a number here, and which argument says so?",
        ),
        (
            says(plain, outer * p, outer / p),
            "The size of a message is the size of the tensor that one rank puts in. Does that tensor shrink or grow "
            "with p? What is its shape after g?",
        ),
        (
            says(plain, outer * 2 * (p - 1) / p, outer * (p - 1) / p),
            "That is what one rank sends in a ring algorithm. Here the size of the message is asked for, as nccl-tests "
            "counts it: the whole tensor.",
        ),
        (
            says(plain, inner, inner / p, outer + inner),
            "Which tensor is all-reduced: the one between the layers, or the one that leaves the MLP?",
        ),
        (
            says(plain, 2 * outer),
            "How many all-reduces run in the forward pass? f runs in the backward pass, g in the forward pass.",
        ),
        (
            said["ParallelMLP, forward"] == measured["ParallelMLP, forward"]
            and said["ParallelMLP, backward"] != measured["ParallelMLP, backward"],
            "The forward pass is right. What does f do in the backward pass, and with which tensor?",
        ),
        (
            says(naive, outer),
            "The naive MLP also gathers the inner activation [b, s, m]. Where is that in your formula?",
        ),
        (
            says(naive, outer + inner / p),
            "The size of an all-gather is that of the gathered tensor, all parts together, not of one part.",
        ),
        (
            says(naive, inner),
            "The naive MLP has g at its output as well. Which message is missing?",
        ),
        (
            said[naive] == measured[naive] and said["naive, backward"] != measured["naive, backward"],
            "The naive forward pass is right. What is the backward of the scatter before the second layer?",
        ),
        (
            True,
            "Go through the table of section 2 row by row: which tensor, which shape, how many bytes a number?",
        ),
    ]
    return [Question(lambda d: True, ask) for fits, ask in rules if fits]


# 5.4: a detector for drifting replicas

SHARDED_NUMEL = 77  # no other parameter has as many elements, so that its collectives can be told apart


class Part(nn.Module):
    """Two replicated parameters and a shard."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(5, dtype=torch.float64, device=device()))
        self.second = nn.Parameter(torch.zeros(3, 4, dtype=torch.float64, device=device()))
        self.shard = nn.Parameter(torch.zeros(SHARDED_NUMEL, dtype=torch.float64, device=device()))
        self.shard.tensor_parallel = Sharding(0)  # type: ignore[attr-defined]


Offsets = dict[str, Sequence[float]]  # parameter -> what is added to its last element, by rank in the group
SCENES: dict[str, Offsets] = {
    "equal replicas": {},
    "only the shards differ": {"shard": (0, 1, 2, 3)},
    "one element differs on the last rank": {"second": (0, 0, 0, 0.5)},
    "one element differs on rank 1": {"second": (0, -0.5, 0, 0)},
    "the first parameter differs more than the second": {"first": (0, 2, 0, 2), "second": (0, 0.25, 0, 0)},
    "ranks 1 and 2 are furthest apart": {"first": (0, 1, -1, 0.5)},
    "the values climb from rank to rank": {"first": (0, 0.5, 1, 1.5)},
    "the differences cancel in the sum": {"second": (0.5, -0.5, 0.5, -0.5)},
    "inside a module": {"inner.second": (0, 0, 0, 4)},
}


def offsets_on(scene: Offsets, q: int) -> Offsets:
    """The scene for q ranks: what happens on the last of four happens on the last of q."""
    return {name: [*values[: q - 1], values[q - 1] or values[3]] if q > 1 else [0] for name, values in scene.items()}


def watch(detect: Callable[..., Any], groups: Sequence[Sequence[int]] | None, seed: int) -> list[Observed]:
    """On a rank: what the detector says in every scene."""
    group = make_group(groups)
    rank, q = dist.get_rank(group), dist.get_world_size(group)
    seen = []
    for scene in SCENES.values():
        model = Part()
        model.add_module("inner", Part())
        generator = torch.Generator().manual_seed(seed)  # the same numbers in each group, other ones in the other group
        params = dict(model.named_parameters())
        with torch.no_grad():
            for param in params.values():
                start = torch.randint(-64, 65, param.shape, generator=generator).double() / 8
                param.copy_(start + (dist.get_rank() % 2 if groups else 0))
            for name, offsets in offsets_on(scene, q).items():
                params[name].view(-1)[-1] += offsets[rank]
        snapshot = Snapshot(**params)
        with record() as section:
            drift = detect(model, group)
        sent = any(call.numel % SHARDED_NUMEL == 0 for call in traffic(section) if call.numel)
        seen.append({"drift": drift, "a shard was sent": str(sent), "inputs unchanged": snapshot.changed()})
    return seen


@exercise("5.4", "A detector for drifting replicas")
def detector(detect: Callable[..., Any]) -> Verdict:
    for p in WORLD_SIZES:
        for groups in (None, GROUPS) if p == 4 else (None,):
            seed = int(torch.randint(10**6, (), generator=fresh_generator()))
            seen = run_ranks(watch, p, detect, groups, seed)
            q = len(member_of(p, groups)[0][1])
            for i, (note, scene) in enumerate(SCENES.items()):
                offsets = offsets_on(scene, q).items()
                apart = [max(values) - min(values) for name, values in offsets if "shard" not in name]
                right = {"drift": float(max(apart, default=0.0)), "a shard was sent": "False"}
                observed = [mine[i] for mine in seen]
                questions = [CHANGED, GROUP_QUESTION] if groups else [CHANGED]
                questions += detector_questions(note, [mine[i]["drift"] for mine in seen])
                verify("5.4", p, observed, [right] * p, questions=questions, note=note)
    return Verdict("It sees one wrong element on one rank, and does not mind that shards differ.")


def detector_questions(note: str, drifts: list[Any]) -> list[Question]:
    """What to ask about a wrong number in one scene, by what the ranks returned."""
    rules = [
        (lambda d: "a shard was sent" in d.names, DETECTOR_ASKS["only the shards differ"]),
        (lambda d: any(type(drift) is not float for drift in drifts), DETECTOR_ASKS["type"]),
        (lambda d: len(set(drifts)) > 1, DETECTOR_ASKS["not the same on every rank"]),
        (lambda d: True, DETECTOR_ASKS.get(note, DETECTOR_ASKS["else"])),
    ]
    return [Question(when, ask) for when, ask in rules]


CHANGED = Question(
    lambda d: "changed" in d.kinds(),
    "A detector must not repair what it measures. `dist.all_reduce` writes into the tensor it gets: into which one "
    "does yours write?",
)
DETECTOR_ASKS = {
    "only the shards differ": "Each rank's shard is another part of the weight: it is meant to differ, and it is "
    "large. How does a parameter say that it is a shard?",
    "type": "The result is a plain float. What turns a tensor with one element into a number?",
    "not the same on every rank": "Every rank must return the same number, or only one of them raises the alarm. "
    "What do the others still need to know?",
    "equal replicas": "The replicas are equal here. Which numbers did you compare, or where does your result start?",
    "ranks 1 and 2 are furthest apart": "Rank 0 lies between ranks 1 and 2 here. Which two ranks do you compare? For "
    "one element, what is the largest difference between any two of p numbers?",
    "the values climb from rank to rank": "From rank to rank the step is small, from the first to the last it is not. "
    "Which two ranks do you compare?",
    "the differences cancel in the sum": "What goes up on some ranks goes down on others. Does your measure let "
    "positive and negative differences cancel?",
    "the first parameter differs more than the second": "Two parameters differ. Which of the numbers do you return?",
    "inside a module": "The difference is in a parameter of a module inside the module. How far does your loop look?",
    "else": "One single element on one single rank differs. Where in your code does it get lost, or averaged away?",
}


# Predictions and symptoms

PREDICTIONS = {
    "5.a": Prediction(
        question="How many collectives has the naive MLP, forward and backward together, and how many the one without "
        "anything in between? With m = 4h, how many times b·s·h numbers do the naive messages hold together?",
        answer={"naive_calls": 4, "calls": 2, "naive_volume": 10},
        why="Naive: all-gather and all-reduce forward, all-gather and all-reduce backward: 4bsh + bsh in each "
        "direction, 10 together. Without the middle: g forward and f backward, 2 together. Five times less.",
        wrong={
            "naive_calls": "Count the cells of the table that hold a collective.",
            "calls": "Which operators stand at the two ends, f at the input and g at the output? In which direction "
            "does each of them communicate?",
            "naive_volume": "The table has two messages of b·s·h and two of b·s·m. How much is b·s·m, if m = 4h?",
            ("naive_volume", 2.5): "An all-gather counts all parts together, not one rank's part.",
            ("naive_volume", 5): "That is one direction.",
        },
    ),
    "5.b": Prediction(
        question="A fused weight [gate; up] of 16 rows, p = 2: which rows must rank 1 hold? How many all-reduces has "
        "the gated MLP, forward and backward together?",
        answer={"rows_of_rank_1": [4, 5, 6, 7, 12, 13, 14, 15], "calls": 2},
        why="Rank 1 takes the second half of the gate (4 to 7) and the second half of up (12 to 15), so that every "
        "column finds its partner on the same rank. One f stands before the fused product, one g after the last.",
        wrong={
            "rows_of_rank_1": "Row 8 is the first row of up and meets row 0, the first row of the gate. Which rows "
            "does row 4 meet, and who has it?",
            (
                "rows_of_rank_1",
                (8, 9, 10, 11, 12, 13, 14, 15),
            ): "That is all of up and nothing of the gate. With what would rank 1 multiply it?",
            "calls": "Gate and up read the same x and are one product. How many f are needed in front of it?",
            ("calls", 3): "Two layers would need one f each. Fused, the gradient of x is summed once.",
            ("calls", 4): "The gate is multiplied with up on the same rank, without asking anybody.",
        },
    ),
    "5.c": Prediction(
        question="One training step on two ranks: how many all-reduces for the MLP and for the gradients of all "
        "parameters together, and how many bytes do they hold, in float64 with b = 128 and h = 256?",
        answer={"all_reduces": 2, "bytes": 524288},
        why="g forward, f backward: 2 · 128 · 256 · 8 bytes. The gradients need nothing: a shard's gradient belongs "
        "to one rank, and the replicated parameters get the same whole gradient on every rank, because f summed it "
        "for them.",
        wrong={
            "all_reduces": "Which ranks need which gradients? A shard's gradient is of no use to anybody else, and "
            "what does f do to the gradient that reaches the embedding?",
            ("all_reduces", 1): "One forward. And backward?",
            "bytes": "Each all-reduce has the size of x, [b, h]. How many of them, how many bytes a number?",
            ("bytes", 262144): "That is one of them, or both in float32.",
            ("bytes", 65536): "That is how many numbers the messages hold. How many bytes has a float64?",
        },
    ),
}

SYMPTOMS = [
    Symptom(
        see="The first loss is right, later ones are off a little; replica drift grows",
        cause="f is missing: each rank's replicated parameters get only its own part of the gradient",
        exercise="5.1",
    ),
    Symptom(
        see="Everything is right, but four collectives instead of two",
        cause="The inner activation is gathered and scattered again",
        exercise="5.1",
    ),
    Symptom(
        see="Output off by a few 1e-4, gradients too",
        cause="GELU by its tanh approximation on one side, exact GELU on the other",
        exercise="5.1",
    ),
    Symptom(
        see="The loss is already wrong at the first step, at every p > 1 and not at p = 1",
        cause="Row-parallel first: the activation is applied to partial sums. Or a bias that is added p times",
        exercise="5.1",
    ),
    Symptom(
        see="Training is fine, the checkpoint gives nonsense at another p",
        cause="The fused [gate; up] was cut contiguously: stride 1 instead of 2",
        exercise="5.3",
    ),
    Symptom(
        see="Loss curves of different p agree to 1e-5 in float32, to 1e-12 in float64, not exactly",
        cause="Nothing is wrong: sums are taken in another order",
    ),
    Symptom(
        see="Replica drift from the first step, before any update",
        cause="The replicated parameters did not start from the same numbers: another seed on each rank",
        exercise="5.4",
    ),
]
