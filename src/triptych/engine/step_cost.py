"""What a step takes, learnt from the steps that ran. Numbers only: no tensors, no clock."""

from __future__ import annotations

import sys

from triptych.engine.batch import ScheduledBatch

UNLIMITED = sys.maxsize
NEW = 0.1  # how much a step counts against all those before it


class StepCost:
    """Seconds of a step with decode rows only, and of each prefill row on top of that.

    The former follows the number of running requests by itself: that changes by one at a time, and slowly.
    """

    def __init__(self) -> None:
        self.decode_s = 0.0  # 0: none has run
        self._prefill_s = 0.0
        self._prefill_rows = 0.0

    def observe(self, batch: ScheduledBatch, seconds: float) -> None:
        """`batch` has run, in so many seconds."""
        num_rows = sum(row.num_tokens for row in batch.rows if row.num_tokens > 1)
        if num_rows:
            # Sums, not a mean of quotients: of a short piece much is the step's own time.
            self._prefill_s += max(0.0, seconds - self.decode_s) - NEW * self._prefill_s
            self._prefill_rows += num_rows - NEW * self._prefill_rows
        elif self.decode_s:
            self.decode_s += NEW * (seconds - self.decode_s)
        else:
            self.decode_s = seconds

    def prefill_rows(self, now: float, due_at: float) -> int:
        """How many prefill rows may stand in a step that begins at `now` beside a decode row that is due at `due_at`.

        `UNLIMITED` while it is not known what they take.
        """
        if not self._prefill_s:
            return UNLIMITED
        return int(max(0.0, due_at - now) * self._prefill_rows / self._prefill_s)
