"""The check for exercise 4.4, in which a shard takes its initial values from a master weight with the full shape.

The check leaves out the bfloat16 variant of each case, because some correct answers draw bfloat16 weights in float32.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tplab.course import checks
from tplab.runtime import record
from tplab.tensor.sharding import Sharding, shard


@dataclass(frozen=True)
class Weight:
    """A layer's weight, given by its full shape [o, i], its sharding, and the method that draws its initial values."""

    full_shape: tuple[int, int]
    sharding: Sharding
    init_method: Callable[[Tensor], Any]

    def call(self, param: Tensor) -> str:
        """Return the learner's call as text, such as "init_shard(param [4, 6] with ..., (8, 6), ..., group)"."""
        method = getattr(self.init_method, "__name__", "init_method")
        return f"init_shard(param {list(param.shape)} with {self.sharding}, {self.full_shape}, {method}, group)"

    def shard_of(self, full: Tensor, index: int, size: int) -> Tensor:
        return shard(full, self.sharding.dim, index, size, stride=self.sharding.stride)

    def draw(self, size: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
        """Draw initial values in the full shape, or in the shape of a shard on `size` ranks."""
        sizes = [n // size if dim == self.sharding.dim else n for dim, n in enumerate(self.full_shape)]
        drawn = torch.empty(sizes, dtype=dtype)
        self.init_method(drawn)
        return drawn


WEIGHTS = {
    "first weight": Weight((8, 6), Sharding(0), nn.init.xavier_normal_),
    "second weight": Weight((4, 12), Sharding(1), nn.init.kaiming_uniform_),
    "fused weight": Weight((24, 4), Sharding(0, 3), nn.init.xavier_uniform_),
}
FIRST = WEIGHTS["first weight"]

UNTOUCHED = 7.0
UNCHANGED = "the old values, untouched"
IN_PLACE = "the parameters are filled in place"
FREED = "no full weight stays in memory"
TRAINABLE = "the parameters are leaf tensors that require a gradient"
FLOAT32 = "the shard of a full weight that was drawn in float32"
AT_SHARD_SHAPE = "values drawn in the shape of the shard"


@dataclass(frozen=True)
class Drawn(checks.Case):
    """A case in which the check sets the seed once, and then the answer initializes all weights in turn."""

    def describe(self, name: str) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} parameters" + "," * bool(self.groups)


CASES = (Drawn(), Drawn(groups=checks.GROUPS))


class Problem(NamedTuple):
    """The values that a single process draws after setting `seed`."""

    seed: int
    masters: dict[str, Tensor]  # the full weights
    next_numbers: Tensor  # [4], drawn after all weights
    float32: Tensor  # the first full weight, drawn in float32
    at_shard_shape: Tensor  # the first weight, drawn in the shape of its shard


def draw(case: Drawn, generator: torch.Generator, size: int) -> Problem:
    seed = int(torch.randint(10**6, (), generator=generator))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        masters = {name: weight.draw(dtype=case.dtype) for name, weight in WEIGHTS.items()}
        next_numbers = uniform()
        torch.manual_seed(seed)
        float32 = FIRST.draw(dtype=torch.float32).double()
        torch.manual_seed(seed)
        return Problem(seed, masters, next_numbers, float32, FIRST.draw(size, case.dtype))


def uniform() -> Tensor:
    return torch.rand(4)


def give(case: Drawn, problem: Problem, place: checks.Place) -> int:
    return problem.seed


def run(init: Callable[..., Any], case: Drawn, seed: int, group: Any) -> checks.Observed:
    """On every rank, initialize all weights with the learner's function, and observe the result.

    The weights are on the CPU, because the check also compares the next random number of the CPU's generator.
    """
    params = {}
    for name, weight in WEIGHTS.items():
        full = torch.full(weight.full_shape, UNTOUCHED, dtype=case.dtype, device=torch.device("cpu"))
        params[name] = nn.Parameter(weight.shard_of(full, 0, dist.get_world_size(group)))
        params[name].tensor_parallel = weight.sharding  # type: ignore[attr-defined]
    before = [param.data_ptr() for param in params.values()]
    torch.manual_seed(seed)
    masters, on_the_cpu = [], []
    with record() as section, checks.DefaultDevice() as watch:
        for name, weight in WEIGHTS.items():

            def draw(tensor: Tensor, weight: Weight = weight) -> None:
                if watch.is_marked(tensor):
                    on_the_cpu.append(tensor)
                elif tensor.data_ptr() not in before:
                    masters.append(StorageWeakRef(tensor.untyped_storage()))
                tensor.zero_()  # like an init method that doesn't use torch.no_grad() itself
                weight.init_method(tensor)

            with checks.called_as(weight.call(params[name])):
                init(params[name], weight.full_shape, draw, group)
    seen: checks.Observed = {name: param.detach().clone() for name, param in params.items()}
    seen["the next random number"] = uniform()
    kept = before == [param.data_ptr() for param in params.values()]
    seen[IN_PLACE] = checks.Claim("" if kept else "the memory of one was replaced")
    trainable = all(param.requires_grad and param.is_leaf for param in params.values())
    seen[TRAINABLE] = checks.Claim("" if trainable else "one of them is not")
    seen["traffic"] = checks.traffic(section)
    gc.collect()
    # don't count full weights after a collective, because a collective may keep its tensor in memory
    alive = 0 if seen["traffic"] else sum(not master.expired() for master in masters)
    seen[FREED] = checks.Claim(f"{alive} of {len(masters)} full weights are still in memory" if alive else "")
    return seen | watch.claims({"the master weight": on_the_cpu})


def expect(case: Drawn, problem: Problem, place: checks.Place) -> checks.Expected:
    shards = {name: weight.shard_of(problem.masters[name], place.index, place.size) for name, weight in WEIGHTS.items()}
    right = {**shards, "the next random number": problem.next_numbers, "traffic": place.traffic()}
    mistakes = {name: {UNCHANGED: torch.full_like(mine, UNTOUCHED)} for name, mine in shards.items()}
    mistakes["first weight"][FLOAT32] = FIRST.shard_of(problem.float32, place.index, place.size)
    if place.size > 1:
        mistakes["first weight"][AT_SHARD_SHAPE] = problem.at_shard_shape
    return checks.Expected(right, mistakes)


@checks.exercise("4.4", "Fix the initial values")
def init_from_a_master(init: Callable[..., Any]) -> checks.Verdict:
    checks.check_cases(
        "4.4", init, CASES, values_on_cpu=True, draw=draw, give=give, run=run, expect=expect, questions=QUESTIONS,
        crash=CRASH, ask_instead=about_report, whose_group=WHOSE_RANK,
        without={checks.Twin.BFLOAT16},  # some correct answers draw bfloat16 weights in float32
    )  # fmt: skip
    return checks.Verdict(
        "The model starts from the same weights for every p. Your function also leaves the random generator in the "
        "same state as a single process would."
    )


WHOSE_RANK = (
    "Do the rank and the world size in your code come from `group`, or from the default group of all ranks? Which of "
    "your calls doesn't pass `group`?"
)
CRASH = (
    "If a parameter requires a gradient, you can change it in place only under `torch.no_grad()`. Does the tensor that "
    "you copy have the same shape as the shard?"
)


def about_report(failure: checks.CheckFailed) -> str | None:
    return NOTHING_RETURNED if "NoneType" in failure.report else None


NOTHING_RETURNED = (
    "An initialization method fills a tensor in place, and it may return None. Which line of your code uses the "
    "return value of `init_method`?"
)

QUESTIONS = (
    checks.Question(
        checks.has_kind("first weight", UNCHANGED),
        "The parameter still has its old values. Does your function change `param` in place, or does it fill a new "
        "tensor that's thrown away?",
    ),
    checks.Question(
        lambda d: bool(d.names) and d.names <= {"traffic"},
        "The values are correct, but your function sent some of them from one rank to another. All ranks use the "
        "same seed, so why would a rank need data from the other ranks?",
    ),
    checks.Question(
        checks.differs(IN_PLACE),
        "Other code may hold references to the parameter's memory. How do you change the parameter's elements in "
        "place? If `param` becomes a view of the full weight, how many bytes stay allocated for as long as "
        "the view exists?",
    ),
    checks.Question(
        checks.differs(FREED),
        "A full weight was still in memory after your function had returned. If every layer kept its full weight, "
        "sharding wouldn't save any memory. Which attribute or variable of your code still refers to the full weight?",
    ),
    checks.Question(
        checks.differs(TRAINABLE),
        "`param` should still be a leaf tensor that requires a gradient. Which line of your code changed that?",
    ),
    checks.Question(
        checks.has_kind("first weight", FLOAT32),
        "The parameters are float64 here. Which dtype does `torch.empty` choose if you don't specify one? What "
        "dtype would the full weight have in a single process?",
    ),
    checks.Question(
        checks.has_kind("first weight", AT_SHARD_SHAPE),
        "You drew the values into a tensor with the shape of the shard. That's why `xavier_normal_` computed its "
        "standard deviation from the wrong shape, and why all ranks drew the same values. What's the shape of the "
        "tensor that a single process would fill?",
    ),
    checks.Question(
        checks.has_kind("first weight", "other rank"),
        "A rank has another rank's shard. Which argument of `shard` determines which shard the rank gets?",
    ),
    checks.Question(
        lambda d: "fused weight" in d.names and not d.names & {"first weight", "second weight"},
        "Only the fused weight is wrong. What does `param.tensor_parallel` tell you besides the dimension?",
    ),
    checks.Question(
        lambda d: "second weight" in d.names and "first weight" not in d.names,
        "Your function initialized the first weight correctly, but a later weight is wrong. Does your code split "
        "each weight along the dimension stored in that weight's `tensor_parallel` attribute? Does any "
        "line of your code reset the random generator, so that the second weight reuses the random numbers "
        "of the first?",
    ),
    checks.Question(
        lambda d: "the next random number" in d.names and d.names <= {"the next random number", "traffic"},
        "The weights are correct, but the random generator ends up in a different state than it would in a single "
        "process. How many random numbers did this rank draw? Does any line set a seed?",
    ),
    checks.Question(
        lambda d: "first weight" in d.names,
        "A single process would call `init_method` just once, on a tensor with the full shape and the parameter's "
        "dtype. It wouldn't set a new seed. What does your function do differently?",
    ),
)
