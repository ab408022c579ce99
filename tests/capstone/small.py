"""A model and a text that are small enough to train in a test, and the same training written out in plain PyTorch."""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tplab.capstone.data.prepare import Batches, prepare
from tplab.capstone.settings.settings import Settings
from tplab.gpt.model import ParallelGPT
from tplab.plain import GPT
from tplab.tensor.full_state import full_state_dict

SMALL = Settings(
    vocab_size=300, num_layers=2, hidden_size=32, num_heads=4, seq_length=16, precision="float64", steps=8,
    batch_size=8, micro_batch_size=8, learning_rate=2e-2, min_learning_rate=1e-3, warmup_steps=3, max_norm=0.5, seed=3,
    evaluate_every=0, evaluation_batches=1, sample_tokens=0, save_every=0, plan=False,
)  # fmt: skip

ONE_RANK = {  # variables of the environment, as torchrun sets them
    "TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip


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


LLAMA: dict[str, Any] = {
    "gated": True, "bias": False, "tied_embedding": False, "learned_positions": False, "num_kv_heads": 2,
    "ffn_hidden_size": 48, "rotary_base": 500.0,
}  # fmt: skip


def small(text: Path, folder: str, **changes: object) -> Settings:
    """Settings for a run in a folder beside the text; runs beside each other share its tokens."""
    return replace(SMALL, data=str(text), folder=str(text.parent / folder), **changes)


def plain_losses(settings: Settings) -> tuple[list[float], list[float]]:
    """Losses and norms of the run, on one process, from the whole batch at once, with `tplab.plain.GPT`.

    The first weights are those of the course's model, and the batches those of the course's text.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        drawn = ParallelGPT(settings.model, dtype=torch.float32)
    model = GPT(settings.model, dtype=torch.float64)
    model.load_state_dict(full_state_dict(drawn))
    small_ones = [value for name, value in model.named_parameters() if name.endswith("bias") or "norm" in name]
    matrices = [value for name, value in model.named_parameters() if not (name.endswith("bias") or "norm" in name)]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": small_ones, "weight_decay": 0.0}],
        betas=(settings.beta1, settings.beta2),
        fused=False,
    )
    batches = Batches(prepare(settings).train, settings.seq_length, settings.batch_size, settings.seed)
    losses, norms = [], []
    for step in range(settings.steps):
        ids, targets = batches.own(step, 0, 1)
        optimizer.zero_grad()
        loss = model(ids, targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate(step + 1, settings)
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms


def apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def rate(step: int, settings: Settings) -> float:
    """The learning rate by hand: a line, then a cosine."""
    if step < settings.warmup_steps:
        return settings.learning_rate / settings.warmup_steps * step
    angle = math.pi * (step - settings.warmup_steps) / (settings.steps - settings.warmup_steps)
    share = 0.5 + 0.5 * math.cos(angle)
    return share * settings.learning_rate + (1 - share) * settings.min_learning_rate
