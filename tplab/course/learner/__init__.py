"""The learner's own ground: a folder with their copies of the chapters, which updates never overwrite.

course_files      the course's material and the learner's folder, and the files of each chapter
pristine          a chapter in its original state, and dated copies of what is about to change
start             make the folder; move in what was done in chapters/ before
update_notebook   bring a new version of a chapter into a notebook, cell by cell
library           the package my_tp, which grows with each exercise that passes
passages          an answer, with the imports and helpers that it uses, as plain Python
statements        the statements of cells that an answer needs
borrow            what my_tp takes from the course in place of an answer that is not written yet
"""
