"""What chapter 03 asks: its exercises' checks, its predictions, its table of symptoms."""

from typing import Any

import torch

from tplab.course.ch03_operators import GATHER, SCATTER, F, G, check_operator
from tplab.course.ch03_questions import (
    F_QUESTIONS,
    G_QUESTIONS,
    GATHER_QUESTIONS,
    SCATTER_QUESTIONS,
    UNEVEN,
    f_lookalikes,
    g_lookalikes,
    gather_lookalikes,
    scatter_lookalikes,
)
from tplab.course.checking import Observed, Verdict, exercise, run_ranks, verify
from tplab.course.predictions import Prediction
from tplab.course.symptoms import Symptom
from tplab.runtime import device


@exercise("3.1", "f: copy forward, add backward")
def copy_to_region(operator: Any) -> Verdict:
    check_operator("3.1", operator, F, F_QUESTIONS, f_lookalikes)
    return Verdict(
        "One all-reduce, backward. Strided and expanded gradients are right too, and nobody's tensor was touched."
    )


@exercise("3.2", "g: add forward, copy backward")
def reduce_from_region(operator: Any) -> Verdict:
    check_operator("3.2", operator, G, G_QUESTIONS, g_lookalikes)
    return Verdict("One all-reduce, forward. The tensor that autograd saved is still what it was.")


@exercise("3.3", "scatter: cut forward, gather backward")
def scatter_to_region(operator: Any) -> Verdict:
    check_operator("3.3", operator, SCATTER, SCATTER_QUESTIONS, scatter_lookalikes)
    seen = run_ranks(scatter_unevenly, 2, operator)
    verify("3.3", 2, list(seen), [{UNEVEN: "refused with a ValueError"}] * 2, questions=SCATTER_QUESTIONS, note=UNEVEN)
    return Verdict("One all-gather, backward.")


def scatter_unevenly(operator: Any) -> Observed:
    """On a rank: 9 columns over 2 ranks."""
    try:
        part = operator.apply(torch.zeros(4, 9, device=device()))
    except ValueError:
        return {UNEVEN: "refused with a ValueError"}
    return {UNEVEN: f"cut all the same, to shape {list(part.shape)}"}


@exercise("3.4", "gather: gather forward, cut backward")
def gather_from_region(operator: Any) -> Verdict:
    check_operator("3.4", operator, GATHER, GATHER_QUESTIONS, gather_lookalikes)
    return Verdict("One all-gather, forward.")


PREDICTIONS = {
    "3.a": Prediction(
        question="What does each rank find for dx on its own path, a_r · dy_r, and what is the right dx?",
        answer={"rank_0": -12, "rank_1": 20, "right": 8},
        why="Rank 0: 3 · (-4) = -12. Rank 1: 5 · 4 = 20. L = 2x², so dL/dx = 4x = 8, and that is their sum.",
        wrong={
            "rank_0": "a_0 = 3 and dy_0 = -4.",
            "rank_1": "a_1 = 5 and dy_1 = 4.",
            ("right", 4): "4 is the average of the two, or dL/dx at x = 1. Here x = 2.",
            "right": "L = 2x². What is its derivative, at x = 2?",
        },
    ),
    "3.b": Prediction(
        question="The all-reduce wrote into the output of exp, which autograd kept. What does each rank get for dw?",
        answer={"rank_0": 3, "rank_1": 3},
        why="The derivative of exp is the output that autograd kept, and after the write it holds the sum, 3, on "
        "both ranks.",
        wrong={
            ("rank_0", 1): "That is the right gradient. But what does the tensor that autograd kept hold by then?",
            ("rank_1", 2): "That is the right gradient. But what does the tensor that autograd kept hold by then?",
            "rank_0": "The derivative of exp is its output, as autograd kept it. What was written into it?",
            "rank_1": "The derivative of exp is its output, as autograd kept it. What was written into it?",
        },
    ),
    "3.c": Prediction(
        question="An all-reduce whose backward is an all-reduce too, in place of g. By what factor are the gradients "
        "too large, on 2 and on 4 ranks?",
        answer={"factor_2": 2, "factor_4": 4},
        why="Every rank holds the whole dz. Adding the p equal copies makes p times dz, and everything below is "
        "linear in dz.",
        wrong={
            "factor_2": "Both ranks hold the same dz = -4. What do they hold after an all-reduce?",
            "factor_4": "Four ranks hold the same dz. What does an all-reduce make of them?",
        },
    ),
    "3.d": Prediction(
        question="[2, 16, 64] in float32 through all four operators, forward and backward, on 4 ranks. How many "
        "collectives does each rank enter? Bytes of the message of one?",
        answer={"collectives": 4, "bytes": 8192},
        why="One per operator, in one direction. Each message is the whole tensor: 2 · 16 · 64 numbers of 4 bytes.",
        wrong={
            ("collectives", 8): "Each operator sends in one direction only.",
            ("collectives", 2): "f and g need an all-reduce each. What do scatter and gather need?",
            "collectives": "Go through the table: which cells of its two traffic columns are not empty?",
            (
                "bytes",
                2048,
            ): "That is the count of numbers, or one rank's part. The message is the whole tensor, in bytes.",
            "bytes": "2 · 16 · 64 numbers of 4 bytes.",
        },
    ),
}

SYMPTOMS = [
    Symptom(
        "Outputs and weight gradients right; only the gradient of the input is wrong, and differs between ranks",
        "f is missing, or its backward adds nothing: each rank sees its own path only",
        "3.1",
    ),
    Symptom(
        "All gradients below a point are exactly p times too large",
        "g adds backward as well: one loss was counted p times",
        "3.2",
    ),
    Symptom(
        "Output right, gradient silently wrong, after exp, sigmoid, softmax, ...",
        "A collective wrote into a tensor that autograd had saved",
        "3.2",
    ),
    Symptom(
        "The process dies, or numbers elsewhere change, in the backward of .sum() or .mean()",
        "An in-place collective on an expanded gradient: it writes past its end",
        "3.1",
    ),
    Symptom(
        "Right with contiguous tensors, not reduced at all with others",
        "all_reduce(x.contiguous()) reduced a copy, and x was returned",
        "3.2",
    ),
    Symptom(
        "The gradient is zero outside this rank's columns",
        "scatter's backward padded with zeros where it should gather",
        "3.3",
    ),
    Symptom(
        "Gradient None",
        "backward returned what dist.all_reduce returns",
        "3.1",
    ),
]
