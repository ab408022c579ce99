"""What the layer tests share: the ways to run a program on ranks, error messages, SGD steps, and comparing shards."""

from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.reference import TOLERANCE, assert_close, cut
from tplab import launch, record

GROUPS = ([0, 2], [1, 3])


def own_group() -> dist.ProcessGroup:
    """This rank's group, out of the two in GROUPS. Every rank creates both."""
    return [dist.new_group(members) for members in GROUPS][dist.get_rank() % 2]


ON_RANKS = [(0, False), (1, False), (2, False), (4, False), (4, True)]
on_ranks = pytest.mark.parametrize(
    ("p", "in_groups"), ON_RANKS, ids=["no process group", "1 rank", "2 ranks", "4 ranks", "2 groups"]
)


def results_of(program: Callable, p: int, in_groups: bool, *args: object) -> list[list]:
    """What program(group, *args) returns on each rank of each group.

    p:          the number of ranks. 0 calls the program in this process, without a process group
    in_groups:  four ranks are the two groups in GROUPS. Otherwise, all ranks are one group, and `group` is None
    """
    if p == 0:
        return [[program(None, *args)]]
    results = launch(_on_a_rank, p, args=(program, in_groups, args), timeout=240)
    assert len(results) == p
    return [[results[rank] for rank in members] for members in (GROUPS if in_groups else [range(p)])]


def _on_a_rank(program: Callable, in_groups: bool, args: tuple) -> object:
    return program(own_group() if in_groups else None, *args)


def refusals(*calls: Callable, kind: type[Exception] = ValueError) -> list[str]:
    """The message of each call's error, or "no error". An error of a different kind isn't caught."""
    messages = []
    for call in calls:
        try:
            call()
            messages.append("no error")
        except kind as error:
            messages.append(str(error))
    return messages


def assert_refused(results: Iterable[list[str]], *expected: str) -> None:
    """Every rank's `refusals` have the expected words, in this order."""
    for messages in results:
        for message, words in zip(messages, expected, strict=True):
            assert words in message


def assert_refused_on(p: int, *cases: tuple[Callable, str]) -> None:
    """On each of p ranks, each call raises a ValueError that has the expected words."""
    calls, words = zip(*cases, strict=True)
    assert_refused(launch(refusals, p, args=calls), *words)


def traffic(*sections: Iterable) -> list[list[tuple]]:
    return [[(call.kind, call.op, call.bytes) for call in section] for section in sections]


def train(
    model: nn.Module, batches: Iterable, split_bias: bool = False, read: Callable = traffic, **sgd: float
) -> tuple[dict, list]:
    """SGD: the first step's output, gradients (d<name>) and traffic, and the parameters after the last step.

    batches:     for each step, the inputs by name, and the gradient of the output; the model may not write to them
    split_bias:  the model returns its output and a bias that still has to be added
    read:        turns the first step's forward and backward sections into what is returned as traffic
    """
    optimizer = torch.optim.SGD(model.parameters(), **sgd)
    first: dict[str, Tensor] = {}
    for inputs, dy in batches:
        x, *others = [t.requires_grad_() if t.is_floating_point() else t for t in inputs.values()]
        before = [t.detach().clone() for t in (x, *others, dy)]
        with record() as forward:
            out = model(x, **dict(zip(list(inputs)[1:], others, strict=True)))
        if split_bias:
            out = out[0] if out[1] is None else out[0] + out[1]
        with record() as backward:
            out.backward(dy)
        assert all(map(torch.equal, (x, *others, dy), before)), "what was passed in was written to"
        if not first:
            leaves = {name: leaf for name, leaf in inputs.items() if leaf.requires_grad}
            leaves |= dict(model.named_parameters())
            first = {"out": out.detach()} | {f"d{name}": leaf.grad.clone() for name, leaf in leaves.items()}
            sent = read(forward, backward)
        optimizer.step()
        optimizer.zero_grad()
    return first | {name: parameter.detach() for name, parameter in model.named_parameters()}, sent


def assert_shards(
    results: Iterable[Mapping], expected: Mapping, cuts: Mapping[str, tuple], tolerance: float = TOLERANCE
) -> None:
    """Every rank has its shards of what a single process has.

    cuts:  name -> (dim, stride), also for the gradient, d<name>; everything else is replicated
    """
    results = list(results)
    for rank, result in enumerate(results):
        assert set(result) == set(expected)
        for name, whole in expected.items():
            dim, stride = cuts.get(name) or cuts.get(name.removeprefix("d")) or (None, 1)
            mine = whole if dim is None else cut(whole, dim, rank, len(results), stride)
            assert_close(result[name], mine, tolerance)
