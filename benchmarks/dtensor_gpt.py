"""A GPT with PyTorch's built-in tensor parallelism, which `benchmarks.step` compares with tplab's.

    parallelize_module    nn.Linear -> ColwiseParallel, RowwiseParallel; nn.Embedding -> RowwiseParallel
    DTensor               a parameter knows its shards, and an operation knows which collectives it needs
    loss_parallel         F.cross_entropy of logits sharded along the vocabulary; backward has to run inside it, too

torch gives each rank one contiguous shard of a parameter. The rows of [Wq; Wk; Wv] are therefore in rank order, and the
embedding table is padded. So every rank stores the same elements as with ParallelGPT. (torchtitan's
models/llama3/infra/parallelize.py has a similar plan.)
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F

from tplab import plain
from tplab.data.grad_norm import clip
from tplab.memory.config import GPTConfig
from tplab.tensor.embedding import pad_vocab_size


class DTensorGPT(plain.GPT):
    """A plain GPT with DTensor parameters on a one-dimensional `mesh`. Between layers, x is a plain tensor."""

    def __init__(self, config: GPTConfig, mesh: DeviceMesh, **options: Any) -> None:
        super().__init__(replace(config, flash_attention=True), **options)
        self.mesh, table = mesh, self.embedding.weight
        rows = pad_vocab_size(config.vocab_size, mesh.size())
        self.embedding = nn.Embedding(rows, config.hidden_size, device=table.device, dtype=table.dtype)
        plan: dict[str, Any] = {"embedding": RowwiseParallel(input_layouts=Replicate())}
        for first, last in (("attention.qkv", "attention.out"), ("mlp.up", "mlp.down")):
            plan |= {f"layers.*.{first}": ColwiseParallel(), f"layers.*.{last}": RowwiseParallel()}
        parallelize_module(self, mesh, plan)
        for module in [self.positions, *(module for module in self.modules() if isinstance(module, nn.LayerNorm))]:
            distribute_module(  # its parameters are replicated
                module, mesh, input_fn=_enter, output_fn=lambda _, output, mesh: output.to_local()
            )

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy this rank's shards of the full weights of a plain GPT. Padding rows are set to 0."""
        p, rank = self.mesh.size(), self.mesh.get_local_rank()
        for name, parameter in self.named_parameters():
            full, (placement,) = weights[name], parameter.placements  # type: ignore[attr-defined]
            if ".qkv." in name:
                full = full.unflatten(0, (3, p, -1)).transpose(0, 1).flatten(0, 2)  # [Wq; Wk; Wv] of each rank
            elif name == "embedding.weight":
                full = F.pad(full, (0, 0, 0, len(parameter) - len(full)))
            shard = full.chunk(p, placement.dim)[rank] if placement.is_shard() else full
            parameter.to_local().copy_(shard)  # type: ignore[attr-defined]

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [b, s, v padded] of x [b, s, h], sharded along v. The padding is -inf."""
        logits = F.linear(DTensor.from_local(x, self.mesh, [Replicate()], run_check=False), self.embedding.weight)
        if self.embedding.num_embeddings > self.config.vocab_size:
            ids = torch.arange(self.embedding.num_embeddings, device=logits.device)
            padding = ids.chunk(self.mesh.size())[self.mesh.get_local_rank()] >= self.config.vocab_size  # [v/p]
            padding = DTensor.from_local(padding, self.mesh, [Shard(0)], run_check=False)
            logits = logits.masked_fill(padding, -torch.inf)
        return logits

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        with loss_parallel():
            return super().forward(ids, targets).to_local()  # type: ignore[attr-defined]


def _enter(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)


@torch.no_grad()
def clip_gradients(model: DTensorGPT, max_norm: float) -> Tensor:
    """Clip by the norm of the full gradient, which takes one all-reduce. Return the norm before clipping."""
    sharded: list[Tensor] = []
    whole: list[Tensor] = []
    for parameter in model.parameters():
        gradient: Any = parameter.grad
        assert gradient.placements == parameter.placements  # type: ignore[attr-defined]
        (sharded if gradient.placements[0].is_shard() else whole).append(gradient.to_local())
    square = nn.utils.get_total_norm(sharded) ** 2
    dist.all_reduce(square, group=model.mesh.get_group())
    norm = (square + nn.utils.get_total_norm(whole) ** 2).sqrt()
    clip([*sharded, *whole], norm, max_norm)
    return norm
