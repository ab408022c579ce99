"""A training run as small as one can be, with everything that a checkpoint has to do with: tp, dp, AdamW."""

from pathlib import Path

import torch
import torch.distributed as dist

from tests.reference import random
from tplab.capstone.checkpoints.writer import Checkpoints
from tplab.data.data_parallel import DataParallel
from tplab.data.grid import mesh
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig
from tplab.tensor.rng import seed_all

CONFIG = GPTConfig(num_layers=2, hidden_size=32, num_heads=4, vocab_size=40, seq_length=8, dropout=0.0)
BATCH = 4


def build(group=None, config=CONFIG, dtype=torch.float32):
    """A model and its optimizer, the same for every number of ranks."""
    seed_all(3, group)
    model = ParallelGPT(config, group=group, dtype=dtype)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=1e-2)


def batch(step, replica=0, replicas=1):
    """ids, targets [B/dp, s] of a step."""
    ids = (random((BATCH, CONFIG.seq_length + 1), "ids", step).abs() * 1000).long() % CONFIG.vocab_size
    own = ids.chunk(replicas)[replica]
    return own[:, :-1], own[:, 1:]


def learn(model, optimizer, step, data=None, replica=0, replicas=1):
    """One step; the loss over the whole batch."""
    optimizer.param_groups[0]["lr"] = 1e-2 / step  # as a schedule does, by the number of the step
    optimizer.zero_grad()
    loss = model(*batch(step, replica, replicas))
    loss.backward()
    whole = loss.detach().double()
    if data is not None:
        data.finish()
        dist.all_reduce(whole, group=data.group)
        whole /= replicas
    optimizer.step()
    return float(whole)


def train(folder, steps, *, dp=1, save_every=2, dtype=torch.float32):
    """Train from the newest checkpoint in the folder on, on every rank; (first step, losses)."""
    grid, tp_group, data, replica = None, None, None, 0
    if dist.is_initialized():
        grid = mesh(dp=dp, tp=dist.get_world_size() // dp)
        tp_group = grid.get_group("tp")
        replica = grid.get_local_rank("dp")
    model, optimizer = build(tp_group, dtype=dtype)
    if dp > 1:
        data = DataParallel(model, group=grid.get_group("dp"))
    first, losses = 0, []
    checkpoints = Checkpoints(Path(folder) / "checkpoints", mesh=grid)
    if path := checkpoints.latest():
        first = checkpoints.load(path, model, optimizer)
    for step in range(first + 1, steps + 1):
        losses.append(learn(model, optimizer, step, data, replica, dp))
        if step % save_every == 0:
            checkpoints.save(step, model, optimizer)
    return first, losses
