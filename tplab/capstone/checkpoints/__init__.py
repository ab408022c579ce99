"""Checkpoints that survive a kill at any moment, and other folders that are written completely or not at all.

folders   folders that get their name once they're complete
writer    write and load a run's checkpoints
"""
