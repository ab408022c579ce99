"""The report of a training run, as one self-contained HTML page and as Markdown.

Every number in it comes from the run's log or from the measurements of `tplab.capstone.study`. What hasn't been
measured is listed at the end, with the commands that measure it.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tplab import viz
from tplab.capstone.report import sections
from tplab.capstone.report.blocks import PICTURES, Block, Figure, Missing, Report, Section, to_markdown
from tplab.capstone.report.page import to_html
from tplab.capstone.report.run import Run
from tplab.capstone.words import kind, layout, listed
from tplab.common.units import count

__all__ = ["compose", "write_report"]

_DPI = 160
_SECTIONS: dict[str, Callable[[Run], Iterator[Block | Missing]]] = {
    "At a glance": sections.at_a_glance,
    "Predicted and measured": sections.plan,
    "Machine": sections.machine,
    "Settings": sections.settings,
    "Loss": sections.loss,
    "Speed": sections.speed,
    "Scaling": sections.scaling,
    "Whose layers": sections.layers,
    "Generated text": sections.text,
}


def write_report(folder: Path | str) -> Path:
    """Write report.html, report.md and their pictures (in report_files) to a run's folder. Return report.html's path.

    Raises ValueError if the folder has no log of a run, or if the run hasn't completed a step yet.
    """
    folder = Path(folder)
    report = compose(Run(folder))
    (folder / PICTURES).mkdir(exist_ok=True)
    for figure in (block for section in report.sections for block in section.blocks if isinstance(block, Figure)):
        (folder / figure.address).write_bytes(figure.picture.png(_DPI))
    (folder / "report.md").write_text(to_markdown(report), encoding="utf-8")
    (folder / "report.html").write_text(to_html(report, folder), encoding="utf-8")
    return folder / "report.html"


def compose(run: Run) -> Report:
    """Compose the report of a run, without empty sections. Raises ValueError if the run hasn't completed a step yet."""
    if not run.steps:
        raise ValueError(f"there's nothing to report yet, because the run in {run.folder} hasn't completed a step")
    title = f"A {kind(run.settings)} on {count(run.ranks, 'rank' if run.device == 'cpu' else 'GPU')}"
    started = run.starts[0]["time"][:16].replace("T", " ")
    about = f"{run.settings.folder}, {layout(run.settings)}, started {started}, {run.done:,} of {run.settings.steps:,} "
    found = {name: list(section(run)) for name, section in _SECTIONS.items()}
    missing = [part for parts in found.values() for part in parts if isinstance(part, Missing)]
    found["What wasn't measured"] = list(_left_out(run, missing))
    shown = {name: [part for part in parts if not isinstance(part, Missing)] for name, parts in found.items()}
    return Report(title, about + "steps", [Section(name, blocks) for name, blocks in shown.items() if blocks], missing)


def _left_out(run: Run, missing: Sequence[Missing]) -> Iterator[Block]:
    if run.stale:
        others = {name: ", ".join(f"{key} = {value}" for key, value in old.items()) for name, old in run.stale.items()}
        stale = [f"{name} ({other})" for name, other in others.items()]
        yield f"This report leaves out measurements that were made with other settings: {listed(stale)}."
    if missing:
        yield (
            f"`python -m tplab.capstone study --folder {run.folder}` takes all the missing measurements of a study, or "
            f"just one of them with the flag in this table. `python -m tplab.capstone report {run.folder}` then "
            "updates this report."
        )
        yield viz.table([{"missing": missed.what, "how to get it": missed.how} for missed in missing])


def main(argv: Sequence[str]) -> int:
    """Run the given command line and return its exit code. Raises the same errors as `write_report`."""
    parser = argparse.ArgumentParser(
        prog="python -m tplab.capstone report", description="Write report.html and report.md into the folder of a run."
    )
    parser.add_argument("folder", type=Path, help="folder of the run, such as runs/laptop")
    print(write_report(parser.parse_args(argv).folder))
    return 0
