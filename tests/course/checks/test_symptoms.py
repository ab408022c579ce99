"""The table of symptoms, as text and as HTML."""

from types import ModuleType

from tplab.course.checks.symptoms import Symptom, symptoms


def test_the_table_has_a_row_for_each_symptom(chapter: ModuleType) -> None:
    chapter.SYMPTOMS = [
        Symptom(see="dx is p times too large", cause="g reduces backward too", exercise="90.1"),
        Symptom(see="a long line " * 6, cause="x < y"),
    ]
    table = symptoms(90)
    lines = repr(table).splitlines()
    assert lines[0].split() == ["What", "you", "see", "What", "causes", "it", "Exercise"]
    assert " ".join(lines[2].split()) == "dx is p times too large g reduces backward too 90.1"
    assert lines[2].index("g reduces") == lines[0].index("What causes it")
    assert max(map(len, lines)) <= 100
    assert repr(table).count("a long line") >= 5
    html = table._repr_html_()
    assert html.count("<tr>") == 3
    assert "x &lt; y" in html


def test_a_chapter_without_symptoms_shows_the_head_only(chapter: ModuleType) -> None:
    assert symptoms("90")._repr_html_().count("<tr>") == 1
