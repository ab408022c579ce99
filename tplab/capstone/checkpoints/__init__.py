"""Checkpoints that survive a kill at any moment.

writer               writes a checkpoint, even while training continues; loads the newest complete one
manifest             the list of a checkpoint's files, with their sizes and SHA-256
checkpoint_folders   one folder per checkpoint, renamed when it is complete
atomic_folders       folders that are either complete or missing, created by one process on behalf of all
"""
