"""The moving pictures: drawn from real runs, equal to the committed files, and within the rules that make them work."""

import importlib
import itertools
import re
from xml.etree import ElementTree

import pytest

from pictures.moving.animation import FOLDER, LOOPS, MOST_SECONDS, Movie, text
from tests import ROOT

NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "animation")
FILES = sorted(path.name for path in FOLDER.glob("*.svg"))
MOVING = [name for name in FILES if not name.endswith("_frames.svg")]
SVG = "{http://www.w3.org/2000/svg}"


def content(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def test_every_generator_has_a_picture_and_its_stills() -> None:
    assert NAMES == ["attention", "fg", "joined", "layers", "ring"]
    assert sorted(f"{name}{kind}.svg" for name in NAMES for kind in ("", "_frames")) == FILES


@pytest.mark.parametrize("name", NAMES)
def test_a_committed_picture_is_what_its_generator_draws(name: str) -> None:
    generator = importlib.import_module(f"pictures.moving.{name}")
    movie = generator.movie()
    for path, drawn in movie.files(name).items():
        assert path.read_text(encoding="utf-8") == drawn, (
            f"run python -m pictures.moving.{name} and look at {path.name}"
        )
    assert movie.svg() == movie.svg()


@pytest.mark.parametrize("name", MOVING)
def test_it_runs_twice_for_at_most_12_seconds_and_stays_on_its_end(name: str) -> None:
    (style,) = re.findall(r"<style>(.*?)</style>", content(name), re.DOTALL)
    assert float(re.findall(r"animation-duration:([\d.]+)s", style)[0]) <= 12
    assert (MOST_SECONDS, LOOPS) == (12, 2)
    for rule in ("animation-iteration-count:2;", "animation-fill-mode:forwards;", "prefers-reduced-motion:reduce"):
        assert rule in style
    keyframes = dict(re.findall(r"@keyframes (\w+){(.*)}", style))
    assert keyframes
    for end, written in re.findall(r'animation-name:(\w+);([^"]*)"', content(name)):
        assert keyframes[end].endswith(f"100%{{{written}}}"), "a piece is written the way it ends"


@pytest.mark.parametrize("name", ["joined", "layers"])
def test_each_caption_of_the_layers_stays_long_enough_to_be_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[float] = []

    def captions(movie: Movie, x: float, y: float, texts: list[tuple[float, str]], **style: object) -> None:
        starts = [time for time, _ in texts] + [movie.seconds]
        shown.extend(after - before for before, after in itertools.pairwise(starts))

    monkeypatch.setattr(Movie, "captions", captions)
    importlib.import_module(f"pictures.moving.{name}").movie()
    assert len(shown) == 4
    assert min(shown) >= 2.5 - 1e-9


@pytest.mark.parametrize("name", FILES)
def test_it_is_small_and_needs_nothing_else(name: str) -> None:
    drawn = content(name)
    assert len(drawn.encode()) <= 40_000
    assert not re.search(r"<script|<foreignObject|<image|\bon\w+=|@import|javascript:|url\(", drawn)
    assert set(re.findall(r"https?://[^\"]*", drawn)) == {"http://www.w3.org/2000/svg"}
    targets = re.findall(r'href="([^"]*)"', drawn)
    assert {f'id="{target.removeprefix("#")}"' for target in targets} <= set(re.findall(r'id="\w+"', drawn))


@pytest.mark.parametrize("name", FILES)
def test_it_can_be_read_by_everybody(name: str) -> None:
    root = ElementTree.fromstring(content(name))
    assert root.get("role") == "img"
    assert len(root.get("aria-label", "")) > 100
    assert root.findtext(f"{SVG}title")
    paper = root.find(f"{SVG}rect")
    assert (paper.get("fill"), paper.get("width"), paper.get("height")) == (
        "#FFFFFF",
        root.get("width"),
        root.get("height"),
    )
    sizes = [float(size) for size in re.findall(r'font-size[=:]"?([\d.]+)', content(name))]
    assert min(sizes) >= 12
    assert not re.search(r"scale\(|matrix\(", content(name)), "text would be smaller than its font size says"
    for inner in root.iter(f"{SVG}svg"):
        assert inner.get("viewBox").split()[2:] == [inner.get("width"), inner.get("height")], "drawn as large as it is"


@pytest.mark.parametrize("name", MOVING)
def test_its_stills_are_numbered_and_tell_their_captions(name: str) -> None:
    root = ElementTree.fromstring(content(name.replace(".svg", "_frames.svg")))
    headings = [found.text for found in root.findall(f"{SVG}text")]
    assert [heading.split(".")[0] for heading in headings] == [str(number) for number in range(1, len(headings) + 1)]
    assert len(headings) == len(root.findall(f"{SVG}svg")) >= 8
    for heading in headings:
        assert re.sub(r"\s+", " ", heading) in root.get("aria-label")


def test_make_draws_every_picture() -> None:
    (recipe,) = re.findall(r"^picture:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [name for name in NAMES if f"-m pictures.moving.{name}\n" not in recipe] == []


def test_jupyterlab_and_the_book_start_pictures_in_the_same_way() -> None:
    look = ROOT / "tplab/course/tools/jupyter/labextensions/tplab-look/static/look.js"
    assert (ROOT / "docs/_static/replay.js").read_text() in look.read_text()
    assert '"replay.js"' in (ROOT / "docs/conf.py").read_text()


# The helpers


def test_stills_and_keyframes_agree_on_where_a_piece_is() -> None:
    movie = Movie(100, 10, "title", "description")
    piece = movie.piece("<g/>", 10, 20).show(1).move(2, 4, 110, 60).hide(8)
    assert piece.at(0) == (0, 10, 20)
    assert piece.at(3) == (1, 60, 40)
    assert piece.at(10) == (0, 110, 60)
    assert "40%{opacity:1;transform:translate(100px,40px)}" in movie.svg()
    movie.frame(3, "In the middle")
    assert '<g transform="translate(60,40)"><g/></g>' in movie.frames()


def test_pieces_that_move_alike_share_their_keyframes() -> None:
    movie = Movie(100, 10, "title", "description")
    for y in (20, 70):
        movie.piece(text(0, 0, f"at {y}"), 10, y).show(1).move(2, 3, 50)
    assert movie.svg().count("@keyframes") == 1


def test_a_movie_that_is_too_long_or_goes_on_after_its_end_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than 12 s"):
        Movie(100, 13, "title", "description")
    movie = Movie(100, 10, "title", "description")
    movie.piece("<g/>").show(9.9)
    with pytest.raises(ValueError, match=r"still changes at 10\.15 s"):
        movie.svg()
