"""Chapter 10: chunks of full tensors, as `torch.distributed.checkpoint` (DCP) asks for them.

DCP asks a planner what each rank has. A planner answers with chunks: where in the whole tensor a piece begins, and its
sizes. When it loads, DCP lays the chunks that a rank wants over those in the files, and reads where they overlap:

    saved on 2 ranks       [ 0 1 2 3 4 5 | 6 7 8 9 10 11 ]
    loaded on 3 ranks      [ 0 1 2 3 | 4 5 6 7 | 8 9 10 11 ]       rank 1 reads 4 5 from one file, 6 7 from the other

DTensor, torch's own sharded tensor, is one chunk on each rank, and says which. A shard of a fused tensor is several:
`runs`.
"""

import copy
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
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
from torch.distributed.tensor import DTensor

from tplab.tensor.sharding import Sharding


@dataclass(frozen=True)
class Pieces:
    """What a rank holds of a tensor: views into its `shard`, each with the place in the whole where it begins."""

    shard: Tensor
    whole_shape: torch.Size
    views: dict[torch.Size, Tensor]

    def chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, view.shape) for offset, view in self.views.items()]

    def at(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.views[index.offset]

    def padded(self) -> bool:
        """Whether the shard has entries that are in no whole tensor."""
        return sum(view.numel() for view in self.views.values()) < held(self.shard).numel()

    def copied(self) -> "Pieces":
        """The same numbers in memory of their own, on the CPU, to be saved: of the shard only its dtype is left."""
        views = {offset: _copied(view) for offset, view in self.views.items()}
        return Pieces(torch.empty(0, dtype=self.shard.dtype, device="cpu"), self.whole_shape, views)


def pieces(tensor: Tensor, sharding: Sharding | None, rank: int, world_size: int) -> Pieces:
    """The pieces that `rank` holds, if `tensor` is its shard; without a `sharding` it is the whole, in one piece.

    A DTensor says itself where its part belongs; with a `sharding` that counts, which knows of padding and blocks.
    """
    tensor = tensor.detach()
    own = held(tensor)
    if sharding is None and isinstance(tensor, DTensor):
        chunks = tensor.__create_chunk_list__()
        return Pieces(tensor, tensor.shape, {chunk.offsets: own for chunk in chunks if own.numel()})
    if sharding is None:
        return Pieces(tensor, tensor.shape, {torch.Size([0] * tensor.dim()): tensor})
    whole, dim = sharding.whole_shape(own.shape, world_size), sharding.dim % tensor.dim()
    views = {}
    for start, place, length in runs(sharding, whole[dim], rank, world_size):
        offset = [start if d == dim else 0 for d in range(tensor.dim())]
        views[torch.Size(offset)] = own.narrow(dim, place, length)
    return Pieces(tensor, torch.Size(whole), views)


def held(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def runs(sharding: Sharding, size: int, rank: int, world_size: int) -> list[tuple[int, int, int]]:
    """(where in the whole, where in the shard, length) of each run of neighbours that `rank` holds of `size` entries.

    The sharding says so itself, if it is given the numbers 1 to size to cut; the zeros are padding. A run ends where a
    block does: otherwise a rank with the last head of Q and the only one of K would have them as one piece, which
    overlaps with the pieces of K on other ranks and is none of them.
    """
    mine = replace(sharding, dim=0).shard(torch.arange(1, size + 1, device="cpu"), rank, world_size)
    places = mine.nonzero().flatten()
    numbers = mine[places] - 1
    borders = torch.tensor([0, *accumulate(block.size for block in sharding.blocks)])
    begins = torch.isin(numbers, borders)
    begins[:1] = True
    begins[1:] |= numbers.diff() != 1
    lengths = torch.diff(begins.nonzero().flatten(), append=torch.tensor([len(numbers)]))
    return list(zip(numbers[begins].tolist(), places[begins].tolist(), lengths.tolist(), strict=True))


@dataclass(frozen=True)
class Plain:
    """A value that is saved as one, a dict too. Raises TypeError if it could not be loaded with `weights_only=True`."""

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
    """A place for what was saved under `name`: a new whole tensor, or None for anything else."""
    saved = metadata.state_dict_metadata[name]
    if not isinstance(saved, TensorStorageMetadata):
        return None
    return pieces(torch.zeros(saved.size, dtype=saved.properties.dtype), None, 0, 1)


def copied(content: Any) -> Any:
    """A nested dict of `Pieces`, tensors and values that no longer changes with the originals; tensors on the CPU.

    From a GPU the copies travel side by side into pinned memory: synchronize before they are read.
    """
    if isinstance(content, Pieces):
        return content.copied()
    if isinstance(content, Tensor):
        return _copied(content)
    if isinstance(content, dict):
        return {key: copied(value) for key, value in content.items()}
    return copy.deepcopy(content)


def _copied(tensor: Tensor) -> Tensor:
    place = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return place.copy_(tensor.detach(), non_blocking=True)


def value_of(leaf: object) -> Any:
    """What a filled place holds."""
    return leaf.shard if isinstance(leaf, Pieces) else leaf


class PieceSaver(dcp.DefaultSavePlanner):
    """Saves a nested dict of `Pieces`, whole tensors and values. What several ranks have, the lowest of them writes."""

    def __init__(self) -> None:
        super().__init__(flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)  # flattens: "model.norm.weight"
        for name, leaf in self.state_dict.items():
            if isinstance(leaf, Tensor):
                self.state_dict[name] = pieces(leaf, None, 0, 1)

    def create_local_plan(self) -> SavePlan:
        items = [item for name, leaf in self.state_dict.items() for item in _write_items(name, leaf)]
        self.plan = SavePlan(items, planner_data=self.mappings)  # flat names, and the keys that led there
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        leaf = self.state_dict[index.fqn]
        if isinstance(leaf, Pieces):
            return leaf.at(index)
        return leaf.value if isinstance(leaf, Plain) else leaf


class PieceLoader(dcp.DefaultLoadPlanner):
    """Fills the `Pieces` of a flat dict in place, and puts in every other place what was saved under its name."""

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
