"""Draws pictures/moving/parcels.svg: GPipe and 1F1B on four machines, with six parcels.

When each machine works on which parcel comes from two runs on four real ranks, whose stages only pause. The sizes of
the shelves follow from that.
"""

from collections.abc import Callable
from typing import Any

from pictures.drawing import BACKWARD, FORWARD, SMALL, box, card, text
from pictures.moving.animation import SECONDS, WIDTH, Movie
from tplab import device, launch
from tplab.pipeline import Channels, Pipeline, Schedule, schedules
from tplab.pipeline.examples import in_units, timed
from tplab.pipeline.schedule_order import Span
from tplab.viz.colors import FAINT, INK

P, M = 4, 6
UNIT = 0.05  # seconds of a forward pass in the real runs
START, PACE = 0.6, 0.38  # of the movie: the start of the runs, and a unit of time
HEIGHT, TOP, PANEL = 470, 54, 208
LEFT, PITCH, MACHINE = 96, 168, 84  # the first machine, from machine to machine, and the width of a machine
SLOT, PARCEL = 15, 22  # the height of a place on the shelf, and the width of a parcel
SHELF_Y, FLOOR = 100, 170  # below the top of a panel: the bottom of the shelf, and the middle of the machines

Spans = list[list[Span]]


def with_pipeline(plan: Schedule) -> Callable[..., Any]:
    """Return a `run_stage` as in exercise 13.3, which has the course's pipeline run the schedule."""

    def run_stage(stage: Any, actions: Any, channels: Channels, x: Any, loss: Any, inputs: Any, targets: Any) -> None:
        pipeline = Pipeline([stage], plan, shape=x.shape, loss_sum=loss, device=device(), channels=channels)
        pipeline.step(inputs, targets)

    return run_stage


def run(plan: Schedule) -> list[Span]:
    return timed(with_pipeline(plan), plan.actions, UNIT)


def movie() -> Movie:
    plans = {"GPipe": schedules.gpipe(P, M), "1F1B": schedules.one_f_one_b(P, M)}
    runs = {name: in_units(launch(run, P, args=(plan,)), UNIT) for name, plan in plans.items()}
    took = {name: max(span.end for row in spans for span in row) for name, spans in runs.items()}
    made = Movie(HEIGHT, "GPipe and 1F1B on four machines")
    for place, (name, spans) in enumerate(runs.items()):
        _panel(made, TOP + place * PANEL, name, spans)
    _tell(made, took)
    return made


def _time(units: float) -> float:
    return START + PACE * units


def _x(rank: int) -> float:
    return LEFT + PITCH * rank


def _panel(made: Movie, top: float, name: str, spans: Spans) -> None:
    made.draw(text(12, top + FLOOR + 5, name, bold=True))
    for rank, row in enumerate(spans):
        x, y = _x(rank), top + FLOOR - 18
        made.draw(box(x, y, MACHINE, 36, "#F4F4F4", FAINT, 2, dashed=True))
        made.draw(text(x + MACHINE - 8, y + 23, f"{rank}", size=SMALL, anchor="end", color=FAINT, bold=True))
        _shelf(made, top, rank, row)
    for k in range(M):
        _parcel(made, top, k, spans, "F")
        _parcel(made, top, k, spans, "B")


def _shelf(made: Movie, top: float, rank: int, row: list[Span]) -> None:
    """Draw the shelf, with a copy of each parcel from its F to its B, in the lowest free place."""
    x, y = _x(rank), top + SHELF_Y
    made.draw(box(x + 13, y - SLOT * M - 3, MACHINE - 26, SLOT * M + 4, "none", FAINT, 1))
    taken: dict[int, int] = {}
    full = 0
    for span in row:
        k = span.action.micro_batch
        if span.action.kind == "B":
            taken.pop(k)
            continue
        taken[k] = slot = min(set(range(M)) - set(taken.values()))
        end = next(s.end for s in row if s.action.kind == "B" and s.action.micro_batch == k)
        copy = box(0, -SLOT, MACHINE - 36, SLOT - 2, "#EAEAEA", FORWARD, 1, radius=2)
        copy += text(MACHINE / 2 - 18, -5, f"{k}", size=SMALL, anchor="middle")
        full = max(full, len(taken))
        made.piece(copy, x + 18, y - SLOT * slot).fade(_time(span.start), 1, 0.1).fade(_time(end), 0, 0.1)
    said = text(x + MACHINE / 2, y + 20, f"at most {full}", size=SMALL, anchor="middle", bold=True)
    made.piece(said).show(SECONDS - 1)


def _parcel(made: Movie, top: float, k: int, spans: Spans, kind: str) -> None:
    """Draw a parcel that moves into each machine when its work starts, and to the next one when it's done."""
    ranks = range(P) if kind == "F" else range(P - 1, -1, -1)
    color, step = (FORWARD, 1) if kind == "F" else (BACKWARD, -1)
    look = color, INK, 0, 3
    body = card(0, -PARCEL / 2, PARCEL, PARCEL, f"{k}", *look, size=SMALL, color="#FFFFFF", bold=True)
    steps = {rank: next(s for s in spans[rank] if (s.action.kind, s.action.micro_batch) == (kind, k)) for rank in ranks}
    y, inside = top + FLOOR, 20.0
    first = steps[ranks[0]]
    made_piece = made.piece(body, _x(ranks[0]) + inside, y).fade(_time(first.start), 1, 0.05)
    now = _time(first.start) + 0.05
    for before, rank in zip(ranks, ranks[1:], strict=False):
        leave = max(_time(steps[before].end), now)
        start = max(_time(steps[rank].start), leave)
        if start - leave > 0.1:  # it waits in front of the next machine
            made_piece.move(leave, leave + 0.1, _x(rank) - 30 if step > 0 else _x(rank) + MACHINE + 8)
        made_piece.move(start, start + 0.1, _x(rank) + inside)
        now = start + 0.1
    made_piece.fade(max(_time(steps[ranks[-1]].end), now), 0, 0.1)


def _tell(made: Movie, took: dict[str, float]) -> None:
    end = _time(max(took.values()))
    told = [
        (0.0, None, "Eight machines, and nothing to do yet."),
        (_time(0.2), _time(2.5), "Forward: each machine puts a copy of the parcel on its shelf."),
        (_time(4.2), _time(6.5), "Below, the last machine turns parcel 0 around right away."),
        (_time(9.2), _time(9.6), "Above, all six parcels are on every shelf before the first one goes back."),
        (_time(17), _time(20), "Backward: each machine takes its copy off the shelf."),
        (end, SECONDS, "Same time. Smaller shelves."),
    ]
    made.tell(told, 26, top=TOP - 14, x=12)
    both = " and ".join(dict.fromkeys(f"{round(units)}" for units in took.values()))
    made.piece(text(0, 0, f"{both} units of time", anchor="end"), WIDTH - 10, 26).show(end)
