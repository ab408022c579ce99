"""Chapter 15: train a tensor-parallel GPT on this machine's GPUs, or on two CPU ranks, and report.

What is asked for
    settings        one dataclass: what is trained, how it is cut over ranks, what is kept
    presets         settings to start from
    reading, flags  settings from a YAML file and from a command line

The text
    text            the standard library's, or any folder's; what was skipped; what is held back
    tokenizer       a byte-pair tokenizer, trained on that text
    tokens          token files, made once; token_files: as they lie on the disk, checked before anybody trusts them
    batches         which tokens a step trains on: a function of its number
    folders         folders that are there whole or not at all, and that one process makes for all

The model
    layers          made of the course's layers, the learner's, torch's own, or of no parallel ones
    way             how a step has to treat it
    plain_gpt, dtensor_gpt    the same GPT in plain PyTorch, and on torch's own tensor parallelism
    mine            the learner's answers, found in their notebooks; mine_checks, mine_links, mine_build, mine_adapters,
                    mine_trial: how they become one program

The run
    train           the program that every rank runs; ranks: who this one is; step, optimizer, tally, evaluation, sample
    files           the folder of a run
    log, rows       what is written down; meter: what a step costs
    checkpoints     a kill at any moment leaves the last complete one; step_folders, manifest
    signals         asked to stop, a run saves first

Who looks at it
    command, lines  the program in a terminal (`python -m tplab.capstone`)
    panel           live in a notebook; panel_view, following
    study           what a report shows beside the run: other numbers of ranks, other layers; study_parts, measuring
    predictions     what the course's formulas say of it; traffic: its bytes
    report          one page
"""

from tplab.capstone.presets import PRESETS
from tplab.capstone.settings import Settings

__all__ = ["PRESETS", "Settings"]
