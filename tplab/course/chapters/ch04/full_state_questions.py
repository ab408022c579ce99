"""What the check of exercise 4.5, load and save, looks at and asks."""

from tplab.course.chapters.ch04.master_weight import UNCHANGED
from tplab.course.checks import Question, changed, differs, has_kind

IN_PLACE = "the parameters are filled in place"
STILL_SHARDED = "the shards keep their tensor_parallel"
TRAINABLE = "the parameters need a gradient"
IS_DICT = "the result is a dict"
DETACHED = "the saved tensors are detached from autograd"
COPIED = "the saved tensors stay as they are when training goes on"
GLUED = "the shards put one after another along dimension 0"

LOAD_QUESTIONS = (
    Question(
        changed,
        "After loading, training goes on, and the dictionary changed with it. Is the parameter a copy, or "
        "does it share memory with the dictionary?",
    ),
    Question(
        lambda d: bool({IN_PLACE, STILL_SHARDED, TRAINABLE} & d.names),
        "The optimizer holds on to the parameter objects, and the attribute `tensor_parallel` sits on them. "
        "How do you change the numbers in a parameter without making a new one?",
    ),
    Question(differs("traffic"), "Every rank has the whole dictionary already. What is there to communicate?"),
    Question(
        lambda d: d.names == {"fused.weight"},
        "Only the fused weight is wrong. What does its `tensor_parallel` say beside the dimension?",
    ),
    Question(
        has_kind("column.weight", "other rank"),
        "A rank got the shard of another rank. Whose number decides, also inside a group?",
    ),
    Question(
        lambda d: UNCHANGED in d.kinds(),
        "Some parameters kept their old values. Which ones does your loop leave out, and why?",
    ),
)

SAVE_QUESTIONS = (
    Question(
        changed,
        "Saving changed the model. Which line writes into a parameter?",
    ),
    Question(differs(IS_DICT), "What does the function return, on every rank?"),
    Question(
        differs("names"),
        "Which names does the full state dict of one process have? Every parameter, once, under the name that "
        "`named_parameters` gives it.",
    ),
    Question(
        differs(DETACHED),
        "A checkpoint needs no gradients. Which call cuts a tensor off from autograd?",
    ),
    Question(
        differs(COPIED),
        "The dictionary changed when training went on, so it shares memory with the parameters. Which values "
        "did you not copy? Think of the replicated ones, and of p = 1.",
    ),
    Question(
        lambda d: has_kind("row.bias", "shape", "whole")(d) or has_kind("norm", "shape", "whole")(d),
        "A replicated parameter is whole on every rank already. What happens if its p copies are glued together?",
    ),
    Question(
        lambda d: has_kind("row.bias", "p times")(d) or has_kind("norm", "p times")(d),
        "A replicated parameter is whole on every rank already. Why add up its copies?",
    ),
    Question(
        lambda d: d.names == {"fused.weight"},
        "Only the fused weight is wrong: its shards were glued one after another. What does its "
        "`tensor_parallel` say beside the dimension?",
    ),
    Question(
        has_kind("row.weight", "shape", GLUED),
        "The row-parallel weight was cut along dimension 1. Along which dimension did you glue it?",
    ),
    Question(
        lambda d: bool(d.names) and d.names <= {"traffic"},
        "The numbers are right, the communication is not. One all-gather for each sharded parameter is "
        "enough, and a replicated one needs none.",
    ),
    Question(
        has_kind("column.weight", "part", "shape"),
        "Each rank has only its own shard. How does it get those of the others?",
    ),
)

WHOSE_GROUP = (
    "A group has its own ranks, numbered from 0, and its own size. Which call, of `get_rank`, `get_world_size` or a "
    "collective, was not given `group` and so used the default group of all ranks?"
)
LOAD_CRASH = (
    "Which parameter was it, and which two shapes met? A replicated parameter has no `tensor_parallel`, and a "
    "parameter that requires a gradient may be changed in place only under `torch.no_grad()`."
)
