"""A recorded token's way, compared with the same model in a single process that knows nothing of ranks."""

from dataclasses import fields

import pytest
import torch

from tests.tensor.token_ways import SENTENCE, WORDS, plain_way
from tplab.tensor.token_way import OnRank, record_token


@pytest.mark.parametrize(("p", "token"), [(1, "it"), (2, "the"), (4, "saw")])
def test_a_recorded_way_is_that_of_a_single_process(p, token):
    seen, right = record_token(WORDS, SENTENCE, token, p), plain_way(p, token)
    assert (seen.ids, seen.place, seen.target, seen.token) == (right.ids, right.place, right.target, right.token)
    assert [tuple(seen.forward), tuple(seen.backward)] == [right.forward, right.backward]
    for mine, theirs in zip(seen.ranks, right.ranks, strict=True):
        for field in fields(OnRank):
            one, other = getattr(mine, field.name), getattr(theirs, field.name)
            if isinstance(other, torch.Tensor):
                torch.testing.assert_close(one, other, msg=lambda text, name=field.name: f"{name}: {text}")
            else:
                assert one == other, field.name
