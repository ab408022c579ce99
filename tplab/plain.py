"""A transformer in plain PyTorch, in a single process: the reference that tplab's parallel layers are compared with.

    ids [b, s] -> embedding, + positions -> layers -> norm -> logits [b, s, v] -> loss

    x -+- norm -> attention -(+)-+- norm -> MLP -(+)-> z          a layer
       +---------------------+   +---------------+

Nothing here knows about ranks or comes from `tplab.tensor` or `tplab.gpt`, which use its rotary positions and
activations. Parameters have the names and the shapes that the parallel layers' full parameters have, so both accept the
same state dict: weights are [out, in], `qkv` is [Wq; Wk; Wv], and `up` is [gate; up] if the MLP is gated.
tests/test_plain.py compares this module with PyTorch's layers and with transformers. (Vaswani et al. 2017; Radford et
al. 2019, GPT-2; Touvron et al. 2023, Llama.)
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tplab.memory.config import GPTConfig, RotaryScaling


class Attention(nn.Module):
    """Attention. Maps x to z, both [b, s, h]. The options are those of ParallelAttention (chapter 06), and `flash`.

    flash    use torch's fused kernel, which doesn't store the scores, if no mask is needed except the causal one
    """

    def __init__(
        self, hidden_size: int, num_heads: int, num_kv_heads: int | None = None, head_dim: int | None = None, *,
        attention_type: str = "self", causal: bool = False, dropout: float = 0.0, bias: bool = True,
        rotary_base: float | None = None, rotary_scaling: RotaryScaling | None = None,
        qkv_bias: bool | None = None, flash: bool = False, **place: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        qkv_bias = bias if qkv_bias is None else qkv_bias
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        self.sharing = num_heads // num_kv_heads  # this many heads of Q share one head of K and V
        self.causal, self.dropout, self.flash = causal, dropout, flash
        self.rotary_base, self.rotary_scaling = rotary_base, rotary_scaling
        q_rows, kv_rows = num_heads * self.head_dim, 2 * num_kv_heads * self.head_dim
        if attention_type == "self":
            self.qkv = nn.Linear(hidden_size, q_rows + kv_rows, qkv_bias, **place)
        else:
            self.q = nn.Linear(hidden_size, q_rows, qkv_bias, **place)
            self.kv = nn.Linear(hidden_size, kv_rows, qkv_bias, **place)
        self.out = nn.Linear(q_rows, hidden_size, bias, **place)

    def forward(self, x: Tensor, memory: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return z [b, s, h]. In self-attention, the t keys belong to the s tokens of x.

        memory              [b, t, h], which the keys and values of cross-attention come from
        key_padding_mask    bool [b, t], True for padding, which no query attends to
        """
        if memory is None:
            y = self.qkv(x)  # [b, s, (n + 2 m) d]
            width = y.shape[-1] // (self.sharing + 2)  # m d
            parts = y.split([self.sharing * width, width, width], -1)
        else:
            parts = self.q(x), *self.kv(memory).chunk(2, -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)  # [b, n or m, s or t, d]
        if self.rotary_base is not None:
            positions = torch.arange(x.shape[1], device=x.device)  # [s]
            angles = rotary_angles(positions, self.head_dim, self.rotary_base, self.rotary_scaling)
            q, k = rotate(q, angles), rotate(k, angles)
        dropout, grouped = self.dropout if self.training else 0.0, self.sharing > 1
        if self.flash and key_padding_mask is None:
            y = F.scaled_dot_product_attention(q, k, v, None, dropout, self.causal, enable_gqa=grouped)  # [b, n, s, d]
        else:
            k, v = (part.repeat_interleave(self.sharing, 1) if grouped else part for part in (k, v))  # [b, n, t, d]
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)  # [b, n, s, t]
            scores = scores + self._mask(scores, key_padding_mask)
            y = F.dropout(scores.softmax(-1), dropout) @ v  # [b, n, s, d]
        return self.out(y.transpose(1, 2).flatten(2))  # [b, s, n d] -> [b, s, h]

    def _mask(self, scores: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Return what to add to scores [b, n, s, t], with -inf wherever a query may not attend to a key."""
        mask = scores.new_zeros(scores.shape[-2:])
        if self.causal:
            mask = mask.masked_fill(torch.ones_like(mask, dtype=torch.bool).triu(1), -math.inf)  # [s, s]
        if key_padding_mask is not None:
            mask = mask.masked_fill(key_padding_mask[:, None, None], -math.inf)  # [b, 1, s, t]
        return mask


def rotary_angles(
    positions: Tensor, head_dim: int, base: float = 10_000.0, scaling: RotaryScaling | None = None
) -> Tensor:
    """Return the angles [.., d/2] by which `rotate` turns the pairs at integer positions [..].

    Pair i of the token at position m is rotated by m w_i, where w_i = base^(-2i/d). As in Llama, angles are float32
    whatever the model's dtype.

    scaling    changes the frequencies w_i: divides the low ones by the factor, keeps the high ones, and interpolates in
               between, as Llama 3.1 does
    Raises ValueError if head_dim is odd. (Su et al. 2021, "RoFormer", arXiv 2104.09864, section 3.2; transformers,
    models/llama/modeling_llama.py and, for Llama 3.1, modeling_rope_utils.py.)
    """
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} is odd: rotary positions turn pairs of numbers")
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim  # [d/2]
    frequencies = 1.0 / base**exponents  # [d/2], in radians per token
    if scaling is not None:
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        turns = scaling.original_seq_length * frequencies / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = (1 - kept) * frequencies / scaling.factor + kept * frequencies
    return positions[..., None].float() * frequencies  # [.., d/2]


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate each pair of x [b, heads, s, d] by its angle [s, d/2]. Norms are preserved.

        [ a' ]   [ cos   -sin ] [ a ]          the first pair rotates fastest, one radian per token;
        [ b' ] = [ sin    cos ] [ b ]          the last one hardly moves

    The dot product of a rotated query at m and a rotated key at n depends on the positions only through m - n, so a
    score encodes the distance between two tokens. Like Llama, we pair element i with element i + d/2 (half-split). The
    paper pairs 2i with 2i + 1, so weights trained with one pairing don't work with the other.
    """
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)  # [b, heads, s, d/2] each
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)  # [b, heads, s, d]


def swiglu(gate_and_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [.., f], for the concatenation [gate | up], [.., 2 f]."""
    gate, up = gate_and_up.chunk(2, dim=-1)  # [.., f] each
    return F.silu(gate) * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),  # that GPT-2 was trained with
    "swiglu": swiglu,
}


class MLP(nn.Module):
    """MLP whose activation is a key of ACTIVATIONS. Maps x to z, both [.., h]. `options` are those of nn.Linear."""

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int | None = None, activation: str = "gelu", **options: Any
    ) -> None:
        super().__init__()
        width = 4 * hidden_size if ffn_hidden_size is None else ffn_hidden_size
        self.activation = ACTIVATIONS[activation]
        self.up = nn.Linear(hidden_size, 2 * width if activation == "swiglu" else width, **options)
        self.down = nn.Linear(width, hidden_size, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class Layer(nn.Module):
    """A transformer layer, like each of the layers of GPT(config). Maps x to z, both [b, s, h].

    cross_attention    a third block, between the two, reads a memory [b, t, h]
    post_norm          each residual is what the norm returned (post-LN), not what it was given (pre-LN)
    head_dim           as in Attention
    """

    def __init__(
        self, config: GPTConfig, *, causal: bool = True, cross_attention: bool = False, post_norm: bool = False,
        head_dim: int | None = None, **place: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.post_norm, self.dropout = post_norm, config.dropout
        bias, qkv_bias = config.bias, config.bias or config.qkv_bias
        sizes = config.hidden_size, config.num_heads, config.num_kv_heads, head_dim
        options: dict[str, Any] = {"bias": bias, "qkv_bias": qkv_bias, "dropout": config.dropout, **place}
        self.attention_norm = make_norm(config, **place)
        self.attention = Attention(
            *sizes, causal=causal, rotary_base=None if config.learned_positions else config.rotary_base,
            rotary_scaling=config.rotary_scaling, flash=config.flash_attention, **options,
        )  # fmt: skip
        self.cross_norm = make_norm(config, **place) if cross_attention else None
        self.cross_attention = Attention(*sizes, attention_type="cross", **options) if cross_attention else None
        self.mlp_norm = make_norm(config, **place)
        activation = "swiglu" if config.gated else config.activation
        self.mlp = MLP(config.hidden_size, config.ffn_hidden_size, activation, bias=bias, **place)

    def forward(
        self, x: Tensor, memory: Tensor | None = None, *, memory_padding_mask: Tensor | None = None, **masks: Any
    ) -> Tensor:
        """Return z [b, s, h]. `masks` are those of self-attention."""
        x = self._block(x, self.attention_norm, self.attention, **masks)
        if self.cross_attention is not None:
            x = self._block(x, self.cross_norm, self.cross_attention, memory, key_padding_mask=memory_padding_mask)
        return self._block(x, self.mlp_norm, self.mlp)

    def _block(self, x: Tensor, norm: Any, block: nn.Module, *args: Any, **options: Any) -> Tensor:
        normed = norm(x)
        y = block(normed, *args, **options)
        return (normed if self.post_norm else x) + F.dropout(y, self.dropout, self.training)


def make_norm(config: GPTConfig, **place: Any) -> nn.Module:
    return (nn.LayerNorm if config.bias else nn.RMSNorm)(config.hidden_size, eps=config.norm_eps, **place)


class GPT(nn.Module):
    """A GPT. Maps ids [b, s] to logits [b, s, v] or, given targets [b, s], to the mean loss. -100 is no target."""

    def __init__(self, config: GPTConfig, **place: Any) -> None:
        super().__init__()
        self.config = config
        v, h = config.vocab_size, config.hidden_size
        self.embedding = nn.Embedding(v, h, **place)
        self.positions = nn.Embedding(config.seq_length, h, **place) if config.learned_positions else None
        self.layers = nn.ModuleList(Layer(config, **place) for _ in range(config.num_layers))
        self.final_norm = make_norm(config, **place)
        self.head = None if config.tied_embedding else nn.Linear(h, v, bias=False, **place)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.features(ids)  # [b, s, h]
        return self.logits(x) if targets is None else self.loss(x, targets)

    def features(self, ids: Tensor) -> Tensor:
        """Return the output layer's input [b, s, h] for ids [b, s]."""
        x = self.embedding(ids)  # [b, s, h]
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = F.dropout(x, self.config.dropout, self.training)
        for layer in self.layers:
            x = layer(x)
        return self.final_norm(x)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [b, s, v] of x [b, s, h]."""
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, a scalar in float32 or float64, of x [b, s, h] and the next tokens [b, s]."""
        logits = self.logits(x)  # [b, s, v]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
