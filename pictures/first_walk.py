"""Draws pictures/first_walk.png, the picture of the README, from runs on this machine.

    make picture

Left: how the two weights of an MLP are cut over two ranks. Right: two training steps of ParallelMLP on two
ranks as they happened, and its loss on real text for p = 1, 2, 4 beside one process with plain PyTorch.
"""

import io
from pathlib import Path

import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from tplab import device, launch, viz
from tplab.common import corpus
from tplab.tensor.full_state import load_full_state_dict
from tplab.tensor.mlp import ParallelMLP

TARGET = Path(__file__).with_name("first_walk.png")
CONTEXT, HIDDEN, FFN, BATCH, STEPS = 8, 128, 512, 64, 150
MARGIN = 24  # pixels between the pictures


class PlainMLP(nn.Module):
    """The MLP on one process."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class ByteModel(nn.Module):
    """Scores for the next byte from the bytes before it."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(corpus.VOCABULARY, HIDDEN // CONTEXT)
        self.mlp = mlp
        self.head = nn.Linear(HIDDEN, corpus.VOCABULARY)

    def forward(self, context: torch.Tensor) -> torch.Tensor:  # [b, context]
        x = self.embedding(context).flatten(1)  # [b, h]
        return self.head(x + self.mlp(x))  # [b, 256]


def train(model: nn.Module, steps: int) -> list[float]:
    """The loss of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for inputs, targets in corpus.byte_batches(corpus.python_sources(200_000), CONTEXT, BATCH, steps, seed=1):
        loss = F.cross_entropy(model(inputs.to(device())), targets[:, -1].to(device()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_on_ranks(start: dict[str, torch.Tensor], steps: int) -> list[float]:
    model = ByteModel(ParallelMLP(HIDDEN, FFN)).to(device())
    load_full_state_dict(model, start)
    return train(model, steps)


def forward_and_backward(steps: int) -> None:
    model = ParallelMLP(1024, 4096, device=device())
    x = torch.randn(256, 1024, device=device(), requires_grad=True)
    for _ in range(steps):
        model(x).square().mean().backward()


def draw() -> list[list[Image.Image]]:
    """The pictures, column by column."""
    torch.manual_seed(0)
    plain = ByteModel(PlainMLP())
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    losses = {"one process, plain PyTorch": train(plain, STEPS)}
    for p in (1, 2, 4):
        losses[f"ParallelMLP, p = {p}"] = launch(train_on_ranks, p, args=(start, STEPS))[0]
    columns = [
        [
            viz.product((3, 4), (4, 8), kind="column", p=2, title="first weight: cut by columns"),
            viz.product((3, 8), (8, 4), kind="row", p=2, names=("Z", "B"), title="second weight: cut by rows"),
        ],
        [
            viz.timeline(launch(forward_and_backward, 2, args=(2,)), title="two steps on two ranks, as they happened"),
            viz.curves(losses, title="the same loss for every p, on real text"),
        ],
    ]
    return [[Image.open(io.BytesIO(picture.png())) for picture in column] for column in columns]


def compose(columns: list[list[Image.Image]]) -> Image.Image:
    """Columns side by side, each as wide as its widest picture."""
    widths = [max(image.width for image in column) for column in columns]
    heights = [sum(image.height + MARGIN for image in column) for column in columns]
    page = Image.new("RGB", (sum(widths) + MARGIN * (len(columns) + 1), max(heights) + MARGIN), "white")
    left = MARGIN
    for column, width, height in zip(columns, widths, heights, strict=True):
        top = MARGIN + (max(heights) - height) // 2
        for image in column:
            page.paste(image, (left, top))
            top += image.height + MARGIN
        left += width + MARGIN
    return page


if __name__ == "__main__":
    compose(draw()).quantize(128).save(TARGET, optimize=True)
    print(f"{TARGET.name}: {TARGET.stat().st_size // 1000} kB")
