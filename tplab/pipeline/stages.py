"""Chapter 13: a GPT, split into the stages of a pipeline.

    first stage    ids [b, s] -> embedding, positions, dropout, its layers -> x [b, s, h]
    in between     x [b, s, h] -> layers -> x [b, s, h]
    last stage     x [b, s, h] -> layers, final norm, output layer -> logits_r [b, s, v/p]

p is the number of ranks that share a stage by tensor parallelism. The output of a stage is replicated, so each of these
ranks sends it to the rank of the next stage that has the same index there.

Every parameter has the same name as in the full model. A tied output layer is the exception: the last stage has a copy
of the embedding, `output.weight`, which `Pipeline(tied=stage.tied)` keeps identical to the first stage's.
"""

import copy
from functools import partial

import torch
from torch import Tensor, nn

from tplab.gpt.model import ParallelGPT
from tplab.tensor.cross_entropy import vocab_parallel_cross_entropy
from tplab.tensor.embedding import parallel_logits
from tplab.tensor.rng import RNGTracker, checkpoint, dropout


class GPTStage(nn.Module):
    """Layers `first` to `stop` - 1 of a ParallelGPT, with its embedding or output layer on the first or last stage.

    The stage shares the modules of `model`. Only a tied embedding is copied.
    rng     random states for dropout; None: torch's current state
    """

    def __init__(self, model: ParallelGPT, first: int, stop: int, rng: RNGTracker | None = None) -> None:
        super().__init__()
        self.config, self.group, self.rng = model.config, model.group, rng
        self.float32_residual, self.recompute = model.float32_residual, model.recompute
        self.async_grad_allreduce = model.async_grad_allreduce
        self.is_first, self.is_last = first == 0, stop == len(model.layers)
        self.embedding = model.embedding if self.is_first else None
        self.positions = model.positions if self.is_first else None
        self.layers = nn.ModuleDict({str(number): model.layers[number] for number in range(first, stop)})
        self.final_norm = model.final_norm if self.is_last else None
        self.head = model.head if self.is_last else None
        self.output: nn.Module | None = None
        if self.is_last and model.head is None and not self.is_first:
            self.output = copy.deepcopy(model.embedding)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self._embed(x)  # [b, s, h]
        for layer in self.layers.values():
            step = partial(layer, rng=self.rng)
            if self.recompute == "layers" and self.training and torch.is_grad_enabled():
                x = checkpoint(step, x, tracker=self.rng or RNGTracker(self.group))
            else:
                x = step(x)  # [b, s, h]
        if self.final_norm is None:
            return x
        weight = self._output_weight()  # [v/p, h]
        x = self.final_norm(x).to(weight.dtype)
        return parallel_logits(x, weight, async_grad_allreduce=self.async_grad_allreduce, group=self.group)

    def loss_sum(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the sum of the tokens' losses, for logits [b, s, v/p] and target [b, s], as `Pipeline` needs it."""
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
            x = x + self.positions.weight[: ids.shape[1]]
        if self.float32_residual:
            x = x.to(torch.promote_types(x.dtype, torch.float32))
        return dropout(x, self.config.dropout, self.training, sharded=False, rng=self.rng)

    def _output_weight(self) -> nn.Parameter:
        table = self.head or self.output or self.embedding
        assert table is not None
        return table.weight  # type: ignore[return-value]


def gpt_stages(model: ParallelGPT, num_stages: int, rng: RNGTracker | None = None) -> list[GPTStage]:
    """Split the model into stages with equal numbers of layers. Each rank keeps one stage and discards the rest.

    Raises ValueError if the layers can't be divided evenly.
    """
    num_layers = len(model.layers)
    if num_stages < 1 or num_layers % num_stages:
        raise ValueError(f"{num_layers} layers can't be cut into {num_stages} stages of equally many")
    each = num_layers // num_stages
    return [GPTStage(model, first, first + each, rng) for first in range(0, num_layers, each)]
