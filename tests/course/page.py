"""A kernel as a page of JupyterLab starts it, or as nbclient and nbval do."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.kernel import Notebook, notebook


def opened(page: str | None, first: str, folder: Path | None = None) -> Iterator[Notebook]:
    """A kernel in `folder` whose page has this name, or that has none, once it has run the first cell."""
    with pytest.MonkeyPatch.context() as patch:
        if folder:
            patch.chdir(folder)
        if page:
            patch.setenv("JPY_SESSION_NAME", page)
        else:
            patch.delenv("JPY_SESSION_NAME", raising=False)
        with notebook() as book:
            book.run(first)
            yield book
