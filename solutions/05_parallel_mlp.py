# %% [markdown]
# # 05 · The parallel MLP
#
# In each layer of a GPT, the MLP holds two thirds of the weights. So if you can split the MLP across your GPUs without much communication, most of the model is taken care of. In this chapter, you'll design such a split yourself. Then you'll train a model with it on real text, first with two processes and then with four, and you'll compare the losses with plain PyTorch, digit by digit.
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
# An MLP without biases consists of two matmuls with a nonlinearity between them: $Y = \mathrm{GELU}(XA)\,B$. Here $A$ is `[h, m]` and $B$ is `[m, h]`, where $h$ is the model's hidden size and $m$ is usually $4h$. Each rank holds a shard of $A$ and a shard of $B$. You also have the four operators from chapter 03:
#
# | operator | forward | backward |
# |---|---|---|
# | f, `copy_to_region(x)` | nothing | all-reduce of the gradient |
# | g, `reduce_from_region(x)` | all-reduce | nothing |
# | `scatter_to_region(x)` | keeps this rank's slice of the last dimension | all-gather of the gradient |
# | `gather_from_region(x)` | all-gather along the last dimension | keeps this rank's slice of the gradient |
#
# It's up to you how to split $A$ and $B$ and where to put the operators. Many designs compute the correct result. But only one design sends the fewest bytes, and you're about to find it.

# %% [markdown] task="5.1" title="Split an MLP with the least traffic" difficulty=3 minutes=15
# Every rank receives the full $X$ and returns the full $Y$. In the backward pass, every rank needs the full gradient of $X$ and the gradients of its own two shards.
#
# - `mlp_splits` returns two strings, one for $A$ and one for $B$. Each string is either "column" or "row".
#
# - `sharded_mlp` receives $X$ and this rank's shards of $A$ and $B$, which are split as specified by `mlp_splits`. Use as many operators as you need, and no more.
#
# The check compares the output, all gradients, and the number of bytes sent in each pass. A good strategy is to get any design working first and then look for messages that you can eliminate.


# %% exercise="5.1"
def mlp_splits() -> tuple[str, str]:
    """Return how A and B are split, as "column" or "row" each."""
    ### BEGIN SOLUTION
    return "column", "row"
    ### END SOLUTION


def sharded_mlp(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return GELU(X A) B [.., h], on every rank.

    x [.., h]: the same on every rank
    a and b: this rank's shards of A [h, m] and B [m, h]
    """
    ### BEGIN SOLUTION
    x = copy_to_region(x)  # [.., h]; backward: all-reduce of dx
    z = F.gelu(x @ a)  # [.., m/p], some columns of GELU(X A)
    return reduce_from_region(z @ b)  # [.., h]
    ### END SOLUTION


# %% [markdown] hints="5.1"
# 1. Start with `A`, and look at what each rank holds right before the GELU. With a column split, each rank holds some of the columns of `XA`. With a row split, each rank has only a partial sum for each element. Which of these two splits lets a rank apply GELU without any communication?
# 2. Suppose each rank holds some of the columns of `GELU(XA)`. Which rows of `B` are these columns multiplied by? How should you split `B` so that the ranks don't have to communicate between the two matmuls? At the end of the MLP, each rank has only a partial sum of `Y`. Which operator adds up these partial sums? In the backward pass, each rank ends up with only its own contribution to the gradient of `X`. Which operator adds up these contributions?
# 3. Split `A` by columns and `B` by rows. In `sharded_mlp`, start with `x = copy_to_region(x)` and `z = F.gelu(x @ a)`, and then return `reduce_from_region(z @ b)`.

# %% check="5.1"
check("5.1", mlp_splits, sharded_mlp)

# %% [markdown]
# You've just rediscovered the central idea of Megatron-LM (Shoeybi et al. 2019). If you split $A$ by columns, each rank computes complete columns of $XA$. GELU works on each element separately, so each rank can apply GELU to its own columns. And as luck would have it, a row split of $B$ needs exactly these columns:
#
# $$X \;\xrightarrow{\;f\;}\; [\,X A_0,\; X A_1\,] \;\xrightarrow{\text{GELU}}\; [\,Z_0,\; Z_1\,] \;\longrightarrow\; Z_0 B_0 + Z_1 B_1 \;\xrightarrow{\;g\;}\; Y$$

# %% [markdown] task="5.2" title="ParallelMLP" difficulty=2 minutes=8
# Turn your design into a module built from two of the layers from chapter 04. These layers call the operators themselves, so this time, you choose the layers. Each layer is either a `ColumnParallelLinear`, with `gather_output` set to True or False, or a `RowParallelLinear`, with `input_is_parallel` set to True or False. That makes four options for the first layer and four for the second, or 16 combinations. Some of them raise an error. Five of them compute the correct result, but four of these five send many more bytes than your design. Only one combination runs the two all-reduces from exercise 5.1 and nothing else.
#
# Call the layers `self.up` and `self.down`, and set the options explicitly, even if you want the default. The constructor has already worked out the inner size, `m`, and the arguments that both layers need. In `forward`, use the exact GELU, `F.gelu`. Do you still have to call f and g yourself?


# %% exercise="5.2"
class ParallelMLP(nn.Module):
    """Y = GELU(X A + a) B + c, sharded over the ranks of `group`.

    x [.., h], the same on every rank -> y [.., h], the same on every rank
    """

    def __init__(
        self,
        hidden_size,
        ffn_hidden_size=None,
        *,
        bias=True,
        group=None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        m = 4 * hidden_size if ffn_hidden_size is None else ffn_hidden_size
        options = {"bias": bias, "group": group, "device": device, "dtype": dtype}
        ### BEGIN SOLUTION
        # weight [m/p, h]
        self.up = ColumnParallelLinear(hidden_size, m, gather_output=False, **options)
        # weight [h, m/p]
        self.down = RowParallelLinear(m, hidden_size, input_is_parallel=True, **options)
        ### END SOLUTION

    def forward(self, x):
        ### BEGIN SOLUTION
        x = self.up(x)  # [..., m/p]
        x = F.gelu(x)  # [..., m/p]
        return self.down(x)  # [..., h]
        ### END SOLUTION


# %% [markdown] hints="5.2"
# 1. In your `sharded_mlp`, f comes first, g comes last, and there's nothing between the two matmuls. Which of the four kinds of layers starts with f and doesn't communicate after its matmul? Which kind ends with g and doesn't communicate before its matmul?
# 2. A column-parallel layer always starts with f. If it gathers its output, an all-gather follows. A row-parallel layer always ends with g. If its input isn't parallel yet, a scatter comes first, which needs an all-gather in the backward pass.
# 3. Create `self.up = ColumnParallelLinear(hidden_size, m, gather_output=False, **options)` and `self.down = RowParallelLinear(m, hidden_size, input_is_parallel=True, **options)`. In `forward`, return `self.down(F.gelu(self.up(x)))`.

# %% check="5.2"
check("5.2", ParallelMLP)

# %% [markdown]
# If you had chosen `gather_output=True` and `input_is_parallel=False`, there would be a gather and a scatter between your two layers. The animation below shows why you can leave out both of them. Each of these operators undoes what the other one does. (We left out the GELU, because it doesn't communicate.)
#
# ![An animation in two steps. First, a gather and a scatter sit between a column-parallel layer and a row-parallel layer. Then the gather and the scatter disappear, and only one all-reduce per pass is left.](pictures/joined.svg)
#
# How much communication does your design save? Let's compare it with the obvious design, which keeps the gather and the scatter so that both layers look like ordinary linear layers from the outside.
#
# **Predict.** Suppose $m = 4h$ and $x$ has $n$ elements. How many collectives does the obvious design run in the forward and backward passes combined? What's the total size of all the messages, in elements and as a multiple of $n$? (As always, we count the full, gathered tensor as the message of an all-gather.)

# %% predict="5.a"
predict("5.a", collectives=4, times_n=10)

# %% [markdown]
# Below, you can try all five combinations of layers that compute the correct result, still assuming that $m = 4h$. The input takes up 1,024 bytes. Does the traffic depend on the number of ranks?

# %%
LAYERS = {
    "column, gathered": (ColumnParallelLinear, {"gather_output": True}),
    "column": (ColumnParallelLinear, {}),
    "row, scattered": (RowParallelLinear, {"input_is_parallel": False}),
    "row": (RowParallelLinear, {}),
}
KINDS = [
    "column → row",
    "column, gathered → row, scattered",
    "row, scattered → column, gathered",
    "row, scattered → row, scattered",
    "column, gathered → column, gathered",
]


def make_layer(kind, in_features, out_features):
    layer_class, options = LAYERS[kind]
    return layer_class(in_features, out_features, device=device(), **options)


def two_layers(first, second):
    x = torch.randn(2, 8, 16, device=device(), requires_grad=True)  # 1,024 bytes
    out = make_layer(second, 64, 16)(F.gelu(make_layer(first, 16, 64)(x)))
    out.sum().backward()


# %% tags=["explore"]
def show_combination(kind, p):
    results = launch(two_layers, p, args=tuple(kind.split(" → ")))
    return viz.traffic(results, title=f"{kind}, p = {p}", scale=2 * 4096)


viz.explore(show_combination, kind=KINDS, p=(2, 4))


# %%
def cost(kind):
    results = launch(two_layers, 4, args=tuple(kind.split(" → ")))
    totals = results.record.totals().values()
    return {
        "layers": kind,
        "collectives": sum(total.calls for total in totals),
        "bytes": sum(total.bytes for total in totals),
    }


viz.table([cost(kind) for kind in KINDS], title="forward and backward, p = 4")

# %% [markdown]
# What does that mean for a real model? GPT-3 has 96 layers with $h = 12288$, and it was trained on sequences of 2,048 tokens in 16-bit precision. For each sequence, a single message contains $2048 \cdot 12288$ elements of two bytes each, or 50 MB. Each of the 96 MLPs needs one such message in the forward pass and one in the backward pass, so all the MLPs together send almost 10 GB per sequence, and the ranks have to wait for every message. The obvious design would send 48 GB per sequence. That's why tensor-parallel ranks usually share a single machine, where the links between GPUs are fastest.

# %% [markdown]
# ## Train it
#
# Now for the real thing. Your machine already has plenty of text to train on: the source code of Python's standard library. The model below reads 8 bytes and predicts the next byte. Each byte becomes a vector of 16 numbers, and the eight vectors are concatenated into a single vector with $h = 128$. Your MLP transforms this vector, and a final layer assigns a score to each of the 256 possible bytes. Everything except
# the MLP is replicated.

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
# Look closely at the training loop below. The loop doesn't mention ranks or groups, and it doesn't all-reduce any gradients. All the communication happens inside your MLP.


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
# First, we train with plain PyTorch in a single process. We save the model's initial weights so that all the other runs can start from the same weights.

# %%
torch.manual_seed(0)
plain = ByteModel(PlainMLP)
start = {name: value.cpu().clone() for name, value in plain.state_dict().items()}
plain_losses = train(plain)
print(f"loss {plain_losses[0]:.3f} -> {plain_losses[-1]:.3f}")
for prompt in PROMPTS:
    print(repr(complete(plain, prompt)))

# %% [markdown]
# A model that guesses blindly among 256 bytes has a loss of $\ln 256 = 5.55$. After 300 steps, our model writes something that looks remarkably like Python.
#
# **Predict.** Now we'll train the same model with your `ParallelMLP` on two ranks. How many all-reduces does each training step need in total? Count the all-reduces inside the MLP *and* any that sum parameter gradients. What's the total size of all the all-reduce messages in bytes? (A batch consists of 128 examples with $h = 128$, in float64.)

# %% predict="5.b"
predict("5.b", all_reduces=2, bytes=262144)


# %%
def train_on_ranks(mlp_class, steps=STEPS):
    model = ByteModel(mlp_class)
    load_full_state_dict(model, start)  # each rank takes its shards
    losses = train(model, steps)
    weights = sum(param.numel() for param in model.mlp.parameters())
    completions = [complete(model, prompt) for prompt in PROMPTS]
    return {"losses": losses, "weights": weights, "completions": completions}


def furthest(losses):
    """Return the largest difference from plain PyTorch's loss in any step."""
    pairs = zip(losses, plain_losses[: len(losses)], strict=True)
    return max(abs(mine - theirs) for mine, theirs in pairs)


runs = {}
curves = {"plain PyTorch": plain_losses}
for p, steps in ((2, STEPS), (4, STEPS // 3)):
    runs[p] = launch(train_on_ranks, p, args=(ParallelMLP, steps))
    curves[f"your ParallelMLP, p = {p}"] = runs[p][0]["losses"]
viz.curves(curves, title="three training runs, one on top of the other")

# %% [markdown]
# Do you see three curves or just one? The lower chart shows how little the losses differ, and the table below lists the final losses. (On a laptop, training with four ranks is slow, so we stop that run after 100 steps.)

# %%
rows = []
for p, results in runs.items():
    losses = results[0]["losses"]
    rows.append(
        {
            "your MLP": f"p = {p}",
            "steps": len(losses),
            "final loss": f"{losses[-1]:.6f}",
            "plain PyTorch's loss": f"{plain_losses[len(losses) - 1]:.6f}",
            "largest difference in any step": f"{furthest(losses):.0e}",
            "MLP weights per rank": f"{results[0]['weights']:,}",
        }
    )
viz.table(rows)

# %%
rows = []
for mine, prompt in zip(runs[2][1]["completions"], PROMPTS, strict=True):
    same = mine == complete(plain, prompt)
    rows.append({"rank 1 of 2 writes": repr(mine), "same as plain PyTorch": same})
viz.table(rows)

# %% [markdown]
# **This is tensor parallelism.** No rank could have computed a single output on its own, and yet all ranks agree with plain PyTorch to the last few digits. (The last digits differ because the ranks add the same numbers in a different order, and floating-point addition isn't associative.) The rest of this course applies the same idea in more and more places.
#
# ## What keeps the replicas equal?
#
# There's something odd about this training loop, though. Each rank has its own copy of the embedding and updates that copy with its own gradient, but nothing ever compares the copies. In data parallelism, you'd all-reduce the gradients to keep all the copies equal. Here, the copies stay equal anyway. The copies start out equal, and every rank sees the same batch. Thanks to f, every parameter before the MLP also gets its *full* gradient on every rank. So every rank makes the same update.
#
# But nothing in the loop verifies that the copies are still equal. If you forget to call f somewhere, the copies drift apart without any error message. So let's build a detector.
#
# With `op=dist.ReduceOp.MAX` or `op=dist.ReduceOp.MIN`, an all-reduce computes the maximum or minimum instead of the sum. But there's a trap. When training goes wrong, you often get a **NaN** ("not a number"), which isn't equal to any number, not even itself. What's the maximum of a zero and a NaN?
#
# Let's compute this maximum in a few different ways. First, we all-reduce a tensor of twelve zeros twice. Each time, one element on rank 1 is a NaN instead of a zero. The NaN is the first element in the first all-reduce and the last element in the second all-reduce.


# %%
def maximum_over_ranks():
    found = []
    for place in (0, -1):
        value = torch.zeros(12, device=device())
        if dist.get_rank() == 1:
            value[place] = torch.nan
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        found.append(value[place].item())
    return {
        "MAX across ranks, first element": found[0],
        "MAX across ranks, last element": found[1],
    }


launch(maximum_over_ranks, 2)[0] | {
    "max(0.0, nan)": max(0.0, torch.nan),
    "torch.tensor([0.0, nan]).max()": torch.tensor([0.0, torch.nan]).max().item(),
}

# %% [markdown]
# So a MAX or MIN across ranks can silently drop a NaN. Whether the NaN gets dropped may even depend on its position in the tensor. Python's `max` can drop a NaN as well. The maximum of infinity and any number, on the other hand, is always infinity.

# %% [markdown] task="5.3" title="A detector for drifting replicas" difficulty=3 minutes=15
# Compare each element of each replicated parameter across ranks, and find the largest difference between any two ranks' values. Return this difference as a float that's the same on every rank. If a replicated parameter contains a NaN on any rank, you may return either `nan` or `inf`. (You don't have to think about infinities.)
#
# A parameter that has the attribute `tensor_parallel` is a shard. Shards are *supposed* to differ, so skip the shards, and don't send them to other ranks. Your detector must not change any parameters.


# %% exercise="5.3"
def replica_drift(module, group=None):
    """Return how far apart the ranks' copies of the replicated parameters are.

    The result is a float: 0.0 if they're equal, nan or inf if there's a NaN.
    """
    ### BEGIN SOLUTION
    drifts = [0.0]
    for param in module.parameters():
        if hasattr(param, "tensor_parallel"):
            continue
        # MAX and MIN may swallow a NaN, not an inf
        largest = torch.where(param.isnan(), torch.inf, param.detach())
        smallest = largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
        # inf for one NaN, inf - inf = nan where all ranks have one
        drifts.append((largest - smallest).max().item())
    # torch's max keeps a nan, Python's may not
    return torch.tensor(drifts, dtype=torch.float64).max().item()
    ### END SOLUTION


# %% [markdown] hints="5.3"
# 1. There are `p` values for each element, one per rank. The largest difference between any two of these values is the maximum minus the minimum. Since `dist.all_reduce` overwrites its argument, what should you pass instead of the parameter itself?
# 2. For each parameter without `tensor_parallel`, all-reduce one detached copy with `MAX` and a second copy with `MIN`, and take `(largest - smallest).max().item()`. After the loop, return the largest difference over all parameters. What value could you put in place of each NaN before the all-reduces?
# 3. Use `torch.where(param.isnan(), torch.inf, param.detach())` to make a copy in which every NaN is replaced with infinity. If an element is NaN on only some of the ranks, its maximum is infinite and its minimum is a number, so the difference between the maximum and the minimum is `inf`. If an element is NaN on every rank, it's replaced everywhere, so its maximum and its minimum are both infinite, and the difference between the two is `nan`. Start with the list `[0.0]`, append each parameter's difference to the list, and return `torch.tensor(differences, dtype=torch.float64).max().item()`.

# %% check="5.3"
check("5.3", replica_drift)

# %% [markdown]
# ## Break it: leave out f
#
# Calling f takes just one line of code, and that line does nothing in the forward pass. Suppose you forget that line. What will the loss curves look like? Take a guess before you run the cell below.


# %%
class WithoutF(ParallelMLP):
    def forward(self, x):
        # the column-parallel layer, without its copy_to_region
        x = F.linear(x, self.up.weight, self.up.bias)
        return self.down(F.gelu(x))


def train_and_watch(mlp_class):
    model = ByteModel(mlp_class)
    load_full_state_dict(model, start)
    drift = []
    losses = train(model, 100, after_step=lambda: drift.append(replica_drift(model)))
    return {"losses": losses, "drift": drift}


broken = launch(train_and_watch, 2, args=(WithoutF,))
curves = {"plain PyTorch": plain_losses[:100]}
for rank, results in enumerate(broken):
    curves[f"without f, rank {rank}"] = results["losses"]
viz.curves(curves, title="f is missing, and the model learns anyway")

# %%
viz.curves(
    {"replica drift": broken[0]["drift"]},
    ylabel="largest difference",
    title="what the loss doesn't show",
)

# %% [markdown]
# The first loss is correct to the last digit, because f does nothing in the forward pass. In the backward pass, however, each rank's embedding gets only the gradient that flows through that rank's own columns of $A$, so the first update is already wrong. The loss keeps falling, but now you have two different models, and neither of them is the one you wanted. On a dashboard with a single loss curve, you'd never notice the mistake. Your detector catches it after one step.
#
# ## Fix it: a gated MLP
#
# Most models since Llama use a gated MLP, called **SwiGLU**:
#
# $$Y = \big(\mathrm{SiLU}(X G) \odot X U\big)\,D \qquad \mathrm{SiLU}(u) = u \cdot \mathrm{sigmoid}(u)$$
#
# The *gate* $XG$ and the *up* projection $XU$ are multiplied elementwise. Both projections read the same $X$, so they're usually stored as one fused weight `[gate; up]`. With the fused weight, a single matmul and a single call to f are enough. The inference engine xLLM had a bug in this fused layer until pull request 1616 fixed it. Here's the same mistake in our own layers:


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
    targets = targets[:, -1].to(device())
    with torch.no_grad():
        return F.cross_entropy(model(inputs.to(device())), targets).item()


def symptom(mlp_class):
    losses = {}
    for p in (1, 2):
        results = launch(train_gated, p, args=(mlp_class,))[0]
        losses[f"first loss, p = {p}"] = results["losses"][0]
        losses[f"step 100, p = {p}"] = results["losses"][-1]
    reloaded = launch(loss_of, 1, args=(mlp_class, results["checkpoint"]))[0]
    return losses | {"checkpoint from p = 2, on p = 1": reloaded}


row = {name: f"{loss:.4f}" for name, loss in symptom(AsShipped).items()}
viz.table([row], title="losses, as shipped")

# %% [markdown]
# The broken MLP runs on any number of ranks, and it even *trains*. But the losses depend on `p` from the very first step, and a checkpoint saved on two ranks can't be used on a single rank.
#
# What goes wrong? Suppose the broken version runs on two ranks with $m = 8$. The fused weight has 16 rows. Rows 0 to 7 are the gate, and rows 8 to 15 are the up projection. Each row of the weight computes one feature. In `forward`, the feature from row 0 should be multiplied by the feature from row 8, the feature from row 1 by the feature from row 9, and so on.
#
# **Predict.** On rank 0, the feature from row 0 actually gets multiplied by the feature from a different row. Which row is it? On rank 1, which row computes the feature that gets multiplied by the feature from row 8?

# %% predict="5.c"
predict("5.c", row_0_meets=4, row_8_meets=12)

# %% [markdown] task="5.4" title="Fix a gated MLP" difficulty=3 minutes=10
# First decide which rows of the fused weight each rank needs, and write them down in `fused_rows`. Then repair the layer, which doesn't call `fused_rows`.
#
# - `fused_rows` is broken in the same way as the layer. Fix it so that it returns the rows that a rank needs, in order. The `forward` method below stays as it is: it multiplies the first half of the rank's features by the second half. The products are $m$ inner features in all, and `self.down` expects the first $m/p$ of them on rank 0, the next $m/p$ on rank 1, and so on.
#
# - `ParallelSwiGLU` should hold exactly these rows on every rank. Keep `self.up` as a single fused layer whose full weight is `[gate; up]`, because that's how checkpoints store it. Your fixed MLP should send exactly as many bytes as your `ParallelMLP`.


# %% exercise="5.4"
def fused_rows(rank: int, world_size: int, ffn_hidden_size: int) -> list[int]:
    """Return which rows of the fused weight [gate; up] a rank needs, in order.

    The fused weight is [2m, h], and m is a multiple of world_size.
    """
    ### BEGIN SOLUTION
    size = ffn_hidden_size // world_size
    gate = list(range(rank * size, (rank + 1) * size))
    return gate + [ffn_hidden_size + row for row in gate]
    ### BROKEN
    # size = 2 * ffn_hidden_size // world_size
    # return list(range(rank * size, (rank + 1) * size))
    ### END SOLUTION


class ParallelSwiGLU(nn.Module):
    """Y = (SiLU(X G) * (X U)) D, sharded over the ranks of `group`.

    x [.., h], the same on every rank -> y [.., h], the same on every rank

    There's a bias after each matmul. The full weight of `up` is [gate; up], [2m, h].
    """

    def __init__(
        self,
        hidden_size,
        ffn_hidden_size,
        *,
        bias=True,
        group=None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        options = {"bias": bias, "group": group, "device": device, "dtype": dtype}
        ### BEGIN SOLUTION
        # weight [2m/p, h]
        self.up = ColumnParallelLinear(
            hidden_size, 2 * ffn_hidden_size, stride=2, **options
        )
        ### BROKEN
        # self.up = ColumnParallelLinear(hidden_size, 2 * ffn_hidden_size, **options)
        ### END SOLUTION
        # weight [h, m/p]
        self.down = RowParallelLinear(ffn_hidden_size, hidden_size, **options)

    def forward(self, x):
        gate, value = self.up(x).chunk(2, dim=-1)  # [..., m/p] each
        return self.down(F.silu(gate) * value)  # [..., h]


# %% [markdown] hints="5.4"
# 1. Take `m = 4` and two ranks, so that the fused weight has eight rows. On rank 0, `self.down` expects features 0 and 1. Which two rows of the gate and which two rows of the up projection compute these features? In `forward`, `chunk` treats the first half of the rank's rows as the gate. So in which order does the rank need its four rows?
# 2. Rank `r` needs rows `r * m / p` to `(r + 1) * m / p - 1` of the gate, followed by the same rows of the up projection, which are `m` rows further down in the fused weight. In chapter 04, you saw an option of `ColumnParallelLinear` that was made for exactly this layout.
# 3. Let `size = ffn_hidden_size // world_size` and `gate = list(range(rank * size, (rank + 1) * size))`, and return `gate + [ffn_hidden_size + row for row in gate]`. Create the layer with `ColumnParallelLinear(hidden_size, 2 * ffn_hidden_size, stride=2, **options)`.

# %% check="5.4"
check("5.4", fused_rows, ParallelSwiGLU)

# %%
viz.table(
    [
        {"": mlp_class.__name__}
        | {name: f"{loss:.4f}" for name, loss in symptom(mlp_class).items()}
        for mlp_class in (AsShipped, ParallelSwiGLU)
    ]
)

# %% [markdown]
# With your fix, it no longer matters how many ranks there are. The broken version simply learned to live with its mismatched features, because nothing during training told it which features belong together.

# %%
symptoms(5)

# %% [markdown]
# ## Measure it
#
# Does a training step send as many bytes as you predicted? The table below compares the trace of one step with the formula.


# %%
def one_step():
    model = ByteModel(ParallelMLP)
    inputs, targets = next(corpus.byte_batches(text, CONTEXT, BATCH, 1, seed=3))
    targets = targets[:, -1].to(device())
    with record() as section:
        F.cross_entropy(model(inputs.to(device())), targets).backward()
    totals = section.totals()
    return {kind: (total.calls, total.bytes) for kind, total in totals.items()}


rows = []
for p in (1, 2, 4):
    calls, size = launch(one_step, p)[0].get("all_reduce", (0, 0))
    formula = 2 * BATCH * HIDDEN * 8 if p > 1 else 0
    rows.append({"p": p, "all-reduces": calls, "bytes": size, "2·b·h·8": formula})
viz.table(rows)

# %% [markdown]
# ## In the wild
#
# <details><summary>Going deeper: the same MLP in Megatron-Core and in PyTorch</summary>
#
# - **Megatron-Core** implements the same MLP in `megatron/core/transformer/mlp.py`, with the layers `linear_fc1` (column-parallel) and `linear_fc2` (row-parallel). With `skip_bias_add`, a layer returns its bias separately, so the first bias can be fused with the activation, and the second bias can be fused with dropout and the residual connection. For a gated MLP, `linear_fc1` has twice as many output features. A stride of 2 tells this layer that its weight consists of two blocks, and `apply_swiglu_sharded_factory` saves these two blocks separately in the checkpoint. In Megatron-LM issue 360, a user asked which row of the gate belongs to which row of the up projection.
#
# - **Other architectures** can't always use this design. The design works so well because a transformer consists of pairs of large matmuls with only elementwise or per-head operations between them.
#
# - **PyTorch** uses the same design when you call `parallelize_module(mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})`. If you keep the gate and the up projection in two separate layers, you don't need a stride, but you run two smaller matmuls instead of a single large one.
#
# </details>
#
# Finally, let's compare your MLP with PyTorch's own tensor parallelism.


# %%
def against_dtensor(state, x):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mine = ParallelMLP(HIDDEN, FFN, device=device(), dtype=torch.float64)
    load_full_state_dict(mine, state)
    theirs = PlainMLP(HIDDEN, FFN, device=device(), dtype=torch.float64)
    theirs.load_state_dict(state)
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(theirs, mesh, plan)
    results = []
    for mlp in (mine, theirs):
        leaf = x.to(device()).requires_grad_()
        with record() as section:
            out = mlp(leaf)
            out.square().sum().backward()
        calls = {kind: total.calls for kind, total in section.totals().items()}
        results.append({"out": out.detach(), "dx": leaf.grad, "collectives": calls})
    return results


names = [name for name in start if name.startswith("mlp.")]
mlp_state = {name.removeprefix("mlp."): start[name] for name in names}
x = torch.randn(4, HIDDEN, dtype=torch.float64)
mine, theirs = launch(against_dtensor, 2, args=(mlp_state, x))[0]
out, dx = (f"{(mine[name] - theirs[name]).abs().max():.0e}" for name in ("out", "dx"))
print(f"largest differences: {out} in the output, {dx} in the input's gradient")
print(f"collectives: yours {mine['collectives']}, PyTorch's {theirs['collectives']}")

# %% [markdown]
# ## Your library so far
#
# Your library now contains a complete MLP, and you can run it on two processes outside the notebook. The table below ends with the command.

# %%
from tplab.course import library

library(5)

# %% [markdown]
# You've now parallelized two thirds of a transformer layer. The remaining third of the weights belongs to attention, in which every token looks at every other token. How could you possibly split attention without constant communication?
