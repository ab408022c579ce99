"""ParallelGPT and `tplab.gpt.hugging_face`, against `tplab.plain.GPT` on one process.

tests/test_plain.py compares the plain GPT with transformers' models, and test_hugging_face_folder.py the parallel one.
Other dtypes, autocast and recomputation with dropout are in tests/gpu/test_on_the_cpu.py.
"""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests import saying
from tests.gpt.random_models import hugging_face
from tests.gpt.twins import (
    BATCH,
    GPT2,
    HIDDEN,
    LLAMA,
    ONE_KV_HEAD,
    VOCAB,
    gpt_batches,
    ids_and_targets,
    parallel_gpt,
    plain_gpt,
)
from tests.reference import assert_close
from tests.tensor.on_ranks import assert_refuses, assert_trains_like, everywhere, refusals
from tplab import launch
from tplab.collectives.by_hand import rank_and_size
from tplab.gpt.hugging_face import from_hugging_face, gpt_config, to_hugging_face
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig, parameter_count
from tplab.tensor.full_state import full_state_dict, load_full_state_dict
from tplab.tensor.rng import seed_all

SEQUENCE = 9
WIDE = GPTConfig(num_layers=8, hidden_size=64, num_heads=4, vocab_size=1000, seq_length=100, dropout=0.0)


# On ranks


def assert_wrong_ids_are_named(model, kind):
    ids, targets = ids_and_targets(SEQUENCE)
    wrong = torch.full_like(ids, VOCAB)
    of_ids, of_targets = refusals(lambda: model(wrong, targets), lambda: model(ids, wrong), kind=kind)
    for what, message in (("id", of_ids), ("target", of_targets)):
        assert re.search(saying(f"{what} ", "37 ids", " 0 ", " 36"), message)


def _train(group):
    """A step of GPT-2 sends b s h elements for each block and for the two tables, also with overlap."""
    several = rank_and_size(group)[1] > 1
    h = [("all_reduce", "sum", 8 * BATCH * SEQUENCE * HIDDEN)] * (2 * 2 + 1)
    loss = [("all_reduce", "max", 8 * BATCH * SEQUENCE), ("all_reduce", "sum", 8 * (BATCH * SEQUENCE + 1))]
    for config, overlap in ((GPT2, False), (GPT2, True), (LLAMA, False), (ONE_KV_HEAD, False), (ONE_KV_HEAD, True)):
        twin, model = plain_gpt(config), parallel_gpt(config, group, async_grad_allreduce=overlap)
        sent = assert_trains_like(twin, model, gpt_batches(SEQUENCE), group, lr=0.05, momentum=0.9)
        if config is GPT2:
            assert sent == ([h + loss, h] if several else [[], []])
        ids, _ = ids_and_targets(SEQUENCE)
        assert_close(model(ids, gather=True).detach(), twin(ids).detach())
    assert_wrong_ids_are_named(model, IndexError)


def _drop_the_sum_of_both_embeddings(group):
    """What the layers are given is dropped alike on every rank."""
    twin, model = plain_gpt(GPT2), parallel_gpt(replace(GPT2, dropout=0.2), group)
    load_full_state_dict(model, twin.state_dict(), group)
    model.layers, model.final_norm = nn.ModuleList(), nn.Identity()
    ids, _ = ids_and_targets(SEQUENCE)
    found = model.features(ids, rng=seed_all(11, group)).detach()
    torch.manual_seed(11 + 1359)
    assert_close(found, F.dropout(twin.embedding(ids) + twin.positions.weight[:SEQUENCE], 0.2).detach())


def fresh(config, group=None):
    """The first values of the full model, how many a rank holds, and what is drawn next."""
    seed_all(5, group)
    model = ParallelGPT(config, group=group)
    return full_state_dict(model, group), sum(p.numel() for p in model.parameters()), torch.rand(1).item()


def _start_alike(group, wholes):
    """The same seed gives the same full model for every p."""
    for config, (whole, _, after) in wholes:
        state, _, then = fresh(config, group)
        assert state.keys() == whole.keys()
        assert all(torch.equal(state[key], whole[key]) for key in whole)
        assert then == after


def _everything(group, wholes):
    _train(group)
    _drop_the_sum_of_both_embeddings(group)
    _start_alike(group, wholes)


def test_logits_gradients_steps_traffic_dropout_and_first_values_are_those_of_one_process():
    wholes = [(config, fresh(config)) for config in (GPT2, LLAMA)]
    for config, (whole, held, _) in wholes:
        padding = (128 - VOCAB) * HIDDEN * (1 if config.tied_embedding else 2)
        assert held - padding == parameter_count(config) == sum(t.numel() for t in whole.values())
    everywhere(_everything, wholes)


def _compiled():
    config = replace(ONE_KV_HEAD, num_layers=1)
    model = parallel_gpt(config, async_grad_allreduce=True)
    model.compile(backend="aot_eager", fullgraph=True)
    assert_trains_like(plain_gpt(config), model, gpt_batches(SEQUENCE)[:1], lr=0.05)
    assert_wrong_ids_are_named(model, RuntimeError)


def test_a_step_is_the_same_compiled_in_one_graph():
    launch(_compiled, 2, timeout=240)


# On one process


def test_first_values_have_the_spread_of_gpt2_and_what_writes_to_the_residual_a_smaller_one():
    whole, _, _ = fresh(WIDE)
    for name in ("embedding.weight", "positions.weight", "layers.3.attention.qkv.weight", "layers.7.mlp.up.weight"):
        assert whole[name].std().item() == pytest.approx(0.02, rel=0.1), name
    for name in ("layers.3.attention.out.weight", "layers.0.mlp.down.weight"):
        assert whole[name].std().item() == pytest.approx(0.02 / 4, rel=0.1), name
    assert whole["layers.0.mlp.down.bias"].abs().max() == 0


def test_every_option_reaches_its_place(monkeypatch):
    model = ParallelGPT(
        replace(LLAMA, dropout=0.3, rotary_base=77.0, norm_eps=1e-3), async_grad_allreduce=True,
        init_method=lambda w: nn.init.constant_(w, 1.0), output_init_method=lambda w: nn.init.constant_(w, 2.0),
    )  # fmt: skip
    assert model.final_norm.eps == 1e-3
    assert bool((model.embedding.weight[:37] == 1).all() and (model.head.weight[:37] == 1).all())
    assert not model.head.weight[37:].any()  # padding
    for layer in model.layers:
        assert (layer.attention_norm.eps, layer.mlp_norm.eps) == (1e-3, 1e-3)
        assert (layer.hidden_dropout, layer.attention.dropout) == (0.3, 0.3)
        assert (layer.attention.rotary_base, layer.attention.num_kv_heads, layer.attention.causal) == (77.0, 2, True)
        assert layer.attention.qkv.async_grad_allreduce
        assert layer.mlp.up.async_grad_allreduce
        assert bool((layer.mlp.up.weight == 1).all() and (layer.mlp.down.weight == 2).all())
    given_to_logits: dict = {}
    monkeypatch.setattr("tplab.gpt.model.parallel_logits", lambda x, weight, **options: given_to_logits.update(options))
    model(torch.zeros(1, 2, dtype=torch.long))
    assert given_to_logits["async_grad_allreduce"]
    learned = ParallelGPT(GPT2, init_method=lambda w: nn.init.constant_(w, 3.0))
    assert bool((learned.positions.weight == 3).all() and (learned.layers[0].mlp.down.weight == 3).all())


def test_a_bfloat16_model_may_keep_its_residual_in_float32():
    for float32_residual, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        model, seen = ParallelGPT(GPT2, dtype=torch.bfloat16, float32_residual=float32_residual), []
        model.layers[1].register_forward_hook(lambda module, args, out, seen=seen: seen.append(out.dtype))
        assert model(ids_and_targets(SEQUENCE)[0]).dtype == torch.bfloat16
        assert seen == [dtype]


# Names and configurations of Hugging Face


@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama 1 kv"])
def test_from_and_to_hugging_face_undo_each_other_and_share_no_memory(kind):
    model = hugging_face(kind)
    state, config = model.state_dict(), gpt_config(model.config.to_dict())
    mine = from_hugging_face(state, config)
    back = to_hugging_face(mine, config)
    assert {name: t.shape for name, t in back.items()} == {name: t.shape for name, t in state.items()}
    assert all(torch.equal(back[name], state[name]) for name in state)
    for tensor in mine.values():
        tensor.zero_()
    assert all(torch.equal(back[name], state[name]) and state[name].abs().max() > 0 for name in state)


def test_a_state_dict_that_does_not_fit_is_refused_by_name():
    model = hugging_face("llama")
    state, config = model.state_dict(), gpt_config(model.config.to_dict())
    key = "model.layers.0.self_attn.k_proj.weight"
    less = {name: tensor for name, tensor in state.items() if name != key}
    assert_refuses(
        (lambda: from_hugging_face(less, config), "layers.0.attention.qkv.weight", key),
        (lambda: from_hugging_face(state, replace(config, num_layers=1)), "9 tensors", "Llama"),
        (lambda: from_hugging_face(state, replace(config, tied_embedding=True)), "tied_embedding", "lm_head.weight"),
    )
