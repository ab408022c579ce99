# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 07 · The vocabulary-parallel embedding
#
# In many language models, the two largest matrices aren't in any of the transformer blocks. One of them turns tokens into vectors at the very beginning, and the other one turns vectors into scores at the very end. How do you split these two matrices so that *both* ends of the model need little communication? One obvious split is perfect at one end and a disaster at the other. And the split that everybody uses hides errors that would crash a single process.
#
# By the end of this chapter, your library will contain an embedding and an output layer. You need chapters 03 and 04. About 75 minutes.

# %% tags=["setup"]
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tplab import device, launch, memory, record, viz
from tplab.course import check, predict, show_failure, symptoms
from tplab.tensor import (
    copy_to_region,
    gather_from_region,
    record_token,
    reduce_from_region,
    scatter_to_region,
)

# %% [markdown]
# Suppose you train Llama 3 405B with Adam, and every GPU stores both matrices in full. Then the weights, gradients, and optimizer states of these two matrices alone would fill most of an 80 GB GPU:


# %%
def bytes_per_gpu(p):  # in training, with Adam in float32
    llama = memory.PRESETS["Llama 3 405B"]
    elements = 2 * llama.vocab_size * llama.hidden_size / p
    return {
        "weights": 4 * elements,
        "gradients": 4 * elements,
        "optimizer state": 8 * elements,
    }


bills = {"not split": bytes_per_gpu(1)}
bills |= {f"split over {p} ranks": bytes_per_gpu(p) for p in (2, 4, 8)}
viz.bill(bills, title="the two tables of Llama 3 405B, on each GPU")

# %% [markdown]
# ## A look-up is a matmul
#
# A model's vocabulary has $v$ tokens, and each token has an **ID** from 0 to $v - 1$. The first matrix $E$ is a table with one row of $h$ elements per token. To get the vector of token 7, you copy row 7.
#
# You get the same row if you multiply the table by a **one-hot** vector, which has a 1 at position 7 and zeros everywhere else. So looking up a whole text is a matmul, and you already know two ways to split one. Let's split a tiny table with ten words by rows. To make the rows easy to recognize, row 7 contains `7.1` and `7.2`, and so on.

# %%
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "it", "."]
TABLE = torch.arange(10)[:, None] + torch.tensor([0.1, 0.2])  # [v, h] = [10, 2]


def one_hot_lookup(ids):
    rank, rows = dist.get_rank(), len(TABLE) // dist.get_world_size()
    mine = slice(rank * rows, (rank + 1) * rows)
    one_hot = F.one_hot(torch.tensor(ids), len(TABLE)).float()  # [s, v]
    one_hot = one_hot[:, mine].to(device())  # [s, v/p]
    term = one_hot @ TABLE[mine].to(device())  # [s, h]
    return {"start": mine.start, "table": TABLE[mine], "foreign": one_hot.sum(1) == 0,
            "vectors": term, "out": reduce_from_region(term)}  # fmt: skip


sentence = ["the", "cat", "saw", "it"]
ids = [WORDS.index(word) for word in sentence]
results = list(launch(one_hot_lookup, 2, args=(ids,)))
viz.lookup(ids, results, vocab_size=10, tokens=sentence)

# %% [markdown]
# Each rank computes one term of a sum, and g adds up the terms. For each token, only the rank that holds the token's row contributes a vector, and the other rank contributes zeros.
#
# ## The other end
#
# At the end of a model, there's a vector $y$ for each position in the text, and the model predicts which token comes next. To do so, it computes a score for every token of the vocabulary. This score is called a **logit**, and it's the dot product of $y$ with a vector that belongs to the token. One vector per token? That's what our table contains! Many models, such as GPT-2, use the same table at both ends (Press and Wolf 2017), so all their logits are $Y E^\top$. In that case, the embedding and the output layer are called **tied**.

# %% [markdown] task="7.1" title="One table, two jobs" difficulty=3 minutes=14
# Split the table so that the embedding and the output layer together send as few bytes as possible. The vocabulary is much larger than the hidden size, $v \gg h$.
#
# - `table_split` returns "rows" or "columns".
#
# - `look_up` receives the one-hot vectors of all tokens and this rank's shard of $E$. Every rank returns the vectors $X$ of all tokens.
#
# - `scores` receives the vectors $Y$, which are the same on every rank, and this rank's shard of $E$. Return either all the logits or only those of this rank's own tokens, whichever takes fewer bytes.
#
# You may call the four operators from chapter 03, but no more often than necessary. In the backward pass, every rank needs the full gradient of $Y$ and the gradient of its own shard. The one-hot vectors don't need a gradient. The check counts the messages of each function.


# %% exercise="7.1"
def table_split() -> str:
    """Return how E [v, h] is split, as "rows" or "columns"."""
    ### BEGIN SOLUTION
    return "rows"
    ### END SOLUTION


def look_up(one_hot, e):
    """Return X [b, s, h], on every rank.

    one_hot [b, s, v]: the same on every rank
    e: this rank's shard of E
    """
    ### BEGIN SOLUTION
    mine = scatter_to_region(one_hot)  # [b, s, v/p]
    return reduce_from_region(mine @ e)  # [b, s, h]
    ### END SOLUTION


def scores(y, e):
    """Return all logits [b, s, v], or this rank's logits [b, s, v/p].

    y [b, s, h]: the same on every rank
    e: this rank's shard of E
    """
    ### BEGIN SOLUTION
    y = copy_to_region(y)  # [b, s, h]; backward: all-reduce of dy
    return y @ e.T  # [b, s, v/p]
    ### END SOLUTION


# %% [markdown] hints="7.1"
# 1. There are only two ways to split the table, so work out both on paper. If you split `E` by rows, what's the shape of a rank's shard of `Eᵀ`, and is the second matmul column-parallel or row-parallel? What changes if you split `E` by columns? Then compare the largest tensors that the ranks have to sum or gather. Remember that `v` is much larger than `h`.
# 2. With one of the splits, every rank gets a term of *all* the logits, so the ranks would have to all-reduce a tensor of shape `[b, s, v]`. With the other split, every rank gets complete logits for some of the tokens and doesn't have to send anything in the forward pass. Which operator does this second matmul need for the backward pass, where each rank only computes its own contribution to `dY`?
# 3. Split by rows. In `look_up`, multiply `scatter_to_region(one_hot)` by `e`, and add up the terms with `reduce_from_region`. In `scores`, return `copy_to_region(y) @ e.T`.

# %% check="7.1"
check("7.1", table_split, look_up, scores)

# %% [markdown]
# The rows of $E$ are the columns of $E^\top$. So with a single split by rows, the look-up is row-parallel and the output layer is column-parallel:
#
# $$X = \sum_r \mathrm{onehot}_r\, E_r \qquad\qquad Y E^\top = [\,Y E_0^\top,\; Y E_1^\top\,]$$
#
# For the look-up alone, a split by columns would have been *better*, because an all-gather of the vectors sends only half as much as an all-reduce. But for the output layer, a split by columns is a disaster. Every rank gets only one term of every logit, so the ranks have to sum all the logits.
#
# **Predict.** Suppose $v = 10h$. In both passes together, how many elements do the messages of the embedding and the output layer contain, as a multiple of $b \cdot s \cdot h$? Write one number for a split by rows and one for a split by columns. (With a split by columns, slicing $Y$ is free in the forward pass, but the ranks have to gather the gradient of $Y$ in the backward pass.)

# %% predict="7.a"
predict("7.a", rows=2, columns=12)


# %%
def both_ends(split, b=2, s=16, h=32, v=320):
    p = dist.get_world_size()
    shape = (v // p, h) if split == "rows" else (v, h // p)
    e = torch.randn(shape, device=device(), requires_grad=True)
    one_hot = F.one_hot(torch.arange(b * s, device=device()).reshape(b, s), v).float()
    with record() as section:
        if split == "rows":
            x = reduce_from_region(scatter_to_region(one_hot) @ e)  # [b, s, h]
            logits = copy_to_region(x) @ e.T  # [b, s, v/p]
        else:
            x = gather_from_region(one_hot @ e)  # [b, s, h]
            logits = reduce_from_region(scatter_to_region(x) @ e.T)  # [b, s, v]
        logits.sum().backward()
    size = sum(total.bytes for total in section.totals().values())
    return {
        "split by": split,
        "messages, in b·s·h elements": size / (4 * b * s * h),
        "logits on a rank": list(logits.shape),
    }


viz.table([launch(both_ends, 2, args=(split,))[0] for split in ("rows", "columns")])

# %% [markdown]
# ## No one-hot vectors, please
#
# **Predict.** The smallest GPT-2 has a vocabulary of 50,257 tokens and a hidden size of 768. For a text of 1,024 tokens in float32, how many megabytes do the one-hot vectors take up, and how many do the vectors from the table take up? (A megabyte is a million bytes. Round to whole numbers.)

# %% predict="7.b"
predict("7.b", one_hot_MB=206, vectors_MB=3)

# %% [markdown]
# Multiplying the table by a one-hot vector just copies a single row, so let's copy that row directly. Suppose that a rank holds rows `start` to `stop - 1` of the table. An ID in this range corresponds to row `ID - start` of the rank's shard. All other IDs are **foreign** to this rank, because their rows are on another rank. PyTorch's `F.embedding` raises an error if a row doesn't exist, so for a foreign ID, the rank first looks up *some* row that does exist. Then it replaces the vector for the foreign ID with zeros.
#
# **Predict.** Rank 1 holds rows 5 to 9 of our little table. It has to look up the IDs 5 and 2, and for a foreign ID, it uses row 0 of its shard. Which two rows of *its own shard* does rank 1 look up? What does it contribute to the first element of each vector? (Remember that row 7 of the full table contains `7.1` and `7.2`.)

# %% predict="7.c"
predict("7.c", rows=(0, 0), first_elements=(5.1, 0.0))

# %% [markdown] task="7.2" title="The masked look-up" difficulty=3 minutes=12
# Write the look-up without one-hot vectors. Your function should work for IDs of any shape, and it must not change `ids`.
#
# Some models pad short texts with a meaningless token, whose vector must not get a gradient. If this token's row is in this rank's shard, `padding_row` is the row's index within the shard. You can simply pass `padding_row` on to PyTorch with `F.embedding(rows, weight, padding_row)`.


# %% exercise="7.2"
def parallel_lookup(ids, weight, start, stop, *, padding_row=None, group=None):
    """Return the vectors [.., h] of the ids, on every rank.

    ids [..]: the same on every rank of `group`
    weight [stop - start, h]: this rank's rows start to stop - 1 of the table
    """
    ### BEGIN SOLUTION
    foreign = (ids < start) | (ids >= stop)  # [..]
    # for a foreign id, any row will do
    rows = (ids - start).masked_fill(foreign, 0)  # [..]
    vectors = F.embedding(rows, weight, padding_row)  # [.., h]
    # this rank's term of the sum
    vectors = vectors.masked_fill(foreign.unsqueeze(-1), 0)  # [.., h]
    return reduce_from_region(vectors, group)  # [.., h]
    ### END SOLUTION


# %% [markdown] hints="7.2"
# 1. Suppose a rank holds rows 3, 4, and 5, so `start = 3` and `stop = 6`. Which of the IDs 2, 3, 5, and 6 are foreign? First write a condition that tells you whether a single ID is foreign. Then decide which row to look up for each of the four IDs. Do you have to replace the vectors of foreign IDs with zeros before or after the sum over the ranks?
# 2. `foreign = (ids < start) | (ids >= stop)` has the same shape as `ids`. `x.masked_fill(mask, 0)` returns a copy of `x` with zeros wherever the mask is true. You need `masked_fill` twice, for the row numbers before the look-up and for the vectors after it. What shape does the mask need when you apply it to the vectors?
# 3. Compute `rows = (ids - start).masked_fill(foreign, 0)`, then `vectors = F.embedding(rows, weight, padding_row)`, then `vectors = vectors.masked_fill(foreign.unsqueeze(-1), 0)`, and return `reduce_from_region(vectors, group)`.

# %% check="7.2"
check("7.2", parallel_lookup)

# %% [markdown]
# The backward pass of the look-up doesn't need any messages. Every rank already has the full gradient of $X$, so it can compute the gradient of its shard on its own. The gradient of a row is the sum of the gradients of all the vectors that were copied from it. But doesn't row 0 of the shard also get a gradient for every foreign ID? A reviewer of DeepSeek-V3's inference code suspected that it does (pull request 834). It doesn't, because the second `masked_fill` replaces the vectors of foreign IDs with zeros, so no gradient flows back through them.
#
# ## A vocabulary that can't be divided
#
# GPT-2's vocabulary has 50,257 tokens, which is an odd number. But a gather of the logits needs shards of equal size. So we append rows that don't belong to any token, until every rank has the same number of rows. These additional rows are called **padding**. We also want each rank to have a multiple of 128 rows, because GPUs handle matmuls of such sizes efficiently (Shoeybi et al. 2019).


# %% tags=["setup"]
def pad_vocab_size(vocab_size, world_size, multiple=128):
    step = multiple * world_size
    return math.ceil(vocab_size / step) * step


def vocab_range(vocab_size, rank, world_size, multiple=128):
    rows = pad_vocab_size(vocab_size, world_size, multiple) // world_size
    return rank * rows, (rank + 1) * rows  # start and stop


# %% [markdown]
# **Predict.** GPT-2's table is split across four ranks. How many rows does the padded table have, how many rows does each rank hold, and how many rows don't belong to any token?

# %% predict="7.d"
predict("7.d", padded_size=50688, rows_per_rank=12672, unused_rows=431)

# %%
rows = []
for name, size in {"GPT-2": 50257, "Llama 3": 128256, "single bytes": 256}.items():
    padded = pad_vocab_size(size, 8)
    row = {"vocabulary": name, "tokens": size, "rows on 8 ranks": padded}
    row |= {"rows per rank": padded // 8, "padding": f"{padded / size - 1:.1%}"}
    rows.append(row)
viz.table(rows)

# %% [markdown]
# For real vocabularies, the padding is negligible. But with a vocabulary of 256 bytes, six of the eight ranks would hold nothing but padding, so you'd choose a smaller `multiple`.
#
# ## Fix it
#
# In December 2025, a user of Megatron-LM ran one of its examples on a single GPU, and the example crashed. On two GPUs, the same example ran just fine (NVIDIA/Megatron-LM issue 2459, still open in fall 2026, and issue 1038 from August 2024). The example's data contains IDs up to 4,095, even though its model has a vocabulary of only 100 tokens. On a single GPU, Megatron-LM doesn't mask any IDs, so the look-up fails. On several GPUs, every rank masks the IDs that are foreign to it, and a wrong ID is foreign to all of them. The libraries vLLM and SGLang work the same way.
#
# **Predict.** What happens if you look up the ID 12 in our vocabulary of ten words, first with `F.embedding` in a single process and then with your `parallel_lookup` on two ranks? (Write "IndexError", "zeros", or "a row".)

# %% predict="7.e"
predict("7.e", single_process="IndexError", two_ranks="zeros")


# %%
def look_up_one(number):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    start, stop = vocab_range(len(TABLE), rank, world_size, multiple=1)
    # two rows of padding at the end
    weight = F.pad(TABLE, (0, 0, 0, 2))[start:stop].to(device()).requires_grad_()
    out = parallel_lookup(torch.tensor([number], device=device()), weight, start, stop)
    out.sum().backward()
    vector = [round(value, 1) for value in out[0].tolist()]
    return {"vector": vector, "learns": bool(weight.grad.any())}


def single_process(number):
    try:
        vector = F.embedding(torch.tensor([number]), TABLE)[0]
        return [round(value, 1) for value in vector.tolist()]
    except IndexError:
        return "IndexError"


rows = []
for number in (7, 12, -3, 10):
    row = {"id": number, "single process": single_process(number)}
    for p in (2, 4):
        seen = launch(look_up_one, p, args=(number,))
        row[f"p = {p}"] = seen[0]["vector"]
        row[f"rows that learn, p = {p}"] = sum(part["learns"] for part in seen)
    rows.append(row)
viz.table(rows)

# %% [markdown]
# You get zeros without any warning, and the training run goes on. A rank that doesn't have the row of an ID assumes that another rank has it. The ID 10 is even worse. On four ranks, our table of ten words is padded to twelve rows, so the ID 10 hits a padding row, and the model trains that row. You won't notice anything until you load a checkpoint, which stores only the ten real rows.
#
# The Megatron-LM user asked for the obvious fix, which is to apply the same mask on a single GPU. But then you wouldn't even get an error on a single GPU anymore! SGLang's developers chose a better fix. One of their tests drew the ID 32,000 in about 1% of its runs, even though the largest ID in a vocabulary of 32,000 tokens is 31,999. They fixed the test and added a check that raises an error for such IDs (pull request 27482, June 2026).

# %% tags=["setup"]
from tplab.tensor import Block, Sharding, init_parameter

# %% [markdown] task="7.3" title="Fix the ID that no rank has" difficulty=3 minutes=12
# The module below is complete, except that it doesn't check the IDs. Fix `forward`. For any ID outside the vocabulary, `forward` should raise an `IndexError` whose message names the ID and its position in `ids`, as in `ID 12 at [0, 3]`. A position has one number per dimension of `ids`. If several IDs are wrong, naming one of them is enough.
#
# You decide which ranks look for wrong IDs and when they raise the error, but no rank may wait forever for one that has raised an error. An empty tensor of IDs is valid. (The argument `padding_idx` has nothing to do with padding rows. It names a real token, which has an ID and a row.)


# %% exercise="7.3"
class VocabParallelEmbedding(nn.Module):
    """nn.Embedding whose rows are split over the ranks of `group`.

    ids [..], the same on every rank -> vectors [.., h], on every rank

    `weight` contains this rank's rows of the padded table, start to stop - 1. The ids 0
    to num_embeddings - 1 are valid.
    """

    def __init__(
        self,
        num_embeddings,
        embedding_dim,
        padding_idx=None,
        *,
        multiple=128,
        group=None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.num_embeddings, self.padding_idx = num_embeddings, padding_idx
        self.group = group
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        self.start, self.stop = vocab_range(num_embeddings, rank, world_size, multiple)
        rows = self.stop - self.start
        weight = torch.empty(rows, embedding_dim, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight)
        block = Block(num_embeddings, multiple, padded=True)
        self.weight.tensor_parallel = Sharding(0, blocks=(block,))
        init_parameter(self.weight, nn.init.normal_, group)  # padding starts as zeros
        if self.padding_row() is not None:
            with torch.no_grad():
                self.weight[self.padding_row()] = 0

    def padding_row(self):
        """The row of padding_idx in this rank's shard, or None."""
        if self.padding_idx is None or not self.start <= self.padding_idx < self.stop:
            return None
        return self.padding_idx - self.start

    def forward(self, ids):
        row = self.padding_row()
        ### BEGIN SOLUTION
        wrong = (ids < 0) | (ids >= self.num_embeddings)  # [..], the same on every rank
        if wrong.any():
            place = wrong.nonzero()[0].tolist()
            number = ids[tuple(place)].item()
            last = self.num_embeddings - 1
            raise IndexError(f"ID {number} at {place} isn't one of the IDs 0 to {last}")
        return parallel_lookup(
            ids, self.weight, self.start, self.stop, padding_row=row, group=self.group
        )  # [.., h]
        ### BROKEN
        # return parallel_lookup(
        #     ids, self.weight, self.start, self.stop, padding_row=row, group=self.group
        # )
        ### END SOLUTION


# %% [markdown] hints="7.3"
# 1. Which IDs should be valid: those with a row on this rank, those with a row in the padded table, or those of the vocabulary? Which IDs does each rank know before anything is sent? If only some of the ranks raise an error, which collective do the other ranks get stuck in?
# 2. Every rank has the same IDs, so every rank can check all of them before the look-up. `wrong = (ids < 0) | (ids >= self.num_embeddings)` is `True` for every invalid ID. `wrong.nonzero()` returns a tensor with one row per invalid ID, and each row contains the position of this ID.
# 3. If `wrong.any()`, let `place = wrong.nonzero()[0].tolist()`, and raise `IndexError(f"ID {ids[tuple(place)].item()} at {place} isn't in the vocabulary")`. Otherwise, return the result of the look-up as before.

# %% check="7.3"
check("7.3", VocabParallelEmbedding)


# %%
def with_a_wrong_id():
    table = VocabParallelEmbedding(10, 2, multiple=1, device=device())
    return table(torch.tensor([[0, 5, 9, 12], [1, 2, 3, 4]], device=device()))


with show_failure():
    launch(with_a_wrong_id, 2)

# %% [markdown]
# <details><summary>Going deeper: how to check IDs on a GPU without waiting for it</summary>
#
# The statement `if wrong.any()` needs the answer on the CPU. If the IDs are on a GPU, the CPU has to stop and wait for this answer in every step instead of running ahead and launching the next operations. The course's own `tplab.tensor.VocabParallelEmbedding` avoids this delay with `torch._assert_async(~wrong.any(), message)`. The GPU itself checks the answer when it gets there. If there's a wrong ID, it stops the process, as PyTorch's own `nn.Embedding` does on a GPU. The price is that the message can't name the ID.
#
# </details>
#
# ## The token that doesn't exist
#
# Padding rows have another trap in store for you, because all their elements are zeros.
#
# **Predict.** A vocabulary has three tokens, whose logits are -1.2, -0.3, and -2.0. The fourth row of the table is padding. What's the logit of this row? Which token does the model choose if it always chooses the token with the largest logit? (Count from 0.)

# %% predict="7.f"
predict("7.f", padding_logit=0, chosen=3)

# %% [markdown]
# Your model would generate a token that doesn't exist. Tenstorrent's sampling code had this bug until June 2026. In their fix, the developers warned that zero-padded weights of the output layer "are not a sampling mask" (tenstorrent/tt-metal pull request 47021). The same goes for the loss, because a logit of 0 gets a share of every softmax.

# %% [markdown] task="7.4" title="Logits, and the token that doesn't exist" difficulty=2 minutes=10
# Write the output layer for the same table.
#
# - Without `gather`, each rank returns the logits of the rows in its own shard. With `gather`, every rank returns the logits of all the tokens, without padding.
#
# - `vocab_size` is the number of tokens. If it's `None`, there's no padding. Otherwise, the logits of padding rows should be $-\infty$, with and without `gather`, so that they never affect a softmax or a maximum.


# %% exercise="7.4"
def parallel_logits(x, weight, *, gather=False, vocab_size=None, group=None):
    """Return this rank's logits [.., v/p], with -inf for padding.

    x [.., h]: the same on every rank of `group`
    weight [v/p, h]: this rank's rows of the table

    With `gather`, return all logits on every rank, without padding: [.., vocab_size].
    """
    ### BEGIN SOLUTION
    logits = F.linear(copy_to_region(x, group), weight)  # [.., v/p]
    if vocab_size is not None:
        # from this column on, it's padding
        own = vocab_size - dist.get_rank(group) * len(weight)
        padding = torch.arange(len(weight), device=x.device) >= own  # [v/p]
        logits = logits.masked_fill(padding, -torch.inf)
    if gather:
        logits = gather_from_region(logits, group)[..., :vocab_size]  # [.., vocab_size]
    return logits
    ### END SOLUTION


# %% [markdown] hints="7.4"
# 1. Which layer from chapter 04 computes its output the same way, and which operator comes before its matmul? For the padding, suppose that four ranks hold three rows each, and that `vocab_size` is 10. Which columns of which rank's logits are padding? Does your rule also work if a rank has *only* padding?
# 2. Use `F.linear(copy_to_region(x, group), weight)`. Column `i` of rank `r` belongs to token `r * len(weight) + i`. Compare these numbers with `vocab_size`, and fill the logits of padding with `masked_fill(padding, -torch.inf)`. Do this before you gather.
# 3. Let `tokens = dist.get_rank(group) * len(weight) + torch.arange(len(weight), device=x.device)` and `logits = logits.masked_fill(tokens >= vocab_size, -torch.inf)`, unless `vocab_size` is `None`. With `gather`, return `gather_from_region(logits, group)[..., :vocab_size]`.

# %% check="7.4"
check("7.4", parallel_logits)

# %% [markdown]
# The picture below follows a single token from the embedding to the output layer, with numbers from real ranks. Press Play, and watch for the moment when rank 0 looks up a row that belongs to a different token. In the last step, the gradient of a row has two contributions. Where do they come from?


# %% tags=["explore"]
def record_a_token(p, token):
    return viz.token_way(record_token(WORDS, "the cat saw it .", token, p))


viz.play(
    record_a_token,
    p=(2, 4),
    token=("the", "cat", "saw", "it"),
    start={"token": "saw"},
    seconds=3,
)

# %% [markdown]
# ## Tie both ends and train
#
# Now let's train a model whose embedding and output layer share one table. The model reads eight words of Python's standard library and predicts the next word. Its vocabulary consists of the 1,008 most frequent words and symbols, plus a token for everything else. That makes 1,009, which is a prime number.

# %%
import re
from collections import Counter
from functools import partial

from tplab.common import corpus
from tplab.tensor import full_state_dict, load_full_state_dict

VOCAB, CONTEXT, HIDDEN, BATCH, STEPS = 1009, 8, 32, 64, 150
source = corpus.python_sources(300_000).decode(errors="replace")
text = re.findall(r"\w+|[^\w\s]|\s+", source)
frequent = Counter(text).most_common(VOCAB - 1)
numbers = {word: 1 + i for i, (word, _) in enumerate(frequent)}
# frequent words have low ids
tokens = torch.tensor([numbers.get(word, 0) for word in text])


def options():
    return {"device": device(), "dtype": torch.float64}


class TiedModel(nn.Module):
    def __init__(self, embedding, output):
        super().__init__()
        self.embedding, self.output = embedding, output
        first = nn.Linear(CONTEXT * HIDDEN, HIDDEN, **options())
        second = nn.Linear(HIDDEN, HIDDEN, **options())
        self.body = nn.Sequential(nn.Flatten(1), first, nn.GELU(), second)

    def forward(self, ids):  # [b, s]
        x = self.embedding(ids)  # [b, s, h]
        # the same parameter, used a second time
        return self.output(self.body(x), self.embedding.weight)  # [b, v]


def batches(steps, seed):
    generator = torch.Generator().manual_seed(seed)  # the same batches on every rank
    for _ in range(steps):
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH, 1), generator=generator)
        window = tokens[starts + torch.arange(CONTEXT + 1)].to(device())  # [b, s + 1]
        yield window[:, :-1], window[:, -1]


def train(model):
    torch.set_num_threads(1)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=3e-3), []
    for ids, targets in batches(STEPS, seed=1):
        loss = F.cross_entropy(model(ids), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


torch.manual_seed(0)
plain = TiedModel(nn.Embedding(VOCAB, HIDDEN, **options()), F.linear)
# otherwise, the first logits would be far too large
plain.embedding.weight.data.mul_(0.1)
start = {name: value.cpu().clone() for name, value in plain.state_dict().items()}
plain_losses = train(plain)

# %% [markdown]
# **Predict.** How many all-reduces does each training step of your model need? How many all-reduces would you save if the embedding and the output layer had separate tables?

# %% predict="7.g"
predict("7.g", all_reduces=2, saved=0)


# %%
def on_ranks(output):
    model = TiedModel(VocabParallelEmbedding(VOCAB, HIDDEN, **options()), output)
    load_full_state_dict(model, start)  # each rank takes its own rows
    with record() as section:
        losses = train(model)
    calls = {kind: total.calls / STEPS for kind, total in section.totals().items()}
    return {
        "losses": losses,
        "state": full_state_dict(model),
        "new text": loss_on_new_text(model),
        "calls": calls,
    }


@torch.no_grad()
def loss_on_new_text(model):
    ids, targets = next(batches(1, seed=2))
    return F.cross_entropy(model(ids), targets).item()


yours = partial(parallel_logits, gather=True, vocab_size=VOCAB)
runs = {p: launch(on_ranks, p, args=(yours,))[0] for p in (1, 2, 4)}
print("collectives per step:", runs[2]["calls"])
curves = {"plain PyTorch": plain_losses}
curves |= {f"your model, p = {p}": run["losses"] for p, run in runs.items()}
viz.curves(curves, title=f"{STEPS} steps with {VOCAB} tokens")

# %% [markdown]
# The four curves lie on top of each other, and the chart below them shows how little they differ. A tied table doesn't need any extra communication. The embedding and the output layer both contribute to the gradient of a row, but the rank that holds this row computes both contributions.
#
# ## Break it
#
# What if you forget the f before the output layer? We call everything between the embedding and the output layer the model's **body**. Without f, each rank's body only learns from the logits of that rank's half of the vocabulary.
#
# **Predict.** Without f, is the very first loss still correct? (Write `True` or `False`.) After 150 steps, how does the loss compare with the correct loss? (Write "higher", "equal", or "lower".)

# %% predict="7.h"
predict("7.h", first_loss_correct=True, last_loss="lower")


# %%
def without_f(x, weight):
    return gather_from_region(F.linear(x, weight))[..., :VOCAB]


def loss_of_checkpoint(state):
    model = TiedModel(nn.Embedding(VOCAB, HIDDEN, **options()), F.linear)
    model.load_state_dict(state)
    return loss_on_new_text(model)


def row(model, new_text, losses=(None, None)):
    def shown(loss):
        return f"{loss:.3f}" if loss else ""

    return {
        "model": model,
        "first loss": shown(losses[0]),
        "last loss": shown(losses[-1]),
        "loss on new text": shown(new_text),
    }


broken = launch(on_ranks, 2, args=(without_f,))
rows = [
    row("correct", loss_on_new_text(plain), plain_losses),
    row("without f, on two ranks", broken[0]["new text"], broken[0]["losses"]),
]
for rank, seen in enumerate(broken):
    rows.append(row(f"checkpoint of rank {rank}", loss_of_checkpoint(seen["state"])))
viz.table(rows)

# %% [markdown]
# The loss is *lower* than the correct loss, so the loss curve doesn't warn you. Each rank trains its own body using only the gradients from its own rows' logits, so after 150 steps, the two bodies are different. But a checkpoint contains only one of them. For the same text, the model on two ranks, the checkpoint of rank 0, and the checkpoint of rank 1 have three different losses, even though all three should be equal.
#
# Why is the checkpoint of rank 1 so much worse? Frequent words have low IDs, so their rows are all on rank 0, and the body of rank 1 never learned to predict these words. Apple's library for memory-efficient losses had the same bug, because it didn't sum the gradient of $Y$ across ranks (apple/ml-cross-entropy pull request 42, May 2025).

# %%
symptoms(7)

# %% [markdown]
# ## In the wild
#
# <details><summary>Going deeper: Megatron-Core, PyTorch, MaxText, vLLM</summary>
#
# - **Megatron-Core** has a class with the same name, `VocabParallelEmbedding`, in `megatron/core/tensor_parallel/layers.py`, and the option `--make-vocab-size-divisible-by` sets the multiple, which is 128 by default. In July 2024, a user quoted a version of this class that checked all IDs with an `assert` (issue 926). Release 0.19.2 doesn't check the IDs.
#
# - **Padding in the softmax.** In the same release of Megatron-Core, the loss function `vocab_parallel_cross_entropy` doesn't mask the logits of padding rows, so the softmax includes them. With GPT-2's vocabulary on eight ranks and logits near zero, the first loss is ln 51200 instead of ln 50257, which is 0.019 too high. And because the padding rows get gradients, they learn, too.
#
# - **A mask on a single GPU.** In August 2026, a contributor proposed that vLLM mask wrong IDs even on a single GPU (pull request 53977, still open in September). In vLLM, these wrong IDs are placeholders whose results are never used, so zeros do no harm. A mask is fine if the caller *knows* which errors it hides.
#
# - **MaxText**, a library for JAX, actually multiplies one-hot vectors by the table if you set its option `use_iota_embed`.
#
# - **PyTorch** splits an `nn.Embedding` by rows if you parallelize it with `RowwiseParallel`. DTensor keeps the mask in a special placement, called `_MaskPartial`. The next cell compares DTensor's look-up with yours.
#
# </details>


# %%
def with_dtensor(ids):
    from torch.distributed.tensor import Replicate, init_device_mesh
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    theirs = nn.Embedding(10, 2, device=device())
    mine = VocabParallelEmbedding(10, 2, multiple=1, device=device())
    theirs.load_state_dict({"weight": TABLE})
    load_full_state_dict(mine, {"weight": TABLE.to(device())})
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    style = RowwiseParallel(input_layouts=Replicate(), use_local_output=True)
    parallelize_module(theirs, mesh, style)
    ids = torch.tensor(ids, device=device())
    return {"same vectors": torch.equal(theirs(ids).detach(), mine(ids).detach())}


launch(with_dtensor, 2, args=([0, 4, 5, 9],))[0]

# %% [markdown]
# ## Your library so far
#
# Your library now contains the embedding and the output layer of a language model.

# %%
from tplab.course import library

library(7)

# %% [markdown]
# We cheated a little in this chapter by gathering all the logits to compute the loss. With GPT-2's vocabulary and 1,024 tokens, the ranks would gather 206 MB of logits in every single step, even though the loss is only one number per token. In the next chapter, you'll compute the same loss with messages of only 12 KB. How do you compute a softmax if each rank has only some of the logits?
