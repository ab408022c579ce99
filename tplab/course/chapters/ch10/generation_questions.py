"""What the check of exercise 10.4 asks when a token, a text, or what was sent for it is wrong."""

from tplab.course.chapters.ch10.scripted import CALLS
from tplab.course.checks import Question, has_kind, kind_is

LITTLE = "only a few numbers for each token travel"

CRASH = (
    "logits are this rank's [b, v/p]. Which shape and which dtype has each tensor that you send, and is it contiguous?"
)
GENERATE_CRASH = (
    "text grows by one column [b, 1] in each step, and the model gives logits [b, s, v/p] for the s tokens that it "
    "was given. Which of them is the next token chosen from?"
)
CHANGED = Question(
    lambda d: "changed" in d.kinds(),
    "The logits and the prompt belong to the caller. `dist.all_reduce`, and functions of torch with a `_` at their "
    "end, write into the tensor they are given. Which of yours gets the caller's?",
)


def _ask(name: str, ask: str, *kinds: str) -> Question:
    return Question(has_kind(name, *kinds), ask)


def _all_ranks(ask: str, *kinds: str) -> Question:
    return Question(kind_is("ids", *kinds), ask)


def best_questions(note: str) -> list[Question]:
    """What to ask about a wrong choice in one scene."""
    special = {
        "equal logits": "Several ids have the largest logit here, on one rank or on several. All ranks take the "
        "lowest of these ids. Which one do yours take, and do all take the same?",
        "negative logits, and zeros in the padding": "All real logits are far below 0 here, and the padding holds "
        "zeros. What keeps the padding from being chosen? (The shard of a rank begins at its rank times its width.)",
        "a vocabulary so small that rank 0 holds all of it": "Some ranks hold nothing but padding here. What do they "
        "offer, and can it win?",
        "logits in bfloat16": "The same logits in bfloat16, which has 8 bits for the digits of a number: 256 + 1 is "
        "256 there. In which dtype do your ids travel?",
    }
    return [
        CHANGED,
        _ask(
            "ids",
            "The result is a tensor of ids [b], int64. What does yours return?",
            "none",
            "type",
            "structure",
            "dtype",
        ),
        _ask("ids", "The result has one id for each text, [b]. Which dimension is left over or missing?", "shape"),
        *([Question(lambda d: "ids" in d.names, special[note])] if note in special else []),
        _all_ranks(
            "Each rank has chosen for itself. Which of the ranks holds the largest logit of all, and how do the "
            "others learn of it?",
            "this rank's own best, as an id of the whole vocabulary",
            "this rank's own best, as a place in its shard",
        ),
        _ask(
            "ids",
            "Place 3 in the shard of rank 1 is not id 3. Which id does the shard of a rank begin with?",
            "the right place, but in the shard: the ids of the ranks before are not counted",
        ),
        _ask(
            "ids",
            "The padding was chosen. Which logits are those of real ids?",
            "the id of the largest logit, the padding included",
        ),
        _ask(
            "ids",
            "Only the ranks that hold the largest logit may offer an id. What do the others put in?",
            "every rank's best id, the largest of them",
            "the sum of the ranks' choices",
        ),
        Question(
            lambda d: LITTLE in d.names and "ids" not in d.names,
            "The right ids, but too much was sent for them. How many of a rank's logits can be the largest of all?",
        ),
        Question(
            lambda d: True,
            "Every rank has one candidate: its largest logit and its id. By which rule does one of p win?",
        ),
    ]


GENERATE_QUESTIONS = [
    CHANGED,
    _ask(
        "text",
        "The result is a tensor of ids [b, s + max_new_tokens]. What does yours return?",
        "none",
        "type",
        "structure",
    ),
    _ask("text", "The result is the whole text, with its prompt.", "the new tokens alone, without their prompt"),
    _ask(
        "text",
        "How many tokens are wanted, and how many steps does your loop make?",
        "the text with one token too many",
        "the text with one token too few",
    ),
    _ask(
        "text",
        "`past` says at which place of the text the first of `ids` stands. What is it in the second call?",
        "what is written when the places begin at 0 again in each call",
    ),
    Question(
        lambda d: LITTLE in d.names and d.names <= {LITTLE},
        "The right text, but too much was sent for it. Does `generate` use `best_token`, and what else does it send?",
    ),
    Question(
        lambda d: CALLS in d.names,
        "Each token is read once: its keys and values are in the cache then, at the places past, past + 1, ... Which "
        "tokens do you hand to the model in the second step, with which `past`, and with which cache? And is the last "
        "new token read, though nobody asks for what follows it?",
    ),
    Question(
        lambda d: True,
        "The next token is chosen from the logits of the last place. Which place do you take, and from which texts of "
        "the batch?",
    ),
]
