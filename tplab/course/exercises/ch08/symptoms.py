"""The table of symptoms at the end of chapter 08's "Break it" section.

Each row names a symptom, which is what a learner may see, and the mistake that causes it.
"""

from tplab.course.checks import Symptom

SYMPTOMS = [
    Symptom(
        see="The loss is fine for thousands of steps, then inf or NaN from one step to the next",
        cause="No maximum is subtracted: a logit went over 88, where exp overflows in float32",
        exercise="8.2",
    ),
    Symptom(
        see="Each rank prints another loss",
        cause="A number that was not summed over the ranks, or each rank subtracted its own maximum",
        exercise="8.2",
    ),
    Symptom(
        see="The loss at the start is ln(padded v), not ln(v)",
        cause="Padded columns take part in the softmax",
        exercise="8.5",
    ),
    Symptom(
        see="The first loss is right; then it falls more slowly than on one process, and rises again",
        cause="Every rank subtracts 1 in the backward, not only the one that has the target",
        exercise="8.4",
    ),
    Symptom(
        see="The loss is right, but the gradient does not change with the loss scale or with the number of tokens",
        cause="The backward does not multiply by the upstream gradient",
        exercise="8.4",
    ),
    Symptom(
        see="A loss of about log-sum-exp for some tokens, and no error",
        cause="Their target is outside the vocabulary: every rank masked it and added 0",
        exercise="8.3",
    ),
    Symptom(
        see="With label smoothing, the loss depends on p and differs from rank to rank",
        cause="The smoothing is spread over the local vocabulary, v/p",
        exercise="8.5",
    ),
    Symptom(
        see="The more tokens are ignored, the smaller the loss",
        cause="The sum is divided by all tokens, not by those that count",
        exercise="8.5",
    ),
    Symptom(
        see="Everything is right; out of memory as soon as the vocabulary or the batch is real",
        cause="The logits are gathered: [n, v] on every rank, several times over",
    ),
]
