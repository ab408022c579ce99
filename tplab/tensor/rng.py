"""Chapter 09: random numbers that are identical on all ranks where they must be, and different where they must differ.

Where activations are replicated, all ranks must drop the same positions, or the replicas would diverge. Where they are
sharded, each rank must drop different positions. If all ranks had the same random state, rank 1 would drop the same
positions in its heads as rank 0 does in other heads, and only 1/p of the random numbers that the model needs would be
drawn.

    one row of activations, p = 2      rank 0        rank 1
    replicated [h], same mask          x . x x       x . x x
    sharded [h/p], masks differ        . x           x x

So each rank has three random states, all derived from one seed:

    current         seed               torch's default, used for initial values (see `tplab.tensor.initialization`)
    "replicated"    seed + 1359        the same on all ranks
    "sharded"       seed + 2718 + r    different on each rank r (Megatron: "model-parallel-rng", with the same 2718)

    tracker = seed_all(1)
    with tracker.fork("sharded"):
        y = F.dropout(y, 0.1)           # drawn from this rank's own state; the current one doesn't change

`fork` loads the state into torch's generators. When the block ends, even with an exception, `fork` saves the advanced
state and restores the previous one. "replicated" is separate from the current state. Otherwise, if one rank drew an
extra number from the current state, for example for a log message, its masks would differ from then on.

Activation checkpointing runs a layer a second time in the backward pass and must drop the same positions again. torch's
own checkpointing restores only the current state. So the second run would draw a new mask from "sharded", which raises
no error but gives wrong gradients. `checkpoint` restores all states. (Shoeybi et al. 2019, "Megatron-LM", section 3;
Megatron: CudaRNGStatesTracker, model_parallel_cuda_manual_seed and checkpoint, in
megatron/core/tensor_parallel/random.py.)
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tplab.collectives.by_hand import rank_and_size
from tplab.runtime import device

REPLICATED_OFFSET = 1359
SHARDED_OFFSET = 2718

State = dict[str, Tensor]  # the states of torch's generators, as bytes: "cpu", and "cuda" if a GPU is in use


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


class RNGTracker:
    """Named random states, one of which torch uses inside `fork`. `seed_all` adds the two states that layers need.

    A state covers the CPU and this rank's GPU. There is no communication.
    """

    def __init__(self) -> None:
        self._seeds: dict[str, int] = {}
        self._states: dict[str, State] = {}  # never modified in place, because `checkpoint` keeps earlier versions
        self._current: str | None = None  # name of the state that torch's generators have now

    def add(self, name: str, seed: int) -> None:
        """Add a random state with this rank's seed. States with the same seed draw the same numbers.

        Raises ValueError if the name is taken.
        """
        if name in self._seeds:
            raise ValueError(f"there is a random state {name!r} already")
        self._seeds[name] = seed
        self._keep(name, {})

    @contextmanager
    def fork(self, name: str = "sharded") -> Iterator[None]:
        """Context manager that makes torch draw random numbers from state `name`, continuing after its last fork.

        After the block, the previous state is restored. Forks can be nested, even with the same name. Raises ValueError
        if there is no such state, and RuntimeError if the GPU is used for the first time inside the block.
        """
        if name not in self._seeds:
            raise ValueError(
                f"there is no random state {name!r}, only {list(self._seeds)}: add({name!r}, seed) makes one, and "
                "seed_all(seed) makes 'replicated' and 'sharded'"
            )
        generators = generators_in_use()
        outer, before = self._current, read_state(generators)
        if outer is not None:
            self._keep(outer, before)
        write_state(generators, self._state(name, generators))
        self._current = name
        try:
            yield
        finally:
            self._keep(name, read_state(generators))
            write_state(generators, before if outer is None else self._states[outer])
            self._current = outer
        if generators_in_use().keys() != generators.keys():
            raise RuntimeError(
                f"the GPU was first used within fork({name!r}): what it drew there came from its current state. "
                "Use it once before, for the parameters say"
            )

    def state_dict(self) -> dict[str, State]:
        """Return copies of this rank's states by their names. A checkpoint needs those of every rank."""
        generators = generators_in_use()
        if self._current is not None:
            self._keep(self._current, read_state(generators))
        states = {name: self._state(name, generators) for name in self._seeds}
        return {name: {kind: numbers.clone() for kind, numbers in state.items()} for name, state in states.items()}

    def load_state_dict(self, states: Mapping[str, State]) -> None:
        """Continue from the states that `state_dict` returned on this rank.

        Raises ValueError if the names differ, and RuntimeError inside `fork`, which would undo it when it ends.
        """
        if self._current is not None:
            raise RuntimeError(f"load_state_dict within fork({self._current!r}), which would undo it when it ends")
        if states.keys() != self._seeds.keys():
            raise ValueError(f"this tracker has the random states {sorted(self._seeds)}, but got {sorted(states)}")
        for name, state in states.items():
            self._keep(name, dict(state))

    def _state(self, name: str, generators: dict[str, torch.Generator]) -> State:
        """Return the state `name` for each generator. A device that was never used starts from the seed."""
        state = dict(self._states[name])
        for kind, generator in generators.items():
            if kind not in state:
                state[kind] = torch.Generator(generator.device).manual_seed(self._seeds[name]).get_state()
        return state

    def _keep(self, name: str, state: State) -> None:
        self._states = {**self._states, name: state}


def seed_all(seed: int, group: ProcessGroup | None = None) -> RNGTracker:
    """Seed torch's current random state, and return a tracker with the states "replicated" and "sharded".

    All ranks of the group must use the same seed. Independent model replicas or pipeline stages need seeds 10,000
    apart. If the seeds of two replicas were 1 apart, rank 1 of the first replica would draw the same masks as rank 0 of
    the second.
    """
    torch.manual_seed(seed)
    return states_from(seed, group)


def states_from(seed: int, group: ProcessGroup | None = None) -> RNGTracker:
    """Return a tracker like the one that `seed_all` returns, but leave torch's current state unchanged."""
    tracker = RNGTracker()
    tracker.add("replicated", seed + REPLICATED_OFFSET)
    tracker.add("sharded", seed + SHARDED_OFFSET + rank_and_size(group)[0])
    return tracker


def dropout(
    x: Tensor, p: float = 0.5, training: bool = True, *, sharded: bool, rng: RNGTracker | None = None
) -> Tensor:
    """Apply `F.dropout` to x [..], with a different mask on each rank if `sharded`, otherwise with the same one.

    rng: the states to draw from. If None, torch's current state is used, whether or not x is sharded.
    """
    if rng is None or not training or not p:
        return F.dropout(x, p, training)
    with rng.fork("sharded" if sharded else "replicated"):
        return F.dropout(x, p)


def checkpoint(function: Callable, *args: Any, tracker: RNGTracker, **kwargs: Any) -> Any:
    """Run function(*args, **kwargs) and save only its inputs. Backward runs it again, with the same dropout masks.

    Works like `torch.utils.checkpoint.checkpoint` with `use_reentrant=False`, and accepts the same options. The second
    run doesn't change any random state, and it stops as soon as backward has all the tensors it needs. So if g is the
    last operation of the function, its all-reduce isn't repeated. If a dropout follows g, the all-reduce is repeated.
    """

    def contexts() -> tuple:
        return nullcontext(), _Replay(tracker)

    run = torch.compiler.disable(torch_checkpoint)  # breaks the compiled graph, because graphs can't restore states
    return run(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


class _Replay:
    """Context manager that restores the tracker's states as of its own creation. It can be entered repeatedly."""

    def __init__(self, tracker: RNGTracker) -> None:
        self.tracker = tracker
        self.then = tracker._states, tracker._current
        self.outside: list[tuple[dict[str, State], str | None]] = []

    def __enter__(self) -> None:
        self.outside.append((self.tracker._states, self.tracker._current))
        self.tracker._states, self.tracker._current = self.then

    def __exit__(self, *exception: object) -> None:
        self.tracker._states, self.tracker._current = self.outside.pop()
