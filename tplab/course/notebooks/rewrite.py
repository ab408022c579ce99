"""Rewrite the text of individual cells in a chapter: remove answers and fold hints."""

import ast
import re
from typing import cast

BEGIN, BROKEN, END = "### BEGIN SOLUTION", "### BROKEN", "### END SOLUTION"


def keep_solution(text: str) -> str:
    """Return the cell as it appears in the solution notebook, with the answer but without its markers."""
    return "\n".join(line for line, where in regions(text) if where in ("given", "answer"))


def regions(text: str) -> list[tuple[str, str]]:
    """Return each line of an exercise with the part it belongs to: "given", "answer", "broken" or "marker"."""
    found, where = [], "given"
    after = {BEGIN: "answer", BROKEN: "broken", END: "given"}
    for line in text.split("\n"):
        where = after.get(line.strip(), where)
        found.append((line, "marker" if line.strip() in after else where))
    return found


def blank_exercise(text: str, number: str) -> str:
    """Return the cell as the learner first sees it, with a stub in place of each solution region.

    If the task is to repair code, the region continues below the answer with ### BROKEN and the broken lines, each as a
    comment. The learner gets these lines below the stub, where they're no longer comments.
    """
    markers = [line.strip() for line, where in regions(text) if where == "marker"]
    if not re.fullmatch(rf"({BEGIN}({BROKEN})?{END})*", "".join(markers)):
        raise ValueError(f"its markers are {', '.join(markers)}; each region has {BEGIN}, perhaps {BROKEN}, and {END}")
    lines: list[str] = []
    for line, where in regions(text):
        indent = line[: len(line) - len(line.lstrip())]
        if where == "given":
            lines.append(line)
        elif where == "broken":
            if line.strip()[:1] not in ("", "#"):
                raise ValueError(f"{line!r} is one of the broken lines, so it must be a comment")
            lines.append(re.sub(r"^(\s*)# ?", r"\1", line).rstrip())
        elif line.strip() == BEGIN:
            lines += [f"{indent}# your code here", f'{indent}raise NotImplementedError("exercise {number}")']
        elif line.strip() == BROKEN:
            lines[-2] = f"{indent}# delete the next line, then repair the code below"
    return "\n".join(lines)


def blank_prediction(text: str) -> str:
    """Replace every value in `predict("4.a", calls=1)` with `...`, keeping the layout of the call."""
    call = cast(ast.Call, cast(ast.Expr, ast.parse(text).body[0]).value)
    values = [*call.args[1:], *(keyword.value for keyword in call.keywords)]
    lines = [line.encode() for line in text.split("\n")]  # ast counts columns in bytes
    for value in sorted(values, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        first, last = value.lineno - 1, (value.end_lineno or value.lineno) - 1
        lines[first : last + 1] = [lines[first][: value.col_offset] + b"..." + lines[last][value.end_col_offset :]]
    return b"\n".join(lines).decode()


def fold_hints(text: str) -> str:
    """Turn a numbered list of three hints into nested <details>, so that opening one reveals the next.

    Raises ValueError unless there are three hints and nothing before them.
    """
    before, *hints = re.split(r"^\d+\. +", text.strip(), flags=re.MULTILINE)
    if before or len(hints) != 3:
        raise ValueError(f"{len(hints)} hint(s) found; write a numbered list of exactly three and nothing else")
    folded = ""
    for number in (3, 2, 1):
        body = re.sub(r"^ {1,3}", "", hints[number - 1].strip(), flags=re.MULTILINE)
        folded = f"<details><summary>Hint {number}</summary>\n\n{body}\n\n{folded}</details>\n\n"
    return folded.strip()
