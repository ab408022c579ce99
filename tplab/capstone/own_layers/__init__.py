"""A GPT made of the learner's own answers.

find         the answers in the learner's notebooks
check        which of them have passed their checks, and the checks of the others
link         which answer replaces which import of a later chapter
statements   which statements of their cells a model needs
adapt        thin wrappers where the interfaces of two chapters differ
build        the cells, run chapter by chapter, become a model
trial        one step of a small model, compared with tplab's, before training starts
"""

from tplab.capstone.own_layers.find import find_answers

__all__ = ["find_answers"]
