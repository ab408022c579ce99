"""What several rooms need: text to train on, numbers in words, safe files, and the graph of imports.

corpus    real text without a download
units     bytes, seconds and FLOPs as people write them, in one unit system
files     replace a file in one step; one process at a time
imports   which modules a module depends on
"""
