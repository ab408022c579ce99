"""Chapter 04, exercises 4.3 to 4.5: the checks of cutting weights, of their first values, of loading and saving."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tplab.course.ch04_layers import GROUP_QUESTION, GROUPS, changed, differs, has_kind, make_group, member_of
from tplab.course.checking import (
    WORLD_SIZES,
    Question,
    Snapshot,
    Traffic,
    Verdict,
    exercise,
    fresh_generator,
    must_refuse,
    run_ranks,
    traffic,
    verify,
)
from tplab.course.observing import Observed
from tplab.runtime import device, record
from tplab.sharding import Sharding, shard

# 4.3: cut and glue

CONTIGUOUS = "the contiguous cut, which is right only for stride 1"
EVERY_PTH = "every p-th entry, taken one by one"
GLUED_CONTIGUOUS = "the shards simply put one after another"

CUT_QUESTIONS = (
    Question(
        changed,
        "The caller still needs the full tensor and the shards. Which line writes into one of them?",
    ),
    Question(
        has_kind("shard", CONTIGUOUS),
        "With `stride` blocks side by side a rank needs its piece of every block. Write the row numbers down "
        "for p = 2, stride = 2: which rows does rank 0 have now, and which should it have?",
    ),
    Question(
        has_kind("shard", EVERY_PTH),
        "A rank takes whole pieces: n / (p·stride) neighbouring entries of each block. Which entries did you "
        "take for p = 2, stride = 1?",
    ),
    Question(
        has_kind("shard", "other rank"),
        "The pieces are right, but a rank has the pieces of another. How does the number of a piece depend on "
        "the rank, and how on the block?",
    ),
    Question(
        differs("memory of the shard"),
        "How many bytes does the shard keep alive? A slice is a view of the full tensor, and `contiguous()` "
        "of a slice along dimension 0 is still that view. Which call always makes new memory?",
    ),
    Question(
        lambda d: (
            has_kind("shard", "shape", "whole", "part", "transposed")(d)
            or has_kind("unshard", "shape", "part", "transposed")(d)
        ),
        "Which dimension is cut, and by what is it divided? `dim` may be 0, 1 or -1, and the tensor may have "
        "more than two dimensions.",
    ),
    Question(
        has_kind("unshard", GLUED_CONTIGUOUS),
        "Glueing undoes cutting: the full tensor starts with all of block 0. Which pieces of which ranks make "
        "up block 0?",
    ),
    Question(
        lambda d: d.names == {"unshard"},
        "Cutting is right. To glue, cut each shard into its `stride` pieces first: in which order do the "
        "pieces of all ranks follow each other in the full tensor?",
    ),
)


@exercise("4.3", "Cut and glue")
def cut_and_glue(cut: Callable[..., Tensor], glue: Callable[..., Tensor]) -> Verdict:
    for p in WORLD_SIZES:
        for sizes, dim, stride in (
            ((16, 3), 0, 1),
            ((3, 16), 1, 1),
            ((24,), 0, 2),
            ((2, 24, 3), 1, 3),
            ((5, 24), -1, 2),
        ):
            full = torch.randn(sizes, generator=fresh_generator(), dtype=torch.float64)
            right = [shard(full, dim, rank, p, stride=stride) for rank in range(p)]
            n = full.shape[dim]
            order = torch.arange(n).reshape(stride, p, -1).transpose(0, 1).reshape(p, -1)  # [rank, entries]
            assert all(torch.equal(full.index_select(dim, order[rank]), right[rank]) for rank in range(p))
            before = Snapshot(
                **{"the full tensor": full}, **{f"the shard of rank {rank}": right[rank] for rank in range(p)}
            )
            shards = [cut(full, dim, rank, p, stride=stride) for rank in range(p)]
            glued = glue(list(right), dim, stride=stride)
            observed = [
                {
                    "shard": mine,
                    "memory of the shard": memory(mine, right[0]),
                    "unshard": glued,
                    "inputs unchanged": before.changed(),
                }
                for mine in shards
            ]
            expected = [{"shard": mine, "memory of the shard": "its own", "unshard": full} for mine in right]
            alike: dict[str, dict[str, list[Tensor]]] = {"shard": {}, "unshard": {}}
            if p > 1:
                alike["shard"][EVERY_PTH] = [full.movedim(dim, 0)[rank::p].movedim(0, dim) for rank in range(p)]
            if p > 1 and stride > 1:
                alike["shard"][CONTIGUOUS] = list(full.chunk(p, dim))
                alike["unshard"][GLUED_CONTIGUOUS] = [torch.cat(right, dim)] * p
            note = f"a tensor {list(sizes)}, dim = {dim}, stride = {stride}"
            verify("4.3", p, observed, expected, questions=CUT_QUESTIONS, lookalikes=alike, note=note)
    must_refuse(
        "4.3",
        lambda: cut(torch.zeros(8, 3), 0, 0, 4, stride=3),
        "8 rows can't be 3 blocks of 4 equal pieces each. What does `chunk` do with them, and who would notice? "
        "Raise ValueError and name the numbers.",
        says=(8, 3, 4),
        what="8 rows cut into 3 blocks for 4 ranks",
    )
    must_refuse(
        "4.3",
        lambda: cut(torch.zeros(6, 3), 0, 0, 4),
        "6 rows can't be cut into 4 equal pieces: `chunk` gives three pieces of 2 without a word, and the "
        "last rank gets "
        "none. Raise ValueError and name the numbers.",
        says=(6, 4),
        what="6 rows cut for 4 ranks",
    )
    return Verdict("unshard undoes shard, for every dimension and every number of fused blocks.")


def memory(mine: Any, right: Tensor) -> str:
    """Whether a shard keeps more alive than itself."""
    if not isinstance(mine, Tensor):
        return "none"
    kept, needed = mine.untyped_storage().nbytes(), mine.numel() * mine.element_size()
    return "its own" if kept <= needed else f"{kept} bytes kept alive for a shard of {needed}"


# 4.4: init from a master weight


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


# 4.5: load and save


class SmallModel(nn.Module):
    """Parameters cut in every way that there is, and one replicated, in a module inside a module."""

    shapes: Mapping[str, tuple[tuple[int, ...], Sharding | None]] = {
        "norm": ((6,), None),
        "column.weight": ((8, 6), Sharding(0)),
        "column.bias": ((8,), Sharding(0)),
        "fused.weight": ((24, 5), Sharding(0, 3)),
        "row.weight": ((5, 8), Sharding(1)),
        "row.bias": ((5,), None),
    }

    def __init__(self, q: int) -> None:
        super().__init__()
        for name, (sizes, sharding) in self.shapes.items():
            mine = [size // q if sharding and dim == sharding.dim else size for dim, size in enumerate(sizes)]
            param = nn.Parameter(torch.full(mine, UNTOUCHED, dtype=torch.float64, device=device()))
            if sharding:
                param.tensor_parallel = sharding  # type: ignore[attr-defined]
            module: nn.Module = self
            *path, last = name.split(".")
            for step in path:
                if step not in module._modules:
                    module.add_module(step, nn.Module())
                module = module._modules[step]  # type: ignore[assignment]
            module.register_parameter(last, param)


def load_and_save(
    load: Callable[..., Any],
    save: Callable[..., Any],
    full: Mapping[str, Tensor],
    other: Sequence[Mapping[str, Tensor]],
    groups: Sequence[Sequence[int]] | None,
) -> list[Observed]:
    """On a rank: what load does to one model, and what save returns for another that was filled by hand."""
    group = make_group(groups)
    q = dist.get_world_size(group)
    mine = other[dist.get_rank()]
    return [see_loading(load, SmallModel(q), full, group), see_saving(save, SmallModel(q), mine, group)]


def see_loading(load: Callable[..., Any], model: nn.Module, full: Mapping[str, Tensor], group: Any) -> Observed:
    full = {name: value.to(device()) for name, value in full.items()}
    identity = {name: (id(param), param.data_ptr()) for name, param in model.named_parameters()}
    snapshot = Snapshot(**{f"full_state[{name!r}]": value for name, value in full.items()})
    with record() as section:
        load(model, dict(full), group)
    params = dict(model.named_parameters())
    seen: Observed = {name: param.detach().clone() for name, param in params.items()}
    kept = all(identity[name] == (id(param), param.data_ptr()) for name, param in params.items())
    seen["the parameters"] = "filled in place" if kept else "replaced"
    seen["still sharded"] = str([name for name, param in params.items() if hasattr(param, "tensor_parallel")])
    seen["need a gradient"] = str(all(param.requires_grad for param in params.values()))
    seen["traffic"] = traffic(section)
    with torch.no_grad():  # training goes on: does it change the dictionary?
        for param in params.values():
            param.add_(1.0)
    seen["inputs unchanged"] = snapshot.changed()
    return seen


def see_saving(save: Callable[..., Any], model: nn.Module, mine: Mapping[str, Tensor], group: Any) -> Observed:
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(mine[name])
    snapshot = Snapshot(**dict(model.named_parameters()))
    with record() as section:
        state = save(model, group)
    if not isinstance(state, dict):
        return {"the result": type(state).__name__, "traffic": traffic(section)}
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    seen: Observed = {"the result": "dict", **{name: value.detach().clone() for name, value in state.items()}}
    seen["names"] = str(sorted(state))
    seen["with autograd history"] = str([name for name, value in tensors.items() if value.requires_grad])
    seen["traffic"] = traffic(section)
    seen["inputs unchanged"] = snapshot.changed()
    copies = {name: value.detach().clone() for name, value in tensors.items()}
    with torch.no_grad():  # training goes on: does it change the checkpoint?
        for param in model.parameters():
            param.add_(1.0)
    aliased = [name for name, value in tensors.items() if not torch.equal(value, copies[name])]
    seen["changed by training on"] = str(aliased)
    return seen


FULL_TENSOR = "the whole tensor, where one copy is enough"
GLUED = "the shards put one after another along dimension 0"

LOAD_QUESTIONS = (
    Question(
        changed,
        "After loading, training goes on, and the dictionary changed with it. Is the parameter a copy, or "
        "does it share memory with the dictionary?",
    ),
    Question(
        lambda d: bool({"the parameters", "still sharded", "need a gradient"} & d.names),
        "The optimizer holds on to the parameter objects, and the attribute `tensor_parallel` sits on them. "
        "How do you change the numbers in a parameter without making a new one?",
    ),
    Question(differs("traffic"), "Every rank has the whole dictionary already. What is there to communicate?"),
    Question(
        lambda d: d.names == {"fused.weight"},
        "Only the fused weight is wrong. What does its `tensor_parallel` say beside the dimension?",
    ),
    Question(
        has_kind("column.weight", "other rank"),
        "A rank got the shard of another rank. Whose number decides, also inside a group?",
    ),
    Question(
        lambda d: UNCHANGED in d.kinds(),
        "Some parameters kept their old values. Which ones does your loop leave out, and why?",
    ),
)

SAVE_QUESTIONS = (
    Question(
        changed,
        "Saving changed the model. Which line writes into a parameter?",
    ),
    Question(differs("the result"), "What does the function return, on every rank?"),
    Question(
        differs("names"),
        "Which names does the full state dict of one process have? Every parameter, once, under the name that "
        "`named_parameters` gives it.",
    ),
    Question(
        differs("with autograd history"),
        "A checkpoint needs no gradients. Which call cuts a tensor off from autograd?",
    ),
    Question(
        differs("changed by training on"),
        "The dictionary changed when training went on, so it shares memory with the parameters. Which values "
        "did you not copy? Think of the replicated ones, and of p = 1.",
    ),
    Question(
        lambda d: has_kind("row.bias", "shape", "whole")(d) or has_kind("norm", "shape", "whole")(d),
        "A replicated parameter is whole on every rank already. What happens if its p copies are glued together?",
    ),
    Question(
        lambda d: has_kind("row.bias", "p times")(d) or has_kind("norm", "p times")(d),
        "A replicated parameter is whole on every rank already. Why add up its copies?",
    ),
    Question(
        lambda d: d.names == {"fused.weight"},
        "Only the fused weight is wrong: its shards were glued one after another. What does its "
        "`tensor_parallel` say beside the dimension?",
    ),
    Question(
        has_kind("row.weight", "shape", GLUED),
        "The row-parallel weight was cut along dimension 1. Along which dimension did you glue it?",
    ),
    Question(
        lambda d: bool(d.names) and d.names <= {"traffic"},
        "The numbers are right, the communication is not. One all-gather for each sharded parameter is "
        "enough, and a replicated one needs none.",
    ),
    Question(
        has_kind("column.weight", "part", "shape"),
        "Each rank has only its own shard. How does it get those of the others?",
    ),
)

LOAD_CRASH = (
    "Which parameter was it, and which two shapes met? A replicated parameter has no `tensor_parallel`, and a "
    "parameter that requires a gradient may be changed in place only under `torch.no_grad()`."
)


@exercise("4.5", "Load and save")
def load_and_save_full(load: Callable[..., Any], save: Callable[..., Any]) -> Verdict:
    names = list(SmallModel.shapes)
    sharded = [name for name in names if SmallModel.shapes[name][1]]
    for p in WORLD_SIZES:
        for groups in (None, GROUPS) if p == 4 else (None,):
            generator = fresh_generator()
            full = random_state(generator)
            to_save = [random_state(generator) for _ in groups or (0,)]  # each group has a model of its own
            saved, filled = [], []
            loaded: list[dict[str, Any]] = []
            for rank, (number, ranks) in enumerate(member_of(p, groups)):
                index, q = ranks.index(rank), len(ranks)
                cut = {name: part_of(value, name, index, q) for name, value in full.items()}
                filled.append({name: part_of(value, name, index, q) for name, value in to_save[number].items()})
                loaded.append(
                    cut
                    | {
                        "the parameters": "filled in place",
                        "still sharded": str(sharded),
                        "need a gradient": "True",
                        "traffic": Traffic(),
                    }
                )
                gathers = [("all_gather", full[name].numel()) for name in sharded]
                saved.append(
                    {"the result": "dict", "names": str(sorted(names))}
                    | to_save[number]
                    | {
                        "with autograd history": "[]",
                        "changed by training on": "[]",
                        "traffic": Traffic.expected(p, *gathers, group=ranks),
                    }
                )
            seen = run_ranks(load_and_save, p, load, save, full, filled, groups, question=LOAD_CRASH)
            where = ", in groups [0, 2] and [1, 3]" if groups else ""
            first = [GROUP_QUESTION] if groups else []
            untouched = {name: {UNCHANGED: [torch.full_like(row[name], UNTOUCHED) for row in loaded]} for name in names}
            verify(
                "4.5",
                p,
                [rank[0] for rank in seen],
                loaded,
                questions=[*first, *LOAD_QUESTIONS],
                lookalikes=untouched,
                note="loading" + where,
            )
            glued = {
                name: {GLUED: [torch.cat([filled[r][name] for r in ranks]) for _, ranks in member_of(p, groups)]}
                for name in sharded
                if p > 1
            }
            verify(
                "4.5",
                p,
                [rank[1] for rank in seen],
                saved,
                questions=[*first, *SAVE_QUESTIONS],
                lookalikes=glued,
                note="saving" + where,
            )
    return Verdict("A checkpoint written at any p can be read at any other.")


def random_state(generator: torch.Generator) -> dict[str, Tensor]:
    shapes = SmallModel.shapes.items()
    return {name: torch.randn(sizes, generator=generator, dtype=torch.float64) for name, (sizes, _) in shapes}


def part_of(value: Tensor, name: str, index: int, q: int) -> Tensor:
    sharding = SmallModel.shapes[name][1]
    return value if sharding is None else shard(value, sharding.dim, index, q, stride=sharding.stride)
