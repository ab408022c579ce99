# %% [markdown]
# # 02 · Splitting matrices
#
# **The question.** A weight matrix is too large for one device. How can several devices multiply by it together, when each
# of them holds only a part?
#
# A matrix has two dimensions, so there are two ways to cut it. At the end of this chapter you have written both, run them on
# real processes, counted what they send, and found out which of them lets a nonlinearity pass. The rest of the course is
# built from these two.
#
# You need chapter 01: ranks, `launch`, `device()`, and the collectives all-reduce and all-gather.
# One cell uses your answers (2.1, 2.2 and 2.3): the measurement near the end. All other cells run without them. About 60 minutes.

# %% tags=["setup"]
import torch
import torch.distributed as dist
from torch.nn.functional import gelu

from tplab import device, launch, viz
from tplab.course import check, predict, show_failure, symptoms

# %% [markdown]
# ## Two ways to cut one product
#
# A linear layer without bias is a matrix product:
#
# $$Y = XA \qquad\qquad Y_{ij} = \sum_k X_{ik} A_{kj}$$
#
# $X$ is `[b, in]`: the batch, one row per example. $A$ is `[in, out]`: the weights. $Y$ is `[b, out]`. The weights are what grows
# too large, so $A$ is what we cut. Write `p` for the number of devices; in the pictures `p = 2`.
#
# **Column split.** Cut $A$ between its columns: $A = [A_0, A_1]$, each $A_r$ `[in, out/p]`. Each part meets the whole of $X$ and
# gives some *columns* of $Y$. Put side by side, they are $Y$:
#
# $$X\,[A_0, A_1] = [X A_0,\; X A_1]$$
#
# **Row split.** Cut $A$ between its rows. Row $k$ of $A$ only ever meets column $k$ of $X$, so $X$ is cut as well, between its
# columns: $X = [X_0, X_1]$, each $X_r$ `[b, in/p]`. Each product is as large as $Y$, but it holds only some *terms* of the
# sum over $k$. Added up, they are $Y$:
#
# $$[X_0, X_1] \begin{bmatrix} A_0 \\ A_1 \end{bmatrix} = X_0 A_0 + X_1 A_1$$
#
# In one sentence: **a column split deals out the entries of $Y$; a row split deals out the terms of every entry.**

# %%
X = torch.tensor([[1, 2, 3, 4], [0, 1, 0, -1]]).float()  # [b=2, in=4]
A = torch.tensor([[1, 0, 2, 1], [0, 1, 1, 0], [1, 1, 0, 2], [2, 0, 1, 1]]).float()  # [in=4, out=4]
X @ A  # [b, out]: what every cut has to give back

# %% [markdown]
# First on one process, without any communication. The column split:

# %%
A0, A1 = A[:, :2], A[:, 2:]  # [in, out/2] each
by_columns = torch.cat([X @ A0, X @ A1], dim=1)  # two of [b, out/2] -> [b, out]
viz.product(X, A, kind="column", p=2)

# %% [markdown]
# And the row split. Look at the shapes: each of the two products is `[b, out]`, as large as the result, and neither is right.

# %%
X0, X1 = X[:, :2], X[:, 2:]  # [b, in/2] each
A0, A1 = A[:2], A[2:]  # [in/2, out] each
by_rows = X0 @ A0 + X1 @ A1  # two of [b, out] -> [b, out]
viz.product(X, A, kind="row", p=2)

# %%
torch.equal(by_columns, X @ A), torch.equal(by_rows, X @ A)

# %% [markdown]
# Three words for what a tensor can be when it lives on several devices. You will meet them on every page from here on:
#
# - **replicated**: every device holds the whole tensor, the same numbers;
# - **sharded** along a dimension: each device holds its own part of it, a **shard**;
# - **partial**: each device holds a tensor of the full shape, and the real one is the *sum* of them.
#
# | | $X$ | $A$ | product on each device | how it becomes $Y$ |
# |---|---|---|---|---|
# | column split | replicated `[b, in]` | sharded along dim 1: `[in, out/p]` | `[b, out/p]`, sharded along dim 1 | concatenate |
# | row split | sharded along dim 1: `[b, in/p]` | sharded along dim 0: `[in/p, out]` | `[b, out]`, partial | add |
#
# Turn the knobs: the number of devices, and the way to cut. What happens to the *size of each product* when you change the way? (By columns it shrinks
# with `p`, by rows it is `[b, out]` however many devices there are.)

# %% tags=["explore"]
viz.explore(lambda p, kind: viz.product(X, A, kind=kind, p=p), p=(1, 2, 4), kind=["column", "row"], start={"p": 2})

# %% [markdown]
# **Predict.** $A$ is `[1024, 4096]` in float32 (4 bytes a number), split by columns over 4 devices. How many rows and columns has
# one shard, and how many MiB of weights does each device hold? (1 MiB is 1024 · 1024 bytes.) Replace the dots and run the cell.

# %% predict="2.a"
predict("2.a", rows=1024, columns=1024, mib=4)

# %% [markdown]
# ## On real ranks
#
# On real ranks each part of $A$ lies in another process, and "concatenate" and "add" are what the processes send each other. `launch(fn, p)`, the ranks and the collectives are those of chapter 01. This chapter needs two of
# them:
#
# | | what every rank has afterwards | bytes of the message, for a `y` of $n$ bytes |
# |---|---|---|
# | `dist.all_reduce(y)` | the sum over the ranks, in `y` itself; the call returns `None` | $n$ |
# | `dist.all_gather(parts, y)` | the `y` of every rank, in rank order, in `parts`: a list of `p` tensors of the shape of `y` | $p \cdot n$ |
#
# In the three words from above: an all-reduce makes a partial tensor replicated. An all-gather makes a sharded one replicated, once its parts are concatenated. On two ranks, with a `y` of `[1, 1]` on rank 0 and of `[2, 2]` on rank 1:


# %%
def two_collectives():
    y = torch.full((2,), 1.0 + dist.get_rank(), device=device())  # [2]
    parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]  # p of [2]
    dist.all_gather(parts, y)
    dist.all_reduce(y)  # y is the sum from here on
    return {"all-gather, concatenated": torch.cat(parts).tolist(), "all-reduce": y.tolist()}


viz.table([{"rank": rank} | told for rank, told in enumerate(launch(two_collectives, 2))])

# %% [markdown]
# That is all it takes. Now build.

# %% [markdown] task="2.1" title="Cut a tensor into shards, and put it together again" difficulty=2 minutes=12
# Write `shard` and `unshard`. No communication: both only cut and paste. (In shapes, `..` stands for any number of dimensions.)
#
# Rank $r$ holds the $r$-th of `p` equal, consecutive parts along `dim`, which may be negative, as everywhere in PyTorch. Two demands:
#
# - A shard has **memory of its own**, and is contiguous in it. A view keeps the whole tensor alive, and then nothing was saved by cutting it.
# - A size that can't be divided evenly is **refused**, on every rank, with a `ValueError` that names the size and the number of
#   ranks. Collectives want equal shapes everywhere: an error here, now, is better than a hang there, later.


# %% exercise="2.1"
def shard(tensor: torch.Tensor, dim: int, rank: int, world_size: int) -> torch.Tensor:
    """The part of `tensor` [.., n, ..] that `rank` holds: [.., n/p, ..], contiguous, with memory of its own.

    Raises ValueError, naming n and the number of ranks, if n can't be divided by world_size.
    """
    ### BEGIN SOLUTION
    size = tensor.shape[dim]
    if size % world_size:
        raise ValueError(f"dimension {dim} has size {size}, which can't be divided over {world_size} ranks")
    length = size // world_size
    part = tensor.narrow(dim, rank * length, length)  # [.., n/p, ..], a view
    return part.clone(memory_format=torch.contiguous_format)
    ### END SOLUTION


def unshard(shards: list[torch.Tensor], dim: int) -> torch.Tensor:
    """The whole tensor [.., n, ..] from the shards [.., n/p, ..] of all ranks, in rank order."""
    ### BEGIN SOLUTION
    return torch.cat(shards, dim)
    ### END SOLUTION


# %% [markdown] hints="2.1"
# 1. The part of rank $r$ starts at $r \cdot n/p$ and is $n/p$ long. First find out whether $n/p$ is a whole number.
# 2. `tensor.narrow(dim, start, length)` cuts along any dimension, negative ones too, and returns a view. Which method of a tensor copies a
#    view into memory of its own, even if it is contiguous already?
# 3. `length = tensor.shape[dim] // world_size`, then `tensor.narrow(dim, rank * length, length).clone(memory_format=torch.contiguous_format)`.
#    `unshard` is `torch.cat` along the same dimension.

# %% check="2.1"
check("2.1", shard, unshard)

# %% [markdown] task="2.2" title="Column split on real ranks" difficulty=2 minutes=10
# From here on your function runs on `p` ranks at once. Each rank is given the whole `x` and its own shard of the columns of `A`.
# Return the whole `Y` on **every** rank.
#
# The check runs it on 1, 2 and 4 real ranks, with random numbers that differ from shard to shard, compares every rank's result with `X @ A` on
# one process, and looks at the record: one collective, and what it carries are outputs. Weights stay where they are.
#
# Only the forward pass, in this chapter. How gradients find their way back is the next one.


# %% exercise="2.2"
def column_product(x: torch.Tensor, a_shard: torch.Tensor) -> torch.Tensor:
    """Y = X A, where A is split by columns.

    x [.., in], replicated; a_shard [in, out/p], this rank's columns of A. Returns Y [.., out], replicated.
    """
    ### BEGIN SOLUTION
    y_shard = x @ a_shard  # [.., out/p]
    parts = [torch.empty_like(y_shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, y_shard)
    return torch.cat(parts, dim=-1)  # [.., out]
    ### END SOLUTION


# %% [markdown] hints="2.2"
# 1. Multiply first. What shape is this rank's product, which part of $Y$ is it, and who has the other parts?
# 2. `dist.all_gather(parts, y_shard)` needs a list of `p` empty tensors of the shape of `y_shard`. It fills them in rank order.
# 3. `parts = [torch.empty_like(y_shard) for _ in range(dist.get_world_size())]`, gather, then `torch.cat` along the dimension that was cut:
#    the last one. `x` may have more than two dimensions.

# %% check="2.2"
check("2.2", column_product)

# %% [markdown] task="2.3" title="Row split on real ranks" difficulty=2 minutes=8
# Now each rank is given its shard of the columns of `X` and its shard of the rows of `A`. Again, return the whole `Y` on every rank.


# %% exercise="2.3"
def row_product(x_shard: torch.Tensor, a_shard: torch.Tensor) -> torch.Tensor:
    """Y = X A, where A is split by rows.

    x_shard [.., in/p], this rank's columns of X; a_shard [in/p, out], this rank's rows of A.
    Returns Y [.., out], replicated.
    """
    ### BEGIN SOLUTION
    y = x_shard @ a_shard  # [.., out], partial
    dist.all_reduce(y)  # [.., out], replicated
    return y
    ### END SOLUTION


# %% [markdown] hints="2.3"
# 1. Each rank's product has the shape of $Y$, but only some terms of each sum. What is missing, and which of the two collectives brings it?
# 2. `dist.all_reduce(y)` adds over the ranks, in place. What does it return?
# 3. Three lines: `y = x_shard @ a_shard`, then `dist.all_reduce(y)`, then `return y`.

# %% check="2.3"
check("2.3", row_product)

# %% [markdown]
# ## What a nonlinearity changes
#
# A network is not a chain of matrix products: between two of them stands a nonlinearity, here **GELU**, which takes each number
# on its own: `gelu(t)` is about `t` for large `t`, about 0 for very negative `t`, and bends in between.
#
# It would be good if each rank could apply it to its own product, without asking anybody. After a **column split** it can: a rank
# holds finished entries of $Y$, and GELU looks at one entry at a time.
#
# $$\mathrm{GELU}([XA_0, XA_1]) = [\mathrm{GELU}(XA_0),\; \mathrm{GELU}(XA_1)]$$
#
# After a **row split** a rank holds terms of a sum, and GELU of a sum is not the sum of GELUs:
#
# $$\mathrm{GELU}(X_0A_0 + X_1A_1) \ne \mathrm{GELU}(X_0A_0) + \mathrm{GELU}(X_1A_1)$$
#
# **Predict.** For one entry of $Y$, rank 0 holds the term $+3$ and rank 1 holds the term $-3$. What is GELU of the entry? And what
# comes out if each rank applies GELU to its own term and the results are added? Round to whole numbers.

# %% predict="2.b"
predict("2.b", right=0, added_after=3)

# %% [markdown]
# The two terms as sliders. Find a place where both ways nearly agree, and one where they are far apart.


# %% tags=["explore"]
def two_terms(rank_0, rank_1):
    terms = torch.tensor([rank_0, rank_1])
    table = {"terms": terms, "GELU of the sum": gelu(terms.sum()), "sum of the GELUs": gelu(terms).sum()}
    return viz.matrices({name: value.reshape(1, -1) for name, value in table.items()})


viz.explore(two_terms, rank_0=[3.0, 2.0, 1.0, 0.5, -0.5, -1.0, -3.0], rank_1=[-3.0, -1.0, -0.5, 0.5, 1.0, 2.0, 3.0])

# %% [markdown] task="2.4" title="Where GELU goes wrong, and where it looks right" difficulty=3 minutes=15
# On one process. Write the size of the error, then two examples for `p = 2`:
#
# - `gelu_gap`: the largest absolute difference, over all entries, between GELU after the sum and GELU before the sum.
# - `counter_example`: some $X$, $A$ for which the gap is at least 1.
# - `lucky_example`: some $X$, $A$ for which the gap is below $10^{-6}$, although no number in them lies between $-0.1$ and $0.1$.
#
# The second is worth as much as the first. A test on a lucky example passes, and the program is wrong.


# %% exercise="2.4"
def gelu_gap(x: torch.Tensor, a: torch.Tensor, world_size: int) -> float:
    """max |GELU(sum of the ranks' products) - sum of GELU(each rank's product)|, for a row split.

    x [b, in], a [in, out], both whole; `in` can be divided by world_size.
    """
    ### BEGIN SOLUTION
    xs, rows = x.chunk(world_size, dim=1), a.chunk(world_size, dim=0)  # p of [b, in/p] and of [in/p, out]
    products = [x_shard @ a_shard for x_shard, a_shard in zip(xs, rows, strict=True)]  # p of [b, out], partial
    right = gelu(sum(products))  # [b, out]
    wrong = sum(gelu(product) for product in products)  # [b, out]
    return (right - wrong).abs().max().item()
    ### END SOLUTION


def counter_example() -> tuple[torch.Tensor, torch.Tensor]:
    """x [b, in] and a [in, out], in even, with gelu_gap(x, a, 2) >= 1."""
    ### BEGIN SOLUTION
    return torch.tensor([[3.0, 3.0]]), torch.tensor([[1.0], [-1.0]])  # terms +3 and -3: the sum is 0
    ### END SOLUTION


def lucky_example() -> tuple[torch.Tensor, torch.Tensor]:
    """x [b, in] and a [in, out], in even, no number between -0.1 and 0.1, with gelu_gap(x, a, 2) < 1e-6."""
    ### BEGIN SOLUTION
    return torch.tensor([[9.0, 9.0]]), torch.tensor([[1.0], [1.0]])  # gelu(t) is t for large t
    ### END SOLUTION


# %% [markdown] hints="2.4"
# 1. Write the two sides of the inequality above as two lines of code. For the examples, one entry is enough: `in = 2`, `b = out = 1`. Then rank 0
#    holds one term and rank 1 the other, and the sliders above show you both.
# 2. `x.chunk(world_size, dim=1)` and `a.chunk(world_size, dim=0)` are the shards. For a large gap, let the terms cancel: what is GELU of 0? For
#    a tiny gap, ask where GELU is a straight line through 0.
# 3. The terms $+3$ and $-3$ give a gap of about 3. The terms 9 and 9 give a gap of 0: for large $t$, `gelu(t)` is `t`, and the sum of straight
#    lines is straight.

# %% check="2.4"
check("2.4", gelu_gap, counter_example, lucky_example)

# %% [markdown]
# So a nonlinearity goes after a column split, or after the all-reduce of a row split, never in between. Keep this in mind until chapter 05:
# column, GELU, row needs no communication in the middle.
#
# ## Break it
#
# Three programs that are wrong on purpose. Read what they show before you read what they are.
#
# **First.** A row split whose author forgot the all-reduce. Nothing fails, and the shape is right. (`args` are the arguments of the function; `launch`
# copies them to every rank.)


# %%
def forgotten_all_reduce(x, a):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x_shard, a_shard = x.chunk(world_size, dim=1)[rank], a.chunk(world_size, dim=0)[rank]  # [b, in/p], [in/p, out]
    return x_shard @ a_shard  # [b, out]


results = launch(forgotten_all_reduce, 2, args=(X, A))
viz.matrices({"rank 0": results[0], "rank 1": results[1], "added up": sum(results), "right": X @ A})

# %% [markdown]
# The symptom: the ranks disagree about a tensor that should be replicated, and their sum is right. That is what *partial* looks like.
#
# **Second.** GELU on each rank, then the all-reduce. The ranks agree with each other now, and are wrong together:


# %%
def gelu_before_the_sum(x, a):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x_shard, a_shard = x.chunk(world_size, dim=1)[rank], a.chunk(world_size, dim=0)[rank]  # [b, in/p], [in/p, out]
    y = gelu(x_shard @ a_shard).to(device())  # [b, out]
    dist.all_reduce(y)
    return y


results = launch(gelu_before_the_sum, 2, args=(X, A))
viz.matrices({"rank 0": results[0], "rank 1": results[1], "right": gelu(X @ A)})

# %% [markdown]
# In the first row all terms are positive, and the errors are small and easily overlooked: 11.84 for 12, 10.84 for 11. In the second row, third column, a
# $+1$ meets a $-1$: 0.68 instead of 0. With lucky numbers this mistake is invisible.
#
# **Third.** Ten columns on four ranks, cut by `torch.chunk`, which does not mind: it gives 3, 3, 3 and 1. Your `shard` refuses. This is what it saves you from:


# %%
def uneven():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x, a = torch.ones(2, 4, device=device()), torch.ones(4, 10, device=device())
    y_shard = x @ a.chunk(world_size, dim=1)[rank]  # [2, 3] on ranks 0 to 2, [2, 1] on rank 3
    parts = [torch.empty_like(y_shard) for _ in range(world_size)]
    dist.all_gather(parts, y_shard)
    return torch.cat(parts, dim=-1)


with show_failure():
    launch(uneven, 4)

# %% [markdown]
# Outside this course the same program may hang, crash, or return wrong numbers. Here the runtime compares the shapes before it lets the ranks go on.

# %%
symptoms(2)

# %% [markdown]
# ## Measure it
#
# **Predict.** $X$ is `[4, 8]`, $A$ is `[8, 12]`, float32, on 4 ranks. How many bytes does the tensor have that the column split gathers (all parts
# together)? That the row split adds up? And how many bytes of weights does each rank hold?

# %% predict="2.c"
predict("2.c", all_gather=192, all_reduce=192, weights=96)


# %%
def measured(kind, x, a):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    a_shard = shard(a, 1 if kind == "column" else 0, rank, world_size)  # [in, out/p] or [in/p, out]
    if kind == "column":
        column_product(x.to(device()), a_shard.to(device()))
    else:
        row_product(shard(x, 1, rank, world_size).to(device()), a_shard.to(device()))
    return a_shard.untyped_storage().nbytes()  # of the memory behind this rank's weights


b, n_in, n_out = 4, 8, 12
x, a = torch.randn(b, n_in), torch.randn(n_in, n_out)
rows = []
for kind, rounds in (("column", 1), ("row", 2)):
    for p in (2, 4):
        results = launch(measured, p, args=(kind, x, a))
        ((collective, (calls, size)),) = results.record.totals().items()
        rows.append(
            {
                "split": kind,
                "p": p,
                "collective": collective,
                "calls": calls,
                "bytes": size,
                "formula 4·b·out": 4 * b * n_out,
                "bytes of weights on a rank": max(results),
                "sent by each rank (computed for a ring)": rounds * (p - 1) * size // p,
            }
        )
viz.table(rows)

# %% [markdown]
# Two things to read off.
#
# - The message is $b \cdot out$ numbers in both cases, and doesn't depend on `p`. What it costs does. In the ring of chapter 01 each rank sends
#   $\frac{p-1}{p}N$ bytes for an all-gather of $N$ bytes, and twice that for an all-reduce: the row split sends twice as much as the column split.
# - The weights per rank shrink as $1/p$, and never travel. That is the bargain of tensor parallelism: activations are sent so that weights can stay.
#
# ## In the wild
#
# - **`nn.Linear` stores $A^T$.** Its `weight` is `[out, in]`, so a *column* split of $A$ cuts `weight` along dim **0**, a *row* split along dim **1**.
#   Everybody mixes this up once.
# - **Megatron-Core** has both splits as layers, `ColumnParallelLinear` and `RowParallelLinear` in `megatron/core/tensor_parallel/layers.py`; the cut is
#   `split_tensor_along_last_dim` in `utils.py` beside it, and `divide` in `megatron/core/utils.py` asserts that the sizes come out even.
# - **PyTorch** calls the three words `Replicate()`, `Shard(dim)` and `Partial()` and attaches them to a tensor: a **DTensor**
#   (`torch.distributed.tensor`). Its layers `ColwiseParallel` and `RowwiseParallel` (`torch.distributed.tensor.parallel`) put `nn.Linear.weight` at
#   `Shard(0)` and `Shard(1)`. A DTensor may be cut unevenly: shards are made as by `torch.chunk` and padded before a collective.
# - **This course** keeps `shard` and `unshard` in `tplab/tensor/sharding.py`. From the next chapter on they are imported from there.
#
# DTensor works out the rules of this chapter for itself. Multiply, and ask what came out:


# %%
def ask_dtensor(x, a):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    column = distribute_tensor(x, mesh, [Replicate()]) @ distribute_tensor(a, mesh, [Shard(1)])
    row = distribute_tensor(x, mesh, [Shard(1)]) @ distribute_tensor(a, mesh, [Shard(0)])
    return {"column split": str(column.placements), "row split": str(row.placements)}


launch(ask_dtensor, 2, args=(X, A))[0]

# %% [markdown]
# ## Recap
#
# - Column split: $A$ cut along `out`, $X$ replicated, products are finished columns: concatenate (all-gather).
# - Row split: $A$ cut along `in`, $X$ cut with it, products are partial sums: add (all-reduce).
# - GELU may stand after a column split, not before the sum of a row split; lucky numbers hide the mistake.
# - Traffic so far: $b \cdot out$ numbers per product, for either split. Weights per rank: $in \cdot out / p$.
# - Next: autograd does not see collectives. Chapter 03 teaches it, with two small operators and their mirror images.

# %% [markdown]
# ## Your library so far
#
# It can cut a matrix both ways now, and multiply with the pieces.

# %%
from tplab.course import library

library(2)
