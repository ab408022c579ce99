"""The machinery of the course: checks, predictions, tables of symptoms, the build of the notebooks, `tplab check`.

A chapter's notebook uses four of them:

    check("4.1", answer)         run an exercise's check
    predict("4.a", calls=1)      compare a prediction
    show_failure()               run a program that is wrong on purpose
    symptoms(4)                  what you see, what it is
"""

from tplab.course.checking import check
from tplab.course.failures import show_failure
from tplab.course.predictions import predict
from tplab.course.symptoms import symptoms

__all__ = ["check", "predict", "show_failure", "symptoms"]
