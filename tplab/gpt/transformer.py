"""Chapter 10: a transformer layer on p ranks, with two parallel blocks and replicated operations around them.

    x -+- norm -> f  attention  g -> + bias, dropout -(+)-+- norm -> f  MLP  g -> + bias, dropout -(+)-> z
       |                                               |  |                                        |
       +-----------------------------------------------+  +----------------------------------------+

Norms, biases after g (the all-reduce of chapter 03), dropout and the residual x [b, s, h] are replicated, so each rank
computes them in full, from the same values and with the same dropout mask. Their parameters get the same gradient on
every rank without any traffic.

Post-LN has the same diagram, but the residual is taken *after* the norm. Vaswani's layer, LN(x + attention(x)), ends
with the norm that our next block begins with, so our first norm belongs to the embedding, and Vaswani's last norm is
the final norm.

A decoder that reads an encoder's output has a third block between the two, cross-attention, with its own norm.

Traffic of a layer: there are two all-reduces of b s h elements in the forward pass and two in the backward pass. With
cross-attention, there are three in each pass, and the backward pass has another one of b t h elements for the memory.
(Shoeybi et al. 2019, "Megatron-LM", section 3 and figure 4; Megatron: ParallelTransformerLayer, TransformerLayer,
bias_dropout_add.)
"""

from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tplab.memory.config import RotaryScaling
from tplab.tensor.attention import ParallelAttention, run_once
from tplab.tensor.initialization import InitMethod
from tplab.tensor.kv_cache import KVCache
from tplab.tensor.linear import LayerOptions
from tplab.tensor.mlp import ParallelMLP
from tplab.tensor.region import TENSOR_PARALLEL
from tplab.tensor.rng import RNGTracker, checkpoint, dropout


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` that computes in the dtype of x, whatever the dtype of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` that computes in the dtype of x, whatever the dtype of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def run_again_in_backward(
    core: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, rng: RNGTracker | None
) -> Tensor:
    """Return core(q, k, v), but save only q, k and v for backward. Pass it as `ParallelAttention(run_core=...)`."""
    if not torch.is_grad_enabled():
        return core(q, k, v)
    return checkpoint(core, q, k, v, tracker=rng or RNGTracker())


NORMS: dict[str, type[nn.Module]] = {"layer": LayerNorm, "rms": RMSNorm}


class ParallelTransformerLayer(nn.Module):
    """Transformer layer sharded over p ranks. Input x and output z are [b, s, h] and replicated.

    causal                each token attends only to itself and to earlier tokens; False for an encoder
    cross_attention       adds a third block, which reads a memory [b, t, h]
    num_kv_heads, ffn_hidden_size, activation, bias    as in ParallelAttention and ParallelMLP
    rotary_base, rotary_scaling, qkv_bias    as in ParallelAttention; cross-attention uses only the last
    norm                  "layer" or "rms"; norm_eps is added to the variance
    hidden_dropout        dropout probability after each block, with the same mask on all ranks
    attention_dropout     dropout probability for the attention probabilities, with different masks on each rank
    apply_residual_connection_post_layernorm    take the residual after the norm (post-LN; the name is Megatron's)
    recompute_attention   save only Q, K and V; backward recomputes the scores, softmax and dropout from them, with the
                          same mask (selective recomputation)
    output_init_method    for weights that write to the residual; `init_method` is for those that read x
    async_grad_allreduce  as in ColumnParallelLinear
    options               see `LayerOptions`

    The residual has the dtype of x. If you pass float32 x to a bfloat16 layer, the residual is accumulated in float32.
    Norms are then computed in float32, and the blocks get inputs in their own dtype.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        ffn_hidden_size: int | None = None,
        *,
        causal: bool = True,
        cross_attention: bool = False,
        activation: str = "gelu",
        rotary_base: float | None = None,
        rotary_scaling: RotaryScaling | None = None,
        bias: bool = True,
        qkv_bias: bool | None = None,
        norm: str = "layer",
        norm_eps: float = 1e-5,
        hidden_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        apply_residual_connection_post_layernorm: bool = False,
        recompute_attention: bool = False,
        output_init_method: InitMethod | None = None,
        async_grad_allreduce: bool = False,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        if norm not in NORMS:
            raise ValueError(f"norm={norm!r} is not one of {', '.join(map(repr, NORMS))}")
        if not 0 <= hidden_dropout < 1:
            raise ValueError(f"hidden_dropout={hidden_dropout} should be in [0, 1)")
        self.hidden_dropout = hidden_dropout
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        self.region = options.get("region", TENSOR_PARALLEL)
        block: dict[str, Any] = {
            "bias": bias,
            "output_init_method": output_init_method,
            "async_grad_allreduce": async_grad_allreduce,
            **options,
        }
        attention: dict[str, Any] = {
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "dropout": attention_dropout,
            "qkv_bias": qkv_bias,
            "run_core": run_again_in_backward if recompute_attention else run_once,
            **block,
        }

        def make_norm() -> nn.Module:
            made = NORMS[norm](hidden_size, eps=norm_eps, device=options.get("device"), dtype=options.get("dtype"))
            self.region.mark(made, "weight", "bias")
            return made

        self.attention_norm = make_norm()
        self.attention = ParallelAttention(
            hidden_size, causal=causal, rotary_base=rotary_base, rotary_scaling=rotary_scaling, **attention
        )
        self.cross_norm = make_norm() if cross_attention else None
        self.cross_attention = (
            ParallelAttention(hidden_size, attention_type="cross", **attention) if cross_attention else None
        )
        self.mlp_norm = make_norm()
        self.mlp = ParallelMLP(hidden_size, ffn_hidden_size, activation, **block)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        memory_padding_mask: Tensor | None = None,
        cache: KVCache | None = None,
        rng: RNGTracker | None = None,
    ) -> Tensor:
        """Return z [b, s, h]. For masks, memory and cache, see `ParallelAttention.forward`.

        rng    random states for dropout (`tplab.tensor.rng.seed_all`); None: torch's current state
        """
        if memory is not None and self.cross_attention is None:
            raise ValueError("this layer reads no memory: make it with cross_attention=True")
        residual, x = self._enter(self.attention_norm, x)
        y = self.attention(x, key_padding_mask=key_padding_mask, cache=cache, rng=rng)  # [b, s, h]
        x = self._leave(residual, y, rng)
        if self.cross_attention is not None:
            residual, x = self._enter(self.cross_norm, x)
            y = self.cross_attention(x, memory, key_padding_mask=memory_padding_mask, rng=rng)
            x = self._leave(residual, y, rng)
        residual, x = self._enter(self.mlp_norm, x)
        return self._leave(residual, self.mlp(x), rng)

    def new_cache(self, batch_size: int, max_length: int) -> KVCache:
        """Return a cache of the text for this rank's heads, with room for `max_length` tokens."""
        return self.attention.new_cache(batch_size, max_length)

    def _enter(self, norm: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual, and the block's input in the dtype that the block computes in."""
        normed = norm(x)
        return normed if self.apply_residual_connection_post_layernorm else x, normed.to(norm.weight.dtype)

    def _leave(self, residual: Tensor, y: Tensor, rng: RNGTracker | None) -> Tensor:
        """Return residual + dropout(y), which is the same on every rank unless the sequence is sharded."""
        sharded = self.region.sequence_parallel
        return residual + dropout(y, self.hidden_dropout, self.training, sharded=sharded, rng=rng)
