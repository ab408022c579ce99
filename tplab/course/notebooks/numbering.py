"""Name and order the course's notebooks and exercises.

    00_start.ipynb               the first page, before chapter 00, with exercises S.1, S.2 and predictions S.a, ...
    00_why_parallel.ipynb ...    chapters 00, 01, ... with exercises 0.1, 0.2, ...
    index.ipynb                  the page with the table of contents, which has no exercises

In the code, a chapter is identified by a whole number. For `start`, it is START_NUMBER, which sorts before chapter 0.
"""

import argparse
import re
from pathlib import Path

START, START_PAGE, START_NUMBER, START_PREFIX = "start", "00_start", -1, "S"
INDEX = "index"
EXERCISE = rf"(?:{START_PREFIX}|\d+)\.\d+"  # a regular expression for the number of an exercise


def is_chapter(stem: str) -> bool:
    """Return whether a notebook with this name (without its suffix) is a chapter."""
    return re.match(r"\d\d_", stem) is not None


def number_of(stem: str) -> int:
    """Return the number of the chapter with this file name: 4 for "04_parallel_linear"."""
    return START_NUMBER if stem == START_PAGE else int(stem[:2])


def chapter_files(folder: Path, suffix: str) -> list[Path]:
    """Return the chapters' files with this suffix (".py" or ".ipynb") in a folder, in course order."""
    found = [path for path in folder.glob(f"*{suffix}") if is_chapter(path.stem)]
    return sorted(found, key=lambda path: (number_of(path.stem), path.name))


def parse_chapter(text: str) -> int | None:
    """Return the number of the chapter that a user named, or None if the text names no chapter.

    For example, "4" and "04" give 4, and "start" and "S" give START_NUMBER.
    """
    if text.lower() in (START, START_PREFIX.lower()):
        return START_NUMBER
    return int(text) if text.isdecimal() and text.isascii() else None


def chapter_argument(text: str) -> int:
    """Return the number of the chapter that a command-line argument names. Raises ArgumentTypeError if it's none."""
    number = parse_chapter(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no chapter: give its number, such as 4, or {START}")
    return number


def chapter_of(exercise: str) -> int:
    """Return the number of the chapter that an exercise or a prediction is in. Raises ValueError if it has none."""
    chapter = parse_chapter(exercise.partition(".")[0])
    if chapter is None:
        raise ValueError(f"{exercise!r} is no number of an exercise, such as 4.1 or {START_PREFIX}.1")
    return chapter


def place(exercise: str) -> tuple[int, int]:
    """Return the key by which exercises are sorted: (4, 2) for "4.2"."""
    return chapter_of(exercise), int(exercise.partition(".")[2])


def prefix(chapter: int) -> str:
    """Return what the numbers of a chapter's exercises begin with: "4" for chapter 4, or "S" for the start page."""
    return START_PREFIX if chapter == START_NUMBER else str(chapter)


def argument(chapter: int) -> str:
    """Return the name of a chapter on the command line: "4" or "start"."""
    return START if chapter == START_NUMBER else str(chapter)


def heading(chapter: int) -> str:
    """Return the name of a chapter at the start of a sentence: "Chapter 4" or "The start page"."""
    return "The start page" if chapter == START_NUMBER else f"Chapter {chapter}"


def package(chapter: int) -> str:
    """Return the name of the chapter's package in tplab/course/exercises: "ch04" or "start"."""
    return START if chapter == START_NUMBER else f"ch{chapter:02d}"
