"""The plain GPT with PyTorch's built-in tensor parallelism, which is the baseline of the report.

    parallelize_module    nn.Linear -> ColwiseParallel, RowwiseParallel; nn.Embedding -> RowwiseParallel
    DTensor               a parameter knows its shards, and an operation knows which collectives it needs
    loss_parallel         F.cross_entropy of logits sharded along the vocabulary; backward has to run inside it, too
    SequenceParallel      norms, with the sequence sharded between the blocks

torch gives each rank one contiguous shard of a parameter. The rows of [Wq; Wk; Wv] are therefore in rank order, and the
embedding table is padded. So every rank stores the same elements as with ParallelGPT, and parameters have the same
`tensor_parallel` attributes.

If the sequence is sharded, the gradients of norm layers are Partial, and torch would all-reduce them at every use.
`finish_gradients` therefore all-reduces them once. (torch.distributed.tensor.parallel; torchtitan's
models/llama3/infra/parallelize.py has a similar plan.)
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from tplab.capstone.model.plain_gpt import PlainGPT
from tplab.capstone.model.training_hooks import TrainingHooks
from tplab.capstone.settings.settings import Settings
from tplab.data.flat_parameters import Piece
from tplab.data.grad_norm import grad_norm_of_pieces
from tplab.memory.config import GPTConfig
from tplab.runtime import device as own_device
from tplab.tensor.embedding import pad_vocab_size
from tplab.tensor.linear import Device


class DTensorGPT(PlainGPT):
    """A `PlainGPT` with DTensor parameters on a one-dimensional `mesh`. Between blocks, x is a plain tensor."""

    def __init__(self, config: GPTConfig, mesh: DeviceMesh, *, sequence_parallel: bool = False, **options: Any) -> None:
        super().__init__(config, rows=pad_vocab_size(config.vocab_size, mesh.size()), **options)
        self.mesh, self.sequence_parallel = mesh, sequence_parallel
        self.between = between = Shard(1) if sequence_parallel else Replicate()
        plan: dict[str, Any] = {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between)}
        for block, first, last in (("attention", "qkv", "out"), ("mlp", "up", "down")):
            name = f"layers.*.{block}"
            plan[name] = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
            plan[f"{name}.{first}"] = ColwiseParallel()
            plan[f"{name}.{last}"] = RowwiseParallel(output_layouts=between)
        norms = {name: module for name, module in self.named_modules() if isinstance(module, nn.LayerNorm)}
        if sequence_parallel:
            plan |= {name: SequenceParallel(use_local_output=True) for name in norms}
        parallelize_module(self, mesh, plan)
        for module in [self.positions, *([] if sequence_parallel else norms.values())]:
            distribute_module(  # its parameters are replicated
                module, mesh, input_fn=self._enter, output_fn=lambda _, output, mesh: output.to_local()
            )

    def _enter(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        cut = module is self.positions and self.sequence_parallel  # positions of this rank's tokens
        placement = Shard(0) if cut else Replicate()
        return tuple(DTensor.from_local(x, mesh, [placement], run_check=False) for x in inputs)

    def places(self, ids: Tensor) -> Tensor:
        places = super().places(ids)  # [s]
        return places.chunk(self.mesh.size())[self.mesh.get_local_rank()] if self.sequence_parallel else places

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [b, s, v padded] of x [b, s, h] or [b, s/p, h], sharded along v. The padding is -inf."""
        whole = DTensor.from_local(x, self.mesh, [self.between], run_check=False).redistribute(placements=[Replicate()])
        logits = F.linear(whole, self.embedding.weight)
        if self.embedding.num_embeddings > self.config.vocab_size:
            ids = torch.arange(self.embedding.num_embeddings, device=logits.device)
            padding = ids.chunk(self.mesh.size())[self.mesh.get_local_rank()] >= self.config.vocab_size  # [v/p]
            padding = DTensor.from_local(padding, self.mesh, [Shard(0)], run_check=False)
            logits = logits.masked_fill(padding, -torch.inf)
        return logits

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel():
            return super().loss(x, targets).to_local()  # type: ignore[attr-defined]


def parallel_plain_gpt(
    settings: Settings, config: GPTConfig, *, mesh: DeviceMesh | None, device: Device = None,
    dtype: torch.dtype | None = None,
) -> DTensorGPT:  # fmt: skip
    """Create the model with uninitialized weights. Raises ValueError if `mesh` is None."""
    if mesh is None:
        raise ValueError(
            'layers="dtensor" needs a process group: start it with tplab.launch or torchrun, and pass '
            "mesh=tplab.data.grid.mesh(tp=..)"
        )
    model = DTensorGPT(
        config, mesh["tp"], sequence_parallel=settings.sequence_parallel, recompute=settings.recompute, device="meta",
        dtype=dtype,
    ).to_empty(device=own_device() if device is None else device)  # fmt: skip
    model.hooks = TrainingHooks(  # type: ignore[assignment]
        config=config, group=mesh.get_group("tp"), around_backward=loss_parallel,
        finish_gradients=partial(add_up, model), norm=partial(length, model),
    )  # fmt: skip
    return model


@torch.no_grad()
def add_up(model: nn.Module) -> None:
    """Give every Partial gradient the placement of its parameter, using one all-reduce per gradient."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(isinstance(p, Partial) for p in gradient.placements):
            parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]


def length(model: nn.Module, mesh: DeviceMesh | None) -> Tensor:
    """Return the norm of the full gradient. Parameters with a `tensor_parallel` attribute count as sharded."""
    pieces = []
    for parameter in model.parameters():
        if isinstance(parameter.grad, DTensor):
            own = parameter.grad.to_local()
            pieces.append(Piece(parameter, own.shape, 0, own.flatten()))
    return grad_norm_of_pieces(pieces, mesh)
