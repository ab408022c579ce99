"""The report of a training run, as one self-contained HTML page and as Markdown.

    write_report(folder)       folder/report.html, folder/report.md and its pictures in folder/report_files

Every number in the report comes from the run's log or from the measurements of `tplab.capstone.study`. Missing
measurements are listed, each with the command that adds it.

run        reads the log and the measurements in the run's folder
sections   the sections from the log; study_sections: those from the study
markdown   writes the report as Markdown; page: renders it as HTML
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from tplab.capstone.report import sections, study_sections
from tplab.capstone.report.blocks import Block, Report, Section
from tplab.capstone.report.markdown import write_markdown
from tplab.capstone.report.page import to_html
from tplab.capstone.report.run import Run
from tplab.capstone.words import kind, layout, listed
from tplab.common.units import count

__all__ = ["compose", "write_report"]

_SECTIONS: dict[str, Callable[[Run], Iterator[Block]]] = {
    "The run in five numbers": sections.in_five_numbers,
    "The plan and the run": sections.plan,
    "The machine": sections.machine,
    "The configuration": sections.configuration,
    "Loss": sections.loss,
    "Speed": sections.speed,
    "Memory": study_sections.memory,
    "Communication": study_sections.communication,
    "One step, rank by rank": study_sections.timeline,
    "Scaling": study_sections.scaling,
    "Whose layers": study_sections.layers,
    "Beside torch's own tensor parallelism": study_sections.baseline,
    "The text it writes": sections.text,
}


def write_report(folder: Path | str) -> Path:
    """Write report.html and report.md into a run's folder, and return the path of report.html.

    Raises ValueError if the folder has no log of a run, or if the run hasn't completed a step yet.
    """
    report, path = compose(Run(Path(folder))), Path(folder, "report.html")
    write_markdown(report, path.with_suffix(".md"))
    path.write_text(to_html(report), encoding="utf-8")
    return path


def compose(run: Run) -> Report:
    """Compose the report of a run. Raises ValueError if the run hasn't completed a step yet."""
    if not run.steps:
        raise ValueError(f"the run in {run.folder} has no step yet: there is nothing to report")
    title = f"A {kind(run.settings)} on {count(run.ranks, 'rank' if run.device == 'cpu' else 'GPU')}"
    about = f"{run.settings.folder}, {layout(run.settings)}, begun {run.starts[0]['time'][:16].replace('T', ' ')}. "
    about += f"{run.done:,} of {run.settings.steps:,} steps."
    report = Report(title, about, [Section(title, list(blocks(run))) for title, blocks in _SECTIONS.items()])
    report.sections.append(Section("What was not measured", list(_left_out(run, report))))
    return report


def _left_out(run: Run, report: Report) -> Iterator[Block]:
    if run.stale:
        stale = (f"{name} ({_named(other)})" for name, other in run.stale.items())
        yield f"Left out, as it was measured with other settings: {listed(list(stale))}."
    if report.missing:
        again = f"`python -m tplab.capstone report {run.folder}` writes this anew"
        yield f"`python -m tplab.capstone study --folder {run.folder}` measures what is missing here, and {again}."
        yield from report.missing
    else:
        yield "Every part of this report was measured on this machine."


def _named(settings: dict[str, object]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in settings.items())
