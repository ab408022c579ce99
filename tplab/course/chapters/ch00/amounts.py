"""Helpers for this chapter's checks: a GPT in plain PyTorch to count, and a comparison with the counted numbers.

The model is one rank's share when there are p ranks. It's built on device "meta", where tensors have shapes but no
memory, so any size is free.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tplab.course.checks import CheckFailed, current
from tplab.memory.config import GPTConfig
from tplab.memory.meter import saved_for_backward

Suspect = tuple[float, str]  # the number that a known mistake gives, rounded, and the question to ask then
MOST_QUESTIONS = 2  # asked at most, if several mistakes give the same number


class PlainLayer(nn.Module):
    """One rank's share of a layer on p ranks: full heads and an equal share of the MLP. The norms are replicated."""

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
    """The full model, or one rank's share of it on p tensor-parallel ranks. The vocabulary is padded."""

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
    """Count the module's parameters, or only those whose name contains one of the words."""
    named = module.named_parameters()
    return sum(parameter.numel() for name, parameter in named if not words or any(word in name for word in words))


def kept_by_layer(config: GPTConfig, p: int, batch: int) -> int:
    """Return the bytes autograd saves for one rank's share of a layer, in 16-bit elements, without norm statistics."""
    with torch.device("meta"):
        layer = PlainLayer(config, p).to(torch.bfloat16)
        x = torch.empty(batch, config.seq_length, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        with saved_for_backward(layer) as kept:
            layer(x)
    return sum(size for shape, _, size in kept.pieces if shape != (batch, config.seq_length, 1))


def _dropout(x: Tensor) -> Tensor:
    return torch.native_dropout(x, 0.1, True)[0]


def expect(
    number: str,
    call: str,
    name: str,
    seen: Any,
    right: int,
    suspects: Sequence[Suspect],
    otherwise: str,
    where: str = "",
) -> None:
    """Raise CheckFailed unless `seen` is the number `right`. If suspects explain `seen`, asks their questions.

    call:      how the function was called; name: what it returns; where: anything else the learner should know
    otherwise: the question to ask if no suspect explains the number
    """
    is_number = isinstance(seen, (int, float)) and not isinstance(seen, bool)
    if is_number and abs(seen - right) <= 1e-9 * right:
        current().compared[name] = None
        return
    if not is_number:
        got, ask = f"got {_described(seen)}, not a number", f"{call} should return one whole number. What does yours?"
    else:
        got = f"got {_written(seen)}, right is {right:,}: {_written(abs(seen - right))} too {_much(seen, right)}"
        close = [question for value, question in suspects if abs(seen - value) < 1 and bool(seen) == bool(value)]
        ask = " Or: ".join(list(dict.fromkeys(close))[:MOST_QUESTIONS]) or otherwise
    raise CheckFailed(f"Exercise {number}: {call} is wrong.", rows=[(name, "", got)], report=where, question=ask)


def spelled(config: GPTConfig) -> str:
    """Write a configuration as a call, with its sizes and every option that differs from a GPT-2."""
    sizes = ("num_layers", "hidden_size", "num_heads", "vocab_size", "seq_length", "num_kv_heads", "ffn_hidden_size")
    parts = [f"{name}={value}" for name in sizes if (value := getattr(config, name)) is not None]
    parts += ["gated=True"] * config.gated
    parts += [f"{name}=False" for name in ("bias", "learned_positions", "tied_embedding") if not getattr(config, name)]
    return f"GPTConfig({', '.join(parts)})"


def pick(generator: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, (), generator=generator))


def _much(seen: float, right: int) -> str:
    return "many" if seen > right else "few"


def _written(value: float) -> str:
    if float(value).is_integer():
        return f"{round(value):,}"
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"


def _described(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
