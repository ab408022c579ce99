"""Prediction questions of chapter 03, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "3.a": Prediction(
        question="What does each rank find for dx on its own path, a_r · dy_r, and what is the right dx?",
        answer={"rank_0": -12, "rank_1": 20, "right": 8},
        why="Rank 0: 3 · (-4) = -12. Rank 1: 5 · 4 = 20. L = 2x², so dL/dx = 4x = 8, and that is their sum.",
        wrong={
            "rank_0": "a_0 = 3 and dy_0 = -4.",
            "rank_1": "a_1 = 5 and dy_1 = 4.",
            ("right", 4): "4 is the average of the two, or dL/dx at x = 1. Here x = 2.",
            "right": "L = 2x². What is its derivative, at x = 2?",
        },
    ),
    "3.b": Prediction(
        question="The all-reduce wrote into the output of exp, which autograd kept. What does each rank get for dw?",
        answer={"rank_0": 3, "rank_1": 3},
        why="The derivative of exp is the output that autograd kept, and after the write it holds the sum, 3, on "
        "both ranks.",
        wrong={
            ("rank_0", 1): "That is the right gradient. But what does the tensor that autograd kept hold by then?",
            ("rank_1", 2): "That is the right gradient. But what does the tensor that autograd kept hold by then?",
            "rank_0": "The derivative of exp is its output, as autograd kept it. What was written into it?",
            "rank_1": "The derivative of exp is its output, as autograd kept it. What was written into it?",
        },
    ),
    "3.c": Prediction(
        question="An all-reduce whose backward is an all-reduce too, in place of g. By what factor are the gradients "
        "too large, on 2 and on 4 ranks?",
        answer={"factor_2": 2, "factor_4": 4},
        why="Every rank holds the whole dz. Adding the p equal copies makes p times dz, and everything below is "
        "linear in dz.",
        wrong={
            "factor_2": "Both ranks hold the same dz = -4. What do they hold after an all-reduce?",
            "factor_4": "Four ranks hold the same dz. What does an all-reduce make of them?",
        },
    ),
    "3.d": Prediction(
        question="All four operators, forward and backward, in float32 on 4 ranks; the whole tensor is [2, 16, 64]. "
        "How many collectives does each rank enter? Bytes of the message of one?",
        answer={"collectives": 4, "bytes": 8192},
        why="One per operator, in one direction. Each message is the whole tensor: 2 · 16 · 64 numbers of 4 bytes.",
        wrong={
            ("collectives", 8): "Each operator sends in one direction only.",
            ("collectives", 2): "f and g need an all-reduce each. What do scatter and gather need?",
            "collectives": "Go through the table: which cells of its two traffic columns are not empty?",
            (
                "bytes",
                2048,
            ): "That is the count of numbers, or one rank's part. The message is the whole tensor, in bytes.",
            "bytes": "2 · 16 · 64 numbers of 4 bytes.",
        },
    ),
}
