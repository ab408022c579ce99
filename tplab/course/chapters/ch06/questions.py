"""What the checks of both attentions, exercises 6.2 and 6.4, ask when one is wrong, and what they must refuse."""

from collections.abc import Mapping, Sequence
from typing import Any

from tplab.course.chapters.ch06 import plain
from tplab.course.chapters.ch06.attentions import GRADIENTS
from tplab.course.chapters.ch06.references import BIAS_P_TIMES, PARTIAL
from tplab.course.checks import INPUTS_QUESTION, Claim, Observed, Question, has_kind, has_no_gradient, run_ranks, verify

REFUSED = "heads that can't be shared out evenly are refused"

COMMON_QUESTIONS = (
    INPUTS_QUESTION,
    Question(
        has_kind("out", "none", "type", "structure"),
        "What does forward return? One tensor [b, s, h], the sum over all ranks with its bias.",
    ),
    Question(
        has_kind("out", plain.BY_H),
        "By what are the scores divided? A score is the product of two vectors of d numbers, however many heads and "
        "ranks there are.",
    ),
    Question(
        has_kind("out", plain.OVER_QUERIES),
        "For each query the weights of all keys add up to 1. Which dimension of the scores counts keys?",
    ),
    Question(
        has_kind("out", PARTIAL),
        "Each rank has one summand, that of its own heads. Which layer adds them up, and is it that layer you use for "
        "`out`?",
    ),
    Question(
        lambda d: has_kind("out", "p times")(d) and "forward traffic" in d.names,
        "The output is summed over the ranks more than once. `self.out` adds up already, by its g. Which line of yours "
        "adds up again?",
    ),
    Question(has_kind("out", BIAS_P_TIMES), "How many times is the last bias added?"),
    Question(
        lambda d: "out" in d.names and has_no_gradient("dWo")(d),
        "The weight of `out` gets no gradient. Which line calls `self.out`, and is its result what you return?",
    ),
    Question(
        has_no_gradient(*GRADIENTS),
        "A parameter gets no gradient. Which line does autograd not know about?",
    ),
    Question(
        lambda d: "dx" in d.names and has_kind("backward traffic", "no traffic", "traffic")(d) and "out" not in d.names,
        "dx must be the sum over all ranks, taken once: that is f. Does it stand in front of the fused product, and "
        "nowhere else?",
    ),
    Question(
        lambda d: bool(d.names) and all("traffic" in name for name in d.names),
        "The numbers are right, the communication is not. Which call gathers, scatters or sums what could stay "
        "where it is? One f stands in front of q, k and v together.",
    ),
    Question(
        lambda d: "out" not in d.names and bool({"dx", *GRADIENTS} & d.names),
        "The output is right, a gradient is not. Which part of the forward pass is cut off from autograd, or summed "
        "over the wrong ranks?",
    ),
    Question(
        lambda d: "out" in d.names and not has_kind("out", "zeros")(d),
        "Q, K and V of this rank's heads; attend; merge; the row-parallel layer; nothing before it and nothing after "
        "it. Where does your order of steps differ? Try p = 1 by hand first.",
    ),
)


def refuses(attention_class: Any, sizes: Sequence[tuple[int, ...]]) -> list[Observed]:
    """On a rank: what happens to heads that p ranks can't share out evenly."""
    seen: list[Observed] = []
    for each in sizes:
        try:
            attention_class(*each)
        except ValueError:
            seen.append({REFUSED: Claim("")})
        except AssertionError:
            seen.append({REFUSED: Claim("an AssertionError was raised, not a ValueError")})
        else:
            seen.append({REFUSED: Claim("the attention was built, without a ValueError")})
    return seen


def check_refusal(number: str, attention_class: Any, p: int, asks: Mapping[tuple[int, ...], str]) -> None:
    """`asks`: sizes that must be refused on p ranks, and what to ask where they are not."""
    name = getattr(attention_class, "__name__", "attention")
    notes = [f"{name}({', '.join(map(str, sizes))})" for sizes in asks]
    runs = run_ranks(refuses, p, attention_class, list(asks), note=" and ".join(notes))
    for i, (note, ask) in enumerate(zip(notes, asks.values(), strict=True)):
        seen = [run[i] for run in runs]
        verify(number, p, seen, [{}] * p, questions=[Question(lambda d: True, ask)], note=note)
