"""The check of exercise 8.5: the mean loss, with padded columns, ignored tokens and label smoothing."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tplab.course.chapters.ch08.loss_cases import CASES, COLUMNS, Case, expect, sample
from tplab.course.chapters.ch08.sharded import WHOSE_GROUP
from tplab.course.chapters.ch08.whole_loss_questions import CRASH, FEW, OUTSIDE, QUESTIONS, SILENT
from tplab.course.checks import (
    WORLD_SIZES,
    Changed,
    Claim,
    Observed,
    Question,
    Snapshot,
    Verdict,
    ask_about_group,
    by_name,
    called_as,
    exercise,
    fresh_generator,
    group_question,
    make_group,
    member_of,
    observe,
    random_tensor,
    run_cases,
    run_ranks,
    verify,
)
from tplab.runtime import device


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
                question=lambda case: ask_about_group(WHOSE_GROUP) if case.groups else CRASH,
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
        seen = run_ranks(outside, p, answer, logits, bad, vocab_size, question=OUTSIDE, stuck=OUTSIDE, note=note)
        expected = dict.fromkeys(bad, "IndexError")
        verify("8.5", p, seen, [expected] * p, questions=[Question(lambda d: True, OUTSIDE)], note=note)
    return Verdict("Equal to F.cross_entropy on the whole logits: padding, ignored tokens and smoothing included.")
