"""Show an unobtrusive box instead of an error if a notebook page runs into an exercise that isn't solved yet.

A stub raises NotImplementedError("exercise 5.1"). Anywhere other than on a notebook page (in `tplab check`, nbval,
nbclient, or a script, for example), this error makes the code that calls the stub fail. In JupyterLab or VS Code, a
failed cell would keep Run All from running the cells below it. That's why `watch()` makes a page's kernel do two things
for a cell that is waiting for an exercise to be solved:

1. It shows a box that names the exercise. A cell is waiting for an exercise if
   - it calls the exercise's stub, in this process or on a rank,
   - it fails and uses a variable that a waiting cell above didn't create, or didn't finish creating, or
   - it's a check that fails because the exercise's cell hasn't defined the answer yet.
2. It reports the cell as successful, so that Run All continues with the next cell.

If an answer is wrong, its check still fails, and Run All stops there, because the cells below would use the wrong
answer.
"""

import os
import re
import sys
from collections.abc import Callable
from traceback import walk_tb
from types import TracebackType
from typing import Any

from tplab.course.feedback.verdict import BLUE, CheckFailed, box, display_html, heading, paragraph
from tplab.course.notebooks.numbering import EXERCISE
from tplab.course.notebooks.source import bound_names, checked_in, used_names
from tplab.runtime import RankError

_STUB = re.compile(rf"exercise ({EXERCISE})")


def on_page() -> bool:
    """Return True if this kernel is running a notebook page in JupyterLab, VS Code, or Colab.

    Return False under nbval and nbclient.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or getattr(shell, "kernel", None) is None or "PYTEST_CURRENT_TEST" in os.environ:
        return False  # nbval's kernel inherits JPY_SESSION_NAME when a cell runs `!pytest --nbval-lax`
    return (
        bool(os.environ.get("JPY_SESSION_NAME"))
        or "__vsc_ipynb_file__" in shell.user_ns
        or "google.colab" in sys.modules
    )


def watch() -> None:
    """In a notebook, from now on, show a box whenever a cell calls the stub of an unsolved exercise."""
    global _watcher
    if _watcher is None and on_page():
        _watcher = Watcher(sys.modules["IPython"].get_ipython())


class Watcher:
    """Tracks which cells are waiting for an exercise to be solved, and which variables those cells failed to create."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.source = ""  # the running cell's source
        self.failed = False  # whether the running cell has failed
        self.waits_for = ""  # the exercise that the running cell is waiting for, or ""
        self.unmade: dict[str, str] = {}  # variable -> the exercise that the variable's cell is waiting for
        shell.set_custom_exc((Exception,), self.show)
        shell.events.register("pre_run_cell", self.begin)
        shell.events.register("post_run_cell", self.end)

    def begin(self, info: Any) -> None:
        self.source, self.failed, self.waits_for = info.raw_cell or "", False, ""

    def show(
        self, shell: Any, kind: type, error: Exception, trace: TracebackType | None, tb_offset: int | None = None
    ) -> None:
        """Show the box if the cell is waiting for an exercise to be solved.

        Otherwise, show IPython's own error report.
        """
        self.failed = True
        number, name = asks_for(error), ""
        if not number and not isinstance(error, CheckFailed):
            name = next((name for name in sorted(_names(used_names, self.source)) if name in self.unmade), "")
            number = self.unmade.get(name, "")
        checked = checked_in(self.source)
        if not number and checked and isinstance(error, NameError) and error.name in _names(used_names, self.source):
            number, name = checked, error.name
        if not number:
            # If the cell isn't valid Python, it failed before IPython ran any code
            ran = any(frame.f_code.co_name == "run_code" for frame, _ in walk_tb(trace))
            shell.showtraceback((kind, error, trace), tb_offset=tb_offset, running_compiled_code=ran)
            return
        self.waits_for = number
        text, html = told(self.source, number, name, error)
        display_html(html, text)

    def end(self, result: Any) -> None:
        """Record which variables a cell couldn't create because an exercise isn't solved yet, and let later cells run.

        IPython calls this method before the kernel tells the page whether the cell failed.
        """
        if self.waits_for and result is not None:
            result.error_in_exec = None
        for name in _names(bound_names, self.source):
            if self.waits_for:
                self.unmade[name] = self.waits_for
            elif not self.failed:
                self.unmade.pop(name, None)


_watcher: Watcher | None = None


def asks_for(error: Exception) -> str:
    """Return the number of the exercise whose stub raised the error, or "" if the error doesn't come from a stub.

    The stub may have been called in this process or in one of the rank processes.
    """
    kind, message = type(error).__name__, str(error)
    if isinstance(error, RankError):
        kind, message = error.cause_type, error.cause_message
    stub = _STUB.fullmatch((message or "").strip())
    return stub[1] if stub and kind == "NotImplementedError" else ""


def _names(find: Callable[[str], set[str]], source: str) -> set[str]:
    try:
        return find(source)
    except SyntaxError:
        return set()


def told_by_check(number: str, asked: str) -> tuple[str, str]:
    """Return the two lines to show if the check for exercise `number` ran into the stub for exercise `asked`."""
    if number == asked:
        more = (
            "Write your answer in the exercise's cell above, and run that cell. Then run this check. If you've already "
            f'done that, the cell still contains the line `raise NotImplementedError("exercise {number}")`. Delete '
            "this line."
        )
        return f"Exercise {number} is waiting for you.", more
    more = f"Your answer calls code that you'll write in exercise {asked}, so write exercise {asked} first."
    return f"Exercise {number} is waiting for exercise {asked}.", more


def told(source: str, number: str, name: str, error: Exception) -> tuple[str, str]:
    """Return the message for a cell that can't run until exercise `number` is solved, as text and as HTML.

    source: the source of the cell, which may contain the exercise's check.
    name:   the missing variable that made the cell fail with `error`, or "" if the cell called a stub.
    """
    checked = checked_in(source)
    if checked == number and name:
        head = f"Exercise {number} is waiting for `{name}`."
        more = f"`{name}` isn't defined yet. Run the exercise's cell above, and then run this check."
    elif checked:
        head, more = told_by_check(checked, number)
    else:
        head = f"This cell is waiting for exercise {number}."
        more = f"It needs code that you'll write in exercise {number}. Run it again once your answer passes its check."
        if name:
            more = (
                f"This cell uses `{name}`, which a cell above can't define before you've written exercise {number}. "
                f"After that, run both cells. (This cell stopped with {type(error).__name__}: {error})"
            )
    return f"{head}\n{more}", box(BLUE, heading("○ " + head), paragraph(more))
