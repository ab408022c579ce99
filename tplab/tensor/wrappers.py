"""Chapter 04: parameter names without the prefixes that torch's wrappers add to them.

    model                                   layers.0.norm.weight
    torch.compile(model)                    _orig_mod.layers.0.norm.weight
    layers[0] = torch.compile(layers[0])    layers.0._orig_mod.norm.weight
    DistributedDataParallel(model)          module.layers.0.norm.weight

If we saved the wrapped names, a checkpoint could only be loaded into a model with the same wrappers. (torch does the
same in torch/distributed/checkpoint/state_dict.py, _get_fqns.)
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

# of torch.compile, FullyShardedDataParallel, and the wrapper that recomputes activations
_PREFIXES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def plain_name(module: nn.Module, name: str) -> str:
    """Return a name of `module.state_dict()` or `module.named_parameters()` without the wrappers' prefixes."""
    kept: list[str] = []
    owner: Any = module
    for part in name.split("."):
        # other modules, too, may have a child that is called `module`
        is_wrapped = part == "module" and isinstance(owner, DataParallel | DistributedDataParallel)
        if part not in _PREFIXES and not is_wrapped:
            kept.append(part)
        owner = getattr(owner, part, None)
    return ".".join(kept)


def plain_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the module's parameters by their plain names."""
    return {plain_name(module, name): parameter for name, parameter in module.named_parameters()}


def plain_state(module: nn.Module) -> dict[str, Any]:
    """Return the module's state_dict by plain names. Its parameters aren't detached, so they keep their attributes."""
    return {plain_name(module, name): value for name, value in module.state_dict(keep_vars=True).items()}


def load_plain_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state_dict with plain names, like `module.load_state_dict`."""
    wrapped = {plain_name(module, name): name for name in module.state_dict()}
    module.load_state_dict({wrapped.get(name, name): value for name, value in state.items()})
