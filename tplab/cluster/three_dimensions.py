"""Chapter 14: a GPT trained with data, pipeline and tensor parallelism at the same time.

    step:   ids, targets of the full batch -> this replica's sequences -> m micro-batches
            tokens_of_all          the number of tokens, over all replicas        dp
            pipeline.step          losses and gradients of the micro-batches      tp in layers, pp between
            training.update        the sums that complete the gradients, clipping, the optimizer (`TrainingStep`)

The loss of each token is divided by the number of tokens in the full batch. So losses and gradients are only ever added
up, over micro-batches and replicas, and we never take a mean of means. The trained model matches that of a
single-process run, except that the numbers are added in a different order. (Narayanan et al. 2021, "Efficient
large-scale language model training on GPU clusters", which calls this PTD-P.)

Dropout's random states are derived from the micro-batch's index within the run, as in the capstone. So a checkpoint
only has to store the number of steps. A resumed run drops the same elements as an uninterrupted one, even with another
dp, as long as the full batch has the same micro-batches. If anything else changes which elements are dropped, such as
tp or pp, `load` warns and names the cause.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from tplab.checkpoint.files import together
from tplab.checkpoint.sharded import load_sharded, save_sharded
from tplab.cluster.training_step import TrainingStep
from tplab.collectives.subgroups import split
from tplab.data.data_parallel import tokens_of_all
from tplab.data.grid import Grid, mesh
from tplab.data.zero_state import FullOptimizer, unsharded
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
OURS = "Training3D"  # the entry that `save` adds to a checkpoint's `extra`, and `load` removes


class Training3D:
    """One rank of a GPT training run on a grid of ranks. Every rank creates it with the same arguments.

    micro_batches       the number of micro-batches per replica and step
    layers_per_stage    a list with the number of layers in each stage; None means the same number for all
    schedule            (stages, micro-batches) -> the pipeline's schedule, such as `one_f_one_b` or `zero_bubble`
    sequence_parallel   split the activations between the blocks over tp (chapter 12)
    max_norm            the norm to which gradients are clipped; None means no clipping
    zero                the ZeRO stage, 0 to 3, which shards over the replicas
    defaults            options for the optimizer

    `steps` is the number of steps so far, including those before the loaded checkpoint. `norm` is the gradient norm of
    the last step, before clipping. Raises ValueError if the grid doesn't match the ranks or the model.
    """

    def __init__(
        self,
        config: GPTConfig,
        grid: Grid,
        optimizer_class: type[Optimizer],
        *,
        micro_batches: int,
        micro_batch_size: int,
        layers_per_stage: Sequence[int] | None = None,
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
        if layers_per_stage is not None and len(layers_per_stage) != grid.pp:
            raise ValueError(
                f"layers_per_stage={list(layers_per_stage)} has {len(layers_per_stage)} stages; pp={grid.pp}"
            )
        self.micro_batches, self.micro_batch_size = micro_batches, micro_batch_size
        self.dp, self.pp, self.tp = (self.mesh.get_group(name) for name in ("dp", "pp", "tp"))
        tp, self.seed, self.steps = self.tp, seed, 0

        seed_all(seed, tp)  # the same weights in every replica
        gpt = SequenceParallelGPT if sequence_parallel else ParallelGPT
        model = gpt(config, group=tp, device=device(), dtype=dtype)
        stages = gpt_stages(model, layers_per_stage or grid.pp)
        self.stage, self.layers_per_stage = stages[self.place.pp], [len(stage.layers) for stage in stages]
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

    def evaluate(self, ids: Tensor, targets: Tensor) -> float:
        """Return the mean loss of a full batch [B, s] on every rank, without dropout and without training."""
        own_ids, own_targets, total = self._own(ids, targets)
        was_training = self.stage.training
        self.stage.eval()
        try:
            return self._everywhere(self.pipeline.evaluate(own_ids, own_targets, total=total))
        finally:
            self.stage.train(was_training)

    def save(self, path: str | PathLike, extra: Mapping[str, Any] | None = None) -> None:
        """Save a checkpoint of the full model and optimizer, which any grid can load (`save_sharded`).

        All ranks must call this, and the first replica writes the files. `extra` is as in `save_sharded`, but the name
        "Training3D" is reserved.
        """
        if OURS in (extra or {}):
            raise ValueError(f"extra has an entry {OURS!r}, where the number of steps is saved: choose another name")
        extra = {**(extra or {}), OURS: {"steps": self.steps, **self._determines_dropout()}}
        replica = self.replica  # all ranks have to create this group together
        with unsharded(self.training.optimizer) as optimizer:
            if isinstance(optimizer, FullOptimizer):
                optimizer.gather()

            def write() -> None:
                if self.place.dp == 0:
                    save_sharded(path, self.stage, optimizer=optimizer, extra=extra, group=self.tp, replica=replica)

            together(write, None)

    def load(self, path: str | PathLike) -> dict[str, Any]:
        """Load a checkpoint that was saved on any grid, and return its `extra`. All ranks must call this.

        With dropout, the first rank warns if the resumed run will drop different elements than an uninterrupted run
        would have dropped, and says why.
        """
        self.training.abandon()
        with unsharded(self.training.optimizer) as optimizer:
            extra = load_sharded(path, self.stage, optimizer=optimizer, group=self.tp, replica=self.replica)
        saved = extra.pop(OURS, {})
        self.steps = saved.pop("steps", 0)
        now = self._determines_dropout()
        changed = [f"{name} was {saved[name]} and is {now[name]} now" for name in saved if saved[name] != now.get(name)]
        if not saved:
            changed = ["the checkpoint doesn't say how many steps the run has done"]
        if changed and self.stage.config.dropout and dist.get_rank() == 0:
            warnings.warn(
                f"{path}: from here on, dropout drops different elements than an uninterrupted run would have dropped, "
                f"because {', and '.join(changed)}. The losses will differ slightly from those of that run",
                stacklevel=2,
            )
        return extra

    def _determines_dropout(self) -> dict[str, Any]:
        """Return everything that determines which elements a step drops, apart from the step's number."""
        return {
            "seed": self.seed,
            "tp": self.grid.tp,
            "layers_per_stage": self.layers_per_stage,
            "sequence_parallel": self.stage.region.sequence_parallel,
            "micro_batch_size": self.micro_batch_size,
            "micro-batches of the full batch": self.grid.dp * self.micro_batches,
            "device": device().type,
        }

    def _seed_dropout(self, k: int) -> AbstractContextManager:
        """Set the random states for the forward pass of this replica's micro-batch k."""
        if not self.stage.config.dropout:
            return nullcontext()
        # the micro-batch's index within the run
        number = (self.steps * self.grid.dp + self.place.dp) * self.micro_batches + k
        self.stage.rng = states_from(self.seed + SEEDS_APART * (1 + number * self.grid.pp + self.place.pp), self.tp)
        return nullcontext()

    @cached_property
    def replica(self) -> ProcessGroup:
        """The group of all ranks of this rank's replica, over all stages. All ranks create it together on first use."""
        ranks = range(self.grid.size)
        return split(None, [[r for r in ranks if self.grid.place(r).dp == dp] for dp in range(self.grid.dp)])

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
