"""The check for exercise 8.4, each token's loss as an autograd function with a handwritten backward pass."""

from typing import Any

import torch
from torch import Tensor

from tplab.course import checks
from tplab.course.exercises.ch08.sharded import CASES, WHOSE_GROUP, Logits, Sample, draw, give, on_device
from tplab.memory.meter import saved_for_backward

SECOND = "dlogits of a second backward"
KEPT = "at most one tensor [.., v/p] is kept for the backward"

_LSE = "the log-sum-exp alone"
_MEAN = "the mean over the tokens"
_OWN_LSE = "what comes out if each rank takes the log-sum-exp of its own columns"
_SOFTMAX = "the softmax times dloss, with nothing subtracted"
_NO_UPSTREAM = "softmax minus one-hot, without dloss"
_EVERYWHERE = "what comes out if every rank subtracts 1, in its column 0 where another rank has the target"
_MODULO = "what comes out if every rank subtracts 1 in its column target % (v/p)"
_ALL_COLUMNS = "what comes out if 1 is subtracted in every column"
_OWN_SOFTMAX = "what comes out with a softmax over this rank's own columns"
_ONE_HOT = "minus one-hot times dloss, without the softmax"
_NOT_SCALED = "what comes out if dloss scales the softmax but not the 1"
_MEAN_UPSTREAM = "what comes out if every token is scaled by the mean of dloss"


def run(answer: Any, case: Logits, given: Sample, group: Any) -> checks.Observed:
    logits, target, dy, _ = on_device(given)

    def apply(z: Tensor) -> Any:
        return answer.apply(z, target, group)

    with checks.called_as(f"apply(logits {list(logits.shape)}, target {list(target.shape)}, group)"):
        noted = checks.observe(apply, dy, inputs={"logits": logits})
        noted["out"] = checks.twins.loss_in(case.twin, noted["out"])
        noted["forward traffic"] = one_by_one(noted["forward traffic"], 2 * target.numel())
        return noted | two_backwards(apply, logits, dy)


def two_backwards(apply: Any, logits: Tensor, dy: Tensor) -> checks.Observed:
    """Return the gradient from a second backward pass, and a claim that forward saves at most one tensor [.., v/p]."""
    leaf = logits.clone().requires_grad_()
    with saved_for_backward() as kept:
        out = apply(leaf)
    shapes = [torch.Size(shape) for shape, _, _ in kept.pieces] + [t.shape for t in on_context(out)]
    large = [shape for shape in shapes if shape.numel() >= logits.numel()]
    noted: checks.Observed = {KEPT: checks.Claim(f"{len(large)} are kept" if len(large) > 1 else "")}
    if isinstance(out, Tensor) and out.requires_grad and out.shape == dy.shape:
        torch.autograd.grad(out, leaf, dy, retain_graph=True, allow_unused=True)
        noted[SECOND] = torch.autograd.grad(out, leaf, dy, allow_unused=True)[0]
    return noted


def on_context(out: Any) -> list[Tensor]:
    """Return the tensors that forward stored as attributes of ctx, which are kept alive just like saved tensors."""
    node = out.grad_fn if isinstance(out, Tensor) else None
    return [value for value in getattr(node, "__dict__", {}).values() if isinstance(value, Tensor)]


def one_by_one(traffic: Any, both: int) -> Any:
    """Split each all-reduce with two elements per token into two all-reduces, because two sums may share a message."""
    calls: list[checks.Call] = []
    for call in traffic:
        halves = call.kind == "all_reduce" and call.numel == both
        calls += [call._replace(numel=both // 2)] * 2 if halves else [call]
    return checks.Traffic(calls)


def expect(case: Logits, sample: Sample, place: checks.Place) -> checks.Expected:
    logits, target = sample.logits, sample.target
    lse = logits.logsumexp(-1)
    picked = logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    softmax = place.part((logits - lse.unsqueeze(-1)).exp(), -1)
    one_hot = place.part(torch.zeros_like(logits).scatter(-1, target.unsqueeze(-1), 1.0), -1)
    dy = sample.dy.unsqueeze(-1)

    def in_column(column: Tensor) -> Tensor:
        return torch.zeros_like(softmax).scatter(-1, column.unsqueeze(-1), 1.0)

    out = {_LSE: lse, _MEAN: (lse - picked).mean()}
    gradients = {
        _SOFTMAX: softmax * dy,
        _NO_UPSTREAM: softmax - one_hot,
        _ALL_COLUMNS: (softmax - 1) * dy,
        _ONE_HOT: -one_hot * dy,
        _NOT_SCALED: softmax * dy - one_hot,
        _MEAN_UPSTREAM: (softmax - one_hot) * dy.mean(),
    }
    if place.size > 1:
        own = sample.shards[place.index]
        out |= {_OWN_LSE: own.logsumexp(-1) - picked}
        gradients |= {
            _EVERYWHERE: (softmax - in_column(sample.column_on(place.index))) * dy,
            _MODULO: (softmax - in_column(target % sample.columns)) * dy,
            _OWN_SOFTMAX: (own.softmax(-1) - one_hot) * dy,
        }
    right = (softmax - one_hot) * dy
    expected = {
        "out": lse - picked,
        "dlogits": right,
        "forward traffic": place.traffic(*[("all_reduce", lse.numel())] * 3),
        "backward traffic": place.traffic(),
        SECOND: right,
    }
    return checks.Expected(expected, {"out": out, "dlogits": gradients})


CRASH = (
    "Write the shapes: logits [.., v/p], log-sum-exp [..], dloss [..]. Which line fails? backward gives one value for "
    "each argument of forward: None for target and group. Is every tensor that it reads still what was saved, also "
    "the second time?"
)

GAPS = checks.Question(lambda d: True, checks.twins.question(checks.Twin.STRIDED))  # for non-contiguous logits only

QUESTIONS = (
    checks.Question(
        lambda d: checks.changed(d) and "dlogits" not in d.names,
        "The caller may still need its logits, to look at the scores for example. Which line writes into them instead "
        "of making a new tensor?",
    ),
    checks.INPUTS_QUESTION,
    checks.Question(
        checks.has_kind("out", "none", "type", "structure", _MEAN),
        "The loss of each token comes out, [..]; the mean is taken later. What does forward return?",
    ),
    checks.Question(
        checks.has_kind("out", _LSE), "The loss is log-sum-exp minus the target's logit. Where is the second part?"
    ),
    checks.Question(
        checks.has_kind("out", "negated"), "A loss is larger, the smaller the target's logit is. Which sign has it?"
    ),
    checks.Question(
        lambda d: "out" in d.names,
        "loss = vocab_logsumexp(logits, group) - target_logit(logits, target, group). What differs in your forward?",
    ),
    checks.Question(
        lambda d: any("gather" in row.text for row in d if row.name == "forward traffic"),
        "The loss is right, but the logits themselves travel. Which three numbers a token are enough?",
    ),
    checks.Question(
        lambda d: "backward traffic" in d.names,
        "Backward, this rank has its columns of the logits, the log-sum-exp over all columns, the targets and dloss. "
        "What is missing that another rank would have to send?",
    ),
    checks.Question(
        lambda d: "forward traffic" in d.names and "dlogits" not in d.names,
        "The loss is right. Forward needs the maximum, the sum and the target's logit, one number a token each. Which "
        "message is too many, missing or too large?",
    ),
    checks.Question(
        checks.has_no_gradient("dlogits"), "backward returns one gradient for each argument of forward, in their order."
    ),
    checks.Question(
        checks.has_kind("dlogits", _NO_UPSTREAM, _NOT_SCALED, _MEAN_UPSTREAM),
        "The gradient of what comes after the loss arrives as dloss, one number for each token. By the chain rule it "
        "scales all that you computed. Where does yours come in?",
    ),
    checks.Question(
        checks.has_kind("dlogits", _SOFTMAX),
        "The loss also falls when the target's logit rises. What is the derivative of minus z_target?",
    ),
    checks.Question(
        checks.has_kind("dlogits", _EVERYWHERE, _MODULO),
        "Only one rank has the target's column. What does yours subtract where another rank has it?",
    ),
    checks.Question(
        checks.has_kind("dlogits", _ALL_COLUMNS),
        "One-hot is 1 in one column and 0 in the others. In which of them did you subtract?",
    ),
    checks.Question(
        checks.has_kind("dlogits", _OWN_SOFTMAX),
        "Over all ranks the softmax adds up to 1. To what does it add up on one rank, and by which sum was it divided?",
    ),
    checks.Question(checks.has_kind("dlogits", _ONE_HOT), "What is the derivative of the log-sum-exp?"),
    checks.Question(
        lambda d: d.names == {KEPT},
        "Everything is right, and takes more memory than it has to. From the logits and the log-sum-exp, what can "
        "backward compute again?",
    ),
    checks.Question(
        lambda d: SECOND in d.names and "dlogits" not in d.names,
        "The first backward is right, the second is not: the first wrote into a tensor that was saved. Which line?",
    ),
    checks.Question(
        lambda d: "dlogits" in d.names,
        "(softmax - one-hot) · dloss, in this rank's columns. Compute one token by hand: which of the three differs?",
    ),
)


@checks.exercise("8.4", "The backward by hand")
def by_hand(answer: Any) -> checks.Verdict:
    checks.check_cases(
        "8.4", answer, [case for case in CASES if case.columns > 1], draw=draw, give=give, run=run, expect=expect,
        questions=lambda case, observed: (GAPS, *QUESTIONS) if case.transposed else QUESTIONS, crash=CRASH,
        whose_group=WHOSE_GROUP, without=lambda case: checks.twins.ROUNDED if case.shift else (),
    )  # fmt: skip
    return checks.Verdict("Softmax minus one-hot, without a message; a second backward gives the same.")
