# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 15 · Capstone: train a GPT
#
# **The question.** You have every piece of a tensor-parallel GPT. What else does it take to train it for days on a machine with 8 GPUs, to know beforehand what that costs, and to lose no more than a few minutes when the machine dies?
#
# **What you will have built.** The rest of a training program: the learning rate, the order of the data, the step that puts the sums of all groups in the right order, checkpoints that a kill cannot spoil, and the number that says how much of the machine was used.
# Then your own layers, from your library, train a GPT on real text: on two processes of this computer, and with the same command on 8 GPUs.
#
# Symbols: `b` sequences in a micro-batch, `B` in a step, `s` sequence length, `h` hidden size, `L` layers, `m` micro-batches; `tp` ranks share a model, `dp` replicas of it share the work. About 105 minutes.

# %% tags=["setup"]
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from tplab import device, launch, record, viz
from tplab.course import check, predict, show_failure, symptoms
from tplab.data import clip_grad_norm
from tplab.memory import GPTConfig
from tplab.sequence import allreduce_sequence_parallel_gradients

# %% [markdown]
# Here is the whole program, with the chapter in which you built each part. What is hatched talks to other ranks; what says "exercise" you write in this chapter.

# %%
viz.program(
    {
        "data": [("text", "on this machine"), ("tokens", "byte pairs"), ("own windows", "exercise 15.2")],
        "forward": [
            ("embedding", "chapter 7"),
            ("attention", "chapter 6"),
            ("MLP", "chapter 5"),
            ("output, loss", "chapter 8"),
        ],
        "backward": [
            ("output, loss", "chapter 8"),
            ("MLP", "chapters 3, 5, 11"),
            ("attention", "chapters 3, 6, 11"),
            ("table", "chapter 7"),
        ],
        "step": [
            ("sum over tp", "chapter 12"),
            ("mean over dp", "chapter 14"),
            ("norm, clip", "chapter 14"),
            ("AdamW", "exercises 15.1, 15.3"),
        ],
        "around it": [("checkpoint", "exercise 15.4"), ("kill, go on", "section 5"), ("report", "exercise 15.5")],
    },
    talking={
        "embedding",
        "attention",
        "MLP",
        "output, loss",
        "sum over tp",
        "mean over dp",
        "norm, clip",
        "checkpoint",
    },
    title="one training step, and what stands around it",
)

# %% [markdown]
# ## 1 · The plan
#
# Whoever rents 8 GPUs for a week writes down before what will come out: does it fit, how long does a step take, how long the run. You have the formulas, from chapters 00 and 11.
#
# All that a run is started with is one dataclass, `Settings`; a **preset** is one to start from. Three runs are planned here: one of a few seconds for this notebook, one of a few minutes for a laptop, and one for a machine with 8 GPUs.

# %%
import tempfile

from tplab.capstone import PRESETS
from tplab.memory import parameter_count

HOME = tempfile.TemporaryDirectory(prefix="tplab-")  # runs of this notebook; gone when its kernel ends
LAPTOP, BOX = PRESETS["laptop"], PRESETS["h100x8"]
SMALL = replace(
    LAPTOP,
    folder=f"{HOME.name}/run",
    layers="mine",
    data_limit=1_000_000,
    vocab_size=512,
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    seq_length=64,
    steps=60,
    warmup_steps=20,
    learning_rate=3e-3,
    min_learning_rate=3e-4,
    beta2=0.99,  # a run of few steps: a longer memory for the size of gradients keeps its loss from leaping
    evaluate_every=20,
    save_every=20,
    sample_every=0,
    sample_tokens=60,
)
RUNS = {"this notebook": SMALL, "laptop": LAPTOP, "h100x8": BOX}
viz.table(
    [
        {
            "": name,
            "parameters": f"{parameter_count(settings.model):,}",
            "L": settings.num_layers,
            "h": settings.hidden_size,
            "s": settings.seq_length,
            "tp": settings.tp,
            "B": settings.batch_size,
            "tokens a step": f"{settings.tokens_per_step:,}",
            "steps": settings.steps,
            "numbers": settings.precision,
        }
        for name, settings in RUNS.items()
    ]
)

# %% [markdown]
# **Predict.** On a laptop everything is float32. How many bytes does a rank hold for each parameter: the weight, its gradient, and what AdamW keeps? And how many bytes does *one rank* hold, of all these together, for a matrix of 1,000,000 numbers that is cut over 2 ranks?

# %% predict="15.a"
predict("15.a", bytes_a_parameter=16, bytes_of_the_matrix=8_000_000)

# %% [markdown]
# The bill of the large one, on each of its GPUs, first without sequence parallelism. Turn the knobs. What does sequence parallelism divide, and which of the two, recomputation or a smaller micro-batch, buys more memory?

# %% tags=["explore"]
from tplab.capstone.planning.predictions import predicted_memory
from tplab.memory import GPUS


def show_bill(tp, sequence_parallel, recompute, micro_batch_size):
    settings = replace(
        BOX, tp=tp, sequence_parallel=sequence_parallel, recompute=recompute, micro_batch_size=micro_batch_size
    )
    return viz.bill(
        {f"tp = {tp}": predicted_memory(settings)[0]},
        capacity=GPUS["H100, 80 GB"],
        title="the model of the preset h100x8, on one of tp GPUs",
    )


viz.explore(
    show_bill,
    tp=(1, 2, 4, 8, 16),
    sequence_parallel=(False, True),
    recompute=("nothing", "attention", "layers"),
    micro_batch_size=(4, 8, 16, 32),
    start={"tp": 8, "sequence_parallel": False, "recompute": "attention", "micro_batch_size": 16},
)

# %% [markdown]
# Sequence parallelism divides activations, and nothing else: 18.0 GB without it, 6.5 GB with it. Computing whole layers again buys most: 0.4 GB are left of these, and 1.6 GB with a micro-batch of 4. `attention` buys next to nothing in this bill, since torch's attention keeps no scores anyway.
#
# Now the time. For H100s we take the published figures (chapter 11). Your own machine has to be measured, so two ranks run each kernel of a layer a few times, along with an all-reduce between two matmuls. The step is then a sum of these times.

# %%
from tplab.capstone.planning.predictions import calibrated_step, machine_of, predicted_step
from tplab.capstone.study import programs as measuring
from tplab.cost import MACHINES

HERE = machine_of(launch(measuring.machine, 2, args=(SMALL,))[0])
PLAN = {}
rows = []
for name, settings in RUNS.items():
    memory = predicted_memory(settings)[0]
    if settings is BOX:
        step = predicted_step(settings, MACHINES["H100 DGX"])
    else:
        step = calibrated_step(settings, launch(measuring.kernels, settings.ranks, args=(settings,))[0])
    seconds = sum(step.values())
    PLAN[name] = {"memory": sum(memory.values()), "seconds": seconds}
    rows.append(
        {
            "": name,
            "state on a rank": f"{(sum(memory.values()) - memory['activations']) / 1e6:,.1f} MB",
            "activations": f"{memory['activations'] / 1e6:,.1f} MB",
            "a step": f"{1e3 * seconds:,.0f} ms",
            "of it communication": f"{step['communication'] / seconds:.0%}",
            "tokens/s": f"{settings.tokens_per_step / seconds:,.0f}",
            "the run": f"{settings.steps * seconds:,.0f} s",
        }
    )
viz.table(rows, title="the plan")

# %% [markdown]
# Look at the last row: more than half of a step of the large run would be communication. A hidden size of 2048 is small for `tp = 8` (chapter 11). The same 8 GPUs can be laid out otherwise:

# %%
rows = []
for tp, dp in ((8, 1), (4, 2), (2, 4), (1, 8)):
    settings = replace(BOX, tp=tp, dp=dp, micro_batch_size=64 // 8, sequence_parallel=tp > 1)
    step = predicted_step(settings, MACHINES["H100 DGX"])
    memory, seconds = predicted_memory(settings)[0], sum(step.values())
    rows.append(
        {
            "tp": tp,
            "dp": dp,
            "memory of a GPU, GB": f"{sum(memory.values()) / 1e9:.0f}",
            "a step, ms": f"{1e3 * seconds:.0f}",
            "of it communication": f"{step['communication'] / seconds:.0%}",
        }
    )
viz.table(rows, title="the preset h100x8 on other grids, 8 sequences in a micro-batch")

# %% [markdown]
# Each layout fits, and the fewer ranks share a matrix, the faster. (The gradients that travel over `dp` take less time here than the backward pass computes, and the model counts them as hidden behind it. So the last row has no communication.) Tensor parallelism is for models that do not fit otherwise; the preset takes `tp = 8` since that is what this course is about.
#
# How far can you trust these times? On A100s, the formulas come within 10 % of every published step (chapter 11). On your own machine it depends on what else is running, and evaluations and checkpoints aren't counted. In section 4 we'll compare the run with the plan.
#
# ## 2 · What a training program has besides the model
#
# Five things. None of them is large, and most of them can ruin a long run without an error message.
#
# ### The learning rate
#
# At the beginning the weights are random and the gradients point anywhere; a large step there can spoil the run before it has begun. So the learning rate starts small and goes up in a straight line, the **warm-up**. Later, large steps keep the model from settling, so it goes down again, in most programs along half a **cosine**: slowly at first, fast in the middle, slowly at the end.

# %% [markdown] task="15.1" title="The learning rate" difficulty=1 minutes=10
# Steps are counted from 1, as in the log of a run. With `n = warmup`:
#
# - up to step `n` the rate is step/n of `highest`: in step `n` it is all of it;
# - from there on it goes down along half a cosine, from `highest` at step `n` to `lowest` at step `steps`, the last one;
# - after the last step it stays at `lowest`.
#
# `warmup` may be 0, and it may be as long as the run: then the last step still has `highest`.


# %% exercise="15.1"
def learning_rate(step, steps, warmup, highest, lowest):
    """The learning rate of a step, counted from 1, in a run of so many steps."""
    ### BEGIN SOLUTION
    if step <= warmup:
        return highest * step / warmup
    if step > steps:
        return lowest
    part = (step - warmup) / (steps - warmup)
    return lowest + (highest - lowest) * (1 + math.cos(math.pi * part)) / 2
    ### END SOLUTION


# %% [markdown] hints="15.1"
# 1. Three regions: the warm-up, the way down, and what comes after the end. Which part of the way down, between 0 and 1, has been gone in a step? And what does `1 + cos(π · part)` go through meanwhile?
# 2. In the warm-up return `highest * step / warmup`, so that it divides only where there is a warm-up. After the end return `lowest`. Between them the part is `(step - warmup) / (steps - warmup)`, and the cosine makes of it a height between 1 and 0, which you stretch to what lies between the two rates.
# 3. `if step <= warmup: return highest * step / warmup`; `if step > steps: return lowest`; `part = (step - warmup) / (steps - warmup)`; `return lowest + (highest - lowest) * (1 + math.cos(math.pi * part)) / 2`.

# %% check="15.1"
check("15.1", learning_rate)

# %%
LONG = {"steps": 600, "warmup": 40, "highest": 2e-3, "lowest": 2e-4}
viz.curves(
    {
        "40 steps of warm-up": [learning_rate(step, **LONG) for step in range(1, 651)],
        "none": [learning_rate(step, **LONG | {"warmup": 0}) for step in range(1, 651)],
    },
    ylabel="learning rate",
    title="a run of 600 steps, and 50 steps after its end",
)

# %% [markdown]
# Since the rate is a function of the step alone, there is nothing in it to save and to load.
#
# ### The order of the data
#
# The text is one long list of tokens, cut into **windows** of `s` tokens, one for each sequence. An **epoch** goes through all windows once, in a random order. Each step takes the next `B` windows, and each of `dp` replicas its part of them.
#
# How does a run go on in the data after it was stopped? Many programs save the state of a data loader for each replica, and then cannot go on with another number of replicas (torchtitan's `ParallelAwareDataloader`, for one, refuses it). There is a simpler way: let the windows of a step be a **function of the number of steps that have been done**, and of nothing else. Then the position in the data is a number that every checkpoint has anyway.

# %% [markdown] task="15.2" title="Which windows a replica takes" difficulty=2 minutes=15
# Return the numbers of the windows, 0 to `windows - 1`, that one replica takes in the step that comes after `done` steps: a list of `batch_size / replicas` of them.
#
# - In each epoch every window comes once, in a random order of its own. The order depends on `seed` and on the epoch (not on `seed + epoch`: then another seed would be the same run, one epoch later). `batch_size` is at most `windows`, and need not divide it: then a batch takes the end of one epoch and the beginning of the next. It is a multiple of `replicas`.
# - The batch of all replicas together has the same windows for any number of replicas.
# - The function remembers nothing, and leaves torch's and Python's own random numbers alone: the dropout masks of the rank come from there. `torch.Generator()` makes a generator of its own; `torch.randperm(n, generator=generator)` is a random order of 0 to n - 1.


# %% exercise="15.2"
def own_windows(done, seed, windows, batch_size, replica, replicas):
    """The windows that a replica trains on in the step that comes after `done` steps: a list of whole numbers."""
    ### BEGIN SOLUTION
    each = batch_size // replicas
    first = done * batch_size + replica * each
    mine = []
    for number in range(first, first + each):
        epoch, place = divmod(number, windows)
        generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
        order = torch.randperm(windows, generator=generator).tolist()
        mine.append(order[place])
    return mine
    ### END SOLUTION


# %% [markdown] hints="15.2"
# 1. Number all sequences of the whole run, epoch after epoch: 0, 1, 2, ... Which of these numbers belong to this step, and which of them to this replica? To which epoch does number n belong?
# 2. The step has the numbers from `done * batch_size` on, and the replica takes `batch_size // replicas` of them, from `replica` times as many on. `divmod(number, windows)` is the epoch, and the place in its order. The order of an epoch comes from a generator whose seed is made of `seed` and the epoch: `seed` times a large number, plus the epoch, so that no two runs share one.
# 3. `for number in range(first, first + each):` with `first = done * batch_size + replica * each`; `epoch, place = divmod(number, windows)`; `generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)`; `torch.randperm(windows, generator=generator)[place].item()`.

# %% check="15.2"
check("15.2", own_windows)

# %%
rows = []
for done in range(5):
    row = {"steps done": done, "one replica takes": str(own_windows(done, 0, 10, 4, 0, 1))}
    row |= {f"replica {r} of 2 takes": str(own_windows(done, 0, 10, 4, r, 2)) for r in range(2)}
    rows.append(row)
viz.table(rows, title="10 windows, 4 in a step: the third batch ends one epoch and begins the next")

# %% [markdown]
# Writing down the order of an epoch takes 8 bytes a window, and once an epoch is often enough. That's what `tplab.capstone.data.batches` does. For ten million windows, it's 80 MB on each rank.
#
# ### The step
#
# All sums over ranks of this course meet in one step, in this order:
#
# 1. Beginning without gradients, each micro-batch goes forward and backward; `backward` adds to what is in `param.grad`. Its loss is a mean over its tokens.
# 2. With sequence parallelism the gradients of norms and biases are summands on each rank: add them up over `tp` (chapter 12).
# 3. Each replica has seen other sequences: average over `dp` (chapter 14).
# 4. Only now every rank holds its part of the gradient that one process would have. Its norm counts each parameter once (chapter 14); where it is longer than `max_norm`, all of it is scaled down, on every rank by the same factor.
# 5. The optimizer steps.
#
# 2 and 3 come once, after the last micro-batch. They may change places, since both are linear; neither may come after 4.
#
# Adam hides mistakes here. It divides by the size of its gradients, so a factor that was forgotten, 1/m say, hardly changes its steps. The check uses plain SGD, which hides nothing.

# %% [markdown] task="15.3" title="A training step" difficulty=4 minutes=20
# - `model(x, y)` is the mean loss of a micro-batch, the same on every rank of the `tp` group. All micro-batches have equally many tokens, and all replicas equally many micro-batches. No gradients are left from before the first step.
# - `mesh.get_group("tp")` and `mesh.get_group("dp")` are the groups of this rank, `dist.get_world_size(group)` their sizes.
# - `allreduce_sequence_parallel_gradients(model, group)` is `tplab`'s answer to exercise 12.3: it adds up the gradients of the parameters that are marked, if there are any. `clip_grad_norm(parameters, max_norm, mesh)` is the norm of exercise 14.4, and then the clipping: it scales the gradients and returns, as a tensor, the norm that there was before.
# - Each gradient crosses the replicas once in a step, not once for each micro-batch. In how many messages is up to you.
# - Return two floats, the same on every rank: the mean loss of all sequences of the step, on all replicas, and the norm before clipping.


# %% exercise="15.3"
def training_step(model, optimizer, micro_batches, mesh, max_norm):
    """One step on this replica's micro-batches, a list of pairs (x, y). Returns loss and norm."""
    ### BEGIN SOLUTION
    tp, dp = mesh.get_group("tp"), mesh.get_group("dp")
    optimizer.zero_grad()
    total = torch.zeros((), dtype=torch.float64, device=device())
    for x, y in micro_batches:
        loss = model(x, y) / len(micro_batches)
        loss.backward()
        total += loss.detach()
    allreduce_sequence_parallel_gradients(model, tp)
    for param in model.parameters():
        dist.all_reduce(param.grad, group=dp)
        param.grad /= dist.get_world_size(dp)
    norm = clip_grad_norm(model.parameters(), max_norm, mesh)
    optimizer.step()
    dist.all_reduce(total, group=dp)
    return total.item() / dist.get_world_size(dp), norm.item()
    ### END SOLUTION


# %% [markdown] hints="15.3"
# 1. Which gradient would one process have that computes all sequences at once? Write beside each of the five points what `param.grad` holds after it. Where does a division by the number of micro-batches belong, and where one by the number of replicas?
# 2. Zero the gradients once. Divide each micro-batch's loss by their number before `backward`, and add up what comes, for the return value. Then the marked gradients over `tp`, then for each parameter an all-reduce over `dp` and a division by its size, then the clipping, then `optimizer.step()`. The loss needs an all-reduce over `dp` of its own.
# 3. `loss = model(x, y) / len(micro_batches)`, `loss.backward()`, `total += loss.detach()`; `allreduce_sequence_parallel_gradients(model, tp)`; `dist.all_reduce(param.grad, group=dp)`, `param.grad /= dist.get_world_size(dp)`; `norm = clip_grad_norm(model.parameters(), max_norm, mesh)`; `optimizer.step()`; `dist.all_reduce(total, group=dp)`; `return total.item() / dist.get_world_size(dp), norm.item()`.

# %% check="15.3"
check("15.3", training_step)

# %% [markdown]
# Your three functions together, with the GPT of chapter 12: 8 steps of 8 sequences on the bytes of the standard library, on one process, and on grids of 2 and of 4.

# %%
TINY = GPTConfig(num_layers=2, hidden_size=32, num_heads=4, vocab_size=256, seq_length=32, dropout=0.0)


def train_tiny(dp, tp, m, steps=8):
    from tplab.common import corpus
    from tplab.data import Grid, mesh
    from tplab.sequence import SequenceParallelGPT
    from tplab.tensor import seed_all

    torch.set_num_threads(1)
    grid, replica = mesh(dp=dp, tp=tp), Grid(dp=dp, tp=tp).place(dist.get_rank()).dp
    seed_all(0, grid.get_group("tp"))
    model = SequenceParallelGPT(TINY, group=grid.get_group("tp"), device=device(), dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    text = torch.frombuffer(bytearray(corpus.python_sources(20_000)), dtype=torch.uint8).long()
    s = TINY.seq_length
    windows = len(text) // s - 1
    losses = []
    for done in range(steps):
        own = own_windows(done, 1, windows, 8, replica, dp)  # 8/dp of them
        ids = torch.stack([text[w * s : w * s + s + 1] for w in own]).to(device())  # [8/dp, s + 1]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(done + 1, steps, 3, 1e-2, 1e-3)
        pairs = [(part[:, :-1], part[:, 1:]) for part in ids.chunk(m)]  # m of [8/dp/m, s]
        losses.append(training_step(model, optimizer, pairs, grid, 0.5)[0])
    return losses


alone = launch(train_tiny, 1, args=(1, 1, 1))[0]
grids = {"tp = 2": (1, 2, 2), "dp = 2": (2, 1, 2), "dp = 2, tp = 2": (2, 2, 1)}
found = {name: launch(train_tiny, dp * tp, args=(dp, tp, m)) for name, (dp, tp, m) in grids.items()}
viz.table(
    [
        {
            "": name,
            "first loss": f"{ranks[0][0]:.9f}",
            "last loss": f"{ranks[0][-1]:.9f}",
            "off from one process by at most": f"{max(abs(a - b) for a, b in zip(ranks[0], alone, strict=True)):.0e}",
            "ranks agree": "yes" if all(losses == ranks[0] for losses in ranks) else "no",
        }
        for name, ranks in {"one process": [alone], **found}.items()
    ],
    title="8 steps, in float64",
)

# %% [markdown]
# One run, four ways to lay it out.
#
# ### Checkpoints
#
# A machine of 16,384 GPUs fails every three hours: 419 unexpected interruptions in 54 days of training Llama 3 405B (Dubey et al. 2024, section 3.3.4). So the weights and the state of the optimizer are written to disk every so often. And the machine may die *while* they are written.
#
# One thing that a disk does is **atomic**, that is, done or not done, and never half: to **rename**. So a checkpoint is written under another name, and gets its own only when all of it is there. Whoever looks at the names afterwards sees whole checkpoints only. The same with deletion, which goes file by file: first the name goes, then the files.

# %% [markdown] task="15.4" title="A checkpoint that is whole or not there" difficulty=3 minutes=20
# The checkpoint of step 100 is the directory `folder/step-000100`, with six digits or more. `write(path)` fills an empty directory that is already there with the files of a checkpoint.
#
# - **What has the name of a checkpoint is complete, at every moment.** The check kills your function before each of its steps on the disk, and in the middle of each file. (It sees the steps of Python, so start no other program.)
# - The unfinished directory lies in `folder`, which may not be there yet, like the folders above it. (Only within one disk does a rename move no data.)
# - After a save, the `keep` newest checkpoints are all that there is of yours; nothing is left of a killed save, even if that save was of a different step. Other files and directories in the folder, such as `step-notes.txt` or `drawings.saving`, are none of your business.
# - `newest_checkpoint(folder)` is the path of the newest one, or None. The dates of files say nothing: somebody may have copied the folder.
# - `folder` is a `Path`, `keep` at least 1, and each save has a later step than all before it. `complete_checkpoints` serves the other two; it is not checked by itself.
#
# `path.mkdir(parents=True, exist_ok=True)`, `path.rename(new_path)`, `folder.glob("step-*.saving")` and `shutil.rmtree(path)` do what is to be done.


# %% exercise="15.4"
def complete_checkpoints(folder):
    """The paths of the complete checkpoints in a folder, the oldest first."""
    ### BEGIN SOLUTION
    found = [path for path in folder.iterdir() if re.fullmatch(r"step-\d{6,}", path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: int(path.name[5:]))
    ### END SOLUTION


def newest_checkpoint(folder):
    """The path of the newest complete checkpoint in a folder; None if there is none, or no folder."""
    ### BEGIN SOLUTION
    return (complete_checkpoints(folder) or [None])[-1]
    ### END SOLUTION


def save_checkpoint(folder, step, write, keep):
    """Make the checkpoint of a step, whose files `write(path)` writes, and keep the `keep` newest ones."""
    ### BEGIN SOLUTION
    folder.mkdir(parents=True, exist_ok=True)
    for left in [*folder.glob("step-*.saving"), *folder.glob("step-*.deleting")]:
        shutil.rmtree(left)
    unfinished = folder / f"step-{step:06d}.saving"
    unfinished.mkdir()
    write(unfinished)
    unfinished.rename(folder / f"step-{step:06d}")
    for old in complete_checkpoints(folder)[:-keep]:
        deleting = folder / f"{old.name}.deleting"
        old.rename(deleting)
        shutil.rmtree(deleting)
    ### END SOLUTION


# %% [markdown] hints="15.4"
# 1. Go through the moments at which a kill may come: before the first file, in the middle of one, before the rename, after it, in the middle of a deletion. What stands in the folder then, and under which names? What does the next save find in its way?
# 2. Remove leftovers first. Make `step-000100.saving`, let `write` fill it, rename it to `step-000100`. Then for each checkpoint that is too old: rename it to `step-000090.deleting`, and only then delete it. Complete is what is called `step-` and digits and nothing else; sort by the number, since step-1000000 comes before step-999990 as a text.
# 3. `unfinished = folder / f"step-{step:06d}.saving"`, `unfinished.mkdir()`, `write(unfinished)`, `unfinished.rename(folder / f"step-{step:06d}")`; `for old in complete_checkpoints(folder)[:-keep]:` `deleting = folder / f"{old.name}.deleting"`, `old.rename(deleting)`, `shutil.rmtree(deleting)`; `re.fullmatch(r"step-\d{6,}", path.name)` and `sorted(found, key=lambda path: int(path.name[5:]))`.

# %% check="15.4"
check("15.4", save_checkpoint, newest_checkpoint)

# %% [markdown]
# See what your function leaves behind. Each row is one process that saves step 110 and is killed at another moment.


# %%
def killed_saves():
    import tempfile

    from tplab.course.exercises.ch15.killing import killed_at
    from tplab.course.exercises.ch15.saving import Writer

    rows, when = [], "somewhere"
    while when:
        folder = Path(tempfile.mkdtemp(dir=HOME.name))
        for step in (90, 100):
            save_checkpoint(folder, step, Writer(step), 2)
        when = killed_at(len(rows) + 1, lambda folder=folder: save_checkpoint(folder, 110, Writer(110), 2))
        lies = ", ".join(sorted(path.name for path in folder.iterdir()))
        newest = newest_checkpoint(folder).name
        rows.append({"killed when": when or "not at all", "newest": newest, "what lies in the folder": lies})
    return rows


viz.table(launch(killed_saves, 1)[0])

# %% [markdown]
# Whatever the moment, a complete checkpoint is there. Lost are only the steps computed since it was taken. (A process that is killed leaves what it has written to the operating system. Where the *power* may fail, files have to be forced to the disk too, with `os.fsync`, before they are renamed; `tplab.capstone.checkpoints.writer` does that.)
#
# With several ranks each writes its own shards into the unfinished directory; when all of them have ended, one of them renames it. `torch.distributed.checkpoint`, with which they are written, does the same on a smaller scale: its file `.metadata` comes last, is written as `.metadata.tmp`, and renamed; without it nothing can be loaded.
#
# ### How much of the machine was used
#
# Tokens per second say how fast a run is, and not how good: on twice as many GPUs they should be twice as many. **Model-FLOPs utilisation**, MFU, compares with what the machine could do: the operations that the model needs for these tokens, divided by those that all GPUs could have done meanwhile at their peak (Chowdhery et al. 2022).
#
# For one token the products of the forward pass take $24 L h^2$ operations with the weights of the layers, $4 L s h$ with the scores of attention, and $2 h v$ in the output layer with `v` columns; backward takes twice as many (chapter 11). What is computed a second time to save memory brings the model no further, so MFU does not count it. A second number does, **hardware-FLOPs utilisation**: what the GPUs really did.

# %% [markdown] task="15.5" title="How much of the machine was used" difficulty=2 minutes=10
# - `config` has `num_layers`, `hidden_size`, `seq_length` and `vocab_size`; the MLP is four times as wide as the hidden size. Scores count for all `s` keys, also those that the mask hides.
# - `tokens_per_second` are those of all `gpus` together; `peak` is what one GPU could do, in operations a second.
# - Return two floats.
# - With `layers_again` the forward pass of each layer runs a second time before its backward pass. The output layer does not.
#
# The check counts the operations of a real model with torch's own counter.


# %% exercise="15.5"
def utilisation(config, tokens_per_second, gpus, peak, layers_again=False):
    """(MFU, HFU), both as a part of 1: what the model needed, and what the hardware did, of what it could have done."""
    ### BEGIN SOLUTION
    h = config.hidden_size
    weights = 24 * config.num_layers * h * h
    scores = 4 * config.num_layers * config.seq_length * h
    logits = 2 * h * config.vocab_size
    model = 3 * (weights + scores + logits)
    hardware = model + (weights + scores if layers_again else 0)
    possible = gpus * peak
    return model * tokens_per_second / possible, hardware * tokens_per_second / possible
    ### END SOLUTION


# %% [markdown] hints="15.5"
# 1. How many operations does one token take, forward and backward? How many did the run do in a second, then, and how many could all GPUs together have done?
# 2. Add up the three terms of the forward pass; three times that is the model's. With `layers_again` the hardware does the two terms of the layers once more. Multiply by the tokens of a second, divide by `gpus * peak`.
# 3. `weights = 24 * config.num_layers * h * h`; `scores = 4 * config.num_layers * config.seq_length * h`; `logits = 2 * h * config.vocab_size`; `model = 3 * (weights + scores + logits)`; `hardware = model + (weights + scores if layers_again else 0)`; each times `tokens_per_second / (gpus * peak)`.

# %% check="15.5"
check("15.5", utilisation)

# %% [markdown]
# ## 3 · Run it
#
# First your own layers. They come from your library, `my_tp`: f and g of chapter 3, the linear layers of chapter 4, and so on up to the GPT of chapter 10, with the product of chapter 11 whose gradient travels while it computes. Everything in the library has passed its check. If you haven't written an exercise yet, the course's solution takes its place.
#
# Around them stand tplab's own learning rate, windows, step and checkpoints: what you wrote in section 2, with more cases. Your five functions ran in the cells above; `utilisation` is used again in section 4, `newest_checkpoint` in section 5.

# %%
from tplab.capstone.own_layers import find_answers

answers = find_answers(Path.cwd(), SMALL, missing="tplab")
rows = {}
for exercise, whose in answers.whose.items():
    rows.setdefault((int(exercise.partition(".")[0]), whose), []).append(exercise)
viz.table([{"chapter": c, "exercises": ", ".join(of), "whose": whose} for (c, whose), of in rows.items()])

# %% [markdown]
# And now train: text of the standard library, a tokenizer of 512 byte pairs trained on it, two ranks that share each matrix. While it runs, this output shows how far it is, loss and tokens per second, and what each rank is doing; what stays is a picture. (A second run of this cell goes on after step 60, that is, does nothing.)

# %%
from tplab.capstone.watching.panel import run

results = run(SMALL, answers)

# %% [markdown]
# From a terminal it is the same program, with lines of text in place of the panel:
#
# ```
# python -m tplab.capstone --preset laptop --layers mine                    two processes, a few minutes
# torchrun --standalone --nproc-per-node 8 -m tplab.capstone --preset h100x8 --layers mine
# torchrun --standalone --nproc-per-node 8 -m tplab.capstone --preset h100x8 --tp 4 --dp 2
# ```
#
# Not a line of your layers knows which of them it is. On a laptop, their messages go through gloo and shared memory, and on 8 GPUs, through NCCL.
#
# What it wrote after the last step, each token drawn by its probability:

# %%
from tplab.capstone.training.log import read_log, steps_of

log = read_log(Path(SMALL.folder))
for row in steps_of(log, "sample"):
    print(row["text"])
viz.table(
    [{"step": row["step"], "loss on text held out": f"{row['loss']:.3f}"} for row in steps_of(log, "evaluation")],
    title=f"log({SMALL.vocab_size}), the loss of one who knows nothing, is {math.log(SMALL.vocab_size):.3f}",
)

# %% [markdown]
# 60 steps make no author, but the line breaks and the brackets come from somewhere. The preset `laptop` takes 1,200 steps, with twice as many tokens in each.
#
# ## 4 · Read the report
#
# `make capstone`, or the two commands below, measures what a report needs beside the run: the losses of one process, the speed of this machine, other numbers of ranks. It writes one page, with all pictures in it.
#
# ```
# python -m tplab.capstone study --preset laptop --layers mine
# python -m tplab.capstone report runs/laptop
# ```
#
# Here a few parts of it, for the run above. Does the loss depend on how the model is cut?

# %%
from tplab.capstone.report import compose, write_report
from tplab.capstone.report.blocks import Figure
from tplab.capstone.report.run import Run
from tplab.capstone.study import Budget, study

study(SMALL, only=["alone"], budget=Budget(alone=12), answers=answers)
report = {section.title: section for section in compose(Run(Path(SMALL.folder))).sections}
figures = {block.name: block for section in report.values() for block in section.blocks if isinstance(block, Figure)}
page = write_report(SMALL.folder)
print(f"{page.name}: {page.stat().st_size / 1e3:,.0f} kB, {len(figures)} pictures")
figures["one-rank"].picture

# %% [markdown]
# One curve, of tplab's layers on one process and of yours on two. Below it is how far they are apart: in float32 a sum that is made of two halves rounds differently. The memory of one step, beside the bill:

# %%
figures["memory"].picture

# %% [markdown]
# What the plan said, and what came:


# %%
def peak_of_two_steps(settings):
    """The most bytes that the tensors of a rank take in the first two steps of a run."""
    from tplab.capstone.study.programs import Short
    from tplab.memory import MemoryMeter

    with MemoryMeter() as meter:
        short = Short(settings)
        short.once()
        short.once()
    return meter.peak


measured = Run(Path(SMALL.folder))
planned = PLAN["this notebook"]
peak = max(measured.recent[-1]["tensors"])
ours = max(launch(peak_of_two_steps, 2, args=(replace(SMALL, layers="tplab"),)))
mfu, _ = utilisation(SMALL.model, measured.tokens_per_second, SMALL.ranks, HERE.flops)
viz.table(
    [
        {
            "": "memory of a rank, MB",
            "planned": f"{planned['memory'] / 1e6:.1f}",
            "measured": f"{peak / 1e6:.1f}",
        },
        {
            "": "the same with tplab's layers",
            "planned": f"{planned['memory'] / 1e6:.1f}",
            "measured": f"{ours / 1e6:.1f}",
        },
        {
            "": "a step, ms",
            "planned": f"{1e3 * planned['seconds']:.0f}",
            "measured": f"{1e3 * measured.step_seconds:.0f}",
        },
        {
            "": "tokens/s",
            "planned": f"{SMALL.tokens_per_step / planned['seconds']:,.0f}",
            "measured": f"{measured.tokens_per_second:,.0f}",
        },
    ],
    title=f"utilisation by your function: {mfu:.0%} of what large products reach here",
)

# %% [markdown]
# The bill is that of tplab's layers, and holds for them. They compute the loss for 512 tokens at a time, so that not all logits are there at once, and let torch's attention keep no scores; yours, of chapters 6 and 8, keep both. The planned time counts the kernels of a layer and its messages. Whatever else a step does with matrices this small, such as Python starting each operation, comes on top of it.
#
# And the messages that one rank enters in one step, part by part, as `record()` counts them:

# %%
from tplab.capstone.planning.traffic import step_parts

parts = step_parts(SMALL)
formula, sent = sum(part.bytes for part in parts), steps_of(log)[-1]["sent"][0]
viz.table(
    [
        *({"part": p.name, "kind": p.kind, "calls": p.calls, "bytes": f"{p.bytes:,}"} for p in parts),
        {"part": "formula", "kind": "", "calls": sum(p.calls for p in parts), "bytes": f"{formula:,}"},
        {"part": "recorded in the last step", "kind": "", "calls": None, "bytes": f"{sent:,}"},
    ],
    title=f"rank 0; recorded minus formula: {sent - formula:,} bytes",
)

# %% [markdown]
# The formula is that of tplab's own layers, and to the byte. With the course's solutions in your place the record has 4,096 bytes more, and you can name them: your loss of chapter 8 adds up three numbers for each of 1,024 tokens, and of the targets' logits tplab sends only the total of each block of 512 tokens (chapter 8): 4,096 bytes less, and 8 more. Your norm of chapter 14 also asks for the sum over pipeline stages, 8 bytes. 4,096 − 8 + 8.
#
# ## 5 · Kill it, and go on
#
# The same run once more, with a checkpoint after every 5th step, and it stops after step 24. In step 18 rank 1 kills itself, as a machine does that loses its power.
#
# **Predict.** After which step does the run go on, and how many steps that were finished are computed a second time?

# %% predict="15.b"
predict("15.b", goes_on_after=15, steps_again=2)

# %%
KILLED = replace(SMALL, folder=f"{HOME.name}/killed", save_every=5, evaluate_every=0, stop_after=24, async_save=False)
shutil.rmtree(KILLED.folder, ignore_errors=True)  # of an earlier run of this cell


def train_and_die(settings, answers):
    import os
    import signal

    from tplab.capstone.training import train
    from tplab.capstone.training.step import Step

    carry_on = Step.run

    def run_or_die(self, step, ids, targets):
        if step == 18 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return carry_on(self, step, ids, targets)

    Step.run = run_or_die
    return train(settings, answers)


with show_failure():
    launch(train_and_die, 2, args=(KILLED, answers))

# %%
checkpoints = Path(KILLED.folder, "checkpoints")
print("there are", ", ".join(sorted(path.name for path in checkpoints.iterdir())))
print("newest_checkpoint finds", newest_checkpoint(checkpoints).name)

# %% [markdown]
# The same settings again, in a copy of the folder: the program finds the newest checkpoint, and goes on.

# %%
from tplab.capstone.training import train


def copy_of_the_killed(name):
    folder = Path(HOME.name, name)
    shutil.rmtree(folder, ignore_errors=True)
    return str(shutil.copytree(KILLED.folder, folder, symlinks=True))


again = launch(train, 2, args=(replace(KILLED, folder=copy_of_the_killed("two-ranks")), answers))[0]
elsewhere = launch(train, 1, args=(replace(KILLED, folder=copy_of_the_killed("one-rank"), tp=1), answers))[0]
never_stopped = [row["loss"] for row in steps_of(log)]
first = again.step - len(again.losses) + 1
viz.table(
    [
        {
            "step": step,
            "never stopped": f"{never_stopped[step - 1]:.9f}",
            "killed, and gone on": f"{again.losses[step - first]:.9f}",
            "bit for bit": "equal" if again.losses[step - first] == never_stopped[step - 1] else "different",
            "gone on by one process": f"{elsewhere.losses[step - first]:.9f}",
            "off by": f"{abs(elsewhere.losses[step - first] - never_stopped[step - 1]):.0e}",
        }
        for step in (first, first + 1, first + 2, again.step)
    ],
    title=f"the run went on with step {first}, and did {len(again.losses)} steps",
)

# %% [markdown]
# Bit for bit the run that was never stopped. That is no luck: weights and the state of AdamW come from the checkpoint, and tplab's learning rate and windows are functions of the number of the step, as yours are. (So is the seed of dropout, where there is any.) The last columns are the same checkpoint, loaded by one process in place of two: it goes on as well, to the digits that float32 has.
#
# ## 6 · Three experiments
#
# The first days of a real run are spent like this: change one thing, look at five numbers. Here it is a handful of steps of a model three times as wide, whose products take long enough to be seen, with tplab's layers, which have all the switches.
#
# **Predict.** With `tp = 4` in place of 2: by which factor do these change: the weights of a matrix on a rank, the bytes of the messages that a rank enters in a step, as `record()` counts them, and the loss of the first step?

# %% predict="15.c"
predict("15.c", matrix=0.5, bytes=1, loss=1)

# %% [markdown]
# **Predict.** With sequence parallelism in place of none, does each become `"more"`, `"less"` or `"the same"`: the loss, the bytes in messages (an all-reduce counts as two halves; leave out the gradients of norms, biases and positions, which are added up once a step), and the activations that a rank keeps?

# %% predict="15.d"
predict("15.d", loss="the same", bytes="the same", activations="less")


# %%
def a_few_steps(settings):
    """What a rank sees in the first steps of a run: losses, memory, messages, and when it did what."""
    from tplab.capstone.study.programs import Short
    from tplab.memory import MemoryMeter, optimizer_bytes, parameter_bytes
    from tplab.trace import trace_rank

    with MemoryMeter() as meter:
        short = Short(settings)
        losses = [short.once()[0]]
        begin = len(meter.curve)
        losses.append(short.once()[0])
        peak = max(meter.curve[begin:])
    state = 2 * parameter_bytes(short.model) + optimizer_bytes(short.optimizer)
    with record() as section:
        losses.append(short.once()[0])
    dist.barrier()
    with trace_rank() as trace:
        losses.append(short.once()[0])
    halves = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
    sent = sum(halves[call.kind] * call.bytes for call in section)
    shown = ("mm", "addmm", "bmm")  # products; all the small operations would hide them in the picture
    if device().type == "cpu":  # kernels of a GPU have other names
        trace.spans = [s for s in trace.spans if s.name in shown or (s.lane == "communicate" and s.name != "barrier")]
    return {"losses": losses, "state": state, "activations": peak - state, "sent": sent, "trace": trace}


BASE = replace(SMALL, layers="tplab", hidden_size=192, num_heads=8, batch_size=8, micro_batch_size=8)
CHANGES = {
    "as it was": {},
    "tp = 4": {"tp": 4},
    "sequence parallel": {"sequence_parallel": True},
    "without overlap": {"async_grad_allreduce": False},
}
seen = {}
for name, change in CHANGES.items():
    settings = replace(BASE, **change)
    seen[name] = launch(a_few_steps, settings.ranks, args=(settings,))
viz.table(
    [
        {
            "": name,
            "loss, step 1": f"{ranks[0]['losses'][0]:.6f}",
            "loss, step 4": f"{ranks[0]['losses'][3]:.6f}",
            "state, MB": f"{ranks[0]['state'] / 1e6:.2f}",
            "activations, MB": f"{ranks[0]['activations'] / 1e6:.2f}",
            "messages of a step, MB": f"{ranks[0]['sent'] / 1e6:.2f}",
            "hidden behind products": f"{max(rank['trace'].hidden_share for rank in ranks):.0%}",
        }
        for name, ranks in seen.items()
    ],
    title="rank 0, an all-reduce counted as its two halves; hidden: on the rank that hides most",
)

# %% [markdown]
# **Double p.** The loss stays. The state is a little more than a half: norms, positions and the last biases are whole on every rank. The messages stay the same size, and there are more ranks to wait for. That is the limit of tensor parallelism that chapter 11 was about: the work of a rank shrinks, its messages do not.
#
# **Sequence parallelism.** The loss stays, the bytes of the layers' messages stay, the activations shrink, though not by half: what the matrices read is gathered, and kept. The 0.12 MB more are the gradients of norms, biases and positions, added up once a step.
#
# **Break the overlap.** Same loss, same bytes, and the same memory, but for a tensor that may still be travelling. Only one thing is different, and no test of numbers can see it. Look at the time:

# %%
viz.overlap({name: [rank["trace"] for rank in seen[name]] for name in ("as it was", "without overlap")})

# %% [markdown]
# With overlap, some of the messages of the backward pass begin while a product runs; without it, none does. On two cores that hardly pays, since sending takes the same core as computing. On GPUs the links have engines of their own, and a share of 0 % here means a machine that waits: in the report of a real run, look early at the share of a step that the ranks spend in collectives.

# %%
symptoms(15)

# %% [markdown]
# ## 7 · What next
#
# Three programs train large models with all of this: Megatron-LM with its library Megatron-Core (names of version 0.16; the sampler and the count of operations are in `megatron.training`), torchtitan (0.2.1, its Llama 3; later ones declare the cuts in `set_llama3_sharding_config` in place of `apply_tp`) and nanotron (0.4). Which of your functions is which of theirs:
#
# | yours | Megatron-LM | torchtitan | nanotron |
# |---|---|---|---|
# | f and g (3) | `copy_to_tensor_model_parallel_region`, `reduce_from_..` | layouts `Replicate`, `Shard` of a DTensor | `differentiable_identity`, `differentiable_all_reduce_sum` |
# | linear layers (4) | `ColumnParallelLinear`, `RowParallelLinear` | `ColwiseParallel`, `RowwiseParallel` in `apply_tp` | `TensorParallelColumnLinear`, `TensorParallelRowLinear` |
# | embedding (7) | `VocabParallelEmbedding` | `RowwiseParallel` on `tok_embeddings` | `TensorParallelEmbedding` |
# | loss (8) | `vocab_parallel_cross_entropy` | `loss_parallel` | `sharded_cross_entropy` |
# | randomness (9) | `CudaRNGStatesTracker` | `set_determinism` | `RandomStates` |
# | layer, GPT (10) | `TransformerLayer`, `GPTModel` | `parallelize_llama` on a plain model | `LlamaForTraining` |
# | overlap in backward (11) | `LinearWithGradAccumulationAndAsyncCommunication` | `maybe_enable_async_tp` | `column_linear(.., async_communication)` |
# | sequence parallel (12) | `gather_from_sequence_parallel_region`, `reduce_scatter_to_..` | `SequenceParallel` | `differentiable_all_gather`, `differentiable_reduce_scatter_sum` |
# | their gradients (12.3) | `_allreduce_non_tensor_model_parallel_grads` | done by DTensor | `sync_tied_weights_gradients` |
# | schedules (13) | `forward_backward_pipelining_without_interleaving` | `distributed/pipeline_parallel.py` | `OneForwardOneBackwardPipelineEngine` |
# | data parallel, ZeRO (14) | `DistributedDataParallel`, `DistributedOptimizer` | `fully_shard` in `apply_fsdp` | `sync_gradients_across_dp`, `ZeroDistributedOptimizer` |
# | mesh (14.3) | `initialize_model_parallel` | `ParallelDims` | `ParallelContext` |
# | norm (14.4) | `get_grad_norm_fp32` | `clip_grad_norm_` | `clip_grad_norm` |
# | learning rate (15.1) | `OptimizerParamScheduler` | `build_lr_schedulers` | `lr_scheduler_builder` |
# | windows (15.2) | `GPTDataset`, `MegatronPretrainingSampler` | `ParallelAwareDataloader` | `_get_train_sampler` |
# | step (15.3) | `finalize_model_grads`, then the optimizer | `Trainer.train_step` | `DistributedTrainer.training_step` |
# | checkpoints (15.4) | `dist_checkpointing.save` | `CheckpointManager` | `nanotron.serialize.save` |
# | utilisation (15.5) | `num_floating_point_operations` | `get_nparams_and_flops` | `get_flops_per_sec` |
#
# A good way in: open one of these next to your own, and look for the line that is yours. What they do on top is a list of topics for the next months: kernels that compute attention without its scores, 8-bit numbers, experts of which each token uses a few, context parallelism for sequences that no rank can hold, and machines so large that something is always broken.

# %% [markdown]
# ## Your library
#
# It's complete. Beside it there's now a script, `train.py`, that trains a GPT with your layers and your training step. Its settings are those of your newest run in `runs/`, if you have made one. It imports PyTorch and your package and nothing else, so take both along to any machine with GPUs.

# %%
from tplab.course import library

library(15)

# %% [markdown]
# ## 8 · Recap
#
# 1. Plan first: 16 bytes a parameter, activations by the formula, time by the cost model; then hold the run against it.
# 2. Learning rate and windows are functions of the number of the step. So a checkpoint holds weights, the optimizer's state and that number, and a run that goes on is the run that was never stopped, bit for bit.
# 3. The order of a step: mean over micro-batches, sum over `tp` of what the sequence has cut and mean over `dp`, in either order, and only then one norm, clip, step.
# 4. A checkpoint is written beside, then renamed. What has the right name is complete.
# 5. Utilisation counts what the model needs, not what the hardware was made to do.
#
# You began with a rank that said its number. Now there is a training program that you can read from the first byte of text to the last collective; its layers are yours, and every sum in it you have derived, sent, counted and broken at least once. When a run on some large machine hangs, or its loss is a little off, you will know where to look, and what to ask. That is rarer than it should be. Thank you for the patience it took. Now go and train something.
