"""Any text comes back as it was, the same text gives the same tokenizer, and no text can end a document."""

import hashlib
import os
import random
import subprocess
import sys

import pytest
from tokenizers import Tokenizer

from tplab.capstone.data.corpus import Document, gather
from tplab.capstone.data.tokenizer import END, END_OF_TEXT, encode, train_tokenizer

LIMIT, SIZE = 100_000, 500


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(gather(None, LIMIT).documents, SIZE)


def unusual() -> list[str]:
    draw = random.Random(0)
    planes = [(0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]
    mixed = ["".join(chr(draw.randint(*draw.choice(planes))) for _ in range(50)) for _ in range(50)]
    return [
        "", "\0", "\r\n", "a\r\n\r\nb\rc\n", " \t  x  \n\n   y ", "don't DON'T we'll", "Ġ Ċ ģ", "0" * 10_000,
        "e\u0301 é ﬁ \u200b\ufeff\u2028", "👩\u200d👧 🏴\u200d☠\ufe0f", "\uffff\U0010ffff",
        END_OF_TEXT, f"a{END_OF_TEXT}{END_OF_TEXT} b", *mixed,
    ]  # fmt: skip


def test_every_text_comes_back_as_it_was_and_the_standard_library_in_fewer_tokens(tokenizer: Tokenizer) -> None:
    documents = [*(Document("", text) for text in unusual()), *gather(None, LIMIT).documents]
    ids = encode(tokenizer, documents)
    for document, found in zip(documents, ids, strict=True):
        assert tokenizer.decode(found, skip_special_tokens=False) == document.text
        assert tokenizer.encode(document.text).ids == found
    assert sum(map(len, ids[len(unusual()) :])) < 0.6 * LIMIT
    assert max(max(found, default=0) for found in ids) == SIZE - 1


def test_no_text_can_forge_the_end_of_a_document(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end == END
    documents = [Document(str(i), f"{before}{END_OF_TEXT}{after}" * 50) for i, (before, after) in enumerate(
        [("", ""), ("x = '", "'\n"), ("\n", "\n"), (" ", " ")])]  # fmt: skip
    for of_these in (tokenizer, train_tokenizer(documents, 500)):  # also if it is all that was learned from
        assert of_these.token_to_id(END_OF_TEXT) == end
        for text, ids in zip(documents, encode(of_these, documents), strict=True):
            assert end not in ids
            assert of_these.decode(ids) == text.text
        copy = Tokenizer.from_str(of_these.to_str())  # as whoever opens tokenizer.json has it
        assert end not in copy.encode(END_OF_TEXT).ids
    assert tokenizer.decode([end], skip_special_tokens=False) == END_OF_TEXT


PROGRAM = """
import hashlib
from tplab.capstone.data.corpus import gather
from tplab.capstone.data.tokenizer import encode, train_tokenizer
documents = gather(None, {limit}).documents
tokenizer = train_tokenizer(documents, {size})
print(hashlib.sha256((tokenizer.to_str() + repr(encode(tokenizer, documents))).encode()).hexdigest())
"""


def test_a_run_with_other_numbers_of_threads_and_another_hash_seed_agrees(tokenizer: Tokenizer) -> None:
    command = [sys.executable, "-c", PROGRAM.format(limit=LIMIT, size=SIZE)]
    other = {"RAYON_NUM_THREADS": "7", "TOKENIZERS_PARALLELISM": "true", "PYTHONHASHSEED": "1"}
    run = subprocess.run(command, env=os.environ | other, capture_output=True, text=True)
    here = tokenizer.to_str() + repr(encode(tokenizer, gather(None, LIMIT).documents))
    assert run.stdout.strip() == hashlib.sha256(here.encode()).hexdigest(), run.stderr
