"""Prediction questions of chapter 15, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "15.a": Prediction(
        question="Everything is float32, and AdamW keeps two numbers for each weight. How many bytes a parameter does "
        "a rank hold for weights, gradients and optimizer together? A matrix of 1,000,000 numbers is cut over 2 "
        "tensor-parallel ranks: how many bytes of these does one of them hold for it?",
        answer={"bytes_a_parameter": 16, "bytes_of_the_matrix": 8_000_000},
        why="4 for the weight, 4 for its gradient, 4 + 4 for the two averages: 16, by chance as many as in mixed "
        "precision. Half of the matrix is 500,000 numbers of 16 bytes.",
        wrong={
            "bytes_a_parameter": "A number in float32 has 4 bytes. How many numbers belong to one weight?",
            ("bytes_a_parameter", 12): "Weight, gradient, and AdamW keeps two averages, not one.",
            ("bytes_a_parameter", 8): "That is the optimizer's share. The weight and its gradient are there too.",
            "bytes_of_the_matrix": "Each of two ranks holds half of a matrix, with 16 bytes for each number.",
            ("bytes_of_the_matrix", 16_000_000): "That is the whole matrix. Each rank holds half of it.",
        },
    ),
    "15.b": Prediction(
        question="24 steps, a checkpoint after every 5th. In step 18 a rank is killed. After which step does the run "
        "go on, and how many finished steps are computed a second time?",
        answer={"goes_on_after": 15, "steps_again": 2},
        why="The newest complete checkpoint is that of step 15. Steps 16 and 17 were done and are lost; step 18 was "
        "not finished.",
        wrong={
            "goes_on_after": "A whole run saves steps 5, 10, 15, 20. Which of these checkpoints are there in step 18?",
            "steps_again": "Which steps were finished after the checkpoint? Step 18 itself was not.",
            ("steps_again", 3): "Step 18 was killed in its middle. How many were finished before it?",
        },
    ),
    "15.c": Prediction(
        question="The same run with tp = 4 in place of 2, the batch as before. By which factor do these change: the "
        "weights of a matrix on a rank, the bytes of the messages that it enters in forward and backward, as record() "
        "counts them, the loss of the first step?",
        answer={"matrix": 0.5, "bytes": 1, "loss": 1},
        why="Each rank has a quarter of a matrix in place of a half. The messages are whole tensors [b, s, h], "
        "whatever p is; on a ring a rank sends 2(p-1)/p of each, here 1.5 times as much. And the model is the same.",
        wrong={
            "matrix": "A half of each matrix becomes a quarter.",
            "bytes": "f and g add up whole tensors [b, s, h]. Does their size depend on p?",
            ("bytes", 2): "Twice as many ranks send, and each of them sends messages of the same size as before.",
            ("bytes", 0.5): "The matrices are cut, the tensors between them are not: every rank has to have all of it.",
            "loss": "How the model is cut must not change what it computes.",
        },
    ),
    "15.d": Prediction(
        question='Sequence parallelism on in place of off: does each become "more", "less" or "the same"? The loss, '
        "the bytes in messages (an all-reduce counts as two halves; leave out the gradients of norms, biases and "
        "positions, which are added up once a step), the activations that a rank keeps.",
        answer={"loss": "the same", "bytes": "the same", "activations": "less"},
        why="An all-reduce is a reduce-scatter and an all-gather, and here the two are taken apart. What lies between "
        "them, norms and residuals, is cut over the ranks.",
        wrong={
            "loss": "How the work is laid out must not change what the model computes.",
            "bytes": "Each all-reduce becomes a reduce-scatter and an all-gather. What is an all-reduce made of?",
            "activations": "What stood whole on every rank, between the blocks, is cut along the sequence now.",
        },
    ),
}
