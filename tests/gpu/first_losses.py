"""The capstone on a small text: the losses of its first steps, the way a device gives them."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.gpu.implementations import Way
from tplab.capstone.own_layers.find import find_answers
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.loop import train

SOLUTIONS = Path(__file__).resolve().parents[2] / "solutions"
SETTINGS = Settings(
    vocab_size=300, num_layers=2, hidden_size=64, num_heads=4, seq_length=32, steps=20, batch_size=8,
    micro_batch_size=4, warmup_steps=4, evaluate_every=0, evaluation_batches=1, sample_tokens=0, save_every=0,
)  # fmt: skip
APART = {"float64": 1e-8, "float32": 1e-3, "bfloat16": 0.03}  # relative, of twenty steps, each building on the last


def first_losses(way: Way, scratch: Path, /, **changes: Any) -> list[float]:
    """Of 20 steps on these tests' own sources, trained with tp over the ranks of `way`, if not told otherwise."""
    text = scratch / "text"
    if not text.exists():
        text.mkdir(parents=True)
        for path in Path(__file__).parent.glob("*.py"):
            shutil.copy(path, text / f"{path.stem}.txt")
    run = scratch / f"run-{len(list(scratch.iterdir()))}"
    settings = replace(SETTINGS, **({"tp": way.world_size, "data": str(text), "folder": str(run)} | changes))
    answers = find_answers(SOLUTIONS, settings, missing="tplab") if settings.layers == "mine" else None
    return way.run(train, settings, answers)[0].losses


def far_apart(losses: list[float], right: list[float], precision: str) -> dict[int, float]:
    """The steps whose losses differ by more than this precision explains, and by how much of the right one."""
    errors = {step: abs(a - b) / b for step, (a, b) in enumerate(zip(losses, right, strict=True), 1)}
    return {step: error for step, error in errors.items() if not error <= APART[precision]}
