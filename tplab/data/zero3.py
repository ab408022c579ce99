"""Chapter 14: ZeRO 3, in which no rank keeps the full model. A layer's full weights exist only while the layer runs.

    forward     all-gather W of layer 1, run it, free W;  layer 2;  layer 3
    backward    all-gather W of layer 3, run it backward, reduce-scatter dW, free both;  layer 2;  layer 1
    step        the optimizer, on this rank's shards; nothing to send

So a step sends 3Ψ elements, 1.5 times as many as plain data parallelism. A rank stores 1/p of everything, plus one or
two full layers. Parameters outside the layers (embedding, final norm) form another unit, which stays gathered during
the model's entire forward pass.

This takes two tricks. First, autograd has saved the weights, or views of them, for backward. So to free a weight, we
resize its storage to 0 (`resize_(0)`), which keeps these views valid, and gathering fills the same storage before
backward. Second, each unit has hooks: before and after its forward, before its backward (a hook on the gradient of its
output), and after its backward, when the last of its parameters has a gradient. A zero-bubble schedule runs backward in
two halves, so weights stay gathered from the first half to the second. (Rajbhandari et al. 2020, section 5.3;
Zhao et al. 2023, "PyTorch FSDP", whose flat parameters do the same; torch: fully_shard.)
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from tplab.data.flat_parameters import broadcast, start_alike
from tplab.data.zero import Parameters, Unit, ZeRO1, as_groups, check_elementwise, reduce_when_full


class ShardedUnit(Unit):
    """A unit that stores only its shard. `gather` fills in the full parameters, and `free` releases them.

    backwards    autograd's numbers of the backward passes that have reached the unit's output, and whose gradients for
                 the parameters aren't complete yet. A zero-bubble schedule may have several at a time
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        average: bool = True,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(parameters, average, group)
        self.shard = nn.Parameter(self.shard.detach().clone())
        self.backwards: dict[int, None] = {}
        self.stays_whole = False
        self.free()

    @property
    def gathered_bytes(self) -> int:
        return self.weights.untyped_storage().nbytes()

    @torch.no_grad()
    def gather(self) -> None:
        """All-gather the weights unless they are already gathered."""
        if self.gathered_bytes:
            return
        self.weights.untyped_storage().resize_(self.weights.numel() * self.weights.element_size())
        self.flat.all_gather(self.shard, self.weights)
        for parameter, view in zip(self.parameters, self.flat.views(self.weights), strict=True):
            parameter.data = view

    def is_memory_of(self, tensor: Tensor) -> bool:
        """Return True if `free` would release the tensor's memory, because it's a weight or a view of one."""
        if self.stays_whole or tensor.layout is not torch.strided or not tensor.numel():
            return False
        return tensor.untyped_storage()._cdata == self.weights.untyped_storage()._cdata

    def free(self) -> None:
        """Free the memory of the full weights. The parameters are empty until they are gathered again."""
        if self.stays_whole:
            return
        for parameter in self.parameters:
            parameter.data = self.weights.new_empty(0)
        self.weights.untyped_storage().resize_(0)

    def reduce(self) -> None:
        super().reduce()
        if self.backwards:  # W, the second half of a split backward, has a new number, so take the oldest one
            now = torch._C._current_graph_task_id()
            self.backwards.pop(now if now in self.backwards else next(iter(self.backwards)))
        if not self.backwards:
            self.free()

    def after_step(self) -> None:
        """Keep only the shard. The next forward gathers the weights."""


class ZeRO3(ZeRO1):
    """Like ZeRO1, but also shards weights and gradients: `ZeRO3(model, model.layers, torch.optim.AdamW, lr=1e-3)`.

    layers           modules of the model, none inside another; each one is gathered separately. All other parameters,
                     and those in a module that several layers share, form one more unit, which is gathered while the
                     model runs
    parameters       param groups that contain all trained parameters, as for torch's optimizers; None means one group.
                     A layer whose parameters are in several groups forms one unit per group

    You must call the model and its layers as modules, `layer(x)`, because that triggers the hooks. Outside these calls
    and `with zero.gathered():`, the parameters are empty. The other arguments are those of ZeRO1.

    Raises ValueError for a layer that isn't in the model or is inside another layer. The forward pass raises ValueError
    if a unit returns one of its parameters, or a view of one, because the memory of the parameters is freed when the
    unit returns. The blocks of `tplab` return copies. It raises TypeError if a unit returns anything but
    tensors, numbers, strings, None, and tuples, lists and dicts of these.
    """

    units: list[ShardedUnit]  # type: ignore[assignment]

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        optimizer_class: Callable[..., Optimizer],
        *,
        parameters: Parameters | None = None,
        average: bool = True,
        separate: nn.Parameter | None = None,
        group: ProcessGroup | None = None,
        **defaults: Any,
    ) -> None:
        self.units = []
        self._order: list[tuple[str, int]] = []
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = as_groups(trained if parameters is None else parameters) if trained else [{"params": []}]
        place = {parameter: number for number, given in enumerate(groups) for parameter in given["params"]}
        if place.keys() != set(trained):
            raise ValueError(
                f"the param groups have {len(place)} parameters, and the model trains {len(trained)}. ZeRO-3 needs all "
                "of them in its groups: freeze the others"
            )
        by_unit = _by_unit(model, layers)
        check_elementwise(optimizer_class)
        start_alike(model.named_parameters(), group)
        broadcast(model.buffers(), group)
        for module, own in by_unit.items():
            units = [ShardedUnit(alike, average, group) for alike in _alike(own, separate, place)]
            self._gather_around(module, units)
            self.units += units
        reduce_when_full(self.units, self._order)
        self.group_parameters = [given["params"] for given in groups]
        shards: list[list[nn.Parameter]] = [[] for _ in groups]
        for unit in self.units:
            shards[place[unit.parameters[0]]].append(unit.shard)
        if not trained:  # an optimizer needs a parameter, even if all are frozen
            shards[0] = [nn.Parameter(torch.empty(0))]
        options = [{**given, "params": of_group} for given, of_group in zip(groups, shards, strict=True)]
        self.optimizer = optimizer_class(options, **defaults)
        for module in model.modules():
            module.register_state_dict_pre_hook(self._check_gathered)
            module.register_load_state_dict_pre_hook(self._check_gathered)

    def finish(self) -> None:
        super().finish()
        for unit in self.units:
            unit.backwards.clear()
            unit.free()  # a unit with an unused parameter hasn't been freed yet

    def step(self) -> None:
        if any(unit.stays_whole for unit in self.units):
            raise ValueError("gathered() would undo the update: call step() outside of it")
        super().step()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context manager that gathers the full weights for reading, saving or loading. Changed weights are kept."""
        if all(unit.stays_whole for unit in self.units):  # already inside gathered()
            yield
            return
        for unit in self.units:
            unit.gather()
            unit.stays_whole = True
        try:
            yield
        finally:
            for unit in self.units:
                unit.stays_whole = False
                unit.check_unchanged()
                unit.shard.detach().copy_(unit.flat.shard(unit.weights))
                unit.free()

    def _check_gathered(self, *_: object) -> None:
        """Raise ValueError if a state_dict would be read from, or loaded into, empty parameters."""
        if not all(unit.stays_whole for unit in self.units):
            raise ValueError(
                "ZeRO-3 keeps only shards of the weights: use the state_dict inside `with zero.gathered():`"
            )

    def _gather_around(self, module: nn.Module, units: list[ShardedUnit]) -> None:
        def gather(*_: object) -> None:
            for unit in units:
                if not unit.gathered_bytes:
                    self._order.append(("gather", self.units.index(unit)))
                unit.gather()

        def before_backward(gradient: Tensor) -> None:
            gather()
            for unit in units:
                unit.backwards[torch._C._current_graph_task_id()] = None

        def after_forward(module: nn.Module, inputs: object, output: object) -> None:
            tensors = _tensors(module, output, units)
            for unit in units:
                if not unit.backwards:  # recomputation inside backward keeps the weights
                    unit.free()
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.register_hook(before_backward)

        module.register_forward_pre_hook(gather)
        module.register_forward_hook(after_forward)


def _tensors(module: nn.Module, output: object, units: list[ShardedUnit]) -> list[Tensor]:
    """Return the tensors in a unit's output, whose weights must still be gathered.

    Raises TypeError for an object that might have other tensors in it, and ValueError for a tensor that is about to be
    freed, because a view of a weight is recognized by its address.
    """
    unit_name, leaves = type(module).__name__, tree_leaves(output)
    if other := [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor | int | float | str | None)]:
        raise TypeError(
            f"{unit_name} returns a {other[0]}, in which ZeRO-3 doesn't look for tensors, so it wouldn't notice when "
            "backward needs the weights. Return tensors, or tuples, lists or dicts of them"
        )
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for tensor in tensors:
        if any(unit.is_memory_of(tensor) for unit in units):
            raise ValueError(
                f"{unit_name} returns one of its parameters or a view of it, {list(tensor.shape)}. ZeRO-3 frees a "
                "unit's weights when its forward ends, so the caller would read freed memory. Return a clone() of it, "
                "or pass larger units as `layers`, such as whole transformer layers, whose forward uses the parameter"
            )
    return tensors


def _by_unit(model: nn.Module, layers: Sequence[nn.Module]) -> dict[nn.Module, list[nn.Parameter]]:
    """Group the trainable parameters by layer. Those outside of the layers, or in several, are assigned to the model.

    A layer that is listed twice is one unit. Raises ValueError for a layer inside another one, or not in the model.
    """
    names = {module: name for name, module in model.named_modules()}
    own = {layer: set(layer.modules()) for layer in layers}
    for layer in own:
        if layer not in names:
            raise ValueError(f"{type(layer).__name__} is one of the layers, but it isn't in the model")
        if outer := next((other for other in own if other is not layer and layer in own[other]), None):
            raise ValueError(
                f"{names[layer]} is a part of {names[outer] or 'the model'}, and both are in `layers`. Its parameters "
                "can only be gathered with one of them, so list only one"
            )
    places: dict[nn.Parameter, set[nn.Module]] = {parameter: set() for parameter in model.parameters()}
    for layer in own:
        for parameter in layer.parameters():
            places[parameter].add(layer)
    for module in _outside(model, own.keys()):
        for parameter in module.parameters(recurse=False):
            places[parameter].add(model)
    units: dict[nn.Module, list[nn.Parameter]] = {}
    for parameter, of in places.items():
        if parameter.requires_grad:
            units.setdefault(of.pop() if len(of) == 1 else model, []).append(parameter)
    return units


def _outside(module: nn.Module, layers: Collection[nn.Module]) -> list[nn.Module]:
    """Return the modules that can be reached from `module` without entering a layer, such as one that is shared."""
    found: dict[nn.Module, None] = {}
    waiting = [module]
    while waiting:
        if (module := waiting.pop()) not in layers and module not in found:
            found[module] = None
            waiting += module.children()
    return list(found)


def _alike(
    parameters: Sequence[nn.Parameter], separate: nn.Parameter | None, place: Mapping[nn.Parameter, int]
) -> list[list[nn.Parameter]]:
    """Group parameters by dtype and param group (`place`). `separate` gets a group of its own."""
    kinds = [(parameter is separate, parameter.dtype, place[parameter]) for parameter in parameters]
    return [[p for p, its in zip(parameters, kinds, strict=True) if its == kind] for kind in dict.fromkeys(kinds)]
