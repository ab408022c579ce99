"""Output that is updated in place: the last line of a terminal, or a widget in the output of a cell."""

import shutil
import sys
from collections.abc import Callable
from typing import Any

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class LastLine:
    """The last line of a terminal, written to stderr."""

    def __init__(self) -> None:
        self._shown = False

    def show(self, line: Callable[[int], str]) -> None:
        """Replace the current text with `line(width)`, which should have at most `width` characters."""
        sys.stderr.write("\r\x1b[K" + line(shutil.get_terminal_size().columns - 1))
        sys.stderr.flush()
        self._shown = True

    def wipe(self) -> None:
        """Clear the line to make room for other output."""
        if self._shown:
            self._shown = False
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def leave(self, line: Callable[[int], str]) -> None:
        """Show `line(width)` permanently, and end the line."""
        self.show(line)
        sys.stderr.write("\n")
        sys.stderr.flush()
        self._shown = False


class Widget:
    """A widget that shows HTML in the output of the running cell. It's created when something is first shown."""

    def __init__(self) -> None:
        self._widget: Any = None
        self._handle: Any = None

    def show(self, html: str) -> None:
        if self._widget is not None:
            self._widget.value = html
            return
        import ipywidgets  # imported here so that quick runs don't wait for it
        from IPython.display import DisplayHandle

        self._widget = ipywidgets.HTML(html)
        data = {WIDGET_VIEW: {"model_id": self._widget.model_id, "version_major": 2, "version_minor": 0}}
        self._handle = DisplayHandle()  # stored before anything is shown, in case of an interrupt
        self._handle.display(data, raw=True)

    def end(self) -> None:
        """Remove the widget. The saved notebook only contains an empty output, which shows nothing."""
        if self._handle is not None:
            self._handle.update({}, raw=True)
        if self._widget is not None:
            for part in (self._widget, self._widget.style, self._widget.layout):
                part.close()
