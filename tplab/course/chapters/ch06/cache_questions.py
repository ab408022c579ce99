"""What the check of exercise 6.5, the KV cache, asks when an answer is wrong."""

from collections.abc import Callable

from tplab.course.chapters.ch06 import plain
from tplab.course.chapters.ch06.generation import (
    ALL_TURNED,
    FORGETFUL,
    FROM_ZERO,
    NO_TURNS,
    OTHER_BASE,
    TILED,
    TOO_LATE,
    UNTURNED,
)
from tplab.course.checks import INPUTS_QUESTION, Differences, Question, has_kind

IN_PLACE = "append writes into the memory that the cache was made with"
VIEWS = "what append returns are views of that memory"
OVERFLOW = "more tokens than there is room for are refused with a ValueError"
UNTOUCHED = "a refused append writes nothing"
FULL = "the last places can be filled"
ONE_MEMORY = "keys and values in one and the same memory"

BUILD_CRASH = (
    "The cache has `keys` and `values` [b, m, max_length, d] and a number `length`. m and d are `attention.kv_heads` "
    "and `attention.head_dim`; append gets [b, m, s, d]. Write the shape of the slice that you write next to the line."
)
STEP_CRASH = (
    "Write the shape next to each line: x [b, s, h]; q [b, n, s, d], k and v [b, m, s, d]; from the cache k and v "
    "[b, m, t, d], t tokens in all; for attend as many heads of k and v as of q."
)


def on_any_out(*kinds: str) -> Callable[[Differences], bool]:
    """One of the outputs is one of these."""

    def fits(d: Differences) -> bool:
        return any(has_kind(name, *kinds)(d) for name in d.names if name.startswith("out"))

    return fits


CACHE_QUESTIONS = (
    INPUTS_QUESTION,
    Question(
        lambda d: ONE_MEMORY in d.text("memory"),
        "`keys` and `values` are two names for one tensor: `[tensor] * 2` makes no second one. What becomes of the "
        "keys when the values are written?",
    ),
    Question(
        lambda d: "memory" in d.names,
        "Each rank keeps the heads of K and V that it holds, `attention.kv_heads` of them, in the dtype of the "
        "attention's weights, for max_length tokens. Which of these sizes is another, and what would it cost?",
    ),
    Question(
        lambda d: "length at first" in d.names,
        "How many tokens are in a cache that has just been made?",
    ),
    Question(
        lambda d: IN_PLACE in d.names,
        "The room was there from the start. Which line makes new tensors instead of writing into it? A cache that is "
        "concatenated anew for every token is copied, whole, for every token.",
    ),
    Question(
        lambda d: "length" in d.names,
        "How many tokens are there after an append of 3 and one of 2?",
    ),
    Question(
        lambda d: bool({"keys so far", "values so far"} & d.names),
        "append returns all keys and values so far, [b, m, length, d]: the old ones in front, then the new ones, none "
        "of the empty room. Which slice did you write, which do you return, and had `length` grown in between?",
    ),
    Question(
        lambda d: VIEWS in d.names,
        "A slice of a tensor is a view: it costs nothing. Which call copies all keys so far at every step?",
    ),
    Question(
        lambda d: OVERFLOW in d.names,
        "5 tokens are there, 3 more come, and there is room for 7. A slice that ends after the end is simply shorter: "
        "who notices? Compare before you write, and name the numbers.",
    ),
    Question(
        lambda d: UNTOUCHED in d.names,
        "The ValueError comes too late: something was written or counted before it. What comes first?",
    ),
    Question(
        lambda d: FULL in d.names,
        "5 tokens are there, 2 more come, and there is room for 7: they fit, and the cache is full. How many are too "
        "many: as many as `max_length`, or more?",
    ),
)

STEP_QUESTIONS = (
    INPUTS_QUESTION,
    Question(
        on_any_out(FROM_ZERO),
        "The first piece is right, and then the positions begin at 0 again. Who knows how many tokens came before?",
    ),
    Question(
        on_any_out(TOO_LATE),
        "The positions begin where the cache ends *after* this step. When do you ask for `cache.length`?",
    ),
    Question(
        on_any_out(UNTURNED, NO_TURNS),
        "Queries and keys are turned to their positions, and a key is turned once, before it is kept. Which call of "
        "`rotate` is missing?",
    ),
    Question(
        on_any_out(OTHER_BASE),
        "The angles are those of another base. Which argument of `rotary_angles` says how fast they grow, and which "
        "base has this attention?",
    ),
    Question(on_any_out(ALL_TURNED), "Rotary positions are for scores. Which of q, k and v are in the scores?"),
    Question(
        on_any_out(FORGETFUL),
        "The queries see the keys of this piece only. What does `append` return, and what do you hand to attend?",
    ),
    Question(
        on_any_out(TILED),
        "Head i of q belongs to head i // (n / m) of k. Does `repeat` give k0 k1 k0 k1 or k0 k0 k1 k1?",
    ),
    Question(
        on_any_out(plain.TOP_LEFT),
        "The mask has its triangle at the top left: it is made from the new tokens' number alone, as if they were the "
        "first ones. Your attend of exercise 6.1 knows better.",
    ),
    Question(
        on_any_out(plain.NO_MASK),
        "Several tokens come in one piece here: may the first of them look at the second? Generation is causal.",
    ),
    Question(
        lambda d: bool(d.names) and all(name.startswith("traffic") for name in d.names),
        "The numbers are right. Keys and values never leave their rank: which line sends more than the one sum of "
        "b·s·h that `out` brings with it?",
    ),
    Question(
        lambda d: "length" in d.names,
        "Each piece is appended once. How many tokens does your cache hold after a text of 6?",
    ),
    Question(
        lambda d: any(name.startswith("out") for name in d.names) and not d.malformed,
        "In order: q, k, v of the new tokens; turn q and k to their positions; append k and v; as many heads of k and "
        "v as of q; attend, causal; merge; `attention.out`. Where does your order differ? Begin with the first piece, "
        "with p = 1.",
    ),
)
