"""Token files on disk, which are memory-mapped and verified before use.

tokenizer.json     for Hugging Face's `tokenizers`: trained on the text, or of the model that the run starts from
train.bin          consecutive ids, little-endian, 2 bytes each (4 if the vocabulary is larger than 65,536)
validation.bin     the same for documents that the model isn't trained on
about.json         size and SHA-256 of the other files, and a description of the text
"""

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tplab.capstone.checkpoints.manifest import file_sum
from tplab.capstone.data.tokenizer import read_tokenizer


class TokenFiles:
    """Token files created by `prepare`.

    tokenizer               converts text to ids and back
    train, validation       memory-mapped vectors of ids; only the parts that are read get loaded
    vocab_size              number of ids, which is smaller than in the settings if the text has too few pairs
    end_of_text             the id between documents
    fingerprint, about      identifier of text and tokenizer; the contents of about.json

    A model may still use the larger vocabulary of the settings, so that its sizes stay as planned and divisible by tp.
    Ids from `vocab_size` on never occur in the text, and only sampling has to avoid them.

    Raises FileNotFoundError or ValueError if files are missing, truncated or (with `check`) changed since they were
    written. The message says what to delete.
    """

    def __init__(self, folder: str | Path, check: bool = True) -> None:
        self.folder = Path(folder)
        self.about = self._read_about()
        for name, file in self.about["files"].items():
            self._check(name, file["bytes"], file["sha256"] if check else None)
        self.fingerprint: str = self.about["fingerprint"]
        self.vocab_size: int = self.about["vocab_size"]
        self.end_of_text: int = self.about.get("end_of_text", 0)
        self.train = self._ids("train.bin")
        self.validation = self._ids("validation.bin")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return read_tokenizer(self.folder / "tokenizer.json")

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token of held-out text, to compare vocabularies by bits per byte: loss / ln 2 / bytes_per_token."""
        return self.about["text"]["validation_bytes"] / len(self.validation)

    def __str__(self) -> str:
        text, fewer = self.about["text"], self.about["asked_vocab_size"] - self.vocab_size
        megabytes = (text["train_bytes"] + text["validation_bytes"]) / 1e6
        parts = [
            f"{megabytes:.2f} MB of text in {text['documents']:,} documents: {len(self.train):,} tokens to train on, "
            f"{len(self.validation):,} held out, {self.bytes_per_token:.2f} bytes each, vocabulary {self.vocab_size:,}"
        ]
        if fewer:
            parts.append(f"{fewer:,} fewer than asked for, since the text has no more pairs")
        if text["skipped"]:
            parts.append(f"skipped {text['skipped']}")
        return "; ".join(parts)

    def _read_about(self) -> dict[str, Any]:
        if not self.folder.is_dir():
            raise FileNotFoundError(f"there are no token files at {self.folder}: prepare(settings) makes them")
        try:
            sealed = json.loads((self.folder / "about.json").read_text(encoding="utf-8"))
            if sealed["sha256"] == _checksum(sealed["about"]):
                return sealed["about"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise self._damaged(f"about.json can't be read ({error!r})") from error
        raise self._damaged("about.json was changed after it was written")

    def _check(self, name: str, size: int, digest: str | None) -> None:
        path = self.folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise self._damaged(f"{name} " + ("is missing" if found is None else f"has {found:,} bytes, not {size:,}"))
        if digest is not None and file_sum(path)["sha256"] != digest:
            raise self._damaged(f"{name} has its {size:,} bytes, but not those that were written")

    def _damaged(self, what: str) -> ValueError:
        return ValueError(
            f"the token files are damaged: {what}. Delete {self.folder.resolve()}, and the next start makes them anew"
        )

    def _ids(self, name: str) -> NDArray[np.unsignedinteger]:
        return np.memmap(self.folder / name, dtype=self.about["dtype"], mode="r")


def sealed(about: dict[str, Any]) -> bytes:
    """Serialize the contents of about.json together with a checksum, so that changes to this file are detected, too."""
    return json.dumps({"about": about, "sha256": _checksum(about)}, indent=1).encode()


def _checksum(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
