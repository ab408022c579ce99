"""Prediction questions of chapter 03, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "3.a": Prediction(
        question="Each rank only sees its own path through the network, so it computes dx = `a_r` · `dz_r`. What value "
        "does each rank get for dx? What's the correct value of dx?",
        answer={"rank_0": -12, "rank_1": 20, "right": 8},
        why="Rank 0 computes 3 · (-4) = -12, and rank 1 computes (-5) · (-4) = 20. The loss is 2x², so the correct "
        "gradient at x = 2 is 4x = 8. The sum of the two ranks' gradients, -12 and 20, is also 8.",
        wrong={
            "rank_0": "On rank 0, a₀ is 3 and dz₀ is -4. What's their product?",
            "rank_1": "On rank 1, a₁ is -5 and dz₁ is -4. What's their product?",
            (
                "right",
                4,
            ): "The derivative of 2x² is 4 at x = 1, but here, x is 2. The mean of -12 and 20 is also 4, but does "
            "the chain rule average gradients or add them?",
            "right": "The loss is 2x². What's its derivative at x = 2?",
        },
    ),
    "3.b": Prediction(
        question="Rank 0 passes a matrix of ones to `sum_as_shipped`, and rank 1 passes a matrix of twos. On rank 0, "
        "the function returns a matrix whose elements are all the same. What value does the returned matrix contain if "
        "both inputs are contiguous? What value does the returned matrix contain if both inputs are transposed? If "
        "both inputs are contiguous, what value does rank 0's own matrix contain after the call?",
        answer={"contiguous": 3, "transposed": 1, "own_afterwards": 3},
        why="If x is contiguous, `x.contiguous()` is x itself, so the all-reduce overwrites x with the sum, and the "
        "helper returns x. If x is transposed, `x.contiguous()` is a copy. The sum ends up in this copy, but the "
        "helper returns the unchanged x. What gives the bugs away is that the result depends on the memory layout.",
        wrong={
            ("contiguous", 1): "What does `.contiguous()` return for a tensor that's already contiguous?",
            "contiguous": "The all-reduce writes the sum 1 + 2 into the tensor that `.contiguous()` returned. Is that "
            "tensor a copy of x, or is it x itself?",
            (
                "transposed",
                3,
            ): "If x is transposed, the sum goes into the copy that `.contiguous()` made. Which tensor does the helper "
            "return?",
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
        why="Since exp is its own derivative, autograd multiplies the gradient by the saved output of exp. By the time "
        "autograd uses this output, it holds the sum, which is 3 on both ranks.",
        wrong={
            ("rank_0", 1): "That's the correct gradient. But what value does the saved tensor hold by the time "
            "autograd uses it?",
            ("rank_1", 2): "That's the correct gradient. But what value does the saved tensor hold by the time "
            "autograd uses it?",
            "rank_0": "Since exp is its own derivative, autograd multiplies the gradient by the saved output of exp. "
            "What value did the all-reduce write into the saved output?",
            "rank_1": "Since exp is its own derivative, autograd multiplies the gradient by the saved output of exp. "
            "What value did the all-reduce write into the saved output?",
        },
    ),
    "3.d": Prediction(
        question="You stack two networks, and each network contains an f and a modified g that also does an all-reduce "
        "in the backward pass. With 2 ranks, how many times too large is the first network's dx? With 4 ranks, how "
        "many times too large is the first network's dx?",
        answer={"factor_2": 4, "factor_4": 16},
        why="Every rank already holds the full gradient when the backward pass reaches g. Summing p equal copies makes "
        "the gradient p times as large. Each of the two networks contains a modified g, so dx is too large by a "
        "factor of p².",
        wrong={
            (
                "factor_2",
                2,
            ): "Your answer only counts the g of the second network. What happens to the gradient when it reaches "
            "the first network's g?",
            (
                "factor_4",
                4,
            ): "Your answer only counts the g of the second network. What happens to the gradient when it reaches "
            "the first network's g?",
            "factor_2": "If an all-reduce sums two copies of the same gradient, by what factor does the gradient grow? "
            "How many modified g operators does the backward pass go through before it reaches x?",
            "factor_4": "If an all-reduce sums four copies of the same gradient, by what factor does the gradient "
            "grow? How many modified g operators does the backward pass go through before it reaches x?",
        },
    ),
    "3.e": Prediction(
        question="Suppose you run each of the four operators once on 4 ranks, forward and backward, in float32. The "
        "full tensor has shape [2, 16, 64]. How many collectives does each rank call? How large is each "
        "collective's message, in bytes?",
        answer={"collectives": 4, "bytes": 8192},
        why="Each operator calls one collective, in either its forward or its backward pass, so there are four "
        "collectives in total. Each message is the full tensor, which has 2 · 16 · 64 elements of 4 bytes each.",
        wrong={
            ("collectives", 8): "Each operator calls a collective in only one of its two passes.",
            (
                "collectives",
                2,
            ): "The operators f and g call one collective each. How many collectives do scatter and gather call?",
            "collectives": "How many of the eight entries in your table are collectives?",
            (
                "bytes",
                2048,
            ): "The full tensor has 2,048 elements, and each rank's slice takes up 2,048 bytes. How many bytes does "
            "the full tensor take up?",
            "bytes": "The message has 2 · 16 · 64 elements, and each element takes up 4 bytes.",
        },
    ),
}
