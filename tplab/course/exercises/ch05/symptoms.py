"""The table of symptoms and their causes for chapter 05."""

from tplab.course.checks import Symptom

SYMPTOMS = [
    Symptom(
        see="The first loss is correct, but later losses are slightly off, and the replica drift grows",
        cause="f is missing, so each rank's replicated parameters receive only one term of the gradient",
        exercise="5.2",
    ),
    Symptom(
        see="Everything is correct, but there are four collectives instead of two",
        cause="The tensor between the two layers is gathered and then scattered again",
        exercise="5.1",
    ),
    Symptom(
        see="The output is slightly off in every element, and so are the gradients, for every p",
        cause="One of the two MLPs uses the tanh approximation of GELU, and the other uses the exact GELU",
        exercise="5.2",
    ),
    Symptom(
        see="The very first loss is wrong for p > 1 and correct for p = 1",
        cause="The first layer is row-parallel, so GELU is applied to partial sums, or a bias is added p times",
        exercise="5.1",
    ),
    Symptom(
        see="Training looks fine, but the checkpoint is useless for any other p",
        cause="The fused [gate; up] was split as one block, with stride 1 instead of 2",
        exercise="5.4",
    ),
    Symptom(
        see="The loss curves for different p agree to many digits, but not exactly",
        cause="Nothing is wrong, because the ranks add the same numbers in a different order",
    ),
    Symptom(
        see="The replicas differ before the first update",
        cause="The replicated parameters started from different values, because each rank had its own seed",
        exercise="5.3",
    ),
]
