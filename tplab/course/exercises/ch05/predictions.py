"""Prediction questions of chapter 05, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "5.a": Prediction(
        question="Suppose a column-parallel layer gathers its output, and the row-parallel layer after it splits "
        "that output up again. How many collectives run in the forward and backward passes combined? If m "
        "= 4h and x has n elements, what's the total size of all the messages, in elements and as a "
        "multiple of n?",
        answer={"collectives": 4, "times_n": 10},
        why="In each pass, there's one all-gather between the two layers and one all-reduce at the end. The all-gather "
        "sends 4n elements, and the all-reduce sends n elements. That makes 5n elements per pass and 10n elements in "
        "total, which is five times as many as your design sends.",
        wrong={
            ("collectives", 2): (
                "Your own design runs two collectives. With the obvious design, which pass needs a collective for "
                "the gather between the two layers? Which pass needs one for the scatter?"
            ),
            "collectives": (
                "The obvious design uses the operators f, gather, scatter, and g from chapter 03. How many "
                "collectives does each of these operators run in the forward pass? How many collectives "
                "does each operator run in the backward pass?"
            ),
            (
                "times_n",
                5,
            ): "You counted the messages in only one of the two passes. What's the total for both passes?",
            ("times_n", 4): (
                "The tensor between the two layers has 4n elements, and it's gathered once per pass. How many "
                "elements does the all-reduce in f send? How many elements does the all-reduce in g send?"
            ),
            ("times_n", 8): "The two all-gathers between the layers account for 8n elements. How many elements "
            "does the all-reduce in f send? How many elements does the all-reduce in g send?",
            ("times_n", 2): "The operators f and g send 2n elements in total. How large are the messages between "
            "the two layers?",
            ("times_n", 2.5): "For an all-gather, we count the full, gathered tensor as the message, not just one "
            "rank's shard.",
            "times_n": (
                "Two of the messages are the same size as x, with n elements each. The other messages are the same "
                "size as the tensor between the two layers, 4n elements. How many of these larger messages "
                "are there?"
            ),
        },
    ),
    "5.b": Prediction(
        question="How many all-reduces does one training step on two ranks need in total? Count the all-reduces "
        "inside the MLP and any that sum parameter gradients. With 128 examples and h = 128 in float64, "
        "what's the total size of all the all-reduce messages in bytes?",
        answer={"all_reduces": 2, "bytes": 262144},
        why="There's one all-reduce for g and one for f, and each message has 128 · 128 elements of 8 bytes each. "
        "The parameter gradients don't need an all-reduce. No other rank needs the gradient of this rank's "
        "shards. The operator f sums the gradient of the MLP's input across ranks, so all the replicated "
        "parameters before the MLP get the same full gradient on every rank.",
        wrong={
            (
                "all_reduces",
                1,
            ): "You counted the all-reduces in only one of the two passes. How many all-reduces do both passes run "
            "in total?",
            "all_reduces": (
                "Does any other rank need the gradients of this rank's shards? In the backward pass, the gradient "
                "passes through the operator f before it reaches the embedding. What does f do to the "
                "gradient?"
            ),
            ("bytes", 131072): (
                "A single all-reduce in float64 sends 131,072 bytes, and so do two all-reduces in float32. How "
                "many bytes do two all-reduces in float64 send?"
            ),
            ("bytes", 32768): "The two all-reduces send 32,768 elements in total. How many bytes does a float64 "
            "element take?",
            "bytes": (
                "Each all-reduce sends a message of the same size as x, whose shape is [128, 128]. How many "
                "all-reduces are there, and how many bytes does each element take?"
            ),
        },
    ),
    "5.c": Prediction(
        question="The fused weight has rows 0 to 15 and consists of two blocks of 8 rows. But the broken code "
        "splits the weight across two ranks as if it were a single block of 16 rows. On rank 0, which row "
        "computes the feature that gets multiplied by the feature from row 0? On rank 1, which row "
        "computes the feature that gets multiplied by the feature from row 8?",
        answer={"row_0_meets": 4, "row_8_meets": 12},
        why="Rank 0 gets rows 0 to 7, which make up the entire gate, and `chunk(2)` splits the features from these "
        "eight rows into two halves. So the feature from row 0 (the first feature of the first half) is "
        "multiplied by the feature from row 4 (the first feature of the second half). Rank 1 gets rows 8 "
        "to 15, which make up the entire up projection, so it multiplies the feature from row 8 by the "
        "feature from row 12. With a single rank, the features are all paired correctly. The bug gave "
        "itself away because the results depended on the number of ranks.",
        wrong={
            ("row_0_meets", 8): "The feature from row 0 should be multiplied by the feature from row 8, but rank 0 has "
            "only rows 0 to 7.",
            "row_0_meets": (
                "Rank 0 has rows 0 to 7, and `chunk(2)` splits the features from these rows into two halves. Which "
                "row of the weight produces the first feature of the second half?"
            ),
            ("row_8_meets", 0): "The feature from row 8 should be multiplied by the feature from row 0, but rank 1 has "
            "only rows 8 to 15.",
            "row_8_meets": (
                "Rank 1 has rows 8 to 15, and `chunk(2)` splits the features from these rows into two halves. "
                "Which row of the weight produces the first feature of the second half?"
            ),
        },
    ),
}
