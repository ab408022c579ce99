"""A GPT made of the learner's own answers.

find         the answers in the learner's notebooks
check        answers that have passed their checks, and the checks of the others
link         tables of the answers that replace imports in later chapters
statements   the statements of the answers' cells that a model needs
adapt        thin wrappers where the interfaces of two chapters differ
build        a model, made by running the cells chapter by chapter
trial        one step of a small model, compared with tplab's, before training starts
"""

from tplab.capstone.own_layers.find import find_answers

__all__ = ["find_answers"]
