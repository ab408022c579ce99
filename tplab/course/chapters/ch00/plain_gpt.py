"""A GPT in plain torch, as one of p ranks holds it: what the checks of this chapter count and run.

Built on device "meta", where tensors have shapes but no memory, so that any size costs nothing.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tplab.memory.config import GPTConfig
from tplab.memory.meter import saved_for_backward


class PlainLayer(nn.Module):
    """One layer: whole heads and an equal part of the MLP for each of p ranks; the norms are whole."""

    def __init__(self, c: GPTConfig, p: int = 1) -> None:
        super().__init__()
        h, mine, keys, inner = c.hidden_size, c.hidden_size // p, c.kv_heads * c.head_dim // p, c.ffn_size // p
        self.head_dim = c.head_dim
        norm = nn.LayerNorm if c.bias else nn.RMSNorm
        self.attention_norm, self.mlp_norm = norm(h), norm(h)
        self.q, self.k, self.v = (nn.Linear(h, size, bias=c.bias) for size in (mine, keys, keys))
        self.out = nn.Linear(mine, h, bias=c.bias)
        self.up, self.down = nn.Linear(h, inner, bias=c.bias), nn.Linear(inner, h, bias=c.bias)
        if c.gated:
            self.gate = nn.Linear(h, inner, bias=c.bias)

    def forward(self, x: Tensor) -> Tensor:  # [b, s, h]; for models without a gate and with all K and V heads
        y = self.attention_norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)).softmax(-1)  # [b, a/p, s, s]
        heads = (_dropout(scores) @ v).transpose(1, 2).flatten(2)  # [b, s, h/p]
        x = x + _dropout(self.out(heads))
        return x + _dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))


class PlainGPT(nn.Module):
    """The whole model, or what one of p tensor-parallel ranks holds of it; the vocabulary is padded."""

    def __init__(self, c: GPTConfig, p: int = 1) -> None:
        super().__init__()
        rows = math.ceil(c.vocab_size / p)
        self.embedding = nn.Embedding(rows, c.hidden_size)
        if c.learned_positions:
            self.positions = nn.Embedding(c.seq_length, c.hidden_size)
        self.layers = nn.ModuleList(PlainLayer(c, p) for _ in range(c.num_layers))
        self.norm = (nn.LayerNorm if c.bias else nn.RMSNorm)(c.hidden_size)
        if not c.tied_embedding:
            self.head = nn.Linear(c.hidden_size, rows, bias=False)


def plain_gpt(config: GPTConfig, p: int = 1) -> PlainGPT:
    with torch.device("meta"):
        return PlainGPT(config, p)


def count(module: nn.Module, *words: str) -> int:
    """Parameters of the module, or only those whose name has one of the words in it."""
    named = module.named_parameters()
    return sum(parameter.numel() for name, parameter in named if not words or any(word in name for word in words))


def kept_by_layer(config: GPTConfig, p: int, batch: int) -> int:
    """Bytes that autograd keeps of one layer on one of p ranks, in 16-bit numbers, without the norms' statistics."""
    with torch.device("meta"):
        layer = PlainLayer(config, p).to(torch.bfloat16)
        x = torch.empty(batch, config.seq_length, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        with saved_for_backward(layer) as kept:
            layer(x)
    return sum(size for shape, _, size in kept.pieces if shape != (batch, config.seq_length, 1))


def _dropout(x: Tensor) -> Tensor:
    return torch.native_dropout(x, 0.1, True)[0]
