"""Wrong answers to the exercises of chapter 09, and what each must be told."""

from tests.wrong_answers import WrongAnswer, indented, swap


def shard(body: str) -> str:
    return f"""
def draw_shard(shape, dim, seed, group=None):
{indented(body, 4)}
"""


SHARD = """
rank, p = dist.get_rank(group), dist.get_world_size(group)
std = (2 / sum(shape)) ** 0.5
shard_shape = list(shape)
shard_shape[dim] //= p
generator = torch.Generator().manual_seed(seed + rank)
return torch.empty(shard_shape).normal_(0.0, std, generator=generator)
"""
LAST = "return torch.empty(shard_shape).normal_(0.0, std, generator=generator)"

FIRST_VALUES = [
    ("xavier_normal_ on the shard", shard(swap(SHARD, LAST, "return nn.init.xavier_normal_(torch.empty(shard_shape), generator=generator)")), "from which shape must the standard deviation come"),
    ("one seed for all ranks", shard(swap(SHARD, "seed + rank", "seed")), "All ranks draw the same numbers"),
    ("xavier_normal_ on the shard, one seed", shard(swap(swap(SHARD, LAST, "return nn.init.xavier_normal_(torch.empty(shard_shape), generator=generator)"), "seed + rank", "seed")), "All ranks draw the same numbers"),
    ("the current state", shard(swap(SHARD, ", generator=generator", "")), "It takes `generator=`"),
    ("seeds the current state", shard(swap(SHARD, LAST, "torch.manual_seed(seed + rank)\nreturn torch.empty(shard_shape).normal_(0.0, std)")), "Which generator belongs to you alone"),
    ("also draws from the current state", shard(swap(SHARD, LAST, "torch.rand(1)\n" + LAST)), "Which generator belongs to you alone"),
    ("the shard of a master", shard(swap(swap(SHARD, "seed + rank", "seed"), LAST, "return torch.empty(shape).normal_(0.0, std, generator=generator).chunk(p, dim)[rank].clone()")), "drawn for the whole weight and then cut"),
    ("the shard of a master of its own", shard(swap(SHARD, LAST, "return torch.empty(shape).normal_(0.0, std, generator=generator).chunk(p, dim)[rank].clone()")), "drawn for the whole weight and then cut"),
    ("makes the whole weight beside it", shard(swap(SHARD, LAST, "torch.empty(shape)\n" + LAST)), "Which shape do you hand to `torch.empty`"),
    ("the whole weight", shard(swap(SHARD, "shard_shape[dim] //= p\n", "")), "What shape is a shard"),
    ("always cut along the first dimension", shard(swap(SHARD, "[dim] //=", "[0] //=")), "What shape is a shard"),
    ("the variance for the standard deviation", shard(swap(SHARD, "** 0.5", "")), "the 2 or the root is missing"),
    ("standard deviation 1", shard(swap(SHARD, "(0.0, std, ", "(0.0, 1.0, ")), "the 2 or the root is missing"),
    ("the fan-in alone", shard(swap(SHARD, "(2 / sum(shape))", "(1 / shape[1])")), "the 2 or the root is missing"),
    ("the default group", shard(swap(SHARD, "(group)", "()")), "counts all four ranks"),
    ("rank 0 draws and broadcasts its seed", shard("dist.broadcast(torch.tensor([seed]), 0 if group is None else dist.get_global_rank(group, 0), group=group)\n" + SHARD.strip()), "What does a rank that draws for itself need from the others"),
    ("the ranks count down", shard(swap(SHARD, "seed + rank", "seed + p - 1 - rank")), "A rank has the numbers of another rank"),
    ("uniform numbers", shard(swap(SHARD, ".normal_(0.0, std,", ".uniform_(-std, std,")), "the distribution, normal with mean 0"),
    ("seed times rank", shard(swap(SHARD, "seed + rank", "seed * rank")), "the generator's seed, `seed + rank`"),
    ("the generator is kept for the next call", "GENERATORS = {}\n" + shard(swap(SHARD, "generator = torch.Generator().manual_seed(seed + rank)", "generator = GENERATORS.setdefault((seed, rank), torch.Generator().manual_seed(seed + rank))")), "a random generator whose state has changed"),
    ("returns nothing", shard(swap(SHARD, "return ", "")), "Does every path through the function"),
]  # fmt: skip


def seeds(body: str) -> str:
    return f"""
def stream_seeds(seed, rank, world_size, copy=0):
{indented(body, 4)}
"""


FIRST = "first = seed + 1 + 2000 * copy\n"
ANSWER = 'return {"init": seed, "replicated": first, "sharded": first + 1 + rank}'

SEEDS = [
    ("one seed for everything", seeds('return {"init": seed, "replicated": seed, "sharded": seed}'), "Write down the seeds"),
    ("seed + rank for what is sharded, seed + 1 for what is replicated", seeds('return {"init": seed, "replicated": seed + 1 + 5000 * copy, "sharded": seed + 5000 * copy + rank + (copy > 0)}'), "never reaches the next one"),
    ("seed + rank reaches init", seeds('return {"init": seed, "replicated": seed + 7777 + 2000 * copy, "sharded": seed + rank + 2000 * copy}'), "never reaches the next one"),
    ("what is sharded has one seed on all ranks", seeds(FIRST + swap(ANSWER, "first + 1 + rank", "first + 1")), "is too small"),
    ("what is replicated has a seed for each rank", seeds("first = seed + 1 + 4000 * copy\n" + swap(ANSWER, '"replicated": first', '"replicated": first + 2000 + rank')), "What may be in this seed, and what not"),
    ("init has a seed for each rank", seeds(FIRST + swap(ANSWER, '"init": seed', '"init": seed + 10**8 + rank')), "May the rank, the number of ranks or the copy be in it"),
    ("init has a seed for each copy", seeds(FIRST + swap(ANSWER, '"init": seed', '"init": seed + 10**8 + copy')), "May the rank, the number of ranks or the copy be in it"),
    ("init depends on p", seeds(FIRST + swap(ANSWER, '"init": seed', '"init": seed + 10**8 * world_size')), "May the rank, the number of ranks or the copy be in it"),
    ("what is replicated depends on p", seeds("first = seed + 1 + 2000 * copy\n" + swap(ANSWER, '"replicated": first', '"replicated": first + 10**7 * world_size')), "What may be in this seed, and what not"),
    ("copies one apart", seeds(swap(FIRST, "2000 * copy", "copy") + swap(ANSWER, "first + 1 + rank", "first + 5000 + rank")), "from rank to rank or from copy to copy"),
    ("copies ten apart", seeds(swap(FIRST, "2000", "10") + ANSWER), "never reaches the next one"),
    ("the copies are forgotten", seeds("first = seed + 1\n" + ANSWER), "from rank to rank or from copy to copy"),
    ("rank times copy", seeds(FIRST + swap(ANSWER, "first + 1 + rank", "seed + 10**8 + rank * (copy + 1)")), "from rank to rank or from copy to copy"),
    ("ranks 2**32 apart", seeds(FIRST + swap(ANSWER, "1 + rank", "1 + rank * 2**32")), "last 32 bits"),
    ("seeds that do not follow the run's", seeds(swap(FIRST, "seed + ", "10**8 + ") + ANSWER), "Which of your seeds does not contain `seed`"),
    ("seeds below 2**19", seeds(FIRST.replace("2000", "1001") + swap(ANSWER, "first + 1 + rank", "(first + 1 + rank) % 2**19").replace("first,", "first % 2**19,")), "Does one of your lines limit the seeds to a smaller range"),
    ("copies 128 apart", seeds(swap(FIRST, "2000", "128") + ANSWER), "never reaches the next one"),
    ("32 bits of a hash", "import hashlib\n" + seeds("def number(*parts):\n    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], 'big')\n\nreturn {'init': number(seed), 'replicated': number(seed, copy), 'sharded': number(seed, copy, rank)}"), "Do your seeds come from a hash"),
    ("63 bits of a hash", "import hashlib\n" + seeds("def number(*parts):\n    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], 'big') >> 1\n\nreturn {'init': number(seed), 'replicated': number(seed, copy), 'sharded': number(seed, copy, rank)}"), "Do your seeds come from a hash"),
    ("the hash of a name", seeds(FIRST + swap(ANSWER, "first + 1 + rank", "first + 10**8 + 10**6 * (hash('sharded') % 10**9) + rank")), "of a text is another number in every process"),
    ("what is replicated comes behind 999 copies, not 1000", seeds('return {"init": seed, "sharded": seed + 1 + 1000 * copy + rank, "replicated": seed + 10**6 + copy}'), "never reaches the next one"),
    ("each stream its own multiple of the seed", seeds('return {"init": seed, "replicated": 2 * seed + copy, "sharded": 3 * seed + 1000 * copy + rank}'), "With seed 0, and only with a small one, two streams meet"),
    ("downwards", seeds('first = seed - 1 - 1001 * copy\nreturn {"init": seed, "replicated": first, "sharded": first - 1 - rank}'), "none of them negative"),
    ("negative", seeds(FIRST + swap(ANSWER, "first + 1 + rank", "-first - rank")), "none of them negative"),
    ("tensors", seeds(FIRST + swap(ANSWER, "first + 1 + rank", "torch.tensor(first + 1 + rank)")), "of whole numbers"),
    ("a list", seeds(FIRST + "return [seed, first, first + 1 + rank]"), "The result is a dictionary"),
    ("returns nothing", seeds(FIRST), "The result is a dictionary"),
]  # fmt: skip

ADD = """
if name in self.states or seed in self.seeds:
    raise ValueError(f"the name {name!r} or the seed {seed} is taken")
current = get_state()
torch.manual_seed(seed)
self.states[name] = get_state()
self.seeds.add(seed)
set_state(current)
"""
FORK = """
outside = get_state()
set_state(self.states[name])
try:
    yield
finally:
    self.states[name] = get_state()
    set_state(outside)
"""


def tracker(
    fork: str = FORK,
    add: str = ADD,
    init: str = "self.states = {}\nself.seeds = set()",
    default: str = '"sharded"',
    save: str = "return dict(self.states)",
    load: str = "self.states = dict(state)",
) -> str:
    return f"""
class RNGTracker:
    def __init__(self):
{indented(init, 8)}

    def add(self, name, seed):
{indented(add, 8)}

    @contextmanager
    def fork(self, name={default}):
{indented(fork, 8)}

    def state_dict(self):
{indented(save, 8)}

    def load_state_dict(self, state):
{indented(load, 8)}
"""


NO_FINALLY = (
    "outside = get_state()\nset_state(self.states[name])\nyield\nself.states[name] = get_state()\nset_state(outside)"
)
KEPT_IN_TRACKER = swap(FORK, "outside = get_state()", "self.outside = get_state()").replace(
    "set_state(outside)", "set_state(self.outside)"
)
SWALLOWS = swap(FORK, "finally:", "except Exception:\n    pass\nfinally:")

TRACKER = [
    ("not put back after an exception", tracker(NO_FINALLY), "which statement runs them all the same"),
    ("takes the state out while the fork lasts", tracker("outside = get_state()\nset_state(self.states.pop(name))\nyield\nself.states[name] = get_state()\nset_state(outside)"), "The block within `fork` raises here"),
    ("put back after an Exception only", tracker("def put_back():\n    self.states[name] = get_state()\n    set_state(outside)\n\noutside = get_state()\nset_state(self.states[name])\ntry:\n    yield\nexcept Exception:\n    put_back()\n    raise\nelse:\n    put_back()"), "which statement runs in both cases"),
    ("not kept after an exception", tracker("outside = get_state()\nset_state(self.states[name])\ntry:\n    yield\n    self.states[name] = get_state()\nfinally:\n    set_state(outside)"), "a block that went well, or always"),
    ("swallows the exception", tracker(SWALLOWS), "swallows or replaces it"),
    ("always from the same state", tracker(swap(FORK, "    self.states[name] = get_state()\n", "    pass\n")), "the same mask as the first"),
    ("seeds anew in each fork", tracker("outside = get_state()\ntorch.manual_seed(self.states[name])\ntry:\n    yield\nfinally:\n    set_state(outside)", swap(ADD, "self.states[name] = get_state()", "self.states[name] = seed")), "the same mask as the first"),
    ("new names in front, new states at the end", tracker(swap(FORK, "outside =", "name = self.names.index(name)\noutside ="), swap(swap(ADD, "in self.states", "in self.names"), "self.states[name] = get_state()", "self.names.insert(0, name)\nself.states.append(get_state())"), "self.names, self.states, self.seeds = [], [], set()"), "One name draws what belongs to another"),
    ("does not put the named state in place", tracker(swap(FORK, "set_state(self.states[name])\n", "")), "torch still draws from its own current state"),
    ("keeps nothing and puts nothing in place", tracker("yield"), "torch still draws from its own current state"),
    ("does not put back what was outside", tracker(swap(FORK, "    set_state(outside)\n", "")), "what torch draws outside is not what it draws without a tracker"),
    ("puts it back before it keeps", tracker("outside = get_state()\nset_state(self.states[name])\ntry:\n    yield\nfinally:\n    set_state(outside)\n    self.states[name] = get_state()"), "has to go on exactly where its last fork left it"),
    ("add leaves the current state seeded", tracker(add=swap(ADD, "set_state(current)\n", "")), "what does `torch.manual_seed` within `add` do to it"),
    ("add draws a number", tracker(add=swap(ADD, "set_state(current)\n", "set_state(current)\ntorch.rand(1)\n")), "what torch draws outside is not"),
    ("one place for what was outside", tracker(KEPT_IN_TRACKER), "where the inner fork overwrites it"),
    ("moves on where nothing was drawn", tracker(swap(FORK, "finally:\n", "finally:\n    if torch.equal(get_state(), self.states[name]):\n        torch.rand(1)\n")), "Nothing was drawn in this fork"),
    ("fork draws a number", tracker(swap(FORK, "try:", "torch.rand(1)\ntry:")), "where is it before, within, between and after"),
    ("one state for all names", tracker(swap(FORK, "self.states[name]", "self.states['replicated']")), "Follow the state of one name"),
    ("the default name is another", tracker(default='"replicated"'), "Which name is the default"),
    ("no default name", swap(tracker(), 'name="sharded"', "name"), "the name has a default"),
    ("state_dict returns its own dictionary", tracker(save="return self.states"), "Whose dictionary is it"),
    ("load_state_dict keeps the caller's dictionary", tracker(load="self.states = state"), "Whose dictionary is it"),
    ("load_state_dict does nothing", tracker(load="pass"), "Whose dictionary is it"),
    ("state_dict returns seeds", tracker(save="return {name: 0 for name in self.states}"), "What do yours return and take"),
    ("state_dict returns nothing", tracker(save="dict(self.states)"), "What do yours return and take"),
    ("a name may be added twice", tracker(add=swap(ADD, "name in self.states or ", "")), "What should it raise"),
    ("a seed may be added twice", tracker(add=swap(ADD, " or seed in self.seeds", "")), "What does `add` have to remember"),
    ("compares the states, not the seeds", tracker(add="new = torch.Generator(device()).manual_seed(seed).get_state()\nif name in self.states or any(torch.equal(new, state) for state in self.states.values()):\n    raise ValueError(name, seed)\nself.states[name] = new"), "What should it compare instead of the current states"),
    ("an assertion for what is taken", tracker(add=swap(ADD, 'if name in self.states or seed in self.seeds:\n    raise ValueError(f"the name {name!r} or the seed {seed} is taken")', "assert name not in self.states and seed not in self.seeds")), "What does `add` raise for a name or a seed"),
    ("load_state_dict writes into the states", tracker(load="for name in self.states:\n    self.states[name].copy_(state[name])"), "if a load writes into them"),
    ("a name whose seed was refused stays", tracker(add="if name in self.states:\n    raise ValueError(name)\nself.states[name] = torch.Generator(device()).manual_seed(seed).get_state()\nif seed in self.seeds:\n    raise ValueError(seed)\nself.seeds.add(seed)"), "look at both before you keep anything"),
    ("a seed whose name was refused stays", tracker(add="if seed in self.seeds:\n    raise ValueError(seed)\nself.seeds.add(seed)\nif name in self.states:\n    raise ValueError(name)\nself.states[name] = torch.Generator(device()).manual_seed(seed).get_state()"), "look at both before you keep anything"),
    ("all trackers share their states", tracker(add=ADD.replace("self.", "RNGTracker."), init="self.states, self.seeds = RNGTracker.states, RNGTracker.seeds").replace("class RNGTracker:\n", "class RNGTracker:\n    states, seeds = {}, set()\n\n"), "what to its class"),
    ("no context manager", swap(swap(tracker(), "    @contextmanager\n", ""), 'try:', 'try:'), "your code fails"),
    ("add starts at another seed on rank 0", tracker(add=swap(ADD, "manual_seed(seed)", "manual_seed(seed + 1)")), "Follow the state of one name"),
]  # fmt: skip

FORWARD = """
inner = F.gelu(self.up(x))
with self.tracker.fork("sharded"):
    inner = F.dropout(inner, self.rate, self.training)
y = self.down(inner)
with self.tracker.fork("replicated"):
    y = F.dropout(y, self.rate, self.training)
return x + y
"""
INIT = """
options = {"group": group, "device": device, "dtype": dtype}
self.up = ColumnParallelLinear(hidden_size, ffn_hidden_size, **options)
self.down = RowParallelLinear(ffn_hidden_size, hidden_size, **options)
self.rate, self.tracker = rate, tracker
"""


def block(forward: str = FORWARD, init: str = INIT) -> str:
    return f"""
class ParallelBlock(nn.Module):
    def __init__(self, hidden_size, ffn_hidden_size, rate, tracker, *, group=None, device=None, dtype=None):
        super().__init__()
{indented(init, 8)}

    def forward(self, x):
{indented(forward, 8)}
"""


BLOCK = [
    ("both from 'replicated'", block(swap(FORWARD, '"sharded"', '"replicated"')), "drop the same places of different columns"),
    ("both from 'sharded'", block(swap(FORWARD, '"replicated"', '"sharded"')), "from here on they hold different tensors"),
    ("the names change places", block(FORWARD.replace("sharded", "S").replace("replicated", "sharded").replace("S", "replicated")), "The two names have changed places"),
    ("no fork at all", block("inner = F.dropout(F.gelu(self.up(x)), self.rate, self.training)\nreturn x + F.dropout(self.down(inner), self.rate, self.training)"), "Does the dropout stand within the `with`"),
    ("no fork inside", block(swap(FORWARD, 'with self.tracker.fork("sharded"):\n    inner', 'inner')), "Does the dropout stand within the `with`"),
    ("no fork at the end", block(swap(FORWARD, 'with self.tracker.fork("replicated"):\n    y', 'y')), "Does the dropout stand within the `with`"),
    ("dropout behind the with", block(swap(FORWARD, 'with self.tracker.fork("sharded"):\n    inner', 'with self.tracker.fork("sharded"):\n    pass\ninner')), "Does the dropout stand within the `with`"),
    ("drops in eval mode too", block(swap(FORWARD, ", self.training", "")), "says whether the block is training"),
    ("drops where gradients are computed", block(FORWARD.replace("self.training", "torch.is_grad_enabled()")), "What else does your code look at"),
    ("draws in eval mode too", block("if not self.training:\n    with self.tracker.fork('sharded'):\n        torch.rand(1, dtype=x.dtype, device=x.device)\n" + FORWARD.strip()), "What draws more than once in a pass, or in eval mode"),
    ("the residual is dropped too", block(swap(FORWARD, "    y = F.dropout(y, self.rate, self.training)\nreturn x + y", "    return F.dropout(x + y, self.rate, self.training)")), "Only what the MLP adds is dropped"),
    ("no dropout inside", block(swap(FORWARD, 'with self.tracker.fork("sharded"):\n    inner = F.dropout(inner, self.rate, self.training)\n', "")), "A dropout is missing"),
    ("no dropout at the end", block(swap(FORWARD, 'with self.tracker.fork("replicated"):\n    y = F.dropout(y, self.rate, self.training)\n', "")), "A dropout is missing"),
    ("no dropout", block("return x + self.down(F.gelu(self.up(x)))"), "A dropout is missing"),
    ("draws a second mask", block(swap(FORWARD, "    inner = F.dropout(inner, self.rate, self.training)", "    kept = F.dropout(inner, self.rate, self.training)\n    F.dropout(inner, self.rate, self.training)\ninner = kept")), "What draws more than once in a pass"),
    ("no residual", block(swap(FORWARD, "return x + y", "return y")), "Where do your steps, or their order, differ"),
    ("no activation", block(swap(FORWARD, "F.gelu(self.up(x))", "self.up(x)")), "Where do your steps, or their order, differ"),
    ("dropout before GELU's layer", block('with self.tracker.fork("sharded"):\n    z = F.dropout(self.up(x), self.rate, self.training)\ny = self.down(F.gelu(z))\nwith self.tracker.fork("replicated"):\n    y = F.dropout(y, self.rate, self.training)\nreturn x + y'), "On which side of GELU does yours stand"),
    ("what is kept is not divided by 1 - rate", block("def drop(y, name):\n    if not self.training:\n        return y\n    with self.tracker.fork(name):\n        return y * torch.empty_like(y).bernoulli_(1 - self.rate)\nreturn x + drop(self.down(drop(F.gelu(self.up(x)), 'sharded')), 'replicated')"), "divided by 1 - rate, so that the mean stays"),
    ("whole columns are dropped", block(swap(FORWARD, "inner = F.dropout(inner,", "inner = inner * F.dropout(torch.ones_like(inner[..., :1]),")), "Where do your steps, or their order, differ"),
    ("the rate is always 0.1", block(swap(FORWARD, "self.rate", "0.1")), "Where do your steps, or their order, differ"),
    ("seeds the same for all ranks in forward", block("torch.manual_seed(1)\n" + FORWARD.strip()), "Who draws outside of the forks"),
    ("the mask is broadcast from rank 0", block(swap(FORWARD, "return x + y", "dist.broadcast(y.detach().clone(), 0)\nreturn x + y")), "Random numbers need none"),
    ("the inner mask is detached", block(swap(FORWARD, "y = self.down(inner)", "y = self.down(inner.detach())")), "Which step does autograd not know about"),
    ("adds into x", block(swap(FORWARD, "return x + y", "x.data += y\nreturn x")), "Which line writes into one of these tensors"),
    ("adds into x when nothing needs a gradient", block(swap(FORWARD, "return x + y", "return x + y if torch.is_grad_enabled() else x.add_(y)")), "Which line writes into one of these tensors"),
    ("group is not passed on", block(init=swap(INIT, '"group": group', '"group": None')), "Which layer was not given `group`"),
    ("a name that is not there", block(swap(FORWARD, '"sharded"', '"parallel"')), "the name of a state"),
    ("returns zeros", block("return torch.zeros_like(x)"), "rank 0 all zeros"),
]  # fmt: skip

CHECKPOINT = """
before = tracker.state_dict()

@contextmanager
def replay():
    now = tracker.state_dict()
    tracker.load_state_dict(before)
    try:
        yield
    finally:
        tracker.load_state_dict(now)

return torch_checkpoint(function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), replay()))
"""


def replay(body: str) -> str:
    return f"""
def checkpoint(function, *args, tracker):
{indented(body, 4)}
"""


LATE = "context_fn=lambda: (nullcontext(), replay())"
OWN = """
class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.before, ctx.current = tracker.state_dict(), get_state()
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, dy):
        now, current = tracker.state_dict(), get_state()
        tracker.load_state_dict(ctx.before)
        set_state(ctx.current)
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = function(x)
        tracker.load_state_dict(now)
        set_state(current)
        torch.autograd.backward(y, dy)
        return x.grad

return Again.apply(*args)
"""

REPLAY = [
    ("torch's own", replay("return torch_checkpoint(function, *args, use_reentrant=False)"), "Who puts back those of the tracker"),
    ("torch's own, and preserve_rng_state=True", replay("return torch_checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True)"), "Who puts back those of the tracker"),
    ("torch's own, reentrant", replay("return torch_checkpoint(function, *args, use_reentrant=True)"), "Who puts back those of the tracker"),
    ("no checkpointing", replay("return function(*args)"), "this is not checkpointing"),
    ("no checkpointing, run twice", replay("before = tracker.state_dict()\nwith torch.no_grad():\n    function(*args)\ntracker.load_state_dict(before)\nreturn function(*args)"), "Already the output is another one"),
    ("noted down after the first run", replay(swap(CHECKPOINT, "before = tracker.state_dict()\n", "before = {}\n").replace("return torch_checkpoint(function", "out = torch_checkpoint(function") + "\nbefore.update(tracker.state_dict())\nreturn out"), "when were they noted down"),
    ("noted down in the second run", replay(swap(CHECKPOINT, "tracker.load_state_dict(before)", "tracker.load_state_dict(tracker.state_dict())")), "when were they noted down"),
    ("not put back afterwards", replay(swap(CHECKPOINT, "        tracker.load_state_dict(now)", "        pass")), "which did you not put back"),
    ("the second run goes on from its end", replay(swap(CHECKPOINT, "tracker.load_state_dict(now)", "tracker.load_state_dict(before)")), "which did you not put back"),
    ("only what is sharded", replay(swap(CHECKPOINT, "tracker.load_state_dict(before)", "tracker.load_state_dict({**now, **{name: state for name, state in before.items() if 'sharded' in name}})")), "In which one does the second run start somewhere else"),
    ("only what is replicated", replay(swap(CHECKPOINT, "tracker.load_state_dict(before)", "tracker.load_state_dict({**now, 'replicated': before['replicated']})")), "In which one does the second run start somewhere else"),
    ("the current state is not preserved", replay(swap(CHECKPOINT, "use_reentrant=False, ", "use_reentrant=False, preserve_rng_state=False, ")), "In which one does the second run start somewhere else"),
    ("the contexts change places", replay(swap(CHECKPOINT, "(nullcontext(), replay())", "(replay(), nullcontext())")), "which of the two contexts stands around it"),
    ("both contexts replay", replay(swap(CHECKPOINT, "(nullcontext(), replay())", "(replay(), replay())")), "which did you not put back"),
    ("one note for all calls", replay(swap(CHECKPOINT, "before = tracker.state_dict()", "if not hasattr(tracker, 'before'):\n    tracker.before = tracker.state_dict()\nbefore = tracker.before")), "has each call states of its own"),
    ("seeds anew in the second run", replay(swap(CHECKPOINT, "    tracker.load_state_dict(before)", "    torch.manual_seed(0)\n    tracker.load_state_dict(before)")), "In which one does the second run start somewhere else"),
    ("an autograd function that knows only x", replay(OWN), "use_reentrant=False"),
    ("reentrant, with the states", replay("before = tracker.state_dict()\nruns = []\ndef run(*inputs):\n    now = tracker.state_dict()\n    again = bool(runs)\n    runs.append(1)\n    if again:\n        tracker.load_state_dict(before)\n    out = function(*inputs)\n    if again:\n        tracker.load_state_dict(now)\n    return out\nreturn torch_checkpoint(run, *args, use_reentrant=True)"), "use_reentrant=False"),
    ("only the first argument", replay(swap(CHECKPOINT, "function, *args,", "function, args[0],")), "Do both reach it, in both of its runs"),
    ("the output is detached", replay(swap(CHECKPOINT, "replay()))", "replay())).detach()")), "A gradient does not arrive"),
    ("returns nothing", replay(swap(CHECKPOINT, "return torch_checkpoint", "torch_checkpoint")), "what `function(x)` returns"),
]  # fmt: skip

WRONG = [
    WrongAnswer(exercise=exercise, name=name, source=source, says=says)
    for exercise, answers in (
        ("9.1", FIRST_VALUES),
        ("9.2", SEEDS),
        ("9.3", TRACKER),
        ("9.4", BLOCK),
        ("9.5", REPLAY),
    )
    for name, source, says in answers
]
