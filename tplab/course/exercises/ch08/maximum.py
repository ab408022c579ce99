"""The check for exercise 8.1, the largest logit of each token over the columns of all ranks."""

from typing import Any

import torch

from tplab.course import checks
from tplab.course.exercises.ch08.sharded import CASES, SHAPE, WHOSE_GROUP, Logits, Sample, draw, give
from tplab.runtime import device, record

EMPTY = "m of logits that are all -inf"
STAYS = "m stays the same during a later call"
CONSTANT = "m is a constant for autograd"
_OWN = "the largest of this rank's own columns"
_SUM = "the sum of the ranks' maxima"
_MEAN = "the mean of the ranks' maxima"
_SMALLEST = "the smallest of the ranks' maxima"
_RANK_0 = "the largest of rank 0's columns"
_ABSOLUTE = "the largest absolute value"
_FILLED = "the right one, or -10,000 where that is larger"
_KEPT = "the right one with one more dimension of size 1"
_ALL_TOKENS = "the largest logit of all tokens"


def run(answer: Any, case: Logits, given: Sample, group: Any) -> checks.Observed:
    logits = given.logits.to(device()).requires_grad_()
    snapshot = checks.Snapshot(logits=logits)
    with record() as section, checks.called_as(f"vocab_max(logits {list(logits.shape)}, group)"):
        out = answer(logits, group)
    kept = checks.portable(out)
    nothing = answer(torch.full_like(logits, -torch.inf), group)
    stays = not isinstance(out, torch.Tensor) or torch.equal(out, kept)
    constant = not (isinstance(out, torch.Tensor) and out.requires_grad)
    return {
        "out": kept,
        **({EMPTY: nothing} if case.columns == 1 else {}),  # a late case, so that other mistakes are reported first
        STAYS: checks.Claim("" if stays else "a call with other logits of the same shape has overwritten it"),
        "traffic": checks.traffic(section),
        "inputs unchanged": snapshot.changed(),
        CONSTANT: checks.Claim("" if constant else "autograd follows it back to the logits"),
    }


def expect(case: Logits, sample: Sample, place: checks.Place) -> checks.Expected:
    right = sample.logits.amax(-1)
    maxima = torch.stack([shard.amax(-1) for shard in sample.shards])  # [p, ...]
    alike = {_KEPT: right.unsqueeze(-1), _ALL_TOKENS: right.max()}
    if place.size > 1:
        alike |= {
            _OWN: maxima[place.index],
            _RANK_0: maxima[0],
            _SUM: maxima.sum(0),
            _MEAN: maxima.mean(0),
            _SMALLEST: maxima.amin(0),
        }
    alike |= {_ABSOLUTE: sample.logits.abs().amax(-1), _FILLED: right.clamp(min=-1e4)}
    nothing = {EMPTY: torch.full_like(right, -torch.inf)} if case.columns == 1 else {}
    traffic = place.traffic(("all_reduce", right.numel()))
    return checks.Expected({"out": right, **nothing, "traffic": traffic}, {"out": alike})


CRASH = "Write the shapes: logits [.., v/p], and its maximum over the last dimension, [..]. Which line fails?"

QUESTIONS = (
    checks.INPUTS_QUESTION,
    checks.Question(
        CONSTANT,
        "Later exercises subtract m from every logit and add it back, so no gradient may flow through it. What did the "
        "line above `def` do about that?",
    ),
    checks.Question(
        lambda d: d.names == {STAYS},
        "The first result was right until your function was called again. A program may still need it then. Does each "
        "call create a new tensor for its result, or do several calls share one?",
    ),
    checks.Question(
        lambda d: d.names == {EMPTY},
        "If every logit of a token is -inf, the largest one is -inf, too. Which of your lines replaces -inf with a "
        "finite number?",
    ),
    checks.Question(
        checks.has_kind("out", "structure", "type", "none"),
        "One tensor [..] comes out. (torch.max(dim=...) returns values and indices; logits.amax(dim) returns values. "
        "dist.all_reduce returns None.)",
    ),
    checks.Question(
        checks.has_kind("out", _KEPT, _ALL_TOKENS), "One number for each token: over which dimension is the maximum?"
    ),
    SHAPE,
    checks.Question(
        lambda d: d.p > 1 and "out" in d.names and 0 not in d.ranks("out"),
        "Only rank 0 has the right numbers. Which collective gives them to every rank?",
    ),
    checks.Question(
        checks.has_kind("out", _OWN, _RANK_0),
        "Each rank knows the largest of its own columns. Which collective makes the largest of these p numbers, on "
        "every rank, and into which tensor does it write?",
    ),
    checks.Question(
        checks.has_kind("out", _SUM, _MEAN, _SMALLEST),
        "dist.all_reduce adds up unless told otherwise. Which argument says what it does with p numbers?",
    ),
    checks.Question(
        checks.has_kind("out", _FILLED),
        "All real logits of these tokens are below -10,000. Which of the numbers that you compare is -10,000, and what "
        "is smaller than every logit?",
    ),
    checks.Question(checks.has_kind("out", _ABSOLUTE), "The largest logit: is -7 larger than 3?"),
    checks.Question(
        lambda d: "traffic" in d.names and any(row.name == "traffic" and "gather" in row.text for row in d),
        "The ranks send each other more than one number a token. Each rank can find the largest of its own columns "
        "first: which number is then left to compare?",
    ),
    checks.Question(
        lambda d: d.names == {"traffic"},
        "The maximum is right, the messages are not. One number a token, once, is enough: which tensor did you send?",
    ),
    checks.Question(
        lambda d: "out" in d.names and not checks.changed(d),
        "For one token: what is the largest logit on rank 0, and on rank 1? Which one should both return?",
    ),
)


@checks.exercise("8.1", "The largest logit")
def vocab_max(answer: Any) -> checks.Verdict:
    checks.check_cases(
        "8.1", answer, CASES, draw=draw, give=give, run=run, expect=expect, questions=QUESTIONS, crash=CRASH,
        whose_group=WHOSE_GROUP,
    )  # fmt: skip
    return checks.Verdict("One number a token. Also where a rank has nothing but padding.")
