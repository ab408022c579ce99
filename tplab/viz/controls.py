"""Sliders for the arguments of a function: when you move one, the function is called again."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


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
    return ipywidgets.VBox([*sliders.values(), output])


def _in_notebook() -> bool:
    module = sys.modules.get("IPython")
    return getattr(module.get_ipython() if module else None, "kernel", None) is not None
