"""The stages of the examples: parts of one model, and pauses in the order of the lists."""

import torch
from torch import nn

from tplab import device, launch
from tplab.pipeline import Pipeline, schedules
from tplab.pipeline.examples import ByteStage, in_units, timed


def test_stages_are_parts_of_the_full_model():
    full = ByteStage().double()
    ids = torch.randint(256, (3, 8))
    for count in (1, 2, 4):
        stages = [ByteStage(number, count).double() for number in range(count)]
        for stage in stages:
            stage.load_state_dict({name: full.state_dict()[name] for name in stage.state_dict()})
        names = [name for stage in stages for name in stage.state_dict()]
        assert sorted(names) == sorted(full.state_dict())
        torch.testing.assert_close(nn.Sequential(*stages)(ids), full(ids), rtol=0, atol=0)


def pausing():
    plan = schedules.one_f_one_b(2, 3)

    def run_stage(stage, actions, channels, x, loss, inputs, targets):
        pipeline = Pipeline(
            [stage], plan, shape=x.shape, loss_sum=loss, count=lambda target: 1, device=device(), channels=channels
        )
        pipeline.step(inputs, targets)

    return timed(run_stage, plan.actions, unit=0.001)


def test_what_was_timed_is_in_the_order_of_the_lists():
    ranks = in_units(launch(pausing, 2), unit=0.001)
    plan = schedules.one_f_one_b(2, 3)
    assert [[span.action for span in row] for row in ranks] == [list(row) for row in plan.actions]
    assert min(span.start for row in ranks for span in row) == 0
    spans = {(rank, str(span.action)): span for rank, row in enumerate(ranks) for span in row}
    assert all(spans[0, f"F{k}"].end <= spans[1, f"F{k}"].start for k in range(3))
    assert all(spans[1, f"B{k}"].end <= spans[0, f"B{k}"].start for k in range(3))
