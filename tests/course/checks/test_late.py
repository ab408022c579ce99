"""The adversary: what touches a tensor too early fails every time, and what waits in any order passes."""

import re
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tplab
from tplab.course.checks.late import EarlyAccessError, late
from tplab.course.checks.recorded_traffic import traffic
from tplab.runtime import record

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8)
TIMES = 5
# With or without the adversary, is_completed() of all others stays False on gloo until wait()
POLLED = ("all_reduce", "broadcast", "all_gather", "into", "a2a")


def start_all(dtype: torch.dtype) -> list[tuple[str, Any, list[torch.Tensor], list[torch.Tensor]]]:
    """Start many asynchronous operations on two ranks. Return each one's name, Work, results, and right results."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()

    def made(*factors: int) -> torch.Tensor:
        return torch.tensor(factors, dtype=dtype).repeat_interleave(3)

    started = []

    def add(name: str, start: Callable[..., Any], results: list[torch.Tensor], right: list[torch.Tensor]) -> None:
        started.append((name, start(), results, right))

    x = made(1 + rank)
    add("all_reduce", lambda: dist.all_reduce(x, async_op=True), [x], [made(3)])
    b = made(5 + rank)
    add("broadcast", lambda: dist.broadcast(b, 1, async_op=True), [b][rank:], [made(6)][rank:])  # the root only reads b
    parts = [made(0), made(0)]
    add("all_gather", lambda: dist.all_gather(parts, made(7 + rank), async_op=True), parts, [made(7), made(8)])
    full = made(0, 0)
    add("into", lambda: dist.all_gather_into_tensor(full, made(7 + rank), async_op=True), [full], [made(7, 8)])
    own = made(0)
    add("rst", lambda: dist.reduce_scatter_tensor(own, made(1, 2), async_op=True), [own], [made(2 + 2 * rank)])
    swapped = made(0, 0)
    add("a2a", lambda: dist.all_to_all_single(swapped, made(rank, 4 + rank), async_op=True), [swapped],
        [made(4 * rank, 4 * rank + 1)])  # fmt: skip
    got = made(0)
    add("irecv", lambda: dist.irecv(got, other), [got], [made(2 - rank)])
    add("isend", lambda: dist.isend(made(1 + rank), other), [], [])
    in_batch = made(0)
    operations = [dist.P2POp(dist.isend, made(9 + rank), other), dist.P2POp(dist.irecv, in_batch, other)]
    first, second = dist.batch_isend_irecv(operations)
    add("batch send", lambda: first, [], [])
    add("batch receive", lambda: second, [in_batch], [made(10 - rank)])
    return started


def is_meaningless(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point():
        return bool(tensor.isnan().all())
    return bool((tensor == (torch.iinfo(tensor.dtype).min or torch.iinfo(tensor.dtype).max)).all())


def in_three_orders() -> list[str]:
    wrong = []
    for dtype, order in product(DTYPES, ("as started", "reversed", "by is_completed")):
        with late():
            started = start_all(dtype)
            early = [name for name, _, results, _ in started if not all(map(is_meaningless, results))]
            wrong += [f"{dtype} {name} is early" for name in early]
            for name, work, results, right in reversed(started) if order == "reversed" else started:
                polled = order == "by is_completed" and name in POLLED
                while polled and not work.is_completed():
                    pass
                if not polled:
                    work.wait()
                same = all(torch.equal(a, b) for a, b in zip(results, right, strict=True))
                wrong += [] if same else [f"{dtype} {name} {order}: {results}, right is {right}"]
    return wrong


def right_programs() -> dict[str, Any]:
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    seen: dict[str, Any] = {}
    with late(), record() as section:
        buffer = torch.zeros(4)
        work = dist.irecv(buffer[2:], other)
        buffer[:2] = 5  # not what is received
        dist.isend(torch.full((2,), 1.0 + rank), other).wait()
        work.wait()
        seen["a slice"] = buffer.tolist()
        x = torch.ones(3)
        works = [dist.isend(x, other), dist.isend(x, other)]
        a, b = torch.empty(3), torch.empty(3)
        for work in [dist.irecv(a, other), dist.irecv(b, other), *works]:
            work.wait()
        seen["one tensor sent twice"] = (a + b).tolist()
        work = dist.isend(torch.full((2,), 7.0), other)  # torch keeps this tensor alive
        c = torch.empty(2)
        dist.recv(c, other)
        work.wait()
        seen["only the request is kept"] = c.tolist()
        full = torch.zeros(4)
        full.view(2, 2)[rank] = 3 + rank
        dist.all_gather_into_tensor(full, full.view(2, 2)[rank], async_op=True).wait()
        seen["gathered in place"] = full.tolist()
        z = torch.ones(2)
        seen["future"] = dist.all_reduce(z, async_op=True).get_future().wait()[0].tolist()
    seen["waited for"] = {call.kind for call in traffic(section) if not call.waited}
    return seen


# Wrong programs. Each gets the other rank, and its line with "here" starts the operation


def writes_the_input_of_a_collective(other: int) -> None:
    x, y = torch.ones(6), torch.empty(12)
    work = dist.all_gather_into_tensor(y, x, async_op=True)  # here
    x[:4] = 0
    work.wait()


def divides_too_early(other: int) -> None:
    x = torch.ones(6)
    work = dist.all_reduce(x, async_op=True)  # here
    x[:4].div_(2)
    work.wait()


def sends_what_has_not_arrived(other: int) -> None:
    x = torch.empty(6)
    first = dist.irecv(x, other)  # here
    second = dist.isend(x, other)
    second.wait()
    first.wait()


def receives_into_what_is_sent(other: int) -> None:
    x = torch.empty(6)
    first = dist.isend(x, other)  # here
    second = dist.irecv(x, other)
    second.wait()
    first.wait()


def sends_and(touches: Callable[[torch.Tensor], Any], other: int) -> None:
    x, y = torch.ones(6), torch.empty(6)
    work = dist.isend(x, other)  # here
    touches(x)
    dist.recv(y, other)
    work.wait()


def drops_the_request(other: int) -> None:
    y = torch.empty(6)
    dist.isend(torch.ones(6), other)  # here
    dist.recv(y, other)


WRONG = {
    partial(sends_and, lambda x: x[:4].zero_()): ("isend|send", "4 of 6"),
    partial(sends_and, lambda x: setattr(x, "data", torch.empty(1))): ("send", "freed"),
    partial(sends_and, lambda x: x.untyped_storage().resize_(0)): ("send", "freed"),
    writes_the_input_of_a_collective: ("all_gather", "4 of 6"),
    divides_too_early: ("all_reduce", "4 of 6"),
    receives_into_what_is_sent: ("send", "shape [6]"),  # this one and the next two leave halves of messages behind
    drops_the_request: ("send", "dropped"),
    sends_what_has_not_arrived: ("recv", "shape [6]"),
}


def caught() -> list[list[str]]:
    """Run each program several times, and return what was raised on this rank."""
    errors: list[list[Exception]] = []  # they keep the requests alive. Otherwise, gloo would cancel them
    for program in WRONG:
        errors.append([])
        for _ in range(TIMES):
            try:
                with late():
                    program(1 - dist.get_rank())
                errors[-1].append(AssertionError("nothing was raised"))
            except EarlyAccessError as error:
                errors[-1].append(error)
            dist.barrier()
    return [list(map(str, raised)) for raised in errors]


def run_all() -> dict[str, Any]:
    """All programs. The last ones leave messages behind that nobody receives."""
    return {
        "orders": in_three_orders(),
        "right": right_programs(),
        "caught": caught(),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return list(tplab.launch(run_all, 2, backend="gloo", timeout=240))


def test_results_arrive_at_wait_whatever_the_order(ranks) -> None:
    assert [seen["orders"] for seen in ranks] == [[], []]


def test_what_is_right_passes(ranks) -> None:
    for rank, seen in enumerate(dict(each["right"]) for each in ranks):
        other = 1.0 + (1 - rank)
        assert seen.pop("a slice") == [5, 5, other, other]
        assert seen == {
            "one tensor sent twice": [2, 2, 2], "only the request is kept": [7, 7], "gathered in place": [3, 3, 4, 4],
            "future": [2, 2], "waited for": set(),
        }  # fmt: skip


def test_what_touches_a_tensor_too_early_is_caught_every_time(ranks) -> None:
    """The report names the operation, the rank, the line that started it, and how many elements changed."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    for number, (program, (kind, what)) in enumerate(WRONG.items()):
        code = getattr(program, "func", program).__code__
        line = next(n for n in range(code.co_firstlineno, len(lines)) if "# here" in lines[n]) + 1
        for rank, seen in enumerate(ranks):
            for text in seen["caught"][number]:
                said = rf"({kind}) #\d+ .*rank {rank}\b.*test_late.py line {line}\b"
                assert re.search(said, text), (program, text)
                assert what in text, (program, text)
