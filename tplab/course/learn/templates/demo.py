"""Given by the course: run what I wrote on two processes of this machine.

python -m my_tp pipeline    the stages of chapter 13, which are trained as the full model is
"""

import argparse
import copy
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from my_tp.pipeline import run_stage, schedule
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

RANKS = 2


def pipeline():
    """Train two stages with my schedule for 10 steps, and compare this rank's stage with the full model's."""
    torch.manual_seed(0)  # the same full model on every rank
    first = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(1), nn.Linear(128, 64), nn.GELU())
    full = nn.Sequential(first, nn.Linear(64, 256)).double()
    rank, channels, generator = dist.get_rank(), Channels(), torch.Generator().manual_seed(0)
    stage, actions = copy.deepcopy(full[rank]), schedule(RANKS, 4)[rank]
    optimizer = torch.optim.SGD([*stage.parameters(), *full.parameters()], lr=0.1)
    template = torch.empty(8, 64, dtype=torch.float64)  # what a micro-batch sends to the next stage
    for _ in range(10):
        tokens = windows(32, 8, generator)  # [b, s + 1]
        ids, targets = tokens[:, :-1], tokens[:, -1]
        optimizer.zero_grad()
        F.cross_entropy(full(ids), targets).backward()
        run_stage(stage, actions, channels, template, F.cross_entropy, ids.chunk(4), targets.chunk(4))
        optimizer.step()
    mine, plain = ([weight.flatten() for weight in each.parameters()] for each in (stage, full[rank]))
    largest = (torch.cat(mine) - torch.cat(plain)).abs().max().item()  # in float64
    verdict = "ok, the same as plain PyTorch" if largest < 1e-9 else "not the same as plain PyTorch"
    for turn in range(RANKS):
        if turn == rank:
            told = f"its stage after 10 steps: {verdict} (largest difference {largest:.0e})"
            print(f"rank {rank} of {RANKS}: {told}", flush=True)
        dist.barrier()


class Channels:
    """Sends messages to the other stage and receives messages from it, with a process group for each direction."""

    def __init__(self):
        self.rank, self.world_size = dist.get_rank(), RANKS
        self.groups = [dist.new_group() for _ in range(2)]

    def send(self, tensor, receiver):
        return dist.isend(tensor, receiver, group=self.groups[receiver > self.rank])

    def receive(self, tensor, sender):
        return dist.irecv(tensor, sender, group=self.groups[self.rank > sender])


def windows(batch, length, generator):
    """Return random pieces of a Python program as bytes, [batch, length + 1]."""
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))  # a program that every Python brings along
    return text[torch.randint(len(text) - length, (batch, 1), generator=generator) + torch.arange(length + 1)]


def run(rank, meeting):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    pipeline()
    dist.destroy_process_group()


def main():
    if sys.argv[1:] != ["pipeline"]:
        sys.exit("Say what to run: python -m my_tp pipeline")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    with tempfile.TemporaryDirectory() as folder:
        spawn(run, (os.path.join(folder, "meeting"),), RANKS)
