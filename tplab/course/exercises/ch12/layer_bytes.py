"""The check for exercise 12.4, a formula for the bytes that autograd saves for a layer, compared with a real layer.

The real layer is the part of a layer that one of p ranks computes. It runs in a single process with simulated
communication, in which a gather repeats this rank's tokens p times, and a reduce-scatter takes the first s/p tokens.
Neither saves anything, and all tensors have the same shapes as on a rank. Elements are 16-bit, and dropout masks take
one byte per element.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tplab.course.checks import Question, Verdict, calling, exercise, fresh_generator, verify
from tplab.memory.meter import saved_for_backward

WAYS = ("nothing", "attention", "layers")
NAME = "bytes kept"
RATE = 0.1


class _GatheredLinear(Function):
    """A matmul of all tokens with a weight. It saves only this rank's tokens for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, p: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(torch.cat([x] * p, 1), weight)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple:
        raise NotImplementedError("only what forward keeps is measured")


class RankLayer(nn.Module):
    """One rank's share of a layer on p ranks. The input x is [b, s, h], or [b, s/p, h] with sequence_parallel."""

    def __init__(self, h: int, a: int, p: int, sequence_parallel: bool, recompute_core: bool) -> None:
        super().__init__()
        self.p, self.heads, self.dim = p, a // p, h // a
        self.cut, self.recompute_core = sequence_parallel, recompute_core
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h // p, bias=False), nn.Linear(h // p, h, bias=False)
        self.up, self.down = nn.Linear(h, 4 * h // p, bias=False), nn.Linear(4 * h // p, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, self.dim)).transpose(1, 2)  # [b, a/p, s, d]
            for part in self._enter(self.norm1(x), self.qkv).chunk(3, -1)
        )
        y = checkpoint(self.core, q, k, v, use_reentrant=False) if self.recompute_core else self.core(q, k, v)
        x = x + drop(self._leave(self.out(y.transpose(1, 2).flatten(2))))
        return x + drop(self._leave(self.down(F.gelu(self._enter(self.norm2(x), self.up)))))

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return drop((q @ k.transpose(-2, -1) * self.dim**-0.5).softmax(-1)) @ v

    def _enter(self, x: Tensor, linear: nn.Linear) -> Tensor:
        return _GatheredLinear.apply(x, linear.weight, self.p) if self.cut else linear(x)

    def _leave(self, y: Tensor) -> Tensor:
        return y.chunk(self.p, 1)[0] if self.cut else y


def drop(x: Tensor) -> Tensor:
    return torch.native_dropout(x, RATE, True)[0]


def kept_by_layer(b: int, s: int, h: int, a: int, p: int, sequence_parallel: bool, recompute: str) -> int:
    """Return the bytes that autograd saves, except for the mean and standard deviation that norms save per token."""
    layer = RankLayer(h, a, p, sequence_parallel, recompute == "attention").bfloat16()
    tokens = s // p if sequence_parallel else s
    x = torch.zeros(b, tokens, h, dtype=torch.bfloat16, requires_grad=True)
    with saved_for_backward(layer) as kept:
        if recompute == "layers":
            checkpoint(layer, x, use_reentrant=False)
        else:
            layer(x)
    return sum(size for shape, _, size in kept.pieces if shape != (b, tokens, 1))


@exercise("12.4", "The bytes of a layer")
def bytes_of_a_layer(formula: Callable[..., Any]) -> Verdict:
    generator = fresh_generator()

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    for p, sequence_parallel, recompute in product((1, 4, 2), (False, True), WAYS):
        a = 4 * pick(1, 2)
        b, s, h = pick(2, 3), 4 * pick(3, 7), a * 2 * pick(2, 4)
        s += 4 * (s == h)
        how = f"sequence_parallel={sequence_parallel}, recompute={recompute!r}"
        with calling(f"layer_bytes({b}, {s}, {h}, {a}, {p}, {how})"):
            said = formula(b, s, h, a, p, sequence_parallel=sequence_parallel, recompute=recompute)
        right = kept_by_layer(b, s, h, a, p, sequence_parallel, recompute)
        questions = bytes_questions(said, (b, s, h, a, p), sequence_parallel, recompute)
        note = f"b = {b}, s = {s}, h = {h}, a = {a}, {how}"
        verify("12.4", p, [{NAME: number(said)}], [{NAME: right}], questions=questions, note=note, alone=True)
    with calling("layer_bytes(2, 12, 16, 4, 2), without the last two arguments"):
        said = formula(2, 12, 16, 4, 2)
    right = kept_by_layer(2, 12, 16, 4, 2, False, "nothing")
    ask = Question(NAME, 'Left out, sequence_parallel is False and recompute is "nothing". What are they in yours?')
    verify("12.4", 2, [{NAME: number(said)}], [{NAME: right}], questions=[ask], note="by default", alone=True)
    return Verdict("To the byte what autograd keeps: everything that is cut is cut by p.")


def number(said: Any) -> Any:
    """Convert a float to an int if it has no fraction (it may come from a division). Anything else is unchanged."""
    return int(said) if isinstance(said, float) and said.is_integer() else said


def bytes_questions(said: Any, sizes: tuple[int, ...], sequence_parallel: bool, recompute: str) -> list[Question]:
    """Return the questions that fit a wrong byte count. The check asks the first of them."""
    b, s, h, a, p = sizes
    sbh, scores = s * b * h, 5 * a * s * s * b

    def says(*values: float) -> bool:
        return isinstance(said, (int, float)) and any(abs(said - value) < 0.6 for value in values)

    is_number = isinstance(said, (int, float)) and not isinstance(said, bool)
    rules = [
        (not is_number, "The result is one number, in bytes. What does your last line return?"),
        (
            recompute == "layers" and says(sbh, sbh / p),
            "Only the layer's input is kept. How many bytes has a 16-bit number?",
        ),
        (
            recompute == "layers" and says(2 * sbh),
            "The layer's input is [b, s/p, h] on a rank when the sequence is cut. Which p is missing?",
        ),
        (
            recompute == "layers" and says(2 * sbh / p),
            "Between the layers every rank holds all tokens when the sequence is not cut. What is divided by p then?",
        ),
        (
            recompute == "layers",
            'With "layers" the whole layer runs again in backward, from its input. What has to be kept for that?',
        ),
        (
            recompute == "attention"
            and says(34 * sbh + scores, sbh * (10 + 24 / p) + scores / p, (34 * sbh + scores) / p),
            'With "attention" the scores, their softmax and their dropout are computed again. Which term is that?',
        ),
        (
            says(34 * sbh + scores, 34 * sbh) and p > 1,
            "This is what one process keeps. On each of p ranks, what is smaller?",
        ),
        (
            sequence_parallel and says(sbh * (10 + 24 / p) + scores / p, sbh * (10 + 24 / p)),
            "This is tensor parallelism alone. The 10 are what it leaves whole: norms' inputs, the inputs of the "
            "column-parallel layers, masks. What becomes of them when the sequence is cut?",
        ),
        (
            sequence_parallel and says(sbh * (4 + 30 / p) + scores / p, sbh * (4 + 30 / p)),
            "You count the gathered inputs of the two column-parallel layers as kept whole. Here each rank keeps its "
            "own tokens and gathers the others again in backward.",
        ),
        (
            not sequence_parallel and says((34 * sbh + scores) / p, 34 * sbh / p),
            "All is divided by p. But without sequence parallelism, which tensors does every rank hold whole? Go "
            "through the table row by row.",
        ),
        (
            says(sbh * (10 + 24 / p) + scores, 34 * sbh / p + scores),
            "The scores belong to heads, [b, a, s, s]. How many heads has a rank?",
        ),
        (
            recompute == "attention" and says(sbh * (10 + 18 / p), 28 * sbh / p),
            "Scores, softmax and dropout are computed again *from* something. What of Q, K and V has to be kept?",
        ),
        (
            p == 1,
            "Nothing is divided here. Add up the table: bytes for each of s·b·h numbers, and the scores.",
        ),
        (
            True,
            "Go through the table row by row: is this tensor divided by p without sequence parallelism? With it? And "
            "is it kept?",
        ),
    ]
    return [Question(lambda d: True, ask) for fits, ask in rules if fits]
