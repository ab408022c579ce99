"""Prediction questions of chapter 04, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "4.a": Prediction(
        question="You split an `nn.Linear(6, 8)` across two ranks. What are the shapes of weight and bias on each "
        "rank if the layer is column-parallel? If the layer is row-parallel, what are these two shapes?",
        answer={"column_weight": (4, 6), "column_bias": (4,), "row_weight": (8, 3), "row_bias": (8,)},
        why="The weight has the shape [out, in], which is [8, 6] here. A column-parallel layer splits the outputs, so "
        "each rank keeps 4 rows of the weight and 4 elements of the bias. A row-parallel layer splits the inputs, so "
        "each rank keeps 3 columns of the weight. But every rank ends up with all 8 outputs, so it keeps the full "
        "bias.",
        wrong={
            (
                "column_weight",
                (6, 4),
            ): "That's a shard of A, which has the shape [in, out]. PyTorch stores the transpose of A.",
            (
                "column_weight",
                (8, 3),
            ): "This shard would compute all of the outputs from half of the inputs. Does a column of A correspond "
            "to an input or to an output?",
            "column_weight": (
                "The weight of `nn.Linear(6, 8)` has the shape [8, 6], and each of its rows is a column of A. If "
                "you split the columns of A across two ranks, which dimension of the weight is halved?"
            ),
            (
                "column_bias",
                (8,),
            ): "In a column-parallel layer, each rank computes only some of the outputs. Does a rank need the bias for "
            "the outputs that it doesn't compute?",
            "column_bias": "The bias has one element per output. How many outputs does each rank compute?",
            (
                "row_weight",
                (3, 8),
            ): "That's a shard of A, which has the shape [in, out]. PyTorch stores the transpose of A.",
            (
                "row_weight",
                (4, 6),
            ): "This shard would compute half of the outputs from all of the inputs. Does a row of A correspond to "
            "an input or to an output?",
            "row_weight": (
                "The weight of `nn.Linear(6, 8)` has the shape [8, 6], and each of its columns is a row of A. If "
                "you split the rows of A across two ranks, which dimension of the weight is halved?"
            ),
            (
                "row_bias",
                (4,),
            ): "A row-parallel layer splits the inputs, not the outputs. How many outputs does each rank end up with?",
            "row_bias": "The bias has one element per output. How many outputs does each rank end up with?",
        },
    ),
    "4.b": Prediction(
        question="A column-parallel layer with 12 outputs runs on 4 ranks and doesn't gather its output. The input "
        "is a float32 tensor of shape [2, 3, 8]. How many collectives run in the forward pass, and how "
        "many run in the backward pass? How large is each message in the backward pass, in bytes?",
        answer={"calls_forward": 0, "calls_backward": 1, "bytes_backward": 192},
        why="In the forward pass, every rank has everything it needs. In the backward pass, each rank knows only its "
        "own term of dx, so f all-reduces dx. The message has the shape of x, so it consists of 2 · 3 · 8 elements of "
        "4 bytes each. The message size depends neither on the number of outputs nor on p.",
        wrong={
            "calls_forward": (
                "Every rank has all of x and returns only its own slice of the output. Does a rank need anything from "
                "the other ranks?"
            ),
            "calls_backward": "Each rank computes dx from its own columns only. What's missing from the true dx?",
            ("bytes_backward", 48): "That's the number of elements. How many bytes does each element take?",
            (
                "bytes_backward",
                288,
            ): "That's the size of the full output in bytes. Which tensor's gradient has to be summed across ranks?",
            ("bytes_backward", 768): "The message size equals the size of the tensor, no matter how many ranks "
            "take part.",
            "bytes_backward": (
                "In the backward pass, f all-reduces the gradient of x. What's the shape of the gradient of x? How "
                "many bytes does a float32 element take?"
            ),
        },
    ),
    "4.c": Prediction(
        question="On four ranks, each rank adds its bias before the all-reduce. How many times is the bias added to "
        "the output? If every rank adds bias / p instead, what fraction of its true gradient does each rank's bias "
        "receive?",
        answer={"times_in_output": 4, "fraction_of_gradient": 0.25},
        why="The all-reduce sums four terms, and each one includes the bias. If you divide the bias b by 4, the "
        "sum is correct. But the derivative of b/4 with respect to b is 1/4, so each rank's bias receives "
        "only a quarter of its gradient.",
        wrong={
            "times_in_output": (
                "Write down what each of the four ranks holds before the all-reduce. How many times does the bias "
                "appear in the sum?"
            ),
            (
                "fraction_of_gradient",
                1,
            ): "This rank adds b/4 instead of its bias b. What's the derivative of b/4 with respect to b?",
            (
                "fraction_of_gradient",
                4,
            ): "It's the other way around. The forward pass divides the bias by 4, so what happens to the gradient of "
            "the bias?",
            "fraction_of_gradient": (
                "Each rank adds b/p instead of its bias b, and g passes the gradient through unchanged. For p = 4, "
                "what's the derivative of b/p with respect to b?"
            ),
        },
    ),
    "4.d": Prediction(
        question="A fused weight [q; k; v] has 12 rows. With p = 2 and stride = 3, which rows does rank 1 hold?",
        answer={"rows_of_rank_1": [2, 3, 6, 7, 10, 11]},
        why="Each block of four rows is split in half, so rank 1 holds the second half of q (rows 2 and 3), of k (rows "
        "6 and 7), and of v (rows 10 and 11).",
        wrong={
            (
                "rows_of_rank_1",
                (6, 7, 8, 9, 10, 11),
            ): "That's the second half of the whole weight, which contains half of k and all of v, but no rows of q.",
            (
                "rows_of_rank_1",
                (1, 3, 5, 7, 9, 11),
            ): "That's every other row of the weight. Within each block, a rank's rows should be contiguous.",
            "rows_of_rank_1": (
                "Rows 0 to 3 are q, rows 4 to 7 are k, and rows 8 to 11 are v. Which half of each block belongs to "
                "rank 1?"
            ),
        },
    ),
    "4.e": Prediction(
        question="Four ranks use the same seed, and each of them draws its shard of a [512, 512] weight directly "
        "with `xavier_normal_`. By what factor is the variance too large? If you concatenate the four "
        "shards, what's the matrix rank of the result?",
        answer={"variance_factor": 1.6, "matrix_rank": 128},
        why="The variance should be 2/(512 + 512), but each rank computes 2/(128 + 512), which is 1.6 times as large. "
        "All four shards contain the same 128 columns, so the full matrix has only 128 independent columns.",
        wrong={
            (
                "variance_factor",
                4,
            ): "The variance is 2/(in + out), and only one of the two sizes in the denominator is divided by 4. "
            "What's the variance for the full weight? What's the variance for the shard?",
            (
                "variance_factor",
                0.625,
            ): "That's the inverse. Which has the larger variance 2/(in + out), the full weight or the shard?",
            "variance_factor": (
                "The variance is 2/(in + out). If a rank's shard has the shape [512, 128], what values does that "
                "rank use for `in` and `out`?"
            ),
            (
                "matrix_rank",
                512,
            ): "All ranks used the same seed and drew a shard of the same shape. How could their shards differ?",
            "matrix_rank": "All four shards are equal. How many distinct columns does the full matrix have?",
        },
    ),
}
