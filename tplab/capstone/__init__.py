"""Chapter 15: train a tensor-parallel GPT on this machine's GPUs or CPU, and report on the run.

settings      what to train and how
data          text, tokenizer, token files, batches
model         the GPTs that ours is compared with
own_layers    a GPT made of the learner's answers
training      the program that every rank runs
checkpoints   saved steps that survive a kill at any moment
watching      a view of a run, in a terminal or live in a notebook
study         measurements with other numbers of ranks and other layers
report        one page about all of it
command       training runs from a terminal (`python -m tplab.capstone`)
"""

from tplab.capstone.settings.presets import PRESETS
from tplab.capstone.settings.settings import Settings

__all__ = ["PRESETS", "Settings"]
