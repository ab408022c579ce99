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
# **The question.** You have more GPUs than one copy of the model needs. How do several copies learn as one, what can they share out among themselves, and how do data, pipeline and tensor parallelism stand together on one cluster?
#
# **What you will have built.** Gradients that are added up in buckets while the backward pass still runs; an optimizer whose state is shared out over the copies (ZeRO-1); the mesh of ranks and its process groups; the norm of a gradient of which no rank holds all; and a function that chooses a layout for a cluster.
# At the end a GPT trains on 8 processes, 2 copies of 2 stages of 2 shards, with the loss curve of one process.
#
# Symbols: `b` sequences in a micro-batch, `s` sequence length, `h` hidden size, `L` layers, `m` micro-batches; `tp`, `pp`, `dp` the numbers of ranks over which the matrices, the layers and the sequences are divided; `Ψ` (psi, the name in the ZeRO paper) the number of parameters. About 90 minutes.

# %% tags=["setup"]
import math
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tplab import device, launch, record, viz
from tplab.common import corpus
from tplab.course import check, predict, show_failure, symptoms
from tplab.data import Grid
from tplab.memory import GPTConfig, Layout, bill
from tplab.trace import trace_rank

# %% [markdown]
# This is where the chapter leads: 8 ranks, each in three groups at once. Ranks with one letter work together. Turn the knobs: which ranks do the matrices of one layer, which ones a pipeline, which ones hold the same parameters? The dashed frames are machines, or **nodes**, with 8 GPUs each.


# %% tags=["explore"]
def show_mesh(dp, pp, tp):
    grid = Grid(dp=dp, pp=pp, tp=tp)
    title = f"{grid.size} ranks: {dp} copies of {pp} stages of {tp} shards"
    return viz.mesh({axis: grid.groups(axis) for axis in ("tp", "pp", "dp")}, title=title)


viz.explore(show_mesh, dp=(1, 2, 3), pp=(1, 2, 3), tp=(1, 2, 4), start={"dp": 2, "pp": 2, "tp": 2})

# %% [markdown]
# ## 1 · The same model, more data
#
# In **data parallelism** every rank holds the whole model, called a **replica**, and its own part of the batch. Forward and backward need no messages at all. Before the optimizer steps, the gradients are all-reduced: then every replica has the gradient of the whole batch, takes the same step, and all of them stay equal.
#
# Try it on four ranks with a small model. The loss is a *sum* over tokens, as in `tplab.pipeline.executor` of chapter 13, and is divided by the tokens of all ranks at the end.


# %%
def small_model():
    torch.manual_seed(0)  # the same on every rank
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)).double().to(device())


def gradient_of(tokens):
    """The gradient of the mean loss over all tokens [n, 16], of which this rank sees its part."""
    model = small_model()
    mine = tokens.chunk(dist.get_world_size())[dist.get_rank()].to(device())  # [n/dp, 16]
    model(mine).square().sum().backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= len(tokens)
    return torch.cat([param.grad.flatten() for param in model.parameters()]).cpu()


tokens = torch.randn(24, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
one, four = launch(gradient_of, 1, args=(tokens,)), launch(gradient_of, 4, args=(tokens,))
print(f"largest difference between 1 and 4 ranks: {(one[0] - four[3]).abs().max():.0e}")
viz.traffic(four, title="four replicas: one all-reduce for each parameter")

# %% [markdown]
# The gradient is that of one process, and the messages are as large as the model: `Ψ` numbers in a step, however much data a rank has. That is the charm of it: more data for each replica means more arithmetic and not one byte more to send.
#
# ### What is the mean of?
#
# Sequences have different lengths, and padding does not count. So the ranks have different numbers of tokens, and there are two things that one could call the mean loss.
#
# **Predict.** Rank 0 has 30 tokens with a mean loss of 2, rank 1 has 10 tokens with a mean loss of 4. What is the mean loss of all tokens? And what comes out if each rank takes its mean, and the ranks average these?

# %% predict="14.a"
predict("14.a", mean_over_tokens=2.5, mean_of_means=3)

# %% [markdown]
# One process with all 40 tokens would take the first. So: sum over tokens on each rank, sum over ranks, and one division by the tokens of all ranks at the end.
#
# ## 2 · Buckets
#
# Two things are slow in the program above. It sends one message for each parameter, and most of them are small: each costs its latency (chapter 01). And it sends them when the backward pass is over, while the gradient of the last layer has been ready since its beginning.
#
# Both are cured by **buckets**. The parameters are put into lists, the last ones first, since their gradients come first. When all gradients of a bucket are there, they are copied into one flat tensor and its all-reduce starts, with `async_op=True`: it returns at once with a handle, and the backward pass goes on with the layers before. Only at the end somebody waits.
#
# Who says when a gradient is ready? `param.register_post_accumulate_grad_hook(hook)` calls `hook(param)` each time the gradient of `param` has been written to `param.grad`.


# %% tags=["setup"]
def cut_into_buckets(parameters, bucket_size):
    """Lists of parameters, the last ones first; each has at most `bucket_size` numbers, or one parameter that has more."""
    buckets = [[]]
    for param in reversed(list(parameters)):
        if buckets[-1] and sum(other.numel() for other in [*buckets[-1], param]) > bucket_size:
            buckets.append([])
        buckets[-1].append(param)
    return buckets


# %% [markdown] task="14.1" title="Gradients in buckets" difficulty=3 minutes=20
# - The buckets are there: `self.buckets`. Each is one all-reduce, started during the backward pass as soon as the last of its gradients has come. Nobody waits before `finish`.
# - The loss of each rank is a sum over its tokens. `finish(tokens)` gets the number of this rank's tokens, which may be 0, and leaves in every `param.grad` the gradient of the mean over the tokens of all ranks. Besides the buckets you may send a number.
# - It is called once for each backward pass, in every step of the training, and the next step has to work as well.
# - A new flat tensor is made by `torch.cat`; `flat.split(sizes)` cuts it again, `part.view_as(param)` gives a part its shape.


# %% exercise="14.1"
class DataParallel:
    """Adds up the gradients of all replicas, bucket by bucket, while the backward pass is running.

    model:       the same parameters on every rank of `group`
    bucket_size: numbers in a bucket
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
        """For the hooks: `param`, of bucket `number`, has its gradient."""
        ### BEGIN SOLUTION
        bucket = self.buckets[number]
        self.arrived[number] += 1
        if self.arrived[number] == len(bucket):
            flat = torch.cat([param.grad.flatten() for param in bucket])
            self.running.append((bucket, flat, dist.all_reduce(flat, group=self.group, async_op=True)))
        ### END SOLUTION

    def finish(self, tokens):
        """After backward: wait for every bucket, and turn sums into means over the tokens of all ranks."""
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
# 1. A hook has to know its bucket, and a bucket has to know how many of its gradients have come. What must be remembered from the hook to `finish`, and what must be as before when the next step begins?
# 2. In the constructor, a counter for each bucket and a hook for each parameter (`partial(self.gradient_is_ready, number)` binds the number of the bucket). In the hook, count; at the last one, `torch.cat` the flattened gradients of the bucket and start the all-reduce. In `finish`, all-reduce the tokens, wait for each bucket, split it, and copy the parts, divided, into `param.grad`. Then set the counters back.
# 3. Hook: `self.arrived[number] += 1`, and if that is `len(bucket)`: `flat = torch.cat([p.grad.flatten() for p in bucket])`, `work = dist.all_reduce(flat, group=self.group, async_op=True)`, `self.running.append((bucket, flat, work))`. In `finish`: `work.wait()`, `for p, part in zip(bucket, flat.split([p.numel() for p in bucket])): p.grad.copy_(part.view_as(p) / total.item())`.

# %% check="14.1"
check("14.1", DataParallel)

# %% [markdown]
# See it at work, on two ranks with a model of six layers, two of them in a bucket, and then with a single bucket. The tracer is that of chapter 11. Buckets leave while the backward pass goes on; the single one can only leave at its end.


# %%
def traced_step(width, layers, bucket_size):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(device())
    parallel = DataParallel(model, bucket_size)
    x = torch.randn(256, width, device=device())
    for _ in range(3):  # the first steps warm up
        model.zero_grad()
        loss = model(x).square().sum()
        dist.barrier()
        with trace_rank() as trace:
            loss.backward()
            parallel.finish(len(x))
    trace.spans = [span for span in trace.spans if span.about.get("bytes", 9) > 8]  # without the number of tokens
    return trace


WIDTH, LAYERS = 384, 6
IN_A_LAYER = WIDTH * WIDTH + WIDTH
traced = {layers: launch(traced_step, 2, args=(WIDTH, LAYERS, layers * IN_A_LAYER)) for layers in (0, 1, 2, 6)}
viz.overlap({"two layers in a bucket": list(traced[2]), "one bucket": list(traced[6])})

# %% [markdown]
# The size of the buckets is a trade. Small ones start early and pay the latency often; a single large one starts when there is nothing left to hide it behind.


# %%
def products_to_come(trace):
    """Matrix products of the backward pass that begin after the first message."""
    first = trace.lane("communicate")[0].start
    return sum(span.name == "mm" and span.start > first for span in trace.lane("compute"))


rows = []
for layers, (trace, _) in traced.items():
    sent = trace.lane("communicate")
    rows.append(
        {
            "a bucket holds": f"{layers} layers" if layers > 1 else "one layer" if layers else "one parameter",
            "all-reduces": len(sent),
            "bytes": f"{sum(span.about['bytes'] for span in sent):,}",
            "products to come when the first begins": products_to_come(trace),
        }
    )
viz.table(rows, title="one backward pass on rank 0: 11 matrix products")

# %% [markdown]
# The bytes are the same each time: `Ψ` numbers of 4 bytes. How much of the sending is really hidden depends on who does it. On a laptop the messages need the same cores as the products, and the slower rank holds up both; a GPU has links and engines of its own for it.
#
# ## 3 · ZeRO: what need not be there `dp` times
#
# Every replica holds all weights, all gradients and all of the optimizer's state: in mixed precision with Adam 2 + 2 + 12 = 16 bytes for each parameter (chapter 00), `dp` times over. **ZeRO**, the zero redundancy optimizer (Rajbhandari et al. 2020), takes that away in three stages. Each shares out one thing more.
#
# Remember chapter 01: an all-reduce is a reduce-scatter followed by an all-gather. Between the two, each rank holds the whole sum of *its part*, and that is all it needs to update that part of the weights.
#
# | stage | shared out | a step sends |
# |---|---|---|
# | plain | nothing | all-reduce of the gradients: reduce-scatter `Ψ` and all-gather `Ψ` |
# | ZeRO-1 | optimizer state | reduce-scatter of the gradients `Ψ`, update of the own part, all-gather of the weights `Ψ` |
# | ZeRO-2 | and gradients | the same, but the whole gradients are dropped as soon as they are scattered |
# | ZeRO-3 | and weights | all-gather of each layer's weights before its forward `Ψ` and again before its backward `Ψ`, reduce-scatter of its gradients `Ψ` |
#
# The all-reduce of section 1, one message of `Ψ` numbers, is counted here as its two halves, 2Ψ. So the first two stages send what plain data parallelism sends, 2Ψ, and the third half as much again, 3Ψ. That is for one backward pass a step. With `m` micro-batches, ZeRO-2 reduce-scatters `m` times, and ZeRO-3 gathers the weights anew for each.
#
# **Predict.** With `dp = 4`: how many bytes does a rank hold for each parameter, in each of the stages?

# %% predict="14.b"
predict("14.b", zero_1=7, zero_2=5.5, zero_3=4)

# %%
from tplab.data import zero_memory

STAGES = {0: "plain", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}
bars = {}
for stage, name in STAGES.items():
    sizes = zero_memory(stage, 7_500_000_000, 64)
    bars[name] = dict(zip(("weights", "gradients", "optimizer state"), sizes.values(), strict=True))
viz.bill(bars, title="7.5 billion parameters, dp = 64: bytes on a rank")

# %% [markdown]
# These are the numbers of the paper's first figure: 120, 31.4, 16.6 and 1.9 GB.
#
# Now build the first stage. Plain elementwise optimizers, like SGD, Adam and AdamW, do with each number what they would do if it were alone: so they can work on any part of the parameters, cut anywhere. Put all parameters one after another into one flat vector of `Ψ` numbers, zeros behind them until `dp` divides its length, and give each rank an equal part, whatever layers lie in it.

# %% [markdown] task="14.2" title="A step of ZeRO-1" difficulty=4 minutes=20
# - `self.shard` is this rank's part of the flat parameters, and `self.optimizer`, an `optimizer_class([self.shard], **options)`, knows nothing else.
# - The gradients of the ranks are parts of one mean, so they add up. `step()` takes them from `param.grad`, and leaves the new values in the parameters: in place, on every rank.
# - A step is one `dist.reduce_scatter(output, parts, group=...)`, with a list of `p` parts of this rank's gradients, whose output is this rank's part of the sum; and one `dist.all_gather(parts, mine, group=...)`, which fills a list of `p` tensors with the ranks' parts.
# - The parameters have any sizes and one dtype, which is also that of the shard and of the optimizer's state. `F.pad(flat, (0, n))` puts `n` zeros behind a vector.


# %% exercise="14.2"
class ZeRO1:
    """An optimizer that keeps 1/p of its state on each of p ranks.

    parameters:      the same on every rank of `group`, each with its gradient when step() is called
    optimizer_class: torch.optim.AdamW, ...; `options` are for it
    """

    def __init__(self, parameters, optimizer_class, group=None, **options):
        self.parameters = list(parameters)
        self.group = group
        ### BEGIN SOLUTION
        p, rank = dist.get_world_size(group), dist.get_rank(group)
        numbers = sum(param.numel() for param in self.parameters)
        self.length = -(-numbers // p)  # of a part, rounded up
        flat = self.flatten([param.detach() for param in self.parameters])  # [p · length]
        self.shard = nn.Parameter(flat[rank * self.length : (rank + 1) * self.length].clone())  # [length]
        self.optimizer = optimizer_class([self.shard], **options)
        ### END SOLUTION

    def flatten(self, tensors):
        """One vector [p · length]: the tensors one after another, and zeros behind them."""
        ### BEGIN SOLUTION
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return F.pad(flat, (0, dist.get_world_size(self.group) * self.length - len(flat)))  # [p · length]
        ### END SOLUTION

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
# 1. Which numbers of the flat vector does rank `r` update, if each part has `length` numbers? What has to be as long as the whole vector, and what as long as a part?
# 2. In the constructor: `length` is the number of all parameters divided by `p`, rounded up; flatten and pad; `self.shard` is an `nn.Parameter` made of a copy of this rank's slice. In `step`: flatten and pad the gradients, reduce-scatter into `self.shard.grad`, step, all-gather the shards, and copy slice after slice into the parameters.
# 3. `self.length = -(-numbers // p)`; `self.shard = nn.Parameter(flat[rank * self.length : (rank + 1) * self.length].clone())`; `dist.reduce_scatter(self.shard.grad, list(gradients.split(self.length)), group=self.group)` with `self.shard.grad = torch.empty_like(self.shard)`; `parts = [torch.empty_like(self.shard) for _ in range(p)]`, `dist.all_gather(parts, self.shard.detach(), group=self.group)`, `weights = torch.cat(parts)`; `param.data.copy_(weights[place : place + param.numel()].view_as(param))`.

# %% check="14.2"
check("14.2", ZeRO1)

# %% [markdown]
# The other two stages are in `tplab.data.zero` and `tplab.data.zero3`, built on the same flat vector. All of them here on a model of 4 layers, for `dp` = 1, 2 and 4: the bytes are those of tensors that were there, and the traffic is from the record.


# %%
def measured(stage):
    from tplab.data import zero
    from tplab.data import zero3 as zero_three

    torch.manual_seed(0)
    layers = [nn.Linear(64, 64, device=device()) for _ in range(4)]
    model = nn.Sequential(*layers)
    options = {"average": False, "lr": 1e-3}
    if stage == 3:
        parallel = zero_three.ZeRO3(model, layers, torch.optim.AdamW, **options)
    else:
        kind = {1: zero.ZeRO1, 2: zero.ZeRO2}[stage]
        parallel = kind(model.parameters(), torch.optim.AdamW, **options)
    x = torch.randn(8, 64, device=device())
    for _ in range(2):  # the first step makes the optimizer's state
        parallel.zero_grad()
        with record() as section:
            model(x).square().sum().backward()
            memory = parallel.memory()  # when backward is over: the fullest moment
            parallel.step()
    return {"memory": memory, "sent": {kind: total.bytes for kind, total in section.totals().items()}}


psi = 4 * (64 * 64 + 64)  # parameters
rows = []
for stage in (1, 2, 3):
    for p in (1, 2, 4):
        mine = launch(measured, p, args=(stage,))[0]
        rows.append(
            {"stage": f"ZeRO-{stage}", "dp": p}
            | {name: f"{size / psi:.2f}" for name, size in mine["memory"].items()}
            | {f"{kind}, Ψ": f"{mine['sent'].get(kind, 0) / psi / 4:.2f}" for kind in ("reduce_scatter", "all_gather")}
        )
viz.table(rows, title="bytes a parameter on a rank, in float32 (4 + 4 + 8), and messages of a step in Ψ numbers")

# %% [markdown]
# Read it line by line: each stage divides one column more by `dp`, and the third gathers the weights twice.
#
# ## 4 · The mesh
#
# Now all three parallelisms at once. `dp · pp · tp` ranks form a **mesh**: a grid with three axes, in which every rank has three coordinates. The ranks that agree in the other two coordinates and differ in one are a group, and each kind of message has its own kind of group:
#
# | axis | its group shares | sends | how often |
# |---|---|---|---|
# | `tp` | the matrices of the same layers | all-reduces of activations `[b, s, h]` | 4 in each layer, for each micro-batch |
# | `pp` | the layers of one replica | activations `[b, s, h]` from stage to stage | 2 for each micro-batch and border |
# | `dp` | nothing: the same parameters, other sequences | all-reduce of the gradients | once a step |
#
# Ranks are counted through the machines: with 8 GPUs in each, ranks 0 to 7 are the first machine. So neighbours share the fastest links. Which axis should be **innermost**, the one along which neighbouring ranks lie? Count what one rank puts into messages in a step, for a GPT of 80 layers with `h = 8192` on 64 GPUs:


# %%
def messages(config, dp, pp, tp, sequences):
    """Bytes that a rank puts into messages in a step, by axis, with 16-bit numbers."""
    m, each = sequences // dp, 2 * config.seq_length * config.hidden_size  # micro-batches of one sequence; [1, s, h]
    parameters = 12 * config.num_layers * config.hidden_size**2 / pp / tp
    return {
        "tp": 4 * config.num_layers / pp * m * each * (tp > 1),
        "pp": 2 * m * each * (pp > 1),
        "dp": 2 * parameters * (dp > 1),
    }


LARGE = GPTConfig(num_layers=80, hidden_size=8192, num_heads=64, vocab_size=50304, seq_length=2048)
viz.table(
    [
        {"dp": dp, "pp": pp, "tp": tp}
        | {f"{axis}, GB": f"{size / 1e9:.2f}" for axis, size in messages(LARGE, dp, pp, tp, 128).items()}
        for dp, pp, tp in ((2, 4, 8), (4, 2, 8), (8, 4, 2), (4, 16, 1))
    ],
    title="128 sequences of 2048 tokens in a step",
)

# %% [markdown]
# The messages of `tp` are by far the most, and they are hard to hide: all of those in the forward pass are waited for by the next layer (chapter 11 hides some in backward), while those of `dp` go beside the backward pass. So `tp` is innermost, and its groups stay inside a machine. The messages of `pp` are small, and those of `dp` are sent once: they can cross the network.
#
# So here `rank = (d · pp + i) · tp + t` for replica `d`, stage `i`, shard `t`.
#
# **Predict.** `dp = pp = tp = 2`. Which coordinates has rank 5? And which other rank holds the same parameters?

# %% predict="14.c"
predict("14.c", dp=1, pp=0, tp=1, same_parameters_as_5=1)

# %% [markdown] task="14.3" title="Ranks of a mesh" difficulty=2 minutes=15
# Three functions. The first two are arithmetic; the third makes real process groups.
#
# `dist.new_group(ranks)` has a rule of its own: **every rank of the world must call it, for every group, in the same order**, also the ranks that are not in the group. Those get something back that is no group.


# %% exercise="14.3"
def coordinates(rank, dp, pp, tp):
    """{"dp": d, "pp": i, "tp": t}: where a rank stands. tp is innermost, dp outermost."""
    ### BEGIN SOLUTION
    return {"dp": rank // (pp * tp), "pp": rank // tp % pp, "tp": rank % tp}
    ### END SOLUTION


def axis_groups(axis, dp, pp, tp):
    """All groups of an axis, "dp", "pp" or "tp", as lists of ranks: [[0, 1], [2, 3], ...].

    The ranks of a group differ in this coordinate only, and stand in its order.
    """
    ### BEGIN SOLUTION
    groups = {}
    for rank in range(dp * pp * tp):
        place = coordinates(rank, dp, pp, tp)
        del place[axis]
        groups.setdefault(tuple(place.values()), []).append(rank)
    return list(groups.values())
    ### END SOLUTION


def my_group(axis, dp, pp, tp):
    """This rank's process group of an axis. Every rank of the world calls it."""
    ### BEGIN SOLUTION
    mine = None
    for ranks in axis_groups(axis, dp, pp, tp):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine
    ### END SOLUTION


# %% [markdown] hints="14.3"
# 1. Write the coordinates of ranks 0 to 7 for `dp = pp = tp = 2` in a table. After how many ranks does each coordinate change? Which two coordinates are equal within a group of `pp`?
# 2. `rank % tp` is the shard, `rank // tp` counts stages through all replicas, `rank // (tp * pp)` counts replicas. Sort the ranks into a dictionary by their two other coordinates. For `my_group`, loop over all groups, call `new_group` for each, and keep the one with your rank in it.
# 3. `{"dp": rank // (pp * tp), "pp": rank // tp % pp, "tp": rank % tp}`; in `axis_groups`: `place = coordinates(...)`, `del place[axis]`, `groups.setdefault(tuple(place.values()), []).append(rank)`; in `my_group`: `group = dist.new_group(ranks)` in every turn of the loop, and `if dist.get_rank() in ranks: mine = group`.

# %% check="14.3"
check("14.3", coordinates, axis_groups, my_group)

# %% [markdown]
# What would it cost to have it the other way round? The time of one all-reduce of `[1, 2048, 8192]` in 16-bit numbers over `tp = 8` ranks, by the links of published machines with 8 GPUs each (chapter 11 has the model): neighbours in one machine, or ranks of eight different machines.

# %%
from tplab.cost import MACHINES
from tplab.cost import collective as collective_cost

size = 2 * 2048 * 8192
rows = []
for name, machine in MACHINES.items():
    if machine.gpus_per_node == 8:
        inside, across = machine.link(8), machine.link(8, stride=8)
        times = [collective_cost.all_reduce(link, size, 8) for link in (inside, across)]
        rows.append(
            {
                "machine": name,
                "tp innermost, ms": f"{1e3 * times[0]:.2f}",
                "tp outermost, ms": f"{1e3 * times[1]:.2f}",
                "times as long": f"{times[1] / times[0]:.1f}",
            }
        )
viz.table(rows)

# %% [markdown]
# ## 5 · The norm of a gradient that nobody holds
#
# Large models are trained with **gradient clipping**: if the norm of the whole gradient is above a limit, all of it is scaled down. The norm is the root of the sum of the squares of *all* numbers, and each rank holds only some of them:
#
# - **shards** (`param.tensor_parallel` is set): each rank of a `tp` group has other numbers; add them up over the group.
# - **replicated** parameters (positions, the weights of layer norms, the last biases of chapter 10): the same on every rank of the `tp` group. Only one of them may count them.
# - **stages** hold different layers: add up over the `pp` group. But the tied table of the embedding is on the first stage and on the last, and after the sum of its two gradients (chapter 13) both copies have the same one. It counts once.
# - **replicas** have the same gradients by now. Nothing to add.
#
# **Predict.** Four tensor-parallel ranks. On each of them the squares of the shards' gradients add up to 12, those of the replicated parameters to 4. What is the square of the norm? And what comes out if every rank adds up what it has?

# %% predict="14.d"
predict("14.d", right=52, everything_added=64)

# %% [markdown] task="14.4" title="The norm of the gradient" difficulty=3 minutes=15
# Return the norm as a float that is the same on every rank. One number from each rank is enough for each all-reduce. A parameter may have no gradient. Let the first rank of the `tp` group count what is replicated, and the first stage the tied table.


# %% exercise="14.4"
def gradient_norm(parameters, tp_group, pp_group, tied=None):
    """The norm of the gradient of the whole model, the same float on every rank.

    parameters: of this rank; shards have the attribute `tensor_parallel`
    tied:       the one among them that the first and the last stage share, on the ranks of both; else None
    """
    ### BEGIN SOLUTION
    total = torch.zeros((), dtype=torch.float64, device=device())
    for param in parameters:
        first_copy = param is not tied or dist.get_rank(pp_group) == 0
        mine = hasattr(param, "tensor_parallel") or dist.get_rank(tp_group) == 0
        if param.grad is not None and first_copy and mine:
            total += param.grad.double().square().sum()
    dist.all_reduce(total, group=tp_group)
    dist.all_reduce(total, group=pp_group)
    return math.sqrt(total.item())
    ### END SOLUTION


# %% [markdown] hints="14.4"
# 1. For each kind of parameter: which of the ranks count it? Once every rank knows what it counts, what is there to do but add up?
# 2. Skip a parameter without gradient, a replicated one unless this is rank 0 of `tp_group`, and the tied one unless this is rank 0 of `pp_group`. Add up the squares of the others in one tensor, all-reduce it over `tp_group`, then over `pp_group`, and take the root at the very end.
# 3. `counts = hasattr(param, "tensor_parallel") or dist.get_rank(tp_group) == 0`; `if param is tied: counts = counts and dist.get_rank(pp_group) == 0`; `total += param.grad.double().square().sum()`; two `dist.all_reduce(total, group=...)`; `math.sqrt(total.item())`.

# %% check="14.4"
check("14.4", gradient_norm)

# %% [markdown]
# ## 6 · Which layout?
#
# 64 GPUs can be `dp · pp · tp` = 64 · 1 · 1, 8 · 4 · 2, 1 · 8 · 8 and many more. Each axis has its price:
#
# | | divides | costs |
# |---|---|---|
# | more `tp` | weights and what they compute | the most messages, hardly hidden; at most a machine's GPUs |
# | more `pp` | layers | the bubble, `(pp - 1)/m` |
# | more `dp` | nothing but the optimizer state, with ZeRO-1 | the gradients' all-reduce, and fewer micro-batches for each pipeline |
#
# There are not many layouts, so try them all: throw out those that are impossible or do not fit, and take the fastest of the rest. `bill` is the memory of chapter 00, without ZeRO; the prediction of the time is handed to you as a function.


# %% tags=["setup"]
def layout_of(dp, pp, tp, sequences):
    """A layout for a step of so many sequences, one in each micro-batch."""
    return Layout(dp=dp, pp=pp, tp=tp, micro_batches=sequences // dp, sequence_parallel=True, recompute="attention")


# %% [markdown] task="14.5" title="A layout for a cluster" difficulty=3 minutes=10
# Return the `layout_of(dp, pp, tp, sequences)` with the least `seconds(layout)` among those that
#
# - use every GPU;
# - divide evenly: `tp` the heads `config.num_heads` and, because of sequence parallelism, the tokens `config.seq_length`; `pp` the layers `config.num_layers`, `dp` the sequences;
# - keep each `tp` group inside one machine, on machines that are all used whole. Ranks are counted through the machines, so look at where the groups begin and end;
# - fit: `bill(config, layout).total` is at most `gpu_bytes`.
#
# If there is none, raise `ValueError` with a message that says so.


# %% exercise="14.5"
def choose_layout(config, gpus, gpus_per_node, gpu_bytes, sequences, seconds):
    """The fastest layout that fits. `seconds(layout)` predicts the time of a step."""
    ### BEGIN SOLUTION
    fitting = []
    for tp in range(1, gpus_per_node + 1):
        for pp in range(1, config.num_layers + 1):
            dp, rest = divmod(gpus, tp * pp)
            if rest or dp == 0 or gpus_per_node % tp or sequences % dp:
                continue
            if config.num_heads % tp or config.seq_length % tp or config.num_layers % pp:
                continue
            layout = layout_of(dp, pp, tp, sequences)
            if bill(config, layout).total <= gpu_bytes:
                fitting.append(layout)
    if not fitting:
        raise ValueError(f"no layout of {gpus} GPUs with {gpu_bytes / 1e9:.0f} GB holds this model: take more GPUs")
    return min(fitting, key=seconds)
    ### END SOLUTION


# %% [markdown] hints="14.5"
# 1. If `tp` and `pp` are chosen, which `dp` is left, and when is there none? With 8 GPUs in a machine and `tp = 6`: where does the second group lie?
# 2. Two loops, over `tp` and `pp`. Skip a pair if `gpus` is not a multiple of `tp * pp`, if `tp` does not divide `gpus_per_node`, the heads and the tokens of a sequence, if `pp` does not divide the layers, if `dp` does not divide the sequences. Collect the layouts whose bill fits. `min(layouts, key=seconds)` is the fastest.
# 3. `dp, rest = divmod(gpus, tp * pp)`; `if rest or not dp or gpus_per_node % tp or config.num_heads % tp or config.seq_length % tp or config.num_layers % pp or sequences % dp: continue`; `layout = layout_of(dp, pp, tp, sequences)`; `if bill(config, layout).total <= gpu_bytes: fitting.append(layout)`; if the list is empty `raise ValueError(...)`, else `return min(fitting, key=seconds)`.

# %% check="14.5"
check("14.5", choose_layout)

# %% [markdown]
# With the time model of chapter 11 in place of `seconds`: what does your function choose for models of different sizes on H100 machines, 256 sequences a step?

# %%
from tplab.cost import step_time

H100 = MACHINES["H100 DGX"]
MODELS = {
    "1.3 billion": GPTConfig(num_layers=24, hidden_size=2048, num_heads=16, vocab_size=50304, seq_length=2048),
    "6.7 billion": GPTConfig(num_layers=32, hidden_size=4096, num_heads=32, vocab_size=50304, seq_length=2048),
    "65 billion": LARGE,
    "175 billion": GPTConfig(num_layers=96, hidden_size=12288, num_heads=96, vocab_size=50304, seq_length=2048),
}


def seconds_of(config, layout):
    return step_time(config, layout, H100).total


rows = []
for gpus in (16, 64, 256):
    for name, config in MODELS.items():
        row = {"GPUs": gpus, "parameters": name}
        try:
            layout = choose_layout(config, gpus, 8, H100.memory, 256, partial(seconds_of, config))
        except ValueError:
            rows.append(row | {"dp": None, "pp": None, "tp": None, "GB": "does not fit", "s a step": None})
            continue
        row |= {"dp": layout.dp, "pp": layout.pp, "tp": layout.tp}
        row |= {"GB": f"{bill(config, layout).total / 1e9:.0f}", "s a step": f"{seconds_of(config, layout):.2f}"}
        rows.append(row)
viz.table(rows)

# %% [markdown]
# `tplab.cluster.plan` does the same for every layout of a cluster. It also tries larger micro-batches, sequence parallelism, interleaved pipelines, and recomputation. Here's where the time goes in the best four layouts for a GPT with 70 billion parameters on 64 H100s.

# %%
from tplab.cluster.plan import best_of_each_split, gpt_shape, plans

best = best_of_each_split(plans(gpt_shape(70e9), 64, H100))[:4]
viz.time_bars(
    {f"dp {p.layout.dp}, pp {p.layout.pp}, tp {p.layout.tp}": p.time.parts() for p in best},
    title="a step with 70 billion parameters on 64 H100s",
)

# %% [markdown]
# In a terminal, `tplab plan --params 70e9 --gpus 64 --gpu h100` prints the same list. It also says why the first layout is the fastest, and what would have to change for the next ones to catch up.
#
# ## 7 · All three at once
#
# 8 processes, `dp = pp = tp = 2`, train a GPT of 2 layers on real text: each replica gets half of the sequences, cuts them into 2 micro-batches, runs them through 2 stages with the schedule 1F1B, whose layers are cut in 2. The gradients are added up over the replicas, the norm over shards and stages, and every rank clips and steps.
# The same on one process, by the GPT of chapter 10 on the whole batch and `torch.nn.utils.clip_grad_norm_`.

# %%
CONTEXT, BATCH, STEPS, LIMIT, LR = 24, 8, 10, 0.5, 1e-2
CONFIG = GPTConfig(
    num_layers=2, hidden_size=32, num_heads=4, vocab_size=256, seq_length=CONTEXT, activation="gelu_tanh", dropout=0.0
)
GRID = Grid(dp=2, pp=2, tp=2)
text = corpus.python_sources(6000)[3000:]


def batches():
    """Ids and targets [8, 24], the same on every rank."""
    return corpus.byte_batches(text, CONTEXT, BATCH, STEPS, seed=1)


def train_in_3d():
    from tplab.cluster import Training3D

    torch.set_num_threads(1)
    options = {"micro_batches": 2, "micro_batch_size": 2, "max_norm": LIMIT, "dtype": torch.float64, "lr": LR}
    training = Training3D(CONFIG, GRID, torch.optim.AdamW, **options)
    seen = {"loss": [], "norm": [], "clipped": []}
    for ids, targets in batches():
        with record() as section:
            seen["loss"].append(training.step(ids, targets))
        seen["norm"].append(training.norm.item())
        tp_group, pp_group = training.mesh.get_group("tp"), training.mesh.get_group("pp")
        parameters = list(training.stage.parameters())
        seen["clipped"].append(gradient_norm(parameters, tp_group, pp_group, training.stage.tied))
    return seen | {"sent": list(section), "parameters": sum(param.numel() for param in parameters)}


def train_on_one():
    from tplab.gpt import ParallelGPT
    from tplab.tensor import seed_all

    seed_all(0)
    model = ParallelGPT(CONFIG, device=device(), dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    seen = {"loss": [], "norm": []}
    for ids, targets in batches():
        loss = model(ids.to(device()), targets.to(device()))
        optimizer.zero_grad()
        loss.backward()
        seen["norm"].append(nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item())
        optimizer.step()
        seen["loss"].append(loss.item())
    return seen


run = launch(train_in_3d, 8, timeout=300)
alone = launch(train_on_one, 1)[0]
viz.curves(
    {"one process": alone["loss"], "8 processes, dp = pp = tp = 2": run[0]["loss"]}, title=f"{STEPS} steps on real text"
)

# %%
viz.table(
    [
        {
            "step": step + 1,
            "loss, one process": f"{alone['loss'][step]:.6f}",
            "loss, 8 processes": f"{run[0]['loss'][step]:.6f}",
            "norm, one process": f"{alone['norm'][step]:.6f}",
            "norm, 8 processes": f"{run[0]['norm'][step]:.6f}",
            "by your function, once clipped": f"{run[7]['clipped'][step]:.6f}",
        }
        for step in (0, 1, STEPS - 1)
    ],
    title=f"gradients longer than {LIMIT} are clipped to it",
)

# %% [markdown]
# One curve. It was made with messages in all three kinds of groups, and no rank holds more than a part of the model. Your `gradient_norm` was given what each rank of the run held after clipping, and says what clipping promised, also on rank 7. (Where it says 0.499999: to be safe against a norm of zero, the limit is divided by the norm and a millionth more, in PyTorch too.)
#
# ## 8 · Break it
#
# **First.** Means of each rank, averaged over the ranks, with unequal numbers of tokens. Two ranks fit a linear model to examples of two kinds. In each step rank 0 has nine examples of the common kind, rank 1 one of the rare kind; one process has all ten.


# %%
def points(step):
    """Nine examples of a common kind and one of a rare kind, [10, 4] and [10, 1]."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(10, 4, dtype=torch.float64, generator=generator)
    return x, torch.where(torch.arange(10) < 9, x[:, 0], -x[:, 0])[:, None]


def fit(mean_of_means, steps=60):
    rank, p = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double().to(device())
    parallel = DataParallel(model, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x, y = (part.tensor_split([9])[rank] if p > 1 else part for part in points(step))  # rank 0: 9, rank 1: 1
        loss = (model(x.to(device())) - y.to(device())).square().sum()
        optimizer.zero_grad()
        (loss / len(x) if mean_of_means else loss).backward()
        parallel.finish(1 if mean_of_means else len(x))
        optimizer.step()
    return model.weight[0].tolist()


one = launch(fit, 1, args=(False,))[0]
viz.table(
    [
        {"": name} | {f"w{i}": f"{value:.4f}" for i, value in enumerate(weights)}
        for name, weights in {
            "one process": one,
            "2 ranks, sums divided by all tokens": launch(fit, 2, args=(False,))[0],
            "2 ranks, mean of the ranks' means": launch(fit, 2, args=(True,))[0],
        }.items()
    ],
    title="the weights after 60 steps",
)

# %% [markdown]
# Nothing fails, and nothing is reported. But the rare example counts nine times as much as each of the others, and the model learns something else. The symptom is that the result depends on how the data lie on the ranks.
#
# **Second.** A group that only its members make. Why should ranks 1 and 2 call `new_group` for a group of ranks 0 and 3? Here the first and the last rank of a pipeline make a group for their tied table, then all ranks make two groups for tensor parallelism.


# %%
def made_by_members_only():
    rank = dist.get_rank()
    if rank in (0, 3):
        dist.new_group([0, 3])
    for ranks in ([0, 1], [2, 3]):
        group = dist.new_group(ranks)
        if rank in ranks:
            mine = group
    dist.all_reduce(torch.ones(1, device=device()), group=mine)


with show_failure():
    launch(made_by_members_only, 4)

# %% [markdown]
# `tplab` compares the calls of all ranks and stops the run. In a plain torchrun script, nothing would. The ranks would wait for each other in a *later* `new_group`, or in the first all-reduce of a later group, and those lines are right. The reason is that each rank derives a group's name from the number of groups it has created so far. For rank 0, the group of ranks 0 and 1 is the second one, but for rank 1 it's the first, so they look for each other under different names. If every rank happens to skip equally many calls, the program even works, and the mistake stays hidden until somebody adds a group.
#
# **Third.** The mesh the wrong way round. Say the 8 ranks of the training above sit in two machines of 4. Here is what crossed from machine to machine in one step, from the record of the run, and what would have crossed if `tp` were outermost and `dp` innermost.


# %%
def crossing(order, gpus_per_node=4):
    """Bytes of one step, summed over all ranks, by axis: of messages whose ranks are not all in one machine."""
    sizes = {"dp": GRID.dp, "pp": GRID.pp, "tp": GRID.tp}

    def number(rank):  # of a rank, counted with another axis innermost
        place, count = GRID.place(rank)._asdict(), 0
        for axis in order:  # outermost first
            count = count * sizes[axis] + place[axis]
        return count

    across = dict.fromkeys(("tp", "pp", "dp"), 0)
    for rank, mine in enumerate(run):
        for call in mine["sent"]:
            axis = next(axis for axis in across if sorted(call.group) == GRID.group(rank, axis))
            if len({number(other) // gpus_per_node for other in call.group}) > 1:
                across[axis] += call.bytes
    return across


rows = []
for name, order in {"tp innermost": ("dp", "pp", "tp"), "tp outermost": ("tp", "pp", "dp")}.items():
    across = crossing(order)
    rows.append({"": name} | {f"{axis}, bytes": f"{size:,}" for axis, size in across.items()})
viz.table(rows, title="messages between the two machines in one step")

# %% [markdown]
# The result is the same, so no test of numbers sees it. In this small model the difference is small as well. But what `tp` sends grows with the tokens of a step, what `dp` sends does not; and in the forward pass each of the messages of `tp` is waited for.

# %%
symptoms(14)

# %% [markdown]
# ## 9 · Measure it
#
# One step of the 3D run on rank 0, a rank of the first stage, against formulas. A message `[b, s, h]` has `2 · 24 · 32` numbers of 8 bytes. The first stage has one all-reduce more than those of its layers, that of the embedding.

# %%
each, m, layers = 8 * 2 * CONTEXT * CONFIG.hidden_size, 2, CONFIG.num_layers // GRID.pp
table_bytes = 8 * CONFIG.vocab_size * CONFIG.hidden_size // GRID.tp
formulas = {
    ("tp", "all_reduce"): ("m (4 L/pp + 1) bsh, and the norm", m * (4 * layers + 1) * each + 8),
    ("pp", "send"): ("m bsh: activations", m * each),
    ("pp", "recv"): ("m bsh: their gradients", m * each),
    ("pp", "all_reduce"): ("the tied table's gradient, norm, loss", table_bytes + 16),
    ("dp", "all_reduce"): ("gradients of this rank, tokens, loss", 8 * run[0]["parameters"] + 16),
}
rows = []
for (axis, kind), (words, size) in formulas.items():
    calls = [c for c in run[0]["sent"] if c.kind == kind and sorted(c.group) == GRID.group(0, axis)]
    rows.append(
        {
            "axis": axis,
            "kind": kind,
            "calls": len(calls),
            "bytes": f"{sum(call.bytes for call in calls):,}",
            "formula": f"{size:,}",
            "what it is": words,
        }
    )
assert sum(row["calls"] for row in rows) == len(run[0]["sent"])  # nothing else was sent
viz.table(rows)

# %% [markdown]
# ## 10 · In the wild
#
# **PyTorch.** `DistributedDataParallel` in `torch/nn/parallel/distributed.py` is exercise 14.1: its reducer, written in C++, has buckets of `bucket_cap_mb=25` MiB (the first one 1 MiB, so that it starts early), filled in about the reverse order of the parameters. It *averages over ranks*; to count tokens, scale the loss. Since it is in C++, `tplab.record` does not see its messages.
# `ZeroRedundancyOptimizer` in `torch.distributed.optim` is ZeRO-1, and `fully_shard` in `torch.distributed.fsdp` (FSDP2) is ZeRO-3: call it on each layer, then on the model; each parameter becomes a DTensor that is sharded along its first dimension. With `reshard_after_forward=False` the gathered weights stay until backward, which saves the second all-gather and
# costs the memory. `init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))` makes the mesh and all its groups; `tplab.data.grid` uses it.
#
# **Megatron-Core.** `DistributedDataParallel` and its buckets in `megatron/core/distributed`; `DistributedOptimizer` in `megatron/core/optimizer/distrib_optimizer.py` is ZeRO-1 on flat buffers, cut without regard to the borders of parameters, as yours is; `get_grad_norm_fp32` in `megatron/core/optimizer/clip_grads.py` is the norm, for which `param_is_not_tensor_parallel_duplicate` and `param_is_not_shared`
# say what counts. Its `initialize_model_parallel` has `order="tp-cp-ep-dp-pp"`, innermost first: tensor parallel between neighbours as here, but data parallel next and the pipeline across the largest distance.
#
# Your data parallelism beside PyTorch's own, on two ranks with equally many tokens:


# %%
def beside_ddp():
    from torch.nn.parallel import DistributedDataParallel

    x = torch.randn(6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))
    mine, theirs = small_model(), DistributedDataParallel(small_model())
    parallel = DataParallel(mine, 200)
    mine(x.to(device())).square().sum().backward()
    parallel.finish(len(x))
    (theirs(x.to(device())).square().sum() / len(x)).backward()
    pairs = zip(mine.parameters(), theirs.parameters(), strict=True)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs)


print(f"largest difference of a gradient: {max(launch(beside_ddp, 2)):.0e}")

# %% [markdown]
# ## 11 · Recap
#
# 1. Data parallelism sends the gradients once a step, `Ψ` numbers in buckets that leave while the backward pass runs; sums over tokens are added up, and divided by the tokens of all ranks once.
# 2. ZeRO shares out optimizer state, gradients, weights over the replicas: 16Ψ bytes become 4Ψ + 12Ψ/dp, 2Ψ + 14Ψ/dp, 16Ψ/dp, for messages of 2Ψ, 2Ψ and 3Ψ numbers (plain: 2Ψ, with the all-reduce counted as its two halves).
# 3. A mesh has an axis for each parallelism; tp is innermost, since its messages are the most and the hardest to hide. All ranks make all groups, in one order.
# 4. A norm counts each parameter once: shards on every rank of tp, what is replicated on one, a tied table on one stage, and replicas not at all.
# 5. A layout uses all GPUs, divides evenly, keeps tp in a machine, fits, and is the fastest of those. Next, in the capstone, your own layers train a GPT on all that this machine has.

# %% [markdown]
# ## Your library so far
#
# With data parallelism, ZeRO-1 and the groups of a 3D mesh, it's ready for more than one kind of parallelism at a time.

# %%
from tplab.course import library

library(14)
