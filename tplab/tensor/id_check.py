"""Chapter 07: an id outside the vocabulary is an error, never a vector of zeros.

Each rank masks the ids that aren't among its rows and assumes that another rank has them. So an id that *no* rank has
would become a vector of zeros, and a target that no rank has would get log-sum-exp as its loss. Both look like ordinary
values, so training would continue. That's why all ids are checked first.

On a CPU, a wrong id raises IndexError. On a GPU, the CPU would have to wait for the answer in every call, so the GPU
checks the ids itself (`torch._assert_async`), and the CPU goes on. As in plain torch, a wrong id then stops the
process. A compiled graph checks ids in the same way. All ranks see the same ids, so all of them stop.
"""

import torch
from torch import Tensor


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


def raise_first(what: str, ids: Tensor, wrong: Tensor, size: int) -> None:
    """Raise IndexError for the first id marked in `wrong`, bool [..], if there is one.

    On a GPU, and in a compiled graph, the program stops without naming the id. On device "meta", where ids have no
    values, nothing is checked.
    """
    valid = f"outside the vocabulary: its {size} ids are 0 to {size - 1}"
    if ids.is_cuda or torch.compiler.is_compiling():
        torch._assert_async(~wrong.any(), f"{what} {valid}")
    elif not ids.is_meta and wrong.any():
        place = wrong.nonzero()[0].tolist()
        raise IndexError(f"{what} {ids[tuple(place)]} at {place} of {list(ids.shape)} is {valid}")
