"""The check for exercise 8.5, the mean loss with padding columns, ignored tokens, and label smoothing."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tplab.course import checks
from tplab.runtime import device

FEW = "at most six numbers a token travel"
SILENT = "nothing travels backward"

ALL_TOKENS = "the right sum divided by the number of all tokens"
SUM = "the sum over the tokens, not the mean"
PADDING = "what comes out if the padded columns take part in the softmax"
UNSMOOTHED = "the loss without label smoothing"
PADDED_SIZE = "what comes out if the smoothing is spread over the padded vocabulary's size"
LOCAL_SIZE = "what comes out if the smoothing is spread over v/p columns"
LOCAL_MEAN = "what comes out if the smoothing takes the mean logit of this rank's columns only"
OTHERS = "what comes out if the smoothing is spread over all ids but the target"
NOT_IGNORED = "what comes out if the ignored tokens count as tokens with target 0"
PER_TOKEN = "the loss of each token"
PADDING_ZERO = "what comes out if the padded columns have the logit 0 in the softmax"
IGNORED_COUNT = "what comes out if the losses of the ignored tokens are in the sum"
ONLY_MINUS_100 = "what comes out if only a target of -100 is ignored"
PADDING_SMOOTHED = "what comes out if the padded columns are in the mean logit of the smoothing"
AGAIN = "the right mean, added up over the ranks"
SIGN = "what comes out if the smoothing takes ε (target's logit - mean logit) away"

COLUMNS, LEADING = 6, (3, 7)  # columns per rank; shape of the tokens


@dataclass(frozen=True)
class Batch(checks.Case):
    """One kind of batch, and how the loss is called for it.

    padding:         number of padding columns on the last rank that holds ids
    rank_of_padding: whether the last of several ranks holds nothing but padding, in addition to `padding`
    ignored:         number of tokens whose target is ignore_index
    smoothing:       the value of label_smoothing
    shift:           number that is added to every logit
    sure:            whether the model is so sure of the first sequence's tokens that their loss is 0
    hidden:          whether id 0 has the logit -inf at the ignored tokens, as if a mask made it a forbidden token
    """

    padding: int = 0
    rank_of_padding: bool = False
    ignored: int = 0
    ignore_index: int = -100
    smoothing: float = 0.0
    shift: float = 0.0
    hidden: bool = False
    sure: bool = False

    def vocab_size(self, p: int) -> int:
        return p * COLUMNS - self.padding - (COLUMNS if self.rank_of_padding and p > 1 else 0)

    @property
    def options(self) -> dict[str, Any]:
        named = {"ignore_index": (self.ignore_index, -100), "label_smoothing": (self.smoothing, 0.0)}
        return {name: value for name, (value, default) in named.items() if value != default}

    def describe(self, name: str) -> str:
        options = "".join(f", {option}={value}" for option, value in self.options.items())
        extras = [
            f"{self.ignored} tokens to ignore" if self.ignored else "",
            "padded columns" if self.padding or self.rank_of_padding else "",
            "whose first logit is -inf" if self.hidden else "",
            "some tokens with a loss of 0" if self.sure else "",
            f"logits of about {self.shift:.0f}" if self.shift else "",
        ]
        text = ", ".join([f"vocab_parallel_loss(logits, target{options})", *filter(None, extras)])
        return text + "," * bool(self.groups)  # because "in groups ..." follows


CASES = (
    Batch(),
    Batch(ignored=5),
    Batch(padding=2),
    Batch(padding=1, rank_of_padding=True),
    Batch(smoothing=0.25),
    Batch(padding=2, shift=-3e4),
    Batch(ignored=5, hidden=True),
    Batch(sure=True),
    Batch(padding=2, ignored=4, ignore_index=1, smoothing=0.125),
    Batch(padding=2, ignored=4, ignore_index=1000),
    Batch(padding=1, rank_of_padding=True, ignored=2, smoothing=0.5, shift=1e4),
    Batch(padding=2, ignored=3, smoothing=0.25, groups=checks.GROUPS),
)


class Sample(NamedTuple):
    logits: Tensor  # [3, 7, padded v], or [3, 7, COLUMNS] on a rank
    target: Tensor  # [3, 7]
    vocab_size: int
    dy: Tensor  # []


def draw(case: Batch, generator: torch.Generator, size: int) -> Sample:
    vocab_size = case.vocab_size(size)
    logits = 2 * checks.random_tensor(generator, *LEADING, size * COLUMNS) + case.shift
    logits[..., vocab_size:] += 3  # so that including the padding always makes a difference
    target = torch.randint(vocab_size, LEADING, generator=generator)
    if case.ignore_index >= 0:
        target[target == case.ignore_index] = vocab_size - 1
    places = torch.randperm(target.numel(), generator=generator)[: case.ignored]
    target.view(-1)[places] = case.ignore_index
    if case.sure:
        logits[0].scatter_(-1, target[0].unsqueeze(-1), 200.0)
    if case.hidden:
        logits.flatten(0, -2)[places, 0] = -torch.inf
    return Sample(logits, target, vocab_size, checks.random_tensor(generator, 1).squeeze())


def give(case: Batch, sample: Sample, place: checks.Place) -> Sample:
    return sample._replace(logits=place.part(sample.logits, -1))


def run(answer: Any, case: Batch, given: Sample, group: Any) -> checks.Observed:
    logits, target = given.logits.to(device()), given.target.to(device())
    options = case.options | {"vocab_size": given.vocab_size}
    snapshot = checks.Snapshot(target=target)
    shown = ", ".join(f"{name}={value}" for name, value in options.items())
    with checks.called_as(f"vocab_parallel_loss(logits {list(logits.shape)}, target {list(target.shape)}, {shown})"):
        noted = checks.observe(
            lambda z: answer(z, target, **options, group=group), given.dy.to(device()), inputs={"logits": logits}
        )
    noted["out"] = checks.twins.loss_in(case.twin, noted["out"])
    forward, backward = noted.pop("forward traffic"), noted.pop("backward traffic")
    sent = sum(call.numel for call in forward)
    gathers = [call for call in forward if call.kind != "all_reduce"]
    too_much = sent > 6 * target.numel() or gathers
    noted[FEW] = checks.Claim(f"the traffic is {forward}, for {target.numel()} tokens" if too_much else "")
    noted[SILENT] = checks.Claim(f"the traffic is {backward}" if isinstance(backward, tuple) and backward else "")
    noted["inputs unchanged"] = checks.Changed([*noted["inputs unchanged"], *snapshot.changed()])
    return noted


def expect(case: Batch, sample: Sample, place: checks.Place) -> checks.Expected:
    leaf = sample.logits.clone().requires_grad_()
    right = loss(case, sample, leaf[..., : sample.vocab_size])
    (gradient,) = torch.autograd.grad(right, leaf, sample.dy)
    mistakes = lookalikes(case, sample, place, right.detach())
    return checks.Expected({"out": right.detach(), "dlogits": place.part(gradient, -1)}, {"out": mistakes})


def loss(case: Batch, sample: Sample, logits: Tensor, **changes: Any) -> Tensor:
    options = {"ignore_index": case.ignore_index, "label_smoothing": case.smoothing} | changes
    return F.cross_entropy(logits.flatten(0, -2), sample.target.flatten(), **options)


def lookalikes(case: Batch, sample: Sample, place: checks.Place, right: Tensor) -> dict[str, Tensor]:
    """Return the values that common mistakes would produce instead of the right loss."""
    logits, target, k, _ = sample
    real, epsilon = logits[..., :k], case.smoothing
    counted = target != case.ignore_index
    n, count = target.numel(), int(counted.sum())
    alike = {SUM: right * count, PER_TOKEN: loss(case, sample, real, reduction="none").view(target.shape)}
    if place.size > 1:
        alike[AGAIN] = right * place.size
    if count < n:
        as_zero = target.masked_fill(~counted, 0).flatten()
        every = F.cross_entropy(real.flatten(0, -2), as_zero, label_smoothing=epsilon)
        alike |= {ALL_TOKENS: right * count / n, NOT_IGNORED: every, IGNORED_COUNT: every * n / count}
        if 0 <= case.ignore_index < k:
            alike |= {ONLY_MINUS_100: loss(case, sample, real, ignore_index=-100)}
    if logits.shape[-1] > k:
        zeros = logits.clone()
        zeros[..., k:] = 0
        alike |= {PADDING: loss(case, sample, logits), PADDING_ZERO: loss(case, sample, zeros)}
    if epsilon:
        lse, total = real.logsumexp(-1)[counted], real.sum(-1)[counted]
        each = loss(case, sample, real, label_smoothing=0.0, reduction="none").view(target.shape)
        picked = lse - each[counted]
        mine = logits[..., place.index * COLUMNS : min((place.index + 1) * COLUMNS, k)][counted]

        def smoothed(mean: Tensor, part: float = epsilon) -> Tensor:
            return (lse - (1 - part) * picked - part * mean).mean()

        alike |= {
            UNSMOOTHED: loss(case, sample, real, label_smoothing=0.0),
            OTHERS: smoothed((total - picked) / (k - 1)),
            PADDED_SIZE: smoothed(total / logits.shape[-1]),
            LOCAL_SIZE: smoothed(total / COLUMNS),
            PADDING_SMOOTHED: smoothed(logits.sum(-1)[counted] / k),
            SIGN: smoothed(total / k, -epsilon),
            LOCAL_MEAN: smoothed(mine.mean(-1) if mine.shape[-1] else mine.sum(-1)),
        }
    return alike


CRASH = (
    "Which of the steps fails: padded columns to -inf, a target that can be looked up for ignored tokens, the loss of "
    "each token, smoothing, the mean? ignore_index may be any integer, even a negative one or one that's larger than "
    "every id."
)
WHOSE_GROUP = "Which collective, or which call for a rank or a size, was not given `group`?"

QUESTIONS = (
    checks.Question(
        checks.changed,
        "The caller still needs its logits and its targets, to count right answers for example. Which line writes into "
        "one of them? (masked_fill makes a new tensor, masked_fill_ does not.)",
    ),
    checks.Question(
        checks.has_kind("out", "none", "type", "structure", PER_TOKEN, "shape"),
        "One number comes out: the mean over the tokens that count. What does your last line return?",
    ),
    checks.Question(
        checks.has_kind("out", "nan"),
        "Padded columns that hold -inf are right for the softmax, since exp(-inf) = 0. Where else do you add them up, "
        "or multiply them by 0?",
    ),
    checks.Question(
        checks.has_kind("out", AGAIN),
        "Every rank has the mean already, and yours is p times as large. Which sum over the ranks is one too many?",
    ),
    checks.Question(checks.has_kind("out", SUM), "The sum is right. By what is it divided?"),
    checks.Question(
        checks.has_kind("out", ALL_TOKENS), "By how many tokens is the sum divided: by all, or by those that count?"
    ),
    checks.Question(
        checks.has_kind("out", NOT_IGNORED),
        "An ignored token needs some id to be looked up, but its loss must not count. Where do you take it out again?",
    ),
    checks.Question(
        checks.has_kind("out", PADDING),
        "The softmax gives the padded columns a part of the probability. Which number as a logit has exp = 0? And how "
        "does a rank find out which of its columns are padding: which id has its column 0?",
    ),
    checks.Question(
        checks.has_kind("out", PADDING_ZERO),
        "A logit of 0 gives a padded column a part of the probability as well: exp(0) = 1. Which number has exp = 0?",
    ),
    checks.Question(
        checks.has_kind("out", IGNORED_COUNT),
        "The sum is divided by the right number, but the ignored tokens are in it, with the loss of the id that stands "
        "in for their target. Where do you take them out?",
    ),
    checks.Question(
        checks.has_kind("out", ONLY_MINUS_100),
        "Here `ignore_index` is another number, and a target with that number counts. Which line knows -100 only, or "
        "takes it that the number is negative?",
    ),
    checks.Question(
        checks.has_kind("out", PADDING_SMOOTHED),
        "The mean logit is that of the real ids. Which columns do you add up for it?",
    ),
    checks.Question(
        checks.has_kind("out", SIGN),
        "lse - (1 - ε) z_t - ε z̄ is lse - z_t plus ε (z_t - z̄). Which sign has yours?",
    ),
    checks.Question(
        checks.has_kind("out", UNSMOOTHED), "label_smoothing is not 0 here. Where does it enter your loss?"
    ),
    checks.Question(
        checks.has_kind("out", PADDED_SIZE, LOCAL_SIZE),
        "The smoothing is spread evenly over the vocabulary. How many ids does it have, without padding, on all ranks "
        "together?",
    ),
    checks.Question(
        checks.has_kind("out", LOCAL_MEAN),
        "The mean logit is that of all ranks' columns, or every rank gets another loss. Who adds up the ranks' sums?",
    ),
    checks.Question(
        checks.has_kind("out", OTHERS),
        "As in F.cross_entropy, every id gets ε/v, the target too: it has 1 - ε + ε/v in all.",
    ),
    checks.Question(
        lambda d: FEW in d.names,
        "More than a few numbers a token travel. Which of your messages is as large as the logits?",
    ),
    checks.Question(
        lambda d: SILENT in d.names or checks.has_kind("dlogits", "p times")(d),
        "Backward, the ranks have nothing to tell each other: the upstream gradient is one number that all of them "
        "have. Which of your sums adds up its gradient too?",
    ),
    checks.Question(
        checks.has_no_gradient("dlogits"),
        "The loss is right, but no gradient reaches the logits. Which line does autograd not see?",
    ),
    checks.Question(
        lambda d: "out" not in d.names and "dlogits" in d.names,
        "The loss is right, its gradient is not. Which part of it does autograd not see: the loss of each token, the "
        "target's logit in the smoothing, or the mean logit? (dist.all_reduce is no g.)",
    ),
    checks.Question(
        lambda d: "out" in d.names,
        "Take it apart: the loss of each token, with padding left out; plus ε (target's logit - mean logit); then the "
        "mean over the tokens that count. From which part on does yours differ?",
    ),
)

OUTSIDE = (
    "This id is no id of the vocabulary: it is negative, or it belongs to a padded column, and it is not ignore_index. "
    "Raise IndexError on every rank, before any collective. Compare with vocab_size, not with the number of columns."
)


@dataclass(frozen=True)
class Outside(checks.Case):
    """Targets outside the vocabulary. In total, the ranks have `columns` columns, two of which are padding."""

    columns: int

    @property
    def vocab_size(self) -> int:
        return self.columns - 2

    @property
    def ids(self) -> dict[str, int]:
        return {"a target of -1": -1, "in a padded column": self.vocab_size, "of v and more": self.columns}

    def describe(self, name: str) -> str:
        return f"with a wrong target, vocab_size={self.vocab_size}, {self.columns} columns"


def draw_any(case: Outside, generator: torch.Generator, size: int) -> Tensor:
    return checks.random_tensor(generator, 3, COLUMNS)


def run_outside(answer: Any, case: Outside, logits: Tensor, group: Any) -> checks.Observed:
    """Call the answer with each of these ids and record which error it raises. Runs on every rank."""
    seen: checks.Observed = {}
    for name, number in case.ids.items():
        target = torch.tensor([0, number, 1], device=device())
        try:
            answer(logits.to(device()), target, vocab_size=case.vocab_size, group=group)
        except IndexError:
            said = "IndexError"
        except NotImplementedError:
            raise
        except Exception as error:
            said = type(error).__name__
        else:
            said = "no error"
        seen[name] = said
    return seen


def expect_refusal(case: Outside, logits: Tensor, place: checks.Place) -> checks.Expected:
    return checks.Expected(dict.fromkeys(case.ids, "IndexError"))


@checks.exercise("8.5", "The whole loss")
def whole_loss(answer: Any) -> checks.Verdict:
    checks.check_cases(
        "8.5", answer, CASES, draw=draw, give=give, run=run, expect=expect, questions=QUESTIONS, crash=CRASH,
        whose_group=WHOSE_GROUP, without=lambda case: checks.twins.ROUNDED if case.shift else (),
    )  # fmt: skip
    checks.check_cases(
        "8.5", answer, lambda p: [Outside(p * COLUMNS)], draw=draw_any, run=run_outside, expect=expect_refusal,
        questions=[checks.Question(lambda d: True, OUTSIDE)], crash=OUTSIDE, stuck=OUTSIDE, world_sizes=(1, 2),
    )  # fmt: skip
    return checks.Verdict(
        "Equal to F.cross_entropy on the whole logits: padding, ignored tokens and smoothing included."
    )
