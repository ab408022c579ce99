"""Token files hold the text exactly, are made once by whoever comes first, and are never trusted if damaged.

The text is read back from the raw files with numpy and decoded: it must be that of the folder, document by document.
"""

import json
import os
import re
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from tokenizers import Tokenizer

from tests import saying
from tplab import launch
from tplab.capstone import Settings
from tplab.capstone.checkpoints import folders
from tplab.capstone.data import prepare as tokens
from tplab.capstone.data.corpus import Document
from tplab.capstone.data.prepare import TokenFiles, prepare
from tplab.capstone.data.tokenizer import train_tokenizer

SMALL = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "seq_length": 16, "vocab_size": 300}


def write_texts(folder: Path, words: str = "word") -> Path:
    folder.mkdir()
    for i in range(40):
        lines = [f"{words} {i} {j}: ünïcode 🎉 <|endoftext|>\r\n" for j in range(20)]
        (folder / f"{i:02}.txt").write_text("".join(lines), newline="")
    return folder


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(folder=str(tmp_path / "runs" / "one"), data=str(write_texts(tmp_path / "texts")), **SMALL)


def texts_of(settings: Settings) -> list[Path]:
    return sorted(Path(settings.data).iterdir())


def texts_in(files: TokenFiles, name: str, dtype: str = "<u2") -> list[str]:
    """From the bytes of a file: the documents between the ids 0."""
    ids = np.fromfile(files.folder / name, dtype=dtype)
    ends = np.flatnonzero(ids == 0)
    assert ends[-1] == len(ids) - 1
    return [files.tokenizer.decode(part[part != 0].tolist()) for part in np.split(ids, ends[:-1] + 1)]


def test_the_files_hold_the_text_and_validation_has_documents_of_its_own(settings: Settings) -> None:
    files = prepare(settings)
    train, validation = texts_in(files, "train.bin"), texts_in(files, "validation.bin")
    originals = [path.read_bytes().decode() for path in texts_of(settings)]
    assert sorted(train + validation) == sorted(originals)
    assert train == [text for text in originals if text in train]
    assert validation
    assert not set(train) & set(validation)
    assert isinstance(files.train, np.memmap)
    assert np.array_equal(files.train, np.fromfile(files.folder / "train.bin", "<u2"))
    assert files.vocab_size == 300 == files.tokenizer.get_vocab_size() > files.train.max()


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "<u2"), (65_537, "<u4")])
def test_more_than_65536_ids_take_four_bytes(
    vocab_size: int, dtype: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_unused_ids(documents: Sequence[Document], _: int) -> Tokenizer:
        tokenizer = train_tokenizer(documents, 300)
        tokenizer.add_tokens([f"unused {number}" for number in range(vocab_size - 300)])
        return tokenizer

    monkeypatch.setattr(tokens, "train_tokenizer", with_unused_ids)
    files = prepare(settings)
    assert (files.vocab_size, files.train.dtype) == (vocab_size, np.dtype(dtype))
    assert set(texts_in(files, "train.bin", dtype)) < {path.read_bytes().decode() for path in texts_of(settings)}


def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A list that grows with each folder that is made from now on."""
    folders_made, make = [], tokens._make
    monkeypatch.setattr(tokens, "_make", lambda folder, *args: folders_made.append(folder) or make(folder, *args))
    return folders_made


def test_a_second_run_makes_nothing_and_any_change_makes_new_files(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders_made = made(monkeypatch)
    first = prepare(settings)
    times = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    again = prepare(replace(settings, folder=str(tmp_path / "runs" / "two"), seed=5, num_layers=2))
    assert again.folder == first.folder
    assert times == {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    assert len(folders_made) == 1
    for run in ("one", "two"):
        assert (tmp_path / "runs" / run / "tokens").resolve() == first.folder.resolve()
        assert not os.path.isabs(os.readlink(tmp_path / "runs" / run / "tokens"))

    different = [first, *(prepare(replace(settings, **more)) for more in ({"vocab_size": 301}, {"data_limit": 20_000}))]
    for name in ("07.txt", "zz.txt"):  # one is changed, one is new
        (Path(settings.data) / name).write_text("more\n")
        different.append(prepare(settings))
    monkeypatch.setattr(tokens.tokenizers, "__version__", "99")
    different.append(prepare(settings))
    assert len({files.fingerprint for files in different}) == len(folders_made) == 6


def test_what_runs_write_into_the_folder_of_the_text_is_no_text(settings: Settings) -> None:
    run, texts = "runs/one", Path(settings.data)
    elsewhere, inside = prepare(settings), replace(settings, folder=str(texts / run))
    assert prepare(inside).fingerprint == elsewhere.fingerprint
    for folder in (texts / run, texts / "another", texts / "runs" / "two"):
        folder.mkdir(parents=True, exist_ok=True)
        inside.save(folder / "settings.yaml")
        (folder / "log.jsonl").write_text("{}\n")
    assert prepare(inside).fingerprint == elsewhere.fingerprint

    (texts / "runs" / "more.txt").write_text("more\n")
    assert prepare(inside).fingerprint != elsewhere.fingerprint, "text beside a run is text"


@pytest.mark.parametrize(("name", "seq_length"), [("held-out", 2000), ("training", 200_000)])
def test_a_text_too_short_for_one_sequence_is_refused(name: str, seq_length: int, settings: Settings) -> None:
    with pytest.raises(ValueError, match=rf"{name}\D*[\d,]+ tokens.*seq_length={seq_length}"):
        prepare(replace(settings, seq_length=seq_length))


def test_a_run_with_checkpoints_goes_on_with_the_tokens_that_it_began_with(settings: Settings) -> None:
    first = prepare(settings)
    run, texts = Path(settings.folder), Path(settings.data)
    (run / "checkpoints" / "step-000100").mkdir(parents=True)
    (texts / "00.txt").write_text("changed\n")
    assert prepare(settings).fingerprint == first.fingerprint
    shutil.rmtree(first.folder)
    with pytest.raises(ValueError, match=saying(settings.folder, first.fingerprint)):
        prepare(settings)
    shutil.rmtree(texts)
    write_texts(texts)
    assert prepare(settings).fingerprint == first.fingerprint
    shutil.rmtree(run / "checkpoints")
    (texts / "00.txt").write_text("changed\n")
    assert prepare(settings).fingerprint != first.fingerprint


def test_a_full_disk_leaves_nothing_behind(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders.os, "fsync", fsync)
    with pytest.raises(OSError, match=r"/runs/tokens/\w+\W+No space left on device"):
        prepare(settings)
    assert [path.name for path in Path(settings.folder).parent.rglob("*")] == ["tokens", ".lock"]


def on_ranks(settings: Settings, missing: str, other: str) -> tuple[str, int, int, str, str]:
    """What was prepared, how often this rank read the text, how many folders it made when both ranks needed the same
    one, and two errors."""
    read, gather = [], tokens.gather
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "gather", lambda *args, **more: read.append(args) or gather(*args, **more))
        files = prepare(settings)
    with pytest.raises(FileNotFoundError) as nowhere:
        prepare(replace(settings, data=missing))
    os.environ["LOCAL_RANK"] = "0"  # as on two machines, which share a disk here
    with pytest.MonkeyPatch.context() as patch:
        folders_made = made(patch)
        prepare(replace(settings, data=other))
    with pytest.raises(ValueError, match=saying("rank 0", "rank 1")) as apart:
        prepare(replace(settings, data=other) if dist.get_rank() == 1 else settings)
    return files.fingerprint, len(read), len(folders_made), str(nowhere.value), str(apart.value)


def test_one_rank_makes_them_the_others_wait_and_all_are_told_of_an_error(settings: Settings, tmp_path: Path) -> None:
    """From more text than elsewhere here, so that rank 1 waits longer than it takes to call something a deadlock."""
    missing, other = str(tmp_path / "missing"), str(write_texts(tmp_path / "other", "another"))
    wanted = replace(settings, data=None, data_limit=2_000_000, vocab_size=1000)
    found = launch(on_ranks, 2, args=(wanted, missing, other), timeout=300)
    names, reads, folders_made, nowhere, apart = zip(*found, strict=True)
    assert names[0] == names[1]
    assert reads == (1, 0)
    assert sorted(folders_made) == [0, 1], "of several programs at once, one makes them"
    for rank in range(2):
        assert re.search(saying(missing, "--data PATH"), nowhere[rank])
        assert names[0] in apart[rank]


def test_a_kill_leaves_nothing_that_counts(tmp_path: Path) -> None:
    """A forked copy of this process kills itself after it has written a file, but before the folder gets its name."""
    child = os.fork()
    if child == 0:
        try:
            with folders.new_folder(tmp_path / "made") as place:
                (place / "train.bin").write_bytes(b"12")
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".making-made-")


def test_what_lies_in_the_place_of_the_link_is_not_overwritten(settings: Settings) -> None:
    own = Path(settings.folder) / "tokens"
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    with pytest.raises(FileExistsError, match=saying(str(own), "link")):
        prepare(settings)
    assert [path.name for path in own.parent.iterdir()] == ["tokens"]
    assert own.read_text() == "mine"


def test_a_run_of_an_earlier_version_is_not_resumed(settings: Settings) -> None:
    files = prepare(settings)
    about = json.loads((files.folder / "about.json").read_text())
    (files.folder / "about.json").write_text(json.dumps(about | {"format": about["format"] - 1}))
    (Path(settings.folder) / "checkpoints" / "step-000100").mkdir(parents=True)
    with pytest.raises(ValueError, match=saying(f"{settings.folder}/tokens", "version")):
        prepare(settings)
