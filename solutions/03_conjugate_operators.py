# %% [markdown]
# # 03 · Conjugate operators
#
# **The question.** Autograd follows a tensor through one process. What has to be sent *backward* where a computation is spread
# over several ranks, so that every gradient comes out as on one device?
#
# At the end of this chapter you have written four operators, a few lines each. They are nearly all the communication that
# tensor parallelism needs, and they come in two pairs: what one does forward, its partner does backward.
#
# ```
#                  forward                                backward
#     f            nothing                                all-reduce
#     g            all-reduce                             nothing
#     scatter      keep my part                           all-gather
#     gather       all-gather                             keep my part
# ```
#
# You need chapter 02: `launch` (runs a function on `p` ranks), `device()` (this rank's device), the column and the row split, and these five words:
# **rank** (one of `p` processes, each with memory of its own), **replicated** (every rank holds the same whole tensor), **sharded** (each holds its
# part), **partial** (each holds one term of a sum), **collective** (a call that all ranks make together: `dist.all_reduce` adds up over the ranks, in
# place; `dist.all_gather` brings everybody's part to everybody). About 75 minutes.

# %% tags=["setup"]
import warnings

import torch
import torch.distributed as dist
from torch.autograd import Function

from tplab import device, launch, record, viz
from tplab.course import check, predict, show_failure, symptoms
from tplab.tensor import mappings, shard, unshard

# %% [markdown]
# ## A network of four weights, on two ranks
#
# Take a very small network of two linear layers. Its input and its output are one number, the hidden layer has two, one per rank. The first layer is split
# by columns, the second by rows, as in chapter 02. Rank $r$ holds the weights $a_r$ and $b_r$.
#
# ```
#           rank 0   ┌── y₀ = x·a₀ ── z₀ = y₀·b₀ ──┐
#     x  ────────────┤                             ├── z = z₀ + z₁ ── L = z²/2
#           rank 1   └── y₁ = x·a₁ ── z₁ = y₁·b₁ ──┘
#
#     replicated         sharded       partial         replicated
# ```
#
# With $x = 2$, $a = (3, 5)$, $b = (1, -1)$:
#
# | | rank 0 | rank 1 | |
# |---|---|---|---|
# | $y_r = x a_r$ | 6 | 10 | sharded: each rank has its own |
# | $z_r = y_r b_r$ | 6 | -10 | partial: the terms of a sum |
# | $z = z_0 + z_1$ | -4 | -4 | replicated, after an all-reduce |
# | $L = z^2/2$ | 8 | 8 | replicated: every rank computes the same loss |
#
# Now back, by the chain rule, from the loss to $x$:
#
# | | rank 0 | rank 1 | |
# |---|---|---|---|
# | $dz = z$ | -4 | -4 | replicated, like $z$ |
# | $dz_r = dz \cdot \partial z / \partial z_r = dz$ | -4 | -4 | $z$ is a plain sum: each term gets $dz$ as it is |
# | $db_r = y_r\, dz_r$ | -24 | -40 | the rank's own weight |
# | $dy_r = b_r\, dz_r$ | -4 | 4 | sharded, like $y$ |
# | $da_r = x\, dy_r$ | -8 | 8 | the rank's own weight |
# | $dx = {?}$ | | | |
#
# ($dt$ is short for $\partial L / \partial t$.) Each rank knows what its own path contributes to $dx$: $a_r\, dy_r$.
#
# **Predict.** What does each rank find for $dx$ if it looks at its own path only, and what is the right $dx$? (Check it: $L$ as a
# function of $x$ alone is $\frac12 (x a_0 b_0 + x a_1 b_1)^2 = 2x^2$.)

# %% predict="3.a"
predict("3.a", rank_0=-12, rank_1=20, right=8)

# %% [markdown]
# Let autograd do it, on two real ranks, with nothing but `dist.all_reduce` in the middle. (PyTorch warns that `allreduce_` has no
# autograd kernel and that this "may lead to silently incorrect behavior". We silence the warning, and look at the behavior.)


# %%
def two_layers_without_operators(x, a, b):
    warnings.filterwarnings("ignore", message=".*autograd kernel was not registered.*")
    rank = dist.get_rank()
    x, a, b = (t.clone().to(device()).requires_grad_() for t in (x, a[rank], b[rank]))
    y = x * a
    z = y * b
    dist.all_reduce(z)
    (z * z / 2).backward()
    return torch.stack([z.detach(), a.grad, b.grad, x.grad])  # [4]


x, a, b = torch.tensor(2.0), torch.tensor([3.0, 5.0]), torch.tensor([1.0, -1.0])
results = launch(two_layers_without_operators, 2, args=(x, a, b))
viz.matrices({f"rank {rank}": numbers for rank, numbers in enumerate(results)}, headings=["z", "da", "db", "dx"])

# %% [markdown]
# The output is right. The gradients of the weights are right. Only $dx$ is wrong, and on each rank in another way: the layers *below*
# would be trained with two different gradients. Nothing else shows it.
#
# ## The two rules
#
# **A tensor that goes to every rank collects a gradient from every rank.** $x$ is used twice, once on each rank, and the chain rule adds
# over all uses: $dx = a_0\, dy_0 + a_1\, dy_1 = -12 + 20 = 8$. Within one process autograd does this sum for you. Across ranks it takes an
# all-reduce. So at the place where $x$ enters we put an operator that does nothing forward and adds up backward. It is called **f**.
#
# **A sum passes its gradient on unchanged.** $z = z_0 + z_1$ gives $dz_0 = dz_1 = dz$. Every rank has $z$, computes the same loss from it, and
# so has $dz$ already. Nothing needs to be sent. So the operator at this place adds up forward and does nothing backward. It is called **g**.
#
# ```
#     x ── f ──  y_r = x·a_r  ──  z_r = y_r·b_r  ── g ──  z        forward:  all-reduce in g
#                                                                  backward: all-reduce in f
# ```
#
# Why does g not all-reduce the gradient too? Because all ranks share *one* loss. $dz$ is the gradient of that loss, and each rank holds it whole. Adding
# the `p` copies would count one loss `p` times. PyTorch's general-purpose differentiable all-reduce (`torch.distributed.nn.functional.all_reduce`)
# does add them: it answers another question, in which each rank has a loss of its own and the sum of all is wanted. Both are right, each for its own question.
#
# The same reasoning gives the other pair, for a replicated tensor $x$ `[.., h]` that is cut along its last dimension and put together again (`..` stands
# for any number of dimensions):
#
# - **scatter** keeps this rank's part `[.., h/p]`. Backward, each rank holds the gradient of its own part only, and $dx$ `[.., h]` must be whole on
#   every rank: all-gather.
# - **gather** all-gathers the parts to the whole `[.., h]`. Backward, every rank holds the whole gradient, and its own part needs only its own
#   slice of it: nothing is sent.
#
# In a network scatter stands before a row split whose input is replicated, gather behind a column split whose output is wanted whole. Below scatter every
# rank computes the same replicated layers. To train them alike, every rank needs the whole of $dx$.
#
# | operator | forward: in → out | forward traffic | backward: in → out | backward traffic |
# |---|---|---|---|---|
# | f | replicated → the same | none | partial → replicated | all-reduce |
# | g | partial → replicated | all-reduce | replicated → the same | none |
# | scatter | replicated → sharded | none | sharded → replicated | all-gather |
# | gather | sharded → replicated | all-gather | replicated → sharded | none |
#
# Read the table by rows in pairs: f backward is g forward, g backward is f forward, and so for scatter and gather. Two such operators are called
# **conjugate**. It is no accident: each operator is a linear map, and the backward of a linear map is its transpose. For $p = 2$, f makes one number into
# two copies, and its transpose adds two numbers:
#
# $$\begin{bmatrix} x \\ x \end{bmatrix} = \begin{bmatrix} 1 \\ 1 \end{bmatrix} x \qquad\qquad
# dx = \begin{bmatrix} 1 & 1 \end{bmatrix} \begin{bmatrix} dx_0 \\ dx_1 \end{bmatrix} = dx_0 + dx_1$$
#
# ($dx_r$ is what rank $r$ contributes. A replicated tensor counts once here, however many ranks hold it.) Cutting and putting together are each other's
# transpose as well.
#
# Turn the knobs. Every move runs the operator on real ranks (the course's own, from `tplab.tensor.mappings`). What differs from rank to rank is full of
# $10^{rank}$, so each digit tells which rank it came from; what is replicated is 1, 2, 3, 4. `dy` is the upstream gradient, that of the output. For each operator: which of `y` and `dx` needed another rank's numbers?

# %% tags=["explore"]
OPERATORS = {
    "f": mappings.copy_to_region,
    "g": mappings.reduce_from_region,
    "scatter": mappings.scatter_to_region,
    "gather": mappings.gather_from_region,
}


def forward_and_backward(name):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    replicated = torch.arange(1.0, 5.0, device=device())  # [4], the same on every rank
    different = torch.full((4 if name in "fg" else 4 // world_size,), 10.0**rank, device=device())  # [4] or [4/p]
    x, dy = (replicated, different) if name in ("f", "scatter") else (different, replicated)
    x.requires_grad_()
    y = OPERATORS[name](x)
    y.backward(dy)
    return {"x": x.detach(), "y": y.detach(), "dy": dy, "dx": x.grad}


def on_ranks(operator, p):
    results = launch(forward_and_backward, p, args=(operator,))
    return viz.matrices({f"rank {rank}: {name}": t for rank in range(p) for name, t in results[rank].items()})


viz.explore(on_ranks, operator=list(OPERATORS), p=(2, 4))

# %% [markdown]
# ## An operator with a backward of its own
#
# `torch.autograd.Function` lets you say yourself what happens backward. An example that is none of the four: forward the identity, backward a change of sign. (Through `ctx`, the context, forward can leave something for backward. None of the operators here has to.)


# %%
class TurnRound(Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)  # a new tensor object over the same memory; autograd is not looking inside forward

    @staticmethod
    def backward(ctx, grad_output):  # dL/d(output), as large as the output
        return -grad_output  # dL/d(input), as large as the input


x = torch.tensor([1.0, 2.0], requires_grad=True)
TurnRound.apply(x).sum().backward()
x.grad

# %% [markdown]
# Two rules of good manners, and the checks insist on them:
#
# - **Never write into a tensor you were given.** It belongs to the caller, and autograd may have saved it for another gradient. `dist.all_reduce` writes
#   into its argument, so hand it a copy: `x.clone(memory_format=torch.contiguous_format)`. The price is memory for one more tensor of that size.
# - **Hand a collective contiguous memory.** Gradients often are not: the gradient of `.sum()` is a single number pretending to be a matrix. The copy
#   above is contiguous; where you don't copy, call `.contiguous()`. (The checks stop a tensor with gaps or overlaps in memory, such as a slice or an
#   expanded one. For an all-reduce any copy without gaps will do if all ranks lay it out alike; `contiguous_format` is the safe habit. For an all-gather
#   make the tensor contiguous.)

# %% [markdown] task="3.1" title="f: copy forward, add backward" difficulty=2 minutes=10
# f stands where a replicated tensor enters the **region** in which every rank computes its own share: between f and g in the picture above. Hence the name
# `CopyToRegion`. In forward, `return x` is right too: autograd then makes the new tensor object that `x.view_as(x)` makes openly. The check gives every rank a different upstream gradient and looks at outputs, gradients and traffic, in both directions, on 1, 2 and 4 ranks.


# %% exercise="3.1"
class CopyToRegion(Function):
    """f: x [..] replicated -> the same."""

    @staticmethod
    def forward(ctx, x):
        """Return x unchanged [..]. No communication."""
        ### BEGIN SOLUTION
        return x.view_as(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad_output):
        """grad_output [..], this rank's term of the gradient -> dx [..], the sum over all ranks."""
        ### BEGIN SOLUTION
        dx = grad_output.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(dx)
        return dx
        ### END SOLUTION


# %% [markdown] hints="3.1"
# 1. Forward is the example above without the minus sign. Backward: which collective adds over the ranks, and what must it not write into?
# 2. Make a contiguous copy of `grad_output`, all-reduce the copy, return the copy. `dist.all_reduce` itself returns `None`.
# 3. `dx = grad_output.clone(memory_format=torch.contiguous_format)`, then `dist.all_reduce(dx)`, then `return dx`.

# %% check="3.1"
check("3.1", CopyToRegion)

# %% [markdown] task="3.2" title="g: add forward, copy backward" difficulty=2 minutes=8
# g stands where the region ends in partial sums. It is the mirror image of f.


# %% exercise="3.2"
class ReduceFromRegion(Function):
    """g: x [..] partial -> y = the sum over all ranks, replicated."""

    @staticmethod
    def forward(ctx, x):
        """x [..], this rank's term -> y [..], the sum over all ranks."""
        ### BEGIN SOLUTION
        y = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y)
        return y
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad_output):
        """grad_output [..], the same on every rank -> dx [..]. No communication."""
        ### BEGIN SOLUTION
        return grad_output
        ### END SOLUTION


# %% [markdown] hints="3.2"
# 1. You have written both halves already, in f. Which goes where?
# 2. The forward pass may not write into `x` either. Somebody may need it for a gradient: see "Break it" below.
# 3. Forward: `y = x.clone(memory_format=torch.contiguous_format)`, `dist.all_reduce(y)`, `return y`. Backward: `return grad_output`.

# %% check="3.2"
check("3.2", ReduceFromRegion)

# %% [markdown] task="3.3" title="scatter: cut forward, gather backward" difficulty=3 minutes=12
# scatter cuts the **last** dimension. `shard(x, dim, rank, world_size)` and `unshard(shards, dim)` of chapter 02 are imported. A size that can't be
# divided is refused: `shard` does that for you.


# %% exercise="3.3"
class ScatterToRegion(Function):
    """scatter: x [.., h] replicated -> this rank's part [.., h/p]."""

    @staticmethod
    def forward(ctx, x):
        """x [.., h] -> this rank's part [.., h/p] of the last dimension. No communication."""
        ### BEGIN SOLUTION
        return shard(x, -1, dist.get_rank(), dist.get_world_size())
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad_output):
        """grad_output [.., h/p], the gradient of this rank's part -> dx [.., h], whole, the same on every rank."""
        ### BEGIN SOLUTION
        mine = grad_output.contiguous()
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]  # p of [.., h/p]
        dist.all_gather(parts, mine)
        return unshard(parts, -1)  # [.., h]
        ### END SOLUTION


# %% [markdown] hints="3.3"
# 1. Forward is `shard` along dimension -1. Backward: this rank holds `h/p` columns of the gradient. Who holds the others?
# 2. `dist.all_gather(parts, mine)` fills a list of `p` tensors in rank order, and `mine` must be contiguous. `unshard(parts, -1)` puts them together.
# 3. `mine = grad_output.contiguous()`, `parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]`, `dist.all_gather(parts, mine)`,
#    `return unshard(parts, -1)`.

# %% check="3.3"
check("3.3", ScatterToRegion)

# %% [markdown] task="3.4" title="gather: gather forward, cut backward" difficulty=3 minutes=8
# gather is the mirror image of scatter.


# %% exercise="3.4"
class GatherFromRegion(Function):
    """gather: x [.., h/p], this rank's part -> y [.., h], whole, replicated."""

    @staticmethod
    def forward(ctx, x):
        """x [.., h/p] -> y [.., h]: the parts of all ranks along the last dimension, in rank order."""
        ### BEGIN SOLUTION
        mine = x.contiguous()
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]  # p of [.., h/p]
        dist.all_gather(parts, mine)
        return unshard(parts, -1)  # [.., h]
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad_output):
        """grad_output [.., h], the same on every rank -> dx [.., h/p], this rank's part of it. No communication."""
        ### BEGIN SOLUTION
        return shard(grad_output, -1, dist.get_rank(), dist.get_world_size())
        ### END SOLUTION


# %% [markdown] hints="3.4"
# 1. As with f and g: you have both halves, in scatter.
# 2. Backward: every rank holds the whole gradient. Which columns of it belong to the part that this rank put in?
# 3. Forward: contiguous, `dist.all_gather`, `unshard(parts, -1)`. Backward: `shard(grad_output, -1, dist.get_rank(), dist.get_world_size())`.

# %% check="3.4"
check("3.4", GatherFromRegion)

# %% [markdown]
# ## Your operators in the network
#
# The example from the beginning, now with your f where $x$ enters and your g where the terms are added:


# %%
def two_layers(x, a, b):
    rank = dist.get_rank()
    x, a, b = (t.clone().to(device()).requires_grad_() for t in (x, a[rank], b[rank]))
    y = CopyToRegion.apply(x) * a
    z = ReduceFromRegion.apply(y * b)
    (z * z / 2).backward()
    return torch.stack([z.detach(), a.grad, b.grad, x.grad])  # [4]


x, a, b = torch.tensor(2.0), torch.tensor([3.0, 5.0]), torch.tensor([1.0, -1.0])
results = launch(two_layers, 2, args=(x, a, b))
viz.matrices({f"rank {rank}": numbers for rank, numbers in enumerate(results)}, headings=["z", "da", "db", "dx"])

# %% [markdown]
# $dx = 8$ on both ranks. When did each rank compute, and when was it in an all-reduce? One forward, one backward:

# %%
viz.timeline(results)

# %% [markdown]
# ## Two ways to test such an operator
#
# **gradcheck** compares the gradient with finite differences: it nudges each input by a little and watches the output. It works on ranks if all of them
# nudge the same number at the same time, so it can test the whole way from a replicated input to a replicated output. It can't test f alone: forward, f is
# the identity, and finite differences see no more than that. The numbers are float64: the nudge is a millionth, and in float32 the difference of two
# outputs would be mostly rounding error.


# %%
def finite_differences():
    generator = torch.Generator().manual_seed(dist.get_rank())
    a = torch.randn(3, 4, dtype=torch.float64, generator=generator).to(device())  # this rank's columns
    b = torch.randn(4, 2, dtype=torch.float64, generator=generator).to(device())  # this rank's rows
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3)  # the same on every rank
    x = x.to(device()).requires_grad_()

    def network(x):
        return ReduceFromRegion.apply(torch.tanh(CopyToRegion.apply(x) @ a) @ b)

    return {
        "from f to g": torch.autograd.gradcheck(network, (x,), raise_exception=False),
        "f alone": torch.autograd.gradcheck(CopyToRegion.apply, (x,), raise_exception=False),
    }


launch(finite_differences, 2)[0]

# %% [markdown]
# **The adjoint identity** tests one operator alone. A linear map $M$ and its transpose satisfy, for all $x$ and $dy$,
#
# $$\langle dy,\, M x \rangle = \langle M^T dy,\, x \rangle$$
#
# where $\langle u, v \rangle$ is the sum of the products of all entries. Forward gives $Mx$, backward turns the upstream gradient $dy$ into $M^T dy$. With
# random $x$ and $dy$, two numbers have to agree. What takes care is the counting: a tensor that differs from rank to rank (sharded or partial) counts on
# every rank, a replicated one counts once.


# %%
def inner_products(operator, x, dy):
    rank = dist.get_rank()
    x, dy = x[rank].to(device()).requires_grad_(), dy[rank].to(device())
    y = operator.apply(x)  # M x
    y.backward(dy)  # x.grad is now M^T dy
    return (dy * y.detach()).sum(), (x.grad * x.detach()).sum()


def replicated(*shape):
    return [torch.randn(*shape, dtype=torch.float64)] * 2  # the same on both ranks


def different(*shape):
    return [torch.randn(*shape, dtype=torch.float64) for _ in range(2)]  # each rank has its own


cases = {
    "f": (CopyToRegion, replicated(3, 8), different(3, 8)),
    "g": (ReduceFromRegion, different(3, 8), replicated(3, 8)),
    "scatter": (ScatterToRegion, replicated(3, 8), different(3, 4)),
    "gather": (GatherFromRegion, different(3, 4), replicated(3, 8)),
}
rows = []
for name, (operator, x, dy) in cases.items():
    outputs, inputs = zip(*launch(inner_products, 2, args=(operator, x, dy)), strict=True)
    left = outputs[0] if dy[0] is dy[1] else sum(outputs)  # <dy, M x>
    right = inputs[0] if x[0] is x[1] else sum(inputs)  # <M^T dy, x>
    rows.append({"operator": name, "⟨dy, Mx⟩": f"{left:.6f}", "⟨Mᵀdy, x⟩": f"{right:.6f}"})
viz.table(rows)

# %% [markdown]
# ## Break it
#
# **First.** An operator g that does without the copy: it lets `dist.all_reduce` write into its input. (Megatron-Core 0.16.1 does so with contiguous
# tensors.) Below it stands `exp`, whose derivative is its own output, so autograd keeps that output for the backward pass. It is 1 on rank 0 and 2 on rank 1.
#
# **Predict.** $z = 1 + 2 = 3$ is right on both ranks. The gradient of $z$ with respect to each rank's $w$ should be $e^w$: 1 and 2. What do the ranks get?

# %% predict="3.b"
predict("3.b", rank_0=3, rank_1=3)


# %%
class InPlaceReduce(Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x)  # writes into x
        return x

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output


def exp_then_reduce(reduce):
    w = torch.tensor([1.0, 2.0], device=device()).log()[dist.get_rank()].requires_grad_()
    z = reduce.apply(w.exp())
    z.backward()
    return torch.stack([z.detach(), w.grad])  # [2]


results = launch(exp_then_reduce, 2, args=(InPlaceReduce,))
viz.matrices({f"rank {rank}": numbers for rank, numbers in enumerate(results)}, headings=["z", "dw"])

# %% [markdown]
# The output is right, the gradient is silently wrong. Autograd guards saved tensors by a version counter. An in-place operation such as `add_` raises it,
# `dist.all_reduce` doesn't:


# %%
def versions():
    x = torch.ones(1, device=device())
    seen = {"at first": x._version}
    x.add_(1)
    seen["after add_"] = x._version
    dist.all_reduce(x)
    return seen | {"after all_reduce": x._version}


launch(versions, 2)[0]

# %% [markdown]
# An author who *declares* the write with `ctx.mark_dirty` gets a loud error instead:


# %%
class DeclaredInPlaceReduce(InPlaceReduce):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        dist.all_reduce(x)
        return x


with show_failure():
    launch(exp_then_reduce, 2, args=(DeclaredInPlaceReduce,))

# %% [markdown]
# **Second.** A g that adds backward as well, as PyTorch's general-purpose one does, in the network from the beginning.
#
# **Predict.** By what factor are $da$, $db$ and $dx$ too large on 2 ranks? And by what factor would they be on 4?

# %% predict="3.c"
predict("3.c", factor_2=2, factor_4=4)


# %%
class AddBothWays(ReduceFromRegion):
    @staticmethod
    def backward(ctx, grad_output):
        return ReduceFromRegion.apply(grad_output)


def two_layers_adding_both_ways(x, a, b):
    rank = dist.get_rank()
    x, a, b = (t.clone().to(device()).requires_grad_() for t in (x, a[rank], b[rank]))
    z = AddBothWays.apply(CopyToRegion.apply(x) * a * b)
    (z * z / 2).backward()
    return torch.stack([z.detach(), a.grad, b.grad, x.grad])  # [4]


x, a, b = torch.tensor(2.0), torch.tensor([3.0, 5.0, 1.0, 2.0]), torch.tensor([1.0, -1.0, 2.0, 1.0])
rows = []
for p in (2, 4):  # the first p of the weights
    for name, program in (("your g", two_layers), ("adding both ways", two_layers_adding_both_ways)):
        numbers = launch(program, p, args=(x, a[:p], b[:p]))[0].tolist()
        rows.append({"p": p, "operator": name} | dict(zip(("z", "da₀", "db₀", "dx"), numbers, strict=True)))
viz.table(rows)

# %% [markdown]
# The output is right, and all gradients are `p` times too large. A second such operator further up would multiply by `p` again. Adam divides constant
# factors out, so even the loss curve may look healthy. Compare gradients, not losses.
#
# **Third.** The carelessness of the first program, in f's backward. The most innocent loss is `.sum()`, and its gradient is a tensor of ones. Look at how it is stored:

# %%
seen = {}
y = torch.zeros(2, 3, requires_grad=True) * 1  # [2, 3]
y.register_hook(lambda gradient: seen.update(gradient=gradient))
y.sum().backward()
gradient = seen["gradient"]
{
    "shape": list(gradient.shape),
    "strides": gradient.stride(),
    "bytes in memory": gradient.untyped_storage().nbytes(),
    "bytes that an all-reduce writes": gradient.numel() * gradient.element_size(),
}

# %% [markdown]
# Strides of 0: all six entries are the *same* four bytes. This is an **expanded** tensor. An in-place all-reduce writes 24 bytes where there are 4, over
# whatever lies behind them. With gloo, PyTorch 2.13 doesn't refuse it: the process dies, now or later. The runtime of this course looks before it lets you:


# %%
class InPlaceCopy(Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        dist.all_reduce(grad_output)  # writes into the gradient
        return grad_output


def innocent_loss():
    x = torch.zeros(2, 3, device=device(), requires_grad=True)  # [2, 3]
    InPlaceCopy.apply(x).sum().backward()


with show_failure():
    launch(innocent_loss, 2)

# %%
symptoms(3)

# %% [markdown]
# ## Measure it
#
# **Predict.** On 4 ranks each of the four operators is run once, forward and backward, in float32. The whole tensor `[b, s, h]` (batch, sequence, hidden
# size) is `[2, 16, 64]`; gather is given its parts. How many collectives does each rank enter in all? And how many bytes has the **message** of one of them: the tensor that is added up, or all gathered parts together?

# %% predict="3.d"
predict("3.d", collectives=4, bytes=8192)

# %% [markdown]
# Count them. `launch` records all collectives of a run; `with record() as section:` notes those that this rank enters inside the block, here forward and backward apart.


# %%
def traffic_of(operator, b, s, h):
    x = torch.randn(b, s, h, device=device(), requires_grad=True)
    with record() as forward:
        y = operator.apply(x)
    with record() as backward:
        y.backward(torch.randn_like(y))
    return [", ".join(f"{c.kind} {c.bytes}" for c in section) or "nothing" for section in (forward, backward)]


b, s, h = 2, 16, 64
rows = []
for p in (2, 4):
    for name, operator, width in (
        ("f", CopyToRegion, h),
        ("g", ReduceFromRegion, h),
        ("scatter", ScatterToRegion, h),
        ("gather", GatherFromRegion, h // p),
    ):
        forward, backward = launch(traffic_of, p, args=(operator, b, s, width))[0]
        formula = 4 * b * s * h
        rows.append({"operator": name, "p": p, "forward": forward, "backward": backward, "4·b·s·h": formula})
viz.table(rows)

# %% [markdown]
# Each operator costs one collective on the whole `[b, s, h]`, in one direction, and nothing in the other. In a ring, each rank sends $2\frac{p-1}{p}$ times
# that message for an all-reduce, $\frac{p-1}{p}$ times for an all-gather. So a pair f, g around two layers costs two all-reduces per training step; chapter 05
# builds a whole MLP on just that.
#
# ## In the wild
#
# - **Megatron-Core**, `megatron/core/tensor_parallel/mappings.py`: `_CopyToModelParallelRegion` (f), `_ReduceFromModelParallelRegion` (g),
#   `_ScatterToModelParallelRegion`, `_GatherFromModelParallelRegion`, behind functions such as `copy_to_tensor_model_parallel_region`. The names f and g are those of
#   the paper (Shoeybi et al., *Megatron-LM*, 2019, section 3). The same file holds the versions for sequence parallelism, which chapter 12 builds.
# - Its helper `_reduce` long called `all_reduce(input_.contiguous())` and then returned `input_`: right for contiguous tensors, *unreduced* for all others
#   (Megatron-LM issue 5337). Your check tries such tensors.
# - People ask why f and g are what they are: Megatron-LM issues 19, 559 and 726. You can answer them now.
# - **PyTorch DTensor** has no f and g by name. g is `redistribute` from `Partial()` to `Replicate()`; f is a `Replicate()` DTensor whose `to_local` is told that the
#   gradient will be partial: `to_local(grad_placements=[Partial()])`. The autograd function underneath is `Redistribute` in
#   `torch/distributed/tensor/_redistribute.py`.
# - **This course** keeps them in `tplab/tensor/mappings.py` as `copy_to_region`, `reduce_from_region`, `scatter_to_region` and `gather_from_region`. They take a process `group`,
#   and there the backward of each *is* its partner, so that one can differentiate twice.
#
# g by DTensor, on real ranks: one all-reduce forward, none backward.


# %%
def g_by_dtensor():
    from torch.distributed.tensor import DTensor, Partial, Replicate, init_device_mesh

    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    x = torch.tensor([1.0 + dist.get_rank()], device=device(), requires_grad=True)  # 1 on rank 0, 2 on rank 1
    with record() as forward:
        y = DTensor.from_local(x, mesh, [Partial()]).redistribute(mesh, [Replicate()]).to_local()
    with record() as backward:
        (5 * y).backward()
    return {"y": y.item(), "dx": x.grad.item(), "forward": forward.totals(), "backward": backward.totals()}


launch(g_by_dtensor, 2)[0]

# %% [markdown]
# ## Recap
#
# - A replicated tensor that enters a spread-out computation collects gradients from all ranks: f, identity forward, all-reduce backward.
# - Partial sums are added once, forward; the gradient is replicated already: g, all-reduce forward, identity backward.
# - scatter and gather are the same for sharded tensors, with all-gather. In each pair, one's backward is the other's forward.
# - Traffic: one collective of $b \cdot s \cdot h$ numbers per operator, in one direction only.
# - Next: f, a column split and g, a row split become layers with weights, biases and an initialisation: `ColumnParallelLinear` and `RowParallelLinear`.

# %% [markdown]
# ## Your library so far
#
# Four operators have joined it. They're short, but every layer that you write from here on talks to the other ranks through them.

# %%
from tplab.course import library

library(3)
