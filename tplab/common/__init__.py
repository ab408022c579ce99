"""Shared tools: a text corpus, units, safe file writes, and the import graph.

corpus    real text without a download
cores     how many cores there are to compute with
units     format bytes, seconds and FLOPs with units, consistently
files     replace a file atomically; let only one process at a time into a block
imports   which modules a module depends on
"""
