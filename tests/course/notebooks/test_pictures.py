"""Moving pictures in a chapter's text: what a source must write, and how the files reach notebook, learner and book."""

from pathlib import Path

import pytest

from tests import saying
from tests.course import tiny
from tplab.course.learn import start
from tplab.course.learn.course_files import Course
from tplab.course.notebooks import build
from tplab.course.notebooks.source import SourceError, read

ALT = "A dot moves from left to right"
CELL = f"\n# %% [markdown]\n# Look:\n#\n# ![{ALT}](pictures/dot.svg)\n"
COPIES = ["solutions/pictures/dot.svg", "chapters/pictures/dot.svg"]


def draw(root: Path, text: str = "<svg>1</svg>") -> Path:
    path = root / "pictures" / "moving" / "dot.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A clone of the course, in which the chapter shows a picture. Nothing is executed."""
    root = tmp_path / "clone"
    draw(root)
    tiny.make_unexecuted(root, tiny.source(1) + CELL)
    build.build(chapter_of(root), root)
    return root


def chapter_of(root: Path):
    return read(root / "solutions" / "90_tiny.py")


def test_a_changed_or_missing_picture_is_stale_and_copied_again_and_nothing_is_executed(
    root: Path, monkeypatch
) -> None:
    monkeypatch.setattr(build, "execute", None)
    assert build.main(["--root", str(root), "--check"]) == 0
    draw(root, "<svg>2</svg>")
    assert build.stale(chapter_of(root), root) == COPIES
    assert build.build(chapter_of(root), root) == COPIES
    assert (root / COPIES[1]).read_text() == "<svg>2</svg>"
    (root / COPIES[0]).unlink()
    assert build.main(["--root", str(root), "--check"]) == 1
    assert build.build(chapter_of(root), root) == COPIES[:1]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("pictures/dot.svg", "pictures/dots.svg"),
        (f"[{ALT}]", "[ ]"),
    ],
)
def test_a_picture_that_cannot_be_shown_or_is_not_described_is_refused(old: str, new: str, root) -> None:
    tiny.write(root, tiny.source(1) + CELL.replace(old, new))
    with pytest.raises(SourceError, match=saying(new, ".svg", "pictures/moving/")):
        build.stale(chapter_of(root), root)


def test_start_and_update_bring_the_picture_to_the_learner_and_leave_theirs_alone(root: Path) -> None:
    course = Course(root, root / "my_course")
    own, mine = (course.folder / "pictures" / name for name in ("mine.png", "dot.svg"))
    own.parent.mkdir(parents=True)
    own.write_bytes(b"mine")
    assert start.start(course).moved == []  # it is the course's, so it stays in chapters/
    assert mine.read_text() == "<svg>1</svg>"
    draw(root, "<svg>2</svg>")
    build.build(chapter_of(root), root)
    start.update(course)
    assert mine.read_text() == "<svg>2</svg>"
    assert (root / COPIES[1]).exists()
    mine.unlink()
    start.start(course)
    assert mine.exists()
    assert own.read_bytes() == b"mine"
