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
# What does it take to walk away from a training run for a week? In the next three minutes, a GPT made of your own code starts to train. Then you'll pull the plug in the middle of a step. By the end of this chapter, that run will continue as if nothing had happened, and you'll know which machines to rent for a larger one.
#
# You need chapters 10, 12, and 14. About 75 minutes.

# %% tags=["setup"]
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from tplab import device, launch, viz
from tplab.capstone import PRESETS
from tplab.capstone.celebration import card, poster
from tplab.capstone.naive import FUNCTIONS as NAIVE
from tplab.capstone.own_layers import find_answers
from tplab.capstone.own_run import Plug, checkpoints_of, losses_of, sample_of, train_own
from tplab.course import check, predict, show_failure, symptoms
from tplab.data import clip_grad_norm
from tplab.sequence import allreduce_sequence_parallel_gradients

# %% [markdown]
# ## Run it
#
# Your layers come from your library. If it lacks one, the course's solution fills in. Around the model runs a loop of about 20 lines, and by the end of this chapter, it will be in your `train.py`. The loop calls functions that save and find checkpoints, choose the data, and take a step. For now, these are `NAIVE`, which means that they're what most of us would have written first. You'll replace them one by one.
#
# Let's train on the source code of Python's standard library, on two ranks.

# %%
HOME = tempfile.TemporaryDirectory(prefix="tplab-")  # it's removed when the kernel ends
RUN = replace(PRESETS["notebook"], folder=f"{HOME.name}/run")
answers = find_answers(Path.cwd(), RUN, missing="tplab")
launch(train_own, 2, args=(RUN, answers, NAIVE))
viz.curves({"your GPT, on two ranks": list(losses_of(RUN).values())}, title="60 steps")

# %% [markdown]
# It learns! And here's everything that just ran. The bytes were recorded in this run.

# %%
poster(RUN, answers)

# %% [markdown]
# After 60 steps, it writes the text below. That won't make it famous, but where did it get the line breaks and the brackets from?

# %%
print(launch(sample_of, 2, args=(RUN, answers, max(checkpoints_of(RUN).iterdir())))[0])

# %% [markdown]
# ## Pull the plug
#
# The run has saved a checkpoint after every fifth step. Let's start a second one, and kill rank 1 in the middle of step 18, with a signal that a process can neither catch nor ignore. That's as close to a power failure as we can get.
#
# **Predict.** If the run is started again, after which step does it continue? How many steps that were already finished have to be computed a second time?

# %% predict="15.a"
predict("15.a", continues_after=15, steps_again=2)

# %%
KILLED = replace(RUN, folder=f"{HOME.name}/killed")


def pull_the_plug(settings, functions, step, saving=False):
    with show_failure():
        launch(train_own, 2, args=(settings, answers, functions, Plug(step, saving)))
    print("In the folder:", *sorted(path.name for path in checkpoints_of(settings).iterdir()))


pull_the_plug(KILLED, NAIVE, step=18)  # try other steps, too

# %% [markdown]
# Rank 1 is gone, and the report tells you in which line rank 0 is waiting for it. The newest checkpoint is the one of step 15, and the run could continue from there.
#
# But the power doesn't wait for a good moment. This time, the run continues after step 15, and the plug is pulled while it's *writing* the next checkpoint. Then we start the run once more.

# %%
pull_the_plug(KILLED, NAIVE, step=20, saving=True)
with show_failure():
    launch(train_own, 2, args=(KILLED, answers, NAIVE))

# %% [markdown]
# The run picks the folder with the highest number, but that one is only half written, so now it doesn't start at all. In January 2025, the same was reported for Hugging Face's Trainer (transformers issues 35525 and 35782). A job that was killed during a save couldn't resume until somebody deleted the folder by hand.
#
# Disks help us with an operation that's **atomic**, which means that it happens completely or not at all: renaming. So write the checkpoint under a temporary name, and rename it once it's complete. Deleting a folder isn't atomic, because its files disappear one by one. What could you do there?

# %% [markdown] task="15.1" title="A checkpoint that's whole or not there" difficulty=3 minutes=15
# The checkpoint of step 100 is the folder `step-000100` in `folder`, with at least six digits. All ranks of `group` call `save_checkpoint`. On each of them, `write(path)` writes the rank's file into `path`, which has to be there already.
#
# - **Whatever is named like a checkpoint has to be complete, at any moment.** The check kills all the ranks before each operation on the disk, and in the middle of each file.
#
# - Until it's complete, a checkpoint lies in `folder` as well, because only within one disk is a rename a single operation. `folder` itself may not exist yet.
#
# - After a save, the `keep` newest checkpoints are left, and nothing that a killed save has left behind. Don't touch anything else in `folder`, such as `step-notes.txt` or the folder `drawings.saving`.
#
# - If the step's checkpoint exists already, leave it alone, and raise a `ValueError` that names the step, on every rank.
#
# - `newest_checkpoint(folder)` returns the path of the newest complete checkpoint, or None. You can't rely on the dates of the files.
#
# From `torch.distributed`, you only need `dist.get_rank(group)` and `dist.barrier(group)`, which returns as soon as every rank of the group has called it. `path.mkdir`, `path.rename`, `folder.glob` and `shutil.rmtree` do the rest.


# %% exercise="15.1"
def complete_checkpoints(folder):
    """Return the paths of the complete checkpoints in a folder, oldest first."""
    ### BEGIN SOLUTION
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{6,}", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))
    ### END SOLUTION


def newest_checkpoint(folder):
    """Return the path of the newest complete checkpoint, or None if there is none, or no folder."""
    ### BEGIN SOLUTION
    return (complete_checkpoints(folder) or [None])[-1]
    ### END SOLUTION


def save_checkpoint(folder, step, write, keep, group=None):
    """Save the checkpoint of a step, with the files that `write(path)` writes, and keep only the `keep` newest ones."""
    path = folder / f"step-{step:06d}"
    unfinished = folder / f"step-{step:06d}.saving"
    ### BEGIN SOLUTION
    if path.exists():
        raise ValueError(f"there's already a checkpoint of step {step}: {path}")
    if dist.get_rank(group) == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for left in [*folder.glob("step-*.saving"), *folder.glob("step-*.deleting")]:
            shutil.rmtree(left)
        unfinished.mkdir()
    dist.barrier(group)  # now there's a folder to write into
    write(unfinished)
    dist.barrier(group)  # now everybody has written
    if dist.get_rank(group) == 0:
        unfinished.rename(path)
        for old in complete_checkpoints(folder)[:-keep]:
            deleting = folder / f"{old.name}.deleting"
            old.rename(deleting)
            shutil.rmtree(deleting)
    ### END SOLUTION


# %% [markdown] hints="15.1"
# 1. Go through the moments at which the power may fail: before the first file, in the middle of one, after one rank has finished but the other hasn't, before and after the rename, in the middle of a deletion. What's in the folder then, and under which names? What does the next save find?
# 2. Rank 0 removes what's left of killed saves and makes the unfinished folder. Then come a barrier, `write` on every rank, and another barrier. Rank 0 renames, and only then looks for checkpoints that are too old. It renames each of them to `step-000090.deleting` before it deletes any of its files. A complete checkpoint is called `step-` followed by digits and nothing else. Sort by the number, because as a string, "step-1000000" comes before "step-999990".
# 3. `if path.exists(): raise ValueError(f"... {step}")`. On rank 0, `folder.mkdir(parents=True, exist_ok=True)`, `shutil.rmtree(left)` for each `left` in `[*folder.glob("step-*.saving"), *folder.glob("step-*.deleting")]`, and `unfinished.mkdir()`. Then `dist.barrier(group)`, `write(unfinished)`, `dist.barrier(group)`. On rank 0, `unfinished.rename(path)`, and for each `old` in `complete_checkpoints(folder)[:-keep]`, `old.rename(deleting)` and `shutil.rmtree(deleting)`. Names are complete if `re.fullmatch(r"step-\d{6,}", path.name)`.

# %% check="15.1"
check("15.1", save_checkpoint, newest_checkpoint)

# %% [markdown]
# Here's the same accident again, with your functions. This time, nothing shows up that looks complete but isn't:

# %%
SAVED = replace(NAIVE, save_checkpoint=save_checkpoint, newest_checkpoint=newest_checkpoint)
shutil.rmtree(KILLED.folder)
pull_the_plug(KILLED, SAVED, step=20, saving=True)

# %% [markdown]
# At worst, you lose the steps since the last checkpoint. That matters, because with 16,384 GPUs, something fails every three hours. There were 419 unexpected interruptions in 54 days of training Llama 3 405B (Dubey et al. 2024, section 3.3.4).
#
# ## It comes back, and the loss is too good
#
# Now we let the run continue after step 15. Then we pull the plug twice more, and let it train to the end.

# %%
for step in (33, 48):
    pull_the_plug(KILLED, SAVED, step)
launch(train_own, 2, args=(KILLED, answers, SAVED))


def next_to_each_other(killed, title):
    runs = {"never stopped": losses_of(RUN), "killed": losses_of(killed)}
    return viz.curves({name: list(losses.values()) for name, losses in runs.items()}, title=title)


next_to_each_other(KILLED, "plug pulled in steps 20, 33, and 48")

# %% [markdown]
# The killed run is *better*? That's the kind of good news that should worry you.
#
# **Predict.** The data come from a shuffling loader in each process, which remembers its position for as long as the process lives. After the last restart, the run continues with step 46. In which step has the model seen the text of step 46 for the first time? How many times has it trained on this text by now, including step 46?

# %% predict="15.b"
predict("15.b", first_seen_in=1, times=4)

# %% [markdown]
# So the loader has to skip what's been read. But even that can go wrong. Hugging Face's accelerate skipped the right number of batches, but the loader that it made for the rest of the epoch counted its epochs from 0 again. So it shuffled like epoch 0, no matter which epoch it was (accelerate pull request 4071, from June 2026). Some text came twice in an epoch and some not at all, and you only notice if you compare with a run that was never stopped.
#
# There's a much simpler way. Who says that a loader needs a memory? The number of finished steps is in every checkpoint, and the windows can be a **function of that number**.

# %% [markdown] task="15.2" title="Fix it: the same data twice" difficulty=2 minutes=12
# The text is divided into `windows` windows, numbered from 0. Return the `batch_size / replicas` windows that this replica trains on in the step after `done` finished steps. The code below is like what was shipped, and on top of that, each replica shuffles for itself. On what may the order depend, and on what not?
#
# - In each epoch, every window comes once, in a new random order that depends on `seed` and the epoch. Runs with different seeds must never have an epoch's order in common. (With `seed + epoch`, they would.)
#
# - `batch_size` is at most `windows`, but it may not divide it. Then a batch contains the end of one epoch and the beginning of the next.
#
# - All replicas together get the same windows as a single replica would.
#
# - The same arguments give the same windows, on any day and in any process. Leave the random states of torch and Python alone, because dropout needs them. `torch.Generator()` has a state of its own.


# %% exercise="15.2"
def own_windows(done, seed, windows, batch_size, replica, replicas):
    """Return the windows that a replica trains on in the step after `done` steps, as a list of ints."""
    each = batch_size // replicas
    ### BEGIN SOLUTION
    first = done * batch_size + replica * each
    mine = []
    for number in range(first, first + each):
        epoch, place = divmod(number, windows)
        generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
        order = torch.randperm(windows, generator=generator).tolist()
        mine.append(order[place])
    return mine
    ### BROKEN
    # generator = torch.Generator().manual_seed(seed + replica)  # plus the epoch, which is 0 in a new loader
    # order = torch.randperm(windows, generator=generator).tolist()
    # skipped = done * each % windows
    # return (order + order)[skipped : skipped + each]
    ### END SOLUTION


# %% [markdown] hints="15.2"
# 1. Number all sequences of the run, across all epochs: 0, 1, 2, ... Which of these numbers belong to this step, and which of those to this replica? To which epoch does number n belong?
# 2. The step's numbers begin with `done * batch_size`, and this replica's part begins `replica * each` after that. `divmod(number, windows)` is the epoch and the place in its order. Draw the order with a generator whose seed is made of `seed` and the epoch, such as `seed` times a large number, plus the epoch.
# 3. For each `number` in `range(first, first + each)`, with `first = done * batch_size + replica * each`: `epoch, place = divmod(number, windows)`, `generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)`, and the window is `torch.randperm(windows, generator=generator)[place].item()`.

# %% check="15.2"
check("15.2", own_windows)

# %% [markdown]
# The learning rate is a function of the step as well. It's part of the loop: up in a straight line, while the weights are still random and the gradients point anywhere, and then down along half a cosine.

# %%
from tplab.capstone.loop import learning_rate

viz.curves({"learning rate": [learning_rate(step, RUN) for step in range(1, RUN.steps + 1)]}, ylabel="rate")

# %% [markdown]
# ## More ranks
#
# What if you get four GPUs tomorrow, or only one? A checkpoint says how its tensors are split, so loading it on a different number of ranks is no problem. What's still missing is a step that knows about replicas and micro-batches. Every sum of this course meets in it.
#
# One warning: Adam hides your mistakes here. It divides by the size of the gradients, so if you forget a factor of $1/m$, its steps hardly change. That's why the check uses plain SGD.

# %% [markdown] task="15.3" title="A training step" difficulty=4 minutes=15
# Take one step on this replica's micro-batches, as a single process would take it on all the sequences of the step. Where do you average, what do you sum over which group, and what comes last?
#
# - `model(x, y)` is the mean loss of a micro-batch, the same on all ranks of the `tp` group. All micro-batches have the same size, and so do all replicas.
#
# - `mesh.get_group("tp")` and `mesh.get_group("dp")` are this rank's groups.
#
# - `allreduce_sequence_parallel_gradients(model, group)` is exercise 12.3. Only parameters that are marked need it. `clip_grad_norm(parameters, max_norm, mesh)` takes the norm as in exercise 14.4, clips the gradient, and returns the norm before that, as a tensor.
#
# - Each gradient crosses the replicas once per step, not once per micro-batch.
#
# - Return two floats: the mean loss over all sequences of all replicas, and the norm before clipping. Leave the model in the mode it was in.


# %% exercise="15.3"
def training_step(model, optimizer, micro_batches, mesh, max_norm):
    """Take one step on this replica's micro-batches, a list of pairs (x, y). Return the loss and the norm."""
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
# 1. Which gradient would a single process have if it computed all the sequences at once? What's in `param.grad` after the last micro-batch? And what does `backward` do with what's in it from the previous step?
# 2. Zero the gradients. Divide each micro-batch's loss by the number of micro-batches, and call `backward`. Then sum the marked gradients over `tp`, and average all gradients over `dp`. These two can trade places, but the norm has to wait for both. Clip, step, and average the loss over `dp`, too.
# 3. `loss = model(x, y) / len(micro_batches)`, `loss.backward()`, `total += loss.detach()`. After the loop, `allreduce_sequence_parallel_gradients(model, tp)`. For each parameter, `dist.all_reduce(param.grad, group=dp)` and `param.grad /= dist.get_world_size(dp)`. Then `norm = clip_grad_norm(model.parameters(), max_norm, mesh)` and `optimizer.step()`. At the end, `dist.all_reduce(total, group=dp)`, and return `total.item() / dist.get_world_size(dp), norm.item()`.

# %% check="15.3"
check("15.3", training_step)

# %% [markdown]
# Now all functions are yours. Here's the same run on four grids:

# %%
MINE = replace(SAVED, own_windows=own_windows, training_step=training_step)
GRIDS = {"one process": (1, 1), "tp = 2": (2, 1), "dp = 2": (1, 2), "tp = 2, dp = 2": (2, 2)}
losses = {}
for name, (tp, dp) in GRIDS.items():
    settings = replace(RUN, folder=f"{HOME.name}/{tp}x{dp}", tp=tp, dp=dp, micro_batch_size=4)
    launch(train_own, tp * dp, args=(settings, answers, MINE))
    losses[name] = list(losses_of(settings).values())
viz.table(
    [
        {"grid": name, "first loss": f"{found[0]:.6f}", "last loss": f"{found[-1]:.6f}",
         "micro-batches per replica": 2 // GRIDS[name][1],
         "largest difference": f"{max(abs(a - b) for a, b in zip(found, losses['one process'], strict=True)):.0e}"}
        for name, found in losses.items()
    ],
    title="60 steps in float32",
)  # fmt: skip

# %% [markdown]
# Four layouts, one run. The differences come from float32, which rounds differently if you add in a different order.
#
# ## Rent some machines
#
# So which layout should you take? On your laptop, it hardly matters. For a larger model, it decides how many weeks you pay for. Here are three jobs, each on machines with eight H100s. The 70 billion parameters are Llama 3's, and the 175 billion are GPT-3's.

# %%
from tplab.cluster.jobs import JOBS

viz.table(
    [
        {"job": name, "GPUs": job.gpus, "layers": job.config.num_layers, "h": job.config.hidden_size,
         "heads": job.config.num_heads, "s": job.config.seq_length, "sequences per step": job.sequences}
        for name, job in JOBS.items()
    ]
)  # fmt: skip

# %% [markdown]
# If it doesn't fit, you can compute activations a second time instead of storing them. How well the GPUs are used then depends on whom you ask. **Model FLOPs utilization** (MFU) only counts the operations that the model needs, as a share of what the GPUs could do. **Hardware FLOPs utilization** (HFU) counts all the operations, including those that are done twice.
#
# **Predict.** The smallest job fits easily, but you recompute all layers anyway. Which of the two rises, "MFU" or "HFU"? What do the tokens per second do? ("rise" or "fall")

# %% predict="15.c"
predict("15.c", rises="HFU", tokens_per_second="fall")

# %% [markdown] task="15.4" title="Rent some machines" difficulty=2 minutes=10
# For each job, return a tuple with `tp`, `pp`, `dp`, the micro-batch size, and what's recomputed ("nothing", "attention", or "layers"). You win if your layout fits, and a step takes at most 5 % longer than with the best layout that the course's cost model knows.
#
# - All GPUs have to be used, `tp` divides the heads, and `dp` times the micro-batch size divides the sequences.
#
# - A tenth of the 80 GB stays free. With FlashAttention, which the first two models use, recomputing "attention" saves nothing.
#
# No formula needed. Make a guess, and let the check tell you what it costs. Chapter 14 tells you how to change it.


# %% exercise="15.4"
def rent(job):
    """Return (tp, pp, dp, micro-batch size, what's recomputed) for "98 million", "70 billion", or "175 billion"."""
    ### BEGIN SOLUTION
    layouts = {
        "98 million": (1, 1, 8, 32, "nothing"),
        "70 billion": (8, 4, 2, 1, "nothing"),
        "175 billion": (4, 32, 2, 2, "attention"),
    }
    return layouts[job]
    ### END SOLUTION


# %% [markdown] hints="15.4"
# 1. How many GPUs does the smallest model need at least? Whatever isn't needed to make it fit only costs messages. For the larger two, which messages have to stay within a machine?
# 2. The small model fits on a single GPU, so all eight can be replicas, and large micro-batches keep each of them busy. For the larger ones, begin with `tp = 8` and the smallest `pp` that fits, with small micro-batches, and only recompute as much as you have to. GPT-3 stores its attention scores, which take a lot of memory and little time to compute again.
# 3. `(1, 1, 8, 32, "nothing")`, `(8, 4, 2, 1, "nothing")`, and `(8, 8, 4, 2, "attention")` win.

# %% check="15.4"
check("15.4", rent)

# %%
rows = []
for name, job in JOBS.items():
    tp, pp, dp, size, recompute = rent(name)
    for again in (recompute, "layers"):
        played = job.play(tp, pp, dp, size, again)
        tokens = job.sequences * job.config.seq_length / played.time.total
        rows.append({"job": name, "recomputed": again, "tokens/s": f"{tokens:,.0f}",
                     "MFU": f"{played.throughput.mfu:.0%}", "HFU": f"{played.throughput.hfu:.0%}"})  # fmt: skip
viz.table(rows, title="your layouts, as they are and with all layers recomputed")

# %% [markdown]
# Recomputing makes each run slower. In two of them, the HFU still gets better, so if somebody tells you their utilization, ask which one it is. (Llama's layers are split over eight ranks, so their second forward pass also sends its messages a second time.)
#
# ## Never stopped, killed, and on one rank
#
# It's time for the last test, and now everything is yours. One run is never stopped. In the other one, the plug is pulled three times, once in the middle of a save. And after the last time, a single rank takes over in a copy of the folder, as if the other machine had burned down.

# %%
whole = replace(RUN, folder=f"{HOME.name}/whole")
launch(train_own, 2, args=(whole, answers, MINE))
killed = replace(RUN, folder=f"{HOME.name}/three-times")
pull_the_plug(killed, MINE, step=18)
pull_the_plug(killed, MINE, step=30, saving=True)
pull_the_plug(killed, MINE, step=48)
alone = replace(killed, folder=shutil.copytree(killed.folder, f"{HOME.name}/alone", symlinks=True), tp=1)
for settings, ranks in ((killed, 2), (alone, 1)):
    launch(train_own, ranks, args=(settings, answers, MINE))

whole, killed, alone = (losses_of(settings) for settings in (whole, killed, alone))
viz.table(
    [
        {"step": step, "never stopped": f"{whole[step]:.9f}", "killed three times": f"{killed[step]:.9f}",
         "bit for bit": "equal" if whole[step] == killed[step] else "different",
         "on one rank since step 46": f"{alone[step]:.9f}" if step > 45 else ""}
        for step in (1, 17, 18, 30, 46, 47, 48, 60)
    ],
    title=f"equal in {sum(whole[step] == killed[step] for step in whole)} of {len(whole)} steps",
)  # fmt: skip

# %% [markdown]
# ## Killed three times, and not a single bit is different.
#
# Nothing was saved about the data or the learning rate, because both are functions of the step.

# %%
symptoms(15)

# %% [markdown]
# ## What you built
#
# Next to your library, there's now a script called `train.py`. It's the loop of this chapter with your layers and your functions, and it needs nothing but PyTorch. It's yours, so take both to any machine with GPUs.

# %%
from tplab.course import library

library(15)

# %% [markdown]
# And here's a card to show around. It's in your folder as `card.svg`.

# %%
card({f"p = {p}": losses[name] for p, name in ((1, "one process"), (2, "tp = 2"), (4, "tp = 2, dp = 2"))},
              RUN, answers)  # fmt: skip

# %% [markdown]
# <details><summary>Going deeper: the large run, checkpoints in other programs, and what's next</summary>
#
# - **A larger run.** `tplab` has a capstone program with the same parts and more options: a live panel, evaluations, checkpoints that are written in the background, and a report. `python -m tplab.capstone --preset laptop --layers mine` trains your layers for a few minutes on two processes, and `make capstone` writes the report. The preset `h100x8` is made for eight H100s. We've only run it on emulated GPUs so far.
#
# - **Power failures.** After a kill, the operating system still writes what a process has handed over. After a power failure, it doesn't. So before renaming, you also have to force the files to the disk with `os.fsync`, as `tplab.capstone.checkpoints` does.
#
# - **`torch.distributed.checkpoint`** writes a file `.metadata` last, under a temporary name that it then renames. Without this file, nothing can be loaded.
#
# - **torchtitan's `ParallelAwareDataloader`** saves the state of each replica's loader, so it can't continue with a different number of replicas. Megatron-LM, on the other hand, computes a sample's position from the number of consumed samples, as you do.
#
# </details>
#
# One kind of message in your step still can't hide behind anything: those inside a layer. And your sequences are short. But that's for another day.
#
# You began with two processes that added 10 and 11. Go train something.
