"""Plausible wrong answers to the exercises of chapter 02, and what their message must say."""

from tests.wrong_answers import WrongAnswer

UNSHARD = """

def unshard(shards, dim):
    return torch.cat(shards, dim)
"""

SHARD = """
def shard(tensor, dim, rank, world_size):
    size = tensor.shape[dim]
    if size % world_size:
        raise ValueError(f"size {size} can't be divided over {world_size} ranks")
    length = size // world_size
    return tensor.narrow(dim, rank * length, length).clone(memory_format=torch.contiguous_format)


"""


def wrong_shard(name: str, source: str, says: str) -> WrongAnswer:
    return WrongAnswer(exercise="2.1", name=name, source=source + UNSHARD, says=says)


def wrong_unshard(name: str, source: str, says: str) -> WrongAnswer:
    return WrongAnswer(exercise="2.1", name=name, source=SHARD + source, says=says)


def wrong_column(name: str, source: str, says: str) -> WrongAnswer:
    return WrongAnswer(exercise="2.2", name=name, source=source, says=says)


def wrong_row(name: str, source: str, says: str) -> WrongAnswer:
    return WrongAnswer(exercise="2.3", name=name, source=source, says=says)


EXAMPLES = """

def counter_example():
    return torch.tensor([[3.0, 3.0]]), torch.tensor([[1.0], [-1.0]])


def lucky_example():
    return torch.tensor([[9.0, 9.0]]), torch.tensor([[1.0], [1.0]])
"""

GAP = """
def gelu_gap(x, a, world_size):
    products = [p @ q for p, q in zip(x.chunk(world_size, 1), a.chunk(world_size, 0))]
    return (gelu(sum(products)) - sum(gelu(product) for product in products)).abs().max().item()


"""

COUNTER = """
def counter_example():
    return torch.tensor([[3.0, 3.0]]), torch.tensor([[1.0], [-1.0]])


"""

LUCKY = """

def lucky_example():
    return torch.tensor([[9.0, 9.0]]), torch.tensor([[1.0], [1.0]])
"""


def wrong_gap(name: str, source: str, says: str) -> WrongAnswer:
    return WrongAnswer(exercise="2.4", name=name, source=source + EXAMPLES, says=says)


def wrong_counter(name: str, source: str, says: str) -> WrongAnswer:
    return WrongAnswer(exercise="2.4", name=name, source=GAP + source + LUCKY, says=says)


def wrong_lucky(name: str, source: str, says: str) -> WrongAnswer:
    return WrongAnswer(exercise="2.4", name=name, source=GAP + COUNTER + source, says=says)


WRONG = [
    # ------------------------------------------------------------------ 2.1
    wrong_shard(
        "the remainder is dropped",
        """
def shard(tensor, dim, rank, world_size):
    length = tensor.shape[dim] // world_size
    return tensor.narrow(dim, rank * length, length).clone(memory_format=torch.contiguous_format)
""",
        "should raise ValueError",
    ),
    wrong_shard(
        "torch.chunk takes uneven sizes",
        """
def shard(tensor, dim, rank, world_size):
    return torch.chunk(tensor, world_size, dim)[rank].clone(memory_format=torch.contiguous_format)
""",
        "should raise ValueError",
    ),
    wrong_shard(
        "torch.tensor_split takes uneven sizes",
        """
def shard(tensor, dim, rank, world_size):
    return torch.tensor_split(tensor, world_size, dim)[rank].clone(memory_format=torch.contiguous_format)
""",
        "should raise ValueError",
    ),
    wrong_shard(
        "only the last rank refuses",
        """
def shard(tensor, dim, rank, world_size):
    length = -(-tensor.shape[dim] // world_size)
    if (rank + 1) * length > tensor.shape[dim]:
        raise ValueError(f"{tensor.shape[dim]} can't be divided over {world_size} ranks")
    return tensor.narrow(dim, rank * length, length).clone(memory_format=torch.contiguous_format)
""",
        "rank=0, world_size=",
    ),
    wrong_shard(
        "pads with zeros",
        """
def shard(tensor, dim, rank, world_size):
    extra = -tensor.shape[dim] % world_size
    padding = list(tensor.shape)
    padding[dim] = extra
    padded = torch.cat([tensor, tensor.new_zeros(padding)], dim)
    return padded.chunk(world_size, dim)[rank].clone(memory_format=torch.contiguous_format)
""",
        "what does your code do when size % world_size is not 0",
    ),
    wrong_shard(
        "looks at the number of elements, not at the dimension",
        """
def shard(tensor, dim, rank, world_size):
    if tensor.numel() % world_size:
        raise ValueError(f"{tensor.numel()} elements can't be divided over {world_size} ranks")
    length = tensor.shape[dim] // world_size
    return tensor.narrow(dim, rank * length, length).clone(memory_format=torch.contiguous_format)
""",
        "should raise ValueError",
    ),
    wrong_shard(
        "looks at dimension 0 only",
        """
def shard(tensor, dim, rank, world_size):
    if tensor.shape[0] % world_size:
        raise ValueError(f"{tensor.shape[0]} can't be divided over {world_size} ranks")
    length = tensor.shape[dim] // world_size
    return tensor.narrow(dim, rank * length, length).clone(memory_format=torch.contiguous_format)
""",
        "shard(a tensor of shape [3, 8], dim=1, rank=0, world_size=2) raised ValueError",
    ),
    wrong_shard(
        "assert instead of ValueError",
        """
def shard(tensor, dim, rank, world_size):
    assert tensor.shape[dim] % world_size == 0, f"{tensor.shape[dim]} over {world_size}"
    return tensor.chunk(world_size, dim)[rank].clone(memory_format=torch.contiguous_format)
""",
        "AssertionError",
    ),
    wrong_shard(
        "an error that says nothing",
        """
def shard(tensor, dim, rank, world_size):
    if tensor.shape[dim] % world_size:
        raise ValueError("uneven")
    return tensor.chunk(world_size, dim)[rank].clone(memory_format=torch.contiguous_format)
""",
        "its message does not name",
    ),
    wrong_shard(
        "refuses everything",
        """
def shard(tensor, dim, rank, world_size):
    raise ValueError(f"{tensor.shape[dim]} can't be divided over {world_size} ranks")
""",
        "can be divided by the number of ranks in this call",
    ),
    wrong_shard(
        "every p-th slice",
        """
def shard(tensor, dim, rank, world_size):
    if tensor.shape[dim] % world_size:
        raise ValueError(f"{tensor.shape[dim]} can't be divided over {world_size} ranks")
    indices = torch.arange(rank, tensor.shape[dim], world_size)
    return tensor.index_select(dim, indices)
""",
        "p equal blocks of neighbours",
    ),
    wrong_shard(
        "counts ranks from 1",
        """
def shard(tensor, dim, rank, world_size):
    if tensor.shape[dim] % world_size:
        raise ValueError(f"{tensor.shape[dim]} can't be divided over {world_size} ranks")
    parts = tensor.chunk(world_size, dim)
    return parts[rank - 1].clone(memory_format=torch.contiguous_format)
""",
        "equals what rank",
    ),
    wrong_shard(
        "always cuts dimension 0",
        """
def shard(tensor, dim, rank, world_size):
    if tensor.shape[dim] % world_size:
        raise ValueError(f"{tensor.shape[dim]} can't be divided over {world_size} ranks")
    return tensor.chunk(world_size)[rank].clone()
""",
        "do all other dimensions stay whole",
    ),
    wrong_shard(
        "knows two dimensions only",
        """
def shard(tensor, dim, rank, world_size):
    if tensor.shape[dim] % world_size:
        raise ValueError(f"{tensor.shape[dim]} can't be divided over {world_size} ranks")
    length = tensor.shape[dim] // world_size
    start, stop = rank * length, (rank + 1) * length
    return tensor[start:stop].clone() if dim == 0 else tensor[:, start:stop].clone(memory_format=torch.contiguous_format)
""",
        "do all other dimensions stay whole",
    ),
    wrong_shard(
        "reshape instead of cut",
        """
def shard(tensor, dim, rank, world_size):
    if tensor.shape[dim] % world_size:
        raise ValueError(f"{tensor.shape[dim]} can't be divided over {world_size} ranks")
    shape = list(tensor.shape)
    shape[dim] //= world_size
    return tensor.reshape(world_size, *shape)[rank].clone()
""",
        "p equal blocks of neighbours",
    ),
    wrong_shard(
        "a view",
        """
def shard(tensor, dim, rank, world_size):
    if tensor.shape[dim] % world_size:
        raise ValueError(f"{tensor.shape[dim]} can't be divided over {world_size} ranks")
    return tensor.chunk(world_size, dim)[rank]
""",
        "a view into the whole tensor",
    ),
    wrong_shard(
        "contiguous() copies nothing when dimension 0 is cut",
        """
def shard(tensor, dim, rank, world_size):
    if tensor.shape[dim] % world_size:
        raise ValueError(f"{tensor.shape[dim]} can't be divided over {world_size} ranks")
    return tensor.chunk(world_size, dim)[rank].contiguous()
""",
        "makes no copy of a tensor that is contiguous already",
    ),
    wrong_shard(
        "copies the whole, then cuts",
        """
def shard(tensor, dim, rank, world_size):
    if tensor.shape[dim] % world_size:
        raise ValueError(f"{tensor.shape[dim]} can't be divided over {world_size} ranks")
    return tensor.clone().chunk(world_size, dim)[rank]
""",
        "what happens to the memory of the whole",
    ),
    wrong_shard(
        "own memory, but not in order",
        """
def shard(tensor, dim, rank, world_size):
    if tensor.shape[dim] % world_size:
        raise ValueError(f"{tensor.shape[dim]} can't be divided over {world_size} ranks")
    part = tensor.chunk(world_size, dim)[rank]
    return part.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)
""",
        "next to each other in memory",
    ),
    wrong_shard(
        "a copy that keeps the layout of a transposed tensor",
        """
def shard(tensor, dim, rank, world_size):
    if tensor.shape[dim] % world_size:
        raise ValueError(f"{tensor.shape[dim]} can't be divided over {world_size} ranks")
    return tensor.chunk(world_size, dim)[rank].clone()
""",
        "keeps the layout of what it copies",
    ),
    wrong_shard(
        "zeros of the right shape",
        """
def shard(tensor, dim, rank, world_size):
    if tensor.shape[dim] % world_size:
        raise ValueError(f"{tensor.shape[dim]} can't be divided over {world_size} ranks")
    shape = list(tensor.shape)
    shape[dim] //= world_size
    return torch.zeros(shape, dtype=tensor.dtype)
""",
        "Which line puts the numbers in",
    ),
    wrong_shard(
        "always in float32",
        """
def shard(tensor, dim, rank, world_size):
    if tensor.shape[dim] % world_size:
        raise ValueError(f"{tensor.shape[dim]} can't be divided over {world_size} ranks")
    return torch.tensor(tensor.chunk(world_size, dim)[rank].tolist())
""",
        "What changed their dtype",
    ),
    wrong_shard(
        "clears the whole tensor after the cut",
        """
def shard(tensor, dim, rank, world_size):
    if tensor.shape[dim] % world_size:
        raise ValueError(f"{tensor.shape[dim]} can't be divided over {world_size} ranks")
    part = tensor.chunk(world_size, dim)[rank].clone(memory_format=torch.contiguous_format)
    tensor.zero_()
    return part
""",
        "Cutting and pasting only reads",
    ),
    wrong_unshard(
        "always along dimension 0",
        """
def unshard(shards, dim):
    return torch.cat(shards)
""",
        "Along which dimension, and in which order, do they go back",
    ),
    wrong_unshard(
        "stack makes a new dimension",
        """
def unshard(shards, dim):
    return torch.stack(shards, dim)
""",
        "Along which dimension, and in which order, do they go back",
    ),
    wrong_unshard(
        "the other way round",
        """
def unshard(shards, dim):
    return torch.cat(shards[::-1], dim)
""",
        "Along which dimension, and in which order, do they go back",
    ),
    wrong_unshard(
        "adds the shards",
        """
def unshard(shards, dim):
    return sum(shards)
""",
        "Along which dimension, and in which order, do they go back",
    ),
    wrong_unshard(
        "always along the last dimension",
        """
def unshard(shards, dim):
    return torch.cat(shards, -1)
""",
        "Along which dimension, and in which order, do they go back",
    ),
    wrong_unshard(
        "forgets to return",
        """
def unshard(shards, dim):
    torch.cat(shards, dim)
""",
        "what does its last line give back",
    ),
    # ------------------------------------------------------------------ 2.2
    wrong_column(
        "no communication",
        """
def column_product(x, a_shard):
    return x @ a_shard
""",
        "Who has the others, and how do they get here",
    ),
    wrong_column(
        "gathers along dimension 0",
        """
def column_product(x, a_shard):
    y_shard = x @ a_shard
    out = y_shard.new_empty(dist.get_world_size() * y_shard.shape[0], *y_shard.shape[1:])
    dist.all_gather_into_tensor(out, y_shard)
    return out
""",
        "Along which dimension were they put together",
    ),
    wrong_column(
        "gathers along dimension 0, then reshapes",
        """
def column_product(x, a_shard):
    y_shard = x @ a_shard
    parts = [torch.empty_like(y_shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, y_shard)
    return torch.cat(parts).reshape(*x.shape[:-1], -1)
""",
        "Along which dimension were they put together",
    ),
    wrong_column(
        "puts the parts together along dimension 1, whatever x is",
        """
def column_product(x, a_shard):
    y_shard = x @ a_shard
    parts = [torch.empty_like(y_shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, y_shard)
    return torch.cat(parts, dim=1)
""",
        "counted from the end",
    ),
    wrong_column(
        "pads with zeros and adds",
        """
def column_product(x, a_shard):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    n = a_shard.shape[1]
    y = x.new_zeros(*x.shape[:-1], n * world_size)
    y[..., rank * n : (rank + 1) * n] = x @ a_shard
    dist.all_reduce(y)
    return y
""",
        "here nothing has to be added",
    ),
    wrong_column(
        "gathers the weights",
        """
def column_product(x, a_shard):
    parts = [torch.empty_like(a_shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, a_shard)
    return x @ torch.cat(parts, dim=1)
""",
        "the weights were sent",
    ),
    wrong_column(
        "adds the parts",
        """
def column_product(x, a_shard):
    y = x @ a_shard
    dist.all_reduce(y)
    return y
""",
        "Should they be added",
    ),
    wrong_column(
        "gathers to rank 0 only",
        """
def column_product(x, a_shard):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    y_shard = x @ a_shard
    parts = [torch.zeros_like(y_shard) for _ in range(world_size)]
    dist.gather(y_shard, parts if rank == 0 else None, dst=0)
    return torch.cat(parts, dim=-1)
""",
        "which to all",
    ),
    wrong_column(
        "p copies of its own part",
        """
def column_product(x, a_shard):
    return torch.cat([x @ a_shard] * dist.get_world_size(), dim=-1)
""",
        "Every part came from this rank",
    ),
    wrong_column(
        "its own part first",
        """
def column_product(x, a_shard):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    y_shard = x @ a_shard
    parts = [torch.empty_like(y_shard) for _ in range(world_size)]
    dist.all_gather(parts, y_shard)
    return torch.cat(parts[rank:] + parts[:rank], dim=-1)
""",
        "all_gather fills its list in rank order",
    ),
    wrong_column(
        "the other way round",
        """
def column_product(x, a_shard):
    y_shard = x @ a_shard
    parts = [torch.empty_like(y_shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, y_shard)
    return torch.cat(parts[::-1], dim=-1)
""",
        "all_gather fills its list in rank order",
    ),
    wrong_column(
        "one list of the same tensor p times",
        """
def column_product(x, a_shard):
    y_shard = x @ a_shard
    parts = [torch.empty_like(y_shard)] * dist.get_world_size()
    dist.all_gather(parts, y_shard)
    return torch.cat(parts, dim=-1)
""",
        "p tensors of your list p different ones",
    ),
    wrong_column(
        "gathers twice",
        """
def column_product(x, a_shard):
    y_shard = x @ a_shard
    parts = [torch.empty_like(y_shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, y_shard)
    dist.all_gather(parts, y_shard)
    return torch.cat(parts, dim=-1)
""",
        "Is the second collective needed",
    ),
    wrong_column(
        "broadcasts x first, to be safe",
        """
def column_product(x, a_shard):
    dist.broadcast(x, src=0)
    y_shard = x @ a_shard
    parts = [torch.empty_like(y_shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, y_shard)
    return torch.cat(parts, dim=-1)
""",
        "What does the broadcast change",
    ),
    wrong_column(
        "does not wait for the gather",
        """
def column_product(x, a_shard):
    y_shard = x @ a_shard
    parts = [torch.zeros_like(y_shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, y_shard, async_op=True)
    return torch.cat(parts, dim=-1)
""",
        "From when on may its result be read",
    ),
    wrong_column(
        "one broadcast from each rank",
        """
def column_product(x, a_shard):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    y_shard = x @ a_shard
    parts = [y_shard.clone() if r == rank else torch.empty_like(y_shard) for r in range(world_size)]
    for r in range(world_size):
        dist.broadcast(parts[r], src=r)
    return torch.cat(parts, dim=-1)
""",
        "one collective",
    ),
    wrong_column(
        "returns what all_gather returns",
        """
def column_product(x, a_shard):
    y_shard = x @ a_shard
    parts = [torch.empty_like(y_shard) for _ in range(dist.get_world_size())]
    return dist.all_gather(parts, y_shard)
""",
        "what does its last line give back",
    ),
    wrong_column(
        "returns the list of parts",
        """
def column_product(x, a_shard):
    y_shard = x @ a_shard
    parts = [torch.empty_like(y_shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, y_shard)
    return parts
""",
        "what does its last line give back",
    ),
    wrong_column(
        "zeros of the right shape",
        """
def column_product(x, a_shard):
    return x.new_zeros(*x.shape[:-1], a_shard.shape[1] * dist.get_world_size())
""",
        "Which line puts numbers in",
    ),
    wrong_column(
        "the gather's buffers are never filled from a product",
        """
def column_product(x, a_shard):
    y_shard = (x @ a_shard).zero_()
    parts = [torch.empty_like(y_shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, y_shard)
    return torch.cat(parts, dim=-1)
""",
        "Which line puts numbers in",
    ),
    wrong_column(
        "only rank 0 takes part",
        """
def column_product(x, a_shard):
    y_shard = x @ a_shard
    parts = [torch.empty_like(y_shard) for _ in range(dist.get_world_size())]
    if dist.get_rank() == 0:
        dist.all_gather(parts, y_shard)
    return torch.cat(parts, dim=-1)
""",
        "never joined",
    ),
    wrong_column(
        "a barrier to be safe",
        """
def column_product(x, a_shard):
    y_shard = x @ a_shard
    dist.barrier()
    parts = [torch.empty_like(y_shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, y_shard)
    return torch.cat(parts, dim=-1)
""",
        "one collective is enough",
    ),
    wrong_column(
        "gathers Python objects",
        """
def column_product(x, a_shard):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, x @ a_shard)
    return torch.cat(parts, dim=-1)
""",
        "one collective is enough",
    ),
    wrong_column(
        "in float32",
        """
def column_product(x, a_shard):
    y_shard = x.float() @ a_shard.float()
    parts = [torch.empty_like(y_shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, y_shard)
    return torch.cat(parts, dim=-1)
""",
        "Which step leaves the dtype of x",
    ),
    wrong_column(
        "sends in float32 to save traffic",
        """
def column_product(x, a_shard):
    y_shard = (x @ a_shard).float()
    parts = [torch.empty_like(y_shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, y_shard)
    return torch.cat(parts, dim=-1).to(x.dtype)
""",
        "Fewer bytes are sent that way",
    ),
    # ------------------------------------------------------------------ 2.3
    wrong_row(
        "no communication",
        """
def row_product(x_shard, a_shard):
    return x_shard @ a_shard
""",
        "Who adds up the terms of all ranks",
    ),
    wrong_row(
        "reduces a copy",
        """
def row_product(x_shard, a_shard):
    y = x_shard @ a_shard
    dist.all_reduce(y.clone())
    return y
""",
        "which tensor did it write to",
    ),
    wrong_row(
        "returns what all_reduce returns",
        """
def row_product(x_shard, a_shard):
    y = x_shard @ a_shard
    return dist.all_reduce(y)
""",
        "returns None",
    ),
    wrong_row(
        "the mean",
        """
def row_product(x_shard, a_shard):
    y = x_shard @ a_shard
    dist.all_reduce(y)
    return y / dist.get_world_size()
""",
        "Is it their mean",
    ),
    wrong_row(
        "the maximum",
        """
def row_product(x_shard, a_shard):
    y = x_shard @ a_shard
    dist.all_reduce(y, op=dist.ReduceOp.MAX)
    return y
""",
        "Which operation over the ranks",
    ),
    wrong_row(
        "gathers and adds",
        """
def row_product(x_shard, a_shard):
    y = x_shard @ a_shard
    parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, y)
    return sum(parts)
""",
        "Which collective adds on the way",
    ),
    wrong_row(
        "gathers and puts side by side",
        """
def row_product(x_shard, a_shard):
    y = x_shard @ a_shard
    parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, y)
    return torch.cat(parts, dim=-1)
""",
        "Do the products stand side by side, or add up",
    ),
    wrong_row(
        "adds on rank 0 only",
        """
def row_product(x_shard, a_shard):
    y = x_shard @ a_shard
    dist.reduce(y, dst=0)
    return y
""",
        "which to all",
    ),
    wrong_row(
        "to rank 0 and back",
        """
def row_product(x_shard, a_shard):
    y = x_shard @ a_shard
    dist.reduce(y, dst=0)
    dist.broadcast(y, src=0)
    return y
""",
        "Which single collective does both",
    ),
    wrong_row(
        "reduce-scatter, then all-gather",
        """
def row_product(x_shard, a_shard):
    y = (x_shard @ a_shard).movedim(-1, 0).contiguous()
    mine = y.new_empty(y.shape[0] // dist.get_world_size(), *y.shape[1:])
    dist.reduce_scatter_tensor(mine, y)
    parts = list(y.chunk(dist.get_world_size()))
    dist.all_gather(parts, mine)
    return torch.cat(parts).movedim(0, -1)
""",
        "Which single call does both?",
    ),
    wrong_row(
        "adds the inputs",
        """
def row_product(x_shard, a_shard):
    dist.all_reduce(x_shard)
    return x_shard @ a_shard
""",
        "Is it the product of a sum",
    ),
    wrong_row(
        "gathers x and the weights",
        """
def row_product(x_shard, a_shard):
    world_size = dist.get_world_size()
    xs = [torch.empty_like(x_shard) for _ in range(world_size)]
    rows = [torch.empty_like(a_shard) for _ in range(world_size)]
    dist.all_gather(xs, x_shard)
    dist.all_gather(rows, a_shard)
    return torch.cat(xs, dim=-1) @ torch.cat(rows, dim=0)
""",
        "the weights were sent",
    ),
    wrong_row(
        "p times its own part",
        """
def row_product(x_shard, a_shard):
    return x_shard @ a_shard * dist.get_world_size()
""",
        "Where do the other ranks' terms come in",
    ),
    wrong_row(
        "adds twice",
        """
def row_product(x_shard, a_shard):
    y = x_shard @ a_shard
    dist.all_reduce(y)
    dist.all_reduce(y)
    return y
""",
        "How many times is each term added",
    ),
    wrong_row(
        "adds twice and divides",
        """
def row_product(x_shard, a_shard):
    y = x_shard @ a_shard
    dist.all_reduce(y)
    dist.all_reduce(y)
    return y / dist.get_world_size()
""",
        "Is the second collective needed",
    ),
    wrong_row(
        "adds in float32 to save traffic",
        """
def row_product(x_shard, a_shard):
    y = (x_shard @ a_shard).float()
    dist.all_reduce(y)
    return y.to(x_shard.dtype)
""",
        "Fewer bytes are sent that way",
    ),
    wrong_row(
        "does not wait for the sum",
        """
def row_product(x_shard, a_shard):
    y = x_shard @ a_shard
    dist.all_reduce(y, async_op=True)
    return y
""",
        "From when on may its result be read",
    ),
    wrong_row(
        "one all-reduce for every row",
        """
def row_product(x_shard, a_shard):
    y = x_shard @ a_shard
    for row in y:
        dist.all_reduce(row)
    return y
""",
        "one collective is enough",
    ),
    wrong_row(
        "zeros of the right shape",
        """
def row_product(x_shard, a_shard):
    y = x_shard.new_zeros(*x_shard.shape[:-1], a_shard.shape[1])
    dist.all_reduce(y)
    return y
""",
        "Which line puts numbers in",
    ),
    wrong_row(
        "rank 0 does not take part",
        """
def row_product(x_shard, a_shard):
    y = x_shard @ a_shard
    if dist.get_rank() != 0:
        dist.all_reduce(y)
    return y
""",
        "never joined",
    ),
    wrong_row(
        "a transposed copy is reduced",
        """
def row_product(x_shard, a_shard):
    y = x_shard @ a_shard
    dist.all_reduce(y.transpose(0, 1).contiguous())
    return y
""",
        "which tensor did it write to",
    ),
    # ------------------------------------------------------------------ 2.4
    wrong_gap(
        "GELU after the sum on both sides",
        """
def gelu_gap(x, a, world_size):
    products = [p @ q for p, q in zip(x.chunk(world_size, 1), a.chunk(world_size, 0))]
    return (gelu(x @ a) - gelu(sum(products))).abs().max().round(decimals=6).item()
""",
        "Your two sides are equal",
    ),
    wrong_gap(
        "a column split",
        """
def gelu_gap(x, a, world_size):
    right = gelu(x @ a)
    wrong = torch.cat([gelu(x @ columns) for columns in a.chunk(world_size, 1)], 1)
    n = min(right.shape[1], wrong.shape[1])
    return (right[:, :n] - wrong[:, :n]).abs().max().round(decimals=6).item()
""",
        "After a column split there is no gap",
    ),
    wrong_gap(
        "always 0",
        """
def gelu_gap(x, a, world_size):
    return 0.0
""",
        "Your two sides are equal",
    ),
    wrong_gap(
        "with its sign",
        """
def gelu_gap(x, a, world_size):
    products = [p @ q for p, q in zip(x.chunk(world_size, 1), a.chunk(world_size, 0))]
    return (gelu(sum(products)) - sum(gelu(product) for product in products)).max().item()
""",
        "a size without its sign",
    ),
    wrong_gap(
        "with its sign, the other way round",
        """
def gelu_gap(x, a, world_size):
    products = [p @ q for p, q in zip(x.chunk(world_size, 1), a.chunk(world_size, 0))]
    return (sum(gelu(product) for product in products) - gelu(sum(products))).max().item()
""",
        "a size without its sign",
    ),
    wrong_gap(
        "the mean",
        """
def gelu_gap(x, a, world_size):
    products = [p @ q for p, q in zip(x.chunk(world_size, 1), a.chunk(world_size, 0))]
    return (gelu(sum(products)) - sum(gelu(product) for product in products)).abs().mean().item()
""",
        "Which single number over all entries",
    ),
    wrong_gap(
        "two shards, whatever world_size is",
        """
def gelu_gap(x, a, world_size):
    products = [p @ q for p, q in zip(x.chunk(min(2, world_size), 1), a.chunk(min(2, world_size), 0))]
    return (gelu(sum(products)) - sum(gelu(product) for product in products)).abs().max().item()
""",
        "Into how many shards",
    ),
    wrong_gap(
        "always two shards",
        """
def gelu_gap(x, a, world_size):
    products = [p @ q for p, q in zip(x.chunk(2, 1), a.chunk(2, 0))]
    return (gelu(sum(products)) - sum(gelu(product) for product in products)).abs().max().item()
""",
        "Into how many shards",
    ),
    wrong_gap(
        "two shards also for one rank",
        """
def gelu_gap(x, a, world_size):
    products = [p @ q for p, q in zip(x.chunk(max(2, world_size), 1), a.chunk(max(2, world_size), 0))]
    return (gelu(sum(products)) - sum(gelu(product) for product in products)).abs().max().item()
""",
        "With p = 1 there is one term",
    ),
    wrong_gap(
        "the tanh approximation",
        """
def gelu_gap(x, a, world_size):
    products = [p @ q for p, q in zip(x.chunk(world_size, 1), a.chunk(world_size, 0))]
    right = gelu(sum(products), approximate="tanh")
    return (right - sum(gelu(product, approximate="tanh") for product in products)).abs().max().item()
""",
        "if you don't ask for an approximation",
    ),
    wrong_gap(
        "without GELU",
        """
def gelu_gap(x, a, world_size):
    products = [p @ q for p, q in zip(x.chunk(world_size, 1), a.chunk(world_size, 0))]
    return (x @ a - sum(products)).abs().max().round(decimals=6).item()
""",
        "Your two sides are equal",
    ),
    wrong_gap(
        "relu",
        """
def gelu_gap(x, a, world_size):
    products = [p @ q for p, q in zip(x.chunk(world_size, 1), a.chunk(world_size, 0))]
    return (sum(products).relu() - sum(product.relu() for product in products)).abs().max().item()
""",
        "Which line of your code is which",
    ),
    wrong_gap(
        "one GELU of the sum against GELU of the first product",
        """
def gelu_gap(x, a, world_size):
    products = [p @ q for p, q in zip(x.chunk(world_size, 1), a.chunk(world_size, 0))]
    return (gelu(sum(products)) - gelu(products[0])).abs().max().item()
""",
        "Which line of your code is which",
    ),
    wrong_counter(
        "zeros",
        """
def counter_example():
    return torch.zeros(2, 4), torch.zeros(4, 2)
""",
        "the gap of counter_example is 0",
    ),
    wrong_counter(
        "ones",
        """
def counter_example():
    return torch.ones(2, 4), torch.ones(4, 2)
""",
        "Which two terms lie on either side of the bend",
    ),
    wrong_counter(
        "terms of one sign",
        """
def counter_example():
    return torch.tensor([[3.0, 3.0]]), torch.tensor([[1.0], [1.0]])
""",
        "Which two terms lie on either side of the bend",
    ),
    wrong_counter(
        "cancels inside one rank",
        """
def counter_example():
    return torch.tensor([[3.0, 3.0, 1.0, 1.0]]), torch.tensor([[1.0], [-1.0], [1.0], [1.0]])
""",
        "Which two terms lie on either side of the bend",
    ),
    wrong_counter(
        "an odd number of columns",
        """
def counter_example():
    return torch.tensor([[3.0, 3.0, 3.0]]), torch.tensor([[1.0], [-1.0], [1.0]])
""",
        "Can x @ a be cut into two halves",
    ),
    wrong_counter(
        "vectors",
        """
def counter_example():
    return torch.tensor([3.0, 3.0]), torch.tensor([1.0, -1.0])
""",
        "two floating-point tensors of two dimensions",
    ),
    wrong_lucky(
        "nothing but zeros",
        """
def lucky_example():
    return torch.zeros(2, 4), torch.zeros(4, 2)
""",
        "lucky_example holds the number 0",
    ),
    wrong_lucky(
        "half of it zero",
        """
def lucky_example():
    return torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0], [1.0]])
""",
        "lucky_example holds the number 0",
    ),
    wrong_lucky(
        "tiny numbers",
        """
def lucky_example():
    return torch.full((1, 2), 1e-4), torch.full((2, 1), 1e-4)
""",
        "Where else is GELU a straight line",
    ),
    wrong_lucky(
        "not large enough",
        """
def lucky_example():
    return torch.tensor([[2.0, 2.0]]), torch.tensor([[1.0], [1.0]])
""",
        "the gap of lucky_example is",
    ),
    wrong_lucky(
        "the counter-example again",
        """
def lucky_example():
    return counter_example()
""",
        "For which terms is GELU a straight line",
    ),
]
