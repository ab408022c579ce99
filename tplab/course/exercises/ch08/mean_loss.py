"""The checks of exercises 8.3, the mean loss with padding and ignored tokens, and 8.4, label smoothing."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tplab.course.checks import twins
from tplab.course.checks.cases import GROUPS, Case, Place, random_tensor
from tplab.course.checks.observation import Changed, Observed, Snapshot, observe
from tplab.course.checks.run_answer import called_as
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.exercises.ch08.checks import spends
from tplab.runtime import device

COLUMNS, LEADING = 10, (3, 7)  # columns per rank, which have to be more than MOST; shape of the tokens
TOKENS = torch.Size(LEADING).numel()
MOST = 8  # numbers per token that a rank may contribute. The reference answers need 3 and 6


@dataclass(frozen=True)
class Batch(Case):
    """One kind of batch, and how the loss is called for it.

    padding:         number of padding columns on the last rank that holds IDs
    rank_of_padding: whether the last of several ranks holds nothing but padding, in addition to `padding`
    ignored:         number of tokens whose target is ignore_index
    smoothing:       the value of label_smoothing, or None to call the loss of 8.3
    shift:           number that is added to every logit
    sure:            whether the model is so sure of the first sequence's tokens that their loss is 0
    hidden:          whether ID 0 has the logit -inf at the ignored tokens, as if it were forbidden there
    """

    padding: int = 0
    rank_of_padding: bool = False
    ignored: int = 0
    ignore_index: int = -100
    smoothing: float | None = None
    shift: float = 0.0
    hidden: bool = False
    sure: bool = False

    def vocab_size(self, p: int) -> int:
        return p * COLUMNS - self.padding - (COLUMNS if self.rank_of_padding and p > 1 else 0)

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.ignore_index == -100 else {"ignore_index": self.ignore_index}

    def describe(self, name: str) -> str:
        smoothing = "" if self.smoothing is None else f", {self.smoothing}"
        options = "".join(f", {option}={value}" for option, value in self.options.items())
        extras = [
            f"{self.ignored} ignored tokens" if self.ignored else "",
            "padded columns" if self.padding or self.rank_of_padding else "",
            "whose first logit is -inf" if self.hidden else "",
            "some tokens with a loss of 0" if self.sure else "",
            f"logits of about {self.shift:.0f}" if self.shift else "",
        ]
        text = ", ".join([f"{name}(logits, target{smoothing}{options})", *filter(None, extras)])
        return text + "," * bool(self.groups)  # because "in groups ..." follows


class Sample(NamedTuple):
    logits: Tensor  # [3, 7, padded v], or [3, 7, COLUMNS] on a rank
    target: Tensor  # [3, 7]
    vocab_size: int
    dy: Tensor  # [], the upstream gradient


def draw(case: Batch, generator: torch.Generator, size: int) -> Sample:
    vocab_size = case.vocab_size(size)
    logits = 2 * random_tensor(generator, *LEADING, size * COLUMNS) + case.shift
    logits[..., vocab_size:] += 3 + abs(case.shift)  # so that the padding makes a difference, even a little of it
    target = torch.randint(vocab_size, LEADING, generator=generator)
    if case.ignore_index >= 0:
        target[target == case.ignore_index] = vocab_size - 1
    places = torch.randperm(TOKENS, generator=generator)[: case.ignored]
    target.view(-1)[places] = case.ignore_index
    if case.sure:
        logits[0].scatter_(-1, target[0].unsqueeze(-1), 200.0)
    if case.hidden:
        logits.flatten(0, -2)[places, 0] = -torch.inf
    return Sample(logits, target, vocab_size, random_tensor(generator, 1).squeeze())


def give(case: Batch, sample: Sample, place: Place) -> Sample:
    return sample._replace(logits=place.part(sample.logits, -1))


def run(answer: Any, case: Batch, given: Sample, group: Any) -> Observed:
    logits, target = given.logits.to(device()), given.target.to(device())
    smoothing = () if case.smoothing is None else (case.smoothing,)
    options = {"vocab_size": given.vocab_size, **case.options}
    snapshot = Snapshot(target=target)
    shown = "".join([*(f", {value}" for value in smoothing), *(f", {key}={value}" for key, value in options.items())])
    with called_as(f"{answer.__name__}(logits {list(logits.shape)}, target {list(target.shape)}{shown})"):
        seen = observe(
            lambda z: answer(z, target, *smoothing, **options, group=group), given.dy.to(device()),
            inputs={"logits": logits},
        )  # fmt: skip
    seen["out"] = twins.loss_in(case.twin, seen["out"])
    seen["inputs unchanged"] = Changed([*seen["inputs unchanged"], *snapshot.changed()])
    return spends(seen, logits[..., 0], MOST, MOST)


def right(case: Batch, sample: Sample, place: Place) -> Observed:
    """Return the mean loss of PyTorch for the full logits without padding, and its gradient.

    In exercise 8.4, the other IDs share the smoothing. `F.cross_entropy` also gives a share to the target, so it needs
    a larger one.
    """
    leaf, v = sample.logits.clone().requires_grad_(), sample.vocab_size
    mean = F.cross_entropy(
        leaf[..., :v].flatten(0, -2), sample.target.flatten(), ignore_index=case.ignore_index,
        label_smoothing=(case.smoothing or 0.0) * v / (v - 1),
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(mean, leaf, sample.dy)
    return {
        "out": mean.detach(),
        "dlogits": place.part(gradient, -1),
        "forward traffic": place.traffic(*[("all_reduce", TOKENS)] * MOST),
        "backward traffic": place.traffic(),
    }


mean_loss = partial(
    OnRanks, draw=draw, give=give, run=run, right=right, without=lambda case: twins.ROUNDED if case.shift else ()
)


@dataclass(frozen=True)
class Outside(Case):
    """Targets outside the vocabulary. In total, the ranks have `columns` columns, two of which are padding."""

    columns: int

    @property
    def vocab_size(self) -> int:
        return self.columns - 2

    @property
    def ids(self) -> dict[str, int]:
        return {"a target of -1": -1, "in a padded column": self.vocab_size, "beyond all columns": self.columns}

    def describe(self, name: str) -> str:
        return f"with a wrong target, vocab_size={self.vocab_size}, {self.columns} columns"


def run_outside(answer: Any, case: Outside, logits: Tensor, group: Any) -> Observed:
    """Call the answer with each of these IDs, and return which error it raises."""
    seen: Observed = {}
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


THEIRS = ("vocab_parallel_cross_entropy", "parallel_linear_cross_entropy")

exercise(
    "8.3", "The loss of a real run", takes=["vocab_parallel_loss"], theirs=THEIRS,
    trials=[
        mean_loss(
            cases=[
                Batch(), Batch(ignored=5), Batch(padding=2), Batch(padding=1, rank_of_padding=True),
                Batch(padding=2, shift=-3e4), Batch(ignored=5, hidden=True), Batch(sure=True),
                Batch(padding=2, ignored=4, ignore_index=1), Batch(padding=2, ignored=4, ignore_index=1000),
                Batch(padding=1, rank_of_padding=True, ignored=2, shift=1e4),
                Batch(padding=2, ignored=3, groups=GROUPS),
            ]
        ),
        OnRanks(
            cases=lambda p: [Outside(p * COLUMNS)], run=run_outside,
            draw=lambda case, generator, size: random_tensor(generator, 3, COLUMNS),
            right=lambda case, problem, place: dict.fromkeys(case.ids, "IndexError"), world_sizes=(2, 1),
        ),
    ],
    passed="Your loss is the same as F.cross_entropy for the full logits, including padding and ignored tokens.",
)  # fmt: skip

exercise(
    "8.4", "Fix label smoothing", takes=["smoothed_loss"], theirs=THEIRS,
    trials=[
        mean_loss(
            cases=[
                Batch(smoothing=0.25), Batch(padding=2, smoothing=0.25), Batch(smoothing=0.0),
                Batch(padding=1, rank_of_padding=True, smoothing=0.5), Batch(padding=2, smoothing=0.125, shift=-3e4),
                Batch(padding=2, smoothing=0.1, sure=True), Batch(padding=2, smoothing=0.25, groups=GROUPS),
            ],
            world_sizes=(2, 4, 1),
        )
    ],
    passed="Your smoothed loss doesn't depend on the number of ranks anymore, and no padding gets into the average.",
)  # fmt: skip
