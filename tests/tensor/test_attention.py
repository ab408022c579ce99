"""ParallelAttention: `tplab.tensor.attention`, against `tplab.plain.Attention` on one process.

Which rows a rank should hold is derived here from the heads: those of its queries, and the K, V heads that these belong
to.
"""

import copy
from functools import cache

import pytest
import torch

from tests.reference import TOLERANCE, assert_close, cut, random
from tests.tensor.on_ranks import GROUPS, assert_refused_on, on_ranks, results_of
from tests.tensor.on_ranks import train as train_sgd
from tplab import launch
from tplab.plain import Attention
from tplab.tensor.attention import ParallelAttention
from tplab.tensor.full_state import full_state_dict, load_full_state_dict

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
    "4 kv heads, rotary": {"kv_heads": 4, "head_dim": 6, "causal": True, "rotary_base": BASE},
    "2 kv heads, rotary, given positions": {"kv_heads": 2, "rotary_base": BASE, "positions": 1, "causal": True},
    "1 kv head, positions for each text": {"kv_heads": 1, "head_dim": 4, "rotary_base": BASE, "positions": 2},
    "1 kv head without bias": {"kv_heads": 1, "bias": False},
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
    "overlap": {"async": True, "kv_heads": 2, "causal": True},
    "bias apart": {"split_bias": True, "causal": True},
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


def assert_equals_plain(results, name, tolerance=TOLERANCE, steps=True):
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


def expected_traffic(case, rank, p, members):
    """members: the global ranks of the group."""
    if p == 1:
        return [[], []]
    b, s, t = case.get("sizes", (BATCH, SEQUENCE, MEMORY))
    cross, kv_heads, d = case.get("attention_type") == "cross", case.get("kv_heads", HEADS), case.get("head_dim", 2)
    backward = [b * s * HIDDEN] + [b * t * HIDDEN] * cross
    if "attn_mask" in case:  # its gradient too is a sum over heads
        backward.append(s * (t if cross else s) * {"all": 1}.get(case["attn_mask"], case["attn_mask"]))
    calls = [("all_reduce", 8 * n, "sum", members) for n in backward]
    if p > kv_heads:  # gradients of one head of K and one of V, over the ranks that hold it
        count = p // kv_heads
        copies = members[rank // count * count :][:count]
        sizes = [2 * d * HIDDEN] + [2 * d] * case.get("bias", True)
        calls += [("all_reduce", 8 * n, "sum", copies) for n in sizes]
    return [[("all_reduce", 8 * b * s * HIDDEN, "sum", members)], sorted(calls)]


def _train_all(group, names=tuple(CASES), dtype=torch.float64):
    outcomes = []
    for case in (CASES[name] for name in names):
        model = make(case, group, dtype)
        twin = copy.deepcopy(model)
        result, sent = train(model, case, dtype, case.get("split_bias", False))
        outcomes.append((result, sent, full_state_dict(model, group)))
    again, _ = train(twin, case, dtype, case.get("split_bias", False))  # a deep copy stays in its group
    assert all(torch.equal(result[name], again[name]) for name in result)
    return outcomes


@on_ranks
def test_outputs_gradients_steps_traffic_and_full_weights_are_those_of_plain_attention(p, in_groups):
    groups = GROUPS if in_groups else [range(p)]
    for members, results in zip(groups, results_of(_train_all, p, in_groups), strict=True):
        for number, name in enumerate(CASES):
            assert_equals_plain([result[number][0] for result in results], name)
            expected = {key: value for key, value in plain_outcome(name).items() if "." in key and key[0] != "d"}
            for rank, (_, sent, state) in enumerate(result[number] for result in results):
                assert sent == expected_traffic(CASES[name], rank, len(results), tuple(members)), name
                assert set(state) == set(expected)
                for key, value in expected.items():
                    assert_close(state[key], value)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-4)])
def test_lower_precisions_differ_from_plain_by_rounding_only(dtype, tolerance):
    names = ["4 kv heads, rotary", "2 kv heads, rotary, given positions", "numbers for each head", "cross"]
    results = launch(_train_all, 4, args=(None, names, dtype))
    for number, name in enumerate(names):
        assert_equals_plain([result[number][0] for result in results], name, tolerance, steps=False)


def _compiled(names):
    outcomes = []
    for name in names:
        model = make(CASES[name])
        model.compile(backend="aot_eager", fullgraph=True)
        outcomes.append(train(model, CASES[name])[0])
    return outcomes


def test_compiled_in_one_graph_it_gives_the_same():
    names = ["1 kv head, positions for each text", "padding and causal"]
    results = launch(_compiled, 2, args=(names,), timeout=240)
    for number, name in enumerate(names):
        assert_equals_plain([result[number] for result in results], name, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_of_another_dtype_may_be_added(dtype):
    model = make(CASES["plain"], dtype=dtype)
    x, numbers = random((BATCH, SEQUENCE, HIDDEN), "x", dtype=dtype), random((SEQUENCE, SEQUENCE), "numbers")
    assert torch.equal(model(x, attn_mask=numbers), model(x, attn_mask=numbers.to(dtype)))


# What is refused


def self_attention(*args, **options):
    return ParallelAttention(16, 8)(*args, **options)


def cross(*args):
    return ParallelAttention(16, 8, attention_type="cross")(*args)


X = torch.ones(2, 3, 16)


def test_what_cannot_be_is_refused_with_the_numbers_and_what_would_work():
    kv_heads = "num_kv_heads=6 can't be divided over 4 ranks, nor copied to them evenly. Use p in 1, 2, 3, 6, 12."
    heads = (
        "num_heads=6 can't be divided over 4 ranks: each rank takes whole heads, and as many as any other. Use p in 1"
    )
    positions = "cross-attention has no causal mask and no rotary positions"
    assert_refused_on(
        4,
        (lambda: ParallelAttention(24, 12, 6), kv_heads),
        (lambda: ParallelAttention(24, 6), heads),
        (lambda: ParallelAttention(16, 8, 3), "num_heads=8 can't share num_kv_heads=3 evenly"),
        (lambda: ParallelAttention(16, 8, 0), "num_heads=8 can't share num_kv_heads=0 evenly"),
        (lambda: ParallelAttention(16, 0), "num_heads=0 can't share num_kv_heads=0 evenly"),
        (lambda: ParallelAttention(20, 8), "hidden_size=20 can't be divided into num_heads=8 heads of one size"),
        (lambda: ParallelAttention(16, 8, attention_type="flash"), "attention_type='flash' is not 'self' or 'cross'"),
        (lambda: ParallelAttention(16, 8, attention_type="cross", causal=True), positions),
        (lambda: ParallelAttention(16, 8, attention_type="cross", rotary_base=1e4), positions),
        (lambda: ParallelAttention(16, 8, dropout=1.0), "dropout=1.0 should be in [0, 1)"),
        (lambda: ParallelAttention(24, 8, rotary_base=1e4)(torch.ones(1, 2, 24)), "head_dim=3 is odd"),
        (lambda: self_attention(X[0]), "x [3, 16] should be [b, s, 16]"),
        (lambda: self_attention(X[..., :8]), "x [2, 3, 8] should be [b, s, 16]"),
        (lambda: self_attention(X, X), "self-attention has no memory"),
        (lambda: cross(X), "cross-attention needs its memory once"),
        (lambda: cross(X, X[..., :8]), "memory [2, 3, 8] should be [b, s, 16]"),
        (lambda: self_attention(X, attn_mask=torch.ones(3, 3).bool()), "disagree on what True means"),
        (lambda: self_attention(X, attn_mask=torch.ones(2, 2, 3, 3)), "[2, 2, 3, 3] should be [3, 3] or [2, 8, 3, 3]"),
        (lambda: self_attention(X, key_padding_mask=torch.ones(2, 3)), "should be bool [2, 3], True for padding, got"),
        (lambda: self_attention(X, key_padding_mask=torch.ones(3, 2).bool()), "got torch.bool [3, 2]"),
    )
