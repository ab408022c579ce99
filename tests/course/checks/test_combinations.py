"""A wrong tensor is recognized as a combination of the ranks' tensors, with the right values solved by hand."""

import pytest
import torch

from tplab.course.checks.combinations import combinations

P = 4
XS = [torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)) for rank in range(P)]


@pytest.mark.parametrize(
    ("coefficients", "kind"),
    [
        ([0, 1, 0, 0], "own x"),
        ([1, 1, 1, 1], "sum of x"),
        ([0, 0, 0, 1], "x of rank 3"),
        ([1, 1, 0, 1], "missing rank"),
        ([1, 1, 2, 1], "doubled rank"),
    ],
)
def test_coefficients_say_what_went_wrong_and_on_which_rank(coefficients, kind):
    seen = torch.stack([c * x for c, x in zip(coefficients, XS, strict=True)]).sum(0)
    (found, text), *_ = combinations(seen, {"x": XS}, 1, P, 1e-9)
    assert found == kind
    assert "rank 2" in text or not kind.endswith("rank")


OTHER = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize(
    ("seen", "xs"),
    [
        (OTHER, XS),
        (OTHER[0, :3], [x[0, :3] for x in XS]),  # three elements always are a combination of four ranks' tensors
        (2 * XS[0], [XS[0]] * P),
        (XS[0], XS[:1]),
    ],
)
def test_nothing_is_guessed_without_evidence(seen, xs):
    assert list(combinations(seen, {"x": xs}, 0, len(xs), 1e-9)) == []
