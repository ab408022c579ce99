"""Text to train on: the running Python's standard library, or any folder of text files.

    collected = gather(None)              # the library's sources, its tests where there are any, what help() can tell
    collected = gather("my/texts")        # every file in it that is UTF-8 text
    collected.documents                   # [Document(name, text), ...], the same in every run
    collected.skipped                     # {"not UTF-8": ["old.txt"], ...}

A file is a document, its bytes as they are: no line ending is changed. `in_parts` cuts long documents, and `split`
holds a few percent of them back for validation. The same text twice is always on one side, so that nothing of what the
model is tested on was in its training.
"""

import ast
import hashlib
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tplab.capstone.settings.run_folder import is_run
from tplab.common.corpus import files_below

LONGEST = 1 << 20  # characters of a document; and at most a 20th of the text, so that there is something to hold back
VALIDATION_SHARE, VALIDATION_MOST = 0.03, 0.08
_HEAD = 1 << 16  # so much of a file is looked at first: who is no text has a zero byte early
# Installed packages and build files are no standard library, and encodings are tables of numbers.
_NO_LIBRARY = {"site-packages", "dist-packages", "encodings"}
_TOPICS = "pydoc_data/topics.py"


@dataclass(frozen=True)
class Document:
    name: str
    text: str


@dataclass
class Collected:
    """Documents, and the names of what was skipped, by the reason."""

    documents: list[Document] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)

    def skip(self, name: str, reason: str) -> None:
        self.skipped.setdefault(reason, []).append(name)

    def __str__(self) -> str:
        characters = sum(len(document.text) for document in self.documents)
        text = f"{len(self.documents):,} documents, {characters / 1e6:.1f} million characters"
        return "; skipped ".join([text, *filter(None, [skipped_text(self.skipped)])])


def collect(data: str | None = None, limit: int | None = None) -> list[Document]:
    """The documents that `gather` finds."""
    return gather(data, limit).documents


def gather(data: str | None = None, limit: int | None = None, without: Iterable[Path] = ()) -> Collected:
    """All text in a folder (or one file), or the standard library's (None); the first `limit` bytes of it.

    In a folder of the learner's, files and folders whose names begin with a dot are not looked at, nor are folders of
    runs, nor the folders `without`, should they lie in it. All text is held in memory: of more than that take a limit.
    Raises FileNotFoundError where there is nothing, ValueError where there is no text.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} bytes of text: it should be 1 or more, or None for all")
    folder = Path(sysconfig.get_path("stdlib")) if data is None else Path(data).expanduser()
    if not folder.exists():
        what = "the standard library of this Python is missing" if data is None else "there is no such folder or file"
        raise FileNotFoundError(f"{what}: {folder}. Give a folder of text files as data (--data PATH)")
    collected, left = Collected(), limit
    for path in _files(folder, data is None, {path.resolve() for path in without}, collected):
        name = path.relative_to(folder).as_posix() if path != folder else path.name
        text, whole = _read(path, left, name, collected)
        parts = _topics(text) if data is None and name == _TOPICS and text else [Document(name, text)]
        collected.documents += [part for part in parts if part.text]
        if left is not None:
            left = left - len(text.encode()) if whole else 0
            if left <= 0:
                break
    if not collected.documents:
        found = skipped_text(collected.skipped) or "it is empty"
        raise ValueError(f"there is no text in {folder}: {found}. Text is what decodes as UTF-8")
    return collected


def skipped_text(skipped: dict[str, list[str]]) -> str:
    """ "3 files not UTF-8 (a.txt, b.txt, ...)", for each reason."""
    return ", ".join(
        f"{len(names)} {reason} ({', '.join(names[:2])}{', ...' if len(names) > 2 else ''})"
        for reason, names in skipped.items()
    )


def in_parts(documents: Sequence[Document]) -> list[Document]:
    """The documents, those cut at line ends that are longer than `LONGEST` or a 20th of all."""
    most = max(1, min(LONGEST, sum(len(document.text) for document in documents) // 20))
    return [part for document in documents for part in _parts(document, most)]


def split(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """(train, validation), each in the old order; about 3% of the characters are held back, in whole documents.

    Which ones is decided by the digest of their text alone: in the order of digests, what fits until there is enough.
    Raises ValueError where all documents are the same text.
    """
    digests = [hashlib.sha256(document.text.encode()).digest() for document in documents]
    sizes: dict[bytes, int] = {}
    for document, digest in zip(documents, digests, strict=True):
        sizes[digest] = sizes.get(digest, 0) + len(document.text)
    if len(sizes) < 2:
        raise ValueError(f"{len(documents)} documents with {len(sizes)} different texts can't be split in two")
    total, taken, held = sum(sizes.values()), 0, set()
    for digest in sorted(sizes):
        if taken < VALIDATION_SHARE * total and taken + sizes[digest] <= VALIDATION_MOST * total:
            taken += sizes[digest]
            held.add(digest)
    held = held or {min(sizes, key=lambda digest: (sizes[digest], digest))}
    sides = list(zip(documents, digests, strict=True))
    return [d for d, digest in sides if digest not in held], [d for d, digest in sides if digest in held]


def _files(folder: Path, library: bool, without: set[Path], collected: Collected) -> Iterator[Path]:
    def wanted(path: Path) -> bool:
        if not library:
            hidden = path.name.startswith(".") or path.name == "__pycache__"
            return not hidden and not (path.is_dir() and (path.resolve() in without or is_run(path)))
        if path.is_dir():
            return path.name not in _NO_LIBRARY and not path.name.startswith(("config-", "__pycache__"))
        is_document = path.suffix in (".rst", ".txt") and "test" not in path.relative_to(folder).parts
        return (path.suffix == ".py" and not path.name.startswith("_sysconfigdata")) or is_document

    def unreadable(path: Path, error: OSError) -> None:
        collected.skip(path.relative_to(folder).as_posix() + "/", f"can't be read: {error.strerror}")

    return files_below(folder, wanted, unreadable)


def _read(path: Path, limit: int | None, name: str, collected: Collected) -> tuple[str, bool]:
    """(text of the file or of its first `limit` bytes, whether that is all of it); "" if it is none, which is noted."""
    try:
        if not path.is_file():
            collected.skip(name, "no file")
            return "", True
        with open(path, "rb") as file:
            data = file.read(_HEAD)
            if b"\0" not in data:
                data += file.read(-1 if limit is None else max(0, limit + 1 - len(data)))
    except OSError as error:
        collected.skip(name, f"can't be read: {error.strerror}")
        return "", True
    if b"\0" in data:
        collected.skip(name, "binary")
        return "", True
    whole = limit is None or len(data) <= limit
    try:
        return data[:limit].decode(), whole
    except UnicodeDecodeError as error:
        if not whole and error.reason == "unexpected end of data":  # the limit lies inside a character
            return data[: error.start].decode(), whole
        collected.skip(name, "not UTF-8")
        return "", True


def _topics(source: str) -> list[Document]:
    """What help("assert") and the like show: a dict in a module, read without running it."""
    try:
        assigned = next(statement for statement in ast.parse(source).body if isinstance(statement, ast.Assign))
        topics = sorted(ast.literal_eval(assigned.value).items())
    except (SyntaxError, ValueError, StopIteration):  # a limit has cut it, or a later Python has it another way
        return [Document(_TOPICS, source)]
    return [Document(f"pydoc_data/{name}", text) for name, text in topics]


def _parts(document: Document, most: int) -> Iterator[Document]:
    text, start, number = document.text, 0, 0
    while start < len(text):
        end = start + most
        if end < len(text):
            line_end = text.rfind("\n", start, end) + 1
            end = line_end if line_end > start + most // 2 else end
        yield Document(
            document.name if end >= len(text) and not start else f"{document.name}#{number}", text[start:end]
        )
        start, number = end, number + 1
