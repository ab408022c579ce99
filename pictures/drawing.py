"""What all pictures are drawn with: colors, sizes, and functions that write SVG. Lengths are in pixels."""

from html import escape
from typing import Any

from matplotlib.colors import to_hex, to_rgb

from tplab.viz.colors import FAINT, INK, rank_color, tint

FORWARD, BACKWARD = INK, "#B3261E"  # values and arrows; rank colors never mean a direction
SIZE, SMALL = 15, 13  # font sizes; pictures may be shown somewhat smaller than they are


def document(width: float, height: float, body: list[str], title: str, description: str) -> str:
    """Return an SVG. The description is for readers who can't see it."""
    size = f'width="{digits(width)}" height="{digits(height)}"'
    top = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {digits(width)} {digits(height)}" {size} role="img" '
        f'aria-label="{escape(description)}" font-family="Helvetica, Arial, sans-serif" font-size="{SIZE}" '
        f'fill="{INK}">'
    )
    paper = f'<rect {size} fill="#FFFFFF"/>'
    return "\n".join([top, f"<title>{escape(title)}</title>", paper, *body, "</svg>\n"])


def text(
    x: float, y: float, said: str, *, size: float = SIZE, color: str = INK, anchor: str = "start", bold: bool = False
) -> str:
    """Write a line of text, with its baseline at y."""
    more = f' font-size="{size}"' if size != SIZE else ""
    more += f' fill="{color}"' if color != INK else ""
    more += f' text-anchor="{anchor}"' if anchor != "start" else ""
    more += ' font-weight="bold"' if bold else ""
    return f'<text x="{digits(x)}" y="{digits(y)}"{more}>{escape(said, quote=False)}</text>'


def box(
    x: float, y: float, width: float, height: float, fill: str = "#FFFFFF", edge: str = INK, stroke: float = 1.5,
    radius: float = 6, dashed: bool = False,
) -> str:  # fmt: skip
    where = f'x="{digits(x)}" y="{digits(y)}" width="{digits(width)}" height="{digits(height)}"'
    more = f' rx="{digits(radius)}"' if radius else ""
    more += f' stroke="{edge}" stroke-width="{digits(stroke)}"' if stroke else ""
    more += ' stroke-dasharray="5 4"' if dashed else ""
    return f'<rect {where} fill="{fill}"{more}/>'


def card(x: float, y: float, width: float, height: float, said: str, *look: Any, **style: Any) -> str:
    """Draw a box with a text in its middle. look: what follows the size in `box`; style: of the text"""
    middle = text(x + width / 2, y + height / 2 + 5, said, anchor="middle", **style)
    return box(x, y, width, height, *look) + middle


def line(x1: float, y1: float, x2: float, y2: float, color: str = FAINT, stroke: float = 2) -> str:
    path = f"M{digits(x1)},{digits(y1)}L{digits(x2)},{digits(y2)}"
    return f'<path d="{path}" stroke="{color}" stroke-width="{digits(stroke)}" fill="none"/>'


def arrow(x1: float, y1: float, x2: float, y2: float, color: str, stroke: float = 2, head: float = 6) -> str:
    """Draw an arrow from the first point to the second. Its head grows with `head`, not with the stroke."""
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    ux, uy = (x2 - x1) / length, (y2 - y1) / length
    back_x, back_y = x2 - 1.5 * head * ux, y2 - 1.5 * head * uy
    corners = [(x2, y2), (back_x - head * uy, back_y + head * ux), (back_x + head * uy, back_y - head * ux)]
    path = "L".join(f"{digits(x)},{digits(y)}" for x, y in corners)
    return line(x1, y1, back_x, back_y, color, stroke) + f'<path d="M{path}z" fill="{color}"/>'


def wires(left: float, right: float, upper: float, lower: float) -> list[str]:
    """Draw the two wires of a rank, an upper one for the way forward and a lower one for the way back."""
    return [line(left, y, right, y, color) for y, color in ((upper, "#B4B4B4"), (lower, "#DDB0AC"))]


def placed(body: str, x: float, y: float, opacity: float = 1) -> str:
    """Move what was drawn around (0, 0) to (x, y), and make it so opaque."""
    more = f' transform="translate({digits(x)},{digits(y)})"' if x or y else ""
    more += f' opacity="{digits(opacity, 2)}"' if opacity < 1 else ""
    return f"<g{more}>{body}</g>" if more else body


def dot(said: str, color: str) -> str:
    """Draw a number that travels, around (0, 0)."""
    return f'<circle r="16" fill="{color}"/>' + text(0, 5, said, color=ink_on(color), anchor="middle", bold=True)


def ink_on(color: str) -> str:
    """Return white or dark ink, whichever is easier to read on this color."""
    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(color)]
    luminance = sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))
    return "#FFFFFF" if luminance < 0.18 else INK  # the contrast to white is as large as to black


def rank_tint(rank: int, strength: float = 0.32) -> str:
    return to_hex(tint(rank_color(rank), strength))


def number(value: float) -> str:
    """Write a number as a reader expects it: −4, 20, 1.6."""
    return f"{value:g}".replace("-", "−")


def digits(value: float, places: int = 1) -> str:
    """Write a number of pixels or seconds with at most so many decimal places."""
    return f"{value:.{places}f}".rstrip("0").rstrip(".")
