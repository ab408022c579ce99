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


GATHERED = OPTIONS + (
    "ffn_hidden_size = ffn_hidden_size or 4 * hidden_size\n"
    "self.up = ColumnParallelLinear(hidden_size, ffn_hidden_size, gather_output=True, **options)\n"
    "self.down = RowParallelLinear(ffn_hidden_size, hidden_size, input_is_parallel=False, **options)\n"
)

MLP = [
    ("gathers and scatters in the middle", mlp(init=GATHERED), "one all-reduce forward and one backward are enough"),
    ("gathers, the row layer takes it as a slice", mlp(init=swap(GATHERED, "input_is_parallel=False, ", "")), "does the second take it so"),
    ("scatters what is split already", mlp(init=swap(GATHERED, "gather_output=True, ", "")), "Does the first layer keep its output split"),
    ("row first, then column", mlp(init=OPTIONS + "ffn_hidden_size = ffn_hidden_size or 4 * hidden_size\nself.up = RowParallelLinear(hidden_size, ffn_hidden_size, input_is_parallel=False, **options)\nself.down = ColumnParallelLinear(ffn_hidden_size, hidden_size, gather_output=True, **options)\n"), "is not cut by columns, or not parallel at all"),
    ("column twice", mlp(init=OPTIONS + "ffn_hidden_size = ffn_hidden_size or 4 * hidden_size\nself.up = ColumnParallelLinear(hidden_size, ffn_hidden_size, gather_output=True, **options)\nself.down = ColumnParallelLinear(ffn_hidden_size, hidden_size, gather_output=True, **options)\n"), "Which layer is cut by columns"),
    ("plain nn.Linear on every rank: right numbers, nothing parallel", mlp(init="ffn_hidden_size = ffn_hidden_size or 4 * hidden_size\nself.up = nn.Linear(hidden_size, ffn_hidden_size, bias, device=device, dtype=dtype)\nself.down = nn.Linear(ffn_hidden_size, hidden_size, bias, device=device, dtype=dtype)\n"), "is not cut by columns, or not parallel at all"),
    ("other names", mlp(swap(swap(MLP_FORWARD, "self.up", "self.fc1"), "self.down", "self.fc2"), swap(swap(MLP_INIT, "self.up", "self.fc1"), "self.down", "self.fc2")), "Which layer is cut by columns"),
    ("no activation", mlp(swap(MLP_FORWARD, "F.gelu(x)", "x * 1")), "Two linear maps with nothing between them"),
    ("tanh approximation", mlp(swap(MLP_FORWARD, "F.gelu(x)", "F.gelu(x, approximate='tanh')")), "GELU by its tanh approximation"),
    ("ReLU", mlp(swap(MLP_FORWARD, "F.gelu", "F.relu")), "another activation"),
    ("activation after the second layer", mlp("return F.gelu(self.down(self.up(x)))"), "nothing before it and nothing after it"),
    ("a residual connection inside", mlp("return x + self.down(F.gelu(self.up(x)))"), "nothing before it and nothing after it"),
    ("activation twice", mlp("return self.down(F.gelu(F.gelu(self.up(x))))"), "nothing before it and nothing after it"),
    ("f once more in front", mlp("return self.down(F.gelu(self.up(copy_to_region(x, self.group))))"), "Which line of yours sums dx over the ranks a second time"),
    ("g once more behind", mlp("return reduce_from_region(self.down(F.gelu(self.up(x))), self.group)"), "Y = GELU(X A + a) B + c"),
    ("goes round the column layer: f is missing", mlp("return self.down(F.gelu(F.linear(x, self.up.weight, self.up.bias)))"), "f is missing"),
    ("goes round the row layer: g is missing", mlp("return F.linear(F.gelu(self.up(x)), self.down.weight, self.down.bias)"), "Each rank has one term of the sum"),
    ("goes round the row layer: the bias on every rank", mlp("return reduce_from_region(F.linear(F.gelu(self.up(x)), self.down.weight, self.down.bias), self.group)"), "How many times is the last bias added"),
    ("sums before the activation, to be safe", mlp("inner = self.up(x)\ninner = scatter_to_region(gather_from_region(inner, self.group), self.group)\nreturn self.down(F.gelu(inner))"), "gathers, scatters or sums what could stay where it is"),
    ("averages the output: right numbers, wrong communication", mlp("out = self.down(F.gelu(self.up(x)))\ntotal = out.detach().clone()\ndist.all_reduce(total, group=self.group)\nreturn out + (total / dist.get_world_size(self.group) - out).detach()"), "one all-reduce forward and one backward are enough"),
    ("returns zeros", mlp("return torch.zeros_like(x)"), "rank 0 all zeros"),
    ("returns None", mlp("self.down(F.gelu(self.up(x)))"), "What does forward return"),
    ("detaches the inner activation", mlp("return self.down(F.gelu(self.up(x).detach()))"), "A parameter gets no gradient"),
    ("detaches the input", mlp("return self.down(F.gelu(self.up(x.detach())))"), "cut off from autograd"),
    ("writes into the input", mlp("out = self.down(F.gelu(self.up(x)))\nx.data.zero_()\nreturn out"), "The caller goes on using the tensors"),
    ("bias is not passed to the second layer", mlp(init=swap(MLP_INIT, "self.down = RowParallelLinear(ffn_hidden_size, hidden_size, **options)", "self.down = RowParallelLinear(ffn_hidden_size, hidden_size, **{**options, 'bias': False})")), "with a bias only if `bias`"),
    ("bias is ignored", mlp(init=swap(MLP_INIT, '"bias": bias', '"bias": True')), "with a bias only if `bias`"),
    ("group is not passed to the first layer", mlp(init=swap(MLP_INIT, "(hidden_size, ffn_hidden_size, **options)", "(hidden_size, ffn_hidden_size, **{**options, 'group': None})")), "Which of them was not given `group`"),
    ("group is dropped", mlp(init=swap(MLP_INIT, '"group": group', '"group": None')), "ParallelMLP(4, 24, group=group) in groups [0, 2] and [1, 3]"),
    ("adds a bias that is not there", mlp("return self.down(F.gelu(self.up(x) + 0 * self.up.bias))"), "p = 1, ParallelMLP(4, 24, bias=False): your code fails"),
    ("group is not passed to the second layer", mlp(init=swap(MLP_INIT, "(ffn_hidden_size, hidden_size, **options)", "(ffn_hidden_size, hidden_size, **{**options, 'group': None})")), "default group of all ranks"),
    ("the inner size is always 4h", mlp(init=swap(MLP_INIT, "ffn_hidden_size or 4 * hidden_size", "4 * hidden_size")), "Which layer is cut by columns"),
    ("the default of the inner size is missing", mlp(init=swap(MLP_INIT, "ffn_hidden_size or 4 * hidden_size", "ffn_hidden_size or hidden_size")), "When ffn_hidden_size is None"),
    ("the inner size is divided by p once more", mlp(init=swap(MLP_INIT, "ffn_hidden_size or 4 * hidden_size", "(ffn_hidden_size or 4 * hidden_size) // dist.get_world_size(group)")), "Which layer is cut by columns"),
]  # fmt: skip

SWIGLU = [
    ("stride 1: contiguous cut", swiglu(init=swap(SWIGLU_INIT, "stride=2, ", "")), "How many matrices are fused in `up`"),
    ("stride of the number of ranks", swiglu(init=swap(SWIGLU_INIT, "stride=2", "stride=dist.get_world_size(group)")), "How many matrices are fused in `up`"),
    ("gate and up change places", swiglu(swap(SWIGLU_FORWARD, "gate, value =", "value, gate =")), "On which half does SiLU go"),
    ("every second column is the gate", swiglu("inner = self.up(x)\nreturn self.down(F.silu(inner[..., 0::2]) * inner[..., 1::2])"), "Which columns of the output are the gate"),
    ("sigmoid: that is GLU", swiglu(swap(SWIGLU_FORWARD, "F.silu", "torch.sigmoid")), "Which function did you put on the gate"),
    ("GELU: that is GEGLU", swiglu(swap(SWIGLU_FORWARD, "F.silu", "F.gelu")), "Which function did you put on the gate"),
    ("no activation", swiglu(swap(SWIGLU_FORWARD, "F.silu(gate)", "gate")), "Two linear maps with nothing between them"),
    ("adds in place of multiplying", swiglu(swap(SWIGLU_FORWARD, "F.silu(gate) * value", "F.silu(gate) + value")), "Compute one number by hand"),
    ("SiLU on the product", swiglu(swap(SWIGLU_FORWARD, "F.silu(gate) * value", "F.silu(gate * value)")), "Compute one number by hand"),
    ("SiLU on both", swiglu(swap(SWIGLU_FORWARD, "* value", "* F.silu(value)")), "Compute one number by hand"),
    ("cuts along the first dimension", swiglu(swap(SWIGLU_FORWARD, "dim=-1", "dim=0")), "Write the shape of one rank's tensor"),
    ("two layers in place of a fused one", swiglu("return self.down(F.silu(self.gate(x)) * self.up(x))", OPTIONS + "self.gate = ColumnParallelLinear(hidden_size, ffn_hidden_size, **options)\nself.up = ColumnParallelLinear(hidden_size, ffn_hidden_size, **options)\nself.down = RowParallelLinear(ffn_hidden_size, hidden_size, **options)\n"), "one fused `self.up`"),
    ("the width is not doubled", swiglu(init=swap(SWIGLU_INIT, "2 * ffn_hidden_size", "ffn_hidden_size")), "column-parallel from h to 2m"),
    ("gathers [gate; up] and takes this rank's part of the product", swiglu("gate, value = self.up(x).chunk(2, dim=-1)\nreturn self.down(F.silu(gate) * value)", swap(SWIGLU_INIT, "stride=2, ", "stride=2, gather_output=True, ").replace("hidden_size, **options)\n", "hidden_size, input_is_parallel=False, **options)\n")), "gathers, scatters or sums what could stay where it is"),
    ("f once for the gate and once for up", swiglu("gate = self.up(x).chunk(2, dim=-1)[0]\nvalue = self.up(x).chunk(2, dim=-1)[1]\nreturn self.down(F.silu(gate) * value)"), "one all-reduce forward and one backward are enough"),
    ("goes round the column layer: f is missing", swiglu("gate, value = F.linear(x, self.up.weight, self.up.bias).chunk(2, -1)\nreturn self.down(F.silu(gate) * value)"), "f is missing"),
    ("goes round the row layer: the bias on every rank", swiglu("gate, value = self.up(x).chunk(2, -1)\nreturn reduce_from_region(F.linear(F.silu(gate) * value, self.down.weight, self.down.bias), self.group)"), "How many times is the last bias added"),
    ("the gate is detached", swiglu(swap(SWIGLU_FORWARD, "F.silu(gate)", "F.silu(gate).detach()")), "cut off from autograd"),
    ("returns zeros", swiglu("return torch.zeros_like(x)"), "rank 0 all zeros"),
    ("bias is ignored", swiglu(init=swap(SWIGLU_INIT, '"bias": bias', '"bias": True')), "Which of them has another name or shape"),
    ("group is ignored", swiglu(init=swap(SWIGLU_INIT, '"group": group', '"group": None')), "default group of all ranks"),
    ("writes into the fused output and the input", swiglu("x.data.zero_()\nreturn self.down(F.silu(self.up(x).chunk(2, -1)[0]))"), "The caller goes on using the tensors"),
]  # fmt: skip


def formula(body: str) -> str:
    return f"""
def mlp_traffic(batch, sequence, hidden_size, ffn_hidden_size, p, bytes_per_number=4, naive=False):
{indented(body, 4)}
"""


ONE = "if p == 1:\n    return {'forward': 0, 'backward': 0}\n"
OUTER = "size = batch * sequence * hidden_size\n"
INNER = "if naive:\n    size += batch * sequence * ffn_hidden_size\n"
BACK = "return {'forward': size * bytes_per_number, 'backward': size * bytes_per_number}"

FORMULA = [
    ("p = 1 costs as much", formula(OUTER + INNER + BACK), "With one rank there is nobody"),
    ("counts numbers, not bytes", formula(ONE + OUTER + INNER + "return {'forward': size, 'backward': size}"), "How many bytes has each"),
    ("always four bytes", formula(ONE + OUTER + INNER + "return {'forward': 4 * size, 'backward': 4 * size}"), "Right for float32"),
    ("times p", formula(ONE + "size = p * batch * sequence * hidden_size\n" + INNER + BACK), "Does that tensor shrink or grow with p"),
    ("divided by p", formula(ONE + "size = batch * sequence * hidden_size // p\n" + INNER + BACK), "Does that tensor shrink or grow with p"),
    ("what a ring sends", formula(ONE + "size = batch * sequence * hidden_size * 2 * (p - 1) / p\n" + INNER + BACK), "size of the message is asked for"),
    ("the inner activation", formula(ONE + "size = batch * sequence * ffn_hidden_size\n" + INNER + BACK), "the one that leaves the MLP"),
    ("the slice of the inner activation", formula(ONE + "size = batch * sequence * ffn_hidden_size // p\n" + INNER + BACK), "the one that leaves the MLP"),
    ("f and g in both directions", formula(ONE + "size = 2 * batch * sequence * hidden_size\n" + INNER + BACK), "How many all-reduces run in the forward pass"),
    ("nothing in the backward pass", formula(ONE + OUTER + INNER + "return {'forward': size * bytes_per_number, 'backward': 0}"), "What does f do in the backward pass"),
    ("nothing in the forward pass", formula(ONE + OUTER + INNER + "return {'forward': 0, 'backward': size * bytes_per_number}"), "row by row"),
    ("naive is not told apart", formula(ONE + OUTER + BACK), "Where is that in your formula"),
    ("naive gathers one part only", formula(ONE + OUTER + "if naive:\n    size += batch * sequence * ffn_hidden_size // p\n" + BACK), "all parts together, not of one part"),
    ("naive without g and f", formula(ONE + OUTER + "if naive:\n    size = batch * sequence * ffn_hidden_size\n" + BACK), "Which message is missing"),
    ("naive without the gather of the backward pass", formula(ONE + "outer = batch * sequence * hidden_size\ninner = batch * sequence * ffn_hidden_size if naive else 0\nreturn {'forward': (outer + inner) * bytes_per_number, 'backward': outer * bytes_per_number}"), "What is the backward of the scatter"),
    ("naive with f = 4h whatever f is", formula(ONE + OUTER + "if naive:\n    size += 4 * size\n" + BACK), "row by row"),
    ("naive twice the plain one", formula(ONE + OUTER + "if naive:\n    size *= 2\n" + BACK), "row by row"),
    ("the sum of both directions", formula(ONE + OUTER + INNER + "return 2 * size * bytes_per_number"), "a dictionary with two numbers"),
    ("without the sequence", formula(ONE + "size = batch * hidden_size\nif naive:\n    size += batch * ffn_hidden_size\n" + BACK), "row by row"),
    ("zero", formula("return {'forward': 0, 'backward': 0}"), "row by row"),
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
    ("the shards too", drift(swap(LOOP, "    if hasattr(param, 'tensor_parallel'):\n        continue\n", "") + LARGEST + "    worst = max(worst, (largest - smallest).max().item())\nreturn worst"), "it is meant to differ"),
    ("sends the shards, leaves them out of the result", drift(swap(LOOP, "    if hasattr(param, 'tensor_parallel'):\n        continue\n", "") + LARGEST + "    if not hasattr(param, 'tensor_parallel'):\n        worst = max(worst, (largest - smallest).max().item())\nreturn worst"), "it is meant to differ"),
    ("only the shards", drift(swap(LOOP, "if hasattr", "if not hasattr") + LARGEST + "    worst = max(worst, (largest - smallest).max().item())\nreturn worst"), "it is meant to differ"),
    ("compares with rank 0 only", drift(LOOP + GATHER + "    worst = max(worst, *((part - parts[0]).abs().max().item() for part in parts))\nreturn worst"), "Which two ranks do you compare"),
    ("compares with its neighbour only", drift(LOOP + GATHER + "    worst = max(worst, *((parts[i] - parts[i - 1]).abs().max().item() for i in range(1, p)), 0.0)\nreturn worst"), "Which two ranks do you compare"),
    ("compares itself with the others: another number on every rank", drift(LOOP + GATHER + "    worst = max(worst, *((part - value).abs().max().item() for part in parts))\nreturn worst"), "Every rank must return the same number"),
    ("broadcasts rank 0's copy", drift(LOOP + "    other = value.clone()\n    dist.broadcast(other, 0 if group is None else dist.get_global_rank(group, 0), group=group)\n    worst = max(worst, (value - other).abs().max().item())\nreturn worst"), "Every rank must return the same number"),
    ("distance from the mean", drift(LOOP + "    total = value.clone()\n    dist.all_reduce(total, group=group)\n    off = (value - total / p).abs().max()\n    dist.all_reduce(off, op=dist.ReduceOp.MAX, group=group)\n    worst = max(worst, off.item())\nreturn worst"), "averaged away"),
    ("compares sums of the parameters", drift(LOOP + "    total = value.sum()\n    largest, smallest = total.clone(), total.clone()\n    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)\n    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)\n    worst += (largest - smallest).item()\nreturn worst"), "Which of the numbers do you return"),
    ("compares the sum of each parameter", drift(LOOP + "    totals = [torch.zeros_like(value.sum()) for _ in range(p)]\n    dist.all_gather(totals, value.sum(), group=group)\n    totals = torch.stack(totals)\n    worst = max(worst, (totals.max() - totals.min()).item())\nreturn worst"), "Does your measure let positive and negative differences cancel"),
    ("compares norms", drift(LOOP + "    norm = value.norm()\n    largest, smallest = norm.clone(), norm.clone()\n    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)\n    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)\n    worst = max(worst, (largest - smallest).item())\nreturn worst"), "Where in your code does it get lost"),
    ("mean in place of the largest difference", drift(LOOP + LARGEST + "    worst = max(worst, (largest - smallest).mean().item())\nreturn worst"), "averaged away"),
    ("sum of the differences of all parameters", drift(LOOP + LARGEST + "    worst += (largest - smallest).max().item()\nreturn worst"), "Which of the numbers do you return"),
    ("returns that of the last parameter", drift(LOOP + LARGEST + "    worst = (largest - smallest).max().item()\nreturn worst"), "Where in your code does it get lost"),
    ("returns at the first parameter", drift(LOOP + LARGEST + "    return (largest - smallest).max().item()"), "Where in your code does it get lost"),
    ("positive differences only", drift(LOOP + "    total = value.clone()\n    dist.all_reduce(total, group=group)\n    off = (value * p - total).sum().abs()\n    dist.all_reduce(off, op=dist.ReduceOp.MAX, group=group)\n    worst = max(worst, off.item())\nreturn worst"), "Does your measure let positive and negative differences cancel"),
    ("largest alone", drift(LOOP + LARGEST + "    worst = max(worst, largest.abs().max().item())\nreturn worst"), "The replicas are equal here"),
    ("reduces into the parameters", drift("for param in module.parameters():\n    if hasattr(param, 'tensor_parallel'):\n        continue\n    largest, smallest = param.detach().clone(), param.detach()\n    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)\n    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)\n    worst = max(worst, (largest - smallest).max().item())\nreturn worst"), "must not repair what it measures"),
    ("only the module's own parameters", drift(swap(LOOP, "module.parameters()", "module.parameters(recurse=False)") + LARGEST + "    worst = max(worst, (largest - smallest).max().item())\nreturn worst"), "How far does your loop look"),
    ("returns a tensor", drift("worst = torch.zeros(())\n" + LOOP + LARGEST + "    worst = torch.maximum(worst, (largest - smallest).max().cpu())\nreturn worst"), "plain float"),
    ("returns True or False", drift(LOOP + LARGEST + "    worst = max(worst, (largest - smallest).max().item())\nreturn worst > 0"), "plain float"),
    ("the default group", drift((LOOP + LARGEST).replace(", group=group", "") + "    worst = max(worst, (largest - smallest).max().item())\nreturn worst"), "default group of all ranks"),
    ("never communicates", drift("return 0.0"), "One single element on one single rank"),
    ("Python's max hides a NaN", drift(LOOP + LARGEST + "    worst = max(worst, (largest - smallest).max().item())\nreturn worst"), "what is Python's max(0.0, float('nan'))"),
    ("the all-reduce hides a NaN", drift("worst = torch.zeros(())\n" + LOOP + LARGEST + "    worst = torch.maximum(worst, (largest - smallest).max().cpu())\nreturn worst.item()"), "of a NaN and a number, MAX and MIN over the ranks keep"),
    ("a NaN becomes zero", drift(swap(LOOP, "param.detach().clone()", "param.detach().nan_to_num()") + LARGEST + "    worst = max(worst, (largest - smallest).max().item())\nreturn worst"), "A NaN differs from every number"),
    ("NaN against NaN counts as equal", drift("import math\n" + swap(LOOP, "value = param.detach().clone()", "value = param.detach().nan_to_num(nan=1e300)") + LARGEST + "    gap = (largest - smallest).max().item()\n    worst = max(worst, math.inf if gap > 1e200 else gap)\nreturn worst"), "also from another NaN"),
    ("only rank 0 knows", drift(LOOP + LARGEST + "    worst = max(worst, (largest - smallest).max().item())\nreturn worst if rank == 0 else 0.0"), "Every rank must return the same number"),
]  # fmt: skip

WRONG = [
    WrongAnswer(exercise=exercise, name=name, source=source, says=says)
    for exercise, answers in (("5.1", MLP), ("5.2", FORMULA), ("5.3", SWIGLU), ("5.4", DRIFT))
    for name, source, says in answers
]
