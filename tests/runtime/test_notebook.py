"""The launcher where it is used: in a real kernel, from notebook cells."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.runtime.kernel import Cell, Notebook, opened
from tplab.runtime.liveview import WIDGET_VIEW


@pytest.fixture(scope="module")
def book() -> Iterator[Notebook]:
    """A kernel as JupyterLab starts it."""
    yield from opened("chapters/04_parallel_linear.ipynb")


def descendants(book: Notebook) -> list[psutil.Process]:
    """The kernel's fork server, and below it the ranks and the spares."""
    return psutil.Process(book.manager.provisioner.pid).children(recursive=True)


def test_a_function_of_a_cell_runs_and_uses_what_other_cells_defined(book: Notebook) -> None:
    book.run("factor = torch.tensor(10.)\ndef helper(x): return x * factor")
    cell = book.run("def f(): return float(helper(dist.get_rank()))\ntplab.launch(f, 3)")
    assert not cell.error
    assert "[0.0, 10.0, 20.0]" in cell.text


def test_an_error_shows_the_cell_and_line_and_nothing_of_the_launcher(book: Notebook) -> None:
    cell = book.run("def bad():\n    x = 1\n    raise ValueError('boom')\ntplab.launch(bad, 2)")
    assert cell.error.startswith("RankError: ranks 0, 1 failed:")
    assert "line 3, in bad\n    raise ValueError('boom')\nValueError: boom" in cell.error
    assert "  cell [" in cell.error
    assert "launcher.py" not in cell.error


def test_a_deadlock_shows_the_cell_and_line_of_every_rank(book: Notebook) -> None:
    book.run("def skip():\n    if dist.get_rank():\n        dist.all_reduce(torch.ones(3))")
    cell = book.run("tplab.launch(skip, 2)")
    assert cell.error.startswith("Deadlock: the ranks are waiting for something that will never happen:")
    assert "rank 0 never joined all_reduce #1 ([3] float32, sum); rank 1 is waiting in it." in cell.error
    assert "line 3 in skip:  dist.all_reduce(torch.ones(3))" in cell.error
    assert "called at cell [" in cell.error


def test_a_notebook_that_torchrun_started_says_so(book: Notebook) -> None:
    book.run("os.environ.update(TORCHELASTIC_RUN_ID='none', RANK='0', WORLD_SIZE='2')")
    error = book.run("tplab.launch(dist.get_rank, 2)").error
    book.run("for name in ('TORCHELASTIC_RUN_ID', 'RANK', 'WORLD_SIZE'): del os.environ[name]")
    assert "this notebook was started by torchrun, as rank 0 of 2" in error


STUCK = {
    "asleep": "time.sleep(1000)",
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
    assert cell.error.startswith("KeyboardInterrupt: the run was interrupted. Where the ranks were:")
    assert "line 3 in stuck" in cell.error
    ranks = [int(pid) for pid in re.findall(r"\[rank \d\] begun (\d+)", shown)]
    assert len(ranks) == 2
    assert [pid for pid in ranks if psutil.pid_exists(pid)] == []
    assert "[0, 1]" in book.run("tplab.launch(dist.get_rank, 2)").text


def test_the_magic_runs_a_cell_on_every_rank(book: Notebook) -> None:
    book.run("start = torch.ones(2)")
    cell = book.run("%%ranks 3\nx = start * rank\ndist.all_reduce(x)\nx.tolist(), world_size")
    assert not cell.error
    for rank in range(3):
        assert f"[rank {rank}] ([3.0, 3.0], 3)" in cell.text


def test_the_magic_sends_the_variables_that_the_cell_reads_whatever_their_names(book: Notebook) -> None:
    book.run("id, input, n, lr = 7, torch.ones(2), 3, 0.5\ndef named(): return id, rank")
    book.run("import threading\nrank, lock = 5, threading.Lock()\nworld_size = lock")
    read = """%%ranks 2
class Layer:
    lr = lr
def nested():
    return [n + extra for extra in range(2)]
first = id, input.tolist(), f"{n:{n}}", Layer.lr, nested(), named(), [lock for lock in range(2)]
n += 1
id = 8
del input
(first, n, named(), callable(input), len(open("/dev/null").read()), world_size)"""
    cell = book.run(read)
    assert not cell.error
    for rank in range(2):
        before = (7, [1.0, 1.0], "  3", 0.5, [3, 4], (7, rank), [0, 1])
        assert f"[rank {rank}] {(before, 4, (8, rank), True, 0, 2)}" in cell.text


ASSIGNED_FIRST = ["lock = 3", "import math as lock", "def lock(): ...", "for lock in [3]: ...", "(lock := 3)",
                  "with open('/dev/null') as lock: ...", "def f():\n    global lock\n    lock = 3\nf()"]  # fmt: skip


def test_the_magic_does_not_need_a_variable_that_the_cell_assigns(book: Notebook) -> None:
    book.run("import threading\nlock = input = threading.Lock()")
    source = "\n".join(f"{assigns}\nprint(type(lock))\ndel lock" for assigns in ASSIGNED_FIRST)
    cell = book.run(f"%%ranks 1\n{source}\ninput = 4\nprint(input)")
    assert not cell.error
    kinds = [int, type(re), type(lambda: 0), int, int, type(sys.__stdout__), int]
    assert cell.text.count("<class") == len(kinds)
    assert [str(kind) for kind in kinds] == re.findall("<class '.*?'>", cell.text)


def test_the_magic_names_a_variable_that_the_cell_reads_and_that_cannot_be_sent(book: Notebook) -> None:
    book.run("import threading\nlock = threading.Lock()")
    assert "['lock'], of type lock, can't be sent" in book.run("%%ranks 1\nlock").error


def test_a_semicolon_hides_the_value_under_the_magic(book: Notebook) -> None:
    shown = {"rank; 'a;'": "'a;'", "'a'  # ;": "'a'", "(4\n)": "4"}
    hidden = ["rank;", "rank ;  # why", "'a;';\n\n# the end", "x = rank;", "x = rank", "None", "rank \\\n;"]
    for code in [*shown, *hidden]:
        cell = book.run(f"%%ranks 1\n{code}")
        assert not cell.error
        assert cell.text == (f"[rank 0] {shown[code]}\n" if code in shown else "")


def test_errors_and_warnings_under_the_magic_name_the_cell_and_its_line(book: Notebook) -> None:
    cell = book.run("%%ranks 2\nimport warnings\nwarnings.warn('careful')\nraise ValueError('boom')")
    assert f"  cell [{cell.number}], line 4, in <module>\n    raise ValueError('boom')" in cell.error
    assert f"[rank 1] cell [{cell.number}]:3: UserWarning: careful" in cell.text
    cell = book.run("%%ranks 2\nx = = 1")
    assert f"Cell In[{cell.number}], line 2" in cell.error
    assert "ipykernel_" not in cell.error
    assert "needs a number of ranks, such as %%ranks 4; got 'many'" in book.run("%%ranks many\n1").error


def test_import_tplab_starts_the_server_so_the_first_launch_finds_it_warm(book: Notebook) -> None:
    assert len(psutil.Process(book.manager.provisioner.pid).children()) == 1


# The live view


def shown(cell: Cell) -> list[dict]:
    """The displays that stand in the output area at the end."""
    areas: dict[str, dict] = {}
    for place, message in enumerate(cell.messages):
        content = message["content"]
        if message["msg_type"] in ("display_data", "update_display_data"):
            areas[content.get("transient", {}).get("display_id") or str(place)] = content["data"]
    return list(areas.values())


def kinds(cell: Cell) -> list[str]:
    return [message["msg_type"] for message in cell.messages]


def test_a_long_run_shows_its_ranks_and_leaves_nothing(book: Notebook, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    late = (
        f"def late():\n    while dist.get_rank() and not os.path.exists({str(seen)!r}):\n        time.sleep(0.05)\n"
        "    dist.all_reduce(torch.ones(2))\n    return 1\n"
    )
    request = book.start(late + "tplab.launch(late, 2)[1]")
    book.wait_until_shown(request, "waits in all_reduce #1 for rank 1")
    seen.touch()
    cell = book.finish(request)
    views = [m["content"] for m in cell.messages if WIDGET_VIEW in m["content"].get("data", {})]
    assert len(views) == 1
    assert list(views[0]["data"]) == [WIDGET_VIEW], "no text beside it that nbval could compare"
    values = [m["content"]["data"].get("state", {}).get("value", "") for m in cell.messages if "comm" in m["msg_type"]]
    assert any("waits in all_reduce #1 for rank 1" in value and "computing" in value for value in values)
    assert shown(cell) == [{}]
    assert kinds(cell).count("comm_open") == kinds(cell).count("comm_close") == 3
    assert "1" in cell.text
    assert not cell.error


def test_a_run_that_prints_keeps_its_one_area(book: Notebook) -> None:
    source = "def talk():\n    for i in range(100_000):\n        print(i)\n    time.sleep(2)\nr = tplab.launch(talk, 2)"
    cell = book.run(source)
    areas = shown(cell)
    assert len(areas) == 2
    assert {} in areas
    assert sum("[rank 1] 99999" in area.get("text/plain", "") for area in areas) == 1


def test_an_interrupted_run_leaves_nothing(book: Notebook) -> None:
    request = book.start("tplab.launch(lambda: time.sleep(600), 2, timeout=None)")
    book.wait_until_shown(request, WIDGET_VIEW)
    book.manager.interrupt_kernel()
    cell = book.finish(request)
    assert cell.error.startswith("KeyboardInterrupt: the run was interrupted.")
    assert shown(cell) == [{}]
    assert "comm_close" in kinds(cell)


def test_inside_an_output_widget_nothing_that_ranks_print_is_lost(book: Notebook) -> None:
    """ipywidgets.Output takes displays and ignores their updates."""
    book.run("import ipywidgets\ndef talk():\n    time.sleep(dist.get_rank())\n    print('words')")
    cell = book.run("with ipywidgets.Output():\n    tplab.launch(talk, 3)")
    texts = [
        m["content"]["data"]["text/plain"]
        for m in cell.messages
        if m["msg_type"] == "display_data" and "text/plain" in m["content"]["data"]
    ]
    assert texts == ["[rank 0] words\n[rank 1] words\n[rank 2] words"]
    assert "comm_close" in kinds(cell)
