"""The check of exercise 8.1: the largest logit of each token, over the columns of all ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tplab.course.chapters.ch08.sharded import Case, Sample, check_cases
from tplab.course.checks import (
    INPUTS_QUESTION,
    Observed,
    Question,
    Snapshot,
    Traffic,
    Verdict,
    called_as,
    changed,
    exercise,
    has_kind,
    make_group,
    portable,
    traffic,
)
from tplab.runtime import device, record

_OWN = "the largest of this rank's own columns"
_SUM = "the sum of the ranks' maxima"
_MEAN = "the mean of the ranks' maxima"
_SMALLEST = "the smallest of the ranks' maxima"
_RANK_0 = "the largest of rank 0's columns"
_ABSOLUTE = "the largest absolute value"
_KEPT = "the right one with one more dimension of size 1"
_ALL_TOKENS = "the largest logit of all tokens"


def run_maximum(answer: Any, cases: Sequence[Case], data: Sequence[Sequence[Any]]) -> list[Observed]:
    """On a rank: every case, one after the other."""
    seen = []
    for case, held in zip(cases, data, strict=True):
        group = make_group(case.groups)
        logits = held[dist.get_rank()][0].to(device())
        snapshot = Snapshot(logits=logits)
        with record() as section, called_as(f"vocab_max(logits {list(logits.shape)}, group)"):
            out = answer(logits, group)
        seen.append({"out": portable(out), "traffic": traffic(section), "inputs unchanged": snapshot.changed()})
    return seen


def expect(s: Sample, index: int, p: int, ranks: tuple[int, ...]) -> tuple[dict[str, Any], Mapping[str, Any]]:
    right = s.logits.amax(-1)
    maxima = torch.stack([shard.amax(-1) for shard in s.shards])
    alike = {
        _KEPT: right.unsqueeze(-1),
        _ALL_TOKENS: right.max(),
    }
    if s.q > 1:
        alike |= {
            _OWN: maxima[index],
            _RANK_0: maxima[0],
            _SUM: maxima.sum(0),
            _MEAN: maxima.mean(0),
            _SMALLEST: maxima.amin(0),
        }
    alike |= {_ABSOLUTE: s.logits.abs().amax(-1)}
    expected = {"out": right, "traffic": Traffic.expected(p, ("all_reduce", right.numel()), group=ranks)}
    return expected, {"out": alike}


QUESTIONS = (
    INPUTS_QUESTION,
    Question(
        has_kind("out", "structure", "type", "none"),
        "One tensor [..] comes out. (torch.max(dim=...) returns values and indices; logits.amax(dim) returns values. "
        "dist.all_reduce returns None.)",
    ),
    Question(has_kind("out", _KEPT, _ALL_TOKENS), "One number for each token: over which dimension is the maximum?"),
    Question(
        lambda d: d.p > 1 and "out" in d.names and 0 not in d.ranks("out"),
        "Only rank 0 has the right numbers. Which collective gives them to every rank?",
    ),
    Question(
        has_kind("out", _OWN, _RANK_0),
        "Each rank knows the largest of its own columns. Which collective makes the largest of these p numbers, on "
        "every rank, and into which tensor does it write?",
    ),
    Question(
        has_kind("out", _SUM, _MEAN, _SMALLEST),
        "dist.all_reduce adds up unless told otherwise. Which argument says what it does with p numbers?",
    ),
    Question(has_kind("out", _ABSOLUTE), "The largest logit: is -7 larger than 3?"),
    Question(
        lambda d: "traffic" in d.names and any(row.name == "traffic" and "gather" in row.text for row in d),
        "The ranks send each other more than one number a token. Each rank can find the largest of its own columns "
        "first: which number is then left to compare?",
    ),
    Question(
        lambda d: d.names == {"traffic"},
        "The maximum is right, the messages are not. One number a token, once, is enough: which tensor did you send?",
    ),
    Question(
        lambda d: "out" in d.names and not changed(d),
        "For one token: what is the largest logit on rank 0, and on rank 1? Which one should both return?",
    ),
)


@exercise("8.1", "The largest logit")
def vocab_max(answer: Any) -> Verdict:
    check_cases(
        "8.1",
        answer,
        run_maximum,
        expect,
        QUESTIONS,
        crash="Write the shapes: logits [.., v/p], and its maximum over the last dimension, [..]. Which line fails?",
    )
    return Verdict("One number a token. Also where a rank has nothing but padding.")
