"""Draws pictures/moving/poster.svg, a still: GPT-2 small on 1, 2 and 4 ranks, and every message of a training step.

The messages and the number of weights per rank come from a training step on real ranks.
"""

from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist

from pictures.drawing import BACKWARD, FORWARD, SMALL, box, line, rank_tint, text
from pictures.moving.animation import Movie
from tplab import device, launch, record
from tplab.common import units
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig
from tplab.tensor.cross_entropy import vocab_parallel_cross_entropy
from tplab.viz.colors import FAINT, INK, NOBODY

GPT2_SMALL = GPTConfig(num_layers=12, hidden_size=768, num_heads=12, vocab_size=50_257, seq_length=1024, dropout=0.0)
SIZES = (1, 2, 4)  # ranks, one panel each
TOKENS = GPT2_SMALL.seq_length

WIDTH, MARGIN, PANEL = 880, 18, 288  # PANEL: from the left edge of one panel to that of the next
TOP, GAP, BOX = 92, 10, 150  # the first block, the space between blocks, and their width
SPLIT, SAME = 34, 22  # the heights of a block that is split, and of one that every rank repeats


class Block(NamedTuple):
    """A part of the GPT, and how many all-reduces it causes in each direction."""

    name: str
    split: bool = False
    forward: int = 0
    backward: int = 0


LAYER = (
    Block("norm"), Block("attention", True, 1, 1), Block("+ residual"),
    Block("norm"), Block("MLP", True, 1, 1), Block("+ residual"),
)  # fmt: skip
PARTS = (  # from the top down, and how often each of them is repeated
    (1, (Block("embedding", True, forward=1), Block("+ positions"))),
    (GPT2_SMALL.num_layers, LAYER),
    (1, (Block("norm"), Block("logits", True, backward=1), Block("loss", True, forward=2))),
)


def step() -> dict:
    """Train for one step on this rank, and return what it holds and sends."""
    model = ParallelGPT(GPT2_SMALL, device=device())
    ids = torch.arange(TOKENS, device=device()).unsqueeze(0)
    with record() as forward:
        loss = vocab_parallel_cross_entropy(model(ids), ids, vocab_size=GPT2_SMALL.vocab_size)
    with record() as backward:
        loss.backward()
    rank = dist.get_rank()
    assert {call.kind for trace in (forward, backward) for call in trace.of_rank(rank)} <= {"all_reduce"}
    return {
        "weights": sum(parameter.numel() for parameter in model.parameters()),
        "forward": [call.bytes for call in forward.of_rank(rank)],
        "backward": [call.bytes for call in backward.of_rank(rank)],
    }


def movie() -> Movie:
    ranks = {p: launch(step, p, timeout=1800)[0] for p in SIZES}
    made = Movie(
        _bottom() + 60,
        "GPT-2 small on 1, 2 and 4 ranks",
        "Three GPTs side by side, on 1, 2 and 4 ranks. The embedding, each layer's attention and MLP, the logits and "
        "the loss are split into one stripe per rank. Positions, norms and residuals are gray, because every rank "
        "computes all of them. Forward, an all-reduce follows the embedding, each attention and each MLP, and two "
        "small ones compute the loss. Backward, an all-reduce follows the logits, each MLP and each attention. "
        + " ".join(f"On {units.count(p, 'rank')}: {'; '.join(_sums(ranks[p]))}." for p in SIZES),
        width=WIDTH,
    )
    made.draw(text(MARGIN, 30, "GPT-2 small with tensor parallelism", size=20, bold=True))
    made.draw(_legend(MARGIN, 44))
    for index, p in enumerate(SIZES):
        _panel(made, MARGIN + index * PANEL, p, ranks[p])
    return made


def _legend(x: float, y: float) -> str:
    """Say what stripes, gray and the colors of the messages mean."""
    drawn = _stripes(x, y, 40, 14, 4) + text(x + 48, y + 12, "split, one stripe per rank", size=SMALL)
    drawn += box(x + 236, y, 40, 14, NOBODY, FAINT, 1, 3) + text(x + 284, y + 12, "the same on every rank", size=SMALL)
    drawn += text(x + 452, y + 12, "↓ all-reduced forward", size=SMALL, color=FORWARD)
    drawn += text(x + 606, y + 12, "↑ all-reduced backward", size=SMALL, color=BACKWARD)
    return drawn


def _panel(made: Movie, x: float, p: int, rank: dict) -> None:
    """Draw a GPT from the top down, with the messages of all its layers at the layer that stands for them."""
    forward, backward = iter(rank["forward"]), iter(rank["backward"][::-1])  # both in the order of the blocks now
    made.draw(text(x, TOP - 12, units.count(p, "rank"), bold=True))
    middle, y = x + BOX / 2, float(TOP)
    made.draw(line(middle, TOP, middle, _bottom() - GAP))
    for times, blocks in PARTS:
        if times > 1:
            made.draw(box(x - 8, y - GAP / 2, PANEL - 22, _height(blocks), "none", FAINT, 1.2, dashed=True))
            made.draw(text(x + PANEL - 38, y + 12, f"{times} ×", anchor="end", bold=True))
        for block in blocks:
            tall = SPLIT if block.split else SAME
            made.draw(_stripes(x, y, BOX, tall, p) if block.split else box(x, y, BOX, tall, NOBODY, FAINT, 1, 3))
            made.draw(text(middle, y + tall / 2 + 5, block.name, size=SMALL, anchor="middle", bold=block.split))
            if back := _label(list(islice(backward, block.backward))):
                made.draw(text(x + BOX + 8, y + 13, f"↑ {back}", size=SMALL, color=BACKWARD))
            if ahead := _label(list(islice(forward, block.forward))):
                made.draw(text(x + BOX + 8, y + 30, f"↓ {ahead}", size=SMALL, color=FORWARD))
            y += tall + GAP
        for trace, each in ((forward, "forward"), (backward, "backward")):  # those of the other layers
            _label(list(islice(trace, (times - 1) * sum(getattr(block, each) for block in blocks))))
    assert not [*forward, *backward], "the run sent more than the blocks say"
    for index, said in enumerate(_sums(rank)):
        made.draw(text(x, y + 14 + 20 * index, said, size=SMALL))


def _label(sizes: list[int]) -> str:
    """Return the size of messages that are about equally large, or ""."""
    assert len({units.size(size) for size in sizes}) <= 1, "they are not equally large"
    return (f"{len(sizes)} × " * (len(sizes) > 1) + units.size(sizes[0])) if sizes else ""


def _stripes(x: float, y: float, width: float, height: float, p: int) -> str:
    parts = (box(x + rank * width / p, y, width / p, height, rank_tint(rank, 0.4), "", 0, 0) for rank in range(p))
    return "".join(parts) + box(x, y, width, height, "none", INK, 1.2, 3)


def _sums(rank: dict) -> tuple[str, str]:
    sent = rank["forward"] + rank["backward"]
    messages = f"{len(sent)} all-reduces, {units.size(sum(sent))}" if sent else "no messages"
    return f"{rank['weights'] / 1e6:.1f} million weights per rank", f"{messages} per step"


def _height(blocks: tuple[Block, ...]) -> float:
    return sum((SPLIT if block.split else SAME) + GAP for block in blocks)


def _bottom() -> float:
    return TOP + sum(_height(blocks) for _, blocks in PARTS)
