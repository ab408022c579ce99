"""The check for exercise 8.3, the target's logit, which one rank holds and all ranks need."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tplab.course import checks
from tplab.course.exercises.ch08.sharded import CASES, SHAPE, WHOSE_GROUP, Logits, Sample, draw, give, on_device
from tplab.runtime import device, record

_COLUMNS = 3  # number of columns per rank when a target is an id that no rank holds
_LARGEST = "the largest number over all ranks, each with 0 where another rank has the target"
_OWN = "what this rank has itself: 0 where another rank has the target"
_UNMASKED = "the sum over all ranks, where each took its first column for a target that is not its own"
_OWN_UNMASKED = "this rank's own number, its first column where another rank has the target"
_MODULO = "the sum over all ranks of the column target % (v/p)"
_KEPT = "the right one with one more dimension of size 1"
_D_UNMASKED = "dout in one column of every token, also where another rank has the target"


def run(answer: Any, case: Logits, given: Sample, group: Any) -> checks.Observed:
    logits, target, dy, _ = on_device(given)
    snapshot = checks.Snapshot(target=target)
    with checks.called_as(f"target_logit(logits {list(logits.shape)}, target {list(target.shape)}, group)"):
        noted = checks.observe(lambda z: answer(z, target, group), dy, inputs={"logits": logits})
    return noted | {"inputs unchanged": checks.Changed([*noted["inputs unchanged"], *snapshot.changed()])}


def expect(case: Logits, sample: Sample, place: checks.Place) -> checks.Expected:
    logits, target, dy = sample.logits, sample.target.unsqueeze(-1), sample.dy.unsqueeze(-1)
    right = logits.gather(-1, target).squeeze(-1)
    alike = {_KEPT: right.unsqueeze(-1)}
    gradients: dict[str, Tensor] = {}
    if place.size > 1:
        columns = [sample.column_on(rank).unsqueeze(-1) for rank in range(place.size)]
        found = torch.stack([shard.gather(-1, c).squeeze(-1) for shard, c in zip(sample.shards, columns, strict=True)])
        owned = torch.stack([torch.where(sample.owner == rank, right, 0) for rank in range(place.size)])
        modulo = torch.stack([shard.gather(-1, target % sample.columns).squeeze(-1) for shard in sample.shards])
        alike |= {
            _LARGEST: owned.amax(0),  # before _OWN, because some signs of the logits make the two equal
            _OWN: owned[place.index],
            _OWN_UNMASKED: found[place.index],
            _UNMASKED: found.sum(0),
            _MODULO: modulo.sum(0),
        }
        zeros = torch.zeros_like(sample.shards[place.index])
        gradients |= {_D_UNMASKED: zeros.scatter(-1, columns[place.index], dy)}
    expected = {
        "out": right,
        "dlogits": place.part(torch.zeros_like(logits).scatter(-1, target, dy), -1),
        "forward traffic": place.traffic(("all_reduce", right.numel())),
        "backward traffic": place.traffic(),
    }
    return checks.Expected(expected, {"out": alike, "dlogits": gradients})


QUESTIONS = (
    checks.INPUTS_QUESTION,
    checks.Question(
        checks.has_kind("out", "none", "type", "structure", _KEPT),
        "One number for each token comes out, [..]. What does your last line return?",
    ),
    SHAPE,
    checks.Question(
        checks.has_kind("out", "nan"),
        "Logits may be -inf, and 0 · -inf is NaN. How can a number be replaced without multiplying it?",
    ),
    checks.Question(
        checks.has_kind("out", _OWN), "One rank knows the number, and all need it. Which operator adds up forward?"
    ),
    checks.Question(
        checks.has_kind("out", _UNMASKED, _OWN_UNMASKED, _MODULO),
        "For a target in another rank's columns yours adds the logit of some other column. What should this rank add "
        "there?",
    ),
    checks.Question(
        checks.has_kind("out", _LARGEST),
        "A logit below 0 loses against the zeros of the ranks that don't have it. What can be done with numbers of "
        "which all but one are 0, so that this one comes out, whatever it is?",
    ),
    checks.Question(
        lambda d: any("gather" in row.text for row in d if "traffic" in row.name),
        "The number is right, but [.., v] logits travelled for it. Who has the one number that is needed?",
    ),
    checks.Question(
        lambda d: "out" not in d.names and "forward traffic" in d.names,
        "The number is right. One all-reduce of one number a token is enough: is the tensor that you send still "
        "[.., v/p], or is there a message too many?",
    ),
    checks.Question(
        checks.has_no_gradient("dlogits"),
        "The output is right, but no gradient reaches the logits. Which line does autograd not see?",
    ),
    checks.Question(
        lambda d: "backward traffic" in d.names or checks.has_kind("dlogits", "p times")(d),
        "Backward, every rank has dout already, so there is nothing to send and nothing to add up. Which operator of "
        "chapter 03 adds up forward and does nothing backward?",
    ),
    checks.Question(
        lambda d: "out" not in d.names and "dlogits" in d.names,
        "The output is right, its gradient is not. On the one rank that has the target it is dout in that column; "
        "everywhere else 0.",
    ),
    checks.Question(
        lambda d: "out" in d.names,
        "Take the targets 0, v/p - 1, v/p and v - 1. Which rank has each, in which of its own columns? Rank r has the "
        "ids from r·v/p on.",
    ),
)

CRASH = (
    "Each rank can look only into its own v/p columns. What is the target's column here, what is it where another rank "
    "has the target, and can `gather` look that up? The index has as many dimensions as the logits."
)
OUTSIDE = (
    "An id below 0, or of v and more, belongs to nobody: every rank would add 0, and the loss would be a number like "
    "any other. Raise IndexError, with the id in the message, on every rank and before any collective. All ranks see "
    "the same targets."
)
STUCK = (
    "Not every rank raises: one stops, and the others wait for it in a collective. All ranks see the same targets, so "
    "each can find out by itself, before any collective. What is v, if each rank has v/p columns?"
)


@dataclass(frozen=True)
class Outside(checks.Case):
    """Targets outside the vocabulary, which has v ids."""

    v: int

    @property
    def ids(self) -> dict[str, int]:
        return {"a target of -1": -1, "of v": self.v, "of -100": -100, "of v + 7": self.v + 7}

    def describe(self, name: str) -> str:
        return f"with a target outside the vocabulary of {self.v} ids" + "," * bool(self.groups)


def outside(p: int) -> list[Outside]:
    return [Outside(p * _COLUMNS)] + [Outside(2 * _COLUMNS, groups=checks.GROUPS)] * (p == 4)


def draw_any(case: Outside, generator: torch.Generator, size: int) -> Tensor:
    return checks.random_tensor(generator, 3, _COLUMNS)


def run_outside(answer: Any, case: Outside, logits: Tensor, group: Any) -> checks.Observed:
    """Call the answer with each of these ids and record which error it raises. Runs on every rank."""
    seen: checks.Observed = {}
    for name, number in case.ids.items():
        try:
            with record() as section:
                answer(logits.to(device()), torch.tensor([0, number, _COLUMNS - 1], device=device()), group)
        except IndexError as error:
            said = "IndexError" if str(number) in str(error) else "IndexError, but without the id in its message"
            said = "IndexError, but after a collective" if checks.traffic(section) else said
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


@checks.exercise("8.3", "The target's logit")
def target_logit(answer: Any) -> checks.Verdict:
    checks.check_cases(
        "8.3", answer, CASES, draw=draw, give=give, run=run, expect=expect, questions=QUESTIONS, crash=CRASH,
        whose_group=WHOSE_GROUP,
    )  # fmt: skip
    checks.check_cases(
        "8.3", answer, outside, draw=draw_any, run=run_outside, expect=expect_refusal,
        questions=[checks.Question(lambda d: True, OUTSIDE)], crash=OUTSIDE, stuck=STUCK, whose_group=WHOSE_GROUP,
    )  # fmt: skip
    return checks.Verdict("Each number comes from the one rank that has it. Ids that nobody has are refused.")
