"""Chapter 10: a GPT on p ranks, from the embedding to an output layer that can reuse the embedding's rows.

    ids [b, s] -> embedding, g -> + positions, dropout -> layers -> norm -> f -> x E_r^T -> logits_r [b, s, v/p] -> loss

Each rank has 1/p of the embedding, of the attention weights and of the MLP weights, plus all position embeddings, norms
and the biases that are added after g (the all-reduce of chapter 03). Traffic of a training step on b s tokens, in
elements that are all-reduced:

                       forward                  backward
    embedding, head    b s h                    b s h
    L layers           2 L b s h                2 L b s h
    loss               about 2 b s + 1          none

With the same seed, the model is the same for every p, and every p can load the same full checkpoint
(`full_state_dict`). (Radford et al. 2019, GPT-2; Shoeybi et al. 2019, "Megatron-LM"; Megatron: GPTModel.)
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack, get_args

import torch
from torch import Tensor, nn

from tplab.collectives.by_hand import rank_and_size
from tplab.gpt.transformer import NORMS, ParallelTransformerLayer
from tplab.memory.config import GPTConfig, Recompute, check_tensor_parallel
from tplab.tensor.embedding import VocabParallelEmbedding, parallel_logits
from tplab.tensor.group_module import GroupModule
from tplab.tensor.initialization import InitMethod
from tplab.tensor.kv_cache import KVCache
from tplab.tensor.linear import LayerOptions
from tplab.tensor.linear_cross_entropy import parallel_linear_cross_entropy
from tplab.tensor.region import TENSOR_PARALLEL
from tplab.tensor.rng import RNGTracker, checkpoint, dropout

INIT_STD = 0.02  # as in GPT-2 and Megatron


class ParallelGPT(GroupModule):
    """GPT sharded over p ranks. Maps ids [b, s] to this rank's logits [b, s, v/p] or, given targets, to the mean loss.

    config                    the sizes, see `tplab.memory.config`
    float32_residual          accumulate the residual in float32, even if the model has a different dtype
    recompute                 what backward recomputes, with the same dropout, instead of saving it: "nothing",
                              "attention" (its scores, softmax and dropout, from Q, K and V), or "layers" (each layer,
                              from its input)
    output_init_method        for weights that write to the residual; None: `init_method`, or, if that is None too,
                              normal with std 0.02 / sqrt(2 L)
    async_grad_allreduce      as in ColumnParallelLinear
    options                   see `LayerOptions`; `init_method` is for all other weights, None: normal with std 0.02

    Raises ValueError if the model can't be sharded over p ranks; the message lists the values of p that work.
    """

    positions: nn.Embedding | None
    head: VocabParallelEmbedding | None

    def __init__(
        self,
        config: GPTConfig,
        *,
        float32_residual: bool = False,
        recompute: Recompute = "nothing",
        output_init_method: InitMethod | None = None,
        async_grad_allreduce: bool = False,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        self.config, self.group = config, options.get("group")
        self.region = options.get("region", TENSOR_PARALLEL)
        self.rank, self.world_size = rank_and_size(self.group)
        check_tensor_parallel(config, self.world_size)
        if recompute not in get_args(Recompute):
            raise ValueError(f"recompute={recompute!r} is not one of {', '.join(map(repr, get_args(Recompute)))}")
        self.float32_residual, self.recompute = float32_residual, recompute
        self.async_grad_allreduce = async_grad_allreduce
        normal = partial(nn.init.normal_, std=INIT_STD)
        narrow = partial(nn.init.normal_, std=INIT_STD / math.sqrt(2 * config.num_layers))
        given = options.get("init_method")
        options["init_method"] = first = given or normal
        last = output_init_method or given or narrow
        place: dict[str, Any] = {"device": options.get("device"), "dtype": options.get("dtype")}
        h, norm = config.hidden_size, "layer" if config.bias else "rms"

        self.embedding = VocabParallelEmbedding(config.vocab_size, h, **options)  # [v/p, h]
        self.positions = nn.Embedding(config.seq_length, h, **place) if config.learned_positions else None
        if self.positions is not None:
            self.region.mark(self.positions, "weight")
            with torch.no_grad():
                first(self.positions.weight)
        self.layers = nn.ModuleList(
            ParallelTransformerLayer(
                h,
                config.num_heads,
                config.num_kv_heads,
                config.ffn_hidden_size,
                activation="swiglu" if config.gated else config.activation,
                rotary_base=None if config.learned_positions else config.rotary_base,
                rotary_scaling=config.rotary_scaling,
                bias=config.bias,
                qkv_bias=config.bias or config.qkv_bias,
                norm=norm,
                norm_eps=config.norm_eps,
                hidden_dropout=config.dropout,
                attention_dropout=config.dropout,
                recompute_attention=recompute == "attention",
                output_init_method=last,
                async_grad_allreduce=async_grad_allreduce,
                **options,
            )
            for _ in range(config.num_layers)
        )
        self.final_norm = NORMS[norm](h, eps=config.norm_eps, **place)
        self.region.mark(self.final_norm, "weight", "bias")
        table: dict[str, Any] = {name: value for name, value in options.items() if name != "region"}  # reads all tokens
        self.head = None if config.tied_embedding else VocabParallelEmbedding(config.vocab_size, h, **table)

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        *,
        gather: bool = False,
        rng: RNGTracker | None = None,
    ) -> Tensor:
        """Return this rank's logits [b, s, v/p], or all [b, s, v] with `gather`; with targets, return the mean loss.

        targets    the next token at each position, [b, s]; -100 where there is none
        rng        random states for dropout (`tplab.tensor.rng.seed_all`); None: torch's current state
        """
        x = self.features(ids, rng=rng)
        return self.logits(x, gather=gather) if targets is None else self.loss(x, targets)

    def features(self, ids: Tensor, *, cache: Sequence[KVCache] | None = None, rng: RNGTracker | None = None) -> Tensor:
        """Return the output layer's input [b, s, h] for ids [b, s]. With a cache, the ids continue the cached text."""
        x = self._embed(ids, cache[0].length if cache else 0)  # [b, s, h]
        x = dropout(x, self.config.dropout, self.training, sharded=self.region.sequence_parallel, rng=rng)
        for number, layer in enumerate(self.layers):
            step = partial(layer, cache=cache and cache[number], rng=rng)
            if self.recompute == "layers" and self.training and torch.is_grad_enabled():
                x = checkpoint(step, x, tracker=rng or RNGTracker())
            else:
                x = step(x)  # [b, s, h]
        return self.final_norm(x).to(self.output_weight.dtype)

    def logits(self, x: Tensor, *, gather: bool = False) -> Tensor:
        """Return this rank's logits [b, s, v/p], with padding, or all [b, s, v] with `gather`, given x [b, s, h]."""
        return parallel_logits(
            x, self.output_weight, gather=gather, vocab_size=self.config.vocab_size,
            async_grad_allreduce=self.async_grad_allreduce, group=self.group,
        )  # fmt: skip

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, a scalar, given x [b, s, h] and the target tokens [b, s]."""
        return parallel_linear_cross_entropy(
            x, self.output_weight, targets, vocab_size=self.config.vocab_size, group=self.group
        )

    @property
    def output_weight(self) -> Tensor:
        """This rank's rows [v/p, h] of the output layer's weight, which may be the embedding's."""
        return self.embedding.weight if self.head is None else self.head.weight

    def new_cache(self, batch_size: int, max_length: int) -> list[KVCache]:
        """Return one KV cache per layer for this rank's heads, with room for `max_length` tokens."""
        layers: Any = self.layers
        return [layer.new_cache(batch_size, max_length) for layer in layers]

    def _embed(self, ids: Tensor, past: int) -> Tensor:
        x = self.embedding(ids)  # [b, s, h]
        if self.positions is not None:
            x = x + self.positions(self._places(past, ids))
        return x.to(torch.promote_types(x.dtype, torch.float32)) if self.float32_residual else x

    def _places(self, past: int, ids: Tensor) -> Tensor:
        stop = past + ids.shape[1]
        if stop > self.config.seq_length:
            raise ValueError(
                f"{stop} tokens are more than seq_length={self.config.seq_length}: there are no vectors for the "
                "positions behind it"
            )
        return torch.arange(past, stop, device=ids.device)
