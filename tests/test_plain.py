"""`tplab.plain`, which the parallel layers are compared with, against PyTorch's decoder layer and transformers."""

import copy
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.gpt.random_models import hugging_face, tokens
from tests.reference import assert_close, random
from tplab import plain
from tplab.gpt.hugging_face import from_hugging_face
from tplab.gpt.hugging_face_config import gpt_config
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig
from tplab.tensor.full_state import full_state_dict

HIDDEN, HEADS, FFN = 16, 4, 24
SEQUENCE, MEMORY = 6, 7
CONFIG = GPTConfig(
    num_layers=2, hidden_size=HIDDEN, num_heads=HEADS, ffn_hidden_size=FFN, vocab_size=37, seq_length=12, dropout=0.0
)
LLAMA = replace(
    CONFIG, num_kv_heads=2, gated=True, bias=False, qkv_bias=True, tied_embedding=False, learned_positions=False
)


def filled(module: nn.Module) -> nn.Module:
    """The module in float64, with random weights that depend on their names alone."""
    module.double().train()
    module.load_state_dict({name: random(tuple(t.shape), name) / 2 for name, t in module.state_dict().items()})
    return module


def parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.new_zeros(p.shape) if p.grad is None else p.grad for name, p in module.named_parameters()}


def assert_same(ours: dict, theirs: dict) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert_close(ours[name], tensor)


# A layer

NAMES = {  # ours: theirs, and which of its thirds
    "attention_norm": ("norm1.", 0, 3),
    "attention.qkv": ("self_attn.in_proj_", 0, 3),
    "attention.out": ("self_attn.out_proj.", 0, 3),
    "cross_norm": ("norm2.", 0, 3),
    "cross_attention.q": ("multihead_attn.in_proj_", 0, 1),
    "cross_attention.kv": ("multihead_attn.in_proj_", 1, 3),
    "cross_attention.out": ("multihead_attn.out_proj.", 0, 3),
    "mlp_norm": ("norm3.", 0, 3),
    "mlp.up": ("linear1.", 0, 3),
    "mlp.down": ("linear2.", 0, 3),
}


def named_as_ours(theirs: dict) -> dict:
    return {
        f"{name}.{end}": torch.cat(theirs[their_name + end].chunk(3)[first:last])
        for name, (their_name, first, last) in NAMES.items()
        for end in ("weight", "bias")
    }


def test_a_layer_with_cross_attention_and_padding_equals_torchs():
    theirs = filled(nn.TransformerDecoderLayer(HIDDEN, HEADS, FFN, 0.0, F.gelu, batch_first=True, norm_first=True))
    ours = plain.Layer(CONFIG, cross_attention=True, dtype=torch.float64)
    ours.load_state_dict(named_as_ours(parameters(theirs)))
    later = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    padding, memory_padding = (torch.arange(keys) >= torch.tensor([[keys], [keys - 2]]) for keys in (SEQUENCE, MEMORY))
    outcomes = []
    for run in (
        lambda x, memory: theirs(x, memory, later, None, padding, memory_padding),
        lambda x, memory: ours(x, memory, key_padding_mask=padding, memory_padding_mask=memory_padding),
    ):
        x, memory = (random((2, tokens, HIDDEN), tokens).requires_grad_() for tokens in (SEQUENCE, MEMORY))
        out = run(x, memory)
        out.backward(random((2, SEQUENCE, HIDDEN), "dy"))
        outcomes.append({"out": out.detach(), "dx": x.grad, "dmemory": memory.grad})
    assert_same({**outcomes[1], **gradients(ours)}, {**outcomes[0], **named_as_ours(gradients(theirs))})


def test_a_residual_of_post_norm_is_what_the_norm_returned():
    layer, x = filled(plain.Layer(CONFIG, causal=False, post_norm=True)), random((2, SEQUENCE, HIDDEN))
    y = layer.attention_norm(x)
    y = layer.mlp_norm(y + layer.attention(y))
    assert_close(layer(x).detach(), (y + layer.mlp(y)).detach())


# A GPT


@pytest.mark.parametrize("kind", ["gpt2", "llama 3.1", "qwen2", "mistral"])
def test_logits_loss_and_gradients_of_a_gpt_equal_those_of_transformers(kind):
    theirs = copy.deepcopy(hugging_face(kind))
    config = gpt_config(theirs.config.to_dict())
    model = plain.GPT(config, dtype=torch.float64)
    model.load_state_dict(from_hugging_face(parameters(theirs), config))
    ids, targets = tokens()
    targets[0, 2] = -100
    logits = theirs(ids).logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    assert_close(model(ids).detach(), logits.detach())
    ours = model(ids, targets)
    ours.backward()
    assert_close(ours.detach(), loss.detach())
    assert_same(gradients(model), from_hugging_face(gradients(theirs), config))


@pytest.mark.parametrize("config", [CONFIG, LLAMA])
def test_the_fused_kernel_gives_the_same_and_the_parallel_gpt_accepts_the_same_weights(config):
    model, fused = (filled(plain.GPT(replace(config, flash_attention=flash))) for flash in (False, True))
    parallel = ParallelGPT(config, dtype=torch.float64)
    assert {n: t.shape for n, t in full_state_dict(parallel).items()} == {
        n: t.shape for n, t in model.state_dict().items()
    }
    ids = torch.arange(24).view(2, 12)
    model(ids, ids).backward()
    with mock.patch.object(torch.Tensor, "softmax", side_effect=AssertionError):  # the other way takes it
        fused(ids, ids).backward()
    assert_same(gradients(fused), gradients(model))


def test_everything_that_config_dropout_names_is_dropped_in_training_alone():
    model = filled(plain.GPT(replace(CONFIG, dropout=0.25)))
    ids, rates = torch.arange(24).view(2, 12), []

    def drop(x, p, training=True):
        rates.append((tuple(x.shape), p if training else 0.0))
        return x

    with mock.patch.object(F, "dropout", drop):
        model(ids)
        model.eval()(ids)
    block, scores = (2, 12, HIDDEN), (2, HEADS, 12, 12)
    shapes = [block, *[scores, block, block] * 2]
    assert rates == [(shape, rate) for rate in (0.25, 0.0) for shape in shapes]


def test_the_loss_of_bfloat16_logits_is_computed_in_float32():
    model = plain.GPT(CONFIG).bfloat16()
    ids = torch.arange(24).view(2, 12)
    assert model(ids, ids).dtype == torch.float32
    assert model(ids).dtype == torch.bfloat16
