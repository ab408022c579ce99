"""Prediction questions of chapter 05, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "5.a": Prediction(
        question="How many collectives has the naive MLP, forward and backward together, and how many the one without "
        "anything in between? With m = 4h, how many times b·s·h numbers do the naive messages hold together?",
        answer={"naive_calls": 4, "calls": 2, "naive_volume": 10},
        why="Naive: all-gather and all-reduce forward, all-gather and all-reduce backward: 4bsh + bsh in each "
        "direction, 10 together. Without the middle: g forward and f backward, 2 together. Five times less.",
        wrong={
            "naive_calls": "f, a gather, a scatter and g, one after the other: in which direction does each "
            "of them communicate?",
            "calls": "Which operators stand at the two ends, f at the input and g at the output? In which direction "
            "does each of them communicate?",
            "naive_volume": "Which of the messages are as large as x, b·s·h, and which as large as the tensor "
            "in the middle, b·s·m? How much is b·s·m, if m = 4h?",
            ("naive_volume", 2.5): "An all-gather counts all parts together, not one rank's part.",
            ("naive_volume", 5): "That is one direction.",
        },
    ),
    "5.b": Prediction(
        question="A fused weight [gate; up] of 16 rows, p = 2: which rows must rank 1 hold? How many all-reduces has "
        "the gated MLP, forward and backward together?",
        answer={"rows_of_rank_1": [4, 5, 6, 7, 12, 13, 14, 15], "calls": 2},
        why="Rank 1 takes the second half of the gate (4 to 7) and the second half of up (12 to 15), so that every "
        "column finds its partner on the same rank. One f stands before the fused product, one g after the last.",
        wrong={
            "rows_of_rank_1": "Row 8 is the first row of up and meets row 0, the first row of the gate. Which rows "
            "does row 4 meet, and who has it?",
            (
                "rows_of_rank_1",
                (8, 9, 10, 11, 12, 13, 14, 15),
            ): "That is all of up and nothing of the gate. With what would rank 1 multiply it?",
            "calls": "Gate and up read the same x and are one product. How many f are needed in front of it?",
            ("calls", 3): "Two layers would need one f each. Fused, the gradient of x is summed once.",
            ("calls", 4): "The gate is multiplied with up on the same rank, without asking anybody.",
        },
    ),
    "5.c": Prediction(
        question="One training step on two ranks: how many all-reduces for the MLP and for the gradients of all "
        "parameters together, and how many bytes do they hold, in float64 with b = 128, s = 1 and h = 128?",
        answer={"all_reduces": 2, "bytes": 262144},
        why="g forward, f backward: 2 · 128 · 128 · 8 bytes. The gradients need nothing: a shard's gradient belongs "
        "to one rank, and the replicated parameters get the same whole gradient on every rank, because f summed it "
        "for them.",
        wrong={
            "all_reduces": "Which ranks need which gradients? A shard's gradient is of no use to anybody else, and "
            "what does f do to the gradient that reaches the embedding?",
            ("all_reduces", 1): "One forward. And backward?",
            "bytes": "Each all-reduce has the size of x, [b, h]. How many of them, how many bytes a number?",
            ("bytes", 131072): "That is one of them, or both in float32.",
            ("bytes", 32768): "That is how many numbers the messages hold. How many bytes has a float64?",
        },
    ),
}
