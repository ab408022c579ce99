"""The measurements that a report shows besides the run itself.

run           the study, which measures every missing part within a budget
parts         a function for each part, which measures it and sums up the result
programs      the short programs that ranks run for a part
predictions   the memory and step time that earlier chapters' formulas predict
traffic       the bytes that one step sends, by formula
"""

from tplab.capstone.study.run import Budget, study

__all__ = ["Budget", "study"]
