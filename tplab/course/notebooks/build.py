"""Build a chapter's two notebooks from its source.

    solutions/NN_name.py  ->  solutions/NN_name.ipynb  (answers, executed)  ->  chapters/NN_name.ipynb  (no answers)
    solutions/index.py    ->  the same for the index, the page with the course's table of contents
    pictures/moving/      ->  solutions/pictures/ and chapters/pictures/, for each picture that a chapter's text shows

    tplab build              build whatever has changed, or only the given pages: NN ..., "start" or "index"
    tplab build --force      execute everything again
    tplab build --check      list stale notebooks and errors in tables of mistakes (exit code 1 if there are any)

A chapter whose text has changed keeps its outputs; its cells run again once code or checks have changed. Everything
except execution is a pure function, so two builds from the same outputs are byte-for-byte identical.
"""

import argparse
import copy
import hashlib
import sys
import time
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from tplab.course.notebooks import mistakes
from tplab.course.notebooks.numbering import INDEX, argument, number_of, package
from tplab.course.notebooks.outputs import ExecutionError, execute, what_is_compared
from tplab.course.notebooks.pictures import copies
from tplab.course.notebooks.rewrite import blank_exercise, blank_prediction, fold_hints, keep_solution, task_heading
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
    if not (blank or chapter.is_index):
        notebook.metadata["tplab"] = {"checks": fingerprint(chapter.number)}
    titles = {number: cell.attributes["title"] for number, cell in chapter.of_role("task").items()}
    taken: set[str] = set()
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
    for path in [
        *sorted(folder.glob("*.py")),
        *folder.glob("predictions.md"),
        *(COURSE / f"{name}.py" for name in SHOWING),
    ]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return digest.hexdigest()[:16]


def _text(cell: Cell, blank: bool) -> str:
    if cell.role == "task":
        return task_heading(cell.text, cell.number, **cell.attributes)
    if cell.role == "hints":
        return fold_hints(cell.text)
    if cell.role == "exercise":
        return blank_exercise(cell.text, cell.number) if blank else keep_solution(cell.text)
    if cell.role == "predict" and blank:
        return blank_prediction(cell.text)
    return cell.text


def _metadata(cell: Cell, titles: dict[str, str]) -> dict:
    metadata: dict = {}
    if cell.role:
        metadata["tplab"] = {cell.role: cell.number, **cell.attributes}
    if cell.role == "check":
        metadata["tplab"]["title"] = titles[cell.number]
    tags = list(cell.tags)
    if cell.code:
        tags.append("nbval-check-output" if cell.role == "check" else "nbval-ignore-output")
    if tags:
        metadata["tags"] = tags
    return metadata


def _cell_id(cell: Cell, taken: set[str]) -> str:
    """Return an id that is stable across builds, made from the cell's role and number, or else from its content."""
    if cell.role:
        name = f"{cell.role}-{cell.number.replace('.', '-')}"
    else:
        name = "cell-" + hashlib.sha256(f"{cell.code}{cell.text}".encode()).hexdigest()[:10]
    unique, count = name, 1
    while unique in taken:
        count += 1
        unique = f"{name}-{count}"
    taken.add(unique)
    return unique


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
    texts = {root / folder / f"{chapter.stem}.ipynb": to_text(each).encode() for folder, each in notebooks.items()}
    return texts | copies(chapter)


def stale(chapter: Chapter, root: Path) -> list[str]:
    """Return the names of the chapter's files that are stale. This runs no cells."""
    path = root / "solutions" / f"{chapter.stem}.ipynb"
    solution = with_kept_outputs(load(path), chapter)
    if solution is None:
        return [_told(path, root)]
    return [_told(path, root) for path, data in files_of(chapter, solution, root).items() if not _holds(path, data)]


def table_problems(chapter: Chapter) -> list[str]:
    """Return what's wrong with the chapter's tables of mistakes, such as a change that its reference answer lost."""
    if chapter.is_index or not mistakes.path_of(chapter.number).exists():
        return []
    references = {number: keep_solution(cell.text) for number, cell in chapter.of_role("exercise").items()}
    return list(mistakes.problems(mistakes.path_of(chapter.number), references))


def build(chapter: Chapter, root: Path, *, force: bool = False) -> list[str]:
    """Write the chapter's notebooks and pictures if they are stale, and return the names of the files written."""
    path = root / "solutions" / f"{chapter.stem}.ipynb"
    solution = None if force else with_kept_outputs(load(path), chapter)
    if solution is None:
        solution = execute(skeleton(chapter, blank=False), path.parent)
    files = files_of(chapter, solution, root)
    return [_write(path, data, root) for path, data in files.items() if not _holds(path, data)]


def _holds(path: Path, data: bytes) -> bool:
    return path.is_file() and path.read_bytes() == data


def _write(path: Path, data: bytes, root: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return _told(path, root)


def _told(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _name(path: Path) -> str:
    """Return the name of a source on the command line, such as "4", "start" or "index"."""
    return INDEX if path.stem == INDEX else argument(number_of(path.stem))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tplab build", description="Build the course's notebooks.")
    parser.add_argument("chapters", nargs="*", metavar="NN", help='only these pages: chapters, "start" or "index"')
    parser.add_argument("--root", type=Path, default=Path("."), help="the folder that holds solutions/ and chapters/")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a notebook is stale")
    parser.add_argument("--force", action="store_true", help="execute again, also what is up to date")
    options = parser.parse_args(argv)
    wanted = [name.lstrip("0") or "0" for name in options.chapters]
    paths = [path for path in pages(options.root) if not wanted or _name(path) in wanted]
    missing = set(wanted) - {_name(path) for path in paths}
    if missing or not paths:
        numbers = ", ".join(sorted(missing)) or "any chapter"
        print(f"there is no source of chapter {numbers} in {options.root / 'solutions'}", file=sys.stderr)
        return 2
    failed = False
    for path in paths:
        started = time.monotonic()
        try:
            chapter = read(path)
            validate(chapter)
            if options.check:
                found = [f"stale       {name}; run `make notebooks`" for name in stale(chapter, options.root)]
                found += [f"refused     {problem}" for problem in table_problems(chapter)]
                print("\n".join(found) or f"up to date  {path.stem}")
                failed |= bool(found)
            else:
                written = build(chapter, options.root, force=options.force)
                seconds = f"{time.monotonic() - started:.0f} s"
                print("\n".join(f"wrote       {name} ({seconds})" for name in written) or f"up to date  {path.stem}")
        except (SourceError, ExecutionError) as error:
            print(f"refused     {path.name}: {error}", file=sys.stderr)
            failed = True
        sys.stdout.flush()
    return int(failed)
