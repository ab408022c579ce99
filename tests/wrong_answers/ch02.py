"""Wrong answers to the exercises of chapter 02, and what each must be told."""

from tests.wrong_answers import WrongAnswer, indented, swap, swap_all

REFUSE = """
if tensor.shape[dim] % world_size:
    raise ValueError(f"{tensor.shape[dim]} can't be divided over {world_size} ranks")
"""
NARROW = """
length = tensor.shape[dim] // world_size
return tensor.narrow(dim, rank * length, length).clone(memory_format=torch.contiguous_format)
"""
CHUNK = "return tensor.chunk(world_size, dim)[rank]"
OWN = ".clone(memory_format=torch.contiguous_format)"


def cut(shard: str = REFUSE + NARROW, unshard: str = "return torch.cat(shards, dim)") -> str:
    return f"""
def shard(tensor, dim, rank, world_size):
{indented(shard)}


def unshard(shards, dim):
{indented(unshard)}
"""


CUT = [
    ("the remainder is dropped", cut(NARROW), "should raise ValueError"),
    ("torch.chunk takes uneven sizes", cut("return torch.chunk(tensor, world_size, dim)[rank]" + OWN), "should raise ValueError"),
    ("torch.tensor_split takes uneven sizes", cut("return torch.tensor_split(tensor, world_size, dim)[rank]" + OWN), "should raise ValueError"),
    ("only the last rank refuses", cut("""
        length = -(-tensor.shape[dim] // world_size)
        if (rank + 1) * length > tensor.shape[dim]:
            raise ValueError(f"{tensor.shape[dim]} can't be divided over {world_size} ranks")
        return tensor.narrow(dim, rank * length, length).clone(memory_format=torch.contiguous_format)
        """), "rank=0, world_size="),
    ("pads with zeros", cut("""
        extra = -tensor.shape[dim] % world_size
        padding = list(tensor.shape)
        padding[dim] = extra
        padded = torch.cat([tensor, tensor.new_zeros(padding)], dim)
        return padded.chunk(world_size, dim)[rank].clone(memory_format=torch.contiguous_format)
        """), "what does your code do when size % world_size is not 0"),
    ("looks at the number of elements, not at the dimension", cut(swap_all(REFUSE, ("tensor.shape[dim] %", "tensor.numel() %"), ("{tensor.shape[dim]}", "{tensor.numel()} elements")) + NARROW), "should raise ValueError"),
    ("looks at dimension 0 only", cut(swap(REFUSE, "shape[dim]", "shape[0]") + NARROW), "shard(a tensor of shape [3, 8], dim=1, rank=0, world_size=2) raised ValueError"),
    ("assert instead of ValueError", cut('assert tensor.shape[dim] % world_size == 0, f"{tensor.shape[dim]} over {world_size}"\n' + CHUNK + OWN), "AssertionError"),
    ("an error that says nothing", cut('if tensor.shape[dim] % world_size:\n    raise ValueError("uneven")\n' + CHUNK + OWN), "its message does not name"),
    ("refuses everything", cut('raise ValueError(f"{tensor.shape[dim]} can\'t be divided over {world_size} ranks")'), "can be divided by the number of ranks in this call"),
    ("every p-th slice", cut(REFUSE + "indices = torch.arange(rank, tensor.shape[dim], world_size)\nreturn tensor.index_select(dim, indices)"), "p equal blocks of neighbours"),
    ("counts ranks from 1", cut(REFUSE + "parts = tensor.chunk(world_size, dim)\nreturn parts[rank - 1]" + OWN), "equals what rank"),
    ("always cuts dimension 0", cut(REFUSE + "return tensor.chunk(world_size)[rank].clone()"), "do all other dimensions stay whole"),
    ("knows two dimensions only", cut(REFUSE + "length = tensor.shape[dim] // world_size\nstart, stop = rank * length, (rank + 1) * length\nreturn tensor[start:stop].clone() if dim == 0 else tensor[:, start:stop]" + OWN), "do all other dimensions stay whole"),
    ("reshape instead of cut", cut(REFUSE + "shape = list(tensor.shape)\nshape[dim] //= world_size\nreturn tensor.reshape(world_size, *shape)[rank].clone()"), "p equal blocks of neighbours"),
    ("a view", cut(REFUSE + CHUNK), "a view into the whole tensor"),
    ("contiguous() copies nothing when dimension 0 is cut", cut(REFUSE + CHUNK + ".contiguous()"), "makes no copy of a tensor that is contiguous already"),
    ("copies the whole, then cuts", cut(REFUSE + swap(CHUNK, "tensor.", "tensor.clone().")), "what happens to the memory of the whole"),
    ("own memory, but not in order", cut(REFUSE + "part = tensor.chunk(world_size, dim)[rank]\nreturn part.transpose(0, -1)" + OWN + ".transpose(0, -1)"), "next to each other in memory"),
    ("a copy that keeps the layout of a transposed tensor", cut(REFUSE + CHUNK + ".clone()"), "keeps the layout of what it copies"),
    ("zeros of the right shape", cut(REFUSE + "shape = list(tensor.shape)\nshape[dim] //= world_size\nreturn torch.zeros(shape, dtype=tensor.dtype)"), "Which line puts the numbers in"),
    ("always in float32", cut(REFUSE + "return torch.tensor(tensor.chunk(world_size, dim)[rank].tolist())"), "What changed their dtype"),
    ("clears the whole tensor after the cut", cut(REFUSE + swap(CHUNK, "return", "part =") + OWN + "\ntensor.zero_()\nreturn part"), "Cutting and pasting only reads"),
    ("always along dimension 0", cut(unshard="return torch.cat(shards)"), "Along which dimension, and in which order, do they go back"),
    ("stack makes a new dimension", cut(unshard="return torch.stack(shards, dim)"), "Along which dimension, and in which order, do they go back"),
    ("the other way round", cut(unshard="return torch.cat(shards[::-1], dim)"), "Along which dimension, and in which order, do they go back"),
    ("adds the shards", cut(unshard="return sum(shards)"), "Along which dimension, and in which order, do they go back"),
    ("always along the last dimension", cut(unshard="return torch.cat(shards, -1)"), "Along which dimension, and in which order, do they go back"),
    ("forgets to return", cut(unshard="torch.cat(shards, dim)"), "what does its last line give back"),
]  # fmt: skip


def column(body: str) -> str:
    return f"def column_product(x, a_shard):\n{indented(body)}\n"


GATHER = """
y_shard = x @ a_shard
parts = [torch.empty_like(y_shard) for _ in range(dist.get_world_size())]
dist.all_gather(parts, y_shard)
return torch.cat(parts, dim=-1)
"""

COLUMN = [
    ("no communication", column("return x @ a_shard"), "Who has the others, and how do they get here"),
    ("gathers along dimension 0", column("""
        y_shard = x @ a_shard
        out = y_shard.new_empty(dist.get_world_size() * y_shard.shape[0], *y_shard.shape[1:])
        dist.all_gather_into_tensor(out, y_shard)
        return out
        """), "Along which dimension were they put together"),
    ("gathers along dimension 0, then reshapes", column(swap(GATHER, "torch.cat(parts, dim=-1)", "torch.cat(parts).reshape(*x.shape[:-1], -1)")), "Along which dimension were they put together"),
    ("puts the parts together along dimension 1, whatever x is", column(swap(GATHER, "dim=-1", "dim=1")), "counted from the end"),
    ("pads with zeros and adds", column("""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        n = a_shard.shape[1]
        y = x.new_zeros(*x.shape[:-1], n * world_size)
        y[..., rank * n : (rank + 1) * n] = x @ a_shard
        dist.all_reduce(y)
        return y
        """), "here nothing has to be added"),
    ("gathers the weights", column("""
        parts = [torch.empty_like(a_shard) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, a_shard)
        return x @ torch.cat(parts, dim=1)
        """), "the weights were sent"),
    ("adds the parts", column("y = x @ a_shard\ndist.all_reduce(y)\nreturn y"), "Should they be added"),
    ("gathers to rank 0 only", column("""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        y_shard = x @ a_shard
        parts = [torch.zeros_like(y_shard) for _ in range(world_size)]
        dist.gather(y_shard, parts if rank == 0 else None, dst=0)
        return torch.cat(parts, dim=-1)
        """), "which to all"),
    ("p copies of its own part", column("return torch.cat([x @ a_shard] * dist.get_world_size(), dim=-1)"), "Every part came from this rank"),
    ("its own part first", column("""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        y_shard = x @ a_shard
        parts = [torch.empty_like(y_shard) for _ in range(world_size)]
        dist.all_gather(parts, y_shard)
        return torch.cat(parts[rank:] + parts[:rank], dim=-1)
        """), "all_gather fills its list in rank order"),
    ("the other way round", column(swap(GATHER, "cat(parts", "cat(parts[::-1]")), "all_gather fills its list in rank order"),
    ("one list of the same tensor p times", column(swap(GATHER, " for _ in range(dist.get_world_size())]", "] * dist.get_world_size()")), "p tensors of your list p different ones"),
    ("gathers twice", column(swap(GATHER, "dist.all_gather(parts, y_shard)\n", "dist.all_gather(parts, y_shard)\n" * 2)), "Is the second collective needed"),
    ("broadcasts x first, to be safe", column("dist.broadcast(x, src=0)" + GATHER), "What does the broadcast change"),
    ("does not wait for the gather", column(swap_all(GATHER, ("empty_like", "zeros_like"), ("(parts, y_shard)", "(parts, y_shard, async_op=True)"))), "From when on may its result be read"),
    ("one broadcast from each rank", column("""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        y_shard = x @ a_shard
        parts = [y_shard.clone() if r == rank else torch.empty_like(y_shard) for r in range(world_size)]
        for r in range(world_size):
            dist.broadcast(parts[r], src=r)
        return torch.cat(parts, dim=-1)
        """), "one collective"),
    ("returns what all_gather returns", column(swap_all(GATHER, ("return torch.cat(parts, dim=-1)", ""), ("dist.all_gather", "return dist.all_gather"))), "what does its last line give back"),
    ("returns the list of parts", column(swap(GATHER, "torch.cat(parts, dim=-1)", "parts")), "what does its last line give back"),
    ("zeros of the right shape", column("return x.new_zeros(*x.shape[:-1], a_shard.shape[1] * dist.get_world_size())"), "Which line puts numbers in"),
    ("the gather's buffers are never filled from a product", column(swap(GATHER, "x @ a_shard", "(x @ a_shard).zero_()")), "Which line puts numbers in"),
    ("only rank 0 takes part", column(swap(GATHER, "dist.all_gather", "if dist.get_rank() == 0:\n    dist.all_gather")), "never joined"),
    ("a barrier to be safe", column(swap(GATHER, "parts = [", "dist.barrier()\nparts = [")), "Which of your lines calls the barrier"),
    ("gathers Python objects", column("""
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, x @ a_shard)
        return torch.cat(parts, dim=-1)
        """), "one collective is enough"),
    ("in float32", column(swap(GATHER, "x @ a_shard", "x.float() @ a_shard.float()")), "Which step leaves the dtype of x"),
    ("sends in float32 to save traffic", column(swap_all(GATHER, ("x @ a_shard", "(x @ a_shard).float()"), ("dim=-1)", "dim=-1).to(x.dtype)"))), "Fewer bytes are sent that way"),
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
    ("no communication", row("return x_shard @ a_shard"), "Who adds up the terms of all ranks"),
    ("reduces a copy", row(swap(REDUCE, "all_reduce(y)", "all_reduce(y.clone())")), "which tensor did it write to"),
    ("returns what all_reduce returns", row("y = x_shard @ a_shard\nreturn dist.all_reduce(y)"), "returns None"),
    ("the mean", row(swap(REDUCE, "return y", "return y / dist.get_world_size()")), "Is it their mean"),
    ("the maximum", row(swap(REDUCE, "all_reduce(y)", "all_reduce(y, op=dist.ReduceOp.MAX)")), "Which operation over the ranks"),
    ("gathers and adds", row(GATHER_TERMS + "return sum(parts)"), "Which collective adds on the way"),
    ("gathers and puts side by side", row(GATHER_TERMS + "return torch.cat(parts, dim=-1)"), "Do the products stand side by side, or add up"),
    ("adds on rank 0 only", row(swap(REDUCE, "all_reduce(y)", "reduce(y, dst=0)")), "which to all"),
    ("to rank 0 and back", row(swap(REDUCE, "all_reduce(y)", "reduce(y, dst=0)\ndist.broadcast(y, src=0)")), "Which single collective does both"),
    ("reduce-scatter, then all-gather", row("""
        y = (x_shard @ a_shard).movedim(-1, 0).contiguous()
        mine = y.new_empty(y.shape[0] // dist.get_world_size(), *y.shape[1:])
        dist.reduce_scatter_tensor(mine, y)
        parts = list(y.chunk(dist.get_world_size()))
        dist.all_gather(parts, mine)
        return torch.cat(parts).movedim(0, -1)
        """), "Which single call does both?"),
    ("adds the inputs", row("dist.all_reduce(x_shard)\nreturn x_shard @ a_shard"), "Is it the product of a sum"),
    ("gathers x and the weights", row("""
        world_size = dist.get_world_size()
        xs = [torch.empty_like(x_shard) for _ in range(world_size)]
        rows = [torch.empty_like(a_shard) for _ in range(world_size)]
        dist.all_gather(xs, x_shard)
        dist.all_gather(rows, a_shard)
        return torch.cat(xs, dim=-1) @ torch.cat(rows, dim=0)
        """), "the weights were sent"),
    ("p times its own part", row("return x_shard @ a_shard * dist.get_world_size()"), "Where do the other ranks' terms come in"),
    ("adds twice", row(swap(REDUCE, "dist.all_reduce(y)\n", "dist.all_reduce(y)\n" * 2)), "How many times is each term added"),
    ("adds twice and divides", row(swap_all(REDUCE, ("dist.all_reduce(y)\n", "dist.all_reduce(y)\n" * 2), ("return y", "return y / dist.get_world_size()"))), "Is the second collective needed"),
    ("adds in float32 to save traffic", row(swap_all(REDUCE, ("x_shard @ a_shard", "(x_shard @ a_shard).float()"), ("return y", "return y.to(x_shard.dtype)"))), "Fewer bytes are sent that way"),
    ("does not wait for the sum", row(swap(REDUCE, "all_reduce(y)", "all_reduce(y, async_op=True)")), "From when on may its result be read"),
    ("one all-reduce for every row", row(swap(REDUCE, "dist.all_reduce(y)", "for row in y:\n    dist.all_reduce(row)")), "one collective is enough"),
    ("zeros of the right shape", row(swap(REDUCE, "x_shard @ a_shard", "x_shard.new_zeros(*x_shard.shape[:-1], a_shard.shape[1])")), "Which line puts numbers in"),
    ("rank 0 does not take part", row(swap(REDUCE, "dist.all_reduce(y)", "if dist.get_rank() != 0:\n    dist.all_reduce(y)")), "never joined"),
    ("a transposed copy is reduced", row(swap(REDUCE, "all_reduce(y)", "all_reduce(y.transpose(0, 1).contiguous())")), "which tensor did it write to"),
]  # fmt: skip


PRODUCTS = "products = [p @ q for p, q in zip(x.chunk(world_size, 1), a.chunk(world_size, 0))]\n"
GAP = PRODUCTS + "return (gelu(sum(products)) - sum(gelu(product) for product in products)).abs().max().item()"
COUNTER = "return torch.tensor([[3.0, 3.0]]), torch.tensor([[1.0], [-1.0]])"
LUCKY = "return torch.tensor([[9.0, 9.0]]), torch.tensor([[1.0], [1.0]])"


def gap(body: str = GAP, counter: str = COUNTER, lucky: str = LUCKY) -> str:
    return f"""
def gelu_gap(x, a, world_size):
{indented(body)}


def counter_example():
{indented(counter)}


def lucky_example():
{indented(lucky)}
"""


GELU = [
    ("GELU after the sum on both sides", gap(PRODUCTS + "return (gelu(x @ a) - gelu(sum(products))).abs().max().round(decimals=6).item()"), "Your two sides are equal"),
    ("a column split", gap("""
        right = gelu(x @ a)
        wrong = torch.cat([gelu(x @ columns) for columns in a.chunk(world_size, 1)], 1)
        n = min(right.shape[1], wrong.shape[1])
        return (right[:, :n] - wrong[:, :n]).abs().max().round(decimals=6).item()
        """), "After a column split there is no gap"),
    ("always 0", gap("return 0.0"), "Your two sides are equal"),
    ("with its sign", gap(swap(GAP, ".abs()", "")), "a size without its sign"),
    ("with its sign, the other way round", gap(PRODUCTS + "return (sum(gelu(product) for product in products) - gelu(sum(products))).max().item()"), "a size without its sign"),
    ("the mean", gap(swap(GAP, "max()", "mean()")), "Which single number over all entries"),
    ("two shards, whatever world_size is", gap(swap(GAP, "chunk(world_size", "chunk(min(2, world_size)")), "Into how many shards"),
    ("always two shards", gap(swap(GAP, "world_size", "2")), "Into how many shards"),
    ("two shards also for one rank", gap(swap(GAP, "chunk(world_size", "chunk(max(2, world_size)")), "With p = 1 there is one term"),
    ("the tanh approximation", gap(PRODUCTS + 'right = gelu(sum(products), approximate="tanh")\nreturn (right - sum(gelu(product, approximate="tanh") for product in products)).abs().max().item()'), "if you don't ask for an approximation"),
    ("without GELU", gap(PRODUCTS + "return (x @ a - sum(products)).abs().max().round(decimals=6).item()"), "Your two sides are equal"),
    ("relu", gap(swap_all(GAP, ("gelu(sum(products))", "sum(products).relu()"), ("gelu(product)", "product.relu()"))), "Which line of your code is which"),
    ("one GELU of the sum against GELU of the first product", gap(swap(GAP, "sum(gelu(product) for product in products)", "gelu(products[0])")), "Which line of your code is which"),
    ("zeros", gap(counter="return torch.zeros(2, 4), torch.zeros(4, 2)"), "the gap of counter_example is 0"),
    ("ones", gap(counter="return torch.ones(2, 4), torch.ones(4, 2)"), "Which two terms lie on either side of the bend"),
    ("terms of one sign", gap(counter=swap(COUNTER, "-1.0", "1.0")), "Which two terms lie on either side of the bend"),
    ("cancels inside one rank", gap(counter="return torch.tensor([[3.0, 3.0, 1.0, 1.0]]), torch.tensor([[1.0], [-1.0], [1.0], [1.0]])"), "Which two terms lie on either side of the bend"),
    ("an odd number of columns", gap(counter="return torch.tensor([[3.0, 3.0, 3.0]]), torch.tensor([[1.0], [-1.0], [1.0]])"), "Can x @ a be cut into two halves"),
    ("vectors", gap(counter="return torch.tensor([3.0, 3.0]), torch.tensor([1.0, -1.0])"), "two floating-point tensors of two dimensions"),
    ("nothing but zeros", gap(lucky="return torch.zeros(2, 4), torch.zeros(4, 2)"), "lucky_example holds the number 0"),
    ("half of it zero", gap(lucky="return torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0], [1.0]])"), "lucky_example holds the number 0"),
    ("tiny numbers", gap(lucky="return torch.full((1, 2), 1e-4), torch.full((2, 1), 1e-4)"), "Where else is GELU a straight line"),
    ("not large enough", gap(lucky=swap(LUCKY, "9.0", "2.0")), "the gap of lucky_example is"),
    ("the counter-example again", gap(lucky="return counter_example()"), "For which terms is GELU a straight line"),
]  # fmt: skip

WRONG = [
    WrongAnswer(exercise=exercise, name=name, source=source, says=says)
    for exercise, answers in (("2.1", CUT), ("2.2", COLUMN), ("2.3", ROW), ("2.4", GELU))
    for name, source, says in answers
]
