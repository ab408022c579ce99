"""ParallelTransformerLayer: `tplab.gpt.transformer`, against `tplab.plain.Layer` on one process.

tests/test_plain.py compares the plain layer with torch's own encoder and decoder layers. tests/gpu/test_on_the_cpu.py
has other dtypes, and the scores that are computed again in backward, with dropout.
"""

import copy

import torch
from torch import nn

from tests.gpt.twins import BATCH, FFN, HEADS, HIDDEN, KINDS, layer_batches, parallel_layer, plain_layer
from tests.reference import assert_close, random
from tests.tensor.on_ranks import assert_trains_like, everywhere
from tplab.collectives.by_hand import rank_and_size
from tplab.gpt.transformer import ParallelTransformerLayer
from tplab.tensor.full_state import load_full_state_dict
from tplab.tensor.rng import seed_all

SEQUENCE, MEMORY = 5, 7


# Programs


def _train(group):
    text, memory = (("all_reduce", "sum", 8 * BATCH * length * HIDDEN) for length in (SEQUENCE, MEMORY))
    for kind in KINDS:
        sent = assert_trains_like(
            plain_layer(kind), parallel_layer(kind, group), layer_batches(kind, SEQUENCE, MEMORY), group, lr=0.1
        )
        forward = [text] * (3 if kind == "decoder" else 2)
        backward = sorted([*forward, memory] if kind == "decoder" else forward)
        assert [sent[0], sorted(sent[1])] == ([forward, backward] if rank_and_size(group)[1] > 1 else [[], []])
    twin = nn.Sequential(*(plain_layer("encoder", number, post_norm=True) for number in range(2)))
    post_norm = {"apply_residual_connection_post_layernorm": True}
    model = nn.Sequential(*(parallel_layer("encoder", group, **post_norm) for _ in range(2)))
    assert_trains_like(twin, model, layer_batches("causal", SEQUENCE), group, lr=0.1)


def dropped_by(layer, **options):
    """Two outputs while training, the gradient of both, and an output in evaluation."""
    (given, _), _ = layer_batches("decoder", SEQUENCE, MEMORY)
    x = given["x"].requires_grad_()
    outs = [layer(x, given["memory"], **options) for _ in range(2)]
    sum(out.square().sum() for out in outs).backward()
    return [*(out.detach() for out in outs), x.grad, layer.eval()(x, given["memory"], **options).detach()]


def _drop(group):
    """What a block adds is dropped as in the plain layer, alike on every rank, with the seed of "replicated"."""
    plain = plain_layer("decoder", dropout=0.4)
    rng, layer = seed_all(3, group), parallel_layer("decoder", group, hidden_dropout=0.4)
    load_full_state_dict(layer, plain.state_dict(), group)
    before = torch.get_rng_state()
    found = dropped_by(layer, rng=rng)
    assert torch.equal(torch.get_rng_state(), before), "torch's current state has moved"
    plain.attention.dropout = plain.cross_attention.dropout = 0.0
    torch.manual_seed(3 + 1359)
    expected = dropped_by(plain)
    assert not torch.equal(expected[0], expected[1]), "a second call draws another mask"
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)


def _keep_the_residual_in_float32(group):
    """In a bfloat16 layer, a residual in float32 stays there and is nearer to the truth."""
    errors = []
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        layers = [parallel_layer("encoder", group, torch.bfloat16) for _ in range(3)]
        exact = [copy.deepcopy(layer).double() for layer in layers]
        x = random((BATCH, SEQUENCE, HIDDEN), "x") * 100  # small additions to large numbers: bfloat16 loses them
        low, high = x.to(torch.bfloat16).to(dtype), x.to(torch.bfloat16).double()
        for layer, twin in zip(layers, exact, strict=True):
            low, high = layer(low), twin(high)
        low.float().sum().backward()
        assert (low.dtype, layers[0].mlp.up.weight.grad.dtype) == (dtype, torch.bfloat16)
        errors.append((low.double() - high).norm() / high.norm())
    assert errors[1] < errors[0] / 4


def _everything(group):
    for program in (_train, _drop, _keep_the_residual_in_float32):
        program(group)


def test_outputs_gradients_steps_traffic_and_dropout_are_those_of_the_plain_layer():
    everywhere(_everything)


def test_norms_compute_in_the_dtype_of_the_residual_not_of_their_weights():
    x = random((BATCH, HIDDEN), "x").float()
    for norm, plain in (("layer", nn.LayerNorm), ("rms", nn.RMSNorm)):
        layer = ParallelTransformerLayer(HIDDEN, HEADS, norm=norm, dtype=torch.bfloat16)
        assert_close(layer.mlp_norm(x).detach(), plain(HIDDEN, eps=1e-5)(x).detach(), 1e-6)


def test_options_reach_the_second_attention_too():
    """tests/gpt/test_model.py looks at those that a GPT sets."""
    layer = ParallelTransformerLayer(
        HIDDEN, HEADS, 2, FFN, cross_attention=True, norm_eps=1e-3, attention_dropout=0.3, async_grad_allreduce=True,
        init_method=lambda w: nn.init.constant_(w, 1.0), output_init_method=lambda w: nn.init.constant_(w, 2.0),
    )  # fmt: skip
    cross = layer.cross_attention
    assert (layer.cross_norm.eps, cross.dropout, cross.num_kv_heads) == (1e-3, 0.3, 2)
    for reader in (cross.q, cross.kv):
        assert bool((reader.weight == 1).all())
        assert reader.async_grad_allreduce
    assert bool((cross.out.weight == 2).all())
