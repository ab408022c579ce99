"""Thin wrappers around the learner's answers, for what the settings ask of them and their chapters don't.

4.1, 7.4     use the matmul of 11.3, which includes f and all-reduces dx in the background during backward
10.2         looks up all positions; with sequence parallelism, its table gets only those of this rank's tokens

my_tp/blocks.py and my_tp/operators.py have more wrappers, which the library needs in any case.
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


def with_async(column: Any, linear_async: Any) -> Any:
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


def logits_with_async(parallel_logits: Callable[..., Tensor], linear_async: Any) -> Callable[..., Tensor]:
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
