"""A token's way as p ranks would have it, by plain indexing in a single process that knows nothing of ranks."""

import torch
from torch.nn import functional as F

from tplab.tensor.token_way import BODY, OnRank, TokenWay, full_table

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "it", ".")
SENTENCE, TOKEN = "the cat saw it .", "saw"


def plain_way(p: int, token: str = TOKEN) -> TokenWay:
    """What p ranks would have, by plain indexing, with a table of its own for each end."""
    spoken = SENTENCE.split()
    ids, place, number = [WORDS.index(word) for word in spoken], spoken.index(token), WORDS.index(token)
    table = full_table(len(WORDS))
    entrance, exit_ = table.clone().requires_grad_(), table.clone().requires_grad_()
    x = entrance[ids[:-1]]
    y = x @ torch.tensor(BODY)
    logits = y @ exit_.T
    y.retain_grad()
    logits.retain_grad()
    F.cross_entropy(logits, torch.tensor(ids[1:])).backward()
    rows = -(-len(WORDS) // p)
    padding = p * rows - len(WORDS)
    padded, at_entrance, at_exit = (F.pad(each, (0, 0, 0, padding)) for each in (table, entrance.grad, exit_.grad))
    scored = F.pad(logits.detach()[place], (0, padding), value=-torch.inf)
    upstream = F.pad(logits.grad[place], (0, padding))
    ranks = []
    for rank in range(p):
        mine = slice(rank * rows, (rank + 1) * rows)
        foreign = not mine.start <= number < mine.stop
        found = padded[mine.start if foreign else number]
        ranks.append(
            OnRank(
                mine.start, padded[mine], 0 if foreign else number - mine.start, foreign, found, found * (not foreign),
                x.detach()[place], y.detach()[place], scored[mine], upstream[mine] @ padded[mine], y.grad[place],
                at_exit[mine], at_entrance[mine],
            )
        )  # fmt: skip
    sent = (1, 4 * x.numel()) if p > 1 else (0, 0)
    return TokenWay(WORDS, tuple(ids), place, ids[place + 1], tuple(ranks), sent, sent)
