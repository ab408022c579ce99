# %% [markdown]
# # 01 · Ranks and collectives
#
# When people say that a training run "scales", they mean that its GPUs don't spend their time waiting for each other. Most of that waiting happens in a handful of operations called collectives. In this chapter, you'll build the most important collective, the all-reduce, from nothing but "send" and "receive". You'll predict how long an all-reduce takes, and you'll learn to read the report you get when a program hangs. About 75 minutes, plus 20 minutes for an optional section.

# %% tags=["setup"]
import torch
import torch.distributed as dist

from tplab import collectives, device, launch, viz
from tplab.collectives import links
from tplab.course import check, predict, show_failure, symptoms

# %% [markdown]
# This picture shows the first half of what you'll build, with data from a real run on four processes. Each process has four numbers. Process 0 sends its first number to its right-hand neighbor, process 1 sends its second number, and so on. (The picture only shows the numbers that travel.) The neighbor adds one of its own numbers and passes the sum on to the next neighbor. After three steps, each process has one complete sum. Soon, you'll write the code behind these arrows yourself.


# %%
def goes_round():
    # process 2 has 100, 200, 300, 400
    mine = torch.arange(1, 5, device=device()) * 10 ** dist.get_rank()  # [4]
    steps = collectives.reduce_scatter_steps(mine, offset=1)
    return [total.clone() for _, total in steps]


viz.ring(launch(goes_round, 4), title="four sums go around a ring")

# %% [markdown]
# ## Ranks
#
# Distributed training runs the *same* program in several processes, usually one per GPU. Each process has a number called its **rank**, and people often say "rank 2" when they mean the process itself. The number of processes is called the **world size**, or `p` for short.
#
# `launch(fn, p)` starts `p` fresh processes on this machine, connects them, and runs `fn` in each of them. Once all the ranks finish, `launch` returns a list of their results in rank order.


# %%
def hello():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print(f"I am rank {rank} of {world_size}")
    return 10**rank


list(launch(hello, 4))

# %% [markdown]
# Each launch uses a **backend**, which is the library that carries messages between ranks. The line above the first picture says which backend your machine uses. If there's a GPU for each rank, tplab chooses NVIDIA's NCCL. Otherwise, tplab chooses gloo, which runs on the CPU. Your code works with either backend, as long as you create tensors on the rank's own device, `device()`.
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
# A message takes two calls. The sender calls `dist.send(x, dst)`, and the receiver calls `dist.recv(y, src)`, which overwrites `y` with the values of `x`. Both tensors must have the same shape and dtype. `recv` returns once the data has arrived. `send` returns once you can safely modify `x`. If the receiver hasn't called `recv` yet, `send` may have to wait.

# %% [markdown] task="1.1" title="Scatter and gather from send and receive" difficulty=2 minutes=6
# Build `scatter` and `gather`. Both have a **root**, the rank that hands out or collects the chunks of a tensor. In `scatter`, the root sends one message to each of the other ranks. In `gather`, the root receives one message from each of the other ranks. The root never sends a message to itself, so it copies its own chunk instead.
#
# We've written `scatter` for you. Read it first, and then write `gather`, which may return a list or a tuple. The check runs both functions on 1 to 4 ranks with different roots, and it counts the messages.


# %% exercise="1.1"
def scatter(
    out: torch.Tensor, chunks: list[torch.Tensor] | None, src: int
) -> torch.Tensor:
    """Fill `out` [..] with the chunk that belongs to this rank, and return `out`.

    chunks: on rank `src`, a list of p tensors [..] in rank order;
        on all other ranks, None
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != src:
        dist.recv(out, src)
        return out
    for other in range(world_size):
        if other != src:
            dist.send(chunks[other], other)
    return out.copy_(chunks[src])


def gather(x: torch.Tensor, dst: int) -> list[torch.Tensor] | None:
    """On rank `dst`, return a list with copies of all ranks' x [..], in rank order.

    On all other ranks, return None.
    """
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != dst:
        dist.send(x, dst)
        return None
    chunks = [torch.empty_like(x) for _ in range(world_size)]  # p of [..]
    chunks[rank].copy_(x)
    for other in range(world_size):
        if other != dst:
            dist.recv(chunks[other], other)
    return chunks
    ### END SOLUTION


# %% [markdown] hints="1.1"
# 1. As in `scatter`, the root has a different job from the other ranks, so you need an `if` statement. In `gather`, what does the root have to do, and what do the other ranks have to do? Remember that every send needs a matching receive.
# 2. In `gather`, the roles are reversed. Each rank that isn't the root sends its `x` to the root and returns `None`. The root receives one message from each of these ranks, so it needs `p` tensors to receive into, one of which is a copy of its own `x`.
# 3. A rank that isn't the root calls `dist.send(x, dst)` and returns `None`. The root starts with `chunks = [torch.empty_like(x) for _ in range(world_size)]` and copies its own `x` with `chunks[rank].copy_(x)`. Then the root loops over all ranks `other != dst`, calls `dist.recv(chunks[other], other)` for each of them, and returns `chunks`.

# %% check="1.1"
check("1.1", scatter, gather)

# %% [markdown]
# ## Collectives
#
# Scatter and gather are two examples of **collectives**. *Every* rank in a group has to call each collective, in the same order and with tensors of the same shape. By default, the group contains all ranks, but you can pass a smaller group as `group=`.
#
# Let's look at two more collectives, using values that show which rank they came from. Rank 0 starts with [1, 2, 3, 4], rank 1 starts with [10, 20, 30, 40], and so on, so each *digit* of a sum tells you what one of the ranks contributed.


# %%
def my_numbers():
    p = dist.get_world_size()
    return torch.arange(1, p + 1, device=device()) * 10 ** dist.get_rank()  # [p]


def all_reduce():
    x = my_numbers()  # [p]
    before = x.clone()
    # in place: now x is the sum, on every rank; the call itself returns None
    dist.all_reduce(x)
    return before, x


viz.collective(launch(all_reduce, 4), name="all_reduce")

# %% [markdown]
# An **all-reduce** gives every rank the sum of all ranks' tensors. For example, replicas of a model use an all-reduce to sum their gradients.


# %%
def all_gather():
    x = my_numbers()[:1]  # [1]
    chunks = [torch.empty_like(x) for _ in range(dist.get_world_size())]  # p of [1]
    dist.all_gather(chunks, x)
    return x, chunks


gathered = launch(all_gather, 4)
viz.collective(gathered, name="all_gather")

# %% [markdown]
# In an **all-gather**, each rank contributes one chunk, and every rank gets all `p` chunks. The next two collectives split every rank's tensor into `p` chunks. A **reduce-scatter** sums the tensors across all ranks, but rank $r$ receives only chunk $r$ of the sum. An **all-to-all** exchanges chunks without summing them. Chunk $j$ of rank $i$ becomes chunk $i$ of rank $j$, so chunk 3 of rank 1 becomes chunk 1 of rank 3, for example.
#
# **Predict.** Four ranks start with [1, 2, 3, 4], [10, 20, 30, 40], and so on. What value does rank 2 receive in a reduce-scatter? What's the *last* value that rank 1 receives in an all-to-all?

# %% predict="1.b"
predict("1.b", reduce_scatter_on_rank_2=3333, last_of_all_to_all_on_rank_1=2000)


# %% [markdown]
# In the next cell, you can check your prediction and try all the other collectives. If a collective has a root, the root is rank 1. After a `reduce`, only the root's tensor is defined, so the picture leaves out the tensors of the other ranks.


# %% tags=["explore"]
def show(kind, p):
    return viz.collective(launch(collectives.EXAMPLES[kind], p), name=kind)


viz.explore(show, kind=list(collectives.EXAMPLES), p=(4, 3, 2))

# %% [markdown]
# **Predict.** Which collective undoes a `scatter`? A `reduce` gives only the root the sum, and a `broadcast` copies the root's tensor to every rank. If you call one after the other, you get the same effect as with an `all_reduce`, but all the data goes through the root. There's also a pair of collectives *without* a root that has the same effect as an `all_reduce`. Which collective of this pair comes first, and which one comes second?

# %% predict="1.c"
predict("1.c", undoes_scatter="gather", first="reduce_scatter", second="all_gather")

# %% [markdown]
# `launch` records every collective that each rank calls. We'll use this record, the **trace**, to count messages and bytes.

# %%
gathered.record

# %% [markdown]
# The last column shows the **message size** of each collective, counted as in NVIDIA's benchmark `nccl-tests`. For an all-reduce or a reduce-scatter, that's the size of the tensor that each rank puts in. For an all-gather, it's the size of the result, which is all `p` chunks together. In this all-gather, each rank contributed a single 8-byte number, so the message size is 4 · 8 = 32 bytes. The number of bytes that a rank actually sends depends on the algorithm, and you're about to write one.
#
# ## Send and receive at the same time
#
# In a ring, every rank sends a message to its right-hand neighbor and receives a message from its left-hand neighbor. Let's start with just two ranks that try to exchange their tensors.


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
# Normally, a program like this hangs silently until you kill it. With tplab, you get a report instead.
#
# **Read.** On which line of the cell is rank 0 waiting? Which rank is rank 0 waiting for? Now look at the code again. How many times in total did the two ranks call `send`?

# %% predict="1.d"
predict("1.d", line_of_rank_0=6, rank_that_should_send=1, sends_entered=0)

# %% [markdown]
# The report suggests two solutions. One side could send first. That works for two ranks, but in a large ring, each rank would have to wait for its left-hand neighbor. So let's use the other solution and *start* both messages before we wait for either of them. `dist.batch_isend_irecv` starts all the sends and receives in a list and immediately returns a list of requests. A call to `request.wait()` blocks until the message has been delivered. Don't touch the tensors before then.


# %%
def both_at_once():
    rank = dist.get_rank()
    other = 1 - rank
    mine = torch.full((4,), float(rank), device=device())  # [4]
    theirs = torch.empty(4, device=device())  # [4]
    messages = [
        dist.P2POp(dist.isend, mine, other),
        dist.P2POp(dist.irecv, theirs, other),
    ]
    for request in dist.batch_isend_irecv(messages):
        request.wait()
    return theirs


list(launch(both_at_once, 2))

# %% [markdown]
# <details><summary>Going deeper: why both messages belong in one batch</summary>
#
# With gloo, you could simply call `dist.isend` and then `dist.irecv`. But NCCL processes all messages between two GPUs in order. If both GPUs start with a send, each GPU waits for the other one to receive.
#
# </details>
#
# ## The ring
#
# You could already build an all-reduce from your `gather` and a broadcast. Rank 0 would collect all the tensors, add them up, and send the sum to every other rank. But then all the traffic would go through rank 0's **link**, its connection to the other ranks. The other ranks' links would be idle most of the time.
#
# A ring keeps every link busy. Arrange the ranks in a circle and split the tensor into `p` chunks. In every step, each rank sends one chunk to its right-hand neighbor, which adds its own values. After $p-1$ steps, every rank has contributed to every chunk, and each rank has one finished chunk. In $p-1$ more steps, the finished chunks travel around the circle and are copied.
#
# ![Four ranks in a circle. In six steps, the chunks of a tensor travel around the ring. The chunks are summed during the first three steps and copied during the last three. In a star, all tensors go through rank 0's link.](pictures/ring.svg)
#
# <details><summary>All frames, one by one</summary>
#
# ![The same as numbered stills](pictures/ring_frames.svg)
#
# </details>
#
# Now look at the picture at the top of the chapter again. In the first step, rank 0 sends its 1, which is its chunk 0. After three steps, chunk 0 is finished, and its value is 1111. Which rank has it?

# %% [markdown] task="1.2" title="Reduce-scatter in a ring" difficulty=4 minutes=13
# In a reduce-scatter, rank $r$ has to get chunk $r$. The picture at the top and the animation do something else: there, rank $r$ ends up with chunk $r+1$, and the last rank with chunk 0. (At the top, chunk 0 becomes 1111, chunk 1 becomes 2222, and so on.) So on which rank should each chunk start? Make a table for three ranks before you write any code.
#
# Your `x` has the shape `[p, ..]`, and chunk $i$ is `x[i]`. Use $p-1$ steps. In each step, each rank sends a single chunk to its right-hand neighbor. Don't change your caller's `x`.


# %% exercise="1.2"
def ring_reduce_scatter(x: torch.Tensor) -> torch.Tensor:
    """Return chunk `rank` of the sum of x over all ranks.

    x [p, ..] on every rank -> [..]
    """
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    index = left  # this chunk has p - 1 steps to go until it reaches its owner
    total = x[index].clone()  # [..]
    for _ in range(world_size - 1):
        received = torch.empty_like(total)  # [..]
        messages = [
            dist.P2POp(dist.isend, total, right),
            dist.P2POp(dist.irecv, received, left),
        ]
        for request in dist.batch_isend_irecv(messages):
            request.wait()
        # what arrived is the chunk before the one that left
        index = (index - 1) % world_size
        total = received + x[index]
    return total
    ### END SOLUTION


# %% [markdown] hints="1.2"
# 1. Chunk `r` moves one rank to the right in each of the `p - 1` steps, and it should end on rank `r`. At which rank does chunk `r` start? Now look at the ring from the perspective of a single rank. Which chunk does this rank send first?
# 2. Rank `r` sends chunk `r - 1` first. (All indices are modulo `p`.) Your left-hand neighbor follows the same rule, so the first chunk you receive is chunk `r - 2`. Add your own chunk `r - 2` to the chunk you received, and send the sum in the next step. After `p - 1` steps, the chunk that arrives has the index `r - 2 - (p - 2) = r - p`, which is `r` modulo `p`.
# 3. Before the loop, set `index = (rank - 1) % world_size` and `total = x[index].clone()`. In the loop, send `total` to rank `(rank + 1) % world_size` while you receive `received` from rank `(rank - 1) % world_size`, in one batch. Then set `index = (index - 1) % world_size` and `total = received + x[index]`.

# %% check="1.2"
check("1.2", ring_reduce_scatter)

# %% [markdown] task="1.3" title="All-gather and all-reduce in a ring" difficulty=3 minutes=12
# Now write `ring_all_gather`. Every rank starts with one chunk and ends up with all `p` chunks. Use $p-1$ steps again, and have each rank send only one chunk to its right-hand neighbor in each step. Which chunk should a rank send in each step?
#
# Then build `ring_all_reduce` from what you have. Each rank may send no more than $2(p-1)$ messages, and each message may contain at most $1/p$ of `x`. Your function should work for a tensor `x` of any shape, as long as the total number of elements is divisible by `p`. For example, a tensor of shape `[3, 2, 2]` has to work on 4 ranks.


# %% exercise="1.3"
def ring_all_gather(chunk: torch.Tensor) -> torch.Tensor:
    """Return the chunks of all ranks, with rank i's chunk at index i.

    chunk [..] on every rank -> [p, ..]
    """
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    chunks = [torch.empty_like(chunk) for _ in range(world_size)]  # p of [..]
    chunks[rank].copy_(chunk)
    for step in range(world_size - 1):
        outgoing, incoming = (rank - step) % world_size, (rank - step - 1) % world_size
        messages = [
            dist.P2POp(dist.isend, chunks[outgoing], right),
            dist.P2POp(dist.irecv, chunks[incoming], left),
        ]
        for request in dist.batch_isend_irecv(messages):
            request.wait()
    return torch.stack(chunks)  # [p, ..]
    ### END SOLUTION


def ring_all_reduce(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of x [..] over all ranks, in a new tensor of the same shape."""
    ### BEGIN SOLUTION
    chunks = x.reshape(dist.get_world_size(), -1)  # [p, N/p]
    # [N/p] -> [p, N/p] -> [..]
    return ring_all_gather(ring_reduce_scatter(chunks)).reshape(x.shape)
    ### END SOLUTION


# %% [markdown] hints="1.3"
# 1. In the first step, a rank can only send its own chunk. In each later step, which chunk is the rank's right-hand neighbor still missing? For the all-reduce, compare the shapes. Your reduce-scatter turns `[p, ..]` into `[..]`, and your all-gather turns `[..]` into `[p, ..]`.
# 2. Your right-hand neighbor is missing the chunk that you've just received from the left. In step `s` (counting from 0), rank `r` sends chunk `r - s` and receives chunk `r - s - 1`, modulo `p`. For the all-reduce, `x.reshape(world_size, -1)` returns `p` equally large chunks.
# 3. Start with `chunks = [torch.empty_like(chunk) for _ in range(world_size)]` and `chunks[rank].copy_(chunk)`. In step `s`, send `chunks[(rank - s) % world_size]` and receive into `chunks[(rank - s - 1) % world_size]`. After the last step, return `torch.stack(chunks)`. The all-reduce is `ring_all_gather(ring_reduce_scatter(x.reshape(dist.get_world_size(), -1))).reshape(x.shape)`.

# %% check="1.3"
check("1.3", ring_all_gather, ring_all_reduce)

# %% [markdown]
# You've just built NCCL's most important algorithm. Let's watch your own code at work! In the next cell, your `ring_all_reduce` runs on real ranks, and every message is recorded. If your function doesn't work yet, the picture explains why and shows the ring from `tplab.collectives` instead.
#
# Press the play button to watch the run, or move the `step` slider yourself. Then try different numbers of ranks, and compare the bytes per link with the size of the tensor. How does the ratio change as `p` grows?


# %% tags=["explore"]
def record_my_ring(p):
    return viz.ring_run(collectives.record_ring(ring_all_reduce, p))


viz.play(record_my_ring, p=(2, 3, 4, 5, 6, 7, 8), start={"p": 4, "step": 3})

# %% [markdown]
# ## Count the bytes
#
# The other classic algorithm is the **tree**. Suppose you have eight ranks. First, ranks 1, 3, 5, and 7 send their full tensors to ranks 0, 2, 4, and 6, which add them to their own tensors. Next, ranks 2 and 6 send their sums to ranks 0 and 4. Finally, rank 4 sends its sum to rank 0, which now has the sum of all eight tensors. Then the sum travels back down the tree. Each rank sends the sum to all the ranks from which it received a tensor on the way up.
#
# **Predict.** You all-reduce an 8 MiB tensor across 8 ranks. How many MiB does each rank send in a ring all-reduce? How many MiB does rank 0 send in a tree all-reduce? How many steps does each algorithm take?

# %% predict="1.e"
predict("1.e", ring_mib=14, tree_mib=24, ring_steps=14, tree_steps=6)

# %% [markdown]
# Here's what the ranks really sent when they all-reduced a small tensor.


# %%
ALGORITHMS = {"ring": collectives.ring_all_reduce, "tree": collectives.tree_all_reduce}


def all_reduce_by(algorithm, numel):
    x = torch.ones(numel, device=device())  # [N/4], 4 bytes per element
    ALGORITHMS[algorithm](x)


rows = []
for p in (2, 4, 8):
    for algorithm in ALGORITHMS:
        results = launch(all_reduce_by, p, args=(algorithm, 2**14))  # 64 KiB
        ranks = [results.record.of_rank(rank) for rank in range(p)]
        sent = [sum(c.bytes for c in calls if c.kind == "send") for calls in ranks]
        row = {"p": p, "algorithm": algorithm, "busiest rank": f"{max(sent):,}"}
        rows.append(row | {"all ranks together": f"{sum(sent):,}"})
viz.table(rows, title="bytes sent in an all-reduce of 65,536 bytes")

# %% [markdown]
# As you add ranks, the busiest rank of a tree sends more and more bytes. In a ring, no rank ever sends more than twice the size of the tensor. The tree has a different advantage. It takes far fewer steps!
#
# ## Predict the time (optional)
#
# The next section takes about 20 minutes. You can skip to "Break it" now and come back before chapter 11, which builds on these formulas.
#
# How long does it take to send a message of $n$ bytes? A good approximation is $t(n) = \alpha + \beta n$. Here $\alpha$ is the **latency**, which you pay even for an empty message, and $1/\beta$ is the **bandwidth**. In the next picture, each circle represents a message that we timed between two ranks on your machine. The colored line is a fit to the circles. The gray lines show published figures for GPU interconnects.

# %%
points = launch(links.measure_link, 2)[0]
here = links.fit(points)
alpha, bandwidth = here.alpha * 1e6, here.bandwidth / 1e9  # in µs and GB/s
print(f"this machine: alpha = {alpha:.0f} µs, 1/beta = {bandwidth:.1f} GB/s")
published = {name: link.seconds for name, link in links.PUBLISHED.items()}
viz.times(
    {"this machine": here.seconds} | published,
    {"this machine": points},
    title="one message from rank to rank: "
    "measured (circles), fitted, and published (gray)",
)

# %% [markdown]
# For small messages, each line is flat, because almost all of the time is latency. The line bends where $n = \alpha/\beta$. Messages that are much smaller than this size leave most of the bandwidth unused, no matter how fast the link is.

# %% [markdown] task="1.4" title="Ring or tree?" difficulty=3 minutes=12
# For every all-reduce, a library like NCCL has to choose an algorithm. How would you choose?
#
# First, write `ring_seconds` and `tree_seconds`, which predict how long an all-reduce of `n` bytes takes. Assume that every rank has its own link, so that messages in the same step don't slow each other down.
#
# Then write `ring_wins_from`, which returns the smallest message size, in bytes, as a real number, at which the ring is at least as fast as the tree. If the ring is never slower than the tree, return 0.
#
# Your formulas should hold for any $p \ge 1$, even if $p$ isn't a power of two.


# %% exercise="1.4"
def ring_seconds(n: float, world_size: int, alpha: float, beta: float) -> float:
    """Return the time in seconds of a ring all-reduce of n bytes.

    A message of m bytes takes alpha + beta * m.
    """
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
    """Return the smallest n, in bytes, with ring_seconds at most tree_seconds."""
    ### BEGIN SOLUTION
    steps, levels = world_size - 1, (world_size - 1).bit_length()
    if steps == levels:  # with up to three ranks, the tree saves no steps
        return 0.0
    return alpha * (steps - levels) / (beta * (levels - steps / world_size))
    ### END SOLUTION


# %% [markdown] hints="1.4"
# 1. In a ring, each message contains one of the `p` chunks. In a tree, each message contains the full tensor. How many sequential steps does each algorithm take? Don't forget that the result has to reach every rank.
# 2. The ring takes `2 * (p - 1)` steps with `n / p` bytes each, and the tree takes `2 * ceil(log2(p))` steps with `n` bytes each. Set the two times equal and solve for `n`. For which values of `p` do both algorithms take the same number of steps?
# 3. Let `L = ceil(log2(p))`, which you can compute as `(p - 1).bit_length()`. Then the ring wins for all `n >= alpha * (p - 1 - L) / (beta * (L - (p - 1) / p))`. For `p <= 3`, both algorithms take the same number of steps, so return 0. (This also keeps you from dividing by zero for `p = 1`.)

# %% check="1.4"
check("1.4", ring_seconds, tree_seconds, ring_wins_from)

# %% [markdown]
# In a ring all-reduce of $N$ bytes, each rank sends $2\,\frac{p-1}{p}\,N$ bytes. No algorithm can get by with less on its busiest rank (Patarasuk and Yuan 2009).
#
# So when should NCCL use a ring? Here's what your formulas say about GPUs in one machine, and about GPUs in a network.


# %%
rows = []
for name, p in (("NVLink 4", 8), ("InfiniBand NDR", 8), ("InfiniBand NDR", 512)):
    link = links.PUBLISHED[name]
    megabytes = ring_wins_from(p, link.alpha, link.beta) / 1e6
    rows.append({"link": name, "p": p, "the ring wins from": f"{megabytes:,.2f} MB"})
viz.table(rows)

# %% [markdown]
# So much for the theory. Let's time both algorithms on four ranks of your machine, and compare the times with your own formulas.


# %%
def milliseconds(seconds):
    return f"{seconds * 1e3:.2f}"


sizes = (64, 2**16, 2**20, 2**22)
ran = launch(links.measure_all_reduces, 4, args=(sizes,))[0]
viz.table(
    [
        {
            "bytes": f"{n:,}",
            "ring, predicted": milliseconds(ring_seconds(n, 4, here.alpha, here.beta)),
            "ring, measured": milliseconds(ran["ring"][i]),
            "tree, predicted": milliseconds(tree_seconds(n, 4, here.alpha, here.beta)),
            "tree, measured": milliseconds(ran["tree"][i]),
        }
        for i, n in enumerate(sizes)
    ],
    title="milliseconds for an all-reduce on 4 ranks of this machine",
)

# %% [markdown]
# What a disappointment! On the two CPU cores where we ran this notebook, the predictions were far too optimistic, and at 1 MiB, they even chose the slower algorithm. Your formulas are correct, but they assume that every rank has its own link. Your four ranks share a few CPU cores and the same memory instead.
#
# **Predict.** Suppose all messages have to go through one shared link, one at a time. With four ranks, how many messages do all ranks together send in a ring? How many messages do they send in a tree? As you've seen, all ranks together send the same number of bytes with either algorithm. So which algorithm is faster at every message size, `"ring"` or `"tree"`?

# %% predict="1.f"
predict("1.f", messages_in_a_ring=24, messages_in_a_tree=6, faster="tree")

# %% [markdown]
# The shared link explains why the tree wins, but it doesn't explain why both algorithms are so slow. In each step of a ring, all four ranks have work to do. If you have fewer cores than ranks, some ranks have to wait for a core. On a machine with many cores, your measurements may come closer to the formulas. On a GPU cluster, the GPUs do have their own links, so the formulas are a good starting point there. Still, always measure before you trust a formula!

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
# **Read.** Which rank is missing? Which all-reduce are the other ranks stuck in? In which `step` (0, 1, or 2) did the missing rank skip its all-reduce? The report doesn't mention the step, but you can work it out from the code.
#
# Now for the scary part. The missing rank did join `all_reduce #2`. The other ranks were in `step == 1` at that point. In which `step` was the missing rank?

# %% predict="1.g"
predict(
    "1.g",
    missing_rank=2,
    number_of_the_all_reduce=3,
    skipped_step=1,
    step_of_missing_rank=2,
)

# %% [markdown]
# Collectives are matched by order, not by meaning. That's why the sum for step 1 contains a gradient from step 2. Suppose each of the other ranks had skipped one step, too, say step 0. Then all the ranks would have called two all-reduces, the program would have finished without an error, and you'd have trained on the wrong gradients. We were lucky that this program got stuck, because otherwise we might never have noticed the bug.
#
# ## Fix it
#
# This bug has shipped in real code. In torchaudio's HuBERT example, a rank returned early from the training step when its loss was infinite or NaN. The other ranks kept waiting for that rank until NCCL gave up half an hour later (pytorch/audio, issue 3749).

# %% [markdown] task="1.5" title="Fix a careful training step" difficulty=3 minutes=5
# Fix the training step. If *any* rank's gradient isn't finite, *no* rank should change its weight. Otherwise, every rank subtracts `lr` times the sum of all ranks' gradients from its weight. All ranks have to make the same decision. Keep the communication cheap: besides its gradient, each rank may contribute only a single number.


# %% exercise="1.5"
def careful_step(weight: torch.Tensor, gradient: torch.Tensor, lr: float) -> bool:
    """Update `weight` [..] in place with the sum of the ranks' `gradient` [..].

    Return whether the step was taken. You may overwrite `gradient`.
    """
    ### BEGIN SOLUTION
    # 1 on a rank that would like to skip
    skips = (~gradient.isfinite().all()).to(torch.float32)  # []
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
# 1. A rank that finds a problem can't skip the step on its own. What do the other ranks need to know before they can continue? Which collective gives every rank information from all the other ranks?
# 2. Turn "my gradient isn't finite" into a number, and all-reduce that number. If the sum is greater than 0, at least one rank has a problem, and now every rank knows about it.
# 3. On every rank, compute `skips = (~gradient.isfinite().all()).float()`, call `dist.all_reduce(skips)`, and return `False` if `skips > 0`. After that, the all-reduce of the gradient is safe.

# %% check="1.5"
check("1.5", careful_step)

# %% [markdown]
# Come back to the table below when one of your programs hangs or returns wrong sums.

# %%
symptoms(1)

# %% [markdown]
# ## In the wild
#
# <details><summary>Going deeper: what NCCL adds, bus bandwidth, and tools for deadlocks</summary>
#
# In our picture of **published links**, the bandwidths are what the vendors specify for one direction, and the latencies are what NCCL assumes for a single message in a ring.
#
# **NCCL** splits a message into many small slices, so that step 2 of one slice overlaps with step 1 of the next. Its tree algorithm actually uses *two* trees, arranged so that a leaf of one tree isn't a leaf of the other. Together, the two trees make each rank send about as many bytes as in a ring, but the number of steps grows only with $\log_2 p$. To choose between the ring and the tree, NCCL uses the same formula you did, $\alpha + \beta n$, with a table of latencies and bandwidths (`src/graph/tuning.cc`). You can force NCCL to use a ring with `NCCL_ALGO=Ring`. If you set `NCCL_DEBUG=INFO`, NCCL prints the rings it has built.
#
# The standard benchmark, **nccl-tests**, prints two bandwidths for an all-reduce. The *algorithm bandwidth* is $N/t$, and the *bus bandwidth* is that number multiplied by $2(p-1)/p$. The bus bandwidth counts the bytes that each rank actually sends, so you can compare it with the speed of the link, no matter how large $p$ is. For a reduce-scatter or an all-gather, the factor is $(p-1)/p$.
#
# **torch.distributed** also has forms that take one large tensor instead of a list, `all_gather_into_tensor` and `reduce_scatter_tensor`. (From torch 2.13 on, they're called `all_gather_single` and `reduce_scatter_single`.) If you pass `async_op=True`, a collective returns a request right away, just as `isend` does.
#
# If you set `TORCH_DISTRIBUTED_DEBUG=DETAIL`, PyTorch compares the shapes before each collective, as tplab does. PyTorch's "flight recorder" keeps a list of each rank's most recent NCCL collectives and writes that list to a file after a timeout.
#
# </details>
#
# ## Your library so far
#
# Your library now has an all-reduce made of nothing but sends and receives. If you've solved the optional exercise, your library can also predict how long an all-reduce takes.

# %%
from tplab.course import library

library(1)

# %% [markdown]
# Now you know what communication costs. So what should the ranks of a parallel model send each other? You can split a matmul by columns or by rows, and the two splits require very different communication. Which split would you choose? [Chapter 02](02_splitting_matrices.ipynb) starts with this question.
