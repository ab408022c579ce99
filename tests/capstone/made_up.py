"""A run's folder as a run leaves it, made up: for tests of what reads it."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tplab.capstone.settings.settings import MATTER, Settings

SETTINGS = Settings(num_layers=2, hidden_size=64, num_heads=4, seq_length=32, vocab_size=512, tp=2, steps=60,
                    batch_size=8, micro_batch_size=8, sample_every=20)  # fmt: skip
MACHINE = {"system": "Linux x86_64", "processor": "An Example CPU @ 2.00GHz", "cores": 2, "memory": 8 * 10**9,
           "gpu": None, "gpus": 0, "peak": None, "python": "3.12.1", "torch": "2.11.0"}  # fmt: skip
NASTY = "<script>alert('& more')</script> ```fences``` | pipes"


def losses(steps: int, off: float = 0.0) -> list[float]:
    return [6.2 * math.exp(-step / 25) + 1.5 + 0.05 * math.sin(step * 1.7) + off * step for step in range(1, steps + 1)]


def start_row(settings: Settings, **other: Any) -> dict[str, Any]:
    return {"kind": "start", "time": "2026-03-01T12:00:00+00:00", "settings": asdict(settings), "machine": MACHINE,
            "ranks": settings.ranks, "backend": "gloo", "shares_memory": False, "device": "cpu",
            "parameters": 2_410_000, "step": 1, "resumed_from": None, "plan": plan(settings), "answers": None,
            **other}  # fmt: skip


def plan(settings: Settings) -> dict[str, Any]:
    seconds = {"matmuls": 0.07, "element-wise": 0.02, "optimizer": 0.0, "communication": 0.01}
    memory = {"weights": 5_000_000, "gradients": 5_000_000, "optimizer state": 10**7, "activations": 9_000_000}
    return {"seconds": seconds, "memory": memory, "note": "All in float32.", "sent": 1_234_567}


def step_row(settings: Settings, step: int, loss: float) -> dict[str, Any]:
    seconds = 0.11 + 0.02 * (step % 7 == 0)
    return {"kind": "step", "step": step, "loss": loss, "learning_rate": 1e-3, "norm": 1.2, "seconds": seconds,
            "tokens_per_second": settings.tokens_per_step / seconds,
            "communication": [0.2 + 0.1 * rank for rank in range(settings.ranks)],
            "sent": [1_234_567] * settings.ranks, "memory": [412_000_000] * settings.ranks,
            "tensors": [31_900_000] * settings.ranks}  # fmt: skip


def rows(settings: Settings) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [start_row(settings)]
    for step, loss in enumerate(losses(settings.steps), 1):
        if step % settings.log_every == 0:
            found.append(step_row(settings, step, loss))
        if step % 20 == 0:
            found.append({"kind": "evaluation", "step": step, "loss": loss + 0.1})
            text = f"def f{step}(x):\n    return x  # \x00 is {NASTY}"
            found.append({"kind": "sample", "step": step, "prompt": "def ", "text": text})
    return [*found, {"kind": "end", "step": settings.steps, "why": "done"}]


def write_run(folder: Path, settings: Settings = SETTINGS, measured: dict[str, Any] | None = None) -> Settings:
    """A finished run; returns its settings, with this folder."""
    settings = replace(settings, folder=str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    settings.save(folder / "settings.yaml")
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(settings)))
    if measured is not None:
        of_run = {"settings": {name: getattr(settings, name) for name in MATTER}}
        (folder / "measurements.json").write_text(json.dumps(measured | of_run))
    return settings


MEASURED: dict[str, Any] = {  # as by a study
    "alone": losses(30, 1e-8),
    "scaling": {
        "steps": 9,
        "turns": [
            {"ranks": 1, "predicted": {"matmuls": 0.13, "element-wise": 0.04}, "rounds": [0.18, 0.19, 0.2]},
            {"ranks": 2, "predicted": {"matmuls": 0.07, "communication": 0.03}, "rounds": [0.1105, 0.111, 0.11]},
        ],
    },
}


class Log:
    """A log that grows row by row."""

    def __init__(self, folder: Path) -> None:
        self.settings = write_run(folder)
        self.path = folder / "log.jsonl"
        self.path.unlink()

    def add(self, *rows: dict[str, Any]) -> None:
        with open(self.path, "a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
