"""What is collected is the files' own text, in one order; what is no text is named; nothing held back is trained on.
The tokenizer returns any text as it was, and no text can end a document.
"""

import os
import random
import re
import sysconfig
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests import saying
from tplab.capstone.data.corpus import VALIDATION_SHARE, Document, gather, in_parts, split
from tplab.capstone.data.tokenizer import END, END_OF_TEXT, encode, train_tokenizer

UNUSUAL = "Grüße, 世界 🎉\r\n\u200b\ufeff\x0b\x1f and e\u0301\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "b.txt": UNUSUAL.encode(),
        "a.py": b"print(1)\r\n",
        "sub/c": b"no suffix",
        "sub/z.md": b"# z\n",
        "empty.txt": b"",
        "latin.txt": "Grüße".encode("latin-1"),
        "utf16.txt": "ab".encode("utf-16"),
        "picture.png": b"\x89PNG\0\0" + bytes(range(256)),
        "late_zero.txt": b"a" * 200_000 + b"\0",
        ".git/config": b"[core]",
        ".hidden": b"secret",
    }
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    return tmp_path


def test_a_folder_s_text_is_taken_byte_by_byte_and_the_rest_is_named(folder: Path) -> None:
    collected = gather(str(folder))
    assert [document.name for document in collected.documents] == ["a.py", "b.txt", "sub/c", "sub/z.md"]
    for document in collected.documents:
        assert document.text.encode() == (folder / document.name).read_bytes()
    skipped = {"late_zero.txt": "binary", "latin.txt": "UTF-8", "picture.png": "binary", "utf16.txt": "binary"}
    for found, (name, why) in zip(collected.skipped, skipped.items(), strict=True):
        assert re.match(saying(name, why), found)


def test_what_is_no_file_is_named(folder: Path) -> None:
    (folder / "up").symlink_to(folder, target_is_directory=True)  # a circle
    (folder / "nowhere").symlink_to("missing.txt")
    os.mkfifo(folder / "pipe")  # reading it would wait for ever
    Path(os.fsdecode(os.fsencode(folder) + b"/\xfe.bin")).write_bytes(b"\0")
    collected = gather(str(folder))
    assert [document.name for document in collected.documents] == ["a.py", "b.txt", "sub/c", "sub/z.md"]
    for name, why in {"nowhere": "regular", "pipe": "regular", "\\udcfe.bin": "binary"}.items():
        assert any(re.match(saying(name, why), found) for found in collected.skipped), name


def test_a_limit_is_in_bytes_and_cuts_no_character_in_two(folder: Path) -> None:
    (folder / "latin.txt").unlink()  # its beginning might be half a character
    whole = b"".join(document.text.encode() for document in gather(str(folder)).documents)
    for limit in range(1, len(whole) + 5):
        text = "".join(document.text for document in gather(str(folder), limit).documents).encode()
        assert whole.startswith(text)
        assert min(limit, len(whole)) - 3 <= len(text) <= limit


def test_a_single_file_is_a_text_too_and_nothing_is_an_error_that_says_what_to_do(folder: Path) -> None:
    assert gather(str(folder / "b.txt")).documents == [Document("b.txt", UNUSUAL)]
    with pytest.raises(FileNotFoundError, match=r"missing.*--data PATH"):
        gather(str(folder / "missing"))
    with pytest.raises(ValueError, match=saying("UTF-8", "picture.png", "1 file", "picture.png", "binary")):
        gather(str(folder / "picture.png"))


def test_the_standard_library_is_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "a.py": "a = 1\n", "test/test_a.py": "b = 2\n", "LICENSE.txt": "free", "x.so": "!",
        "site-packages/torch.py": "no", "encodings/cp1.py": "table", "__pycache__/a.py": "no",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.get)
    assert [document.name for document in gather().documents] == ["a.py", "test/test_a.py"]


def lines(documents: list[Document]) -> set[str]:
    return {line for document in documents for line in document.text.splitlines()}


def test_what_is_held_back_is_a_few_percent_whatever_names_and_order_and_no_line_of_it_is_trained_on() -> None:
    documents = [Document(str(i), "".join(f"{i} {j}\n" for j in range(i % 50))) for i in range(1, 400)]
    documents += [Document(f"copy {i}", documents[i].text) for i in range(0, 300, 3)]
    train, validation = split(documents)
    assert sorted(train + validation, key=documents.index) == documents
    assert train == sorted(train, key=documents.index)
    assert not lines(train) & lines(validation)
    total, held = (sum(len(document.text) for document in side) for side in (documents, validation))
    longest = 2 * max(len(document.text) for document in documents)  # with its copy
    assert VALIDATION_SHARE * total <= held <= VALIDATION_SHARE * total + longest

    documents = [Document(str(i), f"text {i}\n" * 9) for i in range(100)]
    renamed = [Document("x" + document.name, document.text) for document in reversed(documents)]
    assert {document.text for document in split(documents)[1]} == {document.text for document in split(renamed)[1]}


def test_a_single_long_text_is_cut_at_line_ends_so_that_some_can_be_held_back() -> None:
    book = Document("book", "".join(f"line {i}\r\n" for i in range(5000)))
    parts = in_parts([book])
    assert "".join(part.text for part in parts) == book.text
    assert all(part.text.endswith("\n") for part in parts)
    assert 20 <= len(parts) <= 23
    train, validation = split(parts)
    assert len(validation) == 1
    assert not lines(train) & lines(validation)
    one_line = in_parts([Document("one line", "x" * 10_001)])
    assert "".join(part.text for part in one_line) == "x" * 10_001


def test_several_small_files_can_be_split_and_copies_of_one_text_can_t() -> None:
    train, validation = split(in_parts([Document(name, f"{name} text\n" * 100) for name in "abc"]))
    assert train
    assert validation
    with pytest.raises(ValueError, match="document"):
        split([Document(name, "same\n") for name in "abc"])


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
