"""The check for exercise 4.5, in which a sharded model loads and saves a full checkpoint.

On two ranks, the check also runs a variant of the case (a twin). In this variant, the check calls both functions on a
second model, too, before and after the calls that it observes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tplab.course import checks
from tplab.course.exercises.ch04.master_weight import UNCHANGED, UNTOUCHED
from tplab.runtime import device, record
from tplab.tensor.sharding import Sharding, shard

COMPLETE = "a name that's missing from full_state raises an error"
IN_PLACE = "the parameters are filled in place"
STILL_SHARDED = "the shards keep their attribute tensor_parallel"
TRAINABLE = "each parameter still requires a gradient if it did before"
IS_DICT = "the result is a dict"
NAMES = "the result has each parameter once, and nothing else"
DETACHED = "the saved tensors are detached from autograd"
COPIED = "the saved tensors don't change when training continues"
GLUED = "the shards, concatenated along dimension 0"


DEEP, FROZEN, TRANSPOSED = "block.part.weight", "block.part.frozen", "row.weight"


class SmallModel(nn.Module):
    """A model with replicated parameters and parameters that are sharded in various ways.

    Some parameters belong to nested modules. One parameter is frozen. On every other rank, another parameter is
    transposed in memory, so it isn't contiguous. The model also has a buffer and a second name for one of the
    parameters, and a checkpoint should skip both.
    """

    shapes: Mapping[str, tuple[tuple[int, ...], Sharding | None]] = {
        "norm": ((6,), None),
        "column.weight": ((8, 6), Sharding(0)),
        "column.bias": ((8,), Sharding(0)),
        "fused.weight": ((24, 5), Sharding(0, 3)),
        "fused.bias": ((24,), Sharding(0, 3)),
        "row.weight": ((5, 8), Sharding(1)),
        "row.bias": ((5,), None),
        "block.part.weight": ((3, 5, 8), Sharding(-1)),
        "block.part.frozen": ((8, 3), Sharding(0)),
    }
    dtypes: Mapping[str, torch.dtype] = {
        "norm": torch.float32,
        "column.bias": torch.float32,
        "row.weight": torch.bfloat16,
    }

    def __init__(self, q: int) -> None:
        super().__init__()
        for name, (sizes, sharding) in self.shapes.items():
            mine = list(sizes)
            if sharding:
                mine[sharding.dim] //= q
            filled = torch.full(mine, UNTOUCHED, dtype=dtype_of(name), device=device())
            if name == TRANSPOSED and dist.get_rank() % 2 == 0:
                filled = filled.t().contiguous().t()
            param = nn.Parameter(filled, requires_grad=name != FROZEN)
            if sharding:
                param.tensor_parallel = sharding  # type: ignore[attr-defined]
            module: nn.Module = self
            *path, last = name.split(".")
            for step in path:
                if step not in module._modules:
                    module.add_module(step, nn.Module())
                module = module._modules[step]  # type: ignore[assignment]
            module.register_parameter(last, param)
        self.register_buffer("mask", torch.ones(4, device=device()))
        self.head = nn.Module()
        self.head.register_parameter("weight", self.get_parameter("column.weight"))


def load_and_save(
    load: Callable[..., Any],
    save: Callable[..., Any],
    full: Mapping[str, Tensor],
    other: Sequence[Mapping[str, Tensor]],
    groups: Sequence[Sequence[int]] | None,
    twin: checks.Twin | None,
) -> list[checks.Observed]:
    """On every rank, run `load` on one model and `save` on another model, and return the observations of both runs."""
    group = checks.make_group(groups)
    q = dist.get_world_size(group)
    mine = other[dist.get_rank()]
    between = SmallModel(q) if twin is checks.Twin.BETWEEN else None
    full = {name: value.to(device()) for name, value in full.items()}
    return [
        see_loading(load, SmallModel(q), full, group, between),
        see_saving(save, SmallModel(q), mine, group, between),
    ]


def see_loading(
    load: Callable[..., Any], model: nn.Module, full: Mapping[str, Tensor], group: Any, between: nn.Module | None
) -> checks.Observed:
    """Load the full state into the model, and observe what `load` did.

    If there's a second model (`between`), first load other values into both models. At the end, load these other values
    into the second model again.
    """
    other = {name: value.flip(-1) * -0.75 for name, value in full.items()}
    for each in (model, between) if between else ():
        load(each, other, group)
    identity = {name: (id(param), param.data_ptr()) for name, param in model.named_parameters()}
    given = dict(full)
    snapshot = checks.Snapshot(full_state=given, **{f"full_state[{name!r}]": value for name, value in full.items()})
    with record() as section, checks.DefaultDevice() as watch:
        load(model, given, group)
    if between:
        load(between, other, group)
    params = dict(model.named_parameters())
    seen: checks.Observed = {name: param.detach().clone() for name, param in params.items()}
    kept = all(identity[name] == (id(param), param.data_ptr()) for name, param in params.items())
    lost = [
        name for name, (_, cut) in SmallModel.shapes.items() if cut and not hasattr(params[name], "tensor_parallel")
    ]
    flagged = [name for name, param in params.items() if param.requires_grad != (name != FROZEN)]
    seen[IN_PLACE] = checks.Claim("" if kept else "some were replaced")
    seen[STILL_SHARDED] = checks.Claim(", ".join(lost) and f"lost by {', '.join(lost)}")
    seen[TRAINABLE] = checks.Claim(", ".join(flagged) and f"not {', '.join(flagged)}")
    seen["traffic"] = checks.traffic(section)
    with torch.no_grad():  # as if training continued, which shouldn't change the dictionary
        for param in params.values():
            param.add_(1.0)
    seen["inputs unchanged"] = snapshot.changed()
    incomplete = {name: value for name, value in full.items() if name != next(iter(full))}
    try:
        load(model, incomplete, group)
    except Exception:
        seen[COMPLETE] = checks.Claim("")
    else:
        seen[COMPLETE] = checks.Claim(f"nothing was raised for {next(iter(full))}")
    return seen | watch.claims({})


def see_saving(
    save: Callable[..., Any], model: nn.Module, mine: Mapping[str, Tensor], group: Any, between: nn.Module | None
) -> checks.Observed:
    """Copy the shards `mine` into the model's parameters, save the model, and observe what `save` did.

    If there's a second model (`between`), save both models before any values are copied into the first one. At the end,
    save the second model again.
    """
    for each in (model, between) if between else ():
        save(each, group)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(mine[name])
    snapshot = checks.Snapshot(**dict(model.named_parameters()))
    with record() as section, checks.DefaultDevice() as watch:
        state = save(model, group)
    if between:
        save(between, group)
    if not isinstance(state, dict):
        return {IS_DICT: checks.Claim(f"it is {type(state).__name__}"), "traffic": checks.traffic(section)}
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    seen: checks.Observed = {
        IS_DICT: checks.Claim(""),
        **{name: value.detach().clone() for name, value in state.items()},
    }
    tracked = [name for name, value in tensors.items() if value.requires_grad]
    missing = [name for name in SmallModel.shapes if name not in state]
    more = [str(name) for name in state if name not in SmallModel.shapes]
    seen[NAMES] = checks.Claim(
        "; ".join(f"{what} {', '.join(names)}" for what, names in (("not", missing), ("also", more)) if names)
    )
    seen[DETACHED] = checks.Claim(", ".join(tracked) and f"not {', '.join(tracked)}")
    seen["traffic"] = checks.traffic(section)
    seen["inputs unchanged"] = snapshot.changed()
    copies = {name: value.detach().clone() for name, value in tensors.items()}
    with torch.no_grad():  # as if training continued, which shouldn't change the checkpoint
        for param in model.parameters():
            param.add_(1.0)
    aliased = [name for name, value in tensors.items() if not torch.equal(value, copies[name])]
    seen[COPIED] = checks.Claim(", ".join(aliased) and f"{', '.join(aliased)} changed when the parameters did")
    return seen | watch.claims({"state": state})


@checks.exercise("4.5", "Load and save")
def load_and_save_full(load: Callable[..., Any], save: Callable[..., Any]) -> checks.Verdict:
    for p in checks.WORLD_SIZES:
        for groups in (None, checks.GROUPS) if p == 4 else (None,):
            check_load_and_save(load, save, p, groups)
    check_load_and_save(load, save, checks.twins.WORLD_SIZE, None, checks.Twin.BETWEEN)
    return checks.Verdict("A checkpoint saved on any number of ranks can be loaded on any other number of ranks.")


def check_load_and_save(
    load: Callable[..., Any],
    save: Callable[..., Any],
    p: int,
    groups: Sequence[Sequence[int]] | None,
    twin: checks.Twin | None = None,
) -> None:
    """Run both functions in one launch. Then check the observations of `load` first, and those of `save` second."""
    generator = checks.fresh_generator()
    to_load = random_state(generator)
    to_save = [random_state(generator) for _ in groups or (0,)]  # each group saves a different model
    members = checks.member_of(p, groups)
    places = [checks.Place(ranks.index(rank), ranks, p) for rank, (_, ranks) in enumerate(members)]
    loaded = [shards_of(to_load, place) for place in places]
    filled = [shards_of(to_save[number], place) for (number, _), place in zip(members, places, strict=True)]
    where = f", {checks.IN_GROUPS}" if groups else f" {checks.twins.note(twin)}" if twin else ""
    whose = checks.ask_about_group(WHOSE_GROUP) if groups else checks.twins.question(twin) if twin else None
    first = [checks.group_question(WHOSE_GROUP)] if groups else checks.twins.asked_first(twin)
    try:
        seen = checks.run_ranks(
            load_and_save, p, load, save, to_load, filled, groups, twin,
            question=whose or LOAD_CRASH, stuck=whose, note="loading and saving" + where,
        )  # fmt: skip
    except checks.CheckFailed as failure:
        about_layouts = "with strides" in failure.report or "contiguous" in failure.report
        failure.question = CONTIGUOUS if about_layouts else failure.question
        raise

    untouched = {
        name: {UNCHANGED: [torch.full_like(mine[name], UNTOUCHED) for mine in loaded]} for name in SmallModel.shapes
    }
    checks.verify(
        "4.5", p, [rank[0] for rank in seen], [mine | {"traffic": checks.Traffic()} for mine in loaded],
        questions=[*first, *LOAD_QUESTIONS], lookalikes=untouched, note="loading" + where,
    )  # fmt: skip

    sharded = [name for name, (_, sharding) in SmallModel.shapes.items() if sharding]
    glued = {
        name: {GLUED: [torch.cat([filled[rank][name] for rank in place.ranks]) for place in places]}
        for name in sharded
        if p > 1
    }
    saved = [
        {**to_save[number], "traffic": gathers_on(place, sharded)}
        for (number, _), place in zip(members, places, strict=True)
    ]
    checks.verify(
        "4.5", p, [rank[1] for rank in seen], saved,
        questions=[*first, *SAVE_QUESTIONS], lookalikes=glued, note="saving" + where,
    )  # fmt: skip


def gathers_on(place: checks.Place, names: Sequence[str]) -> checks.Traffic:
    """Return the traffic of one all-gather per tensor, in the tensor's dtype. A group with only one rank has none."""
    sizes = [(math.prod(SmallModel.shapes[name][0]), str(dtype_of(name)).removeprefix("torch.")) for name in names]
    calls = [checks.Call("all_gather", numel, dtype, place.ranks) for numel, dtype in sizes]
    return checks.Traffic(calls if place.size > 1 else ())


def random_state(generator: torch.Generator) -> dict[str, Tensor]:
    """Return a full state dict with random values. Its dtypes differ, as in a model whose norms stay in float32."""
    return {
        name: checks.random_tensor(generator, *sizes).to(dtype_of(name))
        for name, (sizes, _) in SmallModel.shapes.items()
    }


def dtype_of(name: str) -> torch.dtype:
    return SmallModel.dtypes.get(name, torch.float64)


def shards_of(state: Mapping[str, Tensor], place: checks.Place) -> dict[str, Tensor]:
    """Split a full state, and return the shards for the rank at this place in its process group."""

    def mine(value: Tensor, sharding: Sharding | None) -> Tensor:
        if sharding is None:
            return value
        return shard(value, sharding.dim, place.index, place.size, stride=sharding.stride)

    return {name: mine(state[name], sharding) for name, (_, sharding) in SmallModel.shapes.items()}


LOAD_QUESTIONS = (
    checks.Question(
        checks.changed,
        "The caller's dictionary has changed. Does your code modify `full_state`? Does any parameter share memory "
        "with a tensor in the dictionary?",
    ),
    checks.Question(
        COMPLETE,
        "If a parameter is missing from the checkpoint, it keeps its old values, and nobody notices. Which line skips "
        "the missing name instead of raising an error?",
    ),
    checks.Question(
        lambda d: bool({IN_PLACE, STILL_SHARDED, TRAINABLE} & d.names),
        "The optimizer keeps references to the parameter objects, and these objects carry the attribute "
        "`tensor_parallel`. How can you overwrite a parameter's elements in place?",
    ),
    checks.Question(
        checks.differs("traffic"),
        "Every rank already has the entire dictionary, so why would the ranks need to communicate?",
    ),
    checks.Question(
        lambda d: bool(d.names) and d.names <= {"fused.weight", "fused.bias"},
        "Only the fused layer is wrong. What does the `tensor_parallel` attribute of the fused parameters tell you "
        "besides the dimension?",
    ),
    checks.Question(
        checks.has_kind("column.weight", "other rank"),
        "A rank loaded another rank's shard. Which rank number does your code use to select a shard? Remember that "
        "each group numbers its own ranks from 0.",
    ),
    checks.Question(
        lambda d: UNCHANGED in d.kinds(),
        "Some parameters still have their old values. Which parameters does your loop skip, and why?",
    ),
)

SAVE_QUESTIONS = (
    checks.Question(
        checks.changed,
        "Saving has changed the model. Which line writes into one of the model's parameters?",
    ),
    checks.Question(
        checks.differs(IS_DICT),
        "What does your function return on each rank? `full_state_dict` should return a dict on every rank.",
    ),
    checks.Question(
        checks.differs(NAMES),
        "The dictionary should contain each parameter exactly once, under its name from `named_parameters`. This "
        "model also has a buffer called `mask`, and its parameter `column.weight` has a second name, "
        "`head.weight`. Which names does your loop go over?",
    ),
    checks.Question(
        checks.differs(DETACHED),
        "A checkpoint doesn't need gradients. Which call detaches a tensor from autograd?",
    ),
    checks.Question(
        checks.differs(COPIED),
        "The saved tensors changed when training continued, so they must share memory with the parameters. Which "
        "parameters did you forget to copy? Remember the replicated parameters, and don't forget the case p = 1.",
    ),
    checks.Question(
        lambda d: checks.has_kind("row.bias", "shape", "whole")(d) or checks.has_kind("norm", "shape", "whole")(d),
        "Every rank already has a full copy of each replicated parameter. What do you get if you concatenate p copies "
        "of the same parameter?",
    ),
    checks.Question(
        lambda d: checks.has_kind("row.bias", "p times")(d) or checks.has_kind("norm", "p times")(d),
        "Every rank already has a full copy of each replicated parameter, so why would you sum these copies?",
    ),
    checks.Question(
        lambda d: bool(d.names) and d.names <= {"fused.weight", "fused.bias"},
        "Only the fused layer is wrong. Each shard of a fused weight contains a slice of every block, so "
        "concatenating the shards isn't enough. What does the `tensor_parallel` attribute of the fused "
        "parameters tell you besides the dimension?",
    ),
    checks.Question(
        checks.has_kind("row.weight", "shape", GLUED),
        "The row-parallel weight was split along dimension 1. Along which dimension does your code concatenate the "
        "shards of that weight?",
    ),
    checks.Question(
        lambda d: d.names == {DEEP},
        "One weight of this model has three dimensions, and it was split along dimension -1. Along which dimension "
        "does your code concatenate the shards of this weight?",
    ),
    checks.Question(
        lambda d: bool(d.names) and d.names <= {"traffic"},
        "The values are all correct, but your function doesn't run the expected collectives. You need exactly one "
        "all-gather per sharded parameter and no collective for a replicated one.",
    ),
    checks.Question(
        checks.has_kind("column.weight", "shape"),
        "Look at the shape that your function returns. Along which dimension does your code join the shards, and along "
        "which dimension was this weight split? Note that `gather_from_region` always joins them along the last one.",
    ),
    checks.Question(
        checks.has_kind("column.weight", "part"),
        "Each rank has only its own shard. Which collective gives every rank the other ranks' shards?",
    ),
)

WHOSE_GROUP = (
    "Each group has its own size and numbers its ranks from 0. Which of your calls doesn't pass `group`, and "
    "therefore uses the default group of all ranks?"
)
LOAD_CRASH = (
    "Which parameter caused the error? If two shapes don't match, check how you split that parameter. A replicated "
    "parameter has no `tensor_parallel` attribute, so it isn't split at all. If autograd complains about "
    "an in-place operation, wrap that operation in `torch.no_grad()`."
)
CONTIGUOUS = (
    "A collective only accepts contiguous tensors. In this test, one parameter is stored transposed on rank 0. "
    "Which line creates the tensor that you pass to the collective? Note that `clone()` keeps the memory "
    "layout of the tensor it copies."
)
