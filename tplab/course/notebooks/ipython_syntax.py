"""Translate IPython's syntax in a notebook cell to Python, so that the cell can be parsed.

    files = !ls            files = get_ipython().getoutput('ls')
    len?                   get_ipython().run_line_magic('pinfo', 'len')
    %time y = f(x)         y = f(x)
    %%time                 an empty line; the rest of the cell follows

IPython itself does the translation, as it does when the cell runs. The magics in TRANSPARENT run their code in the
notebook's own namespace, so their code takes their place. All other magics are calls that bind nothing.
"""

import ast
from collections.abc import Iterator
from functools import lru_cache

TRANSPARENT = {"run_cell_magic": ("time", "prun", "capture"), "run_line_magic": ("time",)}


def parse(text: str) -> ast.Module:
    """Parse Python. Raises SyntaxError for everything that can't be parsed."""
    try:
        return ast.parse(text)
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes, or nested too deeply
        raise SyntaxError(str(error)) from None


@lru_cache(maxsize=1000)
def to_python(source: str) -> str:
    """Return a cell's code as Python. Code that is Python already is returned unchanged.

    Each line keeps its number, except below a magic that is continued on a second line by a backslash. Raises
    SyntaxError if the cell is valid neither as Python nor in IPython.
    """
    try:
        parse(source)
        return source
    except SyntaxError:
        text = _translated(source)
    for call in sorted(_calls(parse(text)), key=lambda call: (call.lineno, call.col_offset), reverse=True):
        if (code := _code_run_by(call)) is not None:
            text = _spliced(text, call, code)
    parse(text)
    return text


def _translated(source: str) -> str:
    from IPython.core.inputtransformer2 import TransformerManager  # slow to import, and few cells need it

    body = source.lstrip()
    empty = source[: len(source) - len(body)].count("\n")  # IPython drops empty lines at the top
    try:
        return "\n" * empty + TransformerManager().transform_cell(source)
    except Exception as error:  # it isn't written for code that IPython can't run either
        raise SyntaxError(str(error)) from None


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield all calls of methods of IPython's shell, as in `get_ipython().system("ls")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            shell = node.func.value
            if isinstance(shell, ast.Call) and isinstance(shell.func, ast.Name) and shell.func.id == "get_ipython":
                yield node


def _code_run_by(call: ast.Call) -> str | None:
    """Return the Python code that a call of a transparent magic runs, or None for any other call."""
    arguments = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if not arguments or arguments[0] not in TRANSPARENT.get(name, ()):
        return None
    if name == "run_cell_magic":
        return "\n" + to_python(arguments[-1])
    try:
        return to_python(arguments[-1]).strip() or None
    except SyntaxError:  # it has options
        return None


def _spliced(text: str, call: ast.Call, code: str) -> str:
    """Return the text with `code` in place of a call, which IPython has written on one line."""
    lines = text.split("\n")
    line = lines[call.lineno - 1].encode()
    lines[call.lineno - 1] = line[: call.col_offset].decode() + code + line[call.end_col_offset :].decode()
    return "\n".join(lines)


def ipython_lines(node: ast.AST) -> list[int]:
    """Return the numbers of the lines that only run in IPython, in order."""
    return sorted(inner.lineno for inner in ast.walk(node) if isinstance(inner, ast.Name) and inner.id == "get_ipython")


def magic_arguments(tree: ast.AST) -> Iterator[str]:
    """Yield what IPython's magics and shell commands receive as text: "-o f(x)" for `%timeit -o f(x)`."""
    for call in _calls(tree):
        is_magic = isinstance(call.func, ast.Attribute) and call.func.attr in TRANSPARENT
        given = call.args[1:] if is_magic else call.args  # without the magic's name
        yield from (str(one.value) for one in given if isinstance(one, ast.Constant))
