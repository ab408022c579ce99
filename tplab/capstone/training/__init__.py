"""The program that every rank runs: `train`."""

from tplab.capstone.training.loop import train

__all__ = ["train"]
