"""The prediction questions for chapter 02, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "2.a": Prediction(
        question="X has the shape [512, 1024], A has the shape [1024, 4096], and both are in float32. How many MiB of "
        "weights does each of the 4 ranks store? With a column split, how many MiB does each rank's result take up? "
        "How many MiB does the result take up with a row split?",
        answer={"weights": 4, "column_result": 2, "row_result": 8},
        why="A takes up 1024 · 4096 · 4 bytes, or 16 MiB, and with either split, each rank stores a quarter of A. Y "
        "takes up 512 · 4096 · 4 bytes, or 8 MiB. With a column split, each rank gets a quarter of the columns "
        "of Y. With a row split, each rank gets a partial sum for every entry of Y, so its result is as large "
        "as Y.",
        wrong={
            ("weights", 16): "That's the size of the full A. How much of A does a single rank store?",
            ("weights", 1): "Did you count elements instead of bytes? A float32 element takes up 4 bytes.",
            "weights": "Multiply the number of elements in a shard by 4 bytes. Then divide by 1024 · 1024.",
            ("column_result", 8): "That's the size of the full Y. How many columns of Y does a single rank compute?",
            "column_result": "Each rank computes a quarter of the 4096 columns for all 512 rows. Each element takes "
            "up 4 bytes.",
            ("row_result", 2): "Does a row split divide up the entries of Y, or the terms that add up to each entry?",
            "row_result": "With a row split, each rank's result has the full shape of Y. How many bytes does Y take "
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
        question="A test calls the broken gather function with a two-dimensional y, and the test passes. If the "
        "test runs on many ranks, what's the largest number of rows that y can have without revealing the "
        "bug? If y has many rows, what's the largest number of ranks that doesn't reveal the bug?",
        answer={"rows": 1, "ranks": 1},
        why="With a single row, concatenating the ranks' values in memory order already gives the correct row. With "
        "two or more rows, the second row of rank 0 ends up where the first row of rank 1 belongs. So the bug puts "
        "the right values in the wrong places, and a test with a single row or a single rank can't reveal it.",
        wrong={
            "rows": "On paper, write down all of rank 0's values in memory order, followed by all of rank 1's "
            "values. If y has a single row, are these values already in the correct order? If y has two "
            "rows, are these values still in the correct order?",
            "ranks": "For what number of ranks is there nothing to concatenate?",
        },
    ),
    "2.d": Prediction(
        question="A is split by columns and B is split by rows. Is Z correct if only A is interleaved? Is Z correct if "
        "both matrices are interleaved?",
        answer={"only_a": False, "both": True},
        why="Z is the sum over k of the product of column k of XA and row k of B. If both matrices are split in "
        "the same way, each rank multiplies matching columns and rows. It doesn't matter which rank "
        "computes which term, because the all-reduce sums all the terms. If only A is interleaved, rank 0 "
        "multiplies columns 0 and 2 of XA by rows 0 and 1 of B.",
        wrong={
            "only_a": "Suppose there are four hidden features and two ranks. Which columns of XA does rank 0 hold "
            "if the columns of A are interleaved? Which rows of B does rank 0 hold if B is split into "
            "contiguous blocks of rows?",
            "both": "Suppose there are four hidden features and two ranks. Which columns of XA does rank 0 hold? "
            "Which rows of B does rank 0 hold? For each column of XA, is there a rank that multiplies the "
            "column by the matching row of B?",
        },
    ),
}
