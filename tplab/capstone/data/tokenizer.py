"""A byte-pair tokenizer, trained on the training text with Hugging Face's `tokenizers`.

The vocabulary includes all 256 bytes, so any text can be encoded, and decoding restores it exactly. Training repeatedly
turns the most frequent pair of adjacent tokens into a token ("se", "sel", "self"), until there are `vocab_size` tokens.

    id 0                 END_OF_TEXT, which separates documents
    ids 1 to 256         the bytes
    ids 257 and higher   pairs, the most frequent first

If a text contains the characters "<|endoftext|>", they become ordinary tokens, so a document that mentions the marker
doesn't end there. (Sennrich et al. 2016, "Neural machine translation of rare words with subword units".)
"""

import json
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tplab.capstone.data.corpus import Document

END_OF_TEXT = "<|endoftext|>"
END = 0  # its id


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


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[list[int]]:
    """Return the ids of each document, without END_OF_TEXT. Uses several threads if `tokenizers` is allowed to."""
    return [encoding.ids for encoding in tokenizer.encode_batch_fast([document.text for document in documents])]
