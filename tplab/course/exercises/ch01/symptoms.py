"""The table of symptoms and their causes at the end of chapter 01's "Break it" section."""

from tplab.course.checks import Symptom

SYMPTOMS = [
    Symptom(
        "All ranks wait in recv, or all of them wait in send",
        "Every rank receives first (or sends first), so no rank reaches its other call",
        "1.2",
    ),
    Symptom(
        "A rank never joined a collective, and it has returned",
        "The rank called fewer collectives than the other ranks, because it took a different branch or left a loop "
        "early. The call it skipped may be an earlier one than the report names",
        "1.5",
    ),
    Symptom(
        "The sums are wrong, and there's no error",
        "A rank skipped a collective, and its next call with the same shape was paired with an earlier call of the "
        "other ranks",
        "1.5",
    ),
    Symptom(
        "A collective isn't the same on all ranks",
        "The shapes differ (for example, because the last batch is smaller), or the ranks call different collectives "
        "at the same point",
    ),
    Symptom(
        "A received tensor sometimes holds old values",
        "The rank never waited for its irecv, or it receives into a tensor that's still being sent",
        "1.2",
    ),
    Symptom(
        "The sums are right, but on the wrong ranks",
        "Each chunk started at the wrong rank, so it wasn't on the right rank after p - 1 steps",
        "1.2",
    ),
    Symptom(
        "One rank's values are missing from every sum",
        "The loop ends one step too early, or a rank didn't add its own chunk",
        "1.2",
    ),
    Symptom(
        "Every result is right, but it's slow with many ranks",
        "Either the messages are too large because they contain full tensors, or all traffic goes through one rank, "
        "which becomes the bottleneck. Count the bytes in the trace",
        "1.3",
    ),
]
