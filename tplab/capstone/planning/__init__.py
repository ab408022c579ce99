"""What the formulas of earlier chapters predict for a run, before its first step.

plan          the time, memory and bytes of one step, which the log keeps and the report compares with the run
predictions   memory and step time
traffic       the bytes that one step sends
"""
