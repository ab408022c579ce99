"""Show what the ranks print. The output appears during the run, and in the end it's always in rank order."""

import sys
import time
from typing import Any

from tplab.runtime.failures import name_cells_in

KEPT_BYTES = 1 << 20  # per rank; if the output exceeds twice this, only its beginning and end are kept
SHOWN_LINES = 40  # how many lines per rank a notebook shows from the beginning, and as many from the end
REFRESH_SECONDS = 0.2


class Output:
    """Collects the output of every rank without showing it."""

    def __init__(self, world_size: int) -> None:
        self._text = [bytearray() for _ in range(world_size)]
        self._changed = False

    def write(self, rank: int, data: bytes) -> None:
        text = self._text[rank]
        text += data
        self._changed = True
        if len(text) > 2 * KEPT_BYTES:
            head = KEPT_BYTES // 2
            note = b"\n... output cut here: too long ...\n"
            text[head : len(text) - head] = note

    def texts(self) -> list[str]:
        return [bytes(text).decode(errors="replace") for text in self._text]

    def size(self, rank: int) -> int:
        return len(self._text[rank])

    def refresh(self) -> None:
        """Show new output. Called often while the ranks run."""

    def close(self) -> None:
        """Show the remaining output. Called once, after all output has arrived."""


class NotebookOutput(Output):
    """Shows the output of all ranks in one output area of the cell, in rank order, updated a few times per second."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self._handle: Any = None
        self._shown_at = 0.0
        self._live = not _inside_output_widget()

    def refresh(self) -> None:
        if self._live and self._changed and time.monotonic() - self._shown_at > REFRESH_SECONDS:
            self._show()

    def close(self) -> None:
        if self._changed:
            self._show()

    def _show(self) -> None:
        from IPython.display import display

        self._changed, self._shown_at = False, time.monotonic()
        data = {"text/plain": self._render()}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def _render(self) -> str:
        lines: list[str] = []
        for rank, text in enumerate(self.texts()):
            own = as_lines(text)
            hidden = len(own) - 2 * SHOWN_LINES
            if hidden > 0:
                note = f"... {hidden} lines not shown; results.output[{rank}] has more ..."
                own = [*own[:SHOWN_LINES], note, *own[-SHOWN_LINES:]]
            lines += [f"[rank {rank}] {line}" for line in own]
        return "\n".join(lines)


class TerminalOutput(Output):
    """Prints rank 0's output live and all other output when the run ends, so the order is the same in every run."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self._pending = bytearray()  # rank 0's output that isn't printed yet

    def write(self, rank: int, data: bytes) -> None:
        super().write(rank, data)
        if rank == 0:
            self._pending += data

    def refresh(self) -> None:
        end = self._pending.rfind(b"\n") + 1
        if end:
            self._print(0, bytes(self._pending[:end]).decode(errors="replace"))
            del self._pending[:end]

    def close(self) -> None:
        self._print(0, bytes(self._pending).decode(errors="replace"))
        for rank, text in list(enumerate(self.texts()))[1:]:
            self._print(rank, text)

    def _print(self, rank: int, text: str) -> None:
        for line in as_lines(text):
            print(f"[rank {rank}] {line}")
        sys.stdout.flush()


def as_lines(text: str) -> list[str]:
    """Return the lines of a text as a terminal would show them. After a carriage return, a line is overwritten.

    The file names that IPython makes up for notebook cells are replaced with the names of the cells.
    """
    if not text:
        return []
    return [_overwritten(line) for line in name_cells_in(text.removesuffix("\n")).split("\n")]


def _overwritten(line: str) -> str:
    shown = ""
    for part in line.split("\r"):
        shown = part + shown[len(part) :]
    return shown


def _inside_output_widget() -> bool:
    """Return True if an ipywidgets.Output captures the display, as in `interact`. Then display updates are ignored."""
    module = sys.modules.get("ipywidgets.widgets.widget")
    return any(getattr(widget, "msg_id", "") for widget in list(getattr(module, "_instances", {}).values()))


def in_kernel() -> bool:
    """Return True if this process runs the cells of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None


def say(text: str) -> None:
    """Print information to stderr, but to stdout in a notebook, because notebooks make stderr look like an error."""
    print(f"tplab: {text}", file=sys.stdout if in_kernel() else sys.stderr)


def output_for(world_size: int) -> Output:
    """Create the Output for the current environment, which is either a notebook or a terminal."""
    return NotebookOutput(world_size) if in_kernel() else TerminalOutput(world_size)
