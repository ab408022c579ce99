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
# You've built an attention layer, an MLP, an embedding, and a loss that run on any number of ranks. But a transformer also has norms, biases, dropout, and residual connections. Do the ranks have to communicate for any of these? They don't, as long as you put each operation in the right place. But it's surprisingly easy to pick the wrong one.
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
# ## The residual stream
#
# A **transformer layer** consists of two **blocks**, an attention block and an MLP block. (In chapters 06 and 09, we called the entire layer a block.) A block never replaces its input $x$. It computes something from $x$ and *adds* the result to $x$, and the next block does the same with the sum. This running sum, which passes through the whole model, is called the **residual stream**.
#
# Suppose two ranks have the full $x = [3, 4]$, but only partial sums of the block's output, $[1, 0]$ on rank 0 and $[0, 2]$ on rank 1. The full output is $[1, 2]$, so the residual stream should become $[4, 6]$. The operator g adds up the partial sums. Should a rank add $x$ before it calls g, or afterward?
#
# **Predict.** Suppose every rank adds $x$ to its partial sum and then calls g. What does the residual stream become? What does it become if only rank 0 adds $x$ before g? In this second case, let the loss be the sum of the result's elements. On rank 0, the gradient of $x$ is $[1, 1]$. On rank 1, both elements of this gradient have the same value. What is it?

# %% predict="10.a"
predict("10.a", before_g=(7, 10), rank_0_only=(4, 6), dx_on_rank_1=0)


# %%
def add_residual():
    rank = dist.get_rank()
    x = torch.tensor([3.0, 4.0], device=device(), requires_grad=True)
    y = torch.tensor([[1.0, 0.0], [0.0, 2.0]], device=device())[rank]  # a partial sum
    streams = {
        "after g": x + reduce_from_region(y),
        "before g": reduce_from_region(x + y),
        "before g, on rank 0 only": reduce_from_region(x * (rank == 0) + y),
    }
    dx = {way: torch.autograd.grad(z.sum(), x)[0] for way, z in streams.items()}
    return {way: (z.tolist(), dx[way].tolist()) for way, z in streams.items()}


ranks = launch(add_residual, 2)
viz.table([{"x is added": way, "new stream": stream,
            "dx, rank 0": dx, "dx, rank 1": ranks[1][way][1]}
           for way, (stream, dx) in ranks[0].items()])  # fmt: skip

# %% [markdown]
# If every rank adds $x$ before g, the result contains $x$ not once but $p$ times. If only rank 0 adds $x$, the result is correct, but it doesn't depend on rank 1's $x$. So rank 1 gets a wrong gradient and trains all its earlier layers with it.


# %% [markdown] task="10.1" title="Seven operations" difficulty=3 minutes=8
# The table lists everything that happens in one block, in alphabetical order. You start with `y = x`, and each operation changes `y`.
#
# | name | what happens to `y` |
# |---|---|
# | `"add"` | the original $x$ is added |
# | `"bias"` | the block's final bias, `[h]`, which every rank has in full, is added |
# | `"block"` | this rank's shards of the block's two matrices turn `y` into this rank's partial sum |
# | `"dropout"` | some elements are dropped, the same ones on every rank |
# | `"f"` | `copy_to_region`: an all-reduce in the backward pass only |
# | `"g"` | `reduce_from_region`: an all-reduce in the forward pass only |
# | `"norm"` | a `LayerNorm`, whose weight and bias every rank has in full |
#
# Put the seven names in the right order. In a single process, the norm comes first, and the block reads the norm's output. Dropout is applied to the sum of the block's output and the final bias, and at the very end, the original $x$ is added.
#
# The check compares the output and all gradients with a single-process run.


# %% exercise="10.1"
def block_order():
    """Return the names of the seven operations in the order in which they run."""
    ### BEGIN SOLUTION
    return ["norm", "f", "block", "g", "bias", "dropout", "add"]
    ### END SOLUTION


# %% [markdown] hints="10.1"
# 1. Start with a single process, where f and g do nothing. In which order do the other five operations have to run? Then suppose there are several ranks. After which operation do the ranks hold different tensors?
# 2. From g until the next block, all ranks hold the same tensors, so they can all run the same operations. If every rank adds a bias or a residual before g, the result contains the bias or the residual `p` times, because g adds up all the copies. In the backward pass, each rank has only its own contribution to the gradient until f adds up the contributions of all ranks. Which of the operations have parameters that need the full gradient?
# 3. In a single process, the order is norm, block, bias, dropout, add. The operators f and g go right before and right after the block.

# %% check="10.1"
check("10.1", block_order)

# %% [markdown]
# There are 5,040 possible orders. On two ranks, seven of them produce the correct output, but only one produces the correct gradients as well. Three rules lead you to this order:
#
# - From g until the next f, all ranks hold the same tensors, so norms and dropout need no communication.
#
# - Biases and residuals should be added only once, so they come after g.
#
# - In the backward pass, f adds up the gradient contributions of all ranks. A norm needs the full gradient for its own parameters, so the norm comes before f.
#
# A transformer layer runs these operations twice, first for attention and then for the MLP:
#
# $$y = x + \text{dropout}(\text{attention}(\text{norm}(x)) + b) \qquad z = y + \text{dropout}(\text{MLP}(\text{norm}(y)) + b')$$
#
# ![An animation of one training step of a transformer layer on two ranks, with the actual numbers for a single token. The residual stream is drawn as a gray pipe that passes through both ranks. Attention and the MLP each read a copy of the residual stream and compute one partial sum per rank. Then g adds up the partial sums, and the total is added to the residual stream. In the backward pass, f adds up the gradients of the two ranks, so the norms and biases get their full gradients without any additional messages.](pictures/one_step.svg)
#
# <details><summary>All frames, one by one</summary>
#
# ![The same animation as numbered stills](pictures/one_step_frames.svg)
#
# The token in the picture has only two features. A LayerNorm would turn any two features into 1 and -1, so the picture uses an RMSNorm instead. The dropout rate is 0.
#
# </details>
#
# **Predict.** Suppose a transformer layer runs on four ranks, with an input of shape `[2, 16, 32]` in float32. How many all-reduces does the layer run in the forward pass, and how many in the backward pass? How many bytes does each message contain? How many additional all-reduces do the gradients of the norms and the final biases need?

# %% predict="10.b"
predict("10.b", forward=2, backward=2, bytes_each=4096, for_norms_and_biases=0)


# %%
def one_pass():
    # the course's layer. Yours will take its place soon
    from tplab.gpt import ParallelTransformerLayer as Ready

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
# So only f and g send messages, and everything between the blocks works without communication.
#
# ## 256 + 1
#
# Large models are trained in bfloat16, which has only 8 significant bits. Within a block, 8 bits are enough. But the residual stream passes through *all* the layers, and each layer adds only small values to it.
#
# **Predict.** What's 256 + 1 in bfloat16? Now suppose an element of the residual stream is 256, and each of the next 64 blocks adds 0.5 to it. What's the final value of this element in bfloat16, and what is it in float32?

# %% predict="10.c"
predict("10.c", one_more=256, bfloat16=256, float32=288)

# %%
dtypes = torch.bfloat16, torch.float32
stream = {dtype: torch.tensor(256.0, dtype=dtype) for dtype in dtypes}
print(stream[torch.bfloat16] + 1)
for _ in range(64):
    stream = {dtype: x + torch.tensor(0.5).bfloat16() for dtype, x in stream.items()}
print(stream)

# %% [markdown]
# In bfloat16, none of the 64 blocks had any effect. So it's a good idea to keep the residual stream in float32 and to compute only the blocks in bfloat16. That takes more memory, but it causes no additional traffic, because f and g are inside the blocks, where each element still takes up 2 bytes.
#
# ## Fix it
#
# Megatron-Core has a switch for a float32 residual stream, `fp32_residual_connection`. After each block, a single function adds the final bias, applies dropout, and adds the residual, so that a GPU can run all three operations as one. To make this possible, a block with the option `skip_bias_add` returns its output and its final bias as two separate tensors.
#
# The next cell contains our own version of this function, with a bug that Megatron-Core shipped. The cell runs 48 layers, once with the switch off and once with it on, and measures the largest error in the residual stream.

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
        y = torch.randn(64, 256, generator=generator).bfloat16()
        bias = torch.randn(256, generator=generator).bfloat16()
        stream = bias_dropout_add(y, bias, stream, 0.0, True)
        correct = correct + y.double() + bias.double()
    return f"{(stream.double() - correct).abs().max():.1g}"


def switched(function):
    dtypes = {"off": torch.bfloat16, "on": torch.float32}
    return [{"float32 stream": name, "largest error": largest_error(function, dtype)}
            for name, dtype in dtypes.items()]  # fmt: skip


viz.table(switched(as_shipped))

# %% [markdown] task="10.2" title="Fix the switch that did nothing" difficulty=2 minutes=8
# The switch changes nothing at all! Find out why, and fix the function. The result and every intermediate sum should have the dtype of `residual`, so that nothing is rounded to a less precise dtype. All ranks should drop the same elements. `bias` may be `None`.


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
# 1. Look at the three tensors `y`, `bias`, and `residual`. Which of them loses bits in the broken version, and in which line? Which of them could you convert without losing any bits?
# 2. Convert `y` and `bias` to the dtype of `residual`. Convert both of them before you add them to each other, because the sum of two bfloat16 tensors is rounded to bfloat16.
# 3. Replace the first line with `y = y.to(residual.dtype)`. If there's a bias, add it with `y = y + bias.to(residual.dtype)`. You don't have to change the last line.

# %% check="10.2"
check("10.2", bias_dropout_add)

# %%
viz.table(switched(bias_dropout_add))

# %% [markdown]
# Now the switch works. With the switch off, the error is as large as before, because the residual stream *itself* is rounded after every addition.
#
# ## Encoders and decoders
#
# There are three kinds of transformer layers:
#
# - An **encoder** layer has no causal mask, because the full text is already known.
#
# - A **decoder** layer, as in a GPT, has a causal mask.
#
# - A **decoder layer with cross-attention** has a third block between the other two, which reads the memory, as in chapter 06. Like the other two blocks, it has a norm and a residual connection. Its norm is only applied to $x$, not to the memory.
#
# In the very first transformer, the norms came after the residuals were added (Vaswani et al. 2017). This order is called **post-LN**, and ours is called **pre-LN**. With post-LN, the output of a norm is used twice, as the next block's input and as its residual. So to get post-LN, you can keep our norms where they are and use their *outputs* as the residuals. (Only the norm before the very first block is new, because the original transformer had no norm there.) Megatron calls this option `apply_residual_connection_post_layernorm`.

# %% tags=["setup"]
# nn.LayerNorm, but it computes in the dtype of its input
from tplab.gpt.transformer import LayerNorm
from tplab.tensor import ParallelAttention, ParallelMLP

# %% [markdown] task="10.3" title="ParallelTransformerLayer" difficulty=3 minutes=14
# Write `forward`. All blocks were built with `skip_bias_add=True`, so each block returns two tensors: its output after g, `[b, s, h]`, and its final bias, `[h]`, which you still have to add.
#
# - `self.attention(x, key_padding_mask=..., rng=...)` is self-attention. `self.cross_attention(x, memory, key_padding_mask=..., rng=...)` reads the memory. Without cross-attention, `self.cross_attention` is `None`. `self.mlp(x)` takes no other arguments.
#
# - `forward` receives two masks, one for the padding tokens of $x$ and one for the padding tokens of the memory. Both kinds of attention take a mask as their `key_padding_mask`, which has to be `True` wherever a *key* belongs to a padding token. Which of the two masks does each kind of attention need?
#
# - Attention also applies dropout to its attention weights, and it needs the tracker `rng` to do so. For the dropout after each block, call your `bias_dropout_add` with the rate `self.hidden_dropout`.
#
# - The residual stream may be in float32 while the weights are in bfloat16. A norm preserves the dtype of its input, but a block needs its input in the dtype of the weights. (The memory already has this dtype.)


# %% exercise="10.3"
class ParallelTransformerLayer(nn.Module):
    """x [b, s, h] and memory [b, t, h] -> out [b, s, h].

    All of them are the same on every rank of `group`.
    """

    def __init__(
        self, hidden_size, num_heads, *, causal=True, cross_attention=False,
        activation="gelu_tanh", hidden_dropout=0.0, attention_dropout=0.0,
        apply_residual_connection_post_layernorm=False,
        group=None, device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        self.hidden_dropout = hidden_dropout
        self.post = apply_residual_connection_post_layernorm
        h, place = hidden_size, {"device": device, "dtype": dtype}
        block = {"skip_bias_add": True, "group": group, **place}
        attention = {"num_heads": num_heads, "dropout": attention_dropout, **block}
        self.attention_norm = LayerNorm(h, **place)
        self.attention = ParallelAttention(h, causal=causal, **attention)
        self.cross_attention = None
        if cross_attention:
            attention["attention_type"] = "cross"
            self.cross_norm = LayerNorm(h, **place)
            self.cross_attention = ParallelAttention(h, **attention)
        self.mlp_norm = LayerNorm(h, **place)
        self.mlp = ParallelMLP(h, activation=activation, **block)

    def forward(
        self, x, memory=None, *,
        key_padding_mask=None, memory_padding_mask=None, rng=None,
    ):  # fmt: skip
        """
        key_padding_mask:    bool [b, s], True where a token of x is padding, or None
        memory_padding_mask: bool [b, t], the same for the tokens of the memory, or None
        """
        ### BEGIN SOLUTION

        def add_block(x, norm, block, *args, **options):
            normed = norm(x)  # [b, s, h]
            # [b, s, h], [h]
            y, bias = block(normed.to(norm.weight.dtype), *args, **options)
            residual = normed if self.post else x
            rate = self.hidden_dropout
            return bias_dropout_add(y, bias, residual, rate, self.training, rng)

        options = {"key_padding_mask": key_padding_mask, "rng": rng}
        x = add_block(x, self.attention_norm, self.attention, **options)
        if self.cross_attention is not None:
            options = {"key_padding_mask": memory_padding_mask, "rng": rng}
            x = add_block(x, self.cross_norm, self.cross_attention, memory, **options)
        return add_block(x, self.mlp_norm, self.mlp)
        ### END SOLUTION


# %% [markdown] hints="10.3"
# 1. Write the layer for a single process first. On several ranks, the code for replicated tensors stays the same. Which of the layer's tensors are replicated? And in cross-attention, do the keys come from `x` or from the memory? This tells you whose padding tokens have to be masked.
# 2. Each block takes the same four steps: apply the norm, call the block, choose the residual, and call `bias_dropout_add`. The residual is the norm's output if `self.post` is True, and the norm's input otherwise. The result is the `x` of the next block.
# 3. Start with `normed = self.attention_norm(x)`. Then call `y, bias = self.attention(normed.to(self.attention_norm.weight.dtype), key_padding_mask=key_padding_mask, rng=rng)`. After that, set `x = bias_dropout_add(y, bias, normed if self.post else x, self.hidden_dropout, self.training, rng)`. If there's cross-attention, repeat these three steps with `self.cross_norm` and `self.cross_attention(normed, memory, key_padding_mask=memory_padding_mask, rng=rng)`. Don't forget to convert `normed` here, too. Finally, repeat the steps with `self.mlp_norm` and `self.mlp`.

# %% check="10.3"
check("10.3", ParallelTransformerLayer)

# %% [markdown]
# Now let's compare your layer with PyTorch's own layers.
#
# **Predict.** Suppose a decoder layer has cross-attention, and the memory needs a gradient, too. How many all-reduces does this layer run in the forward pass, and how many in the backward pass?

# %% predict="10.d"
predict("10.d", forward=3, backward=4)

# %%
BOTH = {"self_attn.in_proj_": "attention.qkv.", "self_attn.out_proj.": "attention.out.",
        "linear1.": "mlp.up.", "linear2.": "mlp.down.",
        "norm1.": "attention_norm."}  # fmt: skip
ENCODER = BOTH | {"norm2.": "mlp_norm."}
DECODER = BOTH | {"norm2.": "cross_norm.", "norm3.": "mlp_norm.",
                  "multihead_attn.out_proj.": "cross_attention.out."}  # fmt: skip


def against_pytorch(kind):
    torch.manual_seed(0)
    options = {"device": device(), "dtype": torch.float64}
    is_decoder = kind is nn.TransformerDecoderLayer
    names = DECODER if is_decoder else ENCODER
    theirs = kind(32, 4, 128, 0.0, F.gelu, batch_first=True, norm_first=True, **options)
    state = dict(theirs.state_dict())
    full = {}
    for end in ("weight", "bias") if is_decoder else ():
        q, kv = state.pop(f"multihead_attn.in_proj_{end}").split([32, 64])
        full |= {f"cross_attention.q.{end}": q, f"cross_attention.kv.{end}": kv}
    for name, value in state.items():
        start = next(start for start in names if name.startswith(start))
        full[names[start] + name.removeprefix(start)] = value
    decoder = {"causal": is_decoder, "cross_attention": is_decoder}
    layer = ParallelTransformerLayer(32, 4, activation="gelu", **decoder, **options)
    load_full_state_dict(layer, full)  # each rank takes its shards
    lengths = (6, 9) if is_decoder else (6,)
    texts = [torch.randn(2, s, 32, requires_grad=True, **options) for s in lengths]
    mask = nn.Transformer.generate_square_subsequent_mask(6, **options)
    causal = {"tgt_mask": mask} if is_decoder else {}
    with record() as forward:
        out = layer(*texts)
    with record() as backward:
        out.sum().backward()
    return {"largest difference": f"{(out - theirs(*texts, **causal)).abs().max():.0e}",
            "forward": [call.numel for call in forward],
            "backward": [call.numel for call in backward]}  # fmt: skip


kinds = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
viz.table([{"layer": kind.__name__, "p": p}
           | launch(against_pytorch, p, args=(kind,))[0]
           for kind in kinds for p in (1, 2, 4)])  # fmt: skip

# %% [markdown]
# The differences are only rounding errors.
#
# ## From a layer to a GPT
#
# You've already built all the parts of a GPT:
#
# | part | what each rank holds |
# |---|---|
# | token embedding | $v/p$ of its rows |
# | position embedding, one vector per position | all of it |
# | $L$ layers | $1/p$ of each matrix |
# | final norm | all of it |
# | logits, computed with the rows of the token embedding | the same $v/p$ rows |
# | loss, in the course's version | $v/p$ columns of the logits |
#
# **Predict.** Go through the table and count the f's and g's. How many all-reduces does one training step of a GPT with $L = 2$ layers need? (The course's loss runs two small ones in the forward pass.) How many of these messages have $b \cdot s \cdot h$ elements?

# %% predict="10.e"
predict("10.e", all_reduces=12, of_bsh=10)

# %% [markdown]
# ## Smaller weights for deep models
#
# Initial weights usually have a standard deviation of 0.02. But in a deep model, $2L$ blocks add their outputs to the residual stream. If these outputs are independent and have the same variance, the stream's standard deviation grows like $\sqrt{2L}$. To prevent this, GPT-2 divides the standard deviation by $\sqrt{2L}$ for every weight matrix whose output is added to the residual stream.

# %% tags=["setup"]
from tplab.gpt import transformer
from tplab.memory import GPTConfig
from tplab.tensor import (
    VocabParallelEmbedding,
    parallel_logits,
    vocab_parallel_cross_entropy,
)

# %% [markdown] task="10.4" title="ParallelGPT" difficulty=3 minutes=10
# Write `forward` and `init_std`.
#
# - The residual stream starts with the sum of the two embeddings. If `self.float32_residual` is True, convert it to float32, and don't round the residual stream before the final norm has read it.
#
# - Before the first layer, apply dropout with the rate `self.config.dropout`. All ranks should drop the same elements.
#
# - `parallel_logits(x, weight, group=...)` includes f. It computes this rank's logits, `[b, s, v/p]`, from this rank's rows of the embedding, `self.embedding.weight`. Before you call it, convert `x` to the dtype of these rows.
#
# - If there are targets, return the mean loss from `vocab_parallel_cross_entropy(logits, targets, vocab_size=..., group=...)`. Pass it the real vocabulary size, `self.config.vocab_size`, so that it refuses targets in the padding of the embedding.
#
# - `init_std` takes the name of a weight in `ParallelGPT`, such as `"layers.0.attention.qkv.weight"`, and returns the standard deviation of its initial values.


# %% exercise="10.4"
class ParallelGPT(nn.Module):
    """ids [b, s] -> this rank's logits [b, s, v/p].

    With targets [b, s] -> their mean loss, the same on every rank.
    """

    def __init__(
        self, config, layer_class=None, *, multiple=8, float32_residual=False,
        group=None, device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        self.config, self.float32_residual, self.group = config, float32_residual, group
        h, rate = config.hidden_size, config.dropout
        place = {"device": device, "dtype": dtype}
        options = {"hidden_dropout": rate, "attention_dropout": rate, **place}
        options["activation"] = config.activation
        # the course's layer
        layer_class = layer_class or transformer.ParallelTransformerLayer
        self.embedding = VocabParallelEmbedding(
            config.vocab_size, h, multiple=multiple, group=group, **place
        )
        self.positions = nn.Embedding(config.seq_length, h, **place)
        self.layers = nn.ModuleList(
            layer_class(h, config.num_heads, group=group, **options)
            for _ in range(config.num_layers)
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
        logits = parallel_logits(x, self.embedding.weight, group=self.group)
        if targets is None:
            return logits  # [b, s, v/p]
        options = {"vocab_size": self.config.vocab_size, "group": self.group}
        return vocab_parallel_cross_entropy(logits, targets, **options)
        ### END SOLUTION


def init_std(name, num_layers, std=0.02):
    """Return the standard deviation of a weight's first values.

    It's std, or less if the weight's output goes into the stream.
    """
    ### BEGIN SOLUTION
    writes_to_the_stream = name.endswith(("attention.out.weight", "mlp.down.weight"))
    return std / math.sqrt(2 * num_layers) if writes_to_the_stream else std
    ### END SOLUTION


# %% [markdown] hints="10.4"
# 1. Go through the table above from top to bottom. Each row of the table takes one or two lines of code in `forward`. You don't have to call f or g yourself, because the modules call them. For `init_std`, you have to recognize the matrices that write to the residual stream. Which of an MLP's two matrices computes its output?
# 2. In `forward`, add the two embeddings, apply dropout, and call every layer with the same `rng`. Then apply the final norm, convert its output to the dtype of the embedding, and compute the logits with the embedding's own weight. In `init_std`, look for the weights of `attention.out` and `mlp.down`, because their outputs are added to the residual stream. Every layer has both of them.
# 3. Start with `x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))` and convert `x` if necessary. Apply `dropout(x, self.config.dropout, self.training, sharded=False, rng=rng)`, and then each layer with `layer(x, rng=rng)`. After the last layer, compute `self.final_norm(x).to(self.embedding.weight.dtype)`, and return `parallel_logits(x, self.embedding.weight, group=self.group)`. In `init_std`, return `std / math.sqrt(2 * num_layers)` if `name.endswith(("attention.out.weight", "mlp.down.weight"))`.

# %% check="10.4"
check("10.4", ParallelGPT, init_std)

# %%
# a GPT in plain PyTorch, whose parameters have the same names
from tplab.plain import GPT


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
    config = GPTConfig(num_layers=24, hidden_size=256, num_heads=8, vocab_size=256,
                       seq_length=64, dropout=0.0)  # fmt: skip
    model, stds = new_gpt(config, std_of), []

    def keep_std(layer, given, out):
        stds.append(out.std().item())

    for layer in model.layers:
        layer.register_forward_hook(keep_std)
    model(torch.randint(256, (2, 64)))
    return stds


by_depth = {
    "0.02 for all weights": stds_by_depth(lambda name, num_layers: 0.02),
    "yours": stds_by_depth(init_std),
}
labels = {"xlabel": "layer", "ylabel": "standard deviation"}
viz.curves(by_depth, title="the standard deviation of the stream", **labels)

# %% [markdown]
# ## Train it
#
# Let's train everything you've built since chapter 03. The training text is only 1,500 bytes of Python's standard library, so a small model can almost learn it by heart. (Because our model has only 64 features, its weights start with a standard deviation of 0.1.)

# %%
from tplab.common import corpus

CONFIG = GPTConfig(num_layers=2, hidden_size=64, num_heads=4, vocab_size=256,
                   seq_length=96, activation="gelu_tanh", dropout=0.0)  # fmt: skip
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


plain = new_gpt(CONFIG, lambda name, num_layers: init_std(name, num_layers, 0.1))
plain = plain.to(device())
start = {name: value.cpu().clone() for name, value in plain.state_dict().items()}
plain_losses = train(plain)
losses, calls = launch(train_mine, 2, args=(start,), timeout=300)[1]  # rank 1's
pairs = zip(losses, plain_losses, strict=True)
furthest = max(abs(mine - theirs) for mine, theirs in pairs)
print(
    f"{calls:.0f} all-reduces per step, "
    f"and the losses never differ by more than {furthest:.0e}"
)
runs = {"plain PyTorch": plain_losses, "your GPT, p = 2": losses}
viz.curves(runs, title="a GPT on two ranks")

# %% [markdown]
# The two curves lie on top of each other, and the chart below them shows how little they differ. Yet neither process ever had the full model.
#
# ## Which token?
#
# To write text, a GPT computes the logits of the next token, chooses a token, appends it to the text, and starts over. The simplest choice is the token with the largest logit. But each rank has only the logits of its own part of the vocabulary, and all ranks have to choose the *same* token. If several tokens share the largest logit, the ranks should choose the lowest ID, as `torch.argmax` does.
#
# **Predict.** Suppose there are eight tokens. Rank 0 has the logits `[0.5, 2.0, -1.0, 2.0]`, and rank 1 has the logits `[1.0, 0.0, 3.0, 3.0]`. Which index does `argmax` return on each rank, and which ID should both ranks choose? On two ranks, GPT-2's 50,257 rows are padded to 50,432 rows. If you gathered the logits, how many logits per token would you get?

# %% predict="10.f"
predict("10.f", index_on_rank_0=1, index_on_rank_1=2, chosen_id=6, gathered=50432)

# %% [markdown] task="10.5" title="The next token" difficulty=3 minutes=12
# Choose the next token for each text in a batch. Each rank may send only a few numbers per text.
#
# - With `op=dist.ReduceOp.MAX` or `op=dist.ReduceOp.MIN`, `dist.all_reduce` computes a maximum or a minimum.
#
# - The last rows of the embedding may be padding. Their IDs are `vocab_size` or more, and you must never choose them, no matter how large their logits are. A rank may even have nothing but padding rows.
#
# - Keep the IDs as integers. In bfloat16, 257 would be rounded to 256.


# %% exercise="10.5"
def best_token(logits, vocab_size, group=None):
    """Return the ids with the largest logits, [b], the same on every rank.

    Of several such ids, it's the lowest one.

    logits: this rank's logits [b, v/p]
    """
    ### BEGIN SOLUTION
    width = logits.shape[1]
    start = dist.get_rank(group) * width
    ids = torch.arange(start, start + width, device=logits.device)  # [v/p]
    # [b] each
    largest, index = logits.masked_fill(ids >= vocab_size, -torch.inf).max(dim=1)
    largest_of_all = largest.clone()
    dist.all_reduce(largest_of_all, op=dist.ReduceOp.MAX, group=group)
    # vocab_size is above all ids
    token = torch.where(largest == largest_of_all, start + index, vocab_size)  # [b]
    dist.all_reduce(token, op=dist.ReduceOp.MIN, group=group)
    return token
    ### END SOLUTION


# %% [markdown] hints="10.5"
# 1. Each rank only has to consider one candidate, the token with its largest logit. Which two numbers do the other ranks need to know about this token? If you know the token's index in the rank's shard, how do you get its ID?
# 2. Set the logits of the padding to minus infinity, and find the rank's largest logit and its index. Then compute the largest logit over all ranks. Each rank that has this logit proposes the ID of its token. Every other rank proposes a number that's too large to be the minimum of all proposals.
# 3. Compute `ids = start + arange(v/p)` with `start = dist.get_rank(group) * v/p`. Then compute `largest, index = logits.masked_fill(ids >= vocab_size, -torch.inf).max(dim=1)`. All-reduce a copy of `largest` with `MAX`, and then all-reduce `torch.where(largest == largest_of_all, start + index, vocab_size)` with `MIN`.

# %% check="10.5"
check("10.5", best_token)


# %% [markdown]
# Now let your model write! With the trained weights of the plain PyTorch model, it continues three prompts on one, two, and four ranks, and the table compares the texts with those of plain PyTorch.


# %%
@torch.no_grad()
def generate(model, prompt, new_tokens):
    text = prompt  # [b, s]
    for _ in range(new_tokens):
        logits = model(text)[:, -1]  # [b, v/p]
        token = best_token(logits, model.config.vocab_size, model.group)  # [b]
        text = torch.cat([text, token[:, None]], dim=1)
    return text


PROMPTS = ["class _F", "    def ", "import t"]


def write(full):
    ids = torch.tensor([list(prompt.encode()) for prompt in PROMPTS])
    texts = generate(my_gpt(full), ids.to(device()), 40)
    return [bytes(line).decode(errors="replace") for line in texts.tolist()]


@torch.no_grad()
def plain_text(prompt):
    ids = torch.tensor([list(prompt.encode())], device=device())
    for _ in range(40):
        ids = torch.cat([ids, plain(ids)[:, -1:].argmax(-1)], dim=1)
    return bytes(ids[0].tolist()).decode(errors="replace")


trained = {name: value.cpu() for name, value in plain.state_dict().items()}
written = {p: launch(write, p, args=(trained,)) for p in (1, 2, 4)}
rows = []
for line, expected in enumerate(map(plain_text, PROMPTS)):
    row = {"plain PyTorch writes": repr(expected)}
    for p, ranks in written.items():
        same = all(rank[line] == expected for rank in ranks)
        row[f"p = {p}"] = "the same" if same else "something else"
    rows.append(row)
viz.table(rows)

# %% [markdown]
# The model stammers, but it stammers identically on any number of ranks.
#
# ## Break it
#
# Let's return to the mistake from the beginning of this chapter and have every rank add the MLP's residual before g.
#
# **Predict.** Suppose you make this mistake and run your trained model on $p = 1$, 2, and 4 ranks. For which of these values of $p$ is the loss still correct? An untrained model should have a loss of about 5.9. Because of the mistake, the residual stream of the untrained model becomes too large, but a norm scales it back before each block reads it. Is there any $p$ for which the untrained model's loss is off by more than 1? (Write `True` or `False`.)

# %% predict="10.g"
predict("10.g", correct_for=(1,), untrained_off_by_more_than_1=False)


# %%
class ResidualBeforeG(ParallelTransformerLayer):
    def forward(self, x, memory=None, **options):
        y, bias = self.attention(self.attention_norm(x))
        x = x + y + bias  # [b, s, h], which is still correct
        up, down = self.mlp.up, self.mlp.down
        inner = F.gelu(up(self.mlp_norm(x)), approximate="tanh")  # [b, s, 4h/p]
        return reduce_from_region(x + F.linear(inner, down.weight)) + down.bias


def loss_of(full, layer_class):
    ids, targets = next(corpus.byte_batches(text, CONTEXT, BATCH, 1, seed=1))
    return my_gpt(full, layer_class)(ids.to(device()), targets.to(device())).item()


viz.table([{"weights": name, "layer": kind.__name__} | {
    f"p = {p}": f"{launch(loss_of, p, args=(full, kind))[0]:.3f}" for p in (1, 2, 4)}
    for name, full in (("untrained", start), ("trained", trained))
    for kind in (ParallelTransformerLayer, ResidualBeforeG)])  # fmt: skip

# %% [markdown]
# The mistake even *lowers* the untrained model's loss. It's hard to notice, because the norms hide how large the residual stream has become. But the loss depends on $p$. So always compare your model with a single-rank run.

# %%
symptoms(10)

# %% [markdown]
# ## Load GPT-2 (optional)
#
# A checkpoint of GPT-2 contains the same tensors as your GPT, but they have different names, and the weights of linear layers are stored as `[in, out]`.

# %% [markdown] task="10.6" title="GPT-2's checkpoint as a table (optional)" difficulty=2 minutes=10
# Return a dictionary with ten keys: `wte.weight` and `wpe.weight` (the embeddings of tokens and positions), and the `.weight` and the `.bias` of `attn.c_attn`, `attn.c_proj`, `mlp.c_fc`, and `mlp.c_proj`. (The norms are replicated, so we leave them out.) Each value is a pair. Its first element says whether to transpose the tensor, and its second element says how to split the tensor *after* that.
#
# - `"rows"` means that rank $r$ takes the $r$-th of $p$ equal slices along dimension 0. (The elements of a bias count as rows.) `"columns"` means the same for dimension 1.
#
# - `"qkv"` means that the tensor consists of three stacked parts, and each rank takes its rows from each part.
#
# - `"replicated"` means that every rank takes the full tensor.


# %% exercise="10.6"
def gpt2_plan():
    """Return {name in GPT-2: (transpose, split)}.

    A name without the layer's number stands for every layer.
    """
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
# 1. In GPT-2, `wte` is the token embedding, and `wpe` is the position embedding. `c_attn` is your `attention.qkv`, `c_fc` is your `mlp.up`, and each `c_proj` is the second linear layer of its block. Which of these layers are column-parallel in your GPT, and which are row-parallel?
# 2. Your weights are stored as `[out, in]`, so the weight of a column-parallel layer is split by *rows*, and so is its bias. The weight of a row-parallel layer is split by columns, and its bias is added after g. The two embeddings aren't linear layers.
# 3. Transpose the four weights whose names start with `attn` or `mlp`, and nothing else. Split `c_attn` as `"qkv"`, split `c_fc` and `wte.weight` by rows, and split the `c_proj.weight` of attention and of the MLP by columns. Everything else is replicated.

# %% check="10.6"
check("10.6", gpt2_plan)

# %% [markdown]
# The next cell converts the trained weights to GPT-2's format, uses your table to load them on two ranks, and computes the loss.
#
# **Predict.** Suppose you forget to transpose one of the four weights. For which weight does the checkpoint still load without an error? (Write its name.)

# %% predict="10.h"
predict("10.h", no_error="attn.c_proj.weight")

# %%
import re

from tplab.gpt import to_hugging_face
from tplab.tensor import shard

OURS = {"wte": "embedding", "wpe": "positions",
        "attn.c_attn": "attention.qkv", "attn.c_proj": "attention.out",
        "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down",
        "ln_1": "attention_norm", "ln_2": "mlp_norm", "ln_f": "final_norm"}  # fmt: skip
# dimension, number of stacked matrices
SPLITS = {"rows": (0, 1), "qkv": (0, 3), "columns": (1, 1)}


def load_gpt2(state, plan):
    mine, rank, p = {}, dist.get_rank(), dist.get_world_size()
    pattern = r"transformer\.(?:h\.(\d+)\.)?(.+)\.(weight|bias)"
    for full_name, tensor in state.items():
        number, name, end = re.fullmatch(pattern, full_name).groups()
        transpose, split = plan.get(f"{name}.{end}", (False, "replicated"))
        tensor = tensor.t() if transpose else tensor
        if split in SPLITS:
            dim, blocks = SPLITS[split]
            tensor = shard(tensor, dim, rank, p, stride=blocks)
        layer = f"layers.{number}." if number else ""
        mine[f"{layer}{OURS[name]}.{end}"] = tensor
    options = {"device": device(), "dtype": torch.float64}
    model = ParallelGPT(CONFIG, ParallelTransformerLayer, **options)
    model.load_state_dict(mine)
    return model


def loss_without_transposing(state, name):
    plan = gpt2_plan()
    plan |= {name: (False, plan[name][1])} if name else {}
    ids, targets = next(corpus.byte_batches(text, CONTEXT, BATCH, 1, seed=1))
    try:
        loss = load_gpt2(state, plan)(ids.to(device()), targets.to(device()))
        return f"{loss.item():.3f}"
    except (RuntimeError, ValueError):
        return "an error"


gpt2 = to_hugging_face(trained, CONFIG)
gpt2 = {name: value for name, value in gpt2.items() if not name.startswith("lm_head")}
names = ["", *[name for name, (transpose, _) in gpt2_plan().items() if transpose]]
losses = [launch(loss_without_transposing, 2, args=(gpt2, name))[0] for name in names]
viz.table([{"not transposed": name or "(your table)", "loss, p = 2": loss}
           for name, loss in zip(names, losses, strict=True)])  # fmt: skip

# %% [markdown]
# `attn.c_proj.weight` is square, so its shape doesn't reveal the mistake. That's why you should always compare the logits of a loaded model with those of the original.
#
# Would you like to load the real GPT-2, or a Llama? If you've downloaded a model's folder from Hugging Face, `tplab.gpt.config_of_folder` returns the config of the model, and `tplab.gpt.load_folder` loads the weights. Each rank reads only its own slices of the files. And if you already have the state dict of a model from `transformers`, `tplab.gpt.from_hugging_face` translates it.
#
# ## In the wild
#
# <details><summary>Going deeper: Megatron-Core, names, sampling, the memory's gradient, and a fix that broke something else</summary>
#
# - **Megatron-Core** implements this layer as `TransformerLayer` in `megatron/core/transformer/transformer_layer.py`. After the blocks, the layer calls `self_attn_bda`, `cross_attn_bda`, and `mlp_bda`, where "bda" stands for your `bias_dropout_add`. This function is in `megatron/core/fusions/fused_bias_dropout.py`, and the model, `GPTModel`, is in `megatron/core/models/gpt/gpt_model.py`.
#
# - **The bug from exercise 10.2** was in Megatron-Core until February 2026. The embedding returned a float32 tensor, but the very first block converted the residual stream back to bfloat16 (NVIDIA/Megatron-LM pull request 3504). This conversion was there on purpose. According to a comment in the code, it kept a pipeline from hanging under automatic mixed precision.
#
# - **Names change.** Your `init_std` depends on the names of the weights, and so does the initialization in `transformers`. In July 2026, a user noticed that `transformers` no longer scaled these weights in new GPT-2 models. The code compared each parameter's name with `"c_proj.weight"`, but by then, it received full names such as `"h.0.attn.c_proj.weight"`. Nothing raised an error, of course (huggingface/transformers issue 47458).
#
# - **Mirage, an inference engine, added a residual before g.** Until June 2026, every rank added the same residual before the all-reduce, so on two GPUs, the result included it twice. The developers fixed the bug by adding the residual only on rank 0. That's fine, because inference doesn't need any gradients (mirage-project/mirage pull request 722). Two months later, they found a model in which each rank's "residual" is only a partial sum. For this model, the fix was wrong, because it dropped the partial sums of all other ranks (pull request 753). So your code should always know whether a tensor is a partial sum or the full tensor.
#
# - **GPT-NeoX, a training library, added biases before g.** One of its models runs attention and the MLP side by side and computes $x + \text{attention} + \text{MLP}$. In this model, a single all-reduce adds up the partial sums of both blocks. Every rank added the final biases of both blocks before this all-reduce, so the result contained them $p$ times (EleutherAI/gpt-neox issue 962, from 2023).
#
# - **Not every library chooses tokens the way you do.** SGLang gathers all the logits on every rank, even if it only needs the largest one. In August 2026, someone proposed that each rank send only its best candidate, with the same rule for ties as yours (sgl-project/sglang pull request 35268, still open). In LightLLM, the same change increased the throughput by 14% on four H100s (ModelTC/LightLLM pull request 1511).
#
# - **If you draw the next token at random**, all ranks have to draw the same token. If each rank just calls `torch.multinomial`, as in openai/gpt-oss issue 270, the ranks may end up writing different texts. `tplab.gpt.generate` collects the $k$ best candidates from each rank, draws a token on rank 0, and broadcasts it. It also uses a KV cache.
#
# - **The memory's gradient** is all-reduced once per decoder layer, because every cross-attention has its own f. The gradient that the encoder gets is the sum over all decoder layers and all ranks. So you could leave out all of these f's and put a single f where the memory enters the decoder. Can you see why the gradients would stay the same?
#
# </details>
#
# <details><summary>Going deeper: float16, and why every rank has to skip the same steps</summary>
#
# If you train in float16, you multiply the loss by a large number, such as 65,536, so that small gradients aren't rounded to zero. If this factor makes a gradient overflow, PyTorch's `GradScaler` skips the step and halves the factor. Each process makes this decision by itself, based on its own gradients.
#
# With tensor parallelism, every rank has a different shard, so a gradient can overflow on just one rank. We tried this on two ranks, with a column-parallel and a row-parallel layer, and set a single element of rank 0's gradient to infinity. Rank 0 skipped the step and continued with a factor of 32,768. Rank 1 took the step and kept its factor of 65,536. So the bias, which should be the same on every rank, changed by -0.2 on rank 1 and didn't change at all on rank 0. Neither rank raised an error.
#
# `tplab.cluster.TrainingStep` bases the decision on the norm of the full model's gradient. This norm is the same on every rank, and it's infinite or NaN if any element of the gradient is, so either all ranks take the step or none of them do. Megatron-LM takes the maximum of the ranks' overflow flags instead, which has the same effect (`MixedPrecisionOptimizer`). In bfloat16, you don't need to scale the loss, because bfloat16 has the same range as float32.
#
# </details>
#
# ## Your library so far
#
# Your library now contains a complete GPT. The last command in the table below generates a few tokens on two processes.

# %%
from tplab.course import library

library(10)

# %% [markdown]
# Each layer of your GPT sends four messages per training step, and all ranks stop and wait for every message. How long do they wait? And could they do something useful in the meantime?
