"""Chapter 00: the configuration of a GPT, its weights by name and shape, and its number of parameters.

    one layer  =  norm, attention (Q, K, V, out), norm, MLP ([gate,] up, down)
    the model  =  embedding [+ positions], num_layers layers, norm, output layer

`cut` is the dimension along which tensor parallelism shards a weight. It's 0 for the rows of a column-parallel weight
(stored [out, in], as in nn.Linear), 1 for a row-parallel weight, and None for replicated weights, which are the norms,
the positions, and the biases that are added after a sum over ranks. This is pure arithmetic, so nothing here needs
torch.
"""

from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any, Literal

Recompute = Literal["nothing", "attention", "layers"]  # what the backward pass recomputes instead of saving it


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """How Llama 3.1 adjusts the rotary frequencies for texts longer than those it was pre-trained on ("llama3").

    A frequency that completes fewer than `low_freq_factor` turns over `original_seq_length` tokens is divided by
    `factor`. A frequency that completes more than `high_freq_factor` turns isn't changed. Frequencies between these
    limits are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_seq_length: int

    def __post_init__(self) -> None:
        if self.factor < 1 or not 0 < self.low_freq_factor < self.high_freq_factor or self.original_seq_length < 1:
            raise ValueError(f"{self}: factor should be at least 1, and low_freq_factor below high_freq_factor")


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The sizes of a GPT. Raises ValueError for impossible sizes.

    num_kv_heads:      number of K and V heads (grouped-query attention); None: the same as num_heads
    ffn_hidden_size:   inner size of the MLP; None: 4 * hidden_size
    gated:             the MLP has a third weight, the gate (SwiGLU)
    activation:        activation of an MLP without a gate: "gelu", or "gelu_tanh", GPT-2's approximation of GELU
    bias:              True: linear layers have a bias, and norms are LayerNorm; False: no bias, and RMSNorm
    tied_embedding:    the output layer uses the embedding's weight
    learned_positions: True: a learned vector for each of seq_length positions; False: rotary positions
    rotary_base:       the base of rotary positions
    rotary_scaling:    how the rotary frequencies are changed, as in Llama 3.1; None: not at all
    qkv_bias:          Q, K and V have a bias even if bias=False, as in Qwen2
    norm_eps:          the value that a norm adds to the variance
    dropout:           probability of dropout after the attention scores, attention, the MLP and the embedding
    flash_attention:   the backward pass recomputes the scores instead of saving them
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int
    seq_length: int
    num_kv_heads: int | None = None
    ffn_hidden_size: int | None = None
    gated: bool = False
    activation: str = "gelu"
    bias: bool = True
    tied_embedding: bool = True
    learned_positions: bool = True
    rotary_base: float = 10_000.0
    rotary_scaling: RotaryScaling | None = None
    qkv_bias: bool = False
    norm_eps: float = 1e-5
    dropout: float = 0.1
    flash_attention: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "vocab_size", "seq_length", "kv_heads", "ffn_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} should be a probability in [0, 1); 0 leaves it out")
        if self.learned_positions and self.rotary_scaling is not None:
            raise ValueError("rotary_scaling needs rotary positions: learned_positions=False")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} can't be divided into num_heads={self.num_heads} heads of one size"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} can't share num_kv_heads={self.kv_heads} evenly: "
                "each head of K and V serves the same number of heads"
            )

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def ffn_size(self) -> int:
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


# Radford et al. 2019, table 2; Brown et al. 2020, table 2.1; Dubey et al. 2024 (arXiv 2407.21783), table 3 and, for the
# context of 8192 tokens in most of the pre-training, section 3.4.
_GPT: dict[str, Any] = {"vocab_size": 50257, "activation": "gelu_tanh"}
_LLAMA3: dict[str, Any] = {
    "vocab_size": 128256, "seq_length": 8192, "num_kv_heads": 8, "gated": True, "bias": False, "tied_embedding": False,
    "learned_positions": False, "rotary_base": 500_000.0, "dropout": 0.0, "flash_attention": True,
}  # fmt: skip
PRESETS: dict[str, GPTConfig] = {
    "GPT-2 1.5B": GPTConfig(num_layers=48, hidden_size=1600, num_heads=25, seq_length=1024, **_GPT),
    "GPT-3 175B": GPTConfig(num_layers=96, hidden_size=12288, num_heads=96, seq_length=2048, **_GPT),
    "Llama 3 8B": GPTConfig(num_layers=32, hidden_size=4096, num_heads=32, ffn_hidden_size=14336, **_LLAMA3),
    "Llama 3 70B": GPTConfig(num_layers=80, hidden_size=8192, num_heads=64, ffn_hidden_size=28672, **_LLAMA3),
    "Llama 3 405B": GPTConfig(num_layers=126, hidden_size=16384, num_heads=128, ffn_hidden_size=53248, **_LLAMA3),
}


@dataclass(frozen=True)
class Weight:
    """A parameter with its name, its shape, and the dimension that tensor parallelism shards (None: replicated).

    unit: the smallest chunk of that dimension that a rank may have, such as the rows of one head for K and V
    """

    name: str
    shape: tuple[int, ...]
    cut: int | None = None
    unit: int = 1

    def on_rank(self, tp: int) -> int:
        """Return the number of elements per rank, for tp ranks. For uneven shards, it's rounded up, as with padding."""
        if self.cut is None:
            return prod(self.shape)
        pieces = ceil(self.shape[self.cut] / self.unit / tp)
        return prod(self.shape) // self.shape[self.cut] * pieces * self.unit


def layer_weights(config: GPTConfig) -> list[Weight]:
    """Return the weights of one transformer layer, with shapes [out, in] as in nn.Linear."""
    h, f, kv = config.hidden_size, config.ffn_size, config.kv_heads * config.head_dim
    weights = _norm("attention_norm", config)
    qkv = replace(config, bias=config.bias or config.qkv_bias)
    weights += _linear("attention.q", h, h, 0, qkv)
    weights += _linear("attention.k", h, kv, 0, qkv, unit=config.head_dim)
    weights += _linear("attention.v", h, kv, 0, qkv, unit=config.head_dim)
    weights += _linear("attention.out", h, h, 1, config)
    weights += _norm("mlp_norm", config)
    weights += _linear("mlp.gate", h, f, 0, config) if config.gated else []
    weights += _linear("mlp.up", h, f, 0, config)
    return weights + _linear("mlp.down", f, h, 1, config)


def first_weights(config: GPTConfig) -> list[Weight]:
    """Return the weights before the first layer. The vocabulary is padded to a multiple of tp."""
    table = [Weight("embedding", (config.vocab_size, config.hidden_size), 0)]
    return table + [Weight("positions", (config.seq_length, config.hidden_size))] * config.learned_positions


def last_weights(config: GPTConfig, *, own_head: bool | None = None) -> list[Weight]:
    """Return the weights after the last layer.

    own_head: whether the output layer has its own weight (None: it does unless the embedding is tied)

    In a pipeline, the last stage keeps its own copy of a tied embedding.
    """
    head = not config.tied_embedding if own_head is None else own_head
    return _norm("final_norm", config) + [Weight("head", (config.vocab_size, config.hidden_size), 0)] * head


def parameter_count(config: GPTConfig) -> int:
    """Return the number of parameters of the model. A tied embedding counts once."""
    layer = sum(weight.on_rank(1) for weight in layer_weights(config))
    ends = sum(weight.on_rank(1) for weight in first_weights(config) + last_weights(config))
    return config.num_layers * layer + ends


def tensor_parallel_sizes(config: GPTConfig, largest: int) -> list[int]:
    """Return all tensor-parallel sizes up to `largest` that give each rank complete heads and equal MLP shards."""
    return [tp for tp in range(1, largest + 1) if not _unfit(config, tp)]


def check_tensor_parallel(config: GPTConfig, tp: int) -> None:
    """Raise ValueError, with the reason and the sizes that work, if tp ranks can't share the model."""
    if why := _unfit(config, tp):
        fitting = ", ".join(map(str, tensor_parallel_sizes(config, max(tp, 64))))
        raise ValueError(f"{why}. Use p in {fitting}.")


def _unfit(config: GPTConfig, tp: int) -> str:
    if tp < 1:
        return f"p={tp} is no number of ranks"
    if config.num_heads % tp:
        return f"num_heads={config.num_heads} can't be divided over {tp} ranks: each rank takes whole heads"
    if config.kv_heads % tp and tp % config.kv_heads:
        return f"num_kv_heads={config.kv_heads} can't be divided over {tp} ranks, nor copied to them evenly"
    if config.ffn_size % tp:
        return f"ffn_hidden_size={config.ffn_size} can't be divided over {tp} ranks"
    return ""


def _norm(name: str, config: GPTConfig) -> list[Weight]:
    shape = (config.hidden_size,)
    return [Weight(f"{name}.weight", shape)] + [Weight(f"{name}.bias", shape)] * config.bias


def _linear(name: str, n_in: int, n_out: int, cut: int, config: GPTConfig, unit: int = 1) -> list[Weight]:
    """Return a weight and its bias, which is sharded with the weight's rows, or replicated for row-parallel weights."""
    weight = Weight(f"{name}.weight", (n_out, n_in), cut, unit)
    return [weight] + [Weight(f"{name}.bias", (n_out,), None if cut else 0, unit)] * config.bias
