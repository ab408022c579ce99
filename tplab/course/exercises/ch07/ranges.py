"""The check for exercise 7.1, about a vocabulary's padded size and the rows on each rank. It starts no ranks."""

from collections.abc import Callable
from typing import Any

import torch

from tplab.course import checks

WHOLE = "both functions give ints"

# Pairs of a vocabulary size and a multiple (None for the default). Some sizes leave a remainder, and some are smaller
# than one step. The first pair distinguishes most mistakes at p = 4, where a multiple of p isn't always a multiple of
# `multiple`.
SIZES = [
    (50257, None),
    (50257, 100),
    (100, 12),
    (10, 1),
    (21, 1),
    (24, 2),
    (21, 8),
    (3, 8),
    (1024, None),
    (1009, None),
    (4097, 1024),
]


@checks.exercise("7.1", "Padding and ranges")
def padding_and_ranges(pad: Callable[..., Any], span: Callable[..., Any]) -> checks.Verdict:
    generator = checks.fresh_generator()
    sizes = SIZES + [(int(torch.randint(100, 5000, (), generator=generator)), 16) for _ in range(2)]
    for p in reversed(checks.WORLD_SIZES):
        for vocab_size, multiple in sizes:
            said = answers(pad, span, vocab_size, p, multiple)
            right = by_counting(vocab_size, p, multiple or 128)
            note = f"a vocabulary of {vocab_size}" + (f", multiple = {multiple}" if multiple else "")
            asked = questions(said, right, vocab_size, p, multiple or 128)
            checks.verify("7.1", p, [said], [right], questions=asked, note=note, alone=True)
    return checks.Verdict("Every rank has as many rows, and every id has exactly one rank.")


def answers(
    pad: Callable[..., Any], span: Callable[..., Any], size: int, p: int, multiple: int | None
) -> checks.Observed:
    """Return the results of the learner's functions, and a claim that says whether all of them are ints."""
    given = [] if multiple is None else [multiple]
    text = "" if multiple is None else f", {multiple}"
    with checks.calling(f"pad_vocab_size({size}, {p}{text})"):
        padded = pad(size, p, *given)
    ranges = []
    for rank in range(p):
        with checks.calling(f"vocab_range({size}, {rank}, {p}{text})"):
            ranges.append(span(size, rank, p, *given))
    ends = [end for pair in ranges if isinstance(pair, (tuple, list)) for end in pair]
    other = next((type(value).__name__ for value in [padded, *ends] if type(value) is not int), "")
    claim = checks.Claim(f"there is a {other}" if other and padded is not None and None not in ranges else "")
    return {"padded size": padded, "ranges": ranges, WHOLE: claim}


def by_counting(size: int, p: int, multiple: int) -> checks.Observed:
    padded = size
    while padded % (multiple * p):
        padded += 1
    ranges: list[tuple[int, int]] = []
    for rank in range(p):
        start = ranges[-1][1] if rank else 0
        ranges.append((start, start + padded // p))
    return {"padded size": padded, "ranges": ranges}


def questions(said: checks.Observed, right: checks.Observed, size: int, p: int, multiple: int) -> list[checks.Question]:
    """Return the questions to ask about the wrong numbers that the learner's functions returned."""
    step, padded, wanted = multiple * p, said["padded size"], right["padded size"]
    ranges = [tuple(pair) if isinstance(pair, (tuple, list)) else pair for pair in said["ranges"]]

    def next_multiple(of: int) -> int:
        return -(-size // of) * of

    def shifted(first: int, last: int) -> list[tuple[int, int]]:
        return [(start + first, stop + last) for start, stop in right["ranges"]]

    rules = [
        (
            padded is None or any(not isinstance(pair, tuple) or len(pair) != 2 for pair in ranges),
            "`pad_vocab_size` returns one number, `vocab_range` a pair (start, stop). What does each last line return?",
        ),
        (padded == size != wanted, "Can every rank have as many rows with this size? By how much do you round up?"),
        (padded == wanted + step and size % step == 0, "This size is a multiple already. What does yours add to it?"),
        (padded == size // step * step != wanted, "You round down. Who holds the rows of the last ids?"),
        (
            padded == next_multiple(multiple) != wanted,
            f"A multiple of {multiple}, but each of {p} ranks needs a multiple of {multiple} rows. "
            "What does the whole table have to be a multiple of, then?",
        ),
        (padded == next_multiple(p) != wanted, f"Equal parts, but not multiples of {multiple}. Where is `multiple`?"),
        (
            padded == next_multiple(128 * p) != wanted,
            "Right for multiple = 128. Which argument says what it is here?",
        ),
        (padded != wanted, f"Here {multiple} · {p} = {step}. Which is the next number from {size} on that it divides?"),
        (
            ranges == shifted(0, -1),
            "The number of rows, stop - start, is one too small. Is `stop` the last id of this rank, or the one after "
            "it?",
        ),
        (ranges == shifted(1, 1), "Which id is the first one of all, and on which rank is its row?"),
        (
            ranges == right["ranges"][::-1],
            "The parts are right, their order is not: rank 0 holds the first ids.",
        ),
        (
            ranges == [(start, min(stop, size)) for start, stop in right["ranges"]],
            "The last rank's range ends with the vocabulary. How many rows has the table that it holds, padding "
            "included?",
        ),
        (
            ranges == [(rank * size // p, (rank + 1) * size // p) for rank in range(p)],
            "These are parts of the vocabulary. Which table is cut: the vocabulary, or the padded one?",
        ),
        (
            len(set(ranges)) == 1 < p,
            "All ranks get the same range. Which argument tells them apart?",
        ),
        (
            said["ranges"] == right["ranges"],
            "The numbers are right, but a size or an index must be an int. `/` gives a float, also where it comes out "
            "even; which division gives an int?",
        ),
        (
            True,
            "Rank r starts where rank r - 1 stops, rank 0 at id 0, and all have as many rows. Which number is that?",
        ),
    ]
    return [checks.Question(lambda d: True, ask) for fits, ask in rules if fits]
