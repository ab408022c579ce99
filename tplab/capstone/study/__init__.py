"""The measurements that a report shows besides the run itself: `study` takes all that are missing, within a budget."""

from tplab.capstone.study.run import Budget, study

__all__ = ["Budget", "study"]
