"""Benchmarks that compare tplab with other libraries, side by side in one run. `make bench` prints the tables."""
