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
# In every training step, your GPT with $L$ layers sends $4L + 2$ large messages, and every rank sits idle during each of them. On a slow link, the ranks spend more time waiting than computing. In this chapter, you'll learn how to hide half of these messages behind a matmul, with just a few lines of code. You'll also learn to predict how many GPUs a layer can keep busy, before you rent a single one.
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
# Let's watch two ranks wait. Both ranks run the forward and backward passes of a single column-parallel layer, on 2,048 tokens with $h = 1024$. `trace_rank` records when each rank computes and when it communicates. The ranks send real messages, but we pretend that these messages travel over a **slow link** with 400 MB/s. So a message doesn't count as finished until such a link would have delivered it.


# %%
def trace_layer(layer, bandwidth):
    torch.set_num_threads(1)  # one core per rank
    x = torch.randn(2048, 1024, requires_grad=True)  # [b·s, h]
    weight = torch.randn(256, 1024, requires_grad=True)  # [m/p, h]: half of 512 columns
    dy = torch.randn(2048, 256)  # [b·s, m/p]
    traces = []
    for _ in range(5):
        dist.barrier()
        with slow_link(bandwidth=bandwidth), trace_rank() as trace:
            layer(x, weight).backward(dy)
        traces.append(trace)
    return traces


def run_layer(layer, bandwidth=0.4e9):
    ranks = launch(trace_layer, 2, args=(layer, bandwidth), backend="gloo")
    runs = zip(*ranks, strict=True)
    # the fastest of five runs, because other programs disturbed it least
    return min(runs, key=lambda traces: max(trace.duration for trace in traces))


def waiting(x, weight):
    return copy_to_region(x) @ weight.T  # f and the matmul, as in chapter 04


before = run_layer(waiting)
title = "one column-parallel layer, forward and backward, on two ranks"
viz.overlap({"chapter 04": before}, title=title)

# %% [markdown]
# The first `mm` is the matmul of the forward pass. The other two run in the backward pass and compute the gradients of the weight and of $x$. Only when both matmuls are done does f start to sum the gradient of $x$ over the ranks. In the red part, the rank is waiting for this sum and has nothing to do. We call this waiting time **exposed** communication. If the rank computed something else in the meantime, the communication would be **hidden**.
#
# **Predict.** Suppose that each matmul of the backward pass takes 5 ms, and the message takes 3 ms. How long does the backward pass take if the rank starts the message and then waits for it right away? How long does it take if the message travels *while* the rank computes the gradient of the weight? And how long does the second version take if the message takes 8 ms instead of 3 ms?

# %% predict="11.a"
predict("11.a", waiting=13, hidden=10, hidden_with_8=13)

# %% [markdown] task="11.1" title="Put the backward pass in order" difficulty=2 minutes=10
# Let's look at a whole MLP with two matmuls, $Z = XA$ and $Y = ZB$. (We leave out the GELU.) The backward pass starts from $dY$ and consists of four matmuls, each of which takes 5 ms. Only $dX$ has to be summed over the ranks, and this message takes 8 ms.
#
# | step | what it needs |
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
# 1. Which steps have to be finished before the message can start? Which steps compute something that no other step in this table needs?
# 2. The message can start after 10 ms at the earliest, and then it takes another 8 ms. Which matmuls could the rank run during these 8 ms, and how long do these matmuls take?
# 3. Nothing needs `dB` and `dA` until the optimizer step. So run `dZ` and `dX` first, followed by `start`. After that come `dB` and `dA`, with `wait` at the very end.

# %% check="11.1"
check("11.1", backward_order)

# %% [markdown]
# Drag the `step` slider to walk through your order one step at a time. Then drag the other slider to make the message take longer. How long can the message take before you see a red part, where the rank has to wait?


# %% tags=["explore"]
def on_the_clock(message):
    return viz.clock(mlp_backward(backward_order(), message=message), kept="dY")


start = {"message": 8, "step": 4}
viz.play(on_the_clock, message=(2, 4, 8, 16, 32), start=start, seconds=2)

# %% [markdown]
# You've just hidden a message that takes *longer* than any of the matmuls. The trick was to find work that nothing else is waiting for and to do it while the message is on its way. It does cost some memory, though, because the rank has to keep $dY$ until it has computed `dB`.
#
# ## Send while you multiply
#
# Autograd runs the backward pass layer by layer, so let's start by hiding the message of a single layer. If you call `dist.all_reduce` with `async_op=True`, the function only starts the sum and immediately returns a request. The request has a method `wait()`. Until `wait()` has returned, the tensor belongs to the backend, so you must neither read it nor write to it.

# %% [markdown] task="11.2" title="A backward pass that doesn't wait" difficulty=3 minutes=12
# The class below implements a column-parallel layer without bias as a single autograd function. `weight` is this rank's shard, `[m/p, h]`, so $Y = X W^\top$ contains this rank's columns of $Y$. We've already written `forward` for you. Write `backward`.
#
# - This function includes f, so your `backward` has to sum `dx` over the ranks of `ctx.group`, in a single all-reduce.
#
# - The message should travel while the rank computes `dw`. The check looks at the order of the matmuls, the start of the all-reduce, and the wait, but it doesn't time them.
#
# - Return one gradient per argument of `forward`, and `None` for `group`.


# %% exercise="11.2"
class LinearAsync(torch.autograd.Function):
    """x [.., h], the same on every rank, and weight [m/p, h] -> y [.., m/p].

    Backward computes dw while dx is being summed.
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
        dx = dy @ weight  # [.., h], this rank's term of the sum
        request = dist.all_reduce(dx, group=ctx.group, async_op=True)
        dw = dy.flatten(0, -2).T @ x.flatten(0, -2)  # [m/p, b·s] · [b·s, h] = [m/p, h]
        request.wait()
        return dx, dw, None
        ### END SOLUTION


# %% [markdown] hints="11.2"
# 1. Which of the two matmuls has to be finished before the all-reduce can start? Which matmul can the rank run during the all-reduce? Write down the shapes: `dy` is `[.., m/p]`, `weight` is `[m/p, h]`, and `x` is `[.., h]`.
# 2. First compute `dx = dy @ weight`. Next, call `request = dist.all_reduce(dx, group=ctx.group, async_op=True)`. Then compute `dw`, and call `request.wait()` at the end. To compute `dw`, you need two-dimensional tensors, such as `dy.flatten(0, -2)`, which is `[b·s, m/p]`. You can flatten `x` in the same way.
# 3. To get `dw`, multiply `[m/p, b·s]` by `[b·s, h]` with `dw = dy.flatten(0, -2).T @ x.flatten(0, -2)`. After the wait, return `dx, dw, None`.

# %% check="11.2"
check("11.2", LinearAsync)

# %% [markdown]
# The picture below compares your layer with the one from the beginning of this chapter.


# %%
def yours(x, weight):
    return LinearAsync.apply(x, weight, None)


after = run_layer(yours)
layers = {"chapter 04": before, "yours": after}
viz.overlap(layers, title="the same layer, before and after")


# %%
def milliseconds(link, layer, traces):
    total = 1e3 * max(trace.duration for trace in traces)
    waits = 1e3 * max(trace.exposed for trace in traces)
    return {"link": link, "layer": layer,
            "total [ms]": f"{total:.0f}", "waits [ms]": f"{waits:.0f}"}  # fmt: skip


viz.table([
    milliseconds("400 MB/s", "chapter 04", before),
    milliseconds("400 MB/s", "yours", after),
    milliseconds("this machine's", "chapter 04", run_layer(waiting, math.inf)),
    milliseconds("this machine's", "yours", run_layer(yours, math.inf)),
])  # fmt: skip

# %% [markdown]
# In the last two rows, the link isn't slowed down, so these rows show what you really gain on this machine. When two processes on the same machine exchange a message, the CPU's cores have to copy it from one place in memory to another. Those cores also run the matmuls, so a layer that waits less isn't necessarily faster. (Some of your gain has nothing to do with waiting. In the backward pass, chapter 04's layer copies the gradient of $x$ before the all-reduce, and your layer skips this copy.)
#
# On GPUs, hiding your messages usually pays off more. Like the slow link above, a GPU's links can transfer a message while the GPU computes. But it's not quite free, because NCCL ties up a few of the GPU's multiprocessors, which are the units that run the matmuls.
#
# ## What does a message cost?
#
# Your GPT sends other messages, too. Let's count all the messages that a model with three layers sends in a training step.


# %%
def messages_of_a_step(layers=3, b=2, s=16, h=32):
    config = GPTConfig(num_layers=layers, hidden_size=h, num_heads=4, vocab_size=256,
                       seq_length=s, dropout=0.0)  # fmt: skip
    model = ParallelGPT(config, device=device())
    ids = torch.zeros(b, s, dtype=torch.long, device=device())
    with record() as section:
        model(ids, targets=ids).backward()
    sizes = [collective.bytes // 4 for collective in section]
    return [{"elements": f"{size / (b * s):.3g}·b·s", "messages": sizes.count(size)}
            for size in sorted({*sizes})]  # fmt: skip


rows = launch(messages_of_a_step, 2)[0]
viz.table(rows, title="all-reduces in a step of a GPT with three layers and h = 32")

# %% [markdown]
# Each attention block and each MLP sends one message of $b \cdot s \cdot h$ elements in the forward pass and one in the backward pass. That makes four messages per layer. The embedding and the output layer add one message each. For our three layers, that's $4 \cdot 3 + 2 = 14$ large messages. The table lists them as 32·b·s, because $h = 32$. All the other messages come from computing the loss, and they add up to only a few elements per token.
#
# How long does such a message take? In chapter 01, you found that a ring all-reduce of $N$ bytes takes $2(p-1)$ steps and that each step takes $\alpha + \beta N / p$. Here, $\alpha$ is the latency of the link, and $1/\beta$ is its bandwidth. The table below lists both values for a few links, per GPU and direction:

# %%
viz.table([{"link": name, "alpha [µs]": f"{1e6 * link.alpha:.1f}",
            "GB/s": f"{link.bandwidth / 1e9:.0f}"}
           for name, link in links.PUBLISHED.items()],
          title="NVLink and PCIe connect the GPUs of a machine; "
                "InfiniBand connects machines")  # fmt: skip

# %% [markdown]
# **Predict.** In GPT-3, a message contains $2048 \cdot 12288$ elements for each sequence. With 2 bytes per element, that's 50,331,648 bytes. Suppose that 8 ranks all-reduce this message over NVLink 3. How many steps does the ring take, and how many microseconds does the whole all-reduce take?

# %% predict="11.b"
predict("11.b", steps=14, microseconds=341.2)

# %% [markdown] task="11.3" title="The time of a layer" difficulty=3 minutes=15
# In the forward and backward passes of one transformer layer, how long does a rank compute, and how long does it communicate? Return both times, in seconds.
#
# - The layer is the one from chapter 10, with ordinary attention and an MLP with an inner size of $4h$. Count only the matmuls. A matmul of `[m, k]` and `[k, n]` takes $2mkn$ **FLOPs** (floating-point operations), and the rank can do `rate` FLOPs per second. Don't forget the two matmuls inside of attention, and count the full $s \times s$ matrices, including the elements that a causal mask hides.
#
# - `all_reduce(link, size, p)` returns how long a ring all-reduce of `size` bytes takes. Each element takes up `bytes_per_number` bytes. None of the messages are hidden.
#
# - With `recompute`, the layer keeps only its input (chapter 09), so the whole forward pass runs a second time, including its messages.


# %% exercise="11.3"
def layer_seconds(
    b: int, s: int, h: int, p: int, rate: float, link: Link, *,
    recompute: bool = False, bytes_per_number: int = 2,
) -> tuple[float, float]:  # fmt: skip
    """Return how many seconds one of p ranks computes and communicates in a layer.

    Both numbers include the forward and the backward pass.
    """
    ### BEGIN SOLUTION
    weights = 24 * b * s * h**2  # Q, K and V: 6, output: 2, MLP: 8 + 8
    scores = 4 * b * s**2 * h  # Q Kᵀ and P V
    forwards = 2 if recompute else 1
    # two matmuls backward for each one forward
    compute = (forwards + 2) * (weights + scores) / (p * rate)
    # g twice in each forward pass, f twice in the backward pass
    messages = 2 * forwards + 2
    return compute, messages * all_reduce(link, bytes_per_number * b * s * h, p)
    ### END SOLUTION


# %% [markdown] hints="11.3"
# 1. List the matmuls of the forward pass with their shapes. There's one matmul for Q, K, and V, one for the scores, one for the weighted sum of the values, one for the output of attention, and two for the MLP. For each matmul in the forward pass, how many matmuls are there in the backward pass? If p ranks share the layer, how much of this work is left for each rank?
# 2. In the forward pass, the four matmuls with weights take `6bsh²`, `2bsh²`, `8bsh²`, and `8bsh²` FLOPs, and the two matmuls inside of attention take `2bs²h` FLOPs each. The backward pass takes twice as many FLOPs. Without recomputation, there are four messages, because each of the two blocks calls g in the forward pass and f in the backward pass. Every message has `b · s · h` elements, no matter how many ranks there are.
# 3. `forward = 24 * b * s * h**2 + 4 * b * s**2 * h`, `compute = (4 if recompute else 3) * forward / (p * rate)`, and `communicate = (6 if recompute else 4) * all_reduce(link, bytes_per_number * b * s * h, p)`.

# %% check="11.3"
check("11.3", layer_seconds)

# %% [markdown]
# What does your formula predict for H100s? The percentages in the picture below show how much of the time the GPUs are computing. On which links is it worth splitting a layer across 8 GPUs? (NVLink connects only 8 GPUs in a DGX, NVIDIA's own server, so the NVLink results for $p = 16$ and $p = 32$ are hypothetical. But you'll soon meet a machine that connects 72 GPUs.)


# %% tags=["explore"]
def bars(link, h):
    rows, notes, rate = {}, {}, MACHINES["H100 DGX"].rate
    for p in (1, 2, 4, 8, 16, 32):
        compute, wait = layer_seconds(1, 2048, h, p, rate, links.PUBLISHED[link])
        rows[f"p = {p}"] = {"computes": compute, "waits": wait}
        notes[f"p = {p}"] = f"{compute / (compute + wait):.0%}"
    title = f"a layer with h = {h:,} on H100s and {link}, s = 2048, b = 1"
    return viz.time_bars(rows, notes=notes, title=title)


names = ("NVLink 4", "PCIe 5.0 x16", "InfiniBand NDR")
viz.explore(bars, link=names, h=(12288, 2048, 4096, 8192, 16384))

# %% [markdown]
# Whenever you double $p$, the ranks compute for half as long (the gray part), but they wait for messages for at least as long as before (the red part). Did you try InfiniBand? If the 8 GPUs were connected only by InfiniBand, with one adapter per GPU, they'd spend more than two thirds of their time waiting, even with layers as wide as GPT-3's ($h = 12288$). That's why tensor parallelism usually stays within a machine.
#
# ## How wide does a layer have to be?
#
# Suppose your GPUs spend too much time waiting. Should you make the layers wider, or the batch larger?
#
# **Predict.** Ignore the latency and the two matmuls inside of attention. If you double $b$, by what factor does the ratio of waiting time to compute time change? If you double $h$ instead, by what factor does this ratio change?

# %% predict="11.c"
predict("11.c", double_b=1, double_h=0.5)

# %% [markdown]
# A larger batch doesn't help at all! Both times double, so their ratio stays the same. Only a wider layer helps, because the FLOPs grow with $h^2$, while the messages grow only with $h$. So for every machine and every $p$, there's a minimum width below which splitting a layer doesn't pay off.

# %% [markdown] task="11.4" title="How wide is wide enough?" difficulty=2 minutes=8
# The efficiency $E$ is the fraction of the time that a rank spends computing. Return the smallest $h$ at which $p$ ranks reach the given efficiency. Each GPU can do `rate` FLOPs per second, and each link can send `bandwidth` bytes per second in each direction. Your result doesn't have to be a whole number.
#
# As before, ignore the latency and the matmuls inside of attention. Assume that there's no recomputation and that each element takes up 2 bytes. Work it out with pen and paper first. Once you have the formula, the code is a single line.


# %% exercise="11.4"
def smallest_width(
    p: int, rate: float, bandwidth: float, efficiency: float = 0.8
) -> float:
    """Return the smallest h at which p ranks compute for this share of their time."""
    ### BEGIN SOLUTION
    return 2 / 9 * (p - 1) * rate / bandwidth * efficiency / (1 - efficiency)
    ### END SOLUTION


# %% [markdown] hints="11.4"
# 1. Write down the compute time and the communication time, and leave out everything that you can ignore. Then divide the communication time by the compute time. Which variables cancel?
# 2. Let `R` be the rate and `B` the bandwidth. A rank computes for `72bsh² / (pR)` seconds, and it communicates for `4 · 2(p - 1)/p · 2bsh / B` seconds. So the ratio of communication time to compute time is `w = 2(p - 1)R / (9Bh)`. The efficiency is `E = 1/(1 + w)`. Solve this equation for `h`.
# 3. Return `2 / 9 * (p - 1) * rate / bandwidth * efficiency / (1 - efficiency)`.

# %% check="11.4"
check("11.4", smallest_width)

# %%
rows = []
for name, link, p in (
    ("A100 DGX", "NVLink 3", 8), ("H100 DGX", "NVLink 4", 8),
    ("H100 DGX", "InfiniBand NDR", 8), ("B200 DGX", "NVLink 5", 8),
    ("GB200 NVL72", "NVLink 5", 8), ("GB200 NVL72", "NVLink 5", 72),
):  # fmt: skip
    machine, bandwidth = MACHINES[name], links.PUBLISHED[link].bandwidth
    estimated = any(each.startswith("estimate") for each in machine.sources.values())
    rate = f"{machine.rate / 1e12:,.0f}" + " (estimate)" * estimated
    width = smallest_width(p, machine.rate, bandwidth)
    rows.append({"machine": name, "TFLOP/s": rate, "link": link, "p": p,
                 "smallest h for 80%": f"{width:,.0f}"})  # fmt: skip
viz.table(rows)

# %% [markdown]
# With each new generation, GPUs have sped up more than their links have, so the same $p$ requires wider layers. In a rack that connects 72 GPUs over NVLink, you could choose $p = 72$, but we don't know of any model whose layers are wide enough for that. (GPUs don't reach the peak rates in their data sheets. The table uses the rates that people have measured for large matmuls, except where it says "estimate". But for the links, it uses the full bandwidths, so the widths you really need are larger.)
#
# <details><summary>Going deeper: a switch that adds</summary>
#
# If the ranks all-reduce a tensor of $N$ bytes in a ring, each GPU sends $2\frac{p-1}{p}N$ bytes. Since Hopper, NVIDIA's NVSwitch has been able to do the additions itself. This feature is called NVLS or NVLink SHARP. Each GPU sends its $N$ bytes to the switch once, and the switch adds up the tensors from all GPUs. Each GPU receives $1/p$ of the sum and passes it on to the others, so a GPU sends only $(1 + 1/p)N$ bytes in total. For $p = 8$, that's 1.125 $N$ instead of 1.75 $N$.
#
# In practice, part of this gain is lost in the switch. On 8 H100s, users measured an all-reduce at 211 GB/s with a ring and at 275 GB/s with NVLS. On 8 B300s, they measured 397 GB/s with a ring and 483 GB/s with NVLS (NVIDIA/nccl issue 2140, April 2026). So NVLS makes an all-reduce about 1.2 to 1.3 times as fast, which means that layers can be about 20% narrower and still run just as efficiently. `tplab.cost` can also predict how long an NVLS all-reduce takes, and its predictions are within 4% of the measurements. NCCL's own cost formula for NVLS includes a fixed latency of 25 µs, so other algorithms are still faster for small messages.
#
# </details>
#
# ## Does it hold?
#
# You shouldn't trust a cost model before you've compared it with measurements. Two of NVIDIA's papers report 28 measurements of how fast GPTs run on A100s ([Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), table 1; [Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), tables 4 and 5). If you relied on your two formulas alone, all of your predicted times would be too short. So `tplab.cost` adds what your formulas leave out, such as norms and the time between two kernels.

# %%
from tplab.course.exercises.ch11 import published

machine, rows = MACHINES["A100 DGX"], published.published_rows()
ratios = {row.name: row.predicted(machine) / row.published for row in rows}
viz.against(ratios, title="28 published speeds on A100s, and the model")

# %% [markdown]
# All predictions are within 10% of the measurements. That's good enough to rule out bad layouts. But if two layouts differ by less than 10%, you should measure both of them.
#
# <details><summary>Going deeper: where the time goes, and where the model fails</summary>
#
# The model adds seven terms to your formulas. We didn't fit these terms to the measurements. Instead, we worked out each one ourselves or took it from [Calculon](https://github.com/calculon-ai/calculon), a published cost model.
#
# - **Matmul traffic.** A matmul also has to read its inputs from memory and write its output to memory.
#
# - **Wave quantization.** An A100 splits each matmul into tiles and computes one tile per multiprocessor. It has 108 multiprocessors, so if there are 109 tiles, the last tile runs alone.
#
# - **Ring bandwidth.** NVLink could send 300 GB/s, but messages of this size reach only 195 GB/s.
#
# - **Memory bandwidth.** Elementwise kernels reach only 90% of the memory bandwidth.
#
# - **Busy multiprocessors.** If a collective runs at the same time as a matmul, it occupies 15% of the multiprocessors.
#
# - **Kernel launches.** There's a gap of about 5 µs between one kernel and the next.
#
# - **Bookkeeping.** Autograd sums `dy` to get the gradient of each bias, copies attention heads into a different memory layout, and adds up gradients.
#
# On V100s, the model fails. In 2019, Megatron's model with 1.2 billion parameters ran 2.98 times as fast on 8 GPUs as on one GPU ([Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053), table 8), but our cost model predicts a factor of 3.8. Back then, about a quarter of Megatron's step time didn't shrink as you added GPUs. For H100s, we can't check the predictions, because nobody has published a table with all the settings. So all times for H100s in this chapter are estimates.
#
# </details>
#
# ## Fix it
#
# In this section, you'll fix a function that averages buffers of gradients over all ranks. Two of its lines come from the translation toolkit OpenNMT-py, where they were added in October 2022. The developers chose `async_op=True` for these lines, because that made training faster.
#
# In January 2023, a user pointed out that something was wrong with these two lines. A maintainer wasn't sure it was a bug, because nothing ever failed. But in March, somebody reported that a model trained on several GPUs gave worse translations than one trained on a single GPU. Two days later, the first comparison of the code with and without `async_op` proved the January user right, and `async_op` was turned off again (OpenNMT/OpenNMT-py issues 2295 and 2335, pull request 2339).
#
# **Predict.** Rank 0 has a 2 in its buffer, and rank 1 has a 6. Suppose that rank 0 divides by 2 just *before* its buffer is sent, but rank 1 divides by 2 *after* the sum has arrived. Which numbers do the two ranks end up with? Does anything raise an error?

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


rows = []
for seconds in (0.0, 0.0, 0.0, 0.5):
    ranks = launch(divided_too_early, 2, args=(seconds,), backend="gloo")
    rows.append({"rank 1 comes late by": f"{1e3 * seconds:.0f} ms",
                 "rank 0 has": ranks[0], "rank 1 has": ranks[1]})  # fmt: skip
viz.table(rows, title="the mean of 2 and 6")

# %% [markdown] task="11.5" title="Fix it: divided too early" difficulty=2 minutes=6
# The developers of OpenNMT-py fixed this bug by waiting for each message right away. You can do better. Fix the function so that *all* buffers travel at the same time.
#
# In the end, each buffer should contain the mean over the ranks of `group`. Change the buffers in place. The list may be empty. The check runs your function with messages that arrive at the last possible moment.


# %% exercise="11.5"
def average_buffers(buffers, group=None):
    """Replace each of these contiguous tensors by its mean over the group's ranks."""
    p = dist.get_world_size(group)
    ### BEGIN SOLUTION
    requests = [dist.all_reduce(each, group=group, async_op=True) for each in buffers]
    for request, buffer in zip(requests, buffers, strict=True):
        request.wait()
        buffer.div_(p)
    ### BROKEN
    # for buffer in buffers:
    #     dist.all_reduce(buffer, group=group, async_op=True)
    #     buffer.div_(p)
    ### END SOLUTION


# %% [markdown] hints="11.5"
# 1. Who owns a buffer from the start of its all-reduce until `wait()` has returned? If you call `dist.all_reduce` with `async_op=True`, what does it return, and where does the broken function keep this object?
# 2. If a loop waits for each message before it starts the next one, only one message is on its way at a time. So you need two loops. Which steps belong in the first loop?
# 3. Start all messages with `requests = [dist.all_reduce(buffer, group=group, async_op=True) for buffer in buffers]`. In a second loop over `zip(requests, buffers)`, call `request.wait()` first and then `buffer.div_(p)`.

# %% check="11.5"
check("11.5", average_buffers)

# %%
symptoms(11)

# %% [markdown]
# ## In the wild
#
# <details><summary>Going deeper: Megatron-Core, CUDA_DEVICE_MAX_CONNECTIONS, async TP, Perfetto</summary>
#
# - **Megatron-Core** has a version of your `LinearAsync` in `megatron/core/tensor_parallel/layers.py`, where it's called `LinearWithGradAccumulationAndAsyncCommunication`. Megatron's version has a bias, adds the weight's gradient directly to a buffer, and supports the sequence parallelism that you'll meet in chapter 12.
#
# - **Which kernel starts first?** On a GPU, the all-reduce and the matmul go into two different queues, and the GPU may start the matmul first. If that happens, the matmul occupies all of the multiprocessors, and the all-reduce starts too late. To prevent this, older versions of Megatron allocated a tensor with a single element and added 1 to it, just to delay the matmul by 3 µs. Later, this trick was replaced with `CUDA_DEVICE_MAX_CONNECTIONS=1`, which makes the GPU start kernels in the order of the program. The setting affects only speed, and it matters only on GPUs older than Blackwell (verl pull request 6976, July 2026). FSDP2 needs the opposite setting, with a separate connection for each stream (torchtitan pull request 4508, September 2026).
#
# - **What about g?** The line after g needs the sum right away, so there's no other work to hide g's message behind. *Async tensor parallelism* splits the matmul itself into slices and sends one slice while it computes the next one. Megatron has an option for this, `--tp-comm-overlap`, and PyTorch has operators such as `fused_all_gather_matmul`. Both of them build on the sequence parallelism from chapter 12.
#
# - **Perfetto.** You can save a trace to a file with `tplab.trace.save_chrome_trace("layer.json", before)`. Drop this file on [ui.perfetto.dev](https://ui.perfetto.dev) to zoom in on the trace. The page reads the file in your browser, so nothing leaves your machine.
#
# </details>
#
# ## Your library so far
#
# Your library can now predict what its messages cost, and it contains a linear layer that sends a message while it multiplies.

# %%
from tplab.course import library

library(11)

# %% [markdown]
# You've hidden f's messages. But g's messages are still exposed, because the line after g needs the sum. Or does it? Halfway through a ring all-reduce, there's a moment when every rank already has exactly what it needs.
