"""Read settings from a preset, a YAML file and flags.

    preset  <  YAML file  <  flags           a later one wins

Each field of `Settings` has a flag, written with hyphens, and a key of the same name in the YAML file. With start_from,
the model is that of a Hugging Face folder, and no file or flag may say otherwise.
"""

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from tplab.capstone.settings.presets import PRESETS
from tplab.capstone.settings.settings import GROUPS, Settings
from tplab.gpt.hugging_face_folder import config_of_folder, file_names

TOKENIZER = "tokenizer.json"  # of a Hugging Face folder, and of token files


def read_settings(path: Path) -> Settings:
    """Read the settings in a YAML file, with defaults for missing fields. Raises ValueError if the file is invalid."""
    return from_values(_values_in(path))


def from_values(values: dict[str, Any], base: Settings | None = None) -> Settings:
    """Replace fields of `base` (None: defaults) by `values`. Raises ValueError for unknown fields or wrong types."""
    known = {field.name: field.type for field in fields(Settings)}
    if unknown := [name for name in values if name not in known]:
        raise ValueError(f"there are no settings called {unknown}. The settings are {', '.join(known)}")
    return replace(base or Settings(), **{name: _as_type(name, known[name], value) for name, value in values.items()})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser, which should omit flags that aren't given (argument_default=argparse.SUPPRESS)."""
    start = parser.add_argument_group(
        "where the settings come from (a file overrides a preset, and flags override both)"
    )
    start.add_argument("--preset", choices=sorted(PRESETS), help="the preset to start from")
    start.add_argument("--config", type=Path, metavar="FILE", help="a YAML file with settings")
    for field in fields(Settings):
        if field.name in GROUPS:
            group = parser.add_argument_group(GROUPS[field.name])
        _add(group, field.name, field.type, field.metadata["help"])


def _add(group: Any, name: str, kind: Any, text: str) -> None:
    flag = "--" + name.replace("_", "-")
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    elif get_origin(kind) is Literal:
        group.add_argument(flag, choices=get_args(kind), type=type(get_args(kind)[0]), help=text)
    else:
        number = next(part for part in (int, float, str) if part is kind or part in get_args(kind))
        group.add_argument(flag, type=number, metavar={int: "N", float: "X", str: "TEXT"}[number], help=text)


def settings_of(given: dict[str, Any], base: Settings | None = None) -> Settings:
    """Build the settings from parsed flags: the preset or `base`, overridden by the file, then by the other flags."""
    given = dict(given)
    start = PRESETS[given.pop("preset")] if "preset" in given else base
    values = _values_in(given.pop("config")) if "config" in given else {}
    values |= given
    if isinstance(values.get("start_from"), str):
        values |= _model_in(Path(values["start_from"]), values)
    return from_values(values, start)


def _model_in(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the model in a Hugging Face folder. Raises ValueError if `values` has different ones.

    Dropout may differ. Raises FileNotFoundError if the folder lacks a file, and ValueError if its model needs something
    that has no setting.
    """
    config = config_of_folder(folder)
    file_names(folder)
    if not (folder / TOKENIZER).is_file():
        raise FileNotFoundError(f"there's no {TOKENIZER} in {folder}, but the run needs the model's tokenizer")
    kinds, defaults = {field.name: field.type for field in fields(Settings)}, Settings().model
    found = {}
    for name, value in vars(config).items():
        if name not in kinds:
            if name != "flash_attention" and value != getattr(defaults, name):
                raise ValueError(f"the model in {folder} has {name}={value}, which the capstone doesn't support")
            continue
        found[name] = value
        if name in values and (given := _as_type(name, kinds[name], values[name])) != value:
            if name != "dropout":
                raise ValueError(
                    f"the model in {folder} has {name}={value}, but you asked for {name}={given}. Leave this setting "
                    "out, because start_from determines it"
                )
            found[name] = given
    return found


def _values_in(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"there's no file with settings at {path}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} isn't valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} should have lines such as 'tp: 2', but it contains a {type(values).__name__}")
    return values


def _as_type(name: str, kind: Any, value: Any) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is float and isinstance(value, str):  # YAML reads 1e-3 as text
        try:
            return float(value)
        except ValueError:
            pass
    allowed = get_args(kind) or (kind,)
    plain = tuple(part for part in allowed if isinstance(part, type))
    fits = value in allowed if get_origin(kind) is Literal else isinstance(value, plain)
    if not fits or (isinstance(value, bool) and kind is not bool):
        wanted = " or ".join(getattr(part, "__name__", str(part)) for part in allowed)
        raise ValueError(f"{name} should be {wanted}, not {value!r}")
    return value
