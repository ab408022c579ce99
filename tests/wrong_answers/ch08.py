"""Wrong answers to the exercises of chapter 08, and what each must be told."""

from tests.wrong_answers import WrongAnswer, indented, swap


def maximum(body: str) -> str:
    return f"@torch.no_grad()\ndef vocab_max(logits, group=None):\n{indented(body)}\n"


ALL_REDUCE = "dist.all_reduce(m, op=dist.ReduceOp.MAX, group=group)\nreturn m"

MAXIMUM = [
    ("this rank's own", maximum("return logits.amax(-1)"), "Which collective makes the largest of these p numbers"),
    ("the sum of the maxima", maximum("m = logits.amax(-1)\ndist.all_reduce(m, group=group)\nreturn m"), "adds up unless told otherwise"),
    ("the smallest of the maxima", maximum("m = logits.amax(-1)\ndist.all_reduce(m, op=dist.ReduceOp.MIN, group=group)\nreturn m"), "adds up unless told otherwise"),
    ("the mean of the maxima", maximum("m = logits.amax(-1)\ndist.all_reduce(m, group=group)\nreturn m / dist.get_world_size(group)"), "adds up unless told otherwise"),
    ("rank 0's, broadcast", maximum("m = logits.amax(-1)\ndist.broadcast(m, dist.get_process_group_ranks(group)[0] if group else 0, group=group)\nreturn m"), "Which collective makes the largest of these p numbers"),
    ("what the all-reduce returns", maximum("m = logits.amax(-1)\nreturn dist.all_reduce(m, op=dist.ReduceOp.MAX, group=group)"), "dist.all_reduce returns None"),
    ("torch.max's pair", maximum("return torch.max(logits, dim=-1)"), "logits.amax(dim) returns values"),
    ("a copy is reduced, the other returned", maximum("m = logits.amax(-1)\ndist.all_reduce(m.clone(), op=dist.ReduceOp.MAX, group=group)\nreturn m"), "into which tensor does it write"),
    ("of all tokens", maximum("m = logits.max()\n" + ALL_REDUCE), "over which dimension is the maximum"),
    ("over the tokens", maximum("m = logits.amax(0)\n" + ALL_REDUCE), "expected [8]"),
    ("keeps the dimension", maximum("m = logits.amax(-1, keepdim=True)\n" + ALL_REDUCE), "over which dimension is the maximum"),
    ("squeezes every axis of length 1 away", maximum("m = logits.amax(-1, keepdim=True).squeeze()\n" + ALL_REDUCE), "removes every dimension of length 1"),
    ("of absolute values", maximum("m = logits.abs().amax(-1)\n" + ALL_REDUCE), "is -7 larger than 3"),
    ("gathers the logits", maximum("parts = [torch.empty(logits.shape, dtype=logits.dtype, device=logits.device) for _ in range(dist.get_world_size(group))]\ndist.all_gather(parts, logits.contiguous(), group=group)\nreturn torch.cat(parts, -1).amax(-1)"), "which number is then left to compare"),
    ("all-reduces the logits", maximum("z = logits.clone(memory_format=torch.contiguous_format)\ndist.all_reduce(z, op=dist.ReduceOp.MAX, group=group)\nreturn z.amax(-1)"), "which tensor did you send"),
    ("all-reduces the caller's logits", maximum("dist.all_reduce(logits, op=dist.ReduceOp.MAX, group=group)\nreturn logits.amax(-1)"), "The caller still needs"),
    ("reduces twice", maximum("m = logits.amax(-1)\ndist.all_reduce(m, op=dist.ReduceOp.MAX, group=group)\n" + ALL_REDUCE), "one number a token, once, is enough"),
    ("a buffer that the calls share", "_MAXIMA = {}\n\n\n" + maximum("key = logits.shape, logits.dtype\nm = _MAXIMA.setdefault(key, torch.empty_like(logits[..., 0]))\nm.copy_(logits.amax(-1))\n" + ALL_REDUCE), "or do several calls share one"),
    ("lifts -inf to the smallest finite number", maximum("m = logits.amax(-1).clamp(min=torch.finfo(logits.dtype).min)\n" + ALL_REDUCE), "Which of your lines replaces -inf with a finite number"),
    ("clips at zero", maximum("m = logits.amax(-1).clamp(min=0)\n" + ALL_REDUCE), "Which one should both return"),
    ("only rank 0 gets it", maximum("m = logits.amax(-1)\ndist.reduce(m, 0 if group is None else dist.get_process_group_ranks(group)[0], op=dist.ReduceOp.MAX, group=group)\nreturn m"), "Only rank 0 has the right numbers"),
    ("group is ignored", maximum("m = logits.amax(-1)\ndist.all_reduce(m, op=dist.ReduceOp.MAX)\nreturn m"), "was not given `group`"),
    ("zeros", maximum("return torch.zeros(logits.shape[:-1], dtype=logits.dtype)"), "rank 0 all zeros"),
    ("never waits", maximum("m = logits.amax(-1)\ndist.all_reduce(m, op=dist.ReduceOp.MAX, group=group, async_op=True)\nreturn m.clone()"), "never waited"),
    ("rounds to float32", maximum("m = logits.amax(-1).float()\n" + ALL_REDUCE), "dtype float32, expected float64"),
]  # fmt: skip


def lse(body: str) -> str:
    return f"def vocab_logsumexp(logits, group=None):\n{indented(body)}\n"


M = "m = vocab_max(logits, group)\n"
OWN_M = "m = logits.detach().amax(-1)\n"
PART = "part = (logits - m.unsqueeze(-1)).exp().sum(-1)\n"
LOG = "return m + reduce_from_region(part, group).log()"
GATHER = "from tplab.tensor.mappings import gather_from_region\n"

LSE = [
    ("this rank's own", lse("return logits.logsumexp(-1)"), "Which numbers do the ranks have to add up"),
    ("the sum is not reduced", lse(M + PART + "return m + part.log()"), "Which numbers do the ranks have to add up"),
    ("no maximum", lse("return reduce_from_region(logits.exp().sum(-1), group).log()"), "What is subtracted before exp"),
    ("its own maximum, added back", lse(OWN_M + PART + LOG), "Which maximum did yours subtract"),
    ("its own maximum, the largest added back", lse(OWN_M + PART + "return vocab_max(logits, group) + reduce_from_region(part, group).log()"), "Which maximum did yours subtract"),
    ("the maximum is not added back", lse(M + PART + "return reduce_from_region(part, group).log()"), "What is log(exp(m)"),
    ("the logarithm before the sum", lse(M + PART + "return m + reduce_from_region(part.log(), group)"), "the sum over the ranks or the logarithm"),
    ("adds up the ranks' log-sum-exps", lse("return reduce_from_region(logits.logsumexp(-1), group)"), "the sum over the ranks or the logarithm"),
    ("no logarithm", lse(M + PART + "return m + reduce_from_region(part, group)"), "The logarithm of the sum is wanted"),
    ("sums twice", lse(M + PART + "return m + reduce_from_region(reduce_from_region(part, group), group).log()"), "How many times is each rank's sum added"),
    ("the mean over the ranks", lse(M + PART + "return m + (reduce_from_region(part, group) / dist.get_world_size(group)).log()"), "or the mean over the ranks"),
    ("adds log p to this rank's own", lse("m = logits.detach().amax(-1)\n" + PART + "return m + part.log() + torch.tensor(float(dist.get_world_size(group)), dtype=m.dtype).log()"), "log(sum over all columns"),
    ("a reduced copy: no gradient", lse(M + PART + "part = part.detach()\ndist.all_reduce(part, group=group)\nreturn m + part.log()"), "no gradient reaches the logits"),
    ("backward adds up too", lse("from tplab.tensor.mappings import copy_to_region\n" + M + PART + "return m + copy_to_region(reduce_from_region(part, group), group).log()"), "Which operator of chapter"),
    ("autograd follows this rank's maximum", lse("m = logits.amax(-1)\nbest = m.detach().clone()\ndist.all_reduce(best, op=dist.ReduceOp.MAX, group=group)\nm = m + (best - m.detach())\n" + PART + LOG), "autograd must treat it as a constant"),
    ("gathers the logits", lse(GATHER + "return gather_from_region(logits, group).logsumexp(-1)"), "the logits themselves travel"),
    ("all-reduces the exponentials", lse(M + "e = reduce_from_region((logits - m.unsqueeze(-1)).exp(), group)\nreturn m + e.sum(-1).log()"), "Two all-reduces of one number a token"),
    ("the maximum is sent twice", lse(M + M + PART + LOG), "Two all-reduces of one number a token"),
    ("clips the logits", lse(M + "part = (logits - m.unsqueeze(-1)).clamp(min=-3).exp().sum(-1)\n" + LOG), "log(sum over all columns"),
    ("the maximum of the whole batch", lse("m = vocab_max(logits, group).max()\npart = (logits - m).exp().sum(-1)\n" + LOG), "one number for each token, and on every rank"),
    ("keeps the dimension", lse(M + "part = (logits - m.unsqueeze(-1)).exp().sum(-1, keepdim=True)\nreturn m.unsqueeze(-1) + reduce_from_region(part, group).log()"), "One number for each token"),
    ("writes into the logits", lse(M + "logits.data.sub_(m.unsqueeze(-1))\nreturn m + reduce_from_region(logits.exp().sum(-1), group).log()"), "The caller still needs"),
    ("a rank of -inf gives NaN: rescaled without care", lse(M + "own = logits.detach().amax(-1)\npart = (logits - own.unsqueeze(-1)).exp().sum(-1) * (own - m).exp()\n" + LOG), "-inf minus -inf is NaN"),
    ("this rank's own log-sum-exp, rescaled: its gradient is NaN on a rank of -inf", lse(M + "return m + reduce_from_region((logits.logsumexp(-1) - m).exp(), group).log()"), "Which step of yours has no derivative"),
    ("group is not passed to g", lse(M + PART + "return m + reduce_from_region(part).log()"), "was not given `group`"),
    ("group is not passed to the maximum", lse("m = vocab_max(logits)\n" + PART + LOG), "was not given `group`"),
    ("returns None", lse(M + PART + "m + reduce_from_region(part, group).log()"), "One number for each token"),
    ("adds a small number against log(0)", lse(M + PART + "return m + (reduce_from_region(part, group) + 1e-6).log()"), "almost correct"),
]  # fmt: skip


def aimed(body: str) -> str:
    return f"def target_logit(logits, target, group=None):\n{indented(body)}\n"


COUNT = "columns = logits.shape[-1]\nv = columns * dist.get_world_size(group)\n"
REFUSE = "bad = (target < 0) | (target >= v)\nif bad.any():\n    raise IndexError(f'target {target[bad][0].item()} of {v}')\n"
COLUMN = "column = target - dist.get_rank(group) * columns\nmine = (column >= 0) & (column < columns)\n"
CLAMP = "column = column.masked_fill(~mine, 0)\n"
FOUND = "found = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1)\n"
SUM = "return reduce_from_region(torch.where(mine, found, 0), group)"
HEAD = COUNT + REFUSE + COLUMN + CLAMP + FOUND
TARGET_RIGHT = HEAD + SUM

TARGET = [
    ("not masked", aimed(HEAD + "return reduce_from_region(found, group)"), "What should this rank add there"),
    ("not reduced", aimed(HEAD + "return torch.where(mine, found, 0)"), "Which operator adds up forward"),
    ("neither masked nor reduced", aimed(HEAD + "return found"), "What should this rank add there"),
    ("the id modulo v/p, not masked", aimed(COUNT + REFUSE + "column = target % columns\n" + FOUND + "return reduce_from_region(found, group)"), "What should this rank add there"),
    ("not shifted", aimed(COUNT + REFUSE + "column = target\nmine = (column >= 0) & (column < columns)\n" + CLAMP + FOUND + SUM), "Rank r has the ids from"),
    ("the last column of a shard is nobody's", aimed(swap(TARGET_RIGHT, "(column < columns)", "(column < columns - 1)")), "Take the targets 0, v/p - 1"),
    ("one column too many, then clamped", aimed(swap(TARGET_RIGHT, "(column < columns)\ncolumn = column.masked_fill(~mine, 0)", "(column <= columns)\ncolumn = column.masked_fill(~mine, 0).clamp(max=columns - 1)")), "Take the targets 0, v/p - 1"),
    ("the first column is nobody's", aimed(swap(TARGET_RIGHT, "(column >= 0)", "(column > 0)")), "Take the targets 0, v/p - 1"),
    ("squeezes every axis of length 1", aimed(HEAD.replace(".squeeze(-1)", ".squeeze()") + "return reduce_from_region(torch.where(mine.squeeze(), found, 0), group)"), "removes every dimension of length 1"),
    ("not set to 0 before the look-up", aimed(swap(TARGET_RIGHT, CLAMP, "")), "can `gather` look that up"),
    ("the largest in place of the sum", aimed(HEAD + "best = torch.where(mine, found.detach(), 0)\ndist.all_reduce(best, op=dist.ReduceOp.MAX, group=group)\nreturn torch.where(mine, found, 0) - torch.where(mine, found, 0).detach() + best"), "A logit below 0 loses against the zeros"),
    ("multiplies by the mask: NaN where a logit is -inf", aimed(HEAD + "return reduce_from_region(found * mine, group)"), "0 · -inf is NaN"),
    ("no error for ids that nobody has", aimed(swap(TARGET_RIGHT, REFUSE, "")), "An id below 0, or of v and more, belongs to nobody"),
    ("only too large ids are refused", aimed(swap(TARGET_RIGHT, "(target < 0) | (target >= v)", "target >= v")), "An id below 0, or of v and more, belongs to nobody"),
    ("only negative ids are refused", aimed(swap(TARGET_RIGHT, "(target < 0) | (target >= v)", "target < 0")), "An id below 0, or of v and more, belongs to nobody"),
    ("refuses with > v", aimed(swap(TARGET_RIGHT, "target >= v", "target > v")), "An id below 0, or of v and more, belongs to nobody"),
    ("refuses by ValueError", aimed(swap(TARGET_RIGHT, "IndexError", "ValueError")), "Raise IndexError"),
    ("does not name the id", aimed(swap(TARGET_RIGHT, "f'target {target[bad][0].item()} of {v}'", "'an id is outside the vocabulary'")), "with the id in the message"),
    ("only rank 0 refuses", aimed(swap(TARGET_RIGHT, "if bad.any():", "if bad.any() and dist.get_rank(group) == 0:")), "Not every rank raises"),
    ("refuses after the all-reduce", aimed(COUNT + "bad = (target < 0) | (target >= v)\n" + COLUMN + CLAMP + FOUND + swap(SUM, "return", "out =") + "\nif bad.any():\n    raise IndexError(f'target {target[bad][0].item()}')\nreturn out"), "IndexError, but after a collective"),
    ("takes v/p for v", aimed(swap(TARGET_RIGHT, "v = columns * dist.get_world_size(group)", "v = columns")), "Each rank can look only into its own"),
    ("gathers the logits", aimed("from tplab.tensor.mappings import gather_from_region\n" + COUNT + REFUSE + "return gather_from_region(logits, group).gather(-1, target.unsqueeze(-1)).squeeze(-1)"), "Who has the one number that is needed"),
    ("all-reduces one-hot logits", aimed(COUNT + REFUSE + COLUMN + CLAMP + "hot = F.one_hot(column, columns).bool() & mine.unsqueeze(-1)\nreturn reduce_from_region(torch.where(hot, logits, 0), group).sum(-1)"), "is the tensor that you send still"),
    ("reduced without autograd", aimed(HEAD + "found = torch.where(mine, found, 0).detach()\ndist.all_reduce(found, group=group)\nreturn found"), "no gradient reaches the logits"),
    ("backward adds up too", aimed("from tplab.tensor.mappings import copy_to_region\n" + HEAD + "return copy_to_region(reduce_from_region(torch.where(mine, found, 0), group), group)"), "there is nothing to send and nothing to add up"),
    ("the gradient goes into a foreign column too", aimed(HEAD + "kept = torch.where(mine, found, 0)\nreturn reduce_from_region(kept.detach() + found - found.detach(), group)"), "its gradient is not"),
    ("writes into the targets", aimed(COUNT + REFUSE + "target -= dist.get_rank(group) * columns\ncolumn = target\nmine = (column >= 0) & (column < columns)\n" + CLAMP + FOUND + SUM), "The caller still needs"),
    ("clears the logits that it does not use", aimed(HEAD + "logits.data.mul_(1.5)\n" + SUM), "The caller still needs"),
    ("keeps the dimension", aimed(COUNT + REFUSE + COLUMN + CLAMP + "found = logits.gather(-1, column.unsqueeze(-1))\nreturn reduce_from_region(torch.where(mine.unsqueeze(-1), found, 0), group)"), "One number for each token"),
    ("the rank of the default group", aimed(swap(TARGET_RIGHT, "dist.get_rank(group)", "dist.get_rank()")), "was not given `group`"),
    ("g in the default group", aimed(HEAD + "return reduce_from_region(torch.where(mine, found, 0))"), "was not given `group`"),
    ("zeros", aimed(HEAD + "return 0 * reduce_from_region(torch.where(mine, found, 0), group)"), "rank 0 all zeros"),
]  # fmt: skip


FORWARD = """
lse = vocab_logsumexp(logits, group)
ctx.start = dist.get_rank(group) * logits.shape[-1]
ctx.save_for_backward(logits, target, lse)
return lse - target_logit(logits, target, group)
"""
SAVED = "logits, target, lse = ctx.saved_tensors\n"
SOFTMAX = "dlogits = (logits - lse.unsqueeze(-1)).exp()\n"
WHERE = "column = target - ctx.start\nmine = (column >= 0) & (column < logits.shape[-1])\ncolumn = column.masked_fill(~mine, 0).unsqueeze(-1)\n"
MINUS = "dlogits.scatter_add_(-1, column, -mine.to(logits.dtype).unsqueeze(-1))\n"
SCALED = "return dlogits * dloss.unsqueeze(-1), None, None"
BACKWARD = SAVED + SOFTMAX + WHERE + MINUS + SCALED


def by_hand(backward: str = BACKWARD, forward: str = FORWARD) -> str:
    return f"""
class VocabParallelCrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits, target, group):
{indented(forward, 8)}

    @staticmethod
    def backward(ctx, dloss):
{indented(backward, 8)}
"""


BY_HAND = [
    ("nothing is subtracted", by_hand(SAVED + SOFTMAX + SCALED), "What is the derivative of minus z_target"),
    ("1 on every rank, in its column 0", by_hand(swap(BACKWARD, "-mine.to(logits.dtype).unsqueeze(-1)", "-torch.ones_like(lse).unsqueeze(-1)")), "Only one rank has the target's column"),
    ("1 on every rank, in column target % (v/p)", by_hand(SAVED + SOFTMAX + "column = (target % logits.shape[-1]).unsqueeze(-1)\ndlogits.scatter_add_(-1, column, -torch.ones_like(lse).unsqueeze(-1))\n" + SCALED), "Only one rank has the target's column"),
    ("1 in every column", by_hand(SAVED + SOFTMAX + "dlogits = dlogits - 1\n" + SCALED), "In which of them did you subtract"),
    ("upstream gradient ignored", by_hand(swap(BACKWARD, "dlogits * dloss.unsqueeze(-1)", "dlogits")), "Where does yours come in"),
    ("upstream gradient on the softmax only", by_hand(SAVED + SOFTMAX + "dlogits = dlogits * dloss.unsqueeze(-1)\n" + WHERE + MINUS + "return dlogits, None, None"), "Where does yours come in"),
    ("the mean of the upstream gradient", by_hand(swap(BACKWARD, "dloss.unsqueeze(-1)", "dloss.mean()")), "Where does yours come in"),
    ("a softmax over this rank's columns", by_hand(swap(BACKWARD, SOFTMAX, "dlogits = logits.softmax(-1)\n")), "To what does it add up on one rank"),
    ("one-hot alone", by_hand(swap(BACKWARD, SOFTMAX, "dlogits = torch.zeros_like(logits)\n")), "What is the derivative of the log-sum-exp"),
    ("the sign turned round", by_hand(swap(BACKWARD, "return dlogits *", "return -dlogits *")), "the signs are wrong"),
    ("the softmax without exp", by_hand(swap(BACKWARD, ".exp()", "")), "which of the three differs"),
    ("the target's logit is added", by_hand(forward=swap(FORWARD, "return lse - ", "return lse + ")), "What differs in your forward"),
    ("the log-sum-exp alone", by_hand(forward=swap(FORWARD, "return lse - target_logit(logits, target, group)", "target_logit(logits, target, group)\nreturn lse.clone()")), "Where is the second part"),
    ("the sign of the loss", by_hand(forward=swap(FORWARD, "return lse - target_logit(logits, target, group)", "return target_logit(logits, target, group) - lse")), "Which sign has it"),
    ("the mean", by_hand(forward=swap(FORWARD, "target_logit(logits, target, group)", "target_logit(logits, target, group)").replace("return ", "return (").rstrip() + ").mean()"), "the mean is taken later"),
    ("all-reduces the gradient", by_hand(swap(BACKWARD, "return dlogits * dloss.unsqueeze(-1)", "dlogits = (dlogits * dloss.unsqueeze(-1)).contiguous()\ndist.all_reduce(dlogits)\nreturn dlogits")), "What is missing that another rank would have to send"),
    ("all-reduces the softmax's sum again", by_hand(swap(BACKWARD, SOFTMAX, "from tplab.tensor.mappings import reduce_from_region as g\ndlogits = (logits - lse.unsqueeze(-1)).exp()\ndlogits = dlogits / g(dlogits.sum(-1)).unsqueeze(-1)\n")), "What is missing that another rank would have to send"),
    ("gathers in forward", by_hand(forward="from tplab.tensor.mappings import gather_from_region\nwhole = gather_from_region(logits, group)\nlse = whole.logsumexp(-1)\nctx.start = dist.get_rank(group) * logits.shape[-1]\nctx.save_for_backward(logits, target, lse)\nreturn lse - whole.gather(-1, target.unsqueeze(-1)).squeeze(-1)"), "the logits themselves travel"),
    ("a needless all-reduce of the loss", by_hand(forward=swap(FORWARD, "return lse - target_logit(logits, target, group)", "loss = lse - target_logit(logits, target, group)\ndist.all_reduce(loss, group=group)\nreturn loss / dist.get_world_size(group)")), "Which message is too many"),
    ("the gradient overwrites the saved softmax", by_hand(WHERE.join(["dlogits, target = ctx.saved_tensors\nlogits = dlogits\n", MINUS + "return dlogits.mul_(dloss.unsqueeze(-1)), None, None"]), swap(FORWARD, "ctx.save_for_backward(logits, target, lse)", "ctx.save_for_backward((logits - lse.unsqueeze(-1)).exp(), target)")), "the first wrote into a tensor that was saved"),
    ("the gradient overwrites a softmax on ctx", by_hand("target, dlogits = ctx.saved_tensors[0], ctx.softmax\nlogits = dlogits\n" + WHERE + MINUS + "return dlogits.mul_(dloss.unsqueeze(-1)), None, None", swap(FORWARD, "ctx.save_for_backward(logits, target, lse)", "ctx.softmax = (logits - lse.unsqueeze(-1)).exp()\nctx.save_for_backward(target)")), "the first wrote into a tensor that was saved"),
    ("overwrites the caller's logits, forward", by_hand(forward=swap(FORWARD, "return lse -", "loss = lse -") + "logits.sub_(lse.unsqueeze(-1)).exp_()\nreturn loss", backward=swap(BACKWARD, SOFTMAX, "dlogits = logits.clone()\n")), "Which line writes into them"),
    ("overwrites the caller's logits, backward", by_hand(swap(BACKWARD, SOFTMAX, "dlogits = logits.data.sub_(lse.unsqueeze(-1)).exp_()\n")), "which the caller still needs"),
    ("keeps logits and softmax", by_hand("logits, target, dlogits = ctx.saved_tensors\ndlogits = dlogits.clone()\n" + WHERE + MINUS + SCALED, swap(FORWARD, "(logits, target, lse)", "(logits, target, (logits - lse.unsqueeze(-1)).exp())")), "takes more memory than it has to"),
    ("keeps a softmax on ctx beside the logits", by_hand(swap(BACKWARD, SOFTMAX, "dlogits = ctx.softmax.clone()\n"), swap(FORWARD, "ctx.save", "ctx.softmax = (logits - lse.unsqueeze(-1)).exp()\nctx.save")), "takes more memory than it has to"),
    ("one value for three arguments", by_hand(swap(BACKWARD, ", None, None", "")), "gives one value for each argument"),
    ("forward only: no gradient", by_hand("return None, None, None"), "backward returns one gradient for each argument"),
    ("backward of zeros", by_hand(swap(BACKWARD, "return dlogits *", "return 0 * dlogits *")), "backward returns one gradient for each argument"),
    ("the rank of the default group", by_hand(forward=swap(FORWARD, "dist.get_rank(group)", "dist.get_rank()")), "was not given `group`"),
    ("group is ignored in the sum", by_hand(forward=swap(FORWARD, "vocab_logsumexp(logits, group)", "vocab_logsumexp(logits)")), "was not given `group`"),
    ("the last column of a shard is nobody's", by_hand(swap(BACKWARD, "(column < logits.shape[-1])", "(column < logits.shape[-1] - 1)")), "which of the three differs"),
    ("no maximum in the backward", by_hand(swap(BACKWARD, SOFTMAX, "dlogits = logits.exp() / lse.exp().unsqueeze(-1)\n")), "elements are NaN"),
    ("a gradient p times too large", by_hand(forward=swap(FORWARD, "ctx.start", "ctx.p = dist.get_world_size(group)\nctx.start"), backward=swap(BACKWARD, "return dlogits *", "return ctx.p * dlogits *")), "which of the three differs"),
]  # fmt: skip


def whole(body: str) -> str:
    return (
        "def vocab_parallel_loss(logits, target, *, vocab_size, ignore_index=-100, label_smoothing=0.0, group=None):\n"
        + indented(body)
        + "\n"
    )


COUNTED = "counted = target != ignore_index\nsafe = target.masked_fill(~counted, 0)\n"
CHECKED = (
    "bad = (safe < 0) | (safe >= vocab_size)\nif bad.any():\n    raise IndexError(f'target {safe[bad][0].item()}')\n"
)
PADDING = "start = dist.get_rank(group) * logits.shape[-1]\npadding = torch.arange(start, start + logits.shape[-1]) >= vocab_size\n"
INFINITE = "z = logits.masked_fill(padding, -torch.inf)\n"
LOSS = "loss = VocabParallelCrossEntropy.apply(z, safe, group)\n"
TOTAL = "total = reduce_from_region(logits.masked_fill(padding, 0).sum(-1), group)\n"
SMOOTH = "loss = loss + label_smoothing * (target_logit(z, safe, group) - total / vocab_size)\n"
MEAN = "return loss.masked_fill(~counted, 0).sum() / counted.sum()"
WHOLE_RIGHT = COUNTED + CHECKED + PADDING + INFINITE + LOSS + TOTAL + SMOOTH + MEAN

WHOLE = [
    ("padding takes part", whole(swap(WHOLE_RIGHT, INFINITE, "z = logits\n")), "The softmax gives the padded columns a part"),
    ("padding becomes 0", whole(swap(WHOLE_RIGHT, INFINITE, "z = logits.masked_fill(padding, 0)\n")), "Which number has exp = 0"),
    ("padding by the column, not the id", whole(swap(WHOLE_RIGHT, "torch.arange(start, start + logits.shape[-1])", "torch.arange(logits.shape[-1])")), "which id has its column 0"),
    ("padding from vocab_size + 1 on", whole(swap(WHOLE_RIGHT, ">= vocab_size\nz", "> vocab_size\nz")), "From which part on does yours differ"),
    ("the mean over all tokens", whole(swap(WHOLE_RIGHT, MEAN, "return loss.masked_fill(~counted, 0).mean()")), "by all, or by those that count"),
    ("the sum", whole(swap(WHOLE_RIGHT, " / counted.sum()", "")), "By what is it divided"),
    ("ignored tokens count as id 0", whole(swap(WHOLE_RIGHT, MEAN, "return loss.mean()")), "Where do you take it out again"),
    ("ignored tokens are added, not counted", whole(swap(WHOLE_RIGHT, MEAN, "return loss.sum() / counted.sum()")), "Where do you take them out"),
    ("ignore_index is always -100", whole(swap(WHOLE_RIGHT, "target != ignore_index", "target != -100")), "Which line knows -100 only"),
    ("every negative id is ignored", whole(swap(WHOLE_RIGHT, "counted = target != ignore_index", "counted = (target != ignore_index) & (target >= 0)")), "This id is no id of the vocabulary"),
    ("no smoothing", whole(swap(WHOLE_RIGHT, TOTAL + SMOOTH, "")), "Where does it enter your loss"),
    ("smoothing over the padded vocabulary", whole(swap(WHOLE_RIGHT, "total / vocab_size", "total / (logits.shape[-1] * dist.get_world_size(group))")), "How many ids does it have"),
    ("smoothing over v/p columns", whole(swap(WHOLE_RIGHT, "total / vocab_size", "total / logits.shape[-1]")), "How many ids does it have"),
    ("the mean logit of this rank (Megatron-Core issue 737)", whole(swap(WHOLE_RIGHT, TOTAL, "total = logits.masked_fill(padding, 0).sum(-1) / (~padding).sum().clamp(min=1) * vocab_size\n")), "Who adds up the ranks' sums"),
    ("smoothing over all ids but the target", whole(swap(WHOLE_RIGHT, "(target_logit(z, safe, group) - total / vocab_size)", "(target_logit(z, safe, group) - (total - target_logit(z, safe, group)) / (vocab_size - 1))")), "every id gets"),
    ("smoothing adds up the padding's -inf", whole(swap(WHOLE_RIGHT, "logits.masked_fill(padding, 0).sum(-1)", "z.sum(-1)")), "Where else do you add them up"),
    ("smoothing adds up the padding's logits", whole(swap(WHOLE_RIGHT, "logits.masked_fill(padding, 0).sum(-1)", "logits.sum(-1)")), "Which columns do you add up for it"),
    ("the sign of the smoothing", whole(swap(WHOLE_RIGHT, "loss + label_smoothing", "loss - label_smoothing")), "Which sign has yours"),
    ("the smoothing has no gradient", whole(swap(WHOLE_RIGHT, "label_smoothing * (target_logit(z, safe, group) - total / vocab_size)", "label_smoothing * (target_logit(z, safe, group) - total / vocab_size).detach()")), "Which part of it does autograd not see"),
    ("the mean logit by dist.all_reduce, detached", whole(swap(WHOLE_RIGHT, TOTAL, "total = logits.masked_fill(padding, 0).sum(-1).detach()\ndist.all_reduce(total, group=group)\n")), "Which part of it does autograd not see"),
    ("the loss has no gradient", whole(swap(WHOLE_RIGHT, MEAN, MEAN.replace("return ", "return (") + ").detach()")), "no gradient reaches the logits"),
    ("f behind the loss: its gradient is added up", whole("from tplab.tensor.mappings import copy_to_region\n" + swap(WHOLE_RIGHT, MEAN, MEAN.replace("return ", "return copy_to_region(") + ", group)")), "the ranks have nothing to tell each other"),
    ("writes into the targets", whole(swap(WHOLE_RIGHT, "safe = target.masked_fill(~counted, 0)", "safe = target.masked_fill_(~counted, 0)")), "masked_fill makes a new tensor"),
    ("writes into the logits", whole(swap(WHOLE_RIGHT, INFINITE, "logits.data.masked_fill_(padding, -torch.inf)\nz = logits\n").replace("logits.masked_fill(padding, 0)", "torch.where(padding, 0, logits)")), "masked_fill makes a new tensor"),
    ("no error for wrong targets", whole(swap(WHOLE_RIGHT, CHECKED, "")), "This id is no id of the vocabulary"),
    ("targets in the padding pass", whole(swap(WHOLE_RIGHT, "safe >= vocab_size", "safe >= logits.shape[-1] * dist.get_world_size(group)")), "Compare with vocab_size"),
    ("an ignore_index beyond the ids is refused", whole("if (target >= vocab_size).any():\n    raise IndexError(target.max().item())\n" + WHOLE_RIGHT.strip()), "even a negative one or one that's larger than every id"),
    ("the loss of each token", whole(swap(WHOLE_RIGHT, MEAN, "return loss.masked_fill(~counted, 0)")), "One number comes out"),
    ("gathers the logits", whole("from tplab.tensor.mappings import gather_from_region\n" + COUNTED + CHECKED + "z = gather_from_region(logits, group)[..., :vocab_size].flatten(0, -2)\nreturn F.cross_entropy(z, target.flatten(), ignore_index=ignore_index, label_smoothing=label_smoothing)"), "as large as the logits"),
    ("all-reduces [.., v/p]", whole(swap(WHOLE_RIGHT, TOTAL, "total = reduce_from_region(logits.masked_fill(padding, 0), group).sum(-1)\n")), "as large as the logits"),
    ("ignored targets are looked up", whole(swap(WHOLE_RIGHT, "safe = target.masked_fill(~counted, 0)", "safe = target")), "Which of the steps fails"),
    ("the mean is all-reduced as well", whole(swap(WHOLE_RIGHT, MEAN, MEAN.replace("return ", "return reduce_from_region(") + ", group)")), "Which sum over the ranks is one too many"),
    ("group is not passed to the loss", whole(swap(WHOLE_RIGHT, "VocabParallelCrossEntropy.apply(z, safe, group)", "VocabParallelCrossEntropy.apply(z, safe, None)")), "was not given `group`"),
    ("group is not passed to the smoothing", whole(swap(WHOLE_RIGHT, "target_logit(z, safe, group)", "target_logit(z, safe)")), "was not given `group`"),
    ("returns zero", whole(swap(WHOLE_RIGHT, MEAN, "return 0 * (" + MEAN.removeprefix("return ") + ")")), "rank 0 all zeros"),
    ("a float", whole(swap(WHOLE_RIGHT, MEAN, "return (" + MEAN.removeprefix("return ") + ").item()")), "One number comes out"),
]  # fmt: skip

WRONG = [
    WrongAnswer(exercise, name, source, says)
    for exercise, answers in (("8.1", MAXIMUM), ("8.2", LSE), ("8.3", TARGET), ("8.4", BY_HAND), ("8.5", WHOLE))
    for name, source, says in answers
]
