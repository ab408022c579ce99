"""`tplab.plain`, which the parallel layers are compared with, against PyTorch's own layers and transformers."""

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
BATCH, SEQUENCE, MEMORY = 2, 6, 7
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


def inputs(memory_tokens: int = MEMORY) -> tuple[torch.Tensor, ...]:
    """x, a memory, the gradient of the output, and the mask of causal attention."""
    shapes = {"x": (BATCH, SEQUENCE, HIDDEN), "memory": (BATCH, memory_tokens, HIDDEN), "dy": (BATCH, SEQUENCE, HIDDEN)}
    x, memory, dy = (random(shape, name) for name, shape in shapes.items())
    causal = torch.full((SEQUENCE, SEQUENCE), -torch.inf, dtype=torch.float64).triu(1)
    return x.requires_grad_(), memory.requires_grad_(), dy, causal


def padding(keys: int) -> torch.Tensor:
    return torch.arange(keys) >= torch.tensor([[keys], [keys - 2]])


def parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.new_zeros(p.shape) if p.grad is None else p.grad for name, p in module.named_parameters()}


def assert_same(ours: dict, theirs: dict) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert_close(ours[name], tensor)


# Attention


def test_cross_attention_with_padding_equals_torchs():
    theirs = filled(nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True))
    attention = plain.Attention(HIDDEN, HEADS, attention_type="cross", dtype=torch.float64)
    for end in ("weight", "bias"):
        q, kv = getattr(theirs, f"in_proj_{end}").detach().split([HIDDEN, 2 * HIDDEN])
        attention.load_state_dict({f"q.{end}": q, f"kv.{end}": kv}, strict=False)
    attention.out.load_state_dict(theirs.out_proj.state_dict())
    outcomes = []
    for call in (
        lambda x, memory: theirs(x, memory, memory, padding(MEMORY), need_weights=False)[0],
        lambda x, memory: attention(x, memory, key_padding_mask=padding(MEMORY)),
    ):
        x, memory, dy, _ = inputs()
        out = call(x, memory)
        out.backward(dy)
        outcomes.append({"out": out.detach(), "dx": x.grad, "dmemory": memory.grad})
    assert_same(outcomes[1], outcomes[0])


# Layers: ours -> theirs, and which thirds of theirs it has

SELF = {
    "attention.qkv.{}": ("self_attn.in_proj_{}", (0, 3)),
    "attention.out.{}": ("self_attn.out_proj.{}", None),
    "mlp.up.{}": ("linear1.{}", None),
    "mlp.down.{}": ("linear2.{}", None),
    "attention_norm.{}": ("norm1.{}", None),
}
ENCODER = SELF | {"mlp_norm.{}": ("norm2.{}", None)}
DECODER = SELF | {
    "cross_norm.{}": ("norm2.{}", None),
    "cross_attention.q.{}": ("multihead_attn.in_proj_{}", (0, 1)),
    "cross_attention.kv.{}": ("multihead_attn.in_proj_{}", (1, 3)),
    "cross_attention.out.{}": ("multihead_attn.out_proj.{}", None),
    "mlp_norm.{}": ("norm3.{}", None),
}


def named_as_ours(theirs: dict, names: dict = ENCODER) -> dict:
    found = {}
    for our_name, (their_name, thirds) in names.items():
        for end in ("weight", "bias"):
            whole = theirs[their_name.format(end)]
            found[our_name.format(end)] = whole if thirds is None else torch.cat(whole.chunk(3)[slice(*thirds)])
    return found


def torchs_layer(kind: str, norm_first: bool = True) -> nn.Module:
    layer_class = nn.TransformerDecoderLayer if kind == "decoder" else nn.TransformerEncoderLayer
    return filled(layer_class(HIDDEN, HEADS, FFN, 0.0, F.gelu, batch_first=True, norm_first=norm_first))


LAYERS = {
    "encoder": (
        {"causal": False},
        lambda layer, x, memory, causal: layer(x, src_key_padding_mask=padding(SEQUENCE)),
        lambda layer, x, memory: layer(x, key_padding_mask=padding(SEQUENCE)),
    ),
    "decoder": (
        {"cross_attention": True},
        lambda layer, x, memory, causal: layer(x, memory, causal, memory_key_padding_mask=padding(MEMORY)),
        lambda layer, x, memory: layer(x, memory, memory_padding_mask=padding(MEMORY)),
    ),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_equals_torchs(kind):
    options, run_theirs, run_ours = LAYERS[kind]
    names = DECODER if kind == "decoder" else ENCODER
    theirs, ours = torchs_layer(kind), plain.Layer(CONFIG, **options, dtype=torch.float64)
    ours.load_state_dict(named_as_ours(parameters(theirs), names))
    outcomes = []
    for call in (
        lambda x, memory, causal: run_theirs(theirs, x, memory, causal),
        lambda *given: run_ours(ours, *given[:2]),
    ):
        x, memory, dy, causal = inputs()
        out = call(x, memory, causal)
        out.backward(dy)
        outcomes.append({"out": out.detach(), "dx": x.grad} | ({"dmemory": memory.grad} if kind == "decoder" else {}))
    assert_same({**outcomes[1], **gradients(ours)}, {**outcomes[0], **named_as_ours(gradients(theirs), names)})


def test_post_norm_is_torchs_norm_last_layer_with_its_norms_moved_on_by_one():
    """Theirs end with a norm: ours begin with the one of the layer before, and the last norm is left out."""
    theirs = [torchs_layer("encoder", norm_first=False) for _ in range(2)]
    first = filled(nn.LayerNorm(HIDDEN))  # the norm of the embedding
    x, _, dy, _ = inputs()
    middle = theirs[0](first(x))
    y = theirs[1].norm1(middle + theirs[1].self_attn(middle, middle, middle, need_weights=False)[0])
    expected = y + theirs[1].linear2(F.gelu(theirs[1].linear1(y)))
    expected.backward(dy)

    norms = [first, theirs[0].norm1, theirs[0].norm2, theirs[1].norm1]
    ours = [plain.Layer(CONFIG, causal=False, post_norm=True, dtype=torch.float64) for _ in range(2)]
    leaf = inputs()[0]
    for number, layer in enumerate(ours):
        layer.load_state_dict(named_as_ours(parameters(theirs[number])))
        layer.attention_norm.load_state_dict(norms[2 * number].state_dict())
        layer.mlp_norm.load_state_dict(norms[2 * number + 1].state_dict())
    out = ours[1](ours[0](leaf))
    out.backward(dy)
    assert_close(out.detach(), expected.detach())
    assert_close(leaf.grad, x.grad)
    for number, layer in enumerate(ours):
        wanted = named_as_ours(gradients(theirs[number]))
        for place, name in enumerate(("attention_norm", "mlp_norm")):
            wanted |= {f"{name}.{end}": gradient for end, gradient in gradients(norms[2 * number + place]).items()}
        assert_same(gradients(layer), wanted)


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


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, activation="gelu_tanh", norm_eps=0.1), LLAMA])
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
