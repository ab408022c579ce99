"""Wrong answers to the exercises of chapter 04, and what each must be told. The "shipped" one was in released code."""

import ast
import re
from functools import partial
from textwrap import dedent

from tests.wrong_answers import WrongAnswer, chapter_of, indented, swap, swap_all
from tplab.course.notebooks.rewrite import keep_solution


def parts(exercise: str, function: str) -> tuple[str, str, str]:
    """The chapter's solution, without comments: the text before a function's body, the body, and the text after it."""
    text = re.sub(r" +# .*", "", keep_solution(chapter_of(exercise).of_role("exercise")[exercise].text)) + "\n"
    defs = {node.name: node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
    start = defs[function].body[ast.get_docstring(defs[function]) is not None].lineno - 1
    lines, end = text.splitlines(keepends=True), defs[function].end_lineno
    return "".join(lines[:start]), dedent("".join(lines[start:end])), "".join(lines[end:])


def program(exercise: str, function: str, body: str, *pairs: tuple[str, str], extra: str = "") -> str:
    """The solution with another body of a function, each (old, new) swapped before that body, and `extra` on top."""
    before, _, after = parts(exercise, function)
    return f"{extra}\n\n{swap_all(before, *pairs)}{indented(body, 8 if function == 'forward' else 4)}\n{after}"


FUNCTIONS = (("4.1", "forward"), ("4.2", "forward"), ("4.3", "shard"), ("4.3", "unshard"), ("4.4", "init_shard"), ("4.5", "load_full_state_dict"), ("4.5", "full_state_dict"))  # fmt: skip
COLUMN, ROW, SHARD, UNSHARD, INIT, LOAD, SAVE = (parts(*function)[1] for function in FUNCTIONS)
column, row, shard, unshard, init, load, save = (partial(program, *function) for function in FUNCTIONS)

OPERATOR = """
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
APPLY_F, F_LINE = "copy_to_region(x, self.group)", "x = copy_to_region(x, self.group)\n"
APPLY_G, G_LINE = "reduce_from_region(out, self.group)", "out = reduce_from_region(out, self.group)\n"
LAST = "return out if self.bias is None else out + self.bias"
ZEROS = "out = torch.zeros(*x.shape[:-1], len(self.weight), device=x.device, dtype=x.dtype)\nreturn (out, self.bias) if self.skip_bias_add else out"
LOCAL = "out = F.linear(x, self.weight, None if self.skip_bias_add else self.bias)\nreturn (out, self.bias) if self.skip_bias_add else out"
REFUSE, TAKE = SHARD[: SHARD.index("pieces = ")], SHARD[SHARD.index("pieces = ") :]
FIRST = "0 if group is None else dist.get_global_rank(group, 0)"

COLUMN_ANSWERS = [
    ("f is missing", column(swap(COLUMN, F_LINE, "")), "so it has just one of the p terms"),
    ("f twice", column(swap(COLUMN, APPLY_F, f"copy_to_region({APPLY_F}, self.group)")), "How many times does your layer sum the gradient of x"),
    ("f after the product", column(swap_all(COLUMN, (F_LINE, ""), ("if self.gather", "out = copy_to_region(out, self.group)\nif self.gather"))), "Did you apply the operator f to the layer's input or to its output"),
    ("f is a mean", column(swap(COLUMN, "copy_to_region(x", "OwnOperator.apply(x"), extra=OPERATOR.format(forward="x = x.view_as(x)", backward="dy = dy.clone(); dist.all_reduce(dy, group=ctx.group); dy = dy / dist.get_world_size(ctx.group)")), "should dx be the sum of the terms from all ranks or their mean"),
    ("f starts an all-reduce and does not use it", column(swap(COLUMN, "copy_to_region(x", "OwnOperator.apply(x"), extra=OPERATOR.format(forward="x = x.view_as(x)", backward="total = dy.clone(); dist.all_reduce(total, group=ctx.group, async_op=True)")), "What should you do with that request"),
    ("g in place of f", column(swap(COLUMN, "copy_to_region", "reduce_from_region")), "What should this rank's columns of Y = X A + b contain"),
    ("all-reduces the replicated input and divides by p: right numbers, wrong communication", column("total = x.detach().clone()\ndist.all_reduce(total, group=self.group)\nx = x + (total / dist.get_world_size(self.group) - x).detach()\n" + COLUMN), "Where does your code differ from this table"),
    ("no communication at all", column(LOCAL), "so it has just one of the p terms"),
    ("returns zeros", column(ZEROS), "rank 0 all zeros"),
    ("always gathers", column(swap(COLUMN, "if self.gather_output:", "if True:")), "each rank should return only the columns that it computed itself"),
    ("never gathers", column(swap(COLUMN, "if self.gather_output:", "if False:")), "With `gather_output`, every rank should return"),
    ("gathers with dist.all_gather, unknown to autograd", column(swap(COLUMN, "out = gather_from_region(out, self.group)", "parts = [torch.empty_like(out) for _ in range(dist.get_world_size(self.group))]\n    dist.all_gather(parts, out.contiguous(), group=self.group)\n    out = torch.cat(parts, dim=-1)")), "is invisible to autograd"),
    ("gathers along the first dimension", column(swap(COLUMN, "gather_from_region(out, self.group)", "gather_from_region(out.movedim(0, -1), self.group).movedim(-1, 0)")), "concatenated along the last dimension"),
    ("gathers in the wrong order", column(swap(COLUMN, "gather_from_region(out, self.group)", "torch.cat(gather_from_region(out, self.group).chunk(dist.get_world_size(self.group), -1)[::-1], -1)")), "with rank 0's columns first"),
    ("forgets the return without skip_bias_add", column(swap(COLUMN, "return (out, self.bias) if self.skip_bias_add else out", "if self.skip_bias_add:\n    return out, self.bias")), "Which branch of `forward` is missing a `return`"),
    ("forgets the bias", column(swap(COLUMN, "None if self.skip_bias_add else self.bias", "None")), "Which line should add this rank's slice"),
    ("adds the bias twice", column(swap(COLUMN, "return (out", "if self.bias is not None and not self.gather_output and not self.skip_bias_add:\n    out = out + self.bias\nreturn (out")), "The output includes the bias twice"),
    ("adds the bias after the gather", column(swap_all(COLUMN, ("None if self.skip_bias_add else self.bias", "None"), ("return (out", "if self.bias is not None and not self.skip_bias_add:\n    out = out + self.bias\nreturn (out"))), "Which two tensor shapes in your code don't match"),
    ("every rank keeps the whole bias", column(COLUMN, ("(divide(out_features, world_size),)", "(out_features,)")), "How many output features does this rank compute"),
    ("bias although bias=False", column(COLUMN, ("if bias:", "if True:")), "should the layer have a bias at all"),
    ("the bias is detached", column(swap(COLUMN, "None if self.skip_bias_add else self.bias", "None if self.skip_bias_add or self.bias is None else self.bias.detach()")), "No gradient reaches the bias"),
    ("skip_bias_add is ignored", column(swap_all(COLUMN, ("None if self.skip_bias_add else self.bias", "self.bias"), ("(out, self.bias) if self.skip_bias_add else out", "out"))), "What should the layer return"),
    ("skip_bias_add adds the bias and hands it back", column(swap(COLUMN, "None if self.skip_bias_add else self.bias", "self.bias")), "returns its bias, and the caller adds it"),
    ("always returns a pair", column(swap(COLUMN, " if self.skip_bias_add else out", "")), "What should the layer return"),
    ("returns the output alone when there is no bias", column(swap(COLUMN, "if self.skip_bias_add else out", "if self.skip_bias_add and self.bias is not None else out")), "even if there's no bias"),
    ("crashes without a bias", column(swap_all(COLUMN, ("None if self.skip_bias_add else self.bias", "None"), ("if self.gather", "if not self.skip_bias_add:\n    out = out + self.bias\nif self.gather"))), "p = 1, ColumnParallelLinear(12, 8, bias=False): your code fails"),
    ("asks a bias that is not there for its dtype", column("x = x.to(self.bias.dtype)\n" + COLUMN), "built with `bias=False`, so `self.bias` is None"),
    ("splits the input features", column(COLUMN, ("(divide(out_features, world_size), in_features)", "(out_features, divide(in_features, world_size))")), "Does a column-parallel layer split the output features or"),
    ("transposed weight, as in the papers", column(swap(COLUMN, "self.weight", "self.weight.T"), ("(divide(out_features, world_size), in_features)", "(in_features, divide(out_features, world_size))")), "`weight` has the shape [output features, input features]"),
    ("every rank holds the whole weight and slices the output", column("rank, p = dist.get_rank(self.group), dist.get_world_size(self.group)\n" + swap_all(LOCAL, ("F.linear(x", f"F.linear({APPLY_F}"), ("self.bias)\n", "self.bias).chunk(p, -1)[rank]\n")), ("divide(out_features, world_size)", "out_features")), "How many input features and how many output features does each rank keep"),
    ("drops what does not divide", column(COLUMN, ("divide(out_features, world_size)", "out_features // world_size")), "silently dropped"),
    ("refuses with an assert", column(COLUMN, ("self.group = group\n", "self.group = group\n        assert out_features % dist.get_world_size(group) == 0\n")), "it raised AssertionError instead of"),
    ("detaches the input", column("x = x.detach()\n" + COLUMN), "No gradient reaches the input"),
    ("uses weight.data", column(swap(COLUMN, "self.weight", "self.weight.data")), "No gradient reaches the weight"),
    ("writes into the input", column("x.data.mul_(2)\n" + swap_all(COLUMN, (F_LINE, ""), ("F.linear(x", "F.linear(copy_to_region(x / 2, self.group) * 2 / 2"))), "The caller still needs the tensors"),
    ("only for two dimensions", column(swap(COLUMN, "F.linear(x, self.weight, None if self.skip_bias_add else self.bias)", "x.mm(self.weight.T)\nif self.bias is not None and not self.skip_bias_add:\n    out = out + self.bias")), "For this layer, x is [.., in]"),
    ("the group is not passed to f", column(swap(COLUMN, APPLY_F, "copy_to_region(x)")), "the default group, which contains all ranks"),
    ("the group is not passed to the gather", column(swap(COLUMN, "gather_from_region(out, self.group)", "gather_from_region(out)")), "the default group, which contains all ranks"),
    ("the whole world's size decides the shape", column(COLUMN, ("divide(out_features, world_size)", "divide(out_features, dist.get_world_size())")), "the default group, which contains all ranks"),
    ("divides the upstream gradient away with a trick: scales the output, right forward", column(swap(COLUMN, "if self.gather", "out = out.detach() + (out - out.detach()) / dist.get_world_size(self.group)\nif self.gather")), "1/2 of the correct tensor"),
    ("the attribute is lost", column(COLUMN, ("self.weight.tensor_parallel = Sharding(dim=0, stride=stride)", "")), "Does the constructor still set `tensor_parallel` correctly"),
    ("the bias is marked without the stride", swap(column(COLUMN), "self.bias.tensor_parallel = Sharding(dim=0, stride=stride)", "self.bias.tensor_parallel = Sharding(dim=0)"), "the attribute also needs the stride"),
    ("insists that p divides the input features", column(COLUMN, ("self.group = group\n", "self.group = group\n        divide(in_features, dist.get_world_size(group))\n")), "the dimension that every rank keeps in full"),
]  # fmt: skip

ROW_ANSWERS = [
    ("the bias is added on every rank, before the all-reduce (shipped)", row(swap_all(ROW, ("self.weight)", "self.weight, None if self.skip_bias_add else self.bias)"), (LAST, "return out"))), "How many times does your layer add the bias"),
    ("bias / p before the all-reduce", row(swap_all(ROW, (G_LINE, "if self.bias is not None and not self.skip_bias_add:\n    out = out + self.bias / dist.get_world_size(self.group)\n" + G_LINE), (LAST, "return out"))), "learn p times too slowly"),
    ("the bias is added on rank 0 only", row("first = dist.get_rank(self.group) == 0 and not self.skip_bias_add\n" + swap_all(ROW, ("self.weight)", "self.weight, self.bias if first else None)"), (LAST, "return out"))), "copies of the bias will differ"),
    ("g twice", row(swap(ROW, G_LINE, G_LINE * 2)), "Which terms of this formula can this rank compute"),
    ("g is missing", row(swap(ROW, G_LINE, "")), "only this rank's partial sum. Which"),
    ("g reduces in the backward pass too", row(swap(ROW, "reduce_from_region", "OwnOperator.apply"), extra=OPERATOR.format(forward="x = x.clone(); dist.all_reduce(x, group=group)", backward="dy = dy.clone(); dist.all_reduce(dy, group=ctx.group)")), "What should the operator g do with dY"),
    ("torch.distributed.nn.functional.all_reduce", row(swap(ROW, APPLY_G, "all_reduce(out, group=self.group or dist.group.WORLD)"), extra="from torch.distributed.nn.functional import all_reduce"), "What should the operator g do with dY"),
    ("f in place of g", row(swap(ROW, "reduce_from_region", "copy_to_region")), "only this rank's partial sum. Which"),
    ("f around g", row(swap(ROW, APPLY_G, f"copy_to_region({APPLY_G}, self.group)")), "At least one gradient is p times too large"),
    ("f on the input", row(swap(ROW, "F.linear(x", f"F.linear({APPLY_F}")), "sums the gradients of all these different slices"),
    ("mean in place of sum", row(swap(ROW, APPLY_G, f"{APPLY_G} / dist.get_world_size(self.group)")), "Should Y be the sum of the terms from all ranks or their mean"),
    ("mean forward, sum backward by a trick", row(swap(ROW, LAST, f"out = out * 1.0\nout = out.detach() * dist.get_world_size(self.group) - out.detach() * (dist.get_world_size(self.group) - 1) + (out - out.detach()) * dist.get_world_size(self.group)\n{LAST}")), "At least one gradient is p times too large"),
    ("dist.all_reduce in the forward pass, its result dropped", row(swap(ROW, G_LINE, "total = out.detach().contiguous().clone()\ndist.all_reduce(total, group=self.group)\n")), "Does your code use the tensor returned by this operator"),
    ("returns what dist.all_reduce returns", row(swap(ROW, G_LINE, "return dist.all_reduce(out, group=self.group)\n")), "works in place and returns None"),
    ("all_gather and sum: right numbers, wrong communication", row(swap(ROW, G_LINE, "parts = [torch.empty_like(out) for _ in range(dist.get_world_size(self.group))]\ndist.all_gather(parts, out.detach().contiguous(), group=self.group)\nout = out + (sum(parts) - out).detach()\n")), "Where does your code differ from this table"),
    ("returns zeros", row(ZEROS), "rank 0 all zeros"),
    ("no communication at all", row(LOCAL), "only this rank's partial sum. Which"),
    ("forgets the bias", row(swap(ROW, LAST, "return out")), "The output doesn't include the bias. Which line"),
    ("adds the bias before and after", row(swap(ROW, "self.weight)", "self.weight, None if self.skip_bias_add or dist.get_rank(self.group) else self.bias)")), "The output includes the bias twice"),
    ("adds a detached bias", row(swap(ROW, "out + self.bias", "out + self.bias.detach()")), "the bias receives no gradient on some ranks"),
    ("all-reduces the gradient of the bias", row(swap(ROW, "out + self.bias", "out + copy_to_region(self.bias, self.group)")), "Which line sums the bias gradients across ranks"),
    ("slices the bias", row(ROW, ("(out_features,)", "(divide(out_features, world_size),)")), "how many elements does its bias need"),
    ("bias although bias=False", row(ROW, (" if bias else None", "")), "should the layer have a bias at all"),
    ("splits the output features", row(ROW, ("(out_features, divide(in_features, world_size))", "(divide(out_features, world_size), in_features)")), "Does a row-parallel layer split the output features or"),
    ("every rank holds the whole weight", row("rank, p = dist.get_rank(self.group), dist.get_world_size(self.group)\n" + swap_all(ROW, ("scatter_to_region(x, self.group)", "x.chunk(p, -1)[rank]"), ("self.weight", "self.weight.chunk(p, 1)[rank]")), ("divide(in_features, world_size)", "in_features")), "How many input features and how many output features does each rank keep"),
    ("drops what does not divide", row(ROW, ("divide(in_features, world_size)", "in_features // world_size")), "silently dropped"),
    ("slices an input that is sliced already", row(swap(ROW, "if not self.input_is_parallel:", "if True:")), "Is x already sharded when your layer receives it"),
    ("never slices the input", row(swap(ROW, "if not self.input_is_parallel:", "if False:")), "Is x already sharded when your layer receives it"),
    ("slices the replicated input with chunk, no way back", row(swap(ROW, "scatter_to_region(x, self.group)", "x.chunk(dist.get_world_size(self.group), -1)[dist.get_rank(self.group)]")), "Which operator takes a slice in the forward pass"),
    ("slices with chunk and puts f before it: right numbers, wrong communication", row(swap(ROW, "scatter_to_region(x, self.group)", f"{APPLY_F}.chunk(dist.get_world_size(self.group), -1)[dist.get_rank(self.group)]")), "Where does your code differ from this table"),
    ("skip_bias_add is ignored", row(swap(ROW, "if self.skip_bias_add:", "if False:")), "What should the layer return"),
    ("skip_bias_add adds the bias and hands it back", row(swap_all(ROW, (G_LINE, G_LINE + "out = out if self.bias is None else out + self.bias\n"), (LAST, "return out"))), "returns its bias, and the caller adds it"),
    ("the bias inside F.linear with skip_bias_add", row(swap(ROW, "self.weight)", "self.weight, self.bias if self.skip_bias_add else None)")), "p = 1, RowParallelLinear(12, 8, skip_bias_add=True)"),
    ("the bias inside F.linear with skip_bias_add, on more than one rank", row("inside = self.skip_bias_add and dist.get_world_size(self.group) > 1\n" + swap(ROW, "self.weight)", "self.weight, self.bias if inside else None)")), "Which line adds the bias anyway"),
    ("always returns a pair", row(swap(ROW, LAST, LAST + ", None")), "What should the layer return"),
    ("crashes without a bias", row(swap(ROW, LAST, "return out + self.bias")), "p = 1, RowParallelLinear(12, 8, bias=False): your code fails"),
    ("puts a bias that is not there on the device", row("bias = self.bias.to(x.device)\n" + swap(ROW, "out + self.bias", "out + bias")), "built with `bias=False`, so `self.bias` is None"),
    ("f before the scatter", row(swap(ROW, "scatter_to_region(x", f"scatter_to_region({APPLY_F}")), "is there anything left to sum"),
    ("f after the scatter", row(swap(ROW, "scatter_to_region(x, self.group)", "copy_to_region(scatter_to_region(x, self.group), self.group)")), "p = 2, RowParallelLinear(12, 8, input_is_parallel=False)"),
    ("the rank of the whole world takes the slice", row(swap(ROW, "scatter_to_region(x, self.group)", "scatter_to_region(x, self.group) + 0 * x.narrow(-1, dist.get_rank() * self.weight.shape[1], self.weight.shape[1])")), "uses the default group of all ranks instead"),
    ("detaches the sum", row(swap(ROW, APPLY_G, f"{APPLY_G}.detach()")), "No gradient reaches the weight"),
    ("writes into the input", row("x.data.neg_()\n" + swap(ROW, "F.linear(x", "F.linear(-x")), "The caller still needs the tensors"),
    ("the group is not passed to g", row(swap(ROW, APPLY_G, "reduce_from_region(out)")), "the default group, which contains all ranks"),
    ("the group is not passed to the scatter", row(swap(ROW, "scatter_to_region(x, self.group)", "scatter_to_region(x)")), "instead of `self.group`"),
    ("the attribute names the wrong dimension", row(ROW, ("Sharding(dim=1", "Sharding(dim=0")), "Does the constructor still set `tensor_parallel` correctly"),
    ("insists that p divides the output features", row(ROW, ("self.group = group\n", "self.group = group\n        divide(out_features, dist.get_world_size(group))\n")), "the dimension that every rank keeps in full"),
    ("the bias is marked as a shard", row(ROW, ("if bias else None\n", "if bias else None\n        if bias:\n            self.bias.tensor_parallel = Sharding(dim=0, stride=stride)\n")), "A replicated parameter must not have the attribute"),
]  # fmt: skip

CUT_ANSWERS = [
    ("ignores the stride", shard(REFUSE + "return tensor.chunk(world_size, dim)[rank].clone()"), "and a rank needs its slice of each"),
    ("takes every p-th row", shard(REFUSE + "return tensor.movedim(dim, 0)[rank::world_size].movedim(0, dim).clone()"), "contiguous rows"),
    ("takes the p-th pieces in a row", shard(swap(SHARD, "[rank::world_size]", "[rank * stride : (rank + 1) * stride]")), "and a rank needs its slice of each"),
    ("p and stride swapped", shard(swap(SHARD, "[rank::world_size]", "[rank::stride][:stride]")), "Along which dimension does your code split or concatenate"),
    ("the shards in the wrong order", shard(swap(SHARD, "rank::", "world_size - 1 - rank ::")), "one rank ended up with another rank's slices"),
    ("returns a view", shard(swap(SHARD, "return ", "return pieces[rank] if stride == 1 else ")), "How many bytes of memory stay allocated for as long as your shard exists"),
    ("contiguous() of a view", shard(swap(SHARD, "return ", "return pieces[rank].contiguous() if stride == 1 else ")), "How many bytes of memory stay allocated for as long as your shard exists"),
    ("always along dimension 0", shard(REFUSE + "return tensor.chunk(world_size * stride, 0)[rank].clone()"), "Along which dimension does your code split or concatenate"),
    ("accepts any size", shard(TAKE), "Raise a ValueError whose message includes the size"),
    ("drops what does not divide", shard("length = tensor.shape[dim] // (world_size * stride)\npieces = tensor.split(length, dim)\nreturn torch.cat(pieces[rank : world_size * stride : world_size], dim)"), "Raise a ValueError whose message includes the size"),
    ("counts dimensions from the front only", shard(REFUSE + "piece = n // (world_size * stride)\nblocks = tensor.reshape(*tensor.shape[:dim], stride, world_size, piece, *tensor.shape[dim + 1 :])\nreturn blocks.select(dim + 1, rank).flatten(dim, dim + 1).clone()"), "shard(a tensor of shape [5, 24], dim=-1, rank=0, world_size=1, stride=2) raised RuntimeError"),
    ("glues with a dimension counted from the front", unshard("if dim < 0:\n    raise IndexError(f'no dimension {dim}')\n" + UNSHARD), "unshard(1 shards of shape [5, 24], dim=-1, stride=2) raised IndexError"),
    ("refuses what the blocks do not divide only", shard(swap(SHARD, "n % (world_size * stride)", "n % stride")), "12 rows, in 6 blocks, for 4 ranks should raise ValueError"),
    ("asserts in place of raising ValueError", shard("assert tensor.shape[dim] % (world_size * stride) == 0\n" + TAKE), "Raise a ValueError whose message includes the size"),
    ("raises without the numbers", shard('if tensor.shape[dim] % (world_size * stride):\n    raise ValueError("does not divide")\n' + TAKE), "its message doesn't mention"),
    ("returns zeros", shard(REFUSE + swap(TAKE, "torch.cat(pieces[rank::world_size], dim)", "torch.zeros_like(torch.cat(pieces[rank::world_size], dim))")), "rank 0 all zeros"),
    ("returns the whole", shard(REFUSE + "return tensor.clone()"), "it's the full tensor"),
    ("writes into the tensor", shard(swap(SHARD, "return ", "out = ") + "tensor.zero_()\nreturn out"), "The caller still needs the full tensor"),
    ("glues by concatenating", unshard("return torch.cat(shards, dim)"), "the full tensor must start with all the rows of the first block"),
    ("glues along dimension 0", unshard(swap(UNSHARD, "dim", "0")), "Along which dimension does your code split or concatenate"),
    ("glues the ranks in reverse", unshard(swap(UNSHARD, "in shards", "in reversed(shards)")), "In what order do the slices from all ranks"),
    ("glues with the block number running first", unshard(swap(UNSHARD, "chunk(stride", "chunk(len(shards)")), "In what order do the slices from all ranks"),
    ("glue returns the first shard", unshard("return shards[0].clone()"), "Along which dimension does your code split or concatenate"),
    ("glue empties the shards", unshard(swap_all(UNSHARD, ("piece.chunk", "piece.clone().chunk"), ("return", "[piece.zero_() for piece in shards]\nreturn"))), "The caller still needs the full tensor and the shards"),
]  # fmt: skip

INIT_ANSWERS = [
    ("draws the shard directly", init("with torch.no_grad():\n    init_method(param)"), "What's the shape of the tensor that a single process would fill"),
    ("draws the shard directly, from a seed per rank", init("torch.manual_seed(1234 + dist.get_rank(group))\nwith torch.no_grad():\n    init_method(param)"), "What does your function do differently"),
    ("ignores the stride", init(swap(INIT, ", stride=sharding.stride", "")), "What does `param.tensor_parallel` tell you besides the dimension"),
    ("always cuts along dimension 0", init(swap(INIT, "sharding.dim", "0")), "Does the tensor that you copy have the same shape as the shard"),
    ("sets a seed", init("torch.manual_seed(0)\n" + INIT), "A single process would call"),
    ("a generator of its own, state put back", init("state = torch.get_rng_state()\n" + INIT + "torch.set_rng_state(state)"), "reuses the random numbers of the first"),
    ("master in the default dtype", init(swap(INIT, "dtype=param.dtype, ", "")), "the shard of a full weight that was drawn in float32"),
    ("master with no dtype and no device", init(swap(INIT, ", dtype=param.dtype, device=param.device", "")), "Which dtype does `torch.empty` choose"),
    ("the rank of the whole world picks the piece", init(swap(INIT, "get_rank(group)", "get_rank()")), "Which of your calls doesn't pass `group`"),
    ("rank 0 draws and broadcasts", init(swap(INIT, "with torch", f"dist.broadcast(master, {FIRST}, group=group)\nwith torch")), "why would a rank need data from the other ranks"),
    ("rank 0 alone draws", init(swap(INIT, "init_method(master)", f"if dist.get_rank(group) == 0:\n    init_method(master)\ndist.broadcast(master, {FIRST}, group=group)")), "the random generator ends up in a different state"),
    ("the master is kept alive by a view", init(swap(INIT, "param.copy_(shard(master, sharding.dim, rank, world_size, stride=sharding.stride))", "pieces = master.chunk(world_size * sharding.stride, sharding.dim)[rank::world_size]\n    param.data = pieces[0] if len(pieces) == 1 else torch.cat(pieces, sharding.dim)")), "How do you change the parameter's elements in place"),
    ("makes a new parameter that nobody keeps", init(swap(INIT, "param.copy_(", "param = nn.Parameter(")), "still has its old values"),
    ("copies outside no_grad", init(swap(INIT, "with torch.no_grad():", "if True:")), "in place only under `torch.no_grad()`"),
    ("forgets what xavier is told", init(swap(INIT, "full_shape", "full_shape[0]")), "The call was init_shard(param [8, 6] with Sharding(dim=0, stride=1), (8, 6), xavier_normal_, group)"),
    ("switches the gradient off", init("param.requires_grad_(False)\n" + INIT), "should still be a leaf tensor"),
    ("rank of the whole world", init(swap(INIT, "get_rank(group)", "get_rank() % dist.get_world_size(group)")), "default group of all ranks"),
    ("every rank takes the shard of rank 0", init(swap(INIT, "sharding.dim, rank", "sharding.dim, 0")), "Which argument of `shard` determines which shard"),
    ("draws once for every rank", init(swap(INIT, "init_method(master)", "for _ in range(dist.get_rank(group) + 1):\n    init_method(master)")), "What does your function do differently"),
    ("does nothing", init("pass"), "still has its old values"),
    ("zeros", init("with torch.no_grad():\n    param.zero_()"), "rank 0 all zeros"),
    ("the master is kept as an attribute", init(INIT + "param.master_weight = master\n"), "still refers to the full weight"),
    ("uses what init_method returns", init(swap_all(INIT, ("init_method(master)\n", ""), ("torch.empty(full_shape, dtype=param.dtype, device=param.device)", "init_method(torch.empty(full_shape, dtype=param.dtype, device=param.device))"))), "it may return None"),
    ("one rank fills the parameter itself, outside no_grad", init("if dist.get_world_size(group) == 1:\n    return init_method(param)\n" + INIT), "in place only under `torch.no_grad()`"),
]  # fmt: skip

LOAD_SAVE_ANSWERS = [
    ("load ignores the stride", load(swap(LOAD, ", stride=sharding.stride", "")), "Only the fused layer is wrong"),
    ("load cuts everything along dimension 0", load(swap(LOAD, "sharding.dim", "0")), "check how you split that parameter"),
    ("load cuts the replicated parameters too", load(swap(LOAD, "None)", "Sharding(0))")), "A replicated parameter has no `tensor_parallel`"),
    ("load skips the replicated parameters", load(swap(LOAD, "param.copy_(value)", "    param.copy_(value)")), "Which parameters does your loop skip"),
    ("load gives every rank the first shard", load(swap(LOAD, "sharding.dim, rank", "sharding.dim, 0")), "A rank loaded another rank's shard"),
    ("load replaces param.data", load(swap(LOAD, "param.copy_(value)", "param.data = value")), "Does any parameter share memory with a tensor in the dictionary"),
    ("load replaces param.data by a copy", load(swap(LOAD, "param.copy_(value)", "param.data = value.clone()")), "overwrite a parameter's elements in place"),
    ("load makes new parameters", load(swap_all(LOAD, ("module.named_parameters()", "list(module.named_parameters())"), ("param.copy_(value)", "path, _, last = name.rpartition('.')\n        setattr(module.get_submodule(path), last, nn.Parameter(value.clone()))"))), "overwrite a parameter's elements in place"),
    ("load outside no_grad", load(swap(LOAD, "with torch.no_grad():", "if True:")), "wrap that operation in `torch.no_grad()`"),
    ("load only for the module's own parameters", load(swap(LOAD, "named_parameters()", "named_parameters(recurse=False)")), "Which parameters does your loop skip"),
    ("load broadcasts from rank 0", load(swap(LOAD, "full_state[name]", f"full_state[name].clone()\n        dist.broadcast(value, {FIRST}, group=group)")), "so why would the ranks need to communicate"),
    ("load with the rank of the whole world", load(swap(LOAD, "get_rank(group)", "get_rank() % dist.get_world_size(group)")), "default group of all ranks"),
    ("load with a rank that the group does not have", load(swap(LOAD, "get_rank(group)", "get_rank()")), "loading and saving, in groups [0, 2] and [1, 3]: your code fails"),
    ("save counts the ranks of the whole world", save(swap(SAVE, "get_world_size(group)", "get_world_size()")), "Which of your calls doesn't pass `group`"),
    ("load does nothing", load("pass"), "Which parameters does your loop skip"),
    ("save returns the shards", save(swap(SAVE, "if sharding is not None and world_size > 1:", "if False:")), "Which collective gives every rank the other ranks' shards"),
    ("save glues without the stride", save(swap(SAVE, ", stride=sharding.stride", "")), "so concatenating the shards isn't enough"),
    ("save glues everything along dimension 0", save(swap(SAVE, "sharding.dim", "0")), "Along which dimension does your code concatenate the shards"),
    ("save glues everything along the last dimension", save(swap(SAVE, "sharding.dim", "-1")), "Along which dimension does your code join the shards"),
    ("save glues the replicated parameters too", save(swap(SAVE, "None)", "Sharding(0))")), "What do you get if you concatenate p copies of the same parameter"),
    ("save adds up the replicated parameters", save(swap(SAVE, "    full_state[name]", "    if sharding is None:\n        dist.all_reduce(value, group=group)\n    full_state[name]")), "so why would you sum these copies"),
    ("save gathers the replicated parameters for nothing", save(swap(SAVE, "    full_state[name]", "    if sharding is None and world_size > 1:\n        dist.all_gather([torch.empty_like(value) for _ in range(world_size)], value, group=group)\n    full_state[name]")), "The values are all correct, but your function doesn't run the expected collectives"),
    ("save hands out the parameters themselves", save(swap(SAVE, ".clone(memory_format=torch.contiguous_format)", "")), "so they must share memory with the parameters"),
    ("save keeps the autograd history", save(swap(SAVE, "param.detach().clone(memory_format=torch.contiguous_format)", "param * 1")), "Which call detaches a tensor from autograd"),
    ("save leaves out the replicated parameters", save(swap(SAVE, "    if sharding is not None and", "    if sharding is None:\n        continue\n    if")), "Which names does your loop go over"),
    ("save returns it on rank 0 only", save(swap(SAVE, "return full_state", "return full_state if dist.get_rank(group) == 0 else None")), "What does your function return on each rank"),
    ("save lists buffers and second names", save(swap(SAVE, "module.named_parameters()", "module.state_dict(keep_vars=True).items()")), "has a second name"),
    ("save returns an empty dictionary", save("return {}"), "Which names does your loop go over"),
    ("save all-reduces shards laid into zeros: right numbers, wrong communication", save(swap_all(SAVE, ("torch.empty_like(value) for _", "value * (r == dist.get_rank(group)) for r"), ("dist.all_gather(shards, value, group=group)", ""), ("sharding.stride)", "sharding.stride).contiguous()\n        dist.all_reduce(value, group=group)"))), "The values are all correct, but your function doesn't run the expected collectives"),
    ("save gathers in the default group", save(swap_all(SAVE, ("value, group=group)", "value)"), ("range(world_size)", "range(dist.get_world_size())"))), "default group of all ranks"),
    ("save empties the model", save(swap(SAVE, "return full_state", "with torch.no_grad():\n    [param.zero_() for param in module.parameters()]\nreturn full_state")), "Saving has changed the model"),
    ("load reaches one level deep", load(swap(LOAD, "module.named_parameters()", "[item for item in module.named_parameters() if item[0].count('.') < 2]")), "Which parameters does your loop skip"),
    ("load skips frozen parameters", load(swap(LOAD, "        value = full", "        if not param.requires_grad:\n            continue\n        value = full")), "Which parameters does your loop skip"),
    ("save glues along dimension 0 or else 1", save(swap(SAVE, "sharding.dim", "0 if sharding.dim == 0 else 1")), "it was split along dimension -1"),
    ("save keeps a transposed layout", save(swap(SAVE, "clone(memory_format=torch.contiguous_format)", "clone()")), "one parameter is stored transposed on rank 0"),
]  # fmt: skip

WRONG = [
    WrongAnswer(exercise=f"4.{number}", name=name, source=source, says=says)
    for number, answers in enumerate((COLUMN_ANSWERS, ROW_ANSWERS, CUT_ANSWERS, INIT_ANSWERS, LOAD_SAVE_ANSWERS), 1)
    for name, source, says in answers
]
