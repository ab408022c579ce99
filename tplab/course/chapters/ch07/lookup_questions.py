"""What the check of exercise 7.2 asks when a look-up is wrong."""

from tplab.course.checks import INPUTS_QUESTION, Question, has_kind, has_no_gradient, kind_is

NOT_ZEROED = "what comes out when every rank adds a row for every id: the foreign ones are not zeros"
FIRST_ROW_LOST = "what comes out when the first row of every rank is taken for foreign"
MAXIMUM = "the largest over the ranks, not the sum"
CLAMPED = "what comes out when a foreign id finds the nearest row of the shard"
WRAPPED = "what comes out when a foreign id finds some row of the shard, counted round it"
OWN = "what this rank finds alone, before the sum"
PADDING_TRAINED = "the gradient with that of the padding row"
FOREIGN_IN_ROW_0 = "the gradient with those of all foreign ids added to row 0"

WHOSE_GROUP = "Which call adds up over the default group of all ranks, since it was not given `group`?"
CRASH = (
    "The rows of this rank's shard are numbered from 0, whatever ids they belong to. Which row of it holds the id "
    "`start`? And which row do you ask for where the id is not one of this rank's?"
)
BORDER_CRASH = (
    "With ids inside the shards all went well; here some are the first or the last of a rank. Is the id `stop` one of "
    "this rank's? Try the mask by hand for the ids start - 1, start, stop - 1 and stop."
)
FOREIGN_CRASH = (
    "Here all ids are the last rank's: on every other rank all of them are foreign. Which of your lines can't do with "
    "no id at all?"
)

QUESTIONS = (
    INPUTS_QUESTION,
    Question(
        has_kind("out", "none", "type", "structure", "dtype"),
        "What does the last line return? One tensor [..., h] of the table's dtype, the same on every rank.",
    ),
    Question(
        has_kind("out", "shape", "whole"),
        "The vectors of the ranks are to be added, not put beside each other. What shape has one rank's part, and the "
        "result?",
    ),
    Question(
        kind_is("out", OWN),
        "A rank has found its own vectors, with zeros for the others. Who adds up what the ranks have found, and does "
        "your function return that sum?",
    ),
    Question(
        has_kind("out", NOT_ZEROED),
        "For a foreign id any row will do at first, but it must not count. Where do its vectors become zeros, before "
        "the sum?",
    ),
    Question(
        has_kind("out", CLAMPED, WRAPPED),
        "A foreign id has found a row too, one that belongs to another id. Each vector must come from one rank: what "
        "do all others have to add?",
    ),
    Question(
        has_kind("out", FIRST_ROW_LOST),
        "The first row of each rank is never found. Is the id `start` one of this rank's? Try the mask by hand for the "
        "ids start - 1 and start.",
    ),
    Question(
        has_kind("out", MAXIMUM),
        "The others put in zeros, and a zero is larger than a negative number. What has to be done with the ranks' "
        "vectors, so that zeros change nothing?",
    ),
    Question(has_kind("out", "1/p"), "Only one rank contributes to each vector. By what is the sum divided, and why?"),
    Question(
        has_kind("out", "zeros"),
        "All vectors are zeros. For which ids is your mask true: for those that are here, or for the foreign ones?",
    ),
    Question(
        lambda d: has_no_gradient("dweight")(d) and not (has_kind("dweight", "zeros")(d) and "out" in d.names),
        "The table gets no gradient. Which line does autograd not know about: an in-place `dist.all_reduce`, a "
        "`detach`, a `.data`?",
    ),
    Question(
        has_kind("dweight", PADDING_TRAINED),
        "The padding row must not learn. `F.embedding` has an argument for that: does `padding_row` reach it?",
    ),
    Question(
        lambda d: "out" not in d.names and {"dweight", "backward traffic"} <= d.names,
        "Something is summed over the ranks in the backward pass. The gradient is whole already: every rank holds the "
        "same dY, and a row is its own alone. Which line brings that sum? What does the backward of g do?",
    ),
    Question(
        has_kind("dweight", FOREIGN_IN_ROW_0),
        "The output is right, but row 0 learns from ids that are not here. Does the gradient of a foreign place still "
        "reach the row that stood in for it?",
    ),
    Question(
        lambda d: bool(d.names) and d.names <= {"forward traffic", "backward traffic"},
        "The numbers are right, the communication is not: one all-reduce of the vectors [..., h] forward, nothing "
        "backward. Which call sends more, and what for?",
    ),
    Question(
        lambda d: "out" in d.names,
        "Write down for one id: on which rank is its row, which row of that rank's shard is it, what do the others "
        "add, what comes out of the sum?",
    ),
    Question(
        "dweight", "Add by hand: an id that occurs twice gives its row the sum of two gradients. What do you get?"
    ),
)
