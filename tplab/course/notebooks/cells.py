"""Read a notebook file, whatever state it is in, as plain cells.

We don't use nbformat for this, because it takes two seconds to import, and because it rejects notebooks over details
that don't matter to a check.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path


class Unreadable(Exception):  # noqa: N818 (it names the state of a file)
    """Raised for a file that isn't a notebook we can check. The message says what is wrong and what to do."""


@dataclass(frozen=True)
class Cell:
    kind: str  # "code", "markdown", ...
    source: str
    id: str = ""
    metadata: dict = field(default_factory=dict)
    outputs: list = field(default_factory=list)
    execution_count: int | None = None

    @property
    def marks(self) -> dict:
        """The metadata that the build gave the cell, such as {"exercise": "4.1"}. It survives when ids get lost."""
        marks = self.metadata.get("tplab")
        return marks if isinstance(marks, dict) else {}


def read_notebook(path: Path) -> list[Cell]:
    """Read the cells of a notebook file. Raises Unreadable if it isn't a notebook."""
    return parse_cells(load_notebook(path))


def parse_cells(notebook: dict) -> list[Cell]:
    """Return the cells of a notebook's JSON."""
    return [_cell(cell) for cell in notebook["cells"]]


def load_notebook(path: Path) -> dict:
    """Read the JSON of a notebook file. Raises Unreadable unless it's an object with a list of cells."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise Unreadable(f"There is no file {path}.") from error
    except UnicodeDecodeError as error:
        raise Unreadable(f"{path} is not a text file in UTF-8 ({error.reason}). Is it a notebook?") from error
    except OSError as error:
        raise Unreadable(f"{path} can't be read: {error.strerror}.") from error
    try:
        notebook = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: JSON's errors, and integers with thousands of digits
        raise Unreadable(f"{path} is not a notebook: {_what_broke_it(text, error)}") from error
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        old = isinstance(notebook, dict) and "worksheets" in notebook
        hint = "It has notebook format 3; open it in JupyterLab and save it." if old else "It has no list of cells."
        raise Unreadable(f"{path} is not a notebook of format 4. {hint}")
    for number, cell in enumerate(notebook["cells"], 1):
        if not isinstance(cell, dict):
            raise Unreadable(f"{path} is not a notebook: its cell {number} is not a cell.")
    return notebook


def _what_broke_it(text: str, error: Exception) -> str:
    if not text.strip():
        return "the file is empty."
    if re.search(r"^(<<<<<<<|=======|>>>>>>>)", text, re.MULTILINE):
        return "it holds the marks of a git merge (<<<<<<<). Settle the merge, then check again."
    if "\x00" in text:
        return "it is not saved as UTF-8 (UTF-16, perhaps), which Jupyter needs. Save it as UTF-8."
    if isinstance(error, json.JSONDecodeError):
        where = f"line {error.lineno}: {error.msg}"
    else:
        where = "nested too deeply" if isinstance(error, RecursionError) else "a number in it has thousands of digits"
    return f"it is not valid JSON ({where}). Was it cut short? Save it again from JupyterLab."


def _cell(raw: dict) -> Cell:
    source, metadata, outputs = raw.get("source", ""), raw.get("metadata"), raw.get("outputs")
    if isinstance(source, list):
        source = "".join(line for line in source if isinstance(line, str))
    return Cell(
        kind=str(raw.get("cell_type", "")),
        # JSON may contain half of a surrogate pair, such as half of 😀, which can't be encoded
        source=source.encode(errors="replace").decode() if isinstance(source, str) else "",
        id=str(raw.get("id", "")),
        metadata=metadata if isinstance(metadata, dict) else {},
        outputs=outputs if isinstance(outputs, list) else [],
        execution_count=raw.get("execution_count"),
    )


def write_notebook(cells: list[Cell], path: Path) -> None:
    """Write code cells to a notebook that nbval can run."""
    code = [
        {
            "cell_type": "code",
            "id": cell.id,
            "metadata": cell.metadata,
            "source": cell.source,
            "outputs": cell.outputs,
            "execution_count": cell.execution_count,
        }
        for cell in cells
    ]
    notebook = {"cells": code, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(notebook), encoding="utf-8")
