"""The check of exercise 4.5: load a full checkpoint into shards, and save one from them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tplab.course.chapters.ch04.full_state_questions import (
    COPIED,
    DETACHED,
    GLUED,
    IN_PLACE,
    IS_DICT,
    LOAD_CRASH,
    LOAD_QUESTIONS,
    SAVE_QUESTIONS,
    STILL_SHARDED,
    TRAINABLE,
    WHOSE_GROUP,
)
from tplab.course.chapters.ch04.master_weight import UNCHANGED, UNTOUCHED
from tplab.course.checks import (
    GROUPS,
    IN_GROUPS,
    WORLD_SIZES,
    Claim,
    Observed,
    Snapshot,
    Traffic,
    Verdict,
    ask_about_group,
    exercise,
    fresh_generator,
    group_question,
    make_group,
    member_of,
    run_ranks,
    traffic,
    verify,
)
from tplab.runtime import device, record
from tplab.tensor.sharding import Sharding, shard


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
    lost = [
        name for name, (_, cut) in SmallModel.shapes.items() if cut and not hasattr(params[name], "tensor_parallel")
    ]
    frozen = [name for name, param in params.items() if not param.requires_grad]
    seen[IN_PLACE] = Claim("" if kept else "some were replaced")
    seen[STILL_SHARDED] = Claim(", ".join(lost) and f"lost by {', '.join(lost)}")
    seen[TRAINABLE] = Claim(", ".join(frozen) and f"not {', '.join(frozen)}")
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
        return {IS_DICT: Claim(f"it is {type(state).__name__}"), "traffic": traffic(section)}
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    seen: Observed = {IS_DICT: Claim(""), **{name: value.detach().clone() for name, value in state.items()}}
    tracked = [name for name, value in tensors.items() if value.requires_grad]
    seen["names"] = str(sorted(state))
    seen[DETACHED] = Claim(", ".join(tracked) and f"not {', '.join(tracked)}")
    seen["traffic"] = traffic(section)
    seen["inputs unchanged"] = snapshot.changed()
    copies = {name: value.detach().clone() for name, value in tensors.items()}
    with torch.no_grad():  # training goes on: does it change the checkpoint?
        for param in model.parameters():
            param.add_(1.0)
    aliased = [name for name, value in tensors.items() if not torch.equal(value, copies[name])]
    seen[COPIED] = Claim(", ".join(aliased) and f"{', '.join(aliased)} changed when the parameters did")
    return seen


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
                loaded.append(cut | {"traffic": Traffic()})
                gathers = [("all_gather", full[name].numel()) for name in sharded]
                sent = Traffic.expected(p, *gathers, group=ranks)
                saved.append({"names": str(sorted(names))} | to_save[number] | {"traffic": sent})
            where = f", {IN_GROUPS}" if groups else ""
            whose = ask_about_group(WHOSE_GROUP) if groups else None
            note = "loading and saving" + where
            given = (load, save, full, filled, groups)
            seen = run_ranks(load_and_save, p, *given, question=whose or LOAD_CRASH, stuck=whose, note=note)
            first = [group_question(WHOSE_GROUP)] if groups else []
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
