"""Feedback that a learner reads after a check.

verdict      passed or failed, as text or as a box in the notebook
tracebacks   error reports shortened to the learner's own lines of code
waiting      a calm box for what the learner hasn't written yet, on a notebook page
hints        the three hints of each exercise
"""
