"""Checkpoints whose files were copied only in part, or on top of another checkpoint."""

import shutil

import pytest
from torch import nn

from tests.common import POINTER
from tplab.checkpoint.sharded import load_sharded, save_sharded

SIZES = {"small": 2, "large": 50}


@pytest.fixture
def saved(tmp_path):
    for name, size in SIZES.items():
        save_sharded(tmp_path / name, nn.Linear(size, size))
    return tmp_path


@pytest.mark.parametrize("under", SIZES)
def test_a_file_of_another_checkpoint_is_named_with_both_sizes(under, saved):
    (over,) = SIZES.keys() - {under}
    (file,) = (saved / under).glob("*.distcp")
    wanted = file.stat().st_size
    shutil.copy(saved / over / file.name, file)
    with pytest.raises(
        FileNotFoundError, match=rf"{file.name} has {file.stat().st_size:,} bytes instead of {wanted:,}"
    ):
        load_sharded(saved / under, nn.Linear(SIZES[under], SIZES[under]))


def test_a_file_that_the_metadata_does_not_list_is_named_unless_it_is_empty(saved):
    (saved / "small" / "__1_0.distcp").write_bytes(b"")  # of a rank with nothing to write
    load_sharded(saved / "small", nn.Linear(2, 2))
    shutil.copy(saved / "large" / "__0_0.distcp", saved / "small" / "__7_0.distcp")
    with pytest.raises(ValueError, match="__7_0.distcp.*two checkpoints"):
        load_sharded(saved / "small", nn.Linear(2, 2))


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_git_lfs_pointer_is_told_from_a_truncated_file(name, saved):
    (saved / "large" / name).write_text(POINTER)
    with pytest.raises((ValueError, FileNotFoundError), match=rf"{name} .*269,060,552 bytes.*git lfs pull"):
        load_sharded(saved / "large", nn.Linear(50, 50))
