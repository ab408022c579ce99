"""Token files on disk, which are memory-mapped and verified before use.

tokenizer.json     for Hugging Face's `tokenizers`: trained on the text, or of the model that the run starts from
train.bin          consecutive ids, little-endian, 2 bytes each (4 if the vocabulary is larger than 65,536)
validation.bin     the same for documents that the model isn't trained on
manifest.json      size and SHA-256 of the other files, and a description of the text
"""

import json
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tplab.capstone.checkpoints.manifest import check_files, read_manifest
from tplab.capstone.data.tokenizer import read_tokenizer


class TokenFiles:
    """Token files created by `prepare`.

    tokenizer               converts text to ids and back
    train, validation       memory-mapped vectors of ids; only the parts that are read get loaded
    vocab_size              number of ids, which is smaller than in the settings if the text has too few pairs
    end_of_text             the id between documents
    fingerprint, about      identifier of text and tokenizer; the contents of manifest.json

    A model may still use the larger vocabulary of the settings, so that its sizes stay as planned and divisible by tp.
    Ids from `vocab_size` on never occur in the text, and only sampling has to avoid them.

    Raises FileNotFoundError or ValueError if files are missing, truncated or (with `check`) changed since they were
    written. The message says what to delete.
    """

    def __init__(self, folder: str | Path, check: bool = True) -> None:
        self.folder = Path(folder)
        old = self.folder / "about.json"  # what earlier versions wrote instead of a manifest
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
