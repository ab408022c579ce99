"""The report section that compares the run with the plan in its log (`tplab.capstone.planning.plan`)."""

from typing import Any

from tplab import viz
from tplab.capstone.report.blocks import Block, Figure, Missing, Section, Words, grid
from tplab.capstone.report.run import Run
from tplab.common.units import duration, size

TITLE = "The plan and the run"
NEAR = 0.25  # a step time that is further off needs an explanation


def plan(run: Run) -> Section:
    made = run.start.get("plan")
    if not made:
        how = "start the run with `--plan`, which is the default"
        return Section(TITLE, [Missing("what the course's formulas predict for a step of this run", how)])
    seconds, memory = sum(made["seconds"].values()), sum(made["memory"].values())
    used = max(run.memory if run.device == "cuda" else run.recent[-1].get("tensors") or [0])
    sent = max(run.recent[-1]["sent"])
    rows = [_row("a step", duration(seconds), duration(run.step_seconds), run.step_seconds / seconds)]
    if used:
        rows.append(_row("tensors on a rank, at most", size(memory), size(used), used / memory))
    if made["sent"] or sent:
        rows.append(_row("bytes sent by a rank per step", f"{made['sent']:,}", f"{sent:,}", sent / (made["sent"] or 1)))
    bars = {"the run": {"measured": run.step_seconds}}
    bars["the plan"] = {name: part for name, part in made["seconds"].items() if part}
    says = "Where the time of a step goes, by the plan, below what was measured."
    blocks: list[Block] = [
        Words(_verdict(run, made, seconds, sent, used)),
        grid(rows),
        Figure("plan", viz.time_bars(bars), says),
    ]
    return Section(TITLE, blocks)


def _row(what: str, planned: str, measured: str, ratio: float) -> dict[str, str]:
    return {"": what, "plan": planned, "run": measured, "run / plan": f"{ratio:.2f}"}


def _verdict(run: Run, made: dict[str, Any], seconds: float, sent: int, used: float) -> str:
    """Return sentences about the step time, the bytes and the memory."""
    ratio = run.step_seconds / seconds
    says = "Before the run started, its ranks measured the kernels of one layer, and the course's formulas predicted a "
    says += f"step from them. A step took {ratio:.2f} times as long as predicted"
    if ratio > 1 + NEAR:
        says += ", which is too long. Perhaps something else used the machine during the run. The prediction also "
        says += "leaves out what Python does between two kernels, which matters for small models."
    elif ratio < 1 - NEAR:
        says += ", so something else probably used the machine while the kernels were measured."
    else:
        says += "."
    if sent == made["sent"]:
        says += " The ranks sent exactly as many bytes as predicted." if sent else " One rank has nothing to send."
    else:
        says += f" The ranks sent {sent - made['sent']:+,} bytes compared with the prediction"
        other = run.settings.layers != "tplab"
        says += ", which is about tplab's layers, and these are others." if other else "."
    if not used:
        says += " Tensors weren't counted, because that doesn't work with `--compile`."
    return f"{says} {made['note']}"
