"""ParallelAttention: `tplab.tensor.attention`, against attention written out with einsum and softmax on one process.

The plain twin has four nn.Linear, repeats the heads of K and V, turns rotary pairs as complex numbers and asks for no
fused kernel. Which rows a rank should hold is derived here from the heads: those of its queries, and the K, V heads
that these belong to.
"""

import copy
import math
from contextlib import contextmanager
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.reference import assert_close, cut, random
from tests.tensor.on_ranks import GROUPS, assert_refused, own_group, refusals
from tests.tensor.on_ranks import train as train_sgd
from tplab import launch
from tplab.tensor.attention import ParallelAttention
from tplab.tensor.full_state import full_state_dict, load_full_state_dict

WORLD_SIZES = (1, 2, 4)
HIDDEN, HEADS = 16, 8
BATCH, SEQUENCE, MEMORY = 2, 5, 7
STEPS = 3
BASE = 100.0  # of rotary positions: small, so that five positions turn all pairs


class PlainAttention(nn.Module):
    """The same on one process, written without anything of tplab."""

    def __init__(self, kv_heads=HEADS, head_dim=2, bias=True, causal=False, rotary_base=None, dtype=torch.float64):
        super().__init__()
        self.heads, self.kv_heads, self.d, self.causal, self.base = HEADS, kv_heads, head_dim, causal, rotary_base
        self.q = nn.Linear(HIDDEN, HEADS * head_dim, bias, dtype=dtype)
        self.k = nn.Linear(HIDDEN, kv_heads * head_dim, bias, dtype=dtype)
        self.v = nn.Linear(HIDDEN, kv_heads * head_dim, bias, dtype=dtype)
        self.out = nn.Linear(HEADS * head_dim, HIDDEN, bias, dtype=dtype)

    def forward(self, x, memory=None, key_padding_mask=None, attn_mask=None, positions=None):
        source = x if memory is None else memory
        q = self.q(x).unflatten(-1, (-1, self.d))  # [b, s, heads, d]
        k = self.k(source).unflatten(-1, (-1, self.d))
        v = self.v(source).unflatten(-1, (-1, self.d))
        if self.base is not None:
            positions = torch.arange(x.shape[1]) if positions is None else positions
            q, k = turned(q, positions, self.base), turned(k, positions, self.base)
        k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))  # also with DTensor's local heads
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(self.d)
        if attn_mask is not None:
            scores = scores + attn_mask
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None], -torch.inf)
        if self.causal:
            future = torch.arange(scores.shape[3]) > torch.arange(scores.shape[2])[:, None]
            scores = scores.masked_fill(future, -torch.inf)
        y = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
        return self.out(y.flatten(2))


def turned(x, positions, base):
    """Rotary positions by complex numbers: pair i is x_i + j x_(i + d/2), and turning it is a product."""
    half = x.shape[-1] // 2
    speeds = 1.0 / (base ** (torch.arange(0, 2 * half, 2, dtype=torch.float32) / (2 * half)))
    angles = positions[..., None].float() * speeds  # angles, sines and cosines in float32, as in Llama
    turns = torch.complex(angles.cos().double(), angles.sin().double()).unsqueeze(-2)  # the same for all heads
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double()) * turns
    return torch.cat([pairs.real, pairs.imag], -1).to(x.dtype)


def plain_state(kv_heads=HEADS, head_dim=2, bias=True):
    shapes = PlainAttention(kv_heads, head_dim, bias).state_dict()
    return {name: random(tuple(t.shape), name) / 2 for name, t in shapes.items()}


def whole_state(plain, attention_type="self"):
    """The same weights under our names: [Wq; Wk; Wv] on top of each other."""
    state = {}
    for kind in ("weight", "bias"):
        if f"q.{kind}" in plain:
            q, k, v = (plain[f"{name}.{kind}"] for name in "qkv")
            if attention_type == "self":
                state[f"qkv.{kind}"] = torch.cat([q, k, v])
            else:
                state |= {f"q.{kind}": q, f"kv.{kind}": torch.cat([k, v])}
            state[f"out.{kind}"] = plain[f"out.{kind}"]
    return state


def part_of(plain, name, rank, p, kv_heads):
    """What rank should hold, or have as a gradient, of our parameter `name`, out of the plain twin's."""
    module, kind = name.split(".")
    if module == "out":
        return cut(plain[name], 1, rank, p) if kind == "weight" else plain[name]
    queries = list(range(HEADS))[rank * HEADS // p : (rank + 1) * HEADS // p]
    own = {"q": queries, "k": sorted({q * kv_heads // HEADS for q in queries})}
    own["v"] = own["k"]
    rows = []
    for part in module:  # the letters of qkv, q, kv
        whole = plain[f"{part}.{kind}"]
        heads = whole.chunk(HEADS if part == "q" else kv_heads)
        rows += [heads[head] for head in own[part]]
    return torch.cat(rows)


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


def make(case, group=None, dtype=torch.float64):
    options = {key: case[key] for key in MODEL_OPTIONS if key in case}
    options |= {"skip_bias_add": case.get("split_bias", False), "async_grad_allreduce": case.get("async", False)}
    heads = options.pop("kv_heads", None), options.pop("head_dim", None)
    model = ParallelAttention(HIDDEN, HEADS, *heads, **options, group=group, dtype=dtype)
    load_full_state_dict(model, whole_state(state_of(case), case.get("attention_type", "self")), group)
    return model


def state_of(case):
    return plain_state(case.get("kv_heads", HEADS), case.get("head_dim", 2), case.get("bias", True))


def make_plain(case, dtype=torch.float64):
    options = {key: case[key] for key in MODEL_OPTIONS[:-1] if key in case}
    model = PlainAttention(**options, dtype=dtype)
    model.load_state_dict(state_of(case))
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
        names = set(whole_state(state_of(case), case.get("attention_type", "self")))
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
    case = CASES[name]
    parameters = {key: value for key, value in plain_outcome(name).items() if "." in key and key[0] != "d"}
    expected = whole_state(parameters, case.get("attention_type", "self"))
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
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    theirs = make_plain(case)
    plan = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "out": RowwiseParallel()}
    parallelize_module(theirs, mesh, plan)
    outcomes = []
    for model in (make(case), theirs):
        result, traffic = train(model, case)
        outcomes.append(({n: t.to_local() if hasattr(t, "to_local") else t for n, t in result.items()}, traffic))
    return outcomes


@pytest.mark.parametrize("p", [2, 4])
def test_outputs_gradients_and_steps_equal_dtensors_with_no_more_traffic(p):
    case = {"causal": True, "kv_heads": 4}
    for (ours, our_traffic), (theirs, their_traffic) in launch(_with_dtensor, p, args=(case,)):
        for name in ("out", "dx", "dout.weight", "out.weight", "out.bias"):
            assert_close(ours[name], theirs[name])
        for name in ("weight", "bias", "dweight", "dbias"):
            prefix, kind = ("d", name[1:]) if name[0] == "d" else ("", name)
            assert_close(ours[f"{prefix}qkv.{kind}"], torch.cat([theirs[f"{prefix}{part}.{kind}"] for part in "qkv"]))
        assert our_traffic[0] == their_traffic[0]
        assert len(our_traffic[1]) == 1  # theirs, with torch 2.13: one for each of the layers q, k, v
        assert set(our_traffic[1]) <= set(their_traffic[1])


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
