# %% [markdown]
# # A first taste
#
# Suppose a weight matrix is too big for your GPU. So you get a second GPU and put half of the matrix on each. How can you multiply by this matrix if neither GPU ever sees all of it?
#
# The answer is called **tensor parallelism**. About 15 minutes from now, you'll have built tensor parallelism yourself and run it in two real processes on this machine. You don't need a GPU.

# %% tags=["setup"]
import torch
import torch.distributed as dist

from tplab import device, launch, viz
from tplab.course import check, library, predict, show_failure

# %% [markdown]
# ## Two processes, one sum
#
# Let's start with a single number per process. Run this cell with Shift+Enter.


# %%
def add_up():
    # 10 on rank 0, 11 on rank 1
    x = torch.tensor([10.0 + dist.get_rank()], device=device())
    dist.all_reduce(x)
    return x.item()


list(launch(add_up, 2))

# %% [markdown]
# `launch` started two fresh Python processes, and each of them ran the entire function. We'll call the processes **rank 0** and **rank 1**. The two ranks started with different numbers, but both ended up with the sum. That's because `all_reduce` adds up the tensors from all ranks and writes the sum back into every rank's tensor.
#
# No main process collects the numbers. All ranks run the same code, and `all_reduce` is the only line where they communicate.
#
# **Predict.** What would each of *four* ranks return? Replace the dots and run the cell. Then change `launch(add_up, 2)` to `launch(add_up, 4)`, and see whether you were right.

# %% predict="S.a"
predict("S.a", each_rank=46)

# %% [markdown]
# ## Two processes, one matmul
#
# Now we want to compute $Y = XA$, but $A$ is too big for one process. Let's give the top half of $A$ to rank 0 and the bottom half to rank 1. In a matmul, the top half of $A$ is only ever multiplied by the left half of $X$, and the bottom half of $A$ is only ever multiplied by the right half of $X$. So each rank also needs only its own half of $X$.

# %%
X = torch.tensor([[2.0, 1, 0, 1], [1, 0, 3, 1]])
A = torch.tensor([[1.0, 2, 0, 1], [0, 1, 1, 0], [2, 0, 1, 1], [1, 1, 0, 2]])
viz.product(X, A, kind="row", p=2)

# %% [markdown]
# Here are the two ranks' results as numbers, next to the correct $Y$.

# %%
viz.matrices({"rank 0": X[:, :2] @ A[:2], "rank 1": X[:, 2:] @ A[2:], "X @ A": X @ A})

# %% [markdown]
# Both results have the full shape of $Y$, but neither is correct. Their sum is, but each rank has just one of the two terms. How can both ranks get all of $Y$?

# %% [markdown] task="S.1" title="A matmul split by rows" difficulty=1 minutes=4
# On every rank, your function receives that rank's columns of $X$ and rows of $A$. It should return the full $Y$ on **every** rank, and send no more than it has to. Three lines are enough.


# %% exercise="S.1"
def row_product(x_shard: torch.Tensor, a_shard: torch.Tensor) -> torch.Tensor:
    """Return Y = X A [.., out] on every rank, where A is split by rows.

    x_shard [.., in/p]: this rank's columns of X
    a_shard [in/p, out]: this rank's rows of A
    """
    ### BEGIN SOLUTION
    y = x_shard @ a_shard  # [.., out]: this rank's partial sums
    dist.all_reduce(y)
    return y
    ### END SOLUTION


# %% [markdown] hints="S.1"
# 1. Every element of `Y` is a sum over all the rows of `A`. Which terms of that sum can this rank compute? Which ranks can compute the remaining terms?
# 2. Add up the two ranks' results from the picture above. What do you get? Which line of `add_up` sums values across ranks?
# 3. Write `y = x_shard @ a_shard`, then `dist.all_reduce(y)`, and then `return y`. Don't write `return dist.all_reduce(y)`, because `all_reduce` works in place and returns `None`.

# %% check="S.1"
check("S.1", row_product)

# %% [markdown] task="S.2" title="A matmul split by columns" difficulty=1 minutes=5
# Now let's split $A$ the other way. Rank 0 gets the left half of $A$'s columns, rank 1 gets the right half, and both ranks have all of $X$. Which part of $Y$ can each rank compute this time?
#
# You'll want `dist.all_gather(parts, y)`. Here, `parts` is a list that you make beforehand, with one tensor per rank. Each tensor in the list has the same shape as `y`, and its values don't matter, because `all_gather` overwrites them. The call fills `parts[0]` with the `y` of rank 0, `parts[1]` with the `y` of rank 1, and so on.


# %% exercise="S.2"
def column_product(x: torch.Tensor, a_shard: torch.Tensor) -> torch.Tensor:
    """Return Y = X A [.., out] on every rank, where A is split by columns.

    x [.., in]: all of X, on every rank; a_shard [in, out/p]: this rank's columns of A
    """
    ### BEGIN SOLUTION
    y = x @ a_shard  # [.., out/p]: this rank's columns of Y
    parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, y)
    return torch.cat(parts, dim=-1)  # [.., out]
    ### END SOLUTION


# %% [markdown] hints="S.2"
# 1. Each column of `Y` depends on a single column of `A`. Does this rank need any data from the other ranks to compute its own columns of `Y`?
# 2. This time, there's nothing to add up. The ranks hold different columns of `Y`, and every rank needs all the columns, side by side.
# 3. Create the list with `parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]`. Then call `dist.all_gather(parts, y)`, and return `torch.cat(parts, dim=-1)`.

# %% check="S.2"
check("S.2", column_product)

# %% [markdown]
# That's tensor parallelism! Both checks recorded every message that your ranks sent, and no message contained any part of $A$. The weights stay where they are, and the ranks exchange only their results.
#
# ## When a rank doesn't show up
#
# Here's an optimization that looks harmless. If all of a rank's columns of $X$ are zero, its partial sums are zero, too. So this rank can skip the work and immediately return zeros. In the next cell, this happens on rank 1.
#
# **Predict.** Unfortunately, this program never finishes. Which rank gets stuck, and which rank is it waiting for?

# %% predict="S.b"
predict("S.b", stuck=0, waits_for=1)


# %%
def lazy_product(x, a):
    rank = dist.get_rank()
    x_shard = x.chunk(2, -1)[rank].to(device())
    a_shard = a.chunk(2, 0)[rank].to(device())
    if not x_shard.any():
        return x_shard @ a_shard  # only zeros, so there's nothing to add
    return row_product(x_shard, a_shard)


half_empty = X * torch.tensor([1.0, 1, 0, 0])  # rank 1's columns are zero
with show_failure():
    launch(lazy_product, 2, args=(half_empty, A))

# %% [markdown]
# That's a **deadlock**. A collective such as `all_reduce` can't finish until every rank has called it, even a rank that only has zeros to add. Normally, your program would just hang. This report names the rank that's waiting, the rank that never joined, and the line where the program got stuck. You wrote that line yourself!
#
# ## The question
#
# An MLP consists of two matmuls with a nonlinearity between them: $\mathrm{GELU}(XA)\,B$. You can split each of the two weight matrices by rows or by columns, so there are four combinations. If the ranks have to exchange results after each matmul, the forward pass needs two collectives.
#
# *But one of the four combinations gets by with a single collective for the entire MLP. Which combination is it?*
#
# Write down your guess. You'll test it in chapter 02, turn it into a layer in chapter 05, and train a GPT with it in the capstone.
#
# ## Your library so far
#
# Once a function passes its check, it's added to your own Python package. By the end of the course, this package can train a GPT.

# %%
library("start")

# %% [markdown]
# Next, [chapter 00](00_why_parallel.ipynb) shows why anyone would go to all this trouble.
