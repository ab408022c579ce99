"""Chapter 07: the path of a token through a small model with a tied table, recorded step by step for a picture.

The model has h = 2. Its first half looks up a sentence in a table whose rows are split over the ranks, and its second
half computes the logits from the same table. In between, every rank computes the same thing. The loss is the mean
cross-entropy of the next words.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tplab.runtime import device, launch, record
from tplab.tensor.embedding import pad_vocab_size, parallel_logits
from tplab.tensor.operators import gather_from_region, reduce_from_region

HIDDEN = 2
BODY = ((0.9, -0.6), (0.5, 1.1))  # what stands for the rest of the model: y = x BODY


@dataclass(frozen=True)
class OnRank:
    """What a rank had at each step of the token's path.

    start:     the id of its first row
    table:     its rows, [v/p, h]. Rows at the end may be padding
    row:       the row of its shard that it looks up for the token
    foreign:   whether the token's real row is on another rank
    found:     the vector that it looks up, [h]
    term:      its term of the sum, [h]
    x, y:      the token's vectors after the sum and after the rest of the model, [h]
    logits:    its logits of the next word, [v/p]. Those of padding are -inf
    dy_own:    its contribution to the gradient of y, [h]
    dy:        the gradient of y after f, [h]
    d_output:  the gradient that its rows get at the exit, [v/p, h]
    d_lookup:  the gradient that its rows get at the entrance, [v/p, h]
    """

    start: int
    table: Tensor
    row: int
    foreign: bool
    found: Tensor
    term: Tensor
    x: Tensor
    y: Tensor
    logits: Tensor
    dy_own: Tensor
    dy: Tensor
    d_output: Tensor
    d_lookup: Tensor


@dataclass(frozen=True)
class TokenWay:
    """The path of a token through the model, on every rank.

    words:      the vocabulary
    ids:        the sentence
    place:      the position of the token in the sentence
    target:     the id of the next word
    ranks:      what each rank had
    forward, backward: the number of all-reduces, and the bytes of each, at the two ends of the model. (The all-gather
                of the logits, from which the loss is computed, isn't included.)
    """

    words: tuple[str, ...]
    ids: tuple[int, ...]
    place: int
    target: int
    ranks: tuple[OnRank, ...]
    forward: tuple[int, int]
    backward: tuple[int, int]

    @property
    def token(self) -> int:
        return self.ids[self.place]


def record_token(words: Sequence[str], sentence: str, token: str, p: int) -> TokenWay:
    """Run the model on p ranks, forward and backward, and return the path of one of the sentence's tokens.

    words: the vocabulary. Every word of the sentence has to be in it. `token` is one of the sentence's words except the
           last, because its target is the next word

    Raises ValueError for a word that isn't in the vocabulary, and for a token that isn't in the sentence.
    """
    spoken = sentence.split()
    unknown = [word for word in spoken if word not in words]
    if unknown or token not in spoken[:-1]:
        what = f"{unknown[0]!r} isn't in the vocabulary" if unknown else f"{token!r} has no next word in {sentence!r}"
        raise ValueError(f"{what}, so there's nothing to record")
    ids, place = [list(words).index(word) for word in spoken], spoken.index(token)
    ran = list(launch(_run, p, args=(len(words), ids, place)))
    return TokenWay(
        tuple(words), tuple(ids), place, ids[place + 1], tuple(rank for rank, *_ in ran), ran[0][1], ran[0][2]
    )


def full_table(size: int) -> Tensor:
    """Return the table [v, h], whose elements have a single decimal place."""
    return (torch.randn(size, HIDDEN, generator=torch.Generator().manual_seed(5)) * 10).round() / 10


def _run(size: int, sentence: list[int], place: int) -> tuple[OnRank, tuple[int, int], tuple[int, int]]:
    rank, p = dist.get_rank(), dist.get_world_size()
    rows = pad_vocab_size(size, p, 1) // p
    padded = F.pad(full_table(size), (0, 0, 0, p * rows - size))
    start = rank * rows
    weight = padded[start : start + rows].to(device()).requires_grad_()
    at_entrance, at_exit = weight * 1, weight * 1  # two names for the same values, so that each gets its own gradient
    ids = torch.tensor(sentence[:-1], device=device())
    with record() as forward:
        foreign = (ids < start) | (ids >= start + rows)  # [s]
        row = (ids - start).masked_fill(foreign, 0)  # [s]
        found = F.embedding(row, at_entrance)  # [s, h]
        term = found.masked_fill(foreign.unsqueeze(-1), 0)  # [s, h]
        x = reduce_from_region(term)  # [s, h]
        y = x @ torch.tensor(BODY, device=device())  # [s, h]
        before_f = y.detach().requires_grad_()
        logits = parallel_logits(before_f, at_exit, vocab_size=size)  # [s, v/p]
    everything = gather_from_region(logits)[..., :size]
    target = torch.tensor(sentence[1:], device=device())
    (dlogits,) = torch.autograd.grad(F.cross_entropy(everything, target), logits, retain_graph=True)
    dlogits = dlogits.nan_to_num()  # exactly zero for padding
    own = dlogits @ weight.detach()  # [s, h]
    with record() as backward:
        dy, d_output = torch.autograd.grad(logits, (before_f, at_exit), dlogits)
        (d_lookup,) = torch.autograd.grad(y, at_entrance, dy)
    steps = [found, term, x, y, logits, own, dy]
    found, term, x, y, logits, own, dy = (step[place].detach().cpu() for step in steps)
    seen = OnRank(
        start, weight.detach().cpu(), int(row[place]), bool(foreign[place]), found, term, x, y, logits, own, dy,
        d_output.cpu(), d_lookup.cpu(),
    )  # fmt: skip
    sent = [section.totals().get("all_reduce", (0, 0)) for section in (forward, backward)]
    return seen, sent[0], sent[1]
