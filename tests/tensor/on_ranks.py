"""What the layer tests share: the ways to run a program on ranks, error messages, and training beside a plain layer."""

import re
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import saying
from tests.reference import TOLERANCE, assert_close, cut, random
from tplab import launch, record
from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.full_state import load_full_state_dict

GROUPS = ([0, 2], [1, 3])


def own_group() -> dist.ProcessGroup:
    """This rank's group, out of the two in GROUPS. Every rank creates both."""
    return [dist.new_group(members) for members in GROUPS][dist.get_rank() % 2]


def everywhere(program: Callable, *args: object) -> None:
    """Run program(group, *args), which asserts what it promises, without a process group, and then on four ranks.

    There, it runs on each rank alone, in the two groups in GROUPS side by side, and on all ranks, where group is None.
    """
    program(None, *args)
    launch(_in_all_groups, 4, args=(program, args), timeout=240)


def _in_all_groups(program: Callable, args: tuple) -> None:
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    for group in (alone, own_group(), None):
        program(group, *args)


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


def assert_refused(results: Iterable[list[str]], *expected: str | tuple[str, ...]) -> None:
    """Every rank's `refusals`, in this order, say what is expected: one part, or several, see `saying`."""
    for messages in results:
        for message, parts in zip(messages, expected, strict=True):
            assert re.search(saying(*([parts] if isinstance(parts, str) else parts)), message), message


def assert_refuses(*cases: tuple) -> None:
    """On this rank, each call raises a ValueError that says the expected parts: the cases are (call, *parts)."""
    for call, *parts in cases:
        (message,) = refusals(call)
        assert re.search(saying(*parts), message), message


def traffic(*sections: Iterable) -> list[list[tuple]]:
    return [[(call.kind, call.op, call.bytes) for call in section] for section in sections]


def with_random_weights(module: nn.Module, *key: object) -> nn.Module:
    """The module with weights that depend on their names and the key alone."""
    state = module.state_dict()
    module.load_state_dict({name: random(tuple(t.shape), *key, name) / 2 for name, t in state.items()})
    return module


def train(
    model: nn.Module,
    batches: Iterable,
    split_bias: bool = False,
    after_backward: Callable[[nn.Module], object] = lambda model: None,
    read: Callable = traffic,
    **sgd: float,
) -> tuple[dict, list]:
    """SGD: the first step's output, gradients (d<name>) and traffic, and the parameters after the last step.

    batches:         for each step, the inputs by name, and the gradient of the output; the model may not write to them
    split_bias:      the model returns its output and a bias that still has to be added
    after_backward:  what completes the gradients
    read:            turns the first step's forward and backward sections into what is returned as traffic
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
        after_backward(model)
        assert all(map(torch.equal, (x, *others, dy), before)), "what was passed in was written to"
        if not first:
            leaves = {name: leaf for name, leaf in inputs.items() if leaf.requires_grad}
            leaves |= dict(model.named_parameters())
            first = {"out": out.detach()} | {f"d{name}": leaf.grad.clone() for name, leaf in leaves.items()}
            sent = read(forward, backward)
        optimizer.step()
        optimizer.zero_grad()
    return first | {name: parameter.detach() for name, parameter in model.named_parameters()}, sent


def assert_trains_like(
    twin: nn.Module,
    model: nn.Module,
    batches: Iterable,
    group: dist.ProcessGroup | None = None,
    *,
    cuts: Mapping[str, tuple] | None = None,
    tolerance: float = TOLERANCE,
    **options: object,
) -> list:
    """`model` takes the weights of its plain twin and trains like it. Return the traffic of the first step.

    Each rank runs both. Every parameter says itself which part of it a rank has, but a wrong part gives a wrong output.
    cuts:     name -> (dim, stride) of an input, or of the output "out", of which a rank has its part
    options:  of `train`. `split_bias` and `after_backward` are about `model` alone
    """
    rank, p = rank_and_size(group)
    load_full_state_dict(model, twin.state_dict(), group)
    marks = {name: getattr(parameter, "tensor_parallel", None) for name, parameter in model.named_parameters()}

    def part(name: str, whole: Tensor) -> Tensor:
        if (mark := marks.get(name)) is not None:
            return mark.shard(whole, rank, p)
        return cut(whole, cuts[name][0], rank, p, cuts[name][1]) if name in (cuts or {}) else whole.detach()

    steps = list(batches)
    own = {name: options.pop(name) for name in ("split_bias", "after_backward") if name in options}
    expected, _ = train(twin, [({n: t.detach() for n, t in inputs.items()}, dy) for inputs, dy in steps], **options)
    mine = [({name: part(name, t) for name, t in inputs.items()}, part("out", dy)) for inputs, dy in steps]
    found, sent = train(model, mine, **own, **options)
    assert set(found) == set(expected)
    for name, whole in expected.items():
        known = name in marks or name == "out"
        assert_close(found[name], part(name if known else name.removeprefix("d"), whole), tolerance)
    return sent
