"""A model and a text that are small enough to train in a test, and the same training written out in plain PyTorch."""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tplab.capstone.data.prepare import Batches, prepare
from tplab.capstone.settings.settings import Settings
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig

SMALL = Settings(
    vocab_size=300, num_layers=2, hidden_size=32, num_heads=4, seq_length=16, precision="float64", steps=8,
    batch_size=8, micro_batch_size=8, learning_rate=2e-2, min_learning_rate=1e-3, warmup_steps=3, max_norm=0.5, seed=3,
    evaluate_every=0, evaluation_batches=1, sample_tokens=0, save_every=0, async_save=False, plan=False,
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


LLAMA: dict[str, Any] = {
    "gated": True, "bias": False, "tied_embedding": False, "learned_positions": False, "num_kv_heads": 2,
    "ffn_hidden_size": 48, "rotary_base": 500.0, "norm_eps": 1e-6,
}  # fmt: skip


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
    for name in weights.keys() & {"embedding.weight", "head.weight"}:
        weights[name] = weights[name][: config.vocab_size]
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
        loss = F.cross_entropy(logits(weights, ids, config).flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), settings.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate(step + 1, settings)
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms


def logits(weights: dict[str, Tensor], ids: Tensor, config: GPTConfig) -> Tensor:
    """ids [b, s] -> [b, s, v], of a GPT-2 or a Llama with these weights."""

    def norm(x: Tensor, name: str) -> Tensor:
        if config.bias:
            return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], config.norm_eps)
        return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + (weights[f"{name}.bias"] if config.bias else 0)

    (b, s), table, heads, d = ids.shape, weights["embedding.weight"], config.num_heads, config.head_dim
    hidden = torch.full((s, s), -math.inf, dtype=table.dtype).triu(1)
    x = table[ids]  # [b, s, h]
    if config.learned_positions:
        x = x + weights["positions.weight"][:s]
    for number in range(config.num_layers):
        layer = f"layers.{number}"
        qkv = linear(norm(x, f"{layer}.attention_norm"), f"{layer}.attention.qkv")
        parts = qkv.split([heads * d, config.kv_heads * d, config.kv_heads * d], -1)
        q, k, v = (part.view(b, s, -1, d).transpose(1, 2) for part in parts)  # [b, n, s, d]
        if not config.learned_positions:
            q, k = (turned(part, config.rotary_base) for part in (q, k))
        k, v = (part.repeat_interleave(heads // config.kv_heads, 1) for part in (k, v))
        scores = q @ k.mT / math.sqrt(d) + hidden  # [b, n, s, s]
        x = x + linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), f"{layer}.attention.out")
        y = linear(norm(x, f"{layer}.mlp_norm"), f"{layer}.mlp.up")
        if config.gated:
            gate, up = y.chunk(2, -1)
            y = gate * gate.sigmoid() * up
        else:
            y = F.gelu(y)
        x = x + linear(y, f"{layer}.mlp.down")
    return norm(x, "final_norm") @ (table if config.tied_embedding else weights["head.weight"]).T


def turned(x: Tensor, base: float) -> Tensor:
    """Rotary positions: x [b, n, s, d] as complex numbers, each turned by its position times its frequency.

    As in Llama, angles, sines and cosines are in float32.
    """
    s, half = x.shape[2], x.shape[3] // 2
    frequencies = 1.0 / base ** (torch.arange(half, dtype=torch.float32) * 2 / x.shape[3])
    angles = torch.arange(s, dtype=torch.float32)[:, None] * frequencies  # [s, d/2]
    y = torch.complex(x[..., :half], x[..., half:]) * torch.complex(angles.cos(), angles.sin()).to(torch.complex128)
    return torch.cat([y.real, y.imag], -1)


def rate(step: int, settings: Settings) -> float:
    """The learning rate by hand: a line, then a cosine."""
    if step < settings.warmup_steps:
        return settings.learning_rate / settings.warmup_steps * step
    angle = math.pi * (step - settings.warmup_steps) / (settings.steps - settings.warmup_steps)
    share = 0.5 + 0.5 * math.cos(angle)
    return share * settings.learning_rate + (1 - share) * settings.min_learning_rate
