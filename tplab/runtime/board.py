"""The shared memory in which every rank writes what it is about to do, before it does it.

One page a rank, written by that rank alone and read by everybody:

    | state | entered | waiting | channel 0 | ... | channel 127 | slot 0 | ... | slot 255 |

A slot holds one entry: a collective (or a send or receive) that the rank has entered. An entry's place follows from its
channel and number, so that rank 1 finds rank 0's "all_reduce #3 of group 0" without searching, and the parent can still
read it when the rank is stuck in C++ or dead. A later entry may take the slot of an earlier one; how many entries of
each channel there have been is counted apart, and never lost.
"""

import mmap
import os
import struct
import tempfile
import zlib
from typing import NamedTuple

SLOTS = 256
SLOT_BYTES = 512
CHANNELS = 128
HEADER = struct.Struct("<IIII")  # state, entries so far, 1 + the slot it is blocked in (0: none), spare
CHANNEL = struct.Struct("<II")  # key of its name, entries so far
SLOT_HEADER = struct.Struct("<II")  # key, length of the text
SLOTS_START = HEADER.size + CHANNELS * CHANNEL.size
PAGE_BYTES = SLOTS_START + SLOTS * SLOT_BYTES
STATES = ("starting", "running", "returned", "raised")
_SEPARATOR = "\x1f"


class Entry(NamedTuple):
    """One collective, send or receive that a rank has entered.

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

    def encode(self) -> bytes:
        members = ",".join(map(str, self.members))
        fields = (self.channel, str(self.number), self.kind, self.signature, members, str(self.peer))
        start = _SEPARATOR.join(fields).encode() + _SEPARATOR.encode()
        where = self.where.encode()
        room = SLOT_BYTES - SLOT_HEADER.size - len(start)
        return start + where[max(0, len(where) - room) :]  # of a long path the end tells more than the beginning

    @staticmethod
    def decode(text: bytes) -> "Entry | None":
        fields = text.decode(errors="replace").split(_SEPARATOR)
        if len(fields) != 7:
            return None
        channel, number, kind, signature, members, peer, where = fields
        ranks = tuple(int(rank) for rank in members.split(",")) if members else ()
        return Entry(channel, int(number), kind, signature, ranks, where, int(peer))

    def differs_from(self, other: "Entry") -> bool:
        """Whether the other rank's entry at the same place does not belong to this one."""
        pair = {self.kind, other.kind} == {"send", "recv"}
        return not (self.signature == other.signature and (pair or self.kind == other.kind))


def _key(text: str) -> int:
    return zlib.crc32(text.encode()) or 1


def _key_of(entry: Entry) -> int:
    return _key(f"{entry.channel}:{entry.number}")


class Board:
    """The pages of all ranks, mapped from a file descriptor that parent and ranks share."""

    def __init__(self, descriptor: int, world_size: int) -> None:
        self.world_size = world_size
        self.memory = mmap.mmap(descriptor, world_size * PAGE_BYTES)
        self._channel_of: dict[str, int] = {}  # of the rank that writes here

    def close(self) -> None:
        self.memory.close()

    def state(self, rank: int) -> str:
        return STATES[self._header(rank)[0]]

    def entered(self, rank: int) -> int:
        """How many entries the rank has written so far."""
        return self._header(rank)[1]

    def set_state(self, rank: int, state: str) -> None:
        _, entered, waiting, spare = self._header(rank)
        HEADER.pack_into(self.memory, rank * PAGE_BYTES, STATES.index(state), entered, waiting, spare)

    def write(self, rank: int, entry: Entry) -> int:
        """Put an entry on the rank's page; returns its slot."""
        key = _key_of(entry)
        slot = key % SLOTS
        text = entry.encode()
        start = self._slot_start(rank, slot)
        body = start + SLOT_HEADER.size
        SLOT_HEADER.pack_into(self.memory, start, 0, 0)  # readers see no entry while it is half written
        self.memory[body : body + len(text)] = text
        SLOT_HEADER.pack_into(self.memory, start, key, len(text))
        state, entered, waiting, spare = self._header(rank)
        HEADER.pack_into(self.memory, rank * PAGE_BYTES, state, entered + 1, waiting, spare)
        self._count(rank, entry)
        return slot

    def _count(self, rank: int, entry: Entry) -> None:
        index = self._channel_of.setdefault(entry.channel, len(self._channel_of))
        if index < CHANNELS:
            place = rank * PAGE_BYTES + HEADER.size + index * CHANNEL.size
            CHANNEL.pack_into(self.memory, place, _key(entry.channel), entry.number)

    def has_entered(self, rank: int, entry: Entry) -> bool:
        """Whether the rank has come as far as `entry` on its channel (True also when there are too many to know)."""
        start = rank * PAGE_BYTES + HEADER.size
        table = CHANNEL.iter_unpack(self.memory[start : start + CHANNELS * CHANNEL.size])
        wanted = _key(entry.channel)
        free = False
        for key, count in table:
            if key == wanted:
                return count >= entry.number
            free = free or not key
        return not free

    def read(self, rank: int, slot: int, key: int | None = None) -> Entry | None:
        start = self._slot_start(rank, slot)
        found, length = SLOT_HEADER.unpack_from(self.memory, start)
        if not found or (key is not None and found != key):
            return None
        body = start + SLOT_HEADER.size
        return Entry.decode(bytes(self.memory[body : body + length]))

    def find(self, rank: int, entry: Entry) -> Entry | None:
        """The other rank's entry of the same channel and number, if it has entered it."""
        key = _key_of(entry)
        other = self.read(rank, key % SLOTS, key)
        return other if other and (other.channel, other.number) == (entry.channel, entry.number) else None

    def set_waiting(self, rank: int, slot: int | None) -> None:
        state, entered, _, spare = self._header(rank)
        HEADER.pack_into(self.memory, rank * PAGE_BYTES, state, entered, 0 if slot is None else slot + 1, spare)

    def waiting(self, rank: int) -> Entry | None:
        """The entry in which the rank is blocked now."""
        slot = self._header(rank)[2]
        return self.read(rank, slot - 1) if slot else None

    def entries(self, rank: int) -> list[Entry]:
        """What the rank has entered lately: at most SLOTS entries, in no order."""
        return [entry for slot in range(SLOTS) if (entry := self.read(rank, slot))]

    def _header(self, rank: int) -> tuple[int, int, int, int]:
        return HEADER.unpack_from(self.memory, rank * PAGE_BYTES)

    @staticmethod
    def _slot_start(rank: int, slot: int) -> int:
        return rank * PAGE_BYTES + SLOTS_START + SLOT_BYTES * slot


def board_bytes(world_size: int) -> int:
    return world_size * PAGE_BYTES


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
