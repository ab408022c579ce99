"""The board: shared memory in which every rank announces what it's about to do.

Each rank has one page, which only that rank writes and every process may read:

    | state | entered | wait 0 | ... | wait 7 | slot 0 | ... | slot 255 | channel 0 | ... | channel 16383 |

A slot holds one entry, which is a collective, a send or a receive that the rank has entered. A collective's channel is
its process group. A message's channel consists of the sender, the receiver and the tag. The entries of each channel are
numbered. The slot index is computed from the channel and the number, so rank 1 finds rank 0's "all_reduce #3 of group
0" without searching. The parent can read the entry even if the rank is stuck in C++ or dead. A later entry may
overwrite an earlier one, but the number of entries per channel is stored separately and is never lost. When a thread
blocks in an entry, the entry is copied to a wait, where it stays readable even if other threads overwrite its slot. The
channels form a hash table. For `slow_link`, each channel also has the times of its latest entries. Parts of a page that
are never used take up no memory.

Ranks write here before every collective, so writing must be fast. A program enters the same few collectives again and
again, so the part of an entry that doesn't change (`Call`) is encoded only once.
"""

import math
import mmap
import os
import tempfile
import time
import zlib
from typing import NamedTuple

SLOTS = 256
SLOT_BYTES = 512
WAITS = 8  # how many threads of a rank can show what they're blocked in
CHANNELS = 1 << 14
STARTS_KEPT = 128  # how many entries of a channel a rank may write until the time of the first one is forgotten
DEFAULT_GROUP = "default"
STATES = ("starting", "running", "returned", "raised")

# The layout of a page, in four-byte words
_WORD = 4
_STATE, _ENTERED = 0, 1
_WAITS_START = 4
_SLOT_WORDS = SLOT_BYTES // _WORD
_SLOTS_START = _WAITS_START + WAITS * _SLOT_WORDS
_CHANNELS_START = _SLOTS_START + SLOTS * _SLOT_WORDS  # a channel: key of its name, number of entries so far
_KEY, _NUMBER, _LENGTH, _TEXT = 0, 1, 2, 3  # a slot or wait: key (0 if unused), number, text length, text
_STARTS_START = _CHANNELS_START + 2 * CHANNELS  # a start: number of the operation, nothing, time (two words)
_START_WORDS = 4
_PAGE_WORDS = _STARTS_START + CHANNELS * STARTS_KEPT * _START_WORDS
_ROOM = SLOT_BYTES - _TEXT * _WORD
_SEPARATOR = "\x1f"


class Entry(NamedTuple):
    """A collective, a send or a receive that a rank has entered, as read from the board.

    `channel` and `number` identify the matching entries of other ranks, because each entry is the n-th collective of a
    process group or the n-th message with its tag from one rank to another. `signature` describes the arguments that
    must match on all members. The number is 0 for a receive from any rank.

    `created` is the call site that created the process group, or DEFAULT_GROUP, or "" if there is no known group.
    """

    channel: str
    number: int
    kind: str
    signature: str
    members: tuple[int, ...]
    where: str
    peer: int = -1
    created: str = ""

    def differs_from(self, other: "Entry") -> bool:
        """Return True if `other`, another rank's entry with the same channel and number, doesn't match this one."""
        pair = {self.kind, other.kind} == {"send", "recv"}
        return not (self.signature == other.signature and (pair or self.kind == other.kind))


class Call:
    """An encoded entry without its number. It's reused every time the program executes the same line.

    members:  the ranks that must enter it
    text:     the encoded fields
    same:     the beginning of `text`, which must be identical on all members of a collective
    """

    __slots__ = ("channel", "channel_key", "members", "same", "text")

    def __init__(
        self, channel: str, kind: str, signature: str, members: tuple[int, ...], where: str, peer: int = -1,
        created: str = "",
    ) -> None:  # fmt: skip
        self.channel, self.channel_key, self.members = channel, _key(channel), members
        self.same = (_SEPARATOR.join((channel, kind, signature)) + _SEPARATOR).encode()
        others = (_SEPARATOR.join((",".join(map(str, members)), str(peer))) + _SEPARATOR).encode()
        room = _ROOM - len(self.same) - len(others) - 1
        creation = _end(created.encode(), room // 2) + _SEPARATOR.encode()
        place = _end(where.encode(), room + 1 - len(creation))
        self.text = (self.same + others + creation + place)[:_ROOM]


def _end(path: bytes, room: int) -> bytes:
    """Return the end of a path, which says the most."""
    return path[max(0, len(path) - max(0, room)) :]


def channel_of_messages(sender: int | None, receiver: int | None, tag: int | None) -> str:
    """Return the channel of the messages with this tag from `sender` (None: from any rank) to `receiver`."""
    return f"{'any' if sender is None else sender}>{receiver} tag {tag}"


def tag_of(entry: Entry) -> int:
    """Return the tag of the message that an entry describes."""
    return int(entry.channel.rpartition(" tag ")[2])


def _decode(text: bytes, number: int) -> Entry | None:
    fields = text.decode(errors="replace").split(_SEPARATOR)
    if len(fields) != 7:
        return None
    channel, kind, signature, members, peer, created, where = fields
    ranks = tuple(int(rank) for rank in members.split(",")) if members else ()
    return Entry(channel, number, kind, signature, ranks, where, int(peer), created)


def _key(channel: str) -> int:
    return zlib.crc32(channel.encode()) or 1


def _entry_key(channel_key: int, number: int) -> int:
    """Return an entry's nonzero key. The multiplier is odd, so consecutive entries of a channel get different slots."""
    return (channel_key + 2654435761 * number) & 0xFFFFFFFF or 1


def _start(page: int, place: int, number: int) -> int:
    """Return where the time of an entry is, if its channel is at `place`."""
    channel = (place - page - _CHANNELS_START) // 2
    return page + _STARTS_START + (channel * STARTS_KEPT + number % STARTS_KEPT) * _START_WORDS


class Board:
    """The pages of all ranks, memory-mapped from a file descriptor that the parent and the ranks share."""

    def __init__(self, descriptor: int, world_size: int) -> None:
        self.world_size = world_size
        self._memory = mmap.mmap(descriptor, board_bytes(world_size))
        self._words = memoryview(self._memory).cast("I")
        self._times = memoryview(self._memory).cast("d")
        self._channel_of: dict[str, int | None] = {}  # where the page of the writing rank counts each channel
        self._free_waits = list(range(WAITS))

    def close(self) -> None:
        self._words.release()
        self._times.release()
        self._memory.close()

    # Written by the rank itself

    def set_state(self, rank: int, state: str) -> None:
        self._words[rank * _PAGE_WORDS + _STATE] = STATES.index(state)

    def write(self, rank: int, call: Call, number: int) -> None:
        """Write an entry to the rank's page."""
        words, page = self._words, rank * _PAGE_WORDS
        key = _entry_key(call.channel_key, number)
        slot = key % SLOTS
        self._write(page + _SLOTS_START + slot * _SLOT_WORDS, key, call, number)
        words[page + _ENTERED] += 1
        place = self._channel_of.get(call.channel, -1)
        if place == -1:
            place = self._channel_of[call.channel] = self._place_of_channel(page, call.channel_key)
        if place is not None:
            start = _start(page, place, number)
            words[start] = 0  # readers ignore the time while it's only half written
            self._times[start // 2 + 1] = time.monotonic()
            words[start] = number
            words[place + 1] = number
            words[place] = call.channel_key

    def _write(self, start: int, key: int, call: Call, number: int) -> None:
        words, text = self._words, call.text
        words[start + _KEY] = 0  # readers ignore the entry while it's only half written
        body = (start + _TEXT) * _WORD
        self._memory[body : body + len(text)] = text
        words[start + _NUMBER] = number
        words[start + _LENGTH] = len(text)
        words[start + _KEY] = key

    def begin_wait(self, rank: int, call: Call, number: int) -> int | None:
        """Show that a thread of the rank is blocked in an entry. Returns the wait's index, or None if none is free."""
        try:
            index = self._free_waits.pop(0)
        except IndexError:
            return None
        start = rank * _PAGE_WORDS + _WAITS_START + index * _SLOT_WORDS
        self._write(start, _entry_key(call.channel_key, number), call, number)
        return index

    def end_wait(self, rank: int, index: int | None) -> None:
        if index is not None:
            self._words[rank * _PAGE_WORDS + _WAITS_START + index * _SLOT_WORDS + _KEY] = 0
            self._free_waits.insert(0, index)

    # Read by any process

    def state(self, rank: int) -> str:
        return STATES[self._words[rank * _PAGE_WORDS + _STATE]]

    def entered(self, rank: int) -> int:
        """Return the number of entries that the rank has written so far."""
        return self._words[rank * _PAGE_WORDS + _ENTERED]

    def waits(self, rank: int) -> list[Entry]:
        """Return the entries in which the rank's threads are currently blocked. Usually, there's at most one."""
        page = rank * _PAGE_WORDS + _WAITS_START
        starts = range(page, page + WAITS * _SLOT_WORDS, _SLOT_WORDS)
        return [entry for start in starts if self._words[start + _KEY] and (entry := self._read(start))]

    def has_entered(self, rank: int, entry: Entry) -> bool:
        """Return True if the rank has reached `entry` on its channel, or if it uses too many channels to tell."""
        count = self.count(rank, entry.channel)
        return count is None or count >= entry.number

    def is_joined(self, call: Call, number: int) -> bool:
        """Return True if all members have reached the entry, or if they use too many channels to tell."""
        counts = [self.count(rank, call.channel) for rank in call.members]
        return all(count is None or count >= number for count in counts)

    def count(self, rank: int, channel: str) -> int | None:
        """Return how many entries the rank has made on the channel, or None if it uses too many channels to tell."""
        key = _key(channel)
        place = self._place_of_channel(rank * _PAGE_WORDS, key)
        if place is None:
            return None
        return self._words[place + 1] if self._words[place] == key else 0

    def start_of(self, rank: int, channel: str, number: int) -> float | None:
        """Return the time when the rank wrote an entry, NaN if it hasn't yet, or None if it's been forgotten."""
        page = rank * _PAGE_WORDS
        place = self._place_of_channel(page, _key(channel))
        if place is None:
            return None
        start = _start(page, place, number)
        before, seconds, after = self._words[start], self._times[start // 2 + 1], self._words[start]
        if after > number:
            return None
        return seconds if before == after == number else math.nan

    def _place_of_channel(self, page: int, key: int) -> int | None:
        """Return the place of a channel's words, or else of the first free ones. Returns None if the table is full."""
        for probe in range(CHANNELS):
            place = page + _CHANNELS_START + 2 * ((key + probe) % CHANNELS)
            if self._words[place] in (0, key):
                return place
        return None

    def _read(self, start: int) -> Entry | None:
        key, number, length = self._words[start + _KEY], self._words[start + _NUMBER], self._words[start + _LENGTH]
        body = (start + _TEXT) * _WORD
        text = self._memory[body : body + length]
        complete = key and key == self._words[start + _KEY]
        return _decode(text, number) if complete else None

    def contradicts(self, rank: int, call: Call, number: int) -> bool:
        """Return True if `rank` has an entry with this call's channel and number, and that entry doesn't match it."""
        key = _entry_key(call.channel_key, number)
        slot = key % SLOTS
        start = rank * _PAGE_WORDS + _SLOTS_START + slot * _SLOT_WORDS
        if self._words[start + _KEY] != key:
            return False
        body = (start + _TEXT) * _WORD
        if self._memory[body : body + len(call.same)] == call.same:
            return False
        mine, other = _decode(call.text, number), self._read(start)
        same_place = other is not None and (other.channel, other.number) == (call.channel, number)
        return mine is not None and other is not None and same_place and other.differs_from(mine)

    def entries(self, rank: int) -> list[Entry]:
        """Return the rank's latest entries, at most SLOTS of them, in no particular order."""
        page = rank * _PAGE_WORDS + _SLOTS_START
        starts = range(page, page + SLOTS * _SLOT_WORDS, _SLOT_WORDS)
        return [entry for start in starts if (entry := self._read(start))]


def board_bytes(world_size: int) -> int:
    return world_size * _PAGE_WORDS * _WORD


def anonymous_file(size: int = 0) -> int:
    """Return a file descriptor of unnamed memory, so that nothing is left behind no matter how the run ends.

    On Linux, it comes from memfd_create. On other systems, it's a temporary file that has already been unlinked.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("tplab")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    if size:
        os.truncate(descriptor, size)
    return descriptor
