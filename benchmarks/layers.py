"""Time a transformer's MLP on p ranks: ours, the same with torch's DTensor, and plain PyTorch in one process.

    python -m benchmarks.layers [--ranks 2] [--rounds 20] [--small]

The MLP is a column-parallel layer, GELU, and a row-parallel layer, forward and backward in float32. Each rank has one
thread, and the one process has as many threads as there are ranks. The three live in the same ranks and take turns
(`benchmarks.turns`). Before that, their outputs and gradients are compared.

CPU time is summed over the ranks and includes gloo's threads. Wall time is that of the slowest rank. Both ratios are
those to our MLP.
"""

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.turns import milliseconds, ratio, table, this_machine, turns
from tplab import launch, plain
from tplab.tensor import ParallelMLP
from tplab.tensor.full_state import load_full_state_dict

OURS, ALONE = "tplab", "plain PyTorch in one process"
TOKENS, HIDDEN = 2048, 1024
SMALL_TOKENS, SMALL_HIDDEN = 256, 128


@dataclass
class Times:
    """What one rank measured for one way, in seconds, with one value per round."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)


def with_tplab(mlp: plain.MLP) -> nn.Module:
    ours = ParallelMLP(mlp.up.in_features)
    load_full_state_dict(ours, mlp.state_dict())
    return ours


def with_dtensor(mlp: plain.MLP) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(copy.deepcopy(mlp), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


WAYS: dict[str, Callable[[plain.MLP], nn.Module]] = {OURS: with_tplab, "torch DTensor": with_dtensor, ALONE: copy.copy}


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


def measure(tokens: int, hidden: int, rounds: int) -> dict[str, Times]:
    """Measure all ways on a rank, in turns. Raises AssertionError if one computes something else than plain PyTorch."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mlp, x, dy = plain.MLP(hidden), torch.randn(tokens, hidden), torch.randn(tokens, hidden)
    made = {name: way(mlp) for name, way in WAYS.items()}
    right = both_passes(mlp, x, dy)
    for way in made.keys() - {ALONE}:
        for name, found in both_passes(made[way], x, dy).items():
            where, close = f"{way}, {name}: ", 1e-5 * right[name].abs().max().item()
            torch.testing.assert_close(found, shard(name, right[name]), rtol=1e-4, atol=close, msg=where.__add__)
    times = {name: Times() for name in made}
    for name in turns(made, rounds):
        torch.set_num_threads(dist.get_world_size() if name == ALONE else 1)
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        if name != ALONE or dist.get_rank() == 0:
            both_passes(made[name], x, dy)
        times[name].cpu.append(time.process_time() - cpu)
        times[name].wall.append(time.perf_counter() - wall)
    return times


def report(ranks: list[dict[str, Times]]) -> str:
    """Return a table with a row for each way, given the times of all ranks."""
    cpu = {way: [sum(each) for each in zip(*(rank[way].cpu for rank in ranks), strict=True)] for way in ranks[0]}
    wall = {way: [max(each) for each in zip(*(rank[way].wall for rank in ranks), strict=True)] for way in ranks[0]}
    rows = [
        (way, milliseconds(cpu[way]), ratio(cpu[way], cpu[OURS]), milliseconds(wall[way]), ratio(wall[way], wall[OURS]))
        for way in ranks[0]
    ]
    return table(("an MLP", "CPU ms: least, median (quartiles)", "ratio", "wall ms", "ratio"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20, help="2 or more")
    parser.add_argument("--small", action="store_true", help="an eighth of each size, to try it out")
    options = parser.parse_args()
    tokens, hidden = (SMALL_TOKENS, SMALL_HIDDEN) if options.small else (TOKENS, HIDDEN)
    ranks = launch(measure, options.ranks, args=(tokens, hidden, options.rounds), backend="gloo", timeout=None)
    print(f"\nAn MLP {hidden}→{4 * hidden}→{hidden} with {tokens:,} tokens on {options.ranks} ranks", end=" ")
    print(f"({options.rounds} rounds, {this_machine()})\n\n{report(list(ranks))}", flush=True)


if __name__ == "__main__":
    main()
