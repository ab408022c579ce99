"""Run one of the parallel attentions of exercises 6.2 and 6.4 and compare it with attention on one process.

Each is run in several cases on p = 1, 2, 4 ranks and, at p = 4, in two groups of two ranks with data of their own. Its
weights are loaded from a full checkpoint, by the parameters' own sharding. Right is plain torch in float64.
Which rows a rank should hold is derived from the heads: those of its queries, and the heads of K and V they belong to.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tplab.checkpoint import load_full_state_dict
from tplab.course.ch06 import plain
from tplab.course.checking import WORLD_SIZES, Observed, Question, Traffic, fresh_generator, observe, run_cases, verify
from tplab.course.observing import NotRun
from tplab.course.scenes import (
    IN_GROUPS,
    ask_about_group,
    by_name,
    group_question,
    make_group,
    member_of,
    random_tensor,
)
from tplab.runtime import device
from tplab.sharding import Sharding

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


def run_attention(
    attention_class: Any, cases: Sequence[tuple[Kind, Case]], data: Sequence[Sequence[dict[str, Any]]]
) -> list[Observed]:
    """On a rank: every case, one after the other."""
    return [
        run_case(attention_class, kind, case, mine[dist.get_rank()])
        for (kind, case), mine in zip(cases, data, strict=True)
    ]


def run_case(attention_class: Any, kind: Kind, case: Case, mine: dict[str, Any]) -> Observed:
    group = make_group(case.groups)
    options = {**case.options(), "group": group, "device": device(), "dtype": torch.float64}
    attention = attention_class(*kind.sizes(case), **options)
    params = dict(attention.named_parameters())
    cut = f"sharding of {kind.weight}"
    seen: Observed = {
        "parameters": shapes(params),
        cut: str(getattr(params.get(kind.weight), "tensor_parallel", None)),
    }
    if any(seen[name] != mine[name] for name in ("parameters", cut)):
        names = ("out", "dx", *GRADIENTS, "forward traffic", "backward traffic")
        return seen | dict.fromkeys(names, NotRun("the parameters are others"))
    load_full_state_dict(attention, {name: value.to(device()) for name, value in mine["full"].items()}, group)
    watched = {
        letters: params.get(name)
        for letters, name in {"W": kind.weight, "b": kind.bias, "Wo": "out.weight", "bo": "out.bias"}.items()
    }
    noted = observe(attention, mine["dy"].to(device()), inputs={"x": mine["x"].to(device())}, parameters=watched)
    lengths = [len(rows_of(heads)) for heads in mine["heads"].values()]
    for letter in ("W", "b"):
        noted |= split_gradient(noted.pop(f"d{letter}"), letter, lengths)
    noted["backward traffic"] = summed_up(noted["backward traffic"], mine["backward traffic"])
    return seen | noted


GRADIENTS = ("dWq", "dWk", "dWv", "dWo", "dbq", "dbk", "dbv", "dbo")


def split_gradient(gradient: Any, letter: str, lengths: Sequence[int]) -> Observed:
    """The gradient of the fused weight or bias as those of its three parts."""
    parts = gradient.split(lengths) if isinstance(gradient, Tensor) else [gradient] * 3
    return {f"d{letter}{part}": value for part, value in zip(PARTS, parts, strict=True)}


def summed_up(seen: Any, expected: Traffic) -> Any:
    """The expected traffic where the same numbers were sent in the same groups in another division into calls.

    K, V and their biases may be added up over the copies one by one or together.
    """
    if not isinstance(seen, Traffic) or not all(call.waited for call in seen):
        return seen

    def totals(traffic: Traffic) -> dict[Any, int]:
        sums: dict[Any, int] = {}
        for call in traffic:
            key = (call.kind, call.dtype, call.group)
            sums[key] = sums.get(key, 0) + call.numel
        return sums

    return expected if totals(seen) == totals(expected) else seen


def shapes(params: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {list(value.shape)}" for name, value in sorted(params.items()))


@dataclass(frozen=True)
class Reference:
    """Attention on one process: its full weights, an input, an output, and all gradients for a random dy."""

    x: Tensor
    full: dict[str, Tensor]  # Wq, Wk, Wv, Wo and, with a bias, bq, bk, bv, bo
    dy: Tensor
    out: Tensor
    gradients: dict[str, Tensor]


def reference(case: Case, generator: torch.Generator) -> Reference:
    rows = {"q": HIDDEN, "k": case.kv_heads * DIM, "v": case.kv_heads * DIM, "o": HIDDEN}
    full = {f"W{part}": random_tensor(generator, size, HIDDEN) / 3 for part, size in rows.items()}
    if case.bias:
        full |= {f"b{part}": random_tensor(generator, size) for part, size in rows.items()}
    x = random_tensor(generator, *case.leading, HIDDEN)
    if case.transposed:
        x = random_tensor(generator, HIDDEN, *reversed(case.leading)).permute(2, 1, 0)
    dy = random_tensor(generator, *case.leading, HIDDEN)
    leaves = {name: value.clone().requires_grad_() for name, value in {"x": x, **full}.items()}
    q, k, v = (plain.split(F.linear(leaves["x"], leaves[f"W{p}"], leaves.get(f"b{p}")), DIM) for p in PARTS)
    k, v = (torch.stack([t[:, head * case.kv_heads // HEADS] for head in range(HEADS)], 1) for t in (k, v))
    out = F.linear(plain.merge(plain.attend(q, k, v, case.causal)), leaves["Wo"], leaves.get("bo"))
    out.backward(dy)
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return Reference(x, full, dy, out.detach(), gradients)


def held_by(case: Case, whole: Mapping[str, Tensor], index: int, q: int) -> dict[str, Tensor]:
    """What rank `index` of q ranks must hold of full weights, or of their gradients."""
    heads = heads_of(index, q, case.kv_heads)
    held = {}
    for name, value in whole.items():
        if name[1:] in heads:
            held[name] = value[rows_of(heads[name[1]])]
        else:
            held[name] = value[:, rows_of(heads["q"])] if name == "Wo" else value
    return held


def named(kind: Kind, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under the learner's names: those of q, k and v fused."""
    names = {kind.weight: torch.cat([held[f"W{part}"] for part in PARTS]), "out.weight": held["Wo"]}
    if "bo" in held:
        names |= {kind.bias: torch.cat([held[f"b{part}"] for part in PARTS]), "out.bias": held["bo"]}
    return names


def right_local(y: Tensor, n: int, m: int, causal: bool) -> Tensor:
    q, k, v = (plain.split(part, DIM) for part in y.split([n * DIM, m * DIM, m * DIM], -1))
    k, v = (part.repeat_interleave(n // m, 1) for part in (k, v))
    return plain.merge(plain.attend(q, k, v, causal))


def term(case: Case, local: Local, x: Tensor, held: Mapping[str, Tensor]) -> Tensor:
    """One rank's summand of the output, before the last bias."""
    n, m = (held[f"W{part}"].shape[0] // DIM for part in "qk")
    weight = torch.cat([held[f"W{part}"] for part in PARTS])
    bias = torch.cat([held[f"b{part}"] for part in PARTS]) if "bq" in held else None
    return F.linear(local(F.linear(x, weight, bias), n, m, case.causal), held["Wo"])


PARTIAL = "this rank's summand plus the bias: not added up over the ranks"
BIAS_P_TIMES = "the right one with the last bias added p times"
OWN_QUERIES = "the part that comes from this rank's own queries"
WHOLE_GROUP = "the sum over all ranks, also over those that hold another head"
MEAN = "the mean over the copies, not the sum"
K_V_AGAIN = "the right one with the part through K and V counted once for every copy"


def lookalikes(kind: Kind, case: Case, plain_run: Reference, index: int, q: int) -> dict[str, dict[str, Any]]:
    """What known mistakes give on this rank, by observation."""
    held = [held_by(case, plain_run.full, i, q) for i in range(q)]
    bias = plain_run.full.get("bo", torch.zeros(HIDDEN, dtype=torch.float64))
    out: dict[str, Tensor] = {}
    for label, mistake in kind.mistakes.items():
        if label != plain.NO_MASK or case.causal:
            out[label] = sum(term(case, mistake, plain_run.x, mine) for mine in held) + bias
    if q == 1:
        return {"out": out}
    out[PARTIAL] = term(case, right_local, plain_run.x, held[index]) + bias
    if case.bias:
        out[BIAS_P_TIMES] = plain_run.out + (q - 1) * bias
    copies = max(1, q // case.kv_heads)
    alike: dict[str, dict[str, Any]] = {"out": out}
    names = ["dWk", "dWv", *(["dbk", "dbv"] if case.bias else [])]
    if copies > 1:
        summands = [gradients_of_term(case, plain_run, mine) for mine in held]
        for name in names:
            mine = [summand[name[1:]] for summand in summands]
            right = held_by(case, plain_run.gradients, index, q)[name[1:]]
            alike[name] = {OWN_QUERIES: mine[index], MEAN: right / copies}
            if copies < q:
                alike[name][WHOLE_GROUP] = torch.stack(mine).sum(0)
        through = through_k_and_v(case, plain_run)
        alike["dx"] = {K_V_AGAIN: plain_run.gradients["x"] + (copies - 1) * through}
    return alike


def gradients_of_term(case: Case, plain_run: Reference, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of one rank's own summand."""
    leaves = {name: value.clone().requires_grad_() for name, value in held.items()}
    term(case, right_local, plain_run.x, leaves).backward(plain_run.dy)
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def through_k_and_v(case: Case, plain_run: Reference) -> Tensor:
    """The part of dx that comes through K and V; the rest comes through Q."""
    x, w = plain_run.x.clone().requires_grad_(), plain_run.full
    q = F.linear(plain_run.x, w["Wq"], w.get("bq"))
    k, v = (F.linear(x, w[f"W{part}"], w.get(f"b{part}")) for part in "kv")
    y = right_local(torch.cat([q, k, v], -1), HEADS, case.kv_heads, case.causal)
    (gradient,) = torch.autograd.grad(F.linear(y, w["Wo"]), x, plain_run.dy)
    return gradient


def backward_traffic(case: Case, plain_run: Reference, index: int, p: int, ranks: tuple[int, ...]) -> Traffic:
    """f for x over all ranks of the group; where there are copies, f for the rows of K and V over the copies."""
    calls = list(Traffic.expected(p, ("all_reduce", plain_run.x.numel()), group=ranks))
    copies = max(1, len(ranks) // case.kv_heads)
    neighbours = ranks[index // copies * copies :][:copies]
    sizes = [2 * DIM * HIDDEN, 2 * DIM] if case.bias else [2 * DIM * HIDDEN]
    return Traffic([*calls, *Traffic.expected(p, *(("all_reduce", size) for size in sizes), group=neighbours)])


def expect(kind: Kind, case: Case, plain_run: Reference, rank: int, p: int) -> tuple[dict, dict, dict]:
    """What a rank is given, what is right there, and what known mistakes give."""
    ranks = member_of(p, case.groups)[rank][1]
    index, q = ranks.index(rank), len(ranks)
    own, gradients = (held_by(case, whole, index, q) for whole in (plain_run.full, plain_run.gradients))
    right: dict[str, Any] = {
        "parameters": shapes(named(kind, own)),
        f"sharding of {kind.weight}": str(kind.sharding(case)),
        "out": plain_run.out,
        "dx": plain_run.gradients["x"],
        **{name: gradients.get(name[1:]) for name in GRADIENTS},
        "forward traffic": Traffic.expected(p, ("all_reduce", plain_run.out.numel()), group=ranks),
        "backward traffic": backward_traffic(case, plain_run, index, p, ranks),
    }
    checked = ("parameters", f"sharding of {kind.weight}", "backward traffic")
    held = {
        "x": plain_run.x,
        "dy": plain_run.dy,
        "full": named(kind, plain_run.full),
        "heads": heads_of(index, q, case.kv_heads),
        **{name: right[name] for name in checked},
    }
    return held, right, lookalikes(kind, case, plain_run, index, q)


def check_attention(
    number: str, attention_class: Any, kind: Kind, cases: Sequence[Case], questions: Sequence[Question]
) -> None:
    for p in WORLD_SIZES:
        generator = fresh_generator()
        here = [case for case in cases if case.groups is None or p == 4]
        table = []
        for case in here:
            runs = [reference(case, generator) for _ in case.groups or (0,)]
            members = member_of(p, case.groups)
            table.append([expect(kind, case, runs[i], rank, p) for rank, (i, _) in enumerate(members)])
        for batch in (slice(0, 1), slice(1, None)):  # the plain case alone first: its message is the clearest
            seen_by_case = run_cases(
                run_attention,
                p,
                attention_class,
                [(kind, case) for case in here[batch]],
                [[row[0] for row in rows] for rows in table[batch]],
                note=lambda pair: pair[1].note(pair[0], attention_class),
                question=lambda pair: crash(*pair),
                stuck=lambda pair: crash(*pair) if pair[1].groups else None,
            )
            for case, rows, seen in zip(here[batch], table[batch], seen_by_case, strict=True):
                verify(
                    number,
                    p,
                    seen,
                    [row[1] for row in rows],
                    questions=[group_question(kind.whose_group), *questions] if case.groups else questions,
                    lookalikes=by_name([row[2] for row in rows]),
                    note=case.note(kind, attention_class),
                )


def crash(kind: Kind, case: Case) -> str:
    """What to ask where the attention raises."""
    if case.groups:
        return ask_about_group(kind.whose_group)
    return kind.crash if case.bias else f"{NO_BIAS_CRASH} If it is not about that: {kind.crash}"


NO_BIAS_CRASH = "Here the attention was built with bias=False. Which line needs a bias that is None?"
