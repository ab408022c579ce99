"""The check of exercise 4.5, in which a sharded model loads and saves a full checkpoint."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tplab.course.checks.cases import GROUPS, Case, Place, random_tensor
from tplab.course.checks.observation import Changed, Claim, Observed, Snapshot
from tplab.course.checks.recorded_traffic import CollectiveCall, Traffic, traffic
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.checks.twins import Twin
from tplab.runtime import device, record
from tplab.tensor.sharding import Sharding

UNTOUCHED = 7.0
FILLED = "every parameter has new values"
IN_PLACE = "the parameters are filled in place"
COMPLETE = "a name that's missing from full_state raises an error"
STILL_SHARDED = "the shards keep their attribute tensor_parallel"
STILL_TRAINABLE = "each parameter still requires a gradient if it did before"
IS_DICT = "the result is a dict"
NAMES = "the result has each parameter once, and nothing else"
DETACHED = "the saved tensors are detached from autograd"
COPIED = "the saved tensors don't change when training continues"
FROZEN, TRANSPOSED = "block.part.frozen", "row.weight"

State = Mapping[str, Tensor]


class Saved(NamedTuple):
    """A parameter of the model: its full shape, how it's split, and its dtype."""

    shape: tuple[int, ...]
    split: Sharding | None = None
    dtype: torch.dtype = torch.float64

    def part(self, full: Tensor, place: Place) -> Tensor:
        return full if self.split is None else place.part(full, self.split.dim, self.split.stride).contiguous()


PARAMETERS = {
    "norm": Saved((6,), dtype=torch.float32),
    "column.weight": Saved((8, 6), Sharding(0)),
    "column.bias": Saved((8,), Sharding(0), torch.float32),
    "fused.weight": Saved((24, 5), Sharding(0, 3)),
    "fused.bias": Saved((24,), Sharding(0, 3)),
    "row.weight": Saved((5, 8), Sharding(1), torch.bfloat16),
    "row.bias": Saved((5,)),
    "block.part.weight": Saved((3, 5, 8), Sharding(-1)),
    "block.part.frozen": Saved((8, 3), Sharding(0)),
}


def small_model(size: int) -> nn.Module:
    """Return a model whose parameters are replicated, or sharded in various ways over `size` ranks.

    Some parameters belong to nested modules. One parameter is frozen. On every other rank, another parameter is
    transposed in memory, so it isn't contiguous. The model also has a buffer and a second name for one of the
    parameters, and a checkpoint should skip both.
    """
    model = nn.Module()
    for name, saved in PARAMETERS.items():
        full = torch.full(saved.shape, UNTOUCHED, dtype=saved.dtype, device=device())
        filled = saved.part(full, Place(0, tuple(range(size)), size)).clone()
        if name == TRANSPOSED and dist.get_rank() % 2 == 0:
            filled = filled.t().contiguous().t()
        param = nn.Parameter(filled, requires_grad=name != FROZEN)
        if saved.split:
            param.tensor_parallel = saved.split  # type: ignore[attr-defined]
        module = model
        *path, last = name.split(".")
        for step in path:
            if step not in module._modules:
                module.add_module(step, nn.Module())
            module = module.get_submodule(step)
        module.register_parameter(last, param)
    model.register_buffer("mask", torch.ones(4, device=device()))
    model.head = nn.Module()
    model.head.register_parameter("weight", model.get_parameter("column.weight"))
    return model


@dataclass(frozen=True)
class Checkpoint(Case):
    """A call of one of the two functions. In the twin BETWEEN, it's also called on a second model, before and after."""

    note: str

    def describe(self, name: str) -> str:
        return self.note + "," * bool(self.groups)

    def models(self, group: Any) -> list[nn.Module]:
        size = dist.get_world_size(group)
        return [small_model(size) for _ in range(2 if self.twin is Twin.BETWEEN else 1)]


def draw_state(case: Checkpoint, generator: torch.Generator, size: int) -> State:
    return {name: random_tensor(generator, *saved.shape).to(saved.dtype) for name, saved in PARAMETERS.items()}


def shards_of(case: Checkpoint, state: State, place: Place) -> State:
    return {name: saved.part(state[name], place) for name, saved in PARAMETERS.items()}


def train_on(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)


def listed(what: str, names: Sequence[str]) -> Claim:
    return Claim(f"{what} {', '.join(names)}" if names else "")


def run_load(load: Callable[..., Any], case: Checkpoint, full: State, group: Any) -> Observed:
    full = {name: value.to(device()) for name, value in full.items()}
    models = case.models(group)
    model, others = models[0], models[1:]
    other = {name: value.flip(-1) * -0.75 for name, value in full.items()}
    for each in models if others else ():
        load(each, other, group)
    identity = {name: (id(param), param.data_ptr()) for name, param in model.named_parameters()}
    before, given = Snapshot(**{f"full_state[{name!r}]": value for name, value in full.items()}), dict(full)
    held = Snapshot(full_state=given)
    with record() as section:
        load(model, given, group)
    for each in others:
        load(each, other, group)
    params = dict(model.named_parameters())
    seen: Observed = {name: param.detach().clone() for name, param in params.items()}
    kept = all(identity[name] == (id(param), param.data_ptr()) for name, param in params.items())
    lost = [name for name, saved in PARAMETERS.items() if saved.split and not hasattr(params[name], "tensor_parallel")]
    flagged = [name for name, param in params.items() if param.requires_grad != (name != FROZEN)]
    old = [name for name, value in seen.items() if (value == UNTOUCHED).all()]
    train_on(model)  # which shouldn't change the dictionary
    changed = Changed((*held.changed(), *before.changed()))
    seen |= {
        IN_PLACE: Claim("" if kept else "some were replaced"), STILL_SHARDED: listed("lost by", lost),
        STILL_TRAINABLE: listed("not", flagged), FILLED: listed("not", old), "traffic": traffic(section),
        "inputs unchanged": changed,
    }  # fmt: skip
    missing = next(iter(full))
    try:
        load(model, {name: value for name, value in full.items() if name != missing}, group)
    except Exception:
        return seen | {COMPLETE: Claim("")}
    return seen | {COMPLETE: Claim(f"nothing was raised for {missing}")}


def run_save(save: Callable[..., Any], case: Checkpoint, mine: State, group: Any) -> Observed:
    models = case.models(group)
    model, others = models[0], models[1:]
    for each in models if others else ():
        save(each, group)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(mine[name])
    before = Snapshot(**dict(model.named_parameters()))
    with record() as section:
        state = save(model, group)
    for each in others:
        save(each, group)
    if not isinstance(state, dict):
        return {IS_DICT: Claim(f"it is {type(state).__name__}"), "traffic": traffic(section)}
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    copies = {name: value.detach().clone() for name, value in tensors.items()}
    changed = before.changed()
    train_on(model)  # which shouldn't change the checkpoint
    missing = [name for name in PARAMETERS if name not in state]
    more = [str(name) for name in state if name not in PARAMETERS]
    aliased = [name for name, value in tensors.items() if not torch.equal(value, copies[name])]
    return {
        **state, **copies, IS_DICT: Claim(""), "traffic": traffic(section), "inputs unchanged": changed,
        NAMES: Claim("; ".join(filter(None, [listed("not", missing), listed("also", more)]))),
        DETACHED: listed("not", [name for name, value in tensors.items() if value.requires_grad]),
        COPIED: Claim(f"{', '.join(aliased)} changed when the parameters did" if aliased else ""),
    }  # fmt: skip


def gathers(place: Place) -> Traffic:
    """Return the traffic of one all-gather per sharded parameter, in the parameter's dtype."""
    split = [saved for saved in PARAMETERS.values() if saved.split and place.size > 1]
    dtypes = [str(saved.dtype).removeprefix("torch.") for saved in split]
    sizes = [math.prod(saved.shape) for saved in split]
    return Traffic(
        CollectiveCall("all_gather", size, dtype, place.ranks) for size, dtype in zip(sizes, dtypes, strict=True)
    )


def checkpoint(of: str, part: str, note: str, **options: Any) -> OnRanks:
    return OnRanks(
        of=of, part=part, cases=[Checkpoint(note), Checkpoint(note, groups=GROUPS)], draw=draw_state,
        without=set(Twin) - {Twin.BETWEEN}, **options,
    )  # fmt: skip


exercise(
    "4.5", "Load and save", takes=["load_full_state_dict", "full_state_dict"],
    trials=[
        checkpoint(
            "load_full_state_dict", "load", "loading", run=run_load,
            right=lambda case, state, place: {**shards_of(case, state, place), "traffic": place.traffic()},
        ),
        checkpoint(
            "full_state_dict", "save", "saving", run=run_save, give=shards_of,
            right=lambda case, state, place: {**state, "traffic": gathers(place)},
        ),
    ],
    passed="A checkpoint saved on any number of ranks can be loaded on any other number of ranks.",
)  # fmt: skip
