# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 12 · Sequence parallel
#
# **The question.** Tensor parallelism cuts the matrices. Norms, dropout and residuals it leaves alone: `p` ranks hold the same `[b, s, h]` and compute the same with it. Can every rank have a `p`-th of that too, without sending a byte more?
#
# **What you will have built.** The pair of mappings that replaces f and g; a block that holds `s/p` tokens wherever no matrix needs all of them; the one all-reduce that its gradients then need; and the formula for what a layer keeps in memory, for every way to run it. At the end a small GPT made of your blocks trains
# with the loss of one process.
#
# Symbols: `b` batch, `s` sequence length, `h` hidden size, `a` attention heads, `p` number of ranks. **f** (nothing forward, all-reduce backward) and **g** (all-reduce forward, nothing backward) are those of chapter 03. About 75 minutes.

# %% tags=["setup"]
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

from tplab import device, launch, memory, record, viz
from tplab.common import corpus
from tplab.course import check, predict, show_failure, symptoms
from tplab.memory import saved_for_backward
from tplab.sequence import gather_from_sequence_region, gather_linear_again, reduce_scatter_to_sequence_region
from tplab.tensor import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    checkpoint,
    copy_to_region,
    dropout,
    load_full_state_dict,
    reduce_from_region,
    seed_all,
    shard,
)

# %% [markdown]
# ## 1 · What tensor parallelism leaves whole
#
# Here is one half of a transformer layer, the MLP with what stands around it, on real ranks: a norm, the column-parallel and the row-parallel product, and behind g the bias, dropout and the residual. The picture is drawn from the shapes that each rank held and from its record. A filled frame: the rank has the whole tensor. A band:
# it has a part, some rows (tokens) or some columns (features). Move `sequence_parallel` to True and compare what is filled, and what is sent.


# %%
B, S, H = 2, 16, 32  # b, s, h of the small examples


def half_a_layer(sequence_parallel):
    """What this rank holds from step to step, and what it sends: forward through norm, MLP, bias and residual."""
    torch.manual_seed(0)
    rank, p = dist.get_rank(), dist.get_world_size()
    norm, up = nn.LayerNorm(H, device=device()), ColumnParallelLinear(H, 4 * H, device=device())
    down = RowParallelLinear(4 * H, H, device=device())
    x = torch.randn(B, S, H, device=device())
    if sequence_parallel:
        x = shard(x, 1, rank, p)  # [b, s/p, h]
    steps = []

    def step(name, function, *given, width=H, summand=False):
        with record() as section:
            y = function(*given)
        part = tuple(y.shape[1:])  # tokens, features
        steps.append({"name": name, "part": part, "whole": (S, width), "summand": summand, "sent": list(section)})
        return y

    enter = gather_from_sequence_region if sequence_parallel else copy_to_region
    leave = reduce_scatter_to_sequence_region if sequence_parallel else reduce_from_region
    y = step("norm(x)", norm, x)
    y = step("up reads", enter, y)
    y = step("down reads", lambda y: F.gelu(F.linear(y, up.weight, up.bias)), y, width=4 * H)
    y = step("down gives", F.linear, y, down.weight, summand=p > 1)
    y = step("sum", leave, y)
    step("+ bias, + x", lambda y: x + y + down.bias, y)
    return steps


# %% tags=["explore"]
def show_half(p, sequence_parallel):
    steps = launch(half_a_layer, p, args=(sequence_parallel,))[0]
    kind = "with the sequence cut" if sequence_parallel else "tensor parallelism alone"
    return viz.layouts(steps, ranks=p, title=f"{kind}, p = {p}: [tokens, features] of one of b = {B} sequences")


viz.explore(show_half, p=(2, 4), sequence_parallel=(False, True))

# %% [markdown]
# Between g and the next f every rank does the same with the same numbers. That costs nothing in traffic, and chapter 10 was glad of it. But it costs memory: autograd keeps the norm's input, the input of `up` and dropout's mask on *every* rank, and no `p` makes them smaller. And it is the same work, `p` times.
#
# All that stands there works on each token alone: a norm takes mean and variance over the `h` numbers of one token, dropout and the residual work on single numbers. So let each rank have `s/p` of the tokens there. This is **sequence parallelism** (Korthikanti et al. 2022). It goes together with tensor parallelism, on the same ranks: where a
# matrix is, the work is cut by columns or heads; elsewhere by tokens.
#
# How much is at stake? What one layer of GPT-3 keeps for the backward pass, for one sequence, by the formula that you write in exercise 12.4. Turn `p` first, then `sequence_parallel`.


# %% tags=["explore"]
PARTS = {
    "attention scores": ("attention scores",),
    "inside attention and MLP": (
        "Q, K and V",
        "input of the attention's output layer",
        "input of the activation",
        "input of the second linear layer",
    ),
    "between them": (
        "input of the attention norm",
        "input of Q, K and V",
        "dropout mask behind attention",
        "input of the MLP norm",
        "input of the MLP",
        "dropout mask behind the MLP",
        "input of the layer",
    ),
}
GPT3 = memory.PRESETS["GPT-3 175B"]


def gpt3_layer(p, **options):
    kept = memory.layer_activations(GPT3, tp=p, **options)
    return {name: sum(kept.get(one, 0) for one in ones) for name, ones in PARTS.items()}


def show_layer(p, sequence_parallel):
    bars = {
        f"computed again: {recompute}": gpt3_layer(p, sequence_parallel=sequence_parallel, recompute=recompute)
        for recompute in ("nothing", "attention", "layers")
    }
    scale = sum(gpt3_layer(1).values())
    return viz.saved_activations(
        bars, scale=scale, title=f"one layer of GPT-3 on one of p = {p} ranks, bytes kept for backward"
    )


viz.explore(show_layer, p=(1, 2, 4, 8), sequence_parallel=(False, True), start={"p": 4})

# %% [markdown]
# The dark part, the scores, and the hatched part shrink with `p`. The dotted part shrinks only when the sequence is cut. Section 5 says what the other two bars are.
#
# ## 2 · The two halves of an all-reduce
#
# Chapter 01 built a ring all-reduce from two rounds: a reduce-scatter, after which each rank has one part of the sum, and an all-gather, which brings the parts together. g does both at once. If each rank only needs *its tokens* of the sum, g can stop half-way; and the second half is done later, where the next matrix needs all tokens:
#
# | | where the matrices end | in between | where the next ones begin |
# |---|---|---|---|
# | tensor parallelism | g: all-reduce | `[b, s, h]` on every rank | f: nothing |
# | and sequence parallelism | **reduce-scatter** | `[b, s/p, h]` | **all-gather** |
#
# Backward, the same pair. Take the all-gather first: $y = [x_0, x_1, \dots]$, all tokens on every rank. Behind it, rank `r` computes its own columns, so its gradient $\partial L/\partial y$ is one term, for all tokens. The gradient of $x_r$ is the sum of these terms, taken at the tokens of rank `r`: a reduce-scatter. Then the
# reduce-scatter: $y_r$ are the tokens of rank `r` in the sum of all ranks' $x$. Each rank's $x$ went into every $y_r$ with the factor 1, so its gradient is all $\partial L/\partial y_r$ put together: an all-gather. Each is the other's backward.
#
# **Predict.** One block, forward, `p = 4`, `b = 2`, `s = 16`, `h = 32`, float32, with rings as in chapter 01: how many bytes does each rank send for one all-reduce of `[b, s, h]`, and how many for an all-gather and a reduce-scatter of it together?

# %% predict="12.a"
predict("12.a", all_reduce=6144, gather_and_scatter=6144)

# %%
RING = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # rounds of p - 1 steps, each with 1/p of the message


def sent_in_rings(calls, p):
    """Bytes that a rank sends for these collectives, each done as a ring."""
    return sum(RING[call.kind] * call.bytes * (p - 1) // p for call in calls)


rows = []
for sequence_parallel in (False, True):
    steps = launch(half_a_layer, 4, args=(sequence_parallel,))[0]
    calls = [call for step in steps for call in step["sent"]]
    rows.append(
        {
            "the sequence is cut": sequence_parallel,
            "collectives": ", ".join(call.kind for call in calls),
            "bytes of the messages": sum(call.bytes for call in calls),
            "bytes that a rank sends in rings": sent_in_rings(calls, 4),
        }
    )
viz.table(rows, title="half a layer, forward, p = 4")

# %% [markdown]
# The messages are counted twice in the second row, since the tensor takes part in two collectives; on the links it is the same.

# %% [markdown] task="12.1" title="Gather and reduce-scatter along the sequence" difficulty=3 minutes=20
# The sequence is dimension 1 of `[b, s, h]`. Both operators send in both directions, so both of their methods do something.
#
# - `dist.all_gather(parts, mine)` fills a list of `p` tensors in rank order. `dist.reduce_scatter(total, parts)` takes a list of `p` tensors, one for each rank, and writes the sum of those meant for this rank into `total`. `p` is `dist.get_world_size()`.
# - Collectives want contiguous memory. A piece of dimension 1 is no contiguous piece of memory if `b > 1`; and a gradient may be laid out in any way.
# - Leave what you are given as it is.


# %% exercise="12.1"
class GatherFromSequence(Function):
    """gather: x [b, s/p, ..], this rank's tokens -> y [b, s, ..], all tokens."""

    @staticmethod
    def forward(ctx, x):
        """x [b, s/p, ..] -> the tokens of all ranks in rank order [b, s, ..]."""
        ### BEGIN SOLUTION
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]  # p of [b, s/p, ..]
        dist.all_gather(parts, x)
        return torch.cat(parts, dim=1)  # [b, s, ..]
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad_output):
        """grad_output [b, s, ..], this rank's term -> dx [b, s/p, ..], this rank's tokens of the sum over the ranks."""
        ### BEGIN SOLUTION
        return ReduceScatterToSequence.apply(grad_output)
        ### END SOLUTION


class ReduceScatterToSequence(Function):
    """reduce-scatter: x [b, s, ..], this rank's term -> y [b, s/p, ..], this rank's tokens of the sum."""

    @staticmethod
    def forward(ctx, x):
        """x [b, s, ..] -> this rank's tokens of the sum over the ranks [b, s/p, ..]."""
        ### BEGIN SOLUTION
        parts = [part.contiguous() for part in x.chunk(dist.get_world_size(), dim=1)]  # p of [b, s/p, ..]
        total = torch.empty_like(parts[0])
        dist.reduce_scatter(total, parts)
        return total  # [b, s/p, ..]
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad_output):
        """grad_output [b, s/p, ..], of this rank's tokens -> dx [b, s, ..], of all tokens."""
        ### BEGIN SOLUTION
        return GatherFromSequence.apply(grad_output)
        ### END SOLUTION


# %% [markdown] hints="12.1"
# 1. Four methods, and only two different things to do: bring all tokens together, or add up and keep your own. Which method does which? And when one of them is written, who may call it?
# 2. Together: all-gather into a list of `p` tensors like `x`, then `torch.cat` along dimension 1. Add up: cut `x` into `p` pieces along dimension 1 with `x.chunk(p, dim=1)`, make each contiguous, reduce-scatter the list into a new tensor like one piece. Each backward is the other class, `.apply`.
# 3. `x = x.contiguous()`, `parts = [torch.empty_like(x) for _ in range(p)]`, `dist.all_gather(parts, x)`, `return torch.cat(parts, dim=1)`; and `parts = [part.contiguous() for part in x.chunk(p, dim=1)]`, `total = torch.empty_like(parts[0])`, `dist.reduce_scatter(total, parts)`, `return total`. Backward: `return ReduceScatterToSequence.apply(grad_output)`, and the other way round.

# %% check="12.1"
check("12.1", GatherFromSequence, ReduceScatterToSequence)

# %% [markdown]
# See both at work on real ranks, with numbers small enough to follow: two ranks, four tokens, one number a token. Each rank has two tokens; all four are gathered; each rank multiplies by its own weight, 1 on rank 0 and 10 on rank 1, and the results are added up and shared out again. Backward, each token's gradient is the sum of both weights.


# %%
def through_both():
    rank = dist.get_rank()
    mine = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[rank].view(1, 2, 1).to(device()).requires_grad_()  # [1, s/p, 1]
    everything = GatherFromSequence.apply(mine)  # [1, s, 1]
    term = everything * (1.0, 10.0)[rank]  # [1, s, 1], this rank's term
    out = ReduceScatterToSequence.apply(term)  # [1, s/p, 1]
    out.sum().backward()
    return {
        "my tokens": mine.flatten().tolist(),
        "gathered": everything.flatten().tolist(),
        "my term": term.flatten().tolist(),
        "my tokens of the sum": out.flatten().tolist(),
        "gradient of my tokens": mine.grad.flatten().tolist(),
    }


viz.table(
    [
        {"rank": rank} | {name: str(value) for name, value in held.items()}
        for rank, held in enumerate(launch(through_both, 2))
    ]
)

# %% [markdown]
# ## 3 · A block on its tokens
#
# A transformer layer is twice the same: norm, something with matrices in the middle, bias, dropout, residual. Only the middle differs. So here are the two middles, for all tokens `[b, s, h]`, and each gives this rank's *summand* `[b, s, h]` of its output, without the last bias and without any operator: attention over this rank's heads,
# and the MLP with this rank's columns. The attention is written out, scores and softmax and all, since section 5 looks at its memory. `multiply` is how the first matrix takes its input; leave it alone until then.


# %% tags=["setup"]
class Attention(nn.Module):
    """All tokens [b, s, h] -> this rank's summand [b, s, h], over its a/p heads, without the last bias."""

    def __init__(self, h, heads, *, rate=0.0, recompute=False, group=None, device=None, dtype=None):
        super().__init__()
        options = {"group": group, "device": device, "dtype": dtype}
        self.qkv = QKVParallelLinear(h, heads, heads, h // heads, **options)  # weight [3h/p, h]
        self.out = RowParallelLinear(h, h, bias=False, **options)  # weight [h, h/p]
        self.heads, self.rate, self.recompute = self.qkv.heads[0], rate, recompute

    def forward(self, x, rng=None, multiply=F.linear):
        qkv = multiply(x, self.qkv.weight, self.qkv.bias)  # [b, s, 3h/p]
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))  # [b, a/p, s, d]
        if self.recompute:
            y = checkpoint(self.core, q, k, v, rng, tracker=rng)
        else:
            y = self.core(q, k, v, rng)
        return F.linear(y.transpose(1, 2).flatten(2), self.out.weight)  # [b, s, h], a summand

    def core(self, q, k, v, rng):
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5  # [b, a/p, s, s]
        future = torch.full(scores.shape[-2:], -torch.inf, device=q.device, dtype=q.dtype).triu(1)
        probabilities = (scores + future).softmax(-1)  # [b, a/p, s, s]
        return dropout(probabilities, self.rate, self.training, sharded=True, rng=rng) @ v  # [b, a/p, s, d]


class MLP(nn.Module):
    """All tokens [b, s, h] -> this rank's summand [b, s, h], over its 4h/p columns, without the last bias."""

    def __init__(self, h, *, group=None, device=None, dtype=None):
        super().__init__()
        options = {"group": group, "device": device, "dtype": dtype}
        self.up = ColumnParallelLinear(h, 4 * h, **options)  # weight [4h/p, h]
        self.down = RowParallelLinear(4 * h, h, bias=False, **options)  # weight [h, 4h/p]

    def forward(self, x, rng=None, multiply=F.linear):
        x = F.gelu(multiply(x, self.up.weight, self.up.bias))  # [b, s, 4h/p]
        return F.linear(x, self.down.weight)  # [b, s, h], a summand


class TensorParallelBlock(nn.Module):
    """What chapter 10 has: x [b, s, h] replicated -> [b, s, h] replicated, with f and g around `inner`."""

    def __init__(self, h, inner, *, hidden_dropout=0.0, group=None, device=None, dtype=None):
        super().__init__()
        self.norm = nn.LayerNorm(h, device=device, dtype=dtype)
        self.inner = inner
        self.bias = nn.Parameter(torch.zeros(h, device=device, dtype=dtype))  # added behind the sum
        self.hidden_dropout, self.group = hidden_dropout, group

    def forward(self, x, rng=None):
        y = copy_to_region(self.norm(x), self.group)  # f: [b, s, h]
        y = reduce_from_region(self.inner(y, rng), self.group)  # g: [b, s, h]
        return x + dropout(y + self.bias, self.hidden_dropout, self.training, sharded=False, rng=rng)


# %% [markdown]
# The last class is the block as you know it from chapter 10. Now the same on `s/p` tokens. What was drawn in section 1 for the MLP holds for attention too: a rank computes whole heads, its queries look at the keys of *all* tokens, and so all tokens have to come together before it.

# %% [markdown] task="12.2" title="A block on s/p tokens" difficulty=3 minutes=15
# The constructor is that of `TensorParallelBlock`; write `forward`. The mappings are ready made (so this exercise does not wait for 12.1): `gather_from_sequence_region(x, group)` and `reduce_scatter_to_sequence_region(x, group)` of `tplab.sequence.regions`. Leave their other argument, `partial_grad=True`, as it is: section 6 says what it is for.
#
# - The norm, the bias, dropout and the residual work on this rank's tokens, `inner` on all.
# - Dropout: `dropout(.., sharded=True or False, rng=rng)` draws from the state `"sharded"`, another one on every rank, or `"replicated"`, the same on all (chapter 09). With `rng=None` it draws from torch's current state. Which tokens does this rank hold there, and does another rank hold them too?
# - `self.inner(x, rng)` has dropouts of its own, in the attention.


# %% exercise="12.2"
class SequenceParallelBlock(TensorParallelBlock):
    """x -> norm -> gather -> inner -> reduce-scatter -> + bias, dropout, + residual.

    in:  x, this rank's tokens    [b, s/p, h]
    out:    this rank's tokens    [b, s/p, h]
    One all-gather and one reduce-scatter of b·s·h numbers forward, and again backward.
    """

    def forward(self, x, rng=None):
        ### BEGIN SOLUTION
        y = self.norm(x)  # [b, s/p, h]
        y = gather_from_sequence_region(y, self.group)  # [b, s, h]
        y = self.inner(y, rng)  # [b, s, h], a summand
        y = reduce_scatter_to_sequence_region(y, self.group)  # [b, s/p, h]
        return x + dropout(y + self.bias, self.hidden_dropout, self.training, sharded=True, rng=rng)
        ### END SOLUTION


# %% [markdown] hints="12.2"
# 1. Take the forward of `TensorParallelBlock` and write beside each line which tokens it needs. Between which two steps do all tokens have to come together, and where do they part again?
# 2. Norm; gather; `inner`; reduce-scatter; bias; dropout; residual. The tokens behind the reduce-scatter are on no other rank, so their mask has to be this rank's own.
# 3. `y = gather_from_sequence_region(self.norm(x), self.group)`, `y = reduce_scatter_to_sequence_region(self.inner(y, rng), self.group)`, and `x + dropout(y + self.bias, self.hidden_dropout, self.training, sharded=True, rng=rng)`.

# %% check="12.2"
check("12.2", SequenceParallelBlock)

# %% [markdown]
# A layer is two of these. Here are two layers in both forms, with the same weights: do they give the same, and what did they send, forward and backward?


# %%
def two_layers(block_class, h, heads, *, rate=0.0, group=None, recompute=False, dtype=None):
    """Attention and MLP, twice, each in a block."""
    place = {"group": group, "device": device(), "dtype": dtype}
    blocks = []
    for _ in range(2):
        for inner in (Attention(h, heads, rate=rate, recompute=recompute, **place), MLP(h, **place)):
            blocks.append(block_class(h, inner, hidden_dropout=rate, **place))
    return nn.ModuleList(blocks)


def through_two_layers(block_class):
    torch.manual_seed(0)
    rank, p = dist.get_rank(), dist.get_world_size()
    blocks = two_layers(block_class, H, 4, dtype=torch.float64)
    whole, upstream = torch.randn(2, B, S, H, dtype=torch.float64).to(device())
    x, dy = whole, upstream
    if block_class is SequenceParallelBlock:
        x, dy = shard(whole, 1, rank, p), shard(upstream, 1, rank, p)  # [b, s/p, h]
    leaf = x.clone().requires_grad_()
    with record() as section:
        out = leaf
        for block in blocks:
            out = block(out)
        out.backward(dy)
    return {"out": out.detach(), "dx": leaf.grad, "sent": list(section)}


results = {
    cls.__name__: launch(through_two_layers, 4, args=(cls,)) for cls in (TensorParallelBlock, SequenceParallelBlock)
}
one, other = results.values()
off = {name: (torch.cat([rank[name] for rank in other], 1) - one[0][name]).abs().max().item() for name in ("out", "dx")}
print(f"largest difference of the ranks' tokens, put together: output {off['out']:.0e}, input gradient {off['dx']:.0e}")
rows = []
for name, ranks in results.items():
    kinds = [call.kind for call in ranks[0]["sent"]]
    rows.append(
        {"two layers of": name}
        | {kind: kinds.count(kind) for kind in RING}
        | {"bytes that a rank sends in rings": sent_in_rings(ranks[0]["sent"], 4)}
    )
viz.table(rows, title="p = 4, forward and backward, float64")

# %% [markdown]
# Every all-reduce has become one all-gather and one reduce-scatter. The same numbers, the same bytes.
#
# ## 4 · Whose gradient is it now?
#
# In chapter 10 the norms sent nothing: every rank saw all tokens, so every rank computed the whole gradient of the norm's weight. Now each rank's copy of that weight sees `s/p` tokens.
#
# **Predict.** Which gradients on a rank are only one term now (True or False)? And how many bytes has one all-reduce of all of them, the norm's bias included, for one block with `h = 32` in float32?

# %% predict="12.b"
predict("12.b", norm_weight=True, last_bias=True, up_bias=False, bytes=384)


# %%
def gradients_of_a_block(block_class):
    torch.manual_seed(0)
    block = block_class(H, MLP(H, device=device()), device=device())
    x, dy = torch.randn(2, B, S, H, device=device())
    if block_class is SequenceParallelBlock:
        x, dy = (shard(t, 1, dist.get_rank(), dist.get_world_size()) for t in (x, dy))  # [b, s/p, h]
    block(x).backward(dy)
    return {name: param.grad for name, param in block.named_parameters()}


right, cut = (launch(gradients_of_a_block, 2, args=(cls,)) for cls in (TensorParallelBlock, SequenceParallelBlock))
rows = []
for name in ("norm.weight", "norm.bias", "bias", "inner.up.weight", "inner.up.bias", "inner.down.weight"):
    row = {"gradient of": name}
    for rank in (0, 1):
        row |= {f"rank {rank} off by": f"{(cut[rank][name] - right[rank][name]).abs().max().item():.0e}"}
    row["their sum off by"] = f"{(cut[0][name] + cut[1][name] - right[0][name]).abs().max().item():.0e}"
    rows.append(row)
viz.table(rows, title="a block on its tokens against the block of chapter 10, p = 2, float32")

# %% [markdown]
# The first three are off on both ranks, and their sum is right. The last three are right on each rank as they are; there a sum would be wrong.
#
# So the three have to be added up over the ranks, once a step, after the backward pass and before the optimizer uses them. Such a parameter says so itself: `param.sequence_parallel = True` (Megatron has the same attribute). These lines mark them:


# %% tags=["setup"]
def mark(model):
    """Mark every parameter that is whole on each rank and sees only the rank's own tokens; returns the model."""
    for param in model.parameters():
        param.sequence_parallel = not hasattr(param, "tensor_parallel")
    return model


# %% [markdown] task="12.3" title="Add up what each rank's tokens gave" difficulty=3 minutes=15
# Replace the gradient of every marked parameter by its sum over the ranks of `group`. Do it in **one** all-reduce for all of them together: they are small, and each message costs its latency, whatever its size (chapter 01).
#
# - Marked means that `param.sequence_parallel` is True; it may be False, or missing.
# - A parameter may have no gradient, `param.grad is None`. Leave it alone. (All ranks then have none.) At least one marked parameter has a gradient.
# - All gradients have the same dtype; any of them may lie transposed in memory, perhaps on some ranks only.


# %% exercise="12.3"
def allreduce_sequence_gradients(module, group=None):
    """Add up over the ranks the gradients of all parameters of `module` that are marked `sequence_parallel`.

    One all-reduce. Nothing is returned: the sums are in param.grad.
    """
    ### BEGIN SOLUTION
    marked = [param for param in module.parameters() if getattr(param, "sequence_parallel", False)]
    gradients = [param.grad for param in marked if param.grad is not None]
    total = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(total, group=group)
    parts = total.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
    ### END SOLUTION


# %% [markdown] hints="12.3"
# 1. Which tensors are summed, in which order do you lay them one behind the other, and how does each come back to its place?
# 2. A list of the gradients; `torch.cat` of each `flatten()`ed; one `dist.all_reduce`; `split` with the list of their numbers of elements; copy each part back into its gradient, in its shape.
# 3. `gradients = [p.grad for p in module.parameters() if getattr(p, "sequence_parallel", False) and p.grad is not None]`, `total = torch.cat([g.flatten() for g in gradients])`, `dist.all_reduce(total, group=group)`, then `g.copy_(part.view_as(g))` for each `part` of `total.split([g.numel() for g in gradients])`.

# %% check="12.3"
check("12.3", allreduce_sequence_gradients)

# %% [markdown]
# Now train. A small GPT on bytes of the Python standard library, as in chapter 10: embedding and positions, two layers, a final norm, scores for 256 bytes. Embedding and output layer are whole on every rank here, and since they work on each token alone, each rank uses them for its own tokens: so they are marked too. A rank's loss is the sum over its
# tokens divided by the number of *all* tokens. The twin is the same model on one process.

# %%
CONTEXT, BATCH, STEPS, HIDDEN = 32, 8, 40, 64
text = corpus.python_sources(6000)[3000:]


class ByteGPT(nn.Module):
    """This rank's tokens [b, s/p] at these places [s/p] -> scores [b, s/p, 256]."""

    def __init__(self, block_class, **options):
        super().__init__()
        place = {"device": device(), "dtype": torch.float64}
        self.embedding, self.positions = nn.Embedding(256, HIDDEN, **place), nn.Embedding(CONTEXT, HIDDEN, **place)
        self.blocks = two_layers(block_class, HIDDEN, 4, dtype=torch.float64, **options)
        self.norm, self.head = nn.LayerNorm(HIDDEN, **place), nn.Linear(HIDDEN, 256, **place)

    def forward(self, ids, places, rng=None):
        x = self.embedding(ids) + self.positions(places)  # [b, s/p, h]
        for block in self.blocks:
            x = block(x, rng)  # [b, s/p, h]
        return self.head(self.norm(x))  # [b, s/p, 256]


def plain_start():
    """The first values of all weights, whole, from one process."""
    torch.manual_seed(0)
    return ByteGPT(TensorParallelBlock).state_dict()


start = launch(plain_start, 1)[0]


def train(block_class, steps, add_up=None, rate=0.0, recompute=False):
    """The loss of every step, and how far the ranks' copies of what is whole are apart in the end."""
    torch.set_num_threads(1)
    rank, p = dist.get_rank(), dist.get_world_size()
    model = mark(ByteGPT(block_class, rate=rate, recompute=recompute))
    load_full_state_dict(model, start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.0)
    rng, losses = seed_all(3), []
    for batch in corpus.byte_batches(text, CONTEXT, BATCH, steps, seed=1):
        ids, targets = (shard(t.to(device()), 1, rank, p) for t in batch)  # [b, s/p]
        places = shard(torch.arange(CONTEXT, device=device()), 0, rank, p)  # [s/p]
        scores = model(ids, places, rng)
        loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum") / (BATCH * CONTEXT)
        optimizer.zero_grad()
        loss.backward()
        if add_up:
            add_up(model)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    copies = [param for param in model.parameters() if param.sequence_parallel]
    apart = torch.cat([param.detach().flatten() for param in copies])
    largest, smallest = apart.clone(), apart.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return {"losses": losses, "drift": (largest - smallest).max().item()}


plain_losses = launch(train, 1, args=(TensorParallelBlock, STEPS), timeout=300)[0]["losses"]
mine = launch(train, 2, args=(SequenceParallelBlock, STEPS, allreduce_sequence_gradients), timeout=300)
viz.curves({"one process": plain_losses, "your blocks, p = 2": mine[0]["losses"]}, title=f"{STEPS} steps on real text")

# %%
four = launch(train, 4, args=(SequenceParallelBlock, STEPS // 4, allreduce_sequence_gradients), timeout=300)
rows = []
for p, run in ((2, mine), (4, four)):
    losses = run[0]["losses"]
    apart = max(abs(a - b) for a, b in zip(losses, plain_losses, strict=False))
    rows.append(
        {
            "your blocks": f"p = {p}",
            "steps": len(losses),
            "last loss": f"{losses[-1]:.6f}",
            "that of one process": f"{plain_losses[len(losses) - 1]:.6f}",
            "largest difference in any step": f"{apart:.0e}",
            "replicas apart by": f"{run[0]['drift']:.0e}",
        }
    )
viz.table(rows)

# %% [markdown]
# ## 5 · What a layer keeps
#
# Now the gain. Chapter 00 added up what autograd keeps of a layer on one process: $sbh(34 + 5as/h)$ bytes with 16-bit numbers and one byte for each place of a dropout mask. Row by row, in bytes for each of the `s·b·h` numbers:
#
# | kept | bytes | | kept | bytes |
# |---|---|---|---|---|
# | input of the first norm | 2 | | input of the second norm | 2 |
# | input of Q, K and V | 2 | | input of `up` | 2 |
# | Q, K and V | 6 | | input of GELU, `[b, s, 4h]` | 8 |
# | softmax of the scores, mask, scores after dropout | $5as/h$ | | input of `down`, `[b, s, 4h]` | 8 |
# | input of the output layer | 2 | | mask | 1 |
# | mask | 1 | | | |
#
# With tensor parallelism some of these rows are divided by `p`, and with the sequence cut, all of them. Two rows need care. The matrices `qkv` and `up` read *all* tokens, and their weight's gradient needs that input again: so autograd keeps the gathered `[b, s, h]`, 2 bytes that are not divided, twice in a layer. Your block does so too.
# The way out: keep only this rank's `s/p` tokens, and **gather them once more** in the backward pass. `gather_linear_again` of `tplab.sequence.linear` is the gather and the product in one, with such a backward; the second all-gather travels while the gradient of the input is computed. It costs one more all-gather for each block, and with it
# really all is divided by `p`.
#
# The scores are another matter. They are the largest part where `s` is long: $5as/h = 80$ for GPT-3. And they are cheap to compute again, since Q, K and V are there: two matrix products, small ones as long as `s` is not much larger than `h`. So keep Q, K and V, and compute scores, softmax and dropout once more in the backward pass. This is **selective recomputation** (Korthikanti et
# al. 2022); `Attention(.., recompute=True)` above does it, with the `checkpoint` of chapter 09, which drops the same places again. Full recomputation, the alternative, keeps the layer's input alone and runs all of the layer again.
#
# **Predict.** GPT-3, `p = 8`: how many bytes does a rank keep for each of a layer's `s·b·h` numbers, with tensor parallelism alone, with the sequence cut (and gathered again in backward), and with selective recomputation on top?

# %% predict="12.c"
predict("12.c", tensor_parallel=23, and_sequence=14.25, and_selective=4.25)

# %% [markdown] task="12.4" title="The bytes of a layer" difficulty=2 minutes=15
# Bytes that autograd keeps of one layer on one of `p` ranks, with 16-bit numbers and masks of one byte; the mean and the spread of the norms are left out. With `sequence_parallel`, what the matrices read is gathered again in backward, not kept. All sizes can be divided by `p`.
#
# `recompute`: `"nothing"`; `"attention"`, selective recomputation; or `"layers"`, where only the layer's input is kept.
#
# The check builds a layer with the shapes that a rank has, runs it, and counts what autograd really kept.


# %% exercise="12.4"
def layer_bytes(b, s, h, a, p, *, sequence_parallel=False, recompute="nothing"):
    """Bytes that one layer keeps for the backward pass on one of p ranks."""
    ### BEGIN SOLUTION
    tokens = s // p if sequence_parallel else s  # of this rank, between attention and MLP
    if recompute == "layers":
        return 2 * tokens * b * h
    kept = 10 * tokens * b * h  # inputs of the norms, of Q, K, V and of up, 2 each; two masks
    kept += 24 * s * b * h // p  # Q, K, V: 6; input of the output layer: 2; inputs of GELU and of down: 8 each
    if recompute == "nothing":
        kept += 5 * s * s * b * a // p  # softmax, mask, scores after dropout, of a/p heads
    return kept
    ### END SOLUTION


# %% [markdown] hints="12.4"
# 1. Three groups of rows: what is computed with matrices or heads (divided by `p` in any case), what stands between (divided only if the sequence is cut), and the scores. Which row belongs where?
# 2. Between: four inputs of 2 bytes and two masks of 1, so 10. With the matrices: 6 + 2 + 8 + 8 = 24. Scores: 5 bytes for each of `b·a·s·s`, divided by `p`. Selective recomputation leaves the last term out; `"layers"` keeps 2 bytes of what stands between two layers.
# 3. `tokens = s // p if sequence_parallel else s`; `2 * tokens * b * h` for `"layers"`; else `10 * tokens * b * h + 24 * s * b * h // p`, and `+ 5 * s * s * b * a // p` for `"nothing"`.

# %% check="12.4"
check("12.4", layer_bytes)

# %% [markdown]
# Now on real ranks, with your block, in bfloat16. A GPU keeps one byte for each place of a dropout mask. PyTorch's `F.dropout` keeps as many bytes as `x` has, on a CPU; `torch.native_dropout` keeps one byte everywhere and takes its place here, on the ranks, for this measurement.


# %%
class GatherAgain(SequenceParallelBlock):
    """The same, but of what the first matrix reads only this rank's tokens are kept, and gathered again in backward."""

    def forward(self, x, rng=None):
        y = self.inner(self.norm(x), rng, multiply=partial(gather_linear_again, group=self.group))
        y = reduce_scatter_to_sequence_region(y, self.group)  # [b, s/p, h]
        return x + dropout(y + self.bias, self.hidden_dropout, self.training, sharded=True, rng=rng)


def one_byte_dropout(x, p=0.5, training=True):
    return torch.native_dropout(x, p, True)[0] if training and p else x


def kept_and_sent(block_class, recompute, b, s, h, heads):
    """Bytes that one layer keeps on this rank, and what it sends forward and backward."""
    F.dropout = one_byte_dropout  # on this rank, which ends with the launch
    tracker = seed_all(1)
    layer = two_layers(block_class, h, heads, rate=0.1, recompute=recompute == "attention", dtype=torch.bfloat16)[:2]
    tokens = s if block_class is TensorParallelBlock else s // dist.get_world_size()
    x = torch.randn(b, tokens, h, device=device(), dtype=torch.bfloat16, requires_grad=True)

    def run(x):
        for block in layer:
            x = block(x, tracker)
        return x

    with record() as section:
        with saved_for_backward(layer) as kept:
            out = checkpoint(run, x, tracker=tracker) if recompute == "layers" else run(x)
        out.backward(torch.ones_like(out))
    sizes = [size for shape, _, size in kept.pieces if shape != (b, tokens, 1)]  # without the norms' mean and spread
    return {"kept": sum(sizes), "sent": list(section)}


b, s, h, a = 2, 64, 64, 4
WAYS = {
    "tensor parallel": TensorParallelBlock,
    "the sequence cut": SequenceParallelBlock,
    "and gathered again": GatherAgain,
}
p = 4
measured = {
    (name, recompute): launch(kept_and_sent, p, args=(cls, recompute, b, s, h, a))[0]
    for name, cls in WAYS.items()
    for recompute in ("nothing", "attention", "layers")
}
rows = []
for (name, recompute), seen in measured.items():
    cut = name != "tensor parallel"
    formula = layer_bytes(b, s, h, a, p, sequence_parallel=cut, recompute=recompute)
    if name == "the sequence cut" and recompute != "layers":
        formula += 2 * 2 * (s - s // p) * b * h  # two inputs [b, s, h], whole
    rows.append(
        {
            "p = 4": name,
            "computed again": recompute,
            "bytes kept": f"{seen['kept']:,}",
            "your formula": f"{formula:,}",
            "collectives": len(seen["sent"]),
            "bytes sent in rings": f"{sent_in_rings(seen['sent'], p):,}",
        }
    )
viz.table(rows, title="one layer, forward and backward: b = 2, s = 64, h = 64, a = 4, bfloat16")

# %% [markdown]
# To the byte. (For "the sequence cut" the table adds the two gathered inputs to your formula.) Read it as a price list. Cutting the sequence costs nothing here; once a step comes the small all-reduce of exercise 12.3. Gathering again costs two more all-gathers a layer; each sends half of what an all-reduce sends, so it is a quarter more in all. Selective recomputation sends nothing. Full recomputation sends all that the forward pass sent a second time.
#
# What does it cost in arithmetic? PyTorch can count: `FlopCounterMode` adds up the floating-point operations of all matrix products. One rank, forward and backward:

# %%
from torch.utils.flop_counter import FlopCounterMode


def flops(recompute, s):
    tracker = seed_all(1)
    layer = two_layers(TensorParallelBlock, 64, 4, recompute=recompute == "attention")[:2]
    x = torch.randn(1, s, 64, device=device(), requires_grad=True)

    def run(x):
        for block in layer:
            x = block(x, tracker)
        return x

    with FlopCounterMode(display=False) as counter:
        out = checkpoint(run, x, tracker=tracker) if recompute == "layers" else run(x)
        out.sum().backward()
    return counter.get_total_flops()


def flops_of_all():
    return {(s, recompute): flops(recompute, s) for s in (64, 256) for recompute in ("nothing", "attention", "layers")}


counted = launch(flops_of_all, 1)[0]
rows = []
for s in (64, 256):
    base = counted[s, "nothing"]
    extra = 2 * s * s * 64  # one product of s·s·h multiplications and additions
    rows.append(
        {"s": s, "h": 64, "flops of a layer": f"{base:,}"}
        | {f"again: {name}": f"+{counted[s, name] / base - 1:.1%}" for name in ("attention", "layers")}
        | {"2·s·s·h, of all": f"+{extra / base:.1%}"}
    )
viz.table(rows, title="matrix products, forward and backward, b = 1")

# %%
s, h = GPT3.seq_length, GPT3.hidden_size
base = 3 * (24 * s * h * h + 4 * s * s * h)  # forward, and twice as much backward
print(f"GPT-3: selective recomputation computes {2 * s * s * h / base:.1%} more and keeps {80 / 114:.0%} less")

# %% [markdown]
# Attention has two products forward, the scores and their product with V, and only the first shows up again: backward needs the *inputs* of the second, not its result, and PyTorch ends the second run as soon as everything that backward asked for is there. That is $2s^2h$ operations for each sequence. (Korthikanti et al. name 2.7 % for GPT-3: their equation 8 adds $12s^2h$, both products and their backward pass.) (For the same reason full
# recomputation stops here before the last product of the layer: nothing after it is kept. With dropout, as in the table above, its mask is asked for too, and the whole layer runs again.) The smaller `s/h` is, the cheaper. For GPT-3 it is a bargain: most of the memory for hardly any work. FlashAttention (chapter 00) does the same within one GPU kernel, and where it is used nothing is left to recompute: its layers keep little more than the 34 bytes from the start.
#
# Does recomputation change the training? It must not, and not with dropout either. Ten steps, dropout 0.1, on two ranks, from the same seed:

# %%
losses = {
    recompute: launch(train, 2, args=(SequenceParallelBlock, 10, allreduce_sequence_gradients, 0.1, recompute))[0][
        "losses"
    ]
    for recompute in (False, True)
}
apart = max(abs(a - b) for a, b in zip(losses[False], losses[True], strict=True))
print(
    f"loss after 10 steps: {losses[False][-1]:.6f}, recomputed {losses[True][-1]:.6f}; largest difference {apart:.0e}"
)

# %% [markdown]
# ## 6 · Break it
#
# **First.** Forget exercise 12.3. Before you run it: will the first loss be right? Will the ranks report different losses?

# %%
forgotten = launch(train, 2, args=(SequenceParallelBlock, STEPS, None), timeout=300)
viz.curves(
    {"one process": plain_losses, "gradients not added up": forgotten[0]["losses"]},
    title="each rank trains its norms, biases and embedding on its own tokens",
)

# %%
viz.table(
    [
        {
            "gradients": name,
            "first loss": f"{run[0]['losses'][0]:.6f}",
            "last loss": f"{run[0]['losses'][-1]:.6f}",
            "replicas apart by": f"{run[0]['drift']:.0e}",
        }
        for name, run in (("added up", mine), ("not added up", forgotten))
    ]
)

# %% [markdown]
# The first loss is right, the ranks report the same one in every step (`train` adds up their parts), no error is raised, and the model learns. But the ranks' copies of everything that is whole are no longer the same: rank 0 has an embedding for the first half of a text, rank 1 one for the second half. What sees it is the last column, the detector of chapter 05.
#
# **Second.** The argument that exercise 12.2 told you to leave alone. With `partial_grad=False` the backward of the gather takes this rank's slice of its own gradient and sends nothing. That is right where all ranks do the *same* with the gathered tensor: then each has the whole gradient already. In front of a cut matrix each has one term.


# %%
class OwnTermOnly(SequenceParallelBlock):
    def forward(self, x, rng=None):
        y = gather_from_sequence_region(self.norm(x), self.group, partial_grad=False)
        y = reduce_scatter_to_sequence_region(self.inner(y, rng), self.group)
        return x + dropout(y + self.bias, self.hidden_dropout, self.training, sharded=True, rng=rng)


broken = launch(train, 2, args=(OwnTermOnly, STEPS // 2, allreduce_sequence_gradients), timeout=300)
viz.table(
    [
        {
            "gather": name,
            "first loss": f"{run[0]['losses'][0]:.6f}",
            f"loss after {STEPS // 2} steps": f"{run[0]['losses'][STEPS // 2 - 1]:.6f}",
            "replicas apart by": f"{run[0]['drift']:.0e}",
        }
        for name, run in (("its backward adds up", mine), ("its backward takes a slice", broken))
    ]
)

# %% [markdown]
# Again the first loss is right. This time even the replicas agree, since exercise 12.3 gives all of them the same sum, though of wrong terms. Only a comparison with one process, or of the traffic, tells.
#
# **Third.** A text of 33 tokens on two ranks.

# %%
with show_failure():

    def odd():
        x = torch.randn(B, 33, H, device=device())
        return reduce_scatter_to_sequence_region(x)

    launch(odd, 2)

# %% [markdown]
# Texts are padded to a multiple of `p`. The next token of a text that is being generated is a single one and can't be cut: generation uses the blocks of chapter 10, with the same weights.

# %%
symptoms(12)

# %% [markdown]
# ## 7 · Measure it
#
# What the price list of section 5 means for whole models: activations of all layers for one sequence, on one of 8 ranks (of 5 for GPT-2, whose 25 heads can't be shared by 8), by your formula.

# %%
rows = []
for name in ("GPT-3 175B", "GPT-2 1.5B"):
    config = memory.PRESETS[name]
    p = 8 if config.num_heads % 8 == 0 else 5  # GPT-2 has 25 heads
    sizes = (1, config.seq_length, config.hidden_size, config.num_heads, p)
    row = {"model": name, "p": p, "5as/h": f"{5 * config.num_heads * config.seq_length / config.hidden_size:.0f}"}
    for label, options in {
        "tensor parallel": {},
        "and the sequence cut": {"sequence_parallel": True},
        "and selective": {"sequence_parallel": True, "recompute": "attention"},
        "tensor parallel, full recomputation": {"recompute": "layers"},
    }.items():
        row[label] = f"{config.num_layers * layer_bytes(*sizes, **options) / 1e9:.1f}"
    rows.append(row)
viz.table(rows, title="GB of activations of all layers, one sequence, 16-bit numbers")

# %%
viz.saved_activations(
    {
        "tensor parallel": gpt3_layer(8),
        "the sequence cut": gpt3_layer(8, sequence_parallel=True),
        "and selective": gpt3_layer(8, sequence_parallel=True, recompute="attention"),
    },
    title="one layer of GPT-3 on one of 8 ranks",
)

# %% [markdown]
# And what travels, for two layers of yours on two ranks, forward and backward: as many bytes in all-gathers as in reduce-scatters.

# %%
viz.traffic(
    launch(through_two_layers, 2, args=(SequenceParallelBlock,)),
    title="two layers of your blocks, forward and backward",
)

# %% [markdown]
# ## 8 · In the wild
#
# **Megatron-Core**: `sequence_parallel=True` in its configuration. The mappings are `gather_from_sequence_parallel_region` and `reduce_scatter_to_sequence_parallel_region` in `megatron/core/tensor_parallel/mappings.py`; the argument `partial_grad` is called `tensor_parallel_output_grad` there. Its tensors are `[s, b, h]`, so that a part of the sequence is one
# contiguous piece of memory and nothing has to be copied. `ColumnParallelLinear` gathers by itself, and again in backward (`LinearWithGradAccumulationAndAsyncCommunication` in `layers.py`). Exercise 12.3 is `_allreduce_layernorm_grads` (newer: `_allreduce_non_tensor_model_parallel_grads`; the old name is an alias) in `megatron/core/distributed/finalize_model_grads.py`. Selective recomputation is `recompute_granularity="selective"`.
#
# **PyTorch**: `SequenceParallel()` for the norms, `ColwiseParallel(input_layouts=Shard(1))` and `RowwiseParallel(output_layouts=Shard(1))` for the matrices, in a plan for `parallelize_module`. Here is the MLP in that form, with what it sends:


# %%
def with_dtensor(state, x):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(H), nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

        def forward(self, x):
            return self.down(F.gelu(self.up(self.norm(x))))

    rank, p = dist.get_rank(), dist.get_world_size()
    theirs = Plain().to(device())
    theirs.load_state_dict(state)
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(theirs, init_device_mesh(device().type, (p,)), plan)
    mine = SequenceParallelBlock(H, MLP(H, device=device()), device=device())
    names = {"norm.weight": "norm.weight", "norm.bias": "norm.bias", "inner.up.weight": "up.weight"}
    names |= {"inner.up.bias": "up.bias", "inner.down.weight": "down.weight", "bias": "down.bias"}
    load_full_state_dict(mine, {ours: state[name] for ours, name in names.items()})
    tokens = shard(x.to(device()), 1, rank, p)  # [b, s/p, h]
    results = []
    for name, run in (("yours", lambda x: mine(x) - x), ("PyTorch's", theirs)):
        with record() as section:
            out = run(tokens)
            out.sum().backward()
        kinds = [call.kind for call in section]
        results.append({"name": name, "out": out.detach(), "sent": ", ".join(kinds)})
    placement = repr(theirs.norm.weight.grad.placements[0])
    with record() as section:
        torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    return results, placement, [f"{call.kind} of {call.numel}" for call in section]


torch.manual_seed(0)
plain = nn.ModuleDict({"norm": nn.LayerNorm(H), "up": nn.Linear(H, 4 * H), "down": nn.Linear(4 * H, H)})
(yours, torchs), placement, step = launch(with_dtensor, 2, args=(plain.state_dict(), torch.randn(B, S, H)))[0]
print(
    f"PyTorch's gradient of the norm's weight after backward: {placement}; its optimizer step sends: {', '.join(step)}"
)
print(f"largest difference of the outputs: {(yours['out'] - torchs['out']).abs().max().item():.0e}")
viz.table([{"block": run["name"], "collectives, forward and backward": run["sent"]} for run in (yours, torchs)])

# %% [markdown]
# PyTorch's DTensor knows of every tensor how it lies on the ranks. After the backward pass the gradient of the norm's weight says that it is a term of a sum, and the sum is taken where the optimizer uses it: one all-reduce of `h` numbers for the weight, one for the bias. Exercise 12.3 puts them into one message; in return DTensor can't forget them.
#
# ## 9 · Recap
#
# 1. An all-reduce is a reduce-scatter and an all-gather. Between the two each rank has its own tokens, and norms, dropout and residuals need no more.
# 2. The pair: the backward of the gather is a reduce-scatter, the backward of the reduce-scatter is an all-gather. Traffic: the same bytes as with f and g.
# 3. Memory of a layer: from $sbh(10 + 24/p + 5as/(hp))$ to $sbh(34/p + 5as/(hp))$, if the inputs of the matrices are gathered again in backward, which sends a quarter more; selective recomputation takes the last term away.
# 4. What is whole on every rank and sees only the rank's tokens has a gradient that is one term: one small all-reduce a step, and nothing tells if you forget it.
# 5. All of this is within one layer, on ranks with fast links between them. Next, chapter 13 cuts the model between its layers.

# %% [markdown]
# ## Your library so far
#
# It can split what was left whole, the activations between the blocks, along the sequence.

# %%
from tplab.course import library

library(12)
