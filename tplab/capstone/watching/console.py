"""Print a run as lines of text, for a terminal or a job's output file. Steps are printed only every few seconds."""

import time
from datetime import timedelta
from typing import Any

from tplab.common.units import duration, size

SECONDS = 5.0  # minimum time between two lines about steps


class ConsoleLog:
    """Callback that prints rows of the log (`tplab.capstone.training.log`), but steps only every few seconds."""

    def __init__(self, last_step: int) -> None:
        self.last_step = last_step
        self._next = 0.0

    def __call__(self, row: dict[str, Any]) -> None:
        kind = row["kind"]
        if kind == "step":
            now = time.monotonic()
            if now < self._next and row["step"] < self.last_step:
                return
            self._next = now + SECONDS
        print(getattr(self, f"_{kind}")(row), flush=True)

    def _start(self, row: dict[str, Any]) -> str:
        ranks = "1 rank" if row["ranks"] == 1 else f"{row['ranks']} ranks"
        where = row["machine"]["gpu"] if row["device"] == "cuda" else row["machine"]["processor"]
        weights = row["settings"]["start_from"]
        start = "from the start" if weights is None else f"from the weights in {weights}"
        begins = start if row["resumed_from"] is None else f"on from step {row['resumed_from']}"
        lines = [f"{row['parameters']:,} parameters on {ranks}, {where}: {begins} to step {self.last_step}"]
        lines += [f"{name} is {now} from here on, instead of {old}" for name, (old, now) in row["changes"].items()]
        if row["plan"]:
            lines.append("the plan: " + planned(row["plan"]))
        return "\n".join(lines)

    def _step(self, row: dict[str, Any]) -> str:
        left = timedelta(seconds=round((self.last_step - row["step"]) * row["seconds"]))
        return (
            f"step {row['step']:>{len(str(self.last_step))}}   loss {row['loss']:.4f}   norm {row['norm']:.3f}   "
            f"{row['tokens_per_second']:,.0f} tokens/s   {left} left"
        )

    def _evaluation(self, row: dict[str, Any]) -> str:
        return f"step {row['step']}   loss {row['loss']:.4f} on held-out text"

    def _sample(self, row: dict[str, Any]) -> str:
        return shown(row)

    def _checkpoint(self, row: dict[str, Any]) -> str:
        return f"step {row['step']}   checkpoint"

    def _end(self, row: dict[str, Any]) -> str:
        return f"step {row['step']}   the end: {row['why']}"


def planned(plan: dict[str, Any]) -> str:
    """Format the plan of a run: the time, memory and bytes of one step."""
    seconds, memory = sum(plan["seconds"].values()), sum(plan["memory"].values())
    return f"{duration(seconds)} per step, {size(memory)} on each rank, {size(plan['sent'])} sent by each per step"


def shown(sample: dict[str, Any]) -> str:
    """Format a sample from the log, which is text that the model generated, for a terminal."""
    text = "\n".join("    " + line for line in sample["text"].splitlines())
    return f"step {sample['step']}   the model writes:\n{text}"
