"""ParallelAttention: `tplab.tensor.attention`, against `tplab.plain.Attention` on one process.

Which rows a rank should hold is derived here from the heads: those of its queries, and the K, V heads that these belong
to.
"""

import copy
from contextlib import contextmanager
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.reference import assert_close, cut, random
from tests.tensor.on_ranks import GROUPS, assert_refused, own_group, refusals
from tests.tensor.on_ranks import train as train_sgd
from tplab import launch
from tplab.plain import Attention
from tplab.tensor.attention import ParallelAttention
from tplab.tensor.full_state import full_state_dict, load_full_state_dict

WORLD_SIZES = (1, 2, 4)
HIDDEN, HEADS = 16, 8
BATCH, SEQUENCE, MEMORY = 2, 5, 7
STEPS = 3
BASE = 100.0  # of rotary positions: small, so that five positions turn all pairs


def part_of(plain, name, rank, p, kv_heads):
    """What rank should hold, or have as a gradient, of the parameter `name`, out of the plain layer's."""
    module, kind = name.split(".")
    if module == "out":
        return cut(plain[name], 1, rank, p) if kind == "weight" else plain[name]
    queries = list(range(HEADS))[rank * HEADS // p : (rank + 1) * HEADS // p]
    keys = sorted({q * kv_heads // HEADS for q in queries})
    counts, own = [HEADS, kv_heads, kv_heads], [queries, keys, keys]
    if module != "qkv":
        counts, own = (counts[:1], own[:1]) if module == "q" else (counts[1:], own[1:])
    first = [sum(counts[:part]) for part in range(len(counts))]
    heads = plain[name].chunk(sum(counts))
    return torch.cat([heads[start + head] for start, of_part in zip(first, own, strict=True) for head in of_part])


def inputs(case, step, dtype=torch.float64):
    """All that the model is given, and the gradient of its output."""
    b, s, t = case.get("sizes", (BATCH, SEQUENCE, MEMORY))
    cross = case.get("attention_type") == "cross"
    x = random((b, s, HIDDEN), "x", step, dtype=dtype)
    if case.get("strided"):
        x = random((s, b, 2 * HIDDEN), "x", step, dtype=dtype)[..., ::2].transpose(0, 1)
    given = {"x": x}
    if cross:
        given["memory"] = random((b, t, HIDDEN), "memory", step, dtype=dtype)
    keys = t if cross else s
    if case.get("padding"):  # on the right: the first key is never padding, so that each query sees something
        given["key_padding_mask"] = torch.arange(keys) >= torch.arange(keys - b + 1, keys + 1)[:, None]
    if heads := case.get("attn_mask"):
        shape = (s, keys) if heads == "all" else (b if step % 2 else 1, heads, s, keys)
        given["attn_mask"] = random(shape, "mask", step, dtype=dtype)
    if case.get("positions"):
        given["positions"] = (torch.arange(s) * 3 + 2) if case["positions"] == 1 else torch.arange(b * s).view(b, s) + 1
    dy = random((b, s, HIDDEN), "dy", step, dtype=dtype)
    return given, dy.transpose(0, 1).contiguous().transpose(0, 1) if case.get("strided") else dy


def train(model, case, dtype=torch.float64, split_bias=False):
    """The first step's output, gradients and traffic, and the parameters after several steps."""

    def read(*sections):
        return [sorted((c.kind, c.bytes, c.op, c.group) for c in section) for section in sections]

    batches = [inputs(case, step, dtype) for step in range(STEPS)]
    return train_sgd(model, batches, split_bias, read, lr=0.05, momentum=0.9)


# name -> options of both, and of the inputs
MODEL_OPTIONS = ("kv_heads", "head_dim", "bias", "causal", "rotary_base", "attention_type")
CASES = {
    "plain": {},
    "causal without bias": {"causal": True, "bias": False},
    "wider heads": {"head_dim": 6, "causal": True},
    "4 kv heads, rotary": {"kv_heads": 4, "head_dim": 6, "causal": True, "rotary_base": BASE},
    "2 kv heads, rotary, given positions": {"kv_heads": 2, "rotary_base": BASE, "positions": 1, "causal": True},
    "1 kv head, positions for each text": {"kv_heads": 1, "head_dim": 4, "rotary_base": BASE, "positions": 2},
    "1 kv head without bias": {"kv_heads": 1, "bias": False},
    "padding": {"padding": True},
    "padding and causal": {"padding": True, "causal": True, "kv_heads": 2},
    "numbers for all heads": {"attn_mask": "all", "causal": True, "padding": True},
    "numbers for each head": {"attn_mask": HEADS, "kv_heads": 2},
    "numbers, one for all heads": {"attn_mask": 1},
    "cross": {"attention_type": "cross"},
    "cross, 2 kv heads, padding": {"attention_type": "cross", "kv_heads": 2, "head_dim": 6, "padding": True},
    "cross, numbers for each head": {"attention_type": "cross", "attn_mask": HEADS, "bias": False},
    "strided inputs": {"strided": True, "kv_heads": 2, "causal": True},
    "no texts": {"sizes": (0, 5, 7), "kv_heads": 1, "causal": True},
    "no tokens": {"sizes": (2, 0, 7), "kv_heads": 1, "causal": True, "rotary_base": BASE},
    "one token": {"sizes": (2, 1, 7), "causal": True, "rotary_base": BASE},
    "overlap": {"async": True, "kv_heads": 2, "causal": True},
    "bias apart": {"split_bias": True, "causal": True},
    "bias apart, none there": {"split_bias": True, "bias": False},
}


def options_of(case):
    options = {key: case[key] for key in MODEL_OPTIONS if key in case}
    return (options.pop("kv_heads", None), options.pop("head_dim", None)), options


def make(case, group=None, dtype=torch.float64):
    heads, options = options_of(case)
    options |= {"skip_bias_add": case.get("split_bias", False), "async_grad_allreduce": case.get("async", False)}
    model = ParallelAttention(HIDDEN, HEADS, *heads, **options, group=group, dtype=dtype)
    load_full_state_dict(model, make_plain(case).state_dict(), group)
    return model


def make_plain(case, dtype=torch.float64):
    heads, options = options_of(case)
    model = Attention(HIDDEN, HEADS, *heads, **options, dtype=dtype)
    model.load_state_dict({name: random(tuple(t.shape), name) / 2 for name, t in model.state_dict().items()})
    return model


@cache
def plain_outcome(name, dtype=torch.float64):
    return train(make_plain(CASES[name], dtype), CASES[name], dtype)[0]


def assert_equals_plain(results, name, tolerance=1e-12, steps=True):
    """`results`: what `train` gave on the ranks of one group. steps: compare the parameters after the steps too."""
    case, expected = CASES[name], plain_outcome(name, results[0]["out"].dtype)
    gradients = {name[1:]: value for name, value in expected.items() if name[0] == "d" and "." in name}
    p, kv_heads = len(results), case.get("kv_heads", HEADS)
    for rank, result in enumerate(results):
        names = {name for name in expected if "." in name and name[0] != "d"}
        others = {name for name in expected if "." not in name}
        assert set(result) == names | {f"d{name}" for name in names} | others
        for name in others:
            assert_close(result[name], expected[name], tolerance)
        for name in names:
            assert_close(result[f"d{name}"], part_of(gradients, name, rank, p, kv_heads), tolerance)
            if steps:
                assert_close(result[name], part_of(expected, name, rank, p, kv_heads), tolerance)


def expected_traffic(case, rank, p, itemsize=8):
    if p == 1:
        return [[], []]
    b, s, t = case.get("sizes", (BATCH, SEQUENCE, MEMORY))
    cross, kv_heads, d = case.get("attention_type") == "cross", case.get("kv_heads", HEADS), case.get("head_dim", 2)
    backward = [b * s * HIDDEN] + [b * t * HIDDEN] * cross
    if "attn_mask" in case:  # its gradient too is a sum over heads
        backward.append(s * (t if cross else s) * {"all": 1}.get(case["attn_mask"], case["attn_mask"]))
    everyone = tuple(range(p))
    calls = [("all_reduce", n * itemsize, "sum", everyone) for n in backward]
    if p > kv_heads:  # gradients of one head of K and one of V, over the ranks that hold it
        count = p // kv_heads
        copies = everyone[rank // count * count :][:count]
        sizes = [2 * d * HIDDEN] + [2 * d] * case.get("bias", True)
        calls += [("all_reduce", n * itemsize, "sum", copies) for n in sizes]
    return [[("all_reduce", b * s * HIDDEN * itemsize, "sum", everyone)], sorted(calls)]


def _train_all(cases, dtype=torch.float64):
    models = [make(case, dtype=dtype) for case in cases]
    return [
        (*train(model, case, dtype, case.get("split_bias", False)), full_state_dict(model))
        for model, case in zip(models, cases, strict=True)
    ]


@pytest.fixture(scope="module", params=WORLD_SIZES)
def trained(request):
    results = launch(_train_all, request.param, args=(list(CASES.values()),), timeout=120)
    assert len(results) == request.param
    return results


@pytest.mark.parametrize("name", CASES)
def test_outputs_gradients_and_steps_equal_plain_attention(name, trained):
    number = list(CASES).index(name)
    assert_equals_plain([result[number][0] for result in trained], name)


@pytest.mark.parametrize("name", CASES)
def test_the_traffic_is_one_all_reduce_of_bsh_each_way_and_what_copies_and_masks_need(name, trained):
    for rank, result in enumerate(trained):
        assert result[list(CASES).index(name)][1] == expected_traffic(CASES[name], rank, len(trained))


@pytest.mark.parametrize("name", CASES)
def test_the_whole_weights_come_back_in_the_layout_of_plain_torch(name, trained):
    expected = {key: value for key, value in plain_outcome(name).items() if "." in key and key[0] != "d"}
    for result in trained:
        state = result[list(CASES).index(name)][2]
        assert set(state) == set(expected)
        for key, value in expected.items():
            assert_close(state[key], value)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-4)])
def test_lower_precisions_differ_from_plain_by_rounding_only(dtype, tolerance):
    names = ["4 kv heads, rotary", "2 kv heads, rotary, given positions", "numbers for each head", "cross"]
    results = launch(_train_all, 4, args=([CASES[name] for name in names], dtype))
    for number, name in enumerate(names):
        assert_equals_plain([result[number][0] for result in results], name, tolerance, steps=False)


# Ranks and groups


def _train_in_groups(case):
    model = make(case, own_group())
    twin = copy.deepcopy(model)
    (first, _), (second, _) = train(model, case), train(twin, case)
    return first, all(torch.equal(first[name], second[name]) for name in first)


def test_two_groups_side_by_side_are_two_models_and_a_deep_copy_stays_in_its_group():
    name = "1 kv head, positions for each text"  # held by both ranks of a group
    results = launch(_train_in_groups, 4, args=(CASES[name],))
    for members in GROUPS:
        assert_equals_plain([results[rank][0] for rank in members], name)
    assert all(same for _, same in results)


def test_without_a_process_group_it_is_plain_attention_and_sends_nothing():
    for name in ("4 kv heads, rotary", "cross, 2 kv heads, padding"):
        result, traffic = train(make(CASES[name]), CASES[name])
        assert_equals_plain([result], name)
        assert traffic == [[], []]


@pytest.mark.parametrize("name", ["2 kv heads, rotary, given positions", "1 kv head without bias"])
def test_copies_of_a_head_stay_equal_to_the_last_bit(name, trained):
    case, p = CASES[name], len(trained)
    copies = max(1, p // case["kv_heads"])
    own = [result[list(CASES).index(name)][0] for result in trained]
    for rank in range(p):
        for key in ("qkv.weight", "dqkv.weight"):
            queries = own[rank][key].shape[0] - 2 * case.get("head_dim", 2) * case["kv_heads"] * copies // p
            assert torch.equal(own[rank][key][queries:], own[rank // copies * copies][key][queries:])


def _with_dtensor(case):
    p = dist.get_world_size()
    theirs = make_plain(case)
    state = theirs.state_dict()
    for name in ("qkv.weight", "qkv.bias"):  # DTensor takes the rows as they come, so those of rank 0 come first
        state[name] = torch.cat([part_of(state, name, rank, p, case["kv_heads"]) for rank in range(p)])
    theirs.load_state_dict(state)
    parallelize_module(theirs, init_device_mesh("cpu", (p,)), {"qkv": ColwiseParallel(), "out": RowwiseParallel()})
    outcomes = []
    for model in (make(case), theirs):
        result, traffic = train(model, case)
        outcomes.append(({n: t.to_local() if hasattr(t, "to_local") else t for n, t in result.items()}, traffic))
    return outcomes


@pytest.mark.parametrize("p", [2, 4])
def test_outputs_gradients_and_steps_equal_dtensors_with_the_same_traffic(p):
    case = {"causal": True, "kv_heads": 4}
    for (ours, our_traffic), (theirs, their_traffic) in launch(_with_dtensor, p, args=(case,)):
        assert set(ours) == set(theirs)
        for name, value in theirs.items():
            assert_close(ours[name], value)
        assert our_traffic == their_traffic


# Dropout


class OwnStates:
    """Random states of this rank, as the tracker of chapter 09 gives them; counts how often they were wanted."""

    def __init__(self, seed):
        self.seed, self.forks = seed, 0

    @contextmanager
    def fork(self):
        self.forks += 1
        with torch.random.fork_rng():
            torch.manual_seed(self.seed + dist.get_rank())
            yield


def _drop(rates, training):
    """Equal scores, values of one, an output layer that does nothing: out comes twice the share of keys a head kept."""
    outcomes = []
    for rate in rates:
        model = make({"head_dim": 2}).train(training)
        model.dropout = rate
        with torch.no_grad():
            model.out.weight.copy_(torch.eye(HIDDEN, dtype=torch.float64)[:, own_columns()])
            model.out.bias.zero_()
            model.qkv.weight.zero_()
            model.qkv.bias.zero_()
            model.qkv.bias.chunk(3)[2].fill_(1.0)
        states = OwnStates(7)
        torch.manual_seed(1)
        x = random((BATCH, SEQUENCE, HIDDEN), "x")
        kept = [model(x, rng=rng).unflatten(-1, (HEADS, 2))[..., 0] for rng in (states, states, None)]  # [b, s, heads]
        outcomes.append((kept, states.forks, torch.rand(1)))
    return outcomes


def own_columns():
    width = HIDDEN // dist.get_world_size()
    return slice(dist.get_rank() * width, (dist.get_rank() + 1) * width)


def test_dropout_draws_from_the_given_states_so_that_no_two_heads_drop_alike():
    results = launch(_drop, 2, args=([0.5, 0.0], True))
    (first, again, alike), forks, _ = results[0][0]
    assert torch.equal(first, again)  # the states begin anew at each fork
    assert torch.equal(first, results[1][0][0][0])  # all ranks have the same output
    assert forks == 2
    different = [(first[..., i] != first[..., j]).any() for i in range(HEADS) for j in range(i)]
    assert all(different)
    assert torch.equal(alike[..., :4], alike[..., 4:])  # without states, ranks seeded alike drop alike
    kept = first.mean()
    assert abs(kept - 1) < 0.2  # 80 scores of 5 keys each are scaled up: unbiased
    assert ((first - 1).abs() > 0.1).any()
    (nothing, *_), forks, afterwards = results[0][1]
    assert forks == 0
    assert_close(nothing, torch.ones_like(nothing))
    assert torch.equal(afterwards, torch.rand(1, generator=torch.Generator().manual_seed(1)))


def test_nothing_is_dropped_in_evaluation():
    for (kept, forks, _), *_ in launch(_drop, 2, args=([0.5], False)):
        assert forks == 0
        for part in kept:
            assert_close(part, torch.ones_like(part))


# Compiled, and under autocast


def _compiled(names):
    outcomes = []
    for name in names:
        model = make(CASES[name])
        model.compile(backend="aot_eager", fullgraph=True)
        outcomes.append(train(model, CASES[name])[0])
    return outcomes


def test_compiled_in_one_graph_it_gives_the_same():
    names = ["1 kv head, positions for each text", "padding and causal", "overlap"]
    results = launch(_compiled, 2, args=(names,), timeout=240)
    for number, name in enumerate(names):
        assert_equals_plain([result[number] for result in results], name, 1e-10)


def _autocast(names):
    outcomes = []
    for name in names:
        model = make(CASES[name], dtype=torch.float32)
        given, dy = inputs(CASES[name], 0, torch.float32)
        given["x"].requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(**given)
        out.backward(dy.to(out.dtype))
        outcomes.append({"out": out.detach(), "dx": given["x"].grad, "dout.weight": model.out.weight.grad})
    return outcomes


def test_autocast_gives_the_dtypes_and_about_the_numbers_of_plain_attention():
    names = ["1 kv head, positions for each text", "overlap"]
    results = launch(_autocast, 2, args=(names,))
    for number, name in enumerate(names):
        plain = plain_outcome(name, torch.float32)
        for rank, result in enumerate(results):
            assert_close(result[number]["out"], plain["out"].bfloat16(), 2**-5)
            assert_close(result[number]["dx"], plain["dx"], 2**-5)
            assert_close(result[number]["dout.weight"], cut(plain["dout.weight"], 1, rank, 2), 2**-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_of_another_dtype_may_be_added(dtype):
    model = make(CASES["plain"], dtype=dtype)
    x, numbers = random((BATCH, SEQUENCE, HIDDEN), "x", dtype=dtype), random((SEQUENCE, SEQUENCE), "numbers")
    assert torch.equal(model(x, attn_mask=numbers), model(x, attn_mask=numbers.to(dtype)))


# What is refused


def _refusals():
    self_attention, cross = ParallelAttention(16, 8), ParallelAttention(16, 8, attention_type="cross")
    x = torch.ones(2, 3, 16)
    return refusals(
        lambda: ParallelAttention(24, 12, 6),
        lambda: ParallelAttention(24, 6),
        lambda: ParallelAttention(16, 8, 3),
        lambda: ParallelAttention(16, 8, 0),
        lambda: ParallelAttention(16, 0),
        lambda: ParallelAttention(20, 8),
        lambda: ParallelAttention(16, 8, attention_type="flash"),
        lambda: ParallelAttention(16, 8, attention_type="cross", causal=True),
        lambda: ParallelAttention(16, 8, attention_type="cross", rotary_base=1e4),
        lambda: ParallelAttention(16, 8, dropout=1.0),
        lambda: ParallelAttention(24, 8, rotary_base=1e4)(torch.ones(1, 2, 24)),
        lambda: self_attention(x[0]),
        lambda: self_attention(x[..., :8]),
        lambda: self_attention(x, x),
        lambda: cross(x),
        lambda: cross(x, x[..., :8]),
        lambda: self_attention(x, attn_mask=torch.ones(3, 3, dtype=torch.bool)),
        lambda: self_attention(x, attn_mask=torch.ones(2, 2, 3, 3)),
        lambda: self_attention(x, key_padding_mask=torch.ones(2, 3)),
        lambda: self_attention(x, key_padding_mask=torch.ones(3, 2, dtype=torch.bool)),
    )


def test_what_cannot_be_is_refused_with_the_numbers_and_what_would_work():
    assert_refused(
        launch(_refusals, 4),
        "num_kv_heads=6 can't be divided over 4 ranks, nor copied to them evenly. Use p in 1, 2, 3, 6, 12.",
        "num_heads=6 can't be divided over 4 ranks: each rank takes whole heads, and as many as any other. "
        "Use p in 1, 2, 3, 6.",
        "num_heads=8 can't share num_kv_heads=3 evenly",
        "num_heads=8 can't share num_kv_heads=0 evenly",
        "num_heads=0 can't share num_kv_heads=0 evenly",
        "hidden_size=20 can't be divided into num_heads=8 heads of one size",
        "attention_type='flash' is not 'self' or 'cross'",
        "cross-attention has no causal mask and no rotary positions",
        "cross-attention has no causal mask and no rotary positions",
        "dropout=1.0 should be in [0, 1)",
        "head_dim=3 is odd",
        "x [3, 16] should be [b, s, 16]",
        "x [2, 3, 8] should be [b, s, 16]",
        "self-attention has no memory",
        "cross-attention needs its memory once",
        "memory [2, 3, 8] should be [b, s, 16]",
        "torch's own functions disagree on what True means",
        "attn_mask [2, 2, 3, 3] should be [3, 3] or [2, 8, 3, 3]",
        "key_padding_mask should be bool [2, 3], True for padding, got torch.float32 [2, 3]",
        "key_padding_mask should be bool [2, 3], True for padding, got torch.bool [3, 2]",
    )
