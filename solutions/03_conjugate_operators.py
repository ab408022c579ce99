# %% [markdown]
# # 03 · Conjugate operators
#
# You split your model across two ranks, and the loss is correct to the last digit. Then you call `backward()`, and some of the gradients are wrong. You don't even get an error, because autograd follows a tensor through *one* process and has no idea that other ranks exist.
#
# In this chapter, you'll write four small operators that give you the correct gradients. Nearly all communication in tensor parallelism happens inside these four operators. About 75 minutes.

# %% tags=["setup"]
import warnings

import torch
import torch.distributed as dist
from torch.autograd import Function

from tplab import device, launch, record, viz
from tplab.course import check, predict, show_failure, symptoms
from tplab.tensor import operators, shard, unshard

# %% [markdown]
# ## The smallest network that goes wrong
#
# Both ranks have the same input $x$, and rank $r$ multiplies it by its own weight $a_r$. Then the two results are added, and both ranks compute the loss from the sum.
#
# ![The smallest network that goes wrong. Both ranks start with the same x. Rank 0 computes a₀ · x, and rank 1 computes a₁ · x. An all-reduce adds the two terms to z, and both ranks compute the loss z²/2.](pictures/network.svg)
#
# Let $x = 2$ and $a = (3, -5)$. In the forward pass, rank 0 computes $z_0 = 6$, and rank 1 computes $z_1 = -10$. An all-reduce adds these two terms, so both ranks get $z = -4$ and compute the same loss $L = 8$.
#
# We abbreviate the gradient $\partial L/\partial t$ of any tensor $t$ as $dt$. In the backward pass, both ranks can compute $dz = z = -4$ on their own. Since $z$ is the sum of $z_0$ and $z_1$, the gradients $dz_0$ and $dz_1$ are also -4. Each rank can also compute the gradient of its own weight, $da_r = x\,dz_r = -8$. So far, everything is correct.
#
# **Predict.** Each rank only sees its own path through the network, so it computes $dx = a_r\, dz_r$. What value does each rank get for $dx$? What's the correct value of $dx$? (Here, $z = 3x - 5x = -2x$, so $L = z^2/2 = 2x^2$.)

# %% predict="3.a"
predict("3.a", rank_0=-12, rank_1=20, right=8)

# %% [markdown]
# Let's see what autograd computes on two ranks. (PyTorch would warn you that `allreduce_` has no autograd kernel, but we've silenced the warning.)


# %%
def sum_without_operators(x, a):
    warnings.filterwarnings("ignore", message=".*autograd kernel was not registered.*")
    x, a = (t.clone().to(device()).requires_grad_() for t in (x, a[dist.get_rank()]))
    z = a * x
    dist.all_reduce(z)
    (z * z / 2).backward()
    return torch.stack([z.detach(), a.grad, x.grad])  # [3]


x, a = torch.tensor(2.0), torch.tensor([3.0, -5.0])
results = launch(sum_without_operators, 2, args=(x, a))
viz.matrices(
    {f"rank {rank}": numbers for rank, numbers in enumerate(results)},
    headings=["z", "da", "dx"],
)

# %% [markdown]
# Only $dx$ is wrong, and the two ranks don't even get the same wrong value. If another layer came before this one, the ranks would now update the *same* weights with *different* gradients.
#
# ## Four operators
#
# Between $x$ and $z$, each rank computes something different. We call such a part of a network a **region**. In this chapter, tensors are always sliced along their last dimension.
#
# | operator | each rank has | each rank needs |
# |---|---|---|
# | **f**, into a region | the full tensor | the full tensor |
# | **scatter**, into a region | the full tensor | its own slice |
# | **g**, out of a region | one term of a sum | the sum |
# | **gather**, out of a region | its own slice | the full tensor |
#
# In our network, f brings $x$ into the region, and g sums the two terms to get $z$. Notice that f returns exactly the tensor it receives. So does f do anything at all?

# %% [markdown] task="3.1" title="A table of four operators" difficulty=3 minutes=12
# What should each operator do in the forward and backward passes? You can choose from `"nothing"`, `"all-reduce"` (the sum over all ranks), `"all-gather"` (the slices of all ranks, side by side), and `"my slice"`.
#
# Every rank computes the loss from the same full output. These aren't several losses, but *one* loss that every rank computes for itself. The check builds small networks with your operators and compares all gradients with those of a single process.


# %% exercise="3.1"
def operator_table() -> dict[str, tuple[str, str]]:
    """Return (forward, backward) for "f", "g", "scatter" and "gather"."""
    ### BEGIN SOLUTION
    return {
        "f": ("nothing", "all-reduce"),
        "g": ("all-reduce", "nothing"),
        "scatter": ("my slice", "all-gather"),
        "gather": ("all-gather", "my slice"),
    }
    ### END SOLUTION


# %% [markdown] hints="3.1"
# 1. The table above tells you what each operator does in the forward pass. For the backward pass, ask yourself two questions about each operator. Before the operator's backward pass, which part of the gradient does each rank have? After the operator's backward pass, which part of the gradient should each rank have?
# 2. For f, remember that every rank uses `x` and that the chain rule adds up the gradients from all of these uses. For g, we have `z = z0 + z1`. What's `dz / dz0`? Which ranks already have `dz`?
# 3. The input to scatter is a full tensor on every rank, so in the backward pass, every rank needs the full gradient. But each rank only has the gradient of its own slice. With gather, it's the other way around: every rank has the full gradient but only needs its own slice.

# %% check="3.1"
check("3.1", operator_table)

# %% [markdown]
# ![An animation of the network from above. In the forward pass, f passes x = 2 to both ranks, and g adds 6 and -10 to get -4. In the backward pass, g passes the gradient -4 to both ranks, and f adds -12 and 20 to get 8. The lower half shows the same network without f, where the two ranks end up with different gradients.](pictures/fg.svg)
#
# <details><summary>All frames, one by one</summary>
#
# ![The same animation as numbered stills](pictures/fg_frames.svg)
#
# </details>

# %% [markdown]
# Two rules explain your table.
#
# **If a tensor is used on every rank, every rank contributes to its gradient.** By the chain rule, we add the gradients from all uses of $x$ to get $dx = -12 + 20 = 8$. Within a single process, autograd does this addition for you. To sum across ranks, you need an all-reduce, and it belongs in the backward pass of f.
#
# **The gradient of a sum flows to every term of the sum unchanged.** All ranks compute the same loss from the same $z$, so each of them already has the full gradient $dz$. That's why g doesn't have to send anything in the backward pass.
#
# Now compare the rows for f and g in your table. In the backward pass, f does what g does in the forward pass, and vice versa. The same is true of scatter and gather. Two operators that mirror each other like this are called **conjugate** operators.
#
# <details><summary>Going deeper: why they come in pairs, and PyTorch's other all-reduce</summary>
#
# Each operator is a linear map, and the backward pass of a linear map applies the transposed map. For $p = 2$, f turns one number into two copies, and its transpose adds two numbers:
#
# $$\begin{bmatrix} x \\ x \end{bmatrix} = \begin{bmatrix} 1 \\ 1 \end{bmatrix} x \qquad\qquad dx = \begin{bmatrix} 1 & 1 \end{bmatrix} \begin{bmatrix} dx_0 \\ dx_1 \end{bmatrix} = dx_0 + dx_1$$
#
# Here, we treat both ranks' copies of $x$ as a single number, so the input of f has one element, and its output has two.
#
# PyTorch's general-purpose differentiable all-reduce *does* sum the gradients in the backward pass, because PyTorch assumes that each rank has a loss of its own and that you want the gradient of the sum of these losses. Our version of g assumes that all ranks share one loss. Each of the two all-reduces is correct as long as its own assumption holds. (Since PyTorch 2.13, `torch.distributed.nn.functional.all_reduce` has been deprecated in favor of the all-reduce in `torch.distributed._functional_collectives`.)
#
# </details>
#
# Now you can try out all four operators on two or four ranks. For each rank, the picture shows the input `x`, the output `y`, the gradient `dy` that enters the backward pass, and the gradient `dx` that leaves it.
#
# If the ranks have different tensors, rank 0's tensor is filled with 1s, rank 1's with 10s, rank 2's with 100s, and so on. That way, each digit of a sum such as 1111 comes from a different rank. For operators that need the same tensor on all ranks, we use [1, 2, 3, 4].
#
# Which operators return a gradient `dx` that contains values from other ranks?

# %% tags=["explore"]
OPERATORS = {
    "f": operators.copy_to_region,
    "g": operators.reduce_from_region,
    "scatter": operators.scatter_to_region,
    "gather": operators.gather_from_region,
}


def forward_and_backward(name):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    replicated = torch.arange(1.0, 5.0, device=device())  # [4], the same on every rank
    length = 4 if name in "fg" else 4 // world_size
    different = torch.full((length,), 10.0**rank, device=device())  # [4] or [4/p]
    x, dy = replicated, different
    if name in ("g", "gather"):
        x, dy = dy, x
    x.requires_grad_()
    y = OPERATORS[name](x)
    y.backward(dy)
    return {"x": x.detach(), "y": y.detach(), "dy": dy, "dx": x.grad}


def on_ranks(operator, p):
    shown = {}
    for rank, seen in enumerate(launch(forward_and_backward, p, args=(operator,))):
        shown |= {f"rank {rank}: {name}": t for name, t in seen.items()}
    return viz.matrices(shown)


viz.explore(on_ranks, operator=list(OPERATORS), p=(2, 4))

# %% [markdown]
# ## Teach autograd
#
# With `torch.autograd.Function`, you can define what happens in the backward pass. For example, this operator does nothing in the forward pass and flips the sign of the gradient in the backward pass.


# %%
class FlipGradient(Function):
    @staticmethod
    def forward(ctx, x):
        # autograd is not looking inside forward
        return x.view_as(x)  # a new tensor object over the same memory

    @staticmethod
    def backward(ctx, grad_output):  # dL/d(output), as large as the output
        return -grad_output  # dL/d(input), as large as the input


x = torch.tensor([1.0, 2.0], requires_grad=True)
FlipGradient.apply(x).sum().backward()
x.grad

# %% [markdown] task="3.2" title="f" difficulty=2 minutes=10
# Write f as a class. We call the class `CopyToRegion`, because f gives every rank its own copy of a tensor. The docstrings say what each pass should return.
#
# An all-reduce only accepts contiguous tensors, and it overwrites the tensor you pass to it. But your caller may still need `x`, and autograd may still need `grad_output`. Besides, gradients can have any memory layout. Which tensor should you pass to the collective?


# %% exercise="3.2"
class CopyToRegion(Function):
    """f: x [..], replicated -> x [..] on every rank, where it enters the region."""

    @staticmethod
    def forward(ctx, x):
        """Return y [..], the same values as x on every rank. Leave x unchanged."""
        ### BEGIN SOLUTION
        return x.view_as(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad_output):
        """Return dL/dx [..], the same on every rank. Leave grad_output [..] unchanged.

        grad_output is dL/dy along this rank's own path. It differs between ranks and
        may not be contiguous.
        """
        ### BEGIN SOLUTION
        dx = grad_output.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(dx)
        return dx
        ### END SOLUTION


# %% [markdown] hints="3.2"
# 1. The forward pass is the same as in `FlipGradient`. For the backward pass, look at your table. Which collective sums tensors across ranks? Why shouldn't you pass `grad_output` itself to this collective?
# 2. Make a contiguous copy of `grad_output`, all-reduce the copy, and return the copy. Note that `.contiguous()` doesn't copy a tensor that's already contiguous. A `.clone()` is always a copy, but the clone of a transposed tensor is also transposed. Don't return the result of `dist.all_reduce`, because that function returns `None`.
# 3. Start with `dx = grad_output.clone(memory_format=torch.contiguous_format)`, then call `dist.all_reduce(dx)`, and finally return `dx`.

# %% check="3.2"
check("3.2", CopyToRegion)

# %% [markdown]
# From now on, we'll follow two rules whenever we call a collective, and the checks enforce both rules.
#
# - **Never write into a tensor that was passed to you.** The tensor belongs to your caller, and autograd may have saved it to compute another gradient.
#
# - **Only pass contiguous tensors to a collective.** In the backward pass, a gradient can have any memory layout.

# %% [markdown] task="3.3" title="g, scatter and gather" difficulty=3 minutes=15
# Now write the other three operators. You have three forward passes and three backward passes to write. According to your table, which of these passes have you already written? Which of these passes are identical?
#
# The scatter and gather operators work along the **last** dimension. We've already imported `shard(x, dim, rank, world_size)` and `unshard(shards, dim)` from chapter 02. If the size of this dimension isn't divisible by the number of ranks, `shard` raises an error.
#
# On a single rank, all three operators are no-ops. There, each operator may return either its input or a copy, and it makes no difference whether it calls a collective.


# %% exercise="3.3"
class ReduceFromRegion(Function):
    """g: x [..], partial -> y [..], the sum over all ranks."""

    @staticmethod
    def forward(ctx, x):
        """Return the sum [..] of the ranks' x [..]."""
        ### BEGIN SOLUTION
        # or CopyToRegion.backward(ctx, x), which does the same
        y = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y)
        return y
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad_output):
        """Return dx [..] from grad_output [..], which is the same on every rank."""
        ### BEGIN SOLUTION
        return grad_output
        ### END SOLUTION


class ScatterToRegion(Function):
    """scatter: x [.., h], replicated -> this rank's slice [.., h/p]."""

    @staticmethod
    def forward(ctx, x):
        """Return this rank's slice [.., h/p] of x [.., h]."""
        ### BEGIN SOLUTION
        return shard(x, -1, dist.get_rank(), dist.get_world_size())
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad_output):
        """Return dx [.., h] from grad_output [.., h/p].

        grad_output is the gradient of this rank's slice.
        """
        ### BEGIN SOLUTION
        mine = grad_output.contiguous()
        # p of [.., h/p]
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        return unshard(parts, -1)  # [.., h]
        ### END SOLUTION


class GatherFromRegion(Function):
    """gather: this rank's slice x [.., h/p] -> y [.., h], replicated."""

    @staticmethod
    def forward(ctx, x):
        """Return all ranks' slices x [.., h/p] side by side, in rank order: [.., h]."""
        ### BEGIN SOLUTION
        return ScatterToRegion.backward(ctx, x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad_output):
        """Return dx [.., h/p] from grad_output [.., h], the same on every rank."""
        ### BEGIN SOLUTION
        return ScatterToRegion.forward(ctx, grad_output)
        ### END SOLUTION


# %% [markdown] hints="3.3"
# 1. If you swap the forward and backward passes of f, you get g. If you swap the forward and backward passes of scatter, you get gather. So scatter is the only operator you have to write from scratch.
# 2. Since `forward` and `backward` are ordinary static methods, one class can call another class's methods. In the backward pass of scatter, each rank only has the gradient of its own slice. You can collect the gradients of all slices with
#    `dist.all_gather(parts, mine)`. Here, `parts` is a list of `p` tensors to fill, and `mine` must be contiguous.
# 3. The forward pass of g can simply return `CopyToRegion.backward(ctx, x)`. The forward pass of scatter is `shard(x, -1, dist.get_rank(), dist.get_world_size())`. Its backward pass is
#    `mine = grad_output.contiguous()`, then `parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]`, `dist.all_gather(parts, mine)`, and `return unshard(parts, -1)`.

# %% check="3.3"
check("3.3", ReduceFromRegion, ScatterToRegion, GatherFromRegion)

# %% [markdown]
# ## Back to the smallest network
#
# Let's return to our small network. This time, we apply f to $x$ and compute the sum $z$ with g.


# %%
def sum_with_operators(x, a):
    x, a = (t.clone().to(device()).requires_grad_() for t in (x, a[dist.get_rank()]))
    z = ReduceFromRegion.apply(a * CopyToRegion.apply(x))
    (z * z / 2).backward()
    return torch.stack([z.detach(), a.grad, x.grad])  # [3]


x, a = torch.tensor(2.0), torch.tensor([3.0, -5.0])
results = launch(sum_with_operators, 2, args=(x, a))
viz.matrices(
    {f"rank {rank}": numbers for rank, numbers in enumerate(results)},
    headings=["z", "da", "dx"],
)

# %% [markdown]
# Now $dx$ is 8 on both ranks. The timeline shows when each rank was computing and when it was in an all-reduce. There's one all-reduce in the forward pass and one in the backward pass.

# %%
viz.timeline(results)

# %% [markdown]
# How could you test an operator like f if you didn't have our checks? Finite differences wouldn't help, because they only look at the forward pass, where f simply returns its input. But each operator is a linear map $M$, and its backward pass should be the transpose of this map. If that's true, the following equation holds for all $x$ and $dy$:
#
# $$\langle dy,\, M x \rangle = \langle M^T dy,\, x \rangle$$
#
# Here, $\langle u, v \rangle$ is the sum of the elementwise products of $u$ and $v$. So you can test an operator by drawing random tensors $x$ and $dy$ and comparing the two inner products. Just make sure to count every element exactly once. If the ranks hold different tensors, you have to sum the inner products across ranks. But if all ranks hold the same tensor, a single rank's inner product is already the final result.


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
    # each rank has its own
    return [torch.randn(*shape, dtype=torch.float64) for _ in range(2)]


cases = {
    "f": (CopyToRegion, replicated(3, 8), different(3, 8)),
    "g": (ReduceFromRegion, different(3, 8), replicated(3, 8)),
    "scatter": (ScatterToRegion, replicated(3, 8), different(3, 4)),
    "gather": (GatherFromRegion, different(3, 4), replicated(3, 8)),
}
rows = []
for name, (operator, x, dy) in cases.items():
    products = launch(inner_products, 2, args=(operator, x, dy))
    outputs, inputs = zip(*products, strict=True)
    left = outputs[0] if dy[0] is dy[1] else sum(outputs)  # <dy, M x>
    right = inputs[0] if x[0] is x[1] else sum(inputs)  # <M^T dy, x>
    row = {"operator": name, "⟨dy, Mx⟩": f"{left:.6f}", "⟨Mᵀdy, x⟩": f"{right:.6f}"}
    rows.append(row)
viz.table(rows)

# %% [markdown]
# ## Fix it: a router whose copies drift apart
#
# All four operators pass this test. But even correct operators give you wrong gradients if you put them in the wrong places.
#
# In a mixture-of-experts layer, a small weight called the router decides how much each expert contributes. In torchtitan, PyTorch's library for training large models, every rank had a copy of this router weight, and the copies started to differ right after the first training step (issue 2387, fixed in pull request 2416). Our version of this layer is small enough to work out by hand. Let $w$ be the replicated weight, and let $a_r$ be the weight that only rank $r$ has. The layer also adds its input to its output, as nearly every layer of a transformer does. This is called a **residual connection**.
#
# $$z = x + \sum_r \tanh(a_r\, w\, x)$$
#
# Here's an implementation that starts with f, so that "everything after it is in the region". We run it on two ranks with $x = 1$, $w = 2$, and $a = (3, -5)$. To keep the numbers whole, `squash` can be either `torch.tanh` or a function that does nothing.


# %%
def as_shipped(x, w, a, squash=torch.tanh):
    x = CopyToRegion.apply(x)
    return x + ReduceFromRegion.apply(squash(a * w * x))


def in_one_process(x, w, a, squash=torch.tanh):
    return x + squash(a * w * x).sum()


def numbers_of(block, x, w, a):
    x, w, a = (t.clone().to(device()).requires_grad_() for t in (x, w, a))
    z = block(x, w, a, squash=lambda t: t)
    (z * z / 2).sum().backward()
    return torch.stack([z.detach().sum(), w.grad, x.grad])  # [3]


def numbers_on_ranks(block, x, w, a):
    return numbers_of(block, x, w, a[dist.get_rank()])


x, w, a = torch.tensor(1.0), torch.tensor(2.0), torch.tensor([3.0, -5.0])
results = launch(numbers_on_ranks, 2, args=(as_shipped, x, w, a))
shipped = {f"rank {rank}": numbers for rank, numbers in enumerate(results)}
viz.matrices(
    shipped | {"a single process": numbers_of(in_one_process, x, w, a)},
    headings=["z", "dw", "dx"],
    compare=dict.fromkeys(shipped, "a single process"),
)

# %% [markdown]
# The output $z$ is correct, and so is the loss. But the two ranks get different values of $dw$, so after one step, their copies of $w$ differ. And both ranks get the same wrong value of $dx$. Only one line is to blame for both symptoms.

# %% [markdown] task="3.4" title="Fix a residual block" difficulty=3 minutes=12
# Decide where the region begins and where it ends. The output and the gradients of $x$, $w$ and $a_r$ should be the same as in a single process, with only one all-reduce in each pass. The check counts them.
#
# Before you write any code, go through all the tensors in the formula, including intermediate results such as $w\,x$. Which of these tensors does every rank use in the same way? Which of them does each rank use in its own way?


# %% exercise="3.4"
def residual_block(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """On every rank, return x [.., h] plus the sum over all ranks of tanh(a * w * x).

    x [.., h] and w [h] are the same on every rank, and a [h] is a weight that only this
    rank has.
    """
    ### BEGIN SOLUTION
    # from here on, each rank does something different
    y = CopyToRegion.apply(w * x)  # [.., h]
    return x + ReduceFromRegion.apply(torch.tanh(a * y))  # [.., h]
    ### BROKEN
    # x = CopyToRegion.apply(x)
    # return x + ReduceFromRegion.apply(torch.tanh(a * w * x))
    ### END SOLUTION


# %% [markdown] hints="3.4"
# 1. The backward pass of f sums the gradients of all ranks. So a tensor that's used before f gets the summed gradient, and a tensor that's used after f gets only this rank's share of its gradient. In the broken version, does `w` come before f or after f? How many ranks add the gradient of the residual connection to that sum?
# 2. The tensor that enters the region should be the last one that's still the same on every rank. That isn't `x`. And the residual connection goes around the region, so it needs the `x` that hasn't gone through f.
# 3. Call f on the product, `y = CopyToRegion.apply(w * x)`, and return `x + ReduceFromRegion.apply(torch.tanh(a * y))`.

# %% check="3.4"
check("3.4", residual_block)

# %% [markdown]
# This is the rule behind your repair. **A region begins right before the first operation that differs between ranks, and it ends right after the last one.** A replicated weight that's used inside a region gets only one rank's contribution to its gradient. And if a residual connection starts inside a region, every rank adds the gradient of that connection, so it's counted once per rank instead of once.
#
# ## Break it
#
# Your operators also follow the two rules from above: they never write into a tensor that was passed to them, and they only pass contiguous tensors to a collective. What happens if you break these rules? For years, Megatron-LM summed tensors across ranks with a helper like this one (Megatron-LM issue 5337):


# %%
def sum_as_shipped(x):
    dist.all_reduce(x.contiguous())
    return x


# %% [markdown]
# **Predict.** Suppose rank 0 passes a 2 × 2 matrix of ones to this helper, and rank 1 passes a 2 × 2 matrix of twos. On rank 0, the helper *returns* a matrix whose four elements are all the same. What value does the returned matrix contain if both inputs are contiguous? What value does the returned matrix contain if both inputs are transposed? If both inputs are contiguous, what value does rank 0's *own* matrix contain after the call?

# %% predict="3.b"
predict("3.b", contiguous=3, transposed=1, own_afterwards=3)


# %%
def try_the_helper():
    ones_or_twos = torch.full((2, 2), 1.0 + dist.get_rank(), device=device())
    seen = {}
    layouts = {"contiguous": ones_or_twos.clone(), "transposed": ones_or_twos.T}
    for layout, x in layouts.items():
        seen[f"{layout}: returned"] = sum_as_shipped(x).clone()
        seen[f"{layout}: x afterwards"] = x
    return seen


viz.matrices(launch(try_the_helper, 2)[0])

# %% [markdown]
# So this helper has *two* bugs, and the memory layout of `x` determines which bug you run into. The backward pass of your `CopyToRegion` has neither of them, because it copies its argument into new, contiguous memory, all-reduces the copy, and returns the copy.
#
# Most tensors are contiguous, so Megatron's helper usually returns the correct sum. That's how the two bugs went unnoticed for years. But is it really so bad to write into somebody else's tensor? In the next cell, a version of g overwrites its input, which is the output of `w.exp()`. Since the derivative of `exp` is `exp` itself, autograd saves this output for the backward pass. The output is 1 on rank 0 and 2 on rank 1.
#
# **Predict.** The sum is 3 on both ranks. The correct gradient with respect to $w$ is $e^w$, which is 1 on rank 0 and 2 on rank 1. What gradient does each rank actually get?

# %% predict="3.c"
predict("3.c", rank_0=3, rank_1=3)


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
    logarithms = torch.tensor([1.0, 2.0], device=device()).log()
    w = logarithms[dist.get_rank()].requires_grad_()
    z = reduce.apply(w.exp())
    z.backward()
    return torch.stack([z.detach(), w.grad])  # [2]


results = launch(exp_then_reduce, 2, args=(InPlaceReduce,))
viz.matrices(
    {f"rank {rank}": numbers for rank, numbers in enumerate(results)},
    headings=["z", "dw"],
)

# %% [markdown]
# The output is correct, but the gradient is silently wrong. Normally, autograd notices when a saved tensor has been overwritten, because every in-place operation increments the tensor's version counter. But `dist.all_reduce` doesn't increment this counter. (If you call
# `ctx.mark_dirty(x)` in such an operator, you at least get an error.)
#
# Next, let's replace g with a version that sums the gradients in the backward pass as well. A real model has many layers, so let's stack two copies of our small network. The output $z$ of the first network becomes the input $x$ of the second network. Each network contains one f and one modified g.
#
# **Predict.** With 2 ranks, how many times too large is the first network's $dx$? With 4 ranks, how many times too large is the first network's $dx$?

# %% predict="3.d"
predict("3.d", factor_2=4, factor_4=16)


# %%
class AddBothWays(ReduceFromRegion):
    @staticmethod
    def backward(ctx, grad_output):
        return ReduceFromRegion.apply(grad_output)


def twice_in_a_row(x, a, g):
    x, a = x.clone().to(device()).requires_grad_(), a[dist.get_rank()].to(device())
    z = g.apply(a * CopyToRegion.apply(x))
    z = g.apply(a * CopyToRegion.apply(z))
    (z * z / 2).backward()
    return {"z": z.item(), "dx": x.grad.item()}


x, a = torch.tensor(2.0), torch.tensor([3.0, -5.0, 2.0, 2.0])
rows = []
for p in (2, 4):  # the first p of the weights
    for name, g in (("your g", ReduceFromRegion), ("sums in both passes", AddBothWays)):
        numbers = launch(twice_in_a_row, p, args=(x, a[:p], g))[0]
        rows.append({"p": p, "operator": name} | numbers)
viz.table(rows)

# %% [markdown]
# Each modified g multiplies the gradient by `p`, so two of these operators multiply the gradient by `p²`. But Adam cancels out constant factors in the gradients, so the loss curve may still look healthy. That's why you should compare gradients, not losses.
#
# Finally, even a harmless loss like `.sum()` can cause trouble. The gradient of this loss is simply a tensor of ones. How is this tensor stored?

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
# The strides are 0, so all six elements share the *same* four bytes. We call this an **expanded** tensor. An in-place all-reduce would write 24 bytes into a buffer of only 4 bytes and overwrite whatever comes after it in memory. With gloo, PyTorch 2.13 raises no error, but your process will crash sooner or later. In this course, tplab checks for expanded tensors and raises an error.


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
# As in chapter 01, an all-reduce's **message** is the tensor it sums, and an all-gather's message consists of all the slices it collects.
#
# **Predict.** Suppose you run each of your four operators once on 4 ranks, forward and backward, in float32. The full tensor has the shape `[b, s, h] = [2, 16, 64]`. On each rank, the input of gather is one slice of the full tensor. How many collectives does each rank call? How large is each collective's message, in bytes?

# %% predict="3.e"
predict("3.e", collectives=4, bytes=8192)


# %%
def traffic_of(operator, b, s, h):
    x = torch.randn(b, s, h, device=device(), requires_grad=True)
    with record() as forward:
        y = operator.apply(x)
    with record() as backward:
        y.backward(torch.randn_like(y))
    return [
        ", ".join(f"{c.kind} {c.bytes}" for c in section) or "nothing"
        for section in (forward, backward)
    ]


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
        row = {"operator": name, "p": p, "forward": forward, "backward": backward}
        rows.append(row | {"4·b·s·h": 4 * b * s * h})
viz.table(rows)

# %% [markdown]
# Each operator calls one collective on the full `[b, s, h]` tensor, in either its forward or its backward pass. In the other pass, the operator sends nothing. Does that mean all four operators take the same time? No. The ring all-reduce from chapter 01 is a reduce-scatter followed by an all-gather, so it takes about twice as long as an all-gather for a message of the same size.
#
# ## In the wild
#
# <details><summary>Going deeper: f and g in Megatron-Core and in PyTorch</summary>
#
# - **Megatron-Core** defines these operators in `megatron/core/tensor_parallel/mappings.py` under names like `_CopyToModelParallelRegion` and `_ReduceFromModelParallelRegion`. The names f and g come from the paper (Shoeybi et al., *Megatron-LM*, 2019, section 3). People keep asking
#   why f and g are defined the way they are (Megatron-LM issues 19, 559, and 726). Now you know the answer.
#
# - **DTensor** doesn't use the names f and g, but it has equivalents of both operators. The equivalent of g is a redistribution from `Partial()` to `Replicate()`. The equivalent of f is a call to `to_local(grad_placements=[Partial()])` on a replicated DTensor, which tells DTensor that the gradient will be partial.
#
# - **tplab** defines the four operators in `tplab/tensor/operators.py`. The backward pass of each operator calls the conjugate operator, so you can even compute second derivatives. Each operator takes a process `group` as an argument, so you can see which ranks take part. (Megatron keeps its groups in a global module
#   called `parallel_state`, formerly `mpu`.)
#
# </details>
#
# The next cell runs DTensor's version of g on two ranks. Just like your g, DTensor's version calls one all-reduce in the forward pass and sends nothing in the backward pass.


# %%
def g_by_dtensor():
    from torch.distributed.tensor import DTensor, Partial, Replicate, init_device_mesh

    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    # 1 on rank 0, 2 on rank 1
    x = torch.tensor([1.0 + dist.get_rank()], device=device(), requires_grad=True)
    with record() as forward:
        partial = DTensor.from_local(x, mesh, [Partial()])
        y = partial.redistribute(mesh, [Replicate()]).to_local()
    with record() as backward:
        (5 * y).backward()
    numbers = {"y": y.item(), "dx": x.grad.item()}
    return numbers | {"forward": forward.totals(), "backward": backward.totals()}


launch(g_by_dtensor, 2)[0]

# %% [markdown]
# ## Your library so far
#
# Your library now contains four more operators. These operators are short, but every layer you write from now on will use them to communicate.

# %%
from tplab.course import library

library(3)

# %% [markdown]
# You can now move tensors into and out of a region. In chapter 04, you'll write the layers that do the work inside a region. A real linear layer also has a bias. If each of `p` ranks holds one term of a sum, which rank should add the bias?
