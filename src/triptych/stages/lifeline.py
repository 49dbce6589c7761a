"""How a stage process learns that its server is gone: standard input is a pipe that only the server holds open."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class Lifeline:
    """Watches a pipe for its end, which comes even when the server is killed with SIGKILL.

    `cut` turns true at once and the loop leaves by itself. A process that cannot (it is loading, or stuck in a step)
    is ended after `grace_s`: `last_resort` runs in the watching thread, then the process exits.
    """

    def __init__(self, fd: int, *, grace_s: float, last_resort: Callable[[], None]) -> None:
        self.fd = fd
        self._grace_s = grace_s
        self._last_resort = last_resort
        self._cut = threading.Event()
        self._released = threading.Event()
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    @property
    def cut(self) -> bool:
        return self._cut.is_set()

    def release(self) -> None:
        """The process is leaving by itself: no last resort is needed."""
        self._released.set()

    def _watch(self) -> None:
        while os.read(self.fd, 4096):
            continue  # the server writes nothing; whatever else does is of no interest
        self._cut.set()
        if self._released.wait(self._grace_s):
            return
        try:
            self._last_resort()
        finally:
            os._exit(1)
