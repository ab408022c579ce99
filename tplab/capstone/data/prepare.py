"""Token files that are created once from a text, memory-mapped, and shared by all ranks and by neighboring runs.

    runs/laptop/tokens             a link to the run's folder of token files, such as
    runs/tokens/3f9a6c0d52e81b47   one folder per text and tokenizer, named after their fingerprint
        tokenizer.json, train.bin, validation.bin, manifest.json      (see `token_files`)

Even after a kill, the folder is either complete or missing. If several processes need it at the same time, one of them
makes it while the others wait for a lock, which is released when that process ends.

A run that has checkpoints keeps using the tokens that it started with, even if Python or the text has changed since.
"""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch.distributed as dist
from tokenizers import Tokenizer

from tplab.capstone.checkpoints.atomic_folders import link, locked, new_folder, write
from tplab.capstone.checkpoints.manifest import write_manifest
from tplab.capstone.data.batches import Batches
from tplab.capstone.data.corpus import Collected, Document, gather, in_parts, skipped_text, split
from tplab.capstone.data.token_files import TokenFiles
from tplab.capstone.data.tokenizer import (
    END_OF_TEXT,
    MIN_FREQUENCY,
    encode,
    read_tokenizer,
    size_of,
    train_tokenizer,
)
from tplab.capstone.progress import Show, progress
from tplab.capstone.settings.run_folder import checkpoints_in
from tplab.capstone.settings.settings import Settings
from tplab.checkpoint.files import gathered, together

__all__ = ["Batches", "TokenFiles", "prepare"]

PATIENCE = timedelta(days=1)  # how long ranks wait for the token files
FORMAT = 1  # increase this when the same text would give different files
_AT_ONCE = 1 << 20  # characters to encode together


def prepare(settings: Settings) -> TokenFiles:
    """Return the token files for these settings, creating them if they don't exist yet.

    Every rank calls this, or a single process without a process group. One rank per machine creates the files while the
    others wait. Raises what `gather` raises. Also raises ValueError if the text is too short for a sequence, files are
    damaged, the texts of the machines differ, or the tokens that a resumed run started with no longer exist.
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
    with progress() as show:
        return _files_of(settings, show)


def _files_of(settings: Settings, show: Show) -> TokenFiles:
    run, shared = Path(settings.folder), _shared(settings)
    began_with = _of_run(run)
    if began_with and (run / "tokens").is_dir():
        show("checking the tokens")
        return TokenFiles(run / "tokens")
    show("reading the text")
    text = _text_of(settings)
    if began_with and began_with != text.fingerprint:
        raise ValueError(
            f"the run in {run} has checkpoints, and it was trained on the token files {began_with}, which are no "
            f"longer in {shared}. The text has changed since then, because it would now become {text.fingerprint}: "
            f"{text.collected}, with Python {platform.python_version()}. Restore the old text, or start a new run in "
            "another folder"
        )
    folder = shared / text.fingerprint
    if not folder.is_dir():
        show(f"waiting for another process that writes to {shared}")
        with locked(shared):
            if not folder.is_dir():
                _make(folder, text, settings, show)
    show("checking the tokens")
    files = TokenFiles(folder)
    for what, ids in (("for training", files.train), ("of held-out text", files.validation)):
        if len(ids) < settings.seq_length + 1:
            raise ValueError(
                f"there are only {len(ids):,} tokens {what}, but one sequence of seq_length={settings.seq_length} and "
                f"its last target need {settings.seq_length + 1:,}. {files} Use more text (data, data_limit) or a "
                "smaller seq_length"
            )
    link(run / "tokens", folder)
    return files


def _shared(settings: Settings) -> Path:
    """Return the folder beside the run's folder, even if the latter is given as "." """
    return Path(os.path.abspath(settings.folder)).parent / "tokens"


def _of_run(run: Path) -> str | None:
    """Return the fingerprint of the tokens that the run's checkpoints were trained on, or None without checkpoints."""
    tokens = run / "tokens"
    if not checkpoints_in(run):
        return None
    if tokens.is_symlink():
        return Path(os.readlink(tokens)).name
    return TokenFiles(tokens).fingerprint if tokens.is_dir() else None


@dataclass(frozen=True)
class _Text:
    """A text in parts, and its fingerprint. `ready` is the tokenizer that a run starts from, and its end of a text."""

    collected: Collected
    parts: Sequence[Document]
    fingerprint: str
    ready: tuple[Tokenizer, int] | None


def _text_of(settings: Settings) -> _Text:
    run = Path(settings.folder)  # a run's own files aren't text to train on
    collected = gather(settings.data, settings.data_limit, without=[run, _shared(settings)])
    parts = in_parts(collected.documents)
    ready = None
    kind: list[Any] = [settings.vocab_size, MIN_FREQUENCY]
    if settings.start_from is not None:
        ready = _tokenizer_of(Path(settings.start_from), settings.vocab_size)
        kind = [ready[0].to_str(), ready[1]]
    digest = hashlib.sha256(json.dumps([FORMAT, tokenizers.__version__, *kind]).encode())
    for part in parts:
        text = part.text.encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return _Text(collected, parts, digest.hexdigest()[:16], ready)


def _make(folder: Path, text: _Text, settings: Settings, show: Show) -> None:
    show("training the tokenizer")
    train, validation = split(text.parts)
    tokenizer, end = text.ready or (train_tokenizer(train, settings.vocab_size), 0)
    vocab_size = size_of(tokenizer)
    dtype = "<u2" if vocab_size <= 1 << 16 else "<u4"
    train_bytes, validation_bytes = (sum(len(part.text.encode()) for part in parts) for parts in (train, validation))
    about = {
        "fingerprint": text.fingerprint,
        "vocab_size": vocab_size,
        "asked_vocab_size": vocab_size if text.ready else settings.vocab_size,
        "end_of_text": end,
        "dtype": dtype,
        "text": {
            "from": settings.data or f"the standard library of Python {platform.python_version()}",
            "documents": len(text.collected.documents),
            "skipped": skipped_text(text.collected.skipped),
            "train_bytes": train_bytes,
            "validation_bytes": validation_bytes,
        },
        "made_with": {"format": FORMAT, "tokenizers": tokenizers.__version__, "python": sys.version},
    }
    with new_folder(folder) as place:
        files = {"tokenizer.json": write(place / "tokenizer.json", [tokenizer.to_str().encode()])}
        for name, parts in (("train.bin", train), ("validation.bin", validation)):
            files[name] = write(place / name, _ids_of(parts, tokenizer, end, dtype, show))
        write_manifest(place, about, files)


def _tokenizer_of(folder: Path, vocab_size: int) -> tuple[Tokenizer, int]:
    """Return the tokenizer of a Hugging Face folder, and the id that ends a text. Raises ValueError if one is unfit."""
    tokenizer = read_tokenizer(folder / "tokenizer.json")
    ends = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("eos_token_id")
    end = ends[0] if isinstance(ends, list) and ends else ends
    end = tokenizer.token_to_id(END_OF_TEXT) if end is None else end
    if end is None:
        raise ValueError(
            f"{folder / 'config.json'} has no eos_token_id, but the run needs a token that separates two texts"
        )
    if (ids := max(size_of(tokenizer), end + 1)) > vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} has ids up to {ids - 1:,}, but the model's table has only {vocab_size:,} rows"
        )
    return tokenizer, end


def _ids_of(documents: Sequence[Document], tokenizer: Tokenizer, end: int, dtype: str, show: Show) -> Iterator[bytes]:
    """Yield the ids of all documents, each followed by `end`, as bytes, for a few megabytes of text at a time."""
    waiting: list[Document] = []
    characters = 0
    for number, document in enumerate(documents, 1):
        waiting.append(document)
        characters += len(document.text)
        if number == len(documents) or characters >= _AT_ONCE:
            yield b"".join(np.array([*ids, end], dtype).tobytes() for ids in encode(tokenizer, waiting))
            waiting, characters = [], 0
            show("encoding the text", number / len(documents))
