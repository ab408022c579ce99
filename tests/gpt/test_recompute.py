"""Selective recomputation: scores, softmax and dropout of a layer computed again in backward, and nothing else changes.

The layer that keeps everything is the reference; that one is held to torch's own in test_transformer. What is kept is
compared with the formula in tests/sequence, and GPTs that recompute with plain ones in tests/gpu/test_on_the_cpu.py.
"""

import pytest
import torch
from torch.nn import functional as F

from tests.reference import assert_close, random
from tplab import launch, record
from tplab.gpt.transformer import ParallelTransformerLayer
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
        "same": [out.detach() for out in outs] + drawn,
        "gradients": {name: leaf.grad for name, leaf in leaves.items() if leaf is not None},
        "sent": [[(call.kind, call.bytes) for call in section] for section in (forward, backward)],
        "kept": kept.bytes,
    }


CASES = [(kind, tracked) for kind in LAYERS for tracked in (True, False)]


def _everything():
    """Of each case, what a layer that keeps everything sees, and one that recomputes."""
    return {(kind, tracked): [steps(kind, again, tracked) for again in (False, True)] for kind, tracked in CASES}


@pytest.fixture(scope="module")
def ranks():
    return launch(_everything, 2, timeout=240)


@pytest.mark.parametrize(("kind", "tracked"), CASES)
def test_outputs_gradients_masks_and_traffic_are_those_without_and_the_scores_are_not_kept(kind, tracked, ranks):
    for right, seen in (rank[kind, tracked] for rank in ranks):
        assert not torch.equal(*right["same"][:2]), "nothing was dropped"
        assert all(map(torch.equal, seen["same"], right["same"]))
        assert seen["gradients"].keys() == right["gradients"].keys()
        for name, gradient in right["gradients"].items():
            assert_close(seen["gradients"][name], gradient)
        assert seen["sent"] == right["sent"]
        scores = 2 * 8 * BATCH * SEQUENCE**2 * HEADS // 2  # softmax and scores after dropout, of two passes, on a rank
        assert right["kept"] - seen["kept"] >= 2 * scores


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
