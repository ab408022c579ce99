"""Plausible wrong answers to the exercises of chapter 01, and what their message must say."""

from tests.wrong_answers import WrongAnswer

SCATTER = """
def scatter(out, parts, src):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != src:
        dist.recv(out, src)
        return out
    for other in range(world_size):
        if other != src:
            dist.send(parts[other], other)
    return out.copy_(parts[src])


"""

GATHER = """

def gather(x, dst):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != dst:
        dist.send(x, dst)
        return None
    parts = [torch.empty_like(x) for _ in range(world_size)]
    parts[rank].copy_(x)
    for other in range(world_size):
        if other != dst:
            dist.recv(parts[other], other)
    return parts
"""

# Both messages of a step, as the chapter shows them
PASS = """
def pass_on(outgoing, incoming, shift=1):
    rank, p = dist.get_rank(), dist.get_world_size()
    messages = [
        dist.P2POp(dist.isend, outgoing, (rank + shift) % p), dist.P2POp(dist.irecv, incoming, (rank - shift) % p)
    ]
    for request in dist.batch_isend_irecv(messages):
        request.wait()


"""

COSTS = """

def ring_seconds(n, world_size, alpha, beta):
    return 2 * (world_size - 1) * (alpha + beta * n / world_size)


def tree_seconds(n, world_size, alpha, beta):
    return 2 * (world_size - 1).bit_length() * (alpha + beta * n)
"""

FIT = """
def fit_line(points):
    n = torch.tensor([size for size, _ in points], dtype=torch.float64)
    t = torch.tensor([seconds for _, seconds in points], dtype=torch.float64)
    equations = torch.stack([1 / t, n / t], dim=1)
    solution = torch.linalg.lstsq(equations, torch.ones(len(points), 1, dtype=torch.float64)).solution
    return solution[0].item(), solution[1].item()


"""


def wrong_scatter(name: str, source: str, says: str) -> WrongAnswer:
    return WrongAnswer(exercise="1.1", name=f"scatter: {name}", source=source + GATHER, says=says)


def wrong_gather(name: str, source: str, says: str) -> WrongAnswer:
    return WrongAnswer(exercise="1.1", name=f"gather: {name}", source=SCATTER + source, says=says)


def wrong_reduce_scatter(name: str, source: str, says: str) -> WrongAnswer:
    return WrongAnswer(exercise="1.2", name=name, source=PASS + source, says=says)


def wrong_all_gather(name: str, source: str, says: str) -> WrongAnswer:
    return WrongAnswer(exercise="1.3", name=name, source=PASS + source, says=says)


def wrong_all_reduce(name: str, source: str, says: str) -> WrongAnswer:
    return WrongAnswer(exercise="1.4", name=name, source=PASS + source, says=says)


def wrong_fit(name: str, source: str, says: str) -> WrongAnswer:
    return WrongAnswer(exercise="1.5", name=f"fit: {name}", source=source + COSTS, says=says)


def wrong_costs(name: str, source: str, says: str) -> WrongAnswer:
    return WrongAnswer(exercise="1.5", name=f"costs: {name}", source=FIT + COSTS + source, says=says)


def reduce_scatter(before: str, step: str, after: str = "return total", steps: str = "p - 1") -> str:
    """A ring reduce-scatter with other lines before the loop, in it, and after it."""
    return f"""
def ring_reduce_scatter(x):
    rank, p = dist.get_rank(), dist.get_world_size()
    {before}
    for step in range({steps}):
        received = torch.empty_like(total)
        {step}
    {after}
"""


def all_gather(step: str, after: str = "return torch.stack(rows)", steps: str = "p - 1") -> str:
    """A ring all-gather with another step, or another end."""
    return f"""
def ring_all_gather(part):
    rank, p = dist.get_rank(), dist.get_world_size()
    rows = [torch.zeros_like(part) for _ in range(p)]
    rows[rank].copy_(part)
    for step in range({steps}):
        {step}
    {after}
"""


START = "row = (rank - 1) % p; total = x[row].clone()"
GO = "pass_on(total, received); row = (row - 1) % p; total = received + x[row]"
GO_ALL = "pass_on(rows[(rank - step) % p], rows[(rank - step - 1) % p])"

WRONG = [
    # ------------------------------------------------------------------ 1.1
    wrong_scatter(
        "the source is always rank 0",
        """
def scatter(out, parts, src):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != 0:
        dist.recv(out, 0)
        return out
    for other in range(1, world_size):
        dist.send(parts[other], other)
    return out.copy_(parts[0])
""",
        "parts[other]",
    ),
    wrong_scatter(
        "the source's own part is not filled in",
        """
def scatter(out, parts, src):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != src:
        dist.recv(out, src)
    else:
        for other in range(world_size):
            if other != src:
                dist.send(parts[other], other)
    return out
""",
        "Is it the source, which sends nothing to itself",
    ),
    wrong_scatter(
        "another name instead of a copy",
        """
def scatter(out, parts, src):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != src:
        dist.recv(out, src)
        return out
    for other in range(world_size):
        if other != src:
            dist.send(parts[other], other)
    out = parts[src]
    return out
""",
        "only gives a name to another tensor",
    ),
    wrong_scatter(
        "sends to itself",
        """
def scatter(out, parts, src):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == src:
        for other in range(world_size):
            dist.send(parts[other], other)
    dist.recv(out, src)
    return out
""",
        "your code fails on rank 0",
    ),
    wrong_scatter(
        "parts counted without the source",
        """
def scatter(out, parts, src):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != src:
        dist.recv(out, src)
        return out
    others = [other for other in range(world_size) if other != src]
    for index, other in enumerate(others):
        dist.send(parts[index], other)
    return out.copy_(parts[src])
""",
        "Rank r gets parts[r]",
    ),
    wrong_scatter(
        "everybody gets the first part",
        """
def scatter(out, parts, src):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != src:
        dist.recv(out, src)
        return out
    for other in range(world_size):
        if other != src:
            dist.send(parts[0], other)
    return out.copy_(parts[src])
""",
        "which index does each send use",
    ),
    wrong_scatter(
        "all parts to everybody",
        """
def scatter(out, parts, src):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = torch.empty(world_size, *out.shape, dtype=out.dtype)
    if rank == src:
        whole = torch.stack(parts)
        for other in range(world_size):
            if other != src:
                dist.send(whole, other)
    else:
        dist.recv(whole, src)
    return out.copy_(whole[rank])
""",
        "Each rank needs parts[rank] and nothing else",
    ),
    wrong_scatter(
        "calls torch's",
        """
def scatter(out, parts, src):
    dist.scatter(out, parts, src=src)
    return out
""",
        "Build it from dist.send and dist.recv",
    ),
    wrong_scatter(
        "forgets to return",
        """
def scatter(out, parts, src):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != src:
        dist.recv(out, src)
    else:
        for other in range(world_size):
            if other != src:
                dist.send(parts[other], other)
        out.copy_(parts[src])
""",
        "What does the function return",
    ),
    wrong_scatter(
        "no communication",
        """
def scatter(out, parts, src):
    if parts is not None:
        out.copy_(parts[src])
    return out
""",
        "Nothing was sent",
    ),
    wrong_scatter(
        "the others don't receive",
        """
def scatter(out, parts, src):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == src:
        for other in range(world_size):
            if other != src:
                dist.send(parts[other], other)
        out.copy_(parts[src])
    return out
""",
        "never receives",
    ),
    wrong_scatter(
        "does not wait",
        """
def scatter(out, parts, src):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != src:
        dist.irecv(out, src)
        return out
    for other in range(world_size):
        if other != src:
            dist.isend(parts[other], other)
    return out.copy_(parts[src])
""",
        "only start a message",
    ),
    wrong_scatter(
        "starts and does not wait, on the others only",
        SCATTER.replace("dist.recv(", "dist.irecv("),
        "only start a message",
    ),
    wrong_scatter(
        "the root sends to itself too",
        SCATTER.replace("        if other != src:\n            dist.send", "        dist.send"),
        "with itself",
    ),
    wrong_scatter(
        "the root receives from itself too",
        SCATTER.replace("    return out.copy_(parts[src])", "    dist.recv(out, src)\n    return out"),
        "with itself",
    ),
    wrong_gather(
        "the root's own comes last",
        """
def gather(x, dst):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != dst:
        dist.send(x, dst)
        return None
    parts = []
    for other in range(world_size):
        if other != dst:
            parts.append(torch.empty_like(x))
            dist.recv(parts[-1], other)
    return [*parts, x]
""",
        "The list is in rank order",
    ),
    wrong_gather(
        "p times the same tensor",
        """
def gather(x, dst):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != dst:
        dist.send(x, dst)
        return None
    parts = [torch.empty_like(x)] * world_size
    for other in range(world_size):
        if other != dst:
            dist.recv(parts[other], other)
    parts[dst] = x
    return parts
""",
        "is p times the same tensor",
    ),
    wrong_gather(
        "the root's own is missing",
        """
def gather(x, dst):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != dst:
        dist.send(x, dst)
        return None
    parts = [torch.zeros_like(x) for _ in range(world_size)]
    for other in range(world_size):
        if other != dst:
            dist.recv(parts[other], other)
    return parts
""",
        "rank dst's own tensor at its own place",
    ),
    wrong_gather(
        "a list on every rank",
        """
def gather(x, dst):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parts = [torch.zeros_like(x) for _ in range(world_size)]
    parts[rank].copy_(x)
    if rank != dst:
        dist.send(x, dst)
    else:
        for other in range(world_size):
            if other != dst:
                dist.recv(parts[other], other)
    return parts
""",
        "What do the other ranks return",
    ),
    wrong_gather(
        "everybody to everybody",
        """
def gather(x, dst):
    parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return parts if dist.get_rank() == dst else None
""",
        "Build it from dist.send and dist.recv",
    ),
    wrong_gather(
        "always to rank 0",
        """
def gather(x, dst):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != 0:
        dist.send(x, 0)
        return None
    parts = [x.clone()]
    for other in range(1, world_size):
        parts.append(torch.empty_like(x))
        dist.recv(parts[other], other)
    return parts
""",
        "is dst always rank 0",
    ),
    wrong_gather(
        "forgets to return",
        """
def gather(x, dst):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != dst:
        dist.send(x, dst)
        return None
    parts = [torch.empty_like(x) for _ in range(world_size)]
    parts[rank].copy_(x)
    for other in range(world_size):
        if other != dst:
            dist.recv(parts[other], other)
""",
        "Rank dst got None",
    ),
    wrong_gather(
        "every rank sends twice",
        """
def gather(x, dst):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != dst:
        dist.send(x, dst)
        dist.send(x, dst)
        return None
    parts = [torch.empty_like(x) for _ in range(world_size)]
    parts[rank].copy_(x)
    for other in range(world_size):
        if other != dst:
            dist.recv(parts[other], other)
            dist.recv(parts[other], other)
    return parts
""",
        "Who has to send, to whom, and how often",
    ),
    wrong_gather(
        "one tensor, and no list",
        GATHER.replace("    return parts\n", "    return torch.stack(parts)\n"),
        "A list of p tensors is wanted",
    ),
    wrong_gather(
        "does not wait",
        GATHER.replace("dist.recv(", "dist.irecv("),
        "only start a message",
    ),
    wrong_gather(
        "the root receives from itself too",
        GATHER.replace("        if other != dst:\n            dist.recv", "        dist.recv"),
        "with itself",
    ),
    wrong_gather(
        "receives into the caller's tensor",
        """
def gather(x, dst):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != dst:
        dist.send(x, dst)
        return None
    parts = [x.clone() for _ in range(world_size)]
    for other in range(world_size):
        if other != dst:
            dist.recv(x, other)
            parts[other].copy_(x)
    return parts
""",
        "Which line writes into a tensor that the caller still needs",
    ),
    # ------------------------------------------------------------------ 1.2
    wrong_reduce_scatter(
        "starts with its own row",
        reduce_scatter("row = rank; total = x[row].clone()", GO),
        "Where must row r start",
    ),
    wrong_reduce_scatter(
        "starts with the right neighbour's row",
        reduce_scatter("row = (rank + 1) % p; total = x[row].clone()", GO),
        "Where must row r start",
    ),
    wrong_reduce_scatter(
        "counts rows upwards",
        reduce_scatter(START, "pass_on(total, received); row = (row + 1) % p; total = received + x[row]"),
        "Write the table for p = 3",
    ),
    wrong_reduce_scatter(
        "adds the row that it sent",
        reduce_scatter(START, "pass_on(total, received); total = received + x[row]; row = (row - 1) % p"),
        "which of its own rows has to be added",
    ),
    wrong_reduce_scatter(
        "one step too few",
        reduce_scatter(START, GO, steps="p - 2"),
        "Nothing was sent",
    ),
    wrong_reduce_scatter(
        "one step too few for more than two ranks",
        reduce_scatter(START, GO, steps="max(1, p - 2) if p > 1 else 0"),
        "Write the table for p = 3",
    ),
    wrong_reduce_scatter(
        "one step too many",
        reduce_scatter(START, GO, steps="p"),
        "Write the table for p = 3",
    ),
    wrong_reduce_scatter(
        "goes round the ring twice",
        reduce_scatter(START, GO, steps="2 * p - 1"),
        "How many steps does it take until every rank has added its own",
    ),
    wrong_reduce_scatter(
        "its own row is added once more at the end",
        reduce_scatter(START, GO, "return total + x[rank] if p > 1 else total"),
        "One rank's term is in the sum twice",
    ),
    wrong_reduce_scatter(
        "its own row takes the place of what comes in",
        reduce_scatter(START, "pass_on(total, received); row = (row - 1) % p; total = x[row].clone()"),
        "No sum was made",
    ),
    wrong_reduce_scatter(
        "passes on without adding",
        reduce_scatter(START, "pass_on(total, received); row = (row - 1) % p; total = received"),
        "what do you add to it, before you send it on",
    ),
    wrong_reduce_scatter(
        "its own row is not added at the end",
        reduce_scatter(
            START,
            "pass_on(total, received); row = (row - 1) % p; total = received + x[row] if step < p - 2 else received",
        ),
        "and after the last step",
    ),
    wrong_reduce_scatter(
        "its own row is not added at the end, for more than two ranks",
        reduce_scatter(
            START,
            "pass_on(total, received); row = (row - 1) % p; "
            "total = received + x[row] if step < p - 2 or p == 2 else received",
        ),
        "and after the last step",
    ),
    wrong_reduce_scatter(
        "adds into x",
        reduce_scatter(
            "row = (rank - 1) % p; total = x[row]",
            "pass_on(total, received); row = (row - 1) % p; x[row] += received; total = x[row]",
        ),
        "x belongs to the caller",
    ),
    wrong_reduce_scatter(
        "does nothing but cut",
        reduce_scatter("total = x[rank].clone()", "pass"),
        "Nothing was sent",
    ),
    wrong_reduce_scatter(
        "zeros of the right shape",
        reduce_scatter("total = torch.zeros_like(x[0])", "pass_on(total, received)"),
        "it is all zeros",
    ),
    wrong_reduce_scatter(
        "calls torch's all-reduce",
        reduce_scatter("total = x.clone(); dist.all_reduce(total); total = total[rank]", "pass"),
        "The exercise is to build it",
    ),
    wrong_reduce_scatter(
        "calls torch's reduce-scatter",
        reduce_scatter("total = x[0].clone(); dist.reduce_scatter(total, list(x))", "pass"),
        "The exercise is to build it",
    ),
    wrong_reduce_scatter(
        "sends whole tensors round",
        reduce_scatter(
            "total = x.clone(); outgoing = x.clone()",
            "pass_on(outgoing, received); outgoing = received; total = total + received",
            "return total[rank]",
        ),
        "How large is each message",
    ),
    wrong_reduce_scatter(
        "returns the whole sum",
        reduce_scatter(
            "total = x.clone(); outgoing = x.clone()",
            "pass_on(outgoing, received); outgoing = received; total = total + received",
        ),
        "it should own one",
    ),
    wrong_reduce_scatter(
        "straight to the owner",
        """
def ring_reduce_scatter(x):
    rank, p = dist.get_rank(), dist.get_world_size()
    total = x[rank].clone()
    for step in range(1, p):
        received = torch.empty_like(total)
        pass_on(x[(rank + step) % p], received, shift=step)
        total += received
    return total
""",
        "everybody sends to one neighbour only",
    ),
    wrong_reduce_scatter(
        "plain send, then recv",
        reduce_scatter(
            START,
            "dist.send(total, (rank + 1) % p); dist.recv(received, (rank - 1) % p); "
            "row = (row - 1) % p; total = received + x[row]",
        ),
        "start both with dist.batch_isend_irecv",
    ),
    wrong_reduce_scatter(
        "all receive first",
        reduce_scatter(
            START,
            "dist.recv(received, (rank - 1) % p); dist.send(total, (rank + 1) % p); "
            "row = (row - 1) % p; total = received + x[row]",
        ),
        "Can the neighbour come to that call",
    ),
    wrong_reduce_scatter(
        "sends both ways, receives from nobody's side",
        reduce_scatter(
            START,
            "a = dist.isend(total, (rank + 1) % p); b = dist.irecv(received, (rank + 1) % p); a.wait(); b.wait(); "
            "row = (row - 1) % p; total = received + x[row]",
        ),
        "what does each rank wait for",
    ),
    wrong_reduce_scatter(
        "does not wait",
        reduce_scatter(
            START,
            "dist.isend(total, (rank + 1) % p); dist.irecv(received, (rank - 1) % p); "
            "row = (row - 1) % p; total = received + x[row]",
        ),
        "only start a message",
    ),
    wrong_reduce_scatter(
        "a loop that ends one step early",
        reduce_scatter(START, GO, steps="p - 2"),
        "how often does it run for this p",
    ),
    wrong_reduce_scatter(
        "rank 0 takes no part",
        reduce_scatter(START, "rank and " + GO.replace("; ", "; ", 1)),
        "the ranks wait for each other",
    ),
    wrong_reduce_scatter(
        "the mean",
        reduce_scatter(START, GO, "return total / p"),
        "Is this the mean",
    ),
    wrong_reduce_scatter(
        "in float32",
        reduce_scatter("x = x.float(); " + START, GO, "return total.to(torch.float64)"),
        "leaves the dtype of x",
    ),
    wrong_reduce_scatter(
        "forgets to return",
        reduce_scatter(START, GO, "pass"),
        "what does its last line give back",
    ),
    wrong_reduce_scatter(
        "the right sums, then handed one rank further",
        reduce_scatter(
            START,
            GO,
            "received = torch.empty_like(total); p > 1 and pass_on(total, received); "
            "return received if p > 1 else total",
        ),
        "they end at the wrong rank",
    ),  # fmt: skip
    # ------------------------------------------------------------------ 1.3
    wrong_all_gather(
        "sends its own part again and again",
        all_gather("pass_on(part, rows[(rank - step - 1) % p])"),
        "what do you send: your own part once more",
    ),
    wrong_all_gather(
        "receives into the next place",
        all_gather("pass_on(rows[(rank - step) % p], rows[(rank + step + 1) % p])"),
        "Write the table for p = 3",
    ),
    wrong_all_gather(
        "in the order of arrival",
        """
def ring_all_gather(part):
    rank, p = dist.get_rank(), dist.get_world_size()
    rows = [part.clone()]
    for step in range(p - 1):
        rows.append(torch.empty_like(part))
        pass_on(rows[-2], rows[-1])
    return torch.stack(rows)
""",
        "in another order",
    ),
    wrong_all_gather("one step too few", all_gather(GO_ALL, steps="p - 2"), "Nothing was sent"),
    wrong_all_gather(
        "one step too few for more than two ranks",
        all_gather(GO_ALL, steps="max(1, p - 2) if p > 1 else 0"),
        "Some rows never came",
    ),
    wrong_all_gather("one step too many", all_gather(GO_ALL, steps="p"), "more was sent than one part"),
    wrong_all_gather(
        "p times the same tensor",
        """
def ring_all_gather(part):
    rank, p = dist.get_rank(), dist.get_world_size()
    rows = [part.clone()] * p
    for step in range(p - 1):
        pass_on(part, torch.empty_like(part))
    return torch.stack(rows)
""",
        "One part stands in all p places",
    ),
    wrong_all_gather("no communication", all_gather("pass"), "Nothing was sent"),
    wrong_all_gather(
        "concatenated",
        all_gather(GO_ALL, "return torch.cat(rows)"),
        "Which of torch.cat and torch.stack",
    ),
    wrong_all_gather("a list", all_gather(GO_ALL, "return rows"), "what does its last line give back"),
    wrong_all_gather(
        "a reduce by mistake",
        all_gather(GO_ALL, "return torch.stack(rows).sum(0)"),
        "Should they be added",
    ),
    wrong_all_gather(
        "calls torch's",
        all_gather("pass", "dist.all_gather(rows, part); return torch.stack(rows)"),
        "The exercise is to build it",
    ),
    wrong_all_gather(
        "an all-reduce of a tensor that is zero elsewhere",
        all_gather("pass", "whole = torch.stack(rows); dist.all_reduce(whole); return whole"),
        "The exercise is to build it",
    ),
    wrong_all_gather(
        "the whole goes round, not one part",
        """
def ring_all_gather(part):
    rank, p = dist.get_rank(), dist.get_world_size()
    whole = torch.zeros(p, *part.shape, dtype=part.dtype)
    whole[rank] = part
    for step in range(p - 1):
        received = torch.empty_like(whole)
        pass_on(whole, received)
        own = whole[rank].clone()
        whole = torch.where(received != 0, received, whole)
        whole[rank] = own
    return whole
""",
        "how large is one",
    ),
    wrong_all_gather(
        "straight to everybody",
        all_gather("pass_on(part, rows[(rank - step - 1) % p], shift=step + 1)"),
        "everybody sends to one neighbour only",
    ),
    wrong_all_gather(
        "plain send, then recv",
        all_gather(
            "dist.send(rows[(rank - step) % p], (rank + 1) % p); dist.recv(rows[(rank - step - 1) % p], (rank - 1) % p)"
        ),
        "start both with dist.batch_isend_irecv",
    ),  # fmt: skip
    wrong_all_gather(
        "does not wait",
        all_gather(
            "dist.isend(rows[(rank - step) % p], (rank + 1) % p); "
            "dist.irecv(rows[(rank - step - 1) % p], (rank - 1) % p)"
        ),
        "only start a message",
    ),  # fmt: skip
    wrong_all_gather(
        "receives into the caller's tensor",
        """
def ring_all_gather(part):
    rank, p = dist.get_rank(), dist.get_world_size()
    rows = [torch.zeros_like(part) for _ in range(p)]
    for step in range(p):
        rows[(rank - step) % p].copy_(part)
        if step < p - 1:
            outgoing = part.clone()
            pass_on(outgoing, part)
    return torch.stack(rows)
""",
        "x belongs to the caller",
    ),
    # ------------------------------------------------------------------ 1.4
    wrong_all_reduce(
        "calls torch's",
        """
def ring_all_reduce(x):
    total = x.clone()
    dist.all_reduce(total)
    return total
""",
        "The exercise is to build it",
    ),
    wrong_all_reduce(
        "calls torch's, in place",
        """
def ring_all_reduce(x):
    dist.all_reduce(x)
    return x
""",
        "The exercise is to build it",
    ),
    wrong_all_reduce(
        "whole tensors go round",
        """
def ring_all_reduce(x):
    total, outgoing = x.clone(), x.clone()
    for _ in range(dist.get_world_size() - 1):
        received = torch.empty_like(x)
        pass_on(outgoing, received)
        total, outgoing = total + received, received
    return total
""",
        "messages of the size of x went out",
    ),
    wrong_all_reduce(
        "gathers everything, then adds",
        """
def ring_all_reduce(x):
    return ring_all_gather(x.clone()).sum(0)
""",
        "messages of the size of x went out",
    ),
    wrong_all_reduce(
        "by way of rank 0",
        """
def ring_all_reduce(x):
    p = dist.get_world_size()
    parts = gather(x, 0)
    total = sum(parts) if parts else None
    out = torch.empty_like(x)
    return scatter(out, [total] * p if parts else None, 0)
""",
        "messages of the size of x went out",
    ),
    wrong_all_reduce(
        "only the reduce-scatter",
        """
def ring_all_reduce(x):
    return ring_reduce_scatter(x.reshape(dist.get_world_size(), -1))
""",
        "The result has the shape of x",
    ),
    wrong_all_reduce(
        "only the all-gather",
        """
def ring_all_reduce(x):
    rows = x.reshape(dist.get_world_size(), -1)
    return ring_all_gather(rows[dist.get_rank()].clone()).reshape(x.shape)
""",
        "Take it apart",
    ),
    wrong_all_reduce(
        "the shape is not restored",
        """
def ring_all_reduce(x):
    return ring_all_gather(ring_reduce_scatter(x.reshape(dist.get_world_size(), -1)))
""",
        "which call leads back at the end",
    ),
    wrong_all_reduce(
        "returned flat",
        """
def ring_all_reduce(x):
    return ring_all_gather(ring_reduce_scatter(x.reshape(dist.get_world_size(), -1))).reshape(-1)
""",
        "which call leads back at the end",
    ),
    wrong_all_reduce(
        "cuts the first dimension only",
        """
def ring_all_reduce(x):
    parts = torch.stack(x.chunk(dist.get_world_size()))
    return torch.cat(list(ring_all_gather(ring_reduce_scatter(parts))))
""",
        "your code fails on rank",
    ),
    wrong_all_reduce(
        "cut by columns, joined by rows",
        """
def ring_all_reduce(x):
    rows = x.reshape(-1, dist.get_world_size()).T.contiguous()
    return ring_all_gather(ring_reduce_scatter(rows)).reshape(x.shape)
""",
        "How was x cut into p parts",
    ),
    wrong_all_reduce(
        "own part instead of the others'",
        """
def ring_all_reduce(x):
    p = dist.get_world_size()
    part = ring_reduce_scatter(x.reshape(p, -1))
    ring_all_gather(part)
    return torch.stack([part] * p).reshape(x.shape)
""",
        "Which of the two functions brings the other parts",
    ),
    wrong_all_reduce(
        "returns x",
        """
def ring_all_reduce(x):
    ring_all_gather(ring_reduce_scatter(x.reshape(dist.get_world_size(), -1)))
    return x
""",
        "what did you do with what it returned",
    ),
    wrong_all_reduce(
        "writes the result into x",
        """
def ring_all_reduce(x):
    total = ring_all_gather(ring_reduce_scatter(x.reshape(dist.get_world_size(), -1))).reshape(x.shape)
    return x.copy_(total)
""",
        "x belongs to the caller",
    ),
    wrong_all_reduce(
        "the mean",
        """
def ring_all_reduce(x):
    p = dist.get_world_size()
    return ring_all_gather(ring_reduce_scatter(x.reshape(p, -1))).reshape(x.shape) / p
""",
        "Is this the mean",
    ),
    wrong_all_reduce(
        "twice",
        """
def ring_all_reduce(x):
    p = dist.get_world_size()
    total = ring_all_gather(ring_reduce_scatter(x.reshape(p, -1)))
    return ring_all_gather(ring_reduce_scatter(total)).reshape(x.shape)
""",
        "Is something added that is a sum already",
    ),
    wrong_all_reduce(
        "the all-gather twice",
        """
def ring_all_reduce(x):
    p = dist.get_world_size()
    part = ring_reduce_scatter(x.reshape(p, -1))
    ring_all_gather(part)
    return ring_all_gather(part).reshape(x.shape)
""",
        "by more messages than it takes",
    ),
    wrong_all_reduce("no communication", "\ndef ring_all_reduce(x):\n    return x.clone()\n", "Nothing was sent"),
    # ------------------------------------------------------------------ 1.5
    wrong_fit(
        "plain least squares",
        """
def fit_line(points):
    n = torch.tensor([size for size, _ in points], dtype=torch.float64)
    t = torch.tensor([seconds for _, seconds in points], dtype=torch.float64)
    n_mean, t_mean = n.mean(), t.mean()
    beta = ((n - n_mean) * (t - t_mean)).sum() / ((n - n_mean) ** 2).sum()
    return (t_mean - beta * n_mean).item(), beta.item()
""",
        "This line minimises the absolute errors",
    ),
    wrong_fit(
        "beta and alpha swapped",
        FIT.replace("solution[0].item(), solution[1].item()", "solution[1].item(), solution[0].item()"),
        "Which of the two is the time of an empty message",
    ),
    wrong_fit(
        "the bandwidth for beta",
        FIT.replace("solution[1].item()", "1 / solution[1].item()"),
        "beta is seconds for each byte",
    ),
    wrong_fit(
        "weights of the wrong power",
        FIT.replace("torch.stack([1 / t, n / t], dim=1)", "torch.stack([t**-0.5, n * t**-0.5], dim=1)").replace(
            "torch.ones(len(points), 1, dtype=torch.float64)", "(t**0.5)[:, None]"
        ),
        "By which power of t",
    ),
    wrong_fit(
        "first and last point",
        """
def fit_line(points):
    (n0, t0), (n1, t1) = points[0], points[-1]
    beta = (t1 - t0) / (n1 - n0)
    return t0 - beta * n0, beta
""",
        "What did the other points say",
    ),
    wrong_fit(
        "the shortest time for alpha",
        """
def fit_line(points):
    alpha = min(seconds for _, seconds in points)
    n, t = points[-1]
    return alpha, (t - alpha) / n
""",
        "What did the other points say",
    ),
    wrong_fit(
        "the mean slope from the first point to every point",
        """
def fit_line(points):
    n = torch.tensor([float(size) for size, _ in points], dtype=torch.float64)
    t = torch.tensor([seconds for _, seconds in points], dtype=torch.float64)
    beta = ((t - t[0]) / (n - n[0])).mean()
    return (t[0] - beta * n[0]).item(), beta.item()
""",
        "What is divided by what",
    ),
    wrong_fit(
        "the right side left as it was",
        FIT.replace("torch.ones(len(points), 1, dtype=torch.float64)", "t[:, None]"),
        "Divide both sides",
    ),
    wrong_fit(
        "both on logarithmic axes",
        """
def fit_line(points):
    n = torch.tensor([float(size) for size, _ in points], dtype=torch.float64).log()
    t = torch.tensor([seconds for _, seconds in points], dtype=torch.float64).log()
    slope = ((n - n.mean()) * (t - t.mean())).sum() / ((n - n.mean()) ** 2).sum()
    return (t.mean() - slope * n.mean()).exp().item(), slope.item()
""",
        "Divide both sides",
    ),
    wrong_fit(
        "forgets to return",
        FIT.replace("return solution[0].item(), solution[1].item()", "pass"),
        "Two numbers are wanted",
    ),
    wrong_fit(
        "one number",
        FIT.replace("return solution[0].item(), solution[1].item()", "return solution[0].item()"),
        "Two numbers are wanted",
    ),
    wrong_costs(
        "ring of whole messages",
        """
def ring_seconds(n, world_size, alpha, beta):
    return 2 * (world_size - 1) * (alpha + beta * n)
""",
        "In a ring each message is one part",
    ),
    wrong_costs(
        "ring, once round",
        """
def ring_seconds(n, world_size, alpha, beta):
    return (world_size - 1) * (alpha + beta * n / world_size)
""",
        "And the way back",
    ),
    wrong_costs(
        "ring of p steps",
        """
def ring_seconds(n, world_size, alpha, beta):
    return 2 * world_size * (alpha + beta * n / world_size)
""",
        "Which is one too many",
    ),
    wrong_costs(
        "ring of a single step",
        """
def ring_seconds(n, world_size, alpha, beta):
    return alpha + beta * n / world_size
""",
        "That is one step. How many follow one another",
    ),
    wrong_costs(
        "ring with a single alpha",
        """
def ring_seconds(n, world_size, alpha, beta):
    return alpha + 2 * (world_size - 1) * beta * n / world_size
""",
        "every message costs alpha",
    ),
    wrong_costs(
        "a star, in which rank 0 talks to one rank after another",
        """
def tree_seconds(n, world_size, alpha, beta):
    return 2 * (world_size - 1) * (alpha + beta * n)
""",
        "Count the steps that follow one another",
    ),
    wrong_costs(
        "tree of parts",
        """
def tree_seconds(n, world_size, alpha, beta):
    return 2 * (world_size - 1).bit_length() * (alpha + beta * n / world_size)
""",
        "Along a tree every message is the whole tensor",
    ),
    wrong_costs(
        "tree, up only",
        """
def tree_seconds(n, world_size, alpha, beta):
    return (world_size - 1).bit_length() * (alpha + beta * n)
""",
        "And the way back",
    ),
    wrong_costs(
        "tree with a level too many",
        """
def tree_seconds(n, world_size, alpha, beta):
    return 2 * world_size.bit_length() * (alpha + beta * n)
""",
        "That is one level too many",
    ),
    wrong_costs(
        "tree with levels rounded down, p = 8 right",
        """
def tree_seconds(n, world_size, alpha, beta):
    return 2 * (world_size.bit_length() - 1) * (alpha + beta * n)
""",
        "wrong (right at p = 8).",
    ),
    wrong_costs(
        "tree with the levels rounded down",
        """
def tree_seconds(n, world_size, alpha, beta):
    return 2 * (world_size.bit_length() - 1) * (alpha + beta * n)
""",
        "rounded up",
    ),
    wrong_costs(
        "tree with fractions of a level",
        """
def tree_seconds(n, world_size, alpha, beta):
    return 2 * torch.log2(torch.tensor(float(world_size), dtype=torch.float64)).item() * (alpha + beta * n)
""",
        "rounded up",
    ),
    wrong_costs(
        "tree that costs something for one rank",
        """
def tree_seconds(n, world_size, alpha, beta):
    levels = max(1, (world_size - 1).bit_length())
    return 2 * levels * (alpha + beta * n)
""",
        "With one rank nothing is sent",
    ),
    wrong_costs(
        "forgets to return",
        """
def tree_seconds(n, world_size, alpha, beta):
    2 * (world_size - 1).bit_length() * (alpha + beta * n)
""",
        "A number of seconds is wanted",
    ),
]
