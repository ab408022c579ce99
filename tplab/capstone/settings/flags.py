"""The flags of `python -m tplab.capstone`: one per field of `Settings`, with its line of help."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from tplab.capstone.settings.presets import PRESETS
from tplab.capstone.settings.settings import GROUPS, Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser, which should omit flags that aren't given (argument_default=argparse.SUPPRESS)."""
    start = parser.add_argument_group("where the settings come from (a later one wins: preset, file, flags)")
    start.add_argument("--preset", choices=sorted(PRESETS), help="a configuration to start from")
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
