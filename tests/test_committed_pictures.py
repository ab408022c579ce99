"""The committed SVGs: each one has its generator, is complete and small, and can be read by everybody."""

import re
from xml.etree import ElementTree

import pytest

from pictures.moving.__main__ import MOVIES
from pictures.moving.animation import FOLDER
from tests import ROOT

MOVING = sorted(FOLDER.glob("*.svg"))
WITHOUT_STILLS = {"joined", "network", "poster"}  # layers.svg has most stills of the first; the others are still


def test_every_picture_has_its_generator_and_every_generator_its_files() -> None:
    names = {path.stem for path in MOVING}
    assert names == {*MOVIES, *(f"{name}_frames" for name in MOVIES if name not in WITHOUT_STILLS)}


@pytest.mark.parametrize("path", MOVING, ids=lambda path: path.name)
def test_a_picture_needs_nothing_else_and_has_a_description(path) -> None:
    drawn = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(drawn)
    assert len(drawn.encode()) <= 40_000
    assert not re.search(r"<script|<foreignObject|<image|\bon\w+=|@import|javascript:|url\(", drawn)
    assert (root.get("role"), len(root.get("aria-label", "")) > 100) == ("img", True)
    assert path.stem.endswith("_frames") or "prefers-reduced-motion:reduce" in drawn


def test_jupyterlab_and_the_book_start_pictures_in_the_same_way() -> None:
    look = ROOT / "tplab/course/commands/jupyter/labextensions/tplab-look/static/look.js"
    assert (ROOT / "docs/_static/replay.js").read_text() in look.read_text()
