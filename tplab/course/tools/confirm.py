"""A question before something that a learner may regret."""

import sys

from rich.console import Console
from rich.text import Text

from tplab.course.tools.course_files import Misuse


def agreed(question: str, yes: bool, console: Console) -> bool:
    """Whether the answer is yes. Raises Misuse where nobody can answer; `yes`: `--yes` was given, don't ask."""
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
