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
# **The question.** Cut a model between its layers, and give each rank some whole layers. How do you keep all ranks busy, and how much does each of them have to remember meanwhile?
#
# **What you will have built.** Two schedules, GPipe and 1F1B, as lists of actions; tools that read memory and idle time off any such lists; and the program that works through a list on a real rank. With it you train a model that is cut into two and into four stages, with the losses and the weights of one process.
#
# Symbols: `p` ranks, `m` micro-batches, `v` stages on each rank, `b` examples in a micro-batch, `s` sequence length, `h` hidden size, `L` layers. About 90 minutes.

# %% tags=["setup"]
import copy
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tplab import device, launch, record, viz
from tplab.common import corpus
from tplab.course import check, predict, show_failure, symptoms
from tplab.gpt import ParallelGPT
from tplab.memory import GPTConfig, MemoryMeter
from tplab.pipeline import Action, Channels, Pipeline, Schedule, gpt_stages, schedule_order, schedules
from tplab.pipeline.schedule_order import Span
from tplab.runtime import Record
from tplab.tensor import seed_all

# %% [markdown]
# This is where it goes: four ranks, eight micro-batches, one training step. Each box is one rank at work on one micro-batch, forward (light) or backward (dark). Where there is no box, the rank waits.

# %%
viz.schedule(schedule_order.simulate(schedules.one_f_one_b(4, 8)), title="1F1B, four ranks, eight micro-batches")

# %% [markdown]
# ## 1 · Stages, and what they wait for
#
# Tensor parallelism cuts every layer; all ranks work on the same layer at the same time and talk in each of them. **Pipeline parallelism** cuts *between* layers. Rank 0 holds the embedding and the first layers, the last rank the last layers and the loss. What a rank holds is called its **stage**.
#
# The stages form a chain. In the forward pass each stage sends its output, the **activation** `[b, s, h]`, to the next; in the backward pass each sends the gradient of its *input*, again `[b, s, h]`, to the one before. One message for each border between two stages and each direction, however many layers a stage has. There is no collective at all.
#
# The price is time. Stage 1 can begin only when stage 0 has ended. Here are four real ranks in such a chain, with one batch in one piece. In place of arithmetic each stage pauses, 20 ms forward and 40 ms backward.


# %%
def one_batch():
    """One step of one stage."""
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


viz.timeline(launch(one_batch, 4), title="one batch in one piece")

# %% [markdown]
# At every moment one rank works and the others wait: `p` ranks are as slow as one.
#
# So the batch is cut into `m` **micro-batches**, of `b` examples each. While stage 1 works on micro-batch 0, stage 0 works on micro-batch 1. Their gradients add up in `.grad`, as gradients do; when all `m` have gone forward and backward, the optimizer takes its one step. What remains of the waiting stands at the beginning, where the pipeline fills, and at the
# end, where it drains. The time that the ranks idle, over the time that they work, is called the **bubble**.
#
# **Predict.** The simplest order is GPipe's (Huang et al. 2018): all forwards, then all backwards. Take `p = 4` stages and `m = 8` micro-batches. On each stage a forward of one micro-batch takes 1 unit of time, a backward takes 2, and messages take none. How long does the step take? How long does each rank idle in it? How large is the bubble?

# %% predict="13.a"
predict("13.a", time=33, idle_of_a_rank=9, bubble=0.375)

# %% [markdown]
# Turn the knobs. What happens to the bubble when `m` doubles? When `p` does?


# %% tags=["explore"]
def show_gpipe(p, m):
    spans = schedule_order.simulate(schedules.gpipe(p, m))
    title = f"GPipe, p = {p}, m = {m}: {spans[0][-1].end:g} units, bubble {schedule_order.bubble(spans):.1%}"
    return viz.schedule(spans, title=title)


viz.explore(show_gpipe, p=(4, 2, 8), m=(1, 2, 4, 8, 16))

# %% [markdown]
# In general, with a forward of $t_F$ and a backward of $t_B$: each rank works $m\,(t_F + t_B)$. The last stage begins $(p-1)\,t_F$ late, then works without a pause, and when it is done the last gradient needs $(p-1)\,t_B$ to reach the first stage. So
#
# $$\text{bubble} = \frac{(p-1)(t_F + t_B)}{m\,(t_F + t_B)} = \frac{p-1}{m}$$
#
# Many micro-batches make it small. A batch is not endless, though; and there is another price, which comes in section 3.
#
# ## 2 · A schedule is a list of actions
#
# Who does what, and in which order? Write it down as data: a list of **actions** for each rank. `Action("F", 3)` is the forward of micro-batch 3, `Action("B", 3)` its backward; `.kind` and `.micro_batch` give the two parts back. Nothing says *when*. An action begins when the rank is done with the one before it in its list and when what it needs is there:
#
# | | needs | makes |
# |---|---|---|
# | F of micro-batch k | the output of F k on the rank before (rank 0: the input) | the activation for the next rank |
# | B of micro-batch k | the gradient from B k on the next rank (last rank: the loss), and the rank's own F k | the gradient for the rank before |
#
# Everything in this chapter follows from such lists: how long it takes, how much memory, how many messages, and whether it comes to an end at all.

# %% [markdown] task="13.1" title="GPipe as lists of actions" difficulty=1 minutes=8
# All forwards, then all backwards, on each of `p` ranks, micro-batches 0 to `m - 1`.


# %% exercise="13.1"
def gpipe(p, m):
    """All forwards, then all backwards.

    out: a list of p lists, one for each rank, of Action("F", k) and Action("B", k)
    """
    ### BEGIN SOLUTION
    forwards = [Action("F", k) for k in range(m)]
    backwards = [Action("B", k) for k in range(m)]
    return [forwards + backwards for _ in range(p)]
    ### END SOLUTION


# %% [markdown] hints="13.1"
# 1. Does the list depend on the rank? The waiting does not stand in it.
# 2. For one rank: `m` actions F, then `m` actions B, in the order of the micro-batches. Then the same for each of `p` ranks.
# 3. `forwards = [Action("F", k) for k in range(m)]`, `backwards` in the same way, and `[forwards + backwards for _ in range(p)]`.

# %% check="13.1"
check("13.1", gpipe)

# %% [markdown]
# `Schedule` of `tplab.pipeline.schedules` puts such lists into one object, which can print itself, and `schedule_order.simulate` plays it.


# %%
def as_schedule(rows, name="your lists"):
    """Lists of actions as a Schedule of tplab."""
    return Schedule(name, tuple(map(tuple, rows)), micro_batches=1 + max(a.micro_batch for a in rows[0]))


def draw(rows, title):
    spans = schedule_order.simulate(as_schedule(rows))
    return viz.schedule(spans, title=f"{title}: bubble {schedule_order.bubble(spans):.1%}")


print(as_schedule(gpipe(4, 4), "GPipe"))
draw(gpipe(4, 4), "your GPipe, p = 4, m = 4")

# %% [markdown]
# ## 3 · What a rank has to remember
#
# To go backward, a stage needs what autograd kept in its forward: the activations of its layers. They are **live** from F to B. Look at a list of GPipe: after the last F, and before the first B, all `m` micro-batches are live at once. That is the other price. The bubble asks for many micro-batches, and the memory grows with each of them. (The
# same batch, cut into twice as many of half the size, would need no more. But small micro-batches make small matrix products, which leave a GPU half idle, so there is an end to this.)
#
# **1F1B**, one forward one backward, is the order of PipeDream (Narayanan et al. 2019). PipeDream did not wait for the end of a step; here the optimizer does, and then 1F1B has the bubble of GPipe and needs less memory. The idea: go backward as soon as you can.
#
# - The last rank can turn each micro-batch round at once: F0 B0 F1 B1 ...
# - The rank before it needs one forward more before the first gradient comes back: F0, then F1 B0, F2 B1, ...
# - So each rank begins with some forwards, the **warm-up**: as many as there are stages after it. Then one forward and one backward in turn, until the forwards run out. Then the backwards that are left.
#
# **Predict.** 1F1B, `p = 4`, `m = 8`. How many micro-batches are live at most on rank 0, and on rank 3? And on rank 0, if `m = 64`?

# %% predict="13.b"
predict("13.b", rank_0=4, rank_3=1, rank_0_with_64=4)

# %% [markdown] task="13.2" title="1F1B as lists of actions" difficulty=2 minutes=12
# The same as before, in the order of 1F1B. There may be fewer micro-batches than stages.


# %% exercise="13.2"
def one_f_one_b(p, m):
    """A warm-up of forwards, then one forward and one backward in turn, then the backwards that are left.

    out: a list of p lists, one for each rank, of Action("F", k) and Action("B", k)
    Rank r has at most min(m, p - r) micro-batches live.
    """
    ### BEGIN SOLUTION
    rows = []
    for rank in range(p):
        warm_up = min(m, p - rank - 1)
        row = [Action("F", k) for k in range(warm_up)]
        for k in range(m - warm_up):
            row += [Action("F", warm_up + k), Action("B", k)]
        rows.append(row + [Action("B", k) for k in range(m - warm_up, m)])
    return rows
    ### END SOLUTION


# %% [markdown] hints="13.2"
# 1. Write down the lists for `p = 2`, `m = 3` by hand. How many forwards stand before the first backward, on rank 0 and on rank 1?
# 2. Rank `r` has `p - r - 1` stages after it: that many forwards of warm-up, but never more than `m`. Then `m - warm_up` pairs: the next forward, the oldest backward. Then the other backwards.
# 3. `warm_up = min(m, p - rank - 1)`; `row = [Action("F", k) for k in range(warm_up)]`; for `k in range(m - warm_up)` add `Action("F", warm_up + k)` and `Action("B", k)`; at the end `Action("B", k)` for `k` from `m - warm_up` to `m - 1`.

# %% check="13.2"
check("13.2", one_f_one_b)

# %%
print(as_schedule(one_f_one_b(4, 8), "1F1B"))
draw(one_f_one_b(4, 8), "your 1F1B, p = 4, m = 8")

# %%
draw(gpipe(4, 8), "your GPipe, p = 4, m = 8")

# %% [markdown]
# As long as before, and the same bubble. What has changed is how soon a dark box follows its light one.
#
# ## 4 · Read it off the lists
#
# How much memory, and how much idle time? Both follow from the lists alone, before any process is started. Write the two functions. The second is a small simulator: it plays the lists with the rule of section 2.

# %% [markdown] task="13.3" title="What can be read off the lists" difficulty=4 minutes=20
# - `peak_live(actions)`: the most micro-batches that are live at once, in one rank's list.
# - `bubble(rows, forward, backward)`: all lists are played. On every rank an F takes the time `forward`, a B takes `backward`, and an action starts as soon as the rank is done with the one before and what it needs is there. Return the idle time over the working time, all ranks together, from time 0 until the last action of all ends.
#
# The lists come in any order, not only GPipe's and 1F1B's, and may hold hundreds of micro-batches. Some never end: a rank waits for something that comes only after what it holds back itself. Then raise `ValueError`.


# %% exercise="13.3"
def peak_live(actions):
    """The most micro-batches between their F and their B at once, in one rank's list."""
    ### BEGIN SOLUTION
    peak = live = 0
    for action in actions:
        live += 1 if action.kind == "F" else -1
        peak = max(peak, live)
    return peak
    ### END SOLUTION


def bubble(rows, forward=1.0, backward=2.0):
    """Idle time over working time of all ranks, when the lists are played. ValueError for lists that never end."""
    ### BEGIN SOLUTION
    p, working = len(rows), 0.0
    ends = {}  # (rank, kind, micro-batch): when that action ended
    done, free = [0] * p, [0.0] * p  # for each rank: how many of its actions are done, and since when it is free
    while any(done[rank] < len(rows[rank]) for rank in range(p)):
        before = list(done)
        for rank in range(p):
            while done[rank] < len(rows[rank]):
                action = rows[rank][done[rank]]
                k, neighbour = action.micro_batch, rank - 1 if action.kind == "F" else rank + 1
                needs = [(neighbour, action.kind, k)] if 0 <= neighbour < p else []
                needs += [(rank, "F", k)] if action.kind == "B" else []
                if any(need not in ends for need in needs):
                    break
                lasts = forward if action.kind == "F" else backward
                free[rank] = max([free[rank], *(ends[need] for need in needs)]) + lasts
                ends[rank, action.kind, k] = free[rank]
                working += lasts
                done[rank] += 1
        if done == before:
            raise ValueError(f"these lists never end: each rank is stuck at its action {done}")
    return p * max(free) / working - 1
    ### END SOLUTION


# %% [markdown] hints="13.3"
# 1. `peak_live`: one more after each F, one less after each B. `bubble`: you need to know when each action ended, for each rank; a dictionary from `(rank, kind, micro_batch)` to that time will do. If the last of all ends at time `T`, the ranks have had `p · T` of time together.
# 2. Go round the ranks. Each does as many of its actions as it can: an F needs `(rank - 1, "F", k)`, a B needs `(rank + 1, "B", k)` and `(rank, "F", k)`, where such a rank exists. It starts at the maximum of these times and of the time when the rank became free. If in one whole round no rank gets on, and some are not done, nobody ever will.
# 3. In the loop: `if any(need not in ends for need in needs): break`; `free[rank] = max([free[rank], *(ends[need] for need in needs)]) + lasts`; `ends[rank, action.kind, k] = free[rank]`. At the end `p * max(free) / working - 1`.

# %% check="13.3"
check("13.3", peak_live, bubble)

# %% [markdown]
# Your functions on your lists: `p = 4`, and more and more micro-batches.

# %%
rows = []
for m in (2, 4, 8, 32):
    for name, make in (("GPipe", gpipe), ("1F1B", one_f_one_b)):
        lists = make(4, m)
        rows.append(
            {
                "m": m,
                "schedule": name,
                "bubble": f"{bubble(lists):.3f}",
                "(p-1)/m": f"{3 / m:.3f}",
                "live on ranks 0, 1, 2, 3": ", ".join(str(peak_live(row)) for row in lists),
            }
        )
viz.table(rows)

# %% [markdown]
# Twice the micro-batches, half the bubble. GPipe pays for it with memory, on all ranks; 1F1B does not, once `m` has reached `p`. The ranks are no longer alike, though: the first has to remember most.
#
# ## 5 · Run it
#
# Now real ranks. Rank `r` holds one stage, any `nn.Module` that takes `[b, h]` and returns `[b, h]` (the first one takes what `inputs` holds, the last one returns what the loss wants), and works through its list:
#
# - **F**: get x, from `inputs` or from the rank before. Run the stage. Send y to the next rank, or take the loss. Remember what B will need.
# - **B**: get the gradient dy of y from the next rank; the last rank starts from its loss. Go backward. Send the gradient of x to the rank before. Forget the micro-batch.
#
# Four things to know.
#
# **A received x is a leaf.** Autograd does not reach from one process into another. x has come out of a message, so nothing is known about where it came from; with `x.requires_grad_()` before the stage runs, `x.grad` is there after `y.backward(dy)`, and that is what the rank before waits for.
#
# **1/m.** Each micro-batch has its own loss, a mean over its `b` examples. The loss of the whole batch is the mean of these `m` means, so each of them counts `1/m`. (If micro-batches have different numbers of tokens, the mean of means is wrong: add up sums, and divide by the number of all tokens. `tplab.pipeline.executor` does that.)
#
# **A send must not wait.** `dist.send` may come back only when its receiver has come to its `recv`; and that one may be waiting for you. So start the send, go on, and wait for it at the end. (Chapter 01 did this with `isend`.)
#
# **Two channels.** Between two neighbors, activations go up and gradients come down, and the two ranks don't start these messages in the same order. That's a problem on NCCL, which puts all messages between two GPUs in a process group into a single queue: a send at the front would block the receive behind it. So each direction gets its own process group. `Channels` in `tplab.pipeline.p2p` creates them for you:
#
# | | |
# |---|---|
# | `channels.rank`, `channels.world_size` | this rank's place in the chain, and the number of ranks |
# | `work = channels.send(tensor, receiver)` | starts to send; `work.wait()` returns when the send is done |
# | `work = channels.receive(tensor, sender)` | starts to receive into `tensor`; read it only after `work.wait()` |

# %% [markdown] task="13.4" title="A stage at work" difficulty=4 minutes=25
# Write the program of one rank. It must work for any list that can be played: do what `actions` says, in that order. When a micro-batch has gone backward, keep nothing of it, so that no more is live than the list asks for.


# %% exercise="13.4"
def run_stage(stage, actions, channels, template, loss, inputs=None, targets=None):
    """Work through one rank's list. The gradients of the batch's mean loss are added to those of the stage's parameters.

    stage       this rank's module                                      [b, h] -> [b, h]
    actions     its list, of Action("F", k) and Action("B", k)
    template    as large as each message: torch.empty_like(template) makes room for one    [b, h]
    loss        (output of the last stage, target) -> the mean over the micro-batch
    inputs      on the first rank the m micro-batches, elsewhere None
    targets     on the last rank those of the m micro-batches, elsewhere None

    out: on the last rank the mean loss of the batch, elsewhere None
    """
    ### BEGIN SOLUTION
    rank, last = channels.rank, channels.world_size - 1
    m = sum(action.kind == "F" for action in actions)
    kept, sent, losses = {}, [], []

    def receive(sender):
        tensor = torch.empty_like(template)
        channels.receive(tensor, sender).wait()
        return tensor

    for action in actions:
        k = action.micro_batch
        if action.kind == "F":
            x = inputs[k] if rank == 0 else receive(rank - 1).requires_grad_()  # [b, h]
            y = stage(x)  # [b, h]
            if rank == last:
                y = loss(y, targets[k]) / m  # []
                losses.append(y.detach())
            else:
                sent.append(channels.send(y.detach(), rank + 1))
            kept[k] = x, y
        else:
            x, y = kept.pop(k)
            y.backward(None if rank == last else receive(rank + 1))
            if rank > 0:
                sent.append(channels.send(x.grad, rank - 1))
    for work in sent:
        work.wait()
    return sum(losses) if rank == last else None
    ### END SOLUTION


# %% [markdown] hints="13.4"
# 1. What does B need of F? x, for its gradient, and y, or the loss, to start from: a dictionary from micro-batch to `(x, y)`. Which ranks receive in F, which in B, and which send?
# 2. In F: x is `inputs[k]` on rank 0; elsewhere receive into a *new* `torch.empty_like(template)`, wait, and call `.requires_grad_()`. On the last rank replace y by `loss(y, targets[k]) / m` and note its value, detached; elsewhere send `y.detach()` to `rank + 1`. In B: `x, y = kept.pop(k)`, go backward, from nothing on the last rank and from
#    the received gradient elsewhere, and send `x.grad` to `rank - 1`, unless this is rank 0.
# 3. `m` is the number of F in `actions`. Collect what `channels.send` returns in a list, and wait for all of it after the loop. `y.backward(None if rank == last else receive(rank + 1))`. At the end `sum(losses)` on the last rank.

# %% check="13.4"
check("13.4", run_stage)

# %% [markdown]
# ### Train with it
#
# The model reads 8 bytes of Python source and predicts the next one. Each byte becomes 16 numbers, the 8 of them side by side are a vector of `h = 128`; four residual blocks work on it; an output layer scores 256 bytes. `ByteStage(number, stages)` is the part of it that one rank holds: two blocks each for two stages, one each for four.

# %%
CONTEXT, HIDDEN, BLOCKS, BATCH, STEPS = 8, 128, 4, 64, 30
text = corpus.python_sources(300_000)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))  # [b, h]


class ByteStage(nn.Module):
    """One of `stages` equal parts of the model. Names are those of the whole model."""

    def __init__(self, number=0, stages=1):
        super().__init__()
        each = BLOCKS // stages
        self.embedding = nn.Embedding(corpus.VOCABULARY, HIDDEN // CONTEXT) if number == 0 else None
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(number * each, (number + 1) * each)})
        self.head = nn.Linear(HIDDEN, corpus.VOCABULARY) if number == stages - 1 else None

    def forward(self, x):
        if self.embedding is not None:
            x = self.embedding(x).flatten(1)  # [b, 8] -> [b, h]
        for block in self.blocks.values():
            x = block(x)  # [b, h]
        return x if self.head is None else self.head(x)  # [b, h], or [b, 256]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


torch.manual_seed(0)
plain = ByteStage().double()
start = copy.deepcopy(plain.state_dict())
optimizer, plain_losses = sgd(plain.parameters()), []
for ids, targets in corpus.byte_batches(text, CONTEXT, BATCH, STEPS, seed=1):
    value = F.cross_entropy(plain(ids), targets[:, -1])
    optimizer.zero_grad()
    value.backward()
    optimizer.step()
    plain_losses.append(value.item())
print(f"one process: loss {plain_losses[0]:.3f} -> {plain_losses[-1]:.3f}")

# %% [markdown]
# Now your program, with your lists. Only rank 0 is given the ids, only the last rank the targets. Nobody sums gradients over ranks: each rank has other parameters.


# %%
def new_stage(rank, p):
    """This rank's part of the model, with the starting weights of all runs."""
    stage = ByteStage(rank, p).double().to(device())
    stage.load_state_dict({name: start[name] for name in stage.state_dict()})
    return stage


def train(make_lists, m, steps=STEPS, optimizer=sgd, loss=F.cross_entropy):
    torch.set_num_threads(1)
    channels = Channels()
    rank, p = channels.rank, channels.world_size
    stage = new_stage(rank, p)
    actions = make_lists(p, m)[rank]
    template = torch.empty(BATCH // m, HIDDEN, dtype=torch.float64, device=device())
    optimizer, losses = optimizer(stage.parameters()), []
    for ids, targets in corpus.byte_batches(text, CONTEXT, BATCH, steps, seed=1):
        ids = ids.to(device()).chunk(m) if rank == 0 else None  # m of [b, 8]
        targets = targets[:, -1].to(device()).chunk(m) if rank == p - 1 else None  # m of [b]
        optimizer.zero_grad()
        value = run_stage(stage, actions, channels, template, loss, ids, targets)
        optimizer.step()
        losses.append(None if value is None else value.item())
    return {"losses": losses, "weights": stage.state_dict()}


runs = {p: launch(train, p, args=(one_f_one_b, 8)) for p in (2, 4)}
viz.curves(
    {"one process, plain PyTorch": plain_losses}
    | {f"your 1F1B, {p} stages": run[-1]["losses"] for p, run in runs.items()},
    title=f"{STEPS} steps on real text",
)

# %%
rows = []
for p, run in runs.items():
    off = [abs(mine - right) for mine, right in zip(run[-1]["losses"], plain_losses, strict=True)]
    weights = [
        (value.cpu() - plain.state_dict()[name]).abs().max().item()
        for rank in run
        for name, value in rank["weights"].items()
    ]
    rows.append(
        {
            "stages": p,
            "last loss": f"{run[-1]['losses'][-1]:.6f}",
            "that of one process": f"{plain_losses[-1]:.6f}",
            "largest difference in any step": f"{max(off):.0e}",
            "in any weight at the end": f"{max(weights):.0e}",
        }
    )
viz.table(rows)

# %% [markdown]
# The same training, cut into pieces. The differences are in the last digits of a float64: the mean over the batch is taken in eight parts.
#
# ### See it run
#
# So far the pictures were simulated. Here is one from real processes. On a laptop four ranks share a few cores, so their times would tell about the cores. Therefore the stages here do no arithmetic: they *pause*, 20 ms for a forward and 40 ms for a backward, which needs no core. The messages, the waiting and the order are real.

# %%
UNIT = 0.02  # seconds


class Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, stage):
        ctx.stage = stage
        stage.pause("F", UNIT)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.stage.pause("B", 2 * UNIT)
        return dy, None


class PausingStage(nn.Module):
    """Takes its time, and notes when."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), device=device()))
        self.times = {"F": [], "B": []}

    def pause(self, kind, seconds):
        began = time.monotonic()
        time.sleep(seconds)
        self.times[kind].append((began, time.monotonic()))

    def forward(self, x):
        return Pause.apply(x + self.weight, self)


def traced(make_lists, m):
    """When this rank was at work on which action."""
    channels, stage = Channels(), PausingStage()
    actions = make_lists(channels.world_size, m)[channels.rank]
    x = torch.zeros(2, 4, device=device())
    dist.barrier()
    run_stage(stage, actions, channels, x, lambda y, target: y.mean(), [x] * m, [x] * m)
    times = {kind: iter(spans) for kind, spans in stage.times.items()}
    return [(action, *next(times[action.kind])) for action in actions]


def measured(run):
    """The spans of a real run, in milliseconds."""
    zero = min(began for rank in run for _, began, _ in rank)
    return [[Span(action, 1e3 * (a - zero), 1e3 * (b - zero)) for action, a, b in rank] for rank in run]


traces = {name: launch(traced, 4, args=(make, 8)) for name, make in (("1F1B", one_f_one_b), ("GPipe", gpipe))}
real = {name: measured(run) for name, run in traces.items()}
viz.schedule(real["1F1B"], title="your 1F1B on four real ranks, in milliseconds")

# %%
viz.schedule(real["GPipe"], title="your GPipe on four real ranks, in milliseconds")

# %% [markdown]
# The first of the two runs once more, now as the record saw it: hatched where a rank is in a receive. This is the bubble, seen from the side of the messages, but for the wait at the end, where a rank has nothing left to do. (The first coloured piece of each rank holds its start too.)

# %%
receives = Record([call for call in traces["1F1B"].record if call.kind == "recv"])
viz.timeline(SimpleNamespace(record=receives, spans=traces["1F1B"].spans), title="your 1F1B: at work, or in a receive")

# %%
viz.table(
    [
        {
            "schedule": name,
            "bubble of the real run": f"{schedule_order.bubble(spans):.3f}",
            "by your function": f"{bubble(make(4, 8)):.3f}",
            "milliseconds": f"{max(span.end for row in spans for span in row):.0f}",
            "33 units": f"{33e3 * UNIT:.0f}",
        }
        for (name, spans), make in zip(real.items(), (one_f_one_b, gpipe), strict=True)
    ]
)

# %% [markdown]
# What a list says is what happens: the same order, the same waiting, on real processes. The milliseconds are more than 33 units, and the more the busier your machine is: a process is woken late from its pause, a message takes its time, and whoever waits for it is late, too.
#
# And the memory? `MemoryMeter` of chapter 00 follows every tensor of a rank during one step. Four stages, micro-batches of 128 examples, 8 of them and then 16. Shown is the most that was live, without what remains at the end, the gradients.


# %%
def memory_of_a_step(make_lists, m, b=128):
    channels = Channels()
    rank, p = channels.rank, channels.world_size
    stage = new_stage(rank, p)
    template = torch.empty(b, HIDDEN, dtype=torch.float64, device=device())
    ids, targets = next(corpus.byte_batches(text, CONTEXT, b * m, 1, seed=2))
    ids, targets = ids.to(device()).chunk(m), targets[:, -1].to(device()).chunk(m)
    with MemoryMeter() as meter:
        run_stage(stage, make_lists(p, m)[rank], channels, template, F.cross_entropy, ids, targets)
    return meter.peak - meter.live


rows = []
for name, make in (("GPipe", gpipe), ("1F1B", one_f_one_b)):
    for m in (8, 16):
        peaks = launch(memory_of_a_step, 4, args=(make, m))
        live = [peak_live(row) for row in make(4, m)]
        cells = {f"rank {rank}": f"{live[rank]} live, {peaks[rank] / 1e6:.1f} MB" for rank in range(4)}
        rows.append({"schedule": name, "m": m} | cells)
viz.table(rows, title="most that was live, by your peak_live, and measured")

# %% [markdown]
# With GPipe, twice the micro-batches take about twice the memory. With 1F1B only one thing is added: your program keeps every message that it sent until the end of the step, `m` of them on an outer rank and `2m` on an inner one, each of 131 kB.
#
# ## 6 · More stages than ranks
#
# The bubble is `p - 1` pieces of work long, where a piece is one micro-batch on one stage. So make the pieces smaller: give each rank `v` stages of `1/v` the size. Rank `r` holds the stages `r`, `r + p`, `r + 2p`, ..., and a micro-batch goes round the ranks `v` times. This is **interleaved 1F1B** (Narayanan et al. 2021). Its bubble is
#
# $$\frac{p-1}{m\,v}$$
#
# **Predict.** What does it cost? One step with `p = 4` and `m = 8`: how many messages do all ranks send together, with one stage a rank, and with `v = 2`?

# %% predict="13.c"
predict("13.c", one_stage=48, two_stages=112)


# %% tags=["explore"]
def show_interleaved(p, m, v):
    spans = schedule_order.simulate(schedules.interleaved(p, m, v))
    end = max(span.end for row in spans for span in row)
    title = f"p = {p}, m = {m}, v = {v}: {end:g} units, bubble {schedule_order.bubble(spans):.1%}"
    return viz.schedule(spans, title=title)


viz.explore(show_interleaved, p=(4, 2), m=(8, 4, 16), v=(2, 1, 4))

# %% [markdown]
# A box of full height is a micro-batch in the rank's first stage, a lower one in its second, and so on. The lists are longer, the rule is the same. `m` must be a multiple of `p`: the micro-batches go round in groups of `p`.
#
# ### Less bubble still
#
# A backward makes two things: the gradient of the stage's *input*, for which the rank before waits, and the gradients of its *weights*, for which nobody waits until the optimizer does. **Zero-bubble** schedules (Qi et al. 2023) cut B in two: **I**, the input's part, at once, and **W**, the weights' part, where the rank would otherwise idle. Here is one of them, ZB-H1; a B of 2 units becomes an I of 1 and a W of 1:

# %%
spans = schedule_order.simulate(schedules.zero_bubble(4, 8))
viz.schedule(spans, title=f"ZB-H1, p = 4, m = 8: bubble {schedule_order.bubble(spans):.1%}")

# %% [markdown]
# All four side by side, by counting in their lists. An activation is live until its B, or its W.

# %%
rows = []
for name, schedule in {
    "GPipe": schedules.gpipe(4, 8),
    "1F1B": schedules.one_f_one_b(4, 8),
    "interleaved, v = 2": schedules.interleaved(4, 8, 2),
    "ZB-H1": schedules.zero_bubble(4, 8),
}.items():
    spans = schedule_order.simulate(schedule)
    live = [peak / schedule.chunks for peak in schedules.peak_live(schedule)]
    rows.append(
        {
            "p = 4, m = 8": name,
            "units of time": f"{max(span.end for row in spans for span in row):g}",
            "bubble": f"{schedule_order.bubble(spans):.3f}",
            "live on ranks 0, 1, 2, 3": ", ".join(f"{peak:g}" for peak in live),
            "messages": sum(total.calls for total in schedules.traffic(schedule, 1)),
        }
    )
viz.table(rows, title="live: in micro-batches of a whole rank's layers")

# %% [markdown]
# No schedule is best in everything. Interleaving pays for its smaller bubble with messages and with memory, ZB-H1 with memory on the later ranks.
#
# ## 7 · A table at both ends
#
# A GPT has a table of token vectors at its first stage, and, if it is tied, the same table as output layer at its last one (chapter 07). In a pipeline these are two ranks. So each has a copy. Each use gives a part of the gradient: that of the look-up arises on the first rank, that of the logits on the last, and the table must learn from their sum. **One all-reduce, among these two
# ranks, at the end of each step**, of the table's gradient. Started alike, and with the same gradients, the copies stay alike.
#
# `tplab.pipeline.executor` has what you wrote, with these extras: several stages a rank, I and W, losses that are sums over tokens, and the tied table. Here it runs a GPT with all four schedules on two ranks, and each is compared with the whole GPT on one process.

# %%
CONFIG = GPTConfig(num_layers=4, hidden_size=32, num_heads=4, vocab_size=256, seq_length=16, dropout=0.0)
FOUR = [schedules.gpipe(2, 4), schedules.one_f_one_b(2, 4), schedules.interleaved(2, 4, 2), schedules.zero_bubble(2, 4)]


def whole_gpt(group=None):
    seed_all(0)
    return ParallelGPT(CONFIG, device=device(), dtype=torch.float64, group=group)


def gpt_batches(m, steps=1):
    """(ids, targets) of each step, in m micro-batches of [2, 16]."""
    for ids, targets in corpus.byte_batches(text, 16, 2 * m, steps, seed=3):
        yield ids.to(device()).chunk(m), targets.to(device()).chunk(m)


def gpt_pipeline(schedule, channels, tie=True):
    """This rank's part of the GPT. tie=False: its two tables know nothing of each other."""
    groups = [dist.new_group([rank]) for rank in range(channels.world_size)]  # no tensor parallelism: one rank each
    stages = gpt_stages(whole_gpt(groups[channels.rank]), schedule.stages)
    mine = [stages[schedule.stage(channels.rank, chunk)] for chunk in range(schedule.chunks)]
    table = mine[0].tied if channels.rank == 0 else mine[-1].tied
    return Pipeline(
        mine,
        schedule,
        shape=(2, 16, CONFIG.hidden_size),
        dtype=torch.float64,
        device=device(),
        loss_sum=mine[-1].loss_sum,
        tied=table if tie else None,
        channels=channels,
    )


def gradients_of(module):
    return {name: param.grad.cpu() for name, param in module.named_parameters()}


def four_schedules():
    channels, found = Channels(), []
    for schedule in FOUR:
        pipeline = gpt_pipeline(schedule, channels)
        ids, targets = next(gpt_batches(schedule.micro_batches))
        with record() as section:
            loss = pipeline.step(ids, targets)
        gradients = {name: grad for stage in pipeline.stages for name, grad in gradients_of(stage).items()}
        totals = section.totals(channels.rank)
        found.append({"loss": loss, "gradients": gradients, "live": pipeline.peak_live, "totals": totals})
    return found


whole = whole_gpt()
ids, targets = next(gpt_batches(4))
whole_loss = whole(torch.cat(ids), torch.cat(targets))
whole_loss.backward()
right = gradients_of(whole)
right["output.weight"] = right["embedding.weight"]

ranks = launch(four_schedules, 2)
rows = []
for i, schedule in enumerate(FOUR):
    off = [(grad - right[name]).abs().max().item() for rank in ranks for name, grad in rank[i]["gradients"].items()]
    rows.append(
        {
            "schedule": schedule.name,
            "loss off by": f"{abs(ranks[1][i]['loss'].item() - whole_loss.item()):.0e}",
            "any gradient off by": f"{max(off):.0e}",
            "live on ranks 0, 1": ", ".join(f"{rank[i]['live'] / schedule.chunks:g}" for rank in ranks),
            "sends of rank 0": ranks[0][i]["totals"]["send"].calls,
            "all-reduces": ranks[0][i]["totals"]["all_reduce"].calls,
        }
    )
viz.table(
    rows,
    title="a GPT in stages against the whole one; live as counted while it ran, in micro-batches of a whole rank's layers",
)

# %% [markdown]
# ## 8 · Break it
#
# **First: lists that never end.** Rank 0 goes backward as soon as it has gone forward once; rank 1 goes forward twice first. Each list looks harmless. Before anything is started, `schedule_order.check` reads them:

# %%
CIRCLE = [
    [Action("F", 0), Action("B", 0), Action("F", 1), Action("B", 1)],
    [Action("F", 0), Action("F", 1), Action("B", 0), Action("B", 1)],
]

with show_failure():
    schedule_order.check(as_schedule(CIRCLE, "a circle"))

# %% [markdown]
# It names the circle. The same lists, given to your program all the same:


# %%
def one_step(make_lists, channels_class=Channels):
    channels = channels_class()
    rank, p = channels.rank, channels.world_size
    actions = make_lists(p, 2)[rank]
    template = torch.empty(BATCH // 2, HIDDEN, dtype=torch.float64, device=device())
    ids, targets = next(corpus.byte_batches(text, CONTEXT, BATCH, 1, seed=1))
    ids, targets = ids.to(device()).chunk(2), targets[:, -1].to(device()).chunk(2)
    value = run_stage(new_stage(rank, p), actions, channels, template, F.cross_entropy, ids, targets)
    return None if value is None else value.item()


with show_failure():
    launch(one_step, 2, args=(lambda p, m: CIRCLE,))

# %% [markdown]
# Both ranks wait in a receive, each for what the other would send later. On a cluster, with a time limit of ten minutes and a line of C++ in the report, this is what a wrong schedule looks like; and a check of the lists costs a millisecond. torch does such a dry run too: section 10.
#
# **Second: a send that waits.** This is your program with your 1F1B. Only the channels are different, because they wait for each send immediately.


# %%
class Done:
    def wait(self):
        """It was waited for already."""


class WaitingChannels(Channels):
    def send(self, tensor, receiver):
        super().send(tensor, receiver).wait()
        return Done()


print("GPipe:", launch(one_step, 2, args=(gpipe, WaitingChannels)))
with show_failure():
    launch(one_step, 2, args=(one_f_one_b, WaitingChannels))

# %% [markdown]
# With GPipe's lists all goes well. With those of 1F1B both ranks wait in a *send*: rank 0 with the activation of micro-batch 1, rank 1 with the gradient of micro-batch 0, and neither comes to its receive. The lists are right, `check` has nothing against them; the way of sending is wrong. Whether a send waits for its receiver depends on the backend and on the size of the
# message, so such a program may pass every test and hang with the first large model.
#
# **Third: 1/m is forgotten.** Here a loss that is `m` times too large stands for the mistake.
#
# **Predict.** `m = 8`. How many times as large is the first change of the weights, with SGD? And with Adam?

# %% predict="13.d"
predict("13.d", sgd=8, adam=1)


# %%
def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)


def eight_times(y, target):
    return 8 * F.cross_entropy(y, target)


def changes(steps):
    """How far the weights of this stage have moved, for each optimizer, with 1/m and without."""
    found = {}
    for optimizer in (plain_sgd, adam):
        for loss in (F.cross_entropy, eight_times):
            weights = train(one_f_one_b, 8, steps, optimizer, loss)["weights"]
            moved = sum((value.cpu() - start[name]).square().sum() for name, value in weights.items())
            found[optimizer.__name__, loss.__name__] = moved.sqrt().item()
    return found


first_step = launch(changes, 2, args=(1,))[0]
viz.table(
    [
        {
            "optimizer": name,
            "first change of rank 0's weights": f"{first_step[name, 'cross_entropy']:.3e}",
            "without 1/m": f"{first_step[name, 'eight_times']:.3e}",
            "ratio": f"{first_step[name, 'eight_times'] / first_step[name, 'cross_entropy']:.3f}",
        }
        for name in ("plain_sgd", "adam")
    ]
)

# %% [markdown]
# With Adam the weights change as if nothing were wrong, and the mistake stays until somebody clips gradients by their norm, or changes `m` in the middle of a run. That is why gradients are compared, or weights after a step of SGD, never the loss curve of Adam.
#
# **Fourth: two tables that know nothing of each other.** The GPT of section 7, trained for 20 steps, with the all-reduce for its tied table and without.


# %%
def train_gpt(tie):
    channels = Channels()
    pipeline = gpt_pipeline(FOUR[1], channels, tie)
    optimizer = plain_sgd(pipeline.stages[0].parameters())
    losses = []
    for ids, targets in gpt_batches(4, steps=20):
        optimizer.zero_grad()
        loss = pipeline.step(ids, targets)
        optimizer.step()
        losses.append(None if loss is None else loss.item())
    return {"losses": losses, "table": pipeline.stages[0].tied.detach().cpu()}


whole = whole_gpt()
optimizer, alone = plain_sgd(whole.parameters()), []
for ids, targets in gpt_batches(4, steps=20):
    optimizer.zero_grad()
    loss = whole(torch.cat(ids), torch.cat(targets))
    loss.backward()
    optimizer.step()
    alone.append(loss.item())
rows = []
for tie in (True, False):
    first, last = launch(train_gpt, 2, args=(tie,))
    rows.append(
        {
            "the two tables": "gradients added up" if tie else "each on its own",
            "first loss": f"{last['losses'][0]:.6f}",
            "loss after 20 steps": f"{last['losses'][-1]:.6f}",
            "one process": f"{alone[-1]:.6f}",
            "largest difference of the tables": f"{(first['table'] - last['table']).abs().max():.1e}",
        }
    )
viz.table(rows)

# %% [markdown]
# The first loss is right, and the training goes on, as that of another model: one with two tables. Nothing is reported. A checkpoint holds one of the two.

# %%
symptoms(13)

# %% [markdown]
# ## 9 · Measure it
#
# The messages of one training step, as recorded, against the formula: an inner rank sends `m` activations up and `m` gradients down, a rank at the end only one of the two kinds. Each has `b·h` numbers (`b·s·h` in a transformer).


# %%
def count(m):
    with record() as section:
        train(one_f_one_b, m, steps=1)
    return section.totals(dist.get_rank())


rows = []
for p, m in ((2, 8), (4, 8), (4, 16)):
    for rank, totals in enumerate(launch(count, p, args=(m,))):
        sends = m * ((rank > 0) + (rank < p - 1))
        rows.append(
            {
                "p": p,
                "m": m,
                "rank": rank,
                "sends": totals["send"].calls,
                "formula": sends,
                "bytes": f"{totals['send'].bytes:,}",
                "formula ": f"{sends * (BATCH // m) * HIDDEN * 8:,}",
            }
        )
viz.table(rows)

# %% [markdown]
# The bytes of a step do not depend on `m`, nor on how many layers a stage has. Compare with tensor parallelism, where every layer has four all-reduces of `b·s·h` (chapter 10). For one text of 2048 tokens through GPT-3's 96 layers, with `h = 12288` and 16-bit numbers:

# %%
message = 2048 * 12288 * 2  # bytes of b·s·h for one text
viz.table(
    [
        {
            "how 96 layers go on 8 ranks": "tensor parallel",
            "messages of a rank": 4 * 96,
            "their bytes": f"{4 * 96 * message / 1e6:,.0f} MB",
            "waits": "in every layer, for all",
        },
        {
            "how 96 layers go on 8 ranks": "pipeline, 12 layers each",
            "messages of a rank": 2,
            "their bytes": f"{2 * message / 1e6:,.0f} MB",
            "waits": "in the bubble",
        },
    ]
)

# %% [markdown]
# So tensor parallelism stays inside a machine, on the fastest links, and the pipeline goes from machine to machine.
#
# ## 10 · In the wild
#
# **Megatron-Core**, `megatron/core/pipeline_parallel/schedules.py`: `get_forward_backward_func` chooses `forward_backward_pipelining_without_interleaving` (1F1B) or `..._with_interleaving`; there the warm-up you wrote is `num_warmup_microbatches`. Instead of two channels it pairs a send with a receive: `send_forward_recv_backward` in `p2p_communication.py`.
# `deallocate_output_tensor` goes further than you did: an output that was sent is needed by nobody, only its graph is, so its memory is given back at once. The gradients of the tied table are summed in `_allreduce_word_embedding_grads`, in `megatron/core/distributed/finalize_model_grads.py`, among the ranks of the "embedding group".
#
# **PyTorch**, `torch.distributed.pipelining`: a `PipelineStage` around each module, and a schedule object: `ScheduleGPipe`, `Schedule1F1B`, `ScheduleInterleaved1F1B`, `ScheduleInterleavedZeroBubble`, `ScheduleZBVZeroBubble`. The later ones are lists of actions too, with sends and receives put in as actions of their own; `_validate_schedule` and `_simulate_comms_compute` in `schedules.py`
# are its dry runs. `scale_grads=True`, the default, is the 1/m. Beside your program, with the same stages and the same batch:


# %%
def beside_torch():
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    channels = Channels()
    rank, p, m = channels.rank, channels.world_size, 8
    ids, targets = next(corpus.byte_batches(text, CONTEXT, BATCH, 1, seed=4))
    ids, targets = ids.to(device()), targets[:, -1].to(device())
    template = torch.empty(BATCH // m, HIDDEN, dtype=torch.float64, device=device())

    def sent(section):
        """How many activations and gradients."""
        return sum(call.kind == "send" and call.shape == template.shape for call in section)

    mine = new_stage(rank, p)
    with record() as my_record:
        run_stage(mine, one_f_one_b(p, m)[rank], channels, template, F.cross_entropy, ids.chunk(m), targets.chunk(m))

    theirs = new_stage(rank, p)
    schedule = Schedule1F1B(PipelineStage(theirs, rank, p, device()), m, loss_fn=F.cross_entropy)
    with record() as their_record:
        schedule.step(*([ids] if rank == 0 else []), **({"target": targets} if rank == p - 1 else {}))
    pairs = zip(mine.parameters(), theirs.parameters(), strict=True)
    return {
        "largest difference of a gradient": f"{max((a.grad - b.grad).abs().max().item() for a, b in pairs):.0e}",
        "your sends": sent(my_record),
        "torch's": sent(their_record),
        "torch's others": their_record.totals(rank)["send"].calls - sent(their_record),
    }


viz.table([{"rank": rank} | found for rank, found in enumerate(launch(beside_torch, 2))])

# %% [markdown]
# The same gradients to the last digit, by the same messages. The others are small: before its first step, torch's stages tell each other the shape and the dtype of what will come, which you were given as `template`.
#
# ## 11 · Recap
#
# 1. Whole layers on each rank, micro-batches one after the other. The bubble of GPipe and 1F1B is `(p-1)/m`; with `v` stages a rank it is `(p-1)/(m·v)`; with B cut in two (ZB-H1) it is a third of `(p-1)/m`, if F, I and W take equally long.
# 2. Memory: GPipe keeps `m` micro-batches on every rank, 1F1B `min(m, p - r)` on rank `r`.
# 3. Traffic: for each micro-batch one activation up and one gradient down over each border, `b·s·h` each, whatever a stage holds. No collective, but one all-reduce for a tied table, between the first and the last rank.
# 4. Gradients of micro-batches add up; 1/m makes them those of one process. A received activation is a leaf.
# 5. A schedule is data: what it costs and whether it ends can be read off before it runs. Next, chapter 14 puts data, pipeline and tensor parallelism together in one mesh of ranks.

# %% [markdown]
# ## Your library so far
#
# It now has the schedules of a pipeline, and a stage that runs them.

# %%
from tplab.course import library

library(13)
