"""What the formulas of earlier chapters predict for a run, before its first step.

predictions   a step's memory and time
traffic       a rank's calls and bytes in a step
"""
