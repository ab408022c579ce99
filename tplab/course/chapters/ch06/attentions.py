"""Run one of the parallel attentions of exercises 6.2 and 6.4 and compare it with attention on one process.

Each is run in several cases on p = 1, 2, 4 ranks and, at p = 4, in two groups of two ranks with data of their own. Its
weights are loaded from a full checkpoint, by the parameters' own sharding. Right is plain torch in float64.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tplab.course.chapters.ch06.cases import DIM, HIDDEN, PARTS, Case, Kind, heads_of, rows_of
from tplab.course.chapters.ch06.references import Reference, held_by, lookalikes, named, reference
from tplab.course.checks import (
    WORLD_SIZES,
    NotRun,
    Observed,
    Question,
    Traffic,
    ask_about_group,
    by_name,
    fresh_generator,
    group_question,
    make_group,
    member_of,
    observe,
    run_cases,
    verify,
)
from tplab.runtime import device
from tplab.tensor.full_state import load_full_state_dict


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
