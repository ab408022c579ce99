"""Judge the answers in a learner's notebook. `tplab check` and `tplab grade` are built on this room.

answers           find the answers in a notebook and merge them into the reference (the executed solution)
needs             select the cells that must run for an exercise
run               run nbval in a separate process, with limits on time and memory
nbval_plugin      nbval's pytest plugin with its bugs fixed; the notebook's kernel is its child
in_kernel         prepare this kernel
check_notebook    turn the results into a verdict on each exercise
terminal          print the verdicts in a terminal
submissions       find the notebooks of a class in a folder
many              check the notebooks of a class in parallel
report            write a CSV file and a page per student
"""
