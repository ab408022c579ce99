"""Chapter 05: a transformer's MLP, Z = act(X A) B, with one all-reduce each in the forward and backward passes.

If we split A by columns and B by rows, the first layer's output is already split the way the second layer needs it. The
activation is element-wise, so each rank applies it to its own columns, and nothing has to be sent in between.

    X -> f -> X A_r -> act -> Y_r B_r -> g -> Z        X, Z [b, s, h]    A_r [h, f/p]    B_r [f/p, h]

If we split A by rows instead, each rank would have one term of X A, and act(P + Q) isn't act(P) + act(Q).

SwiGLU has two matrices in the first layer, the gate G and the value U: Z = (silu(X G) * X U) B. They form one
column-parallel layer of width 2 f with stride 2, so that each rank has the same columns of G and U.

Traffic: there is one all-reduce of b s h elements in the forward pass (g) and one in the backward pass (f). Gathering Y
and splitting it again would take four collectives. (Shoeybi et al. 2019, "Megatron-LM", section 3 and figure 3a;
Shazeer 2020, "GLU variants"; Megatron: ParallelMLP, MLP.)
"""

from typing import Any, Unpack

from torch import Tensor, nn

from tplab.plain import ACTIVATIONS
from tplab.tensor.initialization import InitMethod
from tplab.tensor.linear import ColumnParallelLinear, LayerOptions, RowParallelLinear


class ParallelMLP(nn.Module):
    """MLP sharded over p ranks. Input x and output z are [b, s, h] and replicated; any leading dimensions are allowed.

    ffn_hidden_size       f, the inner width; None: 4 h
    activation            "gelu" (exact), "gelu_tanh" or "swiglu"
    skip_bias_add         return (z without bias, bias)
    output_init_method    initializes the full B in place; None: `init_method` (GPT-2 and Megatron scale by 1/sqrt(2 L))
    async_grad_allreduce  as in ColumnParallelLinear
    options               see `LayerOptions`; `init_method` initializes the full A, or the full [G | U]

    Parameters: `up` [f, h] (swiglu: [gate; up], [2 f, h]) and `down` [h, f]. Raises ValueError for an unknown
    activation, or if f isn't divisible by p.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int | None = None,
        activation: str = "gelu",
        *,
        bias: bool = True,
        skip_bias_add: bool = False,
        output_init_method: InitMethod | None = None,
        async_grad_allreduce: bool = False,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r} is not one of {', '.join(map(repr, ACTIVATIONS))}")
        ffn_hidden_size = 4 * hidden_size if ffn_hidden_size is None else ffn_hidden_size
        matrices = 2 if activation == "swiglu" else 1
        self.activation = activation
        self.up = ColumnParallelLinear(
            hidden_size, matrices * ffn_hidden_size, bias, stride=matrices, async_grad_allreduce=async_grad_allreduce,
            **options,
        )  # fmt: skip
        options["init_method"] = output_init_method or options.get("init_method")
        self.down = RowParallelLinear(ffn_hidden_size, hidden_size, bias, skip_bias_add=skip_bias_add, **options)

    def forward(self, x: Tensor) -> Any:
        y = self.up(x)  # [b, s, f/p], swiglu: [b, s, 2 f/p]
        y = ACTIVATIONS[self.activation](y)  # [b, s, f/p]
        return self.down(y)  # [b, s, h]
