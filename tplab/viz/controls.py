"""Sliders for the arguments of a function: when you move one, the function is called again."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Hidden, until JupyterLab marks the sliders as disconnected or, in a notebook opened anew, doesn't find them at all. In
# a page without JupyterLab's commands, the button runs nothing, so the text says what to do without it.
_LOST = """\
<style>
.tplab-explore.jupyter-widgets-disconnected::before,
.tplab-explore .jupyter-widgets-disconnected::before { content: none; }
.tplab-explore.jupyter-widgets-disconnected > .widget-slider { opacity: 0.45; pointer-events: none; }
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


def explore(function: Callable[..., Any], *, start: Mapping[str, Any] | None = None, **choices: Sequence[Any]) -> Any:
    """Show function(**values) below one slider per argument, and call it again whenever a slider moves.

        viz.explore(draw, p=(1, 2, 4), kind=["column", "row"], start={"p": 2})

    The sliders start at the values in `start`, or else at the first value of each argument. Outside a notebook, there
    are no sliders, and the function's result for these values is returned. Raises ValueError for an argument without
    values, and for a start value that isn't one of them.
    """
    empty = [name for name, values in choices.items() if not len(values)]
    if not choices or empty:
        raise ValueError(f"explore needs at least one value to choose from{f' for {empty[0]}' if empty else ''}")
    first = {name: values[0] for name, values in choices.items()} | dict(start or {})
    for name, value in first.items():
        if value not in choices.get(name, ()):
            raise ValueError(f"start={name}={value!r} is none of {name}={list(choices.get(name, ()))}")
    if not _in_notebook():
        return function(**first)
    import ipywidgets
    from IPython.display import display

    sliders = {
        name: ipywidgets.SelectionSlider(
            options=[(str(value), value) for value in values],
            value=first[name],
            description=name,
            continuous_update=False,
            style={"description_width": "7em"},
            layout={"width": "30em"},
        )
        for name, values in choices.items()
    }
    output = ipywidgets.Output()

    def show() -> None:
        shown = function(**{name: slider.value for name, slider in sliders.items()})
        output.clear_output(wait=True)
        if shown is not None:
            display(shown)

    def update(_: Any) -> None:
        with output:  # which also shows an error, instead of raising it
            show()

    for slider in sliders.values():
        slider.observe(update, "value")
    failure = None
    with output:
        try:
            show()
        except Exception as error:
            failure = error
    if failure:
        raise failure  # by the cell, so that Run All treats it like any other error
    display({"text/html": _LOST, "text/plain": ""}, metadata={"tplab": "page only"}, raw=True)
    box = ipywidgets.VBox([*sliders.values(), output])
    box.add_class("tplab-explore")
    return box


def _in_notebook() -> bool:
    module = sys.modules.get("IPython")
    return getattr(module.get_ipython() if module else None, "kernel", None) is not None
