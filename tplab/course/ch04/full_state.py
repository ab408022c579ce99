"""The check of exercise 4.5: load a full checkpoint into shards, and save one from them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tplab.course.ch04.master_weight import UNCHANGED, UNTOUCHED
from tplab.course.checking import (
    WORLD_SIZES,
    Observed,
    Question,
    Snapshot,
    Traffic,
    Verdict,
    exercise,
    fresh_generator,
    run_ranks,
    traffic,
    verify,
)
from tplab.course.scenes import GROUP_QUESTION, GROUPS, changed, differs, has_kind, make_group, member_of
from tplab.runtime import device, record
from tplab.sharding import Sharding, shard


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
