"""Print a run's progress as text, for a terminal or a job's output file. Steps are printed only every few seconds."""

import time
from datetime import timedelta
from typing import Any

from tplab.common.units import count, duration, size

SECONDS = 5.0  # minimum time between two lines about steps


class ConsoleLog:
    """Callback that prints rows of the log (`tplab.capstone.training.log`). It prints a step only every few seconds."""

    def __init__(self, last_step: int) -> None:
        self.last_step = last_step
        self._next = 0.0

    def __call__(self, row: dict[str, Any]) -> None:
        if row["kind"] == "step":
            now = time.monotonic()
            if now < self._next and row["step"] < self.last_step:
                return
            self._next = now + SECONDS
        print(self._text(row), flush=True)

    def _text(self, row: dict[str, Any]) -> str:
        step = f"step {row['step']:>{len(str(self.last_step))}}   "
        match row["kind"]:
            case "start":
                return self._start(row)
            case "step":
                left = timedelta(seconds=round((self.last_step - row["step"]) * row["seconds"]))
                speed = f"{row['tokens_per_second']:,.0f} tokens/s"
                return f"{step}loss {row['loss']:.4f}   norm {row['norm']:.3f}   {speed}   {left} left"
            case "evaluation":
                return f"{step}loss {row['loss']:.4f} on held-out text"
            case "sample":
                return shown(row)
            case "checkpoint":
                return f"{step}saved a checkpoint"
            case _:
                return f"{step}the run ended ({row['why']})"

    def _start(self, row: dict[str, Any]) -> str:
        where = row["machine"]["gpu"] if row["device"] == "cuda" else row["machine"]["processor"]
        weights, resumed = row["settings"]["start_from"], row["resumed_from"]
        begins = "" if weights is None else f", starting from the weights in {weights}"
        if resumed is not None:
            begins = f", resuming after step {resumed}"
        ranks = count(row["ranks"], "rank")
        lines = [f"Training {row['parameters']:,} parameters on {ranks} ({where}) until step {self.last_step}{begins}"]
        lines += [f"{name} changes from {old} to {now}" for name, (old, now) in row["changes"].items()]
        if plan := row["plan"]:
            seconds, memory = sum(plan["seconds"].values()), sum(plan["memory"].values())
            lines.append(
                f"Predicted: {duration(seconds)} per step, {size(memory)} of tensors per rank, and "
                f"{size(plan['sent'])} sent per rank and step"
            )
        return "\n".join(lines)


def shown(sample: dict[str, Any]) -> str:
    """Format a sample from the log (text that the model generated) for display in a terminal."""
    text = "\n".join("    " + line for line in sample["text"].splitlines())
    return f"step {sample['step']}   the model wrote:\n{text}"
