"""What the tests of a process share: a browser, JupyterLab on a learner's folder, and the book, built once."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page

from tests import ROOT
from tests.browser.lab import Lab, browser, chromium_path, lab_server

DRAWN = "02_splitting_matrices"  # the chapter in which a reader can step through the pictures of controls


@pytest.fixture(scope="session")
def chromium() -> Iterator[BrowserContext]:
    if chromium_path() is None:
        pytest.skip("needs Chromium or Chrome (or its path in the variable CHROMIUM)")
    with browser() as found:
        yield found


@pytest.fixture
def page(chromium: BrowserContext) -> Iterator[Page]:
    """A window, still empty."""
    page = chromium.new_page()
    yield page
    page.close()


@pytest.fixture(scope="session")
def lab(chromium: BrowserContext, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab on a folder in which a learner has just started."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    with lab_server(tmp_path_factory.mktemp("course")) as server:
        yield Lab(chromium, server)


@pytest.fixture(scope="session")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the book's pages. A warning of Sphinx is a failure."""
    folder = tmp_path_factory.mktemp("book")
    sphinx = ["-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"]
    command = [sys.executable, *sphinx, str(ROOT / "docs"), str(folder)]
    environment = {**os.environ, "NO_COLOR": "1", "BOOK_STATES": DRAWN}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder
