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
# In every training step, your GPT with $L$ layers sends $4L + 2$ large messages, and every rank sits idle during each one. On a slow link, the ranks spend more time waiting than computing. In this chapter, you'll hide half of the waits with a few lines of code. And before you rent a single GPU, you'll be able to tell how many of them a layer can keep busy.
#
# You need chapters 04 and 05, and exercise 1.4. About 75 minutes.

# %% tags=["setup"]
import math
import time

import torch
import torch.distributed as dist

from tplab import device, launch, record, viz
from tplab.collectives import Link, links
from tplab.cost import MACHINES
from tplab.cost.backward import mlp_backward
from tplab.cost.collective import all_reduce
from tplab.course import check, predict, symptoms
from tplab.gpt import ParallelGPT
from tplab.memory import GPTConfig
from tplab.runtime import slow_link
from tplab.tensor import copy_to_region
from tplab.trace import trace_rank

# %% [markdown]
# ## Two ranks, one wait
#
# Let's watch two ranks wait. They run a single column-parallel layer, forward and backward, on 2,048 tokens with $h = 1024$. `trace_rank` notes when each rank computes and when it communicates. The messages travel over a **slow link**: real messages, but each of them is declared finished only when a link with 400 MB/s would have finished it.


# %%
def trace_layer(layer, bandwidth):
    torch.set_num_threads(1)  # one core per rank
    x = torch.randn(2048, 1024, requires_grad=True)  # [b·s, h]
    weight = torch.randn(256, 1024, requires_grad=True)  # [m/p, h]: this rank's half of 512 columns
    dy = torch.randn(2048, 256)  # [b·s, m/p]
    traces = []
    for _ in range(5):
        dist.barrier()
        with slow_link(bandwidth=bandwidth), trace_rank() as trace:
            layer(x, weight).backward(dy)
        traces.append(trace)
    return traces


def run_layer(layer, bandwidth=0.4e9):  # the fastest of five runs, because other programs disturbed it least
    runs = zip(*launch(trace_layer, 2, args=(layer, bandwidth), backend="gloo"), strict=True)
    return min(runs, key=lambda traces: max(trace.duration for trace in traces))


def waiting(x, weight):
    return copy_to_region(x) @ weight.T  # f and the matmul, as in chapter 04


before = run_layer(waiting)
viz.overlap({"chapter 04": before}, title="one column-parallel layer, forward and backward, on two ranks")

# %% [markdown]
# The first `mm` is the forward pass. The other two are the backward pass: one computes the gradient of the weight, and the other computes the gradient of $x$, which f has to sum. During the red part, the rank has nothing to do. Time that's spent like this is **exposed**. If the rank computed something else in the meantime, the message would be **hidden** behind it.
#
# **Predict.** Suppose that each matmul of the backward pass takes 5 ms, and the message takes 3 ms. How long does the backward pass take if the rank waits for the message as soon as it's sent? How long does it take if the message travels *while* the rank computes the gradient of the weight? And how long if the message takes 8 ms instead?

# %% predict="11.a"
predict("11.a", waiting=13, hidden=10, hidden_with_8=13)

# %% [markdown] task="11.1" title="Put the backward pass in order" difficulty=2 minutes=10
# Now let's take a whole MLP, $Z = XA$ and $Y = ZB$. (We leave out the GELU.) Its backward pass starts from $dY$, and each of its four matmuls takes 5 ms. Only $dX$ has to be summed over the ranks, and the message takes 8 ms.
#
# | step | needs |
# |---|---|
# | `dZ` | $dY$ |
# | `dB` | $dY$ (and $Z$) |
# | `dX` | `dZ` |
# | `dA` | `dZ` (and $X$) |
# | `start` (sends $dX$; takes no time) | `dX` |
# | `wait` (blocks until the sum of $dX$ has arrived) | `start` |
#
# Return all six steps in an order that takes as little time as possible.


# %% exercise="11.1"
def backward_order() -> list[str]:
    """Return "dZ", "dB", "dX", "dA", "start" and "wait" in the fastest order."""
    ### BEGIN SOLUTION
    return ["dZ", "dX", "start", "dB", "dA", "wait"]
    ### END SOLUTION


# %% [markdown] hints="11.1"
# 1. Which steps does the message depend on? And which steps does no other step in this table need?
# 2. The message can start after 10 ms. From then on, it takes 8 ms. How many milliseconds of work are left for that time, and which work is it?
# 3. Nothing waits for `dB` and `dA` until the optimizer's step. So run `dZ` and `dX` first, then `start`. Then run `dB` and `dA`, and `wait` comes last.

# %% check="11.1"
check("11.1", backward_order)

# %% [markdown]
# Move the slider `step` to go through your order, step by step. Then slow the wire down with the other slider. From which message on do you see red?


# %% tags=["explore"]
def on_the_clock(message):
    return viz.clock(mlp_backward(backward_order(), message=message), kept="dY")


viz.play(on_the_clock, message=(2, 4, 8, 16, 32), start={"message": 8, "step": 4}, seconds=2)

# %% [markdown]
# You've just hidden a message that takes *longer* than any of the matmuls. The trick was to look for work that nobody is waiting for. The price is memory: as long as `dB` is postponed, the rank has to keep $dY$.
#
# ## Send while you multiply
#
# Autograd runs the backward pass layer by layer, so let's hide the message of a single layer first. With `async_op=True`, `dist.all_reduce` only starts the sum. It immediately returns a request with a method `wait()`. Until `wait()` has returned, the tensor belongs to the backend, so you must neither read it nor write to it.

# %% [markdown] task="11.2" title="A backward pass that doesn't wait" difficulty=3 minutes=12
# Here's a column-parallel layer without bias, as a single autograd function. `forward` is given. `weight` is this rank's shard, `[m/p, h]`, so $Y = X W^\top$ for this rank's columns of $Y$. Write `backward`.
#
# - f is part of this function, so `dx` has to be summed over the ranks of `ctx.group`, in a single all-reduce.
#
# - The message should travel while the rank computes `dw`. The check looks at the order of the matmuls, the start and the wait. It doesn't measure any times.
#
# - Return one gradient per argument of `forward`, and `None` for `group`.


# %% exercise="11.2"
class LinearAsync(torch.autograd.Function):
    """x [.., h], the same on every rank, and weight [m/p, h] -> y [.., m/p]. Backward computes dw while dx is being summed."""

    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return x @ weight.T  # [.., m/p]

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        ### BEGIN SOLUTION
        dx = dy @ weight  # [.., h], this rank's term of the sum
        request = dist.all_reduce(dx, group=ctx.group, async_op=True)
        dw = dy.flatten(0, -2).T @ x.flatten(0, -2)  # [m/p, b·s] · [b·s, h] = [m/p, h]
        request.wait()
        return dx, dw, None
        ### END SOLUTION


# %% [markdown] hints="11.2"
# 1. Which of the two matmuls has to be finished before the all-reduce can start? Which one can be computed while it's running? Write down the shapes: `dy` is `[.., m/p]`, `weight` is `[m/p, h]`, and `x` is `[.., h]`.
# 2. Compute `dx = dy @ weight`. Then `request = dist.all_reduce(dx, group=ctx.group, async_op=True)`. Compute `dw`, and call `request.wait()` after that. For `dw`, make `dy` and `x` two-dimensional first: `dy.flatten(0, -2)` is `[b·s, m/p]`.
# 3. `dw = dy.flatten(0, -2).T @ x.flatten(0, -2)` multiplies `[m/p, b·s]` by `[b·s, h]`. After the wait, return `dx, dw, None`.

# %% check="11.2"
check("11.2", LinearAsync)

# %% [markdown]
# Here's the layer from the beginning again, next to yours.


# %%
def yours(x, weight):
    return LinearAsync.apply(x, weight, None)


after = run_layer(yours)
viz.overlap({"chapter 04": before, "yours": after}, title="the same layer, before and after")


# %%
def milliseconds(link, layer, traces):
    return {"link": link, "layer": layer, "total [ms]": f"{1e3 * max(trace.duration for trace in traces):.0f}",
            "waits [ms]": f"{1e3 * max(trace.exposed for trace in traces):.0f}"}  # fmt: skip


viz.table([
    milliseconds("400 MB/s", "chapter 04", before), milliseconds("400 MB/s", "yours", after),
    milliseconds("this machine's", "chapter 04", run_layer(waiting, math.inf)),
    milliseconds("this machine's", "yours", run_layer(yours, math.inf)),
])  # fmt: skip

# %% [markdown]
# The last two rows are the honest ones: there, the messages are as fast as this machine can send them. Between two processes of one machine, sending means copying, and the same cores do the copying *and* the matmuls. So less waiting doesn't have to mean that you're faster there. A GPU's links work on their own, like the slow link above, although NCCL still keeps a few of the GPU's multiprocessors busy.
#
# ## What does a wire cost?
#
# Your GPT has other messages, too. Let's count all of them in a step of a model with three layers.


# %%
def messages_of_a_step(layers=3, b=2, s=16, h=32):
    config = GPTConfig(num_layers=layers, hidden_size=h, num_heads=4, vocab_size=256, seq_length=s, dropout=0.0)
    model, ids = ParallelGPT(config, device=device()), torch.zeros(b, s, dtype=torch.long, device=device())
    with record() as section:
        model(ids, targets=ids).backward()
    sizes = [collective.bytes // 4 for collective in section]
    return [{"elements": f"{size / (b * s):.3g}·b·s", "messages": sizes.count(size)} for size in sorted({*sizes})]


viz.table(launch(messages_of_a_step, 2)[0], title="all-reduces in a step of a GPT with three layers and h = 32")

# %% [markdown]
# Each block sends $b \cdot s \cdot h$ elements once in each direction, no matter whether it's an MLP or attention. That makes four messages per layer. The embedding and the output layer add one each. All the rest belongs to the loss, which only sends a few elements per token.
#
# How long does such a message take? In chapter 01, you found that a ring all-reduce takes $2(p-1)$ steps, each of which takes $\alpha + \beta N / p$. Here are the figures of some links, per GPU and direction:

# %%
viz.table([{"link": name, "alpha [µs]": f"{1e6 * link.alpha:.1f}", "GB/s": f"{link.bandwidth / 1e9:.0f}"}
           for name, link in links.PUBLISHED.items()],
          title="NVLink and PCIe connect the GPUs of a machine; InfiniBand connects machines")  # fmt: skip

# %% [markdown]
# **Predict.** In GPT-3, a message contains $2048 \cdot 12288$ elements of 2 bytes for each sequence, or 50,331,648 bytes. Suppose that 8 ranks all-reduce it over NVLink 3. How many steps does the ring need, one after the other, and how many microseconds do they take in total?

# %% predict="11.b"
predict("11.b", steps=14, microseconds=341.2)

# %% [markdown] task="11.3" title="The time of a layer" difficulty=3 minutes=15
# How long does a rank compute in one transformer layer, forward and backward, and how long does it communicate? Return both times, in seconds.
#
# - The layer is the one from chapter 10, with ordinary attention and an MLP of $4h$. Count its matmuls and nothing else. A matmul of `[m, k]` and `[k, n]` takes $2mkn$ **FLOPs** (floating-point operations), and the rank manages `rate` FLOPs per second. Don't forget the two matmuls inside of attention, and count all of their elements, even those that a causal mask hides.
#
# - `all_reduce(link, size, p)` returns how long a ring all-reduce of `size` bytes takes. An element has `bytes_per_number` bytes. Nothing is hidden.
#
# - With `recompute`, the layer only keeps its input (chapter 09), so its whole forward pass runs a second time, including the messages.


# %% exercise="11.3"
def layer_seconds(
    b: int, s: int, h: int, p: int, rate: float, link: Link, *, recompute: bool = False, bytes_per_number: int = 2
) -> tuple[float, float]:
    """Return how many seconds one of p ranks computes and communicates in a layer, forward and backward."""
    ### BEGIN SOLUTION
    weights = 24 * b * s * h**2  # Q, K and V: 6, output: 2, MLP: 8 + 8
    scores = 4 * b * s**2 * h  # Q Kᵀ and P V
    forwards = 2 if recompute else 1
    compute = (forwards + 2) * (weights + scores) / (p * rate)  # two matmuls backward for each one forward
    messages = 2 * forwards + 2  # g twice in each forward pass, f twice in the backward pass
    return compute, messages * all_reduce(link, bytes_per_number * b * s * h, p)
    ### END SOLUTION


# %% [markdown] hints="11.3"
# 1. List the matmuls of the forward pass with their shapes: the one for Q, K, and V, the scores, the weighted sum of the values, the output of attention, and two for the MLP. For each matmul in the forward pass, how many are there in the backward pass? And what happens to all of these if p ranks share the layer?
# 2. The four matmuls with weights take $6bsh^2$, $2bsh^2$, $8bsh^2$ and $8bsh^2$ FLOPs. The two inside of attention take $2bs^2h$ each. The backward pass takes twice as many. Without recomputation, there are four messages (g in the forward pass, f in the backward pass, in both blocks), and a message has $b \cdot s \cdot h$ elements for every p.
# 3. `forward = 24 * b * s * h**2 + 4 * b * s**2 * h`, `compute = (4 if recompute else 3) * forward / (p * rate)`, and `communicate = (6 if recompute else 4) * all_reduce(link, bytes_per_number * b * s * h, p)`.

# %% check="11.3"
check("11.3", layer_seconds)

# %% [markdown]
# What does your formula say about H100s? The percentages tell how much of the GPUs' time is spent computing. Find out on which links it pays off to share a layer among 8 GPUs. (A DGX connects only 8 GPUs by NVLink, so $p = 16$ and 32 are hypothetical there, but we'll meet a machine with 72.)


# %% tags=["explore"]
def bars(link, h):
    rows, notes = {}, {}
    for p in (1, 2, 4, 8, 16, 32):
        compute, communicate = layer_seconds(1, 2048, h, p, MACHINES["H100 DGX"].rate, links.PUBLISHED[link])
        rows[f"p = {p}"] = {"computes": compute, "waits": communicate}
        notes[f"p = {p}"] = f"{compute / (compute + communicate):.0%}"
    return viz.time_bars(rows, notes=notes, title=f"a layer with h = {h:,} on H100s and {link}, s = 2048, b = 1")


viz.explore(bars, link=("NVLink 4", "PCIe 5.0 x16", "InfiniBand NDR"), h=(12288, 2048, 4096, 8192, 16384))

# %% [markdown]
# Whenever you double $p$, the solid part is cut in half, but the hatched part doesn't shrink at all. Did you try InfiniBand? If a single adapter connected the 8 GPUs, they'd spend more than two thirds of their time waiting. That's why tensor parallelism usually stays within a machine.
#
# ## How wide does a layer have to be?
#
# To keep its GPUs busy, should a layer be larger, or should the batch?
#
# **Predict.** Neglect the latency and the two matmuls inside of attention. By what factor does the ratio of waiting to computing change if you double $b$? And by what factor if you double $h$?

# %% predict="11.c"
predict("11.c", double_b=1, double_h=0.5)

# %% [markdown]
# A larger batch doesn't help at all! Both times double, so the ratio stays the same. Only a wider layer helps, because the FLOPs grow with $h^2$ and the messages grow with $h$. So for any machine and any $p$, there's a width above which splitting a layer pays off.

# %% [markdown] task="11.4" title="How wide is wide enough?" difficulty=2 minutes=8
# The efficiency $E$ is the share of its time that a rank spends computing. Return the smallest $h$ at which $p$ ranks reach this efficiency, on GPUs with `rate` FLOPs per second and links with `bandwidth` bytes per second and direction. A fraction is fine.
#
# Use the same simplifications: no latency, no matmuls inside of attention, no recomputation, and 2 bytes per element. Take a pen and a piece of paper, because the code is a single line.


# %% exercise="11.4"
def smallest_width(p: int, rate: float, bandwidth: float, efficiency: float = 0.8) -> float:
    """Return the smallest hidden size at which p ranks spend this share of their time computing."""
    ### BEGIN SOLUTION
    return 2 / 9 * (p - 1) * rate / bandwidth * efficiency / (1 - efficiency)
    ### END SOLUTION


# %% [markdown] hints="11.4"
# 1. Write down the compute time and the communication time, and leave out the terms that we neglect. Divide one by the other. What cancels?
# 2. A rank computes for $72\,bsh^2 / (pR)$ seconds, and communicates for $4 \cdot 2\,\frac{p-1}{p} \cdot 2bsh / B$ seconds. So the ratio of waiting to computing is $w = \frac{2}{9}(p-1)\frac{R}{Bh}$. The efficiency is $E = 1/(1 + w)$. Solve for $h$.
# 3. Return `2 / 9 * (p - 1) * rate / bandwidth * efficiency / (1 - efficiency)`.

# %% check="11.4"
check("11.4", smallest_width)

# %%
rows = []
for name, link, p in (("A100 DGX", "NVLink 3", 8), ("H100 DGX", "NVLink 4", 8), ("H100 DGX", "InfiniBand NDR", 8),
                      ("B200 DGX", "NVLink 5", 8), ("GB200 NVL72", "NVLink 5", 8), ("GB200 NVL72", "NVLink 5", 72)):  # fmt: skip
    machine, bandwidth = MACHINES[name], links.PUBLISHED[link].bandwidth
    estimated = any(source.startswith("estimate") for source in machine.sources.values())
    rows.append({"machine": name, "TFLOP/s": f"{machine.rate / 1e12:,.0f}" + " (estimate)" * estimated, "link": link,
                 "p": p, "smallest h for 80 %": f"{smallest_width(p, machine.rate, bandwidth):,.0f}"})  # fmt: skip
viz.table(rows)

# %% [markdown]
# From one generation to the next, GPUs have become faster by more than their links have, so the same $p$ needs wider layers. A rack with 72 GPUs behind NVLink lets you choose $p = 72$, but we don't know of any model with a layer that wide. (Peak rates come from data sheets. The rates in the table are what large matmuls were measured to reach, except where it says "estimate".)
#
# <details><summary>Going deeper: a switch that adds</summary>
#
# In a ring, each GPU sends $2\frac{p-1}{p}N$ bytes. Since Hopper, NVIDIA's NVSwitch has been able to do the additions itself. This feature is called NVLS or NVLink SHARP. Each GPU sends its $N$ bytes to the switch once. The switch adds them up, and each GPU is responsible for passing on $1/p$ of the sum, so a GPU only sends $(1 + 1/p)N$ bytes. For $p = 8$, that's 1.125 $N$ instead of 1.75 $N$.
#
# In practice, part of the gain is lost in the switch. On 8 H100s, users measured an all-reduce at 211 GB/s with a ring and 275 GB/s with NVLS, and on 8 B300s at 397 and 483 GB/s (NVIDIA/nccl issue 2140, April 2026). That's 1.3 and 1.2 times as fast, so a layer may be about a fifth narrower. `tplab.cost` knows this algorithm, and its times are within 4 % of these measurements. NCCL's cost formula for it includes a fixed latency of 25 µs, so other algorithms still win for small messages.
#
# </details>
#
# ## Does it hold?
#
# You shouldn't trust a cost model that nobody has compared with measurements. NVIDIA's papers report how long a step of a GPT takes on A100s, for 28 different settings ([Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), table 1; [Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), tables 4 and 5). Your two formulas alone would be too fast for each of them, so `tplab.cost` adds what they leave out, such as norms and the time between two kernels.

# %%
from tplab.course.exercises.ch11 import published

viz.against({row.name: (100.0, 100 * row.predicted(MACHINES["A100 DGX"]) / row.published)
             for row in published.published_rows()},
            unit="% of the published speed", title="28 published speeds on A100s, and the model")  # fmt: skip

# %% [markdown]
# All predictions are within 10 % of the measurements. That's good enough to rule out bad layouts, but if two layouts are closer than that, measure both.
#
# <details><summary>Going deeper: where the time goes, and where the model fails</summary>
#
# The model adds seven terms. None of them was fitted to these tables; they're either counted, or taken from [Calculon](https://github.com/calculon-ai/calculon), a published cost model.
#
# - **Matmul traffic.** A matmul also reads its inputs and writes its output.
# - **Wave quantization.** An A100 computes a matmul in tiles, one per multiprocessor, and it has 108 multiprocessors. If there are 109 tiles, the last one runs alone.
# - **Ring bandwidth.** Messages of this size reach 195 of NVLink's 300 GB/s.
# - **Memory bandwidth.** Element-wise kernels reach 90 % of it.
# - **Busy multiprocessors.** A collective beside a matmul takes 15 % of them away.
# - **Kernel launches.** There's a gap of about 5 µs between one kernel and the next.
# - **Bookkeeping.** Autograd sums `dy` for each bias, copies heads to another layout, and adds up gradients.
#
# On V100s, the model fails: in 2019, Megatron's 1.2 billion parameters ran 2.98 times as fast on 8 GPUs as on one ([Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053), table 8), but the model predicts 3.8. About a quarter of that program's step didn't get any faster with more GPUs. For H100s, nobody has published a table with all the settings, so its times there are estimates.
#
# </details>
#
# ## Fix it
#
# The function below averages buffers of gradients over all ranks. In October 2022, the two lines of its loop went into the translation toolkit OpenNMT-py, because `async_op=True` made training faster. In January 2023, a user pointed at them. A maintainer wasn't sure that this was a bug. After all, nothing ever failed. In March, somebody reported that a model that was trained on several GPUs got worse translations than one from a single GPU. Two days later, the first comparison proved the user right, and `async_op` was switched off again (OpenNMT/OpenNMT-py issues 2295 and 2335, pull request 2339).
#
# **Predict.** Rank 0 has a 2 in its buffer, and rank 1 has a 6. Suppose that rank 0 divides by 2 just *before* its buffer is sent, and rank 1 divides *after* the sum has arrived. Which numbers do the two ranks end up with? Does anything raise an error?

# %% predict="11.d"
predict("11.d", rank_0=7, rank_1=3.5, error=False)


# %%
def divided_too_early(seconds):
    buffer = torch.full((1000,), 2.0 + 4 * dist.get_rank())
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(seconds)  # rank 1 comes late
    request = dist.all_reduce(buffer, async_op=True)
    buffer.div_(2)
    request.wait()  # only so that nothing is under way when the rank ends
    return buffer[0].item()


viz.table([
    {"rank 1 comes late by": f"{1e3 * seconds:.0f} ms"}
    | dict(zip(("rank 0 has", "rank 1 has"), launch(divided_too_early, 2, args=(seconds,), backend="gloo"), strict=True))
    for seconds in (0.0, 0.0, 0.0, 0.5)
], title="the mean of 2 and 6")  # fmt: skip

# %% [markdown] task="11.5" title="Fix it: divided too early" difficulty=2 minutes=6
# The quick fix was to wait for each message right away. You can do better: fix the function so that *all* buffers travel at the same time.
#
# Each buffer should end up with the mean over the ranks of `group`, in place. The check runs your function with messages that arrive at the last possible moment.


# %% exercise="11.5"
def average_buffers(buffers, group=None):
    """Replace each of these contiguous tensors by its mean over the ranks of `group`."""
    p = dist.get_world_size(group)
    ### BEGIN SOLUTION
    requests = [dist.all_reduce(buffer, group=group, async_op=True) for buffer in buffers]
    for request, buffer in zip(requests, buffers, strict=True):
        request.wait()
        buffer.div_(p)
    ### BROKEN
    # for buffer in buffers:
    #     dist.all_reduce(buffer, group=group, async_op=True)
    #     buffer.div_(p)
    ### END SOLUTION


# %% [markdown] hints="11.5"
# 1. Who owns a buffer between the start of its all-reduce and the end of `wait()`? What does `dist.all_reduce` return with `async_op=True`, and where does the function keep it?
# 2. If the loop waits for a message before it starts the next one, only one message is under way at a time. So you need two loops. Which steps belong into the first one?
# 3. Start all of them with `requests = [dist.all_reduce(buffer, group=group, async_op=True) for buffer in buffers]`. In a second loop over `zip(requests, buffers)`, call `request.wait()`, and then `buffer.div_(p)`.

# %% check="11.5"
check("11.5", average_buffers)

# %%
symptoms(11)

# %% [markdown]
# ## In the wild
#
# <details><summary>Going deeper: Megatron-Core, CUDA_DEVICE_MAX_CONNECTIONS, async TP, Perfetto</summary>
#
# - **Megatron-Core** has your `LinearAsync` in `megatron/core/tensor_parallel/layers.py`, where it's called `LinearWithGradAccumulationAndAsyncCommunication`. It has a bias, it adds the weight's gradient straight into a buffer, and it can do chapter 12's sequence parallelism, too.
#
# - **Which one is first?** On a GPU, the all-reduce and the matmul go into two queues, and the GPU may start the matmul first. Then the matmul occupies all multiprocessors, and the message comes too late. In older versions, Megatron allocated a tensor with a single element and added 1 to it. Its only purpose was to delay the matmul by 3 µs. Later, `CUDA_DEVICE_MAX_CONNECTIONS=1` replaced this trick, because it makes the GPU start kernels in the order of the program. The setting is only about speed, and only about GPUs before Blackwell (verl pull request 6976, July 2026). FSDP2 wants the opposite, namely one connection per stream (torchtitan pull request 4508, September 2026).
#
# - **What about g?** The next line needs its sum, so there's no other work to hide it behind. *Async tensor parallelism* cuts the matmul itself into slices, and sends one slice while it computes the next. Megatron has `--tp-comm-overlap` for it, and PyTorch has operators such as `fused_all_gather_matmul`. Both build on chapter 12.
#
# - **Perfetto.** `tplab.trace.save_chrome_trace("layer.json", before)` writes a trace as a file. Drop the file on [ui.perfetto.dev](https://ui.perfetto.dev) to zoom in. The page reads it in your browser, so nothing leaves your machine.
#
# </details>
#
# ## Your library so far
#
# Your library knows what its messages cost, and it has a linear layer that sends while it multiplies.

# %%
from tplab.course import library

library(11)

# %% [markdown]
# You've hidden f's messages. But g's messages are still exposed, because the next line needs the sum. Or does it? Halfway through a ring all-reduce, there's a moment when every rank already has exactly what it needs.
