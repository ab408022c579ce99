"""Build a chapter's two notebooks from its source.

source          read solutions/NN_name.py into cells, and find out what a cell binds and uses
ipython_syntax  translate IPython's syntax in a cell to Python
rules           the rules that a chapter's source must follow
mistakes        read the tables of known mistakes
pictures        find the moving pictures that the text shows, and copy them
rewrite         remove the answers and fold the hints
kernels         start a kernel that runs a chapter
outputs         execute a solution and store its outputs
build           write both notebooks if they are stale
hosted          the start page for Kaggle and Colab, which installs the wheel
cells           read a notebook file, whatever state it is in
numbering       how notebooks and exercises are named and ordered
reference       find a chapter's executed solution
"""
