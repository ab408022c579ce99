"""Prediction questions of chapter 05, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "5.a": Prediction(
        question="A column-parallel layer gathers its output, and a row-parallel layer scatters it again. How many "
        "collectives run in the forward and backward passes combined? If m = 4h and x has n elements, how many "
        "elements do all the messages contain in total, as a multiple of n?",
        answer={"collectives": 4, "times_n": 10},
        why="In each pass, there's one all-gather between the two layers, and one all-reduce. The all-gather's message "
        "has 4n elements, and the all-reduce's message has n elements. That makes 5n elements per pass and 10n "
        "elements in total, which is five times as much as your design sends.",
        wrong={
            ("collectives", 2): (
                "That's how many collectives your own design runs. In which pass does the gather between the two "
                "layers communicate? In which pass does the scatter communicate?"
            ),
            "collectives": (
                "The obvious design uses f, a gather, a scatter, and g. In which of the two passes does each of these "
                "operators communicate?"
            ),
            ("times_n", 5): "That's the result for just one of the two passes. What about the other pass?",
            ("times_n", 4): (
                "The tensor between the two layers has 4n elements, and it's gathered once in each pass. What do f and "
                "g send in addition?"
            ),
            ("times_n", 8): "That accounts for the two all-gathers between the layers. How much do f and g send?",
            ("times_n", 2): "That's what f and g send. How large are the messages between the two layers?",
            ("times_n", 2.5): "The message of an all-gather is the full, gathered tensor, not just one rank's shard.",
            "times_n": (
                "Two of the messages are as large as x. The other messages are as large as the tensor between the two "
                "layers, which has 4n elements. How many of these larger messages are there?"
            ),
        },
    ),
    "5.b": Prediction(
        question="How many all-reduces does one training step on two ranks need, for the MLP and for the gradients of "
        "all parameters? With 128 examples and h = 128, how many bytes do the messages of these all-reduces contain in "
        "total, in float64?",
        answer={"all_reduces": 2, "bytes": 262144},
        why="There's one all-reduce for g and one for f, and each message has 128 · 128 elements of 8 bytes each. The "
        "gradients of the parameters don't need any all-reduces. The gradient of a shard is of no use to the other "
        "ranks. Every replicated parameter already has the same full gradient on every rank, because f sums the "
        "gradient that flows out of the MLP.",
        wrong={
            ("all_reduces", 1): "That's the result for just one of the two passes. What about the other pass?",
            "all_reduces": (
                "Do the other ranks need the gradient of a shard? What has f already done to the gradient by the time "
                "it reaches the embedding?"
            ),
            ("bytes", 131072): (
                "That's the size of one all-reduce in float64, or of both all-reduces in float32. How large are both "
                "all-reduces in float64?"
            ),
            ("bytes", 32768): "That's the total number of elements. How many bytes does a float64 element take?",
            "bytes": (
                "Each all-reduce sends as many elements as x has, and the shape of x is [128, 128]. How many "
                "all-reduces are there, and how many bytes does each element take?"
            ),
        },
    ),
    "5.c": Prediction(
        question="On two ranks, the fused weight is split as one block of 16 rows instead of two blocks of 8 rows. On "
        "rank 0, which row is gate row 0 paired with? On rank 1, which row is up row 8 paired with?",
        answer={"row_0_meets": 4, "row_8_meets": 12},
        why="Rank 0 gets rows 0 to 7, which make up the entire gate. The rank multiplies the first half of its output "
        "by the second half, so row 0 is paired with row 4. On rank 1, row 8 belongs to the up projection, but it's "
        "used as the gate for row 12. With a single rank, all the pairs are correct. The bug gave itself away because "
        "the results depended on the number of ranks.",
        wrong={
            ("row_0_meets", 8): "Row 0 should be paired with row 8, but rank 0 has only rows 0 to 7.",
            "row_0_meets": (
                "Rank 0 has rows 0 to 7, and `chunk(2)` splits the output of these rows in half. Which row comes first "
                "in the second half?"
            ),
            ("row_8_meets", 0): "Row 8 should be paired with row 0, but rank 1 has only rows 8 to 15.",
            "row_8_meets": (
                "Rank 1 has rows 8 to 15, and `chunk(2)` splits the output of these rows in half. Which row comes "
                "first in the second half?"
            ),
        },
    ),
}
