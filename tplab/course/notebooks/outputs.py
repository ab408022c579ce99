"""Execute a solution notebook and store its outputs, without widget state and without this machine's paths."""

import re
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

from tplab.course.notebooks.kernels import CELL_TIMEOUT, PACKAGE_ROOT, kernel_environment, started

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class ExecutionError(Exception):
    """Raised when a cell of a solution fails. The message names the cell and shows what it raised."""


def execute(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Run all cells, with `folder` as the working directory, store their outputs in `notebook`, and return it."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        record_timing=False,
        extra_arguments=["--IPKernelApp.log_level=40"],  # log only errors
        resources={"metadata": {"path": str(folder)}},
    )
    client.widget_registry["@jupyter-widgets/output"]["OutputModel"] = _quiet_output()
    try:
        started(lambda: client.execute(env=kernel_environment()))
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        failed = next((cell for cell in notebook.cells if _shows_error(cell)), None)
        name = f"cell {failed.id}" if failed else "a cell"
        told = _ANSI.sub("", str(error)).rpartition("------------------\n")[2].strip()
        raise ExecutionError(f"{name} of the solution failed in {folder}:\n{told}") from error
    state = notebook.metadata.pop("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.metadata.pop("execution", None)
        cell.outputs = storable(cell.outputs, state)
        if "check" in cell.metadata.get("tplab", {}) and not _has_result(cell.outputs):
            raise ExecutionError(f"cell {cell.id} in {folder} shows no verdict; its check must return one")
    return notebook


def _quiet_output() -> type:
    """Return nbclient's Output widget, but one that doesn't tell the kernel which outputs it has collected.

    Nothing in the kernel reads that. And when nbclient sends it while a cell is running, it sometimes misses the
    kernel's reply to that cell, and waits until the cell's time is up (nbclient issue 312).
    """
    from nbclient.output_widget import OutputWidget

    class QuietOutput(OutputWidget):
        def send(self, *args: Any, **options: Any) -> None:
            pass

    return QuietOutput


def _shows_error(cell: NotebookNode) -> bool:
    return any(output.output_type == "error" for output in cell.get("outputs", []))


def _has_result(outputs: list) -> bool:
    return any(output.output_type == "execute_result" and "text/plain" in output.data for output in outputs)


def storable(outputs: list, widgets: dict) -> list:
    """Prepare outputs for saving: merge streams, and replace each widget with the first picture that it shows."""
    kept: list = []
    for output in outputs:
        if output.get("metadata", {}).get("tplab") == "page only":  # tplab.viz.controls marks such outputs
            continue
        output.pop("transient", None)
        if output.output_type == "stream":
            output.text = redact(output.text)
            same = [other for other in kept if other.output_type == "stream" and other.name == output.name]
            if same:
                same[0].text += output.text
                continue
        elif "data" in output:
            view = output.data.pop(WIDGET_VIEW, None)
            if view:
                data, metadata = still_picture(widgets, view["model_id"])
                output.data.update(data)
                output.metadata.update(metadata)
            for kind in ("text/plain", "text/html"):
                if kind in output.data:
                    output.data[kind] = redact(output.data[kind])
        kept.append(output)
    return kept


def still_picture(widgets: dict, reference: str, seen: tuple[str, ...] = ()) -> tuple[dict, dict]:
    """Return the data and metadata of a widget's first picture, which `explore` puts into an Output widget."""
    name = reference.removeprefix("IPY_MODEL_")
    state = widgets.get(name, {}).get("state", {})
    for output in state.get("outputs", []):
        parts = output.get("data", {}), output.get("metadata", {})
        if "image/png" in parts[0]:
            data, metadata = ({kind: part[kind] for kind in part if kind == "image/png"} for part in parts)
            return data, metadata
    for child in state.get("children", []):
        if child not in seen and (picture := still_picture(widgets, child, (*seen, reference)))[0]:
            return picture
    return {}, {}


def redact(text: str) -> str:
    """Replace the folders of the machine that built the notebook with neutral names."""
    for folder, name in (
        (sysconfig.get_path("purelib"), "site-packages"),
        (sysconfig.get_path("stdlib"), "python"),
        (str(PACKAGE_ROOT), "tplab-course"),
    ):
        text = text.replace(folder, name)
    return re.sub(re.escape(tempfile.gettempdir()) + r"/ipykernel_\d+/\d+\.py", "cell", text)


def what_is_compared(outputs: list) -> str:
    """Return Markdown that says what a check compares, taken from the box that the check shows when it passes."""
    html = "".join(output.data.get("text/html", "") for output in outputs if output.output_type == "execute_result")
    found = re.search(r">Right: (.*?)</div>", html)
    told = re.sub(r"([*_$\[\]])", r"\\\1", found[1].replace("&#x27;", "'").replace("&quot;", '"')) if found else ""
    return f"**The check compares:** {told}" if told else ""
