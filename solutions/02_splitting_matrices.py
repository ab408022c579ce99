# %% [markdown]
# # 02 · Splitting matrices
#
# Your GPU can't hold the weight matrix, so you split it across several GPUs. There are two natural ways to do that, and your choice determines how much the GPUs have to communicate for the rest of the training run. If you choose well, most of the messages simply disappear.
#
# In this chapter, you'll split matrices into shards and find the cheapest way to compute two matmuls in a row. You'll also see why a nonlinearity between two matmuls changes everything, and you'll fix a bug that NVIDIA shipped. You need chapter 01. About 60 minutes.

# %% tags=["setup"]
import torch
import torch.distributed as dist
from torch.nn.functional import gelu

from tplab import device, launch, viz
from tplab.course import check, predict, symptoms

# %% [markdown]
# ## Columns or rows?
#
# Suppose you have two ranks, and each of them should store half of $A$. Should you split the columns or the rows? Let's try both on matrices that are small enough to check by hand.

# %%
X = torch.tensor([[1.0, 2, 3, 4], [0, 1, 0, -1]])  # [2, 4]
A = torch.tensor([[1.0, 0, 2, 1], [0, 1, 1, 0], [1, 1, 0, 2], [2, 0, 1, 1]])  # [4, 4]
X @ A  # what we want

# %% [markdown]
# **Split the columns.** Rank 0 gets the left two columns of $A$, and rank 1 gets the right two. A column of the result depends on
# just one column of $A$, so each rank can compute its own columns of $Y$ without any communication.

# %%
viz.product(X, A, kind="column", p=2)

# %% [markdown]
# **Split the rows.** Now rank 0 gets the top two rows of $A$, and rank 1 gets the bottom two. Row $k$ of $A$ is only multiplied by column $k$ of $X$, so we can split $X$
# along with $A$. But each entry of $Y$ is a sum over *all* the rows of $A$. So each rank can only compute a partial sum for every entry.

# %%
viz.product(X, A, kind="row", p=2)

# %%
top, bottom = X[:, :2] @ A[:2], X[:, 2:] @ A[2:]
viz.matrices({"rank 0": top, "rank 1": bottom, "sum": top + bottom, "X A": X @ A})

# %% [markdown]
# So a column split divides the *entries* of the result between the ranks, while a row split divides the *terms* of every entry. In
# formulas:
#
# $$X\,[A_0, A_1] = [X A_0,\; X A_1] \qquad\qquad [X_0, X_1] \begin{bmatrix} A_0 \\ A_1 \end{bmatrix} = X_0 A_0 + X_1 A_1$$
#
# Three words describe how a tensor is distributed across ranks.
#
# - **Replicated**: every rank holds the full tensor, with the same values.
# - **Sharded** along a dimension: each rank holds a different slice, called a **shard**.
# - **Partial**: each rank holds a tensor of the full shape, and the real tensor is the *sum* of all these tensors.
#
# | | needs $X$ | gives $Y$ | collective that makes $Y$ replicated |
# |---|---|---|---|
# | column split | replicated | sharded along its columns | an all-gather |
# | row split | sharded along its columns | partial | an all-reduce |
#
# Change $p$ below and watch the shapes. Which split makes each rank's result smaller as $p$ grows?

# %% tags=["explore"]
viz.explore(
    lambda p, kind: viz.product(X, A, kind=kind, p=p),
    p=(1, 2, 4),
    kind=["column", "row"],
    start={"p": 2},
)

# %% [markdown]
# **Predict.** $X$ has the shape `[512, 1024]`, $A$ has the shape `[1024, 4096]`, and both are in float32. How many MiB of
# weights does each of the 4 ranks store? With a column split, how many MiB does each rank's *result* take up before any communication? How many
# MiB does the result take up with a row split? (A MiB is 1024 · 1024 bytes.)

# %% predict="2.a"
predict("2.a", weights=4, column_result=2, row_result=8)

# %% [markdown] task="2.1" title="Split a tensor into shards, and put it back together" difficulty=2 minutes=12
# Write two functions that don't communicate. `shard` slices a tensor, and `unshard` joins the slices.
#
# Rank $r$ should hold the $r$-th of `p` equal, contiguous blocks along `dim`, which may be negative. (In shapes, `..` stands for any
# number of dimensions.) Beware of two traps:
#
# - A slice of a tensor is a *view* that keeps the full tensor in memory. If your shards were views, you wouldn't save any memory. So each shard must have **its own memory** and be contiguous.
#
# - Collectives need tensors of the same shape on every rank. If the size isn't divisible by the number of ranks, raise a `ValueError` on **every** rank, and include both numbers in its message. You'd rather see a clear error now than have your program hang an hour later.


# %% exercise="2.1"
def shard(tensor: torch.Tensor, dim: int, rank: int, world_size: int) -> torch.Tensor:
    """Return the shard of `tensor` [.., n, ..] that `rank` holds: [.., n/p, ..].

    The shard is contiguous, in its own memory. Raises ValueError, naming n and the
    number of ranks, if n can't be divided evenly by world_size.
    """
    ### BEGIN SOLUTION
    size = tensor.shape[dim]
    if size % world_size:
        raise ValueError(
            f"dimension {dim} has size {size}, "
            f"which can't be divided evenly by {world_size} ranks"
        )
    length = size // world_size
    part = tensor.narrow(dim, rank * length, length)  # [.., n/p, ..], a view
    return part.clone(memory_format=torch.contiguous_format)
    ### END SOLUTION


def unshard(shards: list[torch.Tensor], dim: int) -> torch.Tensor:
    """Return the full tensor [.., n, ..].

    shards: the shards [.., n/p, ..] of all ranks, in rank order
    """
    ### BEGIN SOLUTION
    return torch.cat(shards, dim)
    ### END SOLUTION


# %% [markdown] hints="2.1"
# 1. The block of rank `r` starts at index `r * n / p` and has length `n / p`. Before you slice the tensor, check that `n / p` is a whole number.
# 2. `tensor.narrow(dim, start, length)` slices along any dimension, even a negative one, and returns a view. Which tensor method
#    copies a view into new memory even if the view is already contiguous?
# 3. Let `length = tensor.shape[dim] // world_size`, and return
#    `tensor.narrow(dim, rank * length, length).clone(memory_format=torch.contiguous_format)`. For `unshard`, you only need a single call to `torch.cat`.

# %% check="2.1"
check("2.1", shard, unshard)

# %% [markdown]
# ## Two matmuls in a row
#
# If every rank needs all of $Y$, a single matmul requires a collective, no matter how you split it. It gets more interesting if a second matmul follows:
#
# $$Z = (X A)\,B$$
#
# $X$ is replicated, $A$ and $B$ both have to be split, and in the end every rank needs all of $Z$. You may split each matrix by columns or by
# rows, which gives four combinations. You could always replicate the result of the first matmul before you start the second one, but that's wasteful. Can the second matmul directly use what each rank has after the first one?
#
# To compare the combinations, count how many bytes each rank sends with the ring algorithms from chapter 01. An all-gather that produces $N$ bytes costs
# $\frac{p-1}{p}N$. An all-reduce of $N$ bytes costs twice as much.

# %% [markdown] task="2.2" title="The cheapest way through two matmuls" difficulty=3 minutes=20
# Start with pen and paper. How many bytes does each rank send in each of the four combinations? Then write two functions:
#
# - `choose_splits` returns the cheapest combination for the given sizes of $XA$ and $Z$. For example, `("row", "column")` means that $A$ is split by rows and $B$ is split by columns. The best choice may depend on these sizes.
#
# - `two_matmuls` computes $Z$ with the combination you chose. The check splits $A$ and $B$ according to your choice and passes each rank its own shards.
#
# The check tries cases in which $XA$ is wider than $Z$, narrower than $Z$, and exactly as wide as $Z$. Every rank must return the correct $Z$ and send no more bytes than necessary. If two combinations are equally cheap, you may return either one.


# %% exercise="2.2"
def choose_splits(hidden: int, out: int) -> tuple[str, str]:
    """Return how to split A and B so that Z = (X A) B is cheapest.

    A [in, hidden], B [hidden, out] -> "column" or "row" for each of them
    """
    ### BEGIN SOLUTION
    return ("column", "row") if 2 * out <= hidden + out else ("column", "column")
    ### END SOLUTION


def two_matmuls(
    x: torch.Tensor,
    a_shard: torch.Tensor,
    b_shard: torch.Tensor,
    splits: tuple[str, str],
) -> torch.Tensor:
    """Return Z = (X A) B [.., out] on every rank.

    x [.., in]: the full X
    a_shard and b_shard: this rank's shards of A [in, hidden] and B [hidden, out]
    splits: what your choose_splits returned for these sizes
    """
    ### BEGIN SOLUTION
    y = x @ a_shard  # [.., hidden/p]: A is always split by columns
    if splits == ("column", "row"):
        # these columns of y meet exactly these rows of B
        z = y @ b_shard  # [.., out], partial
        dist.all_reduce(z)
        return z

    def gathered(columns: torch.Tensor) -> torch.Tensor:
        # [.., n] on each rank -> [.., p n] on every rank
        parts = [torch.empty_like(columns) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, columns)
        return torch.cat(parts, dim=-1)

    return gathered(gathered(y) @ b_shard)
    ### END SOLUTION


# %% [markdown] hints="2.2"
# 1. First, suppose you split `A` by columns. After the first matmul, rank `r` holds some of the columns of `XA`. Which rows of `B` are these columns multiplied by? Now suppose you split `A` by rows instead. After the first matmul, what does rank `r` hold in that case?
# 2. Count how many elements each rank sends per row of `X`, and leave out the common factor `(p - 1) / p`. If `A` is split by columns and
#    `B` by rows, you need one all-reduce, which costs `2 * out`. If both matrices are split by columns, you need two all-gathers, which together cost `hidden + out`. How much do the two combinations that split `A` by rows cost?
# 3. It's never cheaper to split `A` by rows, so you only have to compare `2 * out` with `hidden + out`. If `A` is split by columns and `B` by rows, compute
#    `z = x @ a_shard @ b_shard` and all-reduce `z`. If both matrices are split by columns, all-gather the columns after each of the two matmuls.

# %% check="2.2"
check("2.2", choose_splits, two_matmuls)

# %% [markdown]
# One of the four combinations needs no communication between the two matmuls, and yet it isn't always the cheapest. If the middle layer is narrower than the output, another combination sends fewer bytes. Such layers do exist. A LoRA adapter squeezes thousands of features through a layer of perhaps 16 units. S-LoRA, which serves many adapters at once, splits
# both matrices of an adapter by columns and gathers the tiny result between the two matmuls if the adapted weight is split by columns (Sheng et al. 2023, arXiv:2311.03285, section 6).
#
# Let's measure how large your messages are. The last column shows the bytes sent, computed from the message sizes.


# %%
def measured(x, a, b, splits):
    dims = {"column": 1, "row": 0}
    rank, world_size = dist.get_rank(), dist.get_world_size()
    a_shard = shard(a, dims[splits[0]], rank, world_size)
    b_shard = shard(b, dims[splits[1]], rank, world_size)
    two_matmuls(x.to(device()), a_shard.to(device()), b_shard.to(device()), splits)


rows = []
for hidden in (64, 4):
    x, a, b = torch.randn(8, 16), torch.randn(16, hidden), torch.randn(hidden, 16)
    for p in (2, 4):
        splits = choose_splits(hidden, 16)
        totals = launch(measured, p, args=(x, a, b, splits)).record.totals()
        for collective, (calls, size) in totals.items():
            ring = (2 if collective == "all_reduce" else 1) * (p - 1) * size // p
            rows.append({"hidden": hidden, "splits": ", ".join(splits), "p": p,
                         "collective": collective, "calls": calls,
                         "message bytes, all calls": size,
                         "sent by each rank, in a ring": ring})  # fmt: skip
viz.table(rows)

# %% [markdown]
# Notice that the weights don't show up in this table at all. No matter how large the weights are, no rank ever sends them. This is the basic idea of tensor parallelism. The ranks exchange activations so that the weights can stay where they are.
#
# ## Then comes a nonlinearity
#
# Real networks have a nonlinearity between two matmuls, and that complicates things. Take **GELU**, for example, which is applied to each element separately. GELU leaves large positive values almost unchanged, maps very negative values to nearly 0, and curves smoothly in between.
#
# **Predict.** For some entry of $XA$, rank 0 holds the term $+3$ and rank 1 holds the term $-3$. What is the GELU of this entry? What do you get
# if each rank first applies GELU to its own term, and you add the two results afterward? Round your answers to whole numbers.

# %% predict="2.b"
predict("2.b", right=0, added_after=3)

# %% [markdown]
# Move the two sliders below to change the two terms. For which terms do the GELU of the sum and the sum of the GELUs nearly agree? For which terms are they far apart?


# %% tags=["explore"]
def two_terms(rank_0, rank_1):
    terms = torch.tensor([rank_0, rank_1])
    table = {
        "terms": terms,
        "GELU of the sum": gelu(terms.sum()),
        "sum of the GELUs": gelu(terms).sum(),
    }
    return viz.matrices({name: value.reshape(1, -1) for name, value in table.items()})


viz.explore(
    two_terms,
    rank_0=[3.0, 2.0, 1.0, 0.5, -0.5, -1.0, -3.0],
    rank_1=[-3.0, -1.0, -0.5, 0.5, 1.0, 2.0, 3.0],
)

# %% [markdown] task="2.3" title="Where GELU goes wrong, and where you wouldn't notice" difficulty=3 minutes=15
# This exercise runs in a single process. Write a function that measures the error, and then find two examples for `p = 2`:
#
# - `gelu_gap` computes the result twice: with GELU after the sum and with GELU before the sum. It returns the largest absolute difference between the two results.
# - `counter_example` returns an $X$ and an $A$ for which the gap is at least 1.
# - `lucky_example` returns an $X$ and an $A$ for which the gap is below $10^{-6}$, even though none of their elements lies between $-0.1$ and $0.1$.
#
# Why should you look for an example that hides the mistake? If your unit test happened to use such numbers, it would pass even though your program is wrong.


# %% exercise="2.3"
def gelu_gap(x: torch.Tensor, a: torch.Tensor, world_size: int) -> float:
    """Return max |GELU(sum of the ranks' results) - sum of GELU(each rank's result)|.

    A is split by rows. x [b, in] and a [in, out] are the full matrices, and world_size
    divides `in`.
    """
    ### BEGIN SOLUTION
    xs = x.chunk(world_size, dim=1)  # p of [b, in/p]
    rows = a.chunk(world_size, dim=0)  # p of [in/p, out]
    # p of [b, out], partial
    products = [x_shard @ a_shard for x_shard, a_shard in zip(xs, rows, strict=True)]
    right = gelu(sum(products))  # [b, out]
    wrong = sum(gelu(product) for product in products)  # [b, out]
    return (right - wrong).abs().max().item()
    ### END SOLUTION


def counter_example() -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [b, in] and a [in, out], with `in` even and gelu_gap(x, a, 2) >= 1."""
    ### BEGIN SOLUTION
    # the terms +3 and -3 add up to 0
    return torch.tensor([[3.0, 3.0]]), torch.tensor([[1.0], [-1.0]])
    ### END SOLUTION


def lucky_example() -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [b, in] and a [in, out], with `in` even and a gap below 1e-6.

    No element is between -0.1 and 0.1.
    """
    ### BEGIN SOLUTION
    # gelu(t) is t for large t
    return torch.tensor([[9.0, 9.0]]), torch.tensor([[1.0], [1.0]])
    ### END SOLUTION


# %% [markdown] hints="2.3"
# 1. To measure the gap, write one line of code that applies GELU after the sum and another line that applies GELU before the sum. In both examples, `XA` can be a matrix with just one entry. If you choose `in = 2` and `b = out = 1`, each rank holds one term of this entry, and you can find a good pair of terms with the sliders above.
# 2. `x.chunk(world_size, dim=1)` and `a.chunk(world_size, dim=0)` return the shards. To get a large gap, choose two terms that cancel. Their sum is 0 and so is GELU(0), but the GELUs of the two terms don't cancel. To get a tiny gap, choose terms in a range where GELU is practically linear.
# 3. If the two terms are 3 and -3, the two results differ by about 3. If both terms are 9, there's practically no gap, because `gelu(t)` is almost exactly `t` when `t` is large. In
#    that range, it makes no difference whether you apply GELU before or after the sum.

# %% check="2.3"
check("2.3", gelu_gap, counter_example, lucky_example)

# %% [markdown]
# In exercise 2.2, you compared four ways to split two matmuls in a row. An MLP has a GELU between its two matmuls. What would the ranks have to send before they can apply it, in each of your four combinations? Does the order of the combinations stay the same, and how many messages does a whole MLP need at least? Write down your guess, because in chapter 05, you'll design an MLP, and its check will count the messages.
#
# ## Fix it
#
# Transformer Engine, NVIDIA's library of optimized layers, had a helper that gathered a tensor along its last dimension. The helper worked like this:


# %%
def as_shipped(y):
    """[.., n] on each rank -> [.., p n] on every rank."""
    gathered = y.new_empty(dist.get_world_size() * y.shape[0], *y.shape[1:])
    dist.all_gather_into_tensor(gathered, y)
    return gathered.view(*y.shape[:-1], -1)


def columns_of_y(x, a):
    a_shard = a.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
    return as_shipped(x.to(device()) @ a_shard.to(device()))


as_it_was = launch(columns_of_y, 2, args=(X, A))[0]
viz.matrices(
    {"as shipped": as_it_was, "correct": X @ A}, compare={"as shipped": "correct"}
)

# %% [markdown]
# There's no error message. The result has the right shape, it's the same on every rank, and it even contains all the right values! But many of these values are in the wrong places. Nobody noticed the bug until someone compared gradients (TransformerEngine issue 530, fixed in pull request 531).
# (The original helper didn't need the `view`, because NCCL only checks the number of elements.)

# %% [markdown] task="2.4" title="Fix a gather" difficulty=3 minutes=10
# Find out the order in which `all_gather_into_tensor` fills its output, and then fix the function. The fixed function should still make only one all-gather call. It should work for a `y` with any number of dimensions, whether or not `y` is contiguous.


# %% exercise="2.4"
def gather_last_dim(y: torch.Tensor) -> torch.Tensor:
    """Return the ranks' y [.., n] side by side, in rank order: [.., p n] on every rank.

    y may be non-contiguous, for example a slice of a wider tensor, but collectives need
    contiguous tensors.
    """
    ### BEGIN SOLUTION
    gathered = y.new_empty(dist.get_world_size() * y.shape[0], *y.shape[1:])
    dist.all_gather_into_tensor(gathered, y.contiguous())  # one rank's y after another
    by_rank = gathered.view(dist.get_world_size(), *y.shape)  # [p, .., n]
    return by_rank.movedim(0, -2).flatten(-2)  # [.., p, n] -> [.., p n]
    ### BROKEN
    # gathered = y.new_empty(dist.get_world_size() * y.shape[0], *y.shape[1:])
    # dist.all_gather_into_tensor(gathered, y)
    # return gathered.view(*y.shape[:-1], -1)
    ### END SOLUTION


# %% [markdown] hints="2.4"
# 1. Launch `as_shipped` on two ranks, with `[[0, 0], [1, 1]]` on rank 0 and `[[2, 2], [3, 3]]` on rank 1. In what order do these numbers appear in the output?
# 2. The collective knows nothing about rows and columns, so its output starts with all of rank 0's values, followed by all of rank 1's values, and so on. Suppose you view the output as a tensor whose first dimension is the rank. Which shape does this tensor have?
# 3. Start with `y = y.contiguous()`. View the gathered tensor as `[p, .., n]`. Then move the first dimension right before the last one with `movedim`, and merge these two dimensions with `flatten`. (Alternatively, gather the contiguous `y` into a
#    list with `dist.all_gather`, and join the list with `torch.cat`.)

# %% check="2.4"
check("2.4", gather_last_dim)

# %% [markdown]
# **Predict.** Why did nobody notice? Suppose a unit test calls the broken function with a two-dimensional `y`, and the test passes. If the test runs on many ranks, what's the largest number of rows that `y` can have without revealing the bug? If `y` has many rows, what's the largest number of ranks that doesn't reveal the bug?

# %% predict="2.c"
predict("2.c", rows=1, ranks=1)

# %% [markdown]
# ## Break it
#
# After the first matmul, rank $r$ holds some columns of $XA$, which must be multiplied by the matching rows of $B$. What if the columns and rows don't match? Your `shard` returns blocks. In the code below, `interleaved` returns every $p$-th row or column instead. All shapes stay the same, so nothing raises an error.
#
# **Predict.** Suppose you split $A$ by columns and $B$ by rows, and all-reduce the result. Is $Z$ correct if only $A$ is interleaved? Is $Z$ correct if both matrices are interleaved? (Write `True` or `False`.)

# %% predict="2.d"
predict("2.d", only_a=False, both=True)


# %%
def interleaved(matrix, dim, rank, world_size):
    return matrix.movedim(dim, 0)[rank::world_size].movedim(0, dim)


def z_of(x, a, b, split_a, split_b):
    mine = dist.get_rank(), dist.get_world_size()
    a_shard, b_shard = split_a(a, 1, *mine), split_b(b, 0, *mine)
    z = x.to(device()) @ a_shard.to(device()) @ b_shard.to(device())
    dist.all_reduce(z)
    return z


ways = {
    "blocks": (shard, shard),
    "only A interleaved": (interleaved, shard),
    "interleaved": (interleaved, interleaved),
}
# A serves as B, too
products = {name: launch(z_of, 2, args=(X, A, A, *ways[name]))[0] for name in ways}
viz.matrices(products)

# %% [markdown]
# The order of the hidden features doesn't matter, as long as both matrices agree on it. If your model ever produces nonsense without raising an error, look for two splits that disagree.

# %%
symptoms(2)

# %% [markdown]
# ## In the wild
#
# <details><summary>Going deeper: Megatron-Core, DTensor, and splits in two dimensions</summary>
#
# - **Megatron-Core** implements both splits as layers in `megatron/core/tensor_parallel/layers.py`. The layers are called `ColumnParallelLinear` and
#   `RowParallelLinear`, and you'll write both of them in chapter 04.
#
# - **PyTorch** has a tensor type called DTensor (`torch.distributed.tensor`), which keeps track of how it's distributed across ranks. In DTensor, replicated, sharded, and partial are called `Replicate()`, `Shard(dim)`, and `Partial()`. A DTensor may also be split unevenly. In that case, PyTorch splits the tensor the way `torch.chunk` does and pads the shards before a collective.
#
# - **2D, 2.5D, and 3D tensor parallelism** arrange the ranks in a square or a cube and split both matrices along both dimensions. No rank needs a full $X$ or $Y$ anymore,
#   but the ranks have to send more messages. Colossal-AI's documentation describes all three schemes. In this course, "3D" means something else, namely the combination of tensor,
#   pipeline, and data parallelism (chapter 14).
#
# - **tplab** has its own `shard` and `unshard` in `tplab/tensor/sharding.py`. Starting with the next chapter, we'll import these two functions from tplab.
#
# </details>
#
# DTensor follows the rules in the table from the beginning of this chapter. When we multiply two DTensors, PyTorch works out how the result is distributed.


# %%
def ask_dtensor(x, a):
    from torch.distributed.tensor import (
        Replicate,
        Shard,
        distribute_tensor,
        init_device_mesh,
    )

    mesh = init_device_mesh(device().type, (dist.get_world_size(),))

    def place(matrix, placement):
        return distribute_tensor(matrix, mesh, [placement])

    column = place(x, Replicate()) @ place(a, Shard(1))
    row = place(x, Shard(1)) @ place(a, Shard(0))
    return {"column split": str(column.placements), "row split": str(row.placements)}


launch(ask_dtensor, 2, args=(X, A))[0]

# %% [markdown]
# ## Your library so far
#
# Your library can now split any tensor and find the cheapest way to compute two matmuls in a row.

# %%
from tplab.course import library

library(2)

# %% [markdown]
# So far, we've only looked at the forward pass. But you want to use these splits to *train* a model. When you call `backward()`, autograd computes the gradients of your matmuls, but it doesn't know anything about the collectives. Which gradients will be wrong?
