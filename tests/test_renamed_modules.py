"""The module names of tplab 0.1, which its chapters taught, keep working in 0.2 and say what the new name is."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tplab
from tests import ROOT
from tplab import viz

# Every name that a chapter of 0.1 imported from tplab
IMPORTS_OF_0_1 = """
from tplab import collectives, corpus, device, launch, memory, record
from tplab.cost import collective as collective_cost
from tplab.tensor import embedding
from tplab.tensor import mappings
from tplab.collectives import links
from tplab import viz
from tplab.data import zero
from tplab.data import zero3 as zero_three
from tplab.pipeline import schedule_order
from tplab.pipeline import schedules
from tplab.gpt import transformer
from tplab.tensor import rng
from tplab.tensor.attention import ParallelAttention
from tplab.capstone import PRESETS
from tplab.capstone.study import programs as measuring
from tplab.capstone.training.log import read_log, steps_of
from tplab.capstone.study.programs import Short
from tplab.capstone.own_layers.find import find_answers
from tplab.capstone.watching.panel import run
from tplab.capstone.planning.predictions import machine_of, predicted_memory, predicted_step
from tplab.capstone.report import compose, write_report
from tplab.capstone.report.blocks import Figure
from tplab.capstone.report.run import Run
from tplab.capstone.training.step import Step
from tplab.capstone.study.run import Budget, study
from tplab.capstone.planning.traffic import step_parts
from tplab.capstone.training.loop import train
from tplab.tensor.full_state import full_state_dict, load_full_state_dict
from tplab.trace.chrome import save_chrome_trace
from tplab.cost.collective import all_reduce
from tplab.course import check, predict, progress, show_failure, symptoms
from tplab.course.exercises.ch11 import published
from tplab.course.exercises.ch15.killing import killed_at
from tplab.course.exercises.ch15.saving import Writer
from tplab.tensor.cross_entropy import vocab_parallel_cross_entropy
from tplab.tensor.embedding import VocabParallelEmbedding, pad_vocab_size, parallel_logits
from tplab.gpt.model import ParallelGPT
from tplab.gpt_config import GPTConfig, PRESETS, parameter_count
from tplab.pipeline.stages import gpt_stages
from tplab.data.grad_norm import clip_grad_norm
from tplab.tensor.initialization import init_parameter
from tplab.cost.layer import layer_time, overlap_saving
from tplab.tensor.linear import ColumnParallelLinear, RowParallelLinear, column_linear
from tplab.tensor.linear_cross_entropy import parallel_linear_cross_entropy
from tplab.collectives.links import Link
from tplab.cost.machines import MACHINES, measure_machine
from tplab.tensor.mappings import copy_to_region, gather_from_region, reduce_from_region, scatter_to_region
from tplab.memory import GPTConfig, GPUS, Layout, bill
from tplab.memory_meter import MemoryMeter, gradient_bytes, optimizer_bytes, parameter_bytes, saved_for_backward
from tplab.memory_meter import tensor_bytes
from tplab.data.grid import Grid, mesh
from tplab.tensor.mlp import ParallelMLP
from tplab.pipeline.executor import Pipeline
from tplab.tensor.qkv import QKVParallelLinear, copies_group
from tplab.tensor.rng import checkpoint, dropout, seed_all
from tplab.tensor.rotary import rotary_angles, rotate
from tplab.runtime import Record
from tplab.pipeline.schedule_order import Span
from tplab.pipeline.schedules import Action, Schedule
from tplab.sequence.regions import gather_from_sequence_region, reduce_scatter_to_sequence_region
from tplab.sequence.linear import gather_linear_again
from tplab.sequence.gpt import SequenceParallelGPT, allreduce_sequence_parallel_gradients
from tplab.tensor.sharding import Block, Sharding, divide, shard, unshard
from tplab.cost.step import Program, step_time, throughput
from tplab.cluster.three_dimensions import Training3D
from tplab.trace.rank_trace import RankTrace, Span, trace_rank
from tplab.gpt.transformer import ParallelTransformerLayer
from tplab.pipeline.p2p import Lanes
from tplab.data.zero_cost import zero_memory
"""


@pytest.mark.parametrize("old", tplab.RENAMED)
def test_an_old_name_is_the_new_module_and_warns_where_it_is_imported(old, monkeypatch):
    monkeypatch.delitem(sys.modules, old, raising=False)
    new = importlib.import_module(tplab.RENAMED[old])
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new.__name__}") as caught:
        exec(compile(f"import {old} as found", "a notebook", "exec"), namespace := {})
    assert namespace["found"] is new
    assert new.__spec__.name == new.__name__
    assert caught[0].filename == "a notebook"


@pytest.mark.slow
def test_every_import_of_a_chapter_of_0_1_still_works():
    """In a fresh process, where no module has been imported under its new name before."""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", IMPORTS_OF_0_1], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(("old", "new"), [("held", "layouts"), ("kept", "saved_activations")])
def test_a_picture_by_its_old_name_warns(old, new):
    with pytest.warns(DeprecationWarning, match=f"viz.{old} is now viz.{new}"):
        assert getattr(viz, old) is getattr(viz, new)
    with pytest.raises(AttributeError):
        viz.no_such_picture  # noqa: B018


def test_the_project_itself_uses_no_old_name():
    old = re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, tplab.RENAMED)) + r")(?![\w])")
    own = {ROOT / "tplab" / "__init__.py", Path(__file__)}
    sources = [
        path for folder in ("tplab", "tests", "solutions", "benchmarks") for path in (ROOT / folder).rglob("*.py")
    ]
    found = {str(path.relative_to(ROOT)): old.findall(path.read_text()) for path in sources if path not in own}
    assert {name: names for name, names in found.items() if names} == {}
