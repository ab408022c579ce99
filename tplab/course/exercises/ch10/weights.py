"""What the checks of exercises 10.3 and 10.4 share: sizes, random weights, and the shards that each rank holds."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tplab.course.checks import twins
from tplab.course.checks.cases import Place, random_tensor
from tplab.course.checks.twins import Twin
from tplab.memory.config import GPTConfig

HIDDEN, HEADS, BATCH, LENGTH, KEYS, LAYERS, VOCABULARY, RATE = 8, 4, 2, 5, 7, 2, 37, 0.4
CONFIG = GPTConfig(
    num_layers=LAYERS, hidden_size=HIDDEN, num_heads=HEADS, vocab_size=VOCABULARY, seq_length=LENGTH + 1,
    activation="gelu_tanh", dropout=0.0,
)  # fmt: skip
MASKS = "masks"  # of dropout, in the order in which the blocks draw them
SPLIT = {  # (dimension, number of stacked matrices), by the end of a parameter's name. All others are replicated
    "attention.qkv": (0, 3), "cross_attention.q": (0, 1), "cross_attention.kv": (0, 2), "mlp.up": (0, 1),
    "attention.out.weight": (1, 1), "mlp.down.weight": (1, 1),
}  # fmt: skip


def part(name: str, full: Tensor, place: Place) -> Tensor:
    """Return a rank's shard of the parameter with this name. The rows of the embedding are padded first."""
    if name.endswith("embedding.weight"):
        return place.part(F.pad(full, (0, 0, 0, -VOCABULARY % (8 * place.size))))
    split = next((way for end, way in SPLIT.items() if f"{end}." in f"{name}."), None)
    return full if split is None else place.part(full, *split)


def random_weights(module: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    """Return weights for a plain module, in which no bias is zero and every norm has an effect."""
    sizes = {name: value.shape for name, value in module.state_dict().items()}
    drawn = {name: random_tensor(generator, *shape) for name, shape in sizes.items()}
    tables = ("embedding.weight", "positions.weight")
    scales = {name: shape[1] ** -0.5 for name, shape in sizes.items() if len(shape) == 2 and name not in tables}
    drawn = {name: value * scales.get(name, 1.0) for name, value in drawn.items()}
    return {name: 1 + value / 2 if name.endswith("norm.weight") else value for name, value in drawn.items()}


def draws_once(case: Any) -> tuple[Twin, ...]:
    return twins.DRAWS_ONCE if case.rate else ()
