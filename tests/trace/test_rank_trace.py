"""A rank's trace: what is hidden is counted by its definition, and a real run's trace has the order of the program."""

import json
import random
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tplab import launch, record
from tplab.runtime import hooks
from tplab.tensor.linear import ColumnParallelLinear
from tplab.trace.chrome import save_chrome_trace
from tplab.trace.rank_trace import LANES, RankTrace, Span, _on_gpu, _worker, trace_rank

TOKENS, IN, OUT = 512, 256, 512


def spans(lane, *times):
    return [Span(lane, lane, float(start), float(end)) for start, end in times]


def test_hidden_and_exposed_times_agree_with_counting_moments():
    """Spans of a lane may overlap, and a rank may compute nothing."""
    generator = random.Random(0)
    for number in range(30):
        counts = {"compute": number % 6, "communicate": 1 + number % 5}
        drawn = {lane: [sorted(generator.sample(range(40), 2)) for _ in range(counts[lane])] for lane in LANES}
        trace = RankTrace(0, [span for lane in LANES for span in spans(lane, *drawn[lane])])
        busy = {lane: {moment for start, end in drawn[lane] for moment in range(start, end)} for lane in LANES}
        both = len(busy["compute"] & busy["communicate"])
        alone = len(busy["communicate"] - busy["compute"])
        assert (trace.hidden, trace.exposed) == (both, alone)
        assert sum(end - start for start, end in trace.waits) == alone
        assert trace.hidden_share == pytest.approx(both / (both + alone))
        assert trace.seconds("compute") == len(busy["compute"])


def _event(name, start, end, *children):
    times = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=f"aten::{name}", time_range=times, cpu_children=list(children))


def test_a_matmul_is_a_product_even_if_its_rank_waited_for_a_core():
    waited = _event("matmul", 0, 100, _event("reshape", 1, 80, _event("view", 2, 3)), _event("mm", 90, 99))
    assert _worker(waited).name == "aten::mm"


def _backward(async_grad_allreduce):
    layer = ColumnParallelLinear(IN, OUT, async_grad_allreduce=async_grad_allreduce)
    x = torch.randn(TOKENS, IN, requires_grad=True)
    dy = torch.randn(TOKENS, OUT // dist.get_world_size())
    layer(x).backward(dy)
    y = layer(x)
    with record() as section, trace_rank() as trace:
        y.backward(dy)
    return trace, list(section)


def _every_kind():
    x = torch.ones(64)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with record() as section, trace_rank() as trace:
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.all_gather([torch.empty(64), torch.empty(64)], x)
        dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0)
        dist.barrier()
    with trace_rank() as own:
        dist.all_reduce(torch.ones(4) @ torch.ones(4, 4), group=alone)
    return trace.lane("communicate"), list(section), {span.lane for span in own.spans}


def _message():
    """Rank 1 expects a message early, and rank 0 sends it late. Both do other things before they wait."""
    x = torch.ones(4)
    dist.barrier()
    with trace_rank() as trace:
        time.sleep(0.2 * (dist.get_rank() == 0))
        work = dist.isend(x, 1) if dist.get_rank() == 0 else dist.irecv(x, 0)
        time.sleep(0.1)
        wait = hooks.active.now()
        work.wait()
    (span,) = trace.lane("communicate")
    return span, wait


def _all():
    return {"beside": _backward(True), "waits": _backward(False), "kinds": _every_kind(), "message": _message()}


@pytest.fixture(scope="module")
def two():
    return launch(_all, 2)


@pytest.mark.parametrize(
    ("way", "order"), [("waits", ["mm", "mm", "all_reduce"]), ("beside", ["mm", "all_reduce", "mm"])]
)
def test_the_trace_of_a_backward_pass_has_its_products_and_its_all_reduce_in_their_order(way, order, two):
    for rank, found in enumerate(two):
        trace, recorded = found[way]
        assert trace.rank == rank
        assert [span.name for span in trace.spans if span.name in ("mm", "all_reduce")] == order
        (sent,) = trace.lane("communicate")
        assert sent.about["bytes"] == recorded[0].bytes == 4 * TOKENS * IN
        assert sent.about["group"] == [0, 1]
        assert all(span.start < span.end for span in trace.spans)
        if way == "beside":
            products = [span.about["shapes"] for span in trace.spans if span.name == "mm"]
            assert products == [[[TOKENS, OUT // 2], [OUT // 2, IN]], [[OUT // 2, TOKENS], [TOKENS, IN]]]
        else:
            assert trace.hidden == 0  # the rank does nothing while it waits
            assert trace.exposed == trace.seconds("communicate")


def test_every_collective_of_the_record_is_in_the_trace_at_its_time_but_none_that_stays_on_a_rank(two):
    for traced, recorded, alone in (found["kinds"] for found in two):
        assert [span.name for span in traced] == [call.kind for call in recorded]
        for span, call in zip(traced, recorded, strict=True):
            assert abs(span.start - call.start) < 60  # seconds: on one clock, which began with the launch
        assert alone == {"compute"}


def test_a_message_counts_only_while_a_rank_waits_for_it(two):
    (sent, sends), (received, receives) = (found["message"] for found in two)
    assert (sent.name, received.name) == ("send", "recv")
    assert sent.start >= sends
    assert received.start >= receives


def test_the_chrome_trace_is_a_process_a_rank_and_a_row_a_lane_and_more_for_what_overlaps(tmp_path):
    traces = [RankTrace(rank, spans("compute", (2, 9)) + spans("communicate", (3, 5), (4, 7))) for rank in (0, 1)]
    path = save_chrome_trace(tmp_path / "new" / "trace.json", traces)
    events = json.loads(path.read_text())["traceEvents"]
    named = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["name"].endswith("_name")}
    boxes = [(event["pid"], event["tid"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    for rank in (0, 1):
        rows = [named[rank, row] for row in (None, 0, 1, 2)]
        assert rows == [f"rank {rank}", "compute", "communicate", "communicate"]
        own = [box[1:] for box in boxes if box[0] == rank]
        assert own == [(0, 0, 7e6), (1, 1e6, 2e6), (2, 2e6, 3e6)]


def _of_profiler(name, start, end, annotation=False, device=torch.autograd.DeviceType.CUDA):
    """As torch.profiler describes what ran on a GPU."""
    times = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, device_type=device, is_user_annotation=annotation, time_range=times)


def test_on_a_gpu_the_kernels_count_and_those_of_nccl_communicate():
    events = [
        _of_profiler("sm90_gemm", 0, 10),
        _of_profiler("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 10, 30),
        _of_profiler("nccl:all_reduce", 10, 30, annotation=True),
        _of_profiler("Memcpy HtoD", 0, 5),
        _of_profiler("aten::mm", 0, 1, device=torch.autograd.DeviceType.CPU),
    ]
    found = [(span.lane, span.name, round(span.start, 9)) for span in _on_gpu(events, 1.0)]
    assert found == [("compute", "sm90_gemm", 1.0), ("communicate", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 1.00001)]
