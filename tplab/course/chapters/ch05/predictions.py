"""Prediction questions of chapter 05, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "5.a": Prediction(
        question="A column-parallel layer gathers its output, and a row-parallel layer scatters it again. How many "
        "collectives run in the forward and backward passes combined? If m = 4h and x has n elements, how many "
        "elements do all the messages contain in total, as a multiple of n?",
        answer={"collectives": 4, "times_n": 10},
        why="In each pass, there's one all-gather between the two layers and one all-reduce at the end. The "
        "all-gather's message has 4n elements, and the all-reduce's message has n elements. That makes 5n "
        "elements per pass and 10n elements in total, which is five times as much as your design sends.",
        wrong={
            ("collectives", 2): (
                "That's how many collectives your own design runs. Does the gather between the two layers communicate "
                "in the forward pass or in the backward pass? What about the scatter?"
            ),
            "collectives": (
                "The obvious design uses f, a gather, a scatter, and g. Does each of these operators communicate in "
                "the forward pass or in the backward pass?"
            ),
            ("times_n", 5): "That's the result for just one of the two passes. What about the other pass?",
            ("times_n", 4): (
                "The tensor between the two layers has 4n elements, and it's gathered once in each pass. How many "
                "elements do f and g send?"
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
        question="How many all-reduces does one training step on two ranks need in total, counting those inside the "
        "MLP and any that sum the parameters' gradients? With 128 examples and h = 128 in float64, how many "
        "bytes do the messages of all these all-reduces contain?",
        answer={"all_reduces": 2, "bytes": 262144},
        why="There's one all-reduce for g and one for f, and each message has 128 · 128 elements of 8 bytes each. The "
        "gradients of the parameters don't need any all-reduces. The gradient of a shard is of no use to the "
        "other ranks. Every replicated parameter already has the same full gradient on every rank, because f sums "
        "the gradient of the MLP's input across ranks.",
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
        "rank 0, which row ends up paired with row 0, the first row of the gate? On rank 1, which row ends "
        "up paired with row 8, the first row of the up projection?",
        answer={"row_0_meets": 4, "row_8_meets": 12},
        why="Rank 0 gets rows 0 to 7, which make up the entire gate. The rank multiplies the first half of its output "
        "by the second half, so row 0 is paired with row 4. Rank 1 gets rows 8 to 15, which make up the entire up "
        "projection, so row 8 is paired with row 12. With a single rank, all the pairs are correct. The bug gave "
        "itself away because the results depended on the number of ranks.",
        wrong={
            ("row_0_meets", 8): "Row 0 should be paired with row 8, but rank 0 has only rows 0 to 7.",
            "row_0_meets": (
                "Rank 0 has rows 0 to 7, and `chunk(2)` splits the output of these rows in half. Which of these rows "
                "is the first row of the second half?"
            ),
            ("row_8_meets", 0): "Row 8 should be paired with row 0, but rank 1 has only rows 8 to 15.",
            "row_8_meets": (
                "Rank 1 has rows 8 to 15, and `chunk(2)` splits the output of these rows in half. Which of these rows "
                "is the first row of the second half?"
            ),
        },
    ),
}
