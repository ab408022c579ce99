"""A prediction: dots are an invitation, wrong answers get advice and never the answer at once, right ones a reason."""

from fractions import Fraction
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tplab.course.checks.predictions import Prediction, predict


@pytest.fixture(autouse=True)
def questions(chapter: ModuleType) -> None:
    chapter.PREDICTIONS = {
        "90.a": Prediction(
            question="How many calls, and how many bytes?",
            answer={"calls": 1, "bytes": 96},
            why="One all-reduce of 12 doubles.",
            wrong={("bytes", 12): "You counted elements.", "calls": "Count the arrows <between> ranks."},
        ),
        "90.c": Prediction(
            "How long is `bias`?", {"bias": (4,)}, "As long as `out`.", {"bias": "Is `b <i>` one number per output?"}
        ),
        "90.b": Prediction("Which?", {"kind": "all_reduce", "shape": (2, 4), "time": 0.5, "same": True}, "Since."),
    }


def test_dots_ask_for_a_prediction() -> None:
    for reply in (predict("90.a", calls=..., bytes=...), predict("90.a", calls=1, bytes=...), predict("90.a", calls=1)):
        assert "Replace the dots" in repr(reply)
        assert "How many calls" in repr(reply)
        assert "96" not in repr(reply)
    assert "for bytes, and then" in repr(predict("90.a", calls=1, bytes=...))


def test_a_right_prediction_is_told_why() -> None:
    assert repr(predict("90.a", calls=1, bytes=96)) == "Prediction 90.a: right\n  One all-reduce of 12 doubles."


def test_a_wrong_prediction_gets_advice_and_not_the_answer() -> None:
    reply = predict("90.a", calls=1, bytes=12)
    assert repr(reply) == "Prediction 90.a: not yet right: bytes\n  You counted elements."
    assert "96" not in reply._repr_html_()


def test_another_wrong_value_gets_the_question_again() -> None:
    assert "Read the question again: How many calls" in repr(predict("90.a", calls=1, bytes=13))


def test_the_answer_is_there_after_three_different_tries() -> None:
    for wrong in (12, 12, 12, 13):
        assert "96" not in repr(predict("90.a", calls=1, bytes=wrong))
    reply = predict("90.a", calls=1, bytes=14)
    assert "bytes = 96. One all-reduce" in repr(reply)
    assert "<details>" in reply._repr_html_()


def test_html_is_escaped() -> None:
    assert "&lt;between&gt;" in predict("90.a", calls=2, bytes=96)._repr_html_()


def test_code_between_backticks_is_code_in_the_box_and_plain_in_text() -> None:
    for reply in (predict("90.c", bias=...), predict("90.c", bias=4), *(predict("90.c", bias=n) for n in (5, 6, 7))):
        assert "`" not in repr(reply)
        assert "`" not in reply._repr_html_()
    assert "As long as out." in repr(predict("90.c", bias=4))
    assert "<code>out</code>" in predict("90.c", bias=4)._repr_html_()
    assert "<code>b &lt;i&gt;</code>" in predict("90.c", bias=5)._repr_html_()


@pytest.mark.parametrize(("value", "right"), [(4, True), ((4,), True), ([4], True), (5, False), (True, False)])
def test_the_size_of_a_vector_may_be_written_without_brackets(value, right) -> None:
    assert (": right" in repr(predict("90.c", bias=value))) == right


@pytest.mark.parametrize(
    ("field", "value", "right"),
    [
        ("kind", " ALL_reduce ", True),
        ("kind", "All-reduce", True),
        ("kind", "all reduce", True),
        ("kind", "dist.all_reduce", True),
        ("kind", dist.all_reduce, True),
        ("kind", dist.all_gather, False),
        ("kind", "reduce", False),
        ("kind", "all_gather", False),
        ("kind", 3, False),
        ("shape", [2, 4], True),
        ("shape", (4, 2), False),
        ("shape", 8, False),
        ("time", 0.501, True),
        ("time", 0.52, False),
        ("time", [0.5], True),
        ("time", (0.4,), False),
        ("time", [0.5, 0.5], False),
        ("same", True, True),
        ("same", 1, False),
        ("same", None, False),
    ],
)
def test_what_counts_as_right(field, value, right) -> None:
    values = {"kind": "all_reduce", "shape": (2, 4), "time": 0.5, "same": True, field: value}
    assert (": right" in repr(predict("90.b", **values))) == right


@pytest.mark.parametrize(
    ("field", "value", "right"),
    [
        ("time", "1/2", True),
        ("time", " 2 / 4 ", True),
        ("time", "0.5", True),
        ("time", Fraction(1, 2), True),
        ("time", "1/3", False),
        ("time", "1/0", False),
        ("time", "half", False),
        ("time", Fraction(1, 3), False),
        ("shape", ("2", "4"), True),
        ("shape", ("2", "3"), False),
        ("same", "1", False),
        ("time", torch.tensor(0.5), True),
        ("time", torch.tensor([0.5]), True),
        ("time", torch.tensor(0.4), False),
        ("time", np.float32(0.5), True),
        ("shape", torch.tensor([2, 4]), True),
        ("shape", torch.tensor([4, 2]), False),
        ("same", torch.tensor(True), True),
        ("same", torch.tensor(1), False),
    ],
)
def test_a_number_may_be_written_as_text_as_a_fraction_or_as_a_tensor(field, value, right) -> None:
    values = {"kind": "all_reduce", "shape": (2, 4), "time": 0.5, "same": True, field: value}
    assert (": right" in repr(predict("90.b", **values))) == right


def test_advice_for_a_particular_number_is_given_for_its_text_too() -> None:
    assert "You counted elements." in repr(predict("90.a", calls="1", bytes="24/2"))


def test_an_unknown_field_or_number_is_named() -> None:
    with pytest.raises(TypeError, match="asks for calls and bytes, not for byte"):
        predict("90.a", byte=96)
    with pytest.raises(ValueError, match=r"no prediction '90\.z'"):
        predict("90.z", calls=1)
