"""Prediction questions of chapter 07, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "7.a": Prediction(
        question="A look-up of ids [2, 8] in a table of v = 1000 rows, h = 16, float32, cut by rows over p = 4: how "
        "many collectives forward, how many bytes do they hold, and how many collectives backward?",
        answer={"calls_forward": 1, "bytes_forward": 1024, "calls_backward": 0},
        why="g all-reduces the vectors, [2, 8, 16], four bytes each: neither v nor p appears. Backward, every rank "
        "holds the whole dY already and needs only its own rows of dE; and ids have no gradient, so there is no f.",
        wrong={
            "calls_forward": "Each rank holds one term of a sum: which operator of chapter 03 adds up?",
            "bytes_forward": "What is added up has the shape of the result. Which shape is that, and how many bytes "
            "has a number?",
            ("bytes_forward", 256): "That many numbers. How many bytes?",
            ("bytes_forward", 64000): "That is the table. Which tensor do the ranks add up?",
            ("bytes_forward", 4096): "The size of a message is the size of the tensor, however many ranks take part.",
            "calls_backward": "What does g do in the backward pass? And is there an f, that is: does the input have "
            "a gradient?",
            ("calls_backward", 1): "An f would sum the gradient of the input. Has an id a gradient?",
        },
    ),
    "7.b": Prediction(
        question="GPT-2's vocabulary has 50257 tokens. Padded to a multiple of 128 · p for p = 4: how many rows has "
        "the table, how many each rank, and how many of them belong to no token?",
        answer={"padded_size": 50688, "rows_per_rank": 12672, "unused_rows": 431},
        why="128 · 4 = 512, and 50257 / 512 = 98.2: 99 steps of 512 are 50688 rows, a quarter of which is 12672 = "
        "99 · 128. 50688 - 50257 = 431 rows are never used.",
        wrong={
            "padded_size": "Which is the first multiple of 128 · 4 = 512 that is not smaller than 50257?",
            ("padded_size", 50304): "That is a multiple of 128. Can each of four ranks have a multiple of 128 rows?",
            ("padded_size", 50260): "That is a multiple of 4. The rows of one rank are to be a multiple of 128.",
            ("padded_size", 50176): "That is rounded down. Who holds the last 81 tokens?",
            "rows_per_rank": "All ranks have as many: the padded size, divided by p.",
            "unused_rows": "The padded size, without the 50257 rows that belong to a token.",
        },
    ),
    "7.c": Prediction(
        question='The id 12, in a vocabulary of 10. What does nn.Embedding on one process give: "IndexError", "zeros" '
        'or "a row"? And what does your parallel look-up give, on two ranks?',
        answer={"one_process": "IndexError", "two_ranks": "zeros"},
        why="One process knows that there is no row 12. A rank knows only that it is not one of its own: each takes "
        "the id for another's, and the sum of zeros is zeros.",
        wrong={
            "one_process": "What does a Python list do with an index behind its end?",
            "two_ranks": "Go through your mask with 12, on rank 0 and on rank 1. What does each of them put into the "
            "sum?",
            ("two_ranks", "IndexError"): "Who would raise it? For which ids does a rank look into its shard at all?",
        },
    ),
    "7.d": Prediction(
        question="A tied model, forward and backward, v = 10h. How many times b·s·h numbers do all messages hold "
        "together: with the table cut by rows (v), and with the table cut by columns (h)?",
        answer={"by_rows": 2, "by_columns": 12},
        why="By rows: g after the look-up, f before the logits. By columns: the look-up gathers b·s·h, the logits are "
        "a sum of terms as large as all logits, b·s·v = 10 b·s·h, and the gradient of x is gathered again, b·s·h.",
        wrong={
            "by_rows": "One message has the look-up, one the output layer. In which direction is each, and how large?",
            "by_columns": "Go through the three messages of the list. How large is b·s·v, if v = 10h?",
            ("by_columns", 3): "The logits are [b, s, v], ten times as large as x.",
            ("by_columns", 11): "The scatter before the output layer is free forward. And backward?",
            ("by_columns", 2): "That would do for the look-up and the gradient. What has to be summed for the logits?",
        },
    ),
}
