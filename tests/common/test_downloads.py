"""Files that were downloaded only in part are named with their sizes and the cure, and complete ones are accepted."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.common import POINTER
from tplab.common.downloads import check_safetensors, damaged, pointer, read_json


@pytest.mark.parametrize("text", [POINTER, POINTER.replace("\n", "\r\n"), POINTER.rstrip("\n")])
@pytest.mark.parametrize("read", [read_json, check_safetensors])
def test_a_git_lfs_pointer_is_named_with_the_size_of_its_file(read, text: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(text.encode())
    with pytest.raises(ValueError, match=rf"{path} .*\b{len(text)} bytes.* 269,060,552 bytes.*git lfs pull"):
        read(path)


def test_other_files_that_mention_git_lfs_are_no_pointers(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(f"# {POINTER}")
    (tmp_path / "b").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert pointer(tmp_path / "a") is pointer(tmp_path / "b") is None
    assert str(damaged(tmp_path / "b", "is odd")).startswith(f"{tmp_path / 'b'} is odd. It has 43 bytes")


@pytest.mark.parametrize(
    "content",
    [b"", b'{"a": [1, ', b"\xff\xfe\xfa", b"[" * 100_000, b"[1]"],
    ids=["empty", "cut", "bytes", "deep", "list"],
)
def test_what_is_no_json_object_is_named_with_its_size(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path} .*\b{len(content):,} bytes"):
        read_json(path)


def test_json_is_read_with_and_without_a_byte_order_mark(tmp_path: Path) -> None:
    for mark in (b"", b"\xef\xbb\xbf"):
        (tmp_path / "config.json").write_bytes(mark + '{"ä": 1}'.encode())
        assert read_json(tmp_path / "config.json") == {"ä": 1}


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
    for about in ([], {"a": 3}, {"a": {}}, {"a": {"data_offsets": 5}}, {"a": {"data_offsets": [0, None]}}):
        text = json.dumps(about).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(ValueError, match=re.escape(str(path))):
            check_safetensors(path)
    save_file({}, path, metadata={"format": "pt"})
    check_safetensors(path)
