"""Make the start page for a hosted notebook, such as Kaggle's or Colab's, whose first cell installs the course's wheel.

    python -m tplab.course.notebooks.hosted chapters/00_start.ipynb WHEEL HOME > start_hosted.ipynb

WHEEL is the address of the wheel, and HOME is the page of the project. The release workflow knows both of them.
"""

import argparse
import copy
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell

INSTALL_TEXT = """# A first taste, without installing anything

This notebook is the first page of tplab, a course in which you write tensor parallelism yourself. It needs no GPU. (On Kaggle, switch on the internet in the notebook's settings first. If you choose the two T4 GPUs there, the second cell below uses both of them.)

Run this cell first. It installs the course, which may take a few minutes if it has to download a newer PyTorch."""  # noqa: E501
INSTALL = '%pip install --quiet "tplab @ {wheel}"'
LIBRARY = "## Your library so far"  # from here on, the page needs a notebook that's saved where the kernel can read it
DEVICES_TEXT = "Does this machine have two GPUs? Then each of the two processes in this cell gets a GPU of its own, and they communicate with NCCL. Otherwise, they share the CPU and communicate with gloo. The rest of this page uses the CPU, unless the machine has eight GPUs."  # noqa: E501
DEVICES = """from tplab.runtime.devices import backend_for


def sum_on_devices():
    x = torch.ones(1, device=device())
    dist.all_reduce(x)
    return str(device()), dist.get_backend(), x.item()


list(launch(sum_on_devices, 2, backend=backend_for(2)))"""
END = "The other chapters build a whole transformer this way, and in the last one, you train a GPT with your own code. To work through them, install the course on your own machine: [how to start]({home})."  # noqa: E501


def hosted(start: NotebookNode, wheel: str, home: str) -> NotebookNode:
    """Return the start page with a cell that installs the wheel, one that shows the devices, and a shorter ending."""
    notebook = copy.deepcopy(start)
    setup = next(i for i, cell in enumerate(notebook.cells) if "setup" in cell.metadata.get("tags", []))
    devices = [new_markdown_cell(DEVICES_TEXT, id="devices-text"), new_code_cell(DEVICES, id="devices")]
    notebook.cells[setup + 1 : setup + 1] = devices
    install = INSTALL.format(wheel=wheel)
    notebook.cells[:0] = [new_markdown_cell(INSTALL_TEXT, id="install-text"), new_code_cell(install, id="install")]
    last = next(i for i, cell in enumerate(notebook.cells) if LIBRARY in cell.source)
    notebook.cells[last].source = notebook.cells[last].source.partition(LIBRARY)[0].rstrip()
    notebook.cells[last + 1 :] = [new_markdown_cell(END.format(home=home), id="end")]
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the start page for a hosted notebook to standard output.")
    parser.add_argument("start", type=Path, help="the start page without answers")
    parser.add_argument("wheel", help="the address of the course's wheel")
    parser.add_argument("home", help="the address of the project's page")
    options = parser.parse_args()
    notebook = nbformat.read(options.start, as_version=nbformat.NO_CONVERT)
    print(nbformat.writes(hosted(notebook, options.wheel, options.home)))


if __name__ == "__main__":
    main()
