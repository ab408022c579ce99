"""A single-process GPT in plain PyTorch, which serves as a reference for the parallel models.

It uses none of the course's layers, but its parameters have the same names as those of `ParallelGPT`. Both models
therefore accept the same full state dict (`full_state_dict`) and the same checkpoints.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tplab.memory.config import GPTConfig, Recompute
from tplab.tensor.linear import Device


class PlainGPT(nn.Module):
    """A GPT without dropout. Maps ids [b, s] to logits [b, s, v], or, given targets [b, s], to the mean loss.

    rows         number of rows of the embedding table, including padding. If None, it has v rows
    recompute    what to recompute in backward, as in `ParallelGPT`
    """

    def __init__(
        self, config: GPTConfig, *, rows: int | None = None, recompute: Recompute = "nothing", device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config = config
        h = config.hidden_size
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding = nn.Embedding(rows or config.vocab_size, h, **place)
        self.positions = nn.Embedding(config.seq_length, h, **place)
        self.layers = nn.ModuleList(PlainLayer(config, **place) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(h, eps=config.norm_eps, **place)
        for layer in self.layers:
            if recompute == "layers":
                layer.forward = again_in_backward(layer.forward)
            elif recompute == "attention":
                layer.attention.attend = again_in_backward(attend)  # type: ignore[union-attr]

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(ids) + self.positions(self.places(ids))  # [b, s, h]
        for layer in self.layers:
            x = layer(x)  # [b, s, h]
        x = self.final_norm(x)
        return self.logits(x) if targets is None else self.loss(x, targets)

    def places(self, ids: Tensor) -> Tensor:
        """Return the tokens' positions 0 .. s - 1, [s]."""
        return torch.arange(ids.shape[1], device=ids.device)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [b, s, v] of x [b, s, h]."""
        return F.linear(x, self.embedding.weight)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of x [b, s, h] for targets [b, s], computed in float32 (float64 for float64 logits)."""
        logits = self.logits(x).flatten(0, 1)  # [b s, v]
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten())


class PlainLayer(nn.Module):
    """A transformer layer: x [b, s, h] -> norm -> attention, + residual -> norm -> MLP, + residual."""

    def __init__(self, config: GPTConfig, **place: Any) -> None:
        super().__init__()
        h, ffn = config.hidden_size, config.ffn_size
        self.attention_norm = nn.LayerNorm(h, eps=config.norm_eps, **place)
        self.attention = PlainAttention(h, config.num_heads, **place)
        self.mlp_norm = nn.LayerNorm(h, eps=config.norm_eps, **place)
        up, down = nn.Linear(h, ffn, **place), nn.Linear(ffn, h, **place)
        self.mlp = nn.Sequential(OrderedDict(up=up, gelu=nn.GELU(), down=down))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))  # [b, s, h]
        return x + self.mlp(self.mlp_norm(x))  # [b, s, h]


class PlainAttention(nn.Module):
    """Causal self-attention, [b, s, h] -> [b, s, h]. The rows of `qkv` are [Wq; Wk; Wv], stacked."""

    def __init__(self, hidden_size: int, num_heads: int, **place: Any) -> None:
        super().__init__()
        self.head_dim, self.attend = hidden_size // num_heads, attend
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, **place)
        self.out = nn.Linear(hidden_size, hidden_size, **place)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, dim=-1)  # [b, s, n·d] each
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)  # [b, n, s, d]
        y = self.attend(q, k, v)  # [b, n, s, d]
        return self.out(y.transpose(1, 2).flatten(2))  # [b, s, n·d] -> [b, s, h]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention: q, k, v [b, n, s, d] -> [b, n, s, d]."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def again_in_backward(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `function` so that only its inputs are saved and backward recomputes it. It must not draw random numbers."""

    def kept_by_inputs(*args: Any, **kwargs: Any) -> Tensor:
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return kept_by_inputs
