"""`tplab check`: run the learner's answers inside the reference notebook (the executed solution), using nbval.

merge               find the answers in the learner's notebook and merge them into the reference
cell_dependencies   select the cells that must run for an exercise
run                 run nbval in a separate process
nbval_plugin        nbval's pytest plugin with its bugs fixed
handover            take the answers out of the notebook's kernel
clean_check         run each check in a clean process, where no notebook cell has run
check_notebook      turn the results into a verdict on each exercise
check_output        print the verdicts in a terminal
"""
