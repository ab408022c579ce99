"""A run that starts from a Hugging Face folder: its first loss is that of transformers, and misfits are said."""

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, processors
from torch.nn import functional as F

from tests.capstone.small import SMALL, write_text
from tests.common.test_downloads import POINTER
from tests.gpt.test_hugging_face_folder import use_torchs_rms_norm
from tplab import launch
from tplab.capstone.__main__ import main
from tplab.capstone.data.corpus import gather
from tplab.capstone.data.prepare import Batches, prepare
from tplab.capstone.data.tokenizer import END_OF_TEXT, train_tokenizer
from tplab.capstone.settings.io import read_settings, settings_of
from tplab.capstone.settings.settings import OF_THE_MODEL, Settings
from tplab.capstone.training import step
from tplab.capstone.training.loop import train

VOCAB, HIDDEN, HEADS, LAYERS, LENGTH = 310, 16, 4, 2, 24


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("capstone") / "text")


@pytest.fixture(scope="module")
def gpt2(text: Path) -> Path:
    """A folder as save_pretrained writes it. Its tokenizer would cut texts, and would read an end of text in them."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    config = GPT2Config(
        n_layer=LAYERS, n_embd=HIDDEN, n_head=HEADS, n_positions=LENGTH, vocab_size=VOCAB, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.4,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    for parameter in model.parameters():  # biases and norms too
        parameter.data += 0.1 * torch.randn(parameter.shape)
    folder = text.parent / "gpt2"
    model.save_pretrained(folder)
    tokenizer = train_tokenizer(gather(str(text)).documents, 300)
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.enable_truncation(5)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def mistral(gpt2: Path) -> Path:
    """The same of a model with grouped heads and a sliding window."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(2)
    config = MistralConfig(
        num_hidden_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=2,
        intermediate_size=40, max_position_embeddings=LENGTH, vocab_size=VOCAB, bos_token_id=0, eos_token_id=0,
        sliding_window=5, initializer_range=0.4,
    )  # fmt: skip
    folder = gpt2.parent / "mistral"
    MistralForCausalLM(config).save_pretrained(folder)
    shutil.copy(gpt2 / "tokenizer.json", folder)
    return folder


def settings_from(start: Path, name: str, **given: Any) -> Settings:
    rest = {key: value for key, value in asdict(SMALL).items() if key not in OF_THE_MODEL | {"start_from"}}
    folder, data = start.parent / name, start.parent / "text"
    return settings_of({**rest, "folder": str(folder), "data": str(data), "start_from": str(start), **given})


def theirs(folder: Path, settings: Settings) -> float:
    """The loss of transformers' model in float64 on the run's first batch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    use_torchs_rms_norm(model)
    model = model.double().eval()
    batches = Batches(prepare(settings).train, settings.seq_length, settings.batch_size, settings.seed)
    ids, targets = batches.batch(0)
    with torch.no_grad():
        return F.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten()).item()


GRIDS: dict[str, dict[str, Any]] = {
    "alone": {}, "dp": {"dp": 2, "micro_batch_size": 4}, "pp": {"pp": 2, "micro_batch_size": 2},
    "cut": {"tp": 2, "sequence_parallel": True},
}  # fmt: skip


def _train_all(runs: dict[str, Settings]) -> dict[str, list[float]]:
    return {name: train(settings).losses for name, settings in runs.items()}


@pytest.fixture(scope="module")
def losses(gpt2: Path, mistral: Path) -> dict[str, list[float]]:
    """The losses of two steps, by folder and grid."""
    few = {"steps": 2, "warmup_steps": 1}
    runs = {f"{folder.name}, {name}": settings_from(folder, f"{folder.name}-{name}", **few, **changes)
            for folder in (gpt2, mistral) for name, changes in GRIDS.items()}  # fmt: skip
    alone = {name: settings for name, settings in runs.items() if settings.ranks == 1}
    both = {name: settings for name, settings in runs.items() if settings.ranks == 2}
    one, two = launch(_train_all, 2, args=(both,), timeout=300)
    assert one == two
    return one | _train_all(alone)


def test_the_first_loss_is_that_of_transformers(losses, gpt2: Path, mistral: Path):
    for folder in (gpt2, mistral):
        right = theirs(folder, settings_from(folder, f"{folder.name}-alone"))
        _, next_one = losses[f"{folder.name}, alone"]
        assert abs(next_one - right) > 1e-3
        for grid in GRIDS:
            assert losses[f"{folder.name}, {grid}"] == pytest.approx([right, next_one], abs=1e-10), grid


def test_the_model_is_that_of_the_folder_and_a_run_goes_on_without_it(gpt2: Path):
    settings = settings_from(gpt2, "whole", steps=4, save_every=1)
    model = (settings.num_layers, settings.hidden_size, settings.num_heads, settings.seq_length, settings.vocab_size)
    assert model == (LAYERS, HIDDEN, HEADS, LENGTH, VOCAB)
    assert (settings.activation, settings.dropout, settings.steps) == ("gelu_tanh", 0.0, 4)
    losses = train(settings).losses
    moved = shutil.copytree(gpt2, gpt2.parent / "moved")
    cut = settings_from(moved, "in parts", steps=4, save_every=1, stop_after=2)
    first = train(cut).losses
    shutil.rmtree(moved)
    again = settings_of({"stop_after": 4}, read_settings(Path(cut.folder, "settings.yaml")))
    assert first + train(again).losses == losses


def test_the_tokens_are_those_of_its_tokenizer_whole_and_without_ends_of_text_inside(gpt2: Path, tmp_path: Path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(3):
        (texts / f"{number}.txt").write_text(f"def rank_{number}(tensor):\n    return '{END_OF_TEXT}'\n" * 20)
    files = prepare(settings_from(gpt2, "tokens", data=str(texts)))
    ids = [*files.train.tolist(), *files.validation.tolist()]
    plain = Tokenizer.from_file(str(gpt2 / "tokenizer.json"))
    ends = [place for place, token in enumerate(ids) if token == 0]
    begins = [0, *(place + 1 for place in ends)]
    parts = [plain.decode(ids[begin:end]) for begin, end in zip(begins, ends, strict=False)]
    whole = "".join(path.read_text() for path in sorted(texts.iterdir()))
    assert ends[-1] == len(ids) - 1
    assert all(part in whole for part in parts)
    assert sum(map(len, parts)) == len(whole)
    assert sum(part.count(END_OF_TEXT) for part in parts) == 60
    assert (files.end_of_text, files.vocab_size) == (0, 300)
    assert str(files).endswith("a vocabulary of 300."), "there are as many as it has"


@pytest.mark.parametrize(("template", "before"), [("$A </s>", []), ("<s> $A </s>", [300]), ("</s> $A </s>", [])])
def test_each_document_has_one_end_and_an_empty_prompt_is_what_follows_an_end(
    template: str, before: list[int], gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Ids 300 and 301 begin and end a text in the tokenizer's template, and id 301 in the configuration."""
    start = changed(gpt2, tmp_path / "start")
    tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 300), ("</s>", 301)]
    )
    tokenizer.save(str(start / "tokenizer.json"))
    config = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps(config | {"eos_token_id": 301}))
    prompts: list[list[int]] = []

    def generated(_model: Any, ids: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
        prompts.append(ids[0].tolist())
        assert options["vocab_size"] == 302
        return ids

    monkeypatch.setattr(step, "generate", generated)
    data, texts = str(gpt2.parent / "text"), []
    for prompt in ("", "def"):
        settings = settings_from(start, f"{template} {prompt}", data=data, steps=1, sample_tokens=3, prompt=prompt)
        settings = replace(settings, folder=str(tmp_path / "runs" / f"prompt {prompt}"), warmup_steps=0)
        train(settings)
    plain = tokenizer.encode("def", add_special_tokens=False).ids
    begins = tokenizer.encode("", add_special_tokens=True).ids[: template.split().index("$A")]
    assert prompts == [begins or [301], begins + plain]
    files = prepare(settings)
    for ids in (files.train.tolist(), files.validation.tolist()):
        assert ids[-1] == 301
        parts = [part.split() for part in " ".join(map(str, ids)).removesuffix(" 301").split(" 301 ")]
        assert all(part[: len(before)] == list(map(str, before)) for part in parts)
        texts += [tokenizer.decode([int(number) for number in part]) for part in parts]
    assert sorted(texts) == sorted(path.read_text() for path in Path(data).iterdir())


def changed(
    gpt2: Path, folder: Path, without: str = "", damaged: str = "", config: dict[str, Any] | None = None
) -> Path:
    """A copy of the folder without a file, with a damaged one, or with other options in its configuration."""
    shutil.copytree(gpt2, folder)
    if damaged:
        (folder / damaged).write_text(POINTER)
    if without:
        (folder / without).unlink()
    if config is not None:
        options = json.loads((folder / "config.json").read_text()) if "model_type" not in config else {}
        (folder / "config.json").write_text(json.dumps(options | config))
    return folder


LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": VOCAB,
    "num_key_value_heads": 2, "max_position_embeddings": 24, "intermediate_size": 32,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "flags", "says"),
    [
        ({}, ["--hidden-size", "32"], "the model in .* has hidden_size=16, but you asked for hidden_size=32"),
        ({}, ["--tp", "3"], "num_heads=4 can't be divided over 3 ranks"),
        ({"without": "config.json"}, [], "there is no .*config.json: is this the folder of a Hugging Face model?"),
        ({"without": "tokenizer.json"}, [], "there's no tokenizer.json in .*, but the run needs"),
        ({"damaged": "tokenizer.json"}, [], "tokenizer.json is a git-lfs pointer"),
        ({"damaged": "model.safetensors"}, [], "model.safetensors is a git-lfs pointer"),
        ({"without": "model.safetensors"}, [], "there is no model.safetensors and no model.safetensors.index.json"),
        ({"config": {"model_type": "bert"}}, [], "model_type='bert': only 'gpt2'"),
        ({"config": {"vocab_size": 299}}, [], "has ids up to 299, but the model's table has only 299 rows"),
        ({"config": LLAMA}, [], "has rotary_scaling=.*, which the capstone doesn't support"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line_before_ranks_start(options, flags, says, gpt2, tmp_path, capsys):
    folder = changed(gpt2, tmp_path / "model", **options)
    place = ["--folder", str(tmp_path / "run"), "--data", str(gpt2.parent / "text"), "--preset", "laptop"]
    assert main([*place, "--start-from", str(folder), *flags]) == 2
    said = capsys.readouterr().err
    assert re.search(says, said), said
    assert said.count("\n") == 1
