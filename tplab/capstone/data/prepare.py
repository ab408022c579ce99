"""Token files that are created once from a text, memory-mapped, and shared by all ranks and by runs in sibling folders.

    runs/laptop/tokens             a link to the run's folder of token files, such as
    runs/tokens/3f9a6c0d52e81b47   one folder per text and tokenizer, named after their fingerprint
        tokenizer.json             for Hugging Face's `tokenizers`
        train.bin                  consecutive ids, little-endian, 2 bytes each (4 if there are more than 65,536)
        validation.bin             the ids of the documents that the model isn't trained on
        about.json                 a description of the text and of the other files

Even after a kill, the folder is either complete or missing. If several processes need it at the same time, one of them
creates it while the others wait for a lock, which is released when the first process ends.

A run that has checkpoints keeps using the tokens that it started with, even if Python or the text has changed since.
"""

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import tokenizers
import torch.distributed as dist
from tokenizers import Tokenizer

from tplab.capstone.checkpoints.folders import new_folder
from tplab.capstone.data.batches import Batches
from tplab.capstone.data.corpus import Collected, Document, gather, in_parts, split
from tplab.capstone.data.tokenizer import END, encode, train_tokenizer
from tplab.capstone.settings.run_folder import checkpoints_in
from tplab.capstone.settings.settings import Settings
from tplab.checkpoint.files import gathered, together
from tplab.common.files import locked

__all__ = ["Batches", "TokenFiles", "prepare"]

FORMAT = 4  # increase this when the same text would give different files, or the same seed a different order
_AT_ONCE = 1 << 20  # characters to encode together


class TokenFiles:
    """Token files created by `prepare`. As a string, they're described in a few sentences.

    tokenizer               converts text to ids and back
    train, validation       memory-mapped vectors of ids; only the parts that are read get loaded
    vocab_size              number of ids; smaller than in the settings if, for example, the text has too few pairs
    fingerprint             an identifier of the text and the tokenizer

    A model may still use the larger vocabulary size given in the settings, so that its own sizes stay as planned and
    divisible by tp. Ids of `vocab_size` or more never occur in the text, so only sampling has to avoid them.

    Raises FileNotFoundError if the folder or a file is missing, and ValueError for files of an earlier version.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        about = json.loads((self.folder / "about.json").read_text(encoding="utf-8"))
        if about["format"] != FORMAT:
            raise ValueError(
                f"{self.folder} has the tokens of an earlier version of tplab, which drew the sequences in another "
                "order. Start a new run in another folder"
            )
        self.fingerprint: str = about["fingerprint"]
        self.vocab_size: int = about["vocab_size"]
        self.train, self.validation = (
            np.memmap(self.folder / name, dtype=about["dtype"], mode="r") for name in ("train.bin", "validation.bin")
        )
        self.tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        self._text: str = about["text"]

    def __str__(self) -> str:
        return (
            f"{self._text} That's {len(self.train):,} tokens for training and {len(self.validation):,} held-out "
            f"tokens, with a vocabulary of {self.vocab_size:,}."
        )


def prepare(settings: Settings) -> TokenFiles:
    """Return the token files for these settings, creating them if they don't exist yet.

    Every rank calls this, or a single process without a process group. One rank per machine creates the files while the
    others wait. Raises what `gather` raises, FileExistsError if something else is in the place of the link, and
    ValueError if the text is too short for a sequence, machines have different texts, or a run can't be resumed with
    the same sequences, because its tokens are gone or it was started with an earlier version.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return _found_or_made(settings)
    maker = int(os.environ.get("LOCAL_RANK", dist.get_rank())) == 0
    waiting = dist.new_group(backend="gloo", timeout=timedelta(days=1))  # the default group would give up earlier
    made = together(lambda: _found_or_made(settings) if maker else None, waiting)
    files = together(lambda: made or TokenFiles(Path(settings.folder, "tokens")), waiting)
    found = gathered((files.fingerprint, platform.python_version()), waiting)
    if len({fingerprint for fingerprint, _ in found}) > 1:
        parts = [f"rank {rank} has {name} (Python {python})" for rank, (name, python) in enumerate(found)]
        raise ValueError(
            f"the machines have different text: {', '.join(parts)}. All of them need the same Python and the same data"
        )
    return files


def _found_or_made(settings: Settings) -> TokenFiles:
    run, own = Path(settings.folder), Path(settings.folder, "tokens")
    shared = Path(os.path.abspath(run)).parent / "tokens"  # next to the run's folder, even if that is given as "."
    resumes = checkpoints_in(run)
    if resumes and own.is_dir():
        return TokenFiles(own)
    if own.exists() and not own.is_symlink():
        raise FileExistsError(
            f"{own} should become a link to the token files, but there's something else. Move it out of the way"
        )
    collected = gather(settings.data, settings.data_limit, without=[run, shared])  # without the run's own files
    parts = in_parts(collected.documents)
    folder = shared / _fingerprint(parts, settings.vocab_size)
    if resumes and own.is_symlink() and own.readlink().name != folder.name:
        raise ValueError(
            f"the run in {run} has checkpoints, and it was trained on the token files {own.readlink().name}, which "
            f"are no longer in {shared}. The text or Python has changed since then. Restore the old text, or start "
            "a new run in another folder"
        )
    if not folder.is_dir():
        with locked(shared / ".lock"):  # another process may be writing there
            if not folder.is_dir():
                _make(folder, collected, parts, settings.vocab_size)
    files = TokenFiles(folder)
    for name, ids in (("the text for training", files.train), ("the held-out text", files.validation)):
        Batches(ids, settings.seq_length, settings.batch_size, settings.seed, name)  # raises ValueError if it's short
    run.mkdir(parents=True, exist_ok=True)
    link = run / f".tokens-{os.urandom(4).hex()}"
    link.symlink_to(os.path.relpath(folder.resolve(), run.resolve()))
    try:
        link.replace(own)
    except OSError:
        link.unlink()
        raise
    return files


def _fingerprint(parts: Sequence[Document], vocab_size: int) -> str:
    digest = hashlib.sha256(json.dumps([FORMAT, tokenizers.__version__, vocab_size]).encode())
    for part in parts:
        text = part.text.encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()[:16]


def _make(folder: Path, collected: Collected, parts: Sequence[Document], vocab_size: int) -> None:
    train, validation = split(parts)
    tokenizer = train_tokenizer(train, vocab_size)
    vocab_size = tokenizer.get_vocab_size()
    dtype = "<u2" if vocab_size <= 1 << 16 else "<u4"
    megabytes = sum(len(part.text.encode()) for part in parts) / 1e6
    about = {
        "format": FORMAT,
        "fingerprint": folder.name,
        "vocab_size": vocab_size,
        "dtype": dtype,
        "text": f"The text has {megabytes:.2f} MB in {len(collected.documents):,} documents.{collected.left_out}",
    }
    with new_folder(folder) as place:
        for name, side in (("train.bin", train), ("validation.bin", validation)):
            _write(place / name, _ids_of(side, tokenizer, dtype))
        _write(place / "tokenizer.json", [tokenizer.to_str().encode()])
        _write(place / "about.json", [json.dumps(about, indent=1).encode()])


def _write(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a new file and sync it to disk."""
    with open(path, "xb") as file:
        file.writelines(chunks)
        file.flush()
        os.fsync(file.fileno())


def _ids_of(documents: Sequence[Document], tokenizer: Tokenizer, dtype: str) -> Iterator[bytes]:
    """Yield the ids of all documents as bytes, encoding 1 to 2 MB of text at a time. `END` follows each document."""
    group: list[Document] = []
    characters = 0
    for number, document in enumerate(documents, 1):
        group.append(document)
        characters += len(document.text)
        if characters >= _AT_ONCE or number == len(documents):
            for ids in encode(tokenizer, group):
                yield np.array([*ids, END], dtype).tobytes()
            group, characters = [], 0
