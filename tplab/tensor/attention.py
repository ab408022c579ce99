"""Chapter 06: tensor-parallel attention, with the heads sharded over the ranks.

Heads are independent, because each head has its own columns of Q, K and V, its own softmax and its own rows of the
output weight. Only the heads' outputs are summed. So each rank computes complete heads, and g (chapter 03) sums their
outputs over the ranks:

    x -> f -> q_r, k_r, v_r -> softmax(q k^T / sqrt(d) + mask) v, head by head -> y_r Wo_r^T -> g, + b -> z

    8 heads, p = 4:    rank 0: heads 0 1    rank 1: heads 2 3    rank 2: heads 4 5    rank 3: heads 6 7

The structure is the same as in the MLP of chapter 05: a column-parallel layer, then a row-parallel layer, with no
communication in between. A single head can't be split, because its scores are sums over all of d, and softmax(P + Q)
isn't softmax(P) + softmax(Q).

Cross-attention takes Q from x, but K and V from a `memory` such as the encoder's output, so f is applied to both x and
the memory.

Traffic: there is one all-reduce of b s h elements in the forward pass (g) and one in the backward pass (f).
Cross-attention also all-reduces b t h elements in the backward pass for the memory. If there are fewer K and V heads
than ranks, the gradient of their weights is also summed (see `tplab.tensor.qkv`). (Vaswani et al. 2017, arXiv
1706.03762; Shoeybi et al. 2019, "Megatron-LM", section 3 and figure 3b; Megatron: ParallelAttention, SelfAttention,
CrossAttention.)
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tplab.collectives.by_hand import rank_and_size
from tplab.memory.config import RotaryScaling
from tplab.plain import rotary_angles, rotate
from tplab.tensor.attention_mask import attention_mask, check_padding
from tplab.tensor.initialization import InitMethod
from tplab.tensor.kv_cache import KVCache
from tplab.tensor.linear import ColumnParallelLinear, LayerOptions, RowParallelLinear
from tplab.tensor.qkv import QKVParallelLinear, heads_on_rank


class RandomStates(Protocol):
    """Random states for dropout. Inside `fork()`, each rank has its own state, so ranks drop different elements."""

    def fork(self) -> AbstractContextManager: ...


def run_once(core: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, rng: RandomStates | None) -> Tensor:
    """Return core(q, k, v). Autograd saves the intermediate results as usual."""
    return core(q, k, v)


class ParallelAttention(nn.Module):
    """Attention with its heads sharded over p ranks. Input x and output z are [b, s, h] and replicated.

    num_kv_heads          number of K and V heads, each shared by a group of Q heads; None: num_heads
    head_dim              d; None: h / num_heads
    attention_type        "self", or "cross", which takes K and V from a memory [b, t, h]
    causal                each token attends only to itself and to earlier tokens
    dropout               dropout probability for the attention probabilities, used only in training
    rotary_base           base of the rotary position embedding of q and k (Llama 2: 10000); None: don't rotate
    rotary_scaling        changes the rotary frequencies, as in Llama 3.1 (`tplab.memory.config.RotaryScaling`)
    qkv_bias              whether Q, K and V have a bias; None: same as `bias`
    skip_bias_add         return (z without bias, bias)
    output_init_method    initializes the full Wo in place; None: `init_method`
    async_grad_allreduce  as in ColumnParallelLinear
    run_core              computes scores, softmax and dropout; chapter 10 passes one that recomputes them in backward
    options               see `LayerOptions`; `init_method` initializes the full [Wq; Wk; Wv]

    Parameters: `qkv` [(num_heads + 2 num_kv_heads) d, h], or `q` and `kv` for cross-attention; `out` [h, num_heads d].
    Raises ValueError if the heads can't be divided evenly over the ranks. The message lists the values of p that work;
    it comes from `sharding.divide` for the Q heads, and from `qkv.heads_on_rank` for the K and V heads.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        attention_type: str = "self",
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        rotary_base: float | None = None,
        rotary_scaling: RotaryScaling | None = None,
        qkv_bias: bool | None = None,
        skip_bias_add: bool = False,
        output_init_method: InitMethod | None = None,
        async_grad_allreduce: bool = False,
        run_core: Callable[..., Tensor] = run_once,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if attention_type not in ("self", "cross"):
            raise ValueError(f"attention_type={attention_type!r} is not 'self' or 'cross'")
        if attention_type == "cross" and (causal or rotary_base is not None):
            raise ValueError("cross-attention has no causal mask and no rotary positions: x and memory are two texts")
        if rotary_scaling is not None and rotary_base is None:
            raise ValueError("rotary_scaling needs a rotary_base: without it, there are no rotary positions")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout} should be in [0, 1)")
        self.rank, self.world_size = rank_and_size(options.get("group"))
        self.heads, self.kv_heads = heads_on_rank(num_heads, num_kv_heads, self.world_size)
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(f"hidden_size={hidden_size} can't be divided into num_heads={num_heads} heads of one size")
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, num_kv_heads
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        self.attention_type, self.causal, self.dropout = attention_type, causal, dropout
        self.rotary_base, self.rotary_scaling, self.run_core = rotary_base, rotary_scaling, run_core
        qkv_bias = bias if qkv_bias is None else qkv_bias
        first: dict[str, Any] = {"async_grad_allreduce": async_grad_allreduce, **options}
        if attention_type == "self":
            self.qkv = QKVParallelLinear(hidden_size, num_heads, num_kv_heads, self.head_dim, qkv_bias, **first)
        else:
            self.q = ColumnParallelLinear(hidden_size, num_heads * self.head_dim, qkv_bias, **first)
            self.kv = QKVParallelLinear(hidden_size, 0, num_kv_heads, self.head_dim, qkv_bias, **first)
        options["init_method"] = output_init_method or options.get("init_method")
        self.out = RowParallelLinear(
            num_heads * self.head_dim, hidden_size, bias, skip_bias_add=skip_bias_add, **options
        )

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        cache: KVCache | None = None,
        rng: RandomStates | None = None,
    ) -> Any:
        """Return z [b, s, h], or (z, bias) with `skip_bias_add`. Queries that may not attend to any key get zeros.

        memory              [b, t, h], for cross-attention
        key_padding_mask    bool [b, t], True for padding (as in `nn.MultiheadAttention`)
        cache               from `new_cache`, for self-attention; x then has the s tokens that follow the cached ones
        rng                 random states for dropout that differ between ranks inside `fork()`; None: torch's current
                            state, with which ranks that use the same seed drop the same positions in different heads
        """
        self._check_inputs(x, memory, cache)
        if self.attention_type == "self":
            q, k, v = self._project(x, 0 if cache is None else cache.length)
            if cache is not None:
                k, v = cache.append(k, v)  # [b, m, t, d]
        else:
            q = self.q(x).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)  # [b, n, s, d]
            _, k, v = self.kv(memory)  # [b, m, t, d]
        y = self._attend(q, k, v, key_padding_mask, rng)  # [b, n, s, d]
        return self.out(y.transpose(1, 2).flatten(2))  # [b, s, n d] -> [b, s, h]

    def _project(self, x: Tensor, offset: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x)  # [b, n, s, d], [b, m, s, d] twice
        if self.rotary_base is not None:
            positions = torch.arange(offset, offset + q.shape[2], device=x.device)  # [s]
            angles = rotary_angles(positions, self.head_dim, self.rotary_base, self.rotary_scaling)
            q, k = rotate(q, angles), rotate(k, angles)
        return q, k, v

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, rng: RandomStates | None
    ) -> Tensor:
        (b, _, s, _), t = q.shape, k.shape[2]
        if key_padding_mask is not None:
            check_padding(b, t, key_padding_mask)
        mask, is_causal = attention_mask(s, t, self.causal, key_padding_mask, q.device)
        dropout = self.dropout if self.training else 0.0

        def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with rng.fork() if rng is not None and dropout else nullcontext():
                return F.scaled_dot_product_attention(
                    q, k, v, mask, dropout, is_causal, enable_gqa=self.heads != self.kv_heads
                )  # [b, n, s, d]

        return self.run_core(core, q, k, v, rng)

    def new_cache(self, batch_size: int, max_length: int) -> KVCache:
        """Return a cache for this rank's heads and `max_length` tokens."""
        weight = self.out.weight
        shape = (batch_size, self.kv_heads, max_length, self.head_dim)
        return KVCache(*shape, device=weight.device, dtype=weight.dtype)

    def _check_inputs(self, x: Tensor, memory: Tensor | None, cache: KVCache | None) -> None:
        for name, tensor in (("x", x), ("memory", memory)):
            if tensor is not None and (tensor.dim() != 3 or tensor.shape[2] != self.hidden_size):
                raise ValueError(
                    f"{name} {list(tensor.shape)} should be [b, s, {self.hidden_size}]: each rank needs all of it"
                )
        if self.attention_type == "self":
            if memory is not None:
                raise ValueError("self-attention has no memory: make it with attention_type='cross'")
        elif memory is None or cache is not None:
            raise ValueError("cross-attention needs its memory in every call, and has no cache")
