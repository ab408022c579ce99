"""The table of symptoms and their causes at the end of chapter 01's "Break it" section."""

from tplab.course.checks import Symptom

SYMPTOMS = [
    Symptom(
        "All ranks wait in recv, or all in send",
        "Everybody receives (or sends) first, in a circle: nobody comes to the other half",
        "1.2",
    ),
    Symptom(
        "A rank never joined a collective, and has returned",
        "It entered fewer collectives than the others: a branch or a loop ran differently there. The one it skipped "
        "may be an earlier one",
    ),
    Symptom(
        "Sums are off, and nothing is reported",
        "A rank skipped a collective, and its next one of the same shape was paired with the others' earlier one",
    ),
    Symptom(
        "A collective is not the same on all ranks",
        "Shapes differ (a smaller last batch), or the ranks call different collectives in the same place",
    ),
    Symptom(
        "The received tensor holds old numbers, now and then",
        "irecv was started and not waited for, or receives into the tensor that is still being sent",
        "1.2",
    ),
    Symptom(
        "The sums are right, on the wrong rank",
        "The part started at the wrong place of the ring: it is p - 1 steps away from its owner",
        "1.2",
    ),
    Symptom(
        "One rank's term is missing from every sum",
        "A step too few, or the rank's own part was not added",
        "1.2",
    ),
    Symptom(
        "Every result is right, and it is slow for many ranks",
        "Whole tensors are sent, to or through one rank: count the bytes in the record",
        "1.4",
    ),
]
