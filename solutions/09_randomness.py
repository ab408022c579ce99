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
# **The question.** A model uses random numbers in two places: for its first values and for its dropout. How do `p` ranks draw them so that they still train one model, and the same one for every `p`?
#
# **What you will have built.** First values that each rank draws for its own shard; seeds that never meet; a tracker of named random states with `fork`, as in Megatron; a block that drops in the right way in two kinds of places; and activation checkpointing that drops
# the same places when it runs the block a second time.
#
# Symbols: `b` batch, `s` sequence length, `h` hidden size, `m` the inner size of the MLP, `a` attention heads, `p` number of ranks. **f** and **g** are the operators of chapter 03. About 90 minutes.

# %% tags=["setup"]
import time
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
from tplab.tensor import ColumnParallelLinear, ParallelAttention, RowParallelLinear, load_full_state_dict, rng


def get_state():
    """The state of torch's generator on this rank's device: of its GPU, if it has one, else of the CPU."""
    return torch.cuda.get_rng_state() if device().type == "cuda" else torch.get_rng_state()


def set_state(state):
    """Put a state that `get_state` returned into torch's generator."""
    if device().type == "cuda":
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


# %% [markdown]
# This is where the chapter leads. Four ranks have dropped a third of two tensors, with the module `tplab.tensor.rng` in which everything below is ready made. Filled places are kept, white ones are dropped. The first tensor is the same on every rank, and all ranks drop the same places of it. Of the second one each rank has
# its own columns, and drops its own places.


# %%
def drop_two_tensors():
    tracker = rng.seed_all(1)
    x = torch.ones(6, 16, device=device())
    return {sharded: rng.dropout(x, 1 / 3, sharded=sharded, rng=tracker) for sharded in (False, True)}


results = launch(drop_two_tensors, 4)
viz.masks(
    {
        "replicated: the residual stream [b, s, h]": [kept[False] for kept in results],
        "sharded: inside the MLP [b, s, m/p]": [kept[True] for kept in results],
    },
    title="what four ranks keep",
)

# %% [markdown]
# ## 1 · First values
#
# Chapter 04 filled a shard from a **master weight**: every rank draws the whole weight from the same seed and keeps its part. The weight is then the same for every `p`. The price is that every rank holds a whole weight for a moment, and draws `p` times as many numbers as it needs. For the output layer of a large
# model that is gigabytes.
#
# The cheap way is that each rank draws its shard alone. It has two traps. Take a weight of `[4096, 1024]` and Xavier's rule: normally distributed numbers with the **standard deviation** (std)
#
# $$\sigma = \sqrt{\frac{2}{\text{in} + \text{out}}} = \sqrt{\frac{2}{1024 + 4096}} = 0.0198$$
#
# **Predict.** Four ranks call `torch.manual_seed(1)`, then `nn.init.xavier_normal_` on their shards of `[1024, 1024]`. Which standard deviation do the shards have? Are they all equal?

# %% predict="9.a"
predict("9.a", std=0.03125, all_equal=True)


# %%
def draw_directly():
    p = dist.get_world_size()
    torch.manual_seed(1)
    return nn.init.xavier_normal_(torch.empty(4096 // p, 1024))  # [out/p, in]


rows = []
for p in (1, 2, 4):
    shards = launch(draw_directly, p)
    rows.append(
        {
            "p": p,
            "the std should be": f"{(2 / (4096 + 1024)) ** 0.5:.4f}",
            "the std is": f"{torch.cat(list(shards)).std():.4f}",
            "largest difference between two shards": max((shard - shards[0]).abs().max().item() for shard in shards),
        }
    )
viz.table(rows, title="xavier_normal_ on the shards, one seed for all ranks")

# %% [markdown]
# Both traps at once. The function takes the number of rows from the tensor that it is handed, so the numbers become larger with `p`. And a generator that starts from the same seed draws the same numbers in every process, so all shards are one. No error is raised, and the model trains. Section 8 looks at what is lost.
#
# The second trap has a simple way out: a **generator** of one's own. `torch.Generator().manual_seed(n)` makes one, and torch's functions for first values take it as `generator=`. It has its own state, and drawing from it leaves torch's own generator, the **current random state**, as it is. That matters: the parameters that are
# replicated, a LayerNorm or a bias, are drawn from the current state, and they must come out equal on all ranks.


# %% [markdown] task="9.1" title="A shard drawn by its own rank" difficulty=2 minutes=10
# Draw this rank's shard of a weight whose first values follow Xavier's rule, without anybody making the whole weight.
#
# - The numbers come from a generator with the seed `seed + rank`, where the rank is counted within `group`; float32, on the CPU. If you call `draw_shard` again with the same arguments, it returns the same numbers.
# - The standard deviation is that of the *whole* weight.
# - torch's current random state is left as it was, and nothing is sent.


# %% exercise="9.1"
def draw_shard(shape, dim, seed, group=None):
    """This rank's shard of a weight with Xavier-normal first values.

    in:  shape [out, in] of the whole weight; dim, along which it is cut, 0 or 1
    out: [out/p, in] or [out, in/p]
    """
    ### BEGIN SOLUTION
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    std = (2 / sum(shape)) ** 0.5  # of the whole weight
    shard_shape = list(shape)
    shard_shape[dim] //= p  # [out/p, in] or [out, in/p]
    generator = torch.Generator().manual_seed(seed + rank)
    return torch.empty(shard_shape).normal_(0.0, std, generator=generator)
    ### END SOLUTION


# %% [markdown] hints="9.1"
# 1. Three things decide about the numbers: the shape, the standard deviation and the generator. Which of them belong to the shard, and which to the whole weight?
# 2. The shape is that of the shard, `shape[dim] // p` along `dim`. The standard deviation comes from `shape`. The generator is this rank's: `torch.Generator().manual_seed(seed + rank)`.
# 3. `torch.empty(shard_shape).normal_(0.0, (2 / sum(shape)) ** 0.5, generator=generator)`, with the rank and `p` from `dist.get_rank(group)` and `dist.get_world_size(group)`.

# %% check="9.1"
check("9.1", draw_shard)


# %% [markdown]
# The same table with your function, and the bytes that each rank had in its hands for it:


# %%
def draw_alone():
    return draw_shard((4096, 1024), 0, seed=1)


rows = []
for p in (1, 2, 4):
    shards = launch(draw_alone, p)
    others = [(shards[i] - shards[0]).abs().max().item() for i in range(1, p)]
    rows.append(
        {
            "p": p,
            "the std is": f"{torch.cat(list(shards)).std():.4f}",
            "two shards differ by up to": f"{min(others):.2f}" if others else None,
            "MB, by a master weight": f"{4 * 4096 * 1024 / 1e6:.1f}",
            "MB, drawn alone": f"{4 * shards[0].numel() / 1e6:.1f}",
        }
    )
viz.table(rows, title="each rank draws its own shard")

# %% [markdown]
# The price is that the weight depends on `p`: it is another sample of the same distribution. With a master weight you can compare runs with different `p` number by number, which is why this course uses it in its tests. In `tplab`, `per_rank_init=True` on a parallel layer chooses the cheap way.
#
# ## 2 · Two kinds of places
#
# **Dropout** with rate `r` sets each number to zero with probability `r`, and divides the others by `1 - r`, so that the mean stays what it was. Which numbers it drops is the **mask**. In a tensor-parallel transformer dropout stands in two kinds of places:
#
# - Where every rank holds the same tensor: the **residual stream** `[b, s, h]`, to which attention and MLP add their output after g. If one rank drops a number there and another one does not, they go on with different tensors, and are no longer one model.
# - Where each rank has a part of its own: its heads' attention probabilities `[b, a/p, s, s]`, its columns inside the MLP `[b, s, m/p]`. One process would draw a mask of `[b, s, m]` there, with another random number for each place. So each rank has to draw numbers that no other rank draws.
#
# The obvious program seeds every rank alike and calls `F.dropout` everywhere. That is right for the first kind of place. What does it do in the second?
#
# **Predict.** `m = 4096` and `p = 4`, so each rank has 1024 of the places inside the MLP. All ranks draw from the same state. How many of the 4096 are dropped or kept independently of all others? What is the correlation between the masks of ranks 0 and 1? (1: they are the same; 0: one tells nothing about the other.)

# %% predict="9.b"
predict("9.b", independent=1024, correlation=1)


# %%
def inner_masks(seeds, p, tokens=200, m=4096):
    """What a rank keeps inside the MLP, [tokens, m/p]: a plain dropout after a plain seed."""
    torch.manual_seed(1 + dist.get_rank() if seeds == "one for each rank" else 1)
    return F.dropout(torch.ones(tokens, m // p, device=device()), 0.5) > 0


SEEDS = ("the same on all ranks", "one for each rank")
rows = []
for p in (2, 4):
    for seeds in SEEDS:
        masks = launch(inner_masks, p, args=(seeds, p))
        correlation = torch.corrcoef(torch.stack([mask.flatten().double() for mask in masks]))[0, 1].item()
        kept = torch.cat(list(masks), 1).double().mean(1)  # [tokens]: the part of the 4096 places that is kept
        rows.append(
            {
                "p": p,
                "seeds": seeds,
                "correlation of ranks 0 and 1": f"{correlation:.3f}",
                "kept of a token, mean": f"{kept.mean():.3f}",
                "its std": f"{kept.std():.4f}",
                "std with 4096 independent places": f"{(0.25 / 4096) ** 0.5:.4f}",
            }
        )
viz.table(rows, title="dropout with rate 0.5 inside an MLP with m = 4096, 200 tokens")

# %% [markdown]
# With the same seed the masks of all ranks are one mask. A token that happens to lose many places on rank 0 loses as many on every other rank, so the part that is kept varies as if there were only `4096/p` places: its standard deviation is $\sqrt{p}$ times too large. The noise that the model has to learn with is another one
# for each `p`. Turn the control to see the masks themselves.


# %% tags=["explore"]
def first_mask(how):
    torch.manual_seed(1 + dist.get_rank() if how == "one seed for each rank" else 1)
    return F.dropout(torch.ones(6, 16, device=device()), 1 / 3)


def show_masks(p, seeds):
    kept = list(launch(first_mask, p, args=(seeds,)))
    return viz.masks({f"after {seeds}": kept}, title=f"what {p} ranks keep of a tensor, p = {p}")


viz.explore(show_masks, p=(4, 2, 1), seeds=["the same seed for all ranks", "one seed for each rank"])

# %% [markdown]
# Neither of the two is right for a whole model: with one seed for all ranks the residual stream is in order and the inside of the MLP is not, with a seed for each rank it is the other way round. A rank needs *both*: a stream of random numbers that it shares with the others, and one of its own. And a third one that
# shares with the others, for the first values.
#
# ## 3 · Seeds
#
# So each rank has three **streams** of random numbers, each from a seed of its own:
#
# | stream | what is drawn from it | alike on |
# |---|---|---|
# | `init` | first values, by a master weight | all ranks of all copies |
# | `replicated` | dropout of the residual stream | all ranks of one copy, for every `p` |
# | `sharded` | dropout of what is split over the ranks | nobody: each rank its own |
#
# A **copy** here is a whole model. In a large run several copies, each on `p` ranks, work on different data (chapter 00 called it data parallelism). They start from the same first values, and drop other places.
#
# It is easy to make two streams meet: `seed + rank` for one of them, and `seed + 1` for another one, and rank 1 draws in both the same numbers. One more fact: on the CPU, torch looks only at the last 32 bits of a seed.

# %%
generators = [torch.Generator().manual_seed(seed) for seed in (7, 7 + 2**32)]
torch.stack([torch.rand(4, generator=generator) for generator in generators])


# %% [markdown] task="9.2" title="The seeds of the streams" difficulty=2 minutes=10
# Return the seeds of this rank's three streams. Any scheme will do that keeps to the table above, and in which no two *different* streams have the same seed: not on any ranks, not of any copies, with up to 1000 ranks in a copy and up to 1000 copies, whatever the run's `seed` is, from 0 on. That rules out seeds from a hash, because among a million of them, some have the same last 32 bits.


# %% exercise="9.2"
def stream_seeds(seed, rank, world_size, copy=0):
    """Where the streams of this rank start from.

    in:  seed of the run; rank, 0 to p - 1, and p, within this copy of the model; copy 0, 1, ...
    out: {"init": int, "replicated": int, "sharded": int}, not negative
    """
    ### BEGIN SOLUTION
    first = seed + 1 + 2000 * copy  # 2000 seeds for each copy, of which it uses one and p more
    return {"init": seed, "replicated": first, "sharded": first + 1 + rank}
    ### END SOLUTION


# %% [markdown] hints="9.2"
# 1. Draw a line of whole numbers. Where on it lie the seeds of all ranks of copy 0? Where may copy 1 begin?
# 2. `init` contains neither rank nor copy. `replicated` contains the copy. `sharded` contains both. Leave room for 1000 ranks between one copy and the next.
# 3. `first = seed + 1 + 2000 * copy`; then `init` is `seed`, `replicated` is `first`, `sharded` is `first + 1 + rank`.

# %% check="9.2"
check("9.2", stream_seeds)

# %% [markdown]
# Your seeds, for two copies on two ranks each:

# %%
viz.table(
    [{"copy": copy, "rank": rank} | stream_seeds(1234, rank, 2, copy=copy) for copy in (0, 1) for rank in (0, 1)],
    title="stream_seeds(1234, rank, 2, copy)",
)

# %% [markdown]
# ## 4 · A tracker of random states
#
# `F.dropout` has no argument `generator=`. It draws from the current state, always. So to let it draw from another stream, that stream's state has to be put into torch's generator, and taken out again afterwards. A state is a tensor of bytes:

# %%
torch.manual_seed(1)
state = get_state()
first = torch.rand(3)
torch.rand(1000)  # the generator goes on ...
set_state(state)  # ... and is put back
print(f"{state.numel()} bytes; again the same numbers: {torch.equal(torch.rand(3), first)}")

# %% [markdown]
# A **tracker** keeps states under names, and `fork` lends one of them to torch:
#
# ```
# with tracker.fork("sharded"):
#     y = F.dropout(y, 0.1)          # from the state "sharded"
# x = torch.rand(3)                  # from the current state, as if nothing had happened
# ```
#
# The next `fork("sharded")` has to go on where this one ended. If it began at the seed again, every training step would drop the same places.
#
# Python makes such a `with` out of a function that yields once, with `contextlib.contextmanager`: what stands before the `yield` runs when the block begins, what stands behind it when the block ends. An exception in the block comes out of the `yield`.


# %% [markdown] task="9.3" title="A tracker of random states" difficulty=3 minutes=15
# Use `get_state` and `set_state` from the setup cell. What torch draws from within a fork is this rank's generator on `device()`.
#
# - `add` makes a new state. What torch draws from its current state afterwards is what it would have drawn anyway. What it refuses leaves nothing behind. A seed stays taken even after its state has been used.
# - `fork` can be left by an exception, which the caller sees. The state of the name has moved on then too, and the current state is back.
# - Forks of different names may stand within each other.
# - `state_dict` returns the states as they are now, for a checkpoint. Neither later draws nor later loads change what it returned. `load_state_dict` takes it, also in another tracker that has the same names.


# %% exercise="9.3"
class RNGTracker:
    """Random states with names, of which `fork` lets torch draw."""

    def __init__(self):
        ### BEGIN SOLUTION
        self.states = {}
        self.seeds = set()
        ### END SOLUTION

    def add(self, name, seed):
        """A new state that starts from `seed`. Raises ValueError if the name or the seed is taken."""
        ### BEGIN SOLUTION
        if name in self.states or seed in self.seeds:
            raise ValueError(f"the name {name!r} or the seed {seed} is taken: there are {sorted(self.states)}")
        self.states[name] = torch.Generator(device()).manual_seed(seed).get_state()
        self.seeds.add(seed)
        ### END SOLUTION

    @contextmanager
    def fork(self, name="sharded"):
        """Within it torch draws from the state `name`, which goes on where it was left; afterwards from where it was."""
        ### BEGIN SOLUTION
        outside = get_state()
        set_state(self.states[name])
        try:
            yield
        finally:  # also after an exception
            self.states[name] = get_state()
            set_state(outside)
        ### END SOLUTION

    def state_dict(self):
        """{name: state} as they are now."""
        ### BEGIN SOLUTION
        return dict(self.states)
        ### END SOLUTION

    def load_state_dict(self, state):
        """Go on from what `state_dict` returned."""
        ### BEGIN SOLUTION
        self.states = dict(state)
        ### END SOLUTION


# %% [markdown] hints="9.3"
# 1. Before a fork lends out a state it has to remember another one. Which, and where? While `fork` waits at its `yield`, the block runs. Which lines have to run even if the block raises?
# 2. `add`: a generator of your own, `torch.Generator(device()).manual_seed(seed)`, has the state that you need, `.get_state()`. `fork`: remember the current state in a local variable, put the named one in place, `yield`, keep where it has got to, put the other one back; the last two in a `finally`. `get_state` returns a new tensor each time.
# 3. `outside = get_state(); set_state(self.states[name])`, then `try: yield`, then `finally: self.states[name] = get_state(); set_state(outside)`. `state_dict` returns `dict(self.states)`, a new dictionary, and `load_state_dict` keeps a new one too.

# %% check="9.3"
check("9.3", RNGTracker)

# %% [markdown]
# Your tracker with your seeds, on four ranks, for two steps. Between the steps rank 0 draws a number that no other rank draws, for a log message say: the others must not notice.


# %%
def make_tracker(seed, copy=0):
    """This rank's tracker with the two states for dropout; torch's current state is seeded for the first values."""
    seeds = stream_seeds(seed, dist.get_rank(), dist.get_world_size(), copy=copy)
    torch.manual_seed(seeds["init"])
    tracker = RNGTracker()
    for name in ("replicated", "sharded"):
        tracker.add(name, seeds[name])
    return tracker


def two_steps():
    tracker = make_tracker(1)
    kept = {}
    for step in (1, 2):
        for name in ("replicated", "sharded"):
            with tracker.fork(name):
                kept[f"step {step}, {name}"] = F.dropout(torch.ones(4, 16, device=device()), 1 / 3)
        if dist.get_rank() == 0:
            torch.rand(1)  # from the current state
    return kept


results = launch(two_steps, 4)
viz.masks({name: [kept[name] for kept in results] for name in results[0]}, title="two steps with your tracker")

# %% [markdown]
# The masks of the second step are new, those of the replicated stream are still alike on all ranks. Had they been drawn from the current state, rank 0 would have been one number ahead from then on. This is why `replicated` has a state of its own, although torch's current state is alike on all ranks too, as long as nobody draws
# from it alone.
#
# ## 5 · Where to fork
#
# **Predict.** From which stream has each of these four dropouts to draw? `embedding_output`, `[b, s, h]`, which every rank holds whole; `attention_probabilities`, `[b, a/p, s, s]`; `inside_mlp`, `[b, s, m/p]`; `mlp_output`, after g, `[b, s, h]`. Write `"replicated"` or `"sharded"`.

# %% predict="9.c"
predict(
    "9.c",
    embedding_output="replicated",
    attention_probabilities="sharded",
    inside_mlp="sharded",
    mlp_output="replicated",
)

# %% [markdown]
# The ready-made attention of `tplab.tensor.attention`, built as in chapter 06, takes the tracker as `rng` and forks around the dropout of its probabilities. Here the values of all heads are ones, so that the output of a head is the sum of the probabilities that were kept, each divided by 1 - 0.5: it is 1 where half of them were kept. On two ranks with one head each, first without the tracker and then with yours:


# %%
def kept_by_heads(forked):
    torch.manual_seed(1)
    tracker = make_tracker(1)
    layer = ParallelAttention(8, 2, dropout=0.5, bias=False, device=device())
    x = torch.ones(1, 6, 8, device=device())
    kept = []
    layer.out.register_forward_pre_hook(lambda module, inputs: kept.append(inputs[0]))  # [b, s, h/p]: the heads' output
    with torch.no_grad():
        layer.qkv.weight.fill_(0.125)  # all scores are equal, all values are 1
        layer(x, rng=tracker if forked else None)
    return kept[0][0, :, 0]  # [s], one number for each token


viz.table(
    [
        {"": "with your tracker" if forked else "from the current state"}
        | {
            f"rank {rank}": "  ".join(f"{part:.2f}" for part in kept.tolist())
            for rank, kept in enumerate(launch(kept_by_heads, 2, args=(forked,)))
        }
        for forked in (False, True)
    ],
    title="for each of six tokens, the sum of the probabilities that a head kept, divided by 1 - 0.5",
)

# %% [markdown] task="9.4" title="A block that drops in both kinds of places" difficulty=2 minutes=10
# An MLP with dropout inside, behind GELU, and dropout of its output, before it is added to `x`. The layers are there; write `forward`. Each dropout draws from the right state of `self.tracker`. In eval mode (`self.training` is False) nothing is dropped and nothing is drawn.


# %% exercise="9.4"
class ParallelBlock(nn.Module):
    """x + dropout(down(dropout(GELU(up(x))))), with a tracker that has the states "replicated" and "sharded".

    in:  x, replicated      [..., h]
    out: replicated         [..., h]
    """

    def __init__(self, hidden_size, ffn_hidden_size, rate, tracker, *, group=None, device=None, dtype=None):
        super().__init__()
        options = {"group": group, "device": device, "dtype": dtype}
        self.up = ColumnParallelLinear(hidden_size, ffn_hidden_size, **options)  # weight [m/p, h]
        self.down = RowParallelLinear(ffn_hidden_size, hidden_size, **options)  # weight [h, m/p]
        self.rate, self.tracker = rate, tracker

    def forward(self, x):
        ### BEGIN SOLUTION
        inner = F.gelu(self.up(x))  # [..., m/p]
        with self.tracker.fork("sharded"):
            inner = F.dropout(inner, self.rate, self.training)
        y = self.down(inner)  # [..., h]
        with self.tracker.fork("replicated"):
            y = F.dropout(y, self.rate, self.training)
        return x + y
        ### END SOLUTION


# %% [markdown] hints="9.4"
# 1. Write the shapes beside the four steps. Where is a `/p` in the shape, and where is the tensor the same on every rank?
# 2. Behind GELU the tensor is `[..., m/p]`: `"sharded"`. Behind `self.down`, which ends with g, it is `[..., h]` on every rank: `"replicated"`. `F.dropout` takes `self.training` as its third argument.
# 3. `with self.tracker.fork("sharded"): inner = F.dropout(inner, self.rate, self.training)`, the same with `"replicated"` around the dropout of `self.down(inner)`, and `return x + y`.

# %% check="9.4"
check("9.4", ParallelBlock)

# %% [markdown]
# Now train with it. The data is that of chapter 05: bytes of the Python standard library, 16 of them to predict the next. First with dropout at the end alone, which draws from the replicated stream. On one process, in plain PyTorch, the same masks come out of a plain `torch.manual_seed` with the seed of that stream.

# %%
CONTEXT, HIDDEN, FFN, BATCH, STEPS, RATE = 16, 128, 256, 64, 40, 0.2
text = corpus.python_sources(100_000)


class PlainBlock(nn.Module):
    """The twin on one process, with dropout at the end alone."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(HIDDEN, FFN, dtype=torch.float64)
        self.down = nn.Linear(FFN, HIDDEN, dtype=torch.float64)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(x))), RATE, self.training)


class OnlyAtTheEnd(ParallelBlock):
    """Your block without the dropout inside."""

    def forward(self, x):
        y = self.down(F.gelu(self.up(x)))  # [..., h]
        with self.tracker.fork("replicated"):
            y = F.dropout(y, self.rate, self.training)
        return x + y


class ByteModel(nn.Module):
    """Scores for the next byte from the 16 bytes before it. Everything but the block is replicated."""

    def __init__(self, block):
        super().__init__()
        options = {"device": device(), "dtype": torch.float64}
        self.embedding = nn.Embedding(corpus.VOCABULARY, HIDDEN // CONTEXT, **options)
        self.block = block
        self.head = nn.Linear(HIDDEN, corpus.VOCABULARY, **options)

    def forward(self, context):  # [b, 16] bytes
        return self.head(self.block(self.embedding(context).flatten(1)))  # [b, 256]


def parallel_model(block_class, tracker):
    model = ByteModel(block_class(HIDDEN, FFN, RATE, tracker, device=device(), dtype=torch.float64))
    load_full_state_dict(model, start)
    return model


def train(model, optimizer, first=0, last=STEPS, after_step=lambda: None):
    """The losses of the steps from `first` on, before `last`."""
    losses = []
    for inputs, targets in list(corpus.byte_batches(text, CONTEXT, BATCH, last, seed=1))[first:]:
        loss = F.cross_entropy(model(inputs.to(device())), targets[:, -1].to(device()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after_step()
    return losses


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


torch.manual_seed(0)
plain = ByteModel(PlainBlock())
start = {name: value.cpu().clone() for name, value in plain.state_dict().items()}
torch.manual_seed(stream_seeds(1, 0, 1)["replicated"])
plain_losses = train(plain, adam(plain))


# %%
def train_on_ranks(block_class):
    model = parallel_model(block_class, make_tracker(1))
    return train(model, adam(model))


def furthest(losses, others):
    return f"{max(abs(mine - other) for mine, other in zip(losses, others, strict=True)):.0e}"


rows = []
for block_class, where in ((OnlyAtTheEnd, "at the end"), (ParallelBlock, "inside and at the end")):
    runs = {p: launch(train_on_ranks, p, args=(block_class,))[0] for p in (1, 2, 4)}
    for p, losses in runs.items():
        row = {"dropout": where, "p": p, "last loss": f"{losses[-1]:.4f}"}
        row["furthest from p = 1, over all steps"] = furthest(losses, runs[1])
        row["from one process, plain PyTorch"] = furthest(losses, plain_losses) if where == "at the end" else None
        rows.append(row)
print(f"one process, plain PyTorch, dropout at the end: last loss {plain_losses[-1]:.4f}")
viz.table(rows)

# %% [markdown]
# Dropout at the end gives the same run for every `p`, up to the rounding of sums in another order. With dropout inside, the runs are three different ones. Nothing is wrong there: with `p = 2` each rank draws a mask of `[b, s, m/2]` from its own stream, and the two side by side are not the mask of `[b, s, m]` that one process
# draws. They are another one of the same kind. So this is what "the same model for every `p`" can mean: the same first values and the same replicated masks, number by number, and sharded masks that are as independent as those of one process. To have those equal as well, every rank would have to draw the mask of all
# columns and keep its part: `p` times as many random numbers as it needs.

# %% [markdown]
# ## 6 · Run it again
#
# Backward needs what forward has computed: the input of each layer, the masks. **Activation checkpointing** keeps only the input of a block and forgets the rest; when backward comes to the block, it runs the block a second time. Memory is paid for with time. `torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)` does
# it, and it knows about dropout: with `preserve_rng_state=True`, which is the default, it notes down torch's current state before the first run and puts it in place before the second.
#
# But your dropout does not draw from the current state. Nobody tells torch about the states in your tracker. So look at what comes out: `y = dropout(x)²` at `x = 1` has the gradient `2·dropout(x)²`, which is `2y`, if both runs dropped the same places.

# %%
SIZE = 100_000


def right_gradients(stream):
    tracker = make_tracker(1)

    def squared(x):
        with tracker.fork(stream) if stream != "current" else nullcontext():
            x = F.dropout(x, 0.5)
        return x**2

    x = torch.ones(SIZE, device=device(), requires_grad=True)
    y = torch_checkpoint(squared, x, use_reentrant=False)
    y.sum().backward()
    return (x.grad == 2 * y.detach()).double().mean().item()


results = {stream: launch(right_gradients, 2, args=(stream,)) for stream in ("current", "replicated", "sharded")}
viz.table(
    [
        {"dropout draws from": stream} | {f"right on rank {rank}": f"{part:.1%}" for rank, part in enumerate(parts)}
        for stream, parts in results.items()
    ],
    title="gradients that fit the output, with torch's own checkpoint",
)

# %% [markdown]
# Half of the gradients are wrong: those of places that one run has dropped and the other has kept. There is no error; a wrong gradient looks like any other. And the second run has drawn from the tracker, so the states stand further on than they would without checkpointing, and all later masks are others too.
#
# `torch.utils.checkpoint.checkpoint` takes one more argument for such cases: `context_fn`, a function without arguments that returns two context managers. The first one is entered around the first run, the second one around the run in backward. `contextlib.nullcontext()` is one that does nothing.

# %% [markdown] task="9.5" title="Run again with the same dropout" difficulty=4 minutes=20
# Write `checkpoint`, with `torch_checkpoint` from the setup cell, which is `torch.utils.checkpoint.checkpoint`. The second run draws from the tracker's states as they were when the *first* run began. After it all states are as if there had been only one run. The tracker has `state_dict()` and `load_state_dict(state)`, as in exercise 9.3.
#
# It has to work where several blocks are checkpointed one after the other, and where `x` itself needs no gradient but the weights of the function do.


# %% exercise="9.5"
def checkpoint(function, *args, tracker):
    """function(*args), which keeps only its inputs and is run again in backward, with the same dropout."""
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
# 1. When does the second run begin, and who could act just then? What has to be known at that moment, and when is the last chance to note it down?
# 2. Note down `tracker.state_dict()` before anything runs. Write a context manager `replay` that notes down where the states are now, loads those from before the first run, and puts the others back at its end. It belongs around the second run only.
# 3. With `@contextmanager`: `now = tracker.state_dict(); tracker.load_state_dict(before_first_run)`, then `try: yield`, `finally: tracker.load_state_dict(now)`. Return `torch_checkpoint(function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), replay()))`.

# %% check="9.5"
check("9.5", checkpoint)

# %% [markdown]
# The table from above, with your `checkpoint` in place of torch's:


# %%
def right_gradients_with_mine(stream):
    tracker = make_tracker(1)

    def squared(x):
        with tracker.fork(stream) if stream != "current" else nullcontext():
            x = F.dropout(x, 0.5)
        return x**2

    x = torch.ones(SIZE, device=device(), requires_grad=True)
    y = checkpoint(squared, x, tracker=tracker)
    y.sum().backward()
    return (x.grad == 2 * y.detach()).double().mean().item()


results = {
    stream: launch(right_gradients_with_mine, 2, args=(stream,)) for stream in ("current", "replicated", "sharded")
}
viz.table(
    [
        {"dropout draws from": stream} | {f"right on rank {rank}": f"{part:.1%}" for rank, part in enumerate(parts)}
        for stream, parts in results.items()
    ],
    title="gradients that fit the output, with your checkpoint",
)

# %% [markdown]
# **Predict.** Your block from exercise 9.4 on two ranks, in `checkpoint`. How many all-reduces run in its forward pass, and how many in its backward pass?

# %% predict="9.d"
predict("9.d", forward=1, backward=2)


# %%
def one_pass(how):
    tracker = make_tracker(1)
    block = ParallelBlock(256, 1024, 0.1, tracker, device=device())
    x = torch.randn(4, 32, 256, device=device(), requires_grad=True)  # [b, s, h]
    with saved_for_backward(block) as kept, record() as forward:
        out = checkpoint(block, x, tracker=tracker) if how == "checkpointed" else block(x)
    began = time.perf_counter()
    with record() as backward:
        out.sum().backward()
    seconds = time.perf_counter() - began
    calls = [sum(total.calls for total in section.totals().values()) for section in (forward, backward)]
    return {"kept": kept.bytes, "calls": calls, "seconds": seconds}


rows = []
for p in (1, 2, 4):
    for how in ("as it is", "checkpointed"):
        seen = launch(one_pass, p, args=(how,))[0]
        formula = 4 * 4 * 32 * (256 if how == "checkpointed" else 2 * 256 + 3 * 1024 // p)
        rows.append(
            {
                "p": p,
                "block": how,
                "bytes kept until backward": seen["kept"],
                "formula": formula,
                "all-reduces forward": seen["calls"][0],
                "backward": seen["calls"][1],
                "ms backward": f"{1000 * seen['seconds']:.1f}",
            }
        )
viz.table(rows, title="one block, b·s = 4·32, h = 256, m = 1024, float32")

# %% [markdown]
# As it is, the block keeps two tensors of `[b, s, h]`, its input and the last mask, and three of `[b, s, m/p]`, the input of GELU, the mask inside and the input of `down`: `b·s·(2h + 3m/p)` numbers. (On the CPU a mask is kept in float32; a GPU keeps it in one byte for each place.) Checkpointed, it keeps `b·s·h`, its input
# alone, whatever `p` is. The price: the block runs twice, and its g is sent twice.
#
# ## 7 · Stop, and go on
#
# A long run is stopped and continued: a machine fails, the time is up. The checkpoint then needs the parameters and the optimizer's state, and the random states too, of *every* rank: `sharded` is another one on each. Here a run of 40 steps is stopped after 20, and continued by new processes, once with the tracker's states and once
# without them.


# %%
def run_and_save(steps):
    tracker = make_tracker(1)
    model = parallel_model(ParallelBlock, tracker)
    optimizer = adam(model)
    losses = train(model, optimizer, 0, steps)
    return {"losses": losses, "saved": (model.state_dict(), optimizer.state_dict(), tracker.state_dict())}


def go_on(saved_by_rank, with_states):
    model_state, optimizer_state, random_states = saved_by_rank[dist.get_rank()]
    tracker = make_tracker(1)
    model = parallel_model(ParallelBlock, tracker)
    optimizer = adam(model)
    model.load_state_dict(model_state)
    optimizer.load_state_dict(optimizer_state)
    if with_states:
        tracker.load_state_dict(random_states)
    return train(model, optimizer, 20, 40)


uninterrupted = launch(run_and_save, 2, args=(40,))[0]["losses"][20:]
saved = [rank["saved"] for rank in launch(run_and_save, 2, args=(20,))]
rows = []
for with_states in (True, False):
    continued = launch(go_on, 2, args=(saved, with_states))[0]
    apart = max(abs(mine - right) for mine, right in zip(continued, uninterrupted, strict=True))
    rows.append(
        {"random states": "loaded" if with_states else "not loaded", "largest difference of 20 losses": f"{apart:.1e}"}
    )
viz.table(rows)

# %% [markdown]
# With the states the continued run is the uninterrupted one, to the last bit. Without them it drops again what the first steps have dropped.
#
# ## 8 · Break it
#
# **First.** Other masks in the replicated place: a block that draws both from `sharded`, trained on two ranks. Before you run it: will the losses of the two ranks be equal in the first step?


# %%
class OthersAtTheEnd(ParallelBlock):
    def forward(self, x):
        with self.tracker.fork("sharded"):  # both dropouts in one fork, and it looks so tidy
            inner = F.dropout(F.gelu(self.up(x)), self.rate, self.training)
            return x + F.dropout(self.down(inner), self.rate, self.training)


def replica_drift(module):
    """The largest difference between two ranks in any replicated parameter, as in exercise 5.4."""
    worst = 0.0
    for param in module.parameters():
        if not hasattr(param, "tensor_parallel"):
            largest, smallest = param.detach().clone(), param.detach().clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
            worst = max(worst, (largest - smallest).max().item())
    return worst


def train_and_watch(block_class):
    model, drift = parallel_model(block_class, make_tracker(1)), []
    losses = train(model, adam(model), after_step=lambda: drift.append(replica_drift(model)))
    return {"losses": losses, "drift": drift}


others = launch(train_and_watch, 2, args=(OthersAtTheEnd,))
right = launch(train_and_watch, 2, args=(ParallelBlock,))
viz.curves(
    {
        "your block, drift": right[0]["drift"],
        "other masks at the end, drift": others[0]["drift"],
    },
    ylabel="replica drift",
    title="replicated parameters run apart",
)

# %%
viz.table(
    [
        {"block": name}
        | {
            f"{when}, rank {rank}": f"{run[rank]['losses'][step]:.4f}"
            for when, step in (("first loss", 0), ("last loss", -1))
            for rank in (0, 1)
        }
        for name, run in (("yours", right), ("other masks at the end", others))
    ]
)

# %% [markdown]
# The two ranks report different losses in the very first step, since they predict from different tensors. Then their embeddings and output layers get different gradients and drift apart. f and g still add up what the ranks compute, but it no longer belongs to one model. Whoever logs the loss of rank 0 alone sees a curve that
# falls.
#
# **Second.** The same masks in the sharded place: both dropouts from `replicated`.


# %%
class SameInside(ParallelBlock):
    def forward(self, x):
        with self.tracker.fork("replicated"):
            inner = F.dropout(F.gelu(self.up(x)), self.rate, self.training)
            return x + F.dropout(self.down(inner), self.rate, self.training)


def watch_masks(block_class):
    """What a rank keeps inside the MLP, of 500 tokens: the places of `down`'s input that are not zero."""
    model, seen = parallel_model(block_class, make_tracker(1)), []
    model.block.down.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0] != 0))
    for inputs, _ in corpus.byte_batches(text, CONTEXT, 500, 1, seed=3):
        model(inputs.to(device()))
    return seen[0]  # [500, m/p]


rows, first_places = [], {}
for name, block_class in (("yours", ParallelBlock), ("same masks inside", SameInside)):
    run = right if block_class is ParallelBlock else launch(train_and_watch, 2, args=(block_class,))
    masks = launch(watch_masks, 4, args=(block_class,))
    correlation = torch.corrcoef(torch.stack([mask.flatten().double() for mask in masks]))[0, 1].item()
    kept = torch.cat(list(masks), 1).double().mean(1)
    first_places[name] = [mask[:6, :16] for mask in masks]
    rows.append(
        {
            "block": name,
            "last loss, p = 2": f"{run[0]['losses'][-1]:.4f}",
            "drift": run[0]["drift"][-1],
            "correlation of two ranks' masks, p = 4": f"{correlation:.3f}",
            "std of the part kept, p = 4": f"{kept.std():.4f}",
        }
    )
print(f"std of the part kept on one process: {(RATE * (1 - RATE) / FFN) ** 0.5:.4f}")
viz.table(rows)

# %%
viz.masks(first_places, title="inside the MLP, the first 16 columns of each rank")

# %% [markdown]
# No loss and no drift tells of it: the ranks agree, only too well. Every rank drops the same places of its columns, and the noise is twice as strong as on one process, $\sqrt{4}$ times, as in section 2. What finds it is a look at the masks themselves, or a test of the block against one process.
#
# **Third.** All shards of the weights equal, as one seed on all ranks makes them. Four ranks train without dropout from such a start; the other parameters are as before.


# %%
def equal_shards(state, p):
    """The first values, with rank 0's shard of the block on every rank."""
    up, bias = state["block.up.weight"], state["block.up.bias"]
    up, bias, down = up.chunk(p, 0)[0], bias.chunk(p, 0)[0], state["block.down.weight"].chunk(p, 1)[0]
    copies = {"block.up.weight": torch.cat([up] * p, 0), "block.up.bias": torch.cat([bias] * p, 0)}
    return state | copies | {"block.down.weight": torch.cat([down] * p, 1)}


def train_from(state):
    model = ByteModel(ParallelBlock(HIDDEN, FFN, 0.0, make_tracker(1), device=device(), dtype=torch.float64))
    load_full_state_dict(model, state)
    losses = train(model, adam(model))
    return {"losses": losses, "up": model.block.up.weight.detach()}


rows = []
for name, state in (("different", start), ("equal", equal_shards(start, 4))):
    run = launch(train_from, 4, args=(state,))
    columns = torch.cat([rank["up"] for rank in run])  # [m, h]: one row for each column inside the MLP
    rows.append(
        {
            "shards at the start": name,
            f"different columns of {FFN} after {STEPS} steps": len(columns.unique(dim=0)),
            "largest difference between two shards": f"{max((rank['up'] - run[0]['up']).abs().max().item() for rank in run):.2g}",
            "last loss": f"{run[0]['losses'][-1]:.4f}",
        }
    )
viz.table(rows)

# %% [markdown]
# Equal shards get equal gradients, so they stay equal. Four ranks hold, compute and update one and the same quarter of the MLP: there are 64 different columns inside it, not 256. The loss of these few steps does not show it.

# %%
symptoms(9)

# %% [markdown]
# ## 9 · Measure it
#
# What does the tracker cost? A fork copies two states out and two in, and sends nothing.


# %%
def cost_of_a_fork():
    tracker = make_tracker(1)
    x = torch.ones(4, 32, 256, device=device())
    with record() as section:
        for name in ("replicated", "sharded"):
            with tracker.fork(name):
                F.dropout(x, 0.1)
    times = {}
    for name, run in (("without", lambda: F.dropout(x, 0.1)), ("with", lambda: fork_and_drop(tracker, x))):
        began = time.perf_counter()
        for _ in range(200):
            run()
        times[name] = (time.perf_counter() - began) / 200 * 1e6
    states = tracker.state_dict().values()
    return {
        "collectives": len(list(section)),
        "bytes of all states": sum(state.numel() for state in states),
        "a dropout of [4, 32, 256], µs": f"{times['without']:.0f}",
        "the same in a fork, µs": f"{times['with']:.0f}",
    }


def fork_and_drop(tracker, x):
    with tracker.fork():
        F.dropout(x, 0.1)


viz.table([{"p": p} | launch(cost_of_a_fork, p)[0] for p in (1, 2, 4)], title="mean of 200 dropouts")

# %% [markdown]
# On the CPU a state has 5056 bytes: its generator keeps 624 numbers, from which it makes the next ones. A GPU's generator is another kind (Philox): it computes its numbers from a seed and an offset, and its state has 16 bytes.
#
# And the first values, for the output layer of GPT-3, `v = 51200` (padded) and `h = 12288`, in float32 on 8 ranks:

# %%
whole = 4 * 51200 * 12288
viz.table(
    [
        {
            "first values": "from a master weight",
            "GB on each rank, for a moment": f"{whole / 1e9:.2f}",
            "numbers that each rank draws": f"{whole // 4:,}",
        },
        {
            "first values": "each rank its own shard",
            "GB on each rank, for a moment": f"{whole / 8 / 1e9:.2f}",
            "numbers that each rank draws": f"{whole // 32:,}",
        },
    ]
)

# %% [markdown]
# ## 10 · In the wild
#
# **Megatron-Core**, `megatron/core/tensor_parallel/random.py`: `CudaRNGStatesTracker` with `add`, `fork`, `get_states` and `set_states` is your tracker, and refuses a name or a seed that is taken as yours does. `model_parallel_cuda_manual_seed(seed)` makes the streams: the default state gets `seed` and stands for
# what is replicated; the state `model-parallel-rng` gets `seed + 2718 + rank` ("2718 is just for fun and any POSITIVE value will work", says the comment). `fork()` without a name means that one. `DotProductAttention` drops its probabilities within `get_cuda_rng_tracker().fork()`. First values are drawn by `_initialize_affine_weight_gpu`, on the shard, in a fork, with an init method whose std does not look at the shape; or by
# `_initialize_affine_weight_cpu`, from a master weight. `CheckpointFunction` in the same file notes down the tracker's states before the first run, and puts them in place for the second.
#
# **PyTorch**: `torch.distributed.tensor` has an `OffsetBasedRNGTracker` for its distributed tensors, on GPUs. It uses that a GPU's numbers are computed from an offset: each rank starts at the offset of its own shard in the mask of the whole tensor. So a sharded mask *is* the mask of one process, cut into parts, without anybody drawing
# the rest. On CPUs there is no such thing.
#
# **tplab**, the module `rng`: `seed_all(seed, group)` seeds the current state and returns a tracker with `replicated` and `sharded`, 1359 and 2718 further on. It adds to yours: a state covers the CPU and the GPU of a rank, seeds are compared over all ranks (`add(name, seed, per_rank=True)`), forks of the same name may stand within each other, and `state_dict` names the states so that those of all ranks fit into one checkpoint.
#
# ## 11 · Recap
#
# 1. First values: a master weight gives the same weight for every `p` and costs a whole weight on each rank; a generator for each rank costs nothing, needs the std of the whole weight, and gives another weight for each `p`.
# 2. Dropout: alike on all ranks where the tensor is replicated (residual stream, behind g), another mask on each rank where it is sharded (attention probabilities, inside the MLP). Other masks in the first place make replicas drift; the same ones in the second repeat the noise, and no loss shows it.
# 3. A tracker keeps named random states. `fork` lends one to torch, keeps where it has got to, and puts the former one back, after an exception too. It sends nothing.
# 4. Activation checkpointing keeps `[b, s, h]` of a block and runs it again, its g included; torch puts back its current state for that, and the tracker's states are your business. They also belong into every rank's checkpoint.
# 5. All parts are there now: linear layers, attention, embedding, loss and random numbers. Chapter 10 puts them together to a transformer.

# %% [markdown]
# ## Your library so far
#
# It draws its random numbers properly now: the same where ranks have to agree, and different where they mustn't.

# %%
from tplab.course import library

library(9)
