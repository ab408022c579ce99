"""Losses over steps. Overlapping curves stay visible, because each curve is thinner than the one before it."""

from collections.abc import Mapping, Sequence

from tplab.viz.colors import DASHES, WIDTH, Picture, chart, rank_color, style, tint


def curves(
    losses: Mapping[str, Sequence[float]], *, title: str | None = None, xlabel: str = "step", ylabel: str = "loss"
) -> Picture:
    """Draw one curve per label. Each curve has a different color, width and dash pattern."""
    with style():
        caption = title or "curves: " + ", ".join(losses)
        picture, axes = chart(WIDTH * 0.85, 2.9, caption, title)
        count = len(losses)
        step = min(1.6, 4.0 / max(1, count - 1))
        for index, (name, values) in enumerate(losses.items()):
            color = rank_color(index)
            numbers = [float(value) for value in values]
            axes.plot(
                range(1, len(numbers) + 1), numbers, label=name,
                color=color if index == count - 1 else tint(color, 0.55 + 0.35 * index / count),
                linewidth=1.5 + step * (count - 1 - index), linestyle=DASHES[index % len(DASHES)],
            )  # fmt: skip
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        axes.grid()
        axes.legend(handlelength=3.2)
    ends = {name: (float(values[0]), float(values[-1])) for name, values in losses.items() if len(values)}
    each = "; ".join(f"{name} goes from {first:,.4g} to {last:,.4g}" for name, (first, last) in ends.items())
    picture.description = f"{ylabel} over {xlabel}: {each}."
    return picture
