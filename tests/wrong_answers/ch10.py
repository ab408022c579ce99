"""Wrong answers to the exercises of chapter 10, and what each must be told."""

from tests.wrong_answers import WrongAnswer, chapter, indented, swap_all
from tplab.course.notebooks.rewrite import keep_solution

MAPPINGS = "from tplab.tensor.mappings import copy_to_region, gather_from_region, reduce_from_region\n"


def solution(exercise: str) -> str:
    return keep_solution(chapter(10).of_role("exercise")[exercise].text) + "\n"


def replaced(exercise: str, start: str, stop: str, body: str) -> str:
    """The solution with all lines from the one that begins with `start` to before `stop` replaced by `body`."""
    lines = solution(exercise).splitlines()
    begin = next(i for i, line in enumerate(lines) if line.strip().startswith(start))
    end = next((i for i, line in enumerate(lines) if i > begin and stop and line.strip().startswith(stop)), len(lines))
    spaces = len(lines[begin]) - len(lines[begin].lstrip())
    return MAPPINGS + "\n".join([*lines[:begin], indented(body, spaces), "", *lines[end:]])


def layer(body: str) -> str:
    return replaced("10.1", "normed = self.attention_norm(x)", "def new_cache", body)


def layer_swap(*pairs: tuple[str, str]) -> str:
    return MAPPINGS + swap_all(solution("10.1"), *pairs)


DROP = "dropout(y + bias, self.hidden_dropout, self.training, sharded=False, rng=rng)"
LEAVE = f"x = residual + {DROP}"
FIRST = f"""
normed = self.attention_norm(x)
residual = normed if self.post else x
y, bias = self.attention(normed, cache=cache, rng=rng)
{LEAVE}
"""
SECOND = f"""
normed = self.mlp_norm(x)
residual = normed if self.post else x
y, bias = self.mlp(normed)
return residual + {DROP}
"""
BY_HAND = """
inner = F.gelu(self.mlp.up(self.mlp_norm(x)), approximate="tanh")
y = F.linear(inner, self.mlp.down.weight)
residual = self.mlp_norm(x) if self.post else x
"""

LAYER = [
    ("no residual at all", layer_swap((LEAVE, f"x = {DROP}"), ("return residual + ", "return ")), "A residual is missing"),
    ("no residual around the attention", layer_swap((LEAVE, f"x = {DROP}")), "A residual is missing"),
    ("no residual around the MLP", layer_swap(("return residual + ", "return ")), "A residual is missing"),
    ("the cache in eval mode only", layer_swap(("cache=cache", "cache=None if self.training else cache")), "uses the cache in eval mode but not in train mode"),
    ("no dropout with a cache", layer("training = self.training and cache is None\n" + (FIRST + SECOND).replace("self.training,", "training,")), "Which of your lines also looks at the cache"),
    ("one residual for both blocks", layer(FIRST.replace("residual =", "first = residual =") + SECOND.replace("return residual", "return first")), "starts behind the attention"),
    ("blocks side by side", layer("a, c = self.attention(self.attention_norm(x), cache=cache, rng=rng)\nm, d = self.mlp(self.mlp_norm(x))\nreturn (self.attention_norm(x) if self.post else x) + a + c + m + d"), "What does yours read"),
    ("the last biases divided by p", layer((FIRST + SECOND).replace("y + bias", "y + bias / dist.get_world_size()")), "What of yours divides it by the number of ranks"),
    ("no second norm", layer(FIRST + SECOND.replace("normed = self.mlp_norm(x)", "normed = x")), "Each block has a norm of its own"),
    ("no first norm", layer(FIRST.replace("normed = self.attention_norm(x)", "normed = x") + SECOND), "Each block has a norm of its own"),
    ("the first norm twice", layer(FIRST + SECOND.replace("self.mlp_norm", "self.attention_norm")), "Each block has a norm of its own"),
    ("norms change places", layer(FIRST.replace("attention_norm", "mlp_norm") + SECOND.replace("mlp_norm", "attention_norm")), "Each block has a norm of its own"),
    ("each norm twice", layer(FIRST.replace("self.attention_norm(x)", "self.attention_norm(self.attention_norm(x))") + SECOND), "which tensor does each of them read"),
    ("post and pre mixed up", layer_swap(("normed if self.post else x", "x if self.post else normed")), "which of the two do you keep"),
    ("post is ignored", layer_swap(("normed if self.post else x", "x")), "which of the two do you keep"),
    ("always post", layer_swap(("normed if self.post else x", "normed")), "which of the two do you keep"),
    ("post in the first block only", layer(FIRST + SECOND.replace("normed if self.post else x", "x")), "which tensor does each of them read"),
    ("norms behind the sums", layer("y, bias = self.attention(x, cache=cache, rng=rng)\nx = self.attention_norm(x + y + bias)\ny, bias = self.mlp(x)\nreturn self.mlp_norm(x + y + bias)"), "Where does your norm stand"),
    ("norms of the blocks' outputs", layer("y, bias = self.attention(x, cache=cache, rng=rng)\nx = x + self.attention_norm(y + bias)\ny, bias = self.mlp(x)\nreturn x + self.mlp_norm(y + bias)"), "Where does your norm stand"),
    ("the bias is left out", layer_swap(("y + bias", "y")), "How often do you add it"),
    ("the bias is added twice", layer_swap(("y + bias", "y + bias + bias")), "How often do you add it"),
    ("residual and bias before g", layer(FIRST + BY_HAND + "return reduce_from_region(residual + y + self.mlp.down.bias)"), "which side of g"),
    ("the residual before g", layer(FIRST + BY_HAND + "return reduce_from_region(residual + y) + self.mlp.down.bias"), "which side of g"),
    ("the bias before g", layer(FIRST + BY_HAND + "return residual + reduce_from_region(y + self.mlp.down.bias)"), "which side of g"),
    ("summed over the ranks once more", layer(FIRST + SECOND.replace("return residual + dropout(", "return residual + dropout(reduce_from_region(y) * 0 + ")), "the communication is not"),
    ("the MLP's sum is written out, over all ranks", layer(FIRST + BY_HAND + f"y, bias = reduce_from_region(y), self.mlp.down.bias\nreturn residual + {DROP}"), "did you write that was not given `group`"),
    ("the MLP first", layer(SECOND.replace("return residual +", "x = residual +") + FIRST.replace("x = residual +", "return residual +")), "In which order do yours run"),
    ("the residual is detached", layer_swap((LEAVE, LEAVE.replace("residual", "residual.detach()"))), "a gradient is not"),
    ("the attention's output is detached", layer(FIRST.replace("(y + bias", "(y.detach() + bias") + SECOND), "does not arrive"),
    ("f before the norm", layer("x = copy_to_region(x)\n" + FIRST + SECOND), "the communication is not"),
    ("dropout from the sharded state", layer_swap(("sharded=False", "sharded=True")), "hold different outputs now"),
    ("torch's dropout from the current state", layer_swap((DROP, "F.dropout(y + bias, self.hidden_dropout, self.training)")), "hold different outputs now"),
    ("rng is not handed to dropout", layer_swap((", sharded=False, rng=rng)", ", sharded=False)")), "hold different outputs now"),
    ("no dropout", layer_swap((DROP, "y + bias")), "what is dropped, the order, or the state"),
    ("no dropout behind the MLP", layer(FIRST + SECOND.replace(DROP, "y + bias")), "what is dropped, the order, or the state"),
    ("dropout before the bias", layer_swap((DROP, "dropout(y, self.hidden_dropout, self.training, sharded=False, rng=rng) + bias")), "what is dropped, the order, or the state"),
    ("dropout of the sum", layer_swap((LEAVE, LEAVE.replace("residual + dropout(y", "dropout(residual + y")), ("return residual + dropout(y", "return dropout(residual + y")), "what is dropped, the order, or the state"),
    ("one dropout more than needed", layer(FIRST + "dropout(x, self.hidden_dropout, self.training, sharded=False, rng=rng)\n" + SECOND), "what is dropped, the order, or the state"),
    ("dropout in eval mode too", layer_swap(("self.training", "True")), "eval mode, where nothing is dropped"),
    ("the attention does not get rng", layer_swap(("cache=cache, rng=rng", "cache=cache")), "From what shall it draw"),
    ("the attention does not get the cache", layer_swap(("cache=cache, rng=rng", "rng=rng")), "which argument of your forward has to reach it"),
    ("takes the pair for a tensor", layer_swap(("y, bias = self.mlp(normed)", "y, bias = self.mlp(normed), 0")), "returns two things"),
    ("returns the pair", layer(FIRST + "return self.mlp(self.mlp_norm(x))"), "One tensor [b, s, h]"),
    ("returns nothing", layer_swap(("return residual + ", "residual + ")), "One tensor [b, s, h]"),
    ("returns zeros", layer("return torch.zeros_like(x)"), "None: no gradient reaches this tensor"),
    ("writes into x", layer_swap((LEAVE, f"x = residual.data.add_({DROP})")), "writes into one of these tensors"),
]  # fmt: skip


def gpt(*pairs: tuple[str, str]) -> str:
    return MAPPINGS + swap_all(solution("10.2"), *pairs)


LOGITS = "logits = parallel_logits(x, self.embedding.weight, group=self.group)"
LOSS = "return vocab_parallel_cross_entropy(logits, targets, vocab_size=self.config.vocab_size, group=self.group)"
EMBEDDED = "x = self.embedding(ids) + self.positions(places)"
DROPPED = "x = dropout(x, self.config.dropout, self.training, sharded=False, rng=rng)"
CALLED = "x = layer(x, cache=cache[number] if cache else None, rng=rng)"

GPT = [
    ("no positions", gpt((EMBEDDED, "x = self.embedding(ids)")), "Which vector tells a token its place"),
    ("positions by token", gpt(("self.positions(places)", "self.positions(ids % self.config.seq_length)")), "Go through your lines"),
    ("positions from 1", gpt(("torch.arange(past, past + ids.shape[1]", "torch.arange(past + 1, past + 1 + ids.shape[1]"), ("self.positions(places)", "self.positions(places % self.config.seq_length)")), "Go through your lines"),
    ("the cache in eval mode only", gpt(("cache[number] if cache else None", "cache[number] if cache and not self.training else None")), "uses the cache in eval mode but not in train mode"),
    ("no final norm", gpt(("x = self.final_norm(x)", "pass")), "Behind the last layer stands a norm"),
    ("the final norm before the layers", gpt(("x = self.final_norm(x)", "pass"), (DROPPED, DROPPED + "\n        x = self.final_norm(x)")), "Go through your lines"),
    ("a norm behind each layer", gpt((CALLED, CALLED.replace("layer(x", "layer(x if number == 0 else self.final_norm(x)"))), "Go through your lines"),
    ("only the first layer", gpt(("enumerate(self.layers)", "enumerate(self.layers[:1])")), "Go through your lines"),
    ("all layers read the embedding", gpt((DROPPED, DROPPED + "\n        start = x"), (CALLED, CALLED.replace("layer(x", "layer(start"))), "Go through your lines"),
    ("the layers backwards", gpt(("enumerate(self.layers)", "reversed(list(enumerate(self.layers)))")), "Go through your lines"),
    ("gathers the logits", gpt((LOGITS, LOGITS + "\n        logits = gather_from_region(logits, self.group)")), "Which option gathered them"),
    ("gathers the logits without the padding", gpt((LOGITS, LOGITS.replace("group=", "gather=True, group="))), "What does forward return"),
    ("the table is not transposed", gpt((LOGITS, "logits = x @ self.embedding.weight")), "Write the shape next to each line"),
    ("no f before the logits", gpt((LOGITS, "logits = F.linear(x, self.embedding.weight)")), "where is the f in front of the logits"),
    ("f twice before the logits", gpt((LOGITS, LOGITS.replace("(x,", "(copy_to_region(x, self.group),"))), "gradients are not"),
    ("the table is detached", gpt((LOGITS, LOGITS.replace("weight,", "weight.detach(),"))), "both uses add to its gradient"),
    ("the table is a copy", gpt((LOGITS, LOGITS.replace("weight,", "weight.data.clone(),"))), "both uses add to its gradient"),
    ("the features are detached", gpt((LOGITS, LOGITS.replace("(x,", "(x.detach() + 0 * x.sum().detach(),"))), "gradients are not"),
    ("summed over the ranks", gpt((LOGITS, LOGITS + "\n        logits = reduce_from_region(logits, self.group)")), "Go through your lines"),
    ("padding enters the softmax", gpt((", vocab_size=self.config.vocab_size", ""), (LOGITS, "logits = F.linear(copy_to_region(x, self.group), self.embedding.weight)")), "tells the loss how many tokens"),
    ("the sum of the losses", gpt((LOSS, LOSS.replace("group=", "reduction='sum', group="))), "The mean is over the tokens"),
    ("the ignored token counts", gpt((LOSS, LOSS.replace("group=self.group)", "reduction='sum', group=self.group) / targets.numel()"))), "The mean is over the tokens"),
    ("gathers, then torch's loss", gpt((LOSS, "whole = gather_from_region(logits, self.group)[..., : self.config.vocab_size]\n        return F.cross_entropy(whole.flatten(0, 1), targets.flatten())")), "the communication is not"),
    ("torch's loss of a shard", gpt((LOSS, "return F.cross_entropy(logits.flatten(0, 1), targets.flatten().clamp(max=logits.shape[-1] - 1))")), "Go through your lines"),
    ("targets are ignored", gpt(("if targets is None:\n            return logits\n        " + LOSS, "return logits")), "a single number"),
    ("replaces the ignored targets in place", gpt((LOSS, "targets[targets < 0] = 0\n        " + LOSS)), "Which line writes into one of these tensors"),
    ("targets are moved by one", gpt(("(logits, targets,", "(logits, targets.roll(-1, 1),")), "Go through your lines"),
    ("no dropout of the embedding", gpt((DROPPED, "pass")), "what is dropped in front of the first layer"),
    ("dropout from the sharded state", gpt((DROPPED, DROPPED.replace("False", "True"))), "what is dropped in front of the first layer"),
    ("dropout before the positions", gpt((EMBEDDED + "  # [b, s, h]\n        " + DROPPED, "x = dropout(self.embedding(ids), self.config.dropout, self.training, sharded=False, rng=rng) + self.positions(places)")), "what is dropped in front of the first layer"),
    ("dropout in eval mode", gpt((DROPPED, DROPPED.replace("self.training", "True"))), "In eval mode nothing is dropped"),
    ("the layers do not get rng", gpt((", rng=rng)  # [b, s, h]\n        x = self.final", ")  # [b, s, h]\n        x = self.final")), "do they get it"),
    ("a past only with a cache", gpt(("torch.arange(past, past + ids.shape[1]", "torch.arange(past if cache else 0, (past if cache else 0) + ids.shape[1]")), "Which line looks at `cache`"),
    ("positions begin at 0 in every call", gpt(("torch.arange(past, past + ids.shape[1]", "torch.arange(0, ids.shape[1]")), "At which place of the text"),
    ("positions begin behind the new tokens", gpt(("torch.arange(past, past + ids.shape[1]", "(torch.arange(past, past + ids.shape[1]"), ("device=ids.device)", "device=ids.device) + (ids.shape[1] if past else 0)) % self.config.seq_length")), "At which place of the text"),
    ("the cache is left out", gpt(("cache[number] if cache else None", "None")), "which of the caches belongs to which layer"),
    ("one cache for all layers", gpt(("cache[number] if cache else None", "cache[0] if cache else None")), "which of the caches belongs to which layer"),
    ("the whole list of caches to each layer", gpt(("cache[number] if cache else None", "cache")), "which of the caches belongs to which layer"),
    ("the logits are not given group", gpt((LOGITS, LOGITS.replace(", group=self.group", ""))), "was not given `group=self.group`"),
    ("the loss is not given group", gpt((LOSS, LOSS.replace(", group=self.group", ""))), "was not given `group=self.group`"),
    ("returns nothing", gpt((LOSS, LOSS.replace("return ", "loss = "))), "What does forward return"),
    ("returns zeros", gpt(("return logits", "return torch.zeros_like(logits)")), "None: no gradient reaches this tensor"),
]  # fmt: skip


def shards(*pairs: tuple[str, str]) -> str:
    return swap_all(solution("10.3"), *pairs)


TURN = "if tensor.dim() == 2:\n                    tensor = tensor.t()"
QKV = "tensor = shard(tensor, 0, rank, world_size, stride=3)"
UP = "tensor = shard(tensor, 0, rank, world_size)  # [4h/p, h]"
ROWS = "tensor = shard(tensor, 1, rank, world_size)"
PAD = "table = F.pad(table, (0, 0, 0, padding))"

CHECKPOINT = [
    ("nothing is transposed", shards((TURN, "pass")), "linear weights lie [in, out]"),
    ("the square one is not", shards(("if tensor.dim() == 2:\n                    tensor", 'if tensor.dim() == 2 and ours != "attention.out":\n                    tensor')), "the square one too"),
    ("transposes what does not look like [out, in]", shards(("if tensor.dim() == 2:\n                    tensor", "if tensor.dim() == 2 and tensor.shape[0] != tensor.shape[1]:\n                    tensor")), "the square one too"),
    ("cuts, then transposes", shards((TURN, "pass"), (ROWS, ROWS + ".t()"), (QKV, QKV + "\n                    tensor = tensor.t() if tensor.dim() == 2 else tensor"), (UP, "tensor = shard(tensor, 0, rank, world_size)\n                    tensor = tensor.t() if tensor.dim() == 2 else tensor")), "linear weights lie [in, out]"),
    ("reshapes in place of transposing", shards(("tensor.t()", "tensor.reshape(tensor.shape[1], tensor.shape[0])")), "Which of them do you transpose"),
    ("Q, K, V cut as one block", shards((", stride=3", "")), "How many blocks does your cut know of"),
    ("sorted head by head", shards((QKV, "three = [part.chunk(config.num_heads) for part in tensor.chunk(3)]\n                    tensor = shard(torch.cat([head for heads in zip(*three) for head in heads]), 0, rank, world_size)")), "How many blocks does your cut know of"),
    ("the bias of Q, K, V is whole", shards(('if ours == "attention.qkv":', 'if ours == "attention.qkv" and end == "weight":'), ("elif tensor.dim() == 2", 'elif tensor.dim() == 2 and ours != "x"')), "is cut with its rows"),
    ("up's bias is whole", shards(('elif ours == "mlp.up":', 'elif ours == "mlp.up" and end == "weight":')), "is cut with its rows"),
    ("the biases behind g are cut", shards(("elif tensor.dim() == 2:\n                    tensor = shard(tensor, 1", 'elif "norm" not in ours:\n                    tensor = shard(tensor, tensor.dim() - 1')), "is cut with its rows"),
    ("the norms are cut", shards(("elif tensor.dim() == 2:\n                    tensor = shard(tensor, 1", 'elif "norm" in ours or tensor.dim() == 2:\n                    tensor = shard(tensor, tensor.dim() - 1')), "is cut with its rows"),
    ("the positions are cut", shards(('state["transformer.wpe.weight"],', 'shard(state["transformer.wpe.weight"], 1, rank, world_size),')), "is cut with its rows"),
    ("everything by rows", shards((ROWS, "tensor = shard(tensor, 0, rank, world_size)")), "cut the right dimension"),
    ("up by its second dimension", shards((UP, "tensor = shard(tensor, tensor.dim() - 1, rank, world_size)")), "cut the right dimension"),
    ("rank and world_size are ignored", shards((QKV, "pass"), (UP, "pass"), (ROWS, "pass")), "cut the right dimension"),
    ("always rank 0", shards(("rank, world_size)", "0, world_size)"), ("rank, world_size, stride", "0, world_size, stride")), "A rank gets the part of another one"),
    ("the ranks backwards", shards(("    table = state", "    rank = world_size - 1 - rank\n    table = state")), "A rank gets the part of another one"),
    ("no padding", shards((PAD, "table = table[: len(table) // world_size * world_size]")), "How many rows does the padded table have"),
    ("padded to a multiple of p only", shards(("world_size, multiple)", "world_size, 1)")), "How many rows does the padded table have"),
    ("multiple is ignored", shards(("world_size, multiple)", "world_size, 8)")), "How many rows does the padded table have"),
    ("padded in front", shards(("(0, 0, 0, padding)", "(0, 0, padding, 0)")), "How many rows does the padded table have"),
    ("padded with the last row", shards((PAD, "table = torch.cat([table, table[-1:].expand(padding, -1)])")), "what stands in the last ones"),
    ("padded with ones", shards((PAD, "table = F.pad(table, (0, 0, 0, padding), value=1.0)")), "what stands in the last ones"),
    ("the table is transposed", shards(("shard(table, 0, rank, world_size)", "shard(table, 0, rank, world_size).t()")), "Which of them do you transpose"),
    ("the output layer too", shards(("    return mine", '    mine["lm_head.weight"] = mine["embedding.weight"]\n    return mine')), "tied, so it has no weight of its own"),
    ("the masks of old files too", shards(("    return mine", '    mine |= {n: t for n, t in state.items() if n.endswith("attn.bias")}\n    return mine')), "masks of old checkpoints"),
    ("the mask for the bias", shards(('"attention.qkv":', '"attention.qkv" and end == "weight":'), ("mine[f\"layers", 'tensor = state[f"transformer.h.{number}.attn.bias"] if (ours, end) == ("attention.qkv", "bias") else tensor\n                mine[f"layers')), "shape [1, 1, 6, 6], expected [24]"),
    ("no biases", shards(('("weight", "bias")', '("weight",)')), "gets nothing"),
    ("only the first layer", shards(("range(config.num_layers)", "range(1)")), "gets nothing"),
    ("the final norm is forgotten", shards(('mine[f"final_norm.{end}"] = state[f"transformer.ln_f.{end}"]', "pass")), "gets nothing"),
    ("GPT-2's names", shards(('mine[f"layers.{number}.{ours}.{end}"]', 'mine[f"transformer.h.{number}.{theirs}.{end}"]')), "has no parameter of that name"),
    ("layers counted from 1", shards(('mine[f"layers.{number}', 'mine[f"layers.{number + 1}')), "has no parameter of that name"),
    ("the norms change places", shards(("mine[f\"layers", 'tensor = state[f"transformer.h.{number}.{dict(ln_1=\'ln_2\', ln_2=\'ln_1\')[theirs]}.{end}"] if "norm" in ours else tensor\n                mine[f"layers')), "The two norms of a layer have changed places"),
    ("each layer gets the first one's weights", shards(('state[f"transformer.h.{number}.', 'state[f"transformer.h.0.')), "Layer 1 gets what belongs to layer 0"),
    ("takes the table out of the checkpoint", shards(('state["transformer.wte.weight"]', 'state.pop("transformer.wte.weight")')), "takes something out of it"),
    ("adds the padded table to the checkpoint", shards((PAD, PAD + '\n    state["transformer.wte.weight"] = table')), "or puts something in"),
    ("float32", shards(("    return mine", "    return {name: tensor.float() for name, tensor in mine.items()}")), "copied as they are"),
    ("writes into the checkpoint", shards(("    return mine", "    state['transformer.wpe.weight'].zero_()\n    return mine")), "writes into one of these tensors"),
    ("returns a list", shards(("    return mine", "    return list(mine.items())")), "The result is a dictionary"),
    ("returns nothing", shards(("    return mine", "")), "The result is a dictionary"),
]  # fmt: skip


def generated(*pairs: tuple[str, str]) -> str:
    return MAPPINGS + swap_all(solution("10.4"), *pairs)


def best(body: str) -> str:
    return replaced("10.4", "width = logits.shape[-1]", "@torch.no_grad", body)


LOCAL = """
width = logits.shape[-1]
start = dist.get_rank(group) * width
ids = torch.arange(start, start + width, device=logits.device)
value, place = logits.masked_fill(ids >= vocab_size, -torch.inf).max(-1)
"""
GATHERED = "from tplab.tensor.mappings import all_gather\nvalues, tokens = torch.stack(all_gather(value, group)), torch.stack(all_gather(start + place, group))\n"
READ = "logits = model(text[:, past:], cache=cache, past=past)[:, -1]"

GENERATION = [
    ("each rank its own best", best(LOCAL + "return start + place"), "Each rank has chosen for itself"),
    ("each rank its own place", best(LOCAL + "return place"), "Each rank has chosen for itself"),
    ("argmax of a shard", best("return logits.argmax(-1)"), "What keeps the padding from being chosen"),
    ("the winner's place, without its offset", best(LOCAL + "from tplab.tensor.mappings import all_gather\nvalues, places = torch.stack(all_gather(value, group)), torch.stack(all_gather(place, group))\nreturn places.gather(0, values.argmax(0)[None])[0]"), "Place 3 in the shard of rank 1"),
    ("the largest id of all candidates", best(LOCAL + "token = start + place\ndist.all_reduce(token, op=dist.ReduceOp.MAX, group=group)\nreturn token"), "Only the ranks that hold the largest logit"),
    ("the lowest id of all candidates", best(LOCAL + "token = start + place\ndist.all_reduce(token, op=dist.ReduceOp.MIN, group=group)\nreturn token"), "By which rule does one of p win"),
    ("the sum of all candidates", best(LOCAL + "token = start + place\ndist.all_reduce(token, group=group)\nreturn token"), "Only the ranks that hold the largest logit"),
    ("the smallest logit", generated(("-torch.inf).max(-1)", "torch.inf).min(-1)"), ("ReduceOp.MAX", "ReduceOp.MIN")), "By which rule does one of p win"),
    ("ties go to the highest rank", generated(("vocab_size)  # [b]: no candidate", "-1)  # [b]: no candidate"), ("op=dist.ReduceOp.MIN", "op=dist.ReduceOp.MAX")), "take the lowest of these ids"),
    ("ties are summed", generated(("vocab_size)  # [b]: no candidate", "0)  # [b]: no candidate"), ("op=dist.ReduceOp.MIN, ", "")), "take the lowest of these ids"),
    ("a rank decides ties for itself", best(LOCAL + "best = value.clone()\ndist.all_reduce(best, op=dist.ReduceOp.MAX, group=group)\ntoken = torch.where(value == best, start + place, vocab_size)\nlowest = token.clone()\ndist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)\nreturn torch.where(value == best, token, lowest)"), "take the lowest of these ids"),
    ("the last of equal ones in a shard", best("width = logits.shape[-1]\nstart = dist.get_rank(group) * width\nids = torch.arange(start, start + width, device=logits.device)\nreal = logits.masked_fill(ids >= vocab_size, -torch.inf)\nvalue, place = real.flip(-1).max(-1)\nplace = width - 1 - place\n" + GATHERED + "return tokens.gather(0, values.argmax(0)[None])[0]"), "take the lowest of these ids"),
    ("max without its dimension", generated(("-torch.inf).max(-1)", "-torch.inf).max()")), "which dtype has each tensor that you send"),
    ("padding may be chosen", generated(("logits.masked_fill(ids >= vocab_size, -torch.inf).max(-1)", "logits.max(-1)")), "the padding included"),
    ("padding is set to zero", generated(("-torch.inf)", "0.0)")), "the padding included"),
    ("padding is set to -100", generated(("-torch.inf)", "-100.0)")), "the padding included"),
    ("padding masked by place", generated(("ids >= vocab_size", "ids - start >= vocab_size")), "the padding included"),
    ("off by one at the padding", generated(("ids >= vocab_size", "ids > vocab_size")), "the padding included"),
    ("cuts the padding off: nothing is left on some ranks", best("width = logits.shape[-1]\nstart = dist.get_rank(group) * width\nvalue, place = logits[:, : vocab_size - start].max(-1)\n" + GATHERED + "return tokens.gather(0, values.argmax(0)[None])[0]"), "nothing but padding"),
    ("ids travel as logits", best(LOCAL + "from tplab.tensor.mappings import all_gather\npairs = torch.stack(all_gather(torch.stack([value, (start + place).to(value.dtype)], -1), group))\nwinner = pairs[..., 0].argmax(0)\nreturn pairs[..., 1].gather(0, winner[None])[0].long()"), "In which dtype do your ids travel"),
    ("gathers all logits", best("whole = gather_from_region(logits, group)[:, :vocab_size]\nreturn whole.argmax(-1)"), "How many of a rank's logits can be the largest"),
    ("all-reduces all logits", best("width, p = logits.shape[-1], dist.get_world_size(group)\nwhole = logits.new_full((len(logits), p * width), -torch.inf)\nwhole[:, dist.get_rank(group) * width :][:, :width] = logits\ndist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group)\nreturn whole[:, :vocab_size].argmax(-1)"), "How many of a rank's logits can be the largest"),
    ("sends the 100 best", best("width = logits.shape[-1]\nstart = dist.get_rank(group) * width\nids = torch.arange(start, start + width, device=logits.device)\nfrom tplab.tensor.mappings import all_gather\nvalues, order = logits.masked_fill(ids >= vocab_size, -torch.inf).sort(dim=-1, descending=True, stable=True)\nvalues, tokens = (torch.cat(all_gather(t[:, :100].contiguous(), group), 1) for t in (values, ids[order]))\nreturn tokens.gather(1, values.argmax(1, keepdim=True))[:, 0]"), "How many of a rank's logits can be the largest"),
    ("the default group", generated((", group=group)", ")"), ("get_rank(group)", "get_rank()")), "default group of all ranks"),
    ("the rank in the default group", generated(("get_rank(group)", "get_rank()")), "default group of all ranks"),
    ("one id for the whole batch", generated(("    return token\n", "    return token.min()\n")), "one id for each text"),
    ("ids [b, 1]", generated(("    return token\n", "    return token[:, None]\n"), ("token[:, None]]", "token]"), ("torch.cat([text, token]", "torch.cat([text, token]")), "one id for each text"),
    ("ids as float", generated(("    return token\n", "    return token.double()\n")), "dtype float64, expected int64"),
    ("returns what all_reduce returns", generated(("    dist.all_reduce(token, op=dist.ReduceOp.MIN, group=group)\n    return token", "    return dist.all_reduce(token, op=dist.ReduceOp.MIN, group=group)")), "a tensor of ids [b]"),
    ("masks the caller's logits in place", generated(("logits.masked_fill(ids", "logits.masked_fill_(ids")), "belong to the caller"),
    ("generate: no cache", generated((READ, "logits = model(text)[:, -1]")), "Each token is read once"),
    ("generate: the whole text again, with the cache", generated(("model(text[:, past:], cache=cache, past=past)", "model(text, cache=cache, past=0)")), "Each token is read once"),
    ("generate: past is forgotten", generated(("cache=cache, past=past)", "cache=cache)")), "What is it in the second call"),
    ("generate: past is one too large", generated(("cache=cache, past=past)", "cache=cache, past=past + 1 if past else 0)")), "Each token is read once"),
    ("generate: the prompt token by token", generated(("    for _ in range(max_new_tokens):", "    for past in range(s - 1):\n        model(text[:, past : past + 1], cache=cache, past=past)\n    past = max(s - 1, 0)\n    for _ in range(max_new_tokens):")), "Each token is read once"),
    ("generate: a new cache in every step", generated(("        logits = model(text", "        cache = model.new_cache(b, s + max_new_tokens)\n        logits = model(text")), "Each token is read once"),
    ("generate: the last token is read though nobody asks", generated(("    return text\n", "    model(text[:, past:], cache=cache, past=past)\n    return text\n")), "Each token is read once"),
    ("generate: the first place's logits", generated(("past=past)[:, -1]", "past=past)[:, 0]")), "The next token is chosen from the logits of the last place"),
    ("generate: the token is no column", generated(("token[:, None]]", "token]")), "text grows by one column"),
    ("generate: a rank stops where the token is another rank's", "def is_here(token, logits, group):\n    return (token // logits.shape[-1] == dist.get_rank(group)).any()\n\n\n" + generated(("dim=1)", "dim=1)\n        if not is_here(token, logits, model.group):\n            break")), "A rank that stops, or chooses, by itself"),
    ("generate: one token too many", generated(("range(max_new_tokens)", "range(max_new_tokens + 1)")), "how many steps does your loop make"),
    ("generate: one token too few", generated(("range(max_new_tokens)", "range(max_new_tokens - 1)")), "how many steps does your loop make"),
    ("generate: without the prompt", generated(("    return text\n", "    return text[:, s:]\n")), "The result is the whole text"),
    ("generate: the first text for all", generated(("text = torch.cat([text, token[:, None]]", "text = torch.cat([text, token[:1, None].expand(b, 1)]")), "from which texts of the batch"),
    ("generate: a rank's own argmax", generated(("token = best_token(logits, model.config.vocab_size, model.group)", "token = logits.argmax(-1)")), "The next token is chosen"),
    ("generate: without the group", generated((", model.config.vocab_size, model.group)", ", model.config.vocab_size)")), "hand `model.group` on"),
    ("generate: the padded vocabulary", generated(("model.config.vocab_size, model.group)", "10**9, model.group)")), "The next token is chosen"),
    ("generate: gathers the logits", generated(("token = best_token(logits, model.config.vocab_size, model.group)", "token = gather_from_region(logits, model.group)[:, : model.config.vocab_size].argmax(-1)")), "Does `generate` use `best_token`"),
    ("generate: writes into the prompt", generated(("text = torch.cat([text, token[:, None]], dim=1)", "text = torch.cat([text, token[:, None]], dim=1)\n        prompt[:, 0] = 0")), "belong to the caller"),
    ("generate: returns a list", generated(("    return text\n", "    return text.tolist()\n")), "What does yours return"),
]  # fmt: skip

WRONG = [
    WrongAnswer(exercise=exercise, name=name, source=source, says=says)
    for exercise, answers in (("10.1", LAYER), ("10.2", GPT), ("10.3", CHECKPOINT), ("10.4", GENERATION))
    for name, source, says in answers
]
