"""Functions that put numbers and lists into words."""

import math
from collections.abc import Sequence


def small(value: float) -> str:
    """A number with two significant digits: "0", "3.4e-07", "0.012"."""
    return "0" if value == 0 else f"{value:.2g}"


def listed(words: Sequence[str]) -> str:
    """A list in words: "a, b and c"."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def visible(text: str) -> str:
    """Text for a page, with control characters, which a model may write, replaced by visible symbols (␀ ␁ ␂)."""
    return "".join(chr(0x2400 + ord(c)) if c < " " and c not in "\n\t" else "␡" if c == "\x7f" else c for c in text)


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest absolute difference between values at the same position."""
    return max((abs(a - b) for a, b in zip(one, other, strict=False)), default=math.nan)
