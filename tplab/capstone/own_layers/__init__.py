"""A GPT built from the learner's answers, which are found in their library and loaded and tried out on each rank.

find    read the learner's library as data that can be sent to ranks
build   load it on a rank and build a GPT from it
"""

from tplab.capstone.own_layers.find import find_answers

__all__ = ["find_answers"]
