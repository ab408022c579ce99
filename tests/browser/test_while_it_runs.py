"""In a real browser: ranks seen at work while a launch lasts, and the hints in the box of a failed check."""

import json
import shutil

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from tests import ROOT
from tests.browser.lab import NotebookPage, browser, chromium_path, lab_server

SLOW = """\
import time, torch, torch.distributed as dist
from tplab import launch
def slow():
    if dist.get_rank() == 2:
        time.sleep(8)
    dist.all_reduce(torch.ones(2))
launch(slow, 3)"""

WRONG = """\
from tplab.course import check
def shard(tensor, dim, rank, world_size):
    return tensor.narrow(dim, 0, tensor.shape[dim] // world_size).clone()
def unshard(shards, dim):
    return torch.cat(shards, dim)
check("2.1", shard, unshard)"""

CELLS = {"slow": SLOW, "wrong": WRONG}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A course with the reference of chapter 2 and a notebook of our own."""
    folder = tmp_path_factory.mktemp("course")
    (folder / "chapters").mkdir()
    (folder / "solutions").mkdir()
    shutil.copy(ROOT / "solutions" / "02_splitting_matrices.ipynb", folder / "solutions")
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    cells = [new_code_cell(source, id=id) for id, source in CELLS.items()]
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), folder / "chapters" / "mine.ipynb")
    return folder


@pytest.mark.browser
@pytest.mark.timeout(1800)
def test_ranks_are_seen_at_work_and_hints_unfold_one_by_one(folder):
    if chromium_path() is None:
        pytest.skip("needs Chromium or Chrome (or its path in the variable CHROMIUM)")
    if shutil.which("make") is None:
        pytest.skip("needs make")
    with lab_server(folder) as server, browser() as chromium:
        page = NotebookPage(chromium, server, "chapters/mine.ipynb")

        # while the run lasts, a box for each rank; afterwards nothing
        page.start("slow")
        boxes = page.output("slow").locator(".widget-html-content b")
        page.page.get_by_text("waits in all_reduce #1 for rank 2").first.wait_for()
        assert boxes.all_inner_texts() == ["rank 0", "rank 1", "rank 2"]
        assert "● computing" in page.output("slow").inner_text()
        page.wait_until_idle()
        assert boxes.count() == 0
        assert "rank 2" not in page.output("slow").inner_text()

        # one hint at a time
        page.run("wrong")
        summaries = page.output("wrong").locator("details summary")
        assert [summary.is_visible() for summary in summaries.all()] == [True, False, False]
        summaries.nth(0).click()
        assert [summary.is_visible() for summary in summaries.all()] == [True, True, False]
        page.save()
        page.page.close()

        # the file keeps no trace of the view; a copy that nobody trusts still unfolds, without a kernel's help
        saved = json.loads(page.file.read_text())
        outputs = saved["cells"][0]["outputs"]
        assert "widget" not in json.dumps(saved)
        assert [output["data"] for output in outputs if output["output_type"] == "display_data"] == [{}]
        html = saved["cells"][1]["outputs"][0]["data"]["text/html"]
        saved["cells"][1]["outputs"][0]["data"]["text/html"] = [*html, "<script>document.title = 'run'</script>"]
        (folder / "chapters" / "copy.ipynb").write_text(json.dumps(saved))
        copy = NotebookPage(chromium, server, "chapters/copy.ipynb")
        assert copy.output("wrong").locator("script").count() == 0, "JupyterLab has cleaned what it does not trust"
        summaries = copy.output("wrong").locator("details summary")
        assert summaries.count() == 3
        summaries.nth(0).click()
        summaries.nth(1).click()
        assert [summary.is_visible() for summary in summaries.all()] == [True, True, True]
        assert page.errors == copy.errors == []
        assert page.refused == copy.refused == []
