"""Wrong answers to the exercises of the start page, and what each must be told."""

from tests.wrong_answers import WrongAnswer, indented, swap, swap_all


def column(body: str) -> str:
    return f"def column_product(x, a_shard):\n{indented(body)}\n"


GATHER = """
y_shard = x @ a_shard
parts = [torch.empty_like(y_shard) for _ in range(dist.get_world_size())]
dist.all_gather(parts, y_shard)
return torch.cat(parts, dim=-1)
"""

COLUMN = [
    ("no communication", column("return x @ a_shard"), "The other ranks have the remaining columns"),
    ("gathers along dimension 0", column("""
        y_shard = x @ a_shard
        out = y_shard.new_empty(dist.get_world_size() * y_shard.shape[0], *y_shard.shape[1:])
        dist.all_gather_into_tensor(out, y_shard)
        return out
        """), "Along which dimension did you concatenate them"),
    ("gathers along dimension 0, then reshapes", column(swap(GATHER, "torch.cat(parts, dim=-1)", "torch.cat(parts).reshape(*x.shape[:-1], -1)")), "Along which dimension did you concatenate them"),
    ("puts the parts together along dimension 1, whatever x is", column(swap(GATHER, "dim=-1", "dim=1")), "always along the last dimension"),
    ("pads with zeros and adds", column("""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        n = a_shard.shape[1]
        y = x.new_zeros(*x.shape[:-1], n * world_size)
        y[..., rank * n : (rank + 1) * n] = x @ a_shard
        dist.all_reduce(y)
        return y
        """), "There's nothing to add up here"),
    ("gathers the weights", column("""
        parts = [torch.empty_like(a_shard) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, a_shard)
        return x @ torch.cat(parts, dim=1)
        """), "Weights are usually the largest tensors"),
    ("adds the parts", column("y = x @ a_shard\ndist.all_reduce(y)\nreturn y"), "not terms of the same sum"),
    ("gathers to rank 0 only", column("""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        y_shard = x @ a_shard
        parts = [torch.zeros_like(y_shard) for _ in range(world_size)]
        dist.gather(y_shard, parts if rank == 0 else None, dst=0)
        return torch.cat(parts, dim=-1)
        """), "Which collective gives the result to every rank"),
    ("p copies of its own part", column("return torch.cat([x @ a_shard] * dist.get_world_size(), dim=-1)"), "you concatenated p copies of this rank's own columns"),
    ("its own part first", column("""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        y_shard = x @ a_shard
        parts = [torch.empty_like(y_shard) for _ in range(world_size)]
        dist.all_gather(parts, y_shard)
        return torch.cat(parts[rank:] + parts[:rank], dim=-1)
        """), "fills the list in rank order"),
    ("the other way round", column(swap(GATHER, "cat(parts", "cat(parts[::-1]")), "fills the list in rank order"),
    ("one list of the same tensor p times", column(swap(GATHER, " for _ in range(dist.get_world_size())]", "] * dist.get_world_size()")), "Does your list contain p different tensors"),
    ("gathers twice", column(swap(GATHER, "dist.all_gather(parts, y_shard)\n", "dist.all_gather(parts, y_shard)\n" * 2)), "Which of your two calls can you remove"),
    ("broadcasts x first, to be safe", column("dist.broadcast(x, src=0)" + GATHER), "why does your code need a broadcast"),
    ("does not wait for the gather", column(swap_all(GATHER, ("empty_like", "zeros_like"), ("(parts, y_shard)", "(parts, y_shard, async_op=True)"))), "When is it safe to read the result"),
    ("one broadcast from each rank", column("""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        y_shard = x @ a_shard
        parts = [y_shard.clone() if r == rank else torch.empty_like(y_shard) for r in range(world_size)]
        for r in range(world_size):
            dist.broadcast(parts[r], src=r)
        return torch.cat(parts, dim=-1)
        """), "a single collective is all you need"),
    ("returns what all_gather returns", column(swap_all(GATHER, ("return torch.cat(parts, dim=-1)", ""), ("dist.all_gather", "return dist.all_gather"))), "what does its last line return"),
    ("returns the list of parts", column(swap(GATHER, "torch.cat(parts, dim=-1)", "parts")), "what does its last line return"),
    ("zeros of the right shape", column("return x.new_zeros(*x.shape[:-1], a_shard.shape[1] * dist.get_world_size())"), "Which line is supposed to fill in the values"),
    ("the gather's buffers are never filled from a product", column(swap(GATHER, "x @ a_shard", "(x @ a_shard).zero_()")), "Which line is supposed to fill in the values"),
    ("only rank 0 takes part", column(swap(GATHER, "dist.all_gather", "if dist.get_rank() == 0:\n    dist.all_gather")), "never joined"),
    ("a barrier to be safe", column(swap(GATHER, "parts = [", "dist.barrier()\nparts = [")), "Which of your lines calls the barrier"),
    ("gathers Python objects", column("""
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, x @ a_shard)
        return torch.cat(parts, dim=-1)
        """), "a single collective is all you need"),
    ("in float32", column(swap(GATHER, "x @ a_shard", "x.float() @ a_shard.float()")), "Somewhere, your code casts values to a different dtype"),
    ("sends in float32 to save traffic", column(swap_all(GATHER, ("x @ a_shard", "(x @ a_shard).float()"), ("dim=-1)", "dim=-1).to(x.dtype)"))), "it costs you precision"),
]  # fmt: skip


def row(body: str) -> str:
    return f"def row_product(x_shard, a_shard):\n{indented(body)}\n"


REDUCE = "y = x_shard @ a_shard\ndist.all_reduce(y)\nreturn y\n"
GATHER_TERMS = """
y = x_shard @ a_shard
parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]
dist.all_gather(parts, y)
"""

ROW = [
    ("no communication", row("return x_shard @ a_shard"), "Which collective adds up the partial sums from all ranks? (If"),
    ("reduces a copy", row(swap(REDUCE, "all_reduce(y)", "all_reduce(y.clone())")), "check which tensor it writes to"),
    ("returns what all_reduce returns", row("y = x_shard @ a_shard\nreturn dist.all_reduce(y)"), "both return None"),
    ("the mean", row(swap(REDUCE, "return y", "return y / dist.get_world_size()")), "Is Y the average or the sum of the ranks' results"),
    ("the maximum", row(swap(REDUCE, "all_reduce(y)", "all_reduce(y, op=dist.ReduceOp.MAX)")), "Which operation combines partial sums"),
    ("gathers and adds", row(GATHER_TERMS + "return sum(parts)"), "Which collective does the summing for you"),
    ("gathers and puts side by side", row(GATHER_TERMS + "return torch.cat(parts, dim=-1)"), "Should you concatenate these results"),
    ("adds on rank 0 only", row(swap(REDUCE, "all_reduce(y)", "reduce(y, dst=0)")), "Which collective gives the result to every rank"),
    ("to rank 0 and back", row(swap(REDUCE, "all_reduce(y)", "reduce(y, dst=0)\ndist.broadcast(y, src=0)")), "Which single collective does both"),
    ("reduce-scatter, then all-gather", row("""
        y = (x_shard @ a_shard).movedim(-1, 0).contiguous()
        mine = y.new_empty(y.shape[0] // dist.get_world_size(), *y.shape[1:])
        dist.reduce_scatter_tensor(mine, y)
        parts = list(y.chunk(dist.get_world_size()))
        dist.all_gather(parts, mine)
        return torch.cat(parts).movedim(0, -1)
        """), "where one collective would do"),
    ("adds the inputs", row("dist.all_reduce(x_shard)\nreturn x_shard @ a_shard"), "A product of sums isn't the same as a sum of products"),
    ("gathers x and the weights", row("""
        world_size = dist.get_world_size()
        xs = [torch.empty_like(x_shard) for _ in range(world_size)]
        rows = [torch.empty_like(a_shard) for _ in range(world_size)]
        dist.all_gather(xs, x_shard)
        dist.all_gather(rows, a_shard)
        return torch.cat(xs, dim=-1) @ torch.cat(rows, dim=0)
        """), "Weights are usually the largest tensors"),
    ("p times its own part", row("return x_shard @ a_shard * dist.get_world_size()"), "but the other ranks have different partial sums"),
    ("adds twice", row(swap(REDUCE, "dist.all_reduce(y)\n", "dist.all_reduce(y)\n" * 2)), "Does your code add every term more than once"),
    ("adds twice and divides", row(swap_all(REDUCE, ("dist.all_reduce(y)\n", "dist.all_reduce(y)\n" * 2), ("return y", "return y / dist.get_world_size()"))), "Which of your two calls can you remove"),
    ("adds in float32 to save traffic", row(swap_all(REDUCE, ("x_shard @ a_shard", "(x_shard @ a_shard).float()"), ("return y", "return y.to(x_shard.dtype)"))), "it costs you precision"),
    ("does not wait for the sum", row(swap(REDUCE, "all_reduce(y)", "all_reduce(y, async_op=True)")), "When is it safe to read the result"),
    ("one all-reduce for every row", row(swap(REDUCE, "dist.all_reduce(y)", "for row in y:\n    dist.all_reduce(row)")), "a single collective is all you need"),
    ("zeros of the right shape", row(swap(REDUCE, "x_shard @ a_shard", "x_shard.new_zeros(*x_shard.shape[:-1], a_shard.shape[1])")), "Which line is supposed to fill in the values"),
    ("rank 0 does not take part", row(swap(REDUCE, "dist.all_reduce(y)", "if dist.get_rank() != 0:\n    dist.all_reduce(y)")), "never joined"),
    ("a transposed copy is reduced", row(swap(REDUCE, "all_reduce(y)", "all_reduce(y.transpose(0, 1).contiguous())")), "check which tensor it writes to"),
]  # fmt: skip

WRONG = [
    WrongAnswer(exercise=exercise, name=name, source=source, says=says)
    for exercise, answers in (("S.1", ROW), ("S.2", COLUMN))
    for name, source, says in answers
]
