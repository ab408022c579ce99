"""The index: it names what is there, in the order and the words of the README, and runs."""

import re
import shlex

import nbformat
import pytest

from tests import ROOT
from tplab.course.commands import cli
from tplab.course.notebooks import build
from tplab.course.notebooks.numbering import START_NUMBER, number_of, parse_chapter
from tplab.course.notebooks.source import read, sources

INDEX = read(ROOT / "solutions" / "index.py")
TEXT = "\n".join(cell.text for cell in INDEX.cells)
ROW = re.compile(r"^\| (start|\d\d) \| \[(.+)\]\((?:.+/)?(.+)\) \| (.+?) \|(?: (.*?) ?\|)?$", re.MULTILINE)


def rows(text: str) -> dict[int, tuple[str, str, str, str]]:
    """Chapter number: title, file, what is built, exercises."""
    return {parse_chapter(number): tuple(columns) for number, *columns in ROW.findall(text)}


def test_index_has_the_chapters_of_the_readme():
    index = {number: row[:3] for number, row in rows(TEXT).items()}
    assert index == {number: row[:3] for number, row in rows((ROOT / "README.md").read_text()).items()}
    assert list(index) == list(range(START_NUMBER, 16))


def test_index_links_to_every_chapter_and_says_how_much_it_asks():
    there, minutes = {}, []
    for path in sources(ROOT):
        exercises = len(read(path).of_role("exercise"))
        minutes.append(int(re.search(r"(\d+) minutes", path.read_text())[1]))
        there[number_of(path.stem)] = (f"{path.stem}.ipynb", [exercises, minutes[-1]])
    told = {number: (row[1], [*map(int, re.findall(r"\d+", row[3]))]) for number, row in rows(TEXT).items()}
    assert told == there
    assert all((ROOT / "chapters" / file).exists() for file, _ in there.values())
    each = rf"\b{min(minutes[1:])}\D{{1,5}}{max(minutes[1:])} minutes"  # but for the start page
    assert re.search(each, TEXT)
    assert re.search(each, (ROOT / "README.md").read_text())
    assert f" {sum(minutes) // 60} hours" in TEXT


def test_index_begins_with_the_progress_page_and_fits_its_source():
    code = [cell.text for cell in INDEX.cells if cell.code]
    assert code == ["from tplab.course import progress\n\nprogress()"]
    notebook = nbformat.read(ROOT / "solutions" / "index.ipynb", as_version=4)
    output = next(cell for cell in notebook.cells if cell.cell_type == "code").outputs[0]
    assert re.search(r"\b0 of \d\d\b", output.data["text/html"])
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


def test_a_change_of_the_index_is_noticed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "execute", lambda notebook, folder: notebook)
    source = tmp_path / "solutions" / "index.py"
    source.parent.mkdir()

    def main(text: str, *options: str) -> int:
        source.write_text(text)
        return build.main(["--root", str(tmp_path), *options])

    first, second = "# %% [markdown]\n# # A way in\n", "# %% [markdown]\n# # The way in\n"
    assert [main(first), main(first, "--check"), main(second, "--check")] == [0, 0, 1]
    assert "stale       solutions/index.ipynb" in capsys.readouterr().out
