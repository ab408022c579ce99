"""Chapter 07: an id outside the vocabulary is an error, never a vector of zeros.

Each rank masks the ids that aren't among its rows and trusts that another rank has them. So an id that *no* rank has
would become a vector of zeros, and the loss of a target that no rank has would be log-sum-exp. These are values like
any others, so training would go on. That's why we check all ids first:

    "now"      IndexError in this call. The default on a CPU. On a GPU, the CPU then waits for the ids at every call.
    "later"    NaN in this call, and IndexError in the next one. The default on a GPU.

"later" starts to copy three numbers from the GPU and reads them when the next call begins. By then, the GPU has long
passed the point where they were made, and still has the rest of the step ahead of it, so neither waits for the other.
All ranks see the same ids, so they raise in the same call. Anything learned in between is NaN, and can't be mistaken
for a result; plain torch would stop the entire process there, with a device-side assert.

A compiled graph has neither: `torch._assert_async` ends the program, without naming the id.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

When = Literal["now", "later"]


def outside(ids: Tensor, size: int) -> Tensor:
    """A mask, bool [..], of the ids [..] that aren't one of 0 .. size - 1."""
    return (ids < 0) | (ids >= size)


def wrong_id_error(what: str, number: int, position: int, shape: Sequence[int], size: int) -> IndexError:
    """The error for a wrong id: the id, where it is (`position` counts in the flat tensor), and the valid ids."""
    place: list[int] = []
    for length in reversed(shape):
        position, index = divmod(position, length)
        place.insert(0, index)
    return IndexError(
        f"{what} {number} at {place} of {list(shape)} is outside the vocabulary: its {size} ids are 0 to {size - 1}"
    )


def raise_first(what: str, ids: Tensor, wrong: Tensor, size: int) -> None:
    """Raise IndexError for the first id that `wrong`, bool [..], marks, if any. On a GPU, the CPU waits for the answer.

    In a compiled graph, this is a RuntimeError. On device "meta", where ids have no values, nothing is raised.
    """
    if ids.is_meta or not ids.numel():
        return
    if torch.compiler.is_compiling():
        torch._assert_async(~wrong.any(), f"{what} outside the vocabulary: its {size} ids are 0 to {size - 1}")
    elif wrong.any():
        _, position, number = _first(ids, wrong).tolist()
        raise wrong_id_error(what, number, position, ids.shape, size)


class IdCheck:
    """A check of the ids of every call, in that call or in the next one, according to `when` (None: the device)."""

    def __init__(self, size: int, when: When | None = None) -> None:
        if when not in (None, "now", "later"):
            raise ValueError(f"ids can be checked 'now', 'later' or None (by the device), not {when!r}")
        self.size, self.when = size, when
        self._report: tuple[Tensor, torch.cuda.Event | None, Sequence[int]] | None = None

    def __call__(self, ids: Tensor) -> Tensor | None:
        """Check the ids. Return None if that is done, or a mask, bool [..], of the wrong ones if it comes later.

        Raises IndexError for an id of this call ("now") or of the last one ("later").
        """
        self.raise_late()
        when = self.when or ("later" if ids.is_cuda else "now")
        wrong = outside(ids, self.size)
        if when == "now" or torch.compiler.is_compiling():
            raise_first("id", ids, wrong, self.size)
            return None
        if ids.numel() and not ids.is_meta:
            report = _first(ids, wrong).to("cpu", non_blocking=True)  # into pinned memory, if from a GPU
            event = torch.cuda.current_stream(ids.device).record_event() if ids.is_cuda else None
            self._report = report, event, ids.shape
        return wrong

    def raise_late(self) -> None:
        """Raise IndexError if a wrong id of the last call hasn't been reported yet. Use it if no other call follows."""
        if self._report is None:
            return
        (report, event, shape), self._report = self._report, None
        if event is not None:
            event.synchronize()
        wrong, position, number = report.tolist()
        if wrong:
            error = wrong_id_error("id", number, position, shape, self.size)
            error.add_note("It came with the call before this one, whose result is NaN there. Parameters may be NaN by "
                           "now: go on from a checkpoint. check_ids='now' finds it in its own call.")  # fmt: skip
            raise error

    def __reduce__(self) -> tuple[Any, ...]:  # copies and pickles don't include a pending report
        return IdCheck, (self.size, self.when)


def _first(ids: Tensor, wrong: Tensor) -> Tensor:
    """[1 if any is wrong, flat index of the first wrong one, its id]; stays on the device of the ids."""
    flat = wrong.reshape(-1).to(torch.uint8)
    place = flat.argmax()  # the first of equal maxima
    return torch.stack([flat.take(place).long(), place, ids.reshape(-1).take(place).long()])
