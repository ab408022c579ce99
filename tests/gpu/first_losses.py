"""The capstone on a small text: the losses of its first steps, the way a device gives them."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.gpu.implementations import Way
from tplab.capstone.own_layers.find import find_answers
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.loop import train

SOLUTIONS = Path(__file__).resolve().parents[2] / "solutions"
SETTINGS = Settings(
    vocab_size=300, num_layers=2, hidden_size=32, num_heads=4, seq_length=16, steps=12, batch_size=8,
    micro_batch_size=4, warmup_steps=4, evaluate_every=0, evaluation_batches=1, sample_tokens=0, save_every=0,
    learning_rate=5e-3, plan=False,
)  # fmt: skip
APART = {"float64": 1e-8, "float32": 1e-3, "bfloat16": 0.03}  # relative, of twelve steps, each building on the last
# What is trained, by its name. With tp over all ranks, in float64, if it isn't told otherwise
RUNS: dict[str, dict[str, Any]] = {
    "float64": {"plan": True},
    "float32": {"precision": "float32"},
    "bfloat16": {"precision": "bfloat16"},
    "the learner's, bfloat16": {"precision": "bfloat16", "layers": "mine"},
    "the learner's": {"layers": "mine"},
    "sequence parallel": {"sequence_parallel": True},
    "computed again": {"recompute": "attention"},
    "replicas": {"tp": 1, "dp": 2, "plan": True},
    "text is written": {"sample_tokens": 4},
    "stages": {"tp": 1, "pp": 2, "micro_batch_size": 2},
    "shared gradients": {"tp": 1, "dp": 2, "zero": 2},
    "shared weights": {"tp": 1, "dp": 2, "zero": 3, "sample_tokens": 4},
}


def first_losses(way: Way, scratch: Path, /, **changes: Any) -> list[float]:
    """Of 12 steps on the text of these tests, in float64 and with tp over all ranks of `way`, if not told otherwise."""
    return _train_all(way, scratch, {"one": changes})["one"]


@cache
def all_losses(way: Way, names: tuple[str, ...]) -> dict[str, list[float]] | Exception:
    """Of several runs in one launch, or why that failed. A launch takes longer than a run."""
    with TemporaryDirectory() as scratch:
        try:
            return _train_all(way, Path(scratch), {name: RUNS[name] for name in names})
        except Exception as error:  # whatever it is: then each run is launched by itself, and tells for itself
            return error


def _train_all(way: Way, scratch: Path, runs: Mapping[str, dict[str, Any]]) -> dict[str, list[float]]:
    text = scratch / "text"
    if not text.exists():
        text.mkdir(parents=True)
        for path in Path(__file__).parent.glob("*.py"):
            shutil.copy(path, text / f"{path.stem}.txt")
    programs = {}
    for name, changes in runs.items():
        folder = scratch / f"run-{len(list(scratch.iterdir())) + len(programs)}"
        made = {"tp": way.world_size, "data": str(text), "folder": str(folder), "precision": "float64"} | changes
        settings = replace(SETTINGS, **made)
        answers = find_answers(SOLUTIONS, settings, missing="tplab") if settings.layers == "mine" else None
        programs[name] = settings, answers
    return way.run(_on_this_rank, programs, timeout=180.0 + 60 * len(programs))[0]


def _on_this_rank(programs: dict[str, tuple[Settings, Any]]) -> dict[str, list[float]]:
    return {name: train(settings, answers).losses for name, (settings, answers) in programs.items()}


def far_apart(losses: list[float], right: list[float], precision: str) -> dict[int, float]:
    """The steps whose losses differ by more than this precision explains, and by how much of the right one."""
    errors = {step: abs(a - b) / b for step, (a, b) in enumerate(zip(losses, right, strict=True), 1)}
    return {step: error for step, error in errors.items() if not error <= APART[precision]}
