# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 08 · The vocabulary-parallel loss
#
# At each position of a text, the last layer of a GPT computes a score for every entry of the vocabulary. These scores are called **logits**, and the tensor of logits is often the largest tensor in a training step. If you gather the logits, every rank receives all of them and even stores several copies. In this chapter, you'll compute the same loss without gathering the logits. Instead of this huge tensor, the ranks will send only three numbers per position.
#
# By the end of this chapter, your library will compute the loss for GPT-2's vocabulary on two processes. You need chapters 03 and 07. About 75 minutes.

# %% tags=["setup"]
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

from tplab import device, launch, record, viz
from tplab.course import check, predict, symptoms
from tplab.tensor import gather_from_region, reduce_from_region, shard

# %% [markdown]
# ## Four logits on two ranks
#
# Your output layer from chapter 07 leaves the logits sharded, so each rank has only the logits of its own rows of the table. In this chapter, **ID** always means an entry in the vocabulary, and **token** means a position in the text. Let's look at a single token and a vocabulary with four IDs. Rank 0 has the first two logits, and rank 1 has the last two. The ID of the correct next token is called the **target**. Here, it's ID 1.

# %%
z = torch.tensor([1.0, 2.0, 3.0, 0.0])
viz.matrices({"rank 0": z[:2], "rank 1": z[2:]})

# %% [markdown]
# The loss of this token is the negative logarithm of the probability that the softmax gives to the target $t$. You can write it as a difference:
#
# $$\text{loss} \;=\; -\log \frac{e^{z_t}}{\sum_i e^{z_i}} \;=\; \log \sum_i e^{z_i} \;-\; z_t$$
#
# **Predict.** What's the least that rank 0 has to know about rank 1's two logits to compute this loss? Write "logits" (both logits), "sum" (the sum of the logits), or "exponentials" (the sum of their exponentials). Now suppose you gather all the logits instead, for 1,024 tokens and a vocabulary of 32,768 IDs in float32. How many bytes does the gathered tensor contain?

# %% predict="8.a"
predict("8.a", rank_0_needs="exponentials", gathered_bytes=134217728)

# %% [markdown] task="8.1" title="Log-sum-exp for two numbers per token" difficulty=3 minutes=14
# Write a function that computes the first term of the loss, $\log \sum_i e^{z_i}$, which is called the **log-sum-exp**. The sum includes the logits of *all* ranks. Your function has to follow these rules:
#
# - Every rank returns the same result. The result is correct for huge logits like 10,000, for very negative logits like -10,000, and for logits of -inf, as long as each token has at least one finite logit. On some ranks, all of a token's logits may be -inf. The gradient has to be correct in all of these cases, too.
#
# - In the forward pass, each rank may pass at most two numbers per token to collectives. The backward pass sends nothing.
#
# - You don't have to write a backward pass, because autograd can differentiate your function with respect to the logits.
#
# You may use `reduce_from_region` (g) and `gather_from_region` from chapter 03, and any collective from `dist`. Start with the simplest solution that you can think of, and let the check tell you what's wrong with it.


# %% exercise="8.1"
def vocab_logsumexp(logits, group=None):
    """Return the log-sum-exp of each token, [..], the same on every rank of `group`.

    logits: [.., v/p], this rank's columns
    """
    ### BEGIN SOLUTION
    m = logits.detach().amax(-1)  # [..], the largest logit on this rank
    dist.all_reduce(m, op=dist.ReduceOp.MAX, group=group)  # [..], the largest of all
    part = (logits - m.unsqueeze(-1)).exp().sum(-1)  # [..], this rank's term of the sum
    return m + reduce_from_region(part, group).log()  # [..]
    ### END SOLUTION


# %% [markdown] hints="8.1"
# 1. To sum the exponentials of all columns, each rank first sums over its own columns, and then the ranks' sums are added. Which operator adds the ranks' sums and does nothing in the backward pass? Then think about overflow, because `e⁷¹⁰` is infinite in float64. The result doesn't change if you subtract some number `m` from all logits of a token and add it back at the end. For which `m` is the largest exponent 0? And why do all ranks have to use the same `m`?
# 2. Let `m` be the token's largest logit on any rank. Each rank computes the maximum of its own columns with `logits.amax(-1)`, and `dist.all_reduce(m, op=dist.ReduceOp.MAX, group=group)` replaces it with the maximum over all ranks. Since `m` cancels out, autograd doesn't have to know about it, so use `logits.detach()`.
# 3. After you've computed `m`, compute `part = (logits - m.unsqueeze(-1)).exp().sum(-1)`, and return `m + reduce_from_region(part, group).log()`. Apply the logarithm after the sum over the ranks.

# %% check="8.1"
check("8.1", vocab_logsumexp)

# %% [markdown]
# Of course the ranks have to add up their exponentials. But why do they also have to subtract a maximum? In the next cell, two ranks compute a float32 log-sum-exp in three ways. Both ranks start from the same three logits. Each row of the table adds one number to the logits of rank 0 and another number to the logits of rank 1.


# %%
def no_maximum(z):
    return reduce_from_region(z.exp().sum(-1)).log()


def own_maximum(z):
    m = z.amax(-1)
    return m + reduce_from_region((z - m.unsqueeze(-1)).exp().sum(-1)).log()


def three_versions(offsets):
    z = torch.tensor([[0.5, 1.0, 0.0]], device=device())  # [1, v/p]
    z = z + offsets[dist.get_rank()]
    versions = no_maximum, own_maximum, vocab_logsumexp
    return [f"{version(z).item():.3f}" for version in versions]


rows = []
for offsets in ((0.0, 0.0), (0.0, 1.0), (100.0, 100.0), (0.0, 100.0)):
    # what each rank returns, in three ways
    each = launch(three_versions, 2, args=(offsets,))
    row = {"added on rank 0": offsets[0], "added on rank 1": offsets[1]}
    for name, *seen in zip(("no maximum", "own maximum", "yours"), *each, strict=True):
        row[name] = " and ".join(dict.fromkeys(seen))
    rows.append(row)
viz.table(rows)

# %% [markdown]
# If the ranks don't subtract a maximum, everything is fine until a single logit exceeds 88. At that point, its exponential is infinite in float32, and so is the loss. If each rank subtracts its *own* maximum, nothing overflows, but the result is only correct if the two maxima happen to be equal. Otherwise, the two ranks get two different results, because you can't add up exponentials that were scaled differently.
#
# So the ranks have to agree on one number $m$ per token and subtract it from all of the token's logits. The exact maximum is a convenient choice, but any number near the maximum would do. Since the result doesn't depend on $m$, autograd may treat $m$ as a constant.
#
# ## From a sum to a loss
#
# The second term of the loss is the target's logit $z_t$. Exactly one rank has this logit, so the other ranks contribute a 0, just as in your embedding in chapter 07. In total, each rank now contributes three numbers per token: its maximum, its sum of exponentials, and either the target's logit or a 0.
#
# Autograd could now compute the gradient of this loss for you, but a backward pass that you write by hand needs less memory. The gradient of the loss with respect to a logit $z_j$ is surprisingly simple:
#
# $$\frac{\partial\,\text{loss}}{\partial z_j} \;=\; \mathrm{softmax}(z)_j - \begin{cases}1 & \text{if } j = t\\ 0 & \text{otherwise}\end{cases}$$
#
# **Predict.** Take the four logits from above again, with ID 1 as the target. The gradient of the loss has four elements, two on each rank. What's the sum of all four elements? Which rank has a negative element? How many collectives does the backward pass need?

# %% predict="8.b"
predict("8.b", sum=0, negative_on=0, collectives=0)


# %% tags=["setup"]
def mine_and_column(target, columns, rank):
    """Return two tensors [..], one element per target.

    Whether the target belongs to this rank, and its column there, or 0 if it doesn't.
    """
    column = target - rank * columns
    mine = (column >= 0) & (column < columns)
    return mine, column.masked_fill(~mine, 0)


# %% [markdown] task="8.2" title="The loss and its gradient" difficulty=4 minutes=18
# Write an autograd function, as in chapter 03, that returns the loss of each token. Autograd doesn't record anything inside `forward`, so `backward` can only use tensors that you save with `ctx.save_for_backward(...)`. It gets these tensors from `ctx.saved_tensors`.
#
# - Save at most one tensor of shape `[.., v/p]`. The logits exist anyway, so saving them takes no extra memory.
#
# - The argument `dloss` `[..]` is the gradient with respect to the losses that `forward` returned. It contains one number per token. The backward pass sends nothing.
#
# - Don't write into the caller's logits or into any tensor you saved, because a second backward pass has to return the same gradient.


# %% exercise="8.2"
class VocabParallelCrossEntropy(Function):
    """apply(logits, target, group) -> the loss of each token, [..].

    It's the same on every rank of `group`.
    """

    @staticmethod
    def forward(ctx, logits, target, group):
        """
        logits: [.., v/p], this rank's columns
        target: [..], IDs of the full vocabulary, the same on every rank
        """
        ### BEGIN SOLUTION
        lse = vocab_logsumexp(logits, group)  # [..]
        mine, column = mine_and_column(target, logits.shape[-1], dist.get_rank(group))
        found = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1)  # [..]
        z_t = reduce_from_region(found.masked_fill(~mine, 0), group)  # [..]
        ctx.save_for_backward(logits, lse, mine, column)
        return lse - z_t
        ### END SOLUTION

    @staticmethod
    def backward(ctx, dloss):
        """dloss [..] -> dlogits [.., v/p], and None for target and group"""
        ### BEGIN SOLUTION
        logits, lse, mine, column = ctx.saved_tensors
        dlogits = (logits - lse.unsqueeze(-1)).exp_()  # [.., v/p], part of the softmax
        one = mine.to(dlogits.dtype)  # [..], 1 where this rank has the target, or 0
        dlogits.scatter_add_(-1, column.unsqueeze(-1), -one.unsqueeze(-1))
        return dlogits.mul_(dloss.unsqueeze(-1)), None, None
        ### END SOLUTION


# %% [markdown] hints="8.2"
# 1. In `forward`, which rank can look up the target's logit, and what do the other ranks contribute? In `backward`, write the softmax in terms of the logit `z_j` and the log-sum-exp. Does a rank still need any of these numbers from other ranks? Which rank has to subtract the 1?
# 2. `mine, column = mine_and_column(target, logits.shape[-1], dist.get_rank(group))` tells you which targets this rank has, and in which columns. `logits.gather(-1, column.unsqueeze(-1)).squeeze(-1)` looks up one column per token. If this rank doesn't have a token's target, replace the result with 0. Then add up the results of all ranks with g. Save the logits, the log-sum-exp, `mine`, and `column`. The softmax is `(logits - lse.unsqueeze(-1)).exp()`. This is a new tensor, so you may write into it.
# 3. Subtract the 1 with `dlogits.scatter_add_(-1, column.unsqueeze(-1), -mine.to(dlogits.dtype).unsqueeze(-1))`, which adds -1 where `mine` is true and 0 elsewhere. Return `dlogits * dloss.unsqueeze(-1), None, None`.

# %% check="8.2"
check("8.2", VocabParallelCrossEntropy)

# %% [markdown]
# The backward pass doesn't send a single byte! After the forward pass, every rank knows the log-sum-exp, and that's all it needs to compute its own columns of the softmax. The animation below shows how two ranks compute the loss and the gradient of a single token. The numbers come from a real run.
#
# ![An animation of one token's loss on two ranks, where a bar chart shows the five logits of each rank. First, an all-reduce computes the maximum of all ten logits. Each rank computes the exponentials of its own logits, and a second all-reduce adds the ranks' sums of exponentials. A third all-reduce sends the target's logit to both ranks, so both ranks compute the same loss. In the backward pass, each rank replaces its exponentials with its own elements of the gradient, without any communication.](pictures/loss.svg)
#
# <details><summary>All frames, one by one</summary>
#
# ![The same animation as numbered stills](pictures/loss_frames.svg)
#
# </details>
#
# ## Was it worth it?
#
# Let's compare four ways to compute the loss of 1,024 tokens. You can gather the logits and call PyTorch's loss, use your log-sum-exp and have autograd compute the gradient, use your autograd function, or use the course's version. We measure memory in shards, where one shard is the size of one rank's logits. The measurement includes these logits.

# %%
from tplab.memory import MemoryMeter
from tplab.tensor import parallel_linear_cross_entropy, vocab_parallel_cross_entropy

N, V = 1024, 32768


def gathered(logits, target):
    return F.cross_entropy(gather_from_region(logits), target)


def by_autograd(logits, target):
    mine, column = mine_and_column(target, logits.shape[-1], dist.get_rank())
    found = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0)
    return (vocab_logsumexp(logits) - reduce_from_region(found)).mean()


def by_hand(logits, target):
    return VocabParallelCrossEntropy.apply(logits, target, None).mean()


def some_targets():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(V, (N,), generator=generator).to(device())


def measure(way):
    torch.manual_seed(dist.get_rank())
    target, columns = some_targets(), V // dist.get_world_size()
    with record() as section, MemoryMeter() as meter:
        logits = torch.randn(N, columns, device=device(), requires_grad=True)
        loss = way(logits, target)
        loss.backward()
    calls = [f"{total.calls} {kind}" for kind, total in section.totals().items()]
    return {"loss": f"{loss.item():.4f}", "collectives": ", ".join(calls),
            "bytes": f"{sum(total.bytes for total in section.totals().values()):,}",
            "peak memory, in shards": f"{meter.peak / logits.nbytes:.2f}"}  # fmt: skip


ways = {"gather": gathered, "autograd": by_autograd, "yours": by_hand}
ways["tplab"] = vocab_parallel_cross_entropy
measured = {name: launch(measure, 2, args=(way,))[0] for name, way in ways.items()}
viz.table([{"p = 2": name} | row for name, row in measured.items()])

# %% [markdown]
# Your function sends 12 KB instead of 134 MB, because the size of its messages doesn't depend on the size of the vocabulary. It also needs less than half of the memory, because no rank ever stores a tensor with all the logits.
#
# If you've read the Megatron-LM paper (Shoeybi et al. 2019), you may wonder why we need three all-reduces. According to the paper, fusing the last matmul with the loss reduces the communication from $b \times s \times v$ to $b \times s$ numbers, but your function sends three times as many. There's no contradiction, because the paper only gives the order of magnitude. Megatron-LM's code sends the same three numbers per token as your function.
#
# ## The loss of a real run
#
# Before you can use your loss in a real training run, it has to handle two more cases.
#
# - **Padding.** In chapter 07, we padded the table with additional rows, so some columns of the logits don't belong to any ID. The softmax must not give these columns any probability.
#
# - **Ignored tokens.** Some tokens shouldn't count toward the loss, for example because they're part of the user's question. The target of such a token is `ignore_index`, which is -100 by default. The loss and the gradient of an ignored token are 0, and the mean loss includes only the tokens that *do* count.
#
# **Predict.** Suppose three of the eight tokens have the target `ignore_index`. What do you divide the sum of the losses by to get the mean loss? In a different run, a vocabulary of 15 IDs is padded to 16 columns, and all logits are 0. The correct loss is the logarithm of a whole number. Which number is it? What would this number be if the softmax included the padding?

# %% predict="8.c"
predict("8.c", divided_by=5, log_of=15, with_padding=16)

# %% [markdown] task="8.3" title="The loss of a real run" difficulty=3 minutes=10
# Extend your loss so that it handles padding and ignored tokens. A column is padding if its ID is `vocab_size` or more, no matter which rank it's on. `ignore_index` may be any integer, even a negative number or a number that's larger than every ID.
#
# Watch out for one trap. If a target isn't an ID at all, *no* rank has it. Then every rank contributes a 0, and you get a wrong loss without an error. So raise an `IndexError` on every rank if a target is neither an ID of the vocabulary nor `ignore_index`.


# %% exercise="8.3"
def vocab_parallel_loss(logits, target, *, vocab_size, ignore_index=-100, group=None):
    """Return the mean loss of all tokens that aren't ignored.

    It's a scalar, the same on every rank of `group`.

    logits: [.., v/p], this rank's columns, including padding
    target: [..], IDs below vocab_size, or ignore_index
    """
    ### BEGIN SOLUTION
    counted = target != ignore_index  # [..]
    target = target.masked_fill(~counted, 0)  # any ID will do for an ignored token
    outside = (target < 0) | (target >= vocab_size)  # [..]
    if outside.any():
        wrong = target[outside][0].item()
        raise IndexError(
            f"target {wrong} isn't one of the {vocab_size} IDs of the vocabulary"
        )
    start = dist.get_rank(group) * logits.shape[-1]  # this rank's first ID
    ids = torch.arange(start, start + logits.shape[-1], device=logits.device)  # [v/p]
    logits = logits.masked_fill(ids >= vocab_size, -torch.inf)  # [.., v/p]
    loss = VocabParallelCrossEntropy.apply(logits, target, group)  # [..]
    return loss.masked_fill(~counted, 0).sum() / counted.sum()
    ### END SOLUTION


# %% [markdown] hints="8.3"
# 1. Which number can you write into a padding column so that its exponential is exactly 0? To look up the logit of an ignored token's target, you need a target that exists. How do you remove this token's loss afterward? What do you divide the sum of the losses by? Compare targets with `vocab_size`, not with the number of columns.
# 2. Column `j` on rank `r` belongs to ID `r · v/p + j`. Build these IDs with `torch.arange` on the device of the logits, and use `logits.masked_fill(ids >= vocab_size, -torch.inf)`. For ignored tokens, use `target.masked_fill(~counted, 0)` before the lookup, and `loss.masked_fill(~counted, 0)` after it.
# 3. Start with `counted = target != ignore_index`. Replace ignored targets, and raise the `IndexError` if any remaining target is negative or at least `vocab_size`. After you've masked the padding, call `VocabParallelCrossEntropy.apply(logits, target, group)`, and return `loss.masked_fill(~counted, 0).sum() / counted.sum()`.

# %% check="8.3"
check("8.3", vocab_parallel_loss)

# %% [markdown]
# ## Train with it
#
# The model below reads eight bytes of Python code and predicts the next byte. To compute the logits of the 256 possible bytes, the model uses the same table as for its embedding. On four ranks, this table is padded from 256 to 512 rows, so two of the ranks hold nothing but padding.

# %%
from tplab.common import corpus
from tplab.tensor import VocabParallelEmbedding, load_full_state_dict, parallel_logits

CONTEXT, HIDDEN, BATCH, STEPS = 8, 48, 128, 80
text = corpus.python_sources(300_000)


def options():
    return {"device": device(), "dtype": torch.float64}


class NextByte(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.mix = nn.Linear(CONTEXT * HIDDEN, HIDDEN, **options())

    def forward(self, context):  # [b, 8] -> [b, h], to be multiplied with the table
        return torch.tanh(self.mix(self.embedding(context).flatten(1)))


def train(model, loss_of):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for inputs, targets in corpus.byte_batches(text, CONTEXT, BATCH, STEPS, seed=1):
        loss = loss_of(model(inputs.to(device())), targets[:, -1].to(device()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


torch.manual_seed(0)
plain = NextByte(nn.Embedding(corpus.VOCABULARY, HIDDEN, **options()))
nn.init.normal_(plain.embedding.weight, std=0.1)  # small logits in the beginning
start = {name: value.cpu().clone() for name, value in plain.state_dict().items()}


def plain_loss(x, target):
    return F.cross_entropy(x @ plain.embedding.weight.T, target)


plain_losses = train(plain, plain_loss)


def train_on_ranks(loss_function):
    torch.set_num_threads(1)
    model = NextByte(VocabParallelEmbedding(corpus.VOCABULARY, HIDDEN, **options()))
    load_full_state_dict(model, start)  # each rank takes its rows

    def loss_of(x, target):
        return loss_function(parallel_logits(x, model.embedding.weight), target)

    return train(model, loss_of)


def my_loss(logits, target):
    return vocab_parallel_loss(logits, target, vocab_size=corpus.VOCABULARY)


runs = {p: launch(train_on_ranks, p, args=(my_loss,))[0] for p in (1, 2, 4)}
every = {"plain PyTorch": plain_losses}
every |= {f"yours, p = {p}": losses for p, losses in runs.items()}
viz.table([{"run": name, "first loss": f"{losses[0]:.6f}",
            "last loss": f"{losses[-1]:.6f}"} for name, losses in every.items()],
          title=f"ln 256 = {math.log(256):.4f}")  # fmt: skip

# %% [markdown]
# The first loss of a training run is the cheapest test there is. A model that hasn't learned anything gives all 256 bytes about the same probability, so its loss has to be close to $\ln 256 = 5.545$. You should compute this number for every model you train, because you can recognize some bugs by the first loss.
#
# **Predict.** A colleague trains the same model, but calls `VocabParallelCrossEntropy` directly. On one rank, your colleague's first loss is 5.515, just like yours. But on two ranks, the first loss is 6.208, and on four ranks, it's 6.901. Which logits does your colleague pass to the function? Write "gathered" (all 256 logits, on every rank), "padded" (this rank's columns, without masking the padding), or "scaled" (logits that were multiplied by the number of ranks).

# %% predict="8.d"
predict("8.d", they_pass="gathered")


# %%
def all_logits_everywhere(logits, target):
    full = gather_from_region(logits)[..., : corpus.VOCABULARY]  # [b, 256]
    return VocabParallelCrossEntropy.apply(full, target, None).mean()


args = (all_logits_everywhere,)
first = {p: launch(train_on_ranks, p, args=args)[0][0] for p in (1, 2, 4)}
viz.table([{"p": p, "first loss": f"{loss:.3f}",
            "more than with p = 1": f"{loss - first[1]:.3f}",
            "ln p": f"{math.log(p):.3f}"} for p, loss in first.items()])  # fmt: skip

# %% [markdown]
# If every rank passes all the logits, every rank adds the same exponentials to the sum. So the sum of the exponentials is $p$ times too large, and the loss is $\ln p$ too high. In Megatron-LM, you get this wrong loss if you build a `GPTModel` with `parallel_output=False` and pass labels to it (issue 7452, open since September 2026).
#
# ## Break it
#
# What if the backward pass forgets that only one rank has the target? In the version below, each rank subtracts a 1 in some column.
#
# **Predict.** With this bug, is the loss of the very first step correct? (Write `True` or `False`.) If you add up all the elements of a token's gradient on two ranks, what's the sum? (Write a number.)

# %% predict="8.e"
predict("8.e", first_loss=True, sum=-1)


# %%
class OneOnEveryRank(VocabParallelCrossEntropy):
    @staticmethod
    def forward(ctx, logits, target, group):
        ctx.save_for_backward(logits, target, vocab_logsumexp(logits))
        with torch.no_grad():
            return VocabParallelCrossEntropy.apply(logits, target, group)

    @staticmethod
    def backward(ctx, dloss):
        logits, target, lse = ctx.saved_tensors
        dlogits = (logits - lse.unsqueeze(-1)).exp()
        # the right column on one rank, and an unrelated column on the others
        column = target % logits.shape[-1]
        dlogits[torch.arange(len(target), device=target.device), column] -= 1
        return dlogits * dloss.unsqueeze(-1), None, None


def broken_loss(logits, target):
    return OneOnEveryRank.apply(logits, target, None).mean()


broken = launch(train_on_ranks, 2, args=(broken_loss,))[0]
runs = {"plain PyTorch": plain_losses, "1 subtracted on every rank": broken}
viz.curves(runs, title="the loss on two ranks")

# %% [markdown]
# The loss falls at first, and then it slowly rises again, as if the learning rate were too high. But the real reason is that on two ranks, each training step raises two logits per token. One belongs to the target, but the other belongs to an unrelated ID. Such a gradient can never become zero, because its elements don't add up to zero.
#
# ## Fix it
#
# **Label smoothing** keeps a model from becoming too confident. The model should give the target a probability of only $1 - ε$, and the other $v - 1$ IDs should share the remaining probability equally. Megatron-LM computes this loss from the average log-probability of all IDs and from a slightly larger $ε$:
#
# $$(1 - ε')\,\text{loss} \;-\; \frac{ε'}{v} \sum_i \log \mathrm{softmax}(z)_i, \qquad ε' = ε\,\frac{v}{v - 1}$$
#
# In March 2024, a user noticed that with this code, the ranks could compute different losses (NVIDIA/Megatron-LM issue 737). In June 2026, a maintainer confirmed the bug and added that Megatron-LM itself never calls its loss with label smoothing. In September 2026, another user reported the same bug and measured how wrong the losses were (issue 7464). When we wrote this chapter, none of the proposed fixes had been merged, and the latest one was still open (pull request 7466). The function in the next cell contains the same bug.


# %%
def as_shipped(logits, target, label_smoothing):
    loss = VocabParallelCrossEntropy.apply(logits, target, None)  # [n]
    vocab_size = logits.shape[-1]
    smoothing = label_smoothing * vocab_size / (vocab_size - 1)
    log_probs = logits - vocab_logsumexp(logits).unsqueeze(-1)  # [n, v/p]
    mean_log_probs = log_probs.mean(-1)  # [n]
    return ((1 - smoothing) * loss - smoothing * mean_log_probs).mean()


def smoothed(loss_function, logits, target):
    mine = shard(logits, -1, dist.get_rank(), dist.get_world_size()).to(device())
    return f"{loss_function(mine, target.to(device()), 0.1).item():.4f}"


def compare(loss_function, logits, target):
    args = (loss_function, logits, target)
    losses = {p: ", ".join(launch(smoothed, p, args=args)) for p in (1, 2, 4)}
    return viz.table([{"p": p, "loss on each rank": losses[p]} for p in losses])


generator = torch.Generator().manual_seed(7)
logits = torch.randn(6, 8, generator=generator, dtype=torch.float64)  # [n, v]
target = torch.randint(8, (6,), generator=generator)
compare(as_shipped, logits, target)

# %% [markdown]
# You don't need to know the correct loss to see that something is wrong. On two ranks, you get two different losses for the same tokens, and on four ranks, you get four. That can't be right.
#
# **Predict.** Would you have noticed this bug in the first loss of a training run? Suppose all logits are 0. Do the ranks agree on the loss, and is the loss correct? (Write `True` or `False` for each question.)

# %% predict="8.f"
predict("8.f", ranks_agree=True, correct=True)

# %% [markdown] task="8.4" title="Fix label smoothing" difficulty=4 minutes=10
# Fix the three lines that compute `smoothing`, `log_probs`, and `mean_log_probs`, so that the loss and its gradient are correct on any number of ranks. In the forward pass, you may send one more number per token. The backward pass still sends nothing. The vocabulary has `vocab_size` IDs, and all other columns are padding. Don't be surprised if your loss is correct at first but your gradient isn't.


# %% exercise="8.4"
def smoothed_loss(logits, target, label_smoothing, *, vocab_size, group=None):
    """Return the mean loss with label smoothing.

    It's a scalar, the same on every rank of `group`.

    logits: [.., v/p], this rank's columns, including padding
    target: [..], IDs below vocab_size
    """
    start = dist.get_rank(group) * logits.shape[-1]
    ids = torch.arange(start, start + logits.shape[-1], device=logits.device)  # [v/p]
    padding = ids >= vocab_size  # [v/p]
    logits = logits.masked_fill(padding, -torch.inf)
    loss = VocabParallelCrossEntropy.apply(logits, target, group)  # [..]
    lse = vocab_logsumexp(logits, group)  # [..]
    ### BEGIN SOLUTION
    smoothing = label_smoothing * vocab_size / (vocab_size - 1)
    total = reduce_from_region(logits.masked_fill(padding, 0).sum(-1), group)  # [..]
    mean_log_probs = total / vocab_size - lse  # [..]
    ### BROKEN
    # smoothing = label_smoothing * logits.shape[-1] / (logits.shape[-1] - 1)
    # log_probs = logits - lse.unsqueeze(-1)  # [.., v/p]
    # mean_log_probs = log_probs.mean(-1)  # [..]
    ### END SOLUTION
    return ((1 - smoothing) * loss - smoothing * mean_log_probs).mean()


# %% [markdown] hints="8.4"
# 1. Is `logits.shape[-1]` the number of IDs in the vocabulary? Over which IDs does `log_probs.mean(-1)` average, and over which IDs should it average? To average over the right IDs, what does a rank need from the other ranks for each token? If your gradient is wrong, remember that every rank subtracts the same log-sum-exp from its own logits. In the backward pass, each rank computes only its own contribution to the gradient of the log-sum-exp. Could you subtract the log-sum-exp *after* the sum over all ranks instead?
# 2. The average of the log-probabilities is the average of the logits minus the log-sum-exp. So use g to add up the logits of all ranks, divide the sum by `vocab_size`, and then subtract `lse`. In the padding columns, the logits are -inf. What should these columns contribute to the sum?
# 3. Use `vocab_size` in the first line. Compute `total = reduce_from_region(logits.masked_fill(padding, 0).sum(-1), group)`, and then `mean_log_probs = total / vocab_size - lse`.

# %% check="8.4"
check("8.4", smoothed_loss)

# %%
compare(lambda *given: smoothed_loss(*given, vocab_size=8), logits, target)

# %% [markdown]
# With your fix, all rows of the table are the same. The price is one more number per token in the forward pass.
#
# Did you get a wrong gradient along the way? Suppose each rank subtracts the log-sum-exp from its own logits *before* the sum over the ranks. Then each rank gets only the contribution of its own columns to the gradient of the log-sum-exp. In exercise 6.5, each copy of a weight had the same problem. If you passed the log-sum-exp through f, these contributions would be added up, but the backward pass would have to send a message. If you subtract the log-sum-exp *after* the sum instead, the gradient is correct without a message.
#
# The first loss of a training run wouldn't have revealed this bug. If all logits are equal, every average over IDs is the same, no matter which IDs it includes. So compare the losses across ranks, and not just in the first step.

# %%
symptoms(8)

# %% [markdown]
# ## In the wild
#
# <details><summary>Going deeper: two messages, GRPO, overwritten logits, and no logits at all</summary>
#
# - **Two messages are enough.** Both the sum of the exponentials and the target's logit are summed over the ranks, so you can put them in the same message. And if you only need the mean loss, you don't have to send $z_t - m$, the target's logit minus the maximum, for each token. Its sum over all tokens is enough. That's why `tplab` sends only $2n + 1$ numbers for $n$ tokens in the table above. Megatron-Core's fused version, `megatron/core/fusions/fused_cross_entropy.py`, sends the sum of the exponentials and the target's logit in a single message.
#
# - **Megatron-Core** (`megatron/core/tensor_parallel/cross_entropy.py`) saves memory by overwriting the logits, if they're in float32. It first overwrites them with their exponentials and then with the gradient. This saves the memory of an entire shard, but the caller no longer has the logits. In May 2025, somebody proposed copying the logits first (pull request 1594, still open). The function doesn't raise an error if a target isn't in the vocabulary.
#
# - **Reinforcement learning** needs the log-probability of each token, which is the negative of your loss. Until August 2026, the training library ms-swift summed the ranks' contributions with a plain `all_reduce`, which autograd doesn't know about. The log-probabilities were correct. But if a rank didn't have a token's target, it computed a wrong gradient, which was sometimes zero. Now ms-swift calls Megatron-Core's loss, which has a handwritten backward pass (ms-swift pull request 9947).
#
# - **PyTorch** has a context manager for parallel losses, `loss_parallel` in `torch.distributed.tensor.parallel`. Inside this context, `F.cross_entropy` accepts logits that are sharded along the vocabulary.
#
# - **No logits at all.** Only the loss ever reads the logits, so you never need all of them at the same time. You can compute the logits, the loss, and the gradient of a few tokens, discard their logits, and continue with the next few tokens. Megatron-Core has a kernel for this method on its `dev` branch (pull request 2256), and since September 2026, Liger Kernel has a kernel that works across ranks (pull requests 1422 and 1428). The next cell measures how much memory the output layer and the loss need together, including the logits.
#
# </details>


# %%
def output_layer_and_loss(way):
    rows = V // dist.get_world_size()
    x = torch.randn(N, 64, device=device(), requires_grad=True)  # [n, h]
    weight = torch.randn(rows, 64, device=device()).mul_(0.1)  # [v/p, h]
    weight.requires_grad_()
    target = some_targets()
    with MemoryMeter() as meter:
        way(x, weight, target).backward()
    return f"{meter.peak / 1e6:.0f} MB"


def some_at_a_time(x, weight, target):
    return parallel_linear_cross_entropy(x, weight, target, tokens_at_once=128)


ways = {
    "gathered logits": lambda x, w, target: gathered(parallel_logits(x, w), target),
    "your loss": lambda x, w, target: by_hand(parallel_logits(x, w), target),
    "128 tokens at a time": some_at_a_time,
}
peaks = {n: launch(output_layer_and_loss, 2, args=(way,))[0] for n, way in ways.items()}
viz.table([{"p = 2": name, "peak memory": peak} for name, peak in peaks.items()])

# %% [markdown]
# ## Your library so far
#
# Your library can now compute a loss even though no rank ever has all the logits. The table below ends with a command that computes the loss for GPT-2's vocabulary of 50,257 IDs on two processes, without the notebook.

# %%
from tplab.course import library

library(8)

# %% [markdown]
# Your loss is the same on 1, 2, and 4 ranks. But suppose that the model uses dropout, and two ranks drop different elements of a tensor that should be the same on both. The two ranks would still report the same loss, because they compute it from the same all-reduced numbers. And yet, they would no longer train the same model. Which random numbers may differ between ranks, and which ones have to be the same?
