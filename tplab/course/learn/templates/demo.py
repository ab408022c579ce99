"""Given by the course: run what I wrote on a few processes of this machine.

python -m my_tp mlp         the MLP of chapter 05, compared with plain PyTorch
python -m my_tp block       the attention and the MLP as a block, which learns to predict the next byte of a program
python -m my_tp loss        the table and the loss of chapters 07 and 08, compared with plain PyTorch
python -m my_tp dropout     the block of chapter 09, with dropout and activation checkpointing
python -m my_tp generate    the GPT of chapter 10, which writes a few tokens although it hasn't been trained
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
from my_tp.attention import ParallelAttention
from my_tp.cross_entropy import vocab_parallel_loss
from my_tp.embedding import VocabParallelEmbedding, parallel_logits
from my_tp.mlp import ParallelMLP
from my_tp.pipeline import run_stage, schedule
from my_tp.randomness import MixedPrecisionBlock, RNGTracker, checkpoint, stream_seeds
from my_tp.transformer import ParallelGPT, ParallelTransformerLayer, best_token
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

from tplab.memory.config import GPTConfig

RANKS = 2


def mlp():
    """Run my MLP, and compare it with the same matmuls on the full weights."""
    block = fill(ParallelMLP(8, dtype=torch.float64))
    x = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))  # the same on every rank
    inner = F.gelu(F.linear(x, whole(block.up.weight), whole(block.up.bias)))  # [3, 32]
    compare("the output", block(x), F.linear(inner, whole(block.down.weight, 1), block.down.bias))


def block():
    """Train a block of my attention and my MLP. The loss is the same on every rank."""
    parts = nn.ModuleDict({"attention": ParallelAttention(32, 4, causal=True), "mlp": ParallelMLP(32)})

    def forward(x):
        x = x + parts["attention"](x)  # [b, s, h]
        return x + parts["mlp"](x)  # [b, s, h]

    train_on_bytes(parts, forward)


def dropout():
    """Train my block with dropout and activation checkpointing. The loss is the same on every rank."""
    seeds, tracker = stream_seeds(1, dist.get_rank(), RANKS), RNGTracker()
    for name in ("replicated", "sharded"):
        tracker.add(name, seeds[name])
    parts = nn.ModuleDict({"block": MixedPrecisionBlock(32, 4, 0.1, tracker)})
    train_on_bytes(parts, lambda x: checkpoint(parts["block"], x, tracker=tracker))


def train_on_bytes(parts, forward):
    """Train an embedding, these parts and a head for 20 steps to predict the next byte, and tell the loss."""
    parts["embedding"], parts["head"] = nn.Embedding(256, 32), nn.Linear(32, 256)
    fill(parts, std=0.1)
    optimizer = torch.optim.AdamW(parts.parameters(), lr=0.01)
    generator, losses = torch.Generator().manual_seed(0), []  # the same batches on every rank
    for _ in range(20):
        tokens = windows(16, 32, generator)  # [b, s + 1]
        logits = parts["head"](forward(parts["embedding"](tokens[:, :-1])))  # [b, s, v]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    tell(f"trains for {len(losses)} steps, loss: {losses[0]:.4f} -> {losses[-1]:.4f}")


def loss():
    """Look tokens up in my table, score all tokens with the same table, and compare the loss."""
    table = fill(VocabParallelEmbedding(50, 8, multiple=1, dtype=torch.float64))
    ids, target = torch.tensor([3, 47, 1]), torch.tensor([47, 1, 20])
    logits = parallel_logits(table(ids), table.weight, vocab_size=50)  # [3, v/p]
    full = whole(table.weight)  # [v, h]
    plain = F.cross_entropy(F.linear(F.embedding(ids, full), full), target)
    compare("the loss", vocab_parallel_loss(logits, target, vocab_size=50), plain)


def generate():
    """Generate tokens with my GPT. They are the same on every rank."""
    config = GPTConfig(num_layers=2, hidden_size=16, num_heads=4, vocab_size=50, seq_length=16, dropout=0.0)
    model = fill(ParallelGPT(config, ParallelTransformerLayer, dtype=torch.float64))
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        for _ in range(8):
            ids = torch.cat([ids, best_token(model(ids)[:, -1], config.vocab_size)[:, None]], 1)
    tell(f"continues 1, 2, 3 with {', '.join(map(str, ids[0, 3:].tolist()))}")


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
    compare("its stage after 10 steps", torch.cat(mine), torch.cat(plain))


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


def fill(module, std=0.5):
    """Fill every parameter with random numbers: different ones in each shard, identical ones if it's replicated."""
    torch.manual_seed(dist.get_rank())
    for param in module.parameters():
        nn.init.normal_(param, std=std)
        if not hasattr(param, "tensor_parallel"):
            dist.broadcast(param.detach(), 0)
    return module


def whole(shard, dim=0):
    """Return the shards of all ranks, concatenated along a dimension."""
    parts = [torch.empty_like(shard) for _ in range(RANKS)]
    dist.all_gather(parts, shard.detach())
    return torch.cat(parts, dim)


def compare(what, mine, plain):
    """Tell whether a result of this rank is that of plain PyTorch. Both are in float64."""
    largest = (mine - plain).abs().max().item()
    verdict = "ok, the same as plain PyTorch" if largest < 1e-9 else "not the same as plain PyTorch"
    tell(f"{what}: {verdict} (largest difference {largest:.0e})")


def tell(text):
    """Print one line per rank, in the order of the ranks."""
    for rank in range(RANKS):
        if rank == dist.get_rank():
            print(f"rank {rank} of {RANKS}: {text}", flush=True)
        dist.barrier()


def run(rank, name, meeting):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    globals()[name]()
    dist.destroy_process_group()


def main():
    names = ["mlp", "block", "loss", "dropout", "generate", "pipeline"]
    known = [name for name in names if name in globals()]
    if len(sys.argv) != 2 or sys.argv[1] not in known:
        sys.exit(f"Say what to run: python -m my_tp {' or '.join(known)}")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    with tempfile.TemporaryDirectory() as folder:
        spawn(run, (sys.argv[1], os.path.join(folder, "meeting")), RANKS)
