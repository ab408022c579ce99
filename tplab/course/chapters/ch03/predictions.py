"""Prediction questions of chapter 03, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "3.a": Prediction(
        question="Each rank only sees its own path through the network, so it computes dx = `a_r` · `dz_r`. What "
        "value does each rank get for dx? What's the correct value of dx?",
        answer={"rank_0": -12, "rank_1": 20, "right": 8},
        why="Rank 0 computes 3 · (-4) = -12, and rank 1 computes (-5) · (-4) = 20. The loss is 2x², so the correct "
        "gradient is 4x = 8, which is the sum of -12 and 20.",
        wrong={
            "rank_0": "On rank 0, a₀ is 3 and dz₀ is -4. What's their product?",
            "rank_1": "On rank 1, a₁ is -5 and dz₁ is -4. What's their product?",
            ("right", 4): "That's the derivative at x = 1, and it's also the mean of the two ranks' values. But here, "
            "x is 2.",
            "right": "The loss is 2x². What's its derivative at x = 2?",
        },
    ),
    "3.b": Prediction(
        question="Rank 0 passes a matrix of ones to `sum_as_shipped`, and rank 1 passes a matrix of twos. On rank 0, "
        "the function returns a matrix whose elements are all the same. What value do the returned elements have if "
        "both input matrices are contiguous? What value do the returned elements have if both input "
        "matrices are transposed? And if both input matrices are contiguous, what value do the elements of rank 0's "
        "own matrix have after the call?",
        answer={"contiguous": 3, "transposed": 1, "own_afterwards": 3},
        why="If x is contiguous, `x.contiguous()` is x itself, so the all-reduce overwrites x with the sum, and the "
        "helper returns x. If x is transposed, `x.contiguous()` is a copy, so the sum ends up in the copy, and the "
        "helper returns the unchanged x. What gives the bugs away is that the result depends on the memory layout.",
        wrong={
            ("contiguous", 1): "What does `.contiguous()` return for a tensor that's already contiguous?",
            "contiguous": "The all-reduce writes the sum 1 + 2 into the tensor that `.contiguous()` returned. Is that "
            "tensor a copy of x, or is it x itself?",
            (
                "transposed",
                3,
            ): "The sum ended up in the copy that `.contiguous()` made. Which tensor does the helper return?",
            "transposed": "For a transposed matrix, `.contiguous()` makes a copy. What values does x itself still "
            "contain?",
            ("own_afterwards", 1): "The all-reduce overwrote what `.contiguous()` returned. Was that a copy of x?",
            "own_afterwards": "The all-reduce overwrote the tensor that `.contiguous()` returned. Which tensor was "
            "that?",
        },
    ),
    "3.c": Prediction(
        question="The all-reduce wrote into the output of exp, which autograd had saved. What value does each rank "
        "get for dw?",
        answer={"rank_0": 3, "rank_1": 3},
        why="The derivative of exp is exp itself, so autograd uses the saved output as the derivative. By the time "
        "autograd uses this output, it holds the sum, which is 3 on both ranks.",
        wrong={
            ("rank_0", 1): "That's the correct gradient. But what value does the saved tensor hold by the time "
            "autograd uses it?",
            ("rank_1", 2): "That's the correct gradient. But what value does the saved tensor hold by the time "
            "autograd uses it?",
            "rank_0": "The derivative of exp is exp itself, so autograd uses the saved output as the derivative. What "
            "value did the all-reduce write into the saved output?",
            "rank_1": "The derivative of exp is exp itself, so autograd uses the saved output as the derivative. What "
            "value did the all-reduce write into the saved output?",
        },
    ),
    "3.d": Prediction(
        question="Two networks in a row each contain an f and a modified g, which also does an all-reduce in the "
        "backward pass. With 2 ranks, how many times too large is the first network's dx? With 4 ranks, how many "
        "times too large is the first network's dx?",
        answer={"factor_2": 4, "factor_4": 16},
        why="Every rank already holds the full gradient when the backward pass reaches g. Summing p equal copies makes "
        "the gradient p times as large. Both networks contain a g, so the gradient gets multiplied by p twice, and dx "
        "is p² times too large.",
        wrong={
            (
                "factor_2",
                2,
            ): "That's the factor after one g. What happens to this gradient when it reaches the g in the first "
            "network?",
            (
                "factor_4",
                4,
            ): "That's the factor after one g. What happens to this gradient when it reaches the g in the first "
            "network?",
            "factor_2": "By the time the gradient reaches g, both ranks hold the same gradient. If all ranks hold the "
            "same gradient, by what factor does an all-reduce multiply it? How many of these all-reduces does the "
            "gradient pass through before it reaches x?",
            "factor_4": "By the time the gradient reaches g, all four ranks hold the same gradient. If all ranks hold "
            "the same gradient, by what factor does an all-reduce multiply it? How many of these all-reduces does the "
            "gradient pass through before it reaches x?",
        },
    ),
    "3.e": Prediction(
        question="Suppose you run each of the four operators once on 4 ranks, forward and backward, in float32. The "
        "full tensor has shape [2, 16, 64]. How many collectives does each rank call? How many bytes long is each "
        "collective's message?",
        answer={"collectives": 4, "bytes": 8192},
        why="Each operator calls one collective, in either its forward or its backward pass, so there are four "
        "collectives in total. Each message is the full tensor, with 2 · 16 · 64 elements of 4 bytes each.",
        wrong={
            ("collectives", 8): "Each operator calls a collective in only one of its two passes.",
            ("collectives", 2): "You only counted the all-reduces of f and g. Which collectives do scatter and gather "
            "need?",
            "collectives": "How many of the eight entries in your table are collectives?",
            (
                "bytes",
                2048,
            ): "The full tensor has that many elements, but the question asks for bytes. How many bytes does the full "
            "tensor take up?",
            "bytes": "The message has 2 · 16 · 64 elements, and each element takes up 4 bytes.",
        },
    ),
}
