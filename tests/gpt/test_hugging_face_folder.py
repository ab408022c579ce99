"""`tplab.gpt.hugging_face_folder` and `hugging_face_config`, against transformers' models with random weights.

The folders are those that save_pretrained writes. Theirs run on one process in float64, with torch's RMSNorm in place
of theirs, which computes in float32 whatever it is given.
"""

import dataclasses
import json
from contextlib import suppress
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.reference import assert_close
from tests.tensor.on_ranks import results_of
from tplab.gpt.generation import generate
from tplab.gpt.hugging_face import to_hugging_face
from tplab.gpt.hugging_face_config import gpt_config
from tplab.gpt.hugging_face_folder import config_of_folder, load_folder
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import parameter_count
from tplab.tensor.full_state import full_state_dict

HIDDEN, HEADS, DIM, FFN, LENGTH, LAYERS, VOCAB = 16, 4, 4, 24, 24, 2, 300
WINDOW, PROMPT, NEW = 4, 5, 12
KINDS = ("gpt2", "gpt2 without prefix", "llama 3.1", "qwen2", "mistral")
SCALED = {"rope_type": "llama3", "rope_theta": 50.0, "factor": 4.0, "low_freq_factor": 0.5, "high_freq_factor": 2.0}


@cache
def hugging_face(kind):
    """A random model, which nobody may change. The ranks don't need transformers, so it is imported here."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    torch.manual_seed(len(kind))
    shared = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": None, "initializer_range": 0.4}
    shared["attn_implementation"] = "sdpa"
    if kind.startswith("gpt2"):
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        options = GPT2Config(n_layer=LAYERS, n_embd=HIDDEN, n_head=HEADS, n_positions=LENGTH, **dropout, **shared)
        model = GPT2LMHeadModel(options)
    else:
        shared |= {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": FFN, "rms_norm_eps": 1e-4}
        shared |= {"num_attention_heads": HEADS, "max_position_embeddings": LENGTH}
        make = {
            "llama 3.1": lambda: LlamaForCausalLM(LlamaConfig(
                num_key_value_heads=2, tie_word_embeddings=True,
                rope_parameters={**SCALED, "original_max_position_embeddings": 16}, **shared,
            )),
            "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(num_key_value_heads=1, **shared)),
            "mistral": lambda: MistralForCausalLM(
                MistralConfig(num_key_value_heads=2, sliding_window=WINDOW, **shared)
            ),
        }  # fmt: skip
        model = make[kind]()
        use_torchs_rms_norm(model)
    for parameter in model.parameters():  # biases and norms too
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return model.double().eval()


def use_torchs_rms_norm(model):
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(HIDDEN, eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{kind: folder}; two of them have all tensors in one file, the others in several."""
    found = {}
    for kind in KINDS:
        model, found[kind] = hugging_face(kind), tmp_path_factory.mktemp(kind)
        saved = model.transformer if kind == "gpt2 without prefix" else model
        saved.save_pretrained(found[kind], max_shard_size="1GB" if kind in ("gpt2", "llama 3.1") else "5KB")
    assert len(list(found["qwen2"].glob("model-*.safetensors"))) > 5
    assert "wte.weight" in (found["gpt2 without prefix"] / "model.safetensors.index.json").read_text()
    return found


def tokens():
    generator = torch.Generator().manual_seed(8)
    ids, targets = (torch.randint(0, VOCAB, (2, LENGTH), generator=generator) for _ in range(2))
    return ids, targets


class Spy:
    """safetensors' safe_open, which notes the bytes of each slice that is read. It can't read a complete tensor."""

    reads: list[int] = []

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        self.file = self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def keys(self):
        return self.file.keys()

    def get_slice(self, name):
        return Slice(self.file.get_slice(name))


class Slice(Spy):
    def get_shape(self):
        return self.file.get_shape()

    def __getitem__(self, place):
        part = self.file[place]
        Spy.reads.append(part.nbytes)
        return part


def _load_and_run(group, folders):
    import safetensors

    plain = safetensors.safe_open
    safetensors.safe_open = lambda *args, **options: Spy(plain(*args, **options))
    results = {}
    for kind, folder in folders.items():
        config = config_of_folder(folder)
        model = ParallelGPT(config, device="meta", dtype=torch.float64, group=group).to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        Spy.reads = []
        told = load_folder(model, folder)
        largest = max(parameter.nbytes for parameter in model.parameters())
        ids, targets = tokens()
        with torch.no_grad():
            logits = model(ids, gather=True)
        text = generate(model, ids[:, :PROMPT], NEW)
        model(ids, targets).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= parameter.grad
        whole = to_hugging_face(full_state_dict(model, group), config)
        results[kind] = logits, text, whole, (told, sum(Spy.reads), max(Spy.reads), largest)
    return results


@cache
def expected(kind):
    model, (ids, targets) = hugging_face(kind), tokens()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    text = model.generate(
        ids[:, :PROMPT], attention_mask=torch.ones(2, PROMPT), max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    logits = model(ids).logits
    gradients = torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1), targets.flatten()), list(model.parameters()))
    after = {name: before[name] - g for (name, _), g in zip(model.named_parameters(), gradients, strict=True)}
    return logits.detach(), text, after


def bytes_of_rank(kind, rank, p):
    """What a rank needs of a file in float64: its shards without padding, and all replicated tensors."""
    per_rank = -(-VOCAB // (128 * p)) * 128
    rows = min(max(VOCAB - rank * per_rank, 0), per_rank)
    if kind.startswith("gpt2"):
        f = 4 * HIDDEN
        layer = 3 * HIDDEN // p * (HIDDEN + 1) + HIDDEN * HIDDEN // p + f // p * (HIDDEN + 1) + HIDDEN * f // p
        return 8 * (rows * HIDDEN + LENGTH * HIDDEN + LAYERS * (layer + (2 + 4) * HIDDEN) + 2 * HIDDEN)
    kv_heads = {"llama 3.1": 2, "qwen2": 1, "mistral": 2}[kind]
    qkv = HIDDEN // p + 2 * DIM * max(1, kv_heads // p)  # rows
    layer = qkv * (HIDDEN + (kind == "qwen2")) + HIDDEN * HIDDEN // p + 3 * FFN * HIDDEN // p + 2 * HIDDEN
    tables = 1 if kind == "llama 3.1" else 2
    return 8 * (tables * rows * HIDDEN + LAYERS * layer + HIDDEN)


def assert_like_theirs(results):
    for rank, result in enumerate(results):
        for kind in KINDS:
            logits, text, whole, (told, read, most, largest) = result[kind]
            their_logits, their_text, after = expected(kind)
            assert_close(logits, their_logits, 1e-9)
            assert torch.equal(text, their_text)
            for name, weight in after.items():
                assert_close(whole[name], weight, 1e-9)
            assert told == read == bytes_of_rank(kind, rank, len(results)), kind
            assert most <= largest  # no slice is larger than the largest shard


@pytest.mark.parametrize(("p", "in_groups"), [(1, False), (2, False), (4, False), (4, True)])
def test_logits_gradients_and_text_are_transformers_and_a_rank_reads_only_its_slices(p, in_groups, folders):
    for results in results_of(_load_and_run, p, in_groups, folders):
        assert_like_theirs(results)


@pytest.mark.parametrize("kind", KINDS)
def test_the_configuration_has_as_many_parameters_as_their_model(kind):
    model = hugging_face(kind)
    assert parameter_count(gpt_config(model.config.to_dict())) == sum(p.numel() for p in model.parameters())


# What doesn't fit


def changed(folder, **options):
    """The folder's configuration with other options, as a model in float64 on one process."""
    return ParallelGPT(dataclasses.replace(config_of_folder(folder), **options), dtype=torch.float64)


def test_another_configuration_is_refused_by_the_name_of_its_field(folders):
    folder = folders["llama 3.1"]
    for options in (
        {"rotary_base": 60.0}, {"rotary_scaling": None}, {"norm_eps": 1e-5}, {"sliding_window": 3},
        {"num_layers": 1}, {"seq_length": LENGTH + 1}, {"tied_embedding": False}, {"num_kv_heads": 4},
    ):  # fmt: skip
        (field,) = options
        with pytest.raises(ValueError, match=f"the model has {field}="):
            load_folder(changed(folder, **options), folder)
    load_folder(changed(folder, dropout=0.3, flash_attention=True, seq_length=LENGTH - 1), folder)
    with pytest.raises(ValueError, match="the model has seq_length=23"):  # learned positions
        load_folder(changed(folders["gpt2"], seq_length=LENGTH - 1), folders["gpt2"])


def written(folder, tmp_path, change):
    """A copy of the folder with one safetensors file, in which `change` changes the tensors."""
    from safetensors.torch import load_file, save_file

    state = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("qwen2", lambda state: state.pop("model.layers.1.self_attn.k_proj.bias"),
         "layers.1.attention.qkv.bias should come from model.layers.1.self_attn.k_proj.bias, which"),
        ("mistral", lambda state: state.update({"model.layers.0.self_attn.k_proj.bias": torch.ones(8)}),
         "1 tensors of .* have no place in this Llama"),
        ("mistral", lambda state: state.update({"model.layers.1.mlp.down_proj.weight": torch.ones(16, 23)}),
         r"mlp.down_proj.weight in .* is \[16, 23\], and layers.1.mlp.down.weight needs \[16, 24\]"),
        ("mistral", lambda state: state.update({f"model.layers.0.mlp.{n}.weight": torch.ones(r, 16)
                                                for n, r in (("gate_proj", 20), ("up_proj", 28))}),
         r"mlp.gate_proj.weight in .* is \[20, 16\], and layers.0.mlp.up.weight needs \[24, 16\]"),
        ("mistral", lambda state: state.update({"lm_head.weight": torch.ones(301, 16)}),
         r"lm_head.weight in .* is \[301, 16\], and head.weight needs \[300, 16\]"),
        ("llama 3.1", lambda state: state.update({"lm_head.weight": torch.ones(VOCAB, HIDDEN)}),
         "tie_word_embeddings is set in .*, but lm_head.weight differs from the embedding"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_by_name(kind, change, says, folders, tmp_path):
    folder = written(folders[kind], tmp_path, change)
    model = changed(folder)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match=says):
        load_folder(model, folder)
    if kind != "llama 3.1":  # the tied table is compared while it is loaded
        assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_a_tied_table_may_be_stored_twice_and_buffers_are_passed_over(folders, tmp_path):
    def change(state):
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)

    folder = written(folders["llama 3.1"], tmp_path, change)
    load_folder(model := changed(folder), folder)
    assert_close(model(tokens()[0], gather=True), expected("llama 3.1")[0], 1e-9)


def test_a_folder_without_safetensors_and_files_elsewhere_are_refused(folders, tmp_path):
    model = changed(folders["qwen2"])
    (tmp_path / "config.json").write_text((folders["qwen2"] / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="pytorch_model.bin, are pickles"):
        load_folder(model, tmp_path)
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names a file outside of the folder: ../model.safetensors"):
        load_folder(model, tmp_path)


# Configurations

WITHOUT_EFFECT = {
    "_name_or_path", "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label",
    "initializer_range", "label2id", "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp",
    "problem_type", "return_dict", "transformers_version", "use_cache", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj",
}  # fmt: skip
WINDOWS = {"use_sliding_window", "max_window_layers", "sliding_window", "layer_types"}  # of qwen2, see the next test


def another(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, dict):
        return {**value, "rope_theta": 7.0}
    if isinstance(value, list):
        return [*value, "another"]
    return "another" if isinstance(value, str) else 2 * (value or 0) + 1


@pytest.mark.parametrize("kind", KINDS)
def test_each_field_of_their_configuration_is_used_or_refused_or_known_to_have_no_effect(kind):
    options = hugging_face(kind).config.to_dict()
    config = gpt_config(options)
    for name, value in options.items():
        changed = options | {name: another(value)}
        if name in WITHOUT_EFFECT:
            assert gpt_config(changed) == config, name
        elif not (kind == "qwen2" and name in WINDOWS):
            with suppress(ValueError):
                assert gpt_config(changed) != config, name


def test_sliding_windows_are_those_of_transformers():
    qwen2 = {k: v for k, v in hugging_face("qwen2").config.to_dict().items() if k != "layer_types"}
    on = {**qwen2, "use_sliding_window": True, "sliding_window": 4}
    assert gpt_config({**qwen2, "sliding_window": 4}).sliding_window is None
    assert gpt_config({**on, "max_window_layers": 0}).sliding_window == 4
    assert gpt_config({**on, "max_window_layers": LAYERS}).sliding_window is None
    assert gpt_config({**on, "max_window_layers": 1, "sliding_window": LENGTH}).sliding_window is None
    with pytest.raises(ValueError, match="sliding_window=4 is only for 1 of 2 layers"):
        gpt_config({**on, "max_window_layers": 1})
    with pytest.raises(ValueError, match="layer_types has 'chunked_attention'"):
        gpt_config({**on, "layer_types": ["chunked_attention"] * 2})
    mistral = hugging_face("mistral").config.to_dict()
    assert gpt_config(mistral).sliding_window == WINDOW
    assert gpt_config({**mistral, "sliding_window": None}).sliding_window is None
    assert gpt_config({**mistral, "sliding_window": LENGTH}).sliding_window is None  # it hides nothing
    without = {k: v for k, v in mistral.items() if k != "sliding_window"}
    assert gpt_config({**without, "max_position_embeddings": 9000}).sliding_window == 4096  # their default


def test_llama_31_as_written_before_transformers_5():
    new = hugging_face("llama 3.1").config.to_dict()
    old = {k: v for k, v in new.items() if k != "rope_parameters"} | {"rope_theta": 50.0}
    old["rope_scaling"] = {k: v for k, v in new["rope_parameters"].items() if k != "rope_theta"}
    assert gpt_config(old) == gpt_config(new)
    assert gpt_config(new).rotary_scaling.factor == 4.0
