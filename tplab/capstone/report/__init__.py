"""The report of a training run, as one self-contained HTML page and as Markdown.

    write_report(folder)       folder/report.html, folder/report.md and its pictures in folder/report_files

Every number in the report comes from the run's log or from the measurements of `tplab.capstone.study`. What hasn't been
measured is listed at the end, with the commands that measure it.

run        reads the log and the measurements in the run's folder
sections   the sections from the log; study_sections: those from the study
blocks     what a section consists of, and how it is written as Markdown; page: renders it as HTML
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tplab.capstone.report import sections, study_sections
from tplab.capstone.report.blocks import Block, Figure, Missing, Report, Section, grid, to_markdown
from tplab.capstone.report.page import to_html
from tplab.capstone.report.run import Run
from tplab.capstone.words import kind, layout, listed
from tplab.common.units import count

__all__ = ["compose", "write_report"]

_DPI = 144
_SECTIONS: dict[str, Callable[[Run], Iterator[Block | Missing]]] = {
    "At a glance": sections.at_a_glance,
    "Predicted and measured": sections.plan,
    "Machine": sections.machine,
    "Settings": sections.settings,
    "Loss": sections.loss,
    "Speed": sections.speed,
    "Memory": study_sections.memory,
    "Communication": study_sections.communication,
    "One step on every rank": study_sections.timeline,
    "Scaling": study_sections.scaling,
    "Whose layers": study_sections.layers,
    "Compared with DTensor": study_sections.baseline,
    "Generated text": sections.text,
}


def write_report(folder: Path | str) -> Path:
    """Write report.html and report.md into a run's folder, and return the path of report.html.

    Raises ValueError if the folder has no log of a run, or if the run hasn't completed a step yet.
    """
    report, path, pictures = compose(Run(Path(folder))), Path(folder, "report.html"), Path(folder, "report_files")
    pictures.mkdir(exist_ok=True)

    def save(figure: Figure) -> str:
        (pictures / f"{figure.name}.png").write_bytes(figure.picture.png(_DPI))
        return f"{pictures.name}/{figure.name}.png"

    path.with_suffix(".md").write_text(to_markdown(report, save), encoding="utf-8")
    path.write_text(to_html(report), encoding="utf-8")
    return path


def compose(run: Run) -> Report:
    """Compose the report of a run, without empty sections. Raises ValueError if the run hasn't completed a step yet."""
    if not run.steps:
        raise ValueError(f"there's nothing to report yet, because the run in {run.folder} hasn't completed a step")
    title = f"A {kind(run.settings)} on {count(run.ranks, 'rank' if run.device == 'cpu' else 'GPU')}"
    started = run.starts[0]["time"][:16].replace("T", " ")
    about = f"{run.settings.folder}, {layout(run.settings)}, started {started}, {run.done:,} of {run.settings.steps:,} "
    report = Report(title, about + "steps", [], [])
    for name, section in _SECTIONS.items():
        found = list(section(run))
        report.missing.extend(part for part in found if isinstance(part, Missing))
        if blocks := [part for part in found if not isinstance(part, Missing)]:
            report.sections.append(Section(name, blocks))
    if left_out := list(_left_out(run, report)):
        report.sections.append(Section("What wasn't measured", left_out))
    return report


def _left_out(run: Run, report: Report) -> Iterator[Block]:
    if run.stale:
        stale = [
            f"{name} ({', '.join(f'{key} = {value}' for key, value in old.items())})" for name, old in run.stale.items()
        ]
        yield f"This report leaves out measurements that were made with other settings: {listed(stale)}."
    if report.missing:
        again = f"`python -m tplab.capstone report {run.folder}` then updates this report."
        yield (
            f"`python -m tplab.capstone study --folder {run.folder}` takes all the missing measurements of a study, or "
            f"just one of them with the flag in this table. {again}"
        )
        by_how: dict[str, list[str]] = {}
        for what, how in report.missing:
            by_how.setdefault(how, []).append(what)
        yield grid([{"missing": "; ".join(what), "how to get it": how} for how, what in by_how.items()])


def main(argv: Sequence[str]) -> int:
    """Run the given command line and return its exit code. Raises what `write_report` raises."""
    parser = argparse.ArgumentParser(
        prog="python -m tplab.capstone report", description="Write report.html and report.md into the folder of a run."
    )
    parser.add_argument("folder", type=Path, help="folder of the run, such as runs/laptop")
    print(write_report(parser.parse_args(argv).folder))
    return 0
