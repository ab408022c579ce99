"""The checks of chapter 02: shards (2.1), two matmuls (2.2), GELU and a row split (2.3), and a gather to fix (2.4)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu

from tplab.course.checks import twins
from tplab.course.checks.cases import WORLD_SIZES, Case, Place, random_tensor
from tplab.course.checks.default_device import DefaultDevice
from tplab.course.checks.forms.alone import Alone, Call, in_other_conditions, one, refusals
from tplab.course.checks.observation import Claim, Observed, Seen, Snapshot, same_memory
from tplab.course.checks.recorded_traffic import Traffic, traffic
from tplab.course.checks.run_answer import called_as
from tplab.course.checks.trials import Answers, OnRanks, Trial, exercise
from tplab.course.checks.twins import Twin
from tplab.runtime import device, record

# 2.1: shard and unshard

# Some shapes have another dimension that isn't divisible by p. Other shapes have a dimension whose size is at most p
CUTS = [((8,), 0), ((8, 12), 0), ((8, 12), 1), ((3, 8), 1), ((8, 5), 0), ((3, 4, 5), 1), ((2, 3, 8), -1), ((8, 3), -2)]
REFUSED = [((8, 10), 1, 4), ((10, 8), 0, 4), ((4, 6, 8), -2, 4), ((2,), 0, 4), ((5,), 0, 2)]


class Cut(NamedTuple):
    whole: Tensor
    parts: list[Tensor]
    dim: int


def cuts(generator: torch.Generator) -> Iterator[Call]:
    for layout, twin in (("", None), (", transposed in memory", None), ("", Twin.FLOAT32), ("", Twin.BFLOAT16)):
        for p in WORLD_SIZES:
            for shape, dim in CUTS:
                if shape[dim] % p == 0:
                    whole = twins.given(twin, random_tensor(generator, *shape))
                    whole = transposed(whole) if layout else whole
                    parts = [part.clone(memory_format=torch.contiguous_format) for part in whole.chunk(p, dim)]
                    note = f"shape {list(shape)}, dim={dim}{layout}"
                    yield Call(Cut(whole, parts, dim), note, p=p, alone=False, twin=twin)


def transposed(tensor: Tensor) -> Tensor:
    """Return a tensor with the same values, whose first and last dimensions are swapped in memory."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def cut_and_paste(answers: tuple[Callable[..., Tensor], Callable[..., Tensor]], call: Call) -> Seen:
    return [_cut_and_paste(*answers, call.given, rank, call.p) for rank in range(call.p)]


def _cut_and_paste(shard: Any, unshard: Any, cut: Cut, rank: int, p: int) -> Observed:
    given = [part.clone() for part in cut.parts]
    before = Snapshot(tensor=cut.whole, shards=given, **{f"shards[{i}]": part for i, part in enumerate(given)})
    with (
        called_as(f"shard(a tensor of shape {list(cut.whole.shape)}, dim={cut.dim}, rank={rank}, world_size={p})"),
        DefaultDevice() as cutting,
    ):
        mine = shard(cut.whole, cut.dim, rank, p)
    with called_as(f"unshard({p} shards of shape {list(given[0].shape)}, dim={cut.dim})"), DefaultDevice() as pasting:
        pasted = unshard(given, cut.dim)
    seen: Observed = {"shard": mine, "unshard": pasted, "inputs unchanged": before.changed()}
    seen |= cutting.claims({"the shard": mine}) | pasting.claims({"the whole": pasted})
    if isinstance(mine, Tensor):
        kept, needed = mine.untyped_storage().nbytes(), cut.parts[rank].numel() * mine.element_size()
        shares = "it is the full tensor itself" if same_memory(mine, cut.whole) else ""
        claim = f"it keeps {kept} bytes alive but only needs {needed}" if kept > needed else shares
        seen["the shard has its own memory"] = Claim(claim)
        seen["the shard is contiguous"] = Claim("" if mine.is_contiguous() else f"its strides are {mine.stride()}")
    return seen


exercise(
    "2.1", "Split a tensor into shards, and put it back together", takes=["shard", "unshard"],
    trials=[
        Alone(
            calls=cuts, run=cut_and_paste, tol=0,
            right=lambda call: [{"shard": part, "unshard": call.given.whole} for part in call.given.parts],
        ),
        refusals(
            "a size that can't be divided evenly is refused on every rank",
            [
                (
                    f"shard(a tensor of shape {list(shape)}, dim={dim}, rank={rank}, world_size={p})",
                    lambda shard, shape=shape, dim=dim, rank=rank, p=p: shard(torch.zeros(shape), dim, rank, p),  # type: ignore[misc]
                    (shape[dim], p),
                )
                for shape, dim, p in REFUSED
                for rank in range(p)
            ],
            of="shard",
        ),
    ],
    passed="Your functions work along any dimension, and every rank rejects a size that isn't divisible by the number "
    "of ranks.",
)  # fmt: skip

# 2.2: Z = (X A) B with the least traffic. In a ring all-gather or reduce-scatter, each rank sends (p-1)/p of a tensor,
# and in a ring all-reduce, it sends twice as much. COSTS has the elements that the cheapest plan sends per row of X,
# without the factor (p-1)/p

IN = 8
Splits = tuple[str, str]
COSTS: Mapping[Splits, Callable[[int, int], int]] = {
    ("column", "row"): lambda hidden, out: 2 * out,  # all-reduce Z
    ("column", "column"): lambda hidden, out: hidden + out,  # all-gather X A, then Z
    ("row", "column"): lambda hidden, out: 2 * hidden + out,  # all-reduce X A, then all-gather Z
    ("row", "row"): lambda hidden, out: hidden + 2 * out,  # reduce-scatter X A, then all-reduce Z
}
DIM = {"column": 1, "row": 0}
CHOICES = ((16384, 4096), (16, 4096), (4096, 4096), (4097, 4096), (4095, 4096), (1, 2), (2, 1))


@dataclass(frozen=True)
class Sizes(Case):
    hidden: int = 24
    out: int = 8
    leading: tuple[int, ...] = (5,)  # all dimensions of x except the last

    def describe(self, name: str) -> str:
        dimensions = "1 dimension" if not self.leading else f"{len(self.leading) + 1} dimensions"
        return f"hidden = {self.hidden}, out = {self.out}, x with {dimensions}"


SIZES = (
    Sizes(),
    Sizes(hidden=8, out=24),
    Sizes(hidden=12, out=12),
    Sizes(leading=(2, 3)),
    Sizes(4, 8, (3, 1, 2)),
    Sizes(leading=()),
)


def least(hidden: int, out: int) -> int:
    return min(cost(hidden, out) for cost in COSTS.values())


def cost_of(choose: Callable[[int, int], Any], call: Call) -> Seen:
    said = choose(*call.given)
    splits = tuple(said) if isinstance(said, (tuple, list)) else said
    if splits not in COSTS:
        return one({'it returns two words, each of them "column" or "row"': Claim(f"it returned {said!r}")})
    return one({"elements sent per row of X, times (p-1)/p": COSTS[splits](*call.given)})


class Matmuls(NamedTuple):
    x: Tensor  # [..., IN]
    a: Tensor  # [IN, hidden], or a shard of it
    b: Tensor  # [hidden, out], or a shard of it


def draw_matmuls(case: Sizes, generator: torch.Generator, size: int) -> Matmuls:
    random = partial(random_tensor, generator)
    return Matmuls(random(*case.leading, IN), random(IN, case.hidden), random(case.hidden, case.out))


def run_matmuls(answers: tuple[Any, Any], case: Sizes, given: Matmuls, group: Any) -> Observed:
    choose, two_matmuls = answers
    x, a, b = (tensor.to(device()) for tensor in given)
    before = Snapshot(x=x, a_shard=a, b_shard=b)
    with record() as section:
        out = two_matmuls(x, a, b, tuple(choose(case.hidden, case.out)))
    return {"out": out, "traffic": as_all_reduce(traffic(section)), "inputs unchanged": before.changed()}


def as_all_reduce(seen: Traffic) -> Traffic:
    """Replace a reduce-scatter and an all-gather of the same size with one all-reduce, which sends just as many bytes.

    Return any other traffic unchanged.
    """
    if sorted(call.kind for call in seen) == ["all_gather", "reduce_scatter"]:
        whole = {call._replace(kind="all_reduce") for call in seen}
        if len(whole) == 1:
            return Traffic(whole)
    return seen


def matmul_trials(answers: Answers) -> list[Trial]:
    """Return the trials, which depend on how the learner splits the weights."""

    def splits(case: Sizes) -> Splits:
        a, b = answers["choose_splits"](case.hidden, case.out)
        return a, b

    def give(case: Sizes, problem: Matmuls, place: Place) -> Matmuls:
        a, b = splits(case)
        shards = place.part(problem.a, DIM[a]), place.part(problem.b, DIM[b])
        return Matmuls(problem.x, *(shard.contiguous() for shard in shards))

    def right(case: Sizes, problem: Matmuls, place: Place) -> Observed:
        z = problem.x @ problem.a @ problem.b
        rows = z.numel() // case.out
        if splits(case) == ("column", "row"):
            return {"out": z, "traffic": place.traffic(("all_reduce", rows * case.out))}
        calls = ("all_gather", rows * case.hidden), ("all_gather", rows * case.out)
        return {"out": z, "traffic": place.traffic(*calls)}

    def results(case: Sizes, problem: Matmuls, size: int) -> dict[str, list[Tensor]]:
        if splits(case) != ("column", "row"):
            return {}
        columns = (problem.x @ problem.a).chunk(size, -1)
        return {"result": [x @ b for x, b in zip(columns, problem.b.chunk(size, 0), strict=True)]}

    sizes = [*CHOICES, *((case.hidden, case.out) for case in SIZES)]
    return [
        Alone(
            of="choose_splits", run=cost_of,
            calls=lambda generator: [Call(each, "choose_splits(hidden={}, out={})".format(*each)) for each in sizes],
            right=lambda call: one({"elements sent per row of X, times (p-1)/p": least(*call.given)}),
        ),
        OnRanks(
            cases=SIZES, draw=draw_matmuls, give=give, run=run_matmuls, right=right, terms=results,
            world_sizes=(2, 4, 1),
        ),
    ]  # fmt: skip


exercise(
    "2.2", "The cheapest way through two matmuls", takes=["choose_splits", "two_matmuls"], trials=matmul_trials,
    passed="Your splits need the minimum traffic when X A is wider than Z, when it's narrower, and when both have the "
    "same width.",
)  # fmt: skip

# 2.3: GELU and the row split

FORM = "it returns floating-point matrices x [b, in] and a [in, out], where `in` is even"


def gap(x: Tensor, a: Tensor, p: int) -> Tensor:
    """Return the largest absolute difference between the GELU of the sum of p terms and the sum of the terms' GELUs."""
    terms = torch.stack([x_part @ a_part for x_part, a_part in zip(x.chunk(p, -1), a.chunk(p, 0), strict=True)])
    return (gelu(terms.sum(0)) - gelu(terms).sum(0)).abs().max().double()


def gap_calls(generator: torch.Generator) -> Iterator[Call]:
    for p in (2, 4, 1):  # p = 2 reveals the most about a mistake, and at p = 1, there should be no gap
        large = random_tensor(generator, 5, IN) * 2, random_tensor(generator, IN, 3)  # most differences are negative
        small = random_tensor(generator, 4, IN).abs() * 0.1, random_tensor(generator, IN, 6).abs() * 0.1  # positive
        for x, a in (large, small):
            call = Call((x, a), f"gelu_gap(x {list(x.shape)}, a {list(a.shape)}, world_size={p})", p=p)
            yield from (each for each in in_other_conditions(call) if each.twin is not Twin.BFLOAT16)


def run_gap(gelu_gap: Callable[..., Any], call: Call) -> Seen:
    x, a = map(transposed, call.given) if call.twin is Twin.STRIDED else twins.given(call.twin, call.given)
    before = Snapshot(x=x, a=a)
    found = gelu_gap(x, a, call.p)
    is_number = isinstance(found, (int, float, Tensor))
    size = torch.as_tensor(found, dtype=torch.float64).detach() if is_number else found
    return one({"gelu_gap": size, "inputs unchanged": before.changed()})


def run_example(holds: Callable[[Tensor, Tensor], Mapping[str, str]], example: Any, call: Call) -> Seen:
    pair = example()
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(t, Tensor) and t.dim() == 2 for t in pair)):
        return one({FORM: Claim(f"it returned {str(pair):.60}")})
    x, a = pair
    if x.shape[1] != a.shape[0] or x.shape[1] % 2 or not x.numel() or not a.numel() or not x.is_floating_point():
        return one({FORM: Claim(f"it returned {list(x.shape)} and {list(a.shape)}, {x.dtype}")})
    return one({FORM: Claim("")} | {says: Claim(problem) for says, problem in holds(x, a).items()})


def counter_holds(x: Tensor, a: Tensor) -> dict[str, str]:
    size = gap(x.double(), a.double(), 2)
    return {"the gap of counter_example is at least 1": "" if size >= 1 else f"it's only {size:.3g}"}


def lucky_holds(x: Tensor, a: Tensor) -> dict[str, str]:
    size, smallest = gap(x.double(), a.double(), 2), float(min(x.abs().min(), a.abs().min()))
    return {
        "the gap of lucky_example is below 1e-6": "" if size < 1e-6 else f"it's {size:.3g}",
        "every element of lucky_example has a magnitude of at least 0.1": (
            "" if smallest >= 0.1 - 1e-6 else f"the smallest magnitude is {smallest:.3g}"
        ),
    }


def example(name: str, holds: Callable[[Tensor, Tensor], Mapping[str, str]]) -> Alone:
    return Alone(
        of=name, calls=lambda generator: [Call((), f"{name}()")], run=partial(run_example, holds),
        right=lambda call: [{}],
    )  # fmt: skip


exercise(
    "2.3", "Where GELU goes wrong, and where you wouldn't notice",
    takes=["gelu_gap", "counter_example", "lucky_example"],
    trials=[
        Alone(
            of="gelu_gap", calls=gap_calls, run=run_gap,
            right=lambda call: one({"gelu_gap": gap(call.given[0], call.given[1], call.p)}),
        ),
        example("counter_example", counter_holds),
        example("lucky_example", lucky_holds),
    ],
    passed="Your counterexample exposes the mistake, because its gap is at least 1. Your lucky example hides the "
    "mistake.",
)  # fmt: skip

# 2.4: a gather to fix


@dataclass(frozen=True)
class Shape(Case):
    shape: tuple[int, ...] = (3, 2)
    gaps: bool = False  # y is every other column of a wider tensor, so it isn't contiguous

    def describe(self, name: str) -> str:
        return f"y of shape {list(self.shape)}" + ", not contiguous" * self.gaps


SHAPES = (
    Shape(), Shape((2, 3, 4)), Shape((5,)), Shape((1, 3)), Shape((4, 1)), Shape((1, 3, 2)), Shape((2, 1, 3, 2)),
    Shape(gaps=True), Shape((2, 3, 4), gaps=True),
)  # fmt: skip


def draw_shards(case: Shape, generator: torch.Generator, size: int) -> list[Tensor]:
    *leading, n = case.shape
    step = 2 if case.gaps else 1
    return [random_tensor(generator, *leading, step * n)[..., ::step] for _ in range(size)]


def run_gather(gather: Callable[[Tensor], Tensor], case: Shape, given: Tensor, group: Any) -> Observed:
    y = given.to(device())
    before = Snapshot(y=y)
    with record() as section:
        out = gather(y)
    return {"out": out, "traffic": traffic(section), "inputs unchanged": before.changed()}


def right_gather(case: Shape, ys: list[Tensor], place: Place) -> Observed:
    right = torch.cat(ys, -1)
    return {"out": right, "traffic": place.traffic(("all_gather", right.numel()))}


exercise(
    "2.4", "Fix a gather", takes=["gather_last_dim"],
    trials=[
        OnRanks(
            cases=SHAPES, draw=draw_shards, give=lambda case, ys, place: ys[place.index], run=run_gather,
            right=right_gather, terms=lambda case, ys, size: {"y": ys}, world_sizes=(2, 4, 1), tol=0,
            without=[Twin.STRIDED],  # separate cases cover tensors that aren't contiguous
        )
    ],
    passed="Your function still calls all-gather only once, and every element is in the right place.",
)  # fmt: skip
