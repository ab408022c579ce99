"""`tplab check`: the learner's answers in the reference chapter, run by nbval.

merge               find the answers in the learner's notebook, and put them in place
cell_dependencies   which cells have to run for an exercise
run                 run nbval in a process of its own
nbval_plugin        nbval, with its faults repaired
handover            take the answers out of the notebook's kernel
clean_check         the process in which checks run; no cell has run in it
check_notebook      a verdict for each exercise
check_output        what the terminal shows
"""
