"""Files that were downloaded only in part are named with their sizes and the cure."""

from pathlib import Path

import pytest

from tests.common import POINTER
from tplab.common.downloads import read_json


def test_a_git_lfs_pointer_is_named_with_the_size_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(POINTER)
    with pytest.raises(ValueError, match=rf"{path} .* 269,060,552 bytes.*git lfs pull"):
        read_json(path)


@pytest.mark.parametrize("content", [b"", b'{"a": [1, ', b"[1]"])
def test_what_is_no_json_object_is_named_with_its_size(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path} .*\b{len(content):,} bytes"):
        read_json(path)
