"""A byte-pair tokenizer, trained on the training text with Hugging Face's `tokenizers`.

The vocabulary includes all 256 bytes, so any text can be encoded, and decoding restores it exactly. Training repeatedly
turns the most frequent pair of adjacent tokens into a token ("se", "sel", "self"), until there are `vocab_size` tokens.

    id 0                 END_OF_TEXT, which separates documents
    ids 1 to 256         the bytes
    ids 257 and higher   pairs, the most frequent first

If a text contains the characters "<|endoftext|>", they become ordinary tokens, so a document that mentions the marker
doesn't end there. (Sennrich et al. 2016, "Neural machine translation of rare words with subword units".)

The tokenizer of a Hugging Face folder may have a template such as "<s> text </s>". We keep what it puts before a text,
because the model was trained that way, but not what it puts after it. A prompt has to be continued, and each document
gets its end from `prepare`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tplab.capstone.data.corpus import Document
from tplab.common.downloads import damaged, read_json

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(documents: Sequence[Document], vocab_size: int) -> Tokenizer:
    """Train a tokenizer on these documents. It has `vocab_size` tokens, or fewer if the text has too few pairs.

    The result doesn't depend on the number of threads.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,  # a pair that occurs only once isn't worth a token
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer, length=len(documents))
    description = json.loads(tokenizer.to_str())
    description["added_tokens"] = []  # so that END_OF_TEXT is an ordinary entry, which no merge produces
    return Tokenizer.from_str(json.dumps(description))


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json, which may be another model's, for text of any length that may be continued.

    Settings for truncation and padding, and tokens that would follow a text, are ignored. Text that looks like a
    special token is encoded as ordinary text. Raises ValueError if the file is damaged.
    """
    description = read_json(path)
    post_processor = _open_ended(description.get("post_processor"))
    description |= {"truncation": None, "padding": None, "post_processor": post_processor}
    try:
        tokenizer = Tokenizer.from_str(json.dumps(description))
    except Exception as error:  # `tokenizers` raises no other kind
        raise damaged(path, f"doesn't describe a tokenizer ({error})") from error
    tokenizer.encode_special_tokens = True
    return tokenizer


def pretrained(folder: Path, vocab_size: int) -> tuple[Tokenizer, int]:
    """Return the tokenizer of a Hugging Face folder, and the id that ends a text.

    Raises ValueError if the folder doesn't specify this id, if there are ids of `vocab_size` or more, or if a file is
    damaged.
    """
    tokenizer = read_tokenizer(folder / "tokenizer.json")
    ends = read_json(folder / "config.json").get("eos_token_id")
    end = ends[0] if isinstance(ends, list) and ends else ends
    end = tokenizer.token_to_id(END_OF_TEXT) if end is None else end
    if not isinstance(end, int) or end < 0:
        raise ValueError(
            f"{folder / 'config.json'} has eos_token_id={ends!r}, but the run needs a token that separates two texts"
        )
    if (ids := max(size_of(tokenizer), end + 1)) > vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} has ids up to {ids - 1:,}, but the model's table has only {vocab_size:,} rows"
        )
    return tokenizer, end


def size_of(tokenizer: Tokenizer) -> int:
    """Return the number of ids, including unused ids below the largest one."""
    return 1 + max(tokenizer.get_vocab().values())


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[list[int]]:
    """Return the ids of each document, without END_OF_TEXT. Uses several threads if `tokenizers` is allowed to."""
    return [encoding.ids for encoding in tokenizer.encode_batch_fast([document.text for document in documents])]


def _open_ended(step: Any) -> Any:
    """Return the description of a post-processor without the tokens that it would add after a text."""
    match step:
        case {"type": "Sequence", "processors": steps}:
            return {**step, "processors": [_open_ended(inner) for inner in steps]}
        case {"type": "TemplateProcessing", "single": pieces}:
            end = max((place for place, piece in enumerate(pieces, 1) if "Sequence" in piece), default=0)
            return {**step, "single": pieces[:end]}
        case {"type": "BertProcessing" | "RobertaProcessing", "cls": [token, number]}:
            text = {"Sequence": {"id": "A", "type_id": 0}}
            return {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": token, "type_id": 0}}, text],
                "pair": [text, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
            }
    return step
