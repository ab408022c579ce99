"""Time `launch` and a transformer's MLP side by side with what PyTorch offers for the same purpose.

    python -m benchmarks.peers [--ranks 2] [--rounds 20] [--small]

The launches start all ranks, have them take part in one all-reduce, and end them. `torch.multiprocessing.spawn` starts
fresh processes, which import torch first.

The MLP is a column-parallel layer, GELU, and a row-parallel layer, forward and backward in float32: ours, the same with
torch's DTensor, and plain PyTorch in one process. Each rank has one thread, and the one process has as many threads as
there are ranks. The three live in the same ranks. Before they are timed, their outputs and gradients are compared. CPU
time is summed over the ranks and includes gloo's threads. Wall time is that of the slowest rank.

In both comparisons, the ways take turns (`benchmarks.turns`), and the ratios are those to ours.
"""

import argparse
import copy
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.turns import milliseconds, ratio, table, this_machine, turns
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
    for way in LAUNCHES.values():
        way(world_size)
    times = defaultdict(list)
    for name in turns(LAUNCHES, rounds):
        began = time.perf_counter()
        LAUNCHES[name](world_size)
        times[name].append(time.perf_counter() - began)
    return {name: times[name] for name in LAUNCHES}


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
    ALONE: copy.copy,
}


def both_passes(mlp: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Run an MLP forward and backward. Returns the output and all gradients, where this rank may have only a shard."""
    x = x.detach().requires_grad_()
    leaves = {"x": x, **dict(mlp.named_parameters())}
    y = mlp(x)
    found = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))
    return {"output": y.detach()} | {
        name: grad.to_local() if isinstance(grad, DTensor) else grad for name, grad in found.items()
    }


def shard(name: str, full: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that `both_passes` returned for the plain MLP."""
    dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name)
    return full if dim is None else full.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def time_mlps(tokens: int, hidden: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return each way's (CPU, wall) seconds on this rank, one pair per round.

    Raises AssertionError if a way computes something else than plain PyTorch.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mlp, x, dy = plain.MLP(hidden), torch.randn(tokens, hidden), torch.randn(tokens, hidden)
    made = {name: way(mlp) for name, way in MLPS.items()}
    right = both_passes(mlp, x, dy)
    for way in made.keys() - {ALONE}:
        for name, found in both_passes(made[way], x, dy).items():
            where, close = f"{way}, {name}: ", 1e-5 * right[name].abs().max().item()
            torch.testing.assert_close(found, shard(name, right[name]), rtol=1e-4, atol=close, msg=where.__add__)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    for name in turns(made, rounds):
        torch.set_num_threads(dist.get_world_size() if name == ALONE else 1)
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        if name != ALONE or dist.get_rank() == 0:
            both_passes(made[name], x, dy)
        times[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return times


def of_all_ranks(ranks: Sequence[Mapping[str, Sequence[tuple[float, float]]]]) -> list[dict[str, list[float]]]:
    """Return each way's CPU seconds, summed over the ranks, and the wall seconds of the slowest rank."""
    both = {way: torch.tensor([rank[way] for rank in ranks]) for way in ranks[0]}  # [ranks, rounds, 2]
    return [
        {way: seconds[..., 0].sum(0).tolist() for way, seconds in both.items()},
        {way: seconds[..., 1].amax(0).tolist() for way, seconds in both.items()},
    ]


def report(head: Sequence[str], *columns: Mapping[str, Sequence[float]]) -> str:
    """Return a table with a row for each way. Each column of seconds is followed by their ratio to the first way's."""
    rows = []
    for way in columns[0]:
        pairs = [(milliseconds(times[way]), ratio(times[way], next(iter(times.values())))) for times in columns]
        rows.append([way, *(cell for pair in pairs for cell in pair)])
    return table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20, help="2 or more")
    parser.add_argument("--small", action="store_true", help="an MLP with an eighth of each size, to try it out")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    print(f"\n{options.ranks} ranks, {options.rounds} rounds, {this_machine(torch.device('cpu'))}\n", flush=True)
    launches = time_launches(options.ranks, options.rounds)
    print(report(("a launch", "ms: least, median (quartiles)", "ratio (quartiles)"), launches), flush=True)
    tokens, hidden = SMALL_SIZES if options.small else SIZES
    ranks = launch(time_mlps, options.ranks, args=(tokens, hidden, options.rounds), backend="gloo", timeout=None)
    head = f"an MLP {hidden}→{4 * hidden}→{hidden}, {tokens:,} tokens", "CPU ms", "ratio", "wall ms", "ratio"
    print(f"\n{report(head, *of_all_ranks(ranks))}", flush=True)


if __name__ == "__main__":
    main()
