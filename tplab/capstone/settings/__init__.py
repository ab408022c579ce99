"""The settings of a training run, in one dataclass that is read from presets, YAML files and flags."""
