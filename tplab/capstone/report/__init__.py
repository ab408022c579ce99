"""The report of a training run, as one self-contained HTML page.

Every number in it comes from the run's log or from the measurements of `tplab.capstone.study`.

run        the run, as read from its folder
sections   the sections of the report
elements   paragraphs, tables, curves and bars as HTML and SVG
page       the page around them
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tplab.capstone.report import sections
from tplab.capstone.report.page import page
from tplab.capstone.report.run import Run
from tplab.capstone.words import kind
from tplab.common.units import count

__all__ = ["write_report"]

_SECTIONS: dict[str, Callable[[Run], Iterator[str]]] = {
    "": sections.summary,
    "What it writes": sections.text,
    "The loss": sections.loss,
    "How it's split": sections.split,
    "Predicted and measured": sections.plan,
    "Details": sections.tables,
}


def write_report(folder: Path | str) -> Path:
    """Write report.html to a run's folder, and return its path.

    Raises ValueError if the folder has no log of a run, or if the run hasn't completed a step yet.
    """
    run = Run(Path(folder))
    body = []
    for title, section in _SECTIONS.items():
        if inner := list(section(run)):
            body += [f"<h2>{title}</h2>"] if title else []
            body += inner
    whose = "My" if sections.mine_of(run) else "A"
    title = f"{whose} {kind(run.settings)} on {count(run.ranks, 'rank' if run.device == 'cpu' else 'GPU')}"
    path = Path(folder, "report.html")
    path.write_text(page(title, body), encoding="utf-8")
    return path


def main(argv: Sequence[str]) -> int:
    """Run the given command line and return its exit code. Raises the same errors as `write_report`."""
    parser = argparse.ArgumentParser(
        prog="python -m tplab.capstone report", description="Write report.html into the folder of a run."
    )
    parser.add_argument("folder", type=Path, help="folder of the run, such as runs/laptop")
    print(write_report(parser.parse_args(argv).folder))
    return 0
