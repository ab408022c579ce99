"""Wrong answers to the exercises of chapter 06, and what each must be told."""

from textwrap import dedent

from tests.wrong_answers import WrongAnswer, indented, swap

SPLIT = "return y.unflatten(-1, (-1, head_dim)).transpose(1, 2)"
MERGE = "return y.transpose(1, 2).flatten(2)"
ATTEND = """
s, t = q.shape[2], k.shape[2]
scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
if causal:
    hidden = torch.ones(s, t, dtype=torch.bool, device=q.device).triu(t - s + 1)
    scores = scores.masked_fill(hidden, -torch.inf)
return scores.softmax(dim=-1) @ v
"""


def heads(attend: str = ATTEND, split: str = SPLIT, merge: str = MERGE) -> str:
    return f"""
def split_heads(y, head_dim):
{indented(split, 4)}


def attend(q, k, v, causal=False):
{indented(attend, 4)}


def merge_heads(y):
{indented(merge, 4)}
"""


HEADS = [
    ("a reshape without a transpose", heads(split="return y.reshape(y.shape[0], -1, y.shape[1], head_dim)"), "Cut the last dimension first"),
    ("head_dim is taken for the number of heads", heads(split="return y.unflatten(-1, (head_dim, -1)).transpose(1, 2)"), "the width of one head"),
    ("every n-th column", heads(split="return y.unflatten(-1, (head_dim, -1)).permute(0, 3, 1, 2)"), "In which order do the two sizes stand"),
    ("the heads stay behind the sequence", heads(split="return y.unflatten(-1, (-1, head_dim))"), "The result is [b, n, s, d]"),
    ("a head is a number too wide", heads(split="return y.unflatten(-1, (-1, head_dim + 1)).transpose(1, 2)"), "if every one has head_dim"),
    ("merges without a transpose", heads(merge="return y.reshape(y.shape[0], y.shape[2], -1)"), "merge_heads undoes split_heads"),
    ("merges number by number", heads(merge="return y.permute(0, 2, 3, 1).flatten(2)"), "in which order"),
    ("merges batch and heads", heads(merge="return y.flatten(0, 1)"), "merge_heads undoes split_heads"),
    ("no scale", heads(swap(ATTEND, " / math.sqrt(q.shape[3])", "")), "by what are your scores divided"),
    ("divides by d", heads(swap(ATTEND, "math.sqrt(q.shape[3])", "q.shape[3]")), "by what are your scores divided"),
    ("divides by the square root of h", heads(swap(ATTEND, "math.sqrt(q.shape[3])", "math.sqrt(q.shape[1] * q.shape[3])")), "of one head"),
    ("divides by the square root of t", heads(swap(ATTEND, "math.sqrt(q.shape[3])", "math.sqrt(k.shape[2])")), "by what are your scores divided"),
    ("multiplies by the scale", heads(swap(ATTEND, "/ math", "* math")), "softmax(q kᵀ / √d)"),
    ("softmax over the queries", heads(swap(ATTEND, "dim=-1", "dim=-2")), "counts keys"),
    ("softmax over the heads", heads(swap(ATTEND, "dim=-1", "dim=1")), "counts keys"),
    ("no softmax", heads(swap(ATTEND, "scores.softmax(dim=-1)", "scores.nan_to_num(neginf=0.0)")), "compare step by step"),
    ("causal is ignored", heads(swap(ATTEND, "if causal", "if False")), "Here causal is True"),
    ("always causal", heads(swap(ATTEND, "if causal", "if True")), "Here causal is False"),
    ("the triangle at the top left", heads(swap(ATTEND, "t - s + 1", "1")), "At which corner"),
    ("is_causal of the fused kernel", heads("return F.scaled_dot_product_attention(q, k, v, is_causal=causal)"), "At which corner"),
    ("a mask for the queries only", heads(swap(ATTEND, "hidden = torch.ones(s, t, dtype=torch.bool, device=q.device).triu(t - s + 1)", "hidden = torch.ones(s, s, dtype=torch.bool, device=q.device).triu(1)")), "There may be fewer queries than keys"),
    ("hides the past", heads(swap(ATTEND, "triu(t - s + 1)", "tril(t - s - 1)")), "Which side of the diagonal"),
    ("hides the token itself", heads(swap(ATTEND, "t - s + 1", "t - s")), "May a token look at itself"),
    ("sees one token of the future", heads(swap(ATTEND, "t - s + 1", "t - s + 2")), "Each query sees one key of the future"),
    ("fills with 0", heads(swap(ATTEND, "-torch.inf", "0.0")), "A score of 0 is not nothing"),
    ("masks after the softmax", heads(swap(ATTEND, "scores = scores.masked_fill(hidden, -torch.inf)\n", "return scores.softmax(-1).masked_fill(hidden, 0.0) @ v\n")), "must add up to 1"),
    ("the softmax is detached", heads(swap(ATTEND, "scores.softmax(dim=-1)", "scores.softmax(dim=-1).detach()")), "a gradient is not"),
    ("scales q in place", heads("q.data.div_(math.sqrt(q.shape[3]))\n" + swap(ATTEND, " / math.sqrt(q.shape[3])", "")), "still needs the tensors that were passed"),
    ("returns the weights", heads(swap(ATTEND, "scores.softmax(dim=-1) @ v", "scores.softmax(dim=-1)")), "the shape of q"),
    ("returns nothing", heads(swap(ATTEND, "return scores", "scores")), "What should your function return"),
    ("a softmax in float32, and back", heads(swap(ATTEND, "scores.softmax(dim=-1) @ v", "scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype) @ v")), "which of your lines goes through float32"),
    ("a float32 mask makes float32", heads(swap(ATTEND, "scores.softmax(dim=-1) @ v", "scores.float().softmax(dim=-1) @ v.float()")), "dtype float32, expected float64"),
    ("hidden scores of -100", heads(swap(ATTEND, "-torch.inf", "-100.0")), "Is a hidden score still far below the others"),
    ("exp without the maximum", heads(swap(ATTEND, "scores.softmax(dim=-1)", "(scores.exp() / scores.exp().sum(-1, keepdim=True))")), "does your softmax compute exp(900)"),
    ("a mask that is kept by the number of queries", heads(swap(ATTEND, "    scores = scores.masked", "    hidden = vars(attend).setdefault(s, hidden)\n    scores = scores.masked")), "the next call may have other sizes"),
]  # fmt: skip


def attention(forward: str = "", init: str = "", extra: str = "") -> str:
    return f"""
from tplab.tensor.mappings import copy_to_region, gather_from_region, reduce_from_region
{dedent(extra).strip()}

class ParallelAttention(nn.Module):
    def __init__(self, hidden_size, num_heads, *, causal=False, bias=True, group=None, device=None, dtype=None):
        super().__init__()
        self.causal, self.group = causal, group
        world_size = dist.get_world_size(group)
{indented(init or ATTENTION_INIT, 8)}

    def forward(self, x):
{indented(forward or ATTENTION_FORWARD, 8)}
"""


ATTENTION_INIT = """
divide(num_heads, world_size, name="num_heads", unit="heads")
self.num_heads, self.head_dim = num_heads, divide(hidden_size, num_heads)
options = {"bias": bias, "group": group, "device": device, "dtype": dtype}
self.qkv = ColumnParallelLinear(hidden_size, 3 * hidden_size, stride=3, **options)
self.out = RowParallelLinear(hidden_size, hidden_size, **options)
"""
ATTENTION_FORWARD = """
q, k, v = self.qkv(x).chunk(3, dim=-1)
q, k, v = (split_heads(part, self.head_dim) for part in (q, k, v))
y = attend(q, k, v, causal=self.causal)
return self.out(merge_heads(y))
"""
THREE_LAYERS = """
divide(num_heads, world_size)
self.head_dim = divide(hidden_size, num_heads)
options = {"bias": bias, "group": group, "device": device, "dtype": dtype}
self.q, self.k, self.v = (ColumnParallelLinear(hidden_size, hidden_size, **options) for _ in range(3))
self.out = RowParallelLinear(hidden_size, hidden_size, **options)
"""

ATTENTION = [
    ("stride 1: cut through the middle", attention(init=swap(ATTENTION_INIT, "stride=3, ", "")), "How many matrices are fused in `qkv`"),
    ("stride of the number of ranks", attention(init=swap(ATTENTION_INIT, "stride=3", "stride=world_size")), "How many matrices are fused in `qkv`"),
    ("three layers in place of a fused one", attention("q, k, v = (split_heads(layer(x), self.head_dim) for layer in (self.q, self.k, self.v))\nreturn self.out(merge_heads(attend(q, k, v, causal=self.causal)))", THREE_LAYERS), "Which parameter has another name or shape"),
    ("one f for each of q, k and v", attention(swap(ATTENTION_FORWARD, "q, k, v = self.qkv(x).chunk(3, dim=-1)", "q, k, v = (self.qkv(x).chunk(3, dim=-1)[i] for i in range(3))")), "One f stands in front of q, k and v together"),
    ("every head is cut inside", attention(swap(ATTENTION_FORWARD, "part, self.head_dim", "part, part.shape[-1] // self.num_heads")), "how wide is a head on a rank"),
    ("one wide head per rank", attention(swap(ATTENTION_FORWARD, "part, self.head_dim", "part, part.shape[-1]")), "Which number does split_heads want"),
    ("the number of heads for the width of a head", attention(swap(ATTENTION_FORWARD, "part, self.head_dim", "part, self.num_heads")), "Where does your order of steps differ"),
    ("q, k, v head by head, as Megatron stores them", attention(swap(ATTENTION_FORWARD, "q, k, v = self.qkv(x).chunk(3, dim=-1)\nq, k, v = (split_heads(part, self.head_dim) for part in (q, k, v))", "q, k, v = split_heads(self.qkv(x), 3 * self.head_dim).chunk(3, dim=-1)")), "Which columns of the product are q"),
    ("k before q", attention(swap(ATTENTION_FORWARD, "q, k, v = self.qkv", "k, q, v = self.qkv")), "in which order do the three come out"),
    ("v before k", attention(swap(ATTENTION_FORWARD, "q, k, v = self.qkv", "q, v, k = self.qkv")), "in which order do the three come out"),
    ("reshapes in place of split_heads", attention(swap(ATTENTION_FORWARD, "split_heads(part, self.head_dim)", "part.reshape(part.shape[0], -1, part.shape[1], self.head_dim)")), "Which of its functions does that for you"),
    ("reshapes in place of merge_heads", attention(swap(ATTENTION_FORWARD, "merge_heads(y)", "y.reshape(x.shape[0], x.shape[1], -1)")), "Which of its functions does that for you"),
    ("scaled by the square root of h", attention(swap(ATTENTION_FORWARD, "attend(q, k, v, causal=self.causal)", "F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=(q.shape[1] * q.shape[3]) ** -0.5)")), "By what are the scores divided"),
    ("softmax over the queries", attention(swap(ATTENTION_FORWARD, "attend(q, k, v, causal=self.causal)", "(q @ k.transpose(2, 3) / math.sqrt(self.head_dim)).softmax(2) @ v")), "counts keys"),
    ("causal is ignored", attention(swap(ATTENTION_FORWARD, ", causal=self.causal", "")), "Which line knows about `self.causal`"),
    ("always causal", attention(swap(ATTENTION_FORWARD, "causal=self.causal", "causal=True")), "Where does your order of steps differ"),
    ("gathers the heads, and every rank does all of them", attention("y = self.qkv(x)\nq, k, v = (split_heads(gather_from_region(part, self.group), self.head_dim) for part in y.chunk(3, -1))\nreturn self.out(merge_heads(attend(q, k, v, causal=self.causal)))", swap(ATTENTION_INIT, "hidden_size, **options)\n", "hidden_size, input_is_parallel=False, **options)\n")), "could stay where it is"),
    ("goes round the column layer: f is missing", attention(swap(ATTENTION_FORWARD, "self.qkv(x)", "F.linear(x, self.qkv.weight, self.qkv.bias)")), "taken once: that is f"),
    ("f twice", attention(swap(ATTENTION_FORWARD, "self.qkv(x)", "self.qkv(copy_to_region(x, self.group))")), "taken once: that is f"),
    ("goes round the row layer: nothing is added up", attention(swap(ATTENTION_FORWARD, "self.out(merge_heads(y))", "F.linear(merge_heads(y), self.out.weight, self.out.bias)")), "Which layer adds them up"),
    ("goes round the row layer: the bias on every rank", attention(swap(ATTENTION_FORWARD, "self.out(merge_heads(y))", "reduce_from_region(F.linear(merge_heads(y), self.out.weight, self.out.bias), self.group)")), "How many times is the last bias added"),
    ("v is detached", attention(swap(ATTENTION_FORWARD, "attend(q, k, v,", "attend(q, k, v.detach(),")), "Which line does autograd not know about"),
    ("returns zeros", attention("return torch.zeros_like(x)"), "None: no gradient reaches this tensor"),
    ("returns the heads' outputs", attention(swap(ATTENTION_FORWARD, "return self.out(merge_heads(y))", "return merge_heads(y)")), "Which line calls `self.out`"),
    ("returns a pair, as nn.MultiheadAttention does", attention(swap(ATTENTION_FORWARD, "return self.out(merge_heads(y))", "return self.out(merge_heads(y)), None")), "One tensor [b, s, h], the sum over all ranks"),
    ("bias is ignored", attention(init=swap(ATTENTION_INIT, '"bias": bias', '"bias": True')), "Which parameter has another name or shape"),
    ("needs a bias", attention(swap(ATTENTION_FORWARD, "self.out(merge_heads(y))", "self.out(merge_heads(y)) + 0 * self.out.bias")), "built with bias=False"),
    ("group is ignored", attention(init=swap(ATTENTION_INIT, '"group": group', '"group": None')), "the four ranks form two groups"),
    ("group is not passed to the second layer", attention(init=swap(ATTENTION_INIT, "(hidden_size, hidden_size, **options)", "(hidden_size, hidden_size, **{**options, 'group': None})")), "the four ranks form two groups"),
    ("a number of heads that p does not divide", attention(init=swap(ATTENTION_INIT, 'divide(num_heads, world_size, name="num_heads", unit="heads")\n', "")), "Which size has to be divisible by p"),
    ("an assert in place of the ValueError", attention(init=swap(ATTENTION_INIT, 'divide(num_heads, world_size, name="num_heads", unit="heads")', "assert num_heads % world_size == 0")), "an AssertionError was raised"),
    ("adds up the output once more", attention(swap(ATTENTION_FORWARD, "self.out(merge_heads(y))", "reduce_from_region(self.out(merge_heads(y)), self.group)")), "Which line of yours adds up again"),
    ("row first, then column", attention(init=swap(swap(ATTENTION_INIT, "ColumnParallelLinear(hidden_size, 3 * hidden_size, stride=3,", "RowParallelLinear(hidden_size, 3 * hidden_size, input_is_parallel=False,"), "self.out = RowParallelLinear(hidden_size, hidden_size,", "self.out = ColumnParallelLinear(hidden_size, hidden_size, gather_output=True,")), "is cut along its inputs here"),
    ("writes into x", attention("x.data.mul_(2)\n" + ATTENTION_FORWARD), "still needs the tensors that were passed"),
    ("residual inside", attention(swap(ATTENTION_FORWARD, "return self.out(merge_heads(y))", "return x + self.out(merge_heads(y))")), "nothing before it and nothing after it"),
    ("the mask of the first call", attention(swap(ATTENTION_FORWARD, "y = attend(q, k, v, causal=self.causal)", "scores = q @ k.transpose(2, 3) / math.sqrt(self.head_dim)\nif self.causal:\n    n = len(scores[0, 0])\n    mask = vars(self).setdefault('mask', torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1))\n    scores = scores.masked_fill(mask, -torch.inf)\ny = scores.softmax(-1) @ v")), "keeps its value between calls"),
]  # fmt: skip


def slicing(body: str) -> str:
    return f"""
def shard_qkv(weight, num_heads, num_kv_heads, rank, world_size):
{indented(body, 4)}
"""


REFUSE = "divide(num_heads, world_size)\nif num_kv_heads % world_size and world_size % num_kv_heads:\n    raise ValueError('uneven')\n"
SIZES = "copies = max(1, world_size // num_kv_heads)\nd = len(weight) // (num_heads + 2 * num_kv_heads)\n"
CUT = "wq, wk, wv = weight.split([num_heads * d, num_kv_heads * d, num_kv_heads * d])\n"
PIECES = "q = wq.chunk(world_size)[rank]\nk, v = (w.chunk(world_size // copies)[rank // copies] for w in (wk, wv))\n"
JOIN = "return torch.cat([q, k, v])"

SLICING = [
    ("through the middle", slicing(REFUSE + "return weight.chunk(world_size)[rank].clone()"), "the pile or each of the three"),
    ("as with stride 3", slicing(REFUSE + "return torch.cat([part.chunk(world_size)[rank] for part in weight.chunk(3)])"), "In which row does Wk begin"),
    ("heads dealt out one by one", slicing(REFUSE + SIZES + CUT + "q, k, v = (torch.cat(w.split(d)[rank::world_size] or (w.split(d)[rank % num_kv_heads],)) for w in (wq, wk, wv))\n" + JOIN), "A rank takes neighbouring heads"),
    ("copies by rank modulo", slicing(REFUSE + SIZES + CUT + swap(PIECES, "rank // copies]", "rank % (world_size // copies)]") + JOIN), "which head of K do they need"),
    ("every rank takes the first head of K and V", slicing(REFUSE + SIZES + CUT + swap(PIECES, "[rank // copies]", "[0]") + JOIN), "Which one do this rank's queries belong to"),
    ("all heads of K and V on every rank", slicing(REFUSE + SIZES + CUT + "return torch.cat([wq.chunk(world_size)[rank], wk, wv])"), "Which of these heads do this rank's queries look at"),
    ("all heads of K and V where there are fewer than ranks", slicing(REFUSE + SIZES + CUT + "if num_kv_heads < world_size:\n    return torch.cat([wq.chunk(world_size)[rank], wk, wv])\n" + PIECES + JOIN), "Which of these heads do this rank's queries look at"),
    ("heads of K and V are cut inside", slicing(REFUSE + SIZES + CUT + "return torch.cat([w.chunk(world_size)[rank] for w in (wq, wk, wv)])"), "A head of K is cut inside"),
    ("queries only", slicing(REFUSE + SIZES + CUT + PIECES + "return q.clone()"), "Where are its keys and values"),
    ("keys in place of values", slicing(REFUSE + SIZES + CUT + PIECES + "return torch.cat([q, k, k])"), "Wv begins where Wk ends"),
    ("K and V change places", slicing(REFUSE + SIZES + CUT + PIECES + "return torch.cat([q, v, k])"), "Write the row numbers down"),
    ("K first", slicing(REFUSE + SIZES + CUT + PIECES + "return torch.cat([k, v, q])"), "Write the row numbers down"),
    ("d from the number of heads of Q alone", slicing(REFUSE + swap(SIZES, "(num_heads + 2 * num_kv_heads)", "(3 * num_heads)") + CUT + PIECES + JOIN), "how many rows has a head"),
    ("the next rank's rows", slicing(REFUSE + SIZES + CUT + PIECES.replace("[rank]", "[(rank + 1) % world_size]").replace("[rank // copies]", "[(rank + 1) % world_size // copies]") + JOIN), "those of another rank"),
    ("the last dimension", slicing(REFUSE + SIZES + CUT + "return torch.cat([w.chunk(world_size, -1)[rank] for w in (wq, wk, wv)])"), "A rank's part has"),
    ("rank 0 always", slicing(REFUSE + SIZES + CUT + PIECES.replace("[rank]", "[0]").replace("[rank // copies]", "[0]") + JOIN), "those of another rank"),
    ("the whole", slicing(REFUSE + "return weight.clone()"), "A rank's part has"),
    ("writes into the weight", slicing(REFUSE + SIZES + CUT + PIECES + "mine = torch.cat([q, k, v])\nweight.zero_()\nreturn mine"), "still needs the tensors that were passed"),
    ("returns three", slicing(REFUSE + SIZES + CUT + PIECES + "return q, k, v"), "What should your function return"),
    ("uneven heads are cut inside", slicing(swap(REFUSE, "divide(num_heads, world_size)\n", "") + SIZES + CUT + PIECES + JOIN), "each takes whole heads"),
    ("uneven heads of K and V are taken", slicing("divide(num_heads, world_size)\n" + SIZES + CUT + PIECES + JOIN), "can neither be divided"),
    ("copies are refused", slicing("divide(num_heads, world_size)\ndivide(num_kv_heads, world_size)\n" + SIZES + CUT + PIECES + JOIN), "With fewer heads than ranks, neighbours hold copies"),
    ("copies heads of Q as well", slicing(SIZES + CUT + "copies_of_q = max(1, world_size // num_heads)\nif num_kv_heads % world_size and world_size % num_kv_heads or num_heads % world_size and world_size % num_heads:\n    raise ValueError('uneven')\nq = wq.chunk(world_size // copies_of_q)[rank // copies_of_q]\nk, v = (w.chunk(world_size // copies)[rank // copies] for w in (wk, wv))\n" + JOIN), "Only heads of K and V may be copied"),
]  # fmt: skip


def grouped(forward: str = "", init: str = "", extra: str = "") -> str:
    return f"""
from tplab.tensor.mappings import gather_from_region, reduce_from_region
{dedent(extra).strip()}

class GroupedAttention(nn.Module):
    def __init__(
        self, hidden_size, num_heads, num_kv_heads, *, causal=False, bias=True, group=None, device=None, dtype=None
    ):
        super().__init__()
        self.causal, self.group = causal, group
        self.head_dim = divide(hidden_size, num_heads)
        world_size = dist.get_world_size(group)
{indented(init or GROUPED_INIT, 8)}
        self.copies, self.copies_group = copies, copies_group(group, copies)
        blocks = [Block(heads * self.head_dim, unit=self.head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads)]
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv_weight = nn.Parameter(torch.empty(rows, hidden_size, device=device, dtype=dtype))
        self.qkv_weight.tensor_parallel = Sharding(dim=0, blocks=tuple(blocks))
        self.qkv_bias = None
        if bias:
            self.qkv_bias = nn.Parameter(torch.zeros(rows, device=device, dtype=dtype))
            self.qkv_bias.tensor_parallel = Sharding(dim=0, blocks=tuple(blocks))
        self.out = RowParallelLinear(hidden_size, hidden_size, bias, group=group, device=device, dtype=dtype)

    def forward(self, x):
        n, m, d = self.heads, self.kv_heads, self.head_dim
{indented(forward or GROUPED_FORWARD, 8)}
"""


GROUPED_INIT = """
self.heads = divide(num_heads, world_size)
if num_kv_heads % world_size and world_size % num_kv_heads:
    raise ValueError("uneven")
self.kv_heads = max(1, num_kv_heads // world_size)
copies = max(1, world_size // num_kv_heads)
"""
SUMMED = """
def summed(parameter):
    of_q, of_kv = parameter.split([n * d, 2 * m * d])
    return torch.cat([of_q, copy_to_region(of_kv, self.copies_group)])
"""
GROUPED_FORWARD = (
    SUMMED
    + """
weight = summed(self.qkv_weight)
bias = None if self.qkv_bias is None else summed(self.qkv_bias)
y = F.linear(copy_to_region(x, self.group), weight, bias)
q, k, v = (split_heads(part, d) for part in y.split([n * d, m * d, m * d], dim=-1))
k, v = (part.repeat_interleave(n // m, dim=1) for part in (k, v))
return self.out(merge_heads(attend(q, k, v, causal=self.causal)))
"""
)
NOT_SUMMED = swap(GROUPED_FORWARD, "copy_to_region(of_kv, self.copies_group)", "of_kv")
SPLIT_PARTS = "k, v = (part.repeat_interleave"
MEAN = """
class Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if dist.get_world_size(ctx.group) > 1:
            dist.all_reduce(gradient, group=ctx.group)
        return gradient / dist.get_world_size(ctx.group), None
"""

GROUPED = [
    ("the copies' gradients are not summed", grouped(NOT_SUMMED), "Who has the others"),
    ("summed over all ranks", grouped(swap(GROUPED_FORWARD, "self.copies_group", "self.group")), "hold *another* head of K"),
    ("summed over the default group", grouped(swap(GROUPED_FORWARD, "self.copies_group", "None")), "hold *another* head of K"),
    ("the mean over the copies", grouped(swap(GROUPED_FORWARD, "copy_to_region(of_kv, self.copies_group)", "Mean.apply(of_kv, self.copies_group)"), extra=MEAN), "Mean or sum"),
    ("the gradients of k and v in place of their weight", grouped(swap(NOT_SUMMED, SPLIT_PARTS, "k, v = (copy_to_region(part, self.copies_group) for part in (k, v))\n" + SPLIT_PARTS)), "the activation or the weight"),
    ("the gradients of the queries too", grouped(swap(GROUPED_FORWARD, "return torch.cat([of_q, copy_to_region(of_kv, self.copies_group)])", "return copy_to_region(parameter, self.copies_group)")), "nobody else holds them"),
    ("the gradients of the queries in place of those of K and V", grouped(swap(GROUPED_FORWARD, "[of_q, copy_to_region(of_kv, self.copies_group)]", "[copy_to_region(of_q, self.copies_group), of_kv]")), "Who has the others"),
    ("the sums of the copies, then of all rows again", grouped(swap(GROUPED_FORWARD, "weight = summed(self.qkv_weight)", "weight = copy_to_region(summed(self.qkv_weight), self.copies_group)")), "The gradients of q are summed as well"),
    ("the bias is forgotten", grouped(swap(GROUPED_FORWARD, "summed(self.qkv_bias)", "self.qkv_bias")), "Its rows of K and V are copies too"),
    ("the weight is forgotten", grouped(swap(GROUPED_FORWARD, "summed(self.qkv_weight)", "self.qkv_weight")), "Who has the others"),
    ("K alone is summed", grouped(swap(GROUPED_FORWARD, "of_q, of_kv = parameter.split([n * d, 2 * m * d])\n    return torch.cat([of_q, copy_to_region(of_kv, self.copies_group)])", "of_q, of_k, of_v = parameter.split([n * d, m * d, m * d])\n    return torch.cat([of_q, copy_to_region(of_k, self.copies_group), of_v])")), "Who has the others"),
    ("f is missing", grouped(swap(GROUPED_FORWARD, "copy_to_region(x, self.group)", "x")), "taken once: that is f"),
    ("f among the copies", grouped(swap(GROUPED_FORWARD, "copy_to_region(x, self.group)", "copy_to_region(x, self.copies_group)")), "taken once: that is f"),
    ("one f for each of q, k and v", grouped(swap(GROUPED_FORWARD, "y = F.linear(copy_to_region(x, self.group), weight, bias)\n", "biases = [None] * 3 if bias is None else bias.split([n * d, m * d, m * d])\ny = torch.cat([F.linear(copy_to_region(x, self.group), w, b) for w, b in zip(weight.split([n * d, m * d, m * d]), biases)], -1)\n")), "One f stands in front of q, k and v together"),
    ("repeat in place of repeat_interleave", grouped(swap(GROUPED_FORWARD, "part.repeat_interleave(n // m, dim=1)", "part.repeat(1, n // m, 1, 1)")), "Does `repeat` give"),
    ("all queries look at the first head", grouped(swap(GROUPED_FORWARD, "part.repeat_interleave(n // m, dim=1)", "part[:, :1].repeat(1, n, 1, 1)")), "Which queries belong to which"),
    ("repeats the sequence", grouped(swap(GROUPED_FORWARD, "n // m, dim=1", "n // m, dim=2")), "Write the shape of one rank's tensor"),
    ("does not repeat", grouped(swap(GROUPED_FORWARD, "k, v = (part.repeat_interleave(n // m, dim=1) for part in (k, v))\n", "")), "Write the shape of one rank's tensor"),
    ("rows in groups, as Megatron stores them", grouped(swap(swap(GROUPED_FORWARD, "q, k, v = (split_heads(part, d) for part in y.split([n * d, m * d, m * d], dim=-1))", "y = y.unflatten(-1, (m, n // m + 2, d)).permute(0, 2, 3, 1, 4)\nq, k, v = (part.flatten(1, 2) for part in y.split([n // m, 1, 1], dim=2))"), "y = F", "y = F")), "Megatron's order of rows"),
    ("causal is ignored", grouped(swap(GROUPED_FORWARD, ", causal=self.causal", "")), "Which line knows about `self.causal`"),
    ("K and V are never less than all", grouped(init=swap(GROUPED_INIT, "max(1, num_kv_heads // world_size)", "num_kv_heads")), "Never less than one"),
    ("K and V as many heads as Q", grouped(init=swap(GROUPED_INIT, "max(1, num_kv_heads // world_size)", "self.heads")), "Never less than one"),
    ("no head of K and V where there are fewer than ranks", grouped(init=swap(GROUPED_INIT, "max(1, num_kv_heads // world_size)", "num_kv_heads // world_size")), "Never less than one"),
    ("no copies", grouped(init=swap(GROUPED_INIT, "copies = max(1, world_size // num_kv_heads)", "copies = 1")), "Who has the others"),
    ("everybody is a copy", grouped(init=swap(GROUPED_INIT, "copies = max(1, world_size // num_kv_heads)", "copies = world_size")), "hold *another* head of K"),
    ("uneven heads of Q are taken", grouped(init=swap(GROUPED_INIT, "divide(num_heads, world_size)", "num_heads // world_size")), "though h = 24 can"),
    ("uneven heads of K and V are taken", grouped(init=swap(GROUPED_INIT, 'if num_kv_heads % world_size and world_size % num_kv_heads:\n    raise ValueError("uneven")\n', "")), "nor copied evenly"),
    ("copies are refused", grouped(init=swap(GROUPED_INIT, "num_kv_heads % world_size and world_size % num_kv_heads", "num_kv_heads % world_size")), "How many ranks share a head of k"),
    ("the size of the default group", grouped(init="world_size = dist.get_world_size()\n" + GROUPED_INIT), "the four ranks form two groups"),
    ("needs a bias", grouped(swap(GROUPED_FORWARD, "None if self.qkv_bias is None else summed", "summed")), "built with bias=False"),
    ("the keys are detached", grouped(swap(GROUPED_FORWARD, "attend(q, k, v,", "attend(q, k.detach(), v,")), "Which line does autograd not know about"),
    ("gathers K and V in place of copies", grouped(swap(NOT_SUMMED, SPLIT_PARTS, "k, v = (gather_from_region(part, self.copies_group)[..., :d] for part in (k, v))\n" + SPLIT_PARTS)), "saw 2 all_gathers"),
    ("returns zeros", grouped("return torch.zeros_like(x)"), "None: no gradient reaches this tensor"),
    ("writes into x", grouped("x.data.mul_(2)\n" + GROUPED_FORWARD), "still needs the tensors that were passed"),
]  # fmt: skip


def cache(step: str = "", append: str = "", init: str = "") -> str:
    return f"""
class KVCache:
    def __init__(self, attention, batch_size, max_length):
{indented(init or CACHE_INIT, 8)}

    def append(self, keys, values):
{indented(append or APPEND, 8)}


def attend_next(attention, x, cache):
{indented(step or STEP, 4)}
"""


CACHE_INIT = """
weight = attention.out.weight
shape = (batch_size, attention.kv_heads, max_length, attention.head_dim)
self.keys = torch.zeros(shape, device=weight.device, dtype=weight.dtype)
self.values = torch.zeros_like(self.keys)
self.length = 0
"""
ROOM = """
stop = self.length + keys.shape[2]
if stop > self.keys.shape[2]:
    raise ValueError("full")
"""
WRITE = """
self.keys[:, :, self.length : stop] = keys
self.values[:, :, self.length : stop] = values
self.length = stop
"""
GIVE = "return self.keys[:, :, :stop], self.values[:, :, :stop]"
APPEND = ROOM + WRITE + GIVE
STEP = """
q, k, v = attention.qkv(x)
positions = torch.arange(cache.length, cache.length + x.shape[1], device=x.device)
angles = rotary_angles(positions, attention.head_dim, attention.rotary_base)
k, v = cache.append(rotate(k, angles), v)
k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
y = attend(rotate(q, angles), k, v, causal=True)
return attention.out(merge_heads(y))
"""
CONCATENATE = """
keys, values = (torch.cat([old[:, :, : self.length], new], 2) for old, new in ((self.keys, keys), (self.values, values)))
self.keys, self.values, self.length = keys, values, keys.shape[2]
return keys, values
"""

CACHE = [
    ("concatenates: a new tensor at every step", cache(append=CONCATENATE), "makes new tensors"),
    ("a new buffer at every step", cache(append=ROOM + "self.keys, self.values = self.keys.clone(), self.values.clone()\n" + WRITE + GIVE), "makes new tensors"),
    ("returns copies", cache(append=ROOM + WRITE + "return self.keys[:, :, :stop].clone(), self.values[:, :, :stop].clone()"), "copies all keys so far"),
    ("returns all the room", cache(append=ROOM + WRITE + "return self.keys, self.values"), "none of the empty room"),
    ("returns the new tokens", cache(append=ROOM + WRITE + "return keys, values"), "the old ones in front"),
    ("returns nothing", cache(append=ROOM + WRITE), "append returns all keys and values so far"),
    ("writes at the beginning again", cache(append=ROOM + swap(WRITE, "self.length : stop]", ": keys.shape[2]]") + GIVE), "Which slice did you write"),
    ("values into the keys", cache(append=ROOM + swap(WRITE, "self.values[:, :, self.length : stop] = values", "self.keys[:, :, self.length : stop] = values") + GIVE), "Which slice did you write"),
    ("values where the keys belong", cache(append=ROOM + WRITE + "return self.values[:, :, :stop], self.keys[:, :, :stop]"), "Which slice did you write"),
    ("length does not grow", cache(append=ROOM + swap(WRITE, "self.length = stop\n", "") + GIVE), "How many tokens are there"),
    ("length grows by one", cache(append=ROOM + swap(WRITE, "self.length = stop", "self.length += 1") + GIVE), "How many tokens are there"),
    ("writes one place too far", cache(append=ROOM + swap(WRITE, "self.length : stop]", "self.length + 1 : stop + 1]") + GIVE), "Which slice did you write"),
    ("all heads of K and V on every rank", cache(init=swap(CACHE_INIT, "attention.kv_heads", "attention.num_kv_heads")), "Which of these sizes is another"),
    ("as many heads as Q", cache(init=swap(CACHE_INIT, "attention.kv_heads", "attention.heads")), "Which of these sizes is another"),
    ("float32 whatever the weights are", cache(init=swap(CACHE_INIT, ", dtype=weight.dtype", "")), "Which of these sizes is another"),
    ("grows as needed", cache(init=swap(CACHE_INIT, "max_length, attention", "0, attention"), append=CONCATENATE), "Which of these sizes is another"),
    ("keys and values are one tensor", cache(init=swap(CACHE_INIT, "torch.zeros_like(self.keys)", "self.keys")), "two names for one tensor"),
    ("a new cache begins at 1", cache(init=swap(CACHE_INIT, "self.length = 0", "self.length = 1")), "How many tokens are in a cache that has just been made"),
    ("too much is cut off without a word", cache(append="stop = min(self.length + keys.shape[2], self.keys.shape[2])\nnew = stop - self.length\nself.keys[:, :, self.length : stop] = keys[:, :, :new]\nself.values[:, :, self.length : stop] = values[:, :, :new]\nself.length = stop\n" + GIVE), "A slice that ends after the end"),
    ("too much is the error of torch", cache(append="stop = self.length + keys.shape[2]\n" + WRITE + GIVE), "A slice that ends after the end"),
    ("counts before it refuses", cache(append="stop = self.length + keys.shape[2]\nstart, self.length = self.length, stop\nif stop > self.keys.shape[2]:\n    raise ValueError('full')\nself.keys[:, :, start:stop] = keys\nself.values[:, :, start:stop] = values\n" + GIVE), "What comes first"),
    ("refuses the last free place", cache(append=swap(ROOM, "stop > ", "stop >= ") + WRITE + GIVE), "they fit, and the cache is full"),
    ("positions begin at 0", cache(swap(STEP, "torch.arange(cache.length, cache.length + x.shape[1], device=x.device)", "torch.arange(x.shape[1], device=x.device)")), "Who knows how many tokens came before"),
    ("positions from the length after the append", cache("q, k, v = attention.qkv(x)\ncache.append(k, v)\npositions = torch.arange(cache.length, cache.length + x.shape[1])\nangles = rotary_angles(positions, attention.head_dim, attention.rotary_base)\ncache.keys[:, :, cache.length - x.shape[1] : cache.length] = rotate(k, angles)\nk, v = cache.keys[:, :, : cache.length], cache.values[:, :, : cache.length]\nk, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))\nreturn attention.out(merge_heads(attend(rotate(q, angles), k, v, causal=True)))"), "When do you ask for `cache.length`"),
    ("keys are not turned", cache(swap(STEP, "rotate(k, angles), v", "k, v")), "Which call of `rotate` is missing"),
    ("no rotary positions", cache(swap(swap(STEP, "rotate(k, angles), v", "k, v"), "rotate(q, angles)", "q")), "Which call of `rotate` is missing"),
    ("another base of the angles", cache(swap(STEP, ", attention.rotary_base", "")), "The angles are those of another base"),
    ("values are turned too", cache(swap(STEP, "rotate(k, angles), v)", "rotate(k, angles), rotate(v, angles))")), "Which of q, k and v are in the scores"),
    ("keys of the whole text are turned again", cache(swap(STEP, "k, v = cache.append(rotate(k, angles), v)", "k, v = cache.append(k, v)\nk = rotate(k, rotary_angles(torch.arange(k.shape[2]) + 1, attention.head_dim, attention.rotary_base))")), "Where does your order differ"),
    ("only the new keys", cache(swap(STEP, "k, v = cache.append(rotate(k, angles), v)", "k = rotate(k, angles)\ncache.append(k, v)")), "The queries see the keys of this piece only"),
    ("the mask of the new tokens alone", cache(swap(STEP, "attend(rotate(q, angles), k, v, causal=True)", "F.scaled_dot_product_attention(rotate(q, angles), k, v, is_causal=True)")), "as if they were the first ones"),
    ("no mask", cache(swap(STEP, "causal=True", "causal=False")), "may the first of them look at the second"),
    ("no mask after the first piece", cache(swap(STEP, "causal=True", "causal=q.shape[2] == k.shape[2]")), "may the first of them look at the second"),
    ("repeat in place of repeat_interleave", cache(swap(STEP, "part.repeat_interleave(q.shape[1] // k.shape[1], dim=1)", "part.repeat(1, q.shape[1] // k.shape[1], 1, 1)")), "Does `repeat` give"),
    ("a larger cache of repeated heads", cache(swap(STEP, "k, v = cache.append(rotate(k, angles), v)\nk, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))", "r = q.shape[1] // k.shape[1]\nk, v = cache.append(rotate(k, angles).repeat_interleave(r, 1), v.repeat_interleave(r, 1))")), "Write the shape next to each line"),
    ("gathers the keys from all ranks", cache("parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]\ndist.all_gather(parts, x.contiguous())\n" + STEP), "Keys and values never leave their rank"),
    ("the cache is appended to twice", cache(swap(STEP, "k, v = cache.append(rotate(k, angles), v)", "cache.append(rotate(k, angles), v)\nk, v = cache.append(rotate(k, angles), v)")), "Write the shape next to each line"),
    ("a piece of several tokens begins a new text", cache("if x.shape[1] > 1:\n    cache.length = 0\n" + STEP), "How many tokens does your cache hold after a text of 6"),
    ("returns the heads", cache(swap(STEP, "attention.out(merge_heads(y))", "merge_heads(y)")), "Where does your order differ"),
    ("copies the whole cache in each step", cache(append=ROOM + "for kept, new in ((self.keys, keys), (self.values, values)):\n    kept.copy_(torch.cat([kept[:, :, : self.length], new, kept[:, :, stop:]], dim=2))\n" + GIVE), "Which line makes new tensors instead of writing into it"),
    ("the angles of the first attention", cache(swap(STEP, "angles = rotary_angles(positions, attention.head_dim, attention.rotary_base)", "table = vars(attend_next).setdefault('table', rotary_angles(torch.arange(99, device=x.device), attention.head_dim, attention.rotary_base))\nangles = table[positions]")), "keeps its value between calls"),
]  # fmt: skip

WRONG = [
    WrongAnswer(exercise=exercise, name=name, source=source, says=says)
    for exercise, answers in (("6.1", HEADS), ("6.2", ATTENTION), ("6.3", SLICING), ("6.4", GROUPED), ("6.5", CACHE))
    for name, source, says in answers
]
