"""Chapters and exercises are named, parsed and ordered alike everywhere, the start page among them."""

import argparse

import pytest

from tests import saying
from tplab.course.notebooks import numbering
from tplab.course.notebooks.numbering import START_NUMBER


def test_a_chapter_is_found_by_what_a_user_types():
    for text, number in (("4", 4), ("04", 4), ("15", 15), ("start", START_NUMBER), ("s", START_NUMBER)):
        assert numbering.parse_chapter(text) == numbering.chapter_argument(text) == number
    for text in ("", "-1", "four", "4.2", "²", "index"):
        assert numbering.parse_chapter(text) is None
        with pytest.raises(argparse.ArgumentTypeError, match=saying(repr(text), "4", "start")):
            numbering.chapter_argument(text)


def test_exercises_are_sorted_by_chapter_and_place():
    assert sorted(["10.1", "2.11", "2.2", "0.1", "S.1"], key=numbering.place) == ["S.1", "0.1", "2.2", "2.11", "10.1"]
    with pytest.raises(ValueError, match=saying("'x.1'", "4.1", "S.1")):
        numbering.chapter_of("x.1")
