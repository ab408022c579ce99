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
# **The question.** A language model begins with a table that holds one vector for each token. How can `p` ranks hold a `p`-th of its rows each, and every rank still get every vector? And can the output layer, at the other end of the model, use the same rows?
#
# **What you will have built.** `VocabParallelEmbedding`, with a padded vocabulary and an error for every id that no rank has; the parallel output layer on the same rows; and a language model that **ties** the two, trained on one, two and four processes with the loss curve of one.
#
# Symbols: `b` batch, `s` sequence length, `h` hidden size, `v` size of the vocabulary, `p` number of ranks. **E** is the table, `[v, h]`. A **token** is a piece of text, a word or a part of one; its **id** is its row in the table, 0 to `v - 1`. About 90 minutes.
#
# You need the operators **f** (nothing forward, all-reduce backward), **g** (all-reduce forward, nothing backward), scatter and gather of chapter 03, and the two parallel layers of chapter 04.

# %% tags=["setup"]
import math
import re
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tplab import device, launch, memory, record, viz
from tplab.common import corpus
from tplab.course import check, predict, show_failure, symptoms
from tplab.tensor import (
    Block,
    Sharding,
    copy_to_region,
    embedding,
    full_state_dict,
    gather_from_region,
    init_parameter,
    load_full_state_dict,
    reduce_from_region,
    scatter_to_region,
)

# %% [markdown]
# Both ends of the model, with what each rank holds. At the entrance the ids pick rows, at the exit the same rows give the scores of the tokens, the **logits**.

# %%
viz.product(
    (6, 8),
    (8, 4),
    kind="row",
    p=2,
    names=("onehot", "E"),
    title="the look-up: E [v, h] cut by rows, and a sum",
)

# %%
viz.product(
    (6, 4),
    (4, 8),
    kind="column",
    p=2,
    names=("X", "Eᵀ"),
    title="the output layer: the same rows of E are the columns of Eᵀ",
)

# %% [markdown]
# ## 1 · A look-up is a product
#
# Row 7 of the table is what you get when you multiply a vector that is 1 at place 7 and 0 elsewhere, a **one-hot** vector, with the table. So the look-up of a whole batch is a matrix product:
#
# $$X = \mathrm{onehot}(\text{ids})\, E \qquad \mathrm{onehot}: [b, s, v],\quad E: [v, h],\quad X: [b, s, h]$$
#
# Nobody computes it like that. But it tells how to cut it, because chapter 02 has cut products in both ways. Cut `E` by rows, and the one-hot vectors by columns: each rank holds one term of a sum, and g adds up. The term of a rank is special here. A one-hot vector has a single 1; on the rank that holds
# that place the product is the row, on all others it is zeros. *To every vector exactly one rank contributes.*
#
# The next cell does this literally, one-hot vectors and all, on real ranks. Ten words, and a table in which you can see what is what: row 7 is `7.1 7.2`.

# %%
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "it", "."]
TABLE = torch.arange(10)[:, None] + torch.tensor([0.1, 0.2])  # [v, h] = [10, 2]


def one_hot_lookup(ids):
    """The look-up as a product: this rank's columns of the one-hot vectors times its rows of the table."""
    rank, p = dist.get_rank(), dist.get_world_size()
    rows = math.ceil(len(TABLE) / p)  # as many on every rank
    start = rank * rows
    padded = F.pad(TABLE, (0, 0, 0, p * rows - len(TABLE)))  # zeros below: [p·rows, h]
    table = padded[start : start + rows].to(device())  # [rows, h]
    one_hot = F.one_hot(torch.tensor(ids), p * rows).float()[:, start : start + rows].to(device())  # [s, rows]
    vectors = one_hot @ table  # [s, h], one term of the sum
    out = vectors.clone()
    dist.all_reduce(out)  # [s, h], the same on every rank
    return {"start": start, "table": table, "foreign": one_hot.sum(1) == 0, "vectors": vectors, "out": out}


# %% [markdown]
# Turn both knobs. Which rank finds which word? What do the others put into the sum? And what does the last of four ranks hold?

# %% tags=["explore"]
SENTENCES = [
    "the cat sat on the mat",
    "the cat saw the cat .",
    "it sat . it saw .",
    "the a mat .",
]


def show_lookup(p, sentence):
    words = sentence.split()
    ids = [WORDS.index(word) for word in words]
    parts = launch(one_hot_lookup, p, args=(ids,))
    return viz.lookup(ids, list(parts), vocab_size=10, tokens=words, title=f'"{sentence}", p = {p}')


viz.explore(show_lookup, p=(1, 2, 4), sentence=SENTENCES, start={"p": 2})

# %% [markdown]
# Ten rows cannot be dealt out evenly to four ranks. With three rows each there are twelve, and the last two belong to no word: **padding**. Section 2 is about it.
#
# What of the backward pass? For a product it would be $dE = \mathrm{onehot}^\top dX$: row 7 of `dE` is the sum of the gradients at all places where the id 7 stands. A rank needs only its own rows of `dE`, and for them the gradients `dX` at the places of its own ids.
#
# **Predict.** Ids `[2, 8]`, a table of `v = 1000` rows and `h = 16`, in float32, over `p = 4` ranks. How many collectives run in the forward pass, and how many bytes do they hold? How many run in the backward pass?

# %% predict="7.a"
predict("7.a", calls_forward=1, bytes_forward=1024, calls_backward=0)

# %% [markdown]
# Count it. The module that the course brings along is the one that you will write:


# %%
def look_up_and_back(vocab_size, hidden_size, shape):
    table = embedding.VocabParallelEmbedding(vocab_size, hidden_size, device=device())
    ids = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device())
    with record() as forward:
        out = table(ids)
    with record() as backward:
        out.sum().backward()
    return [
        {kind: (total.calls, total.bytes) for kind, total in section.totals().items()}
        for section in (forward, backward)
    ]


rows = []
for vocab_size in (1000, 50_000):
    for p in (2, 4):
        forward, backward = launch(look_up_and_back, p, args=(vocab_size, 16, (2, 8)))[0]
        rows.append({"v": vocab_size, "p": p, "forward (calls, bytes)": forward, "backward": backward or "nothing"})
viz.table(rows)

# %% [markdown]
# A table fifty times as large, and the same message: the vectors travel, not the table. Backward there is nothing at all, for two reasons. g hands every rank the whole `dX`, since the model behind it is the same on every rank. And ids are whole numbers without a gradient, so nothing in front of the look-up waits for a sum: there is no f.
#
# ## 2 · A vocabulary that can't be divided
#
# Vocabularies come from a tokenizer, and nobody asked it how many GPUs you have. GPT-2's has 50257 tokens:

# %%
[(p, 50257 % p) for p in (2, 4, 8)]

# %% [markdown]
# Each rank must hold as many rows as any other: collectives want equal shapes, and the ranks should finish at the same time. So the table gets rows that belong to no token, until its size is a multiple of `p`. In practice one goes further and rounds up to a multiple of `128·p`. Each rank then has a multiple of 128 rows, and
# that is a size with which the matrix product of the output layer is efficient on a GPU (Shoeybi et al. 2019, *Megatron-LM*, section 5.1).
#
# **Predict.** 50257 tokens, `p = 4`. How many rows has the padded table, how many has each rank, and how many rows are unused?

# %% predict="7.b"
predict("7.b", padded_size=50688, rows_per_rank=12672, unused_rows=431)

# %% [markdown] task="7.1" title="Padding and ranges" difficulty=1 minutes=10
# Two functions of whole numbers. No rank talks to another: each can work out what it holds, and what everybody else holds.
#
# - `pad_vocab_size` gives the number of rows of the padded table: the smallest multiple of `multiple * world_size` that is not smaller than `vocab_size`.
# - `vocab_range` gives the pair `(start, stop)` of a rank. Its rows are those of the ids `start`, `start + 1`, ..., `stop - 1`, as in Python's `range(start, stop)`. They are rows of the *padded* table: on the last ranks some of them may belong to no token.


# %% exercise="7.1"
def pad_vocab_size(vocab_size, world_size, multiple=128):
    """The number of rows of the padded table, an int."""
    ### BEGIN SOLUTION
    step = multiple * world_size
    return math.ceil(vocab_size / step) * step
    ### END SOLUTION


def vocab_range(vocab_size, rank, world_size, multiple=128):
    """(start, stop): this rank holds the rows start, ..., stop - 1 of the padded table."""
    ### BEGIN SOLUTION
    rows = pad_vocab_size(vocab_size, world_size, multiple) // world_size
    return rank * rows, (rank + 1) * rows
    ### END SOLUTION


# %% [markdown] hints="7.1"
# 1. How many steps of `multiple * world_size` rows do you need so that every token has a row? What if the last step is not full?
# 2. `math.ceil` rounds up. A rank has `padded size // world_size` rows; rank 0 begins at 0, and each rank begins where the one before it stops.
# 3. `math.ceil(vocab_size / step) * step` with `step = multiple * world_size`; then `rows = pad_vocab_size(vocab_size, world_size, multiple) // world_size`, and `return rank * rows, (rank + 1) * rows`.

# %% check="7.1"
check("7.1", pad_vocab_size, vocab_range)

# %% [markdown]
# What padding costs, for three vocabularies, with your functions:

# %%
rows = []
for model, vocab_size in (("GPT-2", 50257), ("Llama 3", 128256), ("bytes", 256)):
    for p in (1, 2, 8):
        padded = pad_vocab_size(vocab_size, p)
        start, stop = vocab_range(vocab_size, p - 1, p)
        rows.append(
            {
                "vocabulary": f"{model}, {vocab_size}",
                "p": p,
                "rows": padded,
                "rows of each rank": padded // p,
                "of the last rank, used": max(0, min(stop, vocab_size) - start),
                "unused": f"{padded / vocab_size - 1:.1%}",
            }
        )
viz.table(rows)

# %% [markdown]
# For a real vocabulary the padding is two percent at most here; GPT-2's 51200 rows at `p = 8` are those of the Megatron paper. Bytes show where it goes wrong. They are 256 tokens, two ranks hold all of them, and six more hold nothing but padding. For small vocabularies choose a smaller `multiple`: the table of ten words in this chapter uses 1, and the model that you train in section 7 has 128 again.
#
# Three rules keep padding harmless. It is **never looked up**, because no token has such an id (section 4 makes sure of it). It is **never trained**: what is not looked up has no gradient, and the output layer's columns for it are dropped before the loss. And it is **in no checkpoint**: a checkpoint holds `[v, h]`, the rows of the tokens, or a
# table saved by four ranks, 50688 rows, would not fit into two, where there are 50432.
#
# ## 3 · Without the one-hot vectors
#
# A product with one-hot vectors would need `b·s·v` numbers for the vectors and as many multiplications for each of the `h` columns. A rank can do the same by looking up. For each id there are two cases.
#
# | the id is | row of the shard | the rank puts into the sum |
# |---|---|---|
# | one of `start` to `stop - 1` | `id - start` | that row |
# | another rank's: **foreign** | none; any row will do | zeros |
#
# A look-up of an id that is not there raises, so a foreign id first gets some row that exists, and what was found is replaced by zeros afterwards. These are the steps:
#
# 1. the **mask**: which ids are foreign, `[b, s]`;
# 2. the rows: ids counted from `start`, and 0 at the foreign places, `[b, s]`;
# 3. look up, `[b, s, h]`;
# 4. zeros at the foreign places, `[b, s, h]`;
# 5. g.

# %% [markdown] task="7.2" title="The masked look-up" difficulty=3 minutes=15
# Write the five steps. g is `reduce_from_region(x, group)`, from chapter 03. Do not change `ids` in place; the caller needs them.
#
# `padding_row` is for the next exercise. It is a row of this shard that must get no gradient, or `None`. `F.embedding(rows, weight, padding_row)` does just that, so all you do is hand it on.


# %% exercise="7.2"
def parallel_lookup(ids, weight, start, stop, *, padding_row=None, group=None):
    """The vectors of the ids, from a table of which this rank holds the rows start to stop - 1.

    in:  ids, replicated, whole numbers          [...]
         weight, this rank's rows                [stop - start, h]
    out: the vectors, replicated                 [..., h]
    """
    ### BEGIN SOLUTION
    foreign = (ids < start) | (ids >= stop)  # [...]: another rank has the row
    rows = (ids - start).masked_fill(foreign, 0)  # [...]: any row will do there
    vectors = F.embedding(rows, weight, padding_row)  # [..., h]
    vectors = vectors.masked_fill(foreign.unsqueeze(-1), 0)  # [..., h]: one term of the sum
    return reduce_from_region(vectors, group)  # [..., h]
    ### END SOLUTION


# %% [markdown] hints="7.2"
# 1. Which ids are foreign to a rank that holds 3, 4 and 5, `start = 3` and `stop = 6`? Write the condition for a single id first, and try it with 2, 3, 5 and 6.
# 2. `foreign = (ids < start) | (ids >= stop)` has the shape of `ids`. `x.masked_fill(mask, 0)` gives a copy of `x` with zeros where the mask is true; use it twice, on the rows before the look-up and on the vectors after it. What shape must the mask have for the second?
# 3. `rows = (ids - start).masked_fill(foreign, 0)`, `vectors = F.embedding(rows, weight, padding_row)`, `vectors = vectors.masked_fill(foreign.unsqueeze(-1), 0)`, and `return reduce_from_region(vectors, group)`.

# %% check="7.2"
check("7.2", parallel_lookup)

# %% [markdown]
# And where do the gradients go? The sentence has "the" twice, at places 1 and 4. The upstream gradient is 1 at the first place, 2 at the second, and so on, in both columns. Here are the gradients of the two shards:


# %%
def gradient_of_the_table(ids):
    rank, p = dist.get_rank(), dist.get_world_size()
    start, stop = vocab_range(len(TABLE), rank, p, multiple=1)
    weight = TABLE[start:stop].to(device()).requires_grad_()  # [5, 2]
    out = parallel_lookup(torch.tensor(ids, device=device()), weight, start, stop)  # [s, h]
    places = torch.arange(1.0, len(ids) + 1, device=device())[:, None].expand(-1, 2)  # [s, h]
    out.backward(places)
    return weight.grad


words = ["the", "mat", "saw", "the", "."]
ids = [WORDS.index(word) for word in words]
grads = launch(gradient_of_the_table, 2, args=(ids,))
print(dict(zip(words, ids, strict=True)))
viz.matrices({f"rank {rank}: dE, rows {5 * rank} to {5 * rank + 4}": grad for rank, grad in enumerate(grads)})

# %% [markdown]
# Row 0 is "the", and gets 1 + 4 = 5. A row that was not looked up gets nothing. Each gradient is on the rank that has the row, complete, although no rank sent anything: `dX` was there on both.
#
# ## 4 · An id that nobody has
#
# **Predict.** A bug in the data, or a tokenizer that is newer than the model: the id 12 in a vocabulary of 10. What does `nn.Embedding` on one process give: `"IndexError"`, `"zeros"` or `"a row"`? And what does your `parallel_lookup`, on two ranks?

# %% predict="7.c"
predict("7.c", one_process="IndexError", two_ranks="zeros")


# %%
def look_up_one(number):
    start, stop = vocab_range(len(TABLE), dist.get_rank(), dist.get_world_size(), multiple=1)
    padded = F.pad(TABLE, (0, 0, 0, pad_vocab_size(len(TABLE), dist.get_world_size(), multiple=1) - len(TABLE)))
    weight = padded[start:stop].to(device())
    return parallel_lookup(torch.tensor([number], device=device()), weight, start, stop)[0].tolist()


def alone(number):
    try:
        return [round(value, 1) for value in F.embedding(torch.tensor([number]), TABLE)[0].tolist()]
    except IndexError as error:
        return f"IndexError: {error}"


rows = []
for number in (7, 12, 11, -3):
    row = {"id": number, "one process": alone(number)}
    for p in (2, 4):
        vector = launch(look_up_one, p, args=(number,))[0]
        row[f"p = {p}"] = [round(value, 1) for value in vector]
    rows.append(row)
viz.table(rows)

# %% [markdown]
# Zeros, without a word, and the training goes on. It is the price of the mask: a rank that does not know an id trusts that another does. The id 11 is worse. At `p = 4` it is a row of padding, so it *is* looked up. Now it gives zeros, but it gets a gradient, and after one step it is a row like any other, until a checkpoint drops it.
#
# So somebody has to look at the ids before anybody looks them up, and the right place is in the module: the vocabulary has the ids `0` to `v - 1`, and whatever else comes is an `IndexError` that names the id and the place where it stands. Every rank sees the same ids, so all ranks raise together and none is left waiting in the all-reduce.
#
# *On a GPU* such a test has a price. `if wrong.any()` needs the answer on the CPU, so the CPU waits until the GPU has caught up with it, at every step (a **synchronisation**; without it the CPU runs ahead, launching work for the GPU). The module of the course therefore checks *later* there: where an id is wrong, the vector becomes NaN at once, on the GPU. The position and the id of the first wrong one are sent to the CPU in the
# background, and the *next* call reads them and raises. Nobody waits, and what was computed in between is NaN and cannot be mistaken for a result. You can ask for it on a CPU too:


# %%
def check_later():
    table = embedding.VocabParallelEmbedding(10, 2, check_ids="later", device=device())
    first = table(torch.tensor([[3, 12]], device=device()))  # [1, 2, 2]
    print("first call, id 12:", first[0, 1].tolist(), flush=True)
    table(torch.tensor([[3, 4]], device=device()))


with show_failure():
    launch(check_later, 2)

# %% [markdown] task="7.3" title="VocabParallelEmbedding" difficulty=3 minutes=15
# The module around your look-up. Three things are yours:
#
# - **The shard.** `self.start` and `self.stop` from your `vocab_range`, and `self.weight`, a parameter with that many rows. The two lines below your first part are given. One notes how the table was cut, for checkpoints: along dimension 0, one block of `num_embeddings` rows, padded to whole units of `multiple`. The other fills the shard
#   from a master weight, as in chapter 04, and the padding with zeros.
# - **`padding_idx`.** As in `nn.Embedding`: the id of a token that only fills up short sentences. (It is a token, with a row of its own, and has nothing to do with the padding of the table.) Its row starts as zeros and gets no gradient. Here it is `None` or an id from 0 to `num_embeddings - 1`.
# - **`forward`.** An id that is negative, or `num_embeddings` or more, raises `IndexError` on every rank. Its message names the id and its position in `ids`, one number for each dimension, such as `id 12 at [0, 3]`. Then look up.


# %% exercise="7.3"
class VocabParallelEmbedding(nn.Module):
    """nn.Embedding, of which each rank holds the rows start to stop - 1.

    in:  ids, replicated         [...]
    out: vectors, replicated     [..., h]
    weight: [stop - start, h], with zeros in the rows behind the vocabulary
    """

    def __init__(
        self, num_embeddings, embedding_dim, padding_idx=None, *, multiple=128, group=None, device=None, dtype=None
    ):
        super().__init__()
        self.num_embeddings, self.padding_idx, self.group = num_embeddings, padding_idx, group
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        ### BEGIN SOLUTION
        self.start, self.stop = vocab_range(num_embeddings, rank, world_size, multiple)
        empty = torch.empty(self.stop - self.start, embedding_dim, device=device, dtype=dtype)
        self.weight = nn.Parameter(empty)  # [v/p, h]
        ### END SOLUTION
        self.weight.tensor_parallel = Sharding(0, blocks=(Block(num_embeddings, multiple, padded=True),))
        init_parameter(self.weight, nn.init.normal_, group)
        ### BEGIN SOLUTION
        if self.padding_row() is not None:
            with torch.no_grad():
                self.weight[self.padding_row()] = 0
        ### END SOLUTION

    def padding_row(self):
        """The row of padding_idx in this rank's shard; None where another rank has it, or there is no padding_idx."""
        ### BEGIN SOLUTION
        if self.padding_idx is None or not self.start <= self.padding_idx < self.stop:
            return None
        return self.padding_idx - self.start
        ### END SOLUTION

    def forward(self, ids):
        ### BEGIN SOLUTION
        wrong = (ids < 0) | (ids >= self.num_embeddings)  # [...]
        if wrong.any():
            place = wrong.nonzero()[0].tolist()
            number = ids[tuple(place)].item()
            raise IndexError(
                f"id {number} at {place} is outside the vocabulary: its ids are 0 to {self.num_embeddings - 1}"
            )
        return parallel_lookup(
            ids, self.weight, self.start, self.stop, padding_row=self.padding_row(), group=self.group
        )  # [..., h]
        ### END SOLUTION


# %% [markdown] hints="7.3"
# 1. Which of these does a rank know by itself: its rows, whether `padding_idx` is among them, whether an id is in the vocabulary at all? For which of the three do the rows of this rank not matter?
# 2. `nn.Parameter(torch.empty(self.stop - self.start, embedding_dim, device=device, dtype=dtype))`. The row of `padding_idx` counts from `start`, and is `None` on a rank that does not have it. A parameter is changed in place under `torch.no_grad()`. `mask.nonzero()[0]` is the position of the first `True`.
# 3. `wrong = (ids < 0) | (ids >= self.num_embeddings)`; if `wrong.any()`: `place = wrong.nonzero()[0].tolist()`, and raise `IndexError(f"id {ids[tuple(place)].item()} at {place} is outside the vocabulary")`. Then `return parallel_lookup(ids, self.weight, self.start, self.stop, padding_row=self.padding_row(), group=self.group)`.

# %% check="7.3"
check("7.3", VocabParallelEmbedding)

# %% [markdown]
# The id 12 once more, at place `[0, 3]` of a batch, with your module. Read which rank speaks, and what it says:


# %%
def with_a_wrong_id():
    table = VocabParallelEmbedding(10, 2, multiple=1, device=device())
    return table(torch.tensor([[0, 5, 9, 12], [1, 2, 3, 4]], device=device()))


with show_failure():
    launch(with_a_wrong_id, 4)

# %% [markdown]
# And the padding in a checkpoint. Four ranks hold 12 rows, the checkpoint has 10, and two ranks load it:


# %%
def save():
    torch.manual_seed(0)
    table = VocabParallelEmbedding(10, 2, multiple=1, device=device())
    return {"state": full_state_dict(table), "rows": len(table.weight)}


def load(state):
    table = VocabParallelEmbedding(10, 2, multiple=1, device=device())
    load_full_state_dict(table, state)
    return {"same": torch.equal(full_state_dict(table)["weight"], state["weight"]), "rows": len(table.weight)}


saved = launch(save, 4)
loaded = launch(load, 2, args=(saved[0]["state"],))
viz.table(
    [
        {
            "rows on four ranks": sum(part["rows"] for part in saved),
            "rows in the checkpoint": len(saved[0]["state"]["weight"]),
            "rows on two ranks": sum(part["rows"] for part in loaded),
            "the same table": all(part["same"] for part in loaded),
        }
    ]
)

# %% [markdown]
# ## 5 · The other end
#
# At the end of a language model stands a vector `x` for each place, and the question which token comes next. The output layer answers with a logit for each token: the product of `x` with a vector of that token. With the vectors of all tokens as rows of a matrix `W [v, h]` that is
#
# $$\text{logits} = X\, W^\top \qquad X: [b, s, h],\quad W^\top: [h, v],\quad \text{logits}: [b, s, v]$$
#
# A vector for each token: that is what the table at the entrance holds. So one may use the same, $W = E$ (Press and Wolf 2017, *Using the Output Embedding to Improve Language Models*). The layers are then **tied**: one parameter, two uses. GPT-2 does it. In its largest form, with `h = 1600`, that saves a second table of 50257 · 1600 weights, 80 million.
#
# Cut by rows, `E` is ready for it. The rows of `E` are the columns of $E^\top$, so the output layer is column-parallel, with f in front: each rank computes the logits of its own tokens, `[b, s, v/p]`. To choose the next token somebody has to see all of them: gather. For training that would be a waste, and chapter 08 computes the loss without it.
#
# The gradient of the table has two parts, one for each use:
#
# $$dE = \underbrace{\mathrm{onehot}^\top dX}_{\text{look-up}} + \underbrace{d\text{logits}^\top X}_{\text{output layer}}$$
#
# Both arise on the rank that has the row: of the first you saw it above, and of the second each rank has its own columns of `dlogits` and the whole `X`. Autograd adds them up because they belong to one and the same parameter. *Tying costs no communication at all.*

# %% [markdown] task="7.4" title="Parallel logits" difficulty=2 minutes=10
# The operators are `copy_to_region(x, group)` (f) and `gather_from_region(x, group)`, which puts the ranks' parts side by side along the last dimension. Without `gather` a rank returns its own logits, those of its padding rows included. With `gather` every rank returns the logits of the whole table, cut off at `vocab_size` if that is given.


# %% exercise="7.4"
def parallel_logits(x, weight, *, gather=False, vocab_size=None, group=None):
    """The logits of x, with a table of which this rank holds the rows `weight`.

    in:  x, replicated                         [..., h]
         weight, this rank's rows              [v/p, h]
    out: this rank's logits                    [..., v/p]
         with gather: all logits, replicated   [..., vocab_size]
    """
    ### BEGIN SOLUTION
    x = copy_to_region(x, group)  # [..., h]: f
    logits = F.linear(x, weight)  # [..., v/p]
    if gather:
        logits = gather_from_region(logits, group)[..., :vocab_size]  # [..., vocab_size]
    return logits
    ### END SOLUTION


# %% [markdown] hints="7.4"
# 1. Which of the two parallel layers of chapter 04 is this, and what stood in front of its product? What would `dx` be without it?
# 2. f, then `F.linear(x, weight)`: it multiplies with the transpose of `weight`, `[..., h]` times `[h, v/p]`. If `gather`, gather along the last dimension and drop the padding, which is at the end.
# 3. `logits = F.linear(copy_to_region(x, group), weight)`, and if `gather`: `logits = gather_from_region(logits, group)[..., :vocab_size]`. A slice up to `None` is everything.

# %% check="7.4"
check("7.4", parallel_logits)

# %% [markdown] task="7.5" title="The tied model" difficulty=2 minutes=10
# A language model is a look-up, a body, and an output layer. Put them together, with one table for both ends.
#
# - `self.embedding` is your `VocabParallelEmbedding`, `self.body` the module that is given: it makes `[b, s, h]` of `[b, s, h]` and is replicated.
# - `forward` returns this rank's logits, or with `gather` all of them, without the padding.
# - `multiple`, `group`, `device` and `dtype` are for the embedding; `group` is for the logits too.


# %% exercise="7.5"
class TiedModel(nn.Module):
    """ids [b, s] -> logits [b, s, v/p], or with gather [b, s, v]. One table at both ends."""

    def __init__(self, vocab_size, hidden_size, body, *, multiple=128, group=None, device=None, dtype=None):
        super().__init__()
        ### BEGIN SOLUTION
        self.embedding = VocabParallelEmbedding(
            vocab_size, hidden_size, multiple=multiple, group=group, device=device, dtype=dtype
        )
        self.body = body
        self.vocab_size, self.group = vocab_size, group
        ### END SOLUTION

    def forward(self, ids, gather=False):
        ### BEGIN SOLUTION
        x = self.embedding(ids)  # [b, s, h]
        x = self.body(x)  # [b, s, h]
        return parallel_logits(
            x, self.embedding.weight, gather=gather, vocab_size=self.vocab_size, group=self.group
        )  # [b, s, v/p] or [b, s, v]
        ### END SOLUTION


# %% [markdown] hints="7.5"
# 1. How many parameters has the model, beside those of the body? Which object is used in both places?
# 2. `self.embedding` holds the table as `self.embedding.weight`. Hand that very parameter to `parallel_logits`: not a copy, not a detached one.
# 3. `x = self.body(self.embedding(ids))`, then `return parallel_logits(x, self.embedding.weight, gather=gather, vocab_size=self.vocab_size, group=self.group)`.

# %% check="7.5"
check("7.5", TiedModel)

# %% [markdown]
# ## 6 · Rows or columns?
#
# The table could be cut along the other dimension. Each rank would hold `h/p` columns for *every* token: no mask, no foreign ids, no padding. Why does nobody do that?
#
# For the look-up alone it would be the better way: each rank finds its piece of every vector, and an all-gather puts the pieces together, which in a ring sends half of what an all-reduce sends (chapter 01). But look at the output layer. $X E^\top$ with both cut along `h` is the row-parallel product, a sum of `p` terms, and each term is as large as all the logits:
#
# - the look-up gathers its vectors: `b·s·h`;
# - the logits are summed: `b·s·v`, and every rank holds all of them;
# - backward, the gradients of the pieces of `X` are gathered: `b·s·h`.
#
# **Predict.** A tied model, forward and backward together, with `v = 10·h`. How many times `b·s·h` numbers do all messages hold together, cut by rows and cut by columns?

# %% predict="7.d"
predict("7.d", by_rows=2, by_columns=12)


# %%
def cut_by(kind, vocab_size, hidden_size, shape):
    """Bytes of the messages of a look-up and its logits, forward and backward, and of the logits on this rank."""
    p = dist.get_world_size()
    ids = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device())
    with record() as section:
        if kind == "rows":
            model = TiedModel(vocab_size, hidden_size, nn.Identity(), multiple=1, device=device())
            logits = model(ids)  # [b, s, v/p]
        else:
            weight = torch.randn(vocab_size, hidden_size // p, device=device(), requires_grad=True)  # [v, h/p]
            x = gather_from_region(F.embedding(ids, weight))  # [b, s, h]
            logits = reduce_from_region(F.linear(scatter_to_region(x), weight))  # [b, s, v]
        logits.sum().backward()
    return sum(total.bytes for total in section.totals().values()), logits.numel() * 4


b, s, h = 2, 16, 32
v = 10 * h
rows = []
for p in (2, 4):
    for kind in ("rows", "columns"):
        size, logits = launch(cut_by, p, args=(kind, v, h, (b, s)))[0]
        rows.append(
            {
                "p": p,
                "the table is cut by": kind,
                "bytes of all messages": size,
                "in b·s·h numbers": f"{size / (b * s * h * 4):g}",
                "logits on each rank, bytes": logits,
            }
        )
viz.table(rows)

# %% [markdown]
# Six times as much, and every rank holds all logits, a tensor `v/h` times as large as `X`. In the largest GPT-2 `v` is not ten but 31 times `h`. Cut by rows, the output layer has its logits split and sends nothing forward. The masks at the entrance are the price, and a cheap one.
#
# ## 7 · Train it
#
# Real text again, the sources of the Python standard library, but in words this time. The 1008 most frequent words and signs are tokens; everything else is token 0. That makes 1009, a prime number, which can't be divided by anything.

# %%
VOCAB, CONTEXT, HIDDEN, BATCH, STEPS = 1009, 8, 32, 64, 150
words = re.findall(r"\w+|[^\w\s]|\s+", corpus.python_sources(300_000).decode(errors="replace"))
VOCABULARY = ["<other>", *(word for word, _ in Counter(words).most_common(VOCAB - 1))]
numbers = {word: number for number, word in enumerate(VOCABULARY)}
tokens = torch.tensor([numbers.get(word, 0) for word in words])
print(f"{len(tokens)} tokens, {(tokens == 0).double().mean():.0%} of them <other>")
print([(word, number) for word, number in zip(words[:12], tokens[:12].tolist(), strict=True)])


# %%
def batches(steps, seed):
    """Pairs (8 tokens [b, s], the token behind them [b]), the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH, 1), generator=generator)  # [b, 1]
        window = tokens[starts + torch.arange(CONTEXT + 1)]  # [b, s + 1]
        yield window[:, :-1].to(device()), window[:, -1].to(device())


def make_body():
    """The 8 vectors side by side, two layers, one vector: [b, s, h] to [b, h]. Replicated."""
    options = {"device": device(), "dtype": torch.float64}
    return nn.Sequential(
        nn.Flatten(1), nn.Linear(CONTEXT * HIDDEN, HIDDEN, **options), nn.GELU(), nn.Linear(HIDDEN, HIDDEN, **options)
    )


class PlainTied(nn.Module):
    """The twin to compare with: one process, nn.Embedding, no parallelism."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN, device=device(), dtype=torch.float64)
        self.body = make_body()

    def forward(self, ids, gather=True):
        return F.linear(self.body(self.embedding(ids)), self.embedding.weight)  # [b, v]


def train(model, steps=STEPS, change=lambda ids: ids):
    """The loss of every step."""
    torch.set_num_threads(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for ids, targets in batches(steps, seed=1):
        loss = F.cross_entropy(model(change(ids), gather=True), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


torch.manual_seed(0)
plain = PlainTied()
with torch.no_grad():
    plain.embedding.weight.mul_(0.1)  # as an output layer the table must not begin with logits in the tens
start = {name: value.cpu().clone() for name, value in plain.state_dict().items()}
plain_losses = train(plain)
print(f"one process: loss {plain_losses[0]:.3f} -> {plain_losses[-1]:.3f}; guessing costs {math.log(VOCAB):.3f}")


# %%
def tied_model(model_class):
    model = model_class(VOCAB, HIDDEN, make_body(), device=device(), dtype=torch.float64)
    load_full_state_dict(model, start)
    return model


def train_on_ranks():
    model = tied_model(TiedModel)
    losses = train(model)
    unused = model.embedding.weight[max(0, VOCAB - model.embedding.start) :]  # rows that belong to no token
    return {
        "losses": losses,
        "rows": len(model.embedding.weight),
        "unused": len(unused),
        "changed": bool(unused.any()),
        "state": full_state_dict(model),
    }


runs = {p: launch(train_on_ranks, p) for p in (1, 2, 4)}
viz.curves(
    {"one process, nn.Embedding": plain_losses}
    | {f"your TiedModel, p = {p}": run[0]["losses"] for p, run in runs.items()},
    title=f"{STEPS} steps, a vocabulary of {VOCAB}",
)

# %%
rows = []
for p, run in runs.items():
    furthest = max(abs(mine - theirs) for mine, theirs in zip(run[0]["losses"], plain_losses, strict=True))
    table = run[0]["state"]["embedding.weight"]
    rows.append(
        {
            "p": p,
            "rows of each rank": run[0]["rows"],
            "last loss": f"{run[0]['losses'][-1]:.6f}",
            "furthest from one process, any step": f"{furthest:.0e}",
            "unused rows": sum(part["unused"] for part in run),
            "still zeros": not any(part["changed"] for part in run),
            "trained table, furthest": f"{(table - plain.state_dict()['embedding.weight'].cpu()).abs().max():.0e}",
        }
    )
viz.table(rows)

# %% [markdown]
# Four trainings, one curve, down to the last digits of a float64. The padding is what it was, zeros. And the table that the checkpoint gathers is that of one process.
#
# ## 8 · Break it
#
# **First: no check of the ids.** Somebody adds a token `<end>` to the tokenizer, with the next free id, 1009, and puts it at the end of half of the examples. Nobody tells the model. Below it is trained without the check, on two ranks, once with 1009 and once with 5000. Say first: will there be an error? And what will be in the checkpoint?


# %%
class Unchecked(TiedModel):
    """TiedModel, but nobody looks at the ids."""

    def forward(self, ids, gather=False):
        table = self.embedding
        x = self.body(parallel_lookup(ids, table.weight, table.start, table.stop))
        return parallel_logits(x, table.weight, gather=gather, vocab_size=VOCAB)


def with_end(number):
    """Puts the id at the last place of every second example."""

    def change(ids):
        ids = ids.clone()
        ids[::2, -1] = number
        return ids

    return change


@torch.no_grad()
def loss_on_new_text(model, change=lambda ids: ids):
    ids, targets = next(batches(1, seed=2))
    return F.cross_entropy(model(change(ids), gather=True), targets).item()


def train_with(number):
    model = tied_model(Unchecked)
    losses = train(model, change=with_end(number))
    unused = model.embedding.weight[max(0, VOCAB - model.embedding.start) :]
    return {
        "losses": losses,
        "unused": unused.detach().abs().max().item() if len(unused) else 0.0,
        "new": loss_on_new_text(model, with_end(number)),
        "state": full_state_dict(model),
    }


def load_and_try(state, number):
    model = tied_model(Unchecked)
    load_full_state_dict(model, state)
    return loss_on_new_text(model, with_end(number))


rows = []
for number in (1009, 5000):
    run = launch(train_with, 2, args=(number,))
    again = launch(load_and_try, 2, args=(run[0]["state"], number))[0]
    rows.append(
        {
            "id of <end>": number,
            "first loss": f"{run[0]['losses'][0]:.3f}",
            "last loss": f"{run[0]['losses'][-1]:.3f}",
            "largest number in the padding": f"{max(part['unused'] for part in run):.3f}",
            "rows saved": len(run[0]["state"]["embedding.weight"]),
            "on new text": f"{run[0]['new']:.4f}",
            "saved, loaded, on the same": f"{again:.4f}",
        }
    )
viz.table(rows)

# %% [markdown]
# No error in either, and two losses that go down. The id 5000 has no row on any rank; its vector is zeros from the first step to the last, and it is never learnt. The id 1009 has found a row in the padding and learns it, so all looks well, until the checkpoint is loaded: it holds 1009 rows, as it should, and what `<end>` had learnt is gone. The loss on the
# very same text is a worse one. With your check the first batch stops both, with the id and its place.
#
# **Second: `>` for `>=`.** One character in the mask. Read the line of the program, and say which of the two batches it will not survive, and on which rank.


# %%
def off_by_one(ids, weight, start, stop):
    foreign = (ids < start) | (ids > stop)
    rows = (ids - start).masked_fill(foreign, 0)
    vectors = F.embedding(rows, weight).masked_fill(foreign.unsqueeze(-1), 0)
    return reduce_from_region(vectors)


def two_batches():
    start, stop = vocab_range(len(TABLE), dist.get_rank(), dist.get_world_size(), multiple=1)
    weight = TABLE[start:stop].to(device())
    for batch in ([0, 3, 7, 9], [1, 2, 5, 8]):
        out = off_by_one(torch.tensor(batch, device=device()), weight, start, stop)
        print(batch, "->", [round(value, 1) for value in out[:, 0].tolist()], flush=True)


with show_failure():
    launch(two_batches, 2)

# %% [markdown]
# The first batch is right, on both ranks. The second has the id 5. Rank 0 holds 0 to 4, with `stop = 5`; its mask takes 5 for its own and asks for row 5 of 5. Rank 1 never notices, and waits. In a vocabulary of 50000 with two ranks a single id is deadly, and if it is rare the training runs for hours first. That is why the check of exercise 7.2 asks for the first and the last id of every rank.
#
# **Third: gradients that stay away.** Two models whose forward pass is right. In one the output layer uses a detached table, so that only the look-up teaches it; in the other f is missing in front of the logits.


# %%
class OneUse(TiedModel):
    def forward(self, ids, gather=False):
        x = self.body(self.embedding(ids))
        return parallel_logits(x, self.embedding.weight.detach(), gather=gather, vocab_size=VOCAB)


class WithoutF(TiedModel):
    def forward(self, ids, gather=False):
        x = self.body(self.embedding(ids))
        logits = F.linear(x, self.embedding.weight)  # no copy_to_region
        return gather_from_region(logits)[..., :VOCAB]


def train_and_compare(model_class):
    model = tied_model(model_class)
    return {
        "losses": train(model),
        "body": model.body[1].weight.detach(),
        "new": loss_on_new_text(model),
        "state": full_state_dict(model),
    }


broken = {name: launch(train_and_compare, 2, args=(kind,)) for name, kind in (("one", OneUse), ("f", WithoutF))}
viz.curves(
    {
        "one process": plain_losses,
        "the output layer detached": broken["one"][0]["losses"],
        "without f": broken["f"][0]["losses"],
    },
    title="the forward pass is right in all three",
)


# %%
def loss_when_loaded(state):
    """On new text, of one process that loads a checkpoint."""
    model = PlainTied()
    model.load_state_dict(state)
    return loss_on_new_text(model)


rows = [
    {
        "model": "one process",
        "first loss": f"{plain_losses[0]:.6f}",
        "last": f"{plain_losses[-1]:.4f}",
        "drift": None,
        "on new text": f"{loss_on_new_text(plain):.4f}",
        "saved by rank 0": None,
        "saved by rank 1": None,
    }
]
for name, run in broken.items():
    drift = (run[0]["body"] - run[1]["body"]).abs().max().item()
    rows.append(
        {
            "model": "the output layer detached" if name == "one" else "without f",
            "first loss": f"{run[0]['losses'][0]:.6f}",
            "last": f"{run[0]['losses'][-1]:.4f}",
            "drift": f"{drift:.1e}",
            "on new text": f"{run[0]['new']:.4f}",
            "saved by rank 0": f"{loss_when_loaded(run[0]['state']):.4f}",
            "saved by rank 1": f"{loss_when_loaded(run[1]['state']):.4f}",
        }
    )
viz.table(rows, title="drift: how far the body's first weight on rank 0 is from that on rank 1")

# %% [markdown]
# All begin with the same loss, to the last digit, and all learn. With one use of two the ranks agree with each other perfectly; only the comparison with one process shows that something is missing.
#
# Without f the loss is, if anything, *lower*. Each rank's copy of the body learns for its own half of the vocabulary only, so the two copies become two different bodies, a larger model than the one you wrote. A checkpoint has room for one of them. The last three columns have the same text: the trained model on its two ranks, then one process that loads what rank 0 saved, then what rank 1 saved. Where there should be one number, there are three. (Tokens are numbered by how frequent they are, so
# rank 0's body knows the frequent half. Rank 1's does not.)

# %%
symptoms(7)

# %% [markdown]
# ## 9 · Measure it
#
# **Memory.** A table with its gradient and the two numbers that Adam keeps for each weight, in float32: 16 bytes for each of its `v·h` numbers (chapter 00). GPT-2's vocabulary, `h = 64` so that it fits everywhere, after one step of training:


# %%
def bytes_of_a_table(vocab_size, hidden_size):
    table = VocabParallelEmbedding(vocab_size, hidden_size, device=device())
    optimizer = torch.optim.Adam(table.parameters())
    table(torch.arange(64, device=device())).sum().backward()
    optimizer.step()
    state = [value for value in optimizer.state[table.weight].values() if value.dim()]
    return [sum(t.numel() * t.element_size() for t in part) for part in ([table.weight], [table.weight.grad], state)]


rows = []
for p in (1, 2, 4):
    weight, gradient, state = launch(bytes_of_a_table, p, args=(50257, 64))[0]
    formula = 16 * pad_vocab_size(50257, p) * 64 // p
    rows.append(
        {
            "p": p,
            "weights": weight,
            "gradients": gradient,
            "Adam": state,
            "together": weight + gradient + state,
            "16 v h / p": formula,
        }
    )
viz.table(rows, title="bytes on each rank")

# %% [markdown]
# The formula holds to the byte, so it may speak about models that do not fit on this machine. Llama 3 405B has a vocabulary of 128256, a hidden size of 16384, and two tables, since it does not tie its output layer. This is what each GPU would spend on the two tables; compare it with the 80 GB of a large one:

# %%
llama = memory.PRESETS["Llama 3 405B"]
tables = 1 if llama.tied_embedding else 2


def table_bill(p):
    numbers = tables * pad_vocab_size(llama.vocab_size, p) * llama.hidden_size // p
    return {"weights": 4 * numbers, "gradients": 4 * numbers, "optimizer state": 8 * numbers}


viz.bill(
    {"whole on every rank": table_bill(1), "p = 2": table_bill(2), "p = 4": table_bill(4), "p = 8": table_bill(8)},
    title="the two tables of Llama 3 405B, on each GPU",
)

# %% [markdown]
# **Bytes.** One training step of your model, forward and backward, against the formula; and against the other way to let ranks share the work: a whole table on every rank, each with its own half of the examples. Then every rank has another gradient for the same table, and they are added up, all `v·h` numbers of them.


# %%
def count_one_step():
    model = tied_model(TiedModel)
    ids, targets = next(batches(1, seed=3))
    with record() as forward:
        logits = model(ids, gather=True)
    with record() as backward:
        F.cross_entropy(logits, targets).backward()
    return [{kind: total.bytes for kind, total in section.totals().items()} for section in (forward, backward)]


def whole_tables():
    model = PlainTied()
    ids, targets = next(batches(1, seed=3))
    rank, p = dist.get_rank(), dist.get_world_size()
    F.cross_entropy(model(ids.chunk(p)[rank]), targets.chunk(p)[rank]).backward()
    with record() as section:
        dist.all_reduce(model.embedding.weight.grad)
    return section.totals()["all_reduce"].bytes


rows = []
for p in (2, 4):
    forward, backward = launch(count_one_step, p)[0]
    for what, measured, formula in (
        ("look-up, forward: b·s·h", forward["all_reduce"], BATCH * CONTEXT * HIDDEN * 8),
        ("logits, backward: one vector an example, b·h", backward["all_reduce"], BATCH * HIDDEN * 8),
        ("gather of the logits: b·v, padded", forward["all_gather"], BATCH * pad_vocab_size(VOCAB, p) * 8),
        ("a whole table's gradient: v·h", launch(whole_tables, p)[0], VOCAB * HIDDEN * 8),
    ):
        rows.append({"p": p, "message": what, "bytes": measured, "formula": formula})
viz.table(rows)

# %% [markdown]
# The vectors that travel grow with the batch, the gradient of a whole table with the vocabulary. And look at the third line: the gather, which the training needs only because its loss wants all logits in one place, is by far the largest. Chapter 08 removes it.
#
# ## 10 · In the wild
#
# **Megatron-Core**, `megatron/core/tensor_parallel/layers.py`: `VocabParallelEmbedding`, with the same five steps. `VocabUtility.vocab_range_from_global_vocab_size` gives the range, the option `--make-vocab-size-divisible-by` (128 by default) the padding. A checkpoint is allowed to differ in the number of rows (`allow_shape_mismatch=True`), for the sake of that padding. With `reduce_scatter_embeddings` a reduce-scatter takes the place of
# the all-reduce, so that each rank keeps a part of the sequence (chapter 12). Tying is `share_embeddings_and_output_weights`. On more than one rank nobody looks at the ids: one that is outside the vocabulary gets zeros.
#
# **PyTorch**: `parallelize_module` with `RowwiseParallel` on an `nn.Embedding` cuts it by rows; `ColwiseParallel` cuts it by columns. The masking is in a placement of its own, `_MaskPartial`: a partial sum that remembers which ids were foreign. Here it is beside yours, with a right id and with one that nobody has:


# %%
def against_dtensor(ids, wrong):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    theirs = nn.Module()
    theirs.table = nn.Embedding(10, 2, device=device())
    theirs.table.load_state_dict({"weight": TABLE})
    style = RowwiseParallel(input_layouts=Replicate(), use_local_output=True)
    parallelize_module(theirs, init_device_mesh(device().type, (dist.get_world_size(),)), {"table": style})
    mine = VocabParallelEmbedding(10, 2, multiple=1, device=device())
    load_full_state_dict(mine, {"weight": TABLE.to(device())})
    seen = {}
    for name, table in (("yours", mine), ("PyTorch's", theirs.table)):
        with record() as section:
            out = table(torch.tensor(ids, device=device()))
        try:
            vector = [round(value, 1) for value in table(torch.tensor([wrong], device=device()))[0].tolist()]
        except IndexError as error:
            vector = f"IndexError: {error}"
        calls = {kind: (total.calls, total.bytes) for kind, total in section.totals().items()}
        seen[name] = {"out": out.detach().cpu(), "calls": calls, "wrong": vector}
    return seen


seen = launch(against_dtensor, 2, args=([0, 4, 5, 9], 12))[0]
print("the same vectors:", torch.equal(seen["yours"]["out"], seen["PyTorch's"]["out"]))
viz.table(
    [{"embedding": name, "(calls, bytes)": part["calls"], "the id 12": part["wrong"]} for name, part in seen.items()]
)

# %% [markdown]
# ## 11 · Recap
#
# 1. A look-up is a product with one-hot vectors, so a table cut by rows makes a sum: mask, look up, zeros, g. To every vector exactly one rank contributes.
# 2. Traffic: one all-reduce of `b·s·h` forward for the look-up, one of `b·s·h` backward (f) for the output layer, nothing for their gradients. The table itself never travels.
# 3. Memory: `v·h/p` numbers on each rank, with `v` padded to a multiple of `128·p`. Padding is never looked up, never trained, and in no checkpoint.
# 4. A mask hides every id that no rank has. Look at the ids before you look them up.
# 5. Tied: one parameter, two uses, whose gradients add up on the rank that has the row. The logits stay split, `[b, s, v/p]`; the gather is for choosing a token. Next, chapter 08 takes the loss of logits that no rank holds whole.

# %% [markdown]
# ## Your library so far
#
# It now has an embedding table that no rank holds in full, and an output layer that shares its weights.

# %%
from tplab.course import library

library(7)
