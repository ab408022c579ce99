# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10 · The parallel transformer
#
# You've built an attention layer, an MLP, an embedding, a loss, and a tracker for random states, and all of them run on any number of ranks. What's still missing is everything between them: norms, residuals, biases, and dropout. Do these operations have to send anything? And how do you avoid putting one of them in the wrong place, which is surprisingly easy?
#
# By the end of this chapter, your GPT will train on two processes with the same loss as plain PyTorch, and it will write some Python. You need chapters 04 to 09. About 75 minutes, plus 10 minutes for an optional section.

# %% tags=["setup"]
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tplab import device, launch, record, viz
from tplab.course import check, predict, symptoms
from tplab.tensor import load_full_state_dict, reduce_from_region

# %% [markdown]
# ## The stream
#
# A block of a transformer never replaces its input $x$. It computes something from $x$ and *adds* the result to $x$. The running sum of $x$ and all the blocks' outputs is called the **residual stream**, or just the stream.
#
# On two ranks, each rank has the full $x$, but only its own term of the block's output. Let $x = [3, 4]$. Rank 0 has the term $[1, 0]$, and rank 1 has the term $[0, 2]$, so the new stream should be $[4, 6]$. The operator g adds up the terms. But should the ranks add $x$ after g or before g?
#
# **Predict.** What's the new stream if every rank adds $x$ before g? What's the new stream if only rank 0 adds $x$ before g? In the second case, suppose the loss is the sum of the new stream's elements. On rank 0, the gradient of $x$ is $[1, 1]$. What value do both elements of this gradient have on rank 1?

# %% predict="10.a"
predict("10.a", before_g=(7, 10), rank_0_only=(4, 6), dx_on_rank_1=0)


# %%
def add_residual():
    rank = dist.get_rank()
    x = torch.tensor([3.0, 4.0], device=device(), requires_grad=True)
    y = torch.tensor([[1.0, 0.0], [0.0, 2.0]], device=device())[rank]  # this rank's term of the block's output
    streams = {
        "after g": x + reduce_from_region(y),
        "before g": reduce_from_region(x + y),
        "before g, on rank 0 only": reduce_from_region(x * (rank == 0) + y),
    }
    return {way: (z.tolist(), torch.autograd.grad(z.sum(), x)[0].tolist()) for way, z in streams.items()}


ranks = launch(add_residual, 2)
rows = [{"x is added": way, "new stream": ranks[0][way][0]} | {f"dx, rank {r}": ranks[r][way][1] for r in (0, 1)}
        for way in ranks[0]]  # fmt: skip
viz.table(rows)

# %% [markdown]
# If every rank adds $x$ before g, the result contains $x$ not once but $p$ times. If only rank 0 adds $x$, the stream is correct, but rank 1 gets a wrong gradient, and everything before this block trains on this gradient.


# %% [markdown] task="10.1" title="Seven operations" difficulty=3 minutes=8
# Here are all the operations around a block, in alphabetical order. At the start, `y` is $x$, and each operation changes `y`.
#
# | name | what happens to `y` |
# |---|---|
# | `"add"` | $x$, the input of the first operation, is added |
# | `"bias"` | the block's final bias `[h]` is added, which every rank has |
# | `"block"` | this rank's shards of the block's two matrices turn `y` into this rank's term of a sum |
# | `"dropout"` | some elements are dropped, the same ones on every rank |
# | `"f"` | `copy_to_region`: an all-reduce in the backward pass only |
# | `"g"` | `reduce_from_region`: an all-reduce in the forward pass only |
# | `"norm"` | a `LayerNorm` with a weight and a bias, which every rank has |
#
# Put the seven names in the right order. In a single process, the block reads the output of the norm. Dropout is applied to the sum of the block's output and the final bias. At the end, this result is added to the original $x$.
#
# The check runs your order on 1, 2, and 4 ranks, and compares the output and all gradients with those of a single process.


# %% exercise="10.1"
def block_order():
    """Return the names of the seven operations in the order in which they have to run."""
    ### BEGIN SOLUTION
    return ["norm", "f", "block", "g", "bias", "dropout", "add"]
    ### END SOLUTION


# %% [markdown] hints="10.1"
# 1. Start with a single process, where f and g do nothing. In which order do the other five operations run? Then find the operation after which the ranks hold different tensors.
# 2. After g and before the next f, all ranks hold the same tensors, so they should do the same things. A bias or a residual that's added before g is added `p` times. In the backward pass, every rank has only its own contribution to the gradient until f adds up the contributions. Which operations have parameters that need the complete gradient?
# 3. In a single process, the order is norm, block, bias, dropout, add. The operators f and g go right before and right after the block.

# %% check="10.1"
check("10.1", block_order)

# %% [markdown]
# There are 5,040 possible orders. On two ranks, seven of them give the correct output, but only one of these seven also gives the correct gradients. The correct order follows from three rules:
#
# - From g to the next f, all ranks hold the same tensors. So every rank can compute norms, dropout, and sums by itself.
#
# - Biases and residuals should be added only once, so they come after g.
#
# - In the backward pass, f adds up the ranks' contributions to the gradient. A norm needs the full gradient for its own parameters, so it comes before f.
#
# A transformer layer consists of two such blocks, the attention and the MLP:
#
# $$y = x + \text{dropout}(\text{attention}(\text{norm}(x)) + b) \qquad z = y + \text{dropout}(\text{MLP}(\text{norm}(y)) + b')$$
#
# ![An animation of one training step of a transformer layer on two ranks, with the real numbers of a single token. The stream is a gray pipe through both ranks. Attention and MLP each take a copy of the stream and compute one term per rank, and g adds the terms to the stream. In the backward pass, f adds the two partial gradients, and the norms and biases get their full gradients without a message.](pictures/one_step.svg)
#
# <details><summary>All frames, one by one</summary>
#
# ![The same animation as numbered stills](pictures/one_step_frames.svg)
#
# </details>
#
# (The picture shows a token with only two features. A LayerNorm would turn any two features into 1 and -1, so the picture uses an RMSNorm instead. Its dropout rate is 0.)
#
# **Predict.** Suppose a transformer layer runs on four ranks, with an input of shape `[2, 16, 32]` in float32. How many all-reduces does it need in the forward pass, and how many in the backward pass? How many bytes does each message contain? How many additional all-reduces do the gradients of norms and final biases need?

# %% predict="10.b"
predict("10.b", forward=2, backward=2, bytes_each=4096, for_norms_and_biases=0)


# %%
def one_pass():
    from tplab.gpt import ParallelTransformerLayer as Ready  # the course's layer. Yours will take its place soon

    layer = Ready(32, 4, device=device())
    x = torch.randn(2, 16, 32, device=device(), requires_grad=True)
    with record() as forward:
        out = layer(x)
    with record() as backward:
        out.sum().backward()
    return list(forward), list(backward)


# %% tags=["explore"]
def show_layer(p):
    return viz.layer(*launch(one_pass, p)[0], ranks=p)


viz.explore(show_layer, p=(2, 4))

# %% [markdown]
# Only f and g send messages. The norms, biases, dropout, and residuals between the blocks don't send anything.
#
# ## 256 + 1
#
# Large models are trained in bfloat16, which has only 8 significant bits. That's enough inside a block. But the stream goes through *all* the layers, and each layer adds only a small number to each element.
#
# **Predict.** What's 256 + 1 in bfloat16? And if an element of the stream is 256, and then each of 64 blocks adds 0.5, what's the result in bfloat16, and what's the result in float32?

# %% predict="10.c"
predict("10.c", one_more=256, bfloat16=256, float32=288)

# %%
stream = {dtype: torch.tensor(256.0, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)}
print(stream[torch.bfloat16] + 1)
for _ in range(64):
    stream = {dtype: x + torch.tensor(0.5).bfloat16() for dtype, x in stream.items()}
print(stream)

# %% [markdown]
# So it's a good idea to keep the stream in float32 and compute the blocks in bfloat16. A float32 stream takes more memory, but it causes no extra traffic, because f and g are inside the blocks, where each element still takes 2 bytes.
#
# ## Fix it
#
# Megatron-Core has a switch for a float32 stream, `fp32_residual_connection`. A single function adds the bias, applies dropout, and adds the residual, so that a GPU can do all three at the same time. To make this possible, the blocks have an option `skip_bias_add`. With this option, a block returns its output and its final bias separately. The next cell contains our own version of the function, with the bug that Megatron-Core shipped, and measures the error of a stream after 48 layers.

# %% tags=["setup"]
from tplab.tensor import dropout  # dropout with the random states from chapter 09


# %%
def as_shipped(y, bias, residual, rate, training, rng=None):
    residual = residual.to(y.dtype)
    if bias is not None:
        y = y + bias
    return residual + dropout(y, rate, training, sharded=False, rng=rng)


def largest_error(bias_dropout_add, dtype, layers=48):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator).bfloat16()
    stream, correct = x.to(dtype), x.double()
    for _ in range(2 * layers):  # each layer has two blocks
        y, bias = (torch.randn(size, generator=generator).bfloat16() for size in ((64, 256), (256,)))
        stream = bias_dropout_add(y, bias, stream, 0.0, True)
        correct = correct + y.double() + bias.double()
    return f"{(stream.double() - correct).abs().max():.1g}"


def switched(bias_dropout_add):
    dtypes = {"off": torch.bfloat16, "on": torch.float32}
    return [
        {"float32 stream": name, "largest error": largest_error(bias_dropout_add, dtype)}
        for name, dtype in dtypes.items()
    ]


viz.table(switched(as_shipped))

# %% [markdown] task="10.2" title="Fix the switch that did nothing" difficulty=2 minutes=8
# The switch changes nothing at all! In Megatron-Core, the embedding returned a float32 tensor, but until February 2026, the very first block converted the stream back to bfloat16 (NVIDIA/Megatron-LM pull request 3504).
#
# Fix the function. The result and all sums before it should have the dtype of `residual`, so that nothing is rounded to a smaller dtype. All ranks drop the same elements. If `bias` is `None`, there's no bias.


# %% exercise="10.2"
def bias_dropout_add(y, bias, residual, rate, training, rng=None):
    """Return residual + dropout(y + bias), computed in the dtype of the residual.

    y, residual: [b, s, h], the same on every rank; y may have fewer bits
    bias:        [h], with the dtype of y, or None
    rng:         the tracker from chapter 09, or None for torch's current state
    """
    ### BEGIN SOLUTION
    y = y.to(residual.dtype)
    if bias is not None:
        y = y + bias.to(residual.dtype)
    return residual + dropout(y, rate, training, sharded=False, rng=rng)
    ### BROKEN
    # residual = residual.to(y.dtype)
    # if bias is not None:
    #     y = y + bias
    # return residual + dropout(y, rate, training, sharded=False, rng=rng)
    ### END SOLUTION


# %% [markdown] hints="10.2"
# 1. Which of the three tensors loses bits in the broken version, and in which line? Which tensors could change their dtype without losing anything?
# 2. Convert `y` and `bias` to the dtype of `residual`. Convert them before you add them to each other, because the sum of two bfloat16 tensors is rounded, too.
# 3. Write `y = y.to(residual.dtype)`, then `y = y + bias.to(residual.dtype)` if there's a bias. The last line stays as it is.

# %% check="10.2"
check("10.2", bias_dropout_add)

# %%
viz.table(switched(bias_dropout_add))

# %% [markdown]
# Now the switch works. With a bfloat16 stream, the error is as large as before, because the *stream* itself is rounded after each addition.
#
# ## Encoders and decoders
#
# There are three kinds of transformer layers:
#
# - An **encoder** layer has no causal mask, because the whole text is known.
#
# - A **decoder** layer, as in a GPT, has a causal mask.
#
# - A **decoder layer with cross-attention** has a third block between the other two, which reads the memory (chapter 06). This block has its own norm and residual, but it doesn't apply a norm to the memory.
#
# In the very first transformer, the norms came after the sums (Vaswani et al. 2017). This order is called **post-LN**, and ours is called **pre-LN**. With post-LN, the output of a norm is both the next block's input and the next residual. So to get post-LN, you can keep our norms where they are and use their *outputs* as the residuals. Megatron calls this option `apply_residual_connection_post_layernorm`.

# %% tags=["setup"]
from tplab.gpt.transformer import LayerNorm  # nn.LayerNorm, but it computes in the dtype of its input
from tplab.tensor import ParallelAttention, ParallelMLP

# %% [markdown] task="10.3" title="ParallelTransformerLayer" difficulty=3 minutes=14
# Write `forward`. All blocks were built with `skip_bias_add=True`, so each call of a block returns two tensors: its output after g, `[b, s, h]`, and its final bias, `[h]`, which hasn't been added yet.
#
# - `self.attention(x, key_padding_mask=..., rng=...)` is self-attention. `self.cross_attention(x, memory, key_padding_mask=..., rng=...)` reads the memory, or is `None` if the layer has no cross-attention. `self.mlp(x)` takes no other arguments.
#
# - A `key_padding_mask` is `True` where a *key* is padding. Which mask does `self.attention` need, and which mask does `self.cross_attention` need?
#
# - Attention also applies dropout to its weights, for which it needs the tracker `rng`. For the dropout after each block, use your `bias_dropout_add` with `self.hidden_dropout`.
#
# - The residual stream may be in float32 while the weights are in bfloat16. A norm returns the dtype of its input, but the blocks need the dtype of the weights. (The memory already has this dtype.)


# %% exercise="10.3"
class ParallelTransformerLayer(nn.Module):
    """x [b, s, h] and memory [b, t, h] -> out [b, s, h], all of them the same on every rank of `group`."""

    def __init__(
        self, hidden_size, num_heads, *, causal=True, cross_attention=False, activation="gelu_tanh", hidden_dropout=0.0,
        attention_dropout=0.0, apply_residual_connection_post_layernorm=False, group=None, device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        self.hidden_dropout, self.post = hidden_dropout, apply_residual_connection_post_layernorm
        place = {"device": device, "dtype": dtype}
        block = {"skip_bias_add": True, "group": group, **place}
        self.attention_norm = LayerNorm(hidden_size, **place)
        self.attention = ParallelAttention(hidden_size, num_heads, causal=causal, dropout=attention_dropout, **block)
        self.cross_attention = None
        if cross_attention:
            self.cross_norm = LayerNorm(hidden_size, **place)
            self.cross_attention = ParallelAttention(
                hidden_size, num_heads, attention_type="cross", dropout=attention_dropout, **block
            )
        self.mlp_norm = LayerNorm(hidden_size, **place)
        self.mlp = ParallelMLP(hidden_size, activation=activation, **block)

    def forward(self, x, memory=None, *, key_padding_mask=None, memory_padding_mask=None, rng=None):
        """key_padding_mask: bool [b, s], memory_padding_mask: bool [b, t], True where a token is padding, or None."""
        ### BEGIN SOLUTION

        def add_block(x, norm, block, *args, **options):
            normed = norm(x)  # [b, s, h]
            y, bias = block(normed.to(norm.weight.dtype), *args, **options)  # [b, s, h], [h]
            residual = normed if self.post else x
            return bias_dropout_add(y, bias, residual, self.hidden_dropout, self.training, rng)

        x = add_block(x, self.attention_norm, self.attention, key_padding_mask=key_padding_mask, rng=rng)
        if self.cross_attention is not None:
            options = {"key_padding_mask": memory_padding_mask, "rng": rng}
            x = add_block(x, self.cross_norm, self.cross_attention, memory, **options)
        return add_block(x, self.mlp_norm, self.mlp)
        ### END SOLUTION


# %% [markdown] hints="10.3"
# 1. Write the layer for a single process first. Then ask yourself which of its tensors are the same on every rank, because nothing changes for these tensors. In cross-attention, do the keys come from `x` or from the memory? So whose padding has to be masked?
# 2. You need the same four steps two or three times: apply the norm, call the block, choose the residual (the norm's output if `self.post`, and otherwise the norm's input), and call `bias_dropout_add`. The result is the `x` of the next block.
# 3. Start with `normed = self.attention_norm(x)`. Then call `y, bias = self.attention(normed.to(self.attention_norm.weight.dtype), key_padding_mask=key_padding_mask, rng=rng)`. Finally, set `x = bias_dropout_add(y, bias, normed if self.post else x, self.hidden_dropout, self.training, rng)`. If there's cross-attention, do the same with `self.cross_norm` and `self.cross_attention(normed, memory, key_padding_mask=memory_padding_mask, rng=rng)`. Then do it with `self.mlp_norm` and `self.mlp`.

# %% check="10.3"
check("10.3", ParallelTransformerLayer)

# %% [markdown]
# Is your layer really the transformer that everybody else uses? The next cell compares your layer with PyTorch's own layers.
#
# **Predict.** How many all-reduces does your decoder layer with cross-attention need in the forward pass, and how many in the backward pass, if the memory needs a gradient, too?

# %% predict="10.d"
predict("10.d", forward=3, backward=4)

# %%
BOTH = {"self_attn.in_proj_": "attention.qkv.", "self_attn.out_proj.": "attention.out.", "linear1.": "mlp.up.",
        "linear2.": "mlp.down.", "norm1.": "attention_norm."}  # fmt: skip
ENCODER = BOTH | {"norm2.": "mlp_norm."}
DECODER = BOTH | {"norm2.": "cross_norm.", "norm3.": "mlp_norm.", "multihead_attn.out_proj.": "cross_attention.out."}


def against_pytorch(kind):
    torch.manual_seed(0)
    options, is_decoder = {"device": device(), "dtype": torch.float64}, kind is nn.TransformerDecoderLayer
    theirs = kind(32, 4, 128, 0.0, F.gelu, batch_first=True, norm_first=True, **options)
    state = dict(theirs.state_dict())
    full = {}
    for end in ("weight", "bias") if is_decoder else ():
        q, kv = state.pop(f"multihead_attn.in_proj_{end}").split([32, 64])
        full |= {f"cross_attention.q.{end}": q, f"cross_attention.kv.{end}": kv}
    for name, value in state.items():
        start, ours = next(pair for pair in (DECODER if is_decoder else ENCODER).items() if name.startswith(pair[0]))
        full[ours + name.removeprefix(start)] = value
    layer = ParallelTransformerLayer(32, 4, causal=is_decoder, cross_attention=is_decoder, activation="gelu", **options)
    load_full_state_dict(layer, full)  # each rank takes its shards
    texts = [torch.randn(2, s, 32, requires_grad=True, **options) for s in ((6, 9) if is_decoder else (6,))]
    causal = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(6, **options)} if is_decoder else {}
    with record() as forward:
        out = layer(*texts)
    with record() as backward:
        out.sum().backward()
    return {"largest difference": f"{(out - theirs(*texts, **causal)).abs().max():.0e}",
            "forward": [call.numel for call in forward], "backward": [call.numel for call in backward]}  # fmt: skip


viz.table([{"layer": kind.__name__, "p": p} | launch(against_pytorch, p, args=(kind,))[0]
           for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer) for p in (1, 2, 4)])  # fmt: skip

# %% [markdown]
# The differences are only rounding errors.
#
# ## From a layer to a GPT
#
# You already have all the parts of a GPT:
#
# | part | what each rank holds |
# |---|---|
# | token embedding | $v/p$ rows |
# | position embedding, one vector per position | all of it |
# | $L$ layers | $1/p$ of each matrix |
# | final norm | all of it |
# | logits, with the embedding's own rows | the same $v/p$ rows |
# | loss, in the course's version | $v/p$ columns of the logits |
#
# **Predict.** Go through the table and count the f's and g's. How many all-reduces does one training step of a GPT with $L = 2$ layers need? (The course's loss runs two small ones in the forward pass.) How many of these all-reduces have $b \cdot s \cdot h$ elements?

# %% predict="10.e"
predict("10.e", all_reduces=12, of_bsh=10)

# %% [markdown]
# ## Start small at depth
#
# Usually, the initial weights are drawn with a standard deviation of 0.02. But each of the $2L$ blocks adds its output to the stream. If these outputs are independent and have the same variance, the stream's standard deviation grows like $\sqrt{2L}$. To prevent this, GPT-2 divides the standard deviation by $\sqrt{2L}$ for all weights whose output is added to the stream.

# %% tags=["setup"]
from tplab.gpt import transformer
from tplab.memory import GPTConfig
from tplab.tensor import VocabParallelEmbedding, parallel_logits, vocab_parallel_cross_entropy

# %% [markdown] task="10.4" title="ParallelGPT" difficulty=3 minutes=10
# Write the `forward` method of a GPT, and `init_std`.
#
# - If `self.float32_residual` is set, convert the sum of the two embeddings to float32. Then apply dropout with the rate `self.config.dropout`. All ranks drop the same elements. Nothing may round this stream before the final norm has read it.
#
# - `parallel_logits(x, weight, group=...)` includes f. It returns this rank's logits, `[b, s, v/p]`, from this rank's rows of the table, `self.embedding.weight`. `x` must have the same dtype as these rows.
#
# - With targets, return the mean loss, using `vocab_parallel_cross_entropy(logits, targets, vocab_size=..., group=...)`. Because the table is padded, this function needs the real size of the vocabulary, `self.config.vocab_size`.
#
# - `init_std` returns the standard deviation with which a weight should start, given its name in `ParallelGPT`, for example `"layers.0.attention.qkv.weight"`.


# %% exercise="10.4"
class ParallelGPT(nn.Module):
    """ids [b, s] -> this rank's logits [b, s, v/p]. With targets [b, s] -> their mean loss, the same on every rank."""

    def __init__(
        self, config, layer_class=None, *, multiple=8, float32_residual=False, group=None, device=None, dtype=None
    ):  # fmt: skip
        super().__init__()
        self.config, self.float32_residual, self.group = config, float32_residual, group
        place, h, rate = {"device": device, "dtype": dtype}, config.hidden_size, config.dropout
        options = {"activation": config.activation, "hidden_dropout": rate, "attention_dropout": rate, **place}
        layer_class = layer_class or transformer.ParallelTransformerLayer  # the course's layer
        self.embedding = VocabParallelEmbedding(config.vocab_size, h, multiple=multiple, group=group, **place)
        self.positions = nn.Embedding(config.seq_length, h, **place)
        self.layers = nn.ModuleList(
            layer_class(h, config.num_heads, group=group, **options) for _ in range(config.num_layers)
        )
        self.final_norm = LayerNorm(h, **place)

    def forward(self, ids, targets=None, *, rng=None):
        ### BEGIN SOLUTION
        positions = torch.arange(ids.shape[1], device=ids.device)  # [s]
        x = self.embedding(ids) + self.positions(positions)  # [b, s, h]
        if self.float32_residual:
            x = x.float()
        x = dropout(x, self.config.dropout, self.training, sharded=False, rng=rng)
        for layer in self.layers:
            x = layer(x, rng=rng)  # [b, s, h]
        x = self.final_norm(x).to(self.embedding.weight.dtype)
        logits = parallel_logits(x, self.embedding.weight, group=self.group)  # [b, s, v/p]
        if targets is None:
            return logits
        return vocab_parallel_cross_entropy(logits, targets, vocab_size=self.config.vocab_size, group=self.group)
        ### END SOLUTION


def init_std(name, num_layers, std=0.02):
    """Return the standard deviation of a weight's first values: std, or less if its output goes into the stream."""
    ### BEGIN SOLUTION
    writes_to_the_stream = name.endswith(("attention.out.weight", "mlp.down.weight"))
    return std / math.sqrt(2 * num_layers) if writes_to_the_stream else std
    ### END SOLUTION


# %% [markdown] hints="10.4"
# 1. Go through the table above from top to bottom. Each row of the table takes one or two lines of `forward`. You don't have to call f or g yourself, because the modules do. For `init_std`, think of the two matrices of an MLP. Which of them is multiplied last?
# 2. In `forward`, add both embeddings, apply dropout, call every layer with the same `rng`, apply the final norm, convert to the dtype of the table, and compute the logits with the embedding's own weight. In `init_std`, the weights that write to the stream are called `attention.out` and `mlp.down`, and each layer has its own.
# 3. `x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))`, then `dropout(x, self.config.dropout, self.training, sharded=False, rng=rng)`, `layer(x, rng=rng)` for each layer, `self.final_norm(x)`, and `parallel_logits(x, self.embedding.weight, group=self.group)`. For `init_std`, use `name.endswith(("attention.out.weight", "mlp.down.weight"))` and `std / math.sqrt(2 * num_layers)`.

# %% check="10.4"
check("10.4", ParallelGPT, init_std)

# %%
from tplab.plain import GPT  # a GPT in plain PyTorch, whose parameters have the same names


def new_gpt(config, std_of):
    torch.manual_seed(0)
    model = GPT(config, dtype=torch.float64)
    for name, param in model.named_parameters():
        if param.dim() == 2:
            nn.init.normal_(param, std=std_of(name, config.num_layers))
        elif name.endswith("bias"):
            nn.init.zeros_(param)
    return model


@torch.no_grad()
def stds_by_depth(std_of):
    config = GPTConfig(num_layers=24, hidden_size=256, num_heads=8, vocab_size=256, seq_length=64, dropout=0.0)
    model, stds = new_gpt(config, std_of), []
    for layer in model.layers:
        layer.register_forward_hook(lambda layer, given, out: stds.append(out.std().item()))
    model(torch.randint(256, (2, 64)))
    return stds


by_depth = {"0.02 for all weights": stds_by_depth(lambda name, num_layers: 0.02), "yours": stds_by_depth(init_std)}
viz.curves(by_depth, title="the standard deviation of the stream", xlabel="layer", ylabel="standard deviation")

# %% [markdown]
# ## Train it
#
# Let's train everything you've built since chapter 03. The text is only 1,500 bytes from Python's standard library, which a small model can almost learn by heart. (Because the model has only 64 features, its weights start with a standard deviation of 0.1.)

# %%
from tplab.common import corpus

CONFIG = GPTConfig(
    num_layers=2, hidden_size=64, num_heads=4, vocab_size=256, seq_length=96, activation="gelu_tanh", dropout=0.0
)
CONTEXT, BATCH, STEPS = 48, 16, 120
text = corpus.python_sources(4500)[3000:]


def train(model):
    """Train on the same batches on every rank, and return the loss of every step."""
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.0)
    losses = []
    for ids, targets in corpus.byte_batches(text, CONTEXT, BATCH, STEPS, seed=1):
        loss = model(ids.to(device()), targets.to(device()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def my_gpt(full, layer_class=ParallelTransformerLayer):
    """Your GPT, in which each rank takes its shards of full weights."""
    model = ParallelGPT(CONFIG, layer_class, device=device(), dtype=torch.float64)
    load_full_state_dict(model, full)
    return model


def train_mine(full):
    with record() as section:
        losses = train(my_gpt(full))
    return losses, section.totals()["all_reduce"].calls / STEPS


plain = new_gpt(CONFIG, lambda name, num_layers: init_std(name, num_layers, 0.1)).to(device())
start = {name: value.cpu().clone() for name, value in plain.state_dict().items()}
plain_losses = train(plain)
losses, calls = launch(train_mine, 2, args=(start,), timeout=300)[1]  # rank 1's
furthest = max(abs(mine - theirs) for mine, theirs in zip(losses, plain_losses, strict=True))
print(f"{calls:.0f} all-reduces per step, and the losses never differ by more than {furthest:.0e}")
viz.curves({"plain PyTorch": plain_losses, "your GPT, p = 2": losses}, title="a GPT on two ranks")

# %% [markdown]
# You see only one curve, because the two curves lie exactly on top of each other. Two processes trained this model as if they were one, and neither of them ever had the full model.
#
# ## Which token?
#
# To write text, a GPT computes the logits of the next token, chooses a token, appends it to the text, and starts over. The simplest choice is the token with the largest logit. But each rank has only the logits of its own rows, and all ranks have to choose the *same* token. If several tokens have the largest logit, the ranks should choose the lowest ID, like `torch.argmax`.
#
# **Predict.** There are eight tokens on two ranks. Rank 0 has the logits `[0.5, 2.0, -1.0, 2.0]`, and rank 1 has `[1.0, 0.0, 3.0, 3.0]`. Which index does `argmax` return on each rank, and which ID should all ranks choose? On two ranks, GPT-2's 50,257 rows are padded to 50,432 rows. How many logits per token would a gather return?

# %% predict="10.f"
predict("10.f", index_on_rank_0=1, index_on_rank_1=2, chosen_id=6, gathered=50432)

# %% [markdown] task="10.5" title="The next token" difficulty=3 minutes=12
# Choose the next token for each text in a batch. Each rank may send only a few numbers per text.
#
# - `dist.all_reduce` can also compute a maximum or a minimum if you pass `op=dist.ReduceOp.MAX` or `op=dist.ReduceOp.MIN`.
#
# - The last rows of the table may be padding. Padding rows have IDs of `vocab_size` or more, which must never be chosen, whatever their logits are. A rank may hold nothing but padding.
#
# - Ids should stay integers. In bfloat16, the token 257 would become the token 256.


# %% exercise="10.5"
def best_token(logits, vocab_size, group=None):
    """Return the ids with the largest logits, [b], the same on every rank. Of several such ids, it's the lowest one.

    logits: this rank's logits [b, v/p]
    """
    ### BEGIN SOLUTION
    width = logits.shape[1]
    start = dist.get_rank(group) * width
    ids = torch.arange(start, start + width, device=logits.device)  # [v/p]
    largest, index = logits.masked_fill(ids >= vocab_size, -torch.inf).max(dim=1)  # [b] each
    largest_of_all = largest.clone()
    dist.all_reduce(largest_of_all, op=dist.ReduceOp.MAX, group=group)
    token = torch.where(largest == largest_of_all, start + index, vocab_size)  # [b]; vocab_size is above all ids
    dist.all_reduce(token, op=dist.ReduceOp.MIN, group=group)
    return token
    ### END SOLUTION


# %% [markdown] hints="10.5"
# 1. On each rank, only the largest logit has a chance of being the largest of all. Which two numbers do the other ranks need to know about this logit? How does an index in a rank's shard become an ID?
# 2. Set the logits of the padding to minus infinity, and find the rank's own maximum and its index. Then find the maximum over all ranks. Each rank that has this maximum proposes the ID of its largest logit. All other ranks propose a number that's too large to be the minimum.
# 3. `ids = start + arange(v/p)` with `start = dist.get_rank(group) * v/p`, then `largest, index = logits.masked_fill(ids >= vocab_size, -torch.inf).max(dim=1)`. All-reduce a copy of `largest` with `MAX`. All-reduce `torch.where(largest == largest_of_all, start + index, vocab_size)` with `MIN`.

# %% check="10.5"
check("10.5", best_token)


# %% [markdown]
# Now let your model write! It was trained on two ranks, and here, it continues three prompts on one, two, and four ranks.


# %%
@torch.no_grad()
def generate(model, prompt, new_tokens):
    text = prompt  # [b, s]
    for _ in range(new_tokens):
        token = best_token(model(text)[:, -1], model.config.vocab_size, model.group)  # [b]
        text = torch.cat([text, token[:, None]], dim=1)
    return text


PROMPTS = ["class _F", "    def ", "import t"]


def write(full):
    prompts = torch.tensor([list(prompt.encode()) for prompt in PROMPTS], device=device())
    return [bytes(line).decode(errors="replace") for line in generate(my_gpt(full), prompts, 40).tolist()]


@torch.no_grad()
def plain_text(prompt):
    ids = torch.tensor([list(prompt.encode())], device=device())
    for _ in range(40):
        ids = torch.cat([ids, plain(ids)[:, -1:].argmax(-1)], dim=1)
    return bytes(ids[0].tolist()).decode(errors="replace")


trained = {name: value.cpu() for name, value in plain.state_dict().items()}
written = {p: launch(write, p, args=(trained,)) for p in (1, 2, 4)}
viz.table([{"plain PyTorch writes": repr(plain_text(prompt))} | {
    f"p = {p}": "the same" if all(rank[line] == plain_text(prompt) for rank in written[p]) else "something else"
    for p in written} for line, prompt in enumerate(PROMPTS)])  # fmt: skip

# %% [markdown]
# The model stammers, but it stammers identically on any number of ranks.
#
# ## Break it
#
# Let's return to the first question of this chapter and add the MLP's residual before g, on every rank.
#
# **Predict.** For which of $p = 1, 2, 4$ is the loss of your trained model still correct? Now take an untrained model, whose correct loss is about 5.9. With the mistake, its stream becomes too large, but each norm scales the stream back before a block reads it. Will the untrained model's loss be off by more than 1 for any $p$? (Write `True` or `False`.)

# %% predict="10.g"
predict("10.g", correct_for=(1,), untrained_off_by_more_than_1=False)


# %%
class ResidualBeforeG(ParallelTransformerLayer):
    def forward(self, x, memory=None, **options):
        y, bias = self.attention(self.attention_norm(x))
        x = x + y + bias  # [b, s, h], which is still correct
        inner = F.gelu(self.mlp.up(self.mlp_norm(x)), approximate="tanh")  # [b, s, 4h/p]
        return reduce_from_region(x + F.linear(inner, self.mlp.down.weight)) + self.mlp.down.bias


def loss_of(full, layer_class):
    ids, targets = next(corpus.byte_batches(text, CONTEXT, BATCH, 1, seed=1))
    return my_gpt(full, layer_class)(ids.to(device()), targets.to(device())).item()


viz.table([{"weights": name, "layer": kind.__name__} | {
    f"p = {p}": f"{launch(loss_of, p, args=(full, kind))[0]:.3f}" for p in (1, 2, 4)}
    for name, full in (("untrained", start), ("trained", trained))
    for kind in (ParallelTransformerLayer, ResidualBeforeG)])  # fmt: skip

# %% [markdown]
# With the mistake, the untrained model even gets a *lower* loss, and nothing about this loss looks suspicious, because the norms hide how large the stream has become. Only the fact that the loss depends on $p$ reveals the mistake. So always compare your model with a run on a single rank.

# %%
symptoms(10)

# %% [markdown]
# ## Load GPT-2 (optional)
#
# A checkpoint of GPT-2 contains the same tensors as your GPT, but their names are different, and the weights of linear layers are stored as `[in, out]`. So for each tensor, you only need to know whether to transpose it and how to split it.

# %% [markdown] task="10.6" title="GPT-2's checkpoint as a table (optional)" difficulty=2 minutes=10
# Make a table with an entry for each of these tensors: `wte.weight` and `wpe.weight` (the embeddings of tokens and positions), and `attn.c_attn`, `attn.c_proj`, `mlp.c_fc`, and `mlp.c_proj`, each with a `.weight` and a `.bias`. (The norms are replicated, so we leave them out.) Each value is a pair: whether the tensor has to be transposed first, and how it's split *after* that.
#
# - `"rows"` means that rank $r$ takes the $r$-th block along dimension 0. (The elements of a bias count as rows.) `"columns"` means the same for dimension 1.
#
# - `"qkv"` means that three matrices are stacked, and each rank takes its rows of all three.
#
# - `"replicated"` means that every rank takes the full tensor.


# %% exercise="10.6"
def gpt2_plan():
    """Return {name in GPT-2: (transpose, split)}. A name without the layer's number stands for every layer."""
    ### BEGIN SOLUTION
    return {
        "wte.weight": (False, "rows"),
        "wpe.weight": (False, "replicated"),
        "attn.c_attn.weight": (True, "qkv"),
        "attn.c_attn.bias": (False, "qkv"),
        "attn.c_proj.weight": (True, "columns"),
        "attn.c_proj.bias": (False, "replicated"),
        "mlp.c_fc.weight": (True, "rows"),
        "mlp.c_fc.bias": (False, "rows"),
        "mlp.c_proj.weight": (True, "columns"),
        "mlp.c_proj.bias": (False, "replicated"),
    }
    ### END SOLUTION


# %% [markdown] hints="10.6"
# 1. `wte` is the token embedding, `wpe` is the position embedding, `c_attn` is your `attention.qkv`, `c_fc` is your `mlp.up`, and each `c_proj` is the second matrix of its block. Which of your layers are column-parallel, and which are row-parallel?
# 2. Your weights are stored as `[out, in]`, so a column-parallel weight is split by *rows*, and so is its bias. A row-parallel weight is split by columns, and its bias is added after g. The embeddings aren't linear layers.
# 3. Transpose the four weights in `attn` and `mlp`, and nothing else. Split `c_attn` as `"qkv"`, `c_fc` and `wte.weight` by rows, and both `c_proj.weight` by columns. Everything else is replicated.

# %% check="10.6"
check("10.6", gpt2_plan)

# %% [markdown]
# **Predict.** Suppose you forget to transpose one of the four weights. For which weight does the loader accept this without an error? (Write its name.)

# %% predict="10.h"
predict("10.h", no_error="attn.c_proj.weight")

# %%
import re

from tplab.gpt import to_hugging_face
from tplab.tensor import shard

OURS = {"wte": "embedding", "wpe": "positions", "attn.c_attn": "attention.qkv", "attn.c_proj": "attention.out",
        "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down", "ln_1": "attention_norm", "ln_2": "mlp_norm",
        "ln_f": "final_norm"}  # fmt: skip
SPLITS = {"rows": (0, 1), "qkv": (0, 3), "columns": (1, 1)}  # dimension, number of stacked matrices


def load_gpt2(state, plan):
    mine = {}
    for full_name, tensor in state.items():
        number, name, end = re.fullmatch(r"transformer\.(?:h\.(\d+)\.)?(.+)\.(weight|bias)", full_name).groups()
        transpose, split = plan.get(f"{name}.{end}", (False, "replicated"))
        tensor = tensor.t() if transpose else tensor
        if split in SPLITS:
            dim, blocks = SPLITS[split]
            tensor = shard(tensor, dim, dist.get_rank(), dist.get_world_size(), stride=blocks)
        mine[f"layers.{number}." * (number is not None) + f"{OURS[name]}.{end}"] = tensor
    model = ParallelGPT(CONFIG, ParallelTransformerLayer, device=device(), dtype=torch.float64)
    model.load_state_dict(mine)
    return model


def loss_without_transposing(state, name):
    plan = gpt2_plan()
    plan |= {name: (False, plan[name][1])} if name else {}
    ids, targets = next(corpus.byte_batches(text, CONTEXT, BATCH, 1, seed=1))
    try:
        return f"{load_gpt2(state, plan)(ids.to(device()), targets.to(device())).item():.3f}"
    except (RuntimeError, ValueError):
        return "an error"


gpt2 = {name: value for name, value in to_hugging_face(trained, CONFIG).items() if not name.startswith("lm_head")}
names = ["", *[name for name, (transpose, _) in gpt2_plan().items() if transpose]]
losses = {name: launch(loss_without_transposing, 2, args=(gpt2, name))[0] for name in names}
viz.table([{"not transposed": name or "(your table)", "loss, p = 2": loss} for name, loss in losses.items()])

# %% [markdown]
# `attn.c_proj.weight` is square, so its shape doesn't reveal the mistake. That's why you should always compare the logits of a loaded model with those of the original.
#
# ## In the wild
#
# <details><summary>Going deeper: Megatron-Core, names, sampling, the memory's gradient, and a fix that broke something else</summary>
#
# - **Megatron-Core** has this layer as `TransformerLayer` in `megatron/core/transformer/transformer_layer.py`, with `self_attn_bda`, `cross_attn_bda`, and `mlp_bda` after the blocks. "bda" is your `bias_dropout_add`, which lives in `megatron/core/fusions/fused_bias_dropout.py`. The model is `GPTModel` in `megatron/core/models/gpt/gpt_model.py`.
#
# - **The cast** that exercise 10.2 removes was there on purpose. According to a comment in Megatron-Core's code, the cast kept a pipeline from hanging under automatic mixed precision.
#
# - **Names change.** Your `init_std` depends on the names of the weights, and so does the initialization in `transformers`. In July 2026, a user noticed that `transformers` had stopped scaling these weights in new GPT-2 models. The code compared each parameter's name with `"c_proj.weight"`, but by then, the code received full names such as `"h.0.attn.c_proj.weight"`. Nothing raised an error, of course (huggingface/transformers issue 47458).
#
# - **A residual before g.** The inference engine Mirage shipped with this bug. Until June 2026, Mirage added one of its residuals on every rank, so this residual was doubled on two GPUs. The fix was to add the residual on rank 0 only, which is fine, because inference doesn't need any gradients (mirage-project/mirage pull request 722). But two months later, the developers found a model whose "residual" isn't a full tensor but a term of a sum. Since only rank 0 added its residual, the terms of all the other ranks were missing (pull request 753). So your code should always know whether a tensor is a term or a full tensor.
#
# - **A bias before g.** The training library GPT-NeoX shipped with this bug. It has a variant with parallel blocks, $x + \text{attention} + \text{MLP}$, in which a single all-reduce adds up the terms of both blocks. Each rank added both biases before this all-reduce, so the biases were added $p$ times (EleutherAI/gpt-neox issue 962, from 2023).
#
# - **Your way to choose a token** is newer than it looks. SGLang gathers all the logits on every rank, even if it only needs the largest one. A pull request of August 2026 sends each rank's best candidate instead, with your rule for ties (sgl-project/sglang pull request 35268, still open). In LightLLM, the same idea raised the throughput by 14 % on four H100s (ModelTC/LightLLM pull request 1511).
#
# - **If the next token is drawn at random**, all ranks have to get the same token. If each rank just calls `torch.multinomial`, as in openai/gpt-oss issue 270, the ranks' texts may drift apart. `tplab.gpt.generate` collects the $k$ best candidates of every rank, draws on rank 0, and broadcasts the token. It also uses a KV cache.
#
# - **The memory's gradient** is all-reduced once per decoder layer, because every cross-attention has its own f. The contributions of the layers are simply added, and so are the ranks' terms. So you could leave out all of these f's and put a single f where the memory enters the decoder. Can you see why the gradients would stay the same?
#
# </details>
#
# <details><summary>Going deeper: float16, and why every rank has to skip the same steps</summary>
#
# With float16, people multiply the loss by a large number, such as 65,536, so that small gradients don't round to zero. If a gradient overflows because of that, PyTorch's `GradScaler` skips the step and halves its scale. Each process makes this decision by itself, based on its own gradients.
#
# With tensor parallelism, a gradient can overflow on just one rank, because every rank has a different shard. We tried this on two ranks, with a column- and a row-parallel layer, and set a single element of rank 0's gradient to infinity. Rank 0 skipped the step and continued with a scale of 32,768. Rank 1 took the step and kept its scale of 65,536. So the bias, which should be the same on every rank, moved by -0.2 on rank 1 and not at all on rank 0. Nobody got an error.
#
# `tplab.cluster.TrainingStep` bases the decision on the full model's gradient norm. The norm is the same on every rank, and it's infinite or NaN as soon as any element is, so either all ranks take the step or none of them do. Megatron-LM takes the maximum of the ranks' overflow flags instead, which has the same effect (`MixedPrecisionOptimizer`). With bfloat16, you don't need to scale the loss, because bfloat16 has the same range as float32.
#
# </details>
#
# ## Your library so far
#
# Your library now contains a complete GPT. The table below ends with a command that has your GPT write a few tokens on two processes, without the notebook.

# %%
from tplab.course import library

library(10)

# %% [markdown]
# Each layer of your GPT sends four messages per training step, and for each message, all ranks stop and wait. How long do they wait? And could they do something useful in the meantime?
