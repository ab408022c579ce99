"""The check for exercise 9.2, the seeds of a rank's streams, which must be equal where they should be and only there.

A stream is a named random state. Any seeding scheme that follows the exercise's rules is right. The check calls the
answer on real ranks first, and then for large numbers of ranks in a single process. There may be several copies of the
model, each with the same number of ranks.
"""

import builtins
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from tplab.course import checks

STREAMS = ("init", "replicated", "sharded")
COPIES = 3
MANY = ((1000, [*range(5), *range(995, 1000)]), (8, range(1000)))  # (ranks, copies), checked in this process
# Among n = 300,000 streams, random 32-bit seeds collide with a probability of 1 - exp(-n**2 / 2**33) = 0.99997. The
# copies are so far apart that seeds that repeat after 2**16 to 2**19 streams collide, too.
MOST = (1000, [*range(224), *range(450, 525), 999])
TORCH_SEEDS = 2**32  # the CPU's generator uses only the last 32 bits of a seed

RIGHT_FORM = "each seed is a whole number from 0 on"
ALONE = "no two streams have the same seed"
FOLLOWS = "another seed of the run gives other seeds"
REPEATED = "the next run has the same seeds"

Key = tuple[Any, ...]  # a stream's name, then the copy and the rank that it belongs to, if any


def ask(stream_seeds: Callable[..., Any], seed: int) -> checks.Observed:
    """Call the learner's function for this rank in every copy of the model. Runs on every rank."""
    rank, p = dist.get_rank(), dist.get_world_size()
    said = []
    for copy in range(COPIES):
        with checks.called_as(f"stream_seeds({seed}, {rank}, {p}, copy={copy})"):
            said.append(stream_seeds(seed, rank, p, copy=copy))
    return {"said": said}


def form(said: Any) -> str:
    """Describe what is wrong with the form of the seeds that the answer returned. Returns "" if nothing is wrong."""
    if not isinstance(said, dict) or set(said) != set(STREAMS):
        return f"it returns {said!r}"[:100]
    wrong = [f"{name}: {value!r}" for name, value in said.items() if type(value) is not int or not 0 <= value < 2**63]
    return ", ".join(wrong)


def clash(answers: dict[tuple[int, int], dict[str, int]]) -> tuple[str, bool]:
    """Describe two streams that draw the same numbers, or return "". Also return whether their seeds differ anyway."""
    owners: dict[int, tuple[Key, int]] = {}
    for (rank, copy), said in answers.items():
        for key in (("init",), ("replicated", copy), ("sharded", copy, rank)):
            value = said[key[0]]
            other, number = owners.setdefault(value % TORCH_SEEDS, (key, value))
            if other != key:
                if number == value:
                    return f"{told(other)} and {told(key)} both have seed {value}", False
                return (
                    f"{told(other)} has seed {number}, {told(key)} has {value}, which is a multiple of 2**32 away",
                    True,
                )
    return "", False


def told(key: Key) -> str:
    """Describe a stream in words."""
    stream, *of = key
    if len(of) == 2:
        return f"{stream} of rank {of[1]}, copy {of[0]}"
    return f"{stream} of copy {of[0]}" if of else stream


def judge(
    answers: dict[tuple[int, int], dict[str, int]], alone: dict[int, dict[str, int]]
) -> Iterator[checks.Observed]:
    """Yield for each rank the seeds that must equal a single rank's, and the claim that no two streams share a seed."""
    words, _ = clash(answers)
    for rank in sorted({rank for rank, _ in answers}):
        yield {
            "init": [answers[rank, copy]["init"] for copy in alone],
            "replicated": [answers[rank, copy]["replicated"] for copy in alone],
            ALONE: checks.Claim(words),
        }


def right(alone: dict[int, dict[str, int]]) -> checks.Observed:
    return {
        "init": [alone[0]["init"]] * len(alone),
        "replicated": [said["replicated"] for said in alone.values()],
    }


@checks.exercise("9.2", "The seeds of the streams")
def seeds(stream_seeds: Callable[..., Any]) -> checks.Verdict:
    seed = int(torch.randint(1000, 10**6, (), generator=checks.fresh_generator()))
    alone: dict[int, dict[str, int]] = {}
    for p in checks.WORLD_SIZES:
        seen = [rank["said"] for rank in checks.run_ranks(ask, p, stream_seeds, seed)]
        wrong = [form(next(filter(form, said), said[0])) for said in seen]
        if any(wrong):
            observed = [{RIGHT_FORM: checks.Claim(words)} for words in wrong]
            checks.verify("9.2", p, observed, [{} for _ in range(p)], questions=QUESTIONS)
        alone = alone or dict(enumerate(seen[0]))
        answers = {(rank, copy): seen[rank][copy] for copy, rank in product(range(COPIES), range(p))}
        observed = [mine | {RIGHT_FORM: checks.Claim("")} for mine in judge(answers, alone)]
        checks.verify("9.2", p, observed, [right(alone)] * p, questions=QUESTIONS + collision(answers))
    check_many(stream_seeds, seed)
    return checks.Verdict("No two streams share a seed, on up to 1000 ranks; what is replicated does not depend on p.")


def check_many(stream_seeds: Callable[..., Any], seed: int) -> None:
    """Check many ranks and copies in this process, then a different seed, and then a run with a different `hash`."""

    def say(seed: int, rank: int, p: int, copy: int) -> dict[str, int]:
        with checks.calling(f"stream_seeds({seed}, {rank}, {p}, copy={copy})"):
            return stream_seeds(seed, rank, p, copy=copy)

    for (p, copies), run in (*product(MANY, (seed, 0)), (MOST, seed)):
        answers = {(rank, copy): say(run, rank, p, copy) for copy, rank in product(copies, range(p))}
        words = [form(said) for (rank, _), said in answers.items() if rank in (0, p - 1)]
        observed: checks.Observed = {
            RIGHT_FORM: checks.Claim(next(filter(None, words), "")),
            ALONE: checks.Claim(clash(answers)[0]),
        }
        by_chance = copies is MOST[1]
        note = f"seed {run}, copies up to {copies[-1]} of the model on {p} ranks each"
        if by_chance:
            different = {said["sharded"] % TORCH_SEEDS for said in answers.values()}
            asked = (*QUESTIONS, TOO_FEW if len(answers) - len(different) > 1000 else BY_CHANCE)
        else:
            asked = QUESTIONS + collision(answers, run)
        checks.verify("9.2", p, [observed], [{}], questions=asked, note=note, alone=True)
    mine, others = say(seed, 0, 1, 0), say(seed + 12345, 0, 1, 0)
    kept = [name for name in STREAMS if others[name] == mine[name]]
    with other_hashes():
        again = say(seed, 0, 1, 0)
    moved = [f"{name} was {mine[name]} and is {again[name]}" for name in STREAMS if again[name] != mine[name]]
    observed = {
        FOLLOWS: checks.Claim(
            f"{', '.join(kept)}: the same for seed = {seed} and seed = {seed + 12345}" if kept else ""
        ),
        REPEATED: checks.Claim(", ".join(moved)),
    }
    checks.verify("9.2", 1, [observed], [{}], questions=QUESTIONS, alone=True)


@contextmanager
def other_hashes() -> Iterator[None]:
    """Context manager that changes the `hash` of strings, as if Python had been restarted."""
    real = builtins.hash
    builtins.hash = lambda value: real(repr(value) + "!") if "'" in repr(value) else real(value)
    try:
        yield
    finally:
        builtins.hash = real


def collision(answers: dict[tuple[int, int], dict[str, int]], run: int = -1) -> tuple[checks.Question, ...]:
    """Return the questions about streams with the same seed. Pass the run's seed as `run` if it may be the cause."""
    words, wraps = clash(answers)
    if run == 0:
        text = (
            "With seed 0, and only with a small one, two streams meet: does `seed` stand in each of yours with another "
            "factor? Add one and the same `seed` to all, and numbers of their own."
        )
    elif wraps:
        text = (
            "The CPU's generator looks only at the last 32 bits of a seed. By how much do your seeds differ? Small "
            "steps are enough."
        )
    elif "rank" not in words or words.count("sharded") == 2:
        text = (
            "Write down the seeds of all ranks of two copies of the model, one below the other. Which step, from "
            "rank to rank or from copy to copy, is too small?"
        )
    else:
        text = (
            "The seed of a rank in one stream is that of another stream. Write down the seeds of all ranks in one row: "
            "where must the streams lie, so that `seed + rank` never reaches the next one?"
        )
    return (checks.Question(lambda d: ALONE in d.names, text),)


TOO_FEW = checks.Question(
    lambda d: ALONE in d.names,
    "Many streams meet, but only if there are hundreds of copies. 1000 copies with 1000 ranks each need about a "
    "million different seeds. Does one of your lines limit the seeds to a smaller range, for example by taking a "
    "remainder?",
)
BY_CHANCE = checks.Question(
    lambda d: ALONE in d.names,
    "Only a few streams meet, and only if there are very many of them. Do your seeds come from a hash or from a random "
    "generator? If you draw 300,000 random numbers of 32 bits, you can expect about ten pairs of equal ones, and torch "
    "looks at no more than 32 bits on the CPU. How could you number the streams so that no two of them can ever get "
    "the same seed?",
)

QUESTIONS: tuple[checks.Question, ...] = (
    checks.Question(
        lambda d: RIGHT_FORM in d.names,
        'The result is a dictionary {"init": ..., "replicated": ..., "sharded": ...} of whole numbers, none of them '
        "negative.",
    ),
    checks.Question(
        lambda d: "init" in d.names,
        "Every rank of every copy draws the first values from this seed, and they are one model. May the rank, the "
        "number of ranks or the copy be in it?",
    ),
    checks.Question(
        lambda d: "replicated" in d.names,
        "The ranks of one copy drop the same places of the residual stream, whatever their number is. What may be in "
        "this seed, and what not?",
    ),
    checks.Question(
        lambda d: REPEATED in d.names,
        "Asked a second time, as a new process would ask, your function names other seeds: no run could be "
        "repeated, and ranks on two machines would disagree. Python's `hash` of a text is another number in every "
        "process.",
    ),
    checks.Question(
        lambda d: FOLLOWS in d.names,
        "A run with another seed has to draw other numbers. Which of your seeds does not contain `seed`?",
    ),
)
