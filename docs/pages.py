"""Turns the executed solutions into pages for the book: what the learner is given first, the answer folded below it."""

import shutil
from pathlib import Path
from typing import Any

import nbformat


def write_pages(root: Path, folder: Path) -> list[Path]:
    """Write a page for each chapter; returns them in order.

    root:    the course, which holds chapters/ and solutions/
    folder:  where the pages go; what was there is removed
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pages = []
    for path in sorted((root / "solutions").glob("[0-9][0-9]_*.ipynb")):
        solution = nbformat.read(path, as_version=4)
        chapter = nbformat.read(root / "chapters" / path.name, as_version=4)
        nbformat.write(page(solution, chapter), folder / path.name)
        pages.append(folder / path.name)
    return pages


def page(solution: Any, chapter: Any) -> Any:
    """The solution notebook, with the blank cell of the chapter in front of each folded answer."""
    blanks = {cell["id"]: cell for cell in chapter.cells}
    cells = []
    for cell in solution.cells:
        answered = {"exercise", "predict"} & set(cell.metadata.get("tplab", {}))
        if answered:
            given = nbformat.v4.new_code_cell(blanks[cell["id"]].source, id=f"given-{cell['id']}")
            cells.append(given)
            fold(cell, answered.pop())
        cells.append(cell)
    return nbformat.v4.new_notebook(cells=cells, metadata=solution.metadata)


def fold(cell: Any, what: str) -> None:
    """Hide an answer (with what it shows, for a prediction) until the reader unfolds it."""
    cell.metadata["tags"] = [*cell.metadata.get("tags", []), "hide-cell" if what == "predict" else "hide-input"]
    prompt = "Show the answer" if what == "exercise" else "Show the numbers"
    cell.metadata["mystnb"] = {"code_prompt_show": prompt, "code_prompt_hide": "Hide it"}
