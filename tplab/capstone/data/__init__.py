"""The training text, from files on disk to each step's batch."""
