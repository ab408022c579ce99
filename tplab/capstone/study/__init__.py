"""The measurements that a report shows besides the run itself.

run           runs the study, measuring every missing part within a budget
parts         one function per part, which takes the measurements and summarizes them
programs      the short programs that the ranks run for a part
"""

from tplab.capstone.study.run import Budget, study

__all__ = ["Budget", "study"]
