"""The plan times every group of the run, and each message takes the time of its own group. The memory is measured."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tplab import launch
from tplab.capstone.planning.predictions import calibrated_step, kernels_of, plan, predicted_memory
from tplab.capstone.planning.traffic import step_parts
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.ranks import join
from tplab.cost.calibration import Kernels, Line
from tplab.runtime import record, shared_memory

GRID = Settings(num_layers=2, hidden_size=64, num_heads=2, seq_length=64, vocab_size=300, batch_size=4,
                micro_batch_size=2, tp=2, dp=2)  # fmt: skip
SLOW, FREE = Line(1.0, 1.0), Line()


def timed(settings: Settings) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """The groups of this rank whose large all-reduces a plan times, and those that share memory."""
    with record() as section:
        kernels_of(settings, join(settings).mesh)
    large = 4 * settings.micro_batch_size * settings.seq_length * settings.hidden_size
    groups = {one.group for one in section if one.kind == "all_reduce" and one.bytes == large}
    return groups, {tuple(dist.get_process_group_ranks(group)) for group in shared_memory._slots}


def test_a_plan_times_the_all_reduces_of_every_group_and_only_tensor_parallel_ones_share_memory():
    assert launch(timed, 4, args=(GRID,), timeout=300)[0] == ({(0, 1), (0, 2)}, {(0, 1)})


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


BLOCKS = Settings(num_layers=1, hidden_size=8, num_heads=2, seq_length=1024, vocab_size=8192, batch_size=4,
                  micro_batch_size=4, tp=2)  # fmt: skip
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def on_a_machine_for(backend: str):
    """Context manager in which a run that used this machine alone would use the given backend."""
    return patch("tplab.capstone.planning.traffic.backend_for", lambda ranks: backend)


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


def planned(settings: Settings) -> dict:
    with on_a_machine_for("nccl"):
        ranks = join(settings)
        return plan(settings, ranks.device, ranks.mesh)


def test_a_plan_is_for_the_device_that_the_run_uses_also_where_this_machine_alone_would_use_another():
    found = launch(planned, 2, args=(BLOCKS,), backend="gloo")[0]
    assert found["sent"] == sum(part.bytes for part in step_parts(BLOCKS, device=CPU))
    assert found["memory"] == predicted_memory(BLOCKS, CPU)[0]
    assert found["sent"] != sum(part.bytes for part in step_parts(BLOCKS, device=GPU))


TINY = Settings(data_limit=60_000, vocab_size=300, num_layers=1, hidden_size=32, num_heads=2, seq_length=16, tp=2,
                steps=2, batch_size=2, micro_batch_size=2, sample_tokens=0, evaluation_batches=1, save_every=0,
                warmup_steps=1)  # fmt: skip
KERNELS = Kernels((1e-3, 2e-3), (3e-4, 4e-4), (5e-4, 6e-4), 7e-3, 1e-9, Line(1e-4, 1e-9), Line(2e-4, 3e-9))


def test_what_is_recomputed_takes_its_time_once_more_per_layer_and_micro_batch():
    settings = replace(TINY, num_layers=3, batch_size=4, vocab_size=512)
    assert settings.micro_batches == 2
    once, attention, layers = (
        calibrated_step(replace(settings, recompute=what), KERNELS) for what in ("nothing", "attention", "layers")
    )
    assert attention["matmuls"] - once["matmuls"] == pytest.approx(2 * 3 * 5e-4)
    assert layers["matmuls"] - once["matmuls"] == pytest.approx(2 * 3 * (1e-3 + 5e-4))
    assert layers["element-wise"] - once["element-wise"] == pytest.approx(2 * 3 * 3e-4)
