"""Wrong answers to the exercises of chapter 03, and what each must be told.

Most of them change one half of an operator, and `f`, `g`, `scatter` and `gather` below add the other half from the right
answer. "Shipped" marks mistakes that we found in released code.
"""

from tests.wrong_answers import WrongAnswer, indented, swap, swap_all

# The right halves, written for x. The names that end in _BACK are the same for grad_output
COPY = "clone(memory_format=torch.contiguous_format)"
IDENTITY = "return x.view_as(x)"
SUM = f"y = x.{COPY}\ndist.all_reduce(y)\nreturn y"
CUT = "return shard(x, -1, dist.get_rank(), dist.get_world_size())"
GATHER = """
mine = x.contiguous()
parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
dist.all_gather(parts, mine)
return unshard(parts, -1)
"""
# A wrong half that several answers use: it puts this rank's columns into a tensor of zeros
PAD = """
rank, n = dist.get_rank(), x.shape[-1]
y = x.new_zeros(*x.shape[:-1], n * dist.get_world_size())
y[..., rank * n : (rank + 1) * n] = x
return y
"""
IDENTITY_BACK, SUM_BACK, CUT_BACK, GATHER_BACK, PAD_BACK = (
    swap(half, "x", "grad_output") for half in (IDENTITY, SUM, CUT, GATHER, PAD)
)


def operator(name: str, forward: str, backward: str) -> str:
    return f"""
class {name}(Function):
    @staticmethod
    def forward(ctx, x):
{indented(forward, 8)}

    @staticmethod
    def backward(ctx, grad_output):
{indented(backward, 8)}
"""


def f(forward: str = IDENTITY, backward: str = SUM_BACK) -> str:
    return operator("CopyToRegion", forward, backward)


RIGHT = {
    "ReduceFromRegion": (SUM, IDENTITY_BACK),
    "ScatterToRegion": (CUT, GATHER_BACK),
    "GatherFromRegion": (GATHER, CUT_BACK),
}


def one_of_three(name: str, forward: str, backward: str) -> str:
    """The answer to 3.3 with one wrong operator."""
    halves = RIGHT | {name: (forward, backward)}
    return "\n".join(operator(each, *halves[each]) for each in halves)


def g(forward: str = SUM, backward: str = IDENTITY_BACK) -> str:
    return one_of_three("ReduceFromRegion", forward, backward)


def scatter(forward: str = CUT, backward: str = GATHER_BACK) -> str:
    return one_of_three("ScatterToRegion", forward, backward)


def gather(forward: str = GATHER, backward: str = CUT_BACK) -> str:
    return one_of_three("GatherFromRegion", forward, backward)


# 3.1


def table(
    f=("nothing", "all-reduce"),
    g=("all-reduce", "nothing"),
    scatter=("my slice", "all-gather"),
    gather=("all-gather", "my slice"),
    **more,
) -> str:
    return f"def operator_table():\n    return {dict(f=f, g=g, scatter=scatter, gather=gather, **more)!r}\n"


TABLES = [
    ("f does nothing", table(f=("nothing", "nothing")), "combine the gradients from all uses of a variable"),
    ("f adds in both directions", table(f=("all-reduce", "all-reduce")), "Is there anything left for f to do"),
    ("f and g mixed up", table(f=("all-reduce", "nothing"), g=("nothing", "all-reduce")), "Is there anything left for f to do"),
    ("f gathers the gradients", table(f=("nothing", "all-gather")), "Which of the four options change"),
    ("g adds in both directions", table(g=("all-reduce", "all-reduce")), "would that loss be counted"),
    ("g does nothing", table(g=("nothing", "nothing")), "Which collective gives the sum to every rank"),
    ("g adds on the way back", table(g=("nothing", "all-reduce")), "Which collective gives the sum to every rank"),
    ("g takes a slice of the gradient", table(g=("all-reduce", "my slice")), "Which of the four options change"),
    ("scatter does nothing backward", table(scatter=("my slice", "nothing")), "The output of scatter should be this rank's own slice of x"),
    ("scatter adds backward", table(scatter=("my slice", "all-reduce")), "The output of scatter should be this rank's own slice of x"),
    ("scatter and gather mixed up", table(scatter=("all-gather", "my slice"), gather=("my slice", "all-gather")), "The output of scatter should be this rank's own slice of x"),
    ("scatter keeps everything", table(scatter=("nothing", "nothing")), "The output of scatter should be this rank's own slice of x"),
    ("gather adds backward", table(gather=("all-gather", "all-reduce")), "every rank already has the gradient of the full output"),
    ("gather does nothing backward", table(gather=("all-gather", "nothing")), "every rank already has the gradient of the full output"),
    ("gather adds", table(gather=("all-reduce", "nothing")), "every rank already has the gradient of the full output"),
    ("scatter gives everyone everything", table(scatter=("all-reduce", "nothing")), "The output of scatter should be this rank's own slice of x"),
    ("an operator is missing", "def operator_table():\n    return {'f': ('nothing', 'all-reduce')}\n", "It should return a dict with the keys"),
    ("not a table", "def operator_table():\n    return 'f', 'g'\n", "It should return a dict with the keys"),
    ("another word", table(g=("allreduce", "nothing")), "Each operator needs two of these words"),
    ("only the forward pass", table(f=("nothing",)), "Each operator needs two of these words"),
]  # fmt: skip

# 3.2

COPIES = [
    ("no communication", f(backward="return grad_output"), "computes the sum of all these gradients"),
    ("writes into the upstream gradient (shipped)", f(backward="dist.all_reduce(grad_output)\nreturn grad_output"), "Your operator overwrote one of its inputs"),
    ("contiguous() is no copy of a contiguous tensor (shipped)", f(backward=swap(SUM_BACK, COPY, "contiguous()")), "`.contiguous()` doesn't copy"),
    ("copies the gradient only when it is contiguous", f(backward=swap(SUM_BACK, COPY, "clone() if grad_output.is_contiguous() else grad_output")), "Your operator overwrote one of its inputs"),
    ("copies the gradient unless it is expanded", f(backward=swap(SUM_BACK, "y = ", "y = grad_output if 0 in grad_output.stride() else ")), "Collectives need contiguous tensors"),
    ("reduces a copy, returns the original", f(backward="dist.all_reduce(grad_output.clone())\nreturn grad_output"), "Which tensor did the all-reduce write into"),
    ("a copy with the layout of the gradient", f(backward="dx = grad_output.clone()\ndist.all_reduce(dx)\nreturn dx"), "Which line passes a tensor to a collective"),
    ("reduces contiguous(), returns the original (shipped)", f(backward="dist.all_reduce(grad_output.contiguous())\nreturn grad_output"), "Your operator overwrote one of its inputs"),
    ("returns what all_reduce returns", f(backward=f"return dist.all_reduce(grad_output.{COPY})"), "returned nothing for x"),
    ("the mean", f(backward=swap(SUM_BACK, "return y", "return y / dist.get_world_size()")), "Does the chain rule add or average the gradients"),
    ("adds twice", f(backward=swap(SUM_BACK, "return", "dist.all_reduce(y)\nreturn")), "add each rank's gradient more than once"),
    ("the maximum", f(backward=swap(SUM_BACK, "all_reduce(y", "all_reduce(y, op=dist.ReduceOp.MAX")), "You took the maximum across ranks"),
    ("adds on rank 0 only", f(backward=swap_all(SUM_BACK, ("all_reduce(y)", "reduce(y, dst=0)"), ("return y", "return y if dist.get_rank() == 0 else grad_output"))), "delivers its result to only one rank"),
    ("gathers and adds", f(backward=swap(GATHER_BACK, "unshard(parts, -1)", "sum(parts)")), "computes the sum for you"),
    ("to rank 0 and back", f(backward=swap(SUM_BACK, "dist.all_reduce(y)", "dist.reduce(y, dst=0)\ndist.broadcast(y, src=0)")), "How many calls should there be"),
    ("adds forward too", f(SUM), "Is there anything left for f to do"),
    ("f and g mixed up", f(SUM, "return grad_output"), "Is there anything left for f to do"),
    ("broadcasts from rank 0 forward", f(swap(SUM, "all_reduce(y)", "broadcast(y, src=0)")), "Is there anything left for f to do"),
    ("a barrier to be safe", f("dist.barrier()\n" + IDENTITY), "Which of your lines calls the barrier"),
    ("the forward returns zeros", f("return torch.zeros_like(x)"), "should fill in the values"),
    ("the gradient is zeros", f(backward="return torch.zeros_like(grad_output)"), "should fill in the values"),
    ("does not wait for the sum", f(backward=swap(SUM_BACK, "all_reduce(y", "all_reduce(y, async_op=True")), "When is it safe to read the result"),
    ("adds in float32", f(backward=swap_all(SUM_BACK, (COPY, "float().contiguous()"), ("return y", "return y.to(grad_output.dtype)"))), "With a smaller dtype, you'd send fewer bytes"),
    ("p times its own gradient", f(backward="return grad_output * dist.get_world_size()"), "sums the gradients across all ranks"),
    ("only rank 0 adds", f(backward=swap(SUM_BACK, "dist.all_reduce", "if dist.get_rank() == 0:\n    dist.all_reduce")), "never joined"),
    ("one all-reduce for every row", f(backward=swap(SUM_BACK, "dist.all_reduce(y)", "for row in y.reshape(-1, y.shape[-1]).chunk(2):\n    dist.all_reduce(row)")), "How many calls should there be"),
    ("a function, not an operator", "def CopyToRegion(x):\n    return x\n", "isn't a subclass of torch.autograd.Function"),
    ("flattens the gradient by its last dimension", f(backward=swap_all(SUM_BACK, (COPY, COPY + ".view(-1, grad_output.shape[-1])"), ("return y", "return y.view(grad_output.shape)"))), "f of x, which is a scalar: your code fails"),
]  # fmt: skip

# 3.3

REDUCES = [
    ("g: no communication", g(IDENTITY), "adds up the terms from all ranks"),
    ("g: adds backward too (shipped)", g(backward=SUM_BACK), "All ranks share one loss"),
    ("g: writes into x (shipped)", g("dist.all_reduce(x)\nreturn x"), "Your operator overwrote one of its inputs"),
    ("g: contiguous() is no copy of a contiguous tensor", g(swap(SUM, COPY, "contiguous()")), "`.contiguous()` doesn't copy"),
    ("g: reduces contiguous(), returns x (shipped)", g("dist.all_reduce(x.contiguous())\nreturn x"), "Your operator overwrote one of its inputs"),
    ("g: reduces a copy, returns x", g("dist.all_reduce(x.clone())\nreturn x.view_as(x)"), "Which tensor did the all-reduce write into"),
    ("g: a copy with the layout of x", g("y = x.clone()\ndist.all_reduce(y)\nreturn y"), "Which line passes a tensor to a collective"),
    ("g: right for contiguous x only", g("y = x.clone() if x.is_contiguous() else x * 1\ndist.all_reduce(y.contiguous() if x.is_contiguous() else y.clone())\nreturn y"), "`.contiguous()` copies a tensor that isn't contiguous"),
    ("g: puts x back afterwards", g("before = x.clone()\ndist.all_reduce(x)\ny = x.clone()\nx.copy_(before)\nreturn y"), "Restoring the old values doesn't help"),
    ("g: the mean", g(swap(SUM, "return y", "return y / dist.get_world_size()")), "Does the network need the mean or the sum of x across ranks"),
    ("g: adds twice", g(swap(SUM, "return", "dist.all_reduce(y)\nreturn")), "Is each rank's x counted more than once"),
    ("g: adds on rank 0 only", g(swap_all(SUM, ("all_reduce(y)", "reduce(y, dst=0)"), ("return y", "return y if dist.get_rank() == 0 else x * 1"))), "delivers its result to only one rank"),
    ("g: gathers and adds", g(swap(GATHER, "unshard(parts, -1)", "sum(parts)")), "computes the sum for you"),
    ("g: returns what all_reduce returns", g(f"return dist.all_reduce(x.{COPY})"), "both return None"),
    ("g: the forward returns zeros", g("return torch.zeros_like(x)"), "should fill in the values"),
    ("g: the gradient is divided by p", g(backward="return grad_output / dist.get_world_size()"), "Does your answer depend on p"),
    ("g: the gradient is multiplied by p", g(backward="return grad_output * dist.get_world_size()"), "Does your answer depend on p"),
    ("g: the gradient comes from rank 0", g(backward=swap(SUM_BACK, "all_reduce(y)", "broadcast(y, src=0)")), "why does your code use rank 0's gradient"),
    ("g: adds and takes the mean backward", g(backward=swap(SUM_BACK, "return y", "return grad_output")), "How many calls should there be"),
    ("g: the gradient is zeros", g(backward="return torch.zeros_like(grad_output)"), "should fill in the values"),
    ("g: no gradient", g(backward="return None"), "returned nothing for x"),
    ("g: f and g mixed up", g(IDENTITY, SUM_BACK), "adds up the terms from all ranks"),
    ("g: does not wait for the sum", g(swap(SUM, "all_reduce(y", "all_reduce(y, async_op=True")), "When is it safe to read the result"),
    ("g: adds in float32", g(swap_all(SUM, (COPY, "float().contiguous()"), ("return y", "return y.to(x.dtype)"))), "With a smaller dtype, you'd send fewer bytes"),
    ("g: doubles the traffic with a second sum of zeros", g(swap(SUM, "return", "dist.all_reduce(torch.zeros_like(y))\nreturn")), "need to send in the forward pass"),
]  # fmt: skip

SCATTERS = [
    ("scatter: the gradient is padded with zeros", scatter(backward=PAD_BACK), "contains zeros where the other ranks' slices should be"),
    ("scatter: padded with zeros and added", scatter(backward=swap(PAD_BACK, "return", "dist.all_reduce(y)\nreturn")), "here there's nothing to add"),
    ("scatter: shard along dimension 0", scatter(swap(CUT, "-1", "0")), "Which dimension should you slice"),
    ("scatter: rank and world_size swapped", scatter("return shard(x, -1, dist.get_world_size(), dist.get_rank())"), "The signature of `shard` is"),
    ("scatter: p copies of its own gradient", scatter(backward="return torch.cat([grad_output] * dist.get_world_size(), -1)"), "of this rank's own slice"),
    ("scatter: the parts are added", scatter(backward=SUM_BACK), "must have the same shape as the tensor that `forward` received"),
    ("scatter: put together along dimension 0", scatter(backward=swap(GATHER_BACK, "unshard(parts, -1)", "torch.cat(parts)")), "must have the same shape as the tensor that `forward` received"),
    ("scatter: put together along dimension 0 and reshaped", scatter(backward=swap(GATHER_BACK, "unshard(parts, -1)", "torch.cat(parts).reshape(*mine.shape[:-1], -1)")), "concatenate the slices of the gradient"),
    ("scatter: put together in the other order", scatter(backward=swap(GATHER_BACK, "unshard(parts, -1)", "torch.cat(parts[::-1], -1)")), "concatenate the slices of the gradient"),
    ("scatter: gathers what is not contiguous", scatter(backward="parts = [grad_output.new_empty(grad_output.shape) for _ in range(dist.get_world_size())]\ndist.all_gather(parts, grad_output)\nreturn unshard(parts, -1)"), "Collectives need contiguous tensors"),
    ("scatter: the gradient is divided by p", scatter(backward=swap(GATHER_BACK, "contiguous()", "contiguous() / dist.get_world_size()")), "Should a column's gradient depend on"),
    ("scatter: rank 0's part on every rank", scatter(swap(CUT, "dist.get_rank()", "0")), "Which slice of x belongs to this rank"),
    ("scatter: every p-th column", scatter("return x[..., dist.get_rank() :: dist.get_world_size()].contiguous()"), "A shard is a contiguous block of columns"),
    ("scatter: cuts dimension 0", scatter("return x.tensor_split(dist.get_world_size())[dist.get_rank()].clone()"), "Which dimension should scatter slice"),
    ("scatter: keeps the whole", scatter(IDENTITY, "return grad_output"), "Which slice of x should this rank keep"),
    ("scatter: counts ranks from 1", scatter(swap(CUT, "dist.get_rank()", "(dist.get_rank() + 1) % dist.get_world_size()")), "Where does rank r's slice start"),
    ("scatter: rank 0 sends the parts", scatter("""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        mine = shard(x, -1, rank, world_size)
        parts = [part.contiguous() for part in x.chunk(world_size, -1)] if rank == 0 else None
        dist.scatter(torch.empty_like(mine), parts, src=0)
        return mine
        """), "need to send in the forward pass"),
    ("scatter: the gradient is zeros", scatter(backward="return grad_output.new_zeros(*grad_output.shape[:-1], grad_output.shape[-1] * dist.get_world_size())"), "should fill in the values"),
    ("scatter: the forward returns zeros", scatter("return torch.zeros_like(shard(x, -1, dist.get_rank(), dist.get_world_size()))"), "should fill in the values"),
    ("scatter: does not wait for the parts", scatter(backward=swap_all(GATHER_BACK, ("empty_like", "zeros_like"), ("all_gather(parts, mine", "all_gather(parts, mine, async_op=True"))), "When is it safe to read the result"),
    ("scatter: gathers twice", scatter(backward=swap(GATHER_BACK, "return", "dist.all_gather(parts, mine)\nreturn")), "How many calls should there be"),
    ("scatter: clears what it was given", scatter(swap(CUT, "return", "mine =") + "\nx.zero_()\nreturn mine"), "Your operator overwrote one of its inputs"),
    ("scatter: torch.chunk takes uneven sizes", scatter(f"return x.chunk(dist.get_world_size(), -1)[dist.get_rank()].{COPY}"), "If you split 9 columns across 2 ranks"),
]  # fmt: skip

GATHERS = [
    ("gather: reduce-scatter backward", gather(backward=swap(SUM_BACK, "return y", "return shard(y, -1, dist.get_rank(), dist.get_world_size())")), "All ranks share one loss"),
    ("gather: the mean backward", gather(backward=swap(SUM_BACK, "return y", "return shard(y / dist.get_world_size(), -1, dist.get_rank(), dist.get_world_size())")), "backward pass need to add or average anything"),
    ("gather: rank and world_size swapped in backward", gather(backward="return shard(grad_output, -1, dist.get_world_size(), dist.get_rank())"), "The signature of `shard` is"),
    ("gather: slice 0 on every rank", gather(backward=swap(CUT_BACK, "dist.get_rank()", "0")), "Which columns of the output came from this rank"),
    ("gather: the whole gradient", gather(backward="return grad_output"), "must have the same shape as the tensor that `forward` received"),
    ("gather: the gradient is divided by p", gather(backward=CUT_BACK + " / dist.get_world_size()"), "Should a column's gradient depend on"),
    ("gather: the gradient is multiplied by p", gather(backward=CUT_BACK + " * dist.get_world_size()"), "Should a column's gradient depend on"),
    ("gather: the gradient is zeros", gather(backward="return torch.zeros_like(shard(grad_output, -1, 0, dist.get_world_size()))"), "should fill in the values"),
    ("gather: gathers the gradient again and cuts", gather(backward=swap_all(GATHER_BACK, ("grad_output.contiguous()", "shard(grad_output, -1, dist.get_rank(), dist.get_world_size())"), ("unshard(parts, -1)", "parts[dist.get_rank()]"))), "How many calls should there be"),
    ("gather: no communication", gather(IDENTITY, "return grad_output"), "How do you get the other ranks' slices"),
    ("gather: p copies of its own part", gather("return torch.cat([x] * dist.get_world_size(), -1)"), "of this rank's own slice"),
    ("gather: padded with zeros and added", gather(swap(PAD, "return", "dist.all_reduce(y)\nreturn")), "here there's nothing to add"),
    ("gather: put together along dimension 0", gather(swap(GATHER, "unshard(parts, -1)", "torch.cat(parts)")), "concatenate the slices along the last dimension"),
    ("gather: put together along dimension 0 and reshaped", gather(swap(GATHER, "unshard(parts, -1)", "torch.cat(parts).reshape(*mine.shape[:-1], -1)")), "concatenate the slices along the last dimension"),
    ("gather: its own part first", gather("rank = dist.get_rank()" + swap(GATHER, "unshard(parts, -1)", "unshard(parts[rank:] + parts[:rank], -1)")), "concatenate the slices along the last dimension"),
    ("gather: gathers what is not contiguous", gather("parts = [x.new_empty(x.shape) for _ in range(dist.get_world_size())]\ndist.all_gather(parts, x)\nreturn unshard(parts, -1)"), "Collectives need contiguous tensors"),
    ("gather: the sum of the parts", gather(SUM, "return grad_output"), "each slice holds different columns"),
    ("gather: the forward returns zeros", gather("return x.new_zeros(*x.shape[:-1], x.shape[-1] * dist.get_world_size())"), "should fill in the values"),
    ("gather: does not wait for the parts", gather(swap_all(GATHER, ("empty_like", "zeros_like"), ("all_gather(parts, mine", "all_gather(parts, mine, async_op=True"))), "When is it safe to read the result"),
    ("gather: gathers on rank 0 and sends the whole", gather("""
        rank, world_size, mine = dist.get_rank(), dist.get_world_size(), x.contiguous()
        parts = [torch.empty_like(mine) for _ in range(world_size)]
        dist.gather(mine, parts if rank == 0 else None, dst=0)
        y = unshard(parts, -1)
        dist.broadcast(y, src=0)
        return y
        """), "need to send in the forward pass"),
]  # fmt: skip

# 3.4


def summed(body: str) -> str:
    return f"def sum_over_ranks(x):\n{indented(body)}\n"


SUMS = [
    ("as shipped", summed("dist.all_reduce(x.contiguous())\nreturn x"), "Is the tensor you pass to the all-reduce really a copy"),
    ("returns what it has reduced", summed("y = x.contiguous()\ndist.all_reduce(y)\nreturn y"), "Is the tensor you pass to the all-reduce really a copy"),
    ("copies, and returns x", summed("dist.all_reduce(x.clone(memory_format=torch.contiguous_format))\nreturn x.clone()"), "which tensor receives the sum"),
    ("a copy with the layout of x", summed("y = x.clone()\ndist.all_reduce(y)\nreturn y"), "Is the tensor you pass to the all-reduce always contiguous"),
    ("writes the sum back into x", summed("y = x.clone(memory_format=torch.contiguous_format)\ndist.all_reduce(y)\nx.copy_(y)\nreturn x") , "sum_over_ranks"),
    ("refuses what isn't contiguous", summed("if not x.is_contiguous():\n    raise ValueError('not contiguous')\ny = x.clone()\ndist.all_reduce(y)\nreturn y"), "sum_over_ranks"),
    ("gathers and adds", summed("y = x.contiguous()\nparts = [torch.empty_like(y) for _ in range(dist.get_world_size())]\ndist.all_gather(parts, y)\nreturn torch.stack(parts).sum(0)"), "a single all-reduce of x would be enough"),
    ("in float32", summed("y = x.float().contiguous()\ndist.all_reduce(y)\nreturn y.to(x.dtype)"), "casts x to a different dtype"),
    ("adds twice", summed("y = x.clone(memory_format=torch.contiguous_format)\ndist.all_reduce(y)\ndist.all_reduce(y)\nreturn y"), "How many times is each contribution counted"),
    ("the mean", summed("y = x.clone(memory_format=torch.contiguous_format)\ndist.all_reduce(y)\nreturn y / dist.get_world_size()"), "How many times is each contribution counted"),
    ("does not wait", summed("y = x.clone(memory_format=torch.contiguous_format)\ndist.all_reduce(y, async_op=True)\nreturn y"), "When is it safe to read the result"),
    ("overwrites x and restores it", summed("if not x.is_contiguous():\n    y = x.contiguous()\n    dist.all_reduce(y)\n    return y\nbackup = x.clone()\ndist.all_reduce(x)\ntotal = x.clone()\nx.copy_(backup)\nreturn total"), "Which other tensor could receive the sum"),
]  # fmt: skip

WRONG = [
    WrongAnswer(exercise=exercise, name=name, source=source, says=says)
    for exercise, answers in (("3.1", TABLES), ("3.2", COPIES), ("3.3", [*REDUCES, *SCATTERS, *GATHERS]), ("3.4", SUMS))
    for name, source, says in answers
]
