"""Chapter 10: save on p ranks, each its own shards, and load on any other number of ranks.

`full_state_dict` gathers the whole model on every rank, which a large one doesn't fit on. Here nothing is gathered.
Each rank writes what it holds, and notes where in the whole tensor it belongs. What several ranks hold, the first of
them writes; the rows that only pad a vocabulary, none:

    in the checkpoint                    rank 0    rank 1    rank 2    rank 3
    embedding [10, h], rows              0 1 2     3 4 5     6 7 8     9 . .
    qkv: 4 heads of Q                    0         1         2         3
         2 heads of K, and 2 of V        0         (0)       1         (1)            ( )  held, and not written
    norm [h], the step of Adam           all       (all)     (all)     (all)

So the checkpoint holds the whole tensors of the unsharded model, and nothing in it depends on p. Whoever loads it, on 1
rank or 8, asks for the rows that it needs, wherever they lie (see `tplab.checkpoint.pieces`).

The state of an optimizer goes the same way. Adam's averages have the shape of their parameter and are cut like it; they
are saved under its name, since its number in the optimizer says little.

The format is that of `torch.distributed.checkpoint` (DCP), with the names that torch gives to one process:

    {"model": model.state_dict(), "optimizer": {"state": .., "param_groups": ..}, "rng": .., "extra": ..}

Other tools read it, an unsharded model too: `dcp.load({"model": plain.state_dict()}, checkpoint_id=path)`, or one
file for `torch.load`: `dcp_to_torch_save(path, "model.pt")`. Both run what somebody may have hidden in the files, which
`load_sharded` doesn't (see `tplab.checkpoint.files`): use them for checkpoints of people whom you trust.

Why planners and not DTensors: a DTensor is one chunk on a rank, and a fused, copied or padded shard isn't.
(Megatron: `ShardedTensor.from_rank_offsets` and dist_checkpointing.)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tplab.checkpoint.files import (
    SafeReader,
    TyingWriter,
    check_is_shared,
    check_names,
    dcp_run,
    make_directory,
    names_under,
    together,
)
from tplab.checkpoint.optimizer import (
    check_groups,
    group_places,
    load_optimizer,
    optimizer_content,
    saved_groups,
    state_places,
)
from tplab.checkpoint.pieces import PieceLoader, Pieces, PieceSaver, Plain, blank, copied, pieces, value_of
from tplab.checkpoint.replicas import compare_replicas
from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.rng import RNGTracker
from tplab.tensor.sharding import ShardedModule


def save_sharded(
    path: str | PathLike,
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    rng: RNGTracker | None = None,
    extra: Mapping[str, Any] | None = None,
    check_replicas: bool = True,
    group: ProcessGroup | None = None,
) -> None:
    """Save model, optimizer, random states and `extra` to the new directory `path`, on a disk that all ranks share.

    All ranks of the model's group call it. With several groups side by side each saves to a path of its own; of
    data-parallel replicas one is enough. extra: numbers, strings, tensors, dicts and lists of them, such as the step or
    `scheduler.state_dict()`; rank 0's count.

    Of what several ranks hold, one is saved. Raises ValueError, naming it and the ranks, if they do not hold the same
    numbers; check_replicas=False saves those of the lowest rank all the same.
    Raises FileExistsError if there is something at `path`: whoever overwrites a checkpoint and is interrupted has none.
    Save each to its own directory (step-1000), and delete the last one afterwards.
    """
    staged = stage_sharded(model, optimizer=optimizer, rng=rng, extra=extra, check_replicas=check_replicas, group=group)
    write_sharded(path, staged, group=group)


@dataclass(frozen=True)
class Staged:
    """What this rank has to save: views of what it holds, until they are `copied`. ties: as in `TyingWriter`."""

    content: dict[str, Any]
    ties: dict[str, str]
    is_copy: bool = False

    def copied(self) -> "Staged":
        """In CPU memory of its own, so that training may go on while it is written."""
        staged = Staged(copied(self.content), self.ties, is_copy=True)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        return staged


def stage_sharded(
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    rng: RNGTracker | None = None,
    extra: Mapping[str, Any] | None = None,
    check_replicas: bool = True,
    group: ProcessGroup | None = None,
) -> Staged:
    """The first half of `save_sharded`: all that looks at the model, and all that can be wrong with it."""
    rank, world_size = rank_and_size(group)
    content, ties = together(lambda: _content(model, optimizer, rng, extra, rank, world_size), group)
    if check_replicas:
        compare_replicas(model, group)
    return Staged(content, ties)


def write_sharded(path: str | PathLike, staged: Staged, *, group: ProcessGroup | None = None) -> None:
    """The second half of `save_sharded`. A copy can be written by a thread, if the group (gloo's) is used by no other.

    (`dcp.async_save` is this too: a copy on the CPU, and `dcp.save` in a thread.)
    """
    path, rank = Path(path), rank_and_size(group)[0]
    together(lambda: make_directory(path) if rank == 0 else None, group)
    together(lambda: check_is_shared(path), group)
    ahead = {"per_thread_copy_ahead": 0} if staged.is_copy else {}  # else the thread would take a stream of some GPU
    with dcp_run(f"{path} could not be saved"):
        writer = TyingWriter(path, staged.ties, **ahead)
        dcp.save(staged.content, storage_writer=writer, planner=PieceSaver(), process_group=group)


def load_sharded(
    path: str | PathLike,
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    rng: RNGTracker | None = None,
    group: ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load what `save_sharded` saved on any number of ranks, in place; return its `extra`.

    All ranks of the model's group call it. Without `optimizer` or `rng`, what was saved of them is left alone. The
    numbers take the dtypes and devices that the model has.

    rng: what was drawn alike goes on everywhere, each saved rank's own random state on the rank with its number. On
    more ranks than were saved, the new ones keep the state that `seed_all` gave them.

    Raises FileNotFoundError if the checkpoint is missing or incomplete, ValueError if it is of another model or
    optimizer. Nothing has been changed then. RuntimeError if a file is damaged, or can't be read; part may be loaded.
    """
    rank, world_size = rank_and_size(group)
    reader = SafeReader(path)
    metadata = together(reader.read_metadata, group)
    small: dict[str, Any] = {**group_places(metadata), **dict.fromkeys(names_under(metadata, "extra"))}
    _read(small, reader, group)
    groups = saved_groups(metadata, small)

    def places() -> dict[str, Any]:
        wanted = _model_places(metadata, model, rank, world_size)
        if optimizer is not None:
            check_groups(groups, optimizer, model)
            wanted |= state_places(metadata, model, rank, world_size)
        return wanted if rng is None else wanted | _rng_places(metadata, rng)

    loaded = together(places, group)
    for leaf in loaded.values():
        if isinstance(leaf, Pieces) and leaf.padded():
            leaf.shard.zero_()
    _read(loaded, reader, group)
    _finish_model(model, loaded)
    if optimizer is not None:
        load_optimizer(optimizer, model, metadata, groups, loaded)
    if rng is not None:
        _finish_rng(rng, metadata, loaded)
    return small.get("extra") or {}


def _content(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    rng: RNGTracker | None,
    extra: Mapping[str, Any] | None,
    rank: int,
    world_size: int,
) -> tuple[dict[str, Any], dict[str, str]]:
    """What this rank has to save, and the second names of tied tensors: {"model.head.weight": "model.table.weight"}."""
    _check_group(model, world_size)
    state, first = model.state_dict(keep_vars=True), _first_names(model)
    content: dict[str, Any] = {"model": {}}
    for name in dict.fromkeys(first.values()):
        value = state[name]
        if isinstance(value, Tensor):
            content["model"][name] = pieces(value, getattr(value, "tensor_parallel", None), rank, world_size)
        else:  # what a module's get_extra_state returned
            content["model"][name] = Plain(value)
    if optimizer is not None:
        content["optimizer"] = optimizer_content(optimizer, model, rank, world_size)
    if rng is not None:
        content["rng"] = rng.state_dict()
    if extra:
        content["extra"] = Plain(dict(extra))
    return content, {f"model.{name}": f"model.{other}" for name, other in first.items() if name != other}


def _first_names(model: nn.Module) -> dict[str, str]:
    """For each name in the state_dict the first name of the same tensor, which for a tied weight is another one."""
    seen: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {n: seen.setdefault(id(value), n) if isinstance(value, Tensor) else n for n, value in state.items()}


def _model_places(metadata: Metadata, model: nn.Module, rank: int, world_size: int) -> dict[str, Any]:
    """Places for the model's tensors: its own. Raises ValueError if the checkpoint is of another model."""
    _check_group(model, world_size)
    state = model.state_dict(keep_vars=True)
    check_names([name.removeprefix("model.") for name in names_under(metadata, "model")], state)
    places: dict[str, Any] = {}
    for name in dict.fromkeys(_first_names(model).values()):
        value, saved = state[name], metadata.state_dict_metadata[f"model.{name}"]
        if not isinstance(value, Tensor) or not isinstance(saved, TensorStorageMetadata):
            places[f"model.{name}"] = None
            continue
        sharding = getattr(value, "tensor_parallel", None)
        places[f"model.{name}"] = own = pieces(value, sharding, rank, world_size)
        if saved.size != own.whole_shape:
            cut = f", of which each of {world_size} ranks takes {list(value.shape)}" if sharding else ""
            raise ValueError(
                f"{name} is {list(saved.size)} in the checkpoint; the model needs {list(own.whole_shape)}{cut}"
            )
    return places


def _finish_model(model: nn.Module, loaded: Mapping[str, Any]) -> None:
    """Its tensors are filled already; this is for what a module does when it is loaded, such as set_extra_state."""
    model.load_state_dict({name: value_of(loaded[f"model.{first}"]) for name, first in _first_names(model).items()})


def _rng_places(metadata: Metadata, rng: RNGTracker) -> dict[str, Any]:
    saved, own = names_under(metadata, "rng"), rng.state_dict()
    kinds = {str(key[1]).split(".rank")[0] for key in saved.values()}
    missing = sorted({name.split(".rank")[0] for name in own} - kinds)
    if missing:
        raise ValueError(f"the checkpoint has no random states {missing}, only {sorted(kinds)}; load it without rng")
    return {name: blank(metadata, name) for name, key in saved.items() if key[1] in own}


def _finish_rng(rng: RNGTracker, metadata: Metadata, loaded: Mapping[str, Any]) -> None:
    states: dict[str, dict[str, Tensor]] = {}
    for name, (_, stream, kind) in names_under(metadata, "rng").items():
        if name in loaded:
            states.setdefault(str(stream), {})[str(kind)] = loaded[name].shard
    rng.load_state_dict(states, strict=False)


def _check_group(model: nn.Module, world_size: int) -> None:
    for name, module in model.named_modules():
        if isinstance(module, ShardedModule) and module.shardings and module.world_size != world_size:
            raise ValueError(f"{name} was made for {module.world_size} ranks, not {world_size}: pass its group")


def _read(places: dict[str, Any], reader: SafeReader, group: ProcessGroup | None) -> None:
    with dcp_run(f"{reader.path} could not be loaded, or only a part of it"):
        dcp.load(places, storage_reader=reader, planner=PieceLoader(), process_group=group)
