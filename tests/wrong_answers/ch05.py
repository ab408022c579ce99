"""Wrong answers to the exercises of chapter 05, and what each must be told."""

from textwrap import dedent

from tests.wrong_answers import WrongAnswer, indented, swap

OPTIONS = 'options = {"bias": bias, "group": group, "device": device, "dtype": dtype}\n'
MLP_INIT = OPTIONS + (
    "ffn_hidden_size = ffn_hidden_size or 4 * hidden_size\n"
    "self.up = ColumnParallelLinear(hidden_size, ffn_hidden_size, **options)\n"
    "self.down = RowParallelLinear(ffn_hidden_size, hidden_size, **options)\n"
)
MLP_FORWARD = "x = self.up(x)\nx = F.gelu(x)\nreturn self.down(x)\n"
SWIGLU_INIT = OPTIONS + (
    "self.up = ColumnParallelLinear(hidden_size, 2 * ffn_hidden_size, stride=2, **options)\n"
    "self.down = RowParallelLinear(ffn_hidden_size, hidden_size, **options)\n"
)
SWIGLU_FORWARD = "gate, value = self.up(x).chunk(2, dim=-1)\nreturn self.down(F.silu(gate) * value)\n"
MAPPINGS = (
    "from tplab.tensor.mappings import copy_to_region, gather_from_region, reduce_from_region, scatter_to_region\n"
)


def _module(name: str, ffn: str, init: str, forward: str, extra: str) -> str:
    return f"""
{dedent(extra).strip()}

class {name}(nn.Module):
    def __init__(self, hidden_size, {ffn}, *, bias=True, group=None, device=None, dtype=None):
        super().__init__()
        self.group = group
{indented(init, 8)}

    def forward(self, x):
{indented(forward, 8)}
"""


def mlp(forward: str = MLP_FORWARD, init: str = MLP_INIT, extra: str = MAPPINGS) -> str:
    return _module("ParallelMLP", "ffn_hidden_size=None", init, forward, extra)


def swiglu(forward: str = SWIGLU_FORWARD, init: str = SWIGLU_INIT, extra: str = MAPPINGS) -> str:
    return _module("ParallelSwiGLU", "ffn_hidden_size", init, forward, extra)


def design(lines: str, splits: str = '"column", "row"', extra: str = "") -> str:
    return f"""
{extra}

def mlp_splits():
    return {splits}


def sharded_mlp(x, a, b):
{indented(lines, 4)}
"""


F_FIRST, G_LAST = "x = copy_to_region(x)\n", "return reduce_from_region(F.gelu(x @ a) @ b)\n"
GATHER_Y = "return gather_from_region(z @ b)\n"

DESIGN = [
    ("nothing is sent", design("return F.gelu(x @ a) @ b"), "Which operator computes the total"),
    ("so the operator f must be missing", design(G_LAST), "Which operator sums gradients across ranks in the backward pass"),
    ("g is missing", design(F_FIRST + "return F.gelu(x @ a) @ b"), "Which operator computes the total"),
    ("f and g change places", design("x = reduce_from_region(x)\nreturn copy_to_region(F.gelu(x @ a) @ b)"), "or one term of a sum? And what"),
    ("g after the GELU of terms", design("z = F.gelu(scatter_to_region(x) @ a)\nz = reduce_from_region(z)\nz = copy_to_region(z)\n" + GATHER_Y, '"row", "column"'), "the GELU of a sum isn't the sum of the GELUs"),
    ("gathers and scatters in the middle", design(F_FIRST + "z = scatter_to_region(gather_from_region(F.gelu(x @ a)))\nreturn reduce_from_region(z @ b)"), "Which operator in your code undoes what another operator did"),
    ("f twice", design(F_FIRST * 2 + G_LAST), "sums gradients that are already complete"),
    ("g twice", design(F_FIRST + "y = reduce_from_region(F.gelu(x @ a) @ b)\nreturn reduce_from_region(y)"), "off by a constant factor"),
    ("f after g", design(F_FIRST + "return copy_to_region(reduce_from_region(F.gelu(x @ a) @ b))"), "sums gradients that are already complete"),
    ("columns twice", design(F_FIRST + "z = copy_to_region(gather_from_region(F.gelu(x @ a)))\n" + GATHER_Y, '"column", "column"'), "the way you split the weights causes far more traffic than necessary"),
    ("columns twice, and the second f is missing", design(F_FIRST + "z = gather_from_region(F.gelu(x @ a))\n" + GATHER_Y, '"column", "column"'), "The output is correct, but one of the gradients isn't"),
    ("columns twice, and Y isn't gathered", design(F_FIRST + "z = copy_to_region(gather_from_region(F.gelu(x @ a)))\nreturn z @ b", '"column", "column"'), "Which operator collects the columns from all ranks"),
    ("rows twice", design("z = F.gelu(reduce_from_region(scatter_to_region(x) @ a))\nreturn reduce_from_region(scatter_to_region(z) @ b)", '"row", "row"'), "the way you split the weights causes far more traffic than necessary"),
    ("rows, then columns", design("z = copy_to_region(F.gelu(reduce_from_region(scatter_to_region(x) @ a)))\n" + GATHER_Y, '"row", "column"'), "the way you split the weights causes far more traffic than necessary"),
    ("takes a slice of x by hand", design("n = x.shape[-1] // dist.get_world_size()\nx = x.narrow(-1, dist.get_rank() * n, n)\nz = copy_to_region(F.gelu(reduce_from_region(x @ a)))\n" + GATHER_Y, '"row", "column"'), "Which operator takes a slice in the forward pass"),
    ("forgets to slice x", design("z = copy_to_region(F.gelu(reduce_from_region(x @ a)))\n" + GATHER_Y, '"row", "column"'), "Which two shapes in your code don't match"),
    ("no GELU", design(F_FIRST + "return reduce_from_region(x @ a @ b)"), "two matmuls in a row collapse into a single matmul"),
    ("another activation", design(F_FIRST + "return reduce_from_region(F.silu(x @ a) @ b)"), "or one term of a sum? And what"),
    ("GELU at the end", design(F_FIRST + "return F.gelu(reduce_from_region(x @ a @ b))"), "or one term of a sum? And what"),
    ("sums with dist.all_reduce", design(F_FIRST + "y = (F.gelu(x @ a) @ b).detach()\ndist.all_reduce(y)\nreturn y"), "invisible to autograd"),
    ("detaches x", design("x = copy_to_region(x.detach())\n" + G_LAST), "invisible to autograd"),
    ("the mean of the terms", design(F_FIRST + "return reduce_from_region(F.gelu(x @ a) @ b) / dist.get_world_size()"), "off by a constant factor"),
    ("writes into x", design("x.data.mul_(2)\nx = copy_to_region(x) / 2\n" + G_LAST), "The caller still needs the tensors"),
    ("gathers in the first, scatters in the second: columns and rows, naive", design(F_FIRST + "z = gather_from_region(x @ a)\nreturn reduce_from_region(scatter_to_region(F.gelu(z)) @ b)"), "Which operator in your code undoes what another operator did"),
    ("words that don't exist", design(F_FIRST + G_LAST, '"columns", "rows"'), "should return two strings"),
    ("only one word", design(F_FIRST + G_LAST, '"column"'), "should return two strings"),
]  # fmt: skip


GATHERED = OPTIONS + (
    "ffn_hidden_size = ffn_hidden_size or 4 * hidden_size\n"
    "self.up = ColumnParallelLinear(hidden_size, ffn_hidden_size, gather_output=True, **options)\n"
    "self.down = RowParallelLinear(ffn_hidden_size, hidden_size, input_is_parallel=False, **options)\n"
)

MLP = [
    ("gathers and scatters in the middle", mlp(init=GATHERED), "One all-reduce in each pass is enough"),
    ("gathers, the row layer takes it as a slice", mlp(init=swap(GATHERED, "input_is_parallel=False, ", "")), "Does the second layer expect a sharded input"),
    ("scatters what is split already", mlp(init=swap(GATHERED, "gather_output=True, ", "")), "Does the first layer leave its output sharded"),
    ("row first, then column", mlp(init=OPTIONS + "ffn_hidden_size = ffn_hidden_size or 4 * hidden_size\nself.up = RowParallelLinear(hidden_size, ffn_hidden_size, input_is_parallel=False, **options)\nself.down = ColumnParallelLinear(ffn_hidden_size, hidden_size, gather_output=True, **options)\n"), "isn't split by columns, or `self.up` isn't a parallel layer at all"),
    ("column twice", mlp(init=OPTIONS + "ffn_hidden_size = ffn_hidden_size or 4 * hidden_size\nself.up = ColumnParallelLinear(hidden_size, ffn_hidden_size, gather_output=True, **options)\nself.down = ColumnParallelLinear(ffn_hidden_size, hidden_size, gather_output=True, **options)\n"), "Which layer is column-parallel, and which is row-parallel"),
    ("plain nn.Linear on every rank: right numbers, nothing parallel", mlp(init="ffn_hidden_size = ffn_hidden_size or 4 * hidden_size\nself.up = nn.Linear(hidden_size, ffn_hidden_size, bias, device=device, dtype=dtype)\nself.down = nn.Linear(ffn_hidden_size, hidden_size, bias, device=device, dtype=dtype)\n"), "isn't split by columns, or `self.up` isn't a parallel layer at all"),
    ("other names", mlp(swap(swap(MLP_FORWARD, "self.up", "self.fc1"), "self.down", "self.fc2"), swap(swap(MLP_INIT, "self.up", "self.fc1"), "self.down", "self.fc2")), "Which layer is column-parallel, and which is row-parallel"),
    ("no activation", mlp(swap(MLP_FORWARD, "F.gelu(x)", "x * 1")), "Two linear layers with nothing between them"),
    ("tanh approximation", mlp(swap(MLP_FORWARD, "F.gelu(x)", "F.gelu(x, approximate='tanh')")), "matches the tanh approximation of GELU"),
    ("ReLU", mlp(swap(MLP_FORWARD, "F.gelu", "F.relu")), "its activation function isn't"),
    ("activation after the second layer", mlp("return F.gelu(self.down(self.up(x)))"), "with no other operations before or after"),
    ("a residual connection inside", mlp("return x + self.down(F.gelu(self.up(x)))"), "with no other operations before or after"),
    ("activation twice", mlp("return self.down(F.gelu(F.gelu(self.up(x))))"), "with no other operations before or after"),
    ("f once more in front", mlp("return self.down(F.gelu(self.up(copy_to_region(x, self.group))))"), "Which line of your code sums dx a second time"),
    ("g once more behind", mlp("return reduce_from_region(self.down(F.gelu(self.up(x))), self.group)"), "Y = GELU(X A + a) B + c"),
    ("goes round the column layer: f is missing", mlp("return self.down(F.gelu(F.linear(x, self.up.weight, self.up.bias)))"), "so the operator f must be missing"),
    ("goes round the row layer: g is missing", mlp("return F.linear(F.gelu(self.up(x)), self.down.weight, self.down.bias)"), "Each rank returns only its own partial sum"),
    ("goes round the row layer: the bias on every rank", mlp("return reduce_from_region(F.linear(F.gelu(self.up(x)), self.down.weight, self.down.bias), self.group)"), "Your code adds the final bias p times"),
    ("sums before the activation, to be safe", mlp("inner = self.up(x)\ninner = scatter_to_region(gather_from_region(inner, self.group), self.group)\nreturn self.down(F.gelu(inner))"), "gathers, scatters, or sums a tensor unnecessarily"),
    ("averages the output: right numbers, wrong communication", mlp("out = self.down(F.gelu(self.up(x)))\ntotal = out.detach().clone()\ndist.all_reduce(total, group=self.group)\nreturn out + (total / dist.get_world_size(self.group) - out).detach()"), "One all-reduce in each pass is enough"),
    ("returns zeros", mlp("return torch.zeros_like(x)"), "rank 0 all zeros"),
    ("returns None", mlp("self.down(F.gelu(self.up(x)))"), "What does `forward` return"),
    ("detaches the inner activation", mlp("return self.down(F.gelu(self.up(x).detach()))"), "One of the parameters doesn't receive a gradient"),
    ("detaches the input", mlp("return self.down(F.gelu(self.up(x.detach())))"), "Which part of your forward pass is invisible to autograd"),
    ("writes into the input", mlp("out = self.down(F.gelu(self.up(x)))\nx.data.zero_()\nreturn out"), "The caller still needs the tensors"),
    ("bias is not passed to the second layer", mlp(init=swap(MLP_INIT, "self.down = RowParallelLinear(ffn_hidden_size, hidden_size, **options)", "self.down = RowParallelLinear(ffn_hidden_size, hidden_size, **{**options, 'bias': False})")), "create the biases only if `bias` is True"),
    ("bias is ignored", mlp(init=swap(MLP_INIT, '"bias": bias', '"bias": True')), "create the biases only if `bias` is True"),
    ("group is not passed to the first layer", mlp(init=swap(MLP_INIT, "(hidden_size, ffn_hidden_size, **options)", "(hidden_size, ffn_hidden_size, **{**options, 'group': None})")), "Which of these layers was built without `group`"),
    ("group is dropped", mlp(init=swap(MLP_INIT, '"group": group', '"group": None')), "ParallelMLP(6, 20, group=group) in groups [0, 2] and [1, 3]"),
    ("adds a bias that is not there", mlp("return self.down(F.gelu(self.up(x) + 0 * self.up.bias))"), "p = 1, ParallelMLP(6, 20, bias=False): your code fails"),
    ("group is not passed to the second layer", mlp(init=swap(MLP_INIT, "(ffn_hidden_size, hidden_size, **options)", "(ffn_hidden_size, hidden_size, **{**options, 'group': None})")), "default group of all ranks"),
    ("the inner size is always 4h", mlp(init=swap(MLP_INIT, "ffn_hidden_size or 4 * hidden_size", "4 * hidden_size")), "Which layer is column-parallel, and which is row-parallel"),
    ("the default of the inner size is missing", mlp(init=swap(MLP_INIT, "ffn_hidden_size or 4 * hidden_size", "ffn_hidden_size or hidden_size")), "If `ffn_hidden_size` is None"),
    ("the inner size is divided by p once more", mlp(init=swap(MLP_INIT, "ffn_hidden_size or 4 * hidden_size", "(ffn_hidden_size or 4 * hidden_size) // dist.get_world_size(group)")), "Which layer is column-parallel, and which is row-parallel"),
    ("an inner size that's too small is replaced", mlp(init=swap(MLP_INIT, "ffn_hidden_size or 4 * hidden_size\n", "max(ffn_hidden_size or 0, hidden_size) if ffn_hidden_size and ffn_hidden_size >= hidden_size else 4 * hidden_size\n")), "Which line of your code changes the inner size"),
    ("the options of the first one are kept", mlp(init=swap(MLP_INIT, OPTIONS, 'given = {"bias": bias, "group": group, "device": device, "dtype": dtype}\noptions = vars(nn.Linear.forward).setdefault("options", {})\noptions.update({name: value for name, value in given.items() if value is not None})\n')), "still holds the first MLP's options"),
]  # fmt: skip

SWIGLU = [
    ("stride 1: contiguous cut", swiglu(init=swap(SWIGLU_INIT, "stride=2, ", "")), "How many matrices are fused in `self.up`"),
    ("stride of the number of ranks", swiglu(init=swap(SWIGLU_INIT, "stride=2", "stride=dist.get_world_size(group)")), "How many matrices are fused in `self.up`"),
    ("gate and up change places", swiglu(swap(SWIGLU_FORWARD, "gate, value =", "value, gate =")), "Which half of the output should you apply SiLU to"),
    ("every second column is the gate", swiglu("inner = self.up(x)\nreturn self.down(F.silu(inner[..., 0::2]) * inner[..., 1::2])"), "Which columns of the output hold the gate"),
    ("sigmoid: that is GLU", swiglu(swap(SWIGLU_FORWARD, "F.silu", "torch.sigmoid")), "Which function does your code apply to the gate"),
    ("GELU: that is GEGLU", swiglu(swap(SWIGLU_FORWARD, "F.silu", "F.gelu")), "Which function does your code apply to the gate"),
    ("no activation", swiglu(swap(SWIGLU_FORWARD, "F.silu(gate)", "gate")), "Two linear layers with nothing between them"),
    ("adds in place of multiplying", swiglu(swap(SWIGLU_FORWARD, "F.silu(gate) * value", "F.silu(gate) + value")), "work out one element of Y by hand"),
    ("SiLU on the product", swiglu(swap(SWIGLU_FORWARD, "F.silu(gate) * value", "F.silu(gate * value)")), "work out one element of Y by hand"),
    ("SiLU on both", swiglu(swap(SWIGLU_FORWARD, "* value", "* F.silu(value)")), "work out one element of Y by hand"),
    ("cuts along the first dimension", swiglu(swap(SWIGLU_FORWARD, "dim=-1", "dim=0")), "write down the tensor shapes on one rank"),
    ("two layers in place of a fused one", swiglu("return self.down(F.silu(self.gate(x)) * self.up(x))", OPTIONS + "self.gate = ColumnParallelLinear(hidden_size, ffn_hidden_size, **options)\nself.up = ColumnParallelLinear(hidden_size, ffn_hidden_size, **options)\nself.down = RowParallelLinear(ffn_hidden_size, hidden_size, **options)\n"), "a fused, column-parallel layer `self.up`"),
    ("the width is not doubled", swiglu(init=swap(SWIGLU_INIT, "2 * ffn_hidden_size", "ffn_hidden_size")), "`self.up` that maps h features to 2m"),
    ("gathers [gate; up] and takes this rank's part of the product", swiglu("gate, value = self.up(x).chunk(2, dim=-1)\nreturn self.down(F.silu(gate) * value)", swap(SWIGLU_INIT, "stride=2, ", "stride=2, gather_output=True, ").replace("hidden_size, **options)\n", "hidden_size, input_is_parallel=False, **options)\n")), "gathers, scatters, or sums a tensor unnecessarily"),
    ("f once for the gate and once for up", swiglu("gate = self.up(x).chunk(2, dim=-1)[0]\nvalue = self.up(x).chunk(2, dim=-1)[1]\nreturn self.down(F.silu(gate) * value)"), "One all-reduce in each pass is enough"),
    ("goes round the column layer: f is missing", swiglu("gate, value = F.linear(x, self.up.weight, self.up.bias).chunk(2, -1)\nreturn self.down(F.silu(gate) * value)"), "so the operator f must be missing"),
    ("goes round the row layer: the bias on every rank", swiglu("gate, value = self.up(x).chunk(2, -1)\nreturn reduce_from_region(F.linear(F.silu(gate) * value, self.down.weight, self.down.bias), self.group)"), "Your code adds the final bias p times"),
    ("the gate is detached", swiglu(swap(SWIGLU_FORWARD, "F.silu(gate)", "F.silu(gate).detach()")), "Which part of your forward pass is invisible to autograd"),
    ("returns zeros", swiglu("return torch.zeros_like(x)"), "rank 0 all zeros"),
    ("bias is ignored", swiglu(init=swap(SWIGLU_INIT, '"bias": bias', '"bias": True')), "Which of your parameters has the wrong name or shape"),
    ("group is ignored", swiglu(init=swap(SWIGLU_INIT, '"group": group', '"group": None')), "default group of all ranks"),
    ("writes into the fused output and the input", swiglu("x.data.zero_()\nreturn self.down(F.silu(self.up(x).chunk(2, -1)[0]))"), "The caller still needs the tensors"),
]  # fmt: skip


def drift(body: str) -> str:
    return f"""
def replica_drift(module, group=None):
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    worst = 0.0
{indented(body, 4)}
"""


LOOP = "for param in module.parameters():\n    if hasattr(param, 'tensor_parallel'):\n        continue\n    value = param.detach().clone()\n"
GATHER = "    parts = [torch.empty_like(value) for _ in range(p)]\n    dist.all_gather(parts, value, group=group)\n"
LARGEST = "    largest, smallest = value.clone(), value.clone()\n    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)\n    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)\n"

DRIFT = [
    ("the shards too", drift(swap(LOOP, "    if hasattr(param, 'tensor_parallel'):\n        continue\n", "") + LARGEST + "    worst = max(worst, (largest - smallest).max().item())\nreturn worst"), "shards are supposed to differ"),
    ("sends the shards, leaves them out of the result", drift(swap(LOOP, "    if hasattr(param, 'tensor_parallel'):\n        continue\n", "") + LARGEST + "    if not hasattr(param, 'tensor_parallel'):\n        worst = max(worst, (largest - smallest).max().item())\nreturn worst"), "shards are supposed to differ"),
    ("only the shards", drift(swap(LOOP, "if hasattr", "if not hasattr") + LARGEST + "    worst = max(worst, (largest - smallest).max().item())\nreturn worst"), "shards are supposed to differ"),
    ("compares with rank 0 only", drift(LOOP + GATHER + "    worst = max(worst, *((part - parts[0]).abs().max().item() for part in parts))\nreturn worst"), "Which ranks does your code compare"),
    ("compares with its neighbour only", drift(LOOP + GATHER + "    worst = max(worst, *((parts[i] - parts[i - 1]).abs().max().item() for i in range(1, p)), 0.0)\nreturn worst"), "Which pairs of ranks does your code compare"),
    ("compares itself with the others: another number on every rank", drift(LOOP + GATHER + "    worst = max(worst, *((part - value).abs().max().item() for part in parts))\nreturn worst"), "Every rank should return the same number"),
    ("broadcasts rank 0's copy", drift(LOOP + "    other = value.clone()\n    dist.broadcast(other, 0 if group is None else dist.get_global_rank(group, 0), group=group)\n    worst = max(worst, (value - other).abs().max().item())\nreturn worst"), "Every rank should return the same number"),
    ("distance from the mean", drift(LOOP + "    total = value.clone()\n    dist.all_reduce(total, group=group)\n    off = (value - total / p).abs().max()\n    dist.all_reduce(off, op=dist.ReduceOp.MAX, group=group)\n    worst = max(worst, off.item())\nreturn worst"), "averages it away"),
    ("compares sums of the parameters", drift(LOOP + "    total = value.sum()\n    largest, smallest = total.clone(), total.clone()\n    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)\n    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)\n    worst += (largest - smallest).item()\nreturn worst"), "Which of these two differences does your function return"),
    ("compares the sum of each parameter", drift(LOOP + "    totals = [torch.zeros_like(value.sum()) for _ in range(p)]\n    dist.all_gather(totals, value.sum(), group=group)\n    totals = torch.stack(totals)\n    worst = max(worst, (totals.max() - totals.min()).item())\nreturn worst"), "Do positive and negative differences cancel"),
    ("compares norms", drift(LOOP + "    norm = value.norm()\n    largest, smallest = norm.clone(), norm.clone()\n    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)\n    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)\n    worst = max(worst, (largest - smallest).item())\nreturn worst"), "Which line of your code ignores this difference"),
    ("mean in place of the largest difference", drift(LOOP + LARGEST + "    worst = max(worst, (largest - smallest).mean().item())\nreturn worst"), "averages it away"),
    ("sum of the differences of all parameters", drift(LOOP + LARGEST + "    worst += (largest - smallest).max().item()\nreturn worst"), "Which of these two differences does your function return"),
    ("returns that of the last parameter", drift(LOOP + LARGEST + "    worst = (largest - smallest).max().item()\nreturn worst"), "Which line of your code ignores this difference"),
    ("returns at the first parameter", drift(LOOP + LARGEST + "    return (largest - smallest).max().item()"), "Which line of your code ignores this difference"),
    ("positive differences only", drift(LOOP + "    total = value.clone()\n    dist.all_reduce(total, group=group)\n    off = (value * p - total).sum().abs()\n    dist.all_reduce(off, op=dist.ReduceOp.MAX, group=group)\n    worst = max(worst, off.item())\nreturn worst"), "Do positive and negative differences cancel"),
    ("largest alone", drift(LOOP + LARGEST + "    worst = max(worst, largest.abs().max().item())\nreturn worst"), "The replicas are equal here"),
    ("reduces into the parameters", drift("for param in module.parameters():\n    if hasattr(param, 'tensor_parallel'):\n        continue\n    largest, smallest = param.detach().clone(), param.detach()\n    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)\n    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)\n    worst = max(worst, (largest - smallest).max().item())\nreturn worst"), "must not change what it measures"),
    ("only the module's own parameters", drift(swap(LOOP, "module.parameters()", "module.parameters(recurse=False)") + LARGEST + "    worst = max(worst, (largest - smallest).max().item())\nreturn worst"), "reach the parameters of nested modules"),
    ("returns a tensor", drift("worst = torch.zeros(())\n" + LOOP + LARGEST + "    worst = torch.maximum(worst, (largest - smallest).max().cpu())\nreturn worst"), "plain float"),
    ("returns True or False", drift(LOOP + LARGEST + "    worst = max(worst, (largest - smallest).max().item())\nreturn worst > 0"), "plain float"),
    ("the default group", drift((LOOP + LARGEST).replace(", group=group", "") + "    worst = max(worst, (largest - smallest).max().item())\nreturn worst"), "default group of all ranks"),
    ("never communicates", drift("return 0.0"), "A single element differs on a single rank"),
    ("Python's max hides a NaN", drift(LOOP + LARGEST + "    worst = max(worst, (largest - smallest).max().item())\nreturn worst"), "what does Python's `max(0.0, float('nan'))` return"),
    ("the all-reduce hides a NaN", drift("worst = torch.zeros(())\n" + LOOP + LARGEST + "    worst = torch.maximum(worst, (largest - smallest).max().cpu())\nreturn worst.item()"), "an all-reduce with MAX or MIN may return the number"),
    ("a NaN becomes zero", drift(swap(LOOP, "param.detach().clone()", "param.detach().nan_to_num()") + LARGEST + "    worst = max(worst, (largest - smallest).max().item())\nreturn worst"), "A NaN isn't equal to any number"),
    ("NaN against NaN counts as equal", drift("import math\n" + swap(LOOP, "value = param.detach().clone()", "value = param.detach().nan_to_num(nan=1e300)") + LARGEST + "    gap = (largest - smallest).max().item()\n    worst = max(worst, math.inf if gap > 1e200 else gap)\nreturn worst"), "not even to another NaN"),
    ("rounds the result to float32", drift("drifts = [0.0]\n" + LOOP + LARGEST + "    drifts.append((largest - smallest).max().item())\nreturn torch.tensor(drifts).max().item()"), "`torch.tensor` turns Python floats into a float32"),
    ("only rank 0 knows", drift(LOOP + LARGEST + "    worst = max(worst, (largest - smallest).max().item())\nreturn worst if rank == 0 else 0.0"), "Every rank should return the same number"),
    ("stops at the first parameter that differs", drift(LOOP + LARGEST + "    worst = (largest - smallest).max().item()\n    if worst != 0:\n        return worst\nreturn worst"), "after it finds a difference"),
]  # fmt: skip

WRONG = [
    WrongAnswer(exercise=exercise, name=name, source=source, says=says)
    for exercise, answers in (("5.1", DESIGN), ("5.2", MLP), ("5.3", DRIFT), ("5.4", SWIGLU))
    for name, source, says in answers
]
