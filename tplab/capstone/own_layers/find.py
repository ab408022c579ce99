"""Find the learner's layers by reading their library, my_tp, as plain data that can be sent to ranks.

    answers = find_answers(Path("my_course"), settings)

Everything in the library has passed its check. For other answers, the course's solutions are used, and the console, the
log and the report say for which ones. With missing="error", the model has to be the learner's alone.
"""

import linecache
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tplab.capstone.settings.settings import Missing, Settings
from tplab.course.feedback.verdict import names
from tplab.course.grade.answers import merge
from tplab.course.learn import library
from tplab.course.learn.course_files import Course, Misuse, all_chapters, find_course
from tplab.course.learn.my_tp import FOR_A_GPT, chapters_of, files, modules_of
from tplab.course.learn.passages import extract_from
from tplab.course.notebooks.cells import read_notebook
from tplab.course.notebooks.numbering import chapter_of

MINE, COURSES = "yours", "the course's solution"


class NotReady(ValueError):  # noqa: N818 (it names the state of the answers)
    """Raised when answers are missing. The message lists them and says what to do."""


@dataclass(frozen=True)
class Answers:
    """The files of the library that a model is built from.

    folder     the learner's folder, which has the library and the files that it may import
    files      name in the package -> text: {"linear.py": .., "given/tensor_sharding.py": ..}
    whose      exercise -> "yours" or "the course's solution"
    checked    exercise -> when it passed, or "not passed" if the course's solution takes its place
    lines      exercise -> how many lines of code the answer has, not counting blank lines
    """

    folder: str
    files: dict[str, str]
    whose: dict[str, str]
    checked: dict[str, str]
    lines: dict[str, int]

    def __post_init__(self) -> None:
        self.show_in_tracebacks()  # in this process, too, because it prints the ranks' tracebacks

    def path(self, name: str) -> str:
        """Return the path of one of the package's files, as tracebacks show it."""
        return str(Path(self.folder, library.PACKAGE, name))

    def show_in_tracebacks(self) -> None:
        """Register the source lines in this process, so that tracebacks can quote them."""
        for name, text in self.files.items():
            path = self.path(name)
            linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)


def find_answers(folder: str | Path, settings: Settings | None = None, *, missing: Missing | None = None) -> Answers:
    """Return the learner's layers.

    folder     the learner's folder, or a folder that contains it as my_course/
    missing    as in `Settings`. If None, use the value in `settings`, or "error" without settings

    Unless all answers are in the library, prints whose answer is used for each exercise. Raises NotReady for answers
    that have to be written or fixed first, and FileNotFoundError if the folder doesn't exist.
    """
    missing = missing or (settings.missing if settings else "error")
    course = _course_of(folder)
    place = course.folder / library.PACKAGE
    if edited := library.edited(course):
        raise NotReady(
            f"{names(edited)} in {place} {'was' if len(edited) == 1 else 'were'} edited after the check. Make the "
            "change in the notebook and check it there, or use train.py, which runs the package as it is."
        )
    stored = library.load(course)
    passages = {exercise: one.passage for exercise, one in stored.items()}
    dates = {exercise: one.passed for exercise, one in stored.items()}
    references = {number: read_notebook(all_chapters(course)[number].reference) for number in chapters_of(FOR_A_GPT)}
    whose = {}
    for exercise in FOR_A_GPT:
        reference = references[chapter_of(exercise)]
        solution = extract_from(merge(reference, reference), exercise)
        if exercise not in stored:
            passages[exercise] = solution
        whose[exercise] = COURSES if passages[exercise] == solution else MINE
    lacking = [exercise for exercise in FOR_A_GPT if exercise not in stored]
    if lacking and missing == "error":
        raise NotReady(
            f"The model needs your answers to {names(lacking)}, but your library ({place}) doesn't have them. "
            f"`tplab check {' '.join(map(str, chapters_of(lacking)))}` adds those that pass. Until then, `--missing "
            "tplab` uses the course's solutions for them."
        )
    if lacking:
        print(_whose_is_what(whose, lacking))
    checked = {exercise: f"passed on {dates[exercise]}" if exercise in stored else "not passed" for exercise in whose}
    lines = {exercise: passages[exercise].lines for exercise in whose}
    return Answers(str(course.folder), files(course, modules_of(course, passages), dates), whose, checked, lines)


def _whose_is_what(whose: Mapping[str, str], lacking: Sequence[str]) -> str:
    """Return sentences that say which answers are the learner's and which are the course's, and why."""
    mine = [exercise for exercise, owner in whose.items() if owner == MINE]
    copied = [exercise for exercise in whose if exercise not in (*mine, *lacking)]
    are = "is" if len(mine) == 1 else "are"
    told = [f"{len(mine)} of the {len(whose)} answers {are} yours" + (f": {names(mine)}." if mine else ".")]
    if copied:
        told.append(f"Your library has the course's solutions for {names(copied)}.")
    told.append(
        f"For {names(lacking)}, the course's solution is used, because your own answer hasn't passed its check."
    )
    return " ".join(told)


def _course_of(folder: str | Path) -> Course:
    """Return the course that a folder belongs to. Relative paths start in the current folder or the course's."""
    starts = [Path.cwd()]
    with suppress(Misuse):
        starts.append(find_course(Path.cwd()).material)
    for start in starts:
        if (found := (start / folder).resolve()).is_dir():
            try:
                course = find_course(found)
            except Misuse as error:
                raise NotReady(str(error)) from None
            executed = course.material / "solutions"  # the course's own notebooks have no library
            return Course(course.material, executed) if found == executed.resolve() else course
    raise FileNotFoundError(f"there's no folder {folder} with your notebooks. Use --chapters to say where they are")
