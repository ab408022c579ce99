"""A GPT built from the learner's answers.

find         reads the learner's library, my_tp
link         tables that say which exercises a model needs, and what is whose in it
adapt        thin wrappers for what the settings ask of the answers
build        loads the library on a rank and builds a model from it
trial        compares one step of a small model with tplab's before training starts
"""

from tplab.capstone.own_layers.find import find_answers

__all__ = ["find_answers"]
