# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 09 · Randomness
#
# Every rank of your model rolls dice. Some of these dice must show the same number on all ranks, and others must not. If you mix them up, nothing crashes. Megatron-Core mixed them up for sixteen months, because of a single word.
#
# By the end of this chapter, your block from chapter 06 will train with dropout on any number of ranks. You need chapters 04 to 06. About 75 minutes.

# %% tags=["setup"]
import math
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tplab import device, launch, record, viz
from tplab.common import corpus
from tplab.course import check, predict, symptoms
from tplab.memory import saved_for_backward
from tplab.tensor import ColumnParallelLinear, RowParallelLinear, gather_from_region

# %% [markdown]
# ## Two ranks roll a die
#
# Let's start with a tiny language model. It's just a table. For each byte, it says which bytes come next in Python's standard library, and how often. Two ranks share the table, and each of them holds half of its columns. To write a text, the ranks gather the table's row for the latest byte, and then each rank picks the next byte at random.

# %%
text = corpus.python_sources(300_000)
latest, following = torch.tensor(list(text[:-1])), torch.tensor(list(text[1:]))
follows = torch.zeros(256, 256).index_put((latest, following), torch.tensor(1.0), accumulate=True)


def write(log_at=None):
    torch.manual_seed(0)  # the same on both ranks
    half = follows.to(device()).chunk(2, 1)[dist.get_rank()]  # [256, 128]
    written = list(b"d")
    for step in range(48):
        if step == log_at and dist.get_rank() == 0:
            torch.rand(1, device=device())  # rank 0 needs a random number for a log message
        written.append(torch.multinomial(gather_from_region(half[written[-1]]), 1).item())
    return bytes(written).decode(errors="replace")


runs = {"same seed": launch(write, 2), "rank 0 draws one extra number": launch(write, 2, args=(16,))}
viz.table(
    [{"run": name, "rank": rank, "text": repr(seen)} for name, run in runs.items() for rank, seen in enumerate(run)]
)

# %% [markdown]
# Both ranks started from the same seed, so they picked the same bytes, until rank 0 drew a single extra number. From then on, each rank writes a text of its own. Worse, each row that they gather now consists of halves of two different rows, so *neither* text is what the model would have written. In August 2026, somebody reported this mistake in the reference code of OpenAI's gpt-oss, in which every rank samples on its own (openai/gpt-oss issue 270).
#
# So should all ranks use the same seed, and never draw a number on just one rank? Before you agree, let's look at **dropout**. With a rate of $r$, it sets each element to zero with probability $r$, and it divides the others by $1 - r$. The **mask** says which elements are kept.
#
# **Predict.** Inside an MLP with $m = 4096$ on four ranks, each rank has 1024 of the 4096 elements of a token. All ranks draw their masks from the same seed. How many of the 4096 elements are dropped independently of all the others? What's the correlation between the masks of ranks 0 and 1? (It's 1 for identical masks and 0 for unrelated ones.)

# %% predict="9.a"
predict("9.a", independent=1024, correlation=1)

# %% [markdown] task="9.1" title="Same or different?" difficulty=2 minutes=8
# Suppose two **replicas** of a model train on different texts, and each replica is split across two ranks. For each random draw below, answer two questions. Do the two ranks of *one* replica have to draw the same numbers? And do the two replicas have to draw the same numbers? Write "same" if they have to, and "different" if they must not. Together, the four ranks should behave like a single process that trains on all the texts.
#
# | name | what is drawn |
# |---|---|
# | `norm` | the initial weight of a norm, which every rank has in full |
# | `shard` | the initial values of a weight's shard, if each rank draws only its own shard |
# | `embedding` | the mask for the output of the embedding, `[b, s, h]` |
# | `heads` | the mask for the attention weights, `[b, n/p, s, s]` |
# | `inside` | the mask inside the MLP, `[b, s, m/p]` |
# | `after_g` | the mask for the output of the MLP, after g, `[b, s, h]` |
# | `batch` | the texts for the next training step |
# | `token` | the next token, when each replica continues the same text in its own way |
#
# The check runs a small model on four ranks, in which your table decides about one draw at a time.


# %% exercise="9.1"
def same_or_different() -> dict[str, tuple[str, str]]:
    """Return (within a replica, across replicas) for each draw, with the words "same" and "different"."""
    ### BEGIN SOLUTION
    return {
        "norm": ("same", "same"),
        "shard": ("different", "same"),
        "embedding": ("same", "different"),
        "heads": ("different", "different"),
        "inside": ("different", "different"),
        "after_g": ("same", "different"),
        "batch": ("same", "different"),
        "token": ("same", "different"),
    }
    ### END SOLUTION


# %% [markdown] hints="9.1"
# 1. For the first question, look at the tensor's shape. Does every rank of a replica have this tensor in full, or does each rank have its own part? What would go wrong if the ranks dropped different elements of the same tensor? What would go wrong if they dropped the elements at the same positions of their different parts?
# 2. For the second question, remember that replicas are copies of *one* set of weights, and that they work on different texts. Which draws affect the weights, and which draws affect something that's computed from a text?
# 3. Every rank has the full tensor for `norm`, `embedding`, `after_g`, `batch`, and `token`, so these are the same within a replica. Only `norm` and `shard` are about weights, so these two are the same across replicas.

# %% check="9.1"
check("9.1", same_or_different)

# %% [markdown]
# Here's a picture of two rows of your table. Four ranks started from the same seed, and each of them drew one mask for each row. The filled elements are kept.


# %%
def two_masks():
    torch.manual_seed(1)
    return [F.dropout(torch.ones(6, columns, device=device()), 1 / 3) for columns in (16, 8)]


after_g, inside = zip(*launch(two_masks, 4), strict=True)
viz.masks(
    {"after g, each rank has all of [b, s, h]": after_g, "inside the MLP, each rank has its own [b, s, m/p]": inside}
)

# %% [markdown]
# The first row is right, because if the ranks dropped different elements of the same tensor, they would go on with different tensors. But the second row is wrong. There, the four ranks have different columns of one large tensor. A single process would draw a separate number for every element of that tensor. With one seed, the ranks draw only a quarter of these numbers, and each number decides about four elements. Dropout becomes coarser: the share of a token's elements that is kept varies $\sqrt{p}$ times as much. With one seed per rank, the second row would be right, and the first row would be wrong.
#
# ## Three streams
#
# So a rank needs several **streams** of random numbers, each with its own seed.
#
# | stream | what's drawn from it | who draws the same numbers |
# |---|---|---|
# | `init` | initial values, as in exercise 4.4 | all ranks of all replicas |
# | `replicated` | masks for tensors that every rank has in full | the ranks of one replica, no matter how many there are |
# | `sharded` | masks for a rank's own part of a tensor | no two ranks |
#
# How should we choose the seeds? If `replicated` gets `seed + 1` and `sharded` gets `seed + rank`, rank 1 draws the same numbers from both streams. And there's one more trap:

# %%
generators = [torch.Generator().manual_seed(seed) for seed in (7, 7 + 2**32)]
torch.stack([torch.rand(4, generator=generator) for generator in generators])


# %% [markdown]
# On a CPU, torch only uses the last 32 bits of a seed.

# %% [markdown] task="9.2" title="Seeds that never meet" difficulty=2 minutes=8
# Return the seeds of a rank's three streams. Two streams must have the same seed where the table above says so, and nowhere else. This has to be true for every nonnegative `seed`, with up to 1000 ranks per replica and up to 1000 replicas. (So don't use a hash. Among a million hashes, some agree in the last 32 bits.)


# %% exercise="9.2"
def stream_seeds(seed, rank, world_size, copy=0):
    """Return the seeds of this rank's streams, {"init": int, "replicated": int, "sharded": int}, none of them negative.

    seed: the seed of the run; rank: 0 to world_size - 1, within this replica; copy: the replica, 0, 1, ...
    """
    ### BEGIN SOLUTION
    first = seed + 1 + 2000 * copy  # 2000 seeds for each replica, which uses one of them, and one for each rank
    return {"init": seed, "replicated": first, "sharded": first + 1 + rank}
    ### END SOLUTION


# %% [markdown] hints="9.2"
# 1. Draw a line of whole numbers, and mark the seeds that all the ranks of replica 0 use. What's the first seed that replica 1 can use without a collision?
# 2. The seed of `init` must not depend on the rank or on the replica. The seed of `replicated` depends on the replica, and the seed of `sharded` depends on both. Leave room for 1000 ranks between one replica and the next.
# 3. With `first = seed + 1 + 2000 * copy`, you can use `seed` for `init`, `first` for `replicated`, and `first + 1 + rank` for `sharded`.

# %% check="9.2"
check("9.2", stream_seeds)

# %%
viz.table(
    [{"replica": copy, "rank": rank} | stream_seeds(1234, rank, 2, copy=copy) for copy in (0, 1) for rank in (0, 1)],
    title="your seeds for two replicas on two ranks each",
)

# %% [markdown]
# ## Swap the state
#
# You can't tell `F.dropout` which stream to use, because it always draws from torch's **current state**. So before dropout, we have to put the stream's state into torch's generator, and afterward, we have to restore the previous state. A state is just a tensor of bytes, and these two functions read and write it.


# %% tags=["setup"]
def get_state():
    """Return a copy of the state of torch's generator on this rank's device."""
    return torch.cuda.get_rng_state() if device().type == "cuda" else torch.get_rng_state()


def set_state(state):
    """Put a state that `get_state` returned into torch's generator."""
    torch.cuda.set_rng_state(state) if device().type == "cuda" else torch.set_rng_state(state)


# %% [markdown]
# A **tracker** keeps the states of several streams. Inside a `with` block, its method `fork` makes torch draw from one of them:
#
# ```python
# with tracker.fork("sharded"):
#     y = F.dropout(y, 0.1)  # draws from the stream "sharded"
# x = torch.rand(3)          # draws from the current state, as if nothing had happened
# ```
#
# The next time somebody forks "sharded", the stream has to pick up where it left off. If it started from its seed again, every training step would drop the same elements.
#
# To write such a method, decorate a function that yields once with `contextlib.contextmanager`. The code before the `yield` runs when the `with` block begins, and the code after it runs when the block ends. If the block raises an exception, Python raises that exception at the `yield`.

# %% [markdown] task="9.3" title="A tracker of random states" difficulty=3 minutes=13
# Write the tracker with the help of `get_state` and `set_state`. A separate generator, `torch.Generator(device())`, has the methods `manual_seed(seed)` and `get_state()`.
#
# - `add` raises a `ValueError` if the name or the seed is taken, and then it adds nothing. A seed stays taken forever. Adding a stream doesn't change the numbers that torch draws from its current state.
#
# - The `with` block may end in an exception, which the caller has to see. Even then, `fork` stores how far the stream has advanced, and it restores torch's current state. Forks of different names may be nested. A name that wasn't added raises an error.
#
# - `state_dict` returns the states as they are now. Nothing that happens later may change what it returned. `load_state_dict` goes on from there, in this tracker or in another one with the same names. The seeds that are taken stay taken.


# %% exercise="9.3"
class RNGTracker:
    """Random states with names, which `fork` lends to torch."""

    def __init__(self):
        ### BEGIN SOLUTION
        self.states = {}
        self.seeds = set()
        ### END SOLUTION

    def add(self, name, seed):
        """Add a stream that starts from `seed`. Raises ValueError if the name or the seed is taken."""
        ### BEGIN SOLUTION
        if name in self.states or seed in self.seeds:
            raise ValueError(f"the name {name!r} or the seed {seed} is taken, the streams are {sorted(self.states)}")
        self.states[name] = torch.Generator(device()).manual_seed(seed).get_state()
        self.seeds.add(seed)
        ### END SOLUTION

    @contextmanager
    def fork(self, name="sharded"):
        """Inside the `with` block, torch draws from the stream `name`, which goes on where it stopped."""
        ### BEGIN SOLUTION
        outside = get_state()
        set_state(self.states[name])
        try:
            yield
        finally:  # even after an exception
            self.states[name] = get_state()
            set_state(outside)
        ### END SOLUTION

    def state_dict(self):
        """Return {name: state}, as the states are now."""
        ### BEGIN SOLUTION
        return dict(self.states)
        ### END SOLUTION

    def load_state_dict(self, state):
        """Go on from what `state_dict` returned."""
        ### BEGIN SOLUTION
        self.states = dict(state)
        ### END SOLUTION


# %% [markdown] hints="9.3"
# 1. Setting torch's state overwrites the state that torch had before. What do you have to save first, and where? While `fork` waits at its `yield`, the caller's block is running. Which lines have to run even if that block raises an exception?
# 2. In `add`, make a generator with `torch.Generator(device()).manual_seed(seed)` and store its `.get_state()`. In `fork`, save the current state in a local variable, put the stream's state in its place, and `yield`. Then store the stream's new state, and restore the state that you saved. The last two steps belong in a `finally`. Since `get_state` returns a new tensor each time, you can store what it returns.
# 3. Write `outside = get_state()` and `set_state(self.states[name])`, then `try: yield`, then `finally: self.states[name] = get_state(); set_state(outside)`. `state_dict` returns a copy, `dict(self.states)`, and `load_state_dict` stores a copy, too.

# %% check="9.3"
check("9.3", RNGTracker)


# %% [markdown]
# Let's try your tracker with your seeds on two ranks. In each of two steps, every rank draws three masks: one from torch's current state, one from "replicated", and one from "sharded". Between the steps, rank 0 draws an extra number for its log message again.
#
# **Predict.** Compare the masks of the two ranks in step 2. Are they the same if they're drawn from torch's current state? If they're drawn from "replicated"? If they're drawn from "sharded"? (Write `True` or `False`.)

# %% predict="9.b"
predict("9.b", current=False, replicated=True, sharded=False)


# %%
def make_tracker(seed, copy=0):
    """Return this rank's tracker with two streams for dropout, and seed torch's current state for the initial values."""
    seeds = stream_seeds(seed, dist.get_rank(), dist.get_world_size(), copy=copy)
    torch.manual_seed(seeds["init"])
    tracker = RNGTracker()
    for name in ("replicated", "sharded"):
        tracker.add(name, seeds[name])
    return tracker


def lending(tracker, name):
    return nullcontext() if name == "current state" else tracker.fork(name)


def two_steps():
    tracker, masks = make_tracker(1), {}
    for step in (1, 2):
        for name in ("current state", "replicated", "sharded"):
            with lending(tracker, name):
                masks[f"step {step}, {name}"] = F.dropout(torch.ones(2, 16, device=device()), 1 / 3)
        if dist.get_rank() == 0:
            torch.rand(1, device=device())  # for a log message
    return masks


ranks = launch(two_steps, 2)
viz.masks({name: [rank[name] for rank in ranks] for name in ranks[0]})

# %% [markdown]
# That's why "replicated" needs a state of its own. Torch's current state starts out the same on all ranks, too, but sooner or later, somebody draws from it on just one of them.

# %% [markdown]
# ## Dropout in your block
#
# Now dropout goes into your block from chapter 06, in four places. Two of them are between f and g, where each rank has its own heads and columns. The other two come after g.


# %% tags=["setup"]
def attention_weights(q, k):  # q, k [b, n, s, d] -> the causal weights [b, n, s, s]
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf).softmax(dim=-1)


class Block(nn.Module):
    """The block of chapter 06, with dropout in four places: x [b, s, h], the same on every rank -> the same shape."""

    def __init__(self, hidden_size, num_heads, rate, tracker, *, group=None, device=None, dtype=None):
        super().__init__()
        options = {"group": group, "device": device, "dtype": dtype}
        self.qkv = ColumnParallelLinear(hidden_size, 3 * hidden_size, stride=3, **options)
        self.out = RowParallelLinear(hidden_size, hidden_size, **options)
        self.up = ColumnParallelLinear(hidden_size, 4 * hidden_size, **options)
        self.down = RowParallelLinear(4 * hidden_size, hidden_size, **options)
        self.head_dim, self.rate, self.tracker = hidden_size // num_heads, rate, tracker

    def drop(self, y):
        return F.dropout(y, self.rate, self.training)

    def heads(self, x):  # [b, s, h] -> [b, s, h/p]
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return (self.drop(attention_weights(q, k)) @ v).transpose(1, 2).flatten(2)

    def inner(self, x):  # [b, s, h] -> [b, s, 4h/p]
        return self.drop(F.gelu(self.up(x)))

    def forward(self, x):
        with self.tracker.fork("sharded"):
            y = self.heads(x)  # [b, s, h/p]
        y = self.out(y)  # [b, s, h]
        with self.tracker.fork("replicated"):
            x = x + self.drop(y)
        with self.tracker.fork("sharded"):
            y = self.inner(x)  # [b, s, 4h/p]
        y = self.down(y)  # [b, s, h]
        with self.tracker.fork("replicated"):
            return x + self.drop(y)


# %% [markdown]
# We'll train it on two ranks in three ways: as it is, with all four masks from "sharded", and with all four masks from "replicated".


# %%
HIDDEN, HEADS, CONTEXT, BATCH, RATE = 64, 4, 32, 16, 0.2


class ByteModel(nn.Module):
    def __init__(self, tracker):
        super().__init__()
        options = {"device": device(), "dtype": torch.float64}
        self.embedding = nn.Embedding(corpus.VOCABULARY, HIDDEN, **options)
        self.position = nn.Embedding(CONTEXT, HIDDEN, **options)
        self.block = Block(HIDDEN, HEADS, RATE, tracker, **options)
        self.norm, self.head = nn.LayerNorm(HIDDEN, **options), nn.Linear(HIDDEN, corpus.VOCABULARY, **options)

    def forward(self, tokens):  # [b, s] bytes -> [b, s, 256]
        return self.head(self.norm(self.block(self.embedding(tokens) + self.position.weight)))


class OnlyOne:
    """A tracker that lends the same stream for every name."""

    def __init__(self, tracker, name):
        self.fork = lambda _: tracker.fork(name)


def replica_drift(module):
    """Return the largest difference between ranks in any replicated parameter, as in exercise 5.3."""
    worst = 0.0
    for parameter in (each.detach() for each in module.parameters() if not hasattr(each, "tensor_parallel")):
        largest, smallest = parameter.clone(), parameter.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        worst = max(worst, (largest - smallest).max().item())
    return worst


def train(only=None):
    torch.set_num_threads(1)
    tracker = make_tracker(2)
    model = ByteModel(OnlyOne(tracker, only) if only else tracker)
    losses, kept = [], []  # kept: the share of each token's columns that this rank keeps inside the MLP
    model.block.down.register_forward_pre_hook(lambda _, inputs: kept.append((inputs[0] != 0).double().mean(-1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    for inputs, targets in corpus.byte_batches(text, CONTEXT, BATCH, 40, seed=1):
        loss = F.cross_entropy(model(inputs.to(device())).flatten(0, 1), targets.to(device()).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "drift": replica_drift(model), "kept": torch.stack(kept)}


# %% [markdown]
# **Predict.** Which of the two wrong ways ("sharded" or "replicated") gives the ranks two different first losses? Which one makes the replicated parameters drift apart? And for which one do the losses and the drift look perfectly healthy?

# %% predict="9.c"
predict("9.c", two_first_losses="sharded", drift="sharded", looks_healthy="replicated")

# %%
rows = []
for name, only in (
    ("the right streams", None),
    ("only from sharded", "sharded"),
    ("only from replicated", "replicated"),
):
    ranks = launch(train, 2, args=(only,), timeout=300)
    kept = (ranks[0]["kept"] + ranks[1]["kept"]) / 2  # the share of all 4h columns, for each token
    losses = {f"first loss, rank {rank}": f"{seen['losses'][0]:.4f}" for rank, seen in enumerate(ranks)}
    seen = {
        "last loss": f"{ranks[0]['losses'][-1]:.3f}",
        "drift": f"{ranks[0]['drift']:.2g}",
        "std of the share kept": f"{kept.std():.4f}",
    }
    rows.append({"masks": name} | losses | seen)
viz.table(rows, title=f"with independent masks, the std is {math.sqrt(RATE * (1 - RATE) / (4 * HIDDEN)):.4f}")

# %% [markdown]
# If all masks come from "sharded", the ranks disagree about the very first loss, because after g, they compute with different tensors. Then their replicated parameters drift apart. That's bad, but at least you can see it. (With the loss from chapter 08, you wouldn't see the first symptom, because all ranks build that loss from the same all-reduced numbers.)
#
# If all masks come from "replicated", there's *nothing* to see. The ranks agree perfectly, and the last loss is even a little *lower* than the right one. (We tried six seeds, and it was lower for five of them.) Only the masks themselves give it away: the share that's kept varies $\sqrt{2}$ times as much as it should.
#
# ## Fix it
#
# In Megatron-Core, the blocks run in two contexts, one for the random state and one for 8-bit numbers. In June 2023, somebody combined the two contexts and got a single word wrong. It was reported in July 2024 (NVIDIA/Megatron-LM issue 903). In October, a maintainer wrote that nobody had studied what it did to training, because many of their own models don't use dropout (issue 1256). It only hit models with sequence parallelism, which we'll get to in chapter 12.
#
# Below is your block, written the same way. Your tracker and your seeds are fine. Yet on two ranks, both ranks drop the same elements of their own heads and columns.

# %% [markdown] task="9.4" title="Fix the block that forgot its streams" difficulty=2 minutes=8
# Find out which stream the masks are really drawn from, and why. Then fix `forward`. `self.precision()` returns the context in which the block's four linear layers have to run, such as `torch.autocast("cuda", torch.bfloat16)`. By default, it's a context that does nothing.
#
# In eval mode, nothing is dropped. The check runs the block several times, including once with a rate of 2, which makes `F.dropout` raise an exception.


# %% exercise="9.4"
class MixedPrecisionBlock(Block):
    """The block above, whose linear layers run in the context that `precision()` returns."""

    def __init__(self, *args, precision=nullcontext, **options):
        super().__init__(*args, **options)
        self.precision = precision

    def forward(self, x):
        ### BEGIN SOLUTION
        with self.tracker.fork("sharded"), self.precision():
            y = self.heads(x)  # [b, s, h/p]
        with self.tracker.fork("replicated"), self.precision():
            x = x + self.drop(self.out(y))  # [b, s, h]
        with self.tracker.fork("sharded"), self.precision():
            y = self.inner(x)  # [b, s, 4h/p]
        with self.tracker.fork("replicated"), self.precision():
            return x + self.drop(self.down(y))  # [b, s, h]
        ### BROKEN
        # with self.tracker.fork("sharded") and self.precision():
        #     y = self.heads(x)  # [b, s, h/p]
        # with self.tracker.fork("replicated") and self.precision():
        #     x = x + self.drop(self.out(y))  # [b, s, h]
        # with self.tracker.fork("sharded") and self.precision():
        #     y = self.inner(x)  # [b, s, 4h/p]
        # with self.tracker.fork("replicated") and self.precision():
        #     return x + self.drop(self.down(y))  # [b, s, h]
        ### END SOLUTION


# %% [markdown] hints="9.4"
# 1. Put a `print` into your tracker's `fork`, before its `yield`, and run the block on one rank. How often is it printed? What does Python do with the object after `with`?
# 2. What's the value of `3 and 5`? If the first operand of `and` is true, the result is the second operand. So which of the two contexts does `with a and b:` enter?
# 3. `with a, b:` enters both contexts. Replace each `and` with a comma.

# %% check="9.4"
check("9.4", MixedPrecisionBlock)

# %% [markdown]
# A context manager is an object like any other, so `a and b` is simply `b`. Nobody enters `a`, and nobody complains. All four masks came from torch's current state, which is the same on all ranks.
#
# ## Run it again
#
# The backward pass needs many of the tensors that the forward pass has computed. With **activation checkpointing**, a block keeps only its input, and when the backward pass gets to the block, it runs the block's forward pass a second time.
#
# But will the second run drop the same elements? `torch.utils.checkpoint` takes care of that: before the second run, it restores the state that torch's generator had before the first run. Let's try it with $y = \mathrm{dropout}(x)^2$ at $x = 1$, so that the gradient is $2\,\mathrm{dropout}(x)^2 = 2y$.
#
# **Predict.** The rate is 0.5. Which share of the gradients is right if dropout draws from torch's current state, and which share if it draws from a stream of your tracker? (Write a number between 0 and 1.)

# %% predict="9.d"
predict("9.d", current_state=1, tracker=0.5)


# %%
def right_gradients(name, run_again):
    tracker = make_tracker(1)

    def squared(x):
        with lending(tracker, name):
            return F.dropout(x, 0.5) ** 2

    x = torch.ones(100_000, device=device(), requires_grad=True)
    y = run_again(squared, x, tracker)
    y.sum().backward()
    return (x.grad == 2 * y.detach()).double().mean().item()


def torchs_own(function, x, tracker):
    return torch_checkpoint(function, x, use_reentrant=False)


def table_of(run_again):
    shares = {
        name: launch(right_gradients, 2, args=(name, run_again)) for name in ("current state", "replicated", "sharded")
    }
    return viz.table([{"dropout draws from": name} | {f"right on rank {rank}": f"{share:.1%}" for rank, share in enumerate(ranks)}
                      for name, ranks in shares.items()])  # fmt: skip


table_of(torchs_own)

# %% [markdown]
# Half of the gradients are wrong. They belong to the elements that were kept in only one of the two runs. Torch doesn't know about your tracker, so in the second run, the streams simply go on. The loss is still right, and a wrong gradient looks like any other gradient. In August 2026, this happened to OLMo-core, which hadn't put torch's own state back. After 150 steps, a model with dropout and checkpointing had a loss of 2.495 instead of 2.195 (allenai/OLMo-core pull request 828).
#
# `torch_checkpoint` has an argument for such cases. `context_fn` is a function without arguments that returns two context managers, one for each run. `nullcontext()` is a context manager that does nothing.

# %% [markdown] task="9.5" title="Run it again with the same dropout" difficulty=4 minutes=13
# Write `checkpoint` with the help of `torch_checkpoint`. The second run has to draw from the tracker's streams as they were when *its own* first run began. Afterward, all states must be as if the function had run only once.
#
# The tracker has the methods `state_dict()` and `load_state_dict(state)` from exercise 9.3. Your function has to work if several blocks are checkpointed one after the other, and if `x` itself needs no gradient but the block's weights do.


# %% exercise="9.5"
def checkpoint(function, *args, tracker):
    """Return function(*args), but keep only its inputs, and run it again in the backward pass, with the same dropout."""
    ### BEGIN SOLUTION
    before_first_run = tracker.state_dict()

    @contextmanager
    def replay():
        now = tracker.state_dict()
        tracker.load_state_dict(before_first_run)
        try:
            yield
        finally:
            tracker.load_state_dict(now)

    return torch_checkpoint(function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), replay()))
    ### END SOLUTION


# %% [markdown] hints="9.5"
# 1. The second run begins long after your function has returned. What does it need to know about the past? When is the last chance to write that down?
# 2. Call `tracker.state_dict()` before anything runs. Then write a context manager `replay` for the second run. At its beginning, it stores where the streams are now and loads the states from before the first run. At its end, it loads the stored states again.
# 3. Decorate `replay` with `@contextmanager`. Inside, write `now = tracker.state_dict()` and `tracker.load_state_dict(before_first_run)`, then `try: yield`, then `finally: tracker.load_state_dict(now)`. Return `torch_checkpoint(function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), replay()))`.

# %% check="9.5"
check("9.5", checkpoint)

# %%
table_of(lambda function, x, tracker: checkpoint(function, x, tracker=tracker))

# %% [markdown]
# Here's this chapter as tapes of random numbers, one per stream and one for torch's current state. All masks come from a real run.
#
# ![An animation with three tapes of random elements for each of two ranks. Dropout reads the next four elements of a tape. The replicated tapes of both ranks are the same, and the sharded ones differ. When rank 0 draws an extra number, only its own torch tape moves. In the second run of step 2, torch's checkpointing reads on, and the masks are wrong. Yours first goes back to a flag, and the masks are right.](pictures/tapes.svg)
#
# <details><summary>All frames, one by one</summary>
#
# ![The same animation as numbered stills](pictures/tapes_frames.svg)
#
# </details>
#
# What does checkpointing buy you, and what do you pay for it? Let's measure it with your block from exercise 9.4.
#
# **Predict.** On two ranks, your block runs two all-reduces in the forward pass and two in the backward pass. If it's checkpointed, how many all-reduces run in its backward pass?

# %% predict="9.e"
predict("9.e", backward=4)


# %%
def one_pass(checkpointed):
    tracker = make_tracker(1)
    block = MixedPrecisionBlock(HIDDEN, HEADS, RATE, tracker, device=device())
    x = torch.randn(BATCH, CONTEXT, HIDDEN, device=device(), requires_grad=True)  # [b, s, h]
    with saved_for_backward(block) as kept, record() as forward:
        out = checkpoint(block, x, tracker=tracker) if checkpointed else block(x)
    with record() as backward:
        out.sum().backward()
    calls = [sum(total.calls for total in section.totals().values()) for section in (forward, backward)]
    return {"KiB kept for the backward pass": kept.bytes // 1024, "all-reduces forward": calls[0], "backward": calls[1]}


viz.table(
    [{"p": p, "checkpointed": on} | launch(one_pass, p, args=(on,))[0] for p in (1, 2, 4) for on in (False, True)]
)

# %% [markdown]
# A checkpointed block keeps only x, no matter how many ranks there are. In return, each g in the block runs a second time. (Here, even the last g has to run again, because a dropout comes after it. Torch stops the second run as soon as the backward pass has everything it needs.)

# %%
symptoms(9)

# %% [markdown]
# ## In the wild
#
# <details><summary>Going deeper: Megatron-Core, PyTorch, checkpoints, and what "the same model" means</summary>
#
# - **Megatron-Core** has your tracker in `megatron/core/tensor_parallel/random.py`. It's called `CudaRNGStatesTracker`, and it refuses names and seeds that are taken, as yours does. Torch's current state plays the role of "replicated", and the stream of the sharded draws gets `seed + 2718 + rank`, where 2718 is "just for fun". According to its docstring, all replicas draw the same numbers from that stream, so they drop the same elements of different texts. A single process would use different masks for them. Still, it does less harm to repeat a mask across replicas than within a replica.
#
# - **Initial values.** In chapter 04, every rank drew the full weight and kept its shard. GPT-3's table with 51,200 padded rows of 12,288 elements takes up 2.52 GB in float32, on every rank. There's a cheaper method, which you met as `shard` in exercise 9.1. In Megatron-Core, each rank draws only its own shard, inside a fork of the tracker. The standard deviation doesn't depend on the shard's shape. On eight ranks, that takes 0.31 GB. In return, the weight depends on the number of ranks. In tplab, it's the option `per_rank_init=True`.
#
# - **A checkpoint of a training run** must contain the states of *every* rank's tracker. In August 2026, somebody found that Megatron-LM saved some streams on a single rank and restored them on many others. When a run on 256 ranks was resumed, the stream for experts was wrong on 252 of them (pull request 6858).
#
# - **PyTorch's DTensor** needs no streams, but a GPU. A GPU's generator computes its numbers from a seed and an offset, so each rank can jump to the offset of its own shard. On a CPU, the class that does this (`OffsetBasedRNGTracker`) raises an error.
#
# - **What's "the same model"?** If dropout only comes after g, our runs for $p$ = 1, 2, and 4 agree to the last digits. If there's also dropout inside the blocks, they're three different runs, although nothing is wrong. Two ranks' masks side by side aren't the mask that one rank would have drawn, but they're just as random.
#
# </details>
#
# ## Your library so far
#
# Your library can draw random numbers now. The table below ends with a command that trains your block with dropout and activation checkpointing on two processes.

# %%
from tplab.course import library

library(9)

# %% [markdown]
# You've built every part of a GPT now. How many lines does it take to put them together? And in which order should they go, so that nothing is sent twice?
