# %% [markdown]
# # 05 · The parallel MLP
#
# In each layer of a GPT, two thirds of the weights belong to the MLP. So if you can split the MLP over your GPUs without much communication, most of the work is done. In this chapter, you'll design such a split yourself. Then you'll train a model with it on real text, on two and on four processes, and compare its loss with that of plain PyTorch, digit by digit.
#
# You need chapters 03 and 04. About 75 minutes.

# %% tags=["setup"]
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tplab import device, launch, record, viz
from tplab.common import corpus
from tplab.course import check, predict, symptoms
from tplab.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_region,
    full_state_dict,
    gather_from_region,
    load_full_state_dict,
    reduce_from_region,
    scatter_to_region,
)

# %% [markdown]
# ## A puzzle
#
# An MLP without biases is two matmuls with a nonlinearity between them, $Y = \mathrm{GELU}(XA)\,B$. Here $A$ is `[h, m]` and $B$ is `[m, h]`, where $h$ is the model's hidden size and $m$ is usually $4h$. Every rank holds a shard of $A$ and a shard of $B$. You also have the four operators from chapter 03:
#
# | operator | forward | backward |
# |---|---|---|
# | f, `copy_to_region(x)` | nothing | all-reduce of the gradient |
# | g, `reduce_from_region(x)` | all-reduce | nothing |
# | `scatter_to_region(x)` | keeps this rank's slice of the last dimension | all-gather of the gradient |
# | `gather_from_region(x)` | all-gather along the last dimension | keeps this rank's slice of the gradient |
#
# You decide how $A$ and $B$ are split, and where the operators stand. Many designs give the right result. But only one of them sends the fewest bytes, and you're about to find it.

# %% [markdown] task="5.1" title="Split an MLP with the least traffic" difficulty=3 minutes=15
# Every rank gets all of $X$ and returns all of $Y$. In the backward pass, every rank needs the gradient of all of $X$, and the gradients of its own two shards.
#
# - `mlp_splits` returns two words, one for $A$ and one for $B$. Each of them is "column" or "row".
# - `sharded_mlp` gets the shards that you've asked for. Place as many operators in it as you need, and no more.
#
# The check looks at the output, at all gradients, and at the bytes in both directions. A good way to start is to get any design to work, and then to look for messages that you can leave out.


# %% exercise="5.1"
def mlp_splits() -> tuple[str, str]:
    """Return how A and B are split, as "column" or "row" each."""
    ### BEGIN SOLUTION
    return "column", "row"
    ### END SOLUTION


def sharded_mlp(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """x [.., h], the same on every rank, and this rank's shards of A [h, m] and B [m, h] -> GELU(X A) B [.., h], on every rank."""
    ### BEGIN SOLUTION
    x = copy_to_region(x)  # [.., h]; backward: all-reduce of dx
    z = F.gelu(x @ a)  # [.., m/p], some columns of GELU(X A)
    return reduce_from_region(z @ b)  # [.., h]
    ### END SOLUTION


# %% [markdown] hints="5.1"
# 1. Start with $A$, and look at what each rank has before the GELU. With a column split, it has some columns of $XA$. With a row split, it has one term of every sum. To which of the two can it apply GELU without any communication?
# 2. If each rank has some columns of $\mathrm{GELU}(XA)$, which rows of $B$ do they meet? So how would you split $B$, to avoid any message in the middle? After that, only the two ends are left. What's missing from $Y$ there, and what's missing from the gradient of $X$?
# 3. Split $A$ by columns and $B$ by rows. Then it's `x = copy_to_region(x)`, `z = F.gelu(x @ a)` and `return reduce_from_region(z @ b)`.

# %% check="5.1"
check("5.1", mlp_splits, sharded_mlp)

# %% [markdown]
# You've just rediscovered the central idea of Megatron-LM (Shoeybi et al. 2019). A column split leaves each rank with complete columns of $XA$. GELU works on each element separately, so each rank can apply it to its own columns. And these columns happen to be exactly what a row split of $B$ needs:
#
# $$X \;\xrightarrow{\;f\;}\; [\,X A_0,\; X A_1\,] \;\xrightarrow{\text{GELU}}\; [\,Z_0,\; Z_1\,] \;\longrightarrow\; Z_0 B_0 + Z_1 B_1 \;\xrightarrow{\;g\;}\; Y$$
#
# In the picture, you can watch the two layers of chapter 04 lose everything that stands between them. (It leaves out the GELU, which sends nothing.)
#
# ![A column-parallel and a row-parallel layer, first apart, with a gather and a scatter between them, and then pushed together. What's left is one all-reduce forward and one backward.](pictures/joined.svg)
#
# How much does that save? Let's compare it with a more obvious design. In this design, the column-parallel layer gathers its output, and the row-parallel layer scatters it again, so both layers look like ordinary ones from the outside.
#
# **Predict.** Let $m = 4h$, and say that $x$ has $n$ elements. How many collectives does the obvious design run in the forward and backward pass together? And how many elements do all their messages have in total, as a multiple of $n$? (As always, the message of an all-gather is the full, gathered tensor.)

# %% predict="5.a"
predict("5.a", collectives=4, times_n=10)

# %% [markdown]
# Here's every way to combine two parallel layers, with an input of 1,024 bytes and $m = 4h$. Try a few of them. Does `p` change anything?

# %%
LAYERS = {
    "column, gathered": lambda i, o: ColumnParallelLinear(i, o, gather_output=True, device=device()),
    "column": lambda i, o: ColumnParallelLinear(i, o, device=device()),
    "row, scattered": lambda i, o: RowParallelLinear(i, o, input_is_parallel=False, device=device()),
    "row": lambda i, o: RowParallelLinear(i, o, device=device()),
}
KINDS = [
    "column → row",
    "column, gathered → row, scattered",
    "row, scattered → column, gathered",
    "row, scattered → row, scattered",
    "column, gathered → column, gathered",
]


def two_layers(first, second):
    x = torch.randn(2, 8, 16, device=device(), requires_grad=True)  # 1,024 bytes
    out = LAYERS[second](64, 16)(F.gelu(LAYERS[first](16, 64)(x)))
    out.sum().backward()


# %% tags=["explore"]
def show_combination(kind, p):
    results = launch(two_layers, p, args=tuple(kind.split(" → ")))
    return viz.traffic(results, title=f"{kind}, p = {p}", scale=2 * 4096)


viz.explore(show_combination, kind=KINDS, p=(2, 4))


# %%
def cost(kind):
    totals = launch(two_layers, 4, args=tuple(kind.split(" → "))).record.totals().values()
    return {
        "layers": kind,
        "collectives": sum(total.calls for total in totals),
        "bytes": sum(total.bytes for total in totals),
    }


viz.table([cost(kind) for kind in KINDS], title="forward and backward, p = 4")

# %% [markdown]
# What does that mean for a real model? GPT-3 has 96 layers with $h = 12288$, and it's trained on sequences of 2,048 tokens in 16-bit precision. So for *each sequence*, the messages of its MLPs alone have $96 \cdot 2 \cdot 2048 \cdot 12288 \cdot 2$ bytes, which is almost 10 GB, and the ranks have to wait for every one of them. With the obvious design, it would be 48 GB. That's why tensor-parallel ranks usually share a single machine, where the fastest links are.

# %% [markdown] task="5.2" title="ParallelMLP" difficulty=1 minutes=7
# Turn your design into a module that's made of two layers from chapter 04. Call them `self.up` and `self.down`. Use the exact GELU, `F.gelu`.
#
# `bias`, `group`, `device` and `dtype` are meant for both layers. If `ffn_hidden_size`, which is $m$, is None, it's `4 * hidden_size`.


# %% exercise="5.2"
class ParallelMLP(nn.Module):
    """Y = GELU(X A + a) B + c, sharded over the ranks of `group`: x [.., h], the same on every rank -> y [.., h], the same on every rank."""

    def __init__(self, hidden_size, ffn_hidden_size=None, *, bias=True, group=None, device=None, dtype=None):
        super().__init__()
        ### BEGIN SOLUTION
        ffn_hidden_size = ffn_hidden_size or 4 * hidden_size
        options = {"bias": bias, "group": group, "device": device, "dtype": dtype}
        self.up = ColumnParallelLinear(hidden_size, ffn_hidden_size, **options)  # weight [m/p, h]
        self.down = RowParallelLinear(ffn_hidden_size, hidden_size, **options)  # weight [h, m/p]
        ### END SOLUTION

    def forward(self, x):
        ### BEGIN SOLUTION
        x = self.up(x)  # [..., m/p]
        x = F.gelu(x)  # [..., m/p]
        return self.down(x)  # [..., h]
        ### END SOLUTION


# %% [markdown] hints="5.2"
# 1. Which of the two layers should leave its output split, and which should take a split input? What are their defaults?
# 2. It's a column-parallel layer from `h` to `m` that doesn't gather, then GELU, and then a row-parallel layer from `m` to `h` whose input is already parallel. f and g are inside the layers, so you don't have to call any operator.
# 3. `self.up = ColumnParallelLinear(hidden_size, ffn_hidden_size, bias=bias, group=group, device=device, dtype=dtype)`, `self.down = RowParallelLinear(ffn_hidden_size, hidden_size, ...)`, and `return self.down(F.gelu(self.up(x)))`.

# %% check="5.2"
check("5.2", ParallelMLP)

# %% [markdown]
# ## Train it
#
# Now for the real thing. Your machine already has plenty of text, namely the source code of Python's standard library. The model below reads 8 bytes and predicts the next one. Each byte becomes a vector of 16 numbers, eight of them make a vector with $h = 128$, your MLP works on it, and a final layer scores the 256 possible bytes. Everything
# but the MLP is replicated.

# %%
CONTEXT, HIDDEN, FFN, BATCH, STEPS = 8, 128, 512, 128, 300
text = corpus.python_sources(300_000)


class PlainMLP(nn.Module):
    """The same MLP without any parallelism, to compare with."""

    def __init__(self, hidden_size, ffn_hidden_size, **options):
        super().__init__()
        self.up = nn.Linear(hidden_size, ffn_hidden_size, **options)
        self.down = nn.Linear(ffn_hidden_size, hidden_size, **options)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class ByteModel(nn.Module):
    def __init__(self, mlp_class):
        super().__init__()
        options = {"device": device(), "dtype": torch.float64}
        self.embedding = nn.Embedding(corpus.VOCABULARY, HIDDEN // CONTEXT, **options)
        self.mlp = mlp_class(HIDDEN, FFN, **options)
        self.norm = nn.LayerNorm(HIDDEN, **options)
        self.head = nn.Linear(HIDDEN, corpus.VOCABULARY, **options)

    def forward(self, context):  # [b, 8] bytes
        x = self.embedding(context).flatten(1)  # [b, h]
        x = x + self.mlp(x)  # [b, h]
        return self.head(self.norm(x))  # [b, 256]


# %% [markdown]
# Look closely at the training loop. It doesn't mention ranks or groups, and it doesn't all-reduce any gradients. All the communication happens inside your MLP.


# %%
def train(model, steps=STEPS, after_step=lambda: None):
    """Train on the same batches on every rank, and return the loss of every step."""
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    losses = []
    for inputs, targets in corpus.byte_batches(text, CONTEXT, BATCH, steps, seed=1):
        loss = F.cross_entropy(model(inputs.to(device())), targets[:, -1].to(device()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after_step()
    return losses


@torch.no_grad()
def complete(model, prompt, length=24):
    """Continue the prompt, always with the byte that has the highest score."""
    written = bytearray(b"\n" * CONTEXT + prompt.encode())
    for _ in range(length):
        context = torch.tensor([list(written[-CONTEXT:])], device=device())  # [1, 8]
        written.append(model(context).argmax(-1).item())
    return written[CONTEXT:].decode(errors="replace")


PROMPTS = ["    def __in", "        return self.", "    raise ValueErr", "import "]

# %% [markdown]
# First comes plain PyTorch, in a single process. We keep its first weights, because all the other runs start from them.

# %%
torch.manual_seed(0)
plain = ByteModel(PlainMLP)
start = {name: value.cpu().clone() for name, value in plain.state_dict().items()}
plain_losses = train(plain)
print(f"loss {plain_losses[0]:.3f} -> {plain_losses[-1]:.3f}")
for prompt in PROMPTS:
    print(repr(complete(plain, prompt)))

# %% [markdown]
# A model that guesses among 256 bytes has a loss of $\ln 256 = 5.55$. After 300 steps, this one writes something that looks remarkably like Python.
#
# **Predict.** Now the same with your `ParallelMLP` on two ranks. How many all-reduces does a training step need, for the MLP *and* for the gradients of all parameters? And how many bytes do they have together? (There are $128$ examples with $h = 128$, in float64.)

# %% predict="5.b"
predict("5.b", all_reduces=2, bytes=262144)


# %%
def train_on_ranks(mlp_class, steps=STEPS):
    model = ByteModel(mlp_class)
    load_full_state_dict(model, start)  # each rank takes its shards
    losses = train(model, steps)
    weights = sum(param.numel() for param in model.mlp.parameters())
    return {"losses": losses, "weights": weights, "completions": [complete(model, prompt) for prompt in PROMPTS]}


def furthest(losses):
    """Return the largest difference from plain PyTorch's loss in any step."""
    return max(abs(mine - theirs) for mine, theirs in zip(losses, plain_losses[: len(losses)], strict=True))


runs = {p: launch(train_on_ranks, p, args=(ParallelMLP, steps)) for p, steps in ((2, STEPS), (4, STEPS // 3))}
viz.curves(
    {"plain PyTorch": plain_losses}
    | {f"your ParallelMLP, p = {p}": results[0]["losses"] for p, results in runs.items()},
    title="three training runs, one on top of the other",
)

# %% [markdown]
# Do you see three curves, or just one? Here's how equal they are. (With four ranks on a laptop's cores, training is slow, so that run stops after 100 steps.)

# %%
viz.table(
    [
        {
            "your MLP": f"p = {p}",
            "steps": len(results[0]["losses"]),
            "its final loss": f"{results[0]['losses'][-1]:.6f}",
            "plain PyTorch's": f"{plain_losses[len(results[0]['losses']) - 1]:.6f}",
            "largest difference in any step": f"{furthest(results[0]['losses']):.0e}",
            "MLP weights per rank": f"{results[0]['weights']:,}",
        }
        for p, results in runs.items()
    ]
)

# %%
viz.table(
    [
        {"rank 1 of 2 writes": repr(mine), "just as plain PyTorch does": mine == complete(plain, prompt)}
        for mine, prompt in zip(runs[2][1]["completions"], PROMPTS, strict=True)
    ]
)

# %% [markdown]
# **This is tensor parallelism.** No rank could have computed a single output on its own, and yet they all agree with plain PyTorch to the last few digits. (These digits differ because the ranks add up the same numbers in a different order, and floating-point addition isn't associative.) Everything that comes later in this course is the same idea, in more places.
#
# ## What keeps the replicas equal?
#
# But there's something odd about this training loop. Each rank has its own copy of the embedding and updates it with its own gradient, and nothing ever compares these copies. In data parallelism, you'd all-reduce these gradients. Here, the copies stay equal anyway. They start out equal, every rank sees the same batch, and f hands the *full* gradient to everything that comes
# before the MLP. So every rank makes the same update.
#
# But nothing in the loop checks that. If you forget an f somewhere, the copies drift apart, and you don't get an error. So let's build a detector.
#
# `dist.all_reduce` can also take the largest or the smallest over the ranks instead of the sum, with `op=dist.ReduceOp.MAX` or `MIN`. But there's a trap. When training goes wrong, you often get a **NaN** ("not a number"), which differs from every number, even from itself. Here's what several kinds of "maximum" make of a zero on rank 0 and a NaN on rank 1:


# %%
def maximum_over_ranks():
    found = []
    for place in (0, -1):
        value = torch.zeros(12, device=device())
        if dist.get_rank() == 1:
            value[place] = torch.nan
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        found.append(value[place].item())
    return {"MAX over the ranks, first element": found[0], "MAX over the ranks, last element": found[1]}


launch(maximum_over_ranks, 2)[0] | {
    "max(0.0, nan)": max(0.0, torch.nan),
    "torch.tensor([0.0, nan]).max()": torch.tensor([0.0, torch.nan]).max().item(),
}

# %% [markdown]
# So a MAX or a MIN may swallow a NaN, and so may Python's `max`. An infinity, on the other hand, survives all of them.

# %% [markdown] task="5.3" title="A detector for drifting replicas" difficulty=3 minutes=15
# Find the largest difference between any two ranks, in any element of any replicated parameter. Return it as a float that's the same on every rank. If a copy contains a NaN, on one rank or on all of them, return `nan` or `inf`.
#
# A parameter with the attribute `tensor_parallel` is a shard. It's *supposed* to differ, so skip it, and don't send it. And don't change any parameter.


# %% exercise="5.3"
def replica_drift(module, group=None):
    """Return how far apart the ranks' copies of the replicated parameters are, as a float: 0.0 if they're equal, nan or inf if there's a NaN."""
    ### BEGIN SOLUTION
    drifts = [0.0]
    for param in module.parameters():
        if hasattr(param, "tensor_parallel"):
            continue
        largest = torch.where(param.isnan(), torch.inf, param.detach())  # MAX and MIN may swallow a NaN, not an inf
        smallest = largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
        drifts.append((largest - smallest).max().item())  # inf for one NaN, inf - inf = nan where all ranks have one
    return torch.tensor(drifts, dtype=torch.float64).max().item()  # torch's max keeps a nan, Python's may not
    ### END SOLUTION


# %% [markdown] hints="5.3"
# 1. For a single element, the ranks have `p` numbers. The largest difference between any two of them is the largest number minus the smallest. `dist.all_reduce` works in place, so what should you give it?
# 2. For each parameter without `tensor_parallel`, all-reduce a detached copy with `MAX` and another one with `MIN`, and take `(largest - smallest).max().item()`. In the end, return the largest of these. What could you write into the copies where there's a NaN?
# 3. `torch.where(param.isnan(), torch.inf, param.detach())` is a copy with an infinity for every NaN. If one rank has a NaN, the difference is `inf`, and if all of them have one, it's `inf - inf`, which is `nan`. Collect the differences in a list that starts as `[0.0]`, and return `torch.tensor(differences, dtype=torch.float64).max().item()`.

# %% check="5.3"
check("5.3", replica_drift)

# %% [markdown]
# ## Break it: leave out f
#
# f is a single line of code, and you can't see its effect in the forward pass. Before you run the cell, what do you think the loss curves will look like?


# %%
class WithoutF(ParallelMLP):
    def forward(self, x):
        x = F.linear(x, self.up.weight, self.up.bias)  # the column-parallel layer, without its copy_to_region
        return self.down(F.gelu(x))


def train_and_watch(mlp_class):
    model = ByteModel(mlp_class)
    load_full_state_dict(model, start)
    drift = []
    losses = train(model, steps=100, after_step=lambda: drift.append(replica_drift(model)))
    return {"losses": losses, "drift": drift}


broken = launch(train_and_watch, 2, args=(WithoutF,))
viz.curves(
    {"plain PyTorch": plain_losses[:100]}
    | {f"without f, rank {rank}": results["losses"] for rank, results in enumerate(broken)},
    title="f is missing, and the model learns anyway",
)

# %%
viz.curves({"replica drift": broken[0]["drift"]}, title="what the loss doesn't show")

# %% [markdown]
# The first loss is right to the last digit, because f does nothing in the forward pass. After that, each rank's embedding learns from the gradient through its own columns only. It does learn, but there are two different models now, and neither of them is the one you wanted. On a dashboard with one loss curve, you'd never know. Your detector knows after one step.
#
# ## Repair it: a gated MLP
#
# Most models since Llama use a gated MLP, called **SwiGLU**:
#
# $$Y = \big(\mathrm{SiLU}(X G) \odot X U\big)\,D \qquad \mathrm{SiLU}(u) = u \cdot \mathrm{sigmoid}(u)$$
#
# The *gate* $XG$ and the *up* projection $XU$ are multiplied element by element. Both read the same $X$, so they're usually stored as one fused weight `[gate; up]`, which takes one matmul and one f instead of two. This is where an inference engine called xLLM went wrong (pull request 1616 repaired it). Here's the same mistake in our own layers:


# %%
class AsShipped(nn.Module):
    def __init__(self, hidden_size, ffn_hidden_size, **options):
        super().__init__()
        self.up = ColumnParallelLinear(hidden_size, 2 * ffn_hidden_size, **options)
        self.down = RowParallelLinear(ffn_hidden_size, hidden_size, **options)

    def forward(self, x):
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


torch.manual_seed(0)
fused = nn.Linear(HIDDEN, 2 * FFN).double().state_dict()  # [gate; up]
gated_start = start | {f"mlp.up.{name}": value for name, value in fused.items()}


def train_gated(mlp_class, steps=100):
    model = ByteModel(mlp_class)
    load_full_state_dict(model, gated_start)
    return {"losses": train(model, steps), "checkpoint": full_state_dict(model)}


def loss_of(mlp_class, state):
    model = ByteModel(mlp_class)
    load_full_state_dict(model, state)
    inputs, targets = next(corpus.byte_batches(text, CONTEXT, 2000, 1, seed=2))
    with torch.no_grad():
        return F.cross_entropy(model(inputs.to(device())), targets[:, -1].to(device())).item()


def symptom(mlp_class):
    losses = {}
    for p in (1, 2):
        results = launch(train_gated, p, args=(mlp_class,))[0]
        losses |= {f"first loss, p = {p}": results["losses"][0], f"step 100, p = {p}": results["losses"][-1]}
    reloaded = launch(loss_of, 1, args=(mlp_class, results["checkpoint"]))[0]
    return losses | {"checkpoint from p = 2, on p = 1": reloaded}


viz.table([{name: f"{loss:.4f}" for name, loss in symptom(AsShipped).items()}], title="losses, as shipped")

# %% [markdown]
# It runs on any number of ranks, and it *trains* on any number of ranks. But the first loss depends on `p`, and a checkpoint from two ranks is useless on one.

# %% [markdown] task="5.4" title="Repair a gated MLP" difficulty=2 minutes=8
# Find out which elements the broken version multiplies with each other on two ranks, and repair it. It should still have one fused layer `self.up` whose full weight is `[gate; up]`, and just as much traffic as your `ParallelMLP`.


# %% exercise="5.4"
class ParallelSwiGLU(nn.Module):
    """Y = (SiLU(X G) * (X U)) D, with a bias after each matmul, sharded over the ranks of `group`.

    x [.., h], the same on every rank -> y [.., h], the same on every rank. The full weight of `up` is [gate; up], [2m, h].
    """

    def __init__(self, hidden_size, ffn_hidden_size, *, bias=True, group=None, device=None, dtype=None):
        super().__init__()
        ### BEGIN SOLUTION
        options = {"bias": bias, "group": group, "device": device, "dtype": dtype}
        self.up = ColumnParallelLinear(hidden_size, 2 * ffn_hidden_size, stride=2, **options)  # weight [2m/p, h]
        self.down = RowParallelLinear(ffn_hidden_size, hidden_size, **options)  # weight [h, m/p]
        ### BROKEN
        # options = {"bias": bias, "group": group, "device": device, "dtype": dtype}
        # self.up = ColumnParallelLinear(hidden_size, 2 * ffn_hidden_size, **options)
        # self.down = RowParallelLinear(ffn_hidden_size, hidden_size, **options)
        ### END SOLUTION

    def forward(self, x):
        ### BEGIN SOLUTION
        gate, value = self.up(x).chunk(2, dim=-1)  # [..., m/p] each
        return self.down(F.silu(gate) * value)  # [..., h]
        ### BROKEN
        # gate, value = self.up(x).chunk(2, dim=-1)
        # return self.down(F.silu(gate) * value)
        ### END SOLUTION


# %% [markdown] hints="5.4"
# 1. Take $m = 4$ and two ranks, so that the fused weight has eight rows, 0 to 3 for the gate and 4 to 7 for up. Which four rows does rank 0 get? What are the two halves of its output?
# 2. `chunk(2, dim=-1)` is right if a rank's shard consists of its rows of the gate, followed by its rows of up. You've met an argument in chapter 04 that's made for this.
# 3. `ColumnParallelLinear(hidden_size, 2 * ffn_hidden_size, stride=2, **options)`. `forward` can stay as it is.

# %% check="5.4"
check("5.4", ParallelSwiGLU)

# %% [markdown]
# **Predict.** Let's look at what the bug did. Take the broken version with $m = 8$ on two ranks. The fused weight has 16 rows, and gate row 0 should meet up row 8. Which row does row 0 meet instead? And which row does row 8 meet, on the other rank?

# %% predict="5.c"
predict("5.c", row_0_meets=4, row_8_meets=12)

# %%
viz.table(
    [
        {"": mlp_class.__name__} | {name: f"{loss:.4f}" for name, loss in symptom(mlp_class).items()}
        for mlp_class in (AsShipped, ParallelSwiGLU)
    ]
)

# %% [markdown]
# With your repair, it no longer matters how many ranks there are. The broken version learned to live with its wrong pairs, because in training nobody compared them with anything.

# %%
symptoms(5)

# %% [markdown]
# ## Measure it
#
# Does a training step send what you predicted? Here's the trace of one step, next to the formula.


# %%
def one_step():
    model = ByteModel(ParallelMLP)
    inputs, targets = next(corpus.byte_batches(text, CONTEXT, BATCH, 1, seed=3))
    with record() as section:
        F.cross_entropy(model(inputs.to(device())), targets[:, -1].to(device())).backward()
    return {kind: (total.calls, total.bytes) for kind, total in section.totals().items()}


rows = []
for p in (1, 2, 4):
    calls, size = launch(one_step, p)[0].get("all_reduce", (0, 0))
    rows.append({"p": p, "all-reduces": calls, "bytes": size, "2·b·h·8": 2 * BATCH * HIDDEN * 8 if p > 1 else 0})
viz.table(rows)

# %% [markdown]
# ## In the wild
#
# <details><summary>Going deeper: the same MLP in Megatron-Core and in PyTorch</summary>
#
# - **Megatron-Core** has it in `megatron/core/transformer/mlp.py`, with `linear_fc1` (column-parallel) and `linear_fc2` (row-parallel). Both use `skip_bias_add`, so that the first bias can be added in one kernel with the activation, and the second one together with dropout and the residual. For a gated MLP, `linear_fc1` is twice as wide,
#   its weight is marked with stride 2, and `apply_swiglu_sharded_factory` saves its two blocks separately. A user asked about these pairs in issue 360.
# - **Other architectures** may be out of luck. Column first, then row, works so well because a transformer is made of pairs of large matmuls with something elementwise, or something per head, between them. Tensor parallelism in this form is tailored to transformers.
# - **PyTorch** does it with `parallelize_module(mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})`. With two separate layers for gate and up, you don't need a stride, but there are two smaller matmuls instead of one.
#
# </details>
#
# And here's PyTorch's own tensor parallelism, next to yours.


# %%
def against_dtensor(state, x):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mine = ParallelMLP(HIDDEN, FFN, device=device(), dtype=torch.float64)
    load_full_state_dict(mine, state)
    theirs = PlainMLP(HIDDEN, FFN, device=device(), dtype=torch.float64)
    theirs.load_state_dict(state)
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    parallelize_module(theirs, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    results = []
    for mlp in (mine, theirs):
        leaf = x.to(device()).requires_grad_()
        with record() as section:
            out = mlp(leaf)
            out.square().sum().backward()
        calls = {kind: total.calls for kind, total in section.totals().items()}
        results.append({"out": out.detach(), "dx": leaf.grad, "collectives": calls})
    return results


mlp_state = {name.removeprefix("mlp."): value for name, value in start.items() if name.startswith("mlp.")}
mine, theirs = launch(against_dtensor, 2, args=(mlp_state, torch.randn(4, HIDDEN, dtype=torch.float64)))[0]
differences = {name: f"{(mine[name] - theirs[name]).abs().max():.0e}" for name in ("out", "dx")}
print(f"largest differences: {differences['out']} in the output, {differences['dx']} in the input's gradient")
print(f"collectives: yours {mine['collectives']}, PyTorch's {theirs['collectives']}")

# %% [markdown]
# ## Your library so far
#
# It now contains a complete MLP, and you can run it on two processes without this notebook. The table ends with the command.

# %%
from tplab.course import library

library(5)

# %% [markdown]
# That's two thirds of a transformer layer. The other third is attention, in which every token looks at every other token. How could you possibly split *that* without constant communication?
