"""Draws pictures/moving/loss.svg: the loss of one token on two ranks, with five logits each, in both directions.

The numbers come from a run on two real ranks. The loss and the gradient are those of vocab_parallel_cross_entropy.
"""

import torch
import torch.distributed as dist

from pictures.drawing import BACKWARD, SMALL, box, card, dot, ink_on, line, number, text
from pictures.moving.animation import SECONDS, Lanes, Movie
from tplab import device, launch, record
from tplab.tensor import reduce_from_region, shard, vocab_parallel_cross_entropy
from tplab.viz.colors import FAINT, GOLD, INK, rank_color

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "it", ".")
TARGET = WORDS.index("it")
LOGITS = (1.0, 0.2, 0.6, 1.4, 2.5, 1.6, 0.4, 0.1, 1.2, 0.8)
RANKS = (0, 1)
HELD = len(WORDS) // len(RANKS)

HEIGHT, LANES = 430, Lanes(42, 158, 60)  # messages meet between the two lanes
LEFT, PITCH, BAR = 84, 58, 34  # the first bar, from bar to bar, and the width of a bar
FLOOR, ZERO = 140, 70  # below the top of a lane: where bars stand, and where the gradient is zero
UNIT = {"logits": 36, "exp": 90, "gradient": 70}  # pixels
LOSS = 680  # the middle of its column
MESSAGES = (  # each one's column, name and time, what the ranks send, and what both of them get
    (420, "m", 1.4, "own max", "m"),
    (500, "S", 4.2, "own sum", "S"),
    (580, "z of “it”", 6.1, "aimed", "z_t"),
)
TOLD = (
    (0.0, 1.2, f"Each rank has the logits of its own words. The target is “{WORDS[TARGET]}”."),
    (1.4, 2.2, "First message: the largest logit of all ranks, m."),
    (3.2, 4.1, "Each logit z becomes exp(z − m). No bar is taller than 1."),
    (4.2, 5.0, "Second message: the sum of all exponentials, S."),
    (6.1, 6.9, "Third message: the target's logit. Only one rank has it."),
    (8.0, 9.0, "Now both ranks can compute the loss, m + log S − z."),
    (9.2, SECONDS, "Backward, each bar becomes softmax − one-hot. Nothing is sent."),
)


def run() -> dict:
    """Compute the loss of one token on this rank, and return all that the picture shows."""
    mine = shard(torch.tensor([LOGITS]), -1, dist.get_rank(), dist.get_world_size()).to(device()).requires_grad_()
    target = torch.tensor([TARGET], device=device())
    loss = vocab_parallel_cross_entropy(mine, target)
    with record() as backward:
        loss.backward()
    z, column = mine.detach()[0], TARGET - dist.get_rank() * HELD
    m = z.max()
    dist.all_reduce(m, op=dist.ReduceOp.MAX)
    exp = (z - m).exp()  # [v/p]
    aimed = z[column] if 0 <= column < HELD else z.new_zeros(())
    total, z_t = reduce_from_region(exp.sum()), reduce_from_region(aimed.clone())
    torch.testing.assert_close(m + total.log() - z_t, loss.detach())
    return {
        "rank": dist.get_rank(), "logits": z, "exp": exp, "gradient": mine.grad[0], "own max": z.max(), "m": m,
        "own sum": exp.sum(), "S": total, "aimed": aimed, "z_t": z_t, "loss": loss.detach(), "sent": len(backward),
    }  # fmt: skip


def movie() -> Movie:
    ranks = launch(run, len(RANKS))
    assert [rank["sent"] for rank in ranks] == [0, 0]
    made = Movie(HEIGHT, "The loss of one token on two ranks")
    for seen in ranks:
        _lane(made, seen["rank"])
        _bars(made, seen)
    for column, name, start, sent, result in MESSAGES:
        _message(made, column, name, start, [_said(seen[sent]) for seen in ranks], _said(ranks[0][result]))
    for rank in RANKS:
        loss = text(LOSS, LANES.top(rank) + 84, _said(ranks[rank]["loss"]), anchor="middle", bold=True)
        name = text(LOSS, LANES.top(rank) + 62, "loss", size=SMALL, anchor="middle")
        made.piece(box(LOSS - 52, LANES.top(rank) + 42, 104, 56, "#FFFFFF", GOLD, 3) + name + loss).show(8.0)
    made.tell(TOLD, 22, top=LANES.first - 6)
    made.count_messages((0.2, 2.6, 5.4, 7.3))
    quiet = text(LEFT + HELD * PITCH / 2, LANES.between() + 5, "no messages here", anchor="middle", bold=True)
    made.piece(quiet).show(9.6)
    return made


def _said(value: torch.Tensor) -> str:
    return number(round(float(value), 2))


def _middle(word: int) -> float:
    return LEFT + (word % HELD) * PITCH + BAR / 2


def _lane(made: Movie, rank: int) -> None:
    y = LANES.top(rank)
    made.lane(rank, LANES, label=(18, 22))
    for word in range(rank * HELD, (rank + 1) * HELD):
        aimed = word == TARGET
        if aimed:
            made.draw(box(_middle(word) - 24, y + 6, 48, 22, "#FFFFFF", GOLD, 2.5))
        made.draw(text(_middle(word), y + 22, WORDS[word], size=SMALL, anchor="middle", bold=aimed))


def _bars(made: Movie, seen: dict) -> None:
    """Draw the bars of a rank, which are logits first, then exponentials, and the gradient in the end."""
    y = LANES.top(seen["rank"])
    for column in range(HELD):
        for kind, start, end in (("logits", 0.2, 3.0), ("exp", 3.2, 9.0), ("gradient", 9.2, 0.0)):
            bar = _bar(seen["rank"] * HELD + column, float(seen[kind][column]), kind, y)
            made.travel(bar, 0, 0, start, until=end)
    made.piece(line(LEFT - 12, y + ZERO, LEFT + HELD * PITCH, y + ZERO, FAINT, 1.5)).show(9.2)


def _bar(word: int, value: float, kind: str, y: float) -> str:
    base, height = y + (ZERO if kind == "gradient" else FLOOR), abs(value) * UNIT[kind]
    top = base if value < 0 else base - height
    color = BACKWARD if kind == "gradient" else rank_color(word // HELD)
    edge = GOLD if word == TARGET else color
    drawn = box(_middle(word) - BAR / 2, top, BAR, height, color, edge, 3 if word == TARGET else 1, radius=0)
    label = base + height + 14 if value < 0 else top - 5
    return drawn + text(_middle(word), label, f"{value:.2f}".replace("-", "−"), size=11, anchor="middle")


def _message(made: Movie, x: float, name: str, start: float, sent: list[str], result: str) -> None:
    """Move each rank's number to the middle, and the result back to both ranks."""
    for rank in RANKS:
        y = LANES.top(rank) + FLOOR - 70
        mine = made.piece(_pill(sent[rank], rank_color(rank)), x, y).show(start)
        mine.move(start + 0.3, start + 0.8, x - 32 + 64 * rank, LANES.between()).hide(start + 1.0)
    for rank in RANKS:
        y = LANES.top(rank) + FLOOR - 70
        made.piece(_pill(result, INK), x, LANES.between()).show(start + 1.0).move(start + 1.2, start + 1.6, x, y)
        made.piece(text(x, y - 24, name, size=SMALL, anchor="middle", bold=True)).show(start + 1.6)


def _pill(said: str, color: str) -> str:
    if len(said) < 4:
        return dot(said, color)
    return card(-24, -15, 48, 30, said, color, INK, 0, 15, color=ink_on(color), bold=True)
