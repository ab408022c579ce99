"""The checks of chapter 04 about parallel layers (4.1, 4.2), shards (4.3) and initial values (4.4)."""

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from tplab.course.checks import twins
from tplab.course.checks.cases import GROUPS, WORLD_SIZES, Case, Place, random_tensor
from tplab.course.checks.default_device import DefaultDevice
from tplab.course.checks.forms.alone import Alone, Call, refusals
from tplab.course.checks.forms.layers import Built, Layer, Problem, Weight
from tplab.course.checks.observation import Claim, Observed, Seen, Snapshot, same_memory
from tplab.course.checks.recorded_traffic import traffic
from tplab.course.checks.run_answer import called_as
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.checks.twins import Twin
from tplab.runtime import record
from tplab.tensor.sharding import Sharding

# 4.1 and 4.2: two parallel layers

IN, OUT = 12, 8  # divisible by every p, and different, so that the check notices if an answer mixes them up
FIRST, LAST = Sharding(0), Sharding(-1)


def linear(case: Built, x: Tensor, w: Mapping[str, Tensor]) -> Any:
    """Return the output of a linear layer, or with skip_bias_add the output without the bias, and the bias."""
    bias = w.get("b")
    return (F.linear(x, w["W"]), bias) if case.options.get("skip_bias_add") else F.linear(x, w["W"], bias)


def outputs(case: Built, split: Sharding | None, bias_split: Sharding | None) -> list[Sharding | None]:
    return [split, bias_split] if case.options.get("skip_bias_add") else [split]


def cases(name: str, value: bool) -> list[Built]:
    """Return the cases of a layer that has the option `name`, whose default isn't this value."""
    return [
        Built(),
        Built(leading=(2, 3)),
        Built(leading=(2, 3), options={name: value}),
        Built(bias=False),
        Built(options={"stride": 2}),
        Built(leading=(2, 3), options={"skip_bias_add": True}),
        Built(bias=False, options={"skip_bias_add": True}),
        Built(leading=(2, 3), options={name: value, "skip_bias_add": True}),
        Built(options={name: value}, groups=GROUPS),
    ]


def gathered(case: Built) -> bool:
    return bool(case.options.get("gather_output"))


def terms_of_dx(case: Built, problem: Problem, size: int) -> dict[str, list[Tensor]]:
    assert problem.upstream[0] is not None
    pairs = zip(problem.upstream[0].chunk(size, -1), problem.weights["weight"].chunk(size), strict=True)
    return {"term of dx": [dy @ weight for dy, weight in pairs]}


COLUMN = Layer(
    of="ColumnParallelLinear", sizes=(IN, OUT), odd=(IN + 1, OUT), width=IN, formula=linear,
    weights={"weight": Weight("W", (OUT, IN), FIRST), "bias": Weight("b", (OUT,), FIRST)},
    out_split=lambda case: outputs(case, None if gathered(case) else LAST, FIRST),
    forward_traffic=lambda case, x, out: [("all_gather", out.numel())] * gathered(case),
    backward_traffic=lambda case, x, out: [("all_reduce", x.numel())],
    terms=terms_of_dx,
)  # fmt: skip

exercise(
    "4.1", "ColumnParallelLinear", takes=["ColumnParallelLinear"],
    trials=COLUMN.trials(cases("gather_output", True), refused=(IN, OUT + 1)),
    passed="Each rank holds out/p of the output features. The backward pass needs one all-reduce, and the forward pass "
    "doesn't communicate at all unless you gather the output.",
)  # fmt: skip


def sliced(case: Built) -> bool:
    """Return whether each rank receives only its slice of x."""
    return bool(case.options.get("input_is_parallel", True))


def partial_sums(case: Built, problem: Problem, size: int) -> dict[str, list[Tensor]]:
    pairs = zip(problem.x.chunk(size, -1), problem.weights["weight"].chunk(size, 1), strict=True)
    return {"partial sum": [x @ weight.T for x, weight in pairs]}


ROW = Layer(
    of="RowParallelLinear", sizes=(IN, OUT), odd=(IN, OUT + 1), width=IN, formula=linear,
    weights={"weight": Weight("W", (OUT, IN), Sharding(1)), "bias": Weight("b", (OUT,))},
    x_split=lambda case: LAST if sliced(case) else None,
    out_split=lambda case: outputs(case, None, None),
    forward_traffic=lambda case, x, out: [("all_reduce", out.numel())],
    backward_traffic=lambda case, x, out: [("all_gather", x.numel())] * (not sliced(case)),
    terms=partial_sums,
)  # fmt: skip

exercise(
    "4.2", "RowParallelLinear", takes=["RowParallelLinear"],
    trials=ROW.trials(cases("input_is_parallel", False), refused=(IN + 1, OUT)),
    passed="Each rank holds in/p of the input features. The forward pass needs one all-reduce, and the bias is added "
    "only once, after that all-reduce.",
)  # fmt: skip

# 4.3: shard and unshard, with a stride

CUTS = (((16, 3), 0, 1), ((3, 16), 1, 1), ((24,), 0, 2), ((2, 24, 3), 1, 3), ((5, 24), -1, 2))  # shape, dim, stride


class Cut(NamedTuple):
    whole: Tensor
    shards: list[Tensor]
    dim: int
    stride: int


def cuts(generator: torch.Generator) -> Iterator[Call]:
    for twin in twins.ALONE:
        for p in WORLD_SIZES:
            for shape, dim, stride in CUTS:
                whole = twins.given(twin, random_tensor(generator, *shape))
                order = torch.arange(shape[dim]).reshape(stride, p, -1).transpose(0, 1).reshape(p, -1)  # [rank, rows]
                shards = [twins.given(twin, whole.index_select(dim, rows)) for rows in order]
                note = f"a tensor {list(shape)}, dim = {dim}, stride = {stride}" + "," * bool(twin)
                yield Call(Cut(whole, shards, dim, stride), note, p=p, alone=False, twin=twin)


def cut_and_glue(answers: tuple[Callable[..., Any], Callable[..., Any]], call: Call) -> Seen:
    (shard, unshard), cut, p = answers, call.given, call.p
    given, whole = list(cut.shards), cut.whole
    tensors = {f"the shard of rank {rank}": each for rank, each in enumerate(given)}
    before = Snapshot(**{"the full tensor": whole, "the list of shards": given}, **tensors)
    shards: list[Any] = []
    claims: dict[str, Claim] = {}
    for rank in range(p):
        options = f"dim={cut.dim}, rank={rank}, world_size={p}, stride={cut.stride}"
        with called_as(f"shard(a tensor of shape {list(whole.shape)}, {options})"), DefaultDevice() as watch:
            shards.append(shard(whole, cut.dim, rank, p, stride=cut.stride))
        claims |= watch.claims({"shard": shards[-1]})
    options = f"dim={cut.dim}, stride={cut.stride}"
    with called_as(f"unshard({p} shards of shape {list(given[0].shape)}, {options})"), DefaultDevice() as watch:
        glued = unshard(given, cut.dim, stride=cut.stride)
    claims |= watch.claims({"unshard": glued})
    same = {"unshard": glued, "inputs unchanged": before.changed(), **claims}
    return [{"shard": mine, "each shard has its own memory": own_memory(mine, whole), **same} for mine in shards]


def own_memory(mine: Any, whole: Tensor) -> Claim:
    if not isinstance(mine, Tensor):
        return Claim("there is no tensor")
    kept, needed = mine.untyped_storage().nbytes(), mine.numel() * mine.element_size()
    shares = "it is the full tensor itself" if same_memory(mine, whole) else ""
    return Claim(f"it keeps {kept} bytes alive but needs only {needed}" if kept > needed else shares)


def refuses_rows(n: int, stride: int, p: int = 4) -> Alone:
    what = f"{n} rows" + f", in {stride} blocks," * (stride > 1)
    call = f"shard(a tensor of shape [{n}, 3], dim=0, rank=0, world_size={p}, stride={stride})"
    return refusals(
        f"{what} can't be split over {p} ranks",
        [(call, lambda shard: shard(torch.zeros(n, 3), 0, 0, p, stride=stride), (n,))],
        of="shard", part=f"{n} rows",
    )  # fmt: skip


exercise(
    "4.3", "Shard and unshard, with a stride", takes=["shard", "unshard"],
    trials=[
        Alone(
            calls=cuts, run=cut_and_glue,
            right=lambda call: [{"shard": mine, "unshard": call.given.whole} for mine in call.given.shards],
        ),
        refuses_rows(8, stride=3),
        refuses_rows(12, stride=6),  # divisible by the number of blocks and by the number of ranks
        refuses_rows(6, stride=1),
    ],
    passed="For every dimension and every number of blocks, your `unshard` undoes your `shard`.",
)  # fmt: skip

# 4.4: a shard takes its initial values from a master weight. The weights are on the CPU, because the check also
# compares the next random number of the CPU's generator

UNTOUCHED = 7.0
FILLED = "every parameter has new values"
IN_PLACE = "the parameters are filled in place"
FREED = "no full weight stays in memory"
TRAINABLE = "the parameters are leaf tensors that require a gradient"


class Drawn(NamedTuple):
    """A weight [o, i], how it's split, and the method that draws its initial values."""

    shape: tuple[int, int]
    split: Sharding
    init_method: Callable[[Tensor], Any]

    def part(self, full: Tensor, place: Place) -> Tensor:
        return place.part(full, self.split.dim, self.split.stride)

    def call(self, param: Tensor) -> str:
        method = getattr(self.init_method, "__name__", "init_method")
        return f"init_shard(param {list(param.shape)} with {self.split}, {self.shape}, {method}, group)"


WEIGHTS = {
    "first weight": Drawn((8, 6), Sharding(0), nn.init.xavier_normal_),
    "second weight": Drawn((4, 12), Sharding(1), nn.init.kaiming_uniform_),
    "fused weight": Drawn((24, 4), Sharding(0, 3), nn.init.xavier_uniform_),
}


@dataclass(frozen=True)
class Seeded(Case):
    """A case in which the check sets the seed once, and then the answer initializes all weights in turn."""

    def describe(self, name: str) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} parameters" + "," * bool(self.groups)


class Masters(NamedTuple):
    """The values that a single process draws after setting `seed`: the full weights, and then four more numbers."""

    seed: int
    full: dict[str, Tensor]
    next_numbers: Tensor


def draw_masters(case: Seeded, generator: torch.Generator, size: int) -> Masters:
    seed = int(torch.randint(10**6, (), generator=generator))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        full = {name: torch.empty(weight.shape, dtype=case.dtype) for name, weight in WEIGHTS.items()}
        for name, weight in WEIGHTS.items():
            weight.init_method(full[name])
        return Masters(seed, full, torch.rand(4))


def run_init(init_shard: Callable[..., Any], case: Seeded, seed: int, group: Any) -> Observed:
    size = dist.get_world_size(group)
    params = {}
    for name, weight in WEIGHTS.items():
        full = torch.full(weight.shape, UNTOUCHED, dtype=case.dtype, device=torch.device("cpu"))
        params[name] = nn.Parameter(weight.part(full, Place(0, tuple(range(size)), size)).clone())
        params[name].tensor_parallel = weight.split  # type: ignore[attr-defined]
    before = [param.data_ptr() for param in params.values()]
    torch.manual_seed(seed)
    masters: list[StorageWeakRef] = []
    on_the_cpu: list[Tensor] = []

    def draw(weight: Drawn, tensor: Tensor) -> None:
        is_param = tensor.data_ptr() in before
        if watch.is_marked(tensor):
            on_the_cpu.append(tensor)
        elif not is_param:
            masters.append(StorageWeakRef(tensor.untyped_storage()))
        with torch.set_grad_enabled(is_param and torch.is_grad_enabled()):
            tensor.zero_()  # like an init method that relies on the caller's torch.no_grad() to fill a parameter
        weight.init_method(tensor)

    with record() as section, DefaultDevice() as watch:
        for name, weight in WEIGHTS.items():
            with called_as(weight.call(params[name])):
                init_shard(params[name], weight.shape, partial(draw, weight), group)
    seen: Observed = {name: param.detach().clone() for name, param in params.items()}
    seen["the next random number"] = torch.rand(4)
    kept = before == [param.data_ptr() for param in params.values()]
    trainable = all(param.requires_grad and param.is_leaf for param in params.values())
    old = [name for name, value in seen.items() if name in params and (value == UNTOUCHED).all()]
    seen["traffic"] = traffic(section)
    gc.collect()
    # don't count full weights after a collective, because a collective may keep its tensor in memory
    alive = 0 if seen["traffic"] else sum(not master.expired() for master in masters)
    seen |= {
        FILLED: Claim(f"not {', '.join(old)}" if old else ""),
        IN_PLACE: Claim("" if kept else "the memory of one was replaced"),
        TRAINABLE: Claim("" if trainable else "one of them is not"),
        FREED: Claim(f"{alive} of {len(masters)} full weights are still in memory" if alive else ""),
    }
    return seen | watch.claims({"the master weight": on_the_cpu})


exercise(
    "4.4", "Fix the initial values", takes=["init_shard"],
    trials=[
        OnRanks(
            cases=[Seeded(), Seeded(groups=GROUPS)], draw=draw_masters, run=run_init,
            give=lambda case, problem, place: problem.seed,
            right=lambda case, problem, place: {
                **{name: weight.part(problem.full[name], place) for name, weight in WEIGHTS.items()},
                "the next random number": problem.next_numbers, "traffic": place.traffic(),
            },
            world_sizes=(2, 4, 1), values_on_cpu=True,
            without={Twin.BFLOAT16},  # some correct answers draw bfloat16 weights in float32
        )
    ],
    passed="The model starts from the same weights for every p. Your function also leaves the random generator in the "
    "same state as a single process would.",
)  # fmt: skip
