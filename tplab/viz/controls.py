"""Controls below a cell: sliders for the arguments of a function, and a Play button for its steps."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

from tplab.viz.colors import Picture

# This is hidden until JupyterLab marks the sliders as disconnected or, in a reopened notebook, doesn't find them at
# all. On a page without JupyterLab's commands, the button does nothing, so the text says what to do without it.
_LOST = """\
<style>
.tplab-explore.jupyter-widgets-disconnected::before,
.tplab-explore .jupyter-widgets-disconnected::before { content: none; }
.tplab-explore.jupyter-widgets-disconnected > :is(.widget-slider, .widget-play) { opacity: 0.45; pointer-events: none; }
.jp-OutputArea:has(.tplab-lost) .jp-OutputArea-output.jupyter-widgets { display: none; }
.jp-OutputArea:has(.tplab-explore.jupyter-widgets-disconnected) .tplab-lost,
.jp-OutputArea:has(.jp-OutputArea-output.jupyter-widgets) .tplab-lost { display: block !important; }
</style>
<div class="tplab-lost" role="status" style="display: none; border-left: 6px solid #b26a00; padding: 0.4em 0.9em;">
<b>The sliders of this cell lost their kernel</b>: it was restarted or shut down. To get them back, run the cells above,
then this one.<br><button class="jp-Button jp-mod-styled jp-mod-accept" style="margin-top: 0.4em"
data-commandlinker-command="apputils:run-all-enabled"
data-commandlinker-args='{"commands": ["notebook:run-all-above", "notebook:run-cell"]}'>Run these cells</button>
</div>"""
_LABELS = {"description_width": "7em"}
_STEP = "step"


class Frames(Sequence[Picture]):
    """The pictures of a run, in order. draw(i) draws the i-th picture when it's needed."""

    def __init__(self, count: int, draw: Callable[[int], Picture]) -> None:
        self._count, self._draw = count, draw

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Picture: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Picture]: ...
    def __getitem__(self, index: int | slice) -> Picture | Sequence[Picture]:
        places = range(self._count)[index]
        return self._draw(places) if isinstance(places, int) else [self._draw(place) for place in places]


def explore(function: Callable[..., Any], *, start: Mapping[str, Any] | None = None, **choices: Sequence[Any]) -> Any:
    """Show function(**values) below one slider per argument, and call it again whenever a slider moves.

        viz.explore(draw, p=(1, 2, 4), kind=["column", "row"], start={"p": 2})

    The sliders start at the values in `start`, or else at the first value of each argument. Outside a notebook, there
    are no sliders, and `explore` returns the function's result for these values. Raises ValueError for an argument with
    no possible values, and for a start value that isn't one of the argument's values.
    """
    first = _first(choices, dict(start or {}), "explore")
    if not _in_notebook():
        return function(**first)
    sliders = _sliders(choices, first)
    control = _Control(lambda: function(**_values(sliders)))
    for slider in sliders.values():
        slider.observe(control.update, "value")
    return control.below(*sliders.values())


def play(
    function: Callable[..., Sequence[Any]],
    *,
    start: Mapping[str, Any] | None = None,
    seconds: float = 1.0,
    **choices: Sequence[Any],
) -> Any:
    """Show the pictures in the sequence function(**values) one at a time, with a Play button that goes through them.

        viz.play(record_a_run, p=(2, 4), start={"p": 4, "step": 3})

    There's one slider per argument, as in `explore`, and below them a slider for the step, which is the picture's place
    in the sequence. `start` may contain a step for the first sequence. When an argument's slider moves, the function is
    called again, and the new sequence starts at step 0. The Play button shows a new picture every `seconds`. Outside a
    notebook, `play` returns the picture at the starting step. Raises ValueError in the same cases as `explore`, and
    also if the first sequence doesn't have the starting step.
    """
    given = dict(start or {})
    step = given.pop(_STEP, 0)
    first = _first(choices, given, "play")
    if _STEP in choices:
        raise ValueError(f"play has its own slider for {_STEP!r}, so no argument can have that name")
    pictures = function(**first)
    if not 0 <= step < len(pictures):
        raise ValueError(f"start=step={step!r} is none of the {len(pictures)} steps, which are counted from 0")
    if not _in_notebook():
        return pictures[step]
    import ipywidgets

    sliders = _sliders(choices, first)
    place = {"min": 0, "max": len(pictures) - 1, "value": step}
    player = ipywidgets.Play(**place, interval=1000 * seconds, show_repeat=False, layout={"margin": "2px 0 2px 7.4em"})
    steps = ipywidgets.IntSlider(**place, description=_STEP, style=_LABELS, layout={"width": "30em"})
    ipywidgets.jslink((player, "value"), (steps, "value"))
    control = _Control(lambda: pictures[steps.value])

    def another_run(_: Any) -> None:
        nonlocal pictures
        with control.output:
            player.playing = False
            pictures = function(**_values(sliders))
            steps.unobserve(control.update, "value")  # the new picture is drawn once, below
            for widget in (player, steps):
                widget.value = 0
                widget.max = len(pictures) - 1
            steps.observe(control.update, "value")
            control.show()

    for slider in sliders.values():
        slider.observe(another_run, "value")
    steps.observe(control.update, "value")
    return control.below(*sliders.values(), player, steps)


class _Control:
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

    def update(self, _: Any) -> None:
        with self.output:  # the output also shows an error instead of raising it
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


def _first(choices: Mapping[str, Sequence[Any]], start: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return each argument's starting value. Raises ValueError for a value that isn't among the argument's choices."""
    empty = [argument for argument, values in choices.items() if not len(values)]
    if not choices or empty:
        raise ValueError(f"{name} needs at least one value to choose from{f' for {empty[0]}' if empty else ''}")
    first = {argument: values[0] for argument, values in choices.items()} | dict(start)
    for argument, value in first.items():
        if value not in choices.get(argument, ()):
            raise ValueError(f"start={argument}={value!r} is none of {argument}={list(choices.get(argument, ()))}")
    return first


def _sliders(choices: Mapping[str, Sequence[Any]], first: Mapping[str, Any]) -> dict[str, Any]:
    import ipywidgets

    return {
        name: ipywidgets.SelectionSlider(
            options=[(str(value), value) for value in values],
            value=first[name],
            description=name,
            continuous_update=False,
            style=_LABELS,
            layout={"width": "30em"},
        )
        for name, values in choices.items()
    }


def _values(sliders: Mapping[str, Any]) -> dict[str, Any]:
    return {name: slider.value for name, slider in sliders.items()}


def _in_notebook() -> bool:
    module = sys.modules.get("IPython")
    return getattr(module.get_ipython() if module else None, "kernel", None) is not None
