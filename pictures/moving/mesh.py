"""Draws pictures/moving/mesh.svg: one step of training on eight ranks in two machines, and the same with tp outermost.

The messages and their order on each rank come from a step of `Training3D` on 2 x 2 x 2 real ranks, with the GPT of
chapter 14.
"""

import torch
import torch.distributed as dist

from pictures.drawing import BACKWARD, SMALL, box, ink_on, line, text
from pictures.moving.animation import SECONDS, Movie
from tplab import launch, record
from tplab.cluster import Training3D
from tplab.common import corpus
from tplab.data import Grid
from tplab.memory import GPTConfig
from tplab.viz.colors import GOLD, INK, rank_color

GRID = Grid(dp=2, pp=2, tp=2)
CONFIG = GPTConfig(
    num_layers=2, hidden_size=48, num_heads=4, vocab_size=256, seq_length=24, activation="gelu_tanh", dropout=0.0
)
BEGIN, END, TURN = 0.8, 7.2, 9.0  # the step's messages are shown between BEGIN and END
AXES = {"tp": "#0072B2", "pp": "#009E73", "dp": BACKWARD}

HEIGHT, TOP, BOX = 372, 56, 236
MACHINES, WALL = (16, 424), 380  # left ends of the machines, which are 320 wide, and the middle of the wall
COLUMNS, ROWS, RADIUS = (86, 234), (TOP + 82, TOP + 194), 24
LASTS = 0.16  # seconds that a message is shown, before it fades
TOLD = (
    (0.0, 0.5, "Each machine is a replica. Ranks of the same color have the same weights."),
    (1.8, 2.88, "tp: neighbors split the matrices, so they talk all the time."),
    (3.4, 3.65, "pp: the upper stage sends activations down, and the lower stage sends gradients up."),
    (5.4, 7.24, "dp: at the end, the replicas add up their gradients."),
    (END + 0.4, 8.6, "Only the messages of dp have passed through the wall."),
    (TURN, None, "Now turn the mesh: tp becomes the outermost axis."),
    (10.4, SECONDS, "The loss is the same, but now all messages of tp pass through the wall."),
)


def run() -> dict:
    """Train for one step on this rank, and return the axis, the kind, the group and the bytes of all messages."""
    torch.set_num_threads(1)
    options = {"micro_batches": 2, "micro_batch_size": 2, "max_norm": 0.5, "dtype": torch.float64, "lr": 1e-2}
    training = Training3D(CONFIG, GRID, torch.optim.AdamW, **options)
    ids, targets = next(corpus.byte_batches(corpus.python_sources(6000)[3000:], CONFIG.seq_length, 8, 1, seed=1))
    with record() as section:
        training.step(ids, targets)
    mine = {axis: GRID.group(dist.get_rank(), axis) for axis in AXES}
    calls = [
        (axis, call.kind, tuple(call.group), call.bytes)
        for call in section
        for axis, group in mine.items()
        if sorted(call.group) == group
    ]
    assert len(calls) == len(section)
    return {"rank": dist.get_rank(), "calls": calls}


def messages(ranks: list[dict]) -> list[tuple[float, str, tuple[int, ...], int]]:
    """Return (time in the movie, axis, group, bytes) of each message, which is counted once for its group."""
    found = []
    for seen in ranks:
        for place, (axis, kind, group, size) in enumerate(seen["calls"]):
            if kind == "send" or (kind != "recv" and seen["rank"] == min(group)):
                time = BEGIN + (END - BEGIN) * (place + 0.5) / len(seen["calls"])
                found.append((round(time, 1), axis, group, size))
    return sorted(found)


def movie() -> Movie:
    sent = messages(list(launch(run, GRID.size, timeout=300)))
    total = {axis: sum(size for _, its, _, size in sent if its == axis) for axis in AXES}
    made = Movie(HEIGHT, "One step of training on eight ranks in two machines")
    for left in MACHINES:
        made.draw(box(left, TOP, 320, BOX, "#F4F4F4", INK, 1.5))
    made.draw(box(WALL - 9, TOP - 8, 18, BOX + 16, "#D9CBB6", INK, 1, radius=0))
    for machine, left in enumerate(MACHINES):
        made.draw(text(left + 12, TOP + 22, f"machine {machine}", size=SMALL, bold=True))
    _lines(made, sent)
    for rank in range(GRID.size):
        _rank(made, rank)
    _count_up(made, sent, total)
    made.tell(TOLD, 26, top=TOP - 10, x=12)
    return made


def _at(rank: int, turned: bool = False) -> tuple[float, float]:
    """Return where a rank is drawn: in the machine of its replica or, if the mesh is turned, in that of its shard."""
    place = GRID.place(rank)
    machine, column = (place.tp, place.dp) if turned else (place.dp, place.tp)
    return MACHINES[machine] + COLUMNS[column], ROWS[place.pp]


def _rank(made: Movie, rank: int) -> None:
    place = GRID.place(rank)
    color = rank_color(2 * place.pp + place.tp)  # ranks with the same weights have the same color
    drawn = f'<circle r="{RADIUS}" fill="{color}" stroke="{INK}"/>'
    drawn += text(0, 5, str(rank), color=ink_on(color), anchor="middle", bold=True)
    made.piece(drawn, *_at(rank)).fade(0, 1).move(TURN, TURN + 1, *_at(rank, turned=True))


def _lines(made: Movie, sent: list) -> None:
    """Draw a line for each pair of ranks, which lights up whenever they exchange a message."""
    for axis, color in AXES.items():
        for group in GRID.groups(axis):
            times = sorted({time for time, its, members, _ in sent if (its, sorted(members)) == (axis, group)})
            drawn = made.piece(_link(*_at(group[0]), *_at(group[1]), color))
            last = -1.0
            for time in times:
                if time > last + 0.05:
                    drawn.fade(time, 1, 0.05).fade(time + LASTS, 0, 0.08)
                    last = time + LASTS + 0.08
    for group in GRID.groups("tp"):
        drawn = made.piece(_link(*_at(group[0], turned=True), *_at(group[1], turned=True), AXES["tp"]))
        for time in (10.2, 10.6, 11.0):
            drawn.fade(time, 1, 0.05).fade(time + LASTS, 0, 0.08)
        drawn.fade(11.4, 1, 0.05)


def _link(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    """Draw a line between two ranks, or an arc if it passes through the wall, because other ranks are in between."""
    if x2 - x1 < 200:
        return line(x1, y1, x2, y2, color, 7)
    up = y1 - (96 if x1 < MACHINES[0] + COLUMNS[1] else 40)
    return f'<path d="M{x1},{y1}Q{(x1 + x2) / 2:g},{up} {x2},{y2}" stroke="{color}" stroke-width="7" fill="none"/>'


def _count_up(made: Movie, sent: list, total: dict[str, int]) -> None:
    """Show how many bytes each axis has sent so far."""
    wall = [(0.0, "through the wall: 0")]
    for place, (axis, color) in enumerate(AXES.items()):
        x, y = 130 + 190 * place, TOP + BOX + 40
        made.draw(text(x, y, f"{axis}:", color=color, bold=True))
        texts, so_far = [(0.0, "0")], 0
        for time in sorted({time for time, its, _, _ in sent if its == axis}):
            so_far += sum(size for when, its, _, size in sent if (when, its) == (time, axis))
            texts.append((time, f"{so_far:,}"))
            if axis == "dp":
                wall.append((time, f"through the wall: {so_far:,}"))
        assert so_far == total[axis]
        made.captions(x + 106, y, texts, color=color, anchor="end", bold=True)
    made.draw(text(12, TOP + BOX + 40, "bytes sent", size=SMALL))
    wall.append((10.4, f"through the wall: {total['tp']:,}"))
    made.piece(box(WALL - 130, TOP + BOX + 52, 260, 24, "#FFFFFF", GOLD, 2)).fade(0, 1)
    made.captions(WALL, TOP + BOX + 69, wall, anchor="middle", bold=True)
