"""The checks, prediction questions and tables of symptoms (what a learner may see, and its cause) of all chapters.

The package chNN belongs to chapter NN, and the package `start` belongs to the start page.
"""
