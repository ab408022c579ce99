"""What the check of exercise 7.3 asks when an embedding is wrong."""

from collections.abc import Callable

from tplab.course.chapters.ch07.lookup_questions import PADDING_TRAINED
from tplab.course.checks import Differences, Question, has_kind

REFUSES = "an id outside the vocabulary is an IndexError that names the id and its position"
SILENT = "gives no error, but a vector of zeros"
OTHER_VECTOR = "gives no error, but some other vector"
PLACE = [1, 2]  # of the wrong id in ids [3, 8]
NOT_ZERO_AT_FIRST = "first values in which the row of padding_idx is not zeros"

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


def _says(what: str) -> Callable[[Differences], bool]:
    return lambda d: what in d.text(REFUSES)


QUESTIONS = (
    Question(
        lambda d: "parameters" in d.names,
        "One parameter, `weight`, with as many rows as this rank holds, padding included. How many are stop - start?",
    ),
    Question(
        has_kind("first values", "dtype"),
        "The table has another dtype than was asked for. Which of the arguments are for `torch.empty`?",
    ),
    Question(
        has_kind("first values", NOT_ZERO_AT_FIRST),
        "As in nn.Embedding, the vector of padding_idx starts as zeros. On which rank is its row, and which row of the "
        "shard is it?",
    ),
    Question(
        lambda d: "first values" in d.names,
        "Each rank's first values are its rows of the master weight, with zeros in the padding; only the row of "
        "padding_idx becomes zeros as well. What else do you change, after `init_parameter` or in its place?",
    ),
    Question(
        has_kind("dweight", PADDING_TRAINED),
        "padding_idx gets a gradient. Does the look-up know which row of this shard it is?",
    ),
    Question(
        lambda d: "dweight" in d.names and "out" not in d.names,
        "A row that should learn does not, or the other way round. On a rank that does not have the row of "
        "padding_idx, which row do you keep from learning?",
    ),
    Question(
        _says(SILENT),
        "No token has that id. A rank takes it for another rank's, or for a row of padding, and zeros come out, as if "
        "it were a token like any other. Which ids are in the vocabulary, and who has to look before anybody looks up?",
    ),
    Question(
        _says(OTHER_VECTOR),
        "An id outside the vocabulary has found a row. Where does your test end: at the vocabulary, or at the padded "
        "table?",
    ),
    Question(
        _says("IndexError without"),
        f"Whoever reads the error wants to find the token in a batch of thousands: the id, and its position, here "
        f"{PLACE}. What does `wrong.nonzero()[0]` give?",
    ),
    Question(
        lambda d: REFUSES in d.names and not d.names & {"out", "dweight"},
        "nn.Embedding raises IndexError for such an id, and so should this. What does yours raise, and is it your own "
        "test that raises it?",
    ),
    Question(
        lambda d: "out" in d.names and d.kind("out") != "none",
        "The look-up is that of exercise 7.2. Which of its arguments differ: the ids, the weight, start and stop?",
    ),
)
