"""When a process that died may be started again. Plain values: the caller brings the clock."""

from __future__ import annotations

from collections import deque

WINDOW_S = 600.0  # older deaths are forgotten
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0


class RestartBudget:
    """At most `limit` restarts within WINDOW_S: the first at once, then after a delay that doubles each time."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._restarts: deque[float] = deque()

    def next_delay(self, now: float) -> float | None:
        """Seconds to wait before the next start, which is counted; None when the budget is spent."""
        while self._restarts and now - self._restarts[0] > WINDOW_S:
            self._restarts.popleft()
        recent = len(self._restarts)
        if recent >= self._limit:
            return None
        self._restarts.append(now)
        return 0.0 if recent == 0 else min(FIRST_DELAY_S * 2 ** (recent - 1), LONGEST_DELAY_S)
