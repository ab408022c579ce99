"""Chapter 10: convert Hugging Face's GPT-2, Llama, Qwen2 and Mistral checkpoints to our names and back.

    state = AutoModelForCausalLM.from_pretrained("gpt2").state_dict()          needs the extra hugging-face
    model = ParallelGPT(gpt_config("gpt2's config.json as a dict"))
    load_full_state_dict(model, from_hugging_face(state, model.config))        each rank takes its shards

With `tplab.gpt.hugging_face_folder`, each rank reads its shards from the files instead, and nothing else. The tables
below show three differences. The names are different. Llama has separate matrices for Q, K and V, and for gate and up,
which we concatenate. GPT-2 stores linear weights as [in, out] (its Conv1D), so we transpose them. Mistral uses Llama's
names, and Qwen2 adds a bias to Q, K and V. (transformers, models/gpt2/modeling_gpt2.py, models/llama/modeling_llama.py
and the like.)
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tplab.gpt.hugging_face_config import gpt_config as gpt_config
from tplab.memory.config import GPTConfig


@dataclass(frozen=True)
class Row:
    """Maps our parameter name to one Hugging Face name, or to several that we concatenate. `{}` is the layer number."""

    ours: str
    theirs: tuple[str, ...]
    turned: bool = False  # stored as [in, out]


def _both(ours: str, *theirs: str, turned: bool = False) -> list[Row]:
    """Return the rows for a weight and its bias."""
    return [Row(f"{ours}.{end}", tuple(f"{t}.{end}" for t in theirs), turned and end == "weight")
            for end in ("weight", "bias")]  # fmt: skip


QKV_BIAS = Row(
    "layers.{}.attention.qkv.bias", tuple(f"model.layers.{{}}.self_attn.{name}_proj.bias" for name in "qkv")
)  # Qwen2
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
    QKV_BIAS,
    Row("layers.{}.attention.out.weight", (f"{_ATTENTION}.o_proj.weight",)),
    Row("layers.{}.mlp_norm.weight", ("model.layers.{}.post_attention_layernorm.weight",)),
    Row("layers.{}.mlp.up.weight", (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight")),
    Row("layers.{}.mlp.down.weight", (f"{_MLP}.down_proj.weight",)),
    Row("final_norm.weight", ("model.norm.weight",)),
    HEAD,
]
BUFFERS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")  # in old checkpoints, but not needed


def from_hugging_face(state: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Convert a full Hugging Face state_dict for `load_full_state_dict`.

    Raises ValueError if names don't match, or if the embedding is tied but differs from the output layer's weight.
    """
    names = stored_names(state, config)
    mine: dict[str, Tensor] = {}
    for row in rows(config):
        if missing := [name for name in row.theirs if name not in names]:
            raise ValueError(
                f"{row.ours} should come from {', '.join(missing)}, which this state_dict lacks: is it of a "
                f"{family(config)} with {config.num_layers} layers, and of the model with its output layer?"
            )
        parts = [state[names[name]] for name in row.theirs]
        if (needed := lengths(row, config)) and [len(part) for part in parts] != needed:
            raise ValueError(f"{', '.join(row.theirs)} have {[len(part) for part in parts]} rows instead of {needed}")
        mine[row.ours] = (torch.cat(parts) if len(parts) > 1 else parts[0]).clone()
        if row.turned:
            mine[row.ours] = mine[row.ours].t().contiguous()
    if left := without_place(names, config):
        raise ValueError(f"{len(left)} tensors have no place in this {family(config)}: {', '.join(left[:5])} ..")
    head = state.get("lm_head.weight")
    if config.tied_embedding and head is not None and not torch.equal(head, mine["embedding.weight"]):
        raise ValueError("tied_embedding is set, but lm_head.weight differs from the embedding: set it to False")
    return mine


def to_hugging_face(state: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Convert our `full_state_dict` to Hugging Face's. This undoes `from_hugging_face`. A tied table appears twice."""
    theirs: dict[str, Tensor] = {}
    for row in rows(config):
        whole = state[row.ours].t().contiguous() if row.turned else state[row.ours]
        parts = whole.split(lengths(row, config)) if len(row.theirs) > 1 else (whole,)
        theirs |= {name: part.clone() for name, part in zip(row.theirs, parts, strict=True)}
    if config.tied_embedding:
        table = "transformer.wte.weight" if config.learned_positions else "model.embed_tokens.weight"
        theirs["lm_head.weight"] = theirs[table]
    return theirs


def rows(config: GPTConfig) -> list[Row]:
    """Return the name table, with rows for all layers. Raises ValueError unless the model is a GPT-2 or a Llama."""
    if config.bias and config.qkv_bias:
        raise ValueError("qkv_bias is for models with bias=False, such as Qwen2; with bias=True, all layers have one")
    if (config.learned_positions, config.bias, config.gated) not in ((True, True, False), (False, False, True)):
        raise ValueError(
            "Hugging Face's GPT-2 has learned positions, biases and no gate, its Llama the contrary of each; this "
            f"config has learned_positions={config.learned_positions}, bias={config.bias}, gated={config.gated}"
        )
    table = GPT2 if config.learned_positions else LLAMA
    return [
        Row(row.ours.format(number), tuple(name.format(number) for name in row.theirs), row.turned)
        for row in table
        if not (row is HEAD and config.tied_embedding) and not (row is QKV_BIAS and not config.qkv_bias)
        for number in (range(config.num_layers) if "{}" in row.ours else ("",))
    ]


def stored_names(names: Iterable[str], config: GPTConfig) -> dict[str, str]:
    """Map each name in the complete model (with the output layer) to the stored name, which may lack the prefix.

    Raises ValueError if a tensor is stored both with and without the prefix.
    """
    prefix = "transformer." if config.learned_positions else "model."
    found: dict[str, str] = {}
    for stored in names:
        name = stored if stored == "lm_head.weight" or stored.startswith(prefix) else prefix + stored
        if name in found:
            raise ValueError(
                f"{stored} and {found[name]} are both stored, but they're names of the same tensor: keep one"
            )
        found[name] = stored
    return found


def without_place(names: Iterable[str], config: GPTConfig) -> list[str]:
    """Return the names of tensors that the model doesn't have, except for buffers and a tied output layer's weight."""
    used = {name for row in rows(config) for name in row.theirs}
    used |= {"lm_head.weight"} if config.tied_embedding else set()
    return [name for name in names if name not in used and not name.endswith(BUFFERS)]


def lengths(row: Row, config: GPTConfig) -> list[int]:
    """Return the number of rows of each tensor that is concatenated, or an empty list if there is only one tensor."""
    if len(row.theirs) == 1:
        return []
    if len(row.theirs) == 2:
        return [config.ffn_size, config.ffn_size]
    kv = config.kv_heads * config.head_dim
    return [config.hidden_size, kv, kv]


def family(config: GPTConfig) -> str:
    """Return the architecture's name, for use in messages."""
    return "GPT-2" if config.learned_positions else "Qwen2" if config.qkv_bias else "Llama"
