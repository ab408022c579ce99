"""Chapter 00: a single-process GPT in plain PyTorch, for measuring its memory and counting its parameters.

It has the parts of a large model, and supports every option of `GPTConfig` that changes the number of parameters. Its
parts have the names that the chapter uses. On device "meta", it takes no memory at any size. Unlike `tplab.plain`, it
has separate matrices for Q, K and V, so autograd saves each of them under a name of its own, and it saves dropout masks
of one byte per element, as a GPU does.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tplab.memory.config import GPTConfig


def dropout(x: Tensor, p: float = 0.1) -> Tensor:
    """Drop elements as on a GPU, where the mask that is saved for backward takes one byte per element."""
    return torch.native_dropout(x, p, True)[0]


class Layer(nn.Module):
    """A transformer layer that adds attention(norm(x)) to x, and then mlp(norm(x)) to the new x."""

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        h, keys = c.hidden_size, c.kv_heads * c.head_dim
        norm = nn.LayerNorm if c.bias else nn.RMSNorm
        self.head_dim = c.head_dim
        self.attention_norm = norm(h)
        self.q, self.k, self.v = (nn.Linear(h, size, bias=c.bias or c.qkv_bias) for size in (h, keys, keys))
        self.out = nn.Linear(h, h, bias=c.bias)
        self.mlp_norm = norm(h)
        self.up = nn.Linear(h, c.ffn_size, bias=c.bias)
        self.gate = nn.Linear(h, c.ffn_size, bias=c.bias) if c.gated else None
        self.down = nn.Linear(c.ffn_size, h, bias=c.bias)

    def attention(self, x: Tensor) -> Tensor:  # [b, s, h]
        s = x.shape[1]
        q, k, v = (linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        if k.shape[1] < q.shape[1]:  # grouped-query attention: several Q heads share a K and a V head
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        future = torch.full((s, s), -math.inf, dtype=x.dtype, device=x.device).triu(1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim) + future  # [b, a, s, s]
        y = dropout(scores.softmax(-1)) @ v  # [b, a, s, h/a]
        return self.out(y.transpose(1, 2).flatten(2))  # [b, s, h]

    def mlp(self, x: Tensor) -> Tensor:  # [b, s, h]
        y = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return self.down(y)

    def forward(self, x: Tensor) -> Tensor:  # [b, s, h]
        x = x + dropout(self.attention(self.attention_norm(x)))
        return x + dropout(self.mlp(self.mlp_norm(x)))


# What autograd saves in Layer.forward for a model like GPT-2, in the order of saving
SAVED_BY_LAYER = (
    "input of the attention norm",
    "mean of the attention norm",
    "1/std of the attention norm",
    "input of Q, K, and V",
    "K",
    "Q",
    "softmax of the scores",
    "dropout mask of the scores",
    "V",
    "dropped-out scores",
    "input of out",
    "dropout mask after attention",
    "input of the MLP norm",
    "mean of the MLP norm",
    "1/std of the MLP norm",
    "input of up",
    "input of GELU",
    "input of down",
    "dropout mask after the MLP",
)


class GPT(nn.Module):
    """A GPT whose output is the loss, that is, the mean cross-entropy of the next tokens."""

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.positions = nn.Embedding(c.seq_length, c.hidden_size) if c.learned_positions else None
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.norm = (nn.LayerNorm if c.bias else nn.RMSNorm)(c.hidden_size)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        if c.tied_embedding:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:  # [b, s] each
        x = self.embedding(ids)  # [b, s, h]
        if self.positions is not None:
            x = x + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))  # [b, s, v]
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
