"""Checkpoints that survive a kill at any moment.

writer               write a checkpoint, also while training continues; load the newest complete one
manifest             the files of a checkpoint with their sizes and SHA-256
checkpoint_folders   one folder per checkpoint, renamed when it is complete
atomic_folders       folders that exist completely or not at all, made by one process for all
"""
