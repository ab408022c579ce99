"""`tplab.cost.machines`: rates are measured with a clock that the test sets, so no real time decides."""

import dataclasses
import itertools

import psutil
import pytest
import torch

import tplab.cost.machines as machines
from tests.gpu import real_gpu
from tplab import launch
from tplab.collectives.links import Link
from tplab.cost.machines import MACHINES, Machine, machine, matrix_rate, measure_machine, memory_rate

A100, V100 = MACHINES["A100 DGX"], MACHINES["V100 DGX-2H"]
EIGHT = Machine("eight", 1e12, 0.5, 10**9, 1e9, 8, inside=Link(1e-6, 1e-9), between=Link(1e-5, 1e-8, "a cable"))


@pytest.mark.parametrize("known", MACHINES.values(), ids=lambda known: known.name)
def test_every_figure_of_a_machine_has_its_source(known):
    assert set(known.sources) == {"flops", "fraction", "memory", "bandwidth"}
    assert all(len(source) > 20 for source in [*known.sources.values(), known.inside.source, known.between.source])


@pytest.mark.parametrize(
    ("name", "tflops", "reached", "gigabytes", "nvlink", "network"),
    [
        ("V100 DGX-2H", 131.25, 118.36, 32, 120, 6.25),
        ("A100 DGX", 312, 271.2, 80, 240, 25),
        ("H100 DGX", 989, 794.5, 80, 370.8, 50),
        ("H200 DGX", 989, 794.5, 141, 370.8, 50),
        ("B200 DGX", 2250, 1745, 180, 721.8, 50),
        ("GB200 NVL72", 2500, 1938.9, 186, 721.8, 50),
    ],
)
def test_figures_are_those_of_data_sheets_and_measurements(name, tflops, reached, gigabytes, nvlink, network):
    known = MACHINES[name]
    assert known.flops == pytest.approx(tflops * 1e12)
    assert known.rate == pytest.approx(reached * 1e12, rel=1e-3)
    assert known.memory == gigabytes * 10**9
    assert known.inside.bandwidth == pytest.approx(nvlink * 1e9)
    assert known.between.bandwidth == pytest.approx(network * 1e9)


def test_a_server_sends_what_its_adapters_can():
    assert A100.gpus_per_node * A100.between.bandwidth == pytest.approx(8 * 200e9 / 8)  # eight of 200 Gb/s
    assert V100.gpus_per_node * V100.between.bandwidth == pytest.approx(100e9)


@pytest.mark.parametrize(
    ("p", "stride", "in_a_node"),
    [(1, 64, None), (8, 1, None), (2, 4, None), (16, 1, 8), (9, 1, 8), (4, 4, 2), (64, 8, 1), (3, 3, 2), (2, 64, 1)],
)
def test_a_group_over_nodes_shares_the_adapters_of_its_members(p, stride, in_a_node):
    link = EIGHT.link(p, stride)
    if in_a_node is None:
        assert link == EIGHT.inside
    else:
        assert link.alpha == EIGHT.between.alpha
        assert link.beta == pytest.approx(EIGHT.between.beta / in_a_node)


def test_no_number_of_adapters_is_faster_than_the_links_inside():
    wide = dataclasses.replace(EIGHT, between=Link(1e-5, 2e-9))
    assert wide.link(16).beta == wide.inside.beta


@pytest.mark.parametrize(("p", "stride"), [(0, 1), (2, 0), (-1, 1)])
def test_a_group_that_cannot_be_is_refused(p, stride):
    with pytest.raises(ValueError, match=f"p={p}, stride={stride}"):
        EIGHT.link(p, stride)


@pytest.mark.parametrize(
    ("asked", "found"),
    [("h100", "H100 DGX"), (" A100 ", "A100 DGX"), ("h200 dgx", "H200 DGX"), ("V100", "V100 DGX-2H")],
)
def test_a_machine_is_found_by_the_beginning_of_its_name(asked, found):
    assert machine(asked).name == found


@pytest.mark.parametrize("unknown", ["b300", "", "100", "h"])
def test_an_unknown_machine_is_refused_with_the_known_ones(unknown):
    with pytest.raises(ValueError, match="V100 DGX-2H, A100 DGX, H100 DGX, H200 DGX"):
        machine(unknown)


@pytest.mark.parametrize(
    "wrong",
    [{"flops": 0.0}, {"memory": -1}, {"bandwidth": 0.0}, {"gpus_per_node": 0}, {"fraction": 0.0}, {"fraction": 1.1}],
)
def test_figures_of_no_machine_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dataclasses.replace(A100, **wrong)


def test_rates_are_work_over_the_shortest_of_the_times(monkeypatch):
    durations = itertools.cycle([0.5, 0.25, 2.0])
    clock = {"now": 0.0, "calls": 0}

    def now() -> float:
        """Advances by the next duration between the two calls around a run, and not between runs."""
        clock["calls"] += 1
        if clock["calls"] % 3 == 0:  # began, then for each run: (looked at), start, end
            clock["now"] += next(durations)
        return clock["now"]

    monkeypatch.setattr(machines, "now", now)
    assert matrix_rate(side=64, seconds=3.0) == pytest.approx(2 * 64**3 / 0.25)
    clock["calls"] = 0
    assert memory_rate(size=4096, seconds=3.0) == pytest.approx(2 * 4096 / 0.25)


def measured() -> Machine:
    return measure_machine(name="mine", rounds=2, side=64)


def test_measuring_gives_every_rank_the_same_machine_with_the_ranks_as_its_one_node():
    first, second = launch(measured, 2)
    assert first == second
    assert first.name == "mine"
    assert (first.gpus_per_node, first.fraction, first.between) == (2, 1.0, first.inside)
    assert min(first.flops, first.bandwidth, first.inside.beta, first.memory) > 0
    if not torch.cuda.is_available():
        assert first.memory == psutil.virtual_memory().total // 2


def lone() -> str:
    with pytest.raises(ValueError, match="at least 2 ranks") as refused:
        measure_machine(rounds=1, side=8)
    return str(refused.value)


def test_one_rank_has_no_link_to_measure():
    assert launch(lone, 1)[0]


@pytest.mark.gpu
@real_gpu
def test_a_gpu_multiplies_in_bfloat16_faster_than_a_cpu_could():
    assert launch(lambda: matrix_rate(), 1, backend="nccl")[0] > 1e13
