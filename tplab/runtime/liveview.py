"""A live view of a run, which shows what every rank is doing, such as computing or waiting for other ranks.

    4.2 s
    rank 0      ○ waits in all_reduce #3 for rank 1
    ranks 1, 3  ● computing
    rank 2      ✓ finished

The view stands below the cell on a notebook page and disappears when the run ends. A run shorter than SHOWN_AFTER
seconds is never shown and costs nothing. `look` reads the board (the shared memory in which ranks announce what they're
doing), `to_text` is a pure function, and the class only draws the result.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from tplab.runtime.board import Board
from tplab.runtime.diagnosis import short_name
from tplab.runtime.display import in_kernel
from tplab.runtime.failures import rank_names

SHOWN_AFTER = 1.0  # seconds that a run must last to be shown
REFRESH_SECONDS = 0.25
_STATES = {"starting": "… starting", "running": "● computing", "returned": "✓ finished", "raised": "✗ failed"}


def look(board: Board, dead: Sequence[int] = ()) -> list[str]:
    """Say what every rank does, such as "● computing". `dead` lists the ranks whose processes are gone."""
    return [_look(board, rank, rank in dead) for rank in range(board.world_size)]


def _look(board: Board, rank: int, dead: bool) -> str:
    state = board.state(rank)
    if dead and state != "returned":
        state = "raised"
    entry = next(iter(board.waits(rank)), None)
    if state != "running" or entry is None:
        return _STATES[state]
    if entry.kind in ("send", "recv"):
        return f"○ waits in {short_name(entry)}"
    absent = [other for other in entry.members if not board.has_entered(other, entry)]
    return f"○ waits in {short_name(entry)} for {rank_names(absent)}" if absent else f"↔ in {short_name(entry)}"


def to_text(ranks: Sequence[str], seconds: float) -> str:
    """Render what the ranks do, and the elapsed time. Ranks that do the same share a line."""
    groups: dict[str, list[int]] = {}
    for rank, does in enumerate(ranks):
        groups.setdefault(does, []).append(rank)
    names = {does: rank_names(who) for does, who in groups.items()}
    width = max(map(len, names.values()), default=0)
    return "\n".join([f"{seconds:.1f} s", *(f"{name:<{width}}  {does}" for does, name in names.items())])


class LiveView:
    """Shows what `see` returns in the output of a notebook cell. Leaves no trace in the saved notebook.

    A view must never disturb the run that it shows, so it stops drawing for good after the first error. It's never
    drawn where no page shows this kernel.
    """

    _handle: Any = None

    def __init__(self, see: Callable[[], list[str]]) -> None:
        self._see = see
        self._started = time.monotonic()
        self._due = self._started + SHOWN_AFTER if has_page() else float("inf")

    def refresh(self) -> None:
        """Draw the view if an update is due. Called often while the ranks run."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + REFRESH_SECONDS
            try:
                self._draw({"text/plain": to_text(self._see(), now - self._started)})
            except Exception:
                self._due = float("inf")

    def close(self) -> None:
        """Remove the view. Called once, when the run has ended."""
        self._due = float("inf")
        if self._handle is not None:
            with suppress(Exception):
                self._draw({})  # the saved notebook only contains an empty output, which shows nothing

    def _draw(self, data: dict[str, str]) -> None:
        from IPython.display import DisplayHandle

        if self._handle is None:
            self._handle = DisplayHandle()  # stored before anything is shown, in case of an interrupt
            self._handle.display(data, raw=True)
        else:
            self._handle.update(data, raw=True)


def has_page() -> bool:
    """Return True if a notebook page shows this kernel. Jupyter's server sets JPY_SESSION_NAME for such kernels.

    nbclient and nbval start kernels themselves and don't set it, so the view isn't a part of what they compare.
    """
    return in_kernel() and bool(os.environ.get("JPY_SESSION_NAME"))
