"""A function behind sliders: turn a knob, see what changes."""

import sys
from collections.abc import Callable, Sequence
from typing import Any


def explore(function: Callable[..., Any], **choices: Sequence[Any]) -> Any:
    """Show function(**values) below one slider per argument; every move runs it again.

        viz.explore(lambda p, kind: viz.product(X, A, kind=kind, p=p), p=(1, 2, 4), kind=["column", "row"])

    The first value of each is shown first. Outside a notebook, where nothing can be turned, it returns what the
    function gives for the first values.
    """
    empty = [name for name, values in choices.items() if not len(values)]
    if not choices or empty:
        raise ValueError(f"explore needs at least one value to choose from{f' for {empty[0]}' if empty else ''}")
    if not _in_notebook():
        return function(**{name: values[0] for name, values in choices.items()})
    import ipywidgets
    from IPython.display import display

    sliders = {
        name: ipywidgets.SelectionSlider(
            options=[(str(value), value) for value in values],
            value=values[0],
            description=name,
            continuous_update=False,
            style={"description_width": "7em"},
            layout={"width": "30em"},
        )
        for name, values in choices.items()
    }
    output = ipywidgets.Output()

    def update(_: Any = None) -> None:
        with output:
            shown = function(**{name: slider.value for name, slider in sliders.items()})
            output.clear_output(wait=True)
            if shown is not None:
                display(shown)

    for slider in sliders.values():
        slider.observe(update, "value")
    update()
    return ipywidgets.VBox([*sliders.values(), output])


def _in_notebook() -> bool:
    module = sys.modules.get("IPython")
    return getattr(module.get_ipython() if module else None, "kernel", None) is not None
