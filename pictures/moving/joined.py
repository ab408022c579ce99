"""Draws pictures/moving/joined.svg: the two layers of pictures.moving.layers, which are then pushed together.

python -m pictures.moving.joined
"""

from pictures.moving import layers
from pictures.moving.animation import Movie


def movie() -> Movie:
    return layers.movie(joined=True)


if __name__ == "__main__":
    movie().write("joined")
