"""Prediction questions of chapter 05, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "5.a": Prediction(
        question="A column-parallel layer gathers its output, and a row-parallel layer scatters it again. How many "
        "collectives run, forward and backward together? With m = 4h, how many times as many elements as "
        "x do all messages have?",
        answer={"collectives": 4, "times_n": 10},
        why="Forward, there's an all-gather in the middle and an all-reduce at the end. Backward, there's an "
        "all-gather in the middle and an all-reduce at the beginning. That's 4 + 1 in each direction, so "
        "it's 10 times n, five times as much as your design.",
        wrong={
            ("collectives", 2): (
                "That's how many your own design has. What do the gather and the scatter in the middle do, "
                "and in which direction?"
            ),
            "collectives": (
                "There's f, a gather, a scatter, and g. Each of them communicates in just one direction. In which one?"
            ),
            ("times_n", 5): "That's one direction. What about the other one?",
            ("times_n", 4): (
                "The tensor in the middle has 4n elements, and it's gathered once in each direction. And what "
                "do f and g send?"
            ),
            ("times_n", 8): "These are the two all-gathers in the middle. What do f and g send?",
            ("times_n", 2): "That's what f and g send. How large are the messages in the middle?",
            ("times_n", 2.5): "The message of an all-gather is the full, gathered tensor, not one rank's part.",
            "times_n": (
                "Two of the messages are as large as x, and the others are as large as the tensor in the "
                "middle, which has 4n elements. How many of each are there?"
            ),
        },
    ),
    "5.b": Prediction(
        question="How many all-reduces does one training step on two ranks need, for the MLP and for the gradients "
        "of all parameters? How many bytes do they have together, in float64, with 128 examples and h = "
        "128?",
        answer={"all_reduces": 2, "bytes": 262144},
        why="There's one for g and one for f, and each has 128 · 128 elements of 8 bytes. The parameters' "
        "gradients don't need any. The gradient of a shard is of no use to the other ranks, and all "
        "replicated parameters get the same full gradient on every rank, because f added it up for them.",
        wrong={
            ("all_reduces", 1): "That's one direction. What about the other one?",
            "all_reduces": (
                "Which rank needs the gradient of a shard? And what has f already done with the gradient that "
                "reaches the embedding?"
            ),
            ("bytes", 131072): "That's one of the two all-reduces. (Or it's both of them in float32.)",
            ("bytes", 32768): "That's how many elements there are. How many bytes does a float64 have?",
            "bytes": (
                "Each all-reduce has as many elements as x, which is [128, 128]. How many all-reduces are "
                "there, and how many bytes does an element have?"
            ),
        },
    ),
    "5.c": Prediction(
        question="With one block of 16 rows instead of two blocks of 8, on two ranks: which row does gate row 0 "
        "meet on rank 0, and which row does up row 8 meet on rank 1?",
        answer={"row_0_meets": 4, "row_8_meets": 12},
        why="Rank 0 gets rows 0 to 7, which is the entire gate, and multiplies its first half by its second "
        "half, so row 0 meets row 4. On rank 1, up row 8 plays the gate for row 12. With one rank, "
        "everything is right, and that's what gave it away: the results depended on the number of ranks.",
        wrong={
            ("row_0_meets", 8): "That's the row it should meet. But rank 0 only has rows 0 to 7.",
            "row_0_meets": (
                "Rank 0 has rows 0 to 7, and `chunk(2)` splits its output in two halves. What's the first row "
                "of the second half?"
            ),
            ("row_8_meets", 0): "That's the row it should meet. But rank 1 only has rows 8 to 15.",
            "row_8_meets": (
                "Rank 1 has rows 8 to 15, and `chunk(2)` splits its output in two halves. What's the first "
                "row of the second half?"
            ),
        },
    ),
}
