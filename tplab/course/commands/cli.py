"""The `tplab` command. Each subcommand is a file in commands/, except `tplab build`, which is notebooks/build.py.

The exit code is 0 on success, 1 if something isn't right (for example, an exercise doesn't pass), 2 if a file can't be
read or the command is wrong, and 130 if the command was interrupted.
"""

import argparse
import sys

from rich.console import Console
from rich.text import Text

import tplab
from tplab.course.commands import check, doctor, grade, hint, lab, mine, plan, progress, reset, solution, start, update
from tplab.course.learn.course_files import Misuse
from tplab.course.notebooks.cells import Unreadable

COMMANDS = (lab, start, update, check, progress, mine, hint, solution, reset, grade, doctor, plan)


def main(argv: list[str] | None = None) -> int:
    """Run a `tplab` command line and return its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["build"]:
        from tplab.course.notebooks.build import main as build  # imported here because it takes seconds

        return build(arguments[1:])
    options = parse(arguments)
    console = Console(highlight=False)
    try:
        return options.run(options, console)
    except (Misuse, Unreadable) as error:
        return _refused(str(error))
    except OSError as error:  # such as a full disk, or a folder without write permission
        return _refused(f"This can't be read or written: {error.strerror or error} ({error.filename}).")
    except (KeyboardInterrupt, EOFError):  # Ctrl-C, or Ctrl-D in place of an answer
        console.print("stopped")
        return 130


def _refused(told: str) -> int:
    Console(stderr=True, highlight=False).print(Text(told, style="red"))
    return 2


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tplab", description="The course's command.")
    parser.add_argument("--version", action="version", version=f"tplab {tplab.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command in COMMANDS:
        command.add(commands)
    commands.add_parser("build", help="build the notebooks from solutions/*.py")
    options, rest = parser.parse_known_args(arguments)
    if rest and not getattr(options, "hands_on", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    return options


if __name__ == "__main__":
    sys.exit(main())
