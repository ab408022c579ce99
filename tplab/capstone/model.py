"""What a training step needs to know about a model, and a GPT in plain PyTorch, which is the reference for the others.

`PlainGPT` uses none of the course's layers, but its parameters have the same names as those of `ParallelGPT`. Both
therefore accept the same full state dict (`full_state_dict`) and the same checkpoints.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from tplab.memory.config import GPTConfig


@dataclass(frozen=True, kw_only=True)
class TrainingHooks:
    """The model-specific parts of a training step, which are stored as `model.hooks`.

    config, group       the model's config, and the process group of its tensor-parallel ranks
    finish_gradients    all-reduces gradients that are partial sums after backward. If None, `TrainingStep` does that
    norm                returns the gradient norm over a mesh. If None, `tplab.data.grad_norm` computes it
    idle                exercises whose answers weren't called when a small model was tried out before training
    """

    config: GPTConfig
    group: ProcessGroup | None = None
    finish_gradients: Callable[[], None] | None = None
    norm: Callable[[DeviceMesh | None], Tensor] | None = None
    idle: frozenset[str] = frozenset()


@torch.no_grad()
def copy_shards(source: nn.Module, target: nn.Module) -> None:
    """Copy this rank's parameters and `tensor_parallel` attributes. Raises ValueError if names or shapes differ."""
    given, own = dict(source.named_parameters()), dict(target.named_parameters())
    has, wanted = ({name: list(parameter.shape) for name, parameter in held.items()} for held in (own, given))
    if wrong := [name for name in wanted | has if has.get(name) != wanted.get(name)]:
        raise ValueError(f"on this rank, {wrong[0]} has the shape {has.get(wrong[0])}, not {wanted.get(wrong[0])}")
    for name, parameter in own.items():
        parameter.copy_(given[name])
        if hasattr(given[name], "tensor_parallel"):
            parameter.tensor_parallel = given[name].tensor_parallel  # type: ignore[attr-defined]


class PlainGPT(nn.Module):
    """A GPT without dropout. Maps ids [b, s] to logits [b, s, v], or, given targets [b, s], to the mean loss.

    The loss is computed in float32, or in float64 for float64 logits.
    """

    def __init__(self, config: GPTConfig, **place: Any) -> None:
        super().__init__()
        self.config = config
        h = config.hidden_size
        self.embedding = nn.Embedding(config.vocab_size, h, **place)
        self.positions = nn.Embedding(config.seq_length, h, **place)
        self.layers = nn.ModuleList(PlainLayer(config, **place) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(h, eps=config.norm_eps, **place)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.features(ids)
        return self.logits(x) if targets is None else self.loss(x, targets)

    def features(self, ids: Tensor) -> Tensor:
        """Return the output layer's input [b, s, h] for ids [b, s]."""
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))  # [b, s, h]
        for layer in self.layers:
            x = layer(x)  # [b, s, h]
        return self.final_norm(x)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [b, s, v] of x [b, s, h]."""
        return F.linear(x, self.embedding.weight)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, a scalar, given x [b, s, h] and the target tokens [b, s]."""
        logits = self.logits(x)  # [b, s, v]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class PlainLayer(nn.Module):
    """A transformer layer: x [b, s, h] -> norm -> attention, + residual -> norm -> MLP, + residual."""

    def __init__(self, config: GPTConfig, **place: Any) -> None:
        super().__init__()
        h = config.hidden_size
        self.attention_norm = nn.LayerNorm(h, eps=config.norm_eps, **place)
        self.attention = PlainAttention(h, config.head_dim, **place)
        self.mlp_norm = nn.LayerNorm(h, eps=config.norm_eps, **place)
        self.mlp = PlainMLP(h, config.ffn_size, **place)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))  # [b, s, h]
        return x + self.mlp(self.mlp_norm(x))  # [b, s, h]


class PlainAttention(nn.Module):
    """Causal attention. Maps x to z, both [b, s, h]. The rows of `qkv` are [Wq; Wk; Wv], stacked."""

    def __init__(self, hidden_size: int, head_dim: int, **place: Any) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, **place)
        self.out = nn.Linear(hidden_size, hidden_size, **place)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, dim=-1)  # [b, s, n·d] each
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)  # [b, n, s, d]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [b, n, s, d]
        return self.out(y.transpose(1, 2).flatten(2))  # [b, s, h]


class PlainMLP(nn.Module):
    """An MLP with GELU. Maps x to z, both [b, s, h]."""

    def __init__(self, hidden_size: int, ffn_size: int, **place: Any) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, ffn_size, **place)
        self.down = nn.Linear(ffn_size, hidden_size, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # [b, s, h]
