"""Each window once in an epoch, in an order that depends on the step alone, compared with slices of the tokens."""

import numpy as np
import torch

from tplab.capstone.data.batches import Batches

TOKENS = np.random.default_rng(0).permutation(1003).astype(np.uint16)  # each id once, so that a row tells where it is
WHERE = {int(token): place for place, token in enumerate(TOKENS)}


def batches(seq_length: int = 10, batch_size: int = 7, seed: int = 3, tokens: np.ndarray = TOKENS) -> Batches:
    return Batches(tokens, seq_length, batch_size, seed)


def begins(data: Batches, rows: int) -> list[int]:
    """Where the first so many rows that ever come begin."""
    ids = torch.cat([data.own(step, 0, 1)[0] for step in range(-(-rows // data.batch_size))])
    return [WHERE[int(first)] for first in ids[:rows, 0]]


def test_rows_are_slices_of_the_tokens_and_targets_the_same_one_further_on() -> None:
    data = batches()
    for step in (0, 1, 13, 14, 15, 10**9):
        ids, targets = data.own(step, 0, 1)
        assert ids.shape == targets.shape == (7, 10)
        assert ids.dtype == targets.dtype == torch.int64
        assert ids.is_contiguous()
        assert targets.is_contiguous()
        for x, y in zip(ids.tolist(), targets.tolist(), strict=True):
            begin = WHERE[x[0]]
            assert x == TOKENS[begin : begin + 10].tolist()
            assert y == TOKENS[begin + 1 : begin + 11].tolist()


def test_in_an_epoch_each_window_comes_once_and_the_next_one_has_another_order() -> None:
    data = batches()
    assert data.windows == (1003 - 10) // 10
    places = np.array(begins(data, 4 * data.windows)).reshape(4, data.windows)
    orders = []
    for epoch in places:
        offset = epoch.min()
        assert 0 <= offset < 20
        assert sorted(epoch) == list(range(offset, offset + 10 * data.windows, 10))
        orders.append(tuple((epoch - offset) // 10))
    assert len(set(orders)) == 4
    assert tuple(range(data.windows)) not in orders
    assert len({epoch.min() for epoch in places}) > 1


def test_a_batch_is_a_function_of_arguments_and_step_alone() -> None:
    torch.manual_seed(1)
    forwards, state = batches(), torch.get_rng_state()
    first = [forwards.own(step, 0, 1) for step in range(40)]
    assert torch.equal(torch.get_rng_state(), state)
    backwards = batches()
    for step in reversed(range(40)):
        assert all(torch.equal(a, b) for a, b in zip(first[step], backwards.own(step, 0, 1), strict=True))
    assert not torch.equal(batches(seed=4).own(0, 0, 1)[0], first[0][0])


def test_replicas_together_have_the_same_global_batch() -> None:
    data, replicas = batches(batch_size=8), 4
    for step in (0, 12, 13):
        rows = [data.own(step, replica, replicas) for replica in range(replicas)]
        for of_all, of_each in zip(data.own(step, 0, 1), zip(*rows, strict=True), strict=True):
            assert torch.equal(of_all, torch.cat(of_each))


def test_the_order_is_the_same_with_any_version_of_numpy() -> None:
    data = batches(tokens=np.zeros(91, np.uint16))
    assert [data._begin(place) for place in range(data.windows)] == [6, 16, 66, 26, 46, 36, 56, 76]


def test_short_texts_have_whole_windows_too_and_every_token_is_an_input_in_some_epoch() -> None:
    for length in range(11, 54):
        data = batches(tokens=TOKENS[:length], batch_size=3)
        places = begins(data, 40 * data.windows)
        assert data.windows == max(1, (length - 10) // 10)
        assert {begin + i for begin in places for i in range(10)} == set(range(length - 1))  # the last one is a target
