"""Wrong answers to the exercises of chapter 13, and what each must be told."""

from tests.wrong_answers import WrongAnswer, indented, swap, swap_all

GPIPE = """
forwards = [Action("F", k) for k in range(m)]
backwards = [Action("B", k) for k in range(m)]
return [forwards + backwards for _ in range(p)]
"""
TURNS = """
rows = []
for rank in range(p):
    warm_up = min(m, p - rank - 1)
    row = [Action("F", k) for k in range(warm_up)]
    for k in range(m - warm_up):
        row += [Action("F", warm_up + k), Action("B", k)]
    rows.append(row + [Action("B", k) for k in range(m - warm_up, m)])
return rows
"""
PEAK = """
peak = live = 0
for action in actions:
    live += 1 if action.kind == "F" else -1
    peak = max(peak, live)
return peak
"""
BUBBLE = """
p, working = len(rows), 0.0
ends = {}
done, free = [0] * p, [0.0] * p
while any(done[rank] < len(rows[rank]) for rank in range(p)):
    before = list(done)
    for rank in range(p):
        while done[rank] < len(rows[rank]):
            action = rows[rank][done[rank]]
            k, neighbour = action.micro_batch, rank - 1 if action.kind == "F" else rank + 1
            needs = [(neighbour, action.kind, k)] if 0 <= neighbour < p else []
            needs += [(rank, "F", k)] if action.kind == "B" else []
            if any(need not in ends for need in needs):
                break
            lasts = forward if action.kind == "F" else backward
            free[rank] = max([free[rank], *(ends[need] for need in needs)]) + lasts
            ends[rank, action.kind, k] = free[rank]
            working += lasts
            done[rank] += 1
    if done == before:
        raise ValueError(f"these lists never end: {done}")
return p * max(free) / working - 1
"""
STAGE = """
rank, last = channels.rank, channels.world_size - 1
m = sum(action.kind == "F" for action in actions)
kept, sent, losses = {}, [], []

def receive(sender):
    tensor = torch.empty_like(template)
    channels.receive(tensor, sender).wait()
    return tensor

for action in actions:
    k = action.micro_batch
    if action.kind == "F":
        x = inputs[k] if rank == 0 else receive(rank - 1).requires_grad_()
        y = stage(x)
        if rank == last:
            y = loss(y, targets[k]) / m
            losses.append(y.detach())
        else:
            sent.append(channels.send(y.detach(), rank + 1))
        kept[k] = x, y
    else:
        x, y = kept.pop(k)
        y.backward(None if rank == last else receive(rank + 1))
        if rank > 0:
            sent.append(channels.send(x.grad, rank - 1))
for work in sent:
    work.wait()
return sum(losses) if rank == last else None
"""


def gpipe(*pairs: tuple[str, str]) -> str:
    return f"def gpipe(p, m):\n{indented(swap_all(GPIPE, *pairs))}\n"


def turns(*pairs: tuple[str, str]) -> str:
    return f"def one_f_one_b(p, m):\n{indented(swap_all(TURNS, *pairs))}\n"


def reading(peak: str = PEAK, share: str = BUBBLE) -> str:
    head = "def bubble(rows, forward=1.0, backward=2.0):"
    return f"def peak_live(actions):\n{indented(peak)}\n\n\n{head}\n{indented(share)}\n"


def played(*pairs: tuple[str, str]) -> str:
    return reading(share=swap_all(BUBBLE, *pairs))


def stage(*pairs: tuple[str, str]) -> str:
    head = "def run_stage(stage, actions, channels, template, loss, inputs=None, targets=None):"
    return f"{head}\n{indented(swap_all(STAGE, *pairs))}\n"


LISTS = [
    ("one list for all", gpipe(("[forwards + backwards for _ in range(p)]", "forwards + backwards")), "a list of 2 lists is right"),
    ("pairs in place of actions", gpipe(('Action("F", k)', '("F", k)')), "the list of rank 0 holds ('F', 0)"),
    ("no backwards", gpipe(("forwards + backwards for", "forwards for")), "B0 is not there"),
    ("counts from 1", gpipe(("forwards = [Action(\"F\", k) for k in range(m)]", "forwards = [Action(\"F\", k) for k in range(1, m + 1)]")), "F0 is not there, F3, where micro-batches go from 0 to 2"),
    ("p and m changed over", gpipe(("for k in range(m)]\nbackwards", "for k in range(p)]\nbackwards")), "F2 is not there"),
    ("micro-batches dealt out to the ranks", "def gpipe(p, m):\n    return [[Action(kind, k) for kind in 'FB' for k in range(r, m, p)] for r in range(p)]\n", "Every rank takes every micro-batch forward once"),
    ("one forward, one backward", "def gpipe(p, m):\n    return [[Action(kind, k) for k in range(m) for kind in 'FB'] for _ in range(p)]\n", "before it has taken all m micro-batches forward"),
    ("backwards first", gpipe(("forwards + backwards for", "backwards + forwards for")), "What does an F need, and of whom"),
    ("the last micro-batch first on every other rank", "def gpipe(p, m):\n    up = list(range(m))\n    order = [up[::-1] if r % 2 else up for r in range(p)]\n    return [[Action(kind, k) for kind in 'FB' for k in order[r]] for r in range(p)]\n", "In which order does each rank get its micro-batches"),
    ("returns None", gpipe(("return [", "rows = [")), "gave None, not a list of 2 lists"),
]  # fmt: skip

IN_TURN = [
    ("GPipe again", f"def one_f_one_b(p, m):\n{indented(GPIPE)}\n", "that is GPipe"),
    ("the same warm-up on every rank", turns(("p - rank - 1)", "p - 1)")), "Every rank holds as many as the first has to"),
    ("a warm-up that grows with the rank", turns(("p - rank - 1)", "rank)")), "Which rank needs most of them"),
    ("no warm-up", turns(("min(m, p - rank - 1)", "0")), "Fewer micro-batches are live than may be"),
    ("one forward of warm-up too many", turns(("p - rank - 1)", "p - rank)")), "is that forward in your warm-up already"),
    ("one forward of warm-up too few", turns(("p - rank - 1)", "max(0, p - rank - 2))")), "Fewer micro-batches are live than may be"),
    ("twice the warm-up", turns(("min(m, p - rank - 1)", "min(m, 2 * (p - rank - 1))")), "after each action? p - r is right for rank r"),
    ("forgets that there may be few micro-batches", turns(("min(m, p - rank - 1)", "p - rank - 1")), "Here are fewer micro-batches than stages"),
    ("the last backwards are missing", turns((' + [Action("B", k) for k in range(m - warm_up, m)]', "")), "how many backwards are left"),
    ("backward and forward in turn, the newest first", turns(('Action("B", k)]\n', 'Action("B", warm_up + k)]\n')), "how many backwards are left"),
    ("goes backward first in each pair", turns(('[Action("F", warm_up + k), Action("B", k)]', '[Action("B", k), Action("F", warm_up + k)]')), "Go round the circle"),
    ("fills up and drains again", "def one_f_one_b(p, m):\n    def row(live):\n        groups = [range(k, min(k + live, m)) for k in range(0, m, live)]\n        return [Action(kind, k) for group in groups for kind in 'FB' for k in group]\n    return [row(p - rank) for rank in range(p)]\n", "Does every rank do one forward and one backward in turn"),
]  # fmt: skip

DEEP = """
p, times = len(rows), {}
places = [{(a.kind, a.micro_batch): i for i, a in enumerate(row)} for row in rows]

def end(rank, i):
    if i < 0:
        return 0.0
    if (rank, i) not in times:
        kind, k = rows[rank][i].kind, rows[rank][i].micro_batch
        needs = [(rank - 1, "F")] if kind == "F" else [(rank + 1, "B"), (rank, "F")]
        before = [end(r, places[r][what, k]) for r, what in needs if 0 <= r < p]
        times[rank, i] = max([end(rank, i - 1), *before]) + (forward if kind == "F" else backward)
    return times[rank, i]

try:
    last = max(end(rank, len(row) - 1) for rank, row in enumerate(rows))
except RecursionError:
    raise ValueError("a rank waits for something that it holds back itself") from None
return p * last / sum(forward if a.kind == "F" else backward for row in rows for a in row) - 1
"""

READ = [
    ("what is live at the end", reading(swap(PEAK, "return peak", "return live")), "so nothing is live"),
    ("counts every forward", reading("return sum(action.kind == 'F' for action in actions)"), "from its F to its B, not for ever"),
    ("stops at the first backward", reading(swap(PEAK, "    peak = max(peak, live)", "    if live < peak:\n        break\n    peak = live")), "Where do you stop to count"),
    ("one too many", reading(swap(PEAK, "return peak", "return peak + 1")), "Right: bubble, inputs unchanged"),
    ("counts every action", reading("return len(actions)"), "Go through one list by hand"),
    ("takes the actions out of the list", reading("live = peak = 0\nwhile actions:\n    live += 1 if actions.pop(0).kind == 'F' else -1\n    peak = max(peak, live)\nreturn peak"), "Which line takes actions out of them"),
    ("a loop without its last line", reading(swap_all(PEAK, ("for action in actions:\n", "i = 0\nwhile i < len(actions):\n"), ("action.kind", "actions[i].kind"))), "Does every loop of yours come to its end"),
    ("the formula", played(("return p * max(free) / working - 1", "return (p - 1) / (len(rows[0]) // 2)")), "These lists are in an order of their own"),
    ("idle over all of the time", played(("return p * max(free) / working - 1", "return 1 - working / (p * max(free))")), "Idle over what"),
    ("all of the time over the working time", played(("return p * max(free) / working - 1", "return p * max(free) / working")), "Take p = 2, m = 1 by hand"),
    ("a share for each rank", played(("return p * max(free) / working - 1", "return [p * max(free) / working - 1 for _ in rows]")), "One number is asked for, a float"),
    ("never counts an action as done", played(("            done[rank] += 1\n", "")), "Does your loop move on in each round"),
    ("the time in place of the share", played(("return p * max(free) / working - 1", "return max(free)")), "That is a time"),
    ("a backward as long as a forward", played(('forward if action.kind == "F" else backward', "forward")), "Where do you use which"),
    ("forward and backward changed over", played(('forward if action.kind == "F" else backward', 'backward if action.kind == "F" else forward')), "Where do you use which"),
    ("does not wait for neighbours", played(("needs = [(neighbour, action.kind, k)] if 0 <= neighbour < p else []", "needs = []")), "Does an action in your program start only when"),
    ("starts when the neighbour is done, though the rank is not", played(("max([free[rank], *(ends[need] for need in needs)])", "max([ends[need] for need in needs], default=free[rank])")), "Right: peak, inputs unchanged"),
    ("loops for ever where nobody can go on", played(("    if done == before:\n        raise ValueError(f\"these lists never end: {done}\")\n", "")), "does not come back"),
    ("takes a deep recursion for a circle", reading(share=DEEP), "Does your function call itself"),
    ("gives a number for lists that never end", played(('raise ValueError(f"these lists never end: {done}")', "break")), "it returned"),
]  # fmt: skip

AT_WORK = [
    ("forgets 1/m", stage((" / m\n", "\n"), ("sum(losses)", "sum(losses) / m")), "Where does 1/m belong"),
    ("divides by p in place of m", stage((" / m\n", " / channels.world_size\n")), "Exercise 13.4, p = 1"),
    ("the loss is the sum", stage(("return sum(losses)", "return m * sum(losses)")), "The loss of the batch is the mean over its m micro-batches"),
    ("every rank returns a loss", stage(("return sum(losses) if rank == last else None", "return sum(losses)")), "What do the others return"),
    ("each send is waited for at once", stage(("sent.append(channels.send(y.detach(), rank + 1))", "channels.send(y.detach(), rank + 1).wait()"), ("sent.append(channels.send(x.grad, rank - 1))", "channels.send(x.grad, rank - 1).wait()")), "when is the result of channels.send needed"),
    ("nobody waits for the sends", stage(("    work.wait()\n", "    pass\n")), "What should you do with that request"),
    ("waits for the last send alone", stage(("for work in sent:", "for work in sent[-1:]:")), "What should you do with that request"),
    ("reads what it receives too early", stage(("channels.receive(tensor, sender).wait()\n    return tensor", "early = tensor.clone()\n    sent.append(channels.receive(tensor, sender))\n    return early")), "Was the message there when you read it"),
    ("one buffer for all messages", stage(("tensor = torch.empty_like(template)", "tensor = template.detach()")), "Does every message get memory of its own"),
    ("the inputs are made to require a gradient", stage(("x = inputs[k] if rank == 0 else receive(rank - 1).requires_grad_()", "x = (inputs[k] if rank == 0 else receive(rank - 1)).requires_grad_()")), "Which line calls requires_grad_()"),
    ("does not ask for the gradient of x", stage((".requires_grad_()", "")), "your code fails on rank 1"),
    ("B of the oldest micro-batch, or of the newest", stage(("kept.pop(k)", "kept.pop(k if k in (next(iter(kept)), next(reversed(kept))) else next(iter(kept)))")), "its micro_batch says"),
    ("always GPipe's order", stage(("for action in actions:", "for action in sorted(actions, key=lambda a: (a.kind != 'F', a.micro_batch)):")), "Where does your order come from"),
    ("keeps every micro-batch", stage(("kept.pop(k)", "kept[k]")), "What still holds a micro-batch's graph"),
    ("keeps the losses with their graphs", stage(("losses.append(y.detach())", "losses.append(y)"), ("return sum(losses)", "return sum(losses).detach()")), "What still holds a micro-batch's graph"),
    ("sends its output with the graph", stage(("channels.send(y.detach(), rank + 1)", "channels.send(y, rank + 1)")), "a message that was sent with its graph"),
    ("clears the gradients on the way", stage(("    x, y = kept.pop(k)", "    x, y = kept.pop(k)\n        stage.zero_grad()")), "Only one micro-batch has left its gradient"),
    ("takes a step of SGD at the end", stage(("    work.wait()\n", "    work.wait()\nfor parameter in stage.parameters():\n    parameter.data -= 0.1 * parameter.grad\n")), "goes on using the micro-batches and the weights"),
    ("asks autograd for the gradient of x alone", stage(("x = inputs[k] if rank == 0 else receive(rank - 1).requires_grad_()", "x = (inputs[k].clone() if rank == 0 else receive(rank - 1)).requires_grad_()"), ("y.backward(None if rank == last else receive(rank + 1))", "(dx,) = torch.autograd.grad(y, x, None if rank == last else receive(rank + 1))"), ("channels.send(x.grad, rank - 1)", "channels.send(dx, rank - 1)")), "No gradient arrives at the weights of this stage"),
    ("sends the gradient of its output on", stage(("y.backward(None if rank == last else receive(rank + 1))", "dy = torch.ones_like(template) if rank == last else receive(rank + 1)\n        y.backward(None if rank == last else dy)"), ("channels.send(x.grad, rank - 1)", "channels.send(dy, rank - 1)")), "each sends on the gradient of *its input*"),
    ("hands the gradients of its weights to the next rank, too", stage(("    work.wait()\n", "    work.wait()\nif last:\n    dist.all_reduce(stage.bias.grad.clone())\n")), "other messages were sent than have to be"),
    ("takes the actions out of the list", stage(("for action in actions:\n    k", "while actions:\n    action = actions.pop(0)\n    k")), "Which line changes it"),
    ("returns None", stage(("return sum(losses) if rank == last else None", "")), "What does the last rank return"),
]  # fmt: skip

WRONG = [
    WrongAnswer(exercise, name, source, says)
    for exercise, group in (("13.1", LISTS), ("13.2", IN_TURN), ("13.3", READ), ("13.4", AT_WORK))
    for name, source, says in group
]
