"""What to train and how, in one dataclass, read from presets, YAML files and flags.

settings     Settings: the model, how it is split over ranks, what is kept of the run
presets      settings to start from
io           settings from a YAML file and back
flags        settings from a command line
run_folder   what lies in the folder of a run, and whether a run there may continue
"""
