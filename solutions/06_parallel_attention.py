# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06 · Parallel attention
#
# **The question.** Attention mixes every token with every other one. How can `p` ranks share it, and still need a single all-reduce on the way forward?
#
# **What you will have built.** `ParallelAttention` with whole heads on every rank, the rule that says which rows of a fused Q, K, V weight belong to whom, grouped-query attention with copies that stay equal, and a cache for generation. At the end your cache
# writes Python, on two ranks.
#
# $$X \;\xrightarrow{\;f\;}\; Q_r,\, K_r,\, V_r \;\longrightarrow\; Y_r = \mathrm{softmax}\!\Big(\frac{Q_r K_r^\top}{\sqrt{d}}\Big) V_r,\ \text{head by head} \;\longrightarrow\; Y_r\, O_r \;\xrightarrow{\;g\;}\; Z$$
#
# Symbols: `b` batch, `s` sequence length, `h` hidden size, `a` number of heads, `d = h/a` the width of one head, `p` number of ranks. **f** (nothing forward, all-reduce backward) and **g** (all-reduce forward, nothing backward) are the operators of
# chapter 03, the two parallel layers those of chapter 04. It is the MLP of chapter 05 with another middle. About 90 minutes.

# %% tags=["setup"]
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import tplab.tensor
from tplab import device, launch, record, viz
from tplab.common import corpus
from tplab.course import check, predict, symptoms
from tplab.memory import PRESETS
from tplab.tensor import (
    Block,
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    Sharding,
    copies_group,
    copy_to_region,
    divide,
    full_state_dict,
    load_full_state_dict,
    rotary_angles,
    rotate,
)

# %% [markdown]
# This is where it will end: 8 heads on 4 real ranks. `q0` is the part of the weight that makes the queries of head 0, `k0` and `v0` make its keys and values. Each rank reports what it holds.


# %%
def heads_held(num_heads, num_kv_heads):
    """Which heads this rank holds: every row of the whole weight is the number of its head."""
    layer = QKVParallelLinear(1, num_heads, num_kv_heads, head_dim=2, bias=False, device=device())
    numbers = torch.tensor([*range(num_heads), *range(num_kv_heads), *range(num_kv_heads)], dtype=torch.float32)
    load_full_state_dict(layer, {"weight": numbers.repeat_interleave(2)[:, None]})  # two rows for each head
    rows = layer.weight.detach()[::2, 0].int().split(layer.heads)  # of q, of k, of v
    return {name: part.tolist() for name, part in zip("qkv", rows, strict=True)}


viz.heads(launch(heads_held, 4, args=(8, 8)), title="8 heads on 4 ranks")

# %% [markdown]
# ## 1 · Attention, head by head
#
# First without any ranks. A **head** has a query, a key and a value for each token, all of `d` numbers: `s` queries, and `t` keys and values (two letters, since the keys may be more than the queries). A query is compared with every key; the results, the **scores**, become weights by a softmax; and the output is the values, added up with these weights:
#
# $$Y = \mathrm{softmax}\Big(\frac{Q K^\top}{\sqrt{d}}\Big)\, V \qquad Q: [s, d],\quad K, V: [t, d],\quad \text{scores}: [s, t]$$
#
# There are `a` heads side by side, each with `d` of the `h` columns of Q, K and V. No head looks at another one: that will be the whole trick. So the tensors are rearranged from `[b, s, a·d]` to `[b, a, s, d]`, and one batched product does all heads.
#
# A text that is written from left to right needs a **causal mask**: a token looks at itself and at what stands before it. A hidden score is set to $-\infty$, and its weight is 0. While a model learns, `s = t`, and the mask is a triangle. But when it writes, the queries are only the newest `s` of `t` tokens. Then the triangle ends at the bottom *right*:

# %%
causal_masks = {
    f"s = {s}, t = {t}": (torch.arange(t) <= torch.arange(t - s, t)[:, None]).int() for s, t in ((4, 4), (2, 5))
}
viz.matrices(causal_masks, title="1: this query (row) may look at this key (column)")

# %% [markdown] task="6.1" title="Heads" difficulty=2 minutes=15
# Write the three functions between Q, K, V and the output. They know nothing of ranks: `n` is the number of heads that come in, whatever that is. Head 0 is columns 0 to `d - 1`, head 1 the next `d`, and so on.


# %% exercise="6.1"
def split_heads(y, head_dim):
    """[b, s, n·d] -> [b, n, s, d], with d = head_dim."""
    ### BEGIN SOLUTION
    return y.unflatten(-1, (-1, head_dim)).transpose(1, 2)  # [b, s, n, d] -> [b, n, s, d]
    ### END SOLUTION


def attend(q, k, v, causal=False):
    """q [b, n, s, d], k and v [b, n, t, d] -> softmax(q kᵀ / √d) v, [b, n, s, d].

    causal: the queries are the last s of the t positions; each sees its own position and those before it
    """
    ### BEGIN SOLUTION
    s, t = q.shape[2], k.shape[2]
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])  # [b, n, s, t]
    if causal:
        hidden = torch.ones(s, t, dtype=torch.bool, device=q.device).triu(t - s + 1)  # [s, t]
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(dim=-1) @ v  # [b, n, s, d]
    ### END SOLUTION


def merge_heads(y):
    """[b, n, s, d] -> [b, s, n·d]: undoes split_heads."""
    ### BEGIN SOLUTION
    return y.transpose(1, 2).flatten(2)  # [b, s, n, d] -> [b, s, n·d]
    ### END SOLUTION


# %% [markdown] hints="6.1"
# 1. A reshape never moves numbers, a transpose does. To split: first cut the last dimension in two, then move one of the two. For the mask: the first query stands at position `t - s`, so how many keys may it see?
# 2. `y.unflatten(-1, (-1, head_dim))` is `[b, s, n, d]`; exchange dimensions 1 and 2. Merging does the same backwards. The scores are `q @ k.transpose(2, 3) / math.sqrt(d)`, and query `i` may not see key `j` if `j > t - s + i`.
# 3. `hidden = torch.ones(s, t, dtype=torch.bool, device=q.device).triu(t - s + 1)`, then `scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v`. Merging is `y.transpose(1, 2).flatten(2)`.

# %% check="6.1"
check("6.1", split_heads, attend, merge_heads)

# %% [markdown]
# torch has all of `attend` in one fused **kernel** (a kernel is one program that runs on the GPU; fused: for several operations), `F.scaled_dot_product_attention`, which never stores the scores. It may be used here as well, but mind its `is_causal=True`: that puts the triangle at the top left, as if the queries were the first tokens.
#
# ## 2 · Whole heads on every rank
#
# The MLP was split where its activation did not mind. What does a softmax mind? Take one head with `d = 8` and cut it in half, as a thoughtless split of the columns would. Each rank then has half of every query and key, and its scores are only one summand of the right ones:

# %%
torch.manual_seed(0)
q, k = torch.randn(3, 8), torch.randn(3, 8)  # one head, three tokens
scores = q @ k.T / math.sqrt(8)
summands = [q[:, half] @ k[:, half].T / math.sqrt(8) for half in (slice(0, 4), slice(4, 8))]
viz.matrices(
    {"rank 0: scores": summands[0], "rank 1: scores": summands[1], "their sum, the right scores": scores},
    title="a head that is cut inside: the scores",
)

# %%
softmaxes = [part.softmax(-1) for part in summands]
viz.matrices(
    {
        "rank 0: softmax": softmaxes[0],
        "rank 1: softmax": softmaxes[1],
        "their sum": sum(softmaxes),
        "the right softmax": scores.softmax(-1),
    },
    title="and what the ranks would make of them",
)

# %% [markdown]
# The scores add up, their softmax does not: $\mathrm{softmax}(u + v)$ cannot be had from $\mathrm{softmax}(u)$ and $\mathrm{softmax}(v)$. It is the same trouble as with GELU and partial sums in chapter 05. The ranks could all-reduce the scores before the softmax. How much is that, for GPT-3?

# %%
gpt3 = PRESETS["GPT-3 175B"]
s, h, a = gpt3.seq_length, gpt3.hidden_size, gpt3.num_heads
viz.table(
    [
        {
            "what is all-reduced": what,
            "numbers for one sequence": f"{numbers:,}",
            "times the output": numbers // (s * h),
        }
        for what, numbers in (("the output, b·s·h", s * h), ("the scores, b·a·s·s", a * s * s))
    ]
)

# %% [markdown]
# $s/d$ times as much, and GPT-3 has $s = 2048$ and $d = 128$. Nobody does that. A head is never cut; each rank takes `a/p` whole heads. So `p` has to divide the number of heads, not just the width `h`.
#
# Q, K and V are column-parallel then, with columns cut between heads. Each rank computes its heads' outputs, `[b, s, h/p]`, without asking anybody. That is what a row-parallel layer wants, and the output layer is one.
#
# The three products read the same `X`. So they are fused, like gate and up in SwiGLU: one weight `[Wq; Wk; Wv]` of shape `[3h, h]`, one matrix product, and one f in front of it. `stride=3` makes a rank take its rows of each of the three (section 3 looks at what happens otherwise).
#
# **Predict.** `h = 32`, 8 heads, `p = 4`, an input `[2, 5, 32]` in float32. Which shape has the fused weight on each rank? And its `q`, split into heads? How many all-reduces run, forward and backward together, and of how many bytes is each?

# %% predict="6.a"
predict("6.a", qkv_weight=(24, 32), q=(2, 2, 5, 4), all_reduces=2, bytes_each=1280)

# %% [markdown] task="6.2" title="ParallelAttention" difficulty=3 minutes=20
# Build it from the two layers of chapter 04 and your functions of 6.1.
#
# - `self.qkv` is the fused layer, `self.out` the output layer. `bias`, `group`, `device` and `dtype` are for both.
# - A number of heads that `p` does not divide is an error, even where `p` divides `h`: raise `ValueError` when the layer is built. `divide(num_heads, world_size, name="num_heads", unit="heads")` does.


# %% exercise="6.2"
class ParallelAttention(nn.Module):
    """Self-attention, whole heads on every rank of `group`.

    in:  x, replicated    [b, s, h]
    out: z, replicated    [b, s, h]
    One all-reduce of the input's size forward, one backward.
    """

    def __init__(self, hidden_size, num_heads, *, causal=False, bias=True, group=None, device=None, dtype=None):
        super().__init__()
        self.causal = causal
        world_size = dist.get_world_size(group)
        ### BEGIN SOLUTION
        divide(num_heads, world_size, name="num_heads", unit="heads")
        self.head_dim = divide(hidden_size, num_heads)  # d, on every rank
        options = {"bias": bias, "group": group, "device": device, "dtype": dtype}
        self.qkv = ColumnParallelLinear(hidden_size, 3 * hidden_size, stride=3, **options)  # weight [3h/p, h]
        self.out = RowParallelLinear(hidden_size, hidden_size, **options)  # weight [h, h/p]
        ### END SOLUTION

    def forward(self, x):
        ### BEGIN SOLUTION
        q, k, v = self.qkv(x).chunk(3, dim=-1)  # [b, s, h/p] each
        q, k, v = (split_heads(part, self.head_dim) for part in (q, k, v))  # [b, a/p, s, d] each
        y = attend(q, k, v, causal=self.causal)  # [b, a/p, s, d]
        return self.out(merge_heads(y))  # [b, s, h/p] -> [b, s, h]
        ### END SOLUTION


# %% [markdown] hints="6.2"
# 1. Which of the two layers leaves its output split, which one takes a split input? Write down the shape after each step, with the number of heads that *this rank* has. Does `d` depend on `p`?
# 2. A column-parallel layer from `h` to `3h` with `stride=3`, and a row-parallel layer from `h` to `h`. In forward: the fused product, cut in three along the last dimension; split the heads of each; attend; merge; the output layer.
# 3. `q, k, v = self.qkv(x).chunk(3, dim=-1)`, `split_heads(q, self.head_dim)` and so on with `self.head_dim = hidden_size // num_heads`, `y = attend(q, k, v, causal=self.causal)`, and `return self.out(merge_heads(y))`. f and g are inside the layers.

# %% check="6.2"
check("6.2", ParallelAttention)

# %% [markdown]
# Your attention on four ranks, one forward and one backward pass, with the sizes of the prediction:


# %%
def once(make_attention, x_shape):
    """One forward and backward pass; the input is replicated."""
    torch.manual_seed(0)
    attention = make_attention()
    x = torch.randn(x_shape, device=device(), requires_grad=True)
    out = attention(x)
    out.square().sum().backward()
    return out.detach()


results = launch(once, 4, args=(lambda: ParallelAttention(32, 8, device=device()), (2, 5, 32)))
viz.traffic(results, title="ParallelAttention: two all-reduces of b·s·h numbers")

# %% [markdown]
# ## 3 · Three matrices in one
#
# The fused weight looks like one matrix, and a cut of one matrix into `p` pieces is one line: `weight.chunk(p)[rank]`. Here is what that line does, next to the right cut. Every row of the weight shows which part of which head it is:

# %%
names = [f"{matrix}{head}" for matrix in "qkv" for head in range(4)]
whole = torch.arange(12)  # one row for each head: q0 .. q3, k0 .. k3, v0 .. v3
right = [torch.cat([part.chunk(2)[rank] for part in whole.chunk(3)]) for rank in range(2)]
rows = []
for cut, parts in (("each matrix for itself (stride=3)", right), ("the pile as a whole (stride=1)", whole.chunk(2))):
    for rank, part in enumerate(parts):
        thirds = [" ".join(names[row] for row in third) for third in part.chunk(3)]
        rows.append(
            {"cut": cut, "rank": f"rank {rank}"} | dict(zip(("taken for Q", "for K", "for V"), thirds, strict=True))
        )
viz.table(rows, title="4 heads on 2 ranks")

# %% [markdown]
# With the second cut, rank 0 compares queries with queries, and adds up keys. The shapes fit, so nothing is said.
#
# **Predict.** 4 heads with `d = 2`: `[Wq; Wk; Wv]` has 24 rows, of which 0 to 7 are Wq. `p = 2`. Which rows does rank 1 need? And if the whole is cut in the middle: which rows does *rank 0* take for its keys?

# %% predict="6.b"
predict(
    "6.b",
    rows_of_rank_1=[4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23],
    keys_of_rank_0_after_the_middle_cut=[4, 5, 6, 7],
)

# %% [markdown]
# You met the same thing in chapter 05, with gate and up. Attention adds a twist. In **grouped-query attention** (Ainslie et al. 2023, [arXiv 2305.13245](https://arxiv.org/abs/2305.13245)) several heads of Q share one head of K and V: fewer weights, and above all a smaller cache when the model writes (section 6). With one head of K and V
# for all it is called **multi-query attention**. Then Wk and Wv have fewer rows than Wq, and `stride=3` cannot describe the cut any more. Each of the three matrices has its own size, and a head, `d` rows, is the unit that stays whole. Head `i` of Q belongs to head `i // (num_heads / num_kv_heads)` of K and V,
# and has to live where that one lives.
#
# Turn the knobs. First, with `p = 2`, make `num_kv_heads` smaller. Then raise `p` until there are more ranks than heads of K and V.


# %% tags=["explore"]
def show_heads(p, num_kv_heads):
    held = launch(heads_held, p, args=(8, num_kv_heads))
    return viz.heads(held, title=f"8 heads, {num_kv_heads} of K and V, p = {p}")


viz.explore(show_heads, p=(1, 2, 4, 8), num_kv_heads=(8, 4, 2, 1), start={"p": 4, "num_kv_heads": 2})

# %% [markdown]
# A head cannot be cut, and every rank needs one. So where there are fewer heads of K and V than ranks, neighbours hold **copies** of the same one: `c = p / num_kv_heads` of them.

# %% [markdown] task="6.3" title="QKV slicing" difficulty=3 minutes=15
# Return the rows of a whole `[Wq; Wk; Wv]` that a rank needs: its heads of Q, then those of K, then those of V. It is how a trained checkpoint gets onto `p` ranks. The function gets a bias too, so the tensor may have one dimension only.
#
# Raise `ValueError` where it does not come out even: `p` has to divide `num_heads`; and it has to divide `num_kv_heads`, or be a multiple of it. A helper for the first: `divide(n, p)` returns `n // p` or raises.


# %% exercise="6.3"
def shard_qkv(weight, num_heads, num_kv_heads, rank, world_size):
    """The rows of [Wq; Wk; Wv] that belong to `rank`.

    in:  weight    [(num_heads + 2·num_kv_heads)·d, ...]
    out: rows      [(n + 2m)·d, ...] with n = num_heads/p, and m = num_kv_heads/p or 1, if that is less than 1
    """
    ### BEGIN SOLUTION
    divide(num_heads, world_size, name="num_heads", unit="heads")
    if num_kv_heads % world_size and world_size % num_kv_heads:
        raise ValueError(f"{num_kv_heads} heads of K and V can't be shared out among {world_size} ranks, nor copied")
    copies = max(1, world_size // num_kv_heads)  # ranks that hold the same head of K and V
    d = len(weight) // (num_heads + 2 * num_kv_heads)
    wq, wk, wv = weight.split([num_heads * d, num_kv_heads * d, num_kv_heads * d])
    mine = [wq.chunk(world_size)[rank]]  # [n·d, ...]
    mine += [part.chunk(world_size // copies)[rank // copies] for part in (wk, wv)]  # [m·d, ...] each
    return torch.cat(mine)  # [(n + 2m)·d, ...]
    ### END SOLUTION


# %% [markdown] hints="6.3"
# 1. How many rows has a head, if the whole has `num_heads + 2 * num_kv_heads` heads? Split the whole into its three matrices first. For K and V: with 2 heads and 4 ranks, ranks 0 and 1 need head 0. What do you divide the rank by?
# 2. `weight.split([num_heads * d, num_kv_heads * d, num_kv_heads * d])` gives the three. Rank `r` takes piece `r` of `p` of the first. Of the other two it takes piece `r // copies` of `p // copies`, with `copies = max(1, p // num_kv_heads)`. Put the three together with `torch.cat`.
# 3. `wq.chunk(world_size)[rank]` and `wk.chunk(world_size // copies)[rank // copies]`, and the same for `wv`. Before that: `divide(num_heads, world_size)`, and a `ValueError` if `num_kv_heads % world_size and world_size % num_kv_heads`.

# %% check="6.3"
check("6.3", shard_qkv)

# %% [markdown]
# What your function gives for 8 heads, 2 of K and V, on 4 ranks, with the number of its head in every row:

# %%
numbered = torch.tensor([*range(8), *range(2), *range(2)]).repeat_interleave(2)  # d = 2
mine = [shard_qkv(numbered, 8, 2, rank, 4)[::2].split([2, 1, 1]) for rank in range(4)]
viz.heads(
    [{name: part.tolist() for name, part in zip("qkv", parts, strict=True)} for parts in mine],
    title="cut by your shard_qkv",
)

# %% [markdown]
# ## 4 · Copies, and what becomes of their gradients
#
# Look at the last picture. Ranks 0 and 1 both hold `k0`. In the forward pass that is harmless: equal weights, equal input, equal keys. In the backward pass each copy gets a gradient from the queries of *its own* rank only, `q0 q1` on one and `q2 q3` on the other. On one process all four of them would have contributed to the one gradient of `k0`.
#
# **Predict.** Two ranks hold copies of the only head of K and V, and nobody does anything about it. Which of these are right after the first backward pass? Say True or False.

# %% predict="6.c"
predict("6.c", out=True, dWq=True, dWk=False, dx=True)

# %% [markdown]
# So the gradient on each copy is a summand, and has to be added up over the ranks that share the head. You have an operator that does nothing forward and all-reduces the gradient backward: f. Until now it stood in front of an activation. Nothing forbids to put it in front of a *weight*, in a group that holds only the ranks with the same copy:
#
# `copies_group(group, c)` returns the process group of this rank and its `c - 1` neighbours: ranks 0 to `c - 1`, the next `c`, and so on. All ranks of `group` have to call it. With `c = 1` it is a group of one rank, in which f does nothing at all.

# %% [markdown] task="6.4" title="Grouped-query attention" difficulty=4 minutes=20
# Fill in the two gaps.
#
# 1. In `__init__`: `self.heads` and `self.kv_heads`, how many heads of Q, and of K and V, this rank holds (`n` and `m`), and `copies`. Refuse what 6.3 refuses.
# 2. `forward`. The fused weight is no layer here but a parameter, so f on `x` is yours to write as well. `attend` wants as many heads of K and V as of Q: `repeat_interleave` along the head dimension repeats each of them.
#
# The rest is given: the parameters, and how they are cut, one `Block` for each of the three matrices (`tplab.tensor.sharding`), with a head as the unit that stays whole.


# %% exercise="6.4"
class GroupedAttention(nn.Module):
    """Self-attention with num_kv_heads heads of K and V, each for num_heads/num_kv_heads heads of Q.

    in:  x, replicated    [b, s, h]
    out: z, replicated    [b, s, h]
    With fewer heads of K and V than ranks, neighbours hold copies, whose gradients are added up.
    """

    def __init__(
        self, hidden_size, num_heads, num_kv_heads, *, causal=False, bias=True, group=None, device=None, dtype=None
    ):
        super().__init__()
        self.causal, self.group = causal, group
        self.head_dim = divide(hidden_size, num_heads)  # d
        world_size = dist.get_world_size(group)
        ### BEGIN SOLUTION
        self.heads = divide(num_heads, world_size, name="num_heads", unit="heads")  # n
        if num_kv_heads % world_size and world_size % num_kv_heads:
            raise ValueError(f"{num_kv_heads} heads of K and V can't be shared out or copied to {world_size} ranks")
        self.kv_heads = max(1, num_kv_heads // world_size)  # m
        copies = max(1, world_size // num_kv_heads)  # ranks that hold the same heads of K and V
        ### END SOLUTION
        self.copies_group = copies_group(group, copies)
        blocks = [Block(heads * self.head_dim, unit=self.head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads)]
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim  # (n + 2m)·d
        self.qkv_weight = nn.Parameter(torch.empty(rows, hidden_size, device=device, dtype=dtype))
        self.qkv_weight.tensor_parallel = Sharding(dim=0, blocks=tuple(blocks))
        self.qkv_bias = None
        if bias:
            self.qkv_bias = nn.Parameter(torch.zeros(rows, device=device, dtype=dtype))
            self.qkv_bias.tensor_parallel = Sharding(dim=0, blocks=tuple(blocks))
        self.out = RowParallelLinear(hidden_size, hidden_size, bias, group=group, device=device, dtype=dtype)

    def forward(self, x):
        ### BEGIN SOLUTION
        n, m, d = self.heads, self.kv_heads, self.head_dim

        def with_summed_gradient(parameter):  # [(n + 2m)·d, ...]
            of_q, of_kv = parameter.split([n * d, 2 * m * d])
            return torch.cat([of_q, copy_to_region(of_kv, self.copies_group)])

        weight = with_summed_gradient(self.qkv_weight)
        bias = None if self.qkv_bias is None else with_summed_gradient(self.qkv_bias)
        y = F.linear(copy_to_region(x, self.group), weight, bias)  # [b, s, (n + 2m)·d]
        q, k, v = (split_heads(part, d) for part in y.split([n * d, m * d, m * d], dim=-1))
        k, v = (part.repeat_interleave(n // m, dim=1) for part in (k, v))  # [b, m, s, d] -> [b, n, s, d]
        return self.out(merge_heads(attend(q, k, v, causal=self.causal)))  # [b, s, h]
        ### END SOLUTION


# %% [markdown] hints="6.4"
# 1. `m` is never less than 1. Forward has one more step in front and one in the middle, compared with 6.2: the parameters' rows of K and V go through f in `self.copies_group`, and each head of K and V is repeated for its queries. Which rows of the weight are copies, and which are not?
# 2. Split the weight into `n * d` rows of Q and `2 * m * d` rows of K and V, put `copy_to_region(..., self.copies_group)` on the second part, `torch.cat` them again; the same with the bias, if there is one. Then `F.linear(copy_to_region(x, self.group), weight, bias)`, split into `n * d`, `m * d` and `m * d` columns.
# 3. `self.kv_heads = max(1, num_kv_heads // world_size)`, `copies = max(1, world_size // num_kv_heads)`. After `split_heads`: `k = k.repeat_interleave(n // m, dim=1)`, the same for `v`; then `self.out(merge_heads(attend(q, k, v, causal=self.causal)))`.

# %% check="6.4"
check("6.4", GroupedAttention)

# %% [markdown]
# A sum over the copies of the *activations'* gradients looks as good, `copy_to_region(k, self.copies_group)`. It gives the right dWk, and a wrong dx: f in front of `x` adds up the parts of all ranks, so the part through K would be in it once for every copy. What the copies share is the weight, so that is where the sum belongs.
#
# ## 5 · Two relatives: cross-attention and rotary positions
#
# In **cross-attention** the queries come from one text and the keys and values from another, `[b, t, h]`: a decoder that looks at what the encoder has read. Then the fused weight falls apart into Wq and `[Wk; Wv]`, with one f in front of each, since there are two inputs that want a gradient. Here is the course's own
# attention, which can do both, on two ranks:


# %%
def all_reduces(attention_type, num_kv_heads, p_sizes):
    """Collectives of one forward and backward pass: (direction, numbers)."""
    b, s, t, h = p_sizes
    attention = tplab.tensor.ParallelAttention(h, 8, num_kv_heads, attention_type=attention_type, device=device())
    x = torch.randn(b, s, h, device=device(), requires_grad=True)
    memory = torch.randn(b, t, h, device=device(), requires_grad=True) if attention_type == "cross" else None
    with record() as forward:
        out = attention(x, memory)
    with record() as backward:
        out.sum().backward()
    sections = {"forward": forward, "backward": backward}
    return {
        name: sorted((c.bytes // 4 for c in calls if len(c.group) > 1), reverse=True)
        for name, calls in sections.items()
    }


sizes = (2, 5, 7, 32)  # b, s, t, h
rows = []
for attention_type in ("self", "cross"):
    found = launch(all_reduces, 2, args=(attention_type, 8, sizes))[0]
    rows.append({"b·s·h = 320, b·t·h = 448": attention_type} | {name: str(numbers) for name, numbers in found.items()})
viz.table(rows, title="numbers in each all-reduce, p = 2")

# %% [markdown]
# **Rotary positions** (Su et al. 2021, [arXiv 2104.09864](https://arxiv.org/abs/2104.09864)) tell attention where a token stands. The `d` numbers of a query or key are taken as `d/2` pairs, and each pair is turned by an angle that grows with the token's position. Then a score depends only on how *far apart* two tokens are. Below, the same query and the same key stand at six
# positions. Read along the diagonals:

# %%
torch.manual_seed(1)
q, k = torch.randn(2, 1, 1, 1, 8).expand(-1, -1, -1, 6, -1)  # [b, heads, s, d]: six times the same
angles = rotary_angles(torch.arange(6), head_dim=8)  # [s, d/2]
viz.matrices({"scores q kᵀ": (rotate(q, angles) @ rotate(k, angles).transpose(2, 3))[0, 0]})

# %% [markdown]
# Each head is turned by itself, by the same angles. So tensor parallelism has nothing to do here: every rank turns the heads that it has. What matters is that every rank, and every call, knows the right positions. That brings us to generation.
#
# ## 6 · The cache
#
# A model writes token by token, and each new token looks at all earlier ones. Those never look at it, so their keys and values do not change any more: computing them again at every step is a waste. So they are kept, in a **KV cache**, and each step computes q, k, v of the *new* tokens only.
#
# The cache is made once, with room for `max_length` tokens, and is written in place. Each rank keeps the heads of K and V that it holds, and nothing is sent: `p` ranks share the memory among them.
#
# **Predict.** Llama 3 70B has 80 layers, 64 heads, 8 of K and V, and `d = 128`. For one text of 8192 tokens, with two bytes a number: how many GiB of keys and values are on each rank, for `p = 1`, 8 and 16?

# %% predict="6.d"
predict("6.d", p1=2.5, p8=0.3125, p16=0.3125)

# %% [markdown] task="6.5" title="KV cache" difficulty=3 minutes=20
# Write the cache, and one step of attention that uses it.
#
# `attention` is a module of the course, on this rank: `attention.qkv(x)` gives q `[b, n, s, d]`, k and v `[b, m, s, d]`, split into heads; `attention.out` is the row-parallel output layer; `attention.kv_heads` is `m`, `attention.head_dim` is `d`, `attention.rotary_base` the base of its rotary positions.
#
# - `KVCache(attention, batch_size, max_length)` makes `keys` and `values`, `[b, m, max_length, d]`, with the device and dtype of `attention.out.weight`, and a `length` of 0. No other memory is made later.
# - `append(keys, values)` writes the new tokens behind those that are there and returns all so far, as views, in a tuple. More than there is room for is a `ValueError`, and then nothing is written.
# - `attend_next(attention, x, cache)`: `x` is the next `s` tokens of a text whose earlier ones are in the cache. `rotary_angles(positions, head_dim, base)` gives the angles, `rotate(heads, angles)` turns.
#
# All of it runs under `torch.no_grad()`: generation has no backward pass.


# %% exercise="6.5"
class KVCache:
    """Room for the keys and values of this rank's heads, for `max_length` tokens; `length` of them are there.

    keys, values    [b, m, max_length, d]
    """

    def __init__(self, attention, batch_size, max_length):
        ### BEGIN SOLUTION
        weight = attention.out.weight
        shape = (batch_size, attention.kv_heads, max_length, attention.head_dim)
        self.keys = torch.zeros(shape, device=weight.device, dtype=weight.dtype)
        self.values = torch.zeros_like(self.keys)
        self.length = 0
        ### END SOLUTION

    def append(self, keys, values):
        """Write keys and values [b, m, s, d] of s new tokens; return (keys, values) so far, [b, m, length, d] each."""
        ### BEGIN SOLUTION
        stop = self.length + keys.shape[2]
        if stop > self.keys.shape[2]:
            raise ValueError(f"{self.length} tokens are cached, {keys.shape[2]} more need room for {stop}")
        self.keys[:, :, self.length : stop] = keys
        self.values[:, :, self.length : stop] = values
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]
        ### END SOLUTION


def attend_next(attention, x, cache):
    """x [b, s, h], the next s tokens -> their output [b, s, h]; causal, with rotary positions."""
    ### BEGIN SOLUTION
    q, k, v = attention.qkv(x)  # [b, n, s, d], [b, m, s, d] twice
    positions = torch.arange(cache.length, cache.length + x.shape[1], device=x.device)  # [s]
    angles = rotary_angles(positions, attention.head_dim, attention.rotary_base)  # [s, d/2]
    k, v = cache.append(rotate(k, angles), v)  # [b, m, t, d]: those before and the new ones
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))  # [b, n, t, d]
    y = attend(rotate(q, angles), k, v, causal=True)  # [b, n, s, d]
    return attention.out(merge_heads(y))  # [b, s, h]
    ### END SOLUTION


# %% [markdown] hints="6.5"
# 1. The new tokens go to places `length` to `length + s - 1`. Those numbers are also their positions, so ask for `cache.length` *before* you append. Is a key turned before it is kept, or each time it is used?
# 2. Append: `stop = self.length + keys.shape[2]`, compare with the room, write `self.keys[:, :, self.length : stop] = keys`, and return slices up to `stop`. A step: q, k, v; turn q and k; append; repeat the heads of k and v for the queries; attend; merge; `attention.out`.
# 3. `positions = torch.arange(cache.length, cache.length + x.shape[1], device=x.device)`, `angles = rotary_angles(positions, attention.head_dim, attention.rotary_base)`, `k, v = cache.append(rotate(k, angles), v)`, `repeat_interleave(q.shape[1] // k.shape[1], dim=1)` on both, `attend(rotate(q, angles), k, v, causal=True)`.

# %% check="6.5"
check("6.5", KVCache, attend_next)

# %% [markdown]
# Now use it on real text: the sources of the Python standard library, as bytes, as in chapter 05. The model is small: an embedding of each byte, one attention with rotary positions (4 heads, 2 of K and V), a norm, an output layer. Everything but the attention is replicated. It learns for 80 steps on two ranks; then it goes on writing, with your cache, and once
# more without any cache, from the whole text so far for every new byte.

# %%
HIDDEN, HEADS, CONTEXT, BATCH = 64, 4, 32, 16
text = corpus.python_sources(300_000)


class ByteModel(nn.Module):
    """Scores for the next byte after each byte. Everything but the attention is replicated."""

    def __init__(self, attention):
        super().__init__()
        options = {"device": device(), "dtype": torch.float64}
        self.embedding = nn.Embedding(corpus.VOCABULARY, HIDDEN, **options)
        self.attention = attention
        self.norm = nn.LayerNorm(HIDDEN, **options)
        self.head = nn.Linear(HIDDEN, corpus.VOCABULARY, **options)

    def forward(self, tokens, attention=None):  # [b, s] bytes
        x = self.embedding(tokens)  # [b, s, h]
        x = x + (attention or self.attention)(x)  # [b, s, h]
        return self.head(self.norm(x))  # [b, s, 256]


def train(model, steps, after_step=lambda: None):
    """Returns the loss of every step. All ranks draw the same batches, from the same seed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for inputs, targets in corpus.byte_batches(text, CONTEXT, BATCH, steps, seed=1):
        logits = model(inputs.to(device()))  # [b, s, 256]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device()).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after_step()
    return losses


@torch.no_grad()
def write(model, prompt, length, cached):
    """The prompt, continued byte by byte, drawn by the scores; and how many tokens went through the attention."""
    written, passed, dice = list(prompt.encode()), 0, torch.Generator().manual_seed(0)  # the same on every rank
    cache = KVCache(model.attention, 1, len(written) + length)
    new = written
    for _ in range(length):
        tokens = torch.tensor([new if cached else written], device=device())  # [1, s]
        passed += tokens.shape[1]
        step = (lambda x: attend_next(model.attention, x, cache)) if cached else None
        scores = model(tokens, step)[0, -1].cpu()  # [256]
        new = torch.multinomial((2 * scores).softmax(-1), 1, generator=dice).tolist()  # 2: high scores more often
        written = written + new
    return {"text": bytes(written).decode(errors="replace"), "passed": passed}


def train_and_write(prompts, length):
    torch.manual_seed(0)
    options = {"causal": True, "rotary_base": 10_000.0, "device": device(), "dtype": torch.float64}
    model = ByteModel(tplab.tensor.ParallelAttention(HIDDEN, HEADS, 2, **options))
    losses = train(model, 80)
    return losses, [[write(model, prompt, length, cached) for cached in (True, False)] for prompt in prompts]


PROMPTS = ["    def __init__(self", "    return "]
losses, texts = launch(train_and_write, 2, args=(PROMPTS, 20), timeout=300)[1]  # rank 1's
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
viz.table(
    [
        {
            "rank 1 of 2 writes, with your cache": repr(cached["text"]),
            "the same without": cached["text"] == whole["text"],
            "tokens through the attention": cached["passed"],
            "without": whole["passed"],
        }
        for cached, whole in texts
    ]
)

# %% [markdown]
# The same text, from far fewer tokens. It is no great author: after 80 steps it knows which letters like to follow which, not much more. But both ranks write it together, and neither could have written a byte of it alone.
#
# ## 7 · Break it
#
# **First: the cut through the middle.** Both attentions below start from the same whole weights and learn for 80 steps on two ranks; then each rank's shards go into a checkpoint, and a single process loads it. `AsOnePile` differs from yours in one number, `stride=1`.


# %%
class AsOnePile(ParallelAttention):
    def __init__(self, hidden_size, num_heads, **options):
        super().__init__(hidden_size, num_heads, **options)
        layer_options = {name: value for name, value in options.items() if name != "causal"}
        self.qkv = ColumnParallelLinear(hidden_size, 3 * hidden_size, stride=1, **layer_options)


def make_model(attention_class, *sizes):
    """A model with this attention, on this rank; its weights are those of one process with the same seed."""
    options = {"causal": True, "device": device(), "dtype": torch.float64}
    model = ByteModel(attention_class(HIDDEN, *sizes, **options))
    kv_heads = sizes[-1]
    generator = torch.Generator().manual_seed(0)
    shapes = {"qkv": (HIDDEN + 2 * kv_heads * HIDDEN // HEADS, HIDDEN), "out": (HIDDEN, HIDDEN)}
    start = {}
    for name, value in model.state_dict().items():
        *_, part, kind = name.replace("_", ".").split(".")
        shape = (shapes[part] if kind == "weight" else shapes[part][:1]) if part in shapes else value.shape
        start[name] = 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)
    load_full_state_dict(model, start)
    return model


@torch.no_grad()
def loss_of(model, attention=None):
    """The loss on text that it has not learned from, with another attention in place of its own if one is given."""
    inputs, targets = next(corpus.byte_batches(text, CONTEXT, 200, 1, seed=2))
    scores = model(inputs.to(device()), attention)  # [b, s, 256]
    return F.cross_entropy(scores.flatten(0, 1), targets.to(device()).flatten()).item()


def train_and_save(attention_class):
    model = make_model(attention_class, HEADS)
    losses = train(model, 80)
    return {"losses": losses, "loss": loss_of(model), "checkpoint": full_state_dict(model)}


def read_checkpoint(attention_class, state, attention=None):
    model = make_model(attention_class, HEADS)
    load_full_state_dict(model, state)
    return loss_of(model, attention)


runs = {cls.__name__: launch(train_and_save, 2, args=(cls,), timeout=300)[0] for cls in (ParallelAttention, AsOnePile)}
viz.curves({name: run["losses"] for name, run in runs.items()}, title="both learn")

# %%
right, pile = (runs[name]["checkpoint"] for name in ("ParallelAttention", "AsOnePile"))
readings = [
    ("ParallelAttention, p = 2", "the same", runs["ParallelAttention"]["loss"]),
    ("ParallelAttention, p = 2", "one process", launch(read_checkpoint, 1, args=(ParallelAttention, right))[0]),
    ("AsOnePile, p = 2", "the same", runs["AsOnePile"]["loss"]),
    ("AsOnePile, p = 2", "one process", launch(read_checkpoint, 1, args=(ParallelAttention, pile))[0]),
    ("ParallelAttention, p = 2", "AsOnePile, p = 2", launch(read_checkpoint, 2, args=(AsOnePile, right))[0]),
    (
        "ParallelAttention, p = 2",
        "its attention switched off",
        launch(read_checkpoint, 1, args=(ParallelAttention, right, torch.zeros_like))[0],
    ),
]
viz.table(
    [{"learned by": writer, "read by": reader, "loss on new text": f"{loss:.4f}"} for writer, reader, loss in readings]
)

# %% [markdown]
# The rows of a fresh weight have no names yet: rank 0 took some of the queries' rows for keys, and trained them as keys. So it learns nearly as well as the right one. On one process every row goes where its place says that it belongs, and the pairs that have learned together are torn apart. The other way round it is just as bad: the weights that
# the right one has learned, cut as one pile. Compare both with the last line: an attention that was cut in the wrong way is worse here than none at all.
#
# **Second: copies that nobody adds up.** Two ranks, one head of K and V for all. The broken class is yours, but its group of copies holds only the rank itself, so the f in front of the weight does nothing.


# %%
class NotAddedUp(GroupedAttention):
    def __init__(self, hidden_size, num_heads, num_kv_heads, *, group=None, **options):
        super().__init__(hidden_size, num_heads, num_kv_heads, group=group, **options)
        self.copies_group = copies_group(group, 1)


def train_copies(attention_class):
    model = make_model(attention_class, HEADS, 1)
    first_row = model.attention.heads * model.attention.head_dim  # where K begins

    @torch.no_grad()
    def apart():
        mine = model.attention.qkv_weight[first_row:]
        both = mine.clone()
        dist.all_reduce(both)
        drift.append((both - 2 * mine).abs().max().item())  # two copies: the other one minus mine

    drift = []
    losses = train(model, 80, after_step=apart)
    return {"losses": losses, "drift": drift, "checkpoint": full_state_dict(model), "loss": loss_of(model)}


def read_copies(state):
    model = make_model(GroupedAttention, HEADS, 1)
    load_full_state_dict(model, state)
    return loss_of(model)


grouped = {cls.__name__: launch(train_copies, 2, args=(cls,), timeout=300)[0] for cls in (GroupedAttention, NotAddedUp)}
viz.curves(
    {name: run["losses"] for name, run in grouped.items()}, title="the loss, with and without the sum over copies"
)

# %%
viz.curves(
    {name: run["drift"] for name, run in grouped.items()},
    ylabel="largest difference",
    title="how far the two copies of the one head of K and V are apart",
)

# %%
viz.table(
    [
        {
            "attention": name,
            "loss on new text, p = 2": f"{run['loss']:.4f}",
            "its checkpoint on one process": f"{launch(read_copies, 1, args=(run['checkpoint'],))[0]:.4f}",
            "copies apart at the end": f"{run['drift'][-1]:.2g}",
        }
        for name, run in grouped.items()
    ]
)

# %% [markdown]
# Without the sum each rank trains a head of K and V for its own queries: in truth the model now has two of them. It learns, and the loss looks healthy. But what it has learned is another model than the one that you configured. A checkpoint has room for one head only, so the other one is lost when it is written. The detector of chapter 05
# does not see it: these parameters are shards, and it leaves shards out. Only a check of the copies does.

# %%
symptoms(6)

# %% [markdown]
# ## 8 · Measure it
#
# First the traffic, as recorded, against the formula: `b·s·h` numbers forward and backward; with copies also the gradient of the rows of K and V, `2d·h` of the weight and `2d` of the bias, over the ranks that share a head.


# %%
def count(num_kv_heads):
    attention = GroupedAttention(64, 8, num_kv_heads, device=device())
    x = torch.randn(2, 16, 64, dtype=torch.float32, device=device(), requires_grad=True)  # [b, s, h]
    with record() as section:
        attention(x).sum().backward()
    return [call.bytes // 4 for call in section if len(call.group) > 1]


b, s, h, a = 2, 16, 64, 8
rows = []
for kv_heads, p in ((8, 1), (8, 2), (8, 4), (2, 2), (2, 4), (1, 4)):
    numbers = launch(count, p, args=(kv_heads,))[0]
    copies = 2 * (h // a) * (h + 1) if p > kv_heads else 0
    rows.append(
        {
            "p": p,
            "heads of K and V": kv_heads,
            "all-reduces": len(numbers),
            "numbers": f"{sum(numbers):,}",
            "formula": f"{(2 * b * s * h if p > 1 else 0) + copies:,}",
        }
    )
viz.table(rows, title="b·s·h = 2,048; 2d·(h + 1) = 1,040")

# %% [markdown]
# The sum over copies does not grow with batch or sequence: in training, where `b·s` is far larger than `2d`, it hardly counts. Then the cache, on each rank:


# %%
def cache_bytes(num_heads, num_kv_heads):
    attention = tplab.tensor.ParallelAttention(num_heads * 16, num_heads, num_kv_heads, device=device())
    cache = KVCache(attention, batch_size=1, max_length=1024)
    return cache.keys.nbytes + cache.values.nbytes


viz.table(
    [
        {"8 heads, of K and V": kv_heads}
        | {f"KiB on a rank, p = {p}": launch(cache_bytes, p, args=(8, kv_heads))[0] // 1024 for p in (1, 2, 4)}
        | {"formula, p = 4": 2 * 1 * 1024 * 16 * max(1, kv_heads // 4) * 4 // 1024}
        for kv_heads in (8, 4, 2, 1)
    ],
    title="2 · b · max_length · d · (heads of K and V on the rank) · 4 bytes",
)

# %% [markdown]
# Read the rows from left to right: each halves until a rank has one head of K and V left, and there it stays. The columns say why models have fewer of them. And for Llama 3 70B, by the same formula:

# %%
llama = PRESETS["Llama 3 70B"]
whole = 2 * llama.num_layers * llama.seq_length * llama.head_dim * 2  # bytes, for one head of K and V in each layer
viz.table(
    [
        {
            "p": p,
            "8 heads of K and V": f"{whole * max(1, llama.kv_heads // p) / 2**30:.4f}",
            "if it had 64": f"{whole * max(1, llama.num_heads // p) / 2**30:.4f}",
        }
        for p in (1, 2, 4, 8, 16)
    ],
    title="GiB on each rank, for one text of 8192 tokens",
)

# %% [markdown]
# ## 9 · In the wild
#
# **Megatron-Core**, `megatron/core/transformer/attention.py`: `SelfAttention` with `linear_qkv` (column-parallel) and `linear_proj` (row-parallel, `skip_bias_add=True`), and `CrossAttention` with `linear_q` and `linear_kv`. Its fused weight has another order of rows: group by group, the queries of a group, then its key, then its value. Then a plain cut into `p` pieces is right
# and no stride is needed, but a checkpoint with the three matrices on top of each other has to be sorted first. With fewer groups than ranks, recent versions all-gather the fused output and let each rank pick what it needs.
#
# **vLLM**, `vllm/model_executor/layers/linear.py`: `QKVParallelLinear` cuts as you do, and holds `num_kv_head_replicas` copies where there are more ranks than heads of K and V. It serves only, so nobody has to add up gradients.
#
# **PyTorch**: `parallelize_module(attention, mesh, {"wq": ColwiseParallel(), "wk": ColwiseParallel(), "wv": ColwiseParallel(), "wo": RowwiseParallel()})`, with three separate layers. The number of heads must then follow from the width that comes in. Here it is next to yours, with the same weights:


# %%
class PlainAttention(nn.Module):
    """Attention with four plain linear layers; the number of heads follows from the width that comes in."""

    def __init__(self, hidden_size, head_dim, **options):
        super().__init__()
        self.head_dim = head_dim
        for name in ("wq", "wk", "wv", "wo"):
            setattr(self, name, nn.Linear(hidden_size, hidden_size, **options))

    def forward(self, x):
        q, k, v = (split_heads(layer(x), self.head_dim) for layer in (self.wq, self.wk, self.wv))
        return self.wo(merge_heads(attend(q, k, v)))


def against_dtensor(state, x):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    options = {"device": device(), "dtype": torch.float64}
    theirs = PlainAttention(32, 4, **options)
    theirs.load_state_dict(state)
    mine = ParallelAttention(32, 8, **options)
    fused = {kind: torch.cat([state[f"w{part}.{kind}"] for part in "qkv"]) for kind in ("weight", "bias")}
    full = {f"qkv.{kind}": value for kind, value in fused.items()}
    load_full_state_dict(mine, full | {f"out.{kind}": state[f"wo.{kind}"] for kind in fused})
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    plan = {name: ColwiseParallel() for name in ("wq", "wk", "wv")}
    parallelize_module(theirs, mesh, plan | {"wo": RowwiseParallel()})
    results = []
    for attention in (mine, theirs):
        leaf = x.to(device()).requires_grad_()
        with record() as section:
            out = attention(leaf)
            out.square().sum().backward()
        calls = {kind: total.calls for kind, total in section.totals().items()}
        results.append({"out": out.detach(), "dx": leaf.grad, "calls": calls})
    return results


torch.manual_seed(0)
state = PlainAttention(32, 4, dtype=torch.float64).state_dict()
mine, theirs = launch(against_dtensor, 2, args=(state, torch.randn(2, 5, 32, dtype=torch.float64)), timeout=300)[0]
differences = {name: f"{(mine[name] - theirs[name]).abs().max().item():.0e}" for name in ("out", "dx")}
print(f"largest difference: {differences}")
print(f"collectives: yours {mine['calls']}, PyTorch's {theirs['calls']}")

# %% [markdown]
# The same numbers. PyTorch's plan, written layer by layer, has an f in front of each of q, k and v; yours has one for all three.
#
# ## 10 · Recap
#
# 1. Heads are the natural cut: a head looks at no other one, and its softmax needs whole scores. Each rank has `a/p` whole heads, so `p` must divide the number of heads.
# 2. Traffic of attention: one all-reduce of `b·s·h` forward (g), one backward (f), for every `p > 1`: as much as the MLP's. Cross-attention has one f more, of `b·t·h`.
# 3. A fused `[Wq; Wk; Wv]` is cut matrix by matrix, in whole heads. Cut as one pile it trains, and fits no other `p`.
# 4. With fewer heads of K and V than ranks, neighbours hold copies, and the gradients of the copies are added up: f in front of a weight.
# 5. Each rank caches the keys and values of its own heads; more ranks than heads of K and V make it no smaller. Next, chapter 07 cuts the largest table of the model: the vocabulary.

# %% [markdown]
# ## Your library so far
#
# Attention has joined it, with fused and grouped heads and a KV cache, and it runs without the notebook, too.

# %%
from tplab.course import library

library(6)
