"""Checkpoints that survive a kill at any moment, and other folders that are either complete or missing."""
