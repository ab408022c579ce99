"""The check of exercise 8.2: log-sum-exp over the columns of all ranks, and its gradient."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tplab.course.chapters.ch08.sharded import Case, Sample, check_cases
from tplab.course.checks import (
    INPUTS_QUESTION,
    Observed,
    Question,
    Traffic,
    Verdict,
    called_as,
    exercise,
    has_kind,
    has_no_gradient,
    make_group,
    observe,
)
from tplab.runtime import device

_OWN = "the log-sum-exp of this rank's own columns"
_NOT_BACK = "the right one without the maximum added back"
_LOCAL_BOTH = "what comes out if each rank subtracts, and adds back, its own maximum"
_LOCAL_THEN_M = "what comes out if each rank subtracts its own maximum, and all add back the largest"
_SUM_OF_LOGS = "the sum of the ranks' log-sum-exps"
_LOG_FIRST = "m plus the sum of the ranks' logarithms: the log was taken before the sum"
_P_TIMES = "what comes out if the sum is counted p times"
_MEAN = "what comes out with the mean over the ranks in place of the sum"
_NO_LOG = "m plus the sum, without the logarithm"
_KEPT = "the right one with one more dimension of size 1"
_OWN_SOFTMAX = "dout times a softmax over this rank's own columns"
_NO_UPSTREAM = "the softmax itself, without dout"


def run_logsumexp(answer: Any, cases: Sequence[Case], data: Sequence[Sequence[Any]]) -> list[Observed]:
    """On a rank: every case, one after the other."""
    seen = []
    for case, held in zip(cases, data, strict=True):
        group = make_group(case.groups)
        logits, _, dy = (tensor.to(device()) for tensor in held[dist.get_rank()])
        with called_as(f"vocab_logsumexp(logits {list(logits.shape)}, group)"):
            seen.append(observe(lambda z, group=group: answer(z, group), dy, inputs={"logits": logits}))
    return seen


def expect(s: Sample, index: int, p: int, ranks: tuple[int, ...]) -> tuple[dict[str, Any], Mapping[str, Any]]:
    right, m = s.logits.logsumexp(-1), s.logits.amax(-1)
    softmax = (s.logits - right.unsqueeze(-1)).exp()
    own_m = torch.stack([shard.amax(-1) for shard in s.shards])  # [q, ..]
    own = torch.stack([shard.logsumexp(-1) for shard in s.shards])  # [q, ..]
    own_sum = (own - own_m).exp()  # [q, ..]: sums with each rank's own maximum subtracted
    alike = {_NOT_BACK: right - m, _NO_LOG: m + (right - m).exp(), _KEPT: right.unsqueeze(-1)}
    gradients = {_NO_UPSTREAM: s.mine(softmax, index)}
    if s.q > 1:
        alike |= {
            _OWN: own[index],
            _LOCAL_BOTH: own_m[index] + own_sum.sum(0).log(),
            _LOCAL_THEN_M: m + own_sum.sum(0).log(),
            _SUM_OF_LOGS: own.sum(0),
            _LOG_FIRST: m + (own - m).sum(0),
            _P_TIMES: right + torch.tensor(float(s.q), dtype=right.dtype).log(),
            _MEAN: right - torch.tensor(float(s.q), dtype=right.dtype).log(),
        }
        gradients |= {_OWN_SOFTMAX: s.shards[index].softmax(-1) * s.dy.unsqueeze(-1)}
    n = right.numel()
    expected = {
        "out": right,
        "dlogits": s.mine(softmax, index) * s.dy.unsqueeze(-1),
        "forward traffic": Traffic.expected(p, ("all_reduce", n), ("all_reduce", n), group=ranks),
        "backward traffic": Traffic(),
    }
    return expected, {"out": alike, "dlogits": gradients}


QUESTIONS = (
    INPUTS_QUESTION,
    Question(
        has_kind("out", "none", "type", "structure", _KEPT),
        "One number for each token comes out, [..]. What does your last line return?",
    ),
    Question(
        has_kind("out", "nan"),
        "exp(10000) is infinity, exp(-10000) is 0 and its logarithm -infinity; and -inf minus -inf is NaN. What is "
        "subtracted before exp, one number for each token, and on every rank the same, so that the largest exponent is "
        "0? Does it stay finite on a rank where every logit is -inf?",
    ),
    Question(has_kind("out", _OWN), "That is this rank's part. Which numbers do the ranks have to add up?"),
    Question(
        has_kind("out", _NOT_BACK),
        "You took the log of the sum of exp(z - m). What is log(exp(m) · that sum)?",
    ),
    Question(
        has_kind("out", _LOCAL_BOTH, _LOCAL_THEN_M),
        "Terms can be added up only if the same number was subtracted on every rank. Which maximum did yours subtract?",
    ),
    Question(
        has_kind("out", _SUM_OF_LOGS, _LOG_FIRST),
        "log(S_0 + S_1) is not log(S_0) + log(S_1). Which comes first, the sum over the ranks or the logarithm?",
    ),
    Question(has_kind("out", _NO_LOG), "The logarithm of the sum is wanted. Where is it?"),
    Question(has_kind("out", _P_TIMES), "How many times is each rank's sum added?"),
    Question(has_kind("out", _MEAN), "The sum over all columns, or the mean over the ranks?"),
    Question(
        lambda d: any("gather" in row.text for row in d if "traffic" in row.name),
        "The number is right, the way is the long one: the logits themselves travel. What are the two numbers a token "
        "that are enough?",
    ),
    Question(
        lambda d: "out" not in d.names and "forward traffic" in d.names,
        "Two all-reduces of one number a token: the maximum and the sum. Which one is missing, too many, or too large?",
    ),
    Question(
        has_no_gradient("dlogits"),
        "The output is right, but no gradient reaches the logits. Which line does autograd not see? Only the maximum "
        "may be hidden from it.",
    ),
    Question(
        lambda d: "backward traffic" in d.names,
        "Backward, every rank has dout and knows the whole sum. What would there be to send? Which operator of chapter "
        "03 adds up forward and sends nothing backward?",
    ),
    Question(
        lambda d: "out" not in d.names and has_kind("dlogits", "nan")(d),
        "The output is right, its gradient is NaN. Which step of yours has no derivative where every logit of this "
        "rank is -inf?",
    ),
    Question(
        lambda d: "out" not in d.names and has_kind("dlogits", "p times")(d),
        "The gradient of the sum was added up over the ranks, which all have it already. Which operator of chapter 03 "
        "adds up forward and does nothing backward?",
    ),
    Question(
        lambda d: "out" not in d.names and "dlogits" in d.names,
        "The output is right, its gradient is not: it should be the softmax over all columns, times dout. m drops out "
        "of the formula, so autograd must treat it as a constant. Does it, in your code? And does the sum reach "
        "autograd through g?",
    ),
    Question(
        lambda d: "out" in d.names,
        "log(sum over all columns of exp(z - m)) + m, with one m for all ranks. Which part differs in your code?",
    ),
)


@exercise("8.2", "Log-sum-exp")
def vocab_logsumexp(answer: Any) -> Verdict:
    check_cases(
        "8.2",
        answer,
        run_logsumexp,
        expect,
        QUESTIONS,
        crash="Write the shapes: logits [.., v/p], m [..], z - m [.., v/p], its sum [..]. Which line fails?",
    )
    return Verdict("Right with logits of 10000 and -10000 too, and its gradient is the softmax.")
