"""Chapter 14: a training step, in an order that completes every gradient before it's used.

With every kind of parallelism, backward leaves gradients that are only one term of a sum. A step has to complete all of
them, and it runs in this order:

    backward, m times     the gradients of the micro-batches add up on each rank
    reduce over dp        the gradients of the replicas' sequences. ZeRO 2 and 3, and DataParallel in the last backward,
                          start this during backward, and take the gradients out of `.grad`
    sum over tp           norms, biases and positions under sequence parallelism, which saw only this rank's tokens
    sum over pp's ends    the table that a pipeline's first and last stages share
    norm over tp, pp, dp  the norm of the complete gradient, and clipping
    check                 a norm that isn't finite must not reach the weights
    optimizer             each rank updates its parameters, or its shard of them

The result of the sums doesn't depend on their order, so tp and pp may come after dp. Putting them first would look more
natural, but it fails, because backward may already have taken the gradients, so nothing is left in `.grad` to sum. And
a norm that is computed before the sums isn't the norm of the full gradient. `TrainingStep` enforces this order.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from tplab.data.data_parallel import DataParallel
from tplab.data.flat_parameters import BUCKET_BYTES, broadcast, start_alike
from tplab.data.grad_norm import check_mesh, clip, grad_norm, grad_norm_of_pieces
from tplab.data.zero import Parameters, ZeRO1, ZeRO2, check_elementwise
from tplab.data.zero3 import ZeRO3
from tplab.pipeline.executor import Pipeline
from tplab.sequence.gpt import sequence_parallel_parameters, sum_over_ranks


class TrainingStep:
    """Trains one rank's part of a model. Every rank of the mesh creates it with the same arguments.

        training = TrainingStep(model, torch.optim.AdamW, mesh=mesh(dp=2, tp=2), zero=2, max_norm=1.0, lr=1e-3)
        for k, (ids, targets) in enumerate(micro_batches):
            with training.micro_batch(last=k == m - 1):
                (model(ids, targets) / m).backward()
        norm = training.update()

    model            the model, or this rank's pipeline stage
    optimizer_class  an optimizer that updates each element by itself, such as AdamW or SGD. Others, such as Adafactor
                     and Muon, need zero=0 and a mesh that splits nothing but the batch (see `check_elementwise` in
                     `tplab.data.zero`). `defaults` are its options
    parameters       parameters or param groups for the optimizer. None means all trained parameters, and zero=3 needs
                     all of them
    mesh             as created by `tplab.data.grid.mesh`; None means that this process has the full model
    zero             the ZeRO stage; with 0, all replicas keep the optimizer's full state
    layers           for zero=3, the modules that are gathered separately; None means the model's `layers`
    pipeline         the pipeline that runs the stage; its `step` takes the place of backward, in one `micro_batch()`
    max_norm         the norm to which gradients are clipped, 0 or more; None means no clipping
    average          whether to average gradients over the replicas; if False, they are summed
    check            whether to raise FloatingPointError for a norm that isn't finite. If False, `update` only skips the
                     optimizer, and the caller can check the norm later. With a fused optimizer on a GPU, the CPU then
                     doesn't wait for the norm
    norm             a function (mesh) -> norm to call in place of `tplab.data.grad_norm`; needs zero=0
    bucket_bytes     as in `in_buckets`, for zero=0 to 2

    `optimizer` is the torch optimizer or the ZeRO optimizer, and `torch_optimizer` is what a scheduler needs. All
    replicas start with the first replica's weights and buffers. If no micro-batch uses a parameter, data parallelism
    may still give it a gradient of zero, so momentum and weight decay can change it.

    The optimizer's own `step` raises RuntimeError, because the gradients aren't complete outside of `update`. So does a
    backward pass outside of `micro_batch`, because its gradients could be lost or counted in the wrong step. If a
    micro-batch raises an error, the step is abandoned, and the next one starts without gradients. Freeze and cast the
    model before you create this. If parameters are frozen or unfrozen later, `update` raises ValueError.

    Raises ValueError for options that don't match the model, the mesh or each other.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: Callable[..., Optimizer],
        *,
        parameters: Parameters | None = None,
        mesh: DeviceMesh | None = None,
        zero: int = 0,
        layers: Sequence[nn.Module] | None = None,
        pipeline: Pipeline | None = None,
        max_norm: float | None = None,
        average: bool = True,
        check: bool = True,
        norm: Callable[[DeviceMesh | None], Tensor] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        **defaults: Any,
    ) -> None:
        if zero not in (0, 1, 2, 3):
            raise ValueError(f"zero={zero} is not one of the stages 0, 1, 2 and 3")
        if zero and norm:
            raise ValueError(f"norm reads .grad, which zero={zero} empties: use zero=0")
        if max_norm is not None and not max_norm >= 0:
            raise ValueError(f"max_norm={max_norm} should be 0 or more, or None")
        if mesh is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(f"{dist.get_world_size()} ranks need their mesh: mesh=tplab.data.mesh(dp=.., tp=..)")
        if mesh is not None and not {"dp", "tp"} <= set(mesh.mesh_dim_names or ()):
            raise ValueError(f"the mesh has the dimensions {mesh.mesh_dim_names}: make it with tplab.data.mesh")
        self.model, self.mesh, self.pipeline = model, mesh, pipeline
        self.max_norm, self.check, self.norm_of = max_norm, check, norm
        self.tied = _tied(model, pipeline)
        check_mesh(model.parameters(), mesh)
        self._updates = self._is_inside = False
        _only_in_micro_batches_of(weakref.ref(self), model)
        dp = None if mesh is None else mesh.get_group("dp")
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._trained = [parameter.requires_grad for parameter in model.parameters()]
        # an optimizer needs a parameter, even if this stage is frozen
        given = (trained or [nn.Parameter(torch.empty(0))]) if parameters is None else parameters
        options: dict[str, Any] = {"average": average, "separate": self.tied, "group": dp}
        self.data: DataParallel | None = None
        self.optimizer: Optimizer | ZeRO1
        if zero == 3:
            layers = list(_layers(model)) if layers is None else layers
            self.optimizer = ZeRO3(model, layers, optimizer_class, parameters=parameters, **options, **defaults)
        elif zero:
            start_alike(model.named_parameters(), dp)
            broadcast(model.buffers(), dp)
            kind = ZeRO1 if zero == 1 else ZeRO2
            self.optimizer = kind(given, optimizer_class, bucket_bytes=bucket_bytes, **options, **defaults)
        else:
            if mesh is not None and dp is not None and mesh.size() > dp.size():
                check_elementwise(optimizer_class, "on this mesh, each rank updates only its part of the model")
            if dp is not None and dp.size() > 1:
                self.data = DataParallel(model, bucket_bytes=bucket_bytes, average=average, group=dp)
            self.optimizer = optimizer_class(given, **defaults)
        if pipeline is not None:
            pipeline.sums_tied = False
        self.torch_optimizer.register_step_pre_hook(_only_in_update_of(weakref.ref(self)))
        self._micro_batches, self._is_last, self._is_done = 0, False, False

    @contextmanager
    def micro_batch(self, *, last: bool = True) -> Iterator[None]:
        """Context manager for the backward pass of a micro-batch. `last` marks the last micro-batch of a step.

        With plain data parallelism (zero=0 without a pipeline), DataParallel sends its buckets during the last backward
        pass, and running another micro-batch after that raises ValueError. An error inside the block abandons the step.
        """
        if self._is_last and self.data is not None and self.pipeline is None:
            raise ValueError(
                "the last micro-batch of this step has already run: pass last=k == m - 1, or call update()"
            )
        if self._is_done:
            self.abandon()  # discards the previous step's gradients
        stays = self.data is not None and (self.pipeline is not None or not last)
        self._is_inside = True
        try:
            with self.data.no_sync() if stays and self.data is not None else nullcontext():
                yield
        except BaseException:
            self.abandon()
            raise
        finally:
            self._is_inside = False
        self._micro_batches, self._is_last = self._micro_batches + 1, last

    def abandon(self) -> None:
        """Discard the gradients of this step. Call this on all ranks or on none of them. Nothing is sent."""
        self._micro_batches, self._is_last, self._is_done = 0, False, False
        for part in (self.data, self.optimizer):
            if isinstance(part, DataParallel | ZeRO1):
                part.abandon()
        self.model.zero_grad()

    def update(self) -> Tensor:
        """Complete the gradients, clip them, and update the weights. The next micro-batch frees the gradients.

        Returns the norm of the full gradient before clipping, a scalar on the device, which is the same on every rank.
        Raises FloatingPointError (see `check`) if it isn't finite; then the weights and the optimizer are unchanged.
        Raises ValueError if `micro_batch` hasn't been called in this step.
        """
        if not self._micro_batches:
            raise ValueError("there is no gradient yet: run backward inside `with training.micro_batch():`")
        if self._trained != [parameter.requires_grad for parameter in self.model.parameters()]:
            raise ValueError("parameters were frozen or unfrozen after TrainingStep was made: do it before")
        try:
            gradients = self._complete()
            norm = self._norm()
            if self.max_norm is not None:
                clip(gradients, norm, self.max_norm)
            self._step(norm)
        except BaseException:
            self.abandon()
            raise
        self._micro_batches, self._is_last, self._is_done = 0, False, True
        return norm

    def _complete(self) -> list[Tensor]:
        """Compute all sums and return this rank's gradients, which are its part of the full model's gradients."""
        if self.data is not None:
            self.data.finish()
        if isinstance(self.optimizer, ZeRO1):
            self.optimizer.finish()
        if self.mesh is not None and self.mesh.get_group("tp").size() > 1:
            marked = set(sequence_parallel_parameters(self.model))
            sum_over_ranks([g for parameter, g in self._gradients() if parameter in marked], self.mesh.get_group("tp"))
        self._sum_tied()
        return [gradient for _, gradient in self._gradients()]

    def _sum_tied(self) -> None:
        tied, pipeline = self.tied, self.pipeline
        if pipeline is None or tied is None or not tied.requires_grad or pipeline.channels.ends is None:
            return
        if isinstance(self.optimizer, ZeRO1):
            unit = next((unit for unit in self.optimizer.units if unit.parameters[0] is tied), None)
            if unit is None:  # the optimizer doesn't update the table
                return
            if unit.gradient is None:  # this stage didn't use its copy
                unit.gradient = torch.zeros_like(unit.shard)
            own = unit.gradient
        else:
            if tied.grad is None:
                tied.grad = torch.zeros_like(tied)
            own = tied.grad
        sum_over_ranks([own], pipeline.channels.ends)

    def _gradients(self) -> Iterable[tuple[nn.Parameter, Tensor]]:
        """Yield this rank's gradients. Writing to them changes what the optimizer uses."""
        if isinstance(self.optimizer, ZeRO1):
            yield from ((piece.parameter, piece.values) for piece in self.optimizer.pieces())
            return
        for parameter in self._in_optimizer():
            if parameter.grad is not None:
                yield parameter, parameter.grad

    @property
    def torch_optimizer(self) -> Any:
        """The torch optimizer itself, without ZeRO's wrapper.

        A learning-rate scheduler writes to this optimizer's `param_groups`.
        """
        return self.optimizer.optimizer if isinstance(self.optimizer, ZeRO1) else self.optimizer

    @torch.no_grad()
    def _norm(self) -> Tensor:
        if self.norm_of is not None:
            return self.norm_of(self.mesh)
        if isinstance(self.optimizer, ZeRO1):
            return grad_norm_of_pieces(self.optimizer.pieces(), self.mesh, tied=self.tied)
        return grad_norm(self._in_optimizer(), self.mesh, tied=self.tied)

    def _in_optimizer(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]  # type: ignore[union-attr]

    def _step(self, norm: Tensor) -> None:
        """Run the optimizer, unless the norm isn't finite."""
        inner = self.torch_optimizer
        on_device = norm.is_cuda and getattr(inner, "_step_supports_amp_scaling", False)  # GradScaler's own test
        skips_itself = on_device and not self.check
        if skips_itself:
            inner.grad_scale, inner.found_inf = None, (~norm.isfinite()).float()
        if skips_itself or norm.isfinite():
            self._updates = True
            try:
                self.optimizer.step()
            finally:
                self._updates = False
        elif self.check:
            raise FloatingPointError(
                f"the norm of the gradient is {norm.item()}. The update would have destroyed the weights, so it was "
                "left out. Try a lower learning rate, a longer warmup, or a smaller max_norm"
            )


def _only_in_update_of(training: "weakref.ref[TrainingStep]") -> Callable[..., None]:
    def refuse(*_: Any) -> None:
        owner = training()
        if owner is not None and not owner._updates:
            raise RuntimeError(
                "optimizer.step() would use gradients that are only parts of a sum, and not clipped: call update() of "
                "the TrainingStep that owns this optimizer"
            )

    return refuse


def _only_in_micro_batches_of(training: "weakref.ref[TrainingStep]", model: nn.Module) -> None:
    def refuse(_: Tensor) -> None:
        owner = training()
        if owner is not None and not owner._is_inside:
            owner._micro_batches, owner._is_done = 0, True  # so that the next micro-batch begins a new step
            raise RuntimeError(
                "backward ran outside of `with training.micro_batch():`. The TrainingStep of this model wouldn't know "
                "to which step the gradients belong, so it abandons the step. Run every backward inside of the block, "
                "or use torch.autograd.grad, which leaves .grad alone"
            )

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(refuse)


def _tied(model: nn.Module, pipeline: Pipeline | None) -> nn.Parameter | None:
    tied = getattr(model, "tied", None) if pipeline is None else pipeline.tied
    if tied is not None and pipeline is None:
        raise ValueError("this stage shares its table with another one: pass pipeline=, which knows where it is")
    return tied


def _layers(model: nn.Module) -> Iterable[nn.Module]:
    layers = getattr(model, "layers", None)
    if layers is None:
        raise ValueError("zero=3: this model has no `layers`, so pass the modules that are to be gathered separately")
    return layers.values() if isinstance(layers, nn.ModuleDict) else layers
