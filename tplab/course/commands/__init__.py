"""The `tplab` commands, one file each. cli.py only dispatches to them.

A command is a module with two functions:

    add(commands)            adds its parser to argparse's subparsers and sets its default run=run
    run(options, console)    runs it and returns the exit code; raises Misuse with a message for the user

Nothing here imports torch, so commands that don't need ranks respond immediately.

cli               finds the command that was typed, and shows its errors
check             tplab check (see course.grade)
progress          tplab progress
hint              tplab hint
solution          tplab solution
reset             tplab reset
start             tplab start, which makes the learner's folder (see course.learn)
update            tplab update
mine              tplab mine
grade             tplab grade (see course.grade)
lab               tplab lab, which `make lab` runs
doctor            tplab doctor
plan              tplab plan
exercise_status   each exercise's status
state             the verdicts of `tplab check`, and the code that they apply to
"""
