"""Chapter 10: convert the `config.json` of Hugging Face's GPT-2, Llama, Qwen2 and Mistral to a GPTConfig.

Each field of a config.json either is used, or must have a value that our models support, or doesn't affect the results.
Any other field raises ValueError unless it is null, so nothing is ignored by accident. If an optional field is missing,
it has the default of transformers' configuration class. (transformers, models/gpt2/configuration_gpt2.py and the like;
for the fields that older versions wrote, configuration_utils.py of version 4.)
"""

from collections.abc import Mapping
from typing import Any

from tplab.memory.config import GPTConfig, RotaryScaling

# These fields never affect the logits, whatever their values.
_WITHOUT_EFFECT = {
    # where the model is from, and how it's stored and run
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "architectures",
    "attn_implementation", "auto_map", "chunk_size_feed_forward", "dtype", "gradient_checkpointing", "model_type",
    "n_ctx", "output_attentions", "output_hidden_states", "output_past", "pretraining_tp", "return_dict",
    "tf_legacy_loss", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version", "unsloth_fixed",
    "unsloth_version", "use_bfloat16", "use_cache",
    # training, and other tasks than language modeling
    "_num_labels", "classifier_dropout", "finetuning_task", "id2label", "initializer_range", "is_decoder", "label2id",
    "n_special", "neftune_noise_alpha", "num_labels", "predict_special_tokens", "problem_type", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params",
    # the tokenizer
    "bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "prefix", "sep_token_id",
    "tokenizer_class", "unk_token_id",
    # text generation, which has arguments for these
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate",
    "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
}  # fmt: skip
# These fields must have one of these values. Except for the activations, that means they change nothing.
_NEUTRAL: dict[str, tuple] = {
    "add_cross_attention": (False, None),
    "is_causal": (True,),
    "is_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "tie_encoder_decoder": (False, None),
}
_GPT2: dict[str, tuple] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
    "reorder_and_upcast_attn": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
}
_LLAMA: dict[str, tuple] = {
    "attention_bias": (False,),
    "attention_dropout": (0.0, None),
    "hidden_act": ("silu", "swish"),
    "is_llama_config": (True, None),  # SmolLM2
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0, None),
    "rope_interleaved": (False, None),  # SmolLM2
    "use_mrope": (False, None),  # Qwen2.5
}
_GPT2_SIZES = {"n_layer", "n_embd", "n_head", "vocab_size", "n_positions"}
_GPT2_USED = {"n_inner", "layer_norm_epsilon", "tie_word_embeddings", "resid_pdrop", "embd_pdrop", "attn_pdrop"}
_GPT2_ALIASES = {"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head",
                 "max_position_embeddings": "n_positions"}  # fmt: skip
_LLAMA_SIZES = {"num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings",
                "intermediate_size"}  # fmt: skip
_LLAMA_USED = {"num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "head_dim", "rope_parameters",
               "rope_scaling", "rope_theta"}  # fmt: skip
_WINDOW = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"sliding_window": None},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
}
_ROPE = {
    "default": set(),
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}


def gpt_config(config: Mapping[str, Any]) -> GPTConfig:
    """Return the GPTConfig for the `config.json` of a GPT-2, Llama, Qwen2 or Mistral, given as a dict.

    `config.to_dict()` returns this dict. Raises ValueError for other types of models, and for options that our models
    don't support.
    """
    kind = config.get("model_type")
    if kind == "gpt2":
        return _gpt2(config)
    if kind in _DEFAULTS:
        return _llama({**_DEFAULTS[kind], **config}, kind)
    raise ValueError(f"model_type={kind!r}: only 'gpt2', {', '.join(map(repr, _DEFAULTS))} are mapped here")


def _gpt2(config: Mapping[str, Any]) -> GPTConfig:
    _require(config, _GPT2_SIZES)
    aliases = {name: (config[other],) for name, other in _GPT2_ALIASES.items()}
    _only(config, _GPT2_SIZES | _GPT2_USED, {**_GPT2, **aliases})
    dropouts = {config.get(name, 0.1) for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    if len(dropouts) > 1:
        raise ValueError(f"this model has dropouts of {sorted(dropouts)}; here there is one for all places")
    activation = "gelu" if config.get("activation_function") == "gelu" else "gelu_tanh"
    return GPTConfig(
        num_layers=config["n_layer"], hidden_size=config["n_embd"], num_heads=config["n_head"],
        vocab_size=config["vocab_size"], seq_length=config["n_positions"], ffn_hidden_size=config.get("n_inner"),
        activation=activation, norm_eps=config.get("layer_norm_epsilon", 1e-5), dropout=dropouts.pop(),
        tied_embedding=config.get("tie_word_embeddings", True),
    )  # fmt: skip


def _llama(config: Mapping[str, Any], kind: str) -> GPTConfig:
    _require(config, _LLAMA_SIZES)
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    _only(config, _LLAMA_SIZES | _LLAMA_USED | _WINDOW, {**_LLAMA, "head_dim": (head_dim, None)})
    _refuse_window(config, kind)
    base, scaling = _rotary(config)
    return GPTConfig(
        num_layers=config["num_hidden_layers"], hidden_size=config["hidden_size"],
        num_heads=config["num_attention_heads"], num_kv_heads=config.get("num_key_value_heads"),
        vocab_size=config["vocab_size"], seq_length=config["max_position_embeddings"],
        ffn_hidden_size=config["intermediate_size"], gated=True, bias=False, qkv_bias=kind == "qwen2",
        learned_positions=False, dropout=0.0, rotary_base=base, rotary_scaling=scaling,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tied_embedding=config.get("tie_word_embeddings", False),
    )  # fmt: skip


def _rotary(config: Mapping[str, Any]) -> tuple[float, RotaryScaling | None]:
    """Return the rotary base and scaling, from `rope_parameters` or, before transformers 5, from `rope_scaling`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE:
        raise ValueError(f"rope_type={kind!r} is not supported here, only {' or '.join(map(repr, _ROPE))}")
    _only(rope, {"rope_type", "type", "rope_theta", *_ROPE[kind]}, {"partial_rotary_factor": (1.0, None)})
    base = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    if kind == "default":
        return base, None
    if missing := sorted(_ROPE[kind] - {"original_max_position_embeddings"} - rope.keys()):
        raise ValueError(f"rope_type={kind!r} needs {', '.join(missing)}, which this configuration lacks")
    original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    return base, RotaryScaling(
        factor=rope["factor"], low_freq_factor=rope["low_freq_factor"], high_freq_factor=rope["high_freq_factor"],
        original_seq_length=original,
    )  # fmt: skip


def _refuse_window(config: Mapping[str, Any], kind: str) -> None:
    """Raise ValueError for a sliding window that hides tokens, because here, each token attends to all earlier ones."""
    window, length = config.get("sliding_window"), config["max_position_embeddings"]
    is_on = kind != "qwen2" or config["use_sliding_window"]
    if is_on and window is not None and window < length:
        raise ValueError(
            f"sliding_window={window} is shorter than max_position_embeddings={length}, and not supported here. With "
            f"max_position_embeddings={window}, or fewer, it has no effect"
        )
    if other := sorted(set(config.get("layer_types") or ()) - {"full_attention"}):
        raise ValueError(f"layer_types has {other[0]!r}; here all layers have full attention")


def _require(config: Mapping[str, Any], sizes: set[str]) -> None:
    if missing := sorted(name for name in sizes if config.get(name) is None):
        raise ValueError(f"the configuration lacks {', '.join(missing)}: is it the complete config.json?")


def _only(config: Mapping[str, Any], used: set[str], allowed: Mapping[str, tuple]) -> None:
    """Raise ValueError unless each field is used, has an allowed value, has no effect or is None."""
    allowed = {**_NEUTRAL, **allowed}
    for name, value in config.items():
        if name in allowed and value not in allowed[name]:
            values = " or ".join(map(repr, allowed[name]))
            raise ValueError(f"{name}={value!r} is not supported here, only {values}")
        if name not in allowed and name not in used and name not in _WITHOUT_EFFECT and value is not None:
            raise ValueError(
                f"{name}={value!r} isn't a field that is known here, and it may change the numbers. If it doesn't, "
                "remove it from the dict"
            )
