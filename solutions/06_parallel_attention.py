# %% [markdown]
# # 06 · Parallel attention
#
# In your MLP, no token ever looked at another token. In attention, every token looks at every other token. How could you split an attention layer across ranks without constant communication? In this chapter, you'll find a split that needs only one all-reduce per pass, just like your MLP. By the end, your library will train a transformer block on two processes.
#
# You need chapters 04 and 05. About 75 minutes, plus 15 minutes for an optional section.

# %% tags=["setup"]
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tplab import device, launch, record, viz
from tplab.course import check, predict, symptoms
from tplab.tensor import (
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    scatter_to_region,
)

# %% [markdown]
# ## What if you split a head?
#
# An attention **head** computes a query, a key, and a value for each token. All three are vectors with $d$ elements. The dot product of a query and a key is called a **score**. A softmax turns each query's scores into weights, and the head returns the weighted sum of the values.
#
# Suppose you split a head across two ranks, so that each rank has half of every query and half of every key. Then each rank can compute only one term of every score. Let's try it with one query, two keys, and $d = 2$. (To keep the numbers simple, we won't divide the scores by $\sqrt{d}$.)


# %%
def half_a_head(q, k):
    rank = dist.get_rank()
    terms = q[rank] * k[:, rank]  # [2], this rank's term of each score
    return {"terms": terms, "softmax": terms.softmax(0)}


q = torch.tensor([2.0, 2.0])  # one query [d]
k = torch.tensor([[2.0, -2.0], [0.0, 0.5]])  # two keys [2, d]
halves = launch(half_a_head, 2, args=(q, k))
terms = {f"rank {rank}: terms": seen["terms"] for rank, seen in enumerate(halves)}
viz.matrices(terms | {"scores": k @ q})

# %% [markdown]
# If you add up the two ranks' terms, you get the correct scores, which are 0 for the first key and 1 for the second key. So the correct weights are $1/(1+e) = 0.27$ and 0.73.
#
# **Predict.** If each rank applies the softmax to its own terms instead, which key gets nearly all the weight on rank 0, and which key gets nearly all the weight on rank 1? (Write 1 or 2.) If you add up the two weights that the second key gets, what's the result, rounded to a whole number?

# %% predict="6.a"
predict("6.a", rank_0=1, rank_1=2, sum_for_second_key=1)

# %%
weights = {f"rank {rank}: softmax": seen["softmax"] for rank, seen in enumerate(halves)}
weights |= {"sum": sum(weights.values()), "correct": (k @ q).softmax(0)}
viz.matrices(weights, compare={"sum": "correct"})

# %% [markdown]
# The two ranks give nearly all the weight to different keys. As with GELU in chapter 02, you can't apply a softmax to each term of a sum and then add up the results. The ranks could all-reduce the scores before the softmax, but every head has a score for each pair of tokens. For a sequence of $s$ tokens, the scores have $s/d$ times as many elements as the layer's output. In GPT-3, that's 16 times as many.
#
# ## But heads ignore each other
#
# Luckily, an attention layer has many heads, and no head ever looks at another head's scores. The three functions below split a tensor into heads, compute the output of each head, and merge the heads back together. In a tensor of shape `[b, s, h]`, each head has its own block of $d$ adjacent columns.


# %% tags=["setup"]
def split_heads(y, head_dim):
    # [b, s, n·d] -> [b, n, s, d], where n is the number of heads
    return y.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def attend(q, k, v, causal=False):
    # q [b, n, s, d], k and v [b, n, t, d] -> [b, n, s, d]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def merge_heads(y):  # [b, n, s, d] -> [b, s, n·d]
    return y.transpose(1, 2).flatten(2)


# %% [markdown] task="6.1" title="Split attention with the least traffic" difficulty=3 minutes=12
# Attention has four weight matrices $W_q$, $W_k$, $W_v$, and $W_o$, all of them `[h, h]`. A single process would compute the output like this:
#
# ```python
# q, k, v = (split_heads(x @ w, head_dim) for w in (wq, wk, wv))
# out = merge_heads(attend(q, k, v)) @ wo
# ```
#
# As in exercise 5.1, every rank receives the full $X$ and returns the full output. In the backward pass, every rank needs the full gradient of $X$ and the gradients of its own four shards.
#
# - `attention_splits` returns four strings, one for each matrix. Each string is either "column" or "row".
#
# - `sharded_attention` receives $X$ and this rank's shards of the four matrices. It may call `copy_to_region` (f), `reduce_from_region` (g), `scatter_to_region`, and `gather_from_region`, but no more often than necessary.
#
# The number of heads is divisible by the number of ranks. The check counts the messages in each pass.


# %% exercise="6.1"
def attention_splits() -> tuple[str, str, str, str]:
    """Return how Wq, Wk, Wv and Wo are split, as "column" or "row" each."""
    ### BEGIN SOLUTION
    return "column", "column", "column", "row"
    ### END SOLUTION


def sharded_attention(x, wq, wk, wv, wo, head_dim):
    """Return out [b, s, h], on every rank.

    x [b, s, h]: the same on every rank
    wq, wk, wv, wo: this rank's shards of Wq, Wk, Wv and Wo [h, h]
    """
    ### BEGIN SOLUTION
    x = copy_to_region(x)  # [b, s, h]; backward: all-reduce of dx
    q = split_heads(x @ wq, head_dim)  # [b, n/p, s, d], complete heads
    k = split_heads(x @ wk, head_dim)
    v = split_heads(x @ wv, head_dim)
    y = merge_heads(attend(q, k, v))  # [b, s, h/p]
    return reduce_from_region(y @ wo)  # [b, s, h]
    ### END SOLUTION


# %% [markdown] hints="6.1"
# 1. A softmax needs complete scores, and a score is the dot product of a complete query and a complete key. Each head has its own block of columns in `XW_q`. Which split of `W_q` gives each rank complete heads without any communication? Which splits of `W_k` and `W_v` give each rank the keys and values that belong to its own queries?
# 2. After `merge_heads`, each rank holds some columns of the heads' outputs. Which rows of `W_o` are these columns multiplied by? What does each rank have after that matmul, and which operator turns it into the full output? In the backward pass, `X` gets a gradient through `W_q`, `W_k`, and `W_v` on every rank. How many operators does it take to add up all these contributions?
# 3. Split `W_q`, `W_k`, and `W_v` by columns and `W_o` by rows. Start with `x = copy_to_region(x)`, and use this `x` in all three matmuls. Compute the heads with `split_heads`, `attend`, and `merge_heads`, and return `reduce_from_region(y @ wo)`.

# %% check="6.1"
check("6.1", attention_splits, sharded_attention)

# %% [markdown]
# Your design has the same structure as your MLP from exercise 5.1, but with attention heads instead of GELU in the middle:
#
# $$X \;\xrightarrow{\;f\;}\; [\,Q_0, K_0, V_0\,],\; [\,Q_1, K_1, V_1\,] \;\xrightarrow{\text{heads}}\; [\,Y_0,\; Y_1\,] \;\longrightarrow\; Y_0 O_0 + Y_1 O_1 \;\xrightarrow{\;g\;}\; Z$$
#
# GELU works on each element separately, and the softmax works on each head separately, so neither of them needs any messages. This is also how Megatron-LM splits attention (Shoeybi et al. 2019). Because no head may be split, the number of *heads* must be divisible by the number of ranks.
#
# ![An animation of an attention layer with four heads on two ranks. In the forward pass, each rank computes the attention scores of its own two heads without any communication, and then g adds the two partial outputs. In the backward pass, f adds the two partial gradients of the input. The last frame marks three parts of the attention layer with the names A, GELU, and B, because the MLP of chapter 05 has the same structure.](pictures/attention.svg)
#
# <details><summary>All frames, one by one</summary>
#
# ![The same animation as numbered stills](pictures/attention_frames.svg)
#
# </details>
#
# ## One matmul instead of three
#
# Queries, keys, and values are all computed from the same $X$. So you can stack their weights into a single fused weight $[W_q; W_k; W_v]$, as in exercise 5.4. Then a single column-parallel layer computes all three with one large matmul and one f. (Three separate layers would call f three times.)
#
# **Predict.** An attention layer with $h = 32$ and 8 heads runs on four ranks, and its input has the shape `[2, 5, 32]` in float32. What's the shape of each rank's fused weight, stored as `[out, in]`? What's the shape of each rank's `q` after `split_heads`? How many all-reduces do the two passes run in total, and how many bytes does each message contain?

# %% predict="6.b"
predict("6.b", qkv_weight=(24, 32), q=(2, 2, 5, 4), all_reduces=2, bytes_each=1280)

# %% tags=["setup"]
# your layers from chapter 04
from tplab.tensor import ColumnParallelLinear, RowParallelLinear, divide

# %% [markdown] task="6.2" title="ParallelAttention" difficulty=2 minutes=8
# Turn your design into a module with two layers from chapter 04. Call them `self.qkv` (for the stacked weights) and `self.out`, and pass `bias`, `group`, `device`, and `dtype` on to both layers.
#
# If the number of heads isn't divisible by the number of ranks in `group`, raise a `ValueError` on every rank, even if $h$ is divisible. You can use `divide(n, p)`, which returns `n // p` or raises this error for you.


# %% exercise="6.2"
class ParallelAttention(nn.Module):
    """Self-attention with complete heads on every rank of `group`.

    x [b, s, h], the same on every rank -> out [b, s, h], the same on every rank

    The full weight of `qkv` is [Wq; Wk; Wv], [3h, h]. If `causal`, each token attends
    only to itself and earlier tokens.
    """

    def __init__(
        self,
        hidden_size,
        num_heads,
        *,
        causal=False,
        bias=True,
        group=None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.causal = causal
        ### BEGIN SOLUTION
        divide(num_heads, dist.get_world_size(group), name="num_heads", unit="heads")
        self.head_dim = divide(hidden_size, num_heads)  # d, the same for every p
        options = {"bias": bias, "group": group, "device": device, "dtype": dtype}
        # weight [3h/p, h]
        self.qkv = ColumnParallelLinear(
            hidden_size, 3 * hidden_size, stride=3, **options
        )
        # weight [h, h/p]
        self.out = RowParallelLinear(hidden_size, hidden_size, **options)
        ### END SOLUTION

    def forward(self, x):
        ### BEGIN SOLUTION
        q, k, v = self.qkv(x).chunk(3, dim=-1)  # [b, s, h/p] each
        # [b, n/p, s, d] each
        q, k, v = (split_heads(part, self.head_dim) for part in (q, k, v))
        y = attend(q, k, v, causal=self.causal)  # [b, n/p, s, d]
        return self.out(merge_heads(y))  # [b, s, h]
        ### END SOLUTION


# %% [markdown] hints="6.2"
# 1. Which parallel layer from chapter 04 can leave its output sharded, and which one can take a sharded input? A head has `d = h/n` elements, where `n` is the total number of heads. Does `d` depend on the number of ranks?
# 2. The first layer is column-parallel and maps `h` features to `3h` features. Its weight consists of three blocks, and each rank needs a slice of every block. Which option of `ColumnParallelLinear` did you use for such blocks in exercise 5.4? Which part of a rank's output contains the queries?
# 3. Create `self.qkv = ColumnParallelLinear(hidden_size, 3 * hidden_size, stride=3, ...)` and `self.out = RowParallelLinear(hidden_size, hidden_size, ...)`, and store `self.head_dim = hidden_size // num_heads`. In `forward`, compute `q, k, v = self.qkv(x).chunk(3, dim=-1)`, call `split_heads` on each of them, then call `attend(q, k, v, causal=self.causal)`, and return `self.out(merge_heads(y))`.

# %% check="6.2"
check("6.2", ParallelAttention)

# %% [markdown]
# ## Who may look at whom?
#
# So far, every query attends to every key. In practice, a **mask** determines which keys a query may attend to. Two kinds of keys are off limits.
#
# - **Keys of future tokens.** A model that generates text from left to right doesn't know the future tokens yet, so a token may only attend to itself and to earlier tokens. A mask that enforces this rule is called *causal*. During training, each of the $t$ tokens has a query. But when the model generates text, it has already computed the outputs of the older tokens, so only the newest $s$ of the $t$ tokens need a query.
#
# - **Keys of padding tokens.** Short texts in a batch are padded with meaningless tokens, and no query should attend to these tokens.
#
# **Predict.** A text of three tokens is padded to five tokens on the *left*, and the mask is causal. How many keys may the very first query attend to? In a different text, all $t = 5$ tokens are real, but only the last two have queries. With PyTorch's `is_causal=True`, query $i$ attends to keys 0 to $i$. So how many keys does the last query attend to, and how many should it attend to?

# %% predict="6.c"
predict("6.c", padded=0, is_causal=2, right=5)

# %% [markdown] task="6.3" title="Who may attend to whom" difficulty=3 minutes=9
# - `attention_mask` returns a mask that's `True` where a query may attend to a key. There are $t$ tokens, and the queries belong to the last $s$ of them.
#
# - `attention_weights` applies a softmax to the scores of the keys that the mask allows. All other keys get a weight of exactly 0. If a query may not attend to any key, all of its weights are 0. No gradient may become NaN.


# %% exercise="6.3"
def attention_mask(s, t, *, causal=False, padding=None, device=None):
    """Return a bool mask [b, 1, s, t], True where a query may attend to a key.

    The mask is on `device`. Without padding, b is 1.

    padding: bool [b, t], True where a token is padding, or None
    """
    ### BEGIN SOLUTION
    mask = torch.ones(1, 1, s, t, dtype=torch.bool, device=device)
    if causal:
        mask = mask.tril(t - s)  # query i belongs to token t - s + i
    if padding is not None:
        mask = mask & ~padding[:, None, None, :]  # [b, 1, s, t]
    return mask
    ### END SOLUTION


def attention_weights(q, k, mask):
    """Return the softmax of q kᵀ / √d over the allowed keys, [b, n, s, t].

    q [b, n, s, d], k [b, n, t, d], and a mask [b or 1, 1, s, t]
    """
    ### BEGIN SOLUTION
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])  # [b, n, s, t]
    # NaN in a row that consists of -inf only
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    return weights.masked_fill(~mask, 0.0)
    ### END SOLUTION


# %% [markdown] hints="6.3"
# 1. Write down the causal mask for `s = 2` and `t = 5`. The last query belongs to the last token, so what does the last row of the mask look like? Then think about the softmax. Which score has an exponential of exactly 0? What does the softmax return if every score in a row has that value?
# 2. `tensor.tril(diagonal)` keeps the lower triangle of a matrix, and its argument shifts the diagonal to the right. To combine padding `[b, t]` with a mask `[1, 1, s, t]`, insert two dimensions with `padding[:, None, None, :]`. For the softmax, fill the forbidden scores with `-torch.inf`. If a query may not attend to any key, its whole row of weights becomes NaN, so replace these NaNs afterward.
# 3. The mask is `torch.ones(1, 1, s, t, dtype=torch.bool, device=device).tril(t - s)`, combined with `~padding[:, None, None, :]`. The weights are `scores.masked_fill(~mask, -torch.inf).softmax(-1).masked_fill(~mask, 0.0)`. The first `masked_fill` also stops the gradient at the forbidden keys, and the second one turns rows of NaN into zeros.

# %% check="6.3"
check("6.3", attention_mask, attention_weights)

# %% [markdown]
# Do NaNs matter if they only affect padding tokens? The next cell computes a loss for two texts of five tokens. The second text starts with two padding tokens, and the loss ignores their outputs.
#
# **Predict.** Suppose the queries of these two tokens get NaN weights. Is the loss NaN? Is any element of $dW_o$ NaN? What share of the elements of $dx$ is NaN in the *unpadded* text, and what share is NaN in the padded text? (Write numbers between 0 and 1.)

# %% predict="6.d"
predict("6.d", loss=False, dWo=True, dx_unpadded=0, dx_padded=1)


# %%
def nan_weights(q, k, mask):  # without the second masked_fill
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    return scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)


def nans(weights_of):
    torch.manual_seed(0)
    sizes = (2, 5, 8), (8, 24), (8, 8)
    x, wqkv, wo = (torch.randn(size, requires_grad=True) for size in sizes)
    padding = torch.tensor([[False] * 5, [True, True, False, False, False]])
    q, k, v = (split_heads(part, 4) for part in (x @ wqkv).chunk(3, dim=-1))
    mask = attention_mask(5, 5, causal=True, padding=padding)
    out = merge_heads(weights_of(q, k, mask) @ v) @ wo
    loss = out[~padding].square().mean()
    loss.backward()
    found = {"loss": loss.detach(), "dWo": wo.grad}
    found |= {"dx, unpadded text": x.grad[0], "dx, padded text": x.grad[1]}
    shares = {name: value.isnan().double().mean() for name, value in found.items()}
    return {name: f"{share:.0%}" for name, share in shares.items()}


ways = {"softmax alone": nan_weights, "yours": attention_weights}
viz.table([{"share of NaNs": name} | nans(way) for name, way in ways.items()])

# %% [markdown]
# The loss looks perfectly healthy. But in the backward pass, the gradient of an ignored output is 0, and zero times NaN is NaN. PyTorch's own `nn.MultiheadAttention` has this bug. If a query has no allowed keys, the module returns NaNs unless you pass `need_weights=False` (pytorch issue 41508, open since 2020).
#
# With tensor parallelism, every rank has all the tokens, so every rank uses the same mask for its own heads.
#
# ## Two texts
#
# In a translation model, an encoder reads a text, and a decoder writes the translation. Each token of the decoder attends to the encoder's output, which is called the **memory**. In **cross-attention** like this, the queries come from the decoder's tokens $x$, and the keys and values come from the memory.
#
# **Predict.** Suppose $x$ has 320 elements and the memory has 448. If you fuse as many weights as possible, how many elements does each all-reduce send? Write one tuple for the forward pass and one for the backward pass, with the smallest message first.

# %% predict="6.e"
predict("6.e", forward=(320,), backward=(320, 448))

# %% [markdown] task="6.4" title="Cross-attention" difficulty=2 minutes=8
# Write a cross-attention module. First decide which of $W_q$, $W_k$, and $W_v$ can share a fused weight, and fuse as many as possible, in this order. Name each layer after what it computes. For example, `self.q` computes only queries, and `self.qkv` would compute all three. The output layer is still `self.out`.
#
# Every token of the decoder may attend to all tokens of the memory that aren't padding, and the two texts may have different lengths. Raise the same `ValueError` as in exercise 6.2. Your functions from exercise 6.3 will help.


# %% exercise="6.4"
class ParallelCrossAttention(nn.Module):
    """Attention from one text to another.

    x [b, s, h] and memory [b, t, h], both the same on every rank
        -> out [b, s, h], the same on every rank
    """

    def __init__(
        self, hidden_size, num_heads, *, bias=True, group=None, device=None, dtype=None
    ):
        super().__init__()
        ### BEGIN SOLUTION
        divide(num_heads, dist.get_world_size(group), name="num_heads", unit="heads")
        self.head_dim = divide(hidden_size, num_heads)
        options = {"bias": bias, "group": group, "device": device, "dtype": dtype}
        # weight [h/p, h]
        self.q = ColumnParallelLinear(hidden_size, hidden_size, **options)
        # weight [2h/p, h]
        self.kv = ColumnParallelLinear(
            hidden_size, 2 * hidden_size, stride=2, **options
        )
        # weight [h, h/p]
        self.out = RowParallelLinear(hidden_size, hidden_size, **options)
        ### END SOLUTION

    def forward(self, x, memory, memory_padding=None):
        """memory_padding: bool [b, t], True where a memory token is padding, or None"""
        ### BEGIN SOLUTION
        q = split_heads(self.q(x), self.head_dim)  # [b, n/p, s, d]
        k, v = self.kv(memory).chunk(2, dim=-1)  # [b, t, h/p] each
        # [b, n/p, t, d] each
        k, v = (split_heads(part, self.head_dim) for part in (k, v))
        s, t = q.shape[2], k.shape[2]
        mask = attention_mask(s, t, padding=memory_padding, device=x.device)
        y = attention_weights(q, k, mask) @ v  # [b, n/p, s, d]
        return self.out(merge_heads(y))  # [b, s, h]
        ### END SOLUTION


# %% [markdown] hints="6.4"
# 1. Which of the three projections for queries, keys, and values read the same input? Only these projections can share a weight. In the backward pass, every rank needs the full gradient of the decoder's tokens and the full gradient of the memory. Each of these two gradients is a sum over the ranks. Which of your three layers compute these sums for you?
# 2. `self.kv` is column-parallel and stacks two matrices, so which `stride` does it need? Compute the queries from `x`, and the keys and values from `memory`. Since `s` and `t` differ, take both from the shapes of `q` and `k`.
# 3. Use `ColumnParallelLinear(hidden_size, hidden_size, ...)` for `self.q`, `ColumnParallelLinear(hidden_size, 2 * hidden_size, stride=2, ...)` for `self.kv`, and `RowParallelLinear` for `self.out`. In `forward`, build the mask with `attention_mask(s, t, padding=memory_padding, device=x.device)`, and multiply `attention_weights(q, k, mask)` by `v`.

# %% check="6.4"
check("6.4", ParallelCrossAttention)

# %% [markdown]
# Cross-attention needs an f for each of its two inputs. Suppose you forget the f for the memory. Then the loss is still correct, and so are all gradients in the decoder. Only the gradients in the encoder are wrong.
#
# ## Train a block
#
# A transformer **block** consists of an attention layer and an MLP, each with a residual connection around it. Let's train one! The model below reads 32 bytes of Python and, after each one, predicts the next byte. Everything except the block is replicated.

# %%
from collections import OrderedDict

from tplab.common import corpus
from tplab.tensor import ParallelMLP, load_full_state_dict

HIDDEN, HEADS, CONTEXT, BATCH = 64, 4, 32, 16
text = corpus.python_sources(300_000)


def options():
    # on a machine with several GPUs, each rank has its own
    return {"device": device(), "dtype": torch.float64}


class PlainAttention(nn.Module):
    """The same attention without any parallelism, to compare with."""

    def __init__(self, hidden_size, num_heads, *, causal, **options):
        super().__init__()
        self.head_dim = hidden_size // num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, **options)
        self.out = nn.Linear(hidden_size, hidden_size, **options)

    def forward(self, x):
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (split_heads(part, self.head_dim) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(merge_heads(y))


def plain_mlp(hidden_size, **options):
    up = nn.Linear(hidden_size, 4 * hidden_size, **options)
    down = nn.Linear(4 * hidden_size, hidden_size, **options)
    return nn.Sequential(OrderedDict(up=up, gelu=nn.GELU(), down=down))


class ByteModel(nn.Module):
    def __init__(self, attention, mlp):
        super().__init__()
        self.embedding = nn.Embedding(corpus.VOCABULARY, HIDDEN, **options())
        self.position = nn.Embedding(CONTEXT, HIDDEN, **options())
        self.attention, self.mlp = attention, mlp
        self.norm = nn.LayerNorm(HIDDEN, **options())
        self.head = nn.Linear(HIDDEN, corpus.VOCABULARY, **options())

    def forward(self, tokens):  # [b, s] bytes
        position = self.position.weight[: tokens.shape[1]]  # [s, h]
        x = self.embedding(tokens) + position  # [b, s, h]
        x = x + self.attention(x)  # [b, s, h]
        x = x + self.mlp(x)  # [b, s, h]
        return self.head(self.norm(x))  # [b, s, 256]


def train(model, steps=80):
    """Train on the same batches on every rank, and return the loss of every step."""
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    losses = []
    for inputs, targets in corpus.byte_batches(text, CONTEXT, BATCH, steps, seed=1):
        logits = model(inputs.to(device()))  # [b, s, 256]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device()).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


torch.manual_seed(0)
attention = PlainAttention(HIDDEN, HEADS, causal=True, **options())
plain = ByteModel(attention, plain_mlp(HIDDEN, **options()))
start = {name: value.cpu().clone() for name, value in plain.state_dict().items()}
plain_losses = train(plain)

# %% [markdown]
# **Predict.** On two ranks, how many all-reduces does each training step of your block need in total, including any that sum parameter gradients?

# %% predict="6.f"
predict("6.f", all_reduces=4)


# %%
def train_block():
    attention = ParallelAttention(HIDDEN, HEADS, causal=True, **options())
    model = ByteModel(attention, ParallelMLP(HIDDEN, **options()))
    load_full_state_dict(model, start)  # each rank takes its shards
    with record() as section:
        losses = train(model)
    return losses, section.totals()["all_reduce"].calls / len(losses)


losses, calls = launch(train_block, 2, timeout=300)[1]  # rank 1's
pairs = zip(losses, plain_losses, strict=True)
furthest = max(abs(mine - theirs) for mine, theirs in pairs)
print(
    f"{calls:.0f} all-reduces per step, "
    f"and the losses never differ by more than {furthest:.0e}"
)
viz.curves(
    {"plain PyTorch": plain_losses, "your block, p = 2": losses},
    title="a transformer block on two ranks",
)

# %% [markdown]
# The two curves lie on top of each other, and the chart below them shows how little they differ.
#
# ## Fewer keys than ranks
#
# When a model generates text, it stores the keys and values of all earlier tokens in a **cache**, so that it doesn't have to recompute them for each new token. To make this cache smaller, **grouped-query attention** has several query heads share one key head and one value head (Ainslie et al. 2023). In **multi-query attention**, *all* query heads share a single key head and a single value head (Shazeer 2019).
#
# What happens if there are more ranks than key heads? The next cell shows which heads each rank holds.

# %%
from tplab.tensor import QKVParallelLinear


def heads_held(num_heads, num_kv_heads):
    layer = QKVParallelLinear(
        1, num_heads, num_kv_heads, head_dim=1, bias=False, device=device()
    )
    q, kv = range(num_heads), range(num_kv_heads)
    numbers = torch.tensor([*q, *kv, *kv], dtype=torch.float32)
    # the weight of each head is the head's number
    load_full_state_dict(layer, {"weight": numbers[:, None]})
    held = layer.weight.detach()[:, 0].int().split(layer.heads)  # of q, of k, of v
    return {name: part.tolist() for name, part in zip("qkv", held, strict=True)}


# %% tags=["explore"]
def show_heads(p, num_kv_heads):
    held = launch(heads_held, p, args=(8, num_kv_heads))
    title = f"8 query heads, {num_kv_heads} key and value heads, p = {p}"
    return viz.heads(held, title=title)


viz.explore(
    show_heads,
    p=(1, 2, 4, 8),
    num_kv_heads=(8, 4, 2, 1),
    start={"p": 4, "num_kv_heads": 2},
)

# %% [markdown]
# A head can't be split, so several ranks hold **copies** of the same key head. But each copy is only used by the queries on its own rank.
#
# **Predict.** Two ranks hold copies of the only key head and value head. One f comes before all three projections, as in your `ParallelAttention`, but no collective touches the copies or their gradients. After the first backward pass, which of the output, $dW_q$, $dW_k$, and $dx$ are correct? (Write `True` or `False` for each of them.)

# %% predict="6.g"
predict("6.g", out=True, dWq=True, dWk=False, dx=True)

# %% [markdown]
# ## Fix it
#
# The BigCode project, which trained StarCoder, added multi-query attention to its own version of Megatron-LM. Every rank had a copy of the shared weights, and the developers summed the gradients of the copies across ranks. Still, whenever they split a model across several ranks, its loss exploded after a few thousand steps. After 5,000 steps, a small model had a loss of 3.74 instead of 2.64. And yet, when the developers printed the copies at step 2400, the copies were "perfectly in sync" (bigcode-project/Megatron-LM issue 35, March 2023). The next cell contains the same bug.


# %%
class AsShipped(nn.Module):
    def __init__(self, hidden_size, num_heads, *, group=None, device=None, dtype=None):
        super().__init__()
        self.group, self.head_dim = group, divide(hidden_size, num_heads)
        options = {"bias": False, "device": device, "dtype": dtype}
        # weight [h/p, h]
        self.q = ColumnParallelLinear(hidden_size, hidden_size, group=group, **options)
        # a copy on every rank
        self.kv = nn.Linear(hidden_size, 2 * self.head_dim, **options)  # weight [2d, h]
        self.out = RowParallelLinear(hidden_size, hidden_size, group=group, **options)

    def forward(self, x):
        q = F.linear(copy_to_region(x, self.group), self.q.weight)
        # adds up the gradients of the copies
        kv_weight = copy_to_region(self.kv.weight, self.group)
        kv = F.linear(x, kv_weight)
        k, v = (split_heads(part, self.head_dim) for part in kv.chunk(2, dim=-1))
        y = attend(split_heads(q, self.head_dim), k, v, causal=True)
        return self.out(merge_heads(y))


torch.manual_seed(0)
h, d = HIDDEN, HIDDEN // HEADS
sizes = {"q": (h, h), "kv": (2 * d, h), "out": (h, h)}
shared = {
    f"attention.{name}.weight": torch.randn(size, dtype=torch.float64) / 8
    for name, size in sizes.items()
}


def train_shared(attention_class):
    attention = attention_class(HIDDEN, HEADS, **options())
    model = ByteModel(attention, ParallelMLP(HIDDEN, **options()))
    rest = {name: value for name, value in start.items() if "attention" not in name}
    load_full_state_dict(model, rest | shared)
    losses = train(model, steps=40)

    def apart(weight):
        # the largest difference between a weight and the mean of its copies
        total = weight.detach().clone()
        dist.all_reduce(total)
        return (total / dist.get_world_size() - weight.detach()).abs().max().item()

    drift = {
        "K/V copies apart": apart(model.attention.kv.weight),
        "embeddings apart": apart(model.embedding.weight),
    }
    return {"first loss": losses[0], "loss after 40 steps": losses[-1]} | drift


def measured(attention_class, p, *names):
    seen = launch(train_shared, p, args=(attention_class,), timeout=300)[0]
    row = {"": f"{attention_class.__name__}, p = {p}"}
    return row | {name: f"{seen[name]:.4f}" for name in names}


names = ("first loss", "loss after 40 steps", "K/V copies apart")
viz.table([measured(AsShipped, p, *names) for p in (1, 2)])

# %% [markdown]
# The first loss is correct, the model learns, and the copies of the shared weights are identical. Would you have noticed that something is wrong?
#
# **Predict.** Where does the code above call f? After the first backward pass on two ranks, which of the output, $dW_q$, $dW_k$, and $dx$ are correct? (Write `True` or `False` for each of them.)

# %% predict="6.h"
predict("6.h", out=True, dWq=True, dWk=True, dx=False)

# %% [markdown] task="6.5" title="Fix multi-query attention" difficulty=4 minutes=13
# Fix `forward` so that all gradients are correct on any number of ranks. The constructor is correct, so you only have to decide where to call f. There are two right answers, which send different numbers of bytes. The check accepts both, but it rejects answers that send anything unnecessary.


# %% exercise="6.5"
class MultiQueryAttention(nn.Module):
    """Causal attention without biases.

    All query heads share one key head and one value head.

    x [b, s, h], the same on every rank of `group`
        -> out [b, s, h], the same on every rank
    """

    def __init__(self, hidden_size, num_heads, *, group=None, device=None, dtype=None):
        super().__init__()
        divide(num_heads, dist.get_world_size(group), name="num_heads", unit="heads")
        self.group, self.head_dim = group, divide(hidden_size, num_heads)
        options = {"bias": False, "device": device, "dtype": dtype}
        # weight [h/p, h]
        self.q = ColumnParallelLinear(hidden_size, hidden_size, group=group, **options)
        # a copy on every rank
        self.kv = nn.Linear(hidden_size, 2 * self.head_dim, **options)  # weight [2d, h]
        self.out = RowParallelLinear(hidden_size, hidden_size, group=group, **options)

    def forward(self, x):
        ### BEGIN SOLUTION
        # backward: adds up dx, through the queries and through the copies
        x = copy_to_region(x, self.group)
        q = F.linear(x, self.q.weight)  # [b, s, h/p]
        # backward: adds up the gradients of the copies
        kv_weight = copy_to_region(self.kv.weight, self.group)
        kv = F.linear(x, kv_weight)  # [b, s, 2d]
        # [b, 1, s, d] each
        k, v = (split_heads(part, self.head_dim) for part in kv.chunk(2, dim=-1))
        y = attend(split_heads(q, self.head_dim), k, v, causal=True)  # [b, n/p, s, d]
        return self.out(merge_heads(y))  # [b, s, h]
        ### BROKEN
        # q = F.linear(copy_to_region(x, self.group), self.q.weight)
        # # adds up the gradients of the copies
        # kv_weight = copy_to_region(self.kv.weight, self.group)
        # kv = F.linear(x, kv_weight)
        # k, v = (split_heads(part, self.head_dim) for part in kv.chunk(2, dim=-1))
        # y = attend(split_heads(q, self.head_dim), k, v, causal=True)
        # return self.out(merge_heads(y))
        ### END SOLUTION


# %% [markdown] hints="6.5"
# 1. Follow the gradient backward from `k` and `v` on one rank. Which queries contributed to this gradient? So is the gradient of `kv` complete, or is it only one term of a sum over the ranks? Then follow the gradient further, into `self.kv.weight` and into `x`. In which of these two places does the broken version add up the terms?
# 2. In the backward pass, you can add up the ranks' terms either before or after the gradient passes through the matmul. If you add up the terms of the gradient of `kv`, the matmul turns it into complete gradients of its two inputs. Otherwise, you have to add up the terms for both inputs of the matmul, which are `x` and the weight.
# 3. For the first fix, write `x = copy_to_region(x, self.group)` at the top, and use this `x` for the queries as well as for `kv`. Keep the f on the weight. For the second fix, keep the f before the projection of the queries, remove the f on the weight, and write `kv = copy_to_region(F.linear(x, self.kv.weight), self.group)`.

# %% check="6.5"
check("6.5", MultiQueryAttention)

# %%
names = ("first loss", "loss after 40 steps", "K/V copies apart", "embeddings apart")
viz.table(
    [
        measured(AsShipped, 2, *names),
        measured(MultiQueryAttention, 2, *names),
        measured(MultiQueryAttention, 1, *names),
    ]
)

# %% [markdown]
# Now you can see what really went wrong. In the broken version, $dx$ differs from rank to rank, and so do the gradients of all parameters *before* the attention layer. Only the shared weights stay equal, because only their gradients are summed. Your detector from exercise 5.3 compares *all* replicated parameters, so it would have noticed the bug after one step. There are two ways to fix this. The first fix puts a single f before all three projections and keeps the f on the shared weight. Like the broken version, the second fix has a separate f for the queries, but it moves the other f from the shared weight to `kv`. BigCode's developers tried both fixes (pull requests 36 and 37) and merged the first one (pull request 39).
#
# **Predict.** Besides the message for $dx$, the first fix sends the gradient of the shared weight `[2d, h]`, and the second fix sends the gradient of `kv` `[b, s, 2d]`. How many elements do these two gradients have for $b \cdot s = 4096$ tokens, $h = 1024$, and $d = 64$?

# %% predict="6.i"
predict("6.i", weight=131072, keys_and_values=524288)

# %% [markdown]
# ## Break it
#
# Weights aren't the only tensors that belong to a head. Some models encode positions with a method called ALiBi, which gives each head a **slope** in addition to its weights. The head multiplies its slope by the distance between a query and a key, and subtracts the result from their score, so that distant tokens get less attention. For four heads, the slopes are 1/4, 1/16, 1/64, and 1/256. Shortly before BLOOM was trained, its developers noticed that every rank would use the slopes of the *first* heads instead of those of its own heads (bigscience-workshop/Megatron-DeepSpeed issue 227).
#
# **Predict.** Suppose four ranks hold one head each, and every rank uses the slope of the first head. How many ranks compute their head correctly? Which slope does rank 3 use?

# %% predict="6.j"
predict("6.j", correct_ranks=1, slope_of_rank_3=0.25)


# %%
def alibi(q, k, v, slopes):
    position = torch.arange(q.shape[2])  # [s]
    distance = position[:, None] - position  # [s, s], negative for future tokens
    penalty = slopes[:, None, None] * distance  # [n, s, s]
    penalty = penalty.masked_fill(distance < 0, torch.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=-penalty)


def wrong_slopes():
    rank, slopes = dist.get_rank(), torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])
    # four heads, on every rank
    q, k, v = torch.randn(3, 1, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    right = alibi(q, k, v, slopes)[:, rank : rank + 1]
    # this rank's head
    q, k, v = (part[:, rank : rank + 1] for part in (q, k, v))  # [1, 1, s, d] each
    error = (alibi(q, k, v, slopes[:1]) - right).abs().max()
    return {"slope": slopes[rank].item(), "slope used": slopes[0].item(),
            "largest error": f"{error:.4f}"}  # fmt: skip


viz.table([{"rank": rank} | seen for rank, seen in enumerate(launch(wrong_slopes, 4))])

# %% [markdown]
# So if you split the heads across ranks, you also have to split everything else that belongs to a head, such as its slope.

# %%
symptoms(6)

# %% [markdown]
# ## Write with a cache (optional)
#
# When a model generates text, each step computes queries, keys, and values only for the *new* tokens. The older keys and values come from the cache. Each rank caches the keys and values of its own heads.
#
# **Predict.** Llama 3 70B has 80 layers, 64 query heads, 8 key and value heads, and $d = 128$. With 2 bytes per element, how many GiB does the cache of an 8,192-token text take up on each rank, for $p = 1$, 8, and 16?

# %% predict="6.k"
predict("6.k", p1=2.5, p8=0.3125, p16=0.3125)

# %% [markdown]
# With 16 ranks, each rank's cache is no smaller than with 8, because every key head has copies on two ranks. The function below computes queries, keys, and values with **rotary position embeddings** (Su et al. 2021). Each query and each key is divided into pairs of elements, and each pair is rotated by an angle that depends on the token's position. Each rank rotates the queries and keys of its own heads.

# %% tags=["setup"]
from tplab.tensor import rotary_angles, rotate


def qkv_at(attention, x, start):
    # x [b, s, h] -> this rank's q [b, n, s, d], k and v [b, m, s, d]
    q, k, v = attention.qkv(x)
    # x contains the tokens from `start` on
    positions = torch.arange(start, start + x.shape[1], device=x.device)
    angles = rotary_angles(positions, attention.head_dim, attention.rotary_base)
    return rotate(q, angles), rotate(k, angles), v


# %% [markdown] task="6.6" title="KV cache (optional)" difficulty=3 minutes=15
# Write the cache and one step of causal attention that uses it. Here, `attention` is the course's own attention module. Its output layer is `attention.out`. On each rank, the module has $n$ query heads, $m$ key heads, and $m$ value heads (`attention.kv_heads` is $m$), and each head has $d$ elements (`attention.head_dim`).
#
# - `KVCache(attention, batch_size, max_length)` creates `keys` and `values`, `[b, m, max_length, d]`, with the device and dtype of `attention.out.weight`, and sets `length` to 0.
#
# - `append(keys, values)` writes the keys and values of new tokens into the cache, after those of the earlier tokens. It returns views of all the keys and all the values that are now in the cache. If there isn't enough room, it raises a `ValueError` and writes nothing.
#
# - `attend_next(attention, x, cache)` computes the output for the next tokens `x` of a text whose earlier tokens are in the cache. It may use `qkv_at` and your functions from exercise 6.3. With $n$ query heads, the first $n/m$ of them share key head 0, the next $n/m$ share key head 1, and so on.
#
# All of this runs under `torch.no_grad()`.


# %% exercise="6.6"
class KVCache:
    """Room for the keys and values of `max_length` tokens, for this rank's heads.

    The first `length` tokens are cached.

    keys, values: [b, m, max_length, d]
    """

    def __init__(self, attention, batch_size, max_length):
        ### BEGIN SOLUTION
        weight = attention.out.weight
        shape = (batch_size, attention.kv_heads, max_length, attention.head_dim)
        self.keys = torch.zeros(shape, device=weight.device, dtype=weight.dtype)
        self.values = torch.zeros_like(self.keys)
        self.length = 0
        ### END SOLUTION

    def append(self, keys, values):
        """Write the keys and values [b, m, s, d] of s new tokens.

        Return all (keys, values) so far, [b, m, length, d] each.
        """
        ### BEGIN SOLUTION
        stop = self.length + keys.shape[2]
        if stop > self.keys.shape[2]:
            raise ValueError(
                f"{self.length} tokens are cached, "
                f"and {keys.shape[2]} more need room for {stop}"
            )
        self.keys[:, :, self.length : stop] = keys
        self.values[:, :, self.length : stop] = values
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]
        ### END SOLUTION


def attend_next(attention, x, cache):
    """Return the output [b, s, h] for x [b, s, h], the next s tokens of the text."""
    ### BEGIN SOLUTION
    q, k, v = qkv_at(attention, x, cache.length)  # [b, n, s, d], and [b, m, s, d] twice
    k, v = cache.append(k, v)  # [b, m, t, d] each: the cached tokens and the new ones
    # [b, n, t, d] each
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    mask = attention_mask(q.shape[2], k.shape[2], causal=True, device=x.device)
    y = attention_weights(q, k, mask) @ v  # [b, n, s, d]
    return attention.out(merge_heads(y))  # [b, s, h]
    ### END SOLUTION


# %% [markdown] hints="6.6"
# 1. The new tokens have the positions `length` to `length + s - 1`. To get the position of the first new token, do you have to read `cache.length` before or after you append? Each key head serves several query heads. Which query heads belong to the first key head?
# 2. In `append`, compute `stop = self.length + keys.shape[2]`, check that it isn't larger than `max_length`, write into slices, and return slices up to `stop`. In `attend_next`, get `q`, `k`, and `v` from `qkv_at`, and append `k` and `v` to the cache. Repeat every key and value head for its queries, build a causal mask, and finish with `merge_heads` and `attention.out`.
# 3. In `append`, write the new keys with `self.keys[:, :, self.length : stop] = keys`. In `attend_next`, call `qkv_at(attention, x, cache.length)` before you append. Repeat the heads with `part.repeat_interleave(q.shape[1] // k.shape[1], dim=1)`, and use `attention_mask(q.shape[2], k.shape[2], causal=True, device=x.device)`.

# %% check="6.6"
check("6.6", KVCache, attend_next)


# %%
@torch.no_grad()
def read_in_pieces():
    import tplab.tensor

    torch.manual_seed(0)
    attention = tplab.tensor.ParallelAttention(
        HIDDEN, 8, 2, causal=True, rotary_base=10_000.0, **options()
    )
    x = torch.randn(1, 64, HIDDEN, **options())
    dist.broadcast(x, 0)
    cache = KVCache(attention, 1, 64)
    pieces = x.split([40, *[1] * 24], dim=1)
    outs = [attend_next(attention, piece, cache) for piece in pieces]
    difference = (torch.cat(outs, 1) - attention(x)).abs().max()
    return {
        "largest difference": f"{difference:.0e}",
        "cached heads": cache.keys.shape[1],
        "KiB": 2 * cache.keys.nbytes // 1024,
    }


rows = [{"p": p} | launch(read_in_pieces, p)[0] for p in (1, 2, 4)]
viz.table(rows, title="40 tokens at once, and then 24 one by one")

# %% [markdown]
# ## In the wild
#
# <details><summary>Going deeper: Megatron-Core, PyTorch, vLLM, and the same bugs elsewhere</summary>
#
# - **Megatron-Core** implements attention in `megatron/core/transformer/attention.py`. `SelfAttention` has a fused column-parallel layer `linear_qkv` and a row-parallel layer `linear_proj`, and `CrossAttention` has `linear_q` and `linear_kv`. Megatron-Core orders the rows of the fused weight by group, where a group consists of several query heads, one key head, and one value head. With this order, an ordinary split by rows is correct, and there's no need for a stride.
#
# - **A split that ignores the three blocks of the fused weight** is easy to overlook. It changes the order of the rows, which doesn't hurt a model that you train from scratch. But if you load its checkpoint on a different number of ranks, the rows are in the wrong order. In 2022, a Colossal-AI user reported such a split (issue 817) and was asked for an example of what would go wrong.
#
# - **Splitting a head** is possible, but it needs more communication. Until May 2026, vLLM's backend for TPUs split the two key heads of a model across eight ranks. Then its developers gave each rank a copy of a complete head instead, and the time per step went down from 3.1 ms to 1.6 ms (tpu-inference pull request 2661).
#
# - **Copies whose gradients aren't summed** still turn up in real libraries. In DeepSeek's multi-head latent attention, all heads share the part of the key that encodes positions, so each rank has its own copy of this part. In Megatron-LM, each copy only got the gradient from its own rank's heads (pull request 6839, open since August 2026). The proposed fix adds the missing f.
#
# - **PyTorch** can do without the fused weight. By default, DTensor all-reduces the contributions of the three projections to $dx$ one by one. But if you prepare the input of the attention module with `PrepareModuleInput`, DTensor first adds up the three contributions on each rank and then all-reduces only their sum. The next cell counts the all-reduces with and without this preparation.
#
# </details>


# %%
class FourLinears(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(32, 32, device=device()) for _ in range(4)]
        self.q, self.k, self.v, self.out = layers

    def forward(self, x):
        q, k, v = (split_heads(layer(x), 4) for layer in (self.q, self.k, self.v))
        return self.out(merge_heads(attend(q, k, v)))


def with_dtensor(prepared):
    from torch.distributed.tensor import Replicate, init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    plan = {name: ColwiseParallel() for name in "qkv"} | {"out": RowwiseParallel()}
    if prepared:
        plan[""] = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
        )
    attention = parallelize_module(FourLinears(), mesh, plan)
    x = torch.randn(2, 5, 32, device=device(), requires_grad=True)
    with record() as section:
        attention(x).sum().backward()
    return section.totals()["all_reduce"].calls


{
    f"DTensor, input prepared: {prepared}": launch(with_dtensor, 2, args=(prepared,))[0]
    for prepared in (False, True)
}

# %% [markdown]
# ## Your library so far
#
# Your library now contains a transformer block. The table below ends with a command that trains this block on two processes, without the notebook.

# %%
from tplab.course import library

library(6)

# %% [markdown]
# The input of your block is a vector for each token, but where do these vectors come from? They come from a table with one row per token of the vocabulary. In the smallest GPT-2, this table has 50,257 rows of 768 elements. That's 38.6 million parameters, more than five of the model's blocks put together. With what you've built so far, every rank would have to store all of them. How do you split a table?
