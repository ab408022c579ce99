"""Token files that are created once from a text, memory-mapped, and shared by all ranks and by runs in sibling folders.

    runs/laptop/tokens             a link to the run's folder of token files, such as
    runs/tokens/3f9a6c0d52e81b47   one folder per text and tokenizer, named after their fingerprint
        tokenizer.json             for Hugging Face's `tokenizers`; trained on the text or taken from start_from
        train.bin                  consecutive ids, little-endian, 2 bytes each (4 if there are more than 65,536)
        validation.bin             the ids of the documents that the model isn't trained on
        manifest.json              size and SHA-256 of the other files, and a description of the text

Even after a kill, the folder is either complete or missing. If several processes need it at the same time, one of them
creates it while the others wait for a lock, which is released when the first process ends.

A run that has checkpoints keeps using the tokens that it started with, even if Python or the text has changed since.
"""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch.distributed as dist
from tokenizers import Tokenizer

from tplab.capstone.checkpoints.folders import link, locked, new_folder
from tplab.capstone.checkpoints.manifest import check_files, read_manifest, write, write_manifest
from tplab.capstone.data.batches import Batches
from tplab.capstone.data.corpus import Collected, Document, gather, in_parts, skipped_text, split
from tplab.capstone.data.tokenizer import MIN_FREQUENCY, encode, pretrained, read_tokenizer, size_of, train_tokenizer
from tplab.capstone.progress import Show, progress
from tplab.capstone.settings.run_folder import checkpoints_in
from tplab.capstone.settings.settings import Settings
from tplab.checkpoint.files import gathered, together

__all__ = ["Batches", "TokenFiles", "prepare"]

PATIENCE = timedelta(days=1)  # how long ranks wait for the token files
FORMAT = 1  # increase this when the same text would give different files
_AT_ONCE = 1 << 20  # characters to encode together


class TokenFiles:
    """Token files created by `prepare`.

    tokenizer               converts text to ids and back
    train, validation       memory-mapped vectors of ids; only the parts that are read get loaded
    vocab_size              number of ids; smaller than in the settings if, for example, the text has too few pairs
    end_of_text             the id between documents
    fingerprint, about      an identifier of the text and the tokenizer; the contents of manifest.json

    A model may still use the larger vocabulary size given in the settings, so that its own sizes stay as planned and
    divisible by tp. Ids of `vocab_size` or more never occur in the text, so only sampling has to avoid them.

    Raises FileNotFoundError if the folder is missing, and ValueError if files are missing, truncated or (with `check`)
    changed since they were written. The ValueError says what to delete.
    """

    def __init__(self, folder: str | Path, check: bool = True) -> None:
        self.folder = Path(folder)
        old = self.folder / "about.json"  # the file that earlier versions wrote instead of a manifest
        try:
            self.about = json.loads(old.read_bytes())["about"] if old.exists() else read_manifest(self.folder)
            check_files(self.folder, self.about, sums=check)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"the token files are damaged: {error}. Delete {self.folder.resolve()}, and the next run will create "
                "them again"
            ) from error
        self.fingerprint: str = self.about["fingerprint"]
        self.vocab_size: int = self.about["vocab_size"]
        self.end_of_text: int = self.about.get("end_of_text", 0)
        self.train, self.validation = (
            np.memmap(self.folder / name, dtype=self.about["dtype"], mode="r")
            for name in ("train.bin", "validation.bin")
        )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return read_tokenizer(self.folder / "tokenizer.json")

    def __str__(self) -> str:
        text, fewer = self.about["text"], self.about["asked_vocab_size"] - self.vocab_size
        megabytes = (text["train_bytes"] + text["validation_bytes"]) / 1e6
        each = text["validation_bytes"] / len(self.validation)
        told = (
            f"The text has {megabytes:.2f} MB in {text['documents']:,} documents. That's {len(self.train):,} tokens "
            f"for training and {len(self.validation):,} held-out tokens, with {each:.2f} bytes per token and a "
            f"vocabulary of {self.vocab_size:,}"
        )
        if fewer:
            told += f" ({fewer:,} fewer than requested, because the text has too few pairs)"
        return told + (f". Skipped: {text['skipped']}." if text["skipped"] else ".")


def prepare(settings: Settings) -> TokenFiles:
    """Return the token files for these settings, creating them if they don't exist yet.

    Every rank calls this, or a single process without a process group. One rank per machine creates the files while the
    others wait. Raises what `gather` raises, and ValueError if the text is too short for a sequence, files are damaged,
    machines have different texts, or the tokens that a resumed run started with are gone and its text has changed.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return _found_or_made(settings)
    maker = int(os.environ.get("LOCAL_RANK", dist.get_rank())) == 0
    waiting = dist.new_group(backend="gloo", timeout=PATIENCE)  # the default group would give up earlier
    made = together(lambda: _found_or_made(settings) if maker else None, waiting)
    found = gathered(made and (made.fingerprint, platform.python_version(), str(made.folder)), waiting)
    makers = {rank: place for rank, place in enumerate(found) if place}
    (fingerprint, _, folder), *_ = makers.values()
    if any(place[0] != fingerprint for place in makers.values()):
        parts = [f"rank {rank} has {name} (Python {python})" for rank, (name, python, _) in makers.items()]
        raise ValueError(
            f"the machines have different text: {', '.join(parts)}. All of them need the same Python and the same data"
        )
    return together(lambda: made or TokenFiles(folder, check=False), waiting)


def _found_or_made(settings: Settings) -> TokenFiles:
    run, own = Path(settings.folder), Path(settings.folder, "tokens")
    shared = Path(os.path.abspath(run)).parent / "tokens"  # next to the run's folder, even if that is given as "."
    resumes = checkpoints_in(run)
    with progress() as show:
        if resumes and own.is_dir():
            show("checking the tokens")
            return TokenFiles(own)
        show("reading the text")
        collected = gather(settings.data, settings.data_limit, without=[run, shared])  # without the run's own files
        parts = in_parts(collected.documents)
        ready = None if settings.start_from is None else pretrained(Path(settings.start_from), settings.vocab_size)
        kind = [ready[0].to_str(), ready[1]] if ready else [settings.vocab_size, MIN_FREQUENCY]
        fingerprint = _fingerprint(parts, kind)
        if resumes and own.is_symlink() and (began_with := own.readlink().name) != fingerprint:
            raise ValueError(
                f"the run in {run} has checkpoints, and it was trained on the token files {began_with}, which are no "
                f"longer in {shared}. The text has changed since then, because it would now become {fingerprint}: "
                f"{collected}, with Python {platform.python_version()}. Restore the old text, or start a new run in "
                "another folder"
            )
        folder = shared / fingerprint
        if not folder.is_dir():
            show(f"waiting for another process that writes to {shared}")
            with locked(shared):
                if not folder.is_dir():
                    _make(folder, collected, parts, ready, settings, show)
        show("checking the tokens")
        files = TokenFiles(folder)
    for what, ids in (("for training", files.train), ("of held-out text", files.validation)):
        if len(ids) < settings.seq_length + 1:
            raise ValueError(
                f"there are only {len(ids):,} tokens {what}, but one sequence of seq_length={settings.seq_length} and "
                f"its last target need {settings.seq_length + 1:,}. {files} Use more text (data, data_limit) or a "
                "smaller seq_length"
            )
    link(own, folder)
    return files


def _fingerprint(parts: Sequence[Document], kind: list[Any]) -> str:
    digest = hashlib.sha256(json.dumps([FORMAT, tokenizers.__version__, *kind]).encode())
    for part in parts:
        text = part.text.encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()[:16]


def _make(
    folder: Path, collected: Collected, parts: Sequence[Document], ready: tuple[Tokenizer, int] | None,
    settings: Settings, show: Show,
) -> None:  # fmt: skip
    """Create token files. `ready` is a pretrained tokenizer with its id for the end of a text, or None to train one."""
    show("training the tokenizer")
    train, validation = split(parts)
    tokenizer, end = ready or (train_tokenizer(train, settings.vocab_size), 0)
    vocab_size = size_of(tokenizer)
    dtype = "<u2" if vocab_size <= 1 << 16 else "<u4"
    train_bytes, validation_bytes = (sum(len(part.text.encode()) for part in side) for side in (train, validation))
    about = {
        "fingerprint": folder.name,
        "vocab_size": vocab_size,
        "asked_vocab_size": vocab_size if ready else settings.vocab_size,
        "end_of_text": end,
        "dtype": dtype,
        "text": {
            "from": settings.data or f"the standard library of Python {platform.python_version()}",
            "documents": len(collected.documents),
            "skipped": skipped_text(collected.skipped),
            "train_bytes": train_bytes,
            "validation_bytes": validation_bytes,
        },
        "made_with": {"format": FORMAT, "tokenizers": tokenizers.__version__, "python": sys.version},
    }
    with new_folder(folder) as place:
        files = {"tokenizer.json": write(place / "tokenizer.json", [tokenizer.to_str().encode()])}
        for name, side in (("train.bin", train), ("validation.bin", validation)):
            files[name] = write(place / name, _ids_of(side, tokenizer, end, dtype, show))
        write_manifest(place, about, files)


def _ids_of(documents: Sequence[Document], tokenizer: Tokenizer, end: int, dtype: str, show: Show) -> Iterator[bytes]:
    """Yield the ids of all documents as bytes, in chunks of a few megabytes of text. `end` follows each document."""
    waiting: list[Document] = []
    characters = 0
    for number, document in enumerate(documents, 1):
        waiting.append(document)
        characters += len(document.text)
        if number == len(documents) or characters >= _AT_ONCE:
            yield b"".join(np.array([*ids, end], dtype).tobytes() for ids in encode(tokenizer, waiting))
            waiting, characters = [], 0
            show("encoding the text", number / len(documents))
