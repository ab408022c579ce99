"""Chapter 10: load a Hugging Face folder so that each rank reads only its own slices.

    folder/config.json                       the sizes, see `tplab.gpt.hugging_face_config`
    folder/model.safetensors                 all tensors, or
    folder/model.safetensors.index.json      for each tensor, the file that has it
    folder/model-00001-of-00004.safetensors

A safetensors file begins with the position of each tensor, so a slice can be read without the rest. Each chunk of a
rank's shards (see `tplab.tensor.sharding.runs`) is a slice of one tensor, or of several that we concatenate. Chunks are
read one by one and copied into the parameter, so a rank never has more than its shards and one slice. There is no
communication.

    bytes read by a rank = bytes of its shards, without padding, in the file's dtype

If both model.safetensors and an index are there, transformers reads model.safetensors, even if the index and its files
are newer. So we read model.safetensors if the other files are gone, and otherwise have the user delete one generation.

Unlike a pickle, the files can't run any code. (https://huggingface.co/docs/safetensors; transformers,
modeling_utils.py, _get_resolved_checkpoint_files.)
"""

from contextlib import ExitStack
from dataclasses import fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tplab.collectives.by_hand import rank_and_size
from tplab.common.downloads import damaged, read_json
from tplab.gpt.hugging_face import Row, family, lengths, rows, stored_names, without_place
from tplab.gpt.hugging_face_config import gpt_config
from tplab.memory.config import GPTConfig
from tplab.tensor.sharding import check_group, runs, sharding_of
from tplab.tensor.wrappers import plain_parameters

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_TWO_SAVES = "Some of the files are from different saves. Copy or download all of them from the same save"
WITHOUT_EFFECT = {"dropout", "flash_attention"}  # fields of GPTConfig that weights don't depend on


def config_of_folder(folder: str | PathLike) -> GPTConfig:
    """Return the GPTConfig of the model in a Hugging Face folder.

    Raises FileNotFoundError if the folder has no config.json, and ValueError if that file is damaged or describes a
    model that isn't supported.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}: is this the folder of a Hugging Face model?")
    return gpt_config(read_json(path))


@torch.no_grad()
def load_folder(model: Any, folder: str | PathLike) -> int:
    """Copy the weights from a Hugging Face folder into the model's shards. Return how many bytes this rank has read.

    Create the model with `ParallelGPT(config_of_folder(folder))`. You can also pass a pipeline stage of this model,
    which reads only its own layers. The model may have a different dropout, any dtype and, if its positions are rotary,
    a shorter seq_length.

    Raises ValueError if the model's config, or the name or shape of a tensor, doesn't match. Also raises the errors of
    `weight_files`.
    """
    folder, config, parameters = Path(folder), model.config, plain_parameters(model)
    rank, world_size = rank_and_size(model.group)
    _check_config(config, config_of_folder(folder))
    for name, parameter in parameters.items():
        check_group(name, parameter, model.group)
    with ExitStack() as files:
        stored = _Stored(folder, config, files)
        stored.check_names(config)
        table = [row for row in rows(config) if row.ours in parameters]
        if left := parameters.keys() - {row.ours for row in table}:
            raise ValueError(f"{len(left)} parameters of the model aren't those of a GPT: {sorted(left)[:5]}")
        for row in table:
            stored.check_shape(row, _whole_shape(parameters[row.ours], world_size), config)
        for row in table:  # everything fits; nothing has been changed so far
            for view, offset in _chunks(parameters[row.ours], rank, world_size):
                stored.fill(view, offset, row)
                if row.ours == "embedding.weight" and config.tied_embedding and "lm_head.weight" in stored.files:
                    stored.check_equal(view, offset, "lm_head.weight")
        return stored.bytes_read


def _whole_shape(parameter: Tensor, world_size: int) -> list[int]:
    sharding = sharding_of(parameter)
    return list(parameter.shape) if sharding is None else sharding.whole_shape(parameter.shape, world_size)


def _chunks(parameter: Tensor, rank: int, world_size: int) -> list[tuple[Tensor, list[int]]]:
    """Return views of this rank's chunks, each with its offset in the full tensor. Padding is filled with zeros."""
    sharding = sharding_of(parameter)
    nowhere = [0] * parameter.dim()
    if sharding is None:
        return [(parameter, nowhere)]
    dim = sharding.dim % parameter.dim()
    if any(block.padded for block in sharding.blocks):
        parameter.zero_()
    places = runs(sharding, _whole_shape(parameter, world_size)[dim], rank, world_size)
    return [
        (parameter.narrow(dim, place, length), [*nowhere[:dim], start, *nowhere[dim + 1 :]])
        for start, place, length in places
    ]


class _Stored:
    """Reads slices of a folder's tensors by their names in the complete model (with the output layer)."""

    def __init__(self, folder: Path, config: GPTConfig, stack: ExitStack) -> None:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise ImportError("loading a Hugging Face folder needs safetensors: pip install safetensors") from error
        self.folder, self.bytes_read = folder, 0
        places: dict[str, Any] = {}
        for file, listed in weight_files(folder).items():
            try:
                opened = stack.enter_context(safe_open(folder / file, framework="pt", device="cpu"))
            except SafetensorError as error:  # not every byte that the header promises is there
                raise damaged(folder / file, f"isn't a complete safetensors file ({error})") from error
            if absent := sorted(listed.difference(opened.keys())):
                raise ValueError(f"{folder / INDEX} lists {absent[0]} in {file}, which lacks it. {_TWO_SAVES}")
            if twice := sorted(places.keys() & opened.keys()):
                raise ValueError(f"{twice[0]} is both in {file} and in another file of {folder}. {_TWO_SAVES}")
            places |= dict.fromkeys(opened.keys(), opened)
        self.names = stored_names(places, config)
        self.files: dict[str, Any] = {name: places[stored] for name, stored in self.names.items()}

    def slice_of(self, name: str) -> Any:
        return self.files[name].get_slice(self.names[name])

    def shape(self, name: str, turned: bool) -> list[int]:
        """Return the tensor's shape, or the shape of its transpose if it is stored as [in, out]."""
        shape = self.slice_of(name).get_shape()
        return shape[::-1] if turned else shape

    def check_names(self, config: GPTConfig) -> None:
        """Raise ValueError if a tensor that the model needs is missing, or if a stored tensor isn't in the model."""
        for row in rows(config):
            if missing := [name for name in row.theirs if name not in self.files]:
                raise ValueError(f"{row.ours} should come from {', '.join(missing)}, which {self.folder} lacks")
        if left := without_place(self.files, config):
            raise ValueError(f"{len(left)} tensors of {self.folder} have no place in this {family(config)}: {left[:5]}")

    def check_shape(self, row: Row, needed: list[int], config: GPTConfig) -> None:
        """Raise ValueError unless a row's tensors, when concatenated, have the parameter's full shape."""
        for name, length in zip(row.theirs, lengths(row, config) or [needed[0]], strict=True):
            shape, wanted = self.shape(name, row.turned), [length, *needed[1:]]
            if shape != wanted:
                raise ValueError(f"{name} in {self.folder} is {shape}, and {row.ours} needs {wanted}")

    def fill(self, view: Tensor, offset: list[int], row: Row) -> None:
        """Read the part of the concatenated tensors that begins at `offset` and copy it into the view."""
        begin, first, stop = 0, offset[0], offset[0] + view.shape[0]
        for name in row.theirs:
            end = begin + self.shape(name, row.turned)[0]
            low, high = max(begin, first), min(end, stop)
            if low < high:
                others = [slice(o, o + n) for o, n in zip(offset[1:], view.shape[1:], strict=True)]
                part = self.read(name, [slice(low - begin, high - begin), *others], row)
                view[low - first : high - first].copy_(part)
            begin = end

    def read(self, name: str, place: list[slice], row: Row | None = None) -> Tensor:
        turned = row is not None and row.turned
        part = self.slice_of(name)[tuple(place[::-1] if turned else place)]
        self.bytes_read += part.nbytes
        return part.t() if turned else part

    def check_equal(self, view: Tensor, offset: list[int], name: str) -> None:
        place = [slice(o, o + n) for o, n in zip(offset, view.shape, strict=True)]
        if not torch.equal(self.read(name, place).to(view), view):
            raise ValueError(
                f"tie_word_embeddings is set in {self.folder / 'config.json'}, but {name} differs from the embedding"
            )


def weight_files(folder: Path) -> dict[str, set[str]]:
    """Return the safetensors files that have the model's weights, each with the tensors that the index lists for it.

    Raises FileNotFoundError if files are missing, and ValueError if the index is damaged, if it names files outside of
    the folder, or if its files are there besides the single one.
    """
    files = _listed(folder / INDEX) if (folder / INDEX).is_file() else {}
    parts = sorted(name for name in files if name != SINGLE and (folder / name).is_file())
    if (folder / SINGLE).is_file():
        if parts:
            raise ValueError(
                f"{folder} has the weights of two saves. transformers would read {SINGLE}, but there are also the "
                f"files of {INDEX}: {', '.join(parts[:5])}. Delete the files of the save that you don't want"
            )
        files, parts = {SINGLE: files.get(SINGLE, set())}, [SINGLE]
    if not files:
        there = sorted(
            path.name for path in folder.glob("*") if path.suffix in (".safetensors", ".bin", ".gguf", ".pt")
        )
        raise FileNotFoundError(
            f"there is no {SINGLE} and no {INDEX} in {folder}, only {', '.join(there) or 'files without weights'}. "
            "Older formats, such as pytorch_model.bin, are pickles, which can run any code: convert them with "
            "save_pretrained"
        )
    if missing := sorted(files.keys() - set(parts)):
        raise FileNotFoundError(
            f"{folder / INDEX} names {len(files)} files, of which {len(missing)} are missing: "
            f"{', '.join(missing[:5])}. Download them, or copy a complete folder"
        )
    return files


def _listed(index: Path) -> dict[str, set[str]]:
    """Return the tensors that an index lists for each file."""
    places = read_json(index).get("weight_map")
    files: dict[str, set[str]] = {}
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise damaged(index, 'has no "weight_map" from tensor names to file names')
    for tensor, name in places.items():
        files.setdefault(name, set()).add(tensor)
    if outside := [name for name in files if Path(name).name != name]:
        raise ValueError(f"{index} names a file outside of the folder: {outside[0]}")
    return files


def _check_config(own: GPTConfig, stored: GPTConfig) -> None:
    own, stored = (replace(c, num_kv_heads=c.kv_heads, ffn_hidden_size=c.ffn_size) for c in (own, stored))
    shorter = not own.learned_positions and own.seq_length <= stored.seq_length
    ignored = WITHOUT_EFFECT | ({"seq_length"} if shorter else set())
    for name in (field.name for field in fields(GPTConfig) if field.name not in ignored):
        mine, theirs = getattr(own, name), getattr(stored, name)
        if mine != theirs:
            raise ValueError(f"the model has {name}={mine!r}, and the folder's config.json {theirs!r}")
