"""What the GPU tests run, with two gloo ranks on the CPU: so that on a GPU only the GPU is new."""

import math
import re
from dataclasses import replace

import pytest
import torch

from tests import saying
from tests.gpu.implementations import CASES, ON_THE_CPU, problems
from tests.gpu.subject import SINGLE, Difference, apart
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


def test_a_result_that_is_too_far_from_plain_torch_is_a_problem() -> None:
    near = Difference(1e-6, 1e-6, 1e-6, "cpu", SINGLE)
    assert near.problem() is None
    assert re.search(saying("1.0e-03", "cpu"), replace(near, alike=1e-3).problem() or "")
    assert re.search(saying("1.0e-03", "float64"), replace(near, exact=1e-3).problem() or "")


def test_a_problem_is_named_with_its_rank_dtype_and_result(monkeypatch: pytest.MonkeyPatch) -> None:
    near = Difference(1e-6, 1e-6, 1e-6, "cpu", SINGLE)
    found = [{("mlp", SINGLE): {"dx": near}}, {("mlp", SINGLE): {"dx": replace(near, alike=1e-3)}}]
    monkeypatch.setattr("tests.gpu.implementations.run_all", lambda way: found)
    (line,) = problems(ON_THE_CPU, "mlp")
    assert re.search(saying("rank 1", "float32", "dx"), line)
