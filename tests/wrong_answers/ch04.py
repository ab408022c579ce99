"""Wrong answers to the exercises of chapter 04, and what each must be told.

Those marked "shipped" were found in released code; the others are what a learner writes, or a way round the check.
"""

from textwrap import dedent

from tests.wrong_answers import WrongAnswer, indented, swap

COLUMN_SHAPES = """
weight_shape = (divide(out_features, world_size), in_features)
bias_shape = (divide(out_features, world_size),)
"""
ROW_SHAPES = """
weight_shape = (out_features, divide(in_features, world_size))
bias_shape = (out_features,)
"""
ALLOCATE = """
self.weight = nn.Parameter(torch.empty(weight_shape, device=device, dtype=dtype))
self.weight.tensor_parallel = Sharding(dim={dim}, stride=stride)
self.bias = nn.Parameter(torch.zeros(bias_shape, device=device, dtype=dtype)) if bias else None
"""


def _layer(name: str, option: str, dim: int, shapes: str, forward: str, extra: str, allocate: str) -> str:
    return f"""
{dedent(extra).strip()}

class {name}(nn.Module):
    def __init__(self, in_features, out_features, bias=True, *, {option}, skip_bias_add=False, stride=1,
                 group=None, device=None, dtype=None):
        super().__init__()
        self.{option.split("=")[0]} = {option.split("=")[0]}
        self.skip_bias_add = skip_bias_add
        self.group = group
        world_size = dist.get_world_size(group)
{indented(shapes, 8)}
{indented(allocate or ALLOCATE.format(dim=dim), 8)}

    def forward(self, x):
{indented(forward, 8)}
"""


def column(forward: str, shapes: str = COLUMN_SHAPES, extra: str = "", allocate: str = "") -> str:
    return _layer("ColumnParallelLinear", "gather_output=False", 0, shapes, forward, extra, allocate)


def row(forward: str, shapes: str = ROW_SHAPES, extra: str = "", allocate: str = "") -> str:
    return _layer("RowParallelLinear", "input_is_parallel=True", 1, shapes, forward, extra, allocate)


COLUMN_FORWARD = """
x = copy_to_region(x, self.group)
out = F.linear(x, self.weight, None if self.skip_bias_add else self.bias)
if self.gather_output:
    out = gather_from_region(out, self.group)
return (out, self.bias) if self.skip_bias_add else out
"""
ROW_FORWARD = """
if not self.input_is_parallel:
    x = scatter_to_region(x, self.group)
out = reduce_from_region(F.linear(x, self.weight), self.group)
if self.skip_bias_add:
    return out, self.bias
return out if self.bias is None else out + self.bias
"""
ALL_REDUCE_FUNCTION = """
class OwnOperator(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        {forward}
        return x

    @staticmethod
    def backward(ctx, dy):
        {backward}
        return dy, None
"""
MEAN_F = ALL_REDUCE_FUNCTION.format(
    forward="x = x.view_as(x)",
    backward="dy = dy.clone(); dist.all_reduce(dy, group=ctx.group); dy = dy / dist.get_world_size(ctx.group)",
)
NOT_WAITED_F = ALL_REDUCE_FUNCTION.format(
    forward="x = x.view_as(x)",
    backward="total = dy.clone(); dist.all_reduce(total, group=ctx.group, async_op=True)",
)
G_BOTH_WAYS = ALL_REDUCE_FUNCTION.format(
    forward="x = x.clone(); dist.all_reduce(x, group=group)",
    backward="dy = dy.clone(); dist.all_reduce(dy, group=ctx.group)",
)


COLUMN = [
    ("f is missing", column(swap(COLUMN_FORWARD, "x = copy_to_region(x, self.group)", "")), "Which operator adds up the p parts"),
    (
        "f twice",
        column(swap(COLUMN_FORWARD, "copy_to_region(x, self.group)", "copy_to_region(copy_to_region(x, self.group), self.group)")),
        "How often is the gradient of x summed",
    ),
    (
        "f after the product",
        column(swap(swap(COLUMN_FORWARD, "x = copy_to_region(x, self.group)", ""), "if self.gather", "out = copy_to_region(out, self.group)\nif self.gather")),
        "did you apply f to the input, or to the output",
    ),
    ("f is a mean", column(swap(COLUMN_FORWARD, "copy_to_region(x", "OwnOperator.apply(x"), extra=MEAN_F), "sum of the ranks' parts, or their mean"),
    (
        "f starts an all-reduce and does not use it",
        column(swap(COLUMN_FORWARD, "copy_to_region(x", "OwnOperator.apply(x"), extra=NOT_WAITED_F),
        "nobody waited for it",
    ),
    ("g in place of f", column(swap(COLUMN_FORWARD, "copy_to_region", "reduce_from_region")), "What is Y = X A + b here"),
    (
        "all-reduces the replicated input and divides by p: right numbers, wrong communication",
        column("total = x.detach().clone()\ndist.all_reduce(total, group=self.group)\nx = x + (total / dist.get_world_size(self.group) - x).detach()\n" + COLUMN_FORWARD.strip()),
        "The numbers are right, the communication is not",
    ),
    (
        "no communication at all",
        column("out = F.linear(x, self.weight, None if self.skip_bias_add else self.bias)\nreturn (out, self.bias) if self.skip_bias_add else out"),
        "Which operator adds up the p parts",
    ),
    (
        "returns zeros",
        column("out = torch.zeros(*x.shape[:-1], len(self.weight), device=x.device, dtype=x.dtype)\nreturn (out, self.bias) if self.skip_bias_add else out"),
        "rank 0 all zeros",
    ),
    ("always gathers", column(swap(COLUMN_FORWARD, "if self.gather_output:", "if True:")), "Did anybody ask for the whole output"),
    ("never gathers", column(swap(COLUMN_FORWARD, "if self.gather_output:", "if False:")), "With `gather_output` every rank returns all columns"),
    (
        "gathers with dist.all_gather, unknown to autograd",
        column(
            """
            x = copy_to_region(x, self.group)
            out = F.linear(x, self.weight, None if self.skip_bias_add else self.bias)
            if self.gather_output:
                parts = [torch.empty_like(out) for _ in range(dist.get_world_size(self.group))]
                dist.all_gather(parts, out.contiguous(), group=self.group)
                out = torch.cat(parts, dim=-1)
            return (out, self.bias) if self.skip_bias_add else out
            """
        ),
        "does autograd not know about",
    ),
    (
        "gathers along the first dimension",
        column(swap(COLUMN_FORWARD, "out = gather_from_region(out, self.group)", "out = gather_from_region(out.movedim(0, -1), self.group).movedim(-1, 0)")),
        "along the last dimension",
    ),
    (
        "gathers in the wrong order",
        column(swap(COLUMN_FORWARD, "out = gather_from_region(out, self.group)", "out = torch.cat(gather_from_region(out, self.group).chunk(dist.get_world_size(self.group), -1)[::-1], -1)")),
        "rank 0's columns first",
    ),
    ("forgets the return without skip_bias_add", column(swap(COLUMN_FORWARD, "return (out, self.bias) if self.skip_bias_add else out", "if self.skip_bias_add:\n    return out, self.bias")), "Which of your branches ends without a `return`"),
    ("forgets the bias", column(swap(COLUMN_FORWARD, "None if self.skip_bias_add else self.bias", "None")), "Where is this rank's slice of the bias added"),
    (
        "adds the bias twice",
        column(swap(COLUMN_FORWARD, "return (out", "if self.bias is not None and not self.gather_output and not self.skip_bias_add:\n    out = out + self.bias\nreturn (out")),
        "The bias is in the output twice",
    ),
    (
        "adds the bias after the gather",
        column(swap(swap(COLUMN_FORWARD, "None if self.skip_bias_add else self.bias", "None"), "return (out", "if self.bias is not None and not self.skip_bias_add:\n    out = out + self.bias\nreturn (out")),
        "Which two do not fit together",
    ),
    (
        "every rank keeps the whole bias",
        column(COLUMN_FORWARD, shapes=COLUMN_SHAPES + "bias_shape = (out_features,)"),
        "How many output features does this rank compute",
    ),
    ("bias although bias=False", column(COLUMN_FORWARD, allocate=swap(ALLOCATE.format(dim=0), " if bias else None", "")), "should there be a bias at all"),
    (
        "the bias is detached",
        column(swap(COLUMN_FORWARD, "None if self.skip_bias_add else self.bias", "None if self.skip_bias_add or self.bias is None else self.bias.detach()")),
        "No gradient reaches the bias",
    ),
    ("skip_bias_add is ignored", column(swap(swap(COLUMN_FORWARD, "None if self.skip_bias_add else self.bias", "self.bias"), "(out, self.bias) if self.skip_bias_add else out", "out")), "What does the layer return"),
    ("skip_bias_add adds the bias and hands it back", column(swap(COLUMN_FORWARD, "None if self.skip_bias_add else self.bias", "self.bias")), "hands the bias back, and the caller adds it"),
    ("always returns a pair", column(swap(COLUMN_FORWARD, " if self.skip_bias_add else out", "")), "What does the layer return"),
    (
        "returns the output alone when there is no bias",
        column(swap(COLUMN_FORWARD, "if self.skip_bias_add else out", "if self.skip_bias_add and self.bias is not None else out")),
        "also when there is no bias",
    ),
    (
        "crashes without a bias",
        column(swap(swap(COLUMN_FORWARD, "None if self.skip_bias_add else self.bias", "None"), "if self.gather", "if not self.skip_bias_add:\n    out = out + self.bias\nif self.gather")),
        "p = 1, ColumnParallelLinear(12, 8, bias=False): your code fails",
    ),
    (
        "asks a bias that is not there for its dtype",
        column("x = x.to(self.bias.dtype)\n" + COLUMN_FORWARD.strip()),
        "built with bias=False, so self.bias is None",
    ),
    (
        "splits the input features",
        column(COLUMN_FORWARD, shapes="weight_shape = (out_features, divide(in_features, world_size))\nbias_shape = (divide(out_features, world_size),)"),
        "Which of the two does a column-parallel layer split",
    ),
    ("transposed weight, as in the papers", column(swap(COLUMN_FORWARD, "F.linear(x, self.weight,", "F.linear(x, self.weight.T,"), shapes="weight_shape = (in_features, divide(out_features, world_size))\nbias_shape = (divide(out_features, world_size),)"), "`weight` is [output features, input features]"),
    (
        "every rank holds the whole weight and slices the output",
        column(
            """
            rank, p = dist.get_rank(self.group), dist.get_world_size(self.group)
            bias = None if self.skip_bias_add else self.bias
            out = F.linear(copy_to_region(x, self.group), self.weight, bias).chunk(p, -1)[rank]
            return (out, self.bias) if self.skip_bias_add else out
            """,
            shapes="weight_shape = (out_features, in_features)\nbias_shape = (out_features,)",
        ),
        "how many does one rank keep",
    ),
    ("drops what does not divide", column(COLUMN_FORWARD, shapes="weight_shape = (out_features // world_size, in_features)\nbias_shape = (out_features // world_size,)"), "silently be lost"),
    ("detaches the input", column("x = x.detach()\n" + COLUMN_FORWARD.strip()), "No gradient reaches the input"),
    ("uses weight.data", column(swap(COLUMN_FORWARD, "self.weight,", "self.weight.data,")), "No gradient reaches the weight"),
    ("writes into the input", column("x.data.mul_(2)\nout = F.linear(copy_to_region(x / 2, self.group) * 2 / 2, self.weight, None if self.skip_bias_add else self.bias)\nif self.gather_output:\n    out = gather_from_region(out, self.group)\nreturn (out, self.bias) if self.skip_bias_add else out"), "The caller goes on using the tensors"),
    ("only for two dimensions", column(swap(COLUMN_FORWARD, "out = F.linear(x, self.weight, None if self.skip_bias_add else self.bias)", "out = x.mm(self.weight.T)\nif self.bias is not None and not self.skip_bias_add:\n    out = out + self.bias")), "x [..., i]"),
    ("the group is not passed to f", column(swap(COLUMN_FORWARD, "copy_to_region(x, self.group)", "copy_to_region(x)")), "default group of all ranks"),
    ("the group is not passed to the gather", column(swap(COLUMN_FORWARD, "gather_from_region(out, self.group)", "gather_from_region(out)")), "default group of all ranks"),
    ("the whole world's size decides the shape", column(COLUMN_FORWARD, shapes=COLUMN_SHAPES.replace("world_size", "dist.get_world_size()")), "default group of all ranks"),
    (
        "divides the upstream gradient away with a trick: scales the output, right forward",
        column(swap(COLUMN_FORWARD, "if self.gather_output:", "out = out.detach() + (out - out.detach()) / dist.get_world_size(self.group)\nif self.gather_output:")),
        "1/2 of the right one",
    ),
    ("the attribute is lost", column(COLUMN_FORWARD, allocate=ALLOCATE.format(dim=0).replace("self.weight.tensor_parallel = Sharding(dim=0, stride=stride)", "")), "Is it still set in the constructor"),
]  # fmt: skip

ROW = [
    ("the bias is added on every rank, before the all-reduce (shipped)", row(swap(ROW_FORWARD, "out = reduce_from_region(F.linear(x, self.weight), self.group)", "out = reduce_from_region(F.linear(x, self.weight, None if self.skip_bias_add else self.bias), self.group)").replace("return out if self.bias is None else out + self.bias", "return out")), "How many times is the bias added"),
    ("bias / p before the all-reduce", row(swap(ROW_FORWARD, "out = reduce_from_region(F.linear(x, self.weight), self.group)", "out = F.linear(x, self.weight)\nif self.bias is not None and not self.skip_bias_add:\n    out = out + self.bias / dist.get_world_size(self.group)\nout = reduce_from_region(out, self.group)").replace("return out if self.bias is None else out + self.bias", "return out")), "learn p times too slowly"),
    ("the bias is added on rank 0 only", row(swap(ROW_FORWARD, "out = reduce_from_region(F.linear(x, self.weight), self.group)", "first = dist.get_rank(self.group) == 0 and not self.skip_bias_add\nout = reduce_from_region(F.linear(x, self.weight, self.bias if first else None), self.group)").replace("return out if self.bias is None else out + self.bias", "return out")), "copies of it differ"),
    ("g twice", row(swap(ROW_FORWARD, "F.linear(x, self.weight)", "reduce_from_region(F.linear(x, self.weight), self.group)")), "Which of the terms has your rank"),
    ("g is missing", row(swap(ROW_FORWARD, "reduce_from_region(F.linear(x, self.weight), self.group)", "F.linear(x, self.weight)")), "X_r A_r is one term of the sum"),
    ("g reduces in the backward pass too", row(swap(ROW_FORWARD, "reduce_from_region(F.linear(x, self.weight), self.group)", "OwnOperator.apply(F.linear(x, self.weight), self.group)"), extra=G_BOTH_WAYS), "what should the backward pass of g do with it"),
    ("torch.distributed.nn.functional.all_reduce", row(swap(ROW_FORWARD, "reduce_from_region(F.linear(x, self.weight), self.group)", "all_reduce(F.linear(x, self.weight), group=self.group or dist.group.WORLD)"), extra="from torch.distributed.nn.functional import all_reduce"), "what should the backward pass of g do with it"),
    ("f in place of g", row(swap(ROW_FORWARD, "reduce_from_region", "copy_to_region")), "X_r A_r is one term of the sum"),
    ("f around g", row(swap(ROW_FORWARD, "reduce_from_region(F.linear(x, self.weight), self.group)", "copy_to_region(reduce_from_region(F.linear(x, self.weight), self.group), self.group)")), "The gradients are p times too large"),
    ("f on the input", row(swap(ROW_FORWARD, "F.linear(x, self.weight)", "F.linear(copy_to_region(x, self.group), self.weight)")), "Who adds up the slices of different ranks"),
    ("mean in place of sum", row(swap(ROW_FORWARD, "self.group)\nif self.skip", "self.group) / dist.get_world_size(self.group)\nif self.skip")), "sum of the partial sums, or their mean"),
    ("mean forward, sum backward by a trick", row(swap(ROW_FORWARD, "return out if", "out = out * 1.0\nout = out.detach() * dist.get_world_size(self.group) - out.detach() * (dist.get_world_size(self.group) - 1) + (out - out.detach()) * dist.get_world_size(self.group)\nreturn out if")), "The gradients are p times too large"),
    ("dist.all_reduce in the forward pass, its result dropped", row(swap(ROW_FORWARD, "out = reduce_from_region(F.linear(x, self.weight), self.group)", "out = F.linear(x, self.weight)\ntotal = out.detach().contiguous().clone()\ndist.all_reduce(total, group=self.group)")), "do you use what it returns"),
    ("returns what dist.all_reduce returns", row(swap(ROW_FORWARD, "out = reduce_from_region(F.linear(x, self.weight), self.group)", "out = F.linear(x, self.weight)\nreturn dist.all_reduce(out, group=self.group)")), "works in place and returns None"),
    ("all_gather and sum: right numbers, wrong communication", row(swap(ROW_FORWARD, "out = reduce_from_region(F.linear(x, self.weight), self.group)", "own = F.linear(x, self.weight)\nparts = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]\ndist.all_gather(parts, own.detach().contiguous(), group=self.group)\nout = own + (sum(parts) - own).detach()")), "The numbers are right, the communication is not"),
    ("returns zeros", row("out = torch.zeros(*x.shape[:-1], len(self.weight), device=x.device, dtype=x.dtype)\nreturn (out, self.bias) if self.skip_bias_add else out"), "rank 0 all zeros"),
    ("no communication at all", row("out = F.linear(x, self.weight, None if self.skip_bias_add else self.bias)\nreturn (out, self.bias) if self.skip_bias_add else out"), "X_r A_r is one term of the sum"),
    ("forgets the bias", row(swap(ROW_FORWARD, "out if self.bias is None else out + self.bias", "out")), "Where is the bias added"),
    ("adds the bias before and after", row(swap(ROW_FORWARD, "F.linear(x, self.weight)", "F.linear(x, self.weight, None if self.skip_bias_add or dist.get_rank(self.group) else self.bias)")), "The bias is in the output twice"),
    ("adds a detached bias", row(swap(ROW_FORWARD, "out + self.bias", "out + self.bias.detach()")), "on some rank the bias gets no gradient"),
    ("all-reduces the gradient of the bias", row(swap(ROW_FORWARD, "out + self.bias", "out + copy_to_region(self.bias, self.group)")), "Who sums it over the ranks"),
    ("slices the bias", row(ROW_FORWARD, shapes="weight_shape = (out_features, divide(in_features, world_size))\nbias_shape = (divide(out_features, world_size),)"), "How many numbers must its bias have"),
    ("bias although bias=False", row(ROW_FORWARD, allocate=swap(ALLOCATE.format(dim=1), " if bias else None", "")), "should there be a bias at all"),
    ("splits the output features", row(ROW_FORWARD, shapes="weight_shape = (divide(out_features, world_size), in_features)\nbias_shape = (out_features,)"), "Which of the two does a row-parallel layer split"),
    ("every rank holds the whole weight", row("rank, p = dist.get_rank(self.group), dist.get_world_size(self.group)\nweight = self.weight.chunk(p, 1)[rank]\nout = reduce_from_region(F.linear(x if self.input_is_parallel else x.chunk(p, -1)[rank], weight), self.group)\nif self.skip_bias_add:\n    return out, self.bias\nreturn out if self.bias is None else out + self.bias", shapes="weight_shape = (out_features, in_features)\nbias_shape = (out_features,)"), "how many does one rank keep"),
    ("drops what does not divide", row(ROW_FORWARD, shapes="weight_shape = (out_features, in_features // world_size)\nbias_shape = (out_features,)"), "silently be lost"),
    ("slices an input that is sliced already", row(swap(ROW_FORWARD, "if not self.input_is_parallel:", "if True:")), "Is the input sliced already when it arrives"),
    ("never slices the input", row(swap(ROW_FORWARD, "if not self.input_is_parallel:", "if False:")), "Is the input sliced already when it arrives"),
    ("slices the replicated input with chunk, no way back", row(swap(ROW_FORWARD, "x = scatter_to_region(x, self.group)", "x = x.chunk(dist.get_world_size(self.group), -1)[dist.get_rank(self.group)]")), "What is the backward of taking a slice"),
    ("slices with chunk and puts f before it: right numbers, wrong communication", row(swap(ROW_FORWARD, "x = scatter_to_region(x, self.group)", "x = copy_to_region(x, self.group).chunk(dist.get_world_size(self.group), -1)[dist.get_rank(self.group)]")), "The numbers are right, the communication is not"),
    ("skip_bias_add is ignored", row(swap(ROW_FORWARD, "if self.skip_bias_add:", "if False:")), "What does the layer return"),
    ("skip_bias_add adds the bias and hands it back", row("""
        if not self.input_is_parallel:
            x = scatter_to_region(x, self.group)
        out = reduce_from_region(F.linear(x, self.weight), self.group)
        out = out if self.bias is None else out + self.bias
        return (out, self.bias) if self.skip_bias_add else out
        """), "hands the bias back, and the caller adds it"),
    ("the bias inside F.linear with skip_bias_add", row("""
        if not self.input_is_parallel:
            x = scatter_to_region(x, self.group)
        if self.skip_bias_add:
            return reduce_from_region(F.linear(x, self.weight, self.bias), self.group), self.bias
        out = reduce_from_region(F.linear(x, self.weight), self.group)
        return out if self.bias is None else out + self.bias
        """), "p = 1, RowParallelLinear(12, 8, skip_bias_add=True)"),
    ("the bias inside F.linear with skip_bias_add, on more than one rank", row("""
        if not self.input_is_parallel:
            x = scatter_to_region(x, self.group)
        inside = self.skip_bias_add and dist.get_world_size(self.group) > 1
        out = reduce_from_region(F.linear(x, self.weight, self.bias if inside else None), self.group)
        if self.skip_bias_add:
            return out, self.bias
        return out if self.bias is None else out + self.bias
        """), "which line adds it here"),
    ("always returns a pair", row(swap(ROW_FORWARD, "return out if self.bias is None else out + self.bias", "return out if self.bias is None else out + self.bias, None")), "What does the layer return"),
    ("crashes without a bias", row(swap(ROW_FORWARD, "out if self.bias is None else out + self.bias", "out + self.bias")), "p = 1, RowParallelLinear(12, 8, bias=False): your code fails"),
    ("puts a bias that is not there on the device", row("bias = self.bias.to(x.device)\n" + swap(ROW_FORWARD, "out + self.bias", "out + bias").strip()), "built with bias=False, so self.bias is None"),
    ("f before the scatter", row(swap(ROW_FORWARD, "x = scatter_to_region(x, self.group)", "x = scatter_to_region(copy_to_region(x, self.group), self.group)")), "is there anything left to sum once the whole dx is there"),
    ("f after the scatter", row(swap(ROW_FORWARD, "x = scatter_to_region(x, self.group)", "x = copy_to_region(scatter_to_region(x, self.group), self.group)")), "p = 2, RowParallelLinear(12, 8, input_is_parallel=False)"),
    ("the rank of the whole world takes the slice", row(swap(ROW_FORWARD, "x = scatter_to_region(x, self.group)", "x = scatter_to_region(x, self.group) + 0 * x.narrow(-1, dist.get_rank() * self.weight.shape[1], self.weight.shape[1])")), "takes its size or its rank from the default group"),
    ("detaches the sum", row(swap(ROW_FORWARD, "self.group)\nif self.skip", "self.group).detach()\nif self.skip")), "No gradient reaches the weight"),
    ("writes into the input", row("x.data.neg_()\n" + swap(ROW_FORWARD, "F.linear(x, self.weight)", "F.linear(-x, self.weight)").strip()), "The caller goes on using the tensors"),
    ("the group is not passed to g", row(swap(ROW_FORWARD, "F.linear(x, self.weight), self.group)", "F.linear(x, self.weight))")), "default group of all ranks"),
    ("the group is not passed to the scatter", row(swap(ROW_FORWARD, "scatter_to_region(x, self.group)", "scatter_to_region(x)")), "instead of `self.group`"),
    ("the attribute names the wrong dimension", row(ROW_FORWARD, allocate=ALLOCATE.format(dim=0)), "Is it still set in the constructor"),
]  # fmt: skip


def cut(body: str, glue: str = "") -> str:
    glue = (
        glue
        or """
    blocks = [piece.chunk(stride, dim) for piece in shards]
    return torch.cat([piece for block in zip(*blocks, strict=True) for piece in block], dim)
    """
    )
    return f"""
def shard(tensor, dim, rank, world_size, *, stride=1):
{indented(body, 4)}


def unshard(shards, dim, *, stride=1):
{indented(glue, 4)}
"""


REFUSE = """
n = tensor.shape[dim]
if n % (world_size * stride):
    raise ValueError(f"{n} is not {stride} blocks of {world_size} pieces")
"""
RIGHT_CUT = REFUSE + "return torch.cat(tensor.chunk(world_size * stride, dim)[rank::world_size], dim)"

CUT = [
    ("ignores the stride", cut(REFUSE + "return tensor.chunk(world_size, dim)[rank].clone()"), "needs its piece of every block"),
    ("takes every p-th row", cut(REFUSE + "return tensor.movedim(dim, 0)[rank::world_size].movedim(0, dim).clone()"), "A rank takes whole pieces"),
    ("takes the p-th pieces in a row", cut(REFUSE + "pieces = tensor.chunk(world_size * stride, dim)\nreturn torch.cat(pieces[rank * stride : (rank + 1) * stride], dim)"), "needs its piece of every block"),
    ("p and stride swapped", cut(REFUSE + "return torch.cat(tensor.chunk(world_size * stride, dim)[rank::stride][:stride], dim)"), "Which dimension is cut, and by what is it divided"),
    ("the shards in the wrong order", cut(REFUSE + "return torch.cat(tensor.chunk(world_size * stride, dim)[world_size - 1 - rank :: world_size], dim)"), "the pieces of another"),
    ("returns a view", cut(REFUSE + "pieces = tensor.chunk(world_size * stride, dim)[rank::world_size]\nreturn pieces[0] if stride == 1 else torch.cat(pieces, dim)"), "How many bytes does the shard keep alive"),
    ("contiguous() of a view", cut(REFUSE + "pieces = tensor.chunk(world_size * stride, dim)[rank::world_size]\nreturn pieces[0].contiguous() if stride == 1 else torch.cat(pieces, dim)"), "How many bytes does the shard keep alive"),
    ("always along dimension 0", cut(REFUSE + "return tensor.chunk(world_size * stride, 0)[rank].clone()"), "Which dimension is cut"),
    ("accepts any size", cut("return torch.cat(tensor.chunk(world_size * stride, dim)[rank::world_size], dim)"), "Raise ValueError and name the numbers"),
    ("drops what does not divide", cut("length = tensor.shape[dim] // (world_size * stride)\npieces = tensor.split(length, dim)\nreturn torch.cat(pieces[rank : world_size * stride : world_size], dim)"), "Raise ValueError and name the numbers"),
    ("counts dimensions from the front only", cut(REFUSE + "piece = n // (world_size * stride)\nblocks = tensor.reshape(*tensor.shape[:dim], stride, world_size, piece, *tensor.shape[dim + 1 :])\nreturn blocks.select(dim + 1, rank).flatten(dim, dim + 1).clone()"), "shard(a tensor of shape [5, 24], dim=-1, rank=0, world_size=1, stride=2) raised RuntimeError"),
    ("glues with a dimension counted from the front", cut(RIGHT_CUT, "if dim < 0:\n    raise IndexError(f'no dimension {dim}')\nblocks = [piece.chunk(stride, dim) for piece in shards]\nreturn torch.cat([piece for block in zip(*blocks) for piece in block], dim)"), "unshard(1 shards of shape [5, 24], dim=-1, stride=2) raised IndexError"),
    ("refuses what the blocks do not divide only", cut(RIGHT_CUT.replace("n % (world_size * stride)", "n % stride")), "6 rows can't be cut into 4 equal pieces"),
    ("asserts in place of raising ValueError", cut("assert tensor.shape[dim] % (world_size * stride) == 0\nreturn torch.cat(tensor.chunk(world_size * stride, dim)[rank::world_size], dim)"), "Raise ValueError and name the numbers"),
    ("raises without the numbers", cut(RIGHT_CUT.replace('f"{n} is not {stride} blocks of {world_size} pieces"', '"does not divide"')), "its message does not name"),
    ("returns zeros", cut(REFUSE + "return torch.zeros_like(torch.cat(tensor.chunk(world_size * stride, dim)[rank::world_size], dim))"), "rank 0 all zeros"),
    ("returns the whole", cut(REFUSE + "return tensor.clone()"), "it is the whole"),
    ("writes into the tensor", cut(RIGHT_CUT.replace("return ", "out = ") + "\ntensor.zero_()\nreturn out"), "The caller still needs the full tensor"),
    ("glues by concatenating", cut(RIGHT_CUT, "return torch.cat(shards, dim)"), "the full tensor starts with all of block 0"),
    ("glues along dimension 0", cut(RIGHT_CUT, "blocks = [piece.chunk(stride, 0) for piece in shards]\nreturn torch.cat([piece for block in zip(*blocks) for piece in block], 0)"), "Which dimension is cut"),
    ("glues the ranks in reverse", cut(RIGHT_CUT, "blocks = [piece.chunk(stride, dim) for piece in reversed(shards)]\nreturn torch.cat([piece for block in zip(*blocks) for piece in block], dim)"), "in which order do the pieces"),
    ("glues with the block number running first", cut(RIGHT_CUT, "p = len(shards)\nblocks = [piece.chunk(p, dim) for piece in shards]\nreturn torch.cat([piece for block in zip(*blocks) for piece in block], dim)"), "in which order do the pieces of all ranks"),
    ("glue returns the first shard", cut(RIGHT_CUT, "return shards[0].clone()"), "Which dimension is cut"),
    ("glue empties the shards", cut(RIGHT_CUT, "blocks = [piece.clone().chunk(stride, dim) for piece in shards]\n[piece.zero_() for piece in shards]\nreturn torch.cat([piece for block in zip(*blocks) for piece in block], dim)"), "The caller still needs the full tensor and the shards"),
]  # fmt: skip


def init(body: str) -> str:
    return f"""
def init_from_master(param, full_shape, init_method, group=None):
    sharding = param.tensor_parallel
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
{indented(body, 4)}
"""


INIT_BODY = """
master = torch.empty(full_shape, dtype=param.dtype, device=param.device)
init_method(master)
with torch.no_grad():
    param.copy_(shard(master, sharding.dim, rank, world_size, stride=sharding.stride))
"""
COPY = "param.copy_(shard(master, sharding.dim, rank, world_size, stride=sharding.stride))"

INIT = [
    ("draws the shard directly", init("with torch.no_grad():\n    init_method(param)"), "At which shape must they be drawn"),
    ("draws the shard directly, from a seed per rank", init("torch.manual_seed(1234 + rank)\nwith torch.no_grad():\n    init_method(param)"), "Which of these is different in your function"),
    ("ignores the stride", init(swap(INIT_BODY, ", stride=sharding.stride", "")), "say about it beside the dimension"),
    ("always cuts along dimension 0", init(swap(INIT_BODY, "sharding.dim, rank", "0, rank")), "does the shape of what you copy fit the shard"),
    ("sets a seed", init("torch.manual_seed(0)\n" + INIT_BODY.strip()), "from the seed that the caller set"),
    ("a generator of its own, state put back", init("state = torch.get_rng_state()\n" + INIT_BODY.strip() + "\ntorch.set_rng_state(state)"), "with the same random numbers as the first"),
    ("master in the default dtype", init(swap(INIT_BODY, "dtype=param.dtype, ", "")), "the shard of a master that was drawn in float32"),
    ("master with no dtype and no device", init(swap(INIT_BODY, ", dtype=param.dtype, device=param.device", "")), "Which dtype has a tensor that `torch.empty` makes"),
    ("the rank of the whole world picks the piece", init("rank = dist.get_rank()\n" + INIT_BODY.strip()), "Which call was not given it"),
    ("rank 0 draws and broadcasts", init(swap(INIT_BODY, "with torch.no_grad():", "dist.broadcast(master, 0 if group is None else dist.get_global_rank(group, 0), group=group)\nwith torch.no_grad():")), "what does it need the others for"),
    ("rank 0 alone draws", init("master = torch.empty(full_shape, dtype=param.dtype, device=param.device)\nif rank == 0:\n    init_method(master)\ndist.broadcast(master, 0 if group is None else dist.get_global_rank(group, 0), group=group)\nwith torch.no_grad():\n    " + COPY), "the random generator is not where one process would have it"),
    ("the master is kept alive by a view", init(swap(INIT_BODY, COPY, "pieces = master.chunk(world_size * sharding.stride, sharding.dim)[rank::world_size]\n    param.data = pieces[0] if len(pieces) == 1 else torch.cat(pieces, sharding.dim)")), "How do you change the numbers without replacing the memory"),
    ("makes a new parameter that nobody keeps", init(swap(INIT_BODY, COPY, "param = nn.Parameter(shard(master, sharding.dim, rank, world_size, stride=sharding.stride))")), "still has its old values"),
    ("copies outside no_grad", init("master = torch.empty(full_shape, dtype=param.dtype, device=param.device)\ninit_method(master)\n" + COPY), "only under `torch.no_grad()`"),
    ("forgets what xavier is told", init("master = torch.empty(full_shape[0], dtype=param.dtype, device=param.device)\ninit_method(master)\nwith torch.no_grad():\n    " + COPY), "It was called as init_from_master(param [8, 6] with Sharding(dim=0, stride=1), (8, 6), xavier_normal_, group)"),
    ("switches the gradient off", init("param.requires_grad_(False)\n" + INIT_BODY.strip()), "still a leaf that requires a gradient"),
    ("rank of the whole world", init("rank = dist.get_rank() % world_size\n" + INIT_BODY.strip()), "default group of all ranks"),
    ("every rank takes the shard of rank 0", init(swap(INIT_BODY, "sharding.dim, rank,", "sharding.dim, 0,")), "Which argument decides which piece is taken"),
    ("draws once for every rank", init("master = torch.empty(full_shape, dtype=param.dtype, device=param.device)\nfor _ in range(rank + 1):\n    init_method(master)\nwith torch.no_grad():\n    " + COPY), "Which of these is different in your function"),
    ("does nothing", init("pass"), "still has its old values"),
    ("zeros", init("with torch.no_grad():\n    param.zero_()"), "rank 0 all zeros"),
]  # fmt: skip


LOAD_BODY = """
with torch.no_grad():
    for name, param in module.named_parameters():
        value = full_state[name]
        sharding = getattr(param, "tensor_parallel", None)
        if sharding is not None:
            value = shard(value, sharding.dim, rank, world_size, stride=sharding.stride)
        param.copy_(value)
"""
SAVE_BODY = """
full_state = {}
for name, param in module.named_parameters():
    value = param.detach().clone(memory_format=torch.contiguous_format)
    sharding = getattr(param, "tensor_parallel", None)
    if sharding is not None and world_size > 1:
        shards = [torch.empty_like(value) for _ in range(world_size)]
        dist.all_gather(shards, value, group=group)
        value = unshard(shards, sharding.dim, stride=sharding.stride)
    full_state[name] = value
return full_state
"""


def load_save(load: str = LOAD_BODY, save: str = SAVE_BODY) -> str:
    return f"""
def load_full_state_dict(module, full_state, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
{indented(load, 4)}


def full_state_dict(module, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
{indented(save, 4)}
"""


LOAD_SAVE = [
    ("load ignores the stride", load_save(swap(LOAD_BODY, ", stride=sharding.stride", "")), "Only the fused weight is wrong"),
    ("load cuts everything along dimension 0", load_save(swap(LOAD_BODY, "sharding.dim, rank", "0, rank")), "which two shapes met"),
    ("load cuts the replicated parameters too", load_save("with torch.no_grad():\n    for name, param in module.named_parameters():\n        sharding = getattr(param, 'tensor_parallel', Sharding(0))\n        param.copy_(shard(full_state[name], sharding.dim, rank, world_size, stride=sharding.stride))"), "A replicated parameter has no `tensor_parallel`"),
    ("load skips the replicated parameters", load_save(swap(LOAD_BODY, "    param.copy_(value)", "        param.copy_(value)")), "Which ones does your loop leave out"),
    ("load gives every rank the first shard", load_save(swap(LOAD_BODY, "sharding.dim, rank", "sharding.dim, 0")), "A rank got the shard of another rank"),
    ("load replaces param.data", load_save(swap(LOAD_BODY, "param.copy_(value)", "param.data = value")), "Is the parameter a copy"),
    ("load replaces param.data by a copy", load_save(swap(LOAD_BODY, "param.copy_(value)", "param.data = value.clone()")), "without making a new one"),
    ("load makes new parameters", load_save("for name, param in list(module.named_parameters()):\n    value = full_state[name]\n    sharding = getattr(param, 'tensor_parallel', None)\n    if sharding is not None:\n        value = shard(value, sharding.dim, rank, world_size, stride=sharding.stride)\n    path, _, last = name.rpartition('.')\n    setattr(module.get_submodule(path), last, nn.Parameter(value.clone()))"), "without making a new one"),
    ("load outside no_grad", load_save(swap(LOAD_BODY, "with torch.no_grad():", "if True:")), "only under `torch.no_grad()`"),
    ("load only for the module's own parameters", load_save(swap(LOAD_BODY, "module.named_parameters()", "module.named_parameters(recurse=False)")), "Which ones does your loop leave out"),
    ("load broadcasts from rank 0", load_save(swap(LOAD_BODY, "value = full_state[name]", "value = full_state[name].clone()\n        dist.broadcast(value, 0 if group is None else dist.get_global_rank(group, 0), group=group)")), "What is there to communicate"),
    ("load with the rank of the whole world", load_save("rank = dist.get_rank() % world_size\n" + LOAD_BODY.strip()), "default group of all ranks"),
    ("load with a rank that the group does not have", load_save("rank = dist.get_rank()\n" + LOAD_BODY.strip()), "loading and saving, in groups [0, 2] and [1, 3]: your code fails"),
    ("save counts the ranks of the whole world", load_save(save="world_size = dist.get_world_size()\n" + SAVE_BODY.strip()), "was not given `group`"),
    ("load does nothing", load_save("pass"), "Which ones does your loop leave out"),
    ("save returns the shards", load_save(save=swap(SAVE_BODY, "if sharding is not None and world_size > 1:", "if False:")), "How does it get those of the others"),
    ("save glues without the stride", load_save(save=swap(SAVE_BODY, ", stride=sharding.stride", "")), "its shards were glued one after another"),
    ("save glues everything along dimension 0", load_save(save=swap(SAVE_BODY, "unshard(shards, sharding.dim, stride=sharding.stride)", "unshard(shards, 0, stride=sharding.stride)")), "Along which dimension did you glue it"),
    ("save glues the replicated parameters too", load_save(save=swap(swap(SAVE_BODY, "None)", "Sharding(0))"), "sharding is not None and ", "")), "What happens if its p copies are glued together"),
    ("save adds up the replicated parameters", load_save(save=swap(SAVE_BODY, "    full_state[name] = value", "    if sharding is None:\n        dist.all_reduce(value, group=group)\n    full_state[name] = value")), "Why add up its copies"),
    ("save gathers the replicated parameters for nothing", load_save(save=swap(SAVE_BODY, "    full_state[name] = value", "    if sharding is None and world_size > 1:\n        dist.all_gather([torch.empty_like(value) for _ in range(world_size)], value, group=group)\n    full_state[name] = value")), "The numbers are right, the communication is not"),
    ("save hands out the parameters themselves", load_save(save=swap(SAVE_BODY, "param.detach().clone(memory_format=torch.contiguous_format)", "param.detach()")), "shares memory with the parameters"),
    ("save keeps the autograd history", load_save(save=swap(SAVE_BODY, "value = param.detach().clone(memory_format=torch.contiguous_format)", "value = param * 1")), "Which call cuts a tensor off from autograd"),
    ("save leaves out the replicated parameters", load_save(save=swap(SAVE_BODY, "    if sharding is not None and world_size > 1:", "    if sharding is None:\n        continue\n    if world_size > 1:")), "Which names does the full state dict"),
    ("save returns it on rank 0 only", load_save(save=swap(SAVE_BODY, "return full_state", "return full_state if rank == 0 else None")), "What does the function return, on every rank"),
    ("save returns an empty dictionary", load_save(save="return {}"), "Which names does the full state dict"),
    ("save all-reduces shards laid into zeros: right numbers, wrong communication", load_save(save=swap(swap(SAVE_BODY, "shards = [torch.empty_like(value) for _ in range(world_size)]", "shards = [value if r == rank else torch.zeros_like(value) for r in range(world_size)]"), "        dist.all_gather(shards, value, group=group)\n        value = unshard(shards, sharding.dim, stride=sharding.stride)", "        value = unshard(shards, sharding.dim, stride=sharding.stride).contiguous()\n        dist.all_reduce(value, group=group)")), "The numbers are right, the communication is not"),
    ("save gathers in the default group", load_save(save=swap(SAVE_BODY, "value, group=group)", "value)").replace("range(world_size)]", "range(dist.get_world_size())]")), "default group of all ranks"),
    ("save empties the model", load_save(save=swap(SAVE_BODY, "return full_state", "with torch.no_grad():\n    [param.zero_() for param in module.parameters()]\nreturn full_state")), "Saving changed the model"),
]  # fmt: skip

WRONG = [
    WrongAnswer(exercise=exercise, name=name, source=source, says=says)
    for exercise, answers in (("4.1", COLUMN), ("4.2", ROW), ("4.3", CUT), ("4.4", INIT), ("4.5", LOAD_SAVE))
    for name, source, says in answers
]
