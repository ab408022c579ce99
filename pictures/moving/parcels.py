"""Draws pictures/moving/parcels.svg: GPipe and 1F1B on four machines, with six parcels.

When each machine works on which parcel is computed by `tplab.pipeline.simulate`, where a backward pass takes twice as
long as a forward pass. The sizes of the shelves follow from that.
"""

from pictures.drawing import BACKWARD, FORWARD, SMALL, box, card, text
from pictures.moving.animation import SECONDS, WIDTH, Movie
from tplab.pipeline import schedules, simulate
from tplab.pipeline.schedule_order import Span
from tplab.viz.colors import FAINT, INK

P, M = 4, 6
START, PACE = 0.6, 0.38  # of the movie: the start of the runs, and a forward pass
HEIGHT, TOP, PANEL = 470, 54, 208
LEFT, PITCH, MACHINE = 96, 168, 84  # the first machine, from machine to machine, and the width of a machine
SLOT, PARCEL = 15, 22  # the height of a place on the shelf, and the width of a parcel
SHELF_Y, FLOOR = 100, 170  # below the top of a panel: the bottom of the shelf, and the middle of the machines

Spans = list[list[Span]]


def movie() -> Movie:
    runs = {"GPipe": simulate(schedules.gpipe(P, M)), "1F1B": simulate(schedules.one_f_one_b(P, M))}
    gpipe, one_f_one_b = (max(span.end for row in spans for span in row) for spans in runs.values())
    assert gpipe == one_f_one_b
    made = Movie(HEIGHT, "GPipe and 1F1B on four machines")
    for place, (name, spans) in enumerate(runs.items()):
        _panel(made, TOP + place * PANEL, name, spans)
    _tell(made, gpipe)
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
    moving = made.piece(body, _x(ranks[0]) + inside, y).fade(_time(steps[ranks[0]].start), 1, 0.05)
    for before, rank in zip(ranks, ranks[1:], strict=False):
        leave, start = _time(steps[before].end), _time(steps[rank].start)
        if start > leave + 0.1:  # it waits in front of the next machine
            moving.move(leave, leave + 0.1, _x(rank) - 30 if step > 0 else _x(rank) + MACHINE + 8)
        moving.move(start, start + 0.1, _x(rank) + inside)
    moving.fade(_time(steps[ranks[-1]].end), 0, 0.1)


def _tell(made: Movie, units: float) -> None:
    end = _time(units)
    told = [
        (0.0, None, "Eight machines, and nothing to do yet."),
        (_time(0.2), _time(2.5), "Forward: each machine puts a copy of the parcel on its shelf."),
        (_time(4.2), _time(6.5), "Below, the last machine turns parcel 0 around right away."),
        (_time(9.2), _time(9.6), "Above, all six parcels are on every shelf before the first one goes back."),
        (_time(17), _time(20), "Backward: each machine takes its copy off the shelf."),
        (end, SECONDS, "Same time. Smaller shelves."),
    ]
    made.tell(told, 26, top=TOP - 14, x=12)
    made.piece(text(0, 0, f"{units:g} units of time", anchor="end"), WIDTH - 10, 26).show(end)
