"""Chapter 09: the random number generators that torch uses on this rank, and their states.

A generator's state is a tensor of bytes. To draw from a different stream of random numbers, `tplab.tensor.rng` copies
that stream's state into torch's own generators, and restores the previous state afterwards.
"""

import torch
from torch import Tensor

from tplab.runtime import device

State = dict[str, Tensor]  # the generators' states, as bytes: "cpu", and "cuda" if a GPU is in use


def generators_in_use() -> dict[str, torch.Generator]:
    """Return the generators that torch draws from: the CPU's generator and, if a GPU is in use, this rank's GPU's."""
    generators = {"cpu": torch.default_generator}
    if torch.cuda.is_initialized() or device().type == "cuda":
        torch.cuda.init()
        generators["cuda"] = torch.cuda.default_generators[torch.cuda.current_device()]
    return generators


def read_state(generators: dict[str, torch.Generator]) -> State:
    return {kind: generator.get_state() for kind, generator in generators.items()}


def write_state(generators: dict[str, torch.Generator], state: State) -> None:
    for kind, generator in generators.items():
        generator.set_state(state[kind])


def copy_of(state: State) -> State:
    return {kind: numbers.clone() for kind, numbers in state.items()}
