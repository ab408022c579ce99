"""How a wrong value is described. Every test gives `compare` one value and reads what the learner would read."""

import re

import pytest
import torch

from tests import saying
from tplab.course.checks.differences import MISSING, compare, is_gradient
from tplab.course.checks.recorded_traffic import CollectiveCall, Traffic
from tplab.course.checks.tensor_differences import Context

P = 4
GENERATOR = torch.Generator().manual_seed(5)
RIGHT = torch.randn(4, 8, generator=GENERATOR, dtype=torch.float64)
PARTS = RIGHT.chunk(P, 1)
ELSE = torch.randn(4, 8, generator=GENERATOR, dtype=torch.float64)


def difference(seen, expected=RIGHT, *, p=P, rank=0, everywhere=None, all_seen=None, gradient=False):
    everywhere = [expected] * p if everywhere is None else everywhere
    all_seen = [seen] * p if all_seen is None else all_seen
    return compare(seen, expected, Context(p, rank, all_seen, everywhere, gradient=gradient))


def with_nan() -> torch.Tensor:
    value = RIGHT.clone()
    value[1, 2] = float("nan")
    return value


def joined(*order: int) -> torch.Tensor:
    return torch.cat([PARTS[i] for i in order], 1)


DESCRIBED = [
    ("rounding", RIGHT * (1 + 1e-13), None, ""),
    ("a step through float32", RIGHT.float().double(), "rounded", saying("e-08", "float32")),
    ("a small error", RIGHT + 1e-4 * ELSE, "value", "32 of 32"),
    ("None", None, "none", saying("None", "return")),
    ("a number", 3, "type", saying("3", "tensor")),
    ("missing", MISSING, "missing", "missing"),
    ("a shape", torch.zeros(3, 5), "shape", saying("[3, 5]", "[4, 8]")),
    ("transposed", RIGHT.T, "transposed", "transpose"),
    ("another part", PARTS[2], "part", "rank 2"),
    ("the dtype", RIGHT.float(), "dtype", saying("float32", "float64")),
    ("NaN", with_nan(), "nan", saying("1 of 32", "NaN")),
    ("zeros", RIGHT * 0, "zeros", "zeros"),
    ("p times", RIGHT * 4, "p times", saying("4 times", "p = 4")),
    ("1/p", RIGHT / 4, "1/p", "1/4"),
    ("negated", -RIGHT, "negated", "sign"),
    ("a multiple", RIGHT * 2, "multiple", "2 times"),
    ("wrong order", joined(1, 0, 2, 3), "order", saying("dimension 1", "[1, 0, 2, 3]")),
    ("partly zero", torch.cat([PARTS[0], ELSE[:, 2:] * 0], 1), "partly zero", saying("zero", "1, 2 and 3", "0 to 3")),
    ("partly wrong", torch.cat([RIGHT[:, :6], ELSE[:, 6:]], 1), "partly wrong", saying("part 3", "0 to 3")),
]


@pytest.mark.parametrize(("seen", "kind", "says"), [row[1:] for row in DESCRIBED], ids=[row[0] for row in DESCRIBED])
def test_a_tensor_is_described(seen, kind, says) -> None:
    found = difference(seen)
    assert (found and found[0]) == kind
    assert not found or re.search(says, found[1])


def test_terms_of_a_sum_and_values_of_other_ranks_are_recognised() -> None:
    terms = list(torch.randn(P, 4, 8, generator=GENERATOR, dtype=torch.float64))
    assert difference(terms[1], sum(terms), rank=1, all_seen=terms)[0] == "part of a sum"
    assert "rank 2" in difference(PARTS[2], PARTS[0], everywhere=PARTS)[1]
    assert difference(RIGHT, PARTS[0], everywhere=PARTS)[0] == "whole"


def test_a_missing_value_is_called_a_gradient_only_if_it_is_one() -> None:
    assert "gradient" in difference(None, gradient=True)[1]
    for name in ("dx", "dW", "db2", "dlogits of a second backward pass", "ddown.weight"):
        assert is_gradient(name), name
    for name in ("out", "drift", "down.weight", "dtype", "dtypes of the stream in each layer"):
        assert not is_gradient(name), name


def test_pairs_are_compared_element_by_element() -> None:
    right = (RIGHT, None)
    assert difference((RIGHT.clone(), None), right) is None
    assert re.search(saying("element 0", "4 times"), difference((RIGHT * 4, None), right)[1])
    assert re.search(saying("element 1", "tensor", "None"), difference((RIGHT, RIGHT), right)[1])
    assert difference(RIGHT, right)[0] == difference((RIGHT,), right)[0] == "structure"


INFINITE = torch.tensor([float("-inf"), 2.0, float("inf")], dtype=torch.float64)
FINITE = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
NOISE = torch.full((4,), 1e-16, dtype=torch.float64)


def calls(*kinds: str, waited: bool = True, group: tuple[int, ...] = (0, 1)) -> Traffic:
    return Traffic(CollectiveCall(kind, 96, "float64", group, waited) for kind in kinds)


@pytest.mark.parametrize(
    ("seen", "right", "kind", "says"),
    [
        (NOISE * 1e15, NOISE, "value", ""),  # where zeros are right, rounding has no multiples
        (torch.zeros(0, 3), torch.zeros(0, 3), None, ""),
        (torch.zeros(2, 0), torch.zeros(0, 3), "shape", ""),
        (torch.tensor([1, 2, 4]), torch.tensor([1, 2, 3]), "value", ""),
        (INFINITE.clone(), INFINITE, None, ""),  # infinities are close only to themselves
        (INFINITE + torch.tensor([0.0, 1e-3, 0.0]), INFINITE, "value", ""),  # the infinity is right
        (FINITE + 1, INFINITE, "value", ""),
        (INFINITE * torch.tensor([-1.0, 1.0, -1.0]), INFINITE, "nan", ""),
        (INFINITE + torch.tensor([0.0, float("inf"), 0.0]), INFINITE, "nan", "1 of 3"),  # only wrong ones are counted
        (10**12 + 1, 10**12, "value", ""),
        (4096, 4100, "value", saying("4,096", "4,100")),
        (float("nan"), 0.5, "value", saying("nan", "0.5")),
        ("170", 170, "type", saying("'170'", "number")),
        (True, 1, "type", saying("True", "number")),
        (1e12 + 1, 10**12, None, ""),
        (0.1 + 0.2, 0.3, None, ""),
        ("b", "a", "value", saying("'b'", "'a'")),
        (calls("all_gather", "all_reduce"), calls("all_reduce", "all_gather"), None, ""),
        (calls(), calls("all_reduce"), "no traffic", saying("1 all_reduce", "96 elements", "float64")),
        (calls("all_reduce", group=(0, 2)), calls("all_reduce"), "traffic", saying("ranks [0, 1]", "ranks [0, 2]")),
        (calls("all_reduce", waited=False), calls("all_reduce"), "never waited", ""),
    ],
)  # fmt: skip
def test_special_tensors_numbers_and_traffic(seen, right, kind, says) -> None:
    found = difference(seen, right)
    assert (found and found[0]) == kind
    assert not found or re.search(says, found[1])
