"""What the moving pictures share: a movie of pieces that appear, move and vanish, written as an SVG with CSS animation.

A movie needs no script, so it moves wherever a picture may: in a notebook that isn't trusted, and in the book. It runs
twice and then stays on its last moment, the complete picture. That is also what a reader sees whose browser was told to
reduce motion, because every piece is written the way it ends. `frames` writes the numbered stills of the same movie,
so the two can't disagree.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pictures.drawing import SMALL, arrow, box, digits, document, line, placed, rank_tint, text
from tplab.viz.colors import rank_color

FOLDER = Path(__file__).parent
WIDTH = 760
LOOPS = 2
FADE = 0.25  # seconds
SECONDS = 12


@dataclass
class Piece:
    """Something that is drawn once, at (x, y), and then appears, moves, or vanishes. It starts invisible.

    Times are in seconds and must be given in order.
    """

    body: str
    x: float
    y: float
    opacities: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, 0.0)])
    places: list[tuple[float, float, float]] = field(default_factory=list)  # (time, x, y)

    def __post_init__(self) -> None:
        self.places.append((0.0, self.x, self.y))

    def fade(self, at: float, opacity: float, seconds: float = FADE) -> "Piece":
        """Change to this opacity, beginning at the time `at`. At time 0, it has it from the start."""
        if at == 0:
            self.opacities = [(0.0, opacity)]
        else:
            self.opacities += [(at, self.opacities[-1][1]), (at + seconds, opacity)]
        return self

    def show(self, at: float) -> "Piece":
        return self.fade(at, 1)

    def hide(self, at: float) -> "Piece":
        return self.fade(at, 0)

    def move(self, start: float, end: float, x: float, y: float | None = None) -> "Piece":
        """Move to (x, y) between two times, or only sideways."""
        _, old_x, old_y = self.places[-1]
        self.places += [(start, old_x, old_y), (end, x, old_y if y is None else y)]
        return self

    def at(self, time: float) -> tuple[float, float, float]:
        """Return (opacity, x, y) at a time."""
        opacity = _between([(t, (value,)) for t, value in self.opacities], time)
        return (*opacity, *_between([(t, (x, y)) for t, x, y in self.places], time))  # type: ignore[return-value]

    def times(self) -> list[float]:
        return sorted({time for time, *_ in [*self.opacities, *self.places]})


class Frame(NamedTuple):
    """A moment of the movie that has a still: when, what happens there, and which part of the picture shows it."""

    time: float
    caption: str
    top: float
    height: float


class Lanes(NamedTuple):
    """The stripes of the ranks: where the first one starts, their height, and the space between two of them."""

    first: float
    height: float
    gap: float

    def top(self, rank: int) -> float:
        return self.first + rank * (self.height + self.gap)

    def bottom(self, rank: int) -> float:
        return self.top(rank) + self.height

    def between(self) -> float:
        """Return the middle of the space between the lanes of ranks 0 and 1."""
        return self.bottom(0) + self.gap / 2


class Movie:
    """A picture of `SECONDS` seconds. What is drawn later lies on top.

    height, width   in pixels
    description     for readers who can't see it; "" if the captions of its stills, one after the other, say all of it
    """

    def __init__(self, height: float, title: str, description: str = "", width: float = WIDTH) -> None:
        self.height, self.title, self.description, self.width = height, title, description, width
        self.pieces: list[Piece] = []
        self.stills: list[Frame] = []

    def draw(self, *bodies: str) -> list[Piece]:
        """Draw things that are always there."""
        return [self.piece(body).fade(0, 1) for body in bodies]

    def piece(self, body: str, x: float = 0, y: float = 0) -> Piece:
        """Add a piece, drawn around (0, 0) and placed at (x, y)."""
        made = Piece(body, x, y)
        self.pieces.append(made)
        return made

    def travel(
        self, body: str, y: float, x: float, shown: float, to: float = 0, arrives: float = 0, until: float = 0
    ) -> Piece:
        """Add a piece that appears at the time `shown` at x, moves to `to`, arrives at a time, and vanishes at another.

        Without `arrives` it stays where it is, and without `until` it doesn't vanish.
        """
        made = self.piece(body, x, y).show(shown)
        if arrives:
            made.move(round(shown + 0.1, 2), arrives, to)
        return made.hide(until) if until else made

    def captions(self, x: float, y: float, texts: Sequence[tuple[float, str]], **style) -> None:
        """Show one text after the other at the same place, each from its time on. The last one stays."""
        for (start, said), (end, _) in zip(texts, [*texts[1:], (0.0, "")], strict=True):
            shown = self.piece(text(0, 0, said, **style), x, y).fade(start, 1, 0.1)
            if end:
                shown.fade(end, 0, 0.1)

    def frame(self, time: float, caption: str, top: float = 0, height: float | None = None) -> None:
        """Make a still of this moment, cut out from `top` downward, to the end of the picture if no height is given."""
        self.stills.append(Frame(time, caption, top, self.height - top if height is None else height))

    def svg(self) -> str:
        """Return the moving picture."""
        late = [time for piece in self.pieces for time in piece.times() if time > SECONDS]
        if late:
            raise ValueError(f"a piece still changes at {max(late)} s, after the end")
        defined, bodies = _shared([piece.body for piece in self.pieces])
        keyframes: dict[str, str] = {}
        drawn = []
        for piece, body in zip(self.pieces, bodies, strict=True):
            opacity, x, y = piece.at(SECONDS)
            if len(piece.times()) == 1:
                drawn.append(placed(body, x, y, opacity))
                continue
            steps = "".join(
                f"{digits(100 * time / SECONDS, 2)}%{{{_state(piece, time)}}}" for time in [*piece.times(), SECONDS]
            )
            name = keyframes.setdefault(steps, f"k{len(keyframes)}")
            end = f"animation-name:{name};{_state(piece, SECONDS)}"
            drawn.append(placed(f'<g class="m" style="{end}">{body}</g>', piece.x, piece.y, 1))
        style = (
            f".m{{animation-duration:{digits(SECONDS)}s;animation-iteration-count:{LOOPS};"
            "animation-fill-mode:forwards;animation-timing-function:ease-in-out}\n"
            "@media (prefers-reduced-motion:reduce){.m{animation:none}}\n"
            + "\n".join(f"@keyframes {name}{{{steps}}}" for steps, name in keyframes.items())
        )
        told = self.description or " ".join(frame.caption for frame in self.stills)
        return document(self.width, self.height, [f"<style>{style}</style>", defined, *drawn], self.title, told)

    def frames(self) -> str:
        """Return all stills in one picture, below one another, each with its number and caption."""
        heading, gap = 34, 16
        defined, bodies = _shared([piece.body for piece in self.pieces] * len(self.stills))
        body, y = [defined], 0.0
        for number, frame in enumerate(self.stills, 1):
            body.append(text(12, y + 23, f"{number}.  {frame.caption}", bold=True))
            y += heading
            shown = []
            for piece, content in zip(self.pieces, bodies, strict=False):
                opacity, x, top = piece.at(frame.time)
                if opacity > 0.01:
                    shown.append(placed(content, x, top, opacity))
            box = f'y="{digits(y)}" width="{digits(self.width)}" height="{digits(frame.height)}"'
            view = f'viewBox="0 {digits(frame.top)} {digits(self.width)} {digits(frame.height)}"'
            body.append(f"<svg {box} {view}>{''.join(shown)}</svg>")
            y += frame.height + gap
            if number < len(self.stills):
                body.append(line(0, y - gap / 2, self.width, y - gap / 2, "#DDDDDD", 1))
        told = " ".join(f"{number}. {frame.caption}" for number, frame in enumerate(self.stills, 1))
        return document(self.width, y, body, f"{self.title}: {len(self.stills)} stills", told)

    def lane(self, rank: int, lanes: Lanes, label: tuple[float, float] = (16, 18), strength: float = 0.12) -> None:
        """Draw the stripe of a rank across the picture, and its name, `label` to the right of and below its corner."""
        top = lanes.top(rank)
        self.draw(box(6, top, self.width - 12, lanes.height, rank_tint(rank, strength), stroke=0))
        self.draw(box(6, top, 5, lanes.height, rank_color(rank), stroke=0, radius=0))
        self.draw(text(label[0], top + label[1], f"rank {rank}", size=SMALL, bold=True))

    def message(
        self, bar: tuple[float, float, float, float], middle: float, color: str, at: float,
        near: float = -26, far: float = 26, stroke: float = 3, head: float = 8,
    ) -> Piece:  # fmt: skip
        """Light up a bar (x, y, width, height) while ranks exchange something, with an arrow to each of two lanes.

        near, far   where an arrow starts and ends, as distances from `middle`; a negative `near` is in the other lane
        """
        x = bar[0] + bar[2] / 2
        arrows = [arrow(x, middle + s * near, x, middle + s * far, color, stroke, head) for s in (-1, 1)]
        return self.piece(box(*bar, "none", color, 3) + "".join(arrows)).show(at)

    def tell(self, told: Sequence[tuple[float, float | None, str]], y: float, top: float, x: float = 10) -> None:
        """Show captions (start, still, text), each from its start on, and make stills from `top` downward.

        A caption whose still isn't None gets a still at that time.
        """
        self.captions(x, y, [(start, said) for start, _, said in told], bold=True)
        for _, still, said in told:
            if still is not None:
                self.frame(still, said, top=top)

    def count_messages(self, times: Sequence[float]) -> None:
        """Count messages in the upper right corner, from the first time on. Each later time is that of a message."""
        counted = [(time, f"messages: {count}") for count, time in enumerate(times)]
        self.captions(self.width - 10, 22, counted, anchor="end", bold=True)

    def write(self, name: str) -> None:
        """Write the picture, and its stills if it has any, to pictures/moving/."""
        stills = {f"{name}_frames": self.frames()} if self.stills else {}
        for stem, content in ({name: self.svg()} | stills).items():
            (FOLDER / f"{stem}.svg").write_text(content, encoding="utf-8")
            print(f"wrote pictures/moving/{stem}.svg ({len(content.encode()) / 1000:.0f} kB)")


def _between(keys: list[tuple[float, tuple[float, ...]]], time: float) -> tuple[float, ...]:
    """Interpolate between keys, which are in the order of their times."""
    before = [key for key in keys if key[0] <= time]
    start, old = before[-1]
    after = [key for key in keys if key[0] > time]
    if not after:
        return old
    end, new = after[0]
    share = (time - start) / (end - start)
    return tuple(a + share * (b - a) for a, b in zip(old, new, strict=True))


def _shared(bodies: list[str]) -> tuple[str, list[str]]:
    """Define each long body that is drawn several times, and return the definitions, and all bodies that use them."""
    often = [body for body, times in Counter(bodies).items() if times > 1 and len(body) > 60]
    names = {body: f"d{index}" for index, body in enumerate(often)}
    defined = "".join(f'<g id="{name}">{body}</g>' for body, name in names.items())
    used = [f'<use href="#{names[body]}"/>' if body in names else body for body in bodies]
    return f"<defs>{defined}</defs>", used


def _state(piece: Piece, time: float) -> str:
    """Return a piece's state at a time as CSS. Pieces that move alike share their keyframes."""
    opacity, x, y = piece.at(time)
    moved = f"transform:translate({digits(x - piece.x)}px,{digits(y - piece.y)}px)" if len(piece.places) > 1 else ""
    changes = f"opacity:{digits(opacity, 2)};" if len(piece.opacities) > 1 or piece.opacities[0][1] != 1 else ""
    return (changes + moved).rstrip(";")
