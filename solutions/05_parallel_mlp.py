# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 05 · The parallel MLP
#
# **The question.** The MLP of a transformer is two linear layers with a nonlinearity between them. How do you split it over `p` ranks so that the two layers together need a single all-reduce on the way forward?
#
# **What you will have built.** `ParallelMLP`, its gated variant SwiGLU, a formula for its traffic, and a tool that finds replicas that have drifted apart. At the end you train your MLP on real data, on one, two and four processes,
# and lay the loss curves over the one of plain single-process PyTorch.
#
# $$X \;\xrightarrow{\;f\;}\; [\,X A_0,\; X A_1\,] \;\xrightarrow{\text{GELU}}\; [\,Z_0,\; Z_1\,] \;\longrightarrow\; Z_0 B_0 + Z_1 B_1 \;\xrightarrow{\;g\;}\; Y$$
#
# Symbols: `b` batch, `s` sequence length, `h` hidden size, `m` the inner size of the MLP (usually `4h`), `p` number of ranks. **f** (nothing forward, all-reduce backward) and **g** (all-reduce forward, nothing backward) are the operators of
# chapter 03; the two parallel layers are those of chapter 04. About 75 minutes.

# %% tags=["setup"]
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tplab import device, launch, record, viz
from tplab.common import corpus
from tplab.course import check, predict, symptoms
from tplab.tensor import ColumnParallelLinear, RowParallelLinear, full_state_dict, load_full_state_dict

# %% [markdown]
# The two products of the MLP, with what each rank holds. What the first one leaves on a rank is just what the second one needs there.

# %%
viz.product((4, 8), (8, 16), kind="column", p=2, title="first product: X A, with A cut by columns")

# %%
viz.product(
    (4, 16),
    (16, 8),
    kind="row",
    p=2,
    names=("Z", "B"),
    title="second product: Z B, with Z = GELU(X A) and B cut by rows",
)

# %% [markdown]
# ## 1 · What stands between two layers
#
# The plain MLP takes `[b, s, h]` to `[b, s, m]`, applies GELU to each number, and comes back to `[b, s, h]`:
#
# $$Y = \mathrm{GELU}(X A + a)\,B + c \qquad A: [h, m],\quad B: [m, h]$$
#
# Chapter 04 gave two ways to split each of the two products. Suppose the first layer is row-parallel. Each rank then holds one term of the sum that makes `XA`, and GELU does not commute with a sum: $\mathrm{GELU}(u + v) \ne \mathrm{GELU}(u) + \mathrm{GELU}(v)$. The ranks have to add
# up *before* GELU. Suppose instead that the first layer is column-parallel. Each rank then has some whole columns of `XA`, and GELU works on each number by itself, so each rank applies it to its own columns and needs nobody.
#
# What it has then, `[b, s, m/p]`, is exactly what a row-parallel layer with `input_is_parallel=True` wants. No communication stands between the two layers.

# %% [markdown]
# ## 2 · Count before you build
#
# There is a naive way that always works: make each parallel layer look like an `nn.Linear` from the outside, with `gather_output=True` on the first and `input_is_parallel=False` on the second. Then the tensor between them is whole on every rank, and any code fits in between.
#
# **Predict.** With `m = 4h`: how many collectives run in the naive MLP, forward and backward together, and how many in the one without anything in between? And how many times `b·s·h` numbers do all messages of the naive MLP hold together? (An all-gather counts as the gathered tensor, `b·s·m`.)

# %% predict="5.a"
predict("5.a", naive_calls=4, calls=2, naive_volume=10)

# %% [markdown]
# Where the naive ones come from:
#
# | step | forward | backward |
# |---|---|---|
# | **f** at the input of the column layer | | all-reduce `b·s·h` |
# | gather its output | all-gather `b·s·m` | (takes its slice) |
# | scatter before the row layer | (takes its slice) | all-gather `b·s·m` |
# | **g** at the output of the row layer | all-reduce `b·s·h` | |
#
# Now look at real ranks. Each picture is the record of one forward and backward pass with `b=2, s=8, h=16, m=64` in float32: a message of `b·s·h` numbers has 1024 bytes, one of `b·s·m` has 4096. Move the control from one combination of
# layers to the next: which one is cheapest, and does `p` change anything?

# %%
LAYERS = {
    "column, gathered": lambda i, o: ColumnParallelLinear(i, o, gather_output=True, device=device()),
    "column": lambda i, o: ColumnParallelLinear(i, o, device=device()),
    "row, scattered": lambda i, o: RowParallelLinear(i, o, input_is_parallel=False, device=device()),
    "row": lambda i, o: RowParallelLinear(i, o, device=device()),
}


def two_layers(first, second):
    """One forward and backward pass of first, GELU, second; the input is replicated."""
    x = torch.randn(2, 8, 16, device=device(), requires_grad=True)
    out = LAYERS[second](64, 16)(F.gelu(LAYERS[first](16, 64)(x)))
    out.sum().backward()


# %% tags=["explore"]
def show_combination(p, kind):
    first, second = kind.split(" → ")
    results = launch(two_layers, p, args=(first, second))
    return viz.traffic(results, title=f"{kind}, p = {p}", scale=2 * 4096)  # bytes: one scale for all of them


KINDS = [
    "column → row",
    "column, gathered → row, scattered",
    "row, scattered → column, gathered",
    "row, scattered → row, scattered",
    "column, gathered → column, gathered",
]
viz.explore(show_combination, p=(2, 4), kind=KINDS)

# %% [markdown]
# All of them in one table, counted on one rank:


# %%
def cost(kind):
    """Collectives and bytes of one rank, forward and backward together."""
    row = {"layers": kind}
    for p in (2, 4):
        totals = launch(two_layers, p, args=tuple(kind.split(" → "))).record.totals().values()
        row[f"calls, p = {p}"] = sum(total.calls for total in totals)
        row[f"bytes, p = {p}"] = sum(total.bytes for total in totals)
    return row


viz.table([cost(kind) for kind in KINDS])

# %% [markdown]
# The first one, by far: 2 collectives of 1024 bytes. The naive one has four and ten times 1024 bytes, as you predicted, and whatever begins with a row layer or ends with a column layer has to make the tensor in the middle whole on every rank as well. And `p` changes nothing, neither calls nor bytes.


# %% [markdown] task="5.1" title="ParallelMLP" difficulty=2 minutes=15
# Build it from the two layers of chapter 04, imported from `tplab.tensor.linear` in the setup cell. Their signatures are those you wrote, and their weights come from a master weight.
#
# - Call the layers `self.up` and `self.down`. Use exact GELU, `F.gelu`.
# - `bias`, `group`, `device` and `dtype` are for both layers.
# - `ffn_hidden_size` is `m`; when it is `None`, it is `4 * hidden_size`.


# %% exercise="5.1"
class ParallelMLP(nn.Module):
    """Y = GELU(X A + a) B + c, with A cut by columns and B by rows over the ranks of `group`.

    in:  x, replicated    [..., h]
    out: y, replicated    [..., h]
    One all-reduce of the input's size forward, one backward.
    """

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


# %% [markdown] hints="5.1"
# 1. Which of the two layers can leave its output split? Which one can take a split input? Write down the shape of the tensor between them.
# 2. First a column-parallel layer from `h` to `m` that does not gather, then GELU, then a row-parallel layer from `m` to `h` whose input is already parallel. Both are the defaults.
# 3. `self.up = ColumnParallelLinear(hidden_size, ffn_hidden_size, bias=bias, group=group, device=device, dtype=dtype)`, `self.down = RowParallelLinear(ffn_hidden_size, hidden_size, ...)`, and `return self.down(F.gelu(self.up(x)))`.
#    f and g are inside the layers: no operator is left to call.

# %% check="5.1"
check("5.1", ParallelMLP)

# %% [markdown]
# Your MLP beside the naive one, on four ranks: the same input, the same weights, the same output. Compare the two records; both pictures have one scale.

# %%
b, s, h, m = 2, 8, 16, 64


def mine():
    torch.manual_seed(0)
    mlp = ParallelMLP(h, m, device=device())
    x = torch.randn(b, s, h, device=device(), requires_grad=True)
    out = mlp(x)
    out.sum().backward()
    return out.detach()


def naive():
    torch.manual_seed(0)
    fc1 = ColumnParallelLinear(h, m, gather_output=True, device=device())
    fc2 = RowParallelLinear(m, h, input_is_parallel=False, device=device())
    x = torch.randn(b, s, h, device=device(), requires_grad=True)
    out = fc2(F.gelu(fc1(x)))
    out.sum().backward()
    return out.detach()


results = {"ParallelMLP": launch(mine, 4), "naive": launch(naive, 4)}
print(f"largest difference of the outputs: {(results['ParallelMLP'][0] - results['naive'][0]).abs().max().item():.1e}")
scale = max(total.bytes for run in results.values() for total in run.record.totals().values())
viz.traffic(results["ParallelMLP"], title="ParallelMLP: two all-reduces of b·s·h numbers", scale=scale)

# %%
viz.traffic(results["naive"], title="naive: gather and scatter in the middle", scale=scale)

# %% [markdown]
# ## 3 · A formula for the traffic
#
# A formula that was never compared with a measurement is a rumour. Write it as a function; the check runs real MLPs of random sizes and compares your numbers with the record, byte by byte.

# %% [markdown] task="5.2" title="The bytes of an MLP" difficulty=2 minutes=10
# Return the bytes of the messages, for both kinds of MLP. A message is counted as nccl-tests counts it: the tensor, for an all-reduce; the gathered result (all parts together), for an all-gather. `p = 1` costs nothing.


# %% exercise="5.2"
def mlp_traffic(batch, sequence, hidden_size, ffn_hidden_size, p, bytes_per_number=4, naive=False):
    """Bytes of the messages of one MLP: ParallelMLP, or with naive=True the one that gathers and scatters in the middle.

    out: {"forward": bytes, "backward": bytes}
    """
    ### BEGIN SOLUTION
    if p == 1:
        return {"forward": 0, "backward": 0}
    size = batch * sequence * hidden_size  # f and g: one all-reduce in each direction
    if naive:
        size += batch * sequence * ffn_hidden_size  # and the all-gather of the inner activation, or of its gradient
    return {"forward": size * bytes_per_number, "backward": size * bytes_per_number}
    ### END SOLUTION


# %% [markdown] hints="5.2"
# 1. Which tensor does g all-reduce in the forward pass, and what is its shape? Which gradient does f all-reduce in the backward pass?
# 2. Both have `batch * sequence * hidden_size` numbers, whatever `p` is. The naive MLP adds an all-gather of the inner activation forward, and of its gradient backward: see the table in section 2.
# 3. `size = batch * sequence * hidden_size`, plus `batch * sequence * ffn_hidden_size` if naive, times `bytes_per_number`, the same in both directions; zero for `p = 1`.

# %% check="5.2"
check("5.2", mlp_traffic)

# %% [markdown]
# What does that mean for a real model? GPT-3 has `h = 12288`, `s = 2048` and 96 layers. One sequence, two bytes a number:


# %%
def gpt3(layers, naive):
    """Bytes in 16-bit numbers, forward and backward."""
    traffic = mlp_traffic(1, 2048, 12288, 4 * 12288, p=8, bytes_per_number=2, naive=naive)
    return f"{layers * sum(traffic.values()) / 1e9:.2f}"


viz.table(
    [
        {"in GB": what, "ParallelMLP": gpt3(layers, naive=False), "naive": gpt3(layers, naive=True)}
        for what, layers in (("one MLP", 1), ("the MLPs of all 96 layers", 96))
    ]
)

# %% [markdown]
# For every sequence that the model learns from, the MLPs alone put messages of almost 10 GB on the links, and every one of them is waited for. The naive way makes it 48. That is why the tensor-parallel ranks of a large model sit on the fastest links there are, inside one machine.
#
# ## 4 · The gated variant
#
# Most models since Llama replace GELU by a gate. The first layer makes two tensors of size `m`, the *gate* and the *up* projection, and multiplies them:
#
# $$Y = \big(\mathrm{SiLU}(X G) \odot X U\big)\,D \qquad \mathrm{SiLU}(u) = u \cdot \mathrm{sigmoid}(u)$$
#
# This is **SwiGLU**. Both products read the same `X`, so they are stored as one fused weight, `[gate; up]` of shape `[2m, h]`, and done in one matrix product with one f in front of it. The multiplication is elementwise: column `j` of the gate meets column `j` of up. So a rank needs
# the same columns of both.
#
# **Predict.** `m = 8`, so the fused weight has 16 rows: 0 to 7 gate, 8 to 15 up. `p = 2`. Which rows must rank 1 hold? And how many all-reduces does the gated MLP have, forward and backward together?

# %% predict="5.b"
predict("5.b", rows_of_rank_1=[4, 5, 6, 7, 12, 13, 14, 15], calls=2)

# %% [markdown] task="5.3" title="SwiGLU" difficulty=3 minutes=15
# One fused column-parallel layer `self.up` for `[gate; up]`, one row-parallel layer `self.down`. The argument `stride` of `ColumnParallelLinear` says how many blocks are fused; it decides which rows of a full weight each rank gets at init and when a checkpoint is loaded.


# %% exercise="5.3"
class ParallelSwiGLU(nn.Module):
    """Y = (SiLU(X G) * (X U)) D, with a bias behind each product, with G and U fused into one column-parallel layer.

    in:  x, replicated    [..., h]
    out: y, replicated    [..., h]
    up's full weight is [gate; up], [2m, h]; this rank's shard is [2m/p, h]: its rows of the gate, then its rows of up.
    """

    def __init__(self, hidden_size, ffn_hidden_size, *, bias=True, group=None, device=None, dtype=None):
        super().__init__()
        ### BEGIN SOLUTION
        options = {"bias": bias, "group": group, "device": device, "dtype": dtype}
        self.up = ColumnParallelLinear(hidden_size, 2 * ffn_hidden_size, stride=2, **options)  # weight [2m/p, h]
        self.down = RowParallelLinear(ffn_hidden_size, hidden_size, **options)  # weight [h, m/p]
        ### END SOLUTION

    def forward(self, x):
        ### BEGIN SOLUTION
        gate, value = self.up(x).chunk(2, dim=-1)  # [..., m/p] each
        return self.down(F.silu(gate) * value)  # [..., h]
        ### END SOLUTION


# %% [markdown] hints="5.3"
# 1. What does one rank's output of `up` look like, `[..., 2m/p]`? Its first half and its second half are the two factors, if the right rows are in the shard.
# 2. Two blocks are fused: `stride=2`, and `2 * ffn_hidden_size` output features. Cut the output in half along the last dimension. SiLU goes on the gate, which is the first half.
# 3. `self.up = ColumnParallelLinear(hidden_size, 2 * ffn_hidden_size, stride=2, ...)`; `gate, value = self.up(x).chunk(2, dim=-1)`; `return self.down(F.silu(gate) * value)`.

# %% check="5.3"
check("5.3", ParallelSwiGLU)

# %% [markdown]
# With `stride=1` the program would still run, at any `p`: every rank multiplies *some* rows by *some* other rows. Would it train? Section 7 tries it. The check asks your layer how it was cut, so it sees this at once.

# %% [markdown]
# ## 5 · Replicas that drift apart
#
# Your MLP will sit in a model whose other parts are replicated: every rank holds the whole embedding, the whole LayerNorm, the whole output layer. In data parallelism you would all-reduce the gradients of such parameters. Here you do not, and they stay equal all the same:
# they start from the same numbers, every rank sees the same batch, and f hands the *whole* gradient to everything that lies before the MLP. Each rank computes the same update.
#
# That is a promise which nobody checks while the model trains. If f is missing somewhere, each rank's embedding gets another gradient, the copies drift apart, and no error is raised. So build the tool that looks.
#
# `dist.all_reduce` can take the largest or the smallest over the ranks instead of the sum: `op=dist.ReduceOp.MAX`, `op=dist.ReduceOp.MIN`. One thing to know before you use them. A broken training makes **NaN**s ("not a number"), which differ from every number and from each other. Here rank 1 of two
# has a NaN in the first element, then in the last. What is the maximum over the ranks? And what does Python's own `max` say?


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
# Of a NaN and a number, a comparison may keep either; only torch's `max` makes a point of keeping the NaN. An infinity is safe everywhere: it is larger than any number.

# %% [markdown] task="5.4" title="A detector for drifting replicas" difficulty=3 minutes=15
# Return the largest difference between any two ranks, in any element of any replicated parameter, as a float that is the same on every rank. A parameter with the attribute `tensor_parallel` is a shard: it is *meant* to differ, so leave it out.
# If a copy holds a NaN, on one rank or on all, the result must say so: return `nan` or `inf`, as you like.
#
# Do not change the parameters. Any collectives you like will do, but never send a sharded parameter.


# %% exercise="5.4"
def replica_drift(module, group=None):
    """How far the ranks' copies of the replicated parameters of `module` are apart, as a float.

    0.0 if they are equal; nan or inf if any of them holds a NaN
    """
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


# %% [markdown] hints="5.4"
# 1. For one element the ranks hold `p` numbers. The largest difference between any two of them is the largest minus the smallest. `dist.all_reduce` works in place, so give it a copy.
# 2. For each parameter without `tensor_parallel`: all-reduce one detached copy with `MAX` and another with `MIN`, take `(largest - smallest).max().item()`, and keep the largest over all parameters. What could you put in the copies in place of a NaN?
# 3. `torch.where(param.isnan(), torch.inf, param.detach())` is a copy with infinities for NaNs. One NaN then gives `inf`, a NaN on all ranks `inf - inf`, which is `nan`. Collect the differences in a list, and take `torch.tensor(differences).max().item()`.

# %% check="5.4"
check("5.4", replica_drift)

# %% [markdown]
# ## 6 · Train it
#
# Now the real thing. The data is text that is on your machine already: the sources of the Python standard library, as bytes. The model reads 8 bytes and predicts the next one. Each byte becomes a vector of 16 numbers, the 8 vectors side by side are one vector of `h = 128`, your MLP works
# on it, with a residual connection around it, and an output layer gives a score for each of the 256 possible bytes.

# %%
CONTEXT, HIDDEN, FFN, BATCH, STEPS = 8, 128, 512, 128, 300
text = corpus.python_sources(300_000)
print(text[3000:3300].decode())


# %%
class PlainMLP(nn.Module):
    """The MLP without any parallelism: the twin to compare with."""

    def __init__(self, hidden_size, ffn_hidden_size, **options):
        super().__init__()
        self.up = nn.Linear(hidden_size, ffn_hidden_size, **options)
        self.down = nn.Linear(ffn_hidden_size, hidden_size, **options)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class ByteModel(nn.Module):
    """Scores for the next byte from the 8 bytes before it. Everything but the MLP is replicated."""

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
# The training step is the one you know. Look at it closely: no rank, no group, no all-reduce of gradients. All communication is inside the MLP, where f and g are.


# %%
def train(model, steps=STEPS, after_step=lambda: None):
    """Returns the loss of every step. All ranks draw the same batches, from the same seed."""
    torch.set_num_threads(1)  # one core a process, so that the times can be compared
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    losses = []
    for inputs, targets in corpus.byte_batches(text, CONTEXT, BATCH, steps, seed=1):
        logits = model(inputs.to(device()))  # [b, 256]
        loss = F.cross_entropy(logits, targets[:, -1].to(device()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after_step()
    return losses


@torch.no_grad()
def accuracy(model):
    """How often the byte with the highest score is the right one, on 2000 places of the text."""
    inputs, targets = next(corpus.byte_batches(text, CONTEXT, 2000, 1, seed=2))
    return (model(inputs.to(device())).argmax(-1).cpu() == targets[:, -1]).double().mean().item()


@torch.no_grad()
def complete(model, prompt, length=24):
    """The prompt, continued byte by byte with the highest score."""
    written = bytearray(b"\n" * CONTEXT + prompt.encode())
    for _ in range(length):
        context = torch.tensor([list(written[-CONTEXT:])], device=device())  # [1, 8]
        written.append(model(context).argmax(-1).item())
    return written[CONTEXT:].decode(errors="replace")


PROMPTS = ["    def __in", "        return self.", "    raise ValueErr", "import "]

# %% [markdown]
# First one process, plain PyTorch, no `tplab` layer anywhere. Its starting point is kept: every other run begins there.

# %%
torch.manual_seed(0)
plain = ByteModel(PlainMLP)
start = {name: value.cpu().clone() for name, value in plain.state_dict().items()}
before = accuracy(plain)
plain_losses = train(plain)
print(
    f"one process: loss {plain_losses[0]:.3f} -> {plain_losses[-1]:.3f}, next byte right {before:.1%} -> {accuracy(plain):.1%}"
)
for prompt in PROMPTS:
    print(repr(complete(plain, prompt)))

# %% [markdown]
# Guessing among 256 bytes costs $\ln 256 = 5.55$; the untrained model is a little worse than that. After 300 steps the model writes things that look like Python.
#
# **Predict.** Now the same on `p = 2` ranks, with your `ParallelMLP`. How many all-reduces does one training step need, forward and backward together, for the MLP *and* for the gradients of all the parameters? And how many bytes do they hold, in float64 (8 bytes), with `b = 128`, `h = 128` and one vector for each example, so `s = 1`?

# %% predict="5.c"
predict("5.c", all_reduces=2, bytes=262144)


# %%
def train_on_ranks(mlp_class, steps=STEPS):
    model = ByteModel(mlp_class)
    load_full_state_dict(model, start)  # chapter 04: each rank takes its shards of the same starting point
    began = time.perf_counter()
    losses = train(model, steps)
    seconds = time.perf_counter() - began
    return {
        "losses": losses,
        "ms a step": 1e3 * seconds / steps,
        "weights": sum(param.numel() for param in model.mlp.parameters()),
        "completions": [complete(model, prompt) for prompt in PROMPTS],
        "drift": replica_drift(model),
    }


runs = {2: launch(train_on_ranks, 2, args=(ParallelMLP,))}
viz.curves(
    {"one process, plain PyTorch": plain_losses, "your ParallelMLP, p = 2": runs[2][0]["losses"]},
    title=f"{STEPS} steps on real text",
)

# %% [markdown]
# One curve. If you see two, go back to exercise 5.1. How equal are they? First with a single rank, where your MLP must be the plain one, then with two:


# %%
def furthest(losses):
    """The largest difference from the plain run, in any of these steps."""
    return max(abs(mine - theirs) for mine, theirs in zip(losses, plain_losses[: len(losses)], strict=True))


runs[1] = launch(train_on_ranks, 1, args=(ParallelMLP,))
print(f"p = 1: {furthest(runs[1][0]['losses']):.1e}   p = 2: {furthest(runs[2][0]['losses']):.1e}")

# %% [markdown]
# And with four. A third of the steps will do: four ranks on the few cores of a laptop are slow, as section 8 measures.

# %%
runs[4] = launch(train_on_ranks, 4, args=(ParallelMLP, STEPS // 3))
viz.curves(
    {"one process, plain PyTorch": plain_losses}
    | {f"your ParallelMLP, p = {p}": runs[p][0]["losses"] for p in (1, 2, 4)},
    title="four trainings, one on top of the other",
)

# %%
rows = []
for p, run in sorted(runs.items()):
    losses = run[0]["losses"]
    rows.append(
        {
            "your MLP": f"p = {p}",
            "steps": len(losses),
            "its last loss": f"{losses[-1]:.6f}",
            "that of plain PyTorch": f"{plain_losses[len(losses) - 1]:.6f}",
            "largest difference in any step": f"{furthest(losses):.1e}",
            "weights of a rank's MLP": f"{run[0]['weights']:,}",
            "replica drift": run[0]["drift"],
        }
    )
viz.table(rows)

# %%
viz.table(
    [
        {"rank 1 of 2 writes": repr(mine), "as one process": mine == complete(plain, prompt)}
        for mine, prompt in zip(runs[2][1]["completions"], PROMPTS, strict=True)
    ]
)

# %% [markdown]
# Four trainings, one curve. The differences are in the last digits of a float64: your MLP adds the same numbers as the plain one, but in another order (with one rank already: the row layer adds its bias after the product), and addition of floating-point numbers is not associative. In float32 the last digits come sooner, for the same reason and with the same meaning.
# Each of four ranks holds a quarter of the MLP (and the bias of `down`, which is whole on every rank), and none of them could have computed a single output alone. Two ranks, with half of it each, write the same text as one process.
#
# This is what tensor parallelism is. Everything later in the course is this, in more places.
#
# ## 7 · Break it
#
# **First.** Leave out f: one line, invisible in the forward pass. Before you run it, say what the loss curve will look like.


# %%
class WithoutF(ParallelMLP):
    def forward(self, x):
        x = F.linear(x, self.up.weight, self.up.bias)  # the column-parallel layer without copy_to_region
        return self.down(F.gelu(x))


def train_and_watch(mlp_class):
    model = ByteModel(mlp_class)
    load_full_state_dict(model, start)
    drift = []
    losses = train(model, steps=100, after_step=lambda: drift.append(replica_drift(model)))
    return {"losses": losses, "drift": drift}


broken = launch(train_and_watch, 2, args=(WithoutF,))
viz.curves(
    {
        "one process": plain_losses[:100],
        "without f, rank 0": broken[0]["losses"],
        "without f, rank 1": broken[1]["losses"],
    },
    title="f is missing, and the model learns all the same",
)

# %%
viz.curves(
    {"largest difference between the ranks' copies": broken[0]["drift"]},
    ylabel="replica drift",
    title="what the loss does not show",
)

# %%
viz.table(
    [
        {"": "first step", "one process": f"{plain_losses[0]:.6f}"}
        | {f"without f, rank {rank}": f"{broken[rank]['losses'][0]:.6f}" for rank in (0, 1)},
        {"": "step 100", "one process": f"{plain_losses[99]:.6f}"}
        | {f"without f, rank {rank}": f"{broken[rank]['losses'][-1]:.6f}" for rank in (0, 1)},
    ],
    title="the loss",
)

# %% [markdown]
# The first loss is right to the last digit, since f does nothing in the forward pass. Then each rank's embedding learns from a gradient in which the part that came through the MLP is only that of its own columns. The model still learns; the two ranks no longer hold the same embedding, and what you would save is
# neither of them. A dashboard with one loss curve shows nothing. Two things do: a comparison with one process, and your detector, from the first step on.
#
# **Second.** The gated MLP with its fused weight cut as one block, `stride=1`. Both layers below start from the same full weights, learn for 100 steps on two ranks, write a checkpoint, and one process loads it.


# %%
class AsOneBlock(ParallelSwiGLU):
    def __init__(self, hidden_size, ffn_hidden_size, **options):
        super().__init__(hidden_size, ffn_hidden_size, **options)
        self.up = ColumnParallelLinear(hidden_size, 2 * ffn_hidden_size, stride=1, **options)


torch.manual_seed(0)
gated_start = dict(start)  # the embedding, the norm and the output layer of the other runs
gated_start |= {f"mlp.up.{name}": value for name, value in nn.Linear(HIDDEN, 2 * FFN).double().state_dict().items()}


def train_gated(mlp_class):
    model = ByteModel(mlp_class)
    load_full_state_dict(model, gated_start)
    return {"losses": train(model, steps=100), "checkpoint": full_state_dict(model), "accuracy": accuracy(model)}


def read_checkpoint(state):
    model = ByteModel(ParallelSwiGLU)
    load_full_state_dict(model, state)
    return accuracy(model)


rows = []
for mlp_class in (ParallelSwiGLU, AsOneBlock):
    run = launch(train_gated, 2, args=(mlp_class,))[0]
    rows.append(
        {
            "layer": mlp_class.__name__,
            "first loss": f"{run['losses'][0]:.4f}",
            "loss after 100 steps": f"{run['losses'][-1]:.4f}",
            "next byte right, p = 2": f"{run['accuracy']:.1%}",
            "its checkpoint on one process": f"{launch(read_checkpoint, 1, args=(run['checkpoint'],))[0]:.1%}",
        }
    )
viz.table(rows)

# %% [markdown]
# It does train, and nothing in its losses tells that it is wrong: rank 0 holds the whole gate, multiplies the outputs of its first half by those of its second, and learns with these pairs; rank 1 does the same with the rows of up. Only where the checkpoint meets another `p`, or one process, do the pairs no longer match.

# %%
symptoms(5)

# %% [markdown]
# ## 8 · Measure it
#
# Bytes first: one training step of the whole model, as recorded, against your formula from exercise 5.2.


# %%
def count_one_step():
    model = ByteModel(ParallelMLP)
    inputs, targets = next(corpus.byte_batches(text, CONTEXT, BATCH, 1, seed=3))
    with record() as section:
        F.cross_entropy(model(inputs.to(device())), targets[:, -1].to(device())).backward()
    return {kind: (total.calls, total.bytes) for kind, total in section.totals().items()}


rows = []
for p in (1, 2, 4):
    calls, size = launch(count_one_step, p)[0].get("all_reduce", (0, 0))
    formula = sum(mlp_traffic(BATCH, 1, HIDDEN, FFN, p, bytes_per_number=8).values())
    duration = f"{runs[p][0]['ms a step']:.0f}"
    rows.append({"p": p, "all-reduces": calls, "bytes": size, "your formula": formula, "ms a step": duration})
viz.table(rows)

# %% [markdown]
# The milliseconds will probably disappoint you. The ranks share the cores of one machine. What is sharded they divide among them, but each of them also does everything that is replicated, and they wait for each other on top. Where the time goes, for three steps on two ranks:


# %%
def three_steps():
    model = ByteModel(ParallelMLP)
    for inputs, targets in corpus.byte_batches(text, CONTEXT, BATCH, 3, seed=3):
        F.cross_entropy(model(inputs.to(device())), targets[:, -1].to(device())).backward()


viz.timeline(launch(three_steps, 2), title="three forward and backward passes on two ranks")

# %% [markdown]
# With a GPU per rank the arithmetic of each rank shrinks with `p`, and the messages do not. Whether that pays depends on the ratio of the two, which chapter 11 measures. The rule of thumb: large `h`, small `p`, fast links.
#
# ## 9 · In the wild
#
# **Megatron-Core**, `megatron/core/transformer/mlp.py`: the class `MLP` with `linear_fc1` (column-parallel, `gather_output=False`) and `linear_fc2` (row-parallel, `input_is_parallel=True`): what you wrote. Both are built with `skip_bias_add=True`. The bias of `linear_fc1` is added together with the activation
# in one kernel (`bias_gelu_impl`, `bias_swiglu_impl`), the bias of `linear_fc2` is returned, and the transformer layer adds it together with dropout and residual. For a gated MLP, `linear_fc1` is twice as wide and its weight is marked with stride 2; `apply_swiglu_sharded_factory` cuts it into its two blocks for a checkpoint.
#
# **PyTorch**: `parallelize_module(mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})` from `torch.distributed.tensor.parallel`. Llama-like models there keep gate and up as two linear layers, both colwise; then no stride is needed, and there are two smaller products instead of one.
#
# The same MLP by PyTorch's own tensor parallelism, next to yours:


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
        results.append({"out": out.detach(), "dx": leaf.grad, "calls": calls})
    return results


mlp_state = {name.removeprefix("mlp."): value for name, value in start.items() if name.startswith("mlp.")}
mine, theirs = launch(against_dtensor, 2, args=(mlp_state, torch.randn(4, HIDDEN, dtype=torch.float64)))[0]
print(
    f"largest difference: output {(mine['out'] - theirs['out']).abs().max():.0e}, input gradient {(mine['dx'] - theirs['dx']).abs().max():.0e}"
)
print(f"collectives: yours {mine['calls']}, PyTorch's {theirs['calls']}")

# %% [markdown]
# ## 10 · Recap
#
# 1. Column first, then row: the activation is elementwise, so it works on whole columns and not on partial sums, and nothing stands between the two layers.
# 2. Traffic of an MLP: one all-reduce of `b·s·h` forward (g), one backward (f), for every `p > 1`. The naive version gathers and scatters the inner activation: five times as much when the inner size is `4h`.
# 3. Memory: each rank holds `1/p` of both weights and of the inner activation `[b, s, m/p]`; input and output, `[b, s, h]`, are whole on every rank.
# 4. Fused gate and up: stride 2, or the checkpoint is wrong at any other `p` while training looks fine.
# 5. Replicated parameters stay equal without communication, as long as f is in its place. Next, chapter 06 does the same to attention: column-parallel Q, K and V by whole heads, then a row-parallel output layer.

# %% [markdown]
# ## Your library so far
#
# It now has a whole MLP. Run it on two processes without the notebook: the table ends with the line for it.

# %%
from tplab.course import library

library(5)
