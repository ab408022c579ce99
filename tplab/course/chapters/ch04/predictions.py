"""Prediction questions of chapter 04, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "4.a": Prediction(
        question="nn.Linear(6, 8) on two ranks: which shapes do weight and bias have on each rank, cut column-parallel "
        "and row-parallel?",
        answer={"column_weight": (4, 6), "column_bias": (4,), "row_weight": (8, 3), "row_bias": (8,)},
        why="weight is [o, i] = [8, 6]. Column-parallel halves the outputs, and the bias has one number per "
        "output. Row-parallel halves the inputs; every rank still has all outputs, so it keeps the whole "
        "bias.",
        wrong={
            "column_weight": "nn.Linear(6, 8).weight has shape [8, 6]. Column-parallel splits the outputs: which "
            "number is that?",
            "column_bias": "The bias has one number per output feature. How many outputs has each rank, "
            "column-parallel?",
            "row_weight": "Row-parallel splits the inputs: which of the two numbers in [8, 6] is that?",
            "row_bias": "The bias has one number per output feature. How many outputs does a rank end up with when "
            "the layer is row-parallel?",
            ("column_weight", (6, 4)): "That is a piece of the papers' A, [i, o]. PyTorch stores its transpose.",
            ("row_weight", (3, 8)): "That is a piece of the papers' A, [i, o]. PyTorch stores its transpose.",
        },
    ),
    "4.b": Prediction(
        question="Column-parallel, gather_output=False, input [2, 3, 8], 12 output features, p = 4, four bytes a "
        "number: how many collectives forward and backward, and how many bytes has the backward one?",
        answer={"calls_forward": 0, "calls_backward": 1, "bytes_backward": 192},
        why="Forward, every rank has all it needs. Backward, f all-reduces dx, which has the shape of x: 2·3·8 "
        "numbers of 4 bytes. The output features do not appear, and neither does p.",
        wrong={
            "calls_forward": "The input is replicated, and each rank returns its own slice. What would it need "
            "from the others?",
            "calls_backward": "Each rank computes dx through its own columns only. What is missing to the true dx?",
            "bytes_backward": "f all-reduces the gradient of x. Which shape has it, and how many bytes has a number?",
            ("bytes_backward", 48): "That many numbers. How many bytes?",
            (
                "bytes_backward",
                288,
            ): "That is the size of the whole output. Which tensor is all-reduced in the backward pass?",
            ("bytes_backward", 768): "The size of a message is the size of the tensor, however many ranks take part.",
        },
    ),
    "4.c": Prediction(
        question="F.linear with the bias on every one of four ranks, then an all-reduce: how many times is the bias in "
        "the output? With bias / p instead: what fraction of its true gradient does the bias on each rank get?",
        answer={"times_in_output": 4, "fraction_of_gradient": 0.25},
        why="The all-reduce adds four terms, and each has the bias. Divided by four the sum is right, but the "
        "derivative of b/4 is 1/4, and g passes dY through unchanged: each rank's bias sees a quarter of its "
        "gradient.",
        wrong={
            "times_in_output": "Write down what rank 0 holds before the all-reduce, what rank 1 holds, and add.",
            "fraction_of_gradient": "On one rank, out depends on b through b / p, and g leaves the gradient "
            "alone. What is the derivative of b / 4 by b?",
            (
                "fraction_of_gradient",
                4,
            ): "The other way round: the bias is divided on the way forward, so its gradient is divided too.",
        },
    ),
    "4.d": Prediction(
        question="A fused weight [q; k; v] of 12 rows, p = 2, stride = 3: which rows does rank 1 hold?",
        answer={"rows_of_rank_1": [2, 3, 6, 7, 10, 11]},
        why="Each block of four is cut in two: rank 1 has the second half of q (2, 3), of k (6, 7) and of v (10, 11).",
        wrong={
            "rows_of_rank_1": "q is rows 0 to 3, k is 4 to 7, v is 8 to 11. Which half of each belongs to rank 1?",
            (
                "rows_of_rank_1",
                (6, 7, 8, 9, 10, 11),
            ): "That is the contiguous cut: half of k, all of v and nothing of q.",
            (
                "rows_of_rank_1",
                (1, 3, 5, 7, 9, 11),
            ): "A rank takes neighbouring rows: half of each block, not every second row.",
        },
    ),
}
