"""The cost of communication and computation: collectives, FLOPs, a layer, a step. Published tables: test_published.

References are written out here: numbers done by hand, torch's own FLOP counter, the schedules of chapter 13 played.
"""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tplab.collectives.links import Link
from tplab.cost import collective as cost
from tplab.cost.flops import hardware_flops, layer_scores, model_flops
from tplab.cost.layer import Pass, layer_time
from tplab.cost.machines import MACHINES, Machine
from tplab.cost.step import Program, StepTime, output_time, step_time
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig
from tplab.memory.memory_bill import Layout, rank_parameters
from tplab.pipeline.schedule_order import bubble, simulate
from tplab.pipeline.schedules import gpipe, interleaved, one_f_one_b

UNIT = Link(1.0, 1.0)
NOTHING = Link(0.0, 1e-30)
# Every number different, none a power of two of another: no two parts can be mistaken for each other.
PLAIN = Machine("plain", flops=7e6, fraction=0.5, memory=10**9, bandwidth=3e5, gpus_per_node=4,
                inside=Link(0.0157, 1.3e-6), between=Link(0.17, 2.9e-5))  # fmt: skip
SMALL = GPTConfig(num_layers=6, hidden_size=24, num_heads=4, vocab_size=44, seq_length=20)
T = 3 * 20  # tokens of a micro-batch of 3


# Collectives


@pytest.mark.parametrize(
    ("seconds", "by_hand"),
    [
        (cost.all_reduce(UNIT, 8, 4), 2 * 3 * (1 + 2)),
        (cost.all_reduce(UNIT, 8, 4, "tree"), 2 * 2 * (1 + 8)),
        (cost.all_reduce(UNIT, 8, 5, "tree"), 2 * 3 * (1 + 8)),
        (cost.all_gather(UNIT, 8, 4), 3 * (1 + 2)),
        (cost.reduce_scatter(UNIT, 8, 4), 3 * (1 + 2)),
        *((collective(UNIT, 8, 1), 0) for collective in (cost.all_reduce, cost.all_gather)),  # nothing is sent
    ],
)
def test_collectives_take_the_time_of_their_messages(seconds, by_hand):
    assert seconds == pytest.approx(by_hand)


@pytest.mark.parametrize(
    ("name", "p", "speed"),  # GB/s of an all-reduce of gigabytes, as nccl-tests counts them (bytes / time)
    [
        ("H100 DGX", 5, 258),  # NVIDIA/nccl issue 1455
        ("H100 DGX", 8, 275),  # NVIDIA/nccl issue 2140, where the ring reaches 211
        ("B200 DGX", 8, 483),  # the same issue, on B300, which has the same links
        ("GB200 NVL72", 8, 811 / 1.75),  # lixueduan.com/posts/ai/13-gb200-mnnvl-nccl-test
    ],
)
def test_sums_in_the_switch_are_as_fast_as_measured(name, p, speed):
    assert 4e9 / cost.all_reduce(MACHINES[name].inside, 4e9, p, "switch") == pytest.approx(1e9 * speed, rel=0.04)


def test_the_switch_saves_half_of_a_rings_traffic_but_small_messages_prefer_the_ring():
    link = Link(0.0, 1.0, switch=1.0)
    assert cost.all_reduce(link, 8e6, 8, "switch") == pytest.approx(9e6)
    assert cost.all_reduce(link, 8e6, 8) == pytest.approx(14e6)
    assert cost.all_reduce(link, 8e6, 8, "fastest") == pytest.approx(9e6)
    assert cost.all_reduce(link, 1e-6, 8, "fastest") == cost.all_reduce(link, 1e-6, 8)
    assert cost.all_reduce(UNIT, 8, 4, "fastest") == cost.all_reduce(UNIT, 8, 4)


# FLOPs


def counted(config: GPTConfig, batch: int, recompute: str = "nothing") -> int:
    """FLOPs of forward and backward of a real GPT, as torch counts them."""
    model = ParallelGPT(config, recompute=recompute).train()
    ids = torch.randint(config.vocab_size, (batch, config.seq_length))
    with FlopCounterMode(display=False) as counter:
        model(ids, targets=ids).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("recompute", ["nothing", "attention", "layers"])
@pytest.mark.parametrize(
    "change",
    [{}, {"num_kv_heads": 2, "gated": True, "ffn_hidden_size": 36, "bias": False, "learned_positions": False}],
    ids=["GPT", "Llama"],
)
def test_flops_are_those_that_torch_counts_in_a_real_gpt(change, recompute):
    config = dataclasses.replace(SMALL, vocab_size=128, **change)  # 128, since the GPT pads its vocabulary
    again = counted(config, 3, recompute)
    if recompute == "attention":  # torch stops once it has what backward needs, so P V is not multiplied again
        again += T * config.num_layers * layer_scores(config) // 2
    assert hardware_flops(config, 3, recompute) == again
    assert model_flops(config, 3) == counted(config, 3)


# A layer


def parts(one: Pass) -> tuple[float, float, float, float]:
    return one.products, one.elementwise, one.communication, one.hidden


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_layer_is_its_products_its_bytes_and_its_messages(tp):
    h, f, a, s, rate, wide = 24, 96, 4, 20, 3.5e6, 3e5
    time = layer_time(SMALL, PLAIN, micro_batch=3, tp=tp)
    products = T * (24 * h**2 + 4 * s * h) / tp / rate
    scores = a * s * T / tp
    forward_bytes = T * h * (2 * 4 + 2 * 7) + 4 * T * f / tp + 13 * scores
    backward_bytes = T * h * (2 * 6 + 2 * 11) + 6 * T * f / tp + 19 * scores
    messages = 2 * 2 * (tp - 1) * (0.0157 + 1.3e-6 * 2 * T * h / tp)
    assert parts(time.forward) == pytest.approx((products, forward_bytes / wide, messages, 0))
    assert parts(time.backward) == pytest.approx((2 * products, backward_bytes / wide, messages, 0))
    assert parts(time.recompute) == (0, 0, 0, 0)
    assert time.total == pytest.approx(3 * products + (forward_bytes + backward_bytes) / wide + 2 * messages)


def test_without_dropout_its_passes_and_masks_fall_away_and_a_gate_adds_its_own():
    config = dataclasses.replace(SMALL, dropout=0.0, gated=True, ffn_hidden_size=40)
    time = layer_time(config, PLAIN, micro_batch=3)
    scores = 4 * 20 * T
    assert time.forward.elementwise == pytest.approx((T * 24 * (8 + 12) + 6 * T * 40 + 8 * scores) / 3e5)
    assert time.backward.elementwise == pytest.approx((T * 24 * (12 + 12) + 10 * T * 40 + 14 * scores) / 3e5)
    assert time.forward.products == pytest.approx(T * (8 * 24**2 + 6 * 24 * 40 + 4 * 20 * 24) / 3.5e6)


def test_flash_attention_computes_half_of_the_scores_and_keeps_them_out_of_memory():
    flash = layer_time(dataclasses.replace(SMALL, flash_attention=True), PLAIN, micro_batch=3)
    whole = layer_time(SMALL, PLAIN, micro_batch=3)
    scores = T * 4 * 20 * 24 / 3.5e6
    assert whole.forward.products - flash.forward.products == pytest.approx(scores / 2)
    assert whole.backward.products - flash.backward.products == pytest.approx(2 * scores - 5 / 4 * scores)
    assert whole.forward.elementwise - flash.forward.elementwise == pytest.approx(13 * 4 * 20 * T / 3e5)
    assert whole.backward.elementwise - flash.backward.elementwise == pytest.approx(19 * 4 * 20 * T / 3e5)


def test_the_overlap_hides_the_shorter_of_all_reduce_and_weight_gradient_of_each_column_weight():
    message = 2 * 1 * (0.0157 + 1.3e-6 * 2 * T * 24 / 2)
    qkv, up = (T * 2 * 24 * width / 2 / 3.5e6 for width in (3 * 24, 96))
    assert qkv < message < up, "the case should show both"
    with_overlap = layer_time(SMALL, PLAIN, micro_batch=3, tp=2, overlap=True)
    without = layer_time(SMALL, PLAIN, micro_batch=3, tp=2)
    assert with_overlap.backward.hidden == pytest.approx(qkv + message)
    assert without.total - with_overlap.total == pytest.approx(qkv + message)
    assert with_overlap.forward == without.forward


# A step

FREE = dataclasses.replace(PLAIN, inside=NOTHING, between=NOTHING)


def even(stages: int, m: int, **kwargs) -> tuple[GPTConfig, Layout]:
    """Stages that all take the same time, since the output layer has next to no vocabulary."""
    return dataclasses.replace(SMALL, vocab_size=1, num_layers=12), Layout(pp=stages, micro_batches=m, **kwargs)


@pytest.mark.parametrize(
    "schedule",
    [gpipe(3, 5), one_f_one_b(4, 8), interleaved(3, 6, 2)],
    ids=lambda schedule: schedule.name,
)
def test_the_bubble_is_that_of_the_schedule_when_it_is_played(schedule):
    config, layout = even(schedule.world_size, schedule.micro_batches)
    time = step_time(config, dataclasses.replace(layout, chunks=schedule.chunks), FREE)
    played = bubble(simulate(schedule, {"F": 1.0, "B": 2.0}))
    assert time.bubble / (time.compute + time.tensor_parallel) == pytest.approx(played, rel=0.02)


def test_uneven_stages_wait_for_the_slowest():
    config = dataclasses.replace(SMALL, num_layers=7, vocab_size=1)
    time = step_time(config, Layout(pp=3, micro_batches=4), FREE)
    of_layer = layer_time(config, FREE).total
    end = output_time(config, FREE, 1, 1).total
    assert time.compute == pytest.approx(4 * 3 * of_layer)
    assert time.bubble == pytest.approx((2 + 2) * of_layer + end)


def test_a_step_on_one_gpu_is_its_layers_its_output_and_its_optimizer():
    time = step_time(SMALL, Layout(micro_batch=3, micro_batches=5, recompute="layers"), PLAIN)
    layer = layer_time(SMALL, PLAIN, micro_batch=3, recompute="layers").total
    output = 3 * T * 2 * 24 * 44 / 3.5e6 + 22 * T * 44 / 3e5
    parameters = 6 * (12 * 24**2 + 13 * 24) + (44 + 20) * 24 + 2 * 24
    assert time.compute == pytest.approx(5 * (6 * layer + output))
    assert time.optimizer == pytest.approx(28 * parameters / 3e5)
    assert time.total == pytest.approx(time.compute + time.optimizer)


def test_gradients_are_summed_over_replicas_by_the_link_that_they_lie_across():
    parameters = 6 * (12 * 24**2 + 13 * 24) + (44 + 20) * 24 + 2 * 24
    inside = step_time(SMALL, Layout(dp=4, micro_batches=1), PLAIN)
    across = step_time(SMALL, Layout(dp=8, micro_batches=1), PLAIN)
    assert inside.data_parallel == pytest.approx(2 * 3 * (0.0157 + 1.3e-6 * 2 * parameters / 4))
    assert across.data_parallel == pytest.approx(2 * 7 * (0.17 + 2.9e-5 / 4 * 2 * parameters / 8))
    stages = step_time(SMALL, Layout(pp=2, dp=4), PLAIN)  # whose replicas are two GPUs apart, two of them in a node
    of_stage = max(rank_parameters(SMALL, Layout(pp=2), stage) for stage in range(2))
    assert stages.data_parallel == pytest.approx(2 * 3 * (0.17 + 2.9e-5 / 2 * 2 * of_stage / 4))
    hidden = step_time(SMALL, Layout(dp=8, micro_batches=1), PLAIN, Program(overlap_gradients=True))
    assert hidden.data_parallel == pytest.approx(max(0, across.data_parallel - 2 / 3 * across.compute))
    assert hidden.compute == across.compute
    sharded = step_time(SMALL, Layout(dp=8, micro_batches=1), PLAIN, Program(shard_optimizer=True))
    assert sharded.optimizer == pytest.approx(across.optimizer / 8)
    assert sharded.data_parallel == across.data_parallel


def test_stages_send_each_micro_batch_there_and_back():
    size = 2 * T * 24
    config, layout = even(2, 4, micro_batch=3)
    inside = step_time(config, layout, PLAIN)
    assert inside.pipeline_sends == pytest.approx(2 * (4 + 1) * (0.0157 + 1.3e-6 * size))
    across = step_time(config, dataclasses.replace(layout, tp=4), PLAIN)
    assert across.pipeline_sends == pytest.approx(2 * (4 + 1) * (0.17 + 2.9e-5 * size))
    cut = step_time(config, dataclasses.replace(layout, tp=4, sequence_parallel=True), PLAIN)
    assert cut.pipeline_sends == pytest.approx(2 * (4 + 1) * (0.17 + 2.9e-5 * size / 4))
    gathered = step_time(config, dataclasses.replace(layout, tp=4), PLAIN, Program(scatter_gather=True))
    gather = 3 * (0.0157 + 1.3e-6 * size / 4)
    assert gathered.pipeline_sends == pytest.approx(2 * (4 + 1) * (0.17 + 2.9e-5 * size / 4 + gather))
    chunks = step_time(config, dataclasses.replace(layout, chunks=3), PLAIN)
    assert chunks.pipeline_sends == pytest.approx(2 * (4 * 3 + 1) * (0.0157 + 1.3e-6 * size))


def test_tensor_parallel_communication_counts_layers_embedding_and_output():
    time = step_time(SMALL, Layout(tp=2, micro_batch=3, micro_batches=5), PLAIN, Program(overlap_input_gradient=False))
    message = 2 * 1 * (0.0157 + 1.3e-6 * 2 * T * 24 / 2)
    assert time.tensor_parallel == pytest.approx(5 * (6 * 4 + 2) * message)
    hidden = step_time(SMALL, Layout(tp=2, micro_batch=3, micro_batches=5), PLAIN)
    saved = layer_time(SMALL, PLAIN, micro_batch=3, tp=2, overlap=True).backward.hidden
    assert hidden.tensor_parallel == pytest.approx(time.tensor_parallel - 5 * 6 * saved)


def test_the_limit_is_the_largest_part_beside_the_products():
    assert StepTime(9, 1, 2, 3, 1, 1, 1).limit == "pipeline bubble"
    assert StepTime(0, 1, 2, 0, 1, 5, 1).limit == "data parallel"
