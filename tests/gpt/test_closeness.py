"""The page how_close.md: what it says about rounding holds here."""

import re

import torch

from tests import ROOT
from tplab import launch
from tplab.tensor import ParallelMLP

PAGE = (ROOT / "chapters" / "how_close.md").read_text()


def one_pass(values: torch.dtype, computed: torch.dtype) -> dict[str, torch.Tensor]:
    """The output of an MLP and the gradient of x, from values that are rounded to one dtype, computed in another."""
    torch.manual_seed(0)
    mlp = ParallelMLP(512, 2048)  # every number of ranks draws the same full weights
    x, upstream = torch.randn(2, 64, 512).to(values).to(computed)
    mlp.to(values).to(computed)
    x.requires_grad_()
    out = mlp(x)
    out.backward(upstream)
    return {"output": out.detach().double(), "gradient of x": x.grad.double()}


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def test_ranks_differ_from_each_other_by_a_few_eps_and_by_about_as_much_as_the_page_says():
    said = {
        (dtype, name): [float(cell) for cell in cells.split("|")]
        for dtype, name, cells in re.findall(r"^\| (\w+), (output|gradient of x) \| (.*) \|$", PAGE, re.MULTILINE)
    }
    measured = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        exact = launch(one_pass, 1, args=(dtype, torch.float64))[0]
        one, two, four = (launch(one_pass, p, args=(dtype, dtype))[0] for p in (1, 2, 4))
        for name, tensor in exact.items():
            found = [apart(one[name], tensor), apart(two[name], one[name]), apart(four[name], one[name])]
            measured[str(dtype)[6:], name] = [*found, torch.finfo(dtype).eps]
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
