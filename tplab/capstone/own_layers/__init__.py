"""A GPT built from the learner's answers.

find         finds the answers in the learner's notebooks
check        tells which answers have passed their checks, and runs the checks of the others
link         tables that say which answer replaces which import in later chapters
adapt        thin wrappers where the interfaces of two chapters differ
build        builds a model by running the cells chapter by chapter
trial        compares one step of a small model with tplab's before training starts
"""

from tplab.capstone.own_layers.find import find_answers

__all__ = ["find_answers"]
