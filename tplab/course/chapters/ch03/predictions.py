"""Prediction questions of chapter 03, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "3.a": Prediction(
        question="What does each rank find for dx along its own path, a_r · dy_r, and what is the right dx?",
        answer={"rank_0": -12, "rank_1": 20, "right": 8},
        why="Rank 0 finds 3 · (-4) = -12, and rank 1 finds 5 · 4 = 20. The loss is 2x², so the right gradient is "
        "4x = 8, which is the sum of the two.",
        wrong={
            "rank_0": "On rank 0, a_0 is 3 and dy_0 is -4.",
            "rank_1": "On rank 1, a_1 is 5 and dy_1 is 4.",
            ("right", 4): "4 is the average of the two, or the derivative at x = 1. But x is 2 here.",
            "right": "The loss is 2x². What's its derivative at x = 2?",
        },
    ),
    "3.b": Prediction(
        question="Rank 0 passes ones to the broken sum, rank 1 passes twos. What does rank 0 find in the result if its "
        "matrix is contiguous, and if it's transposed? What's in its own contiguous matrix afterwards?",
        answer={"contiguous": 3, "transposed": 1, "own_afterwards": 3},
        why="contiguous() returns a contiguous matrix itself, so the all-reduce overwrites x with the sum, and x is "
        "returned. It copies a transposed matrix, so the copy gets the sum and is thrown away. A result that changes "
        "with the memory layout gave the bug away.",
        wrong={
            ("contiguous", 1): "What does .contiguous() return for a tensor that's already contiguous?",
            "contiguous": "The all-reduce wrote the sum 1 + 2 into some tensor. Is that the tensor that's returned?",
            ("transposed", 3): "The sum went into the copy that .contiguous() made. Which tensor is returned?",
            "transposed": "For a transposed matrix, .contiguous() makes a copy. What's in x itself?",
            ("own_afterwards", 1): "The all-reduce wrote into what .contiguous() returned. Was that a copy?",
            "own_afterwards": "The all-reduce wrote into what .contiguous() returned. Which tensor was that?",
        },
    ),
    "3.c": Prediction(
        question="The all-reduce wrote into the output of exp, which autograd had saved. What does each rank get for "
        "dw?",
        answer={"rank_0": 3, "rank_1": 3},
        why="The derivative of exp is the output that autograd saved. By the time it's used, it holds the sum, which "
        "is "
        "3 on both ranks.",
        wrong={
            ("rank_0", 1): "That's the right gradient. But what's in the saved tensor by the time it's used?",
            ("rank_1", 2): "That's the right gradient. But what's in the saved tensor by the time it's used?",
            "rank_0": "The derivative of exp is its saved output. What was written into it?",
            "rank_1": "The derivative of exp is its saved output. What was written into it?",
        },
    ),
    "3.d": Prediction(
        question="This g does an all-reduce in its backward as well. By what factor are the gradients too large, on 2 "
        "ranks and on 4?",
        answer={"factor_2": 2, "factor_4": 4},
        why="Every rank already holds all of dz. Adding up p equal copies makes it p times as large, and everything "
        "below "
        "is proportional to dz.",
        wrong={
            "factor_2": "Both ranks hold the same dz, which is -4. What do they hold after an all-reduce?",
            "factor_4": "Four ranks hold the same dz. What does an all-reduce make of it?",
        },
    ),
    "3.e": Prediction(
        question="All four operators run once, forward and backward, on 4 ranks in float32. The full tensor is "
        "[2, 16, 64]. How many collectives does each rank enter, and how many bytes does one message have?",
        answer={"collectives": 4, "bytes": 8192},
        why="Each operator communicates in one direction only, so there are four collectives. Each message is the full "
        "tensor, with 2 · 16 · 64 elements of 4 bytes.",
        wrong={
            ("collectives", 8): "Each operator communicates in one direction only.",
            ("collectives", 2): "f and g need an all-reduce each. What do scatter and gather need?",
            "collectives": "Go through your table. How many of its eight entries send something?",
            (
                "bytes",
                2048,
            ): "That's the number of elements, or one rank's slice in bytes. How many bytes does the full tensor have?",
            "bytes": "The message has 2 · 16 · 64 elements with 4 bytes each.",
        },
    ),
}
