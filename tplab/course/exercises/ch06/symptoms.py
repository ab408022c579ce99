"""The table of symptoms at the end of chapter 06's "Break it" section.

Each row names a symptom, which is what a learner may see, and the mistake that causes it.
"""

from tplab.course.checks import Symptom

SYMPTOMS = [
    Symptom(
        see="Training is fine, the checkpoint gives nonsense at another p",
        cause="The fused [Wq; Wk; Wv] was cut through the middle: stride 1 instead of 3",
        exercise="6.2",
    ),
    Symptom(
        see="A trained checkpoint gives nonsense at every p > 1, and is right at p = 1",
        cause="The same cut, on loading; or heads in another order than the checkpoint has them",
        exercise="6.3",
    ),
    Symptom(
        see="Output and dx right, dWk and dWv wrong; the copies of a head drift apart",
        cause="Fewer heads of K and V than ranks, and the copies' gradients are not added up",
        exercise="6.4",
    ),
    Symptom(
        see="dx is too large by the part that comes through K and V",
        cause="The gradients of k and v were summed over the copies, not those of their weights",
        exercise="6.4",
    ),
    Symptom(
        see="Right at p = 1, wrong from the first output at p > 1, and no error",
        cause="Heads were cut inside: head_dim divided by p in place of the number of heads",
        exercise="6.2",
    ),
    Symptom(
        see="Four all-reduces instead of two",
        cause="One f in front of each of q, k and v: three separate column-parallel layers",
        exercise="6.2",
    ),
    Symptom(
        see="The first generated token is right, the following ones are not",
        cause="With a cache, positions or the causal mask were made from the new tokens alone",
        exercise="6.5",
    ),
    Symptom(
        see="The cache does not get smaller with more ranks",
        cause="There are no more heads of K and V than ranks. Nothing is wrong",
        exercise="6.5",
    ),
]
