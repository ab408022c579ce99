"""Chapter 15: a poster of the model that was trained, and a card to show around.

Both are made of what a run has measured, of what the model has written, and of the learner's library.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from tplab.capstone.naive import newest_folder
from tplab.capstone.own_run import checkpoints_of, messages_of, sample_of
from tplab.capstone.settings.settings import Settings
from tplab.common import units
from tplab.common.files import replace
from tplab.course.learn.course_files import own_course
from tplab.course.learn.library import modules
from tplab.course.learn.my_tp import BLOCKS
from tplab.course.notebooks.numbering import chapter_of
from tplab.memory.config import parameter_count
from tplab.runtime import launch
from tplab.viz import Block, Picture
from tplab.viz import poster as draw

CARD = "card.svg"
_WIDE, _HIGH, _MARGIN = 720, 430, 28  # of the card, in pixels
_COLORS, _DASHES = ("#9CC3E6", "#F2A900", "#0B3C5D"), ("", "9 6", "2 5")  # of its curves, from the back to the front
_LINES, _LETTERS = 6, 44  # of the sample on the card
_FONT = "font-family='DejaVu Sans, Helvetica, Arial, sans-serif'"


def poster(settings: Settings, answers: Any) -> Picture:
    """Draw the model, who wrote each of its blocks, and the all-reduces of one micro-batch on real ranks."""
    sent = launch(messages_of, settings.ranks, args=(settings, answers))[0]

    def block(name: str, part: str = "") -> Block:
        exercise, part = BLOCKS[name], part or name
        passed = answers.checked[exercise].removeprefix("passed on ").partition(" ")[0]
        who = f"passed on {passed}" if answers.checked[exercise].startswith("passed") else "the course's solution"
        forward, backward = (_in_words(sent.get(f"{part} {way}", [])) for way in ("forward", "backward"))
        return Block(name, True, f"chapter {chapter_of(exercise)}, {who}", forward, backward)

    norm, residual = Block("norm"), Block("+ residual")
    layer = [norm, block("attention"), residual, norm, block("MLP"), residual]
    first, loss = [block("embedding"), Block("+ positions")], block("loss")
    logits = block("logits", "loss")._replace(forward="")
    blocks = [*first, *layer, norm, logits, loss._replace(backward=_in_words(sent.get("backward", [])))]
    return draw(
        blocks, ranks=settings.tp, layer=slice(len(first), len(first) + len(layer)), times=settings.num_layers,
        title=f"{parameter_count(settings.model):,} parameters on {units.count(settings.ranks, 'rank')}",
    )  # fmt: skip


def _in_words(sizes: Sequence[int]) -> str:
    """Return "3 × 2.05 kB" or "131 kB", or "" if nothing is sent."""
    if len(set(sizes)) > 1:
        return f"{len(sizes)} × up to {units.size(max(sizes))}"
    return f"{len(sizes)} × " * (len(sizes) > 1) + units.size(sizes[0]) if sizes else ""


@dataclass(frozen=True)
class Card:
    """A picture to show around. A notebook displays it."""

    svg: str
    alt: str

    def __repr__(self) -> str:
        return self.alt

    def _repr_svg_(self) -> str:
        return self.svg


def card(losses: Mapping[str, Sequence[float]], settings: Settings, answers: Any) -> Card:
    """Return a card with these curves, a sample of the model's text, and how much of the code is the learner's.

    losses   name -> the losses of a run. They should all look like a single line
    settings the run whose newest checkpoint writes the sample
    It's also written to card.svg in the learner's folder, if there is one.
    """
    newest = newest_folder(checkpoints_of(settings))
    text = launch(sample_of, settings.ranks, args=(settings, answers, newest))[0]
    course = own_course(Path.cwd())
    found = modules(course) if course else []
    lines, exercises = sum(module.lines for module in found), sum(len(module.answers) for module in found)
    mine = f"{lines:,} lines of my own, from {exercises} exercises" if lines else "with the course's solutions"
    alt = (
        f"A card. I trained a GPT with my own tensor parallelism, {mine}. "
        f"The loss curves of {', '.join(losses)} lie on each other."
    )
    made = Card(_svg(losses, text, mine, alt, parameter_count(settings.model)), alt)
    if course:
        replace(course.folder / CARD, made.svg.encode())
    return made


def _svg(losses: Mapping[str, Sequence[float]], text: str, mine: str, alt: str, parameters: int) -> str:
    last = list(losses.values())[-1]
    drawn = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDE} {_HIGH}' width='{_WIDE}' height='{_HIGH}' "
        f"role='img' aria-label='{escape(alt, quote=True)}'>",
        f"<title>{escape(alt)}</title>",
        f"<rect width='{_WIDE}' height='{_HIGH}' rx='18' fill='#FBFAF6' stroke='#D9D5C8'/>",
        _text(_MARGIN, 50, "I trained a GPT with my own tensor parallelism", 24, "#0B3C5D", bold=True),
        _text(_MARGIN, 78, f"{parameters:,} parameters, {mine}", 14),
        _curves(losses, _MARGIN + 34, 108, 330, 216),
        _text(_MARGIN + 34, 356, f"loss {last[0]:.2f} → {last[-1]:.2f} in {len(last)} steps", 12, "#555"),
        _text(432, 116, "after these steps, it writes", 12, "#555"),
    ]
    for number, line in enumerate(_sample(text)):
        drawn.append(
            f"<text x='432' y='{144 + 21 * number}' font-size='10.5' xml:space='preserve' fill='#222' "
            f"font-family='DejaVu Sans Mono, Menlo, Consolas, monospace'>{escape(line)}</text>"
        )
    drawn += [
        _legend(losses, 432, 300),
        f"<rect x='{_MARGIN}' y='378' width='{_WIDE - 2 * _MARGIN}' height='32' rx='6' fill='#0B3C5D'/>",
        f"<text x='{_MARGIN + 14}' y='399' font-size='14' fill='#FBFAF6' "
        "font-family='DejaVu Sans Mono, Menlo, Consolas, monospace'>"
        "torchrun --standalone --nproc-per-node 2 train.py</text>",
        "</svg>",
    ]
    return "\n".join(drawn)


def _text(x: float, y: float, said: str, size: float, color: str = "#222", bold: bool = False) -> str:
    weight = " font-weight='bold'" * bold
    return f"<text x='{x}' y='{y}' font-size='{size}' fill='{color}' {_FONT}{weight}>{escape(said)}</text>"


def _curves(losses: Mapping[str, Sequence[float]], x: float, y: float, width: float, height: float) -> str:
    values = [value for run in losses.values() for value in run]
    low, high = min(values), max(values)
    drawn = f"<path d='M{x},{y} V{y + height} H{x + width}' stroke='#888' fill='none'/>"
    for value, at in ((high, y), (low, y + height)):
        drawn += (
            f"<text x='{x - 6}' y='{at + 4}' font-size='11' text-anchor='end' fill='#555' {_FONT}>{value:.1f}</text>"
        )
    for number, run in enumerate(losses.values()):
        points = " ".join(
            f"{x + width * step / max(1, len(run) - 1):.1f},{y + height * (high - loss) / (high - low or 1):.1f}"
            for step, loss in enumerate(run)
        )
        drawn += f"<polyline points='{points}' {_stroke(number)}/>"
    return drawn


def _stroke(number: int) -> str:
    color, dash = _COLORS[number % len(_COLORS)], _DASHES[number % len(_DASHES)]
    return f"fill='none' stroke='{color}' stroke-width='{max(1.8, 7 - 2.6 * number)}' stroke-dasharray='{dash}'"


def _legend(losses: Mapping[str, Sequence[float]], x: float, y: float) -> str:
    drawn = ""
    for number, name in enumerate(losses):
        at = y + 20 * number
        drawn += f"<path d='M{x},{at} h34' {_stroke(number)}/>" + _text(x + 44, at + 4, name, 12)
    return drawn + _text(x, y + 20 * len(losses) + 4, "One line, so it doesn't matter how it's split.", 11, "#555")


def _sample(text: str) -> list[str]:
    """Return the first lines of a text, without unprintable characters."""
    lines = [re.sub(r"[^ -~]", "·", line.expandtabs(4)).rstrip()[:_LETTERS] for line in text.splitlines()]
    return [line for line in lines if line][:_LINES]
