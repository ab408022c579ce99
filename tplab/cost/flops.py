"""Chapter 11: the FLOPs of a GPT. A matmul of [m, k] and [k, n] takes 2mkn: mkn multiplications and mkn additions.

For one token, the forward pass takes this many FLOPs in a layer with hidden size h, keys and values of size kv, and an
MLP of inner size f:

    weights     2 h (h + 2 kv) + 2 h h + 2 h f + 2 f h         Q, K and V; output; up; down         = 24 h^2 for f = 4h
    scores      2 s h + 2 s h                                  Q K^T with s keys, and P V           =  4 s h
    logits      2 h V                                          once per model, the output layer

The backward pass takes twice as many FLOPs, because it needs one matmul for the input's gradient and one for the
weight's (for the scores, one for each factor's). For B sequences of s tokens, l layers and a vocabulary of V, a step
takes

    model FLOPs       72 B s l h^2 (1 + s/(6h) + V/(12 l h))       Korthikanti et al. 2022, equation 7
    hardware FLOPs    recomputation counts, too:
      "attention"     72 B s l h^2 (1 + 2s/(9h) + V/(12 l h))
      "layers"        96 B s l h^2 (1 + s/(6h) + V/(16 l h))       Narayanan et al. 2021, equation 3

For "attention", Korthikanti et al. say that recomputation adds 4 B s^2 h per layer, as it does here, but their equation
8 has s/(3h) instead of our 2s/(9h). That adds 12 B s^2 h, because it also counts a backward pass of the recomputed
part. (2 B s^2 h would be enough, because P V isn't needed again, and torch's checkpointing stops before it.)

We count all matmuls and nothing else. Like these papers, we count all scores, although half of them are masked and
kernels such as FlashAttention skip that half (`tplab.cost.layer` takes that into account).
"""

from tplab.memory.config import GPTConfig, Recompute


def layer_products(config: GPTConfig) -> int:
    """Return the forward FLOPs per token for the matmuls that involve one layer's weights."""
    return column_products(config)["Q, K and V"] + column_products(config)["MLP"] + _row_products(config)


def column_products(config: GPTConfig) -> dict[str, int]:
    """Return each column-parallel weight's part of `layer_products`. Their input gradients are summed over ranks."""
    h, kv = config.hidden_size, config.kv_heads * config.head_dim
    return {"Q, K and V": 2 * h * (h + 2 * kv), "MLP": 2 * h * config.ffn_size * (2 if config.gated else 1)}


def layer_scores(config: GPTConfig) -> int:
    """Return the forward FLOPs per token of Q K^T and P V in one layer, with seq_length keys."""
    return 4 * config.seq_length * config.hidden_size


def logits(config: GPTConfig) -> int:
    """Return the forward FLOPs per token of the output layer."""
    return 2 * config.hidden_size * config.vocab_size


def model_flops(config: GPTConfig, sequences: int = 1) -> int:
    """Return the forward and backward FLOPs of a step over `sequences` sequences, without any recomputation."""
    layers = config.num_layers * (layer_products(config) + layer_scores(config))
    return 3 * sequences * config.seq_length * (layers + logits(config))


def hardware_flops(config: GPTConfig, sequences: int = 1, recompute: Recompute = "nothing") -> int:
    """Return the FLOPs of a step, including the scores or layers that are recomputed in the backward pass."""
    again = {
        "nothing": 0,
        "attention": layer_scores(config),
        "layers": layer_products(config) + layer_scores(config),
    }
    if recompute not in again:
        raise ValueError(f"recompute={recompute!r} is not one of {', '.join(map(repr, again))}")
    tokens = sequences * config.seq_length
    return model_flops(config, sequences) + tokens * config.num_layers * again[recompute]


def _row_products(config: GPTConfig) -> int:
    return 2 * config.hidden_size * (config.hidden_size + config.ffn_size)
