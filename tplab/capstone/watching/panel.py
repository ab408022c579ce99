"""The live panel of a training run: its progress, its curves, and the communication and memory of its ranks.

    with panel(settings):
        launch(train, settings.ranks, args=(settings,), backend=backend_for(settings.ranks), timeout=None)

In JupyterLab, the panel is a widget that is redrawn a few times a second and replaced by a static picture when the run
ends. In a terminal, it's a single line. Elsewhere, there's no panel, but a notebook still gets the final picture. The
panel only reads the run's log, in the process that waits for the ranks, so if drawing fails, the run isn't affected.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tplab.capstone.data.prepare import prepare
from tplab.capstone.own_layers.find import find_answers
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.loop import train
from tplab.capstone.watching.log_tail import LogTail, RunStatus
from tplab.capstone.watching.panel_view import to_html, to_line
from tplab.runtime import Results, launch
from tplab.runtime.devices import backend_for
from tplab.runtime.liveview import LiveView, Now, place, shown_by
from tplab.runtime.screen import LastLine, Widget


@contextmanager
def panel(settings: Settings) -> Iterator[LogTail]:
    """Context manager that shows the runs inside the block as they train. Yields the reader of their log."""
    tail = LogTail(settings)
    view = _Panel(tail)
    try:
        with shown_by(view.during):
            yield tail
    finally:
        with suppress(Exception):
            view.end()


def run(settings: Settings, answers: Any = None) -> Results:
    """Train with the panel: prepare the tokens, then run `train` on every rank.

    answers    the learner's answers from the chapters, for layers="mine" (None: find them)
    """
    if settings.layers == "mine" and answers is None:
        answers = find_answers(settings.chapters, settings)
    prepare(settings)
    with panel(settings):
        backend = backend_for(settings.ranks)
        return launch(train, settings.ranks, args=(settings, answers), backend=backend, timeout=None)


class _Panel(LiveView):
    """Shows the run in a widget, or in the last line of a terminal. In a notebook, a picture is left at the end."""

    def __init__(self, tail: LogTail) -> None:
        super().__init__(list)
        self.tail, self._where, self._line, self._widget = tail, place(), LastLine(), Widget()

    def during(self, see: Callable[[], list[Now]]) -> LiveView:
        """Return this view for one call of `launch`, which refreshes it while it waits for the ranks."""
        super().__init__(see)
        return self

    def _draw(self, seconds: float) -> None:
        if self._where == "nowhere":
            return
        status, ranks = self.tail.look(), self._see()
        if self._where == "page":
            self._widget.show(to_html(status, ranks))
        else:
            self._line.show(lambda width: to_line(status, width, ranks))

    def hide(self) -> None:
        self._line.wipe()

    def end(self) -> None:
        """Show the final picture, or the final line in a terminal. Called no matter how the run has ended."""
        self.hide()
        status = self.tail.look()
        if self._where == "terminal":
            if status.started and status.step:
                self._line.leave(lambda width: to_line(status, width))
            return
        picture: Any = None
        with suppress(Exception):
            picture = _picture(status)
        if self._widget.is_there:
            self._widget.end(picture)
        elif picture is not None and "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
            from IPython.display import display

            display(picture)


def _picture(status: RunStatus) -> Any:
    """Draw the final picture of the run's curves. Returns None if there are fewer than two losses."""
    if not status.started or len(status.losses) < 2:
        return None
    from tplab import viz

    return viz.training(status.losses, status.speeds, evaluations=status.evaluations)
