"""The check of exercise 8.5: the mean loss, with padded columns, ignored tokens and label smoothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tplab.course.ch08.sharded import WHOSE_GROUP
from tplab.course.checking import (
    WORLD_SIZES,
    Claim,
    Observed,
    Question,
    Snapshot,
    Verdict,
    called_as,
    exercise,
    fresh_generator,
    observe,
    run_cases,
    run_ranks,
    verify,
)
from tplab.course.observing import Changed
from tplab.course.scenes import (
    GROUPS,
    IN_GROUPS,
    ask_about_group,
    by_name,
    changed,
    group_question,
    has_kind,
    has_no_gradient,
    make_group,
    member_of,
    random_tensor,
)
from tplab.runtime import device

COLUMNS, LEADING = 6, (3, 7)
FEW = "at most six numbers a token travel"
SILENT = "nothing travels backward"


@dataclass(frozen=True)
class Case:
    """vocab_size: v minus `padding`; with `rank_of_padding` the last rank, of several, has nothing else."""

    padding: int = 0
    rank_of_padding: bool = False
    ignored: int = 0
    ignore_index: int = -100
    smoothing: float = 0.0
    shift: float = 0.0
    groups: tuple[tuple[int, ...], ...] | None = None

    def vocab_size(self, q: int) -> int:
        return q * COLUMNS - self.padding - (COLUMNS if self.rank_of_padding and q > 1 else 0)

    def options(self) -> dict[str, Any]:
        named = {"ignore_index": (self.ignore_index, -100), "label_smoothing": (self.smoothing, 0.0)}
        return {name: value for name, (value, default) in named.items() if value != default}

    def note(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.options().items())
        extras = [
            f"{self.ignored} tokens to ignore" if self.ignored else "",
            "padded columns" if self.padding or self.rank_of_padding else "",
            f"logits of about {self.shift:.0f}" if self.shift else "",
            IN_GROUPS if self.groups else "",
        ]
        return ", ".join([f"vocab_parallel_loss(logits, target{options})", *filter(None, extras)])


CASES = (
    Case(),
    Case(ignored=5),
    Case(padding=2),
    Case(padding=1, rank_of_padding=True),
    Case(smoothing=0.25),
    Case(padding=2, ignored=4, ignore_index=1, smoothing=0.125),
    Case(padding=1, rank_of_padding=True, ignored=2, smoothing=0.5, shift=1e4),
    Case(padding=2, ignored=3, smoothing=0.25, groups=GROUPS),
)


@dataclass(frozen=True)
class Sample:
    case: Case
    q: int
    logits: Tensor  # [3, 7, v]
    target: Tensor  # [3, 7]

    @property
    def vocab_size(self) -> int:
        return self.case.vocab_size(self.q)

    def loss(self, logits: Tensor, **changes: Any) -> Tensor:
        options = {"ignore_index": self.case.ignore_index, "label_smoothing": self.case.smoothing} | changes
        return F.cross_entropy(logits.flatten(0, -2), self.target.flatten(), **options)


def sample(case: Case, q: int, generator: torch.Generator) -> Sample:
    logits = 2 * random_tensor(generator, *LEADING, q * COLUMNS) + case.shift
    logits[..., case.vocab_size(q) :] += 3  # padding must not be small by chance
    target = torch.randint(case.vocab_size(q), LEADING, generator=generator)
    if case.ignore_index >= 0:
        target[target == case.ignore_index] = case.vocab_size(q) - 1
    places = torch.randperm(target.numel(), generator=generator)[: case.ignored]
    target.view(-1)[places] = case.ignore_index
    return Sample(case, q, logits, target)


def run_loss(answer: Any, cases: Sequence[Case], data: Sequence[Sequence[Any]]) -> list[Observed]:
    """On a rank: every case, one after the other."""
    seen = []
    for case, held in zip(cases, data, strict=True):
        group = make_group(case.groups)
        logits, target, vocab_size, dy = held[dist.get_rank()]
        logits, target = logits.to(device()), target.to(device())
        options = case.options() | {"vocab_size": vocab_size, "group": group}
        snapshot = Snapshot(target=target)
        shown = ", ".join(f"{name}={value}" for name, value in options.items() if name != "group")

        def run(z: Tensor, target: Tensor = target, options: dict[str, Any] = options) -> Any:
            return answer(z, target, **options)

        with called_as(f"vocab_parallel_loss(logits {list(logits.shape)}, target {list(target.shape)}, {shown})"):
            noted = observe(run, dy.to(device()), inputs={"logits": logits})
        forward, backward = noted.pop("forward traffic"), noted.pop("backward traffic")
        sent = sum(call.numel for call in forward)
        gathers = [call for call in forward if call.kind != "all_reduce"]
        too_much = sent > 6 * target.numel() or gathers
        noted[FEW] = Claim(f"the traffic is {forward}, for {target.numel()} tokens" if too_much else "")
        noted[SILENT] = Claim(f"the traffic is {backward}" if isinstance(backward, tuple) and backward else "")
        noted["inputs unchanged"] = Changed([*noted["inputs unchanged"], *snapshot.changed()])
        seen.append(noted)
    return seen


_ALL_TOKENS = "the right sum divided by the number of all tokens"
_SUM = "the sum over the tokens, not the mean"
_PADDING = "what comes out if the padded columns take part in the softmax"
_UNSMOOTHED = "the loss without label smoothing"
_PADDED_SIZE = "what comes out if the smoothing is spread over the padded vocabulary's size"
_LOCAL_SIZE = "what comes out if the smoothing is spread over v/p columns"
_LOCAL_MEAN = "what comes out if the smoothing takes the mean logit of this rank's columns only"
_OTHERS = "what comes out if the smoothing is spread over all ids but the target"
_NOT_IGNORED = "what comes out if the ignored tokens count as tokens with target 0"
_PER_TOKEN = "the loss of each token"


def expect(s: Sample, index: int, dy: Tensor) -> tuple[dict[str, Any], Mapping[str, Any]]:
    leaf = s.logits.clone().requires_grad_()
    right = s.loss(leaf[..., : s.vocab_size])
    (gradient,) = torch.autograd.grad(right, leaf, dy)
    value, real, epsilon = right.detach(), s.logits[..., : s.vocab_size], s.case.smoothing
    counted = s.target != s.case.ignore_index
    n, count = s.target.numel(), int(counted.sum())
    plain = s.loss(real, label_smoothing=0.0)
    alike = {_SUM: value * count, _PER_TOKEN: s.loss(real, reduction="none").view(s.target.shape)}
    if count < n:
        as_zero = s.target.masked_fill(~counted, 0).flatten()
        alike |= {
            _ALL_TOKENS: value * count / n,
            _NOT_IGNORED: F.cross_entropy(real.flatten(0, -2), as_zero, label_smoothing=epsilon),
        }
    if s.logits.shape[-1] > s.vocab_size:
        alike |= {_PADDING: s.loss(s.logits)}
    if epsilon:
        lse, total = real.logsumexp(-1)[counted], real.sum(-1)[counted]
        picked = lse - s.loss(real, label_smoothing=0.0, reduction="none").view(s.target.shape)[counted]
        columns = slice(index * COLUMNS, min((index + 1) * COLUMNS, s.vocab_size))
        mine = s.logits[..., columns][counted]

        def smoothed(mean: Tensor, part: float = epsilon) -> Tensor:
            return (lse - (1 - part) * picked - part * mean).mean()

        k = s.vocab_size
        alike |= {
            _UNSMOOTHED: plain,
            _OTHERS: smoothed((total - picked) / (k - 1)),
            _PADDED_SIZE: smoothed(total / s.logits.shape[-1]),
            _LOCAL_SIZE: smoothed(total / COLUMNS),
        }
        if mine.shape[-1]:
            alike[_LOCAL_MEAN] = smoothed(mine.mean(-1))
        else:
            alike[_LOCAL_MEAN] = smoothed(mine.sum(-1))
    expected = {"out": value, "dlogits": gradient.chunk(s.q, -1)[index]}
    return expected, {"out": alike}


QUESTIONS = (
    Question(
        changed,
        "The caller still needs its logits and its targets, to count right answers for example. Which line writes into "
        "one of them? (masked_fill makes a new tensor, masked_fill_ does not.)",
    ),
    Question(
        has_kind("out", "none", "type", "structure", _PER_TOKEN, "shape"),
        "One number comes out: the mean over the tokens that count. What does your last line return?",
    ),
    Question(
        has_kind("out", "nan"),
        "Padded columns that hold -inf are right for the softmax, since exp(-inf) = 0. Where else do you add them up, "
        "or multiply them by 0?",
    ),
    Question(has_kind("out", _SUM), "The sum is right. By what is it divided?"),
    Question(has_kind("out", _ALL_TOKENS), "By how many tokens is the sum divided: by all, or by those that count?"),
    Question(
        has_kind("out", _NOT_IGNORED),
        "An ignored token needs some id to be looked up, but its loss must not count. Where do you take it out again?",
    ),
    Question(
        has_kind("out", _PADDING),
        "The softmax gives the padded columns a part of the probability. Which number as a logit has exp = 0? And how "
        "does a rank find out which of its columns are padding: which id has its column 0?",
    ),
    Question(has_kind("out", _UNSMOOTHED), "label_smoothing is not 0 here. Where does it enter your loss?"),
    Question(
        has_kind("out", _PADDED_SIZE, _LOCAL_SIZE),
        "The smoothing is spread evenly over the vocabulary. How many ids does it have, without padding, on all ranks "
        "together?",
    ),
    Question(
        has_kind("out", _LOCAL_MEAN),
        "The mean logit is that of all ranks' columns, or every rank gets another loss. Who adds up the ranks' sums?",
    ),
    Question(
        has_kind("out", _OTHERS),
        "As in F.cross_entropy, every id gets ε/v, the target too: it has 1 - ε + ε/v in all.",
    ),
    Question(
        lambda d: FEW in d.names,
        "More than a few numbers a token travel. Which of your messages is as large as the logits?",
    ),
    Question(
        lambda d: SILENT in d.names or has_kind("dlogits", "p times")(d),
        "Backward, the ranks have nothing to tell each other: the upstream gradient is one number that all of them "
        "have. Which of your sums adds up its gradient too?",
    ),
    Question(
        has_no_gradient("dlogits"),
        "The loss is right, but no gradient reaches the logits. Which line does autograd not see?",
    ),
    Question(
        lambda d: "out" not in d.names and "dlogits" in d.names,
        "The loss is right, its gradient is not. Which part of it does autograd not see: the loss of each token, the "
        "target's logit in the smoothing, or the mean logit? (dist.all_reduce is no g.)",
    ),
    Question(
        lambda d: "out" in d.names,
        "Take it apart: the loss of each token, with padding left out; plus ε (target's logit - mean logit); then the "
        "mean over the tokens that count. From which part on does yours differ?",
    ),
)

_CRASH = (
    "Which of the steps fails: padded columns to -inf, a target that can be looked up for ignored tokens, the loss of "
    "each token, smoothing, the mean? ignore_index may be any id, and may be negative."
)
_OUTSIDE = (
    "This id is no id of the vocabulary: it is negative, or it belongs to a padded column, and it is not ignore_index. "
    "Raise IndexError on every rank, before any collective. Compare with vocab_size, not with the number of columns."
)


def outside(answer: Any, logits: Tensor, bad: Mapping[str, int], vocab_size: int) -> Observed:
    """On a rank: what it says to ids that are not in the vocabulary."""
    seen: Observed = {}
    for name, number in bad.items():
        try:
            answer(logits.to(device()), torch.tensor([0, number, 1], device=device()), vocab_size=vocab_size)
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


@exercise("8.5", "The whole loss")
def whole_loss(answer: Any) -> Verdict:
    for p in WORLD_SIZES:
        generator = fresh_generator()
        here = [case for case in CASES if case.groups is None or p == 4]
        for batch in (here[:1], here[1:]):
            data, wanted = [], []
            for case in batch:
                members = member_of(p, case.groups)
                samples = [sample(case, len(members[0][1]), generator) for _ in case.groups or (0,)]
                dy = random_tensor(generator, 1).squeeze()
                rows = [(samples[i], ranks.index(rank)) for rank, (i, ranks) in enumerate(members)]
                data.append([(s.logits.chunk(s.q, -1)[i], s.target, s.vocab_size, dy) for s, i in rows])
                wanted.append([expect(s, i, dy) for s, i in rows])
            runs = run_cases(
                run_loss,
                p,
                answer,
                batch,
                data,
                note=lambda case: case.note(),
                question=lambda case: ask_about_group(WHOSE_GROUP) if case.groups else _CRASH,
                stuck=lambda case: ask_about_group(WHOSE_GROUP) if case.groups else None,
            )
            for case, wants, seen in zip(batch, wanted, runs, strict=True):
                verify(
                    "8.5",
                    p,
                    seen,
                    [right for right, _ in wants],
                    questions=[group_question(WHOSE_GROUP), *QUESTIONS] if case.groups else QUESTIONS,
                    lookalikes=by_name([alike for _, alike in wants]),
                    note=case.note(),
                )
    for p in (1, 2):
        logits, vocab_size = random_tensor(fresh_generator(), 3, COLUMNS), p * COLUMNS - 2
        bad = {"a target of -1": -1, "in a padded column": vocab_size, "of v and more": p * COLUMNS}
        note = f"with a wrong target, vocab_size={vocab_size}, {p * COLUMNS} columns"
        seen = run_ranks(outside, p, answer, logits, bad, vocab_size, question=_OUTSIDE, stuck=_OUTSIDE, note=note)
        expected = dict.fromkeys(bad, "IndexError")
        verify("8.5", p, seen, [expected] * p, questions=[Question(lambda d: True, _OUTSIDE)], note=note)
    return Verdict("Equal to F.cross_entropy on the whole logits: padding, ignored tokens and smoothing included.")
