"""Chapter 10: the checkpoint directory, written by `torch.distributed.checkpoint` (DCP) and read without trusting it.

    step-1000/.metadata          an index of the tensors; written last, when everything else is complete
    step-1000/__0_0.distcp       the tensors of rank 0, each as torch.save writes it
    step-1000/__1_0.distcp       the tensors of rank 1

The `.metadata` is a pickle, and DCP's own reader unpickles it, so anyone who can write that file can run any program on
the machine that loads it. `SafeReader` creates only the few classes that belong in it and rejects a file that refers to
anything else. Tensors are read with `weights_only=True`, and `PieceLoader` reads other values that way, too. (Python's
documentation of pickle, "Restricting Globals".)
"""

import os
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from tplab.collectives.by_hand import rank_and_size

T = TypeVar("T")
Key = tuple[str | int, ...]

_PLAIN = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
}
_PATHS = {"PosixPath": PurePosixPath, "WindowsPath": PureWindowsPath}  # pure paths can't access the file system


def make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True)
    except FileExistsError as error:
        raise FileExistsError(
            f"there is something at {path} already. Save to a new directory, such as one with the step in its name: "
            "while a checkpoint is overwritten there is none to go back to"
        ) from error


def check_is_shared(path: Path) -> None:
    if not path.is_dir() or any(path.iterdir()):
        raise ValueError(f"{path} isn't the directory that rank 0 has just made: all ranks need the same one, shared")


class SafeReader(dcp.FileSystemReader):
    """Like DCP's reader, but it runs no code from the files and detects missing files before anything is loaded.

    `read_metadata` raises FileNotFoundError for a missing, unfinished or incomplete checkpoint, and ValueError if the
    `.metadata` file doesn't contain DCP's metadata.
    """

    _read: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._read is not None:
            return self._read
        path = Path(self.path)
        if not path.is_dir():
            raise FileNotFoundError(f"there is no checkpoint at {path}: no such directory")
        if not (path / ".metadata").is_file():
            raise FileNotFoundError(
                f"there is no complete checkpoint at {path}: it has no file .metadata, which is written last, so the "
                f"save was interrupted, or this is another directory. There are {sorted(os.listdir(path))[:8]}"
            )
        metadata = _unpickled(path / ".metadata")
        _check_files(path, metadata)
        self._read = metadata
        return self._read


def names_under(metadata: Metadata, *first: str) -> dict[str, Key]:
    """Return {name: key} for all entries whose key starts with `first`, such as {"extra.step": ("extra", "step")}."""
    keys = metadata.planner_data or {name: (name,) for name in metadata.state_dict_metadata}
    return {name: key for name, key in keys.items() if key[: len(first)] == first}


def check_names(saved: Iterable[str], own: Iterable[str]) -> None:
    """Raise ValueError unless the checkpoint's tensors have the same names as the model's."""
    saved, own = set(saved), set(own)
    if saved == own:
        return
    raise ValueError(
        f"the checkpoint is of another model: {_some(own - saved)} are only in the model, {_some(saved - own)} only in "
        "the checkpoint"
    )


def together(step: Callable[[], T], group: ProcessGroup | None) -> T:
    """Run step() on every rank and return its result. If any rank raises an error, all ranks do, so none hangs."""
    result, failed = None, None
    try:
        result = step()
    except Exception as error:
        failed = error
    mine: Any = failed and (type(failed), f"rank {rank_and_size(group)[0]}: {failed}")
    failures = gathered(mine, group)
    if failed is not None:
        raise failed
    for kind, message in filter(None, failures):
        raise kind(message)
    return result  # type: ignore[return-value]


def gathered(value: T, group: ProcessGroup | None) -> list[T]:
    """Return a list of the values of all ranks in the group (None: the default group). One rank sends nothing."""
    values = [value] * rank_and_size(group)[1]
    if len(values) > 1:
        dist.all_gather_object(values, value, group)
    return values


@contextmanager
def dcp_run(trouble: str) -> Iterator[None]:
    """Turn DCP's exception, which isn't an `Exception`, into a RuntimeError, and silence its warning for p = 1.

    The warning stays silenced, because restoring the filters would affect other threads.
    """
    if not dist.is_initialized():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
    try:
        yield
    except CheckpointException as failure:
        reasons = [f"rank {rank}: {type(error).__name__}: {error}" for rank, (error, _) in failure.failures.items()]
        raise RuntimeError(f"{trouble}. {reasons[0]}") from failure


def _unpickled(path: Path) -> Metadata:
    try:
        with open(path, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except Exception as error:  # a damaged pickle may raise almost anything
        raise ValueError(
            f"the checkpoint's .metadata can't be read ({path}, {path.stat().st_size:,} bytes): {error}"
        ) from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"the checkpoint's .metadata holds a {type(metadata).__name__}, not DCP's Metadata")
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _PLAIN.get(module, ()):
            return super().find_class(module, name)
        if module.startswith("pathlib") and name in _PATHS:
            return _PATHS[name]
        raise pickle.UnpicklingError(
            f"it asks for {module}.{name}, which no checkpoint needs. Someone may have changed the file to run a "
            "program here: don't load it with anything else either"
        )


def _some(names: set[str]) -> str:
    listed = sorted(names)[:4]
    return f"{listed} and {len(names) - 4} more" if len(names) > 4 else f"{listed}"


def _check_files(path: Path, metadata: Metadata) -> None:
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        if Path(name).name != name:
            raise ValueError(f"the checkpoint's .metadata names a file outside of it: {name}")
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if size != end:
            found = "is missing" if size is None else f"has {size:,} bytes instead of {end:,}"
            raise FileNotFoundError(
                f"the checkpoint at {path} is incomplete: {name} {found}. Each rank wrote a file of its own; were all "
                "of them copied, from every machine?"
            )
