"""Which encoded media are kept: what requests need, then what was used last, within a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

# Rows made ahead of the oldest request may weigh this much, or the cache's bytes if those are more.
AHEAD_BYTES = 256 * 1024**2

V = TypeVar("V")


@dataclass(slots=True)
class _Entry(Generic[V]):
    value: V
    nbytes: int
    users: set[str]


class EncoderCache(Generic[V]):
    """Values by key, each pinned by its users.

    What has users stays whatever it weighs. The rest is kept, the latest used longest, while all values together weigh
    at most `capacity` bytes; with 0 a value goes with its last user.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.nbytes = 0
        self.pinned_bytes = 0  # of those with users
        self._entries: OrderedDict[Hashable, _Entry[V]] = OrderedDict()  # the idle ones from least to most recent

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: Hashable, value: V, nbytes: int, users: Iterable[str]) -> None:
        """Keep a new value, pinned by `users`, of which there is at least one. Idle values make room."""
        if key in self._entries:
            raise ValueError(f"{key!r} is kept already: pin it")
        entry = _Entry(value, nbytes, set(users))
        if not entry.users:
            raise ValueError(f"{key!r} has no user")
        self._entries[key] = entry
        self.nbytes += nbytes
        self.pinned_bytes += nbytes
        self._make_room()

    def pin(self, key: Hashable, user: str) -> V | None:
        """The value of a key, now used by `user` as well; None when it is not kept."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if not entry.users:
            self.pinned_bytes += entry.nbytes
        entry.users.add(user)
        return entry.value

    def unpin(self, key: Hashable, user: str) -> None:
        """A user is done with a value; without any left it may go at once. Idempotent."""
        entry = self._entries.get(key)
        if entry is None or user not in entry.users:
            return
        entry.users.remove(user)
        if not entry.users:
            self.pinned_bytes -= entry.nbytes
            self._entries.move_to_end(key)
            self._make_room()

    def discard(self, key: Hashable) -> None:
        """Forget a value, used or not, if it is there: it turned out to be of no use to anyone."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.nbytes -= entry.nbytes
            self.pinned_bytes -= entry.nbytes if entry.users else 0

    def _make_room(self) -> None:
        idle = iter([key for key, entry in self._entries.items() if not entry.users])
        while self.nbytes > self.capacity and (key := next(idle, None)) is not None:
            self.nbytes -= self._entries.pop(key).nbytes
