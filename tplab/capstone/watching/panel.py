"""The live panel of a training run in a notebook: its progress, its loss, and what its ranks are doing.

    with panel(settings):
        launch(train, settings.ranks, args=(settings,), backend=backend_for(settings.ranks), timeout=None)

In JupyterLab, the panel is a widget that is redrawn a few times a second. When the run ends, a picture of all its
curves takes its place. If a program executes the notebook, only this picture is shown. Outside of notebooks, the run
is displayed like any other launch. The panel only reads the log, so if drawing fails, the run isn't affected.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from tplab import viz
from tplab.capstone.data.prepare import prepare
from tplab.capstone.own_layers.find import find_answers
from tplab.capstone.settings.run_folder import LOG
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.log import Points, Row, read_log, steps_of, thinned
from tplab.capstone.training.loop import train
from tplab.capstone.watching.console import to_text
from tplab.runtime import Results, launch
from tplab.runtime.devices import backend_for
from tplab.runtime.liveview import Now, WidgetView, place, shown_by
from tplab.runtime.liveview import to_html as boxes

WIDE, HIGH = 600, 120  # size of the curve in pixels
CURVE = "#3A86C8"  # visible on white and on black


def run(settings: Settings, answers: Any = None) -> Results:
    """Train with the panel: prepare the tokens, then run `train` on every rank.

    answers    the learner's answers, for layers="mine". If None, `find_answers` looks for them in `settings.chapters`
    """
    if settings.layers == "mine" and answers is None:
        answers = find_answers(settings.chapters, settings)
    prepare(settings)
    with panel(settings):
        backend = backend_for(settings.ranks)
        return launch(train, settings.ranks, args=(settings, answers), backend=backend, timeout=None)


@contextmanager
def panel(settings: Settings) -> Iterator[None]:
    """Context manager that makes a notebook show the panel for each run launched inside it."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or place() == "terminal":
        yield
    else:
        with shown_by(partial(_Panel, settings)):
            yield


class _Panel(WidgetView):
    """Shows what the run appends to its log in a widget, and replaces that by a picture when the run ends."""

    def __init__(self, settings: Settings, see: Callable[[], list[Now]]) -> None:
        super().__init__(see)
        self._log, self._last_step = Path(settings.folder, LOG), settings.last_step
        past = self._log.read_bytes() if self._log.exists() else b""
        self._place = self._began_at = past.rfind(b"\n") + 1  # the run drops any incomplete line after that
        self._says: dict[str, str] = {}
        self._losses: list[tuple[int, float]] = []

    def _draw(self, seconds: float) -> None:
        if place() != "page":
            return
        for row in self._new_rows():
            if row["kind"] in ("start", "step", "evaluation"):
                self._says[row["kind"]] = to_text(row, self._last_step)
            if row["kind"] == "step":
                self._losses.append((row["step"], row["loss"]))
        text = escape("\n".join(self._says.values()))
        curve = to_svg(self._losses, self._last_step)
        self._widget.show(f'<pre style="white-space: pre-wrap;">{text}</pre>{curve}{boxes(self._see(), seconds)}')

    def _new_rows(self) -> list[Row]:
        """Return the complete rows that haven't been read yet."""
        if not self._log.exists():
            return []
        with open(self._log, "rb") as log:
            log.seek(self._place)
            data = log.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._place += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def _remove(self) -> None:
        picture: Any = None
        with suppress(Exception):
            if self._log.stat().st_size > self._began_at:
                picture = _picture(read_log(self._log.parent))
        if self._widget.is_there:
            self._widget.end(picture)
        elif picture is not None:
            from IPython.display import display

            display(picture)


def _picture(rows: Sequence[Row]) -> viz.Picture:
    steps = steps_of(rows)
    losses, speeds = (thinned([(row["step"], row[name]) for row in steps])[1] for name in ("loss", "tokens_per_second"))
    evaluations = [(row["step"], row["loss"]) for row in steps_of(rows, "evaluation")]
    return viz.training(losses, speeds, evaluations=evaluations)


def to_svg(losses: Points, last_step: int) -> str:
    """Draw (step, loss) pairs as a curve, or nothing if there are none. The space on the right is for future steps."""
    if not losses:
        return ""
    curve = thinned(losses)[1]
    low, high = min(loss for _, loss in curve), max(loss for _, loss in curve)
    across, up = WIDE / max(1, last_step - 1), HIGH / (high - low or 1)
    points = " ".join(f"{across * (step - 1):.1f},{up * (high - loss):.1f}" for step, loss in curve)
    return (
        f'<svg width="{WIDE + 60}" height="{HIGH + 28}" viewBox="-50 -8 {WIDE + 60} {HIGH + 28}" fill="none" '
        f'font-size="11" role="img" aria-label="loss over steps, now {losses[-1][1]:.2f}" style="display: block;">'
        f'<path d="M0,0 V{HIGH} H{WIDE}" stroke="currentColor" opacity="0.4"/>'
        f'<polyline points="{points}" stroke="{CURVE}" stroke-width="1.8"/><g fill="currentColor" text-anchor="end">'
        f'<text x="-6" y="10">{high:.2f}</text><text x="-6" y="{HIGH}">{low:.2f}</text>'
        f'<text x="{WIDE}" y="{HIGH + 16}">step {last_step:,}</text></g></svg>'
    )
