"""The norm of a gradient that lies on many ranks is that of the plain model, as torch's clip_grad_norm_ takes it.

tests/cluster/test_three_dimensions.py has the norms of a GPT with a tied table and copies of the one K, V head.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.reference import assert_close, cut, random
from tplab import launch, record
from tplab.data.flat_parameters import Flat
from tplab.data.grad_norm import clip_grad_norm, grad_norm, grad_norm_of_pieces
from tplab.data.grid import mesh
from tplab.tensor.sharding import Block, Sharding

# By hand: a replicated parameter, one cut by rows, a fused one with fewer K, V heads than ranks, one without gradient

FUSED = (Block(8, 2), Block(2, 2), Block(4, 2))  # 4 heads of Q, 1 of K, 2 of V, of 2 rows each


def whole_gradients():
    return {"replicated": random((5,), "r"), "rows": random((8, 3), "c"), "fused": random((14, 3), "f")}


def own_parameters(rank, p):
    whole = whole_gradients()
    q, k, v = whole["fused"].split([8, 2, 4])
    gradients = {
        "replicated": whole["replicated"],
        "rows": cut(whole["rows"], 0, rank, p),
        "fused": torch.cat([cut(q, 0, rank, p), k, cut(v, 0, rank * 2 // p, 2)]),
    }
    shardings = {"replicated": None, "rows": Sharding(0), "fused": Sharding(0, blocks=FUSED)}
    parameters = []
    for name, gradient in gradients.items():
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient.clone()
        if shardings[name] is not None:
            parameter.tensor_parallel = shardings[name]
        parameters.append(parameter)
    return [*parameters, nn.Parameter(torch.zeros(3))]


def _of_shards():
    """Over tp alone; then over dp and tp, of gradients that ZeRO has cut."""
    rank, found = dist.get_rank(), []
    tp = mesh(tp=4)
    parameters = own_parameters(rank, 4)
    with record() as sent:
        norm = clip_grad_norm(parameters, 0.5, tp)
    found.append((norm, [parameter.grad for parameter in parameters], sent.totals()))
    too_long = grad_norm(own_parameters(rank, 4), tp), clip_grad_norm(own_parameters(rank, 4), 100.0, tp)

    both = mesh(dp=2, tp=2)
    parameters = own_parameters(both.get_local_rank("tp"), 2)[:-1]
    flat = Flat(parameters, both.get_group("dp"))
    pieces = flat.pieces(flat.shard(flat.flatten([parameter.grad for parameter in parameters])))
    with record() as sent:
        norm = grad_norm_of_pieces(pieces, both)
    found.append((norm, sent.totals()))
    nobody = grad_norm([], both)
    return found, too_long, nobody


def test_on_one_process_it_is_torchs():
    for dtype in (torch.float32, torch.float64):
        for max_norm in (0.1, 1e9):
            ours, theirs = (nn.Linear(4, 3, dtype=dtype) for _ in range(2))
            for layer in (ours, theirs):
                for parameter in layer.parameters():
                    parameter.grad = random(tuple(parameter.shape), "g", dtype=dtype)
            norm = clip_grad_norm([*ours.parameters(), ours.weight], max_norm)  # given twice, counted once
            assert float(norm) == pytest.approx(float(nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)))
            for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert_close(one.grad, other.grad, 1e-6 if dtype == torch.float32 else 1e-10)


def test_each_number_counts_once_and_every_rank_clips_by_the_same_factor():
    whole = [nn.Parameter(torch.zeros_like(gradient)) for gradient in whole_gradients().values()]
    for parameter, gradient in zip(whole, whole_gradients().values(), strict=True):
        parameter.grad = gradient
    norm = nn.utils.clip_grad_norm_(whole, 0.5)
    factor = 0.5 / (norm + 1e-6)
    for rank, (((found, gradients, sent), (of_pieces, more)), others, nobody) in enumerate(launch(_of_shards, 4)):
        for each in (found, of_pieces, *others):
            assert_close(each, norm)
        for gradient, own in zip(gradients[:-1], own_parameters(rank, 4), strict=False):
            assert_close(gradient, own.grad * factor)
        assert gradients[-1] is None
        assert sent == {"all_reduce": (1, 8)}
        assert more == {"all_reduce": (2, 16)}
        assert nobody == 0
