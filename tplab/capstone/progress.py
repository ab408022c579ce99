"""Show the progress of a slow task from a thread that keeps updating even while the task itself reports nothing.

    with progress() as show:
        show("reading the text")
        show("encoding", 0.4)              in a terminal    encoding █████░░░░░░░ 40%  12 s

In a terminal, this is one line. In JupyterLab, it's a widget. Both disappear when the work is done. Elsewhere, such as
in a job's output, a line is printed every `SELDOM` seconds. Quick work shows nothing.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from html import escape

from tplab.common.units import duration
from tplab.runtime.liveview import place
from tplab.runtime.screen import LastLine, Widget

OFTEN, SELDOM = 0.5, 10.0  # seconds between two updates in a terminal or widget, and between two lines elsewhere
Show = Callable[..., None]


def bar(share: float, width: int = 12) -> str:
    """Return a progress bar made of text, such as "██████░░░░░░"."""
    full = round(min(1.0, max(0.0, share)) * width)
    return "█" * full + "░" * (width - full)


@contextmanager
def progress() -> Iterator[Show]:
    """Context manager that yields `show(what, share=None)`, where `share` is the fraction of the work done so far."""
    where, line, widget = place(), LastLine(), Widget()
    began, over, said = time.monotonic(), threading.Event(), ""

    def show(what: str, share: float | None = None) -> None:
        nonlocal said
        said = what if share is None else f"{what} {bar(share)} {share:.0%}"

    def draw() -> None:
        text = f"{said}  {duration(round(time.monotonic() - began))}"
        if where == "terminal":
            line.show(lambda width: text[:width])
        elif where == "page":
            widget.show(f"<pre>{escape(text)}</pre>")
        else:
            print(text, file=sys.stderr, flush=True)

    def keep_on() -> None:
        with suppress(Exception):  # the work continues even if its progress can't be displayed
            while not over.wait(SELDOM if where == "nowhere" else OFTEN):
                draw()

    thread = threading.Thread(target=keep_on, daemon=True)
    thread.start()
    try:
        yield show
    finally:
        over.set()
        thread.join()
        line.wipe()
        with suppress(Exception):
            widget.end()
