"""Files that were downloaded only in part are named with their sizes and the cure, and complete ones are accepted."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.common import POINTER
from tplab.common.downloads import check_safetensors, read_json


@pytest.mark.parametrize("read", [read_json, check_safetensors])
def test_a_git_lfs_pointer_is_named_with_the_size_of_its_file(read, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text(POINTER)
    with pytest.raises(ValueError, match=rf"{path} .* 269,060,552 bytes.*git lfs pull"):
        read(path)


@pytest.mark.parametrize("content", [b"", b'{"a": [1, ', b"[1]"])
def test_what_is_no_json_object_is_named_with_its_size(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path} .*\b{len(content):,} bytes"):
        read_json(path)


def test_a_safetensors_file_is_accepted_with_exactly_its_number_of_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3, 5), "b": torch.ones(2, dtype=torch.bfloat16), "c": torch.ones(0)}, path)
    data = path.read_bytes()
    check_safetensors(path)
    header = int.from_bytes(data[:8], "little")
    assert len(data) == 8 + header + 64
    parts = [data[:size] for size in (0, 5, 8 + header - 1, 8 + header, len(data) - 1)]
    for content in (*parts, data + b"\0", b"<!DOCTYPE html>"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{path} .*\b{len(content):,} bytes") as caught:
            check_safetensors(path)
        if len(content) >= 8 + header:
            assert f"{len(data):,} bytes" in str(caught.value)
