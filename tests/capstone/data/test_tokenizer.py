"""Any text comes back as it was, the same text gives the same tokenizer, and no text can end a document."""

import hashlib
import os
import random
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers

from tests.common.test_downloads import POINTER
from tplab.capstone.data.corpus import Document, gather
from tplab.capstone.data.tokenizer import END_OF_TEXT, encode, read_tokenizer, train_tokenizer

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


def test_every_text_comes_back_as_it_was(tokenizer: Tokenizer) -> None:
    texts = unusual()
    for text, ids in zip(texts, encode(tokenizer, [Document("", text) for text in texts]), strict=True):
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert tokenizer.encode(text).ids == ids


def test_the_standard_library_comes_back_in_fewer_tokens(tokenizer: Tokenizer) -> None:
    documents = gather(None, LIMIT).documents
    ids = encode(tokenizer, documents)
    assert [tokenizer.decode(one) for one in ids] == [document.text for document in documents]
    assert sum(map(len, ids)) < 0.6 * LIMIT
    assert max(max(one) for one in ids) == SIZE - 1


def test_no_text_can_forge_the_end_of_a_document(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end == 0
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


# Tokenizers of other models


def lowercased() -> Tokenizer:
    made = spaced()
    made.normalizer = normalizers.Sequence([normalizers.Lowercase(), made.normalizer])
    return made


def spaced() -> Tokenizer:
    """As in Llama 2: a space is put before a text, and bytes that aren't in the vocabulary are tokens."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    special = ["<unk>", *(f"<0x{number:02X}>" for number in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    made.train_from_iterator([f"{TEXT} " * 9], trainer)
    return made


TEXT = "def Main(a): return <s> a </s> + 1"
KINDS = {"bytes": lambda: train_tokenizer([Document("", f"{TEXT} " * 9)], 280), "spaced": spaced,
         "lowercased": lowercased}  # fmt: skip
TEMPLATES = {  # with the number of tokens that may stay before a text, and of those that may not stay after it
    "none": (0, 0), "bytes": (0, 0), "<s> $A": (1, 0), "$A </s>": (0, 1), "<s> $A </s>": (1, 1),
    "<s> <s> $A </s> </s>": (2, 2), "</s> $A": (1, 0), "bert": (1, 1), "roberta": (1, 1), "sequence": (1, 1),
}  # fmt: skip


CASES = [("bytes", template) for template in TEMPLATES]
CASES += [(kind, template) for kind in ("spaced", "lowercased") for template in ("<s> $A </s>", "roberta")]


@pytest.mark.parametrize(("kind", "template"), CASES)
def test_what_a_template_puts_before_a_text_stays_and_what_it_puts_after_it_goes(kind, template, tmp_path) -> None:
    from transformers import PreTrainedTokenizerFast

    made = KINDS[kind]()
    made.add_special_tokens(["<s>", "</s>"])
    begin, end = (("<s>", made.token_to_id("<s>")), ("</s>", made.token_to_id("</s>")))

    def filled(single: str) -> processors.PostProcessor:
        return processors.TemplateProcessing(single=single, special_tokens=[begin, end])

    if template != "none":
        made.post_processor = {
            "bytes": processors.ByteLevel,
            "bert": lambda: processors.BertProcessing(end, begin),
            "roberta": lambda: processors.RobertaProcessing(end, begin),
            "sequence": lambda: processors.Sequence([processors.ByteLevel(), filled("<s> $A </s>")]),
        }.get(template, lambda: filled(template))()
    made.save(str(tmp_path / "plain.json"))
    made.enable_truncation(3)
    made.enable_padding(length=50)
    made.save(str(tmp_path / "tokenizer.json"))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "plain.json"), split_special_tokens=True)
    before, after = TEMPLATES[template]
    mine = read_tokenizer(tmp_path / "tokenizer.json")
    for text in (TEXT, "a", "", "日本"):
        plain = theirs(text, add_special_tokens=False).input_ids
        wanted = theirs(text).input_ids[: before + len(plain)]
        assert len(theirs(text).input_ids) == len(wanted) + after
        assert wanted[before:] == plain
        assert mine.encode(text).ids == encode(mine, [Document("", text)])[0] == wanted, text
    again = Tokenizer.from_str(mine.to_str())  # as it's stored with the tokens
    again.encode_special_tokens = True
    assert again.encode(TEXT).ids == mine.encode(TEXT).ids


def test_a_tokenizer_that_can_not_be_read_is_named_with_its_size(tmp_path) -> None:
    path = tmp_path / "tokenizer.json"
    text = train_tokenizer([Document("", TEXT)], 260).to_str()
    for content in ("", text[:-1], "{}", '{"model": {"type": "BPE"}}', "[]", POINTER):
        path.write_text(content)
        with pytest.raises(ValueError, match=rf"{path} .*\b{len(content.encode()):,} bytes"):
            read_tokenizer(path)


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
