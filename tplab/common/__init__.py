"""Shared tools: a text corpus, units, safe writes, gradient notes, and the import graph.

corpus            real text without a download
cores             how many cores this process can use
downloads         recognize git-lfs pointers, and empty or truncated files
units             format bytes, seconds and FLOPs with units, consistently
files             replace a file atomically; let only one process at a time into a block
imports           which modules a module depends on
taken_gradients   who reduces a parameter's gradients, and which gradients aren't in `.grad`
"""
