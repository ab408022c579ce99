"""The table of symptoms at the end of chapter 10's "Break it" section.

Each row names a symptom, which is what a learner may see, and the mistake that causes it.
"""

from tplab.course.checks import Symptom

SYMPTOMS = [
    Symptom(
        see="Right at p = 1, another loss at each larger p, from the first step on",
        cause="The residual, or a last bias, is added before g: p of them in the sum",
        exercise="10.1",
    ),
    Symptom(
        see="All ranks report the same loss, and their norms drift apart",
        cause="Dropout of the residual stream with a mask of its own on each rank",
        exercise="10.1",
    ),
    Symptom(
        see="It trains, but worse than plain PyTorch, and alike at every p",
        cause="A norm left out, taken twice or of the wrong tensor; pre-LN where the twin has post-LN",
        exercise="10.1",
    ),
    Symptom(
        see="Loss too high by the same amount at each step, from the first one on, where p changes the padding",
        cause="Padding columns in the softmax: the loss was not told the true vocabulary",
        exercise="10.2",
    ),
    Symptom(
        see="A checkpoint loads without an error, the text is nonsense, at every p",
        cause="A square weight was not transposed",
        exercise="10.3",
    ),
    Symptom(
        see="A checkpoint gives good text at p = 1 and nonsense at p > 1",
        cause="Q, K and V were cut as one block",
        exercise="10.3",
    ),
    Symptom(
        see="The first token is right, later ones are not, and only with the cache",
        cause="The positions of the new tokens begin at 0 again, or a token is read twice",
        exercise="10.4",
    ),
    Symptom(
        see="Ranks write different texts",
        cause="Each chose its own best token, or ties are decided differently",
        exercise="10.4",
    ),
]
