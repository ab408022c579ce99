"""The training text, from files on disk to the batch of a step."""
