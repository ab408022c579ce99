"""Chapter 13: a GPT, split into the stages of a pipeline.

    first stage    ids [b, s] -> embedding, positions, dropout, its layers -> x [b, s, h]
    in between     x [b, s, h] -> layers -> x [b, s, h]
    last stage     x [b, s, h] -> layers, final norm, output layer -> logits_r [b, s, v/p]

p is the number of ranks that share a stage through tensor parallelism. The output of a stage is replicated, so each of
these ranks sends it to the rank with the same index in the next stage. With sequence parallelism, x is [b, s/p, h]
everywhere, so each rank sends only its own tokens.

Every parameter has the same name as in the full model. If the output layer is tied, the last stage has a copy of the
embedding, with the same name. `Pipeline(tied=stage.tied)` keeps it identical to the first stage's.
"""

import copy
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from tplab.collectives.by_hand import rank_and_size
from tplab.gpt.model import ParallelGPT
from tplab.sequence.linear import gather_linear
from tplab.tensor.cross_entropy import vocab_parallel_cross_entropy
from tplab.tensor.embedding import parallel_logits
from tplab.tensor.region import column_linear
from tplab.tensor.rng import RNGTracker, checkpoint, dropout
from tplab.tensor.sharding import shard


class GPTStage(nn.Module):
    """Layers `first` to `stop` - 1 of a ParallelGPT, plus the embedding on the first stage and the head on the last.

    The stage shares the modules of `model`, which may be a SequenceParallelGPT. Only a tied embedding is copied.
    rng     random states for dropout; None means torch's current state
    """

    def __init__(self, model: ParallelGPT, first: int, stop: int, rng: RNGTracker | None = None) -> None:
        super().__init__()
        self.config, self.group, self.region, self.rng = model.config, model.group, model.region, rng
        self.float32_residual, self.recompute = model.float32_residual, model.recompute
        self.async_grad_allreduce = model.async_grad_allreduce
        self.is_first, self.is_last = first == 0, stop == len(model.layers)
        self.embedding = model.embedding if self.is_first else None
        self.positions = model.positions if self.is_first else None
        self.layers = nn.ModuleDict({str(number): model.layers[number] for number in range(first, stop)})
        self.final_norm = model.final_norm if self.is_last else None
        self.head = model.head if self.is_last else None
        if self.is_last and model.head is None and not self.is_first:
            self.embedding = copy.deepcopy(model.embedding)  # only for the output layer

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self._embed(x)  # [b, s, h]
        for layer in self.layers.values():
            step = partial(layer, rng=self.rng)
            if self.recompute == "layers" and self.training and torch.is_grad_enabled():
                x = checkpoint(step, x, tracker=self.rng or RNGTracker())
            else:
                x = step(x)  # [b, s, h]
        if self.final_norm is None:
            return x
        x = self.final_norm(x).to(self._output_weight().dtype)  # [b, s, h]
        linear = gather_linear if self.region.sequence_parallel else column_linear
        return parallel_logits(
            x, self._output_weight(), linear=linear, async_grad_allreduce=self.async_grad_allreduce, group=self.group
        )  # [b, s, v/p]

    def loss_sum(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the sum of the tokens' losses, for logits [b, s, v/p] and target [b, s], for use in `Pipeline`."""
        return vocab_parallel_cross_entropy(
            logits, target, reduction="sum", vocab_size=self.config.vocab_size, group=self.group
        )

    @property
    def tied(self) -> nn.Parameter | None:
        """This stage's copy of the table that the first and last stages share, or None."""
        if not self.config.tied_embedding or self.is_first == self.is_last:
            return None
        return self._output_weight() if self.is_last else self.embedding.weight  # type: ignore[union-attr]

    def _embed(self, ids: Tensor) -> Tensor:
        assert self.embedding is not None
        x = self.embedding(ids)  # [b, s, h]
        if self.positions is not None:
            x = x + self.positions(self._places(ids))
        if self.float32_residual:
            x = x.to(torch.promote_types(x.dtype, torch.float32))
        return dropout(x, self.config.dropout, self.training, sharded=self.region.sequence_parallel, rng=self.rng)

    def _places(self, ids: Tensor) -> Tensor:
        """Return the positions of this rank's tokens, [s] or [s/p]."""
        if ids.shape[1] > self.config.seq_length:
            raise ValueError(f"{ids.shape[1]} tokens are more than seq_length={self.config.seq_length}")
        places = torch.arange(ids.shape[1], device=ids.device)
        return shard(places, 0, *rank_and_size(self.group)) if self.region.sequence_parallel else places

    def _output_weight(self) -> nn.Parameter:
        table = self.head or self.embedding
        assert table is not None
        return table.weight


def gpt_stages(model: ParallelGPT, num_stages: int | Sequence[int], rng: RNGTracker | None = None) -> list[GPTStage]:
    """Split the model into stages and return all of them. Each rank keeps its own stages and discards the rest.

    num_stages    the number of stages, which then have equally many layers, or a list with each stage's number of
                  layers. The last stage also computes the output layer, so fewer layers there can balance the stages

    Raises ValueError if the layers can't be divided evenly, or if the list doesn't add up to the number of layers.
    """
    num_layers = len(model.layers)
    if isinstance(num_stages, int):
        if num_stages < 1 or num_layers % num_stages:
            raise ValueError(
                f"{num_layers} layers can't be divided evenly over {num_stages} stages: pass a list with the number of "
                "layers of each stage"
            )
        num_stages = [num_layers // num_stages] * num_stages
    if min(num_stages) < 1 or sum(num_stages) != num_layers:
        raise ValueError(
            f"stages of {list(num_stages)} layers have {sum(num_stages)} in all; the model has {num_layers}, and every "
            "stage needs one at least"
        )
    stops = list(accumulate(num_stages))
    return [GPTStage(model, stop - layers, stop, rng) for layers, stop in zip(num_stages, stops, strict=True)]
