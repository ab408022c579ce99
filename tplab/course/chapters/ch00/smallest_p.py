"""The check for exercise 0.3: bytes on a tensor-parallel rank, against modules of that size, and the smallest p."""

import re
from collections.abc import Callable
from typing import Any

import torch

from tplab.course.chapters.ch00.amounts import (
    Suspect,
    count,
    expect,
    kept_by_layer,
    pick,
    plain_gpt,
    spelled,
)
from tplab.course.checks import Verdict, calling, current, exercise, fail, fresh_generator, must_refuse
from tplab.course.feedback.verdict import names
from tplab.memory.config import GPTConfig

STATE = 16  # bytes per parameter
WHOLE = ("norm", "positions", "out.bias", "down.bias")

RankBytes = Callable[..., int]


@exercise("0.3", "The smallest p that fits")
def smallest(rank_bytes: RankBytes, smallest_p: Callable[..., int]) -> Verdict:
    generator = fresh_generator()
    for p in (1, 2, 3, 4, 6, 1, 2, 4):
        config, batch = _config(generator, p), 2 * pick(generator, 1, 2)
        call = f"rank_bytes({spelled(config)}, p={p}, micro_batch={batch})"
        with calling(call):
            seen = rank_bytes(config, p, batch)
        right = measured(config, p, batch)
        suspects = _suspects(config, p, batch)
        expect("0.3", call, "the bytes on a rank", seen, right, suspects, _otherwise(config, p, batch))
    for _ in range(4):
        _check_search(smallest_p, _config(generator, 12), 2 * pick(generator, 1, 2))
    _check_defaults(smallest_p, _config(generator, 12))
    return Verdict("What does not get smaller with p decides how far it helps.")


def measured(config: GPTConfig, p: int, batch: int) -> int:
    """Return the bytes that a rank needs: 16 per parameter of its modules, plus what autograd saves for its layers."""
    return STATE * count(plain_gpt(config, p)) + config.num_layers * kept_by_layer(config, p, batch)


def _config(generator: torch.Generator, p: int) -> GPTConfig:
    heads = p * pick(generator, 1, 3) if p < 12 else 12
    return GPTConfig(
        num_layers=3 + 2 * pick(generator, 0, 1),  # with 2 or 4, different mistakes give the same number
        hidden_size=heads * 2 * pick(generator, 2, 5),
        num_heads=heads,
        vocab_size=12 * pick(generator, 20, 40) + 1,  # no p except 1 divides it
        seq_length=pick(generator, 24, 60),  # at 22, the position table would have as many elements as all norms
    )


def _parts(config: GPTConfig, p: int, batch: int) -> tuple[int, int]:
    """Return the correct number of bytes for states and for activations on one rank."""
    return STATE * count(plain_gpt(config, p)), config.num_layers * kept_by_layer(config, p, batch)


def _otherwise(config: GPTConfig, p: int, batch: int) -> str:
    states, kept = _parts(config, p, batch)
    if p == 1:
        return (
            f"Here nothing is divided: {count(plain_gpt(config)):,} parameters of 16 bytes are {states:,}, and the "
            f"activations of all layers {kept:,}. Which of the two is off in yours? (micro_batch is b; the "
            "number of parameters is that of exercise 0.1.)"
        )
    return (
        f"The states are {states:,} bytes, the activations {kept:,}. Print both in yours: which is off? For the "
        "states: which biases and tables does every rank hold whole, and what is rounded up?"
    )


def _suspects(config: GPTConfig, p: int, batch: int) -> list[Suspect]:
    """Return what known mistakes give: mistakes in the states only, in the activations only, and in both."""
    states, kept = _parts(config, p, batch)
    rank, whole = plain_gpt(config, p), plain_gpt(config)
    n, layers, h = count(rank), config.num_layers, config.hidden_size
    one_sequence = kept_by_layer(config, p, 1) * layers
    alone = layers * kept_by_layer(config, 1, batch)
    table = config.vocab_size * h
    per_layer = "What the states take does not depend on the data. Where does micro_batch belong?"
    suspects: list[Suspect] = [
        (states, "These are the states. Where are the activations?"),
        (kept, "These are the activations. Where are the 16 bytes of each parameter?"),
        (n + kept, "These are numbers of parameters, plus bytes of activations. How many bytes has a parameter?"),
        (states + kept // layers, "These are the activations of one layer. How many layers keep theirs?"),
        (states + one_sequence, "The activations are those of one sequence. Where is micro_batch in your formula?"),
        (states + layers * kept, "Are the layers counted twice in the activations?"),
        (batch * (states + kept), per_layer),
        (batch * states + kept, per_layer),
        *((size * n + kept, _SIXTEEN) for size in (2, 4, 8, 12, 14, 18, 20)),
    ]
    if p == 1:
        return [suspect for suspect in suspects if suspect[0] != states + kept]
    part, taken = count(rank.embedding), 1 - 1 / p  # taken: the share that a division by p removes
    extra = {  # how many parameters a rank would have too many (or too few, if negative)
        table - part: "Does every rank hold the whole embedding, or some of its rows?",
        table / p - part: "vocab_size can't be divided by p here. What happens to the last rows?",
        config.vocab_size // p * h - part: "vocab_size is not divided evenly here: is it rounded up or down?",
        -count(rank, "positions") * taken: "Is the table of positions divided? See the list.",
        -count(rank, "norm") * taken: "Are the norms divided? Each works on whole vectors of h numbers.",
        -layers * 2 * h * taken: "Are the biases of `out` and `down` divided? They are added after a sum.",
        -layers * h * taken: "Two biases are added after a sum, and stay whole. Which?",
        -count(rank, *WHOLE) * taken: "Everything is divided by p, apart from the embedding. What stays whole?",
        layers * 7 * h * taken: "Which biases belong to the columns that a rank computes? They are divided.",
        layers * 3 * h * taken: "A rank computes some columns of Q, K and V. How many of their biases does it need?",
        layers * 4 * h * taken: "A rank computes some columns of `up`. How much of its bias does it need?",
    }
    suspects += [(states + STATE * numbers + kept, ask) for numbers, ask in extra.items() if numbers]
    every = STATE * count(whole)
    total = (every + alone) / p
    wrong_kept = [
        (alone, "These activations are those of p = 1. Which terms of the formula have p under them?"),
        (alone / p, "The activations are not all divided by p. Which term of the formula has no p under it?"),
        (kept / p, "The activations of a rank are divided by p once more. Which terms have p under them?"),
        *((kept + value, _SCORES) for value in _score_mistakes(config, p, batch)),
    ]
    suspects += [(states + value, ask) for value, ask in wrong_kept]
    suspects += [
        (every + alone, "This is p = 1. What is divided by p?"),
        (total, "Not everything is divided by p: neither all parameters nor all activations. What stays whole?"),
        (every / p + kept, "The states are not all divided by p. Which parameters does every rank hold whole?"),
        (every + kept, "The activations are right. Are weights, gradients and optimizer state divided by nothing?"),
        (every / p + alone, "Are the activations divided by nothing? And which parameters are whole on every rank?"),
    ]
    return [suspect for suspect in suspects if abs(suspect[0] - (states + kept)) > 0.5]


_SIXTEEN = "How many bytes does Adam in mixed precision keep for each parameter? See section 2."
_SCORES = "Are the scores divided by p? They belong to heads, and each rank has num_heads / p of them."


def _score_mistakes(config: GPTConfig, p: int, batch: int) -> list[float]:
    scores = 5 * config.num_layers * batch * config.num_heads * config.seq_length**2
    return [scores - scores / p, -scores / p]


def _check_search(smallest_p: Callable[..., int], config: GPTConfig, batch: int) -> None:
    """Check the smallest p with exactly the bytes it needs and with one byte less, and the error if no p fits."""
    largest = 8
    needs = {p: measured(config, p, batch) for p in (1, 2, 3, 4, 6)}  # the divisors of 12 up to 8
    for right, size in needs.items():
        for capacity, fits in ((size, right), (size - 1, _next(needs, right))):
            call = f"smallest_p({spelled(config)}, gpu_bytes={capacity}, micro_batch={batch}, largest={largest})"
            if fits is None:
                ask = (
                    f"At p = {right}, the largest up to {largest} that divides num_heads = {config.num_heads}, a rank "
                    f"still needs {size} bytes. What should come after the loop, when no p fits?"
                )
                _must_refuse(smallest_p, (config, capacity, batch, largest), call, ask, (right, size))
                continue
            with calling(
                call, f"p = {fits} fits: a rank needs {needs[fits]} bytes there. What does your loop do then?"
            ):
                found = smallest_p(config, capacity, batch, largest)
            if found != fits or isinstance(found, bool):
                fail("0.3", f"{call} returned {found!r}; right is {fits}.", _ask(found, fits, needs, config, capacity))
    current().compared["the smallest p"] = None
    capacity = needs[3]
    call = f"smallest_p({spelled(config)}, gpu_bytes={capacity}, micro_batch={batch}, largest=2)"
    ask = "p = 3 would fit, but `largest` is 2, so only 1 and 2 may be tried. Which p does your loop try?"
    _must_refuse(smallest_p, (config, capacity, batch, 2), call, ask, (2, needs[2]))


def _check_defaults(smallest_p: Callable[..., int], config: GPTConfig) -> None:
    """Check that micro_batch defaults to one sequence, and that p = 6 is tried by default."""
    capacity = measured(config, 6, 1)
    call = f"smallest_p({spelled(config)}, gpu_bytes={capacity})"
    ask = f"micro_batch is 1 and largest is 8 when they are left out; at p = 6 a rank needs {capacity} bytes then."
    with calling(call, ask):
        found = smallest_p(config, capacity)
    if found != 6:
        fail("0.3", f"{call} returned {found!r}; right is 6.", ask)


def _must_refuse(
    smallest_p: Callable[..., int], arguments: tuple[Any, ...], call: str, ask: str, says: tuple[int, int]
) -> None:
    """Require a ValueError whose message contains both numbers. The bytes may have thousands separators."""
    told: list[str] = []

    def tell() -> Any:
        try:
            return smallest_p(*arguments)
        except ValueError as error:
            told.append(str(error))
            raise

    must_refuse("0.3", tell, ask, what=call)
    plain = re.sub(r"(?<=\d)[,_' ](?=\d{3})", "", told[0])
    ask = f"{says[0]} is the largest p that was tried, and a rank needs {says[1]} bytes there. What does yours name?"
    if missing := [str(number) for number in says if number not in map(int, re.findall(r"\d+", plain))]:
        fail("0.3", f"{call} raises ValueError, but its message does not name {names(missing)}.", ask, told[0])


def _next(needs: dict[int, int], p: int) -> int | None:
    return next((larger for larger in needs if larger > p), None)


def _ask(found: Any, right: int, needs: dict[int, int], config: GPTConfig, capacity: int) -> str:
    if not isinstance(found, int) or isinstance(found, bool):
        return "It should return one whole number, p. What does your last line return?"
    if found in needs.values():
        return "That is what a rank needs, in bytes. Which p is it?"
    if found not in needs:
        return f"Does {found} divide num_heads = {config.num_heads}? Each rank takes whole heads."
    if needs[found] > capacity:
        return f"At p = {found} a rank needs {needs[found]} bytes. Is that at most {capacity}?"
    return (
        f"p = {right} is smaller and fits: a rank needs {needs[right]} bytes there. Do you try it, and in which order?"
    )
