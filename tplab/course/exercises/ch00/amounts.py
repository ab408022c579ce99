"""Helpers for chapter 00's checks, which build a model, count its parameters and compare an answer with the count."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tplab.course.checks import CheckFailed, current
from tplab.memory.config import GPTConfig
from tplab.memory.small_gpt import GPT

Suspect = tuple[float, str]  # the number that a common mistake would produce, and the question to ask about it
MOST_QUESTIONS = 2  # the check asks at most this many if several mistakes would produce the same number


def plain_gpt(config: GPTConfig) -> GPT:
    """Return the model on device "meta", where tensors have shapes but no memory."""
    with torch.device("meta"):
        return GPT(config)


def count(module: nn.Module, *words: str) -> int:
    """Count the module's parameters, or only those whose name contains one of the words."""
    named = module.named_parameters()
    return sum(parameter.numel() for name, parameter in named if not words or any(word in name for word in words))


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
    """Raise CheckFailed unless `seen` is the number `right`, and ask about the mistakes that would produce `seen`.

    call:      the call that returned `seen`, as the learner would write it
    name:      what the call should return, such as "the number of parameters"
    suspects:  the numbers that common mistakes would produce. `seen` may differ from such a number by less than 1
    otherwise: the question to ask if `seen` matches none of these numbers
    where:     any additional information for the learner, which is shown as the failure's report
    """
    is_number = isinstance(seen, (int, float)) and not isinstance(seen, bool)
    if is_number and abs(seen - right) <= 1e-9 * right:
        current().compared[name] = None
        return
    if not is_number:
        got = f"got {_described(seen)}, not a number"
        ask = f"{call} should return a whole number. What does your function return?"
    else:
        got = f"got {_written(seen)}, expected {right:,}: {_written(abs(seen - right))} too {_much(seen, right)}"
        close = [question for value, question in suspects if abs(seen - value) < 1 and bool(seen) == bool(value)]
        ask = " Or: ".join(list(dict.fromkeys(close))[:MOST_QUESTIONS]) or otherwise
    raise CheckFailed(f"Exercise {number}: {call} is wrong.", rows=[(name, "", got)], report=where, question=ask)


def spelled(config: GPTConfig) -> str:
    """Return a configuration as the call that creates it, with its sizes and all options that differ from GPT-2's."""
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
