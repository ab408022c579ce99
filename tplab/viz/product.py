"""A matmul in blocks.

column:  X · [A_0 | A_1] = [X A_0 | X A_1]               the parts of the result are concatenated
row:     [X_0 | X_1] · [A_0 ; A_1] = X_0 A_0 + X_1 A_1   every term is as large as the result
"""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from torch import Tensor

from tplab.viz.blocks import block, centered, label, shape_text, text_width
from tplab.viz.colors import FAINT, WIDTH, Picture, canvas, style

_SIGN = 0.34  # inches for a sign between two blocks
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


@dataclass
class _Part:
    """One matrix of the formula.

    ranks: the ranks that its blocks belong to (None: all ranks)
    cut:   how it's split, by "columns" or "rows" (None: not at all)
    """

    name: str
    shape: tuple[int, int]
    ranks: Sequence[int | None]
    cut: str | None = None
    block_names: Sequence[str] = ()
    note: str = ""


def product(X: Tensor, A: Tensor, *, kind: str, p: int) -> Picture:
    """Draw X [b, i] times A [i, o] over p ranks.

    kind:  "column" (split A by columns, concatenate results) or "row" (split A by rows, X by columns, sum results)
    """
    (b, i), (i_again, o) = X.shape, A.shape
    if i != i_again:
        raise ValueError(f"X {shape_text((b, i))} and A {shape_text((i_again, o))} can't be multiplied")
    if kind not in ("column", "row"):
        raise ValueError(f"kind is 'column' or 'row', not {kind!r}")
    if (o if kind == "column" else i) % p:
        raise ValueError(f"size {o if kind == 'column' else i} can't be cut into {p} equal parts")
    return _draw(*(_column if kind == "column" else _row)(b, i, o, p))


def _column(b: int, i: int, o: int, p: int) -> tuple[list[_Part], list[str], str]:
    """Return the matrices of the formula, the signs between them, and the title."""
    ranks, each = list(range(p)), f"{shape_text((b, o // p))} each"
    parts = [
        _Part("X", (b, i), [None], note="on every rank"),
        _Part("A", (i, o), ranks, "columns", [f"A{_sub(r)}" for r in ranks], f"{shape_text((i, o // p))} each"),
        _Part("X A", (b, o), ranks, "columns", [f"XA{_sub(r)}" for r in ranks], each),
    ]
    return parts, ["·", "="], f"column split, p = {p}:  X A = [{', '.join(f'X A{_sub(r)}' for r in ranks)}]"


def _row(b: int, i: int, o: int, p: int) -> tuple[list[_Part], list[str], str]:
    ranks = list(range(p))
    terms = [_Part(f"X{_sub(r)} A{_sub(r)}", (b, o), [r], note=f"rank {r}") for r in ranks]
    parts = [
        _Part("X", (b, i), ranks, "columns", [f"X{_sub(r)}" for r in ranks], f"{shape_text((b, i // p))} each"),
        _Part("A", (i, o), ranks, "rows", [f"A{_sub(r)}" for r in ranks], f"{shape_text((i // p, o))} each"),
        *terms,
        _Part("X A", (b, o), [None], note="the sum"),
    ]
    title = f"row split, p = {p}:  X A = {' + '.join(term.name for term in terms)}"
    return parts, ["·", "=", *["+"] * (p - 1), "="], title


def _draw(parts: list[_Part], signs: list[str], title: str) -> Picture:
    inches = {size: max(0.5, min(1.8, 0.22 * size)) for part in parts for size in part.shape}
    room = WIDTH - 0.4 - _SIGN * len(signs)
    scale = min(1.35, room / sum(_slot(part, inches[part.shape[1]]) for part in parts))
    extents = [_extent(part, inches[part.shape[1]] * scale, inches[part.shape[0]] * scale) for part in parts]
    slots = [_slot(part, w) for part, (w, _) in zip(parts, extents, strict=True)]
    tallest = max(h for _, h in extents)
    top = 0.72
    width = max(0.4 + sum(slots) + _SIGN * len(signs), text_width(title, 11) + 0.4)
    with style():
        picture, axes = canvas(width, top + tallest + 0.5, title, title)
        x, middle = 0.2, top + tallest / 2
        for index, (part, (w, h), slot) in enumerate(zip(parts, extents, slots, strict=True)):
            _draw_part(axes, part, x + (slot - w) / 2, middle - h / 2, w, h, top + tallest + 0.16)
            x += slot
            if index < len(signs):
                centered(axes, x + _SIGN / 2, middle, signs[index], 15)
                x += _SIGN
    each = [f"{part.name} {shape_text(part.shape)}{f', split by {part.cut}' * bool(part.cut)}" for part in parts]
    picture.description = f"From left to right: {'; '.join(each)}."
    return picture


def _draw_part(axes: Axes, part: _Part, x: float, y: float, w: float, h: float, below: float) -> None:
    count = len(part.ranks)
    centered(axes, x + w / 2, y - 0.13, part.name, 10, bold=True)
    rows, columns = part.shape
    for index, rank in enumerate(part.ranks):
        if part.cut == "rows":
            left, top, width, height, cells = x, y + index * h / count, w, h / count, (rows // count, columns)
        else:
            left, top, width, height, cells = x + index * w / count, y, w / count, h, (rows, columns // count)
        block(axes, left, top, width, height, rank, cells)
        if part.block_names:
            label(axes, left + width / 2, top + height / 2, part.block_names[index], 8.5, bold=True)
    centered(axes, x + w / 2, below, shape_text(part.shape), 8.5)
    centered(axes, x + w / 2, below + 0.17, part.note, 8.5, color=FAINT)


def _extent(part: _Part, width: float, height: float) -> tuple[float, float]:
    """Return a matrix's width and height in inches, large enough for the names of its blocks."""
    count = len(part.ranks)
    across = 0.36 * count if part.cut == "columns" else 0.4
    return max(width, across), max(height, 0.3 * count if part.cut == "rows" else 0.36)


def _slot(part: _Part, width: float) -> float:
    """Return the width in inches that a matrix needs, including its texts."""
    texts = (text_width(part.name, 10), text_width(shape_text(part.shape), 8.5), text_width(part.note, 8.5))
    return max(_extent(part, width, 0)[0], *texts) + 0.06


def _sub(number: int) -> str:
    return str(number).translate(_SUBSCRIPTS)
