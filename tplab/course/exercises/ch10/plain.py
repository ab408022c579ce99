"""A single-process GPT in plain PyTorch that computes the right values and those that common mistakes would produce.

Its weights are a dictionary of unsharded tensors, keyed by the names that the chapter's modules use. Weight matrices
are [out, in], as in nn.Linear. Nothing here uses tplab's layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

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
        qkv = F.linear(x, self.w["attention.qkv.weight"], self.w["attention.qkv.bias"])
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5  # [b, a, s, s]
        if self.causal:
            scores = scores + torch.full_like(scores[0, 0], -torch.inf).triu(1)
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)  # [b, s, h]
        return self._leave(F.linear(y, self.w["attention.out.weight"]), "attention.out.bias", 0)

    def mlp(self, x: Tensor) -> Tensor:
        y = F.gelu(F.linear(x, self.w["mlp.up.weight"], self.w["mlp.up.bias"]), approximate="tanh")
        return self._leave(F.linear(y, self.w["mlp.down.weight"]), "mlp.down.bias", 1)

    def keep(self, x: Tensor, normed: Tensor) -> Tensor:
        return self.residual * (normed if self.post else x)

    def __call__(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = self.keep(x, normed) + self.attention(normed)
        normed = self.norm2(x)
        return self.keep(x, normed) + self.mlp(normed)

    def _leave(self, y: Tensor, bias: str, place: int) -> Tensor:
        return self.drop(y, self.bias * self.w[bias], self.masks[place])


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


def features(w: Weights, ids: Tensor, layers: int, heads: int, *, past: int = 0, positions: bool = True) -> Tensor:
    """Return the input of the final norm, [b, s, h]."""
    x = w["embedding.weight"][ids]
    if positions:
        x = x + w["positions.weight"][past : past + ids.shape[1]]
    for number in range(layers):
        start = f"layers.{number}."
        x = Layer({name[len(start) :]: value for name, value in w.items() if name.startswith(start)}, heads)(x)
    return x


def final_norm(w: Weights, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w["final_norm.weight"], w["final_norm.bias"])


def logits(w: Weights, ids: Tensor, layers: int, heads: int) -> Tensor:
    return final_norm(w, features(w, ids, layers, heads)) @ w["embedding.weight"].t()
