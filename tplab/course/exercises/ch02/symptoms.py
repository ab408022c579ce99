"""The table of symptoms and their causes at the end of chapter 02's "Break it" section."""

from tplab.course.checks import Symptom

SYMPTOMS = [
    Symptom(
        "The shape is right, but every rank has different values, and their sum across ranks is the correct result",
        "The tensor is still partial, because the all-reduce after a row split is missing or wrote into another tensor",
        "2.2",
    ),
    Symptom(
        "The result has only out/p columns",
        "The tensor is still sharded, because the all-gather after a column split is missing",
        "2.2",
    ),
    Symptom(
        "The right values are in the wrong places, or the result has p·b rows",
        "Columns were joined along dimension 0, which is what all_gather_into_tensor does",
        "2.4",
    ),
    Symptom(
        "All ranks agree, but entries whose terms have different signs are too large",
        "A nonlinearity was applied to partial sums",
        "2.3",
    ),
    Symptom(
        "Every shard has the right shape, but even the sum across ranks is wrong",
        "A was split into different columns than the rows that B was split into",
        "2.2",
    ),
    Symptom(
        "The shapes differ between ranks, or a collective hangs",
        "A size that can't be divided evenly was split anyway",
        "2.1",
    ),
    Symptom(
        "Every rank holds a shard, but it doesn't use any less memory",
        "The shard is a view, and it keeps the full tensor alive",
        "2.1",
    ),
]
