"""Read the results that check cells show in a saved notebook. The code may have changed since, so they prove little."""

from tplab.course.grade.answers import code_cells
from tplab.course.notebooks.cells import Cell


def results(outputs: list) -> list[str]:
    """Return the results in a cell's outputs as text."""
    texts = []
    for output in outputs:
        if isinstance(output, dict) and output.get("output_type") == "execute_result":
            data = output.get("data")
            text = data.get("text/plain", "") if isinstance(data, dict) else ""
            texts.append("".join(map(str, text)) if isinstance(text, list) else str(text))
    return texts


def their_cell(learner: list[Cell], role: str, number: str) -> Cell | None:
    """Return an exercise's last cell with this role ("exercise" or "check"), by id or metadata, or None."""
    id = f"{role}-{number.replace('.', '-')}"
    found = [cell for cell in code_cells(learner) if cell.id == id or cell.marks.get(role) == number]
    return found[-1] if found else None


def shown(learner: list[Cell], number: str) -> str:
    """Return the status that the check cell shows, "passed" or "failed", or "" if it proves nothing about this code.

    A check that ran before its exercise's cell proves nothing.
    """
    check, exercise = their_cell(learner, "check", number), their_cell(learner, "exercise", number)
    if check is None or exercise is None or _runs(exercise) >= _runs(check):
        return ""
    errors = [output.get("ename") for output in check.outputs if isinstance(output, dict) and "ename" in output]
    if errors:
        return "failed" if "CheckFailed" in errors else ""
    return "passed" if any(text.startswith(f"Exercise {number} passed") for text in results(check.outputs)) else ""


def _runs(cell: Cell) -> int:
    """Return a cell's position in execution order. Cells that haven't run since the kernel started sort last."""
    return cell.execution_count if isinstance(cell.execution_count, int) else 10**9
