"""Read settings from a preset, a YAML file and flags. The file overrides the preset, and the flags override both.

There are presets for chapter 15's notebook, for a laptop without a GPU (a GPT-2 and a Llama), for one H100, and for
eight of them. Each field of `Settings` has a flag, written with hyphens, and a key of the same name in the YAML file.
"""

import argparse
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from tplab.capstone.settings.settings import GROUPS, Settings

_KINDS = {field.name: field.type for field in fields(Settings)}

_LAPTOP = Settings(
    folder="runs/laptop", vocab_size=2048, num_layers=4, hidden_size=192, num_heads=8, seq_length=128, tp=2,
    steps=1200, batch_size=16, micro_batch_size=16, learning_rate=2e-3, min_learning_rate=2e-4, warmup_steps=60,
    evaluate_every=200, sample_every=300, save_every=300,
)  # fmt: skip

PRESETS: dict[str, Settings] = {
    "notebook": Settings(  # seconds; Adam's long memory of the gradients' size keeps so short a run steady
        folder="runs/notebook", layers="mine", data_limit=1_000_000, vocab_size=512, num_layers=2, hidden_size=64,
        num_heads=4, seq_length=64, tp=2, steps=60, batch_size=8, micro_batch_size=8, learning_rate=3e-3,
        min_learning_rate=3e-4, warmup_steps=20, beta2=0.99, evaluate_every=0, sample_tokens=60, save_every=5,
        plan=False,
    ),
    "laptop": _LAPTOP,
    "llama": replace(  # a small Llama 3, with about as many parameters per layer as "laptop"
        _LAPTOP, folder="runs/llama", num_kv_heads=4, ffn_hidden_size=512, gated=True, bias=False,
        tied_embedding=False, learned_positions=False, rotary_base=500_000.0,
    ),
    "h100x1": Settings(
        folder="runs/h100x1", vocab_size=16384, num_layers=12, hidden_size=768, num_heads=12, seq_length=1024,
        precision="bfloat16", compile=True, steps=2000, batch_size=64, micro_batch_size=32, learning_rate=6e-4,
        min_learning_rate=6e-5, warmup_steps=200, log_every=10, evaluate_every=200, save_every=500,
    ),
    "h100x8": Settings(
        folder="runs/h100x8", vocab_size=32768, num_layers=24, hidden_size=2048, num_heads=16, seq_length=2048, tp=8,
        sequence_parallel=True, precision="bfloat16", recompute="attention", steps=2000, batch_size=64,
        micro_batch_size=16, learning_rate=3e-4, min_learning_rate=3e-5, warmup_steps=200, log_every=10,
        evaluate_every=200, save_every=500,
    ),
}  # fmt: skip


def read_settings(path: Path) -> Settings:
    """Read settings from a YAML file, with defaults for missing fields. Raises ValueError if the file is invalid."""
    try:
        return from_values(_values_in(path))
    except ValueError as error:
        raise ValueError(f"the settings in {path} can't be used: {error}") from None


def from_values(values: dict[str, Any], base: Settings | None = None) -> Settings:
    """Return `base` (or the defaults) updated with `values`. Raises ValueError for unknown fields or wrong types."""
    if unknown := [name for name in values if name not in _KINDS]:
        raise ValueError(f"there are no settings called {unknown}. The settings are {', '.join(_KINDS)}")
    return replace(base or Settings(), **{name: _converted(name, value) for name, value in values.items()})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser, which needs argument_default=argparse.SUPPRESS to omit flags that aren't given."""
    start = parser.add_argument_group(
        "where the settings come from (a file overrides a preset, and flags override both)"
    )
    start.add_argument("--preset", choices=sorted(PRESETS), help="the preset to start from")
    start.add_argument("--config", type=Path, metavar="FILE", help="a YAML file with settings")
    for field in fields(Settings):
        if field.name in GROUPS:
            group = parser.add_argument_group(GROUPS[field.name])
        flag, kind, text = "--" + field.name.replace("_", "-"), field.type, field.metadata["help"]
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        elif get_origin(kind) is Literal:
            group.add_argument(flag, choices=get_args(kind), type=type(get_args(kind)[0]), help=text)
        else:
            number = next(part for part in (int, float, str) if part is kind or part in get_args(kind))
            group.add_argument(flag, type=number, metavar={int: "N", float: "X", str: "TEXT"}[number], help=text)


def settings_of(given: Mapping[str, Any], base: Settings | None = None) -> Settings:
    """Build the settings from parsed flags. The file overrides the preset or `base`, and other flags override both."""
    values = _values_in(given["config"]) if "config" in given else {}
    values |= {name: value for name, value in given.items() if name not in ("preset", "config")}
    return from_values(values, PRESETS[given["preset"]] if "preset" in given else base)


def preset_for(gpus: int, ranks: int | None = None) -> Settings:
    """Return the preset for a number of ranks on machines with so many GPUs. More ranks than GPUs run on the CPU."""
    if not gpus or (ranks or 1) > gpus:
        return PRESETS["laptop"]
    return PRESETS["h100x1" if (ranks or gpus) == 1 else "h100x8"]


def _values_in(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"there's no file with settings at {path}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} isn't valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} should have lines such as 'tp: 2', but it contains a {type(values).__name__}")
    return values


def _converted(name: str, value: Any) -> Any:
    """Convert a number to a float if the setting is a float, because YAML reads 1 as an int and 1e-3 as a string."""
    if _KINDS[name] is float and isinstance(value, int | str) and not isinstance(value, bool):
        with suppress(ValueError):
            return float(value)
    return value
