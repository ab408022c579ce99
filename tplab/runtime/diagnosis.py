"""Diagnose a stuck run: which ranks are waiting, where they are waiting, and whether they can ever continue.

A rank that waits in a collective depends on the members that haven't entered it yet. It can continue only if each of
them can still arrive, either because that member is computing or because it waits for something that can itself
complete. All other waiting ranks are deadlocked, which we can tell without a time limit. The board is only read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tplab.runtime.board import Board, Entry
from tplab.runtime.failures import place, rank_names


@dataclass(frozen=True)
class RankState:
    """The state of one rank, as read from the board.

    state:    the state on the board, or "ended" if the process is gone
    waiting:  the entry that the rank is blocked in, if any
    entries:  the rank's latest entries, by channel and number
    """

    rank: int
    state: str
    waiting: Entry | None
    entries: dict[tuple[str, int], Entry]
    absent: dict[tuple[str, int], list[int]]  # for each entry: the members that haven't arrived yet


def snapshot(board: Board, ended: Sequence[int] = ()) -> list[RankState]:
    """Read the current states of all ranks from the board. `ended` lists the ranks whose process is gone."""
    states = []
    for rank in range(board.world_size):
        entries = {(entry.channel, entry.number): entry for entry in board.entries(rank)}
        absent = {
            key: [other for other in entry.members if entry.number and not board.has_entered(other, entry)]
            for key, entry in entries.items()
        }
        state = "ended" if rank in ended else board.state(rank)
        states.append(RankState(rank, state, board.waiting(rank), entries, absent))
    return states


def missing(entry: Entry, states: Sequence[RankState]) -> list[int]:
    """Return the members that haven't entered the collective or message that `entry` belongs to."""
    key = (entry.channel, entry.number)
    return next((state.absent[key] for state in states if key in state.absent), [])


def deadlocked(states: Sequence[RankState]) -> list[int]:
    """Return the ranks that are waiting for something that can never complete."""
    may_go_on = {
        state.rank
        for state in states
        if state.state in ("starting", "running") and (state.waiting is None or not state.waiting.number)
    }
    waiting = {state.rank: state.waiting for state in states if state.state == "running" and state.waiting is not None}
    while True:
        freed = {
            rank
            for rank, entry in waiting.items()
            if rank not in may_go_on and all(other in may_go_on for other in missing(entry, states))
        }
        if not freed:
            break
        may_go_on |= freed
    stuck = [rank for rank in waiting if rank not in may_go_on]
    return sorted(stuck) or _left_behind(states)


def _left_behind(states: Sequence[RankState]) -> list[int]:
    """Return the running ranks whose collective can't complete, because a member has ended without joining it.

    They may not look blocked, because NCCL waits on the GPU, and functional collectives wait when their result is used.
    """
    gone = {state.rank for state in states if state.state in ("returned", "raised", "ended")}
    return sorted(
        state.rank
        for state in states
        if state.state == "running"
        and any(
            gone.intersection(state.absent[key])
            for key, entry in state.entries.items()
            if entry.kind not in ("send", "recv")
        )
    )


def lost_messages(states: Sequence[RankState]) -> list[Entry]:
    """Return the pending receives whose sender started to send and has ended, usually without waiting for its isend.

    A message may still arrive a moment later, so the result is meaningful only if nothing has moved for a long time.
    """
    gone = {state.rank for state in states if state.state in ("returned", "raised", "ended")}
    return [
        state.waiting
        for state in states
        if state.waiting
        and state.waiting.kind == "recv"
        and state.waiting.peer in gone
        and state.waiting.number
        and not missing(state.waiting, states)
    ]


def explain(states: Sequence[RankState], stacks: dict[int, str] | None = None) -> str:
    """Describe a run that is stuck or whose collectives differ between ranks.

    stacks:  the "file:line:function" that each running rank is at
    """
    return "\n".join([*_headlines(states), *(_line_of(state, states, stacks or {}) for state in states)])


def advice(states: Sequence[RankState]) -> str:
    """Return one sentence of advice on how to fix the problem."""
    differing = _first_difference(states)
    if not differing and lost_messages(states):
        return "Keep what dist.isend returns and call its wait(): until then the message may be dropped."
    kinds = {entry.kind for entry in ([differing] if differing else _open_entries(states))}
    if kinds <= {"send", "recv"}:
        return "A send and its recv wait for each other: pair them, with the same shape, and let one side send first."
    return (
        "Every rank of a group must enter the same collectives in the same order, "
        "with tensors of the same shape and memory layout."
    )


def _headlines(states: Sequence[RankState]) -> list[str]:
    differing = _first_difference(states)
    if differing:
        if differing.kind in ("send", "recv"):
            sender, receiver = differing.members
            return [f"message #{differing.number} from rank {sender} to rank {receiver} is not the same on both sides:"]
        return [f"collective #{differing.number}{_group(differing, states)} is not the same on all ranks:"]
    lines = [
        f"rank {entry.peer} began to send message #{entry.number} to rank {entry.members[1]} and has returned; "
        f"rank {entry.members[1]} waits in {name(entry)}, and nothing comes."
        for entry in lost_messages(states)
    ]
    for entry in _open_entries(states):
        absent = missing(entry, states)
        inside = [rank for rank in entry.members if rank not in absent]
        verb = "waits" if len(inside) == 1 else "wait"
        if entry.kind in ("send", "recv"):
            sender, receiver = entry.members
            other = "sends to" if entry.kind == "recv" else "receives from"
            peer, own = (sender, receiver) if entry.kind == "recv" else (receiver, sender)
            lines.append(
                f"rank {peer} never {other} rank {own} (message #{entry.number}); rank {own} waits in {name(entry)}."
            )
        else:
            what = f"{name(entry)}{_group(entry, states)}"
            lines.append(f"{rank_names(absent)} never joined {what}; {rank_names(inside)} {verb} in it.")
    return lines


def _first_difference(states: Sequence[RankState]) -> Entry | None:
    """Return the earliest entry whose kind or signature differs from the matching entry of another member."""
    found = [
        entry
        for state in states
        for key, entry in state.entries.items()
        for other in (states[rank].entries.get(key) for rank in entry.members)
        if entry.number and other and entry.differs_from(other)
    ]
    return min(found, key=lambda entry: entry.number, default=None)


def _open_entries(states: Sequence[RankState]) -> list[Entry]:
    """Return one entry per operation that some members haven't joined. If ranks are waiting, use only their entries."""
    known: dict[tuple[str, int], Entry] = {}
    waiting = [state.waiting for state in states if state.waiting]
    entered = [entry for state in states for entry in state.entries.values()]
    for entry in waiting or sorted(entered, key=lambda entry: entry.number):
        if entry.number and missing(entry, states):
            known.setdefault((entry.channel, entry.number), entry)
    return list(known.values())


def _line_of(state: RankState, states: Sequence[RankState], stacks: dict[int, str]) -> str:
    start = f"  rank {state.rank}: "
    differing = _first_difference(states)
    mine = state.entries.get((differing.channel, differing.number)) if differing else None
    if mine:
        return f"{start}{name(mine)} at {place(mine.where)}"
    if state.waiting:
        return f"{start}waits in {name(state.waiting)}, called at {place(state.waiting.where)}"
    if state.state == "returned":
        return f"{start}has returned"
    if state.state == "raised":
        return f"{start}has raised an error"
    if state.state == "ended":
        return f"{start}is dead"
    if state.state == "starting":
        return f"{start}has not started yet"
    last = max(state.entries.values(), key=lambda entry: entry.number, default=None)
    doing = f"runs Python at {place(stacks[state.rank])}" if state.rank in stacks else "runs"
    return start + doing + (f" (last entered {name(last)})" if last and state.rank not in stacks else "")


def name(entry: Entry) -> str:
    """Describe an entry in words, such as "all_reduce #3 ([4, 8] float32, sum)" or "recv from rank 0 ([4] float32)"."""
    signature = f" ({entry.signature})" if entry.signature else ""
    if entry.kind == "send":
        return f"send to rank {entry.peer}{signature}"
    if entry.kind == "recv":
        return f"recv from {f'rank {entry.peer}' if entry.peer >= 0 else 'any rank'}{signature}"
    return f"{entry.kind} #{entry.number}{signature}"


def _group(entry: Entry, states: Sequence[RankState]) -> str:
    return "" if len(entry.members) == len(states) else f" of group {list(entry.members)}"
