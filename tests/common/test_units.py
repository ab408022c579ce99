"""`tplab.common.units`: three significant digits in one unit system, at the borders between units too."""

import pytest

from tplab.common.units import byte_unit, duration, large, rate, size, work

TEXTS = {
    size: {0: "0 B", 999: "999 B", 98_304: "98.3 kB", 80e9: "80 GB", 2.8e12: "2.8 TB"},
    duration: {3.4e-6: "3.4 µs", 0.312: "312 ms", 59.4: "59.4 s", 59.6: "1 min 00 s", 12_000: "3 h 20 min"},
    work: {8.41e10: "84.1 GFLOP"},
    rate: {9.89e14: "989 TFLOP/s"},
    large: {42_900: "42,900", 2_410_000: "2.41 million"},
}


@pytest.mark.parametrize("function", TEXTS)
def test_numbers_have_a_unit_and_three_digits(function):
    assert {number: function(number) for number in TEXTS[function]} == TEXTS[function]


@pytest.mark.parametrize("bytes", [0, 999, 1000, 5e8, 1e15])
def test_the_unit_of_an_axis_is_that_of_its_largest_number(bytes):
    name, factor = byte_unit(bytes)
    assert size(bytes).endswith(f" {name}")
    assert bytes < 1000 or bytes / factor >= 1
