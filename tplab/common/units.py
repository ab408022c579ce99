"""Format numbers with units for pictures, tables and messages, in one unit system for the entire course.

size(98_304)        "98.3 kB"        powers of ten, as memory and links are sold
duration(0.312)     "312 ms"
work(8.41e10)       "84.1 GFLOP"
"""

BYTES = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}
_FLOPS = {"PFLOP": 1e15, "TFLOP": 1e12, "GFLOP": 1e9, "MFLOP": 1e6}


def byte_unit(size: float) -> tuple[str, float]:
    """Return the largest unit in which `size` bytes are at least 1, and its factor: ("MB", 1e6). For axis labels."""
    return next((found for found in BYTES.items() if size >= found[1]), ("B", 1.0))


def size(count: float, unit: str = "") -> str:
    """Format bytes with a unit: "384 B", "98.3 kB", "80 GB". If `unit` is empty, choose the best unit."""
    name, factor = (unit, BYTES[unit]) if unit else byte_unit(count)
    return f"{_three_digits(count / factor)} {name}"


def duration(seconds: float) -> str:
    """Format seconds with a unit: "3.4 µs", "312 ms", "1.24 s", "5 min 12 s", "3 h 20 min"."""
    if seconds >= 59.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
    for name, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{_three_digits(seconds / factor)} {name}"
    return f"{_three_digits(seconds / 1e-6)} µs" if seconds else "0 s"


def work(flops: float) -> str:
    """Format a number of floating-point operations: "84.1 GFLOP"."""
    name, factor = next((found for found in _FLOPS.items() if flops >= found[1]), ("MFLOP", 1e6))
    return f"{_three_digits(flops / factor)} {name}"


def rate(flops: float) -> str:
    """Format floating-point operations per second: "84.1 GFLOP/s"."""
    return f"{work(flops)}/s"


def count(number: int, thing: str) -> str:
    """Format a count with its noun: "1 GPU", "2 GPUs"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def large(number: int) -> str:
    """Format a large number: "42,900", "2.41 million", "1.3 billion"."""
    if number < 1e6:
        return f"{number:,}"
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"


def _three_digits(value: float) -> str:
    """Format a number with three significant digits, or all digits before the point: "1.24", "98.3", "2,800"."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
