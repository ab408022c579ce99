"""Chapter 10: load a Hugging Face folder so that each rank reads only its own slices.

    folder/config.json                       the sizes, see `tplab.gpt.hugging_face_config`
    folder/model.safetensors                 all tensors, or
    folder/model.safetensors.index.json      for each tensor, the file that has it
    folder/model-00001-of-00004.safetensors

A safetensors file begins with the place of each tensor, so a slice can be read without the rest. Each chunk of a rank's
shards (see `tplab.checkpoint.pieces`) is a slice of one tensor, or of several that we concatenate. It is read and
copied into the parameter, so at no time does a rank have more than its shards and one slice. There is no communication.

    bytes read by a rank = bytes of its shards, without padding, in the file's dtype

The files can't run any code, unlike a pickle. (https://huggingface.co/docs/safetensors.)
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tplab.checkpoint.pieces import pieces
from tplab.gpt.hugging_face import Row, family, rows, stored_names, without_place
from tplab.gpt.hugging_face_config import gpt_config
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
WITHOUT_EFFECT = {"dropout", "flash_attention"}  # fields of GPTConfig that weights don't depend on


def config_of_folder(folder: str | PathLike) -> GPTConfig:
    """Return the GPTConfig of a Hugging Face folder. Raises ValueError for a model that we don't have."""
    return gpt_config(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))


@torch.no_grad()
def load_folder(model: ParallelGPT, folder: str | PathLike) -> int:
    """Copy the weights of a Hugging Face folder into the model's shards; return how many bytes this rank has read.

    The model is made with `ParallelGPT(config_of_folder(folder))`. It may have another dropout, a shorter seq_length if
    its positions are rotary, and any dtype. Raises ValueError if its config, or the name or shape of a tensor, doesn't
    match, and FileNotFoundError if the folder has no safetensors file.
    """
    folder = Path(folder)
    _check_config(model.config, config_of_folder(folder))
    with ExitStack() as files:
        stored = _Stored(folder, model.config, files)
        parameters, table = dict(model.named_parameters()), rows(model.config)
        if left := without_place(stored.files, model.config):
            raise ValueError(
                f"{len(left)} tensors of {folder} have no place in this {family(model.config)}: {left[:5]}"
            )
        is_tied_twice = model.config.tied_embedding and "lm_head.weight" in stored.files
        for row in table:
            stored.check(row)
        for row in table:
            parameter = parameters[row.ours]
            sharding = getattr(parameter, "tensor_parallel", None)
            own = pieces(parameter, sharding, model.rank, model.world_size)
            if own.padded():
                parameter.zero_()
            shapes = [stored.shape(name, row.turned) for name in row.theirs]
            whole = [sum(shape[0] for shape in shapes), *shapes[0][1:]]
            if list(own.whole_shape) != whole:
                raise ValueError(f"{row.ours} is {whole} in {folder}; the model needs {list(own.whole_shape)}")
            for offset, view in own.views.items():
                stored.fill(view, offset, row)
                if row.ours == "embedding.weight" and is_tied_twice:
                    stored.check_equal(view, offset, "lm_head.weight")
        return stored.bytes_read


class _Stored:
    """The tensors of a folder, by the names of the model with its output layer. Only slices are read."""

    def __init__(self, folder: Path, config: GPTConfig, stack: ExitStack) -> None:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ImportError("loading a Hugging Face folder needs safetensors: pip install safetensors") from error
        self.folder, self.bytes_read = folder, 0
        opened = {
            name: stack.enter_context(safe_open(folder / name, framework="pt", device="cpu"))
            for name in sorted(set(_file_names(folder).values()))
        }
        in_files = {name: file for file in opened.values() for name in file.keys()}  # noqa: SIM118, not a dict
        self.names = stored_names(in_files, config)
        self.files: dict[str, Any] = {name: in_files[stored] for name, stored in self.names.items()}

    def slice_of(self, name: str) -> Any:
        return self.files[name].get_slice(self.names[name])

    def shape(self, name: str, turned: bool) -> list[int]:
        """Return the tensor's shape, or, if it is stored [in, out], that of its transpose."""
        shape = self.slice_of(name).get_shape()
        return shape[::-1] if turned else shape

    def check(self, row: Row) -> None:
        if missing := [name for name in row.theirs if name not in self.files]:
            raise ValueError(f"{row.ours} should come from {', '.join(missing)}, which {self.folder} lacks")

    def fill(self, view: Tensor, offset: torch.Size, row: Row) -> None:
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

    def check_equal(self, view: Tensor, offset: torch.Size, name: str) -> None:
        place = [slice(o, o + n) for o, n in zip(offset, view.shape, strict=True)]
        if not torch.equal(self.read(name, place).to(view), view):
            raise ValueError(
                f"tie_word_embeddings is set in {self.folder / 'config.json'}, but {name} differs from the embedding"
            )


def _file_names(folder: Path) -> Mapping[str, str]:
    """Return {tensor name: file name}. For a single file, the only key is ""."""
    if (folder / INDEX).is_file():
        files = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        if outside := [name for name in files.values() if Path(name).name != name]:
            raise ValueError(f"{folder / INDEX} names a file outside of the folder: {outside[0]}")
        return files
    if (folder / SINGLE).is_file():
        return {"": SINGLE}
    raise FileNotFoundError(
        f"there is no {SINGLE} and no {INDEX} in {folder}. Older formats, such as pytorch_model.bin, are pickles, "
        "which can run any code: convert them with save_pretrained"
    )


def _check_config(own: GPTConfig, stored: GPTConfig) -> None:
    own, stored = (replace(c, num_kv_heads=c.kv_heads, ffn_hidden_size=c.ffn_size) for c in (own, stored))
    shorter = not own.learned_positions and own.seq_length <= stored.seq_length
    ignored = WITHOUT_EFFECT | ({"seq_length"} if shorter else set())
    for name in (field.name for field in fields(GPTConfig) if field.name not in ignored):
        mine, theirs = getattr(own, name), getattr(stored, name)
        if mine != theirs:
            raise ValueError(f"the model has {name}={mine!r}, and the folder's config.json {theirs!r}")
