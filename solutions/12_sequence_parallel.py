# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 12 · Sequence parallel
#
# You've split every large matrix of your GPT, and yet every rank still saves the full input of each layer. Between the matmuls, all ranks hold the same activations and do the same work. On 8 GPUs, these activations are almost half of what a layer of GPT-3 saves for the backward pass, and adding GPUs won't make them any smaller. Could each rank do just its share? Yes, and the trick is to stop every all-reduce halfway. Everybody says that this costs no extra communication. We'll see.
#
# By the end of this chapter, you'll have trained a small GPT whose activations are sharded everywhere, even where they used to be replicated. You need chapters 01, 03, 09, and 10. About 75 minutes.

# %% tags=["setup"]
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

from tplab import collectives, device, launch, memory, record, viz
from tplab.common import corpus
from tplab.course import check, predict, symptoms
from tplab.memory import saved_for_backward
from tplab.sequence import gather_from_sequence_region, gather_linear_again, reduce_scatter_to_sequence_region
from tplab.sequence.examples import MLP, Attention, TensorParallelBlock
from tplab.tensor import dropout, load_full_state_dict, seed_all, shard

# %% [markdown]
# ## Time for a break
#
# Two ranks have just multiplied by their halves of an MLP's second weight. There are two tokens with one feature each. Rank 0 has the terms 1 and 2, and rank 1 has the terms 10 and 20. Now g adds them up, so both ranks get 11 and 22. Then both ranks add the bias, apply dropout, add the residual, and normalize. They do exactly the same work on exactly the same numbers, and both of them save the results for the backward pass.
#
# How does g get there? In chapter 01, you built an all-reduce from two halves. After the **reduce-scatter**, rank 0 has finished token 0, whose sum is 11, and rank 1 has finished token 1, whose sum is 22. Then the **all-gather** copies the finished sums to every rank. So in the middle of every all-reduce, there's a moment when each token is finished on exactly one rank.
#
# Bias, dropout, residual, and norm treat each token on its own. So let's take a break at this moment! Each rank does all of this work for its own tokens only, and the second half of the all-reduce waits until the next matmul needs all the tokens. This is called **sequence parallelism** (Korthikanti et al. 2022).
#
# **Predict.** Four ranks have terms of a tensor with $b = 2$, $s = 16$, and $h = 32$ in float32. How many bytes does each rank send in a ring all-reduce? How many bytes does it send if it does other work between the reduce-scatter and the all-gather?

# %% predict="12.a"
predict("12.a", all_reduce=6144, gather_and_scatter=6144)


# %%
def between_two_matmuls(take_a_break):
    torch.manual_seed(dist.get_rank())
    term = torch.randn(16, 2, 32).to(device())  # [s, b, h], so that a rank's tokens are contiguous
    with record() as section:
        y = collectives.ring_reduce_scatter(term)  # [s/p, b, h]
        if not take_a_break:
            y = collectives.ring_all_gather(y)  # [s, b, h]
        out = F.layer_norm(y + 0.5, (32,))  # add a bias, and normalize
        if take_a_break:
            out = collectives.ring_all_gather(out)  # [s, b, h]
    sent = section.totals()["send"].bytes
    return {"out": out, "tokens that a rank normalizes": y.shape[0] * y.shape[1], "bytes that it sends": sent}


runs = {answer: launch(between_two_matmuls, 4, args=(answer == "yes",))[0] for answer in ("no", "yes")}
print("the same output:", torch.equal(*(run.pop("out") for run in runs.values())))
viz.table([{"a break": answer} | run for answer, run in runs.items()])

# %% [markdown]
# The next picture shows the break in a real run. Watch the small squares on the right.
#
# ![An animation with four ranks and four tokens. Three steps of a reduce-scatter finish one token on each rank. Then everything stops. Each rank applies bias, dropout, residual and norm to one token, and it saves one token instead of four. Three steps of an all-gather bring all tokens to every rank. The counter of bytes sent ends at the same number as that of an all-reduce without a break.](pictures/pause.svg)
#
# <details><summary>All frames, one by one</summary>
#
# ![The same animation as numbered stills](pictures/pause_frames.svg)
#
# </details>
#
# Now it's your turn to take f and g apart. Here's a block as you know it from chapter 10. Its `inner` is either attention or an MLP. It needs all tokens and returns this rank's *term* of the output, without the final bias.
#
# ```python
# def forward(self, x, rng=None):          # x [b, s, h], the same on every rank
#     y = self.norm(x)
#     y = copy_to_region(y, self.group)    # f
#     y = self.inner(y, rng)               # [b, s, h], a term
#     y = reduce_from_region(y, self.group)  # g
#     y = y + self.bias
#     y = dropout(y, self.hidden_dropout, self.training, sharded=False, rng=rng)
#     return x + y
# ```

# %% [markdown] task="12.1" title="Take f and g apart" difficulty=3 minutes=15
# Write `forward` for a block that receives only this rank's tokens and returns only this rank's tokens. In place of f and g, you have two other operators:
#
# - `gather_from_sequence_region(x, group)` collects the tokens of all ranks: [b, s/p, h] → [b, s, h].
#
# - `reduce_scatter_to_sequence_region(x, group)` sums the terms from all the ranks, and returns this rank's slice of the tokens: [b, s, h] → [b, s/p, h].
#
# You decide where they go, and which lines work on all the tokens. Also think about dropout. With `sharded=True`, every rank draws from a stream of its own, and with `sharded=False`, all ranks draw the same mask (chapter 09). The check compares values and gradients with plain PyTorch. It also counts the bytes that you send, and the full tensors `[b, s, h]` that your block saves for the backward pass, besides those that `inner` needs.


# %% exercise="12.1"
class SequenceParallelBlock(TensorParallelBlock):
    """A block between whose matmuls each rank has only its own tokens: x [b, s/p, h] -> [b, s/p, h]."""

    def forward(self, x, rng=None):
        """x [b, s/p, h], this rank's tokens -> [b, s/p, h], this rank's tokens."""
        ### BEGIN SOLUTION
        y = self.norm(x)  # [b, s/p, h]
        y = gather_from_sequence_region(y, self.group)  # [b, s, h]
        y = self.inner(y, rng)  # [b, s, h], a term
        y = reduce_scatter_to_sequence_region(y, self.group)  # [b, s/p, h]
        y = y + self.bias
        y = dropout(y, self.hidden_dropout, self.training, sharded=True, rng=rng)
        return x + y  # [b, s/p, h]
        ### END SOLUTION


# %% [markdown] hints="12.1"
# 1. Go through the eight lines of the block above. Next to each line, write down whether it could work on a single token, or whether it needs all of them. Where do all the tokens have to be together, and where can the ranks part ways again?
# 2. Only `inner` needs all the tokens, so gather right before it, and reduce-scatter right after it. Every rank has the bias and its own part of the residual, so you have to add them after the sum. After the reduce-scatter, no other rank has the same tokens. So should two ranks draw the same mask?
# 3. Norm, `gather_from_sequence_region(y, self.group)`, `self.inner(y, rng)`, `reduce_scatter_to_sequence_region(y, self.group)`, bias, `dropout(y, self.hidden_dropout, self.training, sharded=True, rng=rng)`, and finally `x + y`.

# %% check="12.1"
check("12.1", SequenceParallelBlock)

# %% [markdown]
# Did you gather before the norm at first? All the values would be right, but each rank would keep a full tensor that it doesn't need. That's the treacherous part of this chapter. Most mistakes in it don't produce an error, and some don't even produce a wrong number.
#
# ## The pair
#
# You've used two operators that came ready-made. What do they do in the backward pass? The operators f and g each had one pass in which they sent nothing. These two send something in both.

# %% [markdown] task="12.2" title="Gather and reduce-scatter" difficulty=3 minutes=12
# Write both operators. The tokens are dimension 1 of `x`, which may have any number of dimensions after that.
#
# - `dist.all_gather(parts, x)` fills a list of `p` tensors, one from each rank. `dist.reduce_scatter(total, parts)` takes a list of `p` tensors, one *for* each rank, and writes the sum of all the tensors for this rank into `total`.
#
# - Collectives send elements in the order in which they're stored, so give them contiguous tensors. The tokens of one rank aren't contiguous if $b > 1$, and a gradient can have any memory layout.
#
# - Don't change `x` or `grad_output`.
#
# There are four methods, but only two different things to do. Decide which method does which.


# %% exercise="12.2"
class GatherFromSequence(Function):
    """x [b, s/p, ..], this rank's tokens -> y [b, s, ..], all tokens, on every rank."""

    @staticmethod
    def forward(ctx, x):
        """x [b, s/p, ..] -> [b, s, ..]: the tokens of all ranks, in the order of the ranks."""
        ### BEGIN SOLUTION
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]  # p times [b, s/p, ..]
        dist.all_gather(parts, x)
        return torch.cat(parts, dim=1)  # [b, s, ..]
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad_output):
        """grad_output [b, s, ..] -> dx [b, s/p, ..]. Each rank has used y for its own heads or columns."""
        ### BEGIN SOLUTION
        return ReduceScatterToSequence.apply(grad_output)
        ### END SOLUTION


class ReduceScatterToSequence(Function):
    """x [b, s, ..], this rank's term -> y [b, s/p, ..], this rank's tokens of the sum over all ranks."""

    @staticmethod
    def forward(ctx, x):
        """x [b, s, ..] -> [b, s/p, ..]: this rank's tokens of the sum."""
        ### BEGIN SOLUTION
        parts = [part.contiguous() for part in x.chunk(dist.get_world_size(), dim=1)]  # p times [b, s/p, ..]
        total = torch.empty_like(parts[0])
        dist.reduce_scatter(total, parts)
        return total  # [b, s/p, ..]
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad_output):
        """grad_output [b, s/p, ..], the gradient of this rank's tokens -> dx [b, s, ..]."""
        ### BEGIN SOLUTION
        return GatherFromSequence.apply(grad_output)
        ### END SOLUTION


# %% [markdown] hints="12.2"
# 1. Start with the two forward methods. Then ask the questions from exercise 3.1 about each backward method: whose outputs depend on this rank's x, and does this rank already have all of their gradients? For example, every rank multiplies the gathered tokens by its own columns of a weight.
# 2. In the backward pass of the gather, each rank has one term of the gradient for all the tokens, but needs the sum for its own tokens. Which of the two forward methods computes exactly that? In the backward pass of the reduce-scatter, this rank's term went into the sums of all tokens, and each rank has the gradient for its own tokens. Which forward method collects them?
# 3. Gather: `parts = [torch.empty_like(x) for _ in range(p)]` with a contiguous `x`, `dist.all_gather(parts, x)`, and `torch.cat(parts, dim=1)`. Reduce-scatter: `parts = [part.contiguous() for part in x.chunk(p, dim=1)]`, `total = torch.empty_like(parts[0])`, `dist.reduce_scatter(total, parts)`, and return `total`. Each backward method returns `.apply(grad_output)` of the other class.

# %% check="12.2"
check("12.2", GatherFromSequence, ReduceScatterToSequence)

# %% [markdown]
# So each operator is the backward pass of the other one. An all-reduce in the forward pass has become a reduce-scatter and an all-gather, and so has an all-reduce in the backward pass. That's why the traffic stays the same.
#
# ## Whose gradient is it?
#
# Now for the part that people forget. Take the final bias, which a block adds to each of its tokens. Its gradient is the sum of the upstream gradients of all these tokens.
#
# **Predict.** There are four tokens with one feature, and their upstream gradients are 1, 2, 3, and 4. Rank 0 has the first two tokens, and rank 1 has the other two. What's the gradient of the bias on each rank? The bias is 0 on both ranks, and then they take a step of SGD with a learning rate of 0.1. What's the bias on each rank after the step? (Write pairs, with rank 0 first.)

# %% predict="12.b"
predict("12.b", gradients=(3, 7), biases=(-0.3, -0.7))

# %% [markdown]
# A single process would have the gradient 10, and a bias of -1. Our two ranks have neither, and what used to be two copies of one bias are now two different biases. So after each backward pass, we have to add up the gradients of such parameters across ranks. But of which ones, exactly?
#
# Here's a model to find out. In addition to a block of attention, it has a table of positions. And like many newer models, such as Qwen3, it normalizes every query and every key. The weights of these two norms have one element per dimension of a head, and all heads share them.
#
# ```python
# def forward(self, x):                     # x [b, s, h], the same on every rank
#     x = x + self.positions                # [s, h]
#     x = scatter_to_sequence_region(x)     # this rank's tokens [b, s/p, h]
#     y = self.norm(x)
#     y = gather_from_sequence_region(y)    # [b, s, h]
#     q, k, v = self.attention.qkv(y)       # this rank's heads, [b, a/p, s, d] each
#     q, k = self.attention.q_norm(q), self.attention.k_norm(k)
#     y = self.attention.out(attend(q, k, v))   # [b, s, h], a term
#     y = reduce_scatter_to_sequence_region(y)  # [b, s/p, h]
#     return x + y + self.bias
# ```
#
# In the backward pass, `scatter_to_sequence_region` gathers the gradients of all the tokens.

# %% [markdown] task="12.3" title="Which gradients are only a part?" difficulty=3 minutes=15
# The model has nine parameters. The weight and the bias of `attention.qkv` and the weight of `attention.out` are shards, and every rank has its own copy of the others.
#
# - `partial_gradients` returns the names of the parameters whose gradient on a rank is only one term of a sum over the ranks.
#
# - `allreduce_sequence_gradients` computes such sums. In its `module`, `param.sequence_parallel` is True for the parameters that need one. For all others, it's False or missing. The tensors are small, and every message has its latency, so use **one** all-reduce for all of them. If a gradient is None, leave it alone. A gradient may be transposed in memory.
#
# The check runs the model with your names, and then compares all nine gradients with plain PyTorch. It also tries your second function on other modules.


# %% exercise="12.3"
def partial_gradients():
    """Return a set of those of the nine names whose gradient on each rank is only a part of a sum.

    positions, norm.weight, norm.bias, attention.qkv.weight, attention.qkv.bias, attention.q_norm.weight,
    attention.k_norm.weight, attention.out.weight, bias
    """
    ### BEGIN SOLUTION
    return {"norm.weight", "norm.bias", "attention.q_norm.weight", "attention.k_norm.weight", "bias"}
    ### END SOLUTION


def allreduce_sequence_gradients(module, group=None):
    """Replace the gradient of each parameter that's marked `sequence_parallel` by its sum over the ranks of `group`.

    One all-reduce. Nothing is returned: the sums are in param.grad.
    """
    ### BEGIN SOLUTION
    marked = [param for param in module.parameters() if getattr(param, "sequence_parallel", False)]
    gradients = [param.grad for param in marked if param.grad is not None]
    total = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(total, group=group)
    parts = total.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
    ### END SOLUTION


# %% [markdown] hints="12.3"
# 1. For each parameter, ask which tokens and which heads it's used for on a rank. If it's used for all of them on every rank, its gradient is complete. Suppose a rank uses it for some of the tokens or heads only, and another rank uses its own copy for the others. Then each rank's gradient is only a part of the sum. For the sum, which list of tensors do you concatenate, and how does each part of the result get back to its place?
# 2. Norm and bias are used between the operators, on this rank's tokens only. The positions are added before the scatter, to all tokens. The norms of queries and keys see all the tokens, but of how many heads? For the sum, concatenate the flattened gradients with `torch.cat`, call `dist.all_reduce` once, `split` the result, and copy each part back with `copy_`.
# 3. The names are `norm.weight`, `norm.bias`, `bias`, and the weights of both `q_norm` and `k_norm`. Let `gradients = [p.grad for p in module.parameters() if getattr(p, "sequence_parallel", False) and p.grad is not None]` and `total = torch.cat([g.flatten() for g in gradients])`. After `dist.all_reduce(total, group=group)`, let `parts = total.split([g.numel() for g in gradients])`, and run `g.copy_(part.view_as(g))` for each `g` and `part` in `zip(gradients, parts)`.

# %% check="12.3"
check("12.3", partial_gradients, allreduce_sequence_gradients)

# %% [markdown]
# The norm and the bias see this rank's tokens only, so it's no surprise that their gradients are parts. The norms of the queries and keys are trickier. They see *all* the tokens, but only this rank's heads. So their gradients have to be summed even if you never split the sequence at all!
#
# People really forget this sum. In August 2026, a user of NVIDIA's NeMo RL found a training path that skipped it, and described the result as "no crash, no NaN, pure drift" (NVIDIA-NeMo/RL issue 3716, still open when we looked in fall 2026). GPT-NeoX had hooks that were supposed to compute the sum. At first, they never ran, and what they would have computed was a mean (EleutherAI/gpt-neox pull requests 1257 and 1259, August 2024).

# %% [markdown]
# ## Train it
#
# Let's train a small GPT on Python code. It's made of your blocks, and its attention normalizes queries and keys. Each rank embeds its own tokens, adds their positions, and computes their logits and their part of the loss. So in this model, every replicated parameter meets only a part, *including* the positions and the embedding, and `train` marks all of them.

# %%
CONTEXT, BATCH, STEPS, HIDDEN = 32, 8, 40, 64
text = corpus.python_sources(6000)[3000:]


class ByteGPT(nn.Module):
    """This rank's tokens [b, s/p], at these positions [s/p] -> logits [b, s/p, 256]."""

    def __init__(self, block_class):
        super().__init__()
        place = {"device": device(), "dtype": torch.float64}
        self.embedding, self.positions = nn.Embedding(256, HIDDEN, **place), nn.Embedding(CONTEXT, HIDDEN, **place)
        self.blocks = nn.ModuleList()
        for _ in range(2):
            for inner in (Attention(HIDDEN, 4, qk_norm=True, **place), MLP(HIDDEN, **place)):
                self.blocks.append(block_class(HIDDEN, inner, **place))
        self.norm, self.head = nn.LayerNorm(HIDDEN, **place), nn.Linear(HIDDEN, 256, **place)

    def forward(self, ids, positions):
        x = self.embedding(ids) + self.positions(positions)  # [b, s/p, h]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # [b, s/p, 256]


def train(block_class, add_up, start):
    torch.set_num_threads(1)
    rank, p = dist.get_rank(), dist.get_world_size()
    model = ByteGPT(block_class)
    load_full_state_dict(model, start)
    for param in model.parameters():
        param.sequence_parallel = not hasattr(param, "tensor_parallel")
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.0), []
    for batch in corpus.byte_batches(text, CONTEXT, BATCH, STEPS, seed=1):
        ids, targets = (shard(each.to(device()), 1, rank, p) for each in batch)  # [b, s/p]
        logits = model(ids, shard(torch.arange(CONTEXT, device=device()), 0, rank, p))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (BATCH * CONTEXT)
        optimizer.zero_grad()
        loss.backward()
        add_up(model)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)  # each rank has the loss of its own tokens
        losses.append(total.item())
    copies = torch.cat([param.detach().flatten() for param in model.parameters() if param.sequence_parallel])
    lowest, highest = copies.clone(), copies
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return {"losses": losses, "drift": (highest - lowest).max().item()}


def first_weights():
    torch.manual_seed(0)
    return ByteGPT(TensorParallelBlock).state_dict()


start = launch(first_weights, 1)[0]
plain = launch(train, 1, args=(TensorParallelBlock, lambda model: None, start))[0]
mine = launch(train, 2, args=(SequenceParallelBlock, allreduce_sequence_gradients, start))[0]
viz.curves({"single process": plain["losses"], "your blocks, p = 2": mine["losses"]}, title=f"{STEPS} steps on bytes")

# %%
apart = max(abs(a - b) for a, b in zip(plain["losses"], mine["losses"], strict=True))
print(f"largest difference between the two losses: {apart:.0e}; ranks apart by {mine['drift']:.0e}")

# %% [markdown]
# ## The bill
#
# So how much memory did we gain? In chapter 00, you worked out what a layer saves for the backward pass in 16 bits: $34 + 5as/h$ bytes per element of $[b, s, h]$. Tensor parallelism divides everything that belongs to heads or columns by $p$, which is 24 of the 34 bytes and all of the $5as/h$ for the attention scores. The other 10 bytes, for the inputs of norms and matmuls and for the masks of the hidden dropout, are what this chapter is about.
#
# **Predict.** For GPT-3, $5as/h = 80$. With $p = 8$, how many bytes per element does each rank save with tensor parallelism alone? How many does it save if the 10 bytes are divided by 8 as well? And how many if it also recomputes the attention scores in the backward pass instead of saving them?

# %% predict="12.c"
predict("12.c", tensor_parallel=23, and_sequence=14.25, and_selective=4.25)

# %% tags=["explore"]
GPT3 = memory.PRESETS["GPT-3 175B"]
BETWEEN = ("norm", "dropout mask", "input of Q, K and V", "input of the MLP")


def part(name):
    if name == "attention scores":
        return name
    return "between the matmuls" if any(word in name for word in BETWEEN) else "inside attention and MLP"


def show_layer(p, sequence_parallel):
    bars = {}
    for title, recompute in (("nothing recomputed", "nothing"), ("scores recomputed", "attention")):
        bars[title] = dict.fromkeys(("attention scores", "inside attention and MLP", "between the matmuls"), 0)
        kept = memory.layer_activations(GPT3, tp=p, sequence_parallel=sequence_parallel, recompute=recompute)
        for name, size in kept.items():
            bars[title][part(name)] += size
    scale = sum(memory.layer_activations(GPT3).values())
    return viz.saved_activations(bars, scale=scale, title=f"a layer of GPT-3 on each of p = {p} ranks: bytes saved")


viz.explore(show_layer, p=(1, 2, 4, 8, 16), sequence_parallel=(False, True), start={"p": 8})

# %% [markdown]
# That's the theory. Now let's measure a layer made of *your* blocks, and find the catch.


# %%
class GatherAgain(SequenceParallelBlock):
    """The same block, but it saves only this rank's tokens of what `inner` reads, and gathers them again."""

    def forward(self, x, rng=None):
        y = self.inner(self.norm(x), rng, multiply=partial(gather_linear_again, group=self.group))
        y = reduce_scatter_to_sequence_region(y, self.group)  # [b, s/p, h]
        return x + dropout(y + self.bias, self.hidden_dropout, self.training, sharded=True, rng=rng)


def saved_and_sent(block_class, b=2, s=64, h=64):
    F.dropout = lambda x, rate, training=True: torch.native_dropout(x, rate, training)[0]  # masks of 1 byte, as on GPUs
    tokens = s if block_class is TensorParallelBlock else s // dist.get_world_size()
    options = {"device": device(), "dtype": torch.bfloat16}
    inner = Attention(h, 4, rate=0.1, **options), MLP(h, **options)
    layer = nn.ModuleList([block_class(h, each, hidden_dropout=0.1, **options) for each in inner])
    x = torch.randn(b, tokens, h, requires_grad=True, **options)
    rng = seed_all(1)
    with record() as section:
        with saved_for_backward(layer) as kept:
            y = layer[1](layer[0](x, rng), rng)
        y.sum().backward()
    saved = sum(size for shape, _, size in kept.pieces if shape[-1] > 1)  # without the norms' mean and variance
    kinds = [call.kind for call in section]
    halves = sum(2 if kind == "all_reduce" else 1 for kind in kinds)  # each sends (p - 1)/p of the tensor in a ring
    return {"bytes saved per element": saved / (b * s * h)} | {
        name: kinds.count(name) for name in ("all_reduce", "all_gather", "reduce_scatter")
    } | {"halves of an all-reduce": halves}  # fmt: skip


viz.table([{"block": name} | launch(saved_and_sent, 4, args=(block_class,))[0] for name, block_class in
           (("tensor parallel", TensorParallelBlock), ("yours", SequenceParallelBlock), ("gathered again", GatherAgain))],
          title="a layer with b = 2, s = h = 64 and 4 heads on 4 ranks, forward and backward")  # fmt: skip

# %% [markdown]
# In this layer, $5as/h = 20$, so $(34 + 20)/4 = 13.5$ would be the ideal. Your blocks save more than that, although they send exactly as much as before. Why? The first matmul of each block reads *all* the tokens, and its weight's gradient needs them again. So autograd saves the gathered tensor, twice per layer.
#
# To get rid of it, the third block saves only this rank's tokens, and gathers the others a second time in the backward pass. That's two more all-gathers per layer, so it sends ten halves instead of eight. In other words, to have *everything* shrink with $p$, you do send 25 % more. Megatron gathers again, too. It overlaps these messages with a matmul, as you did in chapter 11.
#
# <details><summary>Going deeper: selective recomputation</summary>
#
# The attention scores are the largest part of GPT-3's bill, and they're cheap to recompute, because their inputs Q, K, and V are saved anyway. Korthikanti et al. recommended it in the same paper as sequence parallelism, under the name of **selective recomputation**. You can do it with `checkpoint` from chapter 09. Today, most libraries use FlashAttention instead (chapter 00), which never saves the scores and does the recomputation inside its own kernel. So the option matters less than it used to, but the 34 bytes per element are still there.
#
# </details>
#
# ## Fix it
#
# On January 26, 2024, somebody who was reading nanotron's code asked a polite question: is the backward pass of its row-parallel layer correct (huggingface/nanotron issue 46)? To save time, the layer started a matmul while a message was still under way. In May, another user answered with a new test, which compared the gradient of the layer's input. No test had done that before. On four ranks, only a quarter of this gradient was right. The fix was merged on July 30 (pull request 172).
#
# **Predict.** The next exercise has the same bug, in code that doesn't overlap anything. Is the gradient of the layer's *own* weight right? And how many times does this backward pass send something? (Write True or False, and a number.)

# %% predict="12.d"
predict("12.d", own_weight=True, messages=2)


# %% [markdown] task="12.4" title="Gathered too late" difficulty=2 minutes=8
# This is a row-parallel matmul that ends with a reduce-scatter. In `backward`, each rank receives the gradient of its own tokens. Both `x` and `weight` are correct, and so is the forward pass.
#
# Repair `backward`, and don't send more than you have to. (Autograd doesn't record anything inside a `Function`, so here, the two operators are just collectives.) The check compares both gradients with plain PyTorch, and it counts the messages.


# %% exercise="12.4"
class RowParallelMatmul(Function):
    """x [b, s, i/p], this rank's columns, and weight [o, i/p] -> this rank's tokens of the sum [b, s/p, o]."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return reduce_scatter_to_sequence_region(x @ weight.T)  # [b, s/p, o]

    @staticmethod
    def backward(ctx, dy):
        """dy [b, s/p, o], the gradient of this rank's tokens -> dx [b, s, i/p] and dweight [o, i/p]."""
        x, weight = ctx.saved_tensors
        ### BEGIN SOLUTION
        dy = gather_from_sequence_region(dy)  # [b, s, o]
        dx = dy @ weight  # [b, s, i/p]
        ### BROKEN
        # dx = gather_from_sequence_region(dy @ weight)
        # dy = gather_from_sequence_region(dy)
        ### END SOLUTION
        dweight = dy.flatten(0, 1).T @ x.flatten(0, 1)
        return dx, dweight


# %% [markdown] hints="12.4"
# 1. Take two ranks and two tokens. Which rows of `dy` does rank 0 have, and whose weight does it multiply them by? Now look at the gathered result on rank 0. Which weight was used for the row that came from rank 1, and which weight should have been used?
# 2. Rank 0 needs `dx` for its own columns of x, for all the tokens. So its own weight has to meet all the rows of `dy`. Which tensor has to be gathered, and before which line?
# 3. Gather first, with `dy = gather_from_sequence_region(dy)`. Then `dx = dy @ weight`, and the gradient of the weight uses the same gathered `dy`.

# %% check="12.4"
check("12.4", RowParallelMatmul)

# %% [markdown]
# If you gather *results*, each of them was computed with a different rank's weight. If you gather the gradient first, a single message serves both matmuls.
#
# ## Break it
#
# Finally, let's do what NeMo RL did, and leave out the sum from exercise 12.3.
#
# **Predict.** Is the first loss right? Does anything raise an error? Does the model still learn, so that its last loss is less than half of the first one? (Write True or False, three times.)

# %% predict="12.e"
predict("12.e", first_loss_right=True, error=False, learns=True)

# %%
forgotten = launch(train, 2, args=(SequenceParallelBlock, lambda model: None, start))
viz.table([{"gradients": name, "first loss": f"{run['losses'][0]:.6f}", "last loss": f"{run['losses'][-1]:.6f}",
            "ranks apart by": f"{run['drift']:.0e}"}
           for name, run in (("single process", plain), ("added up", mine), ("not added up", forgotten[0]))])  # fmt: skip

# %% [markdown]
# If you didn't have the other two rows, you'd be perfectly happy with this run. But by now, the ranks' copies of the same parameter are up to 0.2 apart. Rank 0's embedding has learned from the first half of each text, and rank 1's embedding from the second half, although a checkpoint can contain only one of them. Your detector from exercise 5.3 would have noticed after the very first step.

# %%
symptoms(12)

# %% [markdown]
# ## In the wild
#
# <details><summary>Going deeper: Megatron-Core, padding, serving, and a DTensor that forgets</summary>
#
# - **Megatron-Core** has the option `sequence_parallel=True`. Its tensors are `[s, b, h]`, so that the tokens of a rank are contiguous, and no copy is necessary before a collective. The two operators are in `megatron/core/tensor_parallel/mappings.py`, and the sum of exercise 12.3 is `_allreduce_non_tensor_model_parallel_grads` in `megatron/core/distributed/finalize_model_grads.py`.
#
# - **Padding.** If $p$ doesn't divide the number of tokens, the text has to be padded.
#
# - **Transformers** has a parallel style of its own for the norms of queries and keys. In its plan for Qwen3, this style is called `replicated_with_grad_allreduce`.
#
# - **Serving.** When you generate a single text, there's only one new token per step, so there's no sequence to split. But a server works on many requests at a time, and has one new token for each of them. vLLM has a compiler pass that replaces all-reduces by the two halves (pull request 16155, from April 2025).
#
# - **DTensor** knows how each tensor is split, so it can sum such gradients by itself. But it can forget them, too. If you take a local tensor out with `to_local()`, you have to say what its gradient will be. TorchTitan forgot to say it for its mixtures of experts (pytorch/torchtitan issue 1805, October 2025), and for the weights of norms (pull request 2532, March 2026). The next cell does both.
#
# </details>


# %%
def with_dtensor(say_it):
    from torch.distributed.tensor import Partial, Replicate, distribute_tensor, init_device_mesh

    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    bias = distribute_tensor(torch.zeros(1, device=device()), mesh, [Replicate()]).requires_grad_()
    local = bias.to_local(grad_placements=[Partial()]) if say_it else bias.to_local()
    upstream = shard(torch.tensor([1.0, 2.0, 3.0, 4.0], device=device()), 0, dist.get_rank(), dist.get_world_size())
    ((local + torch.zeros_like(upstream)) * upstream).sum().backward()  # the four tokens of prediction 12.b
    return bias.grad.full_tensor().item()


for say_it in (False, True):
    print(
        "with" if say_it else "without",
        "grad_placements, the bias has the gradients",
        launch(with_dtensor, 2, args=(say_it,)),
    )

# %% [markdown]
# ## Your library so far
#
# Your library can now split the activations that tensor parallelism leaves on every rank.

# %%
from tplab.course import library

library(12)

# %% [markdown]
# All of this stays inside one machine, on the fastest wires there are. What if every machine got its own layers instead? You'd send almost nothing. And three out of four machines would sit idle. In the next chapter, you'll keep them busy.
