"""Wrong answers to the exercises of chapter 01, and what each must be told."""

from tests.wrong_answers import WrongAnswer, indented, swap, swap_all

# 1.1

SENDS = "for other in range(world_size):\n    if other != src:\n        dist.send(chunks[other], other)"
SCATTER = f"""
if rank != src:
    dist.recv(out, src)
    return out
{SENDS}
return out.copy_(chunks[src])
"""
RECEIVES = "for other in range(world_size):\n    if other != dst:\n        dist.recv(chunks[other], other)"
PARTS = "chunks = [torch.empty_like(x) for _ in range(world_size)]\nchunks[rank].copy_(x)"
GATHER = f"""
if rank != dst:
    dist.send(x, dst)
    return None
{PARTS}
{RECEIVES}
return chunks
"""


def scatter_and_gather(scatter: str, gather: str) -> str:
    return f"""
def scatter(out, chunks, src):
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
    ("scatter: the source is always rank 0", scatter(swap(SCATTER, "src", "0")), "chunks[other]"),
    ("scatter: the source's own chunk is not filled in", scatter(swap(SCATTER, "out.copy_(chunks[src])", "out")), "has to copy its own chunk"),
    ("scatter: another name instead of a copy", scatter(swap(SCATTER, "return out.copy_(chunks[src])", "out = chunks[src]\nreturn out")), "a new name for a different tensor"),
    ("scatter: returns the caller's chunk", scatter(swap(SCATTER, "return out.copy_(chunks[src])", "out.copy_(chunks[src])\nreturn chunks[src]")), "Which tensor does your last line return on the source rank"),
    ("gather: puts x itself into the list", gather(swap(GATHER, "chunks[rank].copy_(x)", "chunks[rank] = x")), "How do you put a copy of x into the list"),
    ("scatter: sends to itself", scatter("if rank == src:\n    for other in range(world_size):\n        dist.send(chunks[other], other)\ndist.recv(out, src)\nreturn out"), "your code fails on"),
    ("scatter: chunks counted without the source", scatter(swap(SCATTER, SENDS, "others = [other for other in range(world_size) if other != src]\nfor index, other in enumerate(others):\n    dist.send(chunks[index], other)")), "Rank r should get `chunks[r]`"),
    ("scatter: everybody gets the first chunk", scatter(swap(SCATTER, "chunks[other]", "chunks[0]")), "Which index do you use in each of your sends"),
    ("scatter: all chunks to everybody", scatter("""
        whole = torch.empty(world_size, *out.shape, dtype=out.dtype)
        if rank == src:
            whole = torch.stack(chunks)
            for other in range(world_size):
                if other != src:
                    dist.send(whole, other)
        else:
            dist.recv(whole, src)
        return out.copy_(whole[rank])
        """), "Each rank needs `chunks[rank]` and nothing else"),
    ("scatter: calls torch's", scatter("dist.scatter(out, chunks, src=src)\nreturn out"), "Build your function from `dist.send` and `dist.recv` instead"),
    ("scatter: forgets to return", scatter(swap_all(SCATTER, ("return out\n", "return\n"), ("return out.copy_", "out.copy_"))), "What does your function return"),
    ("scatter: no communication", scatter("if chunks is not None:\n    out.copy_(chunks[src])\nreturn out"), "Nothing was sent"),
    ("scatter: the others don't receive", scatter(swap(SCATTER, "    dist.recv(out, src)\n", "")), "never receives"),
    ("scatter: receives from anybody", scatter(swap(SCATTER, "dist.recv(out, src)", "dist.recv(out)")), "Which rank's data belongs in this tensor"),
    ("scatter: does not wait", scatter(swap_all(SCATTER, ("dist.recv(", "dist.irecv("), ("dist.send(", "dist.isend("))), "What should you do with that request"),
    ("scatter: starts and does not wait, on the others only", scatter(swap(SCATTER, "dist.recv(", "dist.irecv(")), "What should you do with that request"),
    ("scatter: the root sends to itself too", scatter(swap(SCATTER, "    if other != src:\n        dist.send", "    dist.send")), "Which ranks shouldn't make the call that failed"),
    ("scatter: the root receives from itself too", scatter(swap(SCATTER, "return out.copy_(chunks[src])", "dist.recv(out, src)\nreturn out")), "Which ranks shouldn't make the call that failed"),
    ("gather: the root's own comes last", gather(swap_all(GATHER, (PARTS, "chunks = []"), ("dist.recv(chunks[other], other)", "chunks.append(torch.empty_like(x))\n        dist.recv(chunks[-1], other)"), ("return chunks", "return [*chunks, x.clone()]"))), "The list should be in rank order"),
    ("gather: p times the same tensor", gather(swap_all(GATHER, (PARTS, "chunks = [torch.empty_like(x)] * world_size"), ("return chunks", "chunks[dst] = x.clone()\nreturn chunks"))), "all p entries are the same tensor"),
    ("gather: the root's own is missing", gather(swap_all(GATHER, ("empty_like", "zeros_like"), ("chunks[rank].copy_(x)\n", ""))), "rank dst's own tensor at index dst"),
    ("gather: a list on every rank", gather("""
        chunks = [torch.zeros_like(x) for _ in range(world_size)]
        chunks[rank].copy_(x)
        if rank != dst:
            dist.send(x, dst)
        else:
            for other in range(world_size):
                if other != dst:
                    dist.recv(chunks[other], other)
        return chunks
        """), "What should the other ranks return"),
    ("gather: everybody to everybody", gather("chunks = [torch.zeros_like(x) for _ in range(world_size)]\ndist.all_gather(chunks, x)\nreturn chunks if rank == dst else None"), "Build your function from `dist.send` and `dist.recv` instead"),
    ("gather: always to rank 0", gather(swap(GATHER, "dst", "0")), "Does your code assume that dst is rank 0"),
    ("gather: forgets to return", gather(swap(GATHER, "return chunks", "")), "Rank dst returned None"),
    ("gather: every rank sends twice", gather(swap_all(GATHER, ("    dist.send(x, dst)\n", "    dist.send(x, dst)\n    dist.send(x, dst)\n"), (RECEIVES, RECEIVES + "\n        dist.recv(chunks[other], other)"))), "Which ranks have to send a message"),
    ("gather: one tensor, and no list", gather(swap(GATHER, "return chunks", "return torch.stack(chunks)")), "The result should be a list of p tensors"),
    ("gather: does not wait", gather(swap(GATHER, "dist.recv(", "dist.irecv(")), "What should you do with that request"),
    ("gather: the root receives from itself too", gather(swap(GATHER, "    if other != dst:\n        dist.recv", "    dist.recv")), "Which ranks shouldn't make the call that failed"),
    ("gather: receives into the caller's tensor", gather(swap_all(GATHER, ("torch.empty_like(x)", "x.clone()"), ("chunks[rank].copy_(x)\n", ""), ("dist.recv(chunks[other], other)", "dist.recv(x, other)\n        chunks[other].copy_(x)"))), "Which line writes into a tensor that your caller still needs"),
]  # fmt: skip

# Both messages of one step, sent the way the chapter shows. The answers to 1.2 and 1.3 start with it
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
    ("starts with its own row", reduce_scatter(swap(ROW, "(rank - 1) % p", "rank")), "On which rank does chunk r have to start"),
    ("starts with the right neighbour's row", reduce_scatter(swap(ROW, "rank - 1", "rank + 1")), "On which rank does chunk r have to start"),
    ("counts rows upwards", reduce_scatter(step=swap(ADD, "row - 1", "row + 1")), "Make a table for p = 3"),
    ("adds the row that it sent", reduce_scatter(step="pass_on(total, received)\ntotal = received + x[row]\nrow = (row - 1) % p"), "Make a table for p = 3"),
    ("one step too few", reduce_scatter(steps="p - 2"), "Nothing was sent"),
    ("one step too few for more than two ranks", reduce_scatter(steps="max(1, p - 2) if p > 1 else 0"), "Make a table for p = 3"),
    ("one step too many", reduce_scatter(steps="p"), "Make a table for p = 3"),
    ("goes round the ring twice", reduce_scatter(steps="2 * p - 1"), "until every rank has added its values once"),
    ("its own row is added once more at the end", reduce_scatter(end="return total + x[rank] if p > 1 else total"), "The sum counts one rank's values twice"),
    ("its own row takes the place of what comes in", reduce_scatter(step=swap(ADD, "received + x[row]", "x[row].clone()")), "What do you have to add to the tensor you receive"),
    ("passes on without adding", reduce_scatter(step=swap(ADD, "received + x[row]", "received")), "Do you add your own values to every chunk you receive"),
    ("its own row is not added at the end", reduce_scatter(step=ADD + " if step < p - 2 else received"), "including the last chunk"),
    ("its own row is not added at the end, for more than two ranks", reduce_scatter(step=ADD + " if step < p - 2 or p == 2 else received"), "including the last chunk"),
    ("adds into x", reduce_scatter(swap(ROW, ".clone()", ""), swap(ADD, "total = received + x[row]", "x[row] += received\ntotal = x[row]")), "Your caller still needs `x`"),
    ("does nothing but cut", reduce_scatter("total = x[rank].clone()", "pass"), "Nothing was sent"),
    ("zeros of the right shape", reduce_scatter("total = torch.zeros_like(x[0])", "pass_on(total, received)"), "but all the values are zero"),
    ("calls torch's all-reduce", reduce_scatter("total = x.clone()\ndist.all_reduce(total)\ntotal = total[rank]", "pass"), "the exercise is to build it yourself"),
    ("calls torch's reduce-scatter", reduce_scatter("total = x[0].clone()\ndist.reduce_scatter(total, list(x))", "pass"), "the exercise is to build it yourself"),
    ("sends whole tensors round", reduce_scatter("total = x.clone()\noutgoing = x.clone()", PASS_WHOLE, "return total[rank]"), "with a single chunk in each message"),
    ("returns the whole sum", reduce_scatter("total = x.clone()\noutgoing = x.clone()", PASS_WHOLE), "but each rank should have only one chunk"),
    ("straight to the owner", reduce_scatter("total = x[rank].clone()", "pass_on(x[(rank + step) % p], received, shift=step)\ntotal += received", steps="1, p"), "each rank sends messages to only one neighbor"),
    ("plain send, then recv", reduce_scatter(step=messages(f"dist.send(total, {RIGHT})\ndist.recv(received, {LEFT})")), "start both messages with `dist.batch_isend_irecv`"),
    ("all receive first", reduce_scatter(step=messages(f"dist.recv(received, {LEFT})\ndist.send(total, {RIGHT})")), "can the neighbor get to that call"),
    ("sends both ways, receives from nobody's side", reduce_scatter(step=messages(f"a = dist.isend(total, {RIGHT})\nb = dist.irecv(received, {RIGHT})\na.wait()\nb.wait()")), "Which call of its neighbor is the rank waiting for"),
    ("does not wait", reduce_scatter(step=messages(f"dist.isend(total, {RIGHT})\ndist.irecv(received, {LEFT})")), "What should you do with that request"),
    ("a loop that ends one step early", reduce_scatter(steps="p - 2"), "how many times does the loop run for this p"),
    ("rank 0 takes no part", reduce_scatter(step="rank and " + ADD), "the ranks are waiting for each other"),
    ("the mean", reduce_scatter(end="return total / p"), "You returned the mean"),
    ("in float32", reduce_scatter("x = x.float()\n" + ROW, end="return total.to(torch.float64)"), "Which step changes the dtype"),
    ("forgets to return", reduce_scatter(end="pass"), "what does its last line return"),
    ("the right sums, then handed one rank further", reduce_scatter(end="received = torch.empty_like(total)\np > 1 and pass_on(total, received)\nreturn received if p > 1 else total"), "they end up on the wrong ranks"),
]  # fmt: skip

# 1.3

ROWS = "rows = [torch.zeros_like(chunk) for _ in range(p)]\nrows[rank].copy_(chunk)"
OUT, IN = "rows[(rank - step) % p]", "rows[(rank - step - 1) % p]"


def all_gather(
    step: str = f"pass_on({OUT}, {IN})", end: str = "return torch.stack(rows)", steps: str = "p - 1", start: str = ROWS
) -> str:
    return f"""{PASS}
def ring_all_gather(chunk):
    rank, p = dist.get_rank(), dist.get_world_size()
{indented(start)}
    for step in range({steps}):
{indented(step, 8)}
{indented(end)}


def ring_all_reduce(x):
    return ring_all_gather(ring_reduce_scatter(x.reshape(dist.get_world_size(), -1))).reshape(x.shape)
"""


ALL_GATHER = [
    ("sends its own chunk again and again", all_gather(f"pass_on(chunk, {IN})"), "do you send your own chunk again"),
    ("receives into the next place", all_gather(f"pass_on({OUT}, rows[(rank + step + 1) % p])"), "Make a table for p = 3"),
    ("in the order of arrival", all_gather("rows.append(torch.empty_like(chunk))\npass_on(rows[-2], rows[-1])", start="rows = [chunk.clone()]"), "but they're in the wrong order"),
    ("one step too few", all_gather(steps="p - 2"), "Nothing was sent"),
    ("one step too few for more than two ranks", all_gather(steps="max(1, p - 2) if p > 1 else 0"), "Some chunks never arrived"),
    ("one step too many", all_gather(steps="p"), "with a single chunk in each message"),
    ("p times the same tensor", all_gather("pass_on(chunk, torch.empty_like(chunk))", start="rows = [chunk.clone()] * p"), "Your result repeats the same chunk p times"),
    ("no communication", all_gather("pass"), "Nothing was sent"),
    ("concatenated", all_gather(end="return torch.cat(rows)"), "`torch.cat` or `torch.stack`"),
    ("a list", all_gather(end="return rows"), "what does its last line return"),
    ("a reduce by mistake", all_gather(end="return torch.stack(rows).sum(0)"), "You summed the chunks"),
    ("calls torch's", all_gather("pass", "dist.all_gather(rows, chunk)\nreturn torch.stack(rows)"), "the exercise is to build it yourself"),
    ("an all-reduce of a tensor that is zero elsewhere", all_gather("pass", "whole = torch.stack(rows)\ndist.all_reduce(whole)\nreturn whole"), "the exercise is to build it yourself"),
    ("the whole goes round, not one chunk", all_gather("""
        received = torch.empty_like(whole)
        pass_on(whole, received)
        own = whole[rank].clone()
        whole = torch.where(received != 0, received, whole)
        whole[rank] = own
        """, "return whole", start="whole = torch.zeros(p, *chunk.shape, dtype=chunk.dtype)\nwhole[rank] = chunk"), "How large is one chunk"),
    ("straight to everybody", all_gather(f"pass_on(chunk, {IN}, shift=step + 1)"), "each rank sends messages to only one neighbor"),
    ("plain send, then recv", all_gather(f"dist.send({OUT}, {RIGHT})\ndist.recv({IN}, {LEFT})"), "start both messages with `dist.batch_isend_irecv`"),
    ("does not wait", all_gather(f"dist.isend({OUT}, {RIGHT})\ndist.irecv({IN}, {LEFT})"), "What should you do with that request"),
    ("receives into the caller's tensor", all_gather(f"{OUT}.copy_(chunk)\nif step < p - 1:\n    pass_on(chunk.clone(), chunk)", steps="p", start="rows = [torch.zeros_like(chunk) for _ in range(p)]"), "Your caller still needs `x`"),
]  # fmt: skip

BOTH_RINGS = "return ring_all_gather(ring_reduce_scatter(x.reshape(p, -1))).reshape(x.shape)"


WHOLE = """
def ring_all_reduce(x):
    return ring_all_gather(ring_reduce_scatter(x.reshape(dist.get_world_size(), -1))).reshape(x.shape)
"""


def all_reduce(body: str) -> str:
    return swap(all_gather(), WHOLE, f"\ndef ring_all_reduce(x):\n    p = dist.get_world_size()\n{indented(body)}\n")


ALL_REDUCE = [
    ("calls torch's", all_reduce("total = x.clone()\ndist.all_reduce(total)\nreturn total"), "the exercise is to build it yourself"),
    ("calls torch's, in place", all_reduce("dist.all_reduce(x)\nreturn x"), "the exercise is to build it yourself"),
    ("whole tensors go round", all_reduce("total, outgoing = x.clone(), x.clone()\nfor _ in range(p - 1):\n    received = torch.empty_like(x)\n    pass_on(outgoing, received)\n    total, outgoing = total + received, received\nreturn total"), "some of your messages are too large"),
    ("gathers everything, then adds", all_reduce("return ring_all_gather(x.clone()).sum(0)"), "some of your messages are too large"),
    ("by way of rank 0", all_reduce("chunks = gather(x, 0)\ntotal = sum(chunks) if chunks else None\nreturn scatter(torch.empty_like(x), [total] * p if chunks else None, 0)"), "some of your messages are too large"),
    ("only the reduce-scatter", all_reduce("return ring_reduce_scatter(x.reshape(p, -1))"), "The result should have the same shape as `x`"),
    ("only the all-gather", all_reduce("return ring_all_gather(x.reshape(p, -1)[dist.get_rank()].clone()).reshape(x.shape)"), "Check the two halves separately"),
    ("the shape is not restored", all_reduce(swap(BOTH_RINGS, ".reshape(x.shape)", "")), "Which call restores the original shape at the end"),
    ("returned flat", all_reduce(swap(BOTH_RINGS, ".reshape(x.shape)", ".reshape(-1)")), "Which call restores the original shape at the end"),
    ("cuts the first dimension only", all_reduce("chunks = torch.stack(x.chunk(p))\nreturn torch.cat(list(ring_all_gather(ring_reduce_scatter(chunks))))"), "your code fails on"),
    ("cut by columns, joined by rows", all_reduce(swap(BOTH_RINGS, "x.reshape(p, -1)", "x.reshape(-1, p).T.contiguous()")), "do you put each element back in its original position"),
    ("own chunk instead of the others'", all_reduce("chunk = ring_reduce_scatter(x.reshape(p, -1))\nring_all_gather(chunk)\nreturn torch.stack([chunk] * p).reshape(x.shape)"), "gathers the other ranks' chunks"),
    ("returns x", all_reduce("ring_all_gather(ring_reduce_scatter(x.reshape(p, -1)))\nreturn x"), "what did you do with its result"),
    ("writes the result into x", all_reduce(swap(BOTH_RINGS, "return", "total =") + "\nreturn x.copy_(total)"), "Your caller still needs `x`"),
    ("the mean", all_reduce(BOTH_RINGS + " / p"), "You returned the mean"),
    ("twice", all_reduce("total = ring_all_gather(ring_reduce_scatter(x.reshape(p, -1)))\nreturn ring_all_gather(ring_reduce_scatter(total)).reshape(x.shape)"), "tensors that already contain the full sum"),
    ("the all-gather twice", all_reduce("chunk = ring_reduce_scatter(x.reshape(p, -1))\nring_all_gather(chunk)\nreturn ring_all_gather(chunk).reshape(x.shape)"), "p - 1 messages for the all-gather"),
    ("no communication", all_reduce("return x.clone()"), "Nothing was sent"),
]  # fmt: skip

# 1.4

RING = "return 2 * (world_size - 1) * (alpha + beta * n / world_size)"
LEVELS = "(world_size - 1).bit_length()"
TREE = f"return 2 * {LEVELS} * (alpha + beta * n)"
CROSSING = f"""
steps, levels = world_size - 1, {LEVELS}
if steps == levels:
    return 0.0
return alpha * (steps - levels) / (beta * (levels - steps / world_size))
"""


def times(ring: str = RING, tree: str = TREE, crossing: str = CROSSING) -> str:
    return f"""
def ring_seconds(n, world_size, alpha, beta):
{indented(ring)}


def tree_seconds(n, world_size, alpha, beta):
{indented(tree)}


def ring_wins_from(world_size, alpha, beta):
{indented(crossing)}
"""


TIMES = [
    ("ring of whole messages", times(ring=swap(RING, " / world_size", "")), "each message contains just one of the p chunks"),
    ("ring, once round", times(ring=swap(RING, "2 * ", "")), "Which half is missing from your formula"),
    ("ring of p steps", times(ring=swap(RING, "(world_size - 1)", "world_size")), "Which extra step did you count"),
    ("ring of a single step", times(ring=swap(RING, "2 * (world_size - 1) * ", "")), "Your result is the time for a single step"),
    ("ring with a single alpha", times(ring=swap(RING, "2 * (world_size - 1) * (alpha + beta * n / world_size)", "alpha + 2 * (world_size - 1) * beta * n / world_size")), "every message costs alpha"),
    ("a star, in which rank 0 talks to one rank after another", times(tree=swap(TREE, ".bit_length()", "")), "What's the total time over all the steps"),
    ("tree of chunks", times(tree=swap(TREE, "beta * n", "beta * n / world_size")), "In a tree, every message contains the full tensor"),
    ("tree, up only", times(tree=swap(TREE, "2 * ", "")), "Which half is missing from your formula"),
    ("tree with a level too many", times(tree=swap(TREE, LEVELS, "world_size.bit_length()")), "Your tree has one level too many"),
    ("tree with levels rounded down, p = 8 right", times(tree=swap(TREE, LEVELS, "(world_size.bit_length() - 1)")), "wrong (right at p = 8)."),
    ("tree with the levels rounded down", times(tree=swap(TREE, LEVELS, "(world_size.bit_length() - 1)")), "rounded up to a whole number"),
    ("tree with fractions of a level", times(tree=swap(TREE, LEVELS, "torch.log2(torch.tensor(float(world_size), dtype=torch.float64)).item()")), "rounded up to a whole number"),
    ("tree that costs something for one rank", times(tree=swap(TREE, LEVELS, f"max(1, {LEVELS})")), "With a single rank, nothing is sent at all"),
    ("forgets to return", times(tree=swap(TREE, "return ", "")), "The result should be a number"),
    ("crossover: alpha / beta", times(crossing="return alpha / beta if world_size > 3 else 0.0"), "a *single* message spends as much time on latency"),
    ("crossover: the wrong sign", times(crossing=swap(CROSSING, "steps - levels", "levels - steps")), "A message size can't be negative"),
    ("crossover: the inverse", times(crossing=swap(CROSSING, "return alpha * (steps - levels) / (beta * (levels - steps / world_size))", "return (beta * (levels - steps / world_size)) / (alpha * (steps - levels))")), "Does the crossover move to larger messages"),
    ("crossover: compares one step of each", times(crossing="return 0.0"), "the ring takes more steps than the tree"),
    ("crossover: divides by zero for small p", times(crossing=swap(CROSSING, "if steps == levels:\n    return 0.0\n", "")), "fails only for p = 1"),
    ("crossover: alpha / beta, also for few ranks", times(crossing=swap(CROSSING, "return 0.0", "return alpha / beta")), "At what message size does the ring start to win"),
    ("crossover: adds what the ring saves", times(crossing=swap(CROSSING, "levels - steps / world_size", "levels + steps / world_size")), "Do the two functions predict the same time"),
    ("crossover: levels rounded down", times(crossing=swap(CROSSING, LEVELS, "world_size.bit_length() - 1")), "Do the two functions predict the same time"),
    ("crossover: in elements", times(crossing=swap(CROSSING, "return alpha", "return 0.25 * alpha")), "Do the two functions predict the same time"),
    ("crossover: nothing", times(crossing="pass"), "The result should be a number of bytes"),
]  # fmt: skip

# 1.5

VOTE = """
skips = (~gradient.isfinite().all()).to(torch.float32)
dist.all_reduce(skips)
if skips > 0:
    return False
"""
UPDATE = """
total = gradient.clone()
dist.all_reduce(total)
weight -= lr * total
return True
"""


def step(vote: str = VOTE, update: str = UPDATE) -> str:
    return f"def careful_step(weight, gradient, lr):\n{indented(vote)}\n{indented(update)}\n"


STEPS = [
    ("as shipped", step("if not gradient.isfinite().all():\n    return False"), "Do the other ranks know whether that condition is true"),
    ("looks at its own gradient after the vote", step(swap(VOTE, "skips > 0", "not gradient.isfinite().all()")), "Do the other ranks know whether that condition is true"),
    ("rank 0 decides", step(swap(VOTE, "all_reduce(skips)", "broadcast(skips, src=0)")), "Does each rank's gradient affect your decision"),
    ("skips where all ranks want to", step(swap(VOTE, "skips > 0", "skips == dist.get_world_size()")), "which sums are possible"),
    ("counts finite gradients, skips where there are none", step("finite = gradient.isfinite().all().float()\ndist.all_reduce(finite)\nif not finite:\n    return False"), "which sums are possible"),
    ("takes the step with zeros for its own gradient", step("if not gradient.isfinite().all():\n    gradient = torch.zeros_like(gradient)"), "find out that it has to skip"),
    ("replaces what isn't finite by zeros", step("gradient = gradient.nan_to_num(0.0, 0.0, 0.0)"), "find out that it has to skip"),
    ("votes with NaN only", step(swap(VOTE, "~gradient.isfinite().all()", "gradient.isnan().any()")), "which sums are possible"),
    ("a vote for each element", step(swap_all(VOTE, ("(~gradient.isfinite().all())", "(~gradient.isfinite())"), ("skips > 0", "skips.any()"))), "How many elements does it take to send that information"),
    ("its own gradient", step(update=swap(UPDATE, "dist.all_reduce(total)\n", "")), "Which collective gives every rank the sum"),
    ("the mean", step(update=swap(UPDATE, "lr * total", "lr * total / dist.get_world_size()")), "Does the task ask for the mean or the sum"),
    ("makes a new weight", step(update=swap(UPDATE, "weight -= lr * total", "weight = weight - lr * total")), "does your code change `weight` in place"),
    ("returns nothing where it skips", step(update=swap(UPDATE, "return True", "return None")), "What should your function return"),
    ("always skips", step("return False"), "Under what condition do you skip the step"),
    ("does not wait for the vote", step(swap(VOTE, "all_reduce(skips)", "all_reduce(skips, async_op=True)")), "Do the other ranks know whether that condition is true"),
    ("skips when the sum is zero", step(update=swap(UPDATE, "weight -=", "if not total.any():\n    return False\nweight -=")), "What should your function return"),
    ("adds", step(update=swap(UPDATE, "weight -=", "weight +=")), "what should each rank subtract from its weight"),
]  # fmt: skip

WRONG = [
    WrongAnswer(exercise=exercise, name=name, source=source, says=says)
    for exercise, answers in (
        ("1.1", BOTH),
        ("1.2", REDUCE_SCATTER),
        ("1.3", [(f"all-gather: {name}", *rest) for name, *rest in ALL_GATHER]),
        ("1.3", [(f"all-reduce: {name}", *rest) for name, *rest in ALL_REDUCE]),
        ("1.4", TIMES),
        ("1.5", STEPS),
    )
    for name, source, says in answers
]
