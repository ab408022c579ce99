"""Time `launch` and a transformer's MLP side by side with what PyTorch offers for the same purpose.

    python -m benchmarks.peers [--ranks 2] [--rounds 20] [--small]

The launches start all ranks, have them take part in one all-reduce, and end them. `torch.multiprocessing.spawn` starts
fresh processes, which import torch first.

The MLP is a column-parallel layer, GELU, and a row-parallel layer, forward and backward in float32: ours, the same with
torch's DTensor, and plain PyTorch in one process. Each rank has one thread, and the one process has as many threads as
there are ranks. The three live in the same ranks. Before they are timed, their outputs and gradients of x are
compared. The time is that of the slowest rank.

In both comparisons, the ways take turns (`benchmarks.turns`), and the ratios are those to ours.
"""

import argparse
import copy
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.turns import milliseconds, ratio, table, this_machine, timed
from tplab import launch, plain
from tplab.tensor import ParallelMLP
from tplab.tensor.full_state import load_full_state_dict

ALONE = "plain PyTorch in one process"
SIZES, SMALL_SIZES = (2048, 1024), (256, 128)  # tokens and features


def add_up() -> None:
    """All-reduce one number on each rank, and check the sum."""
    number = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(number)
    size = dist.get_world_size()
    if number.item() != size * (size + 1) / 2:
        raise RuntimeError(f"rank {dist.get_rank()} got {number.item()}")


def launch_with_tplab(world_size: int) -> None:
    launch(add_up, world_size, backend="gloo")


def launch_with_torch(world_size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_join_and_add_up, (world_size, os.path.join(folder, "store")), nprocs=world_size)


def _join_and_add_up(rank: int, world_size: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    add_up()
    dist.destroy_process_group()


LAUNCHES: dict[str, Callable[[int], None]] = {
    "tplab.launch": launch_with_tplab,
    "torch.multiprocessing.spawn": launch_with_torch,
}


def time_launches(world_size: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way's launches, one per round. The first launches don't count."""
    ways = {name: partial(way, world_size) for name, way in LAUNCHES.items()}
    for way in ways.values():
        way()
    return timed(ways, rounds)


def with_tplab(mlp: plain.MLP) -> nn.Module:
    ours = ParallelMLP(mlp.up.in_features)
    load_full_state_dict(ours, mlp.state_dict())
    return ours


def with_dtensor(mlp: plain.MLP) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(copy.deepcopy(mlp), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


MLPS: dict[str, Callable[[plain.MLP], nn.Module]] = {
    "tplab": with_tplab,
    "torch DTensor": with_dtensor,
}


def both_passes(mlp: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Run an MLP forward and backward. Returns the output and the gradient of x, which are the same on all ranks."""
    x = x.detach().requires_grad_()
    y = mlp(x)
    gradients = torch.autograd.grad(y, [x, *mlp.parameters()], dy)
    return y.detach(), gradients[0]


def time_mlps(tokens: int, hidden: int, rounds: int) -> dict[str, list[float]]:
    """Return each way's seconds on the slowest rank, one per round.

    Raises AssertionError if a way computes something else than plain PyTorch.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mlp, x, dy = plain.MLP(hidden), torch.randn(tokens, hidden), torch.randn(tokens, hidden)
    made = {name: way(mlp) for name, way in MLPS.items()}
    right = both_passes(mlp, x, dy)
    for way, parallel in made.items():
        for name, found, wanted in zip(("output", "dx"), both_passes(parallel, x, dy), right, strict=True):
            where, close = f"{way}, {name}: ", 1e-5 * wanted.abs().max().item()
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=close, msg=where.__add__)

    def alone() -> None:
        if dist.get_rank() == 0:
            torch.set_num_threads(dist.get_world_size())
            both_passes(mlp, x, dy)
            torch.set_num_threads(1)

    def clock() -> float:
        dist.barrier()
        return time.perf_counter()

    ways = {name: partial(both_passes, parallel, x, dy) for name, parallel in made.items()}
    return timed(ways | {ALONE: alone}, rounds, clock)


def report(what: str, times: Mapping[str, Sequence[float]]) -> str:
    """Return a table with a row for each way, including its ratio to the first one."""
    first = next(iter(times.values()))
    rows = [(way, milliseconds(seconds), ratio(seconds, first)) for way, seconds in times.items()]
    return table((what, "ms: least, median (quartiles)", "ratio (quartiles)"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20, help="2 or more")
    parser.add_argument("--small", action="store_true", help="an MLP with an eighth of each size, to try it out")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    print(f"\n{options.ranks} ranks, {options.rounds} rounds, {this_machine(torch.device('cpu'))}\n", flush=True)
    print(report("a launch", time_launches(options.ranks, options.rounds)), flush=True)
    tokens, hidden = SMALL_SIZES if options.small else SIZES
    ranks = launch(time_mlps, options.ranks, args=(tokens, hidden, options.rounds), backend="gloo", timeout=None)
    print("\n" + report(f"an MLP {hidden}→{4 * hidden}→{hidden}, {tokens:,} tokens", ranks[0]), flush=True)


if __name__ == "__main__":
    main()
