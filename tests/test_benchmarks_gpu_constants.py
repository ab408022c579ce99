"""`benchmarks.gpu_constants` on the CPU: what a clock measures becomes the right rates, shares and predictions."""

import itertools

import pytest

from benchmarks import gpu_constants
from tplab.cost.layer import layer_matmuls
from tplab.cost.machines import MACHINES

H100 = MACHINES["H100 DGX"]


def rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"][2:]


@pytest.fixture(autouse=True)
def a_second_per_look(monkeypatch):
    """Time passes only when the clock is read, so every measurement of calls in a row takes one second."""
    clock = itertools.count()
    monkeypatch.setattr(gpu_constants, "now", lambda: float(next(clock)))
    monkeypatch.setattr(gpu_constants, "REPEATS", 1)


def test_rates_of_matmuls_are_shares_of_the_peak():
    for (side, tflops, share), expected in zip(rows(gpu_constants.matmul_rates(H100, True)), (64, 128), strict=True):
        rate = 20 * 2 * expected**3
        assert (side, tflops, share) == (str(expected), f"{rate / 1e12:.2f}", f"{rate / H100.flops:.3f}")


def test_rates_of_kernels_count_the_bytes_that_they_read_and_write():
    found = {row[0]: row[2] for row in rows(gpu_constants.memory_rates(H100, True))}
    assert found == {name: f"{5 * tensors * 2**20 / 1e9:.0f}" for name, tensors in
                     {"copy": 2, "add": 3, "GELU": 2, "layer norm": 2}.items()}  # fmt: skip


def test_matmuls_of_layers_stand_beside_the_prediction():
    found = rows(gpu_constants.matmuls_of_layers(H100, True))
    config = gpu_constants._config(64, 64)
    expected = [one for tp in (1, 8) for one in layer_matmuls(config, 64, tp).values()]
    assert [float(row[3]) for row in found] == [100.0] * len(expected)  # milliseconds: ten in a row take a second
    assert [row[5] for row in found] == [f"{one.seconds(H100) / 0.1:.2f}" for one in expected]


def test_on_an_unknown_gpu_there_are_only_measurements():
    assert all(row[-1] == "" for row in rows(gpu_constants.matmul_rates(None, True)))
    assert "predicted" in gpu_constants.parts_of_layers(H100, True)
    assert "predicted" not in gpu_constants.parts_of_layers(None, True)
