"""Given by the course: run what I wrote on a few processes of this machine, and compare the layers with plain PyTorch.

python -m my_tp mlp          the MLP of chapter 05
python -m my_tp attention    the attention of chapter 06
python -m my_tp block        both of them as a block, which learns to predict the next byte of a Python program
python -m my_tp embedding    the table of chapter 07, at both ends
python -m my_tp loss         the loss of chapter 08 for GPT-2's vocabulary of 50,257 IDs
python -m my_tp dropout      the block of chapter 09, with dropout, and with activation checkpointing
python -m my_tp generate     the GPT of chapter 10, which writes a few tokens although it hasn't been trained
python -m my_tp sequence     the block of chapter 12, and how much it saves for the backward pass on 1, 2, 4 processes
python -m my_tp replicas     two replicas of chapter 14, which learn as one
python -m my_tp pipeline     the stages of chapter 13, which learn to predict the next byte of a Python program
python -m my_tp cost         the formulas of chapter 11: how busy a layer keeps 2, 4 and 8 GPUs (also: --gpu a100, b200)
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
from my_tp.cost import layer_seconds, smallest_width
from my_tp.cross_entropy import vocab_parallel_loss
from my_tp.data_parallel import DataParallel, ZeRO1
from my_tp.embedding import VocabParallelEmbedding, parallel_logits
from my_tp.mlp import ParallelMLP
from my_tp.pipeline import run_stage, schedule
from my_tp.randomness import MixedPrecisionBlock, RNGTracker, checkpoint, stream_seeds
from my_tp.sequence import SequenceParallelBlock
from my_tp.transformer import ParallelGPT, ParallelTransformerLayer, best_token
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

from tplab.collectives.links import Link
from tplab.memory.config import GPTConfig
from tplab.memory.meter import saved_for_backward

RANKS = 2
GPUS = {  # FLOP/s of large matmuls, and bytes per second over NVLink in one direction, as in chapter 11
    "a100": (271.2e12, 300e9),
    "h100": (794.5e12, 450e9),
    "b200": (1745e12, 900e9),
}


def mlp():
    """Run my MLP, and compare it with the same matmuls on the full weights."""
    block = ParallelMLP(8, dtype=torch.float64)
    fill(block)
    x = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))  # the same on every rank
    y = block(x)  # [3, 8]
    inner = F.gelu(F.linear(x, whole(block.up.weight), whole(block.up.bias)))  # [3, 32]
    compare(shapes(block.up.weight, y), y, F.linear(inner, whole(block.down.weight, 1), block.down.bias))


def attention():
    """Run my attention, and compare it with the same heads computed from the full weights."""
    block = ParallelAttention(8, 4, causal=True, dtype=torch.float64)
    fill(block)
    x = torch.randn(1, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))  # [b, s, h]
    y = block(x)  # [b, s, h]
    weight, bias = (torch.cat([whole(part) for part in param.chunk(3)]) for param in (block.qkv.weight, block.qkv.bias))
    q, k, v = (part.unflatten(-1, (4, 2)).transpose(1, 2) for part in F.linear(x, weight, bias).chunk(3, -1))
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)  # [b, s, h]
    compare(shapes(block.qkv.weight, y), y, F.linear(heads, whole(block.out.weight, 1), block.out.bias))


def block():
    """Train a block of my attention and my MLP for 20 steps. The loss is the same on every rank."""
    parts = torch.nn.ModuleDict({"attention": ParallelAttention(32, 4, causal=True), "mlp": ParallelMLP(32)})

    def forward(x):
        x = x + parts["attention"](x)  # [b, s, h]
        return x + parts["mlp"](x)  # [b, s, h]

    train_on_bytes(parts, forward)


def dropout():
    """Train my block with dropout and activation checkpointing for 20 steps. The loss is the same on every rank."""
    seeds, tracker = stream_seeds(1, dist.get_rank(), RANKS), RNGTracker()
    for name in ("replicated", "sharded"):
        tracker.add(name, seeds[name])
    parts = torch.nn.ModuleDict({"block": MixedPrecisionBlock(32, 4, 0.1, tracker)})
    train_on_bytes(parts, lambda x: checkpoint(parts["block"], x, tracker=tracker))


def train_on_bytes(parts, forward):
    """Train an embedding, these parts and a head to predict the next byte of a Python program, and tell the loss."""
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))  # a program that every Python brings along
    parts["embedding"], parts["head"] = torch.nn.Embedding(256, 32), torch.nn.Linear(32, 256)
    fill(parts, std=0.1)
    optimizer = torch.optim.AdamW(parts.parameters(), lr=0.01)
    generator, losses = torch.Generator().manual_seed(0), []  # the same batches on every rank
    for _ in range(20):
        starts = torch.randint(len(text) - 32, (16, 1), generator=generator)
        tokens = text[starts + torch.arange(33)]  # [b, s + 1]
        x = forward(parts["embedding"](tokens[:, :-1]))  # [b, s, h]
        loss = F.cross_entropy(parts["head"](x).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    tell(f"rank {dist.get_rank()} of {RANKS} trains for {len(losses)} steps, loss: {losses[0]:.4f} -> {losses[-1]:.4f}")


def embedding():
    """Look up tokens in my table, score all tokens with the same table, and compare this rank's logits."""
    table = VocabParallelEmbedding(10, 8, multiple=1, dtype=torch.float64)
    fill(table)
    ids = torch.tensor([[3, 7, 1]])
    logits = parallel_logits(table(ids), table.weight, vocab_size=10)  # [1, 3, 5]
    full = whole(table.weight)  # [10, 8]
    plain = F.linear(F.embedding(ids, full), full).chunk(RANKS, -1)[dist.get_rank()]
    compare(shapes(table.weight, logits), logits, plain)


def loss():
    """Compute my loss for a few tokens of GPT-2's vocabulary, and compare it with the loss of the full logits."""
    vocab_size, columns = 50257, 25216  # per rank: padded to a multiple of 128
    torch.manual_seed(0)
    logits = torch.randn(64, RANKS * columns, dtype=torch.float64)  # the same on every rank
    target = torch.randint(vocab_size, (64,))
    mine = vocab_parallel_loss(logits.chunk(RANKS, -1)[dist.get_rank()], target, vocab_size=vocab_size)
    held = f"has {columns:,} of {RANKS * columns:,} columns and computes a loss of {mine.item():.6f}"
    compare(held, mine, F.cross_entropy(logits[:, :vocab_size], target))


def generate():
    """Generate tokens with my GPT. They are the same on every rank."""
    config = GPTConfig(num_layers=2, hidden_size=16, num_heads=4, vocab_size=50, seq_length=16, dropout=0.0)
    model = ParallelGPT(config, ParallelTransformerLayer, dtype=torch.float64)
    fill(model)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        for _ in range(8):
            ids = torch.cat([ids, best_token(model(ids)[:, -1], config.vocab_size)[:, None]], 1)
    tell(f"rank {dist.get_rank()} of {RANKS} continues 1, 2, 3 with {', '.join(map(str, ids[0, 3:].tolist()))}")


def sequence():
    """Run my block on this rank's tokens, with two matmuls inside, and tell how much it saves for the backward pass."""
    p = dist.get_world_size()

    class Inner(torch.nn.Sequential):
        def forward(self, x, rng=None):
            return super().forward(x)  # [b, s, h], a term

    inner = Inner(torch.nn.Linear(64, 256 // p), torch.nn.GELU(), torch.nn.Linear(256 // p, 64, bias=False))
    block = SequenceParallelBlock(64, inner)
    with saved_for_backward(block) as kept:
        block(torch.randn(2, 64 // p, 64, requires_grad=True))  # [b, s/p, h]
    saved = sum(size for _, _, size in kept.pieces)
    tell(f"rank {dist.get_rank()} of {p} saves {saved:,} bytes for the backward pass")


def replicas():
    """Train two replicas for 10 steps, with my buckets and with my ZeRO-1, and compare both with a single model."""
    runs = []
    for way in ("single", "buckets", "zero"):
        torch.manual_seed(0)  # the same weights on every rank
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
        parallel = DataParallel(model, 100) if way == "buckets" else None
        if way == "zero":
            optimizer = ZeRO1(model.parameters(), torch.optim.AdamW, lr=0.01)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(10):
            x = torch.randn(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            mine = x if way == "single" else x.split([9, 3])[dist.get_rank()]  # the replicas have unequal parts
            model.zero_grad()
            loss = model(mine).square().sum()
            (loss if parallel else loss / len(x)).backward()
            if parallel:
                parallel.finish(len(mine))
            optimizer.step()
        runs.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    single, buckets, zero = runs
    held = sum(value.numel() for state in optimizer.optimizer.state.values() for value in state.values())
    told = f"trains {len(single)} parameters, and ZeRO-1 keeps {held} elements of Adam's state"
    compare(told, torch.stack([buckets, zero]), single)


def pipeline():
    """Train a model in two stages with my schedule for 20 steps, and compare its losses with the full model's."""
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    torch.manual_seed(0)  # the same full model on every rank
    first = torch.nn.Sequential(torch.nn.Embedding(256, 16), torch.nn.Flatten(1), torch.nn.Linear(128, 64))
    full = torch.nn.Sequential(first, torch.nn.Sequential(torch.nn.GELU(), torch.nn.Linear(64, 256))).double()
    channels, micro_batches = Channels(), 4
    stage, actions = copy.deepcopy(full[channels.rank]), schedule(RANKS, micro_batches)[channels.rank]
    template, off, value = torch.empty(8, 64, dtype=torch.float64), [0.0], None
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (stage, full)]
    for _ in range(20):
        window = text[torch.randint(len(text) - 8, (32, 1)) + torch.arange(9)]  # [b, s + 1], the same on every rank
        ids, targets = window[:, :-1], window[:, -1]
        for optimizer in optimizers:
            optimizer.zero_grad()
        value = run_stage(stage, actions, channels, template, F.cross_entropy, ids.chunk(4), targets.chunk(4))
        plain = F.cross_entropy(full(ids), targets)
        plain.backward()
        off += [] if value is None else [abs(float(value) - plain.item())]
        for optimizer in optimizers:
            optimizer.step()
    held = f"trains {sum(param.numel() for param in stage.parameters()):,} parameters"
    said = f", and knows the loss: {float(value):.4f}, off by at most {max(off):.0e}" if value is not None else ""
    tell(f"rank {channels.rank} of {RANKS} {held}{said}")


class Channels:
    """Sends messages to the other stage and receives messages from it, with a process group for each direction."""

    def __init__(self):
        self.rank, self.world_size = dist.get_rank(), RANKS
        self.groups = [dist.new_group() for _ in range(2)]

    def send(self, tensor, receiver):
        return dist.isend(tensor, receiver, group=self.groups[receiver > self.rank])

    def receive(self, tensor, sender):
        return dist.irecv(tensor, sender, group=self.groups[self.rank > sender])


def cost():
    """Tell how much of its time a GPU computes in a layer of my GPT, by my formulas, if p GPUs share the layer."""
    gpu = sys.argv[3].lower() if sys.argv[2:3] == ["--gpu"] else "h100"
    if gpu not in GPUS:
        sys.exit(f"{gpu!r} is none of the GPUs {', '.join(GPUS)}")
    (rate, bandwidth), told = GPUS[gpu], []
    for p in (2, 4, 8):
        link = Link(3.4e-6, 1 / bandwidth)
        compute, communicate = layer_seconds(1, 2048, 12288, p, rate, link)
        busy, width = compute / (compute + communicate), smallest_width(p, rate, bandwidth)
        told.append(
            f"p = {p}: {1e3 * (compute + communicate):.1f} ms, {busy:.0%} computing (80% from h = {width:,.0f})"
        )
    tell(f"a layer with h = 12,288 and 2,048 tokens on {gpu}: {'; '.join(told)}", ranks=1)


def fill(module, std=0.5):
    """Fill every parameter with random numbers: different ones in each shard, identical ones if it's replicated."""
    torch.manual_seed(dist.get_rank())
    for param in module.parameters():
        torch.nn.init.normal_(param, std=std)
        if not hasattr(param, "tensor_parallel"):
            dist.broadcast(param.detach(), 0)


def whole(shard, dim=0):
    """Return the shards of all ranks, concatenated along a dimension."""
    mine = shard.detach().contiguous()
    parts = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(parts, mine)
    return torch.cat(parts, dim)


def compare(held, mine, plain):
    """Tell what this rank holds, and whether its result is that of plain PyTorch. Both are in float64."""
    largest = (mine - plain).abs().max().item()
    verdict = "ok, the same as plain PyTorch" if largest < 1e-9 else "not the same as plain PyTorch"
    tell(f"rank {dist.get_rank()} of {RANKS} {held}: {verdict} (largest difference {largest:.0e})")


def shapes(weight, out):
    """Say which shapes this rank's weight and output have."""
    return f"holds {list(weight.shape)} of the first weight and returns {list(out.shape)}"


def tell(text, ranks=None):
    """Print one line per rank, in the order of the ranks, or only on the first `ranks` of them."""
    for rank in range(dist.get_world_size() if ranks is None else ranks):
        if rank == dist.get_rank():
            print(text, flush=True)
        dist.barrier()


def run(rank, name, meeting, ranks):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    globals()[name]()
    dist.destroy_process_group()


def main():
    names = ["mlp", "attention", "block", "embedding", "loss", "dropout", "generate"]
    names += ["cost", "sequence", "pipeline", "replicas"]
    known = [name for name in names if name in globals()]
    about_a_gpu = len(sys.argv) == 4 and sys.argv[1:3] == ["cost", "--gpu"]
    if sys.argv[1:2] not in [[name] for name in known] or not (len(sys.argv) == 2 or about_a_gpu):
        sys.exit(f"Say what to run: python -m my_tp {' or '.join(known)}")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    for ranks in (1, 2, 4) if sys.argv[1] == "sequence" else (RANKS,):
        with tempfile.TemporaryDirectory() as folder:
            spawn(run, (sys.argv[1], os.path.join(folder, "meeting"), ranks), ranks)
