"""When one request reached what in one stage. It goes with the last message that the stage sends of the request."""

from __future__ import annotations

from typing import Self

import msgspec


class StageTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds before the message that carries them, so that no two clocks have to agree. None: it never came to that.

    `ready` is when the request had what it needs to begin, `started` when its first step began, `first` when its first
    text token or codec frame was drawn, or its first chunk decoded.
    """

    ready: float | None = None
    started: float | None = None
    first: float | None = None

    @classmethod
    def until(cls, now: float, *, ready: float | None, started: float | None, first: float | None) -> Self:
        """Out of instants on the stage's own clock, for a message that is sent `now`."""
        return cls(
            ready=None if ready is None else now - ready,
            started=None if started is None else now - started,
            first=None if first is None else now - first,
        )
