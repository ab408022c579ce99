"""A model and a text that are small enough to train in a test, and the same training written out in plain PyTorch."""

import math
import random
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tplab.capstone.data.prepare import Batches, prepare
from tplab.capstone.settings.settings import Settings
from tplab.gpt.model import ParallelGPT

SMALL = Settings(
    vocab_size=300, num_layers=2, hidden_size=32, num_heads=4, seq_length=16, precision="float64", steps=8,
    batch_size=8, micro_batch_size=8, learning_rate=2e-2, min_learning_rate=1e-3, warmup_steps=3, max_norm=0.5, seed=3,
    evaluate_every=0, evaluation_batches=1, sample_tokens=0, save_every=0, async_save=False,
)  # fmt: skip


def write_text(folder: Path) -> Path:
    """Some files of made-up code, always the same."""
    chance = random.Random(0)
    folder.mkdir()
    names = ["rank", "group", "tensor", "shard", "weight", "bias", "token"]
    for number in range(30):
        lines = [
            f"def {chance.choice(names)}_{chance.randrange(9)}({chance.choice(names)}):\n"
            f"    return {chance.choice(names)} + {chance.randrange(100)}\n"
            for _ in range(12)
        ]
        (folder / f"part_{number}.txt").write_text("\n".join(lines))
    return folder


def small(text: Path, folder: str, **changes: object) -> Settings:
    """Settings for a run in a folder beside the text; runs beside each other share its tokens."""
    return replace(SMALL, data=str(text), folder=str(text.parent / folder), **changes)


def plain_losses(settings: Settings) -> tuple[list[float], list[float]]:
    """Losses and norms of the run, on one process, from the whole batch at once: torch, and nothing of tplab's layers.

    The first weights are those of the course's model, and the batches those of the course's text.
    """
    config = settings.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        drawn = ParallelGPT(config, dtype=torch.float32).state_dict()
    weights = {name: value.double().clone() for name, value in drawn.items()}
    weights["embedding.weight"] = weights["embedding.weight"][: config.vocab_size]
    weights = {name: value.requires_grad_() for name, value in weights.items()}
    small_ones = [value for name, value in weights.items() if name.endswith("bias") or "norm" in name]
    matrices = [value for name, value in weights.items() if not (name.endswith("bias") or "norm" in name)]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": small_ones, "weight_decay": 0.0}],
        betas=(settings.beta1, settings.beta2),
        fused=False,
    )
    batches = Batches(prepare(settings).train, settings.seq_length, settings.batch_size, settings.seed)
    losses, norms = [], []
    for step in range(settings.steps):
        ids, targets = batches.batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(
            logits(weights, ids, config.num_layers, config.num_heads).flatten(0, 1), targets.flatten()
        )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), settings.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate(step + 1, settings)
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms


def logits(weights: dict[str, Tensor], ids: Tensor, num_layers: int, num_heads: int) -> Tensor:
    """ids [b, s] -> [b, s, v], of a GPT-2 with these weights."""

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    (b, s), table = ids.shape, weights["embedding.weight"]
    hidden = torch.full((s, s), -math.inf, dtype=table.dtype).triu(1)
    x = table[ids] + weights["positions.weight"][:s]  # [b, s, h]
    for number in range(num_layers):
        layer = f"layers.{number}"
        q, k, v = linear(norm(x, f"{layer}.attention_norm"), f"{layer}.attention.qkv").chunk(3, -1)
        q, k, v = (part.view(b, s, num_heads, -1).transpose(1, 2) for part in (q, k, v))  # [b, n, s, d]
        scores = q @ k.mT / math.sqrt(q.shape[-1]) + hidden  # [b, n, s, s]
        x = x + linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), f"{layer}.attention.out")
        y = F.gelu(linear(norm(x, f"{layer}.mlp_norm"), f"{layer}.mlp.up"))
        x = x + linear(y, f"{layer}.mlp.down")
    return norm(x, "final_norm") @ table.T


def rate(step: int, settings: Settings) -> float:
    """The learning rate by hand: a line, then a cosine."""
    if step < settings.warmup_steps:
        return settings.learning_rate / settings.warmup_steps * step
    angle = math.pi * (step - settings.warmup_steps) / (settings.steps - settings.warmup_steps)
    share = 0.5 + 0.5 * math.cos(angle)
    return share * settings.learning_rate + (1 - share) * settings.min_learning_rate
