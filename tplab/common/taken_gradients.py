"""Notes on parameters: who reduces their gradients, and whether a gradient has been taken out of `.grad`.

Data parallelism takes gradients while backward is still running: DataParallel puts them into buckets, and ZeRO reduces
them to shards. Until the gradients are back, `.grad` is None, which usually means that a parameter wasn't used.
Functions that read `.grad` call `check_not_taken` first, because otherwise they would skip the parameter without saying
so.

Only one object may reduce a parameter's gradients, because a second one would find none, or reduce them twice.
"""

from collections.abc import Iterable

from torch import nn

_NOTE, _OWNER = "gradient_taken", "gradient_owner"


def own_gradients(parameters: Iterable[nn.Parameter], owner: str) -> None:
    """Note that `owner` reduces the gradients from now on. Raises ValueError if there is an owner already."""
    parameters = list(parameters)
    for parameter in parameters:
        if (other := getattr(parameter, _OWNER, None)) is not None:
            raise ValueError(
                f"{other} already reduces the gradients of a parameter {list(parameter.shape)}, so {owner} would find "
                "none. Make a new model, or keep using the first one"
            )
    for parameter in parameters:
        setattr(parameter, _OWNER, owner)


def mark_taken(parameters: Iterable[nn.Parameter], advice: str) -> None:
    """Note that the gradients of `parameters` are elsewhere. `advice` says who has them, and how to get at them."""
    for parameter in parameters:
        setattr(parameter, _NOTE, advice)


def clear_taken(parameters: Iterable[nn.Parameter]) -> None:
    """Remove the notes that `mark_taken` made."""
    for parameter in parameters:
        parameter.__dict__.pop(_NOTE, None)


def check_not_taken(parameters: Iterable[nn.Parameter], to: str) -> None:
    """Raise ValueError if the gradient of any parameter has been taken. `to` says what it was needed for."""
    for parameter in parameters:
        if parameter.grad is None and (advice := getattr(parameter, _NOTE, None)) is not None:
            raise ValueError(
                f"can't {to}: the gradient of a parameter {list(parameter.shape)} isn't in .grad. {advice}"
            )
