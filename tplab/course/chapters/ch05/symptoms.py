"""The table of symptoms and their causes at the end of chapter 05's "Break it" section."""

from tplab.course.checks import Symptom

SYMPTOMS = [
    Symptom(
        see="The first loss is right, later ones are off a little; replica drift grows",
        cause="f is missing: each rank's replicated parameters get only its own part of the gradient",
        exercise="5.1",
    ),
    Symptom(
        see="Everything is right, but four collectives instead of two",
        cause="The inner activation is gathered and scattered again",
        exercise="5.1",
    ),
    Symptom(
        see="Output slightly off in every element, gradients too, at every p",
        cause="GELU by its tanh approximation on one side, exact GELU on the other",
        exercise="5.1",
    ),
    Symptom(
        see="The loss is already wrong at the first step, at every p > 1 and not at p = 1",
        cause="Row-parallel first: the activation is applied to partial sums. Or a bias that is added p times",
        exercise="5.1",
    ),
    Symptom(
        see="Training is fine, the checkpoint gives nonsense at another p",
        cause="The fused [gate; up] was cut contiguously: stride 1 instead of 2",
        exercise="5.3",
    ),
    Symptom(
        see="Loss curves of different p agree to almost all digits, not exactly",
        cause="Nothing is wrong: sums are taken in another order",
    ),
    Symptom(
        see="Replica drift from the first step, before any update",
        cause="The replicated parameters did not start from the same numbers: another seed on each rank",
        exercise="5.4",
    ),
]
