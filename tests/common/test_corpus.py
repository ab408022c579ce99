"""The text is real, the same every time, and its batches are windows of it whose targets are one byte on."""

import sysconfig
from pathlib import Path

import pytest
import torch

from tplab.common.corpus import VOCABULARY, byte_batches, python_sources

TEXT = bytes(range(97, 123)) * 4


def test_the_text_is_python_and_a_limit_cuts_the_same_text_shorter() -> None:
    whole = python_sources()
    assert len(whole) > 2_000_000
    assert whole.count(b"def ") > 2000
    assert b"\r\n" not in whole
    assert python_sources(123_457) == whole[:123_457]


def test_sources_come_in_one_order_and_installed_packages_and_tests_are_not_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ["b.py", "a.py", "a.txt", "c/d.py", "site-packages/torch.py", "c/test/x.py", "_sysconfigdata_linux.py"]
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"{name}\r\n".encode())
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.get)
    assert python_sources() == b"a.py\nb.py\nc/d.py\n"


def test_batches_are_windows_of_the_text_whose_targets_are_the_next_bytes() -> None:
    batches = list(byte_batches(TEXT, context=7, batch_size=3, steps=5, seed=0))
    assert len(batches) == 5
    for inputs, targets in batches:
        assert inputs.shape == targets.shape == (3, 7)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert inputs.max() < VOCABULARY
        assert all(bytes(row.tolist()) in TEXT for row in inputs)


def test_the_last_byte_is_a_target_and_the_first_an_input() -> None:
    starts = {int(inputs[0, 0]) for inputs, _ in byte_batches(b"abcd", context=2, batch_size=1, steps=50, seed=1)}
    assert starts == {ord("a"), ord("b")}


def test_a_seed_gives_the_same_batches_whatever_the_global_generator_has_drawn() -> None:
    def first(seed: int) -> torch.Tensor:
        torch.rand(1)  # moves the global generator on
        return next(iter(byte_batches(TEXT, 8, 2, 1, seed)))[0]

    assert torch.equal(first(3), first(3))
    assert not torch.equal(first(3), first(4))
