"""The picture of a look-up in a table cut by rows: every rank's rows, its masked vectors, and their sum."""

import torch
from matplotlib.colors import to_rgb

from tests.viz.pictures import fills, texts
from tplab import viz
from tplab.viz.colors import rank_fill

VOCAB = 10
TABLE = torch.arange(VOCAB)[:, None] + torch.tensor([0.1, 0.2])  # row 7 is 7.1 7.2
IDS = [1, 7, 4, 7, 9]


def picture(p: int, ids: list[int] = IDS, **options) -> viz.Picture:
    """Of what p ranks would return, by plain indexing."""
    rows = -(-VOCAB // p)
    padded = torch.cat([TABLE, torch.zeros(p * rows - VOCAB, 2)])
    held = []
    for start in range(0, p * rows, rows):
        foreign = torch.tensor([not start <= i < start + rows for i in ids])
        vectors = padded[torch.tensor(ids).clamp(max=len(padded) - 1)] * ~foreign[:, None]
        held.append({"start": start, "table": padded[start : start + rows], "foreign": foreign, "vectors": vectors})
    found = [part | {"out": sum(other["vectors"] for other in held)} for part in held]
    return viz.lookup(ids, found, vocab_size=VOCAB, **options)


TOKENS = ["the", "cat", "sat", "cat", "down"]
PICTURES = {
    "p = 1": lambda: picture(1),
    "p = 2": lambda: picture(2),
    "p = 4, with tokens": lambda: picture(4, tokens=TOKENS),
}


def test_every_vector_has_the_colour_of_the_rank_that_found_it() -> None:
    filled = fills(picture(2))
    assert filled.count(rank_fill(0)) == 5 + 2 + 2  # its rows, its vectors (ids 1 and 4), and again in the sum
    assert filled.count(rank_fill(1)) == 5 + 3 + 3
    of_nobody = fills(picture(2, [VOCAB + 5]))
    assert [of_nobody.count(to_rgb(rank_fill(rank))) for rank in (0, 1, None)] == [5, 5, 3]


def test_it_shows_ids_rows_tokens_zeros_and_padding() -> None:
    seen = texts(picture(4, tokens=TOKENS))
    assert {"id 7  cat", "id 9  down", "rank 3", "[3, 2]", "[5, 2]"} <= set(seen)
    assert seen.count("pad") == 2
    assert [seen.count(f"row {i}") for i in range(3)] == [1, 4, 0]  # id 9 is row 0 of rank 3
    assert seen.count("7.1") == 1 + 2 + 2  # in the table, twice found, twice in the sum
    assert seen.count("0") == 2 * (2 + 20 - 5)  # padding, and what the others have
