"""The check of exercise 8.3: the target's logit, which one rank knows and all need."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tplab.course.chapters.ch08.sharded import COLUMNS, Case, Sample, check_cases
from tplab.course.checks import (
    INPUTS_QUESTION,
    WORLD_SIZES,
    Observed,
    Question,
    Traffic,
    Verdict,
    called_as,
    exercise,
    fresh_generator,
    has_kind,
    has_no_gradient,
    make_group,
    observe,
    random_tensor,
    run_ranks,
    traffic,
    verify,
)
from tplab.runtime import device, record

_LARGEST = "the largest number over all ranks, each with 0 where another rank has the target"
_OWN = "what this rank has itself: 0 where another rank has the target"
_UNMASKED = "the sum over all ranks, where each took its first column for a target that is not its own"
_OWN_UNMASKED = "this rank's own number, its first column where another rank has the target"
_MODULO = "the sum over all ranks of the column target % (v/p)"
_KEPT = "the right one with one more dimension of size 1"
_D_UNMASKED = "dout in one column of every token, also where another rank has the target"


def run_target(answer: Any, cases: Sequence[Case], data: Sequence[Sequence[Any]]) -> list[Observed]:
    """On a rank: every case, one after the other."""
    seen = []
    for case, held in zip(cases, data, strict=True):
        group = make_group(case.groups)
        logits, target, dy = (tensor.to(device()) for tensor in held[dist.get_rank()])
        before = target.clone()
        with called_as(f"target_logit(logits {list(logits.shape)}, target {list(target.shape)}, group)"):
            noted = observe(
                lambda z, t=target, group=group: answer(z, t, group),
                dy,
                inputs={"logits": logits},
            )
        if not torch.equal(before, target):
            noted["inputs unchanged"] = type(noted["inputs unchanged"])([*noted["inputs unchanged"], "target"])
        seen.append(noted)
    return seen


def expect(s: Sample, index: int, p: int, ranks: tuple[int, ...]) -> tuple[dict[str, Any], Mapping[str, Any]]:
    right = s.logits.gather(-1, s.target.unsqueeze(-1)).squeeze(-1)
    gradient = torch.zeros_like(s.logits).scatter(-1, s.target.unsqueeze(-1), s.dy.unsqueeze(-1))
    alike = {_KEPT: right.unsqueeze(-1)}
    gradients: dict[str, torch.Tensor] = {}
    if s.q > 1:
        picked = torch.stack([s.picked(rank) for rank in range(s.q)])
        column = (s.target % COLUMNS).unsqueeze(-1)
        first = torch.where(s.owner() == index, s.target % COLUMNS, 0).unsqueeze(-1)
        owned = torch.stack([torch.where(s.owner() == rank, right, 0) for rank in range(s.q)])
        alike |= {
            _LARGEST: owned.amax(0),  # before _OWN: three tokens may have such signs that the two are one
            _OWN: owned[index],
            _OWN_UNMASKED: picked[index],
            _UNMASKED: picked.sum(0),
            _MODULO: sum(shard.gather(-1, column) for shard in s.shards).squeeze(-1),  # type: ignore[union-attr]
        }
        zeros = torch.zeros_like(s.shards[index])
        gradients |= {_D_UNMASKED: zeros.scatter(-1, first, s.dy.unsqueeze(-1))}
    expected = {
        "out": right,
        "dlogits": s.mine(gradient, index),
        "forward traffic": Traffic.expected(p, ("all_reduce", right.numel()), group=ranks),
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
        "Logits may be -inf, and 0 · -inf is NaN. How can a number be replaced without multiplying it?",
    ),
    Question(has_kind("out", _OWN), "One rank knows the number, and all need it. Which operator adds up forward?"),
    Question(
        has_kind("out", _UNMASKED, _OWN_UNMASKED, _MODULO),
        "For a target in another rank's columns yours adds the logit of some other column. What should this rank add "
        "there?",
    ),
    Question(
        has_kind("out", _LARGEST),
        "A logit below 0 loses against the zeros of the ranks that don't have it. What can be done with numbers of "
        "which all but one are 0, so that this one comes out, whatever it is?",
    ),
    Question(
        lambda d: any("gather" in row.text for row in d if "traffic" in row.name),
        "The number is right, but [.., v] logits travelled for it. Who has the one number that is needed?",
    ),
    Question(
        lambda d: "out" not in d.names and "forward traffic" in d.names,
        "The number is right. One all-reduce of one number a token is enough: is the tensor that you send still "
        "[.., v/p], or is there a message too many?",
    ),
    Question(
        has_no_gradient("dlogits"),
        "The output is right, but no gradient reaches the logits. Which line does autograd not see?",
    ),
    Question(
        lambda d: "backward traffic" in d.names or has_kind("dlogits", "p times")(d),
        "Backward, every rank has dout already, so there is nothing to send and nothing to add up. Which operator of "
        "chapter 03 adds up forward and does nothing backward?",
    ),
    Question(
        lambda d: "out" not in d.names and "dlogits" in d.names,
        "The output is right, its gradient is not. On the one rank that has the target it is dout in that column; "
        "everywhere else 0.",
    ),
    Question(
        lambda d: "out" in d.names,
        "Take the targets 0, v/p - 1, v/p and v - 1. Which rank has each, in which of its own columns? Rank r has the "
        "ids from r·v/p on.",
    ),
)

_CRASH = (
    "Each rank can look only into its own v/p columns. What is the target's column here, what is it where another rank "
    "has the target, and can `gather` look that up? The index has as many dimensions as the logits."
)
_OUTSIDE = (
    "An id below 0, or of v and more, belongs to nobody: every rank would add 0, and the loss would be a number like "
    "any other. Raise IndexError, with the id in the message, on every rank and before any collective. All ranks see "
    "the same targets."
)
_OUTSIDE_STUCK = (
    "Not every rank raises: one stops, and the others wait for it in a collective. All ranks see the same targets, so "
    "each can find out by itself, before any collective. What is v, if each rank has v/p columns?"
)


def outside(answer: Any, logits: torch.Tensor, bad: Mapping[str, int]) -> Observed:
    """On a rank: what it says to ids that are not in the vocabulary."""
    seen: Observed = {}
    for name, number in bad.items():
        try:
            with record() as section:
                answer(logits.to(device()), torch.tensor([0, number, COLUMNS - 1], device=device()), None)
        except IndexError as error:
            said = "IndexError" if str(number) in str(error) else "IndexError, but without the id in its message"
            said = "IndexError, but after a collective" if traffic(section) else said
        except NotImplementedError:
            raise
        except Exception as error:
            said = type(error).__name__
        else:
            said = "no error"
        seen[name] = said
    return seen


@exercise("8.3", "The target's logit")
def target_logit(answer: Any) -> Verdict:
    check_cases("8.3", answer, run_target, expect, QUESTIONS, crash=_CRASH)
    for p in WORLD_SIZES:
        logits, v = random_tensor(fresh_generator(), 3, COLUMNS), p * COLUMNS
        bad = {"a target of -1": -1, "of v": v, "of -100": -100, "of v + 7": v + 7}
        note = f"with a target outside the vocabulary of {v} ids"
        seen = run_ranks(outside, p, answer, logits, bad, question=_OUTSIDE, stuck=_OUTSIDE_STUCK, note=note)
        expected = dict.fromkeys(bad, "IndexError")
        verify("8.3", p, seen, [expected] * p, questions=[Question(lambda d: True, _OUTSIDE)], note=note)
    return Verdict("Each number comes from the one rank that has it. Ids that nobody has are refused.")
