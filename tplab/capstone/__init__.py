"""Chapter 15: train a GPT or a Llama on many GPUs, or on this machine's CPU, and report on the run.

settings       what to train and how
data           text, tokenizer, token files, batches
model          what a step needs to know about a model
own_layers     a GPT built from the learner's answers
planning       time, memory and traffic of a step, predicted from the settings
training       the program that every rank runs
checkpoints    checkpoints that survive a kill at any moment
writing        text generation with a run's newest checkpoint: `sample(folder, prompt)`
study          measurements of this machine and with different numbers of ranks
report         a one-page report on the run and the study
learners_loop  the training loop of the notebook and of the learner's train.py
naive          the functions that the loop calls, as a first attempt would have them
own_run        the learner's layers in this loop, and a plug that somebody pulls
words          numbers and lists as text
celebration    a poster of the trained model, and a card to show around
command        training runs from a terminal (`python -m tplab.capstone`)
"""

from tplab.capstone.settings.io import PRESETS
from tplab.capstone.settings.settings import Settings
from tplab.capstone.writing import sample

__all__ = ["PRESETS", "Settings", "sample"]
