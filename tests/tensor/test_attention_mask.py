"""Who may look at whom: `tensor.attention_mask`, against the definition, by what the kernel makes of the masks."""

import itertools

import torch
from torch.nn import functional as F

from tplab.tensor.attention_mask import attention_mask

CPU = torch.device("cpu")


def visible(s, t, causal, padding):
    """Which keys get a weight in the kernel: with equal scores, [b, s, t]."""
    mask, is_causal = attention_mask(s, t, causal, padding, CPU)
    b = 1 if padding is None else len(padding)
    q, k = torch.zeros(b, 1, s, t), torch.zeros(b, 1, t, t)
    weights = F.scaled_dot_product_attention(q, k, torch.eye(t).expand(b, 1, t, t), mask, is_causal=is_causal)
    return weights[:, 0] > 0


def test_queries_are_the_last_positions_and_see_no_padding_and_nothing_later():
    """A query that sees nothing gets zeros."""
    for (s, t), causal, padded in itertools.product([(8, 8), (3, 8), (1, 8), (1, 1)], (False, True), (0, 1, 2)):
        padding = torch.arange(t) < torch.tensor([[0], [padded]])  # the second text begins later
        place, key = torch.arange(t - s, t)[:, None], torch.arange(t)
        may = key <= place if causal else torch.ones(s, t, dtype=torch.bool)
        found = visible(s, t, causal, padding if padded else None)
        assert torch.equal(found, (may & ~padding[:, None])[: len(found)]), (s, t, causal, padded)


def test_where_no_mask_is_needed_none_is_built_so_that_the_fast_kernels_stay():
    assert attention_mask(4, 4, True, None, CPU) == (None, True)
    assert attention_mask(1, 9, True, None, CPU) == (None, False)
    assert attention_mask(4, 9, False, None, CPU) == (None, False)
