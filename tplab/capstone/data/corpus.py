"""Text to train on: the standard library of the running Python, or any folder of text files.

    collected = gather(None)              # the library's source code, including any tests, and its help() topics
    collected = gather("my/texts")        # every UTF-8 text file in the folder
    collected.documents                   # [Document(name, text), ...], the same in every run
    collected.skipped                     # {"not UTF-8": ["old.txt"], ...}

Each file is a document, with its bytes and line endings unchanged. `in_parts` splits long documents into several, and
`split` sets a few percent of all documents aside for validation. Documents with identical texts always end up on the
same side, so the model is never validated on a document that it was trained on.
"""

import ast
import hashlib
import sysconfig
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tplab.capstone.settings.run_folder import is_run
from tplab.common.corpus import files_below

LONGEST = 1 << 20  # characters; a document also gets at most 1/20 of the text, so that some can be set aside
VALIDATION_SHARE, VALIDATION_MOST = 0.03, 0.08
_HEAD = 1 << 16  # bytes to check first, because a binary file usually has a zero byte early
# Installed packages aren't part of the standard library, and encodings are tables of numbers.
_NO_LIBRARY = {"site-packages", "dist-packages", "encodings"}
_TOPICS = "pydoc_data/topics.py"


@dataclass(frozen=True)
class Document:
    name: str
    text: str


@dataclass
class Collected:
    """The documents that were found, and the names of skipped files by reason."""

    documents: list[Document] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)

    def skip(self, name: str, reason: str) -> None:
        self.skipped.setdefault(reason, []).append(name)

    def __str__(self) -> str:
        characters = sum(len(document.text) for document in self.documents)
        text = f"{len(self.documents):,} documents, {characters / 1e6:.1f} million characters"
        return "; skipped ".join([text, *filter(None, [skipped_text(self.skipped)])])


def gather(data: str | None = None, limit: int | None = None, without: Iterable[Path] = ()) -> Collected:
    """Read up to `limit` bytes of text from a folder, a single file, or (if `data` is None) the standard library.

    In the learner's folder, hidden files, the folders of runs, and the folders in `without` are skipped. All text is
    loaded into memory, so set a limit if it doesn't fit. Raises FileNotFoundError if the path doesn't exist, and
    ValueError if there's no text or the limit is below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} should be 1 byte or more, or None for all of the text")
    folder = Path(sysconfig.get_path("stdlib")) if data is None else Path(data).expanduser()
    if not folder.exists():
        what = "the standard library of this Python is missing" if data is None else "no such folder or file"
        raise FileNotFoundError(f"{what}: {folder}. Use --data PATH to train on a folder of text files")
    collected, left = Collected(), limit
    for path in _files(folder, data is None, {path.resolve() for path in without}, collected):
        name = path.relative_to(folder).as_posix() if path != folder else path.name
        try:
            text, whole = _read(path, left)
        except OSError as error:
            collected.skip(name, f"can't be read: {error.strerror}")
            continue
        except ValueError as error:
            collected.skip(name, str(error))
            continue
        parts = _topics(text) if data is None and name == _TOPICS else [Document(name, text)]
        collected.documents += [part for part in parts if part.text]
        if left is not None:
            left = left - len(text.encode()) if whole else 0
            if left <= 0:
                break
    if not collected.documents:
        found = f"we skipped {text}" if (text := skipped_text(collected.skipped)) else "it's empty"
        raise ValueError(f"there's no UTF-8 text in {folder}, because {found}")
    return collected


def skipped_text(skipped: dict[str, list[str]]) -> str:
    """Format the skipped files by reason, as in "3 not UTF-8 (a.txt, b.txt, ...), 1 binary (c.png)"."""
    return ", ".join(
        f"{len(names)} {reason} ({', '.join(names[:2])}{', ...' if len(names) > 2 else ''})"
        for reason, names in skipped.items()
    )


def in_parts(documents: Sequence[Document]) -> list[Document]:
    """Split documents that are longer than `LONGEST` or 1/20 of all text, at line ends if possible."""
    most = max(1, min(LONGEST, sum(len(document.text) for document in documents) // 20))
    parts = []
    for document in documents:
        text, start = document.text, 0
        while start < len(text):
            end = start + most
            if end < len(text):
                line_end = text.rfind("\n", start, end) + 1
                end = line_end if line_end > start + most // 2 else end
            parts.append(Document(document.name, text[start:end]))
            start = end
    return parts


def split(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Return (train, validation), each in input order. Validation gets about 3% of the characters, as whole documents.

    The choice depends only on the SHA-256 digests and sizes of the texts. In digest order, `split` takes each document
    that fits until validation has enough text. Raises ValueError unless there are at least two different texts.
    """
    sides = [(document, hashlib.sha256(document.text.encode()).digest()) for document in documents]
    sizes: Counter[bytes] = Counter()
    for document, digest in sides:
        sizes[digest] += len(document.text)
    if len(sizes) < 2:
        same = "there's only one document" if len(documents) == 1 else f"all {len(documents)} documents are the same"
        raise ValueError(f"some documents have to be held out for evaluation, but {same}. Add a different document")
    total, taken, held = sum(sizes.values()), 0, set()
    for digest in sorted(sizes):
        if taken < VALIDATION_SHARE * total and taken + sizes[digest] <= VALIDATION_MOST * total:
            taken += sizes[digest]
            held.add(digest)
    held = held or {min(sizes, key=lambda digest: (sizes[digest], digest))}
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


def _read(path: Path, limit: int | None) -> tuple[str, bool]:
    """Return (text of the first `limit` bytes, whether that's the full file). Raises ValueError if it isn't text."""
    if not path.is_file():
        raise ValueError("not a regular file")
    with open(path, "rb") as file:
        data = file.read(_HEAD)
        if b"\0" not in data:
            data += file.read(-1 if limit is None else max(0, limit + 1 - len(data)))
    if b"\0" in data:
        raise ValueError("binary")
    whole = limit is None or len(data) <= limit
    try:  # if the limit falls inside a character, this character is left out
        return getincrementaldecoder("utf-8")().decode(data[:limit], final=whole), whole
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None


def _topics(source: str) -> list[Document]:
    """Extract the help topics, such as the text of help("assert"), from the module's dict without running it."""
    try:
        assigned = next(statement for statement in ast.parse(source).body if isinstance(statement, ast.Assign))
        topics = sorted(ast.literal_eval(assigned.value).items())
    except (SyntaxError, ValueError, StopIteration):  # truncated by a limit, or different in a later Python
        return [Document(_TOPICS, source)]
    return [Document(f"pydoc_data/{name}", text) for name, text in topics]
