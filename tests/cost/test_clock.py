"""The clock: against numbers done by hand, against the longest path through the graph, and what it refuses."""

import random
import re
from graphlib import TopologicalSorter

import pytest

from tests import saying
from tplab.cost.clock import Operation, OrderError, play


def backward_of_an_mlp(order):
    """Exercise 11.1: four matmuls of 5 ms and a message of 8 ms. `order` is that of dZ, dB, dX, dA, start and wait."""
    needs = {
        "dZ": ["dy"], "dB": ["dy"], "dX": ["dZ"], "dA": ["dZ"], "start": ["dX"], "wait": ["message"],
    }  # fmt: skip
    lasts = {"start": 0, "wait": 0}
    return [
        Operation("dy", 0),
        Operation("message", 8, ["start"], lane="wire"),
        *(Operation(name, lasts.get(name, 5), needs[name]) for name in order.split()),
    ]


@pytest.mark.parametrize(
    ("order", "total", "dy"),
    [
        ("dZ dB dX start wait dA", 28, 10),
        ("dZ dB dX start dA wait", 23, 10),
        ("dZ dX start dA dB wait", 20, 20),
        ("dZ dX start dB dA wait", 20, 15),
    ],
)
def test_what_nobody_waits_for_hides_a_message_and_keeps_its_input_alive(order, total, dy):
    timing = play(backward_of_an_mlp(order))
    assert timing.total == total
    assert timing.lifetimes["dy"] == (0, dy)


def longest_path(operations):
    """The end of each operation, by a topological order of the graph that needs and lanes make together."""
    by_name = {operation.name: operation for operation in operations}
    graph, last = {}, {}
    for operation in operations:
        lane = operation.rank, operation.lane
        graph[operation.name] = {*operation.needs, *([last[lane]] if lane in last else [])}
        last[lane] = operation.name
    ends = {}
    for name in TopologicalSorter(graph).static_order():
        ends[name] = max((ends[other] for other in graph[name]), default=0) + by_name[name].duration
    return ends


@pytest.mark.parametrize("seed", range(5))
def test_random_lists_against_the_longest_path(seed):
    chance = random.Random(seed)
    operations = []
    for number in range(60):
        needs = chance.sample(range(number), min(number, chance.randrange(3)))
        lane, rank = chance.choice(("compute", "wire")), chance.randrange(3)
        operations.append(Operation(number, chance.randrange(6), needs, lane, rank))
    timing = play(operations)
    assert {name: span.end for name, span in timing.spans.items()} == longest_path(operations)
    for rank in range(3):
        for lane in ("compute", "wire"):
            spans = timing.lanes[rank, lane]
            idle = sum(wait.end - wait.start for wait in timing.waits(rank, lane))
            assert idle == spans[-1].end - sum(span.operation.duration for span in spans)
    chance.shuffle(lanes := sorted(timing.lanes))  # in which order the lanes are listed doesn't matter
    shuffled = [span.operation for lane in lanes for span in timing.lanes[lane]]
    assert play(shuffled).spans == timing.spans


def test_an_impossible_order_names_the_operation_and_the_missing_input():
    with pytest.raises(OrderError, match=saying("'dX'", "rank 0", "'dZ'", "lane")) as error:
        play(backward_of_an_mlp("dX start dZ dB dA wait"))
    assert (error.value.operation, error.value.missing) == ("dX", "dZ")
    stuck = [Operation("first", 1, ["a"], rank=2), Operation("a", 1, ["b"]), Operation("b", 1, ["a"], rank=1)]
    with pytest.raises(OrderError) as error:
        play(stuck)
    assert [(one.name, name) for one, name in error.value.circle] == [("a", "b"), ("b", "a")]
    assert re.search(saying("'b'", "'a'", "rank 0", "'b'", "'b'", "rank 1", "'a'"), str(error.value))
