"""Saved on some ranks, loaded on others: `tplab.checkpoint.sharded`, and the modules that it stands on.

What should be in a checkpoint is what `full_state_dict` gathers, and what torch's own tools find there without tplab.
"""

import os
import pickle
import re
import shutil
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from tests import saying
from tests.reference import assert_close, random
from tplab import launch
from tplab.checkpoint.sharded import load_sharded, save_sharded
from tplab.collectives.by_hand import rank_and_size
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig
from tplab.plain import GPT, MLP
from tplab.tensor.attention import ParallelAttention
from tplab.tensor.full_state import full_state_dict
from tplab.tensor.mlp import ParallelMLP
from tplab.tensor.rng import seed_all

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # where DCP itself is called here

WORLD_SIZES = (1, 2, 4)
OPTIMIZERS = {1: "adamw", 2: "sgd", 4: "adamw"}  # that this many ranks train with
EXTRA = {"step": 2, "loss": 0.5, "milestones": Counter({30: 1, 80: 2}), "last": [0.1, None], "seen": torch.arange(3)}
CONFIG = GPTConfig(num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=1, gated=True, ffn_hidden_size=24,
                   vocab_size=300, seq_length=6, dropout=0.0)  # fmt: skip
LARGE = replace(CONFIG, num_layers=1, hidden_size=128, num_kv_heads=4, ffn_hidden_size=1024, vocab_size=3001)


def make(group=None):
    """A GPT with heads of K, V that several ranks hold, a fused gate, a padded table with two names, and a buffer."""
    model = ParallelGPT(CONFIG, group=group, dtype=torch.float64)
    model.tied = nn.ParameterList([model.embedding.weight])
    model.register_buffer("tokens_seen", torch.zeros((), dtype=torch.int64))
    return model


def optimizer_of(kind, model):
    named = dict(model.named_parameters())
    if kind == "sgd":
        return torch.optim.SGD(named.values(), lr=0.05, momentum=0.9)
    groups = [  # in another order than the model's, and of two kinds
        {"params": [p for n, p in reversed(named.items()) if "norm" in n], "weight_decay": 0.0},
        {"params": [p for n, p in named.items() if "norm" not in n], "lr": torch.tensor(0.02, dtype=torch.float64)},
    ]
    # eps: the gradient of K's bias is only rounding, and divided by its own size it would be none any more
    return torch.optim.AdamW(groups, lr=0.01, amsgrad=True, eps=1e-3)


def train(model, optimizer, steps):
    for step in steps:
        ids = (random((2, CONFIG.seq_length), "ids", step).abs() * 1000).long() % CONFIG.vocab_size
        model.tokens_seen += ids.numel()
        optimizer.zero_grad()
        model(ids, ids).backward()
        optimizer.step()


def held(model, optimizer):
    """What this rank holds: {name: (tensor, its sharding)} of the model and of the optimizer, the hyperparameters."""
    tensors = {n: (t.detach().clone(), sharding_of(t)) for n, t in model.state_dict(keep_vars=True).items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            sharding = sharding_of(parameter) if key != "step" else None
            tensors[f"{name} {key}"] = value.clone(), sharding
    return tensors, [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def sharding_of(tensor):
    return getattr(tensor, "tensor_parallel", None)


def whole(of_ranks):
    """The whole tensors, of those that each rank holds."""
    names = of_ranks[0]
    return {n: s.unshard([r[n][0] for r in of_ranks]) if s else t for n, (t, s) in names.items()}


def assert_holds(tensors, expected, rank, p, tolerance):
    assert tensors.keys() == expected.keys()
    for name, (tensor, sharding) in tensors.items():
        part = sharding.shard(expected[name], rank, p) if sharding else expected[name]
        if tolerance:
            assert_close(tensor, part, tolerance)
        else:
            assert torch.equal(tensor, part), name


def own_group(groups):
    """(number, group) of this rank among groups that all ranks make."""
    if groups is None:
        return 0, None
    number = next(number for number, ranks in enumerate(groups) if dist.get_rank() in ranks)
    return number, [dist.new_group(ranks) for ranks in groups][number]


def _save(root, groups=None):
    """Train, save, go on: what was saved, what came of it, and the model gathered."""
    number, group = own_group(groups)
    seed_all(5 + 10_000 * number, group)
    model = make(group)
    optimizer = optimizer_of(OPTIMIZERS[rank_and_size(group)[1]], model)
    train(model, optimizer, range(2))
    save_sharded(root / f"group{number}", model, optimizer=optimizer, extra=EXTRA, group=group)
    saved = held(model, optimizer)
    train(model, optimizer, range(2, 3))
    return saved, held(model, optimizer), full_state_dict(model, group)


def _load(checkpoints, groups=None):
    """The same from each checkpoint: what was loaded, what came of it, and the extra."""
    number, group = own_group(groups)
    results = []
    for path, kind in checkpoints if groups is None else [checkpoints[number]]:
        seed_all(6, group)
        model = make(group)
        for tensor in model.state_dict().values():
            tensor.fill_(7)  # in the padding of the table too
        optimizer = optimizer_of(kind, model)
        for parameters in optimizer.param_groups:
            parameters["lr"] = parameters["lr"] * 3
        extra = load_sharded(path, model, optimizer=optimizer, group=group)
        loaded = held(model, optimizer)
        train(model, optimizer, range(2, 3))
        results.append((loaded, held(model, optimizer), extra))
    return results


def _save_all(root):
    """What this number of ranks saves. Everything is in the same launch, because a launch takes longer."""
    p = rank_and_size()[1]
    torch.manual_seed(4)
    save_sharded(root / f"large{p}", ParallelGPT(LARGE))
    found = {"saved": _save(root / f"p{p}")}
    if p == 2:
        found["refusals"] = _refusals(root / "refusals")
    if p == 4:
        torch.manual_seed(4)
        save_sharded(root / "copies", ParallelAttention(16, 4, 2, bias=False))
        found["side by side"] = _save(root / "side by side", [[0, 2], [1, 3]])
        found["drifted"] = _drifted(root / "drifted")
    return found


def _load_all(root):
    """What this number of ranks makes of all that was saved."""
    p = rank_and_size()[1]
    found = {"loaded": _load([(root / f"p{p}" / "group0", OPTIMIZERS[p]) for p in WORLD_SIZES])}
    if p == 4:
        _go_on(root / "plain", root / "cut by tplab", partial(ParallelMLP, 8, dtype=torch.float64))
        checkpoints = [(root / "side by side" / name, OPTIMIZERS[2]) for name in ("group1", "group0")]
        found["side by side"] = _load(checkpoints, [[0, 1], [2, 3]])
    return found


def by_name(results):
    """{name: what each rank found}."""
    return {name: [found[name] for found in results] for name in results[0]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The checkpoints' folder, what each number of ranks saved, and what each number of ranks made of all of them."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name in ("refusals", "drifted"):
        (root / name).mkdir()
    plain, optimizer = plain_after_a_step()
    content = {"model": plain.state_dict(), "optimizer": get_optimizer_state_dict(plain, optimizer)}
    dcp.save(content, checkpoint_id=root / "plain", no_dist=True)
    saved, loaded = (
        {p: by_name([program(root)] if p == 1 else launch(program, p, args=(root,), timeout=None)) for p in WORLD_SIZES}
        for program in (_save_all, _load_all)
    )
    return root, saved, loaded


def test_what_each_rank_saves_is_its_part_of_the_full_state_dict(runs):
    _, saved, _ = runs
    for results in (of_ranks["saved"] for of_ranks in saved.values()):
        tensors = whole([tensors for _, (tensors, _), _ in results])
        assert all(torch.equal(tensors[name], tensor) for name, tensor in results[0][2].items())


def test_any_number_of_ranks_loads_exactly_what_any_number_saved_and_goes_on_as_if_it_had_not_been_interrupted(runs):
    _, saved, loaded = runs
    for (number, p), q in product(enumerate(WORLD_SIZES), WORLD_SIZES):
        of_p = saved[p]["saved"]
        expected, groups = whole([tensors for (tensors, _), *_ in of_p]), of_p[0][0][1]
        afterwards = whole([tensors for _, (tensors, _), *_ in of_p])
        for rank, results in enumerate(loaded[q]["loaded"]):
            (tensors, own_groups), (later, _), extra = results[number]
            assert_holds(tensors, expected, rank, q, 0)
            assert own_groups == groups
            assert {**extra, "seen": extra["seen"].tolist()} == {**EXTRA, "seen": [0, 1, 2]}
            assert_holds(later, afterwards, rank, q, 1e-10)


def test_torch_reads_the_whole_model_and_optimizer_from_the_files(runs, tmp_path):
    root, saved, _ = runs
    for p in WORLD_SIZES:
        of_ranks = [saved_by_rank for saved_by_rank, *_ in saved[p]["saved"]]
        expected = whole([tensors for tensors, _ in of_ranks])
        dcp_to_torch_save(root / f"p{p}" / "group0", tmp_path / "all.pt")
        found = torch.load(tmp_path / "all.pt", weights_only=True)
        assert found.keys() == {"model", "optimizer", "extra"}
        state = {f"{n} {k}": t for n, entries in found["optimizer"]["state"].items() for k, t in entries.items()}
        tensors = found["model"] | state
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
        groups = [{k: v for k, v in g.items() if k != "params"} for g in found["optimizer"]["param_groups"]]
        assert groups == of_ranks[0][1]
        assert found["extra"]["milestones"] == EXTRA["milestones"]


def test_groups_side_by_side_save_and_load_their_own(runs):
    saved, loaded = (of_ranks[4]["side by side"] for of_ranks in runs[1:])
    for now, before in (([0, 1], [1, 3]), ([2, 3], [0, 2])):  # ranks 0 and 1 go on from what 1 and 3 saved
        was = [saved[rank] for rank in before]
        for rank in (0, 1):
            (tensors, _), (tensors_after, _), _ = loaded[now[rank]][0]
            assert_holds(tensors, whole([tensors for (tensors, _), *_ in was]), rank, 2, 0)
            assert_holds(tensors_after, whole([tensors for _, (tensors, _), *_ in was]), rank, 2, 1e-10)
    first, second = (saved[rank][0][0]["final_norm.weight"][0] for rank in (0, 1))
    assert not torch.equal(first, second)


# What is on the disk


@pytest.mark.parametrize("p", WORLD_SIZES)
def test_every_number_is_written_once(p, runs):
    large = runs[0] / f"large{p}"
    numbers = sum(parameter.numel() for parameter in GPT(LARGE).parameters())
    sizes = [file.stat().st_size for file in large.glob("*.distcp")]
    metadata = dcp.FileSystemReader(large).read_metadata()
    places = {(info.relative_path, info.offset) for info in metadata.storage_data.values()}
    assert 4 * numbers < sum(sizes) < 4 * numbers + 3000 * len(places)  # each piece as torch.save writes it
    assert len(sizes) == p
    assert max(sizes) < 4 * numbers / p * 1.1
    (chunk,) = metadata.state_dict_metadata["model.final_norm.weight"].chunks
    assert tuple(chunk.sizes) == (LARGE.hidden_size,)


def test_copies_are_written_by_the_first_rank_that_holds_them(runs):
    metadata = dcp.FileSystemReader(runs[0] / "copies").read_metadata()
    files = {i.offset[0]: s.relative_path for i, s in metadata.storage_data.items() if i.fqn == "model.qkv.weight"}
    ranks = {row: int(file[2]) for row, file in sorted(files.items())}
    assert ranks == {0: 0, 4: 1, 8: 2, 12: 3, 16: 0, 20: 2, 24: 0, 28: 2}  # 4 heads of Q, 2 of K, 2 of V; 4 rows each


# Other tools, other modules


def step(model, optimizer, key):
    optimizer.zero_grad()
    (model(random((3, 8), "x", key)) * random((3, 8), "dy", key)).sum().backward()
    optimizer.step()


def plain_after_a_step():
    torch.manual_seed(4)
    model = MLP(8, dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer, 1)
    return model, optimizer


def _go_on(source, target, make):
    """Go on from what a plain model saved, by one step, and save that."""
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    load_sharded(source, model, optimizer=optimizer)
    step(model, optimizer, 2)
    save_sharded(target, model, optimizer=optimizer)


def test_a_plain_model_goes_on_from_a_sharded_one_and_the_other_way_round(runs):
    plain, optimizer = plain_after_a_step()
    twin = MLP(8, dtype=torch.float64)
    twins = torch.optim.Adam(twin.parameters())
    wanted = {"model": twin.state_dict(), "optimizer": get_optimizer_state_dict(twin, twins)}
    dcp.load(wanted, checkpoint_id=runs[0] / "cut by tplab", no_dist=True)
    twin.load_state_dict(wanted["model"])
    set_optimizer_state_dict(twin, twins, wanted["optimizer"])
    step(plain, optimizer, 2)
    for key in (3, 4):
        for name, value in plain.state_dict().items():
            assert_close(twin.state_dict()[name], value)
        step(plain, optimizer, key)
        step(twin, twins, key)


def test_it_loads_into_the_dtype_that_the_model_has(tmp_path):
    model, other = nn.Linear(3, 2, dtype=torch.float64), nn.Linear(3, 2, dtype=torch.bfloat16)
    save_sharded(tmp_path / "one", model)
    load_sharded(tmp_path / "one", other)
    assert torch.equal(other.weight, model.weight.bfloat16())


def test_an_optimizer_that_has_not_begun_and_one_that_skips_a_parameter(tmp_path):
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizers = [torch.optim.Adam(m.parameters(), lr=lr) for m, lr in ((model, 0.5), (other, 0.1))]
    save_sharded(tmp_path / "new", model, optimizer=optimizers[0])
    load_sharded(tmp_path / "new", other, optimizer=optimizers[1])
    assert optimizers[1].param_groups[0]["lr"] == 0.5
    assert not optimizers[1].state
    model.bias.requires_grad_(False)
    model(torch.ones(3)).sum().backward()
    optimizers[0].step()
    save_sharded(tmp_path / "one", model, optimizer=optimizers[0])
    load_sharded(tmp_path / "one", other, optimizer=optimizers[1])
    assert list(optimizers[1].state) == [other.weight]
    assert torch.equal(optimizers[1].state[other.weight]["exp_avg"], optimizers[0].state[model.weight]["exp_avg"])


# What is refused, by all ranks, and before anything is changed


class Narrow(nn.Module):
    """A small model of which parts can be changed."""

    def __init__(self, layers=2, width=8):
        super().__init__()
        self.layers = nn.ModuleList(ParallelMLP(4, width) for _ in range(layers))


def message(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refused(parts, function, *args, **kwargs):
    said = message(function, *args, **kwargs)
    assert re.match(saying(*parts), said), said


def step_of(optimizer, model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def _refusals(root):
    """Each rank is told what is wrong, and the model stays as it was."""
    rank, model = dist.get_rank(), Narrow()
    adam = step_of(torch.optim.Adam(model.parameters()), model)
    alone = [dist.new_group([r]) for r in range(2)][rank]
    save_sharded(root / "good", model, optimizer=adam)
    save_sharded(root / "weights", model)
    dist.barrier()
    size = (root / "good" / "__1_0.distcp").stat().st_size
    if rank == 0:
        for name in ("unfinished", "lost", "cut", "damaged"):
            shutil.copytree(root / "good", root / name)
        (root / "unfinished" / ".metadata").unlink()
        (root / "lost" / "__1_0.distcp").unlink()
        (root / "cut" / "__1_0.distcp").write_bytes((root / "good" / "__1_0.distcp").read_bytes()[:-100])
        (root / "damaged" / "__1_0.distcp").write_bytes(bytes(size))
    dist.barrier()
    before = full_state_dict(model)
    fewer = torch.optim.Adam(list(model.parameters())[1:])
    odd = Narrow()
    factored = step_of(torch.optim.Adafactor(odd.parameters()), odd)
    other_group = ("ValueError", "layers.0.up.weight [4, 4]", "ranks [0, 1]", f"ranks [{rank}]")
    nothing = ("FileNotFoundError", "/none")
    for parts, name, target, options in (
        (nothing, "good" if rank else "none", model, {}),
        (("FileNotFoundError", ".metadata", "__0_0.distcp"), "unfinished", model, {}),
        (("FileNotFoundError", "__1_0.distcp", "missing"), "lost", model, {}),
        (("FileNotFoundError", "__1_0.distcp", f"{size - 100:,} bytes", f"{size:,}"), "cut", model, {}),
        (("ValueError", "'layers.2.down.bias'", "4 more"), "good", Narrow(layers=4), {}),
        (("ValueError", "[8, 4]", "[16, 4]", "2 ranks", "[8, 4]"), "good", Narrow(width=16), {}),
        (("ValueError", "0 param_groups", "1", "save_sharded"), "weights", model, {"optimizer": adam}),
        (("ValueError", "param_groups[0]", "['layers.0.up.weight']"), "good", model, {"optimizer": fewer}),
        (other_group, "good", model, {"group": alone}),
    ):
        refused(parts, load_sharded, root / name, target, **options)
    for parts, name, target, options in (
        (other_group, f"alone{rank}", model, {"group": alone}),
        (("FileExistsError", "/good"), "good", model, {}),
        (("ValueError", "/of-rank1", "rank 0"), f"of-rank{rank}", model, {}),
        (("TypeError", "Fraction(1, 3)"), "one", model, {"extra": {"f": Fraction(1, 3) if rank else 1}}),
        (("ValueError", "row_var", "layers.0.up.weight"), "factored", odd, {"optimizer": factored}),
    ):
        refused(parts, save_sharded, root / name, target, **options)
    unchanged = all(torch.equal(before[name], tensor) for name, tensor in full_state_dict(model).items())
    refused(("RuntimeError", "/damaged", "rank 1"), load_sharded, root / "damaged", model)
    return unchanged


def test_what_can_not_be_right_is_refused_on_all_ranks_and_nothing_changes(runs):
    root, saved, _ = runs
    assert saved[2]["refusals"] == [True, True]
    assert not (root / "refusals" / "one").exists()
    assert not (root / "refusals" / "factored").exists()


# Replicas that are none any more


def with_a_norm():
    return nn.Sequential(nn.LayerNorm(16), ParallelMLP(16)).double()


def _drifted(root):
    """The messages where ranks hold other numbers, and where they don't."""
    rank = dist.get_rank()
    torch.manual_seed(4)
    norms, copies = with_a_norm(), ParallelAttention(16, 4, 2, bias=False, dtype=torch.float64)
    messages = {"alike": message(save_sharded, root / "alike", norms)}
    with torch.no_grad():
        norms[0].bias[3] += 1e-12 * (rank == 2)
        norms[1].down.bias += rank
        norms[1].up.weight += rank  # each rank has rows of its own
        copies.qkv.weight[4:8] += rank == 3  # head 1 of K, which rank 2 holds too; head 0 is on ranks 0 and 1
    messages["replicated"] = message(save_sharded, root / "norms", norms)
    messages["copies"] = message(save_sharded, root / "copies", copies)
    return messages


def test_replicas_that_have_drifted_are_not_saved_silently(runs):
    folder = runs[0] / "drifted"
    for messages in runs[1][4]["drifted"]:
        assert messages["alike"] == "no error"
        names = "0.bias (ranks 0 and 2); 1.down.bias (ranks 0 and 1, 0 and 2, 0 and 3)."
        assert re.match(saying("ValueError", names), messages["replicated"])
        assert re.match(saying("ValueError", "qkv.weight (ranks 2 and 3)."), messages["copies"])
    assert [path.name for path in folder.iterdir()] == ["alike"]


# What a file could make a program do


class Evil:
    """What pickle makes of it writes a file."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def tampered(path, change):
    """A checkpoint whose .metadata somebody changed."""
    save_sharded(path, nn.Linear(2, 2))
    metadata = dcp.FileSystemReader(path).read_metadata()
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


def test_the_metadata_runs_nothing(tmp_path):
    def add_a_program(metadata):
        metadata.planner_data["model.weight"] = Evil(tmp_path / "mark")

    path = tampered(tmp_path / "one", add_a_program)
    with pytest.raises(ValueError, match=r"\.metadata.* \w+\.mkdir\b"):
        load_sharded(path, nn.Linear(2, 2))
    assert not (tmp_path / "mark").exists()
    dcp.FileSystemReader(path).read_metadata()
    assert (tmp_path / "mark").exists()  # DCP's own reader ran it


def test_a_saved_value_runs_nothing(tmp_path):
    content = {"model": nn.Linear(2, 2).state_dict(), "extra": Evil(tmp_path / "mark")}
    dcp.save(content, checkpoint_id=tmp_path / "one", no_dist=True)
    with pytest.raises(RuntimeError, match="(?i)/one.*weights.only"):
        load_sharded(tmp_path / "one", nn.Linear(2, 2))
    assert not (tmp_path / "mark").exists()


def test_the_metadata_names_no_file_outside_of_the_checkpoint(tmp_path):
    def point_elsewhere(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = "../other/__0_0.distcp"

    save_sharded(tmp_path / "other", nn.Linear(2, 2))
    path = tampered(tmp_path / "one", point_elsewhere)
    with pytest.raises(ValueError, match=saying(".metadata", "../other/__0_0.distcp")):
        load_sharded(path, nn.Linear(2, 2))


@pytest.mark.parametrize("content", [b"no pickle", pickle.dumps({"a": 1})])
def test_a_file_that_is_no_metadata_is_refused(content, tmp_path):
    save_sharded(tmp_path / "one", nn.Linear(2, 2))
    (tmp_path / "one" / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=saying(".metadata")):
        load_sharded(tmp_path / "one", nn.Linear(2, 2))
