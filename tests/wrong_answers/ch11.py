"""Wrong answers to the exercises of chapter 11, and what each must be told."""

from tests.wrong_answers import WrongAnswer, indented, swap


def collective(body: str) -> str:
    return f"def collective_seconds(kind, size, p, link):\n{indented(body)}\n"


WAYS = 'ways = 2 if kind == "all_reduce" else 1\n'

COLLECTIVES = [
    ("whole tensors in each step", collective(WAYS + "return ways * (p - 1) * link.seconds(size)"), "In a ring each message is one part"),
    ("all three cost what a reduce-scatter costs", collective("return (p - 1) * link.seconds(size / p)"), "That is one way round the ring"),
    ("all three cost what an all-reduce costs", collective("return 2 * (p - 1) * link.seconds(size / p)"), "An all-reduce is a reduce-scatter and an all-gather, one after the other"),
    ("size is one rank's part of an all-gather", collective('if kind == "all_gather":\n    return (p - 1) * link.seconds(size)\n' + WAYS + "return ways * (p - 1) * link.seconds(size / p)"), "`size` is the whole, gathered tensor"),
    ("alpha once", collective(WAYS + "return link.alpha + ways * (p - 1) * link.beta * size / p"), "Every step is a message of its own, and each pays alpha"),
    ("alpha never", collective(WAYS + "return ways * (p - 1) * link.beta * size / p"), "Even an empty message takes a while"),
    ("p steps each way", collective(WAYS + "return ways * p * link.seconds(size / p)"), "Which step is one too many"),
    ("a step even for one rank", collective(WAYS + "return ways * max(p - 1, 1) * link.seconds(size / p)"), "With one rank nothing is sent"),
    ("one step", collective(WAYS + "return link.seconds(size / p) if p > 1 else 0.0"), "How many follow one another"),
    ("the bandwidth for beta", collective(WAYS + "return ways * (p - 1) * (link.alpha + size / p * link.bandwidth)"), "link.beta is seconds for each byte, already"),
    ("an empty message is free", collective("if not size:\n    return 0.0\n" + WAYS + "return ways * (p - 1) * link.seconds(size / p)"), "What does link.seconds(0) return"),
    ("remembers times without the link", "_known = {}\n\n\n" + collective("key = kind, size, p\nif key not in _known:\n    " + WAYS + "    _known[key] = ways * (p - 1) * link.seconds(size / p)\nreturn _known[key]"), "keeps a result from an earlier call"),
    ("a tree", collective(WAYS + "return ways * (p - 1).bit_length() * link.seconds(size)"), "Count the steps that follow one another"),
    ("returns microseconds", collective(WAYS + "return 1e6 * ways * (p - 1) * link.seconds(size / p)"), "Count the steps that follow one another"),
    ("returns the steps and the time", collective(WAYS + "return ways * (p - 1), link.seconds(size / p)"), "A number of seconds is wanted"),
    ("returns nothing", collective(WAYS + "ways * (p - 1) * link.seconds(size / p)"), "A number of seconds is wanted"),
    ("no such method", collective("return link.time(size)"), "collective_seconds(\"all_reduce\""),
]  # fmt: skip


def layer(body: str) -> str:
    head = "def layer_seconds(b, s, h, p, rate, link, *, recompute=False, bytes_per_number=2):\n"
    return head + indented(body) + "\n"


LAYER = """
forward = 24 * b * s * h**2 + 4 * b * s**2 * h
forwards = 2 if recompute else 1
compute = (forwards + 2) * forward / (p * rate)
messages = 2 * forwards + 2
return compute, messages * all_reduce(link, bytes_per_number * b * s * h, p)
"""

LAYERS = [
    ("a multiply-add is one operation", layer(swap(LAYER, "24 * b * s * h**2 + 4 *", "12 * b * s * h**2 + 2 *")), "A multiplication and an addition are two operations"),
    ("the forward pass only", layer(swap(LAYER, "(forwards + 2) * forward", "forward")), "That is the forward pass"),
    ("a backward pass as long as the forward pass", layer(swap(LAYER, "(forwards + 2) * forward", "(forwards + 1) * forward")), "how many as large as this one has"),
    ("no scores", layer(swap(LAYER, " + 4 * b * s**2 * h", "")), "Q Kᵀ and P V are products as well"),
    ("one product of the scores", layer(swap(LAYER, "+ 4 * b * s**2", "+ 2 * b * s**2")), "P V makes [s, h] from"),
    ("only the MLP", layer(swap(LAYER, "24 * b * s * h**2", "16 * b * s * h**2")), "What do the products of Q, K, V"),
    ("the scores with h squared", layer(swap(LAYER, "4 * b * s**2 * h", "4 * b * s**2 * h**2")), "Write the products of the forward pass"),
    ("not divided by p", layer(swap(LAYER, "(p * rate)", "rate")), "How much of it has one of p ranks"),
    ("recompute is ignored", layer(swap(LAYER, "2 if recompute else 1", "1")), "Here the activations are recomputed"),
    ("recomputes always", layer(swap(LAYER, "2 if recompute else 1", "2")), "Here nothing is recomputed"),
    ("recomputes without the all-reduces", layer(swap(LAYER, "2 * forwards + 2", "4")), "Here the activations are recomputed"),
    ("recompute doubles everything", layer(swap(LAYER, "(forwards + 2) * forward", "3 * forwards * forward")), "What is done a second time"),
    ("two all-reduces", layer(swap(LAYER, "2 * forwards + 2", "2")), "How many all-reduces are that"),
    ("three all-reduces: one f for both blocks", layer(swap(LAYER, "2 * forwards + 2", "2 * forwards + 1")), "The layer's compute time is right, its communication is not"),
    ("a ring with a step even for one rank", layer(swap(LAYER, "all_reduce(link, bytes_per_number * b * s * h, p)", "2 * max(p - 1, 1) * link.seconds(bytes_per_number * b * s * h / p)")), "With one rank f and g do nothing"),
    ("f and g in both directions", layer(swap(LAYER, "2 * forwards + 2", "8")), "How many all-reduces are that"),
    ("numbers for bytes", layer(swap(LAYER, "bytes_per_number * b", "b")), "How many bytes has each of them"),
    ("always two bytes", layer(swap(LAYER, "bytes_per_number * b", "2 * b")), "which argument says so"),
    ("messages of a shard", layer(swap(LAYER, "b * s * h, p)", "b * s * h / p, p)")), "f and g sum whole tensors"),
    ("messages of the inner activation", layer(swap(LAYER, "bytes_per_number * b", "bytes_per_number * 4 * b")), "those at the ends of"),
    ("messages without a ring", layer(swap(LAYER, "all_reduce(link, bytes_per_number * b * s * h, p)", "link.seconds(bytes_per_number * b * s * h)")), "What does an all-reduce over p ranks cost"),
    ("the sum", layer(swap(LAYER, "return compute, messages", "return compute + messages")), "Two numbers of seconds are wanted"),
    ("the two in the other order", layer(swap(swap(LAYER, "return compute, ", "communicate = "), "h, p)\n", "h, p)\nreturn communicate, compute\n")), "Write the products of the forward pass"),
    ("all_reduce of the setup replaced by torch's", layer(swap(LAYER, "all_reduce(link", "dist.all_reduce(link")), "layer_seconds("),
]  # fmt: skip


HEAD = """
class LinearAsync(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return x @ weight.T

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
"""


def backward(body: str) -> str:
    return HEAD + indented(body, 8) + "\n"


DX = "dx = dy @ weight\n"
START = "travelling = dist.all_reduce(dx, group=ctx.group, async_op=True)\n"
DW = "dw = dy.flatten(0, -2).T @ x.flatten(0, -2)\n"
WAIT = "travelling.wait()\n"
BACK = "return dx, dw, None"

BACKWARDS = [
    ("blocking, before dW", backward(DX + "dist.all_reduce(dx, group=ctx.group)\n" + DW + BACK), "Where is the last line at which you may wait"),
    ("blocking, after dW", backward(DX + DW + "dist.all_reduce(dx, group=ctx.group)\n" + BACK), "Which of the two products can be sent away"),
    ("dW summed over one leading dimension", backward(DX + START + "dw = dy.transpose(-2, -1) @ x\nif dw.dim() > 2:\n    dw = dw.sum(0)\n" + WAIT + BACK), "In which order should the rank compute dx"),
    ("waits at once", backward(DX + START + WAIT + DW + BACK), "waits for the sum before it computes dW"),
    ("starts when dW is there", backward(DX + DW + START + WAIT + BACK), "nothing is left to do beside it"),
    ("dW first of all", backward(DW + DX + START + WAIT + BACK), "dW was computed before there was anything to send"),
    ("never waits", backward(DX + START + DW + BACK), "What should you do with that request"),
    ("no all-reduce", backward(DX + DW + BACK), "Who adds the parts up"),
    ("a frozen weight, and no sum of dx", backward(DX + "if not ctx.needs_input_grad[1]:\n    return dx, None, None\n" + START + DW + WAIT + BACK), "Which of your lines skips the all-reduce"),
    ("sums a copy", backward(DX + "travelling = dist.all_reduce(dx.clone(), group=ctx.group, async_op=True)\n" + DW + WAIT + BACK), "Which tensor did it write into"),
    ("the mean", backward(DX + START + DW + WAIT + "return dx / dist.get_world_size(ctx.group), dw, None"), "Does it take their mean"),
    ("sums dW too", backward(DX + START + DW + "dist.all_reduce(dw, group=ctx.group)\n" + WAIT + BACK), "Does the gradient of this rank's rows need anything"),
    ("sums dy", backward("dy = dy.clone()\ndist.all_reduce(dy, group=ctx.group)\n" + DX + DW + BACK), "Does the gradient of this rank's rows need anything"),
    ("the default group", backward(DX + swap(START, "group=ctx.group, ", "") + DW + WAIT + BACK), "Which call was not given the group"),
    ("gathers the parts and adds them", backward(DX + "parts = [torch.empty_like(dx) for _ in range(dist.get_world_size(ctx.group))]\ntravelling = dist.all_gather(parts, dx, group=ctx.group, async_op=True)\n" + DW + WAIT + "return sum(parts), dw, None"), "What does your backward send"),
    ("the last token only", backward(DX + START + "dw = torch.outer(dy.flatten(0, -2)[-1], x.flatten(0, -2)[-1])\n" + WAIT + BACK), "Which of them are in your product"),
    ("dW transposed", backward(DX + START + "dw = x.flatten(0, -2).T @ dy.flatten(0, -2)\n" + WAIT + BACK), "Write the shapes next to each line"),
    ("the gradients in the other order", backward(DX + START + DW + WAIT + "return dw, dx, None"), "Write the shapes next to each line"),
    ("forgets async_op", backward(DX + swap(START, ", async_op=True", "") + DW + WAIT + BACK), "give back with async_op=True"),
    ("no gradient of the weight", backward(DX + START + DW + WAIT + "return dx, None, None"), "one gradient for each argument of forward"),
    ("writes into dy", backward(DX + START + DW + WAIT + "dy.zero_()\n" + BACK), "The caller still needs the tensors"),
    ("rank 0 alone", backward(DX + "if dist.get_rank() == 0:\n    dist.all_reduce(dx, group=ctx.group)\n" + DW + BACK), "Does every rank start the all-reduce of dx"),
    ("forward forgets to return", swap(backward(DX + START + DW + WAIT + BACK), "return x @ weight.T", "y = x @ weight.T"), "forward is given. What does it return"),
    ("a message with room for more", backward(DX + "twice = torch.cat([dx, torch.zeros_like(dx)])\ntravelling = dist.all_reduce(twice, group=ctx.group, async_op=True)\n" + DW + WAIT + "return twice[: len(dx)], dw, None"), "Which call sends more, or something else"),
    ("a barrier after the wait, to be safe", backward(DX + START + DW + WAIT + "dist.barrier(group=ctx.group)\n" + BACK), "Which of your lines calls the barrier"),
    ("the old line of dW still stands behind the wait", backward(DX + START + DW + WAIT + DW + BACK), "In which order should the rank compute dx"),
    ("the mean over the tokens in dx", backward(DX + START + DW + WAIT + "return dx / dy.shape[:-1].numel(), dw, None"), "dW is right. dx is dy times weight"),
    ("the first sequence only in dW", backward(DX + START + "dw = dy[0].reshape(-1, dy.shape[-1]).T @ x[0].reshape(-1, x.shape[-1])\n" + WAIT + BACK), "dx is right. dW is the sum over all tokens"),
]  # fmt: skip


def smallest(body: str) -> str:
    return f"def smallest_hidden(seconds, p, efficiency=0.8, step=1024, most=2**17):\n{indented(body)}\n"


SEARCH = """
for h in range(step, most + 1, step):
    if seconds(h, 1) / (p * seconds(h, p)) >= efficiency:
        return h
return None
"""

SMALLEST = [
    ("more than asked for", smallest(swap(SEARCH, ">= efficiency", "> efficiency")), "what do you compare, > or >="),
    ("the last that fails", smallest(swap(SEARCH, "return h\n", "return h - step\n")), "That is the last size that falls short"),
    ("one step beyond", smallest(swap(SEARCH, "return h\n", "return h + step\n")), "and so is the one before it"),
    ("begins with the second size", smallest(swap(SEARCH, "range(step,", "range(2 * step,")), "and so is the one before it"),
    ("the speedup", smallest(swap(SEARCH, "(p * seconds(h, p))", "seconds(h, p)")), "by what do you divide the speedup"),
    ("always 8 ranks", smallest(swap(SEARCH, "(p * seconds(h, p))", "(8 * seconds(h, 8))")), "That is the size for 8 ranks"),
    ("always 80 %", smallest(swap(SEARCH, ">= efficiency", ">= 0.8")), "That is the size for 80 %"),
    ("powers of two", smallest("h = step\nwhile h <= most:\n    if seconds(h, 1) / (p * seconds(h, p)) >= efficiency:\n        return h\n    h *= 2\nreturn None\n"), "which multiples of `step` does it leave out"),
    ("rounds up to a power of two", smallest(swap(SEARCH, "return h\n", "return 1 << (h - 1).bit_length()\n")), "That is a power of two"),
    ("every size", smallest(swap(SEARCH, "range(step, most + 1, step)", "range(1, most + 1)")), "That is no multiple of `step`"),
    ("efficiency upside down", smallest(swap(SEARCH, "seconds(h, 1) / (p * seconds(h, p))", "p * seconds(h, p) / seconds(h, 1)")), "That is the smallest size of all"),
    ("the largest that falls short", smallest("return max(h for h in range(step, most + 1, step) if seconds(h, 1) / (p * seconds(h, p)) < efficiency)"), "That is the last size that falls short"),
    ("the largest of all", smallest("return most - most % step"), "Where does your search stop"),
    ("most where there is none", smallest(swap(SEARCH, "return None", "return most")), "Here no size up to `most` is good enough"),
    ("at least 128 for every rank", smallest(swap(SEARCH, "range(step,", "range(max(step, -(-128 * p // step) * step),")), "At which size does your search start"),
    ("the time on one rank grows with h squared", smallest("one = seconds(step, 1)\n" + swap(SEARCH, "seconds(h, 1)", "one * (h / step) ** 2")), "For which h do you call seconds(h, 1)"),
    ("gives up too soon", smallest(swap(SEARCH, "most + 1", "min(most, 2048)")), "Why does your search not come to it"),
    ("tries the first size without asking", smallest(swap(SEARCH, "most + 1", "max(step, most) + 1")), "Here no size up to `most` is good enough"),
    ("another default", swap(smallest(SEARCH), "efficiency=0.8", "efficiency=0.9"), "Write down the efficiency of one size"),
    ("another largest size by default", swap(smallest(SEARCH), "most=2**17", "most=2**20"), "Here no size up to `most` is good enough"),
    ("returns the efficiency", smallest(swap(SEARCH, "return h\n", "return seconds(h, 1) / (p * seconds(h, p))\n")), "A whole number is wanted"),
    ("one rank compared with itself", smallest(swap(SEARCH, "seconds(h, p))", "seconds(h, 1))")), "Why does your search not come to it"),
    ("calls with the wrong arguments", smallest(swap(SEARCH, "seconds(h, 1)", "seconds(h)")), "smallest_hidden(seconds, 8"),
]  # fmt: skip

WRONG = [
    WrongAnswer(exercise=exercise, name=name, source=source, says=says)
    for exercise, answers in (("11.1", COLLECTIVES), ("11.2", LAYERS), ("11.3", BACKWARDS), ("11.4", SMALLEST))
    for name, source, says in answers
]
