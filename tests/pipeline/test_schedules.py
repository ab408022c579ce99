"""Schedules as data: their order by hand, the published formulas for bubble, memory and traffic, what is refused."""

import re

import pytest

from tests import saying
from tests.pipeline.messages import traffic
from tplab.pipeline.p2p import connections
from tplab.pipeline.schedule_order import ScheduleError, Span, bubble, check, simulate
from tplab.pipeline.schedules import (
    Action,
    Schedule,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    peak_live,
    zero_bubble,
)

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 8, 16)]
ROUNDS = [(p, m, v) for p, m in SIZES if m % p == 0 for v in (1, 2, 3)]


def schedule(text, m):
    """A schedule from lines such as "F0 F1 B0 B1", one a rank; a chunk stands behind a slash."""
    rows = []
    for line in text.strip().splitlines():
        words = [(word[0], *map(int, word[1:].split("/"))) for word in line.split()]
        rows.append(tuple(Action(*word) for word in words))
    return Schedule("by hand", tuple(rows), m)


# The order of actions, written out by hand


BY_HAND = {
    "GPipe": (gpipe(2, 3), "F0 F1 F2 B0 B1 B2\nF0 F1 F2 B0 B1 B2", 3),
    "1F1B": (
        one_f_one_b(4, 5),
        "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4\nF0 F1 F2 B0 F3 B1 F4 B2 B3 B4\n"
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4\nF0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
        5,
    ),
    "1F1B with fewer micro-batches than ranks": (
        one_f_one_b(4, 2),
        "F0 F1 B0 B1\nF0 F1 B0 B1\nF0 F1 B0 B1\nF0 B0 F1 B1",
        2,
    ),
    "interleaved": (
        interleaved(2, 4, 2),
        "F0 F1 F0/1 F1/1 F2 B0/1 F3 B1/1 F2/1 B0 F3/1 B1 B2/1 B3/1 B2 B3\n"
        "F0 F1 F0/1 B0/1 F1/1 B1/1 F2 B0 F3 B1 F2/1 B2/1 F3/1 B3/1 B2 B3",
        4,
    ),
    "zero bubble": (
        zero_bubble(3, 4),
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3\nF0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3\nF0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
        4,
    ),
}


@pytest.mark.parametrize(("made", "text", "m"), BY_HAND.values(), ids=BY_HAND)
def test_the_order_is_the_published_one(made, text, m):
    assert made.actions == schedule(text, m).actions
    assert made.micro_batches == m


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match=saying("p=0", "m=1", "v=1")):
        gpipe(0, 1)
    with pytest.raises(ValueError, match=saying("3 micro-batches", "2 ranks", "multiple of 2")):
        interleaved(2, 3, 2)


# The published formulas


def test_bubble_and_peak_of_gpipe_and_1f1b():
    for p, m in SIZES:
        for made in (gpipe(p, m), one_f_one_b(p, m)):
            assert bubble(simulate(made)) == pytest.approx((p - 1) / m)
            assert bubble(simulate(made, {"F": 1.5, "B": 2.5})) == pytest.approx((p - 1) / m)
        assert peak_live(gpipe(p, m)) == [m] * p
        assert peak_live(one_f_one_b(p, m)) == [min(m, p - rank) for rank in range(p)]


def test_bubble_and_peak_of_interleaved():
    for p, m, v in ROUNDS:
        made = interleaved(p, m, v)
        assert bubble(simulate(made)) == pytest.approx((p - 1) / (m * v))
        if v > 1:
            warm_up = [2 * (p - rank - 1) + (v - 1) * p for rank in range(p)]
            assert peak_live(made) == [min(m * v, forwards + 1) for forwards in warm_up]
        else:
            assert made == one_f_one_b(p, m)


def test_bubble_and_peak_of_zero_bubble():
    for p, m in SIZES:
        made = zero_bubble(p, m)
        check(made)
        assert peak_live(made) == [min(m, p)] * p == [peak_live(one_f_one_b(p, m))[0]] * p
        for f, i, w in ((1, 1, 1), (1, 1.5, 0.5), (2, 2, 1.5)) if m >= p else ():
            spans = simulate(made, {"F": f, "I": i, "W": w})
            assert bubble(spans) == pytest.approx((p - 1) * (f + i - w) / (m * (f + i + w)))


@pytest.mark.parametrize("p", [1, 2, 4])
def test_every_boundary_between_ranks_is_crossed_twice_by_every_micro_batch(p):
    m = 8
    inner = [2 * m if 0 < rank < p - 1 else m for rank in range(p)] if p > 1 else [0]
    for made in (gpipe(p, m), one_f_one_b(p, m), zero_bubble(p, m)):
        assert traffic(made, 100) == [(calls, 100 * calls) for calls in inner]
    boundaries = 3 * p - 1 if p > 1 else 0
    assert sum(calls for calls, _ in traffic(interleaved(p, m, 3), 100)) == 2 * m * boundaries
    assert sum(size for _, size in traffic(forward_only(interleaved(p, m, 3)), 100)) == 100 * m * boundaries


def test_outputs_go_to_the_stage_behind_and_gradients_to_the_one_before_over_connections_that_are_opened():
    """That every schedule gets through NCCL's rules is for tests/gpu/test_pipelines.py, also on emulated GPUs."""
    made = interleaved(3, 3, 2)  # stages 0, 3 on rank 0; 1, 4 on rank 1; 2, 5 on rank 2
    assert [made.receiver(("output", stage, 0)) for stage in range(5)] == [1, 2, 0, 1, 2]
    assert [made.receiver(("gradient", stage, 0)) for stage in range(1, 6)] == [0, 1, 2, 0, 1]
    for p, m in SIZES:
        for made in (gpipe(p, m), zero_bubble(p, m), *([interleaved(p, m, 2)] if m % p == 0 else [])):
            given = {(rank, made.gives(rank, action)) for rank, row in enumerate(made.actions) for action in row}
            used = {(rank, made.receiver(result)) for rank, result in given if result is not None}
            assert {(rank, other) for rank, other in used if rank != other} <= set(connections(p))


# When each action starts


def test_spans_of_a_small_schedule():
    first, second = simulate(one_f_one_b(2, 2))
    times = {("F", 0): (0, 1), ("F", 1): (1, 2), ("B", 0): (4, 6), ("B", 1): (7, 9)}
    assert first == [Span(Action(*action), *time) for action, time in times.items()]
    assert [(span.start, span.end) for span in second] == [(1, 2), (2, 4), (4, 5), (5, 7)]


# What is refused


REFUSED = {
    "missing forward": ("F0 B0\nB0", ["rank 1", " B ", "micro-batch 0", "chunk 0", "F and B"]),
    "missing weights": ("F0 B0\nF0 I0", ["rank 1", " F, I ", "micro-batch 0"]),
    "twice": ("F0 F0 B0\nF0 B0", ["rank 0", " F, F, B ", "micro-batch 0"]),
    "both kinds": ("F0 B0 W0\nF0 B0", ["rank 0", " F, B, W ", "micro-batch 0"]),
    "a micro-batch too many": ("F0 B0 F1\nF0 B0", ["rank 0", "F1", "1 micro-batches", "1 chunks"]),
    "weights before input": (
        "F0 W0 I0\nF0 B0",
        ["'W", "micro-batch 0", "stage 0", "rank 0", "'B", "micro-batch 0", "stage 0", "lane"],
    ),
    "backward before forward": (
        "F0 B0\nB0 F0",
        ["'B", "micro-batch 0", "stage 1", "rank 1", "'F", "micro-batch 0", "stage 1", "lane"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_incomplete_or_in_an_impossible_order_is_refused(name):
    text, says = REFUSED[name]
    with pytest.raises(ScheduleError, match=saying(*says)):
        check(schedule(text, 1))


def test_the_two_ranks_of_a_circle_are_named():
    with pytest.raises(ScheduleError) as error:  # rank 0 only waits for the circle
        check(schedule("F0 F1 B0 B1\nF0 I0 F1 I1 W0 W1\nF0 F1 I0 I1 W0 W1", 2))
    b1, b2, f1, f2 = (("'" + kind, f"micro-batch {k}", f"stage {s}'") for kind, k in ("B0", "F1") for s in (1, 2))
    assert re.search(saying(*b1, "rank 1", *b2, *b1, "rank 1", *b2, *f2, "rank 2", *f1), str(error.value))
    assert "rank 0" not in str(error.value)
