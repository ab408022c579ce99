"""Draws what the controls of a chapter's notebook show, so that a reader of the book can step through the pictures.

A kernel runs the cells with `viz.explore` and `viz.play`, and the cells that these need. There, `explore` and `play` of
this module stand in for those of viz, and display every picture with its values instead of one picture with controls.
"""

import base64
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import nbformat

from tplab.course.notebooks.outputs import execute

MOST = 12  # pictures in which every value is combined with every other one
LABEL = "values of the controls"  # the metadata of an output that precedes a picture
IN_THE_KERNEL = """
import sys
sys.path.insert(0, {here!r})
import states
from tplab import viz
viz.explore, viz.play = states.explore, states.play
"""


class State(NamedTuple):
    """A picture, as a PNG, with the values that it shows and its description."""

    values: str
    png: bytes
    alt: str


def states_of(solution: Path, needed: Sequence[str], wanted: Sequence[str]) -> dict[str, list[State]]:
    """Run the cells `needed` of a solution, and return the states of the cells `wanted`, by id.

    Raises ValueError if one of them shows no picture or a picture without a description.
    """
    notebook = nbformat.read(solution, as_version=4)
    start = nbformat.v4.new_code_cell(IN_THE_KERNEL.format(here=str(Path(__file__).parent)))
    notebook.cells = [start, *(cell for cell in notebook.cells if cell["id"] in needed)]
    with tempfile.TemporaryDirectory() as folder:
        execute(notebook, Path(folder))
    found = {cell["id"]: list(_states(cell.outputs)) for cell in notebook.cells if cell["id"] in wanted}
    if empty := [name for name, states in found.items() if not states or not all(state.alt for state in states)]:
        raise ValueError(f"{solution.name}: the cells {empty} need pictures that viz has drawn and described")
    return found


def _states(outputs: Sequence[Any]) -> Iterator[State]:
    values = ""
    for output in outputs:
        data = output.get("data", {})
        if LABEL in output.get("metadata", {}):
            values = data["text/plain"]
        elif values and "image/png" in data:
            alt = output.metadata.get("image/png", {}).get("alt", "")
            yield State(values, base64.b64decode(data["image/png"]), alt)


def as_html(states: Sequence[State], names: Sequence[str]) -> str:
    """The pictures in the files `names` one at a time, with buttons that go to the next and the previous one."""
    images = [
        f'<img src="{name}" alt="{escape(state.alt)}" data-values="{escape(state.values)}" loading="lazy"'
        + (">" if number else ' class="shown">')
        for number, (name, state) in enumerate(zip(names, states, strict=True))
    ]
    buttons = '<button type="button">‹ back</button> <button type="button">next ›</button>'
    return "\n".join(['<div class="states">', f"<p>{buttons} <span></span></p>", *images, "</div>"])


def explore(function: Callable[..., Any], *, start: Mapping[str, Any] | None = None, **choices: Sequence[Any]) -> None:
    """In the kernel: display function(**values) for the values at the start, and then for others."""
    first = {name: values[0] for name, values in choices.items()} | dict(start or {})
    for values in _chosen(choices, first):
        _display(values, function(**values))


def play(
    function: Callable[..., Sequence[Any]],
    *,
    start: Mapping[str, Any] | None = None,
    seconds: float = 1.0,
    **choices: Sequence[Any],
) -> None:
    """In the kernel: display each step of function(**values) for the values at the start."""
    first = {name: values[0] for name, values in choices.items()} | dict(start or {})
    first.pop("step", None)
    pictures = function(**first)
    for step in range(len(pictures)):
        _display(first | {"step": step}, pictures[step])


def _chosen(choices: Mapping[str, Sequence[Any]], first: dict[str, Any]) -> list[dict[str, Any]]:
    """All combinations or, if these are too many, those that differ from the first one in a single value."""
    everything = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    near = [
        values for values in everything
        if len(everything) <= MOST or sum(values[name] != first[name] for name in choices) == 1
    ]  # fmt: skip
    return [first, *(values for values in near if values != first)]


def _display(values: Mapping[str, Any], picture: Any) -> None:
    from IPython.display import display

    text = ", ".join(f"{name} = {value}" for name, value in values.items())
    display({"text/plain": text}, metadata={LABEL: True}, raw=True)
    display(picture)
