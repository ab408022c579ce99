"""Functions that format numbers and lists as text."""

import math
from collections.abc import Sequence

from tplab.capstone.settings.settings import Settings
from tplab.course.feedback.verdict import names


def small(value: float) -> str:
    """Format a number with two significant digits, such as "0", "3.4e-07" or "0.012"."""
    return "0" if value == 0 else f"{value:.2g}"


def kind(settings: Settings) -> str:
    """Return the name of the model family, "Llama" or "GPT"."""
    return "Llama" if settings.gated and not settings.bias and not settings.learned_positions else "GPT"


def layout(settings: Settings) -> str:
    """Return the grid's sizes as text, such as "tp = 2, dp = 1", including pp and the ZeRO stage if they're used."""
    sizes = ["tp", *(["pp"] if settings.pp > 1 else []), "dp", *(["zero"] if settings.zero else [])]
    return ", ".join(f"{size} = {getattr(settings, size)}" for size in sizes)


def visible(text: str) -> str:
    """Replace control characters, which a model may generate, with visible symbols (␀ ␁ ␂)."""
    return "".join(chr(0x2400 + ord(c)) if c < " " and c not in "\n\t" else "␡" if c == "\x7f" else c for c in text)


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest absolute difference between values at the same position."""
    return max((abs(a - b) for a, b in zip(one, other, strict=False)), default=math.nan)


def chapters(numbers: Sequence[int]) -> str:
    """Return chapter numbers as text, such as "chapter 4" or "chapters 3, 4 and 5"."""
    return f"chapter{'s' * (len(numbers) > 1)} {names(numbers)}"
