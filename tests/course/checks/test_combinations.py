"""A wrong tensor is recognized as a combination of the ranks' tensors, with the right values solved by hand."""

import pytest
import torch

from tplab.course.checks.combinations import combinations

P = 4
XS = [torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)) for rank in range(P)]


def kinds(coefficients: list[float], rank: int = 1) -> list[str]:
    seen = sum(c * x for c, x in zip(coefficients, XS, strict=True))
    assert isinstance(seen, torch.Tensor)
    return [kind for kind, _ in combinations(seen, {"x": XS}, rank, P, 1e-9)]


@pytest.mark.parametrize(
    ("coefficients", "kind"),
    [
        ([0, 1, 0, 0], "own x"),
        ([0, 4, 0, 0], "p times own x"),
        ([1, 1, 1, 1], "sum of x"),
        ([0.25, 0.25, 0.25, 0.25], "mean of x"),
        ([0, 0, 0, 1], "x of rank 3"),
        ([1, 1, 0, 1], "missing rank"),
        ([1, 2, 1, 1], "doubled rank"),
    ],
)
def test_coefficients_say_what_went_wrong(coefficients, kind):
    assert kinds(coefficients)[0] == kind


def test_the_text_names_the_rank_that_is_missing_or_counted_twice():
    (_, missing), *_ = combinations(XS[0] + XS[1] + XS[3], {"x": XS}, 1, P, 1e-9)
    (_, doubled), *_ = combinations(sum(XS) + XS[2], {"x": XS}, 1, P, 1e-9)  # type: ignore[arg-type]
    assert "rank 2" in missing
    assert "rank 2" in doubled


def test_a_maximum_is_no_sum():
    largest = torch.stack(XS).amax(0)
    assert [kind for kind, _ in combinations(largest, {"x": XS}, 0, P, 1e-9)] == ["maximum of x"]


def test_nothing_is_guessed_without_evidence():
    other = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    assert list(combinations(other, {"x": XS}, 0, P, 1e-9)) == []
    few = [x[0, :3] for x in XS]  # three elements always are a combination of four ranks' tensors
    assert list(combinations(other[0, :3], {"x": few}, 0, P, 1e-9)) == []
    equal = [XS[0]] * P
    assert list(combinations(2 * XS[0], {"x": equal}, 0, P, 1e-9)) == []
    assert list(combinations(XS[0], {"x": XS[:1]}, 0, 1, 1e-9)) == []
