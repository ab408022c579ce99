"""Numbers with their units, as one says them."""

import math
from collections.abc import Sequence


def seconds(value: float) -> str:
    """ "312 ms", "1.24 s", "5 min 12 s"."""
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 100:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def size(value: float) -> str:
    """ "312 MB", in powers of ten."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}" if value < 1000 * factor else f"{value / factor:,.0f} {unit}"
    return f"{value:,.0f} bytes"


def work(flops: float) -> str:
    """ "84.1 GFLOP"."""
    for unit, factor in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if flops >= factor:
            return f"{flops / factor:.3g} {unit}" if flops < 1000 * factor else f"{flops / factor:,.0f} {unit}"
    return f"{flops / 1e6:.3g} MFLOP"


def rate(flops: float) -> str:
    """ "84.1 GFLOP/s"."""
    return f"{work(flops)}/s"


def millions(count: int) -> str:
    """ "42,900", "2.41 million", "1.3 billion"."""
    if count < 1e6:
        return f"{count:,}"
    return f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"


def small(value: float) -> str:
    """ "0", "3.4e-07", "0.012"."""
    return "0" if value == 0 else f"{value:.2g}"


def listed(words: Sequence[str]) -> str:
    """ "a, b and c"."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def visible(text: str) -> str:
    """Text as a page can show it: control characters, which a model may write too, as their pictures (␀ ␁ ␂)."""
    return "".join(chr(0x2400 + ord(c)) if c < " " and c not in "\n\t" else "␡" if c == "\x7f" else c for c in text)


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference at the same place."""
    return max((abs(a - b) for a, b in zip(one, other, strict=False)), default=math.nan)
