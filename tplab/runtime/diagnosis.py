"""Diagnose a stuck run: which ranks are waiting, where they are waiting, and whether they can ever continue.

A rank that waits in a collective depends on the members that haven't entered it yet. It can continue only if each of
them can still arrive, either because that member is computing or because it waits for something that can itself
complete. For a receive from any rank, a single sender that can still arrive is enough. All other waiting ranks are
deadlocked, which we can tell without a time limit. A rank with several threads may wait in several places, and it
continues if any of these waits completes. This module only reads the board, the shared memory to which each rank writes
an entry for every collective, every send and every receive that it enters. `watch.py` ends the run and begins the
report with the sentence that says what happened.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tplab.runtime.board import DEFAULT_GROUP, Board, Entry, channel_of_messages, tag_of
from tplab.runtime.failures import place, rank_names

NEW_GROUP = "new_group"  # the channel on which all ranks create groups
_ABOUT_GROUPS = "Every rank must call new_group for every group, in the same order, even for groups that it isn't in."
NEW_LINE = "\n          "


@dataclass(frozen=True)
class RankState:
    """The state of one rank, as read from the board.

    state:    the state on the board, or "ended" if the process is gone
    waits:    the entries in which the rank is blocked, one per waiting thread
    entries:  the rank's latest entries, by channel and number
    """

    rank: int
    state: str
    waits: list[Entry]
    entries: dict[tuple[str, int], Entry]
    absent: dict[tuple[str, int], list[int]]  # which members haven't arrived yet, per entry and wait


def snapshot(board: Board, ended: Sequence[int] = ()) -> list[RankState]:
    """Read the current states of all ranks from the board. `ended` lists the ranks whose processes are gone."""
    states = []
    for rank in range(board.world_size):
        entries = {(entry.channel, entry.number): entry for entry in board.entries(rank)}
        waits = board.waits(rank)
        absent = {_key(entry): _absent(board, rank, entry) for entry in [*entries.values(), *waits]}
        state = "ended" if rank in ended else board.state(rank)
        states.append(RankState(rank, state, waits, entries, absent))
    return states


def _key(entry: Entry) -> tuple[str, int]:
    return entry.channel, entry.number


def _absent(board: Board, rank: int, entry: Entry) -> list[int]:
    if entry.number:
        return [other for other in entry.members if not board.has_entered(other, entry)]
    others = [other for other in entry.members if other != rank]
    for sender in others:
        channel = channel_of_messages(sender, rank, tag_of(entry))
        sent, received = board.count(sender, channel), board.count(rank, channel)
        if sent is None or received is None or sent > received:
            return []  # there is a message to receive
    return others


def missing(entry: Entry, states: Sequence[RankState]) -> list[int]:
    """Return the members that haven't entered the collective or message that `entry` belongs to."""
    key = _key(entry)
    return next((state.absent[key] for state in states if key in state.absent), [])


def deadlocked(states: Sequence[RankState], can_act: Sequence[int] = ()) -> list[int]:
    """Return the ranks that are waiting for something that can never complete.

    can_act    the ranks that wait in one thread but can still make progress in another
    """
    may_go_on = {
        state.rank
        for state in states
        if state.state in ("starting", "running") and (not state.waits or state.rank in can_act)
    }
    waiting = {state.rank: state.waits for state in states if state.state == "running" and state.waits}
    while True:
        freed = {
            rank
            for rank, entries in waiting.items()
            if rank not in may_go_on and any(_can_complete(entry, may_go_on, states) for entry in entries)
        }
        if not freed:
            break
        may_go_on |= freed
    stuck = [rank for rank in waiting if rank not in may_go_on]
    return sorted(stuck) or _left_behind(states)


def _can_complete(entry: Entry, may_go_on: set[int], states: Sequence[RankState]) -> bool:
    absent = missing(entry, states)
    arriving = [rank in may_go_on for rank in absent]
    return (not absent and entry.kind == "recv") or (all(arriving) if entry.number else any(arriving))


def _left_behind(states: Sequence[RankState]) -> list[int]:
    """Return the running ranks with a collective that can't complete because a member has ended without joining it.

    These ranks may not look blocked, because NCCL waits on the GPU, and a functional collective waits only when its
    result is used.
    """
    gone = {state.rank for state in states if state.state in ("returned", "raised", "ended")}
    return sorted(
        state.rank
        for state in states
        if state.state == "running"
        and any(
            gone.intersection(state.absent[key])
            for key, entry in state.entries.items()
            if entry.kind not in ("send", "recv") and entry.number and state.rank in entry.members
        )
    )


def lost_messages(states: Sequence[RankState]) -> list[Entry]:
    """Return the pending receives whose sender started its send and then ended, usually without waiting for its isend.

    Such a message may still arrive a moment later, so rely on the result only if no rank has made progress for a while.
    """
    gone = {state.rank for state in states if state.state in ("returned", "raised", "ended")}
    return [
        entry
        for state in states
        for entry in state.waits
        if entry.kind == "recv" and entry.number and entry.peer in gone and not missing(entry, states)
    ]


def unmatched_messages(states: Sequence[RankState]) -> list[Entry]:
    """Return the sends without a receive and the receives without a send, as far as the ranks have entered them."""
    return [entry for entry in _open_entries(states) if entry.kind in ("send", "recv")]


def explain(states: Sequence[RankState], stacks: dict[int, str] | None = None) -> str:
    """Describe a run that is stuck or whose collectives differ between ranks.

    stacks:  where each running rank is, as "file:line:function"
    """
    lines = (_line_of(state, states, stacks or {}) for state in states)
    return "\n".join([*_headlines(states), *lines])


def skipped_groups(board: Board) -> str:
    """Describe a finished run in which some ranks created fewer groups than others. Return "" for any other run.

    gloo lets the members of a group go on without the other ranks. NCCL may wait for them, and torch requires all ranks
    to call new_group: pytorch.org/docs/stable/distributed.html#groups.
    """
    counts = [board.count(rank, NEW_GROUP) for rank in range(board.world_size)]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts) or len(set(known)) == 1:
        return ""
    skipped = [rank for rank, count in enumerate(known) if count < max(known)]
    first = min(known) + 1
    entries = (entry for rank in range(board.world_size) for entry in board.entries(rank))
    created = next((entry for entry in entries if _key(entry) == (NEW_GROUP, first)), None)
    where = [f"  created at {place(created.where)}"] if created else []
    what = name(created) if created else f"{NEW_GROUP} #{first}"
    calls = (f"  rank {rank}: {count} call{'s' * (count != 1)} of {NEW_GROUP}" for rank, count in enumerate(known))
    return "\n".join([f"{rank_names(skipped)} never joined {what}.", *where, *calls, _ABOUT_GROUPS])


def advice(states: Sequence[RankState]) -> str:
    """Return one sentence of advice on how to fix the problem."""
    differing = _first_difference(states)
    if not differing and lost_messages(states):
        return "Keep the handle that dist.isend returns, and call its wait(). Until then, the message may be dropped."
    kinds = {entry.kind for entry in ([differing] if differing else _open_entries(states))}
    if kinds == {"new_group"}:
        return _ABOUT_GROUPS
    if not differing and any(_has_twin(entry, states) for state in states for entry in state.waits):
        return (
            "Some ranks are in more than one group of the same ranks, so the order of these groups' collectives "
            "matters. It must be the same on every rank."
        )
    if kinds <= {"send", "recv"}:
        return (
            "Every send needs a recv with the same shape and tag. If two ranks send to each other, start both "
            "messages before you wait for either of them (dist.batch_isend_irecv), or have one side send first."
        )
    return (
        "Every rank of a group must call the same collectives in the same order, "
        "with tensors of the same shape and memory layout."
    )


def _headlines(states: Sequence[RankState]) -> list[str]:
    differing = _first_difference(states)
    if differing:
        if differing.kind in ("send", "recv"):
            sender, receiver = differing.members
            return [f"message #{differing.number} from rank {sender} to rank {receiver} is not the same on both sides:"]
        if differing.channel == NEW_GROUP:
            return [f"the ranks don't create the same groups in the same order (new_group #{differing.number}):"]
        return [f"collective #{differing.number}{_group(differing, states)} is not the same on all ranks:"]
    lines = [
        f"rank {entry.peer} began to send message #{entry.number} to rank {entry.members[1]} and has returned; "
        f"rank {entry.members[1]} is waiting in {name(entry)}, but the message never arrives."
        for entry in lost_messages(states)
    ]
    return list(dict.fromkeys([*lines, *(_headline(entry, states) for entry in _open_entries(states))]))


def _headline(entry: Entry, states: Sequence[RankState]) -> str:
    absent = missing(entry, states)
    if not entry.number:
        (own,) = (state.rank for state in states if entry in state.waits)
        senders = f"rank {absent[0]} never sends" if len(absent) == 1 else f"none of {rank_names(absent)} sends"
        return f"{senders} to rank {own} with tag {tag_of(entry)}; rank {own} is waiting in {name(entry)}."
    if entry.kind in ("send", "recv"):
        sender, receiver = entry.members
        if other := _with_another_tag(entry, states):
            sent, expected = (tag_of(other), tag_of(entry)) if entry.kind == "recv" else (tag_of(entry), tag_of(other))
            return (
                f"rank {sender} sends to rank {receiver} with tag {sent}, "
                f"but rank {receiver} expects a message with tag {expected}."
            )
        does = "sends to" if entry.kind == "recv" else "receives from"
        peer, own = (sender, receiver) if entry.kind == "recv" else (receiver, sender)
        return f"rank {peer} never {does} rank {own} (message #{entry.number}); rank {own} is waiting in {name(entry)}."
    inside = [states[rank] for rank in entry.members if rank not in absent]
    gone = {"returned": "returned", "raised": "failed", "ended": "ended"}
    waiting = [state.rank for state in inside if _key(entry) in map(_key, state.waits) and state.state not in gone]
    waiting = waiting or [state.rank for state in inside if state.state not in gone]
    clauses = [f"{rank_names(absent)} never joined {name(entry)}{_group(entry, states)}"]
    if waiting:
        clauses.append(f"{rank_names(waiting)} {'is' if len(waiting) == 1 else 'are'} waiting in it")
    for end, verb in gone.items():
        if ranks := [state.rank for state in inside if state.state == end]:
            clauses.append(f"{rank_names(ranks)} joined it and {'has' if len(ranks) == 1 else 'have'} {verb}")
    return "; ".join(clauses) + "."


def _with_another_tag(entry: Entry, states: Sequence[RankState]) -> Entry | None:
    """Return a pending send for this receive (or a receive for this send) that differs only in its tag, or None."""
    (absent,) = missing(entry, states) or (None,)
    if absent is None:
        return None
    others = [
        other
        for other in states[absent].entries.values()
        if other.members == entry.members and other.kind in ("send", "recv") and other.kind != entry.kind
        if missing(other, states)
    ]
    return min(others, key=lambda other: other.number, default=None)


def _first_difference(states: Sequence[RankState]) -> Entry | None:
    """Return the earliest entry whose kind or signature differs from the matching entry of another rank.

    All ranks must create every group, even the groups they aren't in.
    """
    found = [
        entry
        for state in states
        for key, entry in state.entries.items()
        for rank in (range(len(states)) if entry.channel == NEW_GROUP else entry.members)
        for other in [states[rank].entries.get(key)]
        if entry.number and other and entry.differs_from(other)
    ]
    return min(found, key=lambda entry: entry.number, default=None)


def _open_entries(states: Sequence[RankState]) -> list[Entry]:
    """Return one entry per operation that some members haven't joined. If any ranks wait, use only their waits."""
    known: dict[tuple[str, int], Entry] = {}
    waiting = [entry for state in states for entry in state.waits]
    entered = [entry for state in states for entry in state.entries.values() if entry.number]
    for entry in waiting or sorted(entered, key=lambda entry: entry.number):
        if missing(entry, states):
            known.setdefault(_key(entry), entry)
    return list(known.values())


def _line_of(state: RankState, states: Sequence[RankState], stacks: dict[int, str]) -> str:
    start = f"  rank {state.rank}: "
    differing = _first_difference(states)
    mine = state.entries.get((differing.channel, differing.number)) if differing else None
    if mine:
        return f"{start}{name(mine)} at {place(mine.where)}"
    if state.state == "returned":
        return f"{start}has returned"
    if state.waits and state.state != "ended":
        waits = (f"{name(entry)}, called at {place(entry.where)}{_which_group(entry, states)}" for entry in state.waits)
        return f"{start}is waiting in {f'{NEW_LINE}and in '.join(waits)}"
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
    return short_name(entry) + (f" ({entry.signature})" if entry.signature else "")


def short_name(entry: Entry) -> str:
    """Name an entry without its arguments, such as "all_reduce #3" or "recv from any rank with tag 7"."""
    if entry.kind not in ("send", "recv"):
        return f"{entry.kind} #{entry.number}"
    peer = f"rank {entry.peer}" if entry.peer >= 0 else "any rank"
    tag = f" with tag {tag_of(entry)}" if tag_of(entry) else ""
    return f"{entry.kind} {'to' if entry.kind == 'send' else 'from'} {peer}{tag}"


def _group(entry: Entry, states: Sequence[RankState]) -> str:
    """Describe the group of a collective, as in " of group [0, 1]". Returns "" for the only group of all ranks."""
    everyone = len(entry.members) == len(states) and not _has_twin(entry, states)
    return "" if everyone or entry.kind == NEW_GROUP else f" of group {list(entry.members)}"


def _which_group(entry: Entry, states: Sequence[RankState]) -> str:
    """Say where the group of a collective was created if the ranks use another group of the same ranks, else ""."""
    if not _has_twin(entry, states):
        return ""
    created = entry.created == DEFAULT_GROUP
    return NEW_LINE + ("in the default group" if created else f"in the group created at {place(entry.created)}")


def _has_twin(entry: Entry, states: Sequence[RankState]) -> bool:
    """Return True if the ranks have also used a different group that consists of the same ranks."""
    entered = (other for state in states for other in (*state.waits, *state.entries.values()))
    groups = {other.channel for other in entered if other.members == entry.members and other.created}
    return bool(entry.created and groups - {entry.channel})
