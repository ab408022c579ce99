"""Wrong answers to the exercises of chapter 12, and what each must be told."""

from tests.wrong_answers import WrongAnswer, indented, swap, swap_all

TOGETHER = """
mine = {0}.contiguous()
parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
dist.all_gather(parts, mine)
return torch.cat(parts, dim=1)
"""
ADD_UP = """
parts = [part.contiguous() for part in {0}.chunk(dist.get_world_size(), dim=1)]
total = torch.empty_like(parts[0])
dist.reduce_scatter(total, parts)
return total
"""
CUT = "return {0}.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()"


def _operator(name: str, forward: str, backward: str) -> str:
    return (
        f"class {name}(Function):\n    @staticmethod\n    def forward(ctx, x):\n{indented(forward.format('x'), 8)}\n\n"
        f"    @staticmethod\n    def backward(ctx, grad_output):\n{indented(backward.format('grad_output'), 8)}\n"
    )


def gather(forward: str = TOGETHER, backward: str = ADD_UP) -> str:
    right = _operator("ReduceScatterToSequence", ADD_UP, TOGETHER)
    return _operator("GatherFromSequence", forward, backward) + "\n\n" + right


def scatter(forward: str = ADD_UP, backward: str = TOGETHER) -> str:
    right = _operator("GatherFromSequence", TOGETHER, ADD_UP)
    return right + "\n\n" + _operator("ReduceScatterToSequence", forward, backward)


MAPPINGS = [
    ("gather: its backward takes its slice", gather(backward=CUT), "Who adds up the terms of your tokens"),
    ("gather: multiplies its backward by p", gather(backward=swap(ADD_UP, "return total", "return total * dist.get_world_size()")), "How many times is each rank's term added"),
    ("gather: its backward keeps the next rank's tokens", gather(backward=swap(ADD_UP, "reduce_scatter(total, parts)", "reduce_scatter(total, parts[1:] + parts[:1])")), "Which ones did this rank put in"),
    ("gather: its backward deals the tokens out in turn", gather(backward=swap(ADD_UP, "part.contiguous() for part in {0}.chunk(dist.get_world_size(), dim=1)", "{0}[:, rank :: dist.get_world_size()].contiguous() for rank in range(dist.get_world_size())")), "for each token that this rank put in"),
    ("gather: its backward returns what the collective returns", gather(backward=swap_all(ADD_UP, ("dist.reduce", "return dist.reduce"), ("return total\n", ""))), "backward returned nothing for x"),
    ("gather: nothing to do forward, as in f", gather(forward="return {0}"), "These are this rank's tokens"),
    ("gather: repeats its own tokens", gather(forward="return torch.cat([{0}] * dist.get_world_size(), dim=1)"), "Every part came from this rank"),
    ("gather: the ranks' tokens in turn", gather(forward=swap(TOGETHER, "torch.cat(parts, dim=1)", "torch.stack(parts, dim=2).flatten(1, 2)")), "y is [b, s, h]: the tokens of rank 0"),
    ("gather: returns what the collective returns", gather(forward=swap_all(TOGETHER, ("dist.all_gather", "return dist.all_gather"), ("return torch.cat(parts, dim=1)\n", ""))), "write into tensors they are given"),
    ("gather: turns x in place and back again", gather(forward="mine = {0}.transpose_(0, 1).contiguous()\nparts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]\ndist.all_gather(parts, mine)\n{0}.transpose_(0, 1)\nreturn torch.cat(parts).transpose(0, 1)"), "Who wrote into it"),
    ("gather: a function in place of a class", swap(gather(), "class GatherFromSequence(Function)", "class GatherFromSequence"), "still there?"),
    ("gather: its backward takes the mean", gather(backward=swap(ADD_UP, "return total", "return total / dist.get_world_size()")), "or is their mean taken"),
    ("gather: all-reduce, then its slice", gather(backward="total = {0}.clone(memory_format=torch.contiguous_format)\ndist.all_reduce(total)\n" + CUT.replace("{0}", "total")), "sends twice what a reduce-scatter"),
    ("gather: writes into the upstream gradient", gather(backward="dist.all_reduce({0}.contiguous())\n" + CUT), "Was that one yours"),
    ("gather: the sum, for all tokens", gather(backward="total = {0}.clone(memory_format=torch.contiguous_format)\ndist.all_reduce(total)\nreturn total"), "A gradient has the shape of what went into forward"),
    ("gather: does not wait", gather(forward=swap(TOGETHER, "dist.all_gather(parts, mine)", "dist.all_gather(parts, mine, async_op=True)")), "What should you do with that request"),
    ("gather: two ranks, whatever p is", gather(forward=swap(TOGETHER, "range(dist.get_world_size())", "range(2)"), backward=swap(ADD_UP, "dist.get_world_size()", "2")), "your code fails"),
    ("gather: along the batch", gather(forward=swap(TOGETHER, "dim=1", "dim=0")), "The sequence is dimension 1 here"),
    ("gather: all_gather_into_tensor, reshaped", gather(forward="mine = {0}.contiguous()\np = dist.get_world_size()\nwhole = mine.new_empty(p * len(mine), *mine.shape[1:])\ndist.all_gather_into_tensor(whole, mine)\nreturn whole.view(len(mine), -1, *mine.shape[2:])"), "The sequence is dimension 1 here"),
    ("gather: parts in the wrong order", gather(forward=swap(TOGETHER, "torch.cat(parts, dim=1)", "torch.cat(parts[::-1], dim=1)")), "In which order do the parts go together"),
    ("gather: hands over a piece that is not contiguous", gather(backward=swap(ADD_UP, "part.contiguous()", "part")), "A collective wants memory without gaps"),
    ("reduce-scatter: its backward pads with zeros", scatter(backward="p = dist.get_world_size()\nreturn torch.cat([{0} if r == dist.get_rank() else torch.zeros_like({0}) for r in range(p)], dim=1)"), "had a term in *their* sums too"),
    ("reduce-scatter: its backward is a copy", scatter(backward="return {0}"), "A gradient has the shape of what went into forward"),
    ("reduce-scatter: its backward repeats a copy", scatter(backward="return torch.cat([{0}] * dist.get_world_size(), dim=1)"), "Each token has a gradient of its own"),
    ("reduce-scatter: its backward puts the parts in the wrong order", scatter(backward=swap(TOGETHER, "cat(parts, ", "cat(parts[::-1], ")), "each from the rank that went on with that token"),
    ("reduce-scatter: its backward returns the parts as they are", scatter(backward=swap(TOGETHER, "torch.cat(parts, dim=1)", "tuple(parts)")), "one gradient for each argument of forward"),
    ("reduce-scatter: only cuts", scatter(forward=CUT), "This is one term of the sum"),
    ("reduce-scatter: the mean", scatter(swap(ADD_UP, "return total", "return total / dist.get_world_size()")), "Are the terms added up"),
    ("reduce-scatter: multiplies by p", scatter(swap(ADD_UP, "return total", "return total * dist.get_world_size()")), "How many times is each rank's term added?"),
    ("reduce-scatter: keeps the next rank's tokens", scatter(swap(ADD_UP, "reduce_scatter(total, parts)", "reduce_scatter(total, parts[1:] + parts[:1])")), "another rank's. Which are yours"),
    ("reduce-scatter: keeps the whole sum", scatter("total = {0}.clone(memory_format=torch.contiguous_format)\ndist.all_reduce(total)\nreturn total"), "Which of them does this rank go on with"),
    ("reduce-scatter: deals the tokens out in turn", scatter(swap(ADD_UP, "part.contiguous() for part in {0}.chunk(dist.get_world_size(), dim=1)", "{0}[:, rank :: dist.get_world_size()].contiguous() for rank in range(dist.get_world_size())")), "of this rank's tokens alone"),
    ("reduce-scatter: all-reduce, then its slice", scatter(forward="total = {0}.clone(memory_format=torch.contiguous_format)\ndist.all_reduce(total)\n" + CUT.replace("{0}", "total")), "sends twice what a reduce-scatter"),
    ("reduce-scatter: cuts the batch", scatter(forward="parts = [part.contiguous() for part in {0}.reshape(dist.get_world_size(), {0}.shape[0], -1, *{0}.shape[2:])]\ntotal = torch.empty_like(parts[0])\ndist.reduce_scatter(total, parts)\nreturn total"), "The sequence is dimension 1 here"),
    ("reduce-scatter: its backward adds up once more", scatter(backward=swap(TOGETHER, "return torch.cat(parts, dim=1)", "whole = torch.cat(parts, dim=1)\ndist.all_reduce(whole)\nreturn whole")), "Where does a p come from"),
]  # fmt: skip


def block(body: str) -> str:
    return f"""
class SequenceParallelBlock(TensorParallelBlock):
    def forward(self, x, rng=None):
{indented(body, 8)}
"""


ENTER = "y = self.norm(x)\ny = gather_from_sequence_region(y, self.group)\ny = self.inner(y, rng)\n"
LEAVE = "y = reduce_scatter_to_sequence_region(y, self.group)\n"
DROP = "return x + dropout(y + self.bias, self.hidden_dropout, self.training, sharded=True, rng=rng)\n"

BLOCK = [
    ("gathers before the norm", block("y = self.norm(gather_from_sequence_region(x, self.group))\ny = self.inner(y, rng)\n" + LEAVE + DROP), "On which side of the gather does the norm belong"),
    ("does not gather", block("y = self.inner(self.norm(x), rng)\ny = gather_from_sequence_region(y, self.group)\n" + LEAVE + DROP), "needs all tokens"),
    ("cuts in place of adding up", block(ENTER + "p, rank = dist.get_world_size(self.group), dist.get_rank(self.group)\ny = shard(y, 1, rank, p)\n" + DROP), "This is one rank's summand"),
    ("all-reduce, then scatter: right numbers, more bytes", block(ENTER + "from tplab.sequence.regions import scatter_to_sequence_region\ny = scatter_to_sequence_region(reduce_from_region(y, self.group), self.group)\n" + DROP), "sends twice what a reduce-scatter sends"),
    ("the bias before the sum", block(ENTER + swap(LEAVE, "(y, self.group)", "(y + self.bias, self.group)") + swap(DROP, "y + self.bias", "y")), "How many times does the sum contain the bias"),
    ("the residual before the sum", block("whole = gather_from_sequence_region(x, self.group)\ny = gather_from_sequence_region(self.norm(x), self.group)\ny = self.inner(y, rng) + whole\n" + LEAVE + swap(DROP, "x + dropout", "dropout")), "On which side of it does the residual belong"),
    ("the gather adds nothing up in backward", block(swap(ENTER, "(y, self.group)", "(y, self.group, partial_grad=False)") + LEAVE + DROP), "What must the backward of the gather do"),
    ("the same mask on every rank", block(ENTER + LEAVE + swap(DROP, "sharded=True", "sharded=False")), "Which state is another one on every rank"),
    ("drops in eval mode too", block(ENTER + LEAVE + swap(DROP, "self.training", "True")), "What tells dropout so"),
    ("drops before the bias", block(ENTER + LEAVE + "y = dropout(y, self.hidden_dropout, self.training, sharded=True, rng=rng)\nreturn x + y + self.bias"), "First the bias, then dropout"),
    ("the default group, reduce-scatter", block(ENTER + swap(LEAVE, ", self.group", "") + DROP), "was not given `self.group`"),
    ("inner gets no rng", block(swap(ENTER, "self.inner(y, rng)", "self.inner(y)") + LEAVE + DROP), "From which tracker shall it draw"),
    ("writes into x", block(ENTER + LEAVE + "x.data += dropout(y + self.bias, self.hidden_dropout, self.training, sharded=True, rng=rng).detach()\nreturn x"), "writes into one of these tensors"),
    ("returns all tokens", block(ENTER + LEAVE + swap(DROP, "return ", "x = ") + "return gather_from_sequence_region(x, self.group)"), "Which mapping adds the terms"),
    ("returns nothing", block(ENTER + LEAVE + swap(DROP, "return ", "x = ")), "this rank's tokens [b, s/p, h]"),
    ("forgets the bias", block(ENTER + LEAVE + swap(DROP, "y + self.bias", "y")), "no part of `inner`"),
    ("forgets the residual", block(ENTER + LEAVE + swap(DROP, "x + dropout", "dropout")), "What goes in is added to what comes out"),
    ("the residual of the normed x", block("x = self.norm(x)\n" + swap(ENTER, "self.norm(x)", "x") + LEAVE + DROP), "The residual is x, as it came in"),
    ("forgets the norm", block(swap(ENTER, "self.norm(x)", "x") + LEAVE + DROP), "What does `inner` read in yours"),
    ("the norm behind the sum, as in the first Transformer", block(swap(ENTER, "self.norm(x)", "x") + LEAVE + swap(DROP, "return x + dropout(", "return self.norm(x + dropout(").rstrip() + ")"), "which tensor does each of them read"),
    ("gathers the residual as well, and takes its tokens of it", block(ENTER + LEAVE + "p, rank = dist.get_world_size(self.group), dist.get_rank(self.group)\nx = shard(gather_from_sequence_region(x, self.group), 1, rank, p)\n" + DROP), "one all-gather and one reduce-scatter in each direction"),
    ("adds the data of the bias", block(ENTER + LEAVE + swap(DROP, "self.bias", "self.bias.data")), "Which part of forward is cut off from autograd"),
    ("g in place of the reduce-scatter", block(ENTER + "y = reduce_from_region(y, self.group)\n" + DROP), "Which line gets a shape that it does not expect"),
    ("no dropout", block(ENTER + LEAVE + "return x + y + self.bias"), "Which rate does your call of dropout get"),
    ("drops the residual too", block(ENTER + LEAVE + swap(DROP, "x + dropout(y", "dropout(x + y")), "What stands inside dropout's brackets"),
    ("no dropout without rng", block(ENTER + LEAVE + "training = self.training and rng is not None\n" + swap(DROP, "self.training", "training")), "What does your forward do differently if rng is None"),
    ("torch's own dropout", block(ENTER + LEAVE + "return x + F.dropout(y + self.bias, self.hidden_dropout, self.training)"), "and on a tensor of which shape"),
]  # fmt: skip


def add_up(body: str) -> str:
    return f"def allreduce_sequence_gradients(module, group=None):\n{indented(body, 4)}\n"


FIND = (
    "marked = [p for p in module.parameters() if getattr(p, 'sequence_parallel', False)]\n"
    "gradients = [p.grad for p in marked if p.grad is not None]\n"
)
SUM = "total = torch.cat([g.flatten() for g in gradients])\ndist.all_reduce(total, group=group)\n"
BACK = (
    "for g, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):\n"
    "    g.copy_(part.view_as(g))\n"
)

GRADIENTS = [
    ("does nothing", add_up("pass"), "Which parameters does your loop find"),
    ("adds up the parameters", add_up(swap(FIND, "gradients = [p.grad for", "gradients = [p.data for") + SUM + BACK), "Which tensor is summed, `param` or `param.grad`"),
    ("returns the sums", add_up(FIND + SUM + BACK + "return total"), "nothing has to be returned"),
    ("the mean", add_up(FIND + SUM + "total /= dist.get_world_size(group)\n" + BACK), "Sum or mean"),
    ("every parameter", add_up(swap(FIND, "if getattr(p, 'sequence_parallel', False)", "") + SUM + BACK), "Which parameters are marked"),
    ("everything that is no shard, by the attribute's presence", add_up(swap(FIND, "getattr(p, 'sequence_parallel', False)", "hasattr(p, 'sequence_parallel')") + SUM + BACK), "and with which value"),
    ("one all-reduce for each", add_up(FIND + "for g in gradients:\n    total = g.contiguous()\n    dist.all_reduce(total, group=group)\n    g.copy_(total)\n"), "each message costs its latency"),
    ("the sum is not copied back", add_up(FIND + SUM), "who copies its parts back"),
    ("adds up twice", add_up(FIND + SUM + "dist.all_reduce(total, group=group)\n" + BACK), "How many times"),
    ("takes the parts apart in another order", add_up(FIND + SUM + "lengths = [g.numel() for g in gradients[::-1]]\nfor g, part in zip(gradients[::-1], total.split(lengths), strict=True):\n    g.copy_(part.view_as(g))\n"), "In which order were the gradients put together"),
    ("lays a transposed gradient out as it lies in memory", add_up(FIND + "total = torch.cat([g.T.flatten() if g.dim() == 2 else g for g in gradients])\ndist.all_reduce(total, group=group)\n" + BACK), "In which order were the gradients put together"),
    ("takes the numbers in the order of memory", add_up(FIND + "lines = [g.as_strided((g.numel(),), (1,)) for g in gradients]\ntotal = torch.cat(lines)\ndist.all_reduce(total, group=group)\nfor line, part in zip(lines, total.split([len(line) for line in lines]), strict=True):\n    line.copy_(part)\n"), "on some ranks and not on others"),
    ("leaves early if there's nothing to add", add_up(FIND + "if not any(g.any() for g in gradients):\n    return\n" + SUM + BACK), "Which of your lines makes it leave early"),
    ("only what is trained", add_up(swap(FIND, "if getattr(p,", "if p.requires_grad and getattr(p,") + SUM + BACK), "What else does your loop look at"),
    ("makes a gradient where there is none", add_up(swap(FIND, "gradients = ", "for p in marked:\n    p.grad = torch.zeros_like(p) if p.grad is None else p.grad\ngradients = ") + SUM + BACK), "Leave it so"),
    ("only the module's own parameters", add_up(swap(FIND, "module.parameters()", "module.parameters(recurse=False)") + SUM + BACK), "Also those of modules within modules"),
    ("view on a gradient that lies transposed", add_up(FIND + swap(SUM, "g.flatten()", "g.view(-1)") + BACK), "`view` does not"),
    ("the default group", add_up(FIND + swap(SUM, ", group=group", "") + BACK), "adds up over all ranks"),
]  # fmt: skip


def formula(body: str) -> str:
    return (
        'def layer_bytes(b, s, h, a, p, *, sequence_parallel=False, recompute="nothing"):\n'
        f"    sbh, tokens = s * b * h, s // p if sequence_parallel else s\n{indented(body, 4)}\n"
    )


LAYERS = "if recompute == 'layers':\n    return 2 * tokens * b * h\n"
KEPT = "kept = 10 * tokens * b * h + 24 * sbh // p\n"
SCORES = "if recompute == 'nothing':\n    kept += 5 * s * s * b * a // p\n"
END = "return kept"

FORMULA = [
    ("everything divided by p", formula("if recompute == 'layers':\n    return 2 * tokens * b * h\nkept = 34 * sbh // p\n" + SCORES + END), "All is divided by p"),
    ("nothing divided by p", formula(LAYERS + "kept = 34 * sbh\nif recompute == 'nothing':\n    kept += 5 * s * s * b * a\n" + END), "This is what one process keeps"),
    ("the sequence is cut for a layer's input only", formula(LAYERS + swap(KEPT, "tokens * b * h", "sbh") + SCORES + END), "This is tensor parallelism alone"),
    ("the gathered inputs are kept", formula(LAYERS + "kept = 6 * tokens * b * h + 4 * sbh + 24 * sbh // p\n" + SCORES + END), "gathers the others again in backward"),
    ("scores of all heads", formula(LAYERS + KEPT + swap(SCORES, " // p", "") + END), "How many heads has a rank"),
    ("scores are kept in any case", formula(LAYERS + KEPT + "kept += 5 * s * s * b * a // p\n" + END), "Which term is that"),
    ("recomputes Q, K and V too", formula(LAYERS + KEPT + "if recompute == 'attention':\n    return 10 * tokens * b * h + 18 * sbh // p\n" + SCORES + END), "computed again *from* something"),
    ("full recomputation keeps nothing", formula(swap(LAYERS, "2 * tokens * b * h", "0") + KEPT + SCORES + END), "What has to be kept for that"),
    ("full recomputation keeps one byte per number", formula(swap(LAYERS, "2 * tokens", "tokens") + KEPT + SCORES + END), "How many bytes has a 16-bit number"),
    ("full recomputation keeps all tokens", formula(swap(LAYERS, "2 * tokens * b * h", "2 * sbh") + KEPT + SCORES + END), "Which p is missing"),
    ("full recomputation keeps a p-th of the input", formula(swap(LAYERS, "2 * tokens * b * h", "2 * sbh // p") + KEPT + SCORES + END), "What is divided by p then"),
    ("the input of the second product of the MLP is kept whole", formula(LAYERS + swap(KEPT, "10 * tokens * b * h + 24", "18 * tokens * b * h + 16") + SCORES + END), "Go through the table row by row: is this tensor"),
    ("without the masks", formula(LAYERS + swap(KEPT, "10", "8") + SCORES + END), "Add up the table"),
    ("returns nothing", formula(LAYERS + KEPT + SCORES), "one number, in bytes"),
    ("other defaults", swap(formula(LAYERS + KEPT + SCORES + END), "sequence_parallel=False", "sequence_parallel=True"), "Left out, sequence_parallel is False"),
]  # fmt: skip

WRONG = [
    WrongAnswer(exercise=exercise, name=name, source=source, says=says)
    for exercise, answers in (("12.1", MAPPINGS), ("12.2", BLOCK), ("12.3", GRADIENTS), ("12.4", FORMULA))
    for name, source, says in answers
]
