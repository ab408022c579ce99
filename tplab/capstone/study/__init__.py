"""Everything a report shows besides the run itself.

run           measure every part that is missing, within a budget
parts         what each part measures, and what it makes of it
programs      a few steps, watched closely: what the ranks do for a part
predictions   what the formulas of earlier chapters say about a run
traffic       the bytes that one step sends, by formula
"""

from tplab.capstone.study.run import Budget, study

__all__ = ["Budget", "study"]
