"""Decoded media by content, in shared memory: kept while a request uses it, and after that within a byte budget."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from triptych.connectors import segments
from triptych.media.contract import MediaFeatures


@dataclass(slots=True, eq=False)
class CachedFeatures:
    """One decoded part, without the sound of a video, which is a part of its own."""

    features: MediaFeatures
    num_bytes: int
    has_sound: bool
    users: int = 0


class FeatureCache:
    """Least recently used first out. What is in use is never unlinked, and counts in the budget all the same."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_digest: OrderedDict[bytes, CachedFeatures] = OrderedDict()
        self._num_bytes = 0

    def acquire(self, digest: bytes) -> CachedFeatures | None:
        """What is kept under that digest, now with a user more; None if nothing is.

        What somebody else has removed is kept no longer: systemd does so when a user logs out (RemoveIPC).
        """
        entry = self._by_digest.get(digest)
        if entry is None:
            return None
        if not segments.exists(entry.features.features.segment):
            self._forget(digest)
            return None
        entry.users += 1
        self._by_digest.move_to_end(digest)
        return entry

    def add(self, entry: CachedFeatures) -> CachedFeatures:
        """Keep a new entry and return it with one user; or what is already there, and the new one's memory is freed."""
        there = self.acquire(entry.features.digest)
        if there is not None:
            segments.unlink(entry.features.features.segment)
            return there
        entry.users = 1
        self._by_digest[entry.features.digest] = entry
        self._num_bytes += entry.num_bytes
        self._evict(self._max_bytes)
        return entry

    def release(self, entry: CachedFeatures) -> None:
        """One user less."""
        entry.users -= 1
        self._evict(self._max_bytes)

    def shrink(self) -> None:
        """Free all that nobody uses."""
        self._evict(0)

    def clear(self) -> None:
        """Free everything, even what is in use."""
        for entry in self._by_digest.values():
            segments.unlink(entry.features.features.segment)
        self._by_digest.clear()
        self._num_bytes = 0

    def _evict(self, max_bytes: int) -> None:
        if self._num_bytes <= max_bytes:
            return
        for digest, entry in list(self._by_digest.items()):
            if entry.users <= 0:
                self._forget(digest)
                if self._num_bytes <= max_bytes:
                    return

    def _forget(self, digest: bytes) -> None:
        entry = self._by_digest.pop(digest)
        self._num_bytes -= entry.num_bytes
        segments.unlink(entry.features.features.segment)
