"""Right answers that aren't the reference answer: a check has refused them before, or the text says that they pass."""

from dataclasses import dataclass

from tests.wrong_answers import chapter_of, swap_all
from tplab.course.notebooks.rewrite import keep_solution


@dataclass(frozen=True)
class RightAnswer:
    """A right program for an exercise.

    source: what the learner wrote in the exercise's cell, in place of the solution
    seed:   the seed of the check's inputs, for an answer that was refused for certain inputs only
    """

    exercise: str
    name: str
    source: str
    seed: int = 1


def changed(exercise: str, *pairs: tuple[str, str]) -> str:
    """The reference answer with each (old, new) swapped."""
    return swap_all(keep_solution(chapter_of(exercise).of_role("exercise")[exercise].text) + "\n", *pairs)


LOGSUMEXP = """
class LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, group):
        m = z.amax(-1)
        dist.all_reduce(m, op=dist.ReduceOp.MAX, group=group)
        total = torch.exp(z - m[..., None]).sum(dim=-1)
        dist.all_reduce(total, group=group)
        ctx.save_for_backward(z, total.log() + m)
        return total.log() + m

    @staticmethod
    def backward(ctx, dlse):
        z, lse = ctx.saved_tensors
        return torch.exp(z - lse[..., None]) * dlse[..., None], None


def vocab_logsumexp(logits, group=None):
    return LogSumExp.apply(logits, group)
"""
PAIRS = """
def vocab_logsumexp(logits, group=None):
    own = logits.detach().amax(-1).clamp(min=torch.finfo(logits.dtype).min)
    part = (logits - own.unsqueeze(-1)).exp().sum(-1)
    maxima, parts = gather_from_region(torch.stack([own, part]).unsqueeze(-1), group)  # [.., p] each
    m = maxima.detach().amax(-1)
    return m + (parts * (maxima.detach() - m.unsqueeze(-1)).exp()).sum(-1).log()
"""
TWO_SUMS = """
class VocabParallelCrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits, target, group):
        m = logits.amax(-1)
        dist.all_reduce(m, op=dist.ReduceOp.MAX, group=group)
        exp = (logits - m.unsqueeze(-1)).exp()
        mine, column = mine_and_column(target, logits.shape[-1], dist.get_rank(group))
        sums = torch.stack([exp.sum(-1), logits.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0)])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exp / sums[0].unsqueeze(-1), mine, column)
        return m + sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx, dloss):
        softmax, mine, column = ctx.saved_tensors
        dlogits = softmax.scatter_add(-1, column.unsqueeze(-1), -mine.to(softmax.dtype).unsqueeze(-1))
        return dlogits * dloss.unsqueeze(-1), None, None
"""
AHEAD = """
@torch.no_grad()
def average_loss(model, batches):
    losses, waiting = [], []
    for batch in batches:
        losses += [model(*earlier).item() for earlier in waiting]
        waiting = [batch]
    losses += [model(*earlier).item() for earlier in waiting]
    return sum(losses) / len(losses)
"""
SUM_IN_FLOAT32 = """
def average_loss(model, batches):
    total, count = torch.zeros(()), 0
    with torch.no_grad():
        for ids, targets in batches:
            total += model(ids, targets)
            count += 1
    return (total / count).item()
"""
FUNCTIONAL_NORM = ("self.norm(x)", "F.layer_norm(x, self.norm.normalized_shape, self.norm.weight, self.norm.bias, self.norm.eps)")  # fmt: skip

IN_FLOAT32 = "logits = logits.float() if logits.dtype == torch.bfloat16 else logits\n"  # as Megatron computes the loss
KEYS_AND_VALUES = (  # the second way to fix 6.5
    (
        "        x = copy_to_region(x, self.group)  # backward: adds up dx, through the queries and through the copies\n",
        "",
    ),
    ("F.linear(x, self.q.weight)", "F.linear(copy_to_region(x, self.group), self.q.weight)"),
    ("copy_to_region(self.kv.weight, self.group)", "self.kv.weight"),
    ("F.linear(x, kv_weight)", "copy_to_region(F.linear(x, kv_weight), self.group)"),
)
ONE_F_FOR_TWO_TEXTS = (
    ("q = split_heads(self.q(x), self.head_dim)", "both = copy_to_region(torch.cat([x, memory], 1), self.q.group)\n        x, memory = both.split([x.shape[1], memory.shape[1]], 1)\n        q = split_heads(F.linear(x, self.q.weight, self.q.bias), self.head_dim)"),
    ("self.kv(memory)", "F.linear(memory, self.kv.weight, self.kv.bias)"),
)  # fmt: skip

GATHERED_CANDIDATES = (
    "    largest_of_all = largest.clone()\n",
    "    from tplab.tensor.operators import all_gather\n"
    "    values, tokens = (torch.stack(all_gather(each, group)) for each in (largest, start + index))  # [p, b] each\n"
    "    return tokens.gather(0, values.argmax(0)[None])[0]\n",
)

AGAIN_IN_B = """
def forward_stage(stage, message):
    with torch.no_grad():
        return stage(message), (stage, message.clone())


def backward_stage(kept, gradient):
    stage, x = kept
    x.requires_grad_(x.is_floating_point())
    stage(x).backward(gradient)
    return x.grad
"""

ALL_BY_ITSELF = """
def run_stage(stage, actions, channels, template, loss, inputs=None, targets=None):
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

RIGHT = [
    RightAnswer("2.2", "an all-reduce from its two halves", changed("2.2", ("        dist.all_reduce(z)\n        return z\n", "        chunks = [chunk.contiguous() for chunk in z.chunk(dist.get_world_size(), -1)]\n        mine = torch.empty_like(chunks[0])\n        dist.reduce_scatter(mine, chunks)\n        dist.all_gather(chunks, mine)\n        return torch.cat(chunks, -1)\n"))),
    RightAnswer("3.3", "adds up bfloat16 in float32", changed("3.3", ("        dist.all_reduce(y)\n", "        y = y.float() if y.dtype == torch.bfloat16 else y\n        dist.all_reduce(y)\n"), ("        return y\n", "        return y.to(x.dtype)\n"))),
    RightAnswer("3.3", "returns its input on a single rank", changed("3.3", *((f"        {line}", f"        if dist.get_world_size() == 1:\n            return x\n        {line}") for line in ("y = x.clone(", "return shard(x, -1", "return ScatterToRegion.backward(ctx, x)")))),
    RightAnswer("4.2", "dist.all_reduce in place of g", changed("4.2", ("out = reduce_from_region(out, self.group)", "dist.all_reduce(out, group=self.group)"))),
    RightAnswer("4.4", "the master weight is a parameter", changed("4.4", ("master = torch.empty(full_shape, dtype=param.dtype, device=param.device)  # [o, i], the same on every rank", "master = nn.Parameter(torch.empty(full_shape, dtype=param.dtype, device=param.device))"))),
    RightAnswer("8.1", "a float32 result for bfloat16", changed("8.1", ("    m = logits", f"    {IN_FLOAT32}    m = logits"))),
    RightAnswer("8.2", "a float32 loss for bfloat16", changed("8.2", ("        lse = vocab_logsumexp", f"        {IN_FLOAT32}        lse = vocab_logsumexp"))),
    RightAnswer("8.3", "a float32 loss for bfloat16", changed("8.3", ("    counted = target", f"    {IN_FLOAT32}    counted = target"))),
    RightAnswer("6.3", "the most negative number, and zeros in the end", changed("6.3", ("-torch.inf", "torch.finfo(q.dtype).min"))),
    RightAnswer("6.4", "one f for both texts side by side", changed("6.4", *ONE_F_FOR_TWO_TEXTS)),
    RightAnswer("6.5", "adds up the gradients of keys and values", changed("6.5", *KEYS_AND_VALUES)),
    RightAnswer("6.5", "adds up the gradients of the keys' weight and of the values' weight one by one", changed("6.5", ("copy_to_region(self.kv.weight, self.group)", "torch.cat([copy_to_region(each, self.group) for each in self.kv.weight.chunk(2)])"))),
    RightAnswer("7.1", "gathers nothing, and slices the one-hot vectors itself", changed("7.1", ("scatter_to_region(one_hot)", "copy_to_region(one_hot).split(len(e), -1)[dist.get_rank()]"))),
    RightAnswer("7.2", "the last row for foreign ids, and zeros by torch.where", changed("7.2", ("(ids - start).masked_fill(foreign, 0)", "(ids - start).masked_fill(foreign, len(weight) - 1)"), ("vectors.masked_fill(foreign.unsqueeze(-1), 0)", "torch.where(foreign[..., None], vectors.new_zeros(()), vectors)"))),
    RightAnswer("7.3", "names the last wrong id", changed("7.3", ("wrong.nonzero()[0]", "wrong.nonzero()[-1]"))),
    RightAnswer("7.4", "adds -inf to the logits of padding", changed("7.4", ("logits = logits.masked_fill(padding, -torch.inf)", "logits = logits + torch.zeros(len(weight), dtype=x.dtype, device=x.device).masked_fill(padding, -torch.inf)"))),
    RightAnswer("8.1", "backward by the softmax, which rounds as torch.logsumexp's does", LOGSUMEXP),
    RightAnswer("8.1", "gathers pairs of a maximum and a sum", PAIRS),
    RightAnswer("8.1", "adds up the terms in place, outside of autograd, which happens to be right", changed("8.1", ("    return m + reduce_from_region(part, group).log()", "    dist.all_reduce(part, group=group)\n    return m + part.log()"))),
    RightAnswer("8.1", "a maximum in float32", changed("8.1", ("    m = logits.detach().amax(-1)", "    m = logits.detach().float().amax(-1)"), ("(logits - m.", "(logits - m.to(logits.dtype)."), ("return m +", "return m.to(logits.dtype) +"))),
    RightAnswer("8.2", "sends both sums in one message, and saves the softmax", TWO_SUMS),
    RightAnswer("10.1", "a tuple", changed("10.1", ('["norm", "f", "block", "g", "bias", "dropout", "add"]', '("norm", "f", "block", "g", "bias", "dropout", "add")'))),
    RightAnswer("10.2", "torch promotes the bias", changed("10.2", ("bias.to(residual.dtype)", "bias"))),
    RightAnswer("10.5", "gathers a candidate from each rank", changed("10.5", GATHERED_CANDIDATES)),
    RightAnswer("11.1", "dA before dB", changed("11.1", ('["dZ", "dX", "start", "dB", "dA", "wait"]', '("dZ", "dX", "start", "dA", "dB", "wait")'))),
    RightAnswer("11.2", "a gradient of the weight that autograd adds up", changed("11.2", ("dw = dy.flatten(0, -2).T @ x.flatten(0, -2)", "dw = dy[..., None] * x[..., None, :] if dy.dim() < 3 else dy.transpose(-2, -1) @ x"))),
    RightAnswer("11.4", "the next whole number", "import math\n\n\n" + changed("11.4", ("return 2 / 9 * (p - 1) * rate / bandwidth * efficiency / (1 - efficiency)", "return math.ceil(2 / 9 * (p - 1) * rate / bandwidth * efficiency / (1 - efficiency))"))),
    RightAnswer("11.5", "divides before it sends", changed("11.5", ("    requests = [", "    for buffer in buffers:\n        buffer.div_(p)\n    requests = ["), ("        request.wait()\n        buffer.div_(p)", "        request.wait()"))),
    RightAnswer("11.5", "all buffers in one message", changed("11.5", ("    requests = [dist.all_reduce(buffer, group=group, async_op=True) for buffer in buffers]\n    for request, buffer in zip(requests, buffers, strict=True):\n        request.wait()\n        buffer.div_(p)", "    if buffers:\n        flat = torch.cat([buffer.flatten() for buffer in buffers])\n        dist.all_reduce(flat, group=group)\n        for buffer, mean in zip(buffers, flat.div_(p).split([buffer.numel() for buffer in buffers])):\n            buffer.copy_(mean.view_as(buffer))"))),
    RightAnswer("12.1", "applies the norm's weights itself", changed("12.1", FUNCTIONAL_NORM)),
    RightAnswer("12.1", "a p-th of the bias on each rank, before the sum", changed("12.1", ("self.inner(y, rng)", "self.inner(y, rng) + self.bias / dist.get_world_size(self.group)"), ("        y = y + self.bias\n", ""))),
    RightAnswer("12.2", "a reduce-scatter of one tensor, with the tokens first", changed("12.2", ("        parts = [part.contiguous() for part in x.chunk(dist.get_world_size(), dim=1)]  # p times [b, s/p, ..]\n        total = torch.empty_like(parts[0])\n        dist.reduce_scatter(total, parts)\n        return total", "        x = x.transpose(0, 1).contiguous()\n        total = x.new_empty(len(x) // dist.get_world_size(), *x.shape[1:])\n        dist.reduce_scatter_tensor(total, x)\n        return total.transpose(0, 1).contiguous()"))),
    RightAnswer("12.3", "a list of names", changed("12.3", ('{"norm.weight"', '["norm.weight"'), ('"bias"}', '"bias"]'))),
    RightAnswer("12.4", "multiplies each part by itself, as nanotron does now", changed("12.4", ("dx = dy @ weight ", "dx = torch.cat([part @ weight for part in dy.chunk(dist.get_world_size(), 1)], 1) "))),
    RightAnswer("1.1", "returns a tuple, which the text allows", changed("1.1", ("    return chunks", "    return tuple(chunks)"))),
    RightAnswer("1.1", "calls an operator by its name in torch.ops", "aten = torch.ops.aten\n\n\n" + changed("1.1", ("def ", "overloads = torch.ops\n\n\ndef "), ("torch.empty_like(x)", "overloads.aten.empty_like.default(aten.detach(x))"))),
    RightAnswer("8.1", "a maximum with the memory layout of the logits", changed("8.1", ("logits.detach().amax(-1)", "torch.maximum(logits.detach()[..., 0] + 0, logits.detach().amax(-1))"))),
    RightAnswer("6.6", "memory that holds NaN until something is written", changed("6.6", ("torch.zeros(shape,", "torch.full(shape, torch.nan,"), ("torch.zeros_like(self.keys)", "self.keys.clone()"))),
    RightAnswer("0.3", "reads one batch ahead", AHEAD),
    RightAnswer("0.3", "sums in a float32 tensor", SUM_IN_FLOAT32),
    RightAnswer("14.1", "divides the flat tensor after the wait", changed("14.1", ("parts = flat.split", "flat /= total.item()\n            parts = flat.split"), ("part.view_as(param) / total.item()", "part.view_as(param)"))),
    RightAnswer("14.2", "torch's own parameters_to_vector", changed("14.2", ("torch.cat([tensor.flatten() for tensor in tensors])", "nn.utils.parameters_to_vector(tensors)"))),
    RightAnswer("14.2", "one element too much padding", changed("14.2", ("math.ceil(sum(param.numel() for param in self.parameters) / p)", "sum(param.numel() for param in self.parameters) // p + 1"))),
    RightAnswer("14.2", "a single tensor instead of a list", changed("14.2", ("dist.reduce_scatter(self.shard.grad, list(gradients.split(self.length)), group", "dist.reduce_scatter_tensor(self.shard.grad, gradients, group"))),
    RightAnswer("14.3", "a list, and the walls of all machines", changed("14.3", ("return min(permutations((\"tp\", \"pp\", \"dp\")), key=through_walls)", "return list(min(permutations(sizes), key=through_walls))"), ("(len(machines) - 1)", "len(machines)"))),
    RightAnswer("14.4", "the last ranks count", changed("14.4", ("dist.get_rank(pp_group) == 0", "dist.get_rank(pp_group) == dist.get_world_size(pp_group) - 1"), ("dist.get_rank(tp_group) == 0", "dist.get_rank(tp_group) == dist.get_world_size(tp_group) - 1"))),
    RightAnswer("13.1", "from the last micro-batch to the first", changed("13.1", ("return lists", "return [[Action(a.kind, m - 1 - a.micro_batch) for a in row] for row in lists]"))),
    RightAnswer("13.2", "runs the stage again in B", AGAIN_IN_B),
    RightAnswer("13.3", "doesn't use the answer to 13.2", ALL_BY_ITSELF),
    RightAnswer("13.4", "waits by itself, and for the backend's request only once", changed("13.4", ("        self.wait()  # until then, the buffer belongs to the previous message\n", "        if self.work:\n            self.work.wait()\n            self.work = None\n"))),
    RightAnswer("15.2", "an order that happens to be that of the text", "import random\n\n\n" + changed("15.2", ("generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)", "generator = random.Random(99_991 * seed + epoch)"), ("torch.randperm(windows, generator=generator).tolist()", "generator.sample(range(windows), windows)")), 110),
    RightAnswer("15.1", "removes its folder if write fails", changed("15.1", ("    write(unfinished)\n", "    try:\n        write(unfinished)\n    except BaseException:\n        if dist.get_rank(group) == 0:\n            shutil.rmtree(unfinished)\n        raise\n"))),
    RightAnswer("15.2", "every replica takes every n-th window of the batch", changed("15.2", ("range(first, first + each)", "range(done * batch_size + replica, (done + 1) * batch_size, replicas)"))),
    RightAnswer("15.3", "adds up the losses in float32", changed("15.3", ("dtype=torch.float64, device=device()", "device=device()"))),
    RightAnswer("15.2", "a hash of two numbers, which is the same in each process", changed("15.2", ("manual_seed(1_000_003 * seed + epoch)", "manual_seed(abs(hash((seed, epoch))))"))),
]  # fmt: skip
