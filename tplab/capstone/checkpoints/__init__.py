"""Checkpoints that survive a kill at any moment, and other folders that are written completely or not at all."""
