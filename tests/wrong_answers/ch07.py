"""Wrong answers to the exercises of chapter 07, and what each must be told."""

from textwrap import dedent, indent

from tests.wrong_answers import WrongAnswer, indented, swap, swap_all

# 7.1

PAD = "step = multiple * world_size\nreturn math.ceil(vocab_size / step) * step"
SPAN = "rows = pad_vocab_size(vocab_size, world_size, multiple) // world_size\nreturn rank * rows, (rank + 1) * rows"


def ranges(pad: str = PAD, span: str = SPAN) -> str:
    return f"""
def pad_vocab_size(vocab_size, world_size, multiple=128):
{indented(pad, 4)}


def vocab_range(vocab_size, rank, world_size, multiple=128):
{indented(span, 4)}
"""


RANGES = [
    ("does not pad", ranges("return vocab_size"), "By how much do you round up"),
    ("rounds down", ranges(swap(PAD, "math.ceil(vocab_size / step)", "vocab_size // step")), "You round down"),
    ("always adds a step", ranges(swap(PAD, "math.ceil(vocab_size / step)", "(vocab_size // step + 1)")), "a multiple already"),
    ("a multiple of 128 only, as for one rank", ranges(swap(PAD, "multiple * world_size", "multiple")), "What does the whole table have to be a multiple of"),
    ("a multiple of p only", ranges(swap(PAD, "multiple * world_size", "world_size")), "Where is `multiple`"),
    ("128, whatever is asked for", ranges(swap(PAD, "multiple * world_size", "128 * world_size")), "Right for multiple = 128"),
    ("adds instead of multiplying", ranges(swap(PAD, "multiple * world_size", "multiple + world_size")), "Which is the next number"),
    ("the padding instead of the padded size", ranges("step = multiple * world_size\nreturn -vocab_size % step"), "Which is the next number"),
    ("returns nothing", ranges("step = multiple * world_size\nmath.ceil(vocab_size / step) * step"), "vocab_range(50257, 0, 4) raised"),
    ("prints the pair", ranges(span=swap(SPAN, "return ", "print(") + ")"), "a pair (start, stop)"),
    ("stop is the last id", ranges(span=swap(SPAN, "(rank + 1) * rows", "(rank + 1) * rows - 1")), "Is `stop` the last id of this rank"),
    ("counts ids from one", ranges(span=swap(swap(SPAN, "return rank * rows", "return rank * rows + 1"), "(rank + 1) * rows", "(rank + 1) * rows + 1")), "Which id is the first one of all"),
    ("the last rank first", ranges(span="rank = world_size - 1 - rank\n" + SPAN), "rank 0 holds the first ids"),
    ("ends with the vocabulary", ranges(span=swap(SPAN, "(rank + 1) * rows", "min((rank + 1) * rows, vocab_size)")), "ends with the vocabulary"),
    ("cuts the vocabulary, not the padded table", ranges(span="return rank * vocab_size // world_size, (rank + 1) * vocab_size // world_size"), "the vocabulary, or the padded one"),
    ("the same range for all", ranges(span=swap(SPAN, "return rank * rows, (rank + 1) * rows", "return 0, rows")), "Which argument tells them apart"),
    ("start and number of rows", ranges(span=swap(SPAN, "(rank + 1) * rows", "rows")), "rank r - 1 stops"),
    ("forgets `multiple` in the range", ranges(span=swap(SPAN, "world_size, multiple)", "world_size)")), "rank r - 1 stops"),
    ("floats", ranges(span=swap(SPAN, "// world_size", "/ world_size")), "which division gives an int"),
    ("a range object", ranges(span=swap(SPAN, "return rank * rows, (rank + 1) * rows", "return range(rank * rows, (rank + 1) * rows)")), "a pair (start, stop)"),
    ("adds almost one before it cuts off", ranges(swap(PAD, "math.ceil(vocab_size / step)", "int(vocab_size / step + 0.999)")), "You round down"),
]  # fmt: skip

# 7.2

LOOKUP = (
    "foreign = (ids < start) | (ids >= stop)\n"
    "rows = (ids - start).masked_fill(foreign, 0)\n"
    "vectors = F.embedding(rows, weight, padding_row)\n"
    "vectors = vectors.masked_fill(foreign.unsqueeze(-1), 0)\n"
    "return reduce_from_region(vectors, group)"
)
ROWS = "rows = (ids - start).masked_fill(foreign, 0)\n"
ZEROS = "vectors = vectors.masked_fill(foreign.unsqueeze(-1), 0)\n"
SUM = "return reduce_from_region(vectors, group)"


def lookup(body: str = LOOKUP, extra: str = "") -> str:
    return f"""
{dedent(extra).strip()}

def parallel_lookup(ids, weight, start, stop, *, padding_row=None, group=None):
{indented(body, 4)}
"""


SUM_BOTH_WAYS = """
class SumBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, dy):
        dy = dy.clone()
        dist.all_reduce(dy, group=ctx.group)
        return dy, None
"""

LOOKUPS = [
    ("`> stop` for `>= stop`", lookup(swap(LOOKUP, "ids >= stop", "ids > stop")), "Is the id `stop` one of this rank's"),
    ("`<= start` for `< start`", lookup(swap(LOOKUP, "ids < start", "ids <= start")), "Is the id `start` one of this rank's"),
    ("the last id of a rank is foreign", lookup(swap(LOOKUP, "ids >= stop", "ids >= stop - 1")), "on which rank is its row"),
    ("`> stop`, clamped", lookup(swap(swap(LOOKUP, "ids >= stop", "ids > stop"), "masked_fill(foreign, 0)\nvectors", "masked_fill(foreign, 0).clamp(max=len(weight) - 1)\nvectors")), "on which rank is its row"),
    ("ids are not shifted", lookup(swap(LOOKUP, "(ids - start)", "ids")), "The rows of this rank's shard are numbered from 0"),
    ("ids are shifted after the mask's zeros", lookup(swap(LOOKUP, ROWS, "rows = ids.masked_fill(foreign, 0) - start\n")), "The rows of this rank's shard are numbered from 0"),
    ("foreign ids are looked up as they are", lookup(swap(LOOKUP, ".masked_fill(foreign, 0)\nvectors", "\nvectors")), "which row do you ask for where the id is not"),
    ("shifted by rank times stop", lookup(swap(LOOKUP, "(ids - start)", "(ids - dist.get_rank() * stop)")), "numbered from 0"),
    ("foreign rows are not zeroed", lookup(swap(LOOKUP, ZEROS, "")), "Where do its vectors become zeros"),
    ("zeroed after the sum", lookup(swap(swap(LOOKUP, ZEROS, ""), SUM, "return reduce_from_region(vectors, group).masked_fill(foreign.unsqueeze(-1), 0)")), "on which rank is its row"),
    ("foreign ids are clamped", lookup(f"vectors = F.embedding((ids - start).clamp(0, stop - start - 1), weight, padding_row)\n{SUM}"), "A foreign id has found a row too"),
    ("ids modulo the rows", lookup(f"vectors = F.embedding(ids % (stop - start), weight, padding_row)\n{SUM}"), "A foreign id has found a row too"),
    ("the mask the wrong way round", lookup(swap(LOOKUP, "(ids < start) | (ids >= stop)", "(ids >= start) & (ids < stop)")), "All vectors are zeros"),
    ("the zeros the wrong way round", lookup(swap(LOOKUP, "foreign.unsqueeze(-1)", "~foreign.unsqueeze(-1)")), "All vectors are zeros"),
    ("`and` of the two conditions", lookup(swap(LOOKUP, ") | (", ") & (")), "numbered from 0"),
    ("no sum", lookup(swap(LOOKUP, SUM, "return vectors")), "Who adds up what the ranks have found"),
    ("all_reduce of a detached copy, the old one returned", lookup(swap(LOOKUP, SUM, "total = vectors.detach().clone()\ndist.all_reduce(total, group=group)\nreturn vectors")), "Who adds up what the ranks have found"),
    ("returns what dist.all_reduce returns", lookup(swap(LOOKUP, SUM, "vectors = vectors.detach()\nreturn dist.all_reduce(vectors, group=group)")), "What does the last line return"),
    ("a detached sum", lookup(swap(LOOKUP, SUM, "vectors = vectors.detach()\ndist.all_reduce(vectors, group=group)\nreturn vectors")), "The table gets no gradient"),
    ("the mean", lookup(swap(LOOKUP, SUM, SUM + " / dist.get_world_size(group)")), "By what is the sum divided"),
    ("the largest over the ranks", lookup(swap(LOOKUP, SUM, "dist.all_reduce(vectors, op=dist.ReduceOp.MAX, group=group)\nreturn vectors")), "a zero is larger than a negative number"),
    ("gathers instead of adding", lookup(swap(LOOKUP, SUM, "return gather_from_region(vectors, group)")), "added, not put beside each other"),
    ("gathers all parts and adds them", lookup(swap(LOOKUP, SUM, "parts = gather_from_region(vectors, group)\nreturn parts.unflatten(-1, (-1, weight.shape[1])).sum(-2)")), "the communication is not"),
    ("gathers the table and looks up there", lookup("whole = gather_from_region(weight.T, group).T\nreturn F.embedding(ids, whole, None if padding_row is None else start + padding_row)"), "the communication is not"),
    ("the gradient is summed over the ranks as well", lookup(swap(LOOKUP, SUM, "return SumBothWays.apply(vectors, group)"), SUM_BOTH_WAYS), "The gradient is whole already"),
    ("f on the weight", lookup(swap(LOOKUP, "F.embedding(rows, weight", "F.embedding(rows, copy_to_region(weight, group)")), "The gradient is whole already"),
    ("g twice", lookup(swap(LOOKUP, SUM, "return reduce_from_region(reduce_from_region(vectors, group), group)")), "on which rank is its row"),
    ("padding_row is not handed on", lookup(swap(LOOKUP, ", padding_row)", ")")), "does `padding_row` reach it"),
    ("the padding row is the id", lookup(swap(LOOKUP, "F.embedding(rows, weight, padding_row)", "F.embedding(rows, weight, None if padding_row is None else min(padding_row + start, len(weight) - 1) - 1)")), "does `padding_row` reach it"),
    ("the default group", lookup(swap(LOOKUP, SUM, "return reduce_from_region(vectors)")), "default group of all ranks"),
    ("shifts the ids in place", lookup("ids -= start\nforeign = (ids < 0) | (ids >= stop - start)\nids[foreign] = 0\n" + LOOKUP.split(ROWS)[1].replace("F.embedding(rows", "F.embedding(ids")), "Which line writes into one of these tensors"),
    ("only rank 0's rows are looked up", lookup(swap(LOOKUP, "(ids >= stop)", "(ids >= stop) | (torch.tensor(dist.get_rank(group)) > 0)")), "on which rank is its row"),
    ("right for p = 2 only", lookup(swap(LOOKUP, SUM, SUM + " * (2 / max(dist.get_world_size(group), 2))")), "on which rank is its row"),
    ("only ids that are there, without their places", lookup(swap(LOOKUP, "rows = (ids - start).masked_fill(foreign, 0)", "rows = (ids - start)[~foreign]")), "numbered from 0"),
    ("zeros", lookup("return 0 * reduce_from_region(F.embedding(ids * 0, weight), group)"), "All vectors are zeros"),
    ("zeroes the foreign vectors behind autograd's back", lookup(swap(LOOKUP, ZEROS, "vectors.data[foreign] = 0\n")), "row 0 learns from ids that are not here"),
    ("the gradient of a frequent id is averaged", lookup(swap(LOOKUP, "padding_row)", "padding_row, scale_grad_by_freq=True)")), "the sum of two gradients"),
    ("looks at the largest row it has found", lookup(swap(LOOKUP, "vectors = F", "assert rows[~foreign].max() < len(weight)\nvectors = F")), "can't do with no id at all"),
    ("an embedding of its own", lookup("return nn.Embedding(100, weight.shape[1], dtype=weight.dtype)(ids)"), "The table gets no gradient"),
    ("finds the owner by dividing", lookup("rows = stop - start\nforeign = ids // rows != dist.get_rank(group)\nvectors = F.embedding((ids % rows).masked_fill(foreign, 0), weight, padding_row)\n" + ZEROS + SUM), "from `start` and `stop`, or from the number of its rows"),
]  # fmt: skip

# 7.3

INIT = (
    "self.start, self.stop = vocab_range(num_embeddings, rank, world_size, multiple)\n"
    "self.weight = nn.Parameter(torch.empty(self.stop - self.start, embedding_dim, device=device, dtype=dtype))"
)
GIVEN = (
    "self.weight.tensor_parallel = Sharding(0, blocks=(Block(num_embeddings, multiple, padded=True),))\n"
    "init_parameter(self.weight, nn.init.normal_, group)\n"
)
FIRST = "if self.padding_row() is not None:\n    with torch.no_grad():\n        self.weight[self.padding_row()] = 0"
ROW = (
    "if self.padding_idx is None or not self.start <= self.padding_idx < self.stop:\n    return None\n"
    "return self.padding_idx - self.start"
)
TEST = (
    "wrong = (ids < 0) | (ids >= self.num_embeddings)\n"
    "if wrong.any():\n"
    "    place = wrong.nonzero()[0].tolist()\n"
    '    raise IndexError(f"id {ids[tuple(place)].item()} at {place} is outside the vocabulary")\n'
)
CALL = (
    "return parallel_lookup(ids, self.weight, self.start, self.stop, padding_row=self.padding_row(), group=self.group)"
)


def module(init: str = INIT, first: str = FIRST, row: str = ROW, forward: str = TEST + CALL, given: str = GIVEN) -> str:
    return f"""
class VocabParallelEmbedding(nn.Module):
    def __init__(
        self, num_embeddings, embedding_dim, padding_idx=None, *, multiple=128, group=None, device=None, dtype=None
    ):
        super().__init__()
        self.num_embeddings, self.padding_idx, self.group = num_embeddings, padding_idx, group
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
{indented(init, 8)}
{indented(given, 8)}
{indented(first, 8)}

    def padding_row(self):
{indented(row, 8)}

    def forward(self, ids):
{indented(forward, 8)}
"""


RAISE = '    raise IndexError(f"id {ids[tuple(place)].item()} at {place} is outside the vocabulary")\n'

MODULES = [
    ("no test of the ids: zeros", module(forward=CALL), "No token has that id"),
    ("negative ids are let through", module(forward=swap(TEST, "(ids < 0) | ", "") + CALL), "No token has that id"),
    ("the id v is let through", module(forward=swap(TEST, "ids >= self", "ids > self") + CALL), "No token has that id"),
    ("tests against the padded table", module(forward=swap(TEST, "self.num_embeddings", "(len(self.weight) * dist.get_world_size(self.group))") + CALL), "No token has that id"),
    ("a ValueError", module(forward=swap(TEST, "raise IndexError", "raise ValueError") + CALL), "raises IndexError for such an id"),
    ("an assert", module(forward="assert ((ids >= 0) & (ids < self.num_embeddings)).all()\n" + CALL), "raises IndexError for such an id"),
    ("does not name the id", module(forward=swap(TEST, "id {ids[tuple(place)].item()}", "an id") + CALL), "wants to find the token"),
    ("does not name the position", module(forward=swap(TEST, "at {place} ", "") + CALL), "wants to find the token"),
    ("the largest id, with the position of the first", module(forward=swap(TEST, "ids[tuple(place)].item()", "ids[wrong].max().item()") + CALL), "wants to find the token"),
    ("names the position in the flat tensor", module(forward=swap(TEST, "at {place} ", "at {wrong.flatten().nonzero()[0].item()} ") + CALL), "wants to find the token"),
    ("names the row of the shard in place of the id", module(forward=swap(TEST, "ids[tuple(place)].item()", "ids[tuple(place)].item() - 1000") + CALL), "wants to find the token"),
    ("only rank 0 raises", module(forward=swap(TEST, "if wrong.any():", "if wrong.any() and dist.get_rank(self.group) == 0:") + CALL), "do all of them ask the same question"),
    ("each rank tests against its own rows", module(forward=swap(TEST, "(ids < 0) | (ids >= self.num_embeddings)", "(ids < self.start) | (ids >= self.stop)") + CALL), "who has to look before anybody looks up"),
    ("clamps wrong ids", module(forward="ids = ids.clamp(0, self.num_embeddings - 1)\n" + CALL), "has found a row"),
    ("the whole table on every rank", module(init=swap(INIT, "self.stop - self.start", "num_embeddings")), "How many are stop - start"),
    ("rows without padding", module(init=swap(INIT, "self.stop - self.start", "num_embeddings // world_size")), "How many are stop - start"),
    ("columns instead of rows", module(init=swap(INIT, "torch.empty(self.stop - self.start, embedding_dim,", "torch.empty(num_embeddings, embedding_dim // world_size,")), "How many are stop - start"),
    ("`multiple` is forgotten", module(init=swap(INIT, "world_size, multiple)", "world_size)")), "How many rows does the module make"),
    ("the ranks of the default group", module(init=INIT.replace("rank, world_size,", "dist.get_rank(), dist.get_world_size(),")), "Whose rank and whose size"),
    ("the sum in the default group", module(forward=TEST + swap(CALL, ", group=self.group", "")), "over whom is the look-up summed"),
    ("the row of padding_idx does not start as zeros", module(first="pass"), "starts as zeros"),
    ("row padding_idx of every shard is zeros", module(first="if self.padding_idx is not None:\n    with torch.no_grad():\n        self.weight[min(self.padding_idx, len(self.weight) - 1)] = 0"), "only the row of padding_idx becomes zeros"),
    ("all rows are zeros at first", module(first="with torch.no_grad():\n    self.weight.zero_()"), "What else do you change"),
    ("padding_idx learns", module(forward=TEST + swap(CALL, "padding_row=self.padding_row(), ", "")), "Does the look-up know which row"),
    ("padding_idx itself is the row", module(row="return self.padding_idx"), "what number has it there"),
    ("row 0 does not learn where another rank has padding_idx", module(row=swap(ROW, "    return None", "    return 0 if self.padding_idx is not None else None"), first="if self.padding_idx is not None and self.start <= self.padding_idx < self.stop:\n    with torch.no_grad():\n        self.weight[self.padding_row()] = 0"), "which row do you keep from learning"),
    ("padding_idx 0 is taken for none", module(row=swap(ROW, "self.padding_idx is None", "not self.padding_idx")), "starts as zeros"),
    ("changes the parameter without no_grad", module(first="if self.padding_row() is not None:\n    self.weight[self.padding_row()] = 0"), "only under `torch.no_grad()`"),
    ("a new parameter that nobody marked", module(first=FIRST + "\nself.weight = nn.Parameter(self.weight.detach().clone())"), "How many rows does the module make"),
    ("dtype is ignored", module(init=swap(INIT, ", dtype=dtype", "")), "Which of the arguments are for `torch.empty`"),
    ("ids are shifted twice", module(forward=TEST + swap(CALL, "(ids,", "(ids - self.start,")), "Which of its arguments differ"),
    ("a second sum", module(forward=TEST + swap(CALL, "return ", "return reduce_from_region(") + ", self.group)"), "Which of its arguments differ"),
    ("draws without the seed", module(first=FIRST + "\nwith torch.no_grad():\n    self.weight.add_(1)"), "What else do you change"),
    ("the extremes of no ids", module(forward=swap_all(TEST, ("if wrong.any():", "if ids.min() < 0 or ids.max() >= self.num_embeddings:")) + CALL), "needs at least one id"),
    ("row and column, whatever the shape", module(forward=swap(TEST, "place = wrong.nonzero()[0].tolist()", "place = list(divmod(int(wrong.flatten().int().argmax()), ids.shape[-1]))").replace("ids[tuple(place)]", "ids[wrong][0]") + CALL), "with one number for each dimension"),
]  # fmt: skip

# 7.4

LOGITS = (
    "x = copy_to_region(x, group)\n"
    "logits = F.linear(x, weight)\n"
    "if gather:\n"
    "    logits = gather_from_region(logits, group)[..., :vocab_size]\n"
    "return logits"
)
GATHER = "gather_from_region(logits, group)[..., :vocab_size]"


def logits(body: str = LOGITS, extra: str = "") -> str:
    return f"""
{dedent(extra).strip()}

def parallel_logits(x, weight, *, gather=False, vocab_size=None, group=None):
{indented(body, 4)}
"""


GATHER_AND_SUM = """
class GatherAndSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, dy):
        dy = dy.clone()
        dist.all_reduce(dy, group=ctx.group)
        return dy.chunk(dist.get_world_size(ctx.group), -1)[dist.get_rank(ctx.group)], None
"""

OUTPUTS = [
    ("f is missing", logits(swap(LOGITS, "x = copy_to_region(x, group)\n", "")), "dx is only the part that comes through this rank's columns"),
    ("f behind the product", logits(swap(swap(LOGITS, "x = copy_to_region(x, group)\n", ""), "F.linear(x, weight)", "copy_to_region(F.linear(x, weight), group)")), "Does an operator stand behind the product"),
    ("f twice", logits(swap(LOGITS, "F.linear(x, weight)", "F.linear(copy_to_region(x, group), weight)")), "f is needed once"),
    ("f on the weight", logits(swap(LOGITS, "x = copy_to_region(x, group)\n", "weight = copy_to_region(weight, group)\n")), "dx is only the part"),
    ("g in place of f", logits(swap(LOGITS, "copy_to_region", "reduce_from_region")), "where a replicated x meets"),
    ("g on the logits", logits(swap(LOGITS, "F.linear(x, weight)", "reduce_from_region(F.linear(x, weight), group)")), "Which rows does this rank have"),
    ("always gathers", logits(swap(LOGITS, "if gather:", "if True:")), "Which of these shapes do you return here"),
    ("never gathers", logits("return F.linear(copy_to_region(x, group), weight)"), "Which of these shapes do you return here"),
    ("keeps the padding", logits(swap(LOGITS, "[..., :vocab_size]", "")), "Which of these shapes do you return here"),
    ("drops the padding before the gather", logits(swap(LOGITS, GATHER, "gather_from_region(logits[..., :vocab_size], group)")), "Which of these shapes do you return here"),
    ("drops the padding always, by the size of the shard", logits(swap(LOGITS, "[..., :vocab_size]", "[..., : vocab_size or -1]")), "Which of these shapes do you return here"),
    ("drops the padding also without gather", logits(swap(LOGITS, "return logits", "return logits[..., :vocab_size]")), "also of the padding"),
    ("gathers along the first dimension", logits(swap(LOGITS, GATHER, "gather_from_region(logits.transpose(0, -1), group).transpose(0, -1)[..., :vocab_size]")), "Which of these shapes do you return here"),
    ("gathers by dist.all_gather", logits(swap(LOGITS, GATHER, "parts = [torch.empty_like(logits) for _ in range(dist.get_world_size(group))]\n    dist.all_gather(parts, logits, group=group)\n    logits = torch.cat(parts, -1)[..., :vocab_size]").replace("logits = parts", "parts")), "autograd knows nothing of"),
    ("gathers in reverse", logits(swap(LOGITS, GATHER, "torch.cat(gather_from_region(logits, group).chunk(dist.get_world_size(group), -1)[::-1], -1)[..., :vocab_size]")), "in which order do the ranks' parts stand"),
    ("gathers the table", logits("x = copy_to_region(x, group)\nif gather:\n    weight = gather_from_region(weight.T.contiguous(), group).T\nreturn F.linear(x, weight)[..., : vocab_size if gather else None]"), "summed over the ranks more than once"),
    ("a gather whose backward adds up", logits(swap(LOGITS, "gather_from_region(", "GatherAndSum.apply("), GATHER_AND_SUM), "summed over the ranks more than once"),
    ("the table is detached", logits(swap(LOGITS, "F.linear(x, weight)", "F.linear(x, weight.detach())")), "not a detached copy"),
    ("x is detached", logits(swap(LOGITS, "copy_to_region(x, group)", "copy_to_region(x, group).detach()")), "No gradient arrives"),
    ("multiplies the wrong way", logits(swap(LOGITS, "F.linear(x, weight)", "x @ weight")), "Which of their dimensions meet"),
    ("softmax in place of logits", logits(swap(LOGITS, "F.linear(x, weight)", "F.linear(x, weight).softmax(-1)")), "nothing else"),
    ("scaled by the square root of h", logits(swap(LOGITS, "F.linear(x, weight)", "F.linear(x, weight) / math.sqrt(x.shape[-1])")), "nothing else"),
    ("scatters x, as for a row-parallel layer", logits(swap(LOGITS, "copy_to_region(x, group)", "scatter_to_region(x, group)")), "Which of their dimensions meet"),
    ("the default group for f", logits(swap(LOGITS, "copy_to_region(x, group)", "copy_to_region(x)")), "default group of all ranks"),
    ("the default group for the gather", logits(swap(LOGITS, "gather_from_region(logits, group)", "gather_from_region(logits)")), "default group of all ranks"),
    ("gathers in any case, and returns its own columns", logits("logits = F.linear(copy_to_region(x, group), weight)\ngathered = gather_from_region(logits, group)[..., :vocab_size]\nreturn gathered if gather else logits"), "forward nothing, or with gather one all-gather"),
    ("returns the token in place of the logits", logits(swap(LOGITS, "[..., :vocab_size]", "[..., :vocab_size].argmax(-1)")), "Which of these shapes do you return here"),
    ("returns nothing", logits(swap(LOGITS, "return logits", "logits")), "What does the last line return"),
    ("zeros", logits(swap(LOGITS, "F.linear(x, weight)", "F.linear(x, weight) * 0")), "All logits are zeros"),
]  # fmt: skip

# 7.5

TIED_INIT = (
    "self.embedding = VocabParallelEmbedding(vocab_size, hidden_size, multiple=multiple, group=group, device=device, dtype=dtype)\n"
    "self.body = body\n"
    "self.vocab_size, self.group = vocab_size, group"
)
TIED_FORWARD = (
    "x = self.embedding(ids)\n"
    "x = self.body(x)\n"
    "return parallel_logits(x, self.embedding.weight, gather=gather, vocab_size=self.vocab_size, group=self.group)"
)


def tied(forward: str = TIED_FORWARD, init: str = TIED_INIT) -> str:
    return f"""
class TiedModel(nn.Module):
    def __init__(self, vocab_size, hidden_size, body, *, multiple=128, group=None, device=None, dtype=None):
        super().__init__()
{indented(init, 8)}

    def forward(self, ids, gather=False):
{indented(forward, 8)}
"""


TIED = [
    ("a second table", tied(swap(TIED_FORWARD, "self.embedding.weight", "self.head.weight"), TIED_INIT + "\nself.head = VocabParallelEmbedding(vocab_size, hidden_size, multiple=multiple, group=group, device=device, dtype=dtype)"), "one too many, missing"),
    ("a copy of the table as a second parameter", tied(swap(TIED_FORWARD, "self.embedding.weight", "self.head"), TIED_INIT + "\nself.head = nn.Parameter(self.embedding.weight.detach().clone())"), "one too many, missing"),
    ("a copy of the table as a buffer", tied(swap(TIED_FORWARD, "self.embedding.weight", "self.head"), TIED_INIT + "\nself.register_buffer('head', self.embedding.weight.detach().clone(), persistent=False)"), "no scale, no bias"),
    ("the output layer uses a detached table", tied(swap(TIED_FORWARD, "self.embedding.weight", "self.embedding.weight.detach()")), "gradient of the output layer is missing"),
    ("the output layer uses .data", tied(swap(TIED_FORWARD, "self.embedding.weight", "self.embedding.weight.data")), "gradient of the output layer is missing"),
    ("the vectors are detached", tied(swap(TIED_FORWARD, "self.embedding(ids)", "self.embedding(ids).detach()")), "gradient of the look-up is missing"),
    ("the look-up under no_grad", tied(swap(TIED_FORWARD, "x = self.embedding(ids)", "with torch.no_grad():\n    x = self.embedding(ids)")), "gradient of the look-up is missing"),
    ("all under no_grad", tied("with torch.no_grad():\n" + indent(TIED_FORWARD, "    ")), "A parameter gets no gradient"),
    ("a plain product: f is missing", tied("x = self.body(self.embedding(ids))\nlogits = F.linear(x, self.embedding.weight)\nreturn gather_from_region(logits, self.group)[..., : self.vocab_size] if gather else logits"), "does your way to the logits go round it"),
    ("f once more", tied(swap(TIED_FORWARD, "x = self.body(x)", "x = copy_to_region(self.body(x), self.group)")), "f is in `parallel_logits` already"),
    ("f in front of the body", tied(swap(TIED_FORWARD, "self.body(x)", "self.body(copy_to_region(x, self.group))")), "over the ranks once more"),
    ("the gradient of the table is added up by a hook", tied(init=TIED_INIT + "\nself.embedding.weight.register_hook(lambda grad: reduce_from_region(grad, group))"), "over the ranks once more"),
    ("the body is left out", tied(swap(TIED_FORWARD, "x = self.body(x)\n", "")), "Where does the body come in"),
    ("the body is not registered under its name", tied(swap(TIED_FORWARD, "self.body", "self.layers"), swap(TIED_INIT, "self.body", "self.layers")), "one too many, missing"),
    ("nn.Embedding, whole on every rank", tied("x = self.body(self.embedding(ids))\nreturn F.linear(x, self.embedding.weight)", swap(TIED_INIT, "VocabParallelEmbedding(vocab_size, hidden_size, multiple=multiple, group=group,", "nn.Embedding(vocab_size, hidden_size,")), "one too many"),
    ("always gathers", tied(swap(TIED_FORWARD, "gather=gather", "gather=True")), "What do `gather` and `vocab_size` have to reach"),
    ("never gathers", tied(swap(TIED_FORWARD, "gather=gather, ", "")), "What do `gather` and `vocab_size` have to reach"),
    ("gathers in any case, and returns its own columns", tied(swap(swap(TIED_FORWARD, "return", "logits ="), "gather=gather, ", "") + "\ngathered = gather_from_region(logits, self.group)[..., : self.vocab_size]\nreturn gathered if gather else logits"), "the gather only if asked for"),
    ("hands the embedding to the logits, not its weight", tied(swap(TIED_FORWARD, "self.embedding.weight", "self.embedding")), "or an argument that it doesn't know"),
    ("keeps the padding", tied(swap(TIED_FORWARD, "vocab_size=self.vocab_size, ", "")), "What do `gather` and `vocab_size` have to reach"),
    ("`multiple` is forgotten", tied(init=swap(TIED_INIT, "multiple=multiple, ", "")), "one too many, missing, or has another shape"),
    ("the embedding in the default group", tied(init=swap(TIED_INIT, "group=group, ", "")), "Which of them did not get it"),
    ("the logits in the default group", tied(swap(TIED_FORWARD, ", group=self.group", "")), "Which of them did not get it"),
    ("a copy of the body", tied(init=swap(TIED_INIT, "self.body = body", "import copy\nself.body = copy.deepcopy(body)")), "Which line makes another one of it"),
    ("the vectors are scaled", tied(swap(TIED_FORWARD, "self.embedding(ids)", "self.embedding(ids) * math.sqrt(self.embedding.weight.shape[1])")), "no scale, no bias"),
    ("a residual around the body", tied(swap(TIED_FORWARD, "x = self.body(x)", "x = x + self.body(x)")), "no scale, no bias"),
    ("returns the vectors", tied("return self.body(self.embedding(ids))"), "What do `gather` and `vocab_size` have to reach"),
    ("returns nothing", tied(swap(TIED_FORWARD, "return ", "")), "What does forward return"),
    ("logits of the ids' own rows", tied(swap(TIED_FORWARD, "self.embedding.weight, gather", "self.embedding(ids).flatten(0, -2), gather")), "What do `gather`"),
    ("converts the body", tied(init=swap(TIED_INIT, "self.body = body", "self.body = body.to(device=device, dtype=dtype)")), "`.to(...)` changes the parameters of a module in place"),
    ("goes around the check of the ids", tied(swap(TIED_FORWARD, "self.embedding(ids)", "parallel_lookup(ids, self.embedding.weight, self.embedding.start, self.embedding.stop, group=self.group)")), "in some other way"),
]  # fmt: skip

WRONG = [
    WrongAnswer(exercise=exercise, name=name, source=source, says=says)
    for exercise, answers in (("7.1", RANGES), ("7.2", LOOKUPS), ("7.3", MODULES), ("7.4", OUTPUTS), ("7.5", TIED))
    for name, source, says in answers
]
