"""Reports of failures: from what a failed rank left behind to the text that the learner reads.

A rank's traceback names the notebook's own cell and line, and leaves out the launcher's frames. What happened first
comes first: a rank that failed only because another one died is listed after that one.
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


class RankError(RuntimeError):
    """The error for a failed rank. The message is the full report: its traceback first, then where the others were.

    rank:            the rank that failed first (None: the run as a whole)
    cause_type:      name of the exception's class, such as "ValueError" (or "exit", "signal" if the process ended)
    cause_message:   the exception's own message
    """

    def __init__(self, report: str, rank: int | None = None, cause_type: str = "", cause_message: str = "") -> None:
        super().__init__(report)
        self.rank, self.cause_type, self.cause_message = rank, cause_type, cause_message

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows in place of the launcher's frames."""
        return [f"{type(self).__name__}: {self}"]


class Deadlock(RankError):  # noqa: N818 (the name is the diagnosis)
    """A deadlock: ranks wait for a collective that can't complete, because one never joins it or their calls differ."""


class Interrupted(KeyboardInterrupt):
    """The interruption of a run; the message says where every rank was."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]


def place(where: str) -> str:
    """A readable form of the call site "file:line:function": the notebook's cell and line, with the line's source."""
    file, line, function = where.rsplit(":", 2)
    source = linecache.getline(file, int(line)).strip()
    inside = "" if function == "<module>" else f" in {function}"
    return f"{cell_of(file) or file} line {line}{inside}" + (f":  {source}" if source else "")


_cell_names: dict[str, str] = {}


def name_cell(file: str, name: str) -> None:
    """Give a cell a name for reports, for when its number means nothing: `tplab check` runs a chapter in parts."""
    _cell_names[file] = name


def cell_of(file: str) -> str | None:
    """The name of the cell that IPython stores under a file name, such as "cell [7]"; None for other files."""
    if not re.search(r"ipykernel_\d+[/\\]\d+\.py$", file):
        return None
    if _cell_names:
        return _cell_names.get(file, "another cell")
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return f"cell [{numbers[file]}]" if file in numbers else "cell [?]"


def format_chain(chain: Sequence[tuple[str, Frames]]) -> str:
    """A traceback as Python prints it, from the result of `rank.describe_exception`.

    Of consecutive frames in installed packages, only the last is kept, because what matters is the learner's own line.
    """
    parts = []
    for text, frames in chain:
        lines = ["Traceback (most recent call last):"] if frames else []
        for (file, line, function), after in zip(frames, [*frames[1:], None], strict=False):
            if _is_installed(file) and after and _is_installed(after[0]):
                continue
            location = cell_of(file) or f'File "{file}"'
            lines.append(f"  {location}, line {line}, in {function}")
            source = linecache.getline(file, line).strip()
            if source:
                lines.append(f"    {source}")
        parts.append("\n".join([*lines, text.rstrip()]))
    return "\n\nThis led to the next error:\n\n".join(parts)


def split_message(chain: Sequence[tuple[str, Frames]]) -> tuple[str, str]:
    """The class name and the message of the last exception in a chain."""
    text = chain[-1][0].strip()
    name, _, message = text.partition(": ")
    return name.rsplit(".", 1)[-1], message


def rank_names(ranks: Sequence[int]) -> str:
    """Ranks in words: "rank 2", "ranks 0, 1, 3"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


def describe_exit(status: int) -> str:
    """A description of the end of a process that never reported anything."""
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
    """The frames that faulthandler wrote, innermost first."""
    found: list[tuple[Any, ...]] = re.findall(r'File "(.*?)", line (\d+) in (.*)', dump.decode(errors="replace"))
    return [(file, int(line), function) for file, line, function in found]


def innermost_user_frame(frames: Frames) -> str | None:
    """The innermost frame that is neither an installed package's nor ours, as "file:line:function"."""
    for file, line, function in frames:
        if not (file.startswith(("<", _RUNTIME)) or _is_installed(file)):
            return f"{file}:{line}:{function}"
    return None


_RUNTIME = os.path.dirname(__file__) + os.sep
_LIBRARY = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def _is_installed(file: str) -> bool:
    return file.startswith(_LIBRARY)


def lost_connection(message: str) -> bool:
    """True if an error says only that another rank has gone."""
    return (
        re.search(r"Connection (closed|reset|refused)|Broken pipe|Read error|Write error|closed by peer", message)
        is not None
    )
