"""The table of symptoms and their causes at the end of chapter 01's "Break it" section."""

from tplab.course.checks import Symptom

SYMPTOMS = [
    Symptom(
        "All ranks wait in recv, or all of them wait in send",
        "Everybody receives (or sends) first, in a circle, so nobody gets to the other half",
        "1.2",
    ),
    Symptom(
        "A rank never joined a collective, and it has returned",
        "It entered fewer collectives than the others, because a branch or a loop went differently. The one that it "
        "skipped may have been an earlier one",
        "1.5",
    ),
    Symptom(
        "Sums are off, and nothing is reported",
        "A rank skipped a collective, and its next one of the same shape was paired with the others' earlier one",
        "1.5",
    ),
    Symptom(
        "A collective isn't the same on all ranks",
        "The shapes differ (as with a smaller last batch), or the ranks call different collectives in the same place",
    ),
    Symptom(
        "A received tensor sometimes holds old values",
        "irecv was started and not waited for, or it receives into a tensor that's still being sent",
        "1.2",
    ),
    Symptom(
        "The sums are right, but on the wrong ranks",
        "The part started at the wrong place in the ring, so after p - 1 steps it isn't at its owner",
        "1.2",
    ),
    Symptom(
        "One rank's term is missing from every sum",
        "There's a step too few, or a rank didn't add its own part",
        "1.2",
    ),
    Symptom(
        "Every result is right, but it's slow with many ranks",
        "Full tensors are sent, or everything goes through one rank: count the bytes in the trace",
        "1.3",
    ),
]
