"""Draw the moving pictures and their stills from real runs: python -m pictures.moving [NAME ..], or all of them."""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module

from pictures.moving import layers
from pictures.moving.animation import FOLDER, Movie

NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("__main__", "animation"))
MOVIES: dict[str, Callable[[], Movie]] = {name: import_module(f"pictures.moving.{name}").movie for name in NAMES}
MOVIES["joined"] = partial(layers.movie, joined=True)

if __name__ == "__main__":
    for name in sys.argv[1:] or MOVIES:
        MOVIES[name]().write(name)
