"""Text from a run's checkpoint: that of plain PyTorch without a cache, on any number of ranks."""

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.capstone.small import small, write_text
from tplab import launch
from tplab.capstone import sample, writing
from tplab.capstone.__main__ import main
from tplab.capstone.checkpoints.writer import Checkpoints
from tplab.capstone.data.prepare import prepare
from tplab.capstone.settings.run_folder import write_settings
from tplab.capstone.settings.settings import Settings
from tplab.gpt.model import ParallelGPT
from tplab.plain import GPT

PROMPT = "def rank_"
TOKENS = 40  # beyond seq_length, 16


def _save(settings: Settings) -> None:
    """Checkpoints of two models with random weights, which write more varied text than a model of a few steps."""
    checkpoints = Checkpoints(Path(settings.folder, "checkpoints"))
    for step in (3, 6):
        torch.manual_seed(step)
        wide = partial(torch.nn.init.normal_, std=0.3)
        model = ParallelGPT(settings.model, init_method=wide, output_init_method=wide, dtype=torch.float64)
        checkpoints.save(step, model)


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


def plain(settings: Settings, ids: list[int], end: int, vocab_size: int) -> list[int]:
    """The greedy tokens of a plain model, which computes all positions anew for each token."""
    model = GPT(settings.model, dtype=torch.float64)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=Path(settings.folder, "checkpoints", "step-000006"))
    model.load_state_dict(state["model"])
    text, begin = list(ids), 0
    for _ in range(TOKENS):
        if len(text) - begin > settings.seq_length:
            begin = len(text) - settings.seq_length // 2
        with torch.no_grad():
            token = int(model(torch.tensor([text[begin:]]))[0, -1, :vocab_size].argmax())
        if token == end:
            break
        text.append(token)
    return text


def _write_all(requests: dict[str, tuple]) -> dict[str, list[int]]:
    return {name: writing._continued(*request) for name, request in requests.items()}


@pytest.fixture(scope="module")
def requests(settings: Settings) -> dict[str, tuple]:
    """What `sample` asks the ranks for: greedy text, text that ends early, text of fewer tokens, and drawn text."""
    asked: list[tuple] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "launch", lambda *_, args, **__: [asked.append(args) or []])
        for temperature, seed in ((0.0, 0), (0.8, 5), (0.8, 6)):
            sample(settings.folder, PROMPT, tokens=TOKENS, temperature=temperature, seed=seed)
    greedy, drawn, another = asked
    (*first, ids, end, vocab_size, tokens, temperature, seed) = greedy
    early = plain(settings, ids, end, vocab_size)[len(ids) + 9]
    return {
        "greedy": greedy, "ends": (*first, ids, early, vocab_size, tokens, temperature, seed),
        "fewer ids": (*first, ids, end, 50, tokens, temperature, seed), "drawn": drawn, "another seed": another,
    }  # fmt: skip


@pytest.fixture(scope="module")
def texts(requests: dict[str, tuple]) -> list[dict[str, list[int]]]:
    return [text for p in (1, 4) for text in launch(_write_all, p, args=(requests,), timeout=200)]


def test_greedy_text_is_that_of_a_plain_model_without_a_cache(settings, requests, texts):
    for name in ("greedy", "ends", "fewer ids"):
        wanted = plain(settings, *requests[name][2:5])
        assert all(of_rank[name] == wanted for of_rank in texts), name
    assert len(texts[0]["greedy"]) == len(requests["greedy"][2]) + TOKENS
    assert len(texts[0]["ends"]) < len(texts[0]["greedy"])


def test_drawn_text_depends_on_the_seed_and_not_on_the_ranks(texts):
    assert all(of_rank["drawn"] == texts[0]["drawn"] != of_rank["another seed"] for of_rank in texts)


@pytest.mark.slow
def test_the_command_writes_the_newest_checkpoints_text_also_under_torchrun(settings, texts, capsys):
    """One rank, started as torchrun starts it: there are as many as it has started, and not as many as the run had."""
    flags = [settings.folder, "--prompt", PROMPT, "--tokens", str(TOKENS), "--temperature", "0"]
    wanted = prepare(settings).tokenizer.decode(texts[0]["greedy"]) + "\n"
    assert main(["sample", *flags]) == 0
    assert capsys.readouterr().out == wanted
    rank = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tplab.capstone", "sample", *flags]
    run = subprocess.run(command, env=os.environ | rank, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    assert run.stdout == wanted


@pytest.mark.parametrize(
    ("folder", "flags", "says"),
    [
        ("nowhere", [], "no run has been started in .*nowhere. Use the folder of a run, such as runs/laptop"),
        ("without", [], "the run in .*without has no checkpoint yet. It saves one every save_every steps"),
        ("run", ["--prompt", ""], "the prompt has 0 tokens"),
        ("run", ["--prompt", "def \udcff"], r"prompt='def .udcff' isn't valid Unicode, .* position 4"),
        ("run", ["--prompt", "0" * 17], "the prompt has 17 tokens, but the model can read 1 to 16"),
        ("run", ["--tokens", "0"], "tokens=0 should be 1 or more"),
        ("run", ["--temperature", "nan"], "temperature=nan should be 0"),
        ("run", ["--seed", "-1"], "seed=-1 should be between 0 and"),
    ],
)
def test_what_cannot_be_written_is_said_in_one_line(folder, flags, says, settings: Any, capsys, tmp_path):
    run = Path(settings.folder)
    if folder == "without":
        shutil.copytree(run, tmp_path / folder, symlinks=True, ignore=lambda *_: ["tokens", "checkpoints"])
    where = run if folder == "run" else tmp_path / folder
    assert main(["sample", str(where), *flags]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert re.search(says, said.err), said.err
