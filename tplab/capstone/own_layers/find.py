"""Find the learner's answers in their notebooks, check them, and store them as plain data that can be sent to ranks.

    answers = find_answers(Path("chapters"), settings)      # checks answers that `tplab check` hasn't already passed
    answers.save(Path(settings.folder, "answers.json"))

An answer is accepted if `tplab check` has passed exactly this code (`tplab.course.tools.fingerprint`), if it is
identical to the course's solution, or if its check passes now. Training uses only accepted answers. Missing and wrong
answers are listed in the error message, or replaced by the course's solutions with missing="tplab".

For each chapter, `Answers` contains the cells that an answer needs: the setup, the answers, and the learner's helper
cells. `tplab.capstone.own_layers.build` runs them on each rank.
"""

import json
import linecache
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tplab.capstone.own_layers.check import Found, look_at
from tplab.capstone.own_layers.link import needed
from tplab.capstone.settings.settings import Settings
from tplab.course.grading.cell_dependencies import select
from tplab.course.grading.merge import Merged, Piece
from tplab.course.learner.course_files import Misuse, all_chapters, find_course

MINE, COURSES = "yours", "the course's solution"


class NotReady(ValueError):  # noqa: N818 (it names the state of the answers)
    """Raised when answers are missing or wrong. The message lists them and says what to do."""


@dataclass(frozen=True)
class Code:
    """A cell to run.

    role        "setup", "given", "exercise" or "own"
    where       the cell's name in tracebacks
    exercise    the number of the exercise that it answers ("" for other cells)
    """

    chapter: int
    role: str
    where: str
    source: str
    exercise: str = ""


@dataclass(frozen=True)
class Answers:
    """The cells that a model is built from, in the order in which they run.

    folder     the folder of the notebooks and of the files that they import
    whose      exercise -> "yours" or "the course's solution"
    checked    exercise -> the reason why the answer was accepted
    """

    folder: str
    codes: tuple[Code, ...]
    whose: dict[str, str]
    checked: dict[str, str]

    def __post_init__(self) -> None:
        self.show_in_tracebacks()  # in this process, too, because it prints the ranks' tracebacks

    def show_in_tracebacks(self) -> None:
        """Register the cells' source lines in this process, so that tracebacks can quote them."""
        for code in self.codes:
            linecache.cache[code.where] = (len(code.source), None, code.source.splitlines(keepends=True), code.where)

    def of_chapter(self, chapter: int) -> list[Code]:
        return [code for code in self.codes if code.chapter == chapter]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")


def read_answers(path: Path) -> Answers:
    """Read the answers that `Answers.save` wrote."""
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return Answers(**{**values, "codes": tuple(Code(**code) for code in values["codes"])})


def find_answers(
    chapters: str | Path,
    settings: Settings | None = None,
    *,
    check: bool = True,
    missing: Literal["error", "tplab"] = "error",
    say: Callable[[str], None] = print,
) -> Answers:
    """Return the answers in a folder's notebooks that a model with these settings needs (None: with any settings).

    check      if False, accept answers without running their checks
    missing    "tplab": use the course's solution for a missing or wrong answer
    say        called with a message for each chapter whose checks run, which takes some seconds

    Raises NotReady, which lists all missing or wrong answers, and FileNotFoundError if the folder doesn't exist.
    """
    folder = _folder_of(chapters)
    try:
        files = all_chapters(find_course(folder))
    except Misuse as error:
        raise NotReady(str(error)) from None
    wanted: dict[int, list[str]] = {}
    for exercise in needed(settings):
        wanted.setdefault(int(exercise.partition(".")[0]), []).append(exercise)
    found = {number: look_at(files[number], folder, exercises) for number, exercises in wanted.items()}
    if check and (missing == "tplab" or not any(chapter.problems for chapter in found.values())):
        for chapter in found.values():
            chapter.run_checks(say)
    if missing == "error":
        _raise_if_not_ready(list(found.values()), chapters)
    codes, whose, checked = [], {}, {}
    for number, chapter in found.items():
        codes += _codes(number, chapter)
        for exercise in wanted[number]:
            replaced = exercise in chapter.problems
            whose[exercise] = COURSES if replaced or chapter.is_copied(exercise) else MINE
            passed = chapter.passed.get(exercise, "not checked")
            checked[exercise] = f"in place of one that {chapter.problems[exercise]}" if replaced else passed
    return Answers(str(folder), tuple(codes), whose, checked)


def _folder_of(chapters: str | Path) -> Path:
    """Return the notebooks' folder, relative to the current folder or else to the course's, as in `tplab check`."""
    starts = [Path.cwd()]
    with suppress(Misuse):
        starts.append(find_course(Path.cwd()).material)
    for start in starts:
        if (folder := (start / chapters).resolve()).is_dir():
            return folder
    raise FileNotFoundError(f"there is no folder {chapters} with your notebooks: say where they are, --chapters ...")


def _raise_if_not_ready(found: list[Found], chapters: str | Path) -> None:
    lines = [
        f"  {exercise:<5} {chapter.titles.get(exercise, '')}: {problem}"
        for chapter in found
        for exercise, problem in chapter.problems.items()
    ]
    if lines:
        numbers = " ".join(str(chapter.files.number) for chapter in found if chapter.problems)
        raise NotReady(
            f"These exercises, of the model that you want to train, are not ready in {chapters}:\n"
            + "\n".join(lines)
            + f"\nWrite them, and see what `tplab check {numbers}` says. "
            "`--layers tplab` trains with the course's own layers meanwhile."
        )


def _codes(number: int, chapter: Found) -> list[Code]:
    """Return the cells to run, in order, with the course's solutions in place of missing or wrong answers."""
    pieces: list[Piece] = []
    for piece in chapter.merged.pieces:
        if piece.number in chapter.problems:
            if piece.role == "check":  # each exercise has one check, below its cell
                pieces.append(Piece("solution", "", chapter.solutions[piece.number], piece.number))
                pieces.append(piece)
            continue
        pieces.append(piece)
    roles = [Piece("exercise", p.id, p.source, p.number, p.reference) if p.role == "solution" else p for p in pieces]
    chosen = select(Merged(roles), chapter.exercises, whole=False)
    names = {id(piece): name for piece, name in zip(roles, _names(number, pieces), strict=True)}
    return [Code(number, p.role, names[id(p)], p.source, p.number) for p in chosen if p.role != "check"]


def _names(number: int, pieces: list[Piece]) -> list[str]:
    """Return the names that the cells have in tracebacks."""
    names, counts = [], dict.fromkeys(("setup", "given", "own"), 0)
    for piece in pieces:
        if piece.role in counts:
            counts[piece.role] += 1
        if piece.role == "own":
            names.append(f"your chapter {number:02d}, cell {counts['own']} of your own")
        elif piece.role == "exercise":
            part = f", {piece.id.rpartition('-part-')[2]}" if "-part-" in piece.id else ""
            names.append(f"your chapter {number:02d}, exercise {piece.number}{part}")
        elif piece.role == "solution":
            names.append(f"the course's solution of exercise {piece.number}")
        else:
            names.append(f"chapter {number:02d}, {piece.role} cell {counts.get(piece.role, 0)}")
    return names
