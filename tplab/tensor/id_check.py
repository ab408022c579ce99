"""Chapter 07: an id outside the vocabulary is an error, never a vector of zeros.

Each rank masks the ids that aren't among its rows and assumes that another rank has them. So an id that *no* rank has
would become a vector of zeros, and a target that no rank has would get log-sum-exp as its loss. Both look like ordinary
values, so training would continue. That's why all ids are checked first:

    "now"      raises IndexError in this call; the default on a CPU. On a GPU, each call would have to synchronize.
    "later"    returns NaN in this call, and raises IndexError in the next one; the default on a GPU.

"later" copies two numbers from the GPU asynchronously and reads them when the next call begins. By then, the GPU has
long finished the copy and still has the rest of the step in its queue, so the CPU and the GPU don't wait for each
other. All ranks see the same ids, so they raise in the same call. Until then, results are NaN and can't be mistaken for
valid ones. Plain torch would kill the process with a device-side assert.

A compiled graph supports neither. It uses `torch._assert_async`, which stops the program without naming the id.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

When = Literal["now", "later"]


def integers(what: str, ids: Tensor) -> Tensor:
    """Return the ids [..] as int64. In uint8, 256 would be 0, and ids - start would wrap around without an error.

    Raises ValueError if they aren't integers.
    """
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"{what} should hold ids, in whole numbers, not {ids.dtype}")
    return ids.long()


def outside(ids: Tensor, size: int) -> Tensor:
    """Return a bool mask [..] of the ids, int64 [..], that aren't in 0 .. size - 1."""
    return (ids < 0) | (ids >= size)


def wrong_id_error(what: str, number: int, position: int, shape: Sequence[int], size: int) -> IndexError:
    """Return the error for a wrong id, naming the id, its position (given as a flat index) and the valid ids."""
    place: list[int] = []
    for length in reversed(shape):
        position, index = divmod(position, length)
        place.insert(0, index)
    return IndexError(
        f"{what} {number} at {place} of {list(shape)} is outside the vocabulary: its {size} ids are 0 to {size - 1}"
    )


def raise_first(what: str, ids: Tensor, wrong: Tensor, size: int) -> None:
    """Raise IndexError for the first id marked in `wrong`, bool [..], if there is one. On a GPU, this synchronizes.

    In a compiled graph, the error is a RuntimeError. On device "meta", where ids have no values, nothing is checked.
    """
    if ids.is_meta or not ids.numel():
        return
    if torch.compiler.is_compiling():
        torch._assert_async(~wrong.any(), f"{what} outside the vocabulary: its {size} ids are 0 to {size - 1}")
    elif wrong.any():
        position, number = _first(ids, wrong).tolist()
        raise wrong_id_error(what, number, position, ids.shape, size)


class IdCheck:
    """Checks the ids of every call.

    when    "now": in the same call; "later": when the next call begins; None: "later" on a GPU, and otherwise "now"
    """

    def __init__(self, size: int, when: When | None = None) -> None:
        if when not in (None, "now", "later"):
            raise ValueError(f"ids can be checked 'now', 'later' or None (by the device), not {when!r}")
        self.size, self.when = size, when
        self._report: tuple[Tensor, torch.cuda.Event | None, Sequence[int]] | None = None

    def __call__(self, ids: Tensor) -> Tensor | None:
        """Check the ids. Return None if the check is complete, or a bool mask [..] of wrong ids if it is still pending.

        Raises IndexError for a wrong id in this call ("now") or in the previous call ("later").
        """
        self.raise_late()
        ids = integers("ids", ids)
        when = self.when or ("later" if ids.is_cuda else "now")
        wrong = outside(ids, self.size)
        if when == "now" or torch.compiler.is_compiling():
            raise_first("id", ids, wrong, self.size)
            return None
        if ids.numel() and not ids.is_meta:
            report = _first(ids, wrong).to("cpu", non_blocking=True)  # from a GPU, into pinned memory
            event = torch.cuda.current_stream(ids.device).record_event() if ids.is_cuda else None
            self._report = report, event, ids.shape
        return wrong

    def raise_late(self) -> None:
        """Raise the pending IndexError if the last call had a wrong id.

        Use this if no later call will report the error.
        """
        if self._report is None:
            return
        (report, event, shape), self._report = self._report, None
        if event is not None:
            event.synchronize()
        position, number = report.tolist()
        if not 0 <= number < self.size:
            error = wrong_id_error("id", number, position, shape, self.size)
            error.add_note("It came with the call before this one, whose result is NaN there. Parameters may be NaN by "
                           "now: go on from a checkpoint. check_ids='now' finds it in its own call.")  # fmt: skip
            raise error

    def __reduce__(self) -> tuple[Any, ...]:  # copies and pickles don't include a pending report
        return IdCheck, (self.size, self.when)


def _first(ids: Tensor, wrong: Tensor) -> Tensor:
    """Return [flat index of the first wrong id, that id], on the device of the ids. If none is wrong: [0, first id]."""
    place = wrong.view(torch.uint8).argmax()  # argmax returns the first of several equal maxima
    return torch.stack([place, ids.take(place)])
