"""Selective recomputation: scores, softmax and dropout of a layer computed again in backward, and nothing else changes.

The layer that keeps everything is the reference; that one is held to torch's own in test_transformer. What is kept is
compared with the formula in test_sequence_parallel.
"""

import pytest
import torch
from torch.nn import functional as F

from tests.reference import assert_close, random
from tplab import launch, record
from tplab.gpt.model import ParallelGPT
from tplab.gpt.transformer import ParallelTransformerLayer, run_again_in_backward
from tplab.memory.config import GPTConfig
from tplab.memory.meter import saved_for_backward
from tplab.tensor.rng import seed_all

BATCH, SEQUENCE, MEMORY, HIDDEN, HEADS = 2, 24, 5, 16, 4
LAYERS = {
    "causal": {},
    "encoder": {"causal": False},
    "decoder": {"cross_attention": True},
    "grouped, rotary": {"num_kv_heads": 2, "rotary_base": 100.0, "norm": "rms", "bias": False},
}


def steps(kind, recompute, tracked):
    """Two passes of a layer that drops, all gradients, what was sent and kept, and what the states draw afterwards."""
    rng = seed_all(5)
    torch.manual_seed(6)
    layer = ParallelTransformerLayer(
        HIDDEN, HEADS, hidden_dropout=0.2, attention_dropout=0.3, recompute_attention=recompute, dtype=torch.float64,
        **LAYERS[kind],
    )  # fmt: skip
    x = random((BATCH, SEQUENCE, HIDDEN), "x").requires_grad_()
    memory = random((BATCH, MEMORY, HIDDEN), "memory").requires_grad_() if kind == "decoder" else None
    numbers = random((SEQUENCE, SEQUENCE), "numbers").requires_grad_()  # added to the scores, and trained
    options = {"attn_mask": numbers, "rng": rng if tracked else None}
    with record() as forward, saved_for_backward(layer) as kept:
        outs = [layer(x, memory, **options) for _ in range(2)]
    with record() as backward:
        torch.autograd.backward(outs, [random(tuple(out.shape), "dy", i) for i, out in enumerate(outs)])
    drawn = [F.dropout(torch.ones(50))]
    for name in ("replicated", "sharded"):
        with rng.fork(name):
            drawn.append(F.dropout(torch.ones(50)))
    leaves = {"x": x, "memory": memory, "numbers": numbers, **dict(layer.named_parameters())}
    return {
        "outs": [out.detach() for out in outs],
        "gradients": {name: leaf.grad for name, leaf in leaves.items() if leaf is not None},
        "drawn": drawn,
        "sent": [[(call.kind, call.bytes) for call in section] for section in (forward, backward)],
        "kept": kept.bytes,
    }


def _all_steps(recompute):
    return {(kind, tracked): steps(kind, recompute, tracked) for kind in LAYERS for tracked in (True, False)}


@pytest.fixture(scope="module", params=[1, 2])
def both(request):
    """What the ranks of a layer that keeps everything saw, and those of one that recomputes."""
    results = [launch(_all_steps, request.param, args=(recompute,), timeout=120) for recompute in (False, True)]
    assert all(len(result) == request.param for result in results)
    return results


@pytest.mark.parametrize("tracked", [True, False], ids=["tracker", "current state"])
@pytest.mark.parametrize("kind", LAYERS)
def test_outputs_gradients_masks_and_traffic_are_those_without(kind, tracked, both):
    for keeping, again in zip(*both, strict=True):
        right, seen = keeping[kind, tracked], again[kind, tracked]
        assert not torch.equal(right["outs"][0], right["outs"][1]), "nothing was dropped"
        for one, other in zip(seen["outs"] + seen["drawn"], right["outs"] + right["drawn"], strict=True):
            assert torch.equal(one, other)
        assert seen["gradients"].keys() == right["gradients"].keys()
        for name, gradient in right["gradients"].items():
            assert_close(seen["gradients"][name], gradient)
        assert seen["sent"] == right["sent"]


@pytest.mark.parametrize("kind", LAYERS)
def test_the_scores_are_not_kept(kind, both):
    for keeping, again in zip(*both, strict=True):
        scores = 2 * 8 * BATCH * SEQUENCE**2 * HEADS // len(both[0])  # softmax and scores after dropout, of two passes
        assert keeping[kind, True]["kept"] - again[kind, True]["kept"] >= 2 * scores


def test_without_gradients_the_core_runs_once():
    layer = ParallelTransformerLayer(HIDDEN, HEADS, recompute_attention=True)
    runs = []
    run_core = layer.attention.run_core
    layer.attention.run_core = lambda core, *rest: run_core(lambda *qkv: runs.append(1) or core(*qkv), *rest)
    with torch.no_grad():
        layer(torch.ones(1, 3, HIDDEN))
    assert len(runs) == 1
    layer(torch.ones(1, 3, HIDDEN)).sum().backward()
    assert len(runs) == 3


def test_a_gpt_recomputes_what_it_was_told_and_refuses_anything_else():
    config = GPTConfig(num_layers=2, hidden_size=HIDDEN, num_heads=HEADS, vocab_size=9, seq_length=8)
    for recompute in ("nothing", "attention", "layers"):
        again = [
            layer.attention.run_core is run_again_in_backward
            for layer in ParallelGPT(config, recompute=recompute).layers
        ]
        assert again == [recompute == "attention"] * 2
    with pytest.raises(ValueError, match="'scores' is not one of 'nothing', 'attention', 'layers'"):
        ParallelGPT(config, recompute="scores")
