"""ParallelTransformerLayer: `tplab.gpt.transformer`, against `tplab.plain.Layer` on one process.

tests/test_plain.py compares the plain layer with torch's own encoder and decoder layers. All programs run in one launch
for each number of ranks, and once without ranks.
"""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.reference import assert_close, random
from tests.tensor.on_ranks import GROUPS, assert_shards, own_group, refusals, traffic
from tplab import launch, record
from tplab.gpt.transformer import ParallelTransformerLayer
from tplab.memory.config import GPTConfig
from tplab.plain import Layer
from tplab.tensor.full_state import load_full_state_dict
from tplab.tensor.rng import seed_all

HIDDEN, HEADS, FFN = 16, 4, 24
BATCH, SEQUENCE, MEMORY = 2, 5, 7

CONFIG = GPTConfig(
    num_layers=1, hidden_size=HIDDEN, num_heads=HEADS, ffn_hidden_size=FFN, vocab_size=1, seq_length=1, dropout=0.0
)
KINDS = {"encoder": {"causal": False}, "causal": {}, "decoder": {"cross_attention": True}}
CUTS = {"qkv": (0, 3), "q": (0, 1), "kv": (0, 2), "up": (0, 1), "out": (1, 1), "down": (1, 1)}  # dimension, blocks


def cuts(kind):
    """How each parameter is cut over ranks: {name: (dimension, blocks)}, (None, 1) for one that every rank holds."""
    found = {}
    for name in plain_layer(kind).state_dict():
        module, end = name.split(".")[-2:]
        dim, blocks = CUTS.get(module, (None, 1))
        found[name] = (None, 1) if (dim, end) == (1, "bias") else (dim, blocks)
    return found


@cache
def plain_layer(kind, key="", dropout=0.0, **options):
    """A plain layer with random weights, which nobody may change. Another key gives other weights."""
    layer = Layer(replace(CONFIG, dropout=dropout), **KINDS[kind], **options, dtype=torch.float64)
    layer.load_state_dict({name: random(tuple(t.shape), key, name) / 2 for name, t in layer.state_dict().items()})
    return layer


def inputs(kind, sequence=SEQUENCE, memory_tokens=MEMORY):
    x, dy = (random((BATCH, sequence, HIDDEN), name) for name in ("x", "dy"))
    memory = random((BATCH, memory_tokens, HIDDEN), "memory") if kind == "decoder" else None
    keys = memory_tokens if kind == "decoder" else sequence
    padding = torch.arange(keys) >= torch.tensor([[keys], [keys - 2]])
    return x, memory, padding, dy


def run_plain(kind, *sizes):
    """Output and all gradients of the plain layer."""
    return run_layer(copy.deepcopy(plain_layer(kind)), kind, *sizes)[0]


def make(kind, group=None, dtype=torch.float64, **options):
    layer = ParallelTransformerLayer(
        HIDDEN, HEADS, None, FFN, causal=kind != "encoder", cross_attention=kind == "decoder", group=group, dtype=dtype,
        **options,
    )  # fmt: skip
    load_full_state_dict(layer, plain_layer(kind).state_dict(), group)
    return layer


def run_layer(layer, kind, *sizes, part=lambda whole: whole):
    """Output, all gradients, and the traffic. part: what a rank is given of x, memory and dy."""
    x, memory, padding, dy = inputs(kind, *sizes)
    leaves = {"x": part(x).requires_grad_()} | ({} if memory is None else {"memory": part(memory).requires_grad_()})
    masks = {"decoder": {"memory_padding_mask": padding}, "encoder": {"key_padding_mask": padding}, "causal": {}}
    with record() as forward:
        out = layer(*leaves.values(), **masks[kind])
    with record() as backward:
        out.backward(part(dy))
    leaves |= dict(layer.named_parameters())
    gradients = {f"d{name}": leaf.grad.clone() for name, leaf in leaves.items()}
    return {"out": out.detach(), **gradients}, traffic(forward, backward)


# Programs


def _alike(group=None):
    return {kind: run_layer(make(kind, group), kind) for kind in KINDS}


def post_norm_layers():
    return [copy.deepcopy(plain_layer("encoder", number, post_norm=True)) for number in range(2)]


def run_stack(layers):
    x, _, _, dy = inputs("encoder")
    x.requires_grad_()
    out = layers[1](layers[0](x))
    out.backward(dy)
    gradients = [{name: p.grad for name, p in layer.named_parameters()} for layer in layers]
    return {"out": out.detach(), "dx": x.grad}, gradients


def _post_norm():
    options = {"apply_residual_connection_post_layernorm": True, "causal": False, "dtype": torch.float64}
    layers = [ParallelTransformerLayer(HIDDEN, HEADS, None, FFN, **options) for _ in range(2)]
    for layer, plain in zip(layers, post_norm_layers(), strict=True):
        load_full_state_dict(layer, plain.state_dict())
    return run_stack(layers)


def with_dropout(layer, **options):
    """Two outputs while training, the gradient of both, and an output in evaluation."""
    x, memory, _, _ = inputs("decoder")
    x.requires_grad_()
    outs = [layer(x, memory, **options) for _ in range(2)]
    sum(out.square().sum() for out in outs).backward()
    return [*(out.detach() for out in outs), x.grad, layer.eval()(x, memory, **options).detach()]


def _dropped():
    rng, layer = seed_all(3), make("decoder", hidden_dropout=0.4)
    before = torch.get_rng_state()
    found = with_dropout(layer, rng=rng)
    assert torch.equal(torch.get_rng_state(), before), "torch's current state has moved"
    return found


@torch.no_grad()
def _step_by_step():
    """A decoder's text in parts, with the memory each time and with the first part alone; heads, calls."""
    layer = make("decoder").eval()
    x, memory, padding, _ = inputs("decoder")
    cache = layer.new_cache(BATCH, SEQUENCE, MEMORY)
    parts = [layer(x[:, :2], memory, cache=cache, memory_padding_mask=padding)]
    for i in range(2, SEQUENCE):
        parts.append(layer(x[:, i : i + 1], memory, cache=cache, memory_padding_mask=padding))
    again = layer.new_cache(BATCH, SEQUENCE, MEMORY)
    with record() as section:
        twice = [layer(x[:, :2], memory, cache=again, memory_padding_mask=padding)]
        twice.append(layer(x[:, 2:], cache=again, memory_padding_mask=padding))
    heads = [kept.keys.shape[1] for kept in (cache.text, cache.memory)]
    return torch.cat(parts, 1), torch.cat(twice, 1), heads, len(section)


def _in_bfloat16(residual_dtype):
    torch.manual_seed(0)
    layers = [ParallelTransformerLayer(HIDDEN, HEADS, None, FFN, causal=False, dtype=torch.bfloat16) for _ in range(3)]
    exact = [copy.deepcopy(layer).double() for layer in layers]
    x = random((BATCH, SEQUENCE, HIDDEN), "x") * 100  # small additions to large numbers: bfloat16 loses them
    low, high = x.to(torch.bfloat16).to(residual_dtype), x.to(torch.bfloat16).double()
    for layer, twin in zip(layers, exact, strict=True):
        low, high = layer(low), twin(high)
    low.float().sum().backward()
    return low.dtype, ((low.double() - high).norm() / high.norm()).item(), layers[0].mlp.up.weight.grad.dtype


def _everything():
    return {
        "alike": _alike(),
        "post-norm": _post_norm(),
        "dropped": _dropped(),
        "cached": _step_by_step(),
        "residual": [_in_bfloat16(dtype) for dtype in (torch.bfloat16, torch.float32)],
        "in groups": _alike(own_group()) if dist.is_initialized() and dist.get_world_size() == 4 else None,
    }


@pytest.fixture(scope="module", params=[0, 2, 4], ids=["no process group", "2 ranks", "4 ranks"])
def ran(request):
    return launch(_everything, request.param, timeout=240) if request.param else [_everything()]


# What they show


def assert_like_plain_layers(results):
    text, memory = (("all_reduce", "sum", 8 * BATCH * length * HIDDEN) for length in (SEQUENCE, MEMORY))
    for kind in KINDS:
        assert_shards([result[kind][0] for result in results], run_plain(kind), cuts(kind))
        forward = [text] * (3 if kind == "decoder" else 2)
        backward = sorted([*forward, memory] if kind == "decoder" else forward)
        for sent in (result[kind][1] for result in results):
            assert [sent[0], sorted(sent[1])] == ([forward, backward] if len(results) > 1 else [[], []])


def test_outputs_all_gradients_and_traffic_are_those_of_the_plain_layer_also_in_groups(ran):
    assert_like_plain_layers([result["alike"] for result in ran])
    for members in GROUPS if len(ran) == 4 else ():
        assert_like_plain_layers([ran[rank]["in groups"] for rank in members])


def test_with_post_layernorm_two_layers_equal_two_plain_ones(ran):
    expected, gradients = run_stack(post_norm_layers())
    assert_shards([result["post-norm"][0] for result in ran], expected, {})
    for number, whole in enumerate(gradients):
        assert_shards([result["post-norm"][1][number] for result in ran], whole, cuts("encoder"))


def test_what_a_block_adds_is_dropped_as_in_the_plain_layer_alike_on_every_rank(ran):
    """The plain layer drops behind its blocks alone, with the seed of the state "replicated"."""
    layer = copy.deepcopy(plain_layer("decoder", dropout=0.4)).train()
    layer.attention.dropout = layer.cross_attention.dropout = 0.0
    torch.manual_seed(3 + 1359)
    expected = with_dropout(layer)
    assert not torch.equal(expected[0], expected[1])  # a second call draws another mask
    for result in ran:
        for found, wanted in zip(result["dropped"], expected, strict=True):
            assert_close(found, wanted)


def test_token_by_token_with_a_cache_gives_what_the_whole_text_gives(ran):
    """The memory is read once. With a cache, a rank keeps its own heads."""
    for result in ran:
        *outs, heads, calls = result["cached"]
        for out in outs:
            assert_close(out, run_plain("decoder")["out"])
        assert heads == [HEADS // len(ran)] * 2
        assert calls == (2 * 3 if len(ran) > 1 else 0)


def test_a_residual_in_float32_stays_there_and_is_nearer_to_the_truth(ran):
    for (coarse, error, _), (fine, smaller_error, of_weights) in (result["residual"] for result in ran):
        assert (coarse, fine, of_weights) == (torch.bfloat16, torch.float32, torch.bfloat16)
        assert smaller_error < error / 4


# Options and misuse


@pytest.mark.parametrize(("norm", "plain", "bias"), [("layer", nn.LayerNorm, True), ("rms", nn.RMSNorm, False)])
def test_a_norm_computes_in_the_dtype_of_the_residual_not_of_its_weight(norm, plain, bias):
    layer = ParallelTransformerLayer(HIDDEN, HEADS, norm=norm, norm_eps=1e-3, bias=bias, dtype=torch.bfloat16)
    assert bias or not [name for name, _ in layer.named_parameters() if name.endswith("bias")]
    x, right = random((BATCH, SEQUENCE, HIDDEN), "x").float(), plain(HIDDEN, eps=1e-3)
    right.weight.data = random((HIDDEN,), "norm").bfloat16().float()
    layer.mlp_norm.weight.data = right.weight.data.bfloat16()
    normed = layer.mlp_norm(x).detach()
    assert normed.dtype == torch.float32
    assert_close(normed, right(x).detach(), 1e-6)


def test_options_reach_the_second_attention_too():
    """tests/gpt/test_model.py looks at those that a GPT sets."""
    layer = ParallelTransformerLayer(
        HIDDEN, HEADS, 2, FFN, cross_attention=True, norm_eps=1e-3, attention_dropout=0.3, per_rank_init=True,
        async_grad_allreduce=True, init_method=lambda w: nn.init.constant_(w, 1.0),
        output_init_method=lambda w: nn.init.constant_(w, 2.0),
    )  # fmt: skip
    cross = layer.cross_attention
    assert (layer.cross_norm.eps, cross.dropout, cross.num_kv_heads) == (1e-3, 0.3, 2)
    for reader in (cross.q, cross.kv):
        assert bool((reader.weight == 1).all())
        assert (reader.async_grad_allreduce, reader.per_rank_init) == (True, True)
    assert bool((cross.out.weight == 2).all())


@torch.no_grad()
def test_masks_and_positions_reach_attention():
    x = inputs("encoder")[0]
    mask = nn.Transformer.generate_square_subsequent_mask(SEQUENCE, dtype=torch.float64)
    assert_close(make("encoder")(x, attn_mask=mask), make("causal")(x))
    rotary = make("causal", rotary_base=50.0)
    assert_close(rotary(x, positions=torch.arange(SEQUENCE)), rotary(x))
    assert (rotary(x, positions=2 * torch.arange(SEQUENCE)) - rotary(x)).abs().max() > 1e-3


def test_what_does_not_fit_is_refused_with_what_does():
    x, reader = torch.zeros(1, 2, HIDDEN), ParallelTransformerLayer(HIDDEN, HEADS, cross_attention=True)
    refused = {
        "'layer', 'rms'": lambda: ParallelTransformerLayer(HIDDEN, HEADS, norm="batch"),
        "hidden_dropout=1.0": lambda: ParallelTransformerLayer(HIDDEN, HEADS, hidden_dropout=1.0),
        "cross_attention=True": lambda: ParallelTransformerLayer(HIDDEN, HEADS)(x, x),
        "needs its memory": lambda: reader(x),
        "cross-attention needs its memory": lambda: reader(x, cache=reader.new_cache(1, 4, 4)),
    }
    for words, message in zip(refused, refusals(*refused.values()), strict=True):
        assert words in message
