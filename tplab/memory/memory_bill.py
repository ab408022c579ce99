"""Chapter 00: the memory bill of training a GPT, that is, what one GPU has to store.

    weights, gradients, optimizer state  =  parameters on this GPU · bytes per parameter (Adam, mixed precision: 16)
    activations                          =  layers on this GPU · micro-batches in flight · bytes per layer

    tensor parallel (tp)    shards the matrices of every layer and what is computed with them; norms, the biases after
                            a sum and the activations [s, b, h] between the matrices are replicated
    sequence parallel       shards these activations, too, over the same tp ranks
    pipeline parallel (pp)  divides the layers; with the 1F1B schedule, the first stage has pp micro-batches in flight
    data parallel (dp)      divides the sequences of a step; every replica needs as much memory as a single one

This is pure arithmetic and doesn't need torch. `tplab.memory.meter` measures the same on real tensors.
"""

from dataclasses import dataclass
from functools import cache
from typing import get_args

from tplab.memory.config import (
    GPTConfig,
    Recompute,
    check_tensor_parallel,
    first_weights,
    last_weights,
    layer_weights,
)

GB = 10**9
GPUS: dict[str, int] = {  # memory as sold, in bytes
    "RTX 4090, 24 GB": 24 * GB,
    "A100, 40 GB": 40 * GB,
    "H100, 80 GB": 80 * GB,
    "H200, 141 GB": 141 * GB,
}

BETWEEN_MATMULS = frozenset({  # the names in `layer_activations` that only sequence parallelism splits
    "input of the layer",
    "input of the attention norm", "input of Q, K and V", "dropout mask behind attention",
    "input of the MLP norm", "input of the MLP", "dropout mask behind the MLP",
})  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """Bytes per parameter that a training recipe needs."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


# Mixed precision as in Micikevicius et al. 2018 and ZeRO (Rajbhandari et al. 2020, section 3.1): 16-bit weights and
# gradients; the optimizer has a float32 copy of the weights (4 bytes) and Adam's two averages (4 + 4).
ADAM = Recipe(weights=2, gradients=2, optimizer=12)


@dataclass(frozen=True)
class Layout:
    """How a training run is divided over tp · pp · dp GPUs. Raises ValueError for sizes below 1.

    micro_batch:   number of sequences per micro-batch
    micro_batches: micro-batches per replica and step; None: pp, the fewest that keep every stage busy
    sequence_parallel, recompute: as in `layer_activations`
    chunks:        v, the number of chunks of layers on each pipeline rank (interleaved 1F1B)
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batch: int = 1
    micro_batches: int | None = None
    sequence_parallel: bool = False
    recompute: Recompute = "nothing"
    chunks: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "micro_batch", "micro_batches", "chunks"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name} is {size}; it must be at least 1")

    @property
    def steps(self) -> int:
        return self.pp if self.micro_batches is None else self.micro_batches

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def sequences(self) -> int:
        """The number of sequences per optimizer step, over all replicas."""
        return self.dp * self.steps * self.micro_batch


@dataclass(frozen=True)
class Bill:
    """Bytes on one GPU, by category."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations

    def parts(self) -> dict[str, int]:
        return {
            "weights": self.weights, "gradients": self.gradients, "optimizer state": self.optimizer,
            "activations": self.activations,
        }  # fmt: skip


def layers_of_stage(num_layers: int, pp: int, stage: int) -> int:
    """Return the number of layers in a pipeline stage. If they don't divide evenly, the first stages get one more."""
    if pp > num_layers:
        raise ValueError(f"pp={pp} stages can't share {num_layers} layers: each stage needs one at least")
    if not 0 <= stage < pp:
        raise ValueError(f"there is no stage {stage}: with pp={pp} they are numbered from 0 to {pp - 1}")
    return num_layers // pp + (stage < num_layers % pp)


def rank_parameters(config: GPTConfig, layout: Layout = Layout(), stage: int = 0) -> int:
    """Return the number of parameters on one GPU of a pipeline stage.

    Raises ValueError if tp or pp doesn't fit the model.
    """
    return _parameters(config, layout.tp, layout.pp, stage)


@cache
def _parameters(config: GPTConfig, tp: int, pp: int, stage: int) -> int:
    check_tensor_parallel(config, tp)
    of_layer = sum(weight.on_rank(tp) for weight in layer_weights(config))
    ends = first_weights(config) if stage == 0 else []
    if stage == pp - 1:
        ends += last_weights(config, own_head=pp > 1 or not config.tied_embedding)
    of_ends = sum(weight.on_rank(tp) for weight in ends)
    return layers_of_stage(config.num_layers, pp, stage) * of_layer + of_ends


def layer_activations(
    config: GPTConfig,
    micro_batch: int = 1,
    tp: int = 1,
    *,
    sequence_parallel: bool = False,
    recompute: Recompute = "nothing",
) -> dict[str, int]:
    """Return the bytes that autograd saves for one layer's backward pass on one rank, by name, with 16-bit values.

    sequence_parallel    shard along the sequence what tensor parallelism alone replicates
    recompute            "attention": backward recomputes scores, softmax and their dropout from Q, K and V
                         (selective recomputation); "layers": it recomputes everything from the layer's input (full)

    For a GPT with dropout, an MLP of size 4h and no grouped queries, the sum agrees with Korthikanti et al. 2022,
    table 2:

        one rank                  sbh(34 + 5as/h)               with "attention"   sbh(34)
        tensor parallel           sbh(10 + 24/t + 5as/(ht))                        sbh(10 + 24/t)
        and sequence parallel     sbh(34/t + 5as/(ht))                             sbh(34/t)
        "layers"                  sbh(2), with sequence parallel sbh(2/t)

    Like that paper, we omit the mean and variance of each norm (two values per token). A dropout mask takes one byte
    per element. Raises ValueError if tp doesn't fit the model or the sequence.
    """
    check_tensor_parallel(config, tp)
    if recompute not in get_args(Recompute):
        raise ValueError(f"recompute={recompute!r} is not one of {', '.join(map(repr, get_args(Recompute)))}")
    if sequence_parallel and config.seq_length % tp:
        raise ValueError(f"seq_length={config.seq_length} can't be divided over tp={tp} ranks, in whole tokens")
    tokens = micro_batch * config.seq_length
    whole = 2 * tokens * config.hidden_size  # a tensor [s, b, h] of 16-bit numbers
    between = whole // tp if sequence_parallel else whole  # between two blocks
    if recompute == "layers":
        return {"input of the layer": between}
    heads, kv_heads = config.num_heads // tp, max(config.kv_heads // tp, 1)
    scores = tokens * config.seq_length * heads  # [b, a/t, s, s]
    inner = 2 * tokens * config.ffn_size // tp
    mask = between // 2 if config.dropout else 0
    kept = {
        "input of the attention norm": between,
        "input of Q, K and V": between,
        "Q, K and V": 2 * tokens * config.head_dim * (heads + 2 * kv_heads),
        "attention scores": 0 if config.flash_attention else (5 if config.dropout else 2) * scores,
        "log-sum-exp of the scores": 4 * tokens * heads if config.flash_attention else 0,
        "input of the attention's output layer": whole // tp,
        "dropout mask behind attention": mask,
        "input of the MLP norm": between,
        "input of the MLP": between,
        "input of the activation": inner,
        "both factors of the gate": 2 * inner if config.gated else 0,
        "input of the second linear layer": inner,
        "dropout mask behind the MLP": mask,
    }
    if recompute == "attention":
        kept |= {"attention scores": 0, "log-sum-exp of the scores": 0}
    return {name: size for name, size in kept.items() if size}


def bill(config: GPTConfig, layout: Layout = Layout(), recipe: Recipe = ADAM, stage: int | None = None) -> Bill:
    """Return the peak memory of one GPU of a pipeline stage, by category. stage=None selects the most expensive stage.

    The last stage also stores the inputs of the final norm and the output layer, and the logits in float32, sharded
    over tp ranks. The first stage also stores the embedding's dropout mask. Library buffers aren't counted.
    """
    if stage is None:
        return max((bill(config, layout, recipe, stage) for stage in range(layout.pp)), key=lambda b: b.total)
    parameters = rank_parameters(config, layout, stage)
    tokens = layout.micro_batch * config.seq_length
    of_layer = layer_activations(
        config, layout.micro_batch, layout.tp, sequence_parallel=layout.sequence_parallel, recompute=layout.recompute
    )
    outside = tokens * config.hidden_size // (layout.tp if layout.sequence_parallel else 1)  # elements
    kept = layers_of_stage(config.num_layers, layout.pp, stage) * sum(of_layer.values())
    kept += outside * (stage == 0 and config.dropout > 0)
    activations = int(kept * micro_batches_in_flight(config, layout, stage))
    if stage == layout.pp - 1:
        activations += 4 * outside + 4 * tokens * -(-config.vocab_size // layout.tp)
    return Bill(
        weights=recipe.weights * parameters,
        gradients=recipe.gradients * parameters,
        optimizer=recipe.optimizer * parameters,
        activations=activations,
    )


def micro_batches_in_flight(config: GPTConfig, layout: Layout, stage: int) -> float:
    """Return the largest number of micro-batches whose activations a stage stores at the same time.

    With 1F1B, a stage stores pp - stage of them. With v chunks per rank, the number can be a fraction. The first rank
    starts 2(pp-1) + (v-1)pp + 1 chunks before it finishes one, and a chunk is 1/v of a stage, so it stores 1 +
    (pp-1)/(pp v) times as much as with 1F1B (Narayanan et al. 2021, section 2.2; Korthikanti et al. 2022, section
    4.2.3). Raises ValueError if the layers or micro-batches can't be interleaved.
    """
    pp, v, m = layout.pp, layout.chunks, layout.steps
    if v == 1:
        return min(pp - stage, m)
    if pp == 1 or config.num_layers % (pp * v) or m % pp:
        raise ValueError(
            f"chunks={v} on pp={pp} stages need at least two stages, num_layers={config.num_layers} divisible by "
            f"pp chunks={pp * v}, and micro_batches={m} divisible by pp"
        )
    return min(2 * (pp - stage - 1) + (v - 1) * pp + 1, m * v) / v
