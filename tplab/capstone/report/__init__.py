"""The report of a training run, as one self-contained HTML page and as Markdown.

    write_report(folder)       folder/report.html, folder/report.md and its pictures in folder/report_files

Every number in the report comes from the run's log or from the measurements of `tplab.capstone.study`. Missing
measurements are listed, each with the command that adds it.

run        reads the log and the measurements in the run's folder
sections   the sections from the log; study_sections: those from the study; plan_section: the run and its plan
markdown   writes the report as Markdown; page: renders it as HTML
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from tplab.capstone.report import sections, study_sections
from tplab.capstone.report.blocks import Block, Missing, Report, Section, Words
from tplab.capstone.report.markdown import write_markdown
from tplab.capstone.report.page import to_html
from tplab.capstone.report.plan_section import plan
from tplab.capstone.report.run import Run
from tplab.capstone.words import kind, layout, listed
from tplab.common.units import count

__all__ = ["compose", "write_report"]

_PARTS: tuple[Callable[[Run], Section], ...] = (
    sections.in_five_numbers, plan, sections.machine, sections.configuration, sections.loss, sections.speed,
    study_sections.memory, study_sections.communication, study_sections.timeline, study_sections.scaling,
    study_sections.layers, study_sections.baseline, sections.text,
)  # fmt: skip


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
    parts = [part(run) for part in _PARTS]
    settings = run.settings
    title = f"A {kind(settings)} on {count(run.ranks, 'rank' if run.device == 'cpu' else 'GPU')}"
    when = str(run.starts[0].get("time", ""))[:16].replace("T", " ")
    about = f"{settings.folder}, {layout(settings)}, begun {when}. "
    about += f"{run.done:,} of {settings.steps:,} steps."
    return Report(title, about, [*parts, _left_out(run, parts)])


def _left_out(run: Run, parts: list[Section]) -> Section:
    missing = [block for part in parts for block in part.missing]
    stale = [f"{name} ({_named(other)})" for name, other in run.stale.items()]
    before: list[Block] = (
        [Words(f"Left out, as it was measured with other settings: {listed(stale)}.")] if stale else []
    )
    if not missing:
        return Section(
            "What was not measured", [*before, Words("Every part of this report was measured on this machine.")]
        )
    command = f"`python -m tplab.capstone study --folder {run.folder}`"
    told = (
        f"{command} measures what is missing here, and `python -m tplab.capstone report {run.folder}` writes this anew."
    )
    return Section(
        "What was not measured", [*before, Words(told), *(Missing(block.what, block.how) for block in missing)]
    )


def _named(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in settings.items())
