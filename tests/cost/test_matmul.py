"""The time of a matmul: its FLOPs, its tiles and its bytes, by hand."""

import dataclasses

import pytest

from tplab.collectives.links import Link
from tplab.cost.machines import Losses, Machine
from tplab.cost.matmul import Matmul

LINK = Link(0.0, 1e-30)
GPU = Machine("ten SMs", flops=1e9, fraction=1.0, memory=1, bandwidth=1e6, gpus_per_node=1, inside=LINK, between=LINK,
              losses=Losses(matmul_traffic=True, multiprocessors=10, memory=0.5))  # fmt: skip


@pytest.mark.parametrize(
    ("m", "n", "count", "occupancy"),
    [
        (1280, 256, 1, 1.0),  # ten tiles of 128 x 256: one full wave
        (1281, 256, 1, 0.9 * 1281 * 256 / (3 * 10 * 128 * 128)),  # 11 rows of tiles; 22 small ones are three waves
        (1280, 512, 1, 1.0),  # two full waves
        (128, 128, 1, 0.9 * 1 / 10),  # a single small tile
        (256, 128, 10, 1.0),  # ten matmuls of one tile of 256 x 128 each
    ],
)
def test_tiles_fill_waves(m, n, count, occupancy):
    assert Matmul(m, 64, n, count).occupancy(10) == pytest.approx(occupancy)


def test_a_matmul_takes_its_flops_and_its_bytes():
    one = Matmul(1280, 64, 256)
    assert one.flops == 2 * 1280 * 64 * 256
    assert one.bytes == 2 * (1280 * 64 + 64 * 256 + 1280 * 256)
    assert one.seconds(GPU) == pytest.approx(one.flops / 1e9 + one.bytes / 0.5e6)
    assert one.seconds(GPU, moves=1e6) == pytest.approx(one.flops / 1e9 + 2.0)
    free = dataclasses.replace(GPU, losses=Losses())
    assert one.seconds(free) == pytest.approx(one.flops / 1e9)


def test_backward_has_two_matmuls_with_the_same_flops():
    dx, dw = Matmul(6, 4, 10, 3).backward()
    assert (dx.m, dx.k, dx.n, dx.count) == (6, 10, 4, 3)
    assert (dw.m, dw.k, dw.n, dw.count) == (4, 6, 10, 3)
    assert dx.flops == dw.flops == Matmul(6, 4, 10, 3).flops
