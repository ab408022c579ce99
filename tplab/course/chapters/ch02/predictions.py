"""Prediction questions of chapter 02, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "2.a": Prediction(
        question="X has the shape [512, 1024], A has the shape [1024, 4096], and both are in float32. How many MiB of "
        "weights does each of the 4 devices store? How many MiB does each device's result take up with a column "
        "split? How many MiB does the result take up with a row split?",
        answer={"weights": 4, "column_result": 2, "row_result": 8},
        why="A takes up 1024 · 4096 · 4 bytes, or 16 MiB, and each device stores a quarter of A with either split. Y "
        "takes up 512 · 4096 · 4 bytes, or 8 MiB. With a column split, each device gets a quarter of the columns "
        "of Y. With a row split, each device gets a partial sum for every entry of Y, so its result is as large "
        "as Y.",
        wrong={
            ("weights", 16): "That's the size of the full A. How much of A does a single device store?",
            ("weights", 1): "Did you count elements instead of bytes? A float32 element takes up 4 bytes.",
            "weights": "Multiply the number of elements in a shard by 4 bytes. Then divide by 1024 · 1024.",
            ("column_result", 8): "That's the size of the full Y. How many columns of Y does a single device compute?",
            "column_result": "Each device computes a quarter of the 4096 columns for all 512 rows. Each element takes "
            "up 4 bytes.",
            ("row_result", 2): "Does a row split divide the entries of Y or the terms of every entry?",
            "row_result": "With a row split, each device's result has the full shape of Y. How many bytes does Y take "
            "up?",
        },
    ),
    "2.b": Prediction(
        question="For one entry of XA, rank 0 holds the term +3 and rank 1 holds the term -3. What is the GELU of "
        "this entry? What is the sum of the GELUs of the two terms?",
        answer={"right": 0, "added_after": 3},
        why="The two terms add up to 0, and GELU(0) is 0 as well. But GELU(3) is about 3 and GELU(-3) is about 0, so "
        "their sum is about 3.",
        wrong={
            "right": "First compute the entry, which is the sum of the two terms. Then apply GELU to the entry.",
            ("added_after", 0): "GELU(-3) isn't -3, because GELU maps very negative values to nearly 0.",
            "added_after": "GELU(3) is about 3. What's the approximate value of GELU(-3)?",
        },
    ),
    "2.c": Prediction(
        question="What's the largest number of rows for which the broken gather passes the test no matter how many "
        "ranks there are? What's the largest number of ranks for which the broken gather passes the test no "
        "matter how many rows y has?",
        answer={"rows": 1, "ranks": 1},
        why="With a single row, concatenating the ranks' values in memory order already gives the correct row. With "
        "two or more rows, the second row of rank 0 ends up where the first row of rank 1 belongs. So the bug puts "
        "the right values in the wrong places, and a test with a single row or a single rank can't reveal it.",
        wrong={
            "rows": "On paper, write down all of rank 0's values in memory order, followed by all of rank 1's values. "
            "If y has one row, is this the order of the correct result? If y has two rows, is this still the order of "
            "the correct result?",
            "ranks": "For what number of ranks is there nothing to concatenate?",
        },
    ),
}
