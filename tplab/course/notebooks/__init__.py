"""From a chapter's source to its two notebooks.

source    read solutions/NN_name.py into cells
rules     what a chapter must hold
rewrite   take the answers out, fold the hints
kernels   start a kernel that runs a chapter
outputs   execute a solution, and store what its cells show
build     write both notebooks where they are stale
cells     read a notebook file, whatever has become of it
"""
