"""The check of exercise 5.3, the gated MLP."""

from typing import Any

from tplab.course.chapters.ch05.mlp_questions import COMMON_QUESTIONS
from tplab.course.chapters.ch05.mlps import GATED, INTERLEAVED, OTHER_GATE, SWAPPED, check_mlp
from tplab.course.checks import Question, Verdict, exercise, has_kind


@exercise("5.3", "SwiGLU")
def parallel_swiglu(mlp_class: Any) -> Verdict:
    questions = (
        Question(
            lambda d: "parameters" in d.names,
            "The parameters should be those of one fused `self.up`, column-parallel from h to 2m, and of `self.down`, "
            "row-parallel from m to h. Which of them has another name or shape?",
        ),
        Question(
            lambda d: "sharding of up.weight" in d.names,
            "Rank 0 must hold its rows of the gate and its rows of up. How many matrices are fused in `up`, and which "
            "argument of ColumnParallelLinear says so? Without it a rank gets rows that don't belong together.",
        ),
        Question(
            has_kind("out", SWAPPED),
            "The weight is [gate; up]: the first half of the output is the gate. On which half does SiLU go?",
        ),
        Question(
            has_kind("out", INTERLEAVED),
            "The shard is this rank's rows of the gate, then its rows of up. Which columns of the output are the gate?",
        ),
        Question(
            has_kind("out", OTHER_GATE, f"{OTHER_GATE} (GELU)"),
            "SiLU(u) = u · sigmoid(u). Which function did you put on the gate?",
        ),
        *COMMON_QUESTIONS,
        Question(
            lambda d: "out" in d.names and not has_kind("out", "zeros")(d),
            "Y = (SiLU(X G + g) * (X U + u)) D + d. Compute one number by hand with p = 1: where does it differ?",
        ),
    )
    check_mlp("5.3", mlp_class, GATED, questions)
    return Verdict("One fused product, one f, one g: the same two all-reduces as without the gate.")
