"""The memory bill: against plain torch models, real optimizers, what autograd really keeps, published figures."""

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from math import prod
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests import saying
from tplab import plain
from tplab.memory.config import (
    PRESETS,
    GPTConfig,
    check_tensor_parallel,
    first_weights,
    layer_weights,
    parameter_count,
    tensor_parallel_sizes,
)
from tplab.memory.memory_bill import (
    ADAM,
    Layout,
    Recipe,
    bill,
    layer_activations,
    layers_of_stage,
    micro_batches_in_flight,
    rank_parameters,
)
from tplab.memory.meter import (
    MemoryMeter,
    optimizer_bytes,
    parameter_bytes,
    saved_for_backward,
    tensor_bytes,
)
from tplab.memory.small_gpt import GPT, SAVED_BY_LAYER, Layer
from tplab.pipeline.schedules import interleaved, one_f_one_b


def layer_of_rank(config: GPTConfig, tp: int = 1) -> plain.Layer:
    """What one of tp ranks holds of a layer: its share of the heads and of the MLP."""
    own = replace(
        config, num_heads=config.num_heads // tp, num_kv_heads=max(1, config.kv_heads // tp),
        ffn_hidden_size=config.ffn_size // tp,
    )  # fmt: skip
    return plain.Layer(own, head_dim=config.head_dim)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Dropout keeps a mask of one byte an element, and RMSNorm its input and a few numbers a token."""

    def dropout(x: torch.Tensor, p: float, training: bool = True) -> torch.Tensor:
        return torch.native_dropout(x, p, True)[0] if training and p else x

    def rms_norm(x: torch.Tensor, shape: list[int], weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.layer_norm(x, shape, weight, eps=eps)  # which keeps as much

    with mock.patch.multiple(F, dropout=dropout, rms_norm=rms_norm):
        yield


def numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def random_config(rng: random.Random, **options) -> GPTConfig:
    kv_heads = rng.choice([1, 2, 4])
    heads = kv_heads * rng.choice([1, 2, 3])
    values = {
        "num_layers": rng.randint(1, 4), "hidden_size": heads * rng.choice([4, 6, 8]), "num_heads": heads,
        "num_kv_heads": rng.choice([None, kv_heads]), "ffn_hidden_size": rng.choice([None, 12 * rng.randint(1, 9)]),
        "vocab_size": rng.randint(30, 99), "seq_length": rng.randint(3, 40), "gated": rng.random() < 0.5,
        "bias": rng.random() < 0.5, "tied_embedding": rng.random() < 0.5, "learned_positions": rng.random() < 0.5,
    }  # fmt: skip
    return GPTConfig(**(values | options))


PLAIN = {"num_kv_heads": None, "ffn_hidden_size": None, "gated": False, "bias": True}  # as in Korthikanti et al.


RANDOM = [random_config(random.Random(seed)) for seed in range(30)]
SMALL = GPTConfig(num_layers=2, hidden_size=24, num_heads=4, vocab_size=50, seq_length=16)


# Parameters


@pytest.mark.parametrize(
    ("name", "published"),
    [
        # "1558M" in the names of the released files, github.com/openai/gpt-2; table 2 of the paper says 1542M
        ("GPT-2 1.5B", 1558e6),
        ("GPT-3 175B", 174_600e6),  # Brown et al. 2020, table D.1
        # the bytes of the released 16-bit checkpoints: model.safetensors.index.json, "total_size", divided by 2
        ("Llama 3 8B", 16_060_522_496 / 2),
        ("Llama 3 70B", 141_107_412_992 / 2),
        ("Llama 3 405B", 405e9),  # Dubey et al. 2024, table 3
    ],
)
def test_published_parameter_counts_to_within_half_a_percent(name, published) -> None:
    assert abs(parameter_count(PRESETS[name]) - published) < 0.005 * published


@pytest.mark.parametrize("config", [*PRESETS.values(), *RANDOM, replace(SMALL, bias=False, qkv_bias=True)])
def test_any_model_has_the_parameters_of_its_plain_torch_twin_and_of_chapter_00s_gpt(config) -> None:
    with torch.device("meta"):
        model = plain.GPT(config)
        assert parameter_count(config) == numel(model) == numel(GPT(config))
    rows: dict[str, int] = {}  # the plain layer has one matrix for Q, K and V, and one for gate and up
    for weight in layer_weights(config):
        name = re.sub(r"attention\.[qkv]\.", "attention.qkv.", weight.name).replace("mlp.gate", "mlp.up")
        rows[name] = rows.get(name, 0) + prod(weight.shape)
    assert rows == {name: parameter.numel() for name, parameter in model.layers[0].named_parameters()}


@pytest.mark.parametrize("config", RANDOM)
def test_a_tensor_parallel_rank_holds_its_share_of_a_layer(config) -> None:
    for tp in tensor_parallel_sizes(config, 8):
        with torch.device("meta"):
            assert sum(weight.on_rank(tp) for weight in layer_weights(config)) == numel(layer_of_rank(config, tp))
    assert first_weights(SMALL)[0].on_rank(4) == 13 * 24, "the vocabulary is padded"


@pytest.mark.parametrize("config", RANDOM[:20])
def test_the_stages_of_a_pipeline_hold_the_model_once_and_a_tied_embedding_twice(config) -> None:
    for pp in range(1, config.num_layers + 1):
        on_stages = sum(rank_parameters(config, Layout(pp=pp), stage) for stage in range(pp))
        again = config.vocab_size * config.hidden_size if pp > 1 and config.tied_embedding else 0
        assert on_stages == parameter_count(config) + again
    assert [layers_of_stage(126, 16, stage) for stage in range(16)] == [8] * 14 + [7] * 2


# States


def one_step(make_optimizer, config=SMALL):
    torch.manual_seed(0)
    model = plain.GPT(config)
    optimizer = make_optimizer(model.parameters())
    ids = torch.randint(config.vocab_size, (2, config.seq_length))
    model(ids, ids).backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("make", "state", "counters"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), 0, 0),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), 4, 0),
        (lambda p: torch.optim.AdamW(p), 8, 4),
    ],
)
def test_states_of_real_optimizers_after_one_step(make, state, counters) -> None:
    model, optimizer = one_step(make)
    n = numel(model)
    assert parameter_bytes(model) == 4 * n
    steps = counters * len(list(model.parameters()))  # Adam counts the steps of each tensor, in one float32
    assert optimizer_bytes(optimizer) == state * n + steps


# Activations


def kept_by(config: GPTConfig, b: int, tp: int = 1, device: str = "meta") -> int:
    """Bytes that autograd really keeps of one layer, without the two numbers a token that each norm keeps."""
    config = replace(config, learned_positions=True)  # rotary ones keep a few sines that the bill doesn't count
    with torch.device(device), as_on_a_gpu():
        block = layer_of_rank(config, tp).bfloat16()
        x = torch.randn(b, config.seq_length, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        with saved_for_backward(block) as kept:
            block(x)
    return sum(size for shape, _, size in kept.pieces if shape != (b, config.seq_length, 1))


def test_what_a_layer_saves_has_the_names_of_the_chapters_table() -> None:
    """By size, with h = 24, a = 3, s = 10, b = 2: every kind of tensor that can be told apart by its size is."""
    config = GPTConfig(num_layers=1, hidden_size=24, num_heads=3, vocab_size=50, seq_length=10)
    x = torch.randn(2, 10, 24, dtype=torch.bfloat16, requires_grad=True)
    layer = Layer(config).bfloat16()
    with saved_for_backward(layer) as kept:
        layer(x)
    for name, (shape, dtype, size) in zip(SAVED_BY_LAYER, kept.pieces, strict=True):
        elements = 2 * 10 * 24
        if name.startswith(("mean", "1/std")):
            elements = 2 * 10
        elif "scores" in name:
            elements = 2 * 3 * 10 * 10
        elif name in ("input of GELU", "input of down"):
            elements *= 4
        mask = "mask" in name
        assert (dtype == torch.bool, size) == (mask, elements if mask else 2 * elements), name
        assert (shape[-2:] == (8, 10)) == (name == "K"), "K is saved transposed"


def test_sequence_parallelism_and_recomputation_keep_what_table_2_of_korthikanti_says() -> None:
    for seed in range(20):
        config = random_config(random.Random(seed), **PLAIN, flash_attention=False, dropout=0.1)
        s, h, a, b = config.seq_length, config.hidden_size, config.num_heads, 3
        for t in (p for p in tensor_parallel_sizes(config, 8) if s % p == 0):
            scores = 5 * a * s / (h * t)
            table = {  # what is recomputed: bytes for each b s h without and with sequence parallelism
                "nothing": (10 + 24 / t + scores, 34 / t + scores),
                "attention": (10 + 24 / t, 34 / t),
                "layers": (2, 2 / t),
            }
            for recompute, factors in table.items():
                for cut, factor in enumerate(factors):
                    kept = layer_activations(config, b, t, sequence_parallel=bool(cut), recompute=recompute)
                    assert sum(kept.values()) == pytest.approx(s * b * h * factor, abs=0.5)


def test_the_bill_counts_sequence_parallelism_and_recomputation_in_every_layer_and_outside() -> None:
    config = replace(PRESETS["GPT-3 175B"], dropout=0.1, flash_attention=False)
    s, h, a, t, layers = config.seq_length, config.hidden_size, config.num_heads, 8, config.num_layers
    logits = 4 * s * -(-config.vocab_size // t)
    plain, lean = (
        bill(config, Layout(tp=t, sequence_parallel=both, recompute="attention" if both else "nothing")).activations
        for both in (False, True)
    )
    assert plain == layers * s * h * (10 + 24 // t + 5 * a * s // (h * t)) + s * h * (1 + 4) + logits
    assert lean == layers * s * h * 34 // t + s * h * (1 + 4) // t + logits


@pytest.mark.parametrize("config", RANDOM[:20])
@pytest.mark.parametrize("dropout", [0.1, 0.0])
def test_activations_of_any_layer_are_what_autograd_keeps(config, dropout) -> None:
    full_heads = replace(config, dropout=dropout, num_kv_heads=None)
    for tp in tensor_parallel_sizes(full_heads, 4):
        assert sum(layer_activations(full_heads, 2, tp).values()) == kept_by(full_heads, 2, tp)


def test_flash_attention_keeps_no_scores() -> None:
    sizes = {"hidden_size": 64, "num_heads": 8, "num_kv_heads": 2, "seq_length": 32}
    config = replace(SMALL, **sizes, gated=True, bias=False, dropout=0.0, flash_attention=True)
    for tp in (1, 2, 4):
        assert sum(layer_activations(config, 2, tp).values()) == kept_by(config, 2, tp, "cpu")
    stored = replace(config, flash_attention=False)
    assert layer_activations(stored)["attention scores"] == 2 * 8 * 32 * 32
    assert "attention scores" not in layer_activations(config)


def test_the_whole_model_keeps_what_the_bill_says() -> None:
    model, b = plain.GPT(SMALL).bfloat16(), 3
    ids = torch.randint(SMALL.vocab_size, (b, SMALL.seq_length))
    with saved_for_backward(model) as kept, as_on_a_gpu():
        model(ids, ids)
    numbers = sum(size for shape, dtype, size in kept.pieces if dtype != torch.int64 and shape[-1:] != (1,) and shape)
    assert bill(SMALL, Layout(micro_batch=b)).activations == numbers


@pytest.mark.parametrize(("pp", "m", "v"), [(2, 4, 1), (3, 6, 2), (4, 8, 3), (3, 2, 1)])
def test_micro_batches_in_flight_are_those_of_the_schedule(pp, m, v) -> None:
    config = replace(SMALL, num_layers=24)
    schedule = interleaved(pp, m, v) if v > 1 else one_f_one_b(pp, m)
    played = [
        max(accumulate(1 if action.kind == "F" else -1 for action in row)) for row in schedule.actions
    ]  # chunks whose backward pass hasn't run
    layout = Layout(pp=pp, micro_batches=m, chunks=v)
    assert [micro_batches_in_flight(config, layout, stage) * v for stage in range(pp)] == pytest.approx(played)


# The bill of one GPU


def test_the_bill_of_one_gpu_is_bytes_of_parameters_and_activations() -> None:
    for recipe in (ADAM, Recipe(4, 4, 8)):
        mine, n = bill(SMALL, recipe=recipe), parameter_count(SMALL)
        states = n * recipe.weights, n * recipe.gradients, n * recipe.optimizer
        assert (mine.weights, mine.gradients, mine.optimizer) == states
        assert mine.total == sum(mine.parts().values()) == recipe.total * n + mine.activations
    two = bill(SMALL, Layout(micro_batch=2, dp=8))  # replicas divide nothing
    assert two == replace(bill(SMALL), activations=2 * bill(SMALL).activations)
    assert (Layout(dp=8, tp=2, pp=4, micro_batch=3).gpus, Layout(dp=8, pp=4, micro_batch=3).sequences) == (64, 96)


def test_stages_keep_as_many_micro_batches_as_1f1b_has_in_flight() -> None:
    config = GPTConfig(num_layers=8, hidden_size=16, num_heads=2, vocab_size=20, seq_length=8, dropout=0.0)
    layer = sum(layer_activations(config).values())
    seen = [bill(config, Layout(pp=4, micro_batches=8), stage=stage).activations for stage in range(4)]
    behind = 4 * 8 * 16 + 4 * 8 * 20  # input of the last norm and of the output layer; logits in float32
    assert seen == [4 * 2 * layer, 3 * 2 * layer, 2 * 2 * layer, 2 * layer + behind]
    few = [bill(config, Layout(pp=4, micro_batches=2), stage=stage).activations for stage in range(4)]
    assert few[:3] == [2 * 2 * layer] * 3, "no more are in flight than there are"
    stages = [bill(config, Layout(pp=4), stage=stage) for stage in range(4)]
    assert bill(config, Layout(pp=4)) == max(stages, key=lambda stage: stage.total)


# Errors teach


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: replace(SMALL, hidden_size=25), ["hidden_size=25", "num_heads=4"]),
        (lambda: check_tensor_parallel(PRESETS["GPT-2 1.5B"], 8), ["num_heads=25", "8 ranks", "1, 5, 25"]),
        (lambda: check_tensor_parallel(replace(SMALL, num_heads=12, num_kv_heads=3), 2),
         ["num_kv_heads=3", "2 ranks"]),
        (lambda: layer_activations(replace(SMALL, seq_length=9), tp=2, sequence_parallel=True),
         ["seq_length=9", "tp=2"]),
        (lambda: bill(SMALL, Layout(pp=3)), ["pp=3", "2 layers"]),
        (lambda: bill(SMALL, Layout(pp=2, micro_batches=3, chunks=3), stage=0), ["chunks=3", "pp=2", "num_layers=2"]),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused_with_numbers(call, says) -> None:
    with pytest.raises(ValueError, match=saying(*says)):
        call()


# The meter


def test_memory_that_tensors_share_counts_once() -> None:
    x = torch.zeros(10, 4)
    assert tensor_bytes([x, x[:2], x.T, torch.zeros(3)]) == 160 + 12
    tied = plain.GPT(SMALL)
    assert parameter_bytes(tied) == 4 * parameter_count(SMALL)


def test_kept_tensors_are_each_counted_once_and_without_parameters() -> None:
    layer, x = nn.Linear(4, 5), torch.randn(3, 4, requires_grad=True)
    with saved_for_backward(layer) as kept:
        y = layer(x)
        z = y.exp() * y.exp().sum()
    assert kept.bytes == 4 * (12 + 15 + 15 + 1), "x, both results of exp, the factor"
    with saved_for_backward() as everything:
        layer(x)
    assert everything.bytes == 4 * (12 + 20)
    z.sum().backward()
    assert layer.weight.grad is not None
    with saved_for_backward() as nothing, torch.no_grad():
        layer(x)
    assert nothing.bytes == 0


def test_the_meter_follows_a_training_step() -> None:
    with MemoryMeter() as meter:
        model = nn.Sequential(nn.Linear(20, 30), nn.GELU(), nn.Linear(30, 20))
        optimizer = torch.optim.Adam(model.parameters())
        weights = parameter_bytes(model)
        assert meter.live == weights
        meter.mark("forward")
        loss = model(torch.randn(7, 20)).square().mean()
        inside = meter.live - weights
        meter.mark("backward")
        loss.backward()
        del loss
        assert meter.live == 2 * weights
        optimizer.step()
        assert meter.live == 4 * weights + 4 * 4
        optimizer.zero_grad()
        assert meter.live == 3 * weights + 4 * 4
    assert inside >= 4 * 7 * (20 + 30 + 30), "at least what autograd keeps"
    assert meter.peak == max(meter.curve)
    assert [name for _, name in meter.marks] == ["forward", "backward"]
    assert 0 < meter.marks[0][0] < meter.marks[1][0] < len(meter.curve)


def test_views_of_earlier_tensors_are_no_new_memory_but_literals_are() -> None:
    earlier = torch.zeros(100, requires_grad=True)
    with MemoryMeter() as meter:
        kept = [earlier.view(10, 10).t(), earlier.detach()[5:], torch.tensor([1.0, 2.0]), earlier.double()]
    assert meter.live == tensor_bytes(kept) - tensor_bytes([earlier]) == 2 * 4 + 100 * 8


def test_a_full_device_says_what_was_asked_and_what_is_left() -> None:
    says = saying("400 bytes", "800", "1,000 bytes", "200")
    with MemoryMeter(capacity=1000) as meter:
        kept = torch.zeros(200)
        with pytest.raises(torch.OutOfMemoryError, match=says):
            torch.zeros(100)
    assert meter.live == tensor_bytes([kept]), "what did not fit is gone again"


def test_mixed_precision_keeps_16_bytes_a_parameter() -> None:
    model = plain.GPT(SMALL).bfloat16()
    master = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.Adam(master)
    ids = torch.randint(SMALL.vocab_size, (2, SMALL.seq_length))
    model(ids, ids).backward()
    for copy, parameter in zip(master, model.parameters(), strict=True):
        copy.grad = parameter.grad.float()
    optimizer.step()
    optimizer.zero_grad()
    recipe = ADAM
    averages = optimizer_bytes(optimizer) - 4 * len(master)
    seen = (
        parameter_bytes(model),
        tensor_bytes(parameter.grad for parameter in model.parameters()),
        tensor_bytes(master) + averages,
    )
    assert seen == tuple(size * numel(model) for size in (recipe.weights, recipe.gradients, recipe.optimizer))
    assert recipe.total == 16
