"""The command `tplab`.

    tplab check                   every chapter
    tplab check 4                 chapter 4
    tplab check --exercise 4.2    one exercise, running only what it needs
    tplab check 4 --notebook copy.ipynb
    tplab build                   the notebooks from their sources, see build.py

Exit code: 0 all pass, 1 something does not pass, 2 the notebook can't be read or the command is wrong.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tplab.course.checker import Note, Verdict, check_notebook, exercises_of
from tplab.course.notebook import Unreadable, read_notebook
from tplab.course.report import show_heading, show_note, show_summary, show_verdict
from tplab.course.run import CELL_TIMEOUT, PACKAGE_ROOT


class Misuse(Exception):  # noqa: N818 (it names what the user did)
    """The command can't be carried out; the message says what to do."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tplab", description="The course's command.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="check your answers", description="Check your answers, as last saved.")
    commands.add_parser("build", help="build the notebooks from solutions/*.py", add_help=False)
    check.add_argument("chapters", nargs="*", type=int, metavar="N", help="chapter numbers; without one, every chapter")
    check.add_argument("--exercise", metavar="4.2", help="only this exercise, and only what it needs")
    check.add_argument("--notebook", type=Path, metavar="FILE", help="your notebook, where it isn't in chapters/")
    check.add_argument("--all-cells", action="store_true", help="run also the given cells that no check needs")
    check.add_argument("--timeout", type=float, default=CELL_TIMEOUT, metavar="S", help="seconds for one cell")
    check.add_argument("--root", type=Path, help="the course's folder, which holds solutions/ and chapters/")
    options, rest = parser.parse_known_args(argv)
    if options.command == "build":
        from tplab.course.build import main as build  # here, since it takes seconds to import

        return build(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    console = Console(highlight=False)
    try:
        return _check(options, console)
    except (Misuse, Unreadable) as error:
        Console(stderr=True, highlight=False).print(Text(str(error), style="red"))
        return 2
    except KeyboardInterrupt:
        console.print("stopped")
        return 130


def _check(options: argparse.Namespace, console: Console) -> int:
    root = options.root or find_root(Path.cwd())
    passed = total = 0
    code = 0
    jobs = _jobs(options, root)
    for place, (stem, path) in enumerate(jobs):
        if place:
            console.print()
        try:
            good, all_of_it = _check_chapter(options, console, root, stem, path)
        except Unreadable as error:
            if len(jobs) == 1:
                raise
            console.print(Text(str(error), style="red"))
            code = 2
            continue
        passed, total = passed + good, total + all_of_it
    if len(jobs) > 1:
        console.print(f"\n{passed} of {total} exercises pass in {len(jobs)} chapters.")
    return code or int(passed < total)


def find_root(start: Path) -> Path:
    """The course's folder: here, above here, or where the package lies."""
    for folder in (start, *start.parents, PACKAGE_ROOT):
        if (folder / "chapters").is_dir() and any((folder / "solutions").glob("[0-9][0-9]_*.ipynb")):
            return folder
    raise Misuse("There is no course here. Go to the folder that holds chapters/ and solutions/, or give it as --root.")


def _jobs(options: argparse.Namespace, root: Path) -> list[tuple[str, Path]]:
    """Chapter names and the learner's notebook for each."""
    stems = {int(path.stem[:2]): path.stem for path in sorted((root / "solutions").glob("[0-9][0-9]_*.ipynb"))}
    wanted = list(options.chapters)
    if options.exercise:
        first = options.exercise.partition(".")[0]
        if not first.isdigit() or wanted not in ([], [int(first)]):
            raise Misuse(
                f"There is no exercise {options.exercise} here. Write it like this: tplab check --exercise 4.2"
            )
        wanted = [int(first)]
    if options.notebook and not wanted:
        number = options.notebook.name[:2]
        if not number.isdigit():
            raise Misuse(f"Say which chapter {options.notebook.name} is: tplab check 4 --notebook {options.notebook}")
        wanted = [int(number)]
    if options.notebook and len(wanted) > 1:
        raise Misuse("One notebook is one chapter: give one number with --notebook.")
    for number in wanted:
        if number not in stems:
            raise Misuse(f"There is no chapter {number}. There are: {', '.join(map(str, stems)) or 'none'}.")
    return [
        (stems[number], options.notebook or root / "chapters" / f"{stems[number]}.ipynb") for number in wanted or stems
    ]


def _check_chapter(options: argparse.Namespace, console: Console, root: Path, stem: str, path: Path) -> tuple[int, int]:
    """Check one chapter, printing each verdict as it arrives; returns how many exercises pass, and of how many."""
    reference = read_notebook(root / "solutions" / f"{stem}.ipynb")
    numbers = list(exercises_of(reference))
    if options.exercise:
        if options.exercise not in numbers:
            raise Misuse(f"There is no exercise {options.exercise} in chapter {stem}. There are: {', '.join(numbers)}.")
        numbers = [options.exercise]
    stream = check_notebook(
        reference,
        path,
        int(stem[:2]),
        exercises=numbers if options.exercise else None,
        everything=options.all_cells,
        timeout=options.timeout,
    )
    show_heading(console, stem, path)
    waiting = list(numbers)
    verdicts: list[Verdict] = []
    notes: list[str] = []
    with console.status(_doing(waiting)) as status:
        for said in stream:
            if isinstance(said, Note):
                notes.append(said.text)
                continue
            show_verdict(console, said)
            verdicts.append(said)
            waiting.remove(said.number)
            status.update(_doing(waiting))
    for note in notes:
        show_note(console, note)
    show_summary(console, verdicts)
    return sum(verdict.status == "passed" for verdict in verdicts), len(verdicts)


def _doing(waiting: list[str]) -> str:
    return f"checking {waiting[0]}" if waiting else "finishing"


if __name__ == "__main__":
    sys.exit(main())
