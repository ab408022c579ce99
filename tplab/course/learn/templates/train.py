"""Train a GPT with my own tensor parallelism, using only PyTorch and my_tp.

    torchrun --standalone --nproc-per-node 2 train.py                two ranks share every matrix
    torchrun --standalone --nproc-per-node 8 train.py --tp 4         two replicas of four ranks each
    torchrun --standalone --nproc-per-node 2 train.py --text notes   on a file of my own
    python train.py --help                                           all settings

If there's a GPU for every rank, it trains on GPUs over NCCL, and otherwise on the CPU over gloo. Tokens are bytes, so
any text will do. If you start it again, it continues from the newest checkpoint, even with a different number of ranks
per replica. The layers, the training step, the order of the data and the checkpoints are my answers to the exercises.
given/ and this script come from the course, and the loop itself is in given/capstone_learners_loop.py.
"""

import argparse
import math
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from my_tp.given.capstone_learners_loop import Functions, train
from my_tp.given.memory_config import GPTConfig
from my_tp.given.tensor_initialization import init_parameter
from my_tp.training import newest_checkpoint, own_windows, save_checkpoint, training_step
from my_tp.transformer import ParallelGPT, ParallelTransformerLayer, best_token
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

SETTINGS = {  # name: default, and what it is
    "text": ("", "file to train on, or nothing for the source code of Python's standard library"),
    "megabytes": (8.0, "how much text to read at most"),
    "tp": (0, "number of ranks that share one replica of the model, or 0 for all ranks"),
    "num_layers": (4, "number of layers"),
    "hidden_size": (192, "size of the vector that represents a token"),
    "num_heads": (8, "number of attention heads per layer"),
    "seq_length": (128, "number of tokens (bytes) per sequence"),
    "precision": ("float32", "dtype of the matmuls: float32 or bfloat16"),
    "steps": (300, "number of training steps"),
    "batch_size": (16, "number of sequences per step, over all replicas"),
    "micro_batches": (1, "number of micro-batches per step and replica"),
    "learning_rate": (2e-3, "highest learning rate, which is reached after the warm-up"),
    "min_learning_rate": (2e-4, "learning rate at the end"),
    "warmup_steps": (30, "number of steps in which the learning rate rises"),
    "weight_decay": (0.1, "weight decay of the matrices (norms and biases have none)"),
    "max_norm": (1.0, "largest gradient norm that isn't clipped"),
    "seed": (0, "seed of the initial weights and of the order of the data"),
    "folder": ("trained", "where the checkpoints and the log go"),
    "log_every": (10, "number of steps from one printed loss to the next"),
    "save_every": (100, "number of steps from one checkpoint to the next"),
    "keep": (2, "number of checkpoints to keep"),
    "prompt": ("def ", "beginning of the text that the model writes at the end"),
    "sample": (200, "number of bytes that the model writes at the end"),
}


def read_settings():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (default, words) in SETTINGS.items():
        option, words = f"--{name.replace('_', '-')}", f"{words} (default: %(default)r)"
        parser.add_argument(option, type=type(default), default=default, help=words, metavar="VALUE")
    return parser.parse_args()


def read_tokens(settings):
    """Return the text as a vector of bytes, which is the same on every rank."""
    files = [Path(settings.text)] if settings.text else sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[: int(settings.megabytes * 1e6)]
    if len(text) <= settings.seq_length:
        sys.exit(f"the text has {len(text)} bytes, but more than --seq-length {settings.seq_length} are needed")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


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
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95))


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
    folder = Path(settings.folder)
    functions = Functions(newest_checkpoint, save_checkpoint, own_windows, training_step)
    if rank == 0:
        where = "one GPU each, over NCCL" if on_gpus else "the CPU, over gloo"
        newest, ranks = newest_checkpoint(folder), f"{world} rank{'s' * (world > 1)}"
        print(f"{ranks}, tp={tp}, on {where}, from {newest.name if newest else 'the beginning'} on", flush=True)
    begun, done = time.perf_counter(), 0

    def tell(step, loss, norm):
        """After each step: stop if the loss has exploded, and write it into the log."""
        nonlocal done
        done += 1
        if not math.isfinite(loss):
            sys.exit(f"the loss of step {step} is {loss}: try a lower --learning-rate, or more --warmup-steps")
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / "log.csv", "a") as log:
                log.write(f"{step},{loss!r},{norm!r}\n")
            if step % settings.log_every == 0 or step == settings.steps:
                speed = done * settings.batch_size * settings.seq_length / (time.perf_counter() - begun)
                print(f"step {step:5}   loss {loss:.4f}   norm {norm:.2f}   {speed:,.0f} tokens/s", flush=True)

    train(model, optimizer, tokens, settings, mesh, functions, folder, settings.steps, tell)
    text = write_text(model, settings, device, group)
    if rank == 0:
        print(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
