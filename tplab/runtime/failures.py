"""Turn the exception or exit status of a failed rank into the error report that the learner reads.

A rank's traceback names the notebook's cell and line and leaves out the launcher's frames. The report starts with the
root cause. If a rank has died, errors of other ranks that only say that the connection was lost are left out.
"""

import linecache
import os
import re
import signal
import sys
import sysconfig
from collections.abc import Sequence
from typing import Any

Frames = list[tuple[str, int, str]]  # file, line, function
SHOWN_FRAMES = 10  # how many frames of a long traceback are shown from its beginning, and as many from its end
SHOWN_MESSAGE_LINES = 100  # how many lines of an exception's message are shown
SHOWN_REPORTS = 4  # how many different errors are shown if the ranks fail in different ways


class RankError(RuntimeError):
    """Raised when a rank fails. The message is the full report, with a traceback and the location of each rank.

    rank:            the rank whose failure is reported first (None if the run as a whole failed)
    cause_type:      class name of the exception, such as "ValueError" ("exit" or "signal" if the process ended, and
                     "timeout" if the run took too long)
    cause_message:   message of the exception, or how the process ended
    """

    def __init__(self, report: str, rank: int | None = None, cause_type: str = "", cause_message: str = "") -> None:
        super().__init__(report)
        self.rank, self.cause_type, self.cause_message = rank, cause_type, cause_message

    def _render_traceback_(self) -> list[str]:
        """Return the text that IPython shows instead of a traceback through the launcher, as a list of strings."""
        return [f"{type(self).__name__}: {self}"]


class Deadlock(RankError):  # noqa: N818 (the name is the diagnosis)
    """Raised when ranks wait for a collective or message that never completes, or when matching calls differ."""


class Interrupted(KeyboardInterrupt):
    """Raised when the user interrupts a run. The message says where every rank was."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]


def place(where: str) -> str:
    """Format a call site "file:line:function" for a report, with the notebook cell or file, the line and its source."""
    file, line, function = where.rsplit(":", 2)
    source = linecache.getline(file, int(line)).strip()
    inside = "" if function == "<module>" else f" in {function}"
    return f"{cell_of(file) or file} line {line}{inside}" + (f":  {source}" if source else "")


_cell_names: dict[str, str] = {}


def name_cell(file: str, name: str) -> None:
    """Set a cell's name in reports. `tplab check` runs a chapter in parts, so its cells have no meaningful numbers."""
    _cell_names[file] = name


def cell_of(file: str) -> str | None:
    """Return the name of the cell that IPython compiled as `file`, such as "cell [7]", or None for any other file.

    A rank doesn't know the notebook's cells, so this returns None there, and the notebook names the cell later.
    """
    if not re.fullmatch(_CELL_FILE, file):
        return None
    if _cell_names:
        return _cell_names.get(file, "another cell")
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None:
        return None
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return f"cell [{numbers[file]}]" if file in numbers else "cell [?]"


_CELL_FILE = r"[^\s\"]{0,250}ipykernel_\d+[/\\]\d+\.py"  # the file that IPython pretends to compile a cell from


def name_cells_in(text: str) -> str:
    """Replace the file names that IPython gives to cells, as in warnings and syntax errors, with the cells' names."""
    if "ipykernel_" not in text:  # this is the usual case, and the text may be long
        return text
    pattern = rf'File "({_CELL_FILE})"|({_CELL_FILE})'
    return re.sub(pattern, lambda found: cell_of(found[1] or found[2]) or found[0], text)


def format_chain(chain: Sequence[tuple[str, Frames]]) -> str:
    """Format the result of `rank.describe_exception` the way Python prints a traceback.

    If consecutive frames are in installed packages, only the last one is kept, so that the learner's code stands out.
    """
    parts = []
    for text, frames in chain:
        lines = ["Traceback (most recent call last):"] if frames else []
        shown = _without_repetition(_without_installed(frames))
        lines += [part if isinstance(part, str) else _format_frame(*part) for part in shown]
        parts.append("\n".join([*lines, _shorten(name_cells_in(text.rstrip()))]))
    return "\n\nThis led to the next error:\n\n".join(parts)


def _without_installed(frames: Frames) -> Frames:
    """Return the frames, keeping only the last one of each series of frames in installed packages."""
    pairs = zip(frames, [*frames[1:], None], strict=False)
    return [frame for frame, after in pairs if not (is_installed(frame[0]) and after and is_installed(after[0]))]


def _without_repetition(frames: Frames) -> list[tuple[str, int, str] | str]:
    """Return the frames, or only the outermost and innermost ones if there are very many, as in endless recursion."""
    left_out = len(frames) - 2 * SHOWN_FRAMES
    if left_out <= 0:
        return list(frames)
    about = f"over {left_out // 100 * 100}" if left_out > 100 else left_out  # rounded, so it's the same on every rank
    note = f"  ... {about} more calls in between ..."
    return [*frames[:SHOWN_FRAMES], note, *frames[-SHOWN_FRAMES:]]


def _format_frame(file: str, line: int, function: str) -> str:
    location = cell_of(file) or f'File "{file}"'
    source = linecache.getline(file, line).strip()
    return f"  {location}, line {line}, in {function}" + (f"\n    {source}" if source else "")


def _shorten(text: str) -> str:
    """Leave out the middle of a very long message."""
    lines = text.split("\n")
    if len(lines) > SHOWN_MESSAGE_LINES:
        half = SHOWN_MESSAGE_LINES // 2
        lines = [*lines[:half], f"... {len(lines) - 2 * half} more lines ...", *lines[-half:]]
    return "\n".join(lines)


def split_message(chain: Sequence[tuple[str, Frames]]) -> tuple[str, str]:
    """Return the class name and the message of the last exception in a chain."""
    text = chain[-1][0].strip()
    name, _, message = text.partition(": ")
    return name.rsplit(".", 1)[-1], message


def rank_names(ranks: Sequence[int]) -> str:
    """Format ranks as text, such as "rank 2" or "ranks 0, 1, 3", or "ranks 0-31" if there are many in a row."""
    ranks = sorted(ranks)
    if len(ranks) > 8 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def describe_exit(status: int) -> str:
    """Describe the exit status of a process that ended without reporting a result or an error."""
    if status >= 0:
        return f"exited with status {status} before its function returned"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hints = {
        "SIGKILL": " (if you did not do that, the machine ran out of memory)",
        "SIGSEGV": " (it touched memory that is not its own)",
    }
    return f"was ended by {name}" + hints.get(name, "")


def parse_stack(dump: bytes) -> Frames:
    """Parse a stack that faulthandler wrote, and return its frames, innermost first."""
    found: list[tuple[Any, ...]] = re.findall(r'File "(.*?)", line (\d+) in (.*)', dump.decode(errors="replace"))
    return [(file, int(line), function) for file, line, function in found]


def innermost_user_frame(frames: Frames) -> str | None:
    """Return the innermost frame outside installed packages and tplab.runtime as "file:line:function", or None."""
    for file, line, function in frames:
        if not (file.startswith(("<", RUNTIME)) or is_installed(file)):
            return f"{file}:{line}:{function}"
    return None


RUNTIME = os.path.dirname(__file__) + os.sep
TPLAB = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PACKAGES = tuple({sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib")})
_LIBRARY = (*_PACKAGES, *{sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib")})


def is_installed(file: str) -> bool:
    """Return True for a file of Python's standard library or of an installed package."""
    return file.startswith(_LIBRARY)


def is_standard_library(file: str) -> bool:
    """Return True for a file of Python's standard library. Installed packages don't belong to it."""
    return file.startswith(("<frozen", *_LIBRARY)) and not file.startswith(_PACKAGES)


def different_batches(message: str) -> str | None:
    """Return NCCL's words about two ranks that open different numbers of connections to each other, or None.

    Before the first messages between two ranks, NCCL opens connections. Two ranks that are opposite each other in the
    group, as with p = 2, exchange all that they need for them in a single message, whose size depends on which sends
    and receives they have batched (NVIDIA/nccl 5067397, src/transport.cc, ncclTransportP2pSetup). If one of the ranks
    leaves out a send, NCCL therefore doesn't hang, but raises an internal error on that rank.
    """
    found = re.search(r"Message truncated : received \d+ bytes instead of \d+", message)
    return found[0] if found and "NCCL error" in message else None


def lost_connection(message: str) -> bool:
    """Return True if an error message only says that the connection to another rank was lost."""
    return (
        re.search(r"Connection (closed|reset|refused)|Broken pipe|Read error|Write error|closed by peer", message)
        is not None
    )
