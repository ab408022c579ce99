"""The check of exercise 4.4: the first values of a shard, cut from a master weight of the full shape."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tplab.course.checks import (
    GROUPS,
    IN_GROUPS,
    WORLD_SIZES,
    Claim,
    Observed,
    Question,
    Traffic,
    Verdict,
    ask_about_group,
    called_as,
    differs,
    exercise,
    fresh_generator,
    group_question,
    has_kind,
    make_group,
    member_of,
    run_ranks,
    traffic,
    verify,
)
from tplab.runtime import record
from tplab.tensor.sharding import Sharding, shard


@dataclass(frozen=True)
class InitCase:
    """A layer's weight [o, i] and how it is cut."""

    full_shape: tuple[int, int]
    dim: int
    stride: int
    init_method: Callable[[Tensor], Any]

    def call(self, param: Tensor) -> str:
        """How the learner's function is called: "init_from_master(param [4, 6], (8, 6), xavier_normal_, group)"."""
        method = getattr(self.init_method, "__name__", "init_method")
        param_text = f"param {list(param.shape)} with {Sharding(self.dim, self.stride)}"
        return f"init_from_master({param_text}, {self.full_shape}, {method}, group)"


INIT_CASES = (
    InitCase((8, 6), 0, 1, nn.init.xavier_normal_),
    InitCase((4, 12), 1, 1, nn.init.kaiming_uniform_),
    InitCase((24, 4), 0, 3, nn.init.xavier_uniform_),
)

UNTOUCHED = 7.0
UNCHANGED = "the value from before, untouched"
NAMES = ("first weight", "second weight", "third weight")
IN_PLACE = "the parameters are filled in place"
TRAINABLE = "the parameters are leaves that need a gradient"
FLOAT32 = "the shard of a master that was drawn in float32"
AT_SHARD_SHAPE = "drawn at the shape of the shard"


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
            with called_as(case.call(param)):
                init(param, case.full_shape, case.init_method, group)
    seen: Observed = {name: param.detach().clone() for name, param in zip(NAMES, params, strict=True)}
    seen["the next random number"] = torch.rand(4, dtype=torch.float64)
    kept = before == [param.data_ptr() for param in params]
    seen[IN_PLACE] = Claim("" if kept else "the memory of one was replaced")
    trainable = all(param.requires_grad and param.is_leaf for param in params)
    seen[TRAINABLE] = Claim("" if trainable else "one of them is not")
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
        differs(IN_PLACE),
        "The optimizer and the module hold on to this parameter's memory. How do you change the numbers "
        "without replacing the memory? And what does a view of the master keep alive?",
    ),
    Question(differs(TRAINABLE), "Is `param` still a leaf that requires a gradient? Which line changed that?"),
    Question(
        has_kind("first weight", FLOAT32),
        "The parameters are float64 here. Which dtype has a tensor that `torch.empty` makes when it is told only a "
        "shape, and which one must the master have, so that the numbers are those of one process?",
    ),
    Question(
        has_kind("first weight", AT_SHARD_SHAPE),
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
            masters, direct, single, next_number = draw_on_one_process(seed, p)
            expected = []
            alike: dict[str, dict[str, list[Tensor]]] = {name: {UNCHANGED: []} for name in NAMES}
            alike["first weight"] |= {FLOAT32: [], AT_SHARD_SHAPE: []}
            for rank, (_, ranks) in enumerate(member_of(p, groups)):
                cut = [
                    shard(master, case.dim, ranks.index(rank), len(ranks), stride=case.stride)
                    for master, case in zip(masters, INIT_CASES, strict=True)
                ]
                expected.append(
                    {
                        **dict(zip(NAMES, cut, strict=True)),
                        "the next random number": next_number,
                        "traffic": Traffic(),
                    }
                )
                for name, value in zip(NAMES, cut, strict=True):
                    alike[name][UNCHANGED].append(torch.full_like(value, UNTOUCHED))
                alike["first weight"][AT_SHARD_SHAPE].append(direct)
                alike["first weight"][FLOAT32].append(shard(single, INIT_CASES[0].dim, ranks.index(rank), len(ranks)))
            if p == 1:
                del alike["first weight"][AT_SHARD_SHAPE]
            note = f"float64 parameters{f', {IN_GROUPS}' if groups else ''}"
            whose = ask_about_group(WHOSE_RANK) if groups else None
            crash = whose or INIT_CRASH
            seen = run_ranks(draw_weights, p, init, seed, groups, question=crash, stuck=whose, note=note)
            questions = [group_question(WHOSE_RANK), *INIT_QUESTIONS] if groups else INIT_QUESTIONS
            verify("4.4", p, seen, expected, questions=questions, lookalikes=alike, note=note)
    return Verdict(
        "The model starts from the same point for every p, and the random generator ends where one process leaves it."
    )


WHOSE_RANK = (
    "Whose rank and whose size did you take: those of the default group of all ranks, or those of `group`? Which call "
    "was not given it?"
)
INIT_CRASH = (
    "A parameter that requires a gradient may be changed in place only under `torch.no_grad()`. And does the "
    "shape of what you copy fit the shard?"
)


def draw_on_one_process(seed: int, p: int) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """The three full weights, the first one as drawn at its shard's shape and in float32, and the numbers after."""
    with torch.random.fork_rng(devices=[]):
        first = INIT_CASES[0]
        direct = torch.empty(first.full_shape[0] // p, first.full_shape[1], dtype=torch.float64)
        torch.manual_seed(seed)
        first.init_method(direct)
        single = torch.empty(first.full_shape, dtype=torch.float32)
        torch.manual_seed(seed)
        first.init_method(single)
        torch.manual_seed(seed)
        masters = [torch.empty(case.full_shape, dtype=torch.float64) for case in INIT_CASES]
        for master, case in zip(masters, INIT_CASES, strict=True):
            case.init_method(master)
        return masters, direct, single.double(), torch.rand(4, dtype=torch.float64)
