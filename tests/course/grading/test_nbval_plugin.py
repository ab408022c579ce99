"""What nbval gets wrong and nbval_plugin.py mends: one test for each repair, with a real kernel."""

import sys
import time

import psutil
from nbval.kernel import CURRENT_ENV_KERNEL_NAME

from tplab.course.grading.nbval_plugin import Kernel
from tplab.course.grading.run import Run
from tplab.course.notebooks.cells import Cell

CHILD = """
import os, time
os.system("echo 2")
time.sleep(1)  # ipykernel reads a child's output in a thread
"""


def code(source: str, id: str, tag: str = "nbval-ignore-output", **more) -> Cell:
    return Cell("code", source, id, {"tags": [tag], "tplab": more.pop("marks", {})}, **more)


def run(tmp_path, *cells: Cell, timeout: float = 60) -> tuple[dict[str, dict], float]:
    """The rows by cell id, and the seconds it took."""
    start = time.monotonic()
    rows = {row["id"]: row for row in Run(list(cells), tmp_path, timeout)}
    return rows, time.monotonic() - start


def test_output_of_a_child_process_is_captured(tmp_path):
    printed = [{"output_type": "stream", "name": "stdout", "text": "2\n"}]
    rows, _ = run(tmp_path, code(CHILD, "a", "nbval-check-output", outputs=printed, execution_count=1))
    assert rows["a"]["outcome"] == "passed", rows["a"]["message"]


def test_dead_kernel_is_noticed_at_once(tmp_path):
    cells = [code("import os; os._exit(1)", "a"), code("1", "b")]
    rows, seconds = run(tmp_path, *cells, timeout=120)
    assert rows["a"]["problem"] == rows["b"]["problem"] == "kernel died"
    assert seconds < 60


def test_very_many_messages_do_no_harm(tmp_path):
    loop = "for i in range(20000):\n    print(i, flush=True)"
    rows, _ = run(tmp_path, code(loop, "a"), code("1", "b"), timeout=270)
    assert [row["outcome"] for row in rows.values()] == ["passed", "passed"]


def test_no_message_is_lost_while_nobody_reads(tmp_path):
    """On a busy machine the reader comes late; what then was lost could be the message that the cell is done."""
    kernel = Kernel(CURRENT_ENV_KERNEL_NAME, cwd=str(tmp_path), startup_timeout=120)
    try:
        sent = kernel.execute_cell_input("for i in range(8000):\n    display({'text/plain': 'x' * 2000}, raw=True)")
        while kernel.kc.get_shell_msg(timeout=270)["parent_header"].get("msg_id") != sent:
            pass
        shown = 0
        while (message := kernel.get_message("iopub", timeout=30))["content"].get("execution_state") != "idle":
            shown += message["msg_type"] == "display_data"
        assert shown == 8000
    finally:
        kernel.stop()


def test_endless_printing_is_stopped_and_said(tmp_path):
    rows, seconds = run(tmp_path, code("while True:\n    print('x' * 10000)", "a"), code("1", "b"), timeout=120)
    assert "more than 5 million characters" in rows["a"]["message"]
    assert rows["b"]["outcome"] == "passed"
    assert seconds < 100


def test_unknown_magic_fails(tmp_path):
    rows, _ = run(tmp_path, code("%%no_such_magic\n1", "a"))
    assert rows["a"]["outcome"] == "failed"


def test_cell_out_of_time_is_interrupted_and_the_next_one_counts(tmp_path):
    cells = [code("while True:\n    pass", "a"), code("1 / 0", "b"), code("1", "c")]
    rows, seconds = run(tmp_path, *cells, timeout=2)
    assert rows["a"]["message"].startswith("Timeout of 2 seconds")
    assert (rows["b"]["outcome"], rows["b"]["ename"], rows["c"]["outcome"]) == ("failed", "ZeroDivisionError", "passed")
    assert seconds < 40


def test_limit_is_not_for_the_chapters_own_set_up(tmp_path):
    """It imports torch, which may take its time on a busy machine."""
    wait = "import time; time.sleep(6)"
    rows, _ = run(tmp_path, code(wait, "a", marks={"role": "setup"}), code(wait, "b"), timeout=3)
    assert rows["a"]["outcome"] == "passed"
    assert rows["b"]["message"].startswith("Timeout of 3 seconds")


def test_kernel_that_answers_no_more_fails(tmp_path):
    """Without sys.stderr, ipykernel runs a cell, says that it is idle, and never replies."""
    rows, _ = run(tmp_path, code("import sys; sys.stderr = None", "a"), code("1", "b"), timeout=5)
    assert rows["b"]["outcome"] == "failed"
    assert rows["b"]["message"].startswith("Timeout of 5 seconds")


def test_comments_in_a_cell_do_not_change_what_nbval_does(tmp_path):
    result = [{"output_type": "execute_result", "data": {"text/plain": "2"}, "metadata": {}, "execution_count": 1}]
    cells = [
        code(f"# {comment}\n3", str(place), "nbval-check-output", outputs=result, execution_count=1)
        for place, comment in enumerate(["NBVAL_SKIP", "NBVAL_IGNORE_OUTPUT", "NBVAL_RAISES_EXCEPTION"])
    ]
    rows, _ = run(tmp_path, *cells)
    assert [row["outcome"] for row in rows.values()] == ["failed"] * 3


def test_processes_left_behind_are_ended_by_their_mark(tmp_path):
    child = f"[{sys.executable!r}, '-c', 'import time; time.sleep(600)']"
    start = f"import subprocess\nchild = subprocess.Popen({child}, start_new_session=True)\nassert False, child.pid"
    this = Run([code(start, "a")], tmp_path)
    (row,) = this
    assert this.notes == ["1 process left behind by a cell, now ended."]
    assert not psutil.pid_exists(int(row["evalue"]))
