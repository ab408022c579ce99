"""`tplab.common.units`: three significant digits in one unit system, at the borders between units too."""

import pytest

from tplab.common.units import byte_unit, count, duration, large, rate, size, work

TEXTS = {
    size: {
        0: "0 B", 384: "384 B", 999: "999 B", 1000: "1 kB", 98_304: "98.3 kB", 999_499: "999 kB", 999_700: "1,000 kB",
        1e6: "1 MB", 80e9: "80 GB", 2.8e12: "2.8 TB", 4_321e12: "4,321 TB",
    },
    duration: {
        0: "0 s", 3.4e-6: "3.4 µs", 0.000_999: "999 µs", 0.001: "1 ms", 0.312: "312 ms", 1: "1 s", 1.24: "1.24 s",
        59.4: "59.4 s", 59.6: "1 min 00 s", 125: "2 min 05 s", 3599.6: "1 h 00 min", 12_000: "3 h 20 min",
    },
    work: {8.41e10: "84.1 GFLOP", 3e5: "0.3 MFLOP"},
    rate: {9.89e14: "989 TFLOP/s"},
    large: {42_900: "42,900", 2_410_000: "2.41 million", 1_300_000_000: "1.3 billion"},
}  # fmt: skip


@pytest.mark.parametrize("function", TEXTS)
def test_numbers_have_a_unit_and_three_digits(function):
    assert {number: function(number) for number in TEXTS[function]} == TEXTS[function]


def test_bytes_in_a_given_unit_and_things_that_are_counted():
    assert [size(2.8e12, unit="GB"), size(5e5, unit="MB")] == ["2,800 GB", "0.5 MB"]
    assert [count(n, "GPU") for n in (0, 1, 2)] == ["0 GPUs", "1 GPU", "2 GPUs"]


@pytest.mark.parametrize("bytes", [0, 999, 1000, 5e8, 1e15])
def test_the_unit_of_an_axis_is_that_of_its_largest_number(bytes):
    name, factor = byte_unit(bytes)
    assert size(bytes).endswith(f" {name}")
    assert bytes < 1000 or bytes / factor >= 1
