"""The cost model beside published tables, which no code of the model reads (`tplab.course.exercises.ch11.published`).

Parameters and FLOPs have to agree exactly. Times have to be within 10 % for each of the 28 published values on A100s,
and within 3 % on average. No constant was chosen by looking at these tables: the shares of the peak are Calculon's,
the rate of large matmuls is Bekman's, and bytes and kernels are counted. What the model can't explain has a test that
says so, with the numbers.
"""

import ast
import dataclasses
from statistics import fmean

import pytest

from tests import ROOT
from tplab.cost.flops import hardware_flops, model_flops
from tplab.cost.layer import layer_time
from tplab.cost.machines import MACHINES, TERMS, Machine, without
from tplab.cost.step import Program, achieved, step_time, throughput
from tplab.course.exercises.ch11.published import (
    KORTHIKANTI_TABLE_4,
    KORTHIKANTI_TABLE_5,
    LAYER_22B,
    LLAMA_3_TABLE_4,
    MEGATRON_V1_TFLOPS,
    NARAYANAN_TABLE_1,
    SHOEYBI_FIGURE_5,
    SHOEYBI_TABLE_8,
    SHOEYBI_TFLOPS,
    VOCABULARY,
    published_rows,
)
from tplab.memory.config import GPTConfig, parameter_count
from tplab.memory.memory_bill import Layout

A100, V100, H100 = MACHINES["A100 DGX"], MACHINES["V100 DGX-2H"], MACHINES["H100 DGX"]
PLAIN = Program(overlap_input_gradient=False)
runs = pytest.mark.parametrize("run", NARAYANAN_TABLE_1, ids=lambda run: run.name)
iterations = pytest.mark.parametrize("row", KORTHIKANTI_TABLE_5, ids=lambda row: row.name)


def test_no_module_of_the_model_reads_a_published_table():
    for path in sorted({*(ROOT / "tplab").glob("*.py")} - {ROOT / "tplab" / "__main__.py"}):
        imports = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        assert not any("course" in ast.unparse(node) for node in imports), path


# Narayanan et al. 2021, table 1


@runs
def test_parameters_are_those_of_equation_2(run):
    c = run.config
    h, layers = c.hidden_size, c.num_layers
    equation = 12 * layers * h**2 * (1 + 13 / (12 * h) + (VOCABULARY + c.seq_length) / (12 * layers * h))
    assert parameter_count(c) - 2 * h == pytest.approx(equation, rel=1e-12)  # the equation leaves out the last norm
    assert parameter_count(c) == pytest.approx(run.parameters, abs=0.06e9)


@runs
def test_flops_are_those_of_equation_3(run):
    c, batch = run.config, run.layout.sequences
    h, s, layers = c.hidden_size, c.seq_length, c.num_layers
    equation = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + VOCABULARY / (16 * layers * h))
    assert hardware_flops(c, batch, "layers") == pytest.approx(equation, rel=1e-12)


@runs
def test_layout_is_the_tables_and_its_share_of_the_peak_follows_from_its_flops(run):
    assert run.tflops * 1e12 / A100.flops == pytest.approx(run.share_of_peak, abs=0.006)
    seconds = hardware_flops(run.config, run.layout.sequences, "layers") / run.layout.gpus / (run.tflops * 1e12)
    assert achieved(run.config, run.layout, A100, seconds).hardware == pytest.approx(run.tflops * 1e12)


def test_gpus_and_batches_are_those_of_the_table():
    assert [run.layout.gpus for run in NARAYANAN_TABLE_1] == [32, 64, 128, 256, 512, 1024, 1536, 1920, 2520, 3072]
    assert [run.layout.sequences for run in NARAYANAN_TABLE_1] == [
        512, 512, 512, 1024, 1536, 1792, 2304, 2160, 2520, 3072,
    ]  # fmt: skip


# Shoeybi et al. 2019 and 2020, DGX-2H


def reached(config: GPTConfig, layout: Layout, program: Program = PLAIN) -> float:
    return throughput(config, layout, V100, program).hardware


def one_gpu() -> float:
    return reached(SHOEYBI_FIGURE_5[0].config, Layout(micro_batch=8, recompute="layers"))


@pytest.mark.parametrize("row", SHOEYBI_FIGURE_5, ids=lambda row: f"{row.parameters / 1e9}B")
def test_parameters_of_the_scaling_study(row):
    assert parameter_count(row.config) == pytest.approx(row.parameters, rel=0.03)


def test_one_v100_reaches_what_megatron_did_once_its_kernels_were_fused():
    assert one_gpu() == pytest.approx(MEGATRON_V1_TFLOPS * 1e12, rel=0.03)
    assert one_gpu() == pytest.approx(1.6 * SHOEYBI_TFLOPS * 1e12, rel=0.03)  # a year earlier the program was slower


@pytest.mark.parametrize("row", SHOEYBI_FIGURE_5, ids=lambda row: f"p = {row.tp}")
def test_weak_scaling_of_tensor_parallelism_is_that_of_figure_5(row):
    efficiency = reached(row.config, Layout(tp=row.tp, micro_batch=8, recompute="layers")) / one_gpu()
    assert efficiency == pytest.approx(row.efficiency, rel=0.05)


@pytest.mark.parametrize("row", SHOEYBI_FIGURE_5, ids=lambda row: f"p = {row.tp}")
def test_weak_scaling_with_64_replicas_lies_between_no_overlap_and_full_overlap(row):
    """Which of the two the paper had it doesn't say. Its 83 % at p = 2 is below both, and no other row is like it."""
    layout = Layout(tp=row.tp, dp=64, micro_batch=8, micro_batches=1, recompute="layers")
    least = reached(row.config, layout) / one_gpu()
    most = reached(row.config, layout, dataclasses.replace(PLAIN, overlap_gradients=True)) / one_gpu()
    assert least - 0.08 < row.with_data_parallel < most + 0.03


def strong_scaling() -> dict[int, float]:
    """Predicted over published speedup for each p of table 8."""
    config = SHOEYBI_FIGURE_5[0].config
    layouts = {p: Layout(tp=p, micro_batch=8, recompute="layers") for p in SHOEYBI_TABLE_8}
    seconds = {p: step_time(config, layout, V100, PLAIN).total for p, layout in layouts.items()}
    return {p: seconds[1] / seconds[p] / faster for p, faster in SHOEYBI_TABLE_8.items()}


def test_strong_scaling_of_2019_is_overstated_by_up_to_28_percent():
    assert list(strong_scaling().values()) == pytest.approx([1.0, 1.06, 1.18, 1.28], abs=0.01)


def test_the_missing_part_of_table_8_is_a_time_that_doesnt_get_shorter_with_p():
    """t(p) = a + b/p with a = 24 % of t(1) fits the published speedups within 2 %, so 24 % of the step isn't divided.

    Of these 24 %, the model has 5 at p = 8: all-reduces, norms, dropout. The other 19 aren't bandwidth, which would
    grow with (p-1)/p. It's what fits a program whose kernels weren't fused yet (39 instead of 62.4 TFLOP/s): work that
    every rank repeats, or time on the CPU.
    """
    fixed = 0.24
    for p, speedup in SHOEYBI_TABLE_8.items():
        assert 1 / (fixed + (1 - fixed) / p) == pytest.approx(speedup, rel=0.02)


# Dubey et al. 2024, "The Llama 3 Herd of Models", table 4, H100


@pytest.mark.parametrize("row", LLAMA_3_TABLE_4, ids=lambda row: f"{row.layout.gpus} GPUs")
def test_llama_3_405b_lies_between_no_interleaving_and_one_layer_per_chunk(row):
    """The paper doesn't say how many chunks its pipeline interleaves, so the prediction is a range."""
    slowest = throughput(row.config, row.layout, H100, row.program).model
    time = step_time(row.config, row.layout, H100, row.program)
    chunks = 8  # of one layer each
    fastest = achieved(row.config, row.layout, H100, time.total - time.bubble * (1 - 1 / chunks)).model
    assert slowest < row.tflops * 1e12 < fastest


# Korthikanti et al. 2022, A100


@iterations
def test_model_flops_give_the_published_utilisation_from_the_published_time(row):
    assert achieved(row.config, row.layout, A100, row.present_work).mfu == pytest.approx(row.mfu, abs=0.002)


@iterations
def test_hardware_flops_of_equation_8_count_the_attention_three_times(row):
    """4 B s^2 h a layer is computed again, and their equation adds 12: with that the HFU of table 5 comes out."""
    c, batch = row.config, row.layout.sequences
    once = 4 * batch * c.seq_length**2 * c.hidden_size * c.num_layers
    assert hardware_flops(c, batch, "attention") == model_flops(c, batch) + once
    theirs = (model_flops(c, batch) + 3 * once) / row.layout.gpus / row.present_work / A100.flops
    assert theirs == pytest.approx(row.hfu, abs=0.003)


# Every time on A100s


ROWS = published_rows()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_published_time_is_predicted_within_10_percent(row):
    assert row.predicted(A100) / row.published == pytest.approx(1, abs=0.1)


def speeds(machine: Machine) -> list[float]:
    """Predicted over published speed for each value."""
    return [row.predicted(machine) / row.published for row in ROWS]


def test_all_28_values_are_there_and_right_on_average():
    assert len(ROWS) == 10 + 2 * 5 + 2 * 4
    assert fmean(speeds(A100)) == pytest.approx(1, abs=0.03)


def test_without_the_terms_every_value_is_too_fast_by_14_to_30_percent():
    ideal = speeds(without(A100, *TERMS))
    assert 1.13 < min(ideal) < 1.15
    assert 1.29 < max(ideal) < 1.31


@pytest.mark.parametrize(
    ("term", "alone", "within"),  # mean with this term alone; values within 10 % if it is left out
    [
        ("matmul traffic", 1.147, 20), ("wave quantization", 1.160, 24), ("ring bandwidth", 1.191, 25),
        ("bookkeeping", 1.194, 25), ("memory bandwidth", 1.199, 24), ("kernel launches", 1.211, 26),
        ("busy SMs", 1.214, 28),
    ],
)  # fmt: skip
def test_each_term_explains_its_part_of_the_gap(term, alone, within):
    only = speeds(without(A100, *(other for other in TERMS if other != term)))
    assert fmean(only) == pytest.approx(alone, abs=0.002)
    left_out = speeds(without(A100, term))
    assert sum(abs(speed - 1) <= 0.1 for speed in left_out) == within
    assert fmean(left_out) > fmean(speeds(A100))


def test_an_unknown_term_is_refused():
    with pytest.raises(ValueError, match=r"'gravity'; the terms are matmul traffic, wave"):
        without(A100, "gravity")


def test_what_sequence_parallelism_and_recomputation_change_in_a_layer_is_that_of_table_4():
    """Measured: 0.5 ms less forward, 7.6 ms more for whole layers, 1.3 ms more for the attention."""

    def milliseconds(row, part: str) -> float:
        options = {"sequence_parallel": row.sequence_parallel, "recompute": row.recompute}
        time = layer_time(LAYER_22B, A100, micro_batch=4, tp=8, overlap=True, **options)
        return 1e3 * (time.forward if part == "forward" else time.recompute + time.backward).total

    base, sequence, layers, attention, _ = KORTHIKANTI_TABLE_4
    assert milliseconds(base, "forward") - milliseconds(sequence, "forward") == pytest.approx(0.5, abs=0.06)
    assert milliseconds(layers, "backward") - milliseconds(base, "backward") == pytest.approx(7.6, rel=0.06)
    assert milliseconds(attention, "backward") - milliseconds(base, "backward") == pytest.approx(1.3, rel=0.15)


@iterations
def test_what_full_recomputation_costs_a_step_is_that_of_table_5(row):
    again = dataclasses.replace(row.layout, sequence_parallel=False, recompute="layers")
    scattered = dataclasses.replace(row.program, scatter_gather=True)
    present = step_time(row.config, row.layout, A100, row.program).total
    layers = step_time(row.config, again, A100, scattered).total
    assert layers / present == pytest.approx(row.layers_again / row.present_work, rel=0.04)
