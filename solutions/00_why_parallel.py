# %% [markdown]
# # 00 · Why parallel
#
# If you've ever run into an out-of-memory error during training, you've probably asked yourself why a model that *loads* without any trouble can't be trained. In this chapter, you'll find out where the memory goes, down to the last byte. You'll learn to calculate how much memory any GPT needs, and you'll find the smallest number of GPUs that can train it.
#
# We won't distribute anything yet, so all you need is PyTorch. About 75 minutes.

# %% tags=["setup"]

import torch
from torch import nn

from tplab import launch, memory, viz
from tplab.common import corpus
from tplab.course import check, predict, show_failure, symptoms
from tplab.memory import (
    GPT,
    GPTConfig,
    Layer,
    Layout,
    MemoryMeter,
    bill,
    gradient_bytes,
    optimizer_bytes,
    parameter_bytes,
    saved_for_backward,
    tensor_bytes,
)

# %% [markdown]
# Here's what we're up against. Each bar shows how much memory a single GPU would need to train a published model, even with just one sequence at a time. The dashed line marks the memory of a large GPU. (**GB** means 10⁹ bytes.)

# %%
H100 = memory.GPUS["H100, 80 GB"]
viz.bill(
    {name: bill(config) for name, config in memory.PRESETS.items()},
    capacity=H100,
    title="Training on one GPU: what it would have to hold",
)

# %% [markdown]
# ## Watch a model train
#
# Four kinds of tensors are in memory while a model trains.
#
# - The **weights** are what the model learns.
# - The **gradients** come out of the backward pass. There's one for each weight.
# - The **optimizer state** is what the optimizer remembers from earlier steps.
# - The **activations** are intermediate results that the forward pass saves because the backward pass will need them.
#
# Let's watch all four. Our model is a GPT in plain PyTorch, small enough for a laptop, and `MemoryMeter` follows every tensor from
# the moment it's created until it's freed. We take two training steps with Adam, in float32.
#
# **Predict** before you run the next cell. In which of the two steps will memory peak? And in which phase does the optimizer state first
# appear: forward (1), backward (2), or optimizer step (3)?

# %% predict="0.a"
predict("0.a", highest_peak_in_step=2, optimizer_state_appears_in_phase=3)

# %%
SMALL = GPTConfig(num_layers=4, hidden_size=128, num_heads=4, vocab_size=corpus.VOCABULARY, seq_length=64)
text = corpus.python_sources(50_000)

with MemoryMeter() as meter:
    meter.mark("build")
    model = GPT(SMALL)
    optimizer = torch.optim.Adam(model.parameters())
    for ids, targets in corpus.byte_batches(text, SMALL.seq_length, 4, 2, seed=0):  # [b, s] each
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
# Follow the curve from left to right. Building the model allocates its weights. During the forward pass, memory use climbs because activations are being saved. The backward pass frees them one by one, and gradients take their place. Finally, the optimizer step allocates its state, and that memory is never freed again.
#
# ## What does an optimizer remember?
#
# Large models are trained in **mixed precision**. The weights and gradients are stored in 16 bits, because that makes the matmuls fast. But most updates are so tiny that they'd get lost in a 16-bit weight. That's why the optimizer keeps a copy of the weights in float32. It also stores its running averages in float32.
#
# Different optimizers keep different running averages, and you can tell which ones from the update rule. Here are simplified rules of five optimizers for weights $w$ and gradients $g$ of shape `[n, m]`:
#
# | | in every step |
# |---|---|
# | `"sgd"` | $w \leftarrow w - \eta g$ |
# | `"momentum"` | $m \leftarrow \mu m + g, \quad w \leftarrow w - \eta m$ |
# | `"adam"` | $m \leftarrow \beta_1 m + (1-\beta_1) g, \quad v \leftarrow \beta_2 v + (1-\beta_2) g^2, \quad w \leftarrow w - \eta\, m / \sqrt{v}$ |
# | `"amsgrad"` | like Adam, but with $u \leftarrow \max(u, v)$ and $w \leftarrow w - \eta\, m / \sqrt{u}$ |
# | `"adafactor"` | $r \leftarrow \beta r + (1-\beta)\,\mathrm{rowmeans}(g^2), \quad c \leftarrow \beta c + (1-\beta)\,\mathrm{columnmeans}(g^2), \quad w \leftarrow w - \eta\, g / \sqrt{r c^T / \mathrm{mean}(r)}$ |

# %% [markdown] task="0.1" title="What an optimizer has to remember" difficulty=2 minutes=12
# Which of these tensors have to be kept until the next step, and how many elements does each of them have? Write a function that returns the number of bytes of the weights, the gradients, and the optimizer state for a single matrix after a step. Everything is stored either in float32 or in mixed precision, as described above.
#
# The check compares your numbers with real tensors after a real step of `torch.optim`. (Leave out the step counter, which is
# one number per tensor.)


# %% exercise="0.1"
def state_bytes(shape: tuple[int, int], optimizer: str, mixed_precision: bool) -> dict[str, int]:
    """Return the bytes for a matrix [n, m] after one step: {"weights": ..., "gradients": ..., "optimizer": ...}."""
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
    return {"weights": size * elements, "gradients": size * elements, "optimizer": copy + 4 * remembered}
    ### END SOLUTION


# %% [markdown] hints="0.1"
# 1. Go through one of the rules. For each variable, ask yourself whether the next step reads its old value. For example, $g$ is recomputed in every step, so the optimizer doesn't have to store it. What about $m$?
# 2. $m$, $v$ and $u$ are as large as $w$. But $r$ has one element per row, and $c$ has one per column.
# 3. Weights and gradients take 4 bytes per element, or 2 in mixed precision. The optimizer takes 4 bytes for each element it remembers, which is
#    0, `n*m`, `2*n*m`, `3*n*m`, or `n + m`, and in mixed precision another `4*n*m` for its copy of the weights.

# %% check="0.1"
check("0.1", state_bytes)

# %% [markdown]
# With Adam in mixed precision, the three numbers are 2, 2, and 12, so training takes **16 bytes per parameter**. You'll need this number often. Let's see whether it also holds for a complete model.

# %%
half = GPT(SMALL).bfloat16()
master = [parameter.detach().float().requires_grad_() for parameter in half.parameters()]  # the float32 copy
adam = torch.optim.Adam(master)
ids, targets = next(corpus.byte_batches(text, SMALL.seq_length, 2, 1, seed=0))
half(ids, targets).backward()
for copy, parameter in zip(master, half.parameters(), strict=True):
    copy.grad = parameter.grad.float()
adam.step()
sizes = {
    "weights, 16 bits": parameter_bytes(half),
    "gradients, 16 bits": gradient_bytes(half),
    "the optimizer's weights, float32": tensor_bytes(master),
    "Adam's m and v, float32": optimizer_bytes(adam),
}
sizes["together"] = sum(sizes.values())
viz.table([{"what": name, "bytes per parameter": f"{size / parameters:.3f}"} for name, size in sizes.items()])

# %% [markdown]
# ## How many parameters?
#
# Papers round the number of parameters, but a model's configuration gives you the exact number. Here's the model that we've just trained, layer by layer. In the shapes, `b` is the batch size, `s` is the sequence length, and `h` is the hidden size. A GPT has `L` layers with `a` attention heads each, and a vocabulary of `v` tokens.

# %%
model

# %% [markdown] task="0.2" title="Count the parameters of a GPT" difficulty=2 minutes=18
# Write a function that counts the parameters of any GPT from its configuration. Besides `num_layers`, `hidden_size`, `num_heads`, `head_dim` (which is
# `h / num_heads`), `vocab_size` and `seq_length`, models differ in these fields:
#
# - `ffn_size` is the inner size of the MLP. `up` maps `h` features to `ffn_size` features, and `down` maps them back.
# - `gated` means that the MLP has a third matrix, `gate`, which is as large as `up`.
# - `kv_heads` is the number of heads that K and V have. It can be smaller than `num_heads`, which is called **grouped-query attention**. The matrices for K and V map `h` features to `kv_heads * head_dim` features.
# - `bias` says whether the linear layers have biases. The output layer never has one. If it's true, the norms are LayerNorms, with a weight and a bias of
#   size `h`. Otherwise they're RMSNorms, which only have a weight.
# - `learned_positions` says whether there's a table of `seq_length` position vectors, as in the model above.
# - `tied_embedding` says whether the output layer (`head`) uses the embedding's table. If it doesn't, it has a table of its own with the same size.
#
# The check builds real modules for GPT-2, Llama, and random models in between, and counts their parameters.


# %% exercise="0.2"
def parameter_count(config: GPTConfig) -> int:
    """Return the number of parameters of the model."""
    ### BEGIN SOLUTION
    h, bias = config.hidden_size, int(config.bias)
    kv = config.kv_heads * config.head_dim
    norm = h + bias * h
    attention = (h * h + bias * h) + 2 * (h * kv + bias * kv) + (h * h + bias * h)  # Q; K and V; out
    up = h * config.ffn_size + bias * config.ffn_size
    down = config.ffn_size * h + bias * h
    mlp = up + down + (up if config.gated else 0)
    tables = config.vocab_size * h * (1 if config.tied_embedding else 2)
    positions = config.seq_length * h if config.learned_positions else 0
    return tables + positions + config.num_layers * (2 * norm + attention + mlp) + norm
    ### END SOLUTION


# %% [markdown] hints="0.2"
# 1. Go through the printed model from top to bottom and write down the shape of every weight and bias. Which of them appear only once, and which appear in every layer?
# 2. `nn.Linear(n, m)` has `n * m` weights, and `m` more if it has a bias. Attention contains four linear layers, and the MLP contains two or three. Which of them depend on `kv_heads`, and which depend on `ffn_size`?
# 3. A layer has two norms; `q` and `out` with `h * h`; `k` and `v` with `h * kv_heads * head_dim`; and `up`, `down` and perhaps `gate` with `h * ffn_size`; each with a bias as long
#    as its output. Around the layers, there's `vocab_size * h` once or twice, perhaps `seq_length * h`, and a final norm.

# %% check="0.2"
check("0.2", parameter_count)

# %% [markdown]
# Let's compare your function with published numbers. (GPT-2's checkpoint is named 1558M, table D.1 of the GPT-3 paper says 174,600 million, the
# 16-bit checkpoints of Llama 3 8B and 70B have 16,060,522,496 and 141,107,412,992 bytes, and the Llama 3 paper says 405B.)

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
    difference = f"{yours / PUBLISHED[name] - 1:+.2%}"
    rows.append(
        {"model": name, "yours": f"{yours:,}", "published": f"{PUBLISHED[name]:,.0f}", "difference": difference}
    )
viz.table(rows)

# %% [markdown]
# ## Activations
#
# So far, it didn't matter how much data you feed into the model. For activations it does, because they grow with the batch size and with the sequence length. PyTorch has a hook that's called for every tensor that autograd saves for the backward pass. Here's everything that a single layer saves, in 16 bits.

# %%
layer = Layer(SMALL).bfloat16()
x = torch.randn(2, SMALL.seq_length, SMALL.hidden_size, dtype=torch.bfloat16, requires_grad=True)  # [b, s, h]
with saved_for_backward(layer) as kept:
    layer(x)
NAMES = """input of the first norm; its mean; its spread; input of Q, K and V; K; Q; softmax of the scores; dropout mask;
V; scores after dropout; input of out; dropout mask; input of the second norm; its mean; its spread; input of up;
input of GELU; input of down; dropout mask"""
NAMES = [name.strip() for name in NAMES.split(";")]
viz.table(
    [
        {"what": what, "shape": str(list(shape)), "dtype": str(dtype).removeprefix("torch."), "bytes": size}
        for what, (shape, dtype, size) in zip(NAMES, kept.pieces, strict=True)
    ],
    title=f"b = 2, s = 64, h = 128, a = 4: {kept.bytes:,} bytes saved",
)

# %% [markdown]
# If you ignore the tiny means and variances of the norms and add up everything else, you get a famous formula (Korthikanti et al. 2022, equation 1):
#
# $$\text{a layer saves}\quad sbh\left(34 + 5\,\frac{as}{h}\right)\ \text{bytes}$$
#
# The 34 comes from the tensors with shape `[b, s, h]`, or `[b, s, 4h]` inside the MLP. The second term comes from the attention scores, whose shape is `[b, a, s, s]`. For each element, the output of the softmax takes 2 bytes, the dropout mask takes 1, and the output of the dropout takes 2.
#
# **Predict.** You double the batch `b`. By what factor does the state grow (that is, weights, gradients, and optimizer state together)? By what factor do the activations grow? Now double `s` instead. By what factor do the bytes of the *scores* grow?

# %% predict="0.b"
predict("0.b", states=1, activations=2, scores=4)

# %%
rows = []
for b, s in ((1, 64), (2, 64), (1, 128), (1, 256)):
    layer = Layer(SMALL).bfloat16()
    x = torch.randn(b, s, SMALL.hidden_size, dtype=torch.bfloat16, requires_grad=True)  # [b, s, h]
    with saved_for_backward(layer) as kept:
        layer(x)
    h, a = SMALL.hidden_size, SMALL.num_heads
    statistics = sum(size for shape, _, size in kept.pieces if shape == (b, s, 1))  # of the two norms
    rows.append(
        {
            "b": b,
            "s": s,
            "states": 16 * sum(parameter.numel() for parameter in layer.parameters()),
            "saved by autograd": kept.bytes - statistics,
            "sbh(34 + 5as/h)": s * b * h * 34 + 5 * a * s * s * b,
            "of it, scores": 5 * a * s * s * b,
        }
    )
viz.table(rows, title="one layer, bytes")

# %% [markdown]
# The formula and the measurement agree to the byte. Notice how fast the scores grow. That's why long sequences are expensive, and it's why **FlashAttention** (Dao et al. 2022), which recomputes the scores in the
# backward pass instead of saving them, is used everywhere today.
#
# ## Repair it
#
# Activations are also behind one of the most common memory bugs. It happens when a loop adds up its losses in order to print their average at the end. Google's Brax shipped this bug in its PyTorch training example (google/brax, pull request 152), and PyTorch's FAQ has warned about it for years. Here it is in a validation loop.


# %%
def as_shipped(model, batches):
    total, count = torch.zeros(()), 0
    for ids, targets in batches:
        total = total + model(ids, targets)
        count += 1
    return total / count


with MemoryMeter() as meter:
    meter.mark("build")
    model = GPT(SMALL)
    meter.mark("validate")
    loss = as_shipped(model, corpus.byte_batches(text, SMALL.seq_length, 4, 12, seed=0))
viz.live_memory(meter, title="a validation loop over 12 batches")

# %% [markdown] task="0.3" title="Repair a validation loop" difficulty=2 minutes=8
# The memory use looks like a staircase! On a GPU, you'd get an out-of-memory error somewhere in the middle of the validation set. Repair the function so that it still returns the same average, but its memory use doesn't grow with the number of batches. There's no backward pass here, so it shouldn't hold any activations at all. It also shouldn't change the model.


# %% exercise="0.3"
def average_loss(model: nn.Module, batches) -> float:
    """Return the average of model(ids, targets) over all batches, which is any iterable of (ids, targets)."""
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
# 1. A tensor that was computed from the model's weights drags its whole history along. Which variable here is computed from the losses of *all* batches?
# 2. If you turn each loss into a plain number, the memory stops growing. But while the model runs, autograd still saves activations for a backward pass that never comes. How do
#    you tell it not to?
# 3. Put the loop into `with torch.no_grad():`, and add up `model(ids, targets).item()`.

# %% check="0.3"
check("0.3", average_loss)

# %% [markdown]
# **Predict.** Why did nobody notice for so long? Suppose a loop runs `total = total + loss` over 12 batches. At the end of a validation loop, how many batches still have their activations in memory? And how many do at the end of a *training* loop, which calls `loss.backward()` on every batch?

# %% predict="0.c"
predict("0.c", validation=12, training=0)

# %% [markdown]
# ## Models that no laptop holds
#
# PyTorch has a device called `"meta"`. Tensors on this device have a shape and a dtype but don't take up any memory. Autograd works with them as usual, so we can build all of GPT-3 on your laptop and find out what one of its layers saves.

# %%
GPT3 = memory.PRESETS["GPT-3 175B"]
with torch.device("meta"):
    layer = Layer(GPT3).bfloat16()
    x = torch.randn(1, GPT3.seq_length, GPT3.hidden_size, dtype=torch.bfloat16, requires_grad=True)  # [1, 2048, 12288]
    with saved_for_backward(layer) as kept:
        layer(x)
    count = sum(parameter.numel() for parameter in GPT(GPT3).parameters())
print(f"GPT-3 has {count:,} parameters")
print(f"each of its {GPT3.num_layers} layers saves {kept.bytes / 1e9:.2f} GB for a single sequence")

# %% [markdown]
# **Predict.** How many 80 GB GPUs do you need just to *hold* the weights of GPT-3, at 2 bytes each, so that it can answer a question? And how many do you need to train it, at 16 bytes per parameter, if you don't count the activations?

# %% predict="0.d"
predict("0.d", gpus_to_answer=5, gpus_to_train=35)

# %% [markdown]
# ## Three ways to share the bill
#
# When you train on several GPUs, each of them runs the same program in its own process. Every process has a number, which is called its **rank**. A process can only access its own memory, so if it needs data from another rank, that rank has to send it.
#
# With **data parallelism**, every rank holds the full model and works on different sequences. The gradients are added up across the ranks before each optimizer step, so all copies (the
# **replicas**) stay the same.

# %%
viz.parallelism("data")

# %% [markdown]
# With **tensor parallelism**, every rank holds a slice of every matrix, and all ranks work on the same sequences. No rank can compute a layer on its own, so the ranks have to exchange data in every layer. This is what you'll build in this course. (You may also meet its older name, *model parallelism*.)

# %%
viz.parallelism("tensor")

# %% [markdown]
# With **pipeline parallelism**, every rank holds some of the layers, which form a **stage**. The batch is split into **micro-batches**. While one stage is working on a micro-batch, the stage before it can already start on the next one.

# %%
viz.parallelism("pipeline")

# %% [markdown]
# What does each of them divide?
#
# | | weights, gradients, optimizer state | activations |
# |---|---|---|
# | data parallelism | nothing | each rank has those of its own sequences |
# | pipeline parallelism, `pp` stages | each rank has $L/pp$ layers | those of $L/pp$ layers, for up to `pp` micro-batches at a time |
# | tensor parallelism, `p` ranks | the matrices are divided by `p` | some are divided by `p` |
#
# Why only "some"? Inside attention and the MLP, each rank works with its own slice. But in between, at the norms and the dropouts, every rank holds the same full tensors of shape `[b, s, h]`. So only part of the formula is divided by `p` (Korthikanti et al. 2022, equation 2, where `p` is called `t`):
#
# $$sbh\left(34 + 5\,\frac{as}{h}\right) \quad\longrightarrow\quad sbh\left(10 + \frac{24}{p} + 5\,\frac{as}{hp}\right)$$
#
# **Predict.** In GPT-3, $5as/h$ is 80, so a layer saves 114 bytes for each of its $s \cdot b \cdot h$ elements. How many bytes does each rank save with 8 tensor-parallel ranks?

# %% predict="0.e"
predict("0.e", bytes=23)

# %% [markdown]
# Now play with all of it. The bars show what the first and the last pipeline stage hold, for Adam in mixed precision. First, change only `data`. Which bar changes? Then make `sequence` longer. Which part grows the fastest?


# %% tags=["explore"]
def calculator(layers, hidden, p, pipeline, data, sequence, micro_batch, gpu):
    config = GPTConfig(
        num_layers=layers, hidden_size=hidden, num_heads=hidden // 128, vocab_size=50257, seq_length=sequence
    )
    layout = Layout(tp=p, pp=pipeline, dp=data, micro_batch=micro_batch)
    stages = {"each GPU": 0} if pipeline == 1 else {"first stage": 0, "last stage": pipeline - 1}
    return viz.bill(
        {name: bill(config, layout, stage=stage) for name, stage in stages.items()},
        capacity=memory.GPUS[gpu],
        title=f"{memory.parameter_count(config) / 1e9:.1f} billion parameters; GPUs: {layout.gpus}, "
        f"sequences a step: {layout.sequences}",
    )


viz.explore(
    calculator,
    layers=(24, 48, 96),
    hidden=(2048, 4096, 8192, 12288),
    p=(1, 2, 4, 8),
    pipeline=(1, 2, 4, 8, 16),
    data=(1, 2, 8, 64),
    sequence=(1024, 2048, 4096, 8192),
    micro_batch=(1, 2, 4),
    gpu=list(memory.GPUS),
)

# %% [markdown] task="0.4" title="The fewest GPUs for a model" difficulty=3 minutes=20
# You've been asked to train a model on as few GPUs as possible. `bill(config, Layout(tp=..., pp=...), stage=...)` tells you how much memory a GPU of a given pipeline stage needs, and its `.total` is the sum in bytes. Some stages need more memory than others, but the model only fits if *every* GPU has enough.
#
# Find the layout with the fewest GPUs. There are three rules:
#
# - Attention heads can't be split, so `num_heads` has to be divisible by `tp`. Also, `tp` can't be larger than `largest_tp`, because tensor parallelism should stay within one machine.
# - All stages have the same number of layers, so `num_layers` has to be divisible by `pp`.
# - If several layouts need the same number of GPUs, return the one with the smallest `tp`, because it communicates the least.
#
# If nothing fits, raise a `ValueError`. Its message should say how many bytes the fullest GPU would need with the best possible layout.


# %% exercise="0.4"
def smallest_layout(config: GPTConfig, gpu_bytes: int, largest_tp: int = 8) -> Layout:
    """Return the Layout(tp=..., pp=...) with the fewest GPUs on which every GPU needs at most gpu_bytes.

    Raises ValueError if there is none, naming the bytes that the fullest GPU needs with the best layout.
    """
    ### BEGIN SOLUTION
    layouts = [
        Layout(tp=tp, pp=pp)
        for tp in range(1, largest_tp + 1)
        if config.num_heads % tp == 0
        for pp in range(1, config.num_layers + 1)
        if config.num_layers % pp == 0
    ]
    needs = {layout: bill(config, layout).total for layout in layouts}  # of the stage that needs the most
    fitting = [layout for layout in layouts if needs[layout] <= gpu_bytes]
    if not fitting:
        raise ValueError(f"even the best layout needs {min(needs.values())} bytes on a GPU that has {gpu_bytes}")
    return min(fitting, key=lambda layout: (layout.gpus, layout.tp))
    ### END SOLUTION


# %% [markdown] hints="0.4"
# 1. List all layouts that the rules allow. For each layout, find out how much memory its fullest GPU needs. Don't guess which stage is the fullest, but check all of them.
# 2. Without `stage`, `bill(config, layout)` looks for the stage that needs the most. `layout.gpus` is the number of GPUs.
# 3. Collect the layouts that fit, and return `min(fitting, key=lambda layout: (layout.gpus, layout.tp))`. If no layout fits, raise the error with the smallest number of bytes among all layouts.

# %% check="0.4"
check("0.4", smallest_layout)


# %%
def shown(name, gpu):
    try:
        layout = smallest_layout(memory.PRESETS[name], memory.GPUS[gpu])
    except ValueError:
        return {"model": name, "GPU": gpu, "tp": "-", "pp": "-", "GPUs": "not possible"}
    return {"model": name, "GPU": gpu, "tp": layout.tp, "pp": layout.pp, "GPUs": layout.gpus}


viz.table([shown(name, gpu) for name in memory.PRESETS for gpu in memory.GPUS])

# %% [markdown]
# Look at GPT-3 and compare its row for 80 GB with the 35 GPUs from your prediction. The activations and everything that's replicated account for part of the difference, and the rules about heads and stages account for the rest. And these GPUs hold just *one* copy of the model. To finish training in a reasonable time, you'd run many such copies side by side with data parallelism.
#
# ## Break it
#
# Remember the model that loads but can't be trained? Let's pretend that our device has just 10 MB of memory. (`MemoryMeter` raises an error as soon as the program uses more.) The program builds the small model, runs a forward and a backward pass, and takes an optimizer step. Where do you think it'll fail?

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
viz.live_memory(meter, title="10 MB: the model fits, its optimizer doesn't")

# %% [markdown]
# Everything fits until the first `optimizer.step()`. So even if a model loads and gets through a forward and a backward pass, you can't be sure that it fits.
#
# What if you put the same model on two devices, with data parallelism? It fails at exactly the same point, because every replica holds the complete state.


# %%
def on_a_small_device():
    import torch.distributed as dist

    with MemoryMeter(capacity=10_000_000):
        model = GPT(SMALL)
        optimizer = torch.optim.Adam(model.parameters())
        ids, targets = next(corpus.byte_batches(text, SMALL.seq_length, 1, 1, seed=dist.get_rank()))
        model(ids, targets).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


with show_failure():
    launch(on_a_small_device, 2)

# %%
symptoms(0)

# %% [markdown]
# <details><summary>Going deeper: the bill in the wild, and other ways to shrink it</summary>
#
# - **Megatron-LM** has a function that computes such a bill, `report_theoretical_memory` in `megatron/training/theoretical_memory_usage.py`. It counts 18 bytes per parameter, because it accumulates gradients in float32 when it trains in bfloat16. With its distributed optimizer, that becomes 6 + 12/d on `d` data-parallel ranks.
# - **PyTorch** reports what a GPU really uses: `torch.cuda.max_memory_allocated()`, and `torch.cuda.memory._record_memory_history()` for a picture of every allocation. Expect more than the
#   bill, because the allocator rounds up and keeps freed memory in reserve, and libraries need buffers of their own.
# - **Recomputation** (`torch.utils.checkpoint`) saves only a layer's input and computes the rest again in the backward pass. Megatron's *selective* recomputation does that for the
#   scores only. In the formula above, 10 bytes per element aren't divided by `p`. Sequence parallelism (chapter 12) divides those, too.
# - **ZeRO** (DeepSpeed) and **FSDP2** (PyTorch) divide the 16 bytes over the data-parallel ranks, so that replicas no longer hold everything (chapter 14).
# - **Offloading** moves tensors that aren't needed right now, such as the optimizer state, to the CPU's memory or to disk. ZeRO and FSDP both offer it. You pay with
#   traffic over PCIe.
#
# </details>
#
# ## Your library so far
#
# Every function that passes its check is added to your own Python package, `my_tp`, which is next to your notebooks. It can now calculate how much memory any GPT needs.

# %%
from tplab.course import library

library(0)

# %% [markdown]
# In all three kinds of parallelism, the ranks have to communicate. So before we split anything, we should find out what communication costs. How many bytes do four ranks have to send to add up a tensor? And can you think of a better way than sending everything to everyone?
