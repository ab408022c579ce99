"""A run that goes on from another grid's checkpoint has the losses of one that was never interrupted."""

import dataclasses
import warnings

import pytest
import torch
import torch.distributed as dist

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
from tplab.checkpoint.sharded import load_sharded, save_sharded
from tplab.cluster.three_dimensions import Training3D
from tplab.data.grid import Grid
from tplab.data.zero import ZeRO1
from tplab.data.zero_state import FullOptimizer
from tplab.gpt.model import ParallelGPT
from tplab.pipeline.schedules import zero_bubble

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


def _on_four(folder):
    return _one_after_the_other(folder), _resumed(folder), _seeds()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("four")


@pytest.fixture(scope="module")
def four(folder):
    return launch(_on_four, 4, args=(folder,), timeout=280)


def test_a_run_goes_on_with_another_grid_and_zero_stage(four, folder):
    assert len(RUNS) == STEPS
    losses, _, whole = one_process(MAX_NORM)
    for found, evaluated, extras in (on_rank[0] for on_rank in four):
        assert found == pytest.approx(losses, abs=1e-10)
        assert evaluated == pytest.approx(losses, abs=1e-10)  # before the step, on the same batch, without dropout
        assert extras == [{"step": 0}, {"step": 1}, {"step": 2}]
    alone = ParallelGPT(CONFIG, dtype=DTYPE)
    optimizer = torch.optim.AdamW(alone.parameters())
    load_sharded(folder / str(STEPS - 1), alone, optimizer=optimizer)
    for name, parameter in alone.named_parameters():
        found = parameter.detach()[: len(whole[name])]
        torch.testing.assert_close(found, whole[name], rtol=0, atol=1e-10)
    assert {int(state["step"]) for state in optimizer.state.values()} == {STEPS}
    assert optimizer.param_groups[0]["lr"] == OPTIONS["lr"]


DROPPING = dataclasses.replace(CONFIG, dropout=0.3)


def _dropping(folder, grid, config=DROPPING, micro_batches=2, until=4, **options):
    """Train up to step `until`, from the checkpoint in the folder or from the start, and save."""
    size = BATCH // (grid.dp * micro_batches)
    training = Training3D(
        config, grid, torch.optim.AdamW, micro_batches=micro_batches, micro_batch_size=size, seed=SEED, dtype=DTYPE,
        **OPTIONS, **options,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        extra = training.load(folder / "2") if (folder / "2").exists() else None
    assert extra in (None, {"name": "two steps"})
    torch.manual_seed(dist.get_rank())
    state = torch.get_rng_state()
    losses = [training.step(*batch(number)) for number in range(training.steps, until)]
    assert torch.equal(torch.get_rng_state(), state)  # the caller's own random numbers are left alone
    if until == 2:
        training.save(folder / "2", extra={"name": "two steps"})
    return losses, [str(warning.message) for warning in said if "dropout" in str(warning.message)]


GRIDS = [
    (Grid(2, 1, 2), {"zero": 2, **SEQUENCE_PARALLEL}),
    (Grid(1, 2, 2), {"micro_batches": 4, **CUTS}),
    (Grid(2, 2, 1), {"schedule": zero_bubble, "micro_batches": 2, **CUTS}),
]


def _resumed(folder):
    """Of each grid: the losses of a run without a stop, and those of one that was stopped after step 2 and resumed."""
    found = []
    for number, (grid, options) in enumerate(GRIDS):
        whole, _ = _dropping(folder / "nowhere", grid, **options)
        first, _ = _dropping(folder / f"dropping {number}", grid, until=2, **options)
        last, said = _dropping(folder / f"dropping {number}", grid, **options)
        found.append((whole, first + last, said))
    return found


def test_a_resumed_run_drops_the_same_elements_as_an_uninterrupted_one(four):
    for whole, parts, said in (run for on_rank in four for run in on_rank[1]):
        assert parts == whole
        assert said == []


OTHERS = {
    "tp was 1 and is 2 now": (Grid(1, 1, 2), {"micro_batches": 4}),
    "layers_per_stage was [3] and is [2, 1] now": (Grid(1, 2, 1), {"micro_batches": 4, **CUTS}),
    "micro_batch_size was 2 and is 4 now": (Grid(2, 1, 1), {"micro_batches": 1}),
}


def _on_other_grids(folder):
    whole, _ = _dropping(folder / "nowhere", Grid(2, 1, 1))
    _dropping(folder, Grid(2, 1, 1), until=2)
    others = {words: _dropping(folder, grid, **options) for words, (grid, options) in OTHERS.items()}
    silent = [_dropping(folder, grid, config=CONFIG, **options)[1] for grid, options in OTHERS.values()]
    return whole, others, silent


def _on_one(folder):
    """Go on from the checkpoint of two replicas, and from one that doesn't say how many steps there were."""
    found = _dropping(folder, Grid(1, 1, 1), micro_batches=4)
    training = Training3D(
        DROPPING, Grid(1, 1, 1), torch.optim.AdamW, micro_batches=1, micro_batch_size=1, dtype=DTYPE, **OPTIONS
    )
    with pytest.raises(ValueError, match="choose another name"):
        training.save(folder / "plain", extra={"Training3D": 1})
    save_sharded(folder / "plain", training.stage, optimizer=training.training.optimizer)
    with pytest.warns(UserWarning, match="doesn't say how many steps"):
        training.load(folder / "plain")
    return found, training.steps


def test_dropout_goes_on_with_another_dp_and_warns_about_another_grid(tmp_path):
    results = launch(_on_other_grids, 2, args=(tmp_path,), timeout=200)
    whole = results[0][0]
    for words in OTHERS:
        (losses, (said,)), (_, nothing) = (others[words] for _, others, _ in results)
        assert nothing == [], "only the first rank says it"
        assert words in said
        assert "drops different elements than an uninterrupted run" in said
        assert losses != pytest.approx(whole[2:], abs=1e-6)
    assert [silent for *_, silent in results] == [[[], [], []]] * 2, "without dropout there's nothing to say"
    (((last, said), steps),) = launch(_on_one, 1, args=(tmp_path,), timeout=120)
    assert last == pytest.approx(whole[2:], abs=1e-10)
    assert said == []
    assert steps == 0


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


def _seeds():
    training = Training3D(
        DROPPING, Grid(2, 2, 1), torch.optim.SGD, micro_batches=2, micro_batch_size=BATCH // 4, lr=0.1, **CUTS
    )
    seen = []
    draw = training.stage.forward

    def forward(x):
        seen.append([training.stage.rng._seed(name) for name in ("replicated", "sharded")])
        return draw(x)

    training.stage.forward = forward
    for number in range(2):
        training.step(*batch(number))
    return [seed for both in seen for seed in both]


def test_every_micro_batch_on_every_stage_has_random_states_of_its_own(four):
    seeds = [seed for on_rank in four for seed in on_rank[2]]
    assert len(seeds) == len(set(seeds)) == 4 * 2 * 2 * 2  # ranks, micro-batches, steps, states
