"""Prediction questions of chapter 00, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "0.a": Prediction(
        question="After a first step with Adam in float32: bytes for each parameter of weights, gradients, optimizer "
        "state?",
        answer={"weights": 4, "gradients": 4, "optimizer": 8},
        why="One float32 number each for the weight and its gradient; two for Adam's averages, of the gradients and of "
        "their squares.",
        wrong={
            "weights": "float32: how many bits, how many bytes?",
            "gradients": "One gradient for each weight, of the same dtype.",
            ("optimizer", 0): "After the first step Adam remembers something. What?",
            ("optimizer", 4): "Adam keeps two running averages for each weight.",
            ("optimizer", 12): "There is no copy of the weights here: everything is float32 already.",
            "optimizer": "How many numbers does Adam remember for each weight? Each has 4 bytes.",
        },
    ),
    "0.b": Prediction(
        question="Double b: by which factor do the states grow, by which the activations? Double s instead: by which "
        "factor do the bytes of the scores grow?",
        answer={"states": 1, "activations": 2, "scores": 4},
        why="States belong to the parameters, and those don't see the data. Every activation has b as a factor. The "
        "scores are [b, a, s, s]: s twice.",
        wrong={
            ("states", 2): "Does a weight get a second copy when more data goes through it?",
            "states": "How does the number of weights depend on the batch?",
            "activations": "Look at the formula: where does b stand?",
            ("scores", 2): "The scores are [b, a, s, s]. How often does s occur in their shape?",
            "scores": "Multiply s by 2 in 5·a·s·s·b.",
        },
    ),
    "0.c": Prediction(
        question="175 billion parameters: how many GPUs of 80 GB hold the weights alone, 2 bytes each, and how many "
        "hold what training needs, 16 bytes each?",
        answer={"gpus_to_answer": 5, "gpus_to_train": 35},
        why="350 GB / 80 GB = 4.4, so 5 GPUs; 2800 GB / 80 GB = 35. Training takes eight times the memory of the "
        "weights, and activations come on top.",
        wrong={
            ("gpus_to_answer", 4): "350 GB are more than 4 times 80 GB. A GPU comes whole.",
            (
                "gpus_to_answer",
                35,
            ): "That is for 16 bytes a parameter. Which of the 16 does a model need that only answers?",
            "gpus_to_answer": "175 · 2 billion bytes. How often do 80 GB go into that? Round up to whole GPUs.",
            (
                "gpus_to_train",
                5,
            ): "That holds the weights. What else does Adam with mixed precision keep for each of them?",
            "gpus_to_train": "175 · 16 billion bytes. How often do 80 GB go into that?",
        },
    ),
    "0.d": Prediction(
        question="A layer of GPT-3 keeps 34 + 80 = 114 bytes for each of its s·b·h numbers. How many on each of 8 "
        "tensor-parallel ranks?",
        answer={"bytes": 23},
        why="10 + 24/8 + 80/8 = 10 + 3 + 10. Eight times the GPUs, and five times less on each: the 10 stays.",
        wrong={
            ("bytes", 14.25): "114/8 would be right if everything were divided. Which term has no p under it?",
            ("bytes", 114): "That is the layer on one GPU.",
            ("bytes", 93): "The scores belong to heads, and each rank has only some of them.",
            ("bytes", 44): "The scores are divided by p only once; what happens to the 34?",
            "bytes": "Put p = 8 and 5as/h = 80 into 10 + 24/p + 5as/(hp).",
        },
    ),
}
