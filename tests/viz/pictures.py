"""What the tests of pictures ask of each of them, and how they read one."""

import itertools

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from tplab import viz


def texts(picture: viz.Picture) -> list[str]:
    picture.png()
    return [text.get_text() for axes in picture.axes for text in axes.texts]


def fills(picture: viz.Picture) -> list[tuple[float, ...]]:
    """The fill colours of the drawn rectangles, in order."""
    shown = [patch.get_facecolor() for axes in picture.axes for patch in axes.patches]
    return [color[:3] for color in shown if color[3]]


def places(picture: viz.Picture) -> dict[str, list[tuple[float, float]]]:
    """Where every text stands: {text: [(x, y), ...]}, in the order in which they were drawn."""
    found: dict[str, list[tuple[float, float]]] = {}
    for text in (text for axes in picture.axes for text in axes.texts):
        found.setdefault(text.get_text(), []).append(text.get_position())
    return found


def text_boxes(picture: viz.Picture) -> list[tuple[str, Bbox]]:
    """Every text with the rectangle that it covers, in pixels, without the line that may lead to it."""
    canvas = FigureCanvasAgg(picture)
    canvas.draw()
    found = [text for axes in picture.axes for text in axes.texts if text.get_text()]
    return [(text.get_text(), Text.get_window_extent(text, canvas.get_renderer())) for text in found]


def assert_texts_inside(picture: viz.Picture) -> None:
    frame, boxes = picture.bbox, text_boxes(picture)
    outside = [text for text, box in boxes if box.x0 < frame.x0 - 1 or box.x1 > frame.x1 + 1]
    outside += [text for text, box in boxes if box.y0 < frame.y0 - 1 or box.y1 > frame.y1 + 1]
    assert outside == []


def assert_texts_apart(picture: viz.Picture) -> None:
    pairs = itertools.combinations(text_boxes(picture), 2)
    assert [(one, other) for (one, a), (other, b) in pairs if a.overlaps(b)] == []
