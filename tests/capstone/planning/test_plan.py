"""What a step sends, by formula, beside the record of a real step: every kind, every call, every byte. Each message
takes the time of its own group. The memory is measured in test_loop.py.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.capstone.small import LLAMA
from tplab import launch
from tplab.capstone.planning.predictions import calibrated_step
from tplab.capstone.planning.traffic import step_parts
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.build_model import build_model
from tplab.capstone.training.ranks import join
from tplab.capstone.training.trainer import Trainer
from tplab.cost.calibration import Kernels, Line
from tplab.runtime import Record, Total, record

TINY = Settings(num_layers=2, hidden_size=32, num_heads=4, seq_length=16, vocab_size=300, steps=10,
                batch_size=4, micro_batch_size=2, tp=2)  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "tensor parallel": {},
    "one micro-batch, longer than a block": {"batch_size": 34, "micro_batch_size": 34, "vocab_size": 16384},
    "gradients not overlapped": {"async_grad_allreduce": False},
    "layers again": {"recompute": "layers"},
    "layers again, with dropout": {"recompute": "layers", "dropout": 0.1},
    "sequence parallel": {"sequence_parallel": True},
    "sequence parallel, layers again, with dropout": {"sequence_parallel": True, "recompute": "layers", "dropout": 0.1},
    "bfloat16": {"precision": "bfloat16"},
    "bfloat16, sequence parallel, not overlapped": {
        "precision": "bfloat16", "sequence_parallel": True, "async_grad_allreduce": False,
    },
    "float64": {"precision": "float64", "sequence_parallel": True},
    "replicas": {"tp": 1, "dp": 2},
    "no clipping": {"tp": 1, "dp": 2, "max_norm": 0.0},
    "more than one bucket": {"tp": 1, "dp": 2, "hidden_size": 256, "num_layers": 9},
    "a llama": LLAMA,
}  # fmt: skip
SETTINGS = {name: replace(TINY, **other) for name, other in OTHERS.items()}
ON_FOUR = {"a mesh": replace(TINY, dp=2, sequence_parallel=True), "a llama's mesh": replace(TINY, dp=2, **LLAMA)}


def one_step(runs: dict[str, Settings]) -> dict[str, dict[str, Total]]:
    """The calls and bytes of a step of each run on this rank, by the kind of collective."""
    found = {}
    for name, settings in runs.items():
        ranks = join(settings)
        model = build_model(settings, settings.model, mesh=ranks.mesh, device=ranks.device)
        trainer = Trainer(model, settings, ranks)
        own = settings.batch_size // settings.dp
        ids = torch.randint(settings.vocab_size, (own, settings.seq_length), generator=torch.Generator().manual_seed(1))
        with record() as section:
            trainer.run(1, ids, ids)
        found[name] = Record(list(section)).totals()
    return found


@pytest.fixture(scope="module")
def found() -> dict[int, list[dict[str, dict[str, Total]]]]:
    """By number of ranks: what each rank sends in each run."""
    return {
        p: launch(one_step, p, args=(runs,), backend="gloo", timeout=300) for p, runs in ((2, SETTINGS), (4, ON_FOUR))
    }


@pytest.mark.parametrize(("name", "settings"), (SETTINGS | ON_FOUR).items(), ids=[*SETTINGS, *ON_FOUR])
def test_the_formula_is_what_a_rank_sends(found, name: str, settings: Settings):
    expected: dict[str, Total] = {}
    for part in step_parts(settings):
        calls, size = expected.get(part.kind, Total(0, 0))
        expected[part.kind] = Total(calls + part.calls, size + part.bytes)
    assert [steps[name] for steps in found[settings.ranks]] == settings.ranks * [expected]
    assert step_parts(replace(TINY, tp=1)) == []


SLOW, FREE = Line(1.0, 1.0), Line()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_each_message_takes_the_time_of_its_own_group(sequence_parallel):
    settings = replace(TINY, dp=2, sequence_parallel=sequence_parallel)
    free = Kernels((0, 0), (0, 0), (0, 0), 0, 0, FREE, FREE, {"dp": (FREE, FREE)})
    slow = {"tp": replace(free, summed=SLOW, beside=SLOW), "dp": replace(free, others={"dp": (SLOW, SLOW)})}
    for group, kernels in slow.items():
        own = [part for part in step_parts(settings) if part.group == group]
        halves = [part.bytes / (1 if part.kind == "all_reduce" else 2) for part in own]
        expected = sum(part.calls for part in own) + sum(halves)
        assert own
        assert calibrated_step(settings, kernels)["communication"] == pytest.approx(expected)


def test_the_loss_uses_larger_blocks_on_a_gpu():
    settings = replace(TINY, seq_length=1024, vocab_size=8192, micro_batch_size=4)
    calls = {
        device: [part.calls for part in step_parts(settings, device=torch.device(device)) if part.name == "loss"]
        for device in ("cpu", "cuda")
    }
    assert calls == {"cpu": [2 * 4], "cuda": [2 * 1]}  # blocks of 2^22 / 4096 = 1024 tokens, and all 4096


KERNELS = Kernels((1e-3, 2e-3), (3e-4, 4e-4), (5e-4, 6e-4), 7e-3, 1e-9, Line(1e-4, 1e-9), Line(2e-4, 3e-9))


def test_what_is_recomputed_takes_its_time_once_more_per_layer_and_micro_batch():
    settings = replace(TINY, num_layers=3)
    assert settings.micro_batches == 2
    once, attention, layers = (
        calibrated_step(replace(settings, recompute=what), KERNELS) for what in ("nothing", "attention", "layers")
    )
    assert attention["matmuls"] - once["matmuls"] == pytest.approx(2 * 3 * 5e-4)
    assert layers["matmuls"] - once["matmuls"] == pytest.approx(2 * 3 * (1e-3 + 5e-4))
    assert layers["element-wise"] - once["element-wise"] == pytest.approx(2 * 3 * 3e-4)
