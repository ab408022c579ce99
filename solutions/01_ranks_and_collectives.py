# %% [markdown]
# # 01 · Ranks and collectives
#
# When people say that a training run "scales", they mean that its GPUs don't spend their time waiting for each other. Most of that
# waiting happens in a handful of operations called collectives. In this chapter, you'll build the most important one from nothing but "send" and
# "receive", count its bytes, and predict how long it takes. You'll also learn to read the report of a program in which everybody waits for everybody.
#
# You need PyTorch. About 75 minutes.

# %% tags=["setup"]
import torch
import torch.distributed as dist

from tplab import collectives, device, launch, viz
from tplab.collectives import links
from tplab.course import check, predict, show_failure, symptoms

# %% [markdown]
# This is half of what you'll build, drawn from a run on four processes a moment ago. Each of them starts with four numbers. In three steps, in which everyone only talks to a neighbor, each of them ends up with one
# number that's complete, because every process has added its share. Soon, each of these arrows will be a line of your own code.


# %%
def goes_round():
    mine = torch.arange(1, 5, device=device()) * 10 ** dist.get_rank()  # [4]: process 2 has 100, 200, 300, 400
    return [(part, total.clone()) for part, total in collectives.reduce_scatter_steps(mine)]


viz.ring(launch(goes_round, 4), title="a ring reduce-scatter")

# %% [markdown]
# ## Ranks
#
# Distributed training runs the *same* program in several processes, usually one per GPU. Each process has a number, its **rank**, and people say "rank 2" when they mean the process itself. The number of processes is the
# **world size**, and we'll call it `p`.
#
# `launch(fn, p)` starts `p` fresh processes on this machine, sends them copies of `fn` and of whatever it uses, connects them, and runs `fn` in all of them. In the end it brings back what they returned, in rank order.


# %%
def hello():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print(f"I am rank {rank} of {world_size}")
    return 10**rank


list(launch(hello, 4))

# %% [markdown]
# The first launch also told you what the processes talk through, the **backend**. It's NVIDIA's NCCL if there's a GPU for each rank, and otherwise gloo, on the CPU. Your code doesn't depend on it, with one exception: a tensor has
# to be on the rank's own device, which is `device()`.
#
# **Predict.** The notebook has a variable `counter = 0`. Each of 4 ranks adds 1 to it and returns it. What do the four returned numbers add up to? And what's `counter` in the notebook afterwards?

# %% predict="1.a"
predict("1.a", sum_of_returned=4, in_the_notebook=0)

# %%
counter = 0


def count():
    global counter
    counter += 1
    return counter


list(launch(count, 4)), counter

# %% [markdown]
# No rank sees another rank's memory, or the notebook's. If a number has to get from one rank to another, somebody has to send it.
#
# ## Send and receive
#
# That takes two calls, one on each side. `dist.send(x, dst)` sends a tensor to rank `dst`, and `dist.recv(x, src)` fills `x` with what rank `src` sends. The shapes have to match. `recv` returns when the data is there. `send` returns when
# you may change `x` again, which may not be before the receiver shows up.

# %% [markdown] task="1.1" title="Scatter and gather from send and receive" difficulty=2 minutes=10
# Build two operations that have a **root**, a rank that hands something out or collects it. The root sends one message to each other rank, or receives one from each. It doesn't send anything to itself, but it has a part, too.
#
# The check runs your functions on 2, 3, 4 and 1 ranks with different roots, and it counts the messages.


# %% exercise="1.1"
def scatter(out: torch.Tensor, parts: list[torch.Tensor] | None, src: int) -> torch.Tensor:
    """Fill `out` [..] with the part that belongs to this rank, and return it.

    parts: on rank `src`, a list of p tensors [..] in rank order; on all other ranks, None
    """
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != src:
        dist.recv(out, src)
        return out
    for other in range(world_size):
        if other != src:
            dist.send(parts[other], other)
    return out.copy_(parts[src])
    ### END SOLUTION


def gather(x: torch.Tensor, dst: int) -> list[torch.Tensor] | None:
    """On rank `dst`, return the list of all ranks' x [..], in rank order. On all other ranks, return None."""
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != dst:
        dist.send(x, dst)
        return None
    parts = [torch.empty_like(x) for _ in range(world_size)]  # p of [..]
    parts[rank].copy_(x)
    for other in range(world_size):
        if other != dst:
            dist.recv(parts[other], other)
    return parts
    ### END SOLUTION


# %% [markdown] hints="1.1"
# 1. There are two kinds of ranks, so you need an `if`. What does the root do, and what do all the others do? Every send needs a receive on the other side.
# 2. In `scatter`, the root sends `parts[other]` to each other rank, and each other rank receives once, into `out`. The root copies its own part into `out`. (`out = parts[src]` would only give the part another name.) In `gather`, the root
#    needs `p` tensors to receive into.
# 3. `if rank != src: dist.recv(out, src); return out`. Then loop over all `other != src` with `dist.send(parts[other], other)`, and `return out.copy_(parts[src])`. `gather` is the mirror image, with
#    `parts = [torch.empty_like(x) for _ in range(world_size)]` on the root.

# %% check="1.1"
check("1.1", scatter, gather)

# %% [markdown]
# ## Collectives
#
# Most of what ranks send each other falls into a few patterns. A **collective** is a call that *every* rank of a group makes, in the same order as the others and with tensors of the same shape. You've just built two of them. (The group is all ranks, unless
# you pass a smaller one as `group=`.)
#
# To see who contributed what, let rank $r$ hold the numbers $1, 2, \dots, p$ times $10^r$. Then every *digit* of a result tells you which rank it came from.


# %%
def my_numbers():
    return torch.arange(1, dist.get_world_size() + 1, device=device()) * 10 ** dist.get_rank()  # [p]


def all_reduce():
    x = my_numbers()  # [p]
    before = x.clone()
    dist.all_reduce(x)  # in place: now x is the sum, on every rank; the call itself returns None
    return before, x


viz.collective(launch(all_reduce, 4), name="all_reduce")

# %% [markdown]
# An **all-reduce** gives every rank the sum. It's the workhorse: replicas add up their gradients with it, and so do ranks that each hold one term of a sum.
#
# Before you look at the others, try to guess what two of them do from their names. In a **reduce-scatter**, every rank holds `p` parts. They're added up over the ranks, but rank $r$ only gets part $r$ of the sum. In an **all-to-all**, every rank also holds `p` parts, and part $j$ of rank $i$
# goes to rank $j$, where it becomes part $i$.
#
# **Predict.** Four ranks hold the numbers from above. Which number does rank 2 get from a reduce-scatter? And what's the *last* number that rank 1 gets from an all-to-all?

# %% predict="1.b"
predict("1.b", reduce_scatter_on_rank_2=3333, last_of_all_to_all_on_rank_1=2000)


# %%
def all_gather():
    x = my_numbers()[:1]  # [1]
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]  # p of [1]
    dist.all_gather(parts, x)
    return x, parts


def reduce_scatter():
    x = my_numbers()  # [p]
    mine = torch.empty_like(x[:1])  # [1]
    dist.reduce_scatter(mine, list(x.chunk(len(x))))
    return x, mine


def all_to_all():
    x = my_numbers()  # [p]
    received = torch.empty_like(x)  # [p]
    dist.all_to_all_single(received, x)
    return x, received


def broadcast(root=1):
    x = my_numbers() if dist.get_rank() == root else torch.zeros_like(my_numbers())  # [p]
    before = x.clone()
    dist.broadcast(x, src=root)  # in place
    return before, x


def scatter_from(root=1):
    x, mine = my_numbers(), torch.empty_like(my_numbers()[:1])  # [p], [1]
    is_root = dist.get_rank() == root
    dist.scatter(mine, list(x.chunk(len(x))) if is_root else None, src=root)
    return x if is_root else None, mine


def gather_to(root=1):
    x = my_numbers()[:1]  # [1]
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())] if dist.get_rank() == root else None
    dist.gather(x, parts, dst=root)
    return x, parts


def reduce_to(root=1):
    x = my_numbers()  # [p]
    before = x.clone()
    dist.reduce(x, dst=root)
    return before, x if dist.get_rank() == root else None


def send_and_recv():
    x = my_numbers() if dist.get_rank() == 0 else torch.zeros_like(my_numbers())  # [p]
    before = x.clone()
    if dist.get_rank() == 0:
        dist.send(x, dst=1)
    if dist.get_rank() == 1:
        dist.recv(x, src=0)
    return before, x


kinds = {
    "broadcast": broadcast,
    "scatter": scatter_from,
    "gather": gather_to,
    "reduce": reduce_to,
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "send and recv": send_and_recv,
}

# %% [markdown]
# Here are all of them. Each move starts fresh ranks and draws what they held before and after. (The root is rank 1. After a `reduce`, don't use what's in the tensors of the *other* ranks.) Find pairs: which collective undoes `scatter`? And which two, one after the other, do the same as `all_reduce`?


# %% tags=["explore"]
def show(kind, p):
    return viz.collective(launch(kinds[kind], p), name=kind)


viz.explore(show, kind=list(kinds), p=(4, 3, 2))

# %% [markdown]
# You may have found it: a reduce-scatter followed by an all-gather is an all-reduce. We'll need that soon.
#
# `launch` writes down every collective that each rank enters. From now on, we'll call this the **trace**, and it's how we count what was sent.

# %%
results = launch(all_gather, 4)
results.record

# %% [markdown]
# The bytes are the **message size**, as NVIDIA's benchmark `nccl-tests` counts it: the tensor itself for an all-reduce, a broadcast or a send, and all parts together for the others. How many bytes a rank really puts on the wire depends on the algorithm, and you're about to write one.
#
# ## Both at the same time
#
# In a ring, every rank sends to its right-hand neighbor and receives from its left-hand neighbor. Here are two ranks that try to exchange a tensor.


# %%
def both_receive_first():
    rank = dist.get_rank()
    other = 1 - rank
    mine = torch.full((4,), float(rank), device=device())  # [4]
    theirs = torch.empty(4, device=device())  # [4]
    dist.recv(theirs, src=other)
    dist.send(mine, dst=other)
    return theirs


with show_failure():
    launch(both_receive_first, 2)

# %% [markdown]
# Elsewhere, this program would hang in silence until somebody kills it. Here you get a report, and reading it is a skill worth having.
#
# **Read.** In which line of the cell does rank 0 wait? (Line 1 is the line with `def`.) Which rank would have to send something? And how many sends did the two ranks get to, together?

# %% predict="1.c"
predict("1.c", line_of_rank_0=6, rank_that_should_send=1, sends_entered=0)

# %% [markdown]
# The way out is to *start* both messages and then wait for both. `dist.isend` and `dist.irecv` start a message and immediately return a request, and `request.wait()` returns when the message is through. Until then, don't touch either tensor. `dist.batch_isend_irecv` starts a whole list of messages.


# %%
def to_the_right():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    outgoing = my_numbers()  # [p]
    incoming = torch.empty_like(outgoing)  # [p]
    right, left = (rank + 1) % world_size, (rank - 1) % world_size  # a ring: the last rank's right neighbour is rank 0
    messages = [dist.P2POp(dist.isend, outgoing, right), dist.P2POp(dist.irecv, incoming, left)]
    for request in dist.batch_isend_irecv(messages):
        request.wait()
    return outgoing, incoming


viz.collective(launch(to_the_right, 3), name="to the right")

# %% [markdown]
# (Why the batch? With gloo, you could call `isend` and `irecv` one after the other. NCCL puts everything between two GPUs into one queue, so with two ranks, each would send first and wait for the other to receive.)
#
# ## The ring
#
# With your `gather` and a broadcast, you already have an all-reduce: collect everything on rank 0, add it up, and send the sum to everyone. But then rank 0 receives $(p-1)N$ bytes for a tensor of $N$ bytes and sends as many, through its single wire, while all other wires are idle.
#
# A ring keeps every wire busy. Put the ranks in a circle and split the tensor into `p` parts. Each part starts at a different rank and travels to the right, and every rank that it passes adds its own numbers. After $p-1$ steps, the part has met everybody.
#
# ![Four ranks in a circle. In six steps, the parts of a tensor travel around the ring, first adding up, then being copied. Each link carries 1.5 times the tensor. In a star, the link of rank 0 carries 3 times the tensor in and 3 times out.](pictures/ring.svg)
#
# <details><summary>All frames, one by one</summary>
#
# ![The same as numbered stills](pictures/ring_frames.svg)
#
# </details>
#
# Look at the picture at the top of the chapter again and follow part 0. It starts at rank 1, and three steps later it arrives at rank 0, complete. This half is a **reduce-scatter**. The other half is an **all-gather**: the same journey, without the adding.


# %%
def copies_go_round():
    mine = my_numbers()[dist.get_rank()].reshape(1)  # [1]
    return [(part, whole.clone()) for part, whole in collectives.all_gather_steps(mine)]


viz.ring(launch(copies_go_round, 4), title="a ring all-gather")

# %% [markdown]
# Try both with fewer ranks. How many steps does it take? Which part does rank 0 send first?


# %% tags=["explore"]
def sums_go_round():
    return [(part, total.clone()) for part, total in collectives.reduce_scatter_steps(my_numbers())]


def show_ring(kind, p):
    return viz.ring(launch(sums_go_round if kind == "reduce-scatter" else copies_go_round, p), title=f"{kind}, p = {p}")


viz.explore(show_ring, kind=["reduce-scatter", "all-gather"], p=(3, 2, 4))

# %% [markdown] task="1.2" title="Reduce-scatter in a ring" difficulty=4 minutes=20
# Now you. The parts are the rows of `x` `[p, ..]`. Send messages only to your neighbors, in $p-1$ steps, one row at a time. Your caller's `x` must stay as it is.


# %% exercise="1.2"
def ring_reduce_scatter(x: torch.Tensor) -> torch.Tensor:
    """Return row `rank` of the sum of x over all ranks: x [p, ..] on every rank -> [..]."""
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    row = left  # it has p - 1 steps to go until it reaches its owner
    total = x[row].clone()  # [..]
    for _ in range(world_size - 1):
        received = torch.empty_like(total)  # [..]
        messages = [dist.P2POp(dist.isend, total, right), dist.P2POp(dist.irecv, received, left)]
        for request in dist.batch_isend_irecv(messages):
            request.wait()
        row = (row - 1) % world_size  # what arrived is the row before the one that left
        total = received + x[row]
    return total
    ### END SOLUTION


# %% [markdown] hints="1.2"
# 1. Row $r$ has to arrive at rank $r$ after $p-1$ steps to the right, so at which rank does it start? Now take a rank's point of view: which row does it send first?
# 2. Rank $r$ sends row $r-1$ first. (All numbers are modulo $p$.) Its left-hand neighbor does the same, so row $r-2$ arrives. Add your own row $r-2$ to it, and send that next. After $p-1$ steps, the row that arrives is $r-2-(p-2) = r-p$, which is $r$.
# 3. Before the loop, `row = (rank - 1) % world_size` and `total = x[row].clone()`. In the loop, send `total` to the right while you receive `received` from the left, as in `to_the_right`. Then `row = (row - 1) % world_size` and `total = received + x[row]`.

# %% check="1.2"
check("1.2", ring_reduce_scatter)

# %% [markdown] task="1.3" title="All-gather and all-reduce in a ring" difficulty=3 minutes=18
# Write the other half, `ring_all_gather`. Every rank has one part and wants all of them, again in $p-1$ steps, with messages of one part, to neighbors only.
#
# Then put both halves together. In `ring_all_reduce`, `x` has any shape. Its number of elements can be divided by `p`, but perhaps none of its dimensions can.


# %% exercise="1.3"
def ring_all_gather(part: torch.Tensor) -> torch.Tensor:
    """Return the parts of all ranks, row i from rank i: part [..] on every rank -> [p, ..]."""
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    rows = [torch.empty_like(part) for _ in range(world_size)]  # p of [..]
    rows[rank].copy_(part)
    for step in range(world_size - 1):
        outgoing, incoming = (rank - step) % world_size, (rank - step - 1) % world_size
        messages = [dist.P2POp(dist.isend, rows[outgoing], right), dist.P2POp(dist.irecv, rows[incoming], left)]
        for request in dist.batch_isend_irecv(messages):
            request.wait()
    return torch.stack(rows)  # [p, ..]
    ### END SOLUTION


def ring_all_reduce(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of x over all ranks, in a new tensor of the same shape: [..] -> [..]."""
    ### BEGIN SOLUTION
    rows = x.reshape(dist.get_world_size(), -1)  # [p, N/p]
    return ring_all_gather(ring_reduce_scatter(rows)).reshape(x.shape)  # [N/p] -> [p, N/p] -> [..]
    ### END SOLUTION


# %% [markdown] hints="1.3"
# 1. In the first step, a rank can only send its own part. In every later step, which part is its right-hand neighbor still missing? For the all-reduce, compare the shapes: your reduce-scatter wants `[p, ..]` and returns `[..]`, and your all-gather does the opposite.
# 2. The neighbor is missing what has just arrived from the left. In step $s$ (from 0), rank $r$ sends part $r-s$ and receives part $r-s-1$, modulo $p$. And `x.reshape(world_size, -1)` splits any tensor into `p` equal rows.
# 3. `rows = [torch.empty_like(part) for _ in range(world_size)]` and `rows[rank].copy_(part)`. In step `s`, send `rows[(rank - s) % world_size]` and receive into `rows[(rank - s - 1) % world_size]`, and return `torch.stack(rows)`. The all-reduce is
#    `ring_all_gather(ring_reduce_scatter(x.reshape(dist.get_world_size(), -1))).reshape(x.shape)`.

# %% check="1.3"
check("1.3", ring_all_gather, ring_all_reduce)

# %% [markdown]
# You've built NCCL's most important algorithm. How good is it?
#
# ## Count the bytes
#
# In a reduce-scatter of $N$ bytes, each rank sends $p-1$ messages with $N/p$ bytes, and in an all-gather just as many. So in a **ring all-reduce**, each rank sends $2\,\frac{p-1}{p}\,N$ bytes. However many ranks you add, that's never more than $2N$, and no algorithm that's built from messages can get by with less on its busiest rank (Patarasuk and Yuan 2009).
#
# The other classic is the **tree**. On the way up, every second rank sends its whole tensor to a neighbor, which adds it. In the next step every fourth rank does, and so on, until rank 0 has the sum after $\lceil\log_2 p\rceil$ steps. Then the sum goes down again, the same way.
#
# **Predict.** Your tensor has 8 MiB, and $p$ is 8. How many MiB does each rank of a ring send? How many does rank 0 of a tree send? And how many steps does each of them take?

# %% predict="1.d"
predict("1.d", ring_mib=14, tree_mib=24, ring_steps=14, tree_steps=6)

# %% [markdown]
# Here's what the ranks really send, next to the formulas.


# %%
def all_reduce_by(algorithm, numel):
    x = torch.ones(numel, device=device())  # [N/4], 4 bytes a number
    {"ring": collectives.ring_all_reduce, "tree": collectives.tree_all_reduce}[algorithm](x)


numel = 2**14  # 64 KiB
rows = []
for p in (2, 4, 8):
    for algorithm in ("ring", "tree"):
        results = launch(all_reduce_by, p, args=(algorithm, numel))
        sends = [results.record.totals(rank).get("send") for rank in range(p)]
        sent = [total.bytes if total else 0 for total in sends]
        per_rank = 2 * (p - 1) * 4 * numel // p if algorithm == "ring" else collectives.tree_depth(p) * 4 * numel
        rows.append(
            {
                "p": p,
                "algorithm": algorithm,
                "steps": 2 * (p - 1) if algorithm == "ring" else 2 * collectives.tree_depth(p),
                "sent by the busiest rank": max(sent),
                "formula": per_rank,
                "sent by the laziest": min(sent),
                "by all together": sum(sent),
            }
        )
viz.table(rows, title="all-reduce of 65,536 bytes")

# %% [markdown]
# All ranks together send the same in both cases, $2(p-1)N$. The ring spreads it evenly, and the tree doesn't. But look at the number of steps!
#
# ## Predict the time
#
# How long does a message with $n$ bytes take? A good approximation is $t(n) = \alpha + \beta n$. Here $\alpha$ is the **latency**, which even an empty message costs, and $1/\beta$ is the **bandwidth**. Below, the circles are measured on this machine, between two ranks, and the line is fitted to them. The gray lines are *published* figures
# for links between GPUs: the bandwidth is the vendors', in one direction, and $\alpha$ is what NCCL assumes for one step of a ring.

# %%
points = launch(links.measure_link, 2)[0]
here = links.fit(points)
print(f"this machine: alpha = {here.alpha * 1e6:.0f} µs, 1/beta = {here.bandwidth / 1e9:.1f} GB/s")
viz.times(
    {"this machine": here.seconds, **{name: link.seconds for name, link in links.PUBLISHED.items()}},
    {"this machine": points},
    title="one message from rank to rank: measured (circles), fitted, and published (grey)",
)

# %% [markdown]
# Both axes are logarithmic, so each line looks like a hockey stick. It's flat as long as $\alpha$ dominates, and then it rises. The bend is at $n = \alpha/\beta$. Smaller messages waste the link, no matter how fast it is.

# %%
viz.table(
    [
        {
            "link": name,
            "alpha [µs]": f"{link.alpha * 1e6:.1f}",
            "1/beta [GB/s]": f"{link.bandwidth / 1e9:.1f}",
            "bend at [kB]": f"{link.half_size / 1000:,.0f}",
        }
        for name, link in {"this machine": here, **links.PUBLISHED}.items()
    ]
)

# %% [markdown] task="1.4" title="Ring or tree?" difficulty=3 minutes=15
# A library like NCCL has to choose an algorithm for every call. You'll write the rule.
#
# - `ring_seconds` and `tree_seconds` predict the time of an all-reduce of `n` bytes. Count the steps that follow one another, and the bytes of the message in each of them.
# - `ring_wins_from` returns the message size, in bytes, from which on the ring is at least as fast as the tree. It's 0 if the ring never loses.
#
# Your formulas should hold for any $p \ge 1$.


# %% exercise="1.4"
def ring_seconds(n: float, world_size: int, alpha: float, beta: float) -> float:
    """Return the time in seconds of a ring all-reduce of n bytes, if a message of m bytes takes alpha + beta * m."""
    ### BEGIN SOLUTION
    return 2 * (world_size - 1) * (alpha + beta * n / world_size)
    ### END SOLUTION


def tree_seconds(n: float, world_size: int, alpha: float, beta: float) -> float:
    """Return the time in seconds of an all-reduce of n bytes along a tree."""
    ### BEGIN SOLUTION
    levels = (world_size - 1).bit_length()  # ceil(log2 p), in whole numbers
    return 2 * levels * (alpha + beta * n)
    ### END SOLUTION


def ring_wins_from(world_size: int, alpha: float, beta: float) -> float:
    """Return the smallest n, in bytes, for which ring_seconds is at most tree_seconds."""
    ### BEGIN SOLUTION
    steps, levels = world_size - 1, (world_size - 1).bit_length()
    if steps == levels:  # with up to three ranks, the tree saves no steps
        return 0.0
    return alpha * (steps - levels) / (beta * (levels - steps / world_size))
    ### END SOLUTION


# %% [markdown] hints="1.4"
# 1. In a ring, the message of one step is one part of the tensor. In a tree, it's the whole tensor. How many steps follow one another, including the way back?
# 2. The ring takes $2(p-1)$ steps with $n/p$ bytes each, and the tree takes $2\lceil\log_2 p\rceil$ steps with $n$ bytes each. Set the two times equal and solve for $n$. For which $p$ do both take the same number of steps?
# 3. With $L = \lceil\log_2 p\rceil$, which is `(p - 1).bit_length()`, the ring wins from $n = \alpha\,(p-1-L) \,/\, (\beta\,(L - (p-1)/p))$. For $p \le 3$, $p - 1$ equals $L$, so return 0 (and don't divide by zero for $p = 1$).

# %% check="1.4"
check("1.4", ring_seconds, tree_seconds, ring_wins_from)

# %% [markdown]
# Now play with links and ranks. Where is the crossover for 8 GPUs in one machine, and where is it for 512 across a network?


# %% tags=["explore"]
def ring_and_tree(link, p):
    chosen = {"this machine": here, **links.PUBLISHED}[link]
    return viz.times(
        {"ring": lambda n: chosen.ring_all_reduce(n, p), "tree": lambda n: chosen.tree_all_reduce(n, p)},
        title=f"all-reduce of {p} ranks over {link}, by the formulas",
    )


viz.explore(ring_and_tree, link=["NVLink 4", "InfiniBand NDR", "PCIe 5.0 x16", "this machine"], p=(8, 2, 4, 64, 512))

# %% [markdown]
# The formulas assume that every rank has its own wire. On this machine, the ranks share cores and memory, so the measured times tell you as much about that as about the algorithm.


# %%
def timed(sizes, repeats=20):
    ways = {
        "ring": collectives.ring_all_reduce,
        "tree": collectives.tree_all_reduce,
        "dist.all_reduce": dist.all_reduce,
    }
    seconds = {name: [] for name in ways}
    for size in sizes:
        x = torch.zeros(size // 4, device=device())  # [size/4], 4 bytes a number
        for name, way in ways.items():
            times = []
            for _ in range(repeats):
                dist.barrier()  # a collective without data: nobody goes on until all have come
                began = links.now()
                way(x)
                times.append(links.now() - began)
            seconds[name].append(min(times))
    return seconds


sizes = (64, 2**16, 2**20, 2**22)
measured = launch(timed, 4, args=(sizes,))
viz.table(
    [
        {"bytes": f"{size:,}"}
        | {name: f"{max(on_rank[name][i] for on_rank in measured) * 1e3:.2f} ms" for name in measured[0]}
        for i, size in enumerate(sizes)
    ],
    title="all-reduce on 4 ranks of this machine, the slowest rank",
)

# %% [markdown]
# ## Break it
#
# Here are three steps of training. Every rank all-reduces its gradient in each step, except that one author was careful: if a gradient isn't finite, the step is skipped.


# %%
def careful_training():
    rank = dist.get_rank()
    weight = torch.zeros(8, device=device())  # [8]
    for step in range(3):
        gradient = torch.full((8,), float(step + 1), device=device())  # [8]
        if (rank, step) == (2, 1):
            gradient[3] = float("inf")
        if not gradient.isfinite().all():
            continue
        dist.all_reduce(gradient)
        weight -= 0.1 * gradient
    return weight


with show_failure():
    launch(careful_training, 4)

# %% [markdown]
# **Read.** Which rank is the odd one out? Which all-reduce are the other ranks stuck in? That's the one that this rank never joined. But in which `step` (0, 1 or 2) did it really skip one? The report can't know that, but the code tells you.
#
# And now for the worst part. Rank 2 did enter a second all-reduce. With the gradient of which of *its own* steps did it take part in the others' step 1?

# %% predict="1.e"
predict("1.e", odd_rank=2, number_of_the_all_reduce=3, skipped_step=1, paired_with_its_step=2)

# %% [markdown]
# So the deadlock is the lucky outcome. Collectives are matched by their *order*, not by what they mean. The sum of step 1 silently contains a gradient of step 2, and if every other rank had skipped a step as well, nobody would ever have noticed.
#
# ## Repair it
#
# This bug really shipped. In torchaudio's HuBERT example, a rank whose loss was infinite or NaN left the training step early, and the other ranks then waited for it until NCCL gave up, half an hour later (pytorch/audio, issue 3749).

# %% [markdown] task="1.5" title="Repair a careful training step" difficulty=3 minutes=12
# Repair the step. If *any* rank's gradient isn't finite, *no* rank should change its weight. Otherwise, every rank subtracts `lr` times the sum of all ranks' gradients. All ranks have to take the same decision, and it shouldn't cost much: at most one tiny
# message in addition to the gradient's.


# %% exercise="1.5"
def careful_step(weight: torch.Tensor, gradient: torch.Tensor, lr: float) -> bool:
    """Update `weight` [..] in place with the sum of the ranks' `gradient` [..]. Return whether the step was taken."""
    ### BEGIN SOLUTION
    skips = (~gradient.isfinite().all()).to(torch.float32)  # []: 1 on a rank that would like to skip
    dist.all_reduce(skips)
    if skips > 0:
        return False
    total = gradient.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    weight -= lr * total
    return True
    ### BROKEN
    # if not gradient.isfinite().all():
    #     return False
    # dist.all_reduce(gradient)
    # weight -= lr * gradient
    # return True
    ### END SOLUTION


# %% [markdown] hints="1.5"
# 1. A rank that sees a problem mustn't decide alone. What do the others have to learn before they may go on, and which collective tells all ranks about all ranks?
# 2. Turn "my gradient isn't finite" into a number and all-reduce it. If the sum is above 0, somebody has a problem, and everyone knows it.
# 3. `skips = (~gradient.isfinite().all()).float()`, then `dist.all_reduce(skips)`, and `if skips > 0: return False`, on every rank. After that, the all-reduce of the gradient is safe. (You could also all-reduce a copy of the gradient first and look at the sum.)

# %% check="1.5"
check("1.5", careful_step)

# %% [markdown]
# One more report. Ten examples don't divide evenly among four ranks.


# %%
def last_batch():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    examples = torch.arange(10.0, device=device()).chunk(world_size)[rank]  # [3] on ranks 0 to 2, [1] on rank 3
    count = torch.tensor(len(examples), device=device())  # []
    dist.all_reduce(count)
    predictions = [torch.empty_like(examples) for _ in range(world_size)]
    dist.all_gather(predictions, 2 * examples)
    return torch.cat(predictions)


with show_failure():
    launch(last_batch, 4)

# %% [markdown]
# **Read.** Which collective isn't the same on all ranks? Which rank is different, and how many elements did it bring?

# %% predict="1.f"
predict("1.f", number_of_the_collective=2, rank=3, elements=1)

# %%
symptoms(1)

# %% [markdown]
# ## In the wild
#
# <details><summary>Going deeper: what NCCL adds, bus bandwidth, and tools for deadlocks</summary>
#
# - **NCCL** splits a message into many small pieces, so that step 2 of one piece overlaps with step 1 of the next. Its tree is really *two* trees, arranged so that a leaf in one isn't a leaf in the other. That way, each rank sends about as much as in a ring, in $\log_2 p$ steps. NCCL chooses by size, from a table of
#   latencies and bandwidths (`src/graph/tuning.cc`) and with the formula $\alpha + \beta n$, just like you. `NCCL_ALGO=Ring` forces one of them, and `NCCL_DEBUG=INFO` shows which rings it built.
# - **nccl-tests**, the standard benchmark, prints two bandwidths for an all-reduce. *Algorithm bandwidth* is $N/t$. *Bus bandwidth* is that times $2(p-1)/p$, and you know why: it's what each rank really sends, so you can compare it with the speed of the wire for any $p$. For a reduce-scatter or an all-gather, the factor is $(p-1)/p$.
# - **torch.distributed** also has forms for one large tensor instead of a list, `all_gather_into_tensor` and `reduce_scatter_tensor` (from torch 2.13 on, `all_gather_single` and `reduce_scatter_single`). With `async_op=True`, a collective returns a request, like `isend`. `TORCH_DISTRIBUTED_DEBUG=DETAIL` compares shapes before each collective, as tplab does, and PyTorch's "flight recorder"
#   keeps the last collectives of each rank while NCCL runs them and dumps them after a timeout.
#
# </details>
#
# Does your algorithm agree with PyTorch's? Here are both on the same numbers. (`tplab.collectives` has what you wrote, for any group and for sizes that `p` doesn't divide.)


# %%
def beside_torch():
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64).to(device())
    mine = collectives.ring_all_reduce(x)  # [6, 5]
    dist.all_reduce(x)  # [6, 5]
    return (mine - x).abs().max().item() < 1e-12


list(launch(beside_torch, 3))

# %% [markdown]
# ## Your library so far
#
# Your package now has an all-reduce that's made of nothing but sends and receives, and it can predict how long one takes.

# %%
from tplab.course import library

library(1)

# %% [markdown]
# You know what it costs to talk. Now, what's worth saying? A matmul can be split over the ranks by columns or by rows, and the two ways need very different messages. Which one would you choose?
