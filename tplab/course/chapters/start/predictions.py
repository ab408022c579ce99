"""Prediction questions of the start page, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "S.a": Prediction(
        question="What does each of four ranks return?",
        answer={"each_rank": 46},
        why="The ranks begin with 10, 11, 12 and 13. All four of them end up with the sum, which is 46.",
        wrong={
            ("each_rank", 21): "That's the sum for two ranks. Which numbers do ranks 2 and 3 begin with?",
            ("each_rank", 42): "21 is the sum for ranks 0 and 1. Ranks 2 and 3 begin with other numbers. Which ones?",
            ("each_rank", 6): "That's the sum of the rank numbers. What does `add_up` add to each of them?",
            "each_rank": "Each rank begins with 10 plus its own number. Write down the four numbers, then add them up.",
        },
    ),
    "S.b": Prediction(
        question="Which rank gets stuck, and which one is it waiting for?",
        answer={"stuck": 0, "waits_for": 1},
        why="Rank 0 calls `all_reduce` inside your function and waits there for rank 1. But rank 1 skips the call, "
        "so it's already done.",
        wrong={
            "stuck": "Which rank calls your function, and so the `all_reduce` in it?",
            "waits_for": "An `all_reduce` between two ranks needs both of them. Which one never calls it?",
        },
    ),
}
