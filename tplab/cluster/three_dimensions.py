"""Chapter 14: a GPT trained with data, pipeline and tensor parallelism at the same time.

    step:   ids, targets of the full batch -> this replica's sequences -> m micro-batches
            tokens_of_all                      the number of tokens, over all replicas        dp
            pipeline.step                      losses and gradients of the micro-batches      tp in layers, pp between
            data.finish()                      the replicas' gradients are added up           dp
            clip_grad_norm                     one norm for the full model                    tp, pp
            optimizer.step()                   each rank updates its own parameters

The loss of each token is divided by the number of tokens in the full batch. So losses and gradients are only ever added
up, over micro-batches and replicas, and we never take a mean of means. The model matches that of a single-process run
up to the order of additions. With `zero`, the optimizer's state is sharded over the replicas, too (ZeRO-1). (Narayanan
et al. 2021, "Efficient large-scale language model training on GPU clusters": PTD-P.)
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from tplab.data.data_parallel import DataParallel, tokens_of_all
from tplab.data.grad_norm import clip, grad_norm, grad_norm_of_pieces
from tplab.data.grid import Grid, mesh
from tplab.data.zero import ZeRO1
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig
from tplab.pipeline.executor import Pipeline, counted_tokens
from tplab.pipeline.p2p import Channels
from tplab.pipeline.schedules import one_f_one_b
from tplab.pipeline.stages import gpt_stages
from tplab.runtime import device
from tplab.tensor.rng import seed_all
from tplab.tensor.sharding import divide

SEEDS_APART = 10_000  # see `tplab.tensor.rng.seed_all`


class Training3D:
    """One rank of a GPT training run on a grid of ranks. Every rank creates it with the same arguments.

    micro_batches       number of micro-batches per replica and step
    max_norm            the norm to which gradients are clipped; None: no clipping
    zero                shard the optimizer's state over the replicas
    defaults            options of the optimizer

    `norm` is the gradient norm of the last step before clipping, or None without `max_norm`. Raises ValueError if the
    grid doesn't match the ranks or the model.
    """

    def __init__(
        self,
        config: GPTConfig,
        grid: Grid,
        optimizer_class: type[Optimizer],
        *,
        micro_batches: int,
        micro_batch_size: int,
        seed: int = 0,
        max_norm: float | None = None,
        zero: bool = False,
        dtype: torch.dtype = torch.float32,
        **defaults: Any,
    ) -> None:
        self.grid, self.mesh, self.max_norm = grid, mesh(grid.dp, grid.pp, grid.tp), max_norm
        self.place = grid.place(dist.get_rank())
        self.micro_batches, self.micro_batch_size = micro_batches, micro_batch_size
        self.dp, self.pp, tp = (self.mesh.get_group(name) for name in ("dp", "pp", "tp"))

        seed_all(seed, tp)  # the same weights in every replica
        model = ParallelGPT(config, group=tp, device=device(), dtype=dtype)
        rng = seed_all(seed + SEEDS_APART * (1 + self.place.dp * grid.pp + self.place.pp), tp)
        self.stage = gpt_stages(model, grid.pp, rng)[self.place.pp]
        self.pipeline = Pipeline(
            [self.stage],
            one_f_one_b(grid.pp, micro_batches),
            shape=(micro_batch_size, config.seq_length, config.hidden_size),
            dtype=dtype,
            device=device(),
            loss_sum=self.stage.loss_sum,
            tied=self.stage.tied,
            channels=Channels(self.pp),
        )
        self.parameters = list(self.stage.parameters())
        self.data: DataParallel | None = None
        self.optimizer: ZeRO1 | Optimizer
        if zero:
            self.optimizer = ZeRO1(self.parameters, optimizer_class, average=False, group=self.dp, **defaults)
        else:
            self.data = DataParallel(self.stage, average=False, group=self.dp)
            self.optimizer = optimizer_class(self.parameters, **defaults)
        self.norm: Tensor | None = None

    def step(self, ids: Tensor, targets: Tensor) -> float:
        """Train one step on the full batch [B, s], which is the same on all ranks. Returns its mean loss on every rank.

        Raises ValueError unless B = dp · micro_batches · micro_batch_size.
        """
        ids, targets = self._own(ids), self._own(targets)  # [B/dp, s]
        total = tokens_of_all(counted_tokens(targets), self.dp)
        self.optimizer.zero_grad()
        loss = self._backward(ids, targets, total)
        self._clip()
        self.optimizer.step()
        return self._everywhere(loss)

    def _own(self, batch: Tensor) -> Tensor:
        wanted = self.grid.dp * self.micro_batches * self.micro_batch_size
        if batch.shape[0] != wanted:
            raise ValueError(
                f"a batch of {batch.shape[0]} sequences: dp={self.grid.dp} replicas of {self.micro_batches} "
                f"micro-batches of {self.micro_batch_size} take {wanted}"
            )
        each = divide(wanted, self.grid.dp)
        return batch[self.place.dp * each : (self.place.dp + 1) * each].to(device())

    def _backward(self, ids: Tensor, targets: Tensor, total: int) -> Tensor | None:
        m = self.micro_batches
        if self.data is None:
            loss = self.pipeline.step(ids.chunk(m), targets.chunk(m), total=total)
            self.optimizer.finish()  # type: ignore[union-attr]
            return loss
        with self.data.no_sync():  # each micro-batch adds to the gradients
            loss = self.pipeline.step(ids.chunk(m), targets.chunk(m), total=total)
        self.data.finish()
        return loss

    def _clip(self) -> None:
        if self.max_norm is None:
            return
        tied = self.stage.tied
        if isinstance(self.optimizer, ZeRO1):
            pieces = self.optimizer.pieces()
            self.norm = grad_norm_of_pieces(pieces, self.mesh, tied=tied)
            gradients = [piece.values for piece in pieces]
        else:
            self.norm = grad_norm(self.parameters, self.mesh, tied=tied)
            gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        clip(gradients, self.norm, self.max_norm)

    def _everywhere(self, loss: Tensor | None) -> float:
        """Return the full loss on every rank, by summing the parts that the replicas' last stages have."""
        total = torch.zeros((), dtype=torch.float64, device=device())
        if loss is not None:
            total += loss.detach()
        for group in (self.pp, self.dp):
            dist.all_reduce(total, group=group)
        return float(total)
