"""Notebooks as other programs save them and accidents leave them: the same answers count.

`merge` decides what of a notebook counts, so each kind is compared there with the same notebook as JupyterLab saves it.
"""

import copy
import json

import pytest

from tests.course import tiny
from tests.course.grade import in_process
from tests.course.grade.in_process import verdicts
from tplab.course.grade.answers import merge
from tplab.course.notebooks.cells import read_notebook


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    with in_process.course(tmp_path_factory.mktemp("tiny"), 4) as folder:
        yield folder


@pytest.fixture
def mine(root):
    """Answers to exercises 1 (right), 2 (wrong) and 3 (right, with a helper in a cell of its own)."""
    learner = tiny.Learner(root / "chapters" / "90_tiny.ipynb")
    learner.answer(1, "return x + x")
    learner.answer(2, "return x + 2")
    learner.answer(3, "return twice(x)")
    learner.insert(learner.place("exercise-90-3"), "def twice(x):\n    return 2 * x")
    return learner


def in_lines(content: dict) -> None:
    """Sources and texts as lists of lines, as every program but ours writes them."""
    for cell in content["cells"]:
        if isinstance(cell["source"], str):
            cell["source"] = cell["source"].splitlines(keepends=True)


def vs_code(content: dict) -> None:
    """VS Code 1.9x: its own metadata at every cell, ids of new cells of eight hex digits."""
    content["metadata"] = {"kernelspec": {"name": "python3"}, "language_info": {"name": "python"}}
    for place, cell in enumerate(content["cells"]):
        cell["metadata"] = cell["metadata"] | {"vscode": {"languageId": "python"}}
        if cell["id"].startswith("mine-"):
            cell["id"] = f"{place:08x}"
    in_lines(content)


def colab(content: dict) -> None:
    """Colab: format 4.0 without ids, metadata of its own at notebook, cells and outputs."""
    content |= {"metadata": {"colab": {"provenance": []}, "accelerator": "GPU"}, "nbformat_minor": 0}
    text = {"output_type": "stream", "name": "stdout", "text": ["6\n"], "metadata": {"colab_type": "text"}}
    for place, cell in enumerate(content["cells"]):
        del cell["id"]
        kept = {"tplab": cell["metadata"]["tplab"]} if "tplab" in cell["metadata"] else {}
        cell["metadata"] = kept | {"id": f"aB{place}_x"}
        if cell["cell_type"] == "code":
            cell["outputs"] = [text]
    in_lines(content)


def copied_on_windows(content: dict) -> None:
    """Copied cell by cell into a new notebook: neither ids nor metadata are left, and lines end as on Windows."""
    for cell in content["cells"]:
        cell["source"] = "".join(cell["source"]).replace("\n", "\r\n")
        del cell["id"]
        cell["metadata"] = {}


def odd_outputs(content: dict) -> None:
    for place, cell in enumerate(content["cells"]):
        if cell["cell_type"] == "code":
            cell.update(outputs=[None, 3, {"output_type": "no such type"}], execution_count="seven")
        if place < 5:
            cell.pop("outputs", None)
            cell.pop("execution_count", None)


def raw_cells(content: dict) -> None:
    raw = {"cell_type": "raw", "id": "raw", "metadata": {}, "source": "def double_2(x): return 6"}
    content["cells"][:0] = [raw | {"cell_type": "heading", "level": 2}, raw]


AS_SAVED_BY = [vs_code, colab, copied_on_windows, odd_outputs, raw_cells]


def sources(root, path) -> list[tuple[str, str]]:
    """The cells that would run, as role and code."""
    merged = merge(read_notebook(root / "solutions" / "90_tiny.ipynb"), read_notebook(path))
    assert merged.missing == {}
    return [(piece.role, piece.source.replace("\r\n", "\n").rstrip("\n")) for piece in merged.pieces]


@pytest.mark.parametrize("change", AS_SAVED_BY)
def test_whoever_saved_it_the_same_answers_count(root, mine, change, tmp_path):
    plain = sources(root, mine.save(tmp_path / "plain.ipynb"))
    assert [code for role, code in plain if role == "exercise"][1] == "def double_2(x):\n    return x + 2"
    changed = copy.deepcopy(mine)
    change(changed.content)
    path = changed.save(tmp_path / "changed.ipynb")
    before = path.read_bytes()
    assert sources(root, path) == plain
    assert path.read_bytes() == before


def test_however_the_file_is_written_the_same_answers_count(root, mine, tmp_path):
    mine.answer(4, "return 2 * x  # größer")
    plain = sources(root, mine.save(tmp_path / "plain.ipynb"))
    text = (tmp_path / "plain.ipynb").read_text(encoding="utf-8")
    path = tmp_path / "changed.ipynb"
    for content in (
        text.encode("utf-8-sig"),
        json.dumps(mine.content, indent=1).replace("\n", "\r\n").encode(),
        json.dumps(mine.content, ensure_ascii=False).encode(),
        (text + "\n\n").encode(),
    ):
        path.write_bytes(content)
        assert sources(root, path) == plain


def reordered(mine):
    mine.cells.reverse()


def doubled(mine):
    mine.content["cells"] = [copy.deepcopy(cell) for cell in mine.cells for _ in range(2)]


def all_in_one_cell(mine):
    """Every exercise merged into the first one's cell."""
    texts = []
    for k in (1, 2, 3):
        texts.append("".join(mine.cell(f"exercise-90-{k}")["source"]))
        if k > 1:
            del mine.cells[mine.place(f"exercise-90-{k}")]
    mine.cell("exercise-90-1")["source"] = "\n\n".join(["def twice(x): return 2 * x", *texts])


def only_the_exercises(mine):
    mine.content["cells"] = [
        cell for cell in mine.cells if cell["id"].startswith("exercise") or "twice" in str(cell["source"])
    ]


@pytest.mark.parametrize("spoil", [reordered, doubled, all_in_one_cell, only_the_exercises])
def test_moved_cells_run(root, mine, spoil):
    spoil(mine)
    said, _ = verdicts(root, mine)
    assert [said[k].status for k in "1234"] == ["passed", "failed", "passed", "to do"]
