"""`tplab.gpt.hugging_face_folder` and `hugging_face_config`, against transformers' models with random weights.

The folders are those that save_pretrained writes. Theirs run on one process, ours on 1, 2 and 4 ranks.
"""

import dataclasses
import json
from contextlib import suppress
from functools import cache
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from tests import saying
from tests.gpt.random_models import (
    HIDDEN,
    LENGTH,
    NEW,
    PROMPT,
    VOCAB,
    hugging_face,
    their_text,
    tokens,
)
from tests.reference import assert_close
from tests.tensor.on_ranks import own_group
from tplab import launch
from tplab.collectives.by_hand import rank_and_size
from tplab.gpt.generation import generate
from tplab.gpt.hugging_face import to_hugging_face
from tplab.gpt.hugging_face_config import gpt_config
from tplab.gpt.hugging_face_folder import _Stored, config_of_folder, load_folder
from tplab.gpt.model import ParallelGPT
from tplab.tensor.full_state import full_state_dict

KINDS = ("gpt2", "llama 3.1", "qwen2", "mistral")
FOLDERS = ("gpt2 without prefix", *KINDS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{kind: folder}; two of them have all tensors in one file, the others in several."""
    found = {}
    for kind in FOLDERS:
        model, found[kind] = hugging_face(kind.removesuffix(" without prefix")), tmp_path_factory.mktemp(kind)
        saved = model.transformer if kind == "gpt2 without prefix" else model
        saved.save_pretrained(found[kind], max_shard_size="1GB" if kind in ("gpt2", "llama 3.1") else "5KB")
    assert len(list(found["qwen2"].glob("model-*.safetensors"))) > 5
    assert "wte.weight" in (found["gpt2 without prefix"] / "model.safetensors.index.json").read_text()
    return found


class Noted:
    """A tensor in a file. The bytes that are read of it are noted."""

    read = 0

    def __init__(self, stored):
        self.stored, self.get_shape = stored, stored.get_shape

    def __getitem__(self, place):
        part = self.stored[place]
        Noted.read += part.nbytes
        return part


def _load_and_run(folder, group=None):
    config = config_of_folder(folder)
    model = ParallelGPT(config, device="meta", dtype=torch.float64, group=group).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    Noted.read, slice_of = 0, _Stored.slice_of
    with mock.patch.object(_Stored, "slice_of", lambda stored, name: Noted(slice_of(stored, name))):
        told = load_folder(model, folder)
    held = sum(parameter.nbytes for parameter in model.parameters())
    (ids, targets), (rank, _) = tokens(), rank_and_size(group)
    with torch.no_grad():
        logits = model(ids, gather=True)
    text = generate(model, ids[:, :PROMPT], NEW)
    model(ids, targets).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= parameter.grad
    tables = [model.embedding.weight, *([] if model.head is None else [model.head.weight])]
    padding = sum(8 * HIDDEN * min(len(table), max(0, (rank + 1) * len(table) - VOCAB)) for table in tables)
    assert told == Noted.read == held - padding, "a rank reads its shards, without padding, and nothing else"
    return logits, text, to_hugging_face(full_state_dict(model, group), config)


def _all_folders(folders):
    found = [(kind, _load_and_run(folder)) for kind, folder in folders.items()]
    if rank_and_size(None)[1] == 4:
        found.append(("qwen2", _load_and_run(folders["qwen2"], own_group())))
    return found


@cache
def expected(kind):
    """Logits, greedy text, and the weights after a step of plain gradient descent."""
    model, (ids, targets) = hugging_face(kind), tokens()
    logits = model(ids).logits
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1), targets.flatten()), list(named.values()))
    after = {name: weight.detach() - g for (name, weight), g in zip(named.items(), gradients, strict=True)}
    return logits.detach(), their_text(model, ids[:, :PROMPT], NEW), after


@pytest.mark.parametrize("p", [1, 4])  # and on two ranks, in the groups of four
def test_logits_gradients_and_text_are_transformers_and_a_rank_reads_only_its_slices(p, folders):
    for found in launch(_all_folders, p, args=(folders,), timeout=240):
        assert len(found) == len(FOLDERS) + (p == 4)
        for kind, (logits, text, whole) in found:
            their_logits, their_greedy_text, after = expected(kind.removesuffix(" without prefix"))
            assert_close(logits, their_logits, 1e-9)
            assert torch.equal(text, their_greedy_text)
            for name, weight in after.items():
                assert_close(whole[name], weight, 1e-9)


# What doesn't fit


def changed(folder, **options):
    """The folder's configuration with other options, as a model in float64 on one process."""
    return ParallelGPT(dataclasses.replace(config_of_folder(folder), **options), dtype=torch.float64)


def test_another_configuration_is_refused_by_the_name_of_its_field(folders):
    folder = folders["llama 3.1"]
    for options in ({"rotary_base": 60.0}, {"rotary_scaling": None}, {"num_layers": 1}, {"seq_length": LENGTH + 1}):
        (field,) = options
        with pytest.raises(ValueError, match=saying(f"{field}=", "config.json")):
            load_folder(changed(folder, **options), folder)
    load_folder(changed(folder, dropout=0.3, flash_attention=True, seq_length=LENGTH - 1), folder)
    with pytest.raises(ValueError, match=saying("seq_length=23", "config.json")):  # learned positions
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
         ["layers.1.attention.qkv.bias", "model.layers.1.self_attn.k_proj.bias"]),
        ("mistral", lambda state: state.update({"model.layers.0.self_attn.k_proj.bias": torch.ones(8)}),
         ["1 tensors", "Llama", "model.layers.0.self_attn.k_proj.bias"]),
        ("mistral", lambda state: state.update({"model.layers.0.mlp.gate_proj.weight": torch.ones(20, 16)}),
         ["mlp.gate_proj.weight", "[20, 16]", "layers.0.mlp.up.weight", "[24, 16]"]),
        ("llama 3.1", lambda state: state.update({"lm_head.weight": torch.ones(VOCAB, HIDDEN)}),
         ["tie_word_embeddings", "config.json", "lm_head.weight"]),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_by_name(kind, change, says, folders, tmp_path):
    folder = written(folders[kind], tmp_path, change)
    model = changed(folder)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match=saying(*says)):
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


def test_a_file_elsewhere_is_refused(folders, tmp_path):
    model = changed(folders["qwen2"])
    (tmp_path / "config.json").write_text((folders["qwen2"] / "config.json").read_text())
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=saying("index.json", "outside", "../model.safetensors")):
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


def test_a_sliding_window_is_refused_unless_it_hides_nothing():
    qwen2 = {k: v for k, v in hugging_face("qwen2").config.to_dict().items() if k != "layer_types"}
    mistral = hugging_face("mistral").config.to_dict()
    assert gpt_config({**qwen2, "sliding_window": 4}) == gpt_config(qwen2)  # it's off
    assert gpt_config({**mistral, "sliding_window": LENGTH}) == gpt_config(mistral)  # it hides nothing
    for hides in ({**qwen2, "use_sliding_window": True, "sliding_window": 4}, {**mistral, "sliding_window": 4}):
        with pytest.raises(ValueError, match=saying("sliding_window=4", "max_position_embeddings=24")):
            gpt_config(hides)
