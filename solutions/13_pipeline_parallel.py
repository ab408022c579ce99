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
# Give four machines a quarter of the layers each, and at every moment, three of them have nothing to do. In this chapter, you'll design a schedule that keeps all four busy, and you'll find out why most explanations praise it for the wrong reason.
#
# Why would you give whole layers to a machine at all? Because tensor parallelism doesn't get beyond a single machine: every layer waits for four messages, which takes the fastest links there are. It also needs layers that consist of pairs of matmuls. A pipeline doesn't care what's inside a layer, and hardly sends anything.
#
# By the end of this chapter, your library will train a model in two stages. You need chapter 01. About 75 minutes, plus 15 minutes for an optional section.

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
# ## Four machines, one parcel
#
# Cut a model between its layers. The first rank holds the first layers, and the last rank holds the last layers and the loss. The part on each rank is called a **stage**. In the forward pass, each stage sends its output to the next stage. In the backward pass, it sends the gradient of its *input* to the previous stage. Below, four real ranks do this with one batch. They only pause, for 20 ms in the forward pass and for 40 ms in the backward pass.
#
# **Predict.** How many times as fast are these four ranks as a single rank that does everything?

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
# ## Cut the parcel
#
# Let's cut the batch into $m$ **micro-batches**. While rank 1 works on the first one, rank 0 starts with the second one. Their gradients add up in `.grad`, and then there's a single optimizer step.
#
# A **schedule** is a list of actions for each rank. `Action("F", 2)` is the forward pass of micro-batch 2, and `Action("B", 2)` is its backward pass. Here's GPipe (Huang et al. 2018):


# %% tags=["setup"]
def gpipe(p, m):
    row = [Action("F", k) for k in range(m)] + [Action("B", k) for k in range(m)]
    return [row for _ in range(p)]


def play(lists):
    """Draw when each rank works on which action of its list."""
    spans = schedule_order.simulate(as_schedule(lists))
    return viz.schedule(spans, title=f"{max(span.end for row in spans for span in row):g} units of time")


def as_schedule(lists):
    return Schedule("", tuple(map(tuple, lists)), micro_batches=1 + max(action.micro_batch for action in lists[0]))


# %%
play(gpipe(2, 3))

# %% [markdown]
# F takes one unit of time, and B takes two, because it has twice the matmuls. An action starts as soon as its rank is free and its inputs are there:
#
# | | needs | makes |
# |---|---|---|
# | F of micro-batch k | the output of F k on the previous rank | the input of F k on the next rank |
# | B of micro-batch k | its own F k, and the gradient from B k on the next rank | the gradient for B k on the previous rank |
#
# The **bubble** is a rank's idle time divided by its working time.
#
# **Predict.** How long does GPipe take for $p = 4$ ranks and $m = 8$ micro-batches? How long is each rank idle, and how large is the bubble?

# %% predict="13.b"
predict("13.b", time=33, idle_of_a_rank=9, bubble=0.375)

# %% [markdown] task="13.1" title="Beat GPipe" difficulty=3 minutes=15
# From its F to its B, a micro-batch needs memory, because the backward pass uses the activations of the forward pass. Imagine a shelf on each rank: F puts a micro-batch on the shelf, and B takes it off. In GPipe, all $m$ micro-batches are on every rank's shelf at the same time.
#
# Write a better schedule, for any number of ranks $p$ and micro-batches $m$:
#
# - It takes no longer than GPipe.
#
# - Rank $r$ never has more than $\min(m, p - r)$ micro-batches on its shelf.
#
# Try $p = 2$ and $m = 3$ on paper first. You can draw your lists with `play(schedule(2, 3))`, and the check tells you what they cost.


# %% exercise="13.1"
def schedule(p, m):
    """Return a list of p lists, one per rank, of Action("F", k) and Action("B", k) for k = 0 to m - 1."""
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
# 1. A shelf stays small if each B comes as early as possible. When can the *last* rank start with B 0? And when does the gradient of micro-batch 0 reach the previous rank? Draw both lists for $p = 2$ and $m = 3$, and look at what rank 0 could do while it waits.
# 2. Rank $r$ has $p - r - 1$ ranks after it. It can run that many forward passes before it has to wait for the first gradient. After this warm-up, it takes one micro-batch off the shelf for each one that it puts on. What's left when there are no more forward passes, and what if $m$ is smaller than the warm-up?
# 3. Let `warm_up = min(m, p - rank - 1)`. A rank's list starts with F 0 to F `warm_up - 1`. Then, for each `k` in `range(m - warm_up)`, it continues with F `warm_up + k` and B `k`. At the end come the remaining B, from `m - warm_up` to `m - 1`.

# %% check="13.1"
check("13.1", schedule)

# %%
play(schedule(4, 8))

# %% [markdown]
# You've just invented **1F1B**, "one forward, one backward". It was described in 2020, as DAPPLE and as PipeDream-Flush, and Megatron-LM and DeepSpeed both use it. (PipeDream's own 1F1B, from 2019, is a different one. It doesn't wait for the end of a step, so it computes its gradients with older weights.) Here are both schedules at work, recorded on real ranks:
#
# ![An animation of two pipelines with four machines each and six parcels, with GPipe above and 1F1B below. Blue parcels move to the right, and each machine puts a copy on its shelf. Above, all six parcels pile up on every shelf before the first red parcel moves back. Below, the last machine turns each parcel around right away, and the shelves hold at most four, three, two, and one. Both pipelines finish at the same time.](pictures/parcels.svg)
#
# <details><summary>All frames, one by one</summary>
#
# ![The same animation as numbered stills](pictures/parcels_frames.svg)
#
# </details>
#
# The time is the same, and only the shelves are smaller! Many explanations say that 1F1B shrinks the bubble. It can't. In any order, the last rank waits for $p - 1$ forward passes before it can start. And after the last rank has finished, rank 0 waits for $p - 1$ backward passes. If F takes $t_F$ and B takes $t_B$, that's
#
# $$\text{bubble} = \frac{(p-1)(t_F + t_B)}{m\,(t_F + t_B)} = \frac{p-1}{m}$$
#
# for both of them. So is the popular claim just wrong?
#
# **Predict.** Suppose that your four ranks have room for four micro-batches each, and that the batch can be cut into 64. How small can you make the bubble with GPipe if it may not have more micro-batches than fit? And how small with your schedule? (You may write fractions.)

# %% predict="13.c"
predict("13.c", gpipe=3 / 4, yours=3 / 64)


# %%
def costs(make_lists, p, m):
    plan = as_schedule(make_lists(p, m))
    return {"schedule": make_lists.__name__, "m": m, "bubble": f"{schedule_order.bubble(schedule_order.simulate(plan)):.3f}",
            "most on the shelves": ", ".join(map(str, schedules.peak_live(plan)))}  # fmt: skip


viz.table([costs(make_lists, 4, m) for m in (4, 8, 64) for make_lists in (gpipe, schedule)])

# %% [markdown]
# That's where the claim comes from. For the same $m$, the bubbles are equal. But a small shelf that doesn't grow with $m$ lets you *choose* a large $m$. (GPipe's authors had another way out: as published, GPipe keeps only the input of each stage and recomputes everything else in the backward pass. That's chapter 09's checkpointing, and each B takes 3 units.)
#
# ## Across the gap
#
# Now we need someone to work through the lists. In a single process, autograd connects all layers with one graph. But a stage lives in its own process, and all it ever gets from its neighbors are plain tensors. How does the gradient get across the gap?

# %% [markdown] task="13.2" title="Across the gap" difficulty=3 minutes=12
# Write F and B for a single stage. There aren't any ranks yet: the check plays the postman, and hands the messages from one stage to the next.
#
# - `forward_stage` runs the stage on the message from the previous stage. It returns the message for the next stage, and whatever your B will need.
#
# - `backward_stage` gets that, and the gradient of the message that F returned. It adds the gradients of the stage's parameters to their `.grad`, and it returns the gradient of the stage's input. The first stage's input may consist of token IDs, which have no gradient, so return `None` for them.
#
# A message is a plain tensor that isn't part of any graph, and it belongs to the caller, who may still need it as it is. Several micro-batches can be on the shelf at the same time, and they leave it in any order.


# %% exercise="13.2"
def forward_stage(stage, message):
    """message [b, ..] -> (message for the next stage, whatever backward_stage needs)."""
    ### BEGIN SOLUTION
    x = message.detach()  # [b, ..], a leaf: autograd can't know where a message came from
    if x.is_floating_point():
        x.requires_grad_()
    y = stage(x)
    return y.detach(), (x, y)
    ### END SOLUTION


def backward_stage(kept, gradient):
    """Whatever forward_stage kept, and the gradient of its message -> the gradient of the stage's input, or None."""
    ### BEGIN SOLUTION
    x, y = kept
    y.backward(gradient)
    return x.grad
    ### END SOLUTION


# %% [markdown] hints="13.2"
# 1. Which tensor does the backward pass of a stage have to start from, and with which gradient? Which tensor's gradient does the previous stage need, and when does autograd compute such a gradient? Then think about the message that F returns: if it still had its graph, how long would that graph stay in memory?
# 2. `message.detach()` is a new tensor with the same values and without a history, so you can call `requires_grad_()` on it without changing the caller's tensor. (For integers, this raises an error.) Run the stage on it. B needs this input and the output with its graph, and the next stage gets the output without its graph.
# 3. In F, let `x = message.detach()`, call `x.requires_grad_()` if `x.is_floating_point()`, and let `y = stage(x)`. Return `y.detach(), (x, y)`. In B, unpack the pair, call `y.backward(gradient)`, and return `x.grad`.

# %% check="13.2"
check("13.2", forward_stage, backward_stage)

# %% [markdown]
# ## A stage at work
#
# Now for the real thing: one process per stage. Activations go to the next rank, and gradients go to the previous one. The two directions shouldn't hold each other up, so each of them has its own process group. The object `channels` takes care of that. `channels.rank` and `channels.world_size` are this rank's place in the pipeline and the number of stages.
#
# - `work = channels.send(tensor, receiver)` starts to send a tensor. `work.wait()` returns when it has been sent. Call it only once.
#
# - `work = channels.receive(tensor, sender)` starts to receive into a tensor. You can read it after `work.wait()`.

# %% [markdown] task="13.3" title="A stage at work" difficulty=4 minutes=18
# Write the program of one rank. It works through any list that can be played, in the order of the list. (Messages carry no label, so neighbors send and receive their micro-batches in the same order.) You decide when to receive, when to start a send, and when to wait for it. Use your `forward_stage` and `backward_stage`.
#
# Each micro-batch has a loss of its own, which is a mean over the micro-batch. At the end, the gradients should be those of the *batch's* mean loss, added to whatever was in `.grad` before. When a micro-batch leaves the shelf, don't keep a reference to any of its tensors.


# %% exercise="13.3"
def run_stage(stage, actions, channels, template, loss, inputs=None, targets=None):
    """Work through one rank's list, and add the gradients of the batch's mean loss to those of the stage's parameters.

    stage       this rank's module, [b, h] -> [b, h]
    actions     this rank's list, of Action("F", k) and Action("B", k), with action.kind and action.micro_batch
    template    a tensor like every message, [b, h]: torch.empty_like(template) has room for one
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
                value, shelf[k] = forward_stage(lambda x, target=targets[k]: loss(stage(x), target), message)
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
# 1. In which of the two actions does a rank receive from `rank - 1`, and in which one from `rank + 1`? Which ranks lack one of these neighbors, and what do they do instead? A dictionary from micro-batch to what F kept makes a good shelf. And if you wait for each send right away, what could the receiver be waiting for?
# 2. Receive into a new `torch.empty_like(template)` each time, and wait for it before you read it. Start sends without waiting, collect what `channels.send` returns in a list, and wait for all of it at the end. On the last rank, the "stage" for `forward_stage` is the stage followed by the loss, so its message is a single number. The batch's loss is the mean of $m$ such numbers, so what's the gradient of each of them?
# 3. `m` is the number of F in `actions`. On the last rank, write `value, shelf[k] = forward_stage(lambda x: loss(stage(x), targets[k]), message)`, append `value` to a list, and start B with the gradient `losses[0].new_tensor(1 / m)`. Elsewhere, send `y` to `rank + 1`. In B, call `backward_stage(shelf.pop(k), gradient)`, and send the result to `rank - 1` unless this is rank 0. Return `sum(losses) / m` on the last rank.

# %% check="13.3"
check("13.3", run_stage)

# %% [markdown]
# ## Train with it
#
# The model reads eight bytes of Python code and predicts the next byte. It has four residual blocks with $h = 128$. `ByteStage(0, 2)` is the first half of it, and `ByteStage()` is all of it. Only rank 0 gets the bytes, and only the last rank gets the targets. Nobody adds up gradients across ranks, because every rank has different parameters.

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
    template = torch.empty(batch // m, 128, dtype=torch.float64, device=device())  # [b, h]
    optimizer, losses = sgd(stage), []
    with MemoryMeter() as meter:
        for ids, targets in corpus.byte_batches(text, 8, batch, steps, seed=1):
            ids = ids.to(device()).chunk(m) if rank == 0 else None
            targets = targets[:, -1].to(device()).chunk(m) if rank == p - 1 else None
            optimizer.zero_grad()
            losses.append(run_stage(stage, actions, channels, template, F.cross_entropy, ids, targets))
            optimizer.step()
    weights = {name: value.cpu() for name, value in stage.state_dict().items()}
    return {"losses": [float(loss) for loss in losses if loss is not None], "weights": weights, "peak": meter.peak}


runs = {p: launch(train, p, args=(schedule,)) for p in (2, 4)}
viz.curves({"plain PyTorch": plain_losses} | {f"yours, {p} stages": run[-1]["losses"] for p, run in runs.items()},
           title=f"{STEPS} steps on real text")  # fmt: skip

# %%
off = [(value - plain.state_dict()[name]).abs().max().item()
       for run in runs.values() for rank in run for name, value in rank["weights"].items()]  # fmt: skip
print(
    f"After {STEPS} steps, the weights on 2 and 4 ranks differ from those of plain PyTorch by at most {max(off):.0e}."
)

# %% [markdown]
# One curve, and the weights agree to the last digits of a float64. And does a real pipeline look like the drawing? Here are four processes that run your program with your schedule, and below, the same schedule as simulated. The stages only pause, so this works even if the four ranks share a single core. The messages, the order, and the waiting are real.


# %%
def at_work(make_lists, m):
    return timed(run_stage, make_lists(dist.get_world_size(), m))


viz.schedule(in_units(launch(at_work, 4, args=(schedule, 8))), title="your schedule on four real ranks")

# %%
viz.schedule(schedule_order.simulate(as_schedule(schedule(4, 8))), title="the same schedule, simulated")

# %% [markdown]
# **Predict.** GPT-3 has 96 layers and $h = 12288$. One text of 2,048 tokens with 2 bytes per element goes forward and backward. How many gigabytes do the messages of a rank contain if the ranks split every layer, with four all-reduces per layer? And how many does an inner rank *send* if the ranks are stages? (A gigabyte is a billion bytes. Round to one decimal.)

# %% predict="13.d"
predict("13.d", split_layers=19.3, stages=0.1)

# %% [markdown]
# That's why the usual arrangement is tensor parallelism inside a machine, and a pipeline from machine to machine.
#
# ## Break it
#
# Your program waits for its sends at the end. Isn't it safer to wait for each send right away? Let's try that with both schedules, on two ranks.
#
# **Predict.** Which of the two schedules hangs: "GPipe", "1F1B", "both", or "neither"?

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
# Both ranks are stuck in a *send*. Rank 0 wants to get rid of the activation of micro-batch 1, rank 1 wants to get rid of the gradient of micro-batch 0, and neither gets around to receiving. In GPipe, all messages travel in the same direction until the backward passes begin, so this deadlock never happens. Whether a send waits for its receiver depends on the backend and on the size of the message, so a program like this can pass all its tests and hang with the first large model.
#
# ## Fix it
#
# A send that doesn't wait has its price, too: until the message is gone, its memory isn't yours. In March 2026, somebody found out why the gradient norm of Llama 3.1 405B became NaN on 16 stages. Megatron-LM saved memory by freeing each output as soon as its send had *started*. If the memory went to another tensor while NCCL was still reading it, the next stage received garbage (NVIDIA/Megatron-LM pull request 4047, which is merged). The author had only seen this in large-scale runs, and wrote that it wasn't quite possible to create a good unit test.
#
# On two ranks, a few lines are enough. Rank 0 sends three messages from the same buffer, while rank 1 is busy with something else.
#
# **Predict.** Which three numbers does rank 1 receive?

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


launch(one_buffer, 2, backend="gloo")[1]  # always on CPUs, because on GPUs, it depends on luck

# %% [markdown] task="13.4" title="Fix it: too tidy" difficulty=2 minutes=8
# Your `run_stage` keeps every message until the end of the step. The `Outbox` below wants to save this memory, and it sends everything from one buffer. Fix `send`. Every message should arrive as it was when `send` was called, and the outbox may not make any further tensors.
#
# The check looks after every message until your code has waited for it, and it notices if anything touches the memory before that. So what happens only sometimes on a cluster happens every time here.


# %% exercise="13.4"
class Outbox:
    """Sends messages to one neighbor, all of them from a single buffer, which is as large as `template`."""

    def __init__(self, channels, receiver, template):
        self.channels, self.receiver = channels, receiver
        self.buffer, self.work = torch.empty_like(template), None

    def send(self, message):
        """Start to send a message. As soon as this returns, the caller may free or overwrite `message`."""
        ### BEGIN SOLUTION
        self.wait()  # until then, the buffer belongs to the previous message
        self.buffer.copy_(message)
        self.work = self.channels.send(self.buffer, self.receiver)
        ### BROKEN
        # self.buffer.copy_(message)
        # self.work = self.channels.send(self.buffer, self.receiver)
        ### END SOLUTION

    def wait(self):
        """Return as soon as everything has been sent, and right away if there's nothing to wait for."""
        if self.work is not None:
            self.work.wait()
            self.work = None  # because gloo hangs if you wait for the same send twice


# %% [markdown] hints="13.4"
# 1. From when on may you write into the buffer again, and which object can tell you? Who else is using the buffer when the broken version writes into it?
# 2. There are three places where `send` could wait: before it copies the message, between the copy and the send, and after the send. At one of them, it's too late for the message that's still on its way. At another one, you wait for a receiver that may be waiting for you, and you've just seen what happens then.
# 3. Call `self.wait()` in the first line of `send`. When the first message is sent, there's nothing to wait for, and `wait` takes care of that.

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
    return {"schedule": make_lists.__name__, "m": m, "sends from": "one buffer" if channels_class is TidyChannels else "each message"} | {
        f"rank {rank}": f"{seen['peak'] / 1e6:.1f} MB" for rank, seen in enumerate(ranks)}  # fmt: skip


viz.table([memory(gpipe, 8), memory(gpipe, 16), memory(schedule, 8), memory(schedule, 16),
           memory(schedule, 16, TidyChannels)], title="the most memory that a rank used, with 128 examples per micro-batch")  # fmt: skip

# %% [markdown]
# Here are the shelves again, this time in megabytes. With twice as many micro-batches, GPipe needs 28 MB on rank 0 instead of 16 MB. Your schedule only needs 1 MB more, for the messages that are kept until the end of the step, and the outbox gets rid of those, too.
#
# ## A table at both ends
#
# There's one more trap. If a GPT uses the same table for its embedding and its output layer (chapter 07), the first and the last stage both need it, so each of them has a copy. The look-ups contribute to the gradient on the first rank, and the logits contribute to the gradient on the last rank. So at the end of each step, these two ranks add up their gradients of the table with an all-reduce. If you forget it, the first loss is still correct, and then the two copies drift apart. Remember this for chapter 14, where a gradient norm has to count such a table once.
#
# ## Fill the bubble (optional)
#
# You've met the idea in chapter 11: a backward pass makes two things, and only one of them is urgent. The previous rank waits for the gradient of the *input*. Nobody waits for the gradients of the *weights*, until the optimizer step. So let's split B into **I** (the gradient of the input) and **W** (the gradients of the weights), and give F, I, and W one unit of time each. `Action("I", k)` needs what B needed, and `Action("W", k)` needs the rank's own I of the same micro-batch. A micro-batch leaves the shelf with its W.

# %% [markdown] task="13.5" title="Fill the bubble (optional)" difficulty=4 minutes=15
# Write a schedule with F, I, and W whose bubble is at most half of $(p-1)/m$. No rank may have more than $p$ micro-batches on its shelf, and there are at least as many micro-batches as ranks, $m \ge p$. `play(fill_bubble(4, 8))` draws your lists. Half is enough to pass. The check also tells you how you compare with the schedule that Qi et al. published in 2023.


# %% exercise="13.5"
def fill_bubble(p, m):
    """Return a list of p lists, one per rank, of Action("F", k), Action("I", k) and Action("W", k)."""
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
# 1. Start from your 1F1B, and replace each B with an I, followed by its W. Then draw it. Where are the ranks idle, and which W could you move there without making anyone wait?
# 2. At the end of a step, the first ranks wait for the last few I, so the later ranks should get their I done as soon as possible. They can put off some of their W for that. How many micro-batches may wait for their W on rank $r$ if the shelf has room for $p$, and the warm-up takes up $p - r$?
# 3. On rank $r$, put off each W by $r$ micro-batches: after I `k` comes W `k - r`, if `k >= r`. The remaining W come at the very end.

# %% check="13.5"
check("13.5", fill_bubble)

# %%
plans = {
    "1F1B": schedules.one_f_one_b(4, 8),
    "yours": as_schedule(fill_bubble(4, 8)),
    "ZB-H1": schedules.zero_bubble(4, 8),
}
halves = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # units of time
viz.table([{"p = 4, m = 8": name, "bubble": f"{schedule_order.bubble(schedule_order.simulate(plan, halves)):.3f}",
            "most on the shelves": ", ".join(map(str, schedules.peak_live(plan)))} for name, plan in plans.items()])  # fmt: skip

# %%
symptoms(13)

# %% [markdown]
# ## In the wild
#
# <details><summary>Going deeper: Megatron-Core, PyTorch, and more stages than ranks</summary>
#
# - **Megatron-Core** has your schedule in `megatron/core/pipeline_parallel/schedules.py`, where the warm-up is called `num_warmup_microbatches`. Its `deallocate_output_tensor` frees the values of an output, because only the output's graph is needed. Since pull request 4047, it does so only when the send has completed. The gradients of a tied table are added up in `finalize_model_grads.py`.
#
# - **DeepSpeed** had a related bug on the receiving side. In 2023, a user noticed that its 1F1B keeps one buffer more than necessary. But without this buffer, a received activation could overwrite a gradient that still had to be sent, so the fix also swapped the two messages (issue 2800, fixed by pull request 2862).
#
# - **PyTorch** has `torch.distributed.pipelining`. You wrap each part of the model in a `PipelineStage`, and choose a schedule such as `ScheduleGPipe`, `Schedule1F1B`, or `ScheduleZBVZeroBubble`. The option `scale_grads` is your 1/m.
#
# - **Two directions on NCCL.** Process groups for two directions are convenient, but they aren't a guarantee. NCCL's documentation warns that using several communicators at the same time requires careful synchronization and can lead to deadlocks. Megatron-LM can pair a send with a receive instead, and start both as one batch. The course's schedules have run over NCCL on ranks that share a single GPU, but not yet on several GPUs.
#
# - **More stages than ranks.** The bubble consists of $p - 1$ micro-batches on one stage, so smaller stages make it smaller. In *interleaved* 1F1B (Narayanan et al. 2021), each rank has $v$ stages of $1/v$ the size, and a micro-batch goes around the ranks $v$ times. The bubble shrinks to $(p-1)/(m v)$, at the cost of larger shelves and about $v$ times as many messages. In its classic form, $m$ has to be a multiple of $p$. You can play with it below.
#
# - **Micro-batches of different lengths.** If some tokens don't count, a mean of means isn't the mean. Then each micro-batch should contribute its *sum*, divided by the number of tokens in the whole batch, as `tplab.pipeline.Pipeline` does.
#
# </details>


# %% tags=["explore"]
def show_interleaved(p, m, v):
    spans = schedule_order.simulate(schedules.interleaved(p, m, v))
    return viz.schedule(spans, title=f"p = {p}, m = {m}, v = {v}: bubble {schedule_order.bubble(spans):.3f}")


viz.explore(show_interleaved, p=(4, 2), m=(8, 4, 16), v=(2, 1, 4))

# %% [markdown]
# ## Your library so far
#
# Your library now has a schedule, and a stage that runs it. `python -m my_tp pipeline` trains a model in two stages.

# %%
from tplab.course import library

library(13)

# %% [markdown]
# Your pipeline keeps four machines busy. Now somebody hands you the keys to 32 of them, and your model doesn't have eight times as many layers. What do the other 28 machines do?
