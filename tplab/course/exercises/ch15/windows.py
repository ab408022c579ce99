"""The check of exercise 15.2, a pure function that returns the windows of text that a replica reads in a step.

Any shuffle is right. The check tests the properties that it must have: each window comes once per epoch, the batch is
the same for any number of replicas, and nothing is remembered between calls or taken from the process's random state.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tplab.course.checks.describe import describe
from tplab.course.checks.forms.alone import Alone, Call, one
from tplab.course.checks.observation import Claim, Observed, Seen, portable
from tplab.course.checks.run_answer import called_as
from tplab.course.checks.trials import exercise
from tplab.runtime.transport import can_be_sent, dumps, loads

FORM = "own_windows returns a list of ints"
COUNT = "number of windows per replica"
COMPLETE = "every step has a complete batch"
RANGE = "all of these windows exist"
ONCE = "a batch within an epoch contains no window twice"
EPOCH = "each window comes once per epoch"
SAME = "all replicas together get what a single one would"
PURE = "the same arguments give the same windows"
ELSEWHERE = "the windows are the same in a different process"
LEFT_ALONE = "the random states stay as they are"
NEW_ORDER = "each epoch has a new order"
NEIGHBORS = "each epoch has different windows next to each other"
SHUFFLED = "the windows are shuffled"
SEEDED = "a different seed gives a different order"
APART = "two seeds have no epoch in common"

SEEDS, EPOCHS = 4, 4  # numbers of consecutive seeds and of epochs per seed, all of which are compared
# For these seeds, the first batches of many epochs are compared. Two batches of 16 out of 64 windows are never equal by
# chance. If epoch e of a seed has the order of epoch e - k of the next one, some pair of these epochs shows that, for
# every k below 10,000.
APART_SEEDS, APART_WINDOWS, APART_BATCH = (0, 1, 2, 11, 1000, 4000), 64, 16
APART_EPOCHS = (*range(100), *range(100, 10_000, 100), 9_999)
MANY = 3  # this many batches are never in order by chance; two batches of 4 out of 10 windows are, once in 3,150 epochs

Batch = list[int]


@dataclass(frozen=True)
class Case:
    """A run, given by its numbers of windows, of sequences per step, and of steps to check, and by its seed."""

    windows: int
    batch: int
    steps: int
    seed: int

    def note(self, replicas: int) -> str:
        many = "a single replica" if replicas == 1 else f"{replicas} replicas"
        return f"own_windows with {self.windows} windows, {self.batch} per step, and {many}"


def run(own_windows: Callable[..., Any], call: Call) -> Seen:
    """Ask for the windows of all replicas, for all steps in order, and for some of them again."""
    case, replicas, disorder = call.given
    with random_states_kept():
        ranks = [ask(own_windows, case, replica, replicas, disorder) for replica in range(replicas)]
        for replica, seen in enumerate(ranks):
            for step, said in enumerate(seen["in order"]):
                if not isinstance(said, list) or not all(isinstance(number, int) for number in said):
                    form = f"own_windows({step}, {case.seed}, {case.windows}, {case.batch}, {replica}, {replicas})"
                    return one({FORM: Claim(f"{form} returned {describe(said)}"), COUNT: case.batch // replicas})
        alone = [ask_once(own_windows, case, step, case.seed, 0, 1) for step in range(case.steps)]
    together = [[window for seen in ranks for window in seen["in order"][step]] for step in range(case.steps)]
    found = {name: Claim(text) for name, text in claims(case, ranks, together, alone).items()}
    return one({FORM: Claim(""), **found, COUNT: len(ranks[0]["in order"][0])})


def right(call: Call) -> Seen:
    case, replicas, _ = call.given
    return one({COUNT: case.batch // replicas})


def calls(generator: torch.Generator) -> Iterator[Call]:
    draw = torch.randint(1000, (3,), generator=generator).tolist()
    cases = [Case(48, 8, 18, draw[0]), Case(30, 8, 12, draw[0]), Case(10, 4, 8, draw[0])]
    for replicas in (1, 2, 4):
        for case in cases:
            yield Call((case, replicas, 1 + draw[0]), case.note(replicas))


def ask_once(own_windows: Callable[..., Any], case: Case, step: int, seed: int, replica: int, replicas: int) -> Any:
    arguments = step, seed, case.windows, case.batch, replica, replicas
    with called_as(f"own_windows{arguments}"):
        return plain(own_windows(*arguments))


def ask(own_windows: Callable[..., Any], case: Case, replica: int, replicas: int, disorder: int) -> Observed:
    """Return what a replica gets. `disorder` determines the random states, which mustn't matter."""
    torch.manual_seed(disorder + replica)
    random.seed(disorder + replica)

    def own(step: int, seed: int = case.seed) -> Any:
        return ask_once(own_windows, case, step, seed, replica, replicas)

    fresh = loads(dumps(own_windows)) if can_be_sent(own_windows) else own_windows  # as in a new process
    before = torch.get_rng_state(), random.getstate()
    in_order = [own(step) for step in range(case.steps)]
    touched = not torch.equal(before[0], torch.get_rng_state()) or before[1] != random.getstate()
    with hashes_of_another_process(own_windows):
        elsewhere = {step: own(step) for step in range(min(6, case.steps))}
    again = {step: own(step) for step in random.sample(range(case.steps), min(6, case.steps))}
    orders = []
    if replicas == 1 and case.windows % case.batch == 0:
        for seed in range(case.seed, case.seed + SEEDS):
            orders += [(seed, epoch, epoch_of(own, case, seed, epoch)) for epoch in range(EPOCHS)]
        orders += beginnings(own_windows)
    other = [own(step, case.seed + 1) for step in range(case.steps)]
    late = {step: ask_once(fresh, case, step, case.seed, replica, replicas) for step in reversed(range(case.steps))}
    seen = {
        "in order": in_order,
        "again": again,
        "late": late,
        "other seed": other,
        "touched": touched,
        "orders": orders,
    }
    return seen | {"elsewhere": elsewhere}


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Context manager that restores the random states of torch and Python."""
    before = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(before)


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
        for epoch in APART_EPOCHS:
            arguments = epoch * (APART_WINDOWS // APART_BATCH), seed, APART_WINDOWS, APART_BATCH, 0, 1
            with called_as(f"own_windows{arguments}"):
                found.append((seed, epoch, [plain(function(*arguments))]))
    return found


def epoch_of(own: Callable[..., Any], case: Case, seed: int, epoch: int) -> list[Any]:
    """Return the windows that a replica takes in an epoch of complete batches."""
    per_epoch = case.windows // case.batch
    return [own(step, seed=seed) for step in range(epoch * per_epoch, (epoch + 1) * per_epoch)]


def plain(said: Any) -> Any:
    """Convert a list, tuple, or range of ints to a list. Anything else is converted by `portable`."""
    if isinstance(said, (list, tuple, range)):
        numbers = list(said)
        if all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
            return numbers
    return portable(said)


def claims(case: Case, ranks: list[Observed], together: list[Batch], alone: list[Batch]) -> dict[str, str]:
    """Return claims that say in words what doesn't hold. Later claims are made only if earlier ones hold."""
    wrong = [w for batch in together for w in batch if not 0 <= w < case.windows]
    found = {RANGE: f"window {wrong[0]}, but there are only 0 to {case.windows - 1}" if wrong else ""}
    found[PURE] = impure(ranks, "again") or impure(ranks, "late")
    found[ELSEWHERE] = "" if found[PURE] else impure(ranks, "elsewhere")
    found[LEFT_ALONE] = "own_windows draws from them or sets their seed" if any(r["touched"] for r in ranks) else ""
    found[COMPLETE] = incomplete(case, ranks)
    if any(found.values()) or any(len(batch) != case.batch for batch in together):
        return found
    if len(ranks) > 1:
        found[SAME] = unlike(together, alone)
        found[EPOCH] = not_once(case, together)
    else:
        found[ONCE] = twice(case, together)
        found[EPOCH] = "" if found[ONCE] else not_once(case, together)
    if any(found.values()):
        return found
    whole = together[: case.windows // case.batch]
    in_order = all(sorted(batch) == list(range(i * case.batch, (i + 1) * case.batch)) for i, batch in enumerate(whole))
    if len(whole) >= MANY:
        found[SHUFFLED] = "they come in the order of the text" if in_order else ""
    if case.windows % case.batch == 0:  # an epoch consists of complete batches
        per_epoch = case.windows // case.batch
        epochs = [[sorted(b) for b in together[i : i + per_epoch]] for i in range(0, len(together), per_epoch)]
        found[NEW_ORDER] = "epoch 1 has the same batches as epoch 0" if epochs[1] == epochs[0] else ""
        if len(ranks) == 1 and not found[NEW_ORDER]:
            found[NEIGHBORS] = neighbors_again([o for seed, _, o in ranks[0]["orders"] if seed == case.seed][:EPOCHS])
    if len(ranks) == 1:
        same = ranks[0]["other seed"] == ranks[0]["in order"]
        found[SEEDED] = f"seeds {case.seed} and {case.seed + 1} give the same windows" if same else ""
        found |= {} if same or found.get(NEIGHBORS) else {APART: shared(ranks[0]["orders"])}
    return found


def incomplete(case: Case, ranks: list[Observed]) -> str:
    """Describe a step in which a replica gets another number of windows than in the first step, or return ""."""
    for replica, seen in enumerate(ranks):
        for step, batch in enumerate(seen["in order"]):
            if len(batch) != len(seen["in order"][0]):
                first = len(seen["in order"][0])
                return f"in step {step}, replica {replica} gets {len(batch)} windows, but in step 0, it gets {first}"
    return ""


def shared(orders: Sequence[tuple[int, int, list[Any]]]) -> str:
    """Describe an epoch that two seeds have in common. Returns "" if there is none."""
    had: dict[str, tuple[int, int]] = {}
    for seed, epoch, order in orders:
        first = had.setdefault(str(order), (seed, epoch))
        if first[0] != seed:
            return f"epoch {epoch} of seed {seed} has the order of epoch {first[1]} of seed {first[0]}"
    return ""


def neighbors_again(epochs: Sequence[list[Batch]]) -> str:
    """Describe an epoch that repeats over half of the first epoch's pairs of neighbors, or return "".

    By chance, about 1 pair in 23 is repeated.
    """
    pairs = []
    for batches in epochs:
        order = [window for batch in batches for window in batch]
        pairs.append({frozenset(pair) for pair in zip(order, order[1:] + order[:1], strict=True)})
    for epoch, later in enumerate(pairs[1:], 1):
        if len(pairs[0] & later) > len(pairs[0]) / 2:
            kept = f"{len(pairs[0] & later)} of {len(pairs[0])} pairs of neighbors"
            return f"{kept} in epoch 0 are also neighbors in epoch {epoch}"
    return ""


def impure(ranks: list[Observed], when: str) -> str:
    """Describe a batch that was different `when` it was requested "again" or "elsewhere" (in another process).

    Returns "" if there is none.
    """
    for rank, seen in enumerate(ranks):
        for step, said in seen[when].items():
            if said != seen["in order"][step]:
                return f"in step {step}, replica {rank} first got {seen['in order'][step]}, and then {said}"
    return ""


def unlike(together: list[Batch], alone: list[Batch]) -> str:
    for step, (batch, right) in enumerate(zip(together, alone, strict=True)):
        if sorted(batch) != sorted(right):
            doubled = sorted(w for w, count in (Counter(batch) - Counter(right)).items() if count)
            return f"in step {step}, window {doubled[0]} is one too many: {sorted(batch)} instead of {sorted(right)}"
    return ""


def twice(case: Case, together: list[Batch]) -> str:
    """Describe a batch that contains a window twice although all of it belongs to the same epoch, or return ""."""
    for step, batch in enumerate(together):
        first = step * case.batch
        window, count = Counter(batch).most_common(1)[0]
        if count > 1 and first // case.windows == (first + case.batch - 1) // case.windows:
            return f"in step {step}, window {window} comes {count} times"
    return ""


def not_once(case: Case, together: list[Batch]) -> str:
    """Describe two windows whose counts differ by more than one after some step, or return ""."""
    counts = Counter(dict.fromkeys(range(case.windows), 0))
    for step, batch in enumerate(together):
        counts.update(batch)
        often, rarely = max(counts, key=lambda w: counts[w]), min(counts, key=lambda w: counts[w])
        if counts[often] - counts[rarely] > 1:
            return (
                f"after step {step}, window {often} has come {counts[often]} times, and window {rarely} "
                f"{counts[rarely]} times"
            )
    return ""


exercise(
    "15.2", "Fix it: the same data twice", takes=["own_windows"],
    trials=[Alone(calls=calls, run=run, right=right)],
    passed="A run's position in the data is the number of its steps and nothing else, so it can't get lost.",
)  # fmt: skip
