"""The file that tells the ranks what to run. It may be larger than the 2 GiB that one read or write can transfer.
It consists of three parts:

| size of the settings | settings | function and arguments |
"""

import mmap
import os
import pickle
from typing import Any

_SIZE_BYTES = 8


def write(descriptor: int, given: dict[str, Any], call: memoryview) -> None:
    """Write the settings of the run, followed by the call, which `transport.dumps` has serialized."""
    settings = pickle.dumps(given)
    for part in (len(settings).to_bytes(_SIZE_BYTES, "little"), settings, call):
        view = memoryview(part)
        while view:
            view = view[os.write(descriptor, view) :]


def read(descriptor: int) -> tuple[dict[str, Any], memoryview]:
    """Return the settings and the call that `write` wrote."""
    data = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
    end = _SIZE_BYTES + int.from_bytes(data[:_SIZE_BYTES], "little")
    return pickle.loads(data[_SIZE_BYTES:end]), data[end:]
