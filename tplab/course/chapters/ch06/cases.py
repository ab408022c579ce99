"""How the attentions of exercises 6.2 and 6.4 are built and run by their checks, and which heads a rank must hold."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tplab.course.checks import IN_GROUPS
from tplab.tensor.sharding import Sharding

HEADS, DIM = 8, 4
HIDDEN = HEADS * DIM
PARTS = ("q", "k", "v")

Local = Callable[[Tensor, int, int, bool], Tensor]  # y [b, s, (n + 2m) d], n, m, causal -> [b, s, n d]


@dataclass(frozen=True)
class Case:
    """One way to build and run an attention; kv_heads: heads of K and V."""

    kv_heads: int = HEADS
    causal: bool = False
    bias: bool = True
    leading: tuple[int, int] = (3, 5)  # b, s
    groups: tuple[tuple[int, ...], ...] | None = None
    transposed: bool = False

    def options(self) -> dict[str, Any]:
        return ({"causal": True} if self.causal else {}) | ({} if self.bias else {"bias": False})

    def note(self, kind: "Kind", attention_class: Any) -> str:
        """The case as a learner would write it: "ParallelAttention(32, 8, causal=True)"."""
        arguments = [*kind.sizes(self), *(f"{name}={value}" for name, value in self.options().items())]
        arguments += ["group=group"] * bool(self.groups)
        extra = " on a non-contiguous x" if self.transposed else ""
        name = getattr(attention_class, "__name__", "attention")
        return f"{name}({', '.join(map(str, arguments))})" + extra + (f" {IN_GROUPS}" if self.groups else "")


@dataclass(frozen=True)
class Kind:
    """One of the two attentions: how it is built, what its parameters are called, which mistakes are known.

    sizes:    the positional arguments of its constructor
    weight:   the name of the fused [Wq; Wk; Wv] among its parameters
    sharding: how that weight must say that it is cut
    mistakes: what known mistakes compute on one rank, from its columns of q, k and v to its heads' output
    """

    sizes: Callable[[Case], tuple[int, ...]]
    weight: str
    bias: str
    sharding: Callable[[Case], Sharding]
    mistakes: Mapping[str, Local]
    crash: str
    whose_group: str


def heads_of(index: int, q: int, kv_heads: int) -> dict[str, list[int]]:
    """The heads of q, k and v that rank `index` of q ranks must hold."""
    mine = list(range(index * HEADS // q, (index + 1) * HEADS // q))
    groups = sorted({head * kv_heads // HEADS for head in mine})
    return {"q": mine, "k": groups, "v": groups}


def rows_of(heads: Sequence[int]) -> list[int]:
    return [head * DIM + i for head in heads for i in range(DIM)]
