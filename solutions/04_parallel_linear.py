# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 04 · Parallel linear layers
#
# **The question.** How do you replace one `nn.Linear` by `p` pieces on `p` ranks, so that the rest of the model cannot tell:
# the same output, the same gradients, the same checkpoint?
#
# **What you will have built.** `ColumnParallelLinear` and `RowParallelLinear`, the two layers that every tensor-parallel model is made of,
# and the functions that cut a trained `nn.Linear` into shards and glue the shards back together.
#
# Chapter 02 split the matrix product. Chapter 03 gave the four operators with their backward passes. This chapter puts them into modules
# with parameters. That brings three new questions: where does the bias go, where do the first values of the weights come from, and how does
# a checkpoint written by one process get into four?
#
# You need chapter 02 (`launch`, `device()`, and what **shard**, **replicated** and **partial** mean) and chapter 03 (the operators f, g, scatter and gather; they are listed
# again where you use them). About 90 minutes.
#
# Symbols: `b` batch, `s` sequence length, `i` input features, `o` output features, `p` number of ranks.

# %% tags=["setup"]
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tplab import device, launch, record, viz
from tplab.course import check, predict, show_failure, symptoms
from tplab.tensor import Sharding, copy_to_region, divide, gather_from_region, reduce_from_region, scatter_to_region

# %% [markdown]
# The two layers in one picture each. Every colour is a rank; grey is what every rank holds whole.

# %%
viz.product((4, 8), (8, 12), kind="column", p=2, title="ColumnParallelLinear: each rank computes some columns of Y")

# %%
viz.product((4, 8), (8, 12), kind="row", p=2, title="RowParallelLinear: each rank computes one term of the sum")

# %% [markdown]
# ## 1 · Which way is a column?
#
# Papers write a linear layer as $Y = XA + b$ with $A$ of shape `[i, o]`. PyTorch stores the transpose: `nn.Linear(i, o).weight` is
# `[o, i]`, and the layer computes $Y = X W^\top + b$. So a *column* of $A$ is a *row* of `weight`:
#
# | layer | the papers cut | PyTorch cuts | so each rank holds |
# |---|---|---|---|
# | **column-parallel** | the columns of $A$ | `weight` along `dim=0` | some of the output features, computed from all inputs |
# | **row-parallel** | the rows of $A$ | `weight` along `dim=1` | all of the output features, computed from some of the inputs |
#
# The names follow the papers. If you remember one thing, remember this: *column-parallel splits the outputs, row-parallel splits the inputs.*
#
# The next cell starts two real processes. Each cuts its own shard out of the same weight `[12, 8]` and sends it back; the pictures are drawn
# from what came back.

# %%
linear = nn.Linear(in_features=8, out_features=12)


def cut(weight):
    """What this rank would hold of `weight` [12, 8], cut along each dimension."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return {dim: weight.chunk(world_size, dim)[rank] for dim in (0, 1)}


shards = launch(cut, 2, args=(linear.weight.detach(),))
column, row = ([shard[dim] for shard in shards] for dim in (0, 1))
print(
    "column-parallel:", [list(piece.shape) for piece in column], " row-parallel:", [list(piece.shape) for piece in row]
)

# %%
viz.split(torch.cat(column, dim=0), dim=0, p=2, title="column-parallel: weight [o, i] is cut along o (dim 0)")

# %%
viz.split(torch.cat(row, dim=1), dim=1, p=2, title="row-parallel: weight [o, i] is cut along i (dim 1)")

# %% [markdown]
# Move the controls. Watch the shape in the title: one of the two numbers shrinks with `p`, the other never does.


# %% tags=["explore"]
def show_cut(p, kind):
    dim = 0 if kind == "column" else 1
    return viz.split(linear.weight.detach(), dim=dim, p=p, title=f"{kind}-parallel, p = {p}")


viz.explore(show_cut, p=(2, 4), kind=["column", "row"])

# %% [markdown]
# **Predict.** `nn.Linear(6, 8)` on `p = 2` ranks. Which shape has the weight of each rank, and the bias of each rank? The bias has one number per
# output feature. Replace the dots by shapes: `(3, 4)` for a matrix, `(3,)` for a vector.

# %% predict="4.a"
predict("4.a", column_weight=(4, 6), column_bias=(4,), row_weight=(8, 3), row_bias=(8,))

# %% [markdown]
# ## 2 · The column-parallel layer
#
# Every rank gets the whole input and computes its own slice of the output:
#
# $$Y = X\,[A_0, A_1] + [b_0, b_1] = [\,X A_0 + b_0,\; X A_1 + b_1\,]$$
#
# Nothing has to be communicated in the forward pass. The bias is cut like the output, so each rank adds its own slice.
#
# The backward pass is another matter. Each rank gets the gradient of its own slice, $dY_r$, and can compute $dX$ only through its own columns:
# $dY_r A_r^\top$. The true gradient is the sum over all ranks. That sum is what the operator **f** (`copy_to_region`) is for: it does
# nothing in the forward pass and all-reduces in the backward pass.
#
# The four operators of chapter 03, which you import here:
#
# | operator | forward | backward |
# |---|---|---|
# | `copy_to_region(x, group)`, f | leaves `x` alone | all-reduce of the gradient |
# | `reduce_from_region(x, group)`, g | all-reduce | leaves the gradient alone |
# | `scatter_to_region(x, group)` | keeps this rank's slice of the last dimension | all-gather of the gradient |
# | `gather_from_region(x, group)` | all-gather along the last dimension | keeps this rank's slice of the gradient |
#
# `gather_output=True` asks the layer to return the whole `Y` on every rank. `skip_bias_add=True` asks it not to add the bias, and to return it next
# to the output instead: a caller that has another elementwise operation coming (a GELU, a dropout) can then do both in one pass over the numbers.
#
# Every parallel layer also takes a `group`: the process group (chapter 01) in which its ranks talk to each other, with a numbering of its own, from 0; `None` means all ranks. A model that is parallel in two ways has several, for example `[0, 2]` and `[1, 3]`, and what happens in one must not touch the other. So every call that asks for a rank or a size, or
# communicates, is told the group: `dist.get_rank(group)`, `dist.get_world_size(group)`, `copy_to_region(x, group)`. The checks try two groups as well.
#
# **Predict.** A column-parallel layer with `gather_output=False`, input `[b, s, i]` = `[2, 3, 8]`, output features 12, `p = 4`, four bytes a number. Which
# collectives run, counted on one rank? `bytes_backward` is the size of the tensor that is all-reduced.

# %% predict="4.b"
predict("4.b", calls_forward=0, calls_backward=1, bytes_backward=192)

# %% [markdown] task="4.1" title="ColumnParallelLinear" difficulty=2 minutes=15
# Fill in the two gaps.
#
# 1. In `__init__`: the shapes of this rank's `weight` and `bias`. `divide(n, p)` returns `n // p` and raises a clear error when `p` does not divide `n`.
# 2. `forward`: the input is replicated. Use the operators, do not call `dist` yourself, and pass `self.group` on.
#
# The constructor leaves the weights uninitialised: the checks and the cells below load weights of their own, and exercise 4.4 is about first values. It also notes on each parameter how it was cut, in the attribute `tensor_parallel`;
# what that is for, and what `stride` means, comes in section 5. Here both are given.


# %% exercise="4.1"
class ColumnParallelLinear(nn.Module):
    """Y = X A + b with the columns of A, and so the output features, split over the ranks of `group`.

    in:  x, replicated                                   [..., i]
    out: this rank's slice of the output                 [..., o/p]
         with gather_output: the whole output            [..., o]
         with skip_bias_add: the pair (output without the bias, self.bias)
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
        weight_shape = (divide(out_features, world_size), in_features)  # [o/p, i]
        bias_shape = (divide(out_features, world_size),)  # [o/p]
        ### END SOLUTION
        self.weight = nn.Parameter(torch.empty(weight_shape, device=device, dtype=dtype))
        self.weight.tensor_parallel = Sharding(dim=0, stride=stride)
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(bias_shape, device=device, dtype=dtype))
            self.bias.tensor_parallel = Sharding(dim=0, stride=stride)

    def forward(self, x):
        ### BEGIN SOLUTION
        x = copy_to_region(x, self.group)  # [..., i]; backward: all-reduce of dx
        out = F.linear(x, self.weight, None if self.skip_bias_add else self.bias)  # [..., o/p]
        if self.gather_output:
            out = gather_from_region(out, self.group)  # [..., o]
        return (out, self.bias) if self.skip_bias_add else out
        ### END SOLUTION


# %% [markdown] hints="4.1"
# 1. Which of the two dimensions of `weight` counts output features? That one is divided by `p`. The bias has one number per output feature of this rank.
# 2. The forward pass has three steps: f on the input, a linear map with this rank's weight and bias, and perhaps a gather at the end. The gather comes after
#    the bias, because the bias is a slice too.
# 3. `x = copy_to_region(x, self.group)`, then `out = F.linear(x, self.weight, bias)` with `bias = None if self.skip_bias_add else self.bias`, then
#    `gather_from_region(out, self.group)` if asked. `F.linear` works for any number of leading dimensions.

# %% check="4.1"
check("4.1", ColumnParallelLinear)

# %% [markdown]
# Your layer on four real ranks. The input is the identity matrix, so that the output is the weight itself, transposed, and the bias is zero: each rank shows the columns
# that it owns.


# %%
def show_columns(gather_output):
    layer = ColumnParallelLinear(4, 8, gather_output=gather_output, device=device())
    rank = dist.get_rank(layer.group)
    with torch.no_grad():
        layer.weight.fill_(rank)  # every weight of rank r is the number r
        return layer(torch.eye(4, device=device()))  # [4, 8/p], or [4, 8] gathered


slices = launch(show_columns, 4, args=(False,))
viz.matrices({f"rank {rank}": out for rank, out in enumerate(slices)})

# %%
viz.matrices({"rank 2, gather_output=True": launch(show_columns, 4, args=(True,))[2]})

# %% [markdown]
# ## 3 · The row-parallel layer, and where the bias goes
#
# Now the inputs are split, and so are the rows of $A$. Each rank has a part of every output:
#
# $$Y = [X_0, X_1] \begin{bmatrix} A_0 \\ A_1 \end{bmatrix} + b = \underbrace{X_0 A_0}_{\text{rank 0}} + \underbrace{X_1 A_1}_{\text{rank 1}} + b$$
#
# $X_r A_r$ is **partial**, a partial sum: the right shape `[b, s, o]`, but only one of the `p` terms. The operator **g** (`reduce_from_region`) adds them: all-reduce in the
# forward pass, nothing in the backward pass.
#
# The bias is not part of the sum that is split. It has one number per output, every rank ends up with every output, so every rank keeps the whole bias: it
# is replicated. The formula has it once. Four places suggest themselves, and three of them are traps.
#
# **Predict.** Somebody calls `F.linear(x, self.weight, self.bias)` on every rank and then all-reduces, with `p = 4`. How many times is the bias in the output? Somebody else
# notices and uses `self.bias / p` instead. The output is right now. But what fraction of its true gradient does the bias on each rank then get? (A number such as 1/2; 1 means all of it.)

# %% predict="4.c"
predict("4.c", times_in_output=4, fraction_of_gradient=1 / 4)

# %% [markdown]
# `input_is_parallel=True` says that `x` arrives already split, as a column-parallel layer leaves it. With `False` the input is replicated and the layer takes its own slice first.

# %% [markdown] task="4.2" title="RowParallelLinear" difficulty=3 minutes=15
# The same two gaps. Think about which operator each case needs, and about the exact line where the bias is added.


# %% exercise="4.2"
class RowParallelLinear(nn.Module):
    """Y = X A + b with the rows of A, and so the input features, split over the ranks of `group`.

    in:  this rank's slice of the input                  [..., i/p]
         with input_is_parallel=False: x, replicated     [..., i]
    out: the whole output, replicated                    [..., o]
         with skip_bias_add: the pair (output without the bias, self.bias)
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
        weight_shape = (out_features, divide(in_features, world_size))  # [o, i/p]
        bias_shape = (out_features,)  # [o]
        ### END SOLUTION
        self.weight = nn.Parameter(torch.empty(weight_shape, device=device, dtype=dtype))
        self.weight.tensor_parallel = Sharding(dim=1, stride=stride)
        self.bias = nn.Parameter(torch.zeros(bias_shape, device=device, dtype=dtype)) if bias else None

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
# 1. Which dimension of `weight` counts input features? Only that one is divided. The bias has one number per output feature, and no output feature is missing on any rank.
# 2. Slice the input if it is not sliced yet, multiply, add up over the ranks, add the bias. The bias comes after the sum over the ranks, so that it is added once.
# 3. `scatter_to_region` if `not self.input_is_parallel`; `out = F.linear(x, self.weight)` without a bias; `out = reduce_from_region(out, self.group)`; then `out + self.bias`, unless
#    there is no bias or `skip_bias_add` hands it back.

# %% check="4.2"
check("4.2", RowParallelLinear)

# %% [markdown]
# ## 4 · Break it: three wrong places for the bias
#
# Below are three row-parallel layers, each with the bias in a place where real code has put it. Each one learns the same small regression on two real ranks, next to your layer and to a plain
# `nn.Linear` on one process. The true bias is 2.0 for every output. Before you run it: which of the curves will look wrong?


# %%
class EveryRank(RowParallelLinear):
    def forward(self, x):
        return reduce_from_region(F.linear(x, self.weight, self.bias), self.group)


class Divided(RowParallelLinear):
    def forward(self, x):
        return reduce_from_region(F.linear(x, self.weight, self.bias / dist.get_world_size(self.group)), self.group)


class RankZero(RowParallelLinear):
    def forward(self, x):
        bias = self.bias if dist.get_rank(self.group) == 0 else None
        return reduce_from_region(F.linear(x, self.weight, bias), self.group)


generator = torch.Generator().manual_seed(0)
true_weight, true_bias = torch.randn(4, 8, generator=generator), torch.full((4,), 2.0)
inputs = torch.randn(64, 8, generator=generator)
targets = inputs @ true_weight.T + true_bias  # [64, 4]


def fit(layer, x, y, steps=40):
    """Plain SGD; returns the loss of every step."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.2)
    losses = []
    for _ in range(steps):
        loss = F.mse_loss(layer(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def fit_sharded(layer_class):
    layer = layer_class(8, 4, device=device())  # every rank holds 8/p of the inputs
    nn.init.zeros_(layer.weight)
    x_shard = inputs.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()]  # [64, 8/p]
    losses = fit(layer, x_shard.to(device()), targets.to(device()))
    return {"losses": losses, "weight": layer.weight.detach(), "bias": layer.bias.detach()}


plain = nn.Linear(8, 4)
nn.init.zeros_(plain.weight), nn.init.zeros_(plain.bias)
curves = {"one process": fit(plain, inputs, targets)}
runs = {}
for layer_class in (RowParallelLinear, EveryRank, Divided, RankZero):
    runs[layer_class.__name__] = launch(fit_sharded, 2, args=(layer_class,))
    curves[layer_class.__name__] = runs[layer_class.__name__][0]["losses"]
viz.curves(curves, title="every one of them learns")

# %% [markdown]
# All five losses fall. Of the wrong ones, one lies exactly on the right curve, and two are a little faster or slower, and nobody looks at a loss curve that closely. Now do what happens at the end of every training: each rank writes its shards into
# a checkpoint, and one process loads it.


# %%
def reloaded(run, rank):
    """The loss of one process with everybody's weights and the bias that `rank` wrote."""
    weight = torch.cat([result["weight"] for result in run], dim=1)  # [4, 8]
    return F.mse_loss(F.linear(inputs, weight, run[rank]["bias"]), targets).item()


viz.table(
    [
        {
            "layer": name,
            "last loss": f"{run[0]['losses'][-1]:.3f}",
            "bias[0] on rank 0": f"{run[0]['bias'][0].item():.3f}",
            "bias[0] on rank 1": f"{run[1]['bias'][0].item():.3f}",
            "loss, checkpoint of rank 0": f"{reloaded(run, 0):.3f}",
            "loss, checkpoint of rank 1": f"{reloaded(run, 1):.3f}",
        }
        for name, run in runs.items()
    ]
)

# %% [markdown]
# Read the table before you go on.
#
# - `EveryRank` learned half of the true bias, 0.99 instead of 2, because it is added twice. Training never notices. The checkpoint is wrong for any other `p`. At the start of training the bias is zero, so a comparison of outputs at step 0 does not notice either.
# - `Divided` computes the right output, but each rank sees only `1/p` of the gradient: the bias learns `p` times more slowly than it should.
# - `RankZero` also computes the right output. But on rank 1 the bias gets no gradient at all, so its copy stays at zero. The replicas have drifted apart, and whether the checkpoint is right depends on which rank wrote it.
#
# This is why the check above looks at `db` on *every* rank and draws a bias that is not zero. The first of these bugs was reported in MinivLLM (#80), in slapo (#10) and, with a repair, in Paddle (#35186).
#
# The next mistake is kinder, because it is loud. A row-parallel layer with `input_is_parallel=True` gets the whole input by mistake. Read the report: which rank, which line, which two numbers do not fit?


# %%
def whole_input():
    layer = RowParallelLinear(8, 4, device=device())
    return layer(torch.randn(2, 8, device=device()))


with show_failure():
    launch(whole_input, 2)

# %% [markdown]
# Both ranks fail, in the line of *your* `forward` that multiplies: `x` has 8 columns, and this rank's weight takes 4 inputs, half of them. Either the caller passes a slice, or the layer is built with `input_is_parallel=False`.
#
# What you see, and what it is, for the mistakes of this chapter:

# %%
symptoms(4)

# %% [markdown]
# ## 5 · A parameter that says how it was cut
#
# To save a model, to load one, to count its parameters or its gradient norm, code must know for each parameter: is this a shard, and of what? A list of layer names somewhere else would get out of date. So each sharded parameter says so itself:
# `param.tensor_parallel = Sharding(dim, stride)`. A parameter without that attribute is replicated.
#
# `dim` is the dimension that was cut. `stride` is needed for **fused** weights. Two linear layers that read the same input are often stored as one weight, one below the other, because one large matrix product is faster than two small ones. The gated MLP of
# chapter 05 fuses `[gate; up]`, attention in chapter 06 fuses `[q; k; v]`. Each of these parts is a **block**, and `stride` is the number of blocks.
#
# Suppose `weight = [gate; up]` has eight rows, 0 to 3 for the gate and 4 to 7 for up. The model multiplies output `j` of the gate by output `j` of up, so a rank needs the *same* `j` of both. Here are the row numbers that each of two ranks gets:

# %%
rows = torch.arange(8.0).reshape(8, 1)
pieces = rows.chunk(4)  # gate 0-1, gate 2-3, up 4-5, up 6-7
viz.matrices(
    {
        "rank 0, stride 1": torch.cat(pieces[0:2]),
        "rank 1, stride 1": torch.cat(pieces[2:4]),
        "rank 0, stride 2": torch.cat([pieces[0], pieces[2]]),
        "rank 1, stride 2": torch.cat([pieces[1], pieces[3]]),
    },
    ranks=[0, 1, 0, 1],
)

# %% [markdown]
# With the contiguous cut (stride 1) rank 0 has all of the gate and rank 1 all of up: no rank has a matching pair. With stride 2 each rank takes its piece of every block.
#
# **Predict.** A fused weight `[q; k; v]` of 12 rows: three blocks of four. `p = 2`, `stride = 3`. Which rows does rank 1 hold, in order?

# %% predict="4.d"
predict("4.d", rows_of_rank_1=[2, 3, 6, 7, 10, 11])

# %% [markdown] task="4.3" title="Cut and glue" difficulty=3 minutes=15
# You wrote both in chapter 02 for a single block; now for `stride` blocks. Two pure functions, no communication. `shard` cuts this rank's piece out of a full tensor, `unshard` is its inverse: it gets the list of all `p` shards, in rank order, and puts the full tensor together.
#
# - Along `dim`, which may be negative, the full tensor consists of `stride` blocks of equal size. Each block is cut into `p` pieces.
# - The shard must have memory of its own. A slice such as `full[0:4]` is a view: it keeps the *whole* tensor alive, and then sharding saves no memory at all.
# - If the size along `dim` is not divisible by `p * stride`, raise `ValueError`, with the numbers in the message.


# %% exercise="4.3"
def shard(tensor, dim, rank, world_size, *, stride=1):
    """This rank's piece of the full `tensor`.

    in:  tensor [..., n, ...] with n at `dim`
    out: [..., n/p, ...], its own memory: this rank's piece of each of the `stride` blocks, in order
    """
    ### BEGIN SOLUTION
    n = tensor.shape[dim]
    if n % (world_size * stride):
        raise ValueError(f"{n} entries along dim {dim} can't be cut into {stride} blocks of {world_size} equal pieces")
    pieces = tensor.chunk(world_size * stride, dim)  # block by block: p pieces of block 0, p pieces of block 1, ...
    return torch.cat(pieces[rank::world_size], dim)
    ### END SOLUTION


def unshard(shards, dim, *, stride=1):
    """The full tensor from the shards of all ranks.

    in:  shards, a list of p tensors [..., n/p, ...] in rank order
    out: [..., n, ...]
    """
    ### BEGIN SOLUTION
    blocks = [piece.chunk(stride, dim) for piece in shards]  # [rank][block]
    return torch.cat([piece for block in zip(*blocks, strict=True) for piece in block], dim)
    ### END SOLUTION


# %% [markdown] hints="4.3"
# 1. Cut the full tensor into `p * stride` equal pieces along `dim` and write their numbers down for `p = 2`, `stride = 3`. Which of them belong to rank 0, which to rank 1?
# 2. Piece number `k` belongs to rank `k % p`. Python's slice with a step picks these. For the way back, cut every shard into `stride` pieces and take the first piece of each rank, then the second of each rank, and so on.
# 3. `pieces = tensor.chunk(world_size * stride, dim)` and `torch.cat(pieces[rank::world_size], dim)`; `torch.cat` always makes new memory. Back: `blocks = [piece.chunk(stride, dim) for piece in shards]`, then walk over `zip(*blocks)`.

# %% check="4.3"
check("4.3", shard, unshard)

# %% [markdown]
# ## 6 · The first values of a weight
#
# Suppose each rank simply calls `nn.init.xavier_normal_` on its own shard. Two things go wrong. The recipe takes its standard deviation from the shape, $\sqrt{2/(i+o)}$, and the shard has the wrong shape. And if all ranks start from the same seed, as they must so that replicated
# parameters agree, all shards are the same numbers. See both:


# %%
def draw_directly(p):
    torch.manual_seed(0)
    weight = torch.empty(512 // p, 512)  # [o/p, i]
    nn.init.xavier_normal_(weight)
    return weight


def drawn_directly(p):
    drawn = launch(draw_directly, p, args=(p,))
    equal = all(torch.equal(drawn[0], other) for other in drawn)
    return {"p": p, "standard deviation": f"{drawn[0].std().item():.4f}", "all shards equal": equal if p > 1 else None}


viz.table([drawn_directly(p) for p in (1, 2, 4)])

# %% [markdown]
# The remedy is a **master weight**: every rank draws the full weight, from the same seed and so with the same numbers, keeps its own shard and throws the rest away. The model then starts from the same point for every `p`, which is what makes the loss curves of
# chapter 05 comparable. It costs time and one full weight at a time, so very large models do something cheaper; chapter 09 comes back to it.

# %% [markdown] task="4.4" title="Init from a master weight" difficulty=2 minutes=10
# `param.tensor_parallel` tells how the parameter was cut; use your `shard`. Draw the master with the shape, dtype and device that the full parameter would have. Do not set a seed: the caller did, and the numbers that are drawn must be exactly
# those that one process would draw. Do not communicate.


# %% exercise="4.4"
def init_from_master(param, full_shape, init_method, group=None):
    """Fill `param` in place with this rank's shard of a full weight drawn by `init_method`.

    param       this rank's shard, [o/p, i] or [o, i/p], with param.tensor_parallel = Sharding(dim, stride)
    full_shape  (o, i)
    init_method fills a tensor in place, as nn.init.xavier_normal_ does
    """
    ### BEGIN SOLUTION
    sharding = param.tensor_parallel
    master = torch.empty(full_shape, dtype=param.dtype, device=param.device)  # [o, i], the same on every rank
    init_method(master)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    with torch.no_grad():
        param.copy_(shard(master, sharding.dim, rank, world_size, stride=sharding.stride))
    ### END SOLUTION


# %% [markdown] hints="4.4"
# 1. Three steps: an empty tensor of the full shape, let `init_method` fill it, copy this rank's piece into `param`.
# 2. `param` requires a gradient, so an in-place change outside `torch.no_grad()` is an error. Copy into it instead of replacing it: the optimizer holds on to this very object.
# 3. `master = torch.empty(full_shape, dtype=param.dtype, device=param.device)`, `init_method(master)`, then under `torch.no_grad()`
#    `param.copy_(shard(master, sharding.dim, dist.get_rank(group), dist.get_world_size(group), stride=sharding.stride))`.

# %% check="4.4"
check("4.4", init_from_master)

# %% [markdown]
# The table from above once more, now with your function. The last column puts the shards of all ranks together and compares them with the weight that one process draws:


# %%
def draw_from_master(p):
    weight = nn.Parameter(torch.empty(512 // p, 512, device=device()))  # [o/p, i]
    weight.tensor_parallel = Sharding(dim=0)
    torch.manual_seed(0)
    init_from_master(weight, (512, 512), nn.init.xavier_normal_)
    return weight.detach()


on_one = launch(draw_from_master, 1, args=(1,))[0]  # [512, 512]


def drawn_from_master(p):
    drawn = list(launch(draw_from_master, p, args=(p,)))
    equal = all(torch.equal(drawn[0], other) for other in drawn)
    return {
        "p": p,
        "standard deviation": f"{drawn[0].std().item():.4f}",
        "all shards equal": equal if p > 1 else None,
        "together, the weight of one process": torch.equal(torch.cat(drawn), on_one),
    }


viz.table([drawn_from_master(p) for p in (1, 2, 4)])

# %% [markdown]
# ## 7 · A trained model into shards, and back
#
# Now everything is there to take a model that one process has trained and run it on `p` ranks, and to write a checkpoint that any other `p` can read. Both directions are written once, for every module, because each parameter carries its `tensor_parallel`. A **state dict** is PyTorch's
# dictionary from parameter name to tensor; a *full* state dict is the one that a single process would have (here: its parameters only).

# %% [markdown] task="4.5" title="Load and save" difficulty=3 minutes=20
# `load_full_state_dict` needs no communication: every rank reads the same full dictionary and keeps its piece. `full_state_dict` needs one all-gather for each sharded parameter and nothing for a replicated one. Both work on any module, also one that contains
# several layers: walk over `module.named_parameters()`.


# %% exercise="4.5"
def load_full_state_dict(module, full_state, group=None):
    """Copy this rank's part of every full tensor into the parameters of `module`, in place.

    in:  full_state, name -> full tensor, the same on every rank
    """
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    with torch.no_grad():
        for name, param in module.named_parameters():
            value = full_state[name]
            sharding = getattr(param, "tensor_parallel", None)
            if sharding is not None:
                value = shard(value, sharding.dim, rank, world_size, stride=sharding.stride)
            param.copy_(value)
    ### END SOLUTION


def full_state_dict(module, group=None):
    """The full state dict, on every rank: new tensors, detached from autograd and from the parameters.

    out: name -> full tensor
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
# 1. In both functions ask each parameter `getattr(param, "tensor_parallel", None)`. `None` means replicated: copy it as it is.
# 2. Loading: `shard` with the parameter's own `dim` and `stride`, then `param.copy_(...)` under `torch.no_grad()`. Saving: gather the shards of all ranks into a list, then `unshard`. A replicated parameter still has to be copied: the dictionary must not change when training goes on.
# 3. `shards = [torch.empty_like(value) for _ in range(world_size)]` and `dist.all_gather(shards, value, group=group)` with `value = param.detach().contiguous()`; in a module whose `p` is 1 there is nothing to gather, but still something to clone.

# %% check="4.5"
check("4.5", load_full_state_dict, full_state_dict)

# %% [markdown]
# The whole way, on your own classes: one process has a trained `nn.Linear`; two ranks load it, run it, save it; four ranks load what the two saved.

# %%
trained = nn.Linear(8, 12)
x = torch.randn(5, 8)


def load_run_save(state):
    layer = ColumnParallelLinear(8, 12, gather_output=True, device=device())
    load_full_state_dict(layer, state)
    return {"out": layer(x.to(device())), "state": full_state_dict(layer), "shape": list(layer.weight.shape)}


on_two = launch(load_run_save, 2, args=(dict(trained.state_dict()),))[0]
on_four = launch(load_run_save, 4, args=(on_two["state"],))[3]
for p, result in ((2, on_two), (4, on_four)):
    difference = (result["out"] - trained(x)).abs().max().item()
    same = torch.equal(result["state"]["weight"], trained.weight)
    print(
        f"p = {p}: weight of each rank {result['shape']}, output differs by {difference:.1e}, saved weight is bit for bit the trained one: {same}"
    )

# %% [markdown]
# ## 8 · Measure it
#
# What do the two layers cost? For each, in all its forms, the bytes of the messages in one forward and backward pass, counted by the recorder as in chapter 03 (an all-gather counts all parts together), next to the formula. The input is `[b, s, i]`, four bytes a number.

# %%
b, s, i, o = 2, 16, 64, 128


def count(layer_class, options):
    """Bytes of the collectives in one forward and one backward pass."""
    layer = layer_class(i, o, device=device(), **options)
    nn.init.normal_(layer.weight)
    sliced = options.get("input_is_parallel", False)
    features = i // dist.get_world_size() if sliced else i
    x = torch.randn(b, s, features, device=device(), requires_grad=True)
    with record() as forward:
        out = layer(x)
    with record() as backward:
        out.backward(torch.randn_like(out))
    sizes = [sum(total.bytes for total in section.totals().values()) for section in (forward, backward)]
    return {"forward": sizes[0], "backward": sizes[1], "weights": layer.weight.numel()}


cases = [
    (ColumnParallelLinear, {"gather_output": False}, "0", 0, "b·s·i", b * s * i),
    (ColumnParallelLinear, {"gather_output": True}, "b·s·o", b * s * o, "b·s·i", b * s * i),
    (RowParallelLinear, {"input_is_parallel": True}, "b·s·o", b * s * o, "0", 0),
    (RowParallelLinear, {"input_is_parallel": False}, "b·s·o", b * s * o, "b·s·i", b * s * i),
]
rows = []
for layer_class, options, forward_formula, forward, backward_formula, backward in cases:
    seen = launch(count, 4, args=(layer_class, options))[0]
    rows.append(
        {
            "layer": layer_class.__name__,
            "option": ", ".join(f"{name}={value}" for name, value in options.items()),
            "weights of a rank": seen["weights"],
            "forward": seen["forward"],
            "formula": f"{forward_formula} → {4 * forward}",
            "backward": seen["backward"],
            "formula ": f"{backward_formula} → {4 * backward}",
        }
    )
viz.table(rows, title="p = 4, bytes of one rank's collectives")

# %% [markdown]
# Three things to see. No formula contains `p`: more ranks make the weights smaller, not the messages. A column layer without gather is free in the forward pass, a row layer with a split input is free in the backward pass. And the second form of each layer pays on
# both ways. So the cheap combination is a column layer whose output stays split, followed by a row layer that takes it as it is. That is chapter 05.
#
# Time is another question, and on one machine whose cores the ranks share it says little. Here is where each of two ranks spends it, in one forward and backward pass of the column layer with a gather:

# %%
viz.timeline(launch(count, 2, args=(ColumnParallelLinear, {"gather_output": True})))

# %% [markdown]
# Inside a collective a rank waits, as in chapter 01, and the next product needs the result, so there is nothing else to do in the meantime. On a layer as small as this one a good part of the time goes that way. Chapter 11 finds work that can be done while the all-reduce of the backward pass travels.
#
# ## 9 · In the wild
#
# **Megatron-Core**, `megatron/core/tensor_parallel/layers.py`: `ColumnParallelLinear` and `RowParallelLinear`, with the arguments you know. They always return the pair `(output, bias)`, where the second is `None` unless `skip_bias_add`.
# `_initialize_affine_weight_cpu` is the master weight (its split, `weight_list[rank::world_size]`, is your `pieces[rank::world_size]`); `_initialize_affine_weight_gpu` is the cheap way, a random generator per rank. `set_tensor_model_parallel_attributes` writes
# `tensor_model_parallel`, `partition_dim` and `partition_stride` on each parameter. On top of what you wrote, `LinearWithGradAccumulationAndAsyncCommunication` starts the all-reduce of `dx` and computes `dW` while it runs (chapter 11), and adds the gradient straight into
# a float32 buffer.
#
# **PyTorch**, `torch.distributed.tensor.parallel`: `parallelize_module` with `ColwiseParallel` and `RowwiseParallel`. There the weight becomes a `DTensor`, a tensor that knows its own layout: `Shard(0)` for colwise, `Shard(1)` for rowwise, `Replicate()` for a rowwise bias. The output of the
# rowwise product has the layout `Partial()`, the very word you used, and turning `Partial` into `Replicate` is the all-reduce. Where a bias enters before that all-reduce, it needs care there too: torchtitan has a linear layer with a scaled bias for it (pull request 3781).
#
# **Inference engines** keep only the forward pass, and then two of the "wrong" places are right: nano-vLLM adds the row bias on rank 0 only, FastDeploy divides it by `p` when it loads the checkpoint. The output is the same and nobody asks for gradients.
#
# Is the layer you wrote the same thing as PyTorch's own? Ask it: the same trained weights, the same input, the same upstream gradient.


# %%
def against_dtensor(state, x, dy):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    mine = RowParallelLinear(8, 4, input_is_parallel=False, device=device())
    load_full_state_dict(mine, state)
    theirs = nn.Linear(8, 4, device=device())
    theirs.load_state_dict(state)
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    parallelize_module(theirs, mesh, RowwiseParallel(input_layouts=Replicate()))

    results = []
    for layer in (mine, theirs):
        leaf = x.to(device()).requires_grad_()
        out = layer(leaf)
        out.backward(dy.to(device()))
        results.append((out.detach(), leaf.grad))
    return {
        "out": (results[0][0] - results[1][0]).abs().max().item(),
        "dx": (results[0][1] - results[1][1]).abs().max().item(),
        "weight": repr(theirs.weight.placements[0]),
        "bias": repr(theirs.bias.placements[0]),
    }


trained_row = nn.Linear(8, 4)
compared = launch(against_dtensor, 2, args=(dict(trained_row.state_dict()), torch.randn(3, 8), torch.randn(3, 4)))[1]
print(f"largest difference: output {compared['out']:.0e}, input gradient {compared['dx']:.0e}")
print(f"DTensor's layouts: weight {compared['weight']}, bias {compared['bias']}")

# %% [markdown]
# ## 10 · Recap
#
# 1. Column-parallel splits the outputs, row-parallel splits the inputs; in PyTorch's `weight` that is dimension 0 and dimension 1.
# 2. Column: f, product, bias slice. Row: product, g, then the bias, once, replicated on every rank.
# 3. Traffic: column `0` forward, `b·s·i` backward; row `b·s·o` forward, `0` backward. The gather and the scatter forms pay on both ways. `p` is in none of the formulas.
# 4. Memory: each rank holds `i·o/p` weights. A master weight and one seed give the same start for every `p`; the attribute on each parameter is all that loading and saving need.
# 5. Next, chapter 05 puts the cheap form of each together: a column layer that keeps its output split, and a row layer that takes it so. Two layers then cost what each of them costs alone, one all-reduce in each direction.

# %% [markdown]
# ## Your library so far
#
# It now has the two layers that everything else is built from, and they load and save ordinary checkpoints.

# %%
from tplab.course import library

library(4)
