"""The check for exercise 0.4, which compares the learner's layout with the best one among all possible layouts."""

import re
from collections.abc import Callable
from typing import Any

from tplab.course.checks import Verdict, calling, current, exercise, fail, fresh_generator, must_refuse
from tplab.course.exercises.ch00.amounts import pick, spelled
from tplab.memory.config import PRESETS, GPTConfig
from tplab.memory.memory_bill import GPUS, Layout, bill

MOST = 8  # number of GPUs in a machine, and the default of largest_tp


def possible(config: GPTConfig, largest: int) -> dict[tuple[int, int], int]:
    """Return, for every (tp, pp) that the exercise allows, how many bytes the most heavily loaded GPU needs."""
    return {
        (tp, pp): max(bill(config, Layout(tp=tp, pp=pp), stage=stage).total for stage in range(pp))
        for tp in range(1, largest + 1) if config.num_heads % tp == 0
        for pp in range(1, config.num_layers + 1) if config.num_layers % pp == 0
    }  # fmt: skip


def best(needs: dict[tuple[int, int], int], capacity: int) -> tuple[int, int] | None:
    """Return the (tp, pp) that fits on the fewest GPUs, or None if nothing fits.

    If several layouts need equally few GPUs, return the one with the smallest tp.
    """
    fitting = [layout for layout, size in needs.items() if size <= capacity]
    return min(fitting, key=lambda layout: (layout[0] * layout[1], layout[0]), default=None)


@exercise("0.4", "The fewest GPUs for a model")
def fewest_gpus(smallest_layout: Callable[..., Any]) -> Verdict:
    generator = fresh_generator()
    small = GPTConfig(num_layers=12, hidden_size=96, num_heads=12, vocab_size=500, seq_length=64)
    layers, tokens = pick(generator, 5, 9), pick(generator, 40, 4000)
    odd = GPTConfig(num_layers=layers, hidden_size=50, num_heads=5, vocab_size=tokens, seq_length=32)
    wide = GPTConfig(num_layers=4, hidden_size=48, num_heads=6, vocab_size=tokens + 6000, seq_length=16)
    long = GPTConfig(num_layers=8, hidden_size=64, num_heads=1, vocab_size=50, seq_length=4096)
    # For `wide`, the last stage needs the most memory. For `long`, each GPU needs the least memory with pp = 4.
    for config in (small, odd, wide, long):
        needs = possible(config, MOST)
        sizes = sorted(set(needs.values()))
        for capacity in dict.fromkeys([*sizes, *(size - 1 for size in sizes[1:]), 2 * sizes[-1]]):
            _compare(smallest_layout, config, capacity, MOST, needs)
        _must_refuse(smallest_layout, config, sizes[0] - 1, MOST, needs)
        for largest in (1, 4):
            needs = possible(config, largest)
            least = min(needs.values())
            _compare(smallest_layout, config, least, largest, needs)
            _must_refuse(smallest_layout, config, least - 1, largest, needs)
    for name in ("GPT-2 1.5B", "GPT-3 175B", "Llama 3 70B"):
        config = PRESETS[name]
        _compare(smallest_layout, config, GPUS["H100, 80 GB"], None, possible(config, MOST))
    current().compared["the layout"] = None
    return Verdict(
        "Your function finds the layout with the fewest GPUs, and it breaks ties in favor of the smallest tp."
    )


def _compare(
    answer: Callable[..., Any], config: GPTConfig, capacity: int, largest: int | None, needs: dict[tuple[int, int], int]
) -> None:
    options = {} if largest is None else {"largest_tp": largest}
    limit = "" if largest is None else f", largest_tp={largest}"
    call = f"smallest_layout({spelled(config)}, gpu_bytes={capacity}{limit})"
    right = best(needs, capacity)
    assert right is not None
    with calling(
        call,
        f"The model fits with tp={right[0]} and pp={right[1]}. What does your search do when it reaches "
        f"tp={right[0]} and pp={right[1]}?",
    ):
        said = answer(config, capacity, **options)
    if not isinstance(said, Layout):
        fail(
            "0.4", f"{call} returned {said!r}.", "Your function should return a Layout. What does its last line return?"
        )
    if (said.tp, said.pp, said.dp, said.micro_batch) == (*right, 1, 1):
        return
    fail("0.4", f"{call} returned {_shown(said)}, but the best layout is Layout(tp={right[0]}, pp={right[1]}).",
         _ask(said, right, config, capacity, largest or MOST, needs))  # fmt: skip


def _ask(
    said: Layout,
    right: tuple[int, int],
    config: GPTConfig,
    capacity: int,
    largest: int,
    needs: dict[tuple[int, int], int],
) -> str:
    if said.dp != 1 or said.micro_batch != 1:
        return (
            "Adding replicas speeds up training, but doesn't reduce the memory per GPU. Leave dp and micro_batch at 1."
        )
    if config.num_heads % said.tp:
        return (
            f"A head can't be split across ranks. Can {config.num_heads} heads be divided evenly among {said.tp} ranks?"
        )
    if config.num_layers % said.pp:
        return (
            f"Every stage should have the same number of layers. Can {config.num_layers} layers be divided evenly "
            f"among {said.pp} stages?"
        )
    if said.tp > largest:
        return f"Your layout has tp={said.tp}, but largest_tp is only {largest}."
    size = needs[said.tp, said.pp]
    if size > capacity:
        return (
            f"With {_shown(said)}, the most heavily loaded GPU needs {size:,} bytes, but it has only {capacity:,} "
            "bytes. Which stage needs the most memory? Did you check that stage?"
        )
    if said.gpus > right[0] * right[1]:
        enough = right[0] * right[1]
        return (
            f"Your layout takes {said.gpus} GPUs, but {enough} GPUs are enough. Did you try every layout that the "
            "rules allow?"
        )
    return "Both layouts need the same number of GPUs. When there's a tie, which layout does the exercise ask for?"


def _must_refuse(
    answer: Callable[..., Any], config: GPTConfig, capacity: int, largest: int, needs: dict[tuple[int, int], int]
) -> None:
    """Fail the check unless the answer raises a ValueError whose message contains the smallest sufficient gpu_bytes.

    That number may contain thousands separators.
    """
    call = f"smallest_layout({spelled(config)}, gpu_bytes={capacity}, largest_tp={largest})"
    least = min(needs.values())
    ask = (
        f"Even the best layout needs {least:,} bytes on its most heavily loaded GPU. What should your function do if "
        "no layout fits on the GPUs?"
    )
    told: list[str] = []

    def tell() -> Any:
        try:
            return answer(config, capacity, largest_tp=largest)
        except ValueError as error:
            told.append(str(error))
            raise

    must_refuse("0.4", tell, ask, what=call)
    numbers = map(int, re.findall(r"\d+", re.sub(r"(?<=\d)[,_' ](?=\d{3})", "", told[0])))
    if least not in numbers:
        ask = (
            f"The message should contain the smallest gpu_bytes for which a layout would fit, which is {least}. What "
            "does your message say?"
        )
        fail("0.4", f"{call} raises ValueError, but its message doesn't name {least}.", ask, told[0])


def _shown(layout: Layout) -> str:
    more = f", dp={layout.dp}" * (layout.dp != 1) + f", micro_batch={layout.micro_batch}" * (layout.micro_batch != 1)
    return f"Layout(tp={layout.tp}, pp={layout.pp}{more})"
