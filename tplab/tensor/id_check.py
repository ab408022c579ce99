"""Chapter 07: an id outside the vocabulary is an error, never a vector of zeros.

Each rank masks the ids that aren't among its rows and trusts that another rank has them. So an id that *no* rank has
would become a vector of zeros, and a target that no rank has would cost log-sum-exp: numbers like any others, and the
training would go on. All ids are therefore looked at first:

    "now"      IndexError in this call. The default on a CPU. On a GPU the CPU then waits for the ids at every call.
    "later"    NaN in this call, and IndexError in the next one. The default on a GPU.

"later" sends three numbers from the GPU on their way and reads them when the next call begins. By then the GPU has long
passed the point where they were made, and still has the rest of the step before it: nobody waits for anybody. Every
rank sees the same ids, so all of them raise in the same call. What was learnt in between is NaN, and can't be mistaken
for a result; plain torch would stop the whole process there, with a device-side assert.

In a compiled graph there is neither: `torch._assert_async` ends the program, without the id's name.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

When = Literal["now", "later"]


def outside(ids: Tensor, size: int) -> Tensor:
    """Which of the ids [..] are not one of 0 .. size - 1: bool [..]."""
    return (ids < 0) | (ids >= size)


def wrong_id_error(what: str, number: int, position: int, shape: Sequence[int], size: int) -> IndexError:
    """What to raise: the id, where it is (`position` counts in the flat tensor), and which ids there are."""
    place: list[int] = []
    for length in reversed(shape):
        position, index = divmod(position, length)
        place.insert(0, index)
    return IndexError(
        f"{what} {number} at {place} of {list(shape)} is outside the vocabulary: its {size} ids are 0 to {size - 1}"
    )


def raise_first(what: str, ids: Tensor, wrong: Tensor, size: int) -> None:
    """Raise IndexError for the first id that `wrong`, bool [..], marks, if any. On a GPU the CPU waits for the answer.

    In a compiled graph RuntimeError. On device "meta", where ids have no values, nothing.
    """
    if ids.is_meta or not ids.numel():
        return
    if torch.compiler.is_compiling():
        torch._assert_async(~wrong.any(), f"{what} outside the vocabulary: its {size} ids are 0 to {size - 1}")
    elif wrong.any():
        _, position, number = _first(ids, wrong).tolist()
        raise wrong_id_error(what, number, position, ids.shape, size)


class IdCheck:
    """Looks at the ids of every call, at once or with the next call, as `when` says (None: by the device)."""

    def __init__(self, size: int, when: When | None = None) -> None:
        if when not in (None, "now", "later"):
            raise ValueError(f"ids can be checked 'now', 'later' or None (by the device), not {when!r}")
        self.size, self.when = size, when
        self._report: tuple[Tensor, torch.cuda.Event | None, Sequence[int]] | None = None

    def __call__(self, ids: Tensor) -> Tensor | None:
        """None if all ids were looked at and are right; else which are wrong, bool [..], for NaN to mark them.

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
        """Raise IndexError if the last call had a wrong id and it wasn't said yet. Call it where no call follows."""
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

    def __reduce__(self) -> tuple[Any, ...]:  # a copy or a pickle takes no pending report along
        return IdCheck, (self.size, self.when)


def _first(ids: Tensor, wrong: Tensor) -> Tensor:
    """[1 if any is wrong, place of the first such in the flat tensor, its id]; stays on the device of the ids."""
    flat = wrong.reshape(-1).to(torch.uint8)
    place = flat.argmax()  # of several largest the first
    return torch.stack([flat.take(place).long(), place, ids.reshape(-1).take(place).long()])
