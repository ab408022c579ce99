"""Formulas in the hints, as a terminal shows them."""

import re

import pytest

from tests import ROOT
from tplab.course.feedback.hints import hints_of
from tplab.course.feedback.plain_math import plain
from tplab.course.notebooks.cells import read_notebook
from tplab.course.notebooks.numbering import chapter_files

HINTS = [
    (exercise, place, text)
    for path in chapter_files(ROOT / "solutions", ".ipynb")
    for exercise, hints in hints_of(read_notebook(path)).items()
    for place, text in enumerate(hints, 1)
]


@pytest.mark.parametrize(
    ("formula", "shown"),
    [
        (r"$\alpha + \beta n_i \approx t_i$", "α + β nᵢ ≈ tᵢ"),
        (r"$r \cdot n/p$", "r · n/p"),
        (r"$\lceil\log_2 p\rceil$", "⌈log₂ p⌉"),
        ("$24bsh^2 + 4bs^2h$", "24bsh² + 4bs²h"),
        (r"$\bar z$", "z\N{COMBINING MACRON}"),
        ("$x_q + x^{-1} + x^{ab}$", "x_q + x⁻¹ + x^(ab)"),
        (r"$\alpha\,n \,/\, 2$", "α n / 2"),
        (r"$\mathrm{GeLU}(x)$", "GeLU(x)"),
        ("costs $5 or `$HOME` and $x$", "costs $5 or `$HOME` and x"),
    ],
)
def test_a_formula_becomes_text(formula, shown):
    assert plain(formula) == shown


@pytest.mark.parametrize("formula", [r"$\unheardof x$", r"$x_{a_{b}}$"])
def test_what_has_no_plain_form_yet_is_refused(formula):
    with pytest.raises(ValueError, match="has no plain form yet"):
        plain(formula)


def test_no_hint_shows_tex_in_a_terminal():
    left = [
        (exercise, place)
        for exercise, place, text in HINTS
        if re.search(r"\$\S[^`$]*\$|\\[a-z]+ ", _prose(plain(text)))
    ]
    assert len(HINTS) >= 200
    assert left == []
    assert any(plain(text) != text for _, _, text in HINTS)


def _prose(text: str) -> str:
    return re.sub(r"`[^`]*`", "", text)
