"""Prediction questions of chapter 12, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "12.a": Prediction(
        question="One block's forward pass on p = 4 ranks, b = 2, s = 16, h = 32, float32, with rings: how many bytes "
        "does each rank send for g, an all-reduce of `[b, s, h]`? How many for an all-gather and a reduce-scatter of "
        "the same tensor together?",
        answer={"all_reduce": 6144, "gather_and_scatter": 6144},
        why="The tensor has 2 · 16 · 32 · 4 = 4096 bytes. A ring all-reduce sends 2(p-1)/p of it from each rank: it is "
        "a reduce-scatter and an all-gather, of (p-1)/p each. The same bytes, cut in two halves.",
        wrong={
            "all_reduce": "How many bytes has the tensor? A ring all-reduce sends 2(p-1)/p of them from each rank "
            "(chapter 01).",
            ("all_reduce", 4096): "That is the size of the message. What does each rank put on the link in a ring?",
            ("all_reduce", 3072): "That is one half of the ring: p-1 steps. An all-reduce goes round twice.",
            ("all_reduce", 8192): "Each rank sends p-1 of p parts in each round, not all p.",
            "gather_and_scatter": "In a ring an all-gather and a reduce-scatter each take p-1 steps with 1/p of the "
            "tensor. How much do the two send together?",
            ("gather_and_scatter", 3072): "That is one of the two.",
            ("gather_and_scatter", 12288): "That is four rounds. How many rounds does each of the two take?",
        },
    ),
    "12.b": Prediction(
        question="A block on p ranks, each with its own tokens: is the gradient on each rank only one term of the "
        "right one (True or False) for the norm's weight, for the last bias, for `up.bias`? And how many bytes has one "
        "all-reduce of all such gradients, the norm's bias included, with h = 32 and float32?",
        answer={"norm_weight": True, "last_bias": True, "up_bias": False, "bytes": 384},
        why="The norm and the bias behind the sum are whole on every rank and see this rank's tokens only. The "
        "matrices and `up.bias` work on all tokens, and each rank has columns of its own. Three vectors of h: 3 · 32 · "
        "4 bytes.",
        wrong={
            "norm_weight": "Every rank holds the whole norm. Which tokens go through it?",
            "last_bias": "This bias is added behind the reduce-scatter. To which tokens?",
            "up_bias": "It is added behind the gather, to all tokens. And does another rank hold the same part of it?",
            "bytes": "The norm's weight and bias and the last bias: three vectors of h numbers, four bytes each.",
            ("bytes", 96): "That is how many numbers. How many bytes has a float32?",
            ("bytes", 256): "Two vectors? The norm has a weight and a bias.",
        },
    ),
    "12.c": Prediction(
        question="GPT-3 has 5as/h = 80, so a layer keeps 34 + 80 = 114 bytes for each of its s·b·h numbers. With p = "
        "8: how many on each rank with tensor parallelism alone, with the sequence cut as well, and with the scores "
        "computed again on top of that?",
        answer={"tensor_parallel": 23, "and_sequence": 14.25, "and_selective": 4.25},
        why="10 + 24/8 + 80/8 = 23. With the sequence cut all is divided: 34/8 + 80/8 = 14.25. Without the scores: "
        "34/8.",
        wrong={
            "tensor_parallel": "Ten of the 34 stay whole: 10 + 24/p, and the scores 80/p.",
            ("tensor_parallel", 14.25): "That is everything divided by 8. What does tensor parallelism leave whole?",
            "and_sequence": "Now everything is cut: by heads, by columns or by tokens. What is 34 + 80, divided by p?",
            "and_selective": "The scores, their softmax and their dropout are no longer kept. What remains of 34 + 80, "
            "and by what is it divided?",
            ("and_selective", 13): "That is 10 + 24/8, without sequence parallelism.",
        },
    ),
}
