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
# In a large training run, many copies of the same model train in parallel. In this chapter, you'll make several copies learn as one. Then you'll stop storing the same optimizer state in every copy, which is the first step toward FSDP. After that, you'll combine three kinds of parallelism on eight processes and decide which rank runs on which machine. If you make a bad choice, all the numbers are still correct, but each step takes longer, and no test will tell you why.
#
# You need chapters 10, 12, and 13. About 90 minutes.

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
# In **data parallelism**, every rank holds a full copy of the model, called a **replica**, and gets its own part of the batch. The forward and backward passes don't need any communication. Afterward, an all-reduce sums the gradients across ranks, so all replicas take the same optimizer step and stay identical.
#
# Let's try this with a model that has a single weight $w$. The loss of a token $x$ is $w \cdot x$, so its gradient with respect to $w$ is simply $x$. Rank 0 has three tokens, and rank 1 has only one.


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
# A single process with all four tokens would compute the same gradient, 14. For the gradient of the *mean* loss, you'd divide this sum by 4, the number of tokens. But what if each rank first divides its sum by its own number of tokens, and then you average the two results?
#
# **Predict.** Suppose rank 0 has 30 tokens with a mean loss of 2, and rank 1 has 10 tokens with a mean loss of 4. What's the mean loss over all the tokens? What's the average of the two means?

# %% predict="14.a"
predict("14.a", mean_over_tokens=2.5, mean_of_means=3)

# %% [markdown]
# If you average the ranks' means, a token on a rank with few tokens counts more than a token on a rank with many tokens. So you have to sum over all tokens first and divide at the end.
#
# ## Gradients that leave early
#
# When should the ranks all-reduce their gradients? If each gradient had its own all-reduce, the latencies would add up. If all gradients shared a single all-reduce, it couldn't start before the end of the backward pass, so there'd be no computation left to hide it behind.
#
# The usual compromise is one all-reduce per **bucket** of parameters. The first bucket contains the parameters of the last layers, because the backward pass computes their gradients first. As soon as all the gradients in a bucket are ready, they're copied into one flat tensor, and the all-reduce of this tensor starts while the backward pass continues.
#
# How do you find out that a gradient is ready? If you call `param.register_post_accumulate_grad_hook(hook)`, PyTorch calls `hook(param)` each time `param.grad` is complete. Note that PyTorch passes the *parameter* to the hook, not its gradient.


# %% tags=["setup"]
def cut_into_buckets(parameters, bucket_size):
    """Return lists of parameters, starting with the last parameter.

    Each list has at most `bucket_size` elements, unless it consists of a single
    parameter that's larger than that.
    """
    buckets = [[]]
    for param in reversed(list(parameters)):
        size = sum(other.numel() for other in [*buckets[-1], param])
        if buckets[-1] and size > bucket_size:
            buckets.append([])
        buckets[-1].append(param)
    return buckets


# %% [markdown] task="14.1" title="Gradients in buckets" difficulty=3 minutes=20
# On each rank, the loss is the *sum* over the rank's own tokens. After `finish`, every `param.grad` should contain the gradient of the *mean* loss over the tokens of all ranks. Until `finish` is called, your code shouldn't wait for anything.
#
# - Run one all-reduce for each of the given `self.buckets`, and start it as soon as the last gradient in the bucket is ready. With `async_op=True`, `dist.all_reduce` immediately returns a request, and the tensor doesn't contain the result until you've called `wait()` on that request.
#
# - `finish(tokens)` receives the number of tokens on this rank, which may be 0. Apart from the buckets, you may send only a single number.
#
# - The next step has to work just as well, and memory use shouldn't grow from step to step.


# %% exercise="14.1"
class DataParallel:
    """Adds up the gradients of all replicas, bucket by bucket.

    It does so while the backward pass is still running.

    model:       has the same parameters on every rank of `group`
    bucket_size: the maximum number of elements in a bucket
    """

    def __init__(self, model, bucket_size, group=None):
        self.group = group
        self.buckets = cut_into_buckets(model.parameters(), bucket_size)
        ### BEGIN SOLUTION
        self.arrived = [0] * len(self.buckets)
        self.running = []
        for number, bucket in enumerate(self.buckets):
            hook = partial(self.gradient_is_ready, number)
            for param in bucket:
                param.register_post_accumulate_grad_hook(hook)
        ### END SOLUTION

    def gradient_is_ready(self, number, param):
        """Called by the hooks when the gradient of `param` is ready.

        `param` belongs to bucket `number`.
        """
        ### BEGIN SOLUTION
        bucket = self.buckets[number]
        self.arrived[number] += 1
        if self.arrived[number] == len(bucket):
            flat = torch.cat([param.grad.flatten() for param in bucket])
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            self.running.append((bucket, flat, work))
        ### END SOLUTION

    def finish(self, tokens):
        """Wait for every bucket after the backward pass.

        Turn the sums into means over the tokens of all ranks.
        """
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
# 1. A hook has to know which bucket its parameter belongs to. Where can you count how many of the bucket's gradients are ready? What does `finish` need to know about the all-reduces that the hooks have started? What do you have to reset before the next step begins?
# 2. In the constructor, create one counter per bucket, and register a hook for each parameter. `partial(self.gradient_is_ready, number)` is a function that already knows the bucket's number. Each time the hook is called, increase the bucket's counter. When the last gradient is ready, concatenate the bucket's flattened gradients, and start the all-reduce. In `finish`, all-reduce the number of tokens. Then wait for each bucket's all-reduce, split the flat tensor, and copy the parts into the gradients. Reset the counters at the end.
# 3. In the hook, add 1 to `self.arrived[number]`, and check whether it's equal to `len(bucket)`. If it is, compute `flat = torch.cat([p.grad.flatten() for p in bucket])`, start `work = dist.all_reduce(flat, group=self.group, async_op=True)`, and append `(bucket, flat, work)` to `self.running`. In `finish`, all-reduce `total`, the number of tokens. For each bucket, call `work.wait()`, and compute `parts = flat.split([p.numel() for p in bucket])`. Then loop over `zip(bucket, parts)`, and call `p.grad.copy_(part.view_as(p) / total.item())` for each pair. Finally, set all the counters in `self.arrived` back to 0, and empty `self.running`.

# %% check="14.1"
check("14.1", DataParallel)

# %% [markdown]
# Let's watch your buckets during the backward pass of six layers. In the upper picture, we've slowed the link down to 0.1 GB/s, so the messages take about as long as the matmuls. How many layers should share a bucket?


# %%
WIDTH, LAYERS = 384, 6
IN_A_LAYER = WIDTH * WIDTH + WIDTH  # elements


def traced_step(in_a_bucket, link):
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model = model.to(device())
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
    def run(link):
        return list(launch(traced_step, 2, args=(layers, link), backend="gloo"))

    return viz.overlap({"slow link": run(True), "without it": run(False)})


viz.explore(show_buckets, layers=(1, 2, 3, 6), start={"layers": 2})

# %% [markdown]
# If all six layers share a bucket, none of the communication is hidden. The smaller the buckets, the more of it is hidden. On a real link, buckets shouldn't be too small, because the latencies of all those messages add up. (You can't see this in the upper picture, because our slow link has a low bandwidth but no latency.) In the lower picture, the link isn't slowed down. Here, messages and matmuls compete for your CPU's cores, so even a hidden message slows the matmuls down. On a GPU, they compete much less, because the links transfer the data (chapter 11).
#
# ## The optimizer works in the pause
#
# All replicas take the same step, so all of them store the same optimizer state. With Adam in mixed precision, that's 12 of the 16 bytes per parameter (chapter 00) on every single replica!
#
# In chapter 12, you paused an all-reduce between its two halves and applied the norm there. The same trick works here:
#
# | | first half | in the pause | second half |
# |---|---|---|---|
# | chapter 12 | reduce-scatter of $Y$ | norm, on $1/p$ of the tokens | all-gather of $X$ |
# | now | reduce-scatter of the gradients | optimizer, on $1/p$ of the weights | all-gather of ... what? |
#
# Each rank updates only its own shard of the weights, so it only needs the optimizer state for that shard. This is stage 1 of **ZeRO**, the zero redundancy optimizer (Rajbhandari et al. 2020). In stage 2, each rank also frees the gradients outside its own shard. In stage 3, which PyTorch calls FSDP, the weights are sharded as well, and each layer's weights are gathered right before they're needed.
#
# **Predict.** Each parameter takes 2 bytes for its weight, 2 bytes for its gradient, and 12 bytes for Adam's state. If there are four replicas, how many bytes per parameter does each rank store in each of the three stages?

# %% predict="14.b"
predict("14.b", zero_1=7, zero_2=5.5, zero_3=4)

# %% [markdown] task="14.2" title="A step of ZeRO-1" difficulty=3 minutes=16
# Adam updates each element independently, so you can split the model anywhere. The given method `flatten` joins all the tensors into one flat vector and appends zeros until the vector can be split evenly. Each rank gets a shard of `self.length` elements, which may come from several layers.
#
# - In the constructor, set `self.shard` to this rank's slice of the flat weights, as a tensor or an `nn.Parameter`, and set `self.optimizer` to `optimizer_class([self.shard], **options)`. The full vector must not stay in memory.
#
# - `step()` should sum the ranks' gradients rather than average them, because they're already the terms of a single sum. After `step()`, all parameters should have their new values on every rank. Write these values in place, because other objects may use the same tensors.
#
# - Call `dist.reduce_scatter(output, parts, group=...)` once, with a list of `p` tensors as its input. Also call `dist.all_gather(parts, mine, group=...)` once, to fill a list of `p` tensors.


# %% exercise="14.2"
class ZeRO1:
    """An optimizer that stores 1/p of its state on each of p ranks.

    parameters:      the same on every rank of `group`, and all of the same dtype
    optimizer_class: for example torch.optim.AdamW, which is called with `options`
    """

    def __init__(self, parameters, optimizer_class, group=None, **options):
        self.parameters = list(parameters)
        self.group = group
        p, rank = dist.get_world_size(group), dist.get_rank(group)
        total = sum(param.numel() for param in self.parameters)
        self.length = math.ceil(total / p)  # of a shard
        ### BEGIN SOLUTION
        # [p · length]
        flat = self.flatten([param.detach() for param in self.parameters])
        mine = flat[rank * self.length : (rank + 1) * self.length]  # [length]
        self.shard = nn.Parameter(mine.clone())
        self.optimizer = optimizer_class([self.shard], **options)
        ### END SOLUTION

    def flatten(self, tensors):
        """Return one vector [p · length] that contains all the tensors.

        They come one after the other, followed by zeros.
        """
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        zeros = dist.get_world_size(self.group) * self.length - len(flat)
        return F.pad(flat, (0, zeros))

    def step(self):
        """Update the weights on every rank, using the gradients of all ranks."""
        ### BEGIN SOLUTION
        # [p · length]
        gradients = self.flatten([param.grad for param in self.parameters])
        self.shard.grad = torch.empty_like(self.shard)  # [length]
        terms = list(gradients.split(self.length))  # p of [length]
        dist.reduce_scatter(self.shard.grad, terms, group=self.group)
        self.optimizer.step()
        parts = list(torch.empty_like(gradients).split(self.length))  # p of [length]
        dist.all_gather(parts, self.shard.detach(), group=self.group)
        weights, place = torch.cat(parts), 0  # [p · length]
        for param in self.parameters:
            param.data.copy_(weights[place : place + param.numel()].view_as(param))
            place += param.numel()
        ### END SOLUTION


# %% [markdown] hints="14.2"
# 1. Which elements of the flat vector belong to rank `r`? After this rank's optimizer has updated them, which ranks still have the old values? Which of the tensors in `step` are as long as the full vector, and which ones are as long as a shard?
# 2. In the constructor, flatten the weights, take this rank's slice, and clone the slice so that the shard has its own memory. In `step`, flatten the gradients, reduce-scatter them into `self.shard.grad`, and call `self.optimizer.step()`. Then all-gather the shards, concatenate them, and copy the right slice into each parameter.
# 3. In the constructor, create the shard with `nn.Parameter(flat[rank * self.length : (rank + 1) * self.length].clone())`. In `step`, create `self.shard.grad = torch.empty_like(self.shard)`, and fill it with `dist.reduce_scatter(self.shard.grad, list(gradients.split(self.length)), group=self.group)`. After the optimizer's step, create `parts = [torch.empty_like(self.shard) for _ in range(p)]`, call `dist.all_gather(parts, self.shard.detach(), group=self.group)`, and concatenate the parts with `weights = torch.cat(parts)`. For each parameter, call `param.data.copy_(weights[place : place + param.numel()].view_as(param))`, and then move `place` forward by `param.numel()`.

# %% check="14.2"
check("14.2", ZeRO1)


# %% [markdown]
# In ZeRO-1, the second half of the all-reduce sends the new weights instead of the gradients, so the traffic is the same as before. Let's measure all three stages on four ranks, with the implementations in `tplab.data`:


# %%
def measured(stage):
    from tplab.data import zero, zero3

    layers = [nn.Linear(64, 64, device=device()) for _ in range(4)]
    model, options = nn.Sequential(*layers), {"average": False, "lr": 1e-3}
    if stage == 3:
        parallel = zero3.ZeRO3(model, layers, torch.optim.AdamW, **options)
    else:
        optimizer = {1: zero.ZeRO1, 2: zero.ZeRO2}[stage]
        parallel = optimizer(model.parameters(), torch.optim.AdamW, **options)
    x = torch.randn(8, 64, device=device())
    for _ in range(2):  # the first step creates the optimizer's state
        parallel.zero_grad()
        with record() as section:
            model(x).square().sum().backward()
            memory = parallel.memory()  # when the backward pass is over
            parallel.step()
    elements, sent = 4 * (64 * 64 + 64), section.totals()
    row = {"ZeRO": stage}
    row |= {name: f"{size / elements:.2f}" for name, size in memory.items()}
    for kind in ("reduce_scatter", "all_gather"):
        row[kind] = f"{sent[kind].bytes / 4 / elements:.2f} Ψ"
    return row


viz.table([launch(measured, 4, args=(stage,))[0] for stage in (1, 2, 3)],
          title="bytes per parameter in float32 (4 + 4 + 8 without ZeRO), "
                "and elements sent per step")  # fmt: skip

# %% [markdown]
# In this table, Ψ is the number of parameters. Stages 1 and 2 send 2 Ψ elements in total, and so does plain data parallelism, because an all-reduce is a reduce-scatter plus an all-gather. Only stage 3 sends more, because it gathers the weights twice, once in the forward pass and once in the backward pass.
#
# If you still run out of memory, you can move the optimizer to the CPU, which is called **offloading**. In each step, the GPU sends the gradients to the CPU, which computes the update and sends the new weights back.
#
# **Predict.** Suppose a GPU offloads the optimizer for 7.5 billion parameters. Gradients and weights take 2 bytes each, and the link transfers 64 GB/s in each direction. How many seconds per step does the transfer take in each direction?

# %% predict="14.c"
predict("14.c", seconds=0.23)

# %% [markdown]
# ## Who sits where?
#
# Now we can combine three kinds of parallelism. We arrange the ranks in a **mesh** with three axes. Ranks along the tp axis split every matrix, stages along the pp axis split the layers, and replicas along the dp axis split the batch. Each rank belongs to three groups, one per axis.
#
# The animation shows one step of a real run on two machines. The wall between them stands for the network, which is slower than the links inside a machine. (At the end, we turn the mesh, so some of the ranks move to other places. They keep their old numbers so that you can see where they go.)
#
# ![An animation of eight ranks on two machines with a wall between them. Each machine holds one replica, which consists of two stages with two shards each. The tp groups send many messages inside their machines, and the stages send a few. At the end of the step, the replicas all-reduce their gradients through the wall. Then tp becomes the outermost axis. Now the two shards of each tp group are on different machines, so they have to send all their messages through the wall.](pictures/mesh.svg)
#
# <details><summary>All frames, one by one</summary>
#
# ![The same animation as numbered stills](pictures/mesh_frames.svg)
#
# </details>
#
# The first machine gets the ranks with the lowest numbers, the second machine gets the next ones, and so on. If tp is the **innermost** axis, each tp group consists of consecutive ranks, such as ranks 0 and 1. Along the **outermost** axis, the ranks of a group are farthest apart. You'll often read that the order has to be tp, pp, dp, because tp sends the most bytes and dp the fewest. Is that a law?

# %% [markdown] task="14.3" title="Seat the ranks" difficulty=3 minutes=18
# **a)** How many bytes does a rank send along each axis per step? Count only the messages of the GPT's layers:
#
# - Each layer has $12 h^2$ weights and runs four all-reduces of `[tokens, h]` in its tp group.
#
# - A stage sends its output `[tokens, h]` to the next stage. It also sends the gradient of its input to the previous stage, and this gradient has the same size. (Count both messages, as for a stage in the middle of the pipeline.)
#
# - Each rank all-reduces the gradients of its own weights in its dp group.
#
# Each element takes 2 bytes, and an all-reduce counts as a single message that's as large as the tensor. An axis with a single rank sends nothing.
#
# **b)** Which order of the axes sends the fewest bytes through the walls between the machines? Return this order, with the innermost axis first. If a group is spread over $k$ machines, its bytes have to pass through $k - 1$ walls. Add up these bytes over all the groups of all three axes, and compare the six possible orders.


# %% exercise="14.3"
def bytes_per_axis(config, dp, pp, tp, tokens):
    """Return the number of bytes that a rank sends along each axis per step.

    They're the values of a dictionary, {"dp": .., "pp": .., "tp": ..}.

    config: has `num_layers` and `hidden_size`
    tokens: the number of tokens in a batch, which the replicas share evenly
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
    """Return the three axes, innermost first, in the best order.

    It's the order that sends the fewest bytes through walls.

    sizes: the number of ranks along each axis, such as {"dp": 2, "pp": 4, "tp": 8}
    sent:  the number of bytes that a group of each axis sends through each of its
           walls, as a dictionary like `sizes`
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
# 1. For a), which of the three kinds of messages depend on the number of tokens? How many of the batch's tokens does one replica process? How many layers does a stage have, and what fraction of each layer's weights does a rank hold? For b), suppose there are two ranks along each axis, and the order is `tp`, `pp`, `dp`. Write down the four groups of each axis. How far apart are the two ranks of a group?
# 2. For a), a rank has `num_layers / pp` layers, holds `12 h² / tp` weights of each layer, and processes `tokens / dp` tokens. For b), let's call the distance between neighboring ranks of a group the stride. It's 1 for the innermost axis. For any other axis, it's the product of the sizes of all the axes further inside. A rank is the first one of its group if `rank // stride % size == 0`, and that group is `range(first, first + size * stride, stride)`. Each rank is on machine number `rank // gpus_per_node`.
# 3. For a), return `{"dp": 24 * layers * h**2 / tp * (dp > 1), "pp": 4 * mine * h * (pp > 1), "tp": 8 * layers * mine * h * (tp > 1)}` with `layers = config.num_layers / pp` and `mine = tokens / dp`. For b), write a function that takes an order and adds up `sent[axis] * (len({rank // gpus_per_node for rank in group}) - 1)` over all the groups of all three axes. Then return `min(permutations(("tp", "pp", "dp")), key=that_function)`.

# %% check="14.3"
check("14.3", bytes_per_axis, best_order)

# %% [markdown]
# Let's see how your function seats the ranks of four training runs. Each dashed box is a machine. Along each axis, ranks with the same letter form a group. The groups of the rank you select are shown in color.

# %%
LLAMA_8B, LLAMA_70B = PRESETS["Llama 3 8B"], PRESETS["Llama 3 70B"]
RUNS = {  # name: config, sizes, tokens
    "GPT-2": (PRESETS["GPT-2 1.5B"], {"dp": 2, "pp": 4, "tp": 2}, 512 * 1024),
    "Llama 3 8B": (LLAMA_8B, {"dp": 4, "pp": 2, "tp": 2}, 64 * 1024),
    "Llama 3 8B, small batch": (LLAMA_8B, {"dp": 2, "pp": 1, "tp": 8}, 2 * 1024),
    "Llama 3 70B, tp = 16": (LLAMA_70B, {"dp": 2, "pp": 1, "tp": 16}, 8 * 1024),
}


def seated(name):
    config, sizes, tokens = RUNS[name]
    sent = bytes_per_axis(config, **sizes, tokens=tokens)
    return sizes, sent, best_order(sizes, sent, 8)


# %% tags=["explore"]
def show_seats(run, rank):
    sizes, _, order = seated(run)
    shape = [sizes[axis] for axis in reversed(order)]
    ranks = torch.arange(math.prod(shape)).reshape(shape)
    groups = {
        axis: ranks.movedim(2 - place, -1).flatten(0, 1).tolist()
        for place, axis in enumerate(order)
    }
    title = f"{run}: {', '.join(order)}, innermost first"
    return viz.mesh(groups, rank=rank, title=title)


start = {"run": "Llama 3 8B", "rank": 5}
viz.explore(show_seats, run=list(RUNS), rank=range(16), start=start)

# %%
rows = []
for name in RUNS:
    sizes, sent, order = seated(name)
    row = {f"{axis}, GB": f"{size / 1e9:.2f}" for axis, size in sent.items()}
    row["best order"] = "-".join(axis for axis in order if sizes[axis] > 1)
    rows.append({"run": name} | row)
viz.table(rows, title="what a rank sends per step")

# %% [markdown]
# For GPT-2, the popular order sends the fewest bytes between machines. In the first run of Llama 3 8B, dp sends 12 times as many bytes as pp, so dp should get the faster links. With a small batch, each replica processes so few tokens that dp sends even more than tp. In the last run, a tp group doesn't fit on a single machine anyway, so it's cheaper to give the fast links to dp.
#
# **Predict.** If $h = 8192$ and there are 8 tensor-parallel ranks, below how many tokens *per replica* does dp send more than tp?

# %% predict="14.d"
predict("14.d", tokens=3072)

# %% [markdown]
# So the popular order isn't always the best one. But bytes aren't everything. It often pays to give tp the fastest links, because many of its messages can't be hidden, while the backward pass can hide dp's messages.
#
# ## Break it: a group that only its members make
#
# In PyTorch, you create the groups of a mesh with `dist.new_group`, but there's a catch. Suppose ranks 0 and 3 create a group for a tied table, and then all four ranks create two tp groups. Ranks 1 and 2 don't belong to the first group, so why should they care about it?


# %%
def made_by_members_only():
    if dist.get_rank() in (0, 3):
        dist.new_group([0, 3])
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    dist.all_reduce(torch.ones(1, device=device()), group=groups[dist.get_rank() // 2])


with show_failure():
    launch(made_by_members_only, 4)

# %% [markdown]
# Ranks 0 and 3 have created one more group than ranks 1 and 2, and PyTorch derives a group's name from the number of groups that a rank has already created. So the two members of a tp group look for each other under different names. Without `tplab`, they'd hang later, in a line that has nothing wrong with it. By default, all ranks have to call `new_group` for every group, in the same order.
#
# ## Fix it: a norm that depends on tp
#
# Large training runs clip the gradient. If the norm of the *full* gradient is too large, the whole gradient is scaled down. But no rank has the full gradient, so the ranks have to compute its norm together. In August 2026, somebody found a bug in the way NVIDIA's NeMo RL computes this norm. The function below works like NeMo RL's code but adds an all-reduce over the pipeline stages (NVIDIA-NeMo/RL pull request 3788, still open when we wrote this).


# %%
CONFIG = GPTConfig(num_layers=2, hidden_size=48, num_heads=4, vocab_size=256,
                   seq_length=24, activation="gelu_tanh", dropout=0.0)  # fmt: skip


def as_shipped(parameters, tp_group, pp_group, tied=None):
    gradients = [param.grad for param in parameters if param.grad is not None]
    total = torch.stack([grad.double().square().sum() for grad in gradients]).sum()
    dist.all_reduce(total, group=tp_group)
    dist.all_reduce(total, group=pp_group)
    return math.sqrt(total.item())


def batches(steps=10):
    """Return ids and targets [8, 24], the same on every rank."""
    text = corpus.python_sources(6000)[3000:]
    return corpus.byte_batches(text, CONFIG.seq_length, 8, steps, seed=1)


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
    row = {"": norm_function.__name__}
    for tp in (1, 2, 4):
        row[f"tp = {tp}"] = launch(norm_of_a_gpt, tp, args=(norm_function,))[0]
    return viz.table([row], title="the norm of the same gradient")


norms(as_shipped)

# %% [markdown]
# The gradient is the same in all three runs, but the computed norm grows with `tp`. So the more tensor-parallel ranks you use, the more the gradient gets clipped.
#
# **Predict.** Suppose there are four tensor-parallel ranks. On each of them, the squared gradients of the sharded parameters add up to 12, and the squared gradients of the replicated parameters add up to 4. What's the correct *square* of the norm? What does `as_shipped` compute instead?

# %% predict="14.e"
predict("14.e", right=52, as_shipped=64)

# %% [markdown] task="14.4" title="Fix the norm of the gradient" difficulty=3 minutes=8
# For each parameter, which ranks should count its gradient?
#
# - If a parameter has the attribute `tensor_parallel`, each rank of `tp_group` holds a different shard of the parameter. All other parameters are replicated, and their gradients are the same on every rank of `tp_group`.
#
# - Each rank of `pp_group` holds different layers. The only exception is the tied table (chapter 13): the first and the last stage both have a copy of it, with the same gradient. On these two stages, `tied` is this parameter, or this rank's shard of it.
#
# - All replicas already have the same gradients.
#
# A parameter may have no gradient, and `parameters` may be a generator. Each all-reduce sends a single number.


# %% exercise="14.4"
def gradient_norm(parameters, tp_group, pp_group, tied=None):
    """Return the norm of the full model's gradient, as a float.

    It's the same on every rank.

    parameters: this rank's parameters; the shards have the attribute `tensor_parallel`
    tied:       the parameter that the first and the last stage share, or None on all
                other stages
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
# 1. After the two all-reduces, `total` is the sum of the squares that all the ranks have counted. Each gradient of the full model should be counted exactly once. For each kind of parameter, should all the ranks of the tp group count it, or only one of them? Should all the pipeline stages count it, or only one of them?
# 2. Have rank 0 of `tp_group` count the replicated parameters, and have rank 0 of `pp_group` count the tied table. All the other ranks skip these parameters. How do you find out whether `param` is the tied table itself, and not just another parameter with the same shape?
# 3. A rank should count a parameter only if two conditions are true. The first condition is `hasattr(param, "tensor_parallel") or dist.get_rank(tp_group) == 0`, and the second condition is `param is not tied or dist.get_rank(pp_group) == 0`.

# %% check="14.4"
check("14.4", gradient_norm)

# %%
norms(gradient_norm)

# %% [markdown]
# ## Eight processes, one curve
#
# Now let's put everything together. Eight processes train two replicas of a GPT. Each replica has two pipeline stages, and each stage is split across two ranks. For comparison, a single process trains the same GPT.

# %%
LIMIT, LR = 0.5, 1e-2


def train_in_3d():
    from tplab.cluster import Training3D
    from tplab.data import Grid

    torch.set_num_threads(1)
    options = {"micro_batches": 2, "micro_batch_size": 2, "max_norm": LIMIT,
               "dtype": torch.float64, "lr": LR}  # fmt: skip
    training = Training3D(CONFIG, Grid(dp=2, pp=2, tp=2), torch.optim.AdamW, **options)
    seen = {"loss": [], "norm": []}
    groups = {axis: training.mesh.get_group(axis) for axis in ("dp", "pp", "tp")}
    for ids, targets in batches():
        with record() as section:
            seen["loss"].append(training.step(ids, targets))
        seen["norm"].append(training.norm.item())
    stage = training.stage
    clipped = gradient_norm(stage.parameters(), groups["tp"], groups["pp"], stage.tied)
    members = {axis: dist.get_process_group_ranks(groups[axis]) for axis in groups}
    return seen | {"clipped": clipped, "sent": list(section), "groups": members}


def train_alone():
    from tplab.gpt import ParallelGPT
    from tplab.tensor import seed_all

    seed_all(0)
    model = ParallelGPT(CONFIG, device=device(), dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    seen = {"loss": [], "norm": []}
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
    f"your norm after clipping to {LIMIT}: "
    f"{run[0]['clipped']:.6f} on rank 0, {run[7]['clipped']:.6f} on rank 7"
)
losses = {"single process": alone["loss"]}
losses["8 processes, dp = pp = tp = 2"] = run[0]["loss"]
viz.curves(losses, title="loss on real text")

# %% [markdown]
# All the losses agree except for rounding, as the lower chart shows. Your `gradient_norm` also confirms that the gradient has been clipped correctly.
#
# ## Break it: change the order of the axes
#
# Suppose these eight processes run on two machines with four GPUs each. Then only the groups of the outermost axis have to send their bytes through the wall, so the axis that sends the fewest bytes should be the outermost one. Each replica has 96 tokens, $h = 48$, and each stage has a single layer.
#
# **Predict.** Which axis should be the outermost one in this run? (Write "tp", "pp", or "dp".)

# %% predict="14.f"
predict("14.f", outermost="pp")


# %%
def through_the_wall(axis):
    """Return the bytes that all groups of this axis send in one step.

    Each message counts once.
    """
    return sum(
        call.bytes
        for rank, seen in enumerate(run)
        for call in seen["sent"]
        if sorted(call.group) == seen["groups"][axis]
        and (call.kind == "send" or (call.kind != "recv" and rank == min(call.group)))
    )


wall = {axis: through_the_wall(axis) for axis in ("tp", "pp", "dp")}
sent = {axis: size / 4 for axis, size in wall.items()}  # each axis has 4 groups
order = best_order(dict.fromkeys(wall, 2), sent, 4)
viz.table([{"outermost": axis, "bytes through the wall per step": f"{size:,}"}
           for axis, size in wall.items()],
          title=f"your order: {', '.join(order)}, innermost first")  # fmt: skip

# %% [markdown]
# In our run, dp was the outermost axis, but pp would have been better. The losses don't depend on the order, so you can only find such a mistake by looking at the traffic.

# %%
symptoms(14)

# %% [markdown]
# ## In the wild
#
# <details><summary>Going deeper: more bugs, other orders, DDP, FSDP, and Megatron's distributed optimizer</summary>
#
# - **Means of means.** Until October 2024, Hugging Face's Trainer averaged means when it accumulated gradients over several small batches (transformers pull request 34191). So did torchtune, whose fix is dedicated to "the day the ML community first discovered the fact that (x1 / n1) + (x2 / n2) != (x1 + x2) / (n1 + n2)" (torchtune pull request 1875, October 2024).
#
# - **Other norms** were wrong, too. In August 2026, AMD fixed a bug like NeMo RL's in its version of Transformer Engine. On eight ranks, the bug had made the gradient norm of a four-layer DeepSeek-V4-Flash 1.52 times too large (ROCm/TransformerEngine pull request 715). In 2024, torchtitan clipped each pipeline stage by that stage's own norm instead of the norm of the full gradient (issue 596).
#
# - **The order of the axes** differs even between famous training runs and libraries. Llama 3 405B was trained with the order tp, cp, pp, dp, while Megatron-LM's default order is tp, cp, ep, dp, pp. The two additional axes are context parallelism (cp) and expert parallelism (ep).
#
# - **Hooks.** One PyTorch user wrote a hook that treated its argument, the parameter, as the gradient. It took days to find out why the loss didn't change (pytorch issue 187268).
#
# - **PyTorch's `DistributedDataParallel`** does what your class from exercise 14.1 does. The buckets hold 25 MiB by default (`bucket_cap_mb=25`). The first bucket is smaller so that its all-reduce can start sooner, and the parameters are assigned to buckets in roughly reverse order. DDP averages the gradients over *ranks*, so if your ranks have different numbers of tokens, you have to scale the loss yourself.
#
# - **ZeRO in PyTorch.** PyTorch implements stage 1 as `ZeroRedundancyOptimizer` and stage 3 as `fully_shard` (FSDP2). You call `fully_shard` on each layer and then on the model. With `reshard_after_forward=False`, the gathered weights stay in memory until the backward pass. This option saves the second all-gather, but it takes more memory.
#
# - **Megatron-Core's `DistributedOptimizer`** splits its flat buffers without regard to the boundaries between parameters, just as you did in exercise 14.2. It computes the norm in `get_grad_norm_fp32`, and the functions `param_is_not_tensor_parallel_duplicate` and `param_is_not_shared` decide which ranks count which parameters.
#
# - **`init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))`** creates a mesh and all its groups. The last axis is the innermost one. If you want only a group's members to call `dist.new_group`, pass `use_local_synchronization=True`.
#
# </details>
#
# ## Your library so far
#
# Your library now contains data parallelism with buckets, a ZeRO-1 optimizer, and a function that decides where the ranks sit.

# %%
from tplab.course import library

library(14)

# %% [markdown]
# Eight processes have produced a single loss curve. Now imagine that it's day five of a seven-day training run, and somebody trips over a power cord. What's left of your run?
