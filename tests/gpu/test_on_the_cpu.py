"""What the GPU tests run, with two gloo ranks on the CPU: so that on a GPU only the GPU is new."""

import math
from dataclasses import replace

import pytest
import torch

from tests.gpu.implementations import CASES, ON_THE_CPU, problems
from tests.gpu.layers import CASES as LAYERS
from tests.gpu.subject import SINGLE, Case, Place, apart
from tests.gpu.waiting import check_shares, shares_of_waiting


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_parallel_layers_agree_with_plain_torch(name: str) -> None:
    assert problems(ON_THE_CPU, name) == []


def test_the_meter_knows_who_waits() -> None:
    check_shares(*ON_THE_CPU.run(shares_of_waiting))


def test_nothing_that_differs_counts_as_close() -> None:
    ones = torch.ones(2, 3)
    assert apart(ones, ones) == 0
    assert apart(ones, ones[:1]) == apart(ones * math.nan, ones) == apart(ones * math.inf, ones) == math.inf
    assert apart(ones + 0.5, ones.double() * 2) == pytest.approx(0.25)


def _off(place: Place) -> dict[str, torch.Tensor]:
    """Rank 1 has another sum than plain torch."""
    found = LAYERS["operators"].parallel(place)
    return {**found, "g: y": found["g: y"] + (0.01 if torch.distributed.get_rank() else 0)}


def test_a_wrong_program_is_named_with_its_rank_and_result(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: Case = replace(LAYERS["operators"], parallel=_off, dtypes=(SINGLE,))
    monkeypatch.setitem(CASES, "operators", wrong)
    monkeypatch.setattr("tests.gpu.implementations.run_all", lambda way: RuntimeError("each case for itself"))
    (line,) = problems(ON_THE_CPU, "operators")
    assert line.startswith("rank 1, float32: g: y is ")
