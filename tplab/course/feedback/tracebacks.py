"""Shorten tracebacks and launcher reports to the learner's own lines of code."""

import os
import re
import traceback

import torch

from tplab.runtime.failures import cell_of

# Shape of the tensor that ranks vote with inside `observe`. No message of the learner's has this shape.
VOTE_SHAPE = (1, 1, 1, 1)
_VOTE = re.compile(r"\(\[1, 1, 1, 1\] uint8, min\)")
HOUSE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep  # the tplab folder
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def readable_report(report: str) -> str:
    """Remove tplab's and torch's stack frames from a launcher report, along with the votes taken inside `observe`."""
    lines: list[str] = []
    skip_source = False
    for line in report.splitlines():
        source = skip_source and line.startswith("    ")
        skip_source = line.lstrip().startswith((f'File "{HOUSE}', f'File "{_TORCH}'))
        if source or skip_source:
            continue
        if _VOTE.search(line):
            rank = re.match(r"\s+rank \d+:", line)
            if rank:
                lines.append(f"{rank[0]} has returned from your code")
            continue
        lines.append(line)
    return "\n".join(lines)


def has_frames(report: str) -> bool:
    """Return whether the report mentions any line of code."""
    return ", line " in report


def readable_traceback(error: BaseException) -> str:
    """Format an error and its traceback without tplab's and torch's frames, naming cells the way `launch` does."""
    lines = []
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith((HOUSE, _TORCH)):
            cell = cell_of(frame.filename)
            told = f"  {cell}, line {frame.lineno}, in {frame.name}\n    {frame.line}\n"
            lines += [told] if cell else traceback.format_list([frame])
    return "".join(lines + traceback.format_exception_only(error))
