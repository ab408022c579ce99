"""Layouts for a cluster: `tplab.cluster.plan` and the command `tplab plan`. All arithmetic."""

import dataclasses
import itertools
import math
import re

import pytest

from tests import saying
from tplab.cluster.plan import (
    NothingFits,
    best_of_each_split,
    gpt_shape,
    layouts,
    plans,
    program_of,
    reasons,
)
from tplab.cost.machines import MACHINES
from tplab.cost.step import Program, step_time
from tplab.course.commands import cli
from tplab.course.commands.plan import parameters
from tplab.memory.config import PRESETS, GPTConfig, parameter_count
from tplab.memory.memory_bill import Layout, bill

H100 = MACHINES["H100 DGX"]
SMALL = GPTConfig(num_layers=6, hidden_size=48, num_heads=12, vocab_size=64, seq_length=32)
LLAMA = PRESETS["Llama 3 70B"]
GPT_3 = PRESETS["GPT-3 175B"]


# A shape


@pytest.mark.parametrize("size", [1e6, 1e9, 70e9, 1e12])
def test_a_made_up_gpt_has_about_so_many_parameters_and_divides_well(size):
    config = gpt_shape(size, seq_length=1024)
    assert parameter_count(config) == pytest.approx(size, rel=0.1)
    assert config.seq_length == 1024
    if size >= 1e9:
        assert config.num_heads % 8 == config.num_layers % 4 == 0
        assert config.head_dim == 128
        assert 1 / 2 < config.hidden_size / config.num_layers / 128 < 2


# Layouts


@pytest.mark.parametrize(("gpus", "sequences"), [(8, 16), (12, 24), (6, 5)])
def test_every_layout_that_divides_is_there_once_and_no_other(gpus, sequences):
    wanted = set()
    for tp, pp, dp, b in itertools.product(range(1, gpus + 1), range(1, 7), range(1, gpus + 1), (1, 2, 4, 8, 16, 32)):
        if tp * pp * dp != gpus or 12 % tp or 192 % tp or sequences % (dp * b):
            continue
        for cut, again in itertools.product((False, True), ("nothing", "attention", "layers")):
            if not cut or (tp > 1 and 32 % tp == 0):
                steps = sequences // (dp * b)
                interleaved = pp > 1 and 6 % pp == steps % pp == 0
                for chunks in (v for v in range(1, 7) if v == 1 or (interleaved and 6 % (pp * v) == 0)):
                    wanted.add(Layout(tp, pp, dp, b, steps, cut, again, chunks))
    found = list(layouts(SMALL, gpus, sequences))
    assert len(found) == len(set(found))
    assert set(found) == wanted
    assert all(one.gpus == gpus and one.sequences == sequences for one in found)

    flash = dataclasses.replace(SMALL, flash_attention=True)
    assert {one.recompute for one in layouts(flash, 4, 4)} == {"nothing", "layers"}, "it keeps no scores to recompute"


# Plans


def test_plans_fit_are_fastest_first_and_say_what_memory_and_time_say():
    found = plans(LLAMA, 64, H100, sequences=512)
    assert [one.time.total for one in found] == sorted(one.time.total for one in found)
    for one in found[:3] + found[-3:]:
        assert one.bill == bill(LLAMA, one.layout)  # of the fullest of all stages
        assert one.bill.total <= 0.9 * H100.memory
        assert one.time == step_time(LLAMA, one.layout, H100, Program(overlap_gradients=True))
        assert one.achieved.seconds == one.time.total
        assert one.layout.gpus == 64
        assert one.layout.sequences == 512
    best = best_of_each_split(found)
    splits = [(one.layout.tp, one.layout.pp, one.layout.dp) for one in found]
    assert [found.index(one) for one in best] == sorted({splits.index(split) for split in splits})
    assert best[0] == found[0]


def test_no_layout_that_fits_is_missing():
    config = PRESETS["Llama 3 8B"]
    found = {one.layout for one in plans(config, 8, H100, sequences=16, shard_optimizer=True)}
    assert found > {one.layout for one in plans(config, 8, H100, sequences=16)}, "sharding should make more fit"
    for layout in layouts(config, 8, 16):
        whole = [bill(config, layout, stage=stage) for stage in range(layout.pp)]
        sharded = max(one.total - one.optimizer + math.ceil(one.optimizer / layout.dp) for one in whole)
        assert (layout in found) == (sharded <= 0.9 * H100.memory)
    large = dataclasses.replace(SMALL, vocab_size=50_000)  # its logits fill the last stage
    for small in (SMALL, large):
        assert all(one.bill == bill(small, one.layout) for one in plans(small, 4, H100, sequences=8))


def test_the_best_plan_for_gpt_3_on_96_h100s_is_near_what_megatron_reached():
    """Megatron-LM's README (core 0.8): 1152 sequences of 4096 tokens, vocabulary 131,072. It doesn't say the layout."""
    config = dataclasses.replace(
        PRESETS["GPT-3 175B"], vocab_size=131072, seq_length=4096, dropout=0.0, flash_attention=True
    )
    best = plans(config, 96, H100, sequences=1152, shard_optimizer=True)[0]
    assert 1.0 < best.achieved.mfu / 0.47 < 1.12


def test_where_nothing_fits_the_message_says_what_the_smallest_need_is():
    least = min(max(bill(LLAMA, layout, stage=s).total for s in range(layout.pp)) for layout in layouts(LLAMA, 8, 64))
    with pytest.raises(NothingFits, match=saying(f" {least / 1e9:.0f} GB", " 80 GB")):
        plans(LLAMA, 8, H100, sequences=64)


# Why the first one is the fastest


def test_each_other_choice_is_timed_with_everything_else_unchanged():
    found = plans(GPT_3, 96, H100, sequences=1152, shard_optimizer=True)
    best, seen = found[0], 0
    for option, others in reasons(GPT_3, found).items():
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
    ("call", "says"),
    [
        (lambda: gpt_shape(math.nan), saying("1e6", "1e14")),
        (lambda: plans(SMALL, 10**12, H100, sequences=8), "1000000000000 GPUs"),  # at once, however many
    ],
)
def test_what_cannot_be_planned_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()


# The command


def told(*arguments: str, capsys) -> str:
    assert cli.main(["plan", *arguments]) == 0
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


def test_the_command_prints_the_best_layouts_first(capsys):
    text = told("--params", "70e9", "--gpus", "64", "--gpu", "h100", capsys=capsys)
    best = plans(gpt_shape(70e9), 64, H100)[0]
    layout, need, reached = best.layout, best.bill, best.achieved
    row = f" {layout.tp} {layout.pp} {layout.dp} {layout.micro_batch} yes - "
    first = text[text.index(row) :].split()
    sizes = (need.total - need.activations, need.activations, need.total)
    assert first[6:9] == [f"{size / 1e9:.1f}" for size in sizes]
    assert first[9:12] == [f"{best.time.total:.3g}", f"{reached.model / 1e12:.0f}", f"{reached.mfu:.0%}"]
    assert f"init_device_mesh('cuda', ({layout.dp}, {layout.pp}, {layout.tp})" in text


def test_a_known_model_a_batch_a_sequence_and_a_sharded_optimizer_are_taken(capsys):
    arguments = ("--model", "Llama-3 70B", "--gpus", "16", "--gpu", "H200", "--batch", "32")
    text = told(*arguments, "--seq", "2048", "--shard-optimizer", capsys=capsys)
    config = dataclasses.replace(LLAMA, seq_length=2048)
    best = plans(config, 16, MACHINES["H200 DGX"], sequences=32, shard_optimizer=True)[0]
    assert re.search(saying("32 sequences", "2048 tokens", "16 GPUs", "H200 DGX"), text)
    assert f"{best.bill.total / 1e9:.1f} {best.time.total:.3g}" in text


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ("--params 70e9 --gpus 8 --gpu h100", 1, saying("69.8 billion parameters", "8 GPUs", "80 GB")),
        ("--params 70e9 --gpus 8 --gpu b100", 2, saying("'b100'", "V100 DGX-2H")),
        ("--params 7e9 --gpus 0 --gpu h100", 2, "gpus=0"),
        ("--gpus 8 --gpu h100", 2, "--params --model"),
        ("--params apples --gpus 8 --gpu h100", 2, saying("apples", "70e9")),
        ("--params nan --gpus 8 --gpu h100", 2, saying("1e6", "1e14")),
        ("--params inf --gpus 8 --gpu h100", 2, saying("1e6", "1e14")),
        ("--params=-7e9 --gpus 8 --gpu h100", 2, saying("1e6", "1e14")),
    ],
)
def test_mistakes_are_answered_in_words(arguments, code, says, capsys):
    try:
        returned = cli.main(["plan", *arguments.split()])
    except SystemExit as stopped:
        returned = stopped.code
    captured = capsys.readouterr()
    assert returned == code
    assert re.search(says, " ".join((captured.out + captured.err).split()))


def test_parameters_are_written_as_people_write_them():
    texts = {"70e9": 70e9, "70B": 70e9, "1.5b": 1.5e9, "350M": 350e6}
    assert {text: parameters(text) for text in texts} == texts
