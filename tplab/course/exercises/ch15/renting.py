"""The check of exercise 15.4, a game: the cost model plays the learner's layout of each job, and says what it costs."""

from collections.abc import Callable, Iterator
from numbers import Integral
from typing import Any, get_args

import torch

from tplab.cluster.jobs import AGAIN, BUBBLE, BUSY, DIVIDES, FITS, JOBS, SENDS
from tplab.course.checks.describe import describe
from tplab.course.checks.forms.alone import Alone, Call, one
from tplab.course.checks.ledger import current
from tplab.course.checks.observation import Claim, Seen
from tplab.course.checks.trials import exercise
from tplab.memory.config import Recompute

FORM = "rent returns a layout"
WON = "within 5 % of the best layout"


def run(rent: Callable[..., Any], call: Call) -> Seen:
    said = rent(call.given)
    shown = tuple(said) if isinstance(said, (list, tuple)) else (said,)
    sizes, again = shown[:4], shown[4:]
    integers = all(isinstance(size, Integral) and not isinstance(size, bool) and int(size) > 0 for size in sizes)
    if not integers or len(sizes) != 4 or len(again) != 1 or again[0] not in get_args(Recompute):
        return one({FORM: Claim(f"it returned {describe(said)}")})
    current().compared[WON] = None
    tp, pp, dp, micro_batch_size = map(int, sizes)
    played = JOBS[call.given].play(tp, pp, dp, micro_batch_size, again[0])
    claims = {name: Claim("") for name in (FORM, DIVIDES, FITS, BUBBLE, SENDS, AGAIN, BUSY)}
    return one(claims | ({played.fails: Claim(played.verdict)} if played.fails else {}))


def calls(generator: torch.Generator) -> Iterator[Call]:
    for name, job in JOBS.items():
        yield Call(name, f'rent("{name}"), {job.gpus} GPUs')


exercise(
    "15.4", "Rent some machines", takes=["rent"],
    trials=[Alone(calls=calls, run=run, right=lambda call: one({}))],
    passed="All three jobs fit, and none of them takes 5 % longer than with the best layout.",
)  # fmt: skip
