"""The learner's own folder, with their copies of the chapters, which updates never overwrite, and their library my_tp.

course_files      find the course's material, the learner's folder, and the files of each chapter
pristine          rebuild a chapter in its original state, and keep dated copies of files that are about to change
start             make the folder; move in what was done in chapters/ before
update_notebook   bring a new version of a chapter into a notebook, cell by cell
moved_answers     carry answers over to exercises that have a different number now
passages          extract an answer, with the imports and helpers that it uses, as plain Python
library           the answers that passed, which grow into the package my_tp with each exercise
my_tp             write the text of the package's files
given_code        copy the course's code that the package needs
from_page         add an answer to the library as soon as it passes in JupyterLab
"""
