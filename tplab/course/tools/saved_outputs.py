"""What a check cell shows in the notebook as it was saved. Nobody has verified it: the code may have changed since."""

from tplab.course.grading.merge import code_cells
from tplab.course.notebooks.cells import Cell


def results(outputs: list) -> list[str]:
    """The results that a cell shows, as text."""
    texts = []
    for output in outputs:
        if isinstance(output, dict) and output.get("output_type") == "execute_result":
            data = output.get("data")
            text = data.get("text/plain", "") if isinstance(data, dict) else ""
            texts.append("".join(map(str, text)) if isinstance(text, list) else str(text))
    return texts


def their_cell(learner: list[Cell], role: str, number: str) -> Cell | None:
    """The last cell that is an exercise's (role "exercise") or its check's ("check"), by its id or its metadata."""
    id = f"{role}-{number.replace('.', '-')}"
    found = [cell for cell in code_cells(learner) if cell.id == id or cell.marks.get(role) == number]
    return found[-1] if found else None


def shown(learner: list[Cell], number: str) -> str:
    """ "passed" or "failed", as the check cell shows it; "" where it shows neither, or nothing about this code.

    A blank chapter shows what a passed check would look like, below a picture that says so. It tells nothing. Nor does
    a check that was run before its exercise's cell was.
    """
    check, exercise = their_cell(learner, "check", number), their_cell(learner, "exercise", number)
    if check is None or exercise is None or _runs(exercise) > _runs(check):
        return ""
    outputs = [output for output in check.outputs if isinstance(output, dict)]
    if any(output.get("ename") == "CheckFailed" for output in outputs):
        return "failed"
    if any(output.get("output_type") == "error" or _is_label(output) for output in outputs):
        return ""
    return "passed" if any(text.startswith(f"Exercise {number} passed") for text in results(outputs)) else ""


def _is_label(output: dict) -> bool:
    """Whether it is the picture above an expected output: one without a text beside it, as no figure is."""
    data = output.get("data")
    return output.get("output_type") == "display_data" and isinstance(data, dict) and set(data) == {"image/png"}


def _runs(cell: Cell) -> int:
    """A cell's place in the order of runs; a cell that was not run since the kernel started comes last of all."""
    return cell.execution_count if isinstance(cell.execution_count, int) else 10**9
