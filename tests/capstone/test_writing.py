"""Text from a run's checkpoint: that of plain PyTorch without a cache, on any ranks, shown as it is written."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
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
from tplab.capstone.data.corpus import Document
from tplab.capstone.data.prepare import prepare
from tplab.capstone.data.tokenizer import train_tokenizer
from tplab.capstone.settings.run_folder import write_settings
from tplab.capstone.settings.settings import Settings
from tplab.capstone.writing import Request
from tplab.gpt.model import ParallelGPT
from tplab.plain import GPT

PROMPT = "def rank_"
GREEDY = {"tokens": 40, "tp": 1, "step": None, "temperature": 0.0, "top_k": 0, "seed": 0}  # beyond seq_length, 16
DRAWN = {**GREEDY, "temperature": 0.8, "top_k": 40, "seed": 5}
WORLD_SIZES = (1, 4)


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


def plain(settings: Settings, step: int, request: Request) -> list[int]:
    """The greedy tokens of a plain model, which computes all positions anew for each token."""
    model = GPT(settings.model, dtype=torch.float64)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=Path(settings.folder, "checkpoints", f"step-{step:06d}"))
    model.load_state_dict(state["model"])
    text, begin = list(request.ids), 0
    for _ in range(request.tokens):
        if len(text) - begin > settings.seq_length:
            begin = len(text) - settings.seq_length // 2
        with torch.no_grad():
            token = int(model(torch.tensor([text[begin:]]))[0, -1, : request.vocab_size].argmax())
        if token == request.end:
            break
        text.append(token)
    return text


def asked(*args: Any, **options: Any) -> Request:
    """What `sample` asks the ranks to write."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "_write", lambda request, *_: request)
        return sample(*args, **options)  # type: ignore[return-value]


def _write_all(requests: dict[str, Request]) -> dict[str, str]:
    return {name: writing._on_a_rank(request, len) for name, request in requests.items()}


@pytest.fixture(scope="module")
def requests(settings: Settings) -> dict[str, Request]:
    greedy = asked(settings.folder, PROMPT, **GREEDY)
    end = plain(settings, 6, greedy)[len(greedy.ids) + 9]
    return {
        "greedy": greedy,
        "older": asked(settings.folder, PROMPT, **{**GREEDY, "step": 3}),
        "ends": replace(greedy, end=end),
        "fewer ids": replace(greedy, vocab_size=50),
        "drawn": asked(settings.folder, PROMPT, **DRAWN),
        "another seed": asked(settings.folder, PROMPT, **{**DRAWN, "seed": 6}),
    }


@pytest.fixture(scope="module")
def texts(requests: dict[str, Request]) -> dict[int, list[dict[str, str]]]:
    return {p: launch(_write_all, p, args=(requests,), timeout=200) for p in WORLD_SIZES}


def test_greedy_text_is_that_of_a_plain_model_without_a_cache(settings, requests, texts):
    steps = {"greedy": 6, "older": 3, "ends": 6, "fewer ids": 6}
    for name, step in steps.items():
        tokens = plain(settings, step, requests[name])
        wanted = prepare(settings).tokenizer.decode(tokens).rstrip("\ufffd")  # bytes at the end that make no character
        assert {of_rank[name] for of_ranks in texts.values() for of_rank in of_ranks} == {wanted}, name
    assert texts[1][0]["greedy"].startswith(PROMPT)
    assert len({texts[1][0][name] for name in steps}) == 4


def test_drawn_text_depends_on_the_seed_and_not_on_the_ranks(texts):
    drawn = {of_rank["drawn"] for of_ranks in texts.values() for of_rank in of_ranks}
    assert len(drawn) == 1
    assert {of_rank["another seed"] for of_ranks in texts.values() for of_rank in of_ranks}.isdisjoint(drawn)


def test_the_text_is_shown_while_it_is_written(settings, texts):
    pieces: list[str] = []
    text = sample(settings.folder, PROMPT, tp=2, tokens=400, seed=5, top_k=40, show=pieces.append)
    assert "".join(pieces) == text
    assert len(pieces) > 2
    assert text.startswith(texts[1][0]["drawn"])


@pytest.mark.slow
def test_the_command_writes_to_stdout_also_under_torchrun(settings, texts, capsys, monkeypatch):
    """One rank, started as torchrun starts it: there are as many as it has started, and not as many as the run had."""
    flags = [settings.folder, "--prompt", PROMPT, "--tokens", "40", "--temperature", "0", "--top-k", "0"]
    with monkeypatch.context() as patch:
        patch.setattr(writing, "_write", lambda request, tp, show: show(f"{tp} ranks, {request.tokens} tokens"))
        assert main(["sample", *flags, "--tp", "2"]) == 0
    assert capsys.readouterr().out == "2 ranks, 40 tokens\n"
    rank = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tplab.capstone", "sample", *flags]
    run = subprocess.run(command, env=os.environ | rank, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    assert run.stdout == texts[1][0]["greedy"] + "\n"


# Pieces


def test_no_piece_ends_inside_a_character(monkeypatch):
    """The tokenizer knows single bytes only, so a character takes up to four tokens."""
    tokenizer = train_tokenizer([Document("", "aa")], 300)
    text = "naïve 東京 🎉👩\u200d👧"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    broken = tokenizer.encode("東").ids[:2]
    request = Request(None, Path(), tokenizer, ids[:4], 0, 300, 1, 0.0, None, 0)  # type: ignore[arg-type]
    monkeypatch.setattr(writing, "_new_ids", lambda *_: [*ids[4:], *broken, *tokenizer.encode("x").ids, *broken])
    pieces = list(writing._pieces(None, request, None))  # type: ignore[arg-type]
    assert "".join(pieces) == text + "\ufffdx", "what never becomes a character is one sign, and half of one is none"
    assert all("\ufffd" not in piece for piece in pieces[: len(text)])


def test_what_arrives_in_two_parts_is_shown_whole(tmp_path: Path):
    shown: list[str] = []
    path = tmp_path / "text"
    path.write_bytes("a é".encode()[:-1])
    follow = writing._Follow(str(path), shown.append, list)
    follow.refresh()
    follow.refresh()
    writing._append(str(path), "")
    with open(path, "ab") as file:
        file.write("é".encode()[-1:])
    writing._append(str(path), "東")
    follow.close()
    assert shown == ["a ", "é東"]


# What can't be done


@pytest.mark.parametrize(
    ("folder", "flags", "says"),
    [
        ("nowhere", [], "there's no folder .*nowhere. Use the folder of a run, such as runs/laptop"),
        ("empty", [], "no run has been started in .*empty, because it has no settings.yaml"),
        ("without", [], "the run in .*without has no checkpoint yet. It saves one every save_every steps"),
        ("run", ["--prompt", ""], "the prompt is empty, but the model needs some text"),
        ("run", ["--prompt", "def \udcff"], r"prompt='def .udcff' isn't valid Unicode, .* position 4"),
        ("run", ["--prompt", "0" * 17], "the prompt has 17 tokens, but the model can only read seq_length=16"),
        ("run", ["--tp", "3"], "num_heads=4 can't be divided over 3 ranks"),
        ("run", ["--step", "5"], "the run in .*run has no checkpoint of step 5. It has checkpoints of 3, 6"),
        ("run", ["--tokens", "0"], "tokens=0 should be 1 or more"),
        ("run", ["--temperature", "nan"], "temperature=nan should be 0"),
        ("run", ["--top-k", "-1"], "top_k=-1 should be 0 or more"),
        ("run", ["--seed", "-1"], "seed=-1 should be between 0 and"),
    ],
)
def test_what_cannot_be_written_is_said_in_one_line(folder, flags, says, settings, capsys, tmp_path):
    run = Path(settings.folder)
    if folder == "empty":
        (tmp_path / folder).mkdir()
    elif folder == "without":
        shutil.copytree(run, tmp_path / folder, symlinks=True, ignore=lambda *_: ["tokens", "checkpoints"])
    where = run if folder == "run" else tmp_path / folder
    assert main(["sample", str(where), *flags]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert re.search(says, said.err), said.err
