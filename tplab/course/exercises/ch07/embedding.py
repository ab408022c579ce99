"""The check of exercise 7.3, an embedding that refuses ids that no rank has."""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tplab.course.checks.cases import GROUPS, Case, Place, random_tensor
from tplab.course.checks.observation import Claim, NotRun, Observed, observe
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.checks.twins import Twin
from tplab.course.exercises.ch07.tables import (
    HIDDEN,
    VOCAB,
    border_ids,
    gradient,
    part,
    random_table,
    rows_per_rank,
)
from tplab.runtime import device
from tplab.tensor.full_state import full_state_dict, load_full_state_dict

SHAPE = (3, 8)  # shape of the ids
WRONG_AT = (1, 2)  # position of the wrong id
OTHER_SHAPES = {(24,): (10,), (3, 2, 4): (1, 1, 2)}  # other shapes, each with the position of the wrong id
TWO_WRONG: tuple[dict[tuple[int, ...], int], ...] = (  # the error must name one of the two wrong ids with its position
    {(0, 5): VOCAB + 100, (2, 1): VOCAB + 200},
    {(0, 5): VOCAB + 200, (2, 1): VOCAB + 100},
)
NEGATIVE = "a negative ID raises an error"
TOO_LARGE = "an ID of v or more raises an error"
KIND = "the error is an IndexError"
NAMES = "the error names the ID and its position"
NO_IDS = "an empty tensor of IDs gives an empty tensor of vectors"


@dataclass(frozen=True)
class Built(Case):
    """The arguments that the embedding is built with."""

    multiple: int = 1
    padding_idx: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        padding = {} if self.padding_idx is None else {"padding_idx": self.padding_idx}
        return {"multiple": self.multiple, **padding}

    def describe(self, name: str) -> str:
        options = [f"{option}={value}" for option, value in self.options.items()] + ["group=group"] * bool(self.groups)
        return f"VocabParallelEmbedding({VOCAB}, {HIDDEN}, {', '.join(options)})"

    def wrong_ids(self, size: int) -> list[int]:
        """Return invalid ids: v, the last row of padding (v + 1 without padding), two negative ids, and a huge one."""
        last_row = size * rows_per_rank(size, self.multiple) - 1
        return list(dict.fromkeys([VOCAB, last_row if last_row >= VOCAB else VOCAB + 1, -1, -VOCAB, 10**6]))


CASES = (
    Built(),
    Built(multiple=8),
    Built(padding_idx=VOCAB - 1),
    Built(padding_idx=0),
    Built(multiple=2, padding_idx=3, groups=GROUPS),
)


class Problem(NamedTuple):
    table: Tensor  # [v, h], which is loaded as a checkpoint
    ids: Tensor
    dy: Tensor  # [.., h]
    seed: int
    first: Tensor  # [v, h], the initial values for this seed


def draw(case: Built, generator: torch.Generator, size: int) -> Problem:
    table, ids = random_table(generator), border_ids(generator, size, SHAPE)
    if case.padding_idx is not None:
        ids[0, 0] = ids[2, 1] = case.padding_idx
    seed = int(torch.randint(10**6, (), generator=generator))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first = nn.Embedding(VOCAB, HIDDEN, case.padding_idx, dtype=case.dtype).weight.detach()
    return Problem(table, ids, random_tensor(generator, *SHAPE, HIDDEN), seed, first)


def shape_on(case: Built, place: Place) -> str:
    return str([rows_per_rank(place.size, case.multiple), HIDDEN])


def give(case: Built, problem: Problem, place: Place) -> dict[str, Any]:
    return problem._asdict() | {"wrong": case.wrong_ids(place.size), "shape": shape_on(case, place)}


def run(embedding_class: Any, case: Built, given: dict[str, Any], group: Any) -> Observed:
    options = case.options | ({"group": group} if case.groups else {})
    torch.manual_seed(given["seed"])
    drawn = embedding_class(VOCAB, HIDDEN, **options, device=torch.device("cpu"), dtype=case.dtype)
    shapes = {name: str(list(value.shape)) for name, value in drawn.named_parameters()}
    seen: Observed = {"parameters": shapes}
    if shapes != {"weight": given["shape"]}:
        names = ("first values", "out", "dweight", "forward traffic", "backward traffic", "checkpoint")
        return seen | dict.fromkeys(names, NotRun("the parameters differ"))
    seen["first values"] = drawn.weight.detach().clone()
    module = embedding_class(VOCAB, HIDDEN, **options, device=device(), dtype=case.dtype)
    load_full_state_dict(module, {"weight": given["table"].to(device())}, group)
    if case.twin is Twin.BETWEEN:  # a larger vocabulary, in case that something is kept on the class
        other = embedding_class(3 * VOCAB, HIDDEN, **options, device=device(), dtype=case.dtype)
        other(given["ids"].to(device()))
    ids = given["ids"].to(device())
    # The ids are integers and have no gradient, so they aren't passed as inputs
    weight = {"weight": module.weight}
    seen |= observe(lambda: module(ids), given["dy"].to(device()), inputs={}, parameters=weight)
    seen["checkpoint"] = full_state_dict(module, group)["weight"]
    refusals = [refusal(module, ids, {WRONG_AT: wrong}) for wrong in given["wrong"]]
    refusals += [refusal(module, ids.view(shape), {at: VOCAB}) for shape, at in OTHER_SHAPES.items()]
    refusals += [refusal(module, ids, two) for two in TWO_WRONG]
    untrue = {statement: text for statement, text in reversed(refusals) if statement}
    claims = {statement: Claim(untrue.get(statement, "")) for statement in (NEGATIVE, TOO_LARGE, KIND, NAMES)}
    return seen | claims | {NO_IDS: of_no_ids(module, ids[:0])}


def of_no_ids(module: Any, ids: Tensor) -> Claim:
    """Return a claim that says whether the module accepts an empty tensor of ids."""
    try:
        out = module(ids)
    except Exception as error:
        return Claim(f"IDs of shape {list(ids.shape)} raise {type(error).__name__}: {error}")
    shape = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
    return Claim("" if shape == [*ids.shape, HIDDEN] else f"IDs of shape {list(ids.shape)} give {shape}")


def refusal(module: Any, ids: Tensor, wrongs: dict[tuple[int, ...], int]) -> tuple[str, str]:
    """Put these wrong ids at their positions. Return the statement that isn't true, and why, or "" for a good error."""
    ids, what = ids.clone(), " and ".join(f"ID {wrong} at {list(at)}" for at, wrong in wrongs.items())
    what += f" of {list(ids.shape)}"
    for at, wrong in wrongs.items():
        ids[at] = wrong
    try:
        out = module(ids)
    except IndexError as error:
        numbers = [int(text) for text in re.findall(r"-?\d+", str(error))]
        named = [at for at, wrong in wrongs.items() if wrong in numbers]
        if any(list(at) == numbers[i : i + len(at)] for at in named for i in range(len(numbers))):
            return "", ""
        return NAMES, f"{what}: the message {str(error)!r} doesn't name the {'position' if named else 'ID'}"
    except NotImplementedError:
        raise
    except Exception as error:
        return KIND, f"{what} raises {type(error).__name__}: {error}"
    at, number = next(iter(wrongs.items()))
    vector = out[at] if isinstance(out, Tensor) and out.dim() == len(at) + 1 else torch.ones(1)
    found = "a vector" if vector.any() else "zeros"
    return NEGATIVE if number < 0 else TOO_LARGE, f"{what} gives {found} instead of an error"


def right(case: Built, problem: Problem, place: Place) -> Observed:
    table, ids, dy, _, first = problem
    mine = (place.index, place.size, case.multiple)
    return {
        "parameters": {"weight": shape_on(case, place)},
        "first values": part(first, *mine),
        "out": table[ids],
        "dweight": part(gradient(ids, dy, case.padding_idx), *mine),
        "forward traffic": place.traffic(("all_reduce", dy.numel())),
        "backward traffic": place.traffic(),
        "checkpoint": table,
    }


exercise(
    "7.3", "Fix the ID that no rank has", takes=["VocabParallelEmbedding"],
    trials=[
        OnRanks(
            cases=CASES, draw=draw, give=give, run=run, right=right, values_on_cpu=True,
            world_sizes=(2, 4, 1),  # two ranks come first, as they reveal the most about a mistake
        )
    ],
    passed="Every rank refuses an ID that isn't in the vocabulary before it sends anything, even if the ID has a row "
    "in the padding.",
)  # fmt: skip
