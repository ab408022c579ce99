"""Print a run's progress as text, for a terminal or a job's output file. Steps are printed only every few seconds."""

import time

from tplab.capstone.training.log import Row
from tplab.common.units import count, duration, size

SECONDS = 5.0  # minimum time between two lines about steps


class ConsoleLog:
    """Callback that prints rows of the log. It prints a step only every few seconds."""

    def __init__(self, last_step: int) -> None:
        self.last_step = last_step
        self._next = 0.0

    def __call__(self, row: Row) -> None:
        if row["kind"] == "step":
            now = time.monotonic()
            if now < self._next and row["step"] < self.last_step:
                return
            self._next = now + SECONDS
        print(to_text(row, self.last_step), flush=True)


def to_text(row: Row, last_step: int) -> str:
    """Describe one row of the log, for a run that stops after `last_step`. A sample has several lines."""
    step = f"step {row['step']:>{len(str(last_step))}}   "
    match row["kind"]:
        case "start":
            return _start(row, last_step)
        case "step":
            waits = f"{max(row['communication']):.0%} communicating   " if any(row["communication"]) else ""
            left = duration(round((last_step - row["step"]) * row["seconds"]))
            speed = f"{row['tokens_per_second']:,.0f} tokens/s"
            return f"{step}loss {row['loss']:.4f}   norm {row['norm']:.3f}   {speed}   {waits}{left} left"
        case "evaluation":
            return f"{step}loss {row['loss']:.4f} on held-out text"
        case "sample":
            return f"{step}the model wrote:\n" + "\n".join("    " + line for line in row["text"].splitlines())
        case "checkpoint":
            return f"{step}saved a checkpoint"
        case _:
            return f"{step}the run ended ({row['why']})"


def _start(row: Row, last_step: int) -> str:
    where = row["machine"]["gpu"] if row["device"] == "cuda" else row["machine"]["processor"]
    begins = "" if row["resumed_from"] is None else f", resuming after step {row['resumed_from']}"
    ranks = count(row["ranks"], "rank")
    lines = [f"Training {row['parameters']:,} parameters on {ranks} ({where}) until step {last_step}{begins}"]
    if plan := row["plan"]:
        seconds, memory = sum(plan["seconds"].values()), sum(plan["memory"].values())
        sent = f"{size(plan['sent'])} sent per rank and step"
        lines.append(f"Predicted: {duration(seconds)} per step, {size(memory)} of tensors per rank, and {sent}")
    return "\n".join(lines)
