"""Trim tracebacks and launcher reports down to the learner's own lines of code."""

import os
import re
import traceback

import torch

from tplab.runtime.failures import cell_of

# Ranks vote inside `observe` by all-reducing a tensor of this shape. The learner's code never sends such a tensor.
VOTE_SHAPE = (1, 1, 1, 1)
_VOTE = re.compile(r"\(\[1, 1, 1, 1\] uint8, min\)")
HOUSE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep  # the tplab folder
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def readable_report(report: str) -> str:
    """Remove tplab's and torch's stack frames, and the lines about the vote in `observe`, from a launcher report.

    If a rank was voting, it had already returned from the learner's code, and the shortened report says so.
    """
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


def readable_traceback(error: BaseException) -> str:
    """Format an error and its traceback, leaving out the frames from tplab and torch.

    Notebook cells have the same names as in the reports of `launch`.
    """
    lines = []
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith((HOUSE, _TORCH)):
            cell = cell_of(frame.filename)
            told = f"  {cell}, line {frame.lineno}, in {frame.name}\n    {frame.line}\n"
            lines += [told] if cell else traceback.format_list([frame])
    return "".join(lines + traceback.format_exception_only(error))
