"""The adversary: what touches a tensor too early fails every time, and what waits in any order passes."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tplab
from tests.course.checks import refused
from tplab.course.checks.cases import Case, random_tensor
from tplab.course.checks.exercises import check
from tplab.course.checks.late import EarlyAccessError, late
from tplab.course.checks.recorded_traffic import traffic
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.checks.twins import Twin
from tplab.course.notebooks.mistakes import shared
from tplab.pipeline import Channels, Pipeline, schedules
from tplab.runtime import record, slow_link
from tplab.tensor import ColumnParallelLinear, RowParallelLinear

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8)
TIMES = 5
# With or without the adversary, is_completed() of all others stays False on gloo until wait()
POLLED = ("all_reduce", "broadcast", "reduce", "all_gather", "into", "a2a", "gather", "scatter")


def start_all(dtype: torch.dtype) -> list[tuple[str, Any, list[torch.Tensor], list[torch.Tensor]]]:
    """Start every asynchronous operation on two ranks. Return each one's name, Work, results, and right results."""
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
    r = made(1 + rank)
    add("reduce", lambda: dist.reduce(r, 0, async_op=True), [r] if rank == 0 else [], [made(3)][rank:])
    parts = [made(0), made(0)]
    add("all_gather", lambda: dist.all_gather(parts, made(7 + rank), async_op=True), parts, [made(7), made(8)])
    full = made(0, 0)
    add("into", lambda: dist.all_gather_into_tensor(full, made(7 + rank), async_op=True), [full], [made(7, 8)])
    half = made(0)
    add("rs", lambda: dist.reduce_scatter(half, [made(1), made(2)], async_op=True), [half], [made(2 + 2 * rank)])
    own = made(0)
    add("rst", lambda: dist.reduce_scatter_tensor(own, made(1, 2), async_op=True), [own], [made(2 + 2 * rank)])
    swapped = made(0, 0)
    add("a2a", lambda: dist.all_to_all_single(swapped, made(rank, 4 + rank), async_op=True), [swapped],
        [made(4 * rank, 4 * rank + 1)])  # fmt: skip
    gathered = [made(0), made(0)] if rank == 0 else None
    add("gather", lambda: dist.gather(made(1 + rank), gathered, 0, async_op=True), gathered or [],
        [made(1), made(2)] if rank == 0 else [])  # fmt: skip
    spread = made(0)
    add("scatter", lambda: dist.scatter(spread, [made(3), made(4)] if rank == 0 else None, 0, async_op=True), [spread],
        [made(3 + rank)])  # fmt: skip
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


def everything_in_three_orders() -> list[str]:
    with record() as section:
        wrong = [text for dtype in DTYPES for text in in_three_orders(dtype)]
    unended = [call.kind for call in section if call.kind in ("send", "recv") and call.end is None]
    return wrong + unended


def in_three_orders(dtype: torch.dtype) -> list[str]:
    wrong = []
    for order in ("as started", "reversed", "by is_completed"):
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
            for name, work, _, _ in started:  # the request of a collective may be waited for again
                if name in POLLED:
                    work.wait()
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
        y = torch.full((2, 3), 1.0).t()  # not contiguous, but one block
        work = dist.all_reduce(y, async_op=True)
        work.wait()
        seen["transposed"] = y.tolist()
        z = torch.ones(2)
        future = dist.all_reduce(z, async_op=True).get_future()
        seen["future"] = future.wait()[0].tolist()
        seen["same tensor"] = future.value()[0] is z or future.value()[0].data_ptr() == z.data_ptr()
        dist.all_reduce(z)
        seen["blocking"] = z.tolist()
        w = torch.ones(2, requires_grad=True)
        loss = (w * w).sum()
        dist.all_reduce(w.data, async_op=True).wait()
        seen["empty"] = dist.all_reduce(torch.empty(0), async_op=True).wait()
        loss.backward()
        dist.barrier()
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
    receives_into_what_is_sent: ("send", "same memory"),  # this one and the next two leave halves of messages behind
    drops_the_request: ("send", "dropped"),
    sends_what_has_not_arrived: ("recv", "same memory"),
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


def reads_too_early() -> bool:
    x, y, other = torch.full((6,), 3.0), torch.empty(6), 1 - dist.get_rank()
    with late():
        work = dist.all_reduce(x, async_op=True)
        total = x.sum()
        work.wait()
        works = [dist.irecv(y, other), dist.isend(x, other)]
        received = y.sum()
        for work in works:
            work.wait()
    return bool(total.isnan() and received.isnan() and y.sum() == 36)


def fails_while_it_sends() -> str:
    try:
        with late():
            kept = dist.isend(torch.ones(1), 1 - dist.get_rank())
            raise KeyError(kept.is_completed())
    except Exception as error:
        return type(error).__name__


def own_layers(adversary: AbstractContextManager[Any]) -> list[Any]:
    """Two layers and three pipeline schedules of tplab, the losses and gradients of each."""
    torch.manual_seed(0)
    rank, seen = dist.get_rank(), list[Any]()
    with adversary:
        up, down = ColumnParallelLinear(8, 8), RowParallelLinear(8, 8)
        x = torch.randn(4, 8, requires_grad=True)
        down(up(x)).sum().backward()
        seen.append(x.grad)
        channels = Channels()
        for make in (schedules.gpipe, schedules.one_f_one_b, schedules.zero_bubble):
            stage = torch.nn.Linear(6, 6)
            torch.nn.init.constant_(stage.weight, 0.5)
            pipeline = Pipeline(
                [stage], make(2, 4), shape=(3, 6), dtype=torch.float32, channels=channels,
                loss_sum=lambda y, target: ((y - target) ** 2).sum(),
            )  # fmt: skip
            inputs = [torch.full((3, 6), 1.0 + k) for k in range(4)]
            seen.append(pipeline.step(*((inputs, None) if rank == 0 else (None, inputs))))
            seen.append(stage.weight.grad)
    return seen


def run_all() -> dict[str, Any]:
    """All programs. The last ones leave messages behind that nobody receives."""
    return {
        "orders": everything_in_three_orders(),
        "right": right_programs(),
        "layers": [own_layers(each) for each in (nullcontext(), late(), slow_link(1e-4, 1e9))],
        "read": reads_too_early(),
        "caught": caught(),
        "error": fails_while_it_sends(),
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
            "transposed": [[2, 2]] * 3, "future": [2, 2], "same tensor": True, "blocking": [4, 4],
            "empty": True, "waited for": set(),
        }  # fmt: skip


def test_tplabs_own_layers_are_right_with_late_messages_and_on_a_slow_link(ranks) -> None:
    for seen in ranks:
        plain, *others = seen["layers"]
        for other in others:
            torch.testing.assert_close(other, plain, rtol=0, atol=0)


def test_what_touches_a_tensor_too_early_is_caught_every_time(ranks) -> None:
    """The report names the operation, the rank, the line that started it, and how many elements changed."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    for number, (program, (kind, what)) in enumerate(WRONG.items()):
        code = getattr(program, "func", program).__code__
        line = next(n for n in range(code.co_firstlineno, len(lines)) if "# here" in lines[n]) + 1
        for rank, seen in enumerate(ranks):
            for text in seen["caught"][number]:
                said = rf"({kind}) #\d+ of rank {rank}, started at .*test_late.py line {line} in"
                assert re.search(said, text), (program, text)
                assert what in text, (program, text)


def test_what_is_read_before_it_has_arrived_is_wrong(ranks) -> None:
    assert all(seen["read"] for seen in ranks)


def test_an_error_in_the_block_is_not_replaced(ranks) -> None:
    assert [seen["error"] for seen in ranks] == ["KeyError", "KeyError"]


# A check with this adversary. The answer sums several tensors, as in OpenNMT's all_reduce_and_rescale_tensors


def sums_and_divides(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    sums = [tensor.clone() for tensor in tensors]
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in sums]:
        work.wait()
    return [tensor.div_(dist.get_world_size()) for tensor in sums]


def divides_and_then_waits(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    sums = [tensor.clone() for tensor in tensors]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in sums]
    for work in works:  # without the adversary, the sums are there now, whenever gloo delivers them
        while not getattr(work, "work", work).is_completed():
            pass
    means = [tensor / dist.get_world_size() for tensor in sums]
    for work in works:
        work.wait()
    return means


@pytest.mark.usefixtures("table")
def test_a_check_with_late_messages() -> None:
    means = OnRanks(
        cases=[Case()], draw=lambda case, generator, size: [[random_tensor(generator, 9)] * 3 for _ in range(size)],
        give=lambda case, each, place: each[place.index], run=lambda answer, case, x, group: {"out": answer(x)},
        right=lambda case, each, place: {"out": [torch.stack(xs).mean(0) for xs in zip(*each, strict=True)]},
        world_sizes=(2,), late=True,
    )  # fmt: skip
    exercise("90.82", "Means", takes=["means"], trials=[means], passed="Means.")
    assert "Means." in str(check("90.82", sums_and_divides))
    failure = refused("90.82", divides_and_then_waits)
    assert Twin.LATE.value in failure.headline
    assert failure.question == shared(Twin.LATE.value)
