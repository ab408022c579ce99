"""Why a plan is the first, and what would have to change: against plans that are made and timed here."""

import dataclasses

import pytest

from tplab.cluster.alternatives import LARGEST, Change, change_needed, reasons, runners_up
from tplab.cluster.plan import layouts, plans, program_of
from tplab.collectives.links import Link
from tplab.cost.machines import MACHINES, Machine
from tplab.cost.step import step_time
from tplab.memory.config import PRESETS
from tplab.memory.memory_bill import bill

H100 = MACHINES["H100 DGX"]
GPT_3 = PRESETS["GPT-3 175B"]


@pytest.fixture(scope="module")
def gpt_3_plans():
    """All plans of GPT-3 on 96 H100s, the fastest one first."""
    return plans(GPT_3, 96, H100, sequences=1152, shard_optimizer=True)


def test_the_next_best_divide_the_model_in_other_ways(gpt_3_plans):
    splits = [(plan.layout.tp, plan.layout.pp, plan.layout.dp) for plan in (gpt_3_plans[0], *runners_up(gpt_3_plans))]
    assert len(set(splits)) == 4
    fastest_of_others = next(
        plan for plan in gpt_3_plans if (plan.layout.tp, plan.layout.pp, plan.layout.dp) != splits[0]
    )
    assert runners_up(gpt_3_plans)[0] == fastest_of_others


def test_each_other_choice_is_timed_with_everything_else_unchanged(gpt_3_plans):
    best, seen = gpt_3_plans[0], 0
    for option, others in reasons(GPT_3, gpt_3_plans).items():
        for value, longer in others:
            layout = dataclasses.replace(best.layout, **{option: value})
            if option == "micro_batch":
                layout = dataclasses.replace(layout, micro_batches=best.layout.sequences // (layout.dp * value))
            assert layout.sequences == best.layout.sequences
            if longer is None:
                of_stages = (bill(GPT_3, layout, stage=stage) for stage in (0, layout.pp - 1))
                needs = max(one.total - one.optimizer * (1 - 1 / layout.dp) for one in of_stages)
                assert needs > 0.9 * H100.memory
            else:
                seconds = step_time(GPT_3, layout, H100, program_of(True)).total
                assert longer == pytest.approx(seconds / best.time.total - 1)
                assert longer >= 0
            seen += 1
    assert seen >= 6


@pytest.mark.parametrize(
    ("model", "gpu", "sequences"),
    [
        ("Llama 3 8B", "H200 DGX", 8),  # each replica has a single sequence, so twice the micro-batch is more than that
        ("GPT-2 1.5B", "V100 DGX-2H", 24),  # with twice the micro-batch, the interleaved chunks don't divide the steps
    ],
)
def test_only_possible_layouts_are_among_the_other_choices(model, gpu, sequences):
    config = PRESETS[model]
    found = plans(config, 8, MACHINES[gpu], sequences=sequences)
    best = found[0].layout
    possible = set(layouts(config, 8, sequences))
    doubled = best.sequences / (best.dp * 2 * best.micro_batch)
    assert doubled < 1 or doubled % best.pp, "the example doesn't show what it should"
    assert 2 * best.micro_batch not in [value for value, _ in reasons(config, found).get("micro_batch", [])]
    for option, others in reasons(config, found).items():
        for value, _ in others if option != "micro_batch" else ():
            assert dataclasses.replace(best, **{option: value}) in possible


def changed(change: Change, factor: float) -> Machine:
    def faster(link: Link) -> Link:
        return Link(link.alpha, link.beta / factor)

    return {
        "the links within a node": dataclasses.replace(H100, inside=faster(H100.inside)),
        "the network between nodes": dataclasses.replace(H100, between=faster(H100.between)),
        "the GPUs' memory": dataclasses.replace(H100, bandwidth=H100.bandwidth * factor),
        "the GPUs' matmuls": dataclasses.replace(H100, flops=H100.flops * factor),
    }[change.what]


@pytest.mark.parametrize("place", range(3))
def test_the_next_best_is_as_fast_after_the_change_and_not_yet_after_half_of_it(place, gpt_3_plans):
    other = runners_up(gpt_3_plans)[place]
    change = change_needed(GPT_3, gpt_3_plans[0], other, H100, program_of(True))
    assert change is not None
    assert 1 / LARGEST <= change.factor <= LARGEST

    def gap(factor: float) -> float:
        machine = changed(change, factor)
        first, second = (
            step_time(GPT_3, one.layout, machine, program_of(True)).total for one in (gpt_3_plans[0], other)
        )
        return second - first

    assert gap(change.factor) <= 0 < gap(change.factor**0.5)
    assert gap(change.factor) == pytest.approx(0, abs=0.02 * gpt_3_plans[0].time.total)


def test_no_change_helps_a_layout_that_does_the_same_and_more(gpt_3_plans):
    """With the layers recomputed, a step of the same layout is longer on every machine and with every batch."""
    slower = next(
        plan for plan in gpt_3_plans if plan.layout == dataclasses.replace(gpt_3_plans[0].layout, recompute="layers")
    )
    assert change_needed(GPT_3, gpt_3_plans[0], slower, H100, program_of(True)) is None
