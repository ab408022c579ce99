"""What the check of exercise 15.2 asks, by what does not hold."""

from tplab.course.checks import Question

COUNT = "windows of a replica in a step"
RANGE = "there is such a window"
EPOCH = "each window comes once in an epoch"
SAME = "the batch of all replicas is the same as with one"
PURE = "the same arguments give the same windows"
LEFT_ALONE = "the rank's own random numbers go on as they would have"
NEW_ORDER = "each epoch has an order of its own"
NEIGHBOURS = "in each epoch other windows stand side by side"
SHUFFLED = "the windows are shuffled"
SEEDED = "another seed gives another order"
APART = "another seed has epochs of its own"

FORM = (
    "What comes out is a list of numbers of windows, such as `[17, 3, 20, 8]`. What does your last line return? "
    "(`.tolist()` makes a list of a tensor, `.item()` a number of a single one.)"
)
CRASH = (
    "A batch may begin in one epoch and end in the next one, and the run may have many epochs. Which line expects the "
    "order to be longer than it is?"
)
QUESTIONS = (
    Question(
        lambda d: LEFT_ALONE in d.names,
        "The rank's own random numbers make the dropout masks, and each rank stands elsewhere in them. Which "
        "generator could belong to your function alone?",
    ),
    Question(
        lambda d: PURE in d.names,
        "A run that goes on after step 700 asks for batch 700 first. What does your function remember from one call "
        "to the next, or draw that depends on what was drawn before?",
    ),
    Question(lambda d: RANGE in d.names, "Windows are numbered from 0. Where does your function leave their range?"),
    Question(
        lambda d: COUNT in d.names,
        "`batch_size` sequences are the step's, of all replicas together. How many of them are one replica's?",
    ),
    Question(
        lambda d: SAME in d.names,
        "With more replicas the batch becomes another one. Does each replica see the same order and take its part of "
        "the same batch? (Neither the seed nor the order may depend on the replica.)",
    ),
    Question(
        lambda d: EPOCH in d.names,
        "Number all sequences of the run, one after the other: this batch begins at `done * batch_size`. In which "
        "epoch is number n, and at which place of that epoch's order? (A batch may take the end of one epoch and the "
        "beginning of the next.)",
    ),
    Question(
        lambda d: NEIGHBOURS in d.names,
        "One order is turned, reversed, or moved in blocks, and the same windows meet for the whole run. Where is an "
        "order of all windows drawn anew for each epoch?",
    ),
    Question(
        lambda d: SHUFFLED in d.names,
        "The windows come in the order of the text, so a batch is all of one file. What shuffles them?",
    ),
    Question(
        lambda d: NEW_ORDER in d.names,
        "Each epoch goes through the windows in the same order. What would have to enter the seed of the order?",
    ),
    Question(
        lambda d: SEEDED in d.names,
        "The seed changes nothing. Where does it enter the order? (Of the seed of a generator only the lowest 32 bits "
        "count.)",
    ),
    Question(
        lambda d: APART in d.names,
        "A run with another seed goes through epochs of this run again, at another time perhaps. How do seed and epoch "
        "enter the seed of the order, and for which two pairs of them does the same come out?",
    ),
)
