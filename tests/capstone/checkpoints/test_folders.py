"""What killed programs left is removed, but not what another machine makes, of whose lock this one knows nothing."""

import os
import time
from pathlib import Path

from tplab.capstone.checkpoints.folders import new_folder


def test_only_what_nobody_makes_any_more_is_removed(tmp_path: Path) -> None:
    with new_folder(tmp_path / "made") as place:
        left = tmp_path / ".making-of-a-killed-one"
        left.mkdir()
        two_days_ago = time.time() - 2 * 24 * 3600
        os.utime(left, (two_days_ago, two_days_ago))
        with new_folder(tmp_path / "another"):
            assert place.is_dir()
            assert not left.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "made"]
