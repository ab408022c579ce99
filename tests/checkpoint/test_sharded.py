"""Saved on some ranks, loaded on others: `tplab.checkpoint.sharded`, and the modules that it stands on.

What should be in a checkpoint is what `full_state_dict` gathers, and what torch's own tools find there without tplab.
"""

import os
import pickle
import shutil
import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from tests.reference import assert_close, random
from tplab import launch
from tplab.checkpoint.pieces import pieces
from tplab.checkpoint.sharded import load_sharded, save_sharded
from tplab.plain import MLP
from tplab.tensor.attention import ParallelAttention
from tplab.tensor.embedding import VocabParallelEmbedding, parallel_logits
from tplab.tensor.full_state import full_state_dict
from tplab.tensor.mlp import ParallelMLP
from tplab.tensor.rng import dropout, seed_all
from tplab.tensor.sharding import Block, Sharding

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # where DCP itself is called here

WORLD_SIZES = (1, 2, 4)
OPTIMIZERS = {1: "adamw", 2: "sgd", 4: "adamw"}  # that this many ranks train with
VOCABULARY, HIDDEN = 11, 16
EXTRA = {"step": 2, "loss": 0.5, "milestones": Counter({30: 1, 80: 2}), "last": [0.1, None], "seen": torch.arange(3)}


class Head(nn.Module):
    """The output layer with the table of the embedding: one parameter, two names."""

    def __init__(self, table, group):
        super().__init__()
        self.weight, self.group = table.weight, group

    def forward(self, x):
        return parallel_logits(x, self.weight, gather=True, vocab_size=VOCABULARY, group=self.group)


class Layer(nn.Module):
    """A layer with heads of K, V that several ranks hold, a fused gate, norms that all hold."""

    def __init__(self, kv_heads, options):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, dtype=torch.float64)
        self.attention = ParallelAttention(HIDDEN, 4, kv_heads, causal=True, **options)
        self.mlp = ParallelMLP(HIDDEN, 24, "swiglu", **options)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, group=None, vocabulary=VOCABULARY, layers=(2, 1)):
        super().__init__()
        options = {"group": group, "dtype": torch.float64}
        self.table = VocabParallelEmbedding(vocabulary, HIDDEN, multiple=1, **options)
        self.blocks = nn.ModuleList(Layer(kv_heads, options) for kv_heads in layers)
        self.norm = nn.LayerNorm(HIDDEN, dtype=torch.float64)
        self.register_buffer("tokens_seen", torch.zeros((), dtype=torch.int64))
        self.head = Head(self.table, group)

    def forward(self, ids, rng):
        self.tokens_seen += ids.numel()
        x = dropout(self.table(ids), 0.25, sharded=False, rng=rng)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


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


def train(model, optimizer, rng, steps):
    for step in steps:
        ids = (random((2, 6), "ids", step).abs() * 100).long() % VOCABULARY
        loss = F.cross_entropy(model(ids, rng).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
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


def drawn(rng):
    """The next numbers of both random states."""
    numbers = {}
    for name in ("replicated", "sharded"):
        with rng.fork(name):
            numbers[name] = torch.rand(4)
    return numbers


def own_group(groups):
    """(number, group) of this rank among groups that all ranks make."""
    if groups is None:
        return 0, None
    number = next(number for number, ranks in enumerate(groups) if dist.get_rank() in ranks)
    return number, [dist.new_group(ranks) for ranks in groups][number]


def _save(root, groups=None):
    """Train, save, go on: what was saved, what came of it, the random numbers afterwards, and the model gathered."""
    number, group = own_group(groups)
    rng = seed_all(5 + 10_000 * number, group)
    model = Model(group)
    optimizer = optimizer_of(OPTIMIZERS[dist.get_world_size(group)], model)
    train(model, optimizer, rng, range(2))
    save_sharded(root / f"group{number}", model, optimizer=optimizer, rng=rng, extra=EXTRA, group=group)
    saved = held(model, optimizer)
    train(model, optimizer, rng, range(2, 3))
    return saved, held(model, optimizer), drawn(rng), full_state_dict(model, group)


def _load(checkpoints, groups=None):
    """The same from each checkpoint: what was loaded, what came of it, random numbers, and the extra."""
    number, group = own_group(groups)
    results = []
    for path, kind in checkpoints if groups is None else [checkpoints[number]]:
        rng = seed_all(6, group)
        model = Model(group)
        for tensor in model.state_dict().values():
            tensor.fill_(7)  # in the padding of the table too
        optimizer = optimizer_of(kind, model)
        for parameters in optimizer.param_groups:
            parameters["lr"] = parameters["lr"] * 3
        extra = load_sharded(path, model, optimizer=optimizer, rng=rng, group=group)
        loaded = held(model, optimizer)
        train(model, optimizer, rng, range(2, 3))
        results.append((loaded, held(model, optimizer), drawn(rng), extra))
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The checkpoints' folder, what each number of ranks saved, and what each number of ranks made of all of them."""
    root = tmp_path_factory.mktemp("checkpoints")
    saved = {p: launch(_save, p, args=(root / f"p{p}",), timeout=None) for p in WORLD_SIZES}
    checkpoints = [(root / f"p{p}" / "group0", OPTIMIZERS[p]) for p in WORLD_SIZES]
    loaded = {p: launch(_load, p, args=(checkpoints,), timeout=None) for p in WORLD_SIZES}
    return root, saved, loaded


def each_resharding(runs):
    """(what all ranks saved, what all ranks loaded), for each p that saved and each that loaded."""
    _, saved, loaded = runs
    for number, p in enumerate(WORLD_SIZES):
        for q in WORLD_SIZES:
            yield saved[p], [results[number] for results in loaded[q]]


def test_what_each_rank_saves_is_its_part_of_the_full_state_dict(runs):
    _, saved, _ = runs
    for results in saved.values():
        tensors = whole([tensors for _, (tensors, _), _, _ in results])
        assert all(torch.equal(tensors[name], tensor) for name, tensor in results[0][3].items())


def test_any_number_of_ranks_loads_exactly_what_any_number_saved(runs):
    for saved, loaded in each_resharding(runs):
        expected, groups = whole([tensors for (tensors, _), *_ in saved]), saved[0][0][1]
        for rank, ((tensors, own_groups), _, _, extra) in enumerate(loaded):
            assert_holds(tensors, expected, rank, len(loaded), 0)
            assert own_groups == groups
            assert {**extra, "seen": extra["seen"].tolist()} == {**EXTRA, "seen": [0, 1, 2]}


def test_training_goes_on_as_if_it_had_not_been_interrupted(runs):
    for saved, loaded in each_resharding(runs):
        expected = whole([tensors for _, (tensors, _), *_ in saved])
        for rank, (_, (tensors, _), _, _) in enumerate(loaded):
            assert_holds(tensors, expected, rank, len(loaded), 1e-10)


def test_random_states_go_on_where_they_were(runs):
    for saved, loaded in each_resharding(runs):
        for rank, (_, _, numbers, _) in enumerate(loaded):
            assert torch.equal(numbers["replicated"], saved[0][2]["replicated"])
            if rank < len(saved):
                assert torch.equal(numbers["sharded"], saved[rank][2]["sharded"])
            else:  # nobody saved one: it is as seed_all(6) left it
                torch.manual_seed(6 + 2718 + rank)
                assert torch.equal(numbers["sharded"], torch.rand(4))


def test_torch_reads_the_whole_model_and_optimizer_from_the_files(runs, tmp_path):
    root, saved, _ = runs
    for p in WORLD_SIZES:
        of_ranks = [saved_by_rank for saved_by_rank, *_ in saved[p]]
        expected = whole([tensors for tensors, _ in of_ranks])
        dcp_to_torch_save(root / f"p{p}" / "group0", tmp_path / "all.pt")
        found = torch.load(tmp_path / "all.pt", weights_only=True)
        assert found.keys() == {"model", "optimizer", "rng", "extra"}
        state = {f"{n} {k}": t for n, entries in found["optimizer"]["state"].items() for k, t in entries.items()}
        tensors = found["model"] | state
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
        assert [{k: v for k, v in g.items() if k != "params"} for g in found["optimizer"]["param_groups"]] == of_ranks[
            0
        ][1]
        assert found["rng"].keys() == {"replicated", *(f"sharded.rank{r}" for r in range(p))}
        assert found["extra"]["milestones"] == EXTRA["milestones"]


def test_groups_side_by_side_save_and_load_their_own(tmp_path):
    saved = launch(_save, 4, args=(tmp_path, [[0, 2], [1, 3]]), timeout=None)
    checkpoints = [(tmp_path / "group1", OPTIMIZERS[2]), (tmp_path / "group0", OPTIMIZERS[2])]
    loaded = launch(_load, 4, args=(checkpoints, [[0, 1], [2, 3]]), timeout=None)
    for now, before in (([0, 1], [1, 3]), ([2, 3], [0, 2])):  # ranks 0 and 1 go on from what 1 and 3 saved
        was = [saved[rank] for rank in before]
        for rank in (0, 1):
            (tensors, _), (tensors_after, _), numbers, _ = loaded[now[rank]][0]
            assert_holds(tensors, whole([tensors for (tensors, _), *_ in was]), rank, 2, 0)
            assert_holds(tensors_after, whole([tensors for _, (tensors, _), *_ in was]), rank, 2, 1e-10)
            assert all(torch.equal(numbers[name], was[rank][2][name]) for name in numbers)
    first, second = (saved[rank][0][0]["norm.weight"][0] for rank in (0, 1))
    assert not torch.equal(first, second)


# What is on the disk


def _save_large(root):
    torch.manual_seed(4)
    model = nn.Sequential(VocabParallelEmbedding(3001, 64), ParallelMLP(64, 512, "swiglu"), nn.LayerNorm(64))
    model.append(Head(model[0], None))
    save_sharded(root, model)


@pytest.mark.parametrize("p", WORLD_SIZES)
def test_every_number_is_written_once(p, tmp_path):
    launch(_save_large, p, args=(tmp_path / "large",))
    numbers = 3001 * 64 + (2 * 512 * 64 + 2 * 512) + (64 * 512 + 64) + 2 * 64  # table, gate and value, down, norm
    sizes = [file.stat().st_size for file in (tmp_path / "large").glob("*.distcp")]
    metadata = dcp.FileSystemReader(tmp_path / "large").read_metadata()
    places = {(info.relative_path, info.offset) for info in metadata.storage_data.values()}
    assert 4 * numbers < sum(sizes) < 4 * numbers + 3000 * len(places)  # each piece as torch.save writes it
    assert len(sizes) == p
    assert max(sizes) < 4 * numbers / p * 1.1
    assert [tuple(chunk.sizes) for chunk in metadata.state_dict_metadata["model.2.weight"].chunks] == [(64,)]


def _save_copies(root):
    torch.manual_seed(4)
    save_sharded(root, ParallelAttention(16, 4, 2, bias=False))


def test_copies_are_written_by_the_first_rank_that_holds_them(tmp_path):
    launch(_save_copies, 4, args=(tmp_path / "copies",))
    metadata = dcp.FileSystemReader(tmp_path / "copies").read_metadata()
    files = {i.offset[0]: s.relative_path for i, s in metadata.storage_data.items() if i.fqn == "model.qkv.weight"}
    ranks = {row: int(file[2]) for row, file in sorted(files.items())}
    assert ranks == {0: 0, 4: 1, 8: 2, 12: 3, 16: 0, 20: 2, 24: 0, 28: 2}  # 4 heads of Q, 2 of K, 2 of V; 4 rows each


@pytest.mark.parametrize(
    "sharding",
    [
        Sharding(0),
        Sharding(0, stride=3),
        Sharding(-1),
        Sharding(0, blocks=(Block(16, 2), Block(8, 4), Block(8, 4))),
        Sharding(1, blocks=(Block(20, 5), Block(4, 4), Block(4, 4))),  # one head of K, V for all ranks
        Sharding(0, blocks=(Block(13, padded=True),)),
        Sharding(0, blocks=(Block(1, 3, padded=True),)),  # only the first rank has more than padding
        Sharding(1, blocks=(Block(5, 2, padded=True), Block(12), Block(7, 2, padded=True))),
    ],
    ids=repr,
)
@pytest.mark.parametrize("p", WORLD_SIZES)
def test_pieces_lie_in_the_whole_where_they_say_and_never_overlap(sharding, p):
    shape = [12, 12]
    if sharding.blocks:
        shape[sharding.dim] = sum(block.size for block in sharding.blocks)
    whole = random(tuple(shape), "whole")
    times, places = torch.zeros(shape), {}
    for rank in range(p):
        shard = sharding.shard(whole, rank, p)
        mine = pieces(shard, sharding, rank, p)
        assert list(mine.whole_shape) == shape
        for offset, view in mine.views.items():
            place = tuple(slice(start, start + size) for start, size in zip(offset, view.shape, strict=True))
            assert torch.equal(view, whole[place])
            assert places.setdefault(offset, view.shape) == view.shape  # what begins in one place is the same piece
        assert sum(view.numel() for view in mine.views.values()) == int((shard != 0).sum())
        assert mine.padded() == bool((shard == 0).any())
    for offset, size in places.items():
        times[tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))] += 1
    assert torch.equal(times, torch.ones(shape))


# Other tools, other modules


def step(model, optimizer, key):
    optimizer.zero_grad()
    (model(random((3, 8), "x", key)) * random((3, 8), "dy", key)).sum().backward()
    optimizer.step()


def _go_on(source, target):
    model = ParallelMLP(8, dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    load_sharded(source, model, optimizer=optimizer)
    step(model, optimizer, 2)
    save_sharded(target, model, optimizer=optimizer)


def test_a_plain_model_goes_on_from_a_sharded_one_and_the_other_way_round(tmp_path):
    plain = MLP(8, dtype=torch.float64)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    step(plain, optimizer, 1)
    content = {"model": plain.state_dict(), "optimizer": get_optimizer_state_dict(plain, optimizer)}
    dcp.save(content, checkpoint_id=tmp_path / "plain", no_dist=True)
    launch(_go_on, 4, args=(tmp_path / "plain", tmp_path / "sharded"))
    twin = MLP(8, dtype=torch.float64)
    twins = torch.optim.Adam(twin.parameters())
    wanted = {"model": twin.state_dict(), "optimizer": get_optimizer_state_dict(twin, twins)}
    dcp.load(wanted, checkpoint_id=tmp_path / "sharded", no_dist=True)
    twin.load_state_dict(wanted["model"])
    set_optimizer_state_dict(twin, twins, wanted["optimizer"])
    step(plain, optimizer, 2)
    for key in (3, 4):
        for name, value in plain.state_dict().items():
            assert_close(twin.state_dict()[name], value)
        step(plain, optimizer, key)
        step(twin, twins, key)


def _cut_by_torch(source, target):
    """torch's own tensor parallelism: DTensors go on from what a plain model saved, and are saved themselves."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(MLP(8, dtype=torch.float64), init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    load_sharded(source, model, optimizer=optimizer)
    step(model, optimizer, 2)
    save_sharded(target, model, optimizer=optimizer)
    return [parameter.to_local().shape for parameter in model.parameters()]


def test_a_model_of_dtensors_goes_on_from_a_plain_one_and_the_other_way_round(tmp_path):
    plain, other = MLP(8, dtype=torch.float64), MLP(8, dtype=torch.float64)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in (plain, other)]
    step(plain, optimizers[0], 1)
    save_sharded(tmp_path / "plain", plain, optimizer=optimizers[0])
    shapes = launch(_cut_by_torch, 2, args=(tmp_path / "plain", tmp_path / "cut"))[0]
    assert shapes == [(16, 8), (16,), (8, 16), (8,)]
    load_sharded(tmp_path / "cut", other, optimizer=optimizers[1])
    step(plain, optimizers[0], 2)
    for key in (3, 4):
        for name, value in plain.state_dict().items():
            assert_close(other.state_dict()[name], value)
        step(plain, optimizers[0], key)
        step(other, optimizers[1], key)
    metadata = dcp.FileSystemReader(tmp_path / "cut").read_metadata()
    chunks = metadata.state_dict_metadata["optimizer.state.down.weight.exp_avg"].chunks
    assert [tuple(chunk.offsets) for chunk in chunks] == [(0, 0), (0, 16)]


class Counting(nn.Linear):
    """A module with a state of its own."""

    calls = {"train": [0]}

    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, state):
        self.calls = state


def test_a_module_saves_and_loads_what_it_wants_to(tmp_path):
    model, other = Counting(2, 2), Counting(2, 2)
    model.calls = {"train": [3], "eval": [1]}
    with warnings.catch_warnings(action="error"):  # DCP has one for a program without a process group
        save_sharded(tmp_path / "one", model)
        assert load_sharded(tmp_path / "one", other) == {}
    assert other.calls == model.calls
    assert torch.equal(other.weight, model.weight)


def test_it_loads_into_the_dtype_that_the_model_has(tmp_path):
    model, other = nn.Linear(3, 2, dtype=torch.float64), nn.Linear(3, 2, dtype=torch.bfloat16)
    save_sharded(tmp_path / "one", model)
    load_sharded(tmp_path / "one", other)
    assert torch.equal(other.weight, model.weight.bfloat16())


def test_an_optimizer_computes_as_it_was_made_and_not_as_the_saved_one_did(tmp_path):
    model = nn.Linear(2, 3)
    saved = torch.optim.AdamW(model.parameters(), lr=0.25, fused=False, foreach=True)
    save_sharded(tmp_path / "a", model, optimizer=saved)
    own = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    load_sharded(tmp_path / "a", model, optimizer=own)
    (group,) = own.param_groups
    assert (group["lr"], group["fused"], group["foreach"]) == (0.25, True, None)


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

    def __init__(self, layers=2, width=8, group=None, bias=True):
        super().__init__()
        self.layers = nn.ModuleList(ParallelMLP(4, width, bias=bias, group=group) for _ in range(layers))


def message(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def step_of(optimizer, model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def _refusals(root):
    """{what is wrong: the message}, and whether the model is as it was."""
    rank, model = dist.get_rank(), Narrow()
    adam = step_of(torch.optim.Adam(model.parameters()), model)
    alone = [dist.new_group([r]) for r in range(2)][rank]
    save_sharded(root / "good", model, optimizer=adam)
    save_sharded(root / "weights", model)
    dist.barrier()
    if rank == 0:
        for name in ("unfinished", "lost", "cut", "damaged"):
            shutil.copytree(root / "good", root / name)
        (root / "unfinished" / ".metadata").unlink()
        (root / "lost" / "__1_0.distcp").unlink()
        (root / "cut" / "__1_0.distcp").write_bytes((root / "good" / "__1_0.distcp").read_bytes()[:-100])
        size = (root / "good" / "__1_0.distcp").stat().st_size
        (root / "damaged" / "__1_0.distcp").write_bytes(bytes(size))
    dist.barrier()
    before = full_state_dict(model)
    deeper, wider, bare = Narrow(layers=4), Narrow(width=16), Narrow(bias=False)
    two_groups = torch.optim.Adam([{"params": [p]} for p in model.parameters()])
    fewer = torch.optim.Adam(list(model.parameters())[1:])
    strange = torch.optim.SGD(Narrow().parameters())
    odd = Narrow()
    factored = step_of(torch.optim.Adafactor(odd.parameters()), odd)
    messages = {
        "nothing there": message(load_sharded, root / "none", model),
        "unfinished": message(load_sharded, root / "unfinished", model),
        "a file lost": message(load_sharded, root / "lost", model),
        "a file cut": message(load_sharded, root / "cut", model),
        "own paths": message(load_sharded, root / ("good" if rank else "none"), model),
        "more layers": message(load_sharded, root / "good", deeper),
        "fewer names": message(load_sharded, root / "good", bare),
        "another width": message(load_sharded, root / "good", wider),
        "no optimizer": message(load_sharded, root / "weights", model, optimizer=adam),
        "no rng": message(load_sharded, root / "weights", model, rng=seed_all(1)),
        "other groups": message(load_sharded, root / "good", model, optimizer=two_groups),
        "other parameters": message(load_sharded, root / "good", model, optimizer=fewer),
        "another's optimizer": message(load_sharded, root / "good", model, optimizer=strange),
        "another group": message(load_sharded, root / "good", model, group=alone),
        "save: another group": message(save_sharded, root / f"alone{rank}", model, group=alone),
        "save: there already": message(save_sharded, root / "good", model),
        "save: own paths": message(save_sharded, root / f"of-rank{rank}", model),
        "save: on one rank": message(save_sharded, root / "one", model, extra={"f": torch.nn if rank else 1}),
        "save: factored": message(save_sharded, root / "factored", odd, optimizer=factored),
    }
    unchanged = all(torch.equal(before[name], tensor) for name, tensor in full_state_dict(model).items())
    messages["damaged"] = message(load_sharded, root / "damaged", model)
    return messages, unchanged


WORDS = {
    "nothing there": ("FileNotFoundError", "there is no checkpoint at", "none"),
    "unfinished": ("FileNotFoundError", ".metadata, which is written last", "__0_0.distcp"),
    "a file lost": ("FileNotFoundError", "is incomplete: __1_0.distcp is missing"),
    "a file cut": ("FileNotFoundError", "is incomplete: __1_0.distcp has", "bytes instead of"),
    "own paths": ("FileNotFoundError", "there is no checkpoint at", "none"),
    "more layers": ("ValueError", "layers has 2 entries there, 4 here", "'layers.2.down.bias'", "and 4 more"),
    "fewer names": ("ValueError", "[] are only in the model", "'layers.0.down.bias'", "only in the checkpoint"),
    "another width": (
        "ValueError: layers.0.up.weight is [8, 4] in the checkpoint; the model needs [16, 4], of which each of 2 ranks "
        "takes [8, 4]",
    ),
    "no optimizer": ("ValueError", "save_sharded was called without optimizer"),
    "no rng": ("ValueError", "no random states ['replicated', 'sharded']"),
    "other groups": ("ValueError", "has 1 param_groups, this one has 8"),
    "other parameters": ("ValueError", "param_groups[0]", "['layers.0.up.weight'] are not in this optimizer's"),
    "another's optimizer": ("ValueError", "a parameter [4, 4] that isn't the model's"),
    "another group": ("ValueError", "layers.0.up.weight [4, 4] has its shards on ranks [0, 1], but"),
    "save: another group": ("ValueError", "layers.0.up.weight [4, 4] has its shards on ranks [0, 1], but"),
    "save: there already": ("FileExistsError", "there is something at", "good"),
    "save: own paths": ("ValueError", "of-rank1 isn't the directory that rank 0 has just made"),
    "save: on one rank": ("TypeError", "can't be saved so that it is safe to load"),
    "save: factored": ("ValueError", "the optimizer's row_var of layers.0.up.weight", "no telling"),
    "damaged": ("RuntimeError", "could not be loaded, or only a part of it", "rank"),
}


def test_what_can_not_be_right_is_refused_on_all_ranks_and_nothing_changes(tmp_path):
    results = launch(_refusals, 2, args=(tmp_path,), timeout=None)
    for messages, unchanged in results:
        assert messages.keys() == WORDS.keys()
        for case, text in messages.items():
            assert all(word in text for word in WORDS[case]), f"{case}: {text}"
        assert unchanged
    assert not (tmp_path / "one").exists()
    assert not (tmp_path / "factored").exists()


def _split_again(root):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Layer(4, {"group": mesh.get_group("tp")})
    fully_shard(model, mesh=mesh["dp"])
    return message(save_sharded, root / "split again", model, group=mesh.get_group("tp"))


def test_shards_that_fsdp_has_split_again_are_refused(tmp_path):
    for text in launch(_split_again, 4, args=(tmp_path,)):
        assert "is a tensor-parallel shard, and fully_shard split it again over 2 ranks" in text
    assert not any(tmp_path.iterdir())


# Replicas that are none any more


def _drifted(root):
    """The messages where ranks hold other numbers, where they don't, and what is saved of them without the check."""
    rank = dist.get_rank()
    torch.manual_seed(4)
    norms, copies = Layer(2, {}).double(), ParallelAttention(16, 4, 2, bias=False, dtype=torch.float64)
    messages = {"alike": message(save_sharded, root / "alike", norms)}
    with torch.no_grad():
        norms.norm.bias[3] += 1e-12 * (rank == 2)
        norms.mlp.down.bias += rank
        norms.mlp.up.weight += rank  # each rank has rows of its own
        copies.qkv.weight[4:8] += rank == 3  # head 1 of K, which rank 2 holds too; head 0 is on ranks 0 and 1
    messages["replicated"] = message(save_sharded, root / "norms", norms)
    messages["copies"] = message(save_sharded, root / "copies", copies)
    messages["not looked at"] = message(save_sharded, root / "saved", norms, check_replicas=False)
    return messages


def test_replicas_that_have_drifted_are_not_saved_silently(tmp_path):
    for messages in launch(_drifted, 4, args=(tmp_path,)):
        assert messages["alike"] == messages["not looked at"] == "no error"
        assert messages["replicated"].startswith("ValueError: several ranks hold these, and not the same numbers: ")
        assert "norm.bias (ranks 0 and 2); mlp.down.bias (ranks 0 and 1, 0 and 2, 0 and 3)." in messages["replicated"]
        assert "qkv.weight (ranks 2 and 3)." in messages["copies"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alike", "saved"]
    before, saved = Layer(2, {}).double(), Layer(2, {}).double()
    load_sharded(tmp_path / "alike", before)
    load_sharded(tmp_path / "saved", saved)
    for module in ("norm", "mlp.down"):  # rank 0 has not changed its own
        assert torch.equal(before.get_submodule(module).bias, saved.get_submodule(module).bias)


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
    with pytest.raises(ValueError, match=r"asks for \w+\.mkdir, which no checkpoint needs"):
        load_sharded(path, nn.Linear(2, 2))
    assert not (tmp_path / "mark").exists()
    dcp.FileSystemReader(path).read_metadata()
    assert (tmp_path / "mark").exists()  # DCP's own reader ran it


def test_a_saved_value_runs_nothing(tmp_path):
    content = {"model": nn.Linear(2, 2).state_dict(), "extra": Evil(tmp_path / "mark")}
    dcp.save(content, checkpoint_id=tmp_path / "one", no_dist=True)
    with pytest.raises(RuntimeError, match="could not be loaded.*(?i:weights.only)"):
        load_sharded(tmp_path / "one", nn.Linear(2, 2))
    assert not (tmp_path / "mark").exists()


def test_the_metadata_names_no_file_outside_of_the_checkpoint(tmp_path):
    def point_elsewhere(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = "../other/__0_0.distcp"

    save_sharded(tmp_path / "other", nn.Linear(2, 2))
    path = tampered(tmp_path / "one", point_elsewhere)
    with pytest.raises(ValueError, match=r"names a file outside of it: ../other/__0_0.distcp"):
        load_sharded(path, nn.Linear(2, 2))


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"a": 1}), pickle.dumps(torch.float32)])
def test_a_file_that_is_no_metadata_is_refused(content, tmp_path):
    save_sharded(tmp_path / "one", nn.Linear(2, 2))
    (tmp_path / "one" / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"checkpoint's \.metadata"):
        load_sharded(tmp_path / "one", nn.Linear(2, 2))
