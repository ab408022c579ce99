"""The learner's own ground: a folder with their copies of the chapters, which updates never overwrite.

course_files      the course's material and the learner's folder, and the files of each chapter
pristine          a chapter in its original state, and dated copies of what is about to change
start             make the folder; move in what was done in chapters/ before
update_notebook   bring a new version of a chapter into a notebook, cell by cell
"""
