"""Tracebacks and the launcher's reports, cut down to the learner's own lines."""

import os
import re
import traceback

import torch

from tplab.runtime.failures import cell_of

# Shape of the tensor with which ranks vote inside `observe`; no learner's message has it, so votes can be recognized
VOTE_SHAPE = (1, 1, 1, 1)
_VOTE = re.compile(r"\(\[1, 1, 1, 1\] uint8, min\)")
HOUSE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep  # of the tplab package
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def readable_report(report: str) -> str:
    """The launcher's report without the frames of tplab and torch, and without the votes that `observe` takes."""
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
                lines.append(f"{rank[0]} has left your code")
            continue
        lines.append(line)
    return "\n".join(lines)


def has_frames(report: str) -> bool:
    """Return whether a report names any line of code."""
    return ", line " in report


def readable_traceback(error: BaseException) -> str:
    """The error and its traceback, without the frames of tplab and torch; cells are named as `launch` names them."""
    lines = []
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith((HOUSE, _TORCH)):
            cell = cell_of(frame.filename)
            told = f"  {cell}, line {frame.lineno}, in {frame.name}\n    {frame.line}\n"
            lines += [told] if cell else traceback.format_list([frame])
    return "".join(lines + traceback.format_exception_only(error))
