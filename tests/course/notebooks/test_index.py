"""The index: it names what is there, in the order and the words of the README, and runs."""

import re
import shlex

import nbformat
import pytest

from tests import ROOT
from tests.course import tiny
from tplab.course.commands import cli
from tplab.course.commands.exercise_status import standings
from tplab.course.learn.course_files import Course
from tplab.course.notebooks import build
from tplab.course.notebooks.numbering import START_NUMBER, parse_chapter
from tplab.course.notebooks.source import read, sources

INDEX = read(ROOT / "solutions" / "index.py")
TEXT = "\n".join(cell.text for cell in INDEX.cells)
ROW = re.compile(r"^\| (start|\d\d) \| (?:\[(.+)\]\((.+)\)|(.+) \(coming\)) \| (.+?) \|(?: (.*?) ?\|)?$", re.MULTILINE)


def rows(text: str) -> dict[int, tuple[str, str, str, str]]:
    """Chapter number: title, file, what is built, exercises."""
    return {
        parse_chapter(number): (linked or coming, (file or "").rpartition("/")[2], built, (exercises or "").strip())
        for number, linked, file, coming, built, exercises in ROW.findall(text)
    }


def test_index_has_the_chapters_of_the_readme():
    index = {number: row[:3] for number, row in rows(TEXT).items()}
    assert index == {number: row[:3] for number, row in rows((ROOT / "README.md").read_text()).items()}
    assert list(index) == list(range(START_NUMBER, 16))


def test_index_links_to_every_chapter_and_says_how_much_it_asks():
    there, minutes = {}, []
    for path in sources(ROOT):
        chapter = read(path)
        minutes.append(int(re.search(r"About (\d+) minutes", path.read_text())[1]))
        exercises = len(chapter.of_role("exercise"))
        there[chapter.number] = (f"{chapter.stem}.ipynb", f"{exercises}, about {minutes[-1]} min")
    linked = {number: (row[1], row[3]) for number, row in rows(TEXT).items() if row[1]}
    assert linked == there
    assert all((ROOT / "chapters" / file).exists() for file, _ in linked.values())
    each = f"takes {min(minutes[1:])} to {max(minutes[1:])} minutes"  # but for the start page
    assert each in TEXT
    assert each in (ROOT / "README.md").read_text()
    assert f"about {sum(minutes) // 60} hours" in TEXT
    chapters = standings(Course(ROOT, ROOT / "chapters"))
    assert [chapter.minutes_left for chapter in chapters] == minutes, "the progress page says the same"


def test_index_begins_with_the_progress_page_and_fits_its_source():
    code = [cell.text for cell in INDEX.cells if cell.code]
    assert code == ["from tplab.course import progress\n\nprogress()"]
    notebook = nbformat.read(ROOT / "solutions" / "index.ipynb", as_version=4)
    output = next(cell for cell in notebook.cells if cell.cell_type == "code").outputs[0]
    assert "exercises passed" in output.data["text/html"]
    links = set(re.findall(r'href="([^"]+\.ipynb)"', output.data["text/html"]))
    assert links
    assert [link for link in links if not (ROOT / "solutions" / link).exists()] == [], "run `tplab build --force index`"
    assert build.stale(INDEX, ROOT) == [], "run `make notebooks`"
    blank = nbformat.read(ROOT / "chapters" / "index.ipynb", as_version=4)
    assert [cell.outputs for cell in blank.cells if cell.cell_type == "code"] == [[]]


@pytest.mark.parametrize("page", ["solutions/index.py", "README.md", "CONTRIBUTING.md"])
def test_commands_that_are_named_exist(page):
    """Every `tplab ...` of the text is a command line that is understood."""
    named = re.findall(r"(?:`|^)(tplab [^`\n#]*?)(?:`| *#| *$)", (ROOT / page).read_text(), re.MULTILINE)
    commands = {command.__name__.rpartition(".")[2] for command in cli.COMMANDS}
    for line in named:
        arguments = shlex.split(line)[1:]
        assert arguments[0] in commands | {"build"}
        if len(arguments) > 1 and arguments[0] != "build":
            assert cli.parse(arguments).command == arguments[0]
    if page == "solutions/index.py":
        assert {line.split()[1] for line in named} >= {"check", "progress", "hint", "solution", "reset", "doctor"}


@pytest.fixture
def course(tmp_path, monkeypatch):
    tiny.make_unexecuted(tmp_path, tiny.source(1))
    (tmp_path / "solutions" / "index.py").write_text("# %% [markdown]\n# # A way in\n")
    monkeypatch.setattr(build, "execute", lambda notebook, folder: notebook)
    return tmp_path


def main(root, *arguments: str) -> int:
    return build.main(["--root", str(root), *arguments])


def test_index_is_built_and_its_change_is_noticed(course, capsys):
    assert main(course, "--check") == 1
    assert "stale       solutions/index.ipynb" in capsys.readouterr().out
    assert main(course, "index") == 0
    assert main(course, "--check") == 0
    (course / "solutions" / "index.py").write_text("# %% [markdown]\n# # The way in\n")
    assert main(course, "--check", "index") == 1
    assert main(course, "--check", "0090") == 0
    assert main(course, "17", "index") == 2
    assert "no source of chapter 17" in capsys.readouterr().err


def test_an_exercise_in_the_index_is_refused(course, capsys):
    with (course / "solutions" / "index.py").open("a") as source:
        source.write('\n# %% predict="1.a"\npredict("1.a", value=4)\n')
    assert main(course, "index") == 1
    assert "predict 1.a in the index; it belongs into a chapter" in capsys.readouterr().err
