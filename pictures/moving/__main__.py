"""Draw the moving pictures and their stills from real runs: python -m pictures.moving [NAME ..], or all of them."""

import sys
from collections.abc import Callable
from functools import partial

from pictures.moving import attention, fg, layers, loss, mesh, network, one_step, parcels, pause, poster, ring, tapes
from pictures.moving.animation import Movie

MOVIES: dict[str, Callable[[], Movie]] = {
    "attention": attention.movie,
    "fg": fg.movie,
    "joined": partial(layers.movie, joined=True),
    "layers": layers.movie,
    "loss": loss.movie,
    "mesh": mesh.movie,
    "network": network.movie,
    "one_step": one_step.movie,
    "parcels": parcels.movie,
    "pause": pause.movie,
    "poster": poster.movie,
    "ring": ring.movie,
    "tapes": tapes.movie,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or MOVIES:
        MOVIES[name]().write(name)
