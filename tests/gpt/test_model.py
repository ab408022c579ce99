"""ParallelGPT and `tplab.gpt.hugging_face`, against Hugging Face's GPT2LMHeadModel and LlamaForCausalLM, weights alike.

Theirs run on one process in float64. What a rank should hold of a gradient is cut out of theirs with `chunk`, after it
was renamed here by hand: the table under test is not asked. All programs run in one launch for each number of ranks.
Other dtypes, autocast and recomputation with dropout are compared with plain torch in tests/gpu/test_on_the_cpu.py.
"""

import copy
import dataclasses
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.gpt.random_models import FFN, HEADS, HIDDEN, LAYERS
from tests.gpt.random_models import hugging_face as random_model
from tests.reference import assert_close, cut
from tests.tensor.on_ranks import refusals, traffic
from tplab import launch, record
from tplab.gpt.hugging_face import from_hugging_face, gpt_config, to_hugging_face
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig, parameter_count
from tplab.tensor.full_state import full_state_dict, load_full_state_dict
from tplab.tensor.rng import seed_all

VOCAB = 37
BATCH, SEQUENCE, STEPS = 2, 9, 3
KINDS = ("gpt2", "llama", "llama 1 kv")


def hugging_face(kind, seed=0, dtype=torch.float64):
    return random_model(kind, VOCAB, seed, dtype)


def tokens(seed, step=0):
    generator = torch.Generator().manual_seed(1000 * seed + step)
    ids = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator)
    targets = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator)
    targets[0, 2] = -100
    return ids, targets


# ours -> theirs, and along which dimension it is cut, in how many blocks
GPT2 = {
    "embedding": ("transformer.wte", "rows"),
    "positions": ("transformer.wpe", None),
    "final_norm": ("transformer.ln_f", None),
    "attention_norm": ("ln_1", None),
    "mlp_norm": ("ln_2", None),
    "attention.qkv": ("attn.c_attn", (0, 3)),
    "attention.out": ("attn.c_proj", (1, 1)),
    "mlp.up": ("mlp.c_fc", (0, 1)),
    "mlp.down": ("mlp.c_proj", (1, 1)),
}
LLAMA = {
    "embedding": ("model.embed_tokens", "rows"),
    "head": ("lm_head", "rows"),
    "final_norm": ("model.norm", None),
    "attention_norm": ("input_layernorm", None),
    "mlp_norm": ("post_attention_layernorm", None),
    "attention.qkv": ("self_attn.q_proj self_attn.k_proj self_attn.v_proj", "heads"),
    "attention.out": ("self_attn.o_proj", (1, 1)),
    "mlp.up": ("mlp.gate_proj mlp.up_proj", (0, 1)),
    "mlp.down": ("mlp.down_proj", (1, 1)),
}


def part(kind, name, theirs, rank, p):
    """What a rank holds of our parameter `name`, out of a dict of theirs."""
    *path, end = name.split(".")
    table, layers = (GPT2, "transformer.h") if kind == "gpt2" else (LLAMA, "model.layers")
    prefix = f"{layers}.{path[1]}." if path[0] == "layers" else ""
    sources, how = table[".".join(path[2:] if prefix else path)]
    wholes = [theirs[f"{prefix}{source}.{end}"] for source in sources.split()]
    if how is None:
        return wholes[0]
    if how == "rows":
        padding = wholes[0].new_zeros(p * 128 - len(wholes[0]), HIDDEN)
        return torch.cat([wholes[0], padding]).chunk(p)[rank]
    if how == "heads":
        q, *keys_values = wholes
        d, heads = HIDDEN // HEADS, len(wholes[1]) * HEADS // HIDDEN
        first, count = rank * heads // p, max(1, heads // p)  # of K and V, those that this rank's queries belong to
        return torch.cat([cut(q, 0, rank, p), *(whole[first * d : (first + count) * d] for whole in keys_values)])
    dim, blocks = how
    if end == "bias" and dim == 1:
        return wholes[0]
    return torch.cat(
        [cut(whole.T if kind == "gpt2" and end == "weight" else whole, dim, rank, p, blocks) for whole in wholes]
    )


def steps(model, loss_of, batches, before_step=lambda: None):
    """Losses of some steps of AdamW, the first step's gradients, and the weights after the last one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients = [], {}
    for batch in batches:
        loss = loss_of(*batch)
        optimizer.zero_grad()
        loss.backward()
        before_step()
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"losses": losses, "gradients": gradients, "weights": weights}


def plain_steps(kind, seed, dtype, batches):
    model = copy.deepcopy(hugging_face(kind, seed, dtype))
    logits = model(batches[0][0]).logits.detach()  # [b, s, v]

    def loss_of(ids, targets):
        return F.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten())

    return {"logits": logits} | steps(model, loss_of, batches)


def make(state, config, dtype=torch.float64, group=None, model_class=ParallelGPT, **options):
    model = model_class(config, dtype=dtype, group=group, **options)
    load_full_state_dict(model, from_hugging_face(state, config), group)
    return model


def run(state, config, seed, dtype, group=None, **options):
    model, batches = make(state, config, dtype, group, **options), [tokens(seed, step) for step in range(STEPS)]
    with torch.no_grad():
        logits = model(batches[0][0], gather=True)
    result = steps(model, model, batches)
    return result | {"logits": logits, "whole": to_hugging_face(full_state_dict(model, group), config)}


def given(kind, seed=0, dtype=torch.float64):
    model = hugging_face(kind, seed, dtype)
    return model.state_dict(), gpt_config(model.config.to_dict()), seed, dtype


@cache
def expected(kind):
    return plain_steps(kind, 0, torch.float64, [tokens(0, step) for step in range(STEPS)])


# Programs


def step(state, config, overlap, compiled=False):
    """Traffic, loss and gradients of a step, in one graph if it is compiled; what is said of ids that are none."""
    model = make(state, config, async_grad_allreduce=overlap)
    if compiled:
        model.compile(backend="aot_eager", fullgraph=True)
    ids, targets = tokens(0)
    with record() as forward:
        loss = model(ids, targets)
    with record() as backward:
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    wrong, kind = torch.full_like(ids, VOCAB), RuntimeError if compiled else IndexError
    refused = refusals(lambda: model(wrong, targets), lambda: model(ids, wrong), kind=kind)
    return traffic(forward, backward), loss.item(), gradients, refused


def _entrance(state, config):
    """What the layers are given, with dropout."""
    model = make(state, dataclasses.replace(config, dropout=0.2))
    model.layers, model.final_norm = nn.ModuleList(), nn.Identity()
    return model.features(tokens(0)[0], rng=seed_all(11)).detach()


CONFIGS = {
    "gpt2": GPTConfig(num_layers=2, hidden_size=16, num_heads=4, vocab_size=37, seq_length=12, dropout=0.0),
    "llama": GPTConfig(
        num_layers=2, hidden_size=16, num_heads=4, vocab_size=37, seq_length=12, num_kv_heads=2, ffn_hidden_size=24,
        gated=True, bias=False, tied_embedding=False, learned_positions=False, dropout=0.0,
    ),
}  # fmt: skip
WIDE = GPTConfig(num_layers=8, hidden_size=64, num_heads=4, vocab_size=1000, seq_length=100, dropout=0.0)
SEVERAL_HAVE_ROWS = dataclasses.replace(CONFIGS["llama"], vocab_size=300)


ONE_STEP = ("gpt2", "llama 1 kv")


def fresh(config, per_rank=False):
    seed_all(5)
    model = ParallelGPT(config, per_rank_init=per_rank)
    held = sum(p.numel() for p in model.parameters())
    return full_state_dict(model), held, torch.rand(1).item()


def _everything(models):
    state, config, *_ = models["gpt2"]
    too_few_heads = dataclasses.replace(CONFIGS["gpt2"], num_heads=2)
    return {
        "steps": {kind: run(*model) for kind, model in models.items()},
        "overlap": {kind: [step(*models[kind][:2], overlap) for overlap in (False, True)] for kind in ONE_STEP},
        "entrance": _entrance(state, config),
        "fresh": [fresh(config) for config in CONFIGS.values()],
        "per rank": fresh(SEVERAL_HAVE_ROWS, per_rank=True)[0],
        "wide": [fresh(WIDE, per_rank)[0] for per_rank in (False, True)],
        "refused": refusals(lambda: ParallelGPT(too_few_heads)),
    }


@pytest.fixture(scope="module", params=[1, 2, 4])
def ran(request):
    results = launch(_everything, request.param, args=({kind: given(kind) for kind in KINDS},), timeout=240)
    assert len(results) == request.param
    return results


# What they show


@pytest.mark.parametrize("kind", KINDS)
def test_logits_loss_gradients_and_steps_equal_hugging_faces(kind, ran):
    theirs, p = expected(kind), len(ran)
    for rank, mine in enumerate(result["steps"][kind] for result in ran):
        assert_close(mine["logits"], theirs["logits"], 1e-9)
        assert mine["losses"] == pytest.approx(theirs["losses"], abs=1e-9)
        for name, gradient in mine["gradients"].items():
            assert_close(gradient, part(kind, name, theirs["gradients"], rank, p), 1e-9)
        for name, weight in mine["weights"].items():  # Adam divides by a gradient's size, so what is rounding moves too
            assert_close(weight, part(kind, name, theirs["weights"], rank, p), 1e-6)
        for name, weight in theirs["weights"].items():
            assert_close(mine["whole"][name], weight, 1e-6)


def assert_one_step(kind, outcome, rank, p):
    _, loss, gradients, refused = outcome
    theirs = expected(kind)
    assert loss == pytest.approx(theirs["losses"][0], abs=1e-9)
    for name, gradient in gradients.items():
        assert_close(gradient, part(kind, name, theirs["gradients"], rank, p), 1e-9)
    for what, message in zip(("id", "target"), refused, strict=True):
        assert what in message
        assert "outside the vocabulary: its 37 ids are 0 to 36" in message


@pytest.mark.parametrize("kind", ONE_STEP)
def test_a_step_sends_bsh_for_each_block_and_for_the_two_tables_and_is_the_same_with_overlap(kind, ran):
    def sums(*sizes):
        return [("all_reduce", "sum", size) for size in sizes]

    h = sums(8 * BATCH * SEQUENCE * HIDDEN) * (2 * LAYERS + 1)
    loss = [("all_reduce", "max", 8 * BATCH * SEQUENCE), *sums(8 * (BATCH * SEQUENCE + 1))]
    for rank, outcomes in enumerate(result["overlap"][kind] for result in ran):
        for outcome in outcomes:
            assert_one_step(kind, outcome, rank, len(ran))
            if kind == "gpt2":  # one K, V head has copies, whose gradients are summed, too
                assert outcome[0] == ([h + loss, h] if len(ran) > 1 else [[], []])


@pytest.mark.parametrize(("kind", "overlap"), [("gpt2", False), ("llama 1 kv", True)])
def test_a_step_is_the_same_compiled_in_one_graph(kind, overlap):
    for rank, outcome in enumerate(launch(step, 2, args=(*given(kind)[:2], overlap, True), timeout=240)):
        assert_one_step(kind, outcome, rank, 2)


def test_the_sum_of_both_embeddings_is_dropped_alike_on_every_rank(ran):
    state = hugging_face("gpt2").state_dict()
    x = state["transformer.wte.weight"][tokens(0)[0]] + state["transformer.wpe.weight"][:SEQUENCE]
    torch.manual_seed(11 + 1359)
    wanted = F.dropout(x, 0.2)
    for result in ran:
        assert_close(result["entrance"], wanted)


def test_the_same_seed_gives_the_same_whole_model_for_every_p(ran):
    for number, config in enumerate(CONFIGS.values()):
        whole, held, after = fresh(config)
        padding = (128 - 37) * 16 * (1 if config.tied_embedding else 2)
        assert held - padding == parameter_count(config) == sum(t.numel() for t in whole.values())
        for state, _, then in (result["fresh"][number] for result in ran):
            assert state.keys() == whole.keys()
            assert all(torch.equal(state[key], whole[key]) for key in whole)
            assert then == after


def test_with_per_rank_init_what_is_cut_is_another_sample_for_each_p_and_what_is_whole_the_same(ran):
    for name, tensor in fresh(SEVERAL_HAVE_ROWS, per_rank=True)[0].items():
        assert torch.equal(tensor, ran[0]["per rank"][name]) == (len(ran) == 1 or "norm" in name), name


def test_first_values_have_the_spread_of_gpt2_and_what_writes_to_the_residual_a_smaller_one(ran):
    for whole in ran[0]["wide"]:
        for name in ("embedding.weight", "positions.weight", "layers.3.attention.qkv.weight", "layers.7.mlp.up.weight"):
            assert whole[name].std().item() == pytest.approx(0.02, rel=0.1), name
        for name in ("layers.3.attention.out.weight", "layers.0.mlp.down.weight"):
            assert whole[name].std().item() == pytest.approx(0.02 / 4, rel=0.1), name
        assert whole["layers.0.mlp.down.bias"].abs().max() == 0
        first, second = whole["layers.0.mlp.up.weight"].chunk(2)
        assert not torch.equal(first, second)


def test_a_number_of_ranks_that_cannot_share_the_model_is_refused_on_each_with_those_that_can(ran):
    for (message,) in (result["refused"] for result in ran):
        assert (
            ("num_heads=2 can't be divided over 4 ranks" in message) == ("Use p in 1, 2." in message) == (len(ran) == 4)
        )


# On one process


def test_a_target_that_is_to_be_ignored_counts_for_nothing():
    ids, targets = tokens(0)[0], tokens(1)[1].clamp(min=0)
    ignored = targets[0, 0].item()
    logits = expected("gpt2")["logits"]
    right = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=ignored)
    assert_close(make(*given("gpt2")[:2])(ids, targets, ignore_index=ignored), right, 1e-9)


def test_recomputation_keeps_less():
    state, config, *_ = given("gpt2")
    kept = []
    for recompute in ("nothing", "attention", "layers"):
        model, sizes = make(state, dataclasses.replace(config, dropout=0.2), recompute=recompute), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t):
            model(*tokens(0), rng=seed_all(11))
        kept.append(sum(sizes))
    everything, without_scores, inputs_only = kept
    assert inputs_only < everything / 2
    assert inputs_only < without_scores < everything
    with pytest.raises(ValueError, match="'scores' is not one of 'nothing', 'attention', 'layers'"):
        ParallelGPT(config, recompute="scores")


def test_a_key_padding_mask_hides_padding_from_every_token():
    model = make(*given("llama")[:2])
    ids = tokens(0)[0]
    padding = torch.zeros(BATCH, SEQUENCE, dtype=torch.bool)
    padding[1, :3] = True
    with torch.no_grad():
        padded, other = model(ids, key_padding_mask=padding), ids.clone()
        other[1, :3] = (other[1, :3] + 1) % VOCAB
        assert_close(model(other, key_padding_mask=padding)[1, 3:], padded[1, 3:])
        assert not torch.equal(model(other)[1, 3:], model(ids)[1, 3:])


def test_every_option_reaches_its_place(monkeypatch):
    config = dataclasses.replace(CONFIGS["llama"], dropout=0.3, rotary_base=77.0, norm_eps=1e-3)
    model = ParallelGPT(
        config, check_ids="later", async_grad_allreduce=True, per_rank_init=True,
        init_method=lambda w: nn.init.constant_(w, 1.0), output_init_method=lambda w: nn.init.constant_(w, 2.0),
    )  # fmt: skip
    assert model.embedding.check_ids.when == "later"
    assert model.embedding.per_rank_init
    assert model.final_norm.eps == 1e-3
    assert bool((model.embedding.weight[:37] == 1).all() and (model.head.weight[:37] == 1).all())
    assert not model.head.weight[37:].any()  # padding
    for layer in model.layers:
        assert (layer.attention_norm.eps, layer.mlp_norm.eps) == (1e-3, 1e-3)
        assert (layer.hidden_dropout, layer.attention.dropout) == (0.3, 0.3)
        assert (layer.attention.rotary_base, layer.attention.num_kv_heads, layer.attention.causal) == (77.0, 2, True)
        assert layer.attention.qkv.async_grad_allreduce
        assert layer.mlp.up.async_grad_allreduce
        assert layer.mlp.down.per_rank_init
        assert bool((layer.mlp.up.weight == 1).all() and (layer.mlp.down.weight == 2).all())
    assert {cache.text.keys.dtype for cache in model.new_cache(1, 4, torch.bfloat16)} == {torch.bfloat16}
    given_to_logits: dict = {}
    monkeypatch.setattr("tplab.gpt.model.parallel_logits", lambda x, weight, **options: given_to_logits.update(options))
    model(torch.zeros(1, 2, dtype=torch.long))
    assert given_to_logits["async_grad_allreduce"]
    learned = ParallelGPT(CONFIGS["gpt2"], init_method=lambda w: nn.init.constant_(w, 3.0))
    assert bool((learned.positions.weight == 3).all() and (learned.layers[0].mlp.down.weight == 3).all())


def test_a_bfloat16_model_may_keep_its_residual_in_float32():
    for float32_residual, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        model, seen = ParallelGPT(CONFIGS["gpt2"], dtype=torch.bfloat16, float32_residual=float32_residual), []
        model.layers[1].register_forward_hook(lambda module, args, out, seen=seen: seen.append(out.dtype))
        assert model(tokens(0)[0]).dtype == torch.bfloat16
        assert seen == [dtype]


def test_what_does_not_fit_is_refused_with_the_numbers():
    config = CONFIGS["gpt2"]
    model = ParallelGPT(config)
    assert model(torch.zeros(1, 12, dtype=torch.long)).shape == (1, 12, 128)
    with pytest.raises(ValueError, match=r"13 tokens are more than seq_length=12"):
        model(torch.zeros(1, 13, dtype=torch.long))
    with pytest.raises(IndexError, match=r"id 37 at \[0, 1\]"):
        model(torch.tensor([[1, 37]]))
    with pytest.raises(IndexError, match=r"target 40 at \[0, 0\]"):
        model(torch.tensor([[1, 2]]), torch.tensor([[40, 2]]))


# Names and configurations of Hugging Face


@pytest.mark.parametrize("kind", KINDS)
def test_from_and_to_hugging_face_undo_each_other_and_share_no_memory(kind):
    state, config, *_ = given(kind)
    mine = from_hugging_face(state, config)
    back = to_hugging_face(mine, config)
    assert {name: t.shape for name, t in back.items()} == {name: t.shape for name, t in state.items()}
    assert all(torch.equal(back[name], state[name]) for name in state)
    for tensor in mine.values():
        tensor.zero_()
    assert all(torch.equal(back[name], state[name]) and state[name].abs().max() > 0 for name in state)


def test_a_state_dict_that_does_not_fit_is_refused_by_name():
    state, config, *_ = given("llama")
    state = dict(state)
    with pytest.raises(ValueError, match=r"layers.2.attention_norm.weight should come from model.layers.2.input_lay"):
        from_hugging_face(state, dataclasses.replace(config, num_layers=3))
    with pytest.raises(ValueError, match=r"9 tensors have no place in this Llama: model.layers.1"):
        from_hugging_face(state, dataclasses.replace(config, num_layers=1))
    with pytest.raises(ValueError, match=r"gated=True"):
        from_hugging_face(state, dataclasses.replace(config, learned_positions=True))
    gate, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    uneven = {gate: torch.ones(FFN - 4, HIDDEN), up: torch.ones(FFN + 4, HIDDEN)}
    with pytest.raises(ValueError, match=r"gate_proj.weight, .*up_proj.weight have \[20, 28\] rows instead of"):
        from_hugging_face(state | uneven, config)
    tied = dataclasses.replace(config, tied_embedding=True)
    with pytest.raises(ValueError, match=r"tied_embedding is set, but lm_head.weight differs from the embedding"):
        from_hugging_face(state, tied)
    del state["model.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(ValueError, match=r"layers.0.attention.qkv.weight should come from model.layers.0.self_attn.k"):
        from_hugging_face(state, config)
