"""Chapter 13: generate text with the stages of a pipeline, token by token.

    stage 0   ids -> x  --[b, 1, h]-->  stage 1   x -> x  --[b, 1, h]-->  stage 2   x -> logits_r [b, v/p]
                                                                                    broadcast to all stages

Only one stage computes at a time, because each token depends on the one before it. Every stage chooses the token from
the same logits, so nothing else has to be sent. Each token takes one message per stage boundary, and a broadcast of the
logits.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tplab.collectives.by_hand import rank_and_size
from tplab.pipeline.stages import GPTStage
from tplab.tensor.embedding import pad_vocab_size
from tplab.tensor.kv_cache import KVCache


class PipelinedGPT(nn.Module):
    """Wraps this rank's stage as the model for `tplab.gpt.generation.generate`. All stages must call it together.

    stage    a stage without sequence parallelism, because a single token can't be split
    group    the ranks of the pipeline, in the order of their stages

    To sample (temperature > 0), pass a generator with the same seed on all ranks. Otherwise, the stages would choose
    different tokens.
    """

    def __init__(self, stage: GPTStage, group: ProcessGroup) -> None:
        super().__init__()
        if stage.region.sequence_parallel:
            raise ValueError("the next token of a text can't be split: use a stage of a ParallelGPT")
        self.stage, self.pipeline = stage, group
        self.config, self.group = stage.config, stage.group
        self.rank, self.world_size = rank_and_size(stage.group)

    def new_cache(self, batch_size: int, max_length: int) -> list[KVCache]:
        """Return one cache per layer of this stage."""
        return [layer.new_cache(batch_size, max_length) for layer in self.stage.layers.values()]  # type: ignore[operator]

    def features(self, ids: Tensor, *, cache: Sequence[KVCache]) -> Tensor:
        """Run the stages on ids [b, s], one after another. Returns the output [b, s, h] of this rank's stage."""
        place, count = rank_and_size(self.pipeline)
        x = ids
        if place > 0:
            x = torch.empty(*ids.shape, self.config.hidden_size, dtype=self._dtype, device=ids.device)  # [b, s, h]
            dist.recv(x, group=self.pipeline, group_src=place - 1)
        x = self.stage.features(x, cache)
        if place < count - 1:
            dist.send(x.to(self._dtype).contiguous(), group=self.pipeline, group_dst=place + 1)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Return this tp rank's logits [b, v/p] on all stages, given the last stage's x [b, h]."""
        last = rank_and_size(self.pipeline)[1] - 1
        if self.stage.is_last:
            logits = self.stage.logits(x).to(self._dtype).contiguous()
        else:
            columns = pad_vocab_size(self.config.vocab_size, self.world_size) // self.world_size
            logits = torch.empty(len(x), columns, dtype=self._dtype, device=x.device)
        dist.broadcast(logits, group=self.pipeline, group_src=last)
        return logits

    @property
    def _dtype(self) -> torch.dtype:
        """The residual's dtype, which is also used for the logits."""
        own = next(self.stage.parameters()).dtype
        return torch.promote_types(own, torch.float32) if self.stage.float32_residual else own
