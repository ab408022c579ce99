# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 14 · Data parallelism and the 3D mesh
#
# Most GPUs of a large training run just hold another copy of the model. In this chapter, you'll make several copies learn as one, and you'll keep them from storing the same optimizer state over and over, which is the idea behind FSDP. At the end, three kinds of parallelism share eight processes, and you decide which rank sits where. With the wrong seats, all the numbers are still right, but each step takes longer, and no test will tell you why.
#
# You need chapters 10, 12, and 13. About 75 minutes.

# %% tags=["setup"]
import math
from contextlib import nullcontext
from functools import partial
from itertools import permutations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tplab import device, launch, record, viz
from tplab.common import corpus
from tplab.course import check, predict, show_failure, symptoms
from tplab.memory import PRESETS, GPTConfig
from tplab.runtime import slow_link
from tplab.trace import trace_rank

# %% [markdown]
# ## Two copies
#
# In **data parallelism**, every rank holds a full copy of the model, called a **replica**, and gets its own part of the batch. The two passes don't need any messages. But then an all-reduce adds up the gradients, so all replicas take the same step and stay identical.
#
# Here's a model with a single weight $w$. The loss of a token $x$ is $w \cdot x$, so its gradient is simply $x$. Rank 0 has three tokens, and rank 1 has only one.


# %%
def two_replicas():
    w = torch.ones((), requires_grad=True, device=device())
    tokens = torch.tensor([[1.0, 2.0, 3.0], [8.0]][dist.get_rank()], device=device())
    (w * tokens).sum().backward()
    own = w.grad.item()
    dist.all_reduce(w.grad)
    return {"own gradient": own, "after the all-reduce": w.grad.item()}


viz.table([{"rank": rank} | seen for rank, seen in enumerate(launch(two_replicas, 2))])

# %% [markdown]
# A single process with all four tokens would get 14, too. For the gradient of the *mean* loss, divide it by 4, the number of tokens. But what if each rank first divides by its own number of tokens, and the ranks average the results?
#
# **Predict.** In a real run, rank 0 has 30 tokens with a mean loss of 2, and rank 1 has 10 tokens with a mean loss of 4. What's the mean loss of all tokens? And what's the average of the two means?

# %% predict="14.a"
predict("14.a", mean_over_tokens=2.5, mean_of_means=3)

# %% [markdown]
# In an average of means, a token counts more if its rank has fewer tokens. Until October 2024, Hugging Face's Trainer averaged like this in gradient accumulation (transformers pull request 34191).
#
# ## Gradients that leave early
#
# If each gradient had its own all-reduce, the latency would add up. A single all-reduce for all of them couldn't start before the backward pass is over, so there'd be nothing left to hide it behind. The compromise is called **buckets**. A bucket is a list of parameters, and the first bucket has those of the last layers, whose gradients are ready first. When all of a bucket's gradients are ready, they're copied into one flat tensor, and its all-reduce starts while the backward pass continues.
#
# How do you find out that a gradient is ready? After `param.register_post_accumulate_grad_hook(hook)`, PyTorch calls `hook(param)` whenever `param.grad` is complete. Watch out, the hook gets the *parameter*. Somebody who took it for the gradient needed days to find out why the loss didn't move (pytorch issue 187268).


# %% tags=["setup"]
def cut_into_buckets(parameters, bucket_size):
    """Lists of parameters, last ones first, with at most `bucket_size` elements each (or a single larger parameter)."""
    buckets = [[]]
    for param in reversed(list(parameters)):
        if buckets[-1] and sum(other.numel() for other in [*buckets[-1], param]) > bucket_size:
            buckets.append([])
        buckets[-1].append(param)
    return buckets


# %% [markdown] task="14.1" title="Gradients in buckets" difficulty=3 minutes=15
# The loss on each rank is the *sum* over its tokens. Before `finish`, your code doesn't wait for anything. After `finish`, every `param.grad` contains the gradient of the *mean* loss over the tokens of all ranks.
#
# - Each of the given `self.buckets` needs one all-reduce, which starts as soon as the last of the bucket's gradients is ready. With `async_op=True`, it returns a request right away, and the tensor has its result once you've called `wait()` on that request.
#
# - `finish(tokens)` receives the number of this rank's tokens, which may be 0. Besides the buckets, you may send a single number.
#
# - The next step has to work just as well, and nothing should pile up in memory from step to step.
#
# `torch.cat` makes a new flat tensor, `flat.split(sizes)` takes it apart again, and `part.view_as(param)` gives each part its shape.


# %% exercise="14.1"
class DataParallel:
    """Adds up the gradients of all replicas, bucket by bucket, while the backward pass is still running.

    model:       has the same parameters on every rank of `group`
    bucket_size: elements in a bucket
    """

    def __init__(self, model, bucket_size, group=None):
        self.group = group
        self.buckets = cut_into_buckets(model.parameters(), bucket_size)
        ### BEGIN SOLUTION
        self.arrived = [0] * len(self.buckets)
        self.running = []
        for number, bucket in enumerate(self.buckets):
            for param in bucket:
                param.register_post_accumulate_grad_hook(partial(self.gradient_is_ready, number))
        ### END SOLUTION

    def gradient_is_ready(self, number, param):
        """For the hooks: `param`, which belongs to bucket `number`, has its gradient now."""
        ### BEGIN SOLUTION
        bucket = self.buckets[number]
        self.arrived[number] += 1
        if self.arrived[number] == len(bucket):
            flat = torch.cat([param.grad.flatten() for param in bucket])
            self.running.append((bucket, flat, dist.all_reduce(flat, group=self.group, async_op=True)))
        ### END SOLUTION

    def finish(self, tokens):
        """After the backward pass: wait for every bucket, and turn sums into means over the tokens of all ranks."""
        ### BEGIN SOLUTION
        total = torch.tensor(float(tokens), dtype=torch.float64, device=device())
        dist.all_reduce(total, group=self.group)
        for bucket, flat, work in self.running:
            work.wait()
            parts = flat.split([param.numel() for param in bucket])
            for param, part in zip(bucket, parts, strict=True):
                param.grad.copy_(part.view_as(param) / total.item())
        self.arrived = [0] * len(self.buckets)
        self.running = []
        ### END SOLUTION


# %% [markdown] hints="14.1"
# 1. A hook has to know its bucket, and somebody has to count how many of the bucket's gradients are ready. What does `finish` need from the hooks, and what has to be back to its initial value when the next step begins?
# 2. In the constructor, create one counter per bucket, and register a hook for each parameter. `partial(self.gradient_is_ready, number)` is a function that already knows the bucket's number. In the hook, count. When the last gradient is ready, concatenate the bucket's flattened gradients and start the all-reduce. In `finish`, all-reduce the number of tokens, wait for each bucket, split it, and copy the parts into the gradients. Reset the counters at the end.
# 3. In the hook, after `self.arrived[number] += 1`, check whether that's `len(bucket)`. If so, let `flat = torch.cat([p.grad.flatten() for p in bucket])` and `work = dist.all_reduce(flat, group=self.group, async_op=True)`, and append `(bucket, flat, work)` to `self.running`. In `finish`, call `work.wait()` and let `parts = flat.split([p.numel() for p in bucket])`. Then loop over `zip(bucket, parts)`, and call `p.grad.copy_(part.view_as(p) / total.item())` for each pair. Then set `self.arrived` and `self.running` back.

# %% check="14.1"
check("14.1", DataParallel)

# %% [markdown]
# Now watch your buckets at work in the backward pass of six layers. The upper picture slows the link down to 0.1 GB/s, so that the messages take about as long as the matmuls. How many layers should share a bucket?


# %%
WIDTH, LAYERS = 384, 6
IN_A_LAYER = WIDTH * WIDTH + WIDTH  # elements


def traced_step(in_a_bucket, link):
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(device())
    parallel = DataParallel(model, in_a_bucket * IN_A_LAYER)
    x = torch.randn(1024, WIDTH, device=device())
    with slow_link(bandwidth=0.1e9) if link else nullcontext():
        for _ in range(3):  # the first two steps warm up
            model.zero_grad()
            loss = model(x).square().sum()
            dist.barrier()
            with trace_rank() as trace:
                loss.backward()
                parallel.finish(len(x))
    return trace


# %% tags=["explore"]
def show_buckets(layers):
    runs = {link: list(launch(traced_step, 2, args=(layers, link), backend="gloo")) for link in (True, False)}
    return viz.overlap({"slow link": runs[True], "without it": runs[False]})


viz.explore(show_buckets, layers=(1, 2, 3, 6), start={"layers": 2})

# %% [markdown]
# With a single bucket, nothing is hidden. Smaller buckets hide more, until their latency adds up. The lower picture is the honest one, without the slow link. There, messages and matmuls share your CPU's cores, so even a hidden message slows the matmuls down. A GPU has separate hardware for messages.
#
# ## The optimizer sits in the pause
#
# All replicas take the same step, so all of them store the same optimizer state. With Adam in mixed precision, that's 12 of the 16 bytes per parameter (chapter 00), once per replica! In chapter 12, you stopped an all-reduce halfway and put the norm in the pause. The same trick works here:
#
# | | first half | in the pause | second half |
# |---|---|---|---|
# | chapter 12 | reduce-scatter of $Y$ | norm, on $1/p$ of the tokens | all-gather of $X$ |
# | now | reduce-scatter of the gradients | optimizer, on $1/p$ of the weights | all-gather of ... what? |
#
# Each rank updates only its own shard of the weights, so it only needs the optimizer state for that shard. This is stage 1 of **ZeRO**, the zero redundancy optimizer (Rajbhandari et al. 2020). Stage 2 also frees the gradients outside the rank's own shard. Stage 3 shards the weights as well, and gathers each layer's weights right before they're needed. PyTorch calls that FSDP.
#
# **Predict.** A parameter takes 2 bytes for its weight, 2 for its gradient, and 12 for Adam. With four replicas, how many bytes per parameter does each rank store in each stage?

# %% predict="14.b"
predict("14.b", zero_1=7, zero_2=5.5, zero_3=4)

# %% [markdown] task="14.2" title="A step of ZeRO-1" difficulty=3 minutes=12
# Adam treats every element on its own, so you can cut the model anywhere. `flatten` puts all the tensors into one flat vector and appends zeros until it can be split evenly. Each rank takes `self.length` elements, no matter which layers they belong to.
#
# - In the constructor, set `self.shard` to a parameter with this rank's slice of the flat weights, and set `self.optimizer` to an `optimizer_class([self.shard], **options)`. The shard must not keep the full vector alive.
#
# - Here, the ranks' gradients are terms of one sum, so `step()` adds them up and doesn't average. Afterward, all parameters have their new values on every rank. Write these in place, because others may hold the same tensors.
#
# - Use one `dist.reduce_scatter(output, parts, group=...)`, whose input is a list of `p` parts, and one `dist.all_gather(parts, mine, group=...)`, which fills a list of `p` tensors.


# %% exercise="14.2"
class ZeRO1:
    """An optimizer that keeps 1/p of its state on each of p ranks.

    parameters:      the same on every rank of `group`, and all of one dtype
    optimizer_class: torch.optim.AdamW, for example. `options` are the optimizer's
    """

    def __init__(self, parameters, optimizer_class, group=None, **options):
        self.parameters = list(parameters)
        self.group = group
        p, rank = dist.get_world_size(group), dist.get_rank(group)
        self.length = math.ceil(sum(param.numel() for param in self.parameters) / p)  # of a shard
        ### BEGIN SOLUTION
        flat = self.flatten([param.detach() for param in self.parameters])  # [p · length]
        self.shard = nn.Parameter(flat[rank * self.length : (rank + 1) * self.length].clone())  # [length]
        self.optimizer = optimizer_class([self.shard], **options)
        ### END SOLUTION

    def flatten(self, tensors):
        """One vector [p · length]: the tensors one after the other, followed by zeros."""
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return F.pad(flat, (0, dist.get_world_size(self.group) * self.length - len(flat)))

    def step(self):
        """From the gradients of all ranks to the new weights, on every rank."""
        ### BEGIN SOLUTION
        gradients = self.flatten([param.grad for param in self.parameters])  # [p · length]
        self.shard.grad = torch.empty_like(self.shard)  # [length]
        dist.reduce_scatter(self.shard.grad, list(gradients.split(self.length)), group=self.group)
        self.optimizer.step()
        parts = list(torch.empty_like(gradients).split(self.length))  # p of [length]
        dist.all_gather(parts, self.shard.detach(), group=self.group)
        weights, place = torch.cat(parts), 0  # [p · length]
        for param in self.parameters:
            param.data.copy_(weights[place : place + param.numel()].view_as(param))
            place += param.numel()
        ### END SOLUTION


# %% [markdown] hints="14.2"
# 1. Which elements of the flat vector belong to rank `r`? When the optimizer has updated them, where are the new values, and where are they still missing? Of all the tensors in `step`, which ones are as long as the full vector, and which ones are as long as a shard?
# 2. In the constructor, flatten the weights, take a slice, and clone it, so that the shard has memory of its own. In `step`, flatten the gradients, reduce-scatter them into `self.shard.grad`, and call `self.optimizer.step()`. Then all-gather the shards, concatenate them, and copy one slice after the other into the parameters.
# 3. `self.shard = nn.Parameter(flat[rank * self.length : (rank + 1) * self.length].clone())`. In `step`, let `self.shard.grad = torch.empty_like(self.shard)`, then `dist.reduce_scatter(self.shard.grad, list(gradients.split(self.length)), group=self.group)`. After the optimizer's step, let `parts = [torch.empty_like(self.shard) for _ in range(p)]`, call `dist.all_gather(parts, self.shard.detach(), group=self.group)`, and let `weights = torch.cat(parts)`. For each parameter, `param.data.copy_(weights[place : place + param.numel()].view_as(param))`.

# %% check="14.2"
check("14.2", ZeRO1)


# %% [markdown]
# The second half of the all-reduce carries weights instead of gradients, so ZeRO-1 sends as much as before. Here are all three stages, measured on four ranks with the versions in `tplab.data`:


# %%
def measured(stage):
    from tplab.data import zero, zero3

    layers = [nn.Linear(64, 64, device=device()) for _ in range(4)]
    model, options = nn.Sequential(*layers), {"average": False, "lr": 1e-3}
    if stage == 3:
        parallel = zero3.ZeRO3(model, layers, torch.optim.AdamW, **options)
    else:
        parallel = {1: zero.ZeRO1, 2: zero.ZeRO2}[stage](model.parameters(), torch.optim.AdamW, **options)
    x = torch.randn(8, 64, device=device())
    for _ in range(2):  # the first step creates the optimizer's state
        parallel.zero_grad()
        with record() as section:
            model(x).square().sum().backward()
            memory = parallel.memory()  # when the backward pass is over
            parallel.step()
    elements, sent = 4 * (64 * 64 + 64), section.totals()
    row = {"ZeRO": stage} | {name: f"{size / elements:.2f}" for name, size in memory.items()}
    return row | {kind: f"{sent[kind].bytes / 4 / elements:.2f} Ψ" for kind in ("reduce_scatter", "all_gather")}


viz.table([launch(measured, 4, args=(stage,))[0] for stage in (1, 2, 3)],
          title="bytes per parameter in float32 (4 + 4 + 8 without ZeRO), and elements sent per step")  # fmt: skip

# %% [markdown]
# Here, Ψ is the number of parameters. An all-reduce is a reduce-scatter plus an all-gather, so plain data parallelism would send 2 Ψ, too. Only stage 3 sends more, because it gathers the weights once per pass.
#
# If that doesn't save enough memory, the optimizer can move out altogether. With **offloading**, Adam's state lives in the CPU's memory, and the CPU runs the update. In each step, the gradients go down to the CPU, and the new weights come back up.
#
# **Predict.** A GPU offloads the optimizer for 7.5 billion parameters. Gradients and weights take 2 bytes each, and the link has 64 GB/s in each direction. How many seconds does each direction take per step?

# %% predict="14.c"
predict("14.c", seconds=0.23)

# %% [markdown]
# ## Who sits where?
#
# Now we can use three kinds of parallelism together. The ranks form a **mesh** with three axes: `tp` ranks share every matrix, `pp` stages share the layers, and `dp` replicas share the batch. Each rank has one group per axis. Below are eight ranks in two machines, in a step of a real run. Links inside a machine are fast, but between the machines, there's a wall, which is the network.
#
# ![An animation of eight ranks in two machines with a wall between them. Each machine holds a replica with two stages of two shards. The pairs of tp send many messages inside their machines, the stages send some, and at the end, the replicas add up their gradients through the wall. Then the mesh turns, and the shards of each pair are in different machines, so that tp's messages have to pass through the wall.](pictures/mesh.svg)
#
# <details><summary>All frames, one by one</summary>
#
# ![The same animation as numbered stills](pictures/mesh_frames.svg)
#
# </details>
#
# Ranks are counted machine by machine. If tp is the **innermost** axis, ranks 0 and 1 form a tp group. The next axis advances after every `tp` ranks, and the **outermost** axis advances last. You'll often read that the order has to be tp, pp, dp, because tp sends the most and dp the least. Is that a law?

# %% [markdown] task="14.3" title="Seat the ranks" difficulty=3 minutes=15
# **a)** How many bytes does a rank send along each axis per step? Count only the GPT's layers:
#
# - Each layer has $12 h^2$ weights and runs four all-reduces of `[tokens, h]` in its tp group.
#
# - A stage sends its output `[tokens, h]` to the next stage, and the gradient of its input, which is just as large, to the previous one. (Count both, as for a stage in the middle.)
#
# - Each rank all-reduces the gradients of its own weights in its dp group.
#
# Each element takes 2 bytes, and an all-reduce counts as one message of its tensor's size. An axis with a single rank sends nothing.
#
# **b)** Find the order of the axes, innermost first, for which the fewest bytes pass through walls. If a group sits in $k$ machines, its bytes have to pass through $k - 1$ walls. Add this up over all groups of all axes. There are only six orders.


# %% exercise="14.3"
def bytes_per_axis(config, dp, pp, tp, tokens):
    """Return the bytes that a rank puts into the messages of each axis per step, as {"dp": .., "pp": .., "tp": ..}.

    config: has `num_layers` and `hidden_size`
    tokens: in a batch, which the replicas share evenly
    """
    ### BEGIN SOLUTION
    layers, h, mine = config.num_layers / pp, config.hidden_size, tokens / dp
    return {
        "dp": 2 * 12 * layers * h**2 / tp * (dp > 1),
        "pp": 2 * 2 * mine * h * (pp > 1),
        "tp": 2 * 4 * layers * mine * h * (tp > 1),
    }
    ### END SOLUTION


def best_order(sizes, sent, gpus_per_node):
    """Return the three axes, innermost first, in the order that sends the fewest bytes through walls.

    sizes: ranks along each axis, such as {"dp": 2, "pp": 4, "tp": 8}
    sent:  bytes that a group of each axis sends through each of its walls, as a dictionary like `sizes`
    """
    ### BEGIN SOLUTION
    ranks = math.prod(sizes.values())

    def through_walls(order):
        total, stride = 0, 1  # stride: how far apart neighbors along an axis are
        for axis in order:
            for first in range(ranks):
                if first // stride % sizes[axis] == 0:  # the first rank of a group
                    group = range(first, first + sizes[axis] * stride, stride)
                    machines = {rank // gpus_per_node for rank in group}
                    total += sent[axis] * (len(machines) - 1)
            stride *= sizes[axis]
        return total

    return min(permutations(("tp", "pp", "dp")), key=through_walls)
    ### END SOLUTION


# %% [markdown] hints="14.3"
# 1. For a), which of the three messages depend on the number of tokens, and how many tokens does one replica have? How many layers does a stage have, and which share of their weights does a rank have? For b), let `tp = 2` be innermost, then `pp = 2`, then `dp = 2`. Write down which ranks form the four groups of each axis. How far apart are neighbors in a group?
# 2. For a), a rank has `num_layers / pp` layers and `12 h² / tp` weights of each, and it sees `tokens / dp` tokens. For b), call the distance between neighbors the stride. It's 1 for the innermost axis. For each following axis, it's the product of the sizes of all axes further inside. A rank is the first one of its group if `rank // stride % size == 0`, and the group is `range(first, first + size * stride, stride)`. The machine of a rank is `rank // gpus_per_node`.
# 3. `{"dp": 24 * layers * h**2 / tp * (dp > 1), "pp": 4 * mine * h * (pp > 1), "tp": 8 * layers * mine * h * (tp > 1)}` with `layers = config.num_layers / pp` and `mine = tokens / dp`. In `best_order`, write a function that adds up `sent[axis] * (len({rank // gpus_per_node for rank in group}) - 1)` over all groups of an order, and return `min(permutations(("tp", "pp", "dp")), key=that_function)`.

# %% check="14.3"
check("14.3", bytes_per_axis, best_order)

# %% [markdown]
# Here's how you seat the ranks of four runs. The ranks of a group have the same color and letter, and each frame is a machine.

# %%
RUNS = {  # name: config, sizes, tokens
    "GPT-2": (PRESETS["GPT-2 1.5B"], {"dp": 2, "pp": 4, "tp": 2}, 512 * 1024),
    "Llama 3 8B": (PRESETS["Llama 3 8B"], {"dp": 4, "pp": 2, "tp": 2}, 64 * 1024),
    "Llama 3 8B, small batch": (PRESETS["Llama 3 8B"], {"dp": 2, "pp": 1, "tp": 8}, 2 * 1024),
    "Llama 3 70B, tp = 16": (PRESETS["Llama 3 70B"], {"dp": 2, "pp": 1, "tp": 16}, 8 * 1024),
}


def seated(name):
    config, sizes, tokens = RUNS[name]
    sent = bytes_per_axis(config, **sizes, tokens=tokens)
    return sizes, sent, best_order(sizes, sent, 8)


# %% tags=["explore"]
def show_seats(run):
    sizes, _, order = seated(run)
    ranks = torch.arange(math.prod(sizes.values())).reshape([sizes[axis] for axis in reversed(order)])
    groups = {axis: ranks.movedim(2 - place, -1).flatten(0, 1).tolist() for place, axis in enumerate(order)}
    return viz.mesh(groups, title=f"{run}: {', '.join(order)}, innermost first")


viz.explore(show_seats, run=list(RUNS), start={"run": "Llama 3 8B"})

# %%
rows = []
for name in RUNS:
    sizes, sent, order = seated(name)
    row = {f"{axis}, GB": f"{size / 1e9:.2f}" for axis, size in sent.items()}
    rows.append({"run": name} | row | {"best order": "-".join(axis for axis in order if sizes[axis] > 1)})
viz.table(rows, title="what a rank sends per step")

# %% [markdown]
# In the first run, the popular order wins. In the second one, dp sends 12 times as much as pp, so it gets the better seats. In the third one, dp even overtakes tp, because each replica has so few tokens. And in the last run, a tp group doesn't fit into a single machine anyway, so it's cheaper to give dp the fast links.
#
# **Predict.** Compare the messages of tp and dp. Below how many tokens *per replica* does dp send more than tp, if $h = 8192$ and `tp = 8`?

# %% predict="14.d"
predict("14.d", tokens=3072)

# %% [markdown]
# So it isn't a law. Famous programs even disagree: Llama 3 405B was trained with the order tp, cp, pp, dp, and Megatron-LM's default is tp, cp, ep, dp, pp. (Context and expert parallelism are two more axes.) Now you can say who's right for *your* model. But bytes aren't everything. The messages of dp can hide behind the backward pass, and many of tp's can't hide at all. That's a good reason to give tp the best seats, even if it doesn't send the most.
#
# ## Break it: a group that only its members make
#
# The groups of a mesh come from `dist.new_group`, which has a trap. Ranks 0 and 3 make a group for a tied table, and then everybody makes two tp groups. Why should ranks 1 and 2 care about the first group?


# %%
def made_by_members_only():
    if dist.get_rank() in (0, 3):
        dist.new_group([0, 3])
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    dist.all_reduce(torch.ones(1, device=device()), group=groups[dist.get_rank() // 2])


with show_failure():
    launch(made_by_members_only, 4)

# %% [markdown]
# PyTorch derives a group's name from the number of groups that a rank has made so far, so the ranks look for each other under different names. Without `tplab`, they'd hang in a later line that's perfectly fine. By default, all ranks have to call `new_group` for all groups in the same order. If only the members should call it, pass `use_local_synchronization=True`.
#
# ## Fix it: a norm that depends on tp
#
# Large runs clip the gradient: if the norm of the *full* gradient is too large, all of it gets scaled down. But no rank has the full gradient. In August 2026, somebody noticed that NVIDIA's NeMo RL adds up its norm as below, except for the pipeline (NVIDIA-NeMo/RL pull request 3788, still open when we wrote this):


# %%
CONFIG = GPTConfig(
    num_layers=2, hidden_size=48, num_heads=4, vocab_size=256, seq_length=24, activation="gelu_tanh", dropout=0.0
)


def as_shipped(parameters, tp_group, pp_group, tied=None):
    squares = [param.grad.double().square().sum() for param in parameters if param.grad is not None]
    total = torch.stack(squares).sum()
    dist.all_reduce(total, group=tp_group)
    dist.all_reduce(total, group=pp_group)
    return math.sqrt(total.item())


def batches(steps=10):
    """Ids and targets [8, 24], the same on every rank."""
    return corpus.byte_batches(corpus.python_sources(6000)[3000:], CONFIG.seq_length, 8, steps, seed=1)


def norm_of_a_gpt(norm_function):
    from tplab.gpt import ParallelGPT
    from tplab.tensor import seed_all

    seed_all(0)  # the same full weights for any number of ranks
    model = ParallelGPT(CONFIG, device=device(), dtype=torch.float64)
    ids, targets = next(batches())
    model(ids.to(device()), targets.to(device())).backward()
    alone, _ = dist.new_subgroups(1)  # a pipeline with a single stage
    return f"{norm_function(model.parameters(), None, alone):.6f}"


def norms(norm_function):
    row = {f"tp = {tp}": launch(norm_of_a_gpt, tp, args=(norm_function,))[0] for tp in (1, 2, 4)}
    return viz.table([{"": norm_function.__name__} | row], title="the norm of the same gradient")


norms(as_shipped)

# %% [markdown]
# It's the same gradient in all three runs, but its norm grows with `tp`. So the more ranks you use, the more your gradients get clipped.
#
# **Predict.** On each of four tensor-parallel ranks, the squares of the sharded parameters' gradients add up to 12, and those of the replicated parameters to 4. What's the correct *square* of the norm? What does `as_shipped` get?

# %% predict="14.e"
predict("14.e", right=52, as_shipped=64)

# %% [markdown] task="14.4" title="Fix the norm of the gradient" difficulty=3 minutes=8
# Which ranks should count which parameter?
#
# - If a parameter has the attribute `tensor_parallel`, whatever its value, each rank of `tp_group` has a different shard. All other parameters are replicated there, and they have the same gradient on every rank of the group.
#
# - Each rank of `pp_group` has different layers, except for the tied table (chapter 13). The first and the last stage have the same gradient for it. On both of them, `tied` is this parameter, or this rank's shard of it.
#
# - By now, all replicas have the same gradients.
#
# A parameter may have no gradient, and `parameters` may be a generator. Each all-reduce sends a single number.


# %% exercise="14.4"
def gradient_norm(parameters, tp_group, pp_group, tied=None):
    """Return the norm of the full model's gradient, as a float that's the same on every rank.

    parameters: of this rank. Shards have the attribute `tensor_parallel`
    tied:       the parameter that the first and the last stage share, or None on all other stages
    """
    total = torch.zeros((), dtype=torch.float64, device=device())
    for param in parameters:
        ### BEGIN SOLUTION
        first_copy = param is not tied or dist.get_rank(pp_group) == 0
        mine = hasattr(param, "tensor_parallel") or dist.get_rank(tp_group) == 0
        if param.grad is not None and first_copy and mine:
            total += param.grad.double().square().sum()
        ### BROKEN
        # if param.grad is not None:
        #     total += param.grad.double().square().sum()
        ### END SOLUTION
    dist.all_reduce(total, group=tp_group)
    dist.all_reduce(total, group=pp_group)
    return math.sqrt(total.item())


# %% [markdown] hints="14.4"
# 1. The two all-reduces add up what all the ranks count. So for each kind of parameter, the right ranks have to count it: all ranks of the tp group or only one of them? All stages or only one of them?
# 2. Rank 0 of `tp_group` counts the replicated parameters, and rank 0 of `pp_group` counts the tied one. All the other ranks skip them. How do you find out whether `param` is the tied parameter itself, and not just one with the same shape?
# 3. A rank counts a parameter only if two conditions are true. The first one is `hasattr(param, "tensor_parallel") or dist.get_rank(tp_group) == 0`, and the second one is `param is not tied or dist.get_rank(pp_group) == 0`.

# %% check="14.4"
check("14.4", gradient_norm)

# %%
norms(gradient_norm)

# %% [markdown]
# The same month, AMD fixed a similar bug in its version of Transformer Engine. It had made the norm of a four-layer DeepSeek-V4-Flash 1.52 times too large on eight ranks (ROCm/TransformerEngine pull request 715). And in 2024, torchtitan clipped each pipeline stage by its own norm (issue 596).
#
# ## Eight processes, one curve
#
# Eight processes train a GPT: two replicas of two stages, with each layer split over two ranks. Next to them, a single process trains the same GPT.

# %%
LIMIT, LR = 0.5, 1e-2


def train_in_3d():
    from tplab.cluster import Training3D
    from tplab.data import Grid

    torch.set_num_threads(1)
    options = {"micro_batches": 2, "micro_batch_size": 2, "max_norm": LIMIT, "dtype": torch.float64, "lr": LR}
    training = Training3D(CONFIG, Grid(dp=2, pp=2, tp=2), torch.optim.AdamW, **options)
    seen = {"loss": [], "norm": []}
    groups = {axis: training.mesh.get_group(axis) for axis in ("dp", "pp", "tp")}
    for ids, targets in batches():
        with record() as section:
            seen["loss"].append(training.step(ids, targets))
        seen["norm"].append(training.norm.item())
    clipped = gradient_norm(training.stage.parameters(), groups["tp"], groups["pp"], training.stage.tied)
    members = {axis: dist.get_process_group_ranks(group) for axis, group in groups.items()}
    return seen | {"clipped": clipped, "sent": list(section), "groups": members}


def train_alone():
    from tplab.gpt import ParallelGPT
    from tplab.tensor import seed_all

    seed_all(0)
    model = ParallelGPT(CONFIG, device=device(), dtype=torch.float64)
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=LR), {"loss": [], "norm": []}
    for ids, targets in batches():
        optimizer.zero_grad()
        loss = model(ids.to(device()), targets.to(device()))
        loss.backward()
        seen["norm"].append(nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item())
        optimizer.step()
        seen["loss"].append(loss.item())
    return seen


run, alone = launch(train_in_3d, 8, timeout=300), launch(train_alone, 1)[0]
print(f"last loss {run[0]['loss'][-1]:.9f} and {alone['loss'][-1]:.9f}, "
      f"norm {run[0]['norm'][-1]:.9f} and {alone['norm'][-1]:.9f}")  # fmt: skip
print(
    f"after clipping to {LIMIT}, your function says on ranks 0 and 7: {run[0]['clipped']:.6f}, {run[7]['clipped']:.6f}"
)
viz.curves({"one process": alone["loss"], "8 processes, dp = pp = tp = 2": run[0]["loss"]}, title="loss on real text")

# %% [markdown]
# There's only one curve. And your `gradient_norm` confirms that the gradient has been clipped correctly.
#
# ## Break it: turn the mesh
#
# Suppose these eight processes sit in two machines with four GPUs each. Only the outermost axis has to pass through the wall, so it should be the one that sends the least. Each replica has 96 tokens, $h = 48$, and each stage has a single layer.
#
# **Predict.** Which axis should be the outermost one in this run? ("tp", "pp", or "dp")

# %% predict="14.f"
predict("14.f", outermost="pp")


# %%
def through_the_wall(axis):
    """Bytes of one step in all groups of this axis, each message counted once."""
    return sum(
        call.bytes
        for rank, seen in enumerate(run)
        for call in seen["sent"]
        if sorted(call.group) == seen["groups"][axis]
        and (call.kind == "send" or (call.kind != "recv" and rank == min(call.group)))
    )


wall = {axis: through_the_wall(axis) for axis in ("tp", "pp", "dp")}
order = best_order(dict.fromkeys(wall, 2), {axis: size / 4 for axis, size in wall.items()}, 4)  # each axis has 4 groups
viz.table([{"outermost": axis, "bytes through the wall per step": f"{size:,}"} for axis, size in wall.items()],
          title=f"your order: {', '.join(order)}, innermost first")  # fmt: skip

# %% [markdown]
# In the run, dp was outermost, but pp would have been better. The losses don't depend on the order at all, so you can only find such a mistake by looking at the traffic.

# %%
symptoms(14)

# %% [markdown]
# ## In the wild
#
# <details><summary>Going deeper: means of means, DDP, FSDP, and Megatron's distributed optimizer</summary>
#
# - **torchtune** averaged means, too. The pull request that fixed it is dedicated to "the day the ML community first discovered the fact that (x1 / n1) + (x2 / n2) != (x1 + x2) / (n1 + n2)" (1875, October 2024).
#
# - **PyTorch's `DistributedDataParallel`** is your 14.1. It has buckets of 25 MiB (`bucket_cap_mb=25`), with a smaller first one that can start sooner, in roughly the reverse order of the parameters. It averages over *ranks*, so if your ranks have different numbers of tokens, you have to scale the loss yourself.
#
# - **ZeRO in PyTorch.** `ZeroRedundancyOptimizer` is stage 1, and `fully_shard` (FSDP2) is stage 3. You call `fully_shard` on each layer and then on the model. With `reshard_after_forward=False`, the gathered weights stay until the backward pass, which saves the second all-gather, but takes more memory.
#
# - **Megatron-Core's `DistributedOptimizer`** cuts flat buffers without regard to the borders between parameters, just like your 14.2. The norm is `get_grad_norm_fp32`, and the functions `param_is_not_tensor_parallel_duplicate` and `param_is_not_shared` decide which rank counts what.
#
# - **`init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))`** makes a mesh with all its groups. The last axis is the innermost one.
#
# </details>
#
# ## Your library so far
#
# Your library now has replicas with buckets, ZeRO-1, and a function that seats the ranks.

# %%
from tplab.course import library

library(14)

# %% [markdown]
# Eight processes, one loss curve. It's day five of seven, and somebody trips over a power cord. What's left of your training run?
