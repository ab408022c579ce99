# %% [markdown]
# # 04 · Parallel linear layers
#
# Every tensor-parallel model you'll ever meet, from a GPT that trains on thousands of GPUs to a Llama that answers questions on two, is built from two layers. In this chapter, you'll write both of them. When you're done, you can replace an `nn.Linear` with one of them, and the rest of the model won't notice. The outputs and the gradients stay the same, and even the checkpoint does.
#
# You need chapters 02 and 03. About 75 minutes.

# %% tags=["setup"]
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tplab import device, launch, record, viz
from tplab.course import check, predict, symptoms
from tplab.tensor import Sharding, copy_to_region, divide, gather_from_region, reduce_from_region, scatter_to_region

# %% [markdown]
# ## Which way is a column?
#
# In chapter 02, you split a matmul $XA$ by the columns of $A$ or by its rows. A layer that does the first is called **column-parallel**, and a layer that does the second is called **row-parallel**. But there's one thing that trips up almost everybody. `nn.Linear` stores the *transpose* of $A$. Its `weight` has the shape
# `[out, in]`, and the layer computes $Y = XW^\top + b$.
#
# **Predict.** You replace an `nn.Linear(6, 8)` by a parallel layer on two ranks. Which shapes do `weight` and `bias` have on each rank, if the layer is column-parallel? What if it's row-parallel? (Write `(3, 4)` for a matrix and `(3,)` for a vector.)

# %% predict="4.a"
predict("4.a", column_weight=(4, 6), column_bias=(4,), row_weight=(8, 3), row_bias=(8,))

# %% [markdown]
# Remember this: *column-parallel splits the outputs, and row-parallel splits the inputs*. The next picture shows the shards of a weight with 12 outputs and 8 inputs on two to four ranks. Only one of the two dimensions gets smaller as `p` grows.

# %%
linear = nn.Linear(in_features=8, out_features=12)


# %% tags=["explore"]
def show_split(kind, p):
    return viz.split(linear.weight.detach(), dim=0 if kind == "column" else 1, p=p, title=f"{kind}-parallel, p = {p}")


viz.explore(show_split, kind=["column", "row"], p=(2, 4))

# %% [markdown]
# ## The column-parallel layer
#
# With $A = [A_0, A_1]$, every rank gets all of $X$ and computes its own columns of the output:
#
# $$Y = X\,[A_0, A_1] + [b_0, b_1] = [\,X A_0 + b_0,\; X A_1 + b_1\,]$$
#
# The bias is split just like the output, so each rank adds its own slice.
#
# So much for the forward pass. For the backward pass, you have the four operators from chapter 03:
#
# | operator | forward | backward |
# |---|---|---|
# | `copy_to_region(x, group)`, f | nothing | all-reduce of the gradient |
# | `reduce_from_region(x, group)`, g | all-reduce | nothing |
# | `scatter_to_region(x, group)` | keeps this rank's slice of the last dimension | all-gather of the gradient |
# | `gather_from_region(x, group)` | all-gather along the last dimension | keeps this rank's slice of the gradient |
#
# Before you write the layer, think about what it has to send.
#
# **Predict.** A column-parallel layer with 8 inputs and 12 outputs runs on four ranks. Its input is a float32 tensor `[2, 3, 8]`, and each rank returns just its own slice of the output. How many collectives run in the forward pass? How many run in the backward pass, and how many bytes does the tensor in the backward collective have?

# %% predict="4.b"
predict("4.b", calls_forward=0, calls_backward=1, bytes_backward=192)

# %% [markdown] task="4.1" title="ColumnParallelLinear" difficulty=2 minutes=12
# Fill in the parameter shapes and the forward pass. `divide(n, p)` returns `n // p`, and it raises an error if `p` doesn't divide `n`. The constructor leaves the weight uninitialized. (We'll get to the initialization and to the attribute `tensor_parallel` later.)
#
# The layer has a few options, because models need them:
#
# - With `gather_output`, every rank returns the full output.
# - With `skip_bias_add`, the layer doesn't add its bias. It returns the pair (output without the bias, bias) instead, so that the caller can add the bias together with whatever comes next.
# - `group` says which ranks the layer is split over. A model that combines two kinds of parallelism has several groups, for example one with ranks 0 and 2 and another one with ranks 1 and 3. Each group has to work without affecting the others, so pass `self.group` to everything that communicates. The check uses two groups as well.


# %% exercise="4.1"
class ColumnParallelLinear(nn.Module):
    """Y = X A + b, with the columns of A split over the ranks of `group`.

    x [.., in], the same on every rank -> this rank's slice of Y, [.., out/p], or with `gather_output` all of Y, [.., out].
    With `skip_bias_add`, return the pair (output without the bias, self.bias), even if there's no bias.
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
# 1. Which of the two dimensions of `weight` counts the output features? That's the dimension to divide. And in the backward pass, what part of the gradient of `x` does each rank compute?
# 2. Each rank computes the gradient of `x` through its own columns only, so these gradients have to be added up. Which operator does that, and where does it have to stand? After it come a matmul with this rank's weight and bias, and perhaps a gather.
# 3. `x = copy_to_region(x, self.group)`, then `out = F.linear(x, self.weight, bias)` with `bias = None if self.skip_bias_add else self.bias`, and then `out = gather_from_region(out, self.group)` if it's asked for.
#    `F.linear` handles any number of leading dimensions.

# %% check="4.1"
check("4.1", ColumnParallelLinear)

# %% [markdown]
# Here's your layer on four ranks. Every element of rank `r`'s weight is `r`, and the input is the identity matrix, so each output shows who computed it.


# %%
def show_columns(gather_output):
    layer = ColumnParallelLinear(4, 8, gather_output=gather_output, device=device())
    with torch.no_grad():
        layer.weight.fill_(dist.get_rank())
        return layer(torch.eye(4, device=device()))  # [4, 2], or [4, 8] if it's gathered


slices, gathered = launch(show_columns, 4, args=(False,)), launch(show_columns, 4, args=(True,))
viz.matrices({f"rank {rank}": out for rank, out in enumerate(slices)} | {"rank 2, gathered": gathered[2]})

# %% [markdown]
# ## The row-parallel layer, and its bias
#
# Now the inputs are split, and so are the rows of $A$. Each rank can compute one term of every output:
#
# $$Y = [X_0, X_1] \begin{bmatrix} A_0 \\ A_1 \end{bmatrix} + b = X_0 A_0 + X_1 A_1 + b$$
#
# The matmul is easy. What people get wrong is the bias. We know of four places in a row-parallel layer where somebody has added it, and three of them are traps.
#
# **Predict.** Somebody writes `F.linear(x, self.weight, self.bias)` and all-reduces the result. On four ranks, how many times is the bias added to the output? Somebody else notices this and uses `self.bias / p` instead. Now the output is right, but what fraction of its true gradient does each rank's bias get?

# %% predict="4.c"
predict("4.c", times_in_output=4, fraction_of_gradient=1 / 4)

# %% [markdown] task="4.2" title="RowParallelLinear" difficulty=3 minutes=12
# Write the mirror image of your first layer, and find the right place for the bias. By default, each rank's `x` is a slice, just like the output of a column-parallel layer. With `input_is_parallel=False`, every rank gets the full `x`, and the layer has to take its own slice.


# %% exercise="4.2"
class RowParallelLinear(nn.Module):
    """Y = X A + b, with the rows of A split over the ranks of `group`.

    this rank's slice of X, [.., in/p], or with `input_is_parallel=False` all of X, [.., in] -> Y [.., out], on every rank.
    With `skip_bias_add`, return the pair (output without the bias, self.bias), even if there's no bias.
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
# 1. Which dimension of `weight` counts the input features? Only that one is divided. And how many outputs does each rank end up with, so how long is its bias?
# 2. There are four steps: take a slice of the input if it isn't split yet, multiply, add up over the ranks, and add the bias. In this order, the bias is added just once, and every rank's copy gets its full gradient.
# 3. `x = scatter_to_region(x, self.group)` if `not self.input_is_parallel`, then `out = F.linear(x, self.weight)` without a bias, then `out = reduce_from_region(out, self.group)`. After that, return `out + self.bias`,
#    unless there's no bias or `skip_bias_add` hands it to the caller.

# %% check="4.2"
check("4.2", RowParallelLinear)

# %% [markdown]
# Here are both of your layers in motion, on two ranks. Blue goes forward, and red goes backward. Rank colors mean a rank's own slice, dashes mean one term of a sum, and the thicker an arrow, the more bytes it stands for.
#
# ![A column-parallel layer gathers its output forward, and f all-reduces the input's gradient backward. A row-parallel layer does the mirror image: g all-reduces its output forward, and the scatter gathers the input's gradient backward.](pictures/layers.svg)
#
# ## Break it: three wrong places for the bias
#
# Here are the three traps, each of them as a layer that real code has contained. They all learn the same small regression on two ranks, and so do your own layer and a plain `nn.Linear`. The true bias is 2 for every output. Before you run the cell, guess which of the loss curves will look suspicious.


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
    """Train with plain SGD, and return the loss of every step."""
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
curves = {"nn.Linear": fit(plain, inputs, targets)}
runs = {}
for layer_class in (RowParallelLinear, EveryRank, Divided, RankZero):
    runs[layer_class.__name__] = launch(fit_sharded, 2, args=(layer_class,))
    curves[layer_class.__name__] = runs[layer_class.__name__][0]["losses"]
viz.curves(curves, title="every one of them learns")

# %% [markdown]
# All five losses fall! One of the wrong ones lies exactly on the right curve, and the other two are a little too fast or too slow, which nobody would notice. So let's do what happens after every training run. Each rank saves its shards in a checkpoint, and then a single process loads it.


# %%
def reloaded(run, rank):
    """Return the loss of a plain linear layer with all ranks' weights and the bias that `rank` saved."""
    weight = torch.cat([result["weight"] for result in run], dim=1)  # [4, 8]
    return F.mse_loss(F.linear(inputs, weight, run[rank]["bias"]), targets).item()


viz.table(
    [
        {
            "layer": name,
            "final loss": f"{run[0]['losses'][-1]:.3f}",
            "bias[0] on rank 0": f"{run[0]['bias'][0].item():.3f}",
            "bias[0] on rank 1": f"{run[1]['bias'][0].item():.3f}",
            "loss with rank 0's checkpoint": f"{reloaded(run, 0):.3f}",
            "loss with rank 1's checkpoint": f"{reloaded(run, 1):.3f}",
        }
        for name, run in runs.items()
    ]
)

# %% [markdown]
# It's worth spending a minute on this table. `EveryRank` learned half of the true bias, because two ranks add it. In training, that's fine, but the checkpoint is wrong for any other number of ranks. With `Divided`, the output is right, and the bias learns too slowly. `RankZero` is the sneakiest: its outputs are right, its losses are right, and it learns at the right speed. But rank 1's
# bias never got a gradient, so it's still zero, and whether the checkpoint works depends on who saved it.
#
# That's why the check looked at the bias's gradient on *every* rank, with a bias that isn't zero. `EveryRank` was reported in slapo (issue 10) and MinivLLM (issue 80), and Paddle repaired it in pull request 35186. `Divided` is in torchtitan (pull request 3781), and pull request 4332 reports its gradients.
#
# ## A parameter that knows how it was split
#
# Suppose you want to save a model, load one, or just count its parameters. For each parameter, your code has to know whether it's a shard, and of what. That's what the attribute `param.tensor_parallel = Sharding(dim, stride)` is for. A parameter that doesn't have it is replicated.
#
# `dim` is the dimension that was split. `stride` is for **fused** weights. Two linear layers with the same input are often stored as one big weight, one below the other, because one large matmul is faster than two small ones. Say that `[gate; up]` has eight rows, 0 to 3 for a layer called "gate" and 4 to 7 for a layer called "up", and that the model later multiplies output $j$ of one
# by output $j$ of the other. So a rank needs the *same* rows of both. Here's what two ranks get if you split this weight as one block or as two:

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
    ranks=[0, 1, 0, 1],
)

# %% [markdown]
# With stride 1, rank 0 gets all of the gate and rank 1 gets all of up, so there isn't a single matching pair. With stride 2, each rank gets a slice of both blocks.
#
# **Predict.** A weight `[q; k; v]` has 12 rows, in three blocks of four. Which rows does rank 1 of 2 hold, in order, if the stride is 3?

# %% predict="4.d"
predict("4.d", rows_of_rank_1=[2, 3, 6, 7, 10, 11])

# %% [markdown] task="4.3" title="Shard and unshard, with a stride" difficulty=3 minutes=12
# You wrote both functions in chapter 02 for a single block. Now write them for `stride` blocks. As before, they don't communicate.
#
# - Along `dim`, which may be negative, the full tensor consists of `stride` blocks of the same size. Each rank gets an equal slice of every block.
# - A shard needs memory of its own. (A view such as `full[0:4]` keeps the *entire* tensor alive, and then sharding doesn't save any memory.)
# - If the size along `dim` doesn't allow it, raise a `ValueError` with the numbers in its message.


# %% exercise="4.3"
def shard(tensor, dim, rank, world_size, *, stride=1):
    """Return this rank's slice of each of the `stride` blocks, in order: [.., n, ..] -> [.., n/p, ..], in new memory."""
    ### BEGIN SOLUTION
    n = tensor.shape[dim]
    if n % (world_size * stride):
        raise ValueError(
            f"{n} entries along dim {dim} can't be split into {stride} blocks of {world_size} equal slices"
        )
    pieces = tensor.chunk(world_size * stride, dim)  # block by block: p pieces of block 0, p pieces of block 1, ...
    return torch.cat(pieces[rank::world_size], dim)
    ### END SOLUTION


def unshard(shards, dim, *, stride=1):
    """Return the full tensor [.., n, ..], given the list of all p shards [.., n/p, ..] in rank order."""
    ### BEGIN SOLUTION
    blocks = [piece.chunk(stride, dim) for piece in shards]  # [rank][block]
    return torch.cat([piece for block in zip(*blocks, strict=True) for piece in block], dim)
    ### END SOLUTION


# %% [markdown] hints="4.3"
# 1. Split the full tensor into `p * stride` equal pieces along `dim`, and number them. With `p = 2` and `stride = 3`, which of these pieces belong to rank 0, and which to rank 1?
# 2. Piece `k` belongs to rank `k % p`, and a Python slice with a step picks these. For `unshard`, split every shard into `stride` pieces. The full tensor starts with the first piece of each rank, followed by the second piece of each rank.
# 3. `pieces = tensor.chunk(world_size * stride, dim)` and `torch.cat(pieces[rank::world_size], dim)`, which always makes new memory. For the way back, `blocks = [piece.chunk(stride, dim) for piece in shards]`, and then go through `zip(*blocks)`.

# %% check="4.3"
check("4.3", shard, unshard)

# %% [markdown]
# ## Repair it: the first values of a weight
#
# When people trained low-rank adapters (LoRA) with Megatron-Bridge, the final loss used to depend on the number of GPUs that each layer was split over. (That's issue 5840, which pull request 5843 repaired.) The bug is in a line that looks harmless, where each rank initializes its own shard:


# %%
def as_shipped(p):
    torch.manual_seed(0)  # the same seed on every rank, so that replicated parameters start out equal
    weight = torch.empty(512, 512 // p)  # this rank's shard of a row-parallel weight [512, 512]
    nn.init.xavier_normal_(weight)
    return weight


def table_row(p, draw):
    drawn = list(launch(draw, p, args=(p,)))  # p of [512, 512/p]
    equal = all(torch.equal(drawn[0], other) for other in drawn)
    return {"p": p, "standard deviation": f"{drawn[0].std().item():.4f}", "all shards equal": equal if p > 1 else None}


viz.table([table_row(p, as_shipped) for p in (1, 2, 4)])

# %% [markdown]
# This line actually has two bugs. The first one is what was reported. `xavier_normal_` computes its standard deviation, $\sqrt{2/(\text{in} + \text{out})}$, from the shape of the tensor that it gets, and it has no way of knowing that this tensor is just a shard. The second one shows up if all ranks use the same seed. (Megatron gives each rank a seed of its own for that reason.)

# %% [markdown] task="4.4" title="Repair the first values" difficulty=2 minutes=8
# Repair both bugs. No matter how large `p` is, a model should start from exactly the same weights, which are those that a single process would draw. You may use memory for one full weight at a time.
#
# `param.tensor_parallel` says how `param` was split, and your `shard` can do the splitting. Don't communicate, and don't set a seed, because the caller already did.


# %% exercise="4.4"
def init_from_master(param, full_shape, init_method, group=None):
    """Fill `param`, a shard of a weight of shape `full_shape` = (out, in), in place. Every p must start from the same full weight.

    init_method: fills a tensor in place, as nn.init.xavier_normal_ does
    """
    ### BEGIN SOLUTION
    sharding = param.tensor_parallel
    master = torch.empty(full_shape, dtype=param.dtype, device=param.device)  # [o, i], the same on every rank
    init_method(master)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    with torch.no_grad():
        param.copy_(shard(master, sharding.dim, rank, world_size, stride=sharding.stride))
    ### BROKEN
    # with torch.no_grad():
    #     init_method(param)
    ### END SOLUTION


# %% [markdown] hints="4.4"
# 1. Which tensor would a single process give to `init_method`? Could every rank draw that one, too?
# 2. Make an empty tensor of the full shape (it's called a **master weight**), have `init_method` fill it, and copy this rank's shard of it into `param`. The copy has to happen under `torch.no_grad()`, because `param` requires a gradient.
# 3. `master = torch.empty(full_shape, dtype=param.dtype, device=param.device)`, then `init_method(master)`, and then under `torch.no_grad()`
#    `param.copy_(shard(master, sharding.dim, dist.get_rank(group), dist.get_world_size(group), stride=sharding.stride))`, where `sharding` is `param.tensor_parallel`.

# %% check="4.4"
check("4.4", init_from_master)

# %% [markdown]
# **Predict.** Back to the broken version, with four ranks and the weight `[512, 512]`. By what factor was the *variance* too large? And suppose you put the four shards together again. What's the rank of this matrix, in the sense of linear algebra? (A random matrix of this size would have rank 512.)

# %% predict="4.e"
predict("4.e", variance_factor=1.6, matrix_rank=128)


# %%
def repaired(p):
    weight = nn.Parameter(torch.empty(512, 512 // p, device=device()))  # [512, 512/p]
    weight.tensor_parallel = Sharding(dim=1)
    torch.manual_seed(0)
    init_from_master(weight, (512, 512), nn.init.xavier_normal_)
    return weight.detach()


def together(draw):
    full = torch.cat(list(launch(draw, 4, args=(4,))), dim=1)  # [512, 512]
    return {"variance × 512": f"{full.var().item() * 512:.2f}", "rank": torch.linalg.matrix_rank(full).item()}


viz.table([{"four shards together": draw.__name__} | together(draw) for draw in (as_shipped, repaired)])

# %% [markdown]
# So the broken layer's weight started out with a quarter of the rank that it should have had, and you'd never have seen an error message. Your repair costs some time, and memory for one full weight. Very large models do something cheaper, and chapter 09 comes back to that.
#
# ## From a checkpoint to shards, and back
#
# Now you have everything you need to take a model from a single process to `p` ranks, and to save a checkpoint that any other `p` can load. Because every parameter carries its own `tensor_parallel`, you only have to write both directions once, for all modules that you'll ever build. PyTorch calls a dictionary from parameter names to tensors a **state dict**, and a *full* state dict is the one that a single process
# would have.

# %% [markdown] task="4.5" title="Load and save" difficulty=3 minutes=15
# In `load_full_state_dict`, every rank has the same full tensors and keeps its shards. In `full_state_dict`, every rank gets all the full tensors back. That takes one all-gather per sharded parameter, and nothing for a replicated one. Both should work for any module, even if there are other modules inside it.


# %% exercise="4.5"
def load_full_state_dict(module, full_state, group=None):
    """Copy this rank's part of each tensor in `full_state` (name -> full tensor) into the parameters of `module`, in place."""
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
    """Return name -> full tensor on every rank, in new memory and without a gradient history."""
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
# 1. Loop over `module.named_parameters()`, and ask each parameter for `getattr(param, "tensor_parallel", None)`. What does `None` tell you?
# 2. To load, use `shard` with the parameter's own `dim` and `stride`, and then `param.copy_(...)` under `torch.no_grad()`. To save, gather all ranks' shards into a list and use `unshard`. Replicated parameters have to be copied as well, because the saved tensors mustn't change when training continues.
# 3. To save, take `value = param.detach().clone(memory_format=torch.contiguous_format)` and `shards = [torch.empty_like(value) for _ in range(world_size)]`, then call `dist.all_gather(shards, value, group=group)`. If there's just one rank, nothing needs to be gathered.

# %% check="4.5"
check("4.5", load_full_state_dict, full_state_dict)

# %% [markdown]
# Let's see the round trip with your own classes. A single process has a trained `nn.Linear`. Two ranks load it, run it and save it. Then four ranks load what the two have saved.

# %%
trained = nn.Linear(8, 12)
x = torch.randn(5, 8)


def load_run_save(state):
    layer = ColumnParallelLinear(8, 12, gather_output=True, device=device())
    load_full_state_dict(layer, state)
    return {"out": layer(x.to(device())), "state": full_state_dict(layer), "shape": list(layer.weight.shape)}


on_two = launch(load_run_save, 2, args=(dict(trained.state_dict()),))[0]
on_four = launch(load_run_save, 4, args=(on_two["state"],))[3]
viz.table(
    [
        {
            "p": p,
            "each rank's weight": result["shape"],
            "output differs by": f"{(result['out'] - trained(x)).abs().max().item():.0e}",
            "saved weight is bit for bit the trained one": torch.equal(result["state"]["weight"], trained.weight),
        }
        for p, result in ((2, on_two), (4, on_four))
    ]
)

# %% [markdown]
# ## Measure it
#
# What do the two layers send? Here's every variant in one forward and one backward pass, counted from the trace, next to a formula. The input has $b \cdot s$ tokens with $i$ features each, the output has $o$ features, and every element takes four bytes.

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
    return [sum(total.bytes for total in section.totals().values()) for section in (forward, backward)]


variants = [
    (ColumnParallelLinear, {"gather_output": False}, ("0", 0), ("b·s·i", b * s * i)),
    (ColumnParallelLinear, {"gather_output": True}, ("b·s·o", b * s * o), ("b·s·i", b * s * i)),
    (RowParallelLinear, {"input_is_parallel": True}, ("b·s·o", b * s * o), ("0", 0)),
    (RowParallelLinear, {"input_is_parallel": False}, ("b·s·o", b * s * o), ("b·s·i", b * s * i)),
]
table = []
for layer_class, options, (forward_formula, forward), (backward_formula, backward) in variants:
    seen = launch(count, 4, args=(layer_class, options))[0]
    table.append(
        {
            "layer": layer_class.__name__,
            "option": ", ".join(f"{name}={value}" for name, value in options.items()),
            "forward": seen[0],
            "formula": f"{forward_formula} = {4 * forward}",
            "backward": seen[1],
            "formula ": f"{backward_formula} = {4 * backward}",
        }
    )
viz.table(table, title="bytes in one rank's collectives, p = 4")

# %% [markdown]
# There's no `p` in any of the formulas, so more ranks make the weights smaller but not the messages. And each layer has a cheap variant that's free in one direction, and an expensive one that pays in both.

# %%
symptoms(4)

# %% [markdown]
# ## In the wild
#
# <details><summary>Going deeper: Megatron-Core, DTensor, inference engines, and copies that forget</summary>
#
# - **Megatron-Core** has `ColumnParallelLinear` and `RowParallelLinear` in `megatron/core/tensor_parallel/layers.py`, with the options you know. They always return a pair whose second element is `None` unless you use `skip_bias_add`. `_initialize_affine_weight_cpu` draws a master weight, just as you do.
#   `_initialize_affine_weight_gpu` draws each shard directly, with a different generator per rank. Your `tensor_parallel` is three attributes there: `tensor_model_parallel`, `partition_dim` and `partition_stride`.
#   Megatron used to keep its process groups in a global module, `mpu`, which is called `parallel_state` today. We pass `group` instead, so two models with different layouts can live in one process.
# - **PyTorch's** `parallelize_module` turns a weight into a `DTensor`, a tensor that knows its own layout. `ColwiseParallel` means `Shard(0)`, `RowwiseParallel` means `Shard(1)`, and a row-parallel layer's bias is `Replicate()`. Before the all-reduce, its output has the layout `Partial()`.
# - **Inference engines** only need the forward pass, and then two of the traps are perfectly fine. nano-vLLM adds the row-parallel bias on rank 0, and FastDeploy divides it by `p` when it loads a checkpoint.
# - **Copies forget.** `copy.deepcopy` of an `nn.Parameter` drops any attributes that you've set on it (PyTorch issue 117275). A copy of your layer would look replicated, and its checkpoint would be wrong.
#
# </details>
#
# Does your layer do the same as PyTorch's? Here are both of them with the same weights, the same input, and the same upstream gradient.


# %%
def against_dtensor(state, x, dy):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mine = ColumnParallelLinear(8, 12, device=device())
    load_full_state_dict(mine, state)
    theirs = nn.Linear(8, 12, device=device())
    theirs.load_state_dict(state)
    parallelize_module(theirs, init_device_mesh(device().type, (dist.get_world_size(),)), ColwiseParallel())
    found = []
    for layer in (mine, theirs):
        leaf = x.to(device()).requires_grad_()
        out = layer(leaf)  # [5, 6]
        out.backward(dy.chunk(2, dim=-1)[dist.get_rank()].to(device()))
        found.append((out.detach(), leaf.grad))
    return [f"{(a - b).abs().max().item():.0e}" for a, b in zip(*found, strict=True)]


compared = launch(against_dtensor, 2, args=(dict(trained.state_dict()), x, torch.randn(5, 12)))[1]
print(f"largest differences: {compared[0]} in the output, {compared[1]} in the input's gradient")

# %% [markdown]
# ## Your library so far
#
# It now contains the two layers that all the others are built from, and it can load and save ordinary checkpoints.

# %%
from tplab.course import library

library(4)

# %% [markdown]
# You have two layers, each with a cheap variant and an expensive one. An MLP needs two linear layers, one after the other. Which two would you put together?
