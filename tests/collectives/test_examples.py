"""The collectives that chapter 01 shows: each against what it's defined to do, written out for every rank."""

import torch

from tplab import launch
from tplab.collectives import EXAMPLES


def flat(value) -> list[int] | None:
    if value is None:
        return None
    return [int(number) for tensor in (value if isinstance(value, list) else [value]) for number in tensor.flatten()]


def expected(kind: str, p: int) -> list[tuple]:
    rows = [[(i + 1) * 10**rank for i in range(p)] for rank in range(p)]
    total, firsts, zeros = [sum(column) for column in zip(*rows, strict=True)], [row[:1] for row in rows], [0] * p
    together = [row[0] for row in rows]
    return {
        "broadcast": [(rows[1] if r == 1 else zeros, rows[1]) for r in range(p)],
        "scatter": [(rows[1] if r == 1 else None, rows[1][r : r + 1]) for r in range(p)],
        "gather": [(firsts[r], together if r == 1 else None) for r in range(p)],
        "reduce": [(rows[r], total if r == 1 else None) for r in range(p)],
        "all_reduce": [(rows[r], total) for r in range(p)],
        "all_gather": [(firsts[r], together) for r in range(p)],
        "reduce_scatter": [(rows[r], total[r : r + 1]) for r in range(p)],
        "all_to_all": [(rows[r], [row[r] for row in rows]) for r in range(p)],
        "send and recv": [(zeros if r else rows[0], rows[0] if r < 2 else zeros) for r in range(p)],
    }[kind]


def _all() -> dict[str, tuple]:
    return {kind: example() for kind, example in EXAMPLES.items()}


def test_every_example_shows_what_its_collective_does():
    ran = launch(_all, 3)
    for kind in EXAMPLES:
        found = [(flat(before), flat(after)) for before, after in (row[kind] for row in ran)]
        assert found == expected(kind, 3), kind
    assert all(torch.is_tensor(row["all_reduce"][1]) for row in ran)
