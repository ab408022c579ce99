"""Chapter 09: random numbers that are the same on all ranks where they must be, and different where they must differ.

Where activations are replicated, every rank must drop the same positions, or the replicas are no longer one model.
Where they are sharded, every rank must drop its own positions: with the same random state everywhere, rank 1 would drop
in its heads what rank 0 drops in other heads, and p ranks would draw only 1/p of the random numbers the model needs.

    one row of activations, p = 2      rank 0        rank 1
    replicated [h], same mask          x . x x       x . x x
    sharded [h/p], masks differ        . x           x x

So each rank has three random states, all from one seed:

    current         seed               what torch draws from anyway: initial values (see `tplab.tensor.initialization`)
    "replicated"    seed + 1359        the same on all ranks
    "sharded"       seed + 2718 + r    of rank r alone (Megatron: "model-parallel-rng", with the same 2718)

    tracker = seed_all(1)
    with tracker.fork("sharded"):
        y = F.dropout(y, 0.1)           # drawn from this rank's own state; the current one doesn't change

`fork` puts the state into torch's generators. When the block ends, even with an exception, it stores the state in its
new position and restores the previous one. "replicated" is separate from the current state, because a rank that draws
one more number from the current state, say for a log message, would have different masks from then on.

Activation checkpointing runs a layer a second time, in backward, and must drop the same positions again. torch's own
restores the current state but knows of no other, so the second run would draw a later mask from "sharded": no error,
but wrong gradients. `checkpoint` restores all of them.
(Shoeybi et al. 2019, "Megatron-LM", section 3; Megatron: CudaRNGStatesTracker, model_parallel_cuda_manual_seed and
checkpoint, in megatron/core/tensor_parallel/random.py.)
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tplab.collectives.by_hand import rank_and_size
from tplab.tensor.generators import State, copy_of, generators_in_use, read_state, write_state

REPLICATED_OFFSET = 1359
SHARDED_OFFSET = 2718
CPU_SEEDS = 2**32  # the CPU's generator uses the last 32 bits of a seed


@dataclass(frozen=True)
class _Stream:
    """The seeds of a named state on all ranks: a single seed, or with `per_rank` one for each rank."""

    seeds: range
    per_rank: bool


class RNGTracker:
    """Named random states that torch draws from inside `fork`. `seed_all` creates one with the two that layers need.

    A state covers the CPU and this rank's GPU. Nothing here communicates.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.rank, self.world_size = rank_and_size(group)
        self._streams: dict[str, _Stream] = {}
        self._states: dict[str, State] = {}  # replaced, never modified, because `checkpoint` keeps earlier ones
        self._current: str | None = None  # the name whose state is in torch's generators now

    def add(self, name: str, seed: int, *, per_rank: bool = False) -> None:
        """Add a state, from `seed` on every rank, or with `per_rank` from seed + rank.

        Raises ValueError if the name is taken, or if two names would draw the same numbers on any two ranks.
        """
        if name in self._streams:
            raise ValueError(f"there is a random state {name!r} already")
        seeds = range(seed, seed + (self.world_size if per_rank else 1))
        for other, stream in self._streams.items():
            if _meet(seeds, stream.seeds):
                raise ValueError(
                    f"{name!r} with {_words(seeds)} would draw the same numbers as {other!r} with "
                    f"{_words(stream.seeds)} (of a seed a CPU takes the last 32 bits): choose another seed"
                )
        self._streams[name] = _Stream(seeds, per_rank)
        self._states = {**self._states, name: {}}

    @contextmanager
    def fork(self, name: str = "sharded") -> Iterator[None]:
        """Make torch draw from the state `name` inside the block, from where it was left; outside, nothing changes.

        Forks can be nested, even with the same name. Raises ValueError if there is no such state, and RuntimeError if
        the GPU is used for the first time inside the block.
        """
        if name not in self._streams:
            raise ValueError(
                f"there is no random state {name!r}, only {list(self._streams)}: add({name!r}, seed) makes one, and "
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
        """Copies of the current states, to be saved: "replicated", and for one that is `per_rank` "sharded.rank2".

        A complete checkpoint has the names of all ranks. `torch.distributed.checkpoint` saves them side by side, and a
        single file with all of them works, too. Torch's current state isn't included: see `torch.get_rng_state()`.
        """
        generators = generators_in_use()
        if self._current is not None:
            self._keep(self._current, read_state(generators))
        return {self._key(name): copy_of(self._state(name, generators)) for name in self._streams}

    def load_state_dict(self, state: Mapping[str, State], *, strict: bool = True) -> None:
        """Continue from what `state_dict` returned on this rank, or from a dict with the states of all ranks.

        A run with more ranks than the saved one has states that weren't saved. `strict=False` leaves them unchanged; if
        `seed_all` made them from the seed of the saved run, they differ from all others. A GPU that the saved run
        didn't have starts from the seed. Raises ValueError if `strict` and a state of this rank is missing,
        RuntimeError in `fork`.
        """
        if self._current is not None:
            raise RuntimeError(f"load_state_dict within fork({self._current!r}), which would undo it when it ends")
        missing = [key for name in self._streams if (key := self._key(name)) not in state]
        if missing and strict:
            raise ValueError(
                f"rank {self.rank} needs the random states {missing}, which are not among {sorted(state)}. What is "
                "per rank has to be saved from every rank. strict=False leaves missing states as they are"
            )
        for name in self._streams:
            if (key := self._key(name)) in state:
                self._keep(name, copy_of(state[key]))

    def _key(self, name: str) -> str:
        return f"{name}.rank{self.rank}" if self._streams[name].per_rank else name

    def _seed(self, name: str) -> int:
        stream = self._streams[name]
        return stream.seeds[self.rank if stream.per_rank else 0]

    def _state(self, name: str, generators: dict[str, torch.Generator]) -> State:
        """The state `name` for each generator. A device that was never drawn from is still at its seed."""
        state = dict(self._states[name])
        for kind, generator in generators.items():
            if kind not in state:
                state[kind] = torch.Generator(generator.device).manual_seed(self._seed(name)).get_state()
        return state

    def _keep(self, name: str, state: State) -> None:
        self._states = {**self._states, name: state}


def seed_all(seed: int, group: ProcessGroup | None = None) -> RNGTracker:
    """Set torch's current state to `seed` and return the states "replicated" and "sharded", as above.

    All ranks of the group call it with the same seed. Models side by side (data-parallel replicas, pipeline stages)
    need seeds 10,000 apart: with seeds one apart, rank 1 of the first would draw the masks of rank 0 of the second.
    """
    torch.manual_seed(seed)
    tracker = RNGTracker(group)
    tracker.add("replicated", seed + REPLICATED_OFFSET)
    tracker.add("sharded", seed + SHARDED_OFFSET, per_rank=True)
    return tracker


def dropout(
    x: Tensor, p: float = 0.5, training: bool = True, *, sharded: bool, rng: RNGTracker | None = None
) -> Tensor:
    """`F.dropout` of activations x [..], dropping the same positions on all ranks, or different ones if `sharded`.

    rng: the states to draw from; None: torch's current state, whatever x is.
    """
    if rng is None or not training or not p:
        return F.dropout(x, p, training)
    with rng.fork("sharded" if sharded else "replicated"):
        return F.dropout(x, p)


def checkpoint(function: Callable, *args: Any, tracker: RNGTracker, **kwargs: Any) -> Any:
    """Run function(*args, **kwargs), save only its inputs, and run it again in backward, with the same dropout.

    Works like `torch.utils.checkpoint.checkpoint` with `use_reentrant=False`, and takes its options, too. The second
    run's draws leave no trace: afterwards, all states are as if there had been only the first. It stops as soon as
    backward has what it needs, so a g at the very end of the function isn't sent again, but one before a dropout is.
    """

    def contexts() -> tuple:
        return nullcontext(), _Replay(tracker)

    run = torch.compiler.disable(torch_checkpoint)  # breaks the graph of a compiled model, which no state fits into
    return run(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


class _Replay:
    """A context in which the tracker's states are those of this object's creation. It can be entered repeatedly."""

    def __init__(self, tracker: RNGTracker) -> None:
        self.tracker = tracker
        self.then = tracker._states, tracker._current
        self.outside: list[tuple[dict[str, State], str | None]] = []

    def __enter__(self) -> None:
        self.outside.append((self.tracker._states, self.tracker._current))
        self.tracker._states, self.tracker._current = self.then

    def __exit__(self, *exception: object) -> None:
        self.tracker._states, self.tracker._current = self.outside.pop()


def _meet(one: range, other: range) -> bool:
    """True if a seed of `one` and a seed of `other` start the CPU's generator in the same state."""
    forth, back = ((b.start - a.start) % CPU_SEEDS for a, b in ((one, other), (other, one)))
    return forth < len(one) or back < len(other)


def _words(seeds: range) -> str:
    return f"seed {seeds.start}" if len(seeds) == 1 else f"seeds {seeds.start} to {seeds.stop - 1}"
