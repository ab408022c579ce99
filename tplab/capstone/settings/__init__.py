"""The settings of a training run, in one dataclass that is read from presets, YAML files and flags.

settings     Settings: the model, how it is split over ranks, what the run saves
presets      settings to start from
io           settings from YAML files and flags
flags        the flags of the command line
run_folder   the folder of a run, and whether the run in it may continue
"""
