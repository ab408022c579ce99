"""The results of a run, and what the ranks communicated. A `Record` is a list of `Collective` entries."""

from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple


class Transfer(NamedTuple):
    """When a transfer over a slow link began and ended, in seconds since the launch began, and the link in words."""

    start: float
    end: float
    link: str


@dataclass(frozen=True)
class Collective:
    """A collective, a send or a receive that one rank has entered.

    rank:    the rank that entered it
    kind:    all_reduce, all_gather, reduce_scatter, broadcast, reduce, gather, scatter, all_to_all, barrier, send, recv
    group:   global ranks of its process group (for send and recv: of the sender and the receiver)
    number:  n for the group's n-th collective, or for the n-th message with this tag from sender to receiver (from 1)
    shape:   shape of the tensor that this rank passed in (of the first one if it passed several)
    dtype:   dtype of that tensor, such as "float32"
    bytes:   message size as nccl-tests counts it: the size of the tensor for all_reduce, broadcast, reduce, send and
             recv, and the total size of all parts for all_gather, gather, scatter, reduce_scatter and all_to_all
    op:      reduction operation, such as "sum"
    peer:    global rank of the root, of the receiver (for send) or of the sender (for recv)
    where:   call site as "file:line:function"
    start:   when the rank entered it, in seconds since the launch began
    end:     when the blocking call, or wait(), returned, in seconds since the launch began (None if it never did)
    waited:  how many of the seconds between start and end the rank was blocked. On a GPU, this doesn't include waits of
             the stream, because the rank continues meanwhile.
    transfer: what the link did for it, if it ran on a `slow_link`
    """

    rank: int
    kind: str
    group: tuple[int, ...]
    number: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    op: str | None
    peer: int | None
    where: str
    start: float
    end: float | None
    waited: float = 0.0
    transfer: Transfer | None = None

    @property
    def numel(self) -> int:
        """Number of elements of the tensor that this rank passed in."""
        count = 1
        for size in self.shape:
            count *= size
        return count


class Total(NamedTuple):
    """How often a rank called one kind of collective, and the sum of the message sizes in bytes."""

    calls: int
    bytes: int


class Record(list[Collective]):
    """The collectives of a run, sorted by rank. For each rank, they're in the order in which the rank entered them."""

    @property
    def ranks(self) -> list[int]:
        """The ranks that entered at least one collective."""
        return sorted({collective.rank for collective in self})

    def of_rank(self, rank: int) -> list[Collective]:
        return [collective for collective in self if collective.rank == rank]

    def totals(self, rank: int | None = None) -> dict[str, Total]:
        """Return the calls and bytes per kind of collective for one rank (default: the lowest rank in the record)."""
        if rank is None:
            rank = min(self.ranks, default=0)
        totals: dict[str, Total] = {}
        for collective in self.of_rank(rank):
            calls, size = totals.get(collective.kind, Total(0, 0))
            totals[collective.kind] = Total(calls + 1, size + collective.bytes)
        return totals

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for rank in self.ranks:
            for kind, (calls, size) in self.totals(rank).items():
                rows.append((str(rank), kind, str(calls), f"{size:,}"))
        return rows

    def __repr__(self) -> str:
        if not self:
            return "Record: no collectives"
        rows = [("rank", "kind", "calls", "bytes"), *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = (
            f"{rank:>{widths[0]}}  {kind:<{widths[1]}}  {calls:>{widths[2]}}  {size:>{widths[3]}}"
            for rank, kind, calls, size in rows
        )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        if not self:
            return "<p>no collectives</p>"
        head = "".join(f"<th>{name}</th>" for name in ("rank", "kind", "calls", "bytes"))
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in self._rows())
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class Results(list[Any]):
    """The values that the ranks returned, in rank order.

    output:  the text that each rank printed, in rank order
    record:  the collectives that the ranks entered
    spans:   when each rank's function started and returned, in seconds since the launch began
    """

    def __init__(
        self, returned: list[Any], output: list[str], record: Record, spans: list[tuple[float, float]]
    ) -> None:
        super().__init__(returned)
        self.output, self.record, self.spans = output, record, spans
