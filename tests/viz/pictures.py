"""What the tests of pictures ask of each of them, and how they read one."""

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from tplab import viz


def texts(picture: viz.Picture) -> list[str]:
    return [text.get_text() for axes in picture.axes for text in axes.texts]


def fills(picture: viz.Picture) -> list[tuple[float, ...]]:
    """The fill colours of the drawn rectangles, in order."""
    shown = [patch.get_facecolor() for axes in picture.axes for patch in axes.patches]
    return [color[:3] for color in shown if color[3]]


def boxes(picture: viz.Picture, color: tuple[float, ...] | None = None) -> list[Bbox]:
    """The rectangles that are filled, with this colour if there is one."""
    drawn = [patch for axes in picture.axes for patch in axes.patches if isinstance(patch, Rectangle)]
    filled = [patch for patch in drawn if patch.get_facecolor()[3]]
    return [patch.get_bbox() for patch in filled if color in (None, patch.get_facecolor()[:3])]


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
