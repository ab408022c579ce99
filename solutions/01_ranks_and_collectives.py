# %% [markdown]
# # 01 · Ranks and collectives
#
# **The question.** Several processes, each with memory of its own, each hold a tensor. How do they add them up, so that every one of them
# has the sum, and how much has to be sent for it?
#
# Everything in this course ends in that question. By the end of the chapter you have written the classic answer, the
# *ring all-reduce*, from nothing but "send" and "receive"; you have counted its bytes; and you can read the report of a program in
# which processes wait for each other for ever, which is the way most first distributed programs end.
#
# You need PyTorch. You need not have written distributed code. About 90 minutes.

# %% tags=["setup"]
import torch
import torch.distributed as dist

from tplab import collectives, device, launch, viz
from tplab.collectives import links
from tplab.course import check, predict, show_failure, symptoms

# %% [markdown]
# This is half of what you will build, drawn from a run on four processes just now. Each starts with four numbers. In three steps, in which everybody only
# talks to a neighbour, each ends up with one number that is complete: a sum with a term of every process. By the end of the chapter every arrow will be
# a line of your own.


# %%
def goes_round():
    mine = torch.arange(1, 5, device=device()) * 10 ** dist.get_rank()  # [4]: process 2 has 100, 200, 300, 400
    return [(part, total.clone()) for part, total in collectives.reduce_scatter_steps(mine)]


viz.ring(launch(goes_round, 4), title="a ring reduce-scatter")

# %% [markdown]
# ## 1 · Ranks
#
# Distributed training runs the *same* program in several processes, usually one for each GPU. The processes are numbered from 0. The number is the
# **rank** of the process, and people say "rank 2" for the process itself. How many there are is the **world size**; the course writes `p` for it.
#
# `launch(fn, p)` does the following, every time you call it:
#
# 1. It starts `p` fresh processes on this machine. They are real processes, as on a cluster.
# 2. It sends them `fn`, its arguments, and the variables of the notebook that `fn` uses. These are *copies*.
# 3. It connects them, so that they can send each other tensors, and runs `fn` on each.
# 4. It shows what they print, with the rank in front, and brings back what they return, in rank order.
# 5. It ends them. Nothing that they changed survives.
#
# Inside `fn`, a process asks for its own number with `dist.get_rank()` and for `p` with `dist.get_world_size()`. This is how the same program does
# something else on each rank.


# %%
def hello():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print(f"I am rank {rank} of {world_size}")
    return 10**rank


list(launch(hello, 4))

# %% [markdown]
# The first launch also said what the processes talk through, the **backend**: NCCL, NVIDIA's library, where there is a GPU for each rank; otherwise gloo, on the
# CPU, over the loopback network of this machine. Nothing in your code depends on which, with one exception: a tensor must be on the rank's own
# device before it is sent. `device()` names that device, the CPU or the rank's GPU.
#
# For a quick look there is a short form. A cell that starts with `%%ranks 4` runs on 4 ranks, with `rank`, `world_size` and `dist` given; the value of its last line is shown for each:

# %%
# %%ranks 4
torch.tensor([10**rank])  # on every rank another number

# %% [markdown]
# **Predict.** The notebook has a variable `counter = 0`. Each of 4 ranks adds 1 to it and returns it. What does the sum of the four returned
# numbers come to? And what is `counter` in the notebook afterwards? Replace the dots and run the cell.

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
# No rank sees another's memory, nor the notebook's. If a number has to get from one rank to another, somebody has to send it.
#
# ## 2 · Collectives
#
# Most of what ranks send each other falls into a few patterns. A **collective** is one call that *every* rank of a group makes, in the same order as the others, with
# tensors of the same shape. It returns when this rank's part is done; a rank that is early waits. The group is a **process group**. Without
# further ado it is the group of all ranks; `dist.new_group([0, 2])` makes a smaller one. Calls take it as `group=`.
#
# To see who gave what, rank $r$ holds the numbers $1, 2, \dots, p$ times $10^r$. So every *digit* of a result tells which rank it comes from, and the pictures
# colour it so.


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
# **All-reduce**: every rank has the sum. (A reduction may also be `dist.ReduceOp.MAX`, `MIN`, `PRODUCT`, ...; the sum is the default.) It is the workhorse: gradients of
# replicas are added so, and the terms of a product that was split over ranks.
#
# **All-gather**: every rank has everybody's tensor. `parts` is a list of `p` tensors of the right shape, which is filled in rank order.


# %%
def all_gather():
    x = my_numbers()[:1]  # [1]
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]  # p of [1]
    dist.all_gather(parts, x)
    return x, parts


viz.collective(launch(all_gather, 4), name="all_gather")

# %% [markdown]
# Two more, and you say first what they do. In a **reduce-scatter** every rank holds `p` parts. The parts are added up over the ranks, as in an all-reduce; but rank $r$ gets only part
# $r$ of the sum. In an **all-to-all** every rank also holds `p` parts; part $j$ of rank $i$ goes to rank $j$, where it becomes part $i$. Nothing is added.
#
# **Predict.** Four ranks with the numbers above. Which number does rank 2 hold after the reduce-scatter? And which is the *last* number that rank 1 holds after the all-to-all?

# %% predict="1.b"
predict("1.b", reduce_scatter_on_rank_2=3333, last_of_all_to_all_on_rank_1=2000)


# %%
def reduce_scatter():
    x = my_numbers()  # [p]
    mine = torch.empty_like(x[:1])  # [1]
    dist.reduce_scatter(mine, list(x.chunk(len(x))))
    return x, mine


viz.collective(launch(reduce_scatter, 4), name="reduce_scatter")


# %%
def all_to_all():
    x = my_numbers()  # [p]
    received = torch.empty_like(x)  # [p]
    dist.all_to_all_single(received, x)
    return x, received


viz.collective(launch(all_to_all, 4), name="all_to_all")

# %% [markdown]
# The other four have a **root**, one rank that gives or that gets. `broadcast`: the root's tensor goes to all. `scatter`: each rank gets one part of the root's. `gather`: the root
# gets everybody's part. `reduce`: the root gets the sum. (After a `reduce`, what is in the tensor of the *other* ranks is not specified; don't use it.)


# %%
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
# Turn the knobs. Each move starts fresh ranks and draws what they held before and after; the root is rank 1. Find pairs: which collective undoes `scatter`? Which two, one after the
# other, give the same as `all_reduce`?


# %% tags=["explore"]
def show(kind, p):
    return viz.collective(launch(kinds[kind], p), name=kind)


viz.explore(show, kind=list(kinds), p=(4, 3, 2))

# %% [markdown]
# You may have found it: a reduce-scatter and then an all-gather make an all-reduce. Keep that.
#
# `launch` writes down every collective that each rank enters. This **record** is how the course counts what was sent.

# %%
results = launch(all_gather, 4)
results.record

# %% [markdown]
# The bytes are those of the **message**, as NVIDIA's benchmark `nccl-tests` counts it: the tensor for an all-reduce, broadcast, reduce, send or receive; all parts together for the
# others. Here that is four parts of one 8-byte number. How many bytes each rank puts on the wire for it depends on the algorithm, and that is what you
# are about to write.
#
# ## 3 · Send and receive
#
# Below the collectives lie two calls that only two ranks make. `dist.send(x, dst)` sends a tensor to rank `dst`, and `dist.recv(x, src)` fills `x` with what rank `src` sends. The shapes
# must agree, and the number of sends and receives must too. `recv` comes back when the numbers are there. `send` comes back when `x` may be changed again, and that can take until the
# receiver has come.
#
# ### Break it: three programs that stand still
#
# It takes only two processes to wait for ever, and everybody who starts gets there. So look at it now. Outside this course such a program just hangs, silently, until somebody kills
# it. Here the runtime notices and says who waits where. Reading that report is the exercise: run each cell, read, then answer.
#
# **First.** Two ranks exchange a tensor.


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
# **Read.** In which line of the cell does rank 0 wait (line 1 is the line with `def`)? Which rank would have to send something, so that rank 0 can go on? How many sends did the two ranks get to, together?

# %% predict="1.c"
predict("1.c", line_of_rank_0=6, rank_that_should_send=1, sends_entered=0)

# %% [markdown]
# **Second.** Three steps of training. Every rank all-reduces its gradient in every step, but one author was careful: a step whose gradient is not a finite number is skipped.


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
# **Read.** Which rank is the odd one out? Which number has the all-reduce that the others wait in? That is the one that the rank never joined. But in which `step` (0, 1 or 2) did it skip one? The report doesn't say, the code does.
#
# And the worst of it: rank 2 did enter a second all-reduce. With the gradient of which of *its own* steps did it take part in the others' second one, that of step 1?

# %% predict="1.d"
predict("1.d", odd_rank=2, number_of_the_all_reduce=3, skipped_step=1, paired_with_its_step=2)

# %% [markdown]
# So the deadlock is the lucky case. Collectives are matched by their *order*, not by their meaning: the sum of step 1 silently has a gradient of step 2 in it, and had
# every other rank skipped a step too, whichever, nobody would have noticed. The remedy: all ranks decide together, with an all-reduce of the flag "is finite".
#
# **Third.** Ten examples for four ranks. The second collective collects the predictions.


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
# **Read.** Which number has the collective that is not the same everywhere? On which rank, and how many elements did that rank bring?

# %% predict="1.e"
predict("1.e", number_of_the_collective=2, rank=3, elements=1)

# %% [markdown]
# What you see, and what it is (the later rows are mistakes that you may meet in the exercises below):

# %%
symptoms(1)

# %% [markdown]
# ### Both at once
#
# What is the right way to exchange two tensors? One rank could send first and the other receive first. In a circle of many ranks that gets awkward, and slow: while some send, others
# idle. It is better to *start* both and then wait for both. `dist.isend` and `dist.irecv` start a message and return a request at once (the i is for "immediate"); `wait()` on the
# request comes back when it is done. Until then, don't touch either tensor. `dist.batch_isend_irecv` starts a whole list of them:


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
# Why the batch? On gloo, `isend` and `irecv` one after the other would do. NCCL puts what goes between two GPUs into one queue, in the order of the calls: with two ranks, each would first
# send, and wait for the other to receive. A batch is handed over as one piece.

# %% [markdown] task="1.1" title="Scatter and gather by send and receive" difficulty=2 minutes=12
# Two collectives with a root, from `dist.send` and `dist.recv`. The root sends one message to each other rank, or gets one from each. It sends nothing to itself, but it has a part too.
#
# The check runs your functions on 2, 3, 4 and 1 ranks with random numbers and another root each time, and counts the messages.


# %% exercise="1.1"
def scatter(out: torch.Tensor, parts: list[torch.Tensor] | None, src: int) -> torch.Tensor:
    """Fill `out` [..] with this rank's one of `parts`, and return it.

    parts: on rank `src` a list of p tensors [..], in rank order; None on all other ranks.
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
    """On rank `dst`: the list of every rank's x [..], in rank order, its own included. On all other ranks: None."""
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
# 1. Two kinds of rank, so an `if`: what does the root do, what do all others do? For every send there must be one receive on the other side.
# 2. In `scatter` the root walks over all other ranks and sends `parts[other]`; every other rank receives once, into `out`. The root copies its own part into `out`; `out = parts[src]` would
#    only give the part another name. In `gather` the root needs `p` tensors to receive into.
# 3. `if rank != src: dist.recv(out, src); return out`. Then a loop with `dist.send(parts[other], other)` for every `other != src`, and `return out.copy_(parts[src])`. `gather` is the mirror
#    image, with `parts = [torch.empty_like(x) for _ in range(world_size)]` on the root.

# %% check="1.1"
check("1.1", scatter, gather)

# %% [markdown]
# ## 4 · The ring
#
# With these two you could write an all-reduce: gather everything on rank 0, add, send the sum to all. For a tensor of $N$ bytes rank 0 then receives $(p-1)N$ bytes and sends as many, one after another
# through its one wire, while all other wires are idle. The more ranks, the longer it takes.
#
# The ring keeps every wire busy. Put the ranks in a circle, and cut the tensor into `p` parts. Each part starts at one rank and travels to the right. Every rank it comes to adds its own
# numbers. After $p-1$ steps it has met everybody. And the `p` parts start at `p` different ranks, so in each step every rank sends one part and receives one.
#
# Look at the picture at the top of the chapter again: follow part 0. It starts at rank 1, and after three steps it arrives at rank 0, complete. This is a **reduce-scatter**: rank $r$ ends with
# part $r$ of the sum.
#
# The **all-gather** is the same journey without adding. Rank $r$ starts with part $r$. In each step everybody passes on the part that came last (bold outline):


# %%
def copies_go_round():
    mine = my_numbers()[dist.get_rank()].reshape(1)  # [1]
    return [(part, whole.clone()) for part, whole in collectives.all_gather_steps(mine)]


viz.ring(launch(copies_go_round, 4), title="a ring all-gather")

# %% [markdown]
# Try both with fewer ranks. How many steps? Which part does rank 0 send first?


# %% tags=["explore"]
def sums_go_round():
    return [(part, total.clone()) for part, total in collectives.reduce_scatter_steps(my_numbers())]


def show_ring(kind, p):
    return viz.ring(launch(sums_go_round if kind == "reduce-scatter" else copies_go_round, p), title=f"{kind}, p = {p}")


viz.explore(show_ring, kind=["reduce-scatter", "all-gather"], p=(3, 2, 4))

# %% [markdown] task="1.2" title="Reduce-scatter in a ring" difficulty=4 minutes=20
# Here the parts are the rows of `x` `[p, ..]`. Use only messages to the two neighbours, in $p-1$ steps, each of one row. The caller's `x` must stay as it is.


# %% exercise="1.2"
def ring_reduce_scatter(x: torch.Tensor) -> torch.Tensor:
    """Row `rank` of the sum of x over all ranks. x [p, ..] on every rank -> [..]."""
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    row = left  # p - 1 steps to go until it is with its owner
    total = x[row].clone()  # [..]
    for _ in range(world_size - 1):
        received = torch.empty_like(total)  # [..]
        messages = [dist.P2POp(dist.isend, total, right), dist.P2POp(dist.irecv, received, left)]
        for request in dist.batch_isend_irecv(messages):
            request.wait()
        row = (row - 1) % world_size  # what came in is the row before the one that went out
        total = received + x[row]
    return total
    ### END SOLUTION


# %% [markdown] hints="1.2"
# 1. Row $r$ must arrive at rank $r$ after $p-1$ steps to the right. So at which rank does it start? Then, seen from a rank: which row does it send first?
# 2. Rank $r$ sends row $r-1$ first (all numbers modulo $p$). Its left neighbour does the same, so what comes in is row $r-2$: add your own row $r-2$ to it, and this sum is what you send next. After
#    $p-1$ steps the row that came in is $r-2-(p-2) = r-p$, which is $r$.
# 3. Before the loop `row = (rank - 1) % world_size` and `total = x[row].clone()`. In the loop: send `total` to the right while you receive `received` from the left, with the four lines of
#    `to_the_right` above; then `row = (row - 1) % world_size` and `total = received + x[row]`.

# %% check="1.2"
check("1.2", ring_reduce_scatter)

# %% [markdown] task="1.3" title="All-gather in a ring" difficulty=3 minutes=12
# Now every rank has one part and wants all of them. Again $p-1$ steps, messages of one part, neighbours only.


# %% exercise="1.3"
def ring_all_gather(part: torch.Tensor) -> torch.Tensor:
    """The parts of all ranks, row i from rank i. part [..] on every rank -> [p, ..]."""
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


# %% [markdown] hints="1.3"
# 1. In the first step a rank can only send its own part. In every later step: which part does its right neighbour lack?
# 2. It lacks what has just come in from the left. At step $s$ (from 0) rank $r$ sends part $r-s$ and receives part $r-s-1$, modulo $p$. Each has its place in the result from the start.
# 3. `rows = [torch.empty_like(part) for _ in range(world_size)]`, `rows[rank].copy_(part)`; in step `s` send `rows[(rank - s) % world_size]` and receive into
#    `rows[(rank - s - 1) % world_size]`. At the end `torch.stack(rows)`.

# %% check="1.3"
check("1.3", ring_all_gather)

# %% [markdown] task="1.4" title="All-reduce in a ring" difficulty=2 minutes=10
# The two together. Here `x` has any shape. Its number of elements can be divided by `p`; no single dimension need be.


# %% exercise="1.4"
def ring_all_reduce(x: torch.Tensor) -> torch.Tensor:
    """The sum of x over all ranks, in a new tensor of the same shape. x [..] -> [..]."""
    ### BEGIN SOLUTION
    rows = x.reshape(dist.get_world_size(), -1)  # [p, N/p]
    return ring_all_gather(ring_reduce_scatter(rows)).reshape(x.shape)  # [N/p] -> [p, N/p] -> [..]
    ### END SOLUTION


# %% [markdown] hints="1.4"
# 1. Your reduce-scatter wants `[p, ..]` and gives `[..]`; your all-gather wants that and gives `[p, ..]` again. What remains is a matter of shapes.
# 2. `x.reshape(world_size, -1)` cuts any tensor into `p` equal rows. `reshape(x.shape)` leads back.
# 3. `ring_all_gather(ring_reduce_scatter(x.reshape(dist.get_world_size(), -1))).reshape(x.shape)`.

# %% check="1.4"
check("1.4", ring_all_reduce)

# %% [markdown]
# NCCL's ring is this algorithm (section 7 says what it adds). What you wrote is also in `tplab.collectives.by_hand`, with any group, and for sizes that `p` does not divide.
#
# ## 5 · Measure it: bytes
#
# A reduce-scatter of $N$ bytes is $p-1$ messages of $N/p$ bytes from each rank, an all-gather as many again. So for a **ring all-reduce** each rank sends
#
# $$2\,\frac{p-1}{p}\,N$$
#
# bytes. This is never more than $2N$, for however many ranks. And no algorithm built on messages between ranks can do with less on its busiest rank (Patarasuk and Yuan 2009).
#
# The other classic is the **tree**. Up: in the first step every second rank sends its tensor to the neighbour below, which adds it; in the next step every fourth, and so on, until rank 0 has
# the sum after $\lceil\log_2 p\rceil$ steps. Then down again. Every message is the whole tensor. Rank 0 has to send it $\lceil\log_2 p\rceil$ times.
#
# **Predict.** A tensor of 8 MiB, $p = 8$. How many MiB does each rank of a ring send? How many does rank 0 of a tree? In how many steps, each?

# %% predict="1.f"
predict("1.f", ring_mib=14, tree_mib=24, ring_steps=14, tree_steps=6)

# %% [markdown]
# The bytes that the ranks of each really send, counted by the record, beside the formulas. (`tplab.collectives.by_hand` has the ring that you wrote.)


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
# All together send the same, $2(p-1)N$. The ring spreads it evenly; on the tree rank 0 carries most and half of the ranks send once. But look at the steps: 14 against 6.
#
# ## 6 · Measure it: time
#
# How long does one message take? To a good approximation
#
# $$t(n) = \alpha + \beta n$$
#
# for $n$ bytes. $\alpha$ is the **latency**, which even an empty message costs; $1/\beta$ is the **bandwidth**. Here are both for two ranks on this machine: the time of messages from 4 bytes to 16 MiB (half of a round trip,
# the shortest of 40), a line fitted to them, and the same line for some links between GPUs. Those are *published* figures, not measured here: the bandwidth is the vendors', in one direction; $\alpha$ is what NCCL itself assumes for one step of a ring.

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
# Both axes are logarithmic, so a line $\alpha + \beta n$ looks like a hockey stick: flat as long as $\alpha$ dominates, then rising. The bend lies at $n = \alpha/\beta$, where both cost the same: smaller messages waste the
# link, however fast it is. Two constants are a rough model: where the circles leave the line, something else counts, such as a message that no longer fits into a cache.

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

# %% [markdown]
# From $\alpha$ and $\beta$ follows what an all-reduce costs. Count the steps, and the bytes of the message in each:
#
# | | steps | bytes in each | time |
# |---|---|---|---|
# | ring | $2(p-1)$ | $N/p$ | $2(p-1)\,(\alpha + \beta N/p)$ |
# | tree | $2\lceil\log_2 p\rceil$ | $N$ | $2\lceil\log_2 p\rceil\,(\alpha + \beta N)$ |
#
# Turn the knobs: for which messages is the tree faster, and how does that change with `p`?


# %% tags=["explore"]
def ring_and_tree(link, p):
    chosen = {"this machine": here, **links.PUBLISHED}[link]
    return viz.times(
        {"ring": lambda n: chosen.ring_all_reduce(n, p), "tree": lambda n: chosen.tree_all_reduce(n, p)},
        title=f"all-reduce of {p} ranks over {link}, by the formulas",
    )


viz.explore(ring_and_tree, link=["NVLink 4", "InfiniBand NDR", "PCIe 5.0 x16", "this machine"], p=(8, 2, 4, 64, 512))

# %% [markdown] task="1.5" title="Fit a line, and tell what it costs" difficulty=3 minutes=15
# `fit_line` gets measured points and returns $\alpha$ and $\beta$. Not by plain least squares: the largest message takes many times as long as the smallest, so an error of a few per cent in that one point would outweigh all small messages,
# from which alone $\alpha$ can be told. Minimise the sum of the squared *relative* errors,
#
# $$\sum_i \left(\frac{\alpha + \beta n_i - t_i}{t_i}\right)^2$$
#
# The other two are the table above, for any $p \ge 1$.


# %% exercise="1.5"
def fit_line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """(alpha, beta), in seconds and seconds per byte, from points (bytes, seconds)."""
    ### BEGIN SOLUTION
    n = torch.tensor([size for size, _ in points], dtype=torch.float64)
    t = torch.tensor([seconds for _, seconds in points], dtype=torch.float64)
    equations = torch.stack([1 / t, n / t], dim=1)  # [points, 2]: alpha/t + beta n/t should be 1
    alpha, beta = torch.linalg.lstsq(equations, torch.ones(len(points), 1, dtype=torch.float64)).solution.flatten()
    return alpha.item(), beta.item()
    ### END SOLUTION


def ring_seconds(n: float, world_size: int, alpha: float, beta: float) -> float:
    """Time of a ring all-reduce of n bytes."""
    ### BEGIN SOLUTION
    return 2 * (world_size - 1) * (alpha + beta * n / world_size)
    ### END SOLUTION


def tree_seconds(n: float, world_size: int, alpha: float, beta: float) -> float:
    """Time of an all-reduce of n bytes along a tree."""
    ### BEGIN SOLUTION
    levels = (world_size - 1).bit_length()  # ceil(log2 p), in whole numbers
    return 2 * levels * (alpha + beta * n)
    ### END SOLUTION


# %% [markdown] hints="1.5"
# 1. Each point says $\alpha + \beta n_i \approx t_i$. Divide by $t_i$: now the right side is 1 for every point, and the error is a relative one.
# 2. These are linear equations for two unknowns, one for each point: a matrix `[points, 2]` with the columns $1/t_i$ and $n_i/t_i$, and a right side of ones. `torch.linalg.lstsq` finds the least squares. Use float64: the numbers span many decades.
# 3. `equations = torch.stack([1 / t, n / t], dim=1)`, then `torch.linalg.lstsq(equations, torch.ones(len(points), 1, dtype=torch.float64)).solution.flatten()`. For $\lceil\log_2 p\rceil$ take
#    `math.ceil(math.log2(p))` or `(p - 1).bit_length()`.

# %% check="1.5"
check("1.5", fit_line, ring_seconds, tree_seconds)

# %% [markdown]
# The formulas assume that every rank has a wire of its own. On this machine the ranks share cores and memory, so the measured times of one all-reduce on 4 ranks (the shortest of 20) tell as much about that as about the algorithm:


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
# ## 7 · In the wild
#
# - **NCCL** has both of your algorithms and more. It cuts a message into many small pieces, so that step 2 of one piece overlaps with step 1 of the next; its tree is *two* trees at once, laid so that a rank that is a leaf in one is not in the other, and then
#   each rank sends about as much as in a ring, in $\log_2 p$ steps. Which one runs is chosen by size from a table of latencies and bandwidths (`src/graph/tuning.cc`), with the formula $\alpha + \beta n$. `NCCL_ALGO=Ring` forces one; `NCCL_DEBUG=INFO` says which rings it laid.
# - **nccl-tests**, the standard benchmark, prints two bandwidths for an all-reduce: *algorithm bandwidth* $N/t$, and *bus bandwidth*, which is that times $2(p-1)/p$. You know why: it is what each rank really sends, and so it can be compared with the speed of the
#   wire, for any $p$. For a reduce-scatter or an all-gather the factor is $(p-1)/p$.
# - **torch.distributed**: the functions you called. `dist.all_gather_into_tensor` and `dist.reduce_scatter_tensor` (from torch 2.13 on `all_gather_single` and `reduce_scatter_single`) are the forms for one large tensor instead of a list. With `async_op=True` a collective returns a request, like `isend`. `TORCH_DISTRIBUTED_DEBUG=DETAIL`
#   compares shapes before each collective, as the runtime of this course does, and NCCL's "flight recorder" dumps the last collectives of each rank after a timeout.
# - **Megatron-Core** and every other framework for large models sit on these calls: an all-reduce for each pair of split matrices (chapter 04), reduce-scatter and all-gather for sequence parallelism and sharded optimizers, send and receive between pipeline stages.
#
# The same names everywhere: what you wrote, and PyTorch's own, on the same numbers.


# %%
def beside_torch():
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64).to(device())
    mine = collectives.ring_all_reduce(x)  # [6, 5]
    dist.all_reduce(x)  # [6, 5]
    return (mine - x).abs().max().item() < 1e-12


list(launch(beside_torch, 3))

# %% [markdown]
# ## 8 · Recap
#
# - A rank is a process with memory of its own; the same program runs on all of them, and nothing is shared unless it is sent.
# - Collectives are matched by their order in each group. A rank that skips one, or brings another shape, stops everybody, or worse, doesn't.
# - All-reduce = reduce-scatter + all-gather. In a ring each takes $p-1$ steps, and each rank sends $(p-1)/p$ of the tensor: $2(p-1)/p \cdot N$ in all.
# - A message costs $\alpha + \beta n$. Small ones are all latency: then fewer steps win (tree). Large ones are all bandwidth: then fewer bytes win (ring).
# - Next: what is worth sending. Chapter 02 splits a matrix product over the ranks, in the two ways that there are.

# %% [markdown]
# ## Your library so far
#
# Your package now has an all-reduce that's made of nothing but sends and receives, and it can predict how long one takes.

# %%
from tplab.course import library

library(1)
