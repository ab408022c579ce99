"""The table of symptoms at the end of chapter 07's "Break it" section.

Each row names a symptom, which is what a learner may see, and the mistake that causes it.
"""

from tplab.course.checks import Symptom

SYMPTOMS = [
    Symptom(
        see="IndexError: index out of range in self, on one rank, after hours of training",
        cause="The mask says `> stop` where `>= stop` is right: it takes a batch with the id `stop`",
        exercise="7.2",
    ),
    Symptom(
        see="IndexError on every rank but rank 0, at once",
        cause="The ids are not shifted by `start`. With p = 1, and for the ids of rank 0, it does not show",
        exercise="7.2",
    ),
    Symptom(
        see="Every vector is the sum of several rows, at p = 1 all is right",
        cause="Foreign rows are not set to zero before the sum, or foreign ids are clamped into the shard",
        exercise="7.2",
    ),
    Symptom(
        see="The loss is finite, one kind of token is never learnt",
        cause="Its id is outside the vocabulary and gets a vector of zeros, where one process would raise",
        exercise="7.3",
    ),
    Symptom(
        see="The model is worse after its checkpoint was loaded; no shape differs",
        cause="An id in the padding was looked up and trained. The checkpoint has no such row",
        exercise="7.3",
    ),
    Symptom(
        see="The first loss is right, later ones are off, perhaps even lower; each rank's checkpoint is another model",
        cause="f is missing before the logits: each rank's copy of the body learns for its own part of the vocabulary",
        exercise="7.4",
    ),
    Symptom(
        see="The first loss is right, the model learns more slowly, every rank agrees with every other",
        cause="The table gets the gradient of one of its two uses only",
        exercise="7.5",
    ),
    Symptom(
        see="A generated id that the tokenizer does not know",
        cause="The padding was not dropped after the gather: one of its logits, x · 0 = 0, was the highest",
        exercise="7.4",
    ),
]
