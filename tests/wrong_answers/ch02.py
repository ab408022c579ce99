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
        """), "What does your code do when `size % world_size` isn't 0"),
    ("looks at the number of elements, not at the dimension", cut(swap_all(REFUSE, ("tensor.shape[dim] %", "tensor.numel() %"), ("{tensor.shape[dim]}", "{tensor.numel()} elements")) + NARROW), "should raise ValueError"),
    ("looks at dimension 0 only", cut(swap(REFUSE, "shape[dim]", "shape[0]") + NARROW), "shard(a tensor of shape [3, 8], dim=1, rank=0, world_size=2) raised ValueError"),
    ("assert instead of ValueError", cut('assert tensor.shape[dim] % world_size == 0, f"{tensor.shape[dim]} over {world_size}"\n' + CHUNK + OWN), "AssertionError"),
    ("an error that says nothing", cut('if tensor.shape[dim] % world_size:\n    raise ValueError("uneven")\n' + CHUNK + OWN), "its message doesn't mention"),
    ("refuses everything", cut('raise ValueError(f"{tensor.shape[dim]} can\'t be divided over {world_size} ranks")'), "is divisible by the number of ranks"),
    ("every p-th slice", cut(REFUSE + "indices = torch.arange(rank, tensor.shape[dim], world_size)\nreturn tensor.index_select(dim, indices)"), "p equal, contiguous blocks"),
    ("counts ranks from 1", cut(REFUSE + "parts = tensor.chunk(world_size, dim)\nreturn parts[rank - 1]" + OWN), "equals what rank"),
    ("always cuts dimension 0", cut(REFUSE + "return tensor.chunk(world_size)[rank].clone()"), "Do all the other dimensions keep their full size"),
    ("knows two dimensions only", cut(REFUSE + "length = tensor.shape[dim] // world_size\nstart, stop = rank * length, (rank + 1) * length\nreturn tensor[start:stop].clone() if dim == 0 else tensor[:, start:stop]" + OWN), "Do all the other dimensions keep their full size"),
    ("reshape instead of cut", cut(REFUSE + "shape = list(tensor.shape)\nshape[dim] //= world_size\nreturn tensor.reshape(world_size, *shape)[rank].clone()"), "p equal, contiguous blocks"),
    ("a view", cut(REFUSE + CHUNK), "a view of the full tensor"),
    ("contiguous() copies nothing when dimension 0 is cut", cut(REFUSE + CHUNK + ".contiguous()"), "`.contiguous()` doesn't copy a tensor"),
    ("copies the whole, then cuts", cut(REFUSE + swap(CHUNK, "tensor.", "tensor.clone().")), "the full tensor stays in memory"),
    ("own memory, but not in order", cut(REFUSE + "part = tensor.chunk(world_size, dim)[rank]\nreturn part.transpose(0, -1)" + OWN + ".transpose(0, -1)"), "but this shard isn't contiguous"),
    ("a copy that keeps the layout of a transposed tensor", cut(REFUSE + CHUNK + ".clone()"), "preserves the memory layout of the tensor it copies"),
    ("zeros of the right shape", cut(REFUSE + "shape = list(tensor.shape)\nshape[dim] //= world_size\nreturn torch.zeros(shape, dtype=tensor.dtype)"), "Which line should fill in the values"),
    ("always in float32", cut(REFUSE + "return torch.tensor(tensor.chunk(world_size, dim)[rank].tolist())"), "Which line of your code changes the dtype"),
    ("clears the whole tensor after the cut", cut(REFUSE + swap(CHUNK, "return", "part =") + OWN + "\ntensor.zero_()\nreturn part"), "Which line of your code writes into an input tensor"),
    ("always along dimension 0", cut(unshard="return torch.cat(shards)"), "along `dim` and in rank order"),
    ("stack makes a new dimension", cut(unshard="return torch.stack(shards, dim)"), "along `dim` and in rank order"),
    ("the other way round", cut(unshard="return torch.cat(shards[::-1], dim)"), "along `dim` and in rank order"),
    ("adds the shards", cut(unshard="return sum(shards)"), "along `dim` and in rank order"),
    ("always along the last dimension", cut(unshard="return torch.cat(shards, -1)"), "along `dim` and in rank order"),
    ("forgets to return", cut(unshard="torch.cat(shards, dim)"), "what does its last line return"),
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
    ("GELU after the sum on both sides", gap(PRODUCTS + "return (gelu(x @ a) - gelu(sum(products))).abs().max().round(decimals=6).item()"), "Your function found no gap, but"),
    ("a column split", gap("""
        right = gelu(x @ a)
        wrong = torch.cat([gelu(x @ columns) for columns in a.chunk(world_size, 1)], 1)
        n = min(right.shape[1], wrong.shape[1])
        return (right[:, :n] - wrong[:, :n]).abs().max().round(decimals=6).item()
        """), "With a column split, the two results would always be equal"),
    ("always 0", gap("return 0.0"), "Your function found no gap, but"),
    ("with its sign", gap(swap(GAP, ".abs()", "")), "Does your code take absolute values"),
    ("with its sign, the other way round", gap(PRODUCTS + "return (sum(gelu(product) for product in products) - gelu(sum(products))).max().item()"), "Does your code take absolute values"),
    ("the mean", gap(swap(GAP, "max()", "mean()")), "Which one difference does the exercise ask for"),
    ("two shards, whatever world_size is", gap(swap(GAP, "chunk(world_size", "chunk(min(2, world_size)")), "Your code always splits the matrices into two shards"),
    ("always two shards", gap(swap(GAP, "world_size", "2")), "Your code always splits the matrices into two shards"),
    ("two shards also for one rank", gap(swap(GAP, "chunk(world_size", "chunk(max(2, world_size)")), "With p = 1, there's only one term"),
    ("the tanh approximation", gap(PRODUCTS + 'right = gelu(sum(products), approximate="tanh")\nreturn (right - sum(gelu(product, approximate="tanh") for product in products)).abs().max().item()'), "compute by default"),
    ("without GELU", gap(PRODUCTS + "return (x @ a - sum(products)).abs().max().round(decimals=6).item()"), "Your function found no gap, but"),
    ("relu", gap(swap_all(GAP, ("gelu(sum(products))", "sum(products).relu()"), ("gelu(product)", "product.relu()"))), "compute these two expressions"),
    ("one GELU of the sum against GELU of the first product", gap(swap(GAP, "sum(gelu(product) for product in products)", "gelu(products[0])")), "compute these two expressions"),
    ("zeros", gap(counter="return torch.zeros(2, 4), torch.zeros(4, 2)"), "the gap of counter_example is only 0"),
    ("ones", gap(counter="return torch.ones(2, 4), torch.ones(4, 2)"), "How large is the gap if two terms cancel each other"),
    ("terms of one sign", gap(counter=swap(COUNTER, "-1.0", "1.0")), "How large is the gap if two terms cancel each other"),
    ("cancels inside one rank", gap(counter="return torch.tensor([[3.0, 3.0, 1.0, 1.0]]), torch.tensor([[1.0], [-1.0], [1.0], [1.0]])"), "How large is the gap if two terms cancel each other"),
    ("an odd number of columns", gap(counter="return torch.tensor([[3.0, 3.0, 3.0]]), torch.tensor([[1.0], [-1.0], [1.0]])"), "Which of these requirements"),
    ("vectors", gap(counter="return torch.tensor([3.0, 3.0]), torch.tensor([1.0, -1.0])"), "two floating-point tensors with two dimensions each"),
    ("nothing but zeros", gap(lucky="return torch.zeros(2, 4), torch.zeros(4, 2)"), "lucky_example has an element of magnitude 0"),
    ("half of it zero", gap(lucky="return torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0], [1.0]])"), "lucky_example has an element of magnitude 0"),
    ("tiny numbers", gap(lucky="return torch.full((1, 2), 1e-4), torch.full((2, 1), 1e-4)"), "In which other range is GELU practically linear"),
    ("not large enough", gap(lucky=swap(LUCKY, "9.0", "2.0")), "the gap of lucky_example is"),
    ("the counter-example again", gap(lucky="return counter_example()"), "linear on an interval that contains all the terms"),
]  # fmt: skip

SPLITS = 'return ("column", "row") if out <= hidden else ("column", "column")'
GATHER_PARTS = """
def gathered(y, dim=-1):
    parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, y)
    return torch.cat(parts, dim=dim)
"""
COMPUTE = """
if splits == ("column", "row"):
    z = x @ a_shard @ b_shard
    dist.all_reduce(z)
    return z
return gathered(gathered(x @ a_shard) @ b_shard)
"""


def chain(splits: str = SPLITS, compute: str = COMPUTE) -> str:
    return f"""
def choose_splits(hidden, out):
{indented(splits)}


def two_matmuls(x, a_shard, b_shard, splits):
{indented(compute)}

{GATHER_PARTS}"""


ALL_PARTS = (
    "parts = [torch.empty_like(b_shard) for _ in range(dist.get_world_size())]\n    dist.all_gather(parts, b_shard)\n"
)
CHAIN = [
    ("column and row, whatever the sizes", chain('return "column", "row"'), "For which sizes is each combination the cheapest"),
    ("column and column, whatever the sizes", chain('return "column", "column"'), "For which sizes is each combination the cheapest"),
    ("the wrong way round", chain(swap(SPLITS, "out <= hidden", "out > hidden")), "For which sizes is each combination the cheapest"),
    ("begins with rows", chain(swap(SPLITS, '("column", "row")', '("row", "column")')), "Go through all four combinations"),
    ("rows twice", chain(swap(SPLITS, '("column", "row")', '("row", "row")')), "Go through all four combinations"),
    ("only when hidden is four times as large", chain(swap(SPLITS, "out <= hidden", "4 * out <= hidden")), "For which sizes is each combination the cheapest"),
    ("an all-reduce counted like an all-gather", chain(swap(SPLITS, "out <= hidden", "True")), "For which sizes is each combination the cheapest"),
    ("a third of the sizes off by one", chain(swap(SPLITS, "out <= hidden", "out < hidden - 1")), "For which sizes is each combination the cheapest"),
    ("dimensions, not words", chain("return (1, 0) if out <= hidden else (1, 1)"), "It should return two words"),
    ("one word", chain('return "column"'), "It should return two words"),
    ("forgets the all-reduce", chain(compute=swap(COMPUTE, "    dist.all_reduce(z)\n", "")), "Which collective turns the ranks' results into the full Z"),
    ("all-reduces a copy", chain(compute=swap(COMPUTE, "all_reduce(z)", "all_reduce(z.clone())")), "Which collective turns the ranks' results into the full Z"),
    ("leaves the columns of Z where they are", chain(compute=swap(COMPUTE, "gathered(gathered(x @ a_shard) @ b_shard)", "gathered(x @ a_shard) @ b_shard")), "Which collective turns the ranks' results into the full Z"),
    ("joins Z along dimension 0", chain(compute=swap(COMPUTE, "@ b_shard)\n", "@ b_shard, dim=0)\n")), "Along which dimension should you concatenate columns"),
    ("completes XA, and multiplies by all of B", chain(compute=swap(COMPUTE, "z = x @ a_shard @ b_shard\n    dist.all_reduce(z)\n", ALL_PARTS + "    z = gathered(x @ a_shard) @ torch.cat(parts)\n")), "Do the ranks need to communicate between the two matmuls"),
    ("completes XA, then slices it again", chain(compute=swap(COMPUTE, "z = x @ a_shard @ b_shard", "z = gathered(x @ a_shard).chunk(dist.get_world_size(), -1)[dist.get_rank()] @ b_shard")), "Do the ranks need to communicate between the two matmuls"),
    ("adds Z twice", chain(compute=swap(COMPUTE, "    dist.all_reduce(z)\n", "    dist.all_reduce(z)\n    dist.all_reduce(z)\n")), "Z is p times too large"),
    ("the next rank's columns", chain(compute=swap(COMPUTE, "z = x @ a_shard @ b_shard", "z = gathered(x @ a_shard).chunk(dist.get_world_size(), -1)[dist.get_rank() - 1] @ b_shard")), "Which rows does your shard of B contain"),
    ("gathers by an all-reduce of zeros", chain(compute=swap(COMPUTE, "return gathered(gathered(x @ a_shard) @ b_shard)", "y = gathered(x @ a_shard) @ b_shard\nz = y.new_zeros(dist.get_world_size(), *y.shape)\nz[dist.get_rank()] = y\ndist.all_reduce(z)\nreturn torch.cat(list(z), -1)")), "Do the ranks need to communicate between the two matmuls"),
    ("does not wait for the sum", chain(compute=swap(COMPUTE, "all_reduce(z)", "all_reduce(z, async_op=True)")), "When is it safe to read the result"),
    ("in float32", chain(compute=swap(COMPUTE, "z = x @ a_shard @ b_shard", "z = (x.float() @ a_shard.float() @ b_shard.float()).to(x.dtype)")), "casts a tensor to a different dtype"),
    ("flattens x to rows, which a vector doesn't have", chain(compute="x, leading = x.flatten(0, -2), x.shape[:-1]" + swap_all(COMPUTE, ("return z", "return z.view(*leading, -1)"), ("@ b_shard)\n", "@ b_shard).view(*leading, -1)\n"))), "x with 1 dimension: your code fails"),
]  # fmt: skip


def gather(body: str) -> str:
    return f"def gather_last_dim(y):\n{indented(body)}\n"


REPAIRED = """
gathered = y.new_empty(dist.get_world_size() * y.shape[0], *y.shape[1:])
dist.all_gather_into_tensor(gathered, y.contiguous())
gathered = gathered.view(dist.get_world_size(), *y.shape)
return gathered.movedim(0, -2).flatten(-2)
"""
PARTS = "parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]\ndist.all_gather(parts, y)\n"
GATHER = [
    ("as shipped", gather("gathered = y.new_empty(dist.get_world_size() * y.shape[0], *y.shape[1:])\ndist.all_gather_into_tensor(gathered, y.contiguous())\nreturn gathered.view(*y.shape[:-1], -1)"), "a tensor whose first dimension is the rank"),
    ("only reshapes", gather(swap(REPAIRED, ".movedim(0, -2).flatten(-2)", ".reshape(*y.shape[:-1], -1)")), "a tensor whose first dimension is the rank"),
    ("joins along dimension 0", gather(PARTS + "return torch.cat(parts)"), "Along which dimension should you concatenate them"),
    ("moves the ranks to the end", gather(swap(REPAIRED, "movedim(0, -2)", "movedim(0, -1)")), "Which dimension of your gathered tensor indexes the ranks"),
    ("knows two dimensions only", gather(swap(REPAIRED, "movedim(0, -2)", "movedim(0, 1)")), "Which dimension of your gathered tensor indexes the ranks"),
    ("adds", gather("out = y.clone()\ndist.all_reduce(out)\nreturn out"), "Which collective collects tensors without adding them"),
    ("one broadcast from each rank", gather("parts = [y.clone() for _ in range(dist.get_world_size())]\nfor rank, part in enumerate(parts):\n    dist.broadcast(part, src=rank)\nreturn torch.cat(parts, -1)"), "Can you use a single all-gather"),
    ("pads with zeros and adds", gather("out = y.new_zeros(dist.get_world_size(), *y.shape)\nout[dist.get_rank()] = y\ndist.all_reduce(out)\nreturn torch.cat(list(out), -1)"), "Can you use a single all-gather"),
    ("one all-gather per row", gather("rows = []\nfor row in y.reshape(-1, y.shape[-1]):\n    parts = [torch.empty_like(row) for _ in range(dist.get_world_size())]\n    dist.all_gather(parts, row.contiguous())\n    rows.append(torch.cat(parts))\nreturn torch.stack(rows).reshape(*y.shape[:-1], -1)"), "Can you use a single all-gather"),
    ("passes a y that isn't contiguous", gather(swap(REPAIRED, "y.contiguous()", "y")), "This time, y isn't contiguous"),
    ("gathers a y that isn't contiguous into a list", gather(PARTS + "return torch.cat(parts, -1)"), "Which tensor method returns a contiguous copy"),
    ("does not wait", gather(swap(REPAIRED, "y.contiguous())", "y.contiguous(), async_op=True)")), "When is it safe to read the result"),
    ("takes a first dimension of 1 for a single row", gather(swap(REPAIRED, "gathered = gathered.view", "if len(y) == 1:\n    return gathered.view(*y.shape[:-1], -1)\ngathered = gathered.view")), "a tensor whose first dimension is the rank"),
]  # fmt: skip

WRONG = [
    WrongAnswer(exercise=exercise, name=name, source=source, says=says)
    for exercise, answers in (("2.1", CUT), ("2.2", CHAIN), ("2.3", GELU), ("2.4", GATHER))
    for name, source, says in answers
]
