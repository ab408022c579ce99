"""Chapter 10: convert Hugging Face's GPT-2 and Llama checkpoints to our names and back, without using `transformers`.

    state = AutoModelForCausalLM.from_pretrained("gpt2").state_dict()          with the extra hugging-face
    model = ParallelGPT(gpt_config("gpt2's config.json as a dict"))
    load_full_state_dict(model, from_hugging_face(state, model.config))        each rank takes its shards

The tables below show three differences: the names; Llama's separate matrices for Q, K and V, and for gate and up, which
we concatenate; and GPT-2's linear weights, which are stored as [in, out] (its Conv1D), so we transpose them.
(transformers, models/gpt2/modeling_gpt2.py and models/llama/modeling_llama.py.)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tplab.memory.config import GPTConfig


@dataclass(frozen=True)
class Row:
    """Maps our parameter name to Hugging Face's, or to several that we concatenate. `{}` is the layer's number."""

    ours: str
    theirs: tuple[str, ...]
    turned: bool = False  # stored [in, out]


def _both(ours: str, *theirs: str, turned: bool = False) -> list[Row]:
    """Return the rows for a weight and its bias."""
    return [Row(f"{ours}.{end}", tuple(f"{t}.{end}" for t in theirs), turned and end == "weight")
            for end in ("weight", "bias")]  # fmt: skip


HEAD = Row("head.weight", ("lm_head.weight",))  # only if the output layer isn't tied
GPT2 = [
    Row("embedding.weight", ("transformer.wte.weight",)),
    Row("positions.weight", ("transformer.wpe.weight",)),
    *_both("layers.{}.attention_norm", "transformer.h.{}.ln_1"),
    *_both("layers.{}.attention.qkv", "transformer.h.{}.attn.c_attn", turned=True),
    *_both("layers.{}.attention.out", "transformer.h.{}.attn.c_proj", turned=True),
    *_both("layers.{}.mlp_norm", "transformer.h.{}.ln_2"),
    *_both("layers.{}.mlp.up", "transformer.h.{}.mlp.c_fc", turned=True),
    *_both("layers.{}.mlp.down", "transformer.h.{}.mlp.c_proj", turned=True),
    *_both("final_norm", "transformer.ln_f"),
    HEAD,
]
_ATTENTION, _MLP = "model.layers.{}.self_attn", "model.layers.{}.mlp"
LLAMA = [
    Row("embedding.weight", ("model.embed_tokens.weight",)),
    Row("layers.{}.attention_norm.weight", ("model.layers.{}.input_layernorm.weight",)),
    Row("layers.{}.attention.qkv.weight", tuple(f"{_ATTENTION}.{name}_proj.weight" for name in "qkv")),
    Row("layers.{}.attention.out.weight", (f"{_ATTENTION}.o_proj.weight",)),
    Row("layers.{}.mlp_norm.weight", ("model.layers.{}.post_attention_layernorm.weight",)),
    Row("layers.{}.mlp.up.weight", (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight")),
    Row("layers.{}.mlp.down.weight", (f"{_MLP}.down_proj.weight",)),
    Row("final_norm.weight", ("model.norm.weight",)),
    HEAD,
]
BUFFERS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")  # in old checkpoints, but not needed


def gpt_config(config: Mapping[str, Any]) -> GPTConfig:
    """Return the GPTConfig for the `config.json` of a GPT-2 or Llama, given as a dict (`config.to_dict()`).

    Raises ValueError for other kinds of models, and for options that would make their results differ from ours.
    """
    kind = config.get("model_type")
    if kind == "gpt2":
        _only(config, activation_function=("gelu_new", "gelu_pytorch_tanh", "gelu"), scale_attn_weights=(True,),
              scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,))  # fmt: skip
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
    if kind == "llama":
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        _only({"rope_type": rope_type, **config}, rope_type=("default",), hidden_act=("silu",), mlp_bias=(False,),
              attention_bias=(False,), attention_dropout=(0.0, 0), head_dim=(head_dim, None))  # fmt: skip
        return GPTConfig(
            num_layers=config["num_hidden_layers"], hidden_size=config["hidden_size"],
            num_heads=config["num_attention_heads"], num_kv_heads=config.get("num_key_value_heads"),
            vocab_size=config["vocab_size"], seq_length=config["max_position_embeddings"],
            ffn_hidden_size=config["intermediate_size"], gated=True, bias=False, learned_positions=False, dropout=0.0,
            rotary_base=rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
            norm_eps=config.get("rms_norm_eps", 1e-6), tied_embedding=config.get("tie_word_embeddings", False),
        )  # fmt: skip
    raise ValueError(f"model_type={kind!r}: only 'gpt2' and 'llama' are mapped here")


def from_hugging_face(state: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Convert a full Hugging Face state_dict for `load_full_state_dict`. Raises ValueError if names don't match."""
    mine: dict[str, Tensor] = {}
    used = set()
    for row in rows(config):
        if missing := [name for name in row.theirs if name not in state]:
            raise ValueError(
                f"{row.ours} should come from {', '.join(missing)}, which this state_dict lacks: is it of a "
                f"{_family(config)} with {config.num_layers} layers, and of the model with its output layer?"
            )
        parts = [state[name] for name in row.theirs]
        mine[row.ours] = (torch.cat(parts) if len(parts) > 1 else parts[0]).clone()
        if row.turned:
            mine[row.ours] = mine[row.ours].t().contiguous()
        used |= set(row.theirs)
    left = [name for name in state if name not in used and not name.endswith(BUFFERS) and name != "lm_head.weight"]
    if left:
        raise ValueError(f"{len(left)} tensors have no place in this {_family(config)}: {', '.join(left[:5])} ..")
    return mine


def to_hugging_face(state: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Convert our `full_state_dict` to Hugging Face's. Undoes `from_hugging_face`. A tied table has both names."""
    theirs: dict[str, Tensor] = {}
    for row in rows(config):
        whole = state[row.ours].t().contiguous() if row.turned else state[row.ours]
        parts = whole.split(_lengths(row, config)) if len(row.theirs) > 1 else (whole,)
        theirs |= {name: part.clone() for name, part in zip(row.theirs, parts, strict=True)}
    if config.tied_embedding:
        table = "transformer.wte.weight" if config.learned_positions else "model.embed_tokens.weight"
        theirs["lm_head.weight"] = theirs[table]
    return theirs


def rows(config: GPTConfig) -> list[Row]:
    """Return the model's name table, expanded for all its layers. Raises ValueError unless it is a GPT-2 or a Llama."""
    if (config.learned_positions, config.bias, config.gated) not in ((True, True, False), (False, False, True)):
        raise ValueError(
            "Hugging Face's GPT-2 has learned positions, biases and no gate, its Llama the contrary of each; this "
            f"config has learned_positions={config.learned_positions}, bias={config.bias}, gated={config.gated}"
        )
    table = GPT2 if config.learned_positions else LLAMA
    return [
        Row(row.ours.format(number), tuple(name.format(number) for name in row.theirs), row.turned)
        for row in table
        if row is not HEAD or not config.tied_embedding
        for number in (range(config.num_layers) if "{}" in row.ours else ("",))
    ]


def _lengths(row: Row, config: GPTConfig) -> list[int]:
    if len(row.theirs) == 2:
        return [config.ffn_size, config.ffn_size]
    kv = config.kv_heads * config.head_dim
    return [config.hidden_size, kv, kv]


def _family(config: GPTConfig) -> str:
    return "GPT-2" if config.learned_positions else "Llama"


def _only(config: Mapping[str, Any], **allowed: tuple) -> None:
    for name, values in allowed.items():
        if name in config and config[name] not in values:
            raise ValueError(f"{name}={config[name]!r} is not supported here, only {' or '.join(map(repr, values))}")
