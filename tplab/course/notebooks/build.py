"""Build a chapter's two notebooks from its source.

    solutions/NN_name.py  ->  solutions/NN_name.ipynb  (answers, executed)  ->  chapters/NN_name.ipynb  (no answers)
    solutions/index.py    ->  the same for the index, the page with the course's table of contents
    pictures/moving/      ->  solutions/pictures/ and chapters/pictures/, for each picture that a chapter's text shows

    tplab build              build whatever has changed, or only the given pages: NN ... or index
    tplab build --force      execute everything again
    tplab build --check      list stale notebooks (exit code 1 if there are any)

A chapter whose text has changed keeps its outputs; its cells run again once code or checks have changed. Everything
except execution is a pure function, so two builds from the same outputs are byte-for-byte identical.
"""

import argparse
import copy
import hashlib
import sys
from collections import Counter
from pathlib import Path

import nbformat
from nbclient.exceptions import CellControlSignal, DeadKernelError
from nbformat import NotebookNode

from tplab.common import units
from tplab.course.notebooks.numbering import package
from tplab.course.notebooks.outputs import execute, what_is_compared
from tplab.course.notebooks.pictures import copies
from tplab.course.notebooks.rewrite import blank_exercise, blank_prediction, fold_hints, keep_solution
from tplab.course.notebooks.rules import validate
from tplab.course.notebooks.source import Cell, Chapter, SourceError, pages, read

COURSE = Path(__file__).parents[1]
SHOWING = (  # modules whose wording appears in outputs
    "checks/failures", "checks/ledger", "checks/predictions", "feedback/tracebacks", "feedback/verdict",
)  # fmt: skip
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def skeleton(chapter: Chapter, *, blank: bool) -> NotebookNode:
    """Return the chapter as a notebook without outputs: with answers or, if `blank`, as the learner first sees it."""
    notebook = nbformat.v4.new_notebook(metadata=copy.deepcopy(METADATA))
    titles = {number: cell.attributes["title"] for number, cell in chapter.of_role("task").items()}
    if titles and not blank:
        notebook.metadata["tplab"] = {"checks": fingerprint(chapter.number)}
    taken: Counter[str] = Counter()
    for cell in chapter.cells:
        new = nbformat.v4.new_code_cell if cell.code else nbformat.v4.new_markdown_cell
        made = new(_text(cell, blank), metadata=_metadata(cell, titles))
        made["id"] = _cell_id(cell, taken)
        notebook.cells.append(made)
    return notebook


def fingerprint(number: int) -> str:
    """Return a hash of what determines a chapter's outputs besides its source.

    That's the code of its checks, its predictions, and the modules that word the results. The hash is stored in the
    solution's metadata, so changing a prediction's text makes the solution stale. The questions in `mistakes.md` don't
    count, because an answer that passes is asked none of them.
    """
    digest = hashlib.sha256()
    folder = COURSE / "exercises" / package(number)
    showing = [COURSE / f"{name}.py" for name in SHOWING]
    for path in [*sorted(folder.glob("*.py")), *folder.glob("predictions.md"), *showing]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return digest.hexdigest()[:16]


def _text(cell: Cell, blank: bool) -> str:
    if cell.role == "task":
        title, difficulty, minutes = (cell.attributes[name] for name in ("title", "difficulty", "minutes"))
        dots = "●" * difficulty + "○" * (5 - difficulty)
        told = f"{dots} · about {units.count(minutes, 'minute')}"
        return f"### Exercise {cell.number} · {title}\n\n{told}\n\n{cell.text.strip()}"
    if cell.role == "hints":
        return fold_hints(cell.text)
    if cell.role == "exercise":
        return blank_exercise(cell.text, cell.number) if blank else keep_solution(cell.text)
    if cell.role == "predict" and blank:
        return blank_prediction(cell.text)
    return cell.text


def _metadata(cell: Cell, titles: dict[str, str]) -> dict:
    metadata: dict = {"tplab": {cell.role: cell.number, **cell.attributes}} if cell.role else {}
    if cell.role == "check":
        metadata["tplab"]["title"] = titles[cell.number]
    compared = "nbval-check-output" if cell.role == "check" else "nbval-ignore-output"
    if tags := [*cell.tags, *[compared] * cell.code]:
        metadata["tags"] = tags
    return metadata


def _cell_id(cell: Cell, taken: Counter[str]) -> str:
    """Return an id that is stable across builds, made from the cell's role and number, or else from its content."""
    if cell.role:
        name = f"{cell.role}-{cell.number.replace('.', '-')}"
    else:
        name = "cell-" + hashlib.sha256(f"{cell.code}{cell.text}".encode()).hexdigest()[:10]
    taken[name] += 1
    return name if taken[name] == 1 else f"{name}-{taken[name]}"


def blank_chapter(chapter: Chapter, solution: NotebookNode) -> NotebookNode:
    """Return the learner's notebook, without answers or outputs. Its hints also say what each check compares."""
    notebook = skeleton(chapter, blank=True)
    told = {
        solved.metadata["tplab"]["check"]: what_is_compared(solved.outputs)
        for solved in solution.cells
        if "check" in solved.metadata.get("tplab", {})
    }
    for cell in notebook.cells:
        if more := told.get(cell.metadata.get("tplab", {}).get("hints")):
            cell.source += f"\n\n{more}"
    return notebook


def to_text(notebook: NotebookNode) -> str:
    return nbformat.writes(notebook) + "\n"


def load(path: Path) -> NotebookNode | None:
    """Return a notebook that an earlier build wrote, or None if it's missing or can't be read."""
    try:
        return nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)
    except (OSError, ValueError, nbformat.ValidationError):
        return None


def with_kept_outputs(solution: NotebookNode | None, chapter: Chapter) -> NotebookNode | None:
    """Return the chapter's solution with the outputs of an earlier build, or None if its code has to run again.

    A new text needs no run. A new code cell, an edited one, and checks with another fingerprint do.
    """
    wanted = skeleton(chapter, blank=False)
    if solution is None or wanted.metadata.get("tplab") != solution.metadata.get("tplab"):
        return None
    new, old = ([cell for cell in each.cells if cell.cell_type == "code"] for each in (wanted, solution))
    if [(cell.source, cell.metadata) for cell in new] != [(cell.source, cell.metadata) for cell in old]:
        return None
    for cell, executed in zip(new, old, strict=True):
        cell.outputs, cell.execution_count = executed.outputs, executed.execution_count
    return wanted


def files_of(chapter: Chapter, solution: NotebookNode, root: Path) -> dict[Path, bytes]:
    """Return the contents of the chapter's files: its solution, its blank chapter, and copies of its pictures."""
    notebooks = {"solutions": solution, "chapters": blank_chapter(chapter, solution)}
    texts = {root / folder / f"{chapter.path.stem}.ipynb": to_text(each).encode() for folder, each in notebooks.items()}
    return texts | copies(chapter)


def stale(chapter: Chapter, root: Path) -> list[str]:
    """Return the names of the chapter's files that are stale. This runs no cells."""
    path = root / "solutions" / f"{chapter.path.stem}.ipynb"
    solution = with_kept_outputs(load(path), chapter)
    changed = [path] if solution is None else _changed(files_of(chapter, solution, root))
    return [path.relative_to(root).as_posix() for path in changed]


def build(chapter: Chapter, root: Path, *, force: bool = False) -> list[str]:
    """Write the chapter's notebooks and pictures if they are stale, and return the names of the files written."""
    path = root / "solutions" / f"{chapter.path.stem}.ipynb"
    solution = None if force else with_kept_outputs(load(path), chapter)
    if solution is None:
        solution = execute(skeleton(chapter, blank=False), path.parent)
    changed = _changed(files_of(chapter, solution, root))
    for file, data in changed.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return [file.relative_to(root).as_posix() for file in changed]


def _changed(files: dict[Path, bytes]) -> dict[Path, bytes]:
    """Return those of the files that don't have their contents yet."""
    return {path: data for path, data in files.items() if not path.is_file() or path.read_bytes() != data}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tplab build", description="Build the course's notebooks.")
    parser.add_argument("pages", nargs="*", metavar="NN", help="only these pages, by number or file name")
    parser.add_argument("--root", type=Path, default=Path("."), help="the folder that holds solutions/ and chapters/")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a notebook is stale")
    parser.add_argument("--force", action="store_true", help="execute again, also what is up to date")
    options = parser.parse_args(argv)
    paths = pages(options.root)
    for page in options.pages:
        if page not in {name for path in paths for name in (path.stem, path.stem[:2])}:
            parser.error(
                f"{options.root / 'solutions'} has no page {page}; write its file name, or two digits, like 04"
            )
    if options.pages:
        paths = [path for path in paths if {path.stem, path.stem[:2]} & {*options.pages}]
    failed = False
    for path in paths:
        try:
            chapter = read(path)
            validate(chapter)
            names = stale(chapter, options.root) if options.check else build(chapter, options.root, force=options.force)
            did, remedy = ("stale", "; run `make notebooks`") if options.check else ("wrote", "")
            print("\n".join(f"{did}       {name}{remedy}" for name in names) or f"up to date  {path.stem}", flush=True)
            failed |= options.check and bool(names)
        except (SourceError, CellControlSignal, DeadKernelError) as error:
            print(f"refused     {path.name}: {error}", file=sys.stderr)
            failed = True
    return int(failed)
