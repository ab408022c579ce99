"""What the check of exercise 15.4 states, and what it asks where a statement does not hold."""

from collections.abc import Callable
from typing import Any

from tplab.course.checks import Question

FOUND = "newest_checkpoint finds the newest one"
COMPLETE = "what is called a checkpoint is complete"
BESIDE = "the unfinished one lies in the folder"
GOES_ON = "the next save works"
EMPTY = "`write` is given an empty directory"
KEPT = "the newest ones are kept, and no leftovers"
OTHERS = "other files in the folder are left alone"
KILLS = "each of the kills"

CRASH = (
    "The folder may not be there yet, it may hold other files, and a directory that a killed save has left. Which line "
    "expects something else?"
)


def says(name: str, *words: str) -> Callable[[Any], bool]:
    return lambda d: name in d.names and any(word in d.text(name) for word in words)


QUESTIONS = (
    Question(
        lambda d: BESIDE in d.names,
        "`write` was given a directory outside of `folder`. A rename is one step only within one disk; from one to "
        "another it is a slow copy. Where should the unfinished directory lie?",
    ),
    Question(
        says(GOES_ON, "Exists", "not empty"),
        "The killed save has left its unfinished directory behind, and the next one finds it in its way. What does it "
        "do with it first?",
    ),
    Question(
        lambda d: EMPTY in d.names,
        "The directory that `write` was given held files of a killed save. With several ranks these may be shards of "
        "another run, and they become part of a checkpoint that looks complete. When does your function remove what a "
        "killed save has left?",
    ),
    Question(
        says(COMPLETE, "removes"),
        "An old checkpoint was being deleted, file by file, under its own name. How can its name be gone before the "
        "first of its files is?",
    ),
    Question(
        lambda d: COMPLETE in d.names,
        "Somebody who looks at the names now takes this directory for a checkpoint. Under which name should files be "
        "written while they are incomplete, and which single step gives them the right one?",
    ),
    Question(
        says(FOUND, "is gone"),
        "The process was killed when the old one was deleted already and the new one was not there yet. In which order "
        "do the two happen?",
    ),
    Question(
        says(FOUND, "1000000"),
        "Sorted as texts, step-1000000 comes before step-999990. By what are checkpoints sorted?",
    ),
    Question(
        says(FOUND, "not a Path"),
        "It is the right one, but a text. Whoever calls the function goes on with a path, its `.name` for one. What "
        "makes a `Path` of a text, or where did the path become one?",
    ),
    Question(
        lambda d: FOUND in d.names,
        "`newest_checkpoint` looks at what lies in the folder: complete checkpoints, an unfinished one, other files, "
        "with any dates. By what does it know a complete one, and by what the newest?",
    ),
    Question(
        lambda d: OTHERS in d.names,
        "Somebody else's file was deleted. Which names does your function make itself, and may delete?",
    ),
    Question(
        lambda d: KEPT in d.names,
        "After a save the folder holds the `keep` newest checkpoints, that of this step among them, and nothing that a "
        "killed save has left. What is too much in it, or missing?",
    ),
)
