"""The page how_close.md: what it says about rounding holds when its program runs here."""

import re

import torch

from tests import ROOT
from tplab.gpt.closeness import table_of_passes

PAGE = (ROOT / "chapters" / "how_close.md").read_text()


def test_ranks_differ_from_each_other_by_a_few_eps_and_by_about_as_much_as_the_page_says():
    said = {
        (dtype, name): [float(cell) for cell in cells.split("|")]
        for dtype, name, cells in re.findall(r"^\| (\w+), (output|gradient of x) \| (.*) \|$", PAGE, re.MULTILINE)
    }
    measured = {
        (str(dtype)[6:], {"dx": "gradient of x"}.get(name, name)): [*values, torch.finfo(dtype).eps]
        for dtype, tensors in table_of_passes().items()
        for name, values in tensors.items()
    }
    assert len(said) == 5
    for row, numbers in said.items():
        *differences, eps = measured[row]
        assert all(difference < 32 * eps for difference in differences), row
        for number, here in zip(numbers, measured[row], strict=True):
            assert number == here == 0 or number / 10 < here < 10 * number, (row, numbers, measured[row])


def test_the_order_of_a_sum_matters():
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    first, *lines = code.splitlines()
    values: dict[str, torch.Tensor] = {}
    exec(first, {"torch": torch}, values)
    for line in lines:
        expression, said = re.match(r"(.*?)  # (-?[\d.]+)", line).groups()
        assert eval(expression, {}, values).item() == float(said)
