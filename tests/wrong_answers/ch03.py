"""Plausible wrong answers to the exercises of chapter 03, and what their message must say.

Most change one of the operator's two halves; `f`, `g`, `scatter` and `gather` below put it together with the right other
half. "Shipped" marks what was found in released code.
"""

from tests.wrong_answers import WrongAnswer, indented

IDENTITY = "return {0}.view_as({0})"
ALL_REDUCE = """
total = {0}.clone(memory_format=torch.contiguous_format)
dist.all_reduce(total)
return total
"""
CUT = "return shard({0}, -1, dist.get_rank(), dist.get_world_size())"
ALL_GATHER = """
mine = {0}.contiguous()
parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
dist.all_gather(parts, mine)
return unshard(parts, -1)
"""
NAMES = {
    "3.1": ("CopyToRegion", IDENTITY, ALL_REDUCE),
    "3.2": ("ReduceFromRegion", ALL_REDUCE, IDENTITY),
    "3.3": ("ScatterToRegion", CUT, ALL_GATHER),
    "3.4": ("GatherFromRegion", ALL_GATHER, CUT),
}


def operator(exercise: str, forward: str | None, backward: str | None) -> str:
    """The source of an operator; a half that is None is the right one."""
    name, right_forward, right_backward = NAMES[exercise]
    forward = forward if forward is not None else right_forward.format("x")
    backward = backward if backward is not None else right_backward.format("grad_output")
    return (
        f"class {name}(Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x):\n"
        f"{indented(forward, 8)}\n\n"
        "    @staticmethod\n"
        "    def backward(ctx, grad_output):\n"
        f"{indented(backward, 8)}\n"
    )


def wrong(
    exercise: str, name: str, says: str, *, forward: str | None = None, backward: str | None = None
) -> WrongAnswer:
    return WrongAnswer(exercise=exercise, name=name, source=operator(exercise, forward, backward), says=says)


WRONG = [
    # ------------------------------------------------------------------ 3.1 f
    wrong("3.1", "no communication", "Who adds up the paths", backward="return grad_output"),
    wrong(
        "3.1",
        "writes into the upstream gradient (shipped)",
        "Was that one yours",
        backward="""
        dist.all_reduce(grad_output)
        return grad_output
        """,
    ),
    wrong(
        "3.1",
        "contiguous() is no copy of a contiguous tensor (shipped)",
        ".contiguous() makes no copy",
        backward="""
        dx = grad_output.contiguous()
        dist.all_reduce(dx)
        return dx
        """,
    ),
    wrong(
        "3.1",
        "copies the gradient only when it is contiguous",
        "Was that one yours",
        backward="""
        dx = grad_output.clone() if grad_output.is_contiguous() else grad_output
        dist.all_reduce(dx)
        return dx
        """,
    ),
    wrong(
        "3.1",
        "copies the gradient unless it is expanded",
        "A collective wants memory without gaps",
        backward="""
        dx = grad_output if 0 in grad_output.stride() else grad_output.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(dx)
        return dx
        """,
    ),
    wrong(
        "3.1",
        "reduces a copy, returns the original",
        "Which tensor did it write into",
        backward="""
        dist.all_reduce(grad_output.clone())
        return grad_output
        """,
    ),
    wrong(
        "3.1",
        "reduces contiguous(), returns the original (shipped)",
        "Was that one yours",
        backward="""
        dist.all_reduce(grad_output.contiguous())
        return grad_output
        """,
    ),
    wrong(
        "3.1",
        "returns what all_reduce returns",
        "returned nothing for x",
        backward="return dist.all_reduce(grad_output.clone(memory_format=torch.contiguous_format))",
    ),
    wrong(
        "3.1",
        "the mean",
        "Does it take their mean",
        backward="""
        dx = grad_output.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(dx)
        return dx / dist.get_world_size()
        """,
    ),
    wrong(
        "3.1",
        "adds twice",
        "How many times is each rank's term added",
        backward="""
        dx = grad_output.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(dx)
        dist.all_reduce(dx)
        return dx
        """,
    ),
    wrong(
        "3.1",
        "the maximum",
        "Does it take the largest",
        backward="""
        dx = grad_output.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(dx, op=dist.ReduceOp.MAX)
        return dx
        """,
    ),
    wrong(
        "3.1",
        "adds on rank 0 only",
        "to one rank only, and which to all",
        backward="""
        dx = grad_output.clone(memory_format=torch.contiguous_format)
        dist.reduce(dx, dst=0)
        return dx if dist.get_rank() == 0 else grad_output
        """,
    ),
    wrong(
        "3.1",
        "gathers and adds",
        "Which collective adds on the way",
        backward="""
        mine = grad_output.contiguous()
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        return sum(parts)
        """,
    ),
    wrong(
        "3.1",
        "to rank 0 and back",
        "What has to be sent for it in the backward pass",
        backward="""
        dx = grad_output.clone(memory_format=torch.contiguous_format)
        dist.reduce(dx, dst=0)
        dist.broadcast(dx, src=0)
        return dx
        """,
    ),
    wrong(
        "3.1",
        "adds forward too",
        "What is left for f to do",
        forward="""
        y = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y)
        return y
        """,
    ),
    wrong(
        "3.1",
        "f and g mixed up",
        "What is left for f to do",
        forward=ALL_REDUCE.format("x"),
        backward="return grad_output",
    ),
    wrong(
        "3.1",
        "broadcasts from rank 0 forward",
        "What is left for f to do",
        forward="""
        y = x.clone(memory_format=torch.contiguous_format)
        dist.broadcast(y, src=0)
        return y
        """,
    ),
    wrong(
        "3.1",
        "a barrier to be safe",
        "have to send in the forward pass",
        forward="""
        dist.barrier()
        return x.view_as(x)
        """,
    ),
    wrong("3.1", "the forward returns zeros", "puts numbers in", forward="return torch.zeros_like(x)"),
    wrong("3.1", "the gradient is zeros", "puts numbers in", backward="return torch.zeros_like(grad_output)"),
    wrong(
        "3.1",
        "does not wait for the sum",
        "From when on may its result be read",
        backward="""
        dx = grad_output.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(dx, async_op=True)
        return dx
        """,
    ),
    wrong(
        "3.1",
        "adds in float32",
        "Fewer bytes are sent that way",
        backward="""
        dx = grad_output.float().contiguous()
        dist.all_reduce(dx)
        return dx.to(grad_output.dtype)
        """,
    ),
    wrong(
        "3.1",
        "p times its own gradient",
        "Where do the other ranks' come in",
        backward="return grad_output * dist.get_world_size()",
    ),
    wrong(
        "3.1",
        "only rank 0 adds",
        "never joined",
        backward="""
        dx = grad_output.clone(memory_format=torch.contiguous_format)
        if dist.get_rank() == 0:
            dist.all_reduce(dx)
        return dx
        """,
    ),
    wrong(
        "3.1",
        "one all-reduce for every row",
        "What has to be sent for it in the backward pass",
        backward="""
        dx = grad_output.clone(memory_format=torch.contiguous_format)
        for row in dx.reshape(-1, dx.shape[-1]).chunk(2):
            dist.all_reduce(row)
        return dx
        """,
    ),
    WrongAnswer(
        exercise="3.1",
        name="a function, not an operator",
        source="def CopyToRegion(x):\n    return x\n",
        says="is not a class made from torch.autograd.Function",
    ),
    # ------------------------------------------------------------------ 3.2 g
    wrong("3.2", "no communication", "Who adds them up", forward="return x.view_as(x)"),
    wrong(
        "3.2",
        "adds backward too (shipped)",
        "All ranks share one loss",
        backward=ALL_REDUCE.format("grad_output"),
    ),
    wrong(
        "3.2",
        "writes into x (shipped)",
        "Was that one yours",
        forward="""
        dist.all_reduce(x)
        return x
        """,
    ),
    wrong(
        "3.2",
        "contiguous() is no copy of a contiguous tensor",
        ".contiguous() makes no copy",
        forward="""
        y = x.contiguous()
        dist.all_reduce(y)
        return y
        """,
    ),
    wrong(
        "3.2",
        "reduces contiguous(), returns x (shipped)",
        "Was that one yours",
        forward="""
        dist.all_reduce(x.contiguous())
        return x
        """,
    ),
    wrong(
        "3.2",
        "reduces a copy, returns x",
        "Which tensor did it write into",
        forward="""
        dist.all_reduce(x.clone())
        return x.view_as(x)
        """,
    ),
    wrong(
        "3.2",
        "right for contiguous x only",
        "makes a copy of a tensor that is not contiguous",
        forward="""
        y = x.clone() if x.is_contiguous() else x * 1
        dist.all_reduce(y.contiguous() if x.is_contiguous() else y.clone())
        return y
        """,
    ),
    wrong(
        "3.2",
        "puts x back afterwards",
        "Putting the old numbers back is a second write",
        forward="""
        before = x.clone()
        dist.all_reduce(x)
        y = x.clone()
        x.copy_(before)
        return y
        """,
    ),
    wrong(
        "3.2",
        "the mean",
        "Does it take their mean",
        forward="""
        y = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y)
        return y / dist.get_world_size()
        """,
    ),
    wrong(
        "3.2",
        "adds twice",
        "How many times is each rank's term added",
        forward="""
        y = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y)
        dist.all_reduce(y)
        return y
        """,
    ),
    wrong(
        "3.2",
        "adds on rank 0 only",
        "to one rank only, and which to all",
        forward="""
        y = x.clone(memory_format=torch.contiguous_format)
        dist.reduce(y, dst=0)
        return y if dist.get_rank() == 0 else x * 1
        """,
    ),
    wrong(
        "3.2",
        "gathers and adds",
        "Which collective adds on the way",
        forward="""
        mine = x.contiguous()
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        return sum(parts)
        """,
    ),
    wrong(
        "3.2",
        "returns what all_reduce returns",
        "returns None",
        forward="return dist.all_reduce(x.clone(memory_format=torch.contiguous_format))",
    ),
    wrong("3.2", "the forward returns zeros", "puts numbers in", forward="return torch.zeros_like(x)"),
    wrong(
        "3.2",
        "the gradient is divided by p",
        "Is there a p in it",
        backward="return grad_output / dist.get_world_size()",
    ),
    wrong(
        "3.2",
        "the gradient is multiplied by p",
        "Is there a p in it",
        backward="return grad_output * dist.get_world_size()",
    ),
    wrong(
        "3.2",
        "the gradient comes from rank 0",
        "Why ask rank 0 for it",
        backward="""
        dx = grad_output.clone(memory_format=torch.contiguous_format)
        dist.broadcast(dx, src=0)
        return dx
        """,
    ),
    wrong(
        "3.2",
        "adds and takes the mean backward",
        "What has to be sent for it in the backward pass",
        backward="""
        mine = grad_output.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(mine)
        return grad_output
        """,
    ),
    wrong("3.2", "the gradient is zeros", "puts numbers in", backward="return torch.zeros_like(grad_output)"),
    wrong("3.2", "no gradient", "returned nothing for x", backward="return None"),
    wrong(
        "3.2",
        "f and g mixed up",
        "Who adds them up",
        forward="return x.view_as(x)",
        backward=ALL_REDUCE.format("grad_output"),
    ),
    wrong(
        "3.2",
        "does not wait for the sum",
        "From when on may its result be read",
        forward="""
        y = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y, async_op=True)
        return y
        """,
    ),
    wrong(
        "3.2",
        "adds in float32",
        "Fewer bytes are sent that way",
        forward="""
        y = x.float().contiguous()
        dist.all_reduce(y)
        return y.to(x.dtype)
        """,
    ),
    wrong(
        "3.2",
        "doubles the traffic with a second sum of zeros",
        "have to send in the forward pass",
        forward="""
        y = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y)
        dist.all_reduce(torch.zeros_like(y))
        return y
        """,
    ),
    # ------------------------------------------------------------------ 3.3 scatter
    wrong(
        "3.3",
        "the gradient is padded with zeros",
        "The rest of the gradient is not zero",
        backward="""
        rank, n = dist.get_rank(), grad_output.shape[-1]
        dx = grad_output.new_zeros(*grad_output.shape[:-1], n * dist.get_world_size())
        dx[..., rank * n : (rank + 1) * n] = grad_output
        return dx
        """,
    ),
    wrong(
        "3.3",
        "padded with zeros and added",
        "here nothing has to be added",
        backward="""
        rank, n = dist.get_rank(), grad_output.shape[-1]
        dx = grad_output.new_zeros(*grad_output.shape[:-1], n * dist.get_world_size())
        dx[..., rank * n : (rank + 1) * n] = grad_output
        dist.all_reduce(dx)
        return dx
        """,
    ),
    wrong(
        "3.3",
        "shard along dimension 0",
        "Which dimension does the task cut",
        forward="return shard(x, 0, dist.get_rank(), dist.get_world_size())",
    ),
    wrong(
        "3.3",
        "rank and world_size swapped",
        "in which order does shard take",
        forward="return shard(x, -1, dist.get_world_size(), dist.get_rank())",
    ),
    wrong(
        "3.4",
        "rank and world_size swapped in backward",
        "in which order does shard take",
        backward="return shard(grad_output, -1, dist.get_world_size(), dist.get_rank())",
    ),
    wrong(
        "3.3",
        "p copies of its own gradient",
        "Every part came from this rank",
        backward="return torch.cat([grad_output] * dist.get_world_size(), -1)",
    ),
    wrong(
        "3.3",
        "the parts are added",
        "A gradient has the shape of the tensor it belongs to",
        backward=ALL_REDUCE.format("grad_output"),
    ),
    wrong(
        "3.3",
        "put together along dimension 0",
        "A gradient has the shape of the tensor it belongs to",
        backward="""
        mine = grad_output.contiguous()
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        return torch.cat(parts)
        """,
    ),
    wrong(
        "3.3",
        "put together along dimension 0 and reshaped",
        "Along which dimension, and in which order, do the parts go back",
        backward="""
        mine = grad_output.contiguous()
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        return torch.cat(parts).reshape(*mine.shape[:-1], -1)
        """,
    ),
    wrong(
        "3.3",
        "put together in the other order",
        "Along which dimension, and in which order, do the parts go back",
        backward="""
        mine = grad_output.contiguous()
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        return torch.cat(parts[::-1], -1)
        """,
    ),
    wrong(
        "3.3",
        "gathers what is not contiguous",
        "A collective wants memory without gaps",
        backward="""
        parts = [grad_output.new_empty(grad_output.shape) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad_output)
        return unshard(parts, -1)
        """,
    ),
    wrong(
        "3.3",
        "the gradient is divided by p",
        "Is there a p in its gradient",
        backward="""
        mine = grad_output.contiguous() / dist.get_world_size()
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        return unshard(parts, -1)
        """,
    ),
    wrong(
        "3.3",
        "rank 0's part on every rank",
        "Which part of x is this rank's own",
        forward="return shard(x, -1, 0, dist.get_world_size())",
    ),
    wrong(
        "3.3",
        "every p-th column",
        "A shard is a block of neighbours",
        forward="return x[..., dist.get_rank() :: dist.get_world_size()].contiguous()",
    ),
    wrong(
        "3.3",
        "cuts dimension 0",
        "Which dimension does scatter cut",
        forward="""
        world_size = dist.get_world_size()
        return x.tensor_split(world_size)[dist.get_rank()].clone()
        """,
    ),
    wrong(
        "3.3",
        "keeps the whole",
        "What is left for this rank to cut away",
        forward="return x.view_as(x)",
        backward="return grad_output",
    ),
    wrong(
        "3.3",
        "counts ranks from 1",
        "where does the part of rank r start",
        forward="""
        world_size = dist.get_world_size()
        return shard(x, -1, (dist.get_rank() + 1) % world_size, world_size)
        """,
    ),
    wrong(
        "3.3",
        "rank 0 sends the parts",
        "have to send in the forward pass",
        forward="""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        mine = shard(x, -1, rank, world_size)
        parts = [part.contiguous() for part in x.chunk(world_size, -1)] if rank == 0 else None
        dist.scatter(torch.empty_like(mine), parts, src=0)
        return mine
        """,
    ),
    wrong(
        "3.3",
        "the gradient is zeros",
        "puts numbers in",
        backward="""
        return grad_output.new_zeros(*grad_output.shape[:-1], grad_output.shape[-1] * dist.get_world_size())
    """,
    ),
    wrong(
        "3.3",
        "the forward returns zeros",
        "puts numbers in",
        forward="return torch.zeros_like(shard(x, -1, dist.get_rank(), dist.get_world_size()))",
    ),
    wrong(
        "3.3",
        "does not wait for the parts",
        "From when on may its result be read",
        backward="""
        mine = grad_output.contiguous()
        parts = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine, async_op=True)
        return unshard(parts, -1)
        """,
    ),
    wrong(
        "3.3",
        "gathers twice",
        "What has to be sent for it in the backward pass",
        backward="""
        mine = grad_output.contiguous()
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        dist.all_gather(parts, mine)
        return unshard(parts, -1)
        """,
    ),
    wrong(
        "3.3",
        "clears what it was given",
        "Was that one yours",
        forward="""
        mine = shard(x, -1, dist.get_rank(), dist.get_world_size())
        x.zero_()
        return mine
        """,
    ),
    wrong(
        "3.3",
        "torch.chunk takes uneven sizes",
        "9 columns on 2 ranks",
        forward="return x.chunk(dist.get_world_size(), "
        "-1)[dist.get_rank()].clone(memory_format=torch.contiguous_format)",
    ),
    # ------------------------------------------------------------------ 3.4 gather
    wrong(
        "3.4",
        "reduce-scatter backward",
        "All ranks share one loss",
        backward="""
        total = grad_output.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return shard(total, -1, dist.get_rank(), dist.get_world_size())
        """,
    ),
    wrong(
        "3.4",
        "the mean backward",
        "What is there to add, or to average",
        backward="""
        total = grad_output.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return shard(total / dist.get_world_size(), -1, dist.get_rank(), dist.get_world_size())
        """,
    ),
    wrong(
        "3.4",
        "slice 0 on every rank",
        "Which columns of the whole did this rank put in",
        backward="return shard(grad_output, -1, 0, dist.get_world_size())",
    ),
    wrong(
        "3.4",
        "the whole gradient",
        "A gradient has the shape of the tensor it belongs to",
        backward="return grad_output",
    ),
    wrong(
        "3.4",
        "the gradient is divided by p",
        "Is there a p in its gradient",
        backward="""
        return shard(grad_output, -1, dist.get_rank(), dist.get_world_size()) / dist.get_world_size()
        """,
    ),
    wrong(
        "3.4",
        "the gradient is multiplied by p",
        "Is there a p in its gradient",
        backward="""
        return shard(grad_output, -1, dist.get_rank(), dist.get_world_size()) * dist.get_world_size()
        """,
    ),
    wrong(
        "3.4",
        "the gradient is zeros",
        "puts numbers in",
        backward="return torch.zeros_like(shard(grad_output, -1, 0, dist.get_world_size()))",
    ),
    wrong(
        "3.4",
        "gathers the gradient again and cuts",
        "What has to be sent for it in the backward pass",
        backward="""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        mine = shard(grad_output, -1, rank, world_size)
        parts = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(parts, mine)
        return parts[rank]
        """,
    ),
    wrong(
        "3.4",
        "no communication",
        "Who holds the others",
        forward="return x.view_as(x)",
        backward="return grad_output",
    ),
    wrong(
        "3.4",
        "p copies of its own part",
        "Every part came from this rank",
        forward="return torch.cat([x] * dist.get_world_size(), -1)",
    ),
    wrong(
        "3.4",
        "padded with zeros and added",
        "here nothing has to be added",
        forward="""
        rank, n = dist.get_rank(), x.shape[-1]
        y = x.new_zeros(*x.shape[:-1], n * dist.get_world_size())
        y[..., rank * n : (rank + 1) * n] = x
        dist.all_reduce(y)
        return y
        """,
    ),
    wrong(
        "3.4",
        "put together along dimension 0",
        "Along which dimension, and in which order, do the parts go together",
        forward="""
        mine = x.contiguous()
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        return torch.cat(parts)
        """,
    ),
    wrong(
        "3.4",
        "put together along dimension 0 and reshaped",
        "Along which dimension, and in which order, do the parts go together",
        forward="""
        mine = x.contiguous()
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        return torch.cat(parts).reshape(*mine.shape[:-1], -1)
        """,
    ),
    wrong(
        "3.4",
        "its own part first",
        "Along which dimension, and in which order, do the parts go together",
        forward="""
        rank, mine = dist.get_rank(), x.contiguous()
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        return unshard(parts[rank:] + parts[:rank], -1)
        """,
    ),
    wrong(
        "3.4",
        "gathers what is not contiguous",
        "A collective wants memory without gaps",
        forward="""
        parts = [x.new_empty(x.shape) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return unshard(parts, -1)
        """,
    ),
    wrong(
        "3.4",
        "the sum of the parts",
        "Should they be added",
        forward=ALL_REDUCE.format("x"),
        backward="return grad_output",
    ),
    wrong(
        "3.4",
        "the forward returns zeros",
        "puts numbers in",
        forward="return x.new_zeros(*x.shape[:-1], x.shape[-1] * dist.get_world_size())",
    ),
    wrong(
        "3.4",
        "does not wait for the parts",
        "From when on may its result be read",
        forward="""
        mine = x.contiguous()
        parts = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine, async_op=True)
        return unshard(parts, -1)
        """,
    ),
    wrong(
        "3.4",
        "gathers on rank 0 and sends the whole",
        "have to send in the forward pass",
        forward="""
        rank, world_size, mine = dist.get_rank(), dist.get_world_size(), x.contiguous()
        parts = [torch.empty_like(mine) for _ in range(world_size)]
        dist.gather(mine, parts if rank == 0 else None, dst=0)
        y = unshard(parts, -1)
        dist.broadcast(y, src=0)
        return y
        """,
    ),
]
