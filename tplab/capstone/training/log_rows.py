"""Create the log rows for the start of a run and for a step. (`tplab.capstone.training.log` writes them.)"""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

import torch.distributed as dist

from tplab.capstone.own_layers.link import used
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.log import Row
from tplab.capstone.training.meter import this_machine
from tplab.capstone.training.optimizer import learning_rate
from tplab.capstone.training.ranks import Ranks
from tplab.capstone.training.step_summary import StepSummary
from tplab.memory.config import parameter_count


def start_row(
    settings: Settings, answers: Any, idle: Collection[str], ranks: Ranks, step: int, resumed_from: int | None,
    changes: Mapping[str, tuple[Any, Any]], plan: Mapping[str, Any] | None = None,
) -> Row:  # fmt: skip
    """Return the row for the start of a run.

    answers         the learner's code, if it is used; the log gets whose each answer is, and since when
    idle            exercises whose answers are never called (`TrainingHooks.idle`)
    step            the first step to do
    resumed_from    the step of the checkpoint that was loaded, if any
    plan            what `tplab.capstone.planning.plan` predicts for a step, if it was asked
    changes         what is trained differently from here on, as {field: (before, now)}
    """
    return {
        "kind": "start",
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "settings": asdict(settings),
        "machine": this_machine(),
        "ranks": ranks.size,
        "backend": None if ranks.mesh is None else dist.get_backend(),
        "device": ranks.device.type,
        "parameters": parameter_count(settings.model),
        "layers": settings.layers,
        "used": [] if answers is None else used(answers.whose, settings, idle),
        "answers": None if answers is None else {"whose": answers.whose, "checked": answers.checked},
        "step": step,
        "resumed_from": resumed_from,
        "changes": changes,
        "plan": plan,
    }


def step_row(summary: StepSummary, settings: Settings, seconds: float) -> Row:
    """Return the row for a step. `seconds` is the mean time per step since the last row.

    The loss is in nats per token. Lists have one value per rank: bytes for `sent`, `memory` and `tensors`, and shares
    of the time for `communication`, which is empty until a GPU has finished a step (`tplab.capstone.training.meter`).
    """
    tokens = settings.tokens_per_step
    shares = [figures.communication for figures in summary.figures]
    return {
        "kind": "step",
        "step": summary.step,
        "loss": summary.loss,
        "learning_rate": learning_rate(summary.step, settings),
        "norm": summary.norm,
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "communication": [] if None in shares else shares,
        "sent": [figures.sent for figures in summary.figures],
        "memory": [figures.memory for figures in summary.figures],
        "tensors": [figures.tensors for figures in summary.figures],
    }
