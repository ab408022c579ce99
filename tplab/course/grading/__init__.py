"""`tplab check`: run the learner's answers in the reference chapter, using nbval.

merge               find the answers in the learner's notebook, and put them in place
cell_dependencies   select the cells that must run for an exercise
run                 run nbval in a separate process
nbval_plugin        nbval with its bugs fixed
handover            take the answers out of the notebook's kernel
clean_check         the process in which checks run; no cell has run in it
check_notebook      a verdict on each exercise
check_output        terminal output
"""
