"""Text to train on: the standard library of the running Python, or any folder of text files.

    collected = gather(None)              # the library's source code, including any tests
    collected = gather("my/texts")        # every UTF-8 text file in the folder
    collected.documents                   # [Document(name, text), ...], the same in every run
    collected.skipped                     # ["old.txt (not UTF-8)", ...]

Each file is a document, with its bytes and line endings unchanged. `in_parts` splits long documents into several, and
`split` sets a few percent of all documents aside for validation. Documents with identical texts always end up on the
same side, so the model is never validated on a document that it was trained on.
"""

import hashlib
import sysconfig
from codecs import utf_8_decode
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tplab.capstone.settings.run_folder import is_run
from tplab.common.corpus import files_below
from tplab.common.units import count

LONGEST = 1 << 20  # characters; a document also gets at most 1/20 of the text, so that some can be set aside
VALIDATION_SHARE = 0.03
# Installed packages aren't part of the standard library, and encodings are tables of numbers.
_NO_LIBRARY = {"site-packages", "dist-packages", "encodings"}


class Document(NamedTuple):
    name: str
    text: str


class Collected(NamedTuple):
    """The documents that were found, and the files that were skipped, each with a reason."""

    documents: list[Document]
    skipped: list[str]

    @property
    def left_out(self) -> str:
        """The skipped files in a sentence, as in " Skipped 9 files, such as a.txt (not UTF-8), b.png (binary)."."""
        if not self.skipped:
            return ""
        return f" Skipped {count(len(self.skipped), 'file')}, such as {', '.join(self.skipped[:3])}."


def gather(data: str | None = None, limit: int | None = None, without: Iterable[Path] = ()) -> Collected:
    """Read up to `limit` bytes of text from a folder, a single file, or (if `data` is None) the standard library.

    In the learner's folder, hidden files, the folders of runs, and the folders in `without` are skipped. All text is
    loaded into memory, so set a limit if it doesn't fit. Raises FileNotFoundError if the path doesn't exist, and
    ValueError if there's no text.
    """
    folder = Path(sysconfig.get_path("stdlib") if data is None else data).expanduser()
    if not folder.exists():
        raise FileNotFoundError(f"no such folder or file: {folder}. Use --data PATH to train on a folder of text files")
    collected, left = Collected([], []), limit
    for path in _files(folder, data is None, {path.resolve() for path in without}):
        name = path.relative_to(folder).as_posix() if path != folder else path.name
        name = name.encode(errors="backslashreplace").decode()  # so that it can be printed
        try:
            found = _read(path)[:left]
            text = utf_8_decode(found, "strict", len(found) != left)[0]  # at the limit, half a character is left out
        except (OSError, ValueError) as error:
            why = "not UTF-8" if isinstance(error, UnicodeError) else getattr(error, "strerror", error)
            collected.skipped.append(f"{name} ({why})")
            continue
        if text:
            collected.documents.append(Document(name, text))
        left = None if left is None else left - len(found)
        if left == 0:
            break
    if not collected.documents:
        raise ValueError(f"there's no UTF-8 text in {folder}.{collected.left_out}")
    return collected


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

    The choice depends only on the SHA-256 digests and sizes of the texts. In digest order, `split` takes documents
    until validation has enough text. Raises ValueError unless there are at least two different texts.
    """
    sides = [(document, hashlib.sha256(document.text.encode()).digest()) for document in documents]
    sizes: Counter[bytes] = Counter()
    for document, digest in sides:
        sizes[digest] += len(document.text)
    if len(sizes) < 2:
        raise ValueError(
            "some text has to be held out for evaluation, but there is only one document, or all are the same. Add a "
            "different one"
        )
    wanted, held = VALIDATION_SHARE * sum(sizes.values()), set[bytes]()
    for digest in sorted(sizes)[:-1]:
        if sum(sizes[one] for one in held) < wanted:
            held.add(digest)
    return [d for d, digest in sides if digest not in held], [d for d, digest in sides if digest in held]


def _files(folder: Path, library: bool, without: set[Path]) -> Iterator[Path]:
    def wanted(path: Path) -> bool:
        if path.name.startswith(".") or path.name == "__pycache__":
            return False
        if not library:
            return not path.is_dir() or (path.resolve() not in without and not is_run(path))
        if path.is_dir():
            return path.name not in _NO_LIBRARY and not path.name.startswith("config-")
        return path.suffix == ".py" and not path.name.startswith("_sysconfigdata")

    return files_below(folder, wanted)


def _read(path: Path) -> bytes:
    """Return a file's bytes. Raises ValueError if they aren't text."""
    if not path.is_file():
        raise ValueError("not a regular file")
    with open(path, "rb") as file:
        data = file.read(1 << 16)  # a binary file usually has a zero byte early, and then we don't read the rest
        data += b"" if b"\0" in data else file.read()
    if b"\0" in data:
        raise ValueError("binary")
    return data
