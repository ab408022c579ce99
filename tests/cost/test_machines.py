"""`tplab.cost.machines`: rates are measured with a clock that the test sets, so no real time decides."""

import dataclasses

import pytest

from tplab.collectives.links import Link
from tplab.cost.machines import Losses, Machine, machine

EIGHT = Machine("eight", 1e12, 0.5, 10**9, 1e9, 8, inside=Link(1e-6, 1e-9), between=Link(1e-5, 1e-8))
WIDE = dataclasses.replace(EIGHT, between=Link(1e-5, 2e-9))


@pytest.mark.parametrize(
    ("p", "stride", "in_a_node"),
    [(1, 64, None), (8, 1, None), (2, 4, None), (16, 1, 8), (9, 1, 8), (4, 4, 2), (64, 8, 1), (3, 3, 2), (2, 64, 1)],
)
def test_a_group_over_nodes_shares_the_adapters_of_its_members(p, stride, in_a_node):
    link = EIGHT.link(p, stride)
    if in_a_node is None:
        assert link == EIGHT.inside
    else:
        assert link.alpha == EIGHT.between.alpha
        assert link.beta == pytest.approx(EIGHT.between.beta / in_a_node)
    assert WIDE.link(16).beta == WIDE.inside.beta, "many adapters aren't faster than the links inside"


@pytest.mark.parametrize(
    ("asked", "found"),
    [("h100", "H100 DGX"), (" A100 ", "A100 DGX")],
)
def test_a_machine_is_found_by_the_beginning_of_its_name(asked, found):
    assert machine(asked).name == found


REFUSED = [
    *((lambda name=name: machine(name), "V100 DGX-2H, A100 DGX, H100 DGX, H200 DGX") for name in ("b300", "h")),
    (lambda: dataclasses.replace(EIGHT, bandwidth=0.0), "bandwidth=0.0"),
    (lambda: dataclasses.replace(EIGHT, losses=Losses(ring=81)), "ring=81"),
    (lambda: dataclasses.replace(EIGHT, losses=Losses(contention=1.0)), "contention=1.0"),
    (lambda: EIGHT.link(0), "p=0, stride=1"),
]


@pytest.mark.parametrize(("call", "says"), REFUSED)
def test_what_no_machine_has_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()
