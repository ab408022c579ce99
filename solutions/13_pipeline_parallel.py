# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 13 · Pipeline parallelism
#
# Suppose each of four machines holds a quarter of a model's layers. A batch has to pass through the machines one after another, so three of the four are always idle. In this chapter, you'll write a schedule that keeps all four machines busy, and you'll find out why most explanations praise this schedule for the wrong reason.
#
# Why would you split a model between its layers? With tensor parallelism, the ranks wait for four messages in every layer, so they need the fast links inside a single machine. A pipeline sends far less data, and it works with any kind of layer.
#
# By the end of this chapter, your library will train a model whose layers are divided between two ranks. You need chapter 01. About 90 minutes, plus 15 for an optional section.

# %% tags=["setup"]
import copy
import time

import torch
import torch.distributed as dist
from torch.nn import functional as F

from tplab import device, launch, viz
from tplab.common import corpus
from tplab.course import check, predict, show_failure, symptoms
from tplab.memory import MemoryMeter
from tplab.pipeline import Action, Channels, Schedule, schedule_order, schedules
from tplab.pipeline.examples import ByteStage, in_units, timed

# %% [markdown]
# ## One batch, four machines
#
# Each rank holds a few consecutive layers, which we call a **stage**. The last stage also computes the loss. In the forward pass, each stage sends its output to the next stage. In the backward pass, each stage sends the gradient of its *input* to the previous stage.
#
# Below, four processes train on a single batch. Instead of computing anything, each rank sleeps for 20 ms in the forward pass and for 40 ms in the backward pass.
#
# **Predict.** How many times as fast are these four ranks as a single rank that does all the work?

# %% predict="13.a"
predict("13.a", times_as_fast=1)


# %%
def one_batch():
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    x = torch.zeros(2, 4, device=device())  # [b, h]
    if rank > 0:
        dist.recv(x, rank - 1)
    time.sleep(0.02)  # forward
    if rank < last:
        dist.send(x, rank + 1)
        dist.recv(x, rank + 1)  # the gradient
    time.sleep(0.04)  # backward
    if rank > 0:
        dist.send(x, rank - 1)


viz.timeline(launch(one_batch, 4), title="one batch on four ranks")

# %% [markdown]
# ## Split the batch
#
# To keep all the ranks busy, let's split the batch into $m$ smaller **micro-batches**. While rank 1 works on the first micro-batch, rank 0 can already work on the second one. The gradients of all micro-batches add up in `.grad`, and the optimizer takes its step after the last backward pass.
#
# A **schedule** contains a list of actions for each rank. `Action("F", 2)` is the forward pass of micro-batch 2, and `Action("B", 2)` is its backward pass. In the GPipe schedule (Huang et al. 2018), every rank runs all of its forward passes first and then all of its backward passes:


# %% tags=["setup"]
def gpipe(p, m):
    row = [Action("F", k) for k in range(m)] + [Action("B", k) for k in range(m)]
    return [row for _ in range(p)]


def play(lists):
    """Draw when each rank works on which action of its list."""
    spans = schedule_order.simulate(as_schedule(lists))
    end = max(span.end for row in spans for span in row)
    return viz.schedule(spans, title=f"{end:g} units of time")


def as_schedule(lists):
    m = 1 + max(action.micro_batch for action in lists[0])
    return Schedule("", tuple(map(tuple, lists)), micro_batches=m)


# %%
play(gpipe(2, 3))

# %% [markdown]
# A forward pass (F) takes one unit of time, and a backward pass (B) takes two, because it contains twice as many matmuls. Each rank works through its list in order, and it starts an action as soon as it has the tensors it needs. The forward pass of a micro-batch needs the previous rank's output. The backward pass of a micro-batch needs the gradient from the next rank, and it can't start until the same rank has finished the micro-batch's forward pass.
#
# The **bubble** is the time a rank spends idle, divided by the time it spends working.
#
# **Predict.** How many units of time does GPipe take for $p = 4$ ranks and $m = 8$ micro-batches? For how many units is each rank idle, and how large is the bubble?

# %% predict="13.b"
predict("13.b", time=33, idle_of_a_rank=9, bubble=0.375)

# %% [markdown] task="13.1" title="Beat GPipe" difficulty=3 minutes=15
# The backward pass of a micro-batch needs the activations from its forward pass. A rank keeps these activations in memory, and we'll call this part of its memory the rank's **shelf**. A forward pass puts the activations of a micro-batch on the shelf, and the backward pass removes them. In GPipe, every rank has to store the activations of all $m$ micro-batches at the same time.
#
# Write a better schedule for any number of ranks $p$ and micro-batches $m$:
#
# - Your schedule takes no longer than GPipe.
#
# - The shelf of rank $r$ never holds the activations of more than $\min(m, p - r)$ micro-batches.
#
# Try $p = 2$ and $m = 3$ on paper first. To draw your schedule, call `play(schedule(2, 3))`. The check tells you if your schedule takes too long or if a rank keeps too many micro-batches on its shelf.


# %% exercise="13.1"
def schedule(p, m):
    """Return a list of p lists, one per rank, of Action("F", k) and Action("B", k).

    k runs from 0 to m - 1.
    """
    ### BEGIN SOLUTION
    lists = []
    for rank in range(p):
        warm_up = min(m, p - rank - 1)
        row = [Action("F", k) for k in range(warm_up)]
        for k in range(m - warm_up):
            row += [Action("F", warm_up + k), Action("B", k)]
        lists.append(row + [Action("B", k) for k in range(m - warm_up, m)])
    return lists
    ### END SOLUTION


# %% [markdown] hints="13.1"
# 1. A rank's memory stays small if each backward pass runs as early as possible. When can the *last* rank run the backward pass of micro-batch 0? When does the gradient of micro-batch 0 reach the previous rank? Write down both ranks' lists for `p = 2` and `m = 3`. Which forward passes can rank 0 run while it waits for this gradient?
# 2. There are `p - r - 1` ranks after rank `r`, so let rank `r` start with a warm-up of `p - r - 1` forward passes. After the warm-up, the rank alternates between one forward pass, which puts a micro-batch on the shelf, and one backward pass, which removes a micro-batch from the shelf. Which backward passes are left after the rank's last forward pass? How long is the warm-up if there are fewer than `p - r - 1` micro-batches?
# 3. Let `warm_up = min(m, p - rank - 1)`. A rank's list starts with the forward passes of micro-batches 0 to `warm_up - 1`. Then, for each `k` in `range(m - warm_up)`, add the forward pass of micro-batch `warm_up + k` and the backward pass of micro-batch `k`. Finally, add the remaining backward passes, for micro-batches `m - warm_up` to `m - 1`.

# %% check="13.1"
check("13.1", schedule)

# %%
play(schedule(4, 8))

# %% [markdown]
# You've just invented the **1F1B** schedule, which is short for "one forward, one backward". It was published in 2020 under two different names, DAPPLE and PipeDream-Flush, and both Megatron-LM and DeepSpeed use it. The animation below shows GPipe and 1F1B. Each machine stands for a rank, and each parcel stands for a micro-batch. The parcels are black in the forward pass and red in the backward pass.
#
# ![An animation of two pipelines, with GPipe above and 1F1B below. Each pipeline has four machines, which stand for ranks, and six parcels, which stand for micro-batches. Black parcels move to the right, and each machine puts a copy of the parcel on its shelf. In GPipe, all six parcels pile up on every machine's shelf before the first red parcel moves back to the left. In 1F1B, the last machine sends each parcel back as soon as it arrives, so the shelves of the four machines never hold more than four, three, two, and one parcels. Both pipelines finish at the same time.](pictures/parcels.svg)
#
# <details><summary>All frames, one by one</summary>
#
# ![The same animation as numbered stills](pictures/parcels_frames.svg)
#
# </details>
#
# GPipe and 1F1B take the same amount of time, but with 1F1B, a rank keeps fewer micro-batches in memory. Many explanations say that 1F1B also shrinks the bubble, but it can't. Before the first micro-batch reaches the last rank, $p - 1$ forward passes have to run on the other ranks. And after the last rank has finished, the other ranks still have to run $p - 1$ backward passes, one after the other. If a forward pass takes $t_F$ and a backward pass takes $t_B$, both schedules have the same bubble:
#
# $$\text{bubble} = \frac{(p-1)(t_F + t_B)}{m\,(t_F + t_B)} = \frac{p-1}{m}$$
#
# So are these explanations just wrong?
#
# **Predict.** Suppose you have four ranks, and each shelf has room for four micro-batches. Each micro-batch is a single sequence, and a batch may contain up to 64 sequences. Without overfilling a shelf, how small can you make the bubble with GPipe? How small can you make it with your own schedule? (You may write fractions.)

# %% predict="13.c"
predict("13.c", gpipe=3 / 4, yours=3 / 64)


# %%
def costs(make_lists, p, m):
    plan = as_schedule(make_lists(p, m))
    bubble = schedule_order.bubble(schedule_order.simulate(plan))
    most = ", ".join(map(str, schedules.peak_live(plan)))
    return {"schedule": make_lists.__name__, "m": m, "bubble": f"{bubble:.3f}",
            "most on the shelves": most}  # fmt: skip


viz.table([costs(make, 4, m) for m in (4, 8, 64) for make in (gpipe, schedule)])

# %% [markdown]
# The explanations have a point. With the same number of micro-batches, both schedules have the same bubble. But in your schedule, the number of micro-batches on a shelf doesn't grow with $m$. So you can afford a larger $m$, which makes the bubble smaller.
#
# ## Across the gap
#
# Now we need a program that runs a schedule. In a single process, an autograd graph connects all the layers. But in a pipeline, each stage has its own process, and the processes exchange plain tensors without a graph. So how does a gradient get from one process to the next?

# %% [markdown] task="13.2" title="Across the gap" difficulty=3 minutes=12
# Write the forward pass and the backward pass of a single stage. You don't need multiple ranks yet, because the check runs all the stages in one process.
#
# - `forward_stage` runs the stage on the message from the previous stage. It returns the message for the next stage and everything that your `backward_stage` will need.
#
# - `backward_stage` receives two arguments. The first is whatever `forward_stage` saved, and the second is the gradient of the message that `forward_stage` returned. The function adds the gradients of the stage's parameters to their `.grad` and returns the gradient of the stage's input. If the input consists of token IDs, `backward_stage` returns `None`, because integers don't have a gradient.
#
# A message is a plain tensor that isn't part of any autograd graph. Don't modify the messages that your functions receive, because the caller may still need them. A stage may run several forward passes before its first backward pass, and its backward passes can come in any order.


# %% exercise="13.2"
def forward_stage(stage, message):
    """message [b, ..] -> (message for the next stage, whatever backward_stage needs)"""
    ### BEGIN SOLUTION
    # [b, ..], a leaf: autograd can't know where a message came from
    x = message.detach()
    if x.is_floating_point():
        x.requires_grad_()
    y = stage(x)
    return y.detach(), (x, y)
    ### END SOLUTION


def backward_stage(kept, gradient):
    """Return the gradient of the stage's input, or None.

    kept        whatever forward_stage kept
    gradient    the gradient of its message
    """
    ### BEGIN SOLUTION
    x, y = kept
    y.backward(gradient)
    return x.grad
    ### END SOLUTION


# %% [markdown] hints="13.2"
# 1. Which tensor does a stage's backward pass have to start from, and with which gradient? The previous stage needs the gradient of this stage's input. For which tensors does autograd store a gradient? Also think about the message that `forward_stage` returns. If this message were still connected to its graph, how long would the graph stay in memory?
# 2. `message.detach()` is a new tensor with the same values but without a history, so you can call `requires_grad_()` on it without changing the caller's tensor. (For integer tensors, `requires_grad_()` raises an error.) Run the stage on this detached tensor. `backward_stage` needs the detached input and the output with its graph, and the next stage gets the output without its graph.
# 3. In `forward_stage`, let `x = message.detach()`, call `x.requires_grad_()` if `x.is_floating_point()`, and let `y = stage(x)`. Return `y.detach(), (x, y)`. In `backward_stage`, unpack the pair, call `y.backward(gradient)`, and return `x.grad`.

# %% check="13.2"
check("13.2", forward_stage, backward_stage)

# %% [markdown]
# ## A stage at work
#
# Now let's run a real pipeline, with one process per stage. The `channels` object sends activations in one process group and gradients in another, so these two kinds of messages don't hold each other up. `channels.rank` is this rank's position in the pipeline, and `channels.world_size` is the number of stages.
#
# - `work = channels.send(tensor, receiver)` starts sending a tensor. `work.wait()` returns when the tensor has been sent. Call `work.wait()` only once per send.
#
# - `work = channels.receive(tensor, sender)` starts receiving a message into `tensor`. You can read `tensor` after `work.wait()` has returned.

# %% [markdown] task="13.3" title="A stage at work" difficulty=4 minutes=23
# Write the program that each rank runs. It should run the rank's actions in order and work for any schedule that can be completed. Use your `forward_stage` and `backward_stage`, and decide for yourself when to receive, when to send, and when to wait. (A message doesn't contain the number of its micro-batch, but two neighbors always send and receive their micro-batches in the same order.)
#
# Each micro-batch has its own loss, which is a mean over its examples. But you need the gradient of the *whole batch's* mean loss. Add this gradient to whatever `.grad` contained before the step.
#
# After the backward pass of a micro-batch, a rank should no longer hold the micro-batch's graph or activations. But until the end of the step, you may keep the losses and all the messages that the rank has sent.


# %% exercise="13.3"
def run_stage(stage, actions, channels, template, loss, inputs=None, targets=None):
    """Run one rank's actions in order, and add gradients to the parameters' `.grad`.

    These are the gradients of the batch's mean loss.

    stage       this rank's module, [b, h] -> [b, h]
    actions     this rank's list, of Action("F", k) and Action("B", k), with
                action.kind and action.micro_batch
    template    a tensor with the shape and dtype of a message, [b, h];
                torch.empty_like(template) makes room for one
    loss        (output of the last stage, target) -> the mean loss of the micro-batch
    inputs      on the first rank, the m micro-batches; None elsewhere
    targets     on the last rank, the m targets; None elsewhere

    Returns the mean loss of the batch on the last rank, and None elsewhere.
    """
    ### BEGIN SOLUTION
    rank, last = channels.rank, channels.world_size - 1
    m = sum(action.kind == "F" for action in actions)
    shelf, sent, losses = {}, [], []

    def receive(sender):
        tensor = torch.empty_like(template)  # every message needs memory of its own
        channels.receive(tensor, sender).wait()
        return tensor

    for action in actions:
        k = action.micro_batch
        if action.kind == "F":
            message = inputs[k] if rank == 0 else receive(rank - 1)
            if rank < last:
                y, shelf[k] = forward_stage(stage, message)
                sent.append(channels.send(y, rank + 1))
            else:
                value, shelf[k] = forward_stage(
                    lambda x, target=targets[k]: loss(stage(x), target), message
                )
                losses.append(value)
        else:
            gradient = receive(rank + 1) if rank < last else losses[0].new_tensor(1 / m)
            gradient = backward_stage(shelf.pop(k), gradient)
            if rank > 0:
                sent.append(channels.send(gradient, rank - 1))
    for work in sent:
        work.wait()
    return sum(losses) / m if rank == last else None
    ### END SOLUTION


# %% [markdown] hints="13.3"
# 1. Which kind of action needs a message from `rank - 1`, and which kind needs a message from `rank + 1`? Where do the inputs of the first rank come from? Which gradient does the last rank start its backward pass from? To store what `forward_stage` saved for each micro-batch, you can use a dictionary whose keys are the numbers of the micro-batches. Why shouldn't you wait for each send right away? What could the receiver be waiting for at that moment?
# 2. Receive each message into a new tensor, `torch.empty_like(template)`, and wait for the message before you read the tensor. Start your sends without waiting for them, collect the objects that `channels.send` returns in a list, and wait for all of them at the end. On the last rank, pass a function to `forward_stage` that runs the stage and then computes the loss. Then the message is a single number, the micro-batch's loss. The loss of the batch is the mean of `m` such losses. What's the gradient of this mean with respect to each of these losses?
# 3. To get `m`, count the forward passes in `actions`. On the last rank, the stage includes the loss, so write `value, shelf[k] = forward_stage(lambda x: loss(stage(x), targets[k]), message)`, and append `value` to the list `losses`. There, the backward pass starts with the gradient `losses[0].new_tensor(1 / m)`. On all other ranks, send `y` to `rank + 1`. In the backward pass, call `backward_stage(shelf.pop(k), gradient)`, and send the result to `rank - 1` unless this is rank 0. Return `sum(losses) / m` on the last rank.

# %% check="13.3"
check("13.3", run_stage)

# %% [markdown]
# ## Train with it
#
# The model below reads eight bytes of Python code and predicts the next byte. It has four residual blocks with $h = 128$. `ByteStage()` is the complete model, and `ByteStage(0, 2)` is the first half of the model. Each parameter exists on only one rank, so the gradients need no all-reduce.

# %%
BATCH, STEPS, M = 64, 30, 8
text = corpus.python_sources(300_000)


def sgd(stage):
    return torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)


torch.manual_seed(0)
plain = ByteStage().double()
start, optimizer, plain_losses = copy.deepcopy(plain.state_dict()), sgd(plain), []
for ids, targets in corpus.byte_batches(text, 8, BATCH, STEPS, seed=1):
    loss = F.cross_entropy(plain(ids), targets[:, -1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    plain_losses.append(loss.item())


def new_stage(rank, p):
    stage = ByteStage(rank, p).double().to(device())
    stage.load_state_dict({name: start[name] for name in stage.state_dict()})
    return stage


def train(make_lists, m=M, steps=STEPS, batch=BATCH, channels_class=Channels):
    torch.set_num_threads(1)
    channels = channels_class()
    rank, p = channels.rank, channels.world_size
    stage, actions = new_stage(rank, p), make_lists(p, m)[rank]
    shape = (batch // m, 128)  # [b, h]
    template = torch.empty(shape, dtype=torch.float64, device=device())
    args = (stage, actions, channels, template, F.cross_entropy)
    optimizer, losses = sgd(stage), []
    with MemoryMeter() as meter:
        for ids, targets in corpus.byte_batches(text, 8, batch, steps, seed=1):
            ids = ids.to(device()).chunk(m) if rank == 0 else None
            targets = targets[:, -1].to(device()).chunk(m) if rank == p - 1 else None
            optimizer.zero_grad()
            losses.append(run_stage(*args, ids, targets))
            optimizer.step()
    losses = [float(loss) for loss in losses if loss is not None]
    weights = {name: value.cpu() for name, value in stage.state_dict().items()}
    return {"losses": losses, "weights": weights, "peak": meter.peak}


runs = {p: launch(train, p, args=(schedule,)) for p in (2, 4)}
curves = {f"yours, {p} stages": run[-1]["losses"] for p, run in runs.items()}
curves = {"plain PyTorch": plain_losses} | curves
viz.curves(curves, title=f"{STEPS} steps on real text")

# %%
off = [(value - plain.state_dict()[name]).abs().max().item()
       for run in runs.values() for rank in run
       for name, value in rank["weights"].items()]  # fmt: skip
print(
    f"After {STEPS} steps, the weights on 2 and 4 ranks differ from those of "
    f"plain PyTorch by at most {max(off):.0e}."
)

# %% [markdown]
# The three curves coincide, and the final weights agree except for rounding.
#
# Does a real pipeline look like your drawing? In the first picture, four processes run your schedule. They sleep instead of computing, but they exchange real messages. The second picture is a simulation of this schedule.


# %%
def at_work(make_lists, m):
    return timed(run_stage, make_lists(dist.get_world_size(), m))


spans = in_units(launch(at_work, 4, args=(schedule, 8)))
viz.schedule(spans, title="your schedule on four real ranks")

# %%
spans = schedule_order.simulate(as_schedule(schedule(4, 8)))
viz.schedule(spans, title="the same schedule, simulated")

# %% [markdown]
# **Predict.** GPT-3 has 96 layers with $h = 12288$. One sequence of 2,048 tokens goes through the model, forward and backward, with 2 bytes per element. With tensor parallelism and four all-reduces per layer, what's the total size of the tensors that each rank all-reduces, in gigabytes? With a pipeline, how many gigabytes does a rank in the middle of the pipeline *send*? (A gigabyte is a billion bytes. Round to one decimal.)

# %% predict="13.d"
predict("13.d", split_layers=19.3, stages=0.1)

# %% [markdown]
# Since a pipeline sends so little data, large models usually combine tensor parallelism inside each machine with a pipeline across machines.
#
# ## Break it
#
# Your `run_stage` starts its sends without waiting for them right away. Wouldn't it be safer to wait until each message has been sent? Let's try that on two ranks, with two micro-batches.
#
# **Predict.** If each rank waits for each of its sends right away, which schedule hangs: "GPipe", "1F1B", "both", or "neither"?

# %% predict="13.e"
predict("13.e", hangs="1F1B")


# %%
class Done:
    def wait(self):
        """There's nothing left to wait for."""


class WaitingChannels(Channels):
    def send(self, tensor, receiver):
        super().send(tensor, receiver).wait()
        return Done()


def one_step(make_lists, channels_class):
    return train(make_lists, m=2, steps=1, channels_class=channels_class)["losses"]


print("GPipe:", launch(one_step, 2, args=(gpipe, WaitingChannels))[1])
with show_failure():
    launch(one_step, 2, args=(schedule, WaitingChannels))

# %% [markdown]
# With 1F1B, both ranks are stuck in a *send*. Rank 0 is trying to send the activations of micro-batch 1, while rank 1 is trying to send the gradient of micro-batch 0. Neither rank gets to the line in which it would receive the other rank's message. In GPipe, this deadlock can't happen, because all messages go in the same direction until the backward passes begin.
#
# Whether a send waits for its receiver depends on the backend and on the size of the message. So a program that waits for each send can pass all of its tests and still hang with your first large model.
#
# ## Fix it
#
# So you shouldn't wait for each send right away. But then you have to be careful with the message, because until its send is complete, you may neither overwrite nor free its memory.
#
# Even Megatron-LM got this wrong. To save memory, it used to free the output of a stage as soon as its send had *started*. But at that moment, NCCL might not have read the output yet. Whenever PyTorch reused the memory for a different tensor before NCCL had read the output, the next stage received wrong values. With 16 stages, this bug turned the gradient norm of Llama 3.1 405B into NaN. A developer found the cause in March 2026 (NVIDIA/Megatron-LM pull request 4047, since merged). The bug had only shown up in large-scale runs, and the developer wrote that it wasn't quite possible to create a good unit test.
#
# You can reproduce a bug like this on two ranks. Below, rank 0 writes a number into a buffer, starts to send the buffer, and then writes the next number without waiting. Meanwhile, rank 1 is busy with something else.
#
# **Predict.** If rank 0 sends 1, 2, and 3, which numbers does rank 1 receive?

# %% predict="13.f"
predict("13.f", received=(3, 3, 3))


# %%
def one_buffer():
    channels, received, sent = Channels(), [], []
    buffer = torch.zeros(4, device=device())
    for number in (1.0, 2.0, 3.0) if channels.rank == 0 else ():
        buffer.fill_(number)
        sent.append(channels.send(buffer, 1))
    dist.barrier()  # rank 1 is busy until here
    for _ in range(3 if channels.rank == 1 else 0):
        channels.receive(buffer, 0).wait()
        received.append(buffer[0].item())
    for work in sent:
        work.wait()
    return received


# always on CPUs, because on GPUs, it depends on luck
launch(one_buffer, 2, backend="gloo")[1]

# %% [markdown] task="13.4" title="Fix it: too tidy" difficulty=2 minutes=8
# Your `run_stage` may keep every message in memory until the end of the step. The `Outbox` below tries to save this memory by sending all messages from a single buffer, but its `send` is broken. Fix `send`, so that every message arrives with the values it had when `send` was called. Your code may not create any additional tensors.
#
# On a cluster, such a bug strikes only now and then, but the check always notices if the buffer changes too early.


# %% exercise="13.4"
class Outbox:
    """Sends messages to one neighbor, all from a single buffer.

    The buffer has the shape of `template`.
    """

    def __init__(self, channels, receiver, template):
        self.channels, self.receiver = channels, receiver
        self.buffer, self.work = torch.empty_like(template), None

    def send(self, message):
        """Start to send a message.

        As soon as this returns, the caller may free or overwrite `message`.
        """
        ### BEGIN SOLUTION
        self.wait()  # until then, the buffer belongs to the previous message
        self.buffer.copy_(message)
        self.work = self.channels.send(self.buffer, self.receiver)
        ### BROKEN
        # self.buffer.copy_(message)
        # self.work = self.channels.send(self.buffer, self.receiver)
        ### END SOLUTION

    def wait(self):
        """Return as soon as everything has been sent.

        If there's nothing to wait for, return right away.
        """
        if self.work is not None:
            self.work.wait()
            self.work = None  # because gloo hangs if you wait for the same send twice


# %% [markdown] hints="13.4"
# 1. In the broken version, `send` overwrites the buffer. Which message might still be in this buffer, waiting to be sent? Which object can tell you when it's safe to write into the buffer again?
# 2. There are three places where `send` could wait: before it copies the message into the buffer, between the copy and the start of the send, and after the start of the send. If `send` waits only after the copy, it may already have overwritten a message that hadn't left the buffer yet. If it waits right after starting the send, it's waiting for a receiver that may itself be waiting for your rank, which is the deadlock you've just seen.
# 3. Call `self.wait()` in the first line of `send`. When you send the first message, there's no earlier send to wait for, and `wait` already takes care of that case.

# %% check="13.4"
check("13.4", Outbox)


# %%
class TidyChannels(Channels):
    def send(self, message, receiver):
        boxes, key = vars(self).setdefault("boxes", {}), (receiver, message.shape)
        if key not in boxes:
            boxes[key] = Outbox(super(), receiver, message)
        boxes[key].send(message)
        return boxes[key]  # has a method `wait`, like a request


def memory(make_lists, m, channels_class=Channels):
    ranks = launch(train, 4, args=(make_lists, m, 1, 128 * m, channels_class))
    buffers = "one buffer" if channels_class is TidyChannels else "each message"
    row = {"schedule": make_lists.__name__, "m": m, "sends from": buffers}
    for rank, seen in enumerate(ranks):
        row[f"rank {rank}"] = f"{seen['peak'] / 1e6:.1f} MB"
    return row


rows = [memory(gpipe, 8), memory(gpipe, 16), memory(schedule, 8), memory(schedule, 16)]
rows.append(memory(schedule, 16, TidyChannels))
title = "the most memory that a rank used, with 128 examples per micro-batch"
viz.table(rows, title=title)

# %% [markdown]
# The table shows each rank's peak memory. If you double the number of micro-batches from 8 to 16, GPipe needs about 12 MB more on rank 0, but your schedule needs only about 1 MB more. This small increase comes from `run_stage`, which keeps all the messages it has sent until the end of the step. With the outbox, the increase disappears as well.
#
# <details><summary>Going deeper: a table at both ends</summary>
#
# Suppose a GPT uses the same table of weights for its embedding and its output layer (chapter 07). Then both the first stage and the last stage need a copy of this table. The token look-ups contribute to the table's gradient on the first rank, and the logits contribute to the table's gradient on the last rank. So at the end of each step, the first and the last rank have to add up their gradients of the table with an all-reduce. If you forget this all-reduce, the first loss is still correct, but then the two copies drift apart. Chapter 14 will come back to such tables, because a gradient norm has to count a shared table only once.
#
# </details>
#
# ## Fill the bubble (optional)
#
# As you saw in chapter 11, a backward pass computes two kinds of gradients. The previous rank is waiting for the gradient of the *input*, but the gradients of the *weights* aren't needed until the optimizer step. So let's split each backward pass (B) into two actions. **I** computes the gradient of the input, and **W** computes the gradients of the weights. Each F, I, or W takes one unit of time.
#
# `Action("I", k)` needs the same tensors as `Action("B", k)`. `Action("W", k)` can run at any time after `Action("I", k)` on the same rank. The micro-batch stays on the rank's shelf until `Action("W", k)` has run.

# %% [markdown] task="13.5" title="Fill the bubble (optional)" difficulty=4 minutes=15
# Write a schedule with F, I, and W actions whose bubble is at most half as large as 1F1B's bubble of $(p-1)/m$. No shelf may ever hold more than $p$ micro-batches. You can assume that $m \ge p$. `play(fill_bubble(4, 8))` draws your schedule. The table after the check compares your schedule with ZB-H1 (Qi et al. 2023).


# %% exercise="13.5"
def fill_bubble(p, m):
    """Return a list of p lists, one per rank.

    They consist of Action("F", k), Action("I", k) and Action("W", k).
    """
    ### BEGIN SOLUTION
    lists = []
    for rank in range(p):
        warm_up = p - rank - 1
        row = [Action("F", k) for k in range(warm_up)]
        for k in range(m):
            row += [Action("F", warm_up + k)] if warm_up + k < m else []
            row += [Action("I", k)]
            row += [Action("W", k - rank)] if k >= rank else []
        lists.append(row + [Action("W", k) for k in range(m - rank, m)])
    return lists
    ### END SOLUTION


# %% [markdown] hints="13.5"
# 1. Start from your 1F1B schedule, and replace each backward pass with an I action, followed by the W action of the same micro-batch. Then draw the schedule. When are the ranks idle, and which W actions could they run at those times without making another rank wait?
# 2. At the end of a step, the first ranks are waiting for the input gradients of the last few micro-batches. So the later ranks should run their I actions as early as possible, even if they have to postpone some of their W actions. A postponed W action keeps its micro-batch on the shelf. In 1F1B, the shelf of rank `r` holds at most `p - r` micro-batches, but now it may hold `p`. How many W actions can rank `r` postpone?
# 3. On rank `r`, postpone each W action by `r` micro-batches. In other words, after `Action("I", k)` comes `Action("W", k - r)`, if `k >= r`. Put the remaining W actions at the very end.

# %% check="13.5"
check("13.5", fill_bubble)

# %%
plans = {
    "1F1B": schedules.one_f_one_b(4, 8),
    "yours": as_schedule(fill_bubble(4, 8)),
    "ZB-H1": schedules.zero_bubble(4, 8),
}
halves = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # units of time
rows = []
for name, plan in plans.items():
    bubble = schedule_order.bubble(schedule_order.simulate(plan, halves))
    most = ", ".join(map(str, schedules.peak_live(plan)))
    rows.append({"p = 4, m = 8": name, "bubble": f"{bubble:.3f}",
                 "most on the shelves": most})  # fmt: skip
viz.table(rows)

# %%
symptoms(13)

# %% [markdown]
# ## In the wild
#
# <details><summary>Going deeper: Megatron-Core, PyTorch, and more stages than ranks</summary>
#
# - **Megatron-Core** implements your schedule in `megatron/core/pipeline_parallel/schedules.py`, where the length of the warm-up is called `num_warmup_microbatches`. The function `deallocate_output_tensor` frees the values of an output, because the backward pass only needs the output's graph. Since pull request 4047, Megatron-Core doesn't free an output until its send is complete. The gradients of a tied table are added up in `finalize_model_grads.py`.
#
# - **DeepSpeed** narrowly avoided a related bug on the receiving side. In 2023, a user noticed that DeepSpeed's 1F1B kept one more buffer than necessary. But if you simply removed this buffer, a received activation could overwrite a gradient that still had to be sent. So the developers removed the buffer and also swapped the order of these two messages (issue 2800, fixed by pull request 2862).
#
# - **PyTorch** has a package for pipelines, `torch.distributed.pipelining`. You wrap each part of the model in a `PipelineStage` and choose a schedule, such as `ScheduleGPipe`, `Schedule1F1B`, or `ScheduleZBVZeroBubble`. The option `scale_grads` applies the factor of 1/m that you applied in exercise 13.3.
#
# - **GPipe and PipeDream.** GPipe's authors saved memory in a different way. In their paper, each stage keeps only its input and recomputes all other activations in the backward pass. This is the checkpointing from chapter 09, and it makes each backward pass take 3 units of time. PipeDream already used the name 1F1B in 2019, but for a different schedule. That schedule never stops to wait for a whole batch, and it updates the weights again and again while micro-batches are still in the pipeline. So by the time a gradient is applied, the weights it was computed with are already out of date.
#
# - **Two directions on NCCL.** It's convenient to have a process group for each direction, but separate groups alone don't rule out deadlocks. NCCL's documentation warns that using several communicators at the same time requires careful synchronization and can lead to deadlocks. As an alternative, Megatron-LM can pair a send with a receive and start both of them as one batch. We've run this course's schedules over NCCL on ranks that share a single GPU, but not yet on several GPUs.
#
# - **More stages than ranks.** In total, each rank is idle for as long as its stage takes to run $p - 1$ micro-batches forward and backward. You can shorten this time by making the stages smaller. In *interleaved* 1F1B (Narayanan et al. 2021), each rank has $v$ stages that are $1/v$ as large, and each micro-batch passes through all the ranks $v$ times. This shrinks the bubble to $(p-1)/(m v)$, but the shelves get larger and the ranks send about $v$ times as many messages. In the classic form of this schedule, $m$ has to be a multiple of $p$. You can try this schedule below.
#
# - **Micro-batches of different lengths.** If some tokens don't count toward the loss, some micro-batches contain more counted tokens than others, so averaging the micro-batches' means doesn't give you the mean of the batch. Instead, each micro-batch should contribute the *sum* of its losses, divided by the number of counted tokens in the whole batch. `tplab.pipeline.Pipeline` computes the loss this way.
#
# </details>
#
# What happens if you have more stages than ranks? In the picture below, each rank holds $v$ small stages instead of a single large one. Try different values of $v$, and watch the bubble.


# %% tags=["explore"]
def show_interleaved(p, m, v):
    spans = schedule_order.simulate(schedules.interleaved(p, m, v))
    bubble = schedule_order.bubble(spans)
    return viz.schedule(spans, title=f"p = {p}, m = {m}, v = {v}: bubble {bubble:.3f}")


viz.explore(show_interleaved, p=(4, 2), m=(8, 4, 16), v=(2, 1, 4))

# %% [markdown]
# ## Your library so far
#
# Your library now contains a schedule and the program that each rank runs. `python -m my_tp pipeline` trains a model that's split into two stages.

# %%
from tplab.course import library

library(13)

# %% [markdown]
# Your pipeline keeps four machines busy. But what if you have 32 machines, and your model doesn't have eight times as many layers? What should the other 28 machines do?
