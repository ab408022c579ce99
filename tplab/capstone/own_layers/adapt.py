"""Thin wrappers around the learner's answers, for chapters whose interfaces differ.

5.1, 6.2     add their final bias, but 10.1 expects it separately, so they return the output and a bias of zeros
4.1, 7.4     use the matmul of 11.3, which includes f and all-reduces dx in the background during backward
8.5          is called vocab_parallel_cross_entropy in later chapters, and gets logits in at least float32
10.2         looks up all positions; with sequence parallelism, its table gets only those of this rank's tokens
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tplab.capstone.model.plain_gpt import again_in_backward
from tplab.capstone.settings.settings import Settings
from tplab.collectives.by_hand import rank_and_size
from tplab.memory.config import GPTConfig
from tplab.tensor.linear import Device
from tplab.tensor.region import in_autocast_dtype
from tplab.tensor.sharding import shard

ROWS = 128  # the table is padded to a multiple of this many rows per rank, like ParallelGPT's


@dataclass(frozen=True)
class Parts:
    """The learner's components of a GPT and its training step: the answers to 10.2, 10.1, 12.3 and 14.4."""

    gpt: Any
    layer: Any
    allreduce_sequence_gradients: Any
    gradient_norm: Any


def adapted(chapter: int, answers: dict[str, Any], settings: Settings, linear_async: Any) -> dict[str, Any]:
    """Return a chapter's answers by exercise, wrapped so that later chapters can use them."""
    if chapter == 4:
        column = answers["ColumnParallelLinear"]
        column = _with_async(column, linear_async) if linear_async else column
        return {"4.1": column, "4.2": answers["RowParallelLinear"]}
    if chapter == 5:
        return {"5.1": _mlp(answers["ParallelMLP"])}
    if chapter == 6:
        if settings.recompute == "attention":
            answers["attend"] = again_in_backward(answers["attend"])
        return {"6.2": _attention(answers["ParallelAttention"])}
    if chapter == 7:
        logits = answers["parallel_logits"]
        logits = _logits_with_async(logits, linear_async) if linear_async else logits
        return {"7.3": answers["VocabParallelEmbedding"], "7.4": logits}
    if chapter == 8:
        return {"8.5": _loss(answers["vocab_parallel_loss"])}
    return {"10.1": answers["ParallelTransformerLayer"], "10.2": answers["ParallelGPT"]}


def gpt_of(
    parts: Parts, settings: Settings, config: GPTConfig, *, group: ProcessGroup | None, device: Device,
    dtype: torch.dtype | None,
) -> nn.Module:  # fmt: skip
    """Build the learner's GPT, with sequence parallelism if the settings say so."""
    model: nn.Module = parts.gpt(config, parts.layer, multiple=ROWS, group=group, device=device, dtype=dtype)
    if settings.recompute == "layers":
        for layer in model.get_submodule("layers").children():
            layer.forward = again_in_backward(layer.forward)
    if settings.sequence_parallel:
        rank, p = rank_and_size(group)
        model.get_submodule("positions").register_forward_pre_hook(
            lambda table, places: (shard(places[0], -1, rank, p),)  # [s] -> [s/p]
        )
        for parameter in model.parameters():  # chapter 12's `mark`
            parameter.sequence_parallel = not hasattr(parameter, "tensor_parallel")  # type: ignore[attr-defined]
    return model


def _with_async(column: Any, linear_async: Any) -> Any:
    """Return the layer of 4.1 with the matmul of 11.3."""

    class ColumnParallelLinear(column):
        def forward(self, x: Tensor) -> Any:
            if self.gather_output or torch.compiler.is_compiling():  # the compiler overlaps communication by itself
                return super().forward(x)
            y = _product(linear_async, x, self.weight, self.group)  # [.., o/p]
            if self.skip_bias_add:
                return y, self.bias
            return y if self.bias is None else y + self.bias.to(y.dtype)

    return ColumnParallelLinear


def _logits_with_async(parallel_logits: Callable[..., Tensor], linear_async: Any) -> Callable[..., Tensor]:
    """Return the logits function of 7.4 with the matmul of 11.3."""

    def logits(
        x: Tensor, weight: Tensor, *, gather: bool = False, vocab_size: int | None = None, group: Any = None
    ) -> Tensor:
        if gather or torch.compiler.is_compiling():
            return parallel_logits(x, weight, gather=gather, vocab_size=vocab_size, group=group)
        return _product(linear_async, x, weight, group)  # [.., v/p]

    return logits


def _product(linear_async: Any, x: Tensor, weight: Tensor, group: Any) -> Tensor:
    """Apply 11.3 in autocast's dtype, because autocast doesn't cast the inputs of custom autograd functions."""
    return linear_async.apply(*in_autocast_dtype(x, weight), group)


def _mlp(answer: Any) -> Any:
    """Wrap the MLP of 5.1 in the interface that 10.1 calls."""

    class ParallelMLP(answer):
        def __init__(
            self, hidden_size: int, *, activation: str = "gelu", skip_bias_add: bool = True, group: Any = None,
            device: Any = None, dtype: Any = None,
        ) -> None:  # fmt: skip
            _check(skip_bias_add, activation=(activation, "gelu"))
            super().__init__(hidden_size, group=group, device=device, dtype=dtype)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return _with_zeros(super().forward(x))

    return ParallelMLP


def _attention(answer: Any) -> Any:
    """Wrap the attention of 6.2 in the interface that 10.1 calls."""

    class ParallelAttention(answer):
        def __init__(
            self, hidden_size: int, num_heads: int, *, causal: bool = True, dropout: float = 0.0,
            skip_bias_add: bool = True, group: Any = None, device: Any = None, dtype: Any = None,
        ) -> None:  # fmt: skip
            _check(skip_bias_add, dropout=(dropout, 0.0))
            super().__init__(hidden_size, num_heads, causal=causal, group=group, device=device, dtype=dtype)

        def forward(self, x: Tensor, *, cache: Any = None, rng: Any = None) -> tuple[Tensor, Tensor]:
            if cache is not None:
                raise ValueError(
                    "the answer to 6.2 has no cache: tplab.capstone.training.build_model.for_generation has one"
                )
            return _with_zeros(super().forward(x))

    return ParallelAttention


def _loss(answer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap the loss of 8.5 in the interface that 10.2 calls."""

    def vocab_parallel_cross_entropy(
        logits: Tensor, target: Tensor, *, vocab_size: int, group: Any = None, **options: Any
    ) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        with torch.autocast(logits.device.type, enabled=False):
            return answer(logits, target, vocab_size=vocab_size, group=group, **options)

    return vocab_parallel_cross_entropy


def _with_zeros(y: Tensor) -> tuple[Tensor, Tensor]:
    return y, y.new_zeros(y.shape[-1])  # [.., h], [h]


def _check(skip_bias_add: bool, **options: tuple[Any, Any]) -> None:
    for name, (given, there) in {"skip_bias_add": (skip_bias_add, True), **options}.items():
        if given != there:
            raise ValueError(f"{name}={given!r}: in the capstone your blocks are made with {name}={there!r}")
