"""The cell magic %%ranks, which runs a notebook cell on several ranks.

%%ranks 4
x = torch.ones(2) * rank
dist.all_reduce(x)
x                          # its value is shown for every rank
"""

import ast
import builtins
import sys
from types import FrameType
from typing import Any

from tplab.runtime.forkserver import fork_server
from tplab.runtime.launcher import launch


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

    The cell sees copies of the notebook's variables, plus `rank`, `world_size` and `dist` (torch.distributed). If
    the cell ends in an expression, its value is shown for every rank. Variables that the cell assigns exist only on the
    ranks.
    """
    import IPython

    world_size = _parse(line)
    shell = IPython.get_ipython()
    file = shell.compile.cache("\n" + cell, _number_of_cell(shell), raw_code=f"%%ranks {line}\n{cell}")
    tree = ast.parse("\n" + cell, filename=file)
    results = launch(_run_cell, world_size, args=("\n" + cell, file, _variables(tree, shell.user_ns)))
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


def _variables(tree: ast.AST, namespace: dict[str, Any]) -> dict[str, Any]:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return {name: namespace[name] for name in names if name in namespace and not hasattr(builtins, name)}


def _run_cell(source: str, file: str, variables: dict[str, Any]) -> tuple[bool, str]:
    """Run the cell on a rank. Return whether it ends in an expression with a value, and the repr of that value."""
    import torch.distributed as dist

    namespace = {
        "__name__": "__main__",
        "dist": dist,
        **variables,
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
    }
    tree = ast.parse(source, filename=file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, file, "exec"), namespace)
    if not isinstance(last, ast.Expr):
        return False, ""
    value = eval(compile(ast.Expression(last.value), file, "eval"), namespace)
    return value is not None, repr(value)
