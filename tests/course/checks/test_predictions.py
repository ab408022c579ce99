"""A prediction: dots are an invitation, wrong answers get advice and never the answer at once, right ones a reason."""

import re
from fractions import Fraction
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests import saying
from tplab.course.checks.predictions import Prediction, predict

ANSWER = {"kind": "all_reduce", "shape": (2, 4), "time": 0.5, "same": True, "bias": 4}


@pytest.fixture(autouse=True)
def questions(chapter: ModuleType) -> None:
    chapter.PREDICTIONS = {
        "90.a": Prediction(
            question="How many calls, and how many bytes?",
            answer={"calls": 1, "bytes": 96},
            why="One all-reduce of 12 doubles.",
            wrong={("bytes", 12): "You counted elements."},
        ),
        "90.b": Prediction(
            "Which?", {"kind": "all_reduce", "shape": (2, 4), "time": 0.5, "same": True, "bias": (4,)}, "Since."
        ),
    }


def test_dots_ask_for_a_prediction() -> None:
    for reply in (predict("90.a", calls=..., bytes=...), predict("90.a", calls=1, bytes=...), predict("90.a", calls=1)):
        assert reply.mark == "?"
        assert "96" not in repr(reply)


def test_a_right_prediction_is_told_why_and_a_wrong_one_gets_advice_and_not_the_answer() -> None:
    assert "One all-reduce of 12 doubles." in repr(predict("90.a", calls=1, bytes=96))
    assert "You counted elements." in repr(predict("90.a", calls=1, bytes=12))
    assert "How many calls" in repr(predict("90.a", calls=1, bytes=13)), "the question again"
    assert re.search(saying("90.a", "calls"), predict("90.a", calls=True, bytes=96).head)


def test_the_answer_is_there_after_three_different_tries() -> None:
    for wrong in (12, 12, 12, 13):
        reply = predict("90.a", calls=1, bytes=wrong)
        assert "96" not in repr(reply) + reply._repr_html_()
    reply = predict("90.a", calls=1, bytes=14)
    assert re.search(saying("bytes = 96", "One all-reduce"), repr(reply))
    assert "<details>" in reply._repr_html_()


RIGHT_AND_WRONG = {
    "kind": (
        [" ALL_reduce ", "All-reduce", "all reduce", "dist.all_reduce", dist.all_reduce],
        [dist.all_gather, "reduce", "all_gather", 3],
    ),
    "shape": ([[2, 4], torch.tensor([2, 4])], [(4, 2), 8, torch.tensor([4, 2])]),
    "time": (
        [0.501, Fraction(1, 2), torch.tensor(0.5), np.float32(0.5)],
        [0.52, (0.4,), [0.5, 0.5], " 0.5", "half", torch.tensor(0.4)],
    ),
    "same": ([True, torch.tensor(True)], [1, None, "1", torch.tensor(1)]),
    "bias": ([4, (4,), [4]], [5, True]),  # the size of a vector may be written without brackets
}


@pytest.mark.parametrize("field", RIGHT_AND_WRONG)
def test_what_counts_as_right(field) -> None:
    right, wrong = RIGHT_AND_WRONG[field]
    said = {str(value): predict("90.b", **ANSWER | {field: value}).mark == "✓" for value in (*right, *wrong)}
    assert said == dict.fromkeys(map(str, wrong), False) | dict.fromkeys(map(str, right), True)


def test_an_unknown_field_or_number_is_named() -> None:
    with pytest.raises(TypeError, match=saying("90.a", "calls", "bytes", "byte")):
        predict("90.a", byte=96)
    with pytest.raises(ValueError, match=saying("'90.z'")):
        predict("90.z", calls=1)
