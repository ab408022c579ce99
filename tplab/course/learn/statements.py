"""Select the statements of the learner's cells that an answer needs, leaving out those that only try things out.

Below a class, there is often code that tries it out, such as `print(launch(my_try, 2))`, a plot or a small layer.
That's fine in a notebook, but on a rank it would start ranks inside a rank. So we keep only functions, classes,
imports, statements that may change paths, modules or the environment, and those that bind or change a name that the
others use. We never keep anything that calls `launch` or uses its results. Code that only runs in IPython is kept if
the others use what it binds.
"""

import ast
from collections.abc import Iterable, Sequence

from tplab.course.grade.needs import binds, has_side_effects, uses
from tplab.course.notebooks.ipython_syntax import ipython_lines

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)


def needed_statements(cells: Sequence[Sequence[ast.stmt]], asked: Iterable[str]) -> list[list[ast.stmt]]:
    """Return each cell's needed statements: definitions, imports, and what they and the `asked` names depend on."""
    statements = [statement for cell in cells for statement in cell]
    dropped = _what_comes_of_a_launch(statements)
    kept = {
        id(one)
        for one in statements
        if isinstance(one, _DEFINITIONS + _IMPORTS) or has_side_effects(_source(one))
        if not ipython_lines(one)
    }
    kept -= dropped
    values = {name for one in statements if isinstance(one, ast.Assign | ast.AnnAssign) for name in _binds(one)}
    names = set(asked)
    while True:
        names |= {name for one in statements if id(one) in kept for name in uses(_source(one))}
        more = {id(one) for one in statements if id(one) not in kept | dropped and _changes(one, values) & names}
        if not more:
            return [[one for one in cell if id(one) in kept] for cell in cells]
        kept |= more


def _source(statement: ast.stmt) -> str:
    return ast.unparse(statement)


def _binds(statement: ast.stmt) -> set[str]:
    """Return the names that a statement binds or whose attributes it sets, including definitions inside an `if`."""
    if isinstance(statement, _DEFINITIONS):
        return {statement.name}
    inner = {node.name for node in ast.walk(statement) if isinstance(node, _DEFINITIONS)}
    return inner | binds(_source(statement))


def _changes(statement: ast.stmt, values: set[str]) -> set[str]:
    """Return the names that a statement binds, or whose values it may change by a method call: `table.append(1)`."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        return {node.id for node in ast.walk(call.func.value) if isinstance(node, ast.Name)} & values
    return _binds(statement)


def _what_comes_of_a_launch(statements: Sequence[ast.stmt]) -> set[int]:
    """Return the ids of the statements that call `launch` or use a name that such a statement has bound."""
    found: set[int] = set()
    launched: set[str] = set()
    for statement in statements:
        defines = isinstance(statement, _DEFINITIONS + _IMPORTS)
        if defines or not (_calls_launch(statement) or uses(_source(statement)) & launched):
            launched -= _binds(statement)
        else:
            found.add(id(statement))
            launched |= _binds(statement)
    return found


def _calls_launch(statement: ast.stmt) -> bool:
    calls = (node.func for node in ast.walk(statement) if isinstance(node, ast.Call))
    return any(getattr(call, "id", getattr(call, "attr", "")) == "launch" for call in calls)
