"""The shared memory in which every rank writes what it is about to do, before it does it.

One page a rank, written by that rank alone and read by everybody:

    | state | entered | waiting | channel 0 | ... | channel 127 | slot 0 | ... | slot 255 |

A slot holds one entry: a collective (or a send or receive) that the rank has entered. An entry's place follows from its
channel and number, so that rank 1 finds rank 0's "all_reduce #3 of group 0" without searching, and the parent can still
read it when the rank is stuck in C++ or dead. A later entry may take the slot of an earlier one; how many entries of
each channel there have been is counted apart, and never lost.

Ranks write here in front of every collective, so that this must be quick: a program enters the same few collectives
again and again, and what stays the same about one (`Call`) is put into words once.
"""

import mmap
import os
import tempfile
import zlib
from typing import NamedTuple

SLOTS = 256
SLOT_BYTES = 512
CHANNELS = 128
STATES = ("starting", "running", "returned", "raised")

# A page in words of four bytes
_WORD = 4
_STATE, _ENTERED, _WAITING = 0, 1, 2  # waiting: 1 + the slot it is blocked in (0: none)
_CHANNELS_START = 4  # each: key of its name, entries so far
_SLOTS_START = _CHANNELS_START + 2 * CHANNELS
_SLOT_WORDS = SLOT_BYTES // _WORD
_KEY, _NUMBER, _LENGTH, _TEXT = 0, 1, 2, 3  # a slot: key of channel and number, number, length of the text, the text
_PAGE_WORDS = _SLOTS_START + SLOTS * _SLOT_WORDS
_ROOM = SLOT_BYTES - _TEXT * _WORD
_SEPARATOR = "\x1f"


class Entry(NamedTuple):
    """One collective, send or receive that a rank has entered, as others read it.

    `channel` and `number` say which entries of other ranks belong to it: the n-th collective of a process group, or the
    n-th message from one rank to another. `signature` holds what must be the same on all members.
    """

    channel: str
    number: int
    kind: str
    signature: str
    members: tuple[int, ...]
    where: str
    peer: int = -1

    def differs_from(self, other: "Entry") -> bool:
        """Whether the other rank's entry at the same place does not belong to this one."""
        pair = {self.kind, other.kind} == {"send", "recv"}
        return not (self.signature == other.signature and (pair or self.kind == other.kind))


class Call:
    """An entry but for its number, encoded: what is the same each time the program passes the same line.

    text:  the fields as bytes
    same:  how it begins on every member of a collective
    """

    __slots__ = ("channel", "channel_key", "same", "text")

    def __init__(
        self, channel: str, kind: str, signature: str, members: tuple[int, ...], where: str, peer: int = -1
    ) -> None:
        self.channel, self.channel_key = channel, _key(channel)
        self.same = (_SEPARATOR.join((channel, kind, signature)) + _SEPARATOR).encode()
        others = (_SEPARATOR.join((",".join(map(str, members)), str(peer))) + _SEPARATOR).encode()
        place = where.encode()
        room = _ROOM - len(self.same) - len(others)
        text = self.same + others + place[max(0, len(place) - room) :]  # of a long path the end tells more
        self.text = text[:_ROOM]


def _decode(text: bytes, number: int) -> Entry | None:
    fields = text.decode(errors="replace").split(_SEPARATOR)
    if len(fields) != 6:
        return None
    channel, kind, signature, members, peer, where = fields
    ranks = tuple(int(rank) for rank in members.split(",")) if members else ()
    return Entry(channel, number, kind, signature, ranks, where, int(peer))


def _key(channel: str) -> int:
    return zlib.crc32(channel.encode()) or 1


def _entry_key(channel_key: int, number: int) -> int:
    """Never 0. The multiplier is odd: entries of a channel that follow one another have slots of their own."""
    return (channel_key + 2654435761 * number) & 0xFFFFFFFF or 1


class Board:
    """The pages of all ranks, mapped from a file descriptor that parent and ranks share."""

    def __init__(self, descriptor: int, world_size: int) -> None:
        self.world_size = world_size
        self._memory = mmap.mmap(descriptor, board_bytes(world_size))
        self._words = memoryview(self._memory).cast("I")
        self._channel_of: dict[str, int] = {}  # of the rank that writes here

    def close(self) -> None:
        self._words.release()
        self._memory.close()

    # Written by the rank itself

    def set_state(self, rank: int, state: str) -> None:
        self._words[rank * _PAGE_WORDS + _STATE] = STATES.index(state)

    def write(self, rank: int, call: Call, number: int) -> int:
        """Put an entry on the rank's page; returns its slot."""
        words, page, text = self._words, rank * _PAGE_WORDS, call.text
        key = _entry_key(call.channel_key, number)
        slot = key % SLOTS
        start = page + _SLOTS_START + slot * _SLOT_WORDS
        words[start + _KEY] = 0  # readers see no entry while it is half written
        body = (start + _TEXT) * _WORD
        self._memory[body : body + len(text)] = text
        words[start + _NUMBER] = number
        words[start + _LENGTH] = len(text)
        words[start + _KEY] = key
        words[page + _ENTERED] += 1
        index = self._channel_of.get(call.channel)
        if index is None:
            index = self._channel_of[call.channel] = len(self._channel_of)
        if index < CHANNELS:
            place = page + _CHANNELS_START + 2 * index
            words[place + 1] = number
            words[place] = call.channel_key
        return slot

    def set_waiting(self, rank: int, slot: int | None) -> None:
        self._words[rank * _PAGE_WORDS + _WAITING] = 0 if slot is None else slot + 1

    # Read by everybody

    def state(self, rank: int) -> str:
        return STATES[self._words[rank * _PAGE_WORDS + _STATE]]

    def entered(self, rank: int) -> int:
        """How many entries the rank has written so far."""
        return self._words[rank * _PAGE_WORDS + _ENTERED]

    def waiting(self, rank: int) -> Entry | None:
        """The entry in which the rank is blocked now."""
        slot = self._words[rank * _PAGE_WORDS + _WAITING]
        return self.read(rank, slot - 1) if slot else None

    def has_entered(self, rank: int, entry: Entry) -> bool:
        """Whether the rank has come as far as `entry` on its channel (True also when there are too many to know)."""
        start = rank * _PAGE_WORDS + _CHANNELS_START
        wanted = _key(entry.channel)
        free = False
        for place in range(start, start + 2 * CHANNELS, 2):
            if self._words[place] == wanted:
                return self._words[place + 1] >= entry.number
            free = free or not self._words[place]
        return not free

    def read(self, rank: int, slot: int) -> Entry | None:
        start = rank * _PAGE_WORDS + _SLOTS_START + slot * _SLOT_WORDS
        key, number, length = self._words[start + _KEY], self._words[start + _NUMBER], self._words[start + _LENGTH]
        body = (start + _TEXT) * _WORD
        text = self._memory[body : body + length]
        complete = key and key == self._words[start + _KEY]
        return _decode(text, number) if complete else None

    def find_other(self, rank: int, call: Call, number: int) -> Entry | None:
        """What the other rank has entered at the place of this call, if it does not read the same."""
        key = _entry_key(call.channel_key, number)
        slot = key % SLOTS
        start = rank * _PAGE_WORDS + _SLOTS_START + slot * _SLOT_WORDS
        if self._words[start + _KEY] != key:
            return None
        body = (start + _TEXT) * _WORD
        if self._memory[body : body + len(call.same)] == call.same:
            return None
        other = self.read(rank, slot)
        return other if other and (other.channel, other.number) == (call.channel, number) else None

    def entries(self, rank: int) -> list[Entry]:
        """What the rank has entered lately: at most SLOTS entries, in no order."""
        return [entry for slot in range(SLOTS) if (entry := self.read(rank, slot))]


def board_bytes(world_size: int) -> int:
    return world_size * _PAGE_WORDS * _WORD


def anonymous_file(size: int = 0) -> int:
    """A file descriptor of memory without a name, so that nothing is left behind however the run ends.

    Linux has memfd_create; elsewhere it is a temporary file that has lost its name already.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("tplab")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    if size:
        os.truncate(descriptor, size)
    return descriptor
