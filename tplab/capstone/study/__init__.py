"""The measurements that a report shows in addition to the run's log.

run   train on a single rank for comparison, and time the run on fewer ranks
"""

from tplab.capstone.study.run import Budget, study

__all__ = ["Budget", "study"]
