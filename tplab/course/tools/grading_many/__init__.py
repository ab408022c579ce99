"""The parts of `tplab grade`, which checks a folder of students' notebooks.

submissions   find the students and their notebooks in a folder, and copy one of them
limits        the limits of one check, and the means of the operating system that enforce them
worker        the process that checks one notebook; it limits itself first
jobs          run workers in parallel, watch what they use, and end everything they started
store         verdicts by the hash of a submission, so that a second run only checks new submissions
report        the CSV file and the pages

../grade.py is the command. The check itself is check_notebook, the same as in `tplab check`.
"""
