"""Random states of the ranks: `tplab.tensor.rng`, against plain torch seeded for one rank at a time.

What a state should give is drawn here by `torch.manual_seed` with the documented seed and F.dropout, on one process.
tests/gpu/test_on_the_cpu.py runs models again in backward, and tests/gpt/test_transformer.py drops in a layer.
"""

import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch.nn import functional as F

from tests import saying
from tests.reference import assert_close, random
from tests.tensor.on_ranks import everywhere
from tplab.collectives.by_hand import rank_and_size
from tplab.tensor import rng as rng_module
from tplab.tensor.rng import RNGTracker, checkpoint, dropout, seed_all

SEED = 5
SIZE = 10_000  # numbers that are dropped or not: two independent masks agree in half of them, give or take 1.5%


def drawn(seed, times, size=SIZE):
    """The first few dropouts of ones after a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return [F.dropout(torch.ones(size), 0.5) for _ in range(times)]


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def assert_unlike(masks):
    for number, first in enumerate(masks):
        for second in masks[:number]:
            assert 0.45 < float((first == second).float().mean()) < 0.55


# Seeds


def _draw_in_turn(group):
    rank, _ = rank_and_size(group)
    tracker = seed_all(SEED, group)
    if rank == 0:
        with tracker.fork("replicated"):
            pass  # a fork in which nothing is drawn changes nothing
    x, kept = torch.ones(SIZE), {"current": [], "replicated": [], "sharded": []}
    for _ in range(3):
        kept["replicated"].append(dropout(x, 0.5, sharded=False, rng=tracker))
        kept["current"].append(dropout(x, 0.5, sharded=True))
        kept["sharded"].append(dropout(x, 0.5, sharded=True, rng=tracker))
    for name, seed in (("current", SEED), ("replicated", SEED + 1359), ("sharded", SEED + 2718 + rank)):
        assert_same(kept[name], drawn(seed, 3))


def test_replicated_dropout_is_alike_on_all_ranks_and_for_every_p_and_sharded_dropout_nowhere():
    everywhere(_draw_in_turn)
    offsets = [0, 1359, *range(2718, 2722)]  # of four ranks
    assert_unlike([drawn(seed + offset, 1)[0] for seed in (SEED, SEED + 10_000) for offset in offsets])


# Dropout


def test_dropout_is_torchs_but_for_the_state_it_draws_from():
    tracker = seed_all(SEED)
    x = random((SIZE,), "x")
    assert dropout(x, 0.5, False, sharded=True, rng=tracker) is x
    assert torch.equal(dropout(x, 0.0, sharded=True, rng=tracker), x)
    assert_same([dropout(torch.ones(SIZE), sharded=True, rng=tracker)], drawn(SEED + 2718, 1))  # nothing was drawn yet
    y = dropout(x, 0.2, sharded=False, rng=tracker)
    assert_close(y[y != 0], x[y != 0] / 0.8)
    assert 0.77 < float((y != 0).double().mean()) < 0.83


# Forks


def test_forks_within_each_other_each_go_on_where_their_state_was_left():
    tracker = seed_all(SEED)
    x = torch.ones(SIZE)
    kept = {"current": [F.dropout(x)], "replicated": [], "sharded": []}
    with tracker.fork("sharded"):
        kept["sharded"].append(F.dropout(x))
        with tracker.fork("replicated"):
            kept["replicated"].append(F.dropout(x))
            with tracker.fork("sharded"):
                kept["sharded"].append(F.dropout(x))
            kept["replicated"].append(F.dropout(x))
        kept["sharded"].append(F.dropout(x))
    kept["current"].append(F.dropout(x))
    for name, seed in (("current", SEED), ("replicated", SEED + 1359), ("sharded", SEED + 2718)):
        assert_same(kept[name], drawn(seed, len(kept[name])))


def test_a_state_of_ones_own_is_added_under_a_name():
    tracker = RNGTracker()
    tracker.add("experts", 77)
    with tracker.fork("experts"):
        assert_same([F.dropout(torch.ones(SIZE))], drawn(77, 1))
    with pytest.raises(ValueError, match=saying("'sharded'", "['experts']", "seed_all(seed)")):
        with tracker.fork():
            pass
    with pytest.raises(ValueError, match=saying("'experts'", "already")):
        tracker.add("experts", 78)


def _go_on(tracker, times=2):
    x = torch.ones(SIZE)
    kept = [dropout(x, sharded=sharded, rng=tracker) for _ in range(times) for sharded in (False, True)]
    return kept[::2], kept[1::2]


def test_a_saved_state_goes_on_where_it_was_and_is_no_part_of_the_tracker():
    tracker = seed_all(SEED)
    _go_on(tracker)
    state = tracker.state_dict()
    for other in (seed_all(1234), tracker, tracker):  # what was loaded once is not changed by what is drawn from it
        other.load_state_dict(state)
        replicated, sharded = _go_on(other)
        assert_same(replicated, drawn(SEED + 1359, 4)[2:])
        assert_same(sharded, drawn(SEED + 2718, 4)[2:])
    tracker.load_state_dict(state)
    for own in tracker.state_dict().values():  # as torch.distributed.checkpoint writes into what it is given
        own["cpu"].zero_()
    assert_same(_go_on(tracker)[1], drawn(SEED + 2718, 4)[2:])
    with pytest.raises(ValueError, match=saying("['replicated', 'sharded']", "['sharded']")):
        tracker.load_state_dict({"sharded": state["sharded"]})


def test_within_a_fork_the_state_that_is_saved_is_the_present_one_and_nothing_can_be_loaded():
    tracker = seed_all(SEED)
    with tracker.fork():
        F.dropout(torch.ones(SIZE))
        state = tracker.state_dict()
        with pytest.raises(RuntimeError, match=saying("load_state_dict", "fork('sharded')")):
            tracker.load_state_dict(state)
    tracker = seed_all(SEED)
    tracker.load_state_dict(state)
    assert_same(_go_on(tracker, 1)[1], drawn(SEED + 2718, 2)[1:])


# Run again in backward. Where x is 1, dropout(x)² has the gradient 2 dropout(x)², if both runs dropped the same places

STATES = [("current",), ("replicated",), ("sharded",), ("sharded", "current", "replicated", "sharded")]


def squared(x, states, rng):
    for state in states:
        x = F.dropout(x, 0.3) if state == "current" else dropout(x, 0.3, sharded=state == "sharded", rng=rng)
    return x**2


def ones():
    return torch.ones(SIZE, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("states", STATES)
def test_run_again_it_drops_the_same_and_leaves_no_trace(states):
    tracker = seed_all(SEED)
    plain = [squared(ones(), states, tracker) for _ in range(4)]
    afterwards = tracker._states, torch.get_rng_state()
    tracker = seed_all(SEED)
    for first in (0, 2):  # two forwards, then their backwards, the last one first and each of them twice
        xs = [ones(), ones()]
        outs = [checkpoint(squared, x, states, rng=tracker, tracker=tracker) for x in xs]
        assert_same(outs, plain[first : first + 2])
        for x, out in reversed(list(zip(xs, outs, strict=True))):
            for times in (1, 2):
                out.sum().backward(retain_graph=times == 1)
                assert_close(x.grad, times * 2 * out.detach())
    assert tracker._states.keys() == afterwards[0].keys() == {"replicated", "sharded"}
    for name, state in tracker._states.items():
        assert all(torch.equal(state[kind], numbers) for kind, numbers in afterwards[0][name].items())
    assert torch.equal(torch.get_rng_state(), afterwards[1])


def test_what_happens_inside_is_freed_and_done_again():
    seen = []

    def function(x, *, factor):
        y = dropout(x, 0.3, sharded=True, rng=tracker) * factor
        seen.append(weakref.ref(y))
        return y**2, "no tensor"

    tracker = seed_all(SEED)
    x = ones()
    out, words = checkpoint(function, x, factor=3, tracker=tracker)
    assert words == "no tensor"
    assert [y() for y in seen] == [None]
    out.sum().backward()
    assert len(seen) == 2
    assert_close(x.grad, 2 * out.detach())
    with torch.no_grad():
        out, _ = checkpoint(function, x, factor=3, tracker=tracker)
    assert not out.requires_grad
    assert len(seen) == 3


def test_an_exception_in_either_run_leaves_the_states_as_they_were():
    def function(x, fails):
        y = dropout(x, 0.3, sharded=True, rng=tracker)
        with tracker.fork("replicated"):
            F.dropout(y)
            if fails.pop():
                raise KeyError("an exception of the function")
        return y**2

    x, tracker = ones(), seed_all(SEED)
    with pytest.raises(KeyError, match="an exception of the function"):
        checkpoint(function, x, [True], tracker=tracker)
    out = checkpoint(function, x, [True, False], tracker=tracker)
    with pytest.raises(KeyError, match="an exception of the function"):
        out.sum().backward()
    with tracker.fork("replicated"):
        assert_same([F.dropout(torch.ones(SIZE))], drawn(SEED + 1359, 3)[2:])
    assert_same([torch.rand(3)], [torch.rand(3, generator=torch.Generator().manual_seed(SEED))])


# Other generators


def test_every_generator_of_a_rank_is_kept_and_laid_back(monkeypatch):
    """A second generator of the CPU stands for the GPU's, so that this is seen without one."""
    gpu = torch.Generator().manual_seed(99)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(99))
    tracker = seed_all(SEED)
    with tracker.fork():
        F.dropout(torch.ones(SIZE))  # before the GPU was used
    monkeypatch.setattr(rng_module, "generators_in_use", lambda: {"cpu": torch.default_generator, "cuda": gpu})
    from_seed = torch.rand(8, generator=torch.Generator().manual_seed(SEED + 2718))
    with tracker.fork():
        first = torch.rand(4, generator=gpu)
        with tracker.fork("replicated"):
            torch.rand(4, generator=gpu)
    with tracker.fork():
        second = torch.rand(4, generator=gpu)
    assert torch.equal(torch.rand(4, generator=gpu), expected)
    assert_same([first, second], from_seed.split(4))
    with tracker.fork():
        assert torch.equal(F.dropout(torch.ones(SIZE)), drawn(SEED + 2718, 2)[1])
