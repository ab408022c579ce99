"""The check for exercise 0.3, in which the learner fixes a validation loop that keeps every batch's activations."""

import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from tplab.course.checks import Verdict, calling, current, exercise, fail, fresh_generator
from tplab.memory.meter import MemoryMeter

Batch = tuple[Tensor, Tensor]
WIDTH, ROWS = 64, 32
ROUNDED = 1e-5  # the relative error that's allowed, because the sum may be a float32 tensor
SPARE = 4096  # bytes that the answer may use for small tensors, such as the losses of all batches
HELD = 3  # how many earlier batches may still be in memory: the previous one, and two more if the loop reads ahead


class Model(nn.Module):
    """A stack of layers whose activations are easy to tell apart from their weights.

    Like a GPT, the model returns the mean loss.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / WIDTH**0.5

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return (x - targets).square().mean()


def batches(generator: torch.Generator, number: int) -> list[Batch]:
    """Return `number` batches. The last batch is smaller than the others, as it is in most data sets."""

    def draw(rows: int) -> Tensor:
        return torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)

    sizes = [ROWS] * (number - 1) + [ROWS // 4]
    return [(draw(rows), draw(rows)) for rows in sizes]


def handed_over(data: list[Batch], held: list[int]) -> Iterator[Batch]:
    """Yield the batches without keeping any of them in memory.

    Before it yields a batch, this generator appends to `held` how many of the earlier batches are still in memory.
    """
    earlier: list[weakref.ref[torch.UntypedStorage]] = []
    while data:
        held.append(sum(batch() is not None for batch in earlier))
        earlier.append(weakref.ref(data[0][0].untyped_storage()))
        yield data.pop(0)


def needed(model: Model, data: list[Batch]) -> int:
    """Return the peak memory in bytes that MemoryMeter measures for a loop that keeps nothing."""
    with MemoryMeter() as meter, torch.no_grad():
        for batch in data:
            model(*batch).item()
    return meter.peak


@exercise("0.3", "Fix a validation loop")
def repaired_validation(average_loss: Callable[..., float]) -> Verdict:
    generator = fresh_generator()
    model = Model(generator)
    for number in (7, 1, 2):  # seven come first, because many batches show best what stays in memory
        data = batches(generator, number)
        call = f"average_loss(model, {number} batch{'es' * (number > 1)})"
        with torch.no_grad():
            losses = [model(*batch).item() for batch in data]
        right = sum(losses) / number
        weighted = sum(loss * len(x) for loss, (x, _) in zip(losses, data, strict=True)) / sum(len(x) for x, _ in data)
        before = [(p.requires_grad, p.grad, p.detach().clone()) for p in model.parameters()]
        model.train(number != 2)
        least, held = needed(model, data), list[int]()
        with MemoryMeter() as meter, calling(call):
            seen = average_loss(model, handed_over(data, held) if number == 7 else data)
        _compare(call, number, seen, right, weighted)
        _is_as_before(call, model, before, number != 2)
        _keeps_nothing(call, number, meter, least)
        _lets_batches_go(call, held)
    current().compared["the average loss"] = None
    current().compared["the memory"] = None
    if not torch.is_grad_enabled():
        fail("0.3", "Autograd is still off after your function returns.", _SWITCHED_OFF)
    return Verdict("Your function doesn't keep any activations in memory, no matter how many batches there are.")


def _compare(call: str, number: int, seen: object, right: float, weighted: float) -> None:
    if isinstance(seen, Tensor) and seen.requires_grad:
        fail(
            "0.3",
            f"the result of {call} still has an autograd graph.",
            "As long as something holds a reference to your result, its graph stays alive, and so do all the "
            "activations in that graph. What could you return instead?",
        )
    if not isinstance(seen, (int, float, Tensor)) or (isinstance(seen, Tensor) and seen.numel() != 1):
        fail(
            "0.3",
            f"{call} returned {type(seen).__name__}.",
            "Your function should return a single number. What does its last line return?",
        )
    value = float(seen)
    if abs(value - right) > ROUNDED * right:
        ask = (
            "The result should still be the average of all the batches' losses. Which losses do you add up? What "
            "do you divide the sum of these losses by?"
        )
        if number > 1 and abs(value - number * right) < ROUNDED * number * right:
            ask = "You returned the sum of the losses. How do you get the average from the sum?"
        elif abs(value - weighted) < ROUNDED * weighted:
            ask = (
                "You weighted the loss of each batch by the batch size. The broken loop gives every batch the same "
                "weight, even the last batch, which is smaller here. What should your function divide by?"
            )
        fail("0.3", f"{call} returned {value:.6g}, but the average loss is {right:.6g}.", ask)


_SWITCHED_OFF = (
    "Training usually continues after validation. Does your function turn autograd back on, even if something fails in "
    "between? (You can use torch.no_grad() in a with statement or as a decorator.)"
)


def _is_as_before(call: str, model: Model, before: list, training: bool) -> None:
    for parameter, (requires_grad, grad, value) in zip(model.parameters(), before, strict=True):
        if parameter.requires_grad != requires_grad or parameter.grad is not grad or not torch.equal(parameter, value):
            fail(
                "0.3",
                f"{call} changed the model's parameters.",
                "Evaluating a model shouldn't change it, because training continues afterward. Which of your lines "
                "changes a parameter, its gradient, or its `requires_grad` flag?",
            )
    if model.training != training:
        fail(
            "0.3",
            f"{call} changed model.training from {training} to {model.training}.",
            "The caller decides between train() and eval(). If your function changes the mode, does it restore the "
            "old mode afterward?",
        )


def _keeps_nothing(call: str, number: int, meter: MemoryMeter, least: int) -> None:
    if meter.peak <= least + SPARE:
        return
    extra = meter.peak - least
    one = 4 * ROWS * WIDTH * 8  # the size of one batch's activations in bytes
    if extra > 1.5 * one:
        ask = (
            "At its peak, your function holds the activations of several batches. Which of your variables stays "
            "alive across all loop iterations? Which tensors does that variable keep alive?"
        )
    else:
        ask = (
            "Memory use no longer grows with the number of batches, but your function still keeps the activations of "
            "one batch for a backward pass. Will there be a backward pass? How do you tell autograd that there won't "
            "be a backward pass?"
        )
    fail("0.3", f"{call} takes {extra:,} bytes more than it needs to.", ask)


def _lets_batches_go(call: str, held: list[int]) -> None:
    if max(held, default=0) > HELD:
        fail(
            "0.3",
            f"{call} asked for the next batch while {max(held)} earlier batches were still in memory.",
            "Your function doesn't keep any activations, but it does keep the batches themselves. A validation set "
            "can be larger than your memory, so `batches` may be a generator that loads one batch at a "
            "time. Which of your lines holds on to all the batches, for example by turning them into a "
            "list?",
        )
