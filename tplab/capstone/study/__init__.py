"""The measurements that a report shows in addition to the run's log."""

from tplab.capstone.study.run import Budget, study

__all__ = ["Budget", "study"]
