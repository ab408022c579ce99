"""A run's folder as a run leaves it, made up: for tests of what reads it."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tplab.capstone.settings.settings import Settings

SETTINGS = Settings(num_layers=2, hidden_size=64, num_heads=4, seq_length=32, vocab_size=512, tp=2, steps=60,
                    batch_size=8, micro_batch_size=8, sample_every=20)  # fmt: skip
MACHINE = {"system": "Linux x86_64", "processor": "An Example CPU @ 2.00GHz", "cores": 2, "memory": 8 * 10**9,
           "gpu": None, "gpus": 0, "python": "3.12.1", "torch": "2.11.0"}  # fmt: skip
NASTY = "<script>alert('& more')</script> ```fences``` | pipes"


def losses(steps: int, off: float = 0.0) -> list[float]:
    return [6.2 * math.exp(-step / 25) + 1.5 + 0.05 * math.sin(step * 1.7) + off * step for step in range(1, steps + 1)]


def start_row(settings: Settings, **other: Any) -> dict[str, Any]:
    return {"kind": "start", "time": "2026-03-01T12:00:00+00:00", "settings": asdict(settings), "machine": MACHINE,
            "ranks": settings.ranks, "backend": "gloo", "device": "cpu", "parameters": 2_410_000,
            "layers": settings.layers, "step": 1, "resumed_from": None, "plan": plan(settings),
            "changes": {}, "answers": None, "used": [], **other}  # fmt: skip


def plan(settings: Settings) -> dict[str, Any]:
    seconds = {"matmuls": 0.07, "element-wise": 0.02, "optimizer": 0.0, "communication": 0.01}
    memory = {"weights": 5_000_000, "gradients": 5_000_000, "optimizer state": 10**7, "activations": 9_000_000}
    return {"seconds": seconds, "memory": memory, "note": "All in float32.", "sent": 1_234_567}


def step_row(settings: Settings, step: int, loss: float) -> dict[str, Any]:
    seconds = 0.11 + 0.02 * (step % 7 == 0)
    return {"kind": "step", "step": step, "loss": loss, "learning_rate": 1e-3, "norm": 1.2, "seconds": seconds,
            "tokens": settings.tokens_per_step, "tokens_per_second": settings.tokens_per_step / seconds,
            "communication": [0.2 + 0.1 * rank for rank in range(settings.ranks)],
            "sent": [1_234_567] * settings.ranks, "memory": [412_000_000] * settings.ranks,
            "tensors": [31_900_000] * settings.ranks}  # fmt: skip


def rows(settings: Settings, steps: int | None = None) -> list[dict[str, Any]]:
    steps = settings.last_step if steps is None else steps
    found: list[dict[str, Any]] = [start_row(settings)]
    for step, loss in enumerate(losses(steps), 1):
        if step % settings.log_every == 0 or step == steps:
            found.append(step_row(settings, step, loss))
        if step % 20 == 0:
            found.append({"kind": "evaluation", "step": step, "loss": loss + 0.1})
            text = f"def f{step}(x):\n    return x  # {NASTY}"
            found.append({"kind": "sample", "step": step, "prompt": "def ", "text": text})
    if steps == settings.steps:
        found.append({"kind": "end", "step": steps, "why": "done"})
    return found


def write_run(folder: Path, settings: Settings = SETTINGS, measured: dict[str, Any] | None = None) -> Settings:
    """A finished run; returns its settings, with this folder."""
    settings = replace(settings, folder=str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    settings.save(folder / "settings.yaml")
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(settings)))
    if measured is not None:
        (folder / "measurements.json").write_text(json.dumps(measured))
    return settings


def spans(rank: int) -> list[tuple[str, str, float, float]]:
    found, at = [], 0.001 * rank
    for index in range(24):
        found.append(("compute", "addmm" if index % 3 else "gelu", at, at + 0.003))
        at += 0.0031
        if index % 4 == 3:
            found.append(("communicate", "all_reduce", at - 0.001, at + 0.0015))
            at += 0.0016
    return found


MEASURED: dict[str, Any] = {
    "machine": {"ranks": 2, "flops": 6.1e10, "bandwidth": 9.1e9, "memory": 4 * 10**9, "alpha": 4.5e-5, "beta": 4.1e-10},
    "before": {"prompt": "def ", "text": "def \x00qz ((import ,,", "loss": 6.3},
    "alone": {"losses": losses(30, 1e-8), "seconds": 0.19},
    "traffic": {
        "measured": {"all_reduce": [12, 1_234_567]}, "formula": {"all_reduce": [12, 1_234_567]},
        "parts": [["embedding, forward", "all_reduce", 1, 65_536], ["layers, forward", "all_reduce", 4, 262_144]],
    },
    "memory": {
        "peak": [31_000_000, 30_900_000], "curve": [10**7, 2 * 10**7, 3.1 * 10**7, 2 * 10**7, 10**7] * 20,
        "marks": [[0, "forward"], [50, "backward"], [85, "optimizer"]], "note": "All of it is in float32.",
        "bill": {"weights": 5_000_000, "gradients": 5_000_000, "optimizer state": 10**7, "activations": 9_000_000},
    },
    "timeline": {"step": 4, "ranks": [{"rank": rank, "spans": spans(rank)} for rank in range(2)]},
    "layers": {
        "losses": {"mine": losses(20), "tplab": losses(20)},
        "used": [{"what": "the embedding", "whose": "yours", "source": "7.1", "why": ""}],
    },
    "baseline": {
        "losses": {"tplab": losses(20), "dtensor": losses(20, 2e-8)},
        "seconds": {"tplab": [0.11, 0.12, 0.105], "dtensor": [0.14, 0.15, 0.139]},
    },
    "scaling": {
        "tokens": 256, "note": "Medians of 9 steps each.",
        "strong": {"1": 0.19, "2": 0.1105},
        "rounds": {"1": [0.18, 0.19, 0.2], "2": [0.1105, 0.111, 0.11]}, "weak": {"1": 0.19, "2": 0.24},
        "work": {"1": 1e9, "2": 1.9e9},
        "predicted": {"strong": {"1": 0.17, "2": 0.10}, "weak": {"1": 0.17, "2": 0.2}},
        "parts": {
            "1": {"matmuls": 0.13, "element-wise": 0.03, "optimizer": 0.01, "communication": 0.0},
            "2": {"matmuls": 0.065, "element-wise": 0.02, "optimizer": 0.005, "communication": 0.01},
        },
    },
}  # fmt: skip


class Log:
    """A log that grows row by row."""

    def __init__(self, folder: Path) -> None:
        self.settings = write_run(folder)
        self.path = folder / "log.jsonl"
        self.path.unlink()

    def write(self, text: str) -> None:
        with open(self.path, "a") as file:
            file.write(text)

    def add(self, *rows: dict[str, Any]) -> None:
        self.write("".join(json.dumps(row) + "\n" for row in rows))

    def start(self, **other: Any) -> None:
        self.add(start_row(self.settings, **other))

    def steps(self, first: int, last: int) -> None:
        self.add(*(step_row(self.settings, step, 5.0 - 0.01 * step) for step in range(first, last + 1)))
