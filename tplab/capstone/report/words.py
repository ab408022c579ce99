"""Functions that format numbers and lists as text."""

import math
from collections.abc import Sequence


def small(value: float) -> str:
    """Format a number with two significant digits, such as "0", "3.4e-07" or "0.012"."""
    return "0" if value == 0 else f"{value:.2g}"


def listed(words: Sequence[str]) -> str:
    """Join words into a list such as "a, b and c"."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def visible(text: str) -> str:
    """Replace control characters, which a model may generate, by visible symbols (␀ ␁ ␂)."""
    return "".join(chr(0x2400 + ord(c)) if c < " " and c not in "\n\t" else "␡" if c == "\x7f" else c for c in text)


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest absolute difference between values at the same position."""
    return max((abs(a - b) for a, b in zip(one, other, strict=False)), default=math.nan)
