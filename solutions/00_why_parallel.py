# %% [markdown]
# # 00 · Why parallel
#
# If you've ever run out of memory during training, you've probably asked yourself why you can *load* a model without any trouble but can't train it. In this chapter, you'll find out where the memory goes, down to the last byte. You'll calculate how much memory any GPT needs and find the smallest number of GPUs that can train it. About 75 minutes.

# %% tags=["setup"]

import torch
import torch.distributed as dist
from torch import nn

from tplab import launch, memory, viz
from tplab.common import corpus
from tplab.course import check, predict, show_failure, symptoms
from tplab.memory import (
    GPT,
    SAVED_BY_LAYER,
    GPTConfig,
    Layer,
    Layout,
    MemoryMeter,
    bill,
    saved_for_backward,
)

# %% [markdown]
# Here's what we're up against. Each bar shows how much memory you'd need to train a published model on a single GPU, even if you fed it just one sequence at a time. The dashed line marks the memory of a large GPU in **GB**, where 1 GB is 10⁹ bytes. GPT-2 saves its attention scores for the backward pass. Llama avoids this with FlashAttention, which we'll meet below.

# %%
H100 = memory.GPUS["H100, 80 GB"]
needed = bill(memory.PRESETS["Llama 3 405B"]).total
print(f"Llama 3 405B would need {needed / 1e9:,.0f} GB")
viz.bill(
    {name: bill(memory.PRESETS[name]) for name in ("GPT-2 1.5B", "Llama 3 8B")},
    capacity=H100,
    title="Training on one GPU: what it would have to hold",
)

# %% [markdown]
# ## Watch a model train
#
# During training, four kinds of tensors take up memory.
#
# - The **weights** are the values that the model learns.
# - The **gradients** are the values that the backward pass computes, one for each weight.
# - The **optimizer state** is what the optimizer remembers from earlier steps.
# - The **activations** are intermediate results that the forward pass saves because the backward pass will need them.
#
# Let's watch these tensors come and go. We train a small GPT for two steps in plain PyTorch, using Adam and float32. Meanwhile, `MemoryMeter` tracks every tensor from its creation until it's freed.
#
# **Predict** before you run the next cell. Which of the two training steps has the higher memory peak? In which phase of a step does the optimizer state first appear? (Phase 1 is the forward pass, phase 2 is the backward pass, and phase 3 is the optimizer step.)

# %% predict="0.a"
predict("0.a", highest_peak_in_step=2, optimizer_state_appears_in_phase=3)

# %%
SMALL = GPTConfig(
    num_layers=4,
    hidden_size=128,
    num_heads=4,
    vocab_size=corpus.VOCABULARY,
    seq_length=64,
)
text = corpus.python_sources(50_000)

with MemoryMeter() as meter:
    meter.mark("build")
    model = GPT(SMALL)
    optimizer = torch.optim.Adam(model.parameters())
    batches = corpus.byte_batches(text, SMALL.seq_length, 4, 2, seed=0)
    for ids, targets in batches:  # [b, s] each
        meter.mark("forward")
        loss = model(ids, targets)
        meter.mark("backward")
        loss.backward()
        del loss
        meter.mark("optimizer step")
        optimizer.step()
        optimizer.zero_grad()
parameters = sum(parameter.numel() for parameter in model.parameters())
viz.live_memory(meter, title=f"Two training steps of {parameters:,} parameters")

# %% [markdown]
# Follow the curve from left to right. During the forward pass, memory use climbs because activations are being saved. The backward pass then frees the activations one by one, and gradients take their place. Finally, the optimizer step allocates the optimizer state, and that memory is never freed again. (The curve only falls after the optimizer step because `zero_grad()` frees the gradients.)
#
# ## What does an optimizer remember?
#
# Large models are trained in **mixed precision**. The weights and gradients are stored in 16-bit precision because that makes the matmuls fast. But most weight updates are so tiny that they'd get lost in a 16-bit weight. That's why the optimizer keeps its own copy of the weights in float32. The optimizer's running averages are also stored in float32.
#
# Here are simplified update rules for five optimizers. The weights $w$ and the gradients $g$ both have shape `[rows, columns]`.
#
# | | update in every step |
# |---|---|
# | `"sgd"` | $w \leftarrow w - \eta g$ |
# | `"momentum"` | $m \leftarrow \mu m + g, \quad w \leftarrow w - \eta m$ |
# | `"adam"` | $m \leftarrow \beta_1 m + (1-\beta_1) g, \quad v \leftarrow \beta_2 v + (1-\beta_2) g^2, \quad w \leftarrow w - \eta\, m / \sqrt{v}$ |
# | `"amsgrad"` | like Adam, but with $u \leftarrow \max(u, v)$ and $w \leftarrow w - \eta\, m / \sqrt{u}$ |
# | `"adafactor"` | like Adam, but without $m$. Instead of $v$, it keeps a running average $r$ of the mean of $g^2$ in each row, and a running average $c$ of the mean of $g^2$ in each column. |

# %% [markdown] task="0.1" title="What an optimizer has to remember" difficulty=2 minutes=10
# Write a function that returns how many bytes the weights, the gradients, and the optimizer state of a single matrix take up after one step. The matrix is trained either in float32 or in mixed precision, as described above.
#
# The check compares your results with real tensors after a real step of `torch.optim`. (Leave out the step counter, which is just one number per tensor.)


# %% exercise="0.1"
def state_bytes(
    shape: tuple[int, int], optimizer: str, mixed_precision: bool
) -> dict[str, int]:
    """Return the bytes for a matrix of this shape after one step.

    The result is {"weights": ..., "gradients": ..., "optimizer": ...}.
    """
    ### BEGIN SOLUTION
    rows, columns = shape
    elements = rows * columns
    remembered = {
        "sgd": 0,
        "momentum": elements,  # m
        "adam": 2 * elements,  # m and v
        "amsgrad": 3 * elements,  # m, v and u
        "adafactor": rows + columns,  # r and c
    }[optimizer]
    size = 2 if mixed_precision else 4
    copy = 4 * elements if mixed_precision else 0
    return {
        "weights": size * elements,
        "gradients": size * elements,
        "optimizer": copy + 4 * remembered,
    }
    ### END SOLUTION


# %% [markdown] hints="0.1"
# 1. Which tensors in an update rule have to be kept until the next step? For each variable, ask yourself whether the next step uses the variable's old value. For example, every step computes a new `g`, so the optimizer doesn't have to store the old `g`. What about Adam's `m`?
# 2. The matrices `m`, `v`, and `u` are as large as `w`. But `r` has only one element per row, and `c` has only one element per column.
# 3. Weights and gradients take 4 bytes per element, or 2 bytes in mixed precision. Depending on its update rule, the optimizer remembers 0, 1, 2, or 3 times `rows * columns` elements, or `rows + columns` elements, at 4 bytes each. In mixed precision, the optimizer's copy of the weights takes up another `4 * rows * columns` bytes.

# %% check="0.1"
check("0.1", state_bytes)

# %% [markdown]
# With Adam in mixed precision, the weights take 2 bytes per parameter, the gradients take 2 bytes, and the optimizer state takes 12 bytes. So training requires **16 bytes per parameter**. You'll need this number often.
#
# ## How many parameters?
#
# Papers report rounded parameter counts, but you can calculate the exact number from a model's configuration. Here's the model we just trained, layer by layer. We write `b` for the batch size, `s` for the sequence length, and `h` for the hidden size. A GPT has `L` layers with `a` attention heads each, and its vocabulary has `v` tokens.

# %%
model

# %% [markdown] task="0.2" title="Count the parameters of a GPT" difficulty=2 minutes=10
# Complete a function that calculates the number of parameters of any GPT from its configuration. We've already written the part outside the layers, and the part for the norms. (If `bias` is false, the norms are RMSNorms, which have a weight but no bias.) What's missing are `attention` and `mlp`, the number of parameters in the attention and in the MLP of *one* layer. Besides `h`, these numbers depend on four fields of the configuration:
#
# - `config.kv_heads` is the number of K and V heads. (When you create a `GPTConfig`, this number is called `num_kv_heads`.) In **grouped-query attention**, K and V have fewer heads than Q, so the K and V matrices map `h` features to only `config.kv_heads * config.head_dim` features.
#
# - `config.ffn_size` is the number of hidden features in the MLP. The matrix `up` maps `h` features to `ffn_size` features, and `down` maps them back to `h` features.
#
# - `config.gated` specifies whether the MLP has a third matrix, `gate`, with the same shape as `up`.
#
# - `config.bias` specifies whether the linear layers have biases.
#
# The check builds real PyTorch modules for GPT-2, Llama, and random combinations of the two, and it counts their parameters.


# %% exercise="0.2"
def parameter_count(config: GPTConfig) -> int:
    """Return the number of parameters of the model."""
    h, bias = config.hidden_size, int(config.bias)
    norm = h + bias * h
    # embedding and output layer, tied or not
    tables = config.vocab_size * h * (1 if config.tied_embedding else 2)
    positions = config.seq_length * h if config.learned_positions else 0
    ### BEGIN SOLUTION
    kv = config.kv_heads * config.head_dim
    # Q; K and V; out
    attention = (h * h + bias * h) + 2 * (h * kv + bias * kv) + (h * h + bias * h)
    up = h * config.ffn_size + bias * config.ffn_size
    down = config.ffn_size * h + bias * h
    mlp = up + down + (up if config.gated else 0)
    ### END SOLUTION
    return tables + positions + config.num_layers * (2 * norm + attention + mlp) + norm


# %% [markdown] hints="0.2"
# 1. Look at one layer of the printed model, and write down the shape of every weight and bias in its attention and its MLP. Which shapes change if K and V have fewer heads? Which shapes change if `ffn_size` isn't `4 * h`?
# 2. `nn.Linear(n, m)` has `n * m` weights, plus `m` more parameters if it has a bias. Attention contains four linear layers, and the MLP contains two or three. Which linear layers depend on `kv_heads`? Which linear layers depend on `ffn_size`?
# 3. `attention` consists of `q` and `out` with `h * h` weights each, and of `k` and `v` with `h * kv_heads * head_dim` weights each. `mlp` consists of `up`, `down`, and perhaps `gate`, with `h * ffn_size` weights each. If `bias` is true, each of these linear layers has one bias element per output feature.

# %% check="0.2"
check("0.2", parameter_count)

# %% [markdown]
# Let's compare your counts with published numbers. OpenAI named its largest GPT-2 checkpoint 1558M, after the number of parameters. Table D.1 of the GPT-3 paper lists 174.6 billion parameters. The 16-bit checkpoints of Llama 3 store 2 bytes per parameter. The 8B checkpoint takes up 16,060,522,496 bytes, and the 70B checkpoint takes up 141,107,412,992 bytes. The Llama 3 paper puts the largest model at 405B parameters.

# %%
PUBLISHED = {
    "GPT-2 1.5B": 1558e6,
    "GPT-3 175B": 174_600e6,
    "Llama 3 8B": 16_060_522_496 / 2,
    "Llama 3 70B": 141_107_412_992 / 2,
    "Llama 3 405B": 405e9,
}
rows = []
for name, config in memory.PRESETS.items():
    yours = parameter_count(config)
    row = {"model": name, "yours": f"{yours:,}", "published": f"{PUBLISHED[name]:,.0f}"}
    rows.append(row | {"difference": f"{yours / PUBLISHED[name] - 1:+.2%}"})
viz.table(rows)

# %% [markdown]
# ## Activations
#
# Activations depend on the data you feed into the model. PyTorch has a hook that's called for every tensor that autograd saves for the backward pass. With this hook, we can list everything that a single layer saves when it computes in 16 bits. The last column shows the number of bytes divided by $s \cdot b \cdot h$, the number of elements in the layer's input.

# %%
layer = Layer(SMALL).bfloat16()
shape = 2, SMALL.seq_length, SMALL.hidden_size  # [b, s, h]
x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
with saved_for_backward(layer) as kept:
    layer(x)
viz.table(
    [
        {
            "what": what,
            "shape": str(list(shape)),
            "bytes": size,
            "bytes per element": f"{size / x.numel():.2f}",
        }
        for what, (shape, _, size) in zip(SAVED_BY_LAYER, kept.pieces, strict=True)
    ],
    title=f"b = 2, s = 64, h = 128, a = 4: {kept.bytes:,} bytes saved",
)

# %% [markdown]
# **Predict.** We'll refer to the weights, gradients, and optimizer state collectively as the **model states**. Suppose you double the batch size `b`. By what factor do the model states grow? By what factor do the activations grow? Now suppose you double `s` instead. By what factor does the memory for the attention scores grow?

# %% predict="0.b"
predict("0.b", states=1, activations=2, scores=4)

# %%
h, a = SMALL.hidden_size, SMALL.num_heads
rows = []
for b, s in ((1, 64), (2, 64), (1, 128), (1, 256)):
    layer = Layer(SMALL).bfloat16()
    x = torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True)  # [b, s, h]
    with saved_for_backward(layer) as kept:
        layer(x)
    sizes = {
        what: size
        for what, (_, _, size) in zip(SAVED_BY_LAYER, kept.pieces, strict=True)
        if not what.startswith(("mean", "1/std"))
    }
    rows.append(
        {
            "b": b,
            "s": s,
            "states": 16 * sum(parameter.numel() for parameter in layer.parameters()),
            "activations": sum(sizes.values()),
            "scores only": sum(sizes[what] for what in sizes if "scores" in what),
            "sbh(34 + 5as/h)": s * b * h * 34 + 5 * a * s * s * b,
        }
    )
viz.table(rows, title="one layer, bytes")

# %% [markdown]
# The last column is a famous formula (Korthikanti et al. 2022, equation 1), and it matches the measured activations to the byte. (We leave out the means and standard deviations that the norms save.)
#
# $$\text{a layer saves}\quad sbh\left(34 + 5\,\frac{as}{h}\right)\ \text{bytes}$$
#
# The first table shows where the two terms come from. The rows for the attention scores add up to 10 bytes per element, and $5as/h$ is indeed 10 for this layer. All the other rows add up to 34 bytes per element. Notice how fast the scores grow! That's why almost everyone uses **FlashAttention** (Dao et al. 2022) today. Instead of saving the scores, FlashAttention recomputes them in the backward pass.
#
# ## Fix it
#
# To report the average loss, many programs run `total = total + loss` on every batch. That looks harmless.
#
# **Predict.** Suppose a validation loop runs `total = total + loss` on each of 12 batches. At the end of the loop, how many batches still have their activations in memory? Now suppose a *training* loop runs `total = total + loss` and also calls `loss.backward()` on every batch. At the end of a training loop, how many batches still have their activations in memory?

# %% predict="0.c"
predict("0.c", validation=12, training=0)

# %% [markdown]
# Let's see what happens in the validation loop.


# %%
def as_shipped(model, batches):
    total, count = torch.zeros(()), 0
    for ids, targets in batches:
        total = total + model(ids, targets)
        count += 1
    return total / count


def marked(batches):
    for number, batch in enumerate(batches, start=1):
        meter.mark(f"batch {number}")
        yield batch


with MemoryMeter() as meter:
    meter.mark("build")
    model = GPT(SMALL)
    before = meter.live
    batches = corpus.byte_batches(text, SMALL.seq_length, 4, 4, seed=0)
    loss = as_shipped(model, marked(batches))
print(f"each batch leaves {(meter.live - before) / 4 / 1e6:.1f} MB behind")
viz.live_memory(meter, title="a validation loop over 4 batches")

# %% [markdown] task="0.3" title="Fix a validation loop" difficulty=2 minutes=6
# Memory use climbs with every batch and never comes back down. Sooner or later, you'd run out of memory in the middle of the validation set. One of the training examples in Google's Brax had this bug (google/brax, pull request 152).
#
# Fix the function. Your version should return the same average, as a float, without changing the model. It shouldn't keep anything alive longer than necessary.


# %% exercise="0.3"
def average_loss(model: nn.Module, batches) -> float:
    """Return the average of model(ids, targets) over all batches.

    batches: any iterable of (ids, targets)
    """
    ### BEGIN SOLUTION
    total, count = 0.0, 0
    with torch.no_grad():
        for ids, targets in batches:
            total += model(ids, targets).item()
            count += 1
    return total / count
    ### BROKEN
    # total, count = torch.zeros(()), 0
    # for ids, targets in batches:
    #     total = total + model(ids, targets)
    #     count += 1
    # return total / count
    ### END SOLUTION


# %% [markdown] hints="0.3"
# 1. A tensor that was computed from the model's weights keeps its entire computation graph alive, including the saved activations. Which variable in the loop depends on the losses of *all* batches?
# 2. If you convert each loss to a Python number, memory use stops growing. But while the model runs, autograd still saves activations for a backward pass that never comes. How do you tell autograd not to save any activations?
# 3. Move the loop into `with torch.no_grad():` and add up `model(ids, targets).item()` for all the batches.

# %% check="0.3"
check("0.3", average_loss)

# %% [markdown]
# ## Three ways to share the bill
#
# You can now calculate how much memory a model needs. What if a model needs more memory than any GPU has? Let's take GPT-3, which has 175 billion parameters.
#
# **Predict.** How many 80 GB GPUs do you need just to *hold* the weights of GPT-3, at 2 bytes each, so that the model can answer questions? How many 80 GB GPUs do you need to train GPT-3, at 16 bytes per parameter and ignoring activations?

# %% predict="0.d"
predict("0.d", gpus_to_answer=5, gpus_to_train=35)

# %% [markdown]
# When you train on several GPUs, each GPU runs the same program in its own process. Every process has a number, called its **rank**. A process can only access its own memory. If a process needs data from another rank, that rank has to send the data.
#
# With **data parallelism**, every rank holds the full model and works on different sequences. Before each optimizer step, the gradients are summed across ranks, so all copies of the model (the **replicas**) stay identical.

# %%
viz.parallelism("data")

# %% [markdown]
# With **tensor parallelism**, every rank holds a slice of every matrix, and all ranks work on the same sequences. No single rank can compute an entire layer, so the ranks have to exchange data in every layer. This is what you'll build in this course. (An older name for tensor parallelism is *model parallelism*.)

# %%
viz.parallelism("tensor")

# %% [markdown]
# With **pipeline parallelism**, every rank holds a few consecutive layers. These layers are called a **stage**. The batch is split into **micro-batches**. While one stage is working on a micro-batch, the stage before it can already start on the next one. So by the time the first micro-batch returns to the first stage in the backward pass, the first stage may have started one micro-batch for each stage of the pipeline.

# %%
viz.parallelism("pipeline")

# %% [markdown]
# What does each kind of parallelism divide?
#
# | | weights, gradients, optimizer state | activations |
# |---|---|---|
# | data parallelism | nothing is divided | each rank has those of its own sequences |
# | pipeline parallelism, `pp` stages | each rank has those of $L/pp$ layers | each rank has those of $L/pp$ layers, for several micro-batches at a time |
# | tensor parallelism, `tp` ranks | the matrices are divided by `tp` | some are divided by `tp` |
#
# Why only "some"? Inside the attention block and the MLP, each rank works on its own slice. But the norms read and write full tensors of shape `[b, s, h]` on every rank. The dropout layers after the attention block and after the MLP also work on full tensors.
#
# **Predict.** In GPT-3, a layer saves 34 + 80 = 114 bytes for each element of its input, and 80 of these bytes are for the attention scores. Suppose you split this layer across 8 tensor-parallel ranks. Go through the table of saved tensors again. How many bytes per input element does each rank have to store?

# %% predict="0.e"
predict("0.e", bytes=23)

# %% [markdown]
# In general, tensor parallelism turns the formula into this one (Korthikanti et al. 2022, equation 2), where $p$ is the number of tensor-parallel ranks, `tp`:
#
# $$sbh\left(34 + 5\,\frac{as}{h}\right) \quad\longrightarrow\quad sbh\left(10 + \frac{24}{p} + 5\,\frac{as}{hp}\right)$$

# %% [markdown] task="0.4" title="The fewest GPUs for a model" difficulty=3 minutes=14
# You've been asked to train a model on as few GPUs as possible. `bill(config, Layout(tp=..., pp=...), stage=...)` tells you how much memory a GPU in a given pipeline stage needs. Stages are counted from 0. To get the number of bytes, read the result's `.total` attribute. Some stages need more memory than others, and the model only fits if *every* GPU has enough memory for its stage.
#
# The first lines are given. They list all the layouts you may use. A head can't be split across ranks, all stages have the same number of layers, and tensor parallelism should stay within one machine. Return the layout with the fewest GPUs. If several layouts need the same number of GPUs, return the one with the smallest `tp`, because it communicates the least.
#
# If no layout fits, raise a `ValueError`. The error message should state the smallest value of `gpu_bytes` for which at least one layout would fit, as an exact number of bytes. (Thousands separators are fine.)


# %% exercise="0.4"
def smallest_layout(config: GPTConfig, gpu_bytes: int, largest_tp: int = 8) -> Layout:
    """Return the fitting Layout(tp=..., pp=...) with the fewest GPUs.

    A layout fits if every GPU needs at most gpu_bytes. If no layout fits, raises
    ValueError, and its message contains the smallest gpu_bytes for which one would fit.
    """
    tps = [tp for tp in range(1, largest_tp + 1) if config.num_heads % tp == 0]
    pps = [pp for pp in range(1, config.num_layers + 1) if config.num_layers % pp == 0]
    layouts = [Layout(tp=tp, pp=pp) for tp in tps for pp in pps]
    ### BEGIN SOLUTION
    # of the stage that needs the most memory
    needs = {layout: bill(config, layout).total for layout in layouts}
    fitting = [layout for layout in layouts if needs[layout] <= gpu_bytes]
    if not fitting:
        message = f"no layout fits: each GPU would need {min(needs.values()):,} bytes"
        raise ValueError(f"{message}, but it has {gpu_bytes:,}")
    return min(fitting, key=lambda layout: (layout.gpus, layout.tp))
    ### END SOLUTION


# %% [markdown] hints="0.4"
# 1. For each layout, calculate how much memory its most heavily loaded GPU needs. Instead of guessing which stage needs the most memory, check them all.
# 2. If you don't pass `stage`, `bill(config, layout)` returns the result for the stage that needs the most memory. The number of GPUs is `layout.gpus`.
# 3. Collect the layouts that fit and return `min(fitting, key=lambda layout: (layout.gpus, layout.tp))`. If no layout fits in memory, include `min(needs.values())` in the error message. Here, `needs` is a dict that holds `bill(config, layout).total` for each layout.

# %% check="0.4"
check("0.4", smallest_layout)


# %%
def shown(name, gpu):
    row = {"model": name, "GPU": gpu}
    try:
        layout = smallest_layout(memory.PRESETS[name], memory.GPUS[gpu])
    except ValueError as error:
        return row | {"GPUs": "none", "layout": str(error)}
    return row | {"GPUs": layout.gpus, "layout": f"tp = {layout.tp}, pp = {layout.pp}"}


gpus = "H100, 80 GB", "H200, 141 GB"
viz.table([shown(name, gpu) for name in memory.PRESETS for gpu in gpus])

# %% [markdown]
# Look at the row for GPT-3 on 80 GB GPUs. Your layout needs more than the 35 GPUs you predicted, because it also counts the activations and everything that's replicated. In addition, heads and layers have to be divided evenly. And all these GPUs together hold just *one* copy of the model! (As in the first picture, only the Llama models use FlashAttention.)
#
# Now look at Llama 3 405B. According to your function, no number of H100s would be enough. But Meta trained this model on H100s! What went wrong?
#
# **Predict.** With 2 pipeline stages (`pp = 2`), the first stage has 63 of the model's 126 layers. With 126 stages (`pp = 126`), the first stage has a single layer. By what factor do the first stage's activations shrink?

# %% predict="0.f"
predict("0.f", activations_shrink_by=1)

# %%
LLAMA = memory.PRESETS["Llama 3 405B"]


def first_stage(pp, **options):
    needed = bill(LLAMA, Layout(tp=8, pp=pp, **options), stage=0)
    states = needed.total - needed.activations
    return {
        "pp": pp,
        "layers": LLAMA.num_layers // pp,
        "weights, gradients, optimizer": f"{states / 1e9:.1f} GB",
        "activations": f"{needed.activations / 1e9:.1f} GB",
        "recompute": options.get("recompute", "nothing"),
    }


viz.table(
    [*(first_stage(pp) for pp in (2, 6, 21, 126)), first_stage(21, recompute="layers")],
    title="Llama 3 405B with tp = 8, first stage",
)

# %% [markdown]
# The factors $1/pp$ for the layers and $pp$ for the micro-batches cancel. So a pipeline splits up the weights, but it doesn't shrink the first stage's activations, no matter how many stages you add! The last row of the table shows a different method, **recomputation**, which saves only each layer's input and recomputes everything else in the backward pass. With recomputation, the first stage fits into 80 GB. Chapters 12 to 14 cover more ways to save memory.
#
# ## Break it
#
# Now let's watch a model that loads without any trouble run out of memory during training. We'll pretend that our device has just 10 MB of memory. (`MemoryMeter` raises an error as soon as the program uses more.) The program builds the small model, runs a forward and a backward pass on a single sequence, and takes an optimizer step.
#
# **Predict.** In which phase does the program run out of memory? (Phases 1, 2, and 3 are the forward pass, the backward pass, and the optimizer step.) Now suppose you train the same model on *two* devices with 10 MB each, using data parallelism. In which phase does the data-parallel program run out of memory?

# %% predict="0.g"
predict("0.g", one_device=3, two_devices=3)

# %%
with MemoryMeter(capacity=10_000_000) as meter:
    with show_failure():
        meter.mark("build")
        model = GPT(SMALL)
        optimizer = torch.optim.Adam(model.parameters())
        ids, targets = next(corpus.byte_batches(text, SMALL.seq_length, 1, 1, seed=0))
        meter.mark("forward")
        loss = model(ids, targets)
        meter.mark("backward")
        loss.backward()
        meter.mark("optimizer step")
        optimizer.step()

# %%
viz.live_memory(meter, title="training with 10 MB")

# %% [markdown]
# Even if a model survives its first forward and backward pass, training can still run out of memory. Here are the two devices.


# %%
def on_a_small_device():
    with MemoryMeter(capacity=10_000_000):
        model = GPT(SMALL)
        optimizer = torch.optim.Adam(model.parameters())
        ids, targets = next(
            corpus.byte_batches(text, SMALL.seq_length, 1, 1, seed=dist.get_rank())
        )
        model(ids, targets).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


with show_failure():
    launch(on_a_small_device, 2)

# %% [markdown]
# A second device doesn't help, because every replica needs the complete optimizer state. The next table lists the symptoms from this chapter along with their causes.

# %%
symptoms(0)

# %% [markdown]
# ## Play with the bill
#
# If you have a few more minutes, play with the sliders. Each bar shows how much memory a GPU needs if you train with Adam in mixed precision. If there's more than one pipeline stage, you'll see a bar for the first stage and a bar for the last stage. First, change only `dp`. Why doesn't any bar change? Then increase `sequence`. Which part of each bar grows the fastest, and why?


# %% tags=["explore"]
def calculator(layers, hidden, tp, pp, dp, sequence, micro_batch, gpu):
    config = GPTConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=hidden // 128,
        vocab_size=50257,
        seq_length=sequence,
    )
    billions = memory.parameter_count(config) / 1e9
    layout = Layout(tp=tp, pp=pp, dp=dp, micro_batch=micro_batch)
    stages = {"each GPU": 0} if pp == 1 else {"first stage": 0, "last stage": pp - 1}
    return viz.bill(
        {name: bill(config, layout, stage=stage) for name, stage in stages.items()},
        capacity=memory.GPUS[gpu],
        title=f"{billions:.1f} billion parameters; GPUs: {layout.gpus}, "
        f"sequences per step: {layout.sequences}",
    )


viz.explore(
    calculator,
    layers=(24, 48, 96),
    hidden=(2048, 4096, 8192, 12288),
    tp=(1, 2, 4, 8),
    pp=(1, 2, 4, 8, 16),
    dp=(1, 2, 8, 64),
    sequence=(1024, 2048, 4096, 8192),
    micro_batch=(1, 2, 4),
    gpu=list(memory.GPUS),
)

# %% [markdown]
# <details><summary>Going deeper: the bill in the wild, and other ways to shrink it</summary>
#
# - **Megatron-LM** estimates memory in the same way, with the function `report_theoretical_memory` in `megatron/training/theoretical_memory_usage.py`. Megatron counts 18 bytes per parameter, because it accumulates gradients in float32 when it trains in bfloat16. With Megatron's distributed optimizer, each of the `d` data-parallel ranks needs only 6 + 12/d bytes per parameter.
#
# - **PyTorch** can tell you how much memory a GPU really uses. Call `torch.cuda.max_memory_allocated()` to get the peak, and use `torch.cuda.memory._record_memory_history()` to record every allocation. Expect higher numbers than our formulas predict. The allocator rounds up and keeps freed memory in reserve, and libraries such as cuBLAS allocate buffers of their own.
#
# - **PyTorch's `"meta"` device** is for tensors that have a shape and a dtype but take up no memory. Autograd works with these tensors as usual. So if you wrap the measurement above in `with torch.device("meta"):`, you can measure on your laptop how many bytes a layer of GPT-3 saves for the backward pass.
#
# - **Recomputation** is built into PyTorch as `torch.utils.checkpoint`. Megatron's *selective* recomputation recomputes only the attention scores.
#
# - **Sequence parallelism** (chapter 12) also shards the activations that tensor parallelism replicates, so even the 10 in the formula above gets divided by `p`.
#
# - **ZeRO** (from DeepSpeed) and **FSDP2** (from PyTorch) shard the weights, gradients, and optimizer state across the data-parallel ranks, so no replica has to hold everything (chapter 14).
#
# - **Offloading** moves tensors that aren't needed right now, such as the optimizer state, to the CPU's memory or to disk. ZeRO and FSDP both offer it. The price you pay is PCIe traffic.
#
# </details>
#
# ## Your library so far
#
# Every function that passes its check is added to your own Python package, `my_tp`, in a folder next to your notebooks. Here's what your package can do so far.

# %%
from tplab.course import library

library(0)

# %% [markdown]
# In all three kinds of parallelism, the ranks have to communicate. So before we split anything, we should find out what communication costs. How many bytes do four ranks have to send in total to sum their tensors? Can you think of a better way than sending every tensor to every rank? [Chapter 01](01_ranks_and_collectives.ipynb) has the answer.
