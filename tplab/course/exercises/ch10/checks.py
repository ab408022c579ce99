"""The checks of exercises 10.1, an order, 10.2, a residual, 10.5, the next token, and 10.6, GPT-2's checkpoint."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tplab.course.checks import twins
from tplab.course.checks.cases import GROUPS, Case, Place, random_tensor
from tplab.course.checks.forms.alone import Alone, Call
from tplab.course.checks.observation import Claim, Observed, Seen, Snapshot, observe, portable
from tplab.course.checks.recorded_traffic import traffic
from tplab.course.checks.run_answer import called_as
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.checks.twins import Twin
from tplab.runtime import device, record
from tplab.tensor.operators import copy_to_region, reduce_from_region
from tplab.tensor.rng import seed_all

# 10.1: the order of seven operations

NAMES = ("norm", "f", "block", "g", "bias", "dropout", "add")
SEVEN_NAMES = "block_order returns the seven names, each of them once"
HIDDEN, INNER, TOKENS, RATE = 4, 8, 5, 0.4
SHARDED = {"A": 1, "B": 0}  # the dimension along which each matrix of the block is split


class Block(NamedTuple):
    x: Tensor  # [t, h]
    weights: dict[str, Tensor]
    mask: Tensor  # [t, h], what dropout multiplies with
    dy: Tensor  # [t, h], the upstream gradient


def draw_block(case: Case, generator: torch.Generator, size: int) -> Block:
    random = partial(random_tensor, generator)
    weights = {"norm weight": 1 + random(HIDDEN) / 2, "norm bias": random(HIDDEN), "A": random(HIDDEN, INNER)}
    weights |= {"B": random(INNER, HIDDEN), "bias": random(HIDDEN)}
    mask = torch.ones(TOKENS, HIDDEN, dtype=torch.float64) / (1 - RATE)
    mask[torch.arange(TOKENS), torch.arange(TOKENS) % HIDDEN] = 0  # an element of each token
    return Block(random(TOKENS, HIDDEN), weights, mask, random(TOKENS, HIDDEN))


def give_shards(case: Case, full: Block, place: Place) -> Block:
    mine = {
        name: place.part(value, SHARDED[name]) if name in SHARDED else value for name, value in full.weights.items()
    }
    return full._replace(weights={name: value.clone() for name, value in mine.items()})


def run_order(block_order: Any, case: Case, given: Block, group: Any) -> Observed:
    with called_as("block_order()"):
        said = block_order()
    names = list(said) if isinstance(said, (list, tuple)) else []
    if sorted(map(str, names)) != sorted(NAMES):
        return {SEVEN_NAMES: Claim(f"it returned {said!r}")}
    w = {name: value.to(device()).requires_grad_() for name, value in given.weights.items()}
    mask = given.mask.to(device())

    def run(x: Tensor) -> Tensor:
        steps: dict[str, Callable[[Tensor], Tensor]] = {
            "norm": lambda y: F.layer_norm(y, [HIDDEN], w["norm weight"], w["norm bias"]),
            "f": copy_to_region,
            "block": lambda y: F.gelu(y @ w["A"]) @ w["B"],
            "g": reduce_from_region,
            "bias": lambda y: y + w["bias"],
            "dropout": lambda y: y * mask,
            "add": lambda y: x + y,
        }
        y = x
        for name in names:
            y = steps[name](y)
        return y

    return {SEVEN_NAMES: Claim("")} | observe(
        run, given.dy.to(device()), inputs={"x": given.x.to(device())}, parameters=w
    )


def plain_block(x: Tensor, w: dict[str, Tensor], mask: Tensor) -> Tensor:
    normed = F.layer_norm(x, [HIDDEN], w["norm weight"], w["norm bias"])
    return x + mask * (F.gelu(normed @ w["A"]) @ w["B"] + w["bias"])


def right_order(case: Case, full: Block, place: Place) -> Observed:
    leaves = {name: value.clone().requires_grad_() for name, value in {"x": full.x, **full.weights}.items()}
    out = plain_block(leaves["x"], leaves, full.mask)
    gradients = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), full.dy), strict=True))
    parts = {name: place.part(value, SHARDED[name]) if name in SHARDED else value for name, value in gradients.items()}
    sent = place.traffic(("all_reduce", out.numel()))
    return {
        "out": out.detach(), **{f"d{name}": value for name, value in parts.items()},
        "forward traffic": sent, "backward traffic": sent,
    }  # fmt: skip


def terms_with_x(case: Case, full: Block, size: int) -> dict[str, list[Tensor]]:
    """Return what each rank would return if nothing were summed: its own term, with the bias and x."""
    shards = zip(*(full.weights[name].chunk(size, dim) for name, dim in SHARDED.items()), strict=True)
    return {"term with x": [plain_block(full.x, full.weights | {"A": a, "B": b}, full.mask) for a, b in shards]}


@dataclass(frozen=True)
class Order(Case):
    def describe(self, name: str) -> str:
        return "your order, forward and backward"


exercise(
    "10.1", "Seven operations", takes=["block_order"],
    trials=[
        OnRanks(
            cases=[Order()], draw=draw_block, give=give_shards, run=run_order, right=right_order, terms=terms_with_x,
            world_sizes=(1, 2, 4),  # on a single rank, only the order of the other five operations matters
            without=tuple(Twin),
        )
    ],
    passed="Every tensor is complete where it has to be, and the block needs one message in each direction.",
)  # fmt: skip

# 10.2: bias, dropout, and the residual

MASK = "mask"
BATCH, LENGTH = 2, 5
NARROWER = {torch.float64: torch.float32, torch.float32: torch.bfloat16, torch.bfloat16: torch.bfloat16}


@dataclass(frozen=True)
class Sum(Case):
    """A call of bias_dropout_add. If `wide`, the residual has more bits than y and the bias."""

    wide: bool = True
    bias: bool = True
    rate: float = 0.5
    training: bool = True

    @property
    def narrow(self) -> torch.dtype:
        return NARROWER[self.dtype] if self.wide else self.dtype

    def describe(self, name: str) -> str:
        dtypes = [str(dtype).removeprefix("torch.") for dtype in (self.narrow, self.dtype)]
        bias = "a bias" if self.bias else "no bias"
        mode = "training" if self.training else "evaluation"
        return f"{name}, y in {dtypes[0]} and the residual in {dtypes[1]}, {bias}, a rate of {self.rate}, in {mode}"


class Summands(NamedTuple):
    y: Tensor  # [b, s, h]
    residual: Tensor  # [b, s, h]
    bias: Tensor  # [h]
    dout: Tensor  # [b, s, h], in steps of 1/256, so that its sums aren't rounded
    seed: int  # the tracker's seed


def draw_summands(case: Sum, generator: torch.Generator, size: int) -> Summands:
    tokens = BATCH, LENGTH, HIDDEN
    y, bias = (random_tensor(generator, *shape).to(case.narrow).double() for shape in (tokens, (HIDDEN,)))
    dout = (16 * random_tensor(generator, *tokens)).round() / 16
    seed = int(torch.randint(10**6, (), generator=generator))
    return Summands(y, random_tensor(generator, *tokens), bias, dout, seed)


def run_sum(bias_dropout_add: Any, case: Sum, given: Summands, group: Any) -> Observed:
    tracker, twin = seed_all(given.seed), seed_all(given.seed)
    with twin.fork("replicated"):
        mask = F.dropout(torch.ones(BATCH, LENGTH, HIDDEN, device=device(), dtype=case.dtype), case.rate)
    torch.manual_seed(dist.get_rank())  # so that a mask from torch's current state differs between ranks
    y, bias = (value.to(device(), case.narrow) for value in (given.y, given.bias))
    inputs = {"y": y, "residual": given.residual.to(device())} | ({"bias": bias} if case.bias else {})

    def run(y: Tensor, residual: Tensor, bias: Tensor | None = None) -> Any:
        return bias_dropout_add(y, bias, residual, case.rate, case.training, tracker)

    return observe(run, given.dout.to(device()), inputs=inputs) | {MASK: mask}


def right_sum(case: Sum, given: Summands, place: Place) -> Observed:
    drops = case.training and case.rate > 0
    mask = place.observed[place.index][MASK].cpu().double() if drops else torch.ones_like(given.y)
    added = given.y + given.bias if case.bias else given.y
    dy = mask * given.dout
    right = {"out": given.residual + mask * added, "dy": dy.to(case.narrow), "dresidual": given.dout}
    right |= {"dbias": dy.sum((0, 1)).to(case.narrow)} if case.bias else {}
    return right | {"forward traffic": place.traffic(), "backward traffic": place.traffic()}


SUMS = (
    Sum(rate=0.0), Sum(rate=0.0, bias=False), Sum(wide=False, rate=0.0), Sum(rate=0.5), Sum(rate=0.5, training=False),
    Sum(wide=False, bias=False),
)  # fmt: skip

exercise(
    "10.2", "Fix the switch that did nothing", takes=["bias_dropout_add"],
    trials=[
        OnRanks(
            cases=SUMS, draw=draw_summands, run=run_sum, right=right_sum,
            world_sizes=(2, 1),
            # the order in which a mask's elements are drawn depends on the memory layout
            without=lambda case: (*twins.DRAWS_ONCE, Twin.STRIDED) if case.rate else (),
        )
    ],
    passed="The stream keeps its dtype, nothing is rounded on the way to it, and all ranks drop the same elements.",
)  # fmt: skip

# 10.5: the next token

LITTLE = "the messages contain only a few numbers per text"
WIDTH = 2048  # logits per rank
TEXTS = 3
FIRST, LAST, RANDOM = "the best token on the first rank", "the best token on the last rank", "random logits"
EQUAL, NEGATIVE, ONE_RANK = "equal logits", "padding, and very small logits", "a rank that holds only padding"
BFLOAT16 = "logits in bfloat16"
SCENES = (FIRST, LAST, RANDOM, EQUAL, NEGATIVE, ONE_RANK, BFLOAT16)


@dataclass(frozen=True)
class Choice(Case):
    scene: str

    def describe(self, name: str) -> str:
        return f"{name}, {self.scene}"


class Logits(NamedTuple):
    all: Tensor  # [b, p · WIDTH], with the padding
    vocab_size: int


def draw_logits(case: Choice, generator: torch.Generator, size: int) -> Logits:
    full = size * WIDTH
    logits = torch.randn(TEXTS, full, generator=generator, dtype=torch.float64)
    if case.scene in (FIRST, LAST, BFLOAT16):
        for row, (first, last) in enumerate(((0, WIDTH - 1), (WIDTH // 2, WIDTH - 5), (7, 9))):
            logits[row, first if case.scene == FIRST else full - WIDTH + last] = 9.0
    if case.scene == EQUAL:
        logits = logits.clamp(max=4.0)
        logits[0, [3, WIDTH - 1, full - 1]] = 5.0
        logits[1, [full - WIDTH, full - 2]] = 5.0
        logits[2] = -1.0
    if case.scene == NEGATIVE:
        logits = -1e4 - 1e3 * logits.abs()
        logits[:, full - WIDTH // 2 :] = 0.0  # the padding
        return Logits(logits, full - WIDTH // 2)
    if case.scene == ONE_RANK:
        logits = -1 - logits.abs()
        logits[:, WIDTH // 4 :] = 50.0
        return Logits(logits, WIDTH // 4)
    return Logits(logits, full)


def give_logits(case: Choice, problem: Logits, place: Place) -> Logits:
    return problem._replace(all=place.part(problem.all, -1).contiguous())


def run_choice(best_token: Any, case: Choice, given: Logits, group: Any) -> Observed:
    dtype = torch.bfloat16 if case.scene == BFLOAT16 else given.all.dtype
    logits = given.all.to(device(), dtype)
    before = Snapshot(logits=logits)
    with record() as section:
        ids = best_token(logits, given.vocab_size, group)
    numbers = sum(call.numel for call in traffic(section))
    many = f"{numbers} numbers for {TEXTS} texts"
    limit = 4 * TEXTS * dist.get_world_size(group)
    if isinstance(ids, Tensor) and ids.dtype == torch.int32:  # which can hold every ID
        ids = ids.long()
    return {"ids": portable(ids), LITTLE: Claim(many if numbers > limit else ""), "inputs unchanged": before.changed()}


def right_choice(case: Choice, problem: Logits, place: Place) -> Observed:
    return {"ids": problem.all[:, : problem.vocab_size].argmax(-1)}


exercise(
    "10.5", "The next token", takes=["best_token"],
    trials=[
        OnRanks(
            cases=[Choice(scene, groups=groups) for groups in (None, GROUPS) for scene in SCENES],
            draw=draw_logits, give=give_logits, run=run_choice, right=right_choice,
            world_sizes=(2, 4, 1), without=twins.DRAWS_ONCE,
        )
    ],
    passed="A few numbers per text are enough, and all ranks choose the same token.",
)  # fmt: skip

# 10.6: GPT-2's checkpoint

PLAN = {  # (transpose, the dimension along which the result is split, the number of matrices stacked along it)
    "wte.weight": (False, 0, 1), "wpe.weight": (False, None, 1), "attn.c_attn.weight": (True, 0, 3),
    "attn.c_attn.bias": (False, 0, 3), "attn.c_proj.weight": (True, 1, 1), "attn.c_proj.bias": (False, None, 1),
    "mlp.c_fc.weight": (True, 0, 1), "mlp.c_fc.bias": (False, 0, 1), "mlp.c_proj.weight": (True, 1, 1),
    "mlp.c_proj.bias": (False, None, 1),
}  # fmt: skip
SPLITS = {"rows": (0, 1), "qkv": (0, 3), "columns": (1, 1), "replicated": (None, 1)}
SHAPES = {  # as GPT-2 stores them, for h = 8 and a vocabulary of 24 tokens
    "wte.weight": (24, 8), "wpe.weight": (16, 8), "attn.c_attn.weight": (8, 24), "attn.c_attn.bias": (24,),
    "attn.c_proj.weight": (8, 8), "attn.c_proj.bias": (8,), "mlp.c_fc.weight": (8, 32), "mlp.c_fc.bias": (32,),
    "mlp.c_proj.weight": (32, 8), "mlp.c_proj.bias": (8,),
}  # fmt: skip
TEN_NAMES = "the table has the ten names, each with True or False and the name of a split"


def states(generator: torch.Generator) -> Iterator[Call]:
    state = {name: random_tensor(generator, *shape) for name, shape in SHAPES.items()}
    for p in (1, 2, 4):
        yield Call(state, f"GPT-2's tensors on {p} rank{'s' * (p > 1)}", p=p, alone=False)


def run_plan(gpt2_plan: Callable[[], Any], call: Call) -> Seen:
    with called_as("gpt2_plan()"):
        plan = gpt2_plan()
    wrong = wrong_entries(plan)
    if wrong:
        return [{TEN_NAMES: Claim(wrong)}] * call.p
    ways = {name: (transpose, *SPLITS[split]) for name, (transpose, split) in plan.items()}
    return [
        {TEN_NAMES: Claim("")}
        | {name: shard_of(tensor, ways[name], rank, call.p) for name, tensor in call.given.items()}
        for rank in range(call.p)
    ]


def wrong_entries(plan: Any) -> str:
    if not isinstance(plan, dict):
        return f"gpt2_plan returned {plan!r}"
    names = [f"{name} is missing" for name in SHAPES if name not in plan]
    names += [f"there's no {name!r}" for name in plan if name not in SHAPES]
    for name, way in plan.items():
        pair = isinstance(way, (tuple, list)) and len(way) == 2 and isinstance(way[0], bool) and way[1] in list(SPLITS)
        names += [] if pair else [f"{name} has {way!r}"]
    return "; ".join(names[:2])


def shard_of(tensor: Tensor, way: tuple[bool, int | None, int], rank: int, p: int) -> Any:
    """Return a rank's shard of a tensor, or why the tensor can't be split like that."""
    transpose, dim, blocks = way
    if (transpose or dim == 1) and tensor.dim() < 2:
        return "a vector has no columns and can't be transposed"
    tensor = tensor.t() if transpose else tensor
    if dim is None:
        return tensor.contiguous()
    if tensor.shape[dim] % (p * blocks):
        return f"{tensor.shape[dim]} rows aren't {blocks} stacked matrices"
    return torch.cat([block.chunk(p, dim)[rank] for block in tensor.chunk(blocks, dim)], dim)


def right_shards(call: Call) -> Seen:
    return [
        {name: shard_of(tensor, PLAN[name], rank, call.p) for name, tensor in call.given.items()}
        for rank in range(call.p)
    ]  # fmt: skip


exercise(
    "10.6", "GPT-2's checkpoint as a table (optional)", takes=["gpt2_plan"],
    trials=[Alone(calls=states, run=run_plan, right=right_shards)],
    passed="Your table turns GPT-2's tensors into the shards that each rank of your GPT holds.",
)  # fmt: skip
