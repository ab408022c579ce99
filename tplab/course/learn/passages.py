"""Extract an answer from a notebook as plain Python, together with the imports and helpers that it uses.

    Passage(imports=["from torch import nn"], helpers=["def double(x): ..."], code=["class Layer(nn.Module): ..."])

Comments above a statement belong to it. Code that only tries an answer out, such as a print below it, is left out. So
are IPython's magics and shell commands, unless the answer needs them. In that case, it can't go into a module.
"""

import ast
import builtins
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tplab.course.grade.answers import Piece
from tplab.course.grade.needs import binds, uses
from tplab.course.learn.statements import needed_statements
from tplab.course.notebooks.ipython_syntax import ipython_lines, parse, to_python
from tplab.course.notebooks.source import passed_names

_IMPORTS = (ast.Import, ast.ImportFrom)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class NotPlain(SyntaxError):  # noqa: N818 (it says what to do: write it in Python)
    """Raised for an answer that runs in a notebook but not in a Python module. The message quotes the line."""


@dataclass(frozen=True)
class Passage:
    """The code of an answer. Each item is a single top-level statement, with the comments above it.

    imports:  import statements that import one name each, sorted
    helpers:  statements from given cells and the learner's own cells that define what the answer uses
    code:     the statements of the answer itself
    """

    imports: list[str] = field(default_factory=list)
    helpers: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        """The names that the answer defines."""
        return {name for text in self.code for name in binds(text)}

    @property
    def used(self) -> set[str]:
        return {name for text in [*self.helpers, *self.code] for name in uses(text)}


@dataclass(frozen=True)
class Statement:
    """A top-level statement, with the comments above it, and as the learner typed it in the cell."""

    node: ast.stmt
    text: str
    typed: str = ""


def extract(number: str, pieces: list[Piece]) -> Passage:
    """Extract the answer to an exercise from the code cells that ran up to its check.

    Other cells that can't be parsed are left out. Raises SyntaxError if the answer's own cell can't be, and NotPlain if
    the answer needs a line that only works in a notebook.
    """
    own = [piece for piece in pieces if piece.role == "exercise" and piece.number == number]
    others = [piece for piece in pieces if piece.role not in ("check", "exercise")]
    checked = {
        name
        for piece in pieces
        if (piece.role, piece.number) == ("check", number)
        for name in passed_names(piece.source)
    }
    answers = {name for piece in pieces if piece.role == "exercise" for name in binds(piece.source)}
    cells = [top_level(piece.source) for piece in own]
    kept = needed_statements([[one.node for one in cell] for cell in cells], checked)
    wanted = {id(node) for cell in kept for node in cell}
    code = [one for cell in cells for one in cell if id(one.node) in wanted]
    if own:  # what the learner's later cells change about the answer, as in `Layer.forward = mine`
        later = [piece for piece in pieces[pieces.index(own[-1]) :] if piece.role == "own"]
        code += [one for piece in later for one in _top_level_if_any(piece.source) if binds(one.text) & checked]
    imports = {text for one in code for text in single_imports(one.node)}
    code = [one for one in code if not isinstance(one.node, _IMPORTS)]
    helpers = _helpers(code, [one for piece in others for one in _top_level_if_any(piece.source)], answers | checked)
    undefined = checked - {name for one in code for name in binds(one.text)}  # a magic that ran the cell defines them
    for one in (*code, *helpers, *(one for cell in cells for one in cell if undefined)):
        _refuse_what_needs_a_notebook(number, one)
    used = {name for one in [*code, *helpers] for name in uses(one.text)}
    imports |= {text for one in helpers for text in single_imports(one.node)}
    return Passage(
        sorted(text for text in imports if binds(text) & used),
        [one.text for one in helpers if not isinstance(one.node, _IMPORTS)],
        [one.text for one in code],
    )


def _helpers(code: list[Statement], before: list[Statement], answers: set[str]) -> list[Statement]:
    """Return the statements of other cells that the answer needs, in notebook order, leaving out other answers."""
    names = {name for one in code for name in uses(one.text)} - {name for one in code for name in binds(one.text)}
    names -= answers
    found: dict[int, Statement] = {}
    waiting = [name for name in names if not hasattr(builtins, name)]
    done: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in done:
            continue
        done.add(name)
        for place in range(len(before) - 1, -1, -1):  # finds the last one that binds it, and later changes to it
            one = before[place]
            if name in binds(one.text):
                found[place] = one
                waiting += [used for used in uses(one.text) - answers if not hasattr(builtins, used)]
                if isinstance(one.node, (*_DEFINITIONS, *_IMPORTS, ast.Assign, ast.AnnAssign)) and _defines(one, name):
                    break
    return [found[place] for place in sorted(found)]


def _defines(one: Statement, name: str) -> bool:
    """Return whether a statement binds a name, rather than only setting an attribute or item of its value."""
    targets = one.node.targets if isinstance(one.node, ast.Assign) else [one.node]
    return not isinstance(one.node, ast.Assign) or any(isinstance(target, ast.Name) for target in targets)


def _refuse_what_needs_a_notebook(number: str, one: Statement) -> None:
    """Raise NotPlain if a statement needs IPython, or awaits something outside a function."""
    ipython = ipython_lines(one.node)
    if not ipython and _is_plain(one.text):
        return
    line = one.typed.split("\n")[ipython[0] - one.node.lineno if ipython else 0].strip()
    raise NotPlain(
        f"Your answer to {number} can't go into your library, because it needs `{line}`, which only works in a "
        "notebook. Write this line in plain Python, and check the exercise again."
    )


def _is_plain(text: str) -> bool:
    with warnings.catch_warnings(action="ignore"):  # the notebook has shown them
        try:
            compile(text, "answer", "exec", dont_inherit=True)
        except SyntaxError:
            return False
    return True


def _top_level_if_any(source: str) -> list[Statement]:
    try:
        return top_level(source)
    except SyntaxError:
        return []


def top_level(source: str) -> list[Statement]:
    """Return the top-level statements of a cell with the comments above them. Raises SyntaxError if it has none."""
    text = to_python(source)
    lines, typed = text.split("\n"), source.split("\n")
    found = []
    end = 0
    for node in parse(text).body:
        start = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))]) - 1
        while start > end and lines[start - 1].startswith("#"):
            start -= 1
        end = node.end_lineno or node.lineno
        found.append(Statement(node, "\n".join(lines[start:end]).rstrip(), "\n".join(typed[node.lineno - 1 : end])))
    return found


def single_imports(node: ast.stmt) -> Iterator[str]:
    """Split an import statement: yield a statement of its own for each name that it imports."""
    if isinstance(node, _IMPORTS):
        for name in node.names:
            one = (
                ast.Import([name]) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, [name], node.level)
            )
            yield ast.unparse(one)


def joined_imports(texts: Iterable[str]) -> str:
    """Join import statements that import one name each into a block with one line per module."""
    given = set(texts)
    plain = sorted(text for text in given if text.startswith("import"))
    names: dict[str, list[str]] = {}
    for text in sorted(given - {*plain}):
        module, _, name = text.removeprefix("from ").partition(" import ")
        names.setdefault(module, []).append(name)
    return "\n".join([*plain, *(f"from {module} import {', '.join(found)}" for module, found in names.items())])
