"""Requests to stop a run: a file called `stop` in its folder. The run saves a checkpoint and ends.

The first rank looks for the file whenever it logs a step, and informs the others in `step_summary`. Ctrl-C creates the
file if `python -m tplab.capstone` has started the ranks. With torchrun, `touch runs/laptop/stop` does.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


def stop_file(folder: Path) -> Path:
    """Return the path of the file that asks the run in this folder to stop."""
    return folder / "stop"


@contextmanager
def stops_on_signal(folder: Path) -> Iterator[None]:
    """Turn the first Ctrl-C or SIGTERM inside the block into a `stop` file. A second one raises KeyboardInterrupt."""
    asked = False

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        folder.mkdir(parents=True, exist_ok=True)
        stop_file(folder).touch()
        print("\nSaving a checkpoint after this step. Press Ctrl-C again to quit now.", file=sys.stderr)

    stop_file(folder).unlink(missing_ok=True)  # of an earlier run
    before = {number: signal.signal(number, receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
