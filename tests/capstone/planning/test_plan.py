"""What a step sends, by formula, beside the record of a real step: every kind, every call, every byte. The plan times
every group of the run, and each message takes the time of its own group. The memory is measured in test_loop.py.
"""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.capstone.small import LLAMA
from tplab import launch
from tplab.capstone.planning.predictions import calibrated_step, kernels_of, plan, predicted_memory
from tplab.capstone.planning.traffic import step_parts
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.build_model import build_model
from tplab.capstone.training.ranks import join
from tplab.capstone.training.trainer import Trainer
from tplab.cost.calibration import Kernels, Line
from tplab.runtime import Record, Total, record, shared_memory

TINY = Settings(num_layers=2, hidden_size=32, num_heads=4, seq_length=16, vocab_size=300, steps=10,
                batch_size=4, micro_batch_size=2, tp=2)  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "tensor parallel": {},
    "one micro-batch, longer than a block": {"batch_size": 34, "micro_batch_size": 34, "vocab_size": 16384},
    "gradients not overlapped": {"async_grad_allreduce": False},
    "layers again": {"recompute": "layers"},
    "layers again, with dropout": {"recompute": "layers", "dropout": 0.1},
    "attention again": {"recompute": "attention"},
    "sequence parallel": {"sequence_parallel": True},
    "sequence parallel, layers again, with dropout": {"sequence_parallel": True, "recompute": "layers", "dropout": 0.1},
    "bfloat16": {"precision": "bfloat16"},
    "bfloat16, not overlapped": {"precision": "bfloat16", "async_grad_allreduce": False},
    "bfloat16, sequence parallel, not overlapped": {
        "precision": "bfloat16", "sequence_parallel": True, "async_grad_allreduce": False,
    },
    "float64": {"precision": "float64", "sequence_parallel": True},
}  # fmt: skip
REPLICAS: dict[str, dict[str, Any]] = {
    "replicas": {"tp": 1, "dp": 2},
    "no clipping": {"tp": 1, "dp": 2, "max_norm": 0.0},
    "more than one bucket": {"tp": 1, "dp": 2, "hidden_size": 256, "num_layers": 9},
    "a llama": LLAMA,
}
SETTINGS = {name: replace(TINY, **other) for name, other in (OTHERS | REPLICAS).items()}
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


GRID, SLOW, FREE = replace(TINY, dp=2), Line(1.0, 1.0), Line()
BLOCKS = Settings(num_layers=1, hidden_size=8, num_heads=2, seq_length=1024, vocab_size=8192, batch_size=4,
                  micro_batch_size=4, tp=2)  # fmt: skip
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def timed(settings: Settings) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """The groups of this rank whose large all-reduces a plan times, and those that share memory."""
    with record() as section:
        kernels_of(settings, join(settings).mesh)
    large = 4 * settings.micro_batch_size * settings.seq_length * settings.hidden_size
    groups = {one.group for one in section if one.kind == "all_reduce" and one.bytes == large}
    return groups, {tuple(dist.get_process_group_ranks(group)) for group in shared_memory._slots}


def on_a_machine_for(backend: str):
    """Context manager in which a run that used this machine alone would use the given backend."""
    return patch("tplab.capstone.planning.traffic.backend_for", lambda ranks: backend)


def planned(settings: Settings) -> dict:
    with on_a_machine_for("nccl"):
        ranks = join(settings)
        return plan(settings, ranks.device, ranks.mesh)


def on_ranks(runs: dict[str, Settings]) -> tuple[Any, dict[str, dict[str, Total]]]:
    """What a plan finds on two ranks, or which groups it times on four, and the record of each run's step."""
    return planned(BLOCKS) if dist.get_world_size() == 2 else timed(GRID), one_step(runs)


@pytest.fixture(scope="module")
def found() -> dict[int, list[tuple[Any, dict[str, dict[str, Total]]]]]:
    return {
        p: launch(on_ranks, p, args=(runs,), backend="gloo", timeout=300) for p, runs in ((2, SETTINGS), (4, ON_FOUR))
    }


@pytest.mark.parametrize(("name", "settings"), (SETTINGS | ON_FOUR).items(), ids=[*SETTINGS, *ON_FOUR])
def test_the_formula_is_what_a_rank_sends(found, name: str, settings: Settings):
    expected: dict[str, Total] = {}
    for part in step_parts(settings):
        calls, size = expected.get(part.kind, Total(0, 0))
        expected[part.kind] = Total(calls + part.calls, size + part.bytes)
    assert [steps[name] for _, steps in found[settings.ranks]] == settings.ranks * [expected]
    assert step_parts(replace(TINY, tp=1)) == []


def test_a_plan_times_the_all_reduces_of_every_group_and_only_tensor_parallel_ones_share_memory(found):
    assert found[4][0][0] == ({(0, 1), (0, 2)}, {(0, 1)})


def test_a_plan_is_for_the_device_that_the_run_uses_also_where_this_machine_alone_would_use_another(found):
    made = found[2][0][0]
    assert made["sent"] == sum(part.bytes for part in step_parts(BLOCKS, device=CPU))
    assert made["memory"] == predicted_memory(BLOCKS, CPU)[0]
    assert made["sent"] != sum(part.bytes for part in step_parts(BLOCKS, device=GPU))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_each_message_takes_the_time_of_its_own_group(sequence_parallel):
    settings = replace(GRID, sequence_parallel=sequence_parallel)
    free = Kernels((0, 0), (0, 0), (0, 0), 0, 0, FREE, FREE, {"dp": (FREE, FREE)})
    slow = {"tp": replace(free, summed=SLOW, beside=SLOW), "dp": replace(free, others={"dp": (SLOW, SLOW)})}
    for group, kernels in slow.items():
        own = [part for part in step_parts(settings) if part.group == group]
        halves = [part.bytes / (1 if part.kind == "all_reduce" else 2) for part in own]
        expected = sum(part.calls for part in own) + sum(halves)
        assert own
        assert calibrated_step(settings, kernels)["communication"] == pytest.approx(expected)


# bfloat16 logits are kept beside their exponentials in float32, which overwrite logits of other dtypes
@pytest.mark.parametrize(("precision", "bytes_per_logit"), [("float32", 4), ("float64", 8), ("bfloat16", 2 + 4)])
def test_the_loss_uses_larger_blocks_on_a_gpu(precision, bytes_per_logit):
    calls, memory, settings = {}, {}, replace(BLOCKS, precision=precision)
    for device in (CPU, GPU):
        calls[device] = [part.calls for part in step_parts(settings, device=device) if part.name == "loss"]
        memory[device] = sum(predicted_memory(settings, device)[0].values())
    assert calls == {CPU: [2 * 4], GPU: [2 * 1]}  # blocks of 2^22 / 4096 = 1024 tokens, and all 4096
    assert memory[GPU] - memory[CPU] == bytes_per_logit * (4096 - 1024) * 4096
    for backend, device in (("gloo", CPU), ("nccl", GPU)):
        with on_a_machine_for(backend):
            assert step_parts(BLOCKS) == step_parts(BLOCKS, device=device)


def test_with_dropout_only_a_cpu_saves_the_attention_scores():
    drops = replace(BLOCKS, dropout=0.1, vocab_size=1024)
    cpu, gpu = (predicted_memory(drops, device)[0]["activations"] for device in (CPU, GPU))
    scores, log_sum_exp = 4 * 1 * 1024 * 1024, 4 * 1 * 1024  # b · a/p · s² and b · a/p · s
    assert cpu - gpu == 2 * (5 * scores - 4 * log_sum_exp)


KERNELS = Kernels((1e-3, 2e-3), (3e-4, 4e-4), (5e-4, 6e-4), 7e-3, 1e-9, Line(1e-4, 1e-9), Line(2e-4, 3e-9))


def test_what_is_recomputed_takes_its_time_once_more_per_layer_and_micro_batch():
    settings = replace(GRID, dp=1, num_layers=3)
    assert settings.micro_batches == 2
    once, attention, layers = (
        calibrated_step(replace(settings, recompute=what), KERNELS) for what in ("nothing", "attention", "layers")
    )
    assert attention["matmuls"] - once["matmuls"] == pytest.approx(2 * 3 * 5e-4)
    assert layers["matmuls"] - once["matmuls"] == pytest.approx(2 * 3 * (1e-3 + 5e-4))
    assert layers["element-wise"] - once["element-wise"] == pytest.approx(2 * 3 * 3e-4)
