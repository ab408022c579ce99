"""The cell magic %%ranks, which runs a notebook cell on several ranks.

%%ranks 4
x = torch.ones(2) * rank
dist.all_reduce(x)
x                          # its value is shown for every rank
"""

import ast
import builtins
import dis
import sys
from collections.abc import Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any

from tplab.runtime import transport
from tplab.runtime.forkserver import fork_server
from tplab.runtime.launcher import launch

_OF_THE_RANK = {"rank", "world_size"}  # variables whose values differ from those of the notebook
_READS = {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_NAME", "DELETE_GLOBAL"}  # Python's opcodes
_BINDS = {"STORE_NAME", "STORE_GLOBAL"}


def register_in_ipython() -> None:
    """In IPython, register %%ranks and start the fork server in advance, while the learner is still reading."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None:
        return
    shell.register_magic_function(ranks, magic_kind="cell", magic_name="ranks")
    if sys.platform != "win32":
        fork_server()


def ranks(line: str, cell: str) -> Any:
    """%%ranks N: run the cell on N ranks.

    The cell sees copies of the notebook's variables, plus `rank`, `world_size` and `dist` (torch.distributed). So do
    the notebook's functions that it calls. If the cell ends in an expression, its value is shown for every rank, unless
    a semicolon follows. Variables that the cell assigns exist only on the ranks.

    Raises SyntaxError if the cell isn't valid Python, and TypeError if it reads a variable that can't be sent.
    """
    import IPython

    world_size = _parse(line)
    shell = IPython.get_ipython()
    source = "\n" + cell  # the first line of the notebook's cell is the magic itself
    file = shell.compile.cache(source, _number_of_cell(shell), raw_code=f"%%ranks {line}\n{cell}")
    variables = _variables(compile(source, file, "exec", dont_inherit=True), shell)
    quiet = shell.displayhook.semicolon_at_end_of_expression(source)
    home = FunctionType((lambda: None).__code__, shell.user_ns)
    results = launch(_run_cell, world_size, args=(source, file, home, variables, quiet))
    for rank, (has_value, text) in enumerate(results):
        if has_value:
            print(f"[rank {rank}] {text}")


def _number_of_cell(shell: Any) -> int:
    """Return the number of the running cell. In recent versions of IPython, execution_count is already the next one."""
    numbers = getattr(shell.compile, "_filename_map", {})
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename in numbers:
            return int(numbers[frame.f_code.co_filename])
        frame = frame.f_back
    return int(shell.execution_count)


def _parse(line: str) -> int:
    try:
        return int(line.strip() or "2")
    except ValueError:
        raise ValueError(f"%%ranks needs a number of ranks, such as %%ranks 4; got {line.strip()!r}") from None


def _variables(code: CodeType, shell: Any) -> dict[str, Any]:
    """Return the notebook's variables that the cell reads, except for those that it assigns and that can't be sent."""
    instructions = list(_instructions(code))
    read = {one.argval for one in instructions if one.opname in _READS} - _OF_THE_RANK
    bound = {one.argval for one in instructions if one.opname in _BINDS}
    found = {name: shell.user_ns[name] for name in read if name in shell.user_ns}
    for name in [name for name in found if hasattr(builtins, name)]:
        if found[name] is shell.user_ns_hidden.get(name):  # IPython's own `open`, `exit` and `quit`
            del found[name]
    return {name: value for name, value in found.items() if name not in bound or transport.can_be_sent(value)}


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions of a cell and of the functions, classes and comprehensions in it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)


def _run_cell(source: str, file: str, home: FunctionType, variables: dict[str, Any], quiet: bool) -> tuple[bool, str]:
    """Run the cell on a rank. Return whether it ends in an expression with a value, and the repr of that value.

    home:    a function of the notebook. Its globals arrive as those of all functions of the notebook, so these
             functions see what the cell assigns
    quiet:   whether the cell ends in a semicolon, with which a notebook hides the value of the last expression
    """
    import torch.distributed as dist

    namespace = home.__globals__
    namespace.update({"dist": dist, **variables, "rank": dist.get_rank(), "world_size": dist.get_world_size()})
    tree = ast.parse(source, filename=file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) and not quiet else None
    exec(compile(tree, file, "exec", dont_inherit=True), namespace)
    if not isinstance(last, ast.Expr):
        return False, ""
    value = eval(compile(ast.Expression(last.value), file, "eval", dont_inherit=True), namespace)
    return value is not None, repr(value)
