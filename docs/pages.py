"""Turns the executed solutions into pages for the book: what the learner is given first, the answer folded below it.

A page can't run anything. Where a notebook has controls, it has buttons that step through pictures drawn in advance
(see states.py). Every picture keeps its description, and the moving ones stand as files beside the pages, as they do
beside the notebooks.
"""

import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import nbformat
from states import as_html, states_of

from tplab import viz
from tplab.course.grade.needs import ids_with_needs
from tplab.course.notebooks.numbering import chapter_files
from tplab.course.notebooks.pictures import FOLDER as PICTURES

HOW_CLOSE = "how_close.md"  # a page that isn't a notebook
STATES = "states"
CONTROLS = re.compile(r"\bviz\.(explore|play)\(")


def write_pages(root: Path, folder: Path, extra: Path, drawn: Collection[str] | None = None) -> list[Path]:
    """Write a page for each chapter, and copy the pictures that they show from files; returns the pages in order.

    root:    the course, which holds chapters/ and solutions/
    folder:  where the pages go; what was there is removed
    extra:   where the pictures of controls go, in a folder of their own; what was there is removed
    drawn:   names of the chapters whose controls' pictures are drawn, by default of all chapters
    """
    for each in (folder, extra):
        shutil.rmtree(each, ignore_errors=True)
        each.mkdir(parents=True)
    pages = []
    for path in chapter_files(root / "solutions", ".ipynb"):
        solution = nbformat.read(path, as_version=4)
        chapter = nbformat.read(root / "chapters" / path.name, as_version=4)
        stepped = step_through(path, extra / STATES) if drawn is None or path.stem in drawn else {}
        nbformat.write(page(solution, chapter, stepped), folder / path.name)
        pages.append(folder / path.name)
    if (root / "solutions" / PICTURES).is_dir():
        shutil.copytree(root / "solutions" / PICTURES, folder / PICTURES)
    for other in (root / "chapters").glob(HOW_CLOSE):
        shutil.copy(other, folder)
    return pages


def page(solution: Any, chapter: Any, stepped: Mapping[str, str]) -> Any:
    """The solution notebook, with the blank cell of the chapter in front of each folded answer.

    stepped:  HTML that stands in place of a cell's output, by the cell's id
    """
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
        if html := stepped.get(cell["id"]):
            cell.outputs = []
            cells.append(nbformat.v4.new_markdown_cell(html, id=f"states-{cell['id']}"))
    return nbformat.v4.new_notebook(cells=cells, metadata=solution.metadata)


def step_through(solution: Path, folder: Path) -> dict[str, str]:
    """Draw the pictures of a chapter's controls into a folder, and return HTML that shows them, by the cells' ids."""
    wanted = [cell["id"] for cell in nbformat.read(solution, as_version=4).cells if CONTROLS.search(cell.source)]
    found = states_of(solution, ids_with_needs(solution, wanted), wanted) if wanted else {}
    folder.mkdir(exist_ok=True)
    shown = {}
    for cell, states in found.items():
        names = [f"{cell}-{number}.png" for number in range(len(states))]
        for name, state in zip(names, states, strict=True):
            (folder / name).write_bytes(state.png)
        shown[cell] = as_html(states, [f"../{folder.name}/{name}" for name in names])
    return shown


def draw_landing(folder: Path) -> None:
    """Draw the pictures of the first page into a folder."""
    folder.mkdir()
    for kind in ("data", "tensor", "pipeline"):
        viz.parallelism(kind).savefig(folder / f"{kind}.png", dpi=150)


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
