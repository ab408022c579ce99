"""Times as the checks of this chapter compare them."""

from typing import Any

import torch
from torch import Tensor


def in_microseconds(seconds: Any) -> Any:
    """A float64 tensor; anything that is no number stays as it is."""
    if isinstance(seconds, bool):
        return seconds
    if isinstance(seconds, (int, float)) or (isinstance(seconds, Tensor) and seconds.numel() == 1):
        return torch.as_tensor(seconds, dtype=torch.float64).detach().reshape(()) * 1e6
    return seconds
