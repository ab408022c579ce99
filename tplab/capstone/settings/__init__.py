"""The settings of a training run, in one dataclass that is read from presets, YAML files and flags.

settings     the Settings: the model, how it's split over ranks, what the run saves
presets      settings to start from
io           reads settings from YAML files and command-line flags
run_folder   the folder of a run, and whether the run in it may continue
"""
