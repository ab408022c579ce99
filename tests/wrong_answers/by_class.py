"""Wrong answers that are a reference answer with one line changed, by the class of the mistake.

The checks' shared driver sees these classes in every exercise: a dtype or a device that the code names itself, something
that one call leaves behind for the next, and tensors with gaps in memory.
"""

from tests.wrong_answers import WrongAnswer, chapter_of, swap_all
from tplab.course.notebooks.rewrite import keep_solution

Pairs = list[tuple[str, str]]  # the (old, new) of the reference answer
Changed = tuple[str, Pairs] | tuple[str, Pairs, str]  # exercise, pairs, and words of the message if not the usual ones


def changed(exercise: str, *pairs: tuple[str, str]) -> str:
    """The reference answer with each (old, new) swapped."""
    return swap_all(keep_solution(chapter_of(exercise).of_role("exercise")[exercise].text) + "\n", *pairs)


def empty(like: str, options: str) -> tuple[str, str]:
    return f"torch.empty_like({like})", f"torch.empty({like}.shape, {options})"


BUFFERS: dict[str, str] = {}
NAMES_FLOAT64: list[Changed] = [
    *((exercise, [empty(like, f"dtype=torch.float64, device={like}.device")]) for exercise, like in BUFFERS.items()),
]  # fmt: skip

NAMES_THE_CPU: list[Changed] = [
    *((exercise, [empty(like, f"dtype={like}.dtype")]) for exercise, like in BUFFERS.items()),
]  # fmt: skip


def half(tensor: str) -> str:
    """A tensor in float32 if it's bfloat16, and otherwise as it is: computed in float32, and not converted back."""
    return f"({tensor}).to(torch.float32 if ({tensor}).dtype == torch.bfloat16 else ({tensor}).dtype)"


WIDER = "torch.float32 if dtype == torch.bfloat16 else dtype"
ONLY_TWO = (
    "if {}.dtype not in (torch.float32, torch.float64):\n        raise TypeError('this dtype is not supported')\n    "
)
NOT_BFLOAT16: list[Changed] = [
]  # fmt: skip

LEAVES_SOMETHING: list[Changed] = [
("4.1", [("        out = F.linear(x,", "        outputs = vars(self).setdefault('outputs', {})  # by shape\n        out = outputs.get(x.shape)\n        if out is None:\n            out = outputs[x.shape] = F.linear(x,"), ("self.bias)  # [..., o/p]", "self.bias)")]),
]  # fmt: skip

CHANGES_THE_CALLERS: list[Changed] = [
    ("15.3", [("    norm = clip_grad_norm", "    micro_batches.clear()\n    norm = clip_grad_norm")], "wrote into micro_batches"),
]  # fmt: skip

COMBINES_OR_SKIPS: list[Changed] = [
    ("15.2", [("manual_seed(1_000_003 * seed + epoch)", 'manual_seed(abs(hash(f"{seed} {epoch}")))')], "Which line calls `hash`"),
    ("15.4", [("    write(unfinished)\n", "    try:\n        write(unfinished)\n    except OSError:\n        pass\n")], "the error reach the caller"),
]  # fmt: skip

WRONG_MESSAGE: list[Changed] = [
]  # fmt: skip

HAS_GAPS: list[Changed] = [
]  # fmt: skip

GIVES_BACK_THE_CALLERS: list[Changed] = [
]  # fmt: skip

IN_EVALUATION: list[Changed] = [
]  # fmt: skip

IN_EVAL_MODE: list[Changed] = [
]  # fmt: skip

OF_A_LEAF: list[Changed] = [
]  # fmt: skip

ROUNDS_OR_SATURATES: list[Changed] = [
]  # fmt: skip

ZERO_TIMES_INFINITY: list[Changed] = [
]  # fmt: skip

LEAVES_OUT_A_CASE: list[Changed] = [
]  # fmt: skip

SIZES_AND_LAYOUTS: list[Changed] = [
]  # fmt: skip

HELD_TOO_LONG: list[Changed] = [
]  # fmt: skip

CLASSES = (
    ("does something else under no_grad", IN_EVALUATION, "nothing needs a gradient, just like during evaluation"),
    ("does something else in eval mode", IN_EVAL_MODE, "the module is in eval mode"),
    ("asks whether its input is a leaf", OF_A_LEAF, "Which line checks x.is_leaf"),
    ("rounds, or stops at a limit", ROUNDS_OR_SATURATES, ""),
    ("multiplies an infinity by zero", ZERO_TIMES_INFINITY, "What is 0 times infinity"),
    ("leaves out a case", LEAVES_OUT_A_CASE, ""),
    ("is wrong for other sizes and layouts", SIZES_AND_LAYOUTS, ""),
    ("keeps or changes what isn't its own", HELD_TOO_LONG, ""),
    ("names float64 itself", NAMES_FLOAT64, "Which line hardcodes a dtype"),
    ("only knows float32 and float64", NOT_BFLOAT16, "in bfloat16"),
    ("makes or moves a tensor on the CPU", NAMES_THE_CPU, "your code should run on GPUs"),
    ("leaves something behind for the next call", LEAVES_SOMETHING, "keeps its value between calls"),
    ("changes what is the caller's", CHANGES_THE_CALLERS, ""),
    ("forgets a combination or an edge", COMBINES_OR_SKIPS, ""),
    ("is asked about its own mistake", WRONG_MESSAGE, ""),
    ("gives back the caller's memory on one rank", GIVES_BACK_THE_CALLERS, "Which call always allocates new memory"),
    ("writes into a copy", HAS_GAPS, "works when the same values are stored in contiguous tensors"),
)
WRONG = [
    WrongAnswer(exercise, name, changed(exercise, *pairs), words[0] if words else usual)
    for name, answers, usual in CLASSES
    for exercise, pairs, *words in answers
]
