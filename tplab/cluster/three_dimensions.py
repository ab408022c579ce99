"""Chapter 14: a GPT trained with data, pipeline and tensor parallelism at the same time.

    step:   ids, targets of the full batch -> this replica's sequences -> m micro-batches
            tokens_of_all          the number of tokens, over all replicas        dp
            pipeline.step          losses and gradients of the micro-batches      tp in layers, pp between
            training.update        the sums that complete the gradients, clipping, the optimizer (`TrainingStep`)

The loss of each token is divided by the number of tokens in the full batch. So losses and gradients are only ever added
up, over micro-batches and replicas, and we never take a mean of means. The trained model matches that of a
single-process run, except that the numbers are added in a different order. (Narayanan et al. 2021, "Efficient
large-scale language model training on GPU clusters", which calls this PTD-P.)

Dropout's random states are derived from the micro-batch's index within the run. The capstone's program trains on the
same grids. It can also save checkpoints, and continue on another grid.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from tplab.cluster.training_step import TrainingStep
from tplab.data.data_parallel import tokens_of_all
from tplab.data.grid import Grid, Place, mesh
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig
from tplab.pipeline.executor import Pipeline, counted_tokens
from tplab.pipeline.p2p import Channels
from tplab.pipeline.schedules import Schedule, one_f_one_b
from tplab.pipeline.stages import gpt_stages
from tplab.runtime import device
from tplab.sequence.gpt import SequenceParallelGPT
from tplab.sequence.regions import tokens_per_rank
from tplab.tensor.rng import seed_all, states_from

SEEDS_APART = 10_000  # see `tplab.tensor.rng.seed_all`


class Training3D:
    """One rank of a GPT training run on a grid of ranks. Every rank creates it with the same arguments.

    micro_batches       the number of micro-batches per replica and step
    schedule            (stages, micro-batches) -> the pipeline's schedule, such as `one_f_one_b` or `zero_bubble`
    sequence_parallel   split the activations between the blocks over tp (chapter 12)
    max_norm            the norm to which gradients are clipped; None means no clipping
    zero                the ZeRO stage, 0 to 3, which shards over the replicas
    defaults            options for the optimizer

    `steps` is the number of steps so far. `norm` is the gradient norm of the last step, before clipping. Raises
    ValueError if the grid doesn't match the ranks or the model.
    """

    def __init__(
        self,
        config: GPTConfig,
        grid: Grid,
        optimizer_class: type[Optimizer],
        *,
        micro_batches: int,
        micro_batch_size: int,
        schedule: Callable[[int, int], Schedule] = one_f_one_b,
        sequence_parallel: bool = False,
        seed: int = 0,
        max_norm: float | None = None,
        zero: int = 0,
        dtype: torch.dtype = torch.float32,
        **defaults: Any,
    ) -> None:
        self.grid, self.mesh = grid, mesh(grid.dp, grid.pp, grid.tp)
        self.place = grid.place(dist.get_rank())
        self.micro_batches, self.micro_batch_size = micro_batches, micro_batch_size
        self.dp, self.pp, self.tp = (self.mesh.get_group(name) for name in ("dp", "pp", "tp"))
        tp, self.seed, self.steps = self.tp, seed, 0

        seed_all(seed, tp)  # the same weights in every replica
        gpt = SequenceParallelGPT if sequence_parallel else ParallelGPT
        model = gpt(config, group=tp, device=device(), dtype=dtype)
        self.stage = gpt_stages(model, grid.pp)[self.place.pp]
        tokens = tokens_per_rank(config.seq_length, grid.tp) if sequence_parallel else config.seq_length
        self.pipeline = Pipeline(
            [self.stage],
            schedule(grid.pp, micro_batches),
            shape=(micro_batch_size, tokens, config.hidden_size),
            dtype=dtype,
            device=device(),
            loss_sum=self.stage.loss_sum,
            tied=self.stage.tied,
            channels=Channels(self.pp),
            around=self._seed_dropout,
        )
        self.training = TrainingStep(
            self.stage, optimizer_class, mesh=self.mesh, zero=zero, pipeline=self.pipeline, max_norm=max_norm,
            average=False, **defaults,
        )  # fmt: skip
        self.norm: Tensor | None = None

    def step(self, ids: Tensor, targets: Tensor) -> float:
        """Train one step on the full batch [B, s], which is the same on all ranks. Returns its mean loss on every rank.

        Raises ValueError unless B = dp · micro_batches · micro_batch_size.
        """
        own_ids, own_targets, total = self._own(ids, targets)
        with self.training.micro_batch():
            loss = self.pipeline.step(own_ids, own_targets, total=total)
        self.norm = self.training.update()
        self.steps += 1
        return self._everywhere(loss)

    def _seed_dropout(self, k: int) -> AbstractContextManager:
        """Set the random states for the forward pass of this replica's micro-batch k."""
        if not self.stage.config.dropout:
            return nullcontext()
        seed = dropout_seed(self.seed, self.grid, self.place, self.steps, self.micro_batches, k)
        self.stage.rng = states_from(seed, self.tp)
        return nullcontext()

    def _own(self, ids: Tensor, targets: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor], int]:
        """Return this replica's micro-batches, and the number of counted tokens in all replicas."""
        each = self.micro_batches * self.micro_batch_size
        if len(ids) != self.grid.dp * each:
            raise ValueError(
                f"a batch of {len(ids)} sequences: dp={self.grid.dp} replicas of {self.micro_batches} "
                f"micro-batches of {self.micro_batch_size} take {self.grid.dp * each}"
            )
        mine = slice(self.place.dp * each, (self.place.dp + 1) * each)
        ids, targets = ids[mine].to(device()), targets[mine].to(device())  # [B/dp, s]
        total = tokens_of_all(counted_tokens(targets), self.dp)
        return ids.chunk(self.micro_batches), targets.chunk(self.micro_batches), total

    def _everywhere(self, loss: Tensor | None) -> float:
        """Return the full loss on every rank. It's the sum of the parts that the last stages of all replicas have."""
        total = torch.zeros((), dtype=torch.float64, device=device())
        if loss is not None:
            total += loss.detach()
        for group in (self.pp, self.dp):
            dist.all_reduce(total, group=group)
        return float(total)


def dropout_seed(seed: int, grid: Grid, place: Place, step: int, micro_batches: int, k: int) -> int:
    """Return the seed from which a pipeline stage derives its random states for micro-batch k of its replica.

    step             the number of steps before this one
    micro_batches    the number of micro-batches per replica and step

    Every micro-batch of a run gets different seeds for its stages, and the seeds don't depend on tp.
    """
    number = (step * grid.dp + place.dp) * micro_batches + k  # the micro-batch's index within the run
    return seed + SEEDS_APART * (1 + number * grid.pp + place.pp)
