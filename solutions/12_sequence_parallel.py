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
# You've split every large matrix of your GPT, and yet every rank still saves the full input of each layer. Between the matmuls, all ranks hold the same activations and do the same work. If you train GPT-3 on 8 GPUs, these activations make up almost half of what each GPU saves per layer for the backward pass, and adding more GPUs won't make them any smaller.
#
# In this chapter, you'll split each all-reduce into its two halves and do this repeated work between them, where each rank only has to do its share. You'll often read that this doesn't cost any extra communication. We'll see whether that's true. You need chapters 01, 03, 09, and 10. About 75 minutes.

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
from tplab.sequence import (
    gather_from_sequence_region,
    gather_linear_again,
    reduce_scatter_to_sequence_region,
)
from tplab.sequence.examples import MLP, Attention, TensorParallelBlock
from tplab.tensor import dropout, load_full_state_dict, seed_all, shard

# %% [markdown]
# ## Time for a break
#
# Let's look at the end of an MLP on two ranks. There are two tokens with one feature each, and each rank has a partial sum of the output for both tokens. Rank 0 has 1 and 2, and rank 1 has 10 and 20. The operator g adds these partial sums with an all-reduce, so both ranks get 11 and 22. Then both ranks add the bias, apply dropout, add the residual, and normalize the result. They do exactly the same work with the same values, and both of them save the results for the backward pass.
#
# In chapter 01, you built an all-reduce from two halves. The first half is a **reduce-scatter**, which leaves rank 0 with the sum for token 0 (11) and rank 1 with the sum for token 1 (22). The second half is an **all-gather**, which copies both sums to every rank. So in the middle of an all-reduce, the sum for each token is on exactly one rank.
#
# The bias, the dropout, the residual connection, and the norm treat each token separately. So let's do all of this work between the two halves! At that point, each rank only has to do it for its own tokens. The all-gather waits until the next matmul needs all the tokens. This method is called **sequence parallelism** (Korthikanti et al. 2022).
#
# **Predict.** Suppose four ranks hold partial sums of a tensor with $b = 2$, $s = 16$, and $h = 32$ in float32. How many bytes does each rank send in a ring all-reduce? How many bytes does each rank send if it does other work between the reduce-scatter and the all-gather?

# %% predict="12.a"
predict("12.a", all_reduce=6144, gather_and_scatter=6144)


# %%
def between_two_matmuls(take_a_break):
    torch.manual_seed(dist.get_rank())
    # [s, b, h], so that a rank's tokens are contiguous
    term = torch.randn(16, 2, 32).to(device())
    with record() as section:
        y = collectives.ring_reduce_scatter(term)  # [s/p, b, h]
        if not take_a_break:
            y = collectives.ring_all_gather(y)  # [s, b, h]
        out = F.layer_norm(y + 0.5, (32,))  # add a bias, and normalize
        if take_a_break:
            out = collectives.ring_all_gather(out)  # [s, b, h]
    return {"out": out, "tokens that a rank normalizes": y.shape[0] * y.shape[1],
            "bytes that it sends": section.totals()["send"].bytes}  # fmt: skip


runs = {
    "no": launch(between_two_matmuls, 4, args=(False,))[0],
    "yes": launch(between_two_matmuls, 4, args=(True,))[0],
}
print("the same output:", torch.equal(*(run.pop("out") for run in runs.values())))
viz.table([{"a break": answer} | run for answer, run in runs.items()])

# %% [markdown]
# The animation below shows a real run with sequence parallelism. The small squares on the right show the activations that each rank has saved for the backward pass.
#
# ![An animation of four ranks and four tokens. First, a reduce-scatter takes three steps to compute the sum for one token on each rank. Then the communication pauses, and each rank applies the bias, the dropout, the residual connection, and the norm to its own token. So each rank saves the activations of one token instead of four. Finally, an all-gather takes three steps to copy all the tokens to every rank. In total, the ranks send exactly as many bytes as in an ordinary all-reduce.](pictures/pause.svg)
#
# <details><summary>All frames, one by one</summary>
#
# ![The same animation as numbered stills](pictures/pause_frames.svg)
#
# </details>
#
# Now it's your turn. Below is the kind of block you know from chapter 10. Its module `inner` is either attention or an MLP. `inner` needs all the tokens, and it returns this rank's *term* of the output, which is a partial sum without the final bias.
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
# Write `forward` for a block that receives only this rank's tokens and returns only this rank's tokens. Instead of f and g, use these two operators:
#
# - `gather_from_sequence_region(x, group)` collects the tokens from all ranks: [b, s/p, h] → [b, s, h].
#
# - `reduce_scatter_to_sequence_region(x, group)` sums the terms from all ranks and returns the sums for this rank's tokens: [b, s, h] → [b, s/p, h].
#
# Decide where to put these operators, and which lines should work on all the tokens. Think about dropout, too. With `sharded=True`, each rank draws its dropout masks from its own random stream, while with `sharded=False`, all ranks draw the same masks (chapter 09).
#
# The check compares values and gradients with those of plain PyTorch. It also counts the bytes that you send, as well as the full tensors `[b, s, h]` that your block saves for the backward pass (not counting the ones that `inner` needs).


# %% exercise="12.1"
class SequenceParallelBlock(TensorParallelBlock):
    """A block in which each rank has only its own tokens outside of `inner`."""

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
# 1. Go through the block above line by line. For each line, decide whether it could work on a single token, or whether it needs all the tokens. Before which line do you have to collect the tokens from all ranks? After which line can each rank continue with only its own tokens?
# 2. Only `inner` needs all the tokens, so gather the tokens right before `inner`, and reduce-scatter its output right after it. The bias and the residual must be added only once, so add both of them after the reduce-scatter, to this rank's own tokens. From then on, no two ranks have the same tokens. So should two ranks draw the same dropout mask?
# 3. Apply the norm, `gather_from_sequence_region(y, self.group)`, `self.inner(y, rng)`, and `reduce_scatter_to_sequence_region(y, self.group)`. Then add the bias, apply `dropout(y, self.hidden_dropout, self.training, sharded=True, rng=rng)`, and return `x + y`.

# %% check="12.1"
check("12.1", SequenceParallelBlock)

# %% [markdown]
# Were you tempted to gather before the norm? All the values would still be correct, but each rank would save a full tensor that it doesn't need. Be careful in this chapter, because most of the mistakes you can make here don't raise an error, and some don't even produce a wrong value.
#
# ## The pair
#
# So far, you've used two operators that we wrote for you. What do they do in the backward pass? Operators f and g each communicate in only one of the two passes, but the new operators communicate in both.

# %% [markdown] task="12.2" title="Gather and reduce-scatter" difficulty=3 minutes=12
# Write both operators. Dimension 1 of `x` is the sequence of tokens, and `x` may have any number of dimensions after that.
#
# - `dist.all_gather(parts, x)` fills a list of `p` tensors with the `x` from each rank. `dist.reduce_scatter(total, parts)` takes a list of `p` tensors, one *for* each rank. It sums the tensors that the ranks have provided for this rank and writes the sum into `total`.
#
# - Collectives send the elements of a tensor in the order in which they're stored, so only pass contiguous tensors. The slice of `x` that contains a rank's tokens isn't contiguous if $b > 1$, and a gradient can have any memory layout.
#
# - Don't change `x` or `grad_output`.
#
# You have to write four methods, but some of them do the same thing, so you only need to implement two different computations. Decide which method needs which computation.


# %% exercise="12.2"
class GatherFromSequence(Function):
    """x [b, s/p, ..], this rank's tokens -> y [b, s, ..], all tokens, on every rank."""

    @staticmethod
    def forward(ctx, x):
        """x [b, s/p, ..] -> [b, s, ..]: the tokens of all ranks, in rank order."""
        ### BEGIN SOLUTION
        x = x.contiguous()
        # p times [b, s/p, ..]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, dim=1)  # [b, s, ..]
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad_output):
        """grad_output [b, s, ..] -> dx [b, s/p, ..].

        Each rank has used y to compute its own heads or columns.
        """
        ### BEGIN SOLUTION
        return ReduceScatterToSequence.apply(grad_output)
        ### END SOLUTION


class ReduceScatterToSequence(Function):
    """x [b, s, ..], this rank's term -> y [b, s/p, ..], this rank's tokens.

    y contains the sum of all ranks' terms.
    """

    @staticmethod
    def forward(ctx, x):
        """x [b, s, ..] -> [b, s/p, ..]: this rank's tokens of the sum."""
        ### BEGIN SOLUTION
        # p times [b, s/p, ..]
        parts = [part.contiguous() for part in x.chunk(dist.get_world_size(), dim=1)]
        total = torch.empty_like(parts[0])
        dist.reduce_scatter(total, parts)
        return total  # [b, s/p, ..]
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad_output):
        """grad_output [b, s/p, ..], for this rank's tokens -> dx [b, s, ..]."""
        ### BEGIN SOLUTION
        return GatherFromSequence.apply(grad_output)
        ### END SOLUTION


# %% [markdown] hints="12.2"
# 1. Start with the two forward methods. Then answer two questions about each backward method, as in exercise 3.1. Which ranks' outputs depend on this rank's `x`? Does this rank already have the gradients of all these outputs? For example, after the gather, every rank multiplies all the tokens by its own columns of a weight.
# 2. In the backward pass of the gather, each rank has a partial sum of the gradient for all the tokens, but it needs the full sum for its own tokens. Which of the two forward methods computes exactly that? In the backward pass of the reduce-scatter, each rank has the gradient of the output for its own tokens, but its input contributed to the outputs for all the tokens. Which forward method collects the gradients for all the tokens?
# 3. For the gather, start with a contiguous `x` and `parts = [torch.empty_like(x) for _ in range(p)]`. Then call `dist.all_gather(parts, x)`, and return `torch.cat(parts, dim=1)`. For the reduce-scatter, start with `parts = [part.contiguous() for part in x.chunk(p, dim=1)]` and `total = torch.empty_like(parts[0])`. Then call `dist.reduce_scatter(total, parts)`, and return `total`. In the backward method of each class, call `.apply(grad_output)` of the other class, and return the result.

# %% check="12.2"
check("12.2", GatherFromSequence, ReduceScatterToSequence)

# %% [markdown]
# So the backward pass of the gather is a reduce-scatter, and the backward pass of the reduce-scatter is a gather. With f and g, a block runs one all-reduce in each pass. Now it runs a reduce-scatter and an all-gather in each pass instead, so the ranks send exactly as many bytes as before.
#
# ## Whose gradient is it?
#
# Now we come to the part that people forget. A block adds its final bias to every token, so the gradient of the bias is the sum of the upstream gradients of all the tokens.
#
# **Predict.** Suppose there are four tokens with one feature each, and their upstream gradients are 1, 2, 3, and 4. Rank 0 has the first two tokens, and rank 1 has the other two. What's the gradient of the bias on each rank? The bias starts at 0 on both ranks. What's the bias on each rank after one step of SGD with a learning rate of 0.1? (Write pairs, with rank 0 first.)

# %% predict="12.b"
predict("12.b", gradients=(3, 7), biases=(-0.3, -0.7))

# %% [markdown]
# In a single process, the gradient of the bias would be 10, and the bias would be -1 after the step. Neither of our two ranks computes these values, and their copies of the bias are no longer equal. So after each backward pass, we have to sum the gradients of some parameters across ranks. But which parameters need such a sum?
#
# Let's find out with a small model that has a position embedding for each token, followed by an attention block. Like Qwen3 and many other newer models, it normalizes every query and every key. The weights of these two norms have one element per dimension of a head, and all heads share the same weights.
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
# The model has nine parameters. Three of them are sharded: the weight and the bias of `attention.qkv`, and the weight of `attention.out`. The other six parameters are replicated, so every rank has its own copy of them.
#
# - `partial_gradients` returns the names of the parameters whose gradient on each rank is only one term of a sum over all ranks.
#
# - `allreduce_sequence_gradients` computes these sums. In `module`, every parameter whose gradient has to be summed has the attribute `param.sequence_parallel = True`. For all the other parameters, this attribute is False or missing. Every message adds latency, so use **one** all-reduce for all of these gradients. If a gradient is None, leave it alone. A gradient may be transposed in memory.
#
# The check runs the model, sums the gradients of the parameters that you've named, and compares all nine gradients with those of plain PyTorch. It also tries your second function on other modules.


# %% exercise="12.3"
def partial_gradients():
    """Return a set of the names whose gradient on each rank is only one term of a sum.

    Choose from these nine names: positions, norm.weight, norm.bias,
    attention.qkv.weight, attention.qkv.bias, attention.q_norm.weight,
    attention.k_norm.weight, attention.out.weight, bias
    """
    ### BEGIN SOLUTION
    qk_norms = {"attention.q_norm.weight", "attention.k_norm.weight"}
    return {"norm.weight", "norm.bias", "bias"} | qk_norms
    ### END SOLUTION


def allreduce_sequence_gradients(module, group=None):
    """Sum the gradient of each parameter that's marked `sequence_parallel`.

    Replace each of these gradients with its sum over the ranks of `group`. Use one
    all-reduce, write the sums into param.grad, and return nothing.
    """
    ### BEGIN SOLUTION
    params = module.parameters()
    marked = [param for param in params if getattr(param, "sequence_parallel", False)]
    gradients = [param.grad for param in marked if param.grad is not None]
    total = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(total, group=group)
    parts = total.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
    ### END SOLUTION


# %% [markdown] hints="12.3"
# 1. For each parameter, ask yourself which tokens and which heads a rank uses it for. If every rank uses the parameter for all the tokens and all the heads, its gradient is complete. If each rank uses its own copy for only some of the tokens or heads, each rank's gradient is only one term of the sum. For the second function, which gradients do you concatenate so that you need only one all-reduce? How do you copy the parts of the result back into these gradients?
# 2. Each rank uses the block's norm and the final bias only for its own tokens. The positions are added to all the tokens, before the scatter. Each rank applies the query and key norms to every token, but to how many of the heads? In the second function, concatenate the flattened gradients with `torch.cat`, call `dist.all_reduce` once, `split` the result, and copy each part back with `copy_`.
# 3. The names are `norm.weight`, `norm.bias`, `bias`, and the weights of both `q_norm` and `k_norm`. In the second function, create `gradients = [p.grad for p in module.parameters() if getattr(p, "sequence_parallel", False) and p.grad is not None]` and `total = torch.cat([g.flatten() for g in gradients])`. After `dist.all_reduce(total, group=group)`, split the result with `parts = total.split([g.numel() for g in gradients])`, and call `g.copy_(part.view_as(g))` for each `g` and `part` in `zip(gradients, parts)`.

# %% check="12.3"
check("12.3", partial_gradients, allreduce_sequence_gradients)

# %% [markdown]
# Each rank applies the block's norm and its final bias only to its own tokens, so it's no surprise that the gradients of these parameters are partial. The norms of the queries and keys are trickier. Each rank applies these two norms to *all* the tokens, but only in its own heads. So you have to sum their gradients even if you never split the sequence at all!
#
# <details><summary>Going deeper: people really do forget this sum</summary>
#
# In August 2026, a user of NVIDIA's NeMo RL found a training path that never summed these gradients. The user described the result as "no crash, no NaN, pure drift" (NVIDIA-NeMo/RL issue 3716, still open when we looked in fall 2026). GPT-NeoX had code for this sum, but the code never ran. And if it had run, it would have computed the mean instead of the sum (EleutherAI/gpt-neox pull requests 1257 and 1259, August 2024).
#
# </details>

# %% [markdown]
# ## Train it
#
# Let's train a small GPT on Python code. It's built from your blocks, and its attention layers normalize the queries and keys. Each rank embeds its own tokens, adds their position embeddings, and computes their logits and its share of the loss. So in this model, the gradients of *all* replicated parameters are partial, even those of the two embeddings. That's why `train` sets `sequence_parallel` for all of these parameters.

# %%
CONTEXT, BATCH, STEPS, HIDDEN = 32, 8, 40, 64
text = corpus.python_sources(6000)[3000:]


class ByteGPT(nn.Module):
    """A GPT on bytes.

    This rank's tokens [b, s/p] and their positions [s/p] -> logits [b, s/p, 256]
    """

    def __init__(self, block_class):
        super().__init__()
        place = {"device": device(), "dtype": torch.float64}
        self.embedding = nn.Embedding(256, HIDDEN, **place)
        self.positions = nn.Embedding(CONTEXT, HIDDEN, **place)
        self.blocks = nn.ModuleList()
        for _ in range(2):
            attention = Attention(HIDDEN, 4, qk_norm=True, **place)
            for inner in (attention, MLP(HIDDEN, **place)):
                self.blocks.append(block_class(HIDDEN, inner, **place))
        self.norm = nn.LayerNorm(HIDDEN, **place)
        self.head = nn.Linear(HIDDEN, 256, **place)

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
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.0)
    positions = shard(torch.arange(CONTEXT, device=device()), 0, rank, p)  # [s/p]
    losses = []
    for batch in corpus.byte_batches(text, CONTEXT, BATCH, STEPS, seed=1):
        ids, targets = (shard(x.to(device()), 1, rank, p) for x in batch)  # [b, s/p]
        logits = model(ids, positions)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = loss / (BATCH * CONTEXT)
        optimizer.zero_grad()
        loss.backward()
        add_up(model)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)  # each rank has the loss of its own tokens
        losses.append(total.item())
    replicated = [param for param in model.parameters() if param.sequence_parallel]
    copies = torch.cat([param.detach().flatten() for param in replicated])
    lowest, highest = copies.clone(), copies
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return {"losses": losses, "drift": (highest - lowest).max().item()}


def first_weights():
    torch.manual_seed(0)
    return ByteGPT(TensorParallelBlock).state_dict()


start = launch(first_weights, 1)[0]
plain = launch(train, 1, args=(TensorParallelBlock, lambda model: None, start))[0]
args = (SequenceParallelBlock, allreduce_sequence_gradients, start)
mine = launch(train, 2, args=args)[0]
losses = {"single process": plain["losses"], "your blocks, p = 2": mine["losses"]}
viz.curves(losses, title=f"{STEPS} steps on bytes")

# %%
apart = max(abs(a - b) for a, b in zip(plain["losses"], mine["losses"], strict=True))
print(
    f"largest difference between the two losses: {apart:.0e}; "
    f"ranks apart by {mine['drift']:.0e}"
)

# %% [markdown]
# ## The bill
#
# How much have the saved activations shrunk? In chapter 00, you worked out that a layer saves $34 + 5as/h$ bytes per element of $[b, s, h]$ for the backward pass in 16-bit precision. Of these bytes, $24 + 5as/h$ are for activations inside attention and the MLP. Tensor parallelism splits these activations across the ranks, so each rank saves only $1/p$ of them. The other 10 bytes store the inputs of the two norms, the input of each block's first matmul, and the masks of the hidden dropout. Without sequence parallelism, every rank saves all of these 10 bytes.
#
# **Predict.** For GPT-3, $5as/h = 80$. With $p = 8$ and tensor parallelism alone, how many bytes per element does each rank save for the backward pass? How many bytes per element does each rank save if you add sequence parallelism, which splits the other 10 bytes across the ranks as well? How many bytes per element are left if each rank also recomputes the attention scores in the backward pass instead of saving them?

# %% predict="12.c"
predict("12.c", tensor_parallel=23, and_sequence=14.25, and_selective=4.25)

# %% tags=["explore"]
saved = partial(memory.layer_activations, memory.PRESETS["GPT-3 175B"])


def show_layer(p, sequence_parallel):
    options = {"tp": p, "sequence_parallel": sequence_parallel}
    bars = {
        "nothing recomputed": saved(**options),
        "scores recomputed": saved(recompute="attention", **options),
    }
    title = f"a layer of GPT-3 on each of p = {p} ranks: bytes saved"
    return viz.saved_activations(bars, scale=sum(saved().values()), title=title)


viz.explore(
    show_layer, p=(1, 2, 4, 8, 16), sequence_parallel=(False, True), start={"p": 8}
)

# %% [markdown]
# That's the theory. Now let's measure how many bytes a layer made of *your* blocks actually saves for the backward pass.


# %%
class GatherAgain(SequenceParallelBlock):
    """The same block, but its backward pass gathers the other ranks' tokens again.

    It saves only this rank's tokens.
    """

    def forward(self, x, rng=None):
        gather_again = partial(gather_linear_again, group=self.group)
        y = self.inner(self.norm(x), rng, multiply=gather_again)  # [b, s, h], a term
        y = reduce_scatter_to_sequence_region(y, self.group) + self.bias  # [b, s/p, h]
        return x + dropout(y, self.hidden_dropout, self.training, sharded=True, rng=rng)


def byte_masks(x, rate, training=True):  # dropout with masks of 1 byte, as on GPUs
    return torch.native_dropout(x, rate, training)[0]


def saved_and_sent(block_class, b=2, s=64, h=64):
    F.dropout = byte_masks
    tokens = s if block_class is TensorParallelBlock else s // dist.get_world_size()
    options = {"device": device(), "dtype": torch.bfloat16}
    inner = Attention(h, 4, rate=0.1, **options), MLP(h, **options)
    blocks = [block_class(h, each, hidden_dropout=0.1, **options) for each in inner]
    layer = nn.ModuleList(blocks)
    x = torch.randn(b, tokens, h, requires_grad=True, **options)
    rng = seed_all(1)
    with record() as section:
        with saved_for_backward(layer) as kept:
            y = layer[1](layer[0](x, rng), rng)
        y.sum().backward()
    # without the norms' mean and variance
    saved = sum(size for shape, _, size in kept.pieces if shape[-1] > 1)
    kinds = [call.kind for call in section]
    # each sends (p - 1)/p of the tensor in a ring
    halves = sum(2 if kind == "all_reduce" else 1 for kind in kinds)
    return {"bytes saved per element": saved / (b * s * h),
            "all_reduce": kinds.count("all_reduce"),
            "all_gather": kinds.count("all_gather"),
            "reduce_scatter": kinds.count("reduce_scatter"),
            "halves of an all-reduce": halves}  # fmt: skip


blocks = {"tensor parallel": TensorParallelBlock, "yours": SequenceParallelBlock,
          "gathered again": GatherAgain}  # fmt: skip
title = "a layer with b = 2, s = h = 64 and 4 heads on 4 ranks, forward and backward"
viz.table([{"block": name} | launch(saved_and_sent, 4, args=(block,))[0]
           for name, block in blocks.items()], title=title)  # fmt: skip

# %% [markdown]
# In this layer, $5as/h = 20$, so you'd expect your blocks to save $(34 + 20)/4 = 13.5$ bytes per element. Your blocks send exactly as many bytes as the tensor-parallel blocks, but they save 16.5 bytes per element instead of 13.5. Why? The first matmul of each block multiplies *all* the tokens by a weight. To compute the gradient of this weight, the backward pass needs all the tokens again. So autograd saves a full, gathered tensor in each of the layer's two blocks.
#
# The third kind of block, `GatherAgain`, saves only this rank's tokens and gathers the other tokens a second time in the backward pass. This takes two more all-gathers per layer, and each of them sends half as many bytes as an all-reduce. So the layer now sends as many bytes as five all-reduces instead of four. That answers the question from the beginning of this chapter. Sequence parallelism itself doesn't cost any extra communication, but if you want *all* the saved activations to shrink with $p$, you have to send 25% more bytes. Megatron also gathers the tokens a second time, but it overlaps these messages with a matmul, as you did in chapter 11.
#
# <details><summary>Going deeper: selective recomputation</summary>
#
# The attention scores take up most of GPT-3's activation memory, and they're cheap to recompute, because their inputs Q, K, and V are saved anyway. The paper that introduced sequence parallelism also recommended recomputing the scores, and it called this technique **selective recomputation** (Korthikanti et al. 2022). You can do it with `checkpoint` from chapter 09. Today, most libraries use FlashAttention instead (chapter 00), which never saves the scores and recomputes them inside its own kernel. So selective recomputation matters less than it used to, but every layer still has to save the other 34 bytes per element.
#
# </details>
#
# ## Fix it
#
# In January 2024, someone reading the source code of nanotron, a training library, asked whether the backward pass of its row-parallel layer was correct (huggingface/nanotron issue 46). To save time, the layer started a matmul before a message had arrived. In May, another user compared the gradient of the layer's input with the correct gradient, which no test had done before. On four ranks, only a quarter of this gradient was correct. The bug was fixed in July (pull request 172).
#
# **Predict.** The layer in the next exercise has the same bug, although it doesn't overlap communication with computation. Read its `backward` before you answer. Is the gradient of the layer's weight correct? How many times does the backward pass communicate? (Write True or False, and a number.)

# %% predict="12.d"
predict("12.d", own_weight=True, messages=2)


# %% [markdown] task="12.4" title="Gathered too late" difficulty=2 minutes=8
# The `Function` below is a row-parallel matmul that ends with a reduce-scatter. Its forward pass is correct. In `backward`, each rank receives the gradient of the output for its own tokens, together with the correct `x` and `weight`.
#
# Repair `backward`, and don't send more bytes than you have to. (Autograd doesn't record anything inside a `Function`, so the two operators are just collectives here.) The check compares both gradients with plain PyTorch, and it counts the messages.


# %% exercise="12.4"
class RowParallelMatmul(Function):
    """x [b, s, i/p] and weight [o, i/p] -> this rank's tokens of the sum [b, s/p, o].

    x contains this rank's columns.
    """

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return reduce_scatter_to_sequence_region(x @ weight.T)  # [b, s/p, o]

    @staticmethod
    def backward(ctx, dy):
        """dy [b, s/p, o], for this rank's tokens -> dx [b, s, i/p], dweight [o, i/p]"""
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
# 1. Suppose there are two ranks and two tokens. Which row of `dy` does rank 0 have, and which rank's weight does the broken code multiply this row by? Now look at the gathered result on rank 0. Which rank's weight was used to compute the row that came from rank 1? Which rank's weight should have been used?
# 2. Rank 0 needs `dx` for its own columns of `x`, but for all the tokens. So rank 0 has to multiply all the rows of `dy` by its own weight. Which tensor do you have to gather, and before which line?
# 3. Gather the gradient first, with `dy = gather_from_sequence_region(dy)`. Then compute `dx = dy @ weight`. For the gradient of the weight, use the same gathered `dy`.

# %% check="12.4"
check("12.4", RowParallelMatmul)

# %% [markdown]
# In the broken version, each rank multiplies by its own weight and then gathers the *results*, so the gathered rows were computed with different weights. If you gather the gradient `dy` first, both matmuls of the backward pass can use it, and a single message is enough.
#
# ## Break it
#
# Finally, let's leave out the sum of the partial gradients from exercise 12.3.
#
# **Predict.** If you leave out this sum, is the first loss correct? Does anything raise an error? Does the model still learn? (It counts as learning if the last loss is less than half of the first loss. Write True or False, three times.)

# %% predict="12.e"
predict("12.e", first_loss_right=True, error=False, learns=True)

# %%
forgotten = launch(train, 2, args=(SequenceParallelBlock, lambda model: None, start))[0]
runs = {"single process": plain, "added up": mine, "not added up": forgotten}
viz.table([{"gradients": name, "first loss": f"{run['losses'][0]:.6f}",
            "last loss": f"{run['losses'][-1]:.6f}",
            "ranks apart by": f"{run['drift']:.0e}"}
           for name, run in runs.items()])  # fmt: skip

# %% [markdown]
# If you only saw the losses in the last row, you'd be perfectly happy with this run. But the ranks' copies of the same parameter now differ by up to 0.2. Rank 0's token embedding has learned from the first half of each text, and rank 1's token embedding has learned from the second half. A checkpoint can contain only one of these two copies. Your detector from exercise 5.3 would have noticed this after the very first step.

# %%
symptoms(12)

# %% [markdown]
# ## In the wild
#
# <details><summary>Going deeper: Megatron-Core, padding, serving, and a DTensor that forgets</summary>
#
# - **Megatron-Core** has the option `sequence_parallel=True`. Megatron's activations have the shape `[s, b, h]`, so each rank's tokens are contiguous and don't have to be copied before a collective. The two operators are in `megatron/core/tensor_parallel/mappings.py`. The function `_allreduce_non_tensor_model_parallel_grads` in `megatron/core/distributed/finalize_model_grads.py` sums the partial gradients, as you did in exercise 12.3.
#
# - **Padding.** If the number of tokens isn't divisible by $p$, you have to pad the text.
#
# - **Transformers**, Hugging Face's library, has a special parallel style for the norms of queries and keys. In the library's tensor-parallel plan for Qwen3, this style is called `replicated_with_grad_allreduce`.
#
# - **Serving.** When you generate a single text, there's only one new token per step, so there's no sequence to split. But a server processes many requests at a time, and each request has a new token, so the server can split these tokens across ranks. vLLM has a compiler pass that replaces each all-reduce with a reduce-scatter and an all-gather (pull request 16155, April 2025).
#
# - **DTensor** knows how each tensor is split, so it can sum partial gradients automatically. But if you convert a DTensor into an ordinary tensor with `to_local()`, you have to specify whether the gradient of this tensor is partial. TorchTitan forgot to do this, first for mixtures of experts (pytorch/torchtitan issue 1805, October 2025) and then for the weights of norms (pull request 2532, March 2026).
#
# </details>
#
# PyTorch's own sharded tensors, called DTensors, know how they're split. But even with a DTensor, you can forget to sum a partial gradient. The next cell computes the gradients from prediction 12.b with a DTensor, first without the `grad_placements` argument of `to_local` and then with it.


# %%
def with_dtensor(say_it):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, distribute_tensor

    rank, p = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device().type, (p,))
    zero = torch.zeros(1, device=device())
    bias = distribute_tensor(zero, mesh, [Replicate()]).requires_grad_()
    local = bias.to_local(grad_placements=[Partial()]) if say_it else bias.to_local()
    # the four tokens of prediction 12.b
    upstream = torch.tensor([1.0, 2.0, 3.0, 4.0], device=device())
    upstream = shard(upstream, 0, rank, p)
    ((local + torch.zeros_like(upstream)) * upstream).sum().backward()
    return bias.grad.full_tensor().item()


for say_it in (False, True):
    gradients = launch(with_dtensor, 2, args=(say_it,))
    word = "with" if say_it else "without"
    print(word, "grad_placements, the bias has the gradients", gradients)

# %% [markdown]
# ## Your library so far
#
# With tensor parallelism alone, every rank has to store some of the activations in full. Your library can now shard these, too.

# %%
from tplab.course import library

library(12)

# %% [markdown]
# With tensor parallelism, the ranks send so many bytes that they should all be in the same machine. What if each machine held its own layers instead? The machines would send each other almost nothing, but at any moment, three out of four machines would have nothing to do. In the next chapter, you'll keep all four machines busy.
