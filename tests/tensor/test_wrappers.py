"""Checkpoints of wrapped models: they have the names of the plain model, and each can be loaded into the other."""

import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tplab import launch
from tplab.checkpoint.sharded import load_sharded, save_sharded
from tplab.tensor.full_state import full_state_dict, load_full_state_dict
from tplab.tensor.linear import ColumnParallelLinear
from tplab.tensor.wrappers import plain_parameters, plain_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Model(nn.Module):
    """It has a child called `module`, which no wrapper has made, and sharded, replicated and tied parameters."""

    def __init__(self, group=None):
        super().__init__()
        self.module = nn.Linear(4, 4)
        self.layers = nn.ModuleList(ColumnParallelLinear(4, 4, group=group) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.module.weight

    def forward(self, x):
        return self.tied(self.norm(self.layers[1](self.layers[0](self.module(x)))))


def in_layers(wrap):
    def wrapped(model):
        for number, layer in enumerate(model.layers):
            model.layers[number] = wrap(layer)
        model.module = wrap(model.module)
        return model

    return wrapped


ON_ONE_RANK = {
    "recomputed layers": in_layers(checkpoint_wrapper),
    "compiled twice": lambda model: torch.compile(in_layers(torch.compile)(model)),
    "in DataParallel": DataParallel,
}
NAMES = list(Model().state_dict())


def stepped(model, seed):
    """The model with other weights, and its optimizer with a state that isn't empty."""
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def assert_is_restored(model, optimizer, saved, saved_optimizer):
    for value, wanted in zip(plain_state(model).values(), plain_state(saved).values(), strict=True):
        assert torch.equal(value, wanted)
    states = (o.state_dict()["state"] for o in (optimizer, saved_optimizer))
    for value, wanted in zip(*(pickle.loads(pickle.dumps(state)).values() for state in states), strict=True):
        assert value.keys() == wanted.keys()
        assert all(torch.equal(value[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("wrap", ON_ONE_RANK.values(), ids=ON_ONE_RANK)
def test_a_wrapped_model_is_saved_under_plain_names_and_loaded_into_a_plain_one_and_the_reverse(wrap, tmp_path):
    for folder, saves, loads in ((tmp_path / "from", wrap, nn.Identity()), (tmp_path / "to", nn.Identity(), wrap)):
        saved, saved_optimizer = stepped(saves(Model()), 1)
        assert list(full_state_dict(saved)) == list(plain_state(saved)) == NAMES
        assert plain_parameters(saved).keys() == dict(Model().named_parameters()).keys()
        save_sharded(folder, saved, optimizer=saved_optimizer)
        plain = {"model": Model().state_dict()}
        dcp.load(plain, checkpoint_id=folder)  # torch's own loader, with the names of the plain model
        assert all(torch.equal(value, plain_state(saved)[name]) for name, value in plain["model"].items())
        model, optimizer = stepped(loads(Model()), 2)
        load_sharded(folder, model, optimizer=optimizer)
        assert_is_restored(model, optimizer, saved, saved_optimizer)
        other = loads(Model())
        load_full_state_dict(other, full_state_dict(saved))
        assert all(torch.equal(value, plain_state(saved)[name]) for name, value in plain_state(other).items())


def _wrap_on_two_ranks(folder):
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    wrapped = torch.compile(DistributedDataParallel(torch.compile(Model()), process_group=alone))
    saved, saved_optimizer = stepped(wrapped, 1)  # both ranks have the same replicated weights
    save_sharded(folder, saved, optimizer=saved_optimizer)
    model, optimizer = stepped(Model(), 2)
    load_sharded(folder, model, optimizer=optimizer)
    assert_is_restored(model, optimizer, saved, saved_optimizer)
    return full_state_dict(saved)


def test_data_parallel_wrappers_on_two_ranks(tmp_path):
    one, two = launch(_wrap_on_two_ranks, 2, args=(tmp_path / "saved",))
    load_sharded(tmp_path / "saved", Model())
    assert NAMES == list(one) == list(two)
