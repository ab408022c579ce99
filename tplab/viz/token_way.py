"""The path of a token, part one: from its ID to the logits of the next word, on every rank, one picture per step."""

from functools import partial
from typing import Any

from tplab.viz.blocks import centered, rectangle
from tplab.viz.colors import FAINT, GOLD, INK, NOBODY, RED, Picture, style
from tplab.viz.controls import Frames
from tplab.viz.lanes import CELL, ROW, Lanes

# The left ends of everything in a lane
TABLE, FOUND, G, X, BODY, Y, F, ZERO = 0.95, 2.25, 3.26, 3.55, 4.5, 4.82, 5.78, 6.72
BAR = 0.5  # the width of the longest bar
STEPS = 9


def token_way(way: Any) -> Frames:
    """Return pictures that follow a token through the model, for `viz.play`.

    way: the token's path, as returned by `tplab.tensor.record_token`
    """
    return Frames(STEPS, partial(_draw, way))


def _captions(way: Any) -> list[str]:
    word, token, target = way.words[way.token], way.token, way.words[way.target]
    owner = next(rank for rank, seen in enumerate(way.ranks) if not seen.foreign)
    mine, forward, backward = way.ranks[owner], way.forward[1], way.backward[1]
    return [
        f'Every rank has all the IDs. Let\'s follow "{word}", whose ID is {token}.',
        f"Only rank {owner} has row {token}. For all other ranks, the ID is foreign.",
        f"Rank {owner} looks up row {token} − {mine.start} = {mine.row}. All others look up row 0, a wrong vector!",
        f"So every rank except rank {owner} replaces its vector by zeros.",
        f"g adds the vectors of all ranks. It's the only message so far, with {forward} bytes for the whole sentence.",
        "The rest of the model does the same on every rank, and turns x into y.",
        "f sends nothing. Each rank multiplies y by its own rows, the same ones as before.",
        f'No rank has all {len(way.words)} logits. The next word is "{target}". To be continued in chapter 08!',
        f"Backward, f adds the gradients of y ({backward} bytes). Both gradients of row {token} are on rank {owner}.",
    ]


def _draw(way: Any, step: int) -> Picture:
    p, rows = len(way.ranks), len(way.ranks[0].table)
    sent = (step >= 4) + (step >= 8)
    with style():
        stage = Lanes(
            p=p, rows=rows, title=f"the path of a token on {p} ranks", caption=_captions(way)[step],
            counter=f"messages so far: {sent}",
        )  # fmt: skip
        stage.words([way.words[i] for i in way.ids], way.ids, way.place)
        for rank in range(p):
            _forward(stage, way, rank, step)
            if step == STEPS - 1:
                _backward(stage, way, rank)
        if step >= 4:
            stage.operator(G, "g", active=step == 4)
        if step >= 6:
            stage.operator(F, "f", active=step == 8, red=step == 8)
    stage.picture.description = _captions(way)[step]
    return stage.picture


def _forward(stage: Lanes, way: Any, rank: int, step: int) -> None:
    seen, top, middle = way.ranks[rank], stage.top(rank), stage.rows / 2 - 0.5
    for row, values in enumerate(seen.table.tolist()):
        number = seen.start + row
        padding, mine = number >= len(way.words), number == way.token
        name = "padding" if padding else f"{way.words[number]} {number}"
        at = top + (row + 0.46) * ROW
        stage.write(TABLE - 0.06, at, name, ha="right", color=INK if mine else FAINT, bold=mine)
        looked_up = step >= 2 and row == seen.row
        stage.vector(
            TABLE, rank, values, row=row, mine=None if padding else rank, gold=mine and step >= 1, faint=padding,
            red=looked_up and seen.foreign and step == 2,
        )  # fmt: skip
    if step == 1 and seen.foreign:
        stage.write(FOUND, stage.middle(rank), "not mine", size=9)
    if step == 1 and not seen.foreign:
        stage.arrow(
            (FOUND + 0.3, top + (seen.row + 0.5) * ROW), (TABLE + 2 * CELL, top + (seen.row + 0.5) * ROW), color=GOLD
        )
    if 2 <= step < STEPS - 1:
        values, wrong = (seen.found if step == 2 else seen.term).tolist(), seen.foreign and step == 2
        name = f"row {seen.row}" if step == 2 else "zeros" if seen.foreign else "its term"
        stage.vector(
            FOUND, rank, values, row=middle, mine=None if seen.foreign and step > 2 else rank, name=name, red=wrong,
            gold=not seen.foreign, faint=seen.foreign and step > 2,
        )  # fmt: skip
        if step == 2:
            start = (TABLE + 2 * CELL + 0.02, top + (seen.row + 0.46) * ROW)
            stage.arrow(start, (FOUND - 0.02, top + (middle + 0.46) * ROW), color=RED if wrong else GOLD)
    if step >= 4:
        stage.vector(X, rank, seen.x.tolist(), row=middle, name="x", gold=step == 4)
    if step >= 5:
        rectangle(stage.axes, BODY, top, 0.16, stage.rows * ROW, NOBODY, FAINT)
        centered(stage.axes, BODY + 0.08, stage.middle(rank), "the rest", 7, rotation=90)
        if step < STEPS - 1:
            stage.vector(Y, rank, seen.y.tolist(), row=middle, name="y", gold=step == 5)
    if step >= 6:
        names = [way.words[i] if i < len(way.words) else "" for i in range(seen.start, seen.start + stage.rows)]
        finite = [abs(v) for each in way.ranks for v in each.logits.tolist() if abs(v) != float("inf")]
        target = way.target - seen.start if step >= 7 else None
        stage.bars(
            ZERO, rank, seen.logits.tolist(), names, width=BAR, largest=max(finite), gold=target,
            numbers=step < STEPS - 1,
        )  # fmt: skip


def _backward(stage: Lanes, way: Any, rank: int) -> None:
    """Draw the gradients of y, and the two gradients of the token's row on the rank that holds it."""
    seen, middle = way.ranks[rank], stage.rows / 2 - 0.5
    stage.vector(Y, rank, seen.dy.tolist(), row=middle, red=True, name="dy")
    below = stage.top(rank) + (middle + 1.4) * ROW
    stage.write(Y + CELL, below, f"own: {_pair(seen.dy_own)}", color=RED, ha="center", size=7)
    if not seen.foreign:
        row = way.token - seen.start
        at, x = stage.top(rank) + (row + 0.46) * ROW, TABLE + 2 * CELL
        for name, gradient, offset in (("look-up", seen.d_lookup, -0.1), ("logits", seen.d_output, 0.1)):
            stage.arrow((FOUND - 0.14, at + offset), (x, at + offset / 3), color=RED)
            stage.write(FOUND - 0.12, at + offset, f"{name}: {_pair(gradient[row])}", color=RED, size=7)


def _pair(values: Any) -> str:
    return ", ".join(f"{value:+.2f}".replace("-", "−") for value in values.tolist())
