"""Exercise 14.1 counts the tensors that pile up from step to step."""

import pytest

from tplab.course.exercises.ch14 import buckets


@pytest.mark.parametrize(
    ("counts", "more"),
    [
        ([5, 5, 5, 5, 5], 0),
        ([5, 25, 25, 25, 25], 0),  # created once and for all
        ([5, 6, 7, 8, 9], 1),
        ([5, 7, 7, 8, 9, 11, 11], 1),  # some are freed a step later
        ([5, 4, 6, 5, 5], 0),
        ([50, 53, 56, 59, 62], 3),
    ],
)
def test_what_piles_up_grows_with_nearly_every_step(counts, more):
    assert buckets.growth(counts) == more
