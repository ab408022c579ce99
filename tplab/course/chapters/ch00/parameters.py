"""The check for exercise 0.1: the parameters of a GPT, against plain PyTorch modules that are built and counted."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tplab.course.chapters.ch00.amounts import Suspect, count, expect, pick, plain_gpt, spelled
from tplab.course.checks import Verdict, calling, exercise, fresh_generator
from tplab.memory.config import GPTConfig

# Large primes, so that nothing in the layers has as many vectors of h elements as one of the tables.
_VOCABULARIES = (157, 191, 223, 257, 281, 311, 347, 383)
_LENGTHS = (83, 89, 97, 101, 103, 107, 109, 113)
_OTHERWISE = (
    "Above is what the model is made of. Which of these lines does your sum not have, or have twice? Try a tiny case "
    "on paper: one layer, h = 2."
)
_FOUR = "Attention has four matrices: q, k, v, and `out` behind the heads. Does your sum have them all?"
_FULL = "Only K and V have kv_heads heads. How large are the matrices of Q and of `out`?"
_MISSING_4H = (
    "In each layer 4h are missing: as many as in its two norms, in the biases of q, k, v and `out`, or in that of "
    "`up`. Which of them are in your sum?"
)
_RAISED = (
    "It is called with one configuration. Which field does that line read? (kv_heads and ffn_size are always numbers; "
    "num_kv_heads may be None.)"
)


@exercise("0.1", "The parameters of a GPT")
def parameters(parameter_count: Callable[[GPTConfig], int]) -> Verdict:
    generator = fresh_generator()
    for config in _configs(generator):
        call = f"parameter_count({spelled(config)})"
        with calling(call, _RAISED):
            seen = parameter_count(config)
        right = count(plain_gpt(config))
        suspects = _suspects(config, right)
        expect("0.1", call, "the number of parameters", seen, right, suspects, _OTHERWISE, _made_of(config))
    return Verdict("As many as the modules have, for GPT-2, for Llama, and for everything between.")


def _configs(generator: torch.Generator) -> Iterator[GPTConfig]:
    """Yield a GPT-2, variants of it with one change each, a Llama, and then random mixtures."""
    llama: dict[str, Any] = {"gated": True, "bias": False, "tied_embedding": False, "learned_positions": False}
    yield _config(generator)
    yield from (_config(generator, **{name: value}) for name, value in llama.items())
    yield _config(generator, fewer_heads=True)
    yield _config(generator, other_ffn=True)
    yield _config(generator, fewer_heads=True, other_ffn=True, **llama)
    for _ in range(12):
        flags = {name: bool(pick(generator, 0, 1)) for name in (*llama, "fewer_heads", "other_ffn")}
        yield _config(generator, **flags)
    yield GPTConfig(num_layers=96, hidden_size=12288, num_heads=96, vocab_size=50257, seq_length=2048)  # GPT-3


def _config(generator: torch.Generator, fewer_heads: bool = False, other_ffn: bool = False, **flags: Any) -> GPTConfig:
    keys = pick(generator, 2, 4)
    heads = keys * pick(generator, 2, 3)
    h = heads * pick(generator, 3, 6)
    return GPTConfig(
        num_layers=3 + 2 * pick(generator, 0, 1),  # not 2 or 4, which could also be bytes per element
        hidden_size=h,
        num_heads=heads,
        vocab_size=_VOCABULARIES[pick(generator, 0, 7)],
        seq_length=_LENGTHS[pick(generator, 0, 7)],
        num_kv_heads=keys if fewer_heads else None,
        ffn_hidden_size=2 * h + pick(generator, 1, h) if other_ffn else None,
        **flags,
    )


def _made_of(config: GPTConfig) -> str:
    """List the model's weights with their shapes, mentioning identical layers only once."""
    lines = []
    for name, parameter in plain_gpt(config).named_parameters():
        if name.startswith("layers.0.") or not name.startswith("layers."):
            times = f" in each of {config.num_layers} layers" if name.startswith("layers.") else ""
            lines.append(f"{name.removeprefix('layers.0.'):<22} {list(parameter.shape)}{times}")
    return "\n".join(lines)


def _suspects(config: GPTConfig, right: int) -> list[Suspect]:
    """Return the numbers that known mistakes give, all counted on the real modules, with their questions."""
    model = plain_gpt(config)
    layer, layers = model.layers[0], config.num_layers
    h, f = config.hidden_size, config.ffn_size
    table, positions, last = config.vocab_size * h, config.seq_length * h, count(model.norm)
    norms = layers * count(layer, "norm") + last
    biases = count(model, ".bias")
    linear_biases = biases - count(model, "norm.bias")
    one_mlp_bias = f if config.bias else 0
    narrow = layers * (count(layer, "q.weight") - count(layer, "k.weight"))
    full_heads = layers * (2 * (count(layer, "q.") - count(layer, "k.")))
    usual = count(plain_gpt(GPTConfig(**(vars(config) | {"ffn_hidden_size": None}))))
    known = [
        (
            right - (layers - 1) * count(layer),
            "How many layers does the model have? This is the count for one of them.",
        ),
        (right + (layers - 1) * (right - layers * count(layer)), "The embedding is there once, not in every layer."),
        (right - positions, "Where is the table of positions? This model learns one."),
        (right + positions, "Does this model learn positions? Its configuration says learned_positions=False."),
        (
            right - table,
            "Where is the embedding? It has one vector for each of vocab_size tokens."
            if config.tied_embedding
            else "Is there a table for the output layer, or does it use the embedding's? See tied_embedding.",
        ),
        (right + config.vocab_size, "Has the output layer a bias?"),
        (right - norms, "Each norm has parameters too. How many norms are there in a layer, and how many behind them?"),
        (right - last, "There is one more norm, behind the last layer."),
        *(
            [(right - norms + last, _MISSING_4H)]
            if count(layer, "q.bias", "k.bias", "v.bias", "out.bias") == 4 * h
            else []
        ),
        (right + (layers - 1) * last, "The last norm is there once, behind all layers, not in each of them."),
        (right - layers * count(layer, "mlp_norm"), "How many norms has a layer? One before attention, and ...?"),
        (
            right + layers * count(layer, "mlp_norm"),
            "How many norms has a layer? One before attention, one before the MLP.",
        ),
        (right - biases - count(layer, "norm.weight") * layers - h, "These are the matrices. What else is there?"),
        (right - biases, "Where are the biases? Each linear layer has one here, and each LayerNorm."),
        (right - linear_biases, "Where are the biases of the linear layers? Each is as long as the layer's output."),
        (right - (biases - linear_biases), "A LayerNorm has a weight and a bias. How many numbers are that?"),
        (
            right - layers * count(layer, "up.bias", "gate.bias", "down.bias"),
            "Where are the biases of the MLP? Each is as long as its layer's output.",
        ),
        (right - layers * one_mlp_bias, "How long is the bias of `up`, and how long that of `down`?"),
        (right - layers * one_mlp_bias + layers * h, "How long is the bias of `up`: h, or as long as its output?"),
        (right + layers * (one_mlp_bias - h), "How long is the bias of `down`: as its input, or as its output?"),
        (right + full_heads, "K and V have kv_heads heads here, fewer than Q. How many rows have their matrices?"),
        (right + full_heads / 2, "K and V both have fewer heads than Q."),
        (right - full_heads / 2, _FULL),
        (right - narrow, _FULL),
        (right - full_heads, _FULL),
        (right - layers * count(layer, "k."), _FOUR),
        (right - layers * count(layer, "out."), _FOUR),
        (right - layers * count(layer, "q.", "k.", "v."), "Where are Q, K and V?"),
        (usual, "Is the inner size of the MLP always 4h? See ffn_size."),
        (right - layers * count(layer, "down."), "The MLP goes from h to ffn_size, and back. Where is the way back?"),
    ]
    if config.gated:
        known = [
            (right - layers * count(layer, "gate"), "This MLP is gated. How many matrices has it?"),
            (right - layers * one_mlp_bias, "The gate has a bias as well, if the linear layers have one."),
            (right - layers * (one_mlp_bias - h), "How long is the bias of the gate: h, or as long as its output?"),
            *known,
        ]
    else:
        known.append((right + layers * count(layer, "up."), "Has this MLP a gate? Its configuration says gated=False."))
    if config.tied_embedding:
        known.append(
            (right + table, "Is the output layer's table another one than the embedding's? See tied_embedding.")
        )
    if config.bias:
        keys = config.kv_heads * config.head_dim
        known = [
            (right - h, "The last norm is a LayerNorm as well. What does it have beside a weight?"),
            (
                right + layers * 2 * (h - keys),
                "How long are the biases of K and V: as their input, or as their output?",
            ),
            *known,
        ]
    else:
        extra = layers * (4 * h + f + h)
        known += [
            (right + (2 * layers + 1) * h, "These norms are RMSNorms. What do they have, and what not?"),
            (right + extra, "Have the linear layers of this model a bias? Its configuration says bias=False."),
            (right + extra + (2 * layers + 1) * h, "Does this model have any bias? Its configuration says bias=False."),
        ]
    known += [(factor * right, "Count numbers, not bytes.") for factor in (2, 4, 16)]
    return [(value, ask) for value, ask in known if value != right]
