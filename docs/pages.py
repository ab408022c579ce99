"""Turns the executed solutions into pages for the book: what the learner is given first, the answer folded below it.

A page can't run anything, so it says which pictures have sliders in the notebook. Every picture keeps its description,
and the moving ones stand as files beside the pages, as they do beside the notebooks.
"""

import ast
import re
import shutil
from pathlib import Path
from typing import Any

import nbformat

from tplab.course.notebooks.numbering import chapter_files
from tplab.course.notebooks.pictures import FOLDER as PICTURES

HOW_CLOSE = "how_close.md"  # a page that isn't a notebook
EXPLORE, PLAY = "viz.explore(", "viz.play("


def write_pages(root: Path, folder: Path) -> list[Path]:
    """Write a page for each chapter, and copy the pictures that they show from files; returns the pages in order.

    root:    the course, which holds chapters/ and solutions/
    folder:  where the pages go; what was there is removed
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pages = []
    for path in chapter_files(root / "solutions", ".ipynb"):
        solution = nbformat.read(path, as_version=4)
        chapter = nbformat.read(root / "chapters" / path.name, as_version=4)
        nbformat.write(page(solution, chapter), folder / path.name)
        pages.append(folder / path.name)
    if (root / "solutions" / PICTURES).is_dir():
        shutil.copytree(root / "solutions" / PICTURES, folder / PICTURES)
    for other in (root / "chapters").glob(HOW_CLOSE):
        shutil.copy(other, folder)
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
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\bTurn (the|both) knobs\b", r"In the notebook, turn \1 knobs", cell.source)
        else:
            describe(cell)
        cells.append(cell)
        if cell.cell_type == "code" and (sliders := slider_names(cell.source)):
            names = " and ".join(filter(None, [", ".join(sliders[:-1]), sliders[-1]]))
            what = "a slider" if len(sliders) == 1 else "sliders"
            what = f"a play button and {what}" if PLAY in cell.source else what
            note = f"*In the notebook, this picture has {what} for {names}. Here you see it as it is at the start.*"
            cells.append(nbformat.v4.new_markdown_cell(note, id=f"still-{cell['id']}"))
    return nbformat.v4.new_notebook(cells=cells, metadata=solution.metadata)


def fold(cell: Any, what: str) -> None:
    """Hide an answer (with what it shows, for a prediction) until the reader unfolds it."""
    cell.metadata["tags"] = [*cell.metadata.get("tags", []), "hide-cell" if what == "predict" else "hide-input"]
    prompt = "Show the answer" if what == "exercise" else "Show the numbers"
    cell.metadata["mystnb"] = {"code_prompt_show": prompt, "code_prompt_hide": "Hide it"}


def describe(cell: Any) -> None:
    """Give the cell's picture the description that viz stored with it, which MyST-NB looks for in the cell.

    Raises ValueError if a picture has no description, and if a cell has two pictures: MyST-NB has room for one.
    """
    pictures = [output for output in cell.outputs if "image/png" in output.get("data", {})]
    if not pictures:
        return
    alt = pictures[0].metadata.get("image/png", {}).get("alt", "")
    if len(pictures) > 1 or not alt:
        raise ValueError(
            f"cell {cell['id']} shows {len(pictures)} pictures, the first with the description {alt!r}: "
            "a cell of the book needs a single picture, drawn by viz, which describes it"
        )
    cell.metadata.setdefault("mystnb", {})["image"] = {"alt": alt}


def slider_names(source: str) -> list[str]:
    """Return the names of the sliders that a cell's viz.explore or viz.play shows, as code."""
    if EXPLORE not in source and PLAY not in source:  # (some other cells have magics, which ast can't parse)
        return []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and (control := f"{ast.unparse(node.func)}(") in (EXPLORE, PLAY):
            names = [keyword.arg for keyword in node.keywords if keyword.arg not in (None, "start", "seconds")]
            return [f"`{name}`" for name in [*names, *(["step"] if control == PLAY else [])]]
    return []
