# %% [markdown]
# # A first taste
#
# Suppose a weight matrix is too big for your GPU. So you get a second GPU and put half of the matrix on each of them. How can you multiply by this matrix if neither GPU ever sees all of it?
#
# The answer is called **tensor parallelism**. About 15 minutes from now, you'll have built the heart of it yourself, and it will run in
# two real processes on this machine. You don't need a GPU for that.

# %% tags=["setup"]
import torch
import torch.distributed as dist

from tplab import device, launch, viz
from tplab.course import check, library, predict, show_failure

# %% [markdown]
# ## Two processes, one sum
#
# Let's begin with a single number per process. Run this cell with Shift+Enter.


# %%
def add_up():
    x = torch.tensor([10.0 + dist.get_rank()], device=device())  # 10 on rank 0, 11 on rank 1
    dist.all_reduce(x)
    return x.item()


list(launch(add_up, 2))

# %% [markdown]
# `launch` started two fresh Python processes, and each of them ran the whole function. We call them **rank 0** and **rank 1**. They
# began with different numbers and both ended up with the sum, because `all_reduce` adds up the ranks' tensors and writes the total
# back into every one of them.
#
# No main process collects the numbers. All ranks run the same code, and `all_reduce` is the one line where they meet.
#
# **Predict.** What would each of *four* ranks return? Replace the dots and run the cell. Then change the 2 above into a 4, and see
# whether you were right.

# %% predict="S.a"
predict("S.a", each_rank=46)

# %% [markdown]
# ## Two processes, one matmul
#
# Now we want $Y = XA$, and $A$ is too big. Let's give the top half of its rows to rank 0 and the
# bottom half to rank 1. Row $k$ of $A$ only ever meets column $k$ of $X$, so each rank also needs just half of the columns of $X$.

# %%
X = torch.tensor([[1.0, 2, 3, 4], [0, 1, 0, -1]])
A = torch.tensor([[1.0, 0, 2, 1], [0, 1, 1, 0], [1, 1, 0, 2], [2, 0, 1, 1]])
viz.matrices({"rank 0": X[:, :2] @ A[:2], "rank 1": X[:, 2:] @ A[2:], "right": X @ A})

# %% [markdown]
# Both results have the full shape of $Y$, and neither is right. What would you do with them?

# %% [markdown] task="S.1" title="A matmul split by rows" difficulty=1 minutes=4
# Your function runs on every rank. It gets that rank's columns of $X$ and that rank's rows of $A$, and it should return the full
# $Y$ on **every** rank. Three short lines are enough.


# %% exercise="S.1"
def row_product(x_shard: torch.Tensor, a_shard: torch.Tensor) -> torch.Tensor:
    """Return Y = X A [.., out] on every rank, where A is split by rows.

    x_shard [.., in/p]: this rank's columns of X; a_shard [in/p, out]: this rank's rows of A
    """
    ### BEGIN SOLUTION
    y = x_shard @ a_shard  # [.., out]: this rank's share of every sum
    dist.all_reduce(y)
    return y
    ### END SOLUTION


# %% [markdown] hints="S.1"
# 1. Every entry of $Y$ is a sum over all the rows of $A$. Which of those terms can this rank compute, and who has the others?
# 2. Add the two results in the picture above, and compare the sum with the right one. Which line of `add_up` adds things across ranks?
# 3. `y = x_shard @ a_shard`, then `dist.all_reduce(y)`, then `return y`. Don't return what `all_reduce` returns: it works in
#    place, so it returns `None`.

# %% check="S.1"
check("S.1", row_product)

# %% [markdown] task="S.2" title="A matmul split by columns" difficulty=1 minutes=5
# Now let's split $A$ the other way. Rank 0 gets the left half of its columns and rank 1 the right half, while both have all of $X$.
# What's in a rank's result this time, and what's missing?
#
# You'll want `dist.all_gather(parts, y)`. Give it a list `parts` with one empty tensor per rank, each shaped like `y`, and it fills
# them with the `y` of rank 0, of rank 1, and so on.


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
# 1. Each column of $Y$ depends on a single column of $A$. So does this rank's result still need something from the other rank, or is it complete?
# 2. Nothing has to be added this time. The ranks hold different columns of $Y$, and everyone needs all of them, side by side.
# 3. `parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]`, then `dist.all_gather(parts, y)`, then
#    `torch.cat(parts, dim=-1)`.

# %% check="S.2"
check("S.2", column_product)

# %% [markdown]
# That's tensor parallelism. Both checks also recorded every message that your ranks sent, and none of them contained any part of $A$. The weights stay where they are, and the ranks only exchange results.
#
# ## When somebody doesn't show up
#
# All ranks must take part in a collective such as `all_reduce`. Here, only rank 0 calls your function.
#
# **Predict.** Which rank gets stuck, and which one is it waiting for?

# %% predict="S.b"
predict("S.b", stuck=0, waits_for=1)


# %%
def rank_1_has_better_things_to_do(x, a):
    if dist.get_rank() == 0:
        row_product(x[:, :2].to(device()), a[:2].to(device()))


with show_failure():
    launch(rank_1_has_better_things_to_do, 2, args=(X, A))

# %% [markdown]
# That's a **deadlock**. Normally, your program would just hang without any message. This report tells you which rank is waiting, which rank never joined, and on which line it happened. It's a line that you wrote yourself.
#
# ## The question
#
# An MLP is two matmuls with a nonlinearity between them: $\mathrm{GELU}(XA)\,B$. You can split each matrix in two ways, so there are four
# combinations. If every matmul needs a message, the MLP needs two.
#
# *But for one of the four combinations, a single message is enough for the entire MLP. Which one is it?*
#
# Write down your guess. You'll find the answer yourself in chapter 05, and you'll use it to train a GPT in the capstone.
#
# ## Your library so far
#
# Every function that passes its check is added to your own Python package. By the end of the course, this package will be able to train a GPT.

# %%
library("start")
