"""Convert the chapters' formulas to plain text for terminals, so that $r \\cdot n/p$ becomes r · n/p.

This module supports only the TeX macros that appear in the hints. One of the tests converts every hint, so it fails
if a hint uses a macro that isn't supported yet.
"""

import re

_MATH = re.compile(r"(\$\$?)(?=\S)([^`$]+?)(?<=\S)\1")
_MACROS = {
    "alpha": "α", "beta": "β", "gamma": "γ", "cdot": "·", "times": "×", "approx": "≈", "le": "≤", "ge": "≥",
    "ldots": "...", "log": "log", "exp": "exp", "max": "max", "sum": "∑", "lceil": "⌈", "rceil": "⌉", "lfloor": "⌊",
    "rfloor": "⌋", "quad": " ", "to": "→", "partial": "∂",
}  # fmt: skip
_LOW = dict(zip("0123456789aeijmnprtx", "₀₁₂₃₄₅₆₇₈₉ₐₑᵢⱼₘₙₚᵣₜₓ", strict=True))
_HIGH = dict(zip("0123456789nijpT+-", "⁰¹²³⁴⁵⁶⁷⁸⁹ⁿⁱʲᵖᵀ⁺⁻", strict=True))
_BAR = "\N{COMBINING MACRON}"


def plain(text: str) -> str:
    """Convert the formulas in a Markdown text to plain text. Raises ValueError for TeX that isn't supported yet."""
    return _MATH.sub(lambda found: _plain(found[2]), text)


def _plain(formula: str) -> str:
    formula = re.sub(r"\\[,;:]", " ", formula)
    formula = re.sub(r"\\mathrm\{(\w+)\}", r"\1", formula)
    formula = re.sub(r"\\bar\s*\{?(\w)\}?", rf"\1{_BAR}", formula)
    formula = re.sub(r"\\([A-Za-z]+)(\s*)", _macro, formula)
    formula = re.sub(r"_(?:\{([^}]*)\}|(\w))", lambda found: _small(found[1] or found[2], _LOW, "_"), formula)
    formula = re.sub(r"\^(?:\{([^}]*)\}|(\w))", lambda found: _small(found[1] or found[2], _HIGH, "^"), formula)
    if left := re.search(r"[\\{}]", formula):
        raise ValueError(f"{left[0]!r} in the formula {formula!r} has no plain form yet: see {__name__}")
    return re.sub(r"  +", " ", formula)


def _macro(found: re.Match[str]) -> str:
    if found[1] not in _MACROS:
        raise ValueError(f"\\{found[1]} has no plain form yet: see {__name__}")
    name = _MACROS[found[1]]
    # Letters and operators keep the space that follows them. After other macros, such as \lceil, TeX ignores the space.
    return name + found[2] * (name.isalpha() or name in "·×≈≤≥→")


def _small(text: str, letters: dict[str, str], mark: str) -> str:
    """Convert a subscript or superscript to the corresponding small Unicode characters, such as ₀ or ⁿ.

    If a character has no such form, return `mark` followed by the characters themselves, as in "_q".
    """
    if all(letter in letters for letter in text):
        return "".join(letters[letter] for letter in text)
    return f"{mark}{text}" if len(text) == 1 else f"{mark}({text})"
