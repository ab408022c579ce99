"""The measurements that a report shows besides the run itself.

run           runs the study, measuring every missing part within a budget
parts         one function per part, which takes the measurements and summarizes them
programs      the short programs that the ranks run for a part
predictions   the memory and step time predicted by formulas from earlier chapters
traffic       the bytes that one step sends, predicted by a formula
"""

from tplab.capstone.study.run import Budget, study

__all__ = ["Budget", "study"]
