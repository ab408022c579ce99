"""What ranks print: prefixed, in the order of the ranks, all of it, also from their children and from C."""

import os
import subprocess
import sys

import pytest
import torch.distributed as dist

import tplab
from tplab.runtime.display import KEPT_BYTES, NotebookOutput, Output


def chatter() -> None:
    rank = dist.get_rank()
    print("out", rank)
    print("err", rank, file=sys.stderr)
    os.write(1, b"from C\n")
    subprocess.run(["echo", f"child of {rank}"], check=True)
    print("no newline", end="")


def test_output_is_prefixed_and_in_rank_order(capsys: pytest.CaptureFixture[str]) -> None:
    said = ("out {0}", "err {0}", "from C", "child of {0}", "no newline")
    lines = [f"[rank {rank}] {text.format(rank)}" for rank in range(3) for text in said]
    results = tplab.launch(chatter, 3)
    assert capsys.readouterr().out.splitlines()[-15:] == lines
    assert results.output[1] == "out 1\nerr 1\nfrom C\nchild of 1\nno newline"


def test_a_progress_bar_is_one_line() -> None:
    output = NotebookOutput(1)
    output.write(0, b"\r0 of 1\r1 of 1\ndone\n")
    assert output._render().splitlines() == ["[rank 0] 1 of 1", "[rank 0] done"]


def test_bytes_that_are_no_text_do_no_harm() -> None:
    output = Output(2)
    for rank, data in enumerate((b"\xff\xfe ok", b"\xff ok")):
        output.write(rank, data)
    assert all(text.endswith(" ok") for text in output.texts())


def test_very_long_output_keeps_head_and_tail() -> None:
    output = Output(1)
    for i in range(60_000):
        output.write(0, f"line {i} {'x' * 80}\n".encode())
    (text,) = output.texts()
    assert len(text) <= 2 * KEPT_BYTES
    assert text.startswith("line 0 ")
    assert text.rstrip().endswith("x" * 80)
    assert "line 59999 " in text
    assert "cut" in text


def test_the_last_words_of_a_rank_that_returns_are_not_lost() -> None:
    def program() -> None:
        os.write(1, b"x" * 500_000)  # more than the pipe holds: some of it is still there when the result arrives

    for _ in range(3):
        assert [len(text) for text in tplab.launch(program, 2).output] == [500_000] * 2


def test_a_program_that_closes_stdout_still_returns() -> None:
    ends = [lambda: sys.stdout.close(), lambda: os.close(1), lambda: setattr(sys, "stdout", None)]

    def program() -> int:
        ends[dist.get_rank()]()
        return 7

    assert tplab.launch(program, 3) == [7, 7, 7]
