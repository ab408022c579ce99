"""Shared tools: a text corpus, units, safe file writes, and the import graph.

corpus    real text without a download
units     bytes, seconds and FLOPs as people write them, in one unit system
files     replace a file in one step; one process at a time
imports   which modules a module depends on
"""
