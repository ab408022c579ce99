"""Prediction questions of chapter 02, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "2.a": Prediction(
        question="A is [1024, 4096], float32, split by columns over 4 devices. Rows and columns of a shard; MiB on "
        "each device.",
        answer={"rows": 1024, "columns": 1024, "mib": 4},
        why="A column split cuts the columns only: [1024, 4096/4]. That is 1024 · 1024 numbers of 4 bytes, 4 MiB, a "
        "quarter of 16.",
        wrong={
            "rows": "Each column of A stays whole. How long is a column?",
            ("columns", 4096): "4096 columns are dealt out over 4 devices.",
            "columns": "4096 columns are dealt out over 4 devices.",
            ("mib", 16): "That is the whole of A. What does one device hold?",
            ("mib", 1): "Count bytes, not numbers: float32 takes 4 bytes.",
            "mib": "Rows times columns of one shard, times 4 bytes, divided by 1024 · 1024.",
        },
    ),
    "2.b": Prediction(
        question="The terms of one entry are +3 on rank 0 and -3 on rank 1. GELU of the entry? Sum of the GELUs of "
        "the terms?",
        answer={"right": 0, "added_after": 3},
        why="The entry is 3 - 3 = 0, and GELU(0) = 0. But GELU(3) is about 3 and GELU(-3) about 0, together about 3.",
        wrong={
            "right": "First the entry of Y, which is the sum of the two terms. Then GELU.",
            ("added_after", 0): "GELU(-3) is not -3: very negative numbers are cut off.",
            "added_after": "GELU(3) is about 3. What is GELU(-3), about?",
        },
    ),
    "2.c": Prediction(
        question="X [4, 8], A [8, 12], float32, 4 ranks. Bytes of the gathered tensor, of the tensor that is added "
        "up, and of the weights on each rank.",
        answer={"all_gather": 192, "all_reduce": 192, "weights": 96},
        why="Both messages are Y: 4 · 12 numbers of 4 bytes. A has 8 · 12 · 4 = 384 bytes, a quarter of them on each "
        "rank.",
        wrong={
            ("all_gather", 48): "That is one rank's part, or the count of numbers. All parts together, in bytes?",
            "all_gather": "All parts together are Y, [4, 12]. In bytes?",
            ("all_reduce", 48): "Each rank's product has the full shape of Y. And count bytes.",
            "all_reduce": "Each rank's product has the full shape of Y, [4, 12]. In bytes?",
            ("weights", 384): "That is the whole of A.",
            ("weights", 24): "Count bytes, not numbers: float32 takes 4 bytes.",
            "weights": "8 · 12 numbers of 4 bytes, dealt out over 4 ranks.",
        },
    ),
}
