"""The plain GPT with PyTorch's built-in tensor parallelism, which is the baseline of the report.

    parallelize_module    nn.Linear -> ColwiseParallel, RowwiseParallel; nn.Embedding -> RowwiseParallel
    DTensor               a parameter knows its shards, and an operation knows which collectives it needs
    loss_parallel         F.cross_entropy of logits sharded along the vocabulary; backward has to run inside it, too
    SequenceParallel      norms, with the sequence sharded between the blocks

torch gives each rank one contiguous shard of a parameter. So the rows of [Wq; Wk; Wv] are sorted by rank, and the
embedding table is padded, and every rank stores the same elements as with ParallelGPT, with its `tensor_parallel`
marks.

If the sequence is sharded, the gradients of norm layers are Partial, and torch would all-reduce them at every use. So
`finish_gradients` does it once. (torch.distributed.tensor.parallel; torchtitan's models/llama3/infra/parallelize.py has
a similar plan.)
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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
        between = Shard(1) if sequence_parallel else Replicate()
        plan: dict[str, Any] = {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between)}
        for number in range(config.num_layers):
            for block, first, last in (("attention", "qkv", "out"), ("mlp", "up", "down")):
                name = f"layers.{number}.{block}"
                plan[name] = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
                plan[f"{name}.{first}"] = ColwiseParallel()
                plan[f"{name}.{last}"] = RowwiseParallel(output_layouts=between)
        norms = {name: module for name, module in self.named_modules() if isinstance(module, nn.LayerNorm)}
        if sequence_parallel:
            plan |= {name: SequenceParallel(use_local_output=True) for name in norms}
        parallelize_module(self, mesh, plan)
        for module in [self.positions, *([] if sequence_parallel else norms.values())]:
            distribute_module(
                module, mesh, input_fn=self._enter, output_fn=self._leave
            )  # its parameters are replicated

    def _enter(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        cut = module is self.positions and self.sequence_parallel  # positions of this rank's tokens
        placement = Shard(0) if cut else Replicate()
        return tuple(DTensor.from_local(x, mesh, [placement], run_check=False) for x in inputs)

    def _leave(self, module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.to_local()

    def places(self, ids: Tensor) -> Tensor:
        places = super().places(ids)  # [s]
        return places.chunk(self.mesh.size())[self.mesh.get_local_rank()] if self.sequence_parallel else places

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of x [b, s, h] or [b, s/p, h]: [b, s, v padded], sharded along v. The padding is -inf."""
        between = Shard(1) if self.sequence_parallel else Replicate()
        whole = DTensor.from_local(x, self.mesh, [between], run_check=False).redistribute(placements=[Replicate()])
        logits = F.linear(whole, self.embedding.weight)
        padding = self.embedding.num_embeddings - self.config.vocab_size
        if padding:
            logits = logits.masked_fill(self._behind_the_vocabulary(logits), -torch.inf)
        return logits

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(x).flatten(0, 1)  # [b s, v padded]
        with loss_parallel():
            loss = F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten())
        return loss.to_local()  # type: ignore[attr-defined]

    def _behind_the_vocabulary(self, logits: Tensor) -> DTensor:
        ids = torch.arange(self.embedding.num_embeddings, device=logits.device)
        mine = ids.chunk(self.mesh.size())[self.mesh.get_local_rank()] >= self.config.vocab_size  # [v/p]
        return DTensor.from_local(mine, self.mesh, [Shard(0)], run_check=False)


def parallel_plain_gpt(
    settings: Settings,
    config: GPTConfig,
    *,
    mesh: DeviceMesh | None = None,
    device: Device = None,
    dtype: torch.dtype | None = None,
) -> DTensorGPT:
    """Create the model with uninitialized weights. Raises ValueError without a process group."""
    if not torch.distributed.is_initialized():
        raise ValueError('layers="dtensor" needs a process group: start it with tplab.launch or torchrun')
    device = own_device() if device is None else device
    tp = init_device_mesh(torch.device(device).type, (settings.tp,)) if mesh is None else mesh["tp"]
    model = DTensorGPT(
        config, tp, sequence_parallel=settings.sequence_parallel, recompute=settings.recompute, device="meta",
        dtype=dtype,
    )  # fmt: skip
    model = model.to_empty(device=device)
    group: ProcessGroup = tp.get_group()
    model.hooks = TrainingHooks(  # type: ignore[assignment]
        config=config, group=group, around_backward=loss_parallel, finish_gradients=lambda: add_up(model),
        norm=lambda whole_mesh: length(model, mesh),
    )  # fmt: skip
    return model


@torch.no_grad()
def add_up(model: nn.Module) -> None:
    """Give every Partial gradient the placement of its parameter, using one all-reduce each."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(isinstance(p, Partial) for p in gradient.placements):
            parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]


def length(model: nn.Module, mesh: DeviceMesh | None) -> Tensor:
    """Return the norm of the full gradient. The parameters' `tensor_parallel` marks tell which of them are sharded."""
    pieces = []
    for parameter in model.parameters():
        if isinstance(parameter.grad, DTensor):
            own = parameter.grad.to_local()
            pieces.append(Piece(parameter, own.shape, 0, own.flatten()))
    return grad_norm_of_pieces(pieces, mesh)
