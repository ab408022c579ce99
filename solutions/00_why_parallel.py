# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 00 · Why parallel
#
# **The question.** Why is one GPU not enough to train a large language model, and what does each way of using several of them divide?
#
# **What you will have built.** The *memory bill* of a GPT: three small functions that turn its configuration into bytes, and say how many GPUs must share it. Every term is measured first, on a small model that runs here.
#
# You need PyTorch, and nothing else. No GPU, no distributed code: this chapter counts. About 75 minutes.

# %% tags=["setup"]
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tplab import device, launch, memory, viz
from tplab.common import corpus
from tplab.course import check, predict, show_failure, symptoms
from tplab.memory import (
    GPTConfig,
    Layout,
    MemoryMeter,
    gradient_bytes,
    optimizer_bytes,
    parameter_bytes,
    saved_for_backward,
    tensor_bytes,
)

# %% [markdown]
# This is where we are going: what a single GPU would have to hold to train five published models, one sequence at a time. The dashed line, hard against the left edge, is what a large GPU has. **GB** is 10⁹ bytes throughout this chapter.

# %%
H100 = memory.GPUS["H100, 80 GB"]
viz.bill(
    {name: memory.bill(config) for name, config in memory.PRESETS.items()},
    capacity=H100,
    title="Training on one GPU: what it would have to hold",
)

# %% [markdown]
# ## 1 · What training keeps in memory
#
# Four kinds of tensors are alive while a model trains:
#
# - the **weights**, also called parameters: what the model learns;
# - the **gradients**: one number for each weight, from the backward pass;
# - the **optimizer state**: what the optimizer remembers of earlier gradients. Adam keeps two running averages for each weight;
# - the **activations**: results of the forward pass that the backward pass needs again.
#
# The first three have the size of the model. The last grows with the data that goes through at once.
#
# To measure them we need a model. Here is a GPT in plain PyTorch, small enough for a laptop, with the parts of a large one. It reads **tokens** (here: bytes of text) and predicts the next one. Symbols, also in later chapters: `b` batch (sequences at once), `s` sequence length (tokens of one), `h` hidden size (numbers for each token),
# `a` attention heads, `L` layers, `v` vocabulary (how many different tokens there are).


# %%
def dropout(x, p=0.1):
    return torch.native_dropout(x, p, True)[0]  # the kernel that a GPU uses: it keeps a mask of one byte a number


class Layer(nn.Module):
    """One transformer layer: attention, then an MLP, each behind a norm and added to its own input."""

    def __init__(self, c):
        super().__init__()
        h = c.hidden_size
        self.heads = c.num_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(h), nn.LayerNorm(h)
        self.q, self.k, self.v, self.out = (nn.Linear(h, h) for _ in range(4))
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def attention(self, x):  # [b, s, h]
        b, s, h = x.shape
        q, k, v = (
            linear(x).view(b, s, self.heads, -1).transpose(1, 2)  # [b, a, s, h/a]
            for linear in (self.q, self.k, self.v)
        )
        future = torch.full((s, s), -math.inf, dtype=x.dtype, device=x.device).triu(1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(h // self.heads) + future  # [b, a, s, s]
        y = dropout(scores.softmax(-1)) @ v  # [b, a, s, h/a]
        return self.out(y.transpose(1, 2).reshape(b, s, h))  # [b, s, h]

    def forward(self, x):  # [b, s, h]
        x = x + dropout(self.attention(self.attention_norm(x)))
        return x + dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.positions = nn.Embedding(c.seq_length, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.hidden_size)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.head.weight = self.embedding.weight  # tied: the output layer uses the embedding's table

    def forward(self, ids, targets):  # [b, s] each
        x = self.embedding(ids) + self.positions.weight[: ids.shape[1]]  # [b, s, h]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))  # [b, s, v]
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


SMALL = GPTConfig(num_layers=4, hidden_size=128, num_heads=4, vocab_size=corpus.VOCABULARY, seq_length=64)
text = corpus.python_sources(50_000)
model = GPT(SMALL)
parameters = sum(parameter.numel() for parameter in model.parameters())
print(f"{parameters:,} parameters")

# %% [markdown]
# `MemoryMeter` follows every tensor from its birth to its end. Two training steps with Adam, in float32:

# %%
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
viz.live_memory(meter, title=f"Two training steps of {parameters:,} parameters")

# %% [markdown]
# Read it from left to right. Building allocates the weights. The **forward** pass climbs: it keeps its activations. The **backward** pass uses them up one by one, while gradients take their place. The first **optimizer step** allocates Adam's averages, which never go away: the second step starts
# from a higher floor, and so its peak is the highest of all.
#
# **Predict.** After a first step with Adam, in float32 (4 bytes a number): how many bytes for each parameter are weights, gradients, optimizer state?

# %% predict="0.a"
predict("0.a", weights=4, gradients=4, optimizer=8)


# %%
def one_step(make_optimizer):
    """Bytes of the real tensors after one step, for each parameter."""
    model = GPT(SMALL)
    optimizer = make_optimizer(model.parameters())
    ids, targets = next(corpus.byte_batches(text, SMALL.seq_length, 2, 1, seed=0))
    model(ids, targets).backward()
    optimizer.step()
    sizes = parameter_bytes(model), gradient_bytes(model), optimizer_bytes(optimizer)
    return [f"{size / parameters:.4f}" for size in sizes]


rows = []
for name, make in {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p),
}.items():
    weights, gradients, state = one_step(make)
    rows.append({"optimizer": name, "weights": weights, "gradients": gradients, "optimizer state": state})
viz.table(rows, title="measured bytes for each parameter, float32")

# %% [markdown]
# Adam shows a little more than 8: it also counts its steps, in one number for each *tensor*. We leave that out from here on.
#
# ## 2 · Mixed precision
#
# Large models compute with 16-bit numbers, which GPUs multiply much faster. But 16 bits are too coarse to *collect* many small updates, so the optimizer keeps the weights once more in float32, and its averages too. This is **mixed precision**: 2 bytes of weights and 2 of gradients, then 4 + 4 + 4 bytes in the optimizer. Measured:

# %%
half = GPT(SMALL).bfloat16()
master = [parameter.detach().float().requires_grad_() for parameter in half.parameters()]  # the float32 copy
adam = torch.optim.Adam(master)
ids, targets = next(corpus.byte_batches(text, SMALL.seq_length, 2, 1, seed=0))
half(ids, targets).backward()
for copy, parameter in zip(master, half.parameters(), strict=True):
    copy.grad = parameter.grad.float()
adam.step()
with torch.no_grad():
    for copy, parameter in zip(master, half.parameters(), strict=True):
        copy.grad = None
        parameter.copy_(copy)
sizes = {
    "weights, 16 bits": parameter_bytes(half),
    "gradients, 16 bits": gradient_bytes(half),
    "optimizer: weights in float32": tensor_bytes(master),
    "optimizer: Adam's averages": optimizer_bytes(adam),
}
sizes["together"] = sum(sizes.values())
viz.table([{"what": name, "bytes for each parameter": f"{size / parameters:.3f}"} for name, size in sizes.items()])

# %% [markdown]
# **16 bytes a parameter.** Remember this number. (Megatron-LM collects the gradients in float32 when it trains in bfloat16: 2 + 4 + 12, and then it is 18.)
#
# ## 3 · Activations
#
# Autograd tells us itself what it keeps: PyTorch has a hook that is called for every tensor saved for the backward pass. `saved_for_backward` counts their bytes, without the parameters, and each piece of memory once. One layer of the small model, in 16-bit numbers:

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
    title=f"b = 2, s = 64, h = 128, a = 4: {kept.bytes:,} bytes kept",
)

# %% [markdown]
# PyTorch stores batch and heads of Q, K and V as one dimension of `b·a = 8`, and batch and sequence before a linear layer as one of `b·s = 128`. The mean and the spread of the norms are one number a token, and left out from here on. Everything else added up, with 2 bytes a number and 1 byte in a mask:
#
# $$\text{a layer keeps}\quad sbh\left(34 + 5\,\frac{as}{h}\right)\ \text{bytes}$$
#
# (Korthikanti et al. 2022, equation 1.) The 34 are tensors of shape `[b, s, h]` and, in the MLP, `[b, s, 4h]`. The second term are the attention scores `[b, a, s, s]`: softmax, dropout mask and result, 2 + 1 + 2 bytes.
#
# **Predict.** Double the batch `b`. By which factor do the states (weights, gradients, optimizer state) grow, by which the activations? And by which factor do the bytes of the *scores* grow if you double `s` instead?

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
            "kept by autograd": kept.bytes - statistics,
            "sbh(34 + 5as/h)": s * b * h * 34 + 5 * a * s * s * b,
            "of it, scores": 5 * a * s * s * b,
        }
    )
viz.table(rows, title="one layer, bytes")

# %% [markdown]
# Formula and measurement agree to the byte. The scores grow with `s²`: this is why long sequences are expensive, and why **FlashAttention** (Dao et al. 2022), which computes the scores again in the backward pass instead of keeping them, is used everywhere today.
#
# ## 4 · Published models
#
# The same for models that no laptop holds. PyTorch has a device called `"meta"`, on which tensors have a shape and a dtype but no memory. Autograd works there as everywhere, so we can run one layer of GPT-3 and ask what it keeps:

# %%
GPT3 = memory.PRESETS["GPT-3 175B"]
with torch.device("meta"):
    layer = Layer(GPT3).bfloat16()
    x = torch.randn(1, GPT3.seq_length, GPT3.hidden_size, dtype=torch.bfloat16, requires_grad=True)  # [1, 2048, 12288]
    with saved_for_backward(layer) as kept:
        layer(x)
    whole = GPT(GPT3)
print(f"a layer keeps {kept.bytes / 1e9:.2f} GB for one sequence; GPT-3 has {GPT3.num_layers} layers")
print(f"GPT-3 has {sum(parameter.numel() for parameter in whole.parameters()):,} parameters")

# %% [markdown]
# **Predict.** Guess first, then count. How many GPUs of 80 GB does it take to hold GPT-3's 175 billion parameters, so that it can answer a question: only the weights, 2 bytes each? And how many to train it, with 16 bytes for each parameter and without a single activation?

# %% predict="0.c"
predict("0.c", gpus_to_answer=5, gpus_to_train=35)


# %%
def gigabytes(size):
    return f"{size / 1e9:,.1f}"


rows = []
for name, config in memory.PRESETS.items():
    bill = memory.bill(config)
    rows.append(
        {
            "model": name,
            "parameters": f"{memory.parameter_count(config):,}",
            "weights": gigabytes(bill.weights),
            "gradients": gigabytes(bill.gradients),
            "optimizer state": gigabytes(bill.optimizer),
            "activations": gigabytes(bill.activations),
            "GPUs of 80 GB, to answer": math.ceil(bill.weights / H100),
            "to train": math.ceil(bill.total / H100),
        }
    )
viz.table(rows, title="in GB: Adam, mixed precision, one sequence")

# %% [markdown]
# The activations of Llama 3 are counted with FlashAttention and without dropout, as such models are trained today. The last two columns are lower bounds, the first of them for the weights alone, the second for everything in the table: they assume that the GPUs can share it evenly. Can they?
#
# ## 5 · Three ways to share
#
# A training run on several GPUs is one process for each of them, all running the same program. The processes are numbered from 0; the number is the **rank**. A rank sees only its own memory, so whatever it needs of another has to be sent. Sending is done together, in **collectives**: calls that all ranks make. The one you will see most is
# the **all-reduce**: it adds up a tensor over the ranks and gives everyone the sum. Whoever comes first waits.
#
# **Data parallelism.** Every rank holds the whole model, with the same numbers at the start, and takes other sequences. Before each optimizer step the gradients are added up, so that all models stay equal.

# %%
viz.parallelism("data")

# %% [markdown]
# **Tensor parallelism.** Every rank holds a slice of every matrix and works on the same sequences. No rank can finish a layer alone: each computes a part, and the parts are added up twice in each layer. This is what the course builds. We write `p` for the number of ranks.

# %%
viz.parallelism("tensor")

# %% [markdown]
# **Pipeline parallelism.** Every rank holds some layers, a **stage**. The batch is cut into **micro-batches** (`F0` to `F3` below), so that the ranks can work at the same time: while one stage computes micro-batch 1, the next has micro-batch 0. At the beginning and in the middle some ranks have nothing to do: the *bubble*. And the first stage keeps the
# activations of several micro-batches until their gradients come back.

# %%
viz.parallelism("pipeline")

# %% [markdown]
# Now for real: four linear layers, forward and backward, shared by two processes in each of the three ways. Don't read every line, you will write such code yourself from chapter 01 on; look at what comes out. (`copy_to_region` and `reduce_from_region` are chapter 03: they do the sending in tensor parallelism.)

# %%
HIDDEN, ROWS = 1024, 512


def stack(n, width=HIDDEN):
    """n pairs of linear layers, from HIDDEN numbers to `width` and back."""
    torch.set_num_threads(1)
    pairs = [(nn.Linear(HIDDEN, width, bias=False), nn.Linear(width, HIDDEN, bias=False)) for _ in range(n)]
    return nn.ModuleList(layer for pair in pairs for layer in pair).to(device())


def data_parallel():
    layers = stack(2)
    x = torch.randn(ROWS // 2, HIDDEN, device=device())  # [b/2, h]: half of the batch
    for layer in layers:
        x = layer(x)
    x.square().mean().backward()
    for parameter in layers.parameters():
        dist.all_reduce(parameter.grad)
    return parameter_bytes(layers)


def tensor_parallel():
    from tplab.tensor import copy_to_region, reduce_from_region

    layers = stack(2, width=HIDDEN // 2)  # half of every matrix
    x = torch.randn(ROWS, HIDDEN, device=device(), requires_grad=True)  # [b, h]: the whole batch
    for up, down in zip(layers[::2], layers[1::2], strict=True):
        x = reduce_from_region(down(up(copy_to_region(x))))  # [b, h] -> [b, h/2] -> [b, h]
    x.square().mean().backward()
    return parameter_bytes(layers)


def pipeline_parallel():
    layers, rank, done = stack(1), dist.get_rank(), []  # half of the layers
    for _ in range(2):  # two micro-batches forward
        x = torch.randn(ROWS // 2, HIDDEN, device=device())  # [b/2, h]
        if rank == 1:
            dist.recv(x, src=0)
            x.requires_grad_()
        y = layers[1](layers[0](x))
        if rank == 0:
            dist.send(y.detach(), dst=1)
        done.append((x, y))
    for x, y in done:  # and backward
        if rank == 0:
            gradient = torch.empty_like(y)
            dist.recv(gradient, src=1)
            y.backward(gradient)
        else:
            y.square().mean().backward()
            dist.send(x.grad, dst=0)
    return parameter_bytes(layers)


runs = {
    name: launch(fn, 2)
    for name, fn in (("data", data_parallel), ("tensor", tensor_parallel), ("pipeline", pipeline_parallel))
}
viz.table(
    [
        {
            "parallelism": name,
            "weights on a rank, bytes": f"{max(run):,}",
            "rank 0 took part in": ", ".join(f"{total.calls} {kind}" for kind, total in run.record.totals(0).items()),
            "bytes in them": f"{sum(total.bytes for total in run.record.totals(0).values()):,}",
        }
        for name, run in runs.items()
    ]
)

# %% [markdown]
# Data parallelism holds everything and sends gradients; the other two hold half and send activations. And the time, as it really passed:

# %%
viz.timeline(runs["data"], title="data parallelism: one wait, at the end")

# %%
viz.timeline(runs["tensor"], title="tensor parallelism: a wait in every pair of layers")

# %%
viz.timeline(runs["pipeline"], title="pipeline parallelism: a wait for the neighbour")

# %% [markdown]
# ## 6 · What is divided by what
#
# | | weights, gradients, optimizer state | activations |
# |---|---|---|
# | data parallel size `d` | whole on every rank | those of the rank's own sequences |
# | pipeline size `q` | of $L/q$ layers | of $L/q$ layers, for up to `q` micro-batches |
# | tensor parallel size `p` | matrices divided by `p`; small vectors whole | partly divided |
#
# "Partly": inside attention and MLP each rank computes with its own slice. Between them, at the norms, the dropouts and the inputs of `q`, `k`, `v` and `up`, every rank holds the same `[b, s, h]`. The formula splits accordingly (Korthikanti et al. 2022, equation 2, where `p` is called `t`):
#
# $$sbh\left(34 + 5\,\frac{as}{h}\right) \quad\longrightarrow\quad sbh\left(10 + \frac{24}{p} + 5\,\frac{as}{hp}\right)$$
#
# **Predict.** GPT-3 has $5as/h = 80$, so a layer keeps 114 bytes for each of its `s·b·h` numbers. How many on each of 8 tensor-parallel ranks?

# %% predict="0.d"
predict("0.d", bytes=23)

# %% [markdown]
# The calculator. It draws what the first and the last pipeline stage hold, with Adam in mixed precision, and which part no longer fits. `p` is the tensor-parallel size, `data` the number of copies of the whole model (**replicas**); each replica takes as many micro-batches as there are stages.
#
# Three things to try. (1) Turn only `data`: which bar moves? (2) Turn `sequence` up: which part grows fastest? (3) Set 96 layers, hidden 12288 and sequence 2048: that is GPT-3. What is the smallest number of GPUs of 80 GB that you can train it on?


# %% tags=["explore"]
def calculator(layers, hidden, p, pipeline, data, sequence, micro_batch, gpu):
    config = GPTConfig(
        num_layers=layers, hidden_size=hidden, num_heads=hidden // 128, vocab_size=50257, seq_length=sequence
    )
    layout = Layout(tp=p, pp=pipeline, dp=data, micro_batch=micro_batch)
    stages = {"each GPU": 0} if pipeline == 1 else {"first stage": 0, "last stage": pipeline - 1}
    return viz.bill(
        {name: memory.bill(config, layout, stage=stage) for name, stage in stages.items()},
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

# %% [markdown]
# Data parallelism never helps a model that does not fit. It makes training faster, not smaller: the title changes, the bars don't. (ZeRO and FSDP change that by dividing states over the replicas: chapter 14.) So for the model itself there remain `p` and the pipeline.
#
# Now write the bill yourself.

# %% [markdown] task="0.1" title="Count the parameters of a GPT" difficulty=2 minutes=20
# A configuration says everything that is needed. Its fields: `num_layers`, `hidden_size` (`h`), `num_heads`, `head_dim` (that is `h / num_heads`), `vocab_size`, `seq_length`, and six in which models differ:
#
# - `ffn_size`: the inner size of the MLP. `up` goes from `h` to it, `down` back.
# - `gated`: the MLP has a third matrix, the *gate*, of the size of `up`.
# - `kv_heads`: K and V may have fewer heads than Q (**grouped-query attention**). Their matrices go from `h` to `kv_heads * head_dim`.
# - `bias`: if true, every linear layer has a bias (except the output layer, which never has one), and each norm is a LayerNorm, with a weight and a bias of size `h`. If false, no linear layer has one, and each norm is an RMSNorm, with a weight of size `h` only.
# - `learned_positions`: if true, there is a table of `seq_length` vectors, as in the model above. If false, positions cost no parameters.
# - `tied_embedding`: if true, the output layer uses the embedding's table. If false, it has one of its own, just as large.
#
# The check builds each model out of `nn.Linear`, `nn.Embedding` and norms, and counts.


# %% exercise="0.1"
def parameter_count(config: GPTConfig) -> int:
    """How many parameters the model has."""
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


# %% [markdown] hints="0.1"
# 1. Go through the model from input to output and write down the shape of each tensor that it learns. What is there once, what once in each layer? How many norms are there in all?
# 2. `nn.Linear(n, m)` has `n * m` weights and, with a bias, `m` more. In a layer there are four of them in attention (`q`, `k`, `v`, `out`) and two or three in the MLP. Which of them do `kv_heads` and `ffn_size` change?
# 3. A layer: two norms; `q` and `out` of `h * h`; `k` and `v` of `h * kv_heads * head_dim`; `up`, `down`, perhaps the gate, of `h * ffn_size`; a bias for each, as long as its output. Around the layers: `vocab_size * h` once or twice, `seq_length * h` perhaps, and one last norm.

# %% check="0.1"
check("0.1", parameter_count)

# %% [markdown] task="0.2" title="The bytes of the training state" difficulty=1 minutes=8
# Three optimizers: `"sgd"`, `"momentum"` (SGD with momentum) and `"adam"`. In float32, or in mixed precision as in section 2, where the float32 copy of the weights belongs to the optimizer. Don't count Adam's step counters.


# %% exercise="0.2"
def state_bytes(parameters: int, optimizer: str, mixed_precision: bool) -> dict[str, int]:
    """Bytes after one optimizer step: {"weights": ..., "gradients": ..., "optimizer": ...}."""
    ### BEGIN SOLUTION
    number = 2 if mixed_precision else 4
    averages = {"sgd": 0, "momentum": 1, "adam": 2}[optimizer]
    copy = 4 if mixed_precision else 0
    return {
        "weights": number * parameters,
        "gradients": number * parameters,
        "optimizer": (copy + 4 * averages) * parameters,
    }
    ### END SOLUTION


# %% [markdown] hints="0.2"
# 1. For each optimizer: how many numbers does it remember for each parameter? The first table of section 1 has the answer in bytes.
# 2. In mixed precision, weights and gradients take 2 bytes a number. What the optimizer remembers stays in float32, and one more thing joins it.
# 3. Weights and gradients: 4 bytes each, or 2 in mixed precision. Optimizer: 0, 4 or 8 bytes, and in mixed precision 4 more for the float32 copy. All times `parameters`.

# %% check="0.2"
check("0.2", state_bytes)

# %% [markdown] task="0.3" title="The smallest p that fits" difficulty=3 minutes=25
# For models like GPT-2 and GPT-3: with biases, LayerNorm, learned positions, tied embedding, `ffn_size = 4h`, and as many K and V heads as Q heads. First what one of `p` tensor-parallel ranks holds, Adam in mixed precision:
#
# - divided by `p`: the matrices of every layer, and the biases of `q`, `k`, `v` and `up`, which belong to the columns that a rank computes;
# - whole on every rank: all norms, the table of positions, and the biases of `out` and `down`. Those two matrices leave one term of a sum on each rank, and the bias is added once, after the sum;
# - the embedding: its rows are dealt out, `vocab_size / p` to each rank, *rounded up* (the table is padded with unused rows);
# - activations of all layers, by the formula of section 6. What is kept outside the layers is left out here.
#
# Then the smallest `p`, from 1 to `largest`, with which that fits into `gpu_bytes`. Each rank takes whole heads, so `p` must divide `num_heads`. A model that fits with none of them is refused with a `ValueError`, which names the largest `p` that was tried and the bytes that a rank would still need there.


# %% exercise="0.3"
def rank_bytes(config: GPTConfig, p: int, micro_batch: int = 1) -> int:
    """Bytes on one of p tensor-parallel ranks: 16 for each of its parameters, and the activations of all layers."""
    ### BEGIN SOLUTION
    h, s, a = config.hidden_size, config.seq_length, config.num_heads
    divided = 12 * h * h + 3 * h + 4 * h  # the matrices; biases of q, k, v and of up
    whole = 2 * h + 4 * h  # biases of out and of down; two norms
    ends = math.ceil(config.vocab_size / p) * h + s * h + 2 * h  # embedding, positions, the last norm
    parameters = config.num_layers * (divided // p + whole) + ends
    activations = s * micro_batch * (10 * h + 24 * h // p + 5 * a * s // p)  # of a layer
    return 16 * parameters + config.num_layers * activations
    ### END SOLUTION


def smallest_p(config: GPTConfig, gpu_bytes: int, micro_batch: int = 1, largest: int = 8) -> int:
    """The smallest p from 1 to `largest` that divides num_heads and for which rank_bytes is at most gpu_bytes.

    Raises ValueError if none fits, naming the largest p that was tried and the bytes that a rank needs there.
    """
    ### BEGIN SOLUTION
    sizes = [p for p in range(1, largest + 1) if config.num_heads % p == 0]
    for p in sizes:
        if rank_bytes(config, p, micro_batch) <= gpu_bytes:
            return p
    need = rank_bytes(config, sizes[-1], micro_batch)
    raise ValueError(f"even at p = {sizes[-1]} a rank needs {need} bytes, and the GPU has {gpu_bytes}")
    ### END SOLUTION


# %% [markdown] hints="0.3"
# 1. Sort the parameters of one layer into two piles, divided and whole. Together they must be what exercise 0.1 counts. Which biases go where?
# 2. One layer: the matrices have `12 * h * h` numbers; divided biases `3h + 4h`; whole are two norms (`2h` each) and two biases (`h` each). Around the layers: `ceil(vocab_size / p) * h`, then `s * h` and a norm. For the smallest `p`, try them in order; raise after the loop.
# 3. A layer has `(12*h*h + 7*h) // p + 6*h` parameters. Its activations are the formula of section 6: multiply out, so that every division by `p` is one of whole numbers. Every parameter costs as many bytes as in exercise 0.2; add the activations of all layers.

# %% check="0.3"
check("0.3", rank_bytes, smallest_p)

# %% [markdown]
# ## 7 · Break it
#
# Three programs that run out of memory, or soon will. Read the symptom first.
#
# **First.** A pretended device with 10 MB: `MemoryMeter` refuses what goes beyond. The program builds the small model, runs forward and backward, and takes a step. Where does it fail?

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
viz.live_memory(meter, title="10 MB: the model fits, its optimizer does not")

# %% [markdown]
# Everything fits, until the very first `optimizer.step()`: only there does Adam allocate its averages. "The model loads, and even trains for a moment" says nothing about whether it fits.
#
# **Second.** A validation loop that adds up the loss. It only reads the model; nobody calls `backward`.

# %%
with MemoryMeter() as meter:
    meter.mark("build")
    model = GPT(SMALL)
    total = torch.zeros(())
    for index, (ids, targets) in enumerate(corpus.byte_batches(text, SMALL.seq_length, 4, 4, seed=0)):
        meter.mark(f"batch {index}")
        total = total + model(ids, targets)
viz.live_memory(meter, title="total = total + model(ids, targets)")

# %% [markdown]
# A staircase. `total` is the result of all batches, so it keeps the graph of all of them, with all activations. It dies at some batch far into the validation set. The same loop under `torch.no_grad()` keeps nothing but the weights:

# %%
with MemoryMeter() as meter, torch.no_grad():
    meter.mark("build")
    model = GPT(SMALL)
    total = torch.zeros(())
    for index, (ids, targets) in enumerate(corpus.byte_batches(text, SMALL.seq_length, 4, 4, seed=0)):
        meter.mark(f"batch {index}")
        total = total + model(ids, targets)
viz.live_memory(meter, title="with torch.no_grad()")

# %% [markdown]
# **Third.** A model that does not fit is put on twice as many GPUs, with data parallelism. Two ranks, 10 MB each:


# %%
def on_a_small_device():
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

# %% [markdown]
# Every rank holds the same as one alone, and so it fails in the same place. The report names the rank, the line, and the bytes.

# %%
symptoms(0)

# %% [markdown]
# ## 8 · Measure it
#
# Your functions, against what real tensors take. First the small model, in mixed precision as in section 2:

# %%
with saved_for_backward(half.layers) as kept:
    x = torch.randn(2, SMALL.seq_length, SMALL.hidden_size, dtype=torch.bfloat16, requires_grad=True)  # [b, s, h]
    for layer in half.layers:
        x = layer(x)
averages = optimizer_bytes(adam) - 4 * len(master)  # without the step counters, 4 bytes a tensor
states = state_bytes(parameter_count(SMALL), "adam", mixed_precision=True)
statistics = sum(size for shape, _, size in kept.pieces if shape == (2, SMALL.seq_length, 1))
viz.table(
    [
        {"what": "weights", "measured": parameter_bytes(half), "yours": states["weights"]},
        {"what": "gradients", "measured": gradient_bytes(half), "yours": states["gradients"]},
        {"what": "optimizer state", "measured": tensor_bytes(master) + averages, "yours": states["optimizer"]},
        {
            "what": "activations of the layers, b = 2",
            "measured": kept.bytes - statistics,
            "yours": rank_bytes(SMALL, 1, 2) - 16 * parameter_count(SMALL),
        },
    ],
    title="bytes",
)

# %% [markdown]
# Then the published models. The figures in the third column are from the papers, or from the checkpoint files where those are more exact: GPT-2's files are named 1558M; table D.1 of the GPT-3 paper says 174,600 million; Llama 3's 16-bit checkpoints have 16,060,522,496 and 141,107,412,992 bytes; the Llama 3 paper says 405B.

# %%
PUBLISHED = {
    "GPT-2 1.5B": 1558e6,
    "GPT-3 175B": 174_600e6,
    "Llama 3 8B": 16_060_522_496 / 2,
    "Llama 3 70B": 141_107_412_992 / 2,
    "Llama 3 405B": 405e9,
}
viz.table(
    [
        {
            "model": name,
            "yours": f"{parameter_count(config):,}",
            "published": f"{PUBLISHED[name]:,.0f}",
            "difference": f"{parameter_count(config) / PUBLISHED[name] - 1:+.2%}",
        }
        for name, config in memory.PRESETS.items()
    ]
)


# %%
def answer(config, gpu, largest):
    try:
        return str(smallest_p(config, gpu, largest=largest))
    except ValueError:
        return f"none up to {largest}"


viz.table(
    [
        {"model": name, "GPU": gpu, "smallest p": answer(memory.PRESETS[name], size, largest)}
        for name, largest in (("GPT-2 1.5B", 8), ("GPT-3 175B", 8), ("GPT-3 175B", 96))
        for gpu, size in memory.GPUS.items()
    ]
)

# %% [markdown]
# GPT-2 has 25 heads, which 2 does not divide: on 24 GB the answer is 5. For GPT-3, tensor parallelism inside one machine of 8 GPUs is not enough, and 96 ranks that talk in every layer would be far too slow. That is why large models use it *together with* a pipeline, and why the calculator has both.

# %%
layouts = {
    "p = 8": Layout(tp=8),
    "p = 8, 8 stages": Layout(tp=8, pp=8),
    "p = 8, 16 stages": Layout(tp=8, pp=16),
}
viz.bill(
    {name: memory.bill(GPT3, layout) for name, layout in layouts.items()},
    capacity=H100,
    title="GPT-3, one sequence a micro-batch: the fullest GPU",
)

# %% [markdown]
# That is 128 GPUs for one copy of the model. The activations are about as large in all three bars: the first of `q` stages has `1/q` of the layers, but keeps them for `q` micro-batches. More GPUs than these are for data parallelism.
#
# ## 9 · In the wild
#
# - **Megatron-LM** has this bill as a function: `report_theoretical_memory` in `megatron/training/theoretical_memory_usage.py`. It counts 18 bytes a parameter, and 6 + 12/d with its distributed optimizer, which divides the optimizer state over `d` data-parallel ranks.
# - **PyTorch** shows the real thing: `torch.cuda.memory_allocated()` and `max_memory_allocated()` on a GPU, `torch.cuda.memory._record_memory_history()` for a picture of every allocation, and `MemTracker` in `torch.distributed._tools`, which, like our meter, sees each tensor that an operation creates. What the GPU reports is more than the bill: the allocator rounds up and keeps freed
#   memory in reserve, and libraries need buffers of their own.
# - **Fewer activations.** `torch.utils.checkpoint` keeps only the input of a layer and computes the rest again in the backward pass; Megatron's *selective* recomputation does so for the scores only. Sequence parallelism (chapter 12) divides the 10 as well.
# - **Fewer states.** ZeRO (DeepSpeed) and FSDP2 (`torch.distributed.fsdp.fully_shard`) divide the 16 bytes over the data-parallel ranks: chapter 14.
#
# ## 10 · Recap
#
# 1. Training holds weights, gradients, optimizer state and activations. With Adam in mixed precision the first three take 16 bytes a parameter; Adam's part appears at the first step.
# 2. A layer keeps $sbh(34 + 5as/h)$ bytes of activations; they grow with the batch, the scores with `s²`. States don't.
# 3. Data parallelism divides the batch and nothing that a rank holds. Pipeline parallelism divides the layers. Tensor parallelism divides the matrices by `p`, and activations to $sbh(10 + 24/p + 5as/(hp))$.
# 4. Traffic so far: data parallelism sends every gradient once a step, tensor parallelism activations in every layer, a pipeline activations between stages.
# 5. Next: what "send" means. Chapter 01 starts ranks, and builds the all-reduce from single messages.

# %% [markdown]
# ## Your library so far
#
# Everything that passes its check goes into a package of your own, `my_tp`, next to your notebooks. It starts small: so far it can tell how much memory a model takes, and how many GPUs it needs.

# %%
from tplab.course import library

library(0)
