"""The ways in which ranks may run on the GPUs of a machine, and which of them are open here."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tests.gpu import layers, models
from tests.gpu.subject import Case, Difference, differences
from tplab import launch

CASES: dict[str, Case] = {**layers.CASES, **models.CASES}


@dataclass(frozen=True)
class Way:
    """How launch() is called.

    gpus        the most GPUs it uses, 0 for the CPU; on a machine with fewer, ranks share them
    messages    whether a rank can send a tensor of its device to another
    """

    backend: str
    world_size: int
    gpus: int
    messages: bool = True

    @property
    def gpus_here(self) -> int:
        """How many GPUs of this machine it uses."""
        return min(self.gpus, torch.cuda.device_count()) if self.gpus else 0

    @property
    def shares(self) -> bool:
        return 0 < self.gpus_here < self.world_size

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 240.0) -> Any:
        options: dict[str, Any] = {"backend": self.backend, "share_gpus": self.shares, "timeout": timeout}
        with visible(self.gpus_here):
            return launch(fn, self.world_size, args=args, **options)

    def names(self) -> list[str]:
        """The cases that can run this way."""
        return [name for name, case in CASES.items() if self.messages or not case.messages]


@contextmanager
def visible(gpus: int) -> Iterator[None]:
    """Show only so many of the machine's GPUs, so that ranks share them also where there are more."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = before.split(",") if before else [str(number) for number in range(gpus)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(listed[:gpus])
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


ON_THE_CPU = Way("gloo", 2, 0)
WAYS = {
    "1 rank, NCCL": Way("nccl", 1, 1),
    "2 ranks share a GPU, gloo": Way("gloo", 2, 1, messages=False),
    "2 ranks share a GPU, NCCL": Way("nccl", 2, 1),
    "2 GPUs, NCCL": Way("nccl", 2, 2),
    "4 ranks, NCCL": Way("nccl", 4, 4),
    "8 ranks, NCCL": Way("nccl", 8, 8),
}


def over_nccl(ranks: int) -> Way:
    """A GPU per rank where there are enough. Otherwise, ranks share them."""
    return Way("nccl", ranks, ranks)


Found = dict[tuple[str, torch.dtype], dict[str, Difference]]


def _on_this_rank(cases: Mapping[str, Case]) -> Found:
    return {(name, dtype): differences(case, dtype) for name, case in cases.items() for dtype in case.dtypes}


def run_cases(way: Way, names: Iterable[str]) -> list[Found]:
    """Several cases in one launch, of each rank what it found."""
    return way.run(_on_this_rank, {name: CASES[name] for name in names})


@cache
def run_all(way: Way) -> list[Found] | Exception:
    """All cases in one launch, or why that failed. A launch takes seconds on a GPU, a case far less."""
    try:
        return run_cases(way, way.names())
    except Exception as error:  # whatever it is: then each case is run by itself, and tells for itself
        return error


def problems(way: Way, name: str) -> list[str]:
    """What is wrong with one case, on any rank."""
    ran = run_all(way)
    found = run_cases(way, [name]) if isinstance(ran, Exception) else ran
    return [
        f"rank {rank}, {str(dtype).removeprefix('torch.')}: {what} is {problem}"
        for rank, of_rank in enumerate(found)
        for (case, dtype), each in of_rank.items()
        for what, difference in each.items()
        if case == name and (problem := difference.problem())
    ]
