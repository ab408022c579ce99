"""Execute a solution notebook and store its outputs, without widget state and without this machine's paths."""

import re
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from nbclient import NotebookClient
from nbclient.output_widget import OutputWidget
from nbformat import NotebookNode

from tplab.course.notebooks.kernels import CELL_TIMEOUT, PACKAGE_ROOT, kernel_environment, started

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"


class QuietOutput(OutputWidget):
    """nbclient's Output widget, but one that doesn't tell the kernel which outputs it has collected.

    Nothing in the kernel reads that. And when nbclient sends it while a cell is running, it sometimes misses the
    kernel's reply to that cell, and waits until the cell's time is up (nbclient issue 312).
    """

    def send(self, *args: Any, **options: Any) -> None:
        pass


def execute(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Run all cells, with `folder` as the working directory, store their outputs in `notebook`, and return it.

    If a cell fails, this raises nbclient's CellExecutionError, CellTimeoutError, or DeadKernelError.
    """
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        record_timing=False,
        extra_arguments=["--IPKernelApp.log_level=40"],  # log only errors
        resources={"metadata": {"path": str(folder)}},
    )
    client.widget_registry["@jupyter-widgets/output"]["OutputModel"] = QuietOutput
    started(lambda: client.execute(env=kernel_environment()))
    state = notebook.metadata.pop("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = storable(cell.outputs, state)
    return notebook


def storable(outputs: list, widgets: dict) -> list:
    """Prepare outputs for saving: merge streams, and replace each widget with the first picture that it shows."""
    kept: list = []
    for output in outputs:
        if output.get("metadata", {}).get("tplab") == "page only":  # tplab.viz.controls marks such outputs
            continue
        if output.output_type == "stream":
            output.text = redact(output.text)
            same = [other for other in kept if other.output_type == "stream" and other.name == output.name]
            if same:
                same[0].text += output.text
                continue
        elif "data" in output:
            view = output.data.pop(WIDGET_VIEW, None)
            if view:
                data, metadata = _still_picture(widgets, view["model_id"])
                output.data.update(data)
                output.metadata.update(metadata)
            for kind in ("text/plain", "text/html"):
                if kind in output.data:
                    output.data[kind] = redact(output.data[kind])
        kept.append(output)
    return kept


def _still_picture(widgets: dict, box: str) -> tuple[dict, dict]:
    """Return the data and metadata of the picture in a box of widgets. `explore` puts it into an Output widget."""
    for child in widgets.get(box, {}).get("state", {}).get("children", []):
        for output in widgets.get(child.removeprefix("IPY_MODEL_"), {}).get("state", {}).get("outputs", []):
            if "image/png" in output.get("data", {}):
                data, metadata = output["data"], output.get("metadata", {})
                return {"image/png": data["image/png"]}, {k: metadata[k] for k in metadata if k == "image/png"}
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
