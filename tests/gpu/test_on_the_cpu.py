"""What the GPU tests run, with two gloo ranks on the CPU: so that on a GPU only the GPU is new."""

import math
from dataclasses import replace

import pytest
import torch

from tests.gpu.implementations import CASES, ON_THE_CPU, WAYS, problems
from tests.gpu.layers import CASES as LAYERS
from tests.gpu.subject import DOUBLE, HALF, SINGLE, Case, Difference, Place, apart
from tests.gpu.waiting import check_shares, shares_of_waiting


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_parallel_layers_agree_with_plain_torch(name: str) -> None:
    assert problems(ON_THE_CPU, name) == []


def test_the_meter_knows_who_waits() -> None:
    check_shares(*ON_THE_CPU.run(shares_of_waiting))


def test_a_case_without_messages_is_one_that_gloo_can_run_on_a_gpu() -> None:
    sharing = set(WAYS["2 ranks share a GPU, gloo"].names())
    assert {name for name in CASES if "pipeline" in name or "ring" in name}.isdisjoint(sharing)
    assert len(sharing) > 30


def test_wrong_results_are_problems() -> None:
    def found(**values: object) -> str | None:
        right = {"alike": 1e-12, "exact": 1e-12, "plain": 1e-12, "device": "cuda:0", "dtype": DOUBLE}
        return Difference(**{**right, **values}).problem()  # type: ignore[arg-type]

    assert found() is None
    assert found(alike=1e-3) == "1.0e-03 from plain torch on cuda:0"
    assert found(exact=math.inf, dtype=SINGLE) == "inf from float64 on the CPU"
    assert found(alike=1e-6, exact=1e-6, dtype=SINGLE) is None
    assert found(alike=1e-3, exact=None, plain=None, dtype=SINGLE) == "1.0e-03 from plain torch on cuda:0"
    assert found(alike=0.03, exact=0.03, plain=0.02, dtype=HALF) is None
    assert found(alike=0.0, exact=0.08, plain=0.02, dtype=HALF) == "8.0e-02 from float64, plain torch 2.0e-02"


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
