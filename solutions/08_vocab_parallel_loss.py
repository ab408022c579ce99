# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 08 · The vocabulary-parallel loss
#
# **The question.** The output layer gives every token a score for each word of the vocabulary, and each rank has the scores of its own words only. How do you compute softmax and loss, forward and backward, without ever putting all scores on one rank?
#
# **What you will have built.** The cross-entropy of Megatron-LM: the largest logit, the log-sum-exp and the target's logit over all ranks, a backward pass by hand, and on top of them the loss of a real training run, with padding, ignored tokens and label smoothing. At the end you train a model with it and
# compare its memory with that of the naive way.
#
# $$\text{loss} \;=\; -\log \mathrm{softmax}(z)_t \;=\; \log \sum_{i} e^{z_i} \;-\; z_t$$
#
# Symbols: `b` batch, `s` sequence length, `n = b·s` tokens, `h` hidden size, `v` vocabulary size, `p` number of ranks; $z$ the **logits** of a token (its `v` scores), $t$ its **target** (the id that is right). An **id** is the number of a word, 0 to `v - 1`. From chapter 03 you need **g** (all-reduce forward, nothing backward),
# from chapter 07 the output layer `parallel_logits`, whose output `[b, s, v/p]` is cut by columns: rank $r$ has those of the ids from $r \cdot v/p$ on. About 90 minutes.

# %% tags=["setup"]
import math
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

from tplab import device, launch, record, viz
from tplab.common import corpus
from tplab.course import check, predict, symptoms
from tplab.memory import MemoryMeter, saved_for_backward
from tplab.tensor import (
    VocabParallelEmbedding,
    gather_from_region,
    load_full_state_dict,
    parallel_linear_cross_entropy,
    parallel_logits,
    reduce_from_region,
    shard,
    vocab_parallel_cross_entropy,
)

# %% [markdown]
# What the output layer leaves: each rank has all tokens, and some columns of their logits. $E$ is the table of the embedding; each token's vector is multiplied with all its rows.

# %%
viz.product((4, 8), (8, 12), kind="column", p=2, names=("X", "Eᵀ"), title="the logits X Eᵀ, [n, v], cut by columns")

# %% [markdown]
# ## 1 · Three numbers a token
#
# The easy way is to gather the logits, `[n, v]` on every rank, and call `F.cross_entropy`. A vocabulary is far larger than `h`: GPT-2 has 50,257 words and `h = 768` in its smallest form. So the logits are one of the largest tensors of a training run. Gathered, they are sent over the links, and then every rank holds all of them, their softmax and their gradient.
#
# Look at the formula again. For one token it needs a sum over all columns, and one single logit:
#
# $$\log \sum_i e^{z_i} - z_t$$
#
# A sum over columns is a sum over ranks of sums over columns. Each rank adds up the exponentials of its own columns, an all-reduce adds up these `p` numbers. The logit $z_t$ is in one rank's columns, and an all-reduce, where the others put in 0, brings it to all. One more number is needed
# for numerical reasons: $m$, the largest logit of the token, so that nothing overflows (section 2). With it,
#
# $$\log \sum_i e^{z_i} = m + \log S, \qquad S = \sum_i e^{z_i - m}$$
#
# Three numbers a token: $m$, $S$ and $z_t$. Three all-reduces of `n` numbers in place of one all-gather of `n·v`.
#
# **Predict.** `n = 1024` tokens, `v = 32768`, float32. How many bytes has the message of the all-gather (the gathered tensor), and how many have the three all-reduces together?

# %% predict="8.a"
predict("8.a", gather=134217728, all_reduces=12288)

# %% [markdown]
# Section 9 measures both. First see how the softmax of one token is put together. The numbers come from real ranks: each has its columns of the logits, its own maximum and its own sum. (For this picture each of them may look at all logits, to know $m$ and $S$. Soon it will not need to.)
#
# Turn the knobs. Which numbers depend on how many ranks there are? And what happens to the ranks' sums when the logits lie far apart?


# %%
def softmax_of_one_token(z):
    """z [v], all logits of one token: what this rank has of its softmax."""
    mine = shard(z, -1, dist.get_rank(), dist.get_world_size())  # [v/p]
    m, S = z.max(), (z - z.max()).exp().sum()  # of all columns, for the picture
    exp = (mine - m).exp()  # [v/p]
    return {"logits": mine, "max": mine.max(), "m": m, "exp": exp, "sum": exp.sum(), "S": S, "softmax": exp / S}


# %% tags=["explore"]
def show_softmax(p, scale):
    z = scale * torch.randn(16, generator=torch.Generator().manual_seed(8))
    results = launch(softmax_of_one_token, p, args=(z,))
    return viz.softmax(list(results), title=f"one token, v = 16, p = {p}, logits of a size of about {scale}")


viz.explore(show_softmax, p=(2, 4), scale=(1, 3, 10, 1000))

# %% [markdown]
# $m$, $S$ and the softmax are the same for 2 and 4 ranks: they are the token's, not the rank's. What a rank has is its share. With large logits one rank has nearly everything; with a scale of 1000 a single column has all that the eye can see.
#
# ## 2 · Why the maximum
#
# In float32 `exp` overflows early. The second column is what the formula says, with its gradient beside it. The last is the same number with the maximum taken out:

# %%
rows = []
for z in ([1.0, 2.0, 3.0], [86.0, 87.0, 88.0], [87.0, 88.0, 89.0], [10000.0, 10001.0, 10002.0], [-10000.0, -10001.0]):
    z = torch.tensor(z, requires_grad=True)
    m = z.detach().max()
    direct, shifted = z.exp().sum().log(), m + (z - m).exp().sum().log()
    (gradient,) = torch.autograd.grad(direct, z)
    rows.append(
        {
            "logits": z.tolist(),
            "log Σ exp(z)": f"{direct:.3f}",
            "its gradient": ", ".join(f"{value:.2f}" for value in gradient),
            "m + log Σ exp(z - m)": f"{shifted:.3f}",
        }
    )
viz.table(rows)

# %% [markdown]
# The largest exponent is 0 then, so nothing overflows; and one term of the sum is 1, so its logarithm is finite. Without it a logit need not be 10,000 to make an infinity, 89 is enough; and an infinity in the loss makes NaNs in its gradient, and so in the parameters, one step later.
#
# It need not be the maximum that is subtracted: any number will do that is near it. But it must be the *same* number on all ranks, since sums with different numbers taken out are no terms of one sum.
#
# **Predict.** Rank 0 has the logits `[0, 0]`, rank 1 has `[100, 100]`. Each rank subtracts its *own* maximum before `exp`, and the ranks' sums are added up. What comes out? And what, to a whole number, if both subtract 100?

# %% predict="8.b"
predict("8.b", own_maximum=4, common_maximum=2)

# %% [markdown] task="8.1" title="The largest logit" difficulty=1 minutes=8
# The all-reduce of chapter 01 adds up. It takes the largest instead with `op=dist.ReduceOp.MAX`. The result is a constant as far as autograd is concerned, since $m$ drops out of the formula; `@torch.no_grad()` sees to that.
#
# A column may hold `-inf`: that is how padding is left out, as you will see. A rank may even have nothing else.


# %% exercise="8.1"
@torch.no_grad()
def vocab_max(logits, group=None):
    """The largest logit of each token, over the columns of all ranks.

    in:  logits    [.., v/p], this rank's columns
    out: m         [..], the same on every rank
    One all-reduce of one number a token.
    """
    ### BEGIN SOLUTION
    m = logits.amax(-1)  # [..], of this rank's columns
    dist.all_reduce(m, op=dist.ReduceOp.MAX, group=group)
    return m
    ### END SOLUTION


# %% [markdown] hints="8.1"
# 1. The largest of all columns is the largest of `p` numbers. Which ones, and who has them?
# 2. First the maximum over this rank's columns, the last dimension: `logits.amax(-1)`. It is a new tensor, so a collective may write into it.
# 3. `m = logits.amax(-1)`, then `dist.all_reduce(m, op=dist.ReduceOp.MAX, group=group)`, then `return m`. The all-reduce itself returns `None`.

# %% check="8.1"
check("8.1", vocab_max)

# %% [markdown]
# ## 3 · The sum
#
# Now $m + \log S$. This time autograd should follow, so the sum over the ranks needs an operator with the right backward. Every rank computes the same loss from $S$ and has the whole gradient $dS$; its own term of the sum gets that gradient as it is. That is **g**: `reduce_from_region(x, group)`, which you built in chapter 03.

# %% [markdown] task="8.2" title="Log-sum-exp" difficulty=2 minutes=12
# Use `vocab_max` and `reduce_from_region`. The check looks at the output and its gradient, with logits of 10,000 and of -10,000, with ranks whose logits lie far apart, and with a rank that has nothing but `-inf`.


# %% exercise="8.2"
def vocab_logsumexp(logits, group=None):
    """log(sum of exp(z)) of each token, over the columns of all ranks.

    in:  logits    [.., v/p], this rank's columns
    out: lse       [..], the same on every rank
    Two all-reduces of one number a token forward, nothing backward.
    """
    ### BEGIN SOLUTION
    m = vocab_max(logits, group)  # [..]
    part = (logits - m.unsqueeze(-1)).exp().sum(-1)  # [..], this rank's term
    return m + reduce_from_region(part, group).log()  # [..]
    ### END SOLUTION


# %% [markdown] hints="8.2"
# 1. Write the formula in the order of its steps: subtract `m`, `exp`, sum over my columns, sum over the ranks, `log`, add `m`. Which of them need another rank?
# 2. `m` has the shape `[..]`, the logits `[.., v/p]`: `m.unsqueeze(-1)` is `[.., 1]` and can be subtracted. The logarithm comes after the sum over the ranks.
# 3. `part = (logits - m.unsqueeze(-1)).exp().sum(-1)`, and `return m + reduce_from_region(part, group).log()`.

# %% check="8.2"
check("8.2", vocab_logsumexp)

# %% [markdown]
# ## 4 · The target's logit
#
# All ranks know the targets, `[..]`, ids of the whole vocabulary. For one token exactly one rank has the target's column. It is the look-up of chapter 07 once more: shift the id to a column of mine, look up something harmless where it is not mine, put 0 in its place, and add up over the ranks.
#
# There is a trap in it. An id that is no id at all, -1 or $v$ say, belongs to *no* rank. All of them put in 0, and the loss becomes the log-sum-exp minus 0: a number like any other. Plain PyTorch raises an error there. So should you.

# %% [markdown] task="8.3" title="The target's logit" difficulty=3 minutes=15
# For an id below 0 or not below $v$, raise `IndexError` with the id in the message. All ranks see the same targets, so all of them raise, before any collective, and nobody waits for anybody. ($v$ is `p` times the number of columns of one rank.)


# %% exercise="8.3"
def target_logit(logits, target, group=None):
    """The logit of each token's target.

    in:  logits    [.., v/p], this rank's columns
         target    [..], ids of the whole vocabulary, replicated
    out: z_t       [..], the same on every rank
    One all-reduce of one number a token forward, nothing backward. IndexError for an id outside the vocabulary.
    """
    ### BEGIN SOLUTION
    columns = logits.shape[-1]  # v/p
    v = columns * dist.get_world_size(group)
    outside = (target < 0) | (target >= v)  # [..]
    if outside.any():
        raise IndexError(f"target {target[outside][0].item()} is outside the vocabulary: its ids are 0 to {v - 1}")
    column = target - dist.get_rank(group) * columns  # [..]
    mine = (column >= 0) & (column < columns)  # [..]
    column = column.masked_fill(~mine, 0)  # any column of mine will do there
    found = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1)  # [..]
    return reduce_from_region(torch.where(mine, found, 0), group)  # [..]
    ### END SOLUTION


# %% [markdown] hints="8.3"
# 1. The id `t` is in column `t - r * v / p` of rank `r`. For which values is that one of its columns? And what does a rank contribute for a target that it does not have?
# 2. `logits.gather(-1, column.unsqueeze(-1)).squeeze(-1)` looks up one column for each token. Set the columns that are not yours to 0 first, or it fails. Then `torch.where(mine, found, 0)`; a product with the mask would make NaN of `-inf`.
# 3. `column = target - dist.get_rank(group) * columns`, `mine = (column >= 0) & (column < columns)`, `column = column.masked_fill(~mine, 0)`, then the two lines of hint 2, and `reduce_from_region` around the last one. Before all this: `if ((target < 0) | (target >= v)).any(): raise IndexError(...)`.

# %% check="8.3"
check("8.3", target_logit)

# %% [markdown]
# The difference of the two is a loss, and autograd knows its gradient. Beside `F.cross_entropy` on one process:


# %%
def loss_by_parts(logits, target):
    """logits [n, v] and target [n], the same on every rank: loss and gradient from this rank's columns alone."""
    mine = shard(logits, -1, dist.get_rank(), dist.get_world_size()).clone().requires_grad_()  # [n, v/p]
    loss = (vocab_logsumexp(mine) - target_logit(mine, target)).mean()
    loss.backward()
    return {"loss": loss.item(), "dlogits": mine.grad}


generator = torch.Generator().manual_seed(0)
z = torch.randn(64, 1000, generator=generator, dtype=torch.float64).requires_grad_()  # [n, v]
t = torch.randint(1000, (64,), generator=generator)  # [n]
plain = F.cross_entropy(z, t)
plain.backward()
rows = [
    {"": "F.cross_entropy, one process", "loss": f"{plain.item():.12f}", "largest difference of the gradient": None}
]
for p in (1, 2, 4):
    parts = launch(loss_by_parts, p, args=(z.detach(), t))
    gradient = torch.cat([part["dlogits"] for part in parts], -1)  # [n, v], to compare
    off = f"{(gradient.cpu() - z.grad).abs().max():.0e}"
    rows.append({"": f"yours, p = {p}", "loss": f"{parts[0]['loss']:.12f}", "largest difference of the gradient": off})
viz.table(rows)

# %% [markdown]
# It is right, and no rank ever had more than its columns. But autograd is not thrifty. Count what it keeps from the forward pass for the backward pass, in units of one shard of the logits, `[n, v/p]`:


# %%
def kept_by_autograd(loss_of):
    """How many tensors of the size of a shard of logits are kept for the backward pass, and how many bytes in all."""
    logits = torch.randn(64, 1024 // dist.get_world_size(), device=device(), requires_grad=True)  # [n, v/p]
    target = torch.arange(64, device=device())  # [n]
    with saved_for_backward() as kept:
        loss_of(logits, target)
    return {
        "shards of logits": sum(torch.Size(shape) == logits.shape for shape, _, _ in kept.pieces),
        "all, in bytes": kept.bytes,
    }


launch(kept_by_autograd, 2, args=(lambda z, t: vocab_logsumexp(z) - target_logit(z, t),))[0]

# %% [markdown]
# Two: the logits, which the look-up keeps and which the output layer made anyway, and the exponentials, which the derivative of `exp` needs. And in the backward pass one step after the other makes a tensor of this size anew: the gradient of `exp`, that of the look-up (nearly all zeros), and their sum.
#
# ## 5 · The backward by hand
#
# The gradient of this loss is short enough to write down. Differentiate $\log \sum_i e^{z_i} - z_t$ with respect to $z_j$:
#
# $$\frac{\partial\,\text{loss}}{\partial z_j} = \frac{e^{z_j}}{\sum_i e^{z_i}} - [j = t] = \mathrm{softmax}(z)_j - [j = t]$$
#
# **Softmax minus one-hot**: one-hot is 1 in the target's column and 0 in all others. With the log-sum-exp at hand the softmax is $e^{z_j - \text{lse}}$. A rank needs it in its own columns only, and it has everything for that.
#
# **Predict.** One token on 4 ranks, its target is in rank 2's columns, and the upstream gradient is 1. How many collectives does the backward need? What do the logits' gradients add up to, over all columns of all ranks? On which ranks is the sum over the rank's own columns negative?

# %% predict="8.c"
predict("8.c", collectives=0, sum=0, negative_on=[2])

# %% [markdown] task="8.4" title="The backward by hand" difficulty=4 minutes=20
# An autograd function, as in chapter 03. Forward calls `vocab_logsumexp` and `target_logit` (inside `forward` autograd is not looking, so nothing is kept but what you save), and saves what backward needs: `ctx.save_for_backward(...)` takes tensors, `ctx.saved_tensors` gives them back.
#
# - Keep at most one tensor `[.., v/p]`. The logits are there anyway, so they cost nothing.
# - `dloss` `[..]` is the upstream gradient, one number for each token. It scales everything.
# - Change neither the caller's logits nor anything that you saved: a second backward has to give the same.


# %% exercise="8.4"
class VocabParallelCrossEntropy(Function):
    """apply(logits, target, group) -> the loss of each token, replicated."""

    @staticmethod
    def forward(ctx, logits, target, group):
        """logits [.., v/p], this rank's columns, target [..] -> loss [..]."""
        ### BEGIN SOLUTION
        lse = vocab_logsumexp(logits, group)  # [..]
        columns = logits.shape[-1]
        ctx.start = dist.get_rank(group) * columns  # this rank's first id
        ctx.save_for_backward(logits, target, lse)
        return lse - target_logit(logits, target, group)  # [..]
        ### END SOLUTION

    @staticmethod
    def backward(ctx, dloss):
        """dloss [..] -> dlogits [.., v/p], and None for target and group. No communication."""
        ### BEGIN SOLUTION
        logits, target, lse = ctx.saved_tensors
        dlogits = (logits - lse.unsqueeze(-1)).exp_()  # [.., v/p], the softmax
        column = target - ctx.start  # [..]
        mine = (column >= 0) & (column < logits.shape[-1])  # [..]
        column, one = column.masked_fill(~mine, 0), mine.to(logits.dtype)  # [..] each; one: 1 where mine, else 0
        dlogits.scatter_add_(-1, column.unsqueeze(-1), -one.unsqueeze(-1))  # minus one-hot
        return dlogits.mul_(dloss.unsqueeze(-1)), None, None
        ### END SOLUTION


# %% [markdown] hints="8.4"
# 1. Forward is one line more than the two calls: what must backward know that it cannot compute from the logits and the target without asking other ranks?
# 2. Save `logits`, `target` and the log-sum-exp. Backward: `dlogits = (logits - lse.unsqueeze(-1)).exp()` is a new tensor, so you may write into it. Then subtract 1 in the target's column, but only for tokens whose target is mine (`column` and `mine` as in 8.3), and multiply by `dloss.unsqueeze(-1)`.
# 3. `dlogits.scatter_add_(-1, column.unsqueeze(-1), -mine.to(logits.dtype).unsqueeze(-1))` adds -1 in column `column` where `mine` is true and 0 elsewhere. At the end `return dlogits * dloss.unsqueeze(-1), None, None`. The rank's first id, `dist.get_rank(group) * logits.shape[-1]`, can be put on `ctx` in forward.

# %% check="8.4"
check("8.4", VocabParallelCrossEntropy)

# %% [markdown]
# The token of section 1 again. This time each rank knows nothing but its own columns and what your functions brought it, and autograd calls your backward. The target is 5. (The forward pass may also send $S$ and $z_t$ in one message of `2n` numbers, since both are sums. The check accepts that.)


# %%
def my_softmax_of_one_token(z, target):
    mine = shard(z, -1, dist.get_rank(), dist.get_world_size()).unsqueeze(0).to(device())  # [1, v/p]
    m, lse = vocab_max(mine), vocab_logsumexp(mine)  # [1] each
    leaf = mine.clone().requires_grad_()
    VocabParallelCrossEntropy.apply(leaf, torch.tensor([target], device=device()), None).sum().backward()
    exp = (mine - m).exp()[0]  # [v/p]
    return {
        "logits": mine[0], "max": mine.max(), "m": m, "exp": exp, "sum": exp.sum(), "S": (lse - m).exp(),
        "softmax": (mine - lse).exp()[0], "gradient": leaf.grad[0],
    }  # fmt: skip


z = 1.5 * torch.randn(12, generator=torch.Generator().manual_seed(3))
results = launch(my_softmax_of_one_token, 4, args=(z, 5))
viz.softmax(
    [{name: value.cpu() for name, value in part.items()} for part in results],
    target=5,
    title="your softmax, and your gradient",
)

# %% [markdown]
# One column is pushed up, all others are pushed down a little, and the pushes balance. Only rank 1 has the column that goes up.
#
# ## 6 · The loss of a real run
#
# Three things are still missing.
#
# **Padding.** A vocabulary of 50257 words is padded so that it can be cut evenly (chapter 07), and the padded columns have logits like any others. They are no words: they must get no probability. With a logit of `-inf` they get exactly 0, since `exp(-inf)` is 0, and their gradient is 0 too.
#
# **Ignored tokens.** A target of `ignore_index` (-100, as in `F.cross_entropy`) says that this token does not count: the question in a dialogue, or the filling of a short line. Its loss is 0, its gradient is 0, and the mean is over the tokens that *do* count.
#
# **Label smoothing.** To keep a model from being too sure, take a part ε of the target's probability away from it and spread it evenly over all `v` ids. The one-hot becomes $1 - ε$ in the target's column plus $ε/v$ everywhere, and the loss becomes
#
# $$\text{lse} - (1 - ε)\, z_t - ε\,\bar z \;=\; \underbrace{\text{lse} - z_t}_{\text{as before}} + \;ε\,(z_t - \bar z), \qquad \bar z = \frac1v \sum_i z_i$$
#
# with $\bar z$ the mean logit over all ids, on all ranks together.
#
# **Predict.** A batch of 8 tokens, 3 of which have the target `ignore_index`: by how many is the sum of the losses divided? And a vocabulary of 15 ids, padded to 16 columns, with all logits 0: the loss is the logarithm of which number? Of which, if the padded column takes part?

# %% predict="8.d"
predict("8.d", divided_by=5, log_of=15, with_padding=16)

# %% [markdown] task="8.5" title="The whole loss" difficulty=4 minutes=20
# Put them together. `vocab_size` is the number of real ids; columns from there on are padding, on whichever ranks they lie. The `ignore_index` may be any integer, and it doesn't have to be an id of the vocabulary. Raise `IndexError` for a target that is neither a real id nor `ignore_index`; also for one in a padded column.
#
# Use `VocabParallelCrossEntropy`. For the smoothing, `target_logit` and `reduce_from_region` are differentiable. Change neither the logits nor the targets of the caller.


# %% exercise="8.5"
def vocab_parallel_loss(logits, target, *, vocab_size, ignore_index=-100, label_smoothing=0.0, group=None):
    """The mean loss, as F.cross_entropy gives it for the whole logits without padding: one number, replicated.

    in:  logits    [.., v/p], this rank's columns
         target    [..], ids below vocab_size, or ignore_index
    At most a few numbers a token travel forward, nothing backward.
    """
    ### BEGIN SOLUTION
    counted = target != ignore_index  # [..]
    target = target.masked_fill(~counted, 0)  # [..], ids that can be looked up
    outside = (target < 0) | (target >= vocab_size)  # [..]
    if outside.any():
        raise IndexError(f"target {target[outside][0].item()} is none of the {vocab_size} ids of the vocabulary")
    start = dist.get_rank(group) * logits.shape[-1]
    ids = torch.arange(start, start + logits.shape[-1], device=logits.device)  # [v/p]
    padding = ids >= vocab_size  # [v/p]

    z = logits.masked_fill(padding, -torch.inf)  # [.., v/p]
    loss = VocabParallelCrossEntropy.apply(z, target, group)  # [..]
    if label_smoothing:
        total = reduce_from_region(logits.masked_fill(padding, 0).sum(-1), group)  # [..], over all ids
        loss = loss + label_smoothing * (target_logit(z, target, group) - total / vocab_size)
    return loss.masked_fill(~counted, 0).sum() / counted.sum()
    ### END SOLUTION


# %% [markdown] hints="8.5"
# 1. Four steps, each a line or two: padded columns to `-inf`; a target that can be looked up (0, say) for ignored tokens; the loss of each token, with smoothing; the mean over the tokens that count. Column `j` of rank `r` has the id `r * v / p + j`.
# 2. `logits.masked_fill(padding, -torch.inf)` with `padding` `[v/p]` works on `[.., v/p]`. The sum for the mean logit must leave the padding out too, but by zeros: `logits.masked_fill(padding, 0).sum(-1)`, added up over the ranks with g, divided by `vocab_size`.
# 3. With `counted = target != ignore_index` and `safe = target.masked_fill(~counted, 0)`: `loss = VocabParallelCrossEntropy.apply(z, safe, group)`; with smoothing `+ label_smoothing * (target_logit(z, safe, group) - total / vocab_size)`; and `return loss.masked_fill(~counted, 0).sum() / counted.sum()`.

# %% check="8.5"
check("8.5", vocab_parallel_loss)

# %% [markdown]
# The case of the prediction on two ranks, 8 tokens and 16 columns, all logits 0, and three ignored tokens:


# %%
def all_logits_zero(vocab_size):
    target = torch.tensor([3, -100, 14, 0, -100, 7, -100, 9], device=device())
    return vocab_parallel_loss(torch.zeros(8, 8, device=device()), target, vocab_size=vocab_size).item()


{f"vocab_size={size}": round(launch(all_logits_zero, 2, args=(size,))[0], 4) for size in (15, 16)}

# %% [markdown]
# ## 7 · Train with it
#
# Real text: the sources of the Python standard library, as bytes. The model sees 8 bytes, mixes their vectors in one layer, and scores the 256 bytes that could come next with the same table that it looked them up in. With 4 ranks the table is padded from 256 to 512 rows: ranks 2 and 3 hold nothing but padding.

# %%
CONTEXT, HIDDEN, BATCH, STEPS = 8, 48, 128, 80
text = corpus.python_sources(300_000)


class NextByte(nn.Module):
    """Vectors that score the next byte. `embedding`: nn.Embedding, or the vocabulary-parallel one."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.mix = nn.Linear(CONTEXT * HIDDEN, HIDDEN, device=device(), dtype=torch.float64)

    def forward(self, context):  # [b, 8] bytes
        return torch.tanh(self.mix(self.embedding(context).flatten(1)))  # [b, h]


def train(model, loss_of):
    """The loss of every step; loss_of(x, target) scores with the model's table. All ranks draw the same batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for inputs, targets in corpus.byte_batches(text, CONTEXT, BATCH, STEPS, seed=1):
        loss = loss_of(model(inputs.to(device())), targets[:, -1].to(device()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


torch.manual_seed(0)
plain_model = NextByte(nn.Embedding(corpus.VOCABULARY, HIDDEN, device=device(), dtype=torch.float64))
nn.init.normal_(plain_model.embedding.weight, std=0.1)  # small logits, so that the training starts at about ln(256)
start = {name: value.cpu().clone() for name, value in plain_model.state_dict().items()}
plain_losses = train(plain_model, lambda x, t: F.cross_entropy(x @ plain_model.embedding.weight.T, t))


# %%
def train_on_ranks(loss_function):
    torch.set_num_threads(1)
    model = NextByte(VocabParallelEmbedding(corpus.VOCABULARY, HIDDEN, device=device(), dtype=torch.float64))
    load_full_state_dict(model, start)  # each rank takes its rows of the same starting point
    weight = model.embedding.weight  # [v/p, h], v padded
    losses = train(model, lambda x, t: loss_function(parallel_logits(x, weight), t))
    return {"losses": losses, "rows": len(weight)}


def my_loss(logits, target):
    return vocab_parallel_loss(logits, target, vocab_size=corpus.VOCABULARY)


runs = {p: launch(train_on_ranks, p, args=(my_loss,)) for p in (1, 2)}
viz.table(
    [{"": "one process, F.cross_entropy", "first loss": f"{plain_losses[0]:.6f}"}]
    + [{"": f"your loss, p = {p}", "first loss": f"{run[0]['losses'][0]:.6f}"} for p, run in runs.items()],
    title=f"ln(256) = {math.log(256):.4f}",
)

# %% [markdown]
# A model that knows nothing guesses among 256 bytes. Now with four ranks, and all curves:

# %%
runs[4] = launch(train_on_ranks, 4, args=(my_loss,))
viz.curves(
    {"one process, F.cross_entropy": plain_losses} | {f"your loss, p = {p}": runs[p][0]["losses"] for p in runs},
    title=f"{STEPS} steps on real text",
)

# %%
viz.table(
    [
        {
            "p": p,
            "rows on each rank": run[0]["rows"],
            "last loss": f"{run[0]['losses'][-1]:.6f}",
            "largest difference to one process": f"{max(abs(a - b) for a, b in zip(run[0]['losses'], plain_losses, strict=True)):.0e}",
        }
        for p, run in runs.items()
    ],
    title=f"one process: last loss {plain_losses[-1]:.6f}",
)

# %% [markdown]
# One curve, and the differences are those of sums in another order. Two of four ranks have no word at all, and the loss does not notice.
#
# ## 8 · Break it
#
# **First, the maximum.** Three versions of the log-sum-exp in float32 on two ranks: without a maximum, with each rank's own, and yours. The logits are small, then large, then large on one rank only. For each: what each of the two ranks returns for one token.


# %%
def without_maximum(z):
    return reduce_from_region(z.exp().sum(-1)).log()


def own_maximum(z):
    m = z.amax(-1)
    return m + reduce_from_region((z - m.unsqueeze(-1)).exp().sum(-1)).log()


def three_versions(offsets):
    z = torch.tensor([[0.5, 1.0, 0.0]], device=device()) + offsets[dist.get_rank()]  # [1, v/p]
    return [f"{version(z).item():.4f}" for version in (without_maximum, own_maximum, vocab_logsumexp)]


rows = []
for name, offsets in {
    "equal on both ranks": (0.0, 0.0),
    "1 larger on rank 1": (0.0, 1.0),
    "100 larger on both ranks": (100.0, 100.0),
    "100 larger on rank 1": (0.0, 100.0),
}.items():
    each = launch(three_versions, 2, args=(offsets,))
    said = [a if a == b else f"{a} and {b}" for a, b in zip(*each, strict=True)]
    rows.append({"logits": name, "no maximum": said[0], "own maximum": said[1], "yours": said[2]})
viz.table(rows)

# %% [markdown]
# Without a maximum all is well until it is not: an infinity, with no warning before it. With each rank's own maximum the result is right only where both maxima happen to be equal. Otherwise it is wrong, also for small logits, and *each rank has another loss*. (It can be mended without sending the maximum first: each rank multiplies its sum
# by $e^{m_r - m}$ once $m$ is known. The course's own `vocab_parallel_cross_entropy` does that, to read the logits only once.)
#
# **Second, the 1 that only one rank may subtract.** The mask is forgotten in the backward: each rank subtracts 1 in *some* column. The forward pass is right. Before you run it: what will the curve look like?


# %%
class OneOnEveryRank(Function):
    @staticmethod
    def forward(ctx, logits, target):
        lse = vocab_logsumexp(logits)
        ctx.save_for_backward(logits, target, lse)
        return lse - target_logit(logits, target)

    @staticmethod
    def backward(ctx, dloss):
        logits, target, lse = ctx.saved_tensors
        dlogits = (logits - lse.unsqueeze(-1)).exp()  # [n, v/p]
        column = target % logits.shape[-1]  # [n]: right on one rank, and a foreign column on all others
        dlogits[torch.arange(len(target)), column] -= 1
        return dlogits * dloss.unsqueeze(-1), None


broken = launch(train_on_ranks, 2, args=(lambda logits, target: OneOnEveryRank.apply(logits, target).mean(),))
viz.curves(
    {"one process": plain_losses, "1 subtracted on every rank": broken[0]["losses"]},
    title="the forward pass is right, the gradient is not",
)

# %% [markdown]
# **Third, padding that takes part.** The same training with 4 ranks and 256 padded columns, and a loss that was not told about them.

# %%
padded = launch(train_on_ranks, 4, args=(lambda z, t: vocab_parallel_loss(z, t, vocab_size=512),))
viz.table(
    [
        {"": name, "one process": f"{plain_losses[step]:.4f}"}
        | {
            "1 on every rank": f"{broken[0]['losses'][step]:.4f}",
            "padding takes part": f"{padded[0]['losses'][step]:.4f}",
        }
        for name, step in (("first step", 0), ("step 10", 9), ("step 20", 19), (f"step {STEPS}", STEPS - 1))
    ],
    title="the loss",
)

# %% [markdown]
# The wrong gradient is invisible in the first loss. Then every step pushes up two columns, the right one and one that has nothing to do with it. The gradient of a token no longer adds up to 0 over the columns, so there is no place at which all pushes balance: the loss falls for a while, then it rises. It is easily taken for a learning rate that is too high.
#
# The padding shows the other way round. The first loss is too large at once, by about ln 2, since half of the 512 columns are no bytes and get half of the probability. The model learns not to use them, and later the curve looks like any other; it just stays a little above. So compare the *first* loss with one process, or with $\ln v$: it costs nothing.

# %%
symptoms(8)

# %% [markdown]
# ## 9 · Measure it
#
# **Bytes and calls**, at the size you predicted: 1024 tokens, a vocabulary of 32768, float32, forward and backward together.


# %%
def gathered(logits, target):
    """The naive way: all logits on every rank."""
    return F.cross_entropy(gather_from_region(logits), target)  # of [n, v]


def by_autograd(logits, target):
    return (vocab_logsumexp(logits) - target_logit(logits, target)).mean()


def by_hand(logits, target):
    return VocabParallelCrossEntropy.apply(logits, target, None).mean()


def by_the_course(logits, target):
    return vocab_parallel_cross_entropy(logits, target)


WAYS = {
    "gather, F.cross_entropy": gathered,
    "8.2 and 8.3, by autograd": by_autograd,
    "8.4, by hand": by_hand,
    "tplab.tensor.cross_entropy": by_the_course,
}


def measure(loss_function, n, v):
    """One forward and backward pass from this rank's logits [n, v/p]: traffic, memory beyond the logits, time."""
    torch.set_num_threads(1)
    logits = torch.randn(n, v // dist.get_world_size(), device=device(), requires_grad=True)
    target = torch.randint(v, (n,), generator=torch.Generator().manual_seed(0)).to(device())
    began = time.process_time()
    with record() as section, MemoryMeter() as meter:
        loss = loss_function(logits, target)
        loss.backward()
    return {
        "calls": sum(total.calls for total in section.totals().values()),
        "bytes": sum(total.bytes for total in section.totals().values()),
        "peak": meter.peak / (logits.numel() * 4),
        "curve": [size / 1e6 for size in meter.curve],
        "loss": loss.item(),
        "seconds": time.process_time() - began,
    }


# %%
N, V = 1024, 32768
measured = {name: launch(measure, 2, args=(way, N, V))[0] for name, way in WAYS.items()}
viz.table(
    [
        {
            "p = 2": name,
            "collectives": row["calls"],
            "bytes": f"{row['bytes']:,}",
            "peak memory, in shards of logits": f"{row['peak']:.2f}",
            "CPU seconds": f"{row['seconds']:.2f}",
            "loss": f"{row['loss']:.4f}",
        }
        for name, row in measured.items()
    ]
)

# %% [markdown]
# The bytes are those of prediction 8.a. The course's own loss sends less than yours: two of the three numbers are sums and travel together, and for a mean over tokens the *total* of $z_t - m$ is enough, one number for all tokens, so that its messages hold `2n + 1` numbers. Megatron-Core sends three of `n`.
#
# **Memory.** All numbers are beyond the logits themselves; one shard is `n·v/p` numbers, here 67 MB. The naive way makes the gathered logits, their log-softmax and the gradients of both, each as large as `p` shards, and at its fullest moment three of them are alive. By hand there are two shards for a moment in the forward pass ($z - m$ and its exponential), then none, then the gradient, which has to be there. Move the controls: which of the curves does `p` move, and which does it not?


# %% tags=["explore"]
def show_memory(p, v):
    curves = {}
    for name in ("gather, F.cross_entropy", "8.2 and 8.3, by autograd", "8.4, by hand"):
        curve = launch(measure, p, args=(WAYS[name], N, v))[0]["curve"]
        curves[name] = [0.0, *curve]
    title = f"memory of each rank beyond its logits, n = {N}, v = {v}, p = {p}"
    return viz.curves(curves, xlabel="tensors that came and went, in order", ylabel="MB", title=title)


viz.explore(show_memory, p=(2, 4), v=(8192, 16384, 32768))

# %% [markdown]
# ## 10 · In the wild
#
# **Megatron-Core**, `megatron/core/tensor_parallel/cross_entropy.py`: `vocab_parallel_cross_entropy(vocab_parallel_logits, target, label_smoothing=0.0, tp_group=None)` returns the loss of each token. Inside is the autograd function `_VocabParallelCrossEntropy`, which makes your three all-reduces one after the other; `fused_vocab_parallel_cross_entropy` in `megatron/core/fusions/fused_cross_entropy.py`
# sends the two sums together. They differ from yours in these points:
#
# - The exponentials, then the gradient, are written over the logits that come in, when those are float32: no new memory, but the caller's logits are gone, and there can be no second backward.
# - A target outside the vocabulary raises no error.
# - With label smoothing the sums are taken over the local columns, so that the loss depends on `p` and differs from rank to rank: issues 737 (2024) and 7464 of Megatron-LM.
#
# **PyTorch** has the same for DTensors, `loss_parallel` in `torch.distributed.tensor.parallel`: a context in which `F.cross_entropy` accepts logits that are sharded along the vocabulary. Beside yours, with the same logits:


# %%
def against_dtensor(z, t):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    mine = shard(z, -1, dist.get_rank(), dist.get_world_size()).to(device())  # [n, v/p]
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    rows = []
    for name in ("yours", "loss_parallel"):
        leaf = mine.clone().requires_grad_()
        with record() as section, loss_parallel():
            logits = leaf if name == "yours" else DTensor.from_local(leaf, mesh, [Shard(1)])
            loss = by_hand(leaf, t.to(device())) if name == "yours" else F.cross_entropy(logits, t.to(device()))
            loss.backward()
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        calls = ", ".join(f"{total.calls} {kind}" for kind, total in section.totals().items())
        size = sum(total.bytes for total in section.totals().values())
        rows.append(
            {"": name, "loss": f"{loss.item():.10f}", "collectives": calls, "bytes": size, "dlogits": leaf.grad}
        )
    return rows


generator = torch.Generator().manual_seed(1)
z, t = torch.randn(64, 1024, generator=generator, dtype=torch.float64), torch.randint(1024, (64,), generator=generator)
both = launch(against_dtensor, 2, args=(z, t))[0]
print(f"largest difference of the gradients: {(both[0]['dlogits'] - both[1]['dlogits']).abs().max():.0e}")
viz.table([{name: value for name, value in row.items() if name != "dlogits"} for row in both])

# %% [markdown]
# **One step further.** Nothing but the loss ever reads the logits, so they need not exist all at once: take some tokens, compute their logits, their loss and at once their gradient, add to the gradients of $X$ and of the table, and forget the logits. That is `parallel_linear_cross_entropy` of this course; Liger Kernel has it for one GPU, and Megatron-Core has it on its `dev` branch, in
# `megatron/core/fusions/fused_linear_cross_entropy.py`. Output layer and loss together, 1024 tokens, a vocabulary of 32768, and here the logits themselves count too:


# %%
def head_and_loss(kind):
    torch.set_num_threads(1)
    x = torch.randn(N, 64, device=device(), requires_grad=True)  # [n, h]
    weight = torch.randn(V // dist.get_world_size(), 64, device=device()).mul_(0.1).requires_grad_()  # [v/p, h]
    target = torch.randint(V, (N,), generator=torch.Generator().manual_seed(0)).to(device())
    with MemoryMeter() as meter:
        if kind == "in blocks of 128 tokens":
            loss = parallel_linear_cross_entropy(x, weight, target, tokens_at_once=128)
        else:
            loss = (gathered if kind == "gathered logits" else by_hand)(parallel_logits(x, weight), target)
        loss.backward()
    return {"loss": loss.item(), "peak": meter.peak}


rows = []
for kind in ("gathered logits", "your loss", "in blocks of 128 tokens"):
    result = launch(head_and_loss, 2, args=(kind,))[0]
    rows.append({"p = 2": kind, "loss": f"{result['loss']:.5f}", "peak memory, MB": f"{result['peak'] / 1e6:.0f}"})
viz.table(rows)

# %% [markdown]
# ## 11 · Recap
#
# 1. The loss of a token is log-sum-exp minus the target's logit: two sums over the columns and a maximum, so three numbers a token travel and never the `v` logits.
# 2. The maximum must be one for all ranks. Padding is `-inf`; the mean is over the tokens that count; smoothing is spread over the real vocabulary of all ranks.
# 3. Backward: softmax minus one-hot in this rank's columns, times the upstream gradient, without a message. Only one rank subtracts the 1.
# 4. Traffic of the loss: `3n` numbers forward (`2n + 1` at best), none backward. Memory: `[n, v/p]` for the logits and as much for their gradient; the naive way has tensors of `[n, v]`, several at a time.
# 5. A target outside the vocabulary is an error, or it silently becomes a loss. Next, chapter 09: the same model for every `p`, from the first random number to the last dropout mask.

# %% [markdown]
# ## Your library so far
#
# It can compute the loss over a split vocabulary without ever gathering the logits.

# %%
from tplab.course import library

library(8)
