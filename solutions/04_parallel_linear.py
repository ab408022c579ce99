# %% [markdown]
# # 04 · Parallel linear layers
#
# Whether it's a GPT that trains on thousands of GPUs or a Llama that answers questions on two, most of the weights in a tensor-parallel model belong to one of two layers. In this chapter, you'll write both layers yourself. Then you'll be able to replace an `nn.Linear` with a parallel layer, and the rest of the model won't notice. The outputs, the gradients, and even the checkpoint will stay the same.
#
# You need chapters 02 and 03. About 75 minutes, plus 10 minutes for an optional section.

# %% tags=["setup"]
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tplab import device, launch, record, viz
from tplab.course import check, predict, symptoms
from tplab.tensor import (
    Sharding,
    copy_to_region,
    divide,
    gather_from_region,
    reduce_from_region,
    regression,
    scatter_to_region,
)

# %% [markdown]
# ## Which way is a column?
#
# In chapter 02, you split a matmul $XA$ either by the columns of $A$ or by its rows. A layer that splits the columns of $A$ is called **column-parallel**, and a layer that splits the rows is called **row-parallel**. But one detail trips up almost everybody: `nn.Linear` stores the *transpose* of $A$. The layer's `weight` has the shape
# `[out, in]`, and its output is $Y = XW^\top + b$.
#
# **Predict.** Suppose you replace an `nn.Linear(6, 8)` with a parallel layer that's split across two ranks. If the layer is column-parallel, what are the shapes of `weight` and `bias` on each rank? If the layer is row-parallel, what are the shapes of `weight` and `bias`? (Write `(3, 4)` for a matrix and `(3,)` for a vector.)

# %% predict="4.a"
predict("4.a", column_weight=(4, 6), column_bias=(4,), row_weight=(8, 3), row_bias=(8,))

# %% [markdown]
# Here's the rule to remember: *a column-parallel layer splits the outputs, and a row-parallel layer splits the inputs*. The picture below shows the shards of a weight with 12 outputs and 8 inputs. As you add ranks, only one of the weight's two dimensions shrinks.

# %%
linear = nn.Linear(in_features=8, out_features=12)


# %% tags=["explore"]
def show_split(kind, p):
    title = f"{kind}-parallel, p = {p} (rows: outputs, columns: inputs)"
    dim = 0 if kind == "column" else 1
    return viz.split(linear.weight.detach(), dim=dim, p=p, title=title)


viz.explore(show_split, kind=["column", "row"], p=(2, 4))

# %% [markdown]
# ## The column-parallel layer
#
# Suppose two ranks split $A$ into $[A_0, A_1]$. Each rank receives all of $X$ and computes its own columns of the output:
#
# $$Y = X\,[A_0, A_1] + [b_0, b_1] = [\,X A_0 + b_0,\; X A_1 + b_1\,]$$
#
# The bias is split the same way as the output, so each rank adds its own slice of the bias.
#
# That takes care of the forward pass. For the backward pass, you have the four operators from chapter 03:
#
# | operator | forward | backward |
# |---|---|---|
# | `copy_to_region(x, group)`, f | nothing | all-reduce of the gradient |
# | `reduce_from_region(x, group)`, g | all-reduce | nothing |
# | `scatter_to_region(x, group)` | keeps this rank's slice of the last dimension | all-gather of the gradient |
# | `gather_from_region(x, group)` | all-gather along the last dimension | keeps this rank's slice of the gradient |
#
# **Predict.** A column-parallel layer with 8 inputs and 12 outputs runs on four ranks. Its input is a float32 tensor of shape `[2, 3, 8]`, and each rank returns only its own slice of the output. How many collectives run in the forward pass? How many collectives run in the backward pass? How large is each message in the backward pass, in bytes?

# %% predict="4.b"
predict("4.b", calls_forward=0, calls_backward=1, bytes_backward=192)

# %% [markdown] task="4.1" title="ColumnParallelLinear" difficulty=2 minutes=12
# Set `weight_shape` and `bias_shape` in the constructor, and write the forward pass. `divide(n, p)` returns `n // p`, and it raises an error if `p` doesn't divide `n`. The constructor leaves the weight uninitialized. (The initialization, the attribute `tensor_parallel`, and the argument `stride` come later in this chapter.)
#
# The layer has a few options that real models need:
#
# - With `gather_output`, every rank returns the full output.
# - With `skip_bias_add`, the layer returns the pair (output without the bias, bias), so that the caller can add the bias and apply the next operation, such as GELU, in a single kernel.
# - `group` is the set of ranks that the layer is split across. A model can have several groups, for example one with ranks 0 and 2 and another with ranks 1 and 3. Each group has to work independently, so pass `self.group` to every function that communicates.


# %% exercise="4.1"
class ColumnParallelLinear(nn.Module):
    """Y = X A + b, with the columns of A split over the ranks of `group`.

    x [.., in], the same on every rank -> this rank's slice of Y, [.., out/p],
        or with `gather_output` all of Y, [.., out]

    With `skip_bias_add`, return the pair (output without the bias, self.bias), even if
    self.bias is None. With both options, the output is full but the bias is still a
    slice.
    """

    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        *,
        gather_output=False,
        skip_bias_add=False,
        stride=1,
        group=None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.gather_output = gather_output
        self.skip_bias_add = skip_bias_add
        self.group = group
        world_size = dist.get_world_size(group)
        ### BEGIN SOLUTION
        weight_shape = (divide(out_features, world_size), in_features)  # [out/p, in]
        bias_shape = (divide(out_features, world_size),)  # [out/p]
        ### END SOLUTION
        options = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(weight_shape, **options))
        self.weight.tensor_parallel = Sharding(dim=0, stride=stride)
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(bias_shape, **options))
            self.bias.tensor_parallel = Sharding(dim=0, stride=stride)

    def forward(self, x):
        ### BEGIN SOLUTION
        x = copy_to_region(x, self.group)  # [..., i]; backward: all-reduce of dx
        bias = None if self.skip_bias_add else self.bias
        out = F.linear(x, self.weight, bias)  # [..., o/p]
        if self.gather_output:
            out = gather_from_region(out, self.group)  # [..., o]
        return (out, self.bias) if self.skip_bias_add else out
        ### END SOLUTION


# %% [markdown] hints="4.1"
# 1. Which dimension of `weight` corresponds to the output features? That's the dimension to divide by `p`. In the backward pass, does a rank compute the complete gradient of `x`, or only one term of a sum?
# 2. Each rank uses only its own columns to compute a gradient of `x`, so each rank's result is only one term of the full gradient. Which operator sums gradients across ranks in the backward pass? Where does that operator go in `forward`? The rest of `forward` is a matmul with this rank's weight and bias, followed by a gather if the caller asked for one.
# 3. Start with `x = copy_to_region(x, self.group)`. Then compute `out = F.linear(x, self.weight, bias)`, where `bias = None if self.skip_bias_add else self.bias`. If `self.gather_output` is true, gather the result with `gather_from_region(out, self.group)`.
#    `F.linear` handles any number of leading dimensions.

# %% check="4.1"
check("4.1", ColumnParallelLinear)

# %% [markdown]
# ## The row-parallel layer, and its bias
#
# This time, the inputs are split, and the rows of $A$ are split to match. Each rank can compute one term of every output:
#
# $$Y = [X_0, X_1] \begin{bmatrix} A_0 \\ A_1 \end{bmatrix} + b = X_0 A_0 + X_1 A_1 + b$$
#
# The matmul is easy, but the bias is surprisingly hard to get right. In real code, we've seen people add the bias in four different ways, and only one of them is right.

# %% [markdown] task="4.2" title="RowParallelLinear" difficulty=3 minutes=12
# Write the row-parallel counterpart of your first layer, and find the right place for the bias. By default, each rank's `x` is already that rank's slice of the input. With `input_is_parallel=False`, every rank receives the full `x`, and the layer has to take the rank's slice itself.


# %% exercise="4.2"
class RowParallelLinear(nn.Module):
    """Y = X A + b, with the rows of A split over the ranks of `group`.

    this rank's slice of X, [.., in/p], or with `input_is_parallel=False` all of X,
        [.., in] -> Y [.., out], on every rank

    With `skip_bias_add`, return the pair (output without the bias, self.bias), even if
    self.bias is None.
    """

    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        *,
        input_is_parallel=True,
        skip_bias_add=False,
        stride=1,
        group=None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.input_is_parallel = input_is_parallel
        self.skip_bias_add = skip_bias_add
        self.group = group
        world_size = dist.get_world_size(group)
        ### BEGIN SOLUTION
        weight_shape = (out_features, divide(in_features, world_size))  # [out, in/p]
        bias_shape = (out_features,)  # [out]
        ### END SOLUTION
        options = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(weight_shape, **options))
        self.weight.tensor_parallel = Sharding(dim=1, stride=stride)
        self.bias = nn.Parameter(torch.zeros(bias_shape, **options)) if bias else None

    def forward(self, x):
        ### BEGIN SOLUTION
        if not self.input_is_parallel:
            x = scatter_to_region(x, self.group)  # [..., i/p]
        out = F.linear(x, self.weight)  # [..., o], a partial sum: no bias yet
        out = reduce_from_region(out, self.group)  # [..., o], the whole sum
        if self.skip_bias_add:
            return out, self.bias
        return out if self.bias is None else out + self.bias
        ### END SOLUTION


# %% [markdown] hints="4.2"
# 1. Which dimension of `weight` corresponds to the input features? Divide only this dimension by `p`. After the all-reduce, how many output features does each rank have? The bias needs one element for each of these features.
# 2. The forward pass has four steps: take a slice of the input if it isn't sharded yet, multiply, sum across the ranks, and add the bias. If the bias comes last, it's added only once, and every rank's copy of the bias gets its full gradient.
# 3. If `self.input_is_parallel` is false, start with `x = scatter_to_region(x, self.group)`. Compute `out = F.linear(x, self.weight)` without a bias, and sum the results with `out = reduce_from_region(out, self.group)`. Then return `out + self.bias`, or just `out` if there's no bias.
#    With `skip_bias_add`, return the pair `(out, self.bias)` instead.

# %% check="4.2"
check("4.2", RowParallelLinear)

# %% [markdown]
# The animation below shows both layers on two ranks, with the options `gather_output=True` and `input_is_parallel=False`. First, the column-parallel layer runs its forward pass (in black) and its backward pass (in red). Then the row-parallel layer does the same. (Here, the row-parallel layer's input is called Y, its weight is B, and its output is Z.)
#
# ![In a column-parallel layer, an all-gather collects the output in the forward pass, and f all-reduces the input's gradient in the backward pass. In a row-parallel layer, g all-reduces the output in the forward pass, and an all-gather collects the input's gradient in the backward pass.](pictures/layers.svg)
#
# <details><summary>All frames, one by one</summary>
#
# ![The same animation as numbered stills](pictures/layers_frames.svg)
#
# </details>
#
# ## Break it: three wrong ways to add the bias
#
# All three classes below come from real code, and all of them add the bias before the all-reduce. `EveryRank` adds `self.bias` on every rank, `Divided` adds `self.bias / p`, and `RankZero` adds `self.bias` on rank 0 only.
#
# **Predict.** On four ranks, how many times does `EveryRank` add the bias to the output? The output of `Divided` is correct, but what fraction of its true gradient does each rank's bias receive?

# %% predict="4.c"
predict("4.c", times_in_output=4, fraction_of_gradient=1 / 4)

# %% [markdown]
# Let's train these three classes on a small regression problem, along with your own layer and a plain `nn.Linear`. The parallel layers run on two ranks. The true bias is 2 for every output. Before you run the cell, guess which of the loss curves will look suspicious.


# %%
class EveryRank(RowParallelLinear):
    def forward(self, x):
        return reduce_from_region(F.linear(x, self.weight, self.bias), self.group)


class Divided(RowParallelLinear):
    def forward(self, x):
        bias = self.bias / dist.get_world_size(self.group)
        return reduce_from_region(F.linear(x, self.weight, bias), self.group)


class RankZero(RowParallelLinear):
    def forward(self, x):
        bias = self.bias if dist.get_rank(self.group) == 0 else None
        return reduce_from_region(F.linear(x, self.weight, bias), self.group)


runs = {
    cls.__name__: launch(regression.fit, 2, args=(cls,))
    for cls in (RowParallelLinear, EveryRank, Divided, RankZero)
}
plain = launch(regression.fit, 1, args=(nn.Linear,))
losses = {name: run[0]["losses"] for name, run in runs.items()}
viz.curves({"nn.Linear": plain[0]["losses"]} | losses, title="all five layers learn")

# %% [markdown]
# All five losses fall! `RankZero` even follows the correct curve exactly, and `EveryRank` ends with the lowest loss of all. Only `Divided` is a bit slow. In a real training run, you don't have a correct curve to compare them with, and all of these curves look healthy. So let's do what you'd do after any training run, and save the model. Then a single process loads the checkpoint. It needs the weight shards of both ranks, but only one rank's bias, because the bias is replicated.


# %%
loss_of = regression.loss_in_one_process
viz.table(
    [
        {
            "layer": name,
            "final loss": f"{run[0]['losses'][-1]:.3f}",
            "bias[0] on rank 0": f"{run[0]['bias'][0].item():.3f}",
            "bias[0] on rank 1": f"{run[1]['bias'][0].item():.3f}",
            "loss in one process, rank 0's bias": f"{loss_of(run, bias_of=0):.3f}",
            "loss in one process, rank 1's bias": f"{loss_of(run, bias_of=1):.3f}",
        }
        for name, run in runs.items()
    ]
)

# %% [markdown]
# In `EveryRank`, each rank's copy stopped at half of the true bias, because two copies are added to the output. So the layer still works on two ranks, but a single process adds the bias only once. The bias of `Divided` is further from its true value than the bias of your layer, because it learns more slowly. `RankZero` is the sneakiest, because its outputs, its losses, and its learning speed are all
# correct. But rank 1's bias never received a gradient, so that bias is still zero. Whether the checkpoint works depends on which rank saved it.
#
# That's why the check uses a nonzero bias and looks at the bias's gradient on *every* rank.
#
# ## A parameter that knows how it was split
#
# Suppose you want to save a model, load a checkpoint, or just count parameters. For each parameter, your code has to know whether the parameter is a full tensor or a shard and, if it's a shard, how the full tensor was split. That's what the attribute `param.tensor_parallel = Sharding(dim, stride)` is for. A parameter without this attribute is replicated.
#
# `dim` is the dimension that was split. To see what `stride` is for, take a model that computes `gate(x) * up(x)` with two linear layers. Such layers are often stored as one **fused** weight `[gate; up]`, with one layer's rows below the other's, because one large matmul is faster than two small ones. Suppose this weight has eight rows, so that rows 0 to 3 belong to `gate`, and rows 4 to 7 belong to `up`. To multiply matching outputs, a rank that has row 0 of `gate` also needs row 0 of `up`, which is row 4 of the weight. The `stride` is the
# number of blocks in the weight, here 2. (It has nothing to do with a tensor's strides in memory.) Here's what two ranks get if you split this weight as one block or as two blocks:

# %%
rows = torch.arange(8.0).reshape(8, 1)
quarters = rows.chunk(4)  # rows 0-1 and 2-3 of the gate, then rows 4-5 and 6-7 of up
viz.matrices(
    {
        "rank 0, stride 1": torch.cat(quarters[0:2]),
        "rank 1, stride 1": torch.cat(quarters[2:4]),
        "rank 0, stride 2": torch.cat([quarters[0], quarters[2]]),
        "rank 1, stride 2": torch.cat([quarters[1], quarters[3]]),
    },
)

# %% [markdown]
# With stride 1, rank 0 gets all of `gate` and rank 1 gets all of `up`, so neither rank can multiply matching outputs. With stride 2, each rank gets a slice of each layer, so every row of `gate` is on the same rank as the matching row of `up`.
#
# **Predict.** A fused weight `[q; k; v]` has 12 rows, in three blocks of four. Suppose this weight is split across two ranks with a stride of 3. Which rows does rank 1 hold? List the row numbers in order.

# %% predict="4.d"
predict("4.d", rows_of_rank_1=[2, 3, 6, 7, 10, 11])

# %% [markdown] task="4.3" title="Shard and unshard, with a stride" difficulty=3 minutes=10
# In exercise 2.1, you wrote both functions for a single block. Now the full tensor consists of `stride` blocks of the same size along `dim`, and each rank gets an equal slice of every block. In what order does `unshard` have to join the slices from all ranks? As in exercise 2.1, the functions don't communicate, and each shard has its own memory.


# %% exercise="4.3"
def shard(tensor, dim, rank, world_size, *, stride=1):
    """Return this rank's slice of each of the `stride` blocks, in order.

    [.., n, ..] -> [.., n/p, ..], in new memory

    Raises ValueError, naming n, if n isn't a multiple of world_size * stride.
    """
    ### BEGIN SOLUTION
    n = tensor.shape[dim]
    if n % (world_size * stride):
        raise ValueError(
            f"{n} entries along dim {dim} can't be split "
            f"into {stride} blocks with {world_size} equal slices each"
        )
    # block by block: p pieces of block 0, p pieces of block 1, ...
    pieces = tensor.chunk(world_size * stride, dim)
    return torch.cat(pieces[rank::world_size], dim)
    ### END SOLUTION


def unshard(shards, dim, *, stride=1):
    """Return the full tensor [.., n, ..].

    shards: the list of all p shards [.., n/p, ..], in rank order
    """
    ### BEGIN SOLUTION
    blocks = [piece.chunk(stride, dim) for piece in shards]  # [rank][block]
    parts = [piece for block in zip(*blocks, strict=True) for piece in block]
    return torch.cat(parts, dim)
    ### END SOLUTION


# %% [markdown] hints="4.3"
# 1. Split the full tensor into `p * stride` equal pieces along `dim`, and number these pieces from 0. With `p = 2` and `stride = 3`, which pieces belong to rank 0? Which pieces belong to rank 1?
# 2. Piece `k` belongs to rank `k % p`, so a Python slice with a step selects all the pieces of one rank. For `unshard`, split every shard into `stride` pieces. The full tensor starts with the first piece from each rank, followed by the second piece from each rank, and so on.
# 3. Split the tensor with `pieces = tensor.chunk(world_size * stride, dim)`, and return `torch.cat(pieces[rank::world_size], dim)`. The result has its own memory, because `torch.cat` always allocates new memory. For `unshard`, split the shards with `blocks = [piece.chunk(stride, dim) for piece in shards]`, and then loop over `zip(*blocks)` to collect the pieces in order.

# %% check="4.3"
check("4.3", shard, unshard)

# %% [markdown]
# ## Fix it: the initial values of a weight
#
# When people trained low-rank adapters (LoRA) with Megatron-Bridge, the final loss used to depend on how many GPUs each layer was split across. (The problem was reported in issue 5840 and fixed in pull request 5843.) The bug is in a harmless-looking line, in which each rank initializes its own shard:


# %%
def as_shipped(p):
    # the same seed on every rank, so that replicated parameters start out equal
    torch.manual_seed(0)
    # this rank's shard of a row-parallel weight [512, 512]
    weight = torch.empty(512, 512 // p)  # [512, 512/p]
    nn.init.xavier_normal_(weight)
    return weight


def table_row(p, draw):
    drawn = list(launch(draw, p, args=(p,)))  # p of [512, 512/p]
    equal = all(torch.equal(drawn[0], other) for other in drawn)
    return {
        "p": p,
        "standard deviation": f"{drawn[0].std().item():.4f}",
        "all shards equal": equal if p > 1 else None,
    }


viz.table([table_row(p, as_shipped) for p in (1, 2, 4)])

# %% [markdown]
# This line actually has two bugs. The first bug is the one described in the issue. `xavier_normal_` computes its standard deviation, $\sqrt{2/(\text{in} + \text{out})}$, from the shape of the tensor you pass to it. The function has no way of knowing that this tensor is only a shard of a larger weight. The second bug shows up when all ranks use the same seed, because then they all draw identical shards.

# %% [markdown] task="4.4" title="Fix the initial values" difficulty=2 minutes=8
# Fix both bugs. No matter how large `p` is, a model should start from exactly the same weights that a single process would draw. Don't communicate, and don't set or restore any random state, because the caller has already set the same seed on every rank.


# %% exercise="4.4"
def init_shard(param, full_shape, init_method, group=None):
    """Fill `param` in place. It's this rank's shard of a weight.

    full_shape: the shape of the whole weight, (out, in)
    param.tensor_parallel: how the weight is split
    init_method: draws random values and fills a tensor in place, as
        nn.init.xavier_normal_ does. It may return None
    """
    ### BEGIN SOLUTION
    sharding = param.tensor_parallel
    # the same on every rank
    master = torch.empty(full_shape, dtype=param.dtype, device=param.device)  # [o, i]
    init_method(master)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    part = shard(master, sharding.dim, rank, world_size, stride=sharding.stride)
    with torch.no_grad():
        param.copy_(part)
    ### BROKEN
    # with torch.no_grad():
    #     init_method(param)
    ### END SOLUTION


# %% [markdown] hints="4.4"
# 1. What shape is the tensor that a single process would pass to `init_method`? Could every rank draw a full tensor of that shape and then keep only its own shard? (Your function may hold one full weight in memory at a time.)
# 2. Allocate an empty tensor of the full shape, called the **master weight**, and have `init_method` fill it. Then copy this rank's shard of the master weight into `param`. Make this copy under `torch.no_grad()`, because autograd doesn't allow in-place changes to a parameter that requires a gradient.
# 3. Start with `master = torch.empty(full_shape, dtype=param.dtype, device=param.device)`, and call `init_method(master)`. Then, under `torch.no_grad()`, call
#    `param.copy_(shard(master, sharding.dim, dist.get_rank(group), dist.get_world_size(group), stride=sharding.stride))`, where `sharding` is `param.tensor_parallel`.

# %% check="4.4"
check("4.4", init_shard)

# %% [markdown]
# **Predict.** Let's go back to the broken version, with four ranks and a weight of shape `[512, 512]`. By what factor was the *variance* too large? Now suppose you concatenate the four shards. What's the rank of the resulting matrix, in the linear algebra sense? (A random matrix of this size would have rank 512.)

# %% predict="4.e"
predict("4.e", variance_factor=1.6, matrix_rank=128)


# %%
def fixed(p):
    weight = nn.Parameter(torch.empty(512, 512 // p, device=device()))  # [512, 512/p]
    weight.tensor_parallel = Sharding(dim=1)
    torch.manual_seed(0)
    init_shard(weight, (512, 512), nn.init.xavier_normal_)
    return weight.detach()


def concatenated(draw):
    full = torch.cat(list(launch(draw, 4, args=(4,))), dim=1)  # [512, 512]
    return {
        "four shards concatenated": draw.__name__,
        "variance × 512": f"{full.var().item() * 512:.2f}",
        "matrix rank": torch.linalg.matrix_rank(full).item(),
    }


viz.table([concatenated(draw) for draw in (as_shipped, fixed)])

# %% [markdown]
# So the broken layer's initial weight had only a quarter of the matrix rank it should have had, and no error message would ever have told you. Your fix takes some extra time, and it needs enough memory for one full weight. Very large models use a cheaper method, which we'll come back to in chapter 09.
#
# ## From a checkpoint to shards, and back
#
# Next, you'll move a model from a single process to `p` ranks, and you'll save a checkpoint that any other number of ranks can load. Every parameter carries its own `tensor_parallel` attribute, so one function for loading and one for saving are enough for every module in this course. In PyTorch, a dictionary that maps parameter names to tensors is called a **state dict**. In a *full* state
# dict, all tensors are unsharded. Ours contains only the parameters.

# %% [markdown] task="4.5" title="Load and save" difficulty=3 minutes=15
# In `load_full_state_dict`, every rank starts with the same full tensors and keeps only its own shards. In `full_state_dict`, every rank starts with its own shards and returns the full tensors. Saving takes one all-gather per sharded parameter and no communication at all for a replicated one. (On a single rank, you may skip the all-gather.) Both functions should work for the parameters of any module, including one that contains other modules. A parameter may be stored non-contiguously, as a transposed matrix is, but collectives need contiguous tensors. (As in `named_parameters()`, there are no buffers, and a parameter with two names appears only once.)


# %% exercise="4.5"
def load_full_state_dict(module, full_state, group=None):
    """Copy this rank's part of each full tensor into `module`'s parameters, in place.

    full_state: name -> full tensor
    """
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    with torch.no_grad():
        for name, param in module.named_parameters():
            value = full_state[name]
            sharding = getattr(param, "tensor_parallel", None)
            if sharding is not None:
                value = shard(
                    value, sharding.dim, rank, world_size, stride=sharding.stride
                )
            param.copy_(value)
    ### END SOLUTION


def full_state_dict(module, group=None):
    """Return name -> full tensor on every rank.

    The tensors are in new memory and have no gradient history.
    """
    ### BEGIN SOLUTION
    world_size = dist.get_world_size(group)
    full_state = {}
    for name, param in module.named_parameters():
        value = param.detach().clone(memory_format=torch.contiguous_format)
        sharding = getattr(param, "tensor_parallel", None)
        if sharding is not None and world_size > 1:
            shards = [torch.empty_like(value) for _ in range(world_size)]
            dist.all_gather(shards, value, group=group)
            value = unshard(shards, sharding.dim, stride=sharding.stride)
        full_state[name] = value
    return full_state
    ### END SOLUTION


# %% [markdown] hints="4.5"
# 1. Loop over `module.named_parameters()`, and look up `getattr(param, "tensor_parallel", None)` for each parameter. What does it mean if a parameter's `tensor_parallel` is `None`?
# 2. To load, call `shard` with the parameter's own `dim` and `stride`, and then call `param.copy_(...)` under `torch.no_grad()`. To save, gather the shards from all ranks into a list, and pass the list to `unshard`. The saved tensors must not change when training continues, so replicated parameters have to be copied as well.
# 3. To save a parameter, start with `value = param.detach().clone(memory_format=torch.contiguous_format)` and `shards = [torch.empty_like(value) for _ in range(world_size)]`, and then call `dist.all_gather(shards, value, group=group)`. If there's only one rank, you can skip the all-gather.

# %% check="4.5"
check("4.5", load_full_state_dict, full_state_dict)

# %% [markdown]
# Let's load and save a checkpoint with your own classes. Imagine that the `nn.Linear` below was trained in a single process. Two ranks load this layer's checkpoint, run their parallel layer, and save a new checkpoint. Then four ranks load the new checkpoint.

# %%
trained = nn.Linear(8, 12)
x = torch.randn(5, 8)


def load_run_save(state):
    layer = ColumnParallelLinear(8, 12, gather_output=True, device=device())
    load_full_state_dict(layer, state)
    return {
        "out": layer(x.to(device())),
        "state": full_state_dict(layer),
        "shape": list(layer.weight.shape),
    }


on_two = launch(load_run_save, 2, args=(dict(trained.state_dict()),))[0]
on_four = launch(load_run_save, 4, args=(on_two["state"],))[3]
rows = []
for p, result in ((2, on_two), (4, on_four)):
    difference = (result["out"] - trained(x)).abs().max().item()
    same = torch.equal(result["state"]["weight"], trained.weight)
    rows.append(
        {
            "p": p,
            "each rank's weight": result["shape"],
            "output differs by": f"{difference:.0e}",
            "saved weight is bit for bit the trained one": same,
        }
    )
viz.table(rows)

# %% [markdown]
# Come back to the table below when one of your parallel layers returns wrong values or doesn't train correctly.

# %%
symptoms(4)

# %% [markdown]
# ## Measure it, and compare it with PyTorch (optional)
#
# How much do the two layers communicate? For every variant of the layers, we trace one forward and one backward pass. Then we check the message sizes against a formula. The input has $b \cdot s$ tokens with $i$ features each. The output has $o$ features per token, and every element takes four bytes. The last column shows how many bytes each rank sends in a ring, as in chapter 02.

# %%
b, s, i, o = 2, 16, 64, 128


def count(layer_class, options):
    layer = layer_class(i, o, device=device(), **options)
    nn.init.normal_(layer.weight)
    features = i // dist.get_world_size() if options.get("input_is_parallel") else i
    x = torch.randn(b, s, features, device=device(), requires_grad=True)
    with record() as forward:
        out = layer(x)
    with record() as backward:
        out.backward(torch.randn_like(out))
    return [
        {kind: total.bytes for kind, total in section.totals().items()}
        for section in (forward, backward)
    ]


formulas = {4 * b * s * i: "4·b·s·i", 4 * b * s * o: "4·b·s·o"}
table = []
for layer_class, option in (
    (ColumnParallelLinear, {"gather_output": False}),
    (ColumnParallelLinear, {"gather_output": True}),
    (RowParallelLinear, {"input_is_parallel": True}),
    (RowParallelLinear, {"input_is_parallel": False}),
):
    passes = launch(count, 4, args=(layer_class, option))[0]
    options = ", ".join(f"{name}={value}" for name, value in option.items())
    row = {"layer": layer_class.__name__, "option": options}
    halves = 0
    for name, seen in zip(("forward", "backward"), passes, strict=True):
        calls = [f"{kind} {formulas.get(size, size)}" for kind, size in seen.items()]
        row[name] = ", ".join(calls)
        for kind, size in seen.items():
            halves += (2 if kind == "all_reduce" else 1) * size
    table.append(row | {"sent by each rank, in a ring": halves * 3 // 4})
sizes = f"4·b·s·i = {4 * b * s * i} bytes, 4·b·s·o = {4 * b * s * o} bytes"
viz.table(table, title=f"message sizes, p = 4, {sizes}")

# %% [markdown]
# `p` doesn't appear in the formulas, so adding ranks shrinks the weight shards but not the messages. Each layer comes in two variants. The cheap variant communicates in only one of the two passes, and the expensive variant communicates in both. Each of the two expensive variants sends one large and one small message. In a ring, an all-reduce costs twice as much as an all-gather of the same size, and here, the row-parallel layer all-reduces the larger message. That's why this layer sends more bytes in total.

# %% [markdown]
# Does your layer compute the same thing as PyTorch's own parallel layer? Let's run the two layers with the same weights, the same input, and the same upstream gradient.


# %%
def against_dtensor(state, x, dy):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mine = ColumnParallelLinear(8, 12, device=device())
    load_full_state_dict(mine, state)
    theirs = nn.Linear(8, 12, device=device())
    theirs.load_state_dict(state)
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    parallelize_module(theirs, mesh, ColwiseParallel())
    found = []
    for layer in (mine, theirs):
        leaf = x.to(device()).requires_grad_()
        out = layer(leaf)  # [5, 6]
        out.backward(dy.chunk(2, dim=-1)[dist.get_rank()].to(device()))
        found.append((out.detach(), leaf.grad))
    return [f"{(a - b).abs().max().item():.0e}" for a, b in zip(*found, strict=True)]


dy = torch.randn(5, 12)
out, dx = launch(against_dtensor, 2, args=(dict(trained.state_dict()), x, dy))[1]
print(f"largest differences: {out} in the output, {dx} in the input's gradient")

# %% [markdown]
# ## In the wild
#
# <details><summary>Going deeper: Megatron-Core, DTensor, inference engines, and copies that forget</summary>
#
# - **Megatron-Core** uses the names `ColumnParallelLinear` and `RowParallelLinear` as well. Both layers are in `megatron/core/tensor_parallel/layers.py`, and they have the options you already know. Megatron's layers always return two values, the output and the bias. Without `skip_bias_add`, the second element is `None`. Like your function, `_initialize_affine_weight_cpu` draws the full weight and keeps one shard.
#   `_initialize_affine_weight_gpu` draws each shard directly, using a different random generator on each rank. Instead of our single attribute `tensor_parallel`, Megatron uses three: `tensor_model_parallel`, `partition_dim`, and `partition_stride`.
#   Megatron used to keep its process groups in a global module. We pass `group` as an argument instead, so that two models with different layouts can live in one process.
# - **PyTorch's** `parallelize_module` turns a weight into a `DTensor`, which is a tensor that knows its own layout. `ColwiseParallel` means `Shard(0)`, `RowwiseParallel` means `Shard(1)`, and a row-parallel layer's bias is `Replicate()`. Before the all-reduce, the layer's output has the layout `Partial()`.
# - **Inference engines** run only the forward pass, so for them, two of the traps are perfectly fine. nano-vLLM adds the row-parallel bias on rank 0 only, and FastDeploy divides the bias by `p` when it loads a checkpoint.
# - **The three wrong biases** are real. The mistake of `EveryRank` was also reported in slapo (issue 10) and MinivLLM (issue 80), and Paddle fixed it in pull request 35186. Like `Divided`, torchtitan divides the bias by the number of ranks (pull request 3781), and pull request 4332 points out that this makes the gradient of the bias too small.
# - **Copies forget.** If you copy an `nn.Parameter` with `copy.deepcopy`, the copy loses any attributes that you've set (PyTorch issue 117275). A deep copy of your layer loses the attribute `tensor_parallel`, so all its parameters look replicated, and its checkpoint is wrong.
#
# </details>
#
# ## Your library so far
#
# Your library now contains the two layers that most later layers are built from, and it can load and save ordinary checkpoints.

# %%
from tplab.course import library

library(4)

# %% [markdown]
# You now have a column-parallel layer and a row-parallel layer, each in a cheap and an expensive variant. An MLP needs two linear layers in a row. Which two would you choose?
