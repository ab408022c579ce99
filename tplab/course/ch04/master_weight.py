"""The check of exercise 4.4: the first values of a shard, cut from a master weight of the full shape."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tplab.course.checking import (
    WORLD_SIZES,
    Observed,
    Question,
    Traffic,
    Verdict,
    exercise,
    fresh_generator,
    run_ranks,
    traffic,
    verify,
)
from tplab.course.scenes import GROUP_QUESTION, GROUPS, differs, has_kind, make_group, member_of
from tplab.runtime import record
from tplab.sharding import Sharding, shard


@dataclass(frozen=True)
class InitCase:
    """A layer's weight [o, i] and how it is cut."""

    full_shape: tuple[int, int]
    dim: int
    stride: int
    init_method: Callable[[Tensor], Any]


INIT_CASES = (
    InitCase((8, 6), 0, 1, nn.init.xavier_normal_),
    InitCase((4, 12), 1, 1, nn.init.kaiming_uniform_),
    InitCase((24, 4), 0, 3, nn.init.xavier_uniform_),
)

UNTOUCHED = 7.0
UNCHANGED = "the value from before, untouched"
NAMES = ("first weight", "second weight", "third weight")


def draw_weights(init: Callable[..., Any], seed: int, groups: Sequence[Sequence[int]] | None) -> Observed:
    """On a rank: three weights, one after the other, from one seed, on the CPU."""
    group = make_group(groups)
    q = dist.get_world_size(group)
    params = []
    for case in INIT_CASES:
        sizes = [size // q if dim == case.dim else size for dim, size in enumerate(case.full_shape)]
        param = nn.Parameter(torch.full(sizes, UNTOUCHED, dtype=torch.float64))
        param.tensor_parallel = Sharding(case.dim, case.stride)  # type: ignore[attr-defined]
        params.append(param)
    before = [param.data_ptr() for param in params]
    torch.manual_seed(seed)
    with record() as section:
        for param, case in zip(params, INIT_CASES, strict=True):
            init(param, case.full_shape, case.init_method, group)
    seen: Observed = {name: param.detach().clone() for name, param in zip(NAMES, params, strict=True)}
    seen["the next random number"] = torch.rand(4, dtype=torch.float64)
    seen["the parameter"] = (
        "filled in place" if before == [param.data_ptr() for param in params] else "memory was replaced"
    )
    seen["needs a gradient"] = str(all(param.requires_grad and param.is_leaf for param in params))
    seen["traffic"] = traffic(section)
    return seen


INIT_QUESTIONS = (
    Question(
        has_kind("first weight", UNCHANGED),
        "The parameter still has its old values. Does your function change `param` itself, or a new tensor "
        "that nobody keeps?",
    ),
    Question(
        lambda d: bool(d.names) and d.names <= {"traffic"},
        "The numbers are right, but they came over the wire. Every rank has the same seed: what does it need "
        "the others for?",
    ),
    Question(
        differs("the parameter"),
        "The optimizer and the module hold on to this parameter's memory. How do you change the numbers "
        "without replacing the memory? And what does a view of the master keep alive?",
    ),
    Question(differs("needs a gradient"), "Is `param` still a leaf that requires a gradient? Which line changed that?"),
    Question(
        has_kind("first weight", "drawn at the shape of the shard"),
        "The numbers were drawn at the shape of the shard: xavier then takes its standard deviation from the "
        "wrong shape, and all ranks draw the same numbers. At which shape must they be drawn?",
    ),
    Question(
        has_kind("first weight", "other rank"),
        "A rank has the numbers of another rank. Which argument decides which piece is taken?",
    ),
    Question(
        lambda d: "third weight" in d.names and not d.names & {"first weight", "second weight"},
        "Only the fused weight is wrong. What does `param.tensor_parallel` say about it beside the dimension?",
    ),
    Question(
        lambda d: "second weight" in d.names and "first weight" not in d.names,
        "The first weight is right, a later one is not. Did you use each parameter's own dimension? And did "
        "you set a seed, so that the second weight starts again with the same random numbers as the first?",
    ),
    Question(
        lambda d: "the next random number" in d.names and d.names <= {"the next random number", "traffic"},
        "The weights are right, but afterwards the random generator is not where one process would have it. "
        "How many numbers did this rank draw, and did somebody set a seed?",
    ),
    Question(
        lambda d: "first weight" in d.names,
        "One process would call `init_method` once, on a tensor of the full shape with the parameter's dtype, "
        "from the seed that the caller set. Which of these is different in your function?",
    ),
)


@exercise("4.4", "Init from a master weight")
def init_from_a_master(init: Callable[..., Any]) -> Verdict:
    for p in WORLD_SIZES:
        for groups in (None, GROUPS) if p == 4 else (None,):
            seed = int(torch.randint(10**6, (), generator=fresh_generator()))
            masters, direct, next_number = draw_on_one_process(seed, p)
            expected = []
            alike: dict[str, dict[str, list[Tensor]]] = {name: {UNCHANGED: []} for name in NAMES}
            alike["first weight"]["drawn at the shape of the shard"] = []
            for rank, (_, ranks) in enumerate(member_of(p, groups)):
                cut = [
                    shard(master, case.dim, ranks.index(rank), len(ranks), stride=case.stride)
                    for master, case in zip(masters, INIT_CASES, strict=True)
                ]
                expected.append(
                    {
                        **dict(zip(NAMES, cut, strict=True)),
                        "the next random number": next_number,
                        "the parameter": "filled in place",
                        "needs a gradient": "True",
                        "traffic": Traffic(),
                    }
                )
                for name, value in zip(NAMES, cut, strict=True):
                    alike[name][UNCHANGED].append(torch.full_like(value, UNTOUCHED))
                alike["first weight"]["drawn at the shape of the shard"].append(direct)
            if p == 1:
                del alike["first weight"]["drawn at the shape of the shard"]
            seen = run_ranks(draw_weights, p, init, seed, groups, question=INIT_CRASH)
            questions = [GROUP_QUESTION, *INIT_QUESTIONS] if groups else INIT_QUESTIONS
            note = "in groups [0, 2] and [1, 3]" if groups else ""
            verify("4.4", p, seen, expected, questions=questions, lookalikes=alike, note=note)
    return Verdict(
        "The model starts from the same point for every p, and the random generator ends where one process leaves it."
    )


INIT_CRASH = (
    "A parameter that requires a gradient may be changed in place only under `torch.no_grad()`. And does the "
    "shape of what you copy fit the shard?"
)


def draw_on_one_process(seed: int, p: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """The three full weights, the first one as drawn at its shard's shape, and the random numbers that come after."""
    with torch.random.fork_rng(devices=[]):
        first = INIT_CASES[0]
        direct = torch.empty(first.full_shape[0] // p, first.full_shape[1], dtype=torch.float64)
        torch.manual_seed(seed)
        first.init_method(direct)
        torch.manual_seed(seed)
        masters = [torch.empty(case.full_shape, dtype=torch.float64) for case in INIT_CASES]
        for master, case in zip(masters, INIT_CASES, strict=True):
            case.init_method(master)
        return masters, direct, torch.rand(4, dtype=torch.float64)
