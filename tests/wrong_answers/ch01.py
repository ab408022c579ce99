"""Wrong answers to the exercises of chapter 01, and what each must be told."""

from tests.wrong_answers import WrongAnswer, indented, swap, swap_all

# 1.1

SENDS = "for other in range(world_size):\n    if other != src:\n        dist.send(parts[other], other)"
SCATTER = f"""
if rank != src:
    dist.recv(out, src)
    return out
{SENDS}
return out.copy_(parts[src])
"""
RECEIVES = "for other in range(world_size):\n    if other != dst:\n        dist.recv(parts[other], other)"
PARTS = "parts = [torch.empty_like(x) for _ in range(world_size)]\nparts[rank].copy_(x)"
GATHER = f"""
if rank != dst:
    dist.send(x, dst)
    return None
{PARTS}
{RECEIVES}
return parts
"""


def scatter_and_gather(scatter: str, gather: str) -> str:
    return f"""
def scatter(out, parts, src):
    rank, world_size = dist.get_rank(), dist.get_world_size()
{indented(scatter)}


def gather(x, dst):
    rank, world_size = dist.get_rank(), dist.get_world_size()
{indented(gather)}
"""


def scatter(body: str) -> str:
    return scatter_and_gather(body, GATHER)


def gather(body: str) -> str:
    return scatter_and_gather(SCATTER, body)


BOTH = [
    ("scatter: the source is always rank 0", scatter(swap(SCATTER, "src", "0")), "parts[other]"),
    ("scatter: the source's own part is not filled in", scatter(swap(SCATTER, "out.copy_(parts[src])", "out")), "Is it the source, which sends nothing to itself"),
    ("scatter: another name instead of a copy", scatter(swap(SCATTER, "return out.copy_(parts[src])", "out = parts[src]\nreturn out")), "only gives a name to another tensor"),
    ("scatter: sends to itself", scatter("if rank == src:\n    for other in range(world_size):\n        dist.send(parts[other], other)\ndist.recv(out, src)\nreturn out"), "your code fails on rank 0"),
    ("scatter: parts counted without the source", scatter(swap(SCATTER, SENDS, "others = [other for other in range(world_size) if other != src]\nfor index, other in enumerate(others):\n    dist.send(parts[index], other)")), "Rank r gets parts[r]"),
    ("scatter: everybody gets the first part", scatter(swap(SCATTER, "parts[other]", "parts[0]")), "which index does each send use"),
    ("scatter: all parts to everybody", scatter("""
        whole = torch.empty(world_size, *out.shape, dtype=out.dtype)
        if rank == src:
            whole = torch.stack(parts)
            for other in range(world_size):
                if other != src:
                    dist.send(whole, other)
        else:
            dist.recv(whole, src)
        return out.copy_(whole[rank])
        """), "Each rank needs parts[rank] and nothing else"),
    ("scatter: calls torch's", scatter("dist.scatter(out, parts, src=src)\nreturn out"), "Build it from dist.send and dist.recv"),
    ("scatter: forgets to return", scatter(swap_all(SCATTER, ("return out\n", "return\n"), ("return out.copy_", "out.copy_"))), "What does the function return"),
    ("scatter: no communication", scatter("if parts is not None:\n    out.copy_(parts[src])\nreturn out"), "Nothing was sent"),
    ("scatter: the others don't receive", scatter(swap(SCATTER, "    dist.recv(out, src)\n", "")), "never receives"),
    ("scatter: receives from anybody", scatter(swap(SCATTER, "dist.recv(out, src)", "dist.recv(out)")), "Which rank's numbers belong into this tensor"),
    ("scatter: does not wait", scatter(swap_all(SCATTER, ("dist.recv(", "dist.irecv("), ("dist.send(", "dist.isend("))), "only start a message"),
    ("scatter: starts and does not wait, on the others only", scatter(swap(SCATTER, "dist.recv(", "dist.irecv(")), "only start a message"),
    ("scatter: the root sends to itself too", scatter(swap(SCATTER, "    if other != src:\n        dist.send", "    dist.send")), "with itself"),
    ("scatter: the root receives from itself too", scatter(swap(SCATTER, "return out.copy_(parts[src])", "dist.recv(out, src)\nreturn out")), "with itself"),
    ("gather: the root's own comes last", gather(swap_all(GATHER, (PARTS, "parts = []"), ("dist.recv(parts[other], other)", "parts.append(torch.empty_like(x))\n        dist.recv(parts[-1], other)"), ("return parts", "return [*parts, x]"))), "The list is in rank order"),
    ("gather: p times the same tensor", gather(swap_all(GATHER, (PARTS, "parts = [torch.empty_like(x)] * world_size"), ("return parts", "parts[dst] = x\nreturn parts"))), "is p times the same tensor"),
    ("gather: the root's own is missing", gather(swap_all(GATHER, ("empty_like", "zeros_like"), ("parts[rank].copy_(x)\n", ""))), "rank dst's own tensor at its own place"),
    ("gather: a list on every rank", gather("""
        parts = [torch.zeros_like(x) for _ in range(world_size)]
        parts[rank].copy_(x)
        if rank != dst:
            dist.send(x, dst)
        else:
            for other in range(world_size):
                if other != dst:
                    dist.recv(parts[other], other)
        return parts
        """), "What do the other ranks return"),
    ("gather: everybody to everybody", gather("parts = [torch.zeros_like(x) for _ in range(world_size)]\ndist.all_gather(parts, x)\nreturn parts if rank == dst else None"), "Build it from dist.send and dist.recv"),
    ("gather: always to rank 0", gather(swap(GATHER, "dst", "0")), "is dst always rank 0"),
    ("gather: forgets to return", gather(swap(GATHER, "return parts", "")), "Rank dst got None"),
    ("gather: every rank sends twice", gather(swap_all(GATHER, ("    dist.send(x, dst)\n", "    dist.send(x, dst)\n    dist.send(x, dst)\n"), (RECEIVES, RECEIVES + "\n        dist.recv(parts[other], other)"))), "Who has to send, to whom, and how often"),
    ("gather: one tensor, and no list", gather(swap(GATHER, "return parts", "return torch.stack(parts)")), "A list of p tensors is wanted"),
    ("gather: does not wait", gather(swap(GATHER, "dist.recv(", "dist.irecv(")), "only start a message"),
    ("gather: the root receives from itself too", gather(swap(GATHER, "    if other != dst:\n        dist.recv", "    dist.recv")), "with itself"),
    ("gather: receives into the caller's tensor", gather(swap_all(GATHER, ("torch.empty_like(x)", "x.clone()"), ("parts[rank].copy_(x)\n", ""), ("dist.recv(parts[other], other)", "dist.recv(x, other)\n        parts[other].copy_(x)"))), "Which line writes into a tensor that the caller still needs"),
]  # fmt: skip

# Both messages of one step, sent the way the chapter shows. The answers to 1.2, 1.3 and 1.4 start with it
PASS = """
def pass_on(outgoing, incoming, shift=1):
    rank, p = dist.get_rank(), dist.get_world_size()
    messages = [
        dist.P2POp(dist.isend, outgoing, (rank + shift) % p), dist.P2POp(dist.irecv, incoming, (rank - shift) % p)
    ]
    for request in dist.batch_isend_irecv(messages):
        request.wait()

"""

# 1.2

ROW = "row = (rank - 1) % p\ntotal = x[row].clone()"
ADD = "pass_on(total, received)\nrow = (row - 1) % p\ntotal = received + x[row]"
PASS_WHOLE = "pass_on(outgoing, received)\noutgoing = received\ntotal = total + received"
RIGHT, LEFT = "(rank + 1) % p", "(rank - 1) % p"


def reduce_scatter(start: str = ROW, step: str = ADD, end: str = "return total", steps: str = "p - 1") -> str:
    return f"""{PASS}
def ring_reduce_scatter(x):
    rank, p = dist.get_rank(), dist.get_world_size()
{indented(start)}
    for step in range({steps}):
        received = torch.empty_like(total)
{indented(step, 8)}
{indented(end)}
"""


def messages(code: str) -> str:
    """The right step, except that `code` sends and receives its messages."""
    return swap(ADD, "pass_on(total, received)", code)


REDUCE_SCATTER = [
    ("starts with its own row", reduce_scatter(swap(ROW, "(rank - 1) % p", "rank")), "Where must row r start"),
    ("starts with the right neighbour's row", reduce_scatter(swap(ROW, "rank - 1", "rank + 1")), "Where must row r start"),
    ("counts rows upwards", reduce_scatter(step=swap(ADD, "row - 1", "row + 1")), "Write the table for p = 3"),
    ("adds the row that it sent", reduce_scatter(step="pass_on(total, received)\ntotal = received + x[row]\nrow = (row - 1) % p"), "which of its own rows has to be added"),
    ("one step too few", reduce_scatter(steps="p - 2"), "Nothing was sent"),
    ("one step too few for more than two ranks", reduce_scatter(steps="max(1, p - 2) if p > 1 else 0"), "Write the table for p = 3"),
    ("one step too many", reduce_scatter(steps="p"), "Write the table for p = 3"),
    ("goes round the ring twice", reduce_scatter(steps="2 * p - 1"), "How many steps does it take until every rank has added its own"),
    ("its own row is added once more at the end", reduce_scatter(end="return total + x[rank] if p > 1 else total"), "One rank's term is in the sum twice"),
    ("its own row takes the place of what comes in", reduce_scatter(step=swap(ADD, "received + x[row]", "x[row].clone()")), "No sum was made"),
    ("passes on without adding", reduce_scatter(step=swap(ADD, "received + x[row]", "received")), "what do you add to it, before you send it on"),
    ("its own row is not added at the end", reduce_scatter(step=ADD + " if step < p - 2 else received"), "and after the last step"),
    ("its own row is not added at the end, for more than two ranks", reduce_scatter(step=ADD + " if step < p - 2 or p == 2 else received"), "and after the last step"),
    ("adds into x", reduce_scatter(swap(ROW, ".clone()", ""), swap(ADD, "total = received + x[row]", "x[row] += received\ntotal = x[row]")), "x belongs to the caller"),
    ("does nothing but cut", reduce_scatter("total = x[rank].clone()", "pass"), "Nothing was sent"),
    ("zeros of the right shape", reduce_scatter("total = torch.zeros_like(x[0])", "pass_on(total, received)"), "it is all zeros"),
    ("calls torch's all-reduce", reduce_scatter("total = x.clone()\ndist.all_reduce(total)\ntotal = total[rank]", "pass"), "The exercise is to build it"),
    ("calls torch's reduce-scatter", reduce_scatter("total = x[0].clone()\ndist.reduce_scatter(total, list(x))", "pass"), "The exercise is to build it"),
    ("sends whole tensors round", reduce_scatter("total = x.clone()\noutgoing = x.clone()", PASS_WHOLE, "return total[rank]"), "How large is each message"),
    ("returns the whole sum", reduce_scatter("total = x.clone()\noutgoing = x.clone()", PASS_WHOLE), "it should own one"),
    ("straight to the owner", reduce_scatter("total = x[rank].clone()", "pass_on(x[(rank + step) % p], received, shift=step)\ntotal += received", steps="1, p"), "everybody sends to one neighbour only"),
    ("plain send, then recv", reduce_scatter(step=messages(f"dist.send(total, {RIGHT})\ndist.recv(received, {LEFT})")), "start both with dist.batch_isend_irecv"),
    ("all receive first", reduce_scatter(step=messages(f"dist.recv(received, {LEFT})\ndist.send(total, {RIGHT})")), "Can the neighbour come to that call"),
    ("sends both ways, receives from nobody's side", reduce_scatter(step=messages(f"a = dist.isend(total, {RIGHT})\nb = dist.irecv(received, {RIGHT})\na.wait()\nb.wait()")), "what does each rank wait for"),
    ("does not wait", reduce_scatter(step=messages(f"dist.isend(total, {RIGHT})\ndist.irecv(received, {LEFT})")), "only start a message"),
    ("a loop that ends one step early", reduce_scatter(steps="p - 2"), "how often does it run for this p"),
    ("rank 0 takes no part", reduce_scatter(step="rank and " + ADD), "the ranks wait for each other"),
    ("the mean", reduce_scatter(end="return total / p"), "Is this the mean"),
    ("in float32", reduce_scatter("x = x.float()\n" + ROW, end="return total.to(torch.float64)"), "leaves the dtype of x"),
    ("forgets to return", reduce_scatter(end="pass"), "what does its last line give back"),
    ("the right sums, then handed one rank further", reduce_scatter(end="received = torch.empty_like(total)\np > 1 and pass_on(total, received)\nreturn received if p > 1 else total"), "they end at the wrong rank"),
]  # fmt: skip

# 1.3

ROWS = "rows = [torch.zeros_like(part) for _ in range(p)]\nrows[rank].copy_(part)"
OUT, IN = "rows[(rank - step) % p]", "rows[(rank - step - 1) % p]"


def all_gather(
    step: str = f"pass_on({OUT}, {IN})", end: str = "return torch.stack(rows)", steps: str = "p - 1", start: str = ROWS
) -> str:
    return f"""{PASS}
def ring_all_gather(part):
    rank, p = dist.get_rank(), dist.get_world_size()
{indented(start)}
    for step in range({steps}):
{indented(step, 8)}
{indented(end)}
"""


ALL_GATHER = [
    ("sends its own part again and again", all_gather(f"pass_on(part, {IN})"), "what do you send: your own part once more"),
    ("receives into the next place", all_gather(f"pass_on({OUT}, rows[(rank + step + 1) % p])"), "Write the table for p = 3"),
    ("in the order of arrival", all_gather("rows.append(torch.empty_like(part))\npass_on(rows[-2], rows[-1])", start="rows = [part.clone()]"), "in another order"),
    ("one step too few", all_gather(steps="p - 2"), "Nothing was sent"),
    ("one step too few for more than two ranks", all_gather(steps="max(1, p - 2) if p > 1 else 0"), "Some rows never came"),
    ("one step too many", all_gather(steps="p"), "more was sent than one part"),
    ("p times the same tensor", all_gather("pass_on(part, torch.empty_like(part))", start="rows = [part.clone()] * p"), "One part stands in all p places"),
    ("no communication", all_gather("pass"), "Nothing was sent"),
    ("concatenated", all_gather(end="return torch.cat(rows)"), "Which of torch.cat and torch.stack"),
    ("a list", all_gather(end="return rows"), "what does its last line give back"),
    ("a reduce by mistake", all_gather(end="return torch.stack(rows).sum(0)"), "Should they be added"),
    ("calls torch's", all_gather("pass", "dist.all_gather(rows, part)\nreturn torch.stack(rows)"), "The exercise is to build it"),
    ("an all-reduce of a tensor that is zero elsewhere", all_gather("pass", "whole = torch.stack(rows)\ndist.all_reduce(whole)\nreturn whole"), "The exercise is to build it"),
    ("the whole goes round, not one part", all_gather("""
        received = torch.empty_like(whole)
        pass_on(whole, received)
        own = whole[rank].clone()
        whole = torch.where(received != 0, received, whole)
        whole[rank] = own
        """, "return whole", start="whole = torch.zeros(p, *part.shape, dtype=part.dtype)\nwhole[rank] = part"), "how large is one"),
    ("straight to everybody", all_gather(f"pass_on(part, {IN}, shift=step + 1)"), "everybody sends to one neighbour only"),
    ("plain send, then recv", all_gather(f"dist.send({OUT}, {RIGHT})\ndist.recv({IN}, {LEFT})"), "start both with dist.batch_isend_irecv"),
    ("does not wait", all_gather(f"dist.isend({OUT}, {RIGHT})\ndist.irecv({IN}, {LEFT})"), "only start a message"),
    ("receives into the caller's tensor", all_gather(f"{OUT}.copy_(part)\nif step < p - 1:\n    pass_on(part.clone(), part)", steps="p", start="rows = [torch.zeros_like(part) for _ in range(p)]"), "x belongs to the caller"),
]  # fmt: skip

# 1.4

BOTH_RINGS = "return ring_all_gather(ring_reduce_scatter(x.reshape(p, -1))).reshape(x.shape)"


def all_reduce(body: str) -> str:
    return f"""{PASS}
def ring_all_reduce(x):
    p = dist.get_world_size()
{indented(body)}
"""


ALL_REDUCE = [
    ("calls torch's", all_reduce("total = x.clone()\ndist.all_reduce(total)\nreturn total"), "The exercise is to build it"),
    ("calls torch's, in place", all_reduce("dist.all_reduce(x)\nreturn x"), "The exercise is to build it"),
    ("whole tensors go round", all_reduce("total, outgoing = x.clone(), x.clone()\nfor _ in range(p - 1):\n    received = torch.empty_like(x)\n    pass_on(outgoing, received)\n    total, outgoing = total + received, received\nreturn total"), "messages of the size of x went out"),
    ("gathers everything, then adds", all_reduce("return ring_all_gather(x.clone()).sum(0)"), "messages of the size of x went out"),
    ("by way of rank 0", all_reduce("parts = gather(x, 0)\ntotal = sum(parts) if parts else None\nreturn scatter(torch.empty_like(x), [total] * p if parts else None, 0)"), "messages of the size of x went out"),
    ("only the reduce-scatter", all_reduce("return ring_reduce_scatter(x.reshape(p, -1))"), "The result has the shape of x"),
    ("only the all-gather", all_reduce("return ring_all_gather(x.reshape(p, -1)[dist.get_rank()].clone()).reshape(x.shape)"), "Take it apart"),
    ("the shape is not restored", all_reduce(swap(BOTH_RINGS, ".reshape(x.shape)", "")), "which call leads back at the end"),
    ("returned flat", all_reduce(swap(BOTH_RINGS, ".reshape(x.shape)", ".reshape(-1)")), "which call leads back at the end"),
    ("cuts the first dimension only", all_reduce("parts = torch.stack(x.chunk(p))\nreturn torch.cat(list(ring_all_gather(ring_reduce_scatter(parts))))"), "your code fails on rank"),
    ("cut by columns, joined by rows", all_reduce(swap(BOTH_RINGS, "x.reshape(p, -1)", "x.reshape(-1, p).T.contiguous()")), "How was x cut into p parts"),
    ("own part instead of the others'", all_reduce("part = ring_reduce_scatter(x.reshape(p, -1))\nring_all_gather(part)\nreturn torch.stack([part] * p).reshape(x.shape)"), "Which of the two functions brings the other parts"),
    ("returns x", all_reduce("ring_all_gather(ring_reduce_scatter(x.reshape(p, -1)))\nreturn x"), "what did you do with what it returned"),
    ("writes the result into x", all_reduce(swap(BOTH_RINGS, "return", "total =") + "\nreturn x.copy_(total)"), "x belongs to the caller"),
    ("the mean", all_reduce(BOTH_RINGS + " / p"), "Is this the mean"),
    ("twice", all_reduce("total = ring_all_gather(ring_reduce_scatter(x.reshape(p, -1)))\nreturn ring_all_gather(ring_reduce_scatter(total)).reshape(x.shape)"), "Is something added that is a sum already"),
    ("the all-gather twice", all_reduce("part = ring_reduce_scatter(x.reshape(p, -1))\nring_all_gather(part)\nreturn ring_all_gather(part).reshape(x.shape)"), "by more messages than it takes"),
    ("no communication", all_reduce("return x.clone()"), "Nothing was sent"),
]  # fmt: skip

# 1.5

POINTS = """
n = torch.tensor([size for size, _ in points], dtype=torch.float64)
t = torch.tensor([seconds for _, seconds in points], dtype=torch.float64)
"""
ONES = "torch.ones(len(points), 1, dtype=torch.float64)"
FIT = POINTS + (
    "equations = torch.stack([1 / t, n / t], dim=1)\n"
    f"solution = torch.linalg.lstsq(equations, {ONES}).solution\n"
    "return solution[0].item(), solution[1].item()"
)
RING = "return 2 * (world_size - 1) * (alpha + beta * n / world_size)"
LEVELS = "(world_size - 1).bit_length()"
TREE = f"return 2 * {LEVELS} * (alpha + beta * n)"


def times(fit: str = FIT, ring: str = RING, tree: str = TREE) -> str:
    return f"""
def fit_line(points):
{indented(fit)}


def ring_seconds(n, world_size, alpha, beta):
{indented(ring)}


def tree_seconds(n, world_size, alpha, beta):
{indented(tree)}
"""


TIMES = [
    ("fit: plain least squares", times(POINTS + "n_mean, t_mean = n.mean(), t.mean()\nbeta = ((n - n_mean) * (t - t_mean)).sum() / ((n - n_mean) ** 2).sum()\nreturn (t_mean - beta * n_mean).item(), beta.item()"), "This line minimises the absolute errors"),
    ("fit: beta and alpha swapped", times(swap(FIT, "solution[0].item(), solution[1].item()", "solution[1].item(), solution[0].item()")), "Which of the two is the time of an empty message"),
    ("fit: the bandwidth for beta", times(swap(FIT, "solution[1].item()", "1 / solution[1].item()")), "beta is seconds for each byte"),
    ("fit: weights of the wrong power", times(swap_all(FIT, ("[1 / t, n / t]", "[t**-0.5, n * t**-0.5]"), (ONES, "(t**0.5)[:, None]"))), "By which power of t"),
    ("fit: first and last point", times("(n0, t0), (n1, t1) = points[0], points[-1]\nbeta = (t1 - t0) / (n1 - n0)\nreturn t0 - beta * n0, beta"), "What did the other points say"),
    ("fit: the shortest time for alpha", times("alpha = min(seconds for _, seconds in points)\nn, t = points[-1]\nreturn alpha, (t - alpha) / n"), "What did the other points say"),
    ("fit: the mean slope from the first point to every point", times(POINTS + "beta = ((t - t[0]) / (n - n[0])).mean()\nreturn (t[0] - beta * n[0]).item(), beta.item()"), "What is divided by what"),
    ("fit: the right side left as it was", times(swap(FIT, ONES, "t[:, None]")), "Divide both sides"),
    ("fit: both on logarithmic axes", times(POINTS + "n, t = n.log(), t.log()\nslope = ((n - n.mean()) * (t - t.mean())).sum() / ((n - n.mean()) ** 2).sum()\nreturn (t.mean() - slope * n.mean()).exp().item(), slope.item()"), "Divide both sides"),
    ("fit: forgets to return", times(swap(FIT, "return solution[0].item(), solution[1].item()", "pass")), "Two numbers are wanted"),
    ("fit: one number", times(swap(FIT, "solution[0].item(), solution[1].item()", "solution[0].item()")), "Two numbers are wanted"),
    ("costs: ring of whole messages", times(ring=swap(RING, " / world_size", "")), "In a ring each message is one part"),
    ("costs: ring, once round", times(ring=swap(RING, "2 * ", "")), "And the way back"),
    ("costs: ring of p steps", times(ring=swap(RING, "(world_size - 1)", "world_size")), "Which is one too many"),
    ("costs: ring of a single step", times(ring=swap(RING, "2 * (world_size - 1) * ", "")), "That is one step. How many follow one another"),
    ("costs: ring with a single alpha", times(ring=swap(RING, "2 * (world_size - 1) * (alpha + beta * n / world_size)", "alpha + 2 * (world_size - 1) * beta * n / world_size")), "every message costs alpha"),
    ("costs: a star, in which rank 0 talks to one rank after another", times(tree=swap(TREE, ".bit_length()", "")), "Count the steps that follow one another"),
    ("costs: tree of parts", times(tree=swap(TREE, "beta * n", "beta * n / world_size")), "Along a tree every message is the whole tensor"),
    ("costs: tree, up only", times(tree=swap(TREE, "2 * ", "")), "And the way back"),
    ("costs: tree with a level too many", times(tree=swap(TREE, LEVELS, "world_size.bit_length()")), "That is one level too many"),
    ("costs: tree with levels rounded down, p = 8 right", times(tree=swap(TREE, LEVELS, "(world_size.bit_length() - 1)")), "wrong (right at p = 8)."),
    ("costs: tree with the levels rounded down", times(tree=swap(TREE, LEVELS, "(world_size.bit_length() - 1)")), "rounded up"),
    ("costs: tree with fractions of a level", times(tree=swap(TREE, LEVELS, "torch.log2(torch.tensor(float(world_size), dtype=torch.float64)).item()")), "rounded up"),
    ("costs: tree that costs something for one rank", times(tree=swap(TREE, LEVELS, f"max(1, {LEVELS})")), "With one rank nothing is sent"),
    ("costs: forgets to return", times(tree=swap(TREE, "return ", "")), "A number of seconds is wanted"),
]  # fmt: skip

WRONG = [
    WrongAnswer(exercise=exercise, name=name, source=source, says=says)
    for exercise, answers in (
        ("1.1", BOTH),
        ("1.2", REDUCE_SCATTER),
        ("1.3", ALL_GATHER),
        ("1.4", ALL_REDUCE),
        ("1.5", TIMES),
    )
    for name, source, says in answers
]
