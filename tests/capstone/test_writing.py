"""Text from a run's checkpoint: that of plain PyTorch without a cache, on any number of ranks."""

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests import saying
from tests.capstone.small import ONE_RANK, small, write_text
from tplab import launch
from tplab.capstone.__main__ import main
from tplab.capstone.checkpoints.writer import Checkpoints
from tplab.capstone.data.prepare import prepare
from tplab.capstone.data.tokenizer import END
from tplab.capstone.settings.run_folder import write_settings
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training import trainer
from tplab.checkpoint.sharded import load_sharded
from tplab.gpt.model import ParallelGPT
from tplab.plain import GPT

PROMPT, LONG = "def rank_", "0123456789" * 2  # which has more tokens than seq_length
TOKENS = 40  # beyond seq_length, 16


def _save(settings: Settings) -> None:
    """Checkpoints of two models with random weights, which write more varied text than a model of a few steps."""
    checkpoints = Checkpoints(Path(settings.folder, "checkpoints"))
    for number in (3, 6):
        torch.manual_seed(number)
        wide = partial(torch.nn.init.normal_, std=0.3)
        model = ParallelGPT(settings.model, init_method=wide, output_init_method=wide, dtype=torch.float64)
        checkpoints.save(number, model)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A run in float64, for two ranks."""
    text = write_text(tmp_path_factory.mktemp("writing") / "text")
    settings = small(text, "run", tp=2)
    write_settings(settings)
    prepare(settings)
    with torch.random.fork_rng(devices=[]):
        _save(settings)
    return settings


def plain(settings: Settings, prompt: str, end: int, vocab_size: int) -> list[int]:
    """The greedy tokens of a plain model, which computes all positions anew for each token."""
    model = GPT(settings.model, dtype=torch.float64)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=Path(settings.folder, "checkpoints", "step-000006"))
    model.load_state_dict(state["model"])
    text = prepare(settings).tokenizer.encode(prompt).ids or [END]
    begin, new = max(0, len(text) - settings.seq_length), list[int]()
    for _ in range(TOKENS):
        if len(text) - begin > settings.seq_length:
            begin = len(text) - settings.seq_length // 2
        with torch.no_grad():
            token = int(model(torch.tensor([text[begin:]]))[0, -1, :vocab_size].argmax())
        if token == end:
            break
        text.append(token)
        new.append(token)
    return new


@pytest.fixture(scope="module")
def cases(settings: Settings) -> dict[str, tuple[str, int, int]]:
    """A prompt to continue greedily, as if this token ended a text, and as if the tokenizer had so many tokens."""
    size = prepare(settings).vocab_size
    return {
        "greedy": (PROMPT, END, size), "ends": (PROMPT, plain(settings, PROMPT, END, size)[9], size),
        "fewer ids": (PROMPT, END, 50), "from the beginning": ("", END, size), "a long prompt": (LONG, END, size),
    }  # fmt: skip


def _write_all(settings: Settings, cases: dict[str, tuple[str, int, int]]) -> dict[str, str]:
    model, tokens, texts = ParallelGPT(settings.model, dtype=torch.float64), prepare(settings), {}
    load_sharded(Path(settings.folder, "checkpoints", "step-000006"), model)
    for seed in (5, 6):
        texts[f"seed {seed}"] = trainer.write(model, settings, tokens, PROMPT, TOKENS, seed=seed)
    for name, (prompt, trainer.END, tokens.vocab_size) in cases.items():
        texts[name] = trainer.write(model, settings, tokens, prompt, TOKENS, temperature=0.0)
    return texts


@pytest.fixture(scope="module")
def texts(settings: Settings, cases: dict[str, tuple[str, int, int]]) -> list[dict[str, str]]:
    return [text for p in (1, 4) for text in launch(_write_all, p, args=(settings, cases), timeout=200)]


def test_greedy_text_is_that_of_a_plain_model_without_a_cache(settings, cases, texts):
    decode = prepare(settings).tokenizer.decode
    new = {name: plain(settings, *case) for name, case in cases.items()}
    for name, (prompt, *_) in cases.items():
        assert all(of_rank[name] == prompt + decode(new[name]) for of_rank in texts), name
    assert len(new["ends"]) < len(new["greedy"]) == TOKENS


def test_drawn_text_depends_on_the_seed_and_not_on_the_ranks(texts):
    assert all(of_rank["seed 5"] == texts[0]["seed 5"] != of_rank["seed 6"] for of_rank in texts)


@pytest.mark.slow
def test_the_command_writes_the_newest_checkpoints_text_also_under_torchrun(settings, texts, capsys):
    """One rank, started as torchrun starts it: there are as many as it has started, and not as many as the run had."""
    flags = [settings.folder, "--prompt", PROMPT, "--tokens", str(TOKENS), "--temperature", "0"]
    wanted = texts[0]["greedy"] + "\n"
    assert main(["sample", *flags]) == 0
    assert capsys.readouterr().out == wanted
    command = [sys.executable, "-m", "tplab.capstone", "sample", *flags]
    run = subprocess.run(command, env=os.environ | ONE_RANK, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    assert run.stdout == wanted


@pytest.mark.parametrize(
    ("ignored", "says"),
    [
        (["tokens", "checkpoints"], saying("/run", "save_every")),
        (["settings.yaml"], saying("/run", "runs/laptop")),
    ],
)
def test_a_folder_without_anything_to_write_with_is_named(ignored, says, settings: Settings, capsys, tmp_path):
    shutil.copytree(settings.folder, tmp_path / "run", symlinks=True, ignore=lambda *_: ignored)
    assert main(["sample", str(tmp_path / "run")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.search(says, said.err), said.err
