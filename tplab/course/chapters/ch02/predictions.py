"""Prediction questions of chapter 02, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "2.a": Prediction(
        question="X is [512, 1024] and A is [1024, 4096], float32, on 4 devices. How many MiB of weights does a device "
        "hold, and how many MiB does its result take with a column split and with a row split?",
        answer={"weights": 4, "column_result": 2, "row_result": 8},
        why="A takes 1024 · 4096 · 4 bytes, which is 16 MiB, and each device holds a quarter of it either way. Y takes "
        "512 · 4096 · 4 bytes, which is 8 MiB. A column split gives each device a quarter of the columns, but a row "
        "split gives it a partial tensor that's as large as Y.",
        wrong={
            ("weights", 16): "That's all of A. What does a single device hold?",
            ("weights", 1): "Count bytes: a float32 element takes 4 of them.",
            "weights": "Multiply the rows by the columns of one shard, then by 4 bytes, and divide by 1024 · 1024.",
            ("column_result", 8): "That's all of Y. How many of its columns does one device compute?",
            "column_result": "One device computes a quarter of the 4096 columns, for all 512 rows, at 4 bytes each.",
            ("row_result", 2): "Does a row split divide the entries of Y, or the terms of each entry?",
            "row_result": "With a row split, a device's result has the full shape of Y. How many bytes is that?",
        },
    ),
    "2.b": Prediction(
        question="The terms of one entry are +3 on rank 0 and -3 on rank 1. What is GELU of the entry, and what is the "
        "sum of the GELUs of the terms?",
        answer={"right": 0, "added_after": 3},
        why="The entry is 3 - 3 = 0, and GELU(0) is 0. But GELU(3) is about 3 and GELU(-3) is about 0, so together "
        "they make about 3.",
        wrong={
            "right": "First work out the entry, which is the sum of the two terms. Then apply GELU.",
            ("added_after", 0): "GELU(-3) isn't -3, because GELU turns very negative values into almost 0.",
            "added_after": "GELU(3) is about 3. And about what is GELU(-3)?",
        },
    ),
    "2.c": Prediction(
        question="What's the largest number of rows for which the broken gather passes on any number of ranks, and the "
        "largest number of ranks for which it passes with any number of rows?",
        answer={"rows": 1, "ranks": 1},
        why="With a single row, the ranks' results laid end to end are that row, so memory order and the right order "
        "are the same. From two rows on, the second row of rank 0 ends up where the first row of rank 1 belongs. That "
        "symptom, right values in wrong places, gives the bug away, and no test with one row or on one rank can show "
        "it.",
        wrong={
            "rows": "Write down the memory of two ranks, one after the other, for y with one row and with two rows. "
            "When is that the memory of the right result?",
            "ranks": "With how many ranks is there nothing to put side by side?",
        },
    ),
}
