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
# If a model uses dropout, every rank draws random numbers. In some tensors, all ranks have to drop the same elements, and in others, each rank has to drop different ones. If you get this wrong, your program doesn't crash, and the loss may look perfectly normal. In Megatron-Core, a single wrong word caused such a bug, and it stayed in the code for sixteen months.
#
# By the end of this chapter, you'll be able to train your transformer block from chapter 06 with dropout on any number of ranks. You need chapters 04 to 06. About 75 minutes.

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
# Let's start with a tiny language model that's nothing but a table of counts. For any two bytes, the table says how often the second byte follows the first one in Python's standard library. We split the columns of this table across two ranks. To generate the next byte of a text, the ranks gather the table's row for the latest byte. Then each rank samples a byte at random, in proportion to the counts in this row.

# %%
text = corpus.python_sources(300_000)
latest, following = torch.tensor(list(text[:-1])), torch.tensor(list(text[1:]))
follows = torch.zeros(256, 256)
follows.index_put_((latest, following), torch.tensor(1.0), accumulate=True)


def write(log_at=None):
    torch.manual_seed(0)  # the same on both ranks
    half = follows.to(device()).chunk(2, 1)[dist.get_rank()]  # [256, 128]
    written = list(b"d")
    for step in range(48):
        if step == log_at and dist.get_rank() == 0:
            torch.rand(1, device=device())  # for a log message
        counts = gather_from_region(half[written[-1]])  # [256]
        written.append(torch.multinomial(counts, 1).item())
    return bytes(written).decode(errors="replace")


runs = {
    "same seed": launch(write, 2),
    "rank 0 draws one extra number": launch(write, 2, args=(16,)),
}
viz.table([{"run": name, "rank": rank, "text": repr(seen)}
           for name, run in runs.items() for rank, seen in enumerate(run)])  # fmt: skip

# %% [markdown]
# Both ranks started from the same seed, so they sampled the same bytes until rank 0 drew an extra random number. From then on, the two ranks wrote different texts. But each rank stores only half of every row of the table. When the two ranks looked up different bytes and gathered the two halves, the resulting row belonged to neither byte. So *neither* text is what the model would have generated on a single rank.
#
# You might conclude that all ranks should use the same seed, and that no rank should ever draw a random number on its own. But what about **dropout**? With a rate of $r$, dropout sets each element of a tensor to zero with probability $r$ and divides the other elements by $1 - r$. The dropout **mask** determines which elements are kept.
#
# **Predict.** An MLP with 4096 inner features is split across four ranks, so each rank computes 1024 of a token's features. All ranks draw their dropout masks from the same seed. For a single token, how many independent random numbers determine which of the 4096 features are dropped? What's the correlation between the masks of ranks 0 and 1? (It's 1 for identical masks and 0 for unrelated masks.)

# %% predict="9.a"
predict("9.a", independent=1024, correlation=1)

# %% [markdown] task="9.1" title="Same or different?" difficulty=2 minutes=8
# Suppose you train two **replicas** of a model on different texts, and you split each replica across two ranks. Together, these four ranks should behave like a single process that trains on all the texts. The table below lists eight kinds of random draws. For each of them, answer two questions with "same" or "different". Do the two ranks of *one* replica have to draw the same random numbers or different ones? And what about the two replicas?
#
# | name | what is drawn |
# |---|---|
# | `norm` | the initial weight of a norm, which every rank has in full |
# | `shard` | the initial values of a weight shard, if each rank draws only its own shard |
# | `embedding` | the mask for the output of the embedding, `[b, s, h]` |
# | `heads` | the mask for the attention weights, `[b, n/p, s, s]` |
# | `inside` | the mask inside the MLP, `[b, s, m/p]` |
# | `after_g` | the mask for the output of the MLP, after g, `[b, s, h]` |
# | `batch` | the texts for the next training step |
# | `token` | the next token, if each replica should continue the same text in its own way |
#
# The check runs a small model on four ranks and tries your answers for one kind of draw at a time.


# %% exercise="9.1"
def same_or_different() -> dict[str, tuple[str, str]]:
    """Return {name: (within a replica, across replicas)}.

    Each answer is "same" or "different".
    """
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
# 1. For the first question, look at the tensor's shape. Does every rank of a replica hold the full tensor, or does each rank hold its own shard? If all ranks hold the full tensor, what goes wrong when they drop different elements of it? If each rank holds its own shard, what goes wrong when all ranks drop the elements at the same positions?
# 2. For the second question, remember that the replicas are copies of *one* set of weights, but they train on different texts. Which of the eight draws determine initial weights? Which of them are different for every text?
# 3. The draws for `norm`, `embedding`, `after_g`, `batch`, and `token` affect tensors that have to be identical on the two ranks of a replica, so these ranks have to draw the same numbers. Only `norm` and `shard` determine initial weights, which have to be the same in both replicas. All the other draws have to differ between the replicas.

# %% check="9.1"
check("9.1", same_or_different)

# %% [markdown]
# In the next cell, four ranks start from the same seed, and each rank draws a mask for `after_g` and a mask for `inside`. The filled elements are kept.


# %%
def two_masks():
    torch.manual_seed(1)
    return [F.dropout(torch.ones(6, n, device=device()), 1 / 3) for n in (16, 8)]


after_g, inside = zip(*launch(two_masks, 4), strict=True)
masks = {
    "after g, each rank has all of [b, s, h]": after_g,
    "inside the MLP, each rank has its own [b, s, m/p]": inside,
}
viz.masks(masks)

# %% [markdown]
# The masks for `after_g` are right. After g, all four ranks have the same tensor, so they have to drop the same elements to keep their copies equal.
#
# The masks for `inside` are wrong. Inside the MLP, the ranks have different columns of one large tensor, and a single process would draw a separate random number for each element of this tensor. With a shared seed, all four ranks use the same numbers, so the large tensor contains only a quarter as many distinct random numbers. As a result, the fraction of elements that survive dropout varies too much from token to token. Its standard deviation is $\sqrt{p}$ times as large as it should be. If every rank had its own seed, the masks for `inside` would be right, but the masks for `after_g` would be wrong.
#
# ## Three streams
#
# So a rank needs several **streams** of random numbers, and each stream starts from its own seed.
#
# | random stream | what's drawn from it | which ranks draw the same numbers |
# |---|---|---|
# | `init` | initial values, as in exercise 4.4 | all ranks of all replicas |
# | `replicated` | masks for tensors that every rank has in full | the ranks of one replica (the numbers don't depend on how many ranks there are) |
# | `sharded` | masks for a rank's own shard of a tensor | no two ranks |
#
# In exercise 9.1, the ranks of a replica had to draw different initial values for `shard`, because each rank drew only its own shard. With the stream `init`, each rank draws the full weight and keeps only its own shard, as in exercise 4.4, so all ranks can draw the same numbers.
#
# How should you choose the seeds? Suppose you use `seed + 1` for the stream `replicated` and `seed + rank` for the stream `sharded`. On rank 1, these two seeds are the same, so rank 1 would draw the same numbers from both streams. The next cell shows a different trap:

# %%
generators = [torch.Generator().manual_seed(seed) for seed in (7, 7 + 2**32)]
torch.stack([torch.rand(4, generator=generator) for generator in generators])


# %% [markdown]
# On a CPU, torch only uses the last 32 bits of a seed. The two seeds in this cell differ only in a higher bit, so both generators return the same numbers.

# %% [markdown] task="9.2" title="Seeds that never meet" difficulty=2 minutes=8
# Return the seeds of a rank's three random streams. According to the table above, some streams have to draw the same numbers, so they need the same seed. All other streams need different seeds. Your function has to work for every nonnegative `seed`, with up to 1000 replicas and up to 1000 ranks per replica. (A hash function wouldn't work, because among a million hashes, some have the same last 32 bits.)


# %% exercise="9.2"
def stream_seeds(seed, rank, world_size, copy=0):
    """Return this rank's seeds, {"init": int, "replicated": int, "sharded": int}.

    None of them is negative.

    seed: the seed of the run
    rank: this rank's number in its replica, 0 to world_size - 1
    copy: the replica's number
    """
    ### BEGIN SOLUTION
    # 2000 seeds for each replica, which uses one of them, and one for each rank
    first = seed + 1 + 2000 * copy
    return {"init": seed, "replicated": first, "sharded": first + 1 + rank}
    ### END SOLUTION


# %% [markdown] hints="9.2"
# 1. Draw a number line, and mark all the seeds that the ranks of replica 0 use for their random streams. What's the smallest seed that replica 1 can use without a collision?
# 2. For the `init` stream, every rank in every replica needs the same seed. For the `replicated` stream, the seed depends on the replica but not on the rank. For the `sharded` stream, the seed depends on both the replica and the rank, so reserve enough seeds for the 1000 ranks of each replica.
# 3. With `first = seed + 1 + 2000 * copy`, you can use `seed` for `init`, `first` for `replicated`, and `first + 1 + rank` for `sharded`.

# %% check="9.2"
check("9.2", stream_seeds)

# %%
viz.table([{"replica": copy, "rank": rank} | stream_seeds(1234, rank, 2, copy=copy)
           for copy in (0, 1) for rank in (0, 1)],
          title="your seeds for two replicas on two ranks each")  # fmt: skip

# %% [markdown]
# ## Swap the state
#
# You can't tell `F.dropout` which random stream to use, because it always draws from torch's default generator. So before dropout, you have to copy the stream's state into the default generator, and after dropout, you have to store the stream's new state and restore the default generator's previous state. We'll call the state of the default generator torch's **current state**. It's just a tensor of bytes. The two functions below read and write it.


# %% tags=["setup"]
def get_state():
    """Return a copy of the state of torch's generator on this rank's device."""
    on_gpu = device().type == "cuda"
    return torch.cuda.get_rng_state() if on_gpu else torch.get_rng_state()


def set_state(state):
    """Put a state that `get_state` returned into torch's generator."""
    on_gpu = device().type == "cuda"
    torch.cuda.set_rng_state(state) if on_gpu else torch.set_rng_state(state)


# %% [markdown]
# A **tracker** stores the states of several random streams. Its method `fork` makes torch draw from one of these streams inside a `with` block:
#
# ```python
# with tracker.fork("sharded"):
#     y = F.dropout(y, 0.1)  # draws from the stream "sharded"
# x = torch.rand(3)          # draws from the current state, as if nothing had happened
# ```
#
# When you fork the stream "sharded" again, it has to continue where it stopped. If the stream started from its seed again, dropout would draw the same mask in every training step.
#
# To write a method like `fork`, decorate a function that yields once with `contextlib.contextmanager`. The code before the `yield` runs when the `with` block begins, and the code after the `yield` runs when the block ends. If the block raises an exception, Python raises that exception at the `yield`.

# %% [markdown] task="9.3" title="A tracker of random states" difficulty=3 minutes=13
# Write the tracker using `get_state` and `set_state`. To get the initial state of a stream, create a separate generator, `torch.Generator(device())`, and call its methods `manual_seed(seed)` and `get_state()`.
#
# - `add` adds a stream. If its name or its seed is already taken, `add` raises a `ValueError` and leaves the tracker unchanged. Once a seed has been used, it stays taken. Adding a stream must not change the numbers that torch draws from its default generator.
#
# - `fork` takes the name of a stream and raises an error if there's no such stream. At the end of the `with` block, `fork` stores the new state of the stream and restores torch's previous state, even if the block raises an exception. The exception must still reach the caller. You must be able to nest forks of different streams.
#
# - `state_dict` returns the current states of all streams. These returned states must not change when the tracker's states change later. `load_state_dict` takes such states, and from then on, each stream continues from its loaded state. It also works in a different tracker with the same stream names. Loading doesn't free any seeds that were already taken.


# %% exercise="9.3"
class RNGTracker:
    """Stores the states of named streams. `fork` makes torch draw from one of them."""

    def __init__(self):
        ### BEGIN SOLUTION
        self.states = {}
        self.seeds = set()
        ### END SOLUTION

    def add(self, name, seed):
        """Add a stream that starts from `seed`.

        Raises ValueError if the name or the seed is taken.
        """
        ### BEGIN SOLUTION
        if name in self.states or seed in self.seeds:
            raise ValueError(
                f"the name {name!r} or the seed {seed} is taken, "
                f"the streams are {sorted(self.states)}"
            )
        self.states[name] = torch.Generator(device()).manual_seed(seed).get_state()
        self.seeds.add(seed)
        ### END SOLUTION

    @contextmanager
    def fork(self, name="sharded"):
        """Inside the `with` block, torch draws from the stream `name`.

        The stream continues where it stopped.
        """
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
        """Return {name: state} with the current state of every stream."""
        ### BEGIN SOLUTION
        return dict(self.states)
        ### END SOLUTION

    def load_state_dict(self, state):
        """Continue from the states that `state_dict` returned."""
        ### BEGIN SOLUTION
        self.states = dict(state)
        ### END SOLUTION


# %% [markdown] hints="9.3"
# 1. When you write a state into torch's generator, you overwrite its previous state. What do you have to save first, and where? While `fork` waits at its `yield`, the code in the caller's `with` block runs. Which lines of `fork` have to run even if that code raises an exception?
# 2. In `add`, create a generator with `torch.Generator(device()).manual_seed(seed)` and store its `.get_state()`. In `fork`, save torch's current state in a local variable, write the stream's state into torch's generator, and `yield`. After the `yield`, store the stream's new state, and restore torch's state from the local variable. Put these last two steps in a `finally` clause. You don't have to copy any states, because `get_state` returns a new tensor each time.
# 3. In `fork`, start with `outside = get_state()` and `set_state(self.states[name])`, and put the `yield` into a `try` block. In its `finally` block, write `self.states[name] = get_state()` and `set_state(outside)`. In `state_dict`, return a copy of the dictionary, `dict(self.states)`. In `load_state_dict`, store a copy of its argument, too.

# %% check="9.3"
check("9.3", RNGTracker)


# %% [markdown]
# Let's try your tracker and your seeds on two ranks. In each of two steps, every rank draws three dropout masks: one from torch's current state, one from the stream "replicated", and one from the stream "sharded". Between the two steps, rank 0 draws an extra random number for a log message.
#
# **Predict.** Which of the three masks are the same on both ranks in step 2? (Write `True` or `False` for each of them.)

# %% predict="9.b"
predict("9.b", current=False, replicated=True, sharded=False)


# %%
def make_tracker(seed, copy=0):
    """Return this rank's tracker with two streams for dropout.

    Torch's generator gets the seed for the initial values.
    """
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
                mask = F.dropout(torch.ones(2, 16, device=device()), 1 / 3)
            masks[f"step {step}, {name}"] = mask
        if dist.get_rank() == 0:
            torch.rand(1, device=device())  # for a log message
    return masks


ranks = launch(two_steps, 2)
viz.masks({name: [rank[name] for rank in ranks] for name in ranks[0]})

# %% [markdown]
# That's why we need a separate stream "replicated". Torch's default generator also starts from the same seed on all ranks, but sooner or later, some code draws from it on just one of them.

# %% [markdown]
# ## Dropout in your block
#
# Now let's add dropout to your transformer block from chapter 06, in four places. Two of them are between f and g, where each rank has its own attention heads and its own columns of the MLP. The other two come after g, where every rank has the full tensor.


# %% tags=["setup"]
def attention_weights(q, k):  # q, k [b, n, s, d] -> the causal weights [b, n, s, s]
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    later = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(dim=-1)


class Block(nn.Module):
    """The block of chapter 06 with dropout in four places.

    x [b, s, h], replicated -> [b, s, h], replicated
    """

    def __init__(
        self, hidden_size, num_heads, rate, tracker, *,
        group=None, device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        h, options = hidden_size, {"group": group, "device": device, "dtype": dtype}
        self.qkv = ColumnParallelLinear(h, 3 * h, stride=3, **options)
        self.out = RowParallelLinear(h, h, **options)
        self.up = ColumnParallelLinear(h, 4 * h, **options)
        self.down = RowParallelLinear(4 * h, h, **options)
        self.head_dim, self.rate, self.tracker = h // num_heads, rate, tracker

    def drop(self, y):
        return F.dropout(y, self.rate, self.training)

    def heads(self, x):  # [b, s, h] -> [b, s, h/p]
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
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
# We'll train this block on two ranks in three ways. The first run uses the right streams. The second run draws all four masks from the stream "sharded", and the third run draws all four masks from the stream "replicated".


# %%
HIDDEN, HEADS, CONTEXT, BATCH, RATE = 64, 4, 32, 16, 0.2


class ByteModel(nn.Module):
    def __init__(self, tracker):
        super().__init__()
        options = {"device": device(), "dtype": torch.float64}
        self.embedding = nn.Embedding(corpus.VOCABULARY, HIDDEN, **options)
        self.position = nn.Embedding(CONTEXT, HIDDEN, **options)
        self.block = Block(HIDDEN, HEADS, RATE, tracker, **options)
        self.norm = nn.LayerNorm(HIDDEN, **options)
        self.head = nn.Linear(HIDDEN, corpus.VOCABULARY, **options)

    def forward(self, tokens):  # [b, s] bytes -> [b, s, 256]
        x = self.embedding(tokens) + self.position.weight
        return self.head(self.norm(self.block(x)))


class OnlyOne:
    """A tracker that forks the same stream for every name."""

    def __init__(self, tracker, name):
        self.fork = lambda _: tracker.fork(name)


def replica_drift(module):
    """Return the largest difference between copies of a parameter (exercise 5.3)."""
    worst = 0.0
    for parameter in module.parameters():
        if hasattr(parameter, "tensor_parallel"):
            continue
        largest, smallest = parameter.detach().clone(), parameter.detach().clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        worst = max(worst, (largest - smallest).max().item())
    return worst


def train(only=None):
    torch.set_num_threads(1)
    tracker = make_tracker(2)
    model = ByteModel(OnlyOne(tracker, only) if only else tracker)
    losses, kept = [], []

    def keep_share(module, inputs):  # of each token's columns inside the MLP
        kept.append((inputs[0] != 0).double().mean(-1))

    model.block.down.register_forward_pre_hook(keep_share)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    for inputs, targets in corpus.byte_batches(text, CONTEXT, BATCH, 40, seed=1):
        logits, targets = model(inputs.to(device())), targets.to(device())
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "drift": replica_drift(model), "kept": torch.stack(kept)}


# %% [markdown]
# **Predict.** Compare the second and third runs. Which stream, "sharded" or "replicated", makes the two ranks report different losses in the first step? Which one makes their replicated parameters drift apart? And which one leaves both the losses and the replicated parameters looking perfectly healthy?

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
    kept = (ranks[0]["kept"] + ranks[1]["kept"]) / 2  # of all 4h columns, per token
    seen = {
        "first loss, rank 0": f"{ranks[0]['losses'][0]:.4f}",
        "first loss, rank 1": f"{ranks[1]['losses'][0]:.4f}",
        "last loss": f"{ranks[0]['losses'][-1]:.3f}",
        "drift": f"{ranks[0]['drift']:.2g}",
        "std of the share kept": f"{kept.std():.4f}",
    }
    rows.append({"masks": name} | seen)
std = math.sqrt(RATE * (1 - RATE) / (4 * HIDDEN))
viz.table(rows, title=f"with independent masks, the std is {std:.4f}")

# %% [markdown]
# If all masks come from the stream "sharded", the two ranks drop different elements of the same tensor after g. From then on, they compute with different tensors, so they report different losses in the very first step, and their replicated parameters drift apart. That's bad, but at least you can see it in the table.
#
# If all masks come from the stream "replicated", there's *nothing* suspicious to see. The ranks agree perfectly, and the final loss is even slightly *lower* than with the right streams. (We tried six seeds, and the loss was lower for five of them.) Only the masks themselves reveal the mistake. The fraction of elements that survive dropout varies $\sqrt{2}$ times as much as it should.
#
# ## Fix it
#
# Megatron-Core runs its transformer blocks inside two context managers. One of them selects a stream of the tracker, and the other one switches to 8-bit precision. In June 2023, a developer combined the two in one `with` statement and got a single word wrong. A user reported the bug in July 2024 (NVIDIA/Megatron-LM issue 903). In October 2024, a maintainer wrote that nobody had studied how the bug affected training, because many of the team's own models don't use dropout (issue 1256). The bug only affected models that use sequence parallelism (chapter 12).
#
# The next cell contains your block with the same bug. Your tracker and your seeds are fine, and yet both ranks use the same masks for their own heads and their own MLP columns.

# %% [markdown] task="9.4" title="Fix the block that forgot its streams" difficulty=2 minutes=8
# Find out where the random numbers for the masks really come from, and why. Then fix `forward`. The block's four linear layers have to run inside the context manager that `self.precision()` returns, for example `torch.autocast("cuda", torch.bfloat16)`. By default, this context manager does nothing.
#
# In eval mode, the block must not drop any elements. The check runs the block several times, once with an impossible dropout rate of 2, so that `F.dropout` raises an exception.


# %% exercise="9.4"
class MixedPrecisionBlock(Block):
    """The block above, with linear layers that run in the context `precision()`."""

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
# 1. Add a `print` to your tracker's `fork` before the `yield`, and run the block on one rank. How many times does `fork` print something? What does Python do with the object that follows the word `with`?
# 2. What's the value of `3 and 5`? If the first operand of `and` is true, the value of the expression is the second operand. So which of its two context managers does the statement `with a and b:` enter?
# 3. The statement `with a, b:` enters both context managers. In `forward`, replace each `and` with a comma.

# %% check="9.4"
check("9.4", MixedPrecisionBlock)

# %% [markdown]
# Python treats these context managers as true, so the value of `a and b` is simply `b`. The `with` statement never enters the tracker's fork, and Python doesn't complain. As a result, all four masks are drawn from torch's default generator, which has the same state on all ranks.
#
# ## Run it again
#
# The backward pass needs many of the tensors computed by the forward pass. With **activation checkpointing**, a block stores only its input. When the backward pass reaches the block, the block's forward pass runs a second time. This second run is called **recomputation**.
#
# Does the recomputation drop the same elements as the first run? With torch's default generator, it does, because `torch.utils.checkpoint` restores the generator's state before the recomputation. But what if dropout draws from one of your tracker's streams? Let's try both with $y = \mathrm{dropout}(x)^2$ at $x = 1$, where the correct gradient is $2\,\mathrm{dropout}(x)^2 = 2y$.
#
# **Predict.** The dropout rate is 0.5. What fraction of the gradient's elements is correct if dropout draws from torch's current state? What fraction is correct if dropout draws from a stream of your tracker? (Write numbers between 0 and 1.)

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
        name: launch(right_gradients, 2, args=(name, run_again))
        for name in ("current state", "replicated", "sharded")
    }
    return viz.table([{"dropout draws from": name, "right on rank 0": f"{first:.1%}",
                       "right on rank 1": f"{second:.1%}"}
                      for name, (first, second) in shares.items()])  # fmt: skip


table_of(torchs_own)

# %% [markdown]
# With streams from your tracker, half of the gradient's elements are wrong. Torch doesn't know about your tracker, so in the recomputation, dropout draws the stream's next numbers instead of repeating the numbers of the first run. Whenever an element of $x$ is kept in one run and dropped in the other, its gradient is wrong. You wouldn't notice this bug at first, because the forward pass is still correct, and so is the loss of the first step.
#
# To solve this problem, use the argument `context_fn` of `torch_checkpoint`. You pass it a function that takes no arguments and returns two context managers. Torch enters the first context manager for the first run and the second one for the recomputation. If you don't need one of them, use `nullcontext()`, a context manager that does nothing.

# %% [markdown] task="9.5" title="Run it again with the same dropout" difficulty=4 minutes=13
# Write `checkpoint` using `torch_checkpoint` and the tracker's methods `state_dict()` and `load_state_dict(state)` from exercise 9.3. When a function is recomputed, it has to draw the same numbers as in *its own* first run, so you have to restore the states that the streams had at that time. After the recomputation, the states of all streams must be the same as if the function had run only once.
#
# Your function should also work if a model checkpoints several blocks one after another, and if the weights of a block need gradients but its input `x` doesn't.


# %% exercise="9.5"
def checkpoint(function, *args, tracker):
    """Return function(*args), but store only its inputs.

    The backward pass runs it again, with the same dropout.
    """
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

    def contexts():
        return nullcontext(), replay()

    return torch_checkpoint(function, *args, use_reentrant=False, context_fn=contexts)
    ### END SOLUTION


# %% [markdown] hints="9.5"
# 1. The recomputation begins long after your function `checkpoint` has returned. Which states do the tracker's streams need at the beginning of the recomputation? When is the last chance to save these states?
# 2. Call `tracker.state_dict()` before the first run. Then write a context manager `replay` for the recomputation. When the recomputation begins, `replay` saves the current states of the streams and loads the states from before the first run. When the recomputation ends, `replay` loads the states that it saved at the beginning.
# 3. Decorate `replay` with `@contextmanager`. First save the current states with `now = tracker.state_dict()`, and then call `tracker.load_state_dict(before_first_run)`. Put the `yield` into a `try` block, and restore the states with `tracker.load_state_dict(now)` in its `finally` block. Return `torch_checkpoint(function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), replay()))`.

# %% check="9.5"
check("9.5", checkpoint)

# %%
table_of(lambda function, x, tracker: checkpoint(function, x, tracker=tracker))

# %% [markdown]
# In the animation below, each row of boxes is a random stream, each box is one random number, and dropout reads the numbers from left to right.
#
# ![An animation that shows, for each of two ranks, the random numbers of torch's default generator and of the streams "replicated" and "sharded". Each time dropout runs, it reads the next four numbers of a stream. Both ranks have the same numbers in the stream "replicated" and different numbers in the stream "sharded". When rank 0 draws an extra number for a log message, only its default generator advances. When torch's own checkpointing recomputes step 2, the streams continue with new numbers, so the masks are wrong. In each stream, a flag marks the position where step 2 started. Your own checkpointing goes back to the flag before it recomputes step 2, so the masks are the same as in the first run.](pictures/tapes.svg)
#
# <details><summary>All frames, one by one</summary>
#
# ![The same animation as numbered stills](pictures/tapes_frames.svg)
#
# </details>
#
# How much memory does activation checkpointing save, and how much communication does it add? Let's measure both with your block from exercise 9.4.
#
# **Predict.** On two ranks, your block runs two all-reduces in each pass. If the block is checkpointed, how many all-reduces run in the backward pass?

# %% predict="9.e"
predict("9.e", backward=4)


# %%
def one_pass(checkpointed):
    tracker = make_tracker(1)
    block = MixedPrecisionBlock(HIDDEN, HEADS, RATE, tracker, device=device())
    shape = (BATCH, CONTEXT, HIDDEN)  # [b, s, h]
    x = torch.randn(shape, device=device(), requires_grad=True)
    with saved_for_backward(block) as kept, record() as forward:
        out = checkpoint(block, x, tracker=tracker) if checkpointed else block(x)
    with record() as backward:
        out.sum().backward()
    return {
        "KiB kept for the backward pass": kept.bytes // 1024,
        "all-reduces forward": sum(total.calls for total in forward.totals().values()),
        "backward": sum(total.calls for total in backward.totals().values()),
    }


viz.table([{"p": p, "checkpointed": on} | launch(one_pass, p, args=(on,))[0]
           for p in (1, 2, 4) for on in (False, True)])  # fmt: skip

# %% [markdown]
# A checkpointed block stores only its input `x`, which has the same size on any number of ranks. The price is a second forward pass. Both g's run again in this forward pass, so the backward pass contains two more all-reduces.

# %%
symptoms(9)

# %% [markdown]
# ## In the wild
#
# <details><summary>Going deeper: Megatron-Core, PyTorch, checkpoints, and what "the same model" means</summary>
#
# - **Megatron-Core** has a tracker like yours in `megatron/core/tensor_parallel/random.py`. It's called `CudaRNGStatesTracker`, and it also refuses names and seeds that are already taken. Instead of a stream "replicated", Megatron-Core uses torch's default generator. The seed of the stream for sharded tensors is `seed + 2718 + rank`, and a comment says that 2718 is "just for fun". According to the docstring, all replicas draw the same numbers from that stream, so they use the same mask even though they train on different texts. A single process would use a different mask for each text.
#
# - **Text generation.** In OpenAI's reference implementation of gpt-oss, each rank samples the next token on its own. If one rank ever draws an extra random number, the ranks generate different texts, just like the two ranks at the beginning of this chapter (openai/gpt-oss issue 270, August 2026).
#
# - **Initial values.** In chapter 04, every rank drew the full weight and kept only its own shard. GPT-3's embedding table has 51,200 padded rows of 12,288 elements, so every rank would need 2.52 GB for the full table in float32. Megatron-Core uses a cheaper method, which you met as `shard` in exercise 9.1. Each rank draws only its own shard, inside a fork of the tracker, and this shard takes up 0.31 GB on eight ranks. (The standard deviation of the elements doesn't depend on the shard's shape.) The downside is that the initial weights depend on the number of ranks.
#
# - **Checkpoints of a training run** must contain the states of *every* rank's tracker. In August 2026, a developer found that Megatron-LM saved some of the streams on a single rank and then loaded these states on many other ranks. After a training run with experts was resumed on 256 ranks, 252 of them had the wrong state for the stream that the experts draw from (NVIDIA/Megatron-LM pull request 6858).
#
# - **Activation checkpointing** had a similar bug in the training library OLMo-core, which didn't restore the state of torch's default generator before the recomputation. After 150 steps, a model with dropout and checkpointing had a loss of 2.495 instead of 2.195 (allenai/OLMo-core pull request 828, August 2026).
#
# - **PyTorch's DTensor** doesn't need several random streams, but it needs a GPU. A GPU's generator computes its random numbers from a seed and an offset, so each rank can jump directly to the offset of its own shard. A CPU's generator can't do that, so the class `OffsetBasedRNGTracker` raises an error on a CPU.
#
# - **What does "the same model" mean?** If a model only uses dropout after g, your training runs on 1, 2, and 4 ranks agree down to the last few digits. If the model also uses dropout between f and g, the three training runs differ, although nothing is wrong. The masks that two ranks draw for their shards aren't the ones a single rank would draw for the full tensor, but they're just as random.
#
# </details>
#
# ## Your library so far
#
# Your library now draws the right random numbers on every rank. The table below ends with a command that trains your block with dropout and activation checkpointing on two processes.

# %%
from tplab.course import library

library(9)

# %% [markdown]
# You've now built every part of a GPT. How many lines of code does it take to put these parts together? And how do you arrange them so that the ranks never send anything twice?
