"""Who may look at whom: `tensor.attention_mask`, against masks drawn by hand, and what the kernel makes of them."""

import itertools

import torch
from torch.nn import functional as F

from tplab.tensor.attention_mask import attention_mask

CPU = torch.device("cpu")


def drawn(*rows):
    return torch.tensor([[mark == "x" for mark in row] for row in rows])


def visible(s, t, causal, key_padding_mask=None):
    """Which keys get a weight in the kernel: with equal scores, [b, s, t]."""
    mask, is_causal = attention_mask(s, t, causal, key_padding_mask, CPU)
    b = 1 if key_padding_mask is None else len(key_padding_mask)
    q, k = torch.zeros(b, 1, s, t), torch.zeros(b, 1, t, t)
    weights = F.scaled_dot_product_attention(q, k, torch.eye(t).expand(b, 1, t, t), mask, is_causal=is_causal)
    return weights[:, 0] > 0


def test_causal_queries_are_the_last_of_the_positions():
    rows = ["x...", "xx..", "xxx.", "xxxx"], ["xxxx.", "xxxxx"], ["xxx"], ["x"]
    for (s, t), expected in zip([(4, 4), (2, 5), (1, 3), (1, 1)], rows, strict=True):
        assert torch.equal(visible(s, t, causal=True)[0], drawn(*expected))


PADDING = torch.tensor([[False, False, False, False], [True, True, False, False]])  # the second text begins later


def test_padding_and_causal_go_together_and_a_query_that_sees_nothing_gets_zeros():
    everything = visible(2, 4, False, PADDING)
    assert torch.equal(everything[0], drawn("xxxx", "xxxx"))
    assert torch.equal(everything[1], drawn("..xx", "..xx"))
    masked = visible(4, 4, True, PADDING)
    assert torch.equal(masked[0], drawn("x...", "xx..", "xxx.", "xxxx"))
    assert torch.equal(masked[1], drawn("....", "....", "..x.", "..xx"))


def test_where_no_mask_is_needed_none_is_built_so_that_the_fast_kernels_stay():
    assert attention_mask(4, 4, True, None, CPU) == (None, True)
    assert attention_mask(1, 9, True, None, CPU) == (None, False)
    assert attention_mask(4, 9, False, None, CPU) == (None, False)


def test_a_sliding_window_hides_what_lies_too_far_back():
    for window, (s, t), padded in itertools.product([1, 3, 8, 20], [(8, 8), (3, 8), (1, 8), (1, 1)], [False, True]):
        padding = torch.zeros(2, t, dtype=torch.bool)
        padding[1, 0] = padded
        mask, is_causal = attention_mask(s, t, True, padding if padded else None, CPU, window)
        for query, text, key in itertools.product(range(s), range(2), range(t)):
            place = t - s + query
            may = key <= place < key + window and not padding[text, key]
            if mask is None:
                assert may == (key <= place if is_causal else True)
            else:
                assert mask.expand(2, 1, s, t)[text, 0, query, key] == may
