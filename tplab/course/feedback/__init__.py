"""Feedback that a learner reads after a check.

verdict      passed or failed, as text and as a box in the notebook
tracebacks   error reports reduced to the learner's own lines
hints        the three hints of an exercise
"""
