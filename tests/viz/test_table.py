"""The table of results: aligned text in a terminal, escaped HTML in a notebook."""

from tplab import viz


def test_columns_of_numbers_are_flush_right_and_names_flush_left():
    rows = [{"run": "one process", "loss": "1.50", "bytes": 0}, {"run": "p = 4", "loss": "11.25", "bytes": None}]
    lines = ["run           loss  bytes", "one process   1.50      0", "p = 4        11.25"]
    assert repr(viz.table(rows)).splitlines() == lines
    lines = repr(viz.table([{"right": None}, {"right": "58.4%"}], title="bytes")).splitlines()
    assert lines == ["bytes", "right", "", "58.4%"]


def test_html_holds_every_cell_escaped():
    html = viz.table([{"a < b": "<i>"}])._repr_html_()
    assert "a &lt; b" in html
    assert "&lt;i&gt;" in html
    assert "<i>" not in html
    assert html.count("<tr>") == 2
