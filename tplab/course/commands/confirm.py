"""Ask the learner to confirm an action that they may regret."""

import sys

from rich.console import Console
from rich.text import Text

from tplab.course.learn.course_files import Misuse


def agreed(question: str, yes: bool, console: Console) -> bool:
    """Ask `question` and return whether the answer is yes. `yes` skips asking it. Raises Misuse without a terminal."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise Misuse(f"{question} Nobody is here to answer: add --yes.")
    console.print(Text(f"{question} [y/N] ", style="bold"), end="")
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        console.print()
        return False
