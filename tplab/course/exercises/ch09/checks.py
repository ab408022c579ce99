"""The checks of exercises 9.1, same or different, and 9.2, seeds that never meet."""

import builtins
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tplab.course.checks.cases import Case, Place
from tplab.course.checks.forms.alone import Alone, Call, one
from tplab.course.checks.observation import Claim, NotRun, Observed, Seen
from tplab.course.checks.run_answer import called_as
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.checks.twins import Twin
from tplab.runtime import device

# 9.1: a small model on two replicas of two ranks each, in which the learner's table decides about one of eight draws

WORDS = ("same", "different")
RIGHT = {  # (within a replica, across replicas)
    "norm": ("same", "same"), "shard": ("different", "same"),
    "embedding": ("same", "different"), "heads": ("different", "different"),
    "inside": ("different", "different"), "after_g": ("same", "different"),
    "batch": ("same", "different"), "token": ("same", "different"),
}  # fmt: skip
SHARDS = 2  # ranks per replica
TEXTS, LENGTH, TOKENS, HIDDEN, INNER = 3, 6, 50, 8, 16  # HIDDEN: a rank has half of the features in its only head
RATE = 0.5
KEYS = "the table has the eight names of the exercise"
TWO_WORDS = 'the table has two words for each name, "same" or "different"'
OTHER_SHARDS = "the two ranks of a replica have different shards"
OTHER_ELEMENTS = "the two ranks of a replica drop different elements of their own parts"
OTHER_TEXTS = "the two replicas train on different texts"
OTHER_MASKS = "the two replicas drop different elements"
OTHER_TOKENS = "the two replicas continue the text with different tokens"


@dataclass(frozen=True)
class Draw(Case):
    """The draw that the learner's table decides about."""

    name: str

    def describe(self, name: str) -> str:
        return f"a model that draws {self.name!r} as your table says"


class Model:
    """A small model on this rank of a replica, and everything that it has drawn, by the names in the table."""

    def __init__(self, words: dict[str, tuple[str, str]], seed: int) -> None:
        self.replica, self.part = divmod(dist.get_rank(), SHARDS)
        self.words, self.seed = words, seed
        self.drawn: dict[str, Tensor] = {}
        generator = torch.Generator(device()).manual_seed(seed)
        # The embedding's table isn't in question, so it's the same on all ranks
        self.table = torch.randn(TOKENS, HIDDEN, generator=generator, device=device())

    def generator(self, name: str) -> torch.Generator:
        within, across = self.words[name]
        own = self.part * (within == "different") + SHARDS * self.replica * (across == "different")
        return torch.Generator(device()).manual_seed(self.seed + 1 + 100 * [*RIGHT].index(name) + own)

    def mask(self, name: str, *shape: int) -> Tensor:
        self.drawn[name] = (torch.rand(shape, generator=self.generator(name), device=device()) > RATE) / (1 - RATE)
        return self.drawn[name]

    def g(self, y: Tensor) -> Tensor:
        first = SHARDS * self.replica
        return torch.stack(gathered(y)[first : first + SHARDS]).sum(0)

    def run(self) -> None:
        """Run a forward pass, and continue a text."""
        batch = self.generator("batch")
        texts = self.drawn["batch"] = torch.randint(TOKENS, (TEXTS, LENGTH), generator=batch, device=device())
        norm = self.drawn["norm"] = torch.randn(HIDDEN, generator=self.generator("norm"), device=device())
        half = HIDDEN // SHARDS
        shapes = (3, HIDDEN, half), (half, HIDDEN), (HIDDEN, INNER // SHARDS), (INNER // SHARDS, HIDDEN)
        generator = self.generator("shard")
        qkv, out, up, down = (torch.randn(shape, generator=generator, device=device()) for shape in shapes)
        self.drawn["shard"] = up
        x = self.table[texts] * self.mask("embedding", TEXTS, LENGTH, HIDDEN)
        q, k, v = x @ qkv[:, None]  # [b, s, h/p] each
        weights = (q @ k.mT).softmax(-1) * self.mask("heads", TEXTS, LENGTH, LENGTH)
        x = x * norm + self.g(weights @ v @ out)
        inner = torch.nn.functional.gelu(x @ up) * self.mask("inside", TEXTS, LENGTH, INNER // SHARDS)
        x = x + self.g(inner @ down) * self.mask("after_g", TEXTS, LENGTH, HIDDEN)
        self.drawn["loss"] = x.square().mean()
        likely = torch.ones(TOKENS, device=device())  # the same context in both replicas
        self.drawn["tokens"] = torch.multinomial(likely, LENGTH, generator=self.generator("token"))


def gathered(tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts


def run_model(same_or_different: Callable[[], Any], case: Draw, seed: int, group: Any) -> Observed:
    with called_as("same_or_different()"):
        said = same_or_different()
    if not isinstance(said, dict) or set(said) != set(RIGHT):
        return {KEYS: Claim(f"it's {str(said):.60}")}
    words = said[case.name]
    if not isinstance(words, (tuple, list)) or len(words) != 2 or not set(words) <= set(WORDS):
        return {TWO_WORDS: Claim(f"for {case.name!r}, it has {words!r}")}
    model = Model(RIGHT | {case.name: tuple(words)}, seed)
    model.run()
    sizes = [drawn.numel() for drawn in model.drawn.values()]
    ranks = [each.split(sizes) for each in gathered(torch.cat([drawn.flatten() for drawn in model.drawn.values()]))]
    everywhere = {name: [rank[index] for rank in ranks] for index, name in enumerate(model.drawn)}

    def equal(*names: str, across: bool = False) -> bool:
        """Return whether the two ranks of this replica, or the replicas' ranks at this place, have drawn the same."""
        mine = (
            slice(model.part, None, SHARDS) if across else slice(SHARDS * model.replica, SHARDS * (model.replica + 1))
        )
        return any(torch.equal(*everywhere[name][mine]) for name in names)

    own = ", ".join(name for name in ("heads", "inside") if equal(name))
    masks = ", ".join(name for name in ("embedding", "heads", "inside", "after_g") if equal(name, across=True))
    return {name: model.drawn[name] for name in ("loss", "tokens", "norm", "shard")} | {
        OTHER_SHARDS: Claim("their shards are equal" if equal("shard") else ""),
        OTHER_ELEMENTS: Claim(f"they draw the same mask for {own}" if own else ""),
        OTHER_TEXTS: Claim("their texts are the same" if equal("batch", across=True) else ""),
        OTHER_MASKS: Claim(f"they draw the same mask for {masks}" if masks else ""),
        OTHER_TOKENS: Claim("their tokens are the same" if equal("tokens", across=True) else ""),
    }


def right_model(case: Draw, seed: int, place: Place) -> Observed:
    """Return what must be the same as on another rank: the replica's first one, or that of the first replica."""
    replica, part = divmod(place.index, SHARDS)
    if "loss" not in place.observed[place.index]:
        return {}
    as_on = {"loss": SHARDS * replica, "tokens": SHARDS * replica, "norm": part, "shard": part}
    return {name: place.observed[rank][name] for name, rank in as_on.items()}


exercise(
    "9.1", "Same or different?", takes=["same_or_different"],
    trials=[
        OnRanks(
            cases=[Draw(name) for name in RIGHT], run=run_model, right=right_model,
            draw=lambda case, generator, size: int(torch.randint(10**6, (), generator=generator)),
            world_sizes=(2 * SHARDS,), without=tuple(Twin),
        )
    ],
    passed="With your table, the four ranks behave like a single process that trains on the texts of both replicas.",
)  # fmt: skip

# 9.2: seeds. Any scheme that follows the exercise's rules is right

STREAMS = ("init", "replicated", "sharded")
TORCH_SEEDS = 2**32  # a CPU's generator uses only the last 32 bits of a seed
SOME, ALL = (*range(5), *range(995, 1000)), range(1000)
# Among n = 300,000 streams, random 32-bit seeds collide with a probability of 1 - exp(-n**2 / 2**33) = 0.99997. The
# replicas are so far apart that seeds that repeat after 2**16 to 2**19 streams collide, too.
MOST = (*range(224), *range(450, 525), 999)
RIGHT_FORM = "each seed is an integer from 0 on"
SAME_INIT = "all ranks of all replicas have the same seed for init, for any number of ranks"
SAME_REPLICATED = "all ranks of a replica have the same seed for replicated, for any number of ranks"
APART = {  # by the streams that have the same seed
    ("replicated", "replicated"): "each replica has its own seed for replicated",
    ("sharded", "sharded"): "each rank of each replica has its own seed for sharded",
}
STREAMS_APART = "no stream has a seed of another stream"
LAST_BITS = "no two seeds have the same last 32 bits"
FOLLOWS = "another run has other seeds"
REPEATED = "in another process, the seeds are the same"
STATEMENTS = (
    RIGHT_FORM, SAME_INIT, SAME_REPLICATED, *APART.values(), STREAMS_APART, LAST_BITS, FOLLOWS, REPEATED,
)  # fmt: skip
FEW = "300,000 ranks have hardly any seed in common"
DIFFERENT = "number of different seeds for {}"


@dataclass(frozen=True)
class Ranks:
    """Whose seeds a call asks for."""

    seeds: Sequence[int]
    sizes: Sequence[int]  # numbers of ranks per replica
    copies: Sequence[int]


def asked(generator: torch.Generator) -> Iterator[Call]:
    seed = int(torch.randint(1000, 10**6, (), generator=generator))
    yield Call(Ranks([seed], (1, 2, 4), range(3)), f"seed {seed}, replicas 0 to 2 of 1, 2, or 4 ranks")
    yield Call(Ranks([seed], (1000,), SOME), f"seed {seed}, replicas 0 to 4 and 995 to 999 of 1000 ranks")
    yield Call(Ranks([seed], (1, 8), ALL), f"seed {seed}, 1000 replicas of 1 or 8 ranks")
    yield Call(Ranks(range(40), (1, 2, 3, 8), range(4)), "a small seed, 0 to 39, replicas 0 to 3 of 1 to 8 ranks")
    some = range(seed % 1000, seed % 1000 + 20 * 251, 251)  # streams with different multiples of them meet somewhere
    yield Call(Ranks(some, (1000,), range(10)), f"20 seeds from {some[0]} on, replicas 0 to 9 of 1000 ranks")
    yield Call(Ranks([0], (1000,), SOME), "seed 0, replicas 0 to 4 and 995 to 999 of 1000 ranks")


def most(generator: torch.Generator) -> Iterator[Call]:
    yield Call(Ranks([7], (1000,), MOST), f"seed 7, {len(MOST)} replicas of 1000 ranks")


def run_seeds(stream_seeds: Callable[..., Any], call: Call) -> Seen:
    found: dict[str, str] = {}
    counts = dict.fromkeys(STREAMS, 0)
    for seed, p in product(call.given.seeds, call.given.sizes):
        said = {(copy, rank): stream_seeds(seed, rank, p, copy=copy) for copy in call.given.copies for rank in range(p)}
        alone = {copy: stream_seeds(seed, 0, 1, copy=copy) for copy in call.given.copies}
        wrong = next(filter(None, map(form, (*said.values(), *alone.values()))), "")
        if wrong:
            return one(
                {RIGHT_FORM: Claim(wrong)} | dict.fromkeys(map(DIFFERENT.format, STREAMS), NotRun("of their form"))
            )
        found = found or problem(said, alone, p)
        for name in STREAMS:
            counts[name] += len({seeds[name] for seeds in said.values()})
    found = found or repeats(stream_seeds, call.given.seeds[0])
    claims = {name: Claim(found.get(name, "")) for name in STATEMENTS}
    if call.given.copies == MOST:
        missing = len(MOST) * sum(call.given.sizes) - counts["sharded"]
        claims[FEW] = Claim(f"{missing} ranks have a seed of another rank" if missing > 1000 else "")
    return one(claims | {DIFFERENT.format(name): count for name, count in counts.items()})


def right_seeds(call: Call) -> Seen:
    """Return how many different seeds each stream has, added up over the runs and over the numbers of ranks."""
    runs, copies = len(call.given.seeds), len(call.given.copies)
    sizes = call.given.sizes
    counts = {"init": len(sizes), "replicated": copies * len(sizes), "sharded": copies * sum(sizes)}
    return one({DIFFERENT.format(name): runs * count for name, count in counts.items()})


def problem(said: dict[tuple[int, int], Any], alone: dict[int, Any], p: int) -> dict[str, str]:
    """Return {statement: why it isn't true} for the first problem with the seeds of all ranks, or {}.

    said:  the seeds by replica and rank
    alone: the seeds by replica if each replica has a single rank
    """
    owners: dict[int, tuple[tuple[Any, ...], int]] = {}  # the last bits of a seed -> its stream, replica and rank
    init = next(iter(alone.values()))["init"]
    for (copy, rank), seeds in said.items():
        whose = f"rank {rank} of {p}, replica {copy}"
        for name, right, of, says in (
            ("init", init, next(iter(alone)), SAME_INIT),
            ("replicated", alone[copy]["replicated"], copy, SAME_REPLICATED),
        ):
            if seeds[name] != right:
                return {says: f"it's {right} for rank 0 of 1, replica {of}, and {seeds[name]} for {whose}"}
        for key in (("init",), ("replicated", copy), ("sharded", copy, rank)):
            number = seeds[key[0]]
            other, its = owners.setdefault(number % TORCH_SEEDS, (key, number))
            if other != key:
                says = LAST_BITS if its != number else APART.get((other[0], key[0]), STREAMS_APART)
                return {says: f"{told(other)}: {its}; {told(key)}: {number}"}
    return {}


def form(said: Any) -> str:
    """Say what's wrong with the form of the seeds, or return ""."""
    if not isinstance(said, dict) or said.keys() != {*STREAMS}:
        return f"it returned {said!r}"[:100]
    wrong = {name: value for name, value in said.items() if type(value) is not int or not 0 <= value < 2**63}
    return ", ".join(f"{name}: {value!r}" for name, value in wrong.items())


def told(key: tuple[Any, ...]) -> str:
    stream, *of = key
    words = ("", "replica {}", "replica {}, rank {}")[len(of)]
    return f"{stream} of {words.format(*of)}" if of else stream


def repeats(stream_seeds: Callable[..., Any], seed: int) -> dict[str, str]:
    """Return {statement: why it isn't true} if a run can't be repeated, or if all runs are the same."""
    mine, others = (stream_seeds(each, 0, 1, copy=0) for each in (seed, seed + 12345))
    with other_hashes():
        again = stream_seeds(seed, 0, 1, copy=0)
    kept = [name for name in STREAMS if others[name] % TORCH_SEEDS == mine[name] % TORCH_SEEDS]
    moved = [f"{name} was {mine[name]} and is {again[name]}" for name in STREAMS if again[name] != mine[name]]
    if kept:
        same = f"the last 32 bits are the same for seed = {seed} and seed = {seed + 12345}"
        return {FOLLOWS: f"{', '.join(kept)}: {same}"}
    return {REPEATED: ", ".join(moved)} if moved else {}


@contextmanager
def other_hashes() -> Iterator[None]:
    """Change the `hash` of strings, as if Python had been started again."""
    real = builtins.hash
    builtins.hash = lambda value: real(repr(value) + "!") if "'" in repr(value) else real(value)
    try:
        yield
    finally:
        builtins.hash = real


exercise(
    "9.2", "Seeds that never meet", takes=["stream_seeds"],
    trials=[
        Alone(calls=asked, run=run_seeds, right=right_seeds),
        Alone(calls=most, run=run_seeds, right=right_seeds, part="many replicas"),
    ],
    passed="Up to a thousand replicas of a thousand ranks can draw from their streams, and no two streams ever meet.",
)  # fmt: skip
