"""Chapter 11: the backward pass of an MLP on the clock, in an order that somebody chose.

Without its nonlinearity, the MLP is Z = X A and Y = Z B, with A split by columns and B by rows. Going backward, each
rank runs four matmuls, and the ranks sum dX:

    dZ = dY Bᵀ      dB = Zᵀ dY      dX = dZ Aᵀ      dA = Xᵀ dZ

    start    sends dX to the other ranks, which keeps the wire busy but not the rank
    wait     returns once dX has been summed

    play(mlp_backward(["dZ", "dB", "dX", "start", "dA", "wait"])).total     # 23 with the default message
"""

from collections.abc import Sequence

from tplab.cost.clock import Operation

NEEDS = {"dZ": ("dY",), "dB": ("dY",), "dX": ("dZ",), "dA": ("dZ",), "start": ("dX",), "wait": ("message",)}
INSTANT = ("start", "wait")
MATMUL = 5.0  # how long each of the other steps takes


def mlp_backward(order: Sequence[str], *, message: float = 8.0) -> list[Operation[str]]:
    """Return the operations of a backward pass for `tplab.cost.clock.play`.

    order:    some of the names in NEEDS, each once. The message goes on the wire after "start"
    message:  how long the message takes

    Raises ValueError for a name that isn't in NEEDS.
    """
    operations = [Operation("dY", 0.0)]
    for name in order:
        if name not in NEEDS:
            raise ValueError(f"{name!r} is none of the steps of this backward pass, which are {', '.join(NEEDS)}")
        operations.append(Operation(name, 0.0 if name in INSTANT else MATMUL, NEEDS[name]))
        if name == "start":
            operations.append(Operation("message", message, ("start",), lane="wire"))
    return operations
