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


def g(forward: str = SUM, backward: str = IDENTITY_BACK) -> str:
    return operator("ReduceFromRegion", forward, backward)


def scatter(forward: str = CUT, backward: str = GATHER_BACK) -> str:
    return operator("ScatterToRegion", forward, backward)


def gather(forward: str = GATHER, backward: str = CUT_BACK) -> str:
    return operator("GatherFromRegion", forward, backward)


# 3.1

COPIES = [
    ("no communication", f(backward="return grad_output"), "Who adds up the paths"),
    ("writes into the upstream gradient (shipped)", f(backward="dist.all_reduce(grad_output)\nreturn grad_output"), "Was that one yours"),
    ("contiguous() is no copy of a contiguous tensor (shipped)", f(backward=swap(SUM_BACK, COPY, "contiguous()")), ".contiguous() makes no copy"),
    ("copies the gradient only when it is contiguous", f(backward=swap(SUM_BACK, COPY, "clone() if grad_output.is_contiguous() else grad_output")), "Was that one yours"),
    ("copies the gradient unless it is expanded", f(backward=swap(SUM_BACK, "y = ", "y = grad_output if 0 in grad_output.stride() else ")), "A collective wants memory without gaps"),
    ("reduces a copy, returns the original", f(backward="dist.all_reduce(grad_output.clone())\nreturn grad_output"), "Which tensor did it write into"),
    ("reduces contiguous(), returns the original (shipped)", f(backward="dist.all_reduce(grad_output.contiguous())\nreturn grad_output"), "Was that one yours"),
    ("returns what all_reduce returns", f(backward=f"return dist.all_reduce(grad_output.{COPY})"), "returned nothing for x"),
    ("the mean", f(backward=swap(SUM_BACK, "return y", "return y / dist.get_world_size()")), "Does it take their mean"),
    ("adds twice", f(backward=swap(SUM_BACK, "return", "dist.all_reduce(y)\nreturn")), "How many times is each rank's term added"),
    ("the maximum", f(backward=swap(SUM_BACK, "all_reduce(y", "all_reduce(y, op=dist.ReduceOp.MAX")), "Does it take the largest"),
    ("adds on rank 0 only", f(backward=swap_all(SUM_BACK, ("all_reduce(y)", "reduce(y, dst=0)"), ("return y", "return y if dist.get_rank() == 0 else grad_output"))), "to one rank only, and which to all"),
    ("gathers and adds", f(backward=swap(GATHER_BACK, "unshard(parts, -1)", "sum(parts)")), "Which collective adds on the way"),
    ("to rank 0 and back", f(backward=swap(SUM_BACK, "dist.all_reduce(y)", "dist.reduce(y, dst=0)\ndist.broadcast(y, src=0)")), "What has to be sent for it in the backward pass"),
    ("adds forward too", f(SUM), "What is left for f to do"),
    ("f and g mixed up", f(SUM, "return grad_output"), "What is left for f to do"),
    ("broadcasts from rank 0 forward", f(swap(SUM, "all_reduce(y)", "broadcast(y, src=0)")), "What is left for f to do"),
    ("a barrier to be safe", f("dist.barrier()\n" + IDENTITY), "Which of your lines calls the barrier"),
    ("the forward returns zeros", f("return torch.zeros_like(x)"), "puts numbers in"),
    ("the gradient is zeros", f(backward="return torch.zeros_like(grad_output)"), "puts numbers in"),
    ("does not wait for the sum", f(backward=swap(SUM_BACK, "all_reduce(y", "all_reduce(y, async_op=True")), "From when on may its result be read"),
    ("adds in float32", f(backward=swap_all(SUM_BACK, (COPY, "float().contiguous()"), ("return y", "return y.to(grad_output.dtype)"))), "Fewer bytes are sent that way"),
    ("p times its own gradient", f(backward="return grad_output * dist.get_world_size()"), "Where do the other ranks' come in"),
    ("only rank 0 adds", f(backward=swap(SUM_BACK, "dist.all_reduce", "if dist.get_rank() == 0:\n    dist.all_reduce")), "never joined"),
    ("one all-reduce for every row", f(backward=swap(SUM_BACK, "dist.all_reduce(y)", "for row in y.reshape(-1, y.shape[-1]).chunk(2):\n    dist.all_reduce(row)")), "What has to be sent for it in the backward pass"),
    ("a function, not an operator", "def CopyToRegion(x):\n    return x\n", "is not a class made from torch.autograd.Function"),
]  # fmt: skip

# 3.2

REDUCES = [
    ("no communication", g(IDENTITY), "Who adds them up"),
    ("adds backward too (shipped)", g(backward=SUM_BACK), "All ranks share one loss"),
    ("writes into x (shipped)", g("dist.all_reduce(x)\nreturn x"), "Was that one yours"),
    ("contiguous() is no copy of a contiguous tensor", g(swap(SUM, COPY, "contiguous()")), ".contiguous() makes no copy"),
    ("reduces contiguous(), returns x (shipped)", g("dist.all_reduce(x.contiguous())\nreturn x"), "Was that one yours"),
    ("reduces a copy, returns x", g("dist.all_reduce(x.clone())\nreturn x.view_as(x)"), "Which tensor did it write into"),
    ("right for contiguous x only", g("y = x.clone() if x.is_contiguous() else x * 1\ndist.all_reduce(y.contiguous() if x.is_contiguous() else y.clone())\nreturn y"), "makes a copy of a tensor that is not contiguous"),
    ("puts x back afterwards", g("before = x.clone()\ndist.all_reduce(x)\ny = x.clone()\nx.copy_(before)\nreturn y"), "Putting the old numbers back is a second write"),
    ("the mean", g(swap(SUM, "return y", "return y / dist.get_world_size()")), "Does it take their mean"),
    ("adds twice", g(swap(SUM, "return", "dist.all_reduce(y)\nreturn")), "How many times is each rank's term added"),
    ("adds on rank 0 only", g(swap_all(SUM, ("all_reduce(y)", "reduce(y, dst=0)"), ("return y", "return y if dist.get_rank() == 0 else x * 1"))), "to one rank only, and which to all"),
    ("gathers and adds", g(swap(GATHER, "unshard(parts, -1)", "sum(parts)")), "Which collective adds on the way"),
    ("returns what all_reduce returns", g(f"return dist.all_reduce(x.{COPY})"), "returns None"),
    ("the forward returns zeros", g("return torch.zeros_like(x)"), "puts numbers in"),
    ("the gradient is divided by p", g(backward="return grad_output / dist.get_world_size()"), "Is there a p in it"),
    ("the gradient is multiplied by p", g(backward="return grad_output * dist.get_world_size()"), "Is there a p in it"),
    ("the gradient comes from rank 0", g(backward=swap(SUM_BACK, "all_reduce(y)", "broadcast(y, src=0)")), "Why ask rank 0 for it"),
    ("adds and takes the mean backward", g(backward=swap(SUM_BACK, "return y", "return grad_output")), "What has to be sent for it in the backward pass"),
    ("the gradient is zeros", g(backward="return torch.zeros_like(grad_output)"), "puts numbers in"),
    ("no gradient", g(backward="return None"), "returned nothing for x"),
    ("f and g mixed up", g(IDENTITY, SUM_BACK), "Who adds them up"),
    ("does not wait for the sum", g(swap(SUM, "all_reduce(y", "all_reduce(y, async_op=True")), "From when on may its result be read"),
    ("adds in float32", g(swap_all(SUM, (COPY, "float().contiguous()"), ("return y", "return y.to(x.dtype)"))), "Fewer bytes are sent that way"),
    ("doubles the traffic with a second sum of zeros", g(swap(SUM, "return", "dist.all_reduce(torch.zeros_like(y))\nreturn")), "have to send in the forward pass"),
]  # fmt: skip

# 3.3

SCATTERS = [
    ("the gradient is padded with zeros", scatter(backward=PAD_BACK), "The rest of the gradient is not zero"),
    ("padded with zeros and added", scatter(backward=swap(PAD_BACK, "return", "dist.all_reduce(y)\nreturn")), "here nothing has to be added"),
    ("shard along dimension 0", scatter(swap(CUT, "-1", "0")), "Which dimension does the task cut"),
    ("rank and world_size swapped", scatter("return shard(x, -1, dist.get_world_size(), dist.get_rank())"), "in which order does shard take"),
    ("p copies of its own gradient", scatter(backward="return torch.cat([grad_output] * dist.get_world_size(), -1)"), "Every part came from this rank"),
    ("the parts are added", scatter(backward=SUM_BACK), "A gradient has the shape of the tensor it belongs to"),
    ("put together along dimension 0", scatter(backward=swap(GATHER_BACK, "unshard(parts, -1)", "torch.cat(parts)")), "A gradient has the shape of the tensor it belongs to"),
    ("put together along dimension 0 and reshaped", scatter(backward=swap(GATHER_BACK, "unshard(parts, -1)", "torch.cat(parts).reshape(*mine.shape[:-1], -1)")), "Along which dimension, and in which order, do the parts go back"),
    ("put together in the other order", scatter(backward=swap(GATHER_BACK, "unshard(parts, -1)", "torch.cat(parts[::-1], -1)")), "Along which dimension, and in which order, do the parts go back"),
    ("gathers what is not contiguous", scatter(backward="parts = [grad_output.new_empty(grad_output.shape) for _ in range(dist.get_world_size())]\ndist.all_gather(parts, grad_output)\nreturn unshard(parts, -1)"), "A collective wants memory without gaps"),
    ("the gradient is divided by p", scatter(backward=swap(GATHER_BACK, "contiguous()", "contiguous() / dist.get_world_size()")), "Is there a p in its gradient"),
    ("rank 0's part on every rank", scatter(swap(CUT, "dist.get_rank()", "0")), "Which part of x is this rank's own"),
    ("every p-th column", scatter("return x[..., dist.get_rank() :: dist.get_world_size()].contiguous()"), "A shard is a block of neighbours"),
    ("cuts dimension 0", scatter("return x.tensor_split(dist.get_world_size())[dist.get_rank()].clone()"), "Which dimension does scatter cut"),
    ("keeps the whole", scatter(IDENTITY, "return grad_output"), "What is left for this rank to cut away"),
    ("counts ranks from 1", scatter(swap(CUT, "dist.get_rank()", "(dist.get_rank() + 1) % dist.get_world_size()")), "where does the part of rank r start"),
    ("rank 0 sends the parts", scatter("""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        mine = shard(x, -1, rank, world_size)
        parts = [part.contiguous() for part in x.chunk(world_size, -1)] if rank == 0 else None
        dist.scatter(torch.empty_like(mine), parts, src=0)
        return mine
        """), "have to send in the forward pass"),
    ("the gradient is zeros", scatter(backward="return grad_output.new_zeros(*grad_output.shape[:-1], grad_output.shape[-1] * dist.get_world_size())"), "puts numbers in"),
    ("the forward returns zeros", scatter("return torch.zeros_like(shard(x, -1, dist.get_rank(), dist.get_world_size()))"), "puts numbers in"),
    ("does not wait for the parts", scatter(backward=swap_all(GATHER_BACK, ("empty_like", "zeros_like"), ("all_gather(parts, mine", "all_gather(parts, mine, async_op=True"))), "From when on may its result be read"),
    ("gathers twice", scatter(backward=swap(GATHER_BACK, "return", "dist.all_gather(parts, mine)\nreturn")), "What has to be sent for it in the backward pass"),
    ("clears what it was given", scatter(swap(CUT, "return", "mine =") + "\nx.zero_()\nreturn mine"), "Was that one yours"),
    ("torch.chunk takes uneven sizes", scatter(f"return x.chunk(dist.get_world_size(), -1)[dist.get_rank()].{COPY}"), "9 columns on 2 ranks"),
]  # fmt: skip

# 3.4

GATHERS = [
    ("reduce-scatter backward", gather(backward=swap(SUM_BACK, "return y", "return shard(y, -1, dist.get_rank(), dist.get_world_size())")), "All ranks share one loss"),
    ("the mean backward", gather(backward=swap(SUM_BACK, "return y", "return shard(y / dist.get_world_size(), -1, dist.get_rank(), dist.get_world_size())")), "What is there to add, or to average"),
    ("rank and world_size swapped in backward", gather(backward="return shard(grad_output, -1, dist.get_world_size(), dist.get_rank())"), "in which order does shard take"),
    ("slice 0 on every rank", gather(backward=swap(CUT_BACK, "dist.get_rank()", "0")), "Which columns of the whole did this rank put in"),
    ("the whole gradient", gather(backward="return grad_output"), "A gradient has the shape of the tensor it belongs to"),
    ("the gradient is divided by p", gather(backward=CUT_BACK + " / dist.get_world_size()"), "Is there a p in its gradient"),
    ("the gradient is multiplied by p", gather(backward=CUT_BACK + " * dist.get_world_size()"), "Is there a p in its gradient"),
    ("the gradient is zeros", gather(backward="return torch.zeros_like(shard(grad_output, -1, 0, dist.get_world_size()))"), "puts numbers in"),
    ("gathers the gradient again and cuts", gather(backward=swap_all(GATHER_BACK, ("grad_output.contiguous()", "shard(grad_output, -1, dist.get_rank(), dist.get_world_size())"), ("unshard(parts, -1)", "parts[dist.get_rank()]"))), "What has to be sent for it in the backward pass"),
    ("no communication", gather(IDENTITY, "return grad_output"), "Who holds the others"),
    ("p copies of its own part", gather("return torch.cat([x] * dist.get_world_size(), -1)"), "Every part came from this rank"),
    ("padded with zeros and added", gather(swap(PAD, "return", "dist.all_reduce(y)\nreturn")), "here nothing has to be added"),
    ("put together along dimension 0", gather(swap(GATHER, "unshard(parts, -1)", "torch.cat(parts)")), "Along which dimension, and in which order, do the parts go together"),
    ("put together along dimension 0 and reshaped", gather(swap(GATHER, "unshard(parts, -1)", "torch.cat(parts).reshape(*mine.shape[:-1], -1)")), "Along which dimension, and in which order, do the parts go together"),
    ("its own part first", gather("rank = dist.get_rank()" + swap(GATHER, "unshard(parts, -1)", "unshard(parts[rank:] + parts[:rank], -1)")), "Along which dimension, and in which order, do the parts go together"),
    ("gathers what is not contiguous", gather("parts = [x.new_empty(x.shape) for _ in range(dist.get_world_size())]\ndist.all_gather(parts, x)\nreturn unshard(parts, -1)"), "A collective wants memory without gaps"),
    ("the sum of the parts", gather(SUM, "return grad_output"), "Should they be added"),
    ("the forward returns zeros", gather("return x.new_zeros(*x.shape[:-1], x.shape[-1] * dist.get_world_size())"), "puts numbers in"),
    ("does not wait for the parts", gather(swap_all(GATHER, ("empty_like", "zeros_like"), ("all_gather(parts, mine", "all_gather(parts, mine, async_op=True"))), "From when on may its result be read"),
    ("gathers on rank 0 and sends the whole", gather("""
        rank, world_size, mine = dist.get_rank(), dist.get_world_size(), x.contiguous()
        parts = [torch.empty_like(mine) for _ in range(world_size)]
        dist.gather(mine, parts if rank == 0 else None, dst=0)
        y = unshard(parts, -1)
        dist.broadcast(y, src=0)
        return y
        """), "have to send in the forward pass"),
]  # fmt: skip

WRONG = [
    WrongAnswer(exercise=exercise, name=name, source=source, says=says)
    for exercise, answers in (("3.1", COPIES), ("3.2", REDUCES), ("3.3", SCATTERS), ("3.4", GATHERS))
    for name, source, says in answers
]
