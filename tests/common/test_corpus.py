"""The text is real, the same every time, and its batches are windows of it whose targets are one byte on."""

import sysconfig
from pathlib import Path

import pytest
import torch

from tplab import launch
from tplab.common.corpus import VOCABULARY, byte_batches, python_sources

TEXT = bytes(range(97, 123)) * 4


def test_the_text_is_python_and_the_same_every_time() -> None:
    text = python_sources(300_000)
    assert len(text) == 300_000
    assert text == python_sources(300_000)
    assert text.count(b"def ") > 200
    assert b"\r\n" not in text


def test_a_limit_cuts_the_same_text_shorter() -> None:
    whole = python_sources()
    assert len(whole) > 2_000_000
    assert whole.startswith(python_sources(123_457))
    assert python_sources(0) == b""
    with pytest.raises(ValueError, match="limit_bytes=-1"):
        python_sources(-1)


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


def test_targets_are_the_next_bytes() -> None:
    batches = list(byte_batches(TEXT, context=7, batch_size=3, steps=5, seed=0))
    assert len(batches) == 5
    for inputs, targets in batches:
        assert inputs.shape == targets.shape == (3, 7)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert inputs.max() < VOCABULARY
        for row in inputs:
            assert bytes(row.tolist()) in TEXT


def test_the_last_byte_is_a_target_and_the_first_an_input() -> None:
    pairs = byte_batches(b"abc", context=2, batch_size=4, steps=3, seed=1)
    assert all(bytes(row.tolist()) == b"ab" for inputs, _ in pairs for row in inputs)
    starts = {int(inputs[0, 0]) for inputs, _ in byte_batches(b"abcd", context=2, batch_size=1, steps=50, seed=1)}
    assert starts == {ord("a"), ord("b")}


def first_batch(seed: int) -> torch.Tensor:
    return next(iter(byte_batches(TEXT, 8, 2, 1, seed)))[0]


def test_the_same_seed_gives_the_same_batches_on_every_rank() -> None:
    torch.manual_seed(99)  # the global generator has no say
    zero, one = launch(first_batch, 2, args=(3,))
    assert torch.equal(zero, one)
    assert torch.equal(zero, first_batch(3))
    assert not torch.equal(zero, first_batch(4))


def test_too_short_a_text_is_refused() -> None:
    with pytest.raises(ValueError, match="a text of 8 bytes is too short for a context of 8: it needs 9"):
        next(iter(byte_batches(b"12345678", 8, 1, 1, 0)))
