"""A live view of a run, which shows what every rank is doing, such as computing or waiting for other ranks.

    rank 0  ● computing        rank 1  ○ waits in all_reduce #3 for rank 0        rank 2  ✓ finished        4.2 s

The view is a row of boxes on a notebook page, in a widget that disappears when the run ends. A run shorter than
SHOWN_AFTER seconds is never shown and costs nothing. `look` reads the board (the shared memory in which ranks announce
what they're doing), `to_html` is a pure function, and the class only draws the result.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from html import escape
from typing import Any, NamedTuple

from tplab.runtime.board import Board
from tplab.runtime.diagnosis import short_name
from tplab.runtime.display import in_kernel
from tplab.runtime.failures import rank_names

SHOWN_AFTER = 1.0  # seconds that a run must last to be shown
REFRESH_SECONDS = 0.25
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"

# doing -> sign and color; the colors also differ in lightness (Okabe and Ito's palette)
LOOK = {
    "starting": ("…", "#999999"),
    "computing": ("●", "#0072B2"),
    "waiting": ("○", "#E69F00"),
    "communicating": ("↔", "#56B4E9"),
    "finished": ("✓", "#009E73"),
    "failed": ("✗", "#D55E00"),
}
_STATES = {"starting": "starting", "running": "computing", "returned": "finished", "raised": "failed"}


class Now(NamedTuple):
    """What a rank is doing: a key of LOOK, and the same in words, such as "waits in all_reduce #3 for rank 1"."""

    rank: int
    doing: str
    words: str


def look(board: Board, dead: Sequence[int] = ()) -> list[Now]:
    """Read the state of every rank from the board. `dead` lists the ranks whose processes are gone."""
    return [_look(board, rank, rank in dead) for rank in range(board.world_size)]


def _look(board: Board, rank: int, dead: bool) -> Now:
    doing = _STATES[board.state(rank)]
    entry = next(iter(board.waits(rank)), None)
    if dead and doing != "finished":
        return Now(rank, "failed", "failed")
    if doing != "computing" or entry is None:
        return Now(rank, doing, doing)
    if entry.kind in ("send", "recv"):
        return Now(rank, "waiting", f"waits in {short_name(entry)}")
    absent = [other for other in entry.members if not board.has_entered(other, entry)]
    if not absent:
        return Now(rank, "communicating", f"in {short_name(entry)}")
    return Now(rank, "waiting", f"waits in {short_name(entry)} for {rank_names(absent)}")


def to_html(ranks: Sequence[Now], seconds: float) -> str:
    """Render the states as a row of boxes, one per rank, then the elapsed time. Works in light and dark themes."""
    boxes = "".join(_box(rank) for rank in ranks)
    clock = f'<div style="opacity: 0.75; padding: 2px 4px;">{seconds:.1f} s</div>'
    style = "display: flex; flex-wrap: wrap; gap: 6px; align-items: center; line-height: 1.3; font-size: 12px; "
    style += "font-family: var(--jp-ui-font-family, sans-serif); color: var(--jp-ui-font-color1, inherit);"
    return f'<div style="{style}">{boxes}{clock}</div>'


def _box(now: Now) -> str:
    sign, color = LOOK[now.doing]
    style = f"border: 1px solid {color}; border-left: 8px solid {color}; padding: 2px 8px; width: 13.5em; height: 4em; "
    style += "overflow: hidden; box-sizing: border-box;"
    return f'<div style="{style}"><b>rank {now.rank}</b><br>{sign} {escape(now.words)}</div>'


class LiveView:
    """Shows the ranks as a row of boxes in the output of a notebook cell. Leaves no trace in the saved notebook.

    From SHOWN_AFTER seconds on, it keeps drawing the states that `see` returns. A view must never disturb the run that
    it shows, so it stops drawing for good after the first error. It's never drawn where no page shows this kernel.
    """

    _widget: Any = None
    _handle: Any = None

    def __init__(self, see: Callable[[], list[Now]]) -> None:
        self._see = see
        self._started = time.monotonic()
        self._due = self._started + SHOWN_AFTER if has_page() else float("inf")

    def refresh(self) -> None:
        """Draw the view if an update is due. Called often while the ranks run."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + REFRESH_SECONDS
            try:
                self._draw(to_html(self._see(), now - self._started))
            except Exception:
                self._due = float("inf")

    def _draw(self, html: str) -> None:
        if self._widget is not None:
            self._widget.value = html
            return
        import ipywidgets  # imported here so that quick runs don't wait for it
        from IPython.display import DisplayHandle

        self._widget = ipywidgets.HTML(html)
        data = {WIDGET_VIEW: {"model_id": self._widget.model_id, "version_major": 2, "version_minor": 0}}
        self._handle = DisplayHandle()  # stored before anything is shown, in case of an interrupt
        self._handle.display(data, raw=True)

    def close(self) -> None:
        """Remove the view. Called once, when the run has ended."""
        self._due = float("inf")
        with suppress(Exception):
            if self._handle is not None:
                self._handle.update({}, raw=True)  # the saved notebook only has an empty output, which shows nothing
            if self._widget is not None:
                for part in (self._widget, self._widget.style, self._widget.layout):
                    part.close()


def has_page() -> bool:
    """Return True if a notebook page shows this kernel. Jupyter's server sets JPY_SESSION_NAME for such kernels.

    nbclient, nbval and VS Code start kernels themselves and don't set it. Colab has a server, but no built-in widgets.
    """
    return in_kernel() and bool(os.environ.get("JPY_SESSION_NAME")) and "google.colab" not in sys.modules
