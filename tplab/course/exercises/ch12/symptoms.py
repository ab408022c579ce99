"""The table of symptoms at the end of chapter 12's "Break it" section.

Each row names a symptom, which is what a learner may see, and the mistake that causes it.
"""

from tplab.course.checks import Symptom

SYMPTOMS = [
    Symptom(
        see="The first loss is right, later ones are off a little; norms and last biases drift apart between the ranks",
        cause="Their gradients were not added up over the ranks: each rank trains them on its own tokens",
        exercise="12.3",
    ),
    Symptom(
        see="The output is right, and every gradient in front of the block is wrong, at p > 1 only",
        cause="The backward of the gather keeps this rank's slice and adds nothing up: partial_grad=False in front of "
        "a sharded matrix",
        exercise="12.1",
    ),
    Symptom(
        see="Everything is right, and a layer keeps as much memory as before",
        cause="Gathered before the norm, or an all-reduce that is cut afterwards: the tokens are cut too late",
        exercise="12.2",
    ),
    Symptom(
        see="Everything is right, and each block keeps one tensor [b, s, h] more than the formula says",
        cause="Autograd keeps the gathered input of the first matrix. Keep this rank's tokens and gather them again",
        exercise="12.4",
    ),
    Symptom(
        see="The output is wrong by a multiple of the bias, or of x, and depends on p",
        cause="Bias or residual is added before the reduce-scatter, so p times",
        exercise="12.2",
    ),
    Symptom(
        see="Ranks drop the same places of different tokens",
        cause='Dropout on cut tokens draws from the state "replicated"',
        exercise="12.2",
    ),
    Symptom(
        see="ValueError: sequence length s=33 can't be divided over 2 ranks",
        cause="The sequence is cut into equal parts: pad the texts to a multiple of p",
    ),
    Symptom(
        see="With recomputation the output is right and the gradients are those of other dropout masks",
        cause="The second run drew from where the first one had left the states (chapter 09)",
    ),
]
