"""Hugging Face folders with the weights of two saves, or with files that are missing or damaged, against transformers.

Where transformers can read a folder, we read the same weights or refuse it. Nothing else may happen.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import saying
from tests.common import POINTER
from tplab.gpt.hugging_face import from_hugging_face
from tplab.gpt.hugging_face_folder import config_of_folder, load_folder
from tplab.gpt.model import ParallelGPT

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
IDS = torch.arange(20).view(2, 10)


def llama(seed):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24,
        vocab_size=150, max_position_embeddings=16, initializer_range=0.4,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def save(folder, seed, parts=False):
    llama(seed).save_pretrained(folder, max_shard_size="7KB" if parts else "1GB")
    return folder


def loaded(folder):
    model = ParallelGPT(config_of_folder(folder))
    load_folder(model, folder)
    return model


@torch.no_grad()
def assert_as_transformers_has_it(folder, seed):
    """Both read the weights of this seed."""
    from transformers import LlamaForCausalLM

    logits = llama(seed)(IDS).logits
    assert torch.equal(LlamaForCausalLM.from_pretrained(folder).eval()(IDS).logits, logits)
    assert torch.allclose(loaded(folder)(IDS, gather=True), logits, atol=1e-4)


def shards_of(folder):
    return sorted(folder.glob("model-*-of-*.safetensors"))


# Two saves


def test_an_index_whose_files_are_gone_gives_way_to_the_single_file(tmp_path):
    save(save(tmp_path, 1, parts=True), 2)
    assert (tmp_path / INDEX).exists()
    assert not shards_of(tmp_path)
    assert_as_transformers_has_it(tmp_path, 2)


def test_a_single_file_and_parts_are_refused_by_both_names_whatever_is_newer(tmp_path):
    save(save(tmp_path / "newer parts", 1), 2, parts=True)
    save(tmp_path / "newer single", 1, parts=True)
    shutil.copy(save(tmp_path / "two", 2) / SINGLE, tmp_path / "newer single")
    for folder, of_the_single in (("newer parts", 1), ("newer single", 2)):
        folder = tmp_path / folder
        with pytest.raises(ValueError, match=saying(SINGLE, INDEX, shards_of(folder)[0].name)):
            loaded(folder)
        (away := folder.parent / "away").mkdir(exist_ok=True)
        single = shutil.move(folder / SINGLE, away)
        assert_as_transformers_has_it(folder, 3 - of_the_single)  # the user has chosen the parts
        shutil.move(single, folder)
        for path in shards_of(folder):
            path.unlink()
        assert_as_transformers_has_it(folder, of_the_single)  # the user has chosen the single file


def test_variants_and_pickles_beside_the_weights_are_passed_over(tmp_path):
    folder = save(tmp_path / "one", 1)
    shutil.copy(save(tmp_path / "two", 2) / SINGLE, folder / "model.fp16.safetensors")
    shutil.copy(folder / SINGLE, folder / "adapter_model.safetensors")
    torch.save(llama(2).state_dict(), folder / "pytorch_model.bin")
    shutil.copy(save(tmp_path / "parts", 3, parts=True) / INDEX, folder / "model.safetensors.index.fp16.json")
    assert_as_transformers_has_it(folder, 1)
    (folder / SINGLE).unlink()
    with pytest.raises(FileNotFoundError, match="adapter_model.safetensors, model.fp16.safetensors, pytorch_model.bin"):
        loaded(folder)


def test_parts_that_do_not_belong_together_are_refused_by_name(tmp_path):
    whole = save(tmp_path / "whole", 1, parts=True)
    first, *_, last = parts = [path.name for path in shards_of(whole)]
    twice = next(iter(load_file(whole / first)))

    def refused(change, *says):
        folder = shutil.copytree(whole, tmp_path / f"changed {len(list(tmp_path.iterdir()))}")
        change(folder)
        with pytest.raises((ValueError, FileNotFoundError), match=saying(*says)):
            loaded(folder)

    refused(
        lambda folder: save_file({**load_file(folder / last), twice: torch.ones(1)}, folder / last),
        twice, "both", last,
    )  # fmt: skip
    refused(
        lambda folder: [(folder / name).unlink() for name in (first, last)],
        INDEX, f"{len(parts)} files", " 2 ", first, last,
    )  # fmt: skip
    # a newer index with the same file names, of no use: transformers goes by the files
    moved = "model.layers.0.mlp.up_proj.weight"
    index = {"weight_map": json.loads((whole / INDEX).read_text())["weight_map"] | {moved: last}}
    refused(lambda folder: (folder / INDEX).write_text(json.dumps(index)), INDEX, moved, last, "lacks")


def test_a_tensor_under_two_names_is_refused(tmp_path):
    state = load_file(save(tmp_path, 1) / SINGLE)
    state["norm.weight"] = state["model.norm.weight"] + 1
    save_file(state, tmp_path / SINGLE)
    for attempt in (lambda: loaded(tmp_path), lambda: from_hugging_face(state, config_of_folder(tmp_path))):
        with pytest.raises(ValueError, match=saying("norm.weight", "norm.weight")):
            attempt()


@pytest.mark.parametrize(
    ("name", "damage"), [(SINGLE, "truncated"), (SINGLE, "empty"), (SINGLE, "longer"), ("part", "pointer")]
)
def test_a_damaged_file_is_named_with_its_size_before_anything_is_loaded(name, damage, tmp_path):
    save(tmp_path, 1, parts=name == "part")
    path = shards_of(tmp_path)[1] if name == "part" else tmp_path / name
    model = ParallelGPT(config_of_folder(tmp_path))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    data = path.read_bytes()
    damages = {"pointer": POINTER.encode(), "truncated": data[:-2], "empty": b"", "longer": data + b"\0"}
    path.write_bytes(damages[damage])
    cure = r"269,060,552 bytes.*git lfs pull" if damage == "pointer" else "download"
    with pytest.raises(ValueError, match=rf"{path}.*\b{path.stat().st_size:,} bytes.*{cure}"):
        load_folder(model, tmp_path)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# Wrapped models


def test_a_compiled_model_gets_all_weights_and_a_parameter_without_any_is_named(tmp_path):
    plain = loaded(save(tmp_path, 1))
    model = torch.compile(ParallelGPT(config_of_folder(tmp_path)))
    load_folder(model, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    model.extra = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="2 parameters .*extra.bias"):
        load_folder(model, tmp_path)
