"""`tplab lab`: open the course in JupyterLab, on this machine only. `make lab` runs it too.

tplab lab                                opens the index, the page with the table of contents
tplab lab 4                              opens chapter 4
tplab lab --no-browser --port=8899       passes options that it doesn't know on to JupyterLab
"""

import argparse
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from tplab.common.files import replace
from tplab.course.commands.reset import agreed
from tplab.course.commands.start import show
from tplab.course.learn.course_files import OWN, ChapterFiles, Course, add_root, all_chapters, chapter, course_of
from tplab.course.learn.start import newer, pages, start, update
from tplab.course.learn.update_notebook import as_text
from tplab.course.notebooks.cells import Unreadable, load_notebook
from tplab.course.notebooks.numbering import INDEX, chapter_argument

# Settings for JupyterLab: no news at the first start, long lines wrapped, and a style for pictures in dark themes
SETTINGS = Path(__file__).with_name("jupyter")


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "lab",
        help="open the course in JupyterLab",
        description="Open the course in JupyterLab, on this machine only. Other options go to JupyterLab. "
        "Write them with =, like --port=8899.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "chapter", nargs="?", type=chapter_argument, metavar="N", help="open this chapter, not the index"
    )
    add_root(parser)
    parser.set_defaults(run=run, hands_on=True)


def run(options: argparse.Namespace, console: Console) -> int:
    """Replace this process with JupyterLab, so that JupyterLab receives its signals. Returns only if that fails."""
    course = course_of(options)
    if not course.started:
        course = Course(course.material, course.material / OWN)
    show(console, start(course))
    offer_update(course, console)
    name_the_language(course)
    page = first_page(course, options.chapter)
    console.print("JupyterLab runs until you stop it with Ctrl-C, twice. No browser here? Copy the URL that it prints.")
    sys.stdout.flush()
    os.chdir(course.folder)  # the folder that JupyterLab shows, unless an option overrides it
    arguments = command(page, options.rest)
    os.execve(arguments[0], arguments, environment(os.environ))


def offer_update(course: Course, console: Console) -> None:
    """If the course has newer chapters, ask whether to bring them into the learner's notebooks.

    If nobody is at a terminal to answer, print the command that does it instead.
    """
    names = [files.learner.name for files in newer(course)]
    if not names:
        return
    told = f"The course has a newer version of {', '.join(names)}."
    if not sys.stdin.isatty():
        console.print(f"{told} To bring it into your notebooks (your answers stay): tplab update")
    elif agreed(f"{told} Bring it into your notebooks? Your answers stay, and a copy is kept.", False, console):
        show(console, update(course))


def name_the_language(course: Course) -> None:
    """Note the kernel's language in each notebook as JupyterLab does, so that opening one doesn't count as a change."""
    from ipykernel.ipkernel import IPythonKernel  # slow to import

    for page in pages(course):
        with suppress(OSError, Unreadable):
            notebook = load_notebook(page.learner)
            metadata = notebook.setdefault("metadata", {})
            if metadata.get("language_info") != IPythonKernel.language_info and page.learner != page.blank:
                metadata["language_info"] = IPythonKernel.language_info
                replace(page.learner, as_text(notebook).encode())


def first_page(course: Course, number: int | None) -> str:
    """Return the path of the notebook to open, below the learner's folder. Raises Misuse for an unknown chapter."""
    if number is None:
        files = [ChapterFiles(course, INDEX), *all_chapters(course).values()]
        return next(page.learner.name for page in files if page.learner.exists())
    return chapter(course, number).learner.name


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
    paths = {
        "PATH": [commands, outer.get("PATH", "")],
        "JUPYTER_PATH": [kernels, outer.get("JUPYTER_PATH", ""), str(SETTINGS)],
        "JUPYTER_CONFIG_PATH": [outer.get("JUPYTER_CONFIG_PATH", ""), str(SETTINGS)],  # the learner's own come first
    }
    return {**outer, **{name: os.pathsep.join(filter(None, parts)) for name, parts in paths.items()}}
