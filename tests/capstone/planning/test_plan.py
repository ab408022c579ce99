"""The plan times every group of the run, and each message takes the time of its own group."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tplab import launch
from tplab.capstone.planning.predictions import calibrated_step, plan, predicted_memory
from tplab.capstone.planning.traffic import step_parts
from tplab.capstone.settings.settings import Settings
from tplab.capstone.study import programs
from tplab.capstone.training.ranks import join
from tplab.cost.calibration import Kernels, Line
from tplab.runtime import record, shared_memory

GRID = Settings(num_layers=2, hidden_size=64, num_heads=2, seq_length=64, vocab_size=300, batch_size=4,
                micro_batch_size=2, tp=2, dp=2)  # fmt: skip
GRIDS = {"tp, dp": GRID, "pp, dp": replace(GRID, tp=1, pp=2), "tp, pp": replace(GRID, dp=1, pp=2)}
SLOW, FREE = Line(1.0, 1.0), Line()


def timed(grids: dict[str, Settings]) -> dict[str, tuple[set[tuple[int, ...]], set[tuple[int, ...]]]]:
    """On each grid, the groups of this rank whose large all-reduces a plan times, and those that share memory."""
    found = {}
    for name, settings in grids.items():
        shared_memory._slots.clear()
        with record() as section:
            programs.kernels(settings)
        large = 4 * settings.micro_batch_size * settings.seq_length * settings.hidden_size
        groups = {one.group for one in section if one.kind == "all_reduce" and one.bytes == large}
        found[name] = groups, {tuple(dist.get_process_group_ranks(group)) for group in shared_memory._slots}
    return found


def test_a_plan_times_the_all_reduces_of_every_group_and_only_tensor_parallel_ones_share_memory():
    first = launch(timed, 4, args=(GRIDS,), timeout=300)[0]
    assert first == {
        "tp, dp": ({(0, 1), (0, 2)}, {(0, 1)}),
        "pp, dp": ({(0, 1), (0, 2)}, set()),
        "tp, pp": ({(0, 1), (0, 2)}, {(0, 1)}),
    }


@pytest.mark.parametrize("zero", [0, 1])
def test_each_message_takes_the_time_of_its_own_group(zero):
    settings = replace(GRID, pp=2, zero=zero)
    free = Kernels((0, 0), (0, 0), (0, 0), 0, 0, FREE, FREE, {"pp": (FREE, FREE), "dp": (FREE, FREE)})
    parts = step_parts(settings)
    slow = {
        "tp": replace(free, summed=SLOW, beside=SLOW),
        **{name: replace(free, others=free.others | {name: (SLOW, SLOW)}) for name in ("pp", "dp")},
    }
    assert {part.group for part in parts} == set(slow)
    for group, kernels in slow.items():
        own = [part for part in parts if part.group == group and part.kind != "recv"]
        halves = [part.bytes / (1 if part.kind in ("all_reduce", "send") else 2) for part in own]
        expected = sum(part.calls for part in own) + sum(halves)
        assert calibrated_step(settings, kernels)["communication"] == pytest.approx(expected)


def test_a_stage_sends_its_output_once_however_many_stages_there_are():
    """An all-reduce over 4 ranks, which was timed, sends a tensor 1.5 times."""
    settings = replace(GRID, tp=1, dp=1, pp=4, num_layers=4)
    pp = Kernels((0, 0), (0, 0), (0, 0), 0, 0, others={"pp": (Line(0.0, 1.5), FREE)})
    sent = sum(part.bytes for part in step_parts(settings) if part.kind == "send")
    sums = sum(part.bytes for part in step_parts(settings) if part.kind == "all_reduce")
    assert calibrated_step(settings, pp)["communication"] == pytest.approx(sent + 1.5 * sums)


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
