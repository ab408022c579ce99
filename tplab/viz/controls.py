"""Controls below a cell: one for each argument of a function, and a Play button for its steps.

Numbers get a slider and Booleans a check box. Other values get buttons, or a drop-down list if there are too many.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from tplab.viz.colors import Picture

# While a new picture is being drawn, the old one is pale. The box is hidden until JupyterLab marks the controls as
# disconnected or, in a reopened notebook, doesn't find them at all. On a page without JupyterLab's commands, the button
# does nothing, so the text says what to do without it.
_LOST = """\
<style>
.tplab-explore.jupyter-widgets-disconnected::before,
.tplab-explore .jupyter-widgets-disconnected::before { content: none; }
.tplab-explore.jupyter-widgets-disconnected
> :is(.widget-slider, .widget-play, .widget-toggle-buttons, .widget-dropdown, .widget-checkbox)
{ opacity: 0.45; pointer-events: none; }
.tplab-explore > .widget-toggle-buttons > .widget-label { text-align: right; }
.tplab-drawing { opacity: 0.4; transition: opacity 0.1s 0.2s; }
.jp-OutputArea:has(.tplab-lost) .jp-OutputArea-output.jupyter-widgets { display: none; }
.jp-OutputArea:has(.tplab-explore.jupyter-widgets-disconnected) .tplab-lost,
.jp-OutputArea:has(.jp-OutputArea-output.jupyter-widgets) .tplab-lost { display: block !important; }
</style>
<div class="tplab-lost" role="status" style="display: none; border-left: 6px solid #b26a00; padding: 0.4em 0.9em;">
<b>The controls of this cell lost their kernel</b>: it was restarted or shut down. To get them back, run the cells
above, then this one.<br><button class="jp-Button jp-mod-styled jp-mod-accept" style="margin-top: 0.4em"
data-commandlinker-command="apputils:run-all-enabled"
data-commandlinker-args='{"commands": ["notebook:run-all-above", "notebook:run-cell"]}'>Run these cells</button>
</div>"""
_LABELS = {"description_width": "7em"}
_MOST_BUTTONS, _LONGEST_BUTTON = 6, 20
_STEP = "step"


class Frames:
    """The pictures of a run, in order, for `play`. draw(i) draws the i-th picture when it's needed."""

    def __init__(self, count: int, draw: Callable[[int], Picture]) -> None:
        self._count, self._draw = count, draw

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Picture:
        return self._draw(range(self._count)[index])


def explore(function: Callable[..., Any], *, start: Mapping[str, Any] | None = None, **choices: Sequence[Any]) -> Any:
    """Show a control for each argument of the function and, below them, the result for the selected values.

        viz.explore(draw, p=(1, 2, 4), kind=["column", "row"], start={"p": 2})

    The controls start at the values in `start`, or else at the first value of each argument. The function is called
    once for each selection. Outside a notebook, there are no controls, and `explore` returns the function's result for
    the first values. Raises ValueError for a start value that isn't one of the argument's values.
    """
    first = _first(choices, start or {})
    if not _in_notebook():
        return function(**first)
    arguments, cached = _widgets(choices, first), cache(function)
    picture = _Output(lambda: cached(**_values(arguments)))
    for widget in arguments.values():
        widget.observe(picture.update, "value")
    return picture.below(*arguments.values())


def play(
    function: Callable[..., Frames], *, start: Mapping[str, Any] | None = None, seconds: float = 1.0,
    **choices: Sequence[Any],
) -> Any:  # fmt: skip
    """Show the pictures in the sequence function(**values) one at a time, with a Play button that goes through them.

        viz.play(record_a_run, p=(2, 4), start={"p": 4, "step": 3})

    There's one control per argument, as in `explore`. Below them, a slider selects the step, which is the index of the
    picture in the sequence. The first sequence starts at the step in `start`, or else at 0. When an argument changes,
    the new sequence starts at step 0. The function is called once for each choice of arguments. The Play button shows a
    new picture every `seconds`. Outside a notebook, `play` returns the picture at the starting step. Raises ValueError
    in the same cases as `explore`, and also if the first sequence is too short for the starting step.
    """
    given = dict(start or {})
    step = given.pop(_STEP, 0)
    first = _first(choices, given)
    cached = cache(function)
    pictures = cached(**first)
    if not 0 <= step < len(pictures):
        raise ValueError(f"start=step={step!r} is none of the {len(pictures)} steps, which are counted from 0")
    if not _in_notebook():
        return pictures[step]
    import ipywidgets

    arguments = _widgets(choices, first)
    place = {"min": 0, "max": len(pictures) - 1, "value": step}
    player = ipywidgets.Play(**place, interval=1000 * seconds, show_repeat=False, layout={"margin": "2px 0 2px 7.4em"})
    steps = ipywidgets.IntSlider(**place, description=_STEP, style=_LABELS, layout={"width": "30em"})
    ipywidgets.jslink((player, "value"), (steps, "value"))

    picture = _Output(lambda: cached(**_values(arguments))[steps.value])

    def another_run(_: Any) -> None:
        with picture.drawing():
            player.playing = False
            last = len(cached(**_values(arguments))) - 1
            steps.unobserve(picture.update, "value")  # the new picture is drawn once, below
            for widget in (player, steps):
                widget.value, widget.max = 0, last
            steps.observe(picture.update, "value")
            picture.show()

    for widget in arguments.values():
        widget.observe(another_run, "value")
    steps.observe(picture.update, "value")
    return picture.below(*arguments.values(), player, steps)


class _Output:
    """Shows the result of draw() below the widgets that change it."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        import ipywidgets

        self.draw, self.output = draw, ipywidgets.Output()

    def show(self) -> None:
        from IPython.display import display

        shown = self.draw()
        self.output.clear_output(wait=True)
        if shown is not None:
            display(shown)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Make the old picture pale meanwhile. An error is shown in place of the picture instead of raised."""
        self.output.add_class("tplab-drawing")
        with self.output:
            yield
        self.output.remove_class("tplab-drawing")

    def update(self, _: Any) -> None:
        with self.drawing():
            self.show()

    def below(self, *widgets: Any) -> Any:
        """Draw for the first time, and return the box that the cell displays."""
        import ipywidgets
        from IPython.display import display

        failure = None
        with self.output:
            try:
                self.show()
            except Exception as error:
                failure = error
        if failure:
            raise failure  # the cell raises it, so that Run All treats it like any other error
        display({"text/html": _LOST, "text/plain": ""}, metadata={"tplab": "page only"}, raw=True)
        box = ipywidgets.VBox([*widgets, self.output])
        box.add_class("tplab-explore")
        return box


def _first(choices: Mapping[str, Sequence[Any]], start: Mapping[str, Any]) -> dict[str, Any]:
    """Return each argument's starting value. Raises ValueError for a value that isn't among the argument's choices."""
    first = {argument: values[0] for argument, values in choices.items()} | dict(start)
    for argument, value in first.items():
        if value not in choices.get(argument, ()):
            raise ValueError(f"start={argument}={value!r} is none of {argument}={list(choices.get(argument, ()))}")
    return first


def _widgets(choices: Mapping[str, Sequence[Any]], first: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _widget(name, values, first[name]) for name, values in choices.items()}


def _widget(name: str, values: Sequence[Any], value: Any) -> Any:
    """Return the widget with which these values are easiest to choose from."""
    import ipywidgets

    if all(isinstance(each, bool) for each in values):
        return ipywidgets.Checkbox(value=value, description=name, style=_LABELS)
    chosen = {"options": [(str(each), each) for each in values], "value": value, "description": name}
    if all(isinstance(each, int | float) for each in values):
        wide = {"width": "30em"}
        return ipywidgets.SelectionSlider(**chosen, continuous_update=False, style=_LABELS, layout=wide)
    if len(values) <= _MOST_BUTTONS and all(len(str(each)) <= _LONGEST_BUTTON for each in values):
        beside = {"display": "flex", "align_items": "center"}  # the buttons beside their name
        return ipywidgets.ToggleButtons(**chosen, style={**_LABELS, "button_width": "auto"}, layout=beside)
    return ipywidgets.Dropdown(**chosen, style=_LABELS, layout={"width": "30em"})


def _values(widgets: Mapping[str, Any]) -> dict[str, Any]:
    return {name: widget.value for name, widget in widgets.items()}


def _in_notebook() -> bool:
    module = sys.modules.get("IPython")
    return getattr(module.get_ipython() if module else None, "kernel", None) is not None
