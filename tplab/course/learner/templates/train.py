"""Train a GPT with my own tensor parallelism, using only PyTorch and my_tp.

    torchrun --standalone --nproc-per-node 2 train.py                two ranks share every matrix
    torchrun --standalone --nproc-per-node 8 train.py --tp 4         two replicas of four ranks each
    torchrun --standalone --nproc-per-node 2 train.py --text notes   on a file, or on the text files in a folder
    python train.py --help                                           all settings

If there's a GPU for every rank, it trains on GPUs over NCCL, and otherwise on the CPU over gloo. Tokens are bytes, so
any text will do. If you start it again, it continues from the last checkpoint. The layers, the training step, the
schedule, the order of the data and the checkpoints are my answers to the exercises. given/ and this script come from
the course.
"""

import argparse
import math
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from my_tp.given.memory_config import GPTConfig
from my_tp.given.tensor_initialization import init_parameter
from my_tp.training import learning_rate, newest_checkpoint, own_windows, save_checkpoint, training_step
from my_tp.transformer import ParallelGPT, ParallelTransformerLayer, best_token
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


@dataclass
class Settings:
    text: str = ""  # a file or folder; "" means the source code of Python's standard library
    megabytes: float = 8.0  # how much text to read at most
    tp: int = 0  # ranks that share one replica of the model; 0 means all of them
    num_layers: int = 4
    hidden_size: int = 192
    num_heads: int = 8
    seq_length: int = 128
    precision: str = "float32"  # or bfloat16, for the matmuls
    steps: int = 300
    batch_size: int = 16  # sequences per step, over all replicas
    micro_batches: int = 1  # micro-batches that each replica splits its sequences into
    highest_rate: float = 2e-3
    lowest_rate: float = 2e-4
    warmup: int = 30
    weight_decay: float = 0.1
    max_norm: float = 1.0
    seed: int = 0
    folder: str = "trained"  # where checkpoints and the log go
    log_every: int = 10
    save_every: int = 100
    prompt: str = "def "
    sample: int = 200  # bytes to generate at the end


def read_settings():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Settings):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    return Settings(**vars(parser.parse_args()))


def read_tokens(settings):
    """Return the text as a vector of bytes, which is the same on every rank."""
    place = Path(settings.text or Path(os.__file__).parent)
    kinds = [".txt", ".md", ".py"]
    found = place.rglob("*") if settings.text else place.glob("*.py")
    files = [place] if place.is_file() else sorted(path for path in found if path.suffix in kinds)
    limit, text = int(settings.megabytes * 1e6), bytearray()
    for path in files:
        text += path.read_bytes()[: limit - len(text)]
        if len(text) == limit:
            break
    if len(text) <= settings.seq_length:
        sys.exit(
            f"{place} has {len(text)} bytes of text ({', '.join(kinds)}): more than {settings.seq_length} are needed"
        )
    return torch.frombuffer(text, dtype=torch.uint8)


def batch(tokens, done, settings, mesh, device):
    """Return this replica's micro-batches for the step after `done` steps, as pairs (ids, targets) of [b, s] each."""
    s = settings.seq_length
    windows = (len(tokens) - 1) // s
    replica, replicas = mesh.get_local_rank("dp"), mesh.size(0)
    mine = own_windows(done, settings.seed, windows, settings.batch_size, replica, replicas)
    rows = torch.stack([tokens[k * s : k * s + s + 1] for k in mine]).to(device, torch.int64)  # [b, s + 1]
    return [(part[:, :-1], part[:, 1:]) for part in rows.chunk(settings.micro_batches)]


def build(settings, group, device):
    """Build my GPT, with the same initial weights for any number of ranks and on any device."""
    config = GPTConfig(
        num_layers=settings.num_layers, hidden_size=settings.hidden_size, num_heads=settings.num_heads,
        vocab_size=256, seq_length=settings.seq_length, dropout=0.0,
    )  # fmt: skip
    model = ParallelGPT(config, ParallelTransformerLayer, group=group)
    torch.manual_seed(settings.seed)
    for name, param in model.named_parameters():
        if param.dim() > 1:
            narrow = (
                math.sqrt(2 * settings.num_layers) if name.endswith(("attention.out.weight", "mlp.down.weight")) else 1
            )
            init_parameter(param, partial(nn.init.normal_, std=0.02 / narrow), group)
        else:
            nn.init.constant_(param, 1.0 if name.endswith("norm.weight") else 0.0)
    if settings.precision == "bfloat16":
        model.forward = torch.autocast(device.type, torch.bfloat16)(model.forward)
    return model.to(device)


def optimizer_for(model, settings):
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() <= 1]  # norms and biases don't decay
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.highest_rate, betas=(0.9, 0.95))


def resume(folder, model, optimizer, layout):
    """Load the newest checkpoint that every rank has, and return its step, or 0 if there is none."""
    newest = newest_checkpoint(folder)
    step = torch.tensor(int(newest.name.rpartition("-")[2]) if newest else 0)
    common = step.to(next(model.parameters()).device)
    dist.all_reduce(common, op=dist.ReduceOp.MIN)
    if common.item():
        path = folder / f"step-{common.item():06d}" / "state.pt"
        state = torch.load(path, weights_only=True, map_location="cpu")
        if state["layout"] != layout:
            sys.exit(f"{path} is of another run: {state['layout']}, not {layout}. Use another --folder")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        while (newer := newest_checkpoint(folder)) != path.parent:  # another rank doesn't have it
            shutil.rmtree(newer)
    return common.item()


@torch.no_grad()
def write_text(model, settings, device, group):
    """Return the prompt and my model's continuation, in which every byte is the most likely one."""
    ids = torch.tensor([list(os.fsencode(settings.prompt))], device=device)  # [1, s]
    for _ in range(settings.sample):
        logits = model(ids[:, -settings.seq_length :])[:, -1]  # [1, v/p]
        ids = torch.cat([ids, best_token(logits, 256, group)[:, None]], 1)
    return bytes(ids[0].tolist()).decode(errors="replace")


def main():
    settings = read_settings()
    if "RANK" not in os.environ:
        sys.exit("Start it with torchrun: torchrun --standalone --nproc-per-node 2 train.py")
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    tp = settings.tp or world
    if world % tp or settings.batch_size % (world // tp * settings.micro_batches):
        sys.exit(f"{world} ranks can't form replicas of tp={tp} with equal parts of {settings.batch_size} sequences")
    mesh = init_device_mesh(device.type, (world // tp, tp), mesh_dim_names=("dp", "tp"))
    rank, group = dist.get_rank(), mesh.get_group("tp")
    tokens = read_tokens(settings)
    model = build(settings, group, device)
    optimizer = optimizer_for(model, settings)
    sizes = ("num_layers", "hidden_size", "num_heads", "seq_length", "seed")
    layout = {"ranks": world, "tp": tp, **{name: asdict(settings)[name] for name in sizes}}
    folder = Path(settings.folder)
    own = folder / f"rank-{rank}"
    done = resume(own, model, optimizer, layout)
    if rank == 0:
        where = "one GPU each, over NCCL" if on_gpus else "the CPU, over gloo"
        print(f"{world} ranks, tp={tp}, on {where}; going on after step {done}", flush=True)
    begun = time.perf_counter()
    for step in range(done + 1, settings.steps + 1):
        for parameters in optimizer.param_groups:
            parameters["lr"] = learning_rate(
                step, settings.steps, settings.warmup, settings.highest_rate, settings.lowest_rate
            )
        parts = batch(tokens, step - 1, settings, mesh, device)
        loss, norm = training_step(model, optimizer, parts, mesh, settings.max_norm)
        if not math.isfinite(loss):
            sys.exit(f"the loss of step {step} is {loss}: try a lower --highest-rate, or a longer --warmup")
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / "log.csv", "a") as log:
                log.write(f"{step},{loss!r},{norm!r}\n")
            if step % settings.log_every == 0 or step == settings.steps:
                speed = (step - done) * settings.batch_size * settings.seq_length / (time.perf_counter() - begun)
                print(f"step {step:5}   loss {loss:.4f}   norm {norm:.2f}   {speed:,.0f} tokens/s", flush=True)
        if step % settings.save_every == 0 or step == settings.steps:
            state = {"layout": layout, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save_checkpoint(own, step, lambda path, state=state: torch.save(state, path / "state.pt"), 2)
    text = write_text(model, settings, device, group)
    if rank == 0:
        print(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
