"""Attention on one process for the checks of exercises 6.2 and 6.4: what is right on a rank, and what mistakes give."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tplab.course.chapters.ch06 import plain
from tplab.course.chapters.ch06.cases import DIM, HEADS, HIDDEN, PARTS, Case, Kind, Local, heads_of, rows_of
from tplab.course.checks import random_tensor


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
    summands = [gradients_of_term(case, plain_run, mine) for mine in held]
    right = held_by(case, plain_run.gradients, index, q)
    for name in ["dWk", "dWv", *(["dbk", "dbv"] if case.bias else [])]:
        alike[name] = {}
        if copies > 1:
            alike[name] = {OWN_QUERIES: summands[index][name[1:]], MEAN: right[name[1:]] / copies}
        if copies < q:
            alike[name][WHOLE_GROUP] = torch.stack([summand[name[1:]] for summand in summands]).sum(0)
    if copies > 1:
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
