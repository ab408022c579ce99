"""The check for exercise 8.2, log-sum-exp over the columns of all ranks, and its gradient."""

from typing import Any

import torch

from tplab.course import checks
from tplab.course.exercises.ch08.sharded import CASES, WHOSE_GROUP, Logits, Sample, draw, give, on_device

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


def run(answer: Any, case: Logits, given: Sample, group: Any) -> checks.Observed:
    logits, _, dy, _ = on_device(given)
    with checks.called_as(f"vocab_logsumexp(logits {list(logits.shape)}, group)"):
        seen = checks.observe(lambda z: answer(z, group), dy, inputs={"logits": logits})
    return seen | {"out": checks.twins.loss_in(case.twin, seen["out"])}


def expect(case: Logits, sample: Sample, place: checks.Place) -> checks.Expected:
    right, m = sample.logits.logsumexp(-1), sample.logits.amax(-1)
    softmax, dy = (sample.logits - right.unsqueeze(-1)).exp(), sample.dy.unsqueeze(-1)
    own_m = torch.stack([shard.amax(-1) for shard in sample.shards])  # [p, ...]
    own = torch.stack([shard.logsumexp(-1) for shard in sample.shards])  # [p, ...]
    own_sum = (own - own_m).exp()  # [p, ...], sums of exp(logit - the rank's own maximum)
    alike = {_NOT_BACK: right - m, _NO_LOG: m + (right - m).exp(), _KEPT: right.unsqueeze(-1)}
    gradients = {_NO_UPSTREAM: place.part(softmax, -1)}
    if place.size > 1:
        log_p = torch.tensor(float(place.size), dtype=right.dtype).log()
        alike |= {
            _OWN: own[place.index],
            _LOCAL_BOTH: own_m[place.index] + own_sum.sum(0).log(),
            _LOCAL_THEN_M: m + own_sum.sum(0).log(),
            _SUM_OF_LOGS: own.sum(0),
            _LOG_FIRST: m + (own - m).sum(0),
            _P_TIMES: right + log_p,
            _MEAN: right - log_p,
        }
        gradients |= {_OWN_SOFTMAX: sample.shards[place.index].softmax(-1) * dy}
    expected = {
        "out": right,
        "dlogits": place.part(softmax, -1) * dy,
        "forward traffic": place.traffic(*[("all_reduce", right.numel())] * 2),
        "backward traffic": place.traffic(),
    }
    return checks.Expected(expected, {"out": alike, "dlogits": gradients})


CRASH = "Write the shapes: logits [.., v/p], m [..], z - m [.., v/p], its sum [..]. Which line fails?"

QUESTIONS = (
    checks.INPUTS_QUESTION,
    checks.Question(
        checks.has_kind("out", "none", "type", "structure", _KEPT),
        "One number for each token comes out, [..]. What does your last line return?",
    ),
    checks.Question(
        checks.has_kind("out", "nan"),
        "exp(10000) is infinity, exp(-10000) is 0 and its logarithm -infinity; and -inf minus -inf is NaN. What is "
        "subtracted before exp, one number for each token, and on every rank the same, so that the largest exponent is "
        "0? Does it stay finite on a rank where every logit is -inf?",
    ),
    checks.Question(
        checks.has_kind("out", _OWN), "That is this rank's part. Which numbers do the ranks have to add up?"
    ),
    checks.Question(
        checks.has_kind("out", _NOT_BACK),
        "You took the log of the sum of exp(z - m). What is log(exp(m) · that sum)?",
    ),
    checks.Question(
        checks.has_kind("out", _LOCAL_BOTH, _LOCAL_THEN_M),
        "Terms can be added up only if the same number was subtracted on every rank. Which maximum did yours subtract?",
    ),
    checks.Question(
        checks.has_kind("out", _SUM_OF_LOGS, _LOG_FIRST),
        "log(S_0 + S_1) is not log(S_0) + log(S_1). Which comes first, the sum over the ranks or the logarithm?",
    ),
    checks.Question(checks.has_kind("out", _NO_LOG), "The logarithm of the sum is wanted. Where is it?"),
    checks.Question(checks.has_kind("out", _P_TIMES), "How many times is each rank's sum added?"),
    checks.Question(checks.has_kind("out", _MEAN), "The sum over all columns, or the mean over the ranks?"),
    checks.Question(
        lambda d: any("gather" in row.text for row in d if "traffic" in row.name),
        "The number is right, the way is the long one: the logits themselves travel. What are the two numbers a token "
        "that are enough?",
    ),
    checks.Question(
        lambda d: "out" not in d.names and "forward traffic" in d.names,
        "Two all-reduces of one number a token: the maximum and the sum. Which one is missing, too many, or too large?",
    ),
    checks.Question(
        checks.has_no_gradient("dlogits"),
        "The output is right, but no gradient reaches the logits. Which line does autograd not see? Only the maximum "
        "may be hidden from it.",
    ),
    checks.Question(
        lambda d: "backward traffic" in d.names,
        "Backward, every rank has dout and knows the whole sum. What would there be to send? Which operator of chapter "
        "03 adds up forward and sends nothing backward?",
    ),
    checks.Question(
        lambda d: "out" not in d.names and checks.has_kind("dlogits", "nan")(d),
        "The output is right, its gradient is NaN. Which step of yours has no derivative where every logit of this "
        "rank is -inf?",
    ),
    checks.Question(
        lambda d: "out" not in d.names and checks.has_kind("dlogits", "p times")(d),
        "The gradient of the sum was added up over the ranks, which all have it already. Which operator of chapter 03 "
        "adds up forward and does nothing backward?",
    ),
    checks.Question(
        lambda d: "out" not in d.names and "dlogits" in d.names,
        "The output is right, its gradient is not: it should be the softmax over all columns, times dout. m drops out "
        "of the formula, so autograd must treat it as a constant. Does it, in your code? And does the sum reach "
        "autograd through g?",
    ),
    checks.Question(
        lambda d: "out" in d.names,
        "log(sum over all columns of exp(z - m)) + m, with one m for all ranks. Which part differs in your code?",
    ),
)


@checks.exercise("8.2", "Log-sum-exp")
def vocab_logsumexp(answer: Any) -> checks.Verdict:
    checks.check_cases(
        "8.2", answer, CASES, draw=draw, give=give, run=run, expect=expect, questions=QUESTIONS, crash=CRASH,
        whose_group=WHOSE_GROUP, without=lambda case: checks.twins.ROUNDED if case.shift else (),
    )  # fmt: skip
    return checks.Verdict("Right with logits of 10000 and -10000 too, and its gradient is the softmax.")
