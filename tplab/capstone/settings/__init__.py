"""The settings of a training run, in one dataclass that is read from presets, YAML files and flags.

settings     the dataclass `Settings`
io           presets, YAML files and flags
run_folder   the files in a run's folder, and whether the run may continue with other settings
"""
