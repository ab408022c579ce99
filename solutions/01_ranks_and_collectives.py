# %% [markdown]
# # 01 · Ranks and collectives
#
# When people say that a training run "scales", they mean that its GPUs don't spend their time waiting for each other. Most of that waiting happens in a handful of operations called collectives. In this chapter, you'll build the most important collective, the all-reduce, from nothing but "send" and "receive". You'll count the bytes that an all-reduce sends, and you'll predict how long it takes. You'll also learn to read the report you get when a program hangs because all of its processes are waiting for each other.
#
# You need PyTorch. About 75 minutes.

# %% tags=["setup"]
import torch
import torch.distributed as dist

from tplab import collectives, device, launch, viz
from tplab.collectives import links
from tplab.course import check, predict, show_failure, symptoms

# %% [markdown]
# This picture shows the first half of what you'll build, with data from a real run on four processes. Each process starts with four numbers and sends messages only to its right-hand neighbor. After three steps, each process holds one complete sum, because every process has added its own number to that sum along the way. Soon you'll write the code behind these arrows yourself.


# %%
def goes_round():
    mine = torch.arange(1, 5, device=device()) * 10 ** dist.get_rank()  # [4]: process 2 has 100, 200, 300, 400
    return [(part, total.clone()) for part, total in collectives.reduce_scatter_steps(mine)]


viz.ring(launch(goes_round, 4), title="a ring reduce-scatter")

# %% [markdown]
# ## Ranks
#
# Distributed training runs the *same* program in several processes, usually one per GPU. Each process has a number called its **rank**, and people often say "rank 2" when they mean the process itself. The number of processes is called the **world size**, and we'll write it as `p`.
#
# `launch(fn, p)` starts `p` fresh processes on this machine, connects them, and runs `fn` in each of them. Once all the ranks finish, `launch` returns a list of their results in rank order.


# %%
def hello():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print(f"I am rank {rank} of {world_size}")
    return 10**rank


list(launch(hello, 4))

# %% [markdown]
# The first launch also printed the name of its **backend**, the library that carries messages between ranks. If there's a GPU for each rank, tplab uses NVIDIA's NCCL as the backend. Otherwise, tplab uses gloo, which runs on the CPU. Your code works with either backend, as long as you create tensors on the rank's own device, which is `device()`.
#
# **Predict.** The notebook sets `counter = 0`. Then each of 4 ranks adds 1 to `counter` and returns the result. What's the sum of the four returned numbers? What's the value of `counter` in the notebook afterward?

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
# A rank can't see another rank's memory, and it can't see the notebook's memory either. If one rank needs a number from another rank, the rank that has the number must send it.
#
# ## Send and receive
#
# A message takes two calls. The sender calls `dist.send(x, dst)`, and the receiver calls `dist.recv(y, src)`, which overwrites `y` with the values of `x`. Both tensors must have the same shape and dtype. `recv` returns once the data has arrived. `send` returns once it's safe to modify `x`, and that may not happen until the receiver has called `recv`.

# %% [markdown] task="1.1" title="Scatter and gather from send and receive" difficulty=2 minutes=10
# Build two operations that have a **root**, the rank that hands out or collects the parts. In `scatter`, the root sends one message to each of the other ranks. In `gather`, the root receives one message from each of the other ranks. The root never sends a message to itself, so don't forget to copy its own part.
#
# The check runs your functions on 1 to 4 ranks with different roots, and it counts the messages.


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
# 1. The root has a different job from the other ranks, so you need an `if` statement. What does the root have to do, and what do the other ranks have to do? Remember that every send needs a matching receive.
# 2. In `scatter`, the root sends `parts[other]` to every other rank and copies its own part into `out`. Each of the other ranks receives one message, directly into `out`. (If you write `out = parts[src]`, the caller's tensor is never filled, because this only makes `out` a new name for the part.) In `gather`, the root needs `p` tensors to receive into.
# 3. In `scatter`, a rank that isn't the root calls `dist.recv(out, src)` and returns `out`. The root loops over all ranks `other != src`, calls `dist.send(parts[other], other)` for each, and returns `out.copy_(parts[src])`. In `gather`, the roles are reversed. The root starts with `parts = [torch.empty_like(x) for _ in range(world_size)]`, copies its own `x` into `parts[rank]`, and receives into the other tensors.

# %% check="1.1"
check("1.1", scatter, gather)

# %% [markdown]
# ## Collectives
#
# Most communication between ranks follows one of a few patterns called **collectives**. *Every* rank in a group has to call each collective, in the same order and with tensors of the same shape. By default, the group contains all ranks, but you can pass a smaller group as `group=`. You've just built two collectives yourself, scatter and gather.
#
# Let's look at more collectives, using values that show which rank they came from. With four ranks, rank 0 starts with [1, 2, 3, 4], rank 1 starts with [10, 20, 30, 40], and so on. That way, each *digit* of a sum tells you what one of the ranks contributed.


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
# An **all-reduce** gives every rank the sum of all ranks' tensors. It's the workhorse of distributed training. For example, replicas of a model use an all-reduce to sum their gradients.
#
# The next two collectives split every rank's tensor into `p` parts. A **reduce-scatter** also sums the tensors across all ranks, but rank $r$ receives only part $r$ of the sum. An **all-to-all** exchanges parts without summing them. Part $j$ of rank $i$ goes to rank $j$, where it becomes part $i$.
#
# **Predict.** Four ranks start with the same values as before. What value does rank 2 receive in a reduce-scatter? What's the *last* value that rank 1 receives in an all-to-all?

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
# In the next cell, you can try all the collectives. When you choose a collective, fresh ranks run it, and the picture shows their tensors before and after the call. If the collective has a root, the root is rank 1. After a `reduce`, only the root's tensor is defined, so the picture leaves out the tensors of the other ranks.
#
# See if you can answer two questions. Which collective undoes a `scatter`? Which two collectives, called one after the other, have the same effect as a single `all_reduce`?


# %% tags=["explore"]
def show(kind, p):
    return viz.collective(launch(kinds[kind], p), name=kind)


viz.explore(show, kind=list(kinds), p=(4, 3, 2))

# %% [markdown]
# You may have noticed that a reduce-scatter followed by an all-gather has the same effect as an all-reduce. You'll use that trick soon.
#
# `launch` records every collective that each rank calls. We'll call this record the **trace**, and we'll use it to count messages and bytes.

# %%
results = launch(all_gather, 4)
results.record

# %% [markdown]
# The last column is the **message size**. We count message sizes the same way NVIDIA's benchmark `nccl-tests` does. For an all-reduce, a broadcast, or a send, the message size is the size of the tensor. For the other collectives, the message size is the combined size of all the parts. The number of bytes that a rank actually sends depends on the algorithm, and you're about to write one.
#
# ## Send and receive at the same time
#
# In a ring, every rank sends to its right-hand neighbor and receives from its left-hand neighbor. Let's start with just two ranks that try to exchange their tensors.


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
# Normally, a program like this hangs silently until you kill it. With tplab, you get a report instead, so let's practice reading one.
#
# **Read.** The line with `def` is line 1 of the cell. On which line is rank 0 waiting? Which rank is rank 0 waiting for? How many times in total did the two ranks call `send`?

# %% predict="1.c"
predict("1.c", line_of_rank_0=6, rank_that_should_send=1, sends_entered=0)

# %% [markdown]
# The solution is to *start* both messages first and then wait for them. `dist.isend` and `dist.irecv` start a message and return a request right away. A call to `request.wait()` blocks until the message has been delivered. Don't touch the tensors before then. `dist.batch_isend_irecv` starts a whole list of sends and receives in one call.


# %%
def to_the_right():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    outgoing = my_numbers()  # [p]
    incoming = torch.empty_like(outgoing)  # [p]
    right, left = (rank + 1) % world_size, (rank - 1) % world_size  # a ring: the last rank's right neighbor is rank 0
    messages = [dist.P2POp(dist.isend, outgoing, right), dist.P2POp(dist.irecv, incoming, left)]
    for request in dist.batch_isend_irecv(messages):
        request.wait()
    return outgoing, incoming


viz.collective(launch(to_the_right, 3), name="to the right")

# %% [markdown]
# Why do we need to start both messages in one batch? With gloo, you could simply call `isend` and then `irecv`. But NCCL processes all messages between two GPUs in order. If both GPUs start with a send, each GPU waits for the other one to receive.
#
# ## The ring
#
# You could already build an all-reduce from your `gather` and a broadcast. Rank 0 would collect all the tensors, add them up, and send the sum to every other rank. But for a tensor of $N$ bytes, rank 0 would have to receive $(p-1)N$ bytes and then send the same number of bytes back out. All of this traffic would go through rank 0's link, while the other ranks' links would be idle most of the time.
#
# A ring keeps every link busy. Arrange the ranks in a circle and split the tensor into `p` parts. Each part starts at a different rank. In every step, each rank sends a part to its right-hand neighbor, and the neighbor adds its own values to that part. After $p-1$ steps, every rank has contributed to every part.
#
# ![Four ranks in a circle. In six steps, the parts of a tensor travel around the ring. The parts are summed during the first three steps and copied during the last three. Each link carries 1.5 times the size of the tensor. In a star, rank 0's link carries 3 times the size of the tensor in each direction.](pictures/ring.svg)
#
# <details><summary>All frames, one by one</summary>
#
# ![The same as numbered stills](pictures/ring_frames.svg)
#
# </details>
#
# Look at the picture at the top of the chapter again and follow part 0. This part starts at rank 1, and three steps later, the complete sum arrives at rank 0. This first half of the algorithm is a **reduce-scatter**. The second half is an **all-gather**, in which the finished parts travel around the ring once more, but this time they're only copied.


# %%
def copies_go_round():
    mine = my_numbers()[dist.get_rank()].reshape(1)  # [1]
    return [(part, whole.clone()) for part, whole in collectives.all_gather_steps(mine)]


viz.ring(launch(copies_go_round, 4), title="a ring all-gather")

# %% [markdown]
# Try both halves with fewer ranks. How many steps does each half take? Which part does rank 0 send first?


# %% tags=["explore"]
def sums_go_round():
    return [(part, total.clone()) for part, total in collectives.reduce_scatter_steps(my_numbers())]


def show_ring(kind, p):
    return viz.ring(launch(sums_go_round if kind == "reduce-scatter" else copies_go_round, p), title=f"{kind}, p = {p}")


viz.explore(show_ring, kind=["reduce-scatter", "all-gather"], p=(3, 2, 4))

# %% [markdown] task="1.2" title="Reduce-scatter in a ring" difficulty=4 minutes=20
# Now it's your turn. The parts are the rows of `x`, which has the shape `[p, ..]`. Use $p-1$ steps, and in each step, send a single row to your right-hand neighbor. Don't change your caller's `x`.


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
# 1. Row $r$ moves $p-1$ ranks to the right and has to end up on rank $r$. At which rank does row $r$ start? Now look at the ring from the perspective of a single rank. Which row does this rank send first?
# 2. Rank $r$ sends row $r-1$ first. (All indices are modulo $p$.) Your left-hand neighbor follows the same rule, so the first row you receive is row $r-2$. Add your own row $r-2$ to the row you received, and send the sum in the next step. After $p-1$ steps, the row that arrives has the index $r-2-(p-2) = r-p$, which is $r$ modulo $p$.
# 3. Before the loop, set `row = (rank - 1) % world_size` and `total = x[row].clone()`. In the loop, send `total` to the right while you receive `received` from the left, as in `to_the_right`. Then set `row = (row - 1) % world_size` and `total = received + x[row]`.

# %% check="1.2"
check("1.2", ring_reduce_scatter)

# %% [markdown] task="1.3" title="All-gather and all-reduce in a ring" difficulty=3 minutes=18
# Write the second half, `ring_all_gather`. Every rank starts with one part and ends up with all `p` parts. Use $p-1$ steps again, and in each step, send a single part to your right-hand neighbor.
#
# Then combine the two halves into `ring_all_reduce`. Your function should work for a tensor `x` of any shape, as long as the total number of elements is divisible by `p`. Keep in mind that no single dimension of `x` has to be divisible by `p`.


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
# 1. In the first step, a rank can only send its own part. In each later step, which part is its right-hand neighbor still missing? For the all-reduce, compare the shapes. Your reduce-scatter turns `[p, ..]` into `[..]`, and your all-gather turns `[..]` into `[p, ..]`.
# 2. Your right-hand neighbor is missing the part that you've just received from the left. In step $s$ (counting from 0), rank $r$ sends part $r-s$ and receives part $r-s-1$, modulo $p$. For the all-reduce, `x.reshape(world_size, -1)` gives you `p` rows of equal length.
# 3. Start with `rows = [torch.empty_like(part) for _ in range(world_size)]` and `rows[rank].copy_(part)`. In step `s`, send `rows[(rank - s) % world_size]` and receive into `rows[(rank - s - 1) % world_size]`. After the last step, return `torch.stack(rows)`. The all-reduce is `ring_all_gather(ring_reduce_scatter(x.reshape(dist.get_world_size(), -1))).reshape(x.shape)`.

# %% check="1.3"
check("1.3", ring_all_gather, ring_all_reduce)

# %% [markdown]
# You've just built NCCL's most important algorithm. Let's watch your own code at work! In the next cell, your `ring_all_reduce` runs on real ranks, and every message is recorded. If your function doesn't work yet, the picture says why and shows the ring from `tplab.collectives` instead.
#
# The picture shows the run after step 3, when each rank has just completed one part. Press the play button to watch the run, or move the `step` slider yourself. How many bytes does each link carry in total, compared with the size of the tensor? Compare a run on 2 ranks with a run on 8 ranks.


# %% tags=["explore"]
def record_my_ring(p):
    return viz.ring_run(collectives.record_ring(ring_all_reduce, p))


viz.play(record_my_ring, p=(2, 3, 4, 5, 6, 7, 8), start={"p": 4, "step": 3})

# %% [markdown]
# ## Count the bytes
#
# To reduce-scatter $N$ bytes, each rank sends $p-1$ messages of $N/p$ bytes each. The all-gather sends the same number of messages of the same size. So in a **ring all-reduce**, each rank sends $2\,\frac{p-1}{p}\,N$ bytes. This number is always less than $2N$, no matter how many ranks you add. There's also a proof that no algorithm can do better, because in any all-reduce, at least one rank has to send this many bytes (Patarasuk and Yuan 2009).
#
# The other classic algorithm is the **tree**. In the first step, every other rank sends its full tensor to a neighbor, and the neighbor adds the tensor it receives to its own. In the next step, half of the remaining ranks do the same, and so on. After $\lceil\log_2 p\rceil$ steps, rank 0 holds the sum. Then the sum travels back down the tree in the same number of steps.
#
# **Predict.** You all-reduce an 8 MiB tensor across 8 ranks. How many MiB does each rank send in a ring all-reduce? How many MiB does rank 0 send in a tree all-reduce? How many steps does each algorithm take?

# %% predict="1.d"
predict("1.d", ring_mib=14, tree_mib=24, ring_steps=14, tree_steps=6)

# %% [markdown]
# Here's what the ranks actually sent, next to what the formulas predict.


# %%
def all_reduce_by(algorithm, numel):
    x = torch.ones(numel, device=device())  # [N/4], 4 bytes per element
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
                "sent by the laziest rank": min(sent),
                "sent by all ranks": sum(sent),
            }
        )
viz.table(rows, title="all-reduce of 65,536 bytes")

# %% [markdown]
# Summed over all ranks, both algorithms send $2(p-1)N$ bytes. The ring spreads these bytes evenly across the ranks, but the tree doesn't. On the other hand, the tree needs far fewer steps.
#
# ## Predict the time
#
# How long does it take to send a message of $n$ bytes? A good approximation is $t(n) = \alpha + \beta n$. Here $\alpha$ is the **latency**, which you pay even for an empty message, and $1/\beta$ is the **bandwidth**. In the next picture, each circle is one message that we timed between two ranks on your machine. The colored line is fit to the circles. The gray lines show *published* figures for GPU interconnects. The bandwidths are the vendors' figures for one direction, and the latencies are the values that NCCL assumes for one step of a ring.

# %%
points = launch(links.measure_link, 2)[0]
here = links.fit(points)
print(f"this machine: alpha = {here.alpha * 1e6:.0f} µs, 1/beta = {here.bandwidth / 1e9:.1f} GB/s")
viz.times(
    {"this machine": here.seconds, **{name: link.seconds for name, link in links.PUBLISHED.items()}},
    {"this machine": points},
    title="one message from rank to rank: measured (circles), fitted, and published (gray)",
)

# %% [markdown]
# Both axes are logarithmic, so each line looks like a hockey stick. For small messages, the line is flat, because almost all of the time is latency. For large messages, the line rises with the message size. It bends where $n = \alpha/\beta$. Messages that are much smaller than this size leave most of the bandwidth unused, no matter how fast the link is.

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
# For every call, a library like NCCL has to choose an algorithm. In this exercise, you'll find out how to choose between a ring and a tree.
#
# First, write `ring_seconds` and `tree_seconds`, which predict how long an all-reduce of `n` bytes takes. Count the sequential steps and the bytes in each message.
#
# Then write `ring_wins_from`, which returns the smallest message size, in bytes, at which the ring is at least as fast as the tree. If the ring is never slower than the tree, return 0.
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
# 1. In a ring, each message contains one of the `p` parts. In a tree, each message contains the full tensor. How many sequential steps does each algorithm take? Don't forget that the result has to reach every rank.
# 2. The ring takes $2(p-1)$ steps with $n/p$ bytes each, and the tree takes $2\lceil\log_2 p\rceil$ steps with $n$ bytes each. Set the two times equal and solve for $n$. For which values of $p$ do both algorithms take the same number of steps?
# 3. Let $L = \lceil\log_2 p\rceil$, which you can compute as `(p - 1).bit_length()`. Then the ring wins for all $n \ge \alpha\,(p-1-L) \,/\, (\beta\,(L - (p-1)/p))$. For $p \le 3$, both algorithms take the same number of steps, so return 0. (This also keeps you from dividing by zero for $p = 1$.)

# %% check="1.4"
check("1.4", ring_seconds, tree_seconds, ring_wins_from)

# %% [markdown]
# Now try different links and different numbers of ranks. Above what message size does the ring win on 8 GPUs in one machine? Above what message size does the ring win on 512 GPUs on a network?


# %% tags=["explore"]
def ring_and_tree(link, p):
    chosen = {"this machine": here, **links.PUBLISHED}[link]
    return viz.times(
        {"ring": lambda n: chosen.ring_all_reduce(n, p), "tree": lambda n: chosen.tree_all_reduce(n, p)},
        title=f"all-reduce of {p} ranks over {link}, by the formulas",
    )


viz.explore(ring_and_tree, link=["NVLink 4", "InfiniBand NDR", "PCIe 5.0 x16", "this machine"], p=(8, 2, 4, 64, 512))

# %% [markdown]
# The formulas assume that every rank has its own link. On your machine, the ranks share the CPU cores and the memory, so the times you measure depend on more than the algorithm.


# %%
def timed(sizes, repeats=20):
    ways = {
        "ring": collectives.ring_all_reduce,
        "tree": collectives.tree_all_reduce,
        "dist.all_reduce": dist.all_reduce,
    }
    seconds = {name: [] for name in ways}
    for size in sizes:
        x = torch.zeros(size // 4, device=device())  # [size/4], 4 bytes per element
        for name, way in ways.items():
            times = []
            for _ in range(repeats):
                dist.barrier()  # a collective without data: no rank continues until all ranks have called it
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
# The next cell runs three training steps. In each step, every rank all-reduces its gradient. To be safe, the author made a rank skip the step if its gradient isn't finite.


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
# **Read.** Which rank is the odd one out? Which all-reduce are the other ranks stuck in? In which `step` (0, 1, or 2) did the mismatched rank skip its all-reduce? You won't find the step in the report, but you can work it out from the code.
#
# Now for the scary part. Rank 2 did join the second all-reduce, in which the other ranks summed their gradients from step 1. Which step did *rank 2's* gradient come from?

# %% predict="1.e"
predict("1.e", odd_rank=2, number_of_the_all_reduce=3, skipped_step=1, paired_with_its_step=2)

# %% [markdown]
# Collectives are matched by order, not by meaning, so the sum for step 1 contains a gradient from step 2. If every other rank had also skipped a step, the program would have finished without an error, and you'd have trained on the wrong gradients. We were lucky that this program got stuck!
#
# ## Fix it
#
# This bug has shipped in real code. In torchaudio's HuBERT example, a rank returned early from the training step when its loss was infinite or NaN. The other ranks kept waiting for that rank until NCCL gave up half an hour later (pytorch/audio, issue 3749).

# %% [markdown] task="1.5" title="Fix a careful training step" difficulty=3 minutes=12
# Fix the training step. If *any* rank's gradient isn't finite, *no* rank should change its weight. Otherwise, every rank subtracts `lr` times the sum of all ranks' gradients from its weight. All ranks have to make the same decision. Keep the communication cheap: use at most one tiny all-reduce besides the one for the gradient.


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
# 1. A rank that finds a problem can't just skip the step. What do the other ranks need to know before they can continue? Which collective gives every rank information from all the other ranks?
# 2. Turn "my gradient isn't finite" into a number, and all-reduce that number. If the sum is greater than 0, at least one rank has a problem, and now every rank knows about it.
# 3. On every rank, compute `skips = (~gradient.isfinite().all()).float()`, call `dist.all_reduce(skips)`, and return `False` if `skips > 0`. After that, the all-reduce of the gradient is safe. (You could also all-reduce a copy of the gradient first and check whether the sum is finite.)

# %% check="1.5"
check("1.5", careful_step)

# %% [markdown]
# Here's one more report. This time, a program tries to divide ten examples among four ranks.


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
# **Read.** Which collective got tensors of different shapes? Which rank is the odd one out? How many elements did that rank pass to the collective?

# %% predict="1.f"
predict("1.f", number_of_the_collective=2, rank=3, elements=1)

# %%
symptoms(1)

# %% [markdown]
# ## In the wild
#
# <details><summary>Going deeper: what NCCL adds, bus bandwidth, and tools for deadlocks</summary>
#
# **NCCL** splits a message into many small pieces, so that step 2 of one piece overlaps with step 1 of the next. Its tree algorithm actually uses *two* trees, arranged so that a leaf of one tree isn't a leaf of the other. With two trees, each rank sends about as many bytes as with a ring, but the number of steps grows only with $\log_2 p$. To choose between the ring and the tree, NCCL uses the same formula you did, $\alpha + \beta n$, with a table of latencies and bandwidths (`src/graph/tuning.cc`). You can force NCCL to use a ring with `NCCL_ALGO=Ring`. If you set `NCCL_DEBUG=INFO`, NCCL prints the rings it has built.
#
# The standard benchmark, **nccl-tests**, prints two bandwidths for an all-reduce. The *algorithm bandwidth* is $N/t$, and the *bus bandwidth* is that number multiplied by $2(p-1)/p$. The bus bandwidth counts the bytes that each rank actually sends, so you can compare it with the speed of the link, no matter how large $p$ is. For a reduce-scatter or an all-gather, the factor is $(p-1)/p$.
#
# **torch.distributed** also has forms that take one large tensor instead of a list, `all_gather_into_tensor` and `reduce_scatter_tensor`. (From torch 2.13 on, they're called `all_gather_single` and `reduce_scatter_single`.) If you pass `async_op=True`, a collective returns a request right away, just as `isend` does.
#
# If you set `TORCH_DISTRIBUTED_DEBUG=DETAIL`, PyTorch compares the shapes before each collective, as tplab does. PyTorch's "flight recorder" keeps a list of each rank's most recent NCCL collectives and writes that list to a file after a timeout.
#
# </details>
#
# Does the ring agree with PyTorch's own all-reduce? The next cell runs both algorithms on the same values. The cell uses the ring implementation from `tplab.collectives`, which also works for smaller groups and for tensors whose size isn't divisible by `p`.


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
# Your library now has an all-reduce made of nothing but sends and receives, and it can predict how long an all-reduce takes.

# %%
from tplab.course import library

library(1)

# %% [markdown]
# Now you know what communication costs. So what should the ranks of a parallel model send each other? You can split a matmul by columns or by rows, and the two splits require very different communication. Which split would you choose?
