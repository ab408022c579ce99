"""Chapter 10: chunks of full tensors, as `torch.distributed.checkpoint` (DCP) uses them.

DCP asks a planner which data each rank has. The planner answers with chunks, each described by its sizes and its offset
in the full tensor. When loading, DCP compares the chunks that a rank needs with those in the files, and reads the
overlaps:

    saved on 2 ranks       [ 0 1 2 3 4 5 | 6 7 8 9 10 11 ]
    loaded on 3 ranks      [ 0 1 2 3 | 4 5 6 7 | 8 9 10 11 ]       rank 1 reads 4 5 from one file, 6 7 from the other

A shard of a fused tensor consists of several chunks (see `tplab.tensor.sharding.runs`).
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tplab.tensor.sharding import Sharding, runs


@dataclass(frozen=True)
class Pieces:
    """A rank's chunks of a tensor: views into its `shard`, each with its offset in the full tensor."""

    shard: Tensor
    whole_shape: torch.Size
    views: dict[torch.Size, Tensor]

    def chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, view.shape) for offset, view in self.views.items()]

    def at(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.views[index.offset]

    def padded(self) -> bool:
        """Return True if the shard contains padding, that is, elements that don't belong to the full tensor."""
        return sum(view.numel() for view in self.views.values()) < self.shard.numel()


def pieces(tensor: Tensor, sharding: Sharding | None, rank: int, world_size: int) -> Pieces:
    """Return the `Pieces` of `rank`, given its shard. Without a `sharding`, the full tensor is a single chunk."""
    tensor = tensor.detach()
    if sharding is None:
        return Pieces(tensor, tensor.shape, {torch.Size([0] * tensor.dim()): tensor})
    whole, dim = sharding.whole_shape(tensor.shape, world_size), sharding.dim % tensor.dim()
    views = {}
    for start, place, length in runs(sharding, whole[dim], rank, world_size):
        offset = [start if d == dim else 0 for d in range(tensor.dim())]
        views[torch.Size(offset)] = tensor.narrow(dim, place, length)
    return Pieces(tensor, torch.Size(whole), views)


@dataclass(frozen=True)
class Plain:
    """A value that is saved as is, even a dict. Raises TypeError if it couldn't be loaded with `weights_only=True`."""

    value: object

    def __post_init__(self) -> None:
        file = io.BytesIO()
        try:
            torch.save(self.value, file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except Exception as error:
            kinds = "numbers, strings, tensors, dicts and lists of them"
            raise TypeError(f"{self.value!r:.200} can't be saved so that it is safe to load: only {kinds}") from error


def blank(metadata: Metadata, name: str) -> Pieces | None:
    """Return a placeholder for the entry `name`: a new full tensor, or None if the entry isn't a tensor."""
    saved = metadata.state_dict_metadata[name]
    if not isinstance(saved, TensorStorageMetadata):
        return None
    return pieces(torch.zeros(saved.size, dtype=saved.properties.dtype), None, 0, 1)


def value_of(leaf: object) -> Any:
    """Return the value that was loaded into a placeholder."""
    return leaf.shard if isinstance(leaf, Pieces) else leaf


class PieceSaver(dcp.DefaultSavePlanner):
    """Save planner for a nested dict of `Pieces`, full tensors and values. The lowest rank writes replicated data."""

    def __init__(self) -> None:
        super().__init__(flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)  # flattens keys: "model.norm.weight"
        for name, leaf in self.state_dict.items():
            if isinstance(leaf, Tensor):
                self.state_dict[name] = pieces(leaf, None, 0, 1)

    def create_local_plan(self) -> SavePlan:
        items = [item for name, leaf in self.state_dict.items() for item in _write_items(name, leaf)]
        self.plan = SavePlan(items, planner_data=self.mappings)  # maps flat names to the original keys
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        leaf = self.state_dict[index.fqn]
        if isinstance(leaf, Pieces):
            return leaf.at(index)
        return leaf.value if isinstance(leaf, Plain) else leaf


class PieceLoader(dcp.DefaultLoadPlanner):
    """Load planner that fills the `Pieces` of a flat dict in place and replaces other values with the saved ones."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        items = [item for name, leaf in self.state_dict.items() for item in _read_items(name, leaf, saved[name])]
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].at(index)

    def load_bytes(self, read_item: ReadItem, value: IO[bytes]) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _write_items(name: str, leaf: object) -> Sequence[WriteItem]:
    if not isinstance(leaf, Pieces):
        return [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)]
    properties = TensorProperties.create_from_tensor(leaf.shard)
    return [
        WriteItem(
            MetadataIndex(name, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, leaf.whole_shape),
        )
        for chunk in leaf.chunks()
    ]


def _read_items(name: str, leaf: object, saved: Any) -> Sequence[ReadItem]:
    if isinstance(leaf, Pieces):
        return create_read_items_for_chunk_list(name, saved, leaf.chunks())
    index, nothing = MetadataIndex(name), torch.Size([0])
    return [ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)]
