"""The book, built once for all tests of its pages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

DRAWN = "02_splitting_matrices"  # the chapter in which a reader can step through the pictures of controls


@pytest.fixture(scope="session")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the book's pages. A warning of Sphinx is a failure."""
    folder = tmp_path_factory.mktemp("book")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "--fail-on-warning",
        "--keep-going",
        "--quiet",
        str(ROOT / "docs"),
        str(folder),
    ]
    environment = {**os.environ, "NO_COLOR": "1", "BOOK_STATES": DRAWN}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder
