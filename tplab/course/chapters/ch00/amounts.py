"""Compare one number that the learner's function returned with one that was counted, and ask what explains the gap."""

from collections.abc import Sequence
from typing import Any

import torch

from tplab.course.checks import CheckFailed, current
from tplab.memory.config import GPTConfig

Suspect = tuple[float, str]  # what a well-known mistake gives, to the nearest whole number, and what to ask then
MOST_QUESTIONS = 2  # where several mistakes give the same number


def expect(
    number: str,
    call: str,
    name: str,
    seen: Any,
    right: int,
    suspects: Sequence[Suspect],
    otherwise: str,
    where: str = "",
) -> None:
    """Raise CheckFailed unless `seen` is the number `right`; suspects that give `seen` ask their questions.

    call:      how the function was called; name: what it returns; where: what else the learner should know of the case
    otherwise: the question where no suspect explains the number
    """
    is_number = isinstance(seen, (int, float)) and not isinstance(seen, bool)
    if is_number and abs(seen - right) <= 1e-9 * right:
        current().compared[name] = None
        return
    if not is_number:
        got, ask = f"got {_described(seen)}, not a number", f"{call} should return one whole number. What does yours?"
    else:
        got = f"got {_written(seen)}, right is {right:,}: {_written(abs(seen - right))} too {_much(seen, right)}"
        close = [question for value, question in suspects if abs(seen - value) < 1 and bool(seen) == bool(value)]
        ask = " Or: ".join(list(dict.fromkeys(close))[:MOST_QUESTIONS]) or otherwise
    raise CheckFailed(f"Exercise {number}: {call} is wrong.", rows=[(name, "", got)], report=where, question=ask)


def spelled(config: GPTConfig) -> str:
    """A configuration, with what differs from a GPT-2."""
    sizes = ("num_layers", "hidden_size", "num_heads", "vocab_size", "seq_length", "num_kv_heads", "ffn_hidden_size")
    parts = [f"{name}={value}" for name in sizes if (value := getattr(config, name)) is not None]
    parts += ["gated=True"] * config.gated
    parts += [f"{name}=False" for name in ("bias", "learned_positions", "tied_embedding") if not getattr(config, name)]
    return f"GPTConfig({', '.join(parts)})"


def pick(generator: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, (), generator=generator))


def _much(seen: float, right: int) -> str:
    return "many" if seen > right else "few"


def _written(value: float) -> str:
    if float(value).is_integer():
        return f"{round(value):,}"
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"


def _described(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
