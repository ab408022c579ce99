"""Prediction questions of chapter 04, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "4.a": Prediction(
        question="On two ranks, which shapes do weight and bias of nn.Linear(6, 8) have on each rank, "
        "column-parallel and row-parallel?",
        answer={"column_weight": (4, 6), "column_bias": (4,), "row_weight": (8, 3), "row_bias": (8,)},
        why="weight is [out, in], so it's [8, 6]. Column-parallel halves the outputs, and the bias has one element "
        "per output. Row-parallel halves the inputs, but every rank ends up with all outputs, so it keeps the full "
        "bias.",
        wrong={
            ("column_weight", (6, 4)): "That's a shard of the papers' A, [in, out]. PyTorch stores its transpose.",
            (
                "column_weight",
                (8, 3),
            ): "These are all of the outputs, from half of the inputs. Does a column of A belong to an input or to "
            "an output?",
            "column_weight": (
                "nn.Linear(6, 8).weight has the shape [8, 6], and a column of A is one of its rows. Which of "
                "the two numbers is halved?"
            ),
            (
                "column_bias",
                (8,),
            ): "A column-parallel rank computes only some of the outputs. Does it need a bias for the others?",
            "column_bias": "The bias has one element per output. How many outputs does a rank compute?",
            ("row_weight", (3, 8)): "That's a shard of the papers' A, [in, out]. PyTorch stores its transpose.",
            (
                "row_weight",
                (4, 6),
            ): "These are half of the outputs, from all of the inputs. Does a row of A belong to an input or to an "
            "output?",
            "row_weight": (
                "nn.Linear(6, 8).weight has the shape [8, 6], and a row of A is one of its columns. Which of "
                "the two numbers is halved?"
            ),
            ("row_bias", (4,)): "Half of the *inputs* are missing on each rank. How many outputs does it end up with?",
            "row_bias": "The bias has one element per output. How many outputs does a rank end up with?",
        },
    ),
    "4.b": Prediction(
        question="A column-parallel layer on 4 ranks gets a float32 input [2, 3, 8], has 12 outputs and doesn't "
        "gather. How many collectives run forward and backward, and how many bytes does the backward one have?",
        answer={"calls_forward": 0, "calls_backward": 1, "bytes_backward": 192},
        why="In the forward pass, every rank has all it needs. In the backward pass, each rank only knows its own "
        "term of dx, so f all-reduces dx. It has the shape of x, which is 2 · 3 · 8 elements of 4 bytes. Neither the "
        "outputs nor p appear in that number.",
        wrong={
            "calls_forward": (
                "Every rank has all of x and returns its own slice. Is there anything that it needs from the others?"
            ),
            "calls_backward": "Each rank computes dx through its own columns only. What's missing from the true dx?",
            ("bytes_backward", 48): "That's the number of elements. How many bytes does each of them have?",
            (
                "bytes_backward",
                288,
            ): "That's the number of bytes of the full output. Whose gradient has to be added up?",
            ("bytes_backward", 768): "The message size is the size of the tensor, no matter how many ranks take part.",
            "bytes_backward": "f all-reduces the gradient of x. What's its shape? And how many bytes is a float32?",
        },
    ),
    "4.c": Prediction(
        question="On four ranks, F.linear with the bias is followed by an all-reduce: how many times is the bias in "
        "the output? And with bias / p, which fraction of its true gradient does each rank's bias get?",
        answer={"times_in_output": 4, "fraction_of_gradient": 0.25},
        why="The all-reduce adds up four terms, and the bias is in each of them. If it's divided by four, the sum is "
        "right. But the derivative of b/4 is 1/4, and g passes dY on as it is, so each rank's bias only sees a "
        "quarter of its gradient.",
        wrong={
            "times_in_output": (
                "Write down what rank 0 has before the all-reduce, then what rank 1 has, and so on. What's the sum?"
            ),
            (
                "fraction_of_gradient",
                1,
            ): "The output depends on this rank's b through b / 4. What's the derivative of b / 4?",
            (
                "fraction_of_gradient",
                4,
            ): "It's the other way round. The bias is divided in the forward pass, so what happens to its gradient?",
            "fraction_of_gradient": (
                "On each rank, the output depends on b through b / p, and g doesn't change the gradient. "
                "What's the derivative of b / 4?"
            ),
        },
    ),
    "4.d": Prediction(
        question="A fused weight [q; k; v] has 12 rows. With p = 2 and stride = 3, which rows does rank 1 hold?",
        answer={"rows_of_rank_1": [2, 3, 6, 7, 10, 11]},
        why="Each block of four rows is split in two, so rank 1 has the second half of q (2, 3), of k (6, 7) and of "
        "v (10, 11).",
        wrong={
            (
                "rows_of_rank_1",
                (6, 7, 8, 9, 10, 11),
            ): "That's the second half of everything, which is half of k, all of v and nothing of q.",
            (
                "rows_of_rank_1",
                (1, 3, 5, 7, 9, 11),
            ): "That's every second row. A rank gets neighboring rows, namely one half of each block.",
            "rows_of_rank_1": (
                "Rows 0 to 3 are q, rows 4 to 7 are k, and rows 8 to 11 are v. Which half of each belongs to rank 1?"
            ),
        },
    ),
    "4.e": Prediction(
        question="Four ranks with the same seed each draw a shard of a [512, 512] weight directly, with xavier. By "
        "what factor is the variance too large, and what's the rank of the assembled matrix?",
        answer={"variance_factor": 1.6, "matrix_rank": 128},
        why="The variance should be 2/(512 + 512), but each rank computes 2/(128 + 512), which is 1.6 times as much. "
        "And because all four shards are the same 128 columns, the full matrix only has 128 independent ones.",
        wrong={
            (
                "variance_factor",
                4,
            ): "Only one of the two numbers in the formula is divided by 4. What are 2/(in + out) for the full "
            "weight and for the shard?",
            (
                "variance_factor",
                0.625,
            ): "That's the inverse. In which of the two cases is in + out smaller, and so the variance larger?",
            "variance_factor": (
                "The variance is 2/(in + out). What does a rank take for in and out, if its shard is [512, 128]?"
            ),
            (
                "matrix_rank",
                512,
            ): "All ranks started from the same seed and drew a shard of the same shape. So how do the shards differ?",
            "matrix_rank": "All four shards are equal. How many different columns does the full matrix have?",
        },
    ),
}
