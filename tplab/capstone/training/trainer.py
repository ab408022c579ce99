"""Training steps on one rank: forward, backward, all-reduces of gradients, clipping, optimizer step.

    micro-batch 1..m-1   forward, backward             tp inside the layers; gradients accumulate here
    micro-batch m        forward, backward             full buckets of gradients are sent in the background  dp
    update               the remaining sums, the norm, clipping, AdamW (`tplab.cluster.training_step`)       dp, tp, pp

All sequences have the same length, so averaging the mean losses of micro-batches and replicas gives the overall mean.

A micro-batch's dropout seed is computed from the step and the position of the micro-batch in the full batch. So a
resumed run drops the same elements as an uninterrupted one, no matter which replica computes the micro-batch. Changing
tp or pp does change these elements, because each tp rank and each stage draws from a separate random state.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from tplab.capstone.data.batches import Batches
from tplab.capstone.data.prepare import TokenFiles
from tplab.capstone.data.tokenizer import END
from tplab.capstone.learners_loop import learning_rate
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.build_model import for_generation, training_step
from tplab.capstone.training.optimizer import adamw_options
from tplab.capstone.training.ranks import Ranks
from tplab.cluster.three_dimensions import dropout_seed
from tplab.data.grid import Grid
from tplab.data.zero_state import unsharded
from tplab.gpt.generation import generate
from tplab.pipeline.executor import Pipeline
from tplab.pipeline.p2p import Channels
from tplab.pipeline.schedules import one_f_one_b
from tplab.pipeline.stages import GPTStage
from tplab.runtime import device
from tplab.tensor.rng import RNGTracker, seed_all

TEMPERATURE, TOP_K = 0.8, 40  # for generating samples


class Trainer:
    """Trains a model in place, step by step, evaluates it, and generates text with it. Every rank creates one."""

    def __init__(self, model: nn.Module, settings: Settings, ranks: Ranks) -> None:
        self.model, self.settings, self.ranks = model, settings, ranks
        self.pipeline = self._pipeline() if settings.pp > 1 else None
        self.training = training_step(
            model, AdamW, ranks.mesh, max_norm=settings.max_norm or None, check=False, zero=settings.zero,
            pipeline=self.pipeline, **adamw_options(model, settings),
        )  # fmt: skip
        self.takes_rng = "rng" in inspect.signature(model.forward).parameters
        self._number = 0

    def run(self, step: int, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Run step number `step` (from 1) on this replica's ids and targets, [B/dp, s] each. A target is the next id.

        Returns the mean loss in nats per token, as float64 (0 on stages other than the last), and the norm of the full
        gradient before clipping. Both are scalars on the device, so this rank doesn't wait for the GPU. If the norm
        isn't finite, nothing was updated.
        """
        self._number, m = step, self.settings.micro_batches
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        batches = ids.chunk(m), targets.chunk(m)
        if self.pipeline is not None:
            with self.training.micro_batch():
                loss = self.pipeline.step(*batches, total=targets.numel())
            total += 0 if loss is None else loss
        else:
            for k, (x, y) in enumerate(zip(*batches, strict=True)):
                with self.training.micro_batch(last=k == m - 1):
                    loss = self._forward(k, x, y) / m
                    loss.backward()
                total += loss.detach()
        for group in self.training.torch_optimizer.param_groups:
            group["lr"] = learning_rate(step, self.settings)
        return total, self.training.update()

    @torch.no_grad()
    def loss(self, held_out: Batches, count: int) -> float:
        """Return the mean loss of `count` batches in nats per token. All ranks call this and get the same result."""
        m, place = self.settings.micro_batches, self.ranks.place
        total = zero = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        self.model.eval()
        for number in range(count):
            ids, targets = (tensor.to(self.ranks.device) for tensor in held_out.own(number, place.dp, self.settings.dp))
            batches = ids.chunk(m), targets.chunk(m)  # [B/dp/m, s] each
            if self.pipeline is not None:
                loss = self.pipeline.evaluate(*batches, total=targets.numel())
                mean = zero if loss is None else zero + loss
            else:
                mean = zero + sum(self._forward(k, x, y) / m for k, (x, y) in enumerate(zip(*batches, strict=True)))
            total = total + mean / count
        self.model.train()
        return self.ranks.mean(total)

    def sample(self, tokens: TokenFiles, number: int) -> str:
        """Return the prompt and `sample_tokens` random tokens, which `number` determines (see `write`)."""
        settings, seed = self.settings, self.settings.seed + number
        with unsharded(self.training.optimizer):
            return write(self.model, settings, tokens, settings.prompt, settings.sample_tokens, seed=seed)

    def _forward(self, k: int, ids: Tensor, targets: Tensor) -> Tensor:
        rng = self._dropout(k)
        drawn = {"rng": rng} if rng is not None and self.takes_rng else {}
        with lower_precision(self.settings, self.ranks.device):
            return self.model(ids, targets, **drawn)

    def _pipeline(self) -> Pipeline:
        stage, settings, ranks = self.model, self.settings, self.ranks
        assert isinstance(stage, GPTStage)
        tokens = settings.seq_length // (settings.tp if settings.sequence_parallel else 1)
        return Pipeline(
            [stage], one_f_one_b(settings.pp, settings.micro_batches), loss_sum=stage.loss_sum, tied=stage.tied,
            shape=(settings.micro_batch_size, tokens, settings.hidden_size), dtype=next(stage.parameters()).dtype,
            device=ranks.device, channels=Channels(ranks.group("pp")), around=self._around,
        )  # fmt: skip

    @contextmanager
    def _around(self, k: int) -> Iterator[None]:
        """Context manager that sets the random states and the precision for this stage's forward on micro-batch k."""
        self.model.rng = self._dropout(k)  # type: ignore[assignment]
        with lower_precision(self.settings, self.ranks.device):
            yield

    def _dropout(self, k: int) -> RNGTracker | None:
        """Return the random states for micro-batch k of this replica, or None if nothing is dropped."""
        settings = self.settings
        if not settings.dropout or not self.model.training:
            return None
        grid = Grid(settings.dp, settings.pp, settings.tp)
        seed = dropout_seed(settings.seed, grid, self.ranks.place, self._number - 1, settings.micro_batches, k)
        return seed_all(seed, self.ranks.group("tp"))


def write(
    model: nn.Module, settings: Settings, tokens: TokenFiles, prompt: str, count: int, *,
    temperature: float = TEMPERATURE, seed: int = 0,
) -> str:  # fmt: skip
    """Return the prompt and `count` random tokens, or fewer if the model ends the text earlier. All ranks call this.

    seed    the same seed gives the same text

    The model can't be a pipeline stage. An empty prompt means the beginning of a text, which is where the text before
    it has ended. Of a prompt longer than seq_length, the model reads only the end. Once the text fills all positions,
    the model continues from the second half of what it has read, with a new cache.
    """
    writer, length, left = for_generation(model), settings.seq_length, count
    generator = torch.Generator(device()).manual_seed(seed)
    ids = tokens.tokenizer.encode(prompt).ids
    read = (ids or [END])[-length:]
    while left:
        more = min(left, length + 1 - len(read))  # the last token isn't read, so it needs no position
        with lower_precision(settings, device()):
            text = generate(
                writer, torch.tensor([read], device=device()), more, temperature=temperature, top_k=TOP_K,
                stop_id=END, vocab_size=tokens.vocab_size, generator=generator,
            )  # fmt: skip
        new = text[0, len(read) :].tolist()
        if END in new:
            ids += new[: new.index(END)]
            break
        ids, left, read = ids + new, left - more, (read + new)[-max(1, length // 2) :]
    return tokens.tokenizer.decode(ids)


def lower_precision(settings: Settings, place: torch.device) -> torch.autocast:
    """Context manager that runs matmuls in bfloat16 if the settings say so."""
    return torch.autocast(place.type, torch.bfloat16, enabled=settings.precision == "bfloat16")
