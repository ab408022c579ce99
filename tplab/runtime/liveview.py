"""A live view of a run, which shows what every rank is doing, such as computing or waiting for other ranks.

    rank 0  ● computing        rank 1  ○ waits in all_reduce #3 for rank 0        rank 2  ✓ finished        4.2 s

In JupyterLab, the view is a row of boxes, in a widget that disappears when the run ends. In a terminal, it is one line,
which is cleared when the run ends. Elsewhere, nothing is shown. A run shorter than SHOWN_AFTER seconds is never shown
and costs nothing. `look` reads the board (the shared memory in which ranks announce what they're doing), `to_html` and
`to_line` are pure functions, and the classes only draw the result.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from typing import Literal

from tplab.runtime.board import Board
from tplab.runtime.screen import LastLine, Widget

SHOWN_AFTER = 1.0  # seconds that a run must last to be shown
REFRESH_SECONDS = 0.25
NAMED = 3  # up to this many absent ranks are listed; more are only counted

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


@dataclass(frozen=True)
class Now:
    """What a rank is doing. `inside` names its collective ("all_reduce #3"). `absent` lists the ranks it waits for."""

    rank: int
    doing: str
    inside: str = ""
    absent: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.doing == "waiting":
            return f"waits in {self.inside}" + (f" for {_ranks(self.absent)}" if self.absent else "")
        return f"in {self.inside}" if self.inside else self.doing


def look(board: Board, dead: Sequence[int] = ()) -> list[Now]:
    """Read the state of every rank from the board. `dead` lists the ranks whose processes are gone."""
    return [_look(board, rank, rank in dead) for rank in range(board.world_size)]


def _look(board: Board, rank: int, dead: bool) -> Now:
    doing = _STATES[board.state(rank)]
    entry = next(iter(board.waits(rank)), None)
    if dead and doing != "finished":
        return Now(rank, "failed")
    if doing != "computing" or entry is None:
        return Now(rank, doing)
    if entry.kind in ("send", "recv"):
        side = "to" if entry.kind == "send" else "from"
        return Now(rank, "waiting", f"{entry.kind} {side} {f'rank {entry.peer}' if entry.peer >= 0 else 'any rank'}")
    absent = tuple(other for other in entry.members if not board.has_entered(other, entry))
    return Now(rank, "waiting" if absent else "communicating", f"{entry.kind} #{entry.number}", absent)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > NAMED:
        return f"{len(ranks)} ranks"
    return f"rank{'' if len(ranks) == 1 else 's'} " + ", ".join(map(str, ranks))


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
    return f'<div style="{style}"><b>rank {now.rank}</b><br>{sign} {escape(str(now))}</div>'


def to_line(ranks: Sequence[Now], seconds: float, width: int) -> str:
    """Render the states as one line of at most `width` characters. Ranks that do the same thing are grouped."""
    groups: dict[str, list[int]] = {}
    for now in ranks:
        groups.setdefault(f"{LOOK[now.doing][0]} {now}", []).append(now.rank)
    texts = [f"rank{'' if len(who) == 1 else 's'} {_span(who)} {what}" for what, who in groups.items()]
    line = "  ".join([f"{seconds:.1f} s", *texts])
    return line if len(line) <= width else line[: max(0, width - 1)] + "…"


def _span(ranks: list[int]) -> str:
    """Format rank numbers compactly: "2", "0, 3", "0-3"."""
    whole = len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1
    return f"{ranks[0]}-{ranks[-1]}" if whole else ", ".join(map(str, ranks))


class LiveView:
    """Base class that shows nothing. After SHOWN_AFTER seconds, subclasses keep drawing the states that `see` returns.

    A view must never disturb the run that it shows, so it stops drawing for good after the first error.
    """

    def __init__(self, see: Callable[[], list[Now]]) -> None:
        self._see = see
        self._started = time.monotonic()
        self._due = self._started + SHOWN_AFTER

    def refresh(self) -> None:
        """Draw the view if an update is due. Called often while the ranks run."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + REFRESH_SECONDS
            try:
                self._draw(now - self._started)
            except Exception:
                self._due = float("inf")

    def hide(self) -> None:
        """Make room for other text. Called before any text is printed."""

    def close(self) -> None:
        """Remove the view. Called once, when the run has ended."""
        self._due = float("inf")
        with suppress(Exception):
            self._remove()

    def _draw(self, seconds: float) -> None:
        pass

    def _remove(self) -> None:
        self.hide()


class StatusLine(LiveView):
    """Shows the ranks in the last line of the terminal, on stderr."""

    def __init__(self, see: Callable[[], list[Now]]) -> None:
        super().__init__(see)
        self._line = LastLine()

    def _draw(self, seconds: float) -> None:
        self._line.show(lambda width: to_line(self._see(), seconds, width))

    def hide(self) -> None:
        self._line.wipe()


class WidgetView(LiveView):
    """Shows the ranks as a row of boxes in the output of a notebook cell. Leaves no trace in the saved notebook."""

    def __init__(self, see: Callable[[], list[Now]]) -> None:
        super().__init__(see)
        self._widget = Widget()

    def _draw(self, seconds: float) -> None:
        self._widget.show(to_html(self._see(), seconds))

    def _remove(self) -> None:
        self._widget.end()


def live_view(board: Board, dead: Callable[[], list[int]]) -> LiveView:
    """Create the view for the current environment."""

    def see() -> list[Now]:
        return look(board, dead())

    views: dict[str, type[LiveView]] = {"page": WidgetView, "terminal": StatusLine, "nowhere": LiveView}
    return views[place()](see)


def place() -> Literal["page", "terminal", "nowhere"]:
    """Return where a view would currently be displayed: on a notebook page, in a terminal, or nowhere."""
    if _has_page():
        return "page"
    terminal = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return "terminal" if terminal else "nowhere"


def _has_page() -> bool:
    """Return True if a notebook page shows this kernel. Jupyter's server sets JPY_SESSION_NAME for such kernels.

    nbclient, nbval and VS Code start kernels themselves and don't set it. Colab has a server, but no built-in widgets.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    kernel = getattr(shell, "kernel", None)
    return kernel is not None and bool(os.environ.get("JPY_SESSION_NAME")) and "google.colab" not in sys.modules
