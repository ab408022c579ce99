"""The launcher where it is used: in a real kernel, from notebook cells."""

import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import saying
from tests.runtime.kernel import Cell, Notebook, opened


@pytest.fixture(scope="module")
def book() -> Iterator[Notebook]:
    """A kernel as JupyterLab starts it."""
    yield from opened("chapters/04_parallel_linear.ipynb")


def descendants(book: Notebook) -> list[psutil.Process]:
    """The kernel's fork server, and below it the ranks."""
    return psutil.Process(book.manager.provisioner.pid).children(recursive=True)


def test_a_function_of_a_cell_runs_and_uses_what_other_cells_defined(book: Notebook) -> None:
    book.run("factor = torch.tensor(10.)\ndef helper(x): return x * factor")
    cell = book.run("def f(): return float(helper(dist.get_rank()))\ntplab.launch(f, 3)")
    assert not cell.error
    assert "[0.0, 10.0, 20.0]" in cell.text


def test_an_error_shows_the_cell_and_line_and_nothing_of_the_launcher(book: Notebook) -> None:
    cell = book.run("def bad():\n    x = 1\n    raise ValueError('boom')\ntplab.launch(bad, 2)")
    assert cell.error.startswith("RankError: ranks 0, 1 ")
    assert "line 3, in bad\n    raise ValueError('boom')\nValueError: boom" in cell.error
    assert "  cell [" in cell.error
    assert "launcher.py" not in cell.error


def test_a_deadlock_shows_the_cell_and_line_of_every_rank(book: Notebook) -> None:
    book.run("def skip():\n    if dist.get_rank():\n        dist.all_reduce(torch.ones(3))")
    cell = book.run("tplab.launch(skip, 2)")
    assert cell.error.startswith("Deadlock: ")
    assert re.search(saying("\nrank 0 ", "all_reduce #1 ([3] float32, sum)", "rank 1", "\n  rank 0:"), cell.error)
    assert re.search(saying("cell [", "line 3", "skip", "dist.all_reduce(torch.ones(3))"), cell.error)


STUCK = {
    "in a loop": "while True: pass",
    "stuck in C++": "dist.all_reduce(torch.ones(2)) if dist.get_rank() else time.sleep(1000)",
}


@pytest.mark.parametrize("where", STUCK)
def test_an_interrupt_ends_the_run_and_tells_where_the_ranks_were(book: Notebook, where: str) -> None:
    source = f"def stuck():\n    print('begun', os.getpid())\n    {STUCK[where]}\ntplab.launch(stuck, 2, timeout=None)"
    request = book.start(source)
    shown = book.wait_until_shown(request, "\\n[rank 1] begun")  # below what rank 0 has printed
    server = descendants(book)[0]
    book.manager.interrupt_kernel()
    cell = book.finish(request)
    assert server.status() != psutil.STATUS_ZOMBIE, "the interrupt is for the notebook, not for its fork server"
    assert re.match(saying("KeyboardInterrupt: ", "line 3", "stuck"), cell.error)
    ranks = [int(pid) for pid in re.findall(r"\[rank \d\] begun (\d+)", shown)]
    assert len(ranks) == 2
    assert [pid for pid in ranks if psutil.pid_exists(pid)] == []
    assert "[0, 1]" in book.run("tplab.launch(dist.get_rank, 2)").text


def test_a_warning_on_a_rank_names_the_cell_and_its_line(book: Notebook) -> None:
    cell = book.run("import warnings\ndef warns():\n    warnings.warn('careful')\ntplab.launch(warns, 2)")
    assert f"[rank 1] cell [{cell.number}]:3: UserWarning: careful" in cell.text


# The live view


def shown(cell: Cell) -> list[dict]:
    """The displays that stand in the output area at the end."""
    areas: dict[str, dict] = {}
    for place, message in enumerate(cell.messages):
        content = message["content"]
        if message["msg_type"] in ("display_data", "update_display_data"):
            areas[content.get("transient", {}).get("display_id") or str(place)] = content["data"]
    return list(areas.values())


def test_a_long_run_shows_its_ranks_and_leaves_nothing(book: Notebook, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    late = (
        f"def late():\n    while dist.get_rank() and not os.path.exists({str(seen)!r}):\n        time.sleep(0.05)\n"
        "    dist.all_reduce(torch.ones(2))\n    return 1\n"
    )
    request = book.start(late + "tplab.launch(late, 2)[1]")
    view = book.wait_until_shown(request, "all_reduce #1")
    assert re.search(saying("○", "all_reduce #1", "rank 1", "rank 1"), view)  # whom it waits for, and the next line
    seen.touch()
    cell = book.finish(request)
    assert shown(cell) == [{}]
    assert not cell.error
