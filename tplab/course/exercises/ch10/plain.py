"""A transformer layer that computes the right values or, if its steps are combined differently, those of mistakes.

The attention and the MLP are those of `tplab.plain`. Weights are a dictionary of unsharded tensors, keyed by the names
that the chapter's modules use. Weight matrices are [out, in], as in nn.Linear.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from tplab import plain
from tplab.course.checks import random_tensor

Weights = Mapping[str, Tensor]
Masks = tuple[Tensor | float, Tensor | float]  # dropout masks for the outputs of attention and MLP
LINEAR = {"attention.qkv": (3, 1), "attention.out": (1, 1), "mlp.up": (4, 1), "mlp.down": (1, 4)}  # [out, in] over h


def layer_weights(generator: torch.Generator, h: int) -> dict[str, Tensor]:
    """Draw weights for one layer in which no bias is zero and every norm has an effect."""
    made = {}
    for name, (rows, columns) in LINEAR.items():
        made[f"{name}.weight"] = random_tensor(generator, rows * h, columns * h) * (columns * h) ** -0.5
        made[f"{name}.bias"] = random_tensor(generator, rows * h)
    for name in ("attention_norm", "mlp_norm"):
        made[f"{name}.weight"] = 1 + 0.5 * random_tensor(generator, h)
        made[f"{name}.bias"] = random_tensor(generator, h)
    return made


def gpt_weights(generator: torch.Generator, layers: int, h: int, vocab_size: int, length: int) -> dict[str, Tensor]:
    made = {"embedding.weight": random_tensor(generator, vocab_size, h)}
    made["positions.weight"] = random_tensor(generator, length, h)
    for number in range(layers):
        made |= {f"layers.{number}.{name}": value for name, value in layer_weights(generator, h).items()}
    made["final_norm.weight"] = 1 + 0.5 * random_tensor(generator, h)
    return made | {"final_norm.bias": random_tensor(generator, h)}


def cut(name: str, whole: Tensor, rank: int, p: int, multiple: int = 8) -> Tensor:
    """Return the shard that `rank` out of p ranks must hold of the tensor with this name.

    The shard of a fused Q, K, and V weight consists of the rank's heads of each. The table is padded before it's split.
    """
    if name.endswith("embedding.weight"):
        rows = -(-len(whole) // (multiple * p)) * multiple * p
        return torch.cat([whole, whole.new_zeros(rows - len(whole), whole.shape[1])]).chunk(p)[rank]
    if "attention.qkv" in name:
        return torch.cat([part.chunk(p)[rank] for part in whole.chunk(3)])
    if "mlp.up" in name:
        return whole.chunk(p)[rank]
    if name.endswith(("attention.out.weight", "mlp.down.weight")):
        return whole.chunk(p, 1)[rank]
    return whole


@dataclass
class Layer:
    """The steps of one layer. Right and wrong layers combine them in different orders."""

    w: Weights
    heads: int
    causal: bool = True
    post: bool = False
    masks: Masks = (1.0, 1.0)
    bias: float = 1.0  # how many times the blocks' final biases are added
    residual: float = 1.0  # how many times the residual connection is added
    drop: Callable[[Tensor, Tensor | float, Tensor | float], Tensor] = lambda y, bias, mask: (y + bias) * mask

    def norm1(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.w["attention_norm.weight"], self.w["attention_norm.bias"])

    def norm2(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.w["mlp_norm.weight"], self.w["mlp_norm.bias"])

    def attention(self, x: Tensor) -> Tensor:
        block = plain.Attention(x.shape[-1], self.heads, causal=self.causal, device="meta")
        return self._leave(block, "attention", "out.bias", 0, x)

    def mlp(self, x: Tensor) -> Tensor:
        return self._leave(plain.MLP(x.shape[-1], activation="gelu_tanh", device="meta"), "mlp", "down.bias", 1, x)

    def keep(self, x: Tensor, normed: Tensor) -> Tensor:
        return self.residual * (normed if self.post else x)

    def __call__(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = self.keep(x, normed) + self.attention(normed)
        normed = self.norm2(x)
        return self.keep(x, normed) + self.mlp(normed)

    def _leave(self, block: nn.Module, name: str, bias: str, place: int, x: Tensor) -> Tensor:
        w = {key.removeprefix(f"{name}."): value for key, value in self.w.items() if key.startswith(f"{name}.")}
        y = functional_call(block, w | {bias: torch.zeros_like(w[bias])}, x)
        return self.drop(y, self.bias * w[bias], self.masks[place])


OTHER_LN = "what comes out when the residual is taken on the other side of the norms"
VASWANI = "norm(x + block(x)): what comes out when each norm stands behind its sum"
ONE_RESIDUAL = "what comes out when both blocks are added to the same residual, that of the attention"
BESIDE = "what comes out when the MLP reads the layer's input, not what the attention left"
NO_SECOND_NORM = "what comes out without the norm before the MLP"
NO_FIRST_NORM = "what comes out without the norm before the attention"
SAME_NORM = "what comes out when one norm is used before both blocks"
SWAPPED_NORMS = "what comes out when the two norms change places"
NORM_OF_BLOCK = "what comes out when the norms work on the blocks' outputs"
NO_RESIDUAL = "what comes out without any residual"
NO_FIRST_RESIDUAL = "what comes out without the residual around the attention"
NO_SECOND_RESIDUAL = "what comes out without the residual around the MLP"
MLP_FIRST = "what comes out when the MLP comes before the attention"


def _one_residual(m: Layer, x: Tensor) -> Tensor:
    normed = m.norm1(x)
    after = m.keep(x, normed) + m.attention(normed)
    return m.keep(x, normed) + m.mlp(m.norm2(after))


def _beside(m: Layer, x: Tensor) -> Tensor:
    return m.keep(x, m.norm1(x)) + m.attention(m.norm1(x)) + m.mlp(m.norm2(x))


def _blocks(first: Callable, second: Callable, m: Layer, x: Tensor) -> Tensor:
    """Run the attention and MLP blocks with the given functions as their norms."""
    normed = first(x)
    x = m.keep(x, normed) + m.attention(normed)
    normed = second(x)
    return m.keep(x, normed) + m.mlp(normed)


def _mlp_first(m: Layer, x: Tensor) -> Tensor:
    normed = m.norm2(x)
    x = m.keep(x, normed) + m.mlp(normed)
    normed = m.norm1(x)
    return m.keep(x, normed) + m.attention(normed)


def _norm_of_block(m: Layer, x: Tensor) -> Tensor:
    x = x + m.norm1(m.attention(x))
    return x + m.norm2(m.mlp(x))


def _vaswani(m: Layer, x: Tensor) -> Tensor:
    x = m.norm1(x + m.attention(x))
    return m.norm2(x + m.mlp(x))


def _same(x: Tensor) -> Tensor:
    return x


MISTAKES: dict[str, Callable[[Layer, Tensor], Tensor]] = {
    OTHER_LN: lambda m, x: Layer(**{**m.__dict__, "post": not m.post})(x),
    VASWANI: _vaswani,
    ONE_RESIDUAL: _one_residual,
    BESIDE: _beside,
    NO_SECOND_NORM: lambda m, x: _blocks(m.norm1, _same, m, x),
    NO_FIRST_NORM: lambda m, x: _blocks(_same, m.norm2, m, x),
    SAME_NORM: lambda m, x: _blocks(m.norm1, m.norm1, m, x),
    SWAPPED_NORMS: lambda m, x: _blocks(m.norm2, m.norm1, m, x),
    NORM_OF_BLOCK: _norm_of_block,
    NO_RESIDUAL: lambda m, x: m.mlp(m.norm2(m.attention(m.norm1(x)))),
    NO_FIRST_RESIDUAL: lambda m, x: (lambda y: m.keep(y, m.norm2(y)) + m.mlp(m.norm2(y)))(m.attention(m.norm1(x))),
    NO_SECOND_RESIDUAL: lambda m, x: m.mlp(m.norm2(m.keep(x, m.norm1(x)) + m.attention(m.norm1(x)))),
    MLP_FIRST: _mlp_first,
}


def final_norm(w: Weights, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w["final_norm.weight"], w["final_norm.bias"])
