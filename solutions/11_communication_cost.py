# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 11 · What communication costs
#
# **The question.** How long does a tensor-parallel layer take on a machine that you don't have, and how much of what it sends can be hidden behind what it computes?
#
# **What you will have built.** Formulas for the time of a collective and of a layer, held against published measurements; a backward pass that computes one gradient while the sum of the other travels; and a search for the smallest layer that is worth eight GPUs.
#
# Symbols: `b` batch, `s` sequence length, `h` hidden size, `p` tensor-parallel ranks; $\alpha$ and $\beta$ are the latency and the seconds per byte of a link (chapter 01). About 75 minutes.

# %% tags=["setup"]
import dataclasses
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tplab import device, launch, record, viz
from tplab.collectives import Link, links
from tplab.cost import MACHINES, layer_time, measure_kernels, measure_machine, overlap_saving
from tplab.cost.collective import all_reduce
from tplab.course import check, predict, show_failure, symptoms
from tplab.gpt import ParallelTransformerLayer
from tplab.memory import GPTConfig
from tplab.tensor import column_linear
from tplab.trace import RankTrace, Span, save_chrome_trace, trace_rank

# %% [markdown]
# ## 1 · What a rank waits for
#
# Below, two ranks run a column-parallel layer forward and backward: `x` is `[2048, 1024]`, each rank has 256 columns of the weight. `trace_rank()` watches a rank: torch's profiler writes down when each operation ran, and the record says which collectives were under way. Each rank gets two lanes. What lies one above the other
# happened at the same time.

# %%
TOKENS, HIDDEN, COLUMNS = 2048, 1024, 512


def waiting(x, weight):
    """f and the product, as in chapter 04: the backward pass sums dx over the ranks, and waits for it."""
    return column_linear(x, weight, None, None)


def not_waiting(x, weight):
    """The same; the backward pass does something else while the sum travels."""
    return column_linear(x, weight, None, None, async_grad_allreduce=True)


def one_layer(linear, columns=COLUMNS, times=5):
    """Traces of the same layer, forward and backward, run several times."""
    torch.set_num_threads(1)  # one core a rank
    x = torch.randn(TOKENS, HIDDEN, device=device(), requires_grad=True)  # [b·s, h]
    weight = torch.randn(columns // dist.get_world_size(), HIDDEN, device=device(), requires_grad=True)  # [m/p, h]
    dy = torch.randn(TOKENS, len(weight), device=device())  # [b·s, m/p]
    traces = []
    for _ in range(times):
        x.grad = weight.grad = None
        dist.barrier()  # the ranks begin together
        with trace_rank() as trace:
            linear(x, weight).backward(dy)
        traces.append(trace)
    return traces


def shortest(results):
    """Of the runs, the one that took least: what else the machine did disturbed it least."""
    runs = list(zip(*results, strict=True))
    return min(runs, key=lambda run: max(trace.duration for trace in run))


before = shortest(launch(one_layer, 2, args=(waiting,)))
after = shortest(launch(one_layer, 2, args=(not_waiting,)))
viz.overlap(
    {"waiting": before, "not waiting": after}, title="one column-parallel layer, forward and backward, two ranks"
)

# %% [markdown]
# `mm` is a matrix product: the first is the forward pass, the other two are the backward pass, one for the gradient of `x` and one for that of the weight. (`copy_` is f's: it sums a copy, since the gradient that it was handed may belong to somebody else, as chapter 03 showed.)
#
# In the upper half the communication lane is busy only where the computing lane is empty. Such communication is **exposed**: the rank has nothing to do but wait, and every microsecond of it makes the layer slower. In the lower half the same all-reduce is started earlier and lies below a product: so far as it does, it is **hidden**. For a set of times write $|\cdot|$ for its length; then
#
# $$\text{hidden share} = \frac{|C \cap W|}{|C|}$$
#
# with $C$ the times in which some collective is under way on the rank, and $W$ the times in which the rank computes. You will write the lower half in section 5. First: how long should all this take?
#
# The same trace as a file, for a viewer in which you can zoom: open [ui.perfetto.dev](https://ui.perfetto.dev) and drop the file on the page. Nothing leaves your machine; the page reads the file in your browser. Each rank is a process there, with a row for each lane. Click on a box to see the shapes of a product, or the bytes of a collective and the line of code that it comes from.

# %%
path = save_chrome_trace(Path("traces") / "layer.json", before)
print(f"{path}: {sum(len(trace.spans) for trace in before)} boxes")

# %% [markdown]
# ## 2 · The time of a ring
#
# Chapter 01 measured that a message of $n$ bytes takes $\alpha + \beta n$. A ring cuts a tensor into $p$ parts and sends them round, a part a step; the steps follow one another, and in each of them all ranks send at once. A **node** is one machine, with usually 8 GPUs that NVLink connects; nodes are connected by a network, here InfiniBand. Some links, in one direction: the bandwidth is the vendor's or the standard's, $\alpha$ is what NCCL's source assumes for one step of a ring (`links.PUBLISHED[name].source`):

# %%
viz.table(
    [
        {"link": name, "alpha [µs]": f"{link.alpha * 1e6:.1f}", "bandwidth [GB/s]": f"{link.bandwidth / 1e9:.0f}"}
        for name, link in links.PUBLISHED.items()
    ],
    title="NVLink: inside a node. PCIe: inside a node without NVLink. InfiniBand: one network adapter between nodes",
)

# %% [markdown]
# **Predict.** In GPT-3, `h = 12288` and `s = 2048`, so one sequence makes messages of `b·s·h` numbers of 2 bytes: 50,331,648 bytes. All-reduce it over 8 ranks in a ring of NVLink 3 (3.4 µs, 300 GB/s). How many steps follow one another? How many microseconds do they take together?

# %% predict="11.a"
predict("11.a", steps=14, microseconds=341.2)

# %% [markdown]
# What that means for a layer depends on how much it computes from one message to the next. Here is one GPU, an H100, on different links; each bar is the time of one transformer layer, forward and backward, on each of `p` ranks that share it. Find out: on which links is it worth taking 8 GPUs for one layer? What does a larger `h` change, what a larger `p`?


# %%
def used(efficiency, p):
    return f"{efficiency:.0%} of {p} GPU{'s' * (p > 1)} used"


# %% tags=["explore"]
def layer_on(link, h):
    gpu = dataclasses.replace(
        MACHINES["H100 DGX"], gpus_per_node=64, inside=links.PUBLISHED[link], between=links.PUBLISHED[link]
    )
    config = GPTConfig(num_layers=1, hidden_size=h, num_heads=h // 128, vocab_size=51200, seq_length=2048)
    times = {p: layer_time(config, gpu, micro_batch=4, tp=p) for p in (1, 2, 4, 8, 16)}
    return viz.time_bars(
        {f"p = {p}": time.whole.parts() for p, time in times.items()},
        notes={f"p = {p}": used(times[1].total / (p * time.total), p) for p, time in times.items()},
        title=f"a layer with h = {h:,}, s = 2048, b = 4: an H100 on {link}",
    )


viz.explore(layer_on, link=list(links.PUBLISHED), h=(8192, 2048, 4096, 16384))

# %% [markdown]
# The matrix products shrink with `p`, the messages do not. (`element-wise` is what is no matrix product: norms, dropout, softmax, residuals. Section 4 comes back to it.) Behind each bar stands the **efficiency**: the time on one GPU, divided by `p` times the time on `p`. Now write the formulas of the other two parts.

# %% [markdown] task="11.1" title="The time of a collective" difficulty=1 minutes=10
# Return the seconds of a collective of `p` ranks in a ring. `size` is the *whole* tensor, in bytes: what an all-reduce is called with, what an all-gather returns, what a reduce-scatter takes in. `link.seconds(n)` is $\alpha + \beta n$; `link.alpha` and `link.beta` are there too.


# %% exercise="11.1"
def collective_seconds(kind: str, size: float, p: int, link: Link) -> float:
    """Seconds of an "all_reduce", "all_gather" or "reduce_scatter" of `size` bytes over p ranks in a ring."""
    ### BEGIN SOLUTION
    ways = 2 if kind == "all_reduce" else 1  # an all-reduce is a reduce-scatter and an all-gather
    return ways * (p - 1) * link.seconds(size / p)
    ### END SOLUTION


# %% [markdown] hints="11.1"
# 1. How often must a part move on until every rank has had it? How large is a part?
# 2. A reduce-scatter is `p - 1` steps, an all-gather is `p - 1` steps, and an all-reduce is one after the other. A step is a message of `size / p` bytes.
# 3. `steps = (p - 1) * (2 if kind == "all_reduce" else 1)`, then `steps * link.seconds(size / p)`. For `p = 1` that is zero by itself.

# %% check="11.1"
check("11.1", collective_seconds)

# %% [markdown]
# GPT-3's message over 8 ranks, by your formula, on each of the links:

# %%
message = 2 * 2048 * 12288
viz.table(
    [
        {
            "link": name,
            "all-reduce [µs]": f"{1e6 * collective_seconds('all_reduce', message, 8, link):,.0f}",
            "of that alpha [µs]": f"{1e6 * collective_seconds('all_reduce', 0, 8, link):,.0f}",
        }
        for name, link in links.PUBLISHED.items()
    ]
)

# %% [markdown]
# ## 3 · The time of a layer
#
# A product of `[m, k]` and `[k, n]` takes $2mkn$ floating-point operations (**FLOPs**): a multiplication and an addition for each term. All that a transformer layer multiplies in the forward pass, with an MLP of `4h`:
#
# | product | shapes | FLOPs |
# |---|---|---|
# | Q, K and V | `[b·s, h] · [h, 3h]` | $6\,b s h^2$ |
# | scores $QK^T$ | `[s, h/a] · [h/a, s]`, for each of `b·a` heads | $2\,b s^2 h$ |
# | values $PV$ | `[s, s] · [s, h/a]`, for each of `b·a` heads | $2\,b s^2 h$ |
# | attention's output | `[b·s, h] · [h, h]` | $2\,b s h^2$ |
# | MLP, up and down | `[b·s, h] · [h, 4h]` and back | $16\,b s h^2$ |
#
# Together $24\,bsh^2 + 4\,bs^2h$. Every product $Y = XA$ comes back twice in the backward pass, as $dX = dY\,A^T$ and $dA = X^T dY$: the backward pass has twice the FLOPs of the forward pass. A rank does a `p`-th of them.
#
# A GPU does so many FLOPs in a second, its **rate**. Vendors print the peak; large products reach a part of it. What the layer sends you know from chapters 05 and 06: f and g around attention, f and g around the MLP. Four all-reduces of `b·s·h` numbers, two forward (g) and two backward (f).
#
# **Predict.** What happens to the FLOPs of the products with weights, $24\,bsh^2$, when `h` is doubled, and to the bytes of the all-reduces? And when `b` is doubled? Give factors.

# %% predict="11.b"
predict("11.b", operations_with_h=4, bytes_with_h=2, operations_with_b=2, bytes_with_b=2)

# %% [markdown] task="11.2" title="The time of a layer" difficulty=2 minutes=15
# Return two numbers: the seconds in which a rank computes, and the seconds in which it communicates, for one layer, forward and backward, `h` with an MLP of `4h`.
#
# - `rate` is in FLOPs a second. `all_reduce(link, size, p)` is imported in the setup cell: your formula of 11.1, ready made.
# - `bytes_per_number` is the width of the activations that are sent.
# - With `recompute`, the layer keeps only its input (activation checkpointing, chapter 09): before its backward pass the forward pass runs once more, its all-reduces with it. Large models are often trained so, and the published runs of section 4 were.


# %% exercise="11.2"
def layer_seconds(
    b: int, s: int, h: int, p: int, rate: float, link: Link, *, recompute: bool = False, bytes_per_number: int = 2
) -> tuple[float, float]:
    """(seconds of computing, seconds of communicating) of one layer on one of p ranks, forward and backward."""
    ### BEGIN SOLUTION
    forward = 24 * b * s * h**2 + 4 * b * s**2 * h  # FLOPs, on all ranks together
    forwards = 2 if recompute else 1
    compute = (forwards + 2) * forward / (p * rate)  # the backward pass counts as two
    messages = 2 * forwards + 2  # g in each forward pass, f in the backward pass, around attention and MLP
    return compute, messages * all_reduce(link, bytes_per_number * b * s * h, p)
    ### END SOLUTION


# %% [markdown] hints="11.2"
# 1. Add up the last column of the table. How many forward passes' worth of FLOPs are forward and backward together, without recomputation, and with it? What share of that does one rank do?
# 2. Compute: 3 or 4 times `24 * b * s * h**2 + 4 * b * s**2 * h`, divided by `p * rate`. Communicate: 4 all-reduces, or 6 with recomputation, each of a whole tensor `[b, s, h]`, whatever `p` is.
# 3. `forward = 24 * b * s * h**2 + 4 * b * s**2 * h`; `compute = (4 if recompute else 3) * forward / (p * rate)`; `communicate = (6 if recompute else 4) * all_reduce(link, bytes_per_number * b * s * h, p)`; return both.

# %% check="11.2"
check("11.2", layer_seconds)

# %% [markdown]
# Your formula for GPT-3's layer (`h = 12288`, one sequence of 2048) on an A100 in a DGX, a node of 8 GPUs. (NVLink has 300 GB/s on paper. NCCL's rings reach 240 of them at best, and `a100.link(8)` counts on 195, which is closer to what messages of this size get.) Beyond 8 ranks the ring has to leave the node. `machine.link(p)` knows what it goes over then: a DGX has a network adapter for each GPU, so the ring crosses from node to node in as many places at once as it has ranks in a node.

# %%
a100 = MACHINES["A100 DGX"]


def by_ranks(machine, link_of, b=1, s=2048, h=12288):
    times = {p: layer_seconds(b, s, h, p, machine.rate, link_of(p)) for p in (1, 2, 4, 8, 16, 32)}
    rows = {f"p = {p}": {"compute": time[0], "communicate": time[1]} for p, time in times.items()}
    return rows, {f"p = {p}": used(sum(times[1]) / (p * sum(time)), p) for p, time in times.items()}


rows, notes = by_ranks(a100, a100.link)
viz.time_bars(rows, notes=notes, title="GPT-3's layer on A100s, nodes of 8 with a network adapter for each GPU")

# %% [markdown]
# And where all GPUs of a node share one adapter, as in a cheaper cluster:

# %%
one_adapter = Link(a100.between.alpha, a100.between.beta)
rows, notes = by_ranks(a100, lambda p: a100.link(p) if p <= 8 else one_adapter)
viz.time_bars(rows, notes=notes, title="the same with one network adapter for each node")

# %% [markdown]
# That is why `p` stays inside a node. A ring is as slow as its slowest link, and every layer waits for it four times in every step. Even where the adapters together are nearly as wide as NVLink, the latency of the network is paid in each of the $2(p-1)$ steps, and the same adapters are needed for what is better at waiting: pipeline parallelism sends once for many layers, data parallelism once a step (chapters 13 and 14).
#
# ## 4 · Does it hold?
#
# You shouldn't trust a cost model that has never been compared with a measurement, so let's compare. NVIDIA's papers list 28 times for GPTs on A100s: ten training runs with up to a trillion parameters ([Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), table 1), and five single layers and four iterations, each timed twice ([Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), tables 4 and 5). `tplab.cost` holds your two formulas, along with everything they leave out: norms, dropout and softmax, which wait for the GPU's memory, the output layer, the optimizer, and what later chapters add. First we'll count every matmul at the best rate that anyone has measured for one.

# %%
from tplab.cost import TERMS, Program, throughput, without
from tplab.course.exercises.ch11 import published
from tplab.memory import Layout

measured = published.published_rows()


def speeds(machine):
    """Predicted over published speed, for each of the 28 values."""
    return [row.predicted(machine) / row.published for row in measured]


ideal = speeds(without(a100, *TERMS))
print(f"too fast by {min(ideal) - 1:.0%} to {max(ideal) - 1:.0%}, by {sum(ideal) / len(ideal) - 1:.0%} on average")

# %% [markdown]
# Every single prediction is too fast. Where does a real GPU lose that time? Here are seven suspects. None of them needs a constant from these tables: they're either counted, or taken from [Calculon](https://github.com/calculon-ai/calculon), a published cost model.
#
# - **Matmul traffic.** A matmul also has to read its inputs and write its output, which takes as long as any other access to the GPU's memory.
# - **Wave quantization.** A GPU computes a matmul in tiles, one on each of its 108 multiprocessors. If there are 109 tiles, the last one runs alone while 107 multiprocessors wait.
# - **Bookkeeping.** Autograd sums `dy` for every bias gradient, copies the heads to another layout, and adds up the gradients of the micro-batches.
# - **Bandwidths.** Messages of this size reach 195 GB/s over NVLink, and element-wise kernels reach 90 % of the memory bandwidth.
# - **Kernel launches.** About 5 µs pass from one kernel to the next.
# - **Busy multiprocessors.** A collective that runs beside a matmul takes 15 % of the multiprocessors away from it.
#
# We'll add one after the other and watch the gap close.

# %%
rows, missing = [{"the model": "FLOPs and bytes at their best rates", **published.summary(ideal)}], list(TERMS)
while missing:
    term = missing.pop(0)
    rows.append({"the model": f"+ {term}", **published.summary(speeds(without(a100, *missing)))})
viz.table(rows, title="predicted over published speed, 28 values on A100s")

# %% [markdown]
# All 28 predictions end up within 10 % of what was measured, and they're 1 % off on average. The two largest parts of the gap belong to the matmuls themselves, which is why it pays to keep them large. Here is every row.

# %%
viz.against(
    {row.name: (100.0, 100 * speed) for row, speed in zip(measured, speeds(a100), strict=True)},
    unit="% of the published speed",
    title="28 published speeds on A100s, and the model",
)

# %% [markdown]
# <details><summary><b>Going deeper: where the model fails</b></summary>
#
# On V100s, the weak scaling of the first Megatron paper ([Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053), figure 5) comes out within 5 %. Its **strong scaling** (table 8) doesn't: with 1.2 billion parameters on 8 GPUs, the model predicts a speedup of 3.8, and the paper measured 2.98. The published speedups follow $a + b/p$ almost exactly, where $a$ is 24 % of the time on one GPU. So a quarter of that program's step didn't get any faster with more GPUs, but the model only finds 5 % that don't. It can't be bandwidth, because that part would grow with $p$. A year later, Megatron's kernels were fused and the same model ran 1.6 times as fast on one GPU, which is the speed that our model predicts. So the missing part is probably work of the older program that each rank repeated. We can't tell from the paper.
#
# On H100s, nobody has published a table with all the settings, so there the model gives you an estimate. Megatron-LM's README reports 47 % of the peak for GPT-3 on 96 H100s, and 42 % on 4,608. `tplab plan` finds layouts for which the model predicts 50 % and 47 %. Llama 3 405B reached 430 teraFLOP/s per GPU on 8,192 of them ([Dubey et al. 2024](https://arxiv.org/abs/2407.21783), table 4), and the prediction is a range from 381 to 523, because the paper doesn't say how its pipeline was interleaved.
#
# How good are other models? Calculon reports 3.7 % on average and 8.9 % at most on one of these tables. vTrain reports 8.4 % for single nodes and 14.7 % for clusters.
#
# </details>
#
# What do you do with a model like this? It's good enough to rule out bad layouts and to see what limits the good ones. If two layouts are closer than 10 %, measure both.

# %%
v100 = MACHINES["V100 DGX-2H"]
small = published.SHOEYBI_FIGURE_5[0].config


def v100_reaches(p):
    """FLOP/s of one of p V100s, by the model: batch 8, layers recomputed, nothing overlaps."""
    layout = Layout(tp=p, micro_batch=8, recompute="layers")
    return throughput(small, layout, v100, Program(overlap_input_gradient=False)).hardware


viz.against(
    {f"p = {p}": (speedup, p * v100_reaches(p) / v100_reaches(1)) for p, speedup in published.SHOEYBI_TABLE_8.items()},
    unit="times as fast as one GPU",
    title="where it fails: strong scaling of 1.2 billion parameters on V100s, in 2019",
)

# %% [markdown]
# ## 5 · While the sum travels
#
# Look at the backward pass of $Y = XA$ once more. With $dY$ in hand there are two products to do:
#
# $$dX = dY\,A^T \quad\text{(to be summed over the ranks)} \qquad\qquad dA = X^T\,dY \quad\text{(this rank's own)}$$
#
# f has to sum $dX$; the layers before this one wait for it. Nobody waits for $dA$ until the optimizer's step, and it needs nothing from $dX$. So: compute $dX$, *start* its all-reduce, compute $dA$ meanwhile, and wait for the sum only then.
#
# `dist.all_reduce(tensor, async_op=True)` starts and returns at once with a handle, a `Work`. The tensor belongs to the backend until `handle.wait()` has returned: until then it may be neither read nor written.
#
# **Predict.** $dX$ takes 5 ms, $dA$ 5 ms, the all-reduce of $dX$ 3 ms. How long is the backward pass with a blocking all-reduce, and how long if $dA$ is computed beside it? And if the all-reduce takes 8 ms: how long is it then, and which share of the communication is hidden?

# %% predict="11.c"
predict("11.c", blocking=13, beside=10, beside_with_8=13, share_with_8=0.625)


# %%
def sketch(*spans):
    """A drawing of what should happen, in milliseconds."""
    return [RankTrace(0, [Span(lane, name, start / 1e3, end / 1e3) for lane, name, start, end in spans])]


viz.overlap(
    {
        "blocking, 3 ms": sketch(
            ("compute", "dX", 0, 5), ("compute", "dA", 5, 10), ("communicate", "sum of dX", 10, 13)
        ),
        "beside, 3 ms": sketch(("compute", "dX", 0, 5), ("compute", "dA", 5, 10), ("communicate", "sum of dX", 5, 8)),
        "beside, 8 ms": sketch(("compute", "dX", 0, 5), ("compute", "dA", 5, 10), ("communicate", "sum of dX", 5, 13)),
    },
    title="as it should be",
)

# %% [markdown] task="11.3" title="A backward pass that does not wait" difficulty=3 minutes=20
# A column-parallel layer without bias, as one autograd function. `forward` is there. `weight` is this rank's shard `[m/p, h]`, stored as torch stores it, so $Y = X\,\text{weight}^T$. So `dw`, of the shape of `weight`, is the transpose of $dA$ above: $dY^T X$. (The check calls it dW.) Write `backward`.
#
# - f is part of this function: `dx` has to be summed over the ranks of `ctx.group`, in one all-reduce.
# - The order matters: compute `dx`, start its all-reduce, compute `dw`, wait. The check looks at the order in which things happen on each rank, not at the time they take.
# - Return one gradient for each argument of `forward`: `x`, `weight`, and `None` for `group`.


# %% exercise="11.3"
class LinearAsync(torch.autograd.Function):
    """y = x weightᵀ with f in front of it, and a backward pass that computes dw while the sum of dx travels.

    forward   x [.., h], weight [m/p, h] -> y [.., m/p]
    backward  dy [.., m/p] -> dx [.., h], summed over the group; dw [m/p, h]
    """

    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return x @ weight.T  # [.., m/p]

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        ### BEGIN SOLUTION
        dx = dy @ weight  # [.., h], this rank's part
        travelling = dist.all_reduce(dx, group=ctx.group, async_op=True)
        dw = dy.flatten(0, -2).T @ x.flatten(0, -2)  # [m/p, b·s] · [b·s, h] = [m/p, h]
        travelling.wait()
        return dx, dw, None
        ### END SOLUTION


# %% [markdown] hints="11.3"
# 1. Which of the two products has to be there before the all-reduce can start? Which one can be computed while it runs? Write down the shapes: `dy` is `[.., m/p]`, `weight` is `[m/p, h]`, `x` is `[.., h]`.
# 2. `dx = dy @ weight`; then `handle = dist.all_reduce(dx, group=ctx.group, async_op=True)`; then `dw`; then `handle.wait()`. For `dw`, make `dy` and `x` two-dimensional first: `dy.flatten(0, -2)` is `[b·s, m/p]`.
# 3. `dw = dy.flatten(0, -2).T @ x.flatten(0, -2)`, `[m/p, b·s]` times `[b·s, h]`; and `return dx, dw, None` after the wait.

# %% check="11.3"
check("11.3", LinearAsync)

# %% [markdown]
# Your function in the place of the layer of section 1, measured the same way:


# %%
def mine(x, weight):
    return LinearAsync.apply(x, weight, None)


yours = shortest(launch(one_layer, 2, args=(mine,)))
viz.overlap({"waiting": before, "yours": yours}, title="the layer of section 1, before and after")


# %%
def milliseconds(run):
    """Of rank 0's trace: how long it is, its communication, what of that is exposed, and the last product."""
    trace = run[0]
    products = [span for span in trace.lane("compute") if span.name == "mm"]
    return {
        "all of it [ms]": f"{1e3 * trace.duration:.1f}",
        "all-reduce under way [ms]": f"{1e3 * trace.seconds('communicate'):.1f}",
        "exposed [ms]": f"{1e3 * trace.exposed:.1f}",
        "hidden share": f"{trace.hidden_share:.0%}",
        "dA [ms]": f"{1e3 * (products[-1].end - products[-1].start):.1f}",
    }


viz.table([{"layer": name} | milliseconds(run) for name, run in (("waiting", before), ("yours", yours))])

# %% [markdown]
# Read the table with care. "Hidden" says that the rank computed meanwhile; it does not say that communication was free. On this machine the all-reduce is done by threads of the same cores that multiply, so beside each other both may take longer than alone, and the layer may gain less than the share suggests. (It also gains something that is no overlap: your function sums its own `dx` in place, where f had to make a copy first, the `copy_` of the picture.) On a GPU the same happens in a milder form: NCCL's kernels occupy
# some of the GPU's processors, and the messages use its memory.
#
# What would it hide on real links? The formulas say, for GPUs with NVLink and 8 ranks: for each column-parallel weight, the all-reduce of its input's gradient against the product beside it.

# %%
overlap_rows = []
for h in (1024, 2048, 4096, 8192, 12288):
    config = GPTConfig(num_layers=1, hidden_size=h, num_heads=h // 128, vocab_size=51200, seq_length=2048)
    row = {"h": h}
    for name in ("A100 DGX", "H100 DGX"):
        for pair in overlap_saving(config, MACHINES[name], micro_batch=4, tp=8):
            row[f"{name}, {pair.name}"] = f"{pair.share:.0%}"
    overlap_rows.append(row)
viz.table(
    overlap_rows, title="share of the input gradient's all-reduce that the weight's gradient can hide, p = 8, b = 4"
)

# %% [markdown]
# ## 6 · How large must a layer be?
#
# Compute grows with $h^2$, communication with $h$. So for each machine and each `p` there is a size from which on `p` GPUs are worth it: say, 80 % of their time is used. The efficiency of `p` ranks is
#
# $$E(h) = \frac{t(h, 1)}{p\; t(h, p)}$$

# %% [markdown] task="11.4" title="The smallest layer worth p ranks" difficulty=2 minutes=10
# `seconds(h, p)` is the time of a layer of hidden size `h` on `p` ranks: any formula, or a measurement. Return the smallest `h` at which `p` ranks reach the `efficiency`, among the multiples of `step` up to `most`. Return `None` if there is none. (`step` is there since `h` has to be divisible: whole heads for every rank.)
#
# The efficiency grows with `h`.


# %% exercise="11.4"
def smallest_hidden(seconds, p: int, efficiency: float = 0.8, step: int = 1024, most: int = 2**17) -> int | None:
    """The smallest multiple of `step`, up to `most`, at which p ranks reach the efficiency; None if there is none."""
    ### BEGIN SOLUTION
    for h in range(step, most + 1, step):
        if seconds(h, 1) / (p * seconds(h, p)) >= efficiency:
            return h
    return None
    ### END SOLUTION


# %% [markdown] hints="11.4"
# 1. What is the efficiency of a single size? Write that line first.
# 2. Go through the multiples of `step` from the smallest on, and return the first that is good enough. What is left to return when the loop ends?
# 3. `for h in range(step, most + 1, step)`: if `seconds(h, 1) / (p * seconds(h, p)) >= efficiency`, return `h`; after the loop return `None`.

# %% check="11.4"
check("11.4", smallest_hidden)

# %% [markdown]
# With your formula of 11.2, for 8 ranks at 80 %:


# %%
def smallest_on(machine, link, **options):
    def seconds(h, p):
        return sum(layer_seconds(4, 2048, h, p, machine.rate, link, **options))

    found = smallest_hidden(seconds, 8)
    return f"{found:,}" if found else "none up to 131,072"


h100 = MACHINES["H100 DGX"]
wires = {
    "its NVLink": lambda machine: machine.inside,
    "PCIe 5.0 x16": lambda machine: links.PUBLISHED["PCIe 5.0 x16"],
    "InfiniBand NDR, one adapter": lambda machine: links.PUBLISHED["InfiniBand NDR"],
}
viz.table(
    [
        {"smallest h for p = 8 at 80 %": name}
        | {wire: smallest_on(machine, link(machine)) for wire, link in wires.items()}
        for name, machine in MACHINES.items()
    ]
)

# %% [markdown]
# Two things to read from it. From left to right: on a slower link the same GPU needs a larger layer, about twice as large on a V100, up to seven times on an H100. From top to bottom, V100 to H100: GPUs have become faster by more than their links have, so a new generation needs larger layers for the same `p`, or a smaller `p` for the same layers. (H200: the chip and the links of the H100, with more memory.) What overlap hides is not counted here; it moves these sizes down.
#
# ## 7 · Break it
#
# The commonest mistake with an asynchronous collective is to forget the wait. Below is your function without it; everything else is right.
#
# **Predict.** Is an error raised? Is `dw` right? Can you rely on `dx` when it is read at once (`dx_right`)?

# %% predict="11.d"
predict("11.d", error=False, dw_right=True, dx_right=False)

# %%
started = []  # the handles, so that nothing ends before its time


class NeverWaits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return x @ weight.T

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = dy @ weight
        started.append(dist.all_reduce(dx, group=ctx.group, async_op=True))
        dw = dy.flatten(0, -2).T @ x.flatten(0, -2)
        return dx, dw, None


def read_at_once(lateness):
    """The share of dx that is the sum when it is read at once, for each time by which rank 1 comes late."""
    torch.set_num_threads(1)
    x = torch.randn(TOKENS, HIDDEN, device=device(), requires_grad=True)
    weight = torch.randn(64, HIDDEN, device=device(), requires_grad=True)
    dy = torch.randn(TOKENS, 64, device=device())
    shares = []
    for late in lateness:
        found = []
        for function in (NeverWaits, LinearAsync):
            x.grad = weight.grad = None
            dist.barrier()
            if dist.get_rank() == 1:
                time.sleep(late)
            function.apply(x, weight, None).backward(dy)
            found.append(x.grad.clone())
        started.pop().wait()  # in the end, so that nothing is under way when the rank ends
        shares.append((found[0] == found[1]).double().mean().item())
    return shares


lateness = (0.0, 0.02, 0.2)
shares = launch(read_at_once, 2, args=(lateness,))
viz.table(
    [
        {"rank 1 comes late by": f"{1e3 * late:.0f} ms"}
        | {f"rank {rank}: dx is the sum in": f"{shares[rank][i]:.1%} of its elements" for rank in (0, 1)}
        for i, late in enumerate(lateness)
    ]
)

# %% [markdown]
# No error, and no warning. How much of the sum had come when `dx` was read depends on how long $dA$ kept the rank busy, on the size of the message, on the machine, and on how late the other rank was. Where all goes well the sum is there in time, today; a rank that has to wait for the other, as rank 0 in the last row, returns its own part and goes on with it. What the check of 11.3 says of this function:

# %%
with show_failure():
    check("11.3", NeverWaits)

# %% [markdown]
# The record knows that the all-reduce was started, and that nobody waited.

# %%
symptoms(11)

# %% [markdown]
# ## 8 · Measure it
#
# First what was sent: one transformer layer of chapter 10 on two ranks, as recorded, against four all-reduces of `b·s·h` numbers. Then how long it takes, next to two predictions. Your formula gets this machine's own figures: `measure_machine` multiplies large matrices for the rate, and fits $\alpha$ and $\beta$ to messages, on two ranks at once. The other prediction is **calibrated**: `measure_kernels` runs each kernel of the layer by itself, at its real size, and an all-reduce between two matmuls.

# %%
b, s, h = 2, 256, 512


def one_core_machine():
    torch.set_num_threads(1)
    return measure_machine(rounds=3)


def kernels_of_layer(p):
    torch.set_num_threads(1)
    config = GPTConfig(num_layers=1, hidden_size=h, num_heads=8, vocab_size=512, seq_length=s, dropout=0.0)
    return measure_kernels(config, b, p)


def run_layer():
    torch.set_num_threads(1)
    layer = ParallelTransformerLayer(h, 8, device=device())
    x = torch.randn(b, s, h, device=device(), requires_grad=True)
    seconds = []
    for _ in range(6):
        dist.barrier()
        began = links.now()
        with record() as section:
            layer(x).sum().backward()
        seconds.append(links.now() - began)
    return section.totals().get("all_reduce", (0, 0)), min(seconds)


here = launch(one_core_machine, 2)[0]
rows = []
for p in (1, 2):
    (calls, size), _ = results = launch(run_layer, p)[0]
    compute, communicate = layer_seconds(b, s, h, p, here.rate, here.inside, bytes_per_number=4)
    kernels = launch(kernels_of_layer, p, args=(p,))[0]
    calibrated = sum(kernels.matmuls + kernels.elementwise + kernels.attention) + kernels.summed.seconds(calls, size)
    rows.append(
        {
            "p": p,
            "all-reduces": calls,
            "bytes": f"{size:,}",
            "4·b·s·h·4": f"{4 * b * s * h * 4 if p > 1 else 0:,}",
            "measured [ms]": f"{1e3 * results[1]:.1f}",
            "your formula [ms]": f"{1e3 * (compute + communicate):.1f}",
            "calibrated [ms]": f"{1e3 * calibrated:.1f}",
        }
    )
print(f"a core of this machine: {here.rate / 1e9:.0f} GFLOP/s")
print(f"from rank to rank: {here.inside.alpha * 1e6:.0f} µs and {here.inside.bandwidth / 1e9:.1f} GB/s")
viz.table(rows)

# %% [markdown]
# The bytes agree, down to the last one. Your formula is too fast, because it only knows matmuls at the best rate that any of them reached, and it ignores everything else. The calibrated prediction comes much closer. It also knows that on a CPU, an all-reduce has to share the cores with the matmuls, which costs far more than sending the bytes. On our machine with two cores, it's usually within 10 % of the capstone's real steps (`benchmarks/calibration.py`). Whatever else your computer is doing changes all of these numbers.
#
# ## 9 · In the wild
#
# **Megatron-Core**, `megatron/core/tensor_parallel/layers.py`: `LinearWithGradAccumulationAndAsyncCommunication` is your `LinearAsync`, with a bias, with the weight's gradient added straight into the buffer `main_grad` (`gradient_accumulation_fusion`), and with a branch for sequence parallelism (chapter 12). `ColumnParallelLinear` works so whenever `p > 1` and sequence parallelism is off: the flag is called `allreduce_dgrad`. Read its comments: they
# ask for `CUDA_DEVICE_MAX_CONNECTIONS=1`. On a GPU, starting is only asking: the all-reduce and the product are put into two queues, and without that setting the GPU may begin with the product and leave the all-reduce for later. The order on the CPU side, which our check looks at, is necessary there, but not enough.
#
# What cannot be hidden so is g: the forward pass needs the sum at once. `--tp-comm-overlap` (Megatron with Transformer Engine) and PyTorch's *async tensor parallelism* cut the product and the communication into pieces instead, and send one piece while the next is computed. In PyTorch `torch.compile` does it where `torch._inductor.config._micro_pipeline_tp` is set, for groups given to
# `torch.distributed._symmetric_memory.enable_symm_mem_for_group` (torch 2.13 calls that function deprecated, yet the compiler's pass still asks for it), with operators such as `fused_all_gather_matmul` and `fused_matmul_reduce_scatter`. Both want the collectives of sequence parallelism, which is where the next chapter goes.
#
# **Profilers.** What `trace_rank` shows is cut down from `torch.profiler.profile`, which writes the same format itself (`export_chrome_trace`), a file for each rank. NVIDIA's Nsight Systems shows the same from below.
#
# **Cost models.** NCCL chooses its algorithm with a table of $\alpha$ and $\beta$ (`src/graph/tuning.cc`). The command `tplab plan` of this course searches all layouts of a cluster with the modules of section 4.
#
# ## 10 · Recap
#
# 1. A ring of `p` ranks takes $p-1$ steps of $\alpha + \beta N/p$ to reduce-scatter or to all-gather $N$ bytes, and twice that to all-reduce.
# 2. A layer computes $3\,(24bsh^2 + 4bs^2h)/p$ FLOPs on each rank and sends four all-reduces of `b·s·h` numbers. Compute shrinks with `p`, messages don't; compute grows with $h^2$, messages with `h`. So tensor parallelism is for large layers, few ranks, fast links: inside a node.
# 3. Of the four, f's two can be hidden: start the sum of $dX$, compute $dA$, wait. g's two can't, so far. Memory: as before.
# 4. Started is not finished. Until `wait()` has returned, the tensor belongs to the backend.
# 5. Next: the all-reduce taken apart. Chapter 12 puts its reduce-scatter and its all-gather at different places of the layer: the same bytes, and less memory.

# %% [markdown]
# ## Your library so far
#
# It now knows what its own messages cost, and it has a linear layer that hides some of them.

# %%
from tplab.course import library

library(11)
