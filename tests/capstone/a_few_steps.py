"""A few steps of training with any layers, as `training.step` takes them, without data, log or checkpoints."""

from dataclasses import replace

import torch
import torch.distributed as dist

from tests.capstone import small
from tests.reference import random
from tplab.capstone.training.build_model import build_model, training_step
from tplab.data.grid import mesh

# 300 rows of the embedding are padded for every number of ranks
SMALL = replace(small.SMALL, seq_length=8, batch_size=4, micro_batch_size=4, async_grad_allreduce=False)


def variant(**changes):
    return replace(SMALL, **changes)


def batch(step):
    """ids, targets [b, s]; replicas get the same, too."""
    ids = (random((4, SMALL.seq_length + 1), "ids", step).abs() * 1000).long() % SMALL.vocab_size
    return ids[:, :-1], ids[:, 1:]


def make(settings, answers=None):
    grid = mesh(dp=settings.dp, tp=settings.tp) if dist.is_initialized() else None
    return build_model(settings, settings.model, mesh=grid, device="cpu", answers=answers), grid


def few_steps(settings, answers=None, count=5):
    """Losses and norms of the first steps."""
    model, grid = make(settings, answers)
    training = training_step(model, torch.optim.AdamW, grid, max_norm=1.0, lr=1e-2)
    told = []
    for step in range(count):
        with training.micro_batch():
            loss = model(*batch(step))
            loss.backward()
        told.append((loss.item(), training.update().item()))
    return told


def few_steps_of_each(variants, answers):
    """`few_steps` of several settings, one after another on the same ranks."""
    return {name: few_steps(settings, answers) for name, settings in variants.items()}
