"""The plan of a run: what the course's formulas say about one step before the first one is done.

    seconds    by purpose, from the kernels of one layer, which are measured on all ranks (`tplab.cost.calibration`)
    memory     bytes on a rank by purpose, the bill of chapter 00
    sent       bytes that the rank which sends most sends, from the formula in `traffic`

The log's start row has the plan, and the report shows it beside the run.
"""

from itertools import product
from typing import Any

import torch
from torch.distributed import ProcessGroup

from tplab.capstone.planning.predictions import calibrated_step, predicted_memory
from tplab.capstone.planning.traffic import step_parts
from tplab.capstone.settings.settings import Settings
from tplab.cost.calibration import Kernels, measure_kernels
from tplab.memory.memory_bill import rank_parameters
from tplab.runtime import record

ROUNDS = 3  # fewer than `measure_kernels` takes by default, because the run waits for them


def kernels_of(settings: Settings, **options: Any) -> Kernels:
    """Measure the kernels of one layer of the run on this rank's device, while all ranks are busy."""
    return measure_kernels(
        settings.model, settings.micro_batch_size, settings.tp, dtype=getattr(torch, settings.precision),
        parameters=rank_parameters(settings.model, settings.layout), **options,
    )  # fmt: skip


def plan(settings: Settings, device: torch.device, group: ProcessGroup | None = None) -> dict[str, Any]:
    """Return the plan. All ranks call this before they build their model. It leaves torch's random state alone.

    group    the ranks among which all-reduces are timed (None: all)
    """
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), record(keep=False):
        kernels = kernels_of(settings, rounds=ROUNDS, group=group)
    if gpus:
        torch.cuda.reset_peak_memory_stats(device)
    memory, note = predicted_memory(settings)
    places = product(range(settings.pp), range(settings.dp))
    of_ranks = [step_parts(settings, stage=stage, replica=replica) for stage, replica in places]
    return {
        "seconds": calibrated_step(settings, kernels),
        "memory": memory,
        "note": note,
        "sent": max(sum(part.bytes for part in parts if part.kind != "recv") for parts in of_ranks),
    }
