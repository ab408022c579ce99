"""Chapter 10: each of p ranks saves its own shards, and any other number of ranks can load them.

`full_state_dict` gathers the full model on every rank, but a large model doesn't fit there. Here, nothing is gathered.
Each rank writes its shards, along with their offsets in the full tensors. If several ranks have the same data, the
first of them writes it. Rows that only pad a vocabulary aren't written at all:

    in the checkpoint                    rank 0    rank 1    rank 2    rank 3
    embedding [10, h], rows              0 1 2     3 4 5     6 7 8     9 . .
    qkv: 4 heads of Q                    0         1         2         3
         2 heads of K, and 2 of V        0         (0)       1         (1)            ( )  present, but not written
    norm [h], the step of Adam           all       (all)     (all)     (all)

So the checkpoint contains the full tensors of the unsharded model, and nothing in it depends on p. Whether it is loaded
on 1 rank or 8, each rank asks for the rows that it needs, no matter which file has them (`tplab.checkpoint.pieces`).

The optimizer's state is saved the same way. Adam's averages have the same shape as their parameter, so they are sharded
in the same way. They are saved under the parameter's name, because the parameter's number in the optimizer isn't
stable.

The format is that of `torch.distributed.checkpoint` (DCP), with the names that torch uses on a single process:

    {"model": model.state_dict(), "optimizer": {"state": .., "param_groups": ..}, "extra": ..}

Other tools can read it, even for an unsharded model: `dcp.load({"model": plain.state_dict()}, checkpoint_id=path)`, or
`dcp_to_torch_save(path, "model.pt")` for a single `torch.load` file. Both run any code hidden in the files, which
`load_sharded` doesn't (see `tplab.checkpoint.files`), so use them only for checkpoints from people you trust.

We use planners instead of DTensors because a DTensor has one chunk per rank, which can't describe fused, copied or
padded shards.
(Megatron: `ShardedTensor.from_rank_offsets` and dist_checkpointing.)
"""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tplab.checkpoint.files import (
    SafeReader,
    check_is_shared,
    check_names,
    dcp_run,
    gathered,
    make_directory,
    names_under,
    together,
)
from tplab.checkpoint.optimizer import (
    OptimizerState,
    check_groups,
    group_places,
    load_optimizer,
    named_groups,
    of_all_stages,
    optimizer_content,
    saved_groups,
    state_places,
)
from tplab.checkpoint.pieces import PieceLoader, Pieces, PieceSaver, Plain, pieces, value_of
from tplab.checkpoint.replicas import compare_replicas
from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.sharding import check_group, sharding_of
from tplab.tensor.wrappers import load_plain_state, plain_state


def save_sharded(
    path: str | PathLike,
    model: nn.Module,
    *,
    optimizer: OptimizerState | None = None,
    extra: Mapping[str, Any] | None = None,
    group: ProcessGroup | None = None,
    replica: ProcessGroup | None = None,
) -> None:
    """Save model, optimizer and `extra` to a new directory `path` on a disk that all ranks share.

    All ranks of the model's group must call it. Different groups must save to different paths. If there are several
    data-parallel replicas, only one has to be saved. With pipeline parallelism, `model` is this rank's stage, `replica`
    is the group of all ranks of all stages, and the checkpoint contains the full model.

    `extra` can contain numbers, strings, tensors, and dicts and lists of them, such as the step or
    `scheduler.state_dict()`; rank 0's is saved. `optimizer` is one of torch's, or a `FullOptimizer` of
    `tplab.data.zero_state`.

    Replicated data is saved once. If the replicas differ, a ValueError names the data and the ranks. Raises
    FileExistsError if `path` exists, because an interrupted overwrite would leave you without any checkpoint. Save each
    checkpoint to its own directory (step-1000), and delete the previous one afterwards.
    """
    everyone = replica or group
    content = together(lambda: _content(model, optimizer, extra, group), everyone)
    if replica is not None and optimizer is not None:
        content["optimizer"]["param_groups"] = of_all_stages(content["optimizer"]["param_groups"], replica)
    compare_replicas(model, group)
    path, rank = Path(path), rank_and_size(everyone)[0]
    together(lambda: make_directory(path) if rank == 0 else None, everyone)
    together(lambda: check_is_shared(path), everyone)
    with dcp_run(f"{path} could not be saved"):
        writer = dcp.FileSystemWriter(path, overwrite=False)
        dcp.save(content, storage_writer=writer, planner=PieceSaver(), process_group=everyone)


def load_sharded(
    path: str | PathLike,
    model: nn.Module,
    *,
    optimizer: OptimizerState | None = None,
    group: ProcessGroup | None = None,
    replica: ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load in place what `save_sharded` saved on any number of ranks, and return its `extra`.

    All ranks of the model's group must call it. If `model` is a pipeline stage, all ranks of `replica` must call it, as
    with `save_sharded`. Without `optimizer`, its saved state is ignored. Values are converted to the model's dtypes and
    devices.

    Raises FileNotFoundError if the checkpoint is missing or incomplete, and ValueError if it belongs to a different
    model or optimizer; in both cases, nothing is modified. Raises RuntimeError if a file can't be read; in that case,
    the model may be partially loaded.
    """
    rank, world_size = rank_and_size(group)
    everyone = replica or group
    reader = SafeReader(path)
    metadata = together(reader.read_metadata, everyone)
    small: dict[str, Any] = {**group_places(metadata), **dict.fromkeys(names_under(metadata, "extra"))}
    _read(small, reader, everyone)
    groups = saved_groups(metadata, small)
    names = set(plain_state(model))
    if replica is not None:
        names = names.union(*gathered(names, replica))
    own_groups = None if optimizer is None else of_all_stages(named_groups(optimizer, model), replica)

    def places() -> dict[str, Any]:
        wanted = _model_places(metadata, model, names, group)
        if optimizer is not None and own_groups is not None:
            check_groups(groups, own_groups)
            wanted |= state_places(metadata, model, rank, world_size)
        return wanted

    loaded = together(places, everyone)
    for leaf in loaded.values():
        if isinstance(leaf, Pieces) and leaf.padded():
            leaf.shard.zero_()
    _read(loaded, reader, everyone)
    _finish_model(model, loaded)
    if optimizer is not None:
        load_optimizer(optimizer, model, metadata, groups, loaded)
    return small.get("extra") or {}


def _content(
    model: nn.Module,
    optimizer: OptimizerState | None,
    extra: Mapping[str, Any] | None,
    group: ProcessGroup | None,
) -> dict[str, Any]:
    """Return the content to save. A tensor with two names, such as a tied weight, is in it under both."""
    _check_group(model, group)
    rank, world_size = rank_and_size(group)
    content: dict[str, Any] = {"model": {}}
    for name, value in plain_state(model).items():
        if isinstance(value, Tensor):
            content["model"][name] = pieces(value, sharding_of(value), rank, world_size)
        else:  # the result of a module's get_extra_state
            content["model"][name] = Plain(value)
    if optimizer is not None:
        content["optimizer"] = optimizer_content(optimizer, model, rank, world_size)
    if extra:
        content["extra"] = Plain(dict(extra))
    return content


def _model_places(metadata: Metadata, model: nn.Module, names: set[str], group: ProcessGroup | None) -> dict[str, Any]:
    """Return the model's tensors as placeholders. Raises ValueError if the checkpoint belongs to a different model.

    names    all names in the full model's state_dict
    """
    _check_group(model, group)
    rank, world_size = rank_and_size(group)
    check_names([name.removeprefix("model.") for name in names_under(metadata, "model")], names)
    places: dict[str, Any] = {}
    for name, value in plain_state(model).items():
        saved = metadata.state_dict_metadata[f"model.{name}"]
        if not isinstance(value, Tensor) or not isinstance(saved, TensorStorageMetadata):
            places[f"model.{name}"] = None
            continue
        sharding = sharding_of(value)
        places[f"model.{name}"] = own = pieces(value, sharding, rank, world_size)
        if saved.size != own.whole_shape:
            cut = f", of which each of {world_size} ranks takes {list(value.shape)}" if sharding else ""
            raise ValueError(
                f"{name} is {list(saved.size)} in the checkpoint; the model needs {list(own.whole_shape)}{cut}"
            )
    return places


def _finish_model(model: nn.Module, loaded: Mapping[str, Any]) -> None:
    """Run the hooks that modules have for loading, such as set_extra_state. The tensors are loaded already."""
    load_plain_state(model, {name: value_of(loaded[f"model.{name}"]) for name in plain_state(model)})


def _check_group(model: nn.Module, group: ProcessGroup | None) -> None:
    """Raise ValueError unless the group's ranks, and no others, have the shards of each parameter."""
    for name, value in plain_state(model).items():
        if isinstance(value, Tensor):
            check_group(name, value, group)


def _read(places: dict[str, Any], reader: SafeReader, group: ProcessGroup | None) -> None:
    with dcp_run(f"{reader.path} could not be loaded, or only a part of it"):
        dcp.load(places, storage_reader=reader, planner=PieceLoader(), process_group=group)
