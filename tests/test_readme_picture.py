"""The README's picture of the first fifteen minutes shows what the finished notebook shows."""

from pictures import first_minutes


def test_the_picture_fits_the_notebook() -> None:
    assert first_minutes.TARGET.read_text(encoding="utf-8") == first_minutes.draw(), "run `make picture`"


def test_it_shows_a_sum_a_passed_check_and_a_deadlock_with_its_line() -> None:
    summed, matmul, deadlock = first_minutes.panels()
    assert summed.output == ["[21.0, 21.0]"]
    assert matmul.output[0].startswith("Exercise S.1 passed")
    assert "line 7 in row_product: dist.all_reduce(y)" in " ".join(" ".join(deadlock.output).split())
    assert "    dist.all_reduce(y)" in matmul.code
