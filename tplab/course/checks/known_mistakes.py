"""Run every mistake of an exercise's table as an answer, and find out which question it gets, if any.

    python -m tplab.course.checks.known_mistakes            try the tables that have changed since they were last tried
    python -m tplab.course.checks.known_mistakes --check    only name these tables

`make notebooks` runs the first command, and `make stale` the second. The first one reports every mistake that gets a
different question than the one it stands under, for example because a mistake under an earlier question behaves
identically. The record in `solutions/tables.json` holds a hash of each table and of the code that its questions depend
on. If only the wording of a question, a docstring, or a comment has changed, nothing has to be tried again.

Mistakes that run to their end share one launch per world size and batch of cases. A mistake marked "(fails)" runs by
itself, like a learner's answer, and so do all mistakes of an exercise whose trials depend on the answer, and those that
are left if one of them ends the launch.
"""

import argparse
import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from zlib import crc32

from tplab.common.imports import ImportGraph
from tplab.course.checks.cases import Batch
from tplab.course.checks.choose import ask_about_group
from tplab.course.checks.default_device import MADE_THERE
from tplab.course.checks.exercises import registered, try_answers
from tplab.course.checks.ledger import open_ledger
from tplab.course.checks.observation import Seen
from tplab.course.checks.reference_answers import reference_answers
from tplab.course.checks.trials import OnRanks, TriedCase, ended, observed_by_each
from tplab.course.feedback.verdict import CheckFailed
from tplab.course.notebooks.mistakes import COURSE, SHARED, Mistake, Table, TableError, path_of, shared, tables
from tplab.course.notebooks.numbering import chapter_of, number_of, package
from tplab.course.notebooks.rewrite import keep_solution
from tplab.course.notebooks.source import Chapter, read, sources

FEW = 4  # cases: after them, most mistakes have their question and don't have to run in the others
LAUNCH_SECONDS = 600.0  # dozens of mistakes share a launch, and the machine may be busy
RECORD = Path("solutions", "tables.json")
TPLAB = COURSE.parent
# Code that builds, shows, or grades notebooks, or that shows a launch while it runs
IN_NO_CHECK = re.compile(r"viz/|course/(?!checks/|exercises/)|runtime/(liveview|display|torchrun)\.py")
HAVE_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
UNCHANGED = Mistake("the reference answer", (), fails=False, where="")
PASSES, FAILS = "it passes", "it ends in an error, so it should be marked (fails)"


def questions(number: str, seed: int = 0) -> Iterator[tuple[str, str, str]]:
    """Yield (answer, the question it should get, the question it gets).

    The answers are all those in an exercise's tables and the reference answer, which should pass.
    """
    yield "the reference answer", PASSES, _asked_alone(number, UNCHANGED, seed, ())
    for title, own in _sections_of(number).items():
        trials = [trial for trial in _on_ranks(number) if trial.table(number).title == title]
        asked = _asked_together(number, own, trials, crc32(f"{number} {seed}".encode()) % 10**6) if trials else {}
        for row in own.rows:
            for mistake in row.mistakes:
                name = f"{mistake.where} {mistake.name}"
                gets = asked[mistake.name] if mistake.name in asked else _asked_alone(number, mistake, seed, trials)
                yield name, row.ask, gets.removeprefix(ask_about_group(""))
        for right in own.right:
            yield f"{right.where} {right.name}", PASSES, _asked_alone(number, right, seed, ())


def _on_ranks(number: str) -> list[OnRanks]:
    """Return the trials of an exercise if all of them are on ranks and none depends on the answer."""
    trials = registered(number).trials
    found = [] if callable(trials) else [trial for trial in trials if isinstance(trial, OnRanks)]
    return [] if callable(trials) or len(found) < len(trials) else found


def _sections_of(number: str) -> dict[str, Table]:
    found = tables(path_of(chapter_of(number)))
    return {title: each for title, each in found.items() if title.split()[0] == number}


def _asked_alone(number: str, answer: Mistake, seed: int, trials: Sequence[OnRanks]) -> str:
    """Return the question for an answer in these trials, or in the whole check if there are none."""
    answers = tuple(reference_answers(number, answer.of).values())
    try:
        try_answers(number, answers, crc32(f"{answer.name} {seed}".encode()) % 10**6, trials)
    except CheckFailed as failure:
        return FAILS if trials and failure.report and not answer.fails else failure.question
    return PASSES


def _asked_together(number: str, own: Table, trials: list[OnRanks], seed: int) -> dict[str, str]:
    """Return {mistake: question} for a table's mistakes, or for those that ran before one of them ended the launch."""
    mistakes = {mistake.name: reference_answers(number, mistake.of) for mistake in own.mistakes if not mistake.fails}
    asked: dict[str, str] = {}
    on_the_cpu: set[str] = set()
    with open_ledger(number, seed):
        for trial in trials:
            for batch in _in_small(trial.batches()):
                waiting = {name: trial.answer(named) for name, named in mistakes.items() if name not in asked}
                try:
                    runs = observed_by_each(trial, [*waiting.values()], batch, LAUNCH_SECONDS)
                except CheckFailed:  # one of them ends the launch, so each of them has to run by itself
                    return asked
                seen = dict(zip(waiting, runs, strict=True))
                asked |= _questions(number, trial, batch, seen)
                on_the_cpu |= {
                    name
                    for name, cases in seen.items()
                    if any(rank.get(MADE_THERE) for ranks in cases for rank in ranks)
                }
    return {name: asked.get(name, shared("device") if name in on_the_cpu else PASSES) for name in mistakes}


def _in_small(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Split each batch into a few cases, the other cases, and the twins, because most mistakes are wrong early on."""
    for batch in batches:
        original = [index for index, case in enumerate(batch.cases) if not case.twin]
        twins = [index for index, case in enumerate(batch.cases) if case.twin]
        yield from map(batch.only, filter(None, (original[:FEW], original[FEW:], twins[:FEW], twins[FEW:])))


def _questions(number: str, trial: OnRanks, batch: Batch, seen: Mapping[str, Sequence[Seen]]) -> dict[str, str]:
    """Return {mistake: question} for the mistakes that are wrong in one of a batch's cases.

    seen: {mistake: what each rank observed, in each case}
    """
    asked: dict[str, str] = {}
    tried = [TriedCase(trial, batch, index) for index in range(len(batch.cases))]
    known = [cache(partial(case.known_mistakes, number, LAUNCH_SECONDS)) for case in tried]
    for name, cases in seen.items():
        for index, observed in enumerate(cases):
            if ended(observed):
                asked[name] = f"{FAILS}: {observed}"
                break
            differences, _ = tried[index].compare(observed)
            if differences:
                asked[name] = tried[index].question(trial.table(number), observed, differences, known[index])
                break
    return asked


def tried(root: Path) -> dict[str, str]:
    """Return {exercise: its fingerprint when all its mistakes got the questions they stand under} from the record."""
    record = root / RECORD
    return json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}


def fingerprint(chapter: Chapter, number: str) -> str:
    """Return a hash of what determines the questions that an exercise's mistakes get, except for their wording.

    That's the rows of its tables, the chapter's reference answers and setup, and the code that the chapter and its
    checks import, apart from code that no check runs or that doesn't influence its result.
    """
    digest = hashlib.sha256()
    for cell in chapter.cells:
        if cell.role == "exercise" or (cell.code and "setup" in cell.tags):
            digest.update(keep_solution(cell.text).encode())
    for path, code in _code_behind(chapter.path):
        digest.update(f"{path}\n{code}".encode())
    for title, own in (*_sections_of(number).items(), *tables(SHARED).items()):
        asks = [row.ask for row in own.rows]
        rows = [
            (asks.index(row.ask), row.key, row.symptoms, [(m.name, m.changes, m.fails) for m in row.mistakes])
            for row in own.rows
        ]
        right = [(answer.name, answer.changes) for answer in own.right]
        digest.update(json.dumps([title, rows, right]).encode())
    return digest.hexdigest()[:16]


@cache
def _code_behind(chapter: Path) -> list[tuple[str, str]]:
    """Return (path, code) for the modules that a chapter's source and its checks import."""
    checks = (COURSE / "exercises" / package(number_of(chapter.stem))).glob("*.py")
    needed = _imports().closure([chapter, *checks]) - {chapter}
    paths = {path.relative_to(TPLAB).as_posix(): path for path in needed}
    return [(name, _code(path)) for name, path in sorted(paths.items()) if not IN_NO_CHECK.match(name)]


@cache
def _imports() -> ImportGraph:
    return ImportGraph(TPLAB.parent, "tplab")


@cache
def _code(path: Path) -> str:
    """Return a module's code without docstrings, comments, and blank lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, HAVE_DOCSTRINGS) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


def problems(number: str) -> list[str]:
    """Return every mistake of an exercise that gets a different question than its own, with the line of its table."""
    rows = [row for own in (*_sections_of(number).values(), *tables(SHARED).values()) for row in own.rows]
    lines = {row.ask: f"it gets the question of {row.where}: {row.ask}" for row in reversed(rows)}
    found = []
    try:
        for name, wanted, asked in questions(number):
            if asked != wanted:
                should = "pass" if wanted == PASSES else "get the question above it"
                found.append(f"{name!r} should {should}, but {lines.get(asked, asked)}")
    except TableError as error:
        found.append(str(error))
    return found


def _problems_of_each(numbers: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (exercise, its problems). There are two processes, so one can compare while ranks of the other run."""
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        yield from zip(numbers, pool.map(problems, numbers), strict=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Try the tables of mistakes that have changed.")
    parser.add_argument("--check", action="store_true", help="only name these tables; exit 1 if there are any")
    options = parser.parse_args(argv)
    root = Path(".")  # of the repository
    chapters = [read(path) for path in sources(root)]
    now = {number: fingerprint(chapter, number) for chapter in chapters for number in chapter.of_role("exercise")}
    before = tried(root)
    changed = [number for number in now if before.get(number) != now[number]]
    if options.check:
        for number in changed:
            print(f"the table of mistakes of {number}, or code that it depends on, has changed; run `make notebooks`")
        return int(bool(changed))
    failed = False
    for number, found in _problems_of_each(changed):
        print("\n".join(f"refused     {each}" for each in found) or f"tried       {number}", flush=True)
        if found:
            failed = True
            del now[number]
    if now != before:
        (root / RECORD).write_text(json.dumps(now, indent=0) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
