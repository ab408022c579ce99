"""Chapter 04: a linear layer, Y = X A + b, on p ranks.

Column-parallel: we split A [in, out] by columns. Each rank takes the full X and computes complete columns of Y. (f and
g are the operators of chapter 03.)

    X [ A_0 | A_1 ] + [ b_0 | b_1 ] = [ X A_0 + b_0 | X A_1 + b_1 ]          X -> f -> matmul, + b_r -> Y_r

Row-parallel: we split A by rows, and X by columns to match. Each rank computes one term of the full Y, and g sums the
terms.

    [ X_0 | X_1 ] [ A_0 ]
                  [ A_1 ] + b = X_0 A_0 + X_1 A_1 + b                        X_r -> matmul -> g, + b -> Y

torch stores A transposed, as weight [out, in]. So a column-parallel layer shards dim 0 of `weight` and `bias`. A
row-parallel layer shards dim 1 of `weight` and replicates `bias`, which is added once, after the sum.

    layer     forward traffic                        backward traffic
    column    none (gather_output: all-gather Y)     all-reduce of dX, as many elements as X
    row       all-reduce of Y                        none (input_is_parallel=False: all-gather dX)

If all ranks set the same seed before creating layers, the matrix is the same for every p
(`tplab.tensor.initialization`).
(Shoeybi et al. 2019, "Megatron-LM", section 3; megatron/core/tensor_parallel/layers.py.)
"""

from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from tplab.tensor.initialization import InitMethod, init_linear
from tplab.tensor.operators import gather_from_region, scatter_to_region
from tplab.tensor.region import TENSOR_PARALLEL, Region
from tplab.tensor.sharding import ShardedModule, Sharding, divide

Device = torch.device | str | int | None


class LayerOptions(TypedDict, total=False):
    """Options that every parallel layer accepts and passes on to its sublayers.

    init_method      initializes the full weight in place; None: as `nn.Linear` does
    region           how x enters and y leaves the layer (see `tplab.tensor.region`)
    group            the ranks that share the layer; None: all ranks
    """

    init_method: InitMethod | None
    region: Region
    group: ProcessGroup | None
    device: Device
    dtype: torch.dtype | None


class _ParallelLinear(ShardedModule):
    """Base class of both layers. Shards a weight along `dim`, and initializes it."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        dim: int,
        *,
        skip_bias_add: bool,
        stride: int,
        region: Region = TENSOR_PARALLEL,
        init_method: InitMethod | None = None,
        group: ProcessGroup | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group)
        self.in_features, self.out_features, self.stride = in_features, out_features, stride
        self.skip_bias_add, self.region = skip_bias_add, region
        self.init_method = init_method
        shape = [out_features, in_features]
        shape[dim] = self._shard_length(("out_features", "in_features")[dim], shape[dim])
        weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.register_shard("weight", weight, Sharding(dim, stride))
        if not bias:
            self.register_parameter("bias", None)
        elif dim == 0:
            self.register_shard("bias", nn.Parameter(weight.new_empty(shape[0])), Sharding(0, stride))
        else:
            self.register_parameter("bias", nn.Parameter(weight.new_empty(out_features)))
            region.mark(self, "bias")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialize the parameters as `nn.Linear` does, or the weight with `init_method` and the bias with zeros."""
        init_linear(self.weight, self.bias, self.init_method, self.group)

    def _bias_to_add(self) -> Tensor | None:
        """Return a copy of the bias that the caller has to add, or None if there is nothing to add.

        ZeRO-3 frees a unit's parameters when its forward ends. If the unit is smaller than the caller, the parameter
        itself would be freed memory by the time the caller adds it.
        """
        return self.bias.clone() if self.skip_bias_add and self.bias is not None else None

    def _shard_length(self, name: str, size: int) -> int:
        if self.stride < 1 or size % self.stride:
            raise ValueError(f"{name}={size} can't be cut into stride={self.stride} equal blocks")
        block_name = name if self.stride == 1 else f"{name}/{self.stride}"
        unit = "columns of A" if name == "out_features" else "rows of A"
        return self.stride * divide(size // self.stride, self.world_size, name=block_name, unit=unit)


class ColumnParallelLinear(_ParallelLinear):
    """Y = X A + b with A split by columns. Maps x [.., in] (replicated) to this rank's columns of y, [.., out/p].

    gather_output           return the full y [.., out] on every rank, with one all-gather
    skip_bias_add           return (y without bias, a copy of bias), so that the caller can add the bias later
    stride                  A consists of `stride` matrices side by side, each of which is split
    async_grad_allreduce    in backward, overlap the all-reduce of dX with the computation of dW. The layer is then not
                            twice differentiable, and under autocast dX is summed in the lower precision. torch.compile
                            ignores this option and schedules both by itself
    options                 see `LayerOptions`

    Raises ValueError if out_features isn't divisible by stride times p. (Megatron: the same name.)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        stride: int = 1,
        async_grad_allreduce: bool = False,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(in_features, out_features, bias, 0, skip_bias_add=skip_bias_add, stride=stride, **options)
        self.gather_output = gather_output
        self.async_grad_allreduce = async_grad_allreduce

    def forward(self, x: Tensor) -> Any:
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(f"x {list(x.shape)} should be [.., {self.in_features}]: each rank needs all of x")
        added: Tensor | None = None if self.skip_bias_add else self.bias
        y = self.region.column_linear(x, self.weight, added, self.group, self.async_grad_allreduce)  # [.., out/p]
        bias = self._bias_to_add()
        if self.gather_output:
            y = gather_from_region(y, self.group, stride=self.stride)  # [.., out]
            if bias is not None:
                bias = gather_from_region(bias, self.group, stride=self.stride)  # [out], to match y
        return (y, bias) if self.skip_bias_add else y


class RowParallelLinear(_ParallelLinear):
    """Y = X A + b with A split by rows. Maps this rank's columns of x, [.., in/p], to the full y [.., out], replicated.

    input_is_parallel             False: x [.., in] is replicated, and each rank takes its own slice
    skip_bias_add                 return (y without bias, a copy of bias)
    stride                        A consists of `stride` matrices stacked vertically, each of which is split, like x
    options                       see `LayerOptions`

    Raises ValueError if in_features isn't divisible by stride times p. (Megatron: the same name.)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        stride: int = 1,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(in_features, out_features, bias, 1, skip_bias_add=skip_bias_add, stride=stride, **options)
        self.input_is_parallel = input_is_parallel

    def forward(self, x: Tensor) -> Any:
        expected = self.in_features // (self.world_size if self.input_is_parallel else 1)
        if x.shape[-1:] != (expected,):
            raise ValueError(
                f"x {list(x.shape)} should be [.., {expected}] with input_is_parallel={self.input_is_parallel}, "
                f"in_features={self.in_features} and {self.world_size} ranks"
            )
        if not self.input_is_parallel:
            x = scatter_to_region(x, self.group, stride=self.stride)  # [.., in/p]
        added: Tensor | None = None if self.skip_bias_add else self.bias
        alone = self.world_size == 1  # then there is nothing to sum, so the matmul can add the bias
        y = self.region.leave(F.linear(x, self.weight, added if alone else None), self.group)  # [.., out]
        if added is not None and not alone:
            y = y + added.to(y.dtype)
        return (y, self._bias_to_add()) if self.skip_bias_add else y
