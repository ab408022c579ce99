"""Translate IPython's syntax in a notebook cell to Python, so that the cell can be parsed.

    files = !ls            files = get_ipython().getoutput('ls')
    len?                   get_ipython().run_line_magic('pinfo', 'len')
    %time y = f(x)         y = f(x)
    %%time                 an empty line; the rest of the cell follows

IPython itself does the translation, as it does when the cell runs. Only the magics in TRANSPARENT, which run their code
in the notebook's own namespace, are removed first. All other magics are calls that bind nothing.
"""

import ast
import re
from functools import lru_cache

TRANSPARENT = re.compile(r"^[ \t]*%%(?:time|prun|capture)\b.*|^(\s*(?:[^=#\n]+=\s*)?)%time +(?=\S)", re.MULTILINE)


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
    for text in (source, TRANSPARENT.sub(lambda found: found[1] or "", source)):
        try:
            parse(text)
            return text
        except SyntaxError:
            continue
    text = _translated(text)
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


def ipython_lines(node: ast.AST) -> list[int]:
    """Return the numbers of the lines that only run in IPython, in order."""
    return sorted(inner.lineno for inner in ast.walk(node) if isinstance(inner, ast.Name) and inner.id == "get_ipython")
