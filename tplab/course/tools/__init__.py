"""The commands of `tplab`, a file for each; cli.py only dispatches to them.

A command is a module with two functions:

    add(commands)            its parser among argparse's subparsers, with `run` as the default of `run`
    run(options, console)    carry it out; returns the exit code; raises places.Misuse with a sentence for the user

Nothing here imports torch, so every answer that needs no ranks comes at once.

places        the course's folder, its chapters, their files
check         tplab check
progress      tplab progress; its pieces: standing (what is known of each exercise), state (what `tplab check` said),
              fingerprint (for exactly which code), page (the same in JupyterLab)
hint          tplab hint
solution      tplab solution
reset         tplab reset
lab           tplab lab, which `make lab` runs
doctor        tplab doctor, a package
plan          tplab plan
"""
