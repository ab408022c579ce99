"""The table of symptoms and their causes at the end of chapter 02's "Break it" section."""

from tplab.course.checks import Symptom

SYMPTOMS = [
    Symptom(
        "Right shape, every rank has other numbers, and their sum is right",
        "The tensor is still partial: the all-reduce after a row split is missing, or it wrote into another tensor",
        "2.3",
    ),
    Symptom(
        "The result has out/p columns",
        "The tensor is still sharded: the all-gather after a column split is missing",
        "2.2",
    ),
    Symptom(
        "Right numbers in the wrong places, or p·b rows",
        "Columns were put together along dimension 0, as all_gather_into_tensor does",
        "2.2",
    ),
    Symptom(
        "All ranks agree, and entries with terms of both signs are too large",
        "A nonlinearity was applied to partial sums",
        "2.4",
    ),
    Symptom(
        "The result is None",
        "dist.all_reduce works in place and returns nothing; its argument holds the sum",
        "2.3",
    ),
    Symptom(
        "Shapes differ between ranks, or a collective hangs",
        "A size that can't be divided evenly was cut all the same",
        "2.1",
    ),
    Symptom(
        "Every rank holds a shard, but memory did not shrink",
        "The shard is a view, and keeps the whole tensor alive",
        "2.1",
    ),
]
