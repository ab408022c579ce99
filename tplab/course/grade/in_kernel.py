"""Prepare the kernel in which `tplab check` runs a notebook. The first cell, which is hidden, calls `name_cells`."""

from ipykernel.compiler import get_file_name

from tplab.runtime.failures import name_cell


def name_cells(names: dict[str, str]) -> None:
    """Set what reports call the cells with these sources, because their numbers differ in the learner's notebook."""
    for source, name in names.items():
        name_cell(get_file_name(source), name)
