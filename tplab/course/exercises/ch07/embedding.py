"""The check for exercise 7.3, VocabParallelEmbedding. It also tests initial values, checkpoints, and invalid ids."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tplab.course import checks
from tplab.course.exercises.ch07.tables import (
    HIDDEN,
    PADDING_TRAINED,
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
NO_IDS = "an empty tensor of ids gives an empty tensor of vectors"
REFUSES = "an id outside the vocabulary is an IndexError that names the id and its position"
SILENT = "gives no error, but a vector of zeros"
OTHER_VECTOR = "gives no error, but some other vector"
NOT_ZERO_AT_FIRST = "first values in which the row of padding_idx is not zeros"


@dataclass(frozen=True)
class Built(checks.Case):
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
        """Return invalid ids: v, the last padding row (v + 1 if there is none), two negative ids, and a huge one."""
        last_row = size * rows_per_rank(size, self.multiple) - 1
        return list(dict.fromkeys([VOCAB, last_row if last_row >= VOCAB else VOCAB + 1, -1, -VOCAB, 10**6]))


CASES = (
    Built(),
    Built(multiple=8),
    Built(padding_idx=VOCAB - 1),
    Built(padding_idx=0),
    Built(multiple=2, padding_idx=3, groups=checks.GROUPS),
)


class Problem(NamedTuple):
    """A case's inputs. `first` and `unpadded` are initial values [v, h] for `seed`, with and without padding_idx."""

    table: Tensor  # [v, h], which is loaded as a checkpoint
    ids: Tensor
    dy: Tensor  # [..., h]
    seed: int
    first: Tensor
    unpadded: Tensor


def draw(case: Built, generator: torch.Generator, size: int) -> Problem:
    table, ids = random_table(generator), border_ids(generator, size, SHAPE)
    if case.padding_idx is not None:
        ids[0, 0] = ids[2, 1] = case.padding_idx
    seed = int(torch.randint(10**6, (), generator=generator))
    first, unpadded = (first_values(seed, index, case.dtype) for index in (case.padding_idx, None))
    return Problem(table, ids, checks.random_tensor(generator, *SHAPE, HIDDEN), seed, first, unpadded)


def first_values(seed: int, padding_idx: int | None, dtype: torch.dtype) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Embedding(VOCAB, HIDDEN, padding_idx, dtype=dtype).weight.detach()


def parameters_on(case: Built, place: checks.Place) -> str:
    return f"weight {[rows_per_rank(place.size, case.multiple), HIDDEN]}"


def give(case: Built, problem: Problem, place: checks.Place) -> dict[str, Any]:
    return {
        "table": problem.table,
        "ids": problem.ids,
        "dy": problem.dy,
        "seed": problem.seed,
        "wrong": case.wrong_ids(place.size),
        "parameters": parameters_on(case, place),
    }


def run(embedding_class: Any, case: Built, given: dict[str, Any], group: Any) -> checks.Observed:
    options = case.options | ({"group": group} if case.groups else {})
    torch.manual_seed(given["seed"])
    drawn = embedding_class(VOCAB, HIDDEN, **options, device=torch.device("cpu"), dtype=case.dtype)
    seen: checks.Observed = {
        "parameters": ", ".join(f"{name} {list(value.shape)}" for name, value in drawn.named_parameters())
    }
    if seen["parameters"] != given["parameters"]:
        names = ("first values", "out", "dweight", "forward traffic", "backward traffic", "checkpoint")
        return seen | dict.fromkeys(names, checks.NotRun("the parameters are others"))
    seen["first values"] = drawn.weight.detach().clone()
    module = embedding_class(VOCAB, HIDDEN, **options, device=device(), dtype=case.dtype)
    load_full_state_dict(module, {"weight": given["table"].to(device())}, group)
    ids = given["ids"].to(device())
    # The ids are integers and have no gradient, so they aren't passed as inputs
    seen |= checks.observe(
        lambda: module(ids), given["dy"].to(device()), inputs={}, parameters={"weight": module.weight}
    )
    seen["checkpoint"] = full_state_dict(module, group)["weight"]
    refusals = [refusal(module, ids, {WRONG_AT: wrong}) for wrong in given["wrong"]]
    refusals += [refusal(module, ids.view(shape), {at: VOCAB}) for shape, at in OTHER_SHAPES.items()]
    refusals += [refusal(module, ids, two) for two in TWO_WRONG]
    return seen | {REFUSES: checks.Claim(next(filter(None, refusals), "")), NO_IDS: of_no_ids(module, ids[:0])}


def of_no_ids(module: Any, ids: Tensor) -> checks.Claim:
    """Return a claim that says whether the module accepts an empty tensor of ids."""
    try:
        out = module(ids)
    except Exception as error:
        return checks.Claim(f"ids of shape {list(ids.shape)} give {type(error).__name__}: {error}")
    shape = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
    return checks.Claim("" if shape == [*ids.shape, HIDDEN] else f"ids of shape {list(ids.shape)} give {shape}")


def refusal(module: Any, ids: Tensor, wrongs: dict[tuple[int, ...], int]) -> str:
    """Put these wrong ids at their positions and describe how the module reacts. Returns "" for a good IndexError."""
    ids, what = ids.clone(), " and ".join(f"id {wrong} at {list(at)}" for at, wrong in wrongs.items())
    what += f" of {list(ids.shape)}"
    for at, wrong in wrongs.items():
        ids[at] = wrong
    try:
        out = module(ids)
    except IndexError as error:
        numbers = [int(text) for text in re.findall(r"-?\d+", str(error))]
        named = [at for at, wrong in wrongs.items() if wrong in numbers]
        if any(list(at) == numbers[i : i + len(at)] for at in named for i in range(len(numbers))):
            return ""
        unsaid = f"its position {list(named[0])}" if named else "the id"
        return f"{what} gives an IndexError without {unsaid}: {error}"
    except NotImplementedError:
        raise
    except Exception as error:
        return f"{what} gives {type(error).__name__}: {error}"
    at = next(iter(wrongs))
    vector = out[at] if isinstance(out, Tensor) and out.dim() == len(at) + 1 else torch.ones(1)
    return f"{what} {OTHER_VECTOR if vector.any() else SILENT}"


def expect(case: Built, problem: Problem, place: checks.Place) -> checks.Expected:
    table, ids, dy, _, first, unpadded = problem

    def mine(full: Tensor) -> Tensor:
        return part(full, place.index, place.size, case.multiple)

    right = {
        "parameters": parameters_on(case, place),
        "first values": mine(first),
        "out": table[ids],
        "dweight": mine(gradient(ids, dy, case.padding_idx)),
        "forward traffic": place.traffic(("all_reduce", dy.numel())),
        "backward traffic": checks.Traffic(),
        "checkpoint": table,
    }
    if case.padding_idx is None:
        return checks.Expected(right)
    return checks.Expected(
        right,
        {"first values": {NOT_ZERO_AT_FIRST: mine(unpadded)}, "dweight": {PADDING_TRAINED: mine(gradient(ids, dy))}},
    )


@checks.exercise("7.3", "VocabParallelEmbedding")
def vocab_parallel_embedding(embedding_class: Any) -> checks.Verdict:
    checks.check_cases(
        "7.3", embedding_class, CASES, draw=draw, give=give, run=run, expect=expect, questions=QUESTIONS,
        crash=lambda case: CRASH if case.padding_idx is None else PADDING_CRASH, stuck=STUCK, whose_group=WHOSE_GROUP,
        values_on_cpu=True,
    )  # fmt: skip
    return checks.Verdict(
        "Padding stays zeros and is in no checkpoint; an id that no rank has is an error on every rank."
    )


WHOSE_GROUP = (
    "Whose rank and whose size decide which rows a rank holds, and over whom is the look-up summed? Which call was not "
    "given `group`?"
)
CRASH = (
    "Read the last line of the report. How many rows does the module make, and which rows do `start` and `stop` say it "
    "has? Do both come from `vocab_range` with `multiple`?"
)
PADDING_CRASH = (
    "padding_idx is an id, one of the whole vocabulary; `padding_row` is a row of this rank's shard. Which ranks have "
    "that row at all, what number has it there, and what do the other ranks pass on? (A parameter is changed in place "
    "only under `torch.no_grad()`.)"
)
STUCK = (
    "One rank raised, or returned, before the all-reduce, and the others wait in it. All ranks see the same ids: do "
    "all of them ask the same question about them, or does each look at its own rows only?"
)


def _says(what: str) -> Callable[[checks.Differences], bool]:
    return lambda d: what in d.text(REFUSES)


QUESTIONS = (
    checks.Question(
        lambda d: "parameters" in d.names,
        "One parameter, `weight`, with as many rows as this rank holds, padding included. How many are stop - start?",
    ),
    checks.Question(
        checks.has_kind("first values", "dtype"),
        "The table has another dtype than was asked for. Which of the arguments are for `torch.empty`?",
    ),
    checks.Question(
        checks.has_kind("first values", NOT_ZERO_AT_FIRST),
        "As in nn.Embedding, the vector of padding_idx starts as zeros. On which rank is its row, and which row of the "
        "shard is it?",
    ),
    checks.Question(
        lambda d: "first values" in d.names,
        "Each rank's first values are its rows of the master weight, with zeros in the padding; only the row of "
        "padding_idx becomes zeros as well. What else do you change, after `init_parameter` or in its place?",
    ),
    checks.Question(
        checks.has_kind("dweight", PADDING_TRAINED),
        "padding_idx gets a gradient. Does the look-up know which row of this shard it is?",
    ),
    checks.Question(
        lambda d: "dweight" in d.names and "out" not in d.names,
        "A row that should learn does not, or the other way round. On a rank that does not have the row of "
        "padding_idx, which row do you keep from learning?",
    ),
    checks.Question(
        _says(SILENT),
        "No token has that id. A rank takes it for another rank's, or for a row of padding, and zeros come out, as if "
        "it were a token like any other. Which ids are in the vocabulary, and who has to look before anybody looks up?",
    ),
    checks.Question(
        _says(OTHER_VECTOR),
        "An id outside the vocabulary has found a row. Where does your test end: at the vocabulary, or at the padded "
        "table?",
    ),
    checks.Question(
        _says("IndexError without"),
        "Whoever reads the error wants to find the token in a batch of thousands: the id, and its position, with one "
        "number for each dimension of `ids`. There may be one dimension, two, or three. What does "
        "`wrong.nonzero()[0]` give?",
    ),
    checks.Question(
        NO_IDS,
        "An empty batch has no ids to look up, and nn.Embedding returns an empty tensor for it. Which line of your "
        "code needs at least one id? (There is no smallest or largest element in an empty tensor.)",
    ),
    checks.Question(
        lambda d: REFUSES in d.names and not d.names & {"out", "dweight"},
        "nn.Embedding raises IndexError for such an id, and so should this. What does yours raise, and is it your own "
        "test that raises it?",
    ),
    checks.Question(
        lambda d: "out" in d.names and d.kind("out") != "none",
        "The look-up is that of exercise 7.2. Which of its arguments differ: the ids, the weight, start and stop?",
    ),
)
