"""Read a notebook file, whatever state it is in, as plain cells.

We don't use nbformat for this, because it takes two seconds to import, and because it rejects notebooks over details
that don't matter to a check.
"""

import json
from dataclasses import asdict, dataclass, field
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
        notebook = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise Unreadable(f"There is no file {path}.") from error
    except OSError as error:
        raise Unreadable(f"{path} can't be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:  # it isn't UTF-8 or JSON
        raise Unreadable(
            f"{path} is not a notebook: it is not valid JSON ({error}). Was it cut short? Or does it hold the marks "
            "of a git merge? Save it again from JupyterLab."
        ) from error
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise Unreadable(f"{path} is not a notebook of format 4. Open it in JupyterLab and save it.")
    return notebook


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
    raw = [asdict(cell) for cell in cells]
    code = [{"cell_type": cell.pop("kind"), **cell} for cell in raw]
    notebook = {"cells": code, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(notebook), encoding="utf-8")
