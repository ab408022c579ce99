"""Time a training step of the capstone's laptop preset in tplab and in other libraries, which take turns in one run.

    python -m benchmarks.step [--rounds 30] [--steps 3] [--nanogpt FOLDER] [--compile] [--small]

Every way trains the same GPT in float32 from the same weights on the same tokens. A step runs forward and backward,
clips the gradient to norm 1, and updates with fused AdamW. Two ranks with one thread each share the model, or one
process computes it with one or two threads while the other rank waits. In every round, each way runs a few steps. The
order is random in each round, so that a busy moment of the machine affects all ways. Before anything is timed, the
losses of the first steps are compared with those of plain PyTorch. With `--compile`, torch.compile compiles every
transformer layer, as the capstone's `compile=True` does.

tplab's all-reduces go through shared memory, as they do in the capstone on one machine. All other ways use gloo, and so
does "tplab over gloo", which shows how much of the difference is due to the layers.

The ratio is the median over rounds of (tokens per second of this way / of the first way in the same round), with its
quartiles. nanoGPT isn't on PyPI: `--nanogpt` is a folder with its model.py (github.com/karpathy/nanoGPT). Megatron-Core
needs `pip install -e '.[peers]'`. The row of a library that isn't there says that it's missing.
"""

import argparse
import importlib.util
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from benchmarks.dtensor_gpt import DTensorGPT, clip_gradients
from benchmarks.megatron import MegatronGPT, load
from tplab import launch, plain
from tplab.capstone.settings.io import PRESETS
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.build_model import build_model
from tplab.capstone.training.loop import compile_layers
from tplab.capstone.training.optimizer import adamw_options
from tplab.capstone.training.ranks import Ranks, share_memory_of
from tplab.capstone.training.step import Step
from tplab.data.grid import DIMENSIONS, Place

RANKS = 2
COMPARED = 3  # steps whose losses are compared
Batch = tuple[Tensor, Tensor]  # ids and targets [b, s]


@dataclass(frozen=True)
class Problem:
    """What all ways train, with the settings, the full initial weights, and a batch of ids and targets [b, s].

    With settings.compile, each way compiles its transformer layers.
    """

    settings: Settings
    weights: dict[str, Tensor]
    batch: tuple[Tensor, Tensor]
    nanogpt: str  # folder

    @staticmethod
    def of(settings: Settings, nanogpt: str = "") -> "Problem":
        alone = replace(settings, tp=1)
        tokens = torch.randint(
            settings.vocab_size,
            (settings.batch_size, settings.seq_length + 1),
            generator=torch.Generator().manual_seed(1),
        )
        weights = build_model(replace(alone, layers="plain"), alone.model, device="cpu").state_dict()
        return Problem(settings, weights, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), nanogpt)


@dataclass
class Way:
    """One trainer on this rank. `step` returns the loss before the update.

    threads: if it isn't 0, rank 0 trains alone with this many threads
    """

    step: Callable[[Batch], float]
    threads: int = 0

    @property
    def takes_part(self) -> bool:
        return not self.threads or dist.get_rank() == 0


def tplab_sharded(problem: Problem) -> Way:
    return _of_tplab(problem.settings, _mesh_of_its_own(), 0)


def _mesh_of_its_own() -> DeviceMesh:
    """Create a mesh with tp=RANKS and new groups, because only some of the ways share memory in theirs."""
    alone = [dist.new_group([rank]) for rank in range(RANKS)][dist.get_rank()]
    groups = [alone, alone, dist.new_group(range(RANKS))]
    return DeviceMesh.from_group(groups, "cpu", torch.arange(RANKS).view(1, 1, RANKS), mesh_dim_names=DIMENSIONS)


def tplab_over_gloo(problem: Problem) -> Way:
    return tplab_sharded(replace(problem, settings=replace(problem.settings, shared_memory=False)))


def tplab_alone(problem: Problem, threads: int) -> Way:
    alone = DeviceMesh("cpu", torch.tensor([[[0]]]), mesh_dim_names=DIMENSIONS)  # both ranks create it
    return (
        _of_tplab(replace(problem.settings, tp=1), alone, threads) if dist.get_rank() == 0 else Way(_nothing, threads)
    )


def _of_tplab(settings: Settings, grid: DeviceMesh, threads: int) -> Way:
    rank = dist.get_rank(grid.get_group("tp"))
    shares = share_memory_of(grid, settings)
    ranks = Ranks(rank, settings.tp, Place(dp=0, pp=0, tp=rank), grid, torch.device("cpu"), shares)
    model, number = build_model(settings, settings.model, mesh=grid, device="cpu"), [0]
    if settings.compile:
        compile_layers(model)
    trainer = Step(model, settings, ranks)

    def step(batch: Batch) -> float:
        number[0] += 1
        return trainer.run(number[0], *batch)[0].item()

    return Way(step, threads)


def torch_dtensor(problem: Problem) -> Way:
    model = DTensorGPT(problem.settings.model, _mesh_of_its_own()["tp"])
    model.load(problem.weights)
    return Way(_trainer(model, model, problem.settings, clip_gradients, model.layers, around_backward=loss_parallel))


def plain_alone(problem: Problem, threads: int) -> Way:
    model = plain.GPT(replace(problem.settings.model, flash_attention=True))
    model.load_state_dict(problem.weights)
    return Way(_trainer(model, model, problem.settings, _clip_alone, model.layers), threads)


def nanogpt_alone(problem: Problem, threads: int) -> Way:
    """Load nanoGPT's model.py, and rename the initial weights to its names."""
    path = Path(problem.nanogpt) / "model.py"
    if not problem.nanogpt or not path.exists():
        raise ImportError("no folder with nanoGPT's model.py was named")
    spec = importlib.util.spec_from_file_location("nanogpt", path)
    assert spec
    assert spec.loader
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    settings, config = problem.settings, problem.settings.model
    model = theirs.GPT(
        theirs.GPTConfig(
            block_size=config.seq_length, vocab_size=config.vocab_size, n_layer=config.num_layers,
            n_head=config.num_heads, n_embd=config.hidden_size, dropout=0.0, bias=True,
        )
    )  # fmt: skip
    names = {
        "embedding": "transformer.wte", "positions": "transformer.wpe", "layers": "transformer.h",
        "final_norm": "transformer.ln_f", "attention_norm": "ln_1", "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj", "mlp_norm": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
    }  # fmt: skip
    load(model, problem.weights, names, lambda _, full: full)
    step = _trainer(model, lambda ids, targets: model(ids, targets)[1], settings, _clip_alone, model.transformer.h)
    return Way(step, threads)


def megatron_core(problem: Problem) -> Way:
    model = MegatronGPT(problem.settings.model, problem.weights)
    return Way(_trainer(model, model, problem.settings, _clip_shards, model.layers))


def _nothing(batch: Batch) -> float:
    raise AssertionError("this rank only waits")


def _trainer(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    settings: Settings,
    clip: Callable[..., object],
    layers: Iterable[nn.Module],
    around_backward: Callable[[], AbstractContextManager] = nullcontext,
) -> Callable[[Batch], float]:
    """Return a plain training step with the same optimizer as `Step`."""
    for layer in layers if settings.compile else ():
        layer.compile()
    options = adamw_options(model, settings)
    optimizer = torch.optim.AdamW(options.pop("parameters"), **options)

    def step(batch: Batch) -> float:
        found = loss(*batch)
        with around_backward():
            found.backward()
        clip(model, settings.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return found.item()

    return step


def _clip_alone(model: nn.Module, max_norm: float) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def _clip_shards(model: nn.Module, max_norm: float) -> None:
    """Clip by the norm of the full gradient, using the marks that Megatron-Core puts on its sharded parameters."""
    given = [p for p in model.parameters() if p.grad is not None]
    sharded = [p for p in given if getattr(p, "tensor_model_parallel", False)]
    replicated = [p for p in given if not getattr(p, "tensor_model_parallel", False)]
    square = nn.utils.get_total_norm([p.grad for p in sharded if p.grad is not None]) ** 2
    dist.all_reduce(square)
    norm = (square + nn.utils.get_total_norm([p.grad for p in replicated if p.grad is not None]) ** 2).sqrt()
    nn.utils.clip_grads_with_norm_(given, max_norm, norm)


WAYS: dict[str, Callable[[Problem], Way]] = {
    "tplab, tp = 2": tplab_sharded,
    "tplab over gloo, tp = 2": tplab_over_gloo,
    "Megatron-Core, tp = 2": megatron_core,
    "torch DTensor, tp = 2": torch_dtensor,
    "tplab, 1 thread": partial(tplab_alone, threads=1),
    "nanoGPT, 1 thread": partial(nanogpt_alone, threads=1),
    "plain PyTorch, 1 thread": partial(plain_alone, threads=1),
    "tplab, 2 threads": partial(tplab_alone, threads=2),
    "nanoGPT, 2 threads": partial(nanogpt_alone, threads=2),
    "plain PyTorch, 2 threads": partial(plain_alone, threads=2),
}


def measure(
    problem: Problem, chosen: Mapping[str, Callable[[Problem], Way]], rounds: int, steps: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Measure all ways on a rank. Returns each way's seconds per step, by round, and why a way is missing.

    Raises AssertionError, before the first round, if the first losses of a way aren't those of plain PyTorch.
    """
    torch.set_num_threads(1)
    ways: dict[str, Way] = {}
    missing: dict[str, str] = {}
    for name, make in chosen.items():
        try:
            ways[name] = make(problem)
        except ImportError as error:
            missing[name] = str(error)
    reference = plain_alone(replace(problem, settings=replace(problem.settings, compile=False)), 1)
    right = torch.tensor([reference.step(problem.batch) for _ in range(COMPARED)])
    for name, way in ways.items():
        if way.takes_part:
            losses = torch.tensor([way.step(problem.batch) for _ in range(COMPARED)])
            torch.testing.assert_close(losses, right, rtol=1e-4, atol=1e-5, msg=f"{name}: ".__add__)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order = random.Random(0)  # the same on every rank
    for _ in range(rounds):
        for name in order.sample(list(ways), len(ways)):
            way = ways[name]
            torch.set_num_threads(way.threads or 1)
            dist.barrier()
            began = time.perf_counter()
            for _ in range(steps if way.takes_part else 0):
                way.step(problem.batch)
            seconds[name].append((time.perf_counter() - began) / steps)
    return seconds, missing


def table(settings: Settings, results: list[tuple[dict[str, list[float]], dict[str, str]]]) -> str:
    """Return a row per way: its milliseconds per step, tokens per second, and ratio to the first way."""
    seconds = {
        name: [max(ranks) for ranks in zip(*(r[0][name] for r in results), strict=True)] for name in results[0][0]
    }
    first = next(iter(seconds.values()))
    lines = ["| | ms per step: least, median | tokens/s | ratio to the first (quartiles) |", "|---|---|---:|---|"]
    for name, times in seconds.items():
        low, middle, high = statistics.quantiles(
            [one / other for one, other in zip(first, times, strict=True)], n=4, method="inclusive"
        )
        lines.append(
            f"| {name} | {1e3 * min(times):.0f}, {1e3 * statistics.median(times):.0f} "
            f"| {settings.tokens_per_step / statistics.median(times):,.0f} | **{middle:.2f}** ({low:.2f}-{high:.2f}) |"
        )
    return "\n".join(lines + [f"| {name} | missing: {why} | | |" for name, why in results[0][1].items()])


SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "seq_length": 16, "vocab_size": 512}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", metavar="way", help="only these, by the beginning of their names")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=3, help="of each way per round")
    parser.add_argument("--nanogpt", default="", metavar="FOLDER", help="where nanoGPT's model.py is")
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try it out")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("quartiles need at least 2 rounds")
    chosen = {name: way for name, way in WAYS.items() if not options.ways or name.startswith(tuple(options.ways))}
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    settings = replace(PRESETS["laptop"], warmup_steps=0, compile=options.compile, **SMALL if options.small else {})
    arguments = (Problem.of(settings, options.nanogpt), chosen, options.rounds, options.steps)
    results = [tuple(one) for one in launch(measure, RANKS, args=arguments, backend="gloo", timeout=None)]
    how = "float32, compiled" if options.compile else "float32"
    print(f"\n{how}, {options.rounds} rounds, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print(table(settings, results))


if __name__ == "__main__":
    main()
