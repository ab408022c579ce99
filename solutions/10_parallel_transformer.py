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
# **The question.** You have every piece of a GPT on `p` ranks: attention, MLP, embedding, loss, dropout. How do they go together, and what do the parts between them, the norms, the residuals, the last biases, have to send?
#
# **What you will have built.** A transformer layer; a GPT whose logits, loss and gradients are those of a plain single-process GPT; a loader that cuts a checkpoint in GPT-2's format into shards; and a generator that writes text on `p` ranks. At the end you train your GPT on real text, on one, two and four processes,
# and it writes the same text on all of them.
#
# Symbols: `b` batch, `s` sequence length, `h` hidden size, `a` attention heads, `v` vocabulary, `L` layers, `p` number of ranks. **f** (nothing forward, all-reduce backward) and **g** (all-reduce forward, nothing backward) are the operators of chapter 03. About 90 minutes.

# %% tags=["setup"]
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tplab import device, launch, record, viz
from tplab.common import corpus
from tplab.course import check, predict, symptoms
from tplab.gpt import transformer
from tplab.memory import GPTConfig, parameter_count
from tplab.tensor import (
    ParallelAttention,
    ParallelMLP,
    VocabParallelEmbedding,
    dropout,
    full_state_dict,
    load_full_state_dict,
    pad_vocab_size,
    parallel_logits,
    reduce_from_region,
    seed_all,
    shard,
    vocab_parallel_cross_entropy,
)

NAMES = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}  # in a layer of ParallelGPT: in a layer of GPT-2

# %% [markdown]
# This is the whole layer, drawn from the record of one forward and one backward pass. The layer is the ready-made one of `tplab.gpt.transformer`; yours will take its place. Move the control to four ranks: the colours become narrower, and the messages stay as they are.


# %%
def one_pass(make_layer, memory_length=None):
    """What a layer sends on this rank, forward and backward, for x of [2, 16, 32] in float32."""
    torch.manual_seed(0)
    layer = make_layer()
    given = [torch.randn(2, s, 32, device=device(), requires_grad=True) for s in (16, memory_length) if s]
    with record() as forward:
        out = layer(*given)
    with record() as backward:
        out.sum().backward()
    return {"forward": list(forward), "backward": list(backward), "out": out.detach()}


def ready_made():
    return transformer.ParallelTransformerLayer(32, 4, device=device())


# %% tags=["explore"]
def show_layer(p):
    mine = launch(one_pass, p, args=(ready_made,))[0]
    title = f"one layer on {p} ranks, b·s·h numbers in float32 in every message"
    return viz.layer(mine["forward"], mine["backward"], ranks=p, title=title)


viz.explore(show_layer, p=(2, 4))

# %% [markdown]
# ## 1 · What stands around the blocks
#
# A transformer layer is two blocks, attention and MLP. Each stands in a **residual** connection: what goes in is added to what comes out. A **norm** stands before each block, which is called **pre-LN** and is what GPT-2 and most models since have:
#
# $$y = x + \text{dropout}(\text{attention}(\text{norm}_1(x)) + b_1) \qquad z = y + \text{dropout}(\text{MLP}(\text{norm}_2(y)) + b_2)$$
#
# The tensor that runs through from layer to layer, `[b, s, h]`, is the **residual stream**. Every rank holds all of it. g has just made the output of a block whole on every rank, so everything up to the next f can be computed by every rank for itself, from the same numbers, with the same result:
#
# - A **LayerNorm** needs the mean and the variance over all of `h`. Every rank has all of `h`. So each computes the norm whole, and no message is needed.
# - The **bias behind g** is whole on every rank and is added after the sum, once.
# - **Dropout** behind a block works on a replicated tensor: all ranks have to drop the same places (chapter 09, the state `"replicated"`).
# - The **residual** is added after g. Before g it would be added `p` times.
#
# And backward? A norm's weight is replicated, and its gradient is computed from the gradient of the norm's output. That one is whole on every rank, since f has all-reduced it. So each rank computes the same whole gradient of the norm's weight, and nobody has to send it.
#
# **Predict.** One layer on `p = 4` ranks, `b = 2`, `s = 16`, `h = 32`, float32. How many all-reduces run forward, how many backward? How many bytes has each? And how many more are needed for the gradients of the norms and of the last biases?

# %% predict="10.a"
predict("10.a", forward=2, backward=2, bytes_each=4096, for_norms_and_biases=0)

# %%
viz.traffic(launch(one_pass, 4, args=(ready_made,)), title="one layer on four ranks, forward and backward")

# %% [markdown]
# ### The other place of the norm
#
# The first transformer, of Vaswani et al. (2017), has its norms behind the sums, `x = norm(x + block(x))`: **post-LN**. In a stack of such layers, each norm's output is read by the next block *and* is the next residual. So the same model can be written with the norm before the block, if the residual is taken *behind* the norm:
#
# | | the block reads | the residual is |
# |---|---|---|
# | pre-LN | `norm(x)` | `x` |
# | post-LN | `norm(x)` | `norm(x)` |
#
# The first norm of the stack then works on the embedding, and one more norm ends the stack, the final norm of the model. Megatron's name for this setting is `apply_residual_connection_post_layernorm`. See that it is Vaswani's: torch's `nn.TransformerEncoderLayer` is post-LN by default. Take two of its layers, give their weights to two ready-made ones, each norm
# to the place that comes next in ours, and compare.


# %%
def as_vaswani(post):
    """The largest difference between torch's two post-LN layers and the ready-made ones with torch's weights."""
    torch.manual_seed(0)
    options = {"device": device(), "dtype": torch.float64}
    theirs = [nn.TransformerEncoderLayer(32, 4, 64, 0.0, F.gelu, batch_first=True, **options) for _ in range(2)]
    ours = [
        transformer.ParallelTransformerLayer(
            32, 4, ffn_hidden_size=64, causal=False, apply_residual_connection_post_layernorm=post, **options
        )
        for _ in range(2)
    ]
    norms = [nn.LayerNorm(32, **options)]  # before the first layer: Vaswani's has none there
    for layer in theirs:
        norms += [layer.norm1, layer.norm2]
    stream = torch.randn(2, 6, 32, **options)
    x = norms[0](stream)
    for index, (layer, twin) in enumerate(zip(ours, theirs, strict=True)):
        state = {f"attention.qkv.{end}": getattr(twin.self_attn, f"in_proj_{end}") for end in ("weight", "bias")}
        parts = {"attention.out": twin.self_attn.out_proj, "mlp.up": twin.linear1, "mlp.down": twin.linear2}
        parts |= {"attention_norm": norms[2 * index], "mlp_norm": norms[2 * index + 1]}
        state |= {f"{name}.{end}": getattr(part, end) for name, part in parts.items() for end in ("weight", "bias")}
        load_full_state_dict(layer, state)
        x, stream = twin(x), layer(stream)
    return (norms[-1](stream) - x).abs().max().item()


viz.table(
    [
        {"the residual is taken": where, "largest difference, p = 2": f"{max(launch(as_vaswani, 2, args=(post,))):.0e}"}
        for where, post in (("behind the norm (post-LN)", True), ("before the norm (pre-LN)", False))
    ],
    title="two layers against two of nn.TransformerEncoderLayer",
)

# %% [markdown]
# These layers are **encoder** layers: no causal mask, each token sees all others. A **decoder** layer has the mask, `causal=True`; GPT consists of decoder layers only. In the first transformer the decoder also read the output of an encoder, the *memory* `[b, t, h]`, through a third block between the other two,
# cross-attention (chapter 06), with a norm and a residual of its own. That block has its own g and its own f, and one f more: the memory is replicated too, and every rank's heads of K and V send back a part of its gradient.


# %%
def with_memory():
    return transformer.ParallelTransformerLayer(32, 4, cross_attention=True, device=device())


def sent(section):
    return ", ".join(f"{call.bytes} B" for call in section)


alone = launch(one_pass, 1, args=(with_memory, 8))[0]
rows = []
for p in (2, 4):
    mine = launch(one_pass, p, args=(with_memory, 8))[0]
    off = (mine["out"] - alone["out"]).abs().max().item()
    rows.append(
        {"p": p, "forward": sent(mine["forward"]), "backward": sent(mine["backward"]), "output off by": f"{off:.0e}"}
    )
viz.table(rows, title="a decoder layer that reads a memory of t = 8: its all-reduces")

# %% [markdown]
# Three forward, four backward, and the small one is the gradient of the memory: `b·t·h` numbers. From here on it is the layer of GPT: two blocks, causal.

# %% [markdown] task="10.1" title="ParallelTransformerLayer" difficulty=3 minutes=20
# The constructor is there. Write `forward`, for pre-LN and post-LN.
#
# - Both blocks are built with `skip_bias_add=True`: `self.attention(..)` and `self.mlp(..)` return two things, the output `[b, s, h]` behind g and the bias `[h]`, not yet added. Bias, dropout and residual are added together, since a GPU does the three in one go over the memory.
# - `dropout(y, rate, self.training, sharded=False, rng=rng)` of `tplab.tensor.rng` (chapter 09, imported above) draws from the state `"replicated"` of the tracker `rng`; with `rng=None` from torch's current state.
# - `self.attention` takes `cache=` and `rng=`. Pass on what you are given, in train mode and in eval mode. Its own dropout, of the probabilities, draws from `"sharded"`.
# - If `self.post`, the residual is what the norm returned, else what the norm was given.


# %% exercise="10.1"
class ParallelTransformerLayer(nn.Module):
    """x -> norm -> attention, + residual -> norm -> MLP, + residual.

    in:  x, replicated    [b, s, h]
    out: z, replicated    [b, s, h]
    Two all-reduces of b·s·h numbers forward and two backward, all of them in the blocks.
    """

    def __init__(
        self,
        hidden_size,
        num_heads,
        *,
        causal=True,
        activation="gelu_tanh",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        apply_residual_connection_post_layernorm=False,
        group=None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        place = {"device": device, "dtype": dtype}
        block = {"skip_bias_add": True, "group": group, **place}
        self.attention_norm = nn.LayerNorm(hidden_size, **place)
        self.attention = ParallelAttention(hidden_size, num_heads, causal=causal, dropout=attention_dropout, **block)
        self.mlp_norm = nn.LayerNorm(hidden_size, **place)
        self.mlp = ParallelMLP(hidden_size, activation=activation, **block)
        self.hidden_dropout = hidden_dropout
        self.post = apply_residual_connection_post_layernorm

    def forward(self, x, *, cache=None, rng=None):
        ### BEGIN SOLUTION
        normed = self.attention_norm(x)  # [b, s, h]
        residual = normed if self.post else x
        y, bias = self.attention(normed, cache=cache, rng=rng)  # [b, s, h], [h]
        x = residual + dropout(y + bias, self.hidden_dropout, self.training, sharded=False, rng=rng)
        normed = self.mlp_norm(x)
        residual = normed if self.post else x
        y, bias = self.mlp(normed)  # [b, s, h], [h]
        return residual + dropout(y + bias, self.hidden_dropout, self.training, sharded=False, rng=rng)
        ### END SOLUTION

    def new_cache(self, batch_size, max_length):
        """Room for the keys and values of this rank's heads (chapter 06)."""
        return self.attention.new_cache(batch_size, max_length)


# %% [markdown] hints="10.1"
# 1. Write the two formulas of section 1 as code for `p = 1`. Which tensors are replicated, so that nothing changes for `p = 4`?
# 2. Twice the same four steps: norm; remember the residual (`x`, or the norm's output if `self.post`); block, which gives `y, bias`; then residual plus dropout of `y + bias`. The second time, `x` is what the first gave.
# 3. `normed = self.attention_norm(x)`, `residual = normed if self.post else x`, `y, bias = self.attention(normed, cache=cache, rng=rng)`, `x = residual + dropout(y + bias, self.hidden_dropout, self.training, sharded=False, rng=rng)`, and the same again with `self.mlp_norm` and `self.mlp(normed)`.

# %% check="10.1"
check("10.1", ParallelTransformerLayer)

# %% [markdown]
# What does a rank hold of a layer? The blocks' weights are cut, the rest is whole.
#
# **Predict.** Layer with `h = 64` and an MLP of `4h`. How many parameters are replicated, so whole on every rank? How many numbers of the cut parameters does each of `p = 4` ranks hold? (Weights of Q, K, V and of the output, of both MLP layers; a bias for each; two norms with weight and bias.)

# %% predict="10.b"
predict("10.b", replicated=384, of_the_cut_ones=12400)


# %%
def held(name="layer"):
    layer = ParallelTransformerLayer(64, 4, device=device())
    whole = [name for name, param in layer.named_parameters() if not hasattr(param, "tensor_parallel")]
    sizes = {name: param.numel() for name, param in layer.named_parameters()}
    return {
        "replicated parameters": ", ".join(whole),
        "their numbers": sum(sizes[name] for name in whole),
        "numbers of the cut ones on each rank": sum(size for name, size in sizes.items() if name not in whole),
    }


viz.table([{"p": p} | launch(held, p)[0] for p in (1, 2, 4)])

# %% [markdown]
# Of what is replicated there are `6h` numbers, of what is cut `12h² + 7h`. So almost everything is shared out.
#
# ## 2 · The whole model
#
# A GPT puts an embedding before the layers and an output layer behind them:
#
# | part | what a rank holds | sends |
# |---|---|---|
# | token embedding (chapter 07) | `v/p` rows of `h` | g: `b·s·h` forward |
# | position embedding: a vector for each place in the text | all of it | |
# | `L` layers | see above | 2 g forward, 2 f backward each |
# | final norm | all of it | |
# | logits with the same rows, **tied** (chapter 07) | the same `v/p` rows | f: `b·s·h` backward |
# | loss (chapter 08) | its `v/p` columns of the logits | two small ones forward |
#
# Where does this end? The token embedding begins with a look-up, so there is no gradient to send further back: at its input there is no f.
#
# **Predict.** `L = 2`, `b = 2`, `s = 16`, `h = 32`, float32. How many all-reduces does one training step have, forward and backward together, if the loss has 2? How many of all these have `b·s·h` numbers?

# %% predict="10.c"
predict("10.c", all_reduces=12, of_bsh=10)

# %% [markdown] task="10.2" title="ParallelGPT" difficulty=3 minutes=20
# Again the constructor is there; write `forward`. All layers come from chapters 07 and 08 and are imported above.
#
# - `past` says how many tokens of the text came before `ids`, in earlier calls; the first of `ids` stands at place `past`. In training `past` is 0.
# - `cache` is a list with a cache for each layer, as `new_cache` makes it, or `None`. If there's a cache, use it in train mode and in eval mode.
# - Behind the sum of both embeddings comes a dropout with the rate `self.config.dropout`, as in a layer.
# - The logits are tied: `parallel_logits(x, weight, group=..)` takes this rank's rows of the table, `self.embedding.weight`. They stay split, `[b, s, v/p]`.
# - With `targets` the result is the mean loss over all targets that aren't ignored, `vocab_parallel_cross_entropy(logits, targets, vocab_size=.., group=..)`. The table is padded, and padding is no token: `self.config.vocab_size` is the true size.
#
# The layers are made by `layer_class`: without it, by the ready-made layer of `tplab.gpt.transformer`, so this exercise does not wait for 10.1.


# %% exercise="10.2"
class ParallelGPT(nn.Module):
    """ids -> this rank's logits; with targets -> their mean loss.

    in:  ids, replicated         [b, s]
         targets, replicated     [b, s] or None
    out: logits, of this rank    [b, s, v/p], or the loss, replicated
    """

    def __init__(self, config, layer_class=None, *, multiple=8, group=None, device=None, dtype=None):
        super().__init__()
        self.config, self.group = config, group
        place = {"device": device, "dtype": dtype}
        h, rate = config.hidden_size, config.dropout
        options = {"activation": config.activation, "hidden_dropout": rate, "attention_dropout": rate, **place}
        layer_class = layer_class or transformer.ParallelTransformerLayer
        self.embedding = VocabParallelEmbedding(config.vocab_size, h, multiple=multiple, group=group, **place)
        self.positions = nn.Embedding(config.seq_length, h, **place)
        self.layers = nn.ModuleList(
            layer_class(h, config.num_heads, group=group, **options) for _ in range(config.num_layers)
        )
        self.final_norm = nn.LayerNorm(h, **place)

    def forward(self, ids, targets=None, *, cache=None, past=0, rng=None):
        ### BEGIN SOLUTION
        places = torch.arange(past, past + ids.shape[1], device=ids.device)  # [s]
        x = self.embedding(ids) + self.positions(places)  # [b, s, h]
        x = dropout(x, self.config.dropout, self.training, sharded=False, rng=rng)
        for number, layer in enumerate(self.layers):
            x = layer(x, cache=cache[number] if cache else None, rng=rng)  # [b, s, h]
        x = self.final_norm(x)
        logits = parallel_logits(x, self.embedding.weight, group=self.group)  # [b, s, v/p]
        if targets is None:
            return logits
        return vocab_parallel_cross_entropy(logits, targets, vocab_size=self.config.vocab_size, group=self.group)
        ### END SOLUTION

    def new_cache(self, batch_size, max_length):
        return [layer.new_cache(batch_size, max_length) for layer in self.layers]


# %% [markdown] hints="10.2"
# 1. Go down the table of section 2: each row is a line or two. Which of these modules do the sending themselves?
# 2. Places `past, past + 1, ..`; both embeddings added; dropout; each layer with its own cache and the same `rng`; the final norm; logits with the embedding's own weight; the loss if there are targets. `parallel_logits` has its f inside, `self.embedding` its g.
# 3. `x = self.embedding(ids) + self.positions(torch.arange(past, past + ids.shape[1], device=ids.device))`, then `dropout(x, self.config.dropout, self.training, sharded=False, rng=rng)`, the loop with `layer(x, cache=cache[number] if cache else None, rng=rng)`, `self.final_norm(x)`, `parallel_logits(x, self.embedding.weight, group=self.group)`, and for the loss `vocab_size=self.config.vocab_size` too.

# %% check="10.2"
check("10.2", ParallelGPT)

# %% [markdown]
# One training step of it, as recorded, and what you predicted:


# %%
def one_step(config, batch, length, dtype=torch.float32):
    """What a training step sends on this rank, and how many parameters the rank holds."""
    model = ParallelGPT(config, ParallelTransformerLayer, device=device(), dtype=dtype)
    ids = torch.randint(config.vocab_size, (batch, length + 1), generator=torch.Generator().manual_seed(0)).to(device())
    with record() as section:
        model(ids[:, :-1], ids[:, 1:]).backward()
    return {"sent": list(section), "held": sum(param.numel() for param in model.parameters())}


small = GPTConfig(num_layers=2, hidden_size=32, num_heads=4, vocab_size=256, seq_length=16, dropout=0.0)
calls = launch(one_step, 2, args=(small, 2, 16))[0]["sent"]
viz.table(
    [
        {
            "all-reduces of one step": len(same),
            "numbers in each": numel,
            "taken as": ", ".join(sorted({c.op for c in same})),
        }
        for numel in sorted({call.numel for call in calls}, reverse=True)
        for same in [[call for call in calls if call.numel == numel]]
    ]
)

# %% [markdown]
# ## 3 · A checkpoint from elsewhere
#
# A model that nobody can load weights into is of little use. The best-known format of GPT weights is that of GPT-2 in Hugging Face's `transformers`. So here is a plain GPT, one process, no `tplab` in it, with GPT-2's names and layout. It is the twin that everything below is compared with. (`tests/gpt/test_model.py` of this
# course does the same with Hugging Face's own `GPT2LMHeadModel`.)


# %%
class Conv1D(nn.Module):
    """A linear layer whose weight is stored [in, out], as GPT-2 has it."""

    def __init__(self, n_out, n_in):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_in, n_out) * n_in**-0.5)
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x):
        return x @ self.weight + self.bias


class PlainLayer(nn.Module):
    def __init__(self, h, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.attn = nn.ModuleDict({"c_attn": Conv1D(3 * h, h), "c_proj": Conv1D(h, h)})
        self.mlp = nn.ModuleDict({"c_fc": Conv1D(4 * h, h), "c_proj": Conv1D(h, 4 * h)})

    def forward(self, x):
        parts = self.attn["c_attn"](self.ln_1(x)).chunk(3, dim=-1)  # [b, s, h] each
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)  # [b, a, s, h/a]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](y.transpose(1, 2).flatten(2))  # [b, s, h]
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """GPT-2 on one process: ids [b, s] -> logits [b, s, v]."""

    def __init__(self, config):
        super().__init__()
        h = config.hidden_size
        parts = {"wte": nn.Embedding(config.vocab_size, h), "wpe": nn.Embedding(config.seq_length, h)}
        parts["h"] = nn.ModuleList(PlainLayer(h, config.num_heads) for _ in range(config.num_layers))
        self.transformer = nn.ModuleDict(parts | {"ln_f": nn.LayerNorm(h)})
        self.lm_head = nn.Linear(h, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight  # tied
        for name in ("wte", "wpe"):
            nn.init.normal_(self.transformer[name].weight, std=0.1)

    def forward(self, ids):
        parts = self.transformer
        x = parts["wte"](ids) + parts["wpe"](torch.arange(ids.shape[1], device=ids.device))  # [b, s, h]
        for layer in parts["h"]:
            x = layer(x)
        return self.lm_head(parts["ln_f"](x))  # [b, s, v]


CONFIG = GPTConfig(
    num_layers=2, hidden_size=64, num_heads=4, vocab_size=256, seq_length=96, activation="gelu_tanh", dropout=0.0
)
torch.manual_seed(0)
theirs = PlainGPT(CONFIG).double().state_dict()


def shapes_on_a_rank():
    return {name: list(param.shape) for name, param in ParallelGPT(CONFIG, device=device()).named_parameters()}


pairs = {"embedding": "transformer.wte", "positions": "transformer.wpe"}
pairs |= {f"layers.0.{ours}": f"transformer.h.0.{name}" for ours, name in NAMES.items()}
pairs |= {"final_norm": "transformer.ln_f"}
on_rank = launch(shapes_on_a_rank, 4)[0]
viz.table(
    [
        {
            "in GPT-2's checkpoint": f"{name}.{end}",
            "its shape": str(list(theirs[f"{name}.{end}"].shape)),
            "in ParallelGPT": f"{ours}.{end}",
            "on each of 4 ranks": str(on_rank[f"{ours}.{end}"]),
        }
        for ours, name in pairs.items()
        for end in ("weight", "bias")
        if f"{name}.{end}" in theirs
    ]
)

# %% [markdown]
# Read the shapes. Three things differ:
#
# - **Names.** Yours are those on the right.
# - **Layout.** The weights of GPT-2's linear layers lie `[in, out]`, because its `Conv1D` computes `x @ W`. `nn.Linear` and the parallel layers keep `[out, in]`. So each has to be transposed. Of `attn.c_proj` the shape does not tell, since it is square.
# - **Size.** A rank holds a part. `c_attn` is `[Wq | Wk | Wv]`, fused: each rank takes its heads of all three. The table is padded with rows of zeros, so that each rank takes the same number of rows, a whole multiple of `multiple` (chapter 07).
#
# The output layer is tied, so `lm_head.weight` is the same tensor as `wte` and has no place of its own. Old checkpoints also hold causal masks as buffers, under `attn.bias`, which is no bias at all.

# %% [markdown] task="10.3" title="From GPT-2's checkpoint to shards" difficulty=3 minutes=20
# Return this rank's part of every parameter of `ParallelGPT` under its name, out of a whole state dict in GPT-2's format. It is a plain function: nothing is sent, and no process group is needed.
#
# - `shard(tensor, dim, rank, world_size, stride=1)` of `tplab.tensor.sharding` cuts, with `stride` equal blocks each cut for itself; `pad_vocab_size(vocab_size, world_size, multiple)` of chapter 07 is the number of rows of the padded table.
# - `NAMES` gives the names within a layer. Outside: `transformer.wte`, `transformer.wpe`, `transformer.ln_f`, and `transformer.h.0.` for the first layer.
# - Leave `state` and its tensors as they are.


# %% exercise="10.3"
def gpt2_shards(state, config, rank, world_size, multiple=8):
    """What `rank` of `world_size` ranks holds of a checkpoint in GPT-2's format.

    in:  state, whole tensors under GPT-2's names; the weights of linear layers are [in, out]
    out: {"embedding.weight": [v/p, h], "layers.0.attention.qkv.weight": [3h/p, h], ...}, for load_state_dict
    """
    ### BEGIN SOLUTION
    table = state["transformer.wte.weight"]  # [v, h]
    padding = pad_vocab_size(len(table), world_size, multiple) - len(table)
    table = F.pad(table, (0, 0, 0, padding))  # [v, h], v padded
    mine = {
        "embedding.weight": shard(table, 0, rank, world_size),  # [v/p, h]
        "positions.weight": state["transformer.wpe.weight"],
    }
    for end in ("weight", "bias"):
        mine[f"final_norm.{end}"] = state[f"transformer.ln_f.{end}"]
        for number in range(config.num_layers):
            for ours, theirs in NAMES.items():
                tensor = state[f"transformer.h.{number}.{theirs}.{end}"]
                if tensor.dim() == 2:
                    tensor = tensor.t()  # [in, out] -> [out, in]
                if ours == "attention.qkv":
                    tensor = shard(tensor, 0, rank, world_size, stride=3)  # [3h/p, h]
                elif ours == "mlp.up":
                    tensor = shard(tensor, 0, rank, world_size)  # [4h/p, h]
                elif tensor.dim() == 2:
                    tensor = shard(tensor, 1, rank, world_size)  # [h, h/p], [h, 4h/p]
                mine[f"layers.{number}.{ours}.{end}"] = tensor
    return mine
    ### END SOLUTION


# %% [markdown] hints="10.3"
# 1. For each row of the table above: is it transposed, along which dimension is it cut, and into how many blocks first? Which rows are whole on every rank?
# 2. Transpose what has two dimensions in a layer. Then: Q, K, V along dimension 0 with `stride=3`; `mlp.up` along 0; both with their biases. The weights of `attention.out` and `mlp.down` along 1, their biases whole. Norms and positions whole. `F.pad(table, (0, 0, 0, n))` adds `n` rows of zeros to the table.
# 3. A loop over `NAMES.items()` with `tensor = state[f"transformer.h.{number}.{theirs}.{end}"]`, `tensor.t()` if it has two dimensions, then `shard(tensor, 0, rank, world_size, stride=3)` for `"attention.qkv"`, `shard(tensor, 0, rank, world_size)` for `"mlp.up"`, `shard(tensor, 1, rank, world_size)` for the other weights of two dimensions, and `mine[f"layers.{number}.{ours}.{end}"] = tensor`.

# %% check="10.3"
check("10.3", gpt2_shards)

# %% [markdown]
# Now the equality that the chapter promised: your GPT, built from your layer, with the shards that your loader cut, against the plain one with the same weights. Logits, loss, and the gradient of every parameter, which `gpt2_shards` cuts for the comparison too: a gradient is laid out like its weight.


# %%
def against_plain(state, ids):
    """The largest differences on this rank from the plain GPT."""
    model = ParallelGPT(CONFIG, ParallelTransformerLayer, device=device(), dtype=torch.float64)
    model.load_state_dict(gpt2_shards(state, CONFIG, dist.get_rank(), dist.get_world_size()))
    inputs, targets = ids[:, :-1].to(device()), ids[:, 1:].to(device())
    logits, loss = model(inputs), model(inputs, targets)
    loss.backward()
    plain = PlainGPT(CONFIG).double()
    plain.load_state_dict(state)
    whole = plain(ids[:, :-1])
    right = F.cross_entropy(whole.flatten(0, 1), ids[:, 1:].flatten())
    right.backward()
    width = logits.shape[-1]
    part = whole[..., dist.get_rank() * width :][..., :width]
    named = {name: param.grad for name, param in plain.named_parameters()}
    gradients = gpt2_shards(named, CONFIG, dist.get_rank(), dist.get_world_size())
    off = [(param.grad.cpu() - gradients[name]).abs().max().item() for name, param in model.named_parameters()]
    return {
        "logits": (logits.cpu() - part).abs().max().item(),
        "loss": abs(loss.item() - right.item()),
        "gradients": max(off),
        "gradients compared": len(off),
    }


ids = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1))
rows = []
for p in (1, 2, 4):
    ranks = launch(against_plain, p, args=(theirs, ids))
    worst = {name: f"{max(rank[name] for rank in ranks):.0e}" for name in ("logits", "loss", "gradients")}
    rows.append({"p": p} | worst | {"gradients compared": ranks[0]["gradients compared"]})
viz.table(rows, title="largest difference from the plain GPT, on any rank, in float64")

# %% [markdown]
# ## 4 · Training on real text
#
# The text is on your machine already: 3000 bytes of the Python standard library's sources, so little that a small model can begin to learn it within seconds. A byte is a token, the target of every byte is the byte after it.

# %%
CONTEXT, BATCH, STEPS = 48, 8, 120
text = corpus.python_sources(6000)[3000:]
print(text[:400].decode())


# %%
def train(model, loss_of, steps):
    """The loss of every step. All ranks draw the same batches, from the same seed."""
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.0)
    losses = []
    for inputs, targets in corpus.byte_batches(text, CONTEXT, BATCH, steps, seed=1):
        loss = loss_of(inputs.to(device()), targets.to(device()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def new_plain():
    plain = PlainGPT(CONFIG).double()
    plain.load_state_dict(theirs)
    return plain


plain = new_plain()
plain_losses = train(plain, lambda ids, targets: F.cross_entropy(plain(ids).transpose(1, 2), targets), STEPS)
print(f"one process, plain PyTorch: loss {plain_losses[0]:.3f} -> {plain_losses[-1]:.3f}")

# %% [markdown]
# The same on two ranks, with your GPT, your layer, and the starting point cut by your loader. There is no line in `train` that knows of ranks.


# %%
def train_on_ranks(steps, layer_class=ParallelTransformerLayer):
    model = ParallelGPT(CONFIG, layer_class, device=device(), dtype=torch.float64)
    model.load_state_dict(gpt2_shards(theirs, CONFIG, dist.get_rank(), dist.get_world_size()))
    losses = train(model, model, steps)
    return {"losses": losses, "checkpoint": full_state_dict(model)}


runs = {2: launch(train_on_ranks, 2, args=(STEPS,), timeout=300)}
viz.curves(
    {"one process, plain PyTorch": plain_losses, "your ParallelGPT, p = 2": runs[2][0]["losses"]},
    title=f"{STEPS} steps on real text",
)

# %% [markdown]
# One curve. And with one rank and four, a quarter of the steps, since four ranks are slow on the few cores of a laptop:

# %%
for p in (1, 4):
    runs[p] = launch(train_on_ranks, p, args=(STEPS // 4,), timeout=300)
viz.table(
    [
        {
            "your GPT": f"p = {p}",
            "steps": len(run[0]["losses"]),
            "its last loss": f"{run[0]['losses'][-1]:.6f}",
            "that of plain PyTorch": f"{plain_losses[len(run[0]['losses']) - 1]:.6f}",
            "largest difference in any step": f"{max(abs(a - b) for a, b in zip(run[0]['losses'], plain_losses, strict=False)):.0e}",
        }
        for p, run in sorted(runs.items())
    ]
)

# %% [markdown]
# The differences begin in the last digits of a float64, since sums are taken in another order, and grow a little with each step, as every difference does in a training.
#
# ## 5 · Writing text
#
# To **generate**, the model reads a prompt, gives the logits for the next token, one token is chosen, and the text with this token is read again. **Greedy** means that the token with the largest logit is chosen. With a KV cache (chapter 06) each step reads only the new token: the keys and values of the others are kept.
#
# The logits of one place are split: rank `r` has those of its `v/p` ids. To gather them would be simple and wasteful: only one of them counts. The largest of all is the largest of the ranks' largest ones.
#
# All ranks have to choose the **same** token, or from then on they read different texts. If two ids have the same logit, they must agree on which one; take the lower id, as `torch.argmax` does on one process.
#
# **Predict.** `v = 8` real ids and `p = 2`, four ids a rank. Rank 0 has the logits `[0.5, 2.0, -1.0, 2.0]`, rank 1 has `[1.0, 0.0, 3.0, 3.0]`. Which place does `argmax` give on each rank, and which id must all ranks choose? And for GPT-2, `v = 50257` padded to 50432 on two ranks: how many numbers does a gather of all logits hold for one token?

# %% predict="10.d"
predict("10.d", place_on_rank_0=1, place_on_rank_1=2, chosen_id=6, gathered=50432)

# %% [markdown] task="10.4" title="Greedy generation on p ranks" difficulty=4 minutes=25
# Two functions. `best_token` chooses; `generate` runs the model with a cache.
#
# - An id of `vocab_size` or more is padding and must not be chosen, whatever its logit is.
# - Only a few numbers for each text may travel. `dist.all_reduce` knows `dist.ReduceOp.MAX` and `dist.ReduceOp.MIN` and works in place. Ids are integers: keep them so, since a float16 or bfloat16 has too few digits for an id.
# - `model(ids, cache=cache, past=past)` gives this rank's logits `[b, s, v/p]`, for the `s` tokens of `ids` that stand at the places `past`, `past + 1`, ... `model.new_cache(batch_size, max_length)` makes the cache; `model.config.vocab_size` and `model.group` are what `best_token` wants.
# - Read the whole prompt in one call, then one token a call. The model is in eval mode already.


# %% exercise="10.4"
def best_token(logits, vocab_size, group=None):
    """The id with the largest logit of all ranks, the lowest such id; the same on every rank.

    in:  logits, of this rank    [b, v/p]
    out: ids, replicated         [b] int64
    """
    ### BEGIN SOLUTION
    width = logits.shape[-1]
    start = dist.get_rank(group) * width
    ids = torch.arange(start, start + width, device=logits.device)  # [v/p]
    value, place = logits.masked_fill(ids >= vocab_size, -torch.inf).max(-1)  # [b]
    best = value.clone()
    dist.all_reduce(best, op=dist.ReduceOp.MAX, group=group)
    token = torch.where(value == best, start + place, vocab_size)  # [b]: no candidate here: a number above all ids
    dist.all_reduce(token, op=dist.ReduceOp.MIN, group=group)
    return token
    ### END SOLUTION


@torch.no_grad()
def generate(model, prompt, max_new_tokens):
    """The prompts, each continued greedily with a KV cache.

    in:  prompt, replicated    [b, s]
    out: text, replicated      [b, s + max_new_tokens]
    """
    ### BEGIN SOLUTION
    b, s = prompt.shape
    cache, text, past = model.new_cache(b, s + max_new_tokens), prompt, 0
    for _ in range(max_new_tokens):
        logits = model(text[:, past:], cache=cache, past=past)[:, -1]  # [b, v/p]
        past = text.shape[1]
        token = best_token(logits, model.config.vocab_size, model.group)  # [b]
        text = torch.cat([text, token[:, None]], dim=1)
    return text
    ### END SOLUTION


# %% [markdown] hints="10.4"
# 1. `best_token`: which two numbers of a rank can win, and how does a place in its shard become an id? `generate`: which tokens has the cache not seen yet, at the first step and at the others, and at which place does the first of them stand?
# 2. First the largest value of all ranks, by `MAX`. A rank whose own best is as large offers its id, the others a number above all ids; `MIN` over the offers is the lowest id. Before that, padded places get `-inf`. In `generate`, remember how many tokens the cache holds: 0, then the length of the text that was read.
# 3. `value, place = logits.masked_fill(ids >= vocab_size, -torch.inf).max(-1)` with `ids = start + arange(v/p)` and `start = rank * v/p`; `token = torch.where(value == best, start + place, vocab_size)`. In the loop: `model(text[:, past:], cache=cache, past=past)[:, -1]`, then `past = text.shape[1]`, then append `token[:, None]`.

# %% check="10.4"
check("10.4", best_token, generate)

# %% [markdown]
# What did the model learn? Take the checkpoint of the run on two ranks, load it on one, two and four, and let each of them write. The plain GPT, trained on one process, continues its text without any cache.

# %%
PROMPTS = ["    def ", "class _F", "import t", "nested_s"]


def write(checkpoint):
    model = ParallelGPT(CONFIG, ParallelTransformerLayer, device=device(), dtype=torch.float64).eval()
    load_full_state_dict(model, checkpoint)
    prompts = torch.tensor([list(prompt.encode()) for prompt in PROMPTS], device=device())  # [4, 8]
    with record() as section:
        written = generate(model, prompts, 40)  # [4, 48]
    return {"texts": [bytes(line).decode(errors="replace") for line in written.tolist()], "totals": section.totals()}


@torch.no_grad()
def plain_text(prompt, length):
    ids = torch.tensor([list(prompt.encode())])
    for _ in range(length):
        ids = torch.cat([ids, plain(ids)[:, -1:].argmax(-1)], dim=1)
    return bytes(ids[0].tolist()).decode(errors="replace")


texts = {p: launch(write, p, args=(runs[2][0]["checkpoint"],)) for p in (1, 2, 4)}
viz.table(
    [
        {"plain PyTorch writes": repr(plain_text(prompt, 40))}
        | {
            f"p = {p}": "the same"
            if all(rank["texts"][i] == plain_text(prompt, 40) for rank in texts[p])
            else "another"
            for p in texts
        }
        for i, prompt in enumerate(PROMPTS)
    ]
)

# %% [markdown]
# It stammers, after 120 steps on 3000 bytes; and it stammers alike on any number of ranks.
#
# ## 6 · Break it
#
# **First.** The residual, added before g instead of behind it. The block's own sum over the ranks is taken by hand here, so that the residual can get into it.


# %%
class ResidualBeforeG(ParallelTransformerLayer):
    def forward(self, x, *, cache=None, rng=None):
        y, bias = self.attention(self.attention_norm(x), cache=cache, rng=rng)
        x = x + y + bias  # [b, s, h]: so far it is right
        inner = F.gelu(self.mlp.up(self.mlp_norm(x)), approximate="tanh")  # [b, s, 4h/p]
        return reduce_from_region(x + F.linear(inner, self.mlp.down.weight)) + self.mlp.down.bias


def first_loss(layer_class):
    model = ParallelGPT(CONFIG, layer_class, device=device(), dtype=torch.float64)
    model.load_state_dict(gpt2_shards(theirs, CONFIG, dist.get_rank(), dist.get_world_size()))
    inputs, targets = next(corpus.byte_batches(text, CONTEXT, BATCH, 1, seed=1))
    return model(inputs.to(device()), targets.to(device())).item()


classes = {"your layer": ParallelTransformerLayer, "the residual before g": ResidualBeforeG}
viz.table(
    [
        {"first loss": name} | {f"p = {p}": f"{launch(first_loss, p, args=(layer_class,))[0]:.6f}" for p in (1, 2, 4)}
        for name, layer_class in classes.items()
    ]
)

# %% [markdown]
# With one rank it is right, and each `p` gives another loss: g has added up `p` residuals. All later norms hide how large the stream has become, so the loss is not even absurd. That the result depends on `p` is the symptom; a test with `p = 1` alone sees nothing.
#
# **Second.** Dropout of the residual stream, with a mask of its own on each rank. Before you run it: will the ranks report different losses?


# %%
class OwnMasks(ParallelTransformerLayer):
    def forward(self, x, *, cache=None, rng=None):
        y, bias = self.attention(self.attention_norm(x), cache=cache, rng=rng)
        x = x + dropout(y + bias, self.hidden_dropout, self.training, sharded=True, rng=rng)
        y, bias = self.mlp(self.mlp_norm(x))
        return x + dropout(y + bias, self.hidden_dropout, self.training, sharded=True, rng=rng)


def train_with_dropout(layer_class):
    config = GPTConfig(**{**vars(CONFIG), "dropout": 0.2})
    model = ParallelGPT(config, layer_class, device=device(), dtype=torch.float64)
    model.load_state_dict(gpt2_shards(theirs, config, dist.get_rank(), dist.get_world_size()))
    tracker = seed_all(0)
    losses = train(model, lambda ids, targets: model(ids, targets, rng=tracker), steps=20)
    replicated = {n: w.detach() for n, w in model.named_parameters() if not hasattr(w, "tensor_parallel")}
    return {"losses": losses, "replicated": replicated}


rows = []
for name, layer_class in {"your layer": ParallelTransformerLayer, "a mask for each rank": OwnMasks}.items():
    one, other = launch(train_with_dropout, 2, args=(layer_class,), timeout=300)
    drift = max((one["replicated"][n] - other["replicated"][n]).abs().max().item() for n in one["replicated"])
    rows.append(
        {
            "dropout with": name,
            "rank 0, last loss": f"{one['losses'][-1]:.6f}",
            "rank 1, last loss": f"{other['losses'][-1]:.6f}",
            "largest difference between replicas": f"{drift:.1e}",
        }
    )
viz.table(rows, title="20 steps with a dropout of 0.2, p = 2")

# %% [markdown]
# The ranks report the same loss to the last digit, since the loss is made of all-reduces: each rank adds its part, and all get the same sums, of logits that come from two different streams. Nothing in the curve tells. The norms, biases and positions of the two ranks are no longer the same, and the detector of chapter 05 is what sees it.
#
# **Third.** A checkpoint that is loaded wrongly and without an error. Here is the trained plain model, and one kind of weight is left as it lies, not transposed.


# %%
def loss_without_turning(state, name):
    """The loss on a batch when the weights called `name` are not transposed by the loader."""
    state = {key: value.t() if name and key.endswith(f"{name}.weight") else value for key, value in state.items()}
    model = ParallelGPT(CONFIG, ParallelTransformerLayer, device=device(), dtype=torch.float64)
    try:
        model.load_state_dict(gpt2_shards(state, CONFIG, dist.get_rank(), dist.get_world_size()))
    except (RuntimeError, ValueError):
        return "an error"
    inputs, targets = next(corpus.byte_batches(text, CONTEXT, BATCH, 1, seed=1))
    return f"{model(inputs.to(device()), targets.to(device())).item():.4f}"


trained = {name: value.clone() for name, value in plain.state_dict().items()}
viz.table(
    [
        {
            "not transposed": name or "nothing: your loader",
            "loss, p = 2": launch(loss_without_turning, 2, args=(trained, name))[0],
        }
        for name in ("", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
)

# %% [markdown]
# Three of the four are seen at once, since the shapes do not fit. `attn.c_proj` is square, loads, and the model has forgotten most of what it knew. That is why a loader is tested on logits, not on whether it runs.

# %%
symptoms(10)

# %% [markdown]
# ## 7 · Measure it
#
# One training step of your GPT against a formula. Every message of f and g has `b·s·h` numbers: one of the embedding, one of the logits, four for each layer. The loss sends `b·s` maxima, and `b·s + 1` sums: for each token the sum of the exponentials, and one number for the targets' logits of all tokens together (chapter 08).


# %%
def formula(config, b, s, p, size=4):
    """Collectives and bytes of one training step."""
    if p == 1:
        return 0, 0
    large = 4 * config.num_layers + 2
    return large + 2, size * (large * b * s * config.hidden_size + 2 * b * s + 1)


rows = []
for p in (1, 2, 4):
    run = launch(one_step, p, args=(CONFIG, BATCH, CONTEXT))[0]
    calls, size = formula(CONFIG, BATCH, CONTEXT, p)
    rows.append(
        {
            "p": p,
            "collectives": len([call for call in run["sent"] if p > 1]),
            "formula": calls,
            "bytes": f"{sum(call.bytes for call in run['sent'] if p > 1):,}",
            "formula ": f"{size:,}",
            "parameters of a rank": f"{run['held']:,}",
            "of all of them": f"{run['held'] / parameter_count(CONFIG):.1%}",
        }
    )
viz.table(rows, title="one training step in float32")

# %% [markdown]
# The number of messages grows with the number of layers and not with `p`. What a rank holds shrinks almost like `1/p`: the positions, norms and last biases stay whole, and for a model as small as this one the positions count. For GPT-3, with the sizes that Brown et al. (2020) give, it looks better:

# %%
gpt3 = GPTConfig(num_layers=96, hidden_size=12288, num_heads=96, vocab_size=50257, seq_length=2048)
h, L = gpt3.hidden_size, gpt3.num_layers
whole = L * 6 * h + 2 * h + gpt3.seq_length * h  # norms and last biases; final norm; positions
rows = []
for p in (1, 8):
    table = pad_vocab_size(gpt3.vocab_size, p) * h
    of_rank = whole + (L * (12 * h**2 + 7 * h) + table) / p
    travels = formula(gpt3, 1, 2048, p, size=2)[1]
    rows.append(
        {
            "p": p,
            "parameters of a rank": f"{of_rank / 1e9:.2f} billion",
            "whole on every rank": f"{whole / of_rank:.2%}",
            "bytes of a step, one text of 2048 tokens": f"{travels / 1e9:.2f} GB",
        }
    )
viz.table(rows, title="GPT-3 175B, 16-bit numbers")

# %% [markdown]
# And generation, for the four texts of section 5, with 8 tokens of prompt and 40 new ones: what went over the links with the cache, and what the choice of the tokens would have cost by gathering the logits.

# %%
b, s, new = len(PROMPTS), 8, 40
read, per_token = b * (s + new - 1), (2 * CONFIG.num_layers + 1) * CONFIG.hidden_size  # tokens read; numbers for each
again = b * sum(s + step for step in range(new))  # tokens read if all of the text were read for each new one
rows = []
for p in (2, 4):
    total = texts[p][0]["totals"]["all_reduce"]
    rows.append(
        {
            "p": p,
            "all-reduces": total.calls,
            "bytes": f"{total.bytes:,}",
            "formula": f"{8 * (read * per_token + 2 * b * new):,}",
            "of these to choose": f"{8 * 2 * b * new:,}",
            "a gather of the logits": f"{8 * b * new * 256:,}",
            "without a cache": f"{8 * (again * per_token + 2 * b * new):,}",
        }
    )
viz.table(rows, title="40 tokens for each of 4 texts, float64")

# %% [markdown]
# <details><summary>Going deeper: float16, and why every rank has to skip the same steps</summary>
#
# With float16, people multiply the loss by a large number, such as 65,536, so that small gradients don't round to zero. If a gradient overflows because of that, PyTorch's `GradScaler` skips the step and halves its scale. It decides this separately in each process, from the gradients that this process has.
#
# With tensor parallelism, a gradient can overflow on just one rank, because every rank has a different shard. We tried it on two ranks, with a column- and a row-parallel layer, and set a single element of rank 0's gradient to infinity. Rank 0 skipped the step and went on with a scale of 32,768. Rank 1 took the step and kept its scale of 65,536. So the bias, which should be the same on every rank, moved by -0.2 on rank 1 and not at all on rank 0. Nobody got an error.
#
# `tplab.cluster.TrainingStep` bases the decision on the full model's gradient norm. The norm is the same on every rank, and it's infinite or NaN as soon as any element is, so either all ranks take the step or none of them do. Megatron-LM takes the maximum of the ranks' overflow flags instead, which has the same effect (`MixedPrecisionOptimizer`). With bfloat16, there's no scale, because it has the same range as float32.
#
# </details>

# %% [markdown]
# ## 8 · In the wild
#
# **Megatron-Core**, `megatron/core/transformer/transformer_layer.py`: `TransformerLayer`, with `input_layernorm`, `self_attention`, `self_attn_bda`, `cross_attention`, `pre_mlp_layernorm`, `mlp`, `mlp_bda`. `bda` is bias, dropout, add: `get_bias_dropout_add` in `megatron/core/fusions/fused_bias_dropout.py`, which fuses the three. The
# switch for post-LN, `apply_residual_connection_post_layernorm`, still stands in `TransformerConfig` of release 0.16.1, but its layer no longer reads it. The model is `GPTModel` in `megatron/core/models/gpt/gpt_model.py`.
#
# **Hugging Face**, `transformers/models/gpt2/modeling_gpt2.py`: `GPT2LMHeadModel`, with `GPT2Block` and `Conv1D`, whose weight is `[in, out]`. `tplab.gpt.hugging_face` maps its state dict, and that of a Llama, to the names of `tplab.gpt.model`; `tplab.gpt.generation` also draws from the `k` best, for which every rank sends its `k` candidates.
#
# **PyTorch**: `parallelize_module` with a plan for each layer, as in chapter 05, `RowwiseParallel` for the embedding, `ColwiseParallel` for the output layer, and `loss_parallel()` around the loss, all in `torch.distributed.tensor.parallel`.
#
# ## 9 · Recap
#
# 1. Two blocks, each with one f and one g; all between g and the next f, bias, dropout, residual and norm, is computed by every rank alike, and sends nothing, forward or backward.
# 2. Traffic of a training step: `4L + 2` all-reduces of `b·s·h` numbers and two small ones for the loss, for every `p > 1`.
# 3. Memory: weights of a layer `12h²/p`, and `6h` numbers that stay whole; the activations between the blocks stay whole too. Chapter 12 does something about these.
# 4. What goes in and out is a plain GPT: same logits, loss and gradients at every `p`, a checkpoint in any format is names, transposes and cuts.
# 5. To choose a token, a few numbers for each text are enough; all ranks must choose the same one. Next, chapter 11 asks what all these messages cost, and how to hide some of them.

# %% [markdown]
# ## Your library so far
#
# The pieces have become a GPT that loads GPT-2's weights and writes text. Let it write on two processes: the line for it is below the table.

# %%
from tplab.course import library

library(10)
