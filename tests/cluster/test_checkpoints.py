"""A run that goes on from another grid's checkpoint has the losses of one that was never interrupted."""

import pytest
import torch

from tests.cluster.test_three_dimensions import (
    BATCH,
    CONFIG,
    CUTS,
    DTYPE,
    MAX_NORM,
    OPTIONS,
    SEED,
    SEQUENCE_PARALLEL,
    STEPS,
    batch,
    one_process,
)  # fmt: skip
from tplab import launch
from tplab.checkpoint.sharded import load_sharded
from tplab.cluster.three_dimensions import Training3D
from tplab.data.grid import Grid
from tplab.data.zero import ZeRO1
from tplab.data.zero_state import FullOptimizer
from tplab.gpt.model import ParallelGPT

# Each run does one step and saves. The next one, on another grid, goes on from there.
RUNS = [
    (Grid(2, 2, 1), {**CUTS, "zero": 2}),
    (Grid(1, 2, 2), {**CUTS, **SEQUENCE_PARALLEL}),
    (Grid(2, 1, 2), {"zero": 3}),
    (Grid(2, 2, 1), {"layers_per_stage": [1, 2], "zero": 1}),
]


def _training(grid, options):
    return Training3D(
        CONFIG, grid, torch.optim.AdamW, micro_batches=2, micro_batch_size=BATCH // (grid.dp * 2), seed=SEED,
        dtype=DTYPE, max_norm=MAX_NORM, **OPTIONS, **options,
    )  # fmt: skip


def _one_after_the_other(folder):
    losses, extras, evaluated = [], [], []
    for number, (grid, options) in enumerate(RUNS):
        training = _training(grid, options)
        if number:
            extras.append(training.load(folder / str(number - 1)))
        evaluated.append(training.evaluate(*batch(number)))
        losses.append(training.step(*batch(number)))
        training.save(folder / str(number), extra={"step": number})
    with pytest.raises(FileExistsError):
        training.save(folder / "0")
    return losses, evaluated, extras


def test_a_run_goes_on_with_another_grid_and_zero_stage(tmp_path):
    assert len(RUNS) == STEPS
    losses, _, whole = one_process(MAX_NORM)
    for found, evaluated, extras in launch(_one_after_the_other, 4, args=(tmp_path,), timeout=200):
        assert found == pytest.approx(losses, abs=1e-10)
        assert evaluated == pytest.approx(losses, abs=1e-10)  # before the step, on the same batch, without dropout
        assert extras == [{"step": 0}, {"step": 1}, {"step": 2}]
    alone = ParallelGPT(CONFIG, dtype=DTYPE)
    optimizer = torch.optim.AdamW(alone.parameters())
    load_sharded(tmp_path / str(STEPS - 1), alone, optimizer=optimizer)
    for name, parameter in alone.named_parameters():
        found = parameter.detach()[: len(whole[name])]
        torch.testing.assert_close(found, whole[name], rtol=0, atol=1e-10)
    assert {int(state["step"]) for state in optimizer.state.values()} == {STEPS}
    assert optimizer.param_groups[0]["lr"] == OPTIONS["lr"]


def test_zeros_state_is_that_of_the_plain_optimizer_and_can_be_loaded_into_it():
    def trained(make):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        optimizer = make(model.parameters())
        for x in torch.randn(3, 5, 3, generator=torch.Generator().manual_seed(1)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        return model, optimizer

    _, plain = trained(lambda parameters: torch.optim.AdamW(parameters, lr=0.1))
    _, zero = trained(lambda parameters: ZeRO1(parameters, torch.optim.AdamW, lr=0.1, bucket_bytes=1000))
    full = FullOptimizer(zero)
    with pytest.raises(ValueError, match=r"call gather\(\) on all ranks first"):
        full.state_dict()
    full.gather()
    theirs, ours = plain.state_dict(), full.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(ours["state"][number][key], value)

    theirs["state"][0]["step"] += 1
    with pytest.raises(ValueError, match=r"step is \[3.0, 4.0\] for the parameters of a bucket"):
        full.load_state_dict(theirs)
    del theirs["state"][0]
    with pytest.raises(ValueError, match="for 1 of its 4 parameters"):
        full.load_state_dict(theirs)


def test_a_master_weight_survives_a_checkpoint():
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    zero = ZeRO1(model.parameters(), torch.optim.SGD, lr=1e-4, master_dtype=torch.float32)
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    zero.step()
    (unit,) = zero.units
    master = unit.master.detach().clone()
    assert not torch.equal(master, unit.shard.float())
    full = FullOptimizer(zero)
    full.gather()
    other = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    again = ZeRO1(other.parameters(), torch.optim.SGD, lr=1e-4, master_dtype=torch.float32)
    other.load_state_dict(model.state_dict())
    FullOptimizer(again).load_state_dict(full.state_dict())
    again.units[0].before_step()
    assert torch.equal(again.units[0].master, master)
