"""The config.json of popular small models: the GPTConfig has transformers' sizes, and a small model has its logits.

A field that changes nothing at its value isn't an error, while one that would change something is.
"""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests import saying
from tests.gpt.real_configs import REAL
from tplab.gpt.hugging_face_config import gpt_config
from tplab.gpt.hugging_face_folder import config_of_folder, load_folder
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import parameter_count

LENGTH = 12
IDS = torch.arange(2 * LENGTH).view(2, LENGTH)


def small(config: dict[str, Any]) -> dict[str, Any]:
    """The same configuration for a model of two small layers."""
    if config["model_type"] == "gpt2":
        return config | {"n_layer": 2, "n_embd": 24, "n_head": 2, "n_positions": LENGTH, "n_ctx": LENGTH} | ENDS
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    sizes = {"num_hidden_layers": 2, "hidden_size": 8 * groups, "num_attention_heads": groups, "num_key_value_heads": 1}
    sizes |= {"intermediate_size": 20, "max_position_embeddings": LENGTH, "initializer_range": 0.3}
    sizes |= {"head_dim": 8} if "head_dim" in config else {}
    if config.get("sliding_window") is not None:
        sizes["sliding_window"] = LENGTH
    return config | sizes | ENDS


ENDS = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}


def transformers_model(config: dict[str, Any]) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(json.dumps(config))))


@pytest.mark.parametrize("name", REAL)
@torch.no_grad()
def test_the_sizes_are_those_of_transformers_and_a_small_model_of_this_configuration_has_their_logits(name, tmp_path):
    with torch.device("meta"):
        theirs = sum(parameter.numel() for parameter in transformers_model(REAL[name]).parameters())
    assert parameter_count(gpt_config(REAL[name])) == theirs
    config = small(REAL[name])
    torch.manual_seed(0)
    model = transformers_model(config).float().eval()
    for parameter in model.parameters():  # biases and norms too
        parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = ParallelGPT(config_of_folder(tmp_path))
    load_folder(ours, tmp_path)
    assert torch.allclose(ours.eval()(IDS, gather=True), model(IDS).logits, atol=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2", "mistral"])
def test_a_field_that_is_missing_has_the_default_of_transformers(kind):
    from transformers import AutoConfig

    heads = 32  # of which Qwen2 has as many K, V heads by default
    sizes = {"num_hidden_layers": 2, "hidden_size": 4 * heads, "num_attention_heads": heads, "vocab_size": 50}
    sizes |= {"max_position_embeddings": 4096, "intermediate_size": 20}
    if kind == "gpt2":
        sizes = {"n_layer": 2, "n_embd": 24, "n_head": 2, "vocab_size": 50, "n_positions": 16}
    ours = gpt_config({"model_type": kind, **sizes})
    theirs = gpt_config(AutoConfig.for_model(kind, **sizes).to_dict())
    assert ours.kv_heads == theirs.kv_heads
    assert replace(ours, num_kv_heads=theirs.num_kv_heads) == theirs


REFUSED = {
    "gpt2": [("scale_attn_by_inverse_layer_idx", True), ("activation_function", "relu"), ("hidden_size", 769)],
    "SmolLM2-135M": [
        ("rope_interleaved", True), ("mlp_bias", True), ("head_dim", 32), ("sliding_window", 4),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0}, "'yarn'"),
        ("rope_parameters", {"rope_type": "default", "mscale": 2.0}, "mscale=2.0"),
    ],
    "Qwen2.5-0.5B": [("use_mrope", True), ("layer_types", ["full_attention", "sliding_attention"])],
    "Mistral-7B-v0.3": [("sliding_window", 4096)],
}  # fmt: skip
REFUSED_BY_ALL = [
    ("is_causal", False), ("quantization_config", {"bits": 4}), ("a_new_field", 1), ("model_type", "gemma"),
]  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_would_change_the_results_is_refused_by_its_name(name):
    for field, value, *words in REFUSED[name] + REFUSED_BY_ALL:
        with pytest.raises(ValueError, match=words[0] if words else field):
            gpt_config(REAL[name] | {field: value})


def test_the_two_kinds_of_gelu_are_told_apart():
    assert gpt_config(REAL["gpt2"]).activation == "gelu_tanh"
    assert gpt_config(REAL["gpt2"] | {"activation_function": "gelu"}).activation == "gelu"


def test_a_size_that_is_missing_is_named():
    with pytest.raises(ValueError, match=saying("n_layer", "config.json")):
        gpt_config(REAL["gpt2"] | {"n_layer": None})
