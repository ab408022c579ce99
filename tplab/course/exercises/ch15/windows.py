"""The check for exercise 15.2, a pure function that returns the windows of text that a replica takes in a step.

Any shuffle is right. The check tests the properties that it must have: each window comes once per epoch, the batch is
the same for any number of replicas, and nothing is remembered between calls or taken from the rank's random state.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tplab.course import checks
from tplab.course.checks.describe import describe

COUNT = "windows of a replica in a step"
RANGE = "there is such a window"
EPOCH = "each window comes once in an epoch"
SAME = "the batch of all replicas is the same as with one"
PURE = "the same arguments give the same windows"
ELSEWHERE = "another process gets the same windows"
LEFT_ALONE = "the rank's own random numbers go on as they would have"
NEW_ORDER = "each epoch has an order of its own"
NEIGHBOURS = "in each epoch other windows stand side by side"
SHUFFLED = "the windows are shuffled"
SEEDED = "another seed gives another order"
APART = "another seed has epochs of its own"

SEEDS, EPOCHS = 4, 4  # numbers of consecutive seeds and of epochs per seed, all of which are compared
# For these seeds, the first batches of many epochs are compared. Two batches of 16 out of 64 windows are never equal by
# chance.
APART_SEEDS, APART_EPOCHS, APART_WINDOWS, APART_BATCH = (0, 1, 2, 1000), 120, 64, 16
MANY = 3  # this many batches are never in order by chance; two batches of 4 out of 10 windows are, once in 3,150 epochs

Batch = list[int]


@dataclass(frozen=True)
class Case:
    """A run, given by its numbers of windows, of sequences per step, and of steps to check, and by its seed."""

    windows: int
    batch: int
    steps: int
    seed: int

    def note(self) -> str:
        return f"{self.windows} windows, {self.batch} in a step"


def ask(function: Callable[..., Any], cases: Sequence[Case], disorder: int) -> list[checks.Observed]:
    """Call the learner's function as this rank's replica, for all steps in order and for some again.

    Runs on every rank.
    """
    rank, p = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(disorder + rank)
    random.seed(disorder + rank)
    seen: list[checks.Observed] = []
    for case in cases:

        def own(step: int, case: Case = case, seed: int | None = None) -> Any:
            seed = case.seed if seed is None else seed
            call = f"own_windows({step}, {seed}, {case.windows}, {case.batch}, {rank}, {p})"
            with checks.called_as(call):
                return plain(function(step, seed, case.windows, case.batch, rank, p))

        before = torch.get_rng_state(), random.getstate()
        in_order = [own(step) for step in range(case.steps)]
        touched = not torch.equal(before[0], torch.get_rng_state()) or before[1] != random.getstate()
        with hashes_of_another_process(function):
            elsewhere = {step: own(step) for step in range(min(6, case.steps))}
        again = {step: own(step) for step in random.sample(range(case.steps), min(6, case.steps))}
        orders = []
        if p == 1 and case.windows % case.batch == 0:
            for seed in range(case.seed, case.seed + SEEDS):
                orders += [(seed, epoch, epoch_of(own, case, seed, epoch)) for epoch in range(EPOCHS)]
        other = [own(step, seed=case.seed + 1) for step in range(case.steps)]
        seen.append({"in order": in_order, "again": again, "other seed": other, "touched": touched, "orders": orders})
        seen[-1]["elsewhere"] = elsewhere
    if p == 1:
        seen[0]["orders"] += beginnings(function)
    return seen


@contextmanager
def hashes_of_another_process(function: Callable[..., Any]) -> Iterator[None]:
    """Context manager that changes `hash` for strings in the learner's code, as every new process does."""
    names = getattr(function, "__globals__", {})
    if "hash" in names:  # the learner has defined a function with this name
        yield
        return
    names["hash"] = lambda value: hash(("another process", value)) if holds_text(value) else hash(value)
    try:
        yield
    finally:
        del names["hash"]


def holds_text(value: Any) -> bool:
    items = value if isinstance(value, (tuple, frozenset)) else ()
    return isinstance(value, (str, bytes)) or any(map(holds_text, items))


def beginnings(function: Callable[..., Any]) -> list[tuple[int, int, Any]]:
    """Return (seed, epoch, first batch) for seeds whose epochs coincide if seed and epoch are combined too simply."""
    found = []
    for seed in APART_SEEDS:
        for epoch in range(APART_EPOCHS):
            arguments = epoch * (APART_WINDOWS // APART_BATCH), seed, APART_WINDOWS, APART_BATCH, 0, 1
            with checks.called_as(f"own_windows{arguments}"):
                found.append((seed, epoch, [plain(function(*arguments))]))
    return found


def epoch_of(own: Callable[..., Any], case: Case, seed: int, epoch: int) -> list[Any]:
    """Return the windows that a replica takes in an epoch of complete batches."""
    per_epoch = case.windows // case.batch
    return [own(step, seed=seed) for step in range(epoch * per_epoch, (epoch + 1) * per_epoch)]


def plain(said: Any) -> Any:
    """Convert a list, tuple, or range of ints to a list. Anything else is converted by `checks.portable`."""
    if isinstance(said, (list, tuple, range)):
        numbers = list(said)
        if all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
            return numbers
    return checks.portable(said)


@checks.exercise("15.2", "Which windows a replica takes")
def whose_windows(function: Callable[..., Any]) -> checks.Verdict:
    draw = torch.randint(1000, (3,), generator=checks.fresh_generator()).tolist()
    cases = [Case(48, 8, 18, draw[0]), Case(30, 8, 12, draw[1]), Case(10, 4, 8, draw[2])]
    alone: list[list[Batch]] = []
    for p in checks.WORLD_SIZES:
        runs = checks.run_ranks(ask, p, function, cases, 1 + draw[0], question=CRASH)
        for number, case in enumerate(cases):
            ranks = [on_rank[number] for on_rank in runs]
            check_form([on_rank["in order"] for on_rank in ranks], case, p)
            together = [[w for on_rank in ranks for w in on_rank["in order"][step]] for step in range(case.steps)]
            if p == 1:
                alone.append(together)
            seen: checks.Observed = {COUNT: len(ranks[0]["in order"][0])}
            seen |= {name: checks.Claim(text) for name, text in claims(case, ranks, together, alone[number]).items()}
            checks.verify(
                "15.2", p, [seen], [{COUNT: case.batch // p}], questions=QUESTIONS, alone=True,
                note=case.note() + (f", {p} replicas" if p > 1 else ", one replica"),
            )  # fmt: skip
    return checks.Verdict("Where the run stands in its data is the number of its steps, and nothing else.")


def check_form(of_ranks: list[list[Any]], case: Case, p: int) -> None:
    for rank, steps in enumerate(of_ranks):
        for step, said in enumerate(steps):
            if not isinstance(said, list) or not all(isinstance(number, int) for number in said):
                call = f"own_windows({step}, {case.seed}, {case.windows}, {case.batch}, {rank}, {p})"
                checks.fail("15.2", f"{call} gave {describe(said)}, not a list of whole numbers.", FORM)


def claims(case: Case, ranks: list[checks.Observed], together: list[Batch], alone: list[Batch]) -> dict[str, str]:
    """Return claims that say in words what doesn't hold. Later claims are made only if earlier ones hold."""
    wrong = [w for batch in together for w in batch if not 0 <= w < case.windows]
    found = {RANGE: f"window {wrong[0]} of 0 to {case.windows - 1}" if wrong else ""}
    found[PURE] = impure(ranks, "again")
    found[ELSEWHERE] = "" if found[PURE] else impure(ranks, "elsewhere")
    found[LEFT_ALONE] = "your function draws from them or sets their seed" if any(r["touched"] for r in ranks) else ""
    if any(found.values()) or any(len(batch) != case.batch for batch in together):
        return found
    if len(ranks) > 1:
        found[SAME] = unlike(together, alone)
    found[EPOCH] = not_once(case, together)
    if any(found.values()):
        return found
    whole = together[: case.windows // case.batch]
    in_order = all(sorted(batch) == list(range(i * case.batch, (i + 1) * case.batch)) for i, batch in enumerate(whole))
    if len(whole) >= MANY:
        found[SHUFFLED] = "they come one after the other" if in_order else ""
    if case.windows % case.batch == 0:  # an epoch consists of complete batches
        per_epoch = case.windows // case.batch
        epochs = [[sorted(b) for b in together[i : i + per_epoch]] for i in range(0, len(together), per_epoch)]
        found[NEW_ORDER] = "epoch 1 has the batches of epoch 0" if epochs[1] == epochs[0] else ""
        if len(ranks) == 1 and not found[NEW_ORDER]:
            found[NEIGHBOURS] = neighbours_again([o for seed, _, o in ranks[0]["orders"] if seed == case.seed][:EPOCHS])
    if len(ranks) == 1:
        same = ranks[0]["other seed"] == ranks[0]["in order"]
        found[SEEDED] = f"seeds {case.seed} and {case.seed + 1} give the same" if same else ""
        found |= {} if same or found.get(NEIGHBOURS) else {APART: shared(ranks[0]["orders"])}
    return found


def shared(orders: Sequence[tuple[int, int, list[Any]]]) -> str:
    """Describe an epoch that two seeds have in common. Returns "" if there is none."""
    had: dict[str, tuple[int, int]] = {}
    for seed, epoch, order in orders:
        first = had.setdefault(str(order), (seed, epoch))
        if first[0] != seed:
            return f"epoch {epoch} of seed {seed} is epoch {first[1]} of seed {first[0]}"
    return ""


def neighbours_again(epochs: Sequence[list[Batch]]) -> str:
    """Describe an epoch that repeats over half of the first epoch's pairs of neighbors, or return "".

    By chance, about 1 pair in 23 is repeated.
    """
    pairs = []
    for batches in epochs:
        order = [window for batch in batches for window in batch]
        pairs.append({frozenset(pair) for pair in zip(order, order[1:] + order[:1], strict=True)})
    for epoch, later in enumerate(pairs[1:], 1):
        if len(pairs[0] & later) > len(pairs[0]) / 2:
            return f"{len(pairs[0] & later)} of {len(pairs[0])} neighbours of epoch 0 are neighbours in epoch {epoch}"
    return ""


def impure(ranks: list[checks.Observed], when: str) -> str:
    """Describe a batch that was different `when` it was requested "again" or "elsewhere" (in another process).

    Returns "" if there is none.
    """
    for rank, seen in enumerate(ranks):
        for step, said in seen[when].items():
            if said != seen["in order"][step]:
                return f"batch {step} was {seen['in order'][step]}, asked {when} {said} (rank {rank})"
    return ""


def unlike(together: list[Batch], alone: list[Batch]) -> str:
    for step, (batch, right) in enumerate(zip(together, alone, strict=True)):
        if sorted(batch) != sorted(right):
            doubled = sorted(w for w, count in (Counter(batch) - Counter(right)).items() if count)
            return f"in batch {step} window {doubled[0]} is one too many: {sorted(batch)} for {sorted(right)}"
    return ""


def not_once(case: Case, together: list[Batch]) -> str:
    """Describe two windows whose counts differ by more than one after some step, or return ""."""
    counts = Counter(dict.fromkeys(range(case.windows), 0))
    for step, batch in enumerate(together):
        counts.update(batch)
        often, rarely = max(counts, key=lambda w: counts[w]), min(counts, key=lambda w: counts[w])
        if counts[often] - counts[rarely] > 1:
            return (
                f"after batch {step} window {often} has come {counts[often]} times, window {rarely} "
                f"{counts[rarely]} times"
            )
    return ""


FORM = (
    "What comes out is a list of numbers of windows, such as `[17, 3, 20, 8]`. What does your last line return? "
    "(`.tolist()` makes a list of a tensor, `.item()` a number of a single one.)"
)
CRASH = (
    "A batch may begin in one epoch and end in the next one, and the run may have many epochs. Which line expects the "
    "order to be longer than it is?"
)
QUESTIONS = (
    checks.Question(
        lambda d: LEFT_ALONE in d.names,
        "The rank's own random numbers make the dropout masks, and each rank stands elsewhere in them. Which "
        "generator could belong to your function alone?",
    ),
    checks.Question(
        lambda d: PURE in d.names,
        "A run that goes on after step 700 asks for batch 700 first. What does your function remember from one call "
        "to the next, or draw that depends on what was drawn before?",
    ),
    checks.Question(
        lambda d: ELSEWHERE in d.names,
        "Python adds a random number of each process to the hash of a text, so a run that goes on tomorrow gets other "
        "windows, and on two machines the replicas disagree. Which line calls `hash`, and how else can seed and epoch "
        "make one number?",
    ),
    checks.Question(
        lambda d: RANGE in d.names, "Windows are numbered from 0. Where does your function leave their range?"
    ),
    checks.Question(
        lambda d: COUNT in d.names,
        "`batch_size` sequences are the step's, of all replicas together. How many of them are one replica's?",
    ),
    checks.Question(
        lambda d: SAME in d.names,
        "With more replicas the batch becomes another one. Does each replica see the same order and take its part of "
        "the same batch? (Neither the seed nor the order may depend on the replica.)",
    ),
    checks.Question(
        lambda d: EPOCH in d.names,
        "Number all sequences of the run, one after the other: this batch begins at `done * batch_size`. In which "
        "epoch is number n, and at which place of that epoch's order? (A batch may take the end of one epoch and the "
        "beginning of the next.)",
    ),
    checks.Question(
        lambda d: NEIGHBOURS in d.names,
        "One order is turned, reversed, or moved in blocks, and the same windows meet for the whole run. Where is an "
        "order of all windows drawn anew for each epoch?",
    ),
    checks.Question(
        lambda d: SHUFFLED in d.names,
        "The windows come in the order of the text, so a batch is all of one file. What shuffles them?",
    ),
    checks.Question(
        lambda d: NEW_ORDER in d.names,
        "Each epoch goes through the windows in the same order. What would have to enter the seed of the order?",
    ),
    checks.Question(
        lambda d: SEEDED in d.names,
        "The seed changes nothing. Where does it enter the order? (Of the seed of a generator only the lowest 32 bits "
        "count.)",
    ),
    checks.Question(
        lambda d: APART in d.names,
        "A run with another seed goes through epochs of this run again, at another time perhaps. How do seed and epoch "
        "enter the seed of the order, and for which two pairs of them does the same come out?",
    ),
)
