"""Prediction questions of the start page, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "S.a": Prediction(
        question="If you launch four ranks, what does each of them return?",
        answer={"each_rank": 46},
        why="The four ranks start with 10, 11, 12, and 13. Each rank ends up with the sum, which is 46.",
        wrong={
            ("each_rank", 21): "That's the sum for two ranks. What numbers do ranks 2 and 3 start with?",
            ("each_rank", 42): "That's twice the sum for two ranks. But ranks 2 and 3 start with different numbers.",
            ("each_rank", 6): "That's the sum of the rank numbers. What does `add_up` add to each rank number?",
            "each_rank": "Each rank starts with 10 plus its own rank number. Write down the four starting values, and "
            "then add them up.",
        },
    ),
    "S.b": Prediction(
        question="Rank 1's columns of X are all zero, so rank 1 returns zeros right away. Which rank gets stuck, and "
        "which rank is it waiting for?",
        answer={"stuck": 0, "waits_for": 1},
        why="Rank 0 calls `all_reduce` inside your function and waits there for rank 1. But rank 1 returns early, so "
        "it never calls `all_reduce`.",
        wrong={
            "stuck": "Your function calls `all_reduce`, which waits for all the ranks. Which rank calls your function?",
            "waits_for": "The `all_reduce` can't finish until both ranks have called it. Which rank returns before it "
            "gets to the `all_reduce`?",
        },
    ),
}
