"""`tplab lab`: open the course in JupyterLab, on this machine only. `make lab` runs it too.

tplab lab                                the index of the course
tplab lab 4                              chapter 4
tplab lab --no-browser --port=8899       unknown options go to JupyterLab
"""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from tplab.course.tools.course_files import Misuse, add_root, all_chapters, chapter, root_of


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "lab",
        help="open the course in JupyterLab",
        description="Open the course in JupyterLab, on this machine only. Other options go to JupyterLab.",
        allow_abbrev=False,
    )
    parser.add_argument("chapter", nargs="?", type=int, metavar="N", help="open this chapter; else the course's index")
    add_root(parser)
    parser.set_defaults(run=run, hands_on=True)


def run(options: argparse.Namespace, console: Console) -> int:
    """Replace this process with JupyterLab, so that JupyterLab receives its signals. Returns only if that fails."""
    root = root_of(options).resolve()
    page = first_page(root, options.chapter)
    console.print("JupyterLab runs until you stop it with Ctrl-C, twice. No browser here? Copy the URL that it prints.")
    sys.stdout.flush()
    os.chdir(root)  # the folder that JupyterLab shows, unless an option overrides it
    arguments = command(page, options.rest)
    os.execve(arguments[0], arguments, environment(os.environ))


def first_page(root: Path, number: int | None) -> str:
    """Return the notebook to open, as a path below `root`. Raises Misuse."""
    if number is None:
        pages = [root / "chapters" / "index.ipynb", *(files.learner for files in all_chapters(root).values())]
        found = next((page for page in pages if page.exists()), root / "README.md")
    else:
        try:
            found = chapter(root, number).learner
        except Misuse as error:
            raise Misuse(f"{error} An option of JupyterLab is written with =, like --port=8899.") from None
        if not found.exists():
            raise Misuse(f"There is no file {found}. To have it again: tplab reset {number}")
    return found.relative_to(root).as_posix()


def command(page: str, more: list[str]) -> list[str]:
    """Return the command line that starts JupyterLab with `page` open."""
    return [
        sys.executable,
        *("-m", "jupyterlab"),
        "--ServerApp.ip=127.0.0.1",
        "--ServerApp.allow_root=True",
        f"--LabApp.default_url=/lab/tree/{page}",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        *more,
    ]


def environment(outer: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for JupyterLab in which this Python's commands and kernel come first."""
    commands, kernels = os.path.dirname(sys.executable), os.path.join(sys.prefix, "share", "jupyter")
    paths = {"PATH": [commands, outer.get("PATH", "")], "JUPYTER_PATH": [kernels, outer.get("JUPYTER_PATH", "")]}
    return {**outer, **{name: os.pathsep.join(filter(None, parts)) for name, parts in paths.items()}}
