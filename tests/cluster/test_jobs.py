"""The three jobs of chapter 15: what a layout costs, and which ones win."""

import re
from math import prod

import pytest

from tests import saying
from tplab.cluster.jobs import AGAIN, BUBBLE, DIVIDES, FITS, JOBS, SENDS
from tplab.cluster.plan import plans


@pytest.mark.parametrize(
    ("job", "layout", "fails", "says"),
    [
        ("98 million", (8, 1, 1, 32, "nothing"), DIVIDES, saying("12 heads", "tp = 8")),
        ("98 million", (1, 1, 4, 32, "nothing"), DIVIDES, saying("1 · 1 · 4 = 4", "8 GPUs")),
        ("70 billion", (8, 2, 4, 1, "nothing"), FITS, r"\d GB .*\bfirst\b"),
        ("70 billion", (16, 2, 2, 1, "nothing"), SENDS, r"\d\.\d\d .*\d%.*tensor parallel"),
        ("175 billion", (4, 32, 2, 8, "layers"), BUBBLE, r"\d\.\d\d .*\d%.*pipeline bubble"),
        ("98 million", (1, 1, 8, 32, "layers"), AGAIN, r"\d\.\d\d .*\d%.*matmuls"),
        ("70 billion", (8, 8, 1, 1, "nothing"), "", r"\d s\b"),  # within 5% of the best
    ],
)
def test_a_layout_is_told_what_is_wrong_with_it(job, layout, fails, says):
    played = JOBS[job].play(*layout)
    assert played.fails == fails
    assert re.search(says, played.verdict)


@pytest.mark.parametrize("name", JOBS)
def test_no_plan_that_the_game_allows_is_faster_than_the_fastest(name):
    job = JOBS[name]
    found = plans(job.config, job.gpus, job.machine, sequences=job.sequences)
    allowed = [p for p in found if p.layout.chunks == 1 and p.layout.sequence_parallel == (p.layout.tp > 1)]
    layout, time = job.fastest
    assert time.total == allowed[0].time.total
    assert prod((layout.tp, layout.pp, layout.dp)) == job.gpus
    assert not job.play(layout.tp, layout.pp, layout.dp, layout.micro_batch, layout.recompute).fails
