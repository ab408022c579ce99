"""This package produces the feedback that a learner reads after a check.

verdict      show whether the answer passed or failed, as text or as a box in the notebook
tracebacks   trim error reports down to the learner's own lines of code
waiting      show an unobtrusive box on a notebook page if the learner hasn't solved an exercise yet
hints        find and show the three hints of each exercise
"""
