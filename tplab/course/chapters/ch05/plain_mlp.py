"""The check of exercise 5.1, ParallelMLP."""

from typing import Any

import torch

from tplab.course.chapters.ch05.mlp_questions import COMMON_QUESTIONS
from tplab.course.chapters.ch05.mlps import HIDDEN, PLAIN, TANH, check_mlp, default_size, shapes
from tplab.course.checks import Question, Verdict, exercise, has_kind, run_ranks, verify


@exercise("5.1", "ParallelMLP")
def parallel_mlp(mlp_class: Any) -> Verdict:
    questions = (
        Question(
            lambda d: "parameters" in d.names,
            "Which layer is cut by columns and which by rows? `self.up` goes from h to m and splits m, `self.down` "
            "goes from m to h and splits m too; both are parallel layers, with a bias only if `bias`.",
        ),
        Question(
            lambda d: "sharding of up.weight" in d.names,
            "`self.up` is not cut by columns, or not parallel at all. Which layer keeps its output split, so that GELU "
            "can work on it?",
        ),
        Question(
            has_kind("out", TANH),
            "This is GELU by its tanh approximation. Which of the two does the exercise ask for?",
        ),
        Question(
            has_kind("out", "what comes out with ReLU", "what comes out with SiLU"),
            "The right structure with another activation. Which one does the exercise ask for?",
        ),
        *COMMON_QUESTIONS,
        Question(
            lambda d: "out" in d.names and not has_kind("out", "zeros")(d),
            "Y = GELU(X A + a) B + c, nothing before it and nothing after it. Where does your order of steps differ?",
        ),
    )
    check_mlp("5.1", mlp_class, PLAIN, questions)
    seen = run_ranks(default_size, 2, mlp_class)
    sizes = {"up.weight": (2 * HIDDEN, HIDDEN), "up.bias": (2 * HIDDEN,), "down.weight": (HIDDEN, 2 * HIDDEN)}
    zeros = {name: torch.zeros(size) for name, size in {**sizes, "down.bias": (HIDDEN,)}.items()}
    ask = (
        f"When ffn_hidden_size is None it is 4 · hidden_size: here {4 * HIDDEN}, of which each of two ranks keeps half."
    )
    expected = [{"parameters": shapes(zeros)}] * 2
    verify("5.1", 2, seen, expected, questions=[Question("parameters", ask)], note=f"ParallelMLP({HIDDEN})")
    return Verdict("One all-reduce of b·s·h numbers forward and one backward; nothing between the two layers.")
