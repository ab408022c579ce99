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
# In this last chapter, a GPT made of your own code trains on two ranks, and you pull the plug in the middle of a step. By the end, you'll be able to kill a run three times and still get the same losses, bit for bit, as in a run that was never stopped. You'll also choose layouts for much larger runs.
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
# The layers of this GPT come from your library. If your library doesn't have a layer yet, the course's solution takes its place.
#
# The training loop has about 20 lines, and it calls four functions. These functions save a checkpoint, find the newest checkpoint, choose the data, and take a training step. `NAIVE` contains the versions that most of us would write first. You'll replace all four of them.
#
# Let's train on the source code of Python's standard library, using two ranks.

# %%
HOME = tempfile.TemporaryDirectory(prefix="tplab-")  # it's removed when the kernel ends
RUN = replace(PRESETS["notebook"], folder=f"{HOME.name}/run")
answers = find_answers(Path.cwd(), RUN, missing="tplab")
launch(train_own, 2, args=(RUN, answers, NAIVE))
viz.curves({"your GPT, on two ranks": list(losses_of(RUN).values())}, title="60 steps")

# %% [markdown]
# It learns! For each block of your model, the poster below shows where the code comes from and which all-reduces the block needs for one micro-batch.

# %%
poster(RUN, answers)

# %% [markdown]
# The next cell shows some text that the model writes after 60 steps. It's far from real Python, but it already has line breaks and indentation.

# %%
print(launch(sample_of, 2, args=(RUN, answers, max(checkpoints_of(RUN).iterdir())))[0])

# %% [markdown]
# ## Pull the plug
#
# Your run saved a checkpoint every five steps. Now let's start a second run with the same settings and kill rank 1 in the middle of step 18. We use a signal that no process can catch or ignore, so this is as close to a power failure as we can get.
#
# **Predict.** Suppose we start the killed run again. After which step does it continue? How many finished steps does it have to compute a second time?

# %% predict="15.a"
predict("15.a", continues_after=15, steps_again=2)

# %%
KILLED = replace(RUN, folder=f"{HOME.name}/killed")


def pull_the_plug(settings, functions, step, saving=False):
    with show_failure():
        launch(train_own, 2, args=(settings, answers, functions, Plug(step, saving)))
    names = sorted(path.name for path in checkpoints_of(settings).iterdir())
    print("In the folder:", *names)


pull_the_plug(KILLED, NAIVE, step=18)  # try other steps, too

# %% [markdown]
# Rank 1 is dead, and the report shows the line where rank 0 is waiting for it. The run can continue from its newest checkpoint, which was saved after step 15.
#
# But a power failure doesn't wait for a convenient moment. Let's start the run again and kill rank 1 while it's *writing* the checkpoint of step 20. Then we start the run once more.

# %%
pull_the_plug(KILLED, NAIVE, step=20, saving=True)
with show_failure():
    launch(train_own, 2, args=(KILLED, answers, NAIVE))

# %% [markdown]
# Now the run doesn't start at all. The naive function picks the folder with the highest number, but the checkpoint in this folder is only half written. (In January 2025, users of Hugging Face's Trainer ran into the same problem. See transformers issues 35525 and 35782.)
#
# An operation is called **atomic** if it happens either completely or not at all. Renaming a folder is atomic, so you can write a checkpoint under a temporary name and rename the folder once all of its files are complete. Deleting a folder isn't atomic, because its files disappear one by one. So how can you delete an old checkpoint safely?

# %% [markdown] task="15.1" title="A checkpoint that's whole or not there" difficulty=3 minutes=15
# Write one function that saves a checkpoint and another that finds the newest one. The checkpoint of step 100 is a folder called `step-000100` inside `folder`. (The number has at least six digits.)
#
# All ranks of `group` call `save_checkpoint`. Its argument `write` is a function that takes a folder and writes the calling rank's files into it. Every rank has to call `write`, with the path of a folder that you've already created.
#
# - **Anything that's named like a checkpoint has to be complete at all times.** The check kills all ranks before each disk operation and in the middle of each file.
#
# - The temporary folder also has to be inside `folder`, because a rename is atomic only if it stays on the same disk. `folder` itself may not exist yet.
#
# - After each save, only the `keep` newest checkpoints should remain, and anything left behind by interrupted saves should be gone. Don't touch anything else in `folder`, such as the file `step-notes.txt` or the folders `step-drawings` and `drawings.saving`.
#
# - If there's already a checkpoint for this step, leave it alone, and have every rank raise a `ValueError` that names the step.
#
# - `newest_checkpoint(folder)` returns the path of the newest complete checkpoint, or `None` if there isn't one. You can't rely on modification times.
#
# You only need `dist.get_rank(group)`, `dist.barrier(group)`, `path.mkdir`, `path.rename`, `folder.glob`, and `shutil.rmtree`. A barrier returns as soon as every rank of the group has called it. Other collectives don't work in this check.


# %% exercise="15.1"
def complete_checkpoints(folder):
    """Return the paths of the complete checkpoints in a folder, oldest first."""
    ### BEGIN SOLUTION
    paths = folder.glob("step-*")
    found = [path for path in paths if re.fullmatch(r"step-\d{6,}", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))
    ### END SOLUTION


def newest_checkpoint(folder):
    """Return the path of the newest complete checkpoint.

    If there's no checkpoint or no folder, return None.
    """
    ### BEGIN SOLUTION
    return (complete_checkpoints(folder) or [None])[-1]
    ### END SOLUTION


def save_checkpoint(folder, step, write, keep, group=None):
    """Save the checkpoint of a step, whose files come from `write`.

    Keep only the `keep` newest checkpoints.
    """
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
# 1. Go through all the moments when the power might fail: before the first file is written, in the middle of a file, when one rank has finished writing but the other rank hasn't, right before and right after the rename, and in the middle of a deletion. Which folders exist at each of these moments, and what are they called? Which of them does the next save have to clean up?
# 2. First, rank 0 removes everything that interrupted saves have left behind, and it creates the temporary folder. Then all ranks enter a barrier, call `write`, and enter a second barrier. Now that all files are complete, rank 0 renames the folder. Rank 0 shouldn't look for old checkpoints until this rename is done. Before rank 0 deletes the first file of an old checkpoint, it renames the checkpoint's folder to something like `step-000090.deleting`. The name of a complete checkpoint consists of `step-` followed by digits, and nothing else. Sort the checkpoints by number, because the string "step-1000000" comes before the string "step-999990".
# 3. Start with `if path.exists(): raise ValueError(f"... {step}")`. On rank 0, call `folder.mkdir(parents=True, exist_ok=True)`, then `shutil.rmtree(left)` for each `left` in `[*folder.glob("step-*.saving"), *folder.glob("step-*.deleting")]`, and then `unfinished.mkdir()`. All ranks call `dist.barrier(group)`, `write(unfinished)`, and `dist.barrier(group)`. After that, rank 0 calls `unfinished.rename(path)`. For each `old` in `complete_checkpoints(folder)[:-keep]`, rank 0 sets `deleting = folder / f"{old.name}.deleting"` and calls `old.rename(deleting)` and `shutil.rmtree(deleting)`. A checkpoint is complete if `re.fullmatch(r"step-\d{6,}", path.name)`.

# %% check="15.1"
check("15.1", save_checkpoint, newest_checkpoint)

# %% [markdown]
# Let's repeat the accident with your functions.

# %%
SAVED = replace(
    NAIVE, save_checkpoint=save_checkpoint, newest_checkpoint=newest_checkpoint
)
shutil.rmtree(KILLED.folder)
pull_the_plug(KILLED, SAVED, step=20, saving=True)

# %% [markdown]
# This time, the incomplete folder isn't named like a checkpoint, so the run can continue from the checkpoint before it. All you lose is the steps since then.
#
# On large clusters, runs are interrupted all the time. When Llama 3 405B was trained on 16,384 GPUs, there were 419 unexpected interruptions in 54 days, which is about one every three hours (Dubey et al. 2024, section 3.3.4).
#
# ## The loss is too good
#
# Let's start the killed run again. It continues after step 15, and we'll pull the plug two more times, in steps 33 and 48. Then we'll let the run train to the end.

# %%
for step in (33, 48):
    pull_the_plug(KILLED, SAVED, step)
launch(train_own, 2, args=(KILLED, answers, SAVED))


def next_to_each_other(killed, title):
    runs = {"never stopped": losses_of(RUN), "killed": losses_of(killed)}
    curves = {name: list(losses.values()) for name, losses in runs.items()}
    return viz.curves(curves, title=title)


next_to_each_other(KILLED, "plug pulled in steps 20, 33, and 48")

# %% [markdown]
# The killed run has a *lower* loss than the run that was never stopped. That's the kind of good news that should worry you.
#
# **Predict.** In each process, a loader chooses the data. It shuffles the text, and it remembers its position for as long as the process lives. After the last restart, the run continues with step 46. In which step did the model see the text of step 46 for the first time? How many times has the model trained on this text by the end of step 46?

# %% predict="15.b"
predict("15.b", first_seen_in=1, times=4)

# %% [markdown]
# So after a restart, the loader should skip the text that the model has already seen. But even that can go wrong. When a run resumed with Hugging Face's accelerate, the loader skipped the right number of batches but counted the epochs from 0 again. (An epoch is one pass over the whole text.) No matter which epoch the run had reached, the loader used the order of epoch 0. So in the epoch of the restart, the model saw some parts of the text twice and other parts not at all. You'd only notice this if you compared the run with one that was never stopped (accelerate pull request 4071, June 2026).
#
# There's a much simpler way, in which the loader doesn't have to remember anything. Every checkpoint contains the number of finished steps, and the choice of the data can be a **function of this number**.

# %% [markdown] task="15.2" title="Fix it: the same data twice" difficulty=2 minutes=12
# The text is divided into `windows` sequences of the same length. We call these sequences windows and number them from 0. Return the windows that this replica should train on in the step after `done` finished steps.
#
# The code below makes the same mistake as accelerate's loader. It also makes a second mistake, because each replica shuffles the windows in its own order. What may the order of the windows depend on, and what must it not depend on?
#
# - In each epoch, every window appears exactly once, in a new random order that depends on `seed` and the epoch. Runs with different seeds between 0 and 4,000 must not have any order in common in their first 10,000 epochs. (With `seed + epoch`, epoch 1 of seed 0 would have the same order as epoch 0 of seed 1.)
#
# - `batch_size` is never larger than `windows`, but `windows` isn't always a multiple of `batch_size`. So a batch may contain the end of one epoch and the beginning of the next.
#
# - In each step, all replicas together get the same windows that a single replica would get.
#
# - The same arguments always give the same windows, even in a different process or on a different day. Don't touch the random states of torch and Python, because dropout needs them. Each `torch.Generator()` has a state of its own.


# %% exercise="15.2"
def own_windows(done, seed, windows, batch_size, replica, replicas):
    """Return the windows that a replica trains on in the step after `done` steps.

    They're a list of ints.
    """
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
    # # the loader also adds the epoch, which is 0 in a new loader
    # generator = torch.Generator().manual_seed(seed + replica)
    # order = torch.randperm(windows, generator=generator).tolist()
    # skipped = done * each % windows
    # return (order + order)[skipped : skipped + each]
    ### END SOLUTION


# %% [markdown] hints="15.2"
# 1. Imagine that all the sequences of a run are numbered 0, 1, 2, and so on, across all epochs. Which of these sequences belong to the current step, and which of them does this replica train on? Which epoch does sequence number n belong to?
# 2. The first sequence of the step has the number `done * batch_size`, and this replica's first sequence comes `replica * each` sequences later. `divmod(number, windows)` returns the number of the epoch and the position within this epoch. To get the order of an epoch, use a generator, and compute its seed from both `seed` and the number of the epoch. For example, you can multiply `seed` by a large number and add the number of the epoch.
# 3. Let `first = done * batch_size + replica * each`. For each `number` in `range(first, first + each)`, compute `epoch, place = divmod(number, windows)`, create `generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)`, and append `torch.randperm(windows, generator=generator)[place].item()` to the list that you return.

# %% check="15.2"
check("15.2", own_windows)

# %% [markdown]
# The learning rate is a function of the step as well, and the loop already takes care of that. While the weights are still random, large steps would do more harm than good, so the learning rate first rises linearly from almost zero. After this warm-up, it falls along half of a cosine curve.

# %%
from tplab.capstone.learners_loop import learning_rate

rates = [learning_rate(step, RUN) for step in range(1, RUN.steps + 1)]
viz.curves({"learning rate": rates}, ylabel="rate")

# %% [markdown]
# ## More ranks
#
# What if you get four GPUs tomorrow, or only one? Your checkpoints are ready for that. A checkpoint records how each tensor is split, so any number of ranks can load it. But the naive training step can't handle replicas and micro-batches. So let's write a better one. It'll need all the sums you've met in this course.
#
# Adam would hide your mistakes here. It divides each gradient by its typical size, so if you forget a factor of $1/m$, the weights still change by almost the same amount. That's why the check uses plain SGD.

# %% [markdown] task="15.3" title="A training step" difficulty=4 minutes=15
# Take one training step on this replica's micro-batches. After the step, the weights should be the same as if a single process had trained on all the sequences of all replicas. What do you have to average, what do you have to sum, and over which groups? What has to come last?
#
# - `model(x, y)` returns the mean loss of a micro-batch, which is the same on all ranks of the `tp` group. All micro-batches are the same size, and all replicas have the same number of micro-batches.
#
# - `mesh.get_group("tp")` and `mesh.get_group("dp")` return the groups that this rank belongs to.
#
# - `allreduce_sequence_parallel_gradients(model, group)` is the function from exercise 12.3. It sums the gradients of all marked parameters over `group`. No other parameter needs this sum.
#
# - `clip_grad_norm(parameters, max_norm, mesh)` computes the norm as in exercise 14.4 and clips the gradients. It returns the norm before clipping, as a tensor.
#
# - Send each gradient to the other replicas only once per step, not once per micro-batch.
#
# - Return two floats: the mean loss over all sequences of all replicas, and the norm before clipping. Don't switch the model between training and evaluation mode.


# %% exercise="15.3"
def training_step(model, optimizer, micro_batches, mesh, max_norm):
    """Take one step on this replica's micro-batches, a list of pairs (x, y).

    Return the loss and the norm.
    """
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
# 1. If a single process trained on all the sequences of this step, what would its gradient be? What does `param.grad` contain after the last micro-batch? What does `backward` do if `param.grad` still contains the gradient of the previous step?
# 2. Start by setting all gradients to zero. For each micro-batch, divide the loss by the number of micro-batches, and call `backward` on the result. Then sum the marked gradients over `tp`, and average all gradients over `dp`. The order of these two operations doesn't matter, but the norm has to come after both of them. Clip the gradients, call the optimizer, and average the loss over `dp` as well.
# 3. After `optimizer.zero_grad()`, run `loss = model(x, y) / len(micro_batches)`, `loss.backward()`, and `total += loss.detach()` for each micro-batch. Then call `allreduce_sequence_parallel_gradients(model, tp)`. For each parameter, call `dist.all_reduce(param.grad, group=dp)`, followed by `param.grad /= dist.get_world_size(dp)`. Next come `norm = clip_grad_norm(model.parameters(), max_norm, mesh)` and `optimizer.step()`. Finally, call `dist.all_reduce(total, group=dp)`, and return `total.item() / dist.get_world_size(dp), norm.item()`.

# %% check="15.3"
check("15.3", training_step)

# %% [markdown]
# Now all four functions are yours! Let's train the same model with them on four different grids of ranks.

# %%
MINE = replace(SAVED, own_windows=own_windows, training_step=training_step)
GRIDS = {"one process": (1, 1), "tp = 2": (2, 1), "dp = 2": (1, 2),
         "tp = 2, dp = 2": (2, 2)}  # fmt: skip
losses = {}
for name, (tp, dp) in GRIDS.items():
    folder = f"{HOME.name}/{tp}x{dp}"
    settings = replace(RUN, folder=folder, tp=tp, dp=dp, micro_batch_size=4)
    launch(train_own, tp * dp, args=(settings, answers, MINE))
    losses[name] = list(losses_of(settings).values())
rows = []
for name, found in losses.items():
    pairs = zip(found, losses["one process"], strict=True)
    furthest = max(abs(a - b) for a, b in pairs)
    rows.append({"grid": name, "first loss": f"{found[0]:.6f}",
                 "last loss": f"{found[-1]:.6f}",
                 "micro-batches per replica": 2 // GRIDS[name][1],
                 "largest difference": f"{furthest:.0e}"})  # fmt: skip
viz.table(rows, title="60 steps in float32")

# %% [markdown]
# You've trained with four different layouts and gotten the same losses every time! The tiny differences that remain come from rounding, because a sum in float32 depends on the order in which you add its terms.
#
# ## Rent some machines
#
# Which layout should you choose? On your laptop, it hardly matters. But if you train a larger model, the layout decides how many weeks you have to pay for. The table below shows three training jobs on machines with eight H100 GPUs each. The 70-billion-parameter model is Llama 3, and the 175-billion-parameter model is GPT-3.

# %%
from tplab.cluster.jobs import JOBS

viz.table(
    [
        {"job": name, "GPUs": job.gpus, "layers": job.config.num_layers,
         "h": job.config.hidden_size, "heads": job.config.num_heads,
         "s": job.config.seq_length, "sequences per step": job.sequences}
        for name, job in JOBS.items()
    ]
)  # fmt: skip

# %% [markdown]
# If a model doesn't fit into memory, you can recompute activations in the backward pass instead of storing them. But then there are two ways to measure how well you use your GPUs. Both count the FLOPs of a step and divide them by the FLOPs that the GPUs could have done in the same time at their peak rate. **Model FLOPs utilization** (MFU) only counts the FLOPs that the model needs. **Hardware FLOPs utilization** (HFU) counts all FLOPs, including the recomputed ones.
#
# **Predict.** The smallest model easily fits into memory, but suppose you recompute all of its layers anyway. Which of the two utilizations rises, "MFU" or "HFU"? Does the number of tokens per second "rise" or "fall"?

# %% predict="15.c"
predict("15.c", rises="HFU", tokens_per_second="fall")

# %% [markdown] task="15.4" title="Rent some machines" difficulty=2 minutes=10
# For each job, return a tuple that contains `tp`, `pp`, `dp`, the micro-batch size, and what you recompute ("nothing", "attention", or "layers"). You win if your layout fits into memory and a step takes at most 5% longer than with the best layout. The course's cost model predicts how long each step takes.
#
# - You have to use all the GPUs. `tp` has to divide the number of heads, and `dp` times the micro-batch size has to divide the number of sequences per step.
#
# - Each GPU has 80 GB of memory, and 10% of it has to stay free. If `tp` is larger than 1, the ranks also use sequence parallelism (chapter 12). Every replica stores the full optimizer state, so a larger `dp` doesn't save any memory. The first two models use FlashAttention, so recomputing "attention" doesn't save any memory.
#
# Start with a guess, and the check will tell you what's wrong with your layout. If you get stuck, think about what each choice costs: messages (chapter 11), activations (chapter 12), bubbles (chapter 13), and the gradients of the replicas (chapter 14).


# %% exercise="15.4"
def rent(job):
    """Return (tp, pp, dp, micro-batch size, what's recomputed) for a job.

    The job is "98 million", "70 billion", or "175 billion".
    """
    ### BEGIN SOLUTION
    layouts = {
        "98 million": (1, 1, 8, 32, "nothing"),
        "70 billion": (8, 4, 2, 1, "nothing"),
        "175 billion": (4, 32, 2, 2, "attention"),
    }
    return layouts[job]
    ### END SOLUTION


# %% [markdown] hints="15.4"
# 1. How many GPUs does the smallest model need to fit into memory? If you split a model across more GPUs than necessary, the only thing you gain is more messages. For the two larger models, which messages have to stay within a machine?
# 2. The small model fits on a single GPU, so each of the eight GPUs can hold a full replica, and large micro-batches keep them busy. For the two larger models, start with `tp = 8`, small micro-batches, and the smallest `pp` that fits into memory. Then try larger micro-batches as long as they fit. Only recompute as much as you have to. GPT-3 stores its attention scores, which take up a lot of memory but don't take long to recompute.
# 3. For the smallest model, return `(1, 1, 8, 32, "nothing")`. For Llama 3, return `(8, 4, 2, 1, "nothing")`, and for GPT-3, return `(8, 8, 4, 2, "attention")`.

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
                     "MFU": f"{played.throughput.mfu:.0%}",
                     "HFU": f"{played.throughput.hfu:.0%}"})  # fmt: skip
viz.table(rows, title="your layouts, as they are and with all layers recomputed")

# %% [markdown]
# If you recompute all layers, each job processes fewer tokens per second. But for some of the jobs, the HFU gets *better*. So if somebody tells you how well they use their GPUs, ask whether they mean the MFU or the HFU.
#
# ## Never stopped, killed, and on one rank
#
# It's time for the final test. One run is never stopped. We kill a second run three times, including once in the middle of a save, and start it again each time. After the third time, we also make a copy of the run's folder and pretend that one of the two machines has burned down. So while two ranks continue the original run, a single rank has to continue the copy.

# %%
whole = replace(RUN, folder=f"{HOME.name}/whole")
launch(train_own, 2, args=(whole, answers, MINE))
killed = replace(RUN, folder=f"{HOME.name}/three-times")
pull_the_plug(killed, MINE, step=18)
pull_the_plug(killed, MINE, step=30, saving=True)
pull_the_plug(killed, MINE, step=48)
folder = shutil.copytree(killed.folder, f"{HOME.name}/alone", symlinks=True)
alone = replace(killed, folder=folder, tp=1)
for settings, ranks in ((killed, 2), (alone, 1)):
    launch(train_own, ranks, args=(settings, answers, MINE))

whole, killed, alone = (losses_of(settings) for settings in (whole, killed, alone))
equal = sum(whole[step] == killed[step] for step in whole)
viz.table(
    [
        {"step": step, "never stopped": f"{whole[step]:.9f}",
         "killed three times": f"{killed[step]:.9f}",
         "bit for bit": "equal" if whole[step] == killed[step] else "different",
         "on one rank since step 46": f"{alone[step]:.9f}" if step > 45 else ""}
        for step in (1, 17, 18, 30, 46, 47, 48, 60)
    ],
    title=f"equal in {equal} of {len(whole)} steps",
)  # fmt: skip

# %% [markdown]
# ## Killed three times, and not a single bit is different.
#
# You didn't have to save anything about the data or the learning rate, because both of them are functions of the step. Even a single rank can continue the run, and its losses agree with the others except for rounding.

# %%
symptoms(15)

# %% [markdown]
# ## What you built
#
# Next to your library, there's now a script called `train.py`. It runs the loop from this chapter with your layers and your functions, and it only needs your library and PyTorch. Take it to any machine with GPUs! `python train.py --help` lists all of its settings.

# %%
from tplab.course import library

library(15)

# %% [markdown]
# And here's a card that you can show off, because you've earned it. It's in your folder as `card.svg`.

# %%
names = {1: "one process", 2: "tp = 2", 4: "tp = 2, dp = 2"}
card({f"p = {p}": losses[name] for p, name in names.items()}, RUN, answers)

# %% [markdown]
# <details><summary>Going deeper: the large run, checkpoints in other programs, and what's next</summary>
#
# - **A larger run.** `tplab` has its own capstone program, which is built from the same parts as your loop but has more options. It can evaluate the model, resume after a crash, and create a report. `python -m tplab.capstone --preset laptop --layers mine` trains your layers on two processes for a few minutes, and `make capstone` trains a model and writes its report. The preset `h100x8` is meant for eight H100 GPUs, but so far, we've only run it on emulated GPUs.
#
# - **Power failures.** If a process is killed, the operating system still writes everything that the process has already handed to it. After a power failure, it can't do that anymore. So before you rename a checkpoint, you also have to force its files onto the disk with `os.fsync`, as `tplab.capstone.checkpoints` does.
#
# - **torch.distributed.checkpoint** writes a file called `.metadata` last. It first writes this file under a temporary name and then renames it. A checkpoint without this file can't be loaded.
#
# - **torchtitan and Megatron-LM.** torchtitan's `ParallelAwareDataloader` saves the state of each replica's loader, so you can't continue a run with a different number of replicas. Megatron-LM computes the position in the data from the number of samples that the run has consumed, just as you do.
#
# </details>
#
# Your ranks still have to wait for the messages inside each layer, and your sequences are still short. But that's for another day.
#
# At the beginning of this course, you had two processes that added 10 and 11. Now you have a GPT that's split across ranks, and you know why every one of its gradients is correct. Go train something!
