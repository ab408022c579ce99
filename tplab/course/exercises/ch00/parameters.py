"""The check for exercise 0.2, which compares the learner's parameter counts with those of actual PyTorch modules."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tplab.course.checks import Verdict, calling, exercise, fresh_generator
from tplab.course.exercises.ch00.amounts import Suspect, count, expect, pick, plain_gpt, spelled
from tplab.memory.config import GPTConfig

# These are large primes, so that no part of the layers has as many vectors of h elements as an embedding table.
_VOCABULARIES = (157, 191, 223, 257, 281, 311, 347, 383)
_LENGTHS = (83, 89, 97, 101, 103, 107, 109, 113)
_OTHERWISE = (
    "The list above shows the model's weights and biases. Is one of these tensors missing from your parameter "
    "count? Did you count one of these tensors twice? It may help to work through a tiny example on paper, "
    "with one layer and h = 2."
)
_FOUR = (
    "Attention has four matrices: `q`, `k`, `v`, and `out`. Does your parameter count include all four "
    "attention matrices?"
)
_FULL = "The field `kv_heads` applies only to K and V. What are the shapes of the matrices `q` and `out`?"
_MISSING_4H = (
    "You're missing 4h parameters in each layer. A layer's two norms have 4h parameters in total. So do the biases "
    "of `q`, `k`, `v`, and `out`, and so does the bias of `up`. Which of these did you leave out?"
)
_RAISED = (
    "Which field of the configuration does the failing line read? (The fields kv_heads and ffn_size are always "
    "numbers, but num_kv_heads and ffn_hidden_size may be None.)"
)


@exercise("0.2", "Count the parameters of a GPT")
def parameters(parameter_count: Callable[[GPTConfig], int]) -> Verdict:
    generator = fresh_generator()
    for config in _configs(generator):
        call = f"parameter_count({spelled(config)})"
        with calling(call, _RAISED):
            seen = parameter_count(config)
        right = count(plain_gpt(config))
        suspects = _suspects(config, right)
        expect("0.2", call, "the number of parameters", seen, right, suspects, _OTHERWISE, _made_of(config))
    return Verdict(
        "Your counts match the actual PyTorch modules for GPT-2, for Llama, and for random mixtures of the two."
    )


def _configs(generator: torch.Generator) -> Iterator[GPTConfig]:
    """Yield the configurations to count.

    The first configuration has GPT-2's options, the next ones each change one of these options, and another one has
    Llama's options. They're followed by random mixtures of the two, and finally by GPT-3.
    """
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
        num_layers=3 + 2 * pick(generator, 0, 1),  # 3 or 5, because 2 or 4 could also be the bytes per element
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
    """Return the counts that common mistakes would produce, each with the question to ask.

    The counts are measured on the real modules. None of them equals the correct count.
    """
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
            "This would be the number of parameters if the model had only one layer. How many layers does the model "
            "have?",
        ),
        (
            right + (layers - 1) * (right - layers * count(layer)),
            "You counted the embedding in every layer, but the model has only one embedding.",
        ),
        (
            right - positions,
            "This model has a table of learned position embeddings. Does your parameter count include that table?",
        ),
        (
            right + positions,
            "This configuration says learned_positions=False. Does your parameter count still include a "
            "position-embedding table?",
        ),
        (
            right - table,
            "The embedding has one vector for each token in the vocabulary. Does your parameter count include the "
            "embedding?"
            if config.tied_embedding
            else "In this model, does the output layer share the embedding's weight or have its own? "
            "See `tied_embedding`.",
        ),
        (
            right + config.vocab_size,
            "You seem to have counted a bias for the output layer. Does the output layer have a bias?",
        ),
        (
            right - norms,
            "Norms have parameters, too. How many norms does a layer have? Is there one more norm after the last "
            "layer?",
        ),
        (right - last, "There's one final norm after the last layer. Does your parameter count include that norm?"),
        *(
            [(right - norms + last, _MISSING_4H)]
            if count(layer, "q.bias", "k.bias", "v.bias", "out.bias") == 4 * h
            else []
        ),
        (
            right + (layers - 1) * last,
            "You counted the final norm in every layer, but the model has only one final norm, after the last layer.",
        ),
        (
            right - layers * count(layer, "mlp_norm"),
            "Each layer has one norm before attention. Where in the layer does the second norm go?",
        ),
        (
            right + layers * count(layer, "mlp_norm"),
            "Each layer has one norm before attention and one norm before the MLP. How many norms did you count?",
        ),
        (
            right - biases - count(layer, "norm.weight") * layers - h,
            "You counted all the matrices. Which other parameters does the model learn?",
        ),
        (
            right - biases,
            "In this model, the linear layers and the LayerNorms have biases. Does your parameter count include "
            "these biases?",
        ),
        (
            right - linear_biases,
            "Each linear layer inside the model has a bias, with one element per output feature. Does your "
            "parameter count include these biases?",
        ),
        (
            right - (biases - linear_biases),
            "A LayerNorm has a weight and a bias. How many parameters does each LayerNorm have in total?",
        ),
        (
            right - layers * count(layer, "up.bias", "gate.bias", "down.bias"),
            "The linear layers of the MLP have biases, too, with one element per output feature. Does your "
            "parameter count include these biases?",
        ),
        (
            right - layers * one_mlp_bias,
            "A bias has one element per output feature. How many elements do the biases of `up` and `down` have in "
            "total?",
        ),
        (
            right - layers * one_mlp_bias + layers * h,
            "Does the bias of `up` have one element per input feature or one per output feature?",
        ),
        (
            right + layers * (one_mlp_bias - h),
            "Does the bias of `down` have one element per input feature or one per output feature?",
        ),
        (
            right + full_heads,
            "In this model, K and V have fewer heads than Q. What are the shapes of the K and V matrices?",
        ),
        (
            right + full_heads / 2,
            "You shrank the K matrix or the V matrix, but not both. Both K and V have fewer heads than Q.",
        ),
        (right - full_heads / 2, _FULL),
        (right - narrow, _FULL),
        (right - full_heads, _FULL),
        (right - layers * count(layer, "k."), _FOUR),
        (right - layers * count(layer, "out."), _FOUR),
        (
            right - layers * count(layer, "q.", "k.", "v."),
            "Does your parameter count include the matrices for Q, K, and V?",
        ),
        (
            usual,
            "You assumed that the MLP has 4h hidden features. Does every MLP have 4h hidden features? See `ffn_size`.",
        ),
        (
            right - layers * count(layer, "down."),
            "The MLP maps `h` features to `ffn_size` features and back to `h`. Which matrix maps them back?",
        ),
    ]
    if config.gated:
        known = [
            (right - layers * count(layer, "gate"), "This MLP is gated. How many matrices does a gated MLP have?"),
            (
                right - layers * one_mlp_bias,
                "If the other linear layers have biases, so does the gate layer of the MLP. Does your parameter "
                "count include the gate layer's bias?",
            ),
            (
                right - layers * (one_mlp_bias - h),
                "Does the bias of the gate layer have one element per input feature or one per output feature?",
            ),
            *known,
        ]
    else:
        known.append(
            (
                right + layers * count(layer, "up."),
                "This configuration says gated=False. Does your parameter count still include the gate matrix?",
            )
        )
    if config.tied_embedding:
        known.append(
            (
                right + table,
                "You counted two weight matrices as large as the embedding. In this model, does the output layer "
                "have its own weight matrix? See `tied_embedding`.",
            )
        )
    if config.bias:
        keys = config.kv_heads * config.head_dim
        known = [
            (
                right - h,
                "The final norm is a LayerNorm, too. What parameters does a LayerNorm have besides its weight?",
            ),
            (
                right + layers * 2 * (h - keys),
                "Do the biases of K and V have one element per input feature or one per output feature?",
            ),
            *known,
        ]
    else:
        extra = layers * (4 * h + f + h)
        known += [
            (right + (2 * layers + 1) * h, "The norms of this model are RMSNorms. Does an RMSNorm have a bias?"),
            (
                right + extra,
                "This configuration says bias=False. Does your parameter count still include biases "
                "for the linear layers?",
            ),
            (
                right + extra + (2 * layers + 1) * h,
                "This configuration says bias=False. Does your parameter count still include any biases?",
            ),
        ]
    known += [
        (
            factor * right,
            f"Your result is {factor} times the correct number. Did you count bytes instead of parameters?",
        )
        for factor in (2, 4, 16)
    ]
    return [(value, ask) for value, ask in known if value != right]
