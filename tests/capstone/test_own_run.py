"""The learner's layers in the loop of train.py: the plug is pulled for real, and the curve goes on as if it weren't."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests import ROOT, saying
from tests.capstone.small import small, write_text
from tests.chapter_runner import load_chapter_namespace
from tplab import launch
from tplab.capstone import naive
from tplab.capstone.learners_loop import Functions
from tplab.capstone.own_layers import find_answers
from tplab.capstone.own_run import Plug, checkpoints_of, losses_of, train_own
from tplab.capstone.settings.settings import Settings
from tplab.runtime import RankError

CHANGES = {"layers": "mine", "tp": 2, "precision": "float32", "steps": 9, "save_every": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Settings, object, Functions]:
    """A run that was never stopped, with the reference answers: its settings, the layers, and the functions."""
    text = write_text(tmp_path_factory.mktemp("own") / "text")
    settings = small(text, "whole", **CHANGES)
    answers = find_answers(ROOT / "solutions", settings, missing="tplab")
    given = load_chapter_namespace("15.3", {})
    names = ("newest_checkpoint", "save_checkpoint", "own_windows", "training_step")
    functions = Functions(*(given[name] for name in names))
    launch(train_own, 2, args=(settings, answers, functions))
    return settings, answers, functions


def killed(settings: Settings, answers: object, functions: Functions, plug: Plug) -> list[str]:
    """Train until the plug is pulled, and return the names in the folder of checkpoints."""
    with pytest.raises(RankError, match=saying("rank 1", "SIGKILL")):
        launch(train_own, 2, args=(settings, answers, functions, plug))
    return sorted(path.name for path in checkpoints_of(settings).iterdir())


def test_killed_twice_it_equals_the_run_that_was_never_stopped_bit_for_bit_and_with_replicas_nearly(whole):
    """tests/course/learn/test_train_script.py goes on on one rank."""
    settings, answers, functions = whole
    never_stopped = losses_of(settings)
    again = replace(settings, folder=str(Path(settings.folder).with_name("again")))
    assert killed(again, answers, functions, Plug(4)) == ["step-000002"]
    left = killed(again, answers, functions, Plug(6, saving=True))
    assert left == ["step-000002", "step-000004", "step-000006.saving"]
    replicas = replace(again, folder=f"{again.folder} on four", dp=2, micro_batch_size=4)
    shutil.copytree(again.folder, replicas.folder, symlinks=True)
    launch(train_own, 2, args=(again, answers, functions))
    assert losses_of(again) == never_stopped
    assert len(never_stopped) == 9
    launch(train_own, 4, args=(replicas, answers, functions))
    assert losses_of(replicas) == pytest.approx(never_stopped, abs=2e-5)


def test_a_checkpoint_in_place_that_is_half_written_stops_the_naive_run(whole):
    settings, answers, _ = whole
    first = replace(settings, folder=str(Path(settings.folder).with_name("naive")))
    assert killed(first, answers, naive.FUNCTIONS, Plug(4, saving=True)) == ["step-000002", "step-000004"]
    with pytest.raises(RankError, match="PytorchStreamReader"):
        launch(train_own, 2, args=(first, answers, naive.FUNCTIONS))
