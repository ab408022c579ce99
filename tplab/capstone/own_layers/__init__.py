"""A GPT built from the learner's answers, which are found in their library and loaded and tried out on each rank."""

from tplab.capstone.own_layers.find import find_answers

__all__ = ["find_answers"]
