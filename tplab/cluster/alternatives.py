"""Chapter 14: why one plan is the fastest, and what would have to change for another one to win.

`reasons` changes one option of the best plan at a time and computes how much slower it gets. The options are sequence
parallelism, recomputation, the number of chunks, and the micro-batch. `change_needed` computes how much one of the
machine's speeds (or the batch size) would have to change for another plan to be equally fast. Both only evaluate the
cost model again.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from tplab.cluster.plan import Plan, best_of_each_split, layouts
from tplab.collectives.links import Link
from tplab.cost.machines import Machine
from tplab.cost.step import Program, step_time
from tplab.memory.config import GPTConfig

LARGEST = 16.0  # the largest factor by which we change a speed
Speed = Callable[[Machine, float], Machine]
OPTIONS = ("sequence_parallel", "recompute", "chunks", "micro_batch")


@dataclass(frozen=True)
class Change:
    """A change of one speed, or of the batch size, by a `factor` that makes another plan as fast as the best one."""

    what: str
    factor: float

    def __str__(self) -> str:
        if self.what == "batch":
            return f"with {self.factor:.0f} times the batch"
        pace = f"{self.factor:.2g} times as fast" if self.factor > 1 else f"{1 / self.factor:.2g} times as slow"
        return f"if {self.what} were {pace}"


def runners_up(found: list[Plan]) -> list[Plan]:
    """Return the three fastest plans that split the model over the GPUs differently than the first plan does."""
    return best_of_each_split(found)[1:4]


def reasons(config: GPTConfig, found: list[Plan]) -> dict[str, list[tuple[object, float | None]]]:
    """For each option of the best plan, return its other values and how much longer a step takes (0.04 is 4%).

    The split over GPUs and all other options stay the same. None in place of the number means that the changed layout
    needs too much memory. We try half and twice the micro-batch. Values for which there's no such layout are left out:
    twice the micro-batch, for example, if the number of sequences isn't divisible.
    """
    best, fits = found[0].layout, {plan.layout: plan.time.total for plan in found}
    possible = set(layouts(config, best.gpus, best.sequences))
    changed: dict[str, list[tuple[object, float | None]]] = {}
    for option in OPTIONS:
        chosen = getattr(best, option)
        values = {getattr(plan.layout, option) for plan in found if plan.layout.pp == best.pp} - {chosen}
        if option == "micro_batch":
            values &= {chosen // 2, chosen * 2}
        for value in sorted(values, key=str):
            layout = replace(best, **{option: value})
            if option == "micro_batch":
                if best.sequences < best.dp * value:
                    continue
                layout = replace(layout, micro_batches=best.sequences // (best.dp * value))
            if layout in possible:
                longer = fits[layout] / fits[best] - 1 if layout in fits else None
                changed.setdefault(option, []).append((value, longer))
    return changed


def change_needed(config: GPTConfig, best: Plan, other: Plan, machine: Machine, program: Program) -> Change | None:
    """Return the smallest single change that makes `other` as fast as `best`, or None if none up to `LARGEST` does.

    We try faster and slower links within and between nodes, memory and matmuls, and batches that are 2, 3, .. times as
    large. The smallest change is the one with the factor closest to 1. A third plan may be even faster by then.
    """
    found: list[Change] = []
    for what, speed in _SPEEDS.items():
        for largest in (LARGEST, 1 / LARGEST):
            factor = _threshold(partial(_gap_at, config, best, other, machine, program, speed), largest)
            if factor is not None:
                found.append(Change(what, factor))
    for times in range(2, int(LARGEST) + 1):
        if _gap(config, _more(best, times), _more(other, times), machine, program) <= 0:
            found.append(Change("batch", times))
            break
    return min(found, key=lambda change: abs(math.log(change.factor)), default=None)


def _gap(config: GPTConfig, best: Plan, other: Plan, machine: Machine, program: Program) -> float:
    """Return how many seconds longer a step of `other` takes than a step of `best`."""
    return (
        step_time(config, other.layout, machine, program).total - step_time(config, best.layout, machine, program).total
    )


def _gap_at(
    config: GPTConfig, best: Plan, other: Plan, machine: Machine, program: Program, speed: Speed, factor: float
) -> float:
    return _gap(config, best, other, speed(machine, factor), program)


def _threshold(gap: Callable[[float], float], largest: float) -> float | None:
    """Return the factor between 1 and `largest` at which the gap closes, to within 1%, or None if it doesn't."""
    if gap(largest) > 0:
        return None
    near, far = 0.0, math.log(largest)
    while abs(far - near) > 0.01:
        middle = (near + far) / 2
        near, far = (middle, far) if gap(math.exp(middle)) > 0 else (near, middle)
    return math.exp(far)


def _more(plan: Plan, times: int) -> Plan:
    return replace(plan, layout=replace(plan.layout, micro_batches=times * plan.layout.steps))


def _faster(link: Link, factor: float) -> Link:
    return Link(link.alpha, link.beta / factor, link.source)


_SPEEDS: dict[str, Speed] = {
    "the links within a node": lambda machine, factor: replace(machine, inside=_faster(machine.inside, factor)),
    "the network between nodes": lambda machine, factor: replace(machine, between=_faster(machine.between, factor)),
    "the GPUs' memory": lambda machine, factor: replace(machine, bandwidth=machine.bandwidth * factor),
    "the GPUs' matmuls": lambda machine, factor: replace(machine, flops=machine.flops * factor),
}
